"""Ranks compare shapes and dtypes before a collective of the user's: on a mismatch backends end the process.

That is one message of three numbers each. Collectives of a pipeline need none: its ranks have agreed on all shapes
when it was made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._errors import explain
from .backend import gather_objects
from .collectives import gather_numbers
from .group import Group

# Names, shapes and dtypes of tensors that are sent side by side.
Leaves = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(eq=False)
class Split:
    """How a gathered tensor is cut over ranks. The first collective of it fills this in.

    Attributes:
        leaves: of this rank's whole tree, of all dtypes, though each dtype is sent by itself; empty for a tensor.
        rows: by rank, how many rows it has; empty until that is known.
        leaves_by_rank: the `leaves` of each rank.
    """

    leaves: Leaves = ()
    rows: list[int] = field(default_factory=list)
    leaves_by_rank: list[Leaves] = field(default_factory=list)

    @property
    def even(self) -> bool:
        return len(set(self.rows)) == 1


def check_match(op: str, x: Tensor, group: Group, split: Split, free: int | None = None) -> None:
    """Compare what the ranks are about to send, and fill in `split`. Every rank of the group calls it.

    Args:
        op: the name of the collective.
        x: what this rank sends.
        group: the ranks.
        cut: has the leaves of this rank.
        free: the dimension whose length may differ between ranks; if it is the first, that of leaves too.

    Raises:
        ValueError: on every rank, with what each has, if anything else differs.
    """
    rows = x.shape[free or 0] if x.dim() else -1
    leaves = [(name, len(shape), shape[free is not None :], dtype) for name, shape, dtype in split.leaves]
    fixed = (op, x.dim(), tuple(n for i, n in enumerate(x.shape) if i != free), str(x.dtype), leaves)
    numbers = gather_numbers([_digest(fixed), rows, _digest(split.leaves)], group, "match")
    kinds, counts, layouts = zip(*numbers, strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(_differences(op, (op, tuple(x.shape), str(x.dtype), split.leaves), group))
    if not split.rows:
        split.rows = list(counts)
        equal = len(set(layouts)) == 1
        split.leaves_by_rank = [split.leaves] * group.size if equal else gather_objects(split.leaves, group)


def _digest(x: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=8).digest(), "big", signed=True)


def _differences(op: str, mine: tuple[str, tuple[int, ...], str, Leaves], group: Group) -> str:
    """The error: what each rank brings, ranks with equal ones in one line."""
    holders: dict[str, list[int]] = {}
    for rank, (theirs, shape, dtype, leaves) in zip(group.ranks, gather_objects(mine, group), strict=True):
        tree = ", ".join(f"{name}: {own} {kind}" for name, own, kind in leaves)
        what = f"{theirs} of {{{tree}}}" if leaves else f"{theirs} of shape {shape}, {dtype}"
        holders.setdefault(what, []).append(rank)
    lines = "\n".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in holders.items())
    right = (
        "the same call on every rank, with one dtype and one shape; all_gather takes any number of rows from each, "
        "all_to_all any length of concat_dim"
    )
    return explain(f"{op} of what differs between ranks", lines, right)
