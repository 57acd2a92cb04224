"""Prints a program in C for the CPU, over lists of leaves: each element is read once and written once.

The loop is plain C over lines of 32 elements, which the compiler vectorises. Each operation rounds by itself
(`native.FLAGS`: no contraction, no fast math), so the bits are those of the rows of `zerofn.kernels.operations`.
A kernel is built on first use, in about half a second, and kept on disk (`zerofn.kernels.native`).
"""

from __future__ import annotations

import ctypes
import functools
import re
import shlex
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import native, print_torch
from .operations import OPERATIONS
from .program import KINDS, Draws, Program
from .rounding import stride_of

_IS_CPU = attrgetter("is_cpu")

F32, BF16, F16, F64, I64, BOOL, I8 = KINDS.values()
# By kind: how numbers are stored, and how they are computed.
_STORED = ("float", "uint16_t", "uint16_t", "double", "int64_t", "uint8_t", "int8_t")
_COMPUTED = ("float", "float", "float", "double", "int64_t", "int", "int8_t")

_HEADERS = [
    Path(__file__).with_name(name)
    for name in (
        "native_lines.h",
        "native_masters.h",
        "native_draws.h",
        "native_prefetch.h",
        "native_entries.h",
        "native_threads.h",
    )
]

_SOURCE = """\
#include <math.h>
enum {{ NAN_SURVIVES = {nan_survives} }};
#define ZF_STRIDE {stride}u
#include "native_draws.h"
#include "native_lines.h"
#include "native_masters.h"
#include "native_prefetch.h"
#include "native_entries.h"

typedef struct {{
    int64_t entries;
    void *const *columns[{columns}];
    const int64_t *numel;
    double *sums[{sum_count}];
    const uint64_t *key, *offset;
    uint64_t seed, step;
    double numbers[{numbers}];
}} job;

/* Two neighbours. */
INLINE void pair({parameters}, int32_t i) {{
    {body}
}}

INLINE void line({parameters_of_line}) {{
    {opened}
    IVDEP
    for (int32_t i = 0; i < LINE; i += 2) pair({arguments_of_pair}, i);
    {added}
    {closed}
}}

static void elements({elements_of}) {{
    {named}
    {partial}
    {keys}
    int64_t i = from;
    for (; i + LINE <= to; i += LINE) {{
        {prefetch}
        line({at});
        {next_keys}
    }}
    if (i < to) {{ /* The last elements are copied into a line that is padded with zeros. */
        size_t rest = (size_t)(to - i);
        {rooms}
        {before}
        line({of_rooms});
        {back}
    }}
    {totals}
}}

{pieces}
int zerofn_formula(const job *j, int threads, parallel run) {{
    return over_entries({piece}, j, j->entries, j->numel, {sums}, (double *const *)j->sums, threads, run);
}}
"""


_ELEMENTS = "const void *what, int64_t e, int64_t from, int64_t to, double *totals"
# Random bits have another key after 2**32 elements of a leaf.
_PIECES = """\
static void piece(const void *what, int64_t e, int64_t from, int64_t to, double *totals) {
    const job *j = what;
    double part[SUMS];
    for (int k = 0; k < SUMS; k++) part[k] = 0;
    while (from < to) {
        uint64_t left = (1ull << 32) - ((j->offset[e] + (uint64_t)from) & 0xffffffffu);
        int64_t end = (uint64_t)(to - from) < left ? to : from + (int64_t)left;
        elements(j, e, from, end, part);
        for (int k = 0; k < SUMS && totals; k++) totals[k] += part[k];
        from = end;
    }
}
"""


def can(program: Program) -> bool:
    """Whether a program is printed. A root in float64 is not: torch's has other bits."""
    return not program.scalars and not any(name == "sqrt" and kind == F64 for name, _, kind in program.steps)


