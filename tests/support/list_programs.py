"""Programs of `print_triton`, computed by torch, operation by operation: what its kernels are compared with."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import interpreted
import torch
from torch import Tensor

# By kind.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
LOGICAL = ("logical_and", "logical_or", "logical_not")

# What each operation is in torch, on float32. A root of torch on the CPU is in some builds off by one unit in the last
# place, which that of float64 is not.
TORCH: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "lerp", "reciprocal", "sign", "neg", "abs")},
    "to": lambda x: x,
    "plus": lambda x, y, alpha: torch.add(x, y, alpha=alpha),
    "addcmul": lambda x, a, b, value: torch.addcmul(x, a, b, value=value),
    "addcdiv": lambda x, a, b, value: torch.addcdiv(x, a, b, value=value),
    "lerp_back": lambda x, y, less: torch.lerp(x, y, less + 1),
    "clamp_min": lambda x, least: x.clamp(min=least),
    "clamp_max": lambda x, most: x.clamp(max=most),
    "sqrt": lambda x: x.double().sqrt().to(x.dtype),
    **{name: getattr(torch, name) for name in (*COMPARED, *LOGICAL, "where")},
}
TENSORS = {"plus": 2, "addcmul": 3, "addcdiv": 3, "lerp": 2, "lerp_back": 2, "add": 2, "sub": 2, "mul": 2, "div": 2}


def by_torch(program: Any, columns: Any, numbers: Any, scalars: Any, each: bool = True) -> Tensor:
    """What `print_triton.run` does."""
    sums: list[list[Tensor]] = [[] for _ in program.sums]
    for row in zip(*columns, strict=True):
        x: dict[str, Any] = {f"x{i}": _wide(row[i]) for i in range(len(program.loads))}
        x |= {
            f"n{i}": int(n) if kind == 4 else float(n)
            for i, (n, kind) in enumerate(zip(numbers, program.numbers, strict=True))
        }
        x |= {f"s{i}": _wide(s) for i, s in enumerate(scalars)}
        for i, (name, given, kind) in enumerate(program.steps, len(program.loads)):
            made = TORCH[name](*(x[name] for name in given))
            x[f"x{i}"] = _wide(made.to(DTYPES[kind]))
        found = [x[name].clone() for _, name in program.stores]
        for (column, _), value in zip(program.stores, found, strict=True):
            row[column].copy_(value)
        for total, name in zip(sums, program.sums, strict=True):
            total.append(x[name].double().sum())
    made = torch.stack([torch.stack(total) for total in sums]).float() if sums else torch.zeros(0)
    return made if each or not sums else made.sum(1)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in DTYPES[:3] else x


def compare(
    sizes: Sequence[int],
    kinds: Sequence[int],
    steps: Sequence[tuple[str, tuple[int, ...], float, int]],
    shift: int,
    seed: int,
) -> list[str]:
    """What differs between a kernel and torch after a random program, which writes each of its columns.

    Args:
        sizes: elements of each leaf.
        kinds: of the columns.
        steps: operation, which registers it is of, its number, kind of the result.
        shift: how many elements into their storage tensors begin.
        seed: of the numbers.
    """
    from zerofn.kernels import print_triton  # inside: a kernel by itself
    from zerofn.kernels.program import Program  # inside: as above

    columns = [
        [interpreted.leaf(n, (DTYPES[kind],) * 4, seed + 7 * i + j, shift)[0] for i, n in enumerate(sizes)]
        for j, kind in enumerate(kinds)
    ]
    numbers, made = [], []
    for i, (name, given, number, kind) in enumerate(steps, len(kinds)):
        args = [f"x{x % i}" for x in given[: TENSORS.get(name, 1)]]
        if name in ("plus", "addcmul", "addcdiv", "clamp_min", "clamp_max", "lerp", "lerp_back"):
            args.append(f"n{len(numbers)}")
            # A weight of a half and more is one for the other end.
            numbers.append({"lerp": number % 0.5, "lerp_back": number % 0.5 - 0.5}.get(name, number))
        made.append((name, tuple(args), kind))
    last = len(kinds) + len(made)
    stores = tuple((i, f"x{last - 1 - i % len(made)}") for i in range(len(kinds)))
    zeros = (0,) * len(numbers)
    program = Program(tuple(kinds), (), zeros, tuple(made), stores, tuple(kinds), (f"x{last - 1}",))
    theirs = [[x.clone() for x in column] for column in columns]
    sums = print_triton.run(program, columns, numbers, [])
    want = by_torch(program, theirs, numbers, [])
    rows = [f"column {i}: {row}" for i in range(len(kinds)) for row in interpreted.different(columns[i], theirs[i])]
    good = want.isfinite() & (want.abs() < 1e30)
    if not torch.allclose(sums[good], want[good], rtol=1e-3, atol=1e30 * torch.finfo(torch.float32).eps):
        rows.append(f"sums are {sums.tolist()}, not {want.tolist()}")
    return rows


def sums(sizes: Sequence[int]) -> list[float]:
    """How far sums of squares are from those in float64, relatively: of each leaf, and of all."""
    from zerofn.kernels import print_triton  # inside: a kernel by itself
    from zerofn.kernels.program import Program  # inside: as above

    xs = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)]
    program = Program((0,), (), (), (("mul", ("x0", "x0"), 0),), (), (), ("x1",))
    want = torch.stack([x.double().square().sum() for x in xs])
    each, every = (print_triton.run(program, [xs], [], [], each=each)[0].double() for each in (True, False))
    off = [(each - want).abs() / want.clamp(min=1e-30), (every - want.sum()).abs() / want.sum()]
    return [float(x) for x in torch.cat([off[0], off[1].reshape(1)])]


def instructions(kinds: Sequence[int], steps: Sequence[tuple[str, tuple[str, ...], int]]) -> dict[str, int]:
    """How often each instruction stands in a kernel that writes its first column, as it is compiled for an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zerofn.kernels import print_triton  # inside: a kernel by itself, and how it is launched
    from zerofn.kernels.program import Program  # inside: as above

    last = f"x{len(kinds) + len(steps) - 1}"
    program = Program(tuple(kinds), (), (0,), tuple(steps), ((0, last),), (kinds[0],), ())
    kernel = print_triton.formula_kernel(program)
    types = {"rows": "i32", "chunks": "i32", "numbers": "*fp64", "partials": "*fp32", "starts": "*i64", "table": "*i64"}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={"CHUNK": print_triton.CHUNK, "BLOCK": print_triton.BLOCK},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=print_triton.CUDA_OPTIONS)
    return dict(collections.Counter(interpreted.CALLS.findall(compiled.asm["ptx"])))


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
    types = {"rows": "i32", "chunks": "i32", "numbers": "*fp64", "partials": "*fp32", "starts": "*i64", "table": "*i64"}
    for found in kept:
        kinds = found.kinds
        own = {f"c{i}": pointers[kind] for i, kind in kinds.items()}
        own |= {f"m{i}": pointers[kind] for i, kind in enumerate(found.scalars)}
        own |= {f"n{i}": "i32" if kind == 4 else "fp32" for i, kind in enumerate(found.numbers)}
        sizes = {"CHUNK": print_triton.CHUNK, "BLOCK": print_triton.BLOCK}
        for make in (print_triton.formula_kernel, print_triton.kernel_of_numbers):
            kernel = make(found)
            signature = {name: {**types, **own}.get(name, "constexpr") for name in kernel.arg_names}
            constants = {name: x for name, x in sizes.items() if name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            try:
                triton.compile(source, target=GPUTarget("cuda", 90, 32), options=print_triton.CUDA_OPTIONS)
            except Exception as error:
                wrong.append(f"{found}: {error}")
    return wrong
