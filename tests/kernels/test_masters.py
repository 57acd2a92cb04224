"""24-bit masters: every pair of a bf16 number and a residual is one number, and the nearest one."""

import gc

import numpy as np
import pytest
import torch
from compilers import needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import zerofn as zf
from zerofn.extend import bf16_of_master, master_of, residual_of_master
from zerofn.kernels import masters  # inside: from which size on the kernel is called

BF16, F32 = torch.bfloat16, torch.float32
P = lambda: zf.precision(store_dtype="bf16+8")  # noqa: E731


def split_master(x):
    p, kept = x.to(BF16), torch.zeros_like(x, dtype=torch.int8)
    return bf16_of_master(p, x), residual_of_master(kept, x)


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("by", ["the formulas", pytest.param("C", marks=needs_compiler)])
def test_every_pair_is_one_number_and_back(by, monkeypatch):
    """All 2**24 pairs. In the order of their patterns, the masters of one sign rise by 256 from each to the next."""
    if by == "C":
        assert masters._checked() is not None
    else:
        monkeypatch.setattr(masters, "LARGE", 2**40)
    kept = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(0x7F7F)
    p = torch.arange(1, 0x7F80, dtype=torch.int16).repeat_interleave(256).view(BF16)
    x, y = master_of(p, kept), master_of(-p, kept)
    assert bits(x)[0] == 0x8000 and bits(x)[-1] == 0x7F7F7F00
    assert bool((bits(x).diff() == 256).all()) and torch.equal(bits(y), bits(-x))
    for same, whole in ((p, x), (-p, y)):
        back, again = split_master(whole)
        assert torch.equal(bits(back), bits(same)) and torch.equal(again, kept)


