"""Triton kernels over lists of leaves: one launch for all leaves of a tree, by a table of their addresses.

Imported only where triton is installed. With ``TRITON_INTERPRET=1`` in the environment from the start of the process,
Triton runs kernels on the CPU, operation by operation, and needs no GPU.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false

from __future__ import annotations

import linecache
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat.tensors import foreach
from .operations import OPERATIONS
from .program import KINDS, Draws, Program

# ----------------------------------------------------------------------------------------------------------------------
# All kernels over leaves use these functions: they convert stored numbers, find the leaf of a program, and launch.
#
# A launch takes about as long as the host needs for it, 5 to 10 us, so one launch for each leaf would make the host the
# bound. Instead a kernel finds its leaf in a table of addresses.

FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOAT64, INT64, BOOL = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
# The types in which numbers of these kinds are computed; all others are computed in float32.
_TYPES = {3: "tl.float64", 4: "tl.int64", 5: "tl.int1"}

# Elements of one program, and of one turn of its loop. 1024 elements on 128 threads are 8 for each, 16 bytes of bf16.
CHUNK, BLOCK, WARPS = 1 << 14, 1 << 10, 4


@triton.jit
def pointer(address, KIND: tl.constexpr):
    if KIND == FLOAT32:
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == FLOAT16:
        return address.to(tl.pointer_type(tl.float16))
    elif KIND == FLOAT64:
        return address.to(tl.pointer_type(tl.float64))
    elif KIND == INT64:
        return address.to(tl.pointer_type(tl.int64))
    elif KIND == BOOL:
        return address.to(tl.pointer_type(tl.uint8))
    else:
        return address.to(tl.pointer_type(tl.uint16))


@triton.jit
def value(stored, KIND: tl.constexpr):
    """Stored numbers as they are computed: those of up to 32 bits as float32."""
    if KIND == BFLOAT16:
        return (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == BOOL:
        return stored != 0
    elif KIND == FLOAT16 or KIND == FLOAT32:  # noqa: SIM109
        return stored.to(tl.float32)
    else:
        return stored


@triton.jit
def rounded(x, bits, KIND: tl.constexpr, RANDOM: tl.constexpr):
    """Float32 numbers as they are stored: rounded to nearest, or by the low 16 bits of `bits`; NaN stays NaN.

    Numbers of other kinds are stored as they are.
    """
    if KIND == BFLOAT16:
        return _bfloat16(x, bits, RANDOM)
    elif KIND == FLOAT16:
        return _float16(x, bits, RANDOM)
    elif KIND == BOOL:
        return x.to(tl.uint8)
    else:
        return x


@triton.jit
def _bfloat16(x, bits, RANDOM: tl.constexpr):
    pattern = x.to(tl.uint32, bitcast=True)
    size = pattern & 0x7FFFFFFF
    noise = ((pattern >> 16) & 1) + 0x7FFF
    if RANDOM:
        # The largest finite number and infinities are rounded to nearest: noise must not make a number infinite.
        noise = tl.where(size >= 0x7F7F0000, noise, bits & 0xFFFF)
    return tl.where(size > 0x7F800000, 0x7FC0, (pattern + noise) >> 16).to(tl.uint16)


@triton.jit
def _float16(x, bits, RANDOM: tl.constexpr):
    if RANDOM:
        pattern = x.to(tl.uint32, bitcast=True)
        size = pattern & 0x7FFFFFFF
        # A number below the normal ones of float16 is lifted by the smallest of these, whose last bit it then has.
        lift = 6.103515625e-05
        small = size < 0x38800000
        lifted = tl.where(small, (size.to(tl.float32, bitcast=True) + lift).to(tl.uint32, bitcast=True), size)
        cut = (lifted + tl.where(lifted >= 0x477FE000, 0x1000, bits & 0x1FFF)) & 0xFFFFE000
        cut = tl.where(small, (cut.to(tl.float32, bitcast=True) - lift).to(tl.uint32, bitcast=True), cut)
        cut = tl.where(size >= 0x7F800000, size, cut) | (pattern & 0x80000000)
        x = cut.to(tl.float32, bitcast=True)
    return x.to(tl.float16)


@triton.jit
def row_of(starts, rows, chunk):
    """The row of a chunk: the last one that starts at it or before."""
    row, end = 0, rows
    while end - row > 1:
        middle = (row + end) // 2
        before = tl.load(starts + middle) <= chunk
        row, end = tl.where(before, middle, row), tl.where(before, end, middle)
    return row


@triton.jit(do_not_specialize=["chunks"])
def sums_kernel(starts, partials, sums, chunks, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of each row, or its root, from those of its chunks, added in a fixed order."""
    row = tl.program_id(0)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(partials + at, at < end, other=0.0)
    found = tl.sum(total, 0)
    tl.store(sums + row, tl.sqrt_rn(found) if ROOT else found)


