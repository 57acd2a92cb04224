"""Triton kernels over lists of leaves: one launch for all leaves of a tree, by a table of their addresses.

Imported only where triton is installed. With ``TRITON_INTERPRET=1`` in the environment from the start of the process,
Triton runs kernels on the CPU, operation by operation, and needs no GPU.
"""

# Triton makes constants of literals where a parameter is a `tl.constexpr`.
# pyright: reportArgumentType=false

from __future__ import annotations

import linecache
from array import array
from collections.abc import Collection, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from .._compat.tensors import foreach
from . import print_torch, triton_functions
from .codes import Coded, Codes, Coding, coding_of
from .codes import Draws as CodeDraws
from .native import same_bits, sample
from .operations import OPERATIONS
from .program import KINDS, Draws, Program, gives_bits
from .rounding import FORMAT, stride_of
from .triton_functions import BFLOAT16, BOOL, FLOAT16, INT64

# ----------------------------------------------------------------------------------------------------------------------
# Kernels are launched over all leaves of a list.
#
# A launch takes about as long as the host needs for it, 5 to 10 us, so one launch for each leaf would make the host the
# bound. Instead a kernel finds its leaf in a table of addresses.

# The types in which numbers of these kinds are computed; all others are computed in float32.
_TYPES = {3: "tl.float64", 4: "tl.int64", 5: "tl.int1", 6: "tl.int8"}

# Elements of one program, and of one turn of its loop. 1024 elements on 128 threads are 8 for each, 16 bytes of bf16.
CHUNK, BLOCK, WARPS = 1 << 14, 1 << 10, 4


