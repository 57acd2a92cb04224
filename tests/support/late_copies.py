"""Copies that arrive at the last moment allowed, on the device of `other_device`.

Between its beginning and the moment it is waited for, a copy on a stream of its own may happen at any time. Here it
happens when it is waited for, and until then its target holds garbage. So a target that is read too early,
or a source that is written too early, changes numbers, on every run. So does a state that the host reads before it has
waited.
"""

from __future__ import annotations

import pytest
import torch
from other_device import Elsewhere, compare, inside
from torch import Tensor

import zerofn.core.executor  # inside: how large a bucket is, and which transforms run together
import zerofn.core.offload  # inside: its copies are replaced by late ones, or counted

SMALL = 64  # bytes in a bucket: two or three leaves of the models here


class LateQueue:
    """Copies; `log` tells how many were on their way to the device whenever a bucket left it."""

    def __init__(self, log: list[int], under_way: set[LateCopy]):
        self.log, self.under_way = log, under_way

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> LateCopy:
        for target, _ in pairs:
            # Bytes that are NaN in each dtype.
            inside(target).view(torch.uint8).fill_(255)
        if not any(isinstance(target, Elsewhere) for target, _ in pairs):
            self.log.append(sum(copy.there for copy in self.under_way))
        return LateCopy(self, pairs, self.under_way)


class LateCopy:
    def __init__(self, queue: LateQueue, pairs: list[tuple[Tensor, Tensor]], under_way: set[LateCopy]):
        self.queue, self.pairs, self.under_way = queue, list(pairs), under_way
        self.there = all(isinstance(target, Elsewhere) for target, _ in pairs)
        under_way.add(self)

    def wait_on_device(self) -> None:
        self.wait_on_host()

    def release(self) -> None:
        """Its memory may be freed; its bytes come when it is waited for."""

    def wait_on_host(self) -> None:
        for target, source in self.pairs:
            inside(target).copy_(inside(source))
        self.pairs = []
        self.under_way.discard(self)


def compare_late(pipeline: str, route: str) -> tuple[list[str], list[int], int]:
    """What `compare` finds; copies still coming whenever a bucket left; how many copies never arrived."""
    log: list[int] = []
    under_way: set[LateCopy] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zerofn.core.offload, "CopyQueue", lambda device: LateQueue(log, under_way))
        patch.setattr(zerofn.core.executor, "BUCKET_BYTES", SMALL)
        zerofn.core.offload.queue.cache_clear()
        try:
            return compare(pipeline, route), log, len(under_way)
        finally:
            zerofn.core.offload.queue.cache_clear()
