"""Runs collectives in one order on all ranks, though each rank asks for them in the order of its own graph.

With parameters that are gathered on use, collectives begin inside forward and backward, where each rank follows its own
graph. Before each collective the ranks exchange which one they ask for. Mostly it is the same one. If not, all ranks
join each collective that any of them asks for: an all-gather needs this rank's shard even if this rank does not use the
result, and this rank adds zeros to a sum of gradients. A rank that has nothing more to ask for waits at a *rest* and
joins others' collectives, until every rank rests (cf. torch's Join).

The exchange is one small message per collective. A fixed order is not possible: only a rank's own forward knows which
parameters it needs next. But with each exchange a rank also sends the collectives that it expects to ask for next. As
far as all ranks expect the same, they *promise* it: those collectives follow in that order without an exchange. A rank
that then needs something else joins them all the same, at the latest at its next rest. A promised collective that some
rank does not use costs its bytes, and after it promises are short again.

A rank cannot join a collective that needs its shard of a tensor of the user's. Such a collective is a *meeting*: a rank
joins others' collectives until all ranks have come to the same meeting. If one never will, all get an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from .._errors import explain
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
        join: `join(kind, unit)` begins a collective that this rank has not asked for. It returns a function that waits.
    """

    def __init__(self, control: Group, join: Callable[[int, int], Callable[[], object]]):
        self.control, self.join = control, join
        # Whether all ranks asked for the same collective in the last exchange.
        self.together = True
        # The collectives that all ranks make next, in this order. One that raises before it is sent stays: others wait.
        self.promised: deque[Asked] = deque()
        # How many collectives this rank promises at most: one more after each exchange in which all asked for the same.
        self.trust = 1
        # Whether a second Ctrl-C came while a collective was handed over; the first one is held.
        self.cut = False

    def perform(
        self,
        kind: int,
        unit: int,
        begin: Callable[[], Callable[[], Any]],
        ahead: Callable[[int], list[Asked]] = lambda most: [],
        early: Callable[[Asked, Asked], bool] = lambda now, then: False,
    ) -> Any:
        """Run the collective `(kind, unit)`, and those that other ranks ask for. Return the result of the first.

        Args:
            kind: of the collective.
            unit: whose parameters or gradients it moves.
            begin: begins it, and returns a function that waits for it and returns its result.
            ahead: `ahead(n)` returns the collectives that this rank expects to ask for next, at most `n`.
            early: `early(now, then)` may begin the promised collective `then` while `now` runs, and returns whether it
                did.
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
        """Run the next promised collective; the one after it may begin before it has ended."""
        try:
            end = begin()
            now = self.promised.popleft()
            if self.promised and early(now, self.promised[0]):
                self.promised.popleft()
        except KeyboardInterrupt:
            self.cut = True
            raise
        return end()

    def _join_next(self) -> None:
        """Join the next promised collective, which this rank has not asked for."""
        self._next(partial(self.join, *self.promised[0]))

    def _join_all(self, asked: Sequence[Asked] = ()) -> None:
        """Join the promised collectives and those that others ask for. This rank asks for none of them."""
        if self.promised:
            self.trust = 1
        self.promised.extend(asked)
        while self.promised:
            self._join_next()

    def rest(self, place: int = CALL, numbers_of: Callable[[], Sequence[int]] = tuple) -> list[list[int]]:
        """Join others' collectives until no rank asks for more.

        A rest at a step ends once all ranks rest at a step: a rank between two calls of the model will ask for more
        before its step. A rest between two calls ends wherever the others rest.

        Args:
            place: where this rank rests.
            numbers_of: at most `NUMBERS` numbers to send to the others; joined collectives may change them.

        Returns:
            The numbers of each rank, in rank order, if all rest at a step; else an empty list. They cost no message.
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
        """Join others' collectives until all ranks have come to the same meeting.

        Args:
            what: returns the number of this rank's meeting, not negative. It is called before each exchange, since
                collectives that this rank joins may change the number.

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
        """Exchange the ranks' requests. `more` are the collectives that this one expects next, or a rest's numbers."""
        if self.cut:
            raise cut_short()
        mine = [kind, unit, *more]
        sent = torch.tensor(mine + [NOTHING] * (WIDTH - len(mine)), dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(WIDTH * self.control.size)
        try:
            all_gather_into(every, sent, self.control)
        except KeyboardInterrupt:
            self.cut = True
            raise
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


def cut_short() -> RuntimeError:
    """The error of every collective after one that a second Ctrl-C has stopped."""
    wrong = "a collective between ranks after Ctrl-C twice, of which the second came while one was handed over"
    why = "this rank and the others no longer know which one comes next; the first Ctrl-C waits until all have it"
    right = "the ranks started anew, and zf.load(directory, like=opt) to go on from what was saved"
    return RuntimeError(explain(wrong, why, right))


def _common(rows: list[list[int]]) -> list[Asked]:
    """The collectives that all ranks expect next, up to where one expects something else or nothing."""
    found: list[Asked] = []
    for i in range(2, 2 + NUMBERS, 2):
        first = rows[0][i], rows[0][i + 1]
        if first[0] == NOTHING or any((row[i], row[i + 1]) != first for row in rows):
            break
        found.append(first)
    return found
