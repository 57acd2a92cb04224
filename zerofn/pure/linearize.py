"""Value and pullback at a state's parameters; under `shard` with parameters that are gathered on use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from zerofn._compat.autograd import run_when_ready
from zerofn._compat.functorch import NO_LEVEL, forward_level, functorch_active
from zerofn._compat.recomputation import recomputes_as_called
from zerofn._compat.tensors import version
from zerofn._errors import explain
from zerofn.core.arguments import check_flag
from zerofn.core.bucketed_views import at_model
from zerofn.core.executor import passed
from zerofn.core.layout import Leaf, Leaves
from zerofn.core.pipeline import Pipeline
from zerofn.core.state import State
from zerofn.core.view import divided, multiplied
from zerofn.kernels.recording import only_compiled, recorded
from zerofn.sharded.gather_on_use import Units, check_alone
from zerofn.sharded.lazy_tensor import Lazy
from zerofn.sharded.units import SMALL, UnitPlans

# ----------------------------------------------------------------------------------------------------------------------
# `linearize` evaluates a function at a state's parameters and returns its pullback, by plain autograd or torch.func.


_REQUIRES_GRAD = attrgetter("requires_grad")


def check_graph(where: str, create_graph: Any) -> None:
    """Refuse `create_graph=True` inside of `torch.no_grad()`, where autograd records nothing."""
    check_flag(where, "create_graph", create_graph)
    if create_graph and not recorded() and not torch.is_grad_enabled():
        raise RuntimeError(
            explain(
                f"{where}(create_graph=True) inside torch.no_grad()",
                "autograd records nothing there, so the result could not be differentiated",
                f"{where}(create_graph=True) outside of torch.no_grad(), or no create_graph",
            )
        )


# Maps cotangents of outputs, and whether they count, to gradients by path and cotangents of inputs.
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

    Outside of torch.func it uses plain autograd, which frees saved tensors as it goes and allows saved-tensor hooks and
    activation checkpointing; torch.func allows neither. Inside of a torch.func transform it uses `torch.func.vjp`.

    Args:
        where: the caller, for messages.
        pipe: the pipeline.
        fn: `fn(parameters by path as the model sees them, given)` -> two lists of tensors, of which the first is
            differentiated. They must contain all tensors that `fn` makes: torch.func unwraps no others.
        state: its parameters are the point.
        given: further tensors to differentiate by.
        scale: the loss scale, by which `fn` multiplies cotangents, except under `record`.
        keep: whether the pullback may be called again.
        record: whether the results, and the pullback's results, can be differentiated.

    Raises:
        RuntimeError: in inference mode.
    """
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and not functorch_active():
        why = "autograd records nothing there, so no parameter would have a gradient"
        right = f"{where} outside of torch.inference_mode(); torch.no_grad() around it is fine"
        raise RuntimeError(explain(f"{where} inside torch.inference_mode()", why, right))
    resident = _resident(pipe, state.leaves, record) if pipe.road.late or pipe.gathering is not None else state.leaves
    ran = _recorded if record else _with_autograd if pipe.gathering is None else _with_blocks
    if torch.compiler.is_compiling():
        return ran(fn, pipe, resident, given, scale, keep)
    with recomputes_as_called("a step" if where == "step" else where, by_grad=True):
        return ran(fn, pipe, resident, given, scale, keep)


