"""What users get wrong, and what they are told: the text of each error, and a state that is as it was before."""

import copy
import re

import optree
import pytest
import torch
from torch import nn

import zerofn as zf
from zerofn.testing import assert_trees_equal, clone

F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64


def refuses(error, *needles):
    """`pytest.raises` that looks for each needle in the message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(n)})" for n in needles))


def params():
    return {"w": torch.ones(2, 2), "b": torch.zeros(2), "deep": [{"x": torch.ones(3)}]}


def grads():
    return {"w": torch.ones(2, 2), "b": torch.ones(2), "deep": [{"x": torch.ones(3)}]}


# ---- building ----


@pytest.mark.parametrize(
    ("build", "needles"),
    [
        (lambda: zf.adamw(learning_rate=1), ["adamw() has no keyword 'learning_rate'", "Did you mean lr=?"]),
        (lambda: zf.adam(epsilon=1), ["adam()", "'epsilon'", "eps="]),
        (lambda: zf.sgd(0.1, momentun=0.9), ["sgd()", "'momentun'", "momentum="]),
        (lambda: zf.accumulate(steps=4), ["accumulate()", "'steps'", "every="]),
        (lambda: zf.accumulate(gradient_accumulation_steps=4), ["every="]),
        (lambda: zf.clip_by_global_norm(max_grad_norm=1), ["max_norm="]),
        (lambda: zf.scale_loss(loss_scale=1), ["scale="]),
        (lambda: zf.precision(dtype=BF16), ["param_dtype="]),
        (lambda: zf.ema(beta=0.1), ["ema() has no keyword 'beta'", "It takes: decay"]),
        (lambda: zf.low_precision_adam(0.1, mu_dtype=BF16), ["state_dtype="]),
        (lambda: zf.adamw(0.1, weight_decy=1), ["weight_decay="]),
    ],
)
def test_unknown_keywords(build, needles):
    with refuses(TypeError, *needles):
        build()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("build", "needles"),
    [
        (lambda: zf.adamw(lr=-1.0), ["adamw(lr=-1.0)", "must lie in [0, inf)", "write: adamw(lr="]),
        (lambda: zf.adam(lr=NAN), ["adam(lr=nan)", "must lie"]),
        (lambda: zf.sgd(INF), ["sgd(lr=inf)"]),
        (lambda: zf.sgd("0.1"), ["sgd(lr='0.1')", "is a str"]),
        (lambda: zf.sgd(True), ["is a bool"]),
        (lambda: zf.sgd(None), ["NoneType"]),
        (lambda: zf.sgd(0.1, momentum=1.0), ["momentum", "[0, 1)"]),
        (lambda: zf.sgd(0.1, weight_decay=-1), ["weight_decay"]),
        (lambda: zf.sgd(0.1, nesterov=True), ["nesterov", "momentum=0.9"]),
        (lambda: zf.adam(betas=0.9), ["betas=0.9", "pair"]),
        (lambda: zf.adam(betas=(0.9, 1.0)), ["betas", "[0, 1)"]),
        (lambda: zf.adam(betas=(0.9, NAN)), ["betas=(0.9, nan)", "[0, 1)"]),
        (lambda: zf.adam(betas=(0.9, 0.9, 0.9)), ["pair"]),
        (lambda: zf.adam(eps=-1e-8), ["eps=-1e-08"]),
        (lambda: zf.low_precision_adam(lr=-1), ["low_precision_adam(lr=-1)"]),
        (lambda: zf.low_precision_adam(state_dtype=F16), ["6e-8", "bfloat16"]),
        (lambda: zf.low_precision_adam(state_dtype=F64), ["state_dtype"]),
        (lambda: zf.low_precision_adam(rounding="up"), ["'up'", "'stochastic'", "'kahan'"]),
        (lambda: zf.low_precision_adam(seed=1.5), ["seed", "int"]),
        (lambda: zf.clip_by_global_norm(0), ["max_norm=0"]),
        (lambda: zf.clip_by_global_norm(-1.0), ["max_norm=-1.0"]),
        (lambda: zf.clip_by_value(NAN), ["max_value=nan"]),
        (lambda: zf.accumulate(0), ["accumulate(every=0)", "at least 1", "write: accumulate(every=4)"]),
        (lambda: zf.accumulate(2.0), ["accumulate(every=2.0)", "int", "write: accumulate(every=2)"]),
        (lambda: zf.accumulate(True), ["accumulate(every=True)", "write: accumulate(every=4)"]),
        (lambda: zf.scale_loss("dynamik"), ["'dynamik'", "'dynamic'"]),
        (lambda: zf.scale_loss(0.0), ["scale=0.0"]),
        (lambda: zf.scale_loss(INF), ["scale=inf"]),
        (lambda: zf.scale_loss(growth_factor=0.5), ["growth_factor"]),
        (lambda: zf.scale_loss(backoff_factor=1.0), ["backoff_factor"]),
        (lambda: zf.scale_loss(min_scale=NAN), ["scale_loss(min_scale=nan)"]),
        (lambda: zf.scale_loss(min_scale="1"), ["min_scale", "str"]),
        (lambda: zf.scale_loss(init_scale=1.0, min_scale=2.0), ["init_scale=1.0", "[2, inf)"]),
        (lambda: zf.scale_loss(hysteresis=1.5), ["hysteresis=1.5", "int"]),
        (lambda: zf.scale_loss(growth_interval=0), ["growth_interval=0"]),
        (lambda: zf.scale_loss(8.0, growth_interval=5), ["growth_interval", "no effect", "'dynamic'"]),
        (lambda: zf.ema(1.0), ["decay=1.0", "[0, 1)"]),
        (lambda: zf.precision(torch.int32), ["param_dtype=torch.int32", "torch.bfloat16"]),
        (lambda: zf.precision(store_dtype="bf16"), ["store_dtype='bf16'"]),
        (lambda: zf.precision(grad_dtype=torch.complex64), ["grad_dtype"]),
        (lambda: zf.precision(buffer_dtype=torch.int64), ["buffer_dtype=torch.int64", "torch.bfloat16"]),
        (lambda: zf.offload(zf.sgd(0.1), device="moon"), ["moon", "no such device"]),
        (lambda: zf.offload(zf.scale_loss()), ["offload(scale_loss(...))", "write: chain(scale_loss(...)"]),
        (lambda: zf.sgd(0.1).named(""), ["named('')", "non-empty"]),
        (lambda: zf.sgd(0.1).named("a.b"), ["without dots"]),
        (lambda: zf.schedules.cosine(-1.0, 5), ["peak=-1.0"]),
        (lambda: zf.schedules.cosine(1.0, 0), ["steps=0"]),
        (lambda: zf.schedules.linear(1.0, 0.0, 2.5), ["steps=2.5", "int"]),
        (lambda: zf.schedules.warmup_cosine(1.0, 10, 5), ["warmup_steps=10", "steps=5"]),
    ],
)
def test_bad_hyperparameters(build, needles):
    with refuses(ValueError, *needles):
        build()


S, A, C, O = zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1)  # noqa: E741
P = zf.precision(param_dtype=BF16)


@pytest.mark.parametrize(
    ("parts", "needles"),
    [
        (
            (O, C),
            ["chain(..., adamw, ..., clip_by_global_norm, ...)", "can follow it", "clip_by_global_norm, ..., adamw"],
        ),
        ((O, A), ["adamw comes before accumulate"]),
        ((O, S), ["adamw comes before scale_loss"]),
        ((O, P), ["adamw comes before precision"]),
        ((O, zf.sgd(0.1)), ["adamw", "sgd", "used the gradient up", "zf.partition"]),
        ((O, O), ["adamw comes before adamw_2", "zf.partition"]),
        ((S, zf.scale_loss(8.0), O), ["scaled twice"]),
        ((P, P, O), ["dtypes would be set twice"]),
        (
            (C, S, O),
            ["clip_by_global_norm comes before scale_loss", "overflow", "scale_loss, ..., clip_by_global_norm"],
        ),
        ((A, S, O), ["accumulate comes before scale_loss", "spoil the whole window"]),
        ((S, P, O), ["scale_loss comes before precision"]),
        ((A, P, O), ["accumulate comes before precision"]),
        ((C, P, O), ["compute dtype"]),
        ((zf.ema(0.9), O), ["ema comes before adamw", "new parameters"]),
        ((zf.masked(zf.ema(0.9), lambda p: True), O), ["masked comes before adamw", "new parameters"]),
        ((zf.masked(O, lambda p: True), O), ["masked", "adamw"]),
        ((zf.chain(O), zf.chain(C)), ["adamw", "clip_by_global_norm"]),
    ],
)
def test_orders_without_meaning(parts, needles):
    with refuses(ValueError, "why:", "write:", *needles):
        zf.chain(*parts)


@pytest.mark.parametrize(
    ("thing", "needles"),
    [
        (3, ["int is no transform"]),
        (None, ["NoneType is no transform"]),
        ("adamw", ["'adamw'", "str is no transform"]),
        (zf.adamw, ["call it: adamw(...)"]),
        (lambda g: g, ["is no transform"]),
        ([zf.sgd(0.1)], ["list is no transform"]),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), ["torch.optim", "zf.adamw", "zf.attach"]),
    ],
)
def test_what_is_no_transform(thing, needles):
    for use in (
        zf.chain,
        lambda t: zf.chain(zf.sgd(0.1), t),
        lambda t: zf.masked(t, lambda p: True),
        zf.offload,
        lambda t: zf.init(t, params()),
    ):
        with refuses(TypeError, *needles):
            use(thing)


def test_groups():
    with refuses(ValueError, "accumulate concerns the whole tree", "chain(accumulate(...), masked(...))"):
        zf.masked(A, lambda p: True)
    with refuses(ValueError, "scale_loss", "partition"):
        zf.partition({"a": zf.chain(S, O)}, lambda p: "a")
    with refuses(ValueError, "the same thing", "'a'", "'b'", "an optimizer for every label, or for none"):
        zf.partition({"a": O, "b": C}, lambda p: "a")
    with refuses(TypeError, "dict from label to transform"):
        zf.partition([O], lambda p: "a")
    with refuses(TypeError, "dict from label to transform"):
        zf.partition({}, lambda p: "a")
    with refuses(ValueError, "unknown labels", "b: label 'z'", "deep.0.x: label 'z'", "one of 'a'"):
        zf.init(zf.partition({"a": O}, lambda p: "a" if p == "w" else "z"), params())
    with refuses(TypeError, "wrong mask", "w: 1 is no bool", "b: 1 is no bool"):
        zf.init(zf.masked(O, lambda p: 1), params())
    with refuses(TypeError, "wrong labels", "w: ['a'] cannot be a key of a dict"):
        zf.init(zf.partition({"a": O}, lambda p: ["a"]), params())
    with refuses(ValueError, "unknown labels", "w: label None has no transform"):
        zf.init(zf.partition({"a": O}, lambda p: None), params())
    with refuses(ValueError, "mask does not fit", "b: missing", "c: extra"):
        zf.init(zf.masked(O, {"w": True, "c": True, "deep": True}), params())
    w = torch.ones(2)
    with refuses(ValueError, "wrong labels", "y: 'b', and 'a' at x, which is the same tensor"):
        zf.init(zf.partition({"a": O, "b": O}, {"x": "a", "y": "b"}), {"x": w, "y": w})
    zf.init(zf.partition({"a": O, "b": O}, {"x": "a", "y": "a", "z": "b"}), {"x": w, "y": w, "z": torch.ones(1)})


# ---- parameters ----


@pytest.mark.parametrize(
    ("bad", "error", "needles"),
    [
        ({"i": torch.arange(3), "j": torch.ones(2).bool()}, TypeError, ["i: torch.int64", "j: torch.bool", "outside"]),
        ({"c": torch.ones(2, dtype=torch.complex64)}, TypeError, ["c: torch.complex64", "view_as_real"]),
        ({"q": torch.ones(2).to(torch.float8_e4m3fn)}, TypeError, ["q: torch.float8_e4m3fn", "16 bits"]),
        ({"s": torch.ones(2, 2).to_sparse()}, TypeError, ["s: layout torch.sparse_coo"]),
        ({"n": 3.0, "t": "text"}, TypeError, ["n: float is no tensor", "t: str is no tensor"]),
        ({"m": nn.Linear(1, 1)}, TypeError, ["m: Linear is no tensor"]),
        (
            {"a": torch.tensor([1.0, NAN]), "b": torch.tensor([NAN, NAN]), "c": torch.ones(1)},
            ValueError,
            ["a: 1 of 2", "b: 2 of 2"],
        ),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, ["params['a.b']", "params['a']['b']", "dot"]),
        ({1: torch.ones(1), "1": torch.ones(1)}, ValueError, ["path '1': params[1], params['1']", "one text"]),
    ],
)
def test_bad_parameters(bad, error, needles):
    with refuses(error, *needles):
        zf.init(O, bad)


def test_unregistered_dataclass():
    import dataclasses

    @dataclasses.dataclass
    class Layer:
        w: torch.Tensor

    with refuses(TypeError, "layer: dataclass Layer is not registered", "optree.dataclasses"):
        zf.init(O, {"layer": Layer(torch.ones(1))})


def test_what_has_a_sense():
    """Non-contiguous, zero-size, 0-d, shared and infinite leaves are fine."""
    w = torch.ones(4, 3).T
    p = {
        "t": w,
        "same": w,
        "empty": torch.zeros(0, 3),
        "scalar": torch.ones(()),
        "inf": torch.tensor([INF, 1.0]),
        "e": torch.ones(1).expand(5),
    }
    state = zf.init(zf.sgd(0.5), p)
    assert state.leaves["same"].is_contiguous() and list(state.leaves) == ["e", "empty", "inf", "same", "scalar"]
    state, _ = zf.make_step(
        lambda p: p["t"].sum() + p["same"].sum() + p["scalar"] + p["inf"][1] + p["e"][0], zf.sgd(0.5)
    )(state)
    assert torch.equal(state.params["same"], torch.zeros(3, 4)) and state.params["scalar"] == 0.5
    assert state.params["e"].tolist() == [0.5, 1, 1, 1, 1]


def test_low_precision_without_effect_or_too_wide():
    with refuses(
        ValueError, "nothing to round", "w: stored in torch.float32", "zf.precision(store_dtype=torch.bfloat16)"
    ):
        zf.init(zf.low_precision_adam(0.1, rounding="kahan"), params())
    with refuses(ValueError, "w: stored in torch.float64", "a: stored in torch.float64"):
        zf.init(zf.low_precision_adam(0.1), {"w": torch.ones(1, dtype=F64), "a": torch.ones(1, dtype=F64)})


@pytest.mark.parametrize("parts", [(), (C,), (S, A, C), (zf.ema(0.9),), (P,)])
def test_chain_without_an_optimizer(parts):
    for start in (lambda tx: zf.init(tx, params()), lambda tx: zf.attach(nn.Linear(2, 2), tx)):
        with refuses(ValueError, "no optimizer", "zf.adamw(lr=1e-3)"):
            start(zf.chain(*parts))


# ---- gradients and states, pure ----

PIPE = zf.chain(zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9))


@pytest.fixture
def state():
    first, _ = zf.update(PIPE, grads(), zf.init(PIPE, params()))
    before = clone(first)
    yield first
    assert_trees_equal(first, before, "the state changed in spite of the error")


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (lambda g: g.pop("b"), ["wrong structure", "b: missing"]),
        (lambda g: g.update(c=torch.ones(1), d=torch.ones(1)), ["c: extra", "d: extra"]),
        (lambda g: g.update(deep=[{"y": torch.ones(3)}]), ["deep.0.x: missing", "deep.0.y: extra"]),
        (lambda g: g.update(deep=({"x": torch.ones(3)},)), ["same leaves in another kind of container"]),
        (
            lambda g: g.update(b=torch.ones(3), w=torch.ones(1)),
            ["b: gradient of shape (3,)", "shape (2,)", "w: gradient of shape (1,)"],
        ),
        (lambda g: g.update(b=torch.ones(2, dtype=F16)), ["b: gradient in torch.float16", "torch.float32"]),
        (lambda g: g.update(b=torch.ones(2).long()), ["b: gradient in torch.int64"]),
        (lambda g: g.update(b=1.0), ["b: float is no tensor"]),
        (
            lambda g: g.update(w=torch.ones(2, 2).to_sparse()),
            ["w: a gradient of layout torch.sparse_coo", "sparse=False"],
        ),
    ],
)
def test_bad_gradients(state, change, needles):
    g = grads()
    change(g)
    with refuses(ValueError, *needles):
        zf.update(PIPE, g, state)


def test_no_gradient_at_all(state):
    none = {"w": None, "b": None, "deep": [{"x": None}]}
    with refuses(ValueError, "no parameter has a gradient", "loss.backward()"):
        zf.update(PIPE, none, state)
    with refuses(ValueError, "no parameter has a gradient", "uses its params"):
        zf.make_step(lambda p: torch.ones((), requires_grad=True) * 2, PIPE)(state)


def test_one_gradient_at_two_tied_places():
    w = torch.ones(2)
    state = zf.init(O, {"a": w, "b": w})
    g = torch.ones(2)
    with refuses(ValueError, "b: is the very tensor that stands at a", "None at the others"):
        zf.update(O, {"a": g, "b": g}, state)


def test_foreign_and_stale_states(state):
    for bad in ({"w": torch.ones(1)}, None, params()):
        with refuses(TypeError, "it is not a state", "zf.init(tx, params)"):
            zf.update(PIPE, grads(), bad)
        with refuses(TypeError, "it is not a state"):
            zf.make_step(lambda p: p["b"].sum(), PIPE)(bad)
    for call in (
        lambda tx: zf.update(tx, grads(), state),
        lambda tx: zf.make_step(lambda p: p["b"].sum(), tx)(state),
        lambda tx: zf.bind(lambda p: p["b"].sum(), tx, state),
        lambda tx: zf.vjp(lambda p: p["b"].sum(), tx, state),
        lambda tx: zf.full_params(tx, state),
    ):
        with refuses(ValueError, "['adamw']", "'scale_loss'", "made by another pipeline"):
            call(O)


def test_foreign_state_after_a_good_one():
    """What was resolved for the first state says nothing of the second."""
    step = zf.make_step(lambda p: p["b"].sum(), O)
    step(zf.init(O, params()))
    with refuses(ValueError, "['adamw']", "['sgd']"):
        step(zf.init(zf.sgd(0.1), params()))


@pytest.mark.parametrize(
    ("old", "new", "needle"),
    [
        (zf.chain(zf.accumulate(1), O), zf.chain(zf.accumulate(4), O), "accumulate.sum.w: missing"),
        (zf.sgd(0.1), zf.sgd(0.1, momentum=0.9), "sgd.momentum.b: of shape (0,) instead of (2,)"),
        (zf.masked(O, lambda p: p == "w"), zf.masked(O, lambda p: p != "b"), "masked.on.exp_avg.deep.0.x: missing"),
    ],
)
def test_state_of_a_pipeline_of_the_same_names(old, new, needle):
    with refuses(ValueError, "made by another pipeline", needle, "zf.init(tx, params)"):
        zf.update(new, grads(), zf.init(old, params()))


def test_transform_alone_checks_its_gradients():
    tx = zf.sgd(0.1)
    with refuses(ValueError, "w: gradient of shape (1,)"):
        tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(3)}), {"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("lr", "error", "needles"),
    [
        (lambda step: "fast", TypeError, ["returned 'fast' at step 0", "a schedule returns a number"]),
        (lambda step: None, TypeError, ["returned None"]),
        (lambda step: torch.ones(2), TypeError, ["shape (2,)", "zf.partition"]),
        (lambda step: -1.0, ValueError, ["returned -1.0 at step 0", "not negative"]),
        (lambda step: NAN, ValueError, ["returned nan"]),
        (lambda step: torch.tensor(NAN), ValueError, ["returned tensor(nan)"]),
    ],
)
def test_schedules_that_return_nonsense(lr, error, needles):
    broken = []
    tx = zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.sgd(lambda s: lr(s) if broken else 0.1))
    state = zf.init(tx, params())
    # A held step tells the rate of the update to come, so that it is refused there as well.
    broken.append(1)
    with refuses(error, "sgd(lr=<lambda>)", *needles):
        zf.update(tx, grads(), state)
    broken.clear()
    state, _ = zf.update(tx, grads(), state)
    before = clone(state)
    broken.append(1)
    with refuses(error, "sgd(lr=<lambda>)", *needles):
        zf.update(tx, grads(), state)
    assert_trees_equal(state, before)
    # The eager route writes in place, and so must fail before the first write.
    model = nn.Linear(2, 1)
    broken.clear()
    opt = zf.attach(model, tx)
    for i in range(2):
        model(torch.ones(1, 2)).sum().backward()
        if i == 0:
            opt.step()
    before = clone(opt.state)
    broken.append(1)
    with refuses(error, *needles):
        opt.step()
    assert_trees_equal(opt.state, before)
    broken.clear()
    opt.step()
    assert opt.metrics["updated"]


def test_weights():
    weighted = zf.chain(zf.accumulate(2, weighted=True), O)
    state = zf.init(weighted, params())
    with refuses(ValueError, "without weight=", "weight=number_of_tokens"):
        zf.update(weighted, grads(), state)
    for bad in (-1, NAN, INF, torch.ones(2)):
        with refuses(ValueError, "one number, finite and not negative"):
            zf.update(weighted, grads(), state, weight=bad)
    with refuses(ValueError, "weight=", "no effect", "weighted=True"):
        zf.update(O, grads(), zf.init(O, params()), weight=3)
    state, _ = zf.update(weighted, grads(), state, weight=0)
    before = clone(state)
    with refuses(ValueError, "add up to 0"):
        zf.update(weighted, grads(), state, weight=0)
    assert_trees_equal(state, before)


# ---- functions ----


def test_losses_that_are_none():
    state = zf.init(O, params())
    for fn, needle in (
        (lambda p: p["b"], "a tensor of shape (2,)"),
        (lambda p: 1.0, "a float"),
        (lambda p: None, "a NoneType"),
        (lambda p: p["b"].sum().long(), "a tensor of shape (), torch.int64"),
        (lambda p: (p["b"], 1), "a tensor of shape (2,)"),
        (lambda p: (p["b"].sum(), 1, 2), "a tuple"),
    ):
        with refuses(ValueError, "loss_fn returned " + needle, "loss.mean()"):
            zf.make_step(fn, O)(state)
    with refuses(TypeError, "zf.make_step(3, tx, ...)", "3 is an int", "lambda params"):
        zf.make_step(3, O)


def test_cotangents_that_do_not_fit():
    state = zf.init(O, params())
    _, pullback = zf.vjp(lambda p: {"y": p["b"] * 2, "z": p["w"]}, O, state)
    with refuses(ValueError, "cotangents", "structure"):
        pullback(torch.ones(2))
    with refuses(ValueError, "cotangents do not fit", "of shape (3,)", "of shape (2,)"):
        pullback({"y": torch.ones(3), "z": torch.ones(2, 2)})


def test_parameters_of_another_structure_in_a_bound_function():
    fn = zf.bind(lambda p: p["b"].sum(), O, zf.init(O, params()))
    with refuses(ValueError, "these are not the stored parameters of this state", "w: missing"):
        fn({"b": torch.ones(2)})


def test_differentiating_a_step_that_writes_into_its_state():
    """Its derivative would be zero without a word."""
    tx = zf.sgd(0.1)
    state = zf.init(tx, {"w": torch.ones(2)})
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx, donate=True)

    def after(x):
        return step(state, x)[0].params["w"].sum()

    nested = lambda x: torch.vmap(after)(x.expand(3, 2)).sum()  # noqa: E731
    for call in (torch.func.grad(after), torch.func.grad(nested), lambda x: torch.func.jvp(after, (x,), (x,))):
        with refuses(RuntimeError, "a step that writes into its state", "without donate"):
            call(torch.ones(2))
    learn = optree.tree_map(lambda x: x.requires_grad_() if x.is_floating_point() else x, clone(state))
    with refuses(RuntimeError, "a step that writes into its state"):
        step(learn, torch.ones(2))
    assert_trees_equal(state.params, {"w": torch.ones(2)})


def test_differentiating_a_step_of_an_attached_model():
    model = nn.Linear(2, 1)
    opt = zf.attach(model, zf.sgd(0.1))
    model(torch.ones(3, 2)).sum().backward()
    before = clone(dict(model.state_dict()))

    def after(rate):
        opt.step()
        return rate * model.weight.sum()

    with refuses(RuntimeError, "a step that writes into its state", "of an attached model", "functional_call"):
        torch.func.grad(after)(torch.tensor(0.1))
    assert_trees_equal(dict(model.state_dict()), before)


def test_averages_that_do_not_exist():
    with refuses(ValueError, "zf.full_params(tx, state, of='ema')", "zf.ema(0.999)"):
        zf.full_params(O, zf.init(O, params()), of="ema")


def test_fifty_overflows_in_a_row_name_the_leaf():
    tx = zf.chain(zf.scale_loss(init_scale=1.0), O)
    state, bad = zf.init(tx, params()), grads()
    bad["deep"][0]["x"][1] = INF
    for _ in range(49):
        state, _ = zf.update(tx, bad, state)
    before = clone(state)
    with refuses(FloatingPointError, "50 micro-steps in a row", "deep.0.x", "clip_by_global_norm"):
        zf.update(tx, bad, state)
    assert_trees_equal(state, before)


# ---- eager ----


def test_attach_to_what_is_no_model():
    with refuses(TypeError, "attach(dict, tx)", "zf.make_step"):
        zf.attach(params(), O)
    with refuses(TypeError, "is no transform", "call it: adamw"):
        zf.attach(nn.Linear(1, 1), zf.adamw)
    with refuses(ValueError, "no parameters"):
        zf.attach(nn.ReLU(), O)


def test_attach_twice():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    opt = zf.attach(model, zf.chain(zf.scale_loss(8.0), O))
    for again in (model, model[0], nn.Sequential(model, nn.Linear(1, 1))):
        with refuses(
            ValueError,
            "belong to another optimizer",
            "0.weight" if again is model else "weight",
            "attached already",
            "opt.detach()",
        ):
            zf.attach(again, O)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.detach()
    zf.attach(model, O)


def test_model_changed_after_attach():
    def fresh():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return model, zf.attach(model, zf.chain(zf.scale_loss(8.0), O))

    def replace(m):
        m[0].weight = nn.Parameter(torch.ones(2, 2))

    def data(m):
        m[1].bias.data = torch.ones(1)

    for change, *needles in (
        (replace, "0.weight"),
        (data, "1.bias", "data were replaced"),
        (lambda m: m.double(), "0.weight: moved to torch.float64", "1.bias: moved"),
        (lambda m: m[0].register_parameter("extra", nn.Parameter(torch.ones(1))), "0.extra"),
    ):
        model, opt = fresh()
        model(torch.ones(1, 2)).sum().backward()
        kept = {k: v.clone() for k, v in opt.state.leaves.items()}
        change(model)
        with refuses(RuntimeError, "changed after it was attached", "opt.detach()", *needles):
            opt.step()
        assert_trees_equal(dict(opt.state.leaves), kept)


def test_step_without_a_gradient_and_after_detach():
    model = nn.Linear(2, 1)
    opt = zf.attach(model, O)
    before = clone(opt.state)
    with refuses(ValueError, "no parameter has a gradient", "loss.backward() before opt.step()"):
        opt.step()
    assert_trees_equal(opt.state, before)
    opt.detach()
    with refuses(RuntimeError, "after opt.detach()", "zf.attach(model, tx)"):
        opt.step()


def test_sparse_gradients_of_a_model():
    model = nn.Embedding(5, 2, sparse=True)
    opt = zf.attach(model, O)
    model(torch.tensor([1])).sum().backward()
    before = clone(opt.state)
    with refuses(ValueError, "weight", "sparse=False"):
        opt.step()
    assert_trees_equal(opt.state, before)


def test_learning_rates_set_from_outside():
    model = nn.Linear(2, 1)
    opt = zf.attach(model, zf.chain(zf.accumulate(1), zf.clip_by_value(1.0), zf.sgd(0.1)))
    model(torch.ones(1, 2)).sum().backward()
    for bad, error in ((NAN, ValueError), (-1.0, ValueError), ("x", TypeError), (None, TypeError)):
        opt.param_groups[0]["lr"] = bad
        before = clone(opt.state)
        with refuses(error, "lr"):
            opt.step()
        assert_trees_equal(opt.state, before)
    scheduled = zf.attach(nn.Linear(2, 1), zf.sgd(lambda step: 0.1))
    scheduled.param_groups[0]["lr"] = 0.5
    scheduled._own.model(torch.ones(1, 2)).sum().backward()
    with refuses(ValueError, "owns its learning rate"):
        scheduled.step()


def test_nan_and_shared_memory_in_a_model():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = NAN
    with refuses(ValueError, "NaN in parameters", "weight: 1 of 4"):
        zf.attach(model, O)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with refuses(ValueError, "1.weight: shares memory with 0.weight", "a.weight = b.weight"):
        zf.attach(model, O)
    for weight in (torch.ones(2, 1).expand(2, 2), torch.arange(3.0).as_strided((2, 2), (1, 1))):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(weight)
        with refuses(ValueError, f"weight: of strides {weight.stride()}: elements share memory", "x.contiguous()"):
            zf.attach(model, O)
    # Rows between each other, and none over another.
    model.weight = nn.Parameter(torch.arange(8.0).as_strided((3, 2), (2, 3)))
    zf.attach(model, O)
    with refuses(ValueError, "meta device"):
        zf.attach(nn.Linear(2, 2, device="meta"), O)


def test_calls_without_effect_are_refused():
    opt = zf.attach(nn.Linear(2, 1), O)
    with refuses(ValueError, "no effect without accumulate"):
        opt.set_boundary(True)
    with refuses(TypeError, "set_boundary('yes')"):
        opt.set_boundary("yes")
    with refuses(ValueError, "set_boundary"):
        zf.attach(nn.Linear(2, 1), zf.chain(zf.accumulate(1), O)).set_boundary(False)
    with refuses(NotImplementedError, "zf.partition"):
        opt.add_param_group({"params": [torch.zeros(1)]})
    with refuses(ValueError, "opt.backward(a tensor of shape (2,))", "output.backward(gradient)"):
        opt.backward(torch.ones(2, requires_grad=True))


def test_state_dicts_of_something_else():
    model = nn.Linear(2, 1)
    opt = zf.attach(model, zf.chain(zf.accumulate(2), O))
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    before = clone(opt.state)
    good = opt.state_dict()
    wrong = {"weight": torch.ones(3, 3), "other": torch.ones(1)}
    for bad, *needles in (
        ({}, "param_groups"),
        ({**good, "zerofn": {**good["zerofn"], "params": wrong}}, "weight", "bias", "other"),
        ({**good, "transforms": {}}, "exp_avg"),
        ({**good, "surprise": torch.ones(1)}, "surprise", "unexpected"),
        (("garbage",), "param_groups"),
        (zf.attach(nn.Linear(3, 1), zf.chain(zf.accumulate(2), O)).state_dict(), "(1, 3)", "(1, 2)"),
        (copy.deepcopy(zf.attach(nn.Linear(2, 1), zf.sgd(0.1)).state_dict()), "exp_avg", "bias"),
    ):
        with refuses(ValueError, "load_state_dict", *needles):
            opt.load_state_dict(bad)
        assert_trees_equal(opt.state, before)


# ---- transforms of one's own ----


def test_leafwise_keywords():
    @zf.leafwise
    def mine(grad, param, *, strength, other=1.0):
        return strength * grad

    with refuses(TypeError, "mine() has no keyword 'strenght'", "Did you mean strength=?"):
        mine(strenght=1.0)
    with refuses(TypeError, "mine() needs strength="):
        mine()


def test_transform_called_as_a_metric():
    """A name that the pipeline itself uses in its metrics is free for a transform."""

    @zf.leafwise
    def grad_norm(grad, param):
        return grad * 2

    tx = zf.chain(grad_norm(), zf.sgd(0.5))
    state, metrics = zf.update(tx, grads(), zf.init(tx, params()))
    assert torch.equal(state.params["b"], -torch.ones(2))
    assert float(metrics["grad_norm"]) == 6.0


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused(layout):
    told = r"(?s)not every leaf is a parameter\n  rows: a nested tensor, .*x\.to_padded_tensor\(0\.0\), or its rows"
    with pytest.raises(TypeError, match=told):
        zf.init(zf.sgd(0.1), {"w": torch.ones(2), "rows": nested(layout)})
    model = nn.Module()
    model.w, model.rows = nn.Parameter(torch.ones(2)), nn.Parameter(nested(layout))
    with pytest.raises(TypeError, match=told):
        zf.attach(model, zf.sgd(0.1))
    for x in (nested(layout).to_padded_tensor(0.0), *nested(layout).unbind()):
        assert zf.init(zf.sgd(0.1), {"w": x}).params["w"].equal(x)
