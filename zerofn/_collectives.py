"""Groups of ranks and the collectives over them: the one module that imports `torch.distributed`.

Three layers, each built on the one before:

* `Group`, one axis of ranks with a process group of its own (`world_group`, `mesh_group`);
* raw collectives that write into given buffers (`all_gather_into`, ...), for a runtime;
* differentiable collectives (`all_gather`, `reduce_scatter`, `replicate`, `all_reduce`), for functions.

The differentiable ones are pairs of autograd Functions, each the backward of the other, with rules for
`jvp` and `vmap`. Nothing simpler is right: a raw collective inside `backward` has no derivative of its
own (a Hessian-vector product through it is silently wrong), `generate_vmap_rule` and the functional
collectives fail or return garbage under `torch.func`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from ._lane import Lane, Passage, open_lane

__all__ = [
    "Group",
    "Traffic",
    "agree",
    "all_gather",
    "all_gather_into",
    "all_gather_tree",
    "all_reduce",
    "all_reduce_",
    "all_reduce_tree",
    "barrier",
    "broadcast_",
    "gather_objects",
    "mesh_group",
    "reduce_scatter",
    "reduce_scatter_into",
    "reduce_scatter_tree",
    "release",
    "replicate",
    "replicate_tree",
    "shutdown",
    "world_group",
]

# torch 2.13 renamed these two and warns on the old names; 2.11 has only the old ones. Tested here, once.
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LOOK = timedelta(seconds=2)  # after which a rank that waits looks whether the others are still there
_ARRIVAL = timedelta(minutes=5)  # how long a rank waits for the others while groups are made


# --------------------------------------------------------------------------------------------- groups


class Traffic:
    """What one rank sent over one group: calls and bytes, by collective.

    Bytes are those of a ring, which is optimal and what backends use for large buffers: (N-1)/N of the
    full buffer for a gather and for a scatter, twice that for an all-reduce. Object collectives and
    barriers count as calls without bytes.

    >>> t = Traffic()
    >>> t.count("all_gather", 4, 800)
    >>> t.bytes, t.calls, t.by_op
    (600, 1, {'all_gather': 600})
    """

    __slots__ = ("_bytes", "_calls")

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def count(self, op: str, size: int, full_bytes: int) -> None:
        rounds = 2 if op == "all_reduce" else 1
        self._bytes[op] += rounds * (size - 1) * full_bytes // size
        self._calls[op] += 1

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    @property
    def calls(self) -> int:
        return self._calls.total()

    @property
    def by_op(self) -> dict[str, int]:
        return dict(self._bytes)

    @property
    def calls_by_op(self) -> dict[str, int]:
        return dict(self._calls)

    def reset(self) -> None:
        self._bytes.clear()
        self._calls.clear()

    def __repr__(self) -> str:
        return f"Traffic(bytes={self.bytes}, calls={self.calls_by_op})"


@dataclass(frozen=True, eq=False)
class Group:
    """One axis of ranks, and a channel between them that nobody else uses.

    Equality is identity: two groups over the same ranks are two channels, and a collective waits for its
    partner on the same channel only. A group of one has no process group and needs no environment.

    >>> Group().size, Group().rank, Group().device
    (1, 0, device(type='cpu'))
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # the members, as ranks of the world, in the order of `rank`
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    purpose: Hashable = ""
    pg: dist.ProcessGroup | None = field(default=None, repr=False)
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    lane: Lane | None = field(default=None, repr=False)  # between processes of one machine

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a channel is shared by whatever holds it: copies of a model talk on the same one

    def __reduce__(self) -> Any:
        if self.size == 1:
            return (Group, (0, 1, self.ranks, self.device, self.purpose))
        raise TypeError(
            "a Group is an open channel between running processes and cannot be pickled; "
            "pickle what it was made from (the transform, the mesh) and open it again on arrival"
        )


