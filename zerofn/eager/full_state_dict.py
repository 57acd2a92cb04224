"""Full tensors of a sharded state, for torch's `full_state_dict=True`, and the way back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..core.state import State
from ..core.state_entries import Entry, entries, has_unknown_leaf, rebuild
from ..ranks.collectives import all_reduce_
from ..ranks.dtensor_shards import empty_dtensors
from ..ranks.group import Group


def full_state(state: State, cutting: Sequence[Group]) -> State:
    """The same state with every tensor whole, on every rank; all ranks call it.

    Args:
        state: over several ranks.
        cutting: the ranks that leaves are cut over, one axis after the other.

    Raises:
        ValueError: a window is open whose sums are each rank's own, or a state is of pieces, nobody knows of which.
    """
    apart = state.layout.placement.apart
    counts = [x for name in apart for x in state.transforms[name].values() if isinstance(x, Tensor) and not x.ndim]
    if apart and any(bool(x) for x in counts):
        wrong = f"a full state_dict while {apart[0]} holds gradients"
        why = "they are not reduced yet: each rank has its own, and one tensor for all ranks cannot tell them"
        raise ValueError(explain(wrong, why, "ask after the step that ends the window; or zf.save(directory, opt)"))
    if cutting and (own := [e.key for e in entries(state) if has_unknown_leaf(e)]):
        wrong, why = f"a full state_dict with {', '.join(own)}", "of what leaves these are pieces its transform keeps"
        raise ValueError(explain(wrong, f"{why} to itself", "zf.save(directory, opt), for as many ranks"))
    moved = lambda e: _zeros(e) if e.owner in apart and e.of_leaf else _gathered(e, cutting)  # noqa: E731
    return rebuild(replace(state, leaves={}), moved, elsewhere=True)


def empty_rows(state: State, cutting: Sequence[Group]) -> State:
    """The same state with what is cut as unset distributed tensors of whole shapes, into which torch puts full ones.

    This rank's own flat parts, which end in the middle of rows, torch would fill with others' elements.
    """
    state = replace(state, leaves={})
    cut: dict[Hashable, Any] = {e.key: (e.shape, e.value) for e in entries(state) if e.offset is not None and e.shape}
    made = empty_dtensors(cut, cutting[0]) if cut else {}
    return rebuild(state, lambda e: made.get(e.key, e.value if e.offset is None else _zeros(e)), elsewhere=True)


def _zeros(e: Entry) -> Tensor:
    return e.value.new_zeros(e.shape)


def _gathered(e: Entry, cutting: Sequence[Group]) -> Tensor:
    if e.offset is None:
        return e.value
    # A sum, of bytes, in which all ranks but one have zeros: twice what a gather sends, and it asks nobody how
    # a leaf is cut, or who its owner is.
    whole = e.value.new_zeros(torch.Size(e.shape).numel())
    whole[e.offset : e.offset + e.value.numel()] = e.value.reshape(-1)
    for group in cutting:
        all_reduce_(whole.view(torch.uint8), group)
    return whole.view(e.shape)
