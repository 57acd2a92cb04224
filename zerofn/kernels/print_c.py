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
from .codes import MAPS as MAPS
from .codes import MOST, Coded, Codes, Coding, coding_of, defines_of
from .codes import Draws as CodeDraws
from .operations import OPERATIONS
from .program import KINDS, Draws, Program
from .rounding import FORMAT, stride_of

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

_CODES = Path(__file__).with_name("native_codes.h")

_SOURCE = """\
#include <math.h>
enum {{ NAN_SURVIVES = {nan_survives} }};
{f16}
#define ZF_STRIDE {stride}u
#include "native_draws.h"
#include "native_lines.h"
#include "native_masters.h"
#include "native_prefetch.h"
#include "native_entries.h"
{codes}

typedef struct {{
    int64_t entries;
    void *const *columns[{columns}];
    const int64_t *numel;
    double *sums[{sum_count}];
    const uint64_t *key, *offset;
    uint64_t seed, step;
    double numbers[{numbers}];
    const double *by_entry[{by_entry}];
    {of_rows}
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
    {opened_block}
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
    {closed_block}
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


_ROWS = """\
const int64_t row = j->row[e], block = j->block, in_row = (row + block - 1) / block, end = to;
    int64_t r = from / row, b = (from - r * row + block - 1) / block;
    ROOMS
    for (;; b++) { /* A block is decoded, computed and encoded in the cache. */
    if (b == in_row) b = 0, r++;
    const int64_t at = b * block, begin = r * row + at, to = least_of(block, row - at), bytes = bytes_of(row);
    if (begin >= end) break;
    const int64_t scale = r * in_row + b;
    OPENED
    int64_t i = 0;"""
_DECODED = """\
for (int64_t k = 0; k < to * ZF_BITS / 8; k += 64)
        __builtin_prefetch(c# + r * bytes + at * ZF_BITS / 8 + AHEAD / 4 + k, 1);
    decode_block(p#, c# + r * bytes, at, to, loaded_scale(z#[scale]));
    if (to % LINE) memset(p# + to, 0, LINE * sizeof *p#);"""
_ENCODED = """\
{
        of_block of = seen(p#, to);
        z#[scale] = scale_code(stored_scale(of));
        uint32_t k0 = d#.k0 + (uint32_t)begin * ZF_STRIDE;
        encode_block(p#, c# + r * bytes, at, to, &of, j->random, k0, d#.k1);
    }"""
# A column of numbers of rows is a constant in each row.
_MATRIX = """\
const int64_t row = j->row[e], end = to;
    for (int64_t begin = from, r = from / row; begin < end; r++) {
    const int64_t at = begin - r * row, to = ((r + 1) * row < end ? (r + 1) * row : end) - begin;
    OPENED
    int64_t i = 0;"""
_OF_CODES = """\
const int64_t *row;
    const uint64_t *first;
    void *const *scales[{count}];
    const uint64_t *code_key[{count}], *code_step[{count}];
    int64_t block;
    uint64_t codes_seed;
    int random;"""


def can(program: Program) -> bool:
    """Whether a program is printed. A root in float64 is not: torch's has other bits."""
    spread = [kind for kind, of in zip(program.loads, program.spread, strict=False) if of]
    if spread and (program.streams or not set(spread) <= {F32, F64}):
        return False
    return not program.scalars and not any(name == "sqrt" and kind == F64 for name, _, kind in program.steps)


@functools.cache
def source(program: Program, coding: Coding | None = None) -> str:
    """The C source of a program; of its columns some may be kept as codes."""
    kinds = dict(sorted(program.kinds.items()))
    written = {column for column, _ in program.stores}
    coded = set() if coding is None else set(coding.columns)
    # float16 is widened before the loop over pairs, and narrowed behind it: processors have vector instructions for it.
    widened = {c for c, kind in kinds.items() if kind == F16 and c not in coded}
    # Pieces of the file, by column: `p` points to stored numbers, `q` to what pairs read, `w` to what they write.
    # Codes are decoded into a room for a block of floats, and encoded from it.
    stored = {c: "float" if c in coded else _STORED[kind] for c, kind in kinds.items()}
    of_row = {c for c, of in enumerate(program.spread) if of == "rows"}
    columns = {c: f"{'' if c in written else 'const '}{x} *restrict p{c}" for c, x in stored.items() if c not in of_row}
    constants = {f"n{i}": _COMPUTED[kind] for i, kind in enumerate(program.numbers)}
    constants |= {f"e{i}": _COMPUTED[kind] for i, kind in enumerate(program.entries)}
    constants |= {f"v{c}": _COMPUTED[kinds[c]] for c in sorted(of_row)}
    sums = [f"t{i}" for i in range(len(program.sums))]

    words = {c for c, kind in enumerate(program.loads) if kind == BF16 and c not in coded}
    body: list[str] = [f"const uint32_t w{c} = *(const word *)(p{c} + i);" for c in sorted(words)]
    for c, kind in enumerate(program.loads):
        if c in words:
            body += [f"const float x{c}a = from_bits(w{c} << 16), x{c}b = from_bits(w{c} & 0xffff0000u);"]
        elif c in of_row:
            body += [f"const {_COMPUTED[kind]} x{c}{h} = v{c};" for h in "ab"]
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
        if c in coded:
            stores += [f"p{c}[i + {k}] = {register}{half};" for k, half in enumerate("ab")]
            continue
        if program.is_step(register):
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
        root = program.squared(x)
        x = root or x
        added.append(f"(double)u{i}[i] * u{i}[i]" if root else f"u{i}[i]")
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
        places = [f"p{c} + i" if c in coded else place.format(c) for c in columns]
        return ", ".join([*places, *constants, *keys, *sums])

    # A leaf that is kept as codes draws with one key alone.
    drawn = bool(program.streams) and not coded
    first = "" if coded else " + (uint64_t)from"
    moved = " + (uint32_t)begin * ZF_STRIDE" if coded else ""
    plain = [c for c in columns if c not in coded]
    every = {c: k for k, c in enumerate(kinds)}
    of_streams = [
        f"stream s{s} = stream_of(j->seed, j->step, j->key[e], j->offset[e]{first}, {s});" for s in program.streams
    ]
    of_keys = [f"uint32_t k0_{s} = s{s}.k0{moved}, k1_{s} = s{s}.k1;" for s in program.streams]
    of_rows = ["int64_t i = from;"]
    if coded:
        of_codes = [
            f"stream d{c} = stream_of(j->codes_seed, j->code_step[{k}][e], j->code_key[{k}][e], j->first[e], 0);"
            for k, c in enumerate(sorted(coded))
        ]
        of_streams += of_codes
        rooms = [f"_Alignas(64) float p{c}[{MOST} + LINE];" for c in sorted(coded)]
        opened = [f"{columns[c]} = b{c} + begin;" for c in plain]
        opened += [_DECODED.replace("#", str(c)) for c in sorted(coded & set(range(len(program.loads))))]
        opened += of_keys
        of_rows = [_ROWS.replace("ROOMS", "\n    ".join(rooms)).replace("OPENED", "\n    ".join(opened))]
    elif program.spread:
        of_columns = {c for c, of in enumerate(program.spread) if of == "columns"}
        opened = [f"{x} = b{c} + {'at' if c in of_columns else 'begin'};" for c, x in columns.items()]
        opened += [f"const {constants[f'v{c}']} v{c} = b{c}[r];" for c in sorted(of_row)]
        of_rows = [_MATRIX.replace("OPENED", "\n    ".join(opened))]
    else:
        of_streams += of_keys
    return _SOURCE.format(
        stride=stride_of(FORMAT if coded else program.form) if drawn or coded else 1,
        f16="" if widened else "#define NO_F16",
        codes="" if coding is None else _defined(coding, kinds[coding.columns[0]]),
        of_rows=_OF_CODES.format(count=len(coded)) if coded else "const int64_t *row;" if program.spread else "",
        opened_block="\n    ".join(of_rows),
        closed_block="\n    ".join(
            [*[_ENCODED.replace("#", str(c)) for c in sorted(coded)], "}"]
            if coded
            else ["begin += to;", "}"] * bool(program.spread)
        ),
        piece="piece" if drawn else "elements",
        pieces=_PIECES.replace("SUMS", str(max(len(sums), 1))) if drawn else "",
        elements_of=("const job *j, int64_t e, int64_t from, int64_t to, double *totals") if drawn else _ELEMENTS,
        keys="\n    ".join(of_streams),
        next_keys=" ".join(f"k0_{s} += LINE * ZF_STRIDE;" for s in program.streams),
        columns=len(kinds),
        nan_survives=int(set(program.loads) <= {BF16} and not program.scalars),
        numbers=max(len(program.numbers), 1),
        by_entry=max(len(program.entries), 1),
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
            + [
                f"{columns[c].replace('restrict p', 'restrict b')} = j->columns[{every[c]}][e];"
                for c in plain
                if coded or program.spread
            ]
            + [f"const {constants[f'v{c}']} *b{c} = j->columns[{every[c]}][e];" for c in sorted(of_row)]
            + [f"uint8_t *c{c} = j->columns[{every[c]}][e];" for c in sorted(coded)]
            + [f"stored_as *z{c} = j->scales[{k}][e];" for k, c in enumerate(sorted(coded))]
            + [
                f"{column} = j->columns[{every[c]}][e];"
                for c, column in columns.items()
                if not coded and not program.spread
            ]
            + [
                f"const {kind} {name} = ({kind})j->{'numbers[{}]' if name[0] == 'n' else 'by_entry[{}][e]'};".format(
                    name[1:]
                )
                for name, kind in constants.items()
                if name[0] != "v"
            ]
        ),
        partial="\n    ".join(f"double {t}[LINE] = {{0}};" for t in sums) or "(void)totals;",
        # What a formula makes of the zeros behind the last element is not added up.
        before=" ".join(f"double before{i}[LINE]; memcpy(before{i}, t{i}, sizeof t{i});" for i in range(len(sums))),
        totals=" ".join(f"totals[{k}] = total({t});" for k, t in enumerate(sums)),
        prefetch=" ".join(f"PREFETCH(p{c} + i, {int(c in written)});" for c in plain),
        at=at("p{0} + i"),
        rooms=" ".join(
            f"{_STORED[kind]} end{c}[LINE] = {{0}};"
            + (f" memcpy(end{c}, p{c} + i, rest * sizeof *end{c});" if c in loaded else "")
            for c, kind in kinds.items()
            if c in plain
        ),
        of_rooms=at("end{0}"),
        back=" ".join(
            [f"memcpy(p{c} + i, end{c}, rest * sizeof *end{c});" for c in sorted(written - coded)]
            + [f"memcpy(t{i} + rest, before{i} + rest, (LINE - rest) * sizeof *t{i});" for i in range(len(sums))]
        ),
    )


def _defined(coding: Coding, kind: int) -> str:
    """The macros of `native_codes.h`, and the file."""
    macros = [x.removeprefix("-D").replace("=", " ", 1) for x in defines_of(Codes(coding.bits, 128, coding.code))]
    lines = [f"#define {x}" for x in macros if not x.startswith("ZF_STRIDE")]
    return "\n".join([*lines, f"#define ZF_NARROW {int(kind == BF16)}", '#include "native_codes.h"'])


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


def _kind_of(program: Program, name: str) -> int:
    """The kind of a register or a number."""
    i = int(name[1:])
    if name[0] in "ne":
        return (program.numbers if name[0] == "n" else program.entries)[i]
    return program.loads[i] if i < len(program.loads) else program.steps[i - len(program.loads)][2]


@functools.cache
def _job(columns: int, sums: int, numbers: int, entries: int, coded: int = 0, spread: bool = False) -> Any:
    """`job` of the source; of its columns so many are kept as codes."""
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
        ("by_entry", ctypes.c_void_p * max(entries, 1)),
    ]
    if coded or spread:
        fields += [("row", ctypes.POINTER(ctypes.c_int64))]
    if coded:
        fields += [
            ("first", ctypes.POINTER(ctypes.c_uint64)),
            ("scales", pointers * coded),
            ("code_key", ctypes.POINTER(ctypes.c_uint64) * coded),
            ("code_step", ctypes.POINTER(ctypes.c_uint64) * coded),
            ("block", ctypes.c_int64),
            ("codes_seed", ctypes.c_uint64),
            ("random", ctypes.c_int),
        ]
    return type("Job", (ctypes.Structure,), {"_fields_": fields})


def works() -> bool:
    """Whether there is a C compiler that builds kernels, and `ZEROFN_NATIVE` allows it."""
    return native.quiet_compiler() is not None


@functools.cache
def formula_kernel(program: Program, command: native.Command, coding: Coding | None = None) -> Any:
    """The C function of a program, after a check of its bits; `None`, after a warning, if it cannot be used."""
    headers = _HEADERS if coding is None else [*_HEADERS, _CODES]
    try:
        function = native.printed(command, source(program, coding), headers, _declared).zerofn_formula
    except (OSError, AttributeError) as error:
        native.give_up(f"the C kernel of a formula could not be built or loaded ({shlex.join(command)}: {error})")
        return None
    unfused = program == _UNFUSED or formula_kernel(_UNFUSED, command) is not None
    bits = gives_bits(program, function) if coding is None else gives_codes(program, function, coding, command)
    if unfused and bits:
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
    entries = _sample_entries(program)
    _call(function, program, mine, numbers, draws, True, entries)
    print_torch.run(program, theirs, numbers, [], True, draws, entries)
    pairs = [(mine[column][0], theirs[column][0]) for column, _ in program.stores]
    return all(torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) for a, b in pairs)


def gives_codes(program: Program, function: Any, coding: Coding, command: native.Command) -> bool:
    """Whether a kernel of codes has the bits of decoding by torch, the program, and encoding by torch, on a sample."""
    fused = any(name in _FUSED for name, _, _ in program.steps)
    numbers_only = formula_kernel(program, command) if fused else None
    if fused and numbers_only is None:
        return False
    numbers = [0.5 + 0.37 * i if kind < I64 else i + 1 for i, kind in enumerate(program.numbers)]
    entries = _sample_entries(program)
    # Rows that end with a part of a block, and a block that ends with a part of a line.
    how, shape = Codes(coding.bits, 50, coding.code), (7, 143)
    for random in (False, True):
        draws = Draws(5, 3, program.form, [7], [2**31]) if program.streams else None
        columns: list[list[Any]] = [[x.reshape(shape)] for x in _sample(program)]
        theirs: list[list[Tensor]] = [[x.clone()] for (x,) in columns]
        for k, i in enumerate(coding.columns):
            own = CodeDraws(1, torch.tensor(2), 3 + k, 2**31) if random else None
            x = columns[i][0].nan_to_num(0.0, 1.0, -1.0)
            columns[i] = [Coded(how, *how.encode_by_torch(x, own), own)]
            theirs[i] = [how.decode_by_torch(columns[i][0].codes, columns[i][0].scales, shape)]
        _call(function, program, columns, numbers, draws, True, entries)
        if fused:
            _call(numbers_only, program, theirs, numbers, draws, True, entries)
        else:
            print_torch.run(program, theirs, numbers, [], True, draws, entries)
        for column in sorted({column for column, _ in program.stores}):
            mine, other = columns[column][0], theirs[column][0]
            pairs = [(mine, other)]
            if type(mine) is Coded:
                pairs = list(zip(mine.tensors, how.encode_by_torch(other, mine.draws), strict=True))
            if not all(torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) for a, b in pairs):
                return False
    return True


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
    # 7 rows of 143 elements.
    for column, of in enumerate(program.spread):
        found[column] = found[column][: {"rows": 7, "columns": 143}.get(of)]
    return found


