"""`bind`, `vjp` and `update`: a function of stored parameters, its pullback, and one micro-step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import set_grad_mode
from .._compat.compiler import uncompiled
from .._compat.functorch import levels
from .._ranges import PHASE, ranged
from ..core.arguments import check_function, check_positional
from ..core.gradient_checks import split_grads
from ..core.layout import Leaf, Leaves
from ..core.linear_map import ForwardOnlyView, enter, leave
from ..core.number_graphs import RECORDED
from ..core.pipeline import Pipeline
from ..core.rank_agreement import agree_on_gradients
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, followed, tree_map
from ..core.update import Metrics, apply, check_grads, check_stored, check_vmap
from ..core.weight_agreement import equal_weight
from ..kernels.recording import concrete, recorded
from ..sharded.guarded_parameter import pieces
from .evaluate import Pullback, cotangents_of, evaluate
from .linearize import check_graph
from .states import pipe_of
from .uncompiled import outside_of_graphs


@outside_of_graphs
def bind(fn: Callable[..., Any], tx: Transform, state: State) -> Callable[..., Any]:
    """`fn` as a function of *stored* parameters, differentiable by any torch.func transform.

    Args:
        fn: `fn(params, *inputs)` on full parameters, in the structure they were given in, as the model sees them
            (gathered, in the compute dtype). Any tree of tensors may come out.
        tx: the pipeline.
        state: its state; the loss scale is taken from it, the parameters are an argument.

    Returns:
        `fn_stored(stored_params, *inputs)`, for `state.params` or anything of its structure and shapes. Derivatives are
        true to any order: unscaled, reduced over ranks, in the stored layout. So a vector to multiply by is spread
        over ranks as parameters are; on several ranks there are products with such vectors, alone or under `vmap`, and
        a whole Hessian or Jacobian by parts is refused (`jacrev(..., chunk_size=1)` of a gradient cannot be told from
        products, and adds up the columns of all ranks). Under a loss scale or an `output_dtype` it returns copies:
        where `fn` computes `y` from `h` and returns both, the gradient of that `y` does not pass that `h`.

    Raises:
        TypeError: `fn` cannot be called, or inputs were given by keyword.
        ValueError: called with parameters of other shapes; each is named. `torch.func.hessian`, `jacfwd` and `jacrev`
            of a gradient where ranks have parts of the parameters; batches of other lengths on other ranks under
            `vmap`. In a backward, on several ranks with `accumulate(weighted=True)` before the reduction: it would
            not know the weights that `zf.update` is given, to which `zf.vjp` leaves it.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.scale_loss(1024.0), zf.sgd(0.1))
    >>> state = zf.init(tx, {"w": torch.tensor([1.0, 2.0])})
    >>> loss = zf.bind(lambda p: (p["w"] ** 3).sum(), tx, state)
    >>> torch.func.grad(loss)(state.params)
    {'w': tensor([ 3., 12.])}
    """
    check_function("zf.bind", fn)
    pipe = pipe_of(tx, state, "zf.bind")
    scale = pipe.scale_of(state.transforms)
    # From storage on: `pipe.leaf_views` begins at resident parameters where the reduction comes after an accumulation.
    views = pipe.road.composed(pipe.stages, pipe.dtypes.gradient)
    if pipe.road.late and pipe.weighted:
        views = {p: ForwardOnlyView(v.leaf, v.stages, v.grad_dtype) for p, v in views.items()}

    def see(leaf: Leaf, x: Tensor) -> Tensor:
        seen = views[leaf.path](x, scale)
        # A view for each place of a tied tensor: else autograd returns one tensor for all, as if it were given twice.
        return x.view_as(x) if seen is x and state.layout.tied(leaf) else seen

    @uncompiled
    def entered(stored: Tree, inputs: tuple) -> tuple[Tree, list]:
        """A function that zf.bind has made is no whole graph: it resolves a tree, and crosses the edge of a pipeline.

        write: step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step; or zf.bind and zf.vjp of
        torch.compile(fn, fullgraph=True), outside of what is compiled
        """
        check_stored(pipe, stored)
        return state.layout.map_places(see, stored), [_edges(enter, x, scale, None) for x in inputs]

    def fn_stored(stored: Tree, *inputs: Tree, **keywords: Any) -> Any:
        check_positional("fn(stored", keywords)
        params, inner = entered(stored, inputs)
        return _leave_all(fn(params, *inner), scale, pipe.dtypes.output_dtype)

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
    """Evaluate `fn` on the parameters of a state, and give the function that pulls cotangents back.

    Args:
        fn: `fn(params, *inputs)` on full parameters, returning any tree of tensors.
        tx: the pipeline.
        state: its state.
        inputs: trees; floating-point and complex tensors among them get a cotangent.
        create_graph: record all of it, as `torch.autograd.grad` does, so that `out` and gradients can be
            differentiated. Inside of torch.func they can in any case.

    Returns:
        `(out, pullback)`. `pullback(out_cotangents)` gives `(grads, *input_cotangents)`: true gradients,
        unscaled and reduced, in the stored layout, ready for `zf.update`. Where an `accumulate` that holds comes
        before the reduction (ZeRO-1), that reduction is still to come, in `zf.update`: they are this rank's own,
        and under `reduce_scatter` in the parameter's full shape. `None` stands for "does not depend on it"; the
        gradient of a tied tensor stands at its first place, and `None` at the others. It may be called several
        times.

    Raises:
        TypeError: `fn` cannot be called.
        ValueError: cotangents of another structure or shape than `out`.
        RuntimeError: inside `torch.inference_mode()`.

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
    out, pull = evaluate(pipe, fn, state, inputs, record=create_graph or recorded())

    def pullback(cotangents: Any) -> tuple:
        return _pull_back(pull, out, state, cotangents)

    return out, pullback


