"""All-gather of parts of a sharded leaf, or of several concatenated leaves, in the user's code.

Unlike a parameter, a gradient or what the user has computed of one cannot be sent by a rank that has not come to the
same line. So ranks meet first (`Rounds.meet`): a rank that asks alone raises, and all raise where they have come to
different lines.

The derivative of this gather is the mean over ranks of the cotangents, cut: every rank computes the same from the
whole, so a sum over ranks would count it once for each rank. Each of the two is the other's derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.compiler import uncompiled
from .._errors import explain
from ..core.layout import Leaf
from ..core.views import Wire, over_ranks
from ..ranks.dtensor_shards import mesh_of_group

# Dtypes of so many bytes that every backend sends. Others, of integers, travel as these.
SENT_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Gathering:
    """Gathers parts of the leaves of one attached model.

    Args:
        wire: what its parameters are cut by.
        meet: waits until all ranks have come to what it is given, which is the same on all; returns where the others
            are, if one will not come.
        left: whether the model is detached.

    Attributes:
        gathers: how many there were, to tell apart what the derivatives of two of them are called.
    """

    def __init__(self, wire: Wire, meet: Callable[[str], str], left: Callable[[], bool]):
        self.wire, self.meet, self.left = wire, meet, left
        self.gathers = 0
        self._meshes: dict[str, Any] = {}

    def mesh(self, kind: str) -> Any:
        """The ranks as a `DeviceMesh` of one axis, for a type of device."""
        if kind not in self._meshes:
            self._meshes[kind] = mesh_of_group(self.wire.group, kind)
        return self._meshes[kind]

    def gather(self, part: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """The whole, flat.

        Args:
            part: this rank's elements of `pieces`, concatenated, flat.
            pieces: of which leaves it is a part.
            asked: what it is gathered for, the same on all ranks.
        """
        self.meet_for(f"{asked} {part.dtype}")
        self.gathers += 1
        # What is made under `torch.inference_mode` training could not use.
        with torch.inference_mode(False), torch.no_grad():
            number = part.is_floating_point() or part.is_complex()
            sent = part if number else part.view(SENT_AS[part.element_size()])
            leaves = [piece.leaf for piece in pieces]
            # A state may lie in host memory.
            sent = sent.to(self.wire.group.device)
            _, rows = self.wire.send_parts(sent.split([piece.numel for piece in pieces]), leaves)
            fulls = self.wire.join_parts(rows, leaves)
            return (fulls[0] if len(fulls) == 1 else torch.cat(fulls)).view(part.dtype).to(part.device)

    def mean(self, full: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """This rank's parts of the mean over ranks of a flat full tensor."""
        self.meet_for(asked)
        view = over_ranks(self.wire.on(self.wire.group, None), False)
        fulls = full.split([piece.leaf.numel for piece in pieces])
        with torch.inference_mode(False), torch.no_grad():
            means = (view.pull(x.view(piece.leaf.shape), piece.leaf) for x, piece in zip(fulls, pieces, strict=True))
            return torch.cat([mean.reshape(-1) for mean in means]).to(full.dtype)

    def meet_for(self, asked: str) -> None:
        """Wait until all ranks have come to the same line.

        Raises:
            RuntimeError: one of them will not come, or the model was detached.
        """
        if self.left():
            why, right = "this rank's part is that of a model that is a plain one again", "it before opt.detach()"
            raise RuntimeError(explain(f"{asked}, after opt.detach()", why, right))
        apart = self.meet(asked)
        if apart:
            raise RuntimeError(
                explain(
                    f"{asked}, which not all ranks ask for",
                    f"under shard each has a part, and the whole is gathered from all: {apart}",
                    "the same line on every rank, and what is done with its result on one:\n"
                    "norm = p.grad.norm()\nif rank == 0: log(norm)",
                )
            )


@dataclass(frozen=True)
class Piece:
    """This rank's flat range of a leaf, from `low` to `high`, and what gathers it."""

    leaf: Leaf
    low: int
    high: int
    by: Gathering

    @property
    def numel(self) -> int:
        """How many elements of the leaf this rank has."""
        return self.high - self.low

    def alike(self, other: Piece) -> bool:
        """Whether every rank has the same range of both."""
        return self is other or (self.by is other.by and self.leaf.shape == other.leaf.shape and self.low == other.low)


def piece_of(by: Gathering, leaf: Leaf, part: Tensor) -> tuple[Piece, ...]:
    """The piece that a shard is; none where a leaf is stored in another form than it is cut in."""
    low, high = by.wire.span(leaf)
    return (Piece(leaf, low, high, by),) if part.numel() == high - low else ()


def gathered(part: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
    """The whole of a part, flat; differentiable."""
    if part.requires_grad and torch.is_grad_enabled():
        return GatherParts.apply(part, pieces, asked)
    return pieces[0].by.gather(part.detach().reshape(-1), pieces, asked)


def cut(full: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """This rank's parts of a full tensor, flat."""
    flat = full.reshape(-1)
    if len(pieces) == 1:
        return flat[pieces[0].low : pieces[0].high]
    fulls = flat.split([piece.leaf.numel for piece in pieces])
    return torch.cat([x[piece.low : piece.high] for x, piece in zip(fulls, pieces, strict=True)])


class GatherParts(Function):
    """Parts to wholes; its derivative is `MeanOfWholes`."""

    @staticmethod
    def forward(part: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
        return pieces[0].by.gather(part.reshape(-1), pieces, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.pieces, asked = inputs
        ctx.asked = f"the derivative of {asked} (gather {ctx.pieces[0].by.gathers})"

    @staticmethod
    @uncompiled
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return MeanOfWholes.apply(g, ctx.pieces, ctx.asked), None, None


class MeanOfWholes(Function):
    """Cotangents of wholes to the mean over ranks, cut; its derivative is `GatherParts`."""

    @staticmethod
    def forward(g: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
        return pieces[0].by.mean(g.reshape(-1), pieces, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.pieces, ctx.asked = inputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, v: Tensor) -> tuple:  # type: ignore[override]
        return GatherParts.apply(v, ctx.pieces, f"the derivative of {ctx.asked}"), None, None
