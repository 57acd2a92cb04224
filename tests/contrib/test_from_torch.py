"""`from_torch`: classes of `torch.optim` as transforms, to the bit of themselves, wherever leaves lie."""

import pickle
from typing import Any

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf

CASES: list[tuple[str, dict[str, Any]]] = [
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adamax", {"betas": (0.8, 0.99)}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {"step_sizes": (1e-5, 1.0)}),
    ("ASGD", {"t0": 2.0, "lambd": 0.01}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("AdamW", {"amsgrad": True}),
]
STEPS = 8


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, opt: Any, first: int = 0, last: int = STEPS) -> list[torch.Tensor]:
    """The same data on every rank, so that a mean over two ranks is what each has, to the bit."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for i in range(first, last):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name, options", CASES)
def test_bits_are_those_of_the_class(name: str, options: dict[str, Any]):
    cls = getattr(torch.optim, name)
    theirs, ours = net(), net()
    expected = train(theirs, cls(theirs.parameters(), 1e-2, foreach=False, **options))
    found = train(ours, zf.attach(ours, zf.from_torch(cls, 1e-2, **options)))
    start = list(net().parameters())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, start, strict=True))


def _on_ranks(stage: str, cases: list) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, options in cases:
        model = net()
        tx = zf.chain(getattr(zf, stage)(), zf.from_torch(getattr(torch.optim, name), 1e-2, **options))
        opt = zf.attach(model, tx)
        train(model, opt)
        opt.detach()
        found[name] = [p.detach().clone() for p in model.parameters()]
    return found


# Both cut states alike; half of the classes at each.
STAGES = [("reduce_scatter", CASES[::2]), ("shard", CASES[1::2])]


@pytest.mark.parametrize(
    ("stage", "cases"),
    [*STAGES, *(pytest.param(stage, CASES, marks=pytest.mark.slow) for stage, _ in STAGES)],
    ids=["reduce_scatter", "shard", "reduce_scatter, all", "shard, all"],
)
def test_bits_are_those_of_the_class_where_leaves_are_cut_over_two_ranks(stage: str, cases: list):
    for found in zf.launch(_on_ranks, 2, stage, cases, timeout=limit()):
        for name, options in cases:
            model = net()
            opt = getattr(torch.optim, name)(model.parameters(), 1e-2, foreach=False, **options)
            for a, b, start in zip(found[name], train(model, opt), net().parameters(), strict=True):
                assert torch.equal(a, b) and not torch.equal(a, start), name


def test_a_checkpoint_of_the_class_is_loaded_and_one_of_ours_is_resumed(tmp_path: Any):
    model = net()
    theirs = torch.optim.NAdam(model.parameters(), 1e-2, foreach=False)
    train(model, theirs, 0, 2)
    other = net(3)
    other.load_state_dict(model.state_dict())
    opt = zf.attach(other, zf.from_torch(torch.optim.NAdam, lr=1e-2))
    opt.load_state_dict(theirs.state_dict())
    assert opt.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    opt.param_groups[0].pop("initial_lr")
    theirs.param_groups[0].pop("initial_lr")
    zf.save(tmp_path, opt)
    again = net(4)
    resumed = zf.attach(again, zf.from_torch(torch.optim.NAdam, lr=1e-2))
    zf.load(tmp_path, resumed)
    for a, b in zip(train(again, resumed, 2, 4), train(model, theirs, 2, 4), strict=True):
        assert torch.equal(a, b)


class Counting(torch.optim.Optimizer):
    """Plain numbers in its state, and a gradient that it writes into."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state["decay"] = state.get("decay", 1.0) * 0.5
                    p.sub_(p.grad.mul_(group["lr"] * state["decay"] * state["step"]))


def test_a_class_of_ones_own():
    tx = zf.from_torch(Counting, lr=1.0)
    state, grads = zf.init(tx, {"w": torch.zeros(2)}), {"w": torch.ones(2)}
    for _ in range(3):
        state, _ = zf.update(tx, grads, state)
    assert torch.equal(state.params["w"], -torch.full((2,), 0.5 * 1 + 0.25 * 2 + 0.125 * 3))
    assert torch.equal(grads["w"], torch.ones(2))
    assert pickle.loads(pickle.dumps(tx)) == tx != zf.from_torch(Counting, lr=2.0)


class WithoutDefault(torch.optim.SGD):
    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr)


def test_a_class_without_a_default_rate_is_refused_without_one():
    with pytest.raises(TypeError, match="no default for its learning rate"):
        zf.from_torch(WithoutDefault)
    tx = zf.from_torch(WithoutDefault, lr=0.5)
    state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.ones(1)}))
    assert state.params["w"] == 0.5
