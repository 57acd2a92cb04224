"""Low-precision Adam: the formula on tensors, which is printed in C and in Triton, all with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from ctypes import c_float
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofn._compat.functorch import while_traced
from zerofn._errors import explain
from zerofn.kernels import native as _native
from zerofn.kernels.formulas import moment_root, once
from zerofn.kernels.fused_adam import check_step, not_wrapped
from zerofn.kernels.lists import at_once
from zerofn.kernels.numbers import NotOnLists, Number
from zerofn.kernels.plans import Plans
from zerofn.kernels.program import Bits, Draws, TensorList, interpreted, printed_by, triton_module
from zerofn.kernels.recording import differentiated, operator, straight_through
from zerofn.kernels.rounding import (
    FORMAT,
    as_int32,
    block_ranges,
    draw,
    known_formats,
    random_bits,
    stochastic_round,
    stream_key,
    stride_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# `formula` is AdamW on one tensor in plain torch operations. Eager and compiled torch run it over lists of tensors.
#
# All implementations must give equal bits, so the formula has only operations that IEEE 754 rounds in one way.
# ``addcmul``, ``lerp`` and ``add(alpha=...)`` may or may not fuse their product with their sum, and are avoided.


# Elements per call of eager torch. The allocator reuses temporaries of 256 KiB, which stay in the second-level cache;
# temporaries of the parameter's own size cost ten times as much.
CHUNK = 1 << 16

# With a larger beta1, a first moment rounded to nearest hardly changes, like a second moment at 0.999.
_NEAREST_MOMENT_BETA = 0.98

_LOW = (torch.bfloat16, torch.float16)

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]  # parameter, gradient, moments


class Scalars(NamedTuple):
    """The scalars of an update: floats that are exact in float32, or 0-d float32 tensors."""

    beta2: Any
    one_minus_beta1: Any
    one_minus_beta2: Any
    rate: Any  # lr * sqrt(1 - beta2**step) / (1 - beta1**step)
    eps: Any  # eps * sqrt(1 - beta2**step)
    keep: Any  # 1 - lr * weight_decay
    decay: Any  # lr * weight_decay


def scalars(step: Any, *numbers: Any) -> Scalars:
    """The scalars of an update, from step, lr, beta1, beta2, eps and weight_decay.

    Computed in double and rounded to float32 once. Tensors stay on their device and inside vmap.
    """
    step, lr, beta1, beta2, eps, weight_decay = (x.double() if isinstance(x, Tensor) else x for x in (step, *numbers))
    values = _values(beta1**step, beta2**step, lr, beta1, beta2, eps, weight_decay)
    if torch.compiler.is_compiling():
        # All numbers become tensors. A float that differs between two pipelines would make the compiler recompile.
        return Scalars(*once(*(torch.as_tensor(x, dtype=torch.float64).float() for x in values)))
    return Scalars(*map(_in_fp32, values))


def _in_fp32(x: Any) -> Any:
    # A program rounds the numbers that it is given.
    return x.float() if isinstance(x, Tensor) else x if isinstance(x, Number) else c_float(x).value


def _values(power1: Any, power2: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any) -> tuple[Any, ...]:
    spread = (1 - power2) ** 0.5
    rate = lr * spread / (1 - power1)
    decay = lr * weight_decay
    return beta2, 1 - beta1, 1 - beta2, rate, eps * spread, 1 - decay, decay


def _scalars_of_leaves(steps: Tensor, lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float) -> Scalars:
    """The scalars of the updates of several leaves, each of the shape `(leaves,)`."""
    numbers = beta1, beta2, eps, weight_decay
    wide, rate = steps.double(), lr.double() if isinstance(lr, Tensor) else lr

    def each(step: Any, power1: Any, power2: Any) -> list[Any]:
        zero = step - step
        return [(zero + x).to(torch.float32) for x in _values(power1, power2, rate, *numbers)]

    return Scalars(*at_once(each, wide, beta1**wide, beta2**wide))


class Mode(NamedTuple):
    """How each of parameter, first and second moment is stored."""

    kahan: bool
    stochastic_param: bool
    stochastic_exp_avg: bool
    stochastic_exp_avg_sq: bool

    @property
    def streams(self) -> tuple[bool, bool]:
        """Which streams of random bits are drawn: 0 for parameter and second moment, 1 for the first moment."""
        return self.stochastic_param or self.stochastic_exp_avg_sq, self.stochastic_exp_avg


def formula(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    c: Tensor | None,
    s: Scalars,
    mode: Mode,
    bits: Sequence[Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The new parameter, moments and compensation, each in its dtype. Writes none of its inputs."""
    p32, g32 = p.float(), g.float()
    m32, v32 = m.float(), v.float()
    m32 = (g32 - m32) * s.one_minus_beta1 + m32
    v32 = v32 * s.beta2 + (g32 * s.one_minus_beta2) * g32
    spread = moment_root(v32)
    update = (m32 * s.rate) / (spread + s.eps)
    if mode.kahan:
        assert c is not None
        c32 = c.float()
        # Infinite parameters stay infinite: inf * 0 and inf - inf must not happen, in this step or the next.
        # The decay is subtracted: subtracting zero keeps the sign of a parameter that is -0, adding it would not.
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


