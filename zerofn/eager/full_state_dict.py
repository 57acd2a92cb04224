"""The tensors of a state as `torch.distributed` places them: whole on each rank, or a DTensor that is cut by rows.

A shard that is whole rows in torch's own chunks is shown over its own memory. What ranks have cut otherwise (a leaf of
fewer rows than ranks, a whole leaf at its owner) is gathered, leaf by leaf, and each rank keeps the rows that torch
would give it: all ranks ask for those together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.row_sharding import cut_by_rows, rows_between
from ..core.state import State
from ..core.state_entries import Entry, cut_as_by_torch, entries
from ..ranks.collectives import all_reduce_
from ..ranks.dtensor_shards import as_dtensors
from ..ranks.group import Group


def placed(state: State, cutting: Sequence[Group], meet: Callable[[], object]) -> list[Any]:
    """What each entry of a state is in a state dict, in the order of `entries`.

    Sums of gradients that are each rank's own are zeros, with the shape of the leaf: those of an open window have an
    entry of their own.

    Args:
        state: over several ranks, or of one process.
        cutting: the ranks that leaves are cut over, one axis after the other.
        meet: called before the first message: it raises where only some ranks came.
    """
    found = entries(state)
    single = cutting[0] if len(cutting) == 1 and cut_as_by_torch(state, cutting) else None
    apart = state.layout.placement.apart
    sums = [e.of_leaf and e.owner in apart and isinstance(e.value, Tensor) for e in found]
    alike = [single is not None and e.offset is not None and in_own_rows(e, single.size) for e in found]
    if any(e.offset is not None and not (a or s) for e, a, s in zip(found, alike, sums, strict=True)):
        meet()
    out: list[Any] = []
    for e, of_sum, own_rows in zip(found, sums, alike, strict=True):
        if of_sum:
            out.append(_rows(e.value.new_zeros(()).expand(e.shape), single))
        elif e.offset is None:
            out.append(e.value)
        elif own_rows:
            assert single is not None
            mine = rows_between(e.shape, e.offset, e.offset + e.value.numel())
            assert mine is not None
            out.append(as_dtensors({0: (e.value, mine, e.shape)}, single)[0])
        else:
            out.append(_rows(_gathered(e, cutting), single))
    return out


def in_own_rows(e: Entry, size: int) -> bool:
    """Whether each rank has the rows of a tensor that torch would give it; the same answer on all ranks."""
    return not e.at_owner and e.within is None and cut_by_rows(e.shape, size)


def _rows(whole: Tensor, group: Group | None) -> Tensor:
    """The rows of a whole tensor that torch would give this rank, of a number all, in memory of their own."""
    if group is None or not whole.ndim:
        return whole.clone()
    low, high = (min(i * -(-whole.shape[0] // group.size), whole.shape[0]) for i in (group.rank, group.rank + 1))
    mine = whole[low:high].clone(memory_format=torch.contiguous_format)
    return as_dtensors({0: (mine, tuple(mine.shape), tuple(whole.shape))}, group)[0]


def _gathered(e: Entry, cutting: Sequence[Group]) -> Tensor:
    # A sum, of bytes, in which all ranks but one have zeros: twice what a gather sends, and it asks nobody how
    # a leaf is cut, or who its owner is.
    whole = e.value.new_zeros(torch.Size(e.shape).numel())
    assert e.offset is not None
    whole[e.offset : e.offset + e.value.numel()] = e.value.reshape(-1)
    for group in cutting:
        all_reduce_(whole.view(torch.uint8), group)
    return whole.view(e.shape)
