"""Two programs as one have the bits of one after the other, whatever memory they share and whoever holds results."""

from __future__ import annotations

import gc
import weakref

import list_programs
import pytest
import torch
from compilers import needs_compiler
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerofn.kernels import print_c, print_torch, program  # inside: printers by themselves
from zerofn.kernels.joined import Passes, Run, joined, without  # inside: kernels by themselves
from zerofn.kernels.program import Program  # inside: as above

SIZES = (0, 1, 31, 33, 70)
KINDS = (list_programs.F32, list_programs.BF16, list_programs.F64)
DOUBLE = Program((0,), (), (), (("add", ("x0", "x0"), 0),), ((0, "x1"),), (0,), ())


@st.composite
def pairs(draw):
    """Two random programs on leaves of the same lengths, and columns of the second that are memory of the first."""
    first, second = (draw(list_programs.programs(KINDS, SIZES, more=True)) for _ in range(2))
    assume(not (first.draws and second.draws))
    longest = max(first, second, key=lambda x: len(x.sizes))
    second = second._replace(sizes=longest.sizes, draws=_as_long(second.draws, longest.sizes))
    first = first._replace(sizes=longest.sizes, draws=_as_long(first.draws, longest.sizes))
    kinds, free = first.program.kinds, sorted(first.program.kinds)
    same = []
    for _, kind in sorted(second.program.kinds.items()):
        fitting = [None, *[i for i in free if kinds[i] == kind]]
        same.append(draw(st.sampled_from(fitting)))
        free = [i for i in free if i != same[-1]]
    return first, second, tuple(same)


def _as_long(draws, sizes):
    """Draws with a key and an offset for each leaf."""
    if draws is None:
        return None
    n = len(sizes)
    return draws._replace(keys=(draws.keys * n)[:n], offsets=(draws.offsets * n)[:n])


def _columns(first, second, same):
    """Columns of both programs, of which some are the same."""
    mine = list_programs.tensors(first)
    return mine, [
        column if i is None else mine[i] for column, i in zip(list_programs.tensors(second), same, strict=True)
    ]


def one_after_the_other(first, second, same, run):
    columns = _columns(first, second, same)
    sums = [run(x.program, of, x.numbers, [], True, x.draws) for x, of in zip((first, second), columns, strict=True)]
    return columns, [x for x in sums if x.numel()]


def as_one(first, second, same, run):
    made = joined(first.program, second.program, same)
    if made is None:
        return None
    columns = _columns(first, second, same)
    numbers = [*first.numbers, *second.numbers]
    found = run(
        made.program, [columns[of][i] for of, i in made.columns], numbers, [], True, first.draws or second.draws
    )
    return columns, [found] if found.numel() else []


def check(first, second, same, run):
    found = as_one(first, second, same, run)
    if found is None:
        return False
    (mine, theirs), sums = found
    (want, wanted), want_sums = one_after_the_other(first, second, same, run)
    assert list_programs.different([*mine, *theirs], [*want, *wanted]) == []
    # A leaf whose random bits get another key is added up in two parts.
    near = 1e-15 if any(map(_has_two_keys, (first, second))) else 0.0
    for x, y in zip(torch.cat(sums) if sums else [], torch.cat(want_sums) if want_sums else [], strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=near, atol=0.0, equal_nan=True)
    return True


def _has_two_keys(drawn):
    """Whether a leaf has random bits from before and behind 2**32 elements."""
    offsets = [] if drawn.draws is None else drawn.draws.offsets
    return any(offset >> 32 != (offset + n) >> 32 for offset, n in zip(offsets, drawn.sizes, strict=False))


def test_two_programs_as_one_have_the_bits_of_one_after_the_other():
    found = []

    @settings(max_examples=120)
    @given(pairs())
    def holds(drawn):
        found.append(check(*drawn, print_torch.run))

    holds()
    assert sum(found) > len(found) / 2


