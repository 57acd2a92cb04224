"""What a model writes into its own parameters in forward, under `shard`: found, and stored.

Forward is given full parameters from an all-gather. A momentum encoder, a codebook or a clamp writes into them, and
the write would be lost when they are freed. It is found when they are freed, by comparing this rank's rows with those
that were gathered: one pass over 1/N of the parameter and no collective. A version count alone would cost less, but
`w.data`, NumPy and `foreach` over `w.data` escape it.
"""

from __future__ import annotations

import weakref
from operator import add
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import version
from ..core.layout import Leaf
from .freed_copies import Escaped, FreedCopies
from .write_back import Region, WriteBack, place, places


class GivenViews:
    """The tensors on one unit's full parameters that forward was given, by leaf.

    Attributes:
        views: of each time that forward was given them.
        places: where their memory was when they were given; `view.data = x` changes it.
        nodes: the autograd nodes that made them.
        own: by place of a leaf, the tensor that forward put there by `w.data = x`.
    """

    def __init__(self) -> None:
        self.views: list[tuple[Tensor, ...]] = []
        self.places: list[list[Region]] = []
        self.nodes: list[Any] = []
        self.own: dict[int, Tensor] = {}

    def add(self, views: tuple[Tensor, ...]) -> None:
        """Forward is given one more tensor of each leaf."""
        self.views.append(views)
        self.places.append(places(views))
        # All were made by one node, if any was.
        for v in views:
            if v.grad_fn is not None:
                self.nodes.append(v.grad_fn)
                break

    def version(self, j: int) -> int:
        """How often one leaf was written into by way of them, as far as autograd counts it."""
        return sum(version(views[j]) for views in self.views if not views[j].is_inference())

    def versions(self) -> list[int]:
        """`version` of each leaf."""
        counts = [0] * len(self.views[0])
        for views in self.views:
            for j, v in enumerate(views):
                if not v.is_inference():
                    counts[j] += version(v)
        return counts

    def recorded(self) -> set[int]:
        """The leaves that were written into while autograd recorded it."""
        found: set[int] = set()
        for views in self.views:
            for j, v in enumerate(views):
                if v.grad_fn is not None and v.grad_fn not in self.nodes:
                    found.add(j)
        return found

    def is_replaced(self, j: int) -> bool:
        """Whether forward has put another tensor in a leaf's place by `w.data = x`."""
        for views, were in zip(self.views, self.places, strict=True):
            if place(views[j]) != were[j]:
                return True
        return j in self.own

    def replaced(self) -> dict[int, Tensor]:
        """The tensors that forward has put in leaves' places since this was called last."""
        found: dict[int, Tensor] = {}
        for n, views in enumerate(self.views):
            now = places(views)
            if now != self.places[n]:
                found |= {j: v for j, v in enumerate(views) if now[j] != self.places[n][j]}
                self.places[n] = now
        return found


class ForwardWrites:
    """Finds what forward writes into full parameters, and stores it.

    Args:
        units: leaves that are gathered together.
        write_back: stores it.

    Attributes:
        freed: full parameters that were freed here and that user code still has.
    """

    def __init__(self, units: list[list[Leaf]], write_back: WriteBack):
        self.units, self.write_back = units, write_back
        self.freed = FreedCopies(units, write_back)
        # Where full parameters have other numbers than those stored: this rank's rows as they were gathered, by unit.
        self.began: dict[int, list[Tensor]] = {}
        # Of the full parameters that are kept now, by unit.
        self.given: dict[int, GivenViews] = {}
        # By unit and place in it: writes into full parameters that are gone.
        self.counts = [[0] * len(unit) for unit in units]

    def begin(self, i: int, fulls: list[Tensor]) -> None:
        """A unit was gathered."""
        if not self.write_back.exact:
            self.began[i] = [
                self.write_back.rows(leaf, x).clone() for leaf, x in zip(self.units[i], fulls, strict=True)
            ]

    def give(self, i: int, views: tuple[Tensor, ...]) -> None:
        """Forward is given these tensors of a unit's full parameters."""
        self.given.setdefault(i, GivenViews()).add(views)

    def is_replaced(self, i: int, j: int) -> bool:
        """Whether forward has put another tensor in a leaf's place, which no gather would give."""
        given = self.given.get(i)
        return given is not None and given.is_replaced(j)

    def version(self, i: int, j: int) -> int:
        """How often a leaf was written into: what autograd compares between forward and backward."""
        return self.counts[i][j] + (self.given[i].version(j) if i in self.given else 0)

    def settle(self, i: int, fulls: list[Tensor]) -> bool:
        """Store what forward has written into a unit's full parameters so far; whether there was something.

        A tensor that forward has put in a leaf's place takes that place in `fulls`.
        """
        given, changed = self.given[i], False
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            replaced, recorded, written = given.replaced(), given.recorded(), given.versions()
            for j, leaf in enumerate(self.units[i]):
                other = replaced.get(j)
                if other is not None and self.write_back.fits(leaf, other, fulls[j]):
                    fulls[j] = given.own[j] = other.detach()
                    self.counts[i][j] += 1
                if j in recorded:
                    self.write_back.lost[leaf.path] = "written with gradients enabled"
                changed |= self.write_back.store(leaf, fulls[j], self.began[i][j] if i in self.began else None)
                if other is not None or written[j]:
                    self.write_back.note(leaf, fulls[j])
        return changed

    def leave(self, i: int) -> list[Escaped] | None:
        """A unit is about to be freed: what forward was given of each leaf, if anything was."""
        given = self._take(i)
        if given is None:
            return None
        # By leaf, of each time that forward was given them.
        views = zip(*[map(weakref.ref, views) for views in given.views], strict=True)
        both = zip(views, zip(*given.places, strict=True), strict=True)
        return [(list(zip(*of_leaf, strict=True)), given.own.get(j)) for j, of_leaf in enumerate(both)]

    def forget(self) -> None:
        """Writes from now on into what forward was given are not looked for."""
        for i in list(self.given):
            self._take(i)
        self.freed.copies.clear()

    def _take(self, i: int) -> GivenViews | None:
        """What forward was given of a unit, which is counted and forgotten here."""
        given = self.given.pop(i, None)
        if given is not None:
            self.counts[i] = list(map(add, self.counts[i], given.versions()))
        return given
