"""The examples in `examples/research/` do what they say, against references written by hand."""

import importlib
from pathlib import Path

import pytest
import torch
from support.time_limits import limit
from torch.func import grad, jacrev

import zerofn as zf

RESEARCH = Path(__file__).parent.parent / "examples" / "research"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(RESEARCH))
    return importlib.import_module


def test_maml(example):
    """Its meta-gradient against `p - rate * grad` by hand in float64, and torchopt's; and it learns to adapt."""
    maml = example("maml")
    torchopt = pytest.importorskip("torchopt")
    params, wide = maml.first_params(dtype=torch.float64), torch.float64
    batch = maml.tasks(3, 5, torch.Generator().manual_seed(1), dtype=wide)

    def by_hand(params):
        losses = []
        for x, y, x2, y2 in zip(*batch, strict=True):
            g = grad(maml.mse)(params, x, y)
            losses.append(maml.mse({k: params[k] - 0.02 * g[k] for k in params}, x2, y2))
        return torch.stack(losses).mean()

    got, want = grad(maml.meta_loss)(params, batch), grad(by_hand)(params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    losses = []
    for x, y, x2, y2 in zip(*batch, strict=True):
        g = torch.autograd.grad(maml.mse(leaves, x, y), list(leaves.values()), create_graph=True)
        inner = torchopt.sgd(0.02)
        updates, _ = inner.update(dict(zip(leaves, g, strict=True)), inner.init(leaves), inplace=False)
        losses.append(maml.mse(torchopt.apply_updates(leaves, updates, inplace=False), x2, y2))
    peer = torch.autograd.grad(torch.stack(losses).mean(), list(leaves.values()))
    for k, other in zip(params, peer, strict=True):
        torch.testing.assert_close(got[k], want[k], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(got[k], other, rtol=1e-12, atol=1e-14)
    losses = maml.train(steps=40)[1]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_learned_rates(example):
    """Near what is best, one over the curvature: from 0.0067 for each."""
    module = example("learned_rates")
    rates, _ = module.train(steps=80)
    torch.testing.assert_close(rates, 1 / module.CURVATURE, rtol=0.3, atol=0)


@pytest.mark.slow
def test_weight_decay(example):
    """The hypergradient against a difference quotient in float64; tuned, the held-out loss is less than without."""
    module = example("weight_decay")
    at, small = torch.tensor(0.7, dtype=torch.float64), 1e-5
    f = lambda d: module.held_out_loss(d, dtype=torch.float64)  # noqa: E731
    torch.testing.assert_close(grad(f)(at), (f(at + small) - f(at - small)) / (2 * small), rtol=1e-6, atol=0)
    decay, found = module.tune(8)
    assert found[-1] < found[0] and decay > 0.05


def test_data_reweighting(example):
    """Weights come from one outer derivative: minus the inner product of a row's gradient with that of clean rows."""
    module = example("data_reweighting")
    train, clean, flipped = module.data()
    params = {"w": torch.tensor([0.1, 0.2]), "b": torch.tensor(0.1)}
    got = grad(module.clean_loss)(torch.zeros(len(flipped)), params, train, clean)
    alone = lambda p: [module.loss(p, *(t[i : i + 1] for t in train), 1.0) for i in range(60)]  # noqa: E731
    rows = jacrev(lambda p: torch.stack(alone(p)))(params)
    clean_g = grad(lambda p: module.F.binary_cross_entropy_with_logits(module.logits(p, clean[0]), clean[1]))(params)
    torch.testing.assert_close(got, -(rows["w"] @ clean_g["w"] + rows["b"] * clean_g["b"]), rtol=1e-5, atol=1e-6)
    _, weights, flipped = module.train()
    assert weights[flipped].sum() < 0.5 * flipped.float().mean()


def test_learned_optimizer(example):
    module = example("learned_optimizer")
    rule, _ = module.train()
    start, curvature = torch.ones(6), torch.linspace(0.5, 1.5, 6)
    assert module.run(rule, start, curvature) < 0.8 * module.run(module.first_rule(), start, curvature)


def dp_on_ranks(dp_noise):
    import dp_sgd
    import torch.distributed as dist

    x, y = dp_sgd.data()
    mine = slice(dist.get_rank() * 32, dist.get_rank() * 32 + 32)
    return dp_sgd.train(x[mine], y[mine], steps=10, noise=dp_noise, ranks=2)


def test_dp_sgd(example):
    """By hand on one process; two ranks with half of the samples each give the same parameters."""
    module = example("dp_sgd")
    x, y = module.data()
    w, b = torch.zeros(3), torch.zeros(())
    for _ in range(10):
        error = x @ w + b - y
        each = torch.cat([2 * error[:, None] * x, 2 * error[:, None]], 1)
        g = (each * (1 / each.norm(dim=1)).clamp(max=1.0)[:, None]).mean(0)
        w, b = w - 0.2 * g[:3], b - 0.2 * g[3]
    params, longest = module.train(x, y, steps=10)
    assert longest > 1.0
    torch.testing.assert_close(params, {"w": w, "b": b})
    noisy = module.train(x, y, steps=10, noise=1.0)[0]
    assert (noisy["w"] - params["w"]).abs().max() > 1e-3
    for found, _ in zf.launch(dp_on_ranks, 2, 1.0, timeout=limit(60)):
        torch.testing.assert_close(found, noisy)


def test_ensemble(example):
    """Each member is what it is alone, to fp32's rounding over 20 updates of AdamW."""
    module = example("ensemble")
    rates = torch.tensor([1e-3, 1e-2, 1e-1])
    starts, xs, params, losses = module.sweep(rates, steps=20)
    for i, rate in enumerate(rates):
        alone, curve = module.member(starts[i], rate.item(), xs, module.truth)
        torch.testing.assert_close(losses[i], curve, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close({k: v[i] for k, v in params.items()}, alone, rtol=1e-3, atol=1e-4)
    assert losses[1][-5:].mean() < losses[1][:5].mean()


@pytest.mark.slow
def test_bits_by_curvature(example):
    """As many bits cost less loss by curvature; with 7 in the mean they cost what the second order says, within 2."""
    module = example("bits_by_curvature")
    found = module.compare(seeds=2, mean_bits=(6, 7))
    for bits, (equal, _), (chosen, _) in found[6]:
        assert sum(bits) <= 6 * len(module.LAYERS) and 0 < chosen < 0.6 * equal
    for _, *ways in found[7]:
        assert all(0.5 * expected < real < 2 * expected for real, expected in ways)
    weight = torch.linspace(-1, 1, 1001) ** 3
    small = module.rounded(weight, 4)
    assert len(small.unique()) == 16 and small[0] == -1
    assert (small - weight).abs().max() <= 1 / 15 + 1e-6  # half of a spacing
