"""`precision`: the dtypes in which parameters are stored, computed with, differentiated and reduced."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import (
    FORMAT,
    FORMAT_ENTRY,
    MASTERS,
    Context,
    Dtypes,
    Entry,
    Layout,
    Leaf,
    Leaves,
    Master,
    Prepared,
    Ranks,
    Room,
    RoundedToNearest,
    Rounding,
    Scope,
    Shadow,
    Spec,
    State,
    Transform,
    TransformState,
    View,
    bf16_of_master,
    buckets,
    check_dtype,
    check_format,
    check_seed,
    counter,
    format_of,
    labels_by_path,
    laid_out,
    leaf_key,
    master_of,
    rebuild,
    residual_of_master,
    stored_fn_of,
    taken_apart,
    together,
    transform,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The `store_dtype` of parameters in bf16 with a residual of 8 bits in the optimizer's state.
SPLIT = "bf16+8"
RESIDUAL = "master_residual"
# The number of updates of a transform that does not count them, by which it rounds at random.
STEP = "step"
ROUNDINGS = ("nearest", "stochastic")
SHORT = (torch.bfloat16, torch.float16)


def _cast(dtypes: Dtypes, kept: Set[str], seed: int | None) -> View:
    """The view: cast to the dtype that the model computes in; its transpose casts the gradient back.

    `kept` are the paths of complex leaves, which are not cast, and `seed` is that of the stochastic rounding, if asked
    for.
    """

    def view(x: Tensor, leaf: Leaf) -> Tensor:
        seen = dtypes.of(leaf).param_dtype
        return x.to(seen) if seen else x

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        return g.to(dtypes.gradient(leaf))

    def store(x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(dtypes.stored(leaf))

    def changes(leaf: Leaf) -> bool:
        own = dtypes.of(leaf)
        stored = own.store_dtype or leaf.dtype
        return own.param_dtype not in (None, stored) or dtypes.gradient(leaf) != stored

    split = any([own.residual for own in (dtypes, *dtypes.by_path.values())])
    around = partial(_with_residuals, dtypes, kept) if split else None
    around = around if seed is None else partial(_rounded_at_random, seed)
    return View(view, pull, store, changes, dtypes=dtypes, around=around)


def _rounded_at_random(seed: int, inner: Transform, paths: Set[str]) -> Transform:
    """A transform that rounds at random what it stores in 16 bits; the format of the draws is in its state."""
    if not inner.facts.rounds:
        if inner.facts.optimizes:
            raise ValueError(_rounds_itself(inner))
        return inner
    # Transforms of a chain round by other bits each, but an optimizer has those of `low_precision_adam`.
    own_seed = seed if inner.facts.optimizes else (seed ^ leaf_key(inner.name)) & ((1 << 64) - 1)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundedToNearest)
            made = inner.init_fn(leaves, layout)
        if MASTERS in made:
            raise ValueError(_rounded_masters(inner.name))
        counted = {} if made.keys() & {STEP, "count"} else {STEP: counter()}
        return {**made, **counted, FORMAT_ENTRY: counter(FORMAT)}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        check_format(inner.name, state, ctx)
        prepared = inner.prepare_fn(state, grads, params, ctx)
        step = state[STEP] + 1 if STEP in state and "count" not in state else None
        kept = prepared.state if step is None or STEP in prepared.state else {**prepared.state, STEP: step}
        rounding = Rounding(own_seed, format_of(state), step if step is None else ctx.read(step))
        return replace(prepared, carry=(prepared.carry, rounding), state=kept)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Rounding], ctx: Context):
        own, rounding = carry
        return inner.update_fn(grads, state, params, own, replace(ctx, rounding=rounding))

    plain = replace(inner.facts, constant=(*inner.facts.constant, FORMAT_ENTRY))
    return replace(inner, facts=plain, init_fn=init, prepare_fn=prepare, update_fn=update, parts=(inner,))


def _rounds_itself(t: Transform) -> str:
    # A wrapper has the name of what it wraps.
    name = t.name if t.factory is None else t.factory.__name__
    why = f"{name} rounds its results itself, so that rounding= would have no effect on them"
    right = f"precision(store_dtype=torch.bfloat16), {name}(...) without rounding= of precision; or another:\n"
    right += "zf.adamw, a function of zf.leafwise, and zerofn.extend.optimizer(in_fp32=True) round as asked"
    return explain(f'chain(precision(..., rounding="stochastic"), ..., {name}(...))', why, right)


def _rounded_masters(name: str) -> str:
    wrong = f'precision(rounding="stochastic") with offload({name}(...), compute="host", master_dtype=...)'
    why = "parameters are copies of masters that lose nothing, so rounding= would have no effect"
    return explain(wrong, why, f'offload({name}(...), compute="host", master_dtype=...) without rounding=')


def _with_residuals(dtypes: Dtypes, kept: Set[str], inner: Transform, paths: Set[str]) -> Transform:
    """An optimizer that updates fp32 masters: stored bf16 parameters, and residuals that it keeps in its state."""
    split = [path for path in paths - kept if dtypes.by_path.get(path, dtypes).residual]
    if not split or not inner.facts.optimizes:
        return inner
    # With `copies` the executor runs bucket by bucket, so that only one bucket has its fp32 masters in memory. A kernel
    # that makes none gets all leaves at once, since each bucket costs half a millisecond; the leaves that it does not
    # take are updated in buckets here.
    update_stored = stored_fn_of(inner.update_fn)
    at_once = update_stored is not None and not inner.facts.copies

    def masters(state: TransformState, params: Leaves, room: Room | None = None) -> Leaves:
        kept, found = state[RESIDUAL], dict(params)
        for paths in together({path: x for path, x in params.items() if path in kept}):
            if len(paths) == 1:
                found[paths[0]] = master_of(params[paths[0]], kept[paths[0]], room)
            else:
                own, rest = [params[path] for path in paths], [kept[path] for path in paths]
                found.update(zip(paths, taken_apart(master_of(laid_out(own), laid_out(rest)), own), strict=True))
        return found

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        wide = {path: x.to(torch.float32) if path in split else x for path, x in leaves.items()}
        kept = {path: torch.zeros_like(x, dtype=torch.int8) for path, x in leaves.items() if path in split}
        state = inner.init_fn(wide, layout)
        if MASTERS in state:
            raise ValueError(_two_masters(inner.name))
        return {**state, RESIDUAL: kept}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        # An optimizer that treats leaves alone does not look at parameters before its update.
        looks = inner.scope is not Scope.LEAF
        prepared = inner.prepare_fn(state, grads, masters(state, params) if looks else params, ctx)
        return replace(prepared, carry=(prepared.carry, Room()))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: tuple[Any, Room], ctx: Context):
        own, room = carry
        stored, new = in_one_pass(grads, state, params, own, ctx)
        if not stored and not at_once:
            return in_three(grads, state, params, own, room, ctx)
        for paths in buckets({path: params[path] for path in grads if path not in stored}):
            some = {path: grads[path] for path in paths}, state, {path: params[path] for path in paths}
            found, others = in_three(*some, own, room, ctx)
            stored |= found
            # Counters, which are no dicts by leaf, are counted from `state` in each part: all parts have the same.
            new |= {slot: {**new.get(slot, {}), **x} if isinstance(x, dict) else x for slot, x in others.items()}
        return {path: stored[path] for path in grads}, new

    def in_one_pass(grads: Leaves, state: TransformState, params: Leaves, own: Any, ctx: Context):
        """The update of leaves that a kernel takes in two parts, without their masters in memory."""
        if update_stored is None:
            return {}, {}
        kept = state[RESIDUAL]
        parts: Any = {path: Master(x, kept[path]) for path, x in params.items() if path in kept}
        some = {path: g for path, g in grads.items() if path in kept}
        out, new = cast("tuple[dict[str, Any], TransformState]", update_stored(some, state, parts, own, ctx))
        rest = {path: x.residual for path, x in out.items()}
        return {path: x.p for path, x in out.items()}, {**new, RESIDUAL: rest} if out else {}

    def in_three(grads: Leaves, state: TransformState, params: Leaves, own: Any, room: Room, ctx: Context):
        """The update of any leaves: masters are joined, updated and taken apart."""
        wide = masters(state, params, room.emptied(sum(map(Tensor.numel, params.values()))))
        out, new = inner.update_fn(grads, state, wide, own, ctx)
        kept = state[RESIDUAL]
        stored, rest = dict(out), {}
        for paths in together({path: x for path, x in out.items() if path in kept}):
            olds, olds_kept = ({path: old[path] for path in paths} for old in (params, kept))
            if len(paths) == 1:
                (path,) = paths
                stored[path] = ctx.put(bf16_of_master, olds[path], out[path])
                rest[path] = ctx.put(residual_of_master, olds_kept[path], out[path])
                continue
            own = [out[path] for path in paths]
            flat = laid_out(own)
            now, left = bf16_of_master(flat, flat), residual_of_master(flat, flat)
            stored |= ctx.into_each(olds, dict(zip(paths, taken_apart(now, own), strict=True)))
            rest |= ctx.into_each(olds_kept, dict(zip(paths, taken_apart(left, own), strict=True)))
        return stored, {**new, RESIDUAL: {path: rest[path] for path in out if path in rest}}

    shadows = (*inner.facts.shadows, Shadow(RESIDUAL, residual=True))
    plain = replace(inner.facts, counterpart=None, torch_names=(), copies=not at_once, shadows=shadows)
    return replace(inner, facts=plain, init_fn=init, prepare_fn=prepare, update_fn=update, parts=(inner,))


def _two_masters(name: str) -> str:
    wrong = f"precision(store_dtype={SPLIT!r}) with offload({name}(...), compute='host', master_dtype=...)"
    why = "both keep the bits that bf16 parameters have lost, so one of them would have no effect"
    return explain(wrong, why, f"precision(store_dtype={SPLIT!r}) with offload({name}(...), compute='host')")


def masters_from(old: State, state: State) -> State:
    """`state` with the fp32 parameters of another chain, `old`, as bf16 and residuals, for leaves with residuals.

    A residual at the owner of a leaf stays as it is, since no rank has the parameter whole.
    """
    leaves = dict(state.leaves)

    def taken(e: Entry) -> Any:
        wide = old.leaves.get(e.path)
        if e.slot.rpartition("/")[2] != RESIDUAL or wide is None or wide.dtype != torch.float32:
            return e.value
        if e.elsewhere or e.value.shape != wide.shape:
            return e.value
        leaves[e.path] = bf16_of_master(leaves[e.path], wide)
        return residual_of_master(e.value, wide)

    return replace(rebuild(state, taken), leaves=leaves)


def _through(split: bool, spec: Spec) -> Spec:
    spec.refuse("cast_by", "the dtypes would be set twice", spec.once)
    spec.refuse("changed_by", "it would act on gradients in the compute dtype, before they are cast to their own")
    spec.refuse("summed_by", "gradients would be added up in the compute dtype; cast them first")
    spec.refuse("unscaled_by", "gradients would be unscaled in the compute dtype, where small ones vanish")
    return spec.after("cast_by").after("split_by") if split else spec.after("cast_by")


Dtype = torch.dtype | None | Mapping[str, torch.dtype | None]
StoredDtype = torch.dtype | str | None | Mapping[str, torch.dtype | str | None]


@transform
def precision(
    param_dtype: Dtype = None,
    store_dtype: StoredDtype = None,
    grad_dtype: Dtype = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    labels: Any = None,
    buffer_dtype: Dtype = None,
    rounding: str = "nearest",
    seed: int = 0,
) -> Transform:
    """Choose dtypes. The names are those of FSDP2's `MixedPrecisionPolicy`; `None` leaves a dtype as it is.

    `precision(store_dtype=torch.float32, param_dtype=torch.bfloat16)` keeps fp32 master weights and computes in bf16.
    `precision(store_dtype=torch.bfloat16, rounding="stochastic")` keeps bf16 parameters only, and on average loses no
    small updates. An attached model also casts its floating-point *inputs*, as FSDP2 does. In the pure route cast the
    inputs yourself.

    `param_dtype`, `store_dtype` and `grad_dtype` may be dicts from label to dtype, for the leaves that `labels` names
    (docs/precision.md). If parameters then have several compute dtypes, zerofn does not cast inputs: the model must
    cast, `x.to(self.weight.dtype)`.

    Args:
        param_dtype: dtype in which the model computes with parameters.
        store_dtype: dtype in which the state stores parameters. `"bf16+8"` stores each parameter in bf16 and 8 more
            bits of it in the optimizer's state. Any optimizer then updates masters of 24 bits, in fp32
            (docs/precision.md).
        grad_dtype: dtype of the gradients that optimizers and other transforms get. By default it is the stored dtype,
            but fp32 instead of fp16, because many gradients are below the smallest fp16 number. With fp32 on bf16
            parameters the gradients of several backwards are summed in fp32.
        reduce_dtype: dtype of sums over ranks; by default `param_dtype`, and fp32 if that is fp16. With fp16 and
            without `scale_loss`, `zf.attach` and `zf.init` warn on several ranks: a sum over 65504 is infinite.
        output_dtype: dtype of the model's floating-point outputs. The outputs are then copies. So if the model returns
            `y, h` and computes `y` from `h`, a hook on `h`, `h.retain_grad()` and `torch.autograd.grad(y, h)` raise in
            a backward from `y`. If your own code casts outside of the model, `y.float()`, none of the three raises.
        labels: a function `path -> label`, or a tree of labels that may stop above the leaves; labels are hashable.
        buffer_dtype: dtype of the floating-point buffers of an attached model. `opt.detach()` restores the old dtype,
            with all bits of elements that have not changed; until then both copies are in memory. Complex and integer
            buffers stay. May be a dict by label, if `labels` is a function; it is called with names of buffers too.
            Running statistics in bf16 do not change if a change is smaller than 2 ** -9 of their value.
        rounding: how an optimizer's results are rounded where they are stored in 16 bits: `"nearest"`, or
            `"stochastic"`, up or down with the probabilities that make the mean right. This is for parameters, and for
            the tensors of an optimizer's state that are stored in the parameter's dtype. Arithmetic is in fp32, also
            that of a `leafwise` function, which gets fp32 tensors. Random bits depend on seed, update, path and global
            element index, not on sharding, buckets or resuming. Derivatives pass through a rounding as through the
            identity.
        seed: of the stochastic rounding, an int of 64 bits.

    Raises:
        TypeError: a buffer's label cannot be hashed.
        ValueError: a dtype is not a floating-point one of 16 to 64 bits; `labels` without a dict of dtypes, or the
            reverse; when a state is made, a leaf or buffer whose label has no dtype, a label that no leaf has, or
            `buffer_dtype` in `zf.init`, since a tree of parameters has no buffers; an unknown `rounding`, a `seed`
            without it; stochastic rounding where no parameter is stored in 16 bits, or of an optimizer that rounds its
            results itself.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.ones(1)})
        >>> out, pullback = zf.vjp(lambda p: p["w"] * 3, tx, state)
        >>> out.dtype, pullback(torch.ones(1, dtype=torch.bfloat16))[0]
        (torch.bfloat16, {'w': tensor([3.])})
        >>> by_label = {"head": torch.float32, "rest": torch.bfloat16}
        >>> tx = zf.chain(zf.precision(by_label, labels=lambda path: "head" if "head" in path else "rest"), zf.sgd(1.0))
        >>> state = zf.init(tx, {"head": torch.ones(1), "w": torch.ones(1)})
        >>> zf.bind(lambda p: (p["head"].dtype, p["w"].dtype), tx, state)(state.params)
        (torch.float32, torch.bfloat16)
    """
    given: dict[str, Any] = {"param_dtype": param_dtype, "store_dtype": store_dtype, "grad_dtype": grad_dtype}
    several = {name: x for name, x in given.items() if isinstance(x, Mapping)}
    _check_given({**given, "buffer_dtype": buffer_dtype}, labels)
    check_dtype("precision", "reduce_dtype", reduce_dtype, FLOATS)
    check_dtype("precision", "output_dtype", output_dtype, FLOATS)
    buffers = None if buffer_dtype is None else partial(_of_buffers, buffer_dtype, labels)
    one = _fields({**given, **dict.fromkeys(several)})
    dtypes = Dtypes(**one, reduce_dtype=reduce_dtype, output_dtype=output_dtype, buffers=buffers)
    _check_rounding(rounding, seed, store_dtype)
    view = partial(_view, dtypes, several, labels, seed if rounding == "stochastic" else None)
    split = SPLIT in (store_dtype.values() if isinstance(store_dtype, Mapping) else (store_dtype,))
    return Transform("precision", needs="element", view_fn=view, through=partial(_through, split))


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as fields of `Dtypes`."""
    if given.get("store_dtype") == SPLIT:
        return {**given, "store_dtype": torch.bfloat16, "residual": True}
    return dict(given)


