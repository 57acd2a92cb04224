"""`zf.profile`: operations, bytes and phases against closed formulas, on one process and on ranks."""

import math

import pytest
import torch
import torch.nn.functional as F
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn.contrib import profile as profile_instruments  # inside: its clocks and counters are replaced
from zerofn.testing import assert_trees_equal, clone

WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH = 64, 3, 48, 2, 16


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(fused)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt(fused=False):
    torch.manual_seed(0)
    return GPT(fused), torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


# Of a forward: 2 operations for each parameter of a matrix and token; scores and their use.
PRODUCTS = 2 * BATCH * LENGTH * (LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY)
SCORES = LAYERS * 2 * (2 * BATCH * LENGTH**2 * WIDTH)


def train(model, opt, tokens):
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    opt.step()
    opt.zero_grad()


def loss_of(model):
    return lambda p, tokens: F.cross_entropy(functional_call(model, p, (tokens,)).flatten(0, 1), tokens.flatten())


def of_step(model, tx, tokens, **options):
    """What is measured of one step of the pure route."""
    step = zf.profile(zf.make_step(loss_of(model), tx), **options)
    step(zf.init(tx, dict(model.named_parameters())), tokens)
    return step.mean


def of_model(model, tx, tokens, flops=True, **options):
    """What is measured of one step of an attached model."""
    opt = zf.attach(model, tx, **options)
    with zf.profile(opt, flops=flops) as profile:
        train(model, opt, tokens)
    return profile.mean


@pytest.mark.parametrize("route", [of_step, of_model])
@pytest.mark.parametrize("fused", [False, True], ids=["attention", "fused attention"])
def test_operations_of_a_gpt(route, fused):
    """Twice as many in backward. The fused attention's computes the scores again: five products to two."""
    model, tokens = gpt(fused)
    flops = route(model, zf.adamw(1e-3), tokens).flops
    assert flops["forward"][""] == PRODUCTS + SCORES
    assert flops["backward"][""] == 2 * PRODUCTS + (2.5 if fused else 2) * SCORES
    assert flops["update"][""] == 0
    for phase, scores in (("forward", SCORES), ("backward", (2.5 if fused else 2) * SCORES)):
        times = 1 if phase == "forward" else 2
        attention = times * 2 * BATCH * LENGTH * 4 * WIDTH**2 + scores / LAYERS
        assert [flops[phase][f"GPT.blocks.{i}.attention"] for i in range(LAYERS)] == [attention] * LAYERS
        assert flops[phase]["GPT.head"] == times * 2 * BATCH * LENGTH * WIDTH * VOCABULARY
        assert flops[phase]["GPT"] == flops[phase][""]


def test_operations_of_an_update_are_told_by_transform():
    """Five steps of three products each, of a matrix and its transpose."""
    model = nn.Linear(8, 4, bias=False)
    opt = zf.attach(model, zf.muon(0.1))
    with zf.profile(opt) as profile:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
    found = profile.mean.flops["update"]
    assert found == {"": found["muon"], "muon": 5 * (2 * 4 * 8 * 4 + 2 * 4**3 + 2 * 4 * 4 * 8)}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("route", [of_step, of_model, lambda *a: of_model(*a, in_backward=True)])
def test_bytes_of_states(route):
    """Adam reads and writes two moments and the parameter, 12 bytes each way; counters are a thousandth of it."""
    model, tokens = gpt()
    n = parameters(model)
    found = route(model, zf.chain(zf.adamw(1e-3), zf.ema(0.9)), tokens)
    for side in (found.read, found.written):
        assert side["params"] == 4 * n
        assert side["adamw"] == pytest.approx(8 * n, rel=0.01)
        assert side["ema"] == pytest.approx(4 * n, rel=0.01)


