"""A formula is traced once: its numbers are data, its questions hold the trace, and what is no program runs anyway."""

from __future__ import annotations

import math

import list_programs
import pytest
import torch
from compilers import needs_compiler

import zerofn as zf
from zerofn.extend import optimizer
from zerofn.kernels import lists, print_c, program  # inside: which leaves are lists, and kernels by themselves
from zerofn.kernels.numbers import NotOnLists  # inside: why there is no program
from zerofn.kernels.plans import MOST, Plans  # inside: how often a formula is traced

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """Programs run by torch's operations: no test here waits for a compiler."""

    def run(program, columns, numbers, scalars, each=True, draws=None, entries=()):
        drawn = list_programs.Drawn(program, numbers, [], 0, 0, draws)
        return list_programs.by_torch(drawn, columns)

    monkeypatch.setattr(print_c, "run", run)
    monkeypatch.setattr(lists, "LARGE", 1)


def refused(plans, columns, numbers=None, **how):
    """Why lists are not computed together; empty if they are. A user never sees this error."""
    try:
        plans.run(columns, numbers or {}, **how)
    except NotOnLists as error:
        return str(error)
    return ""


X = torch.tensor([1.5, -0.25, 3.0])
# Formulas of one tensor and of numbers, as users write them.
FORMULAS = {
    "arithmetic": lambda x, n: x * (1 - n["a"]) + n["b"] * (2 - n["a"]) / (n["b"] + 1) - (-n["a"]),
    "powers": lambda x, n: x / (1 - n["a"] ** n["count"]) * 2 ** -n["count"],
    "bounds": lambda x, n: x.clamp(-n["a"], n["b"]),
    "where": lambda x, n: torch.where(x > n["a"], x, n["b"]),
    "weights": lambda x, n: torch.lerp(x, x * x, n["a"]),
    "twice": lambda x, n: x + n["a"] if n["a"] > n["b"] else x - n["b"],
    "a flag": lambda x, n: x * n["b"] if n["a"] else x,
    "the first": lambda x, n: x * n["a"] if n["count"] == 1 else x - n["a"],
    "a place in a row": lambda x, n: max(n["a"], n["b"]) * x + min(n["a"], 0.5),
    "between": lambda x, n: x * 2 if 0.25 <= n["a"] < 0.75 else x * 3,
}
NUMBERS = [
    {"a": a, "b": b, "count": count}
    for a, b, count in [(0.5, 0.25, 1), (0.125, 2.0, 2), (0.0, 0.5, 1), (0.75, 0.25, 3), (0.5, 0.75, 2)]
]


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_of_each_step_are_those_that_the_formula_gets(name):
    plans = Plans(lambda given, n, about: ([FORMULAS[name](given[0], n)], []))
    for numbers in [*NUMBERS, *NUMBERS]:
        if name == "powers" and numbers["a"] == 1:
            continue
        (found,), _ = plans.run([[X.clone(), X[:1].clone()]], numbers)
        for got, x in zip(found, (X, X[:1]), strict=True):
            torch.testing.assert_close(got, FORMULAS[name](x, numbers), rtol=3e-7, atol=0)


def traces(formula, numbers):
    """How often a formula is traced for these numbers."""
    count = []

    def counted(given, n, about):
        count.append(1)
        return [formula(given[0], n)], []

    plans = Plans(counted)
    for given in numbers:
        plans.run([[X.clone()]], given)
    return len(count)


def test_other_numbers_are_the_same_plan_and_another_answer_is_another():
    assert traces(FORMULAS["arithmetic"], NUMBERS) == traces(FORMULAS["where"], NUMBERS) == 1
    assert traces(FORMULAS["the first"], NUMBERS) == traces(FORMULAS["a flag"], NUMBERS) == 2
    assert traces(FORMULAS["twice"], NUMBERS) == 2
    # torch's lerp starts from the nearer end.
    assert traces(FORMULAS["weights"], NUMBERS) == 2


def test_a_plan_is_of_one_dtype_and_one_setting():
    plans = Plans(lambda given, n, about: ([given[0] * n["a"] if about else given[0] + n["a"]], []))
    for x in (X, X.bfloat16()):
        for about in (True, False):
            (found,), _ = plans.run([[x]], {"a": 2.0}, about=about)
            assert torch.equal(found[0], x * 2 if about else x + 2) and found[0].dtype == x.dtype
    assert [len(of) for of in plans.known.values()] == [1, 1, 1, 1]


