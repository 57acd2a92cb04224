"""The pure route called wrongly: told at the call, in the words of the caller, with the state as it was."""

from __future__ import annotations

import functools
import re

import numpy as np
import optree
import pytest
import torch
from refusals import Kept, Refusals, keeps
from time_limits import limit
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.testing import clone

F16 = torch.float16
NAN, INF = float("nan"), float("inf")
SGD, ADAMW = zf.sgd(0.5), zf.adamw(0.1)
PIPE = zf.chain(zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), ADAMW, zf.ema(0.9))
WRONG = Refusals()


def params():
    return {"w": torch.tensor([1.0, 2.0, 3.0]), "b": [torch.ones(2, 2)]}


def grads():
    return {"w": torch.ones(3), "b": [torch.ones(2, 2)]}


def loss(p, x=None):
    return (p["w"] ** 2).sum() + p["b"][0].sum()


def started(tx=SGD):
    return zf.init(tx, params())


def in_a_window():
    return zf.update(PIPE, grads(), started(PIPE))[0]


# -- functions ----------------------------------------------------------------------------------------------

for wrong, kind in (
    (None, "a NoneType"),
    (3, "an int"),
    ("loss", "a str"),
    (torch.ones(1), "a Tensor"),
    ({}, "a dict"),
):
    for name, call in (
        ("zf.bind", lambda wrong=wrong: zf.bind(wrong, SGD, started())),
        ("zf.vjp", lambda wrong=wrong: zf.vjp(wrong, SGD, started())),
        ("zf.make_step", lambda wrong=wrong: zf.make_step(wrong, SGD)),
    ):
        WRONG.rows(TypeError, (call, f"{name}({wrong!r}, tx, ...)", f"is {kind}", f"write: {name}(lambda params"))

WRONG.rows(
    TypeError,
    (
        lambda: zf.make_step(loss, SGD)(started(), x=1, y=2),
        "step(state, x=..., y=...)",
        "by position",
        "write: step(state, x, y)",
    ),
    (lambda: zf.bind(loss, SGD, started())(params(), x=1), "fn(stored, x=...)", "write: fn(stored, x)"),
)

for fn, *words in (
    (lambda p: p["w"], "loss_fn returned a tensor of shape (3,)"),
    (lambda p: 1.0, "loss_fn returned a float"),
    (lambda p: None, "loss_fn returned a NoneType"),
    (lambda p: p["w"].sum().long(), "loss_fn returned a tensor of shape (), torch.int64"),
    (lambda p: (p["w"], 1), "loss_fn returned a tensor of shape (3,)"),
    (lambda p: (p["w"].sum(), 1, 2), "loss_fn returned a tuple"),
):
    WRONG.rows(ValueError, (keeps(started, lambda s, fn=fn: zf.make_step(fn, SGD)(s)), *words, "loss.mean()"))


def pulled(cotangents):
    zf.vjp(lambda p: {"y": p["w"] * 2, "z": p["b"][0]}, SGD, started())[1](cotangents)


WRONG.rows(
    ValueError,
    (lambda: pulled(torch.ones(2)), "cotangents", "structure"),
    (
        lambda: pulled({"y": torch.ones(2), "z": torch.ones(2, 2)}),
        "cotangents do not fit",
        "of shape (3,)",
        "of shape (2,)",
    ),
)


@WRONG(RecursionError)
def a_loss_that_recurses_without_end_says_so_itself():
    def endless(p):
        return endless(p)

    state = started()
    yield state
    zf.make_step(endless, SGD)(state)


# -- parameters of a bound function -------------------------------------------------------------------------

ROAMS = {
    "plain": lambda fn: fn,
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "vjp": lambda fn: functools.partial(torch.func.vjp, fn),
}
PIPES = {
    "sgd": SGD,
    "scaled": zf.chain(zf.scale_loss(8.0), SGD),
    "cast": zf.chain(zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32), SGD),
}


