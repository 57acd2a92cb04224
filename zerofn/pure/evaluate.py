"""A function of trees at the parameters of a state, between the edges of its pipeline, and its pullback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .._errors import bad_leaves, explain
from .._ranges import PHASE, ranged
from ..core.layout import Leaves
from ..core.linear_map import crosses, enter, leave
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.tree import flatten, unflatten
from ..sharded.lazy_tensor import settled
from .linearize import linearize


class Evaluation(NamedTuple):
    """A function of trees at the parameters of a state.

    Attributes:
        out: what it returned.
        pull: from a cotangent of each such tensor to gradients by path, and to the cotangents of its inputs' leaves.
        tensors: which leaves of `out` have cotangents.
        spec: the structure of its inputs.
    """

    out: Any
    pull: Callable[[list[Tensor]], tuple[Leaves, list[Any]]]
    tensors: list[int]
    spec: Any


def evaluate(pipe: Pipeline, fn: Callable[..., Any], state: State, inputs: tuple, record: bool) -> Evaluation:
    """`fn(params, *inputs)`, from trees to a tree, at the state's parameters, and its pullback, between their edges."""
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
        out = settled(fn(pipe.layout.join(seen), *unflatten(spec, args)))
        leaves, outer["spec"] = flatten(out)
        outer["out"] = leaves
        tensors = [i for i, y in enumerate(leaves) if isinstance(y, Tensor)]
        at = outer["tensors"] = [i for i in tensors if crosses(leaves[i])]
        rest = outer["rest"] = [i for i in tensors if not crosses(leaves[i])]
        return [leave(leaves[i], inside, pipe.dtypes.output_dtype) for i in at], [leaves[i] for i in rest]

    with ranged(PHASE, "forward"):
        primals, others, pull_flat = linearize(
            "zf.vjp", pipe, inner, state, [flat[i] for i in chosen], scale, True, record
        )
    leaves = list(outer["out"])
    for i, y in zip([*outer["tensors"], *outer["rest"]], [*primals, *others], strict=True):
        leaves[i] = y
    out = unflatten(outer["spec"], [y.detach() if isinstance(y, Tensor) and not record else y for y in leaves])

    def pull(vectors: list[Tensor]) -> tuple[Leaves, list[Any]]:
        with ranged(PHASE, "backward"):
            grads, rest = pull_flat(vectors, True)
        back: list[Any] = [None] * len(flat)
        for i, g in zip(chosen, rest, strict=True):
            back[i] = g
        return grads, back

    return Evaluation(out, pull, outer["tensors"], spec)


def cotangents_of(ran: Evaluation, cotangents: Any) -> list[Tensor]:
    """The cotangents of the tensors that a function returned, as `pull` takes them.

    Raises:
        ValueError: they are of another structure, shape or dtype; every one is named.
    """
    given, spec = flatten(cotangents)
    primals, expected = flatten(ran.out)
    if spec != expected:
        raise ValueError(
            explain(
                "pullback(cotangents)",
                f"cotangents have the structure {spec}, the output {expected}",
                "one tensor per output",
            )
        )
    bad = [
        (f"output {i}", f"cotangent {_shape(given[i])}, output {_shape(primals[i])}")
        for i in ran.tensors
        if not isinstance(given[i], Tensor)
        or given[i].shape != primals[i].shape
        or (given[i].is_complex() and not primals[i].is_complex())
    ]
    if bad:
        right = "tensors of the outputs' shapes, complex ones for complex outputs only"
        raise ValueError(bad_leaves("cotangents do not fit the output", bad, right))
    return [given[i].to(primals[i].dtype) for i in ran.tensors]


def _shape(x: Any) -> str:
    return f"of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else repr(x)
