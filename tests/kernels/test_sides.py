"""Rows and columns of matrices in printed programs, sums over them, and optimizers that update leaves together."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import side_programs
import torch
from interpreted import by_the_compiler
from time_limits import limit

import zerofn as zf
from zerofn.core.leaf_updates import LeafFormula  # inside: which leaves are updated together
from zerofn.extend import with_lists
from zerofn.kernels import lists, print_c  # inside: from which size on programs run, and what runs them
from zerofn.kernels.program import printer_for  # inside: whether there is a compiler
from zerofn.transforms.shampoo import spectrum  # inside: of a stack, which is on a GPU alone

printed = pytest.mark.skipif(printer_for(torch.device("cpu")) is None, reason="there is no C compiler")
triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
DTYPES = (torch.float32, torch.bfloat16)


@printed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_of_rows_and_columns_have_the_bits_of_torchs_broadcasting(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same, off = side_programs.compare(dtype)
    finally:
        torch.set_num_threads(before)
    assert all(same) and off < 1e-12


@triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_they_have_in_triton(apart, dtype):
    same, off, of_sides = apart.submit(side_programs.by_triton, dtype).result(timeout=limit())
    assert all(same) and off < 1e-6 and of_sides < 1e-6


@triton
def test_they_are_compiled_for_an_h100():
    found = by_the_compiler(side_programs.compiled)
    assert found["ld.global.v4.b32"] == 2 and found["st.global.v4.b32"] == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_squares_of_rows_and_columns_on_the_host(dtype):
    torch.manual_seed(0)
    assert side_programs.sums_off(dtype) < 1e-6


@printed
@pytest.mark.parametrize("why", ["first", "written"])
def test_a_number_of_a_row_is_only_read(why):
    assert side_programs.refused(why).startswith("a number of a row")


def tree(seed: int) -> dict[str, torch.Tensor]:
    """Leaves that are updated together, and others: a stack, one in another order in memory, an empty one."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = {
        "a": (300, 250),
        "b": (8, 24),
        "c": (24,),
        "d": (3, 4, 5),
        "e": (),
        "f": (1, 9),
        "g": (9, 1),
        "h": (0, 3),
        "i": (8, 100),
    }
    found = {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
    return found | {"turned": torch.randn(6, 40, generator=drawn).t()}


# What is updated together: each has the bits of its formula on one leaf.
TOGETHER = {
    "adafactor": lambda: zf.adafactor(0.05, weight_decay=0.1),
    "shampoo": lambda: zf.shampoo(0.05, 0.5, 0.1, 0.1, update_freq=2, max_precond_dim=64),
    "soap": lambda: zf.soap(0.05, precondition_frequency=2, max_precond_dim=64),
    "soap, one side": lambda: zf.soap(0.05, precondition_frequency=1, max_precond_dim=30),
    "shampoo, plain": lambda: zf.shampoo(0.05, update_freq=2, max_precond_dim=30),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_kernel_that_cannot_be_built_changes_no_bit(name, monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)
    found = []
    for run in (print_c.run, lambda *given, **more: None):
        monkeypatch.setattr(print_c, "run", run)
        tx, params = TOGETHER[name](), tree(0)
        state = zf.init(tx, params)
        for seed in (1, 2, 3):
            state, _ = zf.update(tx, tree(seed), state)
        found.append([dict(state.params), state.transforms[tx.name]])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@printed
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(
    ("donate", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
def test_leaves_together_have_the_bits_of_leaves_alone(name, donate, dtype, monkeypatch):
    tx, calls, known = TOGETHER[name](), [], LeafFormula._by_lists

    def together(*given):
        left = known(*given)
        calls.append(len(given[1]) - len(left))
        return left

    def trained():
        state = zf.init(tx, {path: x.to(dtype) for path, x in tree(0).items()})
        step = zf.make_step(lambda p, g: sum((p[k] * g[k]).sum() for k in g), tx, donate=donate)
        for seed in range(1, 4):
            state, _ = step(state, {k: x.to(dtype) * 10.0 ** (seed - 2) for k, x in tree(seed).items()})
        return state

    monkeypatch.setattr(LeafFormula, "_by_lists", together)
    mine = trained()
    monkeypatch.setattr(LeafFormula, "_by_lists", lambda formula, group, *_: group)
    theirs = trained()
    assert calls == [(7 if name == "adafactor" else 8)] * 3
    for path, x in theirs.params.items():
        assert torch.equal(mine.params[path], x), path
    (kept,), (other,) = theirs.transforms.values(), mine.transforms.values()
    for slot, of in kept.items():
        for path, x in of.items() if isinstance(of, dict) else ():
            assert torch.equal(other[slot][path], x), (slot, path)


@printed
@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_eigenvectors_of_nan_are_named_and_nothing_of_their_shape_is_written(name):
    tx, params = TOGETHER[name](), {path: torch.randn(20, 300) for path in "ab"} | {"c": torch.randn(300, 300)}
    state = zf.init(tx, params)
    before = {slot: dict(of) for slot, of in next(iter(state.transforms.values())).items() if isinstance(of, dict)}
    grads = params | {"b": torch.full((20, 300), torch.nan)}
    with pytest.raises(FloatingPointError, match=rf"{name}: the eigenvectors of b\n"):
        zf.update(tx, grads, state)
    for slot, of in next(iter(state.transforms.values())).items():
        assert slot not in before or all(torch.equal(x, before[slot][path]) for path, x in of.items())


def test_a_stack_without_eigenvectors_names_its_leaf():
    stack = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)])
    with pytest.raises(FloatingPointError, match="soap: the eigenvectors of b\n"):
        spectrum("soap", ["a", "b"], stack)


def test_only_an_optimizer_of_a_formula_is_given_a_function_of_lists():
    with pytest.raises(
        TypeError, match=r"with_lists\(clip_by_value\(...\)\)(.|\n)*with_lists\(optimizer\(...\), run\)"
    ):
        with_lists(zf.clip_by_value(1.0), lambda *_: [])