def _store(x: Any, dtype: torch.dtype, stochastic: bool, bits: Any) -> Any:
    if not stochastic:
        return x.to(dtype)
    assert bits is not None
    if isinstance(x, TensorList):
        return x.random(dtype, bits)
    if not differentiated(x):
        return stochastic_round(x, dtype, bits=bits)
    return straight_through(x, stochastic_round(x.detach(), dtype, bits=bits).float()).to(dtype)


class Leaves(NamedTuple):
    """The lists given to `adam_`, entry by entry; ``compensations`` only if they are used."""

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
        """The dtypes of each entry's tensors, four or five."""
        # A comprehension, since the compiler, which traces this, does not know attrgetter.
        return list(zip(*[[t.dtype for t in tensors] for tensors in self.tensors], strict=True))

    def dtypes(self, i: int) -> Dtypes:
        return self.params[i].dtype, self.grads[i].dtype, self.exp_avgs[i].dtype, self.exp_avg_sqs[i].dtype


class Settings(NamedTuple):
    """The arguments of an update that all entries share."""

    step: Any
    scalars: Scalars
    rounding: str
    beta1: float
    seed: int
    form: Any  # of the random draws
    comes: Tensor | None = None  # a bool of the device: nothing is written if it is false

    def of_entry(self, i: int) -> Settings:
        """The settings of one entry, where each has a step of its own (`adam_on_device`)."""
        if not isinstance(self.step, Tensor) or not self.step.ndim:
            return self
        numbers = [x[i] if isinstance(x, Tensor) and x.ndim else x for x in self.scalars]
        return self._replace(step=self.step[i], scalars=Scalars(*numbers))

    def of_entries(self, entries: Sequence[int]) -> Settings:
        """The settings of some entries, where each has a step of its own."""
        if not isinstance(self.step, Tensor) or not self.step.ndim or len(entries) == len(self.step):
            return self
        each = [self.of_entry(i) for i in entries]
        columns: Any = zip(*[own.scalars for own in each], strict=True)
        numbers = [torch.stack(x) if isinstance(x[0], Tensor) and x[0].ndim == 0 else x[0] for x in columns]
        return self._replace(step=torch.stack([own.step for own in each]), scalars=Scalars(*numbers))

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
    """Batches of at most `CHUNK` elements of one combination of dtypes: a piece of a leaf, or many small leaves.

    Each torch call costs about a microsecond at any size, so small leaves are worth a copy into a common buffer.
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
    """The bits that `random_bits` gives for each segment, for a whole batch in a few calls."""
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
    """Eager torch on flat CPU tensors, in chunks that stay in the cache."""
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


def formula_on_entry(leaves: Leaves, i: int, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The formula on one entry in its own shape. It reads no value, address or stride, and writes nothing."""
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


