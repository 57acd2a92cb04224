"""What a gradient is between two transforms of a chain, and which orders of transforms have a meaning.

Every transform says what it does to a `Spec`, or that it cannot stand where it does. A chain is surveyed when it is
built, so that nothing runs in a wrong order. The survey knows no transform: each rule stands beside the one it is of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    """A gradient on its road from the model to storage, at one place of it: by whom what has been done, by name.

    At the model it is this rank's own (a `Partial` in torch's words), in the compute dtype, times the loss scale if
    there is one. An empty string says that nobody did it yet.

    Attributes:
        here: the transform that is asked.
        sharded_by: parameters live as shards; the gradient is reduced to them (`Shard`).
        scattered_by: gradients are reduced to shards (`Shard`).
        averaged_by: gradients are averaged over replicas (`Replicate`).
        cast_by: it has the dtype of gradients.
        unscaled_by: the loss scale has been divided out.
        summed_by: it is a sum over micro-batches.
        changed_by: it is no plain gradient any more.
        updated_by: it is a new parameter.
        watched_by: new parameters have been looked at.
    """

    here: str = ""
    sharded_by: str = ""
    scattered_by: str = ""
    averaged_by: str = ""
    cast_by: str = ""
    unscaled_by: str = ""
    summed_by: str = ""
    changed_by: str = ""
    updated_by: str = ""
    watched_by: str = ""

    def refuse(self, done: str, why: str, right: str = "") -> None:
        """Raise `Misplaced` if that has been done.

        Args:
            done: a field, such as `"changed_by"`.
            why: the reason.
            right: an order that works; the two in the other order, by default.
        """
        if left := getattr(self, done):
            raise Misplaced(left, why, right)

    def after(self, done: str) -> Spec:
        """The same where the transform that is asked has done that."""
        return replace(self, **{done: self.here})

    @property
    def once(self) -> str:
        """The remedy where there are two of the same."""
        return f"chain(..., {self.here}, ...) with one of them"

    @property
    def cut(self) -> bool:
        """Whether a rank has a part of it."""
        return bool(self.sharded_by or self.scattered_by)

    @property
    def over_ranks(self) -> bool:
        """Whether it has been reduced over ranks."""
        return self.cut or bool(self.averaged_by)


Through = Callable[[Spec], Spec]

USED_UP = "an optimizer turns the gradient into new parameters, so nothing that acts on gradients can follow it"
GROUPS = "; for several groups of parameters: zf.partition({'decay': ..., 'rest': ...}, labels)"


def as_it_is(spec: Spec) -> Spec:
    """The `through` of what may stand anywhere."""
    return spec


def changes_gradients(spec: Spec) -> Spec:
    """The `through` of what turns a gradient into another one."""
    return spec.after("changed_by")


def makes_parameters(spec: Spec) -> Spec:
    """The `through` of an optimizer."""
    spec.refuse("updated_by", "the first one has used the gradient up", spec.once + GROUPS)
    spec.refuse("watched_by", "it watches the new parameters, which only the optimizer makes")
    return spec.after("updated_by")


def watches_parameters(spec: Spec) -> Spec:
    """The `through` of what looks at new parameters."""
    return spec.after("watched_by")
