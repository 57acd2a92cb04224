"""Which units are gathered now, at most two, and how old their parameters are."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from .._compat.tensors import memory
from ..core.layout import Leaf, Leaves
from .forward_writes import Written
from .freed_copies import StorageRef
from .guarded_parameter import writes

ALIVE = 2


class Gathered:
    """Copies of units: those that are kept, one that is on its way, and what somebody else has kept.

    Args:
        units: leaves that are gathered together.
        blocks: how many of them are the model's, which may write into copies; the others are single leaves.
        params: this rank's parts by path.
        watch: notices what is written into copies.

    Attributes:
        live: full tensors by unit, that used last at the end.
        seen: what the model has been given of them in the call under way.
        updates: how often all parameters were updated.
        most_alive: the most units of which there were full tensors at once, whoever had them.
    """

    def __init__(self, units: list[list[Leaf]], blocks: int, params: Leaves, watch: Written):
        self.units, self.blocks, self.watch = units, blocks, watch
        # This rank's parts, by unit.
        self.parts = [[params[leaf.path] for leaf in unit] for unit in units]
        self.live: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.coming: dict[int, Callable[[], list[Tensor]]] = {}
        self.seen: dict[int, tuple[Tensor, ...]] = {}
        self.known: dict[int, tuple[StorageRef, int, int]] = {}
        self.refs: dict[int, list[StorageRef]] = {}
        self.most_alive = 0
        self.updates = 0
        # By leaf: what else was written into its part.
        self.writes = [[0] * len(unit) for unit in units]
        self.counts = [writes(parts) for parts in self.parts]

    def __contains__(self, i: int) -> bool:
        return i in self.live or i in self.coming

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """Of which parameter, by unit and place in it, a tensor is a view."""
        entry = self.known.get(memory(t))
        # An address may be used again once the storage that had it is gone.
        return None if entry is None or entry[0]() is None else entry[1:]

    def get(self, i: int) -> list[Tensor] | None:
        """The unit's copy, if there is one with the values of now."""
        if writes(self.parts[i]) != self.counts[i]:
            # Somebody has written into a part between two calls.
            for j in range(len(self.units[i])):
                self.age(i, j)
        if i in self.coming:
            # Since it was begun forward may have written into an older copy that it has.
            self.look_again()
        if i in self.coming:
            self.put(i, self.coming.pop(i)())
        elif i in self.live:
            self.live.move_to_end(i)
        return self.live.get(i)

    def put(self, i: int, fulls: list[Tensor]) -> None:
        """A unit has come."""
        self.live[i] = fulls
        self.refs[i] = [weakref.ref(full.untyped_storage()) for full in fulls]
        for j, (full, ref) in enumerate(zip(fulls, self.refs[i], strict=True)):
            if full.untyped_storage().nbytes():
                self.known[memory(full)] = (ref, i, j)
        self.known = {k: entry for k, entry in self.known.items() if entry[0]() is not None}
        self.most_alive = max(self.most_alive, len({unit for _, unit, _ in self.known.values()} | self.coming.keys()))
        if i < self.blocks:
            self.watch.begin(i, fulls)

    def drop(self, keep: int = 0) -> None:
        """Let units go until `keep` are left."""
        self.look_again()
        while len(self.live) > max(0, keep - len(self.coming)):
            self.forget(next(iter(self.live)))
        if not keep:
            self.turn_away()

    def turn_away(self) -> None:
        """Let those go that are on their way."""
        for i in list(self.coming):
            self.coming.pop(i)()

    def forget(self, i: int, settled: bool = False) -> None:
        """Let a unit go. What forward has written into it is stored, if it is not yet."""
        if i in self.coming:
            self.coming.pop(i)()
        if i not in self.live:
            return
        left = None
        if i in self.watch.given:
            if not settled:
                self.settle(i)
            left, dtypes = self.watch.leave(i), [full.dtype for full in self.live[i]]
        del self.live[i]
        self.seen.pop(i, None)
        if left is not None:
            self.watch.let_go.hold(i, left, self.refs[i], dtypes)

    def settle(self, i: int) -> None:
        """Store what forward has written into a unit's copy so far."""
        if i in self.live and i in self.watch.given and self.watch.settle(i, self.live[i]):
            self.counts[i] = writes(self.parts[i])

    def settle_all(self) -> None:
        """Store what forward has written; what it has been given is no longer its own."""
        for i in list(self.watch.given):
            self.settle(i)
            if self.watch.given[i].own:
                # What forward has put there is memory of its own.
                self.forget(i)
        self.look_again()
        self.watch.forget()

    def look_again(self) -> None:
        """Store what forward has written into copies that it has and that are kept here no longer."""
        if not self.watch.let_go.held:
            return
        for i in list(self.live):
            # While what is stored is what the newer copy was made from: that is how writes into it are told.
            self.settle(i)
        for i in self.watch.look_again():
            # What we have written into parts is no write of the user's.
            self.counts[i] = writes(self.parts[i])
            self.forget(i, settled=True)

    def _discard(self, i: int) -> None:
        """A unit's copy holds old values."""
        self.watch.leave(i)
        self.forget(i)

    def renew(self) -> None:
        """The parameters have changed."""
        self.watch.forget()
        self.live.clear()
        self.seen.clear()
        self.turn_away()
        self.updates += 1

    def age(self, i: int, j: int) -> int:
        """How often a parameter has been updated, or written into by the user, or by the model in forward."""
        (count,) = writes([self.parts[i][j]])
        if count != self.counts[i][j]:
            # What was borrowed may have been read alone, so that is no reason to refuse a graph.
            self.writes[i][j] += count[0] != self.counts[i][j][0]
            self.counts[i][j] = count
            self._discard(i)
        return self.updates + self.writes[i][j] + (self.watch.version(i, j) if i < self.blocks else 0)
