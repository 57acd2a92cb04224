"""Adam on moments that are kept as codes: one pass, with the bits of decoding, updating and encoding.

A CPU runs the formula as a program in C (`print_c.py`), a GPU a kernel of Triton (`triton_coded.py`). It decodes one
block of the moments after the other, in the cache or in registers. Without a kernel the decoded moments are written to
memory, read, and encoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import adam, fused_adam, native
from .adam import adam_, scalars
from .codes import LARGE, MOST, Coded, Codes, Draws
from .fused_adam import fused_update
from .masters import Master, master_of
from .numbers import NotOnLists
from .plans import in_blocks
from .program import gives_bits, triton_module
from .rounding import FORMAT, stride_of

# torch's kernel rounds the last elements of a leaf in another way: fewer than these, by the bytes of a parameter.
_LINES = {4: 16, 2: 32}
_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)


class Kind(NamedTuple):
    """What one library, or one launch, has in common.

    Attributes:
        fused: whether the arithmetic is that of torch's fused kernel, or that of `adam_`.
        random: whether parameters are rounded at random.
        masters: whether parameters are masters of 24 bits, each a `Master`; of the fused arithmetic.
        dtype: of parameters, as they are stored.
        grad: of gradients.
    """

    fused: bool
    random: bool
    masters: bool
    dtype: torch.dtype
    grad: torch.dtype


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
        if p.is_cpu:
            # Here the first elements do not matter: `takes` compares them.
            tensors = (p, param.residual) if masters else (p,)
            start = 0 if m.draws is None else m.draws.offset
            return in_blocks([*tensors, g, m, v], start) and self._has_program(beta1, p, masters, g, m)
        how, draws, tensors = m.how, (m.draws, v.draws), (p, g, m.codes, v.codes, m.scales, v.scales)
        if masters:
            tensors = (*tensors, param.residual)
        if v.how != how or how.signed or how.block > MOST or (how.bits == 4 and how.block % 2):
            return False
        if m.dtype is not torch.float32 or (self.fused and not masters and p.dtype is not torch.float32):
            return False
        if not all(type(x) in _PLAIN and x.is_contiguous() and x.get_device() == p.get_device() for x in tensors):
            return False
        if None not in draws and not all(x.of_one_key(p.numel()) and x.seed == draws[0].seed for x in draws):
            return False
        if not p.is_cuda or not p.numel() or how.code == "dynamic":
            return False
        return triton_kernel(self._kind(param, g), how, m.draws is not None, g.get_device())

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
        if self.fused:
            rate, spread = -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
            given = beta2, 1 - beta1, 1 - beta2, rate, eps, 1 - lr * weight_decay, weight_decay, spread
        else:
            given = (*scalars(step, lr, beta1, beta2, eps, weight_decay), 1.0)
        # Without a decay the kernel adds no term: 0 * p would be NaN for an infinite parameter.
        no_sum = self.decoupled or weight_decay == 0
        found: list[Any] = [0.0] * len(params)
        kinds: dict[Any, list[int]] = {}
        for i, (p, g, m) in enumerate(zip(params, grads, exp_avgs, strict=True)):
            kinds.setdefault((self._kind(p, g), m.how, m.draws is not None, g.get_device(), m.dtype), []).append(i)
        for (kind, how, random, device, _), places in kinds.items():
            columns = [[column[i] for i in places] for column in (params, grads, exp_avgs, exp_avg_sqs)]
            named = [[column[i] for i in places] if column else [0] * len(places) for column in (keys, offsets)]
            rest = named, given, (seed, step), how.block, random, no_sum, norms is not None
            own = _call(kind, columns, *rest, beta1, self.rounding) if device < 0 else _launch(kind, columns, *rest)
            for i, x in zip(places, own, strict=False):
                found[i] = x
        if norms is not None:
            norms += found
        coded = [x for one in (*exp_avgs, *exp_avg_sqs) for x in (one.codes, one.scales)]
        increment_version([*map(_stored, params), *[x.residual for x in params if type(x) is Master], *coded])

    def _kind(self, param: Any, g: Tensor) -> Kind:
        p = _stored(param)
        random = self.rounding == "stochastic" and p.dtype is not torch.float32
        return Kind(self.fused, random, type(param) is Master, p.dtype, g.dtype)


def _stored(param: Any) -> Tensor:
    """A parameter without its residual."""
    return param.p if type(param) is Master else param


Columns = Sequence[Sequence[Any]]


def _call(
    kind: Kind,
    columns: Columns,
    named: Sequence[Sequence[int]],
    given: Sequence[float],
    of_params: tuple[int, int],
    block: int,
    random: bool,
    decoupled: bool,
    norms: bool,
    beta1: float = 0.9,
    rounding: str | None = None,
) -> Sequence[float]:
    """Run the program in C; the norms of the gradients if `norms`.

    Raises:
        NotOnLists: there is none.
    """
    seed, step = of_params
    lists = [list(map(_stored, columns[0])), *map(list, columns[1:])]
    if kind.fused:
        lists += [[x.residual for x in columns[0]]] if kind.masters else []
        beta2, weight, rest, rate, eps, keep, decay, spread = given
        return fused_adam.run_program(lists, (beta2, weight, rest, rate, spread, eps, keep, decay), decoupled, norms)
    rounding = rounding or ("stochastic" if kind.random else "nearest")
    settings = adam.Settings(step, adam.Scalars(*given[:7]), rounding, beta1, seed, FORMAT)
    p, g, m, v = lists
    return adam.run_program(adam.Leaves(p, g, m, v, None, *named), settings, norms)


def _drawn(moments: Columns, named: Sequence[Sequence[int]], random: bool) -> tuple[Columns, Sequence[int], Columns]:
    """The inputs of random bits: keys of parameters and moments, indices of first elements, and draws of moments."""
    draws = [[x.draws for x in ms] if random else [_NONE] * len(ms) for ms in moments]
    keys, offsets = named
    return [keys, *([x.key for x in one] for one in draws)], [x.offset for x in draws[0]] if random else offsets, draws


_NONE = Draws(0, torch.tensor(0), 0)


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
    kind, given = how._kind(p, x.to(grad)), (0.9, 1 - beta1, 0.1, -0.1, 0.1, 0.9, 0.1, 0.5)
    try:
        columns = [p], [x.to(grad)], *moments
        _call(kind, columns, [[0], [0]], given, (0, 1), 32, False, how.decoupled, False, beta1, how.rounding)
    except NotOnLists:
        return False
    return True


def _has_bits_of_torch(
    call: Any,
    kind: Kind,
    how: Codes,
    shape: tuple[int, int],
    at: int | None,
    beta1: float,
    device: int = -1,
) -> bool:
    """Whether a kernel gives the bits of torch on a sample of this shape, whose elements are a multiple of 16.

    Args:
        at: the index in its leaf of the sample's first element; with `None` codes are rounded to nearest.
        device: the CUDA device of the kernel, or -1 for the CPU. torch computes the reference on the CPU in both cases.
    """
    place, numel = torch.device("cuda", device) if device >= 0 else torch.device("cpu"), shape[0] * shape[1]
    (p,), (g,) = native.sample(numel)[:2]
    p, g = p.reshape(shape), g.reshape(shape).to(kind.grad)
    own: Any = Master.of(p) if kind.masters else p.to(kind.dtype)
    wide_p = master_of(own.p, own.residual) if kind.masters else own.clone()
    moments = [torch.sin(torch.arange(float(numel)) * k).reshape(shape) for k in (1.0, 2.1)]
    moments[1] = moments[1].square()
    draws = [None if at is None else Draws(1, torch.tensor(2), key, at) for key in (3, 4)]
    coded = [how.encode(x, one) for x, one in zip(moments, draws, strict=True)]
    theirs = wide_p, [how.decode(*x, shape) for x in coded]
    wide = [[wide_p], [g], *([x] for x in theirs[1])]
    numbers: Any = dict(step=3, lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1)
    own = Master(own.p.to(place), own.residual.to(place)) if kind.masters else own.to(place, copy=True)
    mine = [Coded(how, *x, one).clone() for x, one in zip(coded, draws, strict=True)]
    mine = [Coded(how, x.codes.to(place), x.scales.to(place), x.draws) for x in mine]
    if kind.fused:
        rate, spread = -0.01 / (1 - beta1**3), (1 - 0.999**3) ** 0.5
        given = 0.999, 1 - beta1, 1 - 0.999, rate, 1e-8, 1 - 0.01 * 0.1, 0.1, spread
        fused_update(*wide, decoupled=at is None, **numbers)
    else:
        given = (*scalars(3, 0.01, beta1, 0.999, 1e-8, 0.1), 1.0)
        rounding = "stochastic" if kind.random else "nearest"
        adam_(*wide, **numbers, rounding=rounding, seed=1, keys=[7], offsets=[at or 0], implementation="eager")
    lists = [[own], [g.to(place)], *([x] for x in mine)]
    call(lists, [[7], [at or 0]], given, (1, 3), how.block, at is not None, not kind.fused or at is None, False)
    again = [how.encode(x, one) for x, one in zip(theirs[1], draws, strict=True)]
    new: Any = Master.of(wide_p) if kind.masters else wide_p
    same = [native.same_bits([[_stored(own).cpu()]], [[_stored(new)]])]
    same += [torch.equal(own.residual.cpu(), new.residual)] if kind.masters else []
    same += [torch.equal(x.codes.cpu(), codes) for x, (codes, _) in zip(mine, again, strict=True)]
    same += [native.same_bits([[x.scales.cpu()]], [[scales]]) for x, (_, scales) in zip(mine, again, strict=True)]
    return all(same)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU the same by a Triton kernel, in one launch for all leaves that are alike.


def _launch(
    kind: Kind,
    columns: Columns,
    named: Sequence[Sequence[int]],
    given: Sequence[float],
    of_params: tuple[int, int],
    block: int,
    random: bool,
    decoupled: bool,
    norms: bool,
) -> list[Tensor]:
    """As `_call`; the norms are on the device."""
    module = triton_module("triton_coded")
    keys, offsets, draws = _drawn(columns[2:], named, random)
    steps = [[int(x.step) for x in one] for one in draws]
    numbers = module.Numbers(of_params[1], of_params[0], draws[0][0].seed, stride_of(FORMAT), decoupled, given)
    return module.run(*columns, keys, offsets, steps, numbers, kind.fused, kind.random, norms)


@functools.cache
def triton_kernel(kind: Kind, how: Codes, random: bool, device: int) -> bool:
    """Whether the Triton kernel runs on this device, and gives the bits of torch on the CPU; else a warning."""
    module = triton_module("triton_coded")
    if module is None:
        return False
    call = functools.partial(_launch, kind)
    at = 2**31 if random else None
    # The first sample has one block more than one program of the kernel updates. The second one has rows that end with
    # a part of a block.
    shapes = (1, module.TILE * module.TILES + how.block // 16 * 16), (16, how.block + 6)
    check = lambda: all(_has_bits_of_torch(call, kind, how, shape, at, 0.9, device) for shape in shapes)  # noqa: E731
    instead = "codes are decoded, updated and encoded by torch, in some hundred launches"
    return gives_bits(check, "the Triton kernel of quantize", instead)
