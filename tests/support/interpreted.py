"""The Triton kernel under Triton's interpreter, in a process of its own: Triton reads its switch on import."""

from __future__ import annotations

import collections
import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from steps_of_low_precision import update
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf
from zerofn.core import leaf_updates  # inside: programs of leaves as they are stored
from zerofn.core.context import Norms  # inside: what asks a kernel for norms
from zerofn.extend import Coded, Codes, Draws, Master, formula_of_torch, leaf_key, master_of
from zerofn.extend import fused_update as adam_of_torch
from zerofn.kernels import (  # inside: which kernel is taken, and kernels by themselves
    native,
    program,
)
from zerofn.kernels.codes import coding_of  # inside: as above
from zerofn.kernels.program import printed_by  # inside: as above
from zerofn.transforms import low_precision_adam  # inside: its formula

# Numbers at the edges of every format: infinities, NaN, zeros, subnormals, the largest, squares that underflow.
SPECIAL = [
    *(0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.3895e38, 3.4e38, 1e-40, -1e-40, 1.1754944e-38),
    *(65504.0, -65519.0, 65520.0, 6e-8, -5.9e-8, 6.1e-5, 1e-22, 3e-20, 1.0, -1.0),
]


def processes() -> ProcessPoolExecutor:
    """One process in which Triton interprets, and tensors on the CPU take the Triton kernel."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)


def by_the_compiler(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn(*args)` gives in a process in which Triton compiles. It is forked from one that has imported torch."""
    return zf.launch(fn, 1, *args, timeout=limit(), init=False)[0]


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    _mend_interpreter()


def _mend_interpreter() -> None:
    """Let Triton 3.6, which torch 2.11 has, interpret as later releases do, and as a GPU computes.

    Its interpreter rounds an fma twice, and asks NumPy for an int of an array of one element in one dimension, which
    NumPy 2.5 refuses: so it reads bounds of loops.
    """
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    twice = builder.create_fma

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if any(a.data.dtype != np.float32 for a in (x, y, z)):
            return twice(self, x, y, z)
        return interpreter.TensorHandle(_rounded_once(x.data, y.data, z.data), z.dtype.scalar)

    interpreter._patch_lang_tensor, builder.create_fma = patched, create_fma