class _Registry:
    """The open groups of this process, so that the same (mesh, purpose) is the same channel everywhere.

    Opening a group is a collective act, so what is looked up must be the same on every rank: the key is
    the whole mesh (equal on all ranks of a world), not this rank's own row of it. `functools.lru_cache`
    would do for looking up, but it cannot list what is to be closed nor notice that the user destroyed
    the default group, which destroys every group made on top of it.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, Hashable], Group | None] = {}  # None: not a member
        self.default: Any = None  # the default group these were made on
        self.ours = False  # whether that default group was made here
        self.made = 0  # how many default groups were made here so far
        self.store: Any = None  # where the ranks of the last of them met

    def current(self) -> dict[tuple[Any, Hashable], Group | None]:
        default = dist.group.WORLD if dist.is_initialized() else None
        if default is not self.default:
            self.groups.clear()
            self.default, self.ours = default, False
        return self.groups

    def get(self, key: Any, purpose: Hashable, make: Callable[[], Group | None]) -> Group | None:
        groups = self.current()
        if (key, purpose) not in groups:
            groups[key, purpose] = make()
        return groups[key, purpose]


_registry = _Registry()


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def default_backend(local_ranks: int) -> str:
    """NCCL for CUDA tensors if each local rank has a GPU of its own; gloo for CPU tensors always."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def initialize(backend: str | None = None, file: str | None = None) -> None:
    """Initialise the default group from the environment (RANK, WORLD_SIZE, ...), as torchrun sets it.

    The ranks meet at MASTER_ADDR and MASTER_PORT, or in `file`, on one machine.
    """
    env = os.environ
    backend = backend or default_backend(int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])))
    if "nccl" in backend:
        torch.cuda.set_device(int(env.get("LOCAL_RANK", env["RANK"])))
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    meet: Any = dist  # (what is used of it below is documented, but missing from its list of exports)
    store = meet.FileStore(file, -1) if file else next(meet.rendezvous("env://"))[0]
    # A store may outlive the group: a second group in it would find the addresses of the first.
    store = meet.PrefixStore(f"zerofn/{_registry.made}", store)
    _registry.made += 1
    _registry.store = store
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _ensure_default() -> bool:
    """Whether there is a default group, after making one if this process was launched as a rank."""
    if not dist.is_initialized() and _launched():
        initialize()
        _registry.current()
        _registry.ours = True
        atexit.register(_leave)
    return dist.is_initialized() and dist.get_world_size() > 1


def _device(device_type: str | None = None) -> torch.device:
    if device_type is None:
        device_type = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


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
        return _open(tuple(range(dist.get_world_size())), _device(), purpose)

    several = _ensure_default()
    group = _registry.get("world", purpose, make)
    assert group is not None
    return group


def _open(ranks: tuple[int, ...], device: torch.device, purpose: Hashable) -> Group | None:
    pg = dist.new_group(list(ranks))  # by every rank of the world, in the group or not
    me = dist.get_rank()
    if me not in ranks or not isinstance(pg, dist.ProcessGroup):
        return None
    group = Group(ranks.index(me), len(ranks), ranks, device, purpose, pg)
    if device.type != "cpu":
        return group
    return replace(group, lane=open_lane(group.rank, group.size, lambda x: gather_objects(x, group)), traffic=Traffic())


