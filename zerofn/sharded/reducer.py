"""Reduces gradients in buckets during backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from .._compat.tensors import read_grad, write_grad_alone
from .._errors import explain
from .._interrupts import interrupts_held
from .._profiler_ranges import VIEW, WAIT, ranged
from ..core.bucketed_views import Like, into_buckets
from ..core.layout import Leaf, Leaves
from ..core.view import Wire
from ..ranks.collectives import all_gather_into, as_rows
from ..ranks.group import Group
from ..ranks.ordered_collectives import cut_short
from .units import GradBucket

# ----------------------------------------------------------------------------------------------------------------------
# Ranks tell each other whether they have more gradients to reduce, and compare numbers of their steps.


# Bits of the first number that a rank sends.
MORE, NOTICED = 1, 2


class RoundAgreement:
    """Ranks agree whether there is one more round of reductions: there is if any rank wants one.

    Args:
        control: a group for it, not that of the reductions.
        marks: names of numbers that ranks send with it, to compare them.

    Attributes:
        allowed: how many rounds all ranks know of. The first one needs no agreement.
        opening: called on every rank before it sends anything of a step. It returns a function that is called before
            the first gradient is handed on.
    """

    def __init__(self, control: Group, marks: tuple[str, ...]):
        self.control, self.marks = control, marks
        self.allowed = 1
        # The request that is not answered yet: work handle, input, output.
        self.sent: tuple[Any, Tensor, Tensor] | None = None
        self.opening: Callable[[], Callable[[], None]] | None = None
        self.opened: Callable[[], None] | None = None
        # Whether a second Ctrl-C came while a collective was handed over; the first one is held.
        self.cut = False

    def begin(self) -> None:
        """Prepare for the first bucket of a step; also again after an error in front of it."""
        if self.opening is not None and self.opened is None:
            self.opened = self.opening()

    def begun(self) -> None:
        """Call the function that `opening` has returned, when the first bucket has arrived."""
        if self.opened is not None:
            self.opened()
            self.opened = None

    def ask(self, more: bool, marks: dict[str, int] | None = None, noticed: bool = False) -> Any:
        """Ask all ranks, unless they are asked already. Return the work handle.

        Args:
            more: this rank wants one more round.
            marks: its numbers.
            noticed: it has noticed something that the others must know of.
        """
        if self.cut:
            raise cut_short()
        if self.sent is None:
            numbers = marks or dict.fromkeys(self.marks, 0)
            try:
                self.sent = _gather([MORE * more + NOTICED * noticed, *numbers.values()], self.control)
            except (KeyboardInterrupt, SystemExit):
                self.cut = True
                raise
        return self.sent[0]

    def answer(self) -> tuple[list[list[int]], bool]:
        """The numbers of each rank, and whether any has noticed something. Allows a round if any wants one."""
        assert self.sent is not None
        work, every, mine = self.sent
        work.wait()
        self.sent = None
        rows = as_rows(every, mine)
        bits = reduce(or_, {row[0] for row in rows})
        self.allowed += bits & MORE
        return rows, bool(bits & NOTICED)


def _gather(numbers: list[int], control: Group) -> tuple[Any, Tensor, Tensor]:
    """Begin to gather numbers. Return the work handle, all ranks' numbers (ranks, numbers), and this rank's."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=control.device)
    every = mine.new_empty((control.size, len(mine)))
    return all_gather_into(every.view(-1), mine, control, async_op=True, numbers=True), every, mine


def check_marks(rows: list[list[int]], names: list[str], control: Group) -> None:
    """Raise on every rank, naming each rank's value, if one differs. After "; " a name may say the right code."""
    for name, found in zip(names, zip(*rows, strict=True), strict=True):
        if len(set(found)) > 1:
            values = ", ".join(f"rank {r}: {v}" for r, v in zip(control.ranks, found, strict=True))
            what, _, right = name.partition("; ")
            calls = (
                "Every rank must make the same calls of step() and zero_grad(), as many micro-batches included; "
                "give ranks without data an empty batch."
            )
            raise RuntimeError(f"ranks disagree on {what} ({values}). {right or calls}")


