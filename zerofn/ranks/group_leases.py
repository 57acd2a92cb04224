"""Channels that an attached model asked for are closed when it is detached, and where it could not be attached.

A closed end breaks what another rank still sends to it, so all ranks of the job meet first, once each of them has sent
all that it will. Where they do not, channels stay open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .backend import world
from .open_groups import held_alone, held_by, let_go
from .rendezvous import limit, together

# Seconds for which a rank on which attach has failed waits for the others to fail as well.
BRIEFLY = 2.0


class Lease:
    """The channels of one attached model."""

    def close(self, ranks: tuple[int, ...], seconds: float | None = None) -> None:
        """Close those that nobody else uses, on every rank.

        Args:
            ranks: that call it. All ranks of the job open channels together and close them together: where a part
                of the job detaches its model they are left to whoever asks for the like.
            seconds: to wait for the others.
        """
        close = ranks == tuple(range(world()[1])) and self._meet(ranks, limit() if seconds is None else seconds)
        let_go(self, close=close)

    def _meet(self, ranks: tuple[int, ...], seconds: float) -> bool:
        alone = len(held_alone(self))
        try:
            if alone:
                together(f"the end of a model with {alone} channels", ranks, "the same calls on every rank", seconds)
        except RuntimeError:
            return False
        return True


@contextmanager
def lease() -> Iterator[Lease]:
    """Channels that are opened inside are those of one model; closed, if that fails on every rank."""
    opened = Lease()
    try:
        with held_by(opened):
            yield opened
    except Exception:
        opened.close(tuple(range(world()[1])), BRIEFLY)
        raise
