"""Every transform against an independent reference: torch.optim, its schedulers, its scaler, closed forms."""

import functools
import itertools
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
import torchopt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from public_names import NAMES
from refusals import Refusals
from transforms_table import ROWS, SAMPLE, row_params, smooth

import zerofn as zf
from zerofn.core.chain import as_transform  # inside: what a chain makes of what it is given
from zerofn.extend import leaf_key, random_bits
from zerofn.testing import assert_trees_close, assert_trees_equal, check_transform, random_like
from zerofn.testing import laws as _laws  # inside: one of the laws, to the last bit

pytestmark = pytest.mark.long
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = {"w": (7, 5), "b": (5,), "g": (), "big": (33, 9), "empty": (0, 3)}


def tree(seed=0, dtype=F32):
    return random_like({k: torch.zeros(s, dtype=dtype) for k, s in SHAPES.items()}, seed)


def gradients(step, dtype=F32, missing=()):
    """Alive in every leaf, over several magnitudes; `missing` leaves have none in some steps."""
    grads = {k: g * 10.0 ** (step % 5 - 3) for k, g in tree(1000 + step, dtype).items()}
    assert all(g.numel() == 0 or (g != 0).any() for g in grads.values())
    return {k: None if k in missing and step % 3 == 1 else g for k, g in grads.items()}


def train(tx, params, steps=40, missing=(), dtype=F32):
    state = zf.init(tx, params)
    for i in range(steps):
        state, _ = zf.update(tx, gradients(i, dtype, missing), state)
    return state


def torch_train(make, params, steps=40, missing=(), dtype=F32):
    leaves = {k: x.clone().requires_grad_() for k, x in params.items()}
    opt = make(list(leaves.values()))
    for i in range(steps):
        for k, g in gradients(i, dtype, missing).items():
            leaves[k].grad = g
        opt.step()
    return {k: x.detach() for k, x in leaves.items()}, opt, leaves


# ---- conformance: every public transform, and pipelines ----


STORED_BF16 = zf.precision(store_dtype=BF16)


def not_bias(path):
    return "bias" not in path


@pytest.mark.parametrize("name", row_params("laws", (x for x, row in ROWS.items() if row.laws)))
def test_conformance(name, monkeypatch):
    """What says that it may be cut has the same bits wherever it is cut."""
    if ROWS[name].cut:
        exact = functools.partial(_laws._cut_anywhere, ulps=0)
        monkeypatch.setattr(_laws, "LAWS", [exact if law is _laws._cut_anywhere else law for law in _laws.LAWS])
    check_transform(ROWS[name].make(SAMPLE))


# What is no row, and why. Each is tested by itself.
NO_ROW = {
    "local": "a layout of leaves of several groups of ranks: core/test_groups_of_ones_own.py",
    "qk_clip": "it is of leaves with the names of a model's modules: transforms/test_loss_in_the_update.py",
    "sam": "it asks for a second gradient: transforms/test_second_gradients.py",
}


def test_every_public_transform_stands_in_the_table():
    """A name that returns a Transform and stands in no row is untested."""
    functions = {name for name, x in NAMES.items() if hasattr(x, "__rebuild__")}
    shown = "".join(repr(row.trained(SAMPLE)) for row in ROWS.values())
    assert {f for f in functions if f + "(" not in shown} == set(NO_ROW)


@zf.leafwise
def writes_gradient(grad, param):
    return grad.mul_(2)


@zf.leafwise(init=torch.zeros_like)
def writes_state(grad, param, state):
    return grad, state.add_(1)


@dataclass(frozen=True)
class Drifts:
    """As of another library; what a leafwise function returns is looked at in each step."""

    def init(self, params):
        return {path: torch.zeros_like(p) for path, p in params.items()}

    def update(self, updates, state, params=None):
        return updates, {path: x.double() for path, x in state.items()}


@zf.leafwise(init=lambda p: torch.zeros(int(p.abs().sum() * 100) if not p.is_meta else 1))
def looks_at_values(grad, param, state):
    return grad, state


@zf.leafwise(init=lambda p: torch.zeros(1) if p.is_meta else torch.zeros_like(p))
def fails_on_meta(grad, param, state):
    return grad, state


@zf.leafwise
def dead(grad, param):
    return grad * 0


@zf.leafwise
def walks_memory(grad, param):
    return torch.as_strided(grad.clone(memory_format=torch.preserve_format), grad.shape, param.stride())


@functools.cache
def seen_so_far():
    return []


@zf.leafwise
def looks_at_others(grad, param):
    seen_so_far().append(1)
    return grad * (1 + len(seen_so_far()) % 3)


@zf.leafwise
def draws(grad, param):
    return grad + torch.randn_like(grad)


@zf.leafwise
def draws_later(grad, param, *, step):
    return grad + torch.randn_like(grad) * (step >= 1)


@zf.leafwise(needs="element")
def draws_by_itself(grad, param):
    return grad + torch.randn(grad.shape, generator=torch.Generator().manual_seed(0))


def by_bits(grad, step, path, offset):
    bits = random_bits(grad.numel(), seed=1, step=step, key=leaf_key(path), offset=offset)
    return grad * (bits.view(grad.shape) % 7)


