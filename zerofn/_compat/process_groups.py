"""Process groups of `torch.distributed`: all that are open, and how many collectives were begun on one."""

from __future__ import annotations

import time
from typing import Any


def open_groups(library: Any) -> list[Any]:
    """All process groups of this process, whoever made them. `library` is `torch.distributed.distributed_c10d`."""
    return list(library._world.pg_map)


def begun_on(pg: Any) -> int:
    """How many collectives this rank has begun on a process group, which may have a backend for each of its devices.

    Where a backend does not count them, a number that differs from all before: there may have been one.
    """
    found = 0
    try:
        for device in pg._device_types:
            found += pg._get_backend(device)._get_sequence_number_for_group()
        return found
    except RuntimeError:
        return time.monotonic_ns()
