"""Reverses a formula: from cotangents of its results to cotangents of its arguments, as another formula.

Autograd saves the inputs of each operation of a formula, and its backward goes operation by operation: twenty-five
passes over memory for AdamW. The derivative of a program is a program, which reads arguments and cotangents once and
computes again in registers what lies between. It saves the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .operations import OPERATIONS
from .program import TensorList, Term, in_order


def reverse(
    results: Sequence[TensorList], cotangents: Sequence[TensorList], arguments: Sequence[TensorList]
) -> list[TensorList]:
    """The cotangents of a formula's arguments.

    Args:
        results: of the formula.
        cotangents: of each result.
        arguments: the lists that the formula was given. Its results are made of these and of numbers.

    Examples:
        >>> import torch
        >>> x, d = TensorList([torch.tensor([3.0])]), TensorList([torch.tensor([1.0])])
        >>> reverse([x * x + 2.0], [d], [x])[0].tensors
        [tensor([6.])]
    """
    order: dict[int, Term] = {}
    for x in results:
        in_order(x.term, order)
    found: dict[int, TensorList] = {}

    def add(term: Term, more: TensorList) -> None:
        more = more.to(term.dtype)
        found[id(term)] = found[id(term)] + more if id(term) in found else more

    for x, cotangent in zip(results, cotangents, strict=True):
        add(x.term, cotangent)
    for key, term in reversed(order.items()):
        if key in found:
            for of, cotangent in _pulled(found[key], term):
                add(of, cotangent)
    return [found[id(x.term)] if id(x.term) in found else x.zeros_like() for x in arguments]


def _pulled(d: TensorList, term: Term) -> list[tuple[Term, TensorList]]:
    """The arguments of an operation that have a cotangent, and these."""
    if term.name in ("load", "scalar", "constant"):
        return []
    if term.name in ("to", "random"):
        # A rounding is constant nearly everywhere: its derivative is that of the identity.
        return [(term.args[0], d)] if term.args[0].dtype.is_floating_point else []
    derivative = OPERATIONS[term.name].derivative
    if derivative is None:
        return []
    given: list[Any] = [TensorList(d.like, x) if isinstance(x, Term) else x for x in term.args]
    pulled = derivative(d, TensorList(d.like, term), *given)
    return [(x, y) for x, y in zip(term.args, pulled, strict=True) if isinstance(x, Term) and y is not None]