def mesh_group(mesh: DeviceMesh, axis: str | None = None, purpose: Hashable = "") -> Group:
    """The ranks along a one-dimensional mesh: a `DeviceMesh`, `mesh["shard"]`, or `mesh` with an `axis`.

    Makes a process group of our own over them; the mesh's group stays the user's. Every rank of the world
    must call this in the same order, also for a mesh of fewer ranks, since `dist.new_group` counts the
    groups on each rank and a missed one gives two groups the same name. (`use_local_synchronization` lifts
    that, but takes the name from the number of groups a rank *belongs* to: a group the user made for some
    ranks only turns the next one into a hang.)

    Raises `ValueError` on a mesh that is not one-dimensional, an axis that it does not have, and a mesh
    that does not fit the world; `TypeError` on what is no mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"expected a torch.distributed DeviceMesh, got {type(mesh).__name__}; make one with "
            'init_device_mesh("cpu", (world_size,)), or leave mesh out for all ranks'
        )
    names = tuple(mesh.mesh_dim_names or ())
    if axis is not None:
        if axis not in names:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {list(names) or 'no named axes'}")
        mesh = mesh[axis]
    if not dist.is_initialized():
        raise ValueError(
            f"a mesh of shape {mesh.shape} was given, but its process group is gone; make the mesh again "
            "after the process group is initialised, or leave mesh out"
        )
    if mesh.ndim != 1:
        hint = f"mesh[{names[-1]!r}]" if names else "one made with mesh_dim_names, and one of its axes"
        raise ValueError(
            f"a mesh of shape {mesh.shape} has {mesh.ndim} axes and a transform works along one; pass {hint}"
        )
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    me, world = dist.get_rank(), dist.get_world_size()
    if max(ranks) >= world:
        raise ValueError(
            f"the mesh names rank {max(ranks)}, but the world has {world} rank{'s' if world > 1 else ''}; "
            "make the mesh after the process group is initialised, and no larger than the world"
        )

    def make() -> Group | None:
        if len(ranks) > 1:
            return _open_row(ranks, mesh.device_type, purpose)
        # A row of one is one on every rank (meshes are rectangular), so nobody waits for this one.
        return Group(0, 1, ranks, _device(mesh.device_type), purpose) if me in ranks else None

    group = _registry.get(mesh, purpose, make)
    if group is None:
        raise ValueError(f"rank {me} is not in the mesh of ranks {list(ranks)}; pass it a mesh that it is in")
    return group


def channel(group: Group) -> Group:
    """Another channel between the ranks of a group, shared with nobody. Every rank of the world must call it.

    For collectives whose order must not mix with that of the group itself.

    >>> channel(world_group()).size
    1
    """
    if group.size == 1:
        return group
    key = (group.ranks, group.device.type, len(_registry.current()))
    opened = _registry.get(key, "channel", lambda: _open_row(group.ranks, group.device.type, "channel"))
    assert opened is not None
    return opened


def joint_channel(groups: Sequence[Group]) -> Group:
    """A channel between all ranks that any of the groups connects, directly or through one another.

    For the axes of a mesh. Every rank of the world must call it.

    >>> joint_channel([Group()]).size
    1
    """
    joined = {r for g in groups for r in g.ranks}
    several = [g for g in groups if g.size > 1]
    if len(several) < 2:
        return channel(several[0] if several else groups[0])
    for group in several[1:]:
        for found in gather_objects(sorted(joined), group):
            joined.update(found)
    key = (tuple(sorted(joined)), several[0].device.type, len(_registry.current()))
    opened = _registry.get(key, "channel", lambda: _open_row(key[0], key[1], "channel"))
    assert opened is not None
    return opened


def _open_row(ranks: tuple[int, ...], device_type: str, purpose: Hashable) -> Group | None:
    """Opens the groups of all rows of a mesh at once, on every rank: which rows there are is asked of the
    ranks, since a sub-mesh does not tell (publicly) what it was cut from. None on a rank outside of it."""
    control = world_group("mesh")
    _await_all(control)
    rows = sorted(set(gather_objects(ranks, control)))
    members = Counter(itertools.chain.from_iterable(rows))
    shared = sorted(rank for rank, n in members.items() if n > 1)
    if shared:
        raise ValueError(
            f"the ranks disagree on the mesh: {[list(row) for row in rows]} overlap in ranks {shared}; "
            "build the same mesh on every rank and cut it along the same axis"
        )
    device = _device(device_type)
    opened = [_open(row, device, purpose) for row in rows]
    return next((group for group in opened if group is not None), None)


def _await_all(group: Group) -> None:
    """An error that names the absent instead of half an hour of silence, where the backend can (gloo)."""
    if dist.get_backend(group.pg) == "gloo":
        dist.monitored_barrier(group.pg, timeout=_ARRIVAL, wait_all_ranks=True)


def release(group: Group) -> None:
    """Close one group: waits for its ranks, then destroys its process group. Every rank must call it."""
    groups = _registry.current()
    for key in [k for k, g in groups.items() if g is group]:
        barrier(group)
        _close(group)
        del groups[key]


def shutdown() -> None:
    """Close every group opened here, and the default group if it was made here. Every rank must call it.

    The ranks wait for each other first: a rank that destroys its end while another is still sending makes
    that one abort ("terminate called without an active exception"). Without a launched world: no effect.
    """
    groups = _registry.current()
    if not any(group and group.pg for group in groups.values()) and not _registry.ours:
        groups.clear()
        return
    barrier(world_group("mesh"))
    _close_all()


def _close_all() -> None:
    for group in list(_registry.groups.values()):
        if group:
            _close(group)
    _registry.groups.clear()
    if _registry.ours:
        dist.destroy_process_group()
    _registry.current()


def _close(group: Group) -> None:
    if group.lane is not None:
        group.lane.close()
    if group.pg is not None:
        dist.destroy_process_group(group.pg)


def _leave() -> None:
    """At the end of a process under torchrun: close what we opened. After an error nobody is waited for:
    the other ranks may be in the middle of something else, and the launcher ends them."""
    _registry.current()
    if not (_registry.ours and dist.is_initialized()):
        return
    finished()
    failed = getattr(sys, "last_value", None) is not None
    try:
        if not failed and dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=10))
        _close_all()
    except RuntimeError:
        pass  # the others are gone already: there is nothing left to close in order


# ---------------------------------------------------------------------------------- raw collectives


class _Done:
    """The work handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def ready_within(self, seconds: float) -> bool:
        return True


