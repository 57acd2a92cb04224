"""Process groups of `torch.distributed`: all that are open, one made by its members, and what was begun on one."""

from __future__ import annotations

import time
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from .functorch import uncompiled

_PG = attrgetter("pg")


@uncompiled
def begun(library: Any, but: Collection[Any]) -> int:
    """How many collectives this rank has begun on all process groups of this process, whoever made them.

    A group may have a backend for each of its devices. If one does not count collectives, each call returns another
    number: there may have been a collective.

    Args:
        library: `torch.distributed.distributed_c10d`.
        but: what has groups that do not count as `pg`; it is read at each call, since a closed group has another one.
    """
    found, ours = 0, set(map(_PG, but))
    try:
        for pg in list(library._world.pg_map):
            for device in () if pg in ours else pg._device_types:
                found += pg._get_backend(device)._get_sequence_number_for_group()
        return found
    except RuntimeError:
        return time.monotonic_ns()


def root_of(mesh: Any) -> Any:
    """The mesh that a `DeviceMesh` was cut from, as `mesh["shard"]` is; itself if it was cut from none."""
    return mesh._get_root_mesh()


def make_by_members(library: Any, name: str, ranks: list[int], backend: str | None) -> Any:
    """A process group that its members alone make, under a name that no other group of the job has or had.

    `new_group(use_local_synchronization=True)` names it by how many groups a member is in: ranks of which some are in
    another group would wait for ever, and after a group was closed its name, and the addresses below it, come again.

    Args:
        library: `torch.distributed.distributed_c10d`.
        name: of the group.
        ranks: its members, in order; this one is among them.
        backend: as for `new_group`.
    """
    world = library._world
    default_backend, store = world.pg_map[world.default_pg]
    kind = library.Backend(backend or default_backend)
    me, timeout = ranks.index(world.default_pg.rank()), library._get_default_timeout(kind)
    made = library._new_process_group_helper(len(ranks), me, ranks, kind, store, name, timeout=timeout)
    world.pg_group_ranks[made[0]] = {rank: i for i, rank in enumerate(ranks)}
    return made[0]
