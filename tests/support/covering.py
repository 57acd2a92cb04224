"""A few rows of a large table that stand for it in every run; the whole table is slow."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import pytest


def covering(rows: Sequence[tuple], at_once: int = 1, key: Any = tuple) -> list[tuple]:
    """Rows in which each value of each column occurs that occurs in some row: who, how, at which stage.

    Args:
        rows: the whole table.
        at_once: 2 for each pair of values of two columns that occurs in some row, and so on.
        key: of a row, its columns that count.
    """
    left: dict[int, set] = {}
    for i, row in enumerate(rows):
        columns: list[Hashable] = list(enumerate(key(row)))
        left[i] = set(itertools.combinations(columns, at_once))
    kept, seen = [], dict.fromkeys(itertools.chain(*left.values()), 0)
    while left:
        # The row with most that is new; of those, the one with what has been seen least.
        best = max(left, key=lambda i: (sum(not seen[x] for x in left[i]), -sum(seen[x] for x in left[i]), -i))
        if all(seen[x] for x in left[best]):
            break
        for x in left.pop(best):
            seen[x] += 1
        kept.append(best)
    return [rows[i] for i in sorted(kept)]


def few_and_all(few: Sequence[tuple], rows: Sequence[tuple]) -> list[Any]:
    """Parameters of a test of a whole table: a few rows in every run, and all of them."""
    return [pytest.param(list(few), id="few"), pytest.param(list(rows), id="all", marks=pytest.mark.slow)]