@zf.leafwise(needs="element")
def bits_of_elements(grad, param, *, step, path, offset):
    return by_bits(grad, step, path, offset)


@zf.leafwise(needs="row")
def bits_of_rows(grad, param, *, step, path, offset):
    return by_bits(grad, step, path, offset)


@zf.leafwise
def bits_of_leaves(grad, param, *, step, path, offset):
    return by_bits(grad, step, path, offset)


@zf.leafwise(needs="element")
def bits_of_shards(grad, param, *, step, path):
    return by_bits(grad, step, path, 0)


@zf.leafwise(init=torch.randn_like)
def begins_by_chance(grad, param, state):
    return grad + state, state


BROKEN = Refusals()
BROKEN.rows(
    AssertionError,
    *(
        (functools.partial(check_transform, tx), *laws)
        for tx, *laws in [
            (writes_gradient(), "The gradients were written"),
            (writes_state(), "The state was written"),
            (as_transform(Drifts()), "They changed with an update"),
            (looks_at_values(), "They changed with values of parameters"),
            (fails_on_meta(), "They changed on meta tensors"),
            (dead(), "nothing is tested"),
            (walks_memory(), "strides of a gradient"),
            (looks_at_others(), "looks_at_others(): the same arguments", "reads something beside its arguments"),
            (draws(), "draws(): the same arguments", "draws of torch's generators", "random_bits(grad.numel()"),
            (draws_later(), "draws_later(): the same arguments", "draws of torch's generators"),
            (draws_by_itself(), "draws_by_itself(): it draws no random numbers", "random_bits(grad.numel()"),
            (bits_of_shards(), "bits_of_shards() says needs='element'", "from its place"),
            (begins_by_chance(), "Two calls of `init` differ", "draws of torch's", "init=torch.zeros_like"),
            (zf.masked(zf.clip_by_value(1.0), lambda path: True), "at the top of a module"),
        ]
    ),
)


@pytest.mark.parametrize("row", BROKEN)
def test_conformance_check_finds_what_is_broken(row):
    row.check()


@pytest.mark.parametrize("tx", [bits_of_elements(), bits_of_rows(), bits_of_leaves()])
def test_random_bits_of_a_leafwise_function_are_those_of_the_place(tx):
    check_transform(tx)


def test_assertions_report_every_leaf():
    a = {"x": torch.ones(3), "y": [torch.zeros(2), torch.tensor([torch.nan, 1.0])], "z": torch.ones(1)}
    b = {
        "x": torch.tensor([1.0, 2.0, 1.0]),
        "y": [torch.zeros(2), torch.tensor([torch.nan, 3.0])],
        "z": torch.ones(1),
    }
    for check in (assert_trees_equal, functools.partial(assert_trees_close, ulps=4)):
        check(a, a)
        with pytest.raises(AssertionError) as error:
            check(a, b)
        assert "x: 1 of 3" in str(error.value) and "y.1: 1 of 2" in str(error.value)
        assert "z" not in str(error.value) and "y.0" not in str(error.value)
    with pytest.raises(AssertionError, match="float64"):
        assert_trees_equal(torch.ones(1, dtype=F64), torch.ones(1))
    with pytest.raises(AssertionError, match=r"(?s)a: missing.*b: extra"):
        assert_trees_equal({"b": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(AssertionError):
        assert_trees_close(torch.tensor([torch.inf]), torch.tensor([1.0]), ulps=1e30)


# ---- optimizers against torch.optim ----

ADAMS = [
    {},
    {"weight_decay": 0.1},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"betas": (0.0, 0.0), "eps": 1e-6},
    {"lr": 0.5, "weight_decay": 0.01},
]


@pytest.mark.parametrize("missing", [(), ("b", "big")])
@pytest.mark.parametrize("options", ADAMS)
@pytest.mark.parametrize(("ours", "theirs"), [(zf.adam, torch.optim.Adam), (zf.adamw, torch.optim.AdamW)])
def test_adam_has_the_bits_of_torch_fused(ours, theirs, options, missing):
    options = {"lr": 1e-2, **options}
    state = train(ours(**options), tree(), missing=missing)
    expected, opt, leaves = torch_train(lambda ps: theirs(ps, fused=True, **options), tree(), missing=missing)
    assert_trees_equal(state.params, expected)
    slots = state.transforms[ours.__name__]
    for k, leaf in leaves.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert_trees_equal(slots[slot][k], opt.state[leaf][slot], f"{k} {slot}")
        assert int(slots["count"][k]) == int(opt.state[leaf]["step"])


@pytest.mark.parametrize("dtype", [F64, BF16])
def test_adamw_has_the_bits_of_torch_fused_in_other_dtypes(dtype):
    state = train(zf.adamw(1e-2), tree(dtype=dtype), 30, dtype=dtype)
    make = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    assert_trees_equal(state.params, torch_train(make, tree(dtype=dtype), 30, dtype=dtype)[0])


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_backward_notices_that_a_moment_it_has_saved_was_written(slot):
    model = torch.nn.Linear(2, 1, bias=False)
    opt = zf.attach(model, zf.adamw(0.1))
    model(torch.ones(2)).sum().backward()
    scale = torch.ones(1, 2, requires_grad=True)
    saved = (opt.state[model.weight][slot] * scale).sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("options", ADAMS)
@pytest.mark.parametrize(("ours", "theirs"), [(zf.adam, torch.optim.Adam), (zf.adamw, torch.optim.AdamW)])
def test_adam_is_near_torch_default(ours, theirs, options):
    """The default loop rounds each operation: at most 2 roundings in each of 40 updates, of |p| <= 4."""
    options = {"lr": 1e-2, **options}
    params = tree()
    state = train(ours(**options), params)
    expected = torch_train(lambda ps: theirs(ps, foreach=False, fused=False, **options), params)[0]
    assert_trees_close(state.params, expected, ulps=80, floor=1.0)


@pytest.mark.parametrize(("ours", "theirs"), [(zf.adam, torch.optim.Adam), (zf.adamw, torch.optim.AdamW)])
def test_change_of_adam_is_that_of_float64(ours, theirs):
    options = {"lr": 1e-2, "weight_decay": 0.1}
    change = {k: train(ours(**options), tree(), 20).params[k].double() - x.double() for k, x in tree().items()}
    wide = {k: x.double() for k, x in tree().items()}
    leaves = {k: x.clone().requires_grad_() for k, x in wide.items()}
    opt = theirs(list(leaves.values()), foreach=False, **options)
    for i in range(20):
        for k, g in gradients(i).items():
            leaves[k].grad = g.double()
        opt.step()
    for k, x in leaves.items():
        # Each update is rounded to a float32 near |p| < 4: 20 * 4 * 2**-24, and the moments' own error.
        torch.testing.assert_close(change[k], x.detach() - wide[k], rtol=1e-4, atol=8e-6)


# torch fuses the product of `add(alpha=)` with the sum on some processors. Of powers of two the product is exact, and
# whether it is fused changes no bit.
SGDS = [
    {},
    {"momentum": 0.5},
    {"momentum": 0.5, "dampening": 0.75},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.125},
    {"weight_decay": 0.0625},
    {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.125},
]