# Products are not fused with sums, and libdevice does not flush subnormal numbers to zero: both would change bits.
_OPTIONS: dict[str, Any] = dict(num_warps=WARPS, enable_fp_fusion=False)
#
# 96 registers for a thread let five blocks run beside each other on a multiprocessor. Left to itself the compiler takes
# 140 to 205 for Adam, and on an H200 the stochastic update of 1.4 B parameters takes 8.5 ms instead of 7.0.
CUDA_OPTIONS: dict[str, Any] = dict(_OPTIONS, enable_reflect_ftz=False, maxnreg=96)


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU in this process (``TRITON_INTERPRET=1``)."""
    return not isinstance(sums_kernel, triton.JITFunction)


def launch(kernel: Any, programs: int, *args: Any) -> None:
    """Run a kernel's programs on the device of its tensors."""
    first: Tensor = args[0]
    if not first.is_cuda:
        # The interpreter computes with NumPy, which warns of infinities.
        with numpy.errstate(all="ignore"):
            kernel[(programs,)](*args)
        return
    # Triton launches on the current device.
    with torch.cuda.device(first.device):
        kernel[(programs,)](*args, **(_OPTIONS if torch.version.hip else CUDA_OPTIONS))


def on_device(words: array, device: torch.device) -> Tensor:
    """Words of the host on the device, as int64; the host does not wait."""
    packed = torch.frombuffer(words, dtype=torch.int64)
    if device.type == "cpu":
        return packed
    if torch.cuda.is_current_stream_capturing():
        return _as_arguments(words, device)
    # A copy from memory that is not pinned could wait for the device.
    return packed.pin_memory().to(device, non_blocking=True)


def _as_arguments(words: array[int], device: torch.device) -> Tensor:
    """The words on the device, as arguments of kernels that write them.

    A captured copy would read memory of the host in each replay, which has other numbers by then.
    """
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    at = [i for i, word in enumerate(words) if word]
    every = found.unbind()
    foreach("add_", [every[i] for i in at], [words[i] for i in at])
    return found


# ----------------------------------------------------------------------------------------------------------------------
# `run` computes a formula, element by element, over all leaves of a list: a kernel is written for each formula.
#
# A program is a list of operations, each a row of `zerofn.kernels.operations`. Numbers of 16 bits are computed in
# float32, and rounded after each operation, as torch does.


_KERNEL = """
def formula_kernel({parameters}, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    row = row_of(starts, rows, chunk)
    begin = (chunk - tl.load(starts + row)) * CHUNK
    table += row
    numel = tl.load(table)
    {addresses}
    {numbers}
    {zeros}
    if ({aligned}) & 15 == 0 and begin + CHUNK <= numel:
        {multiples}
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            {whole}
    else:
        rest = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        for i in range(0, rest, BLOCK):
            at = i + tl.arange(0, BLOCK)
            mask = at < rest
            {masked}
    {partials}
"""
# A kernel of columns with one number each. Their addresses are arguments, so no table is copied to the device.
_KERNEL_OF_NUMBERS = """
def formula_kernel({parameters}):
    {lines}
"""


