"""`shard`, `reduce_scatter`, `all_reduce` and `local`: how parameters and gradients lie over ranks.

Their wires, which send, are in `core/wires.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._errors import explain
from ..extend import (
    NOT_REDUCED,
    OF_ITS_OWN,
    ONE_OF_TWO,
    Averaging,
    CodedSharding,
    Codes,
    Context,
    Facts,
    Layout,
    Leaf,
    Leaves,
    Ranks,
    Replicate,
    Sharding,
    Spec,
    Through,
    Transform,
    TransformState,
    View,
    ViewOf,
    as_it_is,
    check_flag,
    codes_of_wire,
    counter,
    no_state,
    over_ranks,
    transform,
)


@transform
def shard(mesh: Any = None, wire: str | None = None, reduce_wire: str | None = None) -> Transform:
    """ZeRO-3: parameters, gradients and optimizer states live as shards; parameters are all-gathered on use.

    `shard` does what FSDP2's `fully_shard` does (Rajbhandari et al., 2020). A block of the model is all-gathered when
    forward uses one of its parameters, and resharded when forward uses the next block; backward gathers the block
    again. In the eager route `p` and `p.grad` are DTensors of the full shape, which hold this rank's rows:
    `p.to_local()`. `shard` stands first in a chain: gradients are reduced in the compute dtype, or in
    `precision(reduce_dtype=...)`.

    One rank may call the model alone (`if rank == 0: evaluate(model)`): the other ranks send it their shards. If
    forward writes into parameters (a momentum encoder), call the model on every rank, not on one rank alone. Otherwise
    some ranks may have written their shards and others not, and the evaluation would see a mixture.

    With `wire` ranks send parameters in 8 bits (the qwZ of ZeRO++: Wang et al., 2023), rounded to nearest, with a scale
    for each block of 128. The model gets the decoded parameters, which are equal on all ranks. State, checkpoints,
    `zf.full_params`, `opt.gathered()` and computations with a parameter outside of the model have the stored numbers. A
    forward that writes into parameters is refused. With `reduce_wire` ranks send gradients in 8 bits (qgZ): see
    `reduce_scatter`. The derivative of a rounding is the identity. In one process nothing is sent, and nothing is
    rounded.

    Args:
        mesh: a one-dimensional `DeviceMesh`, such as `mesh["shard"]`; by default all ranks.
        wire: how parameters are all-gathered. `"fp8"`: as floats with 3 bits of mantissa (e4m3). The error of a number
            is then at most a 16th of the number, or, if that is larger, a 450,000th of the largest magnitude in its
            block. `"int8"`: as codes of 8 bits. The error of a number is then at most a 254th of the largest magnitude
            in its block. `None`: in the dtype of the model.
        reduce_wire: how gradients are reduce-scattered: `"int8"`, or `None`: in the dtype of the sum.

    Raises:
        ValueError: when the chain is built, a transform before `shard` must come after it (the message names an order
            that works); or, with `reduce_wire`, `precision(reduce_dtype=...)` asks for another dtype than fp32.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.shard(), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.ones(2, 2)})
        >>> state.params["w"].shape, zf.full_params(tx, state)["w"].shape
        (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    gathered = codes_of_wire("shard", wire, ("fp8", "int8"))
    codes = codes_of_wire("shard", reduce_wire, name="reduce_wire")
    return Transform(
        "shard",
        needs="element",
        view_fn=_sharding("shard", mesh, codes, gathered, resident=False),
        through=_to_shards(codes, gathered),
    )


@transform
def reduce_scatter(mesh: Any = None, wire: str | None = None, error_feedback: bool = False) -> Transform:
    """ZeRO-1 or ZeRO-2: gradients are reduce-scattered, and each rank keeps the optimizer states of its shard.

    Every rank keeps the full parameters, which are all-gathered once after each update. Before `accumulate` (ZeRO-2)
    each micro-step reduces its gradients, and each rank sums shards. After `accumulate` (ZeRO-1) each rank sums full
    gradients, and the ranks reduce the sums once for each update. If you write into a parameter, write the same on
    every rank: the next step compares ranks and raises if they differ.

    After `shard` on another axis of the mesh, `reduce_scatter` shards the shards again. In this example parameters are
    gathered within a node, states are sharded over all ranks, and nodes communicate once for each update:
    `chain(shard(mesh["node"]), accumulate(4), reduce_scatter(mesh["nodes"]), ...)`.

    With `wire="int8"` ranks send gradients as codes of 8 bits, with a scale for each block of 128, and sum them in fp32
    (the qgZ of ZeRO++: Wang et al., 2023). Rounding is stochastic: each rank's error in a number is less than a 127th
    of the largest magnitude in its block, and zero on average. The random bits are computed from the numbers of the
    block, so a step is a function of its inputs, and equal blocks are rounded equally. A block with an infinity or a
    NaN is NaN as a whole. In one process nothing is sent, and nothing is rounded.

    With `error_feedback` each rank adds to its gradient the rounding error of the previous gradient (Seide et al.,
    2014). So the error of the sum of all gradients stays as small as the error of one gradient; otherwise it grows with
    the square root of their number. `error_feedback` takes a full gradient in fp32 on each rank, and needs
    `accumulate(n), reduce_scatter(...)`. An error that is not finite is dropped.

    Args:
        mesh: a one-dimensional `DeviceMesh`; by default all ranks.
        wire: `"int8"`, or `None`: gradients are sent in the dtype of the sum.
        error_feedback: whether the state keeps the errors of rounding, and the next gradient makes up for them.

    Raises:
        ValueError: `reduce_scatter` comes after `shard`, and has no mesh or the same ranks as `shard`; or a transform
            before `reduce_scatter` must come after it; or, with a wire, `precision(reduce_dtype=...)` asks for another
            dtype than fp32; or `error_feedback` has no wire, or no accumulation of several micro-steps before it.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.chain(zf.accumulate(2), zf.reduce_scatter(wire="int8"), zf.sgd(1.0)).parts[1]
        reduce_scatter(wire='int8')
    """
    codes = codes_of_wire("reduce_scatter", wire)
    check_flag("reduce_scatter", "error_feedback", error_feedback)
    if error_feedback and codes is None:
        why = "without a wire nothing is rounded, so there is no error"
        right = 'reduce_scatter(wire="int8", error_feedback=True)'
        raise ValueError(explain("reduce_scatter(error_feedback=True)", why, right))
    return Transform(
        "reduce_scatter",
        needs="element",
        facts=Facts(owes=error_feedback),
        init_fn=_no_errors if error_feedback else no_state,
        view_fn=_sharding("reduce_scatter", mesh, codes, feeds_back=error_feedback),
        through=_scattered(mesh, codes),
    )


@transform
def all_reduce(mesh: Any = None) -> Transform:
    """Data parallelism: average gradients over ranks that hold the same parameters.

    After `shard` on another axis of the mesh this is hybrid sharding:
    `chain(shard(mesh["shard"]), all_reduce(mesh["replicate"]), ...)`.

    Args:
        mesh: a one-dimensional `DeviceMesh`; by default all ranks.

    Raises:
        ValueError: gradients are averaged already, or a transform before it has changed them.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.chain(zf.all_reduce(), zf.sgd(1.0)).parts[0]
        all_reduce()
    """

    def view(layout: Layout, ranks: Ranks) -> View:
        return over_ranks(Averaging(ranks("all_reduce", mesh)), resident=True, traceable=True)

    return Transform("all_reduce", needs="element", view_fn=view, through=_averaged)


@transform
def local(mesh: Any = None) -> Transform:
    """Declare that gradients stay on their rank: nothing is reduced, on purpose.

    `local` does not change any number. On several ranks a chain without `shard`, `reduce_scatter` or `all_reduce`
    trains a different model on each rank, and `zf.attach` and `zf.init` warn of this. `local` silences the warning
    where you want this (an ensemble, a population, a search for hyperparameters, averaging parameters every few hundred
    steps), or where something else averages gradients, such as DistributedDataParallel.

    `zf.attach` and `zf.init` also warn if the chain reduces along one axis of a mesh and has no transform for another
    axis. Then `local(mesh["stage"])` says that ranks along this axis have parameters of their own.

    Args:
        mesh: a one-dimensional `DeviceMesh` along which nothing is reduced; by default all ranks.

    Raises:
        ValueError: without a mesh, in a chain with `shard`, `reduce_scatter` or `all_reduce`.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.local(), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.ones(2)})
        >>> zf.update(tx, {"w": torch.ones(2)}, state)[0].params
        {'w': tensor([0., 0.])}
    """

    if mesh is None:
        return Transform("local", needs="element", through=_kept)

    def view(layout: Layout, ranks: Ranks) -> None:
        # Nothing is sent over the group. The chain has named the mesh.
        ranks("local", mesh)

    return Transform("local", needs="element", view_fn=view, through=as_it_is)


def _sharding(
    function: str,
    mesh: Any,
    codes: Codes | None,
    gathered: Any = None,
    resident: bool = True,
    feeds_back: bool = False,
) -> ViewOf:
    """The view of a wire. Its process group is opened when a pipeline is made, not when the transform is built."""

    def view(layout: Layout, ranks: Ranks) -> View:
        group = ranks(function, mesh)
        wire = Sharding(group) if codes is None else CodedSharding(group, codes=codes)
        of_model = None if gathered is None else replace(wire, gathered=gathered)
        made = over_ranks(wire, resident, traceable=True, model_wire=of_model)
        if feeds_back and isinstance(wire, CodedSharding):
            made = replace(made, corrects=partial(_with_errors, wire))
        return made

    return view


def _no_errors(leaves: Leaves, layout: Layout) -> TransformState:
    # The count tells whether there may be errors. They differ between ranks, as the sums of an open window do.
    return {CODED: counter(), ERROR: {path: torch.zeros_like(x, dtype=torch.float32) for path, x in leaves.items()}}


def _with_errors(
    wire: CodedSharding, given: Callable[[Leaf], Leaf], grads: Leaves, state: TransformState, ctx: Context
) -> tuple[Leaves, TransformState]:
    """Gradients plus the rounding errors of earlier messages, and the state with the errors of this message."""
    sent, errors = {}, dict(state[ERROR])
    for leaf in ctx.layout.leaves:
        if leaf.path in grads:
            old = errors[leaf.path]
            x = sent[leaf.path] = grads[leaf.path].to(torch.float32) + old
            left = x.detach() - wire.rounded(x.detach().reshape(-1), given(leaf)).reshape(x.shape)
            errors[leaf.path] = torch.where(left.isfinite(), left, old)
    return sent, {CODED: state[CODED] + 1, ERROR: errors}


ERROR, CODED = "error", "coded"
FULL_FIRST = "a full gradient would be averaged before it is cut into shards"
BOTH_CUT = "both cut the parameters over the ranks: shard is ZeRO-3, reduce_scatter ZeRO-1 and ZeRO-2"
ALONG_TWO = "; along two axes of a mesh: shard(mesh['node']), ..., reduce_scatter(mesh['nodes'])"


def _to_shards(codes: Codes | None, gathered: Any) -> Through:
    def through(spec: Spec) -> Spec:
        spec.refuse("local_by", NOT_REDUCED, ONE_OF_TWO)
        spec.refuse("scattered_by", BOTH_CUT, ONE_OF_TWO)
        spec.refuse("sharded_by", "parameters are cut once", spec.once)
        spec.refuse("changed_by", OF_ITS_OWN)
        spec.refuse("summed_by", "under shard no rank ever holds a full gradient that could be accumulated")
        spec.refuse("unscaled_by", "gradients would be unscaled before they are reduced, in the compute dtype")
        spec.refuse(
            "cast_by", "full parameters would be gathered in the storage dtype and cast afterwards, so both copies live"
        )
        spec.refuse("averaged_by", FULL_FIRST)
        return spec.after("sharded_by").by_rows().coded(codes, gathered)

    return through


def _scattered(mesh: Any, codes: Codes | None) -> Through:
    def through(spec: Spec) -> Spec:
        spec.refuse("local_by", NOT_REDUCED, ONE_OF_TWO)
        if mesh is None:
            spec.refuse("sharded_by", BOTH_CUT, ONE_OF_TWO + ALONG_TWO)
        spec.refuse("scattered_by", "gradients are cut once", spec.once)
        spec.refuse("changed_by", OF_ITS_OWN)
        spec.refuse("averaged_by", FULL_FIRST)
        return spec.after("scattered_by").by_rows().coded(codes)

    return through


def _averaged(spec: Spec) -> Spec:
    spec.refuse("local_by", NOT_REDUCED, ONE_OF_TWO)
    spec.refuse("averaged_by", "gradients are averaged once", spec.once)
    spec.refuse("changed_by", OF_ITS_OWN)
    return spec.after("averaged_by").placed(Replicate())


def _kept(spec: Spec) -> Spec:
    for reduced in ("sharded_by", "scattered_by", "averaged_by"):
        spec.refuse(reduced, NOT_REDUCED, ONE_OF_TWO)
    return spec.after("local_by")
