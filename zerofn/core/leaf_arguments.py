"""Arguments of an optimizer's formula, which updates one leaf, and of its kernel, which updates lists of leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .layout import Leaves
from .transform import TransformState
from .update_context import Context

Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class LeafStep:
    """One update of one leaf: the arguments of a formula besides its tensors.

    Attributes:
        count: updates of the leaf including this one; a 0-d tensor under `vmap` and in a compiled graph.
        lr: learning rate of this update; a number, or a 0-d tensor.
        path: the leaf's name.
        offset: global index of the leaf's first stored element.
        numbers: hyperparameters by name; numbers, or 0-d tensors.
        shared: state that all leaves share, by name; only read.
        derived: what the optimizer's `derived` made of count, rate and hyperparameters; numbers, or 0-d tensors.
    """

    count: Any
    lr: Any
    path: str
    offset: int
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    derived: Numbers = field(default_factory=dict)

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number to compute with beside `like`: a tensor in its dtype and on its device, anything else as it is."""
        return value.to(like) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LeafList:
    """Leaves that have had equally many updates (in a graph all leaves), as lists of tensors: what a kernel works on.

    Attributes:
        params: to be written in place.
        grads: never written.
        slots: state by name, to be written in place.
        count: updates including this one; in a graph a tensor of the shape `(leaves,)`.
        lr: learning rate of this update.
        paths: names of the leaves.
        offsets: global index of each leaf's first stored element.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name; only read.
        norms: an empty list where a metric needs the norms of the gradients. A kernel that computes them anyway appends
            one for each; otherwise another pass does.
    """

    params: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]
    count: Any
    lr: Any
    paths: list[str]
    offsets: list[int]
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    norms: list[float] | None = None

    def where(self, chosen: list[bool]) -> LeafList:
        """The leaves for which `chosen` is true; norms are not asked for of a part."""

        def pick(entries: list) -> list:
            return [x for x, on in zip(entries, chosen, strict=True) if on]

        slots = {name: pick(entries) for name, entries in self.slots.items()}
        lists = pick(self.params), pick(self.grads), slots, self.count, self.lr, pick(self.paths), pick(self.offsets)
        return LeafList(*lists, self.numbers, self.shared)


class Given(NamedTuple):
    """The arguments of an update of several leaves.

    Attributes:
        grads: by path, of the leaves that are updated.
        params: by path.
        slots: state by name and path.
        counts: updates of each leaf, including this one.
        lr: learning rate; `None` of a direction.
        numbers: hyperparameters by name.
        shared: state that all leaves share, by name.
        ctx: of the step.
    """

    grads: Leaves
    params: Leaves
    slots: TransformState
    counts: Leaves
    lr: Any
    numbers: Numbers
    shared: TransformState
    ctx: Context
