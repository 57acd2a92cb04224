"""Work handles of collectives: a wait is a range of the profiler, and an error if a peer never comes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from .._compat.compiler import makes_proxies
from .._compat.operators import outlasting, profiler_runs
from .._errors import explain
from .._ranges import WAIT, ranged
from .backend import RECORDED
from .group import Group
from .open_groups import begun, presence
from .rank_liveness import FAILED, FINISHED, Waiting

# A rank that has waited so long in a collective of gloo looks whether its peers are still there.
_LOOK = timedelta(seconds=2)


class Done:
    """The work handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE = Done()


class Work:
    """A collective under way: begun and counted when this is made.

    Where gloo waits long, `wait` looks whether the peers are still there: one whose loop was shorter has left for good,
    and one that makes other calls waits for this rank elsewhere. Without that it would wait for half an hour.

    Args:
        what: the name of the collective, in traffic, profiles and errors.
        sent: the bytes that this rank sends.
        group: of ranks.
        collective: a function of torch.distributed, which is called with `given`.
        finish: puts what has come where it belongs, once it is here.

    Raises:
        RuntimeError: make_fx records operations, and would leave this one out.
    """

    def __init__(
        self,
        what: str,
        sent: int,
        group: Group,
        collective: Callable[..., Any],
        *given: Any,
        finish: Callable[[], object] | None = None,
    ):
        if makes_proxies():
            raise RuntimeError(RECORDED)
        group.traffic.sent(what, sent)
        self.work: Any
        if group.silent:
            self.work = None
        elif profiler_runs():
            with outlasting(what):
                self.work = collective(*given, group=group.pg, async_op=True)
        else:
            self.work = collective(*given, group=group.pg, async_op=True)
        self.what, self.group, self.finish = what, group, finish
        self.number = group.traffic.begun

    def wait(self) -> bool:
        """Return once the result is where it belongs."""
        if self.work is None:
            return True
        with ranged(WAIT, self.what):
            if self.group.device.type != "cpu":
                self.work.wait()
            else:
                try:
                    self.work.wait(_LOOK)
                except RuntimeError as error:
                    self._wait_for_peers(error)
        if self.finish is not None:
            with torch.no_grad():
                self.finish()
        self.work = self.finish = None
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or self.work.is_completed()

    def _wait_for_peers(self, error: RuntimeError) -> None:
        """Go on after a wait that has ended with `error`: that of a time limit, or else it is raised."""
        reason, announced = "", False
        try:
            while not self.work.is_completed():
                if "timed out" not in str(error).lower():
                    raise error
                if not announced and (here := presence()) is not None:
                    mine = Waiting(self.what, self.group.pg.group_name, self.number, True, begun())
                    _quietly(here.set_waiting, mine)
                announced = True
                before, reason = reason, self._why_endless()
                # Once more after the first look: what another rank sent last may still be on its way.
                if reason and reason == before:
                    raise RuntimeError(reason) from None
                try:
                    self.work.wait(_LOOK)
                except RuntimeError as later:
                    error = later
            # It may have ended after the time limit and before it was asked: well, or with an error of its own.
            self.work.wait()
        finally:
            if announced and (here := presence()) is not None:
                _quietly(here.clear_waiting)

    def _why_endless(self) -> str:
        """Why this wait will not end; empty while it may."""
        here = presence()
        if here is None:
            return ""
        ended = {r: how for r in self.group.ranks if (how := _quietly(here.how_ended, r))}
        if failed := [str(r) for r, how in ended.items() if how == FAILED]:
            return (
                f"this rank waits in {self.what} for rank {', '.join(failed)}, which {FAILED}: its own error says why"
            )
        if ended:
            return (
                f"this rank waits in {self.what} for rank {', '.join(map(str, ended))}, which {FINISHED}. "
                "Every rank must make the same number of steps: give all of them as many batches, or end "
                "every loop with the shortest. Under shard calls of the model count too: "
                "after the last step, evaluate on every rank."
            )
        mine, channel = begun(), self.group.pg.group_name
        for rank in self.group.ranks:
            other: Waiting | None = _quietly(here.waiting, rank) if rank != here.rank else None
            if other is None or not other.bound:
                continue
            # Both are in collective `number` of one group, and in different ones: neither can end, or only by chance.
            crossed = (other.channel, other.number) == (channel, self.number) and other.what != self.what
            missed = other.begun.get(channel, self.number) < self.number
            if crossed or (missed and mine.get(other.channel, other.number) < other.number):
                return explain(
                    f"this rank waits in {self.what} for rank {rank}, and rank {rank} in {other.what} for this one",
                    "the ranks make different calls, and each waits for the other's",
                    "the same calls of zerofn in the same order on every rank; inside of them what one rank does alone",
                )
        return ""


def _quietly(ask: Callable[..., Any], *given: Any) -> Any:
    """`ask(*given)`; None if the store is gone: gloo raises what became of the collective."""
    try:
        return ask(*given)
    except RuntimeError:
        return None
