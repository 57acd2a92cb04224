"""Runs the update halves of a chain on a state, after checks of gradients and state; for both routes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import behind, differentiating, functorch_active, is_wrapped, levels, vmap_level
from .._errors import bad_leaves, explain
from ..kernels.lists import at_once
from .context import Context
from .executor import finish, run
from .layout import Leaf, Leaves
from .pipeline import Pipeline, on_one_gpu
from .returned_values import check_readable, misshapen
from .state import State, StateUnderWay
from .tree import Tree, flatten, tree_map

Metrics = dict[str, Tensor]


def check_grads(pipe: Pipeline, grads: Leaves, stored: Leaves) -> None:
    """Refuse gradients without the shape of the stored parameter or the dtype that `precision` says."""
    bad = []
    for leaf in pipe.layout.leaves:
        g = grads.get(leaf.path)
        if g is None:
            continue
        if reason := _misfit(
            g, leaf, pipe.road.grad_shape(leaf), {pipe.dtypes.gradient(leaf), stored[leaf.path].dtype}
        ):
            bad.append((leaf.path, reason))
    if bad:
        right = "gradients from zf.vjp, from torch.func.grad of a bound function, or p.grad"
        if pipe.road.late:
            # A bound function's gradients are reduced, hence shards; `accumulate` before the reduction needs full ones.
            right = (
                "gradients from zf.vjp: accumulate stands before the reduction, so they are this rank's own, "
                "not reduced yet as those of a bound function are"
            )
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, right))


def check_stored(pipe: Pipeline, stored: Tree) -> None:
    """Refuse an argument of a bound function that does not have the shapes of the stored parameters."""
    bad = []
    for i, path, x in pipe.layout.match(stored, "these are not the stored parameters of this state", "state.params"):
        shape = pipe.road.stored_shape(pipe.layout.leaves[i])
        if not isinstance(x, Tensor):
            bad.append((path, f"{type(x).__name__} is no tensor"))
        elif tuple(x.shape) != tuple(shape):
            bad.append((path, f"of shape {tuple(x.shape)}, stored in shape {tuple(shape)}"))
    if bad:
        right = "fn(state.params, *inputs), or tensors of those shapes; torch.func.vmap(fn) for a stack of them"
        raise ValueError(
            bad_leaves("a bound function was called with other parameters than it is bound to", bad, right)
        )


def _misfit(g: Any, leaf: Leaf, shape: tuple[int, ...], dtypes: set[torch.dtype]) -> str | None:
    if reason := misshapen(g, shape):
        return reason
    # fp32 is always allowed: sums are made in it.
    if g.dtype not in {*dtypes, torch.float32}:
        return f"gradient in {g.dtype} instead of {' or '.join(sorted(map(str, dtypes)))}"
    if not leaf.trainable:
        return "a gradient for a frozen parameter"
    return None


def apply(pipe: Pipeline, grads: Leaves, state: State, ctx: Context, checked: bool = False) -> tuple[State, Metrics]:
    """Run the update halves on leaves by path; writes into the state only if `ctx.donate`.

    If `ctx.recorded`, nothing is written, and new tensors are functions of gradients, state and rates.

    Args:
        pipe: the pipeline.
        grads: by path.
        state: of the pipeline.
        ctx: the step's context.
        checked: whether gradients are known to be readable: those that were reduced were looked at before.
    """
    if (not grads and pipe.layout.leaves) or ctx.weight is not None:
        _check_useful(pipe, grads, ctx)
    if not checked:
        check_readable(grads, state.leaves)
    if pipe.wants:
        from .given_numbers import means_over_ranks

        means, weight = means_over_ranks(ctx.given, ctx.weight, pipe.largest, state.leaves, ctx)
        ctx = replace(ctx, given=means, given_weight=weight)
    if ctx.looks:
        # The step runs with grad enabled, so a result requires grad if a user's function takes such a tensor from
        # elsewhere. Gradients themselves must not cause that.
        grads = {path: g.detach() for path, g in grads.items()}
    donated, level = False, None
    if grads and next(iter(grads.values())).is_cuda and not ctx.recorded and not ctx.unread:
        refuse_capture()
        if pipe.keeps_verdicts and on_one_gpu(state.leaves):
            ctx = replace(ctx, verdicts=True)
    if ctx.recorded:
        check_vmap(pipe, ctx.weight, grads, state)
        # Read before other calls: if the compiler gives up this frame, it compiles the functions that it calls.
        compiling = torch.compiler.is_compiling()
        _check_recordable(ctx, (*grads.values(), *flatten(state)[0]))
        if compiling:
            level = vmap_level() if functorch_active() else 0
            donated = ctx.donate and level is not None
            ctx = replace(ctx, donate=False, donate_to_kernels=donated and not level)
        elif functorch_active():
            state, ctx = _in_batch(pipe, grads, state, ctx)
        else:
            # A graph broke inside of a compiled step. Old and new values are chosen later, so nothing is written yet.
            ctx = replace(ctx, donate=False)
    trained = pipe.layout.trained
    trainable = state.leaves if len(trained) == len(state.leaves) else {p: state.leaves[p] for p in trained}
    if state._copies:
        copies, before = state.copies_on_device(), state.arriving
    else:
        copies, before = (), state.transforms
    try:
        with torch.set_grad_enabled((ctx.recorded or ctx.looks) and torch.is_grad_enabled()):
            signal, states, emitted = run(pipe.stretches, grads, before, trainable, ctx)
            new = signal or {} if emitted is True else finish(signal, trainable, emitted)
    except BaseException:
        ctx.wait_for_copies()
        raise
    # The metric is a copy: `load_state_dict` writes into the entry of the state.
    if emitted is True:
        step = state.step + 1
        step_metric = step.clone()
    else:
        step, step_metric = at_once(lambda n, due: [n + due, n + due], state.step, emitted)
    if ctx.looks:
        pipe.looked()
    copies = ctx.begun_copies(copies) if ctx.under_way else copies
    made = StateUnderWay if copies else State
    after = made({**state.leaves, **new}, states, step, state.micro_step + 1, state.layout, copies)
    if donated:
        after = tree_map(partial(_into, level), state, after)
    elif ctx.unread and ctx.donate:
        # A replay of the step must write the memory that it reads. `detach` makes a counter object without the mark.
        after = tree_map(_in_memory_of, state, after)
        after = replace(after, micro_step=after.micro_step.detach())
    if not ctx.recorded:
        after.fitting(pipe.tx)
    shown = {"updated": emitted if isinstance(emitted, Tensor) else torch.full((), emitted), "step": step_metric}
    if "skipped" not in ctx.metrics:
        shown["skipped"] = torch.full((), False)
    return after, {**shown, **ctx.metrics}


def refuse_capture() -> None:
    """Refuse an update while a CUDA graph is captured, whose replays would repeat it with the numbers of this step."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            explain(
                "an update while a CUDA graph is captured",
                "the count of updates, the learning rate and the seed are numbers of the host, so each replay would\n"
                "correct moments and round at random as in this step: it would train wrongly, without an error",
                "zf.attach(model, tx, capturable=True) or zf.make_step(loss_fn, tx, donate=True, capturable=True);\n"
                "or forward and backward in the graph, and opt.step() outside of it, after graph.replay()",
            )
        )


