"""Adam on masters of 24 bits: in one pass it gives the bits of joining, updating and taking apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any
from unittest import mock

import interpreted
import pytest
import torch
from compilers import needs_compiler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from time_limits import limit

import zerofn as zf
from zerofn.core import optimizer  # inside: which leaves are updated as they are stored
from zerofn.extend import flatten
from zerofn.kernels import fused_adam, lists  # inside: whether Adam is a program, and from which size on

BF16, F32 = torch.bfloat16, torch.float32
TABLE: dict[str, Any] = {
    "adamw": lambda: zf.adamw(0.1, weight_decay=0.1),
    "adam": lambda: zf.adam(0.1, betas=(0.4, 0.9), weight_decay=0.1),
    "no decay": lambda: zf.adam(0.1),
    "8 bits": lambda: zf.quantize(zf.adamw(0.1, weight_decay=0.1)),
    "4 bits": lambda: zf.quantize(zf.adam(0.1, weight_decay=0.1), bits=4, block=64),
}
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3e-39, 1.2e-38, 1e-30, 1.5e19, 3.39e38, -3e38]


def updated(tx, params, residuals, grads, one_pass, odd=()):
    """The state after these updates, and how many leaves were updated in one pass."""
    leaves, large = 0, 0 if one_pass else 1 << 60

    def counted(*given):
        nonlocal leaves
        found = on_stored(*given)
        leaves += len(found)
        return found

    on_stored = optimizer.update_stored
    with mock.patch.object(lists, "LARGE", large), mock.patch.object(optimizer, "update_stored", counted):
        state = zf.init(tx, params)
        for place, value in odd:
            state.leaves["a"].view(-1)[place % state.leaves["a"].numel()] = value
        for path, x in residuals.items():
            state.transforms[list(state.transforms)[-1]]["master_residual"][path].copy_(x)
        for step in grads:
            state, _ = zf.update(tx, step, state)
    return state, leaves


def bits_of_torch(grad):
    """Whether torch's fused Adam is a program here: without vector instructions it has bits of its own."""
    return fused_adam.gives_bits(True, True, grad)


def same(a, b):
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
    return whole and torch.equal(*(x.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0) for x in (a, b)))


@needs_compiler
@settings(max_examples=40)
@given(
    st.sampled_from(list(TABLE)),
    st.sampled_from([(1,), (15,), (16,), (17,), (63,), (64,), (65,), (1000,), (3, 136), (2, 256), (8, 64)]),
    st.sampled_from([BF16, F32]),
    st.lists(st.tuples(st.integers(0, 9999), st.sampled_from(ODD)), max_size=8),
    st.lists(st.tuples(st.integers(0, 9999), st.sampled_from(ODD)), max_size=8),
    st.integers(0, 99),
)
@example("adamw", (65,), BF16, [(1, -0.0), (2, math.inf)], [(3, math.nan)], 0)
@example("8 bits", (2, 256), BF16, [(0, 1e-45)], [], 1)
def test_the_kernel_gives_the_bits_of_the_formula(name, shape, grad, odd, odd_grads, seed):
    """Also where a zero, an infinity or a NaN has the residual of a number that was there before."""
    tx = zf.chain(zf.precision(store_dtype="bf16+8", grad_dtype=grad), TABLE[name]())
    of = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=of) * 10 ** torch.randn(n, generator=of)  # noqa: E731
    params = {"a": draw(shape).to(BF16), "b": draw((3, 5)).to(BF16), "c": draw((2, 128)).to(BF16)}
    residuals = {k: torch.randint(-128, 128, x.shape, generator=of, dtype=torch.int8) for k, x in params.items()}
    grads = [{key: draw(x.shape).to(grad) for key, x in params.items()} for _ in range(2)]
    for place, value in odd_grads:
        grads[place % 2]["a"].view(-1)[place % grads[0]["a"].numel()] = value
    one, by_kernel = updated(tx, params, residuals, grads, True, odd)
    other, none = updated(tx, params, residuals, grads, False, odd)
    # torch's kernel rounds the last elements of a leaf in another way, so only whole vectors are a program's.
    assert none == 0 and by_kernel >= (2 if bits_of_torch(grad) else 0)
    (mine, form), (theirs, other_form) = flatten(one), flatten(other)
    assert form == other_form and all(map(same, mine, theirs))
    assert not torch.equal(one.leaves["b"], params["b"])


@needs_compiler
def test_leaves_that_go_either_way_in_one_update():
    """A transposed leaf is no matter for the kernel, nor is one in fp32; a leaf without a gradient stays."""
    dtypes = zf.precision(store_dtype={"n": "bf16+8", "w": F32}, labels=lambda path: "w" if path == "wide" else "n")
    tx = zf.chain(dtypes, zf.adamw(0.1))
    params = {"a": torch.ones(64), "turned": torch.ones(8, 4).t(), "wide": torch.ones(32), "still": torch.ones(64)}
    grads = [{k: None if k == "still" else torch.full_like(x, 0.1) for k, x in params.items()}] * 2
    grads = [{k: x if x is None or k == "wide" else x.to(BF16) for k, x in step.items()} for step in grads]
    one, by_kernel = updated(tx, params, {}, grads, True)
    other, _ = updated(tx, params, {}, grads, False)
    assert by_kernel == (2 if bits_of_torch(BF16) else 0) and list(one.leaves) == list(other.leaves)
    assert all(map(same, flatten(one)[0], flatten(other)[0]))
    assert torch.equal(one.leaves["still"], torch.ones(64, dtype=BF16))
    assert {k: int(x) for k, x in one.transforms["adamw"]["count"].items()} == {k: 2 * (k != "still") for k in params}


