"""Ranges of the sequence numbers of autograd nodes that were made during calls of a model."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

# The last calls, of some two hundred bytes each: more than a backward goes through. A graph of an earlier call is taken
# for one made outside.
REMEMBERED = 1 << 16

START, END = itemgetter(0), itemgetter(1)


class NodeRanges:
    """Disjoint ranges of numbers in order, each with who made its nodes; a number is found by bisection.

    Each thread counts its own nodes. A backward thread makes far fewer than the thread of forward, so that its
    numbers are those of graphs that are long gone. Where ranges overlap the last one counts.
    """

    def __init__(self) -> None:
        # (start, end, number of the call, caller), in order
        self.ranges: list[tuple[int, int, int, Any]] = []
        self.added = 0
        # Several threads may call the model.
        self.lock = threading.Lock()

    def add(self, start: int, end: int, caller: Any = None) -> None:
        """Add nodes from `start` to before `end`, made by `caller`."""
        if end <= start:
            return
        with self.lock:
            self.added += 1
            new = [(start, end, self.added, caller)]
            first, last = bisect_right(self.ranges, start, key=END), bisect_left(self.ranges, end, key=START)
            if first < last:
                # What earlier ranges have before it and after it.
                before, after = self.ranges[first], self.ranges[last - 1]
                if START(before) < start:
                    new.insert(0, (START(before), start, *before[2:]))
                if END(after) > end:
                    new.append((end, *after[1:]))
            self.ranges[first:last] = new
            if len(self.ranges) > 2 * REMEMBERED:
                self.ranges = [r for r in self.ranges if r[2] > self.added - REMEMBERED]

    def _find(self, number: int) -> tuple[bool, Any]:
        with self.lock:
            i = bisect_right(self.ranges, number, key=START) - 1
            return (True, self.ranges[i][3]) if i >= 0 and number < END(self.ranges[i]) else (False, None)

    def __contains__(self, number: int) -> bool:
        return self._find(number)[0]

    def maker(self, number: int) -> Any:
        """The `caller` that made a node."""
        return self._find(number)[1]