@pytest.mark.parametrize("missing", [(), ("b", "big")])
@pytest.mark.parametrize("options", SGDS)
def test_sgd_has_the_bits_of_torch(options, missing):
    lr = 2.0**-7
    state = train(zf.sgd(lr, **options), tree(), missing=missing)
    expected = torch_train(lambda ps: torch.optim.SGD(ps, lr, foreach=False, **options), tree(), missing=missing)[0]
    assert_trees_equal(state.params, expected)


def test_sgd_is_near_torch_with_any_numbers():
    expected = train(zf.sgd(1e-2, momentum=0.9, weight_decay=0.1), tree()).params
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        make = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1, **how)
        # One rounding per operation against a fused one: two in an update, 40 updates, |p| <= 4.
        assert_trees_close(torch_train(make, tree())[0], expected, ulps=80, floor=1.0)


@pytest.mark.parametrize("optimizer", [zf.sgd, zf.adam, zf.adamw, zf.low_precision_adam])
def test_lr_as_tensor_and_as_schedule_is_the_number(optimizer):
    expected = train(optimizer(0.125), tree(), 5).params
    for lr in (
        torch.tensor(0.125),
        lambda step: 0.125,
        lambda step: torch.tensor(0.125),
        zf.schedules.constant(0.125),
    ):
        assert_trees_equal(train(optimizer(lr), tree(), 5).params, expected)


def test_mixed_dtypes_each_have_the_bits_of_a_tree_of_their_own():
    mixed = {"a": tree()["w"], "b": tree(dtype=F64)["w"], "c": tree(dtype=BF16)["w"]}
    for optimizer in (zf.sgd(0.1, momentum=0.9), zf.adam(0.1), zf.adamw(0.1)):
        state = zf.init(optimizer, mixed)
        alone = {k: zf.init(optimizer, {k: x}) for k, x in mixed.items()}
        for i in range(10):
            grads = random_like(mixed, i)
            state, _ = zf.update(optimizer, grads, state)
            alone = {k: zf.update(optimizer, {k: grads[k]}, s)[0] for k, s in alone.items()}
        assert_trees_equal(state.params, {k: s.params[k] for k, s in alone.items()})


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "kahan"])
def test_low_precision_adam_follows_adamw(rounding):
    """bf16 parameters through a chain: the change is that of fp32 AdamW, within the noise of bf16 numbers."""
    tx = zf.chain(STORED_BF16, zf.clip_by_value(10.0), zf.low_precision_adam(0.05, weight_decay=0.1, rounding=rounding))
    start = {k: x.to(BF16).float() for k, x in tree().items()}
    state, exact = zf.init(tx, start), zf.init(zf.adamw(0.05, weight_decay=0.1), start)
    for i in range(30):
        g = {k: x.to(BF16) for k, x in tree(50 + i).items()}
        state, _ = zf.update(tx, g, state)
        exact, _ = zf.update(zf.adamw(0.05, weight_decay=0.1), {k: x.float() for k, x in g.items()}, exact)
    got, want = (
        torch.cat([s.params[k].double().flatten() - start[k].double().flatten() for k in SHAPES])
        for s in (state, exact)
    )
    # Rounding to bf16 adds about 2**-9 * |p| of noise in each of 30 updates: sqrt(30) * 0.002 is 0.01, of a
    # change of about 0.3 an element.
    error = (got - want).norm() / want.norm()
    assert error < {"stochastic": 0.08, "nearest": 0.08, "kahan": 0.03}[rounding]
    assert {x.dtype for x in state.leaves.values()} == {BF16}


