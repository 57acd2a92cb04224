"""Random programs for all printers, computed by torch, operation by operation: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import interpreted
import numpy
import torch
from hypothesis import strategies as st
from torch import Tensor

from zerofn.extend import Coded, Codes
from zerofn.extend import Draws as CodeDraws
from zerofn.kernels import masters, print_torch  # inside: what kernels are compared with
from zerofn.kernels.codes import Coding  # inside: as above
from zerofn.kernels.operations import COMPARED, OPERATIONS  # inside: as above
from zerofn.kernels.program import KINDS, Draws, Program  # inside: as above

# Operations of floats whose result has their kind, by the number of their arguments that are registers. Behind these
# come numbers.
FLOATS = {
    **{name: (1, 0) for name in ("sqrt", "reciprocal", "sign", "neg", "abs", "to")},
    **{name: (2, 0) for name in ("add", "sub", "mul", "div")},
    **{"plus": (2, 1), "addcmul": (3, 1), "addcdiv": (3, 1), "lerp": (2, 1), "lerp_back": (2, 1)},
    **{"clamp_min": (1, 1), "clamp_max": (1, 1)},
}
# Their product is rounded with the sum, which torch does on some processors.
FUSED = ("plus", "addcmul", "lerp", "lerp_back")
LOGICAL = {"logical_and": 2, "logical_or": 2, "logical_not": 1}
MASTERS = ("joined", "upper_half", "residual")
F32, BF16, F16, F64, I64, BOOL, I8 = KINDS.values()
DTYPES = list(KINDS)


class Drawn(NamedTuple):
    """A program, and what it is given.

    Attributes:
        program: to be printed.
        numbers: of the program.
        sizes: elements of each leaf.
        shift: how many elements into their storage tensors begin.
        seed: of the tensors.
        draws: of random bits; `None` if there are none.
    """

    program: Program
    numbers: list[float]
    sizes: list[int]
    shift: int
    seed: int
    draws: Draws | None


class _Writer:
    """Writes a random program, step by step; arguments that are no registers are drawn."""

    def __init__(self, draw: Callable[[Any], Any], loads: list[int]):
        self.draw, self.kinds, self.loads = draw, list(loads), loads
        self.steps: list[tuple[str, tuple[str, ...], int]] = []
        self.numbers: list[float] = []
        self.of_numbers: list[int] = []
        self.streams: set[int] = set()

    def step(self, name: str, given: Sequence[str], kind: int) -> str:
        self.steps.append((name, tuple(given), kind))
        self.kinds.append(kind)
        return f"x{len(self.kinds) - 1}"

    def register(self, kind: int, exactly: bool = False) -> str:
        """A register in which a number of this kind is computed, or one of exactly this kind."""
        i = self.draw(st.integers(0, len(self.kinds) - 1))
        same = self.kinds[i] == kind or (not exactly and max(self.kinds[i], kind) <= F16)
        return f"x{i}" if same else self.step("to", [f"x{i}"], kind)

    def number(self, kind: int, low: float = 0.0078125, high: float = 4.0, width: Any = 64) -> str:
        self.numbers.append(self.draw(st.floats(low, high, width=width)))
        self.of_numbers.append(kind)
        return f"n{len(self.numbers) - 1}"

    def either(self, kind: int) -> str:
        return self.number(kind, width=32) if self.draw(st.booleans()) else self.register(kind)

    def write(self, name: str, kind: int) -> None:
        if name in FLOATS:
            registers, numbers = FLOATS[name]
            given = [self.register(kind) for _ in range(registers)]
            if name in ("add", "sub", "mul", "div") and self.draw(st.booleans()):
                given[1] = self.number(kind)
            # A weight of a half and more is one for the other end. torch compares with a number in the dtype of lists.
            bounds = {"lerp": (0.0, 0.484375), "lerp_back": (-0.5, 0.0)}.get(name, (0.0078125, 4.0))
            given += [self.number(kind, *bounds, width=16 if "clamp" in name else 64) for _ in range(numbers)]
            self.step(name, given, kind)
        elif name in COMPARED:
            given = [self.register(kind)] + ([] if name == "isfinite" else [self.either(kind)])
            self.step(name, given, BOOL)
        elif name in LOGICAL:
            self.step(name, [self.register(BOOL) for _ in range(LOGICAL[name])], BOOL)
        elif name == "where":
            self.step(name, [self.register(BOOL), self.register(kind), self.either(kind)], kind)
        elif name == "random":
            stream, shift = self.draw(st.integers(0, 2)), self.draw(st.sampled_from([0, 16]))
            self.streams.add(stream)
            self.step(name, [self.register(F32, True), f"r{stream}", str(shift)], self.draw(st.sampled_from([1, 2])))
        elif name == "joined":
            p = self.step("to", [self.register(BF16, True)], F32)
            residuals = [i for i, kind in enumerate(self.kinds) if kind == I8]
            residual = f"x{residuals[-1]}" if residuals else self.step("residual", [self.register(F32, True)], I8)
            self.step(name, [p, residual], F32)
        else:
            self.step(name, [self.register(F32, True)], BF16 if name == "upper_half" else I8)


@st.composite
def programs(
    draw: Any, kinds: Sequence[int] = (F32, BF16, F16), sizes: Sequence[int] = (), more: bool = False
) -> Drawn:
    """Random programs of columns of these kinds; with `more` also random bits and masters."""
    loads = draw(st.lists(st.sampled_from([*kinds, *([BOOL, I8] if more else [])]), min_size=1, max_size=4))
    names = [*FLOATS, *sorted(COMPARED), *LOGICAL, "where"]
    names += [*MASTERS, *["random"] * 6] if more else []
    written = _Writer(draw, loads)
    for name, kind in draw(
        st.lists(st.tuples(st.sampled_from(names), st.sampled_from(kinds)), min_size=1, max_size=10)
    ):
        written.write(name, F32 if kind == F64 and name in ("sqrt", *FUSED) else kind)
    stores = []
    columns = list(loads)
    for i in [*draw(st.lists(st.integers(0, len(written.kinds) - 1), max_size=3)), len(written.kinds) - 1]:
        # Into a column that is read, or into one of its own.
        old = [c for c in range(len(loads)) if loads[c] == written.kinds[i] and c not in dict(stores)]
        if old and draw(st.booleans()):
            stores.append((old[0], f"x{i}"))
        else:
            columns.append(written.kinds[i])
            stores.append((len(columns) - 1, f"x{i}"))
    floats = [f"x{i}" for i, kind in enumerate(written.kinds) if kind <= F16]
    sums = draw(st.lists(st.sampled_from(floats), max_size=2)) if floats else []
    form = draw(st.sampled_from([1, 2])) if written.streams else 0
    program = Program(
        *(tuple(loads), (), tuple(written.of_numbers), tuple(written.steps), tuple(stores)),
        *(tuple(columns[c] for c, _ in stores), tuple(sums), tuple(sorted(written.streams)), form),
    )
    lengths = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=4))
    draws = None
    if written.streams:
        word = st.integers(0, 2**63 - 1)
        keys = draw(st.lists(word, min_size=len(lengths), max_size=len(lengths)))
        # Bits have another key behind 2**32 elements: within a line, at its end, and behind it.
        places = st.sampled_from([0, 1, 31, 2**32 - 17, 2**32 - 32, 2**32, 3 * 2**32 - 1, 2**40 + 5])
        offsets = draw(st.lists(places, min_size=len(lengths), max_size=len(lengths)))
        draws = Draws(draw(word), draw(st.integers(1, 2**33)), form, keys, offsets)
    return Drawn(program, written.numbers, lengths, draw(st.integers(0, 3)), draw(st.integers(0, 99)), draws)


def each_operation(kind: int, sizes: Sequence[int]) -> Drawn:
    """Each operation of floats and each comparison, of the first columns, into a column of its own."""
    steps, numbers, of_numbers = [], [], []
    for name in (*FLOATS, *sorted(COMPARED)):
        registers, more = FLOATS.get(name, (1 if name == "isfinite" else 2, 0))
        if kind == F64 and name in ("sqrt", *FUSED):
            continue
        given = [f"x{i}" for i in range(registers)] + [f"n{len(numbers) + i}" for i in range(more)]
        numbers += [-0.25 if name == "lerp_back" else 0.25] * more
        of_numbers += [kind] * more
        steps.append((name, tuple(given), kind if name in FLOATS else BOOL))
    stores = tuple((3 + i, f"x{3 + i}") for i in range(len(steps)))
    written = tuple(of for _, _, of in steps)
    return Drawn(
        Program((kind,) * 3, (), tuple(of_numbers), tuple(steps), stores, written, ()), numbers, list(sizes), 0, 1, None
    )


def tensors(drawn: Drawn) -> list[list[Tensor]]:
    """The columns of a program, of numbers at the edges of every format; others are NaN or ones."""
    return [
        [
            _tensor(n, kind, drawn.seed + 7 * i + column, drawn.shift, column < len(drawn.program.loads))
            for i, n in enumerate(drawn.sizes)
        ]
        for column, kind in sorted(drawn.program.kinds.items())
    ]


def _tensor(n: int, kind: int, seed: int, shift: int, read: bool) -> Tensor:
    dtype = DTYPES[kind]
    if not read:
        return torch.full((n + shift,), float("nan") if dtype.is_floating_point else 1, dtype=dtype)[shift:]
    if kind <= F64:
        return interpreted.leaf(n, (torch.float32 if kind == F64 else dtype,) * 4, seed, shift)[0].to(dtype)
    generator = torch.Generator().manual_seed(seed)
    low, high = {BOOL: (0, 2), I8: (-128, 128)}.get(kind, (-3, 9))
    return torch.randint(low, high, (n + shift,), generator=generator).to(dtype)[shift:]


def by_torch(drawn: Drawn, columns: Any) -> Tensor:
    """A program by torch's operations; what is fused is rounded once, as on processors that can."""
    before, kernel = {name: OPERATIONS[name] for name in FUSED}, masters._kernel
    OPERATIONS.update({name: row._replace(torch=_ONCE[name]) for name, row in before.items()})
    # Masters have a kernel in C, of the same header.
    masters._kernel = lambda *_: None
    try:
        return print_torch.run(drawn.program, columns, drawn.numbers, [], True, drawn.draws)
    finally:
        OPERATIONS.update(before)
        masters._kernel = kernel


