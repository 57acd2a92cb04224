"""One tensor that crosses the boundary of an attached model: the value forward, the loss scale backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._errors import explain
from ..core.view import EdgeMap, LeafView, linear_map

# A linear map and its transpose, which is where the loss scale acts.
Edge = EdgeMap | LeafView


class Crossing:
    """One tensor that enters a model or leaves it.

    The scale is read when backward runs, and not saved with the graph: activation checkpointing counts
    saved tensors, and a recomputed graph must use the scale of the graph that it joins.

    Attributes:
        owner: the boundary that is crossed, a `ModelBoundary`.
        edge: the map and its transpose.
        inward: from the outside to the inside.
        used: the scale by which a cotangent was multiplied or divided.
    """

    __slots__ = ("edge", "inward", "owner", "used")

    def __init__(self, owner: Any, edge: Edge, inward: bool):
        self.owner, self.edge, self.inward = owner, edge, inward
        self.used: Tensor | None = None

    def cross(self, x: Tensor) -> Tensor:
        """The tensor on the other side."""
        return linear_map(x, None, self.forth, self.back)

    def forth(self, x: Tensor, _: Tensor | None) -> Tensor:
        """The value forward. It is also the derivative of `back`, for second derivatives."""
        if self.used is not None:
            _check_same_scale(self.used, self.owner.scale())
        return self.edge.forth(x, None)

    def back(self, g: Tensor, _: Tensor | None) -> Tensor:
        """The cotangent, multiplied by the loss scale or divided by it."""
        self.used = self.owner.scale_of_cotangent()
        return self.edge.back(g, self.used)


def _check_same_scale(used: Tensor, now: Tensor | None) -> None:
    if now is not None and now is not used and float(now) != float(used):
        raise RuntimeError(
            explain(
                f"a second derivative after the loss scale went from {float(used):g} to {float(now):g}",
                "the first derivative was taken with the old scale, so the two scales do not cancel",
                "both derivatives before opt.step()",
            )
        )


def crossing_of(node: Any, owner: Any) -> Crossing | None:
    """The crossing of the boundary `owner` that an autograd node belongs to."""
    found = getattr(getattr(node, "forth", None), "__self__", None)
    return found if isinstance(found, Crossing) and found.owner is owner else None
