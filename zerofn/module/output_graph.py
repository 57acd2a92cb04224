"""Of the tensors that leave a model, which were computed from which.

What leaves is a copy. So in `y, h = model(x)`, where `y` was computed from `h` inside, the way back from the user's `y`
does not pass the user's `h`. The gradient of any loss is right all the same, for both ways meet inside. But a hook on
that `h`, its `retain_grad()` and `torch.autograd.grad(y, h)` would see nothing of what comes by way of `y`.

To put `h` on the way is not possible: that it will be returned is not known when the graph from it to `y` is made, and
autograd cannot change a graph. So they are refused, when a cotangent comes to `y`. Its node gets an edge to that of
`h`, over which nothing flows: autograd executes only what lies on a way to a tensor that it is asked for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from .._compat.autograd import backward_call, number_of
from .._compat.tensors import version
from .._errors import explain
from ..core.linear_map import EdgeMap, linear_map, times, untracked
from .crossing import Crossing
from .nested_tensors import made

# How a tensor has left.
RETURNED, KEPT, SHOWN = "that the model returned", "that it keeps in an attribute", "that a forward hook was given"


class OutputRecord:
    """A tensor that has left, and what tells that somebody wants its gradient.

    Attributes:
        how: it has left.
        shape: its shape.
        outer: itself, for as long as somebody holds it.
        version: how often it had been written into when it left.
        hooks: the dict of its hooks, which like them lives as long as its node.
    """

    __slots__ = ("hooks", "how", "outer", "shape", "version")

    def __init__(self, outer: Tensor, how: str):
        self.how, self.shape, self.version = how, tuple(outer.shape), version(outer)
        self.outer = weakref.ref(outer)
        self.hooks: Any = None

    def watch(self) -> None:
        """See its hooks from now on, those that will be registered too."""
        outer = self.outer()
        if self.hooks is None and outer is not None:
            # The dict is made with the first hook, and known to its handle.
            handle = outer.register_hook(lambda g: None)
            self.hooks = handle.hooks_dict_ref()
            handle.remove()

    def as_it_left(self) -> Tensor | None:
        """The tensor, if somebody holds it and nobody has written into it."""
        outer = self.outer()
        return outer if outer is not None and version(outer) == self.version else None


class OutputTracker:
    """What leaves during one call of a model.

    Args:
        crossing: makes the crossing of an edge, inward or not.
    """

    def __init__(self, crossing: Callable[[EdgeMap, bool], Crossing]):
        self.crossing = crossing
        # By node inside and number of its output. The nodes are kept: an id is only unique among the living.
        self.left: dict[tuple[int, int], tuple[OutputRecord, Any]] = {}
        # Nodes made before this one lead to none of them.
        self.first = 1 << 64
        # Tensors in attributes, the last made first; and those that have left, with what they are outside.
        self.waiting: list[Tensor] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.carried: list[Tensor] = []

    def carry(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """What calls before have left in attributes: a tensor of the inside, and of the outside.

        They are held during the call, in which the model may put others in their place: over them leads the way to what
        left in still earlier ones.
        """
        self.carried = [outer for _, outer in pairs]
        for inner, outer in pairs:
            self.add(inner, outer, KEPT)

    def wait(self, tensors: list[Tensor]) -> None:
        """These are to leave in turn with the results: what was made first has to leave first."""
        done = {id(t) for t, _ in self.kept}
        waiting = {id(t): t for t in (*self.waiting, *tensors) if id(t) not in done}
        self.waiting = sorted(waiting.values(), key=made, reverse=True)

    def keep_until(self, number: float) -> None:
        """Let out those that were made up to node `number`."""
        while self.waiting and made(self.waiting[-1]) <= number:
            t = self.waiting.pop()
            self.kept.append((t, self.let_out(t, None, True, KEPT)))

    def keep_all(self) -> list[tuple[Tensor, Tensor]]:
        """Let out all that wait; what they and those before are outside."""
        self.keep_until(math.inf)
        return self.kept

    def let_out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool, how: str) -> Tensor:
        """The tensor for the outside: `y` itself where it need not cross, and nothing that left is upstream of it.

        Args:
            y: a tensor of the inside that requires a gradient.
            dtype: what it is cast to.
            crosses: whether it has to by itself.
            how: it leaves.
        """
        self.keep_until(made(y))
        same = self.of(y)
        outer = None if same is None else same.as_it_left()
        if outer is not None and dtype in (None, outer.dtype):
            return outer
        upstream = self._upstream(y)
        if not crosses and not upstream:
            return y
        crossing = self.crossing(EdgeMap(times, dtype, y.dtype), False)
        outer = Exit.apply(y, crossing, upstream, *(o for left in upstream if (o := left.as_it_left()) is not None))
        assert isinstance(outer, Tensor)
        self.add(y, outer, how)
        return outer

    def add(self, inner: Tensor, outer: Tensor, how: str) -> None:
        """Note that a tensor has left."""
        edge = get_gradient_edge(inner)
        left = OutputRecord(outer, how)
        if how == SHOWN:
            # Nobody else may hold it when the next one leaves.
            left.watch()
        self.left[id(edge.node), edge.output_nr] = left, edge.node
        self.first = min(self.first, made(inner))

    def of(self, inner: Tensor) -> OutputRecord | None:
        """How a tensor of the inside has left."""
        if not self.left:
            return None
        edge = get_gradient_edge(inner)
        found = self.left.get((id(edge.node), edge.output_nr))
        return None if found is None else found[0]

    def _upstream(self, y: Tensor) -> list[OutputRecord]:
        """Those that `y` was computed from: the nearest ones, and of these those that somebody may ask for."""
        if not self.left:
            return []
        edge = get_gradient_edge(y)
        found: dict[int, OutputRecord] = {}
        seen: dict[int, Any] = {}
        steps: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
        while steps:
            node, number = steps.pop()
            left = self.left.get((id(node), number), (None, None))[0]
            if left is not None:
                left.watch()
                there = left.as_it_left() is not None
                if there or left.hooks:
                    found[id(left)] = left
                if there:
                    continue
            if id(node) not in seen:
                seen[id(node)] = node
                steps += [(n, i) for n, i in node.next_functions if n is not None and number_of(n) >= self.first]
        return list(found.values())


class Exit(Function):
    """A crossing that leads outward, with edges to what has left upstream of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, crossing: Crossing, upstream: list[OutputRecord], *outers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.forth, ctx.back, ctx.upstream = crossing.forth, crossing.back, upstream
        ctx.others = (None,) * (2 + len(outers))
        # Where nothing has come but over the edges of others, nothing is to go on.
        ctx.set_materialize_grads(False)
        return crossing.forth(y, None)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple:  # type: ignore[override]
        if ctx.upstream and not torch.compiler.is_compiling():
            check_unwanted(ctx.upstream)
        if g is None:
            return None, *ctx.others
        pulled = ctx.back(g, None) if untracked() else linear_map(g, None, ctx.back, ctx.forth)
        return pulled, *ctx.others

    @staticmethod
    def jvp(ctx: Any, y: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return linear_map(y, None, ctx.forth, ctx.back)


def check_unwanted(upstream: list[OutputRecord]) -> None:
    """A cotangent comes to what was computed from these, or to what others were computed from that were.

    Raises:
        RuntimeError: it is a part of a gradient that somebody wants, and would be left out of it.
    """
    asked = backward_call()[1]
    for left in upstream:
        outer = left.as_it_left()
        if left.hooks:
            _refuse(left, "a hook on {}", "the hook")
        if outer is not None and any(x is outer or getattr(x, "node", None) is outer.grad_fn for x in asked):
            _refuse(left, "torch.autograd.grad(..., h) or backward(inputs=[h]) of {} as h", "the gradient")
        if outer is not None and outer.retains_grad:
            _refuse(left, "retain_grad() on {}", "its .grad")


def _refuse(left: OutputRecord, what: str, who: str) -> NoReturn:
    tensor = f"a tensor of shape {left.shape} {left.how}"
    raise RuntimeError(
        explain(
            f"{what.format(tensor)}, where an output of the model was computed from it inside",
            "what leaves a model under scale_loss or precision(output_dtype=...) is a copy: what comes back by way of "
            f"that output does not pass it, and {who} would lack it",
            "no scale_loss, for bf16 needs none, and output.float() outside of the model instead of output_dtype;\n"
            "or a model that ends with this tensor, and what was computed from it outside",
        )
    )
