"""States on another device: prefetched before an update, copied back after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .context import Context
from .executor import BUCKET_BYTES
from .layout import Leaves
from .transform import TransformState
from .tree import map_overlaid

# ----------------------------------------------------------------------------------------------------------------------
# `CopyQueue` copies between a device and the host in one direction. On CUDA it has its own stream beside the
# computation.


class PendingCopy:
    """A copy that was begun. Until it is waited for, nobody may touch a target or write a source."""

    def __init__(self, device: torch.device, event: torch.Event | None):
        self.device, self.event = device, event

    def wait_on_device(self) -> None:
        """Make later computations of the device wait for the copy. The host goes on."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait_on_host(self) -> None:
        """Return once the host may read and write targets and sources."""
        if self.event is not None:
            self.event.synchronize()


class CopyQueue:
    """Copies in one direction, one after the other: on a CUDA stream of their own, else at once.

    Args:
        device: one end of the copies; the other end is the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> PendingCopy:
        """Begin to copy pairs of (target, source).

        The stream waits for computations that were launched before, since they may write a source or read a target. The
        copy runs beside those that are launched afterwards.
        """
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return PendingCopy(self.device, None)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        for tensor in (x for pair in pairs for x in pair if x.device.type == "cuda"):
            # The allocator must not hand out memory that is freed during the copy. For pinned memory of the host
            # the copy itself sees to it.
            tensor.record_stream(self.stream)
        return PendingCopy(self.device, self.stream.record_event())


# ----------------------------------------------------------------------------------------------------------------------
# `Conveyor` copies offloaded state to its parameters for an update and back, one bucket of leaves at a time.
#
# While one bucket is updated, the next one is prefetched and the one before is copied back. On a GPU the three run at
# once, in both directions of the bus. The device holds about three buckets of the state.


@dataclass(frozen=True)
class _Fetch:
    """The copy of one leaf's state to the device of its parameter: by slot, sources and targets."""

    sources: dict[str, Tensor]
    targets: dict[str, Tensor]
    copy: PendingCopy

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.targets.values())


