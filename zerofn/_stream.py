"""Gradients leave during backward: bucket after bucket, in an order that no rank's graph can change.

Backward has no end that could be observed: an unused parameter never fires, checkpointing nests backwards, a
kept graph runs again. So nothing here waits for one. A bucket is sent once all of its leaves have a
gradient and the bucket before it is on its way; whatever is left, `settle` sends. A *round* is one pass over
all buckets. The reduction is linear, so a contribution may travel in any round; what must be equal on
all ranks is the number of rounds, and on that `settle` makes them agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._collectives import Group, all_gather_into
from ._shard import Averaging, Flat, Like, Sharding, cut, wire_of
from ._tree import Leaf

# Buckets under way at once. Each holds one buffer; more would make a full gradient of them.
IN_FLIGHT = 2


class Stream:
    """Reduces the gradients of resident parameters as they arrive.

    Args:
        stage: a `Sharding` or an `Averaging` on a group of this stream's own.
        control: a group for the agreement at `settle`, apart from the buckets under way.
        leaves: trainable leaves, in the order in which backward is expected to reach them.
        like: what the gradient of each is.
        done: takes a reduced gradient to its place; called in a fixed order.
    """

    def __init__(
        self,
        stage: Sharding | Averaging,
        control: Group,
        leaves: list[Leaf],
        like: dict[str, Like],
        done: Callable[[Leaf, Tensor], None],
    ):
        self.stage, self.control, self.like, self.done = stage, control, like, done
        self.wire: Sharding | Flat = wire_of(stage, like)
        self.buckets = cut(leaves, {p: x.dtype for p, x in like.items()})
        self.home = {leaf.path: i for i, bucket in enumerate(self.buckets) for leaf in bucket}
        self.pending: dict[str, Tensor] = {}
        self.missing = [len(b) for b in self.buckets]
        self.next = 0
        self.rounds = 0
        self.flying: deque[tuple[Any, Tensor, Tensor, int]] = deque()

    def arrived(self, path: str, grad: Tensor) -> None:
        """A gradient of this rank. It belongs to the stream from now on."""
        if path in self.pending:
            self.pending[path] = self.pending[path].add_(grad)
        else:
            self.pending[path] = grad
            self.missing[self.home[path]] -= 1
        while self.missing[self.next] == 0:
            self._send()

    def _send(self) -> None:
        """Send the next bucket with what has arrived for it."""
        bucket = self.buckets[self.next]
        grads = [self.pending.pop(leaf.path, None) for leaf in bucket]
        first = self.like[bucket[0].path]
        with torch.no_grad():
            flat = [None if g is None else g.reshape(-1) for g in grads]
            buffer = self.wire.pack(flat, bucket, self.stage.reduce_dtype or first.dtype, first.device)
        del grads, flat
        work, out = self.wire.send(buffer, async_op=True)
        # The buffer must live until the work is done.
        self.flying.append((work, out, buffer, self.next))
        self.missing[self.next] = len(bucket)
        self.next = (self.next + 1) % len(self.buckets)
        self.rounds += self.next == 0
        while len(self.flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        work, out, _, i = self.flying.popleft()
        work.wait()
        bucket = self.buckets[i]
        with torch.no_grad():
            for leaf, g in zip(bucket, self.wire.unpack(out, bucket), strict=True):
                if g is not None:
                    # Parts of one buffer, which all leaves of the bucket keep alive together.
                    self.done(leaf, g)

    def settle(self, marks: dict[str, int]) -> None:
        """Send what is left, on every rank as many rounds, and wait for all of it.

        Args:
            marks: counters that must be equal on all ranks, by name.

        Raises:
            RuntimeError: on every rank, if a counter differs; each rank's value is named.
        """
        if self.next or self.pending:
            self._finish_round()
        for _ in range(agree_on(self.rounds, marks, self.control) - self.rounds):
            self._finish_round()
        while self.flying:
            self._land()
        self.rounds = 0

    def _finish_round(self) -> None:
        before = self.rounds
        while self.rounds == before:
            self._send()

    def discard(self) -> None:
        """Forget what has arrived; what is under way lands first, so that ranks stay in step."""
        self.pending.clear()
        self.missing = [len(b) for b in self.buckets]
        while self.flying:
            self._land()


def agree_on(value: int, marks: dict[str, int], control: Group) -> int:
    """The largest `value` of any rank, after a check that all ranks have the same marks."""
    mine = torch.tensor([value, *marks.values()], dtype=torch.int64, device=control.device)
    every = mine.new_empty(control.size * len(mine))
    all_gather_into(every, mine, control)
    rows = every.reshape(control.size, len(mine)).tolist()
    for i, name in enumerate(marks, 1):
        found = [row[i] for row in rows]
        if len(set(found)) > 1:
            told = ", ".join(f"rank {r}: {v}" for r, v in zip(control.ranks, found, strict=True))
            raise RuntimeError(
                f"ranks disagree on {name} ({told}). Every rank must make the same calls of step(), as many "
                "micro-batches included; give ranks without data an empty batch with zero weight."
            )
    return max(row[0] for row in rows)