@functools.cache
def source(program: Program) -> str:
    """The C source of a program."""
    kinds = dict(sorted(program.kinds.items()))
    written = {column for column, _ in program.stores}
    # float16 is widened before the loop over pairs, and narrowed behind it: processors have vector instructions for it.
    widened = {c for c, kind in kinds.items() if kind == F16}
    # Pieces of the file, by column: `p` points to stored numbers, `q` to what pairs read, `w` to what they write.
    columns = {c: f"{'' if c in written else 'const '}{_STORED[kind]} *restrict p{c}" for c, kind in kinds.items()}
    constants = {f"n{i}": _COMPUTED[kind] for i, kind in enumerate(program.numbers)}
    sums = [f"t{i}" for i in range(len(program.sums))]

    body: list[str] = [
        f"const uint32_t w{c} = *(const word *)(p{c} + i);" for c, kind in enumerate(program.loads) if kind == BF16
    ]
    for c, kind in enumerate(program.loads):
        if kind == BF16:
            body += [f"const float x{c}a = from_bits(w{c} << 16), x{c}b = from_bits(w{c} & 0xffff0000u);"]
        else:
            of = "q" if c in widened else "p"
            body += [f"const {_COMPUTED[kind]} x{c}{h} = {of}{c}[i + {k}];" for k, h in enumerate("ab")]
    body += [
        f"const uint32_t r{s}{half} = draw(((uint32_t)i + {k}) * ZF_STRIDE + k0_{s}, k1_{s});"
        for s in program.streams
        for k, half in enumerate("ab")
    ]
    for k, (name, given, kind) in enumerate(program.steps, len(program.loads)):
        for half in "ab":
            names = [x + half if x[0] in "xr" else x for x in given]
            value = _operation(program, name, names, given, kind)
            body.append(f"const {_COMPUTED[kind]} x{k}{half} = {value};")
    stores: list[str] = []
    for c, register in program.stores:
        kind = kinds[c]
        if _is_step(program, register):
            name, given, to = program.steps[int(register[1:]) - len(program.loads)]
            if name == "upper_half":
                stores += [f"p{c}[i + {k}] = bf16_of(first_bits({given[0]}{half}));" for k, half in enumerate("ab")]
                continue
            if name in ("to", "random") and to == kind and kind in (BF16, F16):
                # A store rounds by itself.
                stores += _rounded_store(c, kind, name, given)
                continue
        a, b = (register + half if register[0] == "x" else register for half in "ab")
        stores += (
            _rounded_store(c, kind, "to", (register,))
            if kind in (BF16, F16)
            else [f"p{c}[i + {k}] = {x};" for k, x in enumerate((a, b))]
        )
    body += stores
    added: list[str] = []
    for i, x in enumerate(program.sums):
        # A square is added up in double: that of a large number overflows in float.
        name, given, _ = program.steps[int(x[1:]) - len(program.loads)] if _is_step(program, x) else ("", (x, ""), 0)
        square = name == "mul" and given[0] == given[1]
        x = given[0] if square else x
        added.append(f"(double)u{i}[i] * u{i}[i]" if square else f"u{i}[i]")
        body.append(f"u{i}[i] = {x}a, u{i}[i + 1] = {x}b;")

    loaded = {c for c in kinds if c < len(program.loads)}
    in_pair = [*columns.values(), *(f"const float *restrict q{c}" for c in sorted(widened & loaded))]
    in_pair += [f"float *restrict o{c}" for c in sorted(widened & written)]
    in_pair += [f"float *restrict u{i}" for i in range(len(sums))]
    numbers = [f"const {kind} {name}" for name, kind in constants.items()]
    keys = [f"k{n}_{s}" for s in program.streams for n in (0, 1)]
    numbers += [f"const uint32_t {k}" for k in keys]
    of_sums = [f"double *restrict {t}" for t in sums]
    in_pair_names = [x.split("restrict ")[1] for x in in_pair]

    def at(place: str) -> str:
        return ", ".join([*(place.format(c) for c in columns), *constants, *keys, *sums])

    drawn = bool(program.streams)
    return _SOURCE.format(
        stride=stride_of(program.form) if drawn else 1,
        piece="piece" if drawn else "elements",
        pieces=_PIECES.replace("SUMS", str(max(len(sums), 1))) if drawn else "",
        elements_of=("const job *j, int64_t e, int64_t from, int64_t to, double *totals") if drawn else _ELEMENTS,
        keys="\n    ".join(
            f"stream s{s} = stream_of(j->seed, j->step, j->key[e], j->offset[e] + (uint64_t)from, {s}); "
            f"uint32_t k0_{s} = s{s}.k0, k1_{s} = s{s}.k1;"
            for s in program.streams
        ),
        next_keys=" ".join(f"k0_{s} += LINE * ZF_STRIDE;" for s in program.streams),
        columns=len(kinds),
        nan_survives=int(set(program.loads) <= {BF16} and not program.scalars),
        numbers=max(len(constants), 1),
        sum_count=max(len(sums), 1),
        sums=len(sums),
        parameters=", ".join([*in_pair, *numbers]),
        body="\n    ".join(body),
        parameters_of_line=", ".join([*columns.values(), *numbers, *of_sums]),
        opened="\n    ".join(
            [f"float room{c}[LINE]; const float *q{c} = opened_f16(p{c}, room{c});" for c in sorted(widened & loaded)]
            + [f"float o{c}[LINE];" for c in sorted(widened & written)]
            + [f"float u{i}[LINE];" for i in range(len(sums))]
        ),
        arguments_of_pair=", ".join([*in_pair_names, *constants, *keys]),
        # In the loop over pairs gcc would add element by element, for a fifth of the time of an update.
        added="\n    ".join(f"for (int i = 0; i < LINE; i++) t{i}[i] += {added[i]};" for i in range(len(sums))),
        closed="\n    ".join(f"close_f16(p{c}, o{c});" for c in sorted(widened & written)),
        named="\n    ".join(
            ([] if drawn else ["const job *j = what;"])
            + [f"{column} = j->columns[{k}][e];" for k, column in enumerate(columns.values())]
            + [f"const {kind} {name} = ({kind})j->numbers[{name[1:]}];" for name, kind in constants.items()]
        ),
        partial="\n    ".join(f"double {t}[LINE] = {{0}};" for t in sums) or "(void)totals;",
        # What a formula makes of the zeros behind the last element is not added up.
        before=" ".join(f"double before{i}[LINE]; memcpy(before{i}, t{i}, sizeof t{i});" for i in range(len(sums))),
        totals=" ".join(f"totals[{k}] = total({t});" for k, t in enumerate(sums)),
        prefetch=" ".join(f"PREFETCH(p{c} + i, {int(c in written)});" for c in columns),
        at=at("p{0} + i"),
        rooms=" ".join(
            f"{_STORED[kind]} e{c}[LINE] = {{0}};"
            + (f" memcpy(e{c}, p{c} + i, rest * sizeof *e{c});" if c in loaded else "")
            for c, kind in kinds.items()
        ),
        of_rooms=at("e{0}"),
        back=" ".join(
            [f"memcpy(p{c} + i, e{c}, rest * sizeof *e{c});" for c in sorted(written)]
            + [f"memcpy(t{i} + rest, before{i} + rest, (LINE - rest) * sizeof *t{i});" for i in range(len(sums))]
        ),
    )