@triton.jit(do_not_specialize=["rows", "chunks"])
def sums_kernel(starts, partials, sums, rows, chunks, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    """Each sum of each row, or its root, from those of its chunks, added in a fixed order."""
    place = tl.program_id(0)
    row = place % rows
    partials += (place // rows).to(tl.int64) * chunks
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(begin, end, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(partials + at, at < end, other=0.0)
    found = tl.sum(total, 0)
    tl.store(sums + place, tl.sqrt_rn(found) if ROOT else found)


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


def signed(x: int) -> int:
    """The int64 with the low 64 bits of `x`."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


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
    leaf = row_of(starts, rows, chunk)
    begin = (chunk - tl.load(starts + leaf)) * CHUNK
    {table}
    {addresses}
    {numbers}
    {keys}
    {zeros}
    if ({aligned}) & 15 == 0 and begin + CHUNK <= numel{one_key}:
        {multiples}
        for i in range(0, CHUNK, BLOCK):
            at = i + tl.arange(0, BLOCK)
            {whole}
    else:
        rest = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        {next_keys}
        for i in range(0, rest, BLOCK):
            at = i + tl.arange(0, BLOCK)
            mask = at < rest
            {masked}
    {partials}
"""
# A kernel of leaves of which some columns are kept as codes. It computes some blocks of at most `N` numbers at once.
#
# In a leaf whose rows are whole blocks the blocks lie one behind the other: a program with as many of them as it can
# have reads and writes them in accesses of 16 bytes, and codes in those of 8. Others are masked.
_KERNEL_OF_CODES = """
def formula_kernel({parameters}, RANDOM: tl.constexpr, B: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr):
    chunk = tl.program_id(0)
    leaf = row_of(starts, rows, chunk)
    begin = (chunk - tl.load(starts + leaf)) * (B * TILES)
    {table}
    {addresses}
    {numbers}
    {keys}
    {zeros}
    in_block, pairs = tl.arange(0, N)[None, :], tl.arange(0, N * {bits} // 8)[None, :]
    if ({aligned}) & 15 == 0 and block == N and row % N == 0 and begin + B * TILES <= blocks:
        {multiples}
        first += (begin * N).to(tl.uint32)
        for i in range(0, TILES):
            b = i * B + tl.arange(0, B)
            at, codes_at = b[:, None] * N + in_block, b[:, None] * (N * {bits} // 8) + pairs
            {whole}
    else:
        tiles = tl.minimum(tl.cdiv(blocks - begin, B), TILES).to(tl.int32)
        for i in range(0, tiles):
            b = begin + i * B + tl.arange(0, B)
            some = b < blocks
            in_row = (row + block - 1) // block
            r = b // in_row
            start = (b - r * in_row) * block
            n = tl.where(some, tl.minimum(row - start, block), 0)[:, None]
            at = (r * row + start)[:, None] + in_block
            codes_at = (r * ((row * {bits} + 7) // 8) + start * {bits} // 8)[:, None] + pairs
            mask, in_codes = in_block < n, pairs * (8 // {bits}) < n
            {masked}
    {partials}
"""
# A kernel of columns with one number each. Their addresses are arguments, so no table is copied to the device.
_KERNEL_OF_NUMBERS = """
def formula_kernel({parameters}):
    {lines}
"""
# How numbers may become codes.
MAPS = ("linear", "companded")
# Numbers that a kernel of codes computes at once, and how often.
TILE, TILES = 1 << 10, 16


def _made(source: str, about: Any, unaligned: Sequence[str], unspecialized: Sequence[str]) -> Any:
    """The kernel of a source."""
    name = f"<formula {hash((about, source)):x}>"
    # Triton reads the source of a kernel from its file, or from where Python keeps that of code without one.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {**vars(triton_functions), "__name__": __name__}
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
def formula_kernel(
    program: Program, coding: Coding | None = None, skips: bool = False, fresh: frozenset[int] = frozenset()
) -> Any:
    """The kernel of a program; of its columns some may be kept as codes.

    Args:
        program: the program.
        coding: of columns that are kept as codes.
        skips: whether it reads if the step is skipped.
        fresh: columns that are written even then.
    """
    about = program, coding, skips, fresh
    return _made(source(*about), about, *_parameters(program, coding, skips))


def _parameters(program: Program, coding: Coding | None, skips: bool) -> tuple[list[str], list[str]]:
    """Names of a kernel's arguments: tensors, and numbers."""
    drawn = bool(program.streams) or coding is not None
    tensors = ["starts", "table", "numbers", "partials", *(["entries"] if program.entries else [])]
    tensors += [*(["words", "steps"] if drawn else []), *(["comes"] if skips else []), *_memory(program)]
    return tensors, ["rows", "chunks", *(["several"] if drawn else []), *(["block"] if coding is not None else [])]


def _table(program: Program, coding: Coding | None) -> list[str]:
    """What the table has of each leaf, in this order: sizes, addresses, and what random bits depend on."""
    names = ["numel", *(["width"] if program.spread else [])] if coding is None else ["blocks", "row"]
    names += [f"a{i}" for i in sorted(program.kinds)]
    names += ["key", "offset"] if program.streams or coding is not None else []
    for i in () if coding is None else coding.columns:
        names += [f"z{i}", f"key{i}", f"step{i}"]
    return names


@cache
def kernel_of_numbers(program: Program) -> Any:
    """The kernel of a program whose columns have one number each."""
    kinds = program.kinds
    columns, numbers = [f"c{i}" for i in sorted(kinds)], [f"n{i}" for i in range(len(program.numbers))]
    lines = [f"p{i} = pointer(c{i}.to(tl.int64), {kind})" for i, kind in sorted(kinds.items())]
    lines += [*_scalars(program), *_body(program, "p{0}", False)]
    parameters = [*columns, *_memory(program), *numbers]
    source = _KERNEL_OF_NUMBERS.format(parameters=", ".join(parameters), lines="\n    ".join(lines))
    return _made(source, program, [*columns, *_memory(program)], numbers)


def _body(
    program: Program, place: str, masked: bool, coding: Coding | None = None, kept: Collection[int] = ()
) -> list[str]:
    """The lines that load, compute and store; the columns in `kept` only if the step is not skipped."""
    kinds, mask = program.kinds, ", mask" if masked else ""
    coded = () if coding is None else coding.columns
    lines: list[str] = []
    for i, kind in enumerate(program.loads):
        at = place.format(i)
        if i in coded:
            lines += _decoded(i, kind, masked, coding)
        else:
            of = program.spread[i] if program.spread else ""
            at = f"p{i} + (begin + at) {'//' if of == 'rows' else '%'} width" if of else at
            lines.append(f"x{i} = value(tl.load({at}{mask}), {kind})")
    for i, (name, given, kind) in enumerate(program.steps, len(program.loads)):
        if name == "to":
            line = (
                f"{given[0]} != 0" if kind == KINDS[torch.bool] else f"{given[0]}.to({_TYPES.get(kind, 'tl.float32')})"
            )
        elif name == "random":
            line = f"value(rounded({given[0]}, {given[1]} >> {given[2]}, {kind}, True), {kind})"
        else:
            row = OPERATIONS[name]
            wide = row.triton_wide if kind == KINDS[torch.float64] else None
            line = (wide or row.triton).format(*given)
        lines.append(f"x{i} = {line}")
        if kind in (BFLOAT16.value, FLOAT16.value) and name not in ("random", "upper_half"):
            lines.append(f"x{i} = value(rounded(x{i}, x{i}, {kind}, False), {kind})")
    # All loads come before the first store: Triton's interpreter stores at once, and columns may share memory.
    for i, x in program.stores:
        if i in coded:
            lines += _encoded(i, kinds[i], x, masked, coding)
        else:
            chosen = (f"{mask} & comes" if masked else ", comes") if i in kept else mask
            lines.append(f"tl.store({place.format(i)}, rounded({x}, {x}, {kinds[i]}, False){chosen})")
    return lines


def _how(kind: int, coding: Coding) -> str:
    """How the numbers of a column are coded, as arguments of `decoded` and `coded`."""
    return f"{coding.bits}, {coding.code == 'companded'}, {kind == BFLOAT16.value}"


def _decoded(i: int, kind: int, masked: bool, coding: Any) -> list[str]:
    codes, scale = (f"p{i} + codes_at, in_codes, other=0", f"q{i} + b, some, other=0")
    if not masked:
        codes, scale = f"p{i} + codes_at", f"q{i} + b"
    codes = f"unpacked(tl.load({codes}), {coding.bits}, B, N)"
    return [f"x{i} = decoded({codes}, value(tl.load({scale}), {kind}), {_how(kind, coding)})"]


def _encoded(i: int, kind: int, x: str, masked: bool, coding: Any) -> list[str]:
    # Behind the last number of a row are zeros, whose code is 0. A number is given the shape of a tile.
    x = f"tl.where({'mask' if masked else 'at >= 0'}, {x}, 0.0)" if masked or x[0] != "x" else x
    codes, in_codes, some = (f"tl.where(mask, d{i}, 0)", ", in_codes", ", some") if masked else (f"d{i}", "", "")
    return [
        f"d{i}, y{i} = coded({x}, counter + c0_{i}, c1_{i}, RANDOM, {_how(kind, coding)})",
        f"tl.store(p{i} + codes_at, packed({codes}, {coding.bits}, B, N){in_codes})",
        f"tl.store(q{i} + b, rounded(y{i}, y{i}, {kind}, False){some})",
    ]


def _drawn(program: Program, masked: bool, coding: Coding | None) -> list[str]:
    """The lines that draw random bits."""
    if not program.streams and coding is None:
        return []
    lines = [f"counter = (first + at.to(tl.uint32)) * {stride_of(program.form or FORMAT)}"]
    for s in program.streams:
        # Keys differ within a chunk in the masked part alone, and within a leaf that is kept as codes nowhere.
        two = masked and coding is None
        k0, k1 = (f"tl.where(at < left, k{k}_{s}, l{k}_{s})" if two else f"k{k}_{s}" for k in (0, 1))
        lines.append(f"r{s} = draw(counter + {k0}, {k1})")
    return lines


@cache
def source(
    program: Program, coding: Coding | None = None, skips: bool = False, fresh: frozenset[int] = frozenset()
) -> str:
    """The source of a kernel: `formula_kernel`."""
    kept = {i for i, _ in program.stores} - fresh if skips and fresh else ()
    kinds, sums, streams = program.kinds, program.sums, program.streams
    columns, coded = sorted(kinds), () if coding is None else coding.columns
    spread = {i for i, of in enumerate(program.spread) if of}
    body: list[str] = []
    for masked in (False, True):
        lines = [*_drawn(program, masked, coding), *_body(program, "p{0} + at", masked, coding, kept)]
        lines += [f"t{i} += tl.where(mask, {x}, 0.0)" if masked else f"t{i} += {x}" for i, x in enumerate(sums)]
        body.append(("\n" + " " * 12).join(lines))
    addresses, multiples, keys = list[str](), list[str](), list[str]()
    for i in columns:
        if i in coded:
            addresses += [f"p{i}, q{i} = a{i}.to(tl.pointer_type(tl.uint8)), pointer(z{i}, {kinds[i]})"]
            multiples += [f"p{i} = tl.multiple_of(p{i} + begin * N * {coding and coding.bits} // 8, 16)"]
            multiples += [f"q{i} = tl.multiple_of(q{i} + begin, 16)"]
        elif i in spread:
            addresses += [f"p{i} = pointer(a{i}, {kinds[i]})"]
        else:
            addresses += [f"p{i} = pointer(a{i}, {kinds[i]}){' + begin' if coding is None else ''}"]
            multiples += [f"p{i} = tl.multiple_of(p{i}{'' if coding is None else ' + begin * N'}, 16)"]
    if streams or coding is not None:
        keys += ["index = offset + begin" if coding is None else "index = offset"]
        keys += ["top, first = index >> 32, (index & 0xFFFFFFFF).to(tl.uint32)"]
        # Behind these elements bits have another key.
        keys += ["left = 4294967296 - (index & 0xFFFFFFFF)"]
        keys += ["seed, step = tl.load(words), tl.load(steps + leaf * several)"]
    keys += [f"k0_{s}, k1_{s} = stream_key(seed, step, key, top, {s})" for s in streams]
    keys += [f"c0_{i}, c1_{i} = stream_key(tl.load(words + 2), step{i}, key{i}, top, 0)" for i in coded]
    tensors, numbers = _parameters(program, coding, skips)
    four, eight = "\n    ", "\n        "
    found = f"tl.sum({'t{0}' if coding is None else 'tl.sum(t{0}, 1)'}, 0)"
    return (_KERNEL if coding is None else _KERNEL_OF_CODES).format(
        parameters=", ".join([*tensors, *numbers]),
        table=four.join(
            [
                *(f"{x} = tl.load(table + {i} * rows + leaf)" for i, x in enumerate(_table(program, coding))),
                # In a step that is skipped all leaves count as empty, if nothing is written then.
                *(["numel = tl.where(tl.load(comes) != 0, numel, 0)"] if skips and not fresh else []),
                *(["comes = tl.load(comes) != 0"] if skips and fresh else []),
            ]
        ),
        addresses=four.join(addresses),
        numbers=four.join(
            [
                *(
                    f"n{i} = tl.load(numbers + {i}).to({_TYPES.get(kind, 'tl.float32')})"
                    for i, kind in enumerate(program.numbers)
                ),
                *(
                    f"e{i} = tl.load(entries + {i} * rows + leaf)"
                    + (" != 0" if kind == BOOL.value else f".to({_TYPES.get(kind, 'tl.float32')})")
                    for i, kind in enumerate(program.entries)
                ),
                *_scalars(program),
            ]
        ),
        keys=four.join(keys),
        one_key=" and left >= CHUNK" if streams else "",
        next_keys=eight.join(f"l0_{s}, l1_{s} = stream_key(seed, step, key, top + 1, {s})" for s in streams),
        zeros=four.join(
            f"t{i} = tl.zeros(({'BLOCK,' if coding is None else 'B, N'}), tl.float32)" for i in range(len(sums))
        ),
        aligned=" | ".join([*(f"a{i}" for i in columns if i not in spread), *(f"z{i}" for i in coded)]),
        multiples=eight.join(multiples),
        whole=body[0],
        masked=body[1],
        partials=four.join(f"tl.store(partials + {i} * chunks + chunk, {found.format(i)})" for i in range(len(sums))),
        bits=0 if coding is None else coding.bits,
    )


def can(program: Program) -> bool:
    """Whether a program can be printed."""
    return all(name in ("to", "random") or OPERATIONS[name].triton for name, _, _ in program.steps)


def run(
    program: Program,
    columns: Sequence[Sequence[Any]],
    numbers: Sequence[float],
    scalars: Sequence[Tensor],
    each: bool = True,
    draws: Draws | None = None,
    entries: Sequence[Tensor] = (),
    comes: Tensor | None = None,
    roots: bool = False,
    fresh: frozenset[int] = frozenset(),
) -> Tensor | None:
    """Compute a formula over all leaves in one launch. Sums over each leaf take one more.

    Args:
        program: what to compute.
        columns: tensors of each column, one for each leaf; those of a leaf have the same elements in memory in the same
            order, without gaps, and all are on one device. Autograd does not notice what is written: tell it. Those of
            a column may each be a `Coded`, as `print_c.run` says.
        numbers: the numbers of the program, which are exact in float64.
        scalars: its tensors of one number, on the device.
        each: whether sums are those of each leaf, (sums, leaves), or of all of them, (sums,); in float32.
        draws: of the random bits, if there are some. The number of the update may be a tensor of the device: of one
            number, or of one for each leaf.
        entries: numbers that differ by leaf: of each a tensor of shape (leaves,), on any device.
        comes: a bool tensor of one element, on the device. If it is false, nothing is written. Not beside codes.
        fresh: columns that are written even then.
        roots: whether the roots of the sums of each leaf are wanted.

    Returns:
        The sums; `None` if columns are `Coded` and the device gives other codes than torch: then nothing is written.
    """
    coding = coding_of(columns)
    if coding is not None and not _gives_codes(coding._replace(columns=(1,)), columns[coding.columns[0]][0]):
        return None
    plain: Sequence[Tensor] = next(x for i, x in enumerate(columns) if coding is None or i not in coding.columns)
    sizes, programs, how = _sizes(plain, coding, columns)
    chunks = [*accumulate(programs, initial=0)]
    count, total, sums = len(plain), chunks[-1], len(program.sums)
    device = plain[0].device
    if not total:
        return torch.zeros((sums, count) if each else (sums,), device=device)
    rare = sums or program.spread or draws is not None or entries or comes is not None
    rare = rare or KINDS[torch.float64] in program.numbers
    if sizes.get("numel") == [1] and not rare:
        # Triton passes a float argument in 32 bits, which is why numbers in float64 go the other way.
        given = [int(x) if kind == INT64.value else float(x) for x, kind in zip(numbers, program.numbers, strict=True)]
        launch(kernel_of_numbers(program), 1, *(x for (x,) in columns), *scalars, *given)
        return torch.empty(0, device=device)
    words = array("q", chunks)
    numbers_at = len(words)
    words.frombytes(array("d", numbers).tobytes())
    words_at = len(words)
    sizes |= {"width": program.widths(columns)} if program.spread else {}
    table: dict[str, Sequence[int]] = {**sizes, "key": [0] * count, "offset": [0] * count}
    drawn, step = program.streams or coding is not None, None
    if draws is not None:
        step = draws.step if isinstance(draws.step, Tensor) else None
        words.extend((signed(draws.seed), 0 if step is not None else signed(draws.step)))
        table |= {"key": draws.keys, "offset": draws.offsets}
    elif drawn:
        words.extend((0, 0))
    for i in () if coding is None else coding.columns:
        own = [x.draws or _NO_DRAWS for x in columns[i]]
        words.extend([signed(own[0].seed)] if len(words) == words_at + 2 else [])
        table |= {f"a{i}": [x.codes.data_ptr() for x in columns[i]], f"z{i}": [x.scales.data_ptr() for x in columns[i]]}
        table |= {f"key{i}": [x.key for x in own], f"step{i}": [int(x.step) for x in own]}
        table |= {"offset": [x.offset for x in own]} if columns[i][0].draws is not None else {}
    table |= {f"a{i}": list(map(Tensor.data_ptr, x)) for i, x in enumerate(columns) if f"a{i}" not in table}
    table_at = len(words)
    for name in _table(program, coding):
        words.extend(table[name])
    entries_at, on_host = len(words), all([x.is_cpu for x in entries])
    if entries and on_host:
        words.frombytes(torch.stack([x.to(torch.float64) for x in entries]).numpy().tobytes())
    packed = on_device(words, device)
    partials = torch.empty((sums, total) if sums else (1, 1), dtype=torch.float32, device=device)
    # A slice without elements has no address, so another tensor takes its place.
    given = packed[numbers_at:words_at].view(torch.float64) if numbers else partials
    tensors = [packed[:numbers_at], packed[table_at:entries_at], given, partials]
    if entries and on_host:
        tensors += [packed[entries_at:].view(torch.float64)]
    elif entries:
        one = all([x.dtype is entries[0].dtype and not x.is_cpu for x in entries])
        rows = [x if one else x.to(device, torch.float64) for x in entries]
        tensors += [rows[0].contiguous() if len(rows) == 1 else torch.stack(rows)]
    if drawn:
        tensors += [packed[words_at:], packed[words_at + 1 :] if step is None else step.reshape(-1)]
    tensors += [] if comes is None else [comes.view(torch.uint8)]
    several = [int(step is not None and step.ndim > 0)] if drawn else []
    kernel = formula_kernel(program, coding, comes is not None, fresh)
    launch(kernel, total, *tensors, *scalars, count, total, *several, *how)
    if not sums or not each:
        return partials.sum(1) if sums else partials[:0]
    found = torch.empty((sums, count), dtype=torch.float32, device=device)
    launch(sums_kernel, sums * count, packed[:numbers_at], partials, found, count, total, roots, BLOCK)
    return found


def _sizes(
    plain: Sequence[Tensor], coding: Coding | None, columns: Sequence[Sequence[Any]]
) -> tuple[dict[str, list[int]], list[int], list[Any]]:
    """Sizes of each leaf, how many programs compute it, and further arguments of the kernel."""
    lengths = list(map(Tensor.numel, plain))
    if coding is None:
        return {"numel": lengths}, [-(-n // CHUNK) for n in lengths], [CHUNK, BLOCK]
    first: Coded = columns[coding.columns[0]][0]
    at_once, room = tile(first.how)
    row = [n // len(x) for n, x in zip(lengths, plain, strict=True)]
    blocks = [len(x) * -(-n // first.how.block) for n, x in zip(row, plain, strict=True)]
    how = [first.how.block, first.draws is not None, at_once, room, TILES]
    return {"blocks": blocks, "row": row}, [-(-n // (at_once * TILES)) for n in blocks], how


_CHECKED: dict[Any, bool] = {}


def _gives_codes(coding: Coding, like: Coded) -> bool:
    """Whether a device encodes as torch does, and decodes; else a warning. It takes two launches, once in a process."""
    device, random = like.codes.device, like.draws is not None
    kind = KINDS[like.dtype]
    key = coding, kind, random, device
    if key not in _CHECKED:
        # Two thirds of a number, kept as codes; once more as numbers.
        steps = (("mul", ("x1", "n0"), kind), ("to", ("x2",), kind))
        made = Program((kind, kind), (), (kind,), steps, ((0, "x2"), (1, "x3")), (kind, kind), ())

        def check(shape: tuple[int, int]) -> bool:
            numel = shape[0] * shape[1]
            x = sample(numel)[0][0].nan_to_num(0.0, 1.0, -1.0).view(shape).to(like.dtype)
            x[-1] = torch.linspace(-1, 2, shape[1])
            draws = CodeDraws(1, torch.tensor(2), 3, 2**31) if random else None
            how = Codes(coding.bits, 128, coding.code)
            codes, scales = how.encode_by_torch(x, draws)
            theirs: Any = [torch.zeros_like(x)], [Coded(how, codes, scales, draws)]
            mine: Any = [torch.zeros_like(x, device=device)], [theirs[1][0].clone()]
            mine[1][0] = Coded(how, mine[1][0].codes.to(device), mine[1][0].scales.to(device), draws)
            run(made, mine, [2 / 3], [])
            print_torch.run(made, theirs, [2 / 3], [])
            pairs = [(mine[0][0], theirs[0][0]), *zip(mine[1][0].tensors, theirs[1][0].tensors, strict=True)]
            return same_bits([[a.cpu().float()] for a, _ in pairs], [[b.float()] for _, b in pairs])

        # The check itself is no reason for another.
        _CHECKED[key] = True
        # A program of whole blocks beside another, and rows that end with a part of a block.
        shapes = (65, 256), (16, 134)
        instead = "codes are decoded, updated and encoded by torch, in some hundred launches"
        _CHECKED[key] = gives_bits(lambda: all(map(check, shapes)), f"Triton on {device}, of codes,", instead)
    return _CHECKED[key]


def tile(how: Codes) -> tuple[int, int]:
    """How many blocks a kernel of codes computes at once, and its room for each."""
    room = 1 << (how.block - 1).bit_length()
    return max(1, TILE // room), room


_NO_DRAWS = CodeDraws(0, torch.tensor(0), 0)
