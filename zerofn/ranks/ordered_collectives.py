"""Collectives in the order in which ranks ask for them, whether or not they ask for the same.

A model whose parameters are gathered on use issues collectives from inside forward and backward, where each
rank follows its own graph. Before each of them the ranks tell each other what they want. Mostly it is
the same and is done. Where it differs, all ranks take part in everything that any of them wants: a
gather needs this rank's shard whether or not this rank uses the result, and to a sum of gradients it adds
zeros. A rank with nothing to do waits at a *rest*, taking part, until every rank rests.

The exchange costs one small message per collective. The alternative, a fixed order, cannot be had here: which
parameters a rank needs next, only its own forward knows. But each rank tells as well what it expects to ask for next.
As far as all expect the same they promise it to each other: it is done in that order without another exchange, by a
rank that comes to need something else as well, and where none follows a rest does it. A promise that was not wanted
costs its collectives, and promises are short again after it.

What nobody can take part in without having what the others have (a part of a tensor of the user's) is a *meeting*: a
rank waits, taking part in what others want, until all ranks have come to the same; if one never will, all are told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from .collectives import all_gather_into
from .group import Group

Asked = tuple[int, int]  # a kind of collective, and a unit
REST = 0
NOTHING = -1
# Instead of a kind, with what a rank has come to in the place of a unit.
MEET = -2
# How much is promised at most, and how many numbers are told in its place at a rest.
MOST = 8
TOLD = 2 * MOST
# Where a rank rests: between two calls of the model, or at a step.
CALL, STEP = 0, 1


class Round(NamedTuple):
    """What ranks have told each other.

    Attributes:
        asked: what any of them asks for, once each in a fixed order.
        resting: by rank, where those rest that do, and the numbers that they tell.
        meeting: what others have come to, by rank.
        expected: what all expect next.
    """

    asked: list[Asked]
    resting: dict[int, list[int]]
    meeting: dict[int, int]
    expected: list[Asked]


class Rounds:
    """The protocol of one attached model.

    Args:
        control: a group for the exchange.
        join: `join(kind, unit)` takes part in a collective that this rank has no use for.
    """

    def __init__(self, control: Group, join: Callable[[int, int], None]):
        self.control, self.join = control, join
        # Whether all ranks asked for the same in the last exchange.
        self.together = True
        # What all ranks do next, in this order.
        self.promised: deque[Asked] = deque()
        # How much a rank promises at most: one more each time it was right.
        self.trust = 1

    def perform(
        self,
        kind: int,
        unit: int,
        begin: Callable[[], Callable[[], Any]],
        ahead: Callable[[int], list[Asked]] = lambda most: [],
        early: Callable[[Asked, Asked], bool] = lambda now, then: False,
    ) -> Any:
        """The collective `(kind, unit)`, together with what other ranks ask for.

        Args:
            kind: of collective.
            unit: whose.
            begin: begins it; what it returns ends it, and gives its result.
            ahead: `ahead(n)` gives what this rank expects to ask for after it, at most `n` of them.
            early: `early(now, then)` begins what all do next before this one has ended, if it may; whether it has.
        """
        mine = (kind, unit)
        while self.promised:
            asked = self.promised.popleft()
            if asked == mine:
                return self._both(mine, begin, early)
            self._keep(asked)
        found = self._exchange(kind, unit, [*chain.from_iterable(ahead(self.trust))])
        self.together = found.asked == [mine] and not found.resting and not found.meeting
        if self.together:
            self.trust = min(MOST, self.trust + 1)
            self.promised.extend(found.expected)
        result: Any = None
        for asked in found.asked:
            if asked == mine:
                result = self._both(mine, begin, early)
            else:
                self.join(*asked)
        return result

    def _both(self, mine: Asked, begin: Callable[[], Callable[[], Any]], early: Callable[[Asked, Asked], bool]) -> Any:
        """A collective, and what comes after it if that may be under way beside it."""
        end = begin()
        if self.promised and early(mine, self.promised[0]):
            self.promised.popleft()
        return end()

    def _keep(self, asked: Asked) -> None:
        """Take part in what was promised and is not wanted here."""
        self.trust = 1
        self.join(*asked)

    def rest(self, place: int = CALL, told: Callable[[], Sequence[int]] = tuple) -> list[list[int]]:
        """Return once no rank wants anything any more; until then take part.

        A rest at a step ends with those of the other ranks: one that is only between two calls of the
        model will want more before its own step. One between two calls ends whatever the others rest at.

        Args:
            place: where this rank rests.
            told: at most `TOLD` numbers that it tells the others; what it joins meanwhile may change them.

        Returns:
            What each rank tells, in their order, if all rest at a step. It costs no message of its own.
        """
        while self.promised:
            self._keep(self.promised.popleft())
        while True:
            numbers = told()
            asked, resting, meeting, _ = self._exchange(REST, place, numbers)
            for kind, unit in asked:
                self.join(kind, unit)
            if not asked and place == CALL:
                # All rest; or some have come to a meeting, and wait for this rank to come there too.
                return []
            if not asked and not meeting and min(resting.values())[0] >= place:
                return [said[1 : 1 + len(numbers)] for said in resting.values()]

    def meet(self, what: Callable[[], int]) -> str:
        """Return once all ranks have come to the same; until then take part in what they ask for.

        Args:
            what: this rank has come to, a number that is not negative; what it joins meanwhile may change it.

        Returns:
            Where the other ranks are, if one of them will not come, and else nothing; all that are here are told.
        """
        while self.promised:
            self._keep(self.promised.popleft())
        while True:
            mine = what()
            asked, resting, meeting, _ = self._exchange(MEET, mine)
            for kind, unit in asked:
                self.join(kind, unit)
            if asked:
                continue
            if len(set(meeting.values())) > 1:
                return f"ranks {sorted(meeting)} have come to different ones"
            at_step = sorted(rank for rank, said in resting.items() if said[0] == STEP)
            if at_step:
                return f"ranks {sorted(meeting)} ask for it, and ranks {at_step} are at opt.step()"
            if not resting:
                return ""

    def _exchange(self, kind: int, unit: int, more: Sequence[int] = ()) -> Round:
        """Tell the others what this rank has come to; `more` are promises, or what is told at a rest."""
        mine = [kind, unit, *more]
        width = 2 + TOLD
        sent = torch.tensor(mine + [NOTHING] * (width - len(mine)), dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(width * self.control.size)
        all_gather_into(every, sent, self.control)
        rows = every.reshape(-1, width).tolist()
        if rows.count(rows[0]) == len(rows):
            # Nearly always: all want and expect the same, or all have come to the same.
            said: list[int] = rows[0][1:]
            if kind == REST:
                return Round([], dict.fromkeys(range(len(rows)), said), {}, [])
            if kind == MEET:
                return Round([], {}, dict.fromkeys(range(len(rows)), unit), [])
            return Round([(kind, unit)], {}, {}, list(zip(more[::2], more[1::2], strict=True)))
        return Round(
            sorted({(k, u) for k, u, *_ in rows if k > REST}),
            {i: row[1:] for i, row in enumerate(rows) if row[0] == REST},
            {i: u for i, (k, u, *_) in enumerate(rows) if k == MEET},
            _common(rows),
        )


def _common(rows: list[list[int]]) -> list[Asked]:
    """What all expect next, up to where one expects something else or nothing."""
    found: list[Asked] = []
    for i in range(2, 2 + TOLD, 2):
        first = rows[0][i], rows[0][i + 1]
        if first[0] == NOTHING or any((row[i], row[i + 1]) != first for row in rows):
            break
        found.append(first)
    return found
