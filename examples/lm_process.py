"""The process a run lives in: its rank among others, its device, and Ctrl-C."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

# As torchrun sets them; a world of one needs neither.
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def over_ranks(x: Tensor, op: str) -> Tensor:
    """The "mean" or the "max" over ranks of a tensor, in place."""
    if WORLD > 1:
        largest = op == "max"
        torch.distributed.all_reduce(x, op=getattr(torch.distributed.ReduceOp, "MAX" if largest else "SUM"))
        x.div_(1 if largest else WORLD)
    return x


class Interrupt:
    """Ctrl-C ends a run after the step under way, when states are whole; a second one ends it at once."""

    def __init__(self, device: torch.device) -> None:
        self.asked = torch.zeros((), device=device)

    def __enter__(self) -> Interrupt:
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked.fill_(1)

    def stops(self) -> bool:
        """Whether to stop now. Ranks are interrupted at different moments, but must stop at the same step."""
        return bool(over_ranks(self.asked.clone(), "max"))
