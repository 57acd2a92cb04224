"""Collectives in the order in which ranks ask for them, whether or not they ask for the same.

A model whose parameters are gathered on use issues collectives from inside forward and backward, where each
rank follows its own graph. Before each of them the ranks tell each other what they want. Mostly it is
the same and is done. Where it differs, all ranks take part in everything that any of them wants: a
gather needs this rank's shard whether or not this rank uses the result, and to a sum of gradients it adds
zeros. A rank with nothing to do waits at a *rest*, taking part, until every rank rests.

The exchange costs one small message per collective. The alternative, a fixed order, cannot be had here: which
parameters a rank needs next, only its own forward knows. But each rank tells as well what it expects to need next, and
where all expect the same that is begun at once, while they compute. When they come to it they need no exchange for it:
half of all messages, and nobody waits for what nobody else needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .collectives import all_gather_into
from .group import Group

Asked = tuple[int, int]  # a kind of collective, and a unit
REST = 0
NOTHING = -1
# Where a rank rests: between two calls of the model, or at a step.
CALL, STEP = 0, 1


class Rounds:
    """The protocol of one attached model.

    Args:
        control: a group for the exchange.
        join: `join(kind, unit)` takes part in a collective that this rank has no use for.
    """

    def __init__(self, control: Group, join: Callable[[int, int], None]):
        self.control, self.join = control, join
        # Whether all ranks asked for the same in the last round.
        self.together = True

    def perform(
        self,
        kind: int,
        unit: int,
        begin: Callable[[], Callable[[], Any]],
        ahead: int = NOTHING,
        fetch: Callable[[int], None] = lambda unit: None,
    ) -> Any:
        """The collective `(kind, unit)`, together with what other ranks ask for.

        Args:
            kind: of collective.
            unit: whose.
            begin: begins it; what it returns ends it, and gives its result.
            ahead: a unit whose parameters this rank expects to need next.
            fetch: begins to gather it, where all ranks have asked for the same and expect the same.
        """
        mine = (kind, unit)
        result: Any = None
        every, resting, expected = self._exchange(kind, unit, ahead)
        self.together = every == [mine] and not resting
        for asked in every:
            if asked != mine:
                self.join(*asked)
                continue
            end = begin()
            if self.together and ahead != NOTHING and expected == {ahead}:
                fetch(ahead)
            result = end()
        return result

    def rest(self, place: int = CALL, told: Callable[[], int] = lambda: 0) -> bool:
        """Return once no rank wants anything any more; until then take part.

        A rest at a step ends with those of the other ranks: one that is only between two calls of the
        model will want more before its own step. One between two calls ends whatever the others rest at.

        Args:
            place: where this rank rests.
            told: a number, not negative, that it tells the others; what it joins meanwhile may change it.

        Returns:
            Whether the others rest too and tell the same. It costs no message of its own.
        """
        while True:
            asked, resting, _ = self._exchange(REST, place | told() << 1)
            for kind, unit in asked:
                self.join(kind, unit)
            if not asked and min(x & 1 for x in resting) >= place:
                return len({x >> 1 for x in resting}) == 1

    def _exchange(
        self, kind: int, unit: int, ahead: int = NOTHING
    ) -> tuple[list[tuple[int, int]], list[int], set[int]]:
        """What any rank asks for, once each in a fixed order; what those say that rest; and what ranks expect next."""
        sent = torch.tensor((kind, unit, ahead), dtype=torch.int64, device=self.control.device)
        every = sent.new_empty(3 * self.control.size)
        all_gather_into(every, sent, self.control)
        rows = every.reshape(-1, 3).tolist()
        asked = sorted({(k, u) for k, u, _ in rows if k != REST})
        return asked, [u for k, u, _ in rows if k == REST], {a for *_, a in rows}
