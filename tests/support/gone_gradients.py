"""Gradients that have left `p.grad`: what is there then has no numbers."""

from __future__ import annotations

from torch import Tensor

from zerofn.sharded.guarded_parameter import GoneGradient  # inside: no name is public


def is_gone(p: Tensor) -> bool:
    """Whether `p.grad` is there and has no numbers, because the gradient has left in backward."""
    return isinstance(p.grad, GoneGradient)


def has_numbers(p: Tensor) -> bool:
    """Whether `p.grad` is a gradient that one can compute with."""
    return p.grad is not None and not is_gone(p)