def _sample_entries(program: Program) -> list[Tensor]:
    """Numbers of one leaf for those that differ by leaf."""
    found = [(0.5 + 0.23 * i, list(KINDS)[kind]) for i, kind in enumerate(program.entries)]
    return [torch.tensor([x]).to(dtype).double() for x, dtype in found]


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
    entries: Sequence[Tensor] = (),
    roots: bool = False,
) -> Tensor | None:
    """Compute a program over all leaves, on as many threads as torch uses.

    Args:
        program: what to compute.
        columns: tensors of each column, one for each leaf; those of a leaf have the same elements in memory in the same
            order, without gaps, and all are on the CPU. Autograd does not notice what is written: tell it. Those of a
            column may each be a `Coded`, of one block of at most `MOST` numbers; the program writes such a column, and
            all tensors are contiguous.
        numbers: the numbers of the program.
        scalars: none: a number on the host is among `numbers`.
        each: whether sums are those of each leaf, (sums, leaves), or of all of them, (sums,); in float64. Their bits
            depend on the lengths of the leaves alone, and on where random bits get another key (each 2**32 elements).
        draws: of the random bits, if there are some.
        entries: numbers that differ by leaf: of each a tensor of shape (leaves,), in float64 on the CPU.
        roots: whether the roots of the sums of each leaf are wanted.

    Returns:
        The sums; `None` if the kernel cannot be built: then nothing is written.
    """
    command = native.quiet_compiler()
    function = None if command is None else formula_kernel(program, command, coding_of(columns))
    if function is None:
        return None
    found = _call(function, program, columns, numbers, draws, each, entries)
    return found.sqrt() if roots else found


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
    columns: Sequence[Sequence[Any]],
    numbers: Sequence[float],
    draws: Draws | None,
    each: bool = True,
    entries: Sequence[Tensor] = (),
) -> Tensor:
    count, sums = len(columns[0]), len(program.sums)
    coded = [column for column in columns if type(column[0]) is Coded]
    job = _job(len(columns), sums, len(numbers), len(entries), len(coded), bool(program.spread))()
    job.entries = count
    if coded:
        _fill_codes(job, coded, next(column for column in columns if type(column[0]) is not Coded))
        columns = [[x.codes for x in column] if type(column[0]) is Coded else column for column in columns]
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
    if not coded:
        job.numel = (ctypes.c_int64 * count)(*map(Tensor.numel, columns[0]))
    if program.spread:
        job.row = (ctypes.c_int64 * count)(*program.widths(columns))
    job.numbers[: len(numbers)] = [float(x) for x in numbers]
    entries = [x.to(torch.float64).contiguous() for x in entries]
    job.by_entry[: len(entries)] = [x.data_ptr() for x in entries]
    if draws is not None:
        # ctypes takes the low 64 bits of any int.
        job.key, job.offset = (ctypes.c_uint64 * count)(*draws.keys), (ctypes.c_uint64 * count)(*draws.offsets)
        job.seed, job.step = draws.seed, draws.step
    found = torch.zeros((sums, count), dtype=torch.float64)
    for i in range(sums):
        row = found.data_ptr() + i * count * found.itemsize
        job.sums[i] = ctypes.cast(row, ctypes.POINTER(ctypes.c_double))
    if function(ctypes.byref(job), torch.get_num_threads(), native.parallel()):
        raise MemoryError("no memory for the sums of a formula")
    return found if each else found.sum(1)


def _fill_codes(job: Any, coded: Sequence[Sequence[Coded]], plain: Sequence[Tensor]) -> None:
    """Write into `job` what is known of columns of codes; `plain` is a column of tensors."""
    count = len(plain)
    job.numel = (ctypes.c_int64 * count)(*map(Tensor.numel, plain))
    job.row = (ctypes.c_int64 * count)(*[x.numel() // len(x) for x in plain])
    first = coded[0][0]
    job.block, job.random = first.how.block, first.draws is not None
    for k, column in enumerate(coded):
        job.scales[k] = (ctypes.c_void_p * count)(*[x.scales.data_ptr() for x in column])
        own = [x.draws or _NO_DRAWS for x in column]
        job.code_key[k] = (ctypes.c_uint64 * count)(*[x.key for x in own])
        job.code_step[k] = (ctypes.c_uint64 * count)(*[int(x.step) for x in own])
        if not k:
            job.first = (ctypes.c_uint64 * count)(*[x.offset for x in own])
            job.codes_seed = own[0].seed


_NO_DRAWS = CodeDraws(0, torch.tensor(0), 0)
