"""What a loss function returns beside its loss, and a donated batch of states, in a compiled step.

By `aot_eager`, which traces all and generates no code.
"""

import itertools

import pytest
import torch
from covering import covering
from torch.utils._pytree import tree_leaves

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step

pytestmark = pytest.mark.skipif(
    not COMPILES_STATES, reason="before torch 2.13 a step runs uncompiled inside of torch.compile"
)
KINDS = {
    "computed": lambda p, x: {"y": (x @ p["w"]).tanh(), "top": (x @ p["w"]).argmax(-1)},
    "itself": lambda p, x: [p["w"], (p["b"],)],
    "views": lambda p, x: {"row": p["w"][:1], "turned": p["w"].t(), "flat": p["b"].detach().view(-1)},
    "of the batch": lambda p, x: (x * 1, x[0] * p["w"][0, 0]),
    "one": lambda p, x: p["w"].sum(),
}


@pytest.fixture(autouse=True)
def compiler_anew():
    """torch keeps what it compiled of any function under vmap with one code, its own, and gives up after a few."""
    torch._dynamo.reset()


def loss_with(aux):
    return lambda p, x: ((x @ p["w"] + p["b"]).square().mean(), aux(p, x))


def draws(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def one_state(tx):
    return zf.init(tx, {"w": draws(4, 3), "b": draws(3)})


def batch_of_states(tx):
    return torch.vmap(lambda w, b: zf.init(tx, {"w": w, "b": b}))(draws(2, 4, 3), draws(2, 3))


def close(ours, theirs):
    # A graph may sum products in another order than eager torch.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


SOON = {("views", True, False)}
# Each two of the three.
CASES = covering(list(itertools.product(KINDS, (False, True), (False, True))), 2)


@pytest.mark.parametrize(
    "kind, donate, batched",
    [*SOON, *(pytest.param(*x, marks=pytest.mark.slow) for x in CASES if x not in SOON)],
)
def test_what_a_loss_returns_besides_is_that_of_the_plain_step(kind, donate, batched):
    """Of the state before its update, also where the update is written into its memory."""
    tx = zf.chain(zf.clip_by_global_norm(0.5), zf.sgd(0.5, momentum=0.9))
    plain, fast = (zf.make_step(loss_with(KINDS[kind]), tx, donate=d) for d in (False, donate))
    make = batch_of_states if batched else one_state
    if batched:
        plain, fast = (torch.vmap(step, in_dims=(0, None)) for step in (plain, fast))
    fast, want, state = compiled(fast), make(tx), make(tx)
    for x in draws(3, 5, 4):
        (want, shown), (state, told) = plain(want, x), fast(state, x)
        close(told["aux"], shown["aux"])
        close(state.leaves, want.leaves)


def test_what_is_no_tensor_is_returned_as_it_is():
    tx = zf.sgd(0.5)
    step = zf.make_step(loss_with(lambda p, x: {"n": 3, "none": None, "name": "w", "y": p["b"] * 2}), tx)
    state, x = one_state(tx), draws(5, 4)
    told = compiled(step)(state, x)[1]["aux"]
    assert (told["n"], told["none"], told["name"]) == (3, None, "w")
    close(told["y"], 2 * draws(3))


def test_statistics_of_a_model_are_given_and_returned():
    """Against the same model trained by torch: what BatchNorm has written into its buffers after each step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def loss(p, seen, x):
        seen = {name: b.clone() for name, b in seen.items()}
        return torch.func.functional_call(model, (p, seen), (x,)).square().mean(), seen

    tx = zf.sgd(0.1)
    step, state = compiled(zf.make_step(loss, tx)), zf.init(tx, params)
    peer = torch.optim.SGD(model.parameters(), 0.1)
    for x in draws(3, 16, 4):
        state, metrics = step(state, buffers, x)
        buffers = metrics["aux"]
        peer.zero_grad()
        model(x).square().mean().backward()
        peer.step()
        close(buffers, dict(model.named_buffers()))
        close(state.params, {name: p.detach() for name, p in model.named_parameters()})
    assert int(buffers["1.num_batches_tracked"]) == 3 and (buffers["1.running_mean"] != 0).all()


def test_a_derivative_by_what_a_loss_returns_besides():
    """Through a compiled step by its state: of what stands beside the loss as of the loss."""
    tx = zf.sgd(0.5)
    step = zf.make_step(loss_with(lambda p, x: (p["w"] ** 3).sum()), tx)

    def cubes(w, x):
        return step(zf.init(tx, {"w": w, "b": draws(3)}), x)[1]["aux"]

    w, x = draws(4, 3), draws(5, 4)
    close(torch.func.grad(cubes)(w, x), 3 * w**2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "low_precision_adam", "held"])
def test_a_donated_batch_of_states_is_written_where_it_lies(name):
    tx = {
        "adamw": zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(0.1)),
        "low_precision_adam": zf.low_precision_adam(0.1),
        "held": zf.chain(zf.accumulate(2), zf.adamw(0.1)),
    }[name]
    aux = KINDS["computed"]
    plain, step = (torch.vmap(zf.make_step(loss_with(aux), tx, donate=d), in_dims=(0, None)) for d in (False, True))
    fast, want, state = compiled(step), batch_of_states(tx), batch_of_states(tx)
    floats = [x for x in tree_leaves((state.leaves, state.transforms)) if x.is_floating_point() and x.ndim > 1]
    memory = [x.data_ptr() for x in floats]
    for x in draws(4, 5, 4):
        (want, _), (state, _) = plain(want, x), fast(state, x)
        # Near a gradient of zero an update of Adam's is its rate times a number that rounding decides.
        torch.testing.assert_close(state.leaves, want.leaves, rtol=0, atol=1e-4)
    found = [x for x in tree_leaves((state.leaves, state.transforms)) if x.is_floating_point() and x.ndim > 1]
    assert [x.data_ptr() for x in found] == memory


@pytest.mark.slow
def test_a_leaf_that_all_members_share_is_not_written():
    """One memory for all: each member's result is a new one."""
    tx = zf.sgd(0.5)
    step = compiled(torch.vmap(zf.make_step(loss_with(KINDS["one"]), tx, donate=True), in_dims=(0, None)))
    plain = torch.vmap(zf.make_step(loss_with(KINDS["one"]), tx), in_dims=(0, None))
    shared, made = draws(4, 3), batch_of_states(tx)
    given = [
        zf.State({**s.leaves, "w": shared.expand(2, 4, 3)}, s.transforms, s.step, s.micro_step, s.layout)
        for s in (made, batch_of_states(tx))
    ]
    x = draws(5, 4)
    (want, _), (state, _) = plain(given[0], x), step(given[1], x)
    close(state.leaves, want.leaves)
    assert shared.equal(draws(4, 3)) and not want.leaves["w"][0].equal(want.leaves["w"][1])