def test_low_precision_adam_in_fp32_storage_is_adamw():
    """With fp32 parameters and moments `nearest` rounds nothing."""
    state = train(zf.low_precision_adam(1e-2, weight_decay=0.1, state_dtype=F32, rounding="nearest"), tree(), 20)
    # Kingma and Ba's reordered form differs from torch's by a few roundings in an update.
    assert_trees_close(state.params, train(zf.adamw(1e-2, weight_decay=0.1), tree(), 20).params, ulps=60, floor=1.0)


# ---- guests ----


@pytest.mark.parametrize("wrap", [lambda t: t, zf.offload])
@pytest.mark.parametrize("first", [(), (zf.clip_by_global_norm(0.5),), (zf.accumulate(2),)])
def test_torchopt_in_a_chain_is_torchopt_alone(first, wrap):
    guest = torchopt.adam(lr=0.05)
    tx = zf.chain(*first, wrap(guest))
    params = {k: x for k, x in tree().items() if k != "empty"}
    state = zf.init(tx, params)
    plain, inner = {k: x.clone() for k, x in params.items()}, guest.init(params)
    held = None
    for i in range(10):
        g = {k: gradients(i)[k] for k in params}
        state, _ = zf.update(tx, g, state)
        if first and first[0].name == "accumulate":
            if held is None:
                held = g
                continue
            g, held = {k: (held[k] + g[k]) / 2 for k in g}, None
        elif first:
            norm = torch.cat([x.flatten() for x in g.values()]).norm()
            g = {k: x * min(1.0, 0.5 / (float(norm) + 1e-6)) for k, x in g.items()}
        updates, inner = guest.update(g, inner, params=plain, inplace=False)
        plain = {k: x + updates[k] for k, x in plain.items()}
    # The norm is summed in another order: one rounding in each of 10 updates.
    assert_trees_close(state.params, plain, ulps=8 if first else 0, floor=1.0)
    assert all(not torch.equal(plain[k], params[k]) for k in params)


# ---- clip, accumulate, ema ----


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clip_by_global_norm_is_torchs(max_norm):
    tx = zf.chain(zf.clip_by_global_norm(max_norm), zf.sgd(1.0))
    params, grads = tree(), gradients(2)
    state, metrics = zf.update(tx, grads, zf.init(tx, params))
    leaves = [x.clone().requires_grad_() for x in params.values()]
    for x, g in zip(leaves, grads.values(), strict=True):
        x.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    assert_trees_close(metrics["grad_norm"], norm, ulps=4)
    with torch.no_grad():
        expected = {k: x - x.grad for k, x in zip(params, leaves, strict=True)}
    assert_trees_close(state.params, expected, ulps=4, floor=4.0)


def test_clip_by_value_is_torchs():
    params, grads = tree(), gradients(3)
    got, _ = zf.clip_by_value(0.5).update(grads, {}, params)
    assert_trees_equal(got, {k: g.clamp(-0.5, 0.5) for k, g in grads.items()})


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.booleans(), st.integers(0, 99))
@example([0, 3], False, 0)
@example([1, 0, 5], True, 1)
def test_weighted_accumulation_is_the_big_batch(counts, donate, seed):
    """Micro-batches of unequal numbers of tokens, empty ones among them, whose mean loss is 0 / 0."""
    if not sum(counts):
        counts = [*counts[:-1], 1]
    x = random_like(torch.zeros(sum(counts), 3, dtype=F64), seed)

    def loss(p, x):
        return ((x @ p["w"]).tanh() ** 2).sum() / len(x) if len(x) else p["w"].sum() * torch.nan

    w = {"w": random_like(torch.zeros(3, dtype=F64), seed + 1)}
    tx = zf.chain(zf.accumulate(len(counts), weighted=True), zf.sgd(1.0))
    step = zf.make_step(loss, tx, donate=donate)
    state = zf.init(tx, w)
    for part in x.split(counts):
        state, metrics = step(state, part, weight=len(part))
    assert metrics["updated"]
    expected, _ = zf.make_step(loss, zf.sgd(1.0))(zf.init(zf.sgd(1.0), w), x)
    # Two orders of a sum in float64.
    assert_trees_close(state.params, expected.params, ulps=64, floor=1.0)


