"""Adam on masters of 24 bits: one pass, with the bits of joining them, updating and taking them apart.

On a CPU it is a kernel in C (`fused_adam.formula`, printed), on a GPU one of Triton's (`triton_masters.py`). Masters
are numbers in registers alone: with a bf16 gradient 13 bytes of an element are read and 11 written, where three passes
read 25 and write 19. `coded_adam.py` does the same where moments are codes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import native
from .fused_adam import can_masters, fused_update, fused_update_of_masters, scalars
from .masters import LARGE, Master, master_of
from .program import gives_bits, triton_module

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
        return g.is_cuda and triton_kernel(self.decoupled, g.dtype, device)

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
            if columns[1][0].is_cpu:
                fused_update_of_masters(*columns, step=step, decoupled=self.decoupled, lr=lr, norms=own, **numbers)
            else:
                own = _launch(self.decoupled, columns, step, lr, norms is not None, numbers)
            for i, x in zip(places, own or (), strict=False):
                found[i] = x
        if norms is not None:
            norms += found


def _launch(
    decoupled: bool, columns: Any, step: int, lr: float, norms: bool, numbers: dict[str, float]
) -> list[Tensor]:
    """The Triton kernel; the norms are on the device."""
    beta2, weight, one_minus_beta2, rate, spread, eps, keep, decay = scalars(step, lr, **numbers)
    given = beta2, weight, one_minus_beta2, rate, eps, keep, decay, spread
    # With no decay nothing is added: 0 * p would be NaN for an infinite parameter.
    found = triton_module("triton_masters").run(*columns, given, decoupled or not numbers["weight_decay"], norms)
    increment_version([y for x in columns[0] for y in (x.p, x.residual)] + [*columns[2], *columns[3]])
    return found


@functools.cache
def triton_kernel(decoupled: bool, grad: torch.dtype, device: int) -> bool:
    """Whether the Triton kernel runs on this device, and gives the bits of torch on the CPU; else a warning."""
    if triton_module("triton_masters") is None:
        return False
    check = lambda: all(_has_bits_of_torch(decoupled, grad, device, numel) for numel in (1 << 14, 1008))  # noqa: E731
    instead = "torch joins masters, updates them and takes them apart, in some twenty launches"
    return gives_bits(check, "the Triton kernel of precision(store_dtype='bf16+8')", instead)


def _has_bits_of_torch(decoupled: bool, grad: torch.dtype, device: int, numel: int) -> bool:
    """Whether the kernel gives the bits of torch on the CPU on a sample of so many elements, a multiple of 16."""
    p, g, m, v = (x for (x,) in native.sample(numel))
    g, own, place = g.to(grad), Master.of(p), torch.device("cuda", device)
    numbers: Any = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    mine: Any = Master(own.p.to(place), own.residual.to(place)), *(x.to(place) for x in (g, m, v))
    _launch(decoupled, [[x] for x in mine], 3, 0.01, False, numbers)
    wide = [master_of(own.p, own.residual)]
    fused_update(wide, [g], [m], [v], step=3, decoupled=decoupled, lr=0.01, **numbers)
    new = Master.of(wide[0])
    pairs = (mine[0].p, new.p), (mine[0].residual, new.residual), (mine[2], m), (mine[3], v)
    return all(native.same_bits([[x.cpu()]], [[y]]) for x, y in pairs)
