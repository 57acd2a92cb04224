"""Parts of a tensor on several ranks as one of torch's distributed tensors, which its checkpoints know, and back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .group import Group


def as_distributed(
    shards: Mapping[Hashable, tuple[Tensor, tuple[int, ...], tuple[int, ...]]], group: Group
) -> dict[Hashable, Tensor]:
    """Shards, each with its shape and that of its whole, as torch's own distributed tensors over the same memory.

    Those are what torch's checkpoints cut anew for another number of ranks.
    """
    # A state may have parts on the host. A mesh of another device type would move them.
    kinds = {x.device.type for x, _, _ in shards.values()}
    meshes = {kind: DeviceMesh.from_group(group.pg, kind) for kind in kinds} if group.pg else {}
    made: dict[Hashable, Tensor] = {}
    for key, (x, mine, shape) in shards.items():
        made[key] = _rows_of(shape, _from_zero(x).view(mine), meshes[x.device.type])
    return made


def _rows_of(shape: tuple[int, ...], rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The distributed tensor of that shape, contiguous and cut by rows, of which this rank has `rows`."""
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def cut_as(x: Tensor, like: Tensor) -> Tensor:
    """A distributed tensor in the shape of another, and cut like it; all ranks call it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(x, DTensor) and isinstance(like, DTensor)
    return distribute_tensor(x.full_tensor().reshape(like.shape), like.device_mesh, like.placements)


def as_rows(like: Mapping[Hashable, tuple[tuple[int, ...], Tensor]], group: Group) -> dict[Hashable, Tensor]:
    """Distributed tensors of these whole shapes, cut by rows; of the dtype and on the device of `like`, and unset."""
    meshes = {kind: DeviceMesh.from_group(group.pg, kind) for kind in {x.device.type for _, x in like.values()}}
    made: dict[Hashable, Tensor] = {}
    for key, (shape, x) in like.items():
        low, high = (min(i * -(-shape[0] // group.size), shape[0]) for i in (group.rank, group.rank + 1))
        rows = torch.empty((high - low, *shape[1:]), dtype=x.dtype, device=x.device)
        made[key] = _rows_of(shape, rows, meshes[x.device.type])
    return made


def in_full(x: Tensor) -> Tensor:
    """A distributed tensor whole, which all ranks ask for together; a plain tensor as it is."""
    if type(x) is Tensor:
        return x
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


def _from_zero(x: Tensor) -> Tensor:
    """The same memory, as a storage that begins there: torch cannot pickle a distributed tensor with an offset."""
    if x.storage_offset() == 0:
        return x
    # As bytes, since DLPack does not know every dtype.
    return torch.from_dlpack(x.detach().view(torch.uint8)).view(x.dtype)


def coordinate_of(x: Tensor) -> tuple[int, ...] | None:
    """The place in its mesh of this rank's part of a distributed tensor; `None` of a plain one."""
    if type(x) is Tensor:
        return None
    from torch.distributed.tensor import DTensor

    place = x.device_mesh.get_coordinate() if isinstance(x, DTensor) else None
    return None if place is None else tuple(place)


def mesh_of(x: Tensor) -> tuple[int, ...] | None:
    """The ranks that a distributed tensor lies over by rows, in order; `None` of a plain one, and of others."""
    if type(x) is Tensor:
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor) or x.device_mesh.ndim != 1 or not x.placements[0].is_shard(0):
        return None
    return tuple(x.device_mesh.mesh.tolist())


def as_local(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; a plain tensor as it is."""
    if type(x) is Tensor:
        return x
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x
