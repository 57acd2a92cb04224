"""Converts local tensors to DTensors and back."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .backend import ranks_along, world
from .group import Group

# ----------------------------------------------------------------------------------------------------------------------
# A `Form` is how local tensors make one DTensor.


# Where a part of a tensor begins in every dimension, and its sizes.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def distributed_class() -> Any:
    """The class of DTensors; `None` if their library is not loaded, so that there can be none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(x: Any) -> bool:
    """Whether `x` is a DTensor. This does not import their library: if there is a DTensor it is loaded."""
    kind = distributed_class()
    return kind is not None and type(x) is not Tensor and isinstance(x, kind)


@dataclass(frozen=True)
class Form:
    """How the local tensors of several ranks make one DTensor.

    Attributes:
        mesh: of one axis.
        placements: along that axis.
        shape: of the DTensor.
        stride: of the DTensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Any) -> Form:
        return cls(x.device_mesh, tuple(x.placements), x.shape, tuple(x.stride()))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def place(self) -> int:
        """The index of this rank in the mesh."""
        return self.ranks.index(world()[0])

    @property
    def boxes(self) -> tuple[Box, ...]:
        """For every rank the offsets and sizes of its shard; a single box if all ranks have the full tensor."""
        begin, (placement,) = (0,) * len(self.shape), self.placements
        if placement.is_replicate():
            return ((begin, tuple(self.shape)),)
        dim, size = placement.dim % len(self.shape), len(self.ranks)
        length = self.shape[dim]
        width = -(-length // size)
        found = []
        for rank in range(size):
            low, high = min(rank * width, length), min((rank + 1) * width, length)
            sizes = (*self.shape[:dim], high - low, *self.shape[dim + 1 :])
            found.append(((*begin[:dim], low, *begin[dim + 1 :]), sizes))
        return tuple(found)

    def wrap(self, local: Tensor) -> Tensor:
        """The DTensor whose local tensor here is `local`; differentiable, and its cotangent has the same placements."""
        from torch.distributed.tensor import DTensor

        how: Any = dict(run_check=False, shape=self.shape, stride=self.stride)
        # A parameter may have a class of its own. Without its __torch_function__ the DTensor holds the plain tensor.
        with torch.DisableTorchFunctionSubclass():
            return DTensor.from_local(local, self.mesh, self.placements, **how)


def in_box(whole: Tensor, box: Box) -> Tensor:
    """The box of a full tensor, given by its offsets and sizes.

    >>> in_box(torch.arange(8).view(2, 4), ((0, 2), (2, 2)))
    tensor([[2, 3],
            [6, 7]])
    """
    for dim, (low, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, low, length)
    return whole


# ----------------------------------------------------------------------------------------------------------------------
# These functions show shards as DTensors, which torch's checkpoints reshard for other numbers of ranks, and DTensors
# as tensors.


def as_dtensors(
    shards: Mapping[Hashable, tuple[Tensor, tuple[int, ...], tuple[int, ...]]], group: Group
) -> dict[Hashable, Tensor]:
    """DTensors on the memory of shards, each given with the shape of this rank's rows and the full shape."""
    # A state may have shards on the host. A mesh of another device type would move them.
    kinds = {x.device.type for x, _, _ in shards.values()}
    meshes = {kind: DeviceMesh.from_group(group.pg, kind) for kind in kinds} if group.pg else {}
    made: dict[Hashable, Tensor] = {}
    for key, (x, mine, shape) in shards.items():
        made[key] = _rows_of(shape, _from_zero(x).view(mine), meshes[x.device.type])
    return made