def _check_rounding(rounding: Any, seed: Any, store_dtype: Any) -> None:
    if rounding == "kahan":
        why = "Kahan's sum keeps a second tensor for each parameter, which an optimizer must know"
        right = 'zf.low_precision_adam(lr, rounding="kahan"); precision(rounding="stochastic"), or store_dtype="bf16+8"'
        raise ValueError(explain("precision(rounding='kahan')", why, f"{right}, for any optimizer"))
    if rounding not in ROUNDINGS:
        why = f"rounding is {' or '.join(map(repr, ROUNDINGS))}"
        raise ValueError(explain(f"precision(rounding={rounding!r})", why, 'rounding="stochastic"'))
    check_seed("precision", seed)
    if rounding == "nearest":
        if seed != 0:
            why, right = "rounding to nearest draws nothing", f'precision(..., rounding="stochastic", seed={seed})'
            raise ValueError(explain(f"precision(seed={seed}) without rounding=", why, right))
        return
    given = store_dtype.values() if isinstance(store_dtype, Mapping) else (store_dtype,)
    if not any([dtype is None or dtype in SHORT for dtype in given]):
        raise ValueError(explain(f'precision(store_dtype={store_dtype}, rounding="stochastic")', *_NOTHING))


_NOTHING = (
    "parameters are not stored in 16 bits, so there is nothing to round at random",
    'precision(store_dtype=torch.bfloat16, rounding="stochastic"), or no rounding=',
)


