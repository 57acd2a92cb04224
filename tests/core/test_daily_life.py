"""What one does beside training: norms, whole trees, averages in use, metrics as floats, bad batches left out."""

from __future__ import annotations

import math

import pytest
import rank_programs as P
import torch
from stages import around, fronts
from time_limits import limit
from torch import nn
from torch.func import functional_call, grad

import zerofn as zf
from zerofn.testing import assert_trees_close

NAN = float("nan")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -------------------------------------------------------------------------------------------- averages in use

NARROW = {
    f"{stage} in bf16": lambda stage=stage: around(stage, zf.precision(param_dtype=torch.bfloat16))
    for stage in ("ZeRO-2", "ZeRO-3")
}
STAGES = fronts("one process", "data parallel", "ZeRO-1", "ZeRO-3") | NARROW


class Model(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def averaged(stage):
    """Outputs with averages and with parameters, before, inside and behind; then what training comes to."""
    model, rank = Model(), P.rank_and_size()[0]
    opt = zf.attach(model, zf.chain(*STAGES[stage](), zf.sgd(0.5, momentum=0.9), zf.ema(0.7)))

    def step(i):
        model(draw(4, 3, seed=10 * i + rank)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()

    for i in range(4):
        step(i)
    x, params = draw(2, 3, seed=99), zf.full_params(opt.tx, opt.state)
    averages = {k: a.clone() for k, a in zf.full_params(opt.tx, opt.state, of="ema").items()}
    params = {k: p.clone() for k, p in params.items()}
    with torch.no_grad():
        before = model(x).clone()
        with opt.averaged() as same:
            assert same is model
            inside = model(x).clone()
            with opt.gathered():
                shown = {k: p.detach().clone() for k, p in model.named_parameters()}
            with pytest.raises(RuntimeError, match=r"opt.step.* inside of .with opt.averaged"):
                opt.step()
            with pytest.raises(RuntimeError, match=r"zf.save.* inside of .with opt.averaged"):
                zf.save("nowhere", opt)
            with pytest.raises(RuntimeError, match=r"opt.state_dict"):
                opt.state_dict()
        after = model(x).clone()
    assert same_bits(zf.full_params(opt.tx, opt.state), params)
    for i in range(4, 6):
        step(i)
    return before, inside, after, averages, shown, zf.full_params(opt.tx, opt.state)


def trained(stage):
    """The same without a look at averages."""
    model, rank = Model(), P.rank_and_size()[0]
    opt = zf.attach(model, zf.chain(*STAGES[stage](), zf.sgd(0.5, momentum=0.9), zf.ema(0.7)))
    for i in range(6):
        model(draw(4, 3, seed=10 * i + rank)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    return zf.full_params(opt.tx, opt.state)


def on_ranks():
    return {stage: (averaged(stage), trained(stage)) for stage in STAGES if stage != "one process"}


def check(stage, found, plain):
    before, inside, after, averages, shown, end = found
    narrow = "bf16" in stage
    want = functional_call(
        Model(),
        {k: a.bfloat16() if narrow else a for k, a in averages.items()},
        (draw(2, 3, seed=99).bfloat16() if narrow else draw(2, 3, seed=99),),
    )
    assert torch.equal(inside, want) and torch.equal(after, before) and not torch.equal(inside, before)
    if not narrow:
        assert same_bits(shown, averages)
    assert same_bits(end, plain)


def test_a_model_computes_with_averages_for_a_while():
    check("one process", averaged("one process"), trained("one process"))
    for rank in zf.launch(on_ranks, 2, timeout=limit()):
        for stage, (found, plain) in rank.items():
            check(stage, found, plain)


def test_averages_that_are_not_there():
    model = nn.Linear(1, 1)
    opt = zf.attach(model, zf.sgd(0.1))
    with pytest.raises(ValueError, match="this state has no averages"), opt.averaged():
        pass
    opt.detach()
    opt = zf.attach(model, zf.chain(zf.sgd(0.1), zf.ema(0.5), zf.ema(0.9).named("slow")))
    with pytest.raises(ValueError, match="averages of 'ema', 'slow'"), opt.averaged():
        pass
    with opt.averaged("slow"), pytest.raises(RuntimeError, match=r"opt.averaged\(\) inside"), opt.averaged("ema"):
        pass
    # What fails inside puts parameters back all the same.
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), opt.averaged("ema"):
        assert not torch.equal(model.weight, before)
        raise KeyError
    assert torch.equal(model.weight, before)


# ------------------------------------------------------------------------------------------ trees over ranks

PARAMS = {"w": draw(3, 5), "rest": [draw(4, seed=1), draw(1, seed=2)]}
TARGET = {"w": draw(3, 5, seed=7), "rest": [draw(4, seed=8), draw(1, seed=9)]}


def loss(p):
    pairs = ((p["w"], TARGET["w"]), *zip(p["rest"], TARGET["rest"], strict=True))
    return sum((x**3 * t).sum() for x, t in pairs)


def whole():
    found = []
    for before in ([zf.shard()], [zf.reduce_scatter()], [zf.all_reduce()], []):
        tx = zf.chain(*before, zf.sgd(0.1))
        state = zf.init(tx, PARAMS)
        grads = grad(zf.bind(loss, tx, state))(state.params)
        part = {**grads, "rest": [None, grads["rest"][1]]}
        found.append((zf.gather(tx, state, grads), zf.global_norm(grads, tx, state), zf.global_norm(part, tx, state)))
        assert zf.gather(tx, state, part)["rest"][0] is None
        if before and before[0].name != "all_reduce":
            with pytest.raises(ValueError, match=r"w: of shape .*; this rank's shard is of"):
                zf.gather(tx, state, PARAMS)
    return found


def test_trees_over_ranks_whole_and_their_norm():
    want = grad(loss)(PARAMS)
    norm = torch.cat([want["w"].flatten(), *want["rest"]]).norm()
    few = torch.cat([want["w"].flatten(), want["rest"][1]]).norm()
    torch.testing.assert_close(zf.global_norm(want), norm)
    for rank in zf.launch(whole, 2, timeout=limit()):
        for tree, all_, some in rank:
            assert_trees_close(tree, want, ulps=4)  # sums over two ranks, of halves
            torch.testing.assert_close((all_, some), (norm, few))
    # 16-bit numbers are summed in fp32: 4096 ones are 64, where a sum in bf16 stops at 256.
    assert float(zf.global_norm([torch.ones(4096, dtype=torch.bfloat16)])) == 64.0
    assert float(zf.global_norm({})) == 0.0
    with pytest.raises(TypeError, match="with only one of tx and state"):
        zf.global_norm(PARAMS, zf.sgd(0.1))


def test_tied_tensors_count_once():
    w = draw(3)
    tx = zf.sgd(0.1)
    state = zf.init(tx, {"a": w, "b": w})
    assert float(zf.global_norm(state.params, tx, state)) == pytest.approx(float(w.norm()))


# -------------------------------------------------------------------------------------------------- metrics


def test_metrics_as_floats():
    tx = zf.chain(zf.scale_loss(init_scale=4.0), zf.clip_by_global_norm(1.0), zf.adamw(1e-3))
    state = zf.init(tx, PARAMS)
    state, metrics = zf.make_step(loss, tx)(state)
    told = zf.floats(metrics)
    assert list(told) == list(metrics) and all(type(x) is float for x in told.values())
    assert told == {name: float(x) for name, x in metrics.items()}
    assert zf.floats({"step": torch.tensor(2**53 - 1), "lr": 0.5, "on": True, "bad": torch.tensor(math.inf)}) == {
        "step": 2.0**53 - 1,
        "lr": 0.5,
        "on": 1.0,
        "bad": math.inf,
    }
    for wrong in (torch.ones(2), "fast", torch.tensor(1j)):
        with pytest.raises(TypeError, match=r"'x': (.|\n)*no number"):
            zf.floats({"x": wrong})


def test_an_attached_model_can_be_described():
    model = nn.Linear(3, 2)
    opt = zf.attach(model, zf.adamw(1e-3))
    assert zf.describe(opt) == zf.describe(opt.state)


# ---------------------------------------------------------------------------------------------- bad batches


def bad_batches(rank, size, parts):
    """A batch is bad on the first rank alone."""
    tx = zf.chain(*parts)
    state = zf.init(tx, {"w": torch.ones(3)})
    step = zf.make_step(lambda p, x: (p["w"] * x).sum(), tx)
    told = []
    for i in range(6):
        x = draw(3, seed=10 * i + rank) if size > 1 else (draw(3, seed=10 * i) + draw(3, seed=10 * i + 1)) / 2
        state, metrics = step(state, x * NAN if i == 2 and rank == 0 else x)
        told.append(
            (
                bool(metrics["skipped"]),
                bool(metrics["updated"]),
                int(state.transforms["skip_nonfinite"]["skipped_steps"]),
            )
        )
    return told, zf.full_params(tx, state)["w"], int(state.step)


ROADS = {
    "one by one": lambda: [zf.skip_nonfinite(), zf.adamw(0.1)],
    "a micro-batch": lambda: [zf.skip_nonfinite(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.sgd(0.1)],
    "a window": lambda: [zf.accumulate(2), zf.skip_nonfinite(), zf.sgd(0.1)],
}


def bad_on_ranks():
    rank = torch.distributed.get_rank()
    return {
        (name, first().name): bad_batches(rank, 2, [first(), *road()])
        for name, road in ROADS.items()
        for first in (zf.shard, zf.reduce_scatter, zf.all_reduce)
    }


def test_a_bad_batch_is_left_out_on_every_rank():
    want = {name: bad_batches(0, 1, road()) for name, road in ROADS.items()}
    assert want["one by one"][0] == [(i == 2, i != 2, int(i >= 2)) for i in range(6)] and want["one by one"][2] == 5
    # Windows are of the good ones: 0 and 1, 3 and 4.
    assert [t[1] for t in want["a micro-batch"][0]] == [False, True, False, False, True, False]
    assert [t[1] for t in want["a window"][0]] == [False, True, False, False, False, True]
    for rank in zf.launch(bad_on_ranks, 2, timeout=limit()):
        for (name, _), (told, params, steps) in rank.items():
            assert (told, steps) == (want[name][0], want[name][2])
            # Sums over ranks are made in another order.
            torch.testing.assert_close(params, want[name][1], rtol=1e-5, atol=1e-6)


def test_an_attached_model_counts_what_was_left_out():
    """With a loss scale as well: what that has skipped does not come by here."""
    model = torch.nn.Linear(2, 1)
    opt = zf.attach(model, zf.chain(zf.scale_loss(init_scale=8.0), zf.skip_nonfinite(), zf.sgd(0.1)))
    alone = zf.attach(torch.nn.Linear(2, 1), zf.chain(zf.skip_nonfinite(), zf.sgd(0.1)))
    for x in (1.0, NAN, math.inf, 1.0):
        for each in (opt, alone):
            for group in each.param_groups:
                for p in group["params"]:
                    p.grad = torch.full_like(p, x)
            each.step()
    assert opt.skipped_steps == alone.skipped_steps == 2 and opt.global_steps == 2


def test_under_vmap_each_member_skips_its_own():
    tx = zf.chain(zf.skip_nonfinite(), zf.sgd(1.0))
    states = torch.utils._pytree.tree_map(lambda x: torch.stack([x, x]), zf.init(tx, {"w": torch.ones(2)}))
    grads = {"w": torch.tensor([[1.0, NAN], [1.0, 2.0]])}
    states, metrics = torch.vmap(lambda g, s: zf.update(tx, g, s))(grads, states)
    assert metrics["skipped"].tolist() == [True, False]
    assert states.params["w"].tolist() == [[1.0, 1.0], [0.0, -1.0]]