def _made(source: str, about: Program, unaligned: Sequence[str], unspecialized: Sequence[str]) -> Any:
    """The kernel of a source."""
    name = f"<formula {hash((about, source)):x}>"
    # Triton reads the source of a kernel from its file, or from where Python keeps that of code without one.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {
        "tl": tl, "pointer": pointer, "value": value, "rounded": rounded, "row_of": row_of, "__name__": __name__
    }  # fmt: skip
    exec(compile(source, name, "exec"), scope)
    made = triton.jit(do_not_specialize=list(unspecialized), do_not_specialize_on_alignment=list(unaligned))
    return made(scope["formula_kernel"])


def _memory(program: Program) -> list[str]:
    """Names of the kernel's arguments that are tensors of one number."""
    return [f"m{i}" for i in range(len(program.scalars))]


def _scalars(program: Program) -> list[str]:
    return [
        f"s{i} = value(tl.load(pointer(m{i}.to(tl.int64), {kind})), {kind})" for i, kind in enumerate(program.scalars)
    ]


@cache
def formula_kernel(program: Program) -> Any:
    """The kernel of a program."""
    memory = ["starts", "table", "numbers", "partials", "entries", *_memory(program)]
    return _made(source(program), program, memory, ["rows", "chunks"])


@cache
def kernel_of_numbers(program: Program) -> Any:
    """The kernel of a program whose columns have one number each."""
    kinds = program.kinds
    columns, numbers = [f"c{i}" for i in sorted(kinds)], [f"n{i}" for i in range(len(program.numbers))]
    lines = [f"p{i} = pointer(c{i}.to(tl.int64), {kind})" for i, kind in sorted(kinds.items())]
    lines += [*_scalars(program), *_body(program, kinds, "p{0}", "")]
    parameters = [*columns, *_memory(program), *numbers]
    source = _KERNEL_OF_NUMBERS.format(parameters=", ".join(parameters), lines="\n    ".join(lines))
    return _made(source, program, [*columns, *_memory(program)], numbers)


def _body(program: Program, kinds: dict[int, int], place: str, mask: str) -> list[str]:
    """The lines that load, compute and store."""
    lines = [f"x{i} = value(tl.load({place.format(i)}{mask}), {kind})" for i, kind in enumerate(program.loads)]
    for i, (name, given, kind) in enumerate(program.steps, len(program.loads)):
        if name == "to":
            line = (
                f"{given[0]} != 0" if kind == KINDS[torch.bool] else f"{given[0]}.to({_TYPES.get(kind, 'tl.float32')})"
            )
        else:
            row = OPERATIONS[name]
            wide = row.triton_wide if kind == KINDS[torch.float64] else None
            line = (wide or row.triton).format(*given)
        lines.append(f"x{i} = {line}")
        if kind in (BFLOAT16.value, FLOAT16.value):
            lines.append(f"x{i} = value(rounded(x{i}, x{i}, {kind}, False), {kind})")
    # All loads come before the first store: Triton's interpreter stores at once, and columns may share memory.
    for column, x in program.stores:
        lines.append(f"tl.store({place.format(column)}, rounded({x}, {x}, {kinds[column]}, False){mask})")
    return lines


def source(program: Program) -> str:
    kinds, sums = program.kinds, program.sums
    columns = sorted(kinds)
    first = [
        f"n{i} = tl.load(numbers + {i}).to({_TYPES.get(kind, 'tl.float32')})" for i, kind in enumerate(program.numbers)
    ]
    first += [
        f"e{i} = tl.load(entries + {i} * rows + row)"
        + (" != 0" if kind == BOOL.value else f".to({_TYPES.get(kind, 'tl.float32')})")
        for i, kind in enumerate(program.entries)
    ]
    body: list[str] = []
    for mask in ("", ", mask"):
        lines = _body(program, kinds, "p{0} + at", mask)
        lines += [f"t{i} += tl.where(mask, {x}, 0.0)" if mask else f"t{i} += {x}" for i, x in enumerate(sums)]
        body.append(("\n" + " " * 12).join(lines))
    four, eight = "\n    ", "\n        "
    return _KERNEL.format(
        parameters=", ".join(
            ["starts", "table", "rows", "numbers", "partials", "entries", "chunks", *_memory(program)]
        ),
        addresses=four.join(
            f"a{i} = tl.load(table + {i + 1} * rows){four}p{i} = pointer(a{i}, {kinds[i]}) + begin" for i in columns
        ),
        numbers=four.join([*first, *_scalars(program)]),
        zeros=four.join(f"t{i} = tl.zeros((BLOCK,), tl.float32)" for i in range(len(sums))),
        aligned=" | ".join(f"a{i}" for i in columns),
        multiples=eight.join(f"p{i} = tl.multiple_of(p{i}, 16)" for i in columns),
        whole=body[0],
        masked=body[1],
        partials=four.join(f"tl.store(partials + {i} * chunks + chunk, tl.sum(t{i}, 0))" for i in range(len(sums))),
    )