def _check_something_to_round(dtypes: Dtypes, layout: Layout) -> None:
    stored = {leaf.path: dtypes.stored(leaf) for leaf in layout.leaves}
    if stored and not any([dtype in SHORT for dtype in stored.values()]):
        rows = [(path, f"stored in {dtype}") for path, dtype in stored.items()]
        raise ValueError(bad_leaves('precision(rounding="stochastic") has nothing to round', rows, _NOTHING[1]))


def _view(
    dtypes: Dtypes,
    several: Mapping[str, Mapping[str, Any]],
    labels: Any,
    seed: int | None,
    layout: Layout,
    ranks: Ranks,
) -> View:
    """The cast of each leaf to its dtypes; `several` has the arguments that are dicts by label."""
    if several:
        of = labels_by_path(labels, layout, {label for x in several.values() for label in x})
        _check_labels(several, of)
        own = {
            label: replace(dtypes, **_fields({name: x[label] for name, x in several.items()}))
            for label in set(of.values())
        }
        dtypes = replace(dtypes, by_path={path: own[label] for path, label in of.items()})
    if seed is not None:
        _check_something_to_round(dtypes, layout)
    return _cast(dtypes, frozenset([leaf.path for leaf in layout.complexes]), seed)


def _check_given(given: Mapping[str, Dtype], labels: Any) -> None:
    several = [name for name, x in given.items() if isinstance(x, Mapping)]
    right = 'precision(param_dtype={"head": torch.float32, "rest": torch.bfloat16}, labels=lambda path: ...)'
    if bool(several) != (labels is not None):
        why = "a dict of dtypes needs labels= to know which leaf has which" if several else "no dtype is given by label"
        raise ValueError(explain(f"precision({', '.join(several) or 'labels'}=...)", why, right))
    if "buffer_dtype" in several and not callable(labels):
        why = "labels is a tree over parameters, which does not contain buffers; a function is asked for both"
        raise ValueError(explain("precision(buffer_dtype={...}, labels=...)", why, right.replace("param", "buffer")))
    for name, x in given.items():
        for dtype in x.values() if isinstance(x, Mapping) else (x,):
            check_dtype("precision", name, dtype, (*FLOATS, SPLIT) if name == "store_dtype" else FLOATS)


