"""What the ranks bring to a collective must match, or backends end the process: they tell each other before it.

One message of three numbers for each collective of the user's own. Those of a pipeline need none: its ranks have agreed
on all shapes when it was made.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from .backend import gather_objects
from .collectives import all_gather_into
from .group import Group

# Names, shapes and dtypes of tensors that are sent side by side.
Leaves = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(eq=False)
class Cut:
    """Where the ranks' parts of a gathered tensor lie. The first collective that is made of it fills it in.

    Attributes:
        leaves: of this rank's tree, that of all dtypes, each of which is sent by itself; nothing for a tensor.
        rows: of each rank, how many it has; empty as long as that is not known.
        every: of each rank, its `leaves`.
    """

    leaves: Leaves = ()
    rows: list[int] = field(default_factory=list)
    every: list[Leaves] = field(default_factory=list)

    @property
    def even(self) -> bool:
        return len(set(self.rows)) == 1


def match(op: str, x: Tensor, group: Group, cut: Cut, free: int | None = None) -> None:
    """Compare what the ranks are about to send, and fill in their rows. Every rank of the group calls it.

    Args:
        op: the collective.
        x: what this rank sends.
        group: the ranks.
        cut: what is known of their parts.
        free: the dimension that may be longer or shorter on other ranks; where it is the first, that of leaves too.

    Raises:
        ValueError: on every rank, naming what each has, if anything else differs.
    """
    rows = x.shape[free or 0] if x.dim() else -1
    leaves = [(name, len(shape), shape[free is not None :], dtype) for name, shape, dtype in cut.leaves]
    fixed = (op, x.dim(), tuple(n for i, n in enumerate(x.shape) if i != free), str(x.dtype), leaves)
    mine = torch.tensor([_digest(fixed), rows, _digest(cut.leaves)], dtype=torch.int64, device=group.device)
    every = mine.new_empty(group.size * 3)
    all_gather_into(every, mine, group, what="match")
    kinds, counts, layouts = zip(*every.view(-1, 3).tolist(), strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(_told(op, (op, tuple(x.shape), str(x.dtype), cut.leaves), group))
    if not cut.rows:
        cut.rows = list(counts)
        # For equal leaves one message is enough.
        cut.every = [cut.leaves] * group.size if len(set(layouts)) == 1 else gather_objects(cut.leaves, group)


def _digest(x: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=8).digest(), "big", signed=True)


def _told(op: str, mine: tuple[str, tuple[int, ...], str, Leaves], group: Group) -> str:
    """What the ranks have, those that have the same together."""
    holders: dict[str, list[int]] = {}
    for rank, (theirs, shape, dtype, leaves) in zip(group.ranks, gather_objects(mine, group), strict=True):
        tree = ", ".join(f"{name}: {own} {kind}" for name, own, kind in leaves)
        what = f"{theirs} of {{{tree}}}" if leaves else f"{theirs} of shape {shape}, {dtype}"
        holders.setdefault(what, []).append(rank)
    told = "\n".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in holders.items())
    right = (
        "the same call on every rank, with one dtype and one shape; all_gather takes any number of rows from each, "
        "all_to_all any length of concat_dim"
    )
    return explain(f"{op} of what differs between ranks", told, right)