def _check_useful(pipe: Pipeline, grads: Leaves, ctx: Context) -> None:
    """Refuse a step, or a weight, that would have no effect."""
    if not grads and pipe.layout.leaves and not (pipe.road.late and pipe.groups):
        raise ValueError(
            explain(
                "a step in which no parameter has a gradient",
                "the loss does not depend on the parameters, or no backward ran since the last step",
                "loss.backward() before opt.step(); a loss_fn that uses its params; and if it makes a state of them,\n"
                "zf.init(tx, params, create_graph=True)",
            )
        )
    if ctx.weight is not None and not pipe.weighted:
        raise ValueError(
            explain(
                "a step with weight= through a pipeline that weights nothing",
                "only accumulate(weighted=True) has a use for it, so it would have no effect",
                "zf.chain(..., zf.accumulate(4, weighted=True), ...), or no weight=",
            )
        )


def _in_memory_of(old: Any, new: Any) -> Any:
    return new if new is old or not isinstance(old, Tensor) else old.copy_(new)


def _into(level: int | None, old: Any, new: Any) -> Any:
    """The new tensor, copied into the memory of the old one at the end of a graph, when new or held is chosen.

    The new tensor itself if that memory cannot be written because one element stands for several (stride 0): in a state
    that another rank owns, and under vmap if all members of a batch share a tensor.
    """
    if not isinstance(old, Tensor) or not old.is_floating_point() or not old.ndim or new is old:
        return new
    memory = behind(old, level) if level else old
    return new if memory is None or 0 in memory.stride() else old.copy_(new)


