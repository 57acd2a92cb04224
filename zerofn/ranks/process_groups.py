"""Channels between ranks: opened once for each mesh and purpose, and closed in order.

Every rank must open them in the same order, which `torch.distributed.new_group` demands; the purposes tell apart
what must not mix.
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


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def initialize(backend: str | None = None, file: str | None = None) -> None:
    """Initialise the default group from the environment, as torchrun sets it.

    The ranks meet at MASTER_ADDR and MASTER_PORT, or in `file`, on one machine.
    """
    raw.make_default(backend, file, f"zerofn/{registry.made}")
    registry.made += 1


def _ensure_default() -> bool:
    """Whether there is a default group, after making one if this process was launched as a rank."""
    if raw.default_group() is None and _launched():
        initialize()
        registry.current()
        registry.ours = True
        atexit.register(_leave)
    return raw.world()[1] > 1


def world_group(purpose: Hashable = "") -> Group:
    """All ranks of this job: of one when nothing was launched, else with a process group of our own.

    Under torchrun (RANK, WORLD_SIZE, ... in the environment) the default group is initialised here, at
    the first call and never at import; a default group that the user initialised is used as it is, and
    only ever to make a new one from. Every rank must call this in the same order (`dist.new_group` does).

    `purpose` tells channels apart: equal purposes share a channel. A pipeline passes its own, so that the
    order of its collectives depends on nothing outside it.

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
        # A store may outlive the group: what is written into it now must not be taken for what is there.
        name = raw.gather_objects(uuid.uuid4().hex, group)[0]
        group.traffic.reset()
        store = raw.job_store(f"zerofn/{name}")
        registry.presence = None if store is None else Presence(store, raw.world()[0])
    return group


def _meet(seconds: float) -> None:
    """Before a group is opened: an error where others are seen to wait elsewhere, as after one that was caught here."""
    together("the opening of a group", tuple(range(raw.world()[1])), "the same calls of zerofn on every rank", seconds)


def _open(ranks: tuple[int, ...], device: torch.device, purpose: Hashable) -> Group | None:
    pg = raw.make_group(ranks)  # by every rank of the world, in the group or not
    if pg is None:
        return None
    return Group(ranks.index(raw.world()[0]), len(ranks), ranks, device, purpose, pg)


def group_for(function: str, mesh: Any) -> Group:
    """The group of a mesh, or of all ranks for `None`; a `TypeError` that names the function where it is no mesh."""
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

    Makes a process group of our own over them; the mesh's group stays the user's. Every rank of the world
    must call this in the same order, also for a mesh of fewer ranks, since `dist.new_group` counts the
    groups on each rank and a missed one gives two groups the same name. (`use_local_synchronization` lifts
    that, but takes the name from the number of groups a rank *belongs* to: a group the user made for some
    ranks only turns the next one into a hang.)

    Raises `ValueError` on a mesh that is not one-dimensional, an axis that it does not have, and a mesh
    that does not fit the world; `TypeError` on what is no mesh.
    """
    mesh = raw.mesh_axis(mesh, axis)
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    me = raw.world()[0]

    def make() -> Group | None:
        if len(ranks) > 1:
            return _open_row(ranks, mesh.device_type, purpose)
        # A row of one is one on every rank (meshes are rectangular), so nobody waits for this one.
        return Group(0, 1, ranks, raw.device_of(mesh.device_type), purpose) if me in ranks else None

    group = registry.get(mesh, purpose, make)
    if group is None:
        raise ValueError(f"rank {me} is not in the mesh of ranks {list(ranks)}; pass it a mesh that it is in")
    return group


def channels(joining: Sequence[Sequence[Group]]) -> list[Group]:
    """A channel for each of these, between all ranks that any of its groups connects, directly or through one another.

    Shared with nobody, for collectives whose order must not mix with that of the groups. Several groups are the axes of
    a mesh. Every rank of the world must call it; they wait for each other once.

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
    joined = {r for g in groups for r in g.ranks}
    for group in [g for g in groups if g.size > 1][1:]:
        for found in raw.gather_objects(sorted(joined), group):
            joined.update(found)
    return tuple(sorted(joined))


def connected(axes: Sequence[tuple[int, ...]], purpose: Hashable) -> Group:
    """The ranks that axes of a mesh connect, directly or through one another. Every rank of the world must call it.

    Args:
        axes: the ranks along each axis that this one lies on.
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


def _open_row(ranks: tuple[int, ...], device_type: str, purpose: Hashable) -> Group | None:
    """Opens the groups of all rows of a mesh at once, on every rank: which rows there are is asked of the
    ranks, since a sub-mesh does not tell (publicly) what it was cut from. None on a rank outside of it."""
    return _open_all(_rows(_of_all_ranks(ranks)), raw.device_of(device_type), purpose)


def _rows(of_all: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows of a mesh, from that of each rank."""
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
    """What every rank of the world gives, once all have come to open a group.

    Raises:
        RuntimeError: it would wait for ever, since the ranks would give it different names.
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
    """Opens the groups of all rows, on every rank in one order; gives the one that this rank is in."""
    opened = [_open(row, device, purpose) for row in rows]
    return next((group for group in opened if group is not None), None)


def shutdown() -> None:
    """Close every group opened here, and the default group if it was made here. Every rank must call it.

    The ranks wait for each other first: a rank that destroys its end while another is still sending makes
    that one abort ("terminate called without an active exception"). Without a launched world: no effect.
    """
    settle()
    groups = registry.current()
    if not any(group and group.pg for group in groups.values()) and not registry.ours:
        groups.clear()
        return
    raw.barrier(world_group("mesh"))
    close_all()


def _leave() -> None:
    """At the end of a process under torchrun: close what we opened. After an error nobody is waited for:
    the other ranks may be in the middle of something else, and the launcher ends them."""
    registry.current()
    if not (registry.ours and raw.default_group() is not None):
        return
    finished()
    failed = getattr(sys, "last_value", None) is not None
    try:
        if not failed:
            raw.await_all(None, timedelta(seconds=10))
        close_all()
    except RuntimeError:
        pass  # the others are gone already: there is nothing left to close in order