def _rounded_store(column: int, kind: int, name: str, given: Sequence[str]) -> list[str]:
    """The lines that round a register to 16 bits, to nearest or at random, and store it."""
    register, *bits = given
    halves = [register + half if register[0] == "x" else register for half in "ab"]
    word, suffix = "bf16_code" if kind == BF16 else "f16_value", ""
    if name == "random":
        suffix = "_random"
        halves = [f"{x}, {bits[0]}{half} >> {bits[1]}" for x, half in zip(halves, "ab", strict=True)]
    a, b = (f"{word}{suffix}({x})" for x in halves)
    if kind == BF16:
        return [f"*(word *)(p{column} + i) = {a} >> 16 | ({b} & 0xffff0000u);"]
    return [f"o{column}[i] = {a}; o{column}[i + 1] = {b};"]


def _operation(program: Program, name: str, names: list[str], given: Sequence[str], kind: int) -> str:
    """A step as an expression, whose value is of the kind."""
    if name == "random":
        arguments = f"{names[0]}, {names[1]} >> {names[2]}"
        return (
            f"from_bits(bf16_code_random({arguments}) & 0xffff0000u)"
            if kind == BF16
            else (f"f16_value_random({arguments})")
        )
    if name == "upper_half":
        return f"from_bits((uint32_t)bf16_of(first_bits({names[0]})) << 16)"
    if name == "to":
        value = f"{names[0]} != 0" if kind == BOOL else names[0]
    else:
        # A comparison is computed in the kind of its arguments, of which all have one.
        wide = F64 in (kind, *(_kind_of(program, x) for x in given))
        value = OPERATIONS[name].c.format(*names)
        for word, function in (("FMA", "fma"), ("ROOT", "sqrt"), ("ABS", "fabs")):
            value = re.sub(rf"\b{word}\b", function if wide else function + "f", value)
        if name == "abs" and kind == I64:
            value = f"llabs({names[0]})"
        if name == "reciprocal":
            value = value.replace("1 /", "1.0 /" if wide else "1.0f /")
    if kind == BF16:
        return f"from_bits(bf16_code({value}) & 0xffff0000u)"
    return f"f16_value({value})" if kind == F16 else value


