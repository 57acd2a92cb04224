"""The parts of `torch.distributed` in use: process groups, collectives, names that differ between releases.

`ranks.collectives` counts the bytes of tensors that are sent, and checks whether peers are there.
`ranks.process_groups` opens groups and keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._compat.functorch import beneath_functorch, makes_proxies
from .._compat.process_groups import begun, make_by_members, root_of
from .._errors import explain
from .._profiler_ranges import WAIT, ranged
from .group import Group

# Stores and `rendezvous` are documented, but missing from the list of exports.
_stores: Any = dist


# ----------------------------------------------------------------------------------------------------------------------
# These functions choose a backend, and open and close process groups.


def default_backend(local_ranks: int) -> str:
    """The backends: NCCL for CUDA tensors if each local rank has a GPU of its own; gloo for CPU tensors always."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def default_group() -> Any:
    """The default process group; None if there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def not_sent_from(devices: Collection[str]) -> dict[str, str]:
    """The kinds of devices whose tensors the backends of the default group do not send, with those they do send."""
    sent = [kind.partition(":")[0] for kind in str(dist.get_backend_config()).split(",")] if devices else []
    return {kind: " and ".join(sent) for kind in devices if kind not in sent and kind in ("cpu", "cuda")}


def groups_made() -> int:
    """How many groups this process has made: torch names the next one by this number."""
    return dist.get_pg_count()


def make_default(backend: str | None, file: str | None, prefix: str) -> None:
    """Initialise the default group from the environment (RANK, WORLD_SIZE, ...).

    Ranks meet at MASTER_ADDR and MASTER_PORT, or in `file`, on one machine.
    """
    env = os.environ
    backend = backend or default_backend(int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])))
    if "nccl" in backend:
        torch.cuda.set_device(int(env.get("LOCAL_RANK", env["RANK"])))
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    store = _stores.FileStore(file, -1) if file else next(_stores.rendezvous("env://"))[0]
    # A store may outlive the group: a second group in it would find the addresses of the first.
    store = _stores.PrefixStore(prefix, store)
    _compare(backend, rank, store)
    more: dict[str, Any] = {}
    if "nccl" in backend:
        # With a device NCCL splits later groups from this one, which is faster than a new communicator for each.
        more["device_id"] = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **more)


def _compare(backend: str, rank: int, store: Any) -> None:
    """Raise on a rank that would open the default group by another backend than rank 0: all would wait for ever."""
    if rank == 0:
        store.set("zerofn/backend", backend)
    elif (first := store.get("zerofn/backend").decode()) != backend:
        why = "NCCL is taken where each rank of a machine has a GPU of its own, and machines of this job differ"
        right = 'CUDA_VISIBLE_DEVICES="" on every rank, for gloo; or as many GPUs as ranks on every machine'
        raise RuntimeError(explain(f"rank {rank} would open {backend}, and rank 0 {first}", why, right))


def job_store(prefix: str) -> Any:
    """The store in which the ranks of the default group met, under a prefix of our own; None if they met in none."""
    try:
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    except RuntimeError:
        return None
    return None if store is None else _stores.PrefixStore(prefix, store)


def launcher_store(prefix: str) -> Any:
    """The store that torchrun keeps for its ranks, under a prefix; None for other launchers.

    There rank 0 would have to open one, and that waits for all ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return _stores.PrefixStore(prefix, next(_stores.rendezvous("env://"))[0])


