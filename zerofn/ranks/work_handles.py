"""Handles of collectives under way, which look whether the ranks they wait for are still there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from .._compat.operators import outlasting, profiler_runs
from .._errors import explain
from .._ranges import WAIT, ranged
from .backend import check_not_written_down
from .group import Group
from .open_groups import begun, presence
from .rank_liveness import Waiting

_LOOK = timedelta(seconds=2)  # after which a rank that waits looks whether the others are still there


class Done:
    """The work handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Watched:
    """A work handle of gloo that looks, when a wait is long, whether the others are still there.

    A rank whose loop was shorter has left for good, and one that makes other calls waits for this rank elsewhere;
    without this the others would wait for half an hour.
    """

    def __init__(self, work: Any, what: str, group: Group) -> None:
        self.work, self.what, self.group = work, what, group
        self.number = group.traffic.begun

    def wait(self) -> bool:
        reason, told = "", False
        with ranged(WAIT, self.what):
            try:
                while True:
                    try:
                        return self.work.wait(_LOOK)
                    except RuntimeError as error:
                        if self.work.is_completed() or "timed out" not in str(error).lower():
                            raise
                    before, reason = reason, self._hopeless(tell=not told)
                    told = True
                    # Once more after the first look: what another rank sent last may still be on its way.
                    if reason and reason == before:
                        raise RuntimeError(reason)
            finally:
                if told and (here := presence()) is not None:
                    _quietly(here.goes_on)

    def _hopeless(self, tell: bool) -> str:
        """Why this wait will not end; nothing while it may."""
        here = presence()
        if here is None:
            return ""
        if tell:
            where = Waiting(self.what, self.group.pg.group_name, self.number, True, begun())
            _quietly(functools.partial(here.waits, where))
        if gone := [r for r in self.group.ranks if _quietly(functools.partial(here.gone, r))]:
            return (
                f"this rank waits in {self.what} for rank {', '.join(map(str, gone))}, which has finished. "
                "Every rank must make the same number of steps: give all of them as many batches, or end "
                "every loop with the shortest. Under shard calls of the model count too: "
                "after the last step, evaluate on every rank."
            )
        mine, channel = begun(), self.group.pg.group_name
        for rank in self.group.ranks:
            other: Waiting | None = _quietly(functools.partial(here.waiting, rank)) if rank != here.rank else None
            if other is None or not other.bound:
                continue
            # In the same place of the same channel, and in something else: neither can end, or only by chance.
            crossed = (other.channel, other.number) == (channel, self.number) and other.what != self.what
            missed = other.begun.get(channel, self.number) < self.number
            if crossed or (missed and mine.get(other.channel, other.number) < other.number):
                return explain(
                    f"this rank waits in {self.what} for rank {rank}, and rank {rank} in {other.what} for this one",
                    "the ranks make different calls, and each waits for the other's",
                    "the same calls of zerofn in the same order on every rank; inside of them what one rank does alone",
                )
        return ""

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _quietly(ask: Callable[[], Any]) -> Any:
    """Ignore that the store is gone: gloo will say what became of the collective."""
    try:
        return ask()
    except RuntimeError:
        return None


class Named:
    """A work handle of a device, whose wait has a name."""

    def __init__(self, work: Any, what: str) -> None:
        self.work, self.what = work, what

    def wait(self) -> bool:
        with ranged(WAIT, self.what):
            return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


class Landing:
    """The work handle of parts that are on their way, to be put in place once they are here."""

    def __init__(self, work: Any, land: Callable[[], object]) -> None:
        self.work: Any = work
        self.land: Any = land

    def wait(self) -> bool:
        if self.work is not None:
            self.work.wait()
            with torch.no_grad():
                self.land()
            self.work = self.land = None
        return True

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()


DONE = Done()


def begin(what: str, sent: int, group: Group, collective: Callable[..., Any], *given: Any) -> Watched | Named:
    """Begin a collective in which this rank sends so many bytes, and count it; what waits for it, and looks."""
    check_not_written_down()
    group.traffic.sent(what, sent)
    if profiler_runs():
        with outlasting(what):
            work = collective(*given, async_op=True)
    else:
        work = collective(*given, async_op=True)
    return Watched(work, what, group) if group.device.type == "cpu" else Named(work, what)
