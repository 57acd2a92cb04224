"""`torch.manual_seed`, which tests call some ten thousand times, without what it does for devices that are not there.

For each kind of such a device it keeps the stack of its caller, in case that the device comes later: half a millisecond
from inside of pytest.
"""

from __future__ import annotations

import torch


def seed_what_is_there() -> None:
    """Have `torch.manual_seed` seed no device that is not there, in this process, from here on."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