_DONE = _Done()


def finished() -> None:
    """Tell the other ranks that this one takes part in nothing any more."""
    if _registry.store is not None:
        _registry.store.set(f"finished/{os.environ['RANK']}", b"1")


def _gone(group: Group) -> list[int]:
    """Ranks of the group that have said so."""
    store = _registry.store
    return [r for r in group.ranks if store is not None and store.check([f"finished/{r}"])]


class _Watched:
    """A work handle of gloo, or a lane's, that looks, when a wait is long, whether the others are still there.

    A rank whose loop was shorter has left for good; without this the others would wait for half an hour.
    """

    def __init__(self, work: Any, what: str, group: Group) -> None:
        self.work, self.what, self.group = work, what, group

    def wait(self) -> bool:
        suspects: list[int] = []
        while True:
            try:
                return self.work.wait(_LOOK)
            except RuntimeError as error:
                if self.work.is_completed() or "timed out" not in str(error).lower():
                    raise
            # Once more after the first look: what it sent last may still be on its way.
            if suspects:
                raise RuntimeError(
                    f"this rank waits in {self.what} for rank {', '.join(map(str, suspects))}, which has finished. "
                    "Every rank must make the same number of steps: give all of them as many batches, or end "
                    "every loop with the shortest."
                )
            suspects = _gone(self.group)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def ready_within(self, seconds: float) -> bool:
        if isinstance(self.work, Passage):
            return self.work.ready_within(seconds)
        end = time.monotonic() + seconds
        while not self.work.is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(2e-4)  # torch's handles cannot be waited for in part
        return True


class _Landing:
    """The work handle of parts that are on their way, to be put in place once they are here."""

    def __init__(self, work: Any, land: Callable[[], None]) -> None:
        self.work, self.land = work, land

    def wait(self) -> bool:
        if self.work is not None:
            self.work.wait()
            with torch.no_grad():
                self.land()
            self.work = self.land = None  # type: ignore[assignment]
        return True

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def ready_within(self, seconds: float) -> bool:
        return self.work is None or self.work.ready_within(seconds)


def _run(work: Any, what: str, group: Group, async_op: bool) -> Any:
    """Wait for a collective that was begun, or hand it on."""
    if group.device.type == "cpu":
        work = _Watched(work, what, group)
    return work if async_op else work.wait() and None


def _publish(t: Tensor, what: str, group: Group, land: Callable[[list[Tensor]], None], async_op: bool) -> Any:
    """A collective over shared memory: what every rank has published is handed to `land`."""
    assert group.lane is not None
    passage = group.lane.publish(t)

    def read() -> None:
        land(passage.parts(t))
        passage.close()

    work = _Landing(_Watched(passage, what, group), read)
    return work if async_op else work.wait() and None


def ready_within(work: Any, seconds: float) -> bool:
    """Whether a collective has arrived everywhere, now or in a moment."""
    if isinstance(work, _Watched | _Landing | _Done):
        return work.ready_within(seconds)
    return work.is_completed() or not seconds


def _add_up(parts: list[Tensor], out: Tensor) -> None:
    """The sum in the order of ranks; 16-bit floats are added in fp32 and rounded once."""
    if len(parts) == 2 and out.is_floating_point():
        torch.add(*parts, out=out)
    else:
        torch.sum(torch.stack(parts), 0, dtype=out.dtype, out=out)


def scratch(shape: Sequence[int], dtype: torch.dtype, group: Group) -> Tensor:
    """A buffer, not initialised, for what is to be sent over a group: one that travels without another copy."""
    if group.lane is not None and torch.Size(shape).numel():
        return group.lane.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=group.device)


