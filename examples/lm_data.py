"""Text as bytes: what to train on, what to hold out, and which bytes belong to which step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

HELD_OUT = 0.1  # the tail of the text


def read_text(file: str | None) -> bytes:
    """A file's bytes, or the language reference that every Python carries for `help()`: 0.5 MB of English."""
    if file is not None:
        return Path(file).read_bytes()
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@dataclass(frozen=True)
class Text:
    """The two parts of a text, as bytes in tensors.

    Attributes:
        train: learned from.
        held_out: the tail, never trained on.
    """

    train: Tensor
    held_out: Tensor

    @classmethod
    def split(cls, text: bytes, seq: int) -> Text:
        everything = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(text) - int(HELD_OUT * len(text))
        if len(text) - cut <= seq:
            raise ValueError(
                f"the text has {len(text)} bytes; its held-out tenth must be longer than --seq {seq}. "
                f"Give a text of {int((seq + 1) / HELD_OUT) + 1} bytes or more, or a smaller --seq."
            )
        return cls(everything[:cut], everything[cut:])

    def batch(self, seed: int, step: int, size: int, seq: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step: a function of its arguments, so resuming needs no sampler state."""
        # Only the low 32 bits of a seed count, so the pair is not packed into the two halves of 64.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - seq, (size,), generator=generator)
        return windows(self.train, starts, seq)

    def validation(self, size: int, seq: int) -> list[tuple[Tensor, Tensor]]:
        """Batches of at most 64 windows, spread evenly over the held-out part; the same at every call."""
        last = len(self.held_out) - seq - 1
        starts = torch.linspace(0, last, min(64, last // seq + 1)).long()
        return [windows(self.held_out, part, seq) for part in starts.split(size)]


def windows(text: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """The bytes from each start on, and the same moved on by one."""
    rows = text[starts[:, None] + torch.arange(seq + 1)].long()
    return rows[:, :-1], rows[:, 1:]
