"""Units are sent in the order in which ranks ask for them: parameters, sums of gradients, second derivatives.

What a rank wants it says to the others first (`ranks.join`), and takes part in what others want. What is expected
next is begun early (`prefetch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Leaf
from ..ranks.group import Group
from ..ranks.ordered_collectives import CALL, Asked, Rounds
from .gathered_units import ALIVE, Gathered
from .prefetch import Course
from .unit_collectives import UnitCollectives

# Kinds of collective: parameters, sums of gradients, and cotangents of gradients (second derivatives).
PARAMETERS, GRADIENTS, TANGENTS = 1, 2, 3
# How many sums of gradients are told apart where ranks meet.
TOLD_APART = 1 << 20


class UnitRounds:
    """The collectives of one model's units.

    Args:
        control: a group for the exchange of what is wanted.
        collectives: what is sent for a unit.
        gathered: which units are here.
        accept: takes the gradient of a shard that other ranks' backward brought about.
        course: what is expected next; `None` where nothing is gathered early.

    Attributes:
        partial: leaves of which other ranks may still bring a part of the gradient of this backward.
        kept: sums of gradients since gradients were last cleared, of which every rank has its part, or has dropped it.
    """

    def __init__(
        self,
        control: Group,
        collectives: UnitCollectives,
        gathered: Gathered,
        accept: Callable[[Leaf, Tensor], None],
        course: Course | None,
    ):
        self.collectives, self.gathered, self.accept, self.course = collectives, gathered, accept, course
        self.units = collectives.plans.units
        # A cycle would keep the shards of a state that is gone until the collector comes by.
        this = weakref.ref(self)
        self.protocol = Rounds(control, lambda kind, i: this()._join(kind, i))  # type: ignore[union-attr]
        self.partial: set[str] = set()
        self.kept = 0

    def parameters(self, i: int) -> list[Tensor]:
        """Gather a unit's full parameters in the compute dtype."""
        return self._perform(PARAMETERS, i, partial(self._gather, i))

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Gather something else of the parameters' layout."""
        return self._perform(TANGENTS, i, partial(self._gather_filled, i, shards))

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards: averaged over ranks, unscaled."""
        found = self._perform(GRADIENTS, i, partial(self.collectives.begin_scatter, i, fulls))
        self.kept += 1
        if not self.protocol.together:
            self.partial.update(leaf.path for leaf in self.units[i])
        return found

    def rest(self, place: int = CALL, told: Callable[[], Sequence[int]] = tuple) -> list[list[int]]:
        """Nothing follows here: take part in what others want until every rank rests; see `ranks.join`."""
        if self.course is not None:
            self.course.end()
        return self.protocol.rest(place, told)

    def meet(self, what: int) -> str:
        """Wait until all ranks have come to the same, as `ranks.join.Rounds.meet`."""
        # Those that have other gradients, since some are in another backward, have not.
        return self.protocol.meet(lambda: what * TOLD_APART + self.kept % TOLD_APART)

    def _perform(self, kind: int, i: int, begin: Callable[[], Callable[[], Any]]) -> Any:
        if self.course is None:
            return self.protocol.perform(kind, i, begin)
        self.course.go(kind, i)
        # Sums of gradients are asked for one by one: that others have a part of one too is to be known, and where
        # a rank brings zeros for what it has a part of later, sums are made in another order.
        return self.protocol.perform(kind, i, begin, partial(self.course.ahead, PARAMETERS), self._early)

    def _early(self, now: Asked, then: Asked) -> bool:
        """Begin to gather what is used next while what is asked for now is under way; whether it has begun."""
        kind, unit = then
        if self.course is None or kind != PARAMETERS or then == now or unit in self.gathered:
            return False
        # What is here is no longer needed once the next one is: beside a unit that is on its way nothing is kept.
        self._fetch(unit, keep=ALIVE - 1 - (now[0] == PARAMETERS))
        self.course.go(kind, unit)
        return True

    def _fetch(self, i: int, keep: int) -> None:
        """Begin to gather the unit that is used next; `keep` others are still needed."""
        # Of those on their way one is enough: an earlier one that was passed over is no longer expected.
        self.gathered.turn_away()
        self.gathered.drop(keep)
        self.gathered.coming[i] = self._gather(i)

    def _join(self, kind: int, i: int) -> None:
        """Take part in a collective for other ranks."""
        nothing: tuple = (None,) * len(self.units[i])
        with lasting(), torch.no_grad():
            if kind == PARAMETERS:
                self.gathered.drop(ALIVE - 1)
                self._gather(i)()
            elif kind == TANGENTS:
                self._gather_filled(i, nothing)()
            else:
                self.kept += 1
                for leaf, g in zip(self.units[i], self.collectives.begin_scatter(i, nothing)(), strict=True):
                    if g is not None and leaf.trainable:
                        self.accept(leaf, g)

    def _gather(self, i: int) -> Callable[[], list[Tensor]]:
        self.gathered.settle(i)
        with torch.DisableTorchFunctionSubclass():
            mine = list(map(Tensor.detach, self.gathered.parts[i]))
        return self.collectives.begin_gather(i, mine)

    def _gather_filled(self, i: int, shards: tuple[Tensor | None, ...]) -> Callable[[], list[Tensor]]:
        pairs = zip(self.gathered.parts[i], shards, strict=True)
        filled = [torch.zeros_like(part) if shard is None else shard for part, shard in pairs]
        return self.collectives.begin_gather(i, filled)


def lasting() -> AbstractContextManager[Any]:
    """Where tensors are made that outlive a call under `torch.inference_mode`: of its own, training can use none.

    A unit that an evaluation has gathered may be the next one that training wants, and gradients come to a
    rank that rests between two calls, whatever mode it rests in.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
