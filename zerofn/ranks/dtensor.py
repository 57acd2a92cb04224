"""Converts local tensors to DTensors and back."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .backend import world
from .group import Group

# ----------------------------------------------------------------------------------------------------------------------
# These functions convert DTensor parameters, as tensor parallelism makes them, to local tensors and back.


CUT = "parallelize_module(model, mesh['tp'], plan) along one axis of a mesh, and zf.attach of that"


# Where a part of a tensor begins in every dimension, and its sizes.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def distributed_class() -> Any:
    """The class of DTensors; `None` if their library is not loaded, so that there can be none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(x: Any) -> bool:
    """Whether `x` is a DTensor. This does not import their library: if there is a DTensor it is loaded."""
    kind = distributed_class()
    return kind is not None and type(x) is not Tensor and isinstance(x, kind)


def why_not_attachable(x: Any) -> str | None:
    """Why a DTensor parameter cannot be attached; None if it can."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, (placement, *more) = x.device_mesh, x.placements
    if mesh.ndim > 1:
        names = ", ".join(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
        return f"lies over {mesh.ndim} axes of a mesh ({names}), of which one is the chain's: {(placement, *more)}"
    if world()[0] not in mesh.mesh.flatten().tolist():
        return f"is of a mesh of other ranks, {mesh.mesh.flatten().tolist()}, than this one, rank {world()[0]}"
    if placement.is_partial():
        return f"is a sum that is not made yet, {placement}: p.redistribute(placements=[Replicate()]) first"
    if type(placement) not in (Replicate, Shard):
        return f"is placed by {type(placement).__name__}, and only Shard and Replicate are known"
    return None


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
        # The DTensor then holds the plain tensor, also of a parameter with a class of its own.
        with torch.DisableTorchFunctionSubclass():
            return DTensor.from_local(local, self.mesh, self.placements, **how)

    def local(self, x: Any) -> Tensor:
        """This rank's shard of a DTensor, or of a plain tensor with the full shape; other tensors unchanged.

        A DTensor with other placements, such as a gradient still to be summed, is redistributed: all ranks call this.
        """
        if is_distributed(x):
            return _placed(x, self).to_local()
        if x.shape == self.shape and len(self.boxes) > 1:
            return in_box(x, self.boxes[self.place])
        return x


def in_box(whole: Tensor, box: Box) -> Tensor:
    """The box of a full tensor, given by its offsets and sizes.

    >>> in_box(torch.arange(8).view(2, 4), ((0, 2), (2, 2)))
    tensor([[2, 3],
            [6, 7]])
    """
    for dim, (low, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, low, length)
    return whole


def _placed(x: Any, form: Form) -> Any:
    same = tuple(x.placements) == form.placements and x.device_mesh == form.mesh
    return x if same else x.redistribute(form.mesh, form.placements)


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


def by_rows() -> tuple[Any, ...]:
    """The placements of a DTensor that is sharded by rows over a mesh of one axis."""
    from torch.distributed.tensor import Shard

    return (Shard(0),)


def replicated(full: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank of a mesh has, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def as_part_of(like: Any, x: Any) -> Any:
    """This rank's shard as a DTensor like another one that has as many elements here; anything else unchanged."""
    if not is_distributed(like) or type(x) is not Tensor or x.shape != (like.to_local().numel(),):
        return x
    from torch.distributed.tensor import DTensor

    rows, where = x.view(like.to_local().shape), (like.device_mesh, like.placements)
    return DTensor.from_local(rows, *where, run_check=False, shape=like.shape, stride=like.stride())


def placed_like(x: Any, like: Any) -> Tensor:
    """A DTensor in the shape and with the placements of another; all ranks call it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.full_tensor().reshape(like.shape), like.device_mesh, like.placements)


def in_full(x: Any) -> Tensor:
    """The full tensor of a DTensor; a plain tensor unchanged. All ranks must call it."""
    return x.full_tensor() if is_distributed(x) else x


def _from_zero(x: Tensor) -> Tensor:
    """The tensor on a storage that begins at its memory: torch cannot pickle DTensors whose local one has an offset."""
    if x.storage_offset() == 0:
        return x
    # As bytes, since DLPack does not know every dtype.
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
