"""Copies that arrive at the last moment allowed, on the device of `other_device`.

Between its beginning and the moment it is waited for, a copy on a stream of its own may happen at any time. Here it
happens when it is waited for, and until then its target holds garbage. So a target that is read too early,
or a source that is written too early, changes numbers, on every run. What is read by the host before the host (and
not only the device) has waited is garbage too.
"""

from __future__ import annotations

import pytest
from other_device import Elsewhere, compare, inside
from torch import Tensor

import zerofn.core.executor
import zerofn.core.host_copies
import zerofn.core.state_prefetch

SMALL = 64  # bytes in a bucket: two or three leaves of the models here


class LateLane:
    """Copies; `log` tells how many were on their way to the device whenever a bucket left it."""

    def __init__(self, log: list[int], under_way: set[LateArrival]):
        self.log, self.under_way = log, under_way

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> LateArrival:
        for target, _ in pairs:
            inside(target).fill_(float("nan"))
        if not any(isinstance(target, Elsewhere) for target, _ in pairs):
            self.log.append(sum(arrival.there for arrival in self.under_way))
        return LateArrival(pairs, self.under_way)


class LateArrival:
    def __init__(self, pairs: list[tuple[Tensor, Tensor]], under_way: set[LateArrival]):
        self.pairs, self.under_way = list(pairs), under_way
        self.there = all(isinstance(target, Elsewhere) for target, _ in pairs)
        under_way.add(self)

    def here(self) -> None:
        if self.there:
            self.wait()

    def wait(self) -> None:
        for target, source in self.pairs:
            inside(target).copy_(inside(source))
        self.pairs = []
        self.under_way.discard(self)


def compare_late(pipeline: str, route: str) -> tuple[list[str], list[int], int]:
    """What `compare` finds; copies still coming whenever a bucket left; how many copies never arrived."""
    log: list[int] = []
    under_way: set[LateArrival] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zerofn.core.host_copies, "lane", lambda device: LateLane(log, under_way))
        for module in (zerofn.core.executor, zerofn.core.state_prefetch):
            patch.setattr(module, "BUCKET_BYTES", SMALL)
        return compare(pipeline, route), log, len(under_way)
