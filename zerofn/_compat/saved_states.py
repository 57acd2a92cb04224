"""`torch.load` with its defaults makes a state: it calls `state_from`, and no other function of this package.

The files of `torch.save(state)` have the name of this module in them, so it stays.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.serialization import add_safe_globals


def state_from(form: int, *parts: Any) -> Any:
    """The `State` that was saved as these parts, which are tensors, numbers, text and containers of them."""
    # By name, since the module that it is in needs this one.
    return importlib.import_module("zerofn.core.state").restored(form, *parts)


def let_torch_load_states() -> None:
    """Have `torch.load(path)`, which takes no function that it does not know, take `state_from`."""
    add_safe_globals([state_from])
