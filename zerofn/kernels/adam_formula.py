"""AdamW on one tensor as plain torch operations, and eager and compiled torch running it over lists.

Equal bits in every implementation restrict the formula to operations that IEEE 754 rounds in one way:
``addcmul``, ``lerp`` and ``add(alpha=...)`` may fuse their product with their sum or not, and are avoided.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofn.kernels.recording import differentiated, straight_through
from zerofn.kernels.rounding import as_int32, block_ranges, draw, random_bits, stochastic_round, stream_key, stride_of
from zerofn.kernels.terms import moment_root, once

# Elements handled at once by eager torch: temporaries of 256 KiB are reused by the allocator and stay in the
# second-level cache; temporaries of the parameter's own size cost ten times more.
CHUNK = 1 << 16

# Above this a first moment rounded to nearest is biased towards zero change, as second moments are at 0.999.
_NEAREST_MOMENT_BETA = 0.98

_LOW = (torch.bfloat16, torch.float16)

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]  # parameter, gradient, moments


class Scalars(NamedTuple):
    """Numbers made of step and hyperparameters: floats that are exact in float32, or 0-d float32 tensors."""

    beta2: Any
    one_minus_beta1: Any
    one_minus_beta2: Any
    rate: Any  # lr * sqrt(1 - beta2**step) / (1 - beta1**step)
    eps: Any  # eps * sqrt(1 - beta2**step)
    keep: Any  # 1 - lr * weight_decay
    decay: Any  # lr * weight_decay


def scalars(step: Any, *numbers: Any) -> Scalars:
    """The scalars of step, lr, beta1, beta2, eps and weight_decay.

    Computed in double, rounded to float32 once; stays on the device and inside vmap if given tensors.
    """
    step, lr, beta1, beta2, eps, weight_decay = (x.double() if isinstance(x, Tensor) else x for x in (step, *numbers))
    spread = (1 - beta2**step) ** 0.5
    rate = lr * spread / (1 - beta1**step)
    decay = lr * weight_decay
    values = (beta2, 1 - beta1, 1 - beta2, rate, eps * spread, 1 - decay, decay)
    if torch.compiler.is_compiling():
        # All as tensors: the compiler itself makes one of a float that differs from one pipeline to the next.
        return Scalars(*once(*(torch.as_tensor(x, dtype=torch.float64).float() for x in values)))
    return Scalars(*(x.float() if isinstance(x, Tensor) else c_float(x).value for x in values))


class Mode(NamedTuple):
    """How each of parameter, first and second moment is stored."""

    kahan: bool
    stochastic_param: bool
    stochastic_exp_avg: bool
    stochastic_exp_avg_sq: bool

    @property
    def streams(self) -> tuple[bool, bool]:
        """Which streams of bits are drawn: 0 for parameter and second moment, 1 for the first moment."""
        return self.stochastic_param or self.stochastic_exp_avg_sq, self.stochastic_exp_avg


def formula(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    c: Tensor | None,
    s: Scalars,
    mode: Mode,
    bits: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """New values of parameter, moments and compensation in their dtypes. Writes none of its inputs."""
    p32, g32 = p.float(), g.float()
    m32, v32 = m.float(), v.float()
    m32 = (g32 - m32) * s.one_minus_beta1 + m32
    v32 = v32 * s.beta2 + (g32 * s.one_minus_beta2) * g32
    # On the CPU torch takes float32 roots from a library that is off by one ulp now and then, for long
    # tensors only. A double root rounded to float32 is always the correctly rounded one.
    spread = moment_root(v32.double()).float() if v32.device.type == "cpu" else moment_root(v32)
    update = (m32 * s.rate) / (spread + s.eps)
    if mode.kahan:
        assert c is not None
        c32 = c.float()
        # Infinite parameters stay infinite: neither inf * 0 nor inf - inf may happen, now or one step later.
        # Subtracting a zero keeps the sign of a parameter that is -0, adding one would not.
        pull = torch.where(p32.isfinite(), (p32 + c32) * s.decay, 0.0)
        drop = pull + update - c32
        new_p = (p32 - drop).to(p.dtype)
        lost = (p32 - new_p.float()) - drop
        new_c = torch.where(new_p.isfinite(), lost, 0.0).to(c.dtype)
    else:
        new_p, new_c = _store(p32 * s.keep - update, p.dtype, mode.stochastic_param, bits[0]), None
    high = None if bits[0] is None else bits[0] >> 16
    return (
        new_p,
        _store(m32, m.dtype, mode.stochastic_exp_avg, bits[1]),
        _store(v32, v.dtype, mode.stochastic_exp_avg_sq, high),
        new_c,
    )


def _store(x: Tensor, dtype: torch.dtype, stochastic: bool, bits: Tensor | None) -> Tensor:
    if not stochastic:
        return x.to(dtype)
    assert bits is not None
    if not differentiated(x):
        return stochastic_round(x, dtype, bits=bits)
    return straight_through(x, stochastic_round(x.detach(), dtype, bits=bits).float()).to(dtype)


class Leaves(NamedTuple):
    """The lists given to `adam_`, entry by entry; ``compensations`` only where they are used."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    compensations: Sequence[Tensor] | None
    keys: Sequence[int]
    offsets: Sequence[int]

    @property
    def tensors(self) -> list[Sequence[Tensor]]:
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs]
        return lists if self.compensations is None else [*lists, self.compensations]

    def all_dtypes(self) -> list[tuple[torch.dtype, ...]]:
        """Of each entry the dtypes of its tensors, four or five."""
        # No attrgetter: a compiler traces this.
        return list(zip(*[[t.dtype for t in tensors] for tensors in self.tensors], strict=True))

    def dtypes(self, i: int) -> Dtypes:
        return self.params[i].dtype, self.grads[i].dtype, self.exp_avgs[i].dtype, self.exp_avg_sqs[i].dtype


