"""Optimizers on slots that are codes: one pass gives the bits of decoding, updating and encoding."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from compilers import needs_compiler
from covering import covering
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.core import optimizer  # inside: which leaves are updated as they are stored
from zerofn.extend import Coded, Codes, flatten
from zerofn.kernels import fused_adam, lists, plans  # inside: which leaves are updated by programs

pytestmark = needs_compiler

LOW: Any = dict(lr=0.1, weight_decay=0.1, state_dtype=torch.float32)
EVEN: Any = dict(bits=4, code="linear", rounding="nearest")
F32, BF16 = torch.float32, torch.bfloat16


def coded(make, **fixed):
    return lambda **how: zf.quantize(make(), **{**fixed, **how})


# Each with the dtype of parameters.
TABLE: dict[str, Any] = {
    "adamw": (coded(lambda: zf.adamw(0.1, weight_decay=0.1)), F32),
    "dynamic": (coded(lambda: zf.adamw(0.1), code="dynamic"), F32),
    "4 bits": (coded(lambda: zf.adam(0.1, betas=(0.4, 0.9), weight_decay=0.1), bits=4), F32),
    "adamw, bf16": (coded(lambda: zf.adamw(0.1, weight_decay=0.1)), BF16),
    "bf16": (coded(lambda: zf.low_precision_adam(**LOW)), BF16),
    "bf16 moments": (coded(lambda: zf.low_precision_adam(0.1, betas=(0.99, 0.999))), BF16),
    "nearest": (coded(lambda: zf.low_precision_adam(**LOW, rounding="nearest"), **EVEN), F32),
    "lion": (coded(lambda: zf.lion(0.1), code="linear"), F32),
    "lion, bf16": (coded(lambda: zf.lion(0.1), code="dynamic", bits=4), BF16),
    "adan": (coded(lambda: zf.adan(0.1), bits=4), F32),
    "rmsprop": (coded(lambda: zf.rmsprop(0.1, momentum=0.5)), BF16),
    "a direction": (lambda **how: zf.chain(zf.quantize(zf.scale_by_adam(), **how), zf.scale_by_lr(0.1)), F32),
    "one slot": (coded(lambda: zf.schedule_free_adamw(0.1), slots=("exp_avg_sq",)), F32),
    "masters": (lambda **how: zf.chain(zf.precision(store_dtype="bf16+8"), zf.quantize(zf.adabelief(0.1), **how)), F32),
}
OPTIMIZERS = {
    "adam": lambda: zf.adam(0.1, weight_decay=0.1),
    "adabelief": lambda: zf.adabelief(0.1),
    "adan": lambda: zf.adan(0.1),
    "adopt": lambda: zf.adopt(0.1),
    "lion": lambda: zf.lion(0.1, weight_decay=0.1),
    "low_precision_adam": lambda: zf.low_precision_adam(0.1),
    "nadam": lambda: zf.nadam(0.1),
    "radam": lambda: zf.radam(0.1),
    "rmsprop": lambda: zf.rmsprop(0.1, centered=True, momentum=0.9),
    "sgd": lambda: zf.sgd(0.1, momentum=0.9, nesterov=True),
    "scale_by_adam": zf.scale_by_adam,
}
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3e-39, 1e-30, 1e-20, 1.5e19, 3e38]


def updated(tx, params, grads, large):
    """The state after these updates, and how many leaves were updated as they are stored."""
    leaves = 0

    def by_program(*given):
        nonlocal leaves
        found = on_stored(*given)
        leaves += len(found)
        return found

    on_stored = optimizer.update_stored
    with mock.patch.object(lists, "LARGE", large), mock.patch.object(optimizer, "update_stored", by_program):
        state = zf.init(tx, params)
        for step in grads:
            state, _ = zf.update(tx, step, state)
    return state, leaves


def bits_of_torch(decoupled=True, near=True, grad=F32, param=F32):
    """Whether Adam is a program here: without vector instructions torch's kernel has bits of its own."""
    return fused_adam.gives_bits(decoupled, near, grad, param)


# Rows that are torch's fused Adam.
OF_TORCH = {"adamw": (), "dynamic": (), "4 bits": (False, False), "adamw, bf16": (True, True, BF16, BF16)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))


