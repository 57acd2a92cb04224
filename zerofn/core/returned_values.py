"""Checks and copies what a user's transform returns: shapes, dtypes, and tensors that alias memory written later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._compat.functorch import is_wrapped
from .._compat.tensors import is_shape_only, memories, self_overlapping
from .._errors import bad_leaves, explain, kind_of
from .context import Context, Prepared
from .facts import Facts
from .layout import Layout, Leaves
from .number_graphs import unrecorded
from .tree import Numbers, Tree, apart, check_form, clone, flatten, moved, objects, tensors_of, tree_keys, unflatten

# ----------------------------------------------------------------------------------------------------------------------
# These functions copy the tensors that a transform returns, if they share memory with something that is written later.
#
# A gradient belongs to its caller, who may write into it or add the next one to it. Parameters and states are written
# in place, one after the other, by a step or when another state is loaded.
#
# In the first steps of a transform the addresses of storages are compared (`memories`), and in later steps too once
# something had to be copied. Otherwise later steps compare tensors as objects (`objects`), which does not see views.


def own_start(given: list[Tree]) -> Tree:
    """Copy a first state: a tensor of it may be a parameter, or be shared by two leaves or by all states of a factory.

    Each copy replaces its original in a list, which frees an original that nobody else has. So two whole states never
    exist at once.

    Args:
        given: a list with the state, which is popped: as a plain argument the caller's frame would keep it.
    """
    values, spec = flatten(given.pop())
    for i, x in enumerate(values):
        if isinstance(x, Tensor):
            values[i] = x.clone()
    return unflatten(spec, values)


def own_prepared(
    prepared: Prepared,
    state: Mapping[str, Any],
    grads: Leaves | None,
    params: Leaves,
    ctx: Context,
    numbers: Numbers = memories,
) -> Prepared:
    """The result of a `prepare_fn`, with copies of tensors that share memory.

    Args:
        prepared: the result.
        state: its argument, as are `grads`, `params` and `ctx`.
        numbers: how to find equal tensors, `memories` or `objects`.
    """
    carry, new = prepared.carry, prepared.state
    if carry is not None and (ctx.donate or ctx.donate_to_kernels):
        # Earlier leaves are written before later ones read the carry, so it must not share memory with parameters.
        carry = apart({"": carry}, params.values(), numbers)[""]
    if new:
        given = dict(new)
        found = _distinct(given, state, (*(grads or {}).values(), *params.values()), numbers)
        new = new if found is given else found
    emit = prepared.emit
    if isinstance(emit, Tensor) and not ctx.recorded:
        # A step that is not recorded can read `emit`. If it is false, later transforms do not run and write nothing.
        emit = bool(emit.item())
    if carry is prepared.carry and new is prepared.state and emit is prepared.emit:
        return prepared
    return replace(prepared, carry=carry, state=new, emit=emit)


def own_update(
    optimizes: bool,
    returned: tuple[Leaves | None, Any],
    state: Any,
    grads: Leaves,
    params: Leaves,
    carry: Any = None,
    numbers: Numbers = memories,
) -> tuple[Leaves | None, Any]:
    """The results of an update half, with copies of tensors that share memory.

    Args:
        optimizes: whether updates are new parameters.
        returned: updates, `None` where it holds, and a state.
        state: its argument; no two tensors of it share memory.
        grads: its argument.
        params: stored parameters of these leaves.
        carry: its argument, which other leaves may use too.
        numbers: how to find equal tensors, `memories` or `objects`.
    """
    out, own = returned
    others = (*grads.values(), *params.values(), *(() if carry is None else tensors_of({"": carry})))
    if out and optimizes:
        # An update may return a parameter itself, unchanged or written in place.
        out = _distinct(out, params, (*others, *tensors_of(state)), numbers)
    elif out and out is not grads:
        # The parameter of another leaf is written before a later transform reads it as this leaf's update.
        moved = {path: x for path, x in out.items() if x is not params.get(path)}
        if moved and (found := apart(moved, params.values(), numbers)) is not moved:
            out = {**out, **found}
    if own is state or not own:
        return out, own
    made = out.values() if optimizes and out else ()
    return out, _distinct(own, state, (*others, *made), numbers)


def _distinct(new: Mapping[str, Any], old: Mapping[str, Any], others: Iterable[Tensor], numbers: Numbers) -> Any:
    """New entries of a state, with copies of tensors that share memory with `others`, or with one another.

    A tensor that `old` has at the same place is not copied. An expanded tensor, whose elements share memory, is.

    Args:
        new: nested dicts of tensors or trees of them.
        old: the entries that they replace, and those that stay beside them.
        others: tensors that are written later, or by others.
        numbers: how to find equal tensors, `memories` or `objects`.
    """
    if torch.compiler.is_compiling():
        # Addresses cannot be compared while tracing. A compiler that generates code removes copies without a use.
        return clone(new)
    given = tensors_of(new)
    if not given:
        return new
    fresh, beside = tensors_of(moved(new, old)), _beside(new, old)
    every, taken = numbers([*given, *beside]), numbers(others)
    # Usually each tensor has a storage of its own. These sets find that without a call in Python for each tensor.
    alone = len(every) == len(given) + len(beside) and taken.isdisjoint(numbers(fresh))
    if alone and (numbers is not memories or not any(map(_overlaps, fresh))):
        return new
    was = dict(zip(tree_keys(old), flatten(old)[0], strict=True))
    values, spec = flatten(new)
    stays = [not isinstance(x, Tensor) or x is was.get(keys) for keys, x in zip(tree_keys(new), values, strict=True)]
    at_home = [x for x, stay in zip(values, stays, strict=True) if stay and isinstance(x, Tensor)]
    used = taken | numbers([*beside, *at_home])
    for i, x in enumerate(values):
        if not stays[i]:
            values[i] = x.clone() if _overlaps(x) or not used.isdisjoint(numbers([x])) else x
            used |= numbers([values[i]])
    return unflatten(spec, values)


def _beside(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of `old` in whose places there is nothing new."""
    found = tensors_of({key: x for key, x in old.items() if key not in new})
    for key, x in new.items():
        if isinstance(x, dict) and isinstance(was := old.get(key), dict):
            found += _beside(x, was)
    return found