# ----------------------------------------------------------------------------------------------------------------------
# Gradients are reduced during backward, bucket after bucket, in one order on all ranks whatever their graphs.
#
# The end of a backward cannot be observed: an unused parameter never fires, checkpointing nests backwards, a kept
# graph runs again. So nothing here waits for it. A bucket is sent once all of its leaves have a gradient and the
# bucket before it was sent; `finish_reductions` sends the rest. A *round* is one pass over all buckets, with the
# oldest waiting gradient of each leaf. Gradients of later backwards queue. Adding them up first would save messages,
# but how many have come by then depends on timing, and so would the last bits of the sum. All ranks must make the
# same number of rounds. The first one needs no agreement, since `finish_reductions` always completes it. Before every
# further one ranks tell each other whether they want it. Nobody waits long for the answer before `finish_reductions`:
# another rank may be in a collective of the user's, which waits for this rank.
#
# On GPUs the user's collectives and these are kernels, which must begin in the same order on all ranks. There the place
# of a bucket among the user's collectives follows from the program alone, and never from a poll: only the first round
# begins in backward. Gradients of a leaf that come later are added up for a second one, in `finish_reductions`.


# Buckets under way at once. Each holds one buffer; many would hold as much as the full gradients.
IN_FLIGHT = 2
# Bytes of buffers under way on a GPU, beyond which the host waits for one of them. They are some milliseconds of
# backward, by which the host is ahead of the GPU.
LEAD = 1 << 28
# Every backward reads these of every gradient, so they are C functions.
_NDIM, _REQUIRES_GRAD = attrgetter("ndim"), attrgetter("requires_grad")
# Gradients of one leaf that may wait before backward waits for other ranks.
DEPTH = 2
# Seconds that backward waits for a bucket to be reduced before it goes on with more of them under way or waiting. A
# rank that has no gradient for that bucket sends it only at `finish_reductions`, and may be blocked on the way there
# by a collective of the user's that waits for this rank.
PATIENCE = 1.0


