"""Public functions inside of a function of the user's own that is compiled: right, or refused by name.

The reference is the same function uncompiled.
"""

import re

import pytest
import torch
from refusals import Refusals

import zerofn as zf
from zerofn.testing import assert_trees_equal

TX = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.adamw(0.1))
PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]], dtype=torch.bfloat16)


def fn(params, x):
    return ((x @ params["w"]) ** 2).mean()


def pulled(state, x):
    out, pullback = zf.vjp(fn, TX, state, x)
    # Twice: the graphs of its pieces could be gone back through once.
    return out, pullback(torch.ones_like(out))[0], pullback(torch.ones_like(out))[0]


FUNCTIONS = {
    "zf.init": lambda state, x: zf.init(TX, {"w": x[0].float()}).params,
    "zf.full_params": lambda state, x: zf.full_params(TX, state),
    "zf.bind": lambda state, x: zf.bind(fn, TX, state)(state.params, x),
    "zf.vjp": pulled,
    "zf.update": lambda state, x: zf.update(TX, {"w": x[0].float()}, state)[0].params,
    "zf.make_step": lambda state, x: zf.make_step(fn, TX)(state, x)[0].params,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_gives_what_it_gives_uncompiled(name):
    torch._dynamo.reset()
    state = zf.init(TX, PARAMS)
    found = torch.compile(FUNCTIONS[name], backend="aot_eager")(state, X)
    wanted = FUNCTIONS[name](state, X)
    if name == "zf.make_step":
        # Adam in a graph is its formula: 3e-7 of the largest term.
        torch.testing.assert_close(found["w"], wanted["w"], rtol=1e-6, atol=1e-6)
    else:
        assert_trees_equal(found, wanted)


STEP = zf.make_step(fn, TX)


def mine(grad, param):
    return grad


def saved_and_loaded(state, x, directory):
    zf.save(directory, state)
    return zf.load(directory, state).params


def curvature(state, x, directory):
    return zf.curvature.trace(lambda p, x: fn({"w": p["w"].float()}, x.float()), TX, state, x, samples=2)[""].value


OTHERS = {
    "zf.gather": lambda state, x, directory: zf.gather(TX, state, {"w": x[0].float()}),
    "zf.global_norm": lambda state, x, directory: zf.global_norm({"w": x[0].float()}, TX, state),
    "zf.plan": lambda state, x, directory: zf.plan(TX, {"w": x[0].float()}).bytes_per_parameter,
    "zf.export_safetensors": lambda state, x, directory: zf.export_safetensors(f"{directory}.safetensors", state),
    "zf.curvature.trace": curvature,
    "zf.unroll": lambda state, x, directory: zf.unroll(STEP, state, [x * 1, x], every=1)[1],
    "zf.replay": lambda state, x, directory: zf.replay(STEP, state, x * 1),
    "zf.save": saved_and_loaded,
    "zf.load": lambda state, x, directory: zf.load(directory, state).params,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_surrounds_steps_runs_uncompiled_or_is_refused_by_name(name, tmp_path):
    torch._dynamo.reset()
    state, directory = zf.init(TX, PARAMS), str(tmp_path / "kept")
    zf.save(directory, state)
    found = torch.compile(OTHERS[name], backend="aot_eager")(state, X, directory)
    assert_trees_equal(found, OTHERS[name](state, X, directory))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"(?s){name} inside of torch.compile.*write: .*{name}\("):
        torch.compile(OTHERS[name], fullgraph=True, backend="aot_eager")(state, X, directory)


def test_a_bound_function_and_a_pullback_from_outside_are_refused_by_name():
    state = zf.init(TX, PARAMS)
    bound = zf.bind(fn, TX, state)
    out, pullback = zf.vjp(fn, TX, state, X)
    for name, given, x in (
        ("zf.bind", lambda x: bound(state.params, x), X),
        ("zf.vjp", pullback, torch.ones_like(out)),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"(?s){name}.*write: .*zf.make_step\(loss_fn, tx\)"):
            torch.compile(given, fullgraph=True, backend="aot_eager")(x)
        assert_trees_equal(torch.compile(given, backend="aot_eager")(x), given(x))


def test_a_model_is_attached_uncompiled_or_it_is_refused_by_name():
    def attach(model):
        return zf.attach(model, TX)

    torch._dynamo.reset()
    assert torch.compile(attach, backend="aot_eager")(torch.nn.Linear(2, 1)).state.step == 0
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"(?s)zf.attach inside of torch.compile.*write: opt = zf.attach"):
        torch.compile(attach, fullgraph=True, backend="aot_eager")(torch.nn.Linear(2, 1))


