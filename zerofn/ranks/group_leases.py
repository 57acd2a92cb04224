"""The groups of an attached model: closed when it is detached, and when `attach` fails.

A group that one rank closes breaks what another rank still sends to it. So all ranks of the job meet first, when each
has sent all that it will. If they do not meet, groups stay open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .backend import world
from .open_groups import held_alone, held_by, let_go
from .rendezvous import together

# Seconds for which a rank on which attach has failed waits for the others to fail as well.
BRIEFLY = 2.0


class Lease:
    """The groups of one attached model."""

    def close(self, ranks: tuple[int, ...], seconds: float | None = None) -> None:
        """Close those that nobody else uses, on every rank.

        Args:
            ranks: that call this. All ranks of the job open and close groups together: if only some detach their
                model, its groups stay open for the next who asks for the like.
            seconds: to wait for the others; by default as any other call.
        """
        close, alone = ranks == tuple(range(world()[1])), len(held_alone(self))
        if close and alone:
            try:
                together(f"the end of a model with {alone} channels", ranks, "the same calls on every rank", seconds)
            except RuntimeError:
                close = False
        let_go(self, close)


@contextmanager
def lease() -> Iterator[Lease]:
    """Groups that are opened inside belong to one model. They are closed if every rank raises an error inside."""
    opened = Lease()
    try:
        with held_by(opened):
            yield opened
    except BaseException:
        opened.close(tuple(range(world()[1])), BRIEFLY)
        raise
