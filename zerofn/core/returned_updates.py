"""Checks of what an update half returns: the leaves that it was handed, real, of their shapes, where they lie.

A gradient of shape (1,) would be spread over its leaf by whatever follows, one that is left out would leave its leaf as
it is, and one without memory would do nothing: none of them with an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from .facts import Facts
from .layout import Leaves
from .tree import tensors_of

_SHAPE, _DTYPE, _DEVICE, _LAYOUT = map(attrgetter, ("shape", "dtype", "device", "layout"))
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
    """What an update half returned, updates and a state, if the updates fit the leaves that it was handed.

    Args:
        name: of the transform.
        facts: of it.
        returned: by its update half; `None` for the updates of one that holds gradients.
        grads: what it was handed.
        params: stored parameters of these leaves.
        some: whether it may leave out leaves, which are then not trained.
        held: the state that it was handed, whose tensors it may give: a step that is made again records from there.

    Raises:
        TypeError: no pair, no dict by path, or a state that is no dict.
        ValueError: a leaf is left out, or there is none of that path; its tensor is none, not real, of another shape or
            device, begins a graph of autograd anew, or a new parameter has another dtype or is sparse; every such leaf
            is named.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        told = f"{len(returned)} values" if isinstance(returned, tuple | list) else kind_of(returned)
        raise TypeError(explain(f"{name}: an update that returned {told}", "it gives updates and a state", PAIR))
    out, state = returned
    # Another library's may be anything: a tuple, None.
    if not isinstance(state, Mapping) and not facts.adds:
        wrong, why = (
            f"{name}: an update that returned {kind_of(state)} as its state",
            "a state is a dict of its entries",
        )
        raise TypeError(explain(wrong, why, NO_STATE))
    if out is grads or (out is None and facts.holds) or _all_fit(facts, out, grads, params):
        return out, state
    if not isinstance(out, Mapping):
        why = "updates are by path, as gradients are"
        if out is None and not facts.adds and not facts.watches:
            why += "; None is for one that holds gradients, which says Facts(window=...)"
        right = TO_WATCH if facts.watches else PAIR
        raise TypeError(explain(f"{name}: an update that returned {kind_of(out)}, and a state", why, right))
    bad: dict[Any, str] = {}
    for path, x in out.items():
        g, p = grads.get(path), params.get(path)
        # What goes on as it came is right, and so is a parameter that was written in place.
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
    # In the order of the layout, whatever theirs is: what stands behind may pair lists by position.
    return {path: out[path] for path in params if path in out}, state


def misfit(x: Tensor, like: Tensor, stored: Tensor, what: str = "leaf") -> str | None:
    """Why a tensor does not fit a stored leaf; `None` if it does.

    Args:
        x: the tensor.
        like: what has the shape that it is to have.
        stored: the parameter.
        what: what `like` is, for the message.
    """
    if x.shape != like.shape:
        return f"a tensor of shape {tuple(x.shape)} for a {what} of shape {tuple(like.shape)}"
    if not x.is_floating_point():
        # Cast to the parameter's dtype a complex number would lose its imaginary part.
        return f"a tensor of {x.dtype}; parameters and gradients are real"
    return f"a tensor on {x.device} for a leaf on {stored.device}" if x.device != stored.device else None


def _right(facts: Facts, rows: list[tuple[str, str]]) -> str:
    """What to write in place of an update that has these faults."""
    reasons = [reason for _, reason in rows]
    recast = any([reason.startswith(RECAST) for reason in reasons])
    right = PAIR.replace("new", "new.to(params[path].dtype)") if recast else PAIR
    if LEFT_OUT not in reasons:
        return right
    if facts.watches:
        return TO_WATCH
    return right + (TO_HOLD if facts.holds else TO_LEAVE)


def _all_fit(facts: Facts, out: Any, grads: Leaves, params: Leaves) -> bool:
    """Whether they fit and come in the order of gradients, the usual case: found by `map` over C functions."""
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
    # Sums that are not yet reduced are of whole leaves, and parameters are shards.
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
