"""What a transform gives and keeps has memory of its own: copies of what it shares with what is written later.

A gradient is its caller's, who may write into it or add the next one to it. Parameters are written in place, one after
the other, and so are states, by a step or when another one is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import memories, self_overlapping
from .layout import Leaves
from .leaf_entries import moved
from .tree import Tree, apart, clone, flatten, tensors_of, tree_keys, unflatten
from .update_context import Context, Prepared


def own_start(given: list[Tree]) -> Tree:
    """A first state, copied: it may be a parameter, one tensor for two leaves, or one for every state that is made.

    Each copy takes the place of its original in a list, so that both states are never there at once: an original that
    is nobody else's goes when it is copied.

    Args:
        given: the state, in a list from which it is taken: the caller's frame would hold an argument until this ends.
    """
    values, spec = flatten(given.pop())
    for i, x in enumerate(values):
        if isinstance(x, Tensor):
            values[i] = x.clone()
    return unflatten(spec, values)


def own_prepared(
    prepared: Prepared, state: Mapping[str, Any], grads: Leaves | None, params: Leaves, ctx: Context
) -> Prepared:
    """What a transform decides before it sees leaves, with copies of what shares memory.

    Args:
        prepared: what its `prepare_fn` returned.
        state: what it was handed, as are `grads`, `params` and `ctx`.
    """
    carry, new = prepared.carry, prepared.state
    if carry is not None and (ctx.donate or ctx.donate_to_kernels):
        # A leaf is updated after others have been written.
        carry = apart({"": carry}, params.values())[""]
    if new:
        new = _distinct(dict(new), state, (*(grads or {}).values(), *params.values()))
    emit = prepared.emit
    if isinstance(emit, Tensor) and not ctx.recorded:
        # Behind what holds nothing is run, and so nothing written.
        emit = bool(emit.item())
    return replace(prepared, carry=carry, state=new, emit=emit)


def own_update(
    optimizes: bool,
    returned: tuple[Leaves | None, Any],
    state: Any,
    grads: Leaves,
    params: Leaves,
    carry: Any = None,
) -> tuple[Leaves | None, Any]:
    """What an update half returned, with copies of what shares memory.

    Args:
        optimizes: whether updates are new parameters.
        returned: updates, `None` where it holds, and a state.
        state: what it was handed, which shares none.
        grads: what it was handed.
        params: stored parameters of these leaves.
        carry: what it was handed, which may be another leaf's.
    """
    out, own = returned
    others = (*grads.values(), *params.values(), *(() if carry is None else tensors_of({"": carry})))
    if out and optimizes:
        # A parameter that stays as it is, or was written in place, may be returned.
        out = _distinct(out, params, (*others, *tensors_of(state)))
    elif out and out is not grads:
        # That of another leaf is written before it is read.
        moved = {path: x for path, x in out.items() if x is not params.get(path)}
        if moved and (found := apart(moved, params.values())) is not moved:
            out = {**out, **found}
    if own is state or not own:
        return out, own
    made = out.values() if optimizes and out else ()
    return out, _distinct(own, state, (*others, *made))


def _distinct(new: Mapping[str, Any], old: Mapping[str, Any], others: Iterable[Tensor]) -> Any:
    """New entries in place of old ones, with copies of what shares memory with others, or with one another.

    What is at its place in `old` already may stay. No tensor has two elements at one place, as an expanded one has.

    Args:
        new: nested dicts of tensors or trees of them.
        old: what they replace, and what stays beside them.
        others: tensors that are written later, or by others.
    """
    if torch.compiler.is_compiling():
        # Addresses cannot be compared while tracing. A compiler that generates code removes copies without a use.
        return clone(new)
    given = tensors_of(new)
    if not given:
        return new
    fresh, beside = tensors_of(moved(new, old)), _beside(new, old)
    every, taken = memories([*given, *beside]), memories(others)
    # As a rule each has a storage, none of them another's: found without a call in Python for each tensor.
    alone = len(every) == len(given) + len(beside) and taken.isdisjoint(memories(fresh))
    if alone and not any(map(_overlaps, fresh)):
        return new
    was = dict(zip(tree_keys(old), flatten(old)[0], strict=True))
    values, spec = flatten(new)
    stays = [not isinstance(x, Tensor) or x is was.get(keys) for keys, x in zip(tree_keys(new), values, strict=True)]
    at_home = [x for x, here in zip(values, stays, strict=True) if here and isinstance(x, Tensor)]
    seen = taken | memories([*beside, *at_home])
    for i, x in enumerate(values):
        if not stays[i]:
            values[i] = x.clone() if _overlaps(x) or not seen.isdisjoint(memories([x])) else x
            seen |= memories([values[i]])
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
