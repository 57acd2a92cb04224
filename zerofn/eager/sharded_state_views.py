"""`opt.state[p]` of a sharded parameter: shards of states, shown with the shape of the whole.

So an average of squares stands beside `p.grad` there as in one process. What owners keep whole, and what is cut along
another axis besides, is shown as it is kept.
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
    """The states of one attached model to whoever asks for them by parameter.

    Args:
        gathering: how parts of its leaves are gathered; `None` where its parameters are not cut.
    """

    def __init__(self, gathering: Gathering | None):
        self.gathering = gathering
        # Programs ask for one parameter after the other, and in between a state is the same.
        self._state: Callable[[], State | None] = lambda: None
        self._known: dict[int, Origin] = {}

    def shown(self, state: State, x: Any) -> Any:
        """A tensor of a state as whoever asks has it."""
        if self.gathering is None:
            return x
        if self._state() is not state:
            self._state, self._known = weakref.ref(state), dict(self._pieces(state, self.gathering))
        of = self._known.get(id(x))
        return x if of is None else part_of(x, of)

    def _pieces(self, state: State, by: Gathering) -> list[tuple[int, Origin]]:
        leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in state.layout.leaves if leaf.within is None}
        found = []
        for e in entries(state):
            leaf = leaves.get(e.path)
            if leaf is not None and e.offset is not None and e.owner != "params":
                low, high = by.wire.span(leaf)
                if (e.offset, e.offset + e.value.numel()) == (low, high):
                    how = f"opt.state[p][{e.slot!r}]"
                    found.append((id(e.value), Origin(how, e.path, False, (Piece(leaf, low, high, by),), leaf.shape)))
        return found