@settings(max_examples=40)
@given(
    st.sampled_from(list(TABLE)),
    st.sampled_from([2, 6, 64, 100, 128, 1024]),
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 8, 16, 72, 133, 136, 256, 1040])),
    st.sampled_from(["stochastic", "nearest"]),
    st.sampled_from([1e-36, 1e-12, 1.0, 1e16]),
    st.lists(st.tuples(st.integers(0, 9999), st.sampled_from(ODD)), max_size=8),
    st.integers(0, 99),
)
@example("adamw", 128, (2, 256), "stochastic", 1.0, [], 0)
@example("bf16", 100, (4, 136), "stochastic", 1e-36, [(0, 1e-45)], 1)
@example("adamw, bf16", 64, (4, 136), "stochastic", 1e-36, [(0, 1e-45)], 1)
@example("lion, bf16", 100, (3, 133), "nearest", 1.0, [(1, math.inf)], 2)
@example("masters", 100, (3, 133), "stochastic", 1.0, [], 3)
def test_one_pass_gives_the_bits_of_decoded_tensors(name, block, shape, rounding, size, odd, seed):
    """Which are computed by torch's operations, or by torch's fused kernel."""
    make, dtype = TABLE[name]
    tx = make(block=block, rounding=rounding)
    if shape[0] * shape[1] % 2 and "adam" in name:  # whose last elements torch's kernel rounds in another way
        shape = 4, 136
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
    # A row of 5 takes more bytes as codes of 2 numbers; torch's kernel rounds the last 15 or 31 elements otherwise.
    of_torch = name in OF_TORCH and not bits_of_torch(*OF_TORCH[name])
    # `schedule_free` looks at what its optimizer returns, and so at numbers.
    formula = block < 6 or shape[1] < 16 or "adamw" in name or name == "one slot" or of_torch
    assert none == 0 and (by_kernel > 0 or formula)
    (mine, form), (theirs, other_form) = flatten(one), flatten(other)
    assert form == other_form and all(map(same, mine, theirs))


EACH = list(itertools.product(OPTIMIZERS, [8, 4], ["companded", "linear", "dynamic"], [F32, BF16]))


# Each two of what a code, a dtype and an optimizer may be stand together in some row.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits", "code", "dtype"), covering(EACH, 2))
def test_every_optimizer_in_every_code(name, bits, code, dtype):
    of = torch.Generator().manual_seed(0)
    draw = lambda *n: (torch.randn(n, generator=of) * 10 ** torch.randn(n, generator=of)).to(dtype)  # noqa: E731
    params = {"a": draw(4, 256), "b": draw(3, 150), "c": draw(2, 96), "v": draw(7)}
    grads = [{key: draw(*x.shape) for key, x in params.items()} for _ in range(3)]
    for rounding in ("stochastic", "nearest"):
        tx = zf.quantize(OPTIMIZERS[name](), bits=bits, code=code, block=100, rounding=rounding)
        tx = tx if tx.facts.optimizes else zf.chain(tx, zf.scale_by_lr(0.1))
        one, by_program = updated(tx, params, grads, 0)
        other, _ = updated(tx, params, grads, 1 << 60)
        # A leaf of NAdam has a number of its own, which no program of codes takes.
        assert by_program >= 6 or name == "nadam"
        assert all(map(same, flatten(one)[0], flatten(other)[0]))


@pytest.mark.parametrize("make", [OPTIMIZERS["lion"], OPTIMIZERS["adopt"], OPTIMIZERS["rmsprop"]])
def test_what_a_program_leaves_to_decoded_tensors(make):
    """Each leaf goes its own way, in one update; so do codes that no program has a room for."""
    params = {"taken": torch.ones(4, 256), "tail": torch.ones(5, 255), "vector": torch.ones(64)}
    params["turned"] = torch.ones(256, 4).t()
    params["double"] = torch.ones(4, 256, dtype=torch.float64)
    grads = [{key: torch.full_like(x, 0.1) for key, x in params.items()}] * 2
    for how, taken in (({}, 4), ({"block": 2048}, 0), ({"block": 5, "bits": 4}, 0)):
        tx = zf.quantize(make(), **how)
        state, by_program = updated(tx, params, grads, 0)
        other, _ = updated(tx, params, grads, 1 << 60)
        assert by_program == taken and list(state.params) == list(params)
        assert all(map(same, flatten(state)[0], flatten(other)[0]))


