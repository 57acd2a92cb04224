"""Ranks tell each other whether they have more gradients to reduce, and compare numbers of their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..ranks.collectives import all_gather_into
from ..ranks.group import Group

# Bits of the first number that a rank sends.
MORE, NOTICED = 1, 2


class RoundAgreement:
    """Whether there is one more round of reductions: there is if any rank wants one.

    Args:
        control: a group for it, not that of the reductions.
        marks: names of numbers that ranks send with it, to compare them.

    Attributes:
        allowed: how many rounds all ranks know of. The first one needs no agreement.
        opening: called on every rank before it sends anything of a step; gives what is called before the first
            gradient is handed on.
    """

    def __init__(self, control: Group, marks: tuple[str, ...]):
        self.control, self.marks = control, marks
        self.allowed = 1
        # What was asked and is not answered.
        self.sent: tuple[Any, Tensor, Tensor] | None = None
        self.opening: Callable[[], Callable[[], None]] | None = None
        self.opened: Callable[[], None] | None = None

    def begin(self) -> None:
        """The first bucket of a step is to be sent, or again after an error in front of it."""
        if self.opening is not None and self.opened is None:
            self.opened = self.opening()

    def begun(self) -> None:
        """A bucket has arrived."""
        if self.opened is not None:
            self.opened()
            self.opened = None

    def ask(self, more: bool, marks: dict[str, int] | None = None, noticed: bool = False) -> Any:
        """Ask all ranks, unless they are asked already; the work handle.

        Args:
            more: this rank wants one more round.
            marks: its numbers.
            noticed: it has noticed something that the others must know of.
        """
        if self.sent is None:
            numbers = marks or dict.fromkeys(self.marks, 0)
            self.sent = _gather([MORE * more + NOTICED * noticed, *numbers.values()], self.control)
        return self.sent[0]

    def answer(self) -> tuple[list[list[int]], bool]:
        """The numbers of each rank, and whether any has noticed something. Allows a round if any wants one."""
        assert self.sent is not None
        work, every, _ = self.sent
        work.wait()
        self.sent = None
        rows = every.tolist()
        said = reduce(or_, next(zip(*rows, strict=True)))
        self.allowed += said & MORE
        return rows, bool(said & NOTICED)


def _gather(numbers: list[int], control: Group) -> tuple[Any, Tensor, Tensor]:
    """Begin to gather numbers: work handle, those of all ranks (ranks, numbers), those of this rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=control.device)
    every = mine.new_empty((control.size, len(mine)))
    return all_gather_into(every.view(-1), mine, control, async_op=True), every, mine


def check_marks(rows: list[list[int]], names: list[str], control: Group) -> None:
    """Raise on every rank, naming each rank's value, if one differs. A name may have after "; " what to write."""
    for name, found in zip(names, zip(*rows, strict=True), strict=True):
        if len(set(found)) > 1:
            values = ", ".join(f"rank {r}: {v}" for r, v in zip(control.ranks, found, strict=True))
            what, _, right = name.partition("; ")
            calls = (
                "Every rank must make the same calls of step() and zero_grad(), as many micro-batches included; "
                "give ranks without data an empty batch."
            )
            raise RuntimeError(f"ranks disagree on {what} ({values}). {right or calls}")
