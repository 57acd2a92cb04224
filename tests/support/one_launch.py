"""All rows of a table in one launch: to start ranks takes as long as most rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from time_limits import limit

import zerofn as zf


def one_launch(ranks: int, fn: Callable[..., Any], rows: Sequence[tuple], seconds: float = 60.0) -> dict[tuple, list]:
    """By row: what `fn(*row)` gives on each rank. A row that raises ends the launch, and is named in the traceback.

    Every rank runs the rows in their order, so that `fn` leaves the process as it was: it detaches what it attaches,
    or lets it go, and puts back what it replaces.
    """
    found = zf.launch(_all, ranks, fn, list(rows), timeout=limit(seconds))
    return {row: [rank[i] for rank in found] for i, row in enumerate(rows)}


def _all(fn: Callable[..., Any], rows: list[tuple]) -> list:
    out = []
    for row in rows:
        try:
            out.append(fn(*row))
        except BaseException as error:
            error.add_note(f"in the row {row}")
            raise
    return out