def test_bytes_of_sixteen_bits_of_members_and_of_what_lives_elsewhere():
    """Each state once: that of a member is the member's, and not the group's again."""
    model, tokens = gpt()
    n, head = parameters(model), WIDTH * VOCABULARY
    tx = zf.partition(
        {"head": zf.chain(zf.clip_by_value(1.0), zf.sgd(0.1, momentum=0.9)), "rest": zf.adamw(1e-3)},
        lambda path: "head" if path.startswith("head") else "rest",
    )
    found = of_model(model, tx, tokens)
    assert found.read["partition.head.sgd"] == pytest.approx(4 * head, rel=0.01)
    assert found.read["partition.rest.adamw"] == pytest.approx(8 * (n - head), rel=0.01)
    assert found.read["params"] == 4 * n
    assert sum(found.read.values()) == pytest.approx(4 * n + 4 * head + 8 * (n - head), rel=0.01)
    low = zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.offload(zf.low_precision_adam(1e-3)))
    model, tokens = gpt()
    found = of_model(model, low, tokens)
    assert found.read["params"] == 2 * n
    assert found.written["low_precision_adam"] == pytest.approx(4 * n, rel=0.01)


def test_a_held_step_leaves_the_optimizer_alone():
    model, tokens = gpt()
    n = parameters(model)
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.adamw(1e-3)))
    profile = zf.profile(opt)
    for _ in range(2):
        with profile:
            train(model, opt, tokens)
    held, applied = profile.measured[0], profile.measured[1]
    assert held.written["accumulate"] == pytest.approx(4 * n, rel=0.01)
    assert "adamw" not in held.written
    assert "params" not in held.read
    assert applied.written["adamw"] == pytest.approx(8 * n, rel=0.01)
    assert profile.mean.read["params"] == 2 * n
    with pytest.raises(KeyError, match="adamw"):
        held.read["adamw"]


# Of the bytes of all parameters, a ring of two ranks sends half for a gather or a scatter, and all for a sum.
SENT = {
    "data parallel": {"all_reduce": 1.0},
    "ZeRO-1": {"reduce_scatter": 0.5, "all_gather": 0.5},
    "ZeRO-2": {"reduce_scatter": 0.5, "all_gather": 0.5},
    "ZeRO-3": {"reduce_scatter": 0.5, "all_gather": 0.5},
}


def pipeline(stage):
    window = [] if stage == "data parallel" else [zf.accumulate(1)]
    return zf.chain(*around(stage, *window), zf.adamw(1e-3))


def on_ranks():
    """By stage and route: what was measured, and of two stages the names of ranges that torch's profiler shows."""
    found = {}
    for stage in STAGES:
        for route in (of_model, of_step):
            model, tokens = gpt()
            measured = route(model, pipeline(stage), tokens)
            names = set()
            # The events of a profiler take as long as the rest, and both routes have the ranges of a stage.
            if (stage, route) in (("ZeRO-2", of_model), ("ZeRO-3", of_step)):
                model, tokens = gpt()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as shown:
                    route(model, pipeline(stage), tokens, flops=False)
                names = {e.name for e in shown.events() if e.name.startswith("zerofn::")}
            found[stage, route.__name__] = measured, names
    return found


def test_bytes_sent_and_held_at_each_stage():
    """Within 1 %: flags of leaves, and what ranks tell each other, are sent too.

    Under ZeRO-3 backward gathers blocks again, but for the last, which is there still; the pure route the small leaves
    outside of blocks too.
    """
    model, _ = gpt()
    size = 4 * parameters(model)
    again = 4 * (LAYERS - 1) * parameters(model.blocks[0]) / 2
    small = 4 * (parameters(model.embed) + parameters(model.head)) / 2
    extra = {("ZeRO-3", "of_model", "all_gather"): again, ("ZeRO-3", "of_step", "all_gather"): again + small}
    for rank in zf.launch(on_ranks, 2, timeout=limit(120)):
        for (stage, route), (found, shown) in rank.items():
            part = 1 if stage == "data parallel" else 2
            for op, share in SENT[stage].items():
                # At the stages before the pure route gathers before a step, and the eager one after it: the same bytes.
                expected = share * size + extra.get((stage, route, op), 0)
                assert found.sent[op] == pytest.approx(expected, rel=0.01), (stage, route, op)
                assert found.calls[op] > 0
                assert not shown or {f"zerofn::{op}", f"zerofn::wait for {op}"} <= shown
            assert found.read["adamw"] == pytest.approx(2 * size / part, rel=0.01), (stage, route)
            assert found.read["params"] == pytest.approx(size / part, rel=0.01)
            assert sum(found.waited.values()) == pytest.approx(found.seconds["collectives"])
            assert min(found.waited[op] for op in SENT[stage]) > 0
            reduces = "shard" if stage == "ZeRO-3" else "reduce_scatter"
            assert not shown or {"zerofn::update", "zerofn::adamw", f"zerofn::{reduces}"} <= shown
            assert bool(shown) == ((stage, route) in (("ZeRO-2", "of_model"), ("ZeRO-3", "of_step")))
            assert found.flops["forward"][""] == PRODUCTS + SCORES


