"""Copies between a device and the host in one direction, on CUDA on a stream of their own beside the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PendingCopy:
    """A copy that was begun. Until it is waited for, nobody may touch a target or write a source."""

    def __init__(self, device: torch.device, event: torch.Event | None):
        self.device, self.event = device, event

    def wait_on_device(self) -> None:
        """What the device computes from here on comes after the copy. The host goes on."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)

    def wait_on_host(self) -> None:
        """Return once the host may read and write targets and sources."""
        if self.event is not None:
            self.event.synchronize()


class CopyQueue:
    """Copies in one direction, one after the other: on a CUDA stream of their own, else at once.

    Args:
        device: to or from which is copied; the other end is the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> PendingCopy:
        """Begin to copy pairs of (target, source).

        Computations that were launched before may write a source, or read what lay in a target's memory: the stream
        waits for them. The copy runs beside those that are launched afterwards.
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