@given(st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_accumulation_is_the_mean(k, donate, seed):
    tx, one = zf.chain(zf.accumulate(k), zf.sgd(1.0)), zf.sgd(1.0)
    x = random_like(torch.zeros(k, 4, 3, dtype=F64), seed)
    loss = lambda p, x: ((x @ p["w"]).tanh() ** 2).mean()  # noqa: E731
    w = {"w": torch.ones(3, dtype=F64)}
    state, step = zf.init(tx, w), zf.make_step(loss, tx, donate=donate)
    for i, part in enumerate(x):
        before = state.params["w"].clone()
        state, metrics = step(state, part)
        assert bool(metrics["updated"]) == (i == k - 1)
        assert torch.equal(before, state.params["w"]) == (i < k - 1)
    expected, _ = zf.make_step(loss, one)(zf.init(one, w), x.reshape(-1, 3))
    assert_trees_close(state.params, expected.params, ulps=64, floor=1.0)
    assert int(state.step) == 1 and int(state.micro_step) == k


def test_accumulate_sums_bf16_gradients_in_fp32_when_asked():
    tx = zf.chain(zf.precision(store_dtype=BF16, grad_dtype=F32), zf.accumulate(256), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.zeros(4)})
    assert state.transforms["accumulate"]["sum"]["w"].dtype == F32
    for _ in range(256):
        state, _ = zf.update(tx, {"w": torch.full((4,), 1 / 256)}, state)
    assert_trees_equal(state.params["w"], torch.full((4,), -1 / 256, dtype=BF16))


@pytest.mark.parametrize("store", [None, BF16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_gradients_and_their_sums_have_the_dtype_asked_for(dtype, store):
    tx = zf.chain(zf.precision(param_dtype=BF16, store_dtype=store, grad_dtype=dtype), zf.accumulate(2), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.ones(3)})
    out, pullback = zf.vjp(lambda p: p["w"] * 3, tx, state)
    model = torch.nn.Linear(3, 1, bias=False)
    zf.attach(model, tx)
    model(torch.full((1, 3), 3.0)).sum().backward()
    for g in (pullback(torch.ones_like(out))[0]["w"], model.weight.grad.flatten()):
        assert_trees_equal(g, torch.full((3,), 3.0, dtype=dtype))
    assert state.transforms["accumulate"]["sum"]["w"].dtype == dtype


def test_leaf_without_gradient_in_a_window_has_none():
    tx = zf.chain(zf.accumulate(2), zf.adamw(0.1))
    state = zf.init(tx, {"a": torch.ones(2), "b": torch.ones(2)})
    for grads in ({"a": torch.ones(2), "b": torch.ones(2)},) * 2 + ({"a": torch.ones(2), "b": None},) * 2:
        state, _ = zf.update(tx, grads, state)
    assert {k: int(c) for k, c in state.transforms["adamw"]["count"].items()} == {"a": 2, "b": 1}


@given(st.floats(0.0, 0.999), st.integers(1, 8), st.integers(0, 99))
def test_ema_is_its_closed_form(decay, steps, seed):
    tx = zf.chain(zf.sgd(0.1), zf.ema(decay))
    params = random_like({"w": torch.zeros(5), "b": torch.zeros(2)}, seed)
    state, history = zf.init(tx, params), [params]
    for i in range(steps):
        # A leaf without a gradient is averaged too.
        state, _ = zf.update(tx, {**random_like(params, seed + i + 1), **({"b": None} if i % 2 else {})}, state)
        history.append(state.params)
    expected = {
        k: decay**steps * params[k].double()
        + sum((1 - decay) * decay ** (steps - i) * history[i][k].double() for i in range(1, steps + 1))
        for k in params
    }
    assert_trees_close(zf.full_params(tx, state, of="ema"), expected, ulps=4 * steps, floor=2.0)


def test_averages_of_some_leaves_beside_the_others_as_they_are():
    # A leaf that bears the name of the slot is a leaf all the same.
    tx = zf.chain(zf.sgd(0.5), zf.masked(zf.ema(0.5), lambda path: path != "b"))
    state = zf.init(tx, {"average": torch.ones(2), "b": torch.ones(3)})
    state, _ = zf.update(tx, {"average": torch.ones(2), "b": torch.ones(3)}, state)
    assert_trees_equal(
        zf.full_params(tx, state, of="masked"), {"average": torch.full((2,), 0.75), "b": torch.full((3,), 0.5)}
    )


# ---- groups ----


def group(path):
    return "two" if path in ("b", "big") else "one"


def test_partition_is_separate_runs():
    inner = {"one": zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(0.1)), "two": zf.sgd(0.1, momentum=0.9)}
    tx = zf.partition(inner, group)
    state = train(tx, tree(), 20)
    for name, member in inner.items():
        mine = [k for k in SHAPES if group(k) == name]
        alone = zf.init(member, {k: tree()[k] for k in mine})
        for i in range(20):
            alone, _ = zf.update(member, {k: gradients(i)[k] for k in mine}, alone)
        assert_trees_equal({k: state.params[k] for k in mine}, alone.params)


def test_partition_labels_as_tree_that_stops_above_the_leaves():
    params = {"enc": [torch.ones(2), torch.ones(3)], "head": {"w": torch.ones(2)}}
    by_tree = zf.partition({"a": zf.sgd(1.0), "b": None}, {"enc": "b", "head": "a"})
    by_path = zf.partition({"a": zf.sgd(1.0), "b": None}, lambda p: "b" if p.startswith("enc") else "a")
    got = [zf.update(tx, random_like(params, 3), zf.init(tx, params))[0].params for tx in (by_tree, by_path)]
    assert_trees_equal(*got)
    assert torch.equal(got[0]["enc"][1], params["enc"][1]) and not torch.equal(got[0]["head"]["w"], params["head"]["w"])


