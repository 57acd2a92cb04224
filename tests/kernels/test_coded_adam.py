"""Adam on moments that are codes: in one pass it gives the bits of decoding, updating and encoding."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.extend import Coded, Codes, flatten
from zerofn.kernels import coded_adam as module  # inside: from which size on the kernel is called

LOW: Any = dict(lr=0.1, weight_decay=0.1, state_dtype=torch.float32)
EVEN: Any = dict(bits=4, code="linear", rounding="nearest")
# Each with the dtype of parameters.
TABLE: dict[str, Any] = {
    "adamw": (lambda **how: zf.quantize(zf.adamw(0.1, weight_decay=0.1), **how), torch.float32),
    "dynamic": (lambda **how: zf.quantize(zf.adamw(0.1), code="dynamic", **how), torch.float32),
    "4 bits": (
        lambda **how: zf.quantize(zf.adam(0.1, betas=(0.4, 0.9), weight_decay=0.1), **{"bits": 4, **how}),
        torch.float32,
    ),
    "bf16": (lambda **how: zf.quantize(zf.low_precision_adam(**LOW), **how), torch.bfloat16),
    "nearest": (
        lambda **how: zf.quantize(zf.low_precision_adam(**LOW, rounding="nearest"), **EVEN, **how),
        torch.float32,
    ),
}
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3e-39, 1e-30, 1e-20, 1.5e19, 3e38]


def updated(tx, params, grads, large):
    """The state after these updates, and how many leaves the kernel has updated."""
    leaves = 0

    def counted(function, columns, *rest):
        nonlocal leaves
        leaves += len(columns[0])
        return call(function, columns, *rest)

    call = module._call
    with mock.patch.object(module, "LARGE", large), mock.patch.object(module, "_call", counted):
        state = zf.init(tx, params)
        for step in grads:
            state, _ = zf.update(tx, step, state)
    return state, leaves


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))


@settings(max_examples=40)
@given(
    st.sampled_from(list(TABLE)),
    st.sampled_from([2, 6, 64, 100, 128, 1024]),
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([2, 8, 16, 72, 136, 256, 1040])),
    st.sampled_from([1e-36, 1e-12, 1.0, 1e16]),
    st.lists(st.tuples(st.integers(0, 9999), st.sampled_from(ODD)), max_size=8),
    st.integers(0, 99),
)
@example("adamw", 128, (2, 256), 1.0, [], 0)
@example("bf16", 100, (4, 136), 1e-36, [(0, 1e-45)], 1)
def test_the_kernel_gives_the_bits_of_the_formula(name, block, shape, size, odd, seed):
    make, dtype = TABLE[name]
    tx = make(block=block)
    of = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=of) * 10 ** torch.randn(n, generator=of)  # noqa: E731
    params = {"a": draw(shape).to(dtype), "b": draw((3, 5)).to(dtype), "c": draw((2, 8)).to(dtype)}
    grads = [{key: (draw(x.shape) * size).to(dtype) for key, x in params.items()} for _ in range(3)]
    grads[0]["a"][0, :] = 0.0
    for place, value in odd:
        grads[place % 3]["a"].view(-1)[place % grads[0]["a"].numel()] = value
    try:
        one, by_kernel = updated(tx, params, grads, 0)
    except ValueError as error:  # rows so short that codes take more bytes
        assert "none of its entries" in str(error)
        return
    other, none = updated(tx, params, grads, 1 << 60)
    # A row of 5 takes more bytes as codes of 2 numbers; torch's fp32 kernel rounds the last 15 elements otherwise.
    assert none == 0 and (by_kernel > 0 or block < 6 or shape[1] < 16)
    (mine, form), (theirs, other_form) = flatten(one), flatten(other)
    assert form == other_form and all(map(same, mine, theirs))


def test_what_the_kernel_leaves_to_the_formula():
    """Each leaf goes its own way, in one update."""
    tx = TABLE["adamw"][0]()
    params = {"taken": torch.ones(4, 256), "tail": torch.ones(5, 255), "vector": torch.ones(64)}
    params["turned"] = torch.ones(256, 4).t()
    grads = [{key: torch.full_like(x, 0.1) for key, x in params.items()}] * 2
    state, by_kernel = updated(tx, params, grads, 0)
    assert by_kernel == 2 and list(state.params) == list(params)
    other, _ = updated(tx, params, grads, 1 << 60)
    assert all(map(same, flatten(state)[0], flatten(other)[0]))


def test_a_leaf_that_crosses_a_key_of_random_bits_is_left_to_the_formula():
    """Also if its codes are rounded to nearest: its parameters are not."""
    p, how = torch.ones(8, 256, dtype=torch.bfloat16), Codes()
    coded = [Coded(how, *how.encode(p.float()), None)]
    takes = lambda offset: module.CodedAdam(False, rounding="stochastic").takes(  # noqa: E731
        [p], [p], coded, coded, offsets=[offset]
    )
    assert [takes(2**32 - at) for at in (2048, 2047, 1, 0)] == [[True], [False], [False], [True]]


@pytest.mark.parametrize("missing", ["taken", "tail"])
def test_a_leaf_without_a_gradient_stays(missing):
    tx = TABLE["adamw"][0]()
    params = {"taken": torch.ones(4, 256), "tail": torch.ones(5, 255)}
    grads = [{key: None if key == missing else torch.full_like(x, 0.1) for key, x in params.items()}]
    state, by_kernel = updated(tx, params, grads, 0)
    assert by_kernel == (missing != "taken") and torch.equal(state.params[missing], params[missing])
    counts = {path: int(x) for path, x in state.transforms["adamw"]["count"].items()}
    assert counts == {path: int(path != missing) for path in params}
    assert int(state.transforms["adamw"]["quantize_count"][missing]) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_norms_are_those_of_the_gradients(threads):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(64, 1024)) for _ in range(3))
    opt = zf.attach(model, zf.quantize(zf.adamw(0.1)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for i, p in enumerate(model):
            p.grad = torch.full_like(p, 0.5 + i)
        opt.step()
    finally:
        torch.set_num_threads(before)
    want = math.sqrt(sum(64 * 1024 * (0.5 + i) ** 2 for i in range(3)))
    assert float(opt.metrics["grad_norm"]) == pytest.approx(want, rel=1e-6)


def test_threads_do_not_change_bits():
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = {"a": torch.linspace(-1, 1, 300 * 1000).view(300, 1000)}
            grads = [{"a": params["a"].cos()}] * 2
            found.append(flatten(updated(TABLE["adamw"][0](block=96, bits=4), params, grads, 0)[0])[0])
        finally:
            torch.set_num_threads(before)
    assert all(map(same, *found))


def test_a_wrapper_of_an_optimizer_is_not_left_out():
    """Its update half is another one, of which the kernel is no part."""
    tx = zf.quantize(zf.cautious(zf.adamw(0.1)))
    params = {"a": torch.ones(4, 256)}
    grads = [{"a": torch.linspace(-1, 1, 1024).view(4, 256)}, {"a": torch.linspace(1, -1.5, 1024).view(4, 256)}]
    state, by_kernel = updated(tx, params, grads, 0)
    plain, _ = updated(TABLE["adamw"][0](), params, grads, 0)
    assert by_kernel == 0 and not torch.equal(state.params["a"], plain.params["a"])
