"""What a function of parameters checkpoints is recomputed with its parameters, or refused by name.

torch recomputes with those that `functional_call` has put back into the module, which differ here from those of the
step. The reference is a loop of torch on one process, of the model without checkpoints.
"""

import copy
import functools

import pytest
import torch
from covering import covering, few_and_all
from one_launch import one_launch
from stages import front
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import zerofn as zf

again = functools.partial(checkpoint, use_reentrant=False)
saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
# How the middle of the model is called: with its module, and a function of the model that reads parameters itself.
WAYS = {
    "a module": lambda m, f, x: again(m.middle, x) + f(x),
    "a closure": lambda m, f, x: m.middle(x) + again(f, x),
    "one inside of another": lambda m, f, x: again(lambda x: again(m.middle, x) + again(f, x), x),
    "two in a row": lambda m, f, x: again(f, again(m.middle, x)) + m.middle(x) + f(x) - f(m.middle(x)),
    "a sequence": lambda m, f, x: checkpoint_sequential([*m.middle], 2, x, use_reentrant=False) + f(x),
    "some operations": lambda m, f, x: again(m.middle, x, context_fn=saving) + f(x),
    "all of it": lambda m, f, x: again(m.middle, x, early_stop=False) + again(f, x, preserve_rng_state=False),
    "a call inside": lambda m, f, x: again(lambda x: functional_call(m.middle, scaled(m.middle), (x,)), x) + f(x),
    "wrapped": lambda m, f, x: m.middle(x) + f(x),
    "composable": lambda m, f, x: m.middle(x) + f(x),
    "reentrant": lambda m, f, x: checkpoint(m.middle, x, use_reentrant=True) + f(x),
}
PLAIN = lambda m, f, x: m.middle(x) + f(x)  # noqa: E731
TWICE = ("make_step", "make_step, recorded", "vjp", "vjp, recorded")
ROUTES = (*TWICE, "bind")
REFUSED = "use_reentrant=True"


def scaled(module):
    return {n: p * 1.0 for n, p in module.named_parameters()}


class Net(nn.Module):
    def __init__(self, way=None):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.0))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.middle[0].weight
        self.register_buffer("shift", torch.ones(4))
        self.way = WAYS.get(way, PLAIN)
        self.double()
        if way == "wrapped":
            self.middle = checkpoint_wrapper(self.middle)
        if way == "composable":
            composable(self.middle)

    def of_its_own(self, x):
        return (x @ self.last.weight + self.shift).sin()

    def forward(self, x):
        self.shift = self.shift * 0.5
        return self.last(self.way(self, self.of_its_own, self.first(x)))


def given(model):
    """Other parameters than the module's own."""
    return {n: p.detach() * 0.9 + 0.05 for n, p in model.named_parameters()}


def batches(size):
    found = torch.randn(4, 2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return found if size == 2 else found.reshape(4, 1, 12, 3)


def loss_of(model):
    return lambda p, x: functional_call(model, {**p, "shift": model.shift.to(x.dtype)}, (x,)).square().mean()


@functools.cache
def expected(window):
    """After four micro-steps of gradient descent: the parameters."""
    model = Net()
    with torch.no_grad():
        for n, x in given(model).items():
            model.get_parameter(n).copy_(x)
    opt = torch.optim.SGD(model.parameters(), 0.3)
    for i, x in enumerate(batches(1)):
        model.shift = torch.ones(4, dtype=torch.float64)
        (model(x[0]).square().mean() / window).backward()
        if (i + 1) % window == 0:
            opt.step()
            opt.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def trained(stage, way, route, rank=0, size=1):
    model = Net(way)
    names = dict(zip(given(model), given(Net()), strict=True))
    tx = zf.chain(*front(stage), zf.sgd(0.3))
    state = zf.init(tx, given(model))
    fn, recorded = loss_of(model), "recorded" in route
    step = zf.make_step(fn, tx, create_graph=recorded)
    for x in batches(size):
        if route.startswith("make_step"):
            state, _ = step(state, x[rank])
        else:
            if route == "bind":
                at = {n: p.detach().requires_grad_() for n, p in state.params.items()}
                inputs = x[rank].clone().requires_grad_()
                zf.bind(fn, tx, state)(at, inputs).backward()
                grads = {n: p.grad for n, p in at.items()}
            else:
                out, pullback = zf.vjp(fn, tx, state, x[rank], create_graph=recorded)
                grads, _ = pullback(torch.ones_like(out))
            state, _ = zf.update(tx, grads, state)
    return {names[n]: p.detach() for n, p in zf.full_params(tx, state).items()}


def on_ranks(stage, way, route):
    return trained(stage, way, route, torch.distributed.get_rank(), 2)


def differs(got, stage):
    want, start = expected(2 if stage == 1 else 1), given(Net())
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / (want[n] - start[n]).abs().max()) for n in want)


def rows(stages):
    """`bind` gives gradients that are reduced already, so it has no late reduction."""
    return [(s, w, r) for s in stages for w in WAYS for r in ROUTES if (s, r) != (1, "bind")]


ALONE = rows(["one process", 2, 3])
ON_RANKS = [row for row in rows(range(4)) if row[1] != "reentrant" or row[2] == "bind"]


