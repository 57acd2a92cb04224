"""Process groups of the library's own: opened once for each mesh and purpose, and closed in order.

Every rank must open them in the same order, which `torch.distributed.new_group` demands. Groups of different purposes
are different channels, whose collectives do not wait for each other.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import sys
import uuid
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch

from .._errors import explain
from . import backend as raw
from .background_thread import settle
from .group import Group
from .open_groups import close_all, finished, registry
from .rank_liveness import Presence
from .rendezvous import together

_ARRIVAL = timedelta(minutes=5)  # how long a rank waits for the others while groups are made


def initialize(backend: str | None = None, file: str | None = None) -> None:
    """Initialise the default group from the environment, as torchrun sets it.

    Ranks meet at MASTER_ADDR and MASTER_PORT, or in `file`, on one machine.
    """
    raw.make_default(backend, file, f"zerofn/{registry.made}")
    registry.made += 1


def world_size() -> int:
    """The ranks of the world: of the default group; before there is one, as whoever launched this process says."""
    return raw.world()[1] if raw.default_group() is not None else _launched()


def _launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _ensure_default() -> bool:
    """Whether the world has several ranks; makes the default group if this process was launched as a rank."""
    if _launched() > 1 and raw.default_group() is None:
        initialize()
        registry.current()
        registry.ours = True
        atexit.register(_leave)
    return raw.world()[1] > 1


def world_group(purpose: Hashable = "") -> Group:
    """All ranks of this job: a group of one if nothing was launched, else with a process group of our own.

    Under torchrun (RANK, WORLD_SIZE, ... in the environment) the first call initialises the default group; an import
    never does. A default group that the user initialised is only used to make new groups. Every rank must call this in
    the same order, as `dist.new_group`.

    Equal purposes share a channel. A pipeline passes its own, so that the order of its collectives depends on nothing
    outside of it.

    >>> world_group().size
    1
    """

    def make() -> Group | None:
        if not several:
            return Group(purpose=purpose)
        _meet(math.inf)
        return _open(tuple(range(raw.world()[1])), raw.device_of(), purpose)

    several = _ensure_default()
    group = registry.get("world", purpose, make)
    assert group is not None
    if several and registry.presence is None:
        # A store may outlive the group, and hold what ranks have told each other in an earlier one.
        name = raw.gather_objects(uuid.uuid4().hex, group)[0]
        group.traffic.reset()
        store = raw.job_store(f"zerofn/{name}")
        registry.presence = None if store is None else Presence(store, raw.world()[0])
    return group


def _meet(seconds: float) -> None:
    """Before a group is opened: an error if other ranks wait elsewhere, as after an error that was caught here."""
    together("the opening of a group", tuple(range(raw.world()[1])), "the same calls of zerofn on every rank", seconds)


def _open(ranks: tuple[int, ...], device: torch.device, purpose: Hashable) -> Group | None:
    pg = raw.make_group(ranks)  # by every rank of the world, in the group or not
    if pg is None:
        return None
    return Group(ranks.index(raw.world()[0]), len(ranks), ranks, device, purpose, pg)


def group_for(function: str, mesh: Any) -> Group:
    """The group of a mesh, or of all ranks for `None`; a `TypeError` that names the function if it is no mesh."""
    if mesh is None:
        return world_group()
    if type(mesh).__name__ != "DeviceMesh":
        raise TypeError(
            explain(
                f"{function}({mesh!r})",
                "mesh is a one-dimensional DeviceMesh, or None for all ranks",
                f"{function}(init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))['shard'])",
            )
        )
    return mesh_group(mesh)


def mesh_group(mesh: Any, axis: str | None = None, purpose: Hashable = "") -> Group:
    """The ranks along a one-dimensional mesh: a `DeviceMesh`, `mesh["shard"]`, or `mesh` with an `axis`.

    Makes a process group of our own over them; that of the mesh is the user's. Every rank of the world must call this
    in the same order, also for a mesh of fewer ranks: `dist.new_group` names a group by the number of groups that a
    rank has made, and with one call missing two groups get the same name. (`use_local_synchronization` counts the
    groups that a rank *belongs* to: a group that the user made for some ranks only makes the next one hang.)

    Raises `ValueError` on a mesh that is not one-dimensional, an axis that it does not have, and ranks that the world
    does not have; `TypeError` if it is no mesh.
    """
    mesh = raw.mesh_axis(mesh, axis)
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    me = raw.world()[0]

    def make() -> Group | None:
        if len(ranks) > 1:
            # All rows at once, on every rank. A sub-mesh has no public attribute for the mesh that it was cut from, so
            # the ranks tell each other their rows.
            return _open_all(_rows(_of_all_ranks(ranks)), raw.device_of(mesh.device_type), purpose)
        # Meshes are rectangular: rows of one on every rank, and no rank waits for this one.
        return Group(0, 1, ranks, raw.device_of(mesh.device_type), purpose) if me in ranks else None

    group = registry.get(mesh, purpose, make)
    if group is None:
        raise ValueError(f"rank {me} is not in the mesh of ranks {list(ranks)}; pass it a mesh that it is in")
    return group


def channels(joining: Sequence[Sequence[Group]]) -> list[Group]:
    """For each sequence of groups a new channel between all ranks that they connect, directly or through one another.

    It is shared with nobody, so the order of its collectives does not depend on those of the groups. Several groups are
    the axes of a mesh. Every rank of the world must call it; they wait for each other once.

    >>> [group.size for group in channels([[Group()], [Group(), Group()]])]
    [1, 1]
    """
    wanted = [_joined(groups) for groups in joining]
    if not any(size > 1 for size in map(len, wanted)):
        return [groups[0] for groups in joining]
    every = _of_all_ranks(wanted)
    opened: list[Group] = []
    for n, (groups, ranks) in enumerate(zip(joining, wanted, strict=True)):
        group: Group | None = groups[0]
        if len(ranks) > 1:
            rows, device = _rows([each[n] for each in every]), raw.device_of(groups[0].device.type)
            registry.opened += 1
            group = registry.get(registry.opened, "channel", functools.partial(_open_all, rows, device, "channel"))
        assert group is not None
        opened.append(group)
    return opened


def _joined(groups: Sequence[Group]) -> tuple[int, ...]:
    """All ranks that these groups connect: along the first axis they are known, along others ranks tell each other."""
    joined = {r for g in groups for r in g.ranks}
    for group in [g for g in groups if g.size > 1][1:]:
        for found in raw.gather_objects(sorted(joined), group):
            joined.update(found)
    return tuple(sorted(joined))


def connected(axes: Sequence[tuple[int, ...]], purpose: Hashable) -> Group:
    """The ranks that axes of a mesh connect, directly or through one another. Every rank of the world must call it.

    Args:
        axes: the ranks along each axis of the mesh at this rank.
        purpose: as for `world_group`.
    """
    parts: list[set[int]] = []
    for row in itertools.chain.from_iterable(_of_all_ranks(tuple(axes))):
        joined = set(row).union(*(part for part in parts if part & set(row)))
        parts = [part for part in parts if not part & joined] + [joined]
    rows = tuple(sorted(tuple(sorted(part)) for part in parts))

    group = registry.get(rows, purpose, lambda: _open_all(rows, raw.device_of(), purpose))
    assert group is not None
    return group


def _rows(of_all: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The different rows of a mesh, from the row of each rank."""
    rows = sorted(set(of_all))
    members = Counter(itertools.chain.from_iterable(rows))
    shared = sorted(rank for rank, n in members.items() if n > 1)
    if shared:
        raise ValueError(
            f"the ranks disagree on the mesh: {[list(row) for row in rows]} overlap in ranks {shared}; "
            "build the same mesh on every rank and cut it along the same axis"
        )
    return rows


