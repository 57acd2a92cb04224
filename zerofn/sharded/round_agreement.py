"""What ranks tell each other of their gradients: whether they have more, and that their steps agree."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..ranks.collectives import all_gather_into
from ..ranks.group import Group

# What a rank says, as bits of one number.
MORE, NOTICED = 1, 2


class Question:
    """Whether there is one more round of reductions: there is if any rank wants one.

    Args:
        control: a group for it, apart from what is reduced.
        marks: names of the numbers that ranks compare with their answers.

    Attributes:
        allowed: rounds that all ranks know of. The first one needs no agreement.
    """

    def __init__(self, control: Group, marks: tuple[str, ...]):
        self.control, self.marks = control, marks
        self.allowed = 1
        # What is under way once it is asked, and the answers.
        self.sent: tuple[Any, Tensor, Tensor] | None = None

    def ask(self, more: bool, marks: dict[str, int] | None = None, noticed: bool = False) -> Any:
        """Ask, if it is not asked yet; what is under way.

        Args:
            more: what this rank says.
            marks: its numbers.
            noticed: something of this rank that the others are to know of.
        """
        if self.sent is None:
            numbers = marks or dict.fromkeys(self.marks, 0)
            mine = torch.tensor([MORE * more + NOTICED * noticed, *numbers.values()], dtype=torch.int64).to(
                self.control.device
            )
            every = mine.new_empty(self.control.size * len(mine))
            self.sent = all_gather_into(every, mine, self.control, async_op=True), every, mine
        return self.sent[0]

    def answer(self) -> tuple[list[list[int]], bool]:
        """What all ranks said, and whether any has noticed something; another round is allowed if any wants one."""
        assert self.sent is not None
        work, every, mine = self.sent
        work.wait()
        self.sent = None
        rows = every.reshape(-1, len(mine)).tolist()
        said = reduce(or_, next(zip(*rows, strict=True)))
        self.allowed += said & MORE
        return rows, bool(said & NOTICED)


def told_by_all(numbers: list[int], control: Group) -> list[list[int]]:
    """What each rank tells, in their order."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=control.device)
    every = mine.new_empty(control.size * len(mine))
    all_gather_into(every, mine, control)
    return every.reshape(control.size, len(mine)).tolist()


def check_marks(rows: list[list[int]], names: list[str], control: Group) -> None:
    """Raise on every rank, naming each rank's value, if one differs. A name may have after "; " what to write."""
    for name, found in zip(names, zip(*rows, strict=True), strict=True):
        if len(set(found)) > 1:
            told = ", ".join(f"rank {r}: {v}" for r, v in zip(control.ranks, found, strict=True))
            what, _, right = name.partition("; ")
            calls = (
                "Every rank must make the same calls of step() and zero_grad(), as many micro-batches included; "
                "give ranks without data an empty batch."
            )
            raise RuntimeError(f"ranks disagree on {what} ({told}). {right or calls}")
