"""Formulas in C: the bits of torch's operations for any program, on any leaves and any number of threads."""

from __future__ import annotations

import list_programs
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from zerofn.kernels import native, print_c  # inside: kernels by themselves

pytestmark = pytest.mark.skipif(native.quiet_compiler() is None, reason="no C compiler")

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


@pytest.mark.parametrize("examples", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_bits_are_those_of_torch_for_any_program(examples):
    # A smaller program would take the compiler again: a failure is shown as it is found.
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(list_programs.programs(KINDS, SIZES, more=True), st.booleans())
    def holds(drawn, shares):
        check(drawn, shares)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_has_the_bits_of_torch(kind):
    check(list_programs.each_operation(kind, SIZES))
