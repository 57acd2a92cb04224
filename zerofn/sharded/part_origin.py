"""`Origin`: which leaf a part is of, and how the whole is gathered; refusals where it cannot be gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.autograd import arguments_of_functions, in_backward
from .._errors import explain
from ..core.row_sharding import rows_of, span
from ..ranks.dtensor_shards import by_rows
from .gather_part import Piece, cut, gathered

# The method that asks for the whole by name, which a hook may do.
EXPLICIT = "full_tensor"


class Origin(NamedTuple):
    """What a part is a part of.

    Attributes:
        how: how the user came by it, for messages.
        path: of the parameter; empty for a part of several.
        gradient: whether it is a gradient.
        pieces: this rank's pieces of leaves, concatenated; empty where they cannot be gathered.
        shape: of the whole.
        in_hook: whether a gradient hook is given it, or it is computed from that. At other stages than `shard` a hook
            is given this rank's own gradient, not a part of the mean.
        state: whether it is of the optimizer's state.
    """

    how: str
    path: str
    gradient: bool
    pieces: tuple[Piece, ...] = ()
    shape: torch.Size = torch.Size()
    in_hook: bool = False
    state: bool = False

    def __str__(self) -> str:
        return f"{self.how} of the sharded parameter {self.path}" if self.path else self.how

    def alike(self, other: Origin) -> bool:
        """Whether both are cut alike on every rank, so that elementwise functions may run on the shards."""
        if self.shape != other.shape or len(self.pieces) != len(other.pieces):
            return False
        return self.pieces is other.pieces or all(map(Piece.alike, self.pieces, other.pieces))

    def whole(self, part: Tensor, name: str) -> Tensor:
        """The whole, gathered, for the function of that name; differentiable."""
        if not self.pieces or in_backward():
            refuse(name, self)
        if self.in_hook and name != EXPLICIT:
            refuse_in_hook(name, self)
        check_no_argument()
        return gathered(part.as_subclass(Tensor), self.pieces, f"{name} of {self}").view(self.shape)

    def local(self, part: Tensor) -> Tensor:
        """This rank's shard in the shape of its rows, as `Shard(0)` of torch has it; flat where ranks split rows."""
        rows = self.local_shape
        return part if rows is None or part.ndim != 1 else part.view(rows)

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """The shape of this rank's rows; `None` where ranks split rows, or it is of several leaves."""
        if len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        return rows_of(self.shape, piece.leaf.shape, piece.low, piece.high, piece.by.wire.group.size)

    @property
    def is_chunk(self) -> bool:
        """Whether it is this rank's chunk by rows, as torch cuts a tensor of its shape; a wire may cut otherwise."""
        if self.local_shape is None:
            return False
        (piece,) = self.pieces
        group = piece.by.wire.group
        return (piece.low, piece.high) == span(self.shape, group.rank, group.size)

    def placed(self, kind: str) -> tuple[Any, tuple[Any, ...]]:
        """The mesh and the placements of a DTensor that is cut as this.

        Args:
            kind: the type of device.

        Raises:
            AttributeError: ranks split rows, or it is not known here how they are cut.
        """
        if not self.is_chunk:
            why = f"it is cut flat over ranks, as {tuple(self.shape)} has fewer rows than ranks or is not cut by rows"
            right = "x.full_tensor(), which every rank calls; distribute_tensor(x.full_tensor(), mesh, placements)"
            raise AttributeError(explain(f"placements of {self}", why, right))
        return self.pieces[0].by.mesh(kind), by_rows()

    def rows(self, full: Tensor) -> Tensor:
        """This rank's flat shard of a full tensor that broadcasts to the whole."""
        return cut(full.expand(self.shape), self.pieces)


# Gives the origin of a part; `None` of what is no part.
OriginOf = Callable[[Any], Origin | None]


class Stay(NamedTuple):
    """The result of a handler that is a part: its flat shard, and its origin."""

    part: Tensor
    of: Origin


def refuse(name: str, of: Origin) -> Any:
    """Raise for a function that would gather in the middle of backward, or gather what has no `pieces`."""
    of_gradients = (
        'opt.metrics["grad_norm"] after opt.step(), which is that of the whole; or it after backward;\n'
        "zf.clip_by_global_norm(max_norm), or a zf.leafwise function of whole gradients, in the chain"
    )
    of_values = f"p.{name}(...) of the parameter itself, on every rank, which gathers it\nwith opt.gathered(): the same"
    of_states = (
        "x.mul_(2.0), x.zero_(): what is elementwise runs on every rank's shard\n"
        "zf.save(directory, opt) and zf.load, for the whole of each leaf's state"
    )
    why = "it is not gathered here, and what this rank has of it alone would give another result"
    if of.pieces:
        why = "the whole of it is gathered, for which ranks would wait for each other: in the middle of\n"
        why += "backward one of them may never come to it"
    instead = of_gradients if of.gradient else of_states if of.state else of_values
    raise RuntimeError(
        explain(
            f"{name} of {of}",
            why,
            f"{instead}\nx.to_local() for this rank's piece by itself",
        )
    )


def refuse_in_hook(name: str, of: Origin) -> Any:
    """Raise for a function that is not linear in what a gradient hook is given."""
    raise RuntimeError(
        explain(
            f"{name.strip('_')} of {of}, in a hook or of what it kept",
            "under shard a hook is given this rank's part of the mean over ranks, at all other stages the rank's own\n"
            "gradient. What is linear in it makes the same step of both, and this is not",
            "zf.clip_by_value(max_value), or a zf.leafwise function, in the chain: of the mean, at every stage\n"
            "p.grad.clamp_(...) after backward, on parts of the mean\n"
            "x.to_local() for this rank's piece of the mean by itself; after backward x.full_tensor() for all of it",
        )
    )


def check_no_argument() -> None:
    """Refuse to compute with wholes in an `autograd.Function` that is given a part whose gradient it is to give."""
    for x in arguments_of_functions():
        of = getattr(x, "of", None)
        # A parameter may be whole for a while.
        if isinstance(of, Origin) and x.requires_grad and not getattr(x, "is_whole", bool)():
            raise RuntimeError(
                explain(
                    f"an autograd.Function that is given {of}",
                    "under shard its gradient is a part, and the function's backward would give that of the whole",
                    "Function.apply(x, p.clone()): the whole, at every stage",
                )
            )


def refuse_saving(of: Origin) -> Any:
    """Raise for a function that gives out a part's memory: `torch.save`, NumPy."""
    raise RuntimeError(
        explain(
            f"saving {of}",
            "its tensors are this rank's shards",
            "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
            "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from\n"
            "x.full_tensor() for the whole, on every rank; x.to_local() for this rank's piece by itself",
        )
    )


def check_sizes(name: str, of: Origin, part: Tensor, x: Tensor) -> None:
    """Refuse a plain tensor beside a part that has the shard's shape and does not broadcast to the whole's."""
    if x.shape in (part.shape, of.local_shape) and not _fits(x.shape, of.shape):
        raise RuntimeError(
            explain(
                f"{name} of {of}, {tuple(of.shape)}, and a tensor of shape {tuple(x.shape)}",
                "under shard a plain tensor beside it is of the whole's shape, and this one has that of a piece",
                "torch.zeros_like(p), p.grad * 2: what is made of such tensors, or beside them, is one as well\n"
                "p.to_local(), p.grad.to_local(): pieces by themselves, as plain tensors, on both sides",
            )
        )


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(shape, whole)
    except RuntimeError:
        return False
    return True
