"""Rows and columns of matrices in kernels: programs with numbers of them, and sums over them."""

from __future__ import annotations

from typing import Any

import interpreted
import torch
from torch import Tensor

from zerofn.kernels import program, sides  # inside: kernels by themselves
from zerofn.kernels.numbers import NotOnLists  # inside: what is no program
from zerofn.kernels.plans import Plans  # inside: programs by themselves

# Rows shorter than a line of 32, longer ones that end within one, one row, one column, more than a chunk of 16384.
SHAPES = [(3, 50), (7, 1000), (1, 77), (150, 130), (90, 8), (5, 1), (1, 1), (2, 32)]
SPREAD = {2: "rows", 3: "columns"}


def formula(lists: list[Any], numbers: Any, about: Any = None) -> tuple[list[Any], list[Any]]:
    p, g, r, c, n = lists
    u = g / (r * c / n).clamp(min=1e-9).sqrt()
    return [(p.to(torch.float32) - numbers["rate"] * u).to(p.dtype)], [u * u]


def columns(dtype: torch.dtype = torch.float32, of: torch.dtype = torch.float32) -> list[Any]:
    drawn = torch.Generator().manual_seed(0)
    p, g = ([torch.randn(shape, generator=drawn).to(dtype) for shape in SHAPES] for _ in range(2))
    g = [x.float() for x in g]
    r = [torch.rand(n, 1, generator=drawn, dtype=of) for n, _ in SHAPES]
    c = [torch.rand(1, m, generator=drawn, dtype=of) for _, m in SHAPES]
    return [p, g, r, c, torch.rand(len(SHAPES), generator=drawn, dtype=torch.float32)]


def expected(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[float]]:
    """The results by torch's operations on one leaf, with its broadcasting; and the sums in float64."""
    found, sums = [], []
    for p, g, r, c, n in zip(*columns(dtype), strict=True):
        u = g / (r * c / n).clamp(min=1e-9).double().sqrt().float()
        found.append((p.float() - 0.1 * u).to(dtype))
        sums.append(u.double().square().sum().item())
    return found, sums


def compare(dtype: torch.dtype) -> tuple[list[bool], float]:
    """Whether each leaf has the bits of torch, and how far sums are off, relatively."""
    given, (want, sums) = columns(dtype), expected(dtype)
    made, found = Plans(formula).run(given, {"rate": 0.1}, into=[0], spread=SPREAD)
    assert found is not None
    off = [abs(x - y) / y for x, y in zip(found[0].tolist(), sums, strict=True)]
    return [torch.equal(x, y) for x, y in zip(made[0], want, strict=True)], max(off)


def by_triton(dtype: torch.dtype) -> tuple[list[bool], float, float]:
    """As `compare`; and how far sums of squares of rows and columns are off."""
    from zerofn.kernels import print_triton  # inside: what is printed

    program.INSTEAD.append(print_triton)
    try:
        return *compare(dtype), sums_off(dtype)
    finally:
        program.INSTEAD.pop()


def sums_off(dtype: torch.dtype) -> float:
    xs = [torch.randn(shape).to(dtype) for shape in [*SHAPES, (40,), ()]]
    rows, of_columns = sides.squares_of_sides(xs)
    worst = 0.0
    for x, r, c in zip(xs, rows, of_columns, strict=True):
        squares = x.double().square().reshape(len(x) if x.ndim > 1 else 1, -1)
        for mine, right in ((r, squares.sum(1)), (c, squares.sum(0))):
            assert mine.dtype is torch.float32 and mine.shape == right.shape
            worst = max(worst, ((mine - right).abs() / right.clamp(min=1e-30)).max().item())
    return worst


def refused(why: str) -> str:
    """Why there is no program: a number of a row that comes first, or is written."""
    given = columns()
    made = {
        "first": lambda x, n, a: ([(x[2] * x[0])], []),
        "written": lambda x, n, a: ([x[0] * x[1], x[2] * 2.0], []),
    }[why]
    try:
        Plans(made).run(given, {}, into=[0] if why == "first" else [0, 2], spread=SPREAD)
    except NotOnLists as error:
        return str(error)
    return ""


def compiled() -> dict[str, int]:
    """Instructions of a program with numbers of rows and columns, compiled for an H100; the sums must compile too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zerofn.kernels import print_triton, triton_sides  # inside: kernels by themselves

    sizes = {"KIND": 0, "ROWS": triton_sides.ROWS, "COLUMNS": triton_sides.COLUMNS, "BLOCK": triton_sides.BLOCK}
    types = {"starts": "*i64", "table": "*i64", "leaves": "i32", "vectors": "i32"}
    for kernel in (triton_sides.tiles_kernel, triton_sides.planes_kernel):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=print_triton.CUDA_OPTIONS)
    steps = (("mul", ("x1", "x2"), 0), ("div", ("x0", "x3"), 0))
    made = program.Program((0, 0, 0), (), (), steps, ((0, "x4"),), (0,), (), spread=("", "rows", "columns"))
    return interpreted.compiled(made)