def world() -> tuple[int, int]:
    """This process's rank among all, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def device_of(device_type: str | None = None) -> torch.device:
    """The device this rank communicates from."""
    if device_type is None:
        device_type = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def splits() -> bool:
    """Whether new groups of GPUs are split from the default group, which then takes all of its ranks."""
    return getattr(default_group(), "bound_device_id", None) is not None


def make_group(ranks: Sequence[int], device: torch.device, name: str = "") -> Any:
    """A process group over some ranks; None on a rank outside of it.

    Args:
        ranks: of the group.
        name: if given, one that no other group has: its members alone call this. Otherwise every rank of the world.
        device: where the tensors are that it sends. Those of the host are sent by gloo beside NCCL, which takes tensors
            of GPUs alone.
    """
    kind = None
    if device.type == "cpu" and "nccl" in str(dist.get_backend_config()):
        if not dist.is_gloo_available():
            raise RuntimeError(
                explain(
                    "ranks on GPUs, with a torch that is built without gloo",
                    "ranks compare numbers of the host in each step; over NCCL each would wait for the GPU",
                    "a torch with gloo: torch.distributed.is_gloo_available()",
                )
            )
        kind = "gloo"
    with _bound_to_no_device(kind == "gloo"):
        made_alone = partial(make_by_members, dist.distributed_c10d, name) if name else dist.new_group
        pg = made_alone(list(ranks), backend=kind)
    return pg if dist.get_rank() in ranks and isinstance(pg, dist.ProcessGroup) else None


@contextmanager
def _bound_to_no_device(on: bool) -> Iterator[None]:
    """Inside, torch does not split the GPU communicator of the default group for a new group.

    Ranks outside of a new group would wait in a split of NCCL for its members, which open a group of gloo and never
    come.
    """
    group = default_group()
    device = getattr(group, "bound_device_id", None) if on else None
    if device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def destroy(pg: Any) -> None:
    """Close a process group; None is the default one."""
    dist.destroy_process_group(pg)


def await_all(pg: Any, timeout: timedelta) -> None:
    """A barrier with a time limit, and an error that names the ranks which did not come; gloo only."""
    if dist.get_backend(pg) == "gloo":
        dist.monitored_barrier(pg, timeout=timeout, wait_all_ranks=pg is not None)


def mesh_axis(mesh: DeviceMesh, axis: str | None = None) -> DeviceMesh:
    """A one-dimensional mesh, checked to have only ranks of the world: `mesh`, or its axis of that name.

    Raises:
        TypeError: `mesh` is not a DeviceMesh.
        ValueError: it has several axes, no axis of that name, or ranks that the world does not have.
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
    world = dist.get_world_size()
    if max(ranks) >= world:
        raise ValueError(
            f"the mesh names rank {max(ranks)}, but the world has {world} rank{'s' if world > 1 else ''}; "
            "make the mesh after the process group is initialised, and no larger than the world"
        )
    return mesh


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks along a mesh of one axis, in order; no tensor is read."""
    return sorted(dist.get_process_group_ranks(mesh.get_group()))


def ranks_along(mesh: DeviceMesh, dim: int, coordinate: Sequence[int]) -> list[int]:
    """The ranks along a dimension of a mesh, through the rank at a coordinate, in the order of the mesh."""
    return mesh.mesh[(*coordinate[:dim], slice(None), *coordinate[dim + 1 :])].tolist()


def axes_of_root(mesh: DeviceMesh) -> dict[str, list[int]]:
    """By name, the ranks along each axis through this rank, of the mesh that `mesh` was cut from."""
    root = root_of(mesh)
    coordinate, names = root.get_coordinate(), root.mesh_dim_names
    if coordinate is None or names is None:
        return {}
    return {name: ranks_along(root, dim, coordinate) for dim, name in enumerate(names)}


# ----------------------------------------------------------------------------------------------------------------------
# These functions are the collectives of `torch.distributed`, by their names in each version of torch.


# With `async_op=True` these return torch's work handle; without it the compiler has a node for each.
# torch 2.13 renamed two of them and warns on the old names; 2.11 has only the old ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_single: Callable[..., Any] = dist.all_to_all_single
all_reduce: Callable[..., Any] = dist.all_reduce

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# The error of collectives under `makes_proxies()`.
RECORDED = explain(
    "torch.func.linearize, or make_fx, over what goes over several ranks",
    "it records operations to run them again, and cannot record collectives",
    "torch.func.jvp(fn, (x,), (tangent,)) for each tangent; torch.func.vjp for derivatives backwards",
)


def available() -> list[str]:
    """The backends that this torch was built with."""
    asked = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    return [name for name, is_available in asked.items() if is_available()]


def collectives_but_on(groups: Sequence[Group]) -> Callable[[], int]:
    """A function that returns how many collectives this rank has begun, whoever made them, but on these groups."""
    return partial(begun, dist.distributed_c10d, groups)


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    if group.size > 1:
        group.traffic.sent("barrier", 0)
        with ranged(WAIT, "barrier"):
            dist.barrier(group=group.pg)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank. For small objects: they are pickled.

    >>> gather_objects({"step": 3}, Group())
    [{'step': 3}]
    """
    if group.size == 1:
        return [obj]
    if makes_proxies():
        raise RuntimeError(RECORDED)
    out: list[Any] = [None] * group.size
    group.traffic.sent("objects", 0)
    with beneath_functorch(), ranged(WAIT, "objects"):
        dist.all_gather_object(out, obj, group=group.pg)
    return out


E = TypeVar("E", bound=BaseException)


def raised_on(error: E, rank: int) -> E:
    """The error, marked with the rank (of all) that has raised it, for other ranks that raise it too.

    >>> rank_of(raised_on(ValueError("bad"), 3)), rank_of(ValueError())
    (3, None)
    """
    error._zerofn_rank = rank  # type: ignore[attr-defined]
    return error


def rank_of(error: BaseException | None) -> int | None:
    """The rank that has raised an error, or its cause, if `raised_on` has marked it; else `None`."""
    while error is not None:
        rank = getattr(error, "_zerofn_rank", None)
        if isinstance(rank, int):
            return rank
        error = error.__cause__ or error.__context__
    return None


# torch.distributed's functions that communicate: collectives, send and receive.
TALK = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "all_to_all", "barrier"),
    *("all_to_all_single", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"),
    *("new_group", "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced"),
)


class CollectiveBegun(Exception):
    """A function that must not communicate began a collective."""


@contextmanager
def no_collectives() -> Iterator[None]:
    """Inside, `torch.distributed` looks as on the first of two ranks, and each call that communicates raises.

    It is for checks of a function in one process: it changes that module for the whole process.

    Raises:
        CollectiveBegun: names the function that was called.
    """

    def begun(name: str, *args: Any, **options: Any) -> None:
        raise CollectiveBegun(f"torch.distributed.{name}")

    here = vars(dist)
    instead: dict[str, Callable[..., Any]] = {name: partial(begun, name) for name in TALK if name in here}
    instead |= {"is_initialized": lambda: True, "get_rank": lambda *_: 0, "get_world_size": lambda *_: 2}
    kept = {name: here[name] for name in instead}
    try:
        for name, function in instead.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
