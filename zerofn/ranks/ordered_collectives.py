"""Collectives in one order on all ranks, though each rank asks for them in the order of its own graph.

With parameters that are gathered on use, collectives are begun inside forward and backward, where each rank follows its
own graph. Before each collective the ranks exchange which one they ask for. Mostly it is the same one. If not, all
ranks take part in each collective that any of them asks for: an all-gather needs this rank's shard even if this rank
does not use the result, and to a sum of gradients it adds zeros. A rank that has nothing more to ask for waits at a
*rest* and takes part in what others ask for, until every rank rests.

The exchange is one small message per collective. A fixed order is not possible: only a rank's own forward knows which
parameters it needs next. But with each exchange a rank also sends what it expects to ask for next. As far as all ranks
expect the same, they *promise* it: those collectives follow in that order without an exchange. A rank that then needs
something else takes part in them all the same, at the latest at its next rest. A promised collective that some rank
does not use costs its bytes, and after it promises are short again.

A collective in which a rank cannot take part without data of the user's, a part of a tensor, is a *meeting*: a rank
takes part in what others ask for until all ranks have come to the same meeting. If one never will, all get an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from .collectives import all_gather_into
from .group import Group

# A kind of collective, and the unit whose parameters or gradients it moves.
Asked = tuple[int, int]
# In place of a kind: this rank rests (with the place in place of a unit), or has come to a meeting (with its number).
REST, MEET = 0, -2
# Fills the rest of a message.
NOTHING = -1
# How many collectives are promised at most, and how many numbers a rank may send in their place at a rest.
MOST_PROMISED = 8
NUMBERS = 2 * MOST_PROMISED
# How many numbers one message has.
WIDTH = 2 + NUMBERS
# Where a rank rests: between two calls of the model, or at a step.
CALL, STEP = 0, 1


class Exchanged(NamedTuple):
    """The messages of all ranks in one exchange.

    Attributes:
        asked: the collectives that any rank asks for, each once, in the same order on every rank.
        resting: by rank that rests, the place and its numbers.
        meeting: by rank that has come to a meeting, its number.
        expected: the collectives that all ranks expect next.
    """

    asked: list[Asked]
    resting: dict[int, list[int]]
    meeting: dict[int, int]
    expected: list[Asked]


class Rounds:
    """The order of the collectives of one attached model.

    Args:
        control: a group for the exchanges.
        join: `join(kind, unit)` begins a collective that this rank has not asked for, and returns what waits for it.
    """

    def __init__(self, control: Group, join: Callable[[int, int], Callable[[], object]]):
        self.control, self.join = control, join
        # Whether all ranks asked for the same collective in the last exchange.
        self.together = True
        # The collectives that all ranks make next, in this order. One that raises before it is sent stays: others wait.
        self.promised: deque[Asked] = deque()
        # How many collectives this rank promises at most: one more after each exchange in which all asked for the same.
        self.trust = 1

    def perform(
        self,
        kind: int,
        unit: int,
        begin: Callable[[], Callable[[], Any]],
        ahead: Callable[[int], list[Asked]] = lambda most: [],
        early: Callable[[Asked, Asked], bool] = lambda now, then: False,
    ) -> Any:
        """Make the collective `(kind, unit)`, and those that other ranks ask for; returns the result of the first.

        Args:
            kind: of the collective.
            unit: whose parameters or gradients it moves.
            begin: begins it, and returns a function that waits for it and returns its result.
            ahead: `ahead(n)` returns the collectives that this rank expects to ask for next, at most `n`.
            early: `early(now, then)` may begin the promised collective `then` while `now` is under way; whether it did.
        """
        mine = (kind, unit)
        while self.promised:
            if self.promised[0] == mine:
                return self._next(begin, early)
            self.trust = 1
            self._join_next()
        found = self._exchange(kind, unit, [*chain.from_iterable(ahead(self.trust))])
        self.promised.extend(found.asked)
        self.together = found.asked == [mine] and not found.resting and not found.meeting
        if self.together:
            self.trust = min(MOST_PROMISED, self.trust + 1)
            self.promised.extend(found.expected)
            return self._next(begin, early)
        result: Any = None
        while self.promised:
            if self.promised[0] == mine:
                result = self._next(begin)
            else:
                self._join_next()
        return result

    def _next(
        self, begin: Callable[[], Callable[[], Any]], early: Callable[[Asked, Asked], bool] = lambda now, then: False
    ) -> Any:
        """Make the next promised collective; the one after it may begin before it has ended."""
        end = begin()
        now = self.promised.popleft()
        if self.promised and early(now, self.promised[0]):
            self.promised.popleft()
        return end()

    def _join_next(self) -> None:
        """Take part in the next promised collective, which this rank has not asked for."""
        self._next(partial(self.join, *self.promised[0]))

    def _join_all(self, asked: Sequence[Asked] = ()) -> None:
        """Take part in what was promised and in what others ask for: this rank asks for none of it."""
        if self.promised:
            self.trust = 1
        self.promised.extend(asked)
        while self.promised:
            self._join_next()

    def rest(self, place: int = CALL, numbers_of: Callable[[], Sequence[int]] = tuple) -> list[list[int]]:
        """Return once no rank asks for anything more; until then take part.

        A rest at a step ends once all ranks rest at a step: a rank between two calls of the model will ask for more
        before its step. A rest between two calls ends wherever the others rest.

        Args:
            place: where this rank rests.
            numbers_of: at most `NUMBERS` numbers to send to the others; joined collectives may change them.

        Returns:
            The numbers of each rank, in rank order, if all rest at a step; else nothing. They cost no message.
        """
        if self.promised:
            self._join_all()
        while True:
            numbers = numbers_of()
            asked, resting, meeting, _ = self._exchange(REST, place, numbers)
            if asked:
                self._join_all(asked)
            elif place == CALL:
                # All rest, or some have come to a meeting and wait for this rank there.
                return []
            elif not meeting and min(resting.values())[0] >= place:
                return [said[1 : 1 + len(numbers)] for said in resting.values()]

    def meet(self, what: Callable[[], int]) -> str:
        """Return once all ranks have come to the same meeting; until then take part in what they ask for.

        Args:
            what: returns the number of this rank's meeting, not negative; asked before each exchange, since collectives
                that this rank joins may change it.

        Returns:
            Where the other ranks are, if one of them will not come; else an empty string. All that came get the same.
        """
        if self.promised:
            self._join_all()
        while True:
            mine = what()
            asked, resting, meeting, _ = self._exchange(MEET, mine)
            if asked:
                self._join_all(asked)
                continue
            if len(set(meeting.values())) > 1:
                return f"ranks {sorted(meeting)} have come to different ones"
            at_step = sorted(rank for rank, said in resting.items() if said[0] == STEP)
            if at_step:
                return f"ranks {sorted(meeting)} ask for it, and ranks {at_step} are at opt.step()"
            if not resting:
                return ""

    def _exchange(self, kind: int, unit: int, more: Sequence[int] = ()) -> Exchanged:
        """Exchange what ranks ask for; `more` is what this one expects next, or the numbers of a rest."""
        mine = [kind, unit, *more]
        sent = torch.tensor(mine + [NOTHING] * (WIDTH - len(mine)), dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(WIDTH * self.control.size)
        all_gather_into(every, sent, self.control)
        rows = every.reshape(-1, WIDTH).tolist()
        if rows.count(rows[0]) == len(rows):
            # Nearly always: all ask for and expect the same, or all rest or meet.
            said: list[int] = rows[0][1:]
            if kind == REST:
                return Exchanged([], dict.fromkeys(range(len(rows)), said), {}, [])
            if kind == MEET:
                return Exchanged([], {}, dict.fromkeys(range(len(rows)), unit), [])
            return Exchanged([(kind, unit)], {}, {}, list(zip(more[::2], more[1::2], strict=True)))
        return Exchanged(
            sorted({(k, u) for k, u, *_ in rows if k > REST}),
            {i: row[1:] for i, row in enumerate(rows) if row[0] == REST},
            {i: u for i, (k, u, *_) in enumerate(rows) if k == MEET},
            _common(rows),
        )


def _common(rows: list[list[int]]) -> list[Asked]:
    """What all ranks expect next, up to where one expects something else or nothing."""
    found: list[Asked] = []
    for i in range(2, 2 + NUMBERS, 2):
        first = rows[0][i], rows[0][i + 1]
        if first[0] == NOTHING or any((row[i], row[i + 1]) != first for row in rows):
            break
        found.append(first)
    return found