def _bytes_of(t: Tensor) -> Tensor:
    # fp8 is unknown to gloo. Moving needs no arithmetic, so it may travel as bytes; reducing may not.
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def _no_fp8(t: Tensor, what: str) -> None:
    if t.is_floating_point() and t.element_size() == 1:
        raise TypeError(f"{what} cannot add {t.dtype} values; cast to bfloat16 or float32 first (reduce_dtype=)")


def all_gather_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Concatenates every rank's `inp` (n, ...) along axis 0 into `out` (size * n, ...), both contiguous.

    `inp` may be this rank's own part of `out`. Returns a work handle if `async_op`.
    """
    if group.size == 1 and out.data_ptr() != inp.data_ptr():
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return _DONE if async_op else None
    group.traffic.count("all_gather", group.size, out.numel() * out.element_size())
    if group.lane is not None:

        def land(parts: list[Tensor]) -> None:
            for into, part in zip(out.detach().view(-1).chunk(group.size), parts, strict=True):
                into.copy_(part)

        return _publish(inp, "all_gather", group, land, async_op)
    work = _gather_single(_bytes_of(out), _bytes_of(inp), group=group.pg, async_op=True)
    return _run(work, "all_gather", group, async_op)


class Rows:
    """One row of each rank, to be read where it lies: a gather whose result is put together by the caller.

    Attributes:
        mine: this rank's, to be filled before `begin`.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, group: Group) -> None:
        self.group, self.work, self.found = group, None, None
        self.shared = group.size > 1 and group.lane is not None and torch.Size(shape).numel() > 0
        if self.shared:
            self.mine = scratch(shape, dtype, group)
        else:
            self.all = torch.empty((group.size, *shape), dtype=dtype, device=group.device)
            self.mine = self.all[group.rank]

    def begin(self) -> Rows:
        """Tell the others that this rank's is there."""
        group, mine = self.group, self.mine
        if not self.shared:
            self.work = all_gather_into(self.all.view(-1), mine.view(-1), group, async_op=True)
            return self
        assert group.lane is not None
        group.traffic.count("all_gather", group.size, group.size * mine.numel() * mine.element_size())
        self.found = group.lane.publish(mine)
        self.work = _Watched(self.found, "all_gather", group)
        return self

    def read(self) -> list[Tensor]:
        """Every rank's, until `close`."""
        self.work.wait()
        if self.found is None:
            return list(self.all)
        return [part.view(self.mine.shape) for part in self.found.parts(self.mine)]

    def close(self) -> None:
        """They have been read."""
        if self.found is not None:
            self.found.close()


def reduce_scatter_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Adds every rank's `inp` (size * n, ...) and leaves this rank's part in `out` (n, ...).

    Only sums: an average is the caller's division, made *before* the sum (gloo's own averages after it,
    and overflows in fp16). `out` may be this rank's own part of `inp`. Returns a work handle if `async_op`.
    """
    if group.size == 1 and out.data_ptr() != inp.data_ptr():
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return _DONE if async_op else None
    _no_fp8(inp, "reduce_scatter")
    group.traffic.count("reduce_scatter", group.size, inp.numel() * inp.element_size())
    if group.device.type != "cpu":
        return _scatter_single(out, inp, op=dist.ReduceOp.SUM, group=group.pg, async_op=async_op)
    if group.lane is not None:

        def land(parts: list[Tensor]) -> None:
            _add_up([p.chunk(group.size)[group.rank] for p in parts], out.detach().view(-1))

        return _publish(inp, "reduce_scatter", group, land, async_op)
    # gloo's own is a copy and an all-reduce: twice the bytes, and 16-bit floats rounded after every addition.
    received = torch.empty_like(inp)
    sent = dist.all_to_all_single(received, inp, group=group.pg, async_op=True)

    def add() -> None:
        parts = received.reshape(group.size, *out.shape)
        torch.sum(parts, 0, dtype=out.dtype, out=out.detach())

    work = _Landing(_Watched(sent, "reduce_scatter", group), add)
    return work if async_op else work.wait() and None


def all_reduce_(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduces `t` over the ranks in place; `op` is "sum", "max" or "min"."""
    if op not in _REDUCE:
        raise ValueError(f'op={op!r} is not one of "sum", "max", "min" (an average is a division before the sum)')
    if group.size == 1 or not t.numel():
        return _DONE if async_op else None
    _no_fp8(t, "all_reduce")
    group.traffic.count("all_reduce", group.size, t.numel() * t.element_size())
    if _at_once(t, group):

        def land(parts: list[Tensor]) -> None:
            whole = t.detach()
            if op == "sum":
                _add_up([p.view(t.shape) for p in parts], whole)
            else:
                stacked = torch.stack([p.view(t.shape) for p in parts])
                whole.copy_(stacked.amax(0) if op == "max" else stacked.amin(0))

        return _publish(t, "all_reduce", group, land, async_op)
    work = dist.all_reduce(t, op=_REDUCE[op], group=group.pg, async_op=True)
    return _run(work, "all_reduce", group, async_op)


