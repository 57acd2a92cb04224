"""Which units have full parameters now, at most two, and how often each parameter has changed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from .._compat.tensors import memory
from ..core.layout import Leaf, Leaves
from .forward_writes import ForwardWrites
from .freed_copies import StorageRef
from .guarded_parameter import writes

# Units that have full parameters at the same time: the one that is used, and the next.
ALIVE = 2


class GatheredUnits:
    """Full parameters of units: those kept here, one whose all-gather is under way, and those that user code kept.

    Args:
        units: leaves that are gathered together.
        blocks: how many of them the model sees; the others are single leaves.
        params: this rank's shards by path.
        forward_writes: notices what forward writes into full parameters.

    Attributes:
        live: full parameters by unit, the last used one at the end.
        coming: by unit whose all-gather was prefetched, what waits for it and gives full parameters.
        seen: by unit, the tensors that the model was given of it in the call under way.
        updates: how often all parameters were updated.
    """

    def __init__(self, units: list[list[Leaf]], blocks: int, params: Leaves, forward_writes: ForwardWrites):
        self.units, self.blocks, self.forward_writes = units, blocks, forward_writes
        # This rank's shards, by unit.
        self.parts = [[params[leaf.path] for leaf in unit] for unit in units]
        self.live: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.coming: dict[int, Callable[[], list[Tensor]]] = {}
        self.seen: dict[int, tuple[Tensor, ...]] = {}
        # By number of a memory: the memory, and of which unit and place in it the full parameter is that has it.
        self.known: dict[int, tuple[StorageRef, int, int]] = {}
        self.updates = 0
        # By unit and place in it: how often user code wrote into the shard, and the count of writes that was last seen.
        self.writes = [[0] * len(unit) for unit in units]
        self.counts = [writes(parts) for parts in self.parts]

    def __contains__(self, i: int) -> bool:
        return i in self.live or i in self.coming

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """Of which full parameter a tensor is a view, by unit and place in it; `None` if of none."""
        entry = self.known.get(memory(t))
        # A new storage may have the number of one that was freed.
        return None if entry is None or entry[0]() is None else entry[1:]

    def get(self, i: int) -> list[Tensor] | None:
        """The unit's full parameters, if they are here and up to date."""
        if writes(self.parts[i]) != self.counts[i]:
            # User code has written into a shard between two calls.
            for j in range(len(self.units[i])):
                self.age(i, j)
        if i in self.coming:
            # Since the prefetch began forward may have written into an older copy, which frees what is coming.
            self.look_again()
        if i in self.coming:
            self.put(i, self.coming.pop(i)())
        elif i in self.live:
            self.live.move_to_end(i)
        return self.live.get(i)

    def put(self, i: int, fulls: list[Tensor]) -> None:
        """Keep a unit's full parameters."""
        self.live[i] = fulls
        for j, full in enumerate(fulls):
            storage = full.untyped_storage()
            if storage.nbytes():
                self.known[memory(full)] = (weakref.ref(storage), i, j)
        self.known = {k: entry for k, entry in self.known.items() if entry[0]() is not None}
        if i < self.blocks:
            self.forward_writes.begin(i, fulls)

    def drop(self, keep: int = 0) -> None:
        """Free the units that were used longest ago until `keep` are left, with those that are coming."""
        self.look_again()
        while len(self.live) > max(0, keep - len(self.coming)):
            self.free_unit(next(iter(self.live)))
        if not keep:
            self.finish_prefetched()

    def finish_prefetched(self) -> None:
        """Wait for the all-gathers that were prefetched, and drop what they give."""
        for i in list(self.coming):
            self.coming.pop(i)()

    def free_unit(self, i: int, settled: bool = False) -> None:
        """Free a unit's full parameters; unless `settled`, what forward has written into them is stored before."""
        if i in self.coming:
            self.coming.pop(i)()
        if i not in self.live:
            return
        escaped = None
        if i in self.forward_writes.given:
            if not settled:
                self.settle(i)
            escaped = self.forward_writes.leave(i)
            memories = [(weakref.ref(full.untyped_storage()), full.dtype) for full in self.live[i]]
        del self.live[i]
        self.seen.pop(i, None)
        if escaped is not None:
            self.forward_writes.freed.hold(i, escaped, memories)

    def settle(self, i: int) -> None:
        """Store what forward has written into a unit's full parameters so far."""
        given = self.forward_writes.given
        if i in self.live and i in given and self.forward_writes.settle(i, self.live[i]):
            self.counts[i] = writes(self.parts[i])

    def settle_all(self) -> None:
        """Store what forward has written at the end of a call or a backward; writes after it are not looked for."""
        if not (self.forward_writes.given or self.forward_writes.freed.copies):
            return
        for i in list(self.forward_writes.given):
            self.settle(i)
            if self.forward_writes.given[i].own:
                # Memory that forward put there by `w.data = x` is its own.
                self.free_unit(i)
        self.look_again()
        self.forward_writes.forget()

    def look_again(self) -> None:
        """Store what forward has written into copies that were freed here and that it still has."""
        if not self.forward_writes.freed.copies:
            return
        for i in list(self.live):
            # First, while the shard is what the newer copy was gathered from: writes are found by comparing the two.
            self.settle(i)
        for i, j in self.forward_writes.freed.look_again():
            self.forward_writes.counts[i][j] += 1
            # Our own write into the shard, not one of the user's.
            self.counts[i] = writes(self.parts[i])
            self.free_unit(i, settled=True)

    def renew(self) -> None:
        """All parameters were updated: what was gathered before is out of date."""
        self.forward_writes.forget()
        self.live.clear()
        self.seen.clear()
        self.finish_prefetched()
        self.updates += 1

    def age(self, i: int, j: int) -> int:
        """How often a parameter has changed: by updates, by user code, by the model in forward."""
        (count,) = writes([self.parts[i][j]])
        if count != self.counts[i][j]:
            # That `.data` was asked for frees the copy too, but is no reason to refuse a graph: it may have been read.
            self.writes[i][j] += count[0] != self.counts[i][j][0]
            self.counts[i][j] = count
            self.forward_writes.leave(i)
            self.free_unit(i)
        return self.updates + self.writes[i][j] + (self.forward_writes.version(i, j) if i < self.blocks else 0)


@contextmanager
def updating(gathered: GatheredUnits, places: Collection[tuple[int, int]]) -> Iterator[None]:
    """Inside, one leaf is updated alone, in backward; what is gathered of it, at these places, is of before.

    What forward has written into such a copy is stored first: once its shard is another it cannot be told from the
    update. What is written into it later is not stored, since it would undo the update.
    """
    for i, _ in places:
        gathered.look_again()
        gathered.settle(i)
    yield
    freed = gathered.forward_writes.freed
    for i, j in places:
        gathered.writes[i][j] += 1
        gathered.counts[i] = writes(gathered.parts[i])
        gathered.free_unit(i, settled=True)
        freed.copies = [copy for copy in freed.copies if copy.place != (i, j)]
