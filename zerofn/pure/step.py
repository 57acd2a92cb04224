"""`make_step`: a training step from a loss, which runs as plain code, under torch.func and under the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import set_grad_mode
from .._compat.functorch import COMPILES_STATES, begins_uncompiled, uncompiled, while_traced
from .._errors import explain, kind_of
from .._interrupts import Writing, interrupts_held
from .._profiler_ranges import PHASE, ranged
from ..core.arguments import check_flag, check_function, check_positional
from ..core.capture import check_capturable, refuse_cold_capture
from ..core.context import Context
from ..core.given_numbers import check_given
from ..core.layout import Layout, Leaves
from ..core.pipeline import Pipeline, check_fits, pipeline, resolve_for, with_counters_on_device
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, apart, flatten, parted, tree_map
from ..core.uncompiled import check_not_exported, outside_of_graphs, torch_func_check
from ..core.update import Metrics, apply, check_vmap
from ..core.view import leave
from ..core.weights import shared_weight
from ..kernels.recording import number, only_compiled, where
from ..sharded.lazy_tensor import gather_lazy
from .api import lost_graphs, reading_state, records
from .linearize import linearize


@outside_of_graphs
def make_step(
    loss_fn: Callable[..., Any],
    tx: Transform,
    donate: bool = False,
    *,
    create_graph: bool | None = None,
    capturable: bool = False,
) -> Callable[..., tuple[State, Metrics]]:
    """Make a training step from a loss: `step(state, *batch) -> (state, metrics)`.

    Args:
        loss_fn: `loss_fn(params, *batch)` -> 0-d loss, or `(loss, aux)`; `aux` is returned as `metrics["aux"]`.
        tx: the pipeline.
        donate: let the step reuse the memory of the state it is given, which saves a copy of parameters and optimizer
            states. You must not use this state again; an uncompiled step raises if you do. A tensor that a step does
            not change, such as a parameter in a micro-step that only accumulates, belongs to the old and the new state:
            donating the new state overwrites it in the old state too. Under `torch.func.vmap` the state must be
            batched; optimizers with a kernel then reuse its memory, except after a transform that skips the step for
            some members only (`scale_loss`, `skip_nonfinite`). A differentiated step refuses `donate`, since it needs
            its first state.
        create_graph: whether autograd records steps, as in `zf.update`, so that their results can be differentiated,
            also by the batch. By default they are recorded if a tensor of the state requires grad.
        capturable: let the step be captured in a CUDA graph: counts of updates, rates of schedules and scales are kept
            on the device, and each replay is a step on the memory of the state. It needs `donate=True`. See
            docs/how-to/cuda-graphs.md.

    Returns:
        The step. It takes its batch by position, and by keyword `weight=` for `accumulate(weighted=True)` and numbers
        that a transform wants, such as a `loss=` other than its own. Metrics are those of `zf.update`, and the `loss`
        without a loss scale. torch.func can differentiate it, like `zf.update`: by tensors of the state, by the batch,
        and by tensors that `loss_fn` and `tx` were made with.

    Raises:
        TypeError: `loss_fn` cannot be called, or a step gets its batch by keyword.
        ValueError: `capturable` is used without `donate` or with `create_graph`. A step raises it if `loss_fn` returns
            no floating-point 0-d tensor, if `state` does not belong to `tx`, or if `capturable` is used with several
            ranks, or with a transform or schedule that needs the CPU in every step.

    Examples:
        >>> import torch, zerofn as zf
        >>> step = zf.make_step(lambda p, x: ((p["w"] - x) ** 2).sum(), zf.sgd(0.25))
        >>> state = zf.init(zf.sgd(0.25), {"w": torch.zeros(1)})
        >>> for _ in range(3):
        ...     state, metrics = step(state, torch.ones(1))
        >>> state.params["w"], float(metrics["loss"])
        (tensor([0.8750]), 0.0625)

    Notes:
        Inside of torch.func a leaf that the loss does not use has a gradient of zeros instead of none. On several ranks
        the derivative by this rank's batch is the derivative of this rank's own loss, as in `x.grad`.
    """
    check_function("zf.make_step", loss_fn)
    check_flag("make_step", "donate", donate)
    if create_graph is not None:
        check_flag("make_step", "create_graph", create_graph)
    check_flag("make_step", "capturable", capturable)
    if capturable and (not donate or create_graph):
        wrong = f"zf.make_step(loss_fn, tx{'' if donate else ', donate=False'}, capturable=True)"
        why = "without donate each replay would begin from the same state"
        if donate:
            wrong = "zf.make_step(loss_fn, tx, capturable=True, create_graph=True)"
            why = "a captured step writes into its state, and a derivative needs the old one"
        raise ValueError(explain(wrong, why, "zf.make_step(loss_fn, tx, donate=True, capturable=True)"))
    run, called_by_torch_func = _runner(loss_fn, donate, capturable), torch_func_check()
    checked = _checked_step(PipelineCache(tx), run, create_graph)

    @begins_uncompiled
    def step(state: State, *batch: Tree, weight: Any = None, **given: Any) -> tuple[State, Metrics]:
        if called_by_torch_func():
            return step_called_by_transforms(checked, state, batch, weight, given)
        if torch.compiler.is_compiling():
            return checked(state, batch, weight, given)
        mode = torch.is_grad_enabled()
        try:
            return checked(state, batch, weight, given)
        except BaseException:
            set_grad_mode(mode)
            raise

    # The compiler keeps graphs by code object, and gives up after too many for one. So each step gets its own.
    checked.__code__, run.__code__ = checked.__code__.replace(), run.__code__.replace()
    return step


def _checked_step(pipes: PipelineCache, run: Any, create_graph: bool | None) -> Any:
    """Check a state, then `run` on it; uncompiled if the compiler cannot have a step in its graph."""

    def checked(state: State, batch: tuple, weight: Any, given: dict[str, Any]) -> tuple[State, Metrics]:
        check_not_exported()
        tracing = torch.compiler.is_compiling()
        if tracing and not COMPILES_STATES:
            return step_before_torch_2_13(checked, state, batch, weight, given)
        pipe = pipes.of(state, tracing)
        if given:
            check_positional("step(state", {name: x for name, x in given.items() if name not in pipe.wants})
        if tracing and not pipe.layout.readable:
            return step_of_other_containers(checked, state, batch, weight, given)
        if pipe.reads:
            if tracing:
                return step_with_states_in_views(checked, state, batch, weight, given)
            pipe = reading_state(pipe, state, "a step")
        state.check_data("a step")
        numbers_alone = tracing and not create_graph and only_compiled(flatten(state)[0])
        if tracing and pipe.groups:
            if not pipe.traceable:
                return step_by_own_wire(checked, state, batch, weight, given)
            if not numbers_alone:
                return step_over_ranks(checked, state, batch, weight, given)
        if numbers_alone:
            if create_graph is None and any([x.requires_grad for _, x in pipe.numbers]):
                return step_of_numbers_that_require_grad(checked, state, batch, weight, given)
            # As in an uncompiled step, a batch that requires grad does not make a graph from step to step.
            with torch.no_grad():
                return run(pipe, state, batch, weight, given, True, {})
        if not tracing:
            state.check_usable("a step")
        record = tracing or records("make_step", create_graph, {}, state)
        if pipe.groups:
            check_vmap(pipe, weight, state, batch)
        more = {} if tracing else lost_graphs(pipe, record, create_graph, weight)
        return run(pipe, state, batch, weight, given, record, more)

    return checked


def _capturable(pipe: Pipeline) -> bool:
    check_capturable(pipe, "zf.make_step")
    return True


def _runner(loss_fn: Callable[..., Any], donate: bool, capturable: bool) -> Any:
    """The function that makes one step of a known pipeline: forward, backward, update."""

    def run(
        pipe: Pipeline,
        state: State,
        batch: tuple,
        weight: Any,
        given: dict[str, Any],
        record: bool,
        more: dict[str, Any],
    ) -> tuple[State, Metrics]:
        tracing, old = torch.compiler.is_compiling(), state
        if capturable and not tracing and pipe.once(_capturable) and state.micro_step.is_cpu:
            state = with_counters_on_device(pipe, state)
            if not state.micro_step.is_cpu:
                refuse_cold_capture()
        aux: dict[str, Any] = {}
        scale = pipe.scale_of(state.arriving) if pipe.factors else None
        # If all is recorded, `linearize` multiplies cotangents by the scale and divides gradients, with plain
        # operations.
        edge = (None if record else scale, pipe.dtypes.output_dtype)
        # New containers, so that `loss_fn` cannot change the caller's.
        inputs = batch if set(map(type, batch)) <= {Tensor} else tree_map(lambda x: x, batch)

        def scalar(seen: Leaves, _: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            loss, others = loss_fn(pipe.layout.join(seen), *inputs), []
            if pipe.gathering is not None:
                loss = gather_lazy(loss)
            if isinstance(loss, tuple) and len(loss) == 2:
                others, aux["aux"] = parted(loss[1])
                loss = loss[0]
            if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
                raise _no_loss(loss)
            return [loss if edge == (None, None) else leave(loss, *edge)], others

        def evaluated(at: State) -> tuple[Tensor, list[Tensor], Leaves]:
            with ranged(PHASE, "forward"):
                (loss,), others, pull = linearize("step", pipe, scalar, at, [], scale, False, record)
            unit = torch.ones_like(loss)
            with ranged(PHASE, "backward"):
                # A batch of weight 0 is left out, not multiplied by 0: a mean over no rows is NaN, and so is 0 * NaN.
                grads, _ = pull([unit if share is None else (unit * share).to(unit)], share is None or share > 0)
            return loss, others, grads

        share = None
        if weight is not None:
            weight, share = shared_weight(pipe, weight)
            share = share if record or share is None else number(share)
        loss, others, grads = evaluated(state)
        loss = loss if record else loss.detach()
        if pipe.second is not None:
            # Loss and aux are those of the first evaluation.
            first = dict(aux)
            grads = evaluated(pipe.second_point(grads, state, pipe.context(recorded=record)))[2]
            aux.update(first)
        if tracing and donate:
            # All are copied, since only a running graph knows which of them share memory with the state.
            loss, others = loss.clone(), list(map(torch.clone, others))
        if aux:
            aux = {"aux": aux["aux"](others if record else map(Tensor.detach, others))}
        if donate and not tracing:
            # Tensors that share memory with the state are copied: gradients too, as backward may return a parameter.
            made = apart({"loss": loss, "aux": aux, "grads": grads}, state.leaves.values())
            loss, aux, grads = made["loss"], made["aux"], made["grads"]
        if pipe.wants:
            given = {"loss": loss, **given} if "loss" in pipe.wants else given
            if len(given) != len(pipe.wants):
                check_given(given.keys(), pipe.wants, "step(state, {}=...)")
            if share is not None:
                # From here on `weight` is the mean over ranks, so numbers of this rank are multiplied by its share.
                means = {name: x for name, x in given.items() if name not in pipe.largest}
                given |= {name: where(share > 0, lambda x=x: x * share, 0.0 * share) for name, x in means.items()}
            more = {**more, "given": given}
        ctx = pipe.context(weight=weight, donate=donate, recorded=record, micro_step=state.micro_step, **more)
        if donate and not tracing:
            ctx = replace(ctx, unread=capturable and not record)
            new, metrics = _donated(pipe, grads, old, state, ctx)
        else:
            with ranged(PHASE, "update"):
                new, metrics = apply(pipe, grads, state, ctx)
        # No function may be called from here on: a signal's handler could raise in it and lose the new state.
        return new, {"loss": loss, **metrics, **aux}

    return run


def _donated(pipe: Pipeline, grads: Leaves, given: State, state: State, ctx: Context) -> tuple[State, Metrics]:
    """An update that writes into its state. After a signal whose handler raises, the given state becomes the new one.

    `state` is the one that was given, or has its leaves.
    """
    made: tuple[State, Metrics] | None = None
    # Over ranks collectives come before the first write.
    hold = interrupts_held() if pipe.step_groups else Writing()
    if type(hold) is Writing:
        ctx = replace(ctx, written=hold)
    try:
        # The state is marked as given away before it is written, since another thread may be saving it.
        with hold, given.given_away(ctx.written), ranged(PHASE, "update"):
            made = apply(pipe, grads, state, ctx)
    except BaseException:
        if made is not None:
            given.become(made[0])
        raise
    return made


class PipelineCache:
    """The pipelines of one step, resolved once for each structure of parameters.

    The compiler cannot resolve one. While it makes a graph it calls `resolve`, and takes the returned number as a
    constant.
    """

    def __init__(self, tx: Transform):
        numbers: dict[Layout, int] = {}
        numbered: dict[int, Pipeline] = {}

        @while_traced
        def resolve(layout: Layout) -> int:
            if layout not in numbers:
                numbered[len(numbered)] = pipeline(tx, layout, "step").with_cached_properties()
                numbers[layout] = len(numbers)
            return numbers[layout]

        self.tx, self.resolve, self.numbered = tx, resolve, numbered
        self.resolved: dict[Layout, Pipeline] = {}
        self.last: tuple[Any, Any, list[str]] = (None, None, [])

    def of(self, state: Any, tracing: bool) -> Pipeline:
        """The pipeline of a state; while the compiler makes a graph, found by its number."""
        if not isinstance(state, State):
            return resolve_for(self.tx, state, "step")  # which raises
        if tracing:
            return self.numbered[self.resolve(state.layout)]
        # Nearly always the layout is that of the last call. Hashing a layout of many leaves is slow.
        layout, pipe, names = self.last
        if state.layout is not layout or list(state.arriving) != names:
            pipe = self.resolved.get(state.layout)
            if pipe is None or list(state.arriving) != [p.name for p in pipe.parts]:
                pipe = self.resolved[state.layout] = resolve_for(self.tx, state, "step", stacked=False)
            self.last = state.layout, pipe, list(state.arriving)
        check_fits(pipe, state, "step", stacked=False)
        return pipe


def _uncompiled_step(why: str) -> Callable[..., tuple[State, Metrics]]:
    """A function that runs a step uncompiled. With `fullgraph=True` the compiler refuses it with the message `why`."""

    def run(checked: Callable, state: State, batch: tuple, weight: Any, given: dict) -> tuple[State, Metrics]:
        return checked(state, batch, weight, given)

    return uncompiled(run, why)


step_over_ranks = _uncompiled_step(
    "A differentiated step over several ranks cannot be one graph: collectives in a graph have no derivative.\n\n"
    "write: torch.compile(step) without fullgraph; or, if no derivative is wanted, step(state, *batch) outside of\n"
    "torch.func, with a state that does not require grad"
)
step_by_own_wire = _uncompiled_step(
    "A step with a wire that is not marked traceable cannot be one graph.\n\n"
    "write: zerofn.extend.over_ranks(wire, resident, traceable=True), if the wire branches on no number: `unpack`\n"
    "returns a gradient for every leaf where torch.compiler.is_compiling(); or torch.compile(step) without fullgraph"
)
step_with_states_in_views = _uncompiled_step(
    "A step with a view that reads a state cannot be one graph: derivative rules call the view, where the\n"
    "compiler takes the state as a constant.\n\n"
    "write: zf.make_step(torch.compile(loss_fn, fullgraph=True), tx), or torch.compile(step) without fullgraph"
)
step_of_other_containers = _uncompiled_step(
    "Parameters are in a container that torch's own tree library does not know, so the compiler cannot read it.\n\n"
    "write: torch.utils._pytree.register_dataclass(Weights) beside optree's registration; or parameters in dicts,\n"
    "lists, tuples and named tuples; or torch.compile(step) without fullgraph"
)
step_of_numbers_that_require_grad = _uncompiled_step(
    "A rate, or another number of the pipeline, requires grad, and the step is not recorded.\n\n"
    "write: zf.make_step(loss_fn, tx, create_graph=True) and torch.compile(step) without fullgraph; or rate.detach(),\n"
    "or create_graph=False, where no derivative is wanted"
)
step_before_torch_2_13 = _uncompiled_step(
    "The compiler of torch before 2.13 cannot read a step: it runs uncompiled, not as one graph.\n\n"
    "write: torch.compile(step) without fullgraph, or torch 2.13"
)
step_called_by_transforms = _uncompiled_step("A compiled step that torch.func calls.")


def _no_loss(loss: Any) -> ValueError:
    got = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else kind_of(loss)
    right = "return loss.mean(), or (loss, aux); for other outputs zf.vjp with cotangents of your own"
    return ValueError(explain(f"loss_fn returned {got}", "a step differentiates one number", right))
