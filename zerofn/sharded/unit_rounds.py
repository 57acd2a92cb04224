"""Collectives of units in an order that all ranks agree on, with the next unit's all-gather begun early.

Before a collective each rank tells the others which one it wants, and takes part in those that they want
(`ranks.ordered_collectives`). A model mostly needs the same units in the same order as the last time, so the next
unit is gathered while the last one computes (prefetch).
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import graph_task
from ..core.layout import Leaf
from ..ranks.group import Group
from ..ranks.ordered_collectives import CALL, Asked, Rounds
from .gathered_units import ALIVE, GatheredUnits
from .unit_collectives import UnitCollectives

# Kinds of collective: all-gathers of parameters, reduce-scatters of gradients, and all-gathers of cotangents of
# gradients (second derivatives).
PARAMETERS, GRADIENTS, TANGENTS = 1, 2, 3
# In the place of what came before the first collective of a call or of a backward.
START: Asked = (0, 0)
# Up to which number of reduce-scatters ranks tell each other where they meet.
COUNTED = 1 << 20


class UnitRounds:
    """The collectives of one model's units.

    Args:
        control: a group on which ranks tell each other what they want.
        collectives: of each unit.
        gathered: which units have full parameters here.
        accept: takes the gradient of a shard that came by a reduce-scatter which only other ranks wanted.
        prefetch: whether the unit that is expected next is gathered before it is used.

    Attributes:
        partial: paths of leaves whose gradient of this step may still grow by other ranks' parts.
        kept: how many reduce-scatters there were since gradients were last cleared. Where ranks have different
            numbers one has cleared its part of a sum of which the others have theirs.
        unfinished: backwards since the last step that have not ended, by autograd's number.
        lock: held by the thread that sends, or that changes what is gathered: with several, collectives come in the
            order in which threads ask, which the exchange in front of each brings together over ranks.
    """

    def __init__(
        self,
        control: Group,
        collectives: UnitCollectives,
        gathered: GatheredUnits,
        accept: Callable[[Leaf, Tensor], None],
        prefetch: bool,
    ):
        self.collectives, self.gathered, self.accept, self.prefetch = collectives, gathered, accept, prefetch
        self.units = collectives.plans.units
        # Weak: a cycle would keep the shards of a dropped state until the garbage collector runs.
        this = weakref.ref(self)
        self.protocol = Rounds(control, lambda kind, i: this()._join(kind, i))  # type: ignore[union-attr]
        self.partial: set[str] = set()
        self.kept = 0
        self.lock = threading.RLock()
        self.unfinished: set[int] = set()
        # Gradients that are taken once no other backward is under way here: in its thread it may add to the same ones.
        self.late: list[tuple[Leaf, Tensor]] = []
        # What followed each pair of collectives the last time. Of pairs, since between any two blocks there may be
        # parameters that all blocks share.
        self.followers: dict[tuple[Asked, Asked], Asked] = {}
        self.last_two = (START, START)

    def perform(self, kind: int, i: int, tensors: tuple[Tensor | None, ...] = ()) -> list[Any]:
        """Run a collective of a unit, and those that other ranks want before it.

        Args:
            kind: of collective.
            i: the unit.
            tensors: for each leaf, of `GRADIENTS` the full gradient, of `TANGENTS` what is gathered.

        Returns:
            For each leaf the full tensor; of `GRADIENTS` the true gradient of this rank's shard, averaged over ranks
            and unscaled, `None` where no rank has one.
        """
        begin = partial(self.collectives.begin_scatter if kind == GRADIENTS else self._gather, i, tensors)
        with self.lock:
            if self.prefetch:
                self.followers[self.last_two] = (kind, i)
                self.last_two = (self.last_two[1], (kind, i))
                found = self.protocol.perform(kind, i, begin, self._expected, self._begin_next)
            else:
                found = self.protocol.perform(kind, i, begin)
            if kind == GRADIENTS:
                self.kept += 1
                if not self.protocol.together:
                    self.partial.update(leaf.path for leaf in self.units[i])
            return found

    def rest(self, place: int = CALL, told: Callable[[], Sequence[int]] = tuple) -> list[list[int]]:
        """Nothing follows here: take part in what others want until every rank rests; see `Rounds.rest`."""
        with self.lock:
            self.followers.pop(self.last_two, None)
            self.last_two = (START, START)
            return self.protocol.rest(place, told)

    def meet(self, what: str) -> str:
        """Wait until all ranks have come to the same; see `Rounds.meet`."""
        number = zlib.crc32(what.encode())
        # Ranks in different backwards have not: their gradients differ.
        with self.lock:
            return self.protocol.meet(lambda: number * COUNTED + self.kept % COUNTED)

    def _expected(self, most: int) -> list[Asked]:
        """The all-gathers of parameters that followed here the last time, at most so many of them.

        No reduce-scatters, each of which is agreed on by itself: ranks must know whether others have a part of that
        gradient too, and a rank that joins with zeros and brings its own part later would change the order of the sum.
        """
        found: list[Asked] = []
        two = self.last_two
        while len(found) < most and (then := self.followers.get(two, START))[0] == PARAMETERS:
            found.append(then)
            two = (two[1], then)
        return found

    def _begin_next(self, now: Asked, then: Asked) -> bool:
        """Begin the all-gather `then` while the collective `now` is under way; whether it was begun."""
        kind, i = then
        # Not while the unit's gradients are on their way: with `in_backward` they update it before it is gathered.
        if kind != PARAMETERS or i == now[1] or i in self.gathered:
            return False
        # One that was prefetched and passed over is not expected any more.
        self.gathered.finish_prefetched()
        # Beside the unit that comes, only one that is being gathered `now` is kept: what computes has its own tensors.
        self.gathered.drop(ALIVE - 1 - (now[0] == PARAMETERS))
        self.gathered.coming[i] = self._gather(i)
        self.last_two = (self.last_two[1], then)
        return True

    def _join(self, kind: int, i: int) -> Callable[[], object]:
        """Begin a collective that only other ranks want; returns what waits for it."""
        nothing: tuple = (None,) * len(self.units[i])
        with outside_inference_mode(), torch.no_grad():
            if kind == GRADIENTS:
                return partial(self._accept, i, self.collectives.begin_scatter(i, nothing))
            if kind == PARAMETERS:
                self.gathered.drop(ALIVE - 1)
            return self._gather(i, nothing if kind == TANGENTS else ())

    def _accept(self, i: int, end: Callable[[], list[Tensor | None]]) -> None:
        """Wait for gradients of a unit that only other ranks wanted, and keep this rank's shards of them."""
        with outside_inference_mode(), torch.no_grad():
            self.kept += 1
            self.late += [(leaf, g) for leaf, g in zip(self.units[i], end(), strict=True) if g is not None]
            if self.late and not self.unfinished - {graph_task()}:
                self.accept_late()

    def accept_late(self) -> None:
        """Take the gradients that have waited for the ends of backwards."""
        with self.lock:
            late, self.late = self.late, []
            for leaf, g in late:
                self.accept(leaf, g)

    def _gather(self, i: int, tensors: tuple[Tensor | None, ...] = ()) -> Callable[[], list[Tensor]]:
        """Begin an all-gather of a unit: of its parameters, or of `tensors`, with zeros for `None`."""
        parts = self.gathered.parts[i]
        if tensors:
            mine = [torch.zeros_like(part) if x is None else x for part, x in zip(parts, tensors, strict=True)]
        else:
            self.gathered.settle(i)
            with torch.DisableTorchFunctionSubclass():
                mine = list(map(Tensor.detach, parts))
        return self.collectives.begin_gather(i, mine)


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leaves `torch.inference_mode`, for tensors that outlive the call: training can use none that were made in it.

    A unit that an evaluation has gathered may be the one that training uses next, and gradients come to a rank that
    waits between two calls, in whatever mode.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