class Settings(NamedTuple):
    """What all entries have in common."""

    step: Any
    scalars: Scalars
    rounding: str
    beta1: float
    seed: int
    form: Any  # of the random draws

    def mode(self, dtypes: Dtypes) -> Mode:
        """How entries of these dtypes are rounded; float32 is stored as computed, whatever `rounding` says."""
        param, _, exp_avg, exp_avg_sq = dtypes
        random = self.rounding != "nearest"
        return Mode(
            kahan=self.rounding == "kahan",
            stochastic_param=self.rounding == "stochastic" and param in _LOW,
            stochastic_exp_avg=random and exp_avg in _LOW and self.beta1 > _NEAREST_MOMENT_BETA,
            stochastic_exp_avg_sq=random and exp_avg_sq in _LOW,
        )


class _Segment(NamedTuple):
    entry: int
    start: int  # within the entry
    stop: int


def _batches(leaves: Leaves) -> Iterator[list[_Segment]]:
    """Lists of at most `CHUNK` elements of one combination of dtypes: part of a leaf, or many small ones.

    Each torch call costs about a microsecond whatever its size, so that small leaves are worth a copy
    into a common buffer.
    """
    batch: list[_Segment] = []
    total = 0
    for i, offset in enumerate(leaves.offsets):
        for start, stop in block_ranges(offset, leaves.params[i].numel(), CHUNK):
            same = not batch or leaves.dtypes(batch[0].entry) == leaves.dtypes(i)
            if batch and (not same or total + stop - start > CHUNK):
                yield batch
                batch, total = [], 0
            batch.append(_Segment(i, start - offset, stop - offset))
            total += stop - start
    if batch:
        yield batch


def _batch_bits(batch: list[_Segment], leaves: Leaves, settings: Settings, stream: int) -> Tensor:
    """The bits `random_bits` gives for each segment, for a whole batch in a few calls."""
    stride = stride_of(settings.form)
    first, k1, begin = [], [], 0
    for entry, start, stop in batch:
        index = leaves.offsets[entry] + start
        key = stream_key(settings.seed, settings.step, leaves.keys[entry], block=index >> 32, stream=stream)
        first.append(as_int32((index - begin) * stride + key[0]))
        k1.append(as_int32(key[1]))
        begin += stop - start
    counter = torch.arange(begin, dtype=torch.int32).mul_(as_int32(stride))
    if len(batch) == 1:
        return draw(counter.add_(first[0]), k1[0])
    sizes = torch.tensor([stop - start for _, start, stop in batch])
    words = torch.tensor([first, k1], dtype=torch.int32).repeat_interleave(sizes, dim=1)
    return draw(counter.add_(words[0]), words[1])


