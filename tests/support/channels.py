"""Channels between ranks, kept open for one attached model after another."""

from __future__ import annotations

from typing import Any

import zerofn.eager.channels  # inside: channels are kept open from one model to the next
import zerofn.eager.resident_params  # inside: what is asked at attach is left out, or counted
import zerofn.ranks.process_groups  # inside: which groups are open, and what a process tells the others


class Channels:
    """Channels between ranks that models of one cell after another use, for it takes longer to open them than to train.

    For the same reason ranks are not asked at each `attach` whether they mean the same model.
    Models that are attached at the same time have channels of their own, as ever.
    """

    def __init__(self):
        self.opened: list[Any] = []
        self.next = 0
        zerofn.eager.resident_params.agree_on_start = lambda *given: None
        self.open = zerofn.eager.channels.channels
        zerofn.eager.channels.channels = lambda joining, numbers=0: [self.take(groups) for groups in joining]

    def take(self, groups: Any) -> Any:
        """The next channel. All groups here join all ranks."""
        if self.next == len(self.opened):
            # Not the model's that comes first, which would close them.
            with zerofn.ranks.process_groups.held_by(None):
                zerofn.ranks.process_groups.world_group("mesh"), zerofn.ranks.process_groups.world_group()
                self.opened += self.open([groups])
        self.next += 1
        return self.opened[self.next - 1]
