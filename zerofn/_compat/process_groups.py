"""Process groups of `torch.distributed`: all that are open, and how many collectives were begun on one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def open_groups(library: Any) -> list[Any]:
    """All process groups of this process, whoever made them. `library` is `torch.distributed.distributed_c10d`."""
    return list(library._world.pg_map)


def begun_on(groups: Sequence[Any]) -> int:
    """How many collectives this rank has begun on process groups, which may have a backend for each of their devices.

    Where a backend does not count them, a number that differs from all before: there may have been one.
    """
    found = 0
    try:
        for pg in groups:
            for device in pg._device_types:
                found += pg._get_backend(device)._get_sequence_number_for_group()
        return found
    except RuntimeError:
        return time.monotonic_ns()