def _fma(x: Any, y: Any, z: Tensor) -> Tensor:
    a, b, c = (x.numpy() if isinstance(x, Tensor) else numpy.full((), x, numpy.float32) for x in (x, y, z))
    return torch.from_numpy(interpreted._rounded_once(a, b, c).reshape(c.shape))


_ONCE: dict[str, Callable[..., Tensor]] = {
    "plus": lambda x, y, alpha: _fma(alpha, y, x),
    "addcmul": lambda x, a, b, value: _fma(a * value, b, x),
    "lerp": lambda x, end, weight: _fma(weight, end - x, x),
    "lerp_back": lambda x, end, less: _fma(less, end - x, end),
}


def different(mine: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> list[str]:
    """Where columns differ in their bits; a NaN equals any NaN."""
    rows = []
    for column, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
            wrong = x.clone().view(word) != y.clone().view(word)
            wrong = wrong & ~(x.isnan() & y.isnan()) if x.dtype.is_floating_point else wrong
            if wrong.any():
                at = int(wrong.nonzero()[0])
                rows.append(f"column {column}, leaf {i} ({x.dtype}) at {at}: {x[at].item()!r}, not {y[at].item()!r}")
    return rows


def different_sums(drawn: Drawn, sums: Tensor, want: Tensor, most: float) -> list[str]:
    """Where sums differ by more than `most` of what the magnitudes of their addends add up to."""
    program, steps = drawn.program, list(drawn.program.steps)
    first = len(program.loads) + len(steps)
    steps += [("abs", (name,), F32) for name in program.sums]
    sizes = program._replace(steps=tuple(steps), sums=tuple(f"x{first + i}" for i in range(len(program.sums))))
    scale = by_torch(drawn._replace(program=sizes), tensors(drawn))
    # Squares are added up in float64, and in float32 on a GPU.
    good = scale.isfinite() & (scale < 1e30)
    off = (sums.double() - want)[good].abs() > most * scale[good] + 1e-30
    return [f"sums are {sums.tolist()}, not {want.tolist()}"] if off.any() else []


def by_triton(drawn: Drawn) -> list[str]:
    """What differs between a kernel of Triton and torch after a random program."""
    from zerofn.kernels import print_triton  # inside: a kernel by itself

    mine, theirs = tensors(drawn), tensors(drawn)
    sums = print_triton.run(drawn.program, mine, drawn.numbers, [], True, drawn.draws)
    want = by_torch(drawn, theirs)
    rows = different_sums(drawn, sums, want, 1e-5) if drawn.program.sums else []
    return rows + different(mine, theirs)


def of_codes(kind: int) -> Program:
    """A program of numbers and of two columns for codes: sums, squares, a random rounding, a sum over a leaf."""
    steps = (("mul", ("x0", "n0"), F32), ("add", ("x3", "x1"), F32), ("mul", ("x2", "x2"), kind))
    steps += (("random", ("x4", "r0", "16"), BF16), ("to", ("x4",), kind))
    return Program(
        (F32, kind, kind), (), (F32,), steps, ((1, "x7"), (2, "x5"), (3, "x6")), (kind, kind, BF16), ("x1",), (0,), 2
    )


def compare_codes(kind: int, bits: int, code: str, block: int, shapes: Sequence[tuple[int, int]]) -> list[str]:
    """What differs between a kernel of Triton and torch on leaves of which two columns are codes, in either rounding.

    Args:
        kind: of the numbers that are kept as codes.
        bits, code, block: of the codes.
        shapes: of the leaves.
    """
    from zerofn.kernels import print_triton  # inside: a kernel by itself

    how, rows, offsets = Codes(bits, block, code), [], [5, 2**35][: len(shapes)]
    for random in (False, True):
        ways: list[Any] = [[[], [], [], []], [[], [], [], []]]
        for i, (shape, offset) in enumerate(zip(shapes, offsets, strict=True)):
            p, _, m, v = (x.view(shape) for x in interpreted.leaf(shape[0] * shape[1], (torch.float32,) * 4, i, i)[:4])
            own = [CodeDraws(5, torch.tensor(2**33 + k), 2 * i + k, offset) if random else None for k in (1, 2)]
            for way in ways:
                way[0].append(p.clone())
                way[3].append(torch.zeros(shape, dtype=torch.bfloat16))
                for k, x in enumerate((m, v)):
                    coded = how.encode_by_torch(x.nan_to_num(1.0, 1.0, -1.0).to(DTYPES[kind]), own[k])
                    way[1 + k].append(Coded(how, *coded, own[k]))
        draws = Draws(7, 3, 2, list(range(len(shapes))), offsets)
        print_triton.run(of_codes(kind), ways[0], [0.75], [], True, draws)
        print_torch.run(of_codes(kind), ways[1], [0.75], [], True, draws)
        mine, theirs = ([[y for x in way[k] for y in x.tensors] for k in (1, 2)] + [way[3]] for way in ways)
        rows += [f"random: {random}, {x}" for x in different(mine, theirs)]
    return rows


def sums(sizes: Sequence[int]) -> list[float]:
    """How far sums of squares are from those in float64, relatively: of each leaf, and of all."""
    from zerofn.kernels import print_triton  # inside: a kernel by itself

    xs = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)]
    program = Program((0,), (), (), (("mul", ("x0", "x0"), 0),), (), (), ("x1",))
    want = torch.stack([x.double().square().sum() for x in xs])
    each, every = (print_triton.run(program, [xs], [], [], each=each)[0].double() for each in (True, False))
    off = [(each - want).abs() / want.clamp(min=1e-30), (every - want.sum()).abs() / want.sum()]
    return [float(x) for x in torch.cat([off[0], off[1].reshape(1)])]


