"""A hand-written state may be nested dicts: bucket by bucket, leaf by leaf in backward and without gradients, the
numbers are those of the flat one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofn as zf
import zerofn.core.executor as executor  # inside: how large a bucket is
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.core.tree import of_leaves, overlaid, places  # inside: how parts of states are laid over each other
from zerofn.extend import Facts, Prepared, Scope, Transform, flatten

# Of parameters in one bucket, where the tests make them small: the wide model below has several.
BUCKET = 1 << 12
WIDE = 40


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(executor, "BUCKET_BYTES", BUCKET)


ByPath = dict[str, Tensor]


# By name: a state of two tensors for each leaf, and these tensors.
FORMS: dict[str, tuple[Callable[[ByPath, ByPath], Any], Callable[[Any], tuple[ByPath, ByPath]]]] = {
    "flat": (lambda m, n: {"m": m, "n": n}, lambda s: (s["m"], s["n"])),
    "nested": (lambda m, n: {"opt": {"m": m, "n": n}}, lambda s: (s["opt"]["m"], s["opt"]["n"])),
    "beside a number": (
        lambda m, n: {"opt": {"m": m, "n": n, "beta": torch.tensor(0.5)}},
        lambda s: (s["opt"]["m"], {p: x * s["opt"]["beta"] * 2 for p, x in s["opt"]["n"].items()}),
    ),
    "deep": (lambda m, n: {"opt": {"a": {"m": m}, "n": n}}, lambda s: (s["opt"]["a"]["m"], s["opt"]["n"])),
    "dicts of leaves": (
        lambda m, n: {"opt": {p: {"m": m[p], "n": n[p]} for p in m}},
        lambda s: ({p: x["m"] for p, x in s["opt"].items()}, {p: x["n"] for p, x in s["opt"].items()}),
    ),
}


def momentum(form: str) -> Transform:
    """Momentum of two kinds, whose state is of one of the forms."""
    put, get = FORMS[form]

    def init(leaves, layout):
        zeros = lambda: {p: torch.zeros_like(x) for p, x in leaves.items()}  # noqa: E731
        return put(zeros(), zeros())

    def update(grads, state, params, carry, ctx):
        m, n = get(state)
        # What is not of the bucket was not asked for.
        assert m.keys() == n.keys() == params.keys()
        m = {p: 0.9 * m[p] + g for p, g in grads.items()}
        n = {p: 0.5 * n[p] + g for p, g in grads.items()}
        return {p: params[p] - 0.01 * m[p] - 0.02 * n[p] for p in grads}, put(m, n)

    return Transform("mine", Scope.LEAF, init_fn=init, update_fn=update, facts=Facts(optimizes=True))


CHAINS: dict[str, Callable[[Transform], Transform]] = {
    "alone": lambda t: t,
    "accumulated": lambda t: zf.chain(zf.accumulate(2), t),
    "clipped": lambda t: zf.chain(zf.clip_by_global_norm(1.0), t),
    "nested": lambda t: zf.chain(zf.chain(zf.clip_by_value(1.0), t)),
    "offloaded": zf.offload,
    "partition": lambda t: zf.partition({"a": t, "b": zf.sgd(0.1)}, lambda path: "a" if "weight" in path else "b"),
}


def train(tx: Transform, in_backward: bool, width: int, some: bool) -> list[Tensor]:
    """Parameters and states after four steps; with `some`, each head has gradients in every second one."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    heads = nn.ModuleList([nn.Linear(width, 3), nn.Linear(width, 2)])
    opt = zf.attach(nn.ModuleList([body, heads]), tx, in_backward=in_backward)
    for i in range(4):
        x = body(torch.ones(2, width) * (i + 1) / width)
        sum(heads[j](x).square().sum() for j in range(2) if not some or i % 2 == j).backward()
        opt.step()
        opt.zero_grad()
    assert width < WIDE or sum(p.nbytes for p in body.parameters()) > BUCKET
    found = [*body.parameters(), *heads.parameters(), *flatten(opt.state.transforms)[0]]
    return [x.detach().clone() for x in found if isinstance(x, Tensor)]


def same(tx: Callable[[str], Transform], form: str, *how: Any) -> None:
    got, want = train(tx(form), *how), train(tx("flat"), *how)
    # In a tree library's order, the dicts of leaves have theirs leaf by leaf.
    for x in got:
        assert "number" in form or any(torch.equal(x, y) for y in want)
    for x, y in zip(got[:8], want[:8], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("some", [False, True], ids=["all leaves", "some leaves"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "flat"])
@pytest.mark.parametrize("chain", CHAINS)
def test_of_one_bucket(chain, form, some):
    same(lambda form: CHAINS[chain](momentum(form)), form, False, 4, some)


@pytest.mark.parametrize("some", [False, True], ids=["all leaves", "some leaves"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "flat"])
@pytest.mark.parametrize("chain", ["alone", "nested", "offloaded", "partition"])
def test_within_backward(chain, form, some):
    same(lambda form: CHAINS[chain](momentum(form)), form, True, 4, some)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "flat"])
