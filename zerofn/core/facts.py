"""`Facts`: static properties of a transform; `needs` and `Scope`: how much of a tree its update must see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Shadow:
    """A slot of a transform's state that follows from the parameter (`Facts.shadows`).

    Attributes:
        slot: its name.
        residual: whether it keeps what the parameter's dtype has lost, which is nothing of a new value, and is no copy.
        due: a function `(number, step) -> bool` that says whether it is taken anew now; by default it always is.
            `number(name)` is an entry of the transform's state that belongs to no leaf, and `step` counts updates.
    """

    slot: str
    residual: bool = False
    due: Callable[[Callable[[str], Any], int], bool] | None = None


@dataclass(frozen=True)
class Facts:
    """Static properties of a transform, which other code reads without knowing which transform it is.

    In the list "it" is the transform. A transform that contains other transforms declares the facts of all of them.

    Attributes:
        optimizes: it returns new parameters.
        watches: it looks at new parameters, and comes after the optimizer.
        sees_old: whether a watching transform gets the old parameters too, as `params`. With `True` the executor copies
            each bucket of old parameters before the bucket is written in place, or all old parameters if the watching
            transform must see the whole tree. With `False` both `grads` and `params` are the new parameters, and
            nothing is copied.
        window: how many micro-steps it accumulates for one update; 1 if it accumulates none.
        weighted: whether the accumulated micro-steps are weighted.
        adds: its result is added to the parameters if no other transform makes new ones.
        directs: it returns the direction of a step, and no longer a gradient.
        rate: the learning rate that `opt.param_groups` shows and sets; `None` if there is none. In a step in which no
            update reaches the transform, its `prepare_fn` is called without gradients to report the rate. If its scope
            is `Scope.TREE`, `prepare_fn` is not called in such a step.
        settable: other hyperparameters that `opt.param_groups` shows and sets, each with its value.
        reports: the names of metrics that it reports in every step: metrics of the full gradient, and counts. If
            `"grad_norm"` is one of them, the pipeline does not compute `grad_norm` itself. In a step in which no update
            reaches the transform, a metric is the entry of its state with the same name, or 0 if there is no such
            entry. If the names depend on the leaves, `reports` is a function `(layout, paths) -> names`.
        copies: whether its update makes temporary tensors as large as its arguments.
        keeps: whether a tensor that it returns (a new parameter, or a tensor in its state, carry or metrics) may share
            memory with an argument or with another returned tensor. With `True` zerofn compares addresses in the
            first steps, and copies a tensor if a write into the shared memory could change it. `False` promises that
            every returned tensor has memory of its own.
        counterpart: the class of `torch.optim` that does the same, whose form its state dicts have; `None` without one.
        torch_names: the names of slots that differ in that class, as `(here, there)`.
        starts_wide: its first state is made from leaves in the dtype of gradients, if `precision` makes that wider than
            the stored dtype: sums of fp32 gradients of bf16 parameters are in fp32.
        fixed: names of slots with a tensor for each leaf. These tensors are equal on all ranks, and their shapes do not
            depend on the leaf. If leaves are sharded, a tensor in any other slot has the shape of the shard, or is 0-d.
            The name of a slot in a nested dict is written with a slash: `"moments/edges"`.
        even_numbers: for a transform with `needs="row"`: whether the 0-d tensors that its state has for a leaf, such as
            a count, are equal on all ranks. With `False` (the default) a state with such 0-d tensors is refused if
            leaves are sharded by rows, because ranks could compute different numbers from their rows.
        capturable: its update half reads no number of a GPU in Python, also not of its own state (`Context.unread`). It
            writes into donated memory only by functions of the context. So it may run in a captured CUDA graph, and
            after a transform whose `emit` is a tensor on the device.
        skips: it may skip a step by a number that the device has (`Context.verdict`).
        wants: names of numbers that its `prepare_fn` reads in `Context.given`: `"loss"`, or names of its own. The
            caller passes each number to the step as a keyword argument; without it the step raises. `prepare_fn` gets
            the mean of each number over the window and over ranks.
        wants_largest: tensors that its `prepare_fn` reads in `Context.given`, each as `(name, shape)`. The caller
            passes each tensor to the step as a keyword argument. `prepare_fn` gets, for each element, the largest value
            over the window and over ranks.
        evaluates_at: a function `(grads, params, ctx) -> params` of dicts by path. It gets reduced gradients without a
            loss scale, and the stored parameters, into which it must not write. It returns the parameters at which the
            step evaluates the loss a second time. The gradient of the second evaluation goes through the chain.
        constant: names of entries of its state that never change; those of a member are `label/name`. They are not
            moved when zerofn moves the counters in the state to the GPU.
        owes: its state has tensors that each rank computes from its own gradients, before these are reduced. In each
            window it adds the tensors to the accumulated gradients, before the reduction.
        shadows: slots of its state, with a tensor for each leaf, that follow from the parameter: copies of it, and what
            its dtype has lost of it. Elements that somebody writes into an attached model's parameter are taken anew
            there, as a new state would have them. Without this the old values would win at the next update.
        rounds: it rounds new parameters, and tensors of its state that start as zeros like them, as `Context.rounding`
            says where they are stored in 16 bits. `precision(rounding="stochastic")` refuses an optimizer without it.
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
    shadows: tuple[Shadow, ...] = ()
    rounds: bool = False
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