def test_masked_optimizer_leaves_the_rest():
    tx = zf.masked(zf.adamw(0.1), lambda p: group(p) == "one")
    state = train(tx, tree(), 10)
    whole = train(zf.adamw(0.1), tree(), 10).params
    assert_trees_equal(state.params, {k: whole[k] if group(k) == "one" else x for k, x in tree().items()})


def test_none_in_a_partition_leaves_its_leaves_alone():
    """Among optimizers their parameters are frozen; among others gradients pass, and the optimizer trains them."""
    label = {"w": "on", "b": "off"}
    params, grads = {"w": torch.zeros(2), "b": torch.ones(3)}, {"w": torch.full((2,), 5.0), "b": torch.full((3,), 5.0)}

    def end(tx):
        state = zf.init(tx, params)
        for _ in range(2):
            state, _ = zf.update(tx, grads, state)
        return state.params

    frozen = end(zf.partition({"on": zf.sgd(1.0), "off": None}, label))
    assert_trees_equal(frozen, {"w": torch.full((2,), -10.0), "b": params["b"]})
    trained = end(zf.chain(zf.partition({"on": zf.clip_by_value(1.0), "off": None}, label), zf.sgd(1.0)))
    assert_trees_equal(trained, {"w": torch.full((2,), -2.0), "b": torch.full((3,), -9.0)})
    assert_trees_equal(trained, end(zf.chain(zf.masked(zf.clip_by_value(1.0), {"w": True, "b": False}), zf.sgd(1.0))))
    # With no transform at all there is nothing that could train them.
    assert_trees_equal(end(zf.partition({"on": None, "off": None}, label)), params)


def test_masked_global_norm_is_that_of_its_leaves():
    tx = zf.chain(zf.masked(zf.clip_by_global_norm(0.1), lambda p: group(p) == "one"), zf.sgd(1.0))
    grads = gradients(2)
    state, metrics = zf.update(tx, grads, zf.init(tx, tree()))
    norm = torch.cat([grads[k].double().flatten() for k in SHAPES if group(k) == "one"]).norm()
    assert_trees_close(metrics["masked.on.grad_norm"], norm, ulps=4)
    for k, x in tree().items():
        scale = min(1.0, 0.1 / (float(norm) + 1e-6)) if group(k) == "one" else 1.0
        assert_trees_close(state.params[k], x.double() - scale * grads[k].double(), ulps=4, floor=4.0)


@pytest.mark.parametrize("name", ["adamw", "partition", "everything", "accumulate", "ema"])
def test_offload_to_where_the_parameters_are_changes_no_bit(name):
    plain = ROWS[name].trained(SAMPLE)
    parts = [p if p.name in ("precision", "scale_loss") else zf.offload(p) for p in plain.parts]
    assert_trees_equal(train(zf.chain(*parts), tree(), 7), train(plain, tree(), 7))


# ---- names in chains ----

MEMBERS = [
    *(smooth(keep=k / 8) for k in (1, 3, 5, 7)),
    smooth(keep=0.25).named("mine"),
    smooth(keep=0.75).named("smooth_2"),
    zf.masked(smooth(keep=0.5), not_bias),
    zf.clip_by_value(1.0),
]


@st.composite
def chains_in_chains(draw, members):
    """The members in a random nest of chains, some of which have been pickled."""
    cuts = draw(st.sets(st.integers(1, len(members) - 1))) if len(members) > 1 else set()
    ends = [0, *sorted(cuts), len(members)]
    pieces = [members[i:j] for i, j in itertools.pairwise(ends)]
    tx = zf.chain(*(draw(chains_in_chains(p)) for p in pieces)) if cuts else zf.chain(*members)
    return pickle.loads(pickle.dumps(tx)) if draw(st.booleans()) else tx


@settings(max_examples=20)
@given(st.lists(st.sampled_from(MEMBERS), min_size=3, max_size=6), st.data())
def test_names_depend_on_the_members_alone(members, data):
    members = [*members, zf.sgd(0.1)]
    flat, nested = zf.chain(*members), data.draw(chains_in_chains(members))
    names = [p.name for p in flat.parts]
    assert [p.name for p in nested.parts] == names and len(set(names)) == len(names)
    assert nested == flat and hash(nested) == hash(flat) and repr(nested) == repr(flat)
    for given_name in ("mine", "smooth_2"):
        of_that_name = [i for i, m in enumerate(members) if m.name == given_name]
        assert not of_that_name or names.index(given_name) == of_that_name[0]
    # What is equal is so in a longer chain too: what is read back from print as well.
    again = eval(repr(flat), {**NAMES, "smooth": smooth, "not_bias": not_bias})
    assert again == flat and zf.chain(smooth(), again) == zf.chain(smooth(), flat)
    params = {"w": torch.zeros(3), "bias": torch.zeros(2)}
    state = zf.init(nested, params)
    for i in range(3):
        grads = random_like(params, i)
        other, _ = zf.update(flat, grads, state)
        state, _ = zf.update(nested, grads, state)
        assert_trees_equal(other, state)