def bound(given, tx=SGD, roam=lambda fn: fn):
    def program():
        call = roam(zf.bind(loss, tx, started(tx)))
        yield
        call(given)

    return program


# Each leaf by its path; a stack of parameters is for vmap, and broadcasting is nobody's wish.
for tx in PIPES.values():
    for roam in ROAMS.values():
        WRONG.rows(
            ValueError,
            (bound({"w": torch.ones(5), "b": [torch.ones(2, 2)]}, tx, roam), "w: of shape (5,), stored in shape (3,)"),
            (
                bound({"w": torch.ones(4, 3), "b": [torch.ones(4, 2, 2)]}, tx, roam),
                "w: of shape (4, 3)",
                "b.0: of shape (4, 2, 2)",
                "torch.func.vmap",
            ),
            (
                bound({"w": torch.ones(()), "b": [torch.ones(4)]}, tx, roam),
                "w: of shape ()",
                "b.0: of shape (4,), stored in shape (2, 2)",
            ),
            told=("other parameters than it is bound to", "write: fn(state.params"),
        )
WRONG.rows(
    ValueError,
    *[
        (bound({"w": x, "b": [torch.ones(2, 2)]}), f"w: {type(x).__name__} is no tensor")
        for x in (None, 3.0, "w", np.ones(3))
    ],
    (bound({"w": torch.ones(3)}), "these are not the stored parameters of this state", "b.0: missing"),
)


def test_stacks_of_parameters_under_vmap():
    state = started()
    stacked = tree_map(lambda x: torch.stack([x, 2 * x]), state.params)
    found = torch.func.vmap(torch.func.grad(zf.bind(loss, SGD, state)))(stacked)
    assert torch.equal(found["w"], 2 * stacked["w"])


# -- gradients ----------------------------------------------------------------------------------------------


def with_gradients(change):
    def call(state):
        given = grads()
        change(given)
        zf.update(PIPE, given, state)

    return keeps(in_a_window, call)


WRONG.rows(
    ValueError,
    (with_gradients(lambda g: g.pop("w")), "wrong structure", "w: missing"),
    (with_gradients(lambda g: g.update(c=torch.ones(1), d=torch.ones(1))), "c: extra", "d: extra"),
    (with_gradients(lambda g: g.update(b={"y": torch.ones(3)})), "b.0: missing", "b.y: extra"),
    (with_gradients(lambda g: g.update(b=(torch.ones(2, 2),))), "same leaves in another kind of container"),
    (
        with_gradients(lambda g: g.update(w=torch.ones(2), b=[torch.ones(1)])),
        "w: gradient of shape (2,)",
        "shape (3,)",
        "b.0: gradient of shape (1,)",
    ),
    (with_gradients(lambda g: g.update(w=torch.ones(3, dtype=F16))), "w: gradient in torch.float16", "torch.float32"),
    (with_gradients(lambda g: g.update(w=torch.ones(3).long())), "w: gradient in torch.int64"),
    (with_gradients(lambda g: g.update(w=1.0)), "w: float is no tensor"),
    (
        with_gradients(lambda g: g.update(b=[torch.ones(2, 2).to_sparse()])),
        "b.0: a gradient of layout torch.sparse_coo",
        "sparse=False",
    ),
    (with_gradients(lambda g: g.update(w=None, b=[None])), "no parameter has a gradient", "loss.backward()"),
    (
        keeps(in_a_window, zf.make_step(lambda p: torch.ones((), requires_grad=True) * 2, PIPE)),
        "no parameter has a gradient",
        "uses its params",
    ),
    (
        lambda: SGD.update({"w": torch.ones(1)}, SGD.init({"w": torch.ones(3)}), {"w": torch.ones(3)}),
        "w: gradient of shape (1,)",
    ),
)


