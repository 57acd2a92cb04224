"""DTensors beside parts: `p.copy_(x)`, `p.grad.mul_(x)`, `p.grad = x` with a DTensor `x`.

A DTensor that is cut over the same ranks in the same rows is a part: its local tensor is taken, and nothing is sent.
One that is placed otherwise (`Replicate`, `Shard(1)`, `Partial`) is gathered by its own `full_tensor()`, once all ranks
have come to the line. One of other ranks is refused. A function that writes into a DTensor is given wholes of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from torch import Tensor

from .._compat.autograd import in_backward
from .._errors import explain
from ..core.row_sharding import width
from ..ranks.dtensor_parameters import distributed_class, is_distributed
from ..ranks.dtensor_shards import replicated
from .part_origin import Origin, OriginOf
from .torch_function_arguments import Wholes, tensors_in


def exchanged(
    name: str,
    args: tuple,
    kwargs: dict,
    origin_of: OriginOf,
    part_of: Callable[[Tensor, Origin], Tensor],
    whole: Callable[[Any], Tensor | None],
) -> tuple[tuple, dict]:
    """The arguments of a function with parts or wholes in the place of DTensors; or the reverse.

    Args:
        name: of the function, for messages.
        args, kwargs: what it is given.
        origin_of: the origin of a part or a sharded parameter.
        part_of: makes a part.
        whole: gathers a part or a parameter, `None` of anything else, for a function that writes into a DTensor.
    """
    kind = distributed_class()
    if kind is None:
        return args, kwargs
    found = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, kind)]
    if not found:
        return args, kwargs
    out = kwargs.get("out")
    target = next(tensors_in([args[0] if out is None else out]), None)
    if isinstance(target, kind) and (out is not None or name.endswith("_") or name.startswith("__i")):
        replicated = _Replicated(target, whole)
        given = Wholes(replicated)
        return (args[0], *given.of(args[1:])), {k: x if k == "out" else given.of(x) for k, x in kwargs.items()}
    beside = [of for x in tensors_in((*args, *kwargs.values())) if (of := origin_of(x)) is not None]
    given = Wholes(lambda x: as_part(x, beside, name, part_of) if isinstance(x, kind) else None)
    return given.of(args), given.of(kwargs)


class _Replicated:
    """Gathers parts to DTensors that every rank of a mesh has in full."""

    def __init__(self, target: Any, whole: Callable[[Any], Tensor | None]):
        self.mesh, self.whole = target.device_mesh, whole

    def __call__(self, x: Any) -> Tensor | None:
        full = self.whole(x)
        return None if full is None else replicated(full, self.mesh)


def as_part(x: Any, beside: Iterable[Origin], name: str, part_of: Callable[[Tensor, Origin], Tensor]) -> Tensor:
    """A DTensor as a part that is cut as one of `beside` is; else the full tensor, for which all ranks come here."""
    known = list(beside)
    for of in known:
        if of.shape == x.shape and _cut_alike(x, of):
            mine = of._replace(how="a DTensor", gradient=False, in_hook=False)
            return part_of(x.to_local().reshape(-1), mine)
    return _full(x, name, known)


def _cut_alike(x: Any, of: Origin) -> bool:
    """Whether each rank has the same rows of both."""
    if len(of.pieces) != 1 or len(x.placements) != 1 or not x.placements[0].is_shard(0):
        return False
    (piece,) = of.pieces
    group, row = piece.by.wire.group, prod(x.shape[1:])
    # Torch's chunks are ours where ranks have whole rows; a short leaf is cut flat, and mostly within a row.
    torch_width = -(-x.shape[0] // group.size) * row
    rows = piece.leaf.shape == x.shape and width(x.shape, group.size) == torch_width
    return (
        rows
        and of.is_chunk
        and tuple(x.device_mesh.mesh.tolist()) == group.ranks
        and x.to_local().numel() == piece.numel
    )


def _full(x: Any, name: str, beside: list[Origin]) -> Tensor:
    of = beside[0] if beside else None
    where = f"over ranks {x.device_mesh.mesh.tolist()} as {', '.join(map(str, x.placements))}"
    wrong = f"{name} of {of}, {tuple(of.shape)}, and a DTensor of shape {tuple(x.shape)} {where}" if of else name
    if of is None or not of.pieces or in_backward() or of.in_hook:
        why = "it is cut otherwise, and would be gathered, for which ranks would wait for each other here"
        raise RuntimeError(explain(wrong, why, "x.full_tensor() in its place, gathered before on every rank"))
    by = of.pieces[0].by
    missing = set(by.wire.group.ranks) - set(x.device_mesh.mesh.flatten().tolist())
    if missing:
        why = f"ranks {sorted(missing)} have a part of the parameter, and none of the DTensor"
        right = "a DTensor of a mesh with all ranks of the parameter; or a plain tensor of the whole, on every rank"
        raise RuntimeError(explain(wrong, why, right))
    by.meet_for(f"{name} of {of} and a DTensor of shape {tuple(x.shape)}")
    return x.full_tensor()


def check_plain(x: Any, how: str, path: str) -> None:
    """Refuse a DTensor for what is whole on this rank."""
    if is_distributed(x):
        why = f"{path} is a plain tensor here, of its whole shape"
        raise RuntimeError(
            explain(f"{how} with a DTensor x", why, f"{how.replace('= x', '= x.full_tensor()')}, on every rank")
        )
