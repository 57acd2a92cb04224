"""`Spec`: dtype, placement and history of a gradient between two transforms of a chain.

Every transform maps a `Spec` to the next one, or says that it cannot stand there. A chain is checked when it is built,
so that nothing runs in a wrong order, and again for each kind of leaf when parameters and ranks are known
(`survey.py`). These checks know no transform: each rule stands beside the transform that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .layout import AxisPlacement, Flat, Partial, Replicate, Shard, rows_between

if TYPE_CHECKING:
    from ..kernels.codes import Codes, Float8

# Placements in which each rank has a tensor of the leaf's own shape.
UNCUT = frozenset({Replicate, Partial})
ONE_OF_TWO = "one of the two"


class Misplaced(Exception):
    """A transform cannot stand behind another one.

    Attributes:
        left: the other one.
        why: the reason.
        right: an order that works; the two in the other order, by default.
    """

    def __init__(self, left: str, why: str, right: str = ""):
        super().__init__(left, why, right)
        self.left, self.why, self.right = left, why, right


@dataclass(frozen=True)
class Spec:
    """A gradient between two transforms of a chain: which transform did what to it; its shape, dtypes, placements.

    At the model it is this rank's own (`Partial` along each axis of ranks), in the compute dtype, times the loss scale
    if there is one. Behind the optimizer it is a new parameter. An empty string says that no transform did it yet. When
    a chain is built no leaf is known: `shape` and dtypes are `None`, and there are no placements.

    Attributes:
        here: the name of the transform whose `through` is called.
        sharded_by: parameters live as shards; the gradient is reduced to them (`Shard`).
        scattered_by: gradients are reduced to shards (`Shard`).
        averaged_by: gradients are averaged over replicas (`Replicate`).
        local_by: it is to stay this rank's own.
        cast_by: it has the dtype of gradients.
        split_by: the optimizer is to keep some bits of the parameter, which are not stored with it.
        unscaled_by: the loss scale has been divided out.
        summed_by: it is a sum over micro-batches.
        changed_by: it is a function of the gradient, and not the gradient itself.
        updated_by: it is a new parameter.
        watched_by: new parameters have been looked at.
        shape: the full shape of the leaf, over all ranks that the chain knows of.
        dtype: of the elements.
        sum_dtype: the default dtype of sums over ranks. A gradient cast from bf16 has its digits, and is sent in bf16.
        sent_as: the codes in which the transform `here` sends gradients; `None` if it sends them in `sum_dtype`.
        gathered_as: the codes in which it sends parameters to the model, if it does.
        stored_dtype: of the leaf in the state.
        mesh: how many ranks there are along each axis of a reduction, in the order of the chain.
        placements: along each of these axes, how it lies on the ranks.
        axis: the axis along which the transform `here` communicates; `None` if it sends nothing.
        range: this rank's range of the flattened leaf: its first element, and the one behind its last.
        scaled_by: the transforms whose factors multiply it.
    """

    here: str = ""
    sharded_by: str = ""
    scattered_by: str = ""
    averaged_by: str = ""
    local_by: str = ""
    cast_by: str = ""
    split_by: str = ""
    unscaled_by: str = ""
    summed_by: str = ""
    changed_by: str = ""
    updated_by: str = ""
    watched_by: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    sum_dtype: torch.dtype | None = None
    sent_as: Codes | None = None
    gathered_as: Codes | Float8 | None = None
    stored_dtype: torch.dtype | None = None
    mesh: tuple[int, ...] = ()
    placements: tuple[AxisPlacement, ...] = ()
    axis: int | None = None
    range: tuple[int, int] = (0, 0)
    scaled_by: tuple[str, ...] = ()

    def refuse(self, done: str, why: str, right: str = "") -> None:
        """Raise `Misplaced` if a transform before this one has done that.

        Args:
            done: a field, such as `"changed_by"`.
            why: the reason.
            right: an order that works; the two in the other order, by default.
        """
        if left := getattr(self, done):
            raise Misplaced(left, why, right)

    def after(self, done: str) -> Spec:
        """The same `Spec`, in which the transform `here` has done that.

        An unscaled gradient has no factor, and an updated one has the dtype of the state. `placed`, or the transform's
        wire, says where it lies once it is reduced.
        """
        more: dict[str, object] = {}
        if done == "unscaled_by":
            more["scaled_by"] = tuple([name for name in self.scaled_by if name != self.here])
        elif done == "updated_by":
            more["dtype"] = self.stored_dtype
        return replace(self, **{done: self.here}, **more)  # type: ignore[arg-type]

    def placed(self, placement: AxisPlacement) -> Spec:
        """The same `Spec` with that placement along `axis`; unchanged if the transform sends nothing."""
        if self.axis is None:
            return self
        along = (*self.placements[: self.axis], placement, *self.placements[self.axis + 1 :])
        return replace(self, placements=along)

    def by_rows(self) -> Spec:
        """The same `Spec`, sharded by rows along `axis`; a number, which has none, is flat.

        A shard is cut by its own rows.
        """
        if self.axis is None or self.shape is None:
            return self
        return self.placed(Shard(0) if self.shape and rows_between(self.shape, *self.range) is not None else Flat())

    def coded(self, gradients: Codes | None, parameters: Codes | Float8 | None = None) -> Spec:
        """The same `Spec`, sent in these codes by the transform `here`; unchanged if it sends nothing."""
        return self if self.axis is None else replace(self, sent_as=gradients, gathered_as=parameters)

    def to(self, dtype: torch.dtype | None) -> Spec:
        """The same `Spec` in another dtype; unchanged if that is `None` or no leaf is known."""
        return self if dtype is None or self.shape is None else replace(self, dtype=dtype)

    @property
    def once(self) -> str:
        """The remedy where a chain has the transform `here` twice."""
        return f"chain(..., {self.here}, ...) with one of them"

    @property
    def cut(self) -> bool:
        """Whether it is sharded, or would be if there were several ranks."""
        return bool(self.sharded_by or self.scattered_by) or self.in_parts

    @property
    def in_parts(self) -> bool:
        """Whether it is sharded over several ranks."""
        return not UNCUT.issuperset(map(type, self.placements))

    @property
    def parts(self) -> int:
        """The number of its shards."""
        return math.prod([n for n, p in zip(self.mesh, self.placements, strict=True) if type(p) not in UNCUT])

    @property
    def numel(self) -> int:
        """Elements that this rank has."""
        return self.range[1] - self.range[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor: that of the leaf, or of a flat shard of it."""
        return (self.numel,) if self.in_parts or self.shape is None else self.shape

    @property
    def bytes(self) -> int:
        """Bytes that this rank has."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize

    @property
    def over_ranks(self) -> bool:
        """Whether it is reduced over ranks, or would be if there were several."""
        return self.cut or bool(self.averaged_by or self.mesh)


class Station(NamedTuple):
    """The gradients in front of a transform and behind it.

    Attributes:
        transform: its name; `"model"` for the gradients of the model itself.
        handed: by path, the gradient that the transform gets; in full at the owner if it needs whole, sharded leaves.
        gives: by path, its result: a new parameter if it is an optimizer.
    """

    transform: str
    handed: dict[str, Spec]
    gives: dict[str, Spec]


Through = Callable[[Spec], Spec]

USED_UP = "an optimizer turns the gradient into new parameters, so nothing that acts on gradients can follow it"
NOT_REDUCED = "local says that gradients are reduced over no ranks"
OF_ITS_OWN = "each rank would see its own part of the gradient before it is reduced over ranks"
GROUPS = "; for several groups of parameters: zf.partition({'decay': ..., 'rest': ...}, labels)"


def as_it_is(spec: Spec) -> Spec:
    """The `through` of a transform that may stand anywhere."""
    return spec


def changes_gradients(spec: Spec) -> Spec:
    """The `through` of a transform that changes gradients."""
    return spec.after("changed_by")


def makes_parameters(spec: Spec) -> Spec:
    """The `through` of an optimizer."""
    spec.refuse("updated_by", "the first one has used the gradient up", spec.once + GROUPS)
    spec.refuse("watched_by", "it watches the new parameters, which only the optimizer makes")
    return spec.after("updated_by")


def watches_parameters(spec: Spec) -> Spec:
    """The `through` of a transform that looks at new parameters."""
    return spec.after("watched_by")
