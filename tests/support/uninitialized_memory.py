"""Memory that nobody has written holds NaN, or the largest integer: what reads it gives a number that no test expects.

`torch.empty` gives memory as it was, which is often zero or what the last test has left there, so that a state which
takes it for a value passes. Torch fills such memory only in its deterministic mode, which also chooses other kernels
for a few operators; of those that have none it warns, which says nothing of this library.
"""

from __future__ import annotations

from typing import Any

import torch

from zerofn.ranks import launch as _launch  # inside: what is sent to ranks is wrapped
from zerofn.ranks.fork_server import pack  # inside: what ranks have before they begin

NO_OTHER_KERNEL = ".* does not have a deterministic implementation"


def fill() -> None:
    """Have torch fill what it allocates, in this process, from here on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def fill_in_ranks() -> None:
    """Have ranks of `zf.launch` fill it too: before they read their arguments, and hence before they compute."""
    _launch.pack = lambda fn, args: pack(fn, _Filled(args))


class _Filled(tuple):
    """Arguments of a rank."""

    def __reduce__(self) -> Any:
        return _filled, (tuple(self),)


def _filled(args: tuple) -> tuple:
    fill()
    return args
