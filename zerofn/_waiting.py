"""Handles of collectives under way, which look whether the ranks they wait for are still there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ._group import Group
from ._groups import gone

_LOOK = timedelta(seconds=2)  # after which a rank that waits looks whether the others are still there


class Done:
    """The work handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Watched:
    """A work handle of gloo that looks, when a wait is long, whether the others are still there.

    A rank whose loop was shorter has left for good; without this the others would wait for half an hour.
    """

    def __init__(self, work: Any, what: str, group: Group) -> None:
        self.work, self.what, self.group = work, what, group

    def wait(self) -> bool:
        suspects: list[int] = []
        while True:
            try:
                return self.work.wait(_LOOK)
            except RuntimeError as error:
                if self.work.is_completed() or "timed out" not in str(error).lower():
                    raise
            # Once more after the first look: what it sent last may still be on its way.
            if suspects:
                raise RuntimeError(
                    f"this rank waits in {self.what} for rank {', '.join(map(str, suspects))}, which has finished. "
                    "Every rank must make the same number of steps: give all of them as many batches, or end "
                    "every loop with the shortest. Under shard calls of the model count too: "
                    "after the last step, evaluate on every rank."
                )
            suspects = gone(self.group)

    def is_completed(self) -> bool:
        return self.work.is_completed()


class Landing:
    """The work handle of parts that are on their way, to be put in place once they are here."""

    def __init__(self, work: Any, land: Callable[[], None]) -> None:
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


def run(work: Any, what: str, group: Group, async_op: bool) -> Any:
    """Wait for a collective that was begun, or hand it on."""
    if group.device.type == "cpu":
        work = Watched(work, what, group)
    return work if async_op else work.wait() and None
