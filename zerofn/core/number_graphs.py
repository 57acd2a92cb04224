"""Refuses numbers of a chain that require grad, in a step that autograd does not record: they would be constants.

A step that is not recorded runs its kernels on plain numbers, so a derivative by a rate, a decay or a weight is lost.
If the loss has a second term, its gradient still arrives, and nobody would see that the other term is missing.

Each step checks the arguments of transforms. A tensor that a user's function takes from a closure or a global is no
argument: for it, the first step of a pipeline checks what the function returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .._errors import bad_leaves

RECORDED = (
    "zf.make_step(loss_fn, tx, create_graph=True) or zf.update(tx, grads, state, create_graph=True), and\n"
    "         zf.init(tx, params, create_graph=True) where parameters require grad; torch.func.grad around the steps;\n"
    "         rate.detach(), or create_graph=False, where no derivative is wanted"
)
ATTACHED = (
    "rate.detach() where no derivative is wanted: a step writes into the model. For a derivative zf.init and\n"
    "         zf.make_step(loss_fn, tx, create_graph=True), of a loss_fn that calls torch.func.functional_call"
)


class Unrecorded(RuntimeError):
    """The error for a number that requires grad in a step that autograd does not record."""


def check_numbers(named: Iterable[tuple[str, Any]], right: str) -> None:
    """Refuse numbers that require grad; each is named.

    Raises:
        Unrecorded: there is one.
    """
    bad = [name for name, x in named if isinstance(x, Tensor) and x.requires_grad]
    if bad:
        raise unrecorded(bad, right)


def unrecorded(names: Iterable[str], right: str) -> Unrecorded:
    """The error for numbers, by name, that require grad in a step that is not recorded."""
    wrong = "a step that autograd does not record, with numbers that require grad: their derivative would be lost"
    return Unrecorded(bad_leaves(wrong, [(name, "requires grad") for name in names], right))