def run_chunked(leaves: Leaves, settings: Settings) -> None:
    """Eager torch on flat CPU tensors."""
    for batch in _batches(leaves):
        parts = [[tensors[i].view(-1)[start:stop] for i, start, stop in batch] for tensors in leaves.tensors]
        p, g, m, v, *c = (part[0] if len(batch) == 1 else torch.cat(part) for part in parts)
        mode = settings.mode(leaves.dtypes(batch[0].entry))
        bits = [_batch_bits(batch, leaves, settings, k) if on else None for k, on in enumerate(mode.streams)]
        results = formula(p, g, m, v, c[0] if c else None, settings.scalars, mode, bits)
        sizes = [stop - start for _, start, stop in batch]
        for part, result in zip((parts[0], *parts[2:]), results, strict=False):
            assert result is not None
            for target, source in zip(part, result.split(sizes), strict=True):
                target.copy_(source)


def whole(leaves: Leaves, i: int, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The formula on one entry, in its own shape: looks at no value, address or stride, and writes nothing."""
    p, g, m, v = (tensors[i] for tensors in leaves.tensors[:4])
    mode = settings.mode(leaves.dtypes(i))
    where: Any = dict(seed=settings.seed, step=settings.step, key=leaves.keys[i], offset=leaves.offsets[i])
    where["form"] = settings.form
    bits = [
        random_bits(p.numel(), **where, stream=k, device=p.device).view(p.shape) if on else None
        for k, on in enumerate(mode.streams)
    ]
    c = None if leaves.compensations is None else leaves.compensations[i]
    return formula(p, g, m, v, c, settings.scalars, mode, bits)


def run_whole(leaves: Leaves, settings: Settings) -> None:
    """Eager torch on each tensor whole."""
    for i in range(len(leaves.params)):
        column = [None if tensors is None else tensors[i] for tensors in (*leaves[:1], *leaves[2:5])]
        _write(column, whole(leaves, i, settings))


def _write(tensors: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not None and value is not None:
            tensor.copy_(value)


def _update_segment(p, g, m, v, c, numbers: Tensor, words: Tensor, mode: Mode) -> None:
    """The function that is compiled. All that changes from step to step is a tensor, so that nothing recompiles."""
    index = torch.arange(p.numel(), dtype=torch.int32, device=p.device) * words[0, 2]
    bits = [draw(index + words[k, 0], words[k, 1]) if on else None for k, on in enumerate(mode.streams)]
    _write((p, m, v, c), formula(p, g, m, v, c, Scalars(*numbers.unbind()), mode, bits))


@functools.cache
def _compiled_segment():
    return torch.compile(_update_segment, dynamic=True)


def run_compiled(leaves: Leaves, settings: Settings) -> None:
    """torch.compile on flat tensors, one launch for each entry. Written for GPUs; tested on the CPU only."""
    segments = [
        (i, start, stop)
        for i, offset in enumerate(leaves.offsets)
        for start, stop in block_ranges(offset, leaves.params[i].numel())
    ]
    device = leaves.params[0].device
    numbers = settings.scalars
    if isinstance(numbers.rate, Tensor) or isinstance(numbers.keep, Tensor):
        numbers = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=device) for x in numbers])
    else:
        numbers = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
    # Hashed for all segments together, where the step is: on the device if that is where the step counts.
    at = settings.step.device if isinstance(settings.step, Tensor) else "cpu"
    key = torch.tensor([leaves.keys[i] for i, _, _ in segments], device=at)
    start = torch.tensor([start for _, start, _ in segments], device=at)
    words = []
    stride = key * 0 + stride_of(settings.form)
    for stream in (0, 1):
        k0, k1 = stream_key(settings.seed, settings.step, key, block=start >> 32, stream=stream)
        words.append(torch.stack([as_int32(start * stride + k0), as_int32(k1), as_int32(stride)]))
    drawn = torch.stack(words).to(device, non_blocking=True)
    for j, (i, begin, end) in enumerate(segments):
        piece = slice(begin - leaves.offsets[i], end - leaves.offsets[i])
        p, g, m, v, *c = (tensors[i].view(-1)[piece] for tensors in leaves.tensors)
        mode = settings.mode(leaves.dtypes(i))
        _compiled_segment()(p, g, m, v, c[0] if c else None, numbers, drawn[..., j], mode)