class Stream:
    """Reduces the gradients of full parameters as they arrive.

    Args:
        wire: the collectives, on a group of their own.
        control: another group, for the agreement on rounds and at `finish_reductions`.
        leaves: trainable leaves, in the order in which backward is expected to reach them.
        like: by path, shape, dtype and device of gradients.
        check: raises for gradients of a bucket that cannot be packed.
        done: takes the reduced gradients of a bucket, by its number; called in a fixed order.
        marks: names of the numbers that `finish_reductions` compares.
        name: of the transform that reduces, for profilers.

    Attributes:
        buckets: the leaves of each bucket.
        paths: of these leaves.
        home: by path, the bucket of a leaf and its place in it.
        waiting: by bucket and place, the gradients that wait for their bucket to be sent.
        missing: how many leaves of each bucket have none.
        later: by bucket and place, gradients of later backwards, of leaves of which one waits.
        by_program: whether the program alone says where in backward a bucket is sent.
    """

    def __init__(
        self,
        wire: Wire,
        control: Group,
        leaves: Sequence[Leaf],
        like: dict[str, Like],
        check: Callable[[Leaves], None],
        done: Callable[[int, Sequence[Tensor | None]], None],
        marks: tuple[str, ...],
        name: str,
    ):
        self.agreement = RoundAgreement(control, marks)
        self.wire, self.control, self.check, self.done, self.name = wire, control, check, done, name
        self.by_program = sends_kernels(wire.group)
        self.buckets = [
            GradBucket(bucket, [like[leaf.path].numel for leaf in bucket], like[bucket[0].path].dtype)
            for bucket in into_buckets(leaves, {p: x.dtype for p, x in like.items()}, wire.group)
        ]
        self.paths = [[leaf.path for leaf in bucket.leaves] for bucket in self.buckets]
        self.devices = [like[bucket.leaves[0].path].device for bucket in self.buckets]
        self.home = {path: (i, j) for i, paths in enumerate(self.paths) for j, path in enumerate(paths)}
        self.sizes = [len(bucket.leaves) for bucket in self.buckets]
        self._forget()
        # The bucket to send next, and the rounds that were sent.
        self.next = self.rounds = 0
        self.patience = PATIENCE
        self.dropping = self.broken = False  # broken: a `finish_reductions` was interrupted
        # For each running reduction: work handle, output, input (which must live until the work is done), bucket, and
        # which of its leaves have a gradient here.
        self.flying: deque[tuple[Any, Tensor, Tensor, int, list[bool]]] = deque()

    def _forget(self) -> None:
        self.waiting: list[list[Tensor | None]] = [[None] * n for n in self.sizes]
        self.missing = list(self.sizes)
        self.later: dict[tuple[int, int], deque[Tensor]] = {}

    @property
    def pending(self) -> bool:
        """Whether gradients wait to be sent."""
        return self.missing != self.sizes

    @property
    def idle(self) -> bool:
        """Whether nothing has arrived since the last `finish_reductions`."""
        return not (self.pending or self.rounds or self.next or self.broken)

    def hook(self, path: str) -> Callable[[Tensor], None]:
        """The hook of a plain parameter, which takes the gradient that autograd has added to `p.grad`."""
        # torch does not show hooks to the garbage collector: a strong reference would keep a dropped model alive.
        return partial(_take_gradient, weakref.ref(self), *self.home[path])

    def arrived(self, i: int, j: int, grad: Tensor) -> None:
        """Take a gradient of this rank, of a leaf by its bucket and its place there, and send what is complete."""
        queued = 0
        before = self.waiting[i][j]
        if before is None:
            self.waiting[i][j] = grad
            self.missing[i] -= 1
        elif self.by_program:
            with torch.no_grad():
                self.waiting[i][j] = before + grad
        else:
            queue = self.later.setdefault((i, j), deque())
            queue.append(grad)
            queued = len(queue)
        self.send_complete(queued >= DEPTH)

    def send_complete(self, behind: bool = False) -> None:
        """Send the buckets that are complete. Ctrl-C waits for them.

        Args:
            behind: so many gradients wait that backward waits for other ranks.
        """
        with interrupts_held():
            try:
                while self.missing[self.next] == 0 and self._may_begin(behind):
                    self._send()
            except (KeyboardInterrupt, SystemExit):
                # A second Ctrl-C is not held.
                self.broken = True
                raise

    def _may_begin(self, behind: bool) -> bool:
        """Whether all ranks know of the next bucket's round. If not, asks them, and waits if gradients are `behind`."""
        agreement = self.agreement
        if self.rounds < agreement.allowed or self.by_program:
            return self.rounds < agreement.allowed
        work = agreement.ask(True)
        if work.is_completed() or (behind and self._done_in_time(work, "all_gather")):
            agreement.answer()
        return self.rounds < agreement.allowed

    def _done_in_time(self, work: Any, what: str) -> bool:
        """Wait for a collective for some seconds (`PATIENCE`). Return whether it is done."""
        with ranged(WAIT, what):
            if work.done_within(self.patience):
                return True
        # Most likely it will not be done in time in any step of this program.
        self.patience /= 4
        return False

    def _send(self) -> None:
        """Send the next bucket with the gradients that have arrived for it."""
        if self.agreement.cut:
            raise cut_short()
        i = self.next
        leaves, numels, dtype = self.buckets[i]
        grads, arrived = self.waiting[i], dict(zip(self.paths[i], self.waiting[i], strict=True))
        # Nearly always each leaf has a gradient.
        every = not self.missing[i]
        self.check(arrived if every else {path: g for path, g in arrived.items() if g is not None})  # type: ignore[arg-type]
        if not i and not self.rounds:
            self.agreement.begin()
        with ranged(VIEW, self.name):
            with torch.no_grad():
                if every and set(map(_NDIM, grads)) == {1} and not any(map(_REQUIRES_GRAD, grads)):
                    flat = list(grads)
                else:
                    flat = [None if g is None else _flat(g) for g in grads]
                buffer = self.wire.pack(flat, leaves, numels, dtype, self.devices[i])
            given = [g is not None for g in grads]
            del grads, flat, arrived
            # Gradients are forgotten only after packing: if the wire raises there, none was sent.
            self._begin_next_round(i)
            try:
                work, out = self.wire.send(buffer, async_op=True)
                self.flying.append((work, out, buffer, i, given))
                self.next = (i + 1) % len(self.buckets)
                self.rounds += self.next == 0
            except (KeyboardInterrupt, SystemExit):
                self.agreement.cut = True
                raise
        self._hold_back()

    def _begin_next_round(self, i: int) -> None:
        """Forget the gradients of a bucket; those of later backwards come next."""
        waiting: list[Tensor | None] = [None] * self.sizes[i]
        self.waiting[i], self.missing[i] = waiting, len(waiting)
        for j in range(len(waiting)) if self.later else ():
            queue = self.later.get((i, j))
            if queue is not None:
                waiting[j] = queue.popleft()
                self.missing[i] -= 1
                if not queue:
                    del self.later[i, j]

    def _hold_back(self) -> None:
        """Wait until few buckets are under way."""
        what = "reduce_scatter" if self.wire.cuts else "all_reduce"
        while len(self.flying) > IN_FLIGHT:
            work = self.flying[0][0]
            full = not self.by_program or sum([buffer.nbytes for _, _, buffer, _, _ in self.flying]) > LEAD
            # A GPU must not be made to wait for a bucket: the rank that sends it late may wait for this GPU before.
            if not (self._done_in_time(work, what) if full else work.is_completed()):
                return
            self._land()

    def _land(self) -> None:
        """Wait for the oldest bucket under way, and hand on its reduced gradients."""
        work, out, _, i, given = self.flying.popleft()
        work.wait()
        self.agreement.begun()
        leaves, numels = self.buckets[i][:2]
        if not self.dropping:
            with torch.no_grad():
                # The gradients are views of the bucket's buffer.
                self.done(i, self.wire.unpack(out, leaves, numels, given))

    def finish_reductions(self, marks: dict[str, int], noticed: bool = False) -> bool:
        """Send all remaining buckets, in as many rounds on every rank, and wait for all of them.

        Args:
            marks: by the names of the constructor, numbers that must be equal on all ranks.
            noticed: this rank has noticed something that the others must know of.

        Returns:
            Whether any rank has noticed something.

        Raises:
            RuntimeError: on every rank, if a number differs; names each rank's value. Also if an earlier call was
                interrupted.
        """
        if self.broken:
            raise _lost()
        agreement, self.broken = self.agreement, True
        while True:
            while self.rounds < agreement.allowed:
                self._send()
            agreement.ask(self.pending, marks, noticed)
            rows, found = agreement.answer()
            if self.rounds == agreement.allowed:
                break
        while self.flying:
            self._land()
        self.rounds, agreement.allowed, self.broken = 0, 1, False
        if rows.count(rows[0]) < len(rows):
            check_marks([row[1:] for row in rows], list(marks), self.control)
        return found

    def settle(self, marks: dict[str, int]) -> None:
        """Reduce what has arrived so far, in the middle of a micro-step. All ranks call it; nothing is sent if no rank
        has a gradient that is not reduced yet.

        Args:
            marks: as for `finish_reductions`: a rank that is at another call has others.

        Raises:
            RuntimeError: as `finish_reductions`.
        """
        if self.broken:
            raise _lost()
        agreement, self.broken = self.agreement, True
        rows, busy = self._answers(marks)
        alike = rows.count(rows[0]) == len(rows)
        # A rank that is at its step has sent its buckets already, and waits for them.
        while busy or not alike:
            while self.rounds < agreement.allowed:
                self._send()
            before = agreement.allowed
            if alike:
                agreement.ask(self.pending, marks)
                agreement.answer()
            if agreement.allowed == before:
                break
        while self.flying:
            self._land()
        self.rounds, agreement.allowed, self.broken = 0, 1, False
        if not alike:
            check_marks([row[1:] for row in rows], list(marks), self.control)

    def _answers(self, marks: dict[str, int]) -> tuple[list[list[int]], bool]:
        """The numbers of all ranks, and whether any has gradients under way, once none asks for one more round."""
        agreement = self.agreement
        while True:
            before = agreement.allowed
            agreement.ask(False, marks, noticed=not self.idle)
            rows, busy = agreement.answer()
            if agreement.allowed == before:
                return [[0, *row[1:]] for row in rows], busy

    def discard(self, marks: dict[str, int]) -> None:
        """Drop the gradients that have arrived. This rank completes rounds that others have begun, with zeros."""
        self._forget()
        self.dropping, self.broken = True, False
        try:
            self.finish_reductions(marks)
        finally:
            self.dropping = False


