"""`opt.state[p]` of a sharded parameter: shards of states, shown with the shape of the whole.

So a second moment stands beside `p.grad` as in one process. What owners keep whole, and what is cut along another
axis besides, is shown as it is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..core.layout import Leaf
from ..core.state import State
from ..core.state_entries import entries
from ..sharded.gather_part import Gathering, Piece
from ..sharded.part import part_of
from ..sharded.part_origin import Origin


class ShardedStateViews:
    """Shows tensors of a state as shards, like the parameters of one attached model.

    Args:
        gathering: how shards are gathered outside of the model's calls; `None` where parameters are not cut.
    """

    def __init__(self, gathering: Gathering | None):
        self.gathering = gathering
        # Programs ask for one parameter after the other, and in between a state is the same.
        self._state: Callable[[], State | None] = lambda: None
        self._known: dict[int, Origin] = {}

    def shown(self, state: State, x: Any) -> Any:
        """`x`, a tensor of the state, as a shard that has the shape of the whole, where it is cut as its parameter."""
        if self.gathering is None:
            return x
        if self._state() is not state:
            self._state, self._known = weakref.ref(state), _origins(state, self.gathering)
        of = self._known.get(id(x))
        return x if of is None else part_of(x, of)


def _origins(state: State, by: Gathering) -> dict[int, Origin]:
    """Of which whole each tensor is a shard, by `id`: of those that are cut as their parameter is."""
    leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in state.layout.leaves if leaf.within is None}
    found = {}
    for e in entries(state):
        leaf = leaves.get(e.path)
        if leaf is not None and e.offset is not None and e.owner != "params":
            low, high = by.wire.span(leaf)
            if (e.offset, e.offset + e.value.numel()) == (low, high):
                piece = Piece(leaf, low, high, by)
                found[id(e.value)] = Origin(f"opt.state[p][{e.slot!r}]", e.path, False, (piece,), leaf.shape)
    return found
