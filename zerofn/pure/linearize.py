"""A function evaluated at the parameters of a state, and its pullback: by plain autograd or by torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import NO_LEVEL, forward_level, functorch_active
from .._errors import explain
from ..core.arguments import check_flag
from ..core.executor import passed
from ..core.layout import Leaves
from ..core.linear_map import over, times
from ..core.pipeline import Pipeline
from ..core.state import State
from ..kernels.recording import only_compiled, recorded

_REQUIRES_GRAD = attrgetter("requires_grad")


def check_graph(where: str, create_graph: Any) -> None:
    """Refuse `create_graph=True` inside of `torch.no_grad()`, where autograd records nothing."""
    check_flag(where, "create_graph", create_graph)
    if create_graph and not recorded() and not torch.is_grad_enabled():
        raise RuntimeError(
            explain(
                f"{where}(create_graph=True) inside torch.no_grad()",
                "autograd records nothing there, so what is returned could not be differentiated",
                f"{where}(create_graph=True) outside of it, or no create_graph",
            )
        )


# From cotangents of outputs, and whether they count, to gradients by path and cotangents of inputs.
Pull = Callable[[list[Tensor], bool | Tensor], tuple[Leaves, list[Any]]]
Evaluated = Callable[[Leaves, list[Tensor]], tuple[list[Tensor], list[Tensor]]]


def linearize(
    where: str,
    pipe: Pipeline,
    fn: Evaluated,
    state: State,
    given: list[Tensor],
    scale: Tensor | None,
    keep: bool,
    record: bool,
) -> tuple[list[Tensor], list[Tensor], Pull]:
    """Evaluate `fn` at the state's parameters: both lists that it returns, and the pullback of the first.

    Outside of torch.func that is plain autograd, which frees saved tensors as it goes; saved-tensor hooks and
    activation checkpointing work there, which torch.func refuses. Inside a torch.func transform it is torch.func.vjp.

    Args:
        where: who asks, for messages.
        fn: `fn(parameters by path as the model sees them, given)` -> two lists of tensors, of which the first is
            differentiated. All tensors that `fn` makes are to be in them: torch.func unwraps no others.
        given: further tensors, which `fn` is differentiated by as well.
        scale: the loss scale, by which `fn` multiplies cotangents, except under `record`.
        keep: whether the pullback may be called again.
        record: whether what is returned, and what the pullback returns, can be differentiated.

    Raises:
        RuntimeError: in inference mode.
    """
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and not functorch_active():
        why = "autograd records nothing there, so no parameter would have a gradient"
        right = f"{where} outside of it; torch.no_grad() around it is fine"
        raise RuntimeError(explain(f"{where} inside torch.inference_mode()", why, right))
    resident = _resident(pipe, state.leaves, record) if pipe.road.late or pipe.gathering is not None else state.leaves
    ran = _recorded if record else _with_autograd if pipe.gathering is None else _with_blocks
    return ran(fn, pipe, resident, given, scale, keep)


def _with_autograd(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """Differentiate by what the model sees, then pull gradients back to storage outside of autograd.

    So one collective carries many leaves, in an order that does not depend on this rank's graph.
    """
    stages, dtypes = pipe.road.pulled, pipe.road.grad_dtypes
    paths = pipe.layout.trained
    seen = pipe.road.see(stages, resident) if stages else resident
    # For every leaf in every step, hence from C.
    seen = dict(zip(seen, map(Tensor.detach, seen.values()), strict=True))
    inputs = list(map(Tensor.detach, given))
    wanted = list(map(Tensor.requires_grad_, [*map(seen.__getitem__, paths), *inputs]))
    with torch.enable_grad():
        primals, others = inner(seen, inputs)

    def pull(vectors: list[Tensor], counts: bool) -> tuple[Leaves, list]:
        found = pulled_back(primals, wanted, vectors, keep)
        rest, found = list(found[len(paths) :]), zip(paths, found, strict=False) if counts else ()
        if stages or scale is not None:
            grads = {p: g for p, g in found if g is not None}
            return pipe.road.pull(stages, grads, resident, scale), rest
        return {p: g if g.dtype is dtypes[p] else g.to(dtypes[p]) for p, g in found if g is not None}, rest

    return primals, others, pull


def pulled_back(
    outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor], keep: bool, create_graph: bool = False
) -> Sequence[Any]:
    """Cotangents of inputs from those of outputs, by plain autograd; `None` where no output depends on an input."""
    if not all(map(_REQUIRES_GRAD, outputs)):
        pairs = [(y, v) for y, v in zip(outputs, vectors, strict=True) if y.requires_grad]
        outputs, vectors = [y for y, _ in pairs], [v for _, v in pairs]
    if not outputs:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, vectors, keep, create_graph, allow_unused=True)


def _with_blocks(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """As `_with_autograd`, of parameters that are gathered block by block, in forward and again in backward.

    It takes more and smaller collectives than gathering the whole tree at once, and an exchange before each: the price
    of having two blocks in memory at a time.
    """
    # Imported here: what it needs is a tenth of the package, and only `shard` on several ranks has a use for it.
    from .sharded_params import Blocks

    blocks = Blocks(pipe, resident, scale)
    anchor = torch.zeros((), requires_grad=True)
    inputs = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad(), blocks.evaluation():
        primals, others = inner(blocks.lazy_parameters(anchor), inputs)

    def pull(vectors: list[Tensor], counts: bool) -> tuple[Leaves, list]:
        ys, vs = (primals, vectors) if counts else ([], [])
        grads, rest = blocks.pull(lambda: pulled_back(ys, [anchor, *inputs], vs, keep)[1:])
        return grads, list(rest)

    return primals, others, pull


def _resident(pipe: Pipeline, stored: Leaves, record: bool) -> Leaves:
    """What `linearize` differentiates by: stored parameters, or gathered ones where the reduction comes after an
    accumulation."""
    if record and not pipe.road.late:
        return stored
    if not record or only_compiled(stored.values()):
        return pipe.road.see(pipe.road.after_update, stored)
    views = pipe.road.composed(pipe.road.after_update, pipe.dtypes.gradient)
    return {path: view(stored[path], None) for path, view in views.items()}


def _recorded(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """As `_with_autograd`, but views, pullback and gradients can all be differentiated.

    Leaf by leaf, since a view and its transpose are differentiable maps of one leaf. The transpose is applied outside
    of autograd, which would give a gradient the dtype of its parameter and not that of the pipeline.

    In a compiled graph that nobody differentiates all leaves go through views together: one collective carries many
    leaves, and needs no derivative, of which the compiler knows none.
    """
    paths = pipe.layout.trained
    views, stages, together = pipe.leaf_views, pipe.road.pulled, only_compiled(resident.values())
    alone = {} if together else {p: view(resident[p], None) for p, view in views.items()}
    seen = pipe.road.see(stages, resident) if together else alone
    fixed = {p: x for p, x in seen.items() if p not in paths}
    # The compiler reads torch.autograd.grad only where it is told to.
    ran = _func_vjp if functorch_active() or torch.compiler.is_compiling() else _graph_vjp

    def flat_fn(values: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return inner({**fixed, **dict(zip(paths, values, strict=True))}, inputs)

    primals, others, pull_flat = ran(flat_fn, [seen[p] for p in paths], given)

    def pull(vectors: list[Tensor], counts: bool | Tensor) -> tuple[Leaves, list]:
        if scale is not None:
            vectors = [times(v, scale.detach(), v.dtype) for v in vectors]
        found, rest = pull_flat(vectors)
        if scale is not None:
            rest = [None if g is None else over(g, scale.detach(), g.dtype) for g in rest]
        grads = dict(zip(paths, found, strict=True))
        if pipe.groups:
            # A leaf without a gradient here may have one on other ranks: all take part in its reduction.
            grads = {p: torch.zeros_like(seen[p]) if g is None else g for p, g in grads.items()}
        if isinstance(counts, Tensor):
            grads = passed(counts, grads)
        elif not counts:
            grads = {p: None if g is None else torch.zeros_like(g) for p, g in grads.items()}
        there = {p: g for p, g in grads.items() if g is not None}
        if together:
            return pipe.road.pull(stages, there, resident, scale), rest
        return {p: views[p].transposed(g, scale) for p, g in there.items()}, rest

    return primals, others, pull


def _func_vjp(flat_fn: Callable, values: list[Tensor], given: list[Tensor]):
    primals, pull, others = torch.func.vjp(flat_fn, values, given, has_aux=True)  # type: ignore[misc]
    return primals, others, pull


def _graph_vjp(flat_fn: Callable, values: list[Tensor], given: list[Tensor]):
    """By autograd, with `create_graph`."""
    # New tensors: inputs may be functions of parameters, which are not to be differentiated through here.
    values, given = ([_alias(x) for x in xs] for xs in (values, given))
    with torch.enable_grad():
        primals, others = flat_fn(values, given)

    def pull(vectors: list[Tensor]) -> tuple[list, list]:
        found = pulled_back(primals, [*values, *given], vectors, keep=True, create_graph=True)
        return list(found[: len(values)]), list(found[len(values) :])

    return primals, others, pull


def _alias(x: Tensor) -> Tensor:
    if x.requires_grad:
        return x.view_as(x)
    # `detach` would lose the tangent.
    return (x.view_as(x) if forward_level() != NO_LEVEL else x.detach()).requires_grad_()
