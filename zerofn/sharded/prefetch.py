"""Which unit will be used next: the one that followed the last time.

What a model uses after what is the same in nearly every call. A wrong guess costs one gather that nobody needs, and is
not made twice; ranks that guess otherwise fetch nothing (`ranks.join`). A guess is made from the last two units, since
a parameter that all blocks share comes between any two of them.
"""

from __future__ import annotations

from ..ranks.join import NOTHING


class Road:
    """The units that are used, in order: in a call of the model, and in a backward."""

    def __init__(self) -> None:
        self.after: dict[tuple[bool, int, int], int] = {}
        # Whether in backward, the unit before the last, and the last one.
        self.here: tuple[bool, int, int] | None = None

    def use(self, i: int, backward: bool) -> None:
        """A unit is used."""
        here = self.here
        if here is None or here[0] is not backward:
            self.end()
            self.here = backward, NOTHING, i
        elif here[2] != i:
            self.after[here] = i
            self.here = backward, here[2], i

    def ahead(self) -> int:
        """The unit that comes next, as far as is known."""
        return NOTHING if self.here is None else self.after.get(self.here, NOTHING)

    def end(self) -> None:
        """The call, or the backward, is over: nothing follows."""
        if self.here is not None:
            self.after.pop(self.here, None)
        self.here = None
