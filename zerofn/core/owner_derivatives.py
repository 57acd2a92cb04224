"""Derivatives through updates at owners: all ranks make the same collectives in backward, whatever they own.

What an owner has computed is a function of what it was sent, and that of a rank which owns nothing is none, so its
backward would leave out what others wait for. On every rank all results, pieces and states, are made functions of all
that the update was given: by a tensor without elements, which changes no number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels.recording import numbers_alone
from ..ranks.differentiable import nothing_of
from .tree import flatten, tree_map


def nothing_of_all(values: Iterable[Any]) -> Tensor | None:
    """A tensor without elements that is a function of all numbers in these trees; `None` where nobody differentiates.

    By an exponential of their sum, so that a derivative of any order, by any of them, is a function of all.

    >>> w = torch.ones(2, requires_grad=True)
    >>> nothing_of_all([{"w": w}, 0.1]).shape, nothing_of_all([{"w": w.detach()}])
    (torch.Size([0, 1]), None)
    """
    found = [x for tree in values for x in flatten(tree)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    if numbers_alone(found) or not found:
        return None
    one = [nothing_of(x).to(found[0].device, torch.float32) for x in found]
    return torch.stack(one).sum(0).exp()


def hung_on(nothing: Tensor | None, state: Any) -> Any:
    """The same state, whose numbers are functions of `nothing` too."""
    if nothing is None:
        return state
    zero = nothing.sum()

    def hung(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        # To subtract a zero changes no bit, and to add one the sign of another.
        if x.numel() > 1 and not any(x.stride()):
            # Of a leaf that another rank owns: it stays one element, expanded.
            return (x[(0,) * x.dim()] - zero.to(x)).expand(x.shape)
        return x - zero.to(x)

    return tree_map(hung, state)
