"""A state from parameters, the parameters of a state, and the pipeline that the two belong to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import constant, is_function, is_wrapped, levels
from .._errors import bad_leaves, explain
from ..core.initializers import Init, check_init, device_of, first_values, made_by
from ..core.layout import make_layout
from ..core.parameter_averages import averages_of
from ..core.parameter_checks import check_own_memory
from ..core.pipeline import Pipeline, first_state
from ..core.rank_agreement import agree_on_start, check_finite, failed_ranks, first_states, tell_unreduced
from ..core.resolve import pipeline
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, flatten, tree_map, tree_paths
from ..kernels.recording import recorded
from .linearize import check_graph
from .uncompiled import outside_of_graphs


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
        tx: a transform, or a chain, with an optimizer in it.
        params: any tree of floating-point tensors: dicts, lists, tuples, NamedTuples, dataclasses registered with
            optree (globally or in the namespace ``"zerofn"``). A tensor that stands at several places is tied: one
            parameter, updated once. Meta tensors give a state of meta tensors.
        create_graph: let autograd have the state as a function of `params`; inside of torch.func it is one anyway.
        init: `init(path, x)` writes the first values of a meta tensor into `x`, which has its shape and dtype. Leaves
            are made one at a time and each rank keeps its part: the peak is a state and one leaf. torch's generators
            are seeded by `seed` and the path for each leaf (and put back), so that numbers are the same on any number
            of ranks. Another kind of device draws others.
        seed: of the draws of `init`.
        device: where `init` is to write and the state is to be; by default where torch makes tensors.

    Returns:
        A `State`. It shares no memory with `params`.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: no optimizer, NaN in a parameter, or two leaves over one memory, as
            `state_dict()` of a tied model has them; every bad leaf is named. What `init` leaves
            unwritten, or writes otherwise on another rank. A pipeline that says what dtype buffers have.

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
    tell_unreduced(pipe, "zf.init(tx, params)")
    if not create_graph and not recorded():
        tensors = {p: x.detach() for p, x in tensors.items()}
    if init is None:
        agree_on_start(pipe, tensors, "zf.init(tx, params)")
        stored = {leaf.path: _own(pipe.road.store(tensors[leaf.path], leaf)) for leaf in layout.leaves}
    else:
        check_finite(tensors)
        at, by = device_of(device), init
        whole = lambda p, x: made_by(by, x, p, seed, at) if x.is_meta else x  # noqa: E731
        made = ((leaf, whole(leaf.path, tensors[leaf.path])) for leaf in layout.leaves)
        keep = lambda leaf, x: _own(pipe.road.store(x, leaf))  # noqa: E731
        stored = first_values(pipe, made, keep, "zf.init(tx, params, init=init)")
    tell = partial(failed_ranks, pipe.step_groups)
    return first_state(pipe, stored, first_states(pipe, stored, tell, "zf.init(tx, params)"))


def _check_buffers(pipe: Pipeline) -> None:
    if pipe.dtypes.buffers is not None:
        why = "a tree of parameters has no buffers, so it would have no effect"
        right = (
            "buffers = {name: b.to(dtype) for name, b in model.named_buffers() if b.is_floating_point()} and\n"
            "         torch.func.functional_call(model, {**params, **buffers}, inputs) in your function"
        )
        raise ValueError(explain("zf.init(chain(precision(buffer_dtype=...), ...), params)", why, right))


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@outside_of_graphs
def full_params(tx: Transform, state: State, of: str = "params") -> Tree:
    """The whole tree of parameters, in the structure it was given in and the dtype it is stored in.

    Behind a view of one's own it has what the model sees, and `state.params` what is stored.

    Args:
        tx: the pipeline.
        state: its state.
        of: `"params"`, or the name of an `ema`, or of the `masked` or `partition` that holds one, for the
            averages; what is not averaged there is as it is stored.

    Returns:
        Tensors that share memory with the state where nothing had to be gathered or cast.

    >>> import torch, zerofn as zf
    >>> tx = zf.sgd(0.1)
    >>> zf.full_params(tx, zf.init(tx, [torch.ones(2)]))
    [tensor([1., 1.])]
    """
    pipe = pipe_of(tx, state, "zf.full_params")
    leaves = state.leaves
    if of != "params":
        leaves = {**leaves, **averages_of(state, of, "zf.full_params(tx, state, of={})")}
    return state.layout.join(pipe.road.whole(leaves))


def pipe_of(tx: Transform, state: Any, where: str) -> Pipeline:
    """As `resolve_for`, with views that read this state."""
    return reading_state(resolve_for(tx, state, where), state, where)


def resolve_for(tx: Transform, state: Any, where: str) -> Pipeline:
    """Resolve a pipeline for the parameters of a state. One that another pipeline has made is refused."""
    if not isinstance(state, State):
        raise TypeError(
            explain(f"{where} got a {type(state).__name__}", "it is not a state", "state = zf.init(tx, params)")
        )
    state.check_usable(where)
    pipe = pipeline(tx, state.layout, where)
    names = [p.name for p in pipe.parts]
    if list(state.transforms) != names:
        raise ValueError(
            explain(
                f"{where} with a pipeline of {names} and a state of {list(state.transforms)}",
                "the state was made by another pipeline",
                "state = zf.init(tx, params) with this very tx",
            )
        )
    mine, theirs = pipe.layout.placement, state.layout.placement
    if (mine.rank, mine.size) != (theirs.rank, theirs.size):
        wrong = f"{where} on rank {mine.rank} of {mine.size}, of a state that has the shards of rank {theirs.rank} of "
        why = "each rank has its own shards, and a file of torch.save has those of one"
        right = "torch.save(state, f'{rank}.pt') on each rank, and torch.load of its own on as many;\n"
        right += "zf.save(directory, state) and zf.load(directory, like=zf.init(tx, params)) for any number of ranks"
        raise ValueError(explain(f"{wrong}{theirs.size}", why, right))
    return pipe


def reading_state(pipe: Pipeline, state: State, where: str) -> Pipeline:
    """The pipeline, whose views with `reads=True` are given what this state holds of their transforms.

    Such views are called where a leaf is pulled back too. What they read has no derivative and no batch there: for
    those a state would have to be an argument of every view's rule.

    Raises:
        RuntimeError: what a view reads is differentiated or batched: refused, for it would be taken for a constant.
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
        wrong = f"{where}: a view takes its transform's state for a constant, and this one is none"
        raise RuntimeError(bad_leaves(wrong, bad, "a parameter for what is learned or differs along a batch"))
    # Unwrapped: the views' rules run beneath the torch.func transform that has wrapped them.
    plain = tree_map(lambda x: constant(x) if is_wrapped(x) else x, read)
    return pipe.reading(plain.__getitem__)