@WRONG(ValueError, "b: is the very tensor that stands at a", "None at the others")
def one_gradient_at_two_tied_places():
    w, g = torch.ones(2), torch.ones(2)
    state = zf.init(SGD, {"a": w, "b": w})
    yield state
    zf.update(SGD, {"a": g, "b": g}, state)


@WRONG(FloatingPointError, "50 micro-steps in a row", "b.0", "clip_by_global_norm")
def fifty_overflows_in_a_row_name_the_leaf():
    tx = zf.chain(zf.scale_loss(init_scale=1.0), ADAMW)
    state, bad = started(tx), grads()
    bad["b"][0][1, 1] = INF
    for _ in range(49):
        state, _ = zf.update(tx, bad, state)
    yield state
    zf.update(tx, bad, state)


# -- states -------------------------------------------------------------------------------------------------

for bad in ({"w": torch.ones(1)}, None, params()):
    WRONG.rows(
        TypeError,
        (lambda bad=bad: zf.update(PIPE, grads(), bad), "zf.init(tx, params)"),
        (lambda bad=bad: zf.make_step(loss, PIPE)(bad),),
        told=("it is not a state",),
    )
WRONG.rows(
    ValueError,
    (keeps(in_a_window, lambda state: zf.update(ADAMW, grads(), state)),),
    (keeps(in_a_window, lambda state: zf.make_step(loss, ADAMW)(state)),),
    (keeps(in_a_window, lambda state: zf.bind(loss, ADAMW, state)),),
    (keeps(in_a_window, lambda state: zf.vjp(loss, ADAMW, state)),),
    (keeps(in_a_window, lambda state: zf.full_params(ADAMW, state)),),
    told=("['adamw']", "'scale_loss'", "made by another pipeline"),
)
for old, new, words in (
    (zf.chain(zf.accumulate(1), ADAMW), zf.chain(zf.accumulate(4), ADAMW), "w: accumulate/sum is missing"),
    (
        zf.sgd(0.1),
        zf.sgd(0.1, momentum=0.9),
        "w: sgd/momentum is of shape (0,), torch.float32, instead of (3,), torch.float32",
    ),
    (zf.masked(ADAMW, lambda p: p == "w"), zf.masked(ADAMW, lambda p: p != "z"), "b.0: masked/on/exp_avg is missing"),
):
    WRONG.rows(
        ValueError,
        (
            keeps(functools.partial(started, old), lambda state, new=new: zf.update(new, grads(), state)),
            words,
            "made by another pipeline",
            "zf.init(tx, params)",
        ),
    )


@WRONG(ValueError, "['adamw']", "['sgd']")
def a_foreign_state_after_a_good_one():
    """What was resolved for the first state says nothing of the second."""
    step = zf.make_step(loss, ADAMW)
    step(started(ADAMW))
    state = started(SGD)
    yield state
    step(state)


# A step would count, or end in an error of a kernel.
REAL = {"w": torch.ones(3), "b": torch.ones(2)}
for tx in (SGD, ADAMW, PIPE, zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1))):
    for name, step in (
        ("a step", zf.make_step(lambda p: p["w"].sum() + p["b"].sum(), tx)),
        ("zf.update", lambda s, tx=tx: zf.update(tx, tree_map(torch.ones_like, s.params), s)),
        ("zf.update of", lambda s, tx=tx: zf.update(tx, REAL, s)),
    ):
        make = lambda tx=tx: zf.init(tx, {k: x.to("meta") for k, x in REAL.items()})  # noqa: E731
        words = (name, "on the meta device", "w: (3,)", "b: (2,)", "zf.plan(tx, params)")
        WRONG.rows(ValueError, (keeps(make, step), *words))


@WRONG(RuntimeError, "a step that writes into its state")
def a_state_that_requires_grad_given_to_a_step_that_writes():
    learn = optree.tree_map(lambda x: x.requires_grad_() if x.is_floating_point() else x, clone(started()))
    yield learn
    zf.make_step(loss, SGD, donate=True)(learn)


