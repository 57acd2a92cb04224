"""Programs in C of whole transforms, against torch's operations leaf by leaf: the same bits in every row."""

import pytest
import torch
from test_kernels import needs_compiler
from transforms_table import ROWS, SAMPLE, in_turn

import zerofn as zf
from zerofn.core.tree import flatten  # inside: all tensors of a state
from zerofn.extend import direction, like
from zerofn.kernels import lists  # inside: from how many elements on a kernel runs

SHAPES = {"w": (6, 4), "b": (17,), "empty": (0, 3)}


def after(tx, dtype=torch.float32, donate=False, steps=3, **given):
    draws = torch.Generator().manual_seed(0)
    params = {k: torch.randn(s, generator=draws).to(dtype) for k, s in SHAPES.items()}
    state = zf.init(tx, params)
    step = zf.make_step(lambda p, i: sum((x.float() * (x.float() - i)).sum() for x in p.values()), tx, donate=donate)
    for i in range(steps):
        state, _ = step(state, float(i), **given)
    return [x.clone() for x in flatten(state)[0] if isinstance(x, torch.Tensor)]


def equal(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "donate"), in_turn("laws", (x for x, row in ROWS.items() if not row.loss), (False, True))
)
def test_kernels_and_operations_have_the_same_bits(name, donate, monkeypatch):
    tx, given = ROWS[name].trained(SAMPLE), {"weight": 2.0} if ROWS[name].weighted else {}
    monkeypatch.setattr(lists, "LARGE", 1 << 60)
    by_operations = after(tx, donate=donate, **given)
    monkeypatch.setattr(lists, "LARGE", 0)
    assert equal(after(tx, donate=donate, **given), by_operations)


def twice(p, g, slots, at):
    """One value as two results, and an argument unchanged."""
    m = at.numbers["beta"] * slots["m"] + g
    return m, {"m": m, "same": m, "old": slots["old"]}


@needs_compiler
@pytest.mark.parametrize("beta", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("donate", [False, True], ids=["new", "donated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_value_may_be_several_results(dtype, donate, beta, monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 0)
    slots = dict.fromkeys(("m", "same", "old"), like)
    tx = zf.chain(direction("twice", slots, twice, {"beta": beta}), zf.trace(0.5), zf.scale_by_lr(0.125))
    params = {"w": torch.arange(-20.0, 20.0).to(dtype)}
    state = zf.init(tx, params)
    step = zf.make_step(lambda p: (p["w"] * torch.ones(40)).sum(), tx, donate=donate)
    for _ in range(3):
        state, _ = step(state)
    # Gradients of one: directions 1, 1.5, 1.75; their momentum 1, 2, 2.75, an eighth of which is a step.
    own = state.transforms["twice"]
    assert own["m"]["w"].eq(1.75).all() and own["same"]["w"].eq(1.75).all() and own["old"]["w"].eq(0).all()
    assert state.transforms["trace"]["momentum"]["w"].eq(2.75).all()
    assert not donate or len({own[slot]["w"].data_ptr() for slot in slots}) == 3
    expected = torch.arange(-20.0, 20.0)
    for change in (1.0, 2.0, 2.75):
        expected = (expected - change / 8).to(dtype).float()
    assert state.leaves["w"].float().equal(expected)
