"""State that lives elsewhere, brought to its parameters for an update and taken back, a few leaves at a time.

While one bucket is updated the next one arrives and the one before leaves. On a GPU the three run at once, and
both directions of the bus are busy; the device holds about three buckets of the state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import host_copies as _lanes
from .executor import BUCKET_BYTES
from .host_copies import Arrival, Lane
from .layout import Leaves
from .transform import TransformState
from .tree import flatten, tree_keys, tree_map, unflatten
from .update_context import Context


@dataclass(frozen=True)
class _Coming:
    """What of a leaf's state is under way to its parameter: by slot, where it comes from and where it arrives."""

    sources: dict[str, Tensor]
    targets: dict[str, Tensor]
    arrival: Arrival

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.targets.values())


class Conveyor:
    """The transfers of one transform in one step.

    Args:
        state: of the transform.
        params: its leaves, in the order in which they are updated, or in the opposite one, as backward has it.
        recorded: whether transfers are recorded: then none is made ahead, and each is a copy that torch knows.
    """

    def __init__(self, state: TransformState, params: Leaves, recorded: bool = False):
        self.state, self.params, self.recorded = state, params, recorded
        self.order = list(params)
        self.place = {path: i for i, path in enumerate(self.order)}
        self.coming: dict[str, _Coming] = {}
        self.brought: set[str] = set()
        self.step = 1
        self.lanes: dict[tuple[str, torch.device], Lane] = {}

    def bring(self, state: TransformState, paths: Collection[str]) -> TransformState:
        """Some leaves' state beside their parameters; what will probably be wanted next is sent for."""
        if self.recorded:
            return {slot: _beside(entry, self.params) for slot, entry in state.items()}
        here = {slot: dict(entry) if isinstance(entry, dict) else entry for slot, entry in state.items()}
        found = {p: coming for p in paths if (coming := self._found(p, state)) is not None}
        for path, coming in found.items():
            coming.arrival.here()
            for slot, x in coming.targets.items():
                here[slot][path] = x
        if found:
            self._look_ahead(list(paths))
        return {slot: _beside(entry, self.params) for slot, entry in here.items()}

    def take_back(self, new: TransformState, homes: TransformState, ctx: Context) -> TransformState:
        """What a transform has made of its state, where the state lives; into the same memory when donated."""
        pairs: list[tuple[Tensor, Tensor]] = []
        out = {slot: _home(entry, homes[slot], ctx, pairs) for slot, entry in new.items()}
        for device in {x.device for _, x in pairs}:
            arrival = self._lane("back", device).copy([(t, x) for t, x in pairs if x.device == device])
            ctx.before_the_end(arrival.wait)
        return out

    def _found(self, path: str, state: TransformState) -> _Coming | None:
        """The state of a leaf on its way: sent for ahead, or else at this call."""
        away = self._away(path, state)
        coming = self.coming.pop(path, None)
        if coming is not None and all(away.get(slot) is x for slot, x in coming.sources.items()):
            return coming
        return self._send_for(path, away)

    def _away(self, path: str, state: TransformState) -> dict[str, Tensor]:
        """What of a leaf's state is on another device than the leaf, by slot."""
        device = self.params[path].device
        found = {slot: entry.get(path) for slot, entry in state.items() if isinstance(entry, dict)}
        return {slot: x for slot, x in found.items() if isinstance(x, Tensor) and x.ndim and x.device != device}

    def _send_for(self, path: str, away: dict[str, Tensor]) -> _Coming | None:
        if not away:
            return None
        device = self.params[path].device
        targets = {slot: torch.empty_like(x, device=device) for slot, x in away.items()}
        arrival = self._lane("there", device).copy([(targets[slot], x) for slot, x in away.items()])
        return _Coming(away, targets, arrival)

    def _look_ahead(self, paths: list[str]) -> None:
        """Send for the leaves that follow, up to a bucket of state."""
        if not self.brought and self.place[paths[0]] > 0:
            self.step = -1
        self.brought.update(paths)
        i = (max if self.step > 0 else min)(self.place[p] for p in paths) + self.step
        size = sum(coming.nbytes for coming in self.coming.values())
        while 0 <= i < len(self.order) and size < BUCKET_BYTES:
            path = self.order[i]
            if path not in self.brought and path not in self.coming:
                coming = self._send_for(path, self._away(path, self.state))
                if coming is not None:
                    self.coming[path] = coming
                    size += coming.nbytes
            i += self.step

    def _lane(self, way: str, device: torch.device) -> Lane:
        if (way, device) not in self.lanes:
            self.lanes[way, device] = _lanes.lane(device)
        return self.lanes[way, device]


def _beside(entry: Any, params: Leaves) -> Any:
    """An entry with its tensors on their parameters' devices, where no lane has brought them.

    That is: where transfers are recorded, and in the trees of other libraries. Those may keep leaves in lists,
    without their paths; then all go where the parameters are, if that is one device.
    """
    if isinstance(entry, dict) and all(isinstance(x, Tensor) for x in entry.values()):
        return {p: _to(params[p].device, x) if p in params else x for p, x in entry.items()}
    devices = {x.device for x in params.values()}
    common = devices.pop() if len(devices) == 1 else None
    values, spec = flatten(entry)
    ends = [keys[-1] if keys else "" for keys in tree_keys(entry)]
    there = [params[p].device if p in params else common for p in ends]
    return unflatten(spec, [_to(device, x) for device, x in zip(there, values, strict=True)])


def _to(device: torch.device | None, x: Any) -> Any:
    return x.to(device) if device is not None and isinstance(x, Tensor) and x.ndim else x


def _home(entry: Any, home: Any, ctx: Context, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """An entry of the state with every tensor where it lives; what has to be copied there is put in `pairs`."""

    def back(x: Any, old: Any) -> Any:
        if not isinstance(x, Tensor) or not isinstance(old, Tensor) or x.device == old.device:
            return x
        if ctx.recorded:
            return x.to(old.device)
        # What a checkpoint has brought is pinned at its first step.
        pin = x.device.type == "cuda" and old.device.type == "cpu"
        target = old if ctx.donate and (not pin or old.is_pinned()) else torch.empty_like(old, pin_memory=pin)
        pairs.append((target, x))
        return target

    if isinstance(entry, dict) and all(isinstance(x, Tensor) for x in entry.values()):
        return {p: back(x, home[p]) for p, x in entry.items()}
    return tree_map(back, entry, home)