def test_of_several_buckets(form, small_buckets):
    same(momentum, form, False, WIDE, True)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "flat"])
@pytest.mark.slow
def test_of_several_buckets_in_chains(chain, form, small_buckets):
    same(lambda form: CHAINS[chain](momentum(form)), form, False, WIDE, True)


PATHS = ["a", "b", "c"]
BY_PATH = st.fixed_dictionaries({path: st.integers() for path in PATHS})
BELOW = st.recursive(
    BY_PATH | st.integers(),
    lambda x: st.dictionaries(st.sampled_from(["m", "n", "o"]), x),
)


@given(st.dictionaries(st.sampled_from(["m", "n", "a"]), BELOW), st.lists(st.sampled_from(PATHS), unique=True))
def test_parts_laid_over_a_state_are_that_state(state, some):
    at = places(state, PATHS)
    part = of_leaves(state, at, some)
    assert overlaid(state, part) == state
    # All parts together are all there is.
    whole = part
    for path in PATHS:
        whole = overlaid(whole, of_leaves(state, at, [path]))
    assert whole == state
    # What a part has, and no more.
    assert of_leaves(part, at, some) == part
    assert of_leaves(state, at, PATHS) == state


def test_a_leaf_may_keep_a_dict_with_the_paths_of_leaves():
    state = {"opt": {"a": {"a": 1, "b": 2}, "b": {"b": 3}}, "a": {"n": {"a": 4, "b": 5}}}
    at = places(state, PATHS)
    assert of_leaves(state, at, ["a"]) == {"opt": {"a": {"a": 1, "b": 2}}, "a": {"n": {"a": 4}}}
    assert of_leaves(state, at, ["b"]) == {"opt": {"b": {"b": 3}}, "a": {"n": {"b": 5}}}


def test_slots_may_have_the_paths_of_leaves():
    state = {"a": {"a": 1, "b": 2}, "b": {"a": 3, "b": 4}}
    assert of_leaves(state, places(state, PATHS), ["a"]) == {"a": {"a": 1}, "b": {"a": 3}}


def test_what_is_prepared_and_what_is_updated_may_be_of_one_entry():
    """Of a tree in which both have written something, each what it has written."""

    def prepare(state, grads, params, ctx):
        return Prepared(state={"o": {**state["o"], "n": state["o"]["n"] + 1}})

    def update(grads, state, params, carry, ctx):
        m = {path: g + 0.5 * state["o"]["m"][path] for path, g in grads.items()}
        return {path: params[path] - m[path] for path in m}, {"o": {"m": m}}

    def init(leaves, layout):
        return {"o": {"m": {path: torch.zeros_like(x) for path, x in leaves.items()}, "n": torch.tensor(0)}}

    tx = Transform("mine", Scope.LEAF, "element", Facts(optimizes=True), init, prepare, update)
    for in_backward in (False, True):
        model = nn.ParameterDict({path: torch.zeros(2) for path in "ab"})
        opt = zf.attach(model, tx, in_backward=in_backward)
        for _ in range(3):
            sum(p.sum() for p in model.values()).backward()
            opt.step()
            opt.zero_grad()
        kept = opt.state.transforms["mine"]["o"]
        assert kept["n"] == 3 and [x.tolist() for x in kept["m"].values()] == [[1.75] * 2] * 2
        assert [p.tolist() for p in model.values()] == [[-4.25] * 2] * 2


@pytest.mark.parametrize("form", ["nested", *[pytest.param(x, marks=pytest.mark.slow) for x in FORMS if x != "nested"]])
def test_of_several_buckets_in_one_graph(form, small_buckets):
    tx = zf.chain(zf.accumulate(2), momentum(form))
    plain = zf.make_step(lambda p, x: sum((v * x).sum() for v in p.values()), tx)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=COMPILES_STATES)
    params = {path: torch.ones(WIDE, WIDE) for path in ("1.0.bias", "b", "c")}
    states = [zf.init(tx, params)] * 2
    for i in range(4):
        states = [step(state, torch.tensor(1.0 + i))[0] for step, state in zip((plain, compiled), states, strict=True)]
    for path, x in states[0].params.items():
        assert (x - 1).abs().min() > 0.1 and torch.equal(x, states[1].params[path])
