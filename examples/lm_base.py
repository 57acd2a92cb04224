"""What the short examples on text share: a small GPT that has read a little, and texts that every Python carries."""

from __future__ import annotations

import inspect
import json
import pathlib
import textwrap

import torch
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss
from torch import Tensor

SEQ = 64


def base(steps: int, width: int = 64) -> GPT:
    """A GPT of two blocks, trained on the language reference for some steps by plain torch."""
    torch.manual_seed(0)
    model = GPT(width, layers=2, heads=2, seq=SEQ)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    text = Text.split(read_text(None), SEQ)
    for step in range(steps):
        x, y = text.batch(0, step, 16, SEQ)
        next_byte_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def code() -> Text:
    """Sources of the standard library: another kind of text."""
    return Text.split("\n".join(inspect.getsource(m) for m in (json.decoder, pathlib, textwrap)).encode(), SEQ)


def validate(model, text: Text) -> float:
    with torch.no_grad():
        losses = [next_byte_loss(model(x), y) for x, y in text.validation(16, SEQ)]
    return torch.stack(losses).mean().item()


def padded(rows: list[bytes], seq: int = SEQ) -> Tensor:
    """Rows of bytes of different lengths as one tensor, filled up with zeros."""
    return torch.stack([torch.tensor([*row[:seq], *[0] * (seq - len(row))]) for row in rows])