def _at_once(t: Tensor, group: Group) -> bool:
    """Whether each rank reads all of what the others send: from three ranks on, only if that is little."""
    few = group.size == 2 or t.numel() * t.element_size() <= 1 << 16
    return group.lane is not None and few and (t.is_floating_point() or t.dtype in (torch.int32, torch.int64))


def all_reduce_into(buffer: Tensor, group: Group, async_op: bool = False) -> tuple[Any, Tensor]:
    """The sum over ranks of a buffer from `scratch`, which is used up; (work handle, where the sum will be)."""
    if group.size == 1 or not _at_once(buffer, group) or not buffer.numel():
        return all_reduce_(buffer, group, async_op=async_op), buffer
    _no_fp8(buffer, "all_reduce")
    group.traffic.count("all_reduce", group.size, buffer.numel() * buffer.element_size())
    out = torch.empty_like(buffer)
    flat = out.view(-1)
    return _publish(buffer, "all_reduce", group, lambda parts: _add_up(parts, flat), async_op), out


def broadcast_(t: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Copies `t` of rank `src` (a rank of the group) into `t` of every rank."""
    if group.size == 1 or not t.numel():
        return _DONE if async_op else None
    group.traffic.count("broadcast", group.size, t.numel() * t.element_size())
    return dist.broadcast(_bytes_of(t), src=group.ranks[src], group=group.pg, async_op=async_op)


def barrier(group: Group) -> None:
    """Waits until every rank of the group is here."""
    if group.size > 1:
        group.traffic.count("barrier", group.size, 0)
        dist.barrier(group=group.pg)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank. For small things: they are pickled.

    >>> gather_objects({"step": 3}, world_group())
    [{'step': 3}]
    """
    if group.size == 1:
        return [obj]
    out: list[Any] = [None] * group.size
    group.traffic.count("objects", group.size, 0)
    dist.all_gather_object(out, obj, group=group.pg)
    return out


def agree(what: str, value: str | bytes, group: Group) -> None:
    """Raises `ValueError` on *every* rank unless all ranks hold the same `value` (a digest, a short text).

    >>> agree("the pipeline", "shard,adam", world_group())
    """
    text = value.hex() if isinstance(value, bytes) else value
    answers = gather_objects((what, text), group)
    if len(set(answers)) == 1:
        return
    if len({asked for asked, _ in answers}) > 1:
        told = _by_value([asked for asked, _ in answers], group)
        raise ValueError(f"the ranks are at different points: {told}; make every rank issue the same calls")
    told = _by_value([text for _, text in answers], group)
    raise ValueError(
        f"the ranks disagree on {what}: {told}; build it from the same values on every rank (and seed "
        "whatever is random alike)"
    )


def _by_value(values: Sequence[str], group: Group) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    # Values are cut for the eye, but never so that two different ones look the same.
    width = 16
    while width < max(map(len, holders)) and len({v[:width] for v in holders}) < len(holders):
        width *= 2
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        f"ha{'ve' if len(ranks) > 1 else 's'} {v[:width] + ('...' if len(v) > width else '')!r}"
        for v, ranks in holders.items()
    )


# ------------------------------------------------------------------------- differentiable collectives


