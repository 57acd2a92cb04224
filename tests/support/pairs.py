"""A few cells of a grid in which every pair of values stands, and the rest of it marked slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def cover(cells: Iterable[tuple]) -> list[tuple]:
    """The fewest cells that a greedy choice finds, so that each pair of values that is in `cells` is in one of them.

    Values may be of any kind; a cell is chosen by where it stands, so that the choice is the same in every run.
    """
    cells = list(cells)
    axes: list[list[Any]] = [[] for _ in cells[0]]
    numbers = []
    for cell in cells:
        row = []
        for axis, value in zip(axes, cell, strict=True):
            if value not in axis:
                axis.append(value)
            row.append(axis.index(value))
        numbers.append(row)
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in numbers]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(cells)), key=lambda i: (len(pairs[i] & left), -i))
        left -= pairs[best]
        chosen.append(best)
    return [cells[i] for i in sorted(chosen)]


def grid(*axes: Iterable[Any]) -> list[tuple]:
    """The cells that `cover` chooses of the whole product."""
    return cover(itertools.product(*axes))
