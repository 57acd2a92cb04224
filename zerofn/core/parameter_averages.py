"""Finds averages of parameters, as of `ema`, in the states of transforms, by the transform's name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._errors import explain
from .facts import AVERAGE
from .layout import Leaves
from .state import State


def averages_of(state: State, of: str | None, where: str) -> Leaves:
    """The averages by path, laid out as the stored parameters are; a leaf that is not averaged is not there.

    Args:
        state: that has them.
        of: the name of an `ema`, or of the `masked` or `partition` that holds one; `None` for the only one.
        where: the call that asks, for messages.

    Raises:
        ValueError: there is none of that name, or several and no name.
    """
    names = [name for name, own in state.transforms.items() if _averages(own, state.leaves)]
    name = names[0] if of is None and len(names) == 1 else of
    if name not in names:
        why = f"this state has averages of {', '.join(map(repr, names))}" if names else "this state has no averages"
        right = where.format(repr(names[0])) if names else "zf.chain(..., zf.adamw(1e-3), zf.ema(0.999))"
        raise ValueError(explain(where.format(repr(of)), why, right))
    return _averages(state.transforms[name], state.leaves)


def _averages(entries: dict[str, Any], leaves: Leaves) -> Leaves:
    """The averages in a transform's state; those of a grouped one lie with its members, with labels of any text."""
    found: Leaves = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            continue
        # A member's entries are slots; those of a slot are tensors by path.
        if not all(isinstance(x, Tensor) and p in leaves for p, x in entry.items()):
            found.update(_averages(entry, leaves))
        elif name == AVERAGE:
            found.update(entry)
    return found