# Each way by each route.
@pytest.mark.parametrize("rows", few_and_all(covering(ALONE, key=lambda row: (row[0], row[1:])), ALONE))
def test_backward_recomputes_with_the_parameters_of_the_step(rows):
    for stage, way, route in rows:
        if way == "reentrant" and route != "bind":
            with pytest.raises(RuntimeError, match=REFUSED):
                trained(stage, way, route)
        else:
            assert differs(trained(stage, way, route), stage) < 1e-12, (stage, way, route)


# Each way, and each route at each stage.
@pytest.mark.parametrize("rows", few_and_all(covering(ON_RANKS, key=lambda row: (row[1], row[::2])), ON_RANKS))
def test_backward_recomputes_with_the_parameters_of_the_step_on_two_ranks(rows):
    for row, got in one_launch(2, on_ranks, rows, 200.0).items():
        for params in got:
            assert differs(params, row[0]) < 1e-12, row


@pytest.mark.parametrize("way", ["a module", "one inside of another", "a sequence"])
def test_derivatives_of_steps_through_checkpoints(way):
    def slopes(way):
        model = Net(way)
        start = {n: x.requires_grad_() for n, x in given(model).items()}
        state = zf.init(zf.adamw(0.1, eps=1e-2), start, create_graph=True)
        step = zf.make_step(loss_of(model), zf.adamw(0.1, eps=1e-2), create_graph=True)
        for x in batches(1)[:2]:
            state, metrics = step(state, x[0])
        return torch.autograd.grad(metrics["loss"] + metrics["grad_norm"], [*start.values()])

    for got, want in zip(slopes(way), slopes(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


def test_under_precision_and_a_scale():
    def trained(way):
        model = Net(way)
        tx = zf.chain(zf.precision(torch.bfloat16), zf.scale_loss(64.0), zf.sgd(0.3))
        state, step = zf.init(tx, {n: p.float() for n, p in given(model).items()}), zf.make_step(loss_of(model), tx)
        for x in batches(1):
            state, _ = step(state, x[0].bfloat16())
        return zf.full_params(tx, state)

    model_in_bf16 = trained("one inside of another"), trained(None)
    assert all(torch.equal(a, b) for a, b in zip(*(list(p.values()) for p in model_in_bf16), strict=True))


def inside(kind, way):
    """A program of torch.func around or inside of a checkpointed function."""
    model = Net(way)
    fn, tx, x = loss_of(model), zf.sgd(0.1), batches(1)[0, 0]
    members = {n: torch.stack([p, 1.1 * p]) for n, p in given(model).items()}
    state = zf.init(tx, given(model))
    if kind == "grad of bind":
        return torch.func.grad(zf.bind(fn, tx, state))(state.params, x)
    if kind == "grad of a step":
        return torch.func.grad(lambda x: zf.make_step(fn, tx)(state, x)[1]["grad_norm"])(x)
    if kind == "vmap of a step":
        states = vmap(lambda p: zf.init(tx, p))(members)
        return vmap(zf.make_step(fn, tx), (0, None))(states, x)[0].params
    if kind == "vmap over rows":
        rows = lambda p, x: vmap(lambda row: fn(p, row[None]))(x).mean()  # noqa: E731
        return zf.make_step(rows, tx)(state, x)[0].params
    state, over = zf.init(tx, members), lambda p, x: vmap(fn, (0, None))(p, x).sum()
    if kind == "a checkpoint of vmap":
        return zf.make_step(lambda p, x: again(over, p, x), tx)(state, x)[0].params
    return zf.make_step(over, tx)(state, x)[0].params


INSIDE = ("grad of bind", "grad of a step", "vmap of a step", "vmap over rows", "vmap over members")


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("way", ["a module", "one inside of another", "wrapped", "reentrant"])
def test_torch_func_around_a_checkpoint_is_refused_by_name(kind, way):
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint in .* inside of torch.func"):
        inside(kind, way)


def test_a_checkpoint_around_vmap_and_one_without_gradients_are_right():
    got, want = (inside(kind, None) for kind in ("a checkpoint of vmap", "vmap over members"))
    assert all(torch.equal(got[n], want[n]) for n in want)
    model = Net("a module")
    members = {n: torch.stack([p, 1.1 * p]) for n, p in given(model).items()}
    bound = lambda p, x: zf.bind(loss_of(model), zf.sgd(0.1), zf.init(zf.sgd(0.1), given(model)))(p, x)  # noqa: E731
    got = vmap(bound, (0, None))(members, batches(1)[0, 0])
    want = [loss_of(Net())({n: p[i] for n, p in members.items()}, batches(1)[0, 0]) for i in range(2)]
    torch.testing.assert_close(got, torch.stack(want))


def test_torchs_checkpoints_elsewhere_are_as_torch_made_them():
    """Outside of a function of parameters a step leaves torch as it is, its trap too."""
    trained("one process", "a module", "make_step")
    model, x = Net("a module"), batches(1)[0, 0]
    plain = copy.deepcopy(model)
    plain.way = PLAIN
    for m in (model, plain):
        m(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    at = {n: p.requires_grad_() for n, p in given(model).items()}
    wrong = torch.autograd.grad(loss_of(model)(at, x), [*at.values()])
    right = torch.autograd.grad(loss_of(plain)(at, x), [*at.values()])
    assert any(float((a - b).abs().max()) > 1e-4 for a, b in zip(wrong, right, strict=True))
