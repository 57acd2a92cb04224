"""Holds what a state dict has for this rank, and makes all ranks refuse one that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from .._errors import bad_leaves
from ..core.state_entries import Entry
from ..ranks.backend import gather_objects, raised_on
from ..ranks.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedStates:
    """The report of `opt.load_state_dict`.

    Attributes:
        by: how parameters were matched: by their `"name"`, or by their `"order"` in the groups.
        made_anew: paths of parameters without a state in the state dict, as torch's have none for a parameter that
            never had a gradient: their moments and counts begin anew.
    """

    by: str
    made_anew: tuple[str, ...] = ()


@dataclass
class ToLoad:
    """The contents of a state dict, for this rank.

    Attributes:
        pairs: each tensor of our state with the one that will replace it.
        groups: the new entries of each group.
        matched: how parameters were matched, and which begin anew.
    """

    pairs: list[tuple[Tensor, Tensor]]
    groups: list[dict[str, Any]]
    matched: LoadedStates


def form_of(x: Any) -> str:
    """Shape and dtype of a tensor or of an entry's tensor, for a message; anything else as it prints."""
    if isinstance(x, Entry):
        return f"{tuple(x.shape)} {x.value.dtype}"
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)


# ----------------------------------------------------------------------------------------------------------------------
# A state dict that does not fit is refused on all ranks together: one that went on alone would wait for the others.


WRONG = "load_state_dict: this is not the state of this pipeline"
# The right code for a file with the shards of another rank, or of a job with other ranks.
ON_EACH_RANK = (
    "on each rank what that rank has saved, torch.save(opt.state_dict(), f'{rank}.pt'), on as many ranks;\n"
    "         zf.save(directory, opt) on every rank, which is one checkpoint for any number of ranks;\n"
    "         one file of full tensors, get_optimizer_state_dict(model, opt, options=StateDictOptions(\n"
    "         full_state_dict=True, cpu_offload=True)) on every rank, of which the first one has them"
)


class Misfit(ValueError):
    """A state dict that cannot be loaded, with every entry that is wrong.

    Args:
        rows: the entries by name, and what is wrong with each.
        right: what to write.
        wrong: the first line.
    """

    def __init__(self, rows: list[tuple[str, str]], right: str, wrong: str = WRONG):
        super().__init__(rows, right, wrong)

    def __str__(self) -> str:
        rows, right, wrong = self.args
        return bad_leaves(wrong, sorted(set(rows)), right)


def on_all_ranks(read: Callable[[], T], control: Group | None) -> list[T]:
    """The results of `read` on all ranks.

    Args:
        read: sends nothing, and returns something small.
        control: the ranks that call this together; `None` where one rank may be alone.

    Raises:
        Exception: what the first rank has raised of all that have, on every rank. A `Misfit` has the entries that are
            wrong on any.
    """
    if control is None:
        return [read()]
    mine: T | None = None
    failure: Exception | None = None
    try:
        mine = read()
    except Exception as error:
        failure = error
    answers = gather_objects((mine, failure), control)
    failures = [raised_on(x, rank) for rank, (_, x) in zip(control.ranks, answers, strict=True) if x is not None]
    if not failures:
        return [x for x, _ in answers]
    first = failures[0]
    if isinstance(first, Misfit):
        _, right, wrong = first.args
        raise Misfit([row for x in failures if isinstance(x, Misfit) for row in x.args[0]], right, wrong) from first
    raise first