def differentiated(how):
    """Its derivative would be zero without a word."""
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), SGD, donate=True)

    def call(state):
        how(lambda x: step(state, x)[0].params["w"].sum())(torch.ones(3))

    return keeps(started, call)


WRONG.rows(
    RuntimeError,
    (differentiated(torch.func.grad),),
    (differentiated(lambda fn: torch.func.grad(lambda x: torch.vmap(fn)(x.expand(3, 3)).sum())),),
    (differentiated(lambda fn: lambda x: torch.func.jvp(fn, (x,), (x,))),),
    told=("a step that writes into its state", "without donate"),
)


# -- weights ------------------------------------------------------------------------------------------------

WEIGHTED = zf.chain(zf.accumulate(2, weighted=True), SGD)
WEIGHTS = ["3", "", True, 1j, [3], (3,), {}, object(), np.ones(2), np.bool_(True), torch.ones(2)]
WEIGHTS += [torch.tensor(True), torch.tensor(1j), -1, NAN, INF, np.float32(-1)]


def of_a_model(tx, weight):
    def program():
        model = torch.nn.Linear(2, 1)
        opt = zf.attach(model, tx)
        model(torch.ones(1, 2)).sum().backward()
        yield lambda: opt.state
        opt.step(weight=weight)

    return program


for weight in WEIGHTS:
    for tx in (WEIGHTED, zf.chain(zf.offload(zf.accumulate(2, weighted=True)), SGD)):
        make = functools.partial(started, tx)
        WRONG.rows(
            ValueError,
            (keeps(make, lambda s, tx=tx, weight=weight: zf.update(tx, params(), s, weight=weight)),),
            (keeps(make, lambda s, tx=tx, weight=weight: zf.make_step(loss, tx)(s, weight=weight)),),
            (of_a_model(tx, weight),),
            told=(f"weight={weight!r}", "one number, finite and not negative", "weight=number_of_tokens"),
        )
weighted = functools.partial(started, WEIGHTED)
WRONG.rows(
    ValueError,
    (keeps(weighted, lambda s: zf.update(WEIGHTED, grads(), s)), "without weight=", "weight=number_of_tokens"),
    (keeps(started, lambda s: zf.update(SGD, grads(), s, weight=3)), "weight=", "no effect", "weighted=True"),
    (
        keeps(
            lambda: zf.update(WEIGHTED, grads(), weighted(), weight=0)[0],
            lambda s: zf.update(WEIGHTED, grads(), s, weight=0),
        ),
        "add up to 0",
    ),
)


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3), torch.tensor(3.0)])
def test_weights_that_are(weight):
    state = zf.init(WEIGHTED, {"w": torch.zeros(1)})
    for g, w in ((1.0, weight), (5.0, 1)):
        state, _ = zf.update(WEIGHTED, {"w": torch.tensor([g])}, state, weight=w)
    assert state.params["w"].tolist() == [-1.0]


# -- schedules ----------------------------------------------------------------------------------------------


def scheduled(lr, route, held):
    """The schedule is good at first; the step that is refused is held, or would write."""

    def program():
        broken = []
        tx = zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.sgd(lambda s: lr(s) if broken else 0.1))
        if route == "pure":
            state = started(tx)
            if not held:
                state, _ = zf.update(tx, grads(), state)
            broken.append(1)
            yield state
            zf.update(tx, grads(), state)
        else:
            model = torch.nn.Linear(2, 1)
            opt = zf.attach(model, tx)
            for i in range(1 if held else 2):
                model(torch.ones(1, 2)).sum().backward()
                if i == 0 and not held:
                    opt.step()
            broken.append(1)

            def then():
                """It goes on, when the schedule is mended."""
                broken.clear()
                opt.step()
                assert opt.metrics["updated"] == (not held)

            yield Kept(lambda: opt.state, then)
            opt.step()

    return program


