"""Compares the tensors of a state, by name, with those that a chain makes for its leaves: shapes, dtypes and devices.

A kernel takes addresses and lengths, and would write outside of a moment that is shorter than its leaf. So a state is
compared where it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._errors import kind_of
from ..kernels.rounding import FORMAT_ENTRY
from .tree import Tree, flatten, named, tensors_of

_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))
_HOST = torch.device("cpu")
# Of each entry that does not fit, the path of its leaf (or its own name) and what is wrong.
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Form:
    """What a chain makes for its leaves.

    Attributes:
        states: by owner, tensors on the meta device (and numbers, which need not be there).
        lists: the structure of `states`, and shapes and dtypes in the order of `flatten`.
    """

    states: dict[str, Any]
    lists: tuple[Any, list[torch.Size], list[torch.dtype]]

    @classmethod
    def of(cls, first: Mapping[str, Callable[[], Any]]) -> Form:
        """The form of what these functions return, by owner. One that takes no meta tensors, and raises, is left out.

        What they draw leaves no trace in torch's generator: they may be of the user's.
        """
        states: dict[str, Any] = {}
        with torch.random.fork_rng(devices=()):
            for owner, make in first.items():
                with suppress(Exception):
                    states[owner] = make()
        return cls(states, lists_of(states))

    def misfits(
        self,
        found: Mapping[str, Any],
        paths: Collection[str],
        lead: tuple[int, ...] = (),
        grows: Callable[[str], bool] = lambda owner: False,
    ) -> Rows:
        """The entries that are missing, unexpected, or of another shape or dtype.

        Args:
            found: by owner, the entries of a state.
            paths: of all leaves.
            lead: the first dimensions of each tensor, if several states are stacked.
            grows: whether an owner may have made other entries since its first state, as those of another library do.
        """
        with suppress(AttributeError):  # a value that is no tensor
            if lists_of(found) == self.lists:
                return []
        return [row for owner in self.states for row in self._of(owner, found[owner], paths, lead, grows(owner))]

    def _of(self, owner: str, found: Any, paths: Collection[str], lead: tuple[int, ...], grows: bool) -> Rows:
        ours, theirs = (dict(named(x, paths)) for x in (self.states[owner], found))
        rows = []
        for name in dict.fromkeys([*ours, *theirs]):
            slot = "/".join(filter(None, (owner, name.slot, name.below)))
            if name not in ours or name not in theirs:
                # States of older versions lack this entry, and go on by the first format.
                old = name in ours and name.path is None and name.slot.split("/")[-1] == FORMAT_ENTRY
                if not grows and not old:
                    why = "is missing" if name in ours else "is unexpected"
                    rows.append((name.path or slot, f"{slot} {why}" if name.path else why))
                continue
            a, b = ours[name], theirs[name]
            if not isinstance(a, Tensor) or (
                isinstance(b, Tensor) and b.shape == (*lead, *a.shape) and b.dtype == a.dtype
            ):
                continue
            got = f"of shape {tuple(b.shape)}, {b.dtype}," if isinstance(b, Tensor) else kind_of(b)
            what = f"{got} instead of {tuple(a.shape)}, {a.dtype}"
            rows.append((slot, f"is {what}") if name.path is None else (name.path, f"{slot} is {what}"))
        return rows


def lists_of(states: Tree) -> tuple[Any, list[torch.Size], list[torch.dtype]]:
    """The structure of a tree of tensors, their shapes and their dtypes."""
    values, spec = flatten(states)
    return spec, list(map(_SHAPE, values)), list(map(_DTYPE, values))


def elsewhere(states: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> Rows:
    """The tensors of leaves that neither lie where their leaf does nor on the host, as those of `offload` do."""
    devices = {path: x.device for path, x in leaves.items()}
    one = len(set(devices.values())) == 1
    if one and set(map(_DEVICE, tensors_of(states))) <= {*devices.values(), _HOST}:
        return []
    return [
        (name.path, f"{owner}/{name.slot} is on {x.device} instead of {devices[name.path]}")
        for owner, own in states.items()
        for name, x in named(own, devices)
        if name.path in devices and isinstance(x, Tensor) and x.device not in (devices[name.path], _HOST)
    ]
