"""The update during backward: the same numbers as after it, no gradient kept, and refused where it cannot be."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from gone_gradients import is_gone
from time_limits import limit
from torch import nn
from torch.profiler import ProfilerActivity
from transforms_table import ROWS, TIED, WITHIN, row_params
from trees import flat

import zerofn as zf
from zerofn.kernels import native  # inside: whether there are kernels in C

BF16 = torch.bfloat16


class TiedAndUsedTwice(nn.Module):
    """Ties a weight, uses a layer twice and leaves one parameter frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.layer(torch.tanh(self.layer(self.embed(x))))
        return self.head(self.norm(h + self.frozen(h)))


def batch(i):
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(i))


def train(model, opt, steps=3):
    """Losses of a few steps."""
    losses = []
    for i in range(steps):
        x = batch(i)
        loss = nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1).flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def values(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# Rows that train `layer` alone.
STILL = ("masked, optimizer", "partition, frozen")


@pytest.mark.parametrize("name", row_params("pieces", [name for name, row in ROWS.items() if not row.within]))
def test_equals_the_update_after_backward_bit_for_bit(name):
    after, during = TiedAndUsedTwice(), TiedAndUsedTwice()
    tx = ROWS[name].trained(TIED)
    a, b = zf.attach(after, tx), zf.attach(during, tx, in_backward=True)
    begun = values(during)
    assert train(after, a) == train(during, b)
    now, other = values(after), values(during)
    assert now.keys() == other.keys()
    for path, value in now.items():
        assert torch.equal(value, other[path]), path
        still = path.startswith("frozen") or (name in STILL and not path.startswith("layer"))
        assert torch.equal(value, begun[path]) == still, f"{path} is the wrong way round"
    assert torch.equal(a.state.step, b.state.step) and int(b.state.step) == 3
    mine, theirs = flat(a.state.transforms), flat(b.state.transforms)
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key
    assert a.metrics.keys() - {"grad_norm"} == b.metrics.keys()


def test_leaves_of_no_group_stay():
    model = TiedAndUsedTwice()
    tx = zf.chain(zf.masked(zf.adamw(1e-2, weight_decay=0.1), lambda path: "layer" in path), zf.ema(0.9))
    opt = zf.attach(model, tx, in_backward=True)
    before = values(model)
    train(model, opt, 2)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"layer.weight", "layer.bias"}


def test_no_gradient_is_left_where_a_user_would_read_it():
    model = TiedAndUsedTwice()
    opt = zf.attach(model, zf.adamw(1e-2), in_backward=True)
    before = values(model)
    model(batch(0)).square().mean().backward()
    assert all(is_gone(p) for p in model.parameters() if p.requires_grad)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    with pytest.raises(RuntimeError, match="which has no numbers here\n  why:   with in_backward=True"):
        sum(p.grad.sum() for p in model.parameters() if p.grad is not None)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}, "backward has already updated"
    assert int(opt.state.step) == 0, "the step is counted by step()"
    opt.step()
    assert int(opt.state.step) == 1 and bool(opt.metrics["updated"])