def run_unchunked(leaves: Leaves, settings: Settings) -> None:
    """Eager torch on each tensor as a whole; also for tensors without an address."""
    for i in range(len(leaves.params)):
        column = [None if tensors is None else tensors[i] for tensors in (*leaves[:1], *leaves[2:5])]
        found = formula_on_entry(leaves, i, settings.of_entry(i))
        for old, new in zip(column, found, strict=True):
            if old is not None and new is not None:
                old.copy_(new if settings.comes is None else torch.where(settings.comes, new, old))


# ----------------------------------------------------------------------------------------------------------------------
# `run_printed` runs the formula as a program over lists of leaves, in C or in Triton.


def run_printed(leaves: Leaves, settings: Settings, norms: list[Any] | None = None) -> None:
    """One call of a kernel for each combination of dtypes and device; eager torch if there is no kernel.

    If `norms` is a list and a kernel was called on all gradients, the norm of each gradient is appended to it.
    """
    found: dict[int, Any] = {}
    devices = list(map(Tensor.get_device, leaves.params))
    for _, entries, part in _by_kind(leaves, [*zip(leaves.all_dtypes(), devices, strict=True)]):
        own = settings.of_entries(entries)
        _check_devices(part)
        try:
            found |= zip(entries, run_program(part, own, norms is not None), strict=False)
        except NotOnLists:
            (run_chunked if part.params[0].is_cpu else run_unchunked)(part, own)
    if norms is not None and len(found) == len(leaves.grads):
        norms += [found[i] for i in range(len(leaves.grads))]


def _by_kind(leaves: Leaves, kinds: Sequence[Any]) -> Iterator[tuple[Any, Sequence[int], Leaves]]:
    """Each kind, its entries, and their lists; `kinds` has one for each entry. Nearly always there is one."""
    for kind in dict.fromkeys(kinds):
        if kinds.count(kind) == len(kinds):
            yield kind, range(len(kinds)), leaves
            continue
        entries = [i for i, other in enumerate(kinds) if other == kind]
        columns: Any = [None if column is None else [column[i] for i in entries] for column in leaves]
        yield kind, entries, Leaves(*columns)


@functools.cache
def _plans(mode: Mode, form: int) -> Plans:
    """The programs of `formula`. Some of its scalars may be lists of numbers, one for each leaf: the last columns."""

    def traced(lists: list[Any], numbers: Any, about: tuple[bool, tuple[str, ...]]) -> Any:
        norms, by_leaf = about
        p, g, m, v, *rest = lists
        c = rest.pop(0) if mode.kahan else None
        draws = Draws(numbers["seed"], numbers["step"], form, (), ())
        bits = [Bits(draws, k) if on else None for k, on in enumerate(mode.streams)]
        columns = dict(zip(by_leaf, rest, strict=True))
        s = Scalars(*(columns[name] if name in columns else numbers[name] for name in Scalars._fields))
        made = formula(p, g, m, v, c, s, mode, bits)
        return [x for x in made if x is not None], [g.float().square()] if norms else []

    return Plans(traced)


def run_program(leaves: Leaves, settings: Settings, norms: bool = False) -> list[Any]:
    """One call of a kernel on leaves of one combination of dtypes. Returns the norms of the gradients if asked for.

    Raises:
        NotOnLists: there is no kernel.
    """
    step, form, *scalars = map(_readable, (settings.step, settings.form, *settings.scalars))
    if isinstance(form, Tensor):
        raise NotOnLists("a format of random bits that is not known")
    numbers: Any = dict(zip(Scalars._fields, scalars, strict=True)) | {"seed": settings.seed, "step": step}
    by_leaf = tuple([name for name in Scalars._fields if isinstance(numbers[name], Tensor)])
    columns: Any = list(map(list, leaves.tensors))
    into = [0, 2, 3, 4][: len(columns) - 1]
    columns += [numbers.pop(name).expand(len(leaves.params)) for name in by_leaf]
    plans, places = _plans(settings.mode(leaves.dtypes(0)), form), lambda: (leaves.keys, leaves.offsets)
    _, roots = plans.run(columns, numbers, into, (norms, by_leaf), places, settings.comes, norms)
    if roots is None:
        return []
    return roots[0].tolist() if roots.is_cpu else [*roots[0].unbind()]