def _gathered(x: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    # A cast is elementwise and commutes with the gather: the narrower of the two dtypes travels.
    sent = x.to(dtype) if dtype.itemsize < x.dtype.itemsize else x
    out = sent.new_empty((group.size * sent.shape[0], *sent.shape[1:]))
    all_gather_into(out, sent.contiguous(), group)
    return out.to(dtype)


def _scattered(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype).contiguous()
    out = sent.new_empty((sent.shape[0] // group.size, *sent.shape[1:]))
    reduce_scatter_into(out, sent, group)
    return out.to(dtype)


def _reduced(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype)
    sent = sent.clone(memory_format=torch.contiguous_format) if sent is x else sent.contiguous()
    all_reduce_(sent, group)
    return sent.to(x.dtype)


class _Linear(Function):
    """What the four collectives share: they are linear maps with an adjoint, along axis 0 or elementwise.

    So the tangent goes through the map itself, the cotangent through the adjoint, and a batch axis rides
    along as the last one. The maps below differ in nothing else, but are written out: autograd and
    `torch.func` find rules as static methods of each class, by name.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *args = inputs
        ctx.args, ctx.dtype = args, x.dtype

    @classmethod
    def _vmap(cls, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
        out = cls.apply(x.movedim(in_dims[0], -1), *args)
        return out, out.dim() - 1


class _Gather(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
        return _gathered(x, group, dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype = ctx.args
        return _Scatter.apply(g, group, ctx.dtype, reduce_dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Gather.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Gather._vmap(in_dims, x, *args)


class _Scatter(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
        return _scattered(x, group, dtype, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, reduce_dtype = ctx.args
        return _Gather.apply(g, group, ctx.dtype, reduce_dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Scatter.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Scatter._vmap(in_dims, x, *args)


class _Replicate(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return x.view_as(x)  # no copy; autograd refuses to have it changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Reduce.apply(g, *ctx.args), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Replicate.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Replicate._vmap(in_dims, x, *args)


class _Reduce(_Linear):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None) -> Tensor:
        return _reduced(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Replicate.apply(g, *ctx.args), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Any:
        return _Reduce.apply(t, *ctx.args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> Any:
        return _Reduce._vmap(in_dims, x, *args)


def all_gather(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """The shards of all ranks, one after the other: (n, ...) -> (size * n, ...). Adjoint of `reduce_scatter`.

    `dtype` is that of the result (default: that of `x`): an fp32 shard with `dtype=bfloat16` travels in
    bf16, and its gradient comes back in fp32. Cotangents are added in `reduce_dtype` (default: their own)
    and returned in the dtype of `x`; a separate cast before the gather would round them on the way.

    >>> all_gather(torch.arange(3.0), world_group())
    tensor([0., 1., 2.])
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    _check_axis(x, 1, "all_gather")
    return _Gather.apply(x, group, dtype or x.dtype, reduce_dtype)  # type: ignore[return-value]


def reduce_scatter(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's part of the sum over ranks: (size * n, ...) -> (n, ...). Adjoint of `all_gather`.

    Adds in `reduce_dtype` (default: the dtype of `x`), returns in `dtype` (default: the dtype of `x`). From
    three ranks on, the order in which an element is summed depends on its place in the buffer: two layouts
    of the same numbers agree to rounding, not bit for bit.
    Raises `ValueError` when axis 0 does not divide by the number of ranks.

    >>> reduce_scatter(torch.arange(3.0), world_group(), dtype=torch.float64)
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    if group.size == 1:
        return x.to(dtype or x.dtype)
    _check_axis(x, group.size, "reduce_scatter")
    return _Scatter.apply(x, group, dtype or x.dtype, reduce_dtype)  # type: ignore[return-value]


def replicate(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself, equal on all ranks; its cotangent is the sum of all ranks' (in `reduce_dtype`).

    For a parameter that every rank holds and uses on data of its own. Adjoint of `all_reduce`.

    >>> replicate(torch.ones(2), world_group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Replicate.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def all_reduce(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks, on every rank. Adjoint of `replicate`.

    The result is one value that all ranks hold, so its cotangent is one value too: what is computed from
    it must be computed alike on every rank, and the cotangent passes through unchanged. (Summing it, as
    for N independent values, would count the one value N times.)

    >>> all_reduce(torch.ones(2), world_group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Reduce.apply(x, group, reduce_dtype)  # type: ignore[return-value]


def _check_axis(x: Tensor, size: int, what: str) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{what} needs an axis 0 that divides by {size}, got shape {tuple(x.shape)}; flatten and pad it first"
        )


# ----------------------------------------------------------------------------------------------- trees

Tree = Mapping[str, Tensor]


def _coalesced(tree: Tree, rows: int, out_rows: int, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Runs one flat collective per dtype: each leaf is cut in `rows` rows, rows of all leaves lie side by
    side, and come back as `out_rows`. Two copies, where one call per leaf would cost a latency each."""
    out: dict[str, Tensor] = dict(tree)  # the order of the keys is the caller's
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, leaf in tree.items():
        by_dtype.setdefault(leaf.dtype, []).append(name)
    for names in by_dtype.values():
        widths = [tree[name].numel() // rows for name in names]
        cut = [tree[name].reshape(rows, w) for name, w in zip(names, widths, strict=True)]
        flat = run(torch.cat(cut, dim=1).reshape(-1)).reshape(out_rows, sum(widths))
        for name, part in zip(names, flat.split(widths, dim=1), strict=True):
            first, *rest = tree[name].shape
            out[name] = part.reshape(first * out_rows // rows, *rest)
    return out


def all_gather_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`all_gather` of every leaf, (n, ...) -> (size * n, ...), in one collective per dtype.

    >>> all_gather_tree({"a": torch.ones(2), "b": torch.zeros(0)}, world_group())
    {'a': tensor([1., 1.]), 'b': tensor([])}
    """
    run = lambda x: all_gather(x, group, dtype=dtype, reduce_dtype=reduce_dtype)  # noqa: E731
    if group.size == 1:
        return {name: run(leaf) for name, leaf in tree.items()}
    for leaf in tree.values():
        _check_axis(leaf, 1, "all_gather")
    return _coalesced(tree, 1, group.size, run)


def reduce_scatter_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`reduce_scatter` of every leaf, (size * n, ...) -> (n, ...), in one collective per dtype."""
    run = lambda x: reduce_scatter(x, group, dtype=dtype, reduce_dtype=reduce_dtype)  # noqa: E731
    if group.size == 1:
        return {name: run(leaf) for name, leaf in tree.items()}
    for leaf in tree.values():
        _check_axis(leaf, group.size, "reduce_scatter")
    return _coalesced(tree, group.size, 1, run)


class _ReplicateAll(Function):
    """`replicate` of many leaves with one collective in backward and no copy in forward."""

    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, *_ReduceAll.apply(*ctx.args, *gs))  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *ts: Any) -> Any:
        return _ReplicateAll.apply(*ctx.args, *ts[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, group: Group, reduce_dtype: Any, *xs: Tensor) -> Any:
        return _ReplicateAll.apply(group, reduce_dtype, *xs), in_dims[2:]


class _ReduceAll(Function):
    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, *xs: Tensor) -> tuple[Tensor, ...]:
        tree = {str(i): x.reshape(-1) for i, x in enumerate(xs)}
        out = _coalesced(tree, 1, 1, lambda x: _reduced(x, group, reduce_dtype))
        return tuple(out[str(i)].view(x.shape) for i, x in enumerate(xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, *_ReplicateAll.apply(*ctx.args, *gs))  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *ts: Any) -> Any:
        return _ReduceAll.apply(*ctx.args, *ts[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, group: Group, reduce_dtype: Any, *xs: Tensor) -> Any:
        return _ReduceAll.apply(group, reduce_dtype, *xs), in_dims[2:]


def replicate_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`replicate` of every leaf, of any shape; one collective per dtype in backward."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReplicateAll.apply(group, reduce_dtype, *tree.values()), strict=True))  # type: ignore[arg-type]


def all_reduce_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`all_reduce` of every leaf, of any shape, in one collective per dtype."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReduceAll.apply(group, reduce_dtype, *tree.values()), strict=True))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ checkpoints


def checkpoint_library() -> Any:
    """`torch.distributed.checkpoint`, imported when asked for: that takes 0.7 s."""
    import torch.distributed.checkpoint as library

    return library


def as_distributed(shards: Mapping[Hashable, tuple[Tensor, int]], group: Group) -> dict[Hashable, Tensor]:
    """Shards, each with the length of its whole, as torch's own distributed tensors over the same memory.

    Those are what torch's checkpoints cut anew for another number of ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    # A state may have parts on the host. A mesh of another device type would move them.
    kinds = {x.device.type for x, _ in shards.values()}
    meshes = {kind: DeviceMesh.from_group(group.pg, kind) for kind in kinds} if group.pg else {}
    return {
        key: DTensor.from_local(
            x, meshes[x.device.type], [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
        )
        for key, (x, numel) in shards.items()
    }


def as_local(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; a plain tensor as it is."""
    if type(x) is Tensor:
        return x
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x