def _is_step(program: Program, name: str) -> bool:
    """Whether a register is the result of a step."""
    return name[0] == "x" and int(name[1:]) >= len(program.loads)


def _kind_of(program: Program, name: str) -> int:
    """The kind of a register or a number."""
    i = int(name[1:])
    if name[0] == "n":
        return program.numbers[i]
    return program.loads[i] if i < len(program.loads) else program.steps[i - len(program.loads)][2]


@functools.cache
def _job(columns: int, sums: int, numbers: int) -> Any:
    """`job` of the source."""
    pointers = ctypes.POINTER(ctypes.c_void_p)
    fields = [
        ("entries", ctypes.c_int64),
        ("columns", pointers * columns),
        ("numel", ctypes.POINTER(ctypes.c_int64)),
        ("sums", ctypes.POINTER(ctypes.c_double) * max(sums, 1)),
        ("key", ctypes.POINTER(ctypes.c_uint64)),
        ("offset", ctypes.POINTER(ctypes.c_uint64)),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("numbers", ctypes.c_double * max(numbers, 1)),
    ]
    return type("Job", (ctypes.Structure,), {"_fields_": fields})


def works() -> bool:
    """Whether there is a C compiler that builds kernels, and `ZEROFN_NATIVE` allows it."""
    return native.quiet_compiler() is not None


@functools.cache
def formula_kernel(program: Program, command: native.Command) -> Any:
    """The C function of a program, after a check of its bits; `None`, after a warning, if it cannot be used."""
    try:
        function = native.printed(command, source(program), _HEADERS, _declared).zerofn_formula
    except (OSError, AttributeError) as error:
        native.give_up(f"the C kernel of a formula could not be built or loaded ({shlex.join(command)}: {error})")
        return None
    unfused = program == _UNFUSED or formula_kernel(_UNFUSED, command) is not None
    if unfused and gives_bits(program, function):
        return function
    native.give_up("the C kernel of a formula, as this compiler builds it, gives other bits than eager torch")
    return None


# torch fuses the product in these on some processors, and not in the last elements of a tensor: there is no reference.
_FUSED = {"plus", "addcmul", "lerp", "lerp_back"}


# A product and a sum, which a compiler may fuse against its orders: that hides behind the rounding to 16 bits.
_UNFUSED = Program((0, 0), (), (0,), (("mul", ("x0", "n0"), 0), ("add", ("x2", "x1"), 0)), ((0, "x3"),), (0,), ())


def gives_bits(program: Program, function: Any) -> bool:
    """Whether a kernel has the bits of torch's operations on a sample; it takes a millisecond, once in a process.

    An unknown compiler may change the order of roundings.
    """
    if any(name in _FUSED for name, _, _ in program.steps):
        return True
    numbers = [0.5 + 0.37 * i if kind < I64 else i + 1 for i, kind in enumerate(program.numbers)]
    draws = Draws(5, 3, program.form, [7], [3]) if program.streams else None
    mine, theirs = ([[x] for x in _sample(program)] for _ in range(2))
    _call(function, program, mine, numbers, draws)
    print_torch.run(program, theirs, numbers, [], True, draws)
    pairs = [(mine[column][0], theirs[column][0]) for column, _ in program.stores]
    return all(torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) for a, b in pairs)


