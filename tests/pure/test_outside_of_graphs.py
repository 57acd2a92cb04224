"""Public functions inside of a function of the user's own that is compiled: right, or refused by name.

The reference is the same function uncompiled.
"""

import pytest
import torch

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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_whole_graph_is_refused_by_name(name):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"(?s){name} inside of torch.compile.*write: .*zf.make_step\(loss_fn, tx\)"):
        torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")(zf.init(TX, PARAMS), X)


STEP = zf.make_step(fn, TX)


def saved_and_loaded(state, x, directory):
    zf.save(directory, state)
    return zf.load(directory, state).params


OTHERS = {
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


def test_what_it_says_to_write():
    state = zf.init(TX, PARAMS)
    out, pullback = zf.vjp(torch.compile(fn, fullgraph=True, backend="aot_eager"), TX, state, X)
    wanted, other = zf.vjp(fn, TX, state, X)
    assert_trees_equal((out, pullback(torch.ones_like(out))[0]), (wanted, other(torch.ones_like(out))[0]))
