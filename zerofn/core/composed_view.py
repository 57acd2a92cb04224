"""The views of a leaf as one: composed here, for every route and stage.

`views` are in the order of their chain, from the model to storage. One collective for many leaves is
`coalesced_views.py`; differentiable it is `linear_map.LeafView`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._ranges import VIEW, ranged
from .layout import Leaf
from .views import View


def see(views: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """What the model sees of a stored tensor; `x` itself where no view changes it."""
    for view in reversed(views):
        with ranged(VIEW, view.name):
            x = view.view(x, leaf)
    return x


def pull(views: Sequence[View], g: Tensor, leaf: Leaf) -> Tensor:
    """The transpose of `see`: from a cotangent of what is seen to one of what is stored."""
    for view in views:
        with ranged(VIEW, view.name):
            g = view.pull(g, leaf)
    return g


def store(views: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """What is stored of what the model sees."""
    for view in views:
        x = view.store(x, leaf)
    return x
