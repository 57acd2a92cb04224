"""What a model writes into its own parameters in forward, under `shard`: noticed, and stored.

Forward is given gathered copies. A momentum encoder, a codebook or a clamp writes into them, and what is written would
be gone with the copy. It is told by comparing this rank's rows with what was gathered when a copy is let go, which
takes one pass over 1/N of it and no collective. A version count alone would cost less, but `w.data`, NumPy and
`foreach` over `w.data` escape it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import add
from typing import Any

from torch import Tensor

from .._compat.tensors import version
from ..core.layout import Leaf, Leaves
from .freed_copies import Left, LetGo
from .write_back import Place, WriteBack, place, places, plainly


class Given:
    """What forward has been given of one gathered unit: tensors on its memory, and the nodes that made them."""

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        # Where their memory was; `view.data = x` puts them elsewhere.
        self.places: list[list[Place]] = []
        self.nodes: list[Any] = []
        # Data that forward has put in the place of a leaf's.
        self.own: dict[int, Tensor] = {}

    def add(self, views: tuple[Tensor, ...]) -> None:
        """More of them."""
        self.views.append(views)
        self.places.append(places(views))
        # All were made by one node, if any was.
        for v in views:
            if v.grad_fn is not None:
                self.nodes.append(v.grad_fn)
                break

    def version(self, j: int) -> int:
        """How often the leaf has been written into by way of them, as far as autograd would know."""
        count = 0
        for views in self.views:
            if not views[j].is_inference():
                count += version(views[j])
        return count

    def versions(self) -> list[int]:
        """That of each leaf."""
        counts = [0] * len(self.views[0])
        for views in self.views:
            for j, v in enumerate(views):
                if not v.is_inference():
                    counts[j] += version(v)
        return counts

    def recorded(self) -> set[int]:
        """The leaves that have been written into while autograd recorded it."""
        found: set[int] = set()
        for views in self.views:
            for j, v in enumerate(views):
                if v.grad_fn is not None and v.grad_fn not in self.nodes:
                    found.add(j)
        return found

    def is_elsewhere(self, j: int) -> bool:
        """Whether forward has put other data in the place of the leaf's."""
        for views, were in zip(self.views, self.places, strict=True):
            if place(views[j]) != were[j]:
                return True
        return j in self.own

    def exchanged(self) -> dict[int, Tensor]:
        """The leaves in whose place forward has put other data since this was asked last."""
        found: dict[int, Tensor] = {}
        for n, views in enumerate(self.views):
            now = places(views)
            if now != self.places[n]:
                found |= {j: v for j, v in enumerate(views) if now[j] != self.places[n][j]}
                self.places[n] = now
        return found


class Written:
    """Notices what is written into gathered copies, and stores it.

    Args:
        units: leaves that are gathered together.
        params: this rank's shards by path.
        span: this rank's flat range of a leaf.
        exact: whether a copy has the numbers that are stored, in whatever dtype. Where a view has made others, what
            is written into it is noticed and cannot be stored.

    Attributes:
        back: the way back to what is stored.
        let_go: copies that are kept no longer, and that somebody has.
    """

    def __init__(
        self, units: list[list[Leaf]], params: Leaves, span: Callable[[Leaf], tuple[int, int]], exact: bool = True
    ):
        self.units = units
        self.back = WriteBack(params, span, exact)
        self.let_go = LetGo(units, self.back)
        # Where a copy has other numbers than those stored: this rank's rows of it, by unit.
        self.began: dict[int, list[Tensor]] = {}
        # Of the copies that are kept now, by unit.
        self.given: dict[int, Given] = {}
        self.counts = [[0] * len(unit) for unit in units]

    def begin(self, i: int, fulls: list[Tensor]) -> None:
        """A unit has been gathered."""
        if not self.back.exact:
            self.began[i] = [self.back.rows(leaf, x).clone() for leaf, x in zip(self.units[i], fulls, strict=True)]

    def give(self, i: int, views: tuple[Tensor, ...]) -> None:
        """Forward has these tensors of a unit's copy from now on."""
        self.given.setdefault(i, Given()).add(views)

    def is_elsewhere(self, i: int, j: int) -> bool:
        """Whether forward has put other data in the place of a leaf's: a note would be of those that were gathered."""
        given = self.given.get(i)
        return given is not None and given.is_elsewhere(j)

    def version(self, i: int, j: int) -> int:
        """How often a leaf has been written into: what autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def settle(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what forward has written so far into a unit's copy that it was given; whether there was something.

        Data that forward has put in the place of a leaf's take their place in `fulls`.
        """
        given, changed = self.given[i], False
        with plainly():
            exchanged, recorded, written = given.exchanged(), given.recorded(), given.versions()
            for j, leaf in enumerate(self.units[i]):
                other = exchanged.get(j)
                if other is not None and self.back.fits(leaf, other, fulls[j]):
                    fulls[j] = given.own[j] = other.detach()
                    self.counts[i][j] += 1
                if j in recorded:
                    self.back.lost[leaf.path] = "written with gradients enabled"
                changed |= self.back.store(leaf, fulls[j], self.began[i][j] if i in self.began else None)
                if other is not None or written[j]:
                    self.back.note(leaf, fulls[j])
        return changed

    def leave(self, i: int) -> list[Left] | None:
        """A unit's copy is about to be let go: what forward was given of each leaf, if anything was."""
        given = self.given.pop(i, None)
        if given is None:
            return None
        self.counts[i] = list(map(add, self.counts[i], given.versions()))
        # By leaf, of each time that forward was given them.
        views = zip(*[map(weakref.ref, views) for views in given.views], strict=True)
        both = zip(views, zip(*given.places, strict=True), strict=True)
        return [Left(list(zip(*of_leaf, strict=True)), given.own.get(j)) for j, of_leaf in enumerate(both)]

    def look_again(self) -> set[int]:
        """Store what has been written since into copies that somebody has; the units of which it is."""
        changed = self.let_go.look_again()
        for i, j in changed:
            self.counts[i][j] += 1
        return {i for i, _ in changed}

    def forget(self) -> None:
        """Nothing that forward was given is its own any more."""
        for i in list(self.given):
            self.leave(i)
        self.let_go.held.clear()
