"""`Facts`: static properties of a transform; `needs` and `Scope`: how much of a tree its update must see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Static properties of a transform, which other code reads without knowing which transform it is.

    A transform that contains others declares these for all of them.

    Attributes:
        optimizes: it returns new parameters.
        watches: it looks at new parameters, behind the optimizer.
        sees_old: whether a watching transform gets the old parameters too, as `params`. The executor then copies each
            bucket of them before it is written in place, or all of them if the watcher must see the whole tree.
            With `False` it gets the new ones twice, and nothing is copied.
        window: how many micro-steps it accumulates before one goes on; 1 if it accumulates none.
        weighted: whether those are weighted.
        adds: its result is added to the parameters if no other transform makes new ones.
        directs: it returns the direction of a step, and no longer a gradient.
        rate: the learning rate that `opt.param_groups` shows and sets; `None` if there is none. In a step that does not
            reach it, its `prepare_fn` is called without gradients to report the rate, unless it is of `Scope.TREE`.
        settable: other hyperparameters that `opt.param_groups` shows and sets, each with its value.
        reports: metrics of the full gradient that it reports, which the pipeline then does not compute, and counts of
            its own. In a step that does not reach it each is 0, or the entry of its state with that name. An optimizer
            that looks at gradients (`Scope.TREE`) does not run in such a step, not even for its rate. Names that depend
            on the leaves are a function `(layout, paths) -> names`.
        copies: whether its update makes temporary tensors as large as its arguments.
        keeps: whether returned tensors may share memory with arguments or with one another (state, carry, metrics, new
            parameters), or updates with parameters of other leaves. Such tensors are copied, and the
            first steps compare addresses to find them. `False` says that it always returns memory of its own.
        counterpart: the class of `torch.optim` that does the same, whose form its state dicts have; `None` without one.
        torch_names: the names of slots that differ in that class, as `(here, there)`.
        starts_wide: its first state is made from leaves in the dtype of gradients, if `precision` makes that wider than
            the stored dtype: sums of fp32 gradients of bf16 parameters are in fp32.
        fixed: slots of its state by leaf whose tensors have one shape whatever the leaf is, and are equal on all ranks.
            Where leaves are sharded, any other tensor of a leaf in its state has the shape of the shard, or is 0-d. A
            key of a nested dict has a slash before it: `"moments/edges"`.
        even_numbers: whether 0-d tensors of a leaf in its state are equal on all ranks, as a count is, where it has
            `needs="row"`. By default such a state is refused there: a number made of a rank's rows is not.
        capturable: its update half reads no number of a device, also where numbers of its state are there
            (`Context.unread`), and writes into donated memory by functions of the context alone. So it may run in a
            captured CUDA graph, and behind a verdict that only the device knows.
        skips: it may skip a step by a number that the device has (`Context.verdict`).
        wants: numbers that its `prepare_fn` reads in `Context.given`: `"loss"`, or names of its own, which a step is
            given by keyword as `weight=` is. It gets their means over the window and over ranks, and a step without one
            is refused.
        wants_largest: tensors that it reads there in the same way, each by its name and shape. It gets the largest of
            each element over the window and over ranks.
        evaluates_at: a function `(grads, params, ctx) -> params`, by path: the parameters at which a step evaluates its
            loss once more. The gradient there goes through the chain in the place of the first one. It gets true,
            reduced gradients, and stored parameters, which it does not write.
        constant: entries of its state that never change. They stay on the host where its counters are on the device.
        owes: its state is of gradients that are not reduced yet, and each rank's own, as the sums of an accumulation
            are: it adds them to gradients in front of a reduction that runs once a window.
        holds: it keeps gradients for a later micro-step.
    """

    optimizes: bool = False
    watches: bool = False
    sees_old: bool = True
    window: int = 1
    weighted: bool = False
    adds: bool = False
    directs: bool = False
    rate: Any = None
    settable: tuple[tuple[str, Any], ...] = ()
    reports: frozenset[str] | Callable[[Any, Collection[str]], frozenset[str]] = frozenset()
    copies: bool = True
    keeps: bool = True
    counterpart: type | None = None
    torch_names: tuple[tuple[str, str], ...] = ()
    starts_wide: bool = False
    fixed: tuple[str, ...] = ()
    even_numbers: bool = False
    capturable: bool = False
    skips: bool = False
    evaluates_at: Callable[..., Any] | None = None
    constant: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    wants_largest: tuple[tuple[str, tuple[int, ...]], ...] = ()
    owes: bool = False
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", self.window > 1 or self.weighted)

    def reported(self, layout: Any, paths: Collection[str]) -> frozenset[str]:
        """The names of the metrics that it reports for the leaves of these paths."""
        return self.reports(layout, paths) if callable(self.reports) else self.reports

    @property
    def compares(self) -> bool:
        """Whether it looks at old parameters beside the new ones."""
        return self.watches and self.sees_old


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


# The values of `needs` that are right on flat shards of leaves, which may begin at any element.
OF_PIECES = ("element", "number")


# The values of `needs` that are right on the owner of a leaf; `"row"` also where a rank has whole rows.
OF_LEAVES = ("row", "leaf")


def most(needs: Iterable[str]) -> str:
    """The `needs` of a transform that contains others with these needs: the largest of them.

    >>> most(["element", "leaf", "number"]), most([])
    ('leaf', 'element')
    """
    return max(needs, key=NEEDS.index, default="element")