def _overlaps(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_contiguous() and self_overlapping(x)


# Steps of a transform, in each pipeline, that compare the addresses of what it returns.
COMPARED = 3


class Comparing:
    """Finds tensors that a transform returns and that are written later under another name.

    In its first steps it compares the addresses of their storages (`memories`), and goes on so as long as it finds any.
    Later it compares the objects alone.

    Args:
        budget: in how many calls, or for how many leaves, addresses are compared.
        left: how many of them are left.
    """

    def __init__(self, budget: float):
        self.budget = self.left = budget

    def numbers(self, ctx: Context, taken: int) -> Numbers:
        """`memories` or `objects`, for a call that takes so much of the budget. A graph always compares memories."""
        if ctx.recorded:
            return memories
        if self.left <= 0:
            return objects
        self.left -= taken
        return memories

    def copied(self) -> None:
        """Note that something had to be copied: comparing goes on with a full budget."""
        self.left = self.budget


# ----------------------------------------------------------------------------------------------------------------------
# These functions check what an update half returns: the leaves that it was given, real, in their shapes, on their
# device.
#
# Otherwise a gradient of shape (1,) would be broadcast over its leaf by whatever follows, a missing one would leave
# its leaf unchanged, and one without memory would do nothing, all without an error.


_SHAPE, _DTYPE, _DEVICE, _LAYOUT = map(attrgetter, ("shape", "dtype", "device", "layout"))
# `is_cpu` takes a quarter of the time of `device`, for which torch makes an object at each call.
_IS_CPU = attrgetter("is_cpu")
_RECORDED = attrgetter("requires_grad")

PAIR = "return {path: new for each path in grads}, state"
RECAST = "a new parameter in "
ANEW = "a leaf of autograd's own, such as nn.Parameter(new): no derivative of a step goes through it"
LEFT_OUT = "left out, so that its parameter would stay as it is"
NO_STATE = "return {path: new for each path in grads}, {}, if it keeps nothing"
TO_HOLD = "; return None, state, while it holds gradients"
TO_WATCH = "return grads, state: what a transform that watches is handed goes on as it is"
TO_LEAVE = "; zf.masked(transform, mask), or zf.partition({..., 'frozen': None}, labels), leaves leaves alone"


def check_returned(
    name: str, facts: Facts, returned: Any, grads: Leaves, params: Leaves, some: bool = False, held: Any = ()
) -> tuple[Leaves | None, Any]:
    """The results of an update half, updates and a state, if the updates fit the leaves that it got.

    Args:
        name: of the transform.
        facts: of the transform.
        returned: by its update half; `None` for the updates of one that holds gradients.
        grads: that it got.
        params: stored parameters of these leaves.
        some: whether it may leave out leaves, which are then not trained.
        held: the state that it got. It may return tensors of it, although these may be leaves of autograd.

    Raises:
        TypeError: no pair, no dict by path, or a state that is no dict.
        ValueError: a leaf is left out, or there is none of that path; its tensor is none, not real, of another shape or
            device, begins a graph of autograd anew, or a new parameter has another dtype or is sparse; every such leaf
            is named.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = f"{len(returned)} values" if isinstance(returned, tuple | list) else kind_of(returned)
        raise TypeError(explain(f"{name}: an update that returned {kind}", "it returns a pair", PAIR))
    out, state = returned
    # A transformation of another library may return any state, such as a tuple or None.
    if not isinstance(state, Mapping) and not facts.adds:
        wrong, why = (
            f"{name}: an update that returned {kind_of(state)} as its state",
            "a state is a dict of its entries",
        )
        raise TypeError(explain(wrong, why, NO_STATE))
    if out is grads or (out is None and facts.holds) or _all_fit(facts, out, grads, params):
        return out, state
    if not isinstance(out, Mapping):
        why = "updates are a dict by path, as gradients are"
        if out is None and not facts.adds and not facts.watches:
            why += "; None is for one that holds gradients, which says Facts(window=...)"
        right = TO_WATCH if facts.watches else PAIR
        raise TypeError(explain(f"{name}: an update that returned {kind_of(out)}, and a state", why, right))
    bad: dict[Any, str] = {}
    for path, x in out.items():
        g, p = grads.get(path), params.get(path)
        # A gradient that is returned unchanged fits, and so does a parameter that was written in place.
        reason = _misfit(facts, x, g, p) if (p is None or x is not p) and (g is None or x is not g) else None
        # No set of ids: a compiled step would be compiled again for each state.
        if reason is ANEW and any([x is y for y in (*tensors_of({"": held}), *params.values())]):
            reason = None
        if reason:
            bad[path] = reason
    if not some and len(out) != len(grads):
        bad.update({path: LEFT_OUT for path in grads if path not in out})
    if bad:
        rows = [(str(path), reason) for path, reason in bad.items()]
        right = _right(facts, rows)
        raise ValueError(bad_leaves(f"{name}: an update that does not fit its leaves", rows, right))
    return in_order(out, params), state


def in_order(out: Mapping[str, Tensor], params: Leaves) -> Leaves:
    """Updates in the order of the layout, since later transforms may pair lists by position."""
    return {path: out[path] for path in params if path in out}


class CheckedUpdate:
    """The update half of a transform, whose results are checked, and copied where they share memory.

    If the results of a half share no memory with other tensors, it is checked in its first steps only. After them
    `trusted` is true, and a step that is not recorded may run `update_fn` itself.

    Args:
        name: of the transform.
        facts: of it.
        update_fn: its update half.
        some: whether it may leave out leaves.
        keeps: whether what it returns may share memory with something else (`Facts.keeps`).
        budget: how many leaves it gets in its first steps. An update may be called for each leaf.

    Attributes:
        trusted: whether it is checked no more.
        by_programs: whether an update of all leaves left all to `Context.passes`, or would; `None` as long as that is
            not known.
    """

    def __init__(
        self,
        name: str,
        facts: Facts,
        update_fn: Callable[..., tuple[Any, Any]],
        some: bool,
        keeps: bool,
        budget: float,
    ):
        self.name, self.facts, self.update_fn, self.some, self.keeps = name, facts, update_fn, some, keeps
        self.comparing = Comparing(budget)
        self.trusted = False
        self.by_programs: bool | None = None

    def __call__(self, grads: Leaves, state: Any, params: Leaves, carry: Any, ctx: Context) -> tuple[Any, Any]:
        returned = self.update_fn(grads, state, params, carry, ctx)
        found = check_returned(self.name, self.facts, returned, grads, params, self.some, state)
        if ctx.looks and any([x.grad_fn is not None for x in tensors_of({"": found})]):
            raise unrecorded([f"{self.name}: what it has returned, made of a tensor from elsewhere"], ctx.unrecorded)
        numbers = self.comparing.numbers(ctx, len(grads))
        if numbers is memories and not torch.compiler.is_compiling():
            check_form(self.name, found[1], ctx.layout.every)
        if not self.keeps:
            if not ctx.recorded:
                self.trusted = self.comparing.left <= 0
            return found
        own = own_update(self.facts.optimizes, found, state, grads, params, carry, numbers)
        if own[0] is not found[0] or own[1] is not found[1]:
            self.comparing.copied()
        return own


def misfit(x: Tensor, like: Tensor, stored: Tensor, what: str = "leaf") -> str | None:
    """Why a tensor does not fit a stored leaf; `None` if it does.

    Args:
        x: the tensor.
        like: a tensor of the right shape.
        stored: the parameter.
        what: what `like` is, for the message.
    """
    if x.shape != like.shape:
        return f"a tensor of shape {tuple(x.shape)} for a {what} of shape {tuple(like.shape)}"
    if not x.is_floating_point():
        # A cast to the parameter's dtype would drop the imaginary part of a complex number.
        return f"a tensor of {x.dtype}; parameters and gradients are real"
    return f"a tensor on {x.device} for a leaf on {stored.device}" if x.device != stored.device else None


def _right(facts: Facts, rows: list[tuple[str, str]]) -> str:
    """The right code, for the message about an update with these faults."""
    reasons = [reason for _, reason in rows]
    recast = any([reason.startswith(RECAST) for reason in reasons])
    right = PAIR.replace("new", "new.to(params[path].dtype)") if recast else PAIR
    if LEFT_OUT not in reasons:
        return right
    if facts.watches:
        return TO_WATCH
    return right + (TO_HOLD if facts.holds else TO_LEAVE)


def _all_fit(facts: Facts, out: Any, grads: Leaves, params: Leaves) -> bool:
    """Whether updates fit and come in the order of gradients. This usual case is found by `map` over C functions."""
    if torch.compiler.is_compiling() or type(out) is not dict or list(out) != list(grads):
        return False
    new, like = out.values(), params if facts.optimizes else grads
    if list(like) != list(out):
        return False
    if all(map(is_, new, like.values())):
        return True
    try:
        if any(map(_RECORDED, new)) and any(map(_anew, new)):
            return False
        fits = all([list(map(of, new)) == list(map(of, like.values())) for of in (_SHAPE, _DEVICE)])
        if facts.optimizes or facts.watches:
            return fits and all([list(map(of, new)) == list(map(of, like.values())) for of in (_DTYPE, _LAYOUT)])
        return fits and all([dtype.is_floating_point for dtype in set(map(_DTYPE, new))])
    except AttributeError:
        return False


def _anew(x: Tensor) -> bool:
    """Whether a graph of autograd begins at it, so that it is cut off from what it was made of."""
    return x.requires_grad and x.is_leaf


def _misfit(facts: Facts, x: Any, g: Tensor | None, p: Tensor | None) -> str | None:
    """Why `x` is no update of a leaf, whose gradient may be missing, and its parameter where no leaf has that path."""
    if p is None:
        return "there is no parameter of that path"
    if not isinstance(x, Tensor):
        return f"{kind_of(x)} instead of a tensor"
    # Before a late reduction, sums have the shapes of whole leaves, and stored parameters those of shards.
    like, what = (g, "gradient") if g is not None else (x if facts.holds else p, "leaf")
    reason = misfit(x, like, p, what)
    if reason:
        return reason
    makes = facts.optimizes or facts.watches
    if makes and x.dtype != p.dtype:
        return f"{RECAST}{x.dtype}, which is stored in {p.dtype}"
    if makes and x.layout != p.layout:
        return f"a new parameter of layout {x.layout}, which is stored as {p.layout}"
    return ANEW if _anew(x) else None


# ----------------------------------------------------------------------------------------------------------------------
# These functions check gradients: structure and shapes of the parameters, dense, on their device and with memory.


READABLE = "dense gradients with data, of the parameters' shapes and where the parameters lie: g.to(p.device)"


def split_grads(layout: Layout, grads: Tree) -> Leaves:
    """Path to gradient. Gradients at tied places add up; `None` means no gradient for that leaf.

    Raises:
        ValueError: one tensor at several tied places, which may be a sum already (`p.grad` of a tied
            parameter) or two equal parts: nobody can tell, and one of the two would be doubled or halved.
    """
    what, right = "these are not gradients of this state", "gradients in the structure of the parameters"
    found: Leaves = {}
    owner: dict[tuple[int, int], str] = {}
    bad: list[tuple[str, str]] = []
    for i, place, g in layout.match(grads, what, right):
        path = layout.leaves[i].path
        if g is None:
            continue
        if (i, id(g)) in owner:
            bad.append((place, f"is the very tensor that stands at {owner[i, id(g)]}, and both are one parameter"))
        owner[i, id(g)] = place
        if path in found and isinstance(g, Tensor) and isinstance(found[path], Tensor):
            check_readable({place: g}, {place: found[path]})
            check_readable({path: found[path]}, {path: g})
        found[path] = found[path] + g if path in found else g
    if bad:
        right = "the whole gradient at one place and None at the others; zf.vjp and zf.bind give gradients that add up"
        raise ValueError(bad_leaves("one gradient at several places of a tied parameter", bad, right))
    # A tied parameter without a gradient at its first place would come out of order.
    tied = len(layout.places) > len(layout.leaves)
    return {x.path: found[x.path] for x in layout.leaves if x.path in found} if tied else found


def misshapen(g: Any, shape: Sequence[int]) -> str | None:
    """Why `g` is no gradient of a parameter of this shape, if it is none."""
    if not isinstance(g, Tensor):
        return f"{type(g).__name__} is no tensor"
    if g.layout != torch.strided:
        return f"a gradient of layout {g.layout}; make it dense: nn.Embedding(..., sparse=False), or g.to_dense()"
    if tuple(g.shape) != tuple(shape):
        return f"gradient of shape {tuple(g.shape)}, stored parameter of shape {tuple(shape)}"
    return None


def check_dense(grads: Leaves) -> None:
    """Refuse sparse gradients where they would be packed into a message."""
    bad = [(path, str(misshapen(g, g.shape))) for path, g in grads.items() if g.layout != torch.strided]
    if bad:
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, "dense gradients"))


def unreadable(g: Tensor, stored: Tensor) -> str | None:
    """Why no kernel could read `g` beside the stored parameter, if none could.

    Fused kernels do not check: given such a gradient they do nothing without an error, or end the process.
    """
    if g.device != stored.device:
        return f"gradient of {g.dtype} on {g.device}, stored parameter of {stored.dtype} on {stored.device}"
    if is_shape_only(g) or is_shape_only(stored):
        return None if is_shape_only(stored) else f"gradient of {g.dtype} on {g.device} without memory: a FakeTensor"
    # A subclass may keep its numbers elsewhere than at `data_ptr`.
    if type(g) not in (Tensor, Parameter) or torch.compiler.is_compiling() or is_wrapped(g) or g.is_meta:
        return None
    return None if g.data_ptr() or not g.numel() else f"gradient of {g.dtype} on {g.device} without memory"


def check_readable(grads: Leaves, stored: Leaves) -> None:
    """Refuse gradients that are sparse, on another device than what is stored, or without memory.

    Raises:
        ValueError: every such gradient is named.
    """
    if not torch.compiler.is_compiling():
        found = grads.values()
        try:
            # The usual case is plain tensors with memory on one device, which C functions find. The address of a
            # tensor without memory is 0; that of a tensor which torch.func has wrapped is 0 or raises.
            if (
                set(map(type, found)) <= {Tensor}
                and (
                    (all(map(_IS_CPU, found)) and all(map(_IS_CPU, map(stored.__getitem__, grads))))
                    or len({*map(_DEVICE, found), *map(_DEVICE, map(stored.__getitem__, grads))}) == 1
                )
                and all(map(Tensor.data_ptr, found))
            ):
                return
        except RuntimeError:
            pass
    bad = []
    for path, g in grads.items():
        reason = unreadable(g, stored[path]) if g.layout == torch.strided else misshapen(g, g.shape)
        if reason:
            bad.append((path, reason))
    if bad:
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, READABLE))
