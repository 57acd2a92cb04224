"""`quantize`: the state of a transform as codes of 8 or 4 bits, with one scale for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import (
    AVERAGE,
    Coded,
    Codes,
    Context,
    Draws,
    Entry,
    Layout,
    Leaves,
    Prepared,
    Scope,
    State,
    Transform,
    TransformState,
    UpdateOfStored,
    as_transform,
    chain,
    check_count,
    check_seed,
    counter,
    entries,
    leaf_key,
    no_state,
    no_view,
    of_members,
    rebuild,
    stored_fn_of,
    transform,
    without_derivative,
)
from .precision import RESIDUAL, masters_from

CODES, SCALES = "codes", "scales"
COUNT_OF_ROUNDINGS = "quantize_count"
ROUNDINGS = ("stochastic", "nearest")
MAPS = ("companded", "linear", "dynamic")


@transform
def quantize(
    transform: Transform,
    bits: int = 8,
    block: int = 128,
    code: str = "companded",
    rounding: str = "stochastic",
    slots: Sequence[str] | None = None,
    seed: int = 0,
) -> Transform:
    """Keep a transform's state as codes of 8 or 4 bits, with one scale for each block of a row.

    Before an update of some leaves zerofn decodes their states, and after the update it encodes the new states. The
    arithmetic of the transform does not change. At most one bucket of leaves has its state decoded at a time. A tensor
    of the state is kept as codes if it has the shape of its leaf and codes take fewer bytes. AdamW's two moments take
    2.06 bytes for each parameter with 8 bits and 1.06 bytes with 4 bits, instead of 8 bytes. The states of biases and
    gains are not coded, since a row of them is one number. Counters and averages of parameters are not coded.

    Blocks are cut from rows, and a shard has whole rows (`needs="row"`). Random bits depend on seed, entry, path,
    update and global element index. So equal gradients give equal codes, bit for bit, at every ZeRO stage, on any
    number of ranks and after a resume. There are two exceptions. A norm over ranks, as in `clip_by_global_norm`, has
    another last bit. And `adam` and `adamw` run torch's kernel, which rounds the last elements of a shard in another
    way, fewer than 16 in fp32: a scale or a code of their blocks may differ.

    Args:
        transform: an optimizer, an `accumulate`, another transform with a state, or a chain or `partition` of these.
            Each of them has tensors to store as codes: a member whose state is counters alone is refused.
        bits: the bits of a code, 8 or 4.
        block: how many numbers of a row share a scale.
        code: which numbers the codes stand for. `"companded"`: small numbers get more codes than large ones; blocks
            without a negative number, as those of second moments, get codes by the square root (FlashOptim, 2026).
            `"linear"`: evenly spaced numbers. `"dynamic"`: the numbers of bitsandbytes and torchao (Dettmers et al.,
            2022), which reach from the scale down over six powers of ten, or with 4 bits over two. As in the paper,
            the most negative number is -0.993 times the scale, or with 4 bits -0.888 times the scale.
        rounding: `"stochastic"`: up or down at random, right on average; or `"nearest"`. To the nearest code, a change
            of a second moment by a thousandth in a step is rounded away.
        slots: names of the entries of the state to keep as codes; by default all. For `schedule_free_adamw` choose
            `("exp_avg_sq",)`, since another of its entries is an iterate of the parameters.
        seed: the seed of the stochastic rounding, an int of 64 bits.

    Raises:
        ValueError: an argument is out of range; or `transform` has a view, or no state; or (when the state is made) the
            state has no entry that codes would make smaller, or no entry of a name in `slots`.
        RuntimeError: a step is differentiated: codes have no derivative.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.quantize(zf.adamw(lr=0.1)))
        >>> state = zf.init(tx, {"w": torch.zeros(256, 512)})
        >>> moment = state.transforms["adamw"]["exp_avg"]["w"]
        >>> {name: (x.dtype, tuple(x.shape)) for name, x in moment.items()}
        {'codes': (torch.uint8, (256, 512)), 'scales': (torch.float32, (256, 4))}

    Notes:
        A block with an infinity or a NaN is NaN as a whole.
    """
    inner = as_transform(transform)
    _check_arguments(inner, bits, block, code, rounding, slots, seed)
    again: Callable[[Transform], Transform] = lambda one: quantize(one, bits, block, code, rounding, slots, seed)  # noqa: E731
    if inner.in_turn:
        return chain(*[part if part.init_fn is no_state else again(part) for part in inner.parts])
    if inner.members_fn is not None:
        return of_members(inner, lambda one: one if one.init_fn is no_state else again(one))
    narrow = _Narrow(inner, Codes(bits, block, code), rounding == "stochastic", slots, seed)
    # The 0-d tensors of a transform that needs only elements are counts, which are equal on all ranks.
    even = inner.facts.even_numbers or inner.needs in ("element", "number")
    fixed = (*inner.facts.fixed, COUNT_OF_ROUNDINGS)
    facts = replace(
        inner.facts, even_numbers=even, fixed=fixed, copies=True, capturable=False, counterpart=None, torch_names=()
    )
    return replace(
        inner,
        needs=inner.needs if inner.needs in ("leaf", "tree") else "row",
        facts=facts,
        init_fn=narrow.init,
        prepare_fn=narrow.prepare,
        update_fn=UpdateOfStored(narrow.update, narrow.on_stored),
        parts=(inner,),
    )


@dataclass(frozen=True)
class _Narrow:
    """The functions of `quantize`, and its arguments."""

    inner: Transform
    codes: Codes
    stochastic: bool
    slots: Sequence[str] | None
    seed: int

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        state = self.inner.init_fn(leaves, layout)
        fit: set[str] = set()
        done: set[str] = set()

        def coded(x: Tensor, keys: tuple[str, ...], path: str | None) -> Any:
            if path is None or keys[0] == AVERAGE or not x.is_floating_point() or x.shape != leaves[path].shape:
                return x
            fit.add(keys[0])
            chosen = self.slots is None or keys[0] in self.slots
            if not chosen or not self.codes.shrinks(x):
                return x
            done.add(keys[0])
            return _entry(*self.codes.encode(x))

        made = {slot: _over(coded, x, leaves, (slot,)) for slot, x in state.items()}
        # It is an error if nothing is coded, unless the rows of all leaves are too short for it.
        idle = not fit or (not done and any(map(self.codes.shrinks, leaves.values())))
        missing = set(self.slots or ()) - fit
        if leaves and (missing or idle):
            raise ValueError(_nothing_to_code(self.inner.name, missing, fit))
        counts = {COUNT_OF_ROUNDINGS: {path: counter() for path in leaves}} if self.stochastic else {}
        return {**made, **counts}

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        # A transform that looks at the whole tree may read the state of leaves, so that is decoded for it.
        looks = self.inner.scope is not Scope.LEAF
        return self.inner.prepare_fn(self._decoded(state, ctx) if looks else state, grads, params, ctx)

    def update(self, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        values = *grads.values(), *params.values(), *ctx.numbers.values(), self.inner.facts.rate
        without_derivative(values, _no_derivative(self.inner.name))
        counts = {path: x + 1 for path, x in state.get(COUNT_OF_ROUNDINGS, {}).items()}
        out, new = self._in_codes(grads, state, params, carry, counts, ctx)
        if len(out) < len(grads) or not grads:
            rest = {path: g for path, g in grads.items() if path not in out}
            found, own = self._in_numbers(rest, state, params, carry, counts, ctx)
            # Leaves of both ways are put in the order of the gradients.
            out = found if not out else {path: out[path] if path in out else found[path] for path in grads}
            new = own if not new else {slot: {**x, **new[slot]} if slot in new else x for slot, x in own.items()}
        return out, new

    def on_stored(self, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        """As `update`, of leaves that a kernel takes whose parameters are each a `Master`."""
        counts = {path: x + 1 for path, x in state.get(COUNT_OF_ROUNDINGS, {}).items()}
        return self._in_codes(grads, state, params, carry, counts, ctx)

    def _in_codes(self, grads: Leaves, state: TransformState, params: Leaves, carry: Any, counts: Leaves, ctx: Context):
        """The update of leaves that a kernel takes as codes, without their numbers in memory."""
        update_stored = stored_fn_of(self.inner.update_fn)
        if update_stored is None:
            return {}, {}

        def coded(x: dict[str, Tensor], keys: tuple[str, ...], path: str) -> Coded:
            return Coded(self.codes, x[CODES], x[SCALES], self._draws(keys, path, counts, ctx))

        out, new = update_stored(grads, _unpacked(coded, state, params), params, carry, ctx)
        plain = {
            slot: {path: _entry(y.codes, y.scales) if type(y) is Coded else y for path, y in x.items()}
            for slot, x in new.items()
        }
        if self.stochastic and out:
            rounded = {path for x in new.values() for path, y in x.items() if type(y) is Coded}
            plain[COUNT_OF_ROUNDINGS] = {path: counts[path] for path in out if path in rounded}
        return out, plain

    def _in_numbers(
        self, grads: Leaves, state: TransformState, params: Leaves, carry: Any, counts: Leaves, ctx: Context
    ):
        """The update of numbers, which become codes again."""
        every = len(grads) == len(params) or stored_fn_of(self.inner.update_fn) is None
        out, new = self.inner.update_fn(grads, self._decoded(state, ctx, None if every else grads), params, carry, ctx)
        found: list[tuple[Tensor, tuple[str, ...], str, dict[str, Tensor]]] = []

        def listed(x: Tensor, keys: tuple[str, ...], path: str | None) -> Any:
            old: Any = state
            for key in keys:
                old = old[key]
            if path is None or not isinstance(old, dict):
                return x
            found.append((x, keys, path, old))
            return len(found) - 1

        new = {slot: _over(listed, x, params, (slot,)) for slot, x in new.items()}
        draws = [self._draws(keys, path, counts, ctx) for _, keys, path, _ in found]
        made = self.codes.encode_each([x for x, *_ in found], draws)
        olds = {f"{i}/{name}": x for i, (*_, old) in enumerate(found) for name, x in old.items()}
        news = {f"{i}/{name}": x for i, pair in enumerate(made) for name, x in _entry(*pair).items()}
        kept = ctx.into_each(olds, news)

        def coded(x: Any, keys: tuple[str, ...], path: str | None) -> Any:
            return _entry(kept[f"{x}/{CODES}"], kept[f"{x}/{SCALES}"]) if type(x) is int else x

        new = {slot: _over(coded, x, params, (slot,)) for slot, x in new.items()}
        rounded = {COUNT_OF_ROUNDINGS: {path: counts[path] for _, _, path, _ in found}} if self.stochastic else {}
        return out, {**new, **rounded}

    def _draws(self, keys: tuple[str, ...], path: str, counts: Leaves, ctx: Context) -> Draws | None:
        """The random bits for an entry of a state."""
        if not self.stochastic:
            return None
        return Draws(self.seed, counts[path], leaf_key("/".join(keys)), ctx.offsets.get(path, 0))

    def _decoded(self, state: TransformState, ctx: Context, only: Leaves | None = None) -> TransformState:
        """The state with codes decoded to numbers; with `only`, the entries of these leaves alone."""
        shapes = {leaf.path: leaf.shape for leaf in ctx.layout.leaves}

        pairs: list[tuple[dict[str, Tensor], str]] = []

        def listed(x: dict[str, Tensor], keys: tuple[str, ...], path: str) -> Any:
            if only is None or path in only:
                pairs.append((x, path))
            return x

        def numbers(x: dict[str, Tensor], keys: tuple[str, ...], path: str) -> Any:
            return next(found) if only is None or path in only else x

        _unpacked(listed, state, shapes)
        columns = [x[CODES] for x, _ in pairs], [x[SCALES] for x, _ in pairs]
        # The number of rows comes from the scales, since a rank may have only some rows of a leaf.
        found = iter(self.codes.decode_each(*columns, [(len(x[SCALES]), *shapes[path][1:]) for x, path in pairs]))
        return _unpacked(numbers, state, shapes)


def quantize_state(tx: Transform, state: State, like: State) -> State:
    """Convert the state of a chain without `quantize` to a state of the chain `tx` with `quantize`, to go on with fewer
    bits.

    Tensors are rounded to the nearest code, and fp32 parameters to the 24 bits of `precision(store_dtype="bf16+8")`, if
    `tx` has it. All other entries are those of `state`.

    Args:
        tx: the chain with `quantize`; the transforms have the names that they have in `state`.
        state: the state of the chain without `quantize`, on the same number of ranks, for example from `zf.load`.
        like: a state of `tx`, such as `zf.init(tx, params)`.

    Raises:
        ValueError: an entry is missing in `state`, or has another shape.

    Examples:
        >>> import torch, zerofn as zf
        >>> params = {"w": torch.ones(2, 8)}
        >>> state, _ = zf.update(zf.adamw(0.1), params, zf.init(zf.adamw(0.1), params))
        >>> tx = zf.quantize(zf.adamw(0.1))
        >>> state = zf.quantize_state(tx, state, like=zf.init(tx, params))
        >>> state.transforms["adamw"]["exp_avg"]["w"]["codes"].unique(), int(state.step)
        (tensor([255], dtype=torch.uint8), 1)
    """
    old = {(e.owner, e.slot, e.path, e.below): e for e in entries(state)}
    new, shapes = entries(like), {leaf.path: leaf.shape for leaf in like.layout.leaves}
    scales = {(e.owner, e.slot, e.path, e.below): e for e in new if _last(e.below) == SCALES}
    how = {name: x for part in tx.members for name, x in _codes_in(part, part.name, like.layout)}
    coded: dict[Any, dict[str, Tensor]] = {}
    wrong: list[tuple[str, str]] = []

    def taken(e: Entry) -> Any:
        if e.elsewhere:
            return e.value
        above, name = e.below.removesuffix(_last(e.below)), _last(e.below)
        place = e.owner, e.slot, e.path, above.removesuffix("/")
        pair = scales.get((e.owner, e.slot, e.path, above + SCALES)) if name in (CODES, SCALES) else None
        found = old.get(place if pair is not None else (e.owner, e.slot, e.path, e.below))
        if found is None:
            if e.slot.split("/")[-1] not in (COUNT_OF_ROUNDINGS, RESIDUAL):
                wrong.append((e.key, "is not in the state"))
            return e.value
        row = shapes[e.path][1:].numel() if pair is not None else 0
        shape = e.value.shape if pair is None else (pair.value.shape[0], row)
        if found.value.shape != shape and (pair is None or found.value.numel() != shape[0] * row):
            wrong.append((e.key, f"of shape {tuple(found.value.shape)} instead of {tuple(shape)}"))
            return e.value
        if pair is None:
            return found.value.to(e.value.dtype)
        if place not in coded:
            codes = next(x for name, x in how.items() if f"{e.owner}/{e.slot}".startswith(name))
            coded[place] = _entry(*codes.encode(found.value.to(pair.value.dtype).reshape(shape)))
        return coded[place][name].reshape(e.value.shape)

    made = rebuild(like, taken)
    if wrong:
        right = "a state of the same chain without quantize, and zf.init(tx, params) of the same parameters"
        raise ValueError(bad_leaves("quantize_state: two states that do not belong together", wrong, right))
    return masters_from(state, made)


def _last(below: str) -> str:
    return below.rpartition("/")[2]


def _codes_in(t: Transform, name: str, layout: Layout) -> Iterator[tuple[str, Codes]]:
    """The codes of each `quantize` in a transform, by the prefix of the names of its entries."""
    if t.factory is quantize and not t.in_turn and t.members_fn is None:
        yield f"{name}/", Codes(t.config["bits"], t.config["block"], t.config["code"])
    elif t.members_fn is not None:
        for key, (member, _) in t.members_by_key(layout).items():
            yield from _codes_in(member, f"{name}/{key}", layout)
    else:
        for part in t.parts:
            yield from _codes_in(part, f"{name}/{part.name}" if t.in_turn else name, layout)


def _entry(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {CODES: codes, SCALES: scales}


def _over(fn: Callable[..., Any], x: Any, paths: Any, keys: tuple[str, ...], path: str | None = None) -> Any:
    """`fn(tensor, keys, path)` over an entry of a state; `path` is that of its leaf, or `None`."""
    if not isinstance(x, dict):
        return fn(x, keys, path)
    return {key: _over(fn, y, paths, (*keys, key), path or (key if key in paths else None)) for key, y in x.items()}


def _unpacked(fn: Callable[..., Any], state: TransformState, paths: Any) -> TransformState:
    """A state with `fn(entry, keys, path)` in the place of each pair of codes and scales."""
    return {slot: _unpack(fn, x, paths, (slot,), None) for slot, x in state.items() if slot != COUNT_OF_ROUNDINGS}


def _unpack(fn: Callable[..., Any], x: Any, paths: Any, keys: tuple[str, ...], path: str | None) -> Any:
    # This function is at the top of the module: a nested function that calls itself forms a cycle, which would keep
    # `paths` and its tensors in memory until a garbage collection.
    if not isinstance(x, dict):
        return x
    if path is not None and x.keys() == {CODES, SCALES} and x[CODES].dtype == torch.uint8:
        return fn(x, keys, path)
    return {key: _unpack(fn, y, paths, (*keys, key), path or (key if key in paths else None)) for key, y in x.items()}


def _check_arguments(
    inner: Transform, bits: int, block: int, code: str, rounding: str, slots: Sequence[str] | None, seed: int
) -> None:
    call = f"quantize({inner.name}(...)"
    if type(bits) is not int or bits not in (8, 4):
        raise ValueError(explain(f"{call}, bits={bits!r})", "a code has 8 or 4 bits", f"{call}, bits=8)"))
    check_count("quantize", "block", block, "numbers")
    for name, given, known in (("code", code, MAPS), ("rounding", rounding, ROUNDINGS)):
        if given not in known:
            why = f"{name} is one of {', '.join(map(repr, known))}"
            raise ValueError(explain(f"{call}, {name}={given!r})", why, f"{call}, {name}={known[0]!r})"))
    if isinstance(slots, str):
        why = "slots are names, and this is one str"
        raise ValueError(explain(f"{call}, slots={slots!r})", why, f"{call}, slots=({slots!r},))"))
    check_seed("quantize", seed)
    if inner.view_fn is not no_view and not inner.in_turn:
        why = f"{inner.name} changes what the model sees; quantize takes optimizers and transforms of gradients"
        raise ValueError(explain(f"{call})", why, f"chain({inner.name}(...), quantize(adamw(...)))"))
    if inner.init_fn is no_state:
        raise ValueError(explain(f"{call})", f"{inner.name} has no state", f"{inner.name}(...)"))
    inside = [inner]
    for one in inside:
        if one.factory is quantize and not one.in_turn and one.members_fn is None:
            why = "its state would be coded twice"
            raise ValueError(explain(f"{call}) of a quantize", why, f"quantize({one.name}(...)) once"))
        inside += one.parts


def _nothing_to_code(name: str, missing: set[str], fit: set[str]) -> str:
    if not missing:
        why = "none of its entries is a float tensor of its leaf's shape (an average of parameters is not coded)"
        return explain(f"quantize({name}(...))", why, f"{name}(...); or quantize(adamw(...)), which has two moments")
    why = f"it has no float tensor of its leaf's shape by this name: {', '.join(sorted(missing))}"
    return explain(f"quantize({name}(...), slots=...)", why, f"some of {', '.join(map(repr, fit)) or 'none'}")


def _no_derivative(name: str) -> str:
    why = "its state is codes, which have no derivative, so the next step would not depend on this one"
    right = f"{name}(...) in a step that is differentiated; or torch.no_grad() around this one"
    return explain(f"a derivative through quantize({name}(...))", why, right)