def test_a_slot_that_a_formula_returns_unchanged_becomes_codes_anew():
    """The most negative number of the dynamic code is not one of its scale."""

    def formula(p, g, slots, at):
        return p - at.lr * (g + slots["m"]), slots

    slots = {"m": lambda x: torch.linspace(-1.0, 0.5, x.numel()).view(x.shape)}
    tx = zf.quantize(zf.extend.optimizer("still", 0.1, slots, formula), code="dynamic")
    params = {"a": torch.ones(4, 256)}
    grads = [{"a": torch.full((4, 256), 0.1)}] * 3
    one, by_program = updated(tx, params, grads, 0)
    other, _ = updated(tx, params, grads, 1 << 60)
    assert by_program == 3 and all(map(same, flatten(one)[0], flatten(other)[0]))


def test_what_the_kernel_leaves_to_the_formula():
    """Each leaf goes its own way, in one update."""
    tx = TABLE["adamw"][0]()
    params = {"taken": torch.ones(4, 256), "tail": torch.ones(5, 255), "vector": torch.ones(64)}
    params["turned"] = torch.ones(256, 4).t()
    grads = [{key: torch.full_like(x, 0.1) for key, x in params.items()}] * 2
    state, by_kernel = updated(tx, params, grads, 0)
    assert by_kernel == (2 if bits_of_torch() else 0) and list(state.params) == list(params)
    other, _ = updated(tx, params, grads, 1 << 60)
    assert all(map(same, flatten(state)[0], flatten(other)[0]))


def test_a_leaf_that_crosses_a_key_of_random_bits_is_left_to_the_formula():
    """Also if its codes are rounded to nearest: its parameters are not."""
    p, how = torch.ones(8, 256, dtype=torch.bfloat16), Codes()
    coded = Coded(how, *how.encode(p.float()), None)
    found = [plans.in_blocks([p, p, coded, coded], 2**32 - at) for at in (2048, 2047, 1, 0)]
    assert found == [True, False, False, True]


@pytest.mark.parametrize("missing", ["taken", "tail"])
def test_a_leaf_without_a_gradient_stays(missing):
    tx = TABLE["adamw"][0]()
    params = {"taken": torch.ones(4, 256), "tail": torch.ones(5, 255)}
    grads = [{key: None if key == missing else torch.full_like(x, 0.1) for key, x in params.items()}]
    state, by_kernel = updated(tx, params, grads, 0)
    assert by_kernel == (missing != "taken" and bits_of_torch()) and torch.equal(state.params[missing], params[missing])
    counts = {path: int(x) for path, x in state.transforms["adamw"]["count"].items()}
    assert counts == {path: int(path != missing) for path in params}
    assert int(state.transforms["adamw"]["quantize_count"][missing]) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", [OPTIMIZERS["adam"], OPTIMIZERS["lion"]])
def test_norms_are_those_of_the_gradients(make, threads):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(64, 1024)) for _ in range(3))
    opt = zf.attach(model, zf.quantize(make()))
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


@pytest.mark.parametrize("name", ["adamw", "lion, bf16"])
def test_threads_do_not_change_bits(name):
    make, dtype = TABLE[name]
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = {"a": torch.linspace(-1, 1, 300 * 1000, dtype=dtype).view(300, 1000)}
            grads = [{"a": params["a"].cos()}] * 2
            found.append(flatten(updated(make(block=96, bits=4), params, grads, 0)[0])[0])
        finally:
            torch.set_num_threads(before)
    assert all(map(same, found[0], found[1])) and all(map(same, found[0], found[2]))


def test_a_wrapper_of_an_optimizer_is_not_left_out():
    """Its update half is another one, of which the kernel is no part."""
    tx = zf.quantize(zf.cautious(zf.adamw(0.1)))
    params = {"a": torch.ones(4, 256)}
    grads = [{"a": torch.linspace(-1, 1, 1024).view(4, 256)}, {"a": torch.linspace(1, -1.5, 1024).view(4, 256)}]
    state, by_kernel = updated(tx, params, grads, 0)
    plain, _ = updated(TABLE["adamw"][0](), params, grads, 0)
    assert by_kernel == 0 and not torch.equal(state.params["a"], plain.params["a"])
