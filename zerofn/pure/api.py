"""The pure route: `init`, `bind`, `vjp`, `update`, `full_params`, `gather`, `global_norm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import grad_mode_kept
from .._compat.functorch import constant, is_function, is_wrapped, levels, uncompiled
from .._compat.recomputation import recomputes_as_called
from .._errors import bad_leaves, explain
from .._profiler_ranges import PHASE, ranged
from ..core.arguments import check_function, check_positional
from ..core.bucketed_views import at_model, view_all
from ..core.given_numbers import check_given
from ..core.layout import Leaf, Leaves, as_complex, as_real, check_own_memory, make_layout
from ..core.number_graphs import RECORDED
from ..core.pipeline import Pipeline, first_state, pipeline, resolve_for
from ..core.rank_agreement import (
    Init,
    agree_on_gradients,
    agree_on_start,
    check_finite,
    check_init,
    device_of,
    failed_ranks,
    first_states,
    first_values,
    made_by,
    tell_narrow_sums,
    tell_unreduced,
)
from ..core.returned_values import split_grads
from ..core.state import State, averages_of
from ..core.transform import Transform
from ..core.tree import Tree, flatten, followed, parted, tree_map, tree_paths, unflatten
from ..core.uncompiled import RESOLVES, kept_out_of_graphs, outside_of_graphs
from ..core.update import Metrics, apply, check_grads, check_stored, check_vmap
from ..core.view import ForwardOnlyView, crosses, enter, leave
from ..core.weights import equal_weight
from ..kernels.norms import squared_norm
from ..kernels.recording import concrete, recorded, root
from ..sharded.guarded_parameter import pieces
from ..sharded.lazy_tensor import gather_lazy
from .linearize import check_graph, linearize

# ----------------------------------------------------------------------------------------------------------------------
# `evaluate` runs a function of trees at a state's parameters, and returns its pullback.


# Maps one cotangent for each differentiable output to gradients by path, and to cotangents of the inputs as trees.
Pullback = Callable[[list[Tensor]], tuple[Leaves, tuple]]


def evaluate(pipe: Pipeline, fn: Callable[..., Any], state: State, inputs: tuple, record: bool) -> tuple[Any, Pullback]:
    """`fn(params, *inputs)` at the state's parameters: the result and its pullback.

    Args:
        pipe: its loss scale and output dtype apply around `fn`.
        fn: takes and returns trees.
        state: `fn` gets its parameters as the model sees them.
        inputs: trees.
        record: whether the output, and the results of the pullback, can be differentiated.
    """
    scale = pipe.scale_of(state.arriving)
    # If all is recorded, `linearize` multiplies cotangents by the scale and divides gradients, with plain operations.
    inside = None if record else scale
    flat, spec = flatten(inputs)
    chosen = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and crosses(x)]
    outer: dict[str, Any] = {}

    def inner(seen: Leaves, given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        args = list(flat)
        for i, x in zip(chosen, given, strict=True):
            args[i] = enter(x, inside, None)
        tensors, outer["join"] = parted(gather_lazy(fn(pipe.layout.join(seen), *unflatten(spec, args))))
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
    """The cotangents of a function's result, as a pullback takes them.

    Raises:
        ValueError: they are of another structure, shape or dtype; every one is named.
    """
    given, spec = flatten(cotangents)
    primals, expected = flatten(out)
    if spec != expected:
        raise ValueError(
            explain(
                "pullback(cotangents)",
                f"cotangents have the structure {spec}, the output has {expected}",
                "a tree of the output's structure, with one tensor per output",
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


# ----------------------------------------------------------------------------------------------------------------------
# `init` makes a state from parameters; `full_params` gives parameters back; `pipe_of` finds the pipeline of a state.


@outside_of_graphs
def init(
    tx: Transform,
    params: Tree,
    *,
    create_graph: bool = False,
    init: Init | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> State:
    """The first state of a pipeline: stored parameters, the state of each transform, counters.

    Args:
        tx: a transform or chain that contains an optimizer.
        params: any tree of floating-point or complex tensors: dicts, lists, tuples, NamedTuples, dataclasses
            registered with optree (globally or in the namespace ``"zerofn"``). A tensor at several places of the tree
            is one tied parameter, which is updated once. From meta tensors `init` makes a state of meta tensors.
            Optimizers see a complex tensor as its real and imaginary parts, as `torch.optim` does.
        create_graph: whether autograd records the state as a function of `params`. Inside of torch.func it always is.
        init: `init(path, x)` writes the first values of a meta tensor into `x`, which has its shape and dtype. Leaves
            are made one at a time, and each rank keeps its shard, so the peak of memory is a state and one leaf. For
            each leaf zerofn seeds torch's generators by `seed` and the path, and restores them afterwards. So the
            values are equal on any number of ranks. On another kind of device the values differ.
        seed: of the draws of `init`.
        device: where `init` writes and the state lives; by default torch's default device.

    Returns:
        A `State`. It shares no memory with `params`.

    Raises:
        TypeError: a leaf is not a floating-point or complex tensor.
        ValueError: there is no optimizer; a parameter is NaN; two leaves share memory, as in the `state_dict()` of a
            tied model; `init` leaves elements unwritten, or writes other values on another rank; the pipeline sets a
            dtype of buffers. Every bad leaf is named.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.sgd(0.1), {"w": torch.ones(3), "b": torch.zeros(())})
        >>> state
        State(2 leaves, 4 parameters, step=0, transforms=['sgd'])
        >>> meta = {"w": torch.empty(1000, 1000, device="meta")}
        >>> state = zf.init(zf.sgd(0.1), meta, init=lambda path, x: torch.nn.init.normal_(x, std=0.02))
        >>> round(float(state.params["w"].std()), 3)
        0.02
    """
    check_graph("zf.init", create_graph)
    check_init("zf.init", init, seed)
    layout, tensors = make_layout(params)
    check_own_memory("zf.init(tx, params)", tensors)
    _check_buffers(pipe := pipeline(tx, layout, "zf.init"))
    with grad_mode_kept():
        tell_unreduced(pipe, "zf.init(tx, params)")
        tell_narrow_sums(pipe, "zf.init(tx, params)")
        if not create_graph and not recorded():
            tensors = {p: x.detach() for p, x in tensors.items()}
        if init is None:
            agree_on_start(pipe, tensors, "zf.init(tx, params)")
            stored = {leaf.path: _own(pipe.road.store(tensors[leaf.path], leaf)) for leaf in layout.leaves}
        else:
            check_finite(tensors)
            at, by = device_of(device), init
            given = lambda leaf, x: made_by(by, as_complex(x, leaf), leaf.path, seed, at) if x.is_meta else x  # noqa: E731
            made = ((leaf, as_real(given(leaf, tensors[leaf.path]), leaf)) for leaf in layout.leaves)
            keep = lambda leaf, x: _own(pipe.road.store(x, leaf))  # noqa: E731
            stored = first_values(pipe, made, keep, "zf.init(tx, params, init=init)")
        tell = partial(failed_ranks, pipe.step_groups)
        return first_state(pipe, stored, first_states(pipe, stored, tell, "zf.init(tx, params)"))


def _check_buffers(pipe: Pipeline) -> None:
    if pipe.dtypes.buffers is not None:
        why = "a tree of parameters has no buffers, so buffer_dtype would have no effect"
        right = (
            "buffers = {name: b.to(dtype) for name, b in model.named_buffers() if b.is_floating_point()} and\n"
            "         torch.func.functional_call(model, {**params, **buffers}, inputs) in your function"
        )
        raise ValueError(explain("zf.init(chain(precision(buffer_dtype=...), ...), params)", why, right))


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@outside_of_graphs
def full_params(tx: Transform, state: State, of: str = "params") -> Tree:
    """The full parameters as a tree, in the structure they were given in and in the stored dtype.

    With a view of your own, these are the parameters that the model sees, and `state.params` are the stored ones. Every
    rank must call `full_params`, because it gathers shards.

    Args:
        tx: the pipeline.
        state: its state.
        of: `"params"`; or the name of an `ema`, or of the `masked` or `partition` that contains one, for the averages.
            Leaves that it does not average are the parameters.

    Returns:
        Tensors, which share memory with the state if nothing had to be gathered or cast.

    Raises:
        ValueError: there is no such average.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.1)
        >>> zf.full_params(tx, zf.init(tx, [torch.ones(2)]))
        [tensor([1., 1.])]
    """
    pipe = pipe_of(tx, state, "zf.full_params")
    leaves = state.leaves
    if of != "params":
        leaves = {**leaves, **averages_of(state, of, "zf.full_params(tx, state, of={})")}
    with grad_mode_kept():
        return state.layout.join(pipe.road.whole(leaves))


def pipe_of(tx: Transform, state: Any, where: str, stacked: bool = True) -> Pipeline:
    """As `resolve_for`, with views that read this state."""
    return reading_state(resolve_for(tx, state, where, stacked), state, where)


def reading_state(pipe: Pipeline, state: State, where: str) -> Pipeline:
    """The pipeline, with the views that read states (`reads=True`) bound to this state.

    Such views run again where a gradient is pulled back. What they read is a constant there, without a derivative or a
    batch: otherwise the state would have to be an argument of every view's derivative rule.

    Raises:
        RuntimeError: what a view reads is differentiated or batched, and would silently be taken for a constant.
    """
    if not pipe.reads:
        return pipe
    names = [view.name for view in pipe.views if view is not None and view.reads]
    read = {name: state.transforms[name] for name in names}
    bad = [
        (path, "differs along a batch" if levels(x) else "is differentiated")
        for path, x in zip(tree_paths(read), flatten(read)[0], strict=True)
        if isinstance(x, Tensor) and (levels(x) or is_function(x))
    ]
    if bad:
        wrong = f"{where}: a view reads its transform's state as a constant, and here it is not one"
        raise RuntimeError(bad_leaves(wrong, bad, "a parameter for what is learned or differs along a batch"))
    # The tensors are unwrapped, since derivative rules of views run beneath the torch.func transform that wrapped them.
    plain = tree_map(lambda x: constant(x) if is_wrapped(x) else x, read)
    return pipe.reading(plain.__getitem__)


# ----------------------------------------------------------------------------------------------------------------------
# `bind` makes a function of stored parameters, `vjp` a value and a pullback, and `update` one micro-step.


@outside_of_graphs
def bind(fn: Callable[..., Any], tx: Transform, state: State) -> Callable[..., Any]:
    """`fn` as a function of *stored* parameters, which any torch.func transform can differentiate.

    Derivatives of any order contain no loss scale, are reduced over ranks, and have the shapes of the stored
    parameters. A vector for a Hessian-vector product is sharded as the parameters are.

    Args:
        fn: `fn(params, *inputs)` on full parameters as the model sees them (gathered, in the compute dtype), in the
            structure they were given in. It may return any tree of tensors.
        tx: the pipeline.
        state: its state. The loss scale is taken from it; the parameters are an argument.

    Returns:
        `fn_stored(stored_params, *inputs)`, for `state.params` or any tree of its structure and shapes. With a loss
        scale or an `output_dtype` its outputs are copies. So if `fn` returns `h` and a `y` that is computed from `h`,
        the returned `y` has no derivative by the returned `h`.

    Raises:
        TypeError: `fn` cannot be called, or inputs are given by keyword.
        ValueError: parameters of other shapes, each named. If parameters are sharded: a full Hessian or Jacobian
            (`torch.func.hessian`, `jacfwd` and `jacrev` of a gradient), and batches of different lengths on ranks under
            `vmap`. In a backward on several ranks, `accumulate(weighted=True)` before the reduction: only `zf.update`
            knows the weights, so use `zf.vjp` and `zf.update`.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.scale_loss(1024.0), zf.sgd(0.1))
        >>> state = zf.init(tx, {"w": torch.tensor([1.0, 2.0])})
        >>> loss = zf.bind(lambda p: (p["w"] ** 3).sum(), tx, state)
        >>> torch.func.grad(loss)(state.params)
        {'w': tensor([ 3., 12.])}

    Notes:
        If parameters are sharded, use products with vectors, alone or under `vmap`. `jacrev(..., chunk_size=1)` of a
        gradient cannot be told from such products, and is not refused: it adds up the columns of all ranks.
    """
    check_function("zf.bind", fn)
    pipe = pipe_of(tx, state, "zf.bind")
    scale = pipe.scale_of(state.arriving)
    # All views are applied, from storage on. `pipe.leaf_views` would begin at gathered parameters if `accumulate` comes
    # before the reduction.
    views = pipe.road.composed(at_model(pipe.stages), pipe.dtypes.gradient)
    if pipe.road.late and pipe.weighted:
        views = {p: ForwardOnlyView(v.leaf, v.stages, v.grad_dtype) for p, v in views.items()}

    def see(leaf: Leaf, x: Tensor) -> Tensor:
        seen = views[leaf.path](x, scale)
        # Each place of a tied tensor gets an alias. Otherwise autograd would return the sum of all places at each.
        return x.view_as(x) if seen is x and state.layout.tied(leaf) else seen

    @uncompiled
    def entered(stored: Tree, inputs: tuple) -> tuple[Tree, list]:
        """A function of zf.bind cannot be one graph: Python resolves its tree and applies views and the loss scale.

        write: step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step; or zf.bind and zf.vjp of
        torch.compile(fn, fullgraph=True), outside of what is compiled
        """
        check_stored(pipe, stored)
        return state.layout.map_places(see, stored), [_edges(enter, x, scale, None) for x in inputs]

    def fn_stored(stored: Tree, *inputs: Tree, **keywords: Any) -> Any:
        check_positional("fn(stored", keywords)
        params, inner = entered(stored, inputs)
        if torch.compiler.is_compiling():
            return _leave_all(fn(params, *inner), scale, pipe.dtypes.output_dtype)
        with recomputes_as_called("a function of zf.bind", by_grad=False):
            out = fn(params, *inner)
        return _leave_all(out, scale, pipe.dtypes.output_dtype)

    return fn_stored


@uncompiled
def _leave_all(out: Any, scale: Tensor | None, dtype: torch.dtype | None) -> Any:
    return _edges(leave, out, scale, dtype)


def _edges(edge: Callable, tree: Tree, scale: Tensor | None, dtype: torch.dtype | None) -> Tree:
    return tree_map(lambda t: edge(t, scale, dtype) if isinstance(t, Tensor) else t, tree)


@outside_of_graphs
def vjp(
    fn: Callable[..., Any], tx: Transform, state: State, *inputs: Tree, create_graph: bool = False
) -> tuple[Any, Callable[[Any], tuple]]:
    """Evaluate `fn` at a state's parameters, and return a function that pulls cotangents back.

    Args:
        fn: `fn(params, *inputs)` on full parameters; returns any tree of tensors.
        tx: the pipeline.
        state: its state.
        inputs: trees; their floating-point and complex tensors get a cotangent.
        create_graph: whether autograd records the computation of `out` and of the gradients, so that both can be
            differentiated. Inside of torch.func they always can.

    Returns:
        `(out, pullback)`. `pullback(out_cotangents)` returns `(grads, *input_cotangents)`. `grads` are for `zf.update`:
        without a loss scale, reduced over ranks, and with the shapes of the stored parameters. If `accumulate(k)` comes
        before the reduction (ZeRO-1), `zf.update` makes the reduction: then `grads` are this rank's own, and under
        `reduce_scatter` they have the full shapes. `None` means that `out` does not depend on a leaf. The gradient of a
        tied tensor is at its first place, with `None` at the others. The pullback may be called several times.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: cotangents of another structure or shape than `out`.
        RuntimeError: inside `torch.inference_mode()`.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(1.0)
        >>> state = zf.init(tx, {"w": torch.tensor([2.0])})
        >>> out, pullback = zf.vjp(lambda p, x: p["w"] * x, tx, state, torch.tensor([3.0]))
        >>> pullback(torch.ones(1))
        ({'w': tensor([3.])}, tensor([2.]))
    """
    check_function("zf.vjp", fn)
    check_graph("zf.vjp", create_graph)
    pipe = pipe_of(tx, state, "zf.vjp")
    with grad_mode_kept():
        out, pull = evaluate(pipe, fn, state, inputs, record=create_graph or recorded())

    def pullback(cotangents: Any) -> tuple:
        return _pull_back(pull, out, state, cotangents)

    return out, pullback


@uncompiled
def _pull_back(pull: Pullback, out: Any, state: State, cotangents: Any) -> tuple:
    """The pullback of zf.vjp cannot be a graph of its own: it goes back through what was recorded before.

    write: step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step
    """
    with grad_mode_kept():
        grads, of_inputs = pull(cotangents_of(out, cotangents))
    return state.layout.join_once(grads), *of_inputs


@outside_of_graphs
def update(
    tx: Transform, grads: Tree, state: State, *, weight: Any = None, create_graph: bool | None = None, **given: Any
) -> tuple[State, Metrics]:
    """One micro-step: pass gradients through the update halves of a chain.

    Args:
        tx: the pipeline.
        grads: gradients without a loss scale, from the pullback of `vjp` or from `torch.func.grad` of a function of
            `bind`; `None` for a leaf without a gradient. Gradients at the places of a tied tensor add up. On several
            ranks with `accumulate(k)` before the reduction, only the gradients of `vjp` are right, because those of a
            function of `bind` are already reduced. If leaves are sharded, do not differentiate by `state.params`
            without `bind`: such a gradient has the right shape, so no check finds it, but it is the gradient of a loss
            of this rank's rows.
        state: its state, which is not written.
        weight: of this micro-batch, for `accumulate(weighted=True)`. Not under `torch.func.vmap` on several ranks.
        create_graph: whether autograd records the update, so that the new state is a function of gradients, state and
            rates. By default it does if a gradient or a tensor of the state requires grad. If only a number requires
            grad (a learning rate, a schedule's result, a weight), you must pass `create_graph`: `True` keeps the graph
            from step to step, `False` treats the number as a constant.
        given: by keyword, the numbers that a transform wants: `loss=` for `scale_by_polyak`.

    Returns:
        `(state, metrics)`. Metrics are 0-d tensors: `updated` (whether parameters changed), `step`, `grad_norm` (of the
        optimizer's gradients, before clipping), `lr`, `skipped`, and with `scale_loss` `loss_scale` and
        `skipped_steps`. Their names are the same in every step. In a step that only accumulates or is skipped,
        `grad_norm` is 0, and `lr` is the learning rate of the next update.

    Raises:
        RuntimeError: on several ranks, a step is differentiated through a transform that has no derivative there; or
            only a number requires grad, and `create_graph` is not given.
        TypeError: no transform wants a number of that name.
        ValueError: gradients of another structure, shape or dtype, every bad leaf named; a state of meta tensors. In a
            state's first update: gradients that should be averaged and differ between ranks. Under `torch.func.vmap` on
            several ranks: a weight, or a pipeline whose update exchanges numbers.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.5)
        >>> state = zf.init(tx, {"w": torch.ones(1)})
        >>> state, metrics = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params, bool(metrics["updated"])
        ({'w': tensor([0.5000])}, True)

    Notes:
        torch.func differentiates an update, to any order, with respect to gradients, state, rates and other numbers
        that are tensors, and maps it over batches. Derivatives are those of the formula in the optimizer's docstring,
        which is then computed instead of a fused kernel; each optimizer says how close the two are. The new parameters
        of a step that only accumulates or is skipped depend on the old state only. On several ranks the derivatives are
        those of the mean over ranks of what each rank computes from the new state with `zf.bind` or `zf.full_params`.
        Every rank gets the full derivative with respect to learning rates and to the parameters that `zf.init` was
        given. Of the derivative with respect to a sharded state, every rank gets its shard.
    """
    pipe = pipe_of(tx, state, "zf.update", stacked=False)
    state.check_data("zf.update")
    if pipe.second is not None:
        why = f"{pipe.second.name} asks for a second gradient, and zf.update has no loss to evaluate it"
        right = "step = zf.make_step(loss_fn, tx); step(state, *batch)"
        raise ValueError(explain(f"zf.update through {pipe.second.name}", why, right))
    if given or pipe.wants:
        check_given(given.keys(), pipe.wants, "zf.update(tx, grads, state, {}=...)")
    leaves = pieces(split_grads(state.layout, grads))
    check_grads(pipe, leaves, state.leaves)
    if pipe.groups:
        check_vmap(pipe, weight)
        weight = equal_weight(pipe, weight)
        if concrete(state.micro_step) and not int(state.micro_step) and not any(map(levels, leaves.values())):
            agree_on_gradients(pipe, leaves)
    record = records("zf.update", create_graph, leaves, state)
    more = lost_graphs(pipe, record, create_graph, weight)
    ctx = pipe.context(weight=weight, given=given, recorded=record, micro_step=state.micro_step, **more)
    with grad_mode_kept(), ranged(PHASE, "update"):
        return apply(pipe, leaves, state, ctx)


@uncompiled
def records(where: str, create_graph: bool | None, gradients: Leaves, state: State) -> bool:
    """Whether autograd or torch.func records a step: as `create_graph` says, else if a tensor requires grad."""
    if create_graph is not None:
        check_graph(where, create_graph)
    if create_graph or recorded():
        return True
    return create_graph is None and followed((gradients, state.leaves, state.arriving))


def lost_graphs(pipe: Pipeline, record: bool, create_graph: bool | None, weight: Any) -> dict[str, Any]:
    """Entries of a step's context that refuse numbers that require grad, if nobody has said what is meant.

    Raises:
        RuntimeError: a number requires grad, and the step is not recorded.
    """
    if record or create_graph is False or not torch.is_grad_enabled():
        return {}
    return pipe.unrecorded(RECORDED, weight)


# ----------------------------------------------------------------------------------------------------------------------
# `gather` unshards a tree that is sharded like the parameters. `global_norm` computes the norm of such a tree.


@kept_out_of_graphs(RESOLVES, "zf.gather(tx, state, tree), outside of what is compiled")
def gather(tx: Transform, state: State, tree: Tree) -> Tree:
    """Unshard a tree that is sharded as `state.params` is: gradients of a function of `zf.bind`, moments, a vector.

    `gather` has no derivative. Every rank must call it.

    Args:
        tx: the pipeline.
        state: its state.
        tree: tensors of the structure and shapes of `state.params`, or gradients and parameters of an attached model;
            leaves may be `None`.

    Returns:
        The tree with full leaves, in their dtypes. If nothing is sharded, the same tensors.

    Raises:
        ValueError: a leaf does not have the shape of this rank's shard; each is named.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.shard(), zf.sgd(0.1))
        >>> state = zf.init(tx, {"w": torch.ones(2, 2)})
        >>> grads = torch.func.grad(zf.bind(lambda p: (p["w"] ** 2).sum(), tx, state))(state.params)
        >>> zf.gather(tx, state, grads)["w"].shape
        torch.Size([2, 2])
    """
    pipe = pipe_of(tx, state, "zf.gather")
    leaves = {p: x.detach() for p, x in _leaves(state, tree, "zf.gather").items()}
    wrong = [
        (p, f"of shape {tuple(x.shape)}; this rank's shard is of {tuple(state.leaves[p].shape)}")
        for p, x in leaves.items()
        if x.shape != state.leaves[p].shape
    ]
    if wrong:
        raise ValueError(bad_leaves("zf.gather: leaves not laid out as state.params", wrong, "this rank's shard"))
    if pipe.sharding is None:
        return tree
    cutting = tuple(stage for stage in pipe.stages if stage.wire is not None and stage.wire.cuts)
    which = [leaf for leaf in state.layout.leaves if leaf.path in leaves]
    with grad_mode_kept():
        for stage in reversed(cutting):
            leaves = view_all(stage, leaves, which)
    return state.layout.join(leaves)


def global_norm(tree: Tree, tx: Transform | None = None, state: State | None = None) -> Tensor:
    """The norm of all numbers in a tree: `sqrt(sum(x ** 2))`, as optax's.

    Args:
        tree: of tensors; `None` leaves count as nothing.
        tx: the pipeline, if the tree is sharded as `state.params` is: then it is the norm over all shards.
        state: its state.

    Returns:
        A 0-d tensor in fp32 or wider, equal on all ranks if `tx` and `state` are given. Its derivative at zero is zero,
        as that of `torch.linalg.vector_norm`.

    Raises:
        TypeError: one of `tx` and `state` is given without the other.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.global_norm({"w": torch.tensor([3.0]), "b": [torch.tensor(4.0), None]})
        tensor(5.)
    """
    if (tx is None) != (state is None):
        raise TypeError(
            explain(
                "zf.global_norm(tree, tx, state) with only one of tx and state",
                "both are needed to know how the tree is sharded over ranks",
                "zf.global_norm(tree), or zf.global_norm(tree, tx, state)",
            )
        )
    if tx is not None and state is not None:
        return _norm_over_ranks(tree, tx, state)
    return root(_squares({str(i): x for i, x in enumerate(flatten(tree)[0]) if isinstance(x, Tensor)}))


@kept_out_of_graphs(
    RESOLVES,
    'metrics["grad_norm"] of a compiled step; or zf.global_norm(tree, tx, state), outside of what is compiled',
    "zf.global_norm",
)
def _norm_over_ranks(tree: Tree, tx: Transform, state: State) -> Tensor:
    pipe = pipe_of(tx, state, "zf.global_norm")
    squares = pipe.reduction.sum(_squares(_leaves(state, tree, "zf.global_norm")))
    return root(pipe.reduction.alike(squares))


def _squares(leaves: Leaves) -> Tensor:
    return squared_norm(leaves) if leaves else torch.zeros(())


def _leaves(state: State, tree: Tree, where: str) -> Leaves:
    """Leaves by path; for a tied leaf, the first place that has a tensor."""
    found: Leaves = {}
    what = f"{where} of a tree that is not of the structure of state.params"
    for i, _, x in state.layout.match(tree, what, "gradients of zf.bind or zf.vjp, or state.params itself"):
        if isinstance(x, Tensor):
            found.setdefault(state.layout.leaves[i].path, x)
    return pieces(found)
