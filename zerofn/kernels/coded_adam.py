"""Adam on moments that are kept as codes: one pass, with the bits of decoding, updating and encoding.

The formula is a program, printed in C or in Triton. It decodes one block of the moments after the other, in the cache
or in registers. Without a kernel the decoded moments are written to memory, read, and encoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import adam, fused_adam
from .codes import LARGE, Coded, Codes
from .masters import Master
from .numbers import NotOnLists
from .plans import in_blocks
from .rounding import FORMAT

# torch's kernel rounds the last elements of a leaf in another way: fewer than these, by the bytes of a parameter.
_LINES = {4: 16, 2: 32}
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CodedAdam:
    """Adam on leaves whose moments are `Coded`, with the bits of torch's fused kernel on fp32 or of `adam_`.

    With `fused=True` a parameter is a tensor or a `Master` (24 bits). With `fused=False` a parameter is a tensor, and
    the arithmetic is that of `adam_` with fp32 moments.

    Attributes:
        fused: whether the arithmetic is that of torch's fused kernel; otherwise it is that of `adam_`.
        decoupled: whether the weight decay is decoupled from the gradient.
        rounding: how parameters below fp32 are rounded, `"stochastic"` or `"nearest"`.
    """

    fused: bool
    decoupled: bool = True
    rounding: str = "nearest"

    def takes(
        self,
        params: Sequence[Any],
        grads: Sequence[Tensor],
        *slots: Sequence[Any],
        form: int = FORMAT,
        offsets: Sequence[int] = (),
        beta1: float = 0.9,
    ) -> list[bool]:
        """For each leaf, whether a kernel can update it with the same bits as without a kernel.

        The kernel is written in C for the CPU and in Triton for a GPU. If the leaves on the CPU have few elements
        together, the answer for them is `False`, because calling the kernel would take longer than it saves.

        Args:
            form: the format of the random bits by which parameters are rounded.
            offsets: for each parameter the index of its first element within the leaf. It is needed if parameters are
                rounded at random.
            beta1: the decay of the first moment, on which the kernel in C depends.
        """
        if form != FORMAT or len(slots) != 2 or self.rounding == "kahan":
            return [False] * len(params)
        stored = list(map(_stored, params))
        # Without enough of them no kernel is built.
        on_cpu = [p.numel() for p, m in zip(stored, slots[0], strict=True) if p.is_cpu and type(m) is Coded]
        asked = [p.is_cuda or sum(on_cpu) >= LARGE for p in stored]
        rows: list[Any] = list(zip(params, grads, zip(*slots, strict=True), strict=True))
        found = [ask and self._takes(beta1, *row) for ask, row in zip(asked, rows, strict=True)]
        # Random bits have another key after 2**32 elements.
        ends = [start >> 32 == (start + p.numel() - 1) >> 32 for start, p in zip(offsets, stored, strict=False)]
        return [taken and one_key for taken, one_key in zip(found, ends, strict=True)] if ends else found

    def _takes(self, beta1: float, param: Any, g: Tensor, moments: Sequence[Any]) -> bool:
        if not all(type(x) is Coded for x in moments):
            return False
        m, v = moments
        p, masters = _stored(param), type(param) is Master
        if p.dtype not in _DTYPES or g.dtype not in _DTYPES or g.shape != p.shape or masters > self.fused:
            return False
        # The first element does not matter here: `takes` compares it.
        tensors = (p, param.residual) if masters else (p,)
        if not in_blocks([*tensors, g, m, v], 0 if m.draws is None else m.draws.offset):
            return False
        if p.is_cpu:
            return self._has_program(beta1, p, masters, g, m)
        return m.dtype is torch.float32 and (not self.fused or masters or p.dtype is torch.float32)

    def _has_program(self, beta1: float, p: Tensor, masters: bool, g: Tensor, m: Coded) -> bool:
        """Whether there is a program in C with the bits of torch's fused kernel, or of `adam_`."""
        if self.fused and not masters and (m.dtype is not p.dtype or p.numel() % _LINES[p.itemsize]):
            return False
        if self.fused and (p.numel() % _LINES[4] or (masters and m.dtype is not torch.float32)):
            return False
        # Gradients are rounded to the dtype of parameters before an update in bf16.
        if self.fused and not masters and p.dtype is torch.bfloat16 and g.dtype is not p.dtype:
            return False
        of = p.dtype, m.dtype, m.how.bits, m.how.code
        # `torch.lerp` starts from the nearer end, and `adam_` rounds first moments to nearest up to a beta1.
        like = next(x for x in (0.25, 0.9, 0.99) if beta1 <= {0.25: 0.5, 0.9: 0.98}.get(x, beta1))
        return _has_program(self, masters, g.dtype, like, *of)

    def run(
        self,
        params: Sequence[Any],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Any],
        exp_avg_sqs: Sequence[Any],
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        seed: int = 0,
        keys: Sequence[int] = (),
        offsets: Sequence[int] = (),
        norms: list[float] | None = None,
    ) -> None:
        """One update in place of leaves that this `takes`; norms of the gradients are appended to `norms`."""
        found: list[Any] = [0.0] * len(params)
        kinds: dict[Any, list[int]] = {}
        for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
            kind = type(p), _stored(p).dtype, g.dtype, g.get_device(), m.how, m.draws is None, m.dtype
            kinds.setdefault(kind, []).append(i)
        numbers = step, lr, beta1, beta2, eps, weight_decay
        for places in kinds.values():
            columns = [[column[i] for i in places] for column in (params, grads, exp_avgs, exp_avg_sqs)]
            named = [[column[i] for i in places] if column else [0] * len(places) for column in (keys, offsets)]
            for i, x in zip(places, self._run(columns, named, numbers, seed, norms is not None), strict=False):
                found[i] = x
        if norms is not None:
            norms += found

    def _run(
        self, columns: Sequence[list[Any]], named: Sequence[list[int]], numbers: Any, seed: int, norms: bool
    ) -> list[Any]:
        """One call of a kernel on leaves that are alike. Returns the norms of the gradients if asked for.

        Raises:
            NotOnLists: there is no kernel.
        """
        step, _, beta1, *_, weight_decay = numbers
        params, g, m, v = columns
        stored = list(map(_stored, params))
        if self.fused:
            lists = stored, g, m, v, *([[x.residual for x in params]] if type(params[0]) is Master else [])
            # Without a decay the kernel adds no term: 0 * p would be NaN for an infinite parameter.
            no_sum = self.decoupled or weight_decay == 0
            return fused_adam.run_program(lists, fused_adam.scalars(*numbers), no_sum, norms)
        settings = adam.Settings(step, adam.scalars(*numbers), self.rounding, beta1, seed, FORMAT)
        return adam.run_program(adam.Leaves(stored, g, m, v, None, *named), settings, norms)


def _stored(param: Any) -> Tensor:
    """A parameter without its residual."""
    return param.p if type(param) is Master else param


@functools.cache
def _has_program(
    how: CodedAdam,
    masters: bool,
    grad: torch.dtype,
    beta1: float,
    param: torch.dtype,
    moment: torch.dtype,
    bits: int,
    code: str,
) -> bool:
    """Whether a program in C has the bits of torch's fused kernel, or of `adam_`, and runs in these codes."""
    near = beta1 > 0.5
    if how.fused and not fused_adam.gives_bits(how.decoupled, near, grad, masters, torch.float32 if masters else param):
        return False
    x, codes = torch.ones(1, 32, dtype=param), Codes(bits, 32, code)
    p: Any = Master(x, torch.zeros_like(x, dtype=torch.int8)) if masters else x
    moments = [[Coded(codes, *codes.encode(torch.ones(1, 32, dtype=moment)), None)] for _ in range(2)]
    try:
        how._run([[p], [x.to(grad)], *moments], [[0], [0]], (1, 0.1, beta1, 0.9, 0.1, 0.1), 0, False)
    except NotOnLists:
        return False
    return True
