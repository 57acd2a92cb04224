"""Formatting for tables: bytes, dtypes, paths that differ in numbers only, and aligned columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch


def format_bytes(size: float) -> str:
    """A size in the largest unit of which there is at least one.

    >>> [format_bytes(n) for n in (0, 1023, 1536, 5 * 1024**2, 3 * 1024**4)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 MiB', '3.0 TiB']
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def path_pattern(path: str) -> str:
    """A path with a star for each number: equal for paths that differ in numbers only.

    >>> path_pattern("blocks.11.weight")
    'blocks.*.weight'
    """
    return re.sub(r"\d+", "*", path)


def merge_paths(paths: Sequence[str]) -> str:
    """Paths of one pattern as one name, with their count.

    >>> merge_paths(["blocks.0.weight"]), merge_paths(["blocks.0.weight", "blocks.11.weight"])
    ('blocks.0.weight', 'blocks.{0..11}.weight x2')
    """
    if len(paths) == 1:
        return paths[0]
    texts = re.split(r"\d+", paths[0])
    merged = texts[0]
    for numbers, text in zip(zip(*(re.findall(r"\d+", path) for path in paths), strict=True), texts[1:], strict=True):
        values = sorted(set(map(int, numbers)))
        merged += (numbers[0] if len(values) == 1 else f"{{{values[0]}..{values[-1]}}}") + text
    return f"{merged} x{len(paths)}"


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table: its first `left` columns are aligned to the left, the others to the right.

    >>> align_columns([("state", "bytes"), ("exp_avg", "12 B")], left=1)
    ['state    bytes', 'exp_avg   12 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join([pad(x, n) for pad, x, n in zip(pads, row, widths, strict=True)]).rstrip() for row in rows]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without that of the library."""
    return str(dtype).removeprefix("torch.")
