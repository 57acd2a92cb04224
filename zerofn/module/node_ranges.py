"""Ranges of the sequence numbers of autograd nodes that were made during calls of a model."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

# The last calls, of some two hundred bytes each: more than a backward goes through. A graph of an earlier call is taken
# for one made outside.
REMEMBERED = 1 << 16


class NodeRange(NamedTuple):
    """Nodes from `start` to before `end`, made in the call of that number.

    `callers` are the modules, by `id`, of whose calls from outside of the model it is one.
    """

    start: int
    end: int
    call: int
    callers: Collection[int]


START, END = attrgetter("start"), attrgetter("end")


class NodeRanges:
    """Disjoint ranges in order; a number is found by bisection.

    Each thread counts its own nodes. A backward thread makes far fewer than the thread of forward, so that its
    numbers are those of graphs that are long gone. Where ranges overlap the last one counts.
    """

    def __init__(self) -> None:
        self.ranges: list[NodeRange] = []
        self.added = 0
        # Several threads may call the model.
        self.lock = threading.Lock()

    def add(self, start: int, end: int, callers: Collection[int] = ()) -> None:
        """Add nodes from `start` to before `end`, made in a call of `callers`."""
        if end <= start:
            return
        with self.lock:
            self.added += 1
            new = [NodeRange(start, end, self.added, callers)]
            first, last = bisect_right(self.ranges, start, key=END), bisect_left(self.ranges, end, key=START)
            if first < last:
                # What earlier ranges have before it and after it.
                before, after = self.ranges[first], self.ranges[last - 1]
                if before.start < start:
                    new.insert(0, before._replace(end=start))
                if after.end > end:
                    new.append(after._replace(start=end))
            self.ranges[first:last] = new
            if len(self.ranges) > 2 * REMEMBERED:
                self.ranges = [r for r in self.ranges if r.call > self.added - REMEMBERED]

    def find(self, number: int) -> NodeRange | None:
        """The range that a node is in; `None` of one that was made outside."""
        with self.lock:
            i = bisect_right(self.ranges, number, key=START) - 1
            return self.ranges[i] if i >= 0 and number < self.ranges[i].end else None

    def __contains__(self, number: int) -> bool:
        return self.find(number) is not None
