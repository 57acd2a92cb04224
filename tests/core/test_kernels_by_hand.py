"""A kernel by hand runs in the place of a formula where it says so, and nowhere else."""

from __future__ import annotations

import pytest
import torch

import zerofn as zf
from zerofn.extend import Coded, like, optimizer, with_kernel
from zerofn.kernels import lists  # inside: from which size on programs run
from zerofn.kernels.program import printer_for  # inside: whether they run

# How many of two leaves a kernel by hand is given, if a program of the formula can update the other.
ONE = 2 if printer_for(torch.device("cpu")) is None else 1


def formula(p, g, slots, at):
    m = slots["m"] * at.numbers["beta"] + g
    return p - at.lr * m, {"m": m}


def plain():
    return optimizer("heavy_ball", 0.5, {"m": like}, formula, numbers={"beta": 0.75}, in_fp32=True)


def by_hand(seen, takes=None):
    """An optimizer with a kernel that notes where it runs, and how often."""

    def run(leaves):
        seen.append((leaves.where, len(leaves.params)))
        for p, g, m in zip(leaves.params, leaves.grads, leaves.slots["m"], strict=True):
            m.mul_(leaves.numbers["beta"]).add_(g)
            p.sub_(leaves.lr * m)

    return with_kernel(plain(), run, takes)


def updated(tx, steps=2, params=None):
    params = {"a": torch.linspace(-1, 1, 512).view(2, 256), "b": torch.ones(3)} if params is None else params
    state = zf.init(tx, params)
    for i in range(steps):
        state, _ = zf.update(tx, {k: x * 0.5 + i for k, x in params.items()}, state)
    return state.params


@pytest.mark.parametrize(
    ("of", "takes", "where"),
    [
        (lambda tx: tx, None, [("step", 2)] * 2),
        # Decoded for the kernel; or, of two leaves, one is codes, which a program of the formula updates.
        (zf.quantize, None, [("step", 2)] * 2),
        (
            zf.quantize,
            lambda leaves: [isinstance(m, Coded) for m in leaves.slots["m"]],
            [("step", ONE)] * 2,
        ),
        (lambda tx: zf.chain(zf.precision(store_dtype=torch.bfloat16, rounding="stochastic"), tx), None, []),
    ],
    ids=["step", "decoded", "stored", "rounded at random"],
)
def test_it_runs_where_it_says_so_and_nowhere_else(monkeypatch, of, takes, where):
    monkeypatch.setattr(lists, "LARGE", 1)
    seen = []
    mine, theirs = updated(of(by_hand(seen, takes))), updated(of(plain()))
    assert all(torch.equal(mine[k], theirs[k]) for k in theirs) and mine["a"].std() > 0
    assert seen == where


def test_members_of_a_batch_are_one_list_and_a_derivative_is_that_of_the_formula():
    seen = []
    tx = by_hand(seen)
    many = {"w": torch.linspace(-1, 1, 12).view(3, 4)}
    found = torch.func.vmap(lambda x: updated(tx, 1, {"w": x})["w"])(many["w"])
    assert seen == [("step", 3)]
    assert torch.equal(found, torch.stack([updated(plain(), 1, {"w": x})["w"] for x in many["w"]]))
    # p - lr * (p / 2), with a gradient of half of the parameter.
    slope = torch.func.grad(lambda x: updated(tx, 1, {"w": x})["w"].sum())(torch.ones(2))
    torch.testing.assert_close(slope, torch.full((2,), 0.75))


MAKERS = {
    "sgd": lambda: zf.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: zf.lion(0.1, weight_decay=0.1),
    "adan": lambda: zf.adan(0.1),
    "rmsprop": lambda: zf.rmsprop(0.1, centered=True),
    "adabelief": lambda: zf.adabelief(0.1),
    "low precision": lambda: zf.low_precision_adam(0.1, state_dtype=torch.float32, rounding="nearest"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_program_has_the_derivative_of_its_formula(monkeypatch, name):
    """Of large leaves, in fp32: the reversed formula is the derivative, and the values have the same bits."""
    x = {"a": torch.linspace(-1, 1, 40).view(4, 10), "b": torch.linspace(0.5, 2, 7)}
    weights = {k: torch.cos(torch.arange(float(v.numel()))).view(v.shape) for k, v in x.items()}

    def total(x):
        new = updated(MAKERS[name](), 2, x)
        return sum((new[k] * weights[k]).sum() for k in new), new

    (small, values), (large, others) = (
        torch.func.grad(total, has_aux=True)(x)
        for least in (lists.LARGE, 1)
        if monkeypatch.setattr(lists, "LARGE", least) is None
    )
    for k in x:
        assert torch.equal(values[k], others[k])
        torch.testing.assert_close(large[k], small[k], rtol=1e-4, atol=1e-5)
        assert large[k].abs().max() > 0.1


def test_only_an_optimizer_of_a_formula_has_one():
    norms = optimizer("by_norm", 0.1, {}, lambda p, g, slots, at: ([g], lambda n: (p - g / n, {})), of_norms=True)
    for tx in (zf.clip_by_value(1.0), norms):
        with pytest.raises(TypeError, match="without of_norms"):
            with_kernel(tx, print)
