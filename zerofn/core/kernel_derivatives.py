"""Kernels inside autograd: an `autograd.Function` with the kernel as forward and a hand-written backward.

Autograd saves the inputs of each operation of a formula, and its backward goes operation by operation: twenty-five
passes over memory for AdamW. The derivative as it is written on paper takes fifteen, and saves only parameters,
gradients and the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.functorch import only_reverse
from .leaf_arguments import LeafStep

# (cotangents of the new parameter and, by name, of the new slots; old parameter, gradient, new slots, what else) ->
# cotangents of the parameter, of the gradient and, by name, of the old slots. It is differentiated in turn.
Pulled = Callable[
    [Tensor, dict[str, Tensor], Tensor, Tensor, dict[str, Tensor], LeafStep], tuple[Tensor, Tensor, dict[str, Tensor]]
]
# A kernel: from parameters, gradients and each slot's tensors, one list after the other, to new parameters and slots.
Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]

_WIDE = (torch.float32, torch.float64)


def by_hand(tensors: Sequence[Sequence[Tensor]], numbers: Sequence[Any]) -> bool:
    """Whether the hand-written backward can be used: reverse mode only, by these tensors and by no number.

    Args:
        tensors: of each leaf the parameter, the gradient and the slots. Those of 16 bits are refused, where the formula
            rounds.
        numbers: rates and hyperparameters.
    """
    if any(isinstance(x, Tensor) for x in numbers) or not only_reverse():
        return False
    return all(x.dtype in _WIDE and x.dtype == own[0].dtype for own in tensors for x in own)


def updated_by(run: Run, pulled: Pulled, slots: Sequence[str], steps: Sequence[LeafStep], given: Sequence[Tensor]):
    """`run` on the lists of tensors in `given`, recorded by autograd: new parameters, then the new slots.

    Args:
        run: the kernel.
        pulled: its derivative on one leaf.
        slots: their names.
        steps: of each leaf, an argument of `pulled`.
        given: all parameters, all gradients, then the tensors of one slot after the other.
    """
    n = len(steps)

    def pull(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        columns = [tensors[i : i + n] for i in range(0, len(tensors), n)]
        found = []
        for at, (dp, *rest) in zip(steps, zip(*columns, strict=True), strict=True):
            back, here = (dict(zip(slots, x, strict=True)) for x in (rest[: len(slots)], rest[len(slots) + 2 :]))
            param, grad = rest[len(slots) :][:2]
            p, g, old = pulled(dp, back, param, grad, here, at)
            found.append((p, g, *(old[name] for name in slots)))
        return tuple(x for column in zip(*found, strict=True) for x in column)

    return _Update.apply(run, pull, n, *given)


class _Update(Function):
    """The update of all leaves in one call: a `Function` costs as much as the update of many small leaves."""

    @staticmethod
    def forward(run: Run, pull: Run, n: int, *given: Tensor) -> tuple[Tensor, ...]:
        return run(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        _, ctx.pull, n, *given = inputs
        ctx.save_for_backward(*given[: 2 * n], *output[n:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        tensors = (*cotangents, *ctx.saved_tensors)
        kept = torch.is_grad_enabled() and only_reverse()
        return None, None, None, *(_Pull.apply(ctx.pull, *tensors) if kept else ctx.pull(tensors))


class _Pull(Function):
    """The backward of `_Update`, with a derivative of its own that computes it again and saves no intermediates."""

    @staticmethod
    def forward(pull: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pull(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.pull = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        back = torch.func.vjp(lambda *tensors: ctx.pull(tensors), *ctx.saved_tensors)[1]
        return None, *back(cotangents)
