"""Gradients leave during backward: bucket after bucket, in an order that no rank's graph can change.

Backward has no end that could be observed: an unused parameter never fires, checkpointing nests backwards, a
kept graph runs again. So nothing here waits for one. A bucket is sent once all of its leaves have a
gradient and the bucket before it is on its way; whatever is left, `settle` sends. A *round* is one pass over
all buckets, with the first gradient that waits of each leaf. Those of later backwards queue: added up beforehand
they would be fewer messages, but how many had come by then is a matter of time, and so would be the last bits
of the sum. What must be equal on all ranks is the number of rounds. The first one needs no agreement, since
`settle` always completes it. Before every further one ranks tell each other whether they want it, and nobody
waits long for the answer before `settle`: until then another rank may be in a collective of the user's, which
waits for this one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ranges import VIEW, WAIT, ranged
from ..core.coalesced_views import Like, cut
from ..core.layout import Leaf
from ..core.views import Wire
from ..ranks.group import Group
from .round_agreement import Question, check_marks
from .unit_plans import Sum

# Buckets under way at once. Each holds one buffer; more would make a full gradient of them.
IN_FLIGHT = 2
# Gradients of one leaf that may wait before backward does.
DEPTH = 2
# Seconds that backward waits for other ranks to take a bucket off its hands, before it goes on with more
# under way or waiting: a rank that has no gradient for that bucket sends it at `settle` only, and may be held up on the
# way there by a collective of the user's that waits for this very rank.
PATIENCE = 1.0


class Stream:
    """Reduces the gradients of resident parameters as they arrive.

    Args:
        wire: what carries them, on a group of this stream's own.
        control: a group for the agreement at `settle`, apart from the buckets under way.
        leaves: trainable leaves, in the order in which backward is expected to reach them.
        like: what the gradient of each is.
        done: takes a reduced gradient to its place; called in a fixed order.
        marks: names of the numbers that `settle` compares.
        name: of the transform that reduces, for profilers.
    """

    def __init__(
        self,
        wire: Wire,
        control: Group,
        leaves: Sequence[Leaf],
        like: dict[str, Like],
        done: Callable[[Leaf, Tensor], None],
        marks: tuple[str, ...],
        name: str,
    ):
        self.question = Question(control, marks)
        self.wire, self.control, self.done, self.name = wire, control, done, name
        self.buckets = [_sum_of(bucket, like) for bucket in cut(leaves, {p: x.dtype for p, x in like.items()})]
        self.devices = [like[bucket.leaves[0].path].device for bucket in self.buckets]
        self.home = {leaf.path: i for i, bucket in enumerate(self.buckets) for leaf in bucket.leaves}
        self.pending: dict[str, deque[Tensor]] = {}
        self.missing = [len(bucket.leaves) for bucket in self.buckets]
        self.next = 0
        self.rounds = 0
        self.patience = PATIENCE
        self.dropping = False
        self.flying: deque[tuple[Any, Tensor, Tensor, int]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing has arrived since all was settled."""
        return not (self.pending or self.rounds or self.next)

    def arrived(self, path: str, grad: Tensor) -> None:
        """A gradient of this rank. It belongs to the stream from now on."""
        queue = self.pending.setdefault(path, deque())
        queue.append(grad)
        if len(queue) == 1:
            self.missing[self.home[path]] -= 1
        while self.missing[self.next] == 0 and self._may_begin(len(queue) > DEPTH):
            self._send()

    def _may_begin(self, behind: bool) -> bool:
        """Whether the next bucket's round is one that all ranks know of; asks them if it is not."""
        question = self.question
        if self.rounds < question.allowed:
            return True
        work = question.ask(True)
        if work.is_completed() or (behind and self._comes(work, "all_gather")):
            question.answer()
        return self.rounds < question.allowed

    def _comes(self, work: Any, what: str) -> bool:
        """Wait for a collective, but not for ever. Whether it is done."""
        with ranged(WAIT, what):
            if _within(self.patience, work):
                return True
        # Most likely the program is one where it happens at each step.
        self.patience /= 4
        return False

    def _send(self) -> None:
        """Send the next bucket with what has arrived for it."""
        leaves, numels, dtype = self.buckets[self.next]
        with ranged(VIEW, self.name):
            with torch.no_grad():
                flat = [_oldest(self.pending, leaf.path) for leaf in leaves]
                buffer = self.wire.pack(flat, leaves, numels, dtype, self.devices[self.next])
            del flat
            work, out = self.wire.send(buffer, async_op=True)
        # The buffer must live until the work is done.
        self.flying.append((work, out, buffer, self.next))
        self.missing[self.next] = sum(leaf.path not in self.pending for leaf in leaves) if self.pending else len(leaves)
        self.next = (self.next + 1) % len(self.buckets)
        self.rounds += self.next == 0
        self._hold_back()

    def _hold_back(self) -> None:
        """Keep few buckets under way."""
        what = "reduce_scatter" if self.wire.cuts else "all_reduce"
        while len(self.flying) > IN_FLIGHT and self._comes(self.flying[0][0], what):
            self._land()

    def _land(self) -> None:
        work, out, _, i = self.flying.popleft()
        work.wait()
        leaves, numels = self.buckets[i][:2]
        if self.dropping:
            return
        with torch.no_grad():
            for leaf, g in zip(leaves, self.wire.unpack(out, leaves, numels), strict=True):
                if g is not None:
                    # Parts of one buffer, which all leaves of the bucket keep alive together.
                    self.done(leaf, g)

    def settle(self, marks: dict[str, int], noticed: bool = False) -> bool:
        """Send what is left, on every rank as many rounds, and wait for all of it.

        Args:
            marks: numbers that must be equal on all ranks, by the names it was made with.
            noticed: something of this rank that the others are to know of.

        Returns:
            Whether any rank has noticed something.

        Raises:
            RuntimeError: on every rank, if a number differs; each rank's value is named.
        """
        question = self.question
        while True:
            while self.rounds < question.allowed:
                self._send()
            question.ask(bool(self.pending), marks, noticed)
            rows, found = question.answer()
            if self.rounds == question.allowed:
                break
        while self.flying:
            self._land()
        self.rounds, question.allowed = 0, 1
        if rows.count(rows[0]) < len(rows):
            check_marks([row[1:] for row in rows], list(marks), self.control)
        return found

    def discard(self, marks: dict[str, int]) -> None:
        """Forget what has arrived. Rounds that other ranks have begun are completed, with zeros from here."""
        self.pending.clear()
        self.missing = [len(bucket.leaves) for bucket in self.buckets]
        self.dropping = True
        try:
            self.settle(marks)
        finally:
            self.dropping = False


def _within(seconds: float, work: Any) -> bool:
    """Whether an operation ends in time: see `PATIENCE`."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(5e-5)
    return True


def _sum_of(bucket: list[Leaf], like: dict[str, Like]) -> Sum:
    return Sum(bucket, [like[leaf.path].numel for leaf in bucket], like[bucket[0].path].dtype)


def _oldest(pending: dict[str, deque[Tensor]], path: str) -> Tensor | None:
    """The first gradient of a leaf that waits, flat, which it does no longer."""
    queue = pending.get(path)
    if queue is None:
        return None
    grad = queue.popleft()
    if not queue:
        del pending[path]
    return grad.reshape(-1)
