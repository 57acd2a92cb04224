"""States of other libraries: any tree outside, nested dicts of tensors inside, whoever made the state."""

import pickle
import re
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import optree
import pytest
import torch
from refusals import Refusals
from torch import nn
from trees import flat

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step

Pair = namedtuple("Pair", "m n")


@optree.dataclasses.dataclass(namespace="zerofn")
class Both:
    m: dict
    n: dict


@dataclass
class Unknown:
    m: dict
    n: dict


# How two dicts by path are put into a state, and taken out of it.
FORMS = {
    "dict": (lambda m, n: {"m": m, "n": n}, lambda s: (s["m"], s["n"])),
    "tuple": (lambda m, n: (m, n), lambda s: s),
    "lists": (lambda m, n: [list(m.values()), [n, ()]], lambda s: ({"a": s[0][0], "b": s[0][1]}, s[1][0])),
    "NamedTuple": (lambda m, n: (Pair(m, n), ()), lambda s: (s[0].m, s[0].n)),
    "class": (Both, lambda s: (s.m, s.n)),
    "words": (lambda m, n: {"x": (m, 1.5, None, "text", torch.float32), "n": n}, lambda s: (s["x"][0], s["n"])),
    "more than ten": (lambda m, n: [m, *[n] * 11], lambda s: (s[0], s[11])),
}
# The compiler knows no classes that are registered with optree.
COMPILED = [form for form in FORMS if form != "class"]


class Averages:
    """Momentum and the average of gradients, in a state of one of the forms."""

    def __init__(self, form):
        self.put, self.get = FORMS[form]

    def init(self, params):
        return self.put(*[{path: torch.zeros_like(p) for path, p in params.items()} for _ in range(2)])

    def update(self, updates, state, params=None):
        m, n = self.get(state)
        assert type(state) is type(self.put(m, n))
        m = {path: 0.5 * m[path] + g for path, g in updates.items()}
        n = {path: 0.25 * n[path] + 0.75 * g for path, g in updates.items()}
        return {path: m[path] + n[path] for path in m}, self.put(m, n)


def chained(form):
    return zf.chain(Averages(form), zf.sgd(0.125))


PARAMS = {"a": torch.ones(2), "b": torch.ones(3)}


def loss(params, x):
    return sum(((p - x) ** 2).sum() for p in params.values())


def stepped(tx, state, steps, step=None):
    for x in steps:
        state, _ = (step or zf.make_step(loss, tx))(state, torch.tensor(float(x)))
    return state


@pytest.fixture(scope="module")
def expected():
    """By hand."""
    p, m, n = 1.0, 0.0, 0.0
    for x in (3.0, 5.0, 7.0, 9.0):
        g = 2 * (p - x)
        m, n = 0.5 * m + g, 0.25 * n + 0.75 * g
        p -= 0.125 * (m + n)
    return p


def again_by_hand(form, state, folder):
    return chained(form), state


def again_by_pickle(form, state, folder):
    return chained(form), pickle.loads(pickle.dumps(state))


def again_from_a_file(form, state, folder):
    zf.save(folder, state)
    tx = chained(form)
    return tx, zf.load(folder, like=zf.init(tx, PARAMS))


@pytest.mark.parametrize("again", [again_by_hand, again_by_pickle, again_from_a_file])
@pytest.mark.parametrize("form", FORMS)
def test_a_state_goes_on_in_another_pipeline(form, again, expected, tmp_path):
    tx = chained(form)
    state = stepped(tx, zf.init(tx, PARAMS), (3, 5))
    tx, state = again(form, state, tmp_path / "c")
    state = stepped(tx, state, (7, 9))
    assert {x for p in state.params.values() for x in p.tolist()} == {expected}
    inside = flat(state.transforms["Averages"])
    assert all(isinstance(x, torch.Tensor) for x in inside.values()) and len(inside) in (4, 24)


@pytest.mark.parametrize("form", FORMS)
def test_in_an_attached_model(form, expected):
    models = [nn.ParameterDict({path: x.clone() for path, x in PARAMS.items()}) for _ in range(2)]
    opts = [zf.attach(model, chained(form)) for model in models]
    for model, opt, steps in zip(models, opts, ((3, 5), (7, 9)), strict=True):
        if opt is opts[1]:
            opt.load_state_dict(opts[0].state_dict())
        for x in steps:
            loss(model, torch.tensor(float(x))).backward()
            opt.step()
            opt.zero_grad()
    assert {x for p in models[1].values() for x in p.tolist()} == {expected}


@pytest.mark.parametrize(
    "form", [pytest.param(x, marks=() if x == "NamedTuple" else pytest.mark.slow) for x in COMPILED]
)
def test_in_one_graph(form, expected):
    tx = chained(form)
    step = torch.compile(zf.make_step(loss, tx), backend="aot_eager", fullgraph=COMPILES_STATES)
    state = stepped(tx, zf.init(tx, PARAMS), (3, 5, 7, 9), step)
    assert {round(x, 5) for p in state.params.values() for x in p.tolist()} == {round(expected, 5)}


REFUSED = {
    "dataclass": (Unknown, r"its root: an? Unknown(?s:.*)register_pytree_node\(Unknown, "),
    "namespace": (lambda m, n: {"x": [SimpleNamespace(m=m, n=n)]}, r"x\.0: a SimpleNamespace"),
    "set": (lambda m, n: (frozenset(m.values()),), r"0: a frozenset"),
    "module": (lambda m, n: (nn.Linear(1, 1), m), r"0: a Linear"),
}


# ---- refused ----

ROWS = Refusals()


for _kind, (_put, _said) in REFUSED.items():

    @ROWS(
        TypeError,
        re.compile(r"Averages: a state in classes that are no nodes of a tree(?s:.*)" + _said),
        over=["init", "update"],
    )
    def a_class_that_trees_do_not_look_into(at, put=_put):
        guest = Averages("tuple")
        guest.put = put if at == "init" else FORMS["tuple"][0]
        yield
        state = zf.init(zf.chain(guest, zf.sgd(0.1)), PARAMS)
        guest.update = lambda updates, state, params=None: (updates, put(*state))
        zf.update(zf.chain(guest, zf.sgd(0.1)), PARAMS, state)


@ROWS(ValueError, re.compile(r"Counts: a value that is no tensor changes in its state\n  n: 1 after 0(?s:.*)tensor"))
def numbers_of_python_that_change():
    class Counts(Averages):
        def init(self, params):
            return {"n": 0, "m": params["a"].clone()}

        def update(self, updates, state, params=None):
            return updates, {"n": state["n"] + 1, "m": state["m"]}

    tx = zf.chain(Counts("dict"), zf.sgd(0.1))
    state = zf.init(tx, PARAMS)
    yield
    zf.update(tx, PARAMS, state)


@ROWS(ValueError, re.compile(r"Averages with a state that has 0/a, 0/b, 1/a, 1/b(?s:.*)has m/a, m/b, n/a, n/b"))
def the_state_of_another_guest():
    state = zf.init(chained("tuple"), PARAMS)
    yield state
    zf.update(chained("dict"), PARAMS, state)


@ROWS(ValueError, "Averages: two tensors of a state under the keys '0.a'")
def keys_of_one_text():
    guest = Averages("tuple")
    guest.put = lambda m, n: {0: m, "0": n}
    yield
    zf.init(zf.chain(guest, zf.sgd(0.1)), PARAMS)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