def sends_kernels(group: Group) -> bool:
    """Whether collectives on a group are kernels of a GPU."""
    return group.device.type != "cpu"


def _lost() -> RuntimeError:
    wrong = "opt.step() after one that was interrupted while gradients were being reduced"
    return RuntimeError(explain(wrong, "some of them are lost", "opt.zero_grad(), and backward again"))


@uncompiled
def _take_gradient(of: weakref.ref[Stream], i: int, j: int, p: Tensor) -> None:
    """Take the gradient in `p.grad`, of a leaf by its bucket and its place there. Runs for each leaf in each backward.

    Python looks for Ctrl-C, and for another thread's turn, when it has called a function. The lines from the first
    write to `write_grad` call none, so the gradient is in one place, whenever it comes.
    """
    stream, grad = of(), read_grad(p)
    if stream is None or grad is None:
        return
    waiting = stream.waiting[i]
    if waiting[j] is None:
        waiting[j] = grad
        stream.missing[i] -= 1
        write_grad_alone(p, None)
        if not stream.missing[stream.next]:
            stream.send_complete()
    else:
        with interrupts_held():
            write_grad_alone(p, None)
            stream.arrived(i, j, grad)


def _flat(g: Tensor) -> Tensor:
    """A gradient, flat. It has a graph if backward was recorded."""
    g = g.detach() if g.requires_grad else g
    return g if g.ndim == 1 else g.reshape(-1)