def can(program: Program) -> bool:
    """Whether a program can be printed."""
    known = all(name == "to" or OPERATIONS[name].triton for name, _, _ in program.steps if name != "random")
    return known and not program.streams and KINDS[torch.int8] not in program.kinds.values()


def run(
    program: Program,
    columns: Sequence[Sequence[Tensor]],
    numbers: Sequence[float],
    scalars: Sequence[Tensor],
    each: bool = True,
    draws: Draws | None = None,
    entries: Sequence[Tensor] = (),
) -> Tensor:
    """Compute a formula over all leaves in one launch. Sums over each leaf take one more.

    Args:
        program: what to compute.
        columns: tensors of each column, one for each leaf; those of a leaf have the same elements in memory in the same
            order, without gaps, and all are on one device. Autograd does not notice what is written: tell it.
        numbers: the numbers of the program, which are exact in float64.
        scalars: its tensors of one number, on the device.
        each: whether sums are those of each leaf, (sums, leaves), or of all of them, (sums,); in float32.
        draws: none.
        entries: numbers that differ by leaf: of each a tensor of shape (leaves,), on any device.
    """
    lengths = list(map(Tensor.numel, columns[0]))
    chunks = [*accumulate((-(-n // CHUNK) for n in lengths), initial=0)]
    count, total, sums = len(lengths), chunks[-1], len(program.sums)
    device = columns[0][0].device
    if not total:
        return torch.zeros((sums, count) if each else (sums,), device=device)
    if lengths == [1] and not sums and not entries and KINDS[torch.float64] not in program.numbers:
        # Triton passes a float argument in 32 bits, which is why numbers in float64 go the other way.
        given = [int(x) if kind == INT64.value else float(x) for x, kind in zip(numbers, program.numbers, strict=True)]
        launch(kernel_of_numbers(program), 1, *(x for (x,) in columns), *scalars, *given)
        return torch.empty(0, device=device)
    words = array("q", chunks)
    numbers_at = len(words)
    words.frombytes(array("d", numbers).tobytes())
    table_at = len(words)
    words.extend(lengths)
    for column in columns:
        words.extend(map(Tensor.data_ptr, column))
    packed = on_device(words, device)
    partials = torch.empty((sums, total) if sums else (1, 1), dtype=torch.float32, device=device)
    starts, given = packed[:numbers_at], packed[numbers_at:table_at].view(torch.float64)
    # A slice without elements has no address, so another tensor takes its place.
    given = given if numbers else partials
    by_leaf = [x.to(torch.float64) for x in entries]
    if device.type != "cpu":
        by_leaf = [x.pin_memory().to(device, non_blocking=True) if x.is_cpu else x for x in by_leaf]
    launch(
        formula_kernel(program), total, starts, packed[table_at:], count, given, partials,
        torch.stack(by_leaf) if by_leaf else partials, total, *scalars, CHUNK, BLOCK,
    )  # fmt: skip
    if not sums or not each:
        return partials.sum(1) if sums else partials[:0]
    found = torch.empty((sums, count), dtype=torch.float32, device=device)
    for i in range(sums):
        launch(sums_kernel, count, starts, partials[i], found[i], total, False, BLOCK)
    return found