for lr, error, *words in (
    (lambda step: "fast", TypeError, "returned 'fast' at step 0", "a schedule returns a number"),
    (lambda step: None, TypeError, "returned None"),
    (lambda step: torch.ones(2), TypeError, "shape (2,)", "zf.partition"),
    (lambda step: -1.0, ValueError, "returned -1.0 at step 0", "not negative"),
    (lambda step: NAN, ValueError, "returned nan"),
    (lambda step: torch.tensor(NAN), ValueError, "returned tensor(nan)"),
):
    # A held step tells the rate of the update to come, so that it is refused there as well.
    for route in ("pure", "eager"):
        for held in (True, False):
            WRONG.rows(error, (scheduled(lr, route, held), "sgd(lr=<lambda>)", *words))


# -- autograd through an update -----------------------------------------------------------------------------


def learned():
    return zf.sgd(torch.tensor(0.5, requires_grad=True))


@torch.no_grad()
def without_grad(call):
    call(learned())


WRONG.rows(
    RuntimeError,
    *[
        (functools.partial(without_grad, call),)
        for call in (
            lambda tx: zf.update(tx, grads(), started(tx), create_graph=True),
            lambda tx: zf.make_step(loss, tx, create_graph=True)(started(tx)),
            lambda tx: zf.init(tx, params(), create_graph=True),
            lambda tx: zf.vjp(lambda p: p["w"], tx, started(tx), create_graph=True),
        )
    ],
    told=("create_graph=True) inside torch.no_grad",),
)
WRONG.rows(ValueError, (lambda: zf.make_step(loss, learned(), create_graph="yes"), "create_graph is True or False"))


# -- traced, exported, in forward mode -------------------------------------------------------------------------


class Trained(torch.nn.Module):
    """A step with a state of its own."""

    def __init__(self):
        super().__init__()
        self.step, self.state = zf.make_step(loss, PIPE), started(PIPE)

    def forward(self, x):
        return self.step(self.state, x)[0].params["w"]


RECORDERS = {
    "torch.export.export": lambda step: torch.export.export(step, (torch.ones(3),), strict=False),
    **{
        f"make_fx{' ' * i}": lambda step, mode=mode: make_fx(step, tracing_mode=mode)(torch.ones(3))
        for i, mode in enumerate(("real", "fake", "symbolic"))
    },
}
for _name in RECORDERS:

    @WRONG(
        RuntimeError,
        f"{_name.strip()} over a step of zf.make_step\n  why:   a step counts",
        "\n  write: torch.compile(zf.make_step(",
        over=[_name],
    )
    def a_step_that_is_recorded(name):
        step = Trained()
        yield
        RECORDERS[name](step)


@WRONG(RuntimeError, "writes into its state, being differentiated", "write:")
def a_donated_step_in_forward_mode():
    step, state = zf.make_step(lambda p, x: (p["w"] * x).sum(), SGD, donate=True), started()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        yield state
        step(state, x)


@WRONG(Exception, "wieght=...")
def a_keyword_that_a_compiled_step_does_not_have():
    step = torch.compile(zf.make_step(loss, SGD), fullgraph=COMPILES_STATES, backend="aot_eager")
    state = started()
    yield
    step(state, torch.ones(3), wieght=2.0)


@WRONG(RuntimeError, "what it has returned", "create_graph=True")
def a_first_step_that_was_refused():
    number = torch.tensor(0.4, requires_grad=True)
    tx = zf.chain(zf.leafwise(lambda grad, param: grad * number, needs="element")(), zf.sgd(0.2))
    state, step = started(tx), zf.make_step(loss, tx)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        step(state)
    yield
    step(state)


# -- states ----------------------------------------------------------------------------------------------------


@WRONG(RuntimeError, "of a state that was donated")
def a_state_that_was_given_away_after_it_is_loaded(tmp_path):
    step, old = zf.make_step(loss, SGD, donate=True), started()
    step(old)
    torch.save(old, tmp_path / "s.pt")
    loaded = torch.load(tmp_path / "s.pt")
    yield
    step(loaded)


