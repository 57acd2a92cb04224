"""Parts of a sharded leaf, or of several one behind the other, gathered to the whole: of whatever is cut as it is.

Unlike a parameter, a gradient or what a user has made of one cannot be sent by a rank that has not come to the same
line. So ranks meet first (`ranks.join.Rounds.meet`): one that asks alone is told, and so are all where they have come
to different ones.

The derivative of gathering is the mean over ranks of what comes back, cut: every rank computes the same from the
whole, so that a sum over ranks would count it once for each. Each of the two is the other's derivative.
"""

from __future__ import annotations

import zlib
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


class Gathering:
    """How parts of the leaves of one attached model are gathered.

    Args:
        wire: what its parameters are cut by.
        meet: waits until all ranks have come to what has this number; where the others are, if one will not come.
        left: whether the model is a plain one again.
    """

    def __init__(self, wire: Wire, meet: Callable[[int], str], left: Callable[[], bool]):
        self.wire, self.meet, self.left = wire, meet, left
        # By which a graph's derivatives are told from those of another gather.
        self.gathers = 0

    def gather(self, part: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """The whole, flat.

        Args:
            part: what this rank has of `pieces`, one behind the other.
            pieces: of which leaves it is a part.
            asked: for what, the same on all ranks.
        """
        self._meet(f"{asked} {part.dtype}")
        self.gathers += 1
        # What is made under `torch.inference_mode` training could not use.
        with torch.inference_mode(False), torch.no_grad():
            # Not every backend sends what is not a number.
            sent = part.view(torch.uint8) if part.dtype == torch.bool else part
            leaves = [piece.leaf for piece in pieces]
            _, rows = self.wire.send_parts(sent.split([piece.numel for piece in pieces]), leaves)
            fulls = self.wire.join_parts(rows, leaves)
            return (fulls[0] if len(fulls) == 1 else torch.cat(fulls)).view(part.dtype)

    def mean(self, full: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """This rank's parts of the mean over ranks of something whole and flat."""
        self._meet(asked)
        view = over_ranks(self.wire.on(self.wire.group, None), False)
        fulls = full.split([piece.leaf.numel for piece in pieces])
        with torch.inference_mode(False):
            means = (view.pull(x.view(piece.leaf.shape), piece.leaf) for x, piece in zip(fulls, pieces, strict=True))
            return torch.cat([mean.reshape(-1) for mean in means]).to(full.dtype)

    def _meet(self, asked: str) -> None:
        if self.left():
            why, right = "this rank's part is that of a model that is a plain one again", "it before opt.detach()"
            raise RuntimeError(explain(f"{asked}, after opt.detach()", why, right))
        apart = self.meet(zlib.crc32(asked.encode()))
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
    """A leaf of which something is a part.

    Attributes:
        leaf: the leaf.
        low, high: this rank's flat range of it.
        by: what gathers it.
    """

    leaf: Leaf
    low: int
    high: int
    by: Gathering

    @property
    def numel(self) -> int:
        """How much of it this rank has."""
        return self.high - self.low

    def alike(self, other: Piece) -> bool:
        """Whether every rank has the same range of both."""
        return self is other or (self.by is other.by and self.leaf.shape == other.leaf.shape and self.low == other.low)


def piece_of(by: Gathering, leaf: Leaf, part: Tensor) -> tuple[Piece, ...]:
    """Of which leaf a parameter is a part; of one that is kept in another form than it is cut in, nothing."""
    low, high = by.wire.span(leaf)
    return (Piece(leaf, low, high, by),) if part.numel() == high - low else ()


def gathered(part: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
    """The whole of a part, flat; differentiable."""
    if part.requires_grad and torch.is_grad_enabled():
        return GatherParts.apply(part, pieces, asked)
    return pieces[0].by.gather(part.detach().reshape(-1), pieces, asked)


def cut(full: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """This rank's part of something whole, flat."""
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
    """What comes back to wholes, the mean over ranks, cut; its derivative is `GatherParts`."""

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