def by_cases(x, n):
    """Asks another question for each count."""
    for k in range(100):
        if n["count"] == k:
            return x * k
    return x


def test_a_formula_with_an_answer_for_each_step_is_traced_a_few_times_only():
    plans = Plans(lambda given, n, about: ([by_cases(given[0], n)], []))
    for count in range(MOST):
        plans.run([[X]], {"count": count})
    assert "asks too much" in refused(plans, [[X]], {"count": MOST})
    (found,), _ = plans.run([[X]], {"count": 3})
    assert torch.equal(found[0], X * 3)


def made(formula, slots=None):
    def named(p, g, olds, at):
        return formula(p, g, at), olds

    return optimizer("mine", 0.5, slots or {}, named, numbers={"beta": 0.25}, in_fp32=True)


def stepped(tx, steps=2):
    state = zf.init(tx, {"w": X.clone(), "v": torch.ones(2, 2)})
    for i in range(steps):
        state, _ = zf.update(tx, {"w": X + i, "v": torch.full((2, 2), 2.0)}, state)
    return state.params


# What a list of tensors or a traced number does not have.
REFUSED = {
    "float": lambda p, g, at: p - float(at.lr) * g,
    "math": lambda p, g, at: p - math.sqrt(at.numbers["beta"]) * g,
    "floor": lambda p, g, at: p - math.floor(at.count + 0.5) * g,
    "text": lambda p, g, at: p - float(f"{at.lr:.2f}") * g,
    "tensor": lambda p, g, at: p - torch.tensor([at.lr]) * g,
    "index": lambda p, g, at: p - [0.5, 0.25, 0.125, 1.0][at.count] * g,
    "remainder": lambda p, g, at: p - (at.count % 2) * g,
    "shape": lambda p, g, at: p - g / g.shape[0],
    "view": lambda p, g, at: p - g.flatten().view(g.shape),
    "operation": lambda p, g, at: p - g.tanh(),
    "branch": lambda p, g, at: p - g if bool((g == g).all()) else p,
    "item": lambda p, g, at: p - g * sum(g.flatten().tolist()),
    "numpy": lambda p, g, at: p - torch.from_numpy(g.numpy()),
    "dtype": lambda p, g, at: (p.double() - g.double()).float(),
    "cases": lambda p, g, at: by_cases(p - g, {"count": at.count + 40}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_program_runs_as_it_is(name, monkeypatch):
    found = stepped(made(REFUSED[name]), 3)
    monkeypatch.setattr(lists, "LARGE", 1 << 30)
    want = stepped(made(REFUSED[name]), 3)
    for path in want:
        torch.testing.assert_close(found[path], want[path], rtol=1e-6, atol=0)


def wrong_always(p, g, at):
    raise ValueError("mine")


def wrong_sizes(p, g, at):
    return p + torch.ones(7)


def wrong_name(p, g, at):
    return p - at.numbers["gamma"] * g


@pytest.mark.parametrize(
    ("formula", "error"), [(wrong_always, ValueError), (wrong_sizes, RuntimeError), (wrong_name, KeyError)]
)
def test_a_real_error_is_that_of_a_tensor(formula, error):
    with pytest.raises(error) as raised:
        stepped(made(formula))
    assert raised.traceback[-1].name == formula.__name__


def test_a_wrong_length_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(print_c, "run", lambda *_: pytest.fail("read"))
    plans = Plans(lambda given, n, about: ([given[0] - given[1]], []))
    for other in ([torch.ones(2)], [torch.ones(4)], [torch.ones(3, 2)], [torch.ones(0)]):
        p = X.clone()
        assert refused(plans, [[p], other], into=[0])
        assert torch.equal(p, X)
    # As many elements, in another order in memory.
    square = torch.arange(6.0).view(2, 3)
    assert refused(plans, [[square], [torch.arange(6.0).view(3, 2).mT]], into=[0])
    x = program.TensorList([X.clone()])
    x.add_(program.TensorList([torch.ones(2)]))
    assert program.Traced([x]).run([x], []) is None


def test_a_result_that_is_an_argument_is_not_written():
    plans = Plans(lambda given, n, about: ([given[1], given[0] * 2], []))
    (same, new), _ = plans.run([[X], [X + 1]], {}, into=[None, None])
    assert torch.equal(same[0], X + 1) and torch.equal(new[0], X * 2)
    kept = [X.clone()]
    version = kept[0]._version
    plans.run([kept, [X + 1]], {}, into=[1, 0])
    assert torch.equal(kept[0], X * 2) and kept[0]._version > version