# ----------------------------------------------------------------------------------------------------------------------
# `UnclearedGradients` imitates what torch keeps in `p.grad` between steps, where gradients are reduced in backward and
# `p.grad` has no numbers.
#
# In torch a loop that never clears gradients adds them up. Here those of the last step are gone, and the second step
# is refused.
# `zero_grad(set_to_none=False)` leaves zeros in torch, with which momentum and decay go on for a leaf that no backward
# reaches: a step is given zeros for it.


class UnclearedGradients:
    """Records which gradients of one attached model were used and cleared.

    Args:
        zero: makes the zero gradient of a leaf, from its path.
    """

    def __init__(self, zero: Callable[[str], Tensor]):
        self.zero = zero
        # Paths of leaves that had a gradient since it was cleared, and of those whose gradient was set to zero.
        self.had: set[str] = set()
        self.zeros: set[str] = set()
        # Whether a step has used the gradients and they are not cleared yet.
        self.used = False

    def take(self, grads: Leaves) -> Leaves:
        """The gradients of a step, with zeros where torch has them. The step calls `used` when it has used them.

        Raises:
            RuntimeError: those of the last step are not cleared.
        """
        if self.used and grads:
            raise RuntimeError(
                explain(
                    "opt.step() with gradients that were never cleared since the last step",
                    "torch would add them to the gradients of this step; here the last step has used and freed them",
                    "opt.zero_grad() after opt.step(); or opt.backward(loss), which drops what the last step has used",
                )
            )
        self.used = False
        self.had.update(grads)
        if missing := self.zeros - grads.keys():
            grads = grads | {path: self.zero(path) for path in sorted(missing)}
        return grads

    def clear(self, to_none: bool, more: Iterable[str] = ()) -> None:
        """Record that the user clears gradients.

        Args:
            to_none: `set_to_none` of `zero_grad`.
            more: paths of gradients that have arrived since the last step.
        """
        self.used = False
        self.zeros = set() if to_none else self.had | set(more)
        self.had = set(self.zeros)