MADE = {
    "sgd": lambda x: zf.sgd(0.1),
    "chain": lambda x: zf.chain(TX),
    "from_torch": lambda x: zf.from_torch(torch.optim.SGD),
    "leafwise": lambda x: zf.leafwise(mine)(),
}


@pytest.mark.parametrize("name", MADE)
def test_a_transform_is_made_uncompiled_or_is_refused_by_name(name):
    torch._dynamo.reset()
    assert repr(torch.compile(MADE[name], backend="aot_eager")(X)) == repr(MADE[name](X))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"(?s){name}\(...\) inside of torch.compile.*write: .*zf.sgd"):
        torch.compile(MADE[name], fullgraph=True, backend="aot_eager")(X)


TRANSFORMED = {
    "grad": lambda step, state, x: torch.func.grad(lambda x: step(state, x)[0].params["w"].sum())(x),
    "vjp": lambda step, state, x: torch.func.vjp(lambda x: step(state, x)[0].params, x)[1]({"w": torch.ones(3)}),
    "jvp": lambda step, state, x: torch.func.jvp(lambda x: step(state, x)[0].params, (x,), (x * 2,)),
    "vmap": lambda step, state, x: torch.func.vmap(lambda x: step(state, x[None])[0].params)(x),
    "both": lambda step, state, x: torch.func.vmap(torch.func.grad(lambda x: step(state, x[None])[1]["grad_norm"]))(x),
    "unroll": lambda step, state, x: torch.func.grad(lambda x: zf.unroll(step, state, [x, 2 * x], every=1)[1][-1])(x),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "grad" else pytest.mark.slow) for x in TRANSFORMED],
)
def test_torch_func_over_a_compiled_step_runs_it_uncompiled_or_is_refused_by_name(name):
    torch._dynamo.reset()
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(0.1))
    step, state, x = zf.make_step(fn, tx), zf.init(tx, PARAMS), X.float()
    wanted = TRANSFORMED[name](step, state, x)
    # Twice, since the first call decides what becomes of each frame. What a transform does not see is compiled.
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        assert_trees_equal(TRANSFORMED[name](compiled, state, x), wanted)
    torch.testing.assert_close(compiled(state, x)[0].params, step(state, x)[0].params, rtol=1e-6, atol=1e-6)
    if torch.__version__ >= "2.13":
        whole = torch.compile(zf.make_step(fn, tx), fullgraph=True, backend="aot_eager")
        for _ in range(2):
            with pytest.raises(Exception, match=r"(?s)torch.func.grad, vjp, jvp or vmap over what is.*write: "):
                TRANSFORMED[name](whole, state, x)


def test_what_it_says_to_write():
    state = zf.init(TX, PARAMS)
    out, pullback = zf.vjp(torch.compile(fn, fullgraph=True, backend="aot_eager"), TX, state, X)
    wanted, other = zf.vjp(fn, TX, state, X)
    assert_trees_equal((out, pullback(torch.ones_like(out))[0]), (wanted, other(torch.ones_like(out))[0]))


# ---- refused ----

ROWS = Refusals()


for _name in FUNCTIONS:

    @ROWS(
        Exception, f"{_name} inside of torch.compile", re.compile(r"write: .*zf.make_step\(loss_fn, tx\)"), over=[_name]
    )
    def one_whole_graph(name):
        torch._dynamo.reset()
        state = zf.init(TX, PARAMS)
        yield
        torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")(state, X)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
