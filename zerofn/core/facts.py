"""`Facts`: what a transform says of itself; `needs` and `Scope`: how much of a tree its update must see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What others may know of a transform without knowing which it is.

    A transform that holds others declares these for all of them.

    Attributes:
        optimizes: what leaves it is new parameters.
        watches: it looks at new parameters.
        window: micro-steps that it adds up before one goes on; 1 where it holds none back.
        weighted: whether those are weighted.
        adds: what leaves it is added to the parameters where no other transform makes new ones.
        directs: what leaves it is the direction of a step, and no longer a gradient.
        rate: the learning rate that `opt.param_groups` shows and sets; `None` where there is none.
        settable: hyperparameters that `opt.param_groups` shows and sets besides, each with its value.
        reports: metrics of the whole gradient that it reports, which the pipeline then does not compute; and counts of
            its own. In a step that does not reach it each is 0, or what its state has under that name. An optimizer
            that looks at gradients (`Scope.TREE`) is not run in such a step, not even for its rate.
        copies: whether its update makes tensors as large as what it is given, besides what it returns.
        keeps: whether what it gives may share memory: its state, the carry, metrics and new parameters with what it
            is handed or with one another, and updates with parameters of other leaves. Such are copied, for which
            each step compares addresses; `False` is of one that makes its own.
        counterpart: the class of `torch.optim` that does the same, whose form its state dicts have; `None` without one.
        torch_names: what that class calls the slots that have another name here, as `(here, there)`.
        holds: it keeps gradients for a later micro-step.
    """

    optimizes: bool = False
    watches: bool = False
    window: int = 1
    weighted: bool = False
    adds: bool = False
    directs: bool = False
    rate: Any = None
    settable: tuple[tuple[str, Any], ...] = ()
    reports: frozenset[str] = frozenset()
    copies: bool = True
    keeps: bool = True
    counterpart: type | None = None
    torch_names: tuple[tuple[str, str], ...] = ()
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", self.window > 1 or self.weighted)


class Scope(Enum):
    """How much of the tree an update half must see at once."""

    LEAF = "each leaf alone"
    TREE = "one look at the whole tree, then each leaf alone"
    WHOLE = "the whole tree"


# How much an update must see to be right, from least to most: an element; an element and a number of the whole tree
# that is reduced over ranks (a norm, an overflow); a row of the first dimension; a leaf; the tree. `Scope` is how much
# the executor hands over at once on one rank; `needs` is what a rank must have whole.
NEEDS = ("element", "number", "row", "leaf", "tree")


# Names in a transform's state and metrics by which the library reads what it keeps: part of the format of a
# checkpoint. A transform of one's own that keeps the same thing is read as the built-in ones are if it uses them.
AVERAGE = "average"  # by leaf, an average of parameters: full_params(of=), opt.averaged(), export_safetensors(of=)
COUNT = "count"  # of a transform with a window, the micro-steps in the open one: opt.is_boundary
SKIPPED_STEPS = "skipped_steps"  # micro-steps that were left out: opt.skipped_steps
OVERFLOW_LEAF = "overflow_leaf"  # a metric, the index of the first leaf that is not finite or -1: opt.overflow_leaf


# What is right on flat pieces of leaves, which may begin at any element.
OF_PIECES = ("element", "number")


# What is right at the owner of a leaf; `"row"` also where a rank has whole rows.
OF_LEAVES = ("row", "leaf")


def most(needs: Iterable[str]) -> str:
    """What a transform needs that contains others with these needs.

    >>> most(["element", "leaf", "number"]), most([])
    ('leaf', 'element')
    """
    return max(needs, key=NEEDS.index, default="element")