def test_numbers_are_given_anew_and_names_are_not():
    a, b, c = (zf.clip_by_value(float(i)) for i in (1, 2, 3))
    for tx in (zf.chain(a, b, c), zf.chain(a, zf.chain(b, c)), zf.chain(zf.chain(a, b), c)):
        assert [p.name for p in tx.parts] == ["clip_by_value", "clip_by_value_2", "clip_by_value_3"]
    second = zf.chain(a, b).parts[1]
    assert second.name == "clip_by_value_2" and zf.chain(second).parts == (b,)
    mine = zf.chain(zf.chain(a, b), c.named("clip_by_value_2"))
    assert [p.name for p in mine.parts] == ["clip_by_value", "clip_by_value_3", "clip_by_value_2"]
    kept = zf.chain(a, second.named("clip_by_value_2"), b)
    assert [p.name for p in zf.chain(c, kept).parts] == [f"clip_by_value{i}" for i in ("", "_3", "_2", "_4")]
    # Offloaded, and in groups, they are those members still.
    moved = zf.offload(zf.chain(*(smooth(keep=k) for k in (0.25, 0.5))))
    assert [p.name for p in zf.chain(smooth(), moved).parts] == ["smooth", "smooth_2", "smooth_3"]


# ---- schedules ----


def torch_rates(make, steps):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
    scheduler = make(opt)
    rates = []
    for _ in range(steps):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    return rates


LR = torch.optim.lr_scheduler
SCHEDULES = {
    "cosine": (zf.schedules.cosine(0.5, 20, 0.1), lambda o: LR.CosineAnnealingLR(o, 20, 0.1), 21),
    "step": (zf.schedules.step(0.5, 4, 0.3), lambda o: LR.StepLR(o, 4, 0.3), 30),
    "linear": (zf.schedules.linear(0.25, 0.5, 8), lambda o: LR.LinearLR(o, 0.5, 1.0, 8), 20),
    "constant": (zf.schedules.constant(0.5), lambda o: LR.ConstantLR(o, 1.0, 5), 10),
    "warmup": (zf.schedules.warmup(0.5, 6), lambda o: LR.LambdaLR(o, lambda s: min(1.0, (s + 1) / 6)), 20),
    "warmup_cosine": (
        zf.schedules.warmup_cosine(0.5, 5, 25, 0.05),
        lambda o: LR.LambdaLR(
            o,
            lambda s: (s + 1) / 5 if s < 5 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (s - 5) / 20))),
        ),
        40,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_torchs(name):
    ours, theirs, steps = SCHEDULES[name]
    # torch multiplies rates up step by step; the closed form has one rounding.
    assert [ours(i) for i in range(steps)] == pytest.approx(torch_rates(theirs, steps), rel=1e-12, abs=1e-15)
    tensors = [float(ours(torch.tensor(i))) for i in range(steps)]
    assert tensors == pytest.approx([ours(i) for i in range(steps)], rel=1e-6, abs=1e-7)


def test_rates_joined_by_hand_are_float64_for_a_tensor_too():
    joined = zf.schedules.Piecewise(zf.schedules.constant(0.1), 5, zf.schedules.constant(0.2))
    assert [float(joined(torch.tensor(i))) for i in (4, 5)] == [joined(4), joined(5)] == [0.1, 0.2]


def test_schedule_is_read_at_optimizer_steps():
    tx = zf.chain(zf.accumulate(2), zf.sgd(lambda step: 1.0 + step))
    state, rates = zf.init(tx, {"w": torch.zeros(1)}), []
    for _ in range(6):
        state, metrics = zf.update(tx, {"w": torch.ones(1)}, state)
        if metrics["updated"]:
            rates.append(float(metrics["lr"]))
    assert rates == [1.0, 2.0, 3.0] and float(state.params["w"]) == -6.0


# ---- loss scale ----


def torch_scales(overflows, **options):
    """GradScaler's own rule, run by its own operator."""
    scale, tracker = torch.tensor(options["init"]), torch.tensor(0, dtype=torch.int32)
    found = []
    for bad in overflows:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(bad)),
            options["growth"],
            options["backoff"],
            options["interval"],
        )
        found.append(float(scale))
    return found


def our_scales(overflows, **options):
    tx = zf.chain(zf.scale_loss(**options), zf.sgd(0.1))
    state, found = zf.init(tx, {"w": torch.zeros(2)}), []
    for bad in overflows:
        before = state.params["w"]
        grad = torch.tensor([1.0, torch.inf if bad else 1.0])
        state, metrics = zf.update(tx, {"w": grad}, state)
        found.append(float(metrics["loss_scale"]))
        assert bool(metrics["skipped"]) == bad and bool(metrics["updated"]) != bad
        assert torch.equal(before, state.params["w"]) == bad
    assert int(state.transforms["scale_loss"]["skipped_steps"]) == sum(overflows)
    assert int(state.step) == len(overflows) - sum(overflows) and int(state.micro_step) == len(overflows)
    return found


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 4),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.5, 0.9)]),
)
@example([False] * 130, 1, (2.0, 0.5))
def test_dynamic_scale_is_gradscalers(overflows, interval, factors):
    growth, backoff = factors
    expected = torch_scales(overflows, init=2.0**16, growth=growth, backoff=backoff, interval=interval)
    got = our_scales(overflows, growth_factor=growth, backoff_factor=backoff, growth_interval=interval, min_scale=1e-30)
    # Powers of two are exact; other factors are rounded to fp32 in each of at most 40 steps.
    assert got == (expected if growth != 1.5 else pytest.approx(expected, rel=40 * 2**-23))