def _sample(program: Program) -> list[Tensor]:
    """A tensor for each column: numbers from subnormal to infinite, each magnitude beside many others, and an end."""
    found = []
    i = torch.arange(1001, dtype=torch.float64)
    for column, kind in sorted(program.kinds.items()):
        stride = (1, 2, 4, 5, 7, 8, 11, 13)[column % 8]
        x = (1 + i % 97 / 97) * 2.0 ** (i * stride % 279 - 150) * (1 - i % (2 + column % 3) % 2 * 2)
        x[500:] = torch.sin(i[500:] * (1.0 + column))
        dtype = list(KINDS)[kind]
        found.append(x.to(dtype) if kind < I64 else (i * stride % 5).to(dtype))
    return found


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.zerofn_formula.restype = ctypes.c_int
    library.zerofn_formula.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


def run(
    program: Program,
    columns: Sequence[Sequence[Tensor]],
    numbers: Sequence[float],
    scalars: Sequence[Tensor],
    each: bool = True,
    draws: Draws | None = None,
) -> Tensor | None:
    """Compute a program over all leaves, on as many threads as torch uses.

    Args:
        program: what to compute.
        columns: tensors of each column, one for each leaf; those of a leaf have the same elements in memory in the same
            order, without gaps, and all are on the CPU. Autograd does not notice what is written: tell it.
        numbers: the numbers of the program.
        scalars: none: a number on the host is among `numbers`.
        each: whether sums are those of each leaf, (sums, leaves), or of all of them, (sums,); in float64. Their bits
            depend on the lengths of the leaves alone.
        draws: of the random bits, if there are some.

    Returns:
        The sums; `None` if the kernel cannot be built: then nothing is written.
    """
    command = native.quiet_compiler()
    function = None if command is None else formula_kernel(program, command)
    if function is None:
        return None
    return _call(function, program, columns, numbers, draws, each)


def _apart(program: Program, columns: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Columns of which those that are only read share no memory with those that are written: there they are copies.

    The compiler may read a column behind a store into another one.
    """
    written = {column for column, _ in program.stores}
    taken = {x.data_ptr() for column in written for x in columns[column]}
    return [
        column if i in written else [x.clone() if x.data_ptr() in taken else x for x in column]
        for i, column in enumerate(columns)
    ]


def _call(
    function: Any,
    program: Program,
    columns: Sequence[Sequence[Tensor]],
    numbers: Sequence[float],
    draws: Draws | None,
    each: bool = True,
) -> Tensor:
    count, sums = len(columns[0]), len(program.sums)
    job = _job(len(columns), sums, len(numbers))()
    job.entries = count
    # The arrays must live until the call returns.
    addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
    if len({x for column in addresses for x in column}) < count * len(columns):
        columns = _apart(program, columns)
        addresses = [list(map(Tensor.data_ptr, column)) for column in columns]
    if not all(all(map(_IS_CPU, column)) for column in columns) or not all(map(all, addresses)):
        native.check_memory(columns, addresses)
    rows = [(ctypes.c_void_p * count)(*row) for row in addresses]
    for i, row in enumerate(rows):
        job.columns[i] = row
    job.numel = (ctypes.c_int64 * count)(*map(Tensor.numel, columns[0]))
    job.numbers[: len(numbers)] = [float(x) for x in numbers]
    if draws is not None:
        # ctypes takes the low 64 bits of any int.
        job.key, job.offset = (ctypes.c_uint64 * count)(*draws.keys), (ctypes.c_uint64 * count)(*draws.offsets)
        job.seed, job.step = draws.seed, draws.step
    found = torch.zeros((sums, count), dtype=torch.float64)
    for i in range(sums):
        job.sums[i] = ctypes.cast(found[i].data_ptr(), ctypes.POINTER(ctypes.c_double))
    if function(ctypes.byref(job), torch.get_num_threads(), native.parallel()):
        raise MemoryError("no memory for the sums of a formula")
    return found if each else found.sum(1)
