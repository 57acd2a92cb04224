"""Which collectives follow the one that is asked for now: those that did the last time.

What a model needs after what is the same in nearly every call and backward. Ranks that expect the same promise each
other to do it, and the next unit's parameters are gathered while the last one computes (`ranks.join`).
"""

from __future__ import annotations

from ..ranks.ordered_collectives import Asked

START: Asked = (0, 0)


class Course:
    """The collectives of a call of the model, or of a backward, in order."""

    def __init__(self) -> None:
        # Told from the last two, since parameters that all blocks share come between any two.
        self.after: dict[tuple[Asked, Asked], Asked] = {}
        self.here: tuple[Asked, Asked] = (START, START)

    def go(self, kind: int, unit: int) -> None:
        """A collective is asked for now."""
        self.after[self.here] = (kind, unit)
        self.here = (self.here[1], (kind, unit))

    def ahead(self, kind: int, most: int) -> list[Asked]:
        """What followed the last time on where the ranks are now, as far as is known and of this kind."""
        found: list[Asked] = []
        here = self.here
        while len(found) < most and (then := self.after.get(here)) is not None and then[0] == kind:
            found.append(then)
            here = (here[1], then)
        return found

    def end(self) -> None:
        """The call, or the backward, is over: nothing follows."""
        self.after.pop(self.here, None)
        self.here = (START, START)
