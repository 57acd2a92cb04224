"""`ShardedStateViews`: shards of a state as `opt.state[p]` shows them, with the shape of the full tensor.

So a second moment has the shape of `p.grad` as in one process, at every stage. Elementwise functions run on the shard;
norms, indices and writes by index are those of the full tensor. A sharded tensor that cannot be gathered here, for
instance along two axes of a mesh, refuses those. What an owner keeps whole is shown on that rank as it is; on other
ranks it refuses them too, and elementwise functions have no effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Leaf
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import entries, held_by_owners
from ..module.fully_sharded import FullySharded
from ..ranks.group import Group
from ..ranks.process_groups import together
from ..sharded.parameter import Gathering, Origin, Piece, part_of

ON_EVERY_RANK = "the same line on every rank, and what is done with its result on one"


def gathering_of_states(pipe: Pipeline, control: Group | None, left: Callable[[], bool]) -> Gathering | None:
    """Gathers shards of a state where parameters are full; `None` where nothing is sharded.

    Args:
        pipe: the pipeline.
        control: the ranks that step together.
        left: whether the model is detached.
    """
    wire = pipe.sharding
    if wire is None or control is None:
        return None

    def meet(asked: str) -> str:
        together(asked, control.ranks, ON_EVERY_RANK)
        return ""

    return Gathering(wire, meet, left)


class ShardedStateViews:
    """Shows tensors of a state as shards, like the parameters of one attached model.

    Args:
        gathering: gathers shards outside of the model's calls; `None` where nothing is sharded.
    """

    def __init__(self, gathering: Gathering | None):
        self.gathering = gathering
        # Programs ask for one parameter after the other, and the state does not change in between.
        self._state: Callable[[], State | None] = lambda: None
        self._known: dict[int, Origin] = {}

    def shown(self, state: State, x: Any) -> Any:
        """A tensor of the state; as a shard that shows the full shape, if it is sharded like its parameter."""
        if self.gathering is None:
            return x
        if self._state() is not state:
            self._state, self._known = weakref.ref(state), _origins(state, self.gathering)
        of = self._known.get(id(x))
        if of is None:
            return x
        # Ranks that are not the owner have one number, expanded, and nothing could be written into it.
        return part_of(x if x.is_contiguous() else torch.zeros(x.shape, dtype=x.dtype, device=x.device), of)


class DTensorStateViews:
    """Shows tensors of a state as DTensors like their parameters, as those of torch's optimizers are under FSDP2."""

    def __init__(self, model: FullySharded):
        self.model = model

    def shown(self, state: State, x: Any) -> Any:
        """A tensor of the state; as a DTensor on the same memory, if it is sharded like its parameter."""
        return self.model.as_dtensor(x, next((e for e in entries(state) if e.value is x), None))


def _origins(state: State, by: Gathering) -> dict[int, Origin]:
    """id(state tensor) -> Origin, for state that is sharded like its parameter."""
    leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in state.layout.leaves if leaf.within is None}
    found = {}
    for e in entries(state):
        leaf = leaves.get(e.path)
        if leaf is None or e.owner == "params" or e.at_owner or not isinstance(e.value, Tensor):
            continue
        if e.offset is None and not e.of_part:
            continue
        pieces, shape = (), e.value.shape if e.offset is None else leaf.shape
        low, high = by.wire.span(leaf)
        if e.offset is not None and (e.offset, e.offset + e.value.numel()) == (low, high):
            pieces = (Piece(leaf, low, high, by),)
        how = f"opt.state[p][{e.slot!r}]"
        found[id(e.value)] = Origin(how, e.path, False, pieces, torch.Size(shape), state=True)
    for slot, path, x, rank in held_by_owners(state):
        how = f"opt.state[p][{slot!r}], which rank {rank} of those that share the leaf keeps,"
        found[id(x)] = Origin(how, path, False, (), x.shape, state=True)
    return found
