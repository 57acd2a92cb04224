"""Collectives in the order in which ranks ask for them, whether or not they ask for the same.

A model whose parameters are gathered on use issues collectives from inside forward and backward, where each
rank follows its own graph. Before each of them the ranks tell each other what they want. Mostly it is
the same and is done. Where it differs, all ranks take part in everything that any of them wants: a
gather needs this rank's shard whether or not this rank uses the result, and to a sum of gradients it adds
zeros. A rank with nothing to do waits at a *rest*, taking part, until every rank rests.

The exchange costs one small message per collective. The alternative, a fixed order, cannot be had here: which
parameters a rank needs next, only its own forward knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._collectives import Group, all_gather_into

GATHER, SCATTER, REST = 1, 2, 0


class Rounds:
    """The protocol of one attached model.

    Args:
        control: a group for the exchange.
        join: `join(kind, unit)` takes part in a collective that this rank has no use for.
    """

    def __init__(self, control: Group, join: Callable[[int, int], None]):
        self.control, self.join = control, join

    def perform(self, kind: int, unit: int, work: Callable[[], Any]) -> Any:
        """Do `work`, the collective `(kind, unit)`, together with what other ranks ask for."""
        mine = (kind, unit)
        result: Any = None
        for asked in self._wanted(mine):
            if asked == mine:
                result = work()
            else:
                self.join(*asked)
        return result

    def rest(self) -> None:
        """Return once no rank wants anything any more; until then take part."""
        while wanted := self._wanted((REST, 0)):
            for asked in wanted:
                self.join(*asked)

    def _wanted(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        sent = torch.tensor(mine, dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(2 * self.control.size)
        all_gather_into(every, sent, self.control)
        asked = {(int(k), int(u)) for k, u in every.reshape(-1, 2).tolist()}
        return sorted(a for a in asked if a[0] != REST)