def instructions(kinds: Sequence[int], steps: Sequence[tuple[str, tuple[str, ...], int]]) -> dict[str, int]:
    """How often each instruction stands in a kernel that writes its first column, as it is compiled for an H100."""
    last = f"x{len(kinds) + len(steps) - 1}"
    return interpreted.compiled(Program(tuple(kinds), (), (0,), tuple(steps), ((0, last),), (kinds[0],), ()))


# Functions as users write them, of floats x and y, counts n, bools b and a number of the device, s. Numbers are exact
# in 16 bits, to which torch rounds some of them on the CPU, and none on a GPU.
FUNCTIONS: dict[str, Callable[..., list[Any]]] = {
    "choice": lambda x, y, n, b, s: [torch.where(x > y, x, 0.5 * y), torch.where(b, x, 1.0).abs()],
    "both": lambda x, y, n, b, s: [torch.where((x <= 0.25) & ~b, -1.0, x), x.where((x != y) | b, y)],
    "counts": lambda x, y, n, b, s: [(n + 1) * (x >= y), n * ~b, torch.where(n == 3, 0, n - 2).clamp(min=1)],
    "kinds": lambda x, y, n, b, s: [x * b + n, (x < y).to(x.dtype), n.to(x.dtype) * 0.125, b.to(torch.int64) + n],
    "scalar": lambda x, y, n, b, s: [x * s, y - s, n.clone(), ~b],
    "wide": lambda x, y, n, b, s: [((n.to(torch.float64) * 0.1 + 1).sqrt() / 0.3).to(x.dtype), n.to(torch.float64) - x],
    "terms": lambda x, y, n, b, s: [
        x.addcmul(x, y, value=0.375),
        x.addcdiv(y, x.abs() + 0.125, value=0.75),
        x.lerp(y, 0.75),
    ],
    "more terms": lambda x, y, n, b, s: [x.lerp(y, 0.25).sign(), (x * x).reciprocal(), -x / y],
}