def _readable(x: Any) -> Any:
    """The Python number in a tensor of the host; a tensor of a device is not read and stays as it is."""
    return x.item() if isinstance(x, Tensor) and x.is_cpu and not x.ndim else x


def _check_devices(leaves: Leaves) -> None:
    """Refuse leaves on several devices: a kernel that read another device's memory would end the process."""
    places = [list(map(Tensor.get_device, column)) for column in leaves.tensors]
    if len(set().union(*places)) == 1:
        return
    i, row = next((i, row) for i, row in enumerate(zip(*places, strict=True)) if {*row} != {places[0][0]})
    wrong = f"adam_: parameter, gradient and moments of entry {i} are on devices {list(row)}, entry 0 on {places[0][0]}"
    raise ValueError(explain(wrong, "one launch updates leaves of one device", "tensors on one device"))


# ----------------------------------------------------------------------------------------------------------------------
# `adam_` updates low-precision storage in place: in fp32 arithmetic, with one rounding for each stored number.
#
# One formula runs in three ways, with the same bits: by eager torch, in chunks that stay in the cache; by a C kernel
# (`zerofn.kernels.print_c`), 10 to 20 times faster; on a GPU by a Triton kernel (`zerofn.kernels.print_triton`), in one
# launch for all leaves.
#
# ``rounding`` says how parameters and moments below float32 are stored:
#
# * ``"stochastic"``: parameters and second moments are rounded up or down at random, without bias;
# * ``"kahan"``: parameters are rounded to nearest, and ``compensations`` keep what is lost; second moments are rounded
#   stochastically;
# * ``"nearest"``: all are rounded to nearest. In bfloat16 that loses every update smaller than 1/512 of the parameter,
#   and with ``beta2 >= 0.996`` the second moment never shrinks.
#
# First moments are rounded to nearest, which has a third of the error variance and no such trap for ``beta1`` up to
# 0.98. Above it they are rounded stochastically, except under ``"nearest"``.
#
# The second moment is never rounded to nearest by default. With ``beta2 = 0.999`` a decay step takes away a
# thousandth, and bfloat16 values are 1/256 to 1/128 apart. Rounded to nearest, a bfloat16 second moment would never
# shrink, and would grow only by gradients large enough to reach the next value. It would be stuck at its maximum, and
# the effective learning rate with it.
#
# Sources: Kingma and Ba, "Adam", ICLR 2015 (section 2, the reordered form); Loshchilov and Hutter, "Decoupled Weight
# Decay Regularization", ICLR 2019; Kahan, "Further remarks on reducing truncation errors", CACM 1965; Zamirai et al.,
# "Revisiting BFloat16 Training", 2020.


_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENT_DTYPES = (torch.float32, torch.bfloat16)
# Every step calls these on every leaf, so they are C functions.
_IS_CPU, _IS_CUDA, _IS_META = attrgetter("is_cpu"), attrgetter("is_cuda"), attrgetter("is_meta")


def _contiguous(leaves: Leaves) -> tuple[Leaves, list[tuple[Tensor, Tensor]]]:
    """Contiguous tensors, and pairs of (tensor to write back to, its contiguous copy)."""
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in leaves.tensors):
        return leaves, []
    lists: list[Any] = [[t.contiguous() for t in tensors] for tensors in leaves.tensors]
    copies = [
        (t, copy)
        for k, (tensors, new) in enumerate(zip(leaves.tensors, lists, strict=True))
        for t, copy in zip(tensors, new, strict=True)
        if k != 1 and copy is not t
    ]
    lists += [None] * (5 - len(lists))
    return Leaves(*lists, keys=leaves.keys, offsets=leaves.offsets), copies


