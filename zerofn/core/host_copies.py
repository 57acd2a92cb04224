"""Copies between a device and the host: in one direction, one after the other, beside what the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # of (target, source)


class Arrival(Protocol):
    """A copy that was begun."""

    def here(self) -> None:
        """What is computed on the device from now on comes after the copy. The host goes on."""
        ...

    def wait(self) -> None:
        """The host may read and write target and source."""
        ...


class Lane(Protocol):
    """One direction of copies, to or from one device."""

    def copy(self, pairs: Pairs) -> Arrival:
        """Begin to copy. Until it has arrived no one may touch a target, or write a source."""
        ...


class Done:
    """The arrival of a copy that was made at once."""

    def here(self) -> None: ...

    def wait(self) -> None: ...


class AtOnce:
    """Copies in the order of the program."""

    def copy(self, pairs: Pairs) -> Arrival:
        for target, source in pairs:
            target.copy_(source)
        return Done()


class Beside:
    """Copies on a CUDA stream of their own.

    Each copy begins when what was computed before is done: that may write a source, or read what lay in a
    target's memory before. So a copy runs beside what is computed *after* it was begun.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, pairs: Pairs) -> Arrival:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        for tensor in (x for pair in pairs for x in pair if x.device.type == "cuda"):
            # Memory that is let go while it is copied must not be handed out before the copy is done. For
            # pinned memory of the host the copy itself sees to it.
            tensor.record_stream(self.stream)
        return Arrived(self.stream.record_event(), self.device)


class Arrived:
    """The end of a copy on a CUDA stream."""

    def __init__(self, event: torch.Event, device: torch.device):
        self.event, self.device = event, device

    def here(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


def lane(device: torch.device) -> Lane:
    """A lane to or from a device: streams where there are any, which is on CUDA."""
    return Beside(device) if device.type == "cuda" else AtOnce()