def _of_all_ranks(obj: Any) -> list[Any]:
    """The object of each rank of the world, once all have come to open a group.

    Raises:
        RuntimeError: ranks have made different numbers of groups. The next would have a name of its own on each, and
            they would wait for ever.
    """
    control = world_group("mesh")
    _meet(_ARRIVAL.total_seconds())
    raw.await_all(control.pg, _ARRIVAL)
    counts, found = zip(*raw.gather_objects((raw.groups_made(), obj), control), strict=True)
    if len(set(counts)) > 1:
        raise RuntimeError(
            explain(
                f"by rank, {list(counts)} process groups have been made, so the next one has a name of its own on each",
                "torch names groups by their number, and dist.new_group was called on some ranks only; with "
                "use_local_synchronization=True torch 2.14 counts it on its members alone",
                "dist.new_group(ranks) on every rank of the job; or zf.attach and meshes first",
            )
        )
    return list(found)


def _open_all(rows: Sequence[tuple[int, ...]], device: torch.device, purpose: Hashable) -> Group | None:
    """Open the groups of all rows, on every rank in one order; the one that this rank is in, if any."""
    opened = [_open(row, device, purpose) for row in rows]
    return next((group for group in opened if group is not None), None)


def shutdown() -> None:
    """Close every group that the library opened, the default group too if the library made it. Every rank must call it.

    The ranks wait for each other first: a rank that destroys a group while another still sends makes that one abort
    ("terminate called without an active exception"). In a world of one it does nothing.
    """
    settle()
    groups = registry.current()
    if not any(group and group.pg for group in groups.values()) and not registry.ours:
        groups.clear()
        return
    raw.barrier(world_group("mesh"))
    close_all()


def _leave() -> None:
    """At the end of a process under torchrun: close what the library opened.

    After an error it waits for no other rank: they may be anywhere, and the launcher ends them.
    """
    registry.current()
    if not (registry.ours and raw.default_group() is not None):
        return
    failed = getattr(sys, "last_value", None) is not None
    finished(failed)
    try:
        if not failed:
            raw.await_all(None, timedelta(seconds=10))
        close_all()
    except RuntimeError:
        pass  # the others are gone already: there is nothing left to close in order
