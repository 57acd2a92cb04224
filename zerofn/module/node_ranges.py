"""Which autograd nodes were made during calls of a model, told by the numbers they are given."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

# Calls whose graphs may still be alive: more than a backward goes through. A graph older than that is taken for
# one made outside. Each takes some two hundred bytes.
REMEMBERED = 1 << 16

START, END = itemgetter(0), itemgetter(1)


class NodeRanges:
    """Numbers of nodes in order, and who made them.

    Each thread counts its own nodes. Backward threads make far fewer than the thread of forward, so
    numbers of theirs are met there only by graphs that are long gone. Of spans that overlap the last one
    counts: what is kept are disjoint ones in order, where a number is found by bisection.
    """

    def __init__(self) -> None:
        # (start, end, number of the call, caller), in order
        self.spans: list[tuple[int, int, int, Any]] = []
        self.added = 0
        # Of all threads that call the model.
        self.lock = threading.Lock()

    def add(self, start: int, end: int, caller: Any = None) -> None:
        """Nodes from `start` up to, not including, `end`, and a name for what made them."""
        if end <= start:
            return
        with self.lock:
            self.added += 1
            new = [(start, end, self.added, caller)]
            first, last = bisect_right(self.spans, start, key=END), bisect_left(self.spans, end, key=START)
            if first < last:
                # What earlier ones have before it and after it.
                before, after = self.spans[first], self.spans[last - 1]
                if START(before) < start:
                    new.insert(0, (START(before), start, *before[2:]))
                if END(after) > end:
                    new.append((end, *after[1:]))
            self.spans[first:last] = new
            if len(self.spans) > 2 * REMEMBERED:
                self.spans = [span for span in self.spans if span[2] > self.added - REMEMBERED]

    def _find(self, number: int) -> tuple[bool, Any]:
        with self.lock:
            i = bisect_right(self.spans, number, key=START) - 1
            return (True, self.spans[i][3]) if i >= 0 and number < END(self.spans[i]) else (False, None)

    def __contains__(self, number: int) -> bool:
        return self._find(number)[0]

    def maker(self, number: int) -> Any:
        """The name of what made a node."""
        return self._find(number)[1]