def _of_buffers(given: Any, labels: Any, names: Sequence[str]) -> dict[str, torch.dtype | None]:
    """The dtype to cast each buffer of a model to, by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    of = {name: labels(name) for name in names}
    if wrong := [(name, f"{x!r} cannot be a key of a dict") for name, x in of.items() if not isinstance(x, Hashable)]:
        raise TypeError(bad_leaves("wrong labels of buffers", wrong, "a function path -> label"))
    _check_labels({"buffer_dtype": given}, of, "buffer")
    return {name: given[label] for name, label in of.items()}


def _check_labels(several: Mapping[str, Mapping[str, Any]], of: Mapping[str, Any], what: str = "leaf") -> None:
    """Refuse a leaf (or buffer) whose label has no dtype, and a label that no leaf has: one of the two is misspelt."""
    known = {label for x in several.values() for label in x}
    wrong = [
        (path, f"label {label!r} is not in {name}")
        for path, label in of.items()
        for name, x in several.items()
        if label not in x
    ]
    if wrong:
        right = f"one of {_listed(known)}; None leaves a dtype as it is"
        raise ValueError(bad_leaves("precision: labels without a dtype", wrong, right))
    if idle := known - set(of.values()):
        call = f"precision(..., labels=...) with {_listed(idle)} among the labels"
        given = _listed(of.values()) or "none"
        many = "leaves" if what == "leaf" else "buffers"
        raise ValueError(explain(call, f"no {what} has it; {many} have {given}", f"labels that {many} have"))


def _listed(labels: Iterable[Any]) -> str:
    return ", ".join(sorted(set(map(repr, labels))))
