"""Parameters as other programs have them: what the model computes with, of each leaf the part that a rank stores.

What is stored goes through the views of one's own on its way out (`seen_part`), and back through their `store` on its
way in (`stored_part`). A cast is none of them: what is exported is in the dtype it is stored in.
"""

from __future__ import annotations

from torch import Tensor

from .._errors import explain
from .composed_view import see, store
from .layout import Leaf, Placement
from .road import Road


def seen_part(road: Road, stored: Tensor, leaf: Leaf) -> Tensor:
    """Of what is stored of a leaf, what the model sees, cut in the same way. All ranks call it.

    A view in front of a cut sees the whole leaf, which is gathered for it.
    """
    if not _renumbered(road, leaf):
        return stored
    stages = [stage for stage in road.stages if stage.dtypes is None]
    return store([stage for stage in stages if stage.wire is not None], see(stages, stored, leaf), leaf)


def stored_part(road: Road, seen: Tensor, leaf: Leaf) -> Tensor:
    """Of what the model is to see of a leaf, what is stored, cut in the same way. All ranks call it."""
    if not _renumbered(road, leaf):
        return seen
    return road.store(see([stage for stage in road.stages if stage.wire is not None], seen, leaf), leaf)


def _renumbered(road: Road, leaf: Leaf) -> bool:
    return any([stage.renumbers and stage.changes(leaf) for stage in road.stages])


def check_known(placement: Placement, pipe: object, call: str, right: str) -> None:
    """Raise a TypeError for a state that is seen through views of one's own, where nobody says which they are."""
    if pipe is None and placement.seen_by:
        why = f"the model sees it through {', '.join(placement.seen_by)}, which a state has by name alone"
        raise TypeError(explain(call, why, right))
