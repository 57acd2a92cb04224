"""Formulas in C: the bits of torch's operations for any program, on any leaves and any number of threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import list_programs
import pytest
import torch
from compilers import needs_compiler
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from time_limits import limit

import zerofn as zf
from zerofn.kernels import lists, native, print_c  # inside: kernels by themselves
from zerofn.kernels.program import Draws, Program  # inside: as above

pytestmark = needs_compiler

# A line has 32 elements; leaves of the last size are computed on several threads.
SIZES = (0, 1, 31, 32, 33, 63, 100, 16_384 * 3 + 5)
KINDS = (list_programs.F32, list_programs.BF16, list_programs.F16, list_programs.F64)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Kernels of random programs are not kept for the user."""
    native.quiet_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "random_kernels"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def by_c(drawn, columns, threads=1):
    torch.set_num_threads(threads)
    found = print_c.run(drawn.program, columns, drawn.numbers, [], True, drawn.draws)
    assert found is not None
    return found


def check(drawn, shares=False):
    """That C has the bits of torch's operations, and the same bits on two and three threads, sums too."""
    theirs = list_programs.tensors(drawn)
    want = list_programs.by_torch(drawn, theirs)
    sums = []
    for threads in (1, 2, 3):
        mine = list_programs.tensors(drawn)
        written = {column for column, _ in drawn.program.stores}
        for column, kind in drawn.program.kinds.items():
            # A result in the memory of a column that is read.
            free = [c for c in range(len(drawn.program.loads)) if c not in written and drawn.program.kinds[c] == kind]
            if shares and column >= len(drawn.program.loads) and free:
                mine[column] = mine[free[0]]
                written.add(free[0])
        sums.append(by_c(drawn, mine, threads))
        kept = [c for c in range(len(mine)) if c in dict(drawn.program.stores) or c not in written]
        assert list_programs.different([mine[c] for c in kept], [theirs[c] for c in kept]) == [], (threads, drawn)
    assert all(torch.equal(x.view(torch.int64), sums[0].view(torch.int64)) for x in sums[1:]), drawn
    if drawn.program.sums:
        assert list_programs.different_sums(drawn, sums[0], want, 1e-12) == [], drawn


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_bits_are_those_of_torch_for_any_program(examples):
    # A smaller program would take the compiler again: a failure is shown as it is found.
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(list_programs.programs(KINDS, SIZES, more=True), st.booleans())
    def holds(drawn, shares):
        check(drawn, shares)

    holds()


@pytest.mark.parametrize("kind", [KINDS[0], *[pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:]]])
def test_each_operation_has_the_bits_of_torch(kind):
    check(list_programs.each_operation(kind, SIZES))


def test_masters_and_random_bits_have_the_bits_of_torch():
    """A residual of each value beside each kind of number; bits of two streams, behind 2**32 elements."""
    steps = (
        ("to", ("x0",), 0),
        ("joined", ("x2", "x1"), 0),
        ("mul", ("x3", "n0"), 0),
        ("upper_half", ("x4",), 1),
        ("residual", ("x4",), 6),
        ("random", ("x4", "r0", "16"), 1),
        ("random", ("x4", "r2", "0"), 2),
    )
    made = Program(
        (1, 6), (), (0,), steps, ((0, "x5"), (1, "x6"), (2, "x7"), (3, "x8")), (1, 6, 1, 2), ("x4",), (0, 2), 2
    )
    draws = Draws(2**62 + 5, 7, 2, [3, 2**40], [2**32 - 700, 5])
    check(list_programs.Drawn(made, [1.25], [70_001, 33], 1, 3, draws))


def test_sums_have_the_same_bits_on_any_number_of_threads():
    """Of numbers whose sums are rounded in float64."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, generator=generator) for n in (16_384 * 5 + 3, 0, 70_001, 1)]
    xs = [x * torch.randint(-40, 9, x.shape, generator=generator).float().exp2() for x in xs]
    made = Program((0,), (), (), (("mul", ("x0", "x0"), 0),), (), (), ("x0", "x1"))
    drawn = list_programs.Drawn(made, [], [], 0, 0, None)
    found = [by_c(drawn, [xs], threads) for threads in (1, 2, 3)]
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
    want = torch.stack([torch.stack([y.double().sum() for y in (x, x.double() ** 2)]) for x in xs], 1)
    torch.testing.assert_close(found[0], want, rtol=1e-11, atol=1e-11)


def test_padding_of_the_last_line_is_not_added_up(monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)
    leaves = {"w": torch.full((33,), 2.0), "v": torch.ones(3)}
    found = zf.extend.sums_over_leaves(lambda x: [(x + 1).sum(), (x == x).to(x.dtype).sum()], leaves)
    assert {path: x.tolist() for path, x in found.items()} == {"w": [99.0, 33.0], "v": [6.0, 3.0]}


@pytest.mark.parametrize("kind", [list_programs.F32, list_programs.BOOL])
def test_a_result_in_the_memory_of_another_column_does_not_change_what_is_read(kind):
    """Plain copies, which a compiler moves: the first column becomes the second, whose memory gets the first."""
    made = Program((kind, kind), (), (), (), ((2, "x0"), (0, "x1")), (kind, kind), ())
    for size in (3, 100):
        x, y = (torch.arange(size) % 2 == i for i in (0, 1))
        x, y = x.to(list_programs.DTYPES[kind]), y.to(list_programs.DTYPES[kind])
        first, second = x.clone(), y.clone()
        assert print_c.run(made, [[first], [second], [second]], [], []) is not None
        assert torch.equal(first, y) and torch.equal(second, x)


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
@pytest.mark.parametrize("sums", [(), ("x1",)])
def test_formulas_of_any_length_are_computed_in_vectors(steps, sums, tmp_path):
    """By itself gcc unrolls a loop of few instructions, and then computes one number after the other."""
    command = native.quiet_compiler()
    if "Free Software" not in subprocess.run([*command, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("gcc tells what it has made of a loop")
    chain = tuple([("add" if i % 2 else "mul", (f"x{i + 1}", "x0" if i % 2 else "n0"), 0) for i in range(steps)])
    program = Program((0, 0), (), (0,), chain, ((0, f"x{steps + 1}"),), (0,), sums)
    text = print_c.source(program)
    (tmp_path / "formula.c").write_text(text)
    where = ["-I", str(Path(print_c.__file__).parent), str(tmp_path / "formula.c"), "-o", str(tmp_path / "formula.so")]
    made = [*command, *native.FLAGS, *native.TUNING[0], "-fopt-info-vec-optimized", *where]
    told = subprocess.run(made, capture_output=True, text=True, timeout=limit(60))
    if told.returncode:
        pytest.skip("the compiler does not know this processor")
    pairs = next(i for i, line in enumerate(text.splitlines(), 1) if "i += 2) pair(" in line)
    # Once for whole lines, once for the last elements.
    assert told.stderr.count(f"formula.c:{pairs}:5: optimized: loop vectorized") == 2, told.stderr