def deepspeed_scales(overflows, init, interval, hysteresis, min_scale):
    """DeepSpeed's DynamicLossScaler: overflows eat the hysteresis first, growth refills it.

    Its window counts from the last overflow, one step later than GradScaler's; the window here is
    GradScaler's, which is what zerofn documents.
    """
    scale, left, good, found = init, hysteresis, 0, []
    for bad in overflows:
        if bad:
            good = 0
            if left == 1:
                scale = max(scale / 2, min_scale)
            else:
                left -= 1
        else:
            good += 1
            if good == interval:
                scale, left, good = scale * 2, hysteresis, 0
        found.append(scale)
    return found


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_hysteresis_is_deepspeeds(overflows, interval, hysteresis):
    expected = deepspeed_scales(overflows, 64.0, interval, hysteresis, 4.0)
    got = our_scales(overflows, init_scale=64.0, growth_interval=interval, hysteresis=hysteresis, min_scale=4.0)
    assert got == expected


def test_static_scale_never_changes():
    assert our_scales([False, True, False, True, True], scale=1024.0) == [1024.0] * 5


@settings(max_examples=10)
@given(st.integers(0, 99), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.integers(0, 3))
def test_one_bad_number_anywhere_skips(seed, value, leaf):
    tx = zf.chain(zf.scale_loss(), zf.adamw(0.1))
    state = zf.init(tx, tree(seed))
    grads = tree(seed + 1)
    name = ["w", "b", "g", "big"][leaf]
    grads[name].view(-1)[seed % grads[name].numel()] = value
    new, metrics = zf.update(tx, grads, state)
    assert metrics["skipped"]
    assert_trees_equal(new.leaves, state.leaves)
    assert_trees_equal(new.transforms["adamw"], state.transforms["adamw"])


def test_weights_do_not_overflow_fp16_sums():
    """Tokens times a gradient: above 65504, where fp16 ends, and behind the search for overflow."""
    dtypes = zf.precision(store_dtype=torch.float16, param_dtype=torch.float16, grad_dtype=torch.float16)
    tx = zf.chain(dtypes, zf.accumulate(2, weighted=True), zf.sgd(0.5))
    state = zf.init(tx, {"w": torch.zeros(2)})
    for weight, g in ((4096.0, 20.0), (8192.0, 2.0)):
        state, _ = zf.update(tx, {"w": torch.full((2,), g, dtype=torch.float16)}, state, weight=weight)
    # (4096 * 20 + 8192 * 2) / 12288 = 8
    assert state.params["w"].tolist() == [-4.0, -4.0] and state.params["w"].dtype == torch.float16


@pytest.mark.parametrize("eager", [False, True])
def test_offload_of_a_weighted_accumulation(eager):
    def run(wrap):
        tx = zf.chain(wrap(zf.accumulate(2, weighted=True)), zf.sgd(1.0))
        model = torch.nn.ParameterDict({"w": torch.ones(3)})
        x = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-4.0, 0.0, 5.0])]
        if eager:
            opt = zf.attach(model, tx)
            for weight, row in zip((1.0, 3.0), x, strict=True):
                (model["w"] * row).sum().backward()
                opt.step(weight=weight)
                opt.zero_grad()
            return model["w"].detach()
        state = zf.init(tx, {"w": torch.ones(3)})
        step = zf.make_step(lambda p, row: (p["w"] * row).sum(), tx)
        for weight, row in zip((1.0, 3.0), x, strict=True):
            state, _ = step(state, row, weight=weight)
        return state.params["w"]

    assert torch.equal(run(zf.offload), run(lambda transform: transform))
    # (1 * x0 + 3 * x1) / 4
    assert run(zf.offload).tolist() == [1 + 11 / 4, 1 - 2 / 4, 1 - 18 / 4]


def test_adamw_counts_in_fp32_whatever_the_default_dtype():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    tx = zf.adamw(0.01)
    torch.set_default_dtype(torch.bfloat16)
    try:
        opt = torch.optim.AdamW([p], lr=0.01, fused=True)
        state = zf.init(tx, {"w": p.detach().clone()})
        # 257 is the first number that bf16 does not hold. torch rounds its own count under such a default.
        opt.state[p] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
        for i in range(300):
            p.grad = torch.full_like(p, 1.0 + i % 3)
            state, metrics = zf.update(tx, {"w": p.grad.clone()}, state)
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(state.params["w"], p.detach()) and metrics["lr"].dtype == torch.float32