@needs_compiler
def test_in_c_too(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    @settings(max_examples=4)
    @given(pairs())
    def holds(drawn):
        check(*drawn, print_c.run)

    holds()


class Seen:
    """A printer that remembers the programs that ran."""

    def __init__(self):
        self.ran = []

    def can(self, made):
        return True

    def run(self, made, *given):
        self.ran.append(made)
        return print_torch.run(made, *given)


@pytest.fixture
def seen():
    return Seen()


def new(xs):
    """New memory, and references to it."""
    made = [torch.full_like(x, torch.nan) for x in xs]
    return made, [weakref.ref(x) for x in made]


SCALED = Program((0,), (), (0,), (("mul", ("x0", "n0"), 0),), ((1, "x1"),), (0,), ())
SUBTRACTED = Program((0, 0), (), (0,), (("mul", ("x1", "n0"), 0), ("sub", ("x0", "x2"), 0)), ((0, "x3"),), (0,), ())


@pytest.mark.parametrize("held", [False, True])
def test_a_value_between_two_formulas_is_written_if_somebody_holds_it(held, seen):
    """A clip before a descent: the scaled gradient is memory only if it is kept."""
    p, g = [torch.tensor([1.0, 2.0]), torch.ones(1)], [torch.tensor([4.0, -2.0]), torch.ones(1)]
    passes = Passes()
    scaled, references = new(g)
    passes.add(Run(SCALED, g, (g, references), (0.5,), None, seen))
    passes.add(Run(SUBTRACTED, p, (p, scaled), (0.25,), None, seen))
    kept = scaled if held else None
    del scaled
    gc.collect()
    passes.run()
    assert [x.tolist() for x in p] == [[0.5, 2.25], [0.875]]
    (ran,) = seen.ran
    assert len(ran.stores) == (2 if held else 1)
    if kept is not None:
        assert [x.tolist() for x in kept] == [[2.0, -1.0], [0.5]]


def test_of_a_new_column_some_leaves_may_be_gone(seen):
    g = [torch.tensor([4.0, -2.0]), torch.ones(1)]
    passes = Passes()
    (first, second), references = new(g)
    passes.add(Run(SCALED, g, (g, references), (0.5,), None, seen))
    del first
    passes.run()
    assert second.tolist() == [0.5]


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(lambda x, y: [y, x], id="in another order"),
        pytest.param(lambda x, y: [x, torch.ones(2)], id="of which one is the same"),
        pytest.param(lambda x, y: [x], id="fewer leaves"),
        pytest.param(lambda x, y: [x[:1], y[:1]], id="parts of the leaves"),
        pytest.param(lambda x, y: [x.view(torch.int32).view(torch.float32), y], id="another tensor of the same memory"),
        pytest.param(lambda x, y: [x.view(torch.bfloat16), y.view(torch.bfloat16)], id="another dtype"),
    ],
)
def test_programs_that_share_memory_see_what_was_written(theirs, seen):
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    want = [x.clone(), y.clone()]
    for tensors in ([x, y], want):
        passes = Passes()
        others = theirs(*tensors)
        kind = program.KINDS[others[0].dtype]
        double = DOUBLE._replace(loads=(kind,), steps=(("add", ("x0", "x0"), kind),), written=(kind,))
        passes.add(Run(DOUBLE, tensors, (tensors,), (), None, seen))
        if tensors is want:
            passes.run()
        passes.add(Run(double, others, (others,), (), None, seen))
        passes.run()
    assert torch.equal(x.view(torch.int32), want[0].view(torch.int32))
    assert torch.equal(y.view(torch.int32), want[1].view(torch.int32))


def test_memory_of_a_dead_result_that_another_tensor_got_is_no_column(seen):
    """An allocator gives memory again."""
    g = [torch.ones(64)]
    passes = Passes()
    for _ in range(20):
        made, references = new(g)
        passes.add(Run(SCALED, g, (g, references), (0.5,), None, seen))
        del made
        p = [torch.full((64,), 3.0)]
        passes.add(Run(DOUBLE, p, (p,), (), None, seen))
        passes.run()
        assert p[0].tolist() == [6.0] * 64


def test_results_are_changed_for_autograd_when_they_are_written(seen):
    x = [torch.ones(2)]
    passes = Passes()
    passes.add(Run(DOUBLE, x, (x,), (), None, seen))
    before = x[0]._version
    passes.run()
    assert before == 0 < x[0]._version


def test_what_is_dropped_is_no_column():
    both = Program((0,), (), (), (("neg", ("x0",), 0),), ((0, "x1"), (1, "x1"), (2, "x0")), (0, 0, 0), ())
    made, kept = without(both, frozenset({1}))
    assert kept == (0, 2) and made.stores == ((0, "x1"), (1, "x0")) and made.written == (0, 0)