def _check_recordable(ctx: Context, values: Iterable[Any]) -> None:
    """Raise a RuntimeError for a donated step that is differentiated: its writes would spoil the derivative."""
    if not ctx.donate:
        return
    graph = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
    # A compiled graph may write: it runs once for each step, and the compiler knows which values are still needed.
    if differentiating() or graph or not (functorch_active() or torch.compiler.is_compiling()):
        raise RuntimeError(
            explain(
                "a step that writes into its state, being differentiated",
                "the step is donated, or of an attached model: it overwrites the values that a derivative needs",
                "step = zf.make_step(loss_fn, tx), without donate, on state = zf.init(tx, params); "
                "for a model, loss_fn(params, x) calls torch.func.functional_call(model, params, (x,))",
            )
        )


def check_vmap(pipe: Pipeline, weight: Any, *inputs: Tree) -> None:
    """Refuse, on every rank alike, a step under vmap in which ranks would have to exchange a number per member."""
    if not pipe.groups or not functorch_active() or differentiating():
        return
    size = math.prod(group.size for group in pipe.groups)
    if weight is not None:
        from .weights import weight_in_batch

        raise weight_in_batch(pipe.groups)
    talks = _talks_in_update(pipe)
    if talks is not None and any(is_wrapped(x) for tree in inputs for x in flatten(tree)[0]):
        raise ValueError(
            explain(
                f"torch.func.vmap over a step through {talks} on {size} ranks",
                "its update half exchanges numbers between ranks, for which torch.distributed has no batching rule",
                "one step per member in a loop; or all_reduce with nothing that accumulates before it and no "
                "scale_loss, whose update sends nothing",
            )
        )


def _talks_in_update(pipe: Pipeline) -> str | None:
    """The transform whose update half communicates: a norm of shards, a late reduction, or a check for overflow."""
    if pipe.wants:
        return next(iter(pipe.wants.values()))
    if pipe.second is not None:
        return pipe.second.name
    if pipe.sharding is None and not pipe.road.late:
        return next((name for name, _ in pipe.factors), None)
    return next(view.name for view in pipe.stages if view.wire is not None)


def _in_batch(pipe: Pipeline, grads: Leaves, state: State, ctx: Context) -> tuple[State, Context]:
    """State and context of a step under vmap: what the update writes is batched wherever anything is.

    A tensor that is still unbatched, such as momentum in the first step, would otherwise be one memory for all members,
    which a later donated step would write for all of them. Counters are not written: they stay unbatched, so that
    Python can read them where the state is one for all members.
    """
    tensors = [x for x in (*grads.values(), ctx.weight, *flatten(state)[0]) if isinstance(x, Tensor)]
    found = {levels(x): x for x in tensors}
    every = frozenset().union(*found)
    if not every:
        return state, replace(ctx, donate=False)
    flag = torch.tensor(False)
    for batched_in, x in found.items():
        if batched_in:
            flag = flag | x.new_zeros((), dtype=torch.bool, device="cpu")

    def lift(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or levels(x) == every:
            return x
        if ctx.donate:
            raise ValueError(
                explain(
                    "a step with donate=True under torch.func.vmap over a state that is not batched",
                    "all members of the batch share the memory of this state, and each has a result of its own",
                    "zf.make_step(loss_fn, tx), without donate; or a state per member, stacked",
                )
            )
        return torch.where(flag.to(x.device), x, x)

    ctx_of_batch = replace(ctx, donate=False, donate_to_kernels=ctx.donate)
    frozen = {leaf.path for leaf in pipe.layout.leaves if not leaf.trainable}
    leaves = {p: x if p in frozen else lift(x) for p, x in state.leaves.items()}
    return replace(state, leaves=leaves, transforms=tree_map(lift, state.transforms)), ctx_of_batch
