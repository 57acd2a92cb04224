"""Adam on masters of 24 bits: one pass, with the bits of joining them, updating and taking them apart.

It is `fused_adam.formula`, printed. Masters are numbers in registers alone: with a bf16 gradient 13 bytes of an element
are read and 11 written, where three passes read 25 and write 19. `coded_adam.py` does the same where moments are codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fused_adam import can_masters, fused_update_of_masters
from .masters import LARGE, Master
from .program import printer_for

_PLAIN = (Tensor, torch.nn.Parameter)
_GRADS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class MasterAdam:
    """Adam on leaves whose parameters are each a `Master`, with fp32 moments: that of torch's fused kernel.

    Attributes:
        decoupled: whether the weight decay is decoupled from the gradient.
    """

    decoupled: bool

    def takes(self, params: Sequence[Any], grads: Sequence[Tensor], *slots: Sequence[Any]) -> list[bool]:
        """For each leaf, whether a kernel can update it with the same bits as without a kernel.

        The kernel is written in C for the CPU and in Triton for a GPU. If the leaves on the CPU have few elements
        together, the answer for them is `False`, because calling the kernel would take longer than it saves.
        """
        found = [self._takes(*row) for row in zip(params, grads, zip(*slots, strict=True), strict=True)]
        enough = sum([g.numel() for g, taken in zip(grads, found, strict=True) if taken and g.is_cpu]) >= LARGE
        return found if enough else [taken and g.is_cuda for g, taken in zip(grads, found, strict=True)]

    def _takes(self, x: Any, g: Tensor, moments: Sequence[Any]) -> bool:
        if type(x) is not Master or g.dtype not in _GRADS or not g.numel():
            return False
        device = g.get_device()
        if not all([type(y) in _PLAIN and y.is_contiguous() and y.get_device() == device for y in (g, *moments)]):
            return False
        if not all([y.is_contiguous() and y.get_device() == device for y in (x.p, x.residual)]):
            return False
        if not all([y.dtype is torch.float32 for y in moments]):
            return False
        if g.is_cpu:
            return can_masters(self.decoupled, g.dtype)
        return g.is_cuda and printer_for(g.device) is not None

    def run(
        self,
        params: Sequence[Any],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        step: int,
        lr: float,
        norms: list[Any] | None = None,
        **numbers: float,
    ) -> None:
        """One update in place of leaves that this `takes`; norms of the gradients are appended to `norms`.

        Args:
            numbers: beta1, beta2, eps and weight_decay.
        """
        found: list[Any] = [0.0] * len(params)
        kinds: dict[Any, list[int]] = {}
        for i, g in enumerate(grads):
            kinds.setdefault((g.dtype, g.get_device()), []).append(i)
        for places in kinds.values():
            columns: Any = [[column[i] for i in places] for column in (params, grads, exp_avgs, exp_avg_sqs)]
            own: list[Any] | None = None if norms is None else []
            fused_update_of_masters(*columns, step=step, decoupled=self.decoupled, lr=lr, norms=own, **numbers)
            for i, x in zip(places, own or (), strict=False):
                found[i] = x
        if norms is not None:
            norms += found