@pytest.mark.parametrize("special", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_a_residual_that_was_left_by_another_number_does_not_count(special):
    """Somebody may have written zero over a parameter: a residual of -1 would make a NaN of its pattern."""
    kept = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    x = master_of(torch.full((256,), special, dtype=BF16), kept)
    assert torch.equal(x.nan_to_num(7.0), torch.full((256,), special).nan_to_num(7.0))
    assert bool((x.signbit() == torch.tensor(special).signbit()).all())


@given(arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_any_pattern_is_rounded_as_the_formula_in_float64(patterns):
    """16 significant bits to nearest, ties to even; the bf16 number is the nearest to that."""
    x = torch.from_numpy(patterns.view(np.float32).copy())
    p, kept = split_master(x)
    assert torch.equal(p.isnan(), x.isnan())
    found, wide = master_of(p, kept).double(), x.double()
    _, exponent = torch.frexp(wide)
    unit = torch.ldexp(torch.ones_like(wide), exponent.clamp(min=-125) - 16)
    expected = (wide / unit).round() * unit
    # What is nearest to zero or infinity among the bf16 numbers is that.
    expected = torch.where(p == 0, torch.copysign(torch.zeros_like(wide), wide), expected)
    expected = torch.where(p.isinf(), p.double(), expected)
    there = ~x.isnan()
    assert torch.equal(found[there], expected[there])
    usual = there & (x.abs() >= 2.0**-126) & p.isfinite()
    assert bool(((found - wide).abs() <= 2.0**-16 * wide.abs())[usual].all())
    apart = (p.double() - expected).abs()
    assert bool((apart <= (x.to(BF16).double() - expected).abs())[usual].all())


def test_ties():
    """Of the last 8 bits to even; of the residual away from zero, which leaves it the range from -128 to 127."""
    patterns = torch.tensor([0x3F800080, 0x3F800180, 0x3F808000, 0x3F807F80, 0x3F807F7F], dtype=torch.int32)
    p, kept = split_master(patterns.view(F32))
    assert [hex(x) for x in bits(p)] == ["0x3f80", "0x3f80", "0x3f81", "0x3f81", "0x3f80"]
    assert kept.tolist() == [0, 2, -128, -128, 127]


def test_an_update_is_that_of_fp32_masters_rounded_once():
    """Against float64, step by step from the same masters: each stored number is within 2**-16 of the formula's."""
    torch.manual_seed(0)
    lr, params = 1e-3, {"w": torch.randn(40, 5), "gain": torch.ones(7)}
    tx = zf.chain(P(), zf.sgd(lr, momentum=0.9))
    state = zf.init(tx, params)
    momentum = {k: torch.zeros_like(x, dtype=torch.float64) for k, x in params.items()}
    for _ in range(5):
        before = {k: master_of(x, state.transforms["sgd"]["master_residual"][k]) for k, x in state.leaves.items()}
        grads = {k: torch.randn_like(x).to(BF16) for k, x in params.items()}
        state, _ = zf.update(tx, grads, state)
        for k, x in before.items():
            momentum[k] = 0.9 * momentum[k] + grads[k].double()
            expected = x.double() - lr * momentum[k]
            after = master_of(state.leaves[k], state.transforms["sgd"]["master_residual"][k])
            assert float(((after.double() - expected) / expected).abs().max()) <= 2.0**-16 + 2.0**-23
            assert torch.equal(state.leaves[k], after.to(BF16)) or k == "w"


def test_fp32_parameters_become_masters_on_request():
    """As the formula rounds them; and a run goes on from there."""
    wide, tx = zf.chain(zf.precision(store_dtype=F32), zf.adamw(0.1)), zf.chain(P(), zf.adamw(0.1))
    params = {"w": torch.randn(5, 3)}
    old, _ = zf.update(wide, {"w": torch.ones(5, 3)}, zf.init(wide, params))
    new = zf.quantize_state(tx, old, like=zf.init(tx, params))
    p, kept = split_master(old.leaves["w"])
    assert torch.equal(new.leaves["w"], p) and torch.equal(new.transforms["adamw"]["master_residual"]["w"], kept)
    assert kept.any() and torch.equal(new.transforms["adamw"]["exp_avg"]["w"], old.transforms["adamw"]["exp_avg"]["w"])
    for state, of in ((old, wide), (new, tx)):
        after, _ = zf.update(of, {"w": torch.ones_like(state.leaves["w"])}, state)
        torch.testing.assert_close(after.leaves["w"].float(), old.leaves["w"] - 0.1, rtol=0.01, atol=0.01)


def test_updates_that_bf16_loses_add_up():
    """100 steps of 2e-4 from 1: half the gap of bf16 is 20 times, and of masters a thirteenth of, a step."""
    ones, grads = {"w": torch.ones(8)}, {"w": torch.ones(8, dtype=BF16)}
    ends = {}
    for name, dtypes in {"bf16": zf.precision(store_dtype=BF16), "bf16+8": P()}.items():
        tx = zf.chain(dtypes, zf.sgd(2e-4))
        state = zf.init(tx, ones)
        for _ in range(100):
            state, _ = zf.update(tx, grads, state)
        ends[name] = state
    assert torch.equal(ends["bf16"].leaves["w"], torch.ones(8, dtype=BF16))
    own = ends["bf16+8"]
    end = master_of(own.leaves["w"], own.transforms["sgd"]["master_residual"]["w"])
    torch.testing.assert_close(end, torch.full((8,), 0.98), rtol=0, atol=100 * 2.0**-17)


def test_derivatives_pass_through_as_with_fp32_parameters():
    w, c = torch.randn(6).to(BF16).float(), torch.randn(6)

    def run(lr, dtypes):
        tx = zf.chain(dtypes, zf.sgd(lr))
        step = zf.make_step(lambda p: (p["w"].float() * c).square().sum(), tx)
        state = zf.init(tx, {"w": w})
        for _ in range(3):
            state, _ = step(state)
        return state.params["w"].float().square().sum()

    at = torch.tensor(0.01)
    wide = torch.func.grad(lambda lr: run(lr, zf.precision(store_dtype=F32)))(at)
    for derivative in (torch.func.grad, torch.func.jacfwd):
        assert torch.allclose(derivative(lambda lr: run(lr, P()))(at), wide, rtol=0.02), derivative


def test_leaves_by_label_frozen_ones_and_members():
    params = {"w": torch.ones(3), "wide": torch.ones(3), "still": torch.ones(3)}
    dtypes = zf.precision(store_dtype={"n": "bf16+8", "w": F32}, labels=lambda path: "w" if path == "wide" else "n")
    tx = zf.chain(dtypes, zf.partition({"a": zf.sgd(0.1), "none": None}, lambda p: "none" if p == "still" else "a"))
    state = zf.init(tx, params)
    assert {k: x.dtype for k, x in state.leaves.items()} == {"w": BF16, "wide": F32, "still": BF16}
    assert list(state.transforms["partition"]["a"]["master_residual"]) == ["w"]
    grads = {k: torch.ones_like(x) for k, x in state.leaves.items()}
    state, _ = zf.update(tx, grads, state)
    # 0.9 is 0.8984375 and 102.4 of 256 parts of 2**-8.
    assert state.leaves["w"][0] == 0.8984375
    assert int(state.transforms["partition"]["a"]["master_residual"]["w"][0]) == 102


@pytest.mark.parametrize("optimizer", [zf.adamw(1e-3), zf.quantize(zf.adamw(1e-3))])
def test_masters_are_gone_after_an_update(optimizer):
    """Also without a collection of garbage: only two moments, if they are kept so, are as large in fp32."""
    numel = 1 << 14
    state = zf.init(zf.chain(P(), optimizer), {"w": torch.zeros(128, 128)})
    grads = {"w": torch.ones(128, 128, dtype=BF16)}
    gc.collect()
    gc.disable()
    try:
        before = sum(1 for x in gc.get_objects() if type(x) is Tensor and x.dtype is F32 and x.numel() == numel)
        state, _ = zf.update(zf.chain(P(), optimizer), grads, state)
        after = sum(1 for x in gc.get_objects() if type(x) is Tensor and x.dtype is F32 and x.numel() == numel)
    finally:
        gc.enable()
    assert after == before == (2 if optimizer.factory is zf.adamw else 0)
    assert bool(state.leaves["w"].any())