class Hours:
    """A clock that is moved by hand."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(profile_instruments, "_now", lambda: self.now)

    def pass_(self, x, seconds):
        self.now += seconds
        return x


class Slow(torch.autograd.Function):
    """Takes 2 s, and 4 s in backward."""

    @staticmethod
    def forward(ctx, x, hours, there, back):
        ctx.hours, ctx.back = hours, back
        return hours.pass_(x.clone(), there)

    @staticmethod
    def backward(ctx, g):
        return ctx.hours.pass_(g.clone(), ctx.back), None, None, None


class Sleeper(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x), self.hours, 2.0, 4.0)


def slow_step(hours):
    @zf.leafwise(needs="element")
    def slow(grad, param):
        return hours.pass_(grad, 8.0)

    return zf.chain(slow(), zf.sgd(0.1))


def test_seconds_by_phase_of_an_attached_model(monkeypatch):
    hours = Hours(monkeypatch)
    model = Sleeper(3, 2, bias=False)
    model.hours = hours
    opt = zf.attach(model, slow_step(hours))
    profile = zf.profile(opt)
    for _ in range(2):
        with profile:
            hours.pass_(None, 16.0)
            out = model(torch.ones(1, 3))
            Slow.apply(out, hours, 32.0, 64.0).sum().backward()
            hours.pass_(None, 128.0)
            opt.step()
            hours.pass_(None, 256.0)
    expected = {"forward": 2, "loss": 96, "backward": 4, "update": 8, "elsewhere": 400}
    assert profile.measured[0].seconds == profile.measured[1].seconds == expected
    assert profile.mean.transforms["slow"] == 8.0


def test_seconds_by_phase_of_a_step(monkeypatch):
    hours = Hours(monkeypatch)
    model = Sleeper(3, 2, bias=False)
    model.hours = hours
    tx = slow_step(hours)
    step = zf.profile(zf.make_step(lambda p, x: functional_call(model, p, (x,)).sum(), tx))
    step(zf.init(tx, dict(model.named_parameters())), torch.ones(1, 3))
    assert {k: s for k, s in step.mean.seconds.items() if s} == {"forward": 2, "backward": 4, "update": 8}


def test_seconds_of_an_update_within_backward(monkeypatch):
    hours = Hours(monkeypatch)
    model = Sleeper(3, 2, bias=False)
    model.hours = hours
    opt = zf.attach(model, slow_step(hours), in_backward=True)
    with zf.profile(opt) as profile:
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
    assert {k: s for k, s in profile.mean.seconds.items() if s} == {"forward": 2, "backward": 4, "update": 8}


@pytest.mark.parametrize("tx", [
    zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.scale_loss(), zf.clip_by_global_norm(1.0), zf.adamw(1e-3)),
    zf.chain(zf.shard(), zf.low_precision_adam(1e-3)),
])  # fmt: skip
def test_a_measured_step_gives_the_numbers_of_any_other(tx):
    states = []
    for measured in (False, True):
        model, tokens = gpt(fused=True)
        opt = zf.attach(model, tx)
        profile = zf.profile(opt, steps=[1] if measured else [99])
        for _ in range(3):
            with profile:
                train(model, opt, tokens)
        assert list(profile.measured) == [1] * measured
        states.append(clone(opt.state))
        step = zf.profile(zf.make_step(loss_of(gpt(True)[0]), tx), steps=[1] if measured else [99])
        state = zf.init(tx, dict(gpt(True)[0].named_parameters()))
        for _ in range(3):
            state, _ = step(state, tokens)
        states.append(state)
    assert_trees_equal(states[0], states[2])
    assert_trees_equal(states[1], states[3])


def test_nothing_is_made_where_nobody_listens(monkeypatch):
    """No range is opened, and steps that are not measured have no hooks and no counter of operations."""

    def refuse(*_, **__):
        raise AssertionError("a range was opened")

    monkeypatch.setattr("zerofn._profiler_ranges._range", refuse)
    monkeypatch.setattr(profile_instruments.Measurement, "__init__", refuse)
    model, tokens = gpt()
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-3)))
    with zf.profile(opt, steps=[1]):
        train(model, opt, tokens)
    assert int(opt.state.step) == 1
    with pytest.raises(AssertionError, match="a range was opened"), torch.profiler.profile(acc_events=True):
        train(model, opt, tokens)


def test_ranges_of_both_routes_have_the_names_of_transforms():
    tx = zf.chain(
        zf.precision(param_dtype=torch.bfloat16),
        zf.accumulate(1),
        zf.clip_by_global_norm(1.0).named("clip"),
        zf.partition({"a": zf.adamw(1e-3), "b": zf.sgd(0.1)}, lambda path: "a" if "weight" in path else "b"),
    )
    for route in (of_model, of_step):
        model, tokens = gpt()
        with torch.profiler.profile(acc_events=True) as shown:
            route(model, tx, tokens)
        names = {e.name for e in shown.events()}
        parts = ("precision", "clip", "partition", "partition.a.adamw", "partition.b.sgd", "update")
        assert {f"zerofn::{name}" for name in parts} <= names


def test_tables():
    model, tokens = gpt()
    opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(1e-3)))
    profile = zf.profile(opt, steps=[0, 2])
    assert repr(profile) == "zf.profile: no step measured yet (0 begun, [0, 2] are to be)"
    assert "no step measured yet" in profile._repr_html_()
    for _ in range(3):
        with profile:
            train(model, opt, tokens)
    text = str(profile)
    assert text.startswith("mean of 2 steps (0 to 2), on this rank\nphase")
    forward = {"all": PRODUCTS + SCORES, "GPT.blocks.* x3": PRODUCTS + SCORES - 2 * BATCH * LENGTH * WIDTH * VOCABULARY}
    for name, count in forward.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert line.split()[len(name.split())] == f"{count / 1e6:.2f}"
    assert "  adamw" in text
    assert profile._repr_html_().count("<table ") == 3
    with zf.profile(opt, flops=False) as profile:
        model(tokens)
    assert "backward   did not run" in str(profile)
    assert "operations" not in str(profile)


def test_what_did_not_run_or_was_not_asked_for():
    model, tokens = gpt()
    opt = zf.attach(model, zf.adamw(1e-3))
    with zf.profile(opt) as profile:
        model(tokens)
    with pytest.raises(KeyError, match="backward"):
        profile.mean.seconds["backward"]
    with pytest.raises(KeyError, match="update"):
        profile.mean.flops["update"]
    with pytest.raises(KeyError, match="all_gather"):
        profile.mean.sent["all_gather"]
    with zf.profile(opt, flops=False) as profile:
        train(model, opt, tokens)
    with pytest.raises(KeyError, match="forward"):
        profile.mean.flops["forward"]
    assert math.fsum(profile.mean.seconds.values()) > 0


def test_a_profile_inside_of_a_profile():
    """Also where the outer one measures another step; and afterwards there is no trace of it."""
    model, tokens = gpt()
    opt = zf.attach(model, zf.adamw(1e-3))
    for outer in (zf.profile(opt), zf.profile(opt, steps=[5])):
        with outer, pytest.raises(RuntimeError, match=r"zf.profile inside of a zf.profile"), zf.profile(opt):
            pass
        with outer, pytest.raises(RuntimeError, match=r"zf.profile inside of a zf.profile"), outer:
            pass
    with zf.profile(opt) as profile:
        train(model, opt, tokens)
    assert profile.mean.flops["forward"][""] == PRODUCTS + SCORES


def test_a_step_that_fails_is_not_kept():
    model, tokens = gpt()
    opt = zf.attach(model, zf.adamw(1e-3))
    profile = zf.profile(opt)
    with pytest.raises(IndexError), profile:
        model(tokens + VOCABULARY)
    assert not profile.measured
    with pytest.raises(RuntimeError, match="has measured no step"):
        profile.mean  # noqa: B018
    with profile:
        with pytest.raises(IndexError):
            model(tokens + VOCABULARY)
        train(model, opt, tokens)
    assert list(profile.measured) == [1]
    assert profile.mean.flops["backward"][""] == 2 * (PRODUCTS + SCORES)
    assert profile.mean.seconds["backward"] > 0
