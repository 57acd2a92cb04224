"""A transform may hand on a tensor that is another's in each of its functions: the numbers are those of copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn._compat.tensors import memories  # inside: what compares addresses
from zerofn.core import returned_values  # inside: when addresses are compared
from zerofn.extend import Facts, Prepared, Scope, Transform

Copy = Callable[[Tensor], Tensor]


def start() -> dict[str, Tensor]:
    return {"a": torch.full((3,), 2.0), "b": torch.arange(3.0), "t": torch.tensor(0.5)}


def loss(p: Any, x: Tensor) -> Tensor:
    return (p["t"] * p["a"] * x + p["b"] ** 2).sum()


def run(tx: Transform, route: str) -> list[dict[str, Tensor]]:
    """What three steps leave: metrics, parameters and states, by name."""
    x, found = torch.tensor([1.0, 2.0, -1.0]), []
    if route in ("eager", "in backward"):
        model = nn.ParameterDict(start())
        opt = zf.attach(model, tx, in_backward=route == "in backward")
        for _ in range(3):
            loss(model, x).backward()
            opt.step()
            opt.zero_grad()
            found.append((opt.metrics, opt.state))
    else:
        step, state = zf.make_step(loss, tx, donate="donated" in route), zf.init(tx, start())
        if "compiled" in route:
            step = torch.compile(step, backend="aot_eager", fullgraph=COMPILES_STATES)
        for _ in range(3):
            state, metrics = step(state, x)
            found.append((metrics, state))
    # Metrics are read at the end, as by one who logs them later.
    last = {f"state {i}": x.detach().clone() for i, x in enumerate(tensors(found[-1][1]))}
    return [{name: x for name, x in shown.items() if name.startswith("my ")} for shown, _ in found] + [last]


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in zf.extend.flatten(tree)[0] if isinstance(x, Tensor)]


def zeros(leaves: Any) -> dict[str, Tensor]:
    return {path: torch.zeros_like(x) for path, x in leaves.items()}


def distance(params: Any, others: Any) -> Tensor:
    return sum((params[path] - others[path]).square().sum() for path in params)


def only_watches(c: Copy) -> Transform:
    """Its first state is the parameters, and it has no update half."""

    def prepare(state, grads, params, ctx):
        ctx.report("my drift", distance(params, state["first"]))
        return Prepared()

    first = lambda leaves, layout: {"first": {path: c(x) for path, x in leaves.items()}}  # noqa: E731
    return Transform("only_watches", Scope.TREE, init_fn=first, prepare_fn=prepare)


def prepares_parameters(c: Copy) -> Transform:
    def prepare(state, grads, params, ctx):
        ctx.report("my drift", distance(params, state["last"]))
        return Prepared(state={"last": {path: c(x) for path, x in params.items()}})

    return Transform("prepares", Scope.TREE, init_fn=lambda leaves, _: {"last": zeros(leaves)}, prepare_fn=prepare)


def prepares_gradients(c: Copy) -> Transform:
    def prepare(state, grads, params, ctx):
        ctx.report("my drift", distance(grads, state["last"]))
        return Prepared(state={"last": {path: c(x) for path, x in grads.items()}})

    return Transform("prepares", Scope.TREE, init_fn=lambda leaves, _: {"last": zeros(leaves)}, prepare_fn=prepare)


def prepares_each_other(c: Copy) -> Transform:
    def prepare(state, grads, params, ctx):
        return Prepared(carry=state["one"].sum(), state={"one": c(state["two"]), "two": c(state["one"])})

    def update(grads, state, params, carry, ctx):
        return {path: g * carry for path, g in grads.items()}, state

    first = lambda leaves, layout: {"one": torch.tensor([1.0, 2.0]), "two": torch.tensor([5.0, 6.0])}  # noqa: E731
    return Transform("prepares", Scope.TREE, init_fn=first, prepare_fn=prepare, update_fn=update)


def prepares_one_state(c: Copy) -> Transform:
    """Two entries of one tensor, into one of which it writes afterwards."""

    def prepare(state, grads, params, ctx):
        return Prepared(state={"mean": c(state["sum"])})

    def update(grads, state, params, carry, ctx):
        ctx.report("my mean", state["mean"])
        return {path: g * (1 + state["mean"]) for path, g in grads.items()}, {"sum": ctx.own(state["sum"]).add_(1)}

    first = lambda leaves, layout: {"sum": torch.zeros(()), "mean": torch.zeros(())}  # noqa: E731
    return Transform("prepares", Scope.WHOLE, init_fn=first, prepare_fn=prepare, update_fn=update)


def carries_a_parameter(c: Copy) -> Transform:
    """Of the leaf that is written first."""

    def prepare(state, grads, params, ctx):
        return Prepared(carry={"by": c(params["a"][0])})

    def update(grads, state, params, carry, ctx):
        return {p: ctx.into(params[p], params[p] - 0.1 * carry["by"] * g) for p, g in grads.items()}, state

    return Transform("carries", Scope.TREE, facts=Facts(optimizes=True), prepare_fn=prepare, update_fn=update)


def keeps_what_is_carried(c: Copy) -> Transform:
    def prepare(state, grads, params, ctx):
        return Prepared(carry=grads["t"])

    def update(grads, state, params, carry, ctx):
        ctx.report("my last", sum(state["last"].values()))
        return {path: g + state["last"][path] for path, g in grads.items()}, {
            "last": {path: c(carry) for path in grads}
        }

    first = lambda leaves, layout: {"last": {path: torch.zeros(()) for path in leaves}}  # noqa: E731
    return Transform("carries", Scope.TREE, init_fn=first, prepare_fn=prepare, update_fn=update)


def holds_by_its_flag(c: Copy) -> Transform:
    """Whether anything goes on is a tensor, one of its own state; behind it a momentum must stay as it is."""

    def prepare(state, grads, params, ctx):
        ctx.report("my flag", c(state["open"]))
        return Prepared(state={"open": ~state["open"]}, emit=c(state["open"]))

    first = lambda leaves, layout: {"open": torch.tensor(True)}  # noqa: E731
    return Transform("holds", Scope.TREE, needs="number", init_fn=first, prepare_fn=prepare)


def reports_a_parameter(c: Copy) -> Transform:
    def prepare(state, grads, params, ctx):
        ctx.report("my t", c(params["t"]))
        return Prepared(close=lambda: ctx.report("my first", c(params["a"][0])))

    def update(grads, state, params, carry, ctx):
        if "b" in grads:
            ctx.report("my b", c(params["b"][1]))
        return dict(grads), state

    return Transform("reports", prepare_fn=prepare, update_fn=update)


@zf.leafwise(optimizer=True, needs="element")
def takes(grad: Tensor, param: Tensor, *, c: Copy) -> Tensor:
    return c(grad)


def ties(c: Copy) -> Transform:
    """New parameters that are one tensor, and expanded ones."""

    def update(grads, state, params, carry, ctx):
        mean = params["a"] + params["b"] - 0.1 * grads["a"]
        return {"a": mean, "b": c(mean), "t": params["t"]}, {"mean": {p: c(mean.mean().expand(3)) for p in "ab"}}

    first = lambda leaves, layout: {"mean": {p: torch.zeros(3) for p in "ab"}}  # noqa: E731
    return Transform("ties", Scope.WHOLE, facts=Facts(optimizes=True), init_fn=first, update_fn=update)


ROUTES = ["pure", "donated", "compiled donated", "eager"]
PROGRAMS = {
    "no update half": only_watches,
    "parameters prepared": prepares_parameters,
    "gradients prepared": prepares_gradients,
    "states that change places": prepares_each_other,
    "two states of one tensor": prepares_one_state,
    "a parameter carried": carries_a_parameter,
    "a gradient kept by way of the carry": keeps_what_is_carried,
    "a flag of its own": holds_by_its_flag,
    "metrics that are parameters": reports_a_parameter,
    "gradients for parameters": lambda c: takes(c=c),
    "one tensor for two parameters": ties,
}


# A compiler takes half a minute for each program: these have all that a graph writes in place.
COMPILED = {"states that change places", "a gradient kept by way of the carry", "one tensor for two parameters"}
SLOW = {(program, "compiled donated") for program in COMPILED - {"states that change places"}}


@pytest.mark.parametrize(
    "program, route",
    [
        pytest.param(program, route, marks=pytest.mark.slow if (program, route) in SLOW else ())
        for program in PROGRAMS
        for route in [*ROUTES, "in backward"]
        if route != "compiled donated" or program in COMPILED
    ],
)
def test_a_tensor_of_anothers_is_as_good_as_a_copy(program, route):
    found, expected = (_numbers(PROGRAMS[program], c, route) for c in (_itself, torch.clone))
    if isinstance(expected, str):
        assert found == expected  # refused within backward: it must see every gradient
        return
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert torch.equal(x, other[name]), (name, x, other[name])
    assert not torch.equal(found[-1]["state 0"], start()["a"])


def _itself(x: Tensor) -> Tensor:
    return x


def _numbers(program: Callable[[Copy], Transform], c: Copy, route: str) -> Any:
    made = program(c)
    tx = zf.chain(made) if made.facts.optimizes else zf.chain(made, zf.sgd(0.1, momentum=0.9))
    try:
        return run(tx, route)
    except ValueError as error:
        assert route == "in backward"
        return str(error)


def test_parameters_that_were_gradients_are_not_what_their_caller_makes_of_them():
    grads = {path: x.clone() for path, x in start().items()}
    state, _ = zf.update(takes(c=_itself), grads, zf.init(takes(c=_itself), start()))
    for g in grads.values():
        g.zero_()
    assert torch.equal(state.params["a"], start()["a"])


def test_a_held_step_leaves_parameters_that_were_gradients_alone():
    tx = zf.chain(zf.accumulate(2), takes(c=_itself))
    step, state = zf.make_step(lambda p, x: (p["w"] * x).sum(), tx, donate=True), zf.init(tx, {"w": torch.ones(2)})
    found = []
    for i in range(3):
        state, _ = step(state, torch.full((2,), i + 1.0))
        found.append(state.params["w"].tolist())
    assert found == [[1.0, 1.0], [1.5, 1.5], [1.5, 1.5]]  # the mean of gradients 1 and 2, then a held step


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "n": torch.zeros_like(p)}, needs="element")
def twice(grad, param, state):
    m = 0.9 * state["m"] + grad
    return m, {"m": m, "n": m}


@zf.leafwise(init=torch.zeros_like)
def spread(grad, param, state):
    return grad, grad.mean().expand_as(grad)


def one_for_all() -> Transform:
    def update(grads, state, params, carry, ctx):
        whole = sum(g.sum() for g in grads.values())
        return grads, {"sum": dict.fromkeys(grads, whole), "last": whole}

    first = lambda leaves, layout: {"sum": {p: torch.zeros(()) for p in leaves}, "last": torch.zeros(())}  # noqa: E731
    return Transform("one_for_all", init_fn=first, update_fn=update)


@pytest.mark.parametrize("made", [twice, spread, one_for_all])
def test_states_that_an_update_made_of_one_tensor_are_loaded_apart(made):
    """What is loaded is written into the states that there are."""

    def attached():
        model = nn.ParameterDict(start())
        return model, zf.attach(model, zf.chain(made(), zf.sgd(0.1)))

    _, other = attached()
    for i, x in enumerate(tensors(other.state.transforms[made().name])):
        x.fill_(i + 1.0)
    model, opt = attached()
    loss(model, torch.ones(3)).backward()
    opt.step()
    opt.load_state_dict(copy.deepcopy(other.state_dict()))
    found = tensors(opt.state.transforms[made().name])
    assert [x.unique().tolist() for x in found] == [[i + 1.0] for i in range(len(found))]


@pytest.mark.parametrize("route", ["pure", "donated", "eager"])
def test_what_stands_behind_a_flag_stays_where_that_is_false(route):
    """Three steps, of which the second goes no further: the numbers of two steps of momentum."""
    held = run(zf.chain(holds_by_its_flag(_itself), zf.sgd(0.1, momentum=0.9)), route)[-1]
    tx = zf.sgd(0.1, momentum=0.9)
    step, state = zf.make_step(loss, tx), zf.init(tx, start())
    for _ in range(2):
        state, _ = step(state, torch.tensor([1.0, 2.0, -1.0]))
    for i, path in enumerate(start()):
        assert torch.equal(held[f"state {i}"], state.params[path])


def test_a_state_that_is_returned_is_differentiated_by_unroll():
    """Gradients of the step before; `unroll` makes its steps again from states that begin a graph."""

    def update(grads, state, params, carry, ctx):
        return state["last"], {"last": dict(grads)}

    delayed = Transform("delayed", init_fn=lambda leaves, _: {"last": zeros(leaves)}, update_fn=update)
    tx = zf.chain(delayed, zf.sgd(0.1))
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)

    def after(s):
        state, _ = zf.unroll(step, zf.init(tx, {"w": torch.ones(2) * s}), [torch.ones(2)] * 4, every=2)
        return state.params["w"].sum()

    # Every gradient is 2 w: w, w, 0.8 w, 0.6 w, 0.44 w, of two elements.
    assert torch.func.grad(after)(torch.tensor(1.3)).item() == pytest.approx(0.88, abs=1e-6)


def keeps_from(step: int, how: Callable[[Tensor], Tensor], every: int = 1) -> Transform:
    """It adds to gradients how far parameters have come since it kept them, from that step on."""
    calls = []

    def update(grads, state, params, carry, ctx):
        calls.append(1)
        new = {path: g + (params[path] - state["kept"][path]) for path, g in grads.items()}
        due = len(calls) >= step and len(calls) % every == 0
        return new, {"kept": {path: how(params[path]) for path in grads}} if due else state

    first = lambda leaves, layout: {"kept": zeros(leaves)}  # noqa: E731
    return Transform("keeps", Scope.WHOLE, init_fn=first, update_fn=update)


def after(tx: Transform, steps: int = 9, **more: Any) -> Tensor:
    model = nn.ParameterDict({"w": torch.ones(3)})
    opt = zf.attach(model, zf.chain(tx, zf.sgd(0.1)), **more)
    for _ in range(steps):
        (model["w"] ** 2).sum().backward()
        opt.step()
        opt.zero_grad()
    return model["w"].detach().clone()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", [_itself, Tensor.detach])
@pytest.mark.parametrize("step", [1, 3, 6])
def test_what_is_copied_in_first_steps_is_copied_in_all(step, how, every):
    """Later than that the very object is, and with `check=True` a view of it as well."""
    seen_early, checked = step + (-step) % every <= 3, how is Tensor.detach
    right = after(keeps_from(step, torch.clone, every))
    assert torch.equal(after(keeps_from(step, how, every), check=checked and not seen_early), right)
    if checked and not seen_early:
        # Its state has followed the parameter, as docs/extend/rules.md says.
        assert not torch.equal(after(keeps_from(step, how, every)), right)


def test_addresses_are_compared_in_the_first_three_steps_that_come_to_a_transform(monkeypatch):
    """Held micro-steps are none of them."""
    counted: list[int] = []
    real = returned_values._distinct

    def spy(new, old, others, numbers):
        counted.append(numbers is memories)
        return real(new, old, others, numbers)

    monkeypatch.setattr(returned_values, "_distinct", spy)
    tx = zf.chain(zf.accumulate(2), keeps_from(1, torch.clone))
    after(tx, steps=12)
    assert counted == [True] * 3 + [False] * 3
    counted.clear()
    after(tx, steps=12, check=True)
    assert counted == [True] * 6