def compare_functions(name: str, dtype: torch.dtype, sizes: Sequence[int]) -> list[str]:
    """Where a function of lists, computed by a kernel, differs from the same of tensors; and kernels but one."""
    from zerofn.kernels import print_triton, program  # inside: a kernel by itself

    columns = [[interpreted.leaf(n, (dtype,) * 4, 7 * i + j, 0)[0] for i, n in enumerate(sizes)] for j in range(2)]
    drawn = [torch.Generator().manual_seed(i) for i in range(len(sizes))]
    columns += [[torch.randint(0, 9, (n,), generator=g) for n, g in zip(sizes, drawn, strict=True)]]
    columns += [[x > 4 for x in columns[2]]]
    scalar, launched, known = torch.tensor(0.75), [], (program.printer_for, print_triton.launch)
    want = [FUNCTIONS[name](*row, scalar) for row in zip(*columns, strict=True)]
    program.printer_for = lambda device: print_triton  # type: ignore[assignment]
    print_triton.launch = lambda kernel, *args: (launched.append(kernel), known[1](kernel, *args))
    try:
        given: Any = program.Term("scalar", (scalar,), scalar.dtype)
        made = FUNCTIONS[name](*map(program.TensorList, columns), given)
        program.computed(*made)
    finally:
        program.printer_for, print_triton.launch = known
    rows = [f"{len(launched)} launches"] if len(launched) != 1 else []
    for i, x in enumerate(made):
        for got, (right,) in zip(x.tensors, [[row[i]] for row in want], strict=True):
            if got.dtype != right.dtype or not torch.equal(got.nan_to_num(), right.nan_to_num()):
                rows.append(f"result {i}: {got}, not {right}")
    return rows


