"""Memory that nobody has written holds NaN, or the largest integer: what reads it gives a number that no test expects.

`torch.empty` gives memory as it was, which is often zero or what the last test has left there, so that a state which
takes it for a value passes. Torch fills such memory only in its deterministic mode, which also chooses other kernels
for a few operators; of those that have none it warns, which says nothing of this library.
"""

from __future__ import annotations

import torch

NO_OTHER_KERNEL = ".* does not have a deterministic implementation"


def fill() -> None:
    """Have torch fill what it allocates, in this process, from here on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