def _rounded_once(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """`x * y + z` of fp32, rounded once: in float64 products are exact, and sums are rounded to the odd neighbour.

    A sum to the nearest would be rounded twice: to float64, and from there to fp32.
    """
    with np.errstate(all="ignore"):
        product, wide = x.astype(np.float64) * y, np.broadcast_to(z, np.broadcast_shapes(x.shape, y.shape, z.shape))
        product, wide = np.broadcast_to(product, wide.shape), wide.astype(np.float64)
        near = product + wide
        part = near - product
        rest = (product - (near - part)) + (wide - part)
        even = (near.view(np.int64) & 1) == 0
        other = np.nextafter(near, np.where(rest > 0, np.inf, -np.inf))
        return np.where(np.isfinite(near) & (rest != 0) & even, other, near).astype(np.float32)


def leaf(n: int, dtypes: Sequence[torch.dtype], seed: int, shift: int) -> list[Tensor]:
    """Parameter, gradient, moments and compensation; views that begin `shift` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, dtype in enumerate((*dtypes, dtypes[0])):
        x = torch.randn(n + shift, generator=generator)
        x = x * torch.randint(-30, 8, (n + shift,), generator=generator).float().exp2()
        chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n + shift,), generator=generator)]
        x = torch.where(torch.rand(n + shift, generator=generator) < 0.3, chosen, x)
        if i == 3:
            x = x.abs()
        # What is lost of a parameter is small.
        found.append((x * 1e-3 if i == 4 else x).to(dtype)[shift:])
    return found


def different(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[str]:
    """Where two lists of tensors differ; a NaN equals any NaN."""
    rows = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        word = torch.int32 if x.dtype == torch.float32 else torch.int16
        wrong = (x.contiguous().view(word) != y.contiguous().view(word)) & ~(x.isnan() & y.isnan())
        if wrong.any():
            at = int(wrong.flatten().nonzero()[0])
            rows.append(f"tensor {i} ({x.dtype}) at {at}: {float(x.flatten()[at])!r}, not {float(y.flatten()[at])!r}")
    return rows


def compare(leaves: Sequence[Any], steps: Sequence[int], **how: Any) -> list[str]:
    """What differs between the Triton kernel and eager torch after some steps; norms too, within a few roundings.

    Args:
        leaves: arguments of `leaf`.
        steps: numbers of the updates.
        how: arguments of `update`.
    """
    columns = [list(column) for column in zip(*[leaf(*x) for x in leaves], strict=True)]
    ours, theirs = ([[_own(x) for x in column] for column in columns] for _ in range(2))
    rows = []
    for step in steps:
        norms = Norms()
        update(ours, "triton", **how, step=step, norms=norms)
        update(theirs, "eager", **how, step=step)
        rows += [f"step {step}: {row}" for a, b in zip(ours, theirs, strict=True) for row in different(a, b)]
        if norms.found:
            rows += _wrong_norms(columns[1], torch.tensor(list(norms.found.values())))
    return rows


def _own(x: Tensor) -> Tensor:
    """A copy, as far into memory of its own as `x` is."""
    shift = int(x.storage_offset())
    return torch.cat([x.new_zeros(shift), x])[shift:]


def _wrong_norms(grads: Sequence[Tensor], norms: Sequence[Tensor]) -> list[str]:
    rows = []
    for g, norm in zip(grads, norms, strict=True):
        true = g.double().norm()
        # Squares have the range of float32 only.
        inside = true.isfinite() and g.numel() and 1e-15 < true < 1e18
        if norm.isfinite() and inside and abs(norm.double() - true) > 1e-5 * true:
            rows.append(f"a norm is {float(norm)}, not {float(true)}")
        if not norm.isfinite() and inside:
            rows.append(f"a norm is {float(norm)}, not {float(true)}")
        if true.isnan() and not norm.isnan():
            rows.append(f"a norm is {float(norm)}, not NaN")
    return rows


def compare_shards(rounding: str) -> list[str]:
    """What differs between a leaf and the same leaf in pieces, which begin at odd places in memory."""
    cuts = [0, 1, 1000, 16_384, 16_385, 40_000, 40_001]
    how: dict[str, Any] = dict(step=3, lr=0.1, weight_decay=0.1, rounding=rounding, paths=["w"])
    whole = leaf(cuts[-1], (torch.bfloat16,) * 4, 0, 0)
    pieces = [[x[a:b].clone() for a, b in pairwise(cuts)] for x in whole]
    offset = 2**32 - 20_000
    update([[x] for x in whole], "triton", **how, offsets=[offset])
    for i, a in enumerate(cuts[:-1]):
        update([[column[i]] for column in pieces], "triton", **how, offsets=[offset + a])
    return different([torch.cat(x) for x in pieces], whole)


def compare_numbers() -> list[str]:
    """What differs if the number of the update comes as a tensor of the device: one for all, or one of each leaf."""
    from zerofn.kernels import print_triton  # inside: a kernel by itself
    from zerofn.kernels.program import Draws as OfProgram  # inside: as above
    from zerofn.kernels.program import Program  # inside: as above

    made = Program((0,), (), (), (("random", ("x0", "r0", "0"), 1),), ((1, "x1"),), (1,), (), (0,), 2)
    steps = [2**33 + 5, 7]

    def drawn(step: Any, only: slice = slice(None)) -> list[Tensor]:
        given = [torch.linspace(-3, 2, 70), torch.linspace(0, 1e-3, 30)][only]
        found = [torch.zeros_like(x, dtype=torch.bfloat16) for x in given]
        print_triton.run(made, [given, found], [], [], True, OfProgram(-3, step, 2, [1, 2**62][only], [2, 3][only]))
        return found

    first, both = drawn(steps[0]), drawn(torch.tensor(steps))
    apart = drawn(steps[0], slice(1)) + drawn(steps[1], slice(1, 2))
    rows = different(drawn(torch.tensor(steps[0])), first) + different(both, apart)
    return rows if different(first, both) else ["the number of the update is not read"]


def _coded_leaf(how: Codes, kind: str, random: bool, row: Sequence[int], i: int) -> list[Any]:
    """Parameter, gradient and both moments as codes, in views that begin `shift` elements into their storage."""
    rows, width, seed, shift, offset = row
    dtypes = {"fused": (torch.float32,) * 4, "masters": (torch.float32, torch.bfloat16, torch.float32, torch.float32)}
    low = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    p, g, m, v = (x.view(rows, width) for x in leaf(rows * width, dtypes.get(kind, low), seed, shift)[:4])
    draws = [Draws(5, torch.tensor(2**33 + k), 2 * i + k, offset) if random else None for k in (1, 2)]
    # Every third number alone is odd: of a block with a NaN nothing else would be seen.
    m, v = (x.nan_to_num(1.0, 1.0, -1.0) if seed % 3 else x for x in (m, v))
    coded = [how.encode(x, one) for x, one in zip((m, v), draws, strict=True)]
    shifted = [[torch.cat([x.new_zeros(shift), x.reshape(-1)])[shift:].view(x.shape) for x in one] for one in coded]
    param = _master(p, seed, shift) if kind == "masters" else p
    return [param, g, *(Coded(how, *x, one) for x, one in zip(shifted, draws, strict=True))]


def _master(x: Tensor, seed: int, shift: int) -> Master:
    """Both parts of a master; where it is zero or not finite the residual is some number's that was there before."""
    parts = Master.of(x)
    other = torch.randint(-128, 128, x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    residual = torch.where(x.isfinite() & (x != 0), parts.residual, other)
    return Master(*(torch.cat([y.new_zeros(shift), y.reshape(-1)])[shift:].view(x.shape) for y in (parts.p, residual)))


def _run_coded(way: str, kind: str, columns: list[list[Any]], offsets: list[int], beta1: float, decay: bool) -> None:
    """One update in place by a kernel, or by the formula."""
    how, fused = columns[2][0].how, kind != "bf16"
    numbers: Any = dict(step=3, lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1)
    paths = [str(i) for i in range(7, 7 + len(offsets))]
    how_p: Any = dict(rounding="stochastic", seed=1)
    if way == "formula":
        for i, (p, g, *moments) in enumerate(zip(*columns, strict=True)):
            wide = [how.decode(x.codes, x.scales, g.shape) for x in moments]
            x = master_of(p.p, p.residual) if kind == "masters" else p
            lists = [x], [g], *([y] for y in wide)
            if fused:
                adam_of_torch(*lists, decoupled=not decay, **numbers)
            else:
                update(lists, "eager", **numbers, **how_p, paths=[paths[i]], offsets=[offsets[i]])
            if kind == "masters":
                _put(p, x)
            for y, new in zip(moments, wide, strict=True):
                for old, made in zip((y.codes, y.scales), how.encode(new, y.draws), strict=True):
                    old.copy_(made)
        return
    with printed_by(way, torch.device("cpu")):
        _as_stored(kind, columns, decay, beta1, 0.1, list(map(leaf_key, paths)), offsets)


def _as_stored(
    kind: str,
    columns: Sequence[Sequence[Any]],
    decay: bool,
    beta1: float,
    weight_decay: float,
    keys: Sequence[int],
    offsets: Sequence[int],
) -> list[Tensor]:
    """The norms of gradients, after one update in place by a program of leaves as they are stored.

    Args:
        kind: `"bf16"`: low-precision Adam; else torch's Adam.
        columns: parameters, which may be masters, gradients and moments, which may be codes.
        decay: whether the weight decay is added to the gradient.
    """
    slots, shared = ("exp_avg", "exp_avg_sq"), (("rounding_format", 2),) if kind == "bf16" else ()
    formula = formula_of_torch(not decay)
    if kind == "bf16":
        formula = low_precision_adam._Rounded("stochastic", 1, torch.float32).formula
    params, masters = columns[0], isinstance(columns[0][0], Master)
    lists = [[x.p for x in params] if masters else list(params), *map(list, columns[1:])]
    lists += [[x.residual for x in params]] if masters else []
    numbers: Any = {"beta1": beta1, "beta2": 0.999, "eps": 1e-8, "weight_decay": weight_decay}
    given = {(0, name): x for name, x in numbers.items()} | {(2, "count"): 3, (2, "lr"): 0.01}
    if kind == "bf16":
        given |= {(1, name): x for name, x in low_precision_adam._of_step(3, 0.01, numbers).items()}
    about, into = leaf_updates.About(shared, True, masters=masters), [0, 2, 3, 4][: len(lists) - 1]
    places = lambda: (keys, offsets)  # noqa: E731
    _, norms = leaf_updates.plans_of(formula, slots).run(lists, given, into, about, places, roots=True)
    return [] if norms is None else [*norms[0].unbind()]


def _put(p: Master, x: Tensor) -> None:
    new = Master.of(x)
    p.p.copy_(new.p)
    p.residual.copy_(new.residual)


def _parts(p: Any) -> list[Tensor]:
    return [p.p, p.residual.to(torch.int16)] if isinstance(p, Master) else [p]


def compare_coded(
    leaves: Sequence[Any], how: Codes, kind: str, random: bool, beta1: float = 0.9, decay: bool = False
) -> list[str]:
    """What differs between the Triton kernel, the one in C and the formula, of moments that are codes.

    Without a C compiler, between the Triton kernel and the formula.

    Args:
        leaves: rows, numbers of a row, a seed, where they begin in their storage, and the index of the first element.
        how: the codes.
        kind: `"fused"`: the arithmetic of torch on fp32; `"masters"`: the same of masters of 24 bits, with bf16
            gradients; or `"bf16"`: parameters that are rounded at random.
        random: whether codes are rounded at random.
        beta1: decay of the first moment.
        decay: whether the weight decay is added to the gradient; of the fused arithmetic.
    """
    offsets, found = [x[4] for x in leaves], {}
    fused = kind != "bf16"
    for way in ("triton", *(("native",) if native.quiet_compiler() else ()), "formula"):
        made = [
            list(x) for x in zip(*(_coded_leaf(how, kind, random, x, i) for i, x in enumerate(leaves)), strict=True)
        ]
        _run_coded(way, kind, made, offsets, beta1, decay and fused)
        found[way] = [
            (_parts(p), [y for x in moments for y in (x.codes, x.scales)]) for p, _, *moments in zip(*made, strict=True)
        ]
    rows = []
    by_triton = found.pop("triton")
    for way, of_leaves in found.items():
        for i, (mine, theirs) in enumerate(zip(by_triton, of_leaves, strict=True)):
            # torch's kernel rounds the last elements of fp32 leaves in another way.
            if way == "native" or not fused or mine[0][0].numel() % 16 == 0:
                rows += [f"leaf {i}, {way}: {x}" for x in different(mine[0], theirs[0])]
                rows += [f"leaf {i}, {way}: {x}" for x in _different_codes(mine[1], theirs[1])]
    return rows


def compare_masters(
    leaves: Sequence[Any], grad: torch.dtype, decoupled: bool, beta1: float, weight_decay: float
) -> list[str]:
    """What differs between the Triton kernel, the one in C and the formula, of masters of 24 bits with fp32 moments.

    Args:
        leaves: elements, a seed, and where they begin in their storage.
        grad: the dtype of gradients.
        decoupled: whether the weight decay is decoupled from the gradient.
        beta1: decay of the first moment.
        weight_decay: the weight decay.
    """
    numbers: Any = dict(beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=weight_decay)
    how: Any = dict(step=3, lr=0.01, decoupled=decoupled, **numbers)
    found, rows = {}, []
    for way in ("triton", "native", "formula"):
        made = [leaf(n, (torch.float32, grad, torch.float32, torch.float32), seed, shift) for n, seed, shift in leaves]
        columns: list[Any] = [[_master(x[0], row[1], row[2]) for x, row in zip(made, leaves, strict=True)]]
        columns += [[x[i] for x in made] for i in (1, 2, 3)]
        if way != "formula":
            zeros = [0] * len(leaves)
            with printed_by(way, torch.device("cpu")):
                norms = _as_stored("masters", columns, not decoupled, beta1, weight_decay, zeros, zeros)
            rows += _wrong_norms(columns[1], norms)
        else:
            wide = [master_of(x.p, x.residual) for x in columns[0]]
            adam_of_torch(wide, *columns[1:], **how)
            for p, x in zip(columns[0], wide, strict=True):
                _put(p, x)
        found[way] = [[*_parts(p), m, v] for p, _, m, v in zip(*columns, strict=True)]
    for i, (mine, by_c, by_formula) in enumerate(zip(*found.values(), strict=True)):
        # torch's kernel rounds the last elements of a leaf in another way.
        whole = mine[0].numel() // 16 * 16
        rows += [f"leaf {i}, Triton and C: {x}" for x in different(mine, by_c)]
        rows += [f"leaf {i}: {x}" for x in different([x[:whole] for x in mine], [x[:whole] for x in by_formula])]
    return rows


def _different_codes(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[str]:
    codes = [f"codes {i}: {int((a[i] != b[i]).sum())} others" for i in (0, 2) if not torch.equal(a[i], b[i])]
    return codes + different(a[1::2], b[1::2])


def compare_coded_shards() -> list[str]:
    """What differs between a leaf and the same leaf in pieces of whole rows."""
    how, cuts, width = Codes(4, 128), [0, 1, 66, 68], 256
    whole = _coded_leaf(how, "bf16", True, (cuts[-1], width, 1, 0, 2**32 - 10_000 * 256), 0)
    pieces: list[list[Any]] = [[], [], [], []]
    for low, high in pairwise(cuts):
        for column, x in zip(pieces, whole, strict=True):
            if isinstance(x, Coded):
                assert x.draws is not None
                draws = replace(x.draws, offset=x.draws.offset + low * width)
                column.append(Coded(how, x.codes[low:high].clone(), x.scales[low:high].clone(), draws))
            else:
                column.append(x[low:high].clone())
    offset = 2**32 - 10_000 * 256
    _run_coded("triton", "bf16", [[x] for x in whole], [offset], 0.9, False)
    keys = [offset + low * width for low in cuts[:-1]]
    for i, first in enumerate(keys):
        _run_coded("triton", "bf16", [[column[i]] for column in pieces], [first], 0.9, False)
    mine = [
        torch.cat(pieces[0]),
        *(torch.cat([getattr(x, n) for x in c]) for c in pieces[2:] for n in ("codes", "scales")),
    ]
    p, _, m, v = whole
    return different(mine[:1], [p]) + _different_codes(mine[1:], [m.codes, m.scales, v.codes, v.scales])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x.to(self.norm.weight.dtype))


def train(rounding: str, triton: bool, form: str) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Parameters and states, norms of gradients, and launches of kernels, of a few steps of an attached model."""
    from zerofn.kernels import print_triton  # inside: its launches

    os.environ["ZEROFN_NATIVE"] = "0" if triton else "1"
    torch.manual_seed(0)
    model = Blocks()
    if form == "fp32 norm":
        model.blocks.to(torch.bfloat16)
    store = {} if form == "fp32 norm" else {"store_dtype": torch.float16 if form == "fp16" else torch.bfloat16}
    chain = [zf.precision(**store)] if store else []
    opt = zf.attach(model, zf.chain(*chain, zf.low_precision_adam(0.01, weight_decay=0.1, rounding=rounding)))
    launches, norms = [], []
    names: list[str] = []
    launch = print_triton.launch

    def counted(kernel: Any, *args: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args)

    try:
        print_triton.launch = counted
        for x in torch.randn(3, 4, 6):
            names.clear()
            model(x.to(model.blocks[0].weight.dtype)).float().square().mean().backward()
            with printed_by("triton" if triton else "native", torch.device("cpu")):
                opt.step()
            norms.append(float(opt.metrics["grad_norm"]))
            opt.zero_grad()
            launches.append(names.count("formula_kernel"))
    finally:
        print_triton.launch = launch
    kept = {f"{k}.{p}": x for k, v in opt.state.transforms.items() for p, x in _leaves(v)}
    return {**{p: x.detach().clone() for p, x in opt.state.leaves.items()}, **kept}, norms, launches


def _leaves(x: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        return [(path, x.clone())]
    return [row for key, value in x.items() for row in _leaves(value, f"{path}.{key}")] if isinstance(x, dict) else []


def told_of_other_bits(break_it: bool) -> tuple[list[str], str]:
    """Warnings of a first update where the kernel has other bits, and what differs from eager torch then."""
    kept = program.same_bits
    program.triton_for.cache_clear()
    try:
        if break_it:
            program.same_bits = lambda *_: False  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows = compare([(50, (torch.bfloat16,) * 4, 0, 0)], [1, 2], lr=0.1)
    finally:
        program.same_bits = kept
        program.triton_for.cache_clear()
    return [str(w.message) for w in said], "\n".join(rows)


# ---------------------------------------------------------------- compiled for a GPU, without one


CALLS = re.compile(r"^\s*(?:@%p\d+ )?((?:fma|mad|mul|add|sub|div|rcp|sqrt|ex2|ld\.global|st\.global|cvt)[\w.:]*)", re.M)
# The arguments of printed kernels.
TYPES = {name: "i32" for name in ("rows", "chunks", "several", "block")}
TYPES |= {name: "*i64" for name in ("starts", "table", "words", "steps")} | {"numbers": "*fp64", "partials": "*fp32"}
TYPES |= {"entries": "*fp64", "comes": "*u8"}


class _Kept:
    """A printer that keeps the programs that it is given, and computes nothing."""

    MAPS = ("companded",)

    def __init__(self) -> None:
        self.found: list[Any] = []

    def can(self, program: Any) -> bool:
        return True

    def run(self, program: Any, columns: Any, *_: Any, **more: Any) -> Tensor:
        self.found.append((program, coding_of(columns)))
        return torch.zeros(1, len(columns[0]))


def compiled(program: Any, coding: Any = None, random: bool = True, target: str = "cuda") -> dict[str, int]:
    """How often each instruction stands in a kernel as it is compiled for an H100. In a process without interpreter.

    Args:
        program: to be printed.
        coding: how some of its columns are kept as codes.
        random: whether codes are rounded at random.
        target: `"cuda"` for sm_90.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zerofn.kernels import print_triton  # inside: a kernel by itself, and how it is launched

    kernel = print_triton.formula_kernel(program, coding)
    sizes: dict[str, Any] = {"CHUNK": print_triton.CHUNK, "BLOCK": print_triton.BLOCK}
    if coding is not None:
        at_once, room = print_triton.tile(Codes(coding.bits))
        sizes = {"RANDOM": random, "B": at_once, "N": room, "TILES": print_triton.TILES}
    source = ASTSource(
        fn=kernel,
        signature={name: TYPES.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=sizes,
    )
    made = triton.compile(source, target=GPUTarget(target, 90, 32), options=print_triton.CUDA_OPTIONS)
    return dict(collections.Counter(CALLS.findall(made.asm["ptx"])))


def _printed(run: Callable[[], Any]) -> Any:
    """The program that `run` runs, and how its columns are kept as codes."""
    kept = _Kept()
    program.INSTEAD.append(kept)
    try:
        run()
    finally:
        program.INSTEAD.pop()
    (found,) = kept.found
    return found


def coded_instructions(kind: str, bits: int) -> dict[str, int]:
    """Those of Adam on codes, with random bits and norms; `kind` as of `compare_coded`."""
    columns = [[x] for x in _coded_leaf(Codes(bits), kind, True, (2, 128, 0, 0, 0), 0)]
    return compiled(*_printed(lambda: _as_stored(kind, columns, False, 0.9, 0.1, [1], [0])))


def masters_instructions() -> dict[str, int]:
    """Those of AdamW on masters with bf16 gradients, with norms."""
    x, g, m, v = leaf(16, (torch.float32, torch.bfloat16, torch.float32, torch.float32), 0, 0)[:4]
    columns: Any = [[_master(x, 0, 0)], [g], [m], [v]]
    return compiled(*_printed(lambda: _as_stored("masters", columns, False, 0.9, 0.1, [1], [0])))


def instructions(dtypes: Sequence[torch.dtype], rounding: str) -> dict[str, int]:
    """Those of low-precision Adam, of parameter, gradient and moments in these dtypes, with norms."""
    columns = [[x] for x in leaf(16, dtypes, 0, 0)]
    used = columns if rounding == "kahan" else columns[:4]
    how: Any = dict(step=3, lr=0.01, rounding=rounding, norms=Norms())
    return compiled(*_printed(lambda: update(used, **how)))
