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
    """The error of a transform that cannot come after an earlier transform of the chain.

    Attributes:
        left: the name of the earlier transform.
        why: the reason.
        right: an order that works. By default the error shows the two transforms in the opposite order.
    """

    def __init__(self, left: str, why: str, right: str = ""):
        super().__init__(left, why, right)
        self.left, self.why, self.right = left, why, right


@dataclass(frozen=True)
class Spec:
    """A gradient between two transforms of a chain: which transform did what to it; its shape, dtypes, placements.

    A gradient that comes from the model is this rank's own (`Partial` along each axis of ranks), in the compute dtype,
    times the loss scale if there is one. After the optimizer the tensor is a new parameter. A field whose name ends in
    `_by` is the name of a transform; it is an empty string as long as no transform did what the field describes. When a
    chain is built no leaf is known: `shape` and dtypes are `None`, and there are no placements.

    Attributes:
        here: the name of the transform whose `through` is called.
        sharded_by: the transform that stores parameters as shards, and reduces the gradient to shards (`Shard`).
        scattered_by: the transform that reduces gradients to shards (`Shard`).
        averaged_by: the transform that averages gradients over replicas (`Replicate`).
        local_by: the transform that says that the gradient stays this rank's own.
        cast_by: the transform that cast the gradient to the dtype of gradients.
        split_by: the transform by which a stored parameter lacks some bits, which the optimizer keeps in its state.
        unscaled_by: the transform that divided the gradient by the loss scale.
        summed_by: the transform that adds up the gradients of micro-batches.
        changed_by: the transform that replaced the gradient by a function of it.
        updated_by: the optimizer that made the new parameter.
        watched_by: the transform that looked at new parameters.
        shape: the full shape of the leaf, over all ranks that the chain knows of.
        dtype: the dtype of the gradient.
        sum_dtype: the dtype in which gradients are sent and summed over ranks, unless the transform has a dtype of its
            own for that. For a bf16 gradient that was cast to fp32 it is bf16, because fp32 would send no more digits.
        sent_as: the codes in which the transform `here` sends gradients; `None` if it sends them in `sum_dtype`.
        gathered_as: the codes in which the transform `here` sends parameters to the model; `None` without codes.
        stored_dtype: the dtype of the leaf in the state.
        mesh: how many ranks there are along each axis of a reduction, in the order of the chain.
        placements: for each axis in `mesh`, how the gradient is placed on the ranks along this axis.
        axis: the axis along which the transform `here` communicates; `None` if it sends nothing.
        range: this rank's range of the flattened leaf: the index of its first element, and one more than the index of
            its last element.
        scaled_by: the names of the transforms whose factors multiply the gradient.
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
        """Raise `Misplaced` if the field `done` says that an earlier transform did something.

        Args:
            done: the name of a field, such as `"changed_by"`.
            why: the reason.
            right: an order that works. By default the error shows the two transforms in the opposite order.
        """
        if left := getattr(self, done):
            raise Misplaced(left, why, right)

    def after(self, done: str) -> Spec:
        """The same `Spec`, in which the field `done` has the name of the transform `here`.

        With `"unscaled_by"` the transform is no longer in `scaled_by`. With `"updated_by"` the dtype becomes the stored
        dtype. `after` changes no placement: call `placed` for that, unless the transform has a wire.

        Args:
            done: the name of a field, such as `"changed_by"`.
        """
        more: dict[str, object] = {}
        if done == "unscaled_by":
            more["scaled_by"] = tuple([name for name in self.scaled_by if name != self.here])
        elif done == "updated_by":
            more["dtype"] = self.stored_dtype
        return replace(self, **{done: self.here}, **more)  # type: ignore[arg-type]

    def placed(self, placement: AxisPlacement) -> Spec:
        """The same `Spec` with this placement along `axis`; unchanged if the transform `here` sends nothing."""
        if self.axis is None:
            return self
        along = (*self.placements[: self.axis], placement, *self.placements[self.axis + 1 :])
        return replace(self, placements=along)

    def by_rows(self) -> Spec:
        """The same `Spec` with the placement `Shard(0)` along `axis`.

        The placement is `Flat()` if the leaf is 0-d, or if this rank's range (`range`) does not consist of whole rows.
        The `Spec` is unchanged if the transform `here` sends nothing or no leaf is known.
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
        """Whether the gradient is sharded, or would be if there were several ranks."""
        return bool(self.sharded_by or self.scattered_by) or self.in_parts

    @property
    def in_parts(self) -> bool:
        """Whether the gradient is sharded over several ranks."""
        return not UNCUT.issuperset(map(type, self.placements))

    @property
    def parts(self) -> int:
        """The number of shards of the gradient."""
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
        """Whether the gradient is reduced over ranks, or would be if there were several."""
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
