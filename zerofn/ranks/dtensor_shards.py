"""Shards as DTensors, which torch's checkpoints reshard for other numbers of ranks, and DTensors as tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .dtensor_parameters import is_distributed
from .group import Group


def as_dtensors(
    shards: Mapping[Hashable, tuple[Tensor, tuple[int, ...], tuple[int, ...]]], group: Group
) -> dict[Hashable, Tensor]:
    """DTensors over the memory of shards, each given with the shape of this rank's rows and that of the whole leaf."""
    # A state may have shards on the host. A mesh of another device type would move them.
    kinds = {x.device.type for x, _, _ in shards.values()}
    meshes = {kind: DeviceMesh.from_group(group.pg, kind) for kind in kinds} if group.pg else {}
    made: dict[Hashable, Tensor] = {}
    for key, (x, mine, shape) in shards.items():
        made[key] = _rows_of(shape, _from_zero(x).view(mine), meshes[x.device.type])
    return made


def _rows_of(shape: tuple[int, ...], rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The contiguous DTensor of that shape, cut by rows, of which this rank has `rows`."""
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def mesh_of_group(group: Group, kind: str) -> DeviceMesh:
    """The ranks of a group as a mesh of one axis, for a type of device."""
    return DeviceMesh.from_group(group.pg, kind)


def by_rows() -> tuple[Any, ...]:
    """The placements of a DTensor whose rows are cut over a mesh of one axis."""
    from torch.distributed.tensor import Shard

    return (Shard(0),)


def replicated(full: Tensor, mesh: Any) -> Tensor:
    """A tensor that every rank of a mesh has, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def as_part_of(like: Any, x: Any) -> Any:
    """This rank's part as a DTensor like another one, which has as many elements here; anything else unchanged."""
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
    """The full tensor of a DTensor, for which all ranks call it; a plain tensor unchanged."""
    return x.full_tensor() if is_distributed(x) else x


def _from_zero(x: Tensor) -> Tensor:
    """The same memory as a storage that begins there: torch cannot pickle DTensors whose local tensor has an offset."""
    if x.storage_offset() == 0:
        return x
    # As bytes, since DLPack does not know every dtype.
    return torch.from_dlpack(x.detach().view(torch.uint8)).view(x.dtype)


def coordinate_of(x: Any) -> tuple[int, ...] | None:
    """The coordinate of this rank in the mesh of a DTensor; `None` for a plain tensor."""
    place = x.device_mesh.get_coordinate() if is_distributed(x) else None
    return None if place is None else tuple(place)


def ranks_of(x: Any) -> tuple[int, ...]:
    """The ranks that a DTensor lies over."""
    return tuple(x.device_mesh.mesh.flatten().tolist())


def mesh_of(x: Any) -> tuple[int, ...] | None:
    """The ranks that a DTensor is cut over by rows, in order; `None` for other DTensors and plain tensors."""
    if not is_distributed(x) or x.device_mesh.ndim != 1 or not x.placements[0].is_shard(0):
        return None
    return tuple(x.device_mesh.mesh.tolist())


def as_local(x: Any) -> Tensor:
    """This rank's part of a DTensor; a plain tensor unchanged."""
    return x.to_local() if is_distributed(x) else x
