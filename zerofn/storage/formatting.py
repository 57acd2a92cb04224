"""Bytes, dtypes and runs of like paths, as tables tell them, and the lines of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch


def readable(size: float) -> str:
    """Bytes for people.

    >>> [readable(n) for n in (0, 1023, 1536, 5 * 1024**2, 3 * 1024**4)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 MiB', '3.0 TiB']
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def span_of(paths: Sequence[str]) -> str:
    """Paths that differ in numbers only, as one.

    >>> span_of(["blocks.0.weight", "blocks.11.weight"])
    'blocks.{0..11}.weight'
    """
    numbers = [re.findall(r"\d+", path) for path in paths]
    texts = re.split(r"\d+", paths[0])
    out = texts[0]
    for found, text in zip(zip(*numbers, strict=True), texts[1:], strict=True):
        values = sorted({int(n) for n in found})
        out += (found[0] if len(values) == 1 else f"{{{values[0]}..{values[-1]}}}") + text
    return out


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table: its first `left` columns are aligned to the left, the others to the right.

    >>> aligned([("state", "bytes"), ("exp_avg", "12 B")], left=1)
    ['state    bytes', 'exp_avg   12 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join([pad(x, n) for pad, x, n in zip(pads, row, widths, strict=True)]).rstrip() for row in rows]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without that of the library."""
    return str(dtype).removeprefix("torch.")
