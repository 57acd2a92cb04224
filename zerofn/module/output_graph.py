"""Which tensors that leave a model were computed from which others, so that hooks on these can be refused.

What leaves is a copy. So in `y, h = model(x)`, where `y` was computed from `h` inside, the backward from the user's `y`
does not pass the user's `h`. The gradient of any loss is right all the same, for both paths meet inside. But a hook on
that `h`, its `retain_grad()` and `torch.autograd.grad(y, h)` would miss the part of the gradient that comes from `y`.

To put `h` on the path is not possible: that it will be returned is not known when the graph from `h` to `y` is made,
and autograd cannot change a graph. So these uses are refused when a cotangent comes to `y`. Its node gets an edge to
the node of `h`, over which nothing flows: without it autograd would not run the node of `y` for a gradient by `h`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._compat.autograd import backward_call, sequence_nr
from .._compat.tensors import version
from .._errors import explain
from ..core.linear_map import EdgeMap, linear_map, times, untracked
from .crossing import Crossing
from .nested_tensors import made

# How a tensor has left.
RETURNED, KEPT, SHOWN = "that the model returned", "that it keeps in an attribute", "that a forward hook was given"


class OutputRecord:
    """A tensor that has left, and what shows that somebody wants its gradient.

    Attributes:
        how: in which way it has left.
        shape: its shape.
        outer: a weak reference to the tensor outside.
        version: how often it had been written into when it left.
        hooks: the dict of its hooks, which like them lives as long as its node; `None` before `watch`.
    """

    __slots__ = ("hooks", "how", "outer", "shape", "version")

    def __init__(self, outer: Tensor, how: str):
        self.how, self.shape, self.version = how, tuple(outer.shape), version(outer)
        self.outer = weakref.ref(outer)
        self.hooks: Any = None

    def watch(self) -> None:
        """Find its hooks, those that will be registered too."""
        outer = self.outer()
        if self.hooks is None and outer is not None:
            # torch makes the dict with the first hook, and the handle of a hook has it.
            handle = outer.register_hook(lambda g: None)
            self.hooks = handle.hooks_dict_ref()
            handle.remove()

    def as_it_left(self) -> Tensor | None:
        """The tensor outside, if somebody holds it and nobody has written into it."""
        outer = self.outer()
        return outer if outer is not None and version(outer) == self.version else None


class OutputTracker:
    """The tensors that leave during one call of a model.

    Args:
        crossing: makes the crossing of an edge, inward or not.
    """

    def __init__(self, crossing: Callable[[EdgeMap, bool], Crossing]):
        self.crossing = crossing
        # By id of the node inside and number of its output. The nodes are kept alive, and with them the ids.
        self.left: dict[tuple[int, int], tuple[OutputRecord, Any]] = {}
        # The smallest number of those nodes: older nodes lead to none of them.
        self.first = 1 << 64
        # Tensors in attributes that are to leave, the last made first; and those that have left: (inner, outer).
        self.waiting: list[Tensor] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.carried: list[Tensor] = []

    def carry(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Record what earlier calls have left in attributes: pairs of an inner tensor and an outer one.

        The outer ones are held during the call, in which the model may put others in their place: the path to what left
        in still earlier calls leads over them.
        """
        self.carried = [outer for _, outer in pairs]
        for inner, outer in pairs:
            self.add(inner, outer, KEPT)

    def wait(self, tensors: list[Tensor]) -> None:
        """Tensors in attributes that are to leave in turn with the outputs: what was made first leaves first."""
        done = {id(t) for t, _ in self.kept}
        waiting = {id(t): t for t in (*self.waiting, *tensors) if id(t) not in done}
        self.waiting = sorted(waiting.values(), key=made, reverse=True)

    def keep_until(self, number: float) -> list[tuple[Tensor, Tensor]]:
        """Let out tensors in attributes that were made up to node `number`; (inner, outer) of all that have left."""
        while self.waiting and made(self.waiting[-1]) <= number:
            t = self.waiting.pop()
            self.kept.append((t, self.let_out(t, None, True, KEPT)))
        return self.kept

    def let_out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool, how: str) -> Tensor:
        """The tensor outside: `y` itself where it need not be copied, and nothing that left is upstream of it.

        Args:
            y: a tensor of the inside that requires a gradient.
            dtype: what it is cast to.
            crosses: whether a cast or the loss scale needs a copy.
            how: in which way it leaves.
        """
        self.keep_until(made(y))
        edge = get_gradient_edge(y)
        left, _ = self.left.get((id(edge.node), edge.output_nr), (None, None))
        outer = None if left is None else left.as_it_left()
        if outer is not None and dtype in (None, outer.dtype):
            return outer
        upstream = self._upstream(edge)
        if not crosses and not upstream:
            return y
        crossing = self.crossing(EdgeMap(times, dtype, y.dtype), False)
        outer = Exit.apply(y, crossing, upstream, *(o for left in upstream if (o := left.as_it_left()) is not None))
        assert isinstance(outer, Tensor)
        self.add(y, outer, how)
        return outer

    def add(self, inner: Tensor, outer: Tensor, how: str) -> None:
        """Record that a tensor has left."""
        edge = get_gradient_edge(inner)
        left = OutputRecord(outer, how)
        if how == SHOWN:
            # At once, for it may be gone when the next one leaves.
            left.watch()
        self.left[id(edge.node), edge.output_nr] = left, edge.node
        self.first = min(self.first, made(inner))

    def _upstream(self, edge: GradientEdge) -> list[OutputRecord]:
        """The nearest ones that an output was computed from, as far as somebody may ask for their gradients."""
        found: dict[int, OutputRecord] = {}
        seen: dict[int, Any] = {}
        steps: list[tuple[Any, int]] = [(edge.node, edge.output_nr)] if self.left else []
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
                steps += [(n, i) for n, i in node.next_functions if n is not None and sequence_nr(n) >= self.first]
        return list(found.values())


class Exit(Function):
    """The Function of an outward crossing, with edges to what has left upstream of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, crossing: Crossing, upstream: list[OutputRecord], *outers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.forth, ctx.back, ctx.upstream = crossing.forth, crossing.back, upstream
        ctx.others = (None,) * (2 + len(outers))
        # `None` where a cotangent came only over the edges from other crossings.
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
    """Refuse a backward from an output that was computed from these, where somebody wants their gradients.

    Raises:
        RuntimeError: the cotangent of the output would be missing in such a gradient.
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