def compiled_functions() -> list[str]:
    """What Triton says of kernels of the functions that it does not compile for an H100: by a table, and of numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zerofn.kernels import print_triton, program  # inside: a kernel by itself, and how it is launched

    kept: list[Any] = []
    columns = [torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)]
    scalar: Any = program.Term("scalar", (torch.tensor(0.75),), torch.float32)
    program.printer_for = lambda device: print_triton  # type: ignore[assignment]
    print_triton.run = lambda program, *_: kept.append(program)  # type: ignore[assignment,func-returns-value]
    for function in FUNCTIONS.values():
        program.computed(*function(*(program.TensorList([x]) for x in columns), scalar))
    wrong, pointers = [], ("*fp32", "*bf16", "*fp16", "*fp64", "*i64", "*i1")
    for found in kept:
        kinds = found.kinds
        own = {f"c{i}": pointers[kind] for i, kind in kinds.items()}
        own |= {f"m{i}": pointers[kind] for i, kind in enumerate(found.scalars)}
        own |= {f"n{i}": "i32" if kind == 4 else "fp32" for i, kind in enumerate(found.numbers)}
        sizes = {"CHUNK": print_triton.CHUNK, "BLOCK": print_triton.BLOCK}
        for make in (print_triton.formula_kernel, print_triton.kernel_of_numbers):
            kernel = make(found)
            signature = {name: {**interpreted.TYPES, **own}.get(name, "constexpr") for name in kernel.arg_names}
            constants = {name: x for name, x in sizes.items() if name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            try:
                triton.compile(source, target=GPUTarget("cuda", 90, 32), options=print_triton.CUDA_OPTIONS)
            except Exception as error:
                wrong.append(f"{found}: {error}")
    return wrong


def compiled_codes(kind: int, bits: int, code: str) -> dict[str, int]:
    """The instructions of a kernel of codes, as it is compiled for an H100."""
    return interpreted.compiled(of_codes(kind), Coding((1, 2), bits, code))


def compiled_wide() -> dict[str, int]:
    """Those of a program of float64, a count, a bool, a residual and a number by leaf."""
    steps = (("mul", ("x0", "e0"), F64), ("to", ("x2",), F32), ("residual", ("x5",), I8))
    steps += (("where", ("x3", "x0", "x4"), F64),)
    stores, written = ((0, "x7"), (4, "x6"), (1, "x1")), (F64, I8, I64)
    return interpreted.compiled(Program((F64, I64, F16, BOOL), (), (), steps, stores, written, (), (), 0, (F64,)))
