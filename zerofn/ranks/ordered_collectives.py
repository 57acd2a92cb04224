"""Runs collectives in one order on all ranks, though each rank asks for them in the order of its own graph.

With parameters that are gathered on use, collectives begin inside forward and backward, where each rank follows its own
graph. Only a rank's own forward knows which parameters it needs next. This is how ranks agree:

1. Before a collective the ranks *exchange* a message each: which one they ask for. All ranks run each one that any of
   them asks for. A rank *joins* those that it has not asked for: an all-gather needs its shard even if it does not use
   the result, and it adds zeros to a sum of gradients.
2. A rank that has nothing more to ask for *rests*, after a call of the model, after a backward, and at a step. It joins
   what others ask for, until every rank rests (cf. torch's Join).
3. A rank mostly does what it did the last time. So it remembers what it asked for from the first unit of a forward to
   the end of its backward, a *pass*. With a message it sends a digest of what followed it the last time.
   If the digests of all ranks are equal, all of that is *promised*: it is run in this order without another message.
   A rank that now needs something else joins what is promised first, and then asks.
4. A promise ends at the next rest, which is a message. But a rank that has done the same in several passes *trusts*.
   If all ranks do, the rests of the pass are promised too: nobody waits there. So a micro-step has two messages at any
   depth: at the first collective of forward, and at the step. Where all that forward uses is still full, the first one
   is the rest after forward.

A rest without a message has a price. A rank may ask for more than was promised while the others have passed the rest.
It then waits for them until their step. If they wait for it in a collective of the user's, none goes on. So a rest
stays a message for good once collectives of others were seen between it and what followed.

A promised collective that no rank uses costs its bytes. A rank that joins a sum with zeros may add to it later: the sum
is complete at the next rest with a message, at the latest at the step. Where a sum is used before (`in_backward`),
sums are not promised: each is exchanged.

A rank cannot join a collective that needs its shard of a tensor of the user's. Such a collective is a *meeting*: a rank
joins others' collectives until all ranks have come to the same meeting. If one never will, all get an error.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .._errors import explain
from .collectives import all_gather_into, as_rows
from .group import Group

# A kind of collective, which is a positive number, and the unit whose parameters or gradients it moves.
Asked = tuple[int, int]
# These stand in place of a kind. REST: this rank rests, and the unit is the place. MEET: it has come to a meeting, and
# the unit is its number. AGAIN: it goes on with a unit that needs no collective now.
REST, MEET, AGAIN = 0, -2, -3
# Where a rank rests: between two calls of the model, after a backward, or at a step.
CALL, BACKWARD, STEP = 0, 1, 2
# Stands in place of a digest if a rank expects nothing or does not trust, and fills the end of a message.
NOTHING = -1
# How many numbers a rank may send at a rest, and how many one message has.
NUMBERS = 16
WIDTH = 4 + NUMBERS


# ----------------------------------------------------------------------------------------------------------------------
# `Habits` remembers what this rank asks for in a pass, and what it asked for the last time after the same start.


# How many passes are remembered, and how long each may be.
MOST_PASSES, LONGEST = 16, 1 << 13
# How often in a row a pass must have been the same, with nothing to join, until this rank trusts it.
TRUSTED = 2


class Pass(NamedTuple):
    """The requests that followed the start of a pass the last time, and how often the same had followed before."""

    followed: tuple[Asked, ...]
    times: int


NEVER = Pass((), -1)


class Habits:
    """Remembers what this rank has asked for, to expect it again.

    Args:
        by_themselves: the kinds of collectives that are exchanged each time.
        kind_of_pass: tells passes apart that begin in the same way, and go on in different ones.

    Attributes:
        ahead: what this rank expects to ask for next, to the end of the pass.
        joined: whether this rank has joined a collective in this pass that it had not asked for.
        loud: the places where a rest is a message in any case.
    """

    def __init__(self, by_themselves: Collection[int], kind_of_pass: Callable[[], Hashable]):
        self.by_themselves, self.kind_of_pass = by_themselves, kind_of_pass
        self.known: OrderedDict[Hashable, Pass] = OrderedDict()
        # The first request of the pass, and the kind of the pass; `None` between passes.
        self.start: Hashable = None
        self.done: list[Asked] = []
        self.ahead: deque[Asked] = deque()
        self.joined = self.trusts = False
        self.loud: set[int] = set()

    def note(self, asked: Asked) -> None:
        """Note what this rank asks for, or that it rests or goes on with a unit."""
        if self.start is None:
            if asked[0] != REST:
                # A unit that needs no collective begins a pass too. Then the rest after this call promises backward.
                self.start = asked, self.kind_of_pass()
                last = self.known.get(self.start, NEVER)
                self.ahead.extend(last.followed)
                self.trusts = last.times >= TRUSTED
            return
        if len(self.done) <= LONGEST:
            self.done.append(asked)
        if asked in self.ahead and (asked[0] != AGAIN or asked == self.ahead[0]):
            # The collectives before it in `ahead` are not asked for this time.
            while self.ahead.popleft() != asked:
                pass

    def end(self) -> None:
        """Remember the pass that ends here."""
        if self.start is not None and len(self.done) <= LONGEST:
            last, now = self.known.pop(self.start, NEVER), tuple(self.done)
            same = last.followed == now and not self.joined
            self.known[self.start] = Pass(now, last.times + 1 if same else 0)
            if len(self.known) > MOST_PASSES:
                self.known.popitem(last=False)
        self.start, self.joined, self.trusts = None, False, False
        self.done.clear()
        self.ahead.clear()

    def promises(self) -> tuple[tuple[Asked, ...], tuple[Asked, ...]]:
        """The requests that this rank can promise: up to the next rest; then, if it trusts, those behind it too.

        The second ends at a rest that needs a message.
        """
        found: list[Asked] = []
        rest: int | None = None
        for kind, unit in self.ahead:
            if kind in self.by_themselves or (kind == REST and unit in self.loud):
                break
            if kind == REST and unit != STEP and rest is None:
                rest = len(found)
            found.append((kind, unit))
        return tuple(found[:rest]), tuple(found) if self.trusts else ()


# ----------------------------------------------------------------------------------------------------------------------
# `Rounds` runs what ranks ask for and what they promise.


class Exchanged(NamedTuple):
    """The messages of all ranks in one exchange.

    Attributes:
        asked: the collectives that any rank asks for, each once, in the same order on every rank.
        resting: by rank that rests, the place and its numbers.
        meeting: by rank that has come to a meeting, its number.
        promise: what all ranks do next, behind these.
    """

    asked: list[Asked]
    resting: dict[int, list[int]]
    meeting: dict[int, int]
    promise: Iterable[Asked]


class Rounds:
    """The order of the collectives of one attached model.

    Args:
        control: a group for the exchanges.
        join: `join(kind, unit)` begins a collective that this rank has not asked for. It returns a function that waits.
        early: `early(kind, unit)` may begin the promised collective that comes next before this rank asks for it, and
            returns whether it did.
        in_turn: brings what is promised into the order in which it is run.
        by_themselves: the kinds of collectives that are never promised.
        kind_of_pass: tells passes apart that begin with the same collective.
        others: how many collectives were begun that are not of this model.
    """

    def __init__(
        self,
        control: Group,
        join: Callable[[int, int], Callable[[], object]],
        early: Callable[[int, int], bool] = lambda kind, unit: False,
        in_turn: Callable[[Iterable[Asked]], Iterable[Asked]] = lambda promise: promise,
        by_themselves: Collection[int] = (),
        kind_of_pass: Callable[[], Hashable] = lambda: None,
        others: Callable[[], int] = lambda: 0,
    ):
        self.control, self.join, self.early, self.in_turn, self.others = control, join, early, in_turn, others
        self.habits = Habits(by_themselves, kind_of_pass)
        # Whether all ranks asked for the same collective in the last exchange.
        self.together = True
        # The requests that all ranks run next, in order. One that raises before it is sent stays: others wait for it.
        self.promised: deque[Asked] = deque()
        # How often this rank has rested since all were at a step or a meeting, with a message or without.
        self.rests = 0
        # Where this rank rested last, and how many collectives of others there had been.
        self.rested: tuple[int, int] | None = None
        # Whether a second Ctrl-C came while a collective was handed over; the first one is held.
        self.cut = False

    def perform(self, kind: int, unit: int, begin: Callable[[], Callable[[], Any] | None]) -> Any:
        """Run the collective `(kind, unit)`, and those that other ranks ask for. Return the result of the first.

        Args:
            kind: of the collective.
            unit: whose parameters or gradients it moves.
            begin: begins it, and returns a function that waits for it and returns its result; `None` if there is none.
        """
        mine = (kind, unit)
        if self.rested is not None:
            self._listen()
        self.habits.note(mine)
        while self.promised and self.promised[0] != mine:
            self._join_next()
        if self.promised:
            return self._run_next(begin, early=True)
        found = self._exchange(kind, unit)
        self.promised.extend(found.asked)
        self.together = found.asked == [mine] and not found.resting and not found.meeting
        if self.together:
            self.promised.extend(found.promise)
            return self._run_next(begin, early=True)
        result: Any = None
        while self.promised:
            if self.promised[0] == mine:
                result = self._run_next(begin)
            else:
                self._join_next()
        return result

    def go_on(self, asked: Asked) -> None:
        """Tell that this rank goes on with a unit that needs no collective now: it was begun early, or is here."""
        if self.rested is not None:
            self._listen()
        self.habits.note(asked)
        if asked[0] == AGAIN and self.promised and self.promised[0] == asked:
            # Only an AGAIN is removed. A promised collective stays even if this rank has its result: others wait.
            self.promised.popleft()
        if self.promised and self.promised[0][0] > REST:
            self._begin_early()

    def _run_next(self, begin: Callable[[], Callable[[], Any] | None], early: bool = False) -> Any:
        """Run the next promised collective; the one after it may begin before it has ended."""
        try:
            end = begin()
            self.promised.popleft()
            if early and self.promised and self.promised[0][0] > REST:
                self._begin_early()
        except (KeyboardInterrupt, SystemExit):
            self.cut = True
            raise
        return None if end is None else end()

    def _begin_early(self) -> None:
        if self.early(*self.promised[0]):
            self.promised.popleft()

    def _join_next(self) -> None:
        """Join the next promised collective, which this rank has not asked for; pass a rest, which is none."""
        kind, unit = self.promised[0]
        if kind <= REST:
            self.promised.popleft()
            return
        self.habits.joined = True
        self._run_next(partial(self.join, kind, unit))

    def _join_all(self, asked: Sequence[Asked] = ()) -> None:
        """Join the promised collectives and those that others ask for. This rank asks for none of them."""
        self.promised.extend(asked)
        while self.promised:
            self._join_next()

    def rest(
        self, place: int = CALL, numbers_of: Callable[[], Sequence[int]] = tuple, ends: bool = True
    ) -> list[list[int]]:
        """Join others' collectives until no rank asks for more, or until all have promised to rest here.

        A rest at a step ends once all ranks rest at a step: a rank between two calls of the model will ask for more
        before its step. Another rest ends once all ranks have rested as often, wherever that is.

        Args:
            place: where this rank rests.
            numbers_of: at most `NUMBERS` numbers to send to the others; joined collectives may change them.
            ends: whether a pass ends here.

        Returns:
            The numbers of each rank, in rank order, if all rest at a step; else an empty list. They cost no message.
        """
        if self.rested is not None:
            self._listen()
        self.habits.note((REST, place))
        if ends:
            self.habits.ahead.clear()
        try:
            return self._rest(place, numbers_of)
        finally:
            if ends:
                self.habits.end()
            if place != STEP and place not in self.habits.loud:
                self.rested = place, self.others()

    def _rest(self, place: int, numbers_of: Callable[[], Sequence[int]]) -> list[list[int]]:
        self.rests += 1
        while self.promised:
            if self.promised[0][0] == REST and place != STEP:
                self.promised.popleft()
                return []
            self._join_next()
        while True:
            numbers = numbers_of() if place == STEP else [self.rests]
            asked, resting, meeting, promise = self._exchange(REST, place, numbers)
            if asked:
                self._join_all(asked)
            elif place == STEP:
                if not meeting and min(resting.values())[0] == STEP:
                    self.rests = 0
                    return [entry[1 : 1 + len(numbers)] for entry in resting.values()]
            elif meeting or all(at == STEP or rests >= self.rests for at, rests, *_ in resting.values()):
                # Other ranks may have come to a meeting, where they wait for this one.
                self.promised.extend(promise)
                return []

    def _listen(self) -> None:
        """Look whether collectives of others followed the last rest."""
        assert self.rested is not None
        (place, before), self.rested = self.rested, None
        if self.others() != before:
            self.habits.loud.add(place)

    def meet(self, what: Callable[[], int]) -> str:
        """Join others' collectives until all ranks have come to the same meeting. A pass ends there.

        Args:
            what: returns the number of this rank's meeting, not negative. It is called before each exchange, since
                collectives that this rank joins may change the number.

        Returns:
            Where the other ranks are, if one of them will not come; else an empty string. All that came get the same.
        """
        if self.rested is not None:
            self._listen()
        self.habits.end()
        self._join_all()
        while True:
            mine = what()
            asked, resting, meeting, _ = self._exchange(MEET, mine)
            if asked:
                self._join_all(asked)
                continue
            if len(set(meeting.values())) > 1:
                return f"ranks {sorted(meeting)} have come to different ones"
            at_step = sorted(rank for rank, entry in resting.items() if entry[0] == STEP)
            if at_step:
                return f"ranks {sorted(meeting)} ask for it, and ranks {at_step} are at opt.step()"
            if not resting:
                self.rests = 0
                return ""

    def _exchange(self, kind: int, unit: int, numbers: Sequence[int] = ()) -> Exchanged:
        """Exchange the ranks' requests, with digests of what each expects next, and numbers at a rest."""
        if self.cut:
            raise cut_short()
        promises = next_ones, rest = self.habits.promises()
        # Hashes of numbers are the same in every process.
        digests = hash(next_ones) if next_ones else NOTHING, hash(rest) if rest else NOTHING
        mine = [kind, unit, *digests, *numbers]
        sent = torch.tensor(mine + [NOTHING] * (WIDTH - len(mine)), dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(WIDTH * self.control.size)
        try:
            all_gather_into(every, sent, self.control, numbers=True)
        except (KeyboardInterrupt, SystemExit):
            self.cut = True
            raise
        rows = as_rows(every.reshape(-1, WIDTH), sent)
        _, _, *expected = rows[0][:4]
        # together: all ranks ask for the same. alike: for each of the two digests, all ranks have the same one.
        together, alike = True, [expected[0] != NOTHING, expected[1] != NOTHING]
        asked: set[Asked] = set()
        resting: dict[int, list[int]] = {}
        meeting: dict[int, int] = {}
        if rows[0] is rows[-1]:
            # All messages are equal, as nearly always: one loop less over the ranks.
            k, u, first, second, *rest_numbers = rows[0]
            ranks, place = range(len(rows)), [u, *rest_numbers]
            asked = {(k, u)} if k > REST else asked
            resting = dict.fromkeys(ranks, place) if k == REST else resting
            meeting = dict.fromkeys(ranks, u) if k == MEET else meeting
            rows = []
        for i, (k, u, first, second, *rest_numbers) in enumerate(rows):
            together &= k == kind and (u == unit or kind == REST) and rest_numbers[0] == rows[0][4]
            alike[0] &= first == expected[0]
            alike[1] &= second == expected[1]
            if k > REST:
                asked.add((k, u))
            elif k == REST:
                resting[i] = [u, *rest_numbers]
            elif k == MEET:
                meeting[i] = u
        promise: Iterable[Asked] = ()
        if together and any(alike):
            promise = self.in_turn(promises[alike[1]])
        return Exchanged(sorted(asked), resting, meeting, promise)


def cut_short() -> RuntimeError:
    """The error of every collective after one that a second Ctrl-C has stopped."""
    wrong = "a collective between ranks after Ctrl-C twice, of which the second came while one was handed over"
    why = "this rank no longer knows which collective comes next on the others; a first Ctrl-C waits for the collective"
    right = "the ranks started anew, and zf.load(directory, like=opt) to go on from what was saved"
    return RuntimeError(explain(wrong, why, right))
