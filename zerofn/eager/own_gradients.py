"""The gradients of an attached model that stay in `p.grad` until a step takes them."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType

import torch

from .._compat.tensors import read_grad
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from .stored_parameters import StoredParameters


class OwnGradients:
    """The gradients of one attached model on one process, where they are neither reduced nor used in backward.

    Args:
        pipe: its pipeline.
        params: its parameters by path.
        stored_params: the stored form of parameters that are copies.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, stored_params: StoredParameters):
        self.pipe, self.stored_params = pipe, stored_params
        self.trainable = {leaf.path: params[leaf.path] for leaf in pipe.layout.trainable}

    def grads(self) -> Leaves:
        """The gradients that this rank has in `p.grad`."""
        with torch.DisableTorchFunctionSubclass():
            found = dict(zip(self.trainable, map(read_grad, self.trainable.values()), strict=True))
        # By functions of C: nearly always each leaf has one.
        return found if NoneType not in map(type, found.values()) else {p: g for p, g in found.items() if g is not None}

    def collect(self, boundary: bool | None, given: Callable[[], str]) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: the argument of `set_boundary` for this step, the same on all ranks.
            given: returns the settings of `opt.param_groups` as text, the same on all ranks.
        """
        self.stored_params.store_writes()
        return self.grads()

    # What follows concerns gradients that have left `p.grad`: here none has.

    def used(self) -> None:
        """A step has used the gradients that it was given."""

    def accumulated(self) -> None:
        """The gradients in `p.grad` are cleared: a sum has them, or they were used and are dropped."""

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step."""

    def give_up_backward(self) -> None:
        """Leave a backward that an exception has stopped on this rank; other ranks may still be in theirs."""

    def forget_all(self) -> None:
        """Forget the gradients of this micro-step, also those that another rank reduces."""