OTHERS = {
    "w: of shape (2,) instead of (3,)": lambda p: {**p, "w": torch.ones(2)},
    "w: torch.bfloat16 instead of torch.float32": lambda p: {**p, "w": torch.ones(3, dtype=torch.bfloat16)},
    "w: on meta instead of cpu": lambda p: {**p, "w": torch.ones(3, device="meta")},
    "w: a float instead of a tensor": lambda p: {**p, "w": 1.0},
    "w: missing": lambda p: {k: v for k, v in p.items() if k != "w"},
    "c: extra": lambda p: {**p, "c": torch.ones(1)},
    "b.0: other numbers than at again": lambda p: {**p, "again": p["again"] + 1},
}


@WRONG(ValueError, "{}", over=OTHERS)
def parameters_that_do_not_fit(told):
    given = params()
    state = zf.init(ADAMW, {**given, "again": given["b"][0]})
    yield state
    state.replace(params=OTHERS[told](dict(state.params)))


@WRONG(ValueError, re.compile(r"depends on values(.|\n)*zf.describe\(zf.init\(tx, params\)\)"))
def a_plan_of_what_follows_from_numbers():
    def init(param):
        return param.sum() * torch.ones(int(param.sum()))

    yield
    zf.plan(zf.chain(zf.leafwise(lambda g, p, s: (g, s), init=init, needs="element")(), SGD), {"w": torch.ones(3)})


@pytest.mark.parametrize("row", WRONG)
def test_refused(row, tmp_path):
    row.check(tmp_path=tmp_path)


def test_a_graph_is_kept_where_it_is_asked_for_and_nowhere_else():
    """By what an update is given, or by name. By a rate alone that requires grad it is refused until it is said."""
    w, rate = torch.ones(3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    tx = zf.sgd(rate)
    start = zf.init(tx, params())
    of = lambda g: {"w": g, "b": [torch.ones(2, 2)]}  # noqa: E731
    for create_graph, g, kept in (
        (None, w * 2, True),
        (True, w.detach(), True),
        (False, w * 2, False),
        (False, w.detach(), False),
    ):
        state, _ = zf.update(tx, of(g), start, create_graph=create_graph)
        assert state.leaves["w"].requires_grad is kept
        if kept:
            (by_rate,) = torch.autograd.grad(state.leaves["w"].sum(), rate)
            assert torch.equal(by_rate, -g.detach().sum())
    with torch.no_grad():
        state, _ = zf.update(tx, of(w * 2), start)
        assert not state.leaves["w"].requires_grad


def test_a_rate_that_is_taken_for_a_constant_keeps_nothing_from_step_to_step():
    rate = torch.tensor(0.1, requires_grad=True)
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=lambda step: rate * 0.5), zf.ema(0.9))
    state, step = zf.init(tx, params()), zf.make_step(lambda p: p["w"].square().sum(), tx, create_graph=False)
    for _ in range(3):
        state, metrics = step(state)
        assert not any(x.requires_grad for x in tree_leaves(state))
    assert metrics["lr"].item() == pytest.approx(0.05)


ON_RANKS = Refusals()


@ON_RANKS(RuntimeError, "pullback after a parameter of the state was written (b)")
def a_pullback_under_shard_after_the_state_was_written():
    tx = zf.chain(zf.shard(), zf.sgd(0.1))
    state = zf.init(tx, {"a": torch.ones(4), "b": torch.ones(4)})
    _, pullback = zf.vjp(lambda p: (p["a"] * p["b"]).sum(), tx, state)
    state.leaves["b"].mul_(2)
    yield state
    pullback(torch.tensor(1.0))


def test_refused_on_ranks():
    zf.launch(ON_RANKS.check, 2, timeout=limit())
