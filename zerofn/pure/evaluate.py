"""A function of trees, evaluated at the parameters of a state, and its pullback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._errors import bad_leaves, explain
from .._ranges import PHASE, ranged
from ..core.layout import Leaves
from ..core.linear_map import crosses, enter, leave
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.tree import flatten, parted, unflatten
from ..sharded.lazy_tensor import settled
from .linearize import linearize

# From one cotangent for each output that has one to gradients by path, and the cotangents of the inputs as trees.
Pullback = Callable[[list[Tensor]], tuple[Leaves, tuple]]


def evaluate(pipe: Pipeline, fn: Callable[..., Any], state: State, inputs: tuple, record: bool) -> tuple[Any, Pullback]:
    """`fn(params, *inputs)` at the state's parameters: what it returns, and its pullback.

    Args:
        pipe: whose loss scale and output dtype stand around `fn`.
        fn: of trees, returning a tree.
        state: whose parameters `fn` is given as the model sees them.
        inputs: trees.
        record: whether the output and what the pullback gives can be differentiated.
    """
    scale = pipe.scale_of(state.transforms)
    # Where all is recorded the loss is multiplied by the scale, and gradients divided, as anyone would.
    inside = None if record else scale
    flat, spec = flatten(inputs)
    chosen = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and crosses(x)]
    outer: dict[str, Any] = {}

    def inner(seen: Leaves, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        args = list(flat)
        for i, x in zip(chosen, given, strict=True):
            args[i] = enter(x, inside, None)
        tensors, outer["join"] = parted(settled(fn(pipe.layout.join(seen), *unflatten(spec, args))))
        outer["crossing"] = list(map(crosses, tensors))
        primals = [leave(y, inside, pipe.dtypes.output_dtype) for y in tensors if crosses(y)]
        return primals, [y for y in tensors if not crosses(y)]

    with ranged(PHASE, "forward"):
        primals, others, pull_flat = linearize(
            "zf.vjp", pipe, inner, state, [flat[i] for i in chosen], scale, True, record
        )
    primal, other = iter(primals), iter(others)
    made = [next(primal if crossing else other) for crossing in outer["crossing"]]

    def pull(vectors: list[Tensor]) -> tuple[Leaves, tuple]:
        with ranged(PHASE, "backward"):
            grads, rest = pull_flat(vectors, True)
        back: list[Any] = [None] * len(flat)
        for i, g in zip(chosen, rest, strict=True):
            back[i] = g
        return grads, unflatten(spec, back)

    return outer["join"](made if record else map(Tensor.detach, made)), pull


def cotangents_of(out: Any, cotangents: Any) -> list[Tensor]:
    """The cotangents of what a function returned, as a pullback takes them.

    Raises:
        ValueError: they are of another structure, shape or dtype; every one is named.
    """
    given, spec = flatten(cotangents)
    primals, expected = flatten(out)
    if spec != expected:
        raise ValueError(
            explain(
                "pullback(cotangents)",
                f"cotangents have the structure {spec}, the output {expected}",
                "one tensor per output",
            )
        )
    found, bad = [], []
    for i, (g, y) in enumerate(zip(given, primals, strict=True)):
        if not isinstance(y, Tensor) or not crosses(y):
            continue
        if not isinstance(g, Tensor) or g.shape != y.shape or (g.is_complex() and not y.is_complex()):
            bad.append((f"output {i}", f"cotangent {_shape(g)}, output {_shape(y)}"))
        else:
            found.append(g.to(y.dtype))
    if bad:
        right = "tensors of the outputs' shapes, complex ones for complex outputs only"
        raise ValueError(bad_leaves("cotangents do not fit the output", bad, right))
    return found


def _shape(x: Any) -> str:
    return f"of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else repr(x)