def _rows_of(shape: tuple[int, ...], rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The contiguous DTensor of that shape, sharded by rows, whose local tensor here is `rows`."""
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def mesh_of_group(group: Group, kind: str) -> DeviceMesh:
    """The ranks of a group as a mesh of one axis, for a type of device."""
    return DeviceMesh.from_group(group.pg, kind)


def leave_group(mesh: DeviceMesh) -> None:
    """Let go of the closed process group of a mesh, which would keep its sockets open as long as it lives."""
    vars(mesh).get("_pg_registry", {}).clear()


def by_rows() -> tuple[Any, ...]:
    """The placements of a DTensor that is sharded by rows over a mesh of one axis."""
    from torch.distributed.tensor import Shard

    return (Shard(0),)


def replicated(full: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank of a mesh has, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def in_full(x: Any) -> Tensor:
    """The full tensor of a DTensor; a plain tensor unchanged. All ranks must call it."""
    return x.full_tensor() if is_distributed(x) else x


# ----------------------------------------------------------------------------------------------------------------------
# A DTensor may come from a file. `torch.load` gives it the local tensor, the coordinate and the names of the process
# groups that the rank had which saved it. So it may have another rank's shard, and a collective over its mesh runs in
# whatever group has such a name in this process.


def why_not_of_this_rank(x: Any) -> str | None:
    """Why the local tensor of a DTensor is not the shard of this rank; `None` if it is.

    Args:
        x: a DTensor.
    """
    mesh, ranks, (rank, size) = x.device_mesh.mesh, ranks_of(x), world()
    if max(ranks) >= size:
        return f"a shard over the ranks {ranks} of another job: here {'is one rank' if size == 1 else f'are {size}'}"
    if rank not in ranks:
        return f"a shard over the ranks {ranks}, of which this is none: rank {rank}"
    saved = coordinate_of(x)
    if saved is None or tuple((mesh == rank).nonzero()[0].tolist()) != saved:
        whose = "no rank" if saved is None else f"rank {int(mesh[saved])}"
        return f"the shard of {whose}, and this is rank {rank}"
    return None


def of_this_rank(x: Any, groups: Iterable[Group]) -> Tensor | str:
    """This rank's part of a DTensor, or the reason why it has none.

    Args:
        x: a DTensor.
        groups: over whose ranks it may be; it is gathered over the first one of the same ranks.

    Returns:
        A plain tensor, if the local one is the full one by its placements; or a DTensor of the same local tensor, on a
        mesh whose process groups are open; or the reason, as text.
    """
    mesh, ranks, local = x.device_mesh, ranks_of(x), x.to_local()
    full = all(p.is_replicate() or mesh.size(i) == 1 for i, p in enumerate(x.placements))
    if full and local.shape == x.shape:
        return local
    if why := why_not_of_this_rank(x):
        return why
    for group in groups if mesh.ndim == 1 else ():
        if group.pg is not None and group.ranks == ranks:
            from torch.distributed.tensor import DTensor

            where = (mesh_of_group(group, mesh.device_type), x.placements)
            return DTensor.from_local(local, *where, run_check=False, shape=x.shape, stride=x.stride())
    if all([_is_open(mesh, dim) for dim in range(mesh.ndim)]):
        return x
    return f"a shard over the ranks {ranks}, and no process group of this job that it names has them in that order"


def _is_open(mesh: DeviceMesh, dim: int) -> bool:
    """Whether the process group along a dimension of a mesh exists here, with the ranks of the mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    along = ranks_along(mesh, dim, coordinate)
    try:
        # The order counts: torch's `full_tensor()` is wrong over a mesh with its ranks in another order.
        return dist.get_process_group_ranks(mesh.get_group(dim)) == along
    except (RuntimeError, ValueError, LookupError):
        return False


def _from_zero(x: Tensor) -> Tensor:
    """The tensor on a storage that begins at its memory: torch cannot pickle DTensors whose local one has an offset."""
    if x.storage_offset() == 0:
        return x
    # It is converted as bytes, since DLPack does not know every dtype.
    return torch.from_dlpack(x.detach().view(torch.uint8)).view(x.dtype)


def coordinate_of(x: Any) -> tuple[int, ...] | None:
    """The coordinate of this rank in the mesh of a DTensor; `None` for a plain tensor."""
    place = x.device_mesh.get_coordinate() if is_distributed(x) else None
    return None if place is None else tuple(place)


def ranks_of(x: Any) -> tuple[int, ...]:
    """The ranks of a DTensor's mesh."""
    return tuple(x.device_mesh.mesh.flatten().tolist())


def mesh_of(x: Any) -> tuple[int, ...] | None:
    """The ranks over which a DTensor is sharded by rows, in order; `None` for other DTensors and plain tensors."""
    if not is_distributed(x) or x.device_mesh.ndim != 1 or not x.placements[0].is_shard(0):
        return None
    return tuple(x.device_mesh.mesh.tolist())


def as_local(x: Any) -> Tensor:
    """This rank's local tensor of a DTensor; a plain tensor unchanged."""
    return x.to_local() if is_distributed(x) else x


# ----------------------------------------------------------------------------------------------------------------------
# FSDP2 shards parameters by rows along one axis of a mesh. Axes in front of it have replicas; those behind it are of
# tensor parallelism.


@dataclass(frozen=True)
class Rows:
    """How the rows of a DTensor parameter lie over ranks.

    Attributes:
        ranks: those that share the rows, in order.
        mesh: of these ranks, with one axis.
        tensor_parallel: how tensor parallelism has cut the parameter before its rows were shared; `None` if it has not.
        shape: of the tensor whose rows are shared: full, or what tensor parallelism leaves on this rank.
    """

    ranks: tuple[int, ...]
    mesh: DeviceMesh
    tensor_parallel: Form | None
    shape: torch.Size


def why_not_by_rows(x: Any) -> str | None:
    """Why the rows of a DTensor parameter cannot be found; `None` if they can."""
    placements = tuple(x.placements)
    if any([p.is_partial() for p in placements]):
        return f"is a sum that is not reduced yet: {placements}"
    axis = _axis_of_rows(placements)
    if axis is None:
        return f"is not sharded by rows: {placements}; fully_shard(..., shard_placement_fn) chose another dimension"
    if len(placements) - axis > 2:
        return f"is cut along several axes of a mesh behind that of fully_shard, where one is known: {placements}"
    return None


def _axis_of_rows(placements: tuple[Any, ...]) -> int | None:
    """The first axis along which a tensor is sharded, if that is by rows. All axes before it have replicas."""
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            return axis if getattr(placement, "dim", None) == 0 else None
    return None


def rows_over(x: Any) -> Rows:
    """How the rows of a DTensor parameter, for which `why_not_by_rows` is `None`, lie over ranks."""
    mesh, placements = x.device_mesh, tuple(x.placements)
    axis = _axis_of_rows(placements)
    assert axis is not None
    over = _line(mesh, axis)
    form, shape = None, x.shape
    if axis + 1 < len(placements):
        form = Form(_line(mesh, axis + 1), placements[axis + 1 :], x.shape, tuple(x.stride()))
        shape = torch.Size(form.boxes[form.place if len(form.boxes) > 1 else 0][1])
    return Rows(tuple(over.mesh.tolist()), over, form, shape)


def _line(mesh: Any, axis: int) -> DeviceMesh:
    """The ranks along one axis of a mesh through this rank, as a mesh."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)
