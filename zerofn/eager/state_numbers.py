"""What a transform keeps that is no tensor, such as a count in Python: not written in place, but put where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core.state import State
from ..core.tree import flatten, unflatten


@dataclass(frozen=True)
class NoTensor:
    """Stands for something in the state of a transform that is no tensor.

    Attributes:
        at: the transform, and where it is among what that has.
        value: what is there.
    """

    at: tuple[str, int]
    value: Any


def with_marks(state: State) -> State:
    """The same state with a `NoTensor` for all that is no tensor."""
    found = {}
    for name, own in state.transforms.items():
        values, spec = flatten(own)
        if not all([isinstance(x, Tensor) for x in values]):
            own = unflatten(
                spec, [x if isinstance(x, Tensor) else NoTensor((name, i), x) for i, x in enumerate(values)]
            )
        found[name] = own
    return replace(state, transforms=found)


def with_numbers(state: State, numbers: Mapping[tuple[str, int], Any]) -> State:
    """The same state with these in the places that they are keyed by."""
    found = dict(state.transforms)
    for name in dict.fromkeys(name for name, _ in numbers):
        values, spec = flatten(found[name])
        found[name] = unflatten(spec, [numbers.get((name, i), x) for i, x in enumerate(values)])
    return replace(state, transforms=found) if numbers else state