def _with_autograd(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """Differentiate by the parameters that the model sees, then pull gradients back to storage outside of autograd.

    So one collective carries many leaves, in an order that does not depend on this rank's graph.
    """
    stages, dtypes = pipe.road.pulled, pipe.road.grad_dtypes
    paths = pipe.layout.trained
    seen = pipe.road.see(stages, resident) if stages else resident
    # Every step detaches every leaf. `map` over a C function is faster than a comprehension.
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
    """Cotangents of inputs from those of outputs, by plain autograd; `None` for an input that no output depends on."""
    if not all(map(_REQUIRES_GRAD, outputs)):
        pairs = [(y, v) for y, v in zip(outputs, vectors, strict=True) if y.requires_grad]
        outputs, vectors = [y for y, _ in pairs], [v for _, v in pairs]
    if not outputs:
        return [None] * len(inputs)
    return torch.autograd.grad(outputs, inputs, vectors, keep, create_graph, allow_unused=True)


def _with_blocks(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """As `_with_autograd`, with parameters that are gathered block by block, in forward and again in backward.

    Compared with gathering the whole tree at once this takes more and smaller collectives, and an exchange before each.
    In return only two blocks are in memory at a time.
    """
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
    """The parameters by which `linearize` differentiates: stored ones, or gathered ones if the reduction is late."""
    if record and not pipe.road.late:
        return stored
    if not record or only_compiled(stored.values()):
        return pipe.road.see(pipe.road.after_update, stored)
    views = pipe.road.composed(pipe.road.after_update, pipe.dtypes.gradient)
    return {path: view(stored[path], None) for path, view in views.items()}


def _recorded(inner: Callable, pipe: Pipeline, resident: Leaves, given: list, scale: Tensor | None, keep: bool):
    """As `_with_autograd`, but views, pullback and gradients can be differentiated.

    It goes leaf by leaf, since a view and its transpose are differentiable maps of one leaf. The transpose is applied
    outside of autograd, which would give a gradient its parameter's dtype instead of the pipeline's.

    In a compiled graph that nobody differentiates, all leaves go through views together: then one collective carries
    many leaves. It needs no derivative, and the compiler knows none for collectives.
    """
    paths = pipe.layout.trained
    views, stages, together = pipe.leaf_views, pipe.road.pulled, only_compiled(resident.values())
    alone = {} if together else {p: view(resident[p], None) for p, view in views.items()}
    seen = pipe.road.see(at_model(stages), resident) if together else alone
    fixed = {p: x for p, x in seen.items() if p not in paths}
    # The compiler traces torch.autograd.grad only if a setting allows it, so it gets torch.func.vjp.
    ran = _func_vjp if functorch_active() or torch.compiler.is_compiling() else _graph_vjp

    def flat_fn(values: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return inner({**fixed, **dict(zip(paths, values, strict=True))}, inputs)

    primals, others, pull_flat = ran(flat_fn, [seen[p] for p in paths], given)

    def pull(vectors: list[Tensor], counts: bool | Tensor) -> tuple[Leaves, list]:
        if scale is not None:
            vectors = [multiplied(v, scale.detach(), v.dtype) for v in vectors]
        found, rest = pull_flat(vectors)
        if scale is not None:
            rest = [None if g is None else divided(g, scale.detach(), g.dtype) for g in rest]
        grads = dict(zip(paths, found, strict=True))
        if pipe.groups:
            # A leaf without a gradient here may have one on other ranks, and all ranks join its reduction.
            grads = {p: torch.zeros_like(seen[p]) if g is None else g for p, g in grads.items()}
        if isinstance(counts, Tensor):
            grads = passed(counts, grads)
        elif not counts:
            grads = {p: None if g is None else torch.zeros_like(g) for p, g in grads.items()}
        present = {p: g for p, g in grads.items() if g is not None}
        if together:
            return pipe.road.pull(stages, present, resident, scale), rest
        return {p: views[p].transposed(g, scale) for p, g in present.items()}, rest

    return primals, others, pull


def _func_vjp(flat_fn: Callable, values: list[Tensor], given: list[Tensor]):
    primals, pull, others = torch.func.vjp(flat_fn, values, given, has_aux=True)  # type: ignore[misc]
    return primals, others, pull


def _graph_vjp(flat_fn: Callable, values: list[Tensor], given: list[Tensor]):
    """By autograd, with `create_graph`."""
    # Inputs may themselves be functions of parameters. Autograd stops at their aliases.
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
    # In forward mode `detach` would lose the tangent, so it is an alias there too.
    return (x.view_as(x) if forward_level() != NO_LEVEL else x.detach()).requires_grad_()


# ----------------------------------------------------------------------------------------------------------------------
# Under `shard` the pure route all-gathers parameters on use, and reduce-scatters gradients.
#
# Each leaf that `fn` gets is a `Lazy`, which is all-gathered when something is computed with it. Autograd saves the
# `Lazy`, and backward gathers it again. So no saved-tensor hooks are needed, as in the eager route: they would not
# allow torch.func inside of `fn`.
#
# Autograd adds up the cotangents of all uses of a leaf. When those of a block are complete, they are reduce-scattered.


# A list element that is a single tensor of at most this many elements gets no unit of its own: each all-gather has a
# latency.
TINY = 1 << 10


class LazyParameters(Function):
    """The lazy parameters of one block; backward reduce-scatters their cotangents."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, blocks: Blocks, i: int) -> tuple[Lazy, ...]:
        ctx.blocks, ctx.i = blocks, i
        ctx.set_materialize_grads(False)
        lazies = blocks.lazies(i)
        frozen = [x for x, leaf in zip(lazies, blocks.units[i], strict=True) if not leaf.trainable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(lazies)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        blocks, i = ctx.blocks, ctx.i
        check_alone(blocks.units[i], gs)
        for leaf, g in zip(blocks.units[i], blocks.gradients(i, gs), strict=True):
            if g is not None and leaf.trainable:
                blocks.schedule.accept(leaf, g, False)
        return None, None, None


class Blocks(Units):
    """The parameters of one evaluation of `fn`.

    One thread makes all its collectives, in the same order on all ranks. So the pipeline's own group serves both for
    data and for the exchange before it.

    Args:
        pipe: a pipeline with a `shard`.
        resident: this rank's shards.
        scale: the loss scale.
    """

    def __init__(self, pipe: Pipeline, resident: Leaves, scale: Tensor | None):
        assert pipe.gathering is not None
        group = pipe.gathering.group
        # Every step detaches every leaf. `map` over a C function is faster than a comprehension.
        shards = dict(zip(resident, map(Tensor.detach, resident.values()), strict=True))
        self.versions = list(map(version, shards.values()))
        self.found: Leaves = {}
        self.open = False
        collect = functools.partial(_collect, self.found)
        super().__init__(pipe.once(_plans), pipe, shards, group, lambda: scale, collect, prefetch=False)

    def lazy_parameters(self, anchor: Tensor) -> Leaves:
        """Lazy parameters by path, which require grad if `anchor` does."""
        found: Leaves = {}
        for i in range(len(self.units)):
            lazies = LazyParameters.apply(anchor, self, i)
            found.update(zip(self.plans.plan(i).place, lazies, strict=True))
            for x in lazies:
                if x.grad_fn is not None:
                    # All parameters of a block share a node. Autograd would run nodes that were made first last, and
                    # keep full gradients of all blocks until then.
                    run_when_ready(x.grad_fn)
                    break
        return found

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Parameters may be used inside. At its end this rank waits until all ranks have finished theirs."""
        self.open = True
        try:
            yield
        except Exception:
            self.schedule.reshard()
            if self.open:
                # Other ranks may still be in their evaluation.
                self.schedule.rest()
            raise
        else:
            self.schedule.rest()
        finally:
            self.open = False

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        if not self.open:
            raise RuntimeError(
                explain(
                    "a parameter used after the function that got it has returned",
                    "under shard its use all-gathers it, which all ranks must join, and others have ended",
                    "return what is computed from it, or keep params['w'].clone()",
                )
            )
        return super().parameter(i, j, age)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Other ranks may have ended, so no further collective begins.
            self.open = False
            raise

    def pull(self, run: Callable[[], Any]) -> tuple[Leaves, Any]:
        """Run a backward, `run`; return the gradients of shards that it gave, and what `run` returned."""
        now = list(map(version, self.params.values()))
        if now != self.versions:
            changed = next(p for p, a, b in zip(self.params, now, self.versions, strict=True) if a != b)
            raise RuntimeError(
                explain(
                    f"pullback after a parameter of the state was written ({changed})",
                    "under shard backward gathers parameters again, and they have changed since forward",
                    "call pullback before a step with donate=True",
                )
            )
        # A backward that ran inside of `fn` may have left gradients.
        self.found.clear()
        try:
            with self.evaluation(), torch.no_grad():
                result = run()
            return self._averaged(self.found), result
        finally:
            self.found.clear()
            self.schedule.reshard()

    def _averaged(self, grads: Leaves) -> Leaves:
        """Gradients of shards, averaged over the replicas of hybrid sharding too, in the dtype they accumulate in."""
        road = self.pipe.road
        later = () if self.pipe.road.late else tuple(stage for stage in road.after_update if stage.dtypes is None)
        ordered = {leaf.path: grads[leaf.path] for leaf in self.pipe.layout.trainable if leaf.path in grads}
        return road.pull(later, ordered, self.params)


def _plans(pipe: Pipeline) -> UnitPlans:
    assert pipe.gathering is not None
    return UnitPlans(units_by_prefix(pipe.layout.leaves), pipe.road, pipe.gathering)


def _collect(found: Leaves, leaf: Leaf, g: Tensor, hooks: bool) -> None:
    old = found.get(leaf.path)
    found[leaf.path] = g if old is None else old.add_(g)


def units_by_prefix(leaves: tuple[Leaf, ...]) -> list[list[Leaf]]:
    """Lists of leaves that are gathered together: those of an element of an outermost list, else small neighbours.

    A dict whose keys are numbers counts as a list.

    Examples:
        >>> from zerofn.core.layout import make_layout
        >>> w = torch.zeros(99, 99)
        >>> layout, _ = make_layout({"blocks": [{"a": w + 0, "b": w + 0}, {"a": w + 0}], "head": w + 0, "tail": w + 0})
        >>> [[leaf.path for leaf in unit] for unit in units_by_prefix(layout.leaves)]
        [['blocks.0.a', 'blocks.0.b'], ['blocks.1.a'], ['head', 'tail']]
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(_block(leaf) or f"{leaf.path}.", []).append(leaf)
    units: list[list[Leaf]] = []
    loose: list[Leaf] = []  # the last unit, if it is no block
    for name, unit in groups.items():
        block = not name.endswith(".")
        if not block and loose and sum(leaf.numel for leaf in itertools.chain(loose, unit)) <= SMALL:
            loose.extend(unit)
            continue
        units.append(unit)
        loose = [] if block else unit
    return units


def _block(leaf: Leaf) -> str | None:
    keys = leaf.path.split(".")
    at = next((n for n, key in enumerate(keys, 1) if key.isdigit()), None)
    if at is None or (at == len(keys) and leaf.numel <= TINY):
        return None
    return ".".join(keys[:at])
