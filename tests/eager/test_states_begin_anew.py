"""Resetting the state of some parameters, or of all, gives the numbers that torch.optim gives where entries are deleted,
at every stage."""

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf

STAGES = {
    "plain": lambda opt: zf.chain(opt),
    "all_reduce": lambda opt: zf.chain(zf.all_reduce(), opt),
    "zero1": lambda opt: zf.chain(zf.accumulate(1), zf.reduce_scatter(), opt),
    "zero2": lambda opt: zf.chain(zf.reduce_scatter(), opt),
    "zero3": lambda opt: zf.chain(zf.shard(), opt),
}
OPTIMIZERS = {
    "adamw": (lambda: zf.adamw(0.05), lambda ps: torch.optim.AdamW(ps, lr=0.05)),
    "adam": (lambda: zf.adam(0.05), lambda ps: torch.optim.Adam(ps, lr=0.05)),
    "sgd": (lambda: zf.sgd(0.05, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)),
    "dampened": (
        lambda: zf.sgd(0.05, momentum=0.9, dampening=0.5),
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.5),
    ),
    "rmsprop": (lambda: zf.rmsprop(0.05), lambda ps: torch.optim.RMSprop(ps, lr=0.05)),
    "nadam": (lambda: zf.nadam(0.05), lambda ps: torch.optim.NAdam(ps, lr=0.05)),
    "radam": (lambda: zf.radam(0.05), lambda ps: torch.optim.RAdam(ps, lr=0.05)),
}


def remove(state, p):
    del state[p]


# How entries are reset here, and how in torch. `p` is the parameter of all, `ps` are all.
WAYS = {
    "del": (lambda state, p: remove(state, p), lambda state, p: remove(state, p)),
    "pop": (lambda state, p: state.pop(p), lambda state, p: state.pop(p)),
    "clear": (lambda state, p: state.clear(), lambda state, p: state.clear()),
    "reset": (lambda state, p: state.reset([p]), lambda state, p: remove(state, p)),
    "reset of all": (lambda state, p: state.reset(), lambda state, p: state.clear()),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def train(model, opt, way, stop=6):
    xs = torch.randn(stop, 4, 5, generator=torch.Generator().manual_seed(1)).double()
    for i, x in enumerate(xs):
        if i == 3:
            way(opt.state, model[0].weight)
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


@torch.no_grad()
def farthest(a, b):
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def distance(stage, kind, how):
    plain, model = net(), net()
    start = [p.detach().clone() for p in plain.parameters()]
    ours, theirs = OPTIMIZERS[kind]
    train(plain, theirs(plain.parameters()), WAYS[how][1])
    kept = net()
    train(kept, theirs(kept.parameters()), lambda state, p: None)
    opt = zf.attach(model, STAGES[stage](ours()))
    train(model, opt, WAYS[how][0])
    opt.detach()
    change = farthest(plain.parameters(), start)
    seen = farthest(plain.parameters(), kept.parameters())
    wrong = farthest(plain.parameters(), model.parameters())
    # Without the reset the numbers would be others.
    # torch keeps the product of its momenta (NAdam) in fp32.
    bound = 1e-6 if kind == "nadam" else 1e-12
    return wrong / change < bound and seen / change > 1e-4, wrong / change, seen / change


def everywhere(stage):
    return [(kind, how, found) for kind in OPTIMIZERS for how in WAYS if not (found := distance(stage, kind, how))[0]]


@pytest.mark.parametrize("stage", STAGES)
def test_as_torch_on_one_rank(stage):
    assert everywhere(stage) == []


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "plain"])
def test_as_torch_on_two_ranks(stage):
    assert zf.launch(everywhere, 2, stage, timeout=limit()) == [[], []]


def test_what_is_told_and_what_stays():
    model = net()
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.adamw(0.1), zf.ema(0.9)))
    train(model, opt, lambda state, p: None, 3)
    own = opt.state.transforms
    kept = {p: x.clone() for p, x in {**own["ema"]["average"], **own["accumulate"]["sum"]}.items()}
    before = opt.state[model[0].weight]["exp_avg"].clone()
    popped = opt.state.pop(model[0].weight)
    assert torch.equal(popped["exp_avg"], before) and not opt.state[model[0].weight]["exp_avg"].any()
    assert opt.state[model[2].weight]["exp_avg"].any() and model[0].weight in opt.state
    assert all(torch.equal(x, kept[p]) for p, x in opt.state.transforms["accumulate"]["sum"].items())
    assert opt.state.pop(torch.zeros(1), "none") == "none"
    for wrong in (lambda: opt.state.pop(torch.zeros(1)), lambda: opt.state.reset([torch.zeros(1)])):
        with pytest.raises(KeyError):
            wrong()
    state = zf.init(zf.adamw(0.1), {"w": torch.zeros(2)})
    with pytest.raises(TypeError, match=r"zf.init\(tx, state.params\)"):
        state.reset()