def _have_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor has an address and is not batched by vmap. For others only `run_unchunked` works."""
    # Fake and functional tensors are subclasses; functorch's wrappers look like plain tensors from Python.
    plain = set(map(type, tensors)) <= {Tensor, torch.nn.Parameter} and not any(map(_IS_META, tensors))
    return plain and not_wrapped(tensors)


def implementation_for(params: Sequence[Tensor]) -> str:
    """The implementation that `adam_` runs for these parameters: ``"native"``, ``"triton"`` or ``"eager"``.

    ``"native"`` is for CPU tensors if a C compiler was found (`zerofn.kernels.native`). The first call with a new
    combination of dtypes builds the kernel, in about half a second, and keeps it on disk. ``"triton"`` is for tensors
    of a GPU if triton is installed. ``"eager"`` is for everything else, including tensors under `torch.func.vmap`. Its
    random bits do not depend on the position in the mapped dimension.

    Examples:
        >>> implementation_for([torch.ones(2, device="meta")])
        'eager'

    Notes:
        All three compute the same bits, except for the payload of a NaN. Before ``"native"`` or ``"triton"`` is used,
        its bits on a sample are compared with those of ``"eager"``. With ``ZEROFN_NATIVE=0`` and ``TRITON_INTERPRET=1``
        in the environment Triton's interpreter runs the Triton kernel on CPU tensors, for tests without a GPU.
    """
    if not params or not _have_memory(params):
        return "eager"
    if all(map(_IS_CPU, params)):
        return "native" if _native.compiler() else "triton" if interpreted() else "eager"
    return "triton" if all(map(_IS_CUDA, params)) and triton_module("print_triton") is not None else "eager"


def _check(leaves: Leaves, step: Any, rounding: str, form: Any, implementation: str, function: str) -> None:
    if rounding not in ("nearest", "stochastic", "kahan"):
        why, right = "it is not a rounding", "adam_(rounding='stochastic'), 'kahan' or 'nearest'"
        raise ValueError(explain(f"adam_(rounding={rounding!r})", why, right))
    if implementation not in ("auto", "native", "triton", "eager"):
        why, right = "it is not an implementation", "adam_(implementation='auto'), 'native', 'triton' or 'eager'"
        raise ValueError(explain(f"adam_(implementation={implementation!r})", why, right))
    if not isinstance(form, Tensor) and form not in known_formats():
        why = f"the formats of random draws are {known_formats()}"
        raise ValueError(explain(f"adam_(form={form!r})", why, f"adam_(form={FORMAT})"))
    if rounding == "kahan" and leaves.compensations is None:
        why = "what rounding loses must be kept from step to step"
        right = "compensations=[torch.zeros_like(p) for p in params], and the same tensors at every step"
        raise ValueError(explain("adam_(rounding='kahan', compensations=None)", why, right))
    check_step(function, step)
    count = len(leaves.params)
    lengths = [len(column) for column in leaves if column is not None]
    if lengths != [count] * len(lengths):
        why = "each parameter has one entry in each list"
        raise ValueError(explain(f"adam_ with lists of lengths {lengths}", why, "lists of one length"))
    _check_entries(leaves)


def _check_entries(leaves: Leaves) -> None:
    """Check each combination of dtypes once, and shapes by comparing lists: this runs in every step."""
    dtypes = leaves.all_dtypes()
    for kind in dict.fromkeys(dtypes):
        i, (p, g, m, v, *c) = dtypes.index(kind), kind
        if p not in _PARAM_DTYPES or g not in _PARAM_DTYPES:
            wrong = f"adam_(params[{i}]: {p}, grads[{i}]: {g})"
            why = "it computes in float32, which can hold float32, bfloat16 and float16"
            raise ValueError(explain(wrong, why, "one of these dtypes, or torch.optim.AdamW"))
        if m not in _MOMENT_DTYPES or v not in _MOMENT_DTYPES:
            wrong = f"adam_(exp_avgs[{i}]: {m}, exp_avg_sqs[{i}]: {v})"
            why = (
                "moments are float32 or bfloat16: float16 ends at 6e-8,\n"
                "so squares of gradients below 2.4e-4 would be zero"
            )
            raise ValueError(explain(wrong, why, "state_dtype=torch.bfloat16, which takes the same bytes"))
        if c and c[0] != p:
            why = f"a compensation has its parameter's dtype, {p}"
            raise ValueError(explain(f"adam_(compensations[{i}]: {c[0]})", why, f"torch.zeros_like(params[{i}])"))
    shapes = [[t.shape for t in tensors] for tensors in leaves.tensors]  # the compiler does not know attrgetter
    if any(column != shapes[0] for column in shapes):
        i, row = next((i, row) for i, row in enumerate(zip(*shapes, strict=True)) if len(set(row)) > 1)
        wrong = f"adam_: parameter, gradient and moments of entry {i} have shapes {list(map(tuple, row))}"
        raise ValueError(explain(wrong, "elements are updated one by one", "tensors of one shape, cut alike"))


def adam_update(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    c: Any = None,
    *,
    step: int | Tensor,
    lr: float | Tensor,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    rounding: str = "stochastic",
    seed: int = 0,
    key: Any,
    offset: Any,
    form: int | Tensor = FORMAT,
) -> list[Any]:
    """The formula of `adam_` on one entry: returns the new parameter, moments, and compensation under ``"kahan"``.

    Tensors may be the lists that a formula of `optimizer` is given for many leaves. Then `key` and `offset` are lists.

    No argument is written. It can be differentiated, also by numbers that are 0-d tensors; derivatives pass straight
    through each rounding.

    Examples:
        >>> p, g, z = torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.zeros(2)
        >>> rate = lambda lr: adam_update(p, g, z, z, step=1, lr=lr, key=0, offset=0)[0].float().sum()
        >>> torch.func.grad(rate)(torch.tensor(0.125)).round()
        tensor(-2.)

    Notes:
        The bits are those of `adam_`.
    """
    used = c if rounding == "kahan" else None
    leaves = Leaves([p], [g], [m], [v], None if used is None else [used], [key], [offset])
    if not isinstance(p, TensorList):
        _check(leaves, step, rounding, form, "auto", "adam_update")
    settings = Settings(step, scalars(step, lr, beta1, beta2, eps, weight_decay), rounding, beta1, seed, form)
    if isinstance(p, TensorList):
        on_lists: Any = formula
        mode, draws = settings.mode((p.dtype, g.dtype, m.dtype, v.dtype)), Draws(seed, step, int(form), key, offset)
        bits = [Bits(draws, k) if on else None for k, on in enumerate(mode.streams)]
        return [x for x in on_lists(p, g, m, v, used, settings.scalars, mode, bits) if x is not None]
    return [x for x in formula_on_entry(leaves, 0, settings) if x is not None]


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    compensations: Sequence[Tensor] | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    seed: int = 0,
    keys: Sequence[int],
    offsets: Sequence[int],
    form: int | Tensor = FORMAT,
    implementation: str = "auto",
    norms: list[Any] | None = None,
) -> None:
    """One AdamW step with decoupled weight decay, in place, on lists of tensors (or of shards of tensors).

    Entry ``i`` is a leaf or a shard of one: ``params[i]``, ``grads[i]``, ``exp_avgs[i]``, ``exp_avg_sqs[i]`` and
    ``compensations[i]`` have one shape; ``keys[i]`` is the leaf's `leaf_key`, and ``offsets[i]`` the index of the
    shard's first element in the flattened leaf. The formula is the reordered form of section 2 of Kingma and Ba (2015),
    equal to `torch.optim.AdamW` in exact arithmetic.

    Args:
        params, exp_avgs, exp_avg_sqs, compensations: overwritten. Parameters are float32, bfloat16 or float16, moments
            float32 or bfloat16. Compensations, for ``rounding="kahan"``, have the parameters' dtypes and start at zero;
            ``p.float() + c.float()`` is the more precise parameter.
        grads: float32, bfloat16 or float16, whatever the parameters are; read only.
        step, lr: the number of this step, from 1, and the learning rate. Each is a number or a tensor of shape ``()``,
            which may be batched by `torch.func.vmap`. New values never recompile.
        rounding: how parameters and moments below float32 are stored. With ``"stochastic"`` parameters and second
            moments are rounded up or down at random, without bias. With ``"kahan"`` parameters are rounded to nearest,
            ``compensations`` keep what rounding loses, and second moments are rounded at random. With ``"nearest"``
            all are rounded to nearest, which loses small updates.
        seed: the seed of the random bits, an int.
        form: the format of the random bits (`known_formats`), an int or a 0-d tensor.
        implementation: ``"auto"`` (see `implementation_for`), ``"native"``, ``"triton"`` or ``"eager"``.
        norms: a list. If the kernel also computes the norms of the gradients, it appends them: floats on the CPU, 0-d
            tensors of the device on a GPU.

    Raises:
        ValueError, TypeError: a dtype, a shape, the rounding or the step is not allowed. If a dtype or a shape is wrong
            the message names the entry.

    Examples:
        >>> p, g = torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.0, -2.0, 0.0])
        >>> m, v = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
        >>> adam_([p], [g], [m], [v], step=1, lr=0.125, keys=[0], offsets=[0])
        >>> p
        tensor([0.8750, 1.1250, 1.0000], dtype=torch.bfloat16)

    Notes:
        The result has the same bits whether a leaf is passed as one tensor or as several shards.
    """
    used = compensations if rounding == "kahan" else None
    leaves = Leaves(params, grads, exp_avgs, exp_avg_sqs, used, keys, offsets)
    _check(leaves, step, rounding, form, implementation, "adam_")
    if not params:
        return
    # The values are read only if all are plain CPU tensors. Reading others would wait for a device or break vmap.
    given = [x for x in (params[0], step, lr, form) if isinstance(x, Tensor)]
    plain = _have_memory(given) and all(map(_IS_CPU, given))
    step, lr, form = (int(step), float(lr), int(form)) if plain else (step, lr, form)
    settings = Settings(step, scalars(step, lr, beta1, beta2, eps, weight_decay), rounding, beta1, seed, form)
    _run(implementation, leaves, settings, plain, norms)


def _run(implementation: str, leaves: Leaves, settings: Settings, plain: bool, norms: list[Any] | None) -> None:
    asked = implementation != "auto"
    implementation = implementation if asked else implementation_for(leaves.params)
    with torch.no_grad(), printed_by(implementation, leaves.params[0].device) if asked else nullcontext():
        if not plain and implementation == "eager":
            return run_unchunked(leaves, settings)
        flat, copies = _contiguous(leaves)
        if implementation == "eager":
            run_chunked(flat, settings)
        else:
            run_printed(flat, settings, norms)
        for tensor, copy in copies:
            tensor.copy_(copy)


def adam_on_device(
    *lists: Sequence[Tensor],
    steps: Tensor,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    rounding: str,
    seed: int,
    keys: Sequence[int],
    offsets: Sequence[int],
    form: Any,
    comes: Tensor | None = None,
    norms: list[Any] | None = None,
) -> None:
    """As `adam_`, where the numbers of the updates are on the device: on a GPU the host reads none.

    Args:
        steps: the number of this update for each leaf, of the shape `(leaves,)`.
        lr: a number or a 0-d tensor.
        comes: a 0-d bool tensor. If it is false, nothing is written.
    """
    numbers: Any = dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, rounding=rounding, seed=seed)
    draws: Any = dict(keys=keys, offsets=offsets)
    if steps.is_cpu:
        if comes is None or comes.item():
            _by_step(list(map(list, lists)), steps.tolist(), lr=lr, form=form, **numbers, **draws)
        return
    params, grads, exp_avgs, exp_avg_sqs, *rest = lists
    used = rest[0] if rounding == "kahan" else None
    leaves = Leaves(params, grads, exp_avgs, exp_avg_sqs, used, keys, offsets)
    _check(leaves, 1, rounding, form, "auto", "adam_")
    scalars_of_leaves = _scalars_of_leaves(steps, lr, beta1, beta2, eps, weight_decay)
    settings = Settings(steps, scalars_of_leaves, rounding, beta1, seed, form, comes)
    _run("auto", leaves, settings, False, norms)


def _by_step(
    lists: list[list[Tensor]], steps: list[int], keys: Sequence[int], offsets: Sequence[int], **how: Any
) -> None:
    """`adam_` on leaves that may have different numbers of updates."""
    groups: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault(step, []).append(i)
    for step, entries in groups.items():
        chosen: Any = [[xs[i] for i in entries] for xs in lists if xs]
        where: Any = dict(keys=[keys[i] for i in entries], offsets=[offsets[i] for i in entries])
        adam_(*chosen, step=step, **how, **where)


# ----------------------------------------------------------------------------------------------------------------------
# `zerofn::adam_` is the C kernel of low-precision Adam as a custom operator, for compiled graphs.
#
# The compiler cannot trace a call of C. It would put the formula into the graph, and the code it generates takes two
# to three times as long. An operator is not traced: its schema says which arguments it writes, and that it returns
# nothing. One call takes all leaves, since each call costs some 50 us.


def _run_operator(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    compensations: list[Tensor],
    steps: Tensor,
    numbers: Tensor,
    form: Tensor,
    rounding: str,
    seed: int,
    keys: list[int],
    offsets: list[int],
) -> None:
    """`adam_` on leaves that may have different numbers of updates.

    Args:
        compensations: empty unless `rounding="kahan"`.
        steps: the number of this update, for each leaf; on the CPU.
        numbers: lr, beta1, beta2, eps and weight_decay, in float64.
        form: of the random draws.
        seed: its low 64 bits, as a signed number.
    """
    lr, beta1, beta2, eps, weight_decay = numbers.tolist()
    how: Any = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, rounding=rounding, seed=seed)
    lists = [params, grads, exp_avgs, exp_avg_sqs, compensations]
    _by_step(lists, steps.tolist(), keys, offsets, form=int(form), **how)


_OPERATOR = operator(
    "adam_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs, Tensor(a3!)[] exp_avg_sqs, "
    "Tensor(a4!)[] compensations, Tensor steps, Tensor numbers, Tensor form, str rounding, SymInt seed, "
    "SymInt[] keys, SymInt[] offsets) -> ()",
    _run_operator,
)


def has_kernel(params: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Tensor], rounding: str) -> bool:
    """Whether a graph should call the operator on these leaves: they are on the CPU, and the C kernel can be built.

    Examples:
        >>> x = [torch.ones(2)]
        >>> has_kernel([torch.ones(2, device="meta")], x, x, "stochastic")
        False
    """
    if any(x.device.type != "cpu" for x in (*params, *grads, *moments)):
        return False
    return _works()


@while_traced
def _works() -> bool:
    return _native.compiler() is not None


def adam_operator(
    *lists: Sequence[Tensor],
    step: Tensor,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    rounding: str,
    seed: int,
    keys: Sequence[int],
    offsets: Sequence[int],
    form: Any,
) -> None:
    """Call `adam_` by the operator. `step` has the shape `(leaves,)`, and numbers may be tensors."""
    params, grads, exp_avgs, exp_avg_sqs, *rest = map(list, lists)
    given = (lr, beta1, beta2, eps, weight_decay)
    numbers = torch.stack([torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in given])
    form = torch.as_tensor(form, dtype=torch.int64)
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    moments = exp_avgs, exp_avg_sqs, rest[0] if rounding == "kahan" else []
    _OPERATOR(params, grads, *moments, step, numbers, form, rounding, seed, list(keys), list(offsets))