def peak_of(run, folder):
    """The most bytes that live at once during `run`, beyond those before it."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        run()
    profile.export_chrome_trace(f"{folder}/trace.json")
    live = peak = 0
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def test_peak_gradient_bytes_are_those_of_one_leaf(tmp_path, capfd):
    width, layers = 256, 12
    leaf = width * width * 4
    peaks = {}
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        opt = zf.attach(model, zf.sgd(1e-3), in_backward=in_backward)
        x = torch.randn(1, width)

        def step(model=model, opt=opt, x=x):
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()

        step()
        peaks[in_backward] = peak_of(step, tmp_path)
    capfd.readouterr()
    # Without a kernel in C, torch's operations have values in between.
    in_c = native.quiet_compiler() is not None
    assert layers * leaf <= peaks[False] <= (layers + (2 if in_c else layers)) * leaf
    # A gradient and the parameter that the optimizer returns for it; activations of one row are the rest.
    assert leaf <= peaks[True] <= (2.2 if in_c else 3.2) * leaf


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.within])
def test_refused_with_the_reason_and_the_model_left_alone(name):
    tx, model = ROWS[name].trained(TIED), TiedAndUsedTwice()
    before = values(model)
    with pytest.raises(ValueError, match=WITHIN[ROWS[name].within]) as error:
        zf.attach(model, tx, in_backward=True)
    assert "attach without in_backward" in str(error.value)
    assert all(torch.equal(x, before[path]) for path, x in values(model).items())
    # The model is nobody's.
    zf.attach(model, tx)


def test_the_member_of_a_group_is_named():
    with pytest.raises(ValueError, match=r"partition\(clip_by_global_norm\)(.|\n)*clip_by_global_norm needs a number"):
        zf.attach(TiedAndUsedTwice(), ROWS["partition, clip"].trained(TIED), in_backward=True)


def test_a_second_backward_before_the_step_is_refused():
    model = TiedAndUsedTwice()
    opt = zf.attach(model, zf.adamw(1e-2), in_backward=True)
    model(batch(0)).mean().backward()
    with pytest.raises(
        RuntimeError, match=r"a second gradient of .* before opt.step\(\).*\n.*\n.*one backward for each"
    ):
        model(batch(1)).mean().backward()
    opt.step()
    model(batch(1)).square().mean().backward()
    opt.step()
    assert int(opt.state.step) == 2


def test_leaves_without_gradient_stay():
    model = TiedAndUsedTwice()
    opt = zf.attach(model, zf.adamw(1e-2, weight_decay=0.1), in_backward=True)
    before = values(model)
    model.layer(torch.randn(3, 6)).square().mean().backward()
    opt.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"layer.weight", "layer.bias"}


def test_averages_of_leaves_without_gradient_move_all_the_same():
    """A leaf that is not used in a step has kept its value, and the average comes nearer to it."""
    models = []
    for late in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        opt = zf.attach(model, zf.chain(zf.sgd(0.5), zf.ema(0.5)), in_backward=late)
        for used in (("a", "b"), ("a",), ("b",), ("a",)):
            sum(model[name](torch.ones(2, 3)).square().mean() for name in used).backward()
            opt.step()
            opt.zero_grad()
        models.append((opt, values(model)))
    (a, mine), (b, theirs) = models
    for path, value in flat(a.state.transforms).items():
        assert torch.equal(value, flat(b.state.transforms)[path]), path
    for path, value in mine.items():
        assert torch.equal(value, theirs[path]) and not torch.equal(value, a.state.transforms["ema"]["average"][path])


class Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Linear(6, 6)
        self.high = nn.Linear(6, 2)

    def forward(self, x, fails=False):
        h = torch.tanh(self.low(x.to(self.low.weight.dtype)))
        return self.high(Fails.apply(h) if fails else h).float().square().mean()


def given_up(model, opt):
    """A step whose backward reaches `high` only."""
    with pytest.raises(MemoryError):
        model(inputs(9), fails=True).backward()
    opt.zero_grad()


def inputs(i):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


RATES = {
    "adamw": lambda: zf.adamw(1e-2, weight_decay=0.1),
    "bf16, stochastic": lambda: zf.chain(
        zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-2, rounding="stochastic", seed=3)
    ),
    "partition": lambda: zf.partition(
        {"high": zf.chain(zf.clip_by_value(0.02), zf.adamw(1e-2)), "low": zf.sgd(1e-1, momentum=0.9)},
        lambda path: path.split(".")[0],
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_after_a_backward_that_failed_half_way_training_goes_on(name):
    """As if a step had been made with the gradients that had come, but for the counters of steps."""
    model, twin = Halves(), Halves()
    opt, other = zf.attach(model, RATES[name](), in_backward=True), zf.attach(twin, RATES[name]())
    for i in range(6):
        if i == 2:
            begun = values(model)
            given_up(model, opt)
            moved = {n for n, p in model.named_parameters() if not torch.equal(p, begun[n])}
            assert moved == {"high.weight", "high.bias"}
            with pytest.raises(MemoryError):
                twin(inputs(9), fails=True).backward()
            other.step()
            other.zero_grad()
        for m, o in ((model, opt), (twin, other)):
            m(inputs(i)).backward()
            o.step()
            o.zero_grad()
    assert (opt.global_steps, opt.micro_steps) == (6, 6) and other.global_steps == 7
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), n
    mine, theirs = flat(opt.state.transforms), flat(other.state.transforms)
    for key, value in mine.items():
        assert torch.equal(value, theirs[key] - 1 if key.endswith("/step") else theirs[key]), key


def test_a_step_that_was_given_up_does_not_advance_schedules():
    model = Halves()
    opt = zf.attach(model, zf.sgd(lambda step: 0.1 * (step + 1)), in_backward=True)
    rates = []
    for i in range(3):
        given_up(model, opt)
        with pytest.raises(ValueError, match="no parameter has a gradient"):
            opt.step()
        model(inputs(i)).backward()
        opt.step()
        opt.zero_grad()
        rates.append(float(opt.metrics["lr"]))
    assert rates == pytest.approx([0.1, 0.2, 0.3])


def test_a_second_backward_that_was_refused_is_forgotten_by_zero_grad():
    model = Halves()
    opt = zf.attach(model, zf.adamw(1e-2), in_backward=True)
    model(inputs(0)).backward()
    with pytest.raises(RuntimeError, match="a second gradient"):
        model(inputs(1)).backward()
    opt.zero_grad()
    model(inputs(2)).backward()
    opt.step()
    assert opt.global_steps == 1
    assert {int(c) for c in opt.state.transforms["adamw"]["count"].values()} == {2}


def test_a_state_that_is_loaded_after_a_failure_replaces_all_of_it():
    model, twin = Halves(), Halves()
    opt, other = (zf.attach(m, zf.chain(zf.adamw(1e-2), zf.ema(0.9)), in_backward=True) for m in (model, twin))
    for m, o in ((model, opt), (twin, other)):
        m(inputs(0)).backward()
        o.step()
    saved = copy.deepcopy(opt.state_dict())
    with pytest.raises(MemoryError):
        model(inputs(9), fails=True).backward()
    opt.load_state_dict(saved)
    for m, o in ((model, opt), (twin, other)):
        o.zero_grad()
        m(inputs(1)).backward()
        o.step()
    mine, theirs = flat(opt.state.transforms), flat(other.state.transforms)
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def by_hand():
    """What is put into `p.grad` is used in the step where backward did not reach the leaf, and refused where it did."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).reshape(p.shape) / 5)
    start = [p.detach().clone() for p in model.parameters()]
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)), in_backward=True)
    model[0](torch.ones(1, 3).double()).sum().backward()
    model[1].weight.grad = torch.full((1, 2), 3.0, dtype=torch.float64)
    opt.step()
    opt.zero_grad()
    model[0](torch.ones(1, 3).double()).sum().backward()
    model[0].weight.grad = torch.full((2, 3), 3.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"a second gradient of 0.weight before opt.step\(\)"):
        opt.step()
    opt.zero_grad()
    opt.detach()
    return [(p.detach() - x) for p, x in zip(model.parameters(), start, strict=True)]


@pytest.mark.parametrize("ranks", (1, 2))
def test_gradients_put_there_by_hand(ranks):
    found = zf.launch(by_hand, ranks, timeout=limit()) if ranks > 1 else [by_hand()]
    for weight, bias, last, unused in found:
        # Two backwards of ones, of which the second was given up after it had updated.
        torch.testing.assert_close(weight, torch.full_like(weight, -0.2))
        torch.testing.assert_close(bias, torch.full_like(bias, -0.2))
        torch.testing.assert_close(last, torch.full_like(last, -0.3))
        assert not unused.any()
