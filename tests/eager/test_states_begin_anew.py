"""A state that is reset, of some parameters or of all, gives the numbers of torch.optim with entries deleted."""

import pytest
import torch
from covering import covering, few_and_all
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.core.state_entries import entries  # inside: the entries of transforms that hold other transforms

STAGES = {
    "plain": lambda opt: zf.chain(opt),
    "all_reduce": lambda opt: zf.chain(zf.all_reduce(), opt),
    "zero1": lambda opt: zf.chain(zf.accumulate(1), zf.reduce_scatter(), opt),
    "zero2": lambda opt: zf.chain(zf.reduce_scatter(), opt),
    "zero3": lambda opt: zf.chain(zf.shard(), opt),
}


def label(path):
    return "a" if path.endswith("weight") else "b"


def adamw(ps):
    return torch.optim.AdamW(ps, lr=0.05)


def sgd(ps):
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "adamw": (lambda: zf.adamw(0.05), adamw),
    "adam": (lambda: zf.adam(0.05), lambda ps: torch.optim.Adam(ps, lr=0.05)),
    "sgd": (lambda: zf.sgd(0.05, momentum=0.9), sgd),
    "dampened": (
        lambda: zf.sgd(0.05, momentum=0.9, dampening=0.5),
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.5),
    ),
    "rmsprop": (lambda: zf.rmsprop(0.05), lambda ps: torch.optim.RMSprop(ps, lr=0.05)),
    "nadam": (lambda: zf.nadam(0.05), lambda ps: torch.optim.NAdam(ps, lr=0.05)),
    "radam": (lambda: zf.radam(0.05), lambda ps: torch.optim.RAdam(ps, lr=0.05)),
    "partition": (lambda: zf.partition({"a": zf.adamw(0.05), "b": zf.adamw(0.05)}, label), adamw),
    "before a rate": (lambda: zf.chain(zf.trace(0.9), zf.scale_by_lr(0.05)), sgd),
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
    xs = torch.randn(stop, 4, 5, generator=torch.Generator().manual_seed(1)).to(model[0].weight.dtype)
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


# Each optimizer in one way, and each way with AdamW.
PAIRS = [(kind, "reset") for kind in OPTIMIZERS] + [("adamw", how) for how in WAYS if how != "reset"]


EVERYWHERE = [(stage, *pair) for stage in STAGES if stage != "plain" for pair in PAIRS]


def everywhere(rows):
    """What is wrong on this rank."""
    return [(row, found) for row in rows if not (found := distance(*row))[0]]


@pytest.mark.parametrize("stage", STAGES)
def test_as_torch_on_one_rank(stage):
    pairs = PAIRS if stage == "plain" else [("adamw", "reset"), ("partition", "reset")]
    assert [(pair, found) for pair in pairs if not (found := distance(stage, *pair))[0]] == []


@pytest.mark.parametrize("rows", few_and_all(covering(EVERYWHERE), EVERYWHERE))
def test_as_torch_on_two_ranks(rows):
    assert zf.launch(everywhere, 2, rows, timeout=limit()) == [[], []]


KEPT = {
    "schedule_free": (lambda: zf.schedule_free(zf.adamw(0.1)), {"z", "average"}),
    "lookahead": (lambda: zf.lookahead(zf.adamw(0.1), sync_period=2), {"average"}),
    "masters of 24 bits": (
        lambda: zf.chain(zf.precision(store_dtype="bf16+8"), zf.adamw(0.1)),
        {"master_residual"},
    ),
    "masters on the host": (
        lambda: zf.chain(
            zf.precision(store_dtype=torch.bfloat16),
            zf.offload(zf.adamw(0.1), compute="host", master_dtype=torch.float32),
        ),
        {"master"},
    ),
    "an average inside": (
        lambda: zf.partition({"a": zf.chain(zf.adamw(0.1), zf.ema(0.9)), "b": zf.sgd(0.1, momentum=0.9)}, label),
        {"a/ema/average"},
    ),
    "sums, before an average": (
        lambda: zf.chain(zf.accumulate(2), zf.adamw(0.1), zf.masked(zf.ema(0.9), lambda path: True)),
        {"sum", "seen", "on/average"},
    ),
    "codes": (lambda: zf.quantize(zf.adamw(0.1)), set()),
    "rounded": (
        lambda: zf.chain(
            zf.precision(store_dtype=torch.bfloat16), zf.mars(), zf.low_precision_adam(0.1, rounding="kahan")
        ),
        {"compensation"},
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_follows_from_parameters_stays(kind):
    """All else that belongs to the leaf is as `zf.init` makes it, and what belongs to others stays."""
    make, kept = KEPT[kind]
    model = net().float()
    opt = zf.attach(model, make())
    first = {(e.owner, e.slot, e.below, e.path): e.value.clone() for e in entries(opt.state) if e.of_leaf}
    train(model, opt, lambda state, p: None, 5)
    trained = {(e.owner, e.slot, e.below, e.path): e.value.clone() for e in entries(opt.state)}
    opt.state.reset([model[0].weight])
    seen = set()
    for e in entries(opt.state):
        key = e.owner, e.slot, e.below, e.path
        stays = e.path != "0.weight" or e.owner == "params" or e.slot in kept
        assert torch.equal(e.value, trained[key] if stays else first[key]), key
        if e.path == "0.weight" and not torch.equal(trained[key], first[key]):
            seen.add(e.slot)
    assert kept <= seen and len(seen) > len(kept), seen


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
    opt.detach()
    momo = zf.attach(model, zf.chain(zf.scale_by_momo(), zf.sgd(1.0)))
    with pytest.raises(ValueError, match="scale_by_momo keeps averages"):
        momo.state.reset()
    state = zf.init(zf.adamw(0.1), {"w": torch.zeros(2)})
    with pytest.raises(TypeError, match=r"zf.init\(tx, state.params\)"):
        state.reset()
