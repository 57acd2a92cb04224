"""Where a tensor crosses the boundary of an attached model, and which autograd nodes lie inside of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from ._boundary import LinearMap
from ._errors import explain

# Calls whose graphs may still be alive. A graph older than that is taken for one made outside.
REMEMBERED = 4096


class Edge(Protocol):
    """A linear map and its transpose, which is where the loss scale acts."""

    def forth(self, x: Tensor, scale: Tensor | None, /) -> Tensor: ...

    def back(self, g: Tensor, scale: Tensor | None, /) -> Tensor: ...


class Crossing:
    """One tensor on its way into a model or out of it.

    The scale is read when backward runs, and not saved with the graph: activation checkpointing counts
    saved tensors, and the parts it repeats must use the scale of the part they join.

    Attributes:
        owner: whose boundary is crossed.
        inward: from the outside to the inside.
    """

    def __init__(
        self,
        owner: Any,
        edge: Edge,
        inward: bool,
        scale: Callable[[], Tensor | None],
        noticed: Callable | None,
    ):
        self.owner = owner
        self.edge = edge
        self.inward = inward
        self.scale = scale
        self.noticed = noticed
        self.used: Tensor | None = None

    def cross(self, x: Tensor) -> Tensor:
        """The tensor on the other side."""
        return LinearMap.apply(x, None, self.forth, self.back)

    def forth(self, x: Tensor, _: Tensor | None) -> Tensor:
        """The value; and, once a first derivative exists, the derivative of `back`."""
        now = self.scale()
        if self.used is not None and now is not None and now is not self.used and float(now) != float(self.used):
            raise RuntimeError(
                explain(
                    f"a second derivative after the loss scale went from {float(self.used):g} to {float(now):g}",
                    "the first derivative was taken with the old scale, and they no longer cancel",
                    "both derivatives before opt.step()",
                )
            )
        return self.edge.forth(x, None)

    def back(self, g: Tensor, _: Tensor | None) -> Tensor:
        """The cotangent, with the loss scale or without it again."""
        self.used = self.scale()
        if self.noticed is not None:
            self.noticed(self)
        return self.edge.back(g, self.used)


def crossing_of(node: Any, owner: Any) -> Crossing | None:
    """The crossing of `owner`'s boundary that an autograd node belongs to."""
    found = getattr(getattr(node, "forth", None), "__self__", None)
    return found if isinstance(found, Crossing) and found.owner is owner else None


class Spans:
    """Which autograd nodes were made during calls of a model, told by the numbers they are given.

    Each thread counts its own nodes. Backward threads make far fewer than the thread of forward, so
    numbers of theirs are met there only by graphs that are long gone.
    """

    def __init__(self) -> None:
        self.found: deque[tuple[int, int, Any]] = deque(maxlen=REMEMBERED)

    def add(self, start: int, end: int, caller: Any = None) -> None:
        """Nodes from `start` up to, not including, `end`, and a name for what made them."""
        if self.found and self.found[-1][0] == start:
            self.found.pop()
        if end > start:
            self.found.append((start, end, caller))

    def __contains__(self, number: int) -> bool:
        return any(start <= number < end for start, end, _ in reversed(self.found))

    def maker(self, number: int) -> Any:
        """The name of what made a node."""
        return next((caller for start, end, caller in reversed(self.found) if start <= number < end), None)