class Conveyor:
    """The copies of one transform's state in one step.

    Args:
        state: of the transform.
        params: its leaves, in the order in which they are updated, or in the opposite one, as in backward.
        ctx: of the step. Where it is recorded nothing is prefetched, and each copy is a plain `Tensor.to`.
    """

    def __init__(self, state: TransformState, params: Leaves, ctx: Context):
        self.state, self.params, self.recorded = state, params, ctx.recorded
        self.order = list(params)
        self.place = {path: i for i, path in enumerate(self.order)}
        self.prefetched: dict[str, _Fetch] = {}
        self.brought: set[str] = set()
        self.step = 1  # -1 where leaves come from the last to the first
        self.queues: dict[tuple[str, torch.device], CopyQueue] = {}

    def bring(self, state: TransformState, paths: Collection[str]) -> TransformState:
        """The state with that of some leaves on their parameters' devices; that of the next leaves is prefetched."""
        if self.recorded:
            return {slot: _beside(entry, self.params) for slot, entry in state.items()}
        here = {slot: dict(entry) if isinstance(entry, dict) else entry for slot, entry in state.items()}
        fetched = {p: fetch for p in paths if (fetch := self._fetched(p, state)) is not None}
        for path, fetch in fetched.items():
            fetch.copy.wait_on_device()
            for slot, x in fetch.targets.items():
                here[slot][path] = x
        if fetched:
            self._prefetch(list(paths))
        return {slot: _beside(entry, self.params) for slot, entry in here.items()}

    def take_back(self, new: TransformState, homes: TransformState, ctx: Context) -> TransformState:
        """The new state where the old one lives; in the same memory when donated."""
        pairs: list[tuple[Tensor, Tensor]] = []
        out = {slot: _home(entry, homes.get(slot), ctx, pairs) for slot, entry in new.items()}
        if pairs and ctx.donate:
            ctx.written.add(ctx.prefix)
        for device in {x.device for _, x in pairs}:
            copy = self._queue("back", device).copy([(t, x) for t, x in pairs if x.device == device])
            ctx.before_the_end(copy.wait_on_host)
        return out

    def _fetched(self, path: str, state: TransformState) -> _Fetch | None:
        """The copy of a leaf's state, prefetched or begun at this call; `None` where nothing has to be copied."""
        away = self._away(path, state)
        fetch = self.prefetched.pop(path, None)
        if fetch is not None and all(away.get(slot) is x for slot, x in fetch.sources.items()):
            return fetch
        return self._fetch(path, away)

    def _away(self, path: str, state: TransformState) -> dict[str, Tensor]:
        """The tensors of a leaf's state that are on another device than the leaf, by slot."""
        device = self.params[path].device
        found = {slot: entry.get(path) for slot, entry in state.items() if isinstance(entry, dict)}
        return {slot: x for slot, x in found.items() if isinstance(x, Tensor) and x.ndim and x.device != device}

    def _fetch(self, path: str, away: dict[str, Tensor]) -> _Fetch | None:
        if not away:
            return None
        device = self.params[path].device
        targets = {slot: torch.empty_like(x, device=device) for slot, x in away.items()}
        copy = self._queue("there", device).copy([(targets[slot], x) for slot, x in away.items()])
        return _Fetch(away, targets, copy)

    def _prefetch(self, paths: list[str]) -> None:
        """Begin to copy the state of the leaves that follow, up to a bucket."""
        if not self.brought and self.place[paths[0]] > 0:
            self.step = -1
        self.brought.update(paths)
        i = (max if self.step > 0 else min)(self.place[p] for p in paths) + self.step
        size = sum(fetch.nbytes for fetch in self.prefetched.values())
        while 0 <= i < len(self.order) and size < BUCKET_BYTES:
            path = self.order[i]
            if path not in self.brought and path not in self.prefetched:
                fetch = self._fetch(path, self._away(path, self.state))
                if fetch is not None:
                    self.prefetched[path] = fetch
                    size += fetch.nbytes
            i += self.step

    def _queue(self, direction: str, device: torch.device) -> CopyQueue:
        if (direction, device) not in self.queues:
            self.queues[direction, device] = CopyQueue(device)
        return self.queues[direction, device]


def _beside(entry: Any, params: Leaves) -> Any:
    """An entry with its tensors on their parameters' devices, moved by a plain `Tensor.to` if they are elsewhere.

    This is for copies that are recorded, and for states of other libraries. Those may keep leaves without their paths;
    then all go to the parameters' device, if there is only one.
    """
    if type(entry) is dict and all(isinstance(x, Tensor) for x in entry.values()):
        return {p: _to(params[p].device, x) if p in params else x for p, x in entry.items()}
    devices = {x.device for x in params.values()}

    def over(x: Any, device: torch.device | None) -> Any:
        if not isinstance(x, dict):
            return _to(device, x)
        return {k: over(y, params[k].device if k in params else device) for k, y in x.items()}

    return over(entry, devices.pop() if len(devices) == 1 else None)


def _to(device: torch.device | None, x: Tensor) -> Tensor:
    return x.to(device) if device is not None and x.ndim else x


def _home(entry: Any, home: Any, ctx: Context, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """An entry of the state with every tensor on its home device; pairs of tensors to copy are added to `pairs`."""

    def back(x: Any, old: Any) -> Any:
        if not isinstance(old, Tensor) or x.device == old.device:
            return x
        if ctx.recorded:
            return x.to(old.device)
        # State from a checkpoint lies in plain memory: it is pinned at its first step.
        pin = x.device.type == "cuda" and old.device.type == "cpu"
        target = old if ctx.donate and (not pin or old.is_pinned()) else torch.empty_like(old, pin_memory=pin)
        pairs.append((target, x))
        return target

    return map_overlaid(back, home, entry)