@uncompiled
def _pull_back(pull: Pullback, out: Any, state: State, cotangents: Any) -> tuple:
    """The pullback of zf.vjp is no graph: it goes back through what was recorded before.

    write: step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step
    """
    mode = torch.is_grad_enabled()
    try:
        grads, of_inputs = pull(cotangents_of(out, cotangents))
    except BaseException:
        set_grad_mode(mode)
        raise
    return state.layout.join_once(grads), *of_inputs


@outside_of_graphs
def update(
    tx: Transform, grads: Tree, state: State, *, weight: Any = None, create_graph: bool | None = None
) -> tuple[State, Metrics]:
    """One micro-step through the update halves.

    Args:
        tx: the pipeline.
        grads: true gradients, as `vjp`'s pullback gives them; `None` for a leaf without one. Gradients at tied
            places add up. Those of `torch.func.grad` of a bound function are the same, but where an `accumulate`
            that holds comes before the reduction over several ranks: they are reduced, and this is to do it.
        state: its state, which is not written.
        weight: of this micro-batch, for `accumulate(weighted=True)`. Not under `torch.func.vmap` on several ranks.
        create_graph: whether autograd records the update, so that the new state is a function of gradients, state and
            rates. By default where a gradient, or a tensor of the state, requires grad. A rate alone that does (or a
            weight, any number of a transform, what a schedule returns) is refused unless this says what is meant:
            `True` keeps the graph from step to step, `False` takes it for a constant, as `torch.no_grad()` does.

    Returns:
        `(state, metrics)`. Metrics are 0-d tensors: `updated` (whether parameters changed), `step`,
        `grad_norm` (of what the optimizer is given, before clipping), `lr`, `skipped`, and with `scale_loss`
        `loss_scale` and `skipped_steps`. The names are the same in every step. In one that is held or skipped
        `grad_norm` is 0, since no gradient has gone on, and `lr` is that of the update to come.

    It is a function that torch.func differentiates, to any order, and maps over batches: by gradients, state, rates and
    other numbers that are tensors. Derivatives are those of the formula in the optimizer's docstring, which is computed
    there in place of a fused kernel; each optimizer says how near the two are. A held step's new state depends on the
    old one alone, and so does that of a step that was skipped. On several ranks derivatives are those of the mean over
    ranks of what each rank computes from the new state with `zf.bind` or `zf.full_params`: by rates and by the first
    parameters the whole on every rank, by the state this rank's part.

    Raises:
        RuntimeError: a derivative through a transform that has none on several ranks. A number that requires grad
            alone, without `create_graph`.
        ValueError: gradients of another structure, shape or dtype; every bad leaf is named. In the first update of a
            state, gradients that differ between ranks where they are taken for averaged. A state of meta tensors.
            Under `torch.func.vmap` on several ranks, a weight, or a pipeline whose update has to exchange numbers.

    >>> import torch, zerofn as zf
    >>> tx = zf.sgd(0.5)
    >>> state = zf.init(tx, {"w": torch.ones(1)})
    >>> state, metrics = zf.update(tx, {"w": torch.ones(1)}, state)
    >>> state.params, bool(metrics["updated"])
    ({'w': tensor([0.5000])}, True)
    """
    pipe = pipe_of(tx, state, "zf.update")
    state.check_data("zf.update")
    leaves = pieces(split_grads(state.layout, grads))
    check_grads(pipe, leaves, state.leaves)
    if pipe.groups:
        check_vmap(pipe, weight)
        weight = equal_weight(pipe, weight)
        if concrete(state.micro_step) and not int(state.micro_step) and not any(map(levels, leaves.values())):
            agree_on_gradients(pipe, leaves)
    record = records("zf.update", create_graph, leaves, state)
    more = lost_graphs(pipe, record, create_graph, weight)
    ctx = pipe.context(weight=weight, recorded=record, micro_step=state.micro_step, **more)
    mode = torch.is_grad_enabled()
    try:
        with ranged(PHASE, "update"):
            return apply(pipe, leaves, state, ctx)
    except BaseException:
        set_grad_mode(mode)
        raise


@uncompiled
def records(where: str, create_graph: bool | None, gradients: Leaves, state: State) -> bool:
    """Whether autograd or torch.func records a step: as `create_graph` says, else where a tensor requires grad."""
    if create_graph is not None:
        check_graph(where, create_graph)
    if create_graph or recorded():
        return True
    return create_graph is None and followed((gradients, state.leaves, state.transforms))


def lost_graphs(pipe: Pipeline, record: bool, create_graph: bool | None, weight: Any) -> dict[str, Any]:
    """Of the context of a step: how numbers that require grad are refused, where nobody has said what is meant.

    Raises:
        RuntimeError: one requires grad, and the step is not recorded.
    """
    if record or create_graph is False or not torch.is_grad_enabled():
        return {}
    return pipe.unrecorded(RECORDED, weight)