@pytest.mark.parametrize("threads", [1, 2])
def test_norms_and_bits_on_several_threads(threads):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(64, 1024)) for _ in range(3))
    tx = zf.chain(zf.precision(store_dtype="bf16+8"), zf.adamw(0.1, weight_decay=0.0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        opt = zf.attach(model, tx)
        for i, p in enumerate(model):
            p.grad = torch.full_like(p, 0.5 + i)
        opt.step()
    finally:
        torch.set_num_threads(before)
    want = math.sqrt(sum(64 * 1024 * (0.5 + i) ** 2 for i in range(3)))
    assert float(opt.metrics["grad_norm"]) == pytest.approx(want, rel=1e-6)
    # 1 - 0.1, to 16 bits: 0.8984375 and 102.4 of 256 parts of 2**-8.
    assert {float(x) for p in model for x in p.detach().unique()} == {0.8984375}
    residuals = opt.state.transforms["adamw"]["master_residual"].values()
    assert {int(x) for kept in residuals for x in kept.unique()} == {102}


def test_few_elements_are_updated_in_place_without_a_kernel():
    """All leaves in their memory: the optimizer returns its whole state, with numbers of all leaves."""
    model = torch.nn.Linear(4, 4)
    opt = zf.attach(model, zf.chain(zf.precision(store_dtype="bf16+8"), zf.adamw(0.1)))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 4, dtype=BF16)).float().sum().backward()
        opt.step()
    for x, y in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(x.float() - y.detach().float(), torch.full(x.shape, 0.2), rtol=0.02, atol=0.004)


@needs_compiler
def test_a_wrapper_of_an_optimizer_is_not_left_out():
    """Its update half is another one, of which the kernel is no part."""
    dtypes = zf.precision(store_dtype="bf16+8")
    params = {"a": torch.ones(1024)}
    grads = [{"a": torch.linspace(-1, 1, 1024).to(BF16)}, {"a": torch.linspace(1, -1.5, 1024).to(BF16)}]
    state, by_kernel = updated(zf.chain(dtypes, zf.cautious(zf.adamw(0.1))), params, {}, grads, True)
    plain, two = updated(zf.chain(dtypes, zf.adamw(0.1)), params, {}, grads, True)
    assert (by_kernel, two) == (0, 2 if bits_of_torch(BF16) else 0) and not torch.equal(
        state.leaves["a"], plain.leaves["a"]
    )


# ----------------------------------------------------------------------------------------------------------------------
# The Triton kernel without a GPU: its bits under the interpreter, and what it is compiled to.

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    with interpreted.processes() as pool:
        yield pool


@needs_triton
@needs_compiler
@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_the_triton_kernel_has_the_bits_of_the_kernel_in_c_and_of_the_formula(apart, examples):
    """Whole chunks and the ends of leaves, at any addresses, with infinities, NaN and subnormal numbers."""
    if not bits_of_torch(F32):
        pytest.skip("torch fuses no product with a sum here")
    leaf = st.tuples(
        st.sampled_from([1, 15, 16, 17, 1000, 1025, 16_384, 16_500]), st.integers(0, 99), st.sampled_from([0, 0, 1, 3])
    )

    @settings(max_examples=examples, deadline=None)
    @given(
        st.lists(leaf, min_size=1, max_size=3),
        st.sampled_from([BF16, F32]),
        st.booleans(),
        st.sampled_from([0.9, 0.4]),
        st.sampled_from([0.0, 0.1]),
    )
    @example([(16_384, 1, 0), (20, 2, 1)], BF16, True, 0.9, 0.1)
    def holds(leaves, grad, decoupled, beta1, weight_decay):
        found = apart.submit(interpreted.compare_masters, leaves, grad, decoupled, beta1, weight_decay)
        assert found.result(timeout=limit()) == []

    holds()


@needs_triton
def test_compiled_for_an_h100_it_fuses_what_torch_fuses():
    """Two products for each of 8 numbers, in both kinds of programs, and accesses of 16 and 8 bytes."""
    found = interpreted.by_the_compiler(interpreted.masters_instructions)
    floats = {name for name in found if ".f32" in name and not name.startswith("cvt")}
    assert not [name for name in floats if name.startswith("mad") or "ftz" in name or "approx" in name]
    assert floats <= {f"{op}.rn.f32" for op in ("mul", "add", "sub", "div", "sqrt", "fma")}
    assert found["fma.rn.f32"] == 2 * 2 * 8
    # Parameter and gradient in 16 bytes, moments in twice as many, residuals in 8.
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (6, 5)
    assert found["ld.global.v2.b32"] == found["st.global.v2.b32"] == 1
