"""What optimizers are made of: against formulas in float64, torch.optim, and the optimizers that they add up to."""

import pytest
import torch
from stages import around, fronts
from time_limits import limit
from torch import nn
from torch.func import functional_call, grad

import zerofn as zf

F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def trained(tx, steps=6, dtype=torch.float32, shape=(3, 5)):
    """Parameters and state after steps with gradients that are the same for all."""
    state = zf.init(tx, {"w": draw(*shape, seed=99, dtype=dtype)})
    for i in range(steps):
        state, _ = zf.update(tx, {"w": draw(*shape, seed=i, dtype=dtype)}, state)
    return state.params["w"]


# ---------------------------------------------------------------------------------- sums of parts, to the bit

# Between its parts, what changes nothing and keeps them from being run as one.
APART = zf.clip_by_value(1e30)
LR = zf.schedules.cosine(0.05, 10)
SUMS = {
    "adamw": (
        zf.adamw(LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda *between: [
            zf.scale_by_adam((0.8, 0.95), 1e-6),
            *between,
            zf.add_decayed_weights(0.1),
            zf.scale_by_lr(LR),
        ],
    ),
    "adam": (zf.adam(0.05), lambda *between: [zf.scale_by_adam(), *between, zf.scale_by_lr(0.05)]),
    "adam with a penalty": (
        zf.adam(0.05, weight_decay=0.1),
        lambda *between: [zf.add_decayed_weights(0.1), zf.scale_by_adam(), *between, zf.scale_by_lr(0.05)],
    ),
    "sgd": (
        zf.sgd(0.05, momentum=0.9, nesterov=True),
        lambda *between: [zf.trace(0.9, nesterov=True), *between, zf.scale_by_lr(0.05)],
    ),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_chain_of_parts_is_the_optimizer(name, dtype):
    """Each part rounds once more: two units in the last place of a step, of which there are six."""
    one, parts = SUMS[name]
    want, bound = trained(one, dtype=dtype), 12 * torch.finfo(dtype).eps
    for between in ((), (APART,)):
        torch.testing.assert_close(trained(zf.chain(*parts(*between)), dtype=dtype), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [40, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_trace_is_the_momentum_of_sgd_to_the_bit(dtype, size, nesterov):
    parts = zf.chain(zf.trace(0.9, nesterov), zf.scale_by_lr(0.05))
    want = trained(zf.sgd(0.05, momentum=0.9, nesterov=nesterov), dtype=dtype, shape=(size,))
    assert torch.equal(trained(parts, dtype=dtype, shape=(size,)), want)


def test_in_float64_by_hand():
    """Adam's direction, clipped, decayed: no formula of the library."""
    p, m, v = draw(3, 5, seed=99), torch.zeros(3, 5, dtype=F64), torch.zeros(3, 5, dtype=F64)
    start = p.clone()
    for t in range(1, 7):
        g = draw(3, 5, seed=t - 1)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        u = (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-6)
        p = p - 0.05 * (u.clamp(-0.5, 0.5) + 0.1 * p)
    parts = [zf.scale_by_adam((0.8, 0.95), 1e-6), zf.clip_by_value(0.5), zf.add_decayed_weights(0.1)]
    got = trained(zf.chain(*parts, zf.scale_by_lr(0.05)), dtype=F64)
    torch.testing.assert_close(got - start, p - start, rtol=1e-12, atol=1e-14)


def test_states_keep_their_names_and_the_norm_is_that_of_the_gradient():
    tx = zf.chain(*SUMS["adamw"][1]())
    state = zf.init(tx, {"w": draw(4, dtype=torch.float32)})
    g = draw(4, seed=1, dtype=torch.float32)
    new, metrics = zf.update(tx, {"w": g}, state)
    assert {name: set(entries) for name, entries in new.transforms.items()} == {
        "scale_by_adam": {"count", "exp_avg", "exp_avg_sq"},
        "add_decayed_weights": set(),
        "scale_by_lr": {"step", "count"},
    }
    assert float(metrics["grad_norm"]) == pytest.approx(float(g.norm()))
    assert float(metrics["lr"]) == pytest.approx(0.05)
    # Held and skipped steps change nothing.
    held = zf.chain(zf.scale_loss(), *tx.members)
    state = zf.init(held, {"w": draw(4, dtype=torch.float32)})
    new, metrics = zf.update(held, {"w": torch.full((4,), float("inf"))}, state)
    assert bool(metrics["skipped"]) and torch.equal(new.params["w"], state.params["w"])
    assert (
        float(new.transforms["scale_by_lr"]["step"]) == 0 and not new.transforms["scale_by_adam"]["exp_avg"]["w"].any()
    )


def test_a_step_through_parts_is_a_function():
    """The derivative by the first gradient of the parameter after two steps, against the formula in float64."""
    tx, p, b = zf.chain(zf.scale_by_adam(), zf.add_decayed_weights(0.1), zf.scale_by_lr(0.05)), draw(4), draw(4, seed=5)

    def ours(a):
        state = zf.init(tx, {"w": p})
        for g in (a, b):
            state, _ = zf.update(tx, {"w": g}, state)
        return state.params["w"].square().sum()

    def by_hand(a):
        x, m, v = p, torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)
        for t, g in enumerate((a, b), 1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            x = x - 0.05 * ((m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 0.1 * x)
        return x.square().sum()

    a = draw(4, seed=4)
    torch.testing.assert_close(grad(ours)(a), grad(by_hand)(a), rtol=1e-9, atol=1e-12)


AT_STAGES = fronts("data parallel", "ZeRO-1") | {
    "ZeRO-2": lambda: around("ZeRO-2", zf.accumulate(2)),
    "ZeRO-3": lambda: around("ZeRO-3", zf.precision(param_dtype=torch.bfloat16), zf.clip_by_global_norm(1.0)),
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def both_routes(parts):
    """Parameters after four micro-steps, by either route."""
    rank = torch.distributed.get_rank()
    tx, model = zf.chain(*parts), make()
    state = zf.init(tx, dict(model.named_parameters()))
    opt = zf.attach(model, tx)
    plain = make()
    step = zf.make_step(lambda p, x: functional_call(plain, p, (x,)).float().square().mean(), tx)
    for i in range(4):
        x = draw(4, 5, seed=10 * i + rank, dtype=torch.float32)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        state, _ = step(state, x.to(torch.bfloat16) if tx.parts[0].name == "shard" else x)
    full = zf.full_params(tx, state)
    return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}, {k: x.clone() for k, x in full.items()}


CELLS = [(stage, name) for stage in AT_STAGES for name in SUMS]
# Each stage, and each sum.
SOME = [(stage, name) for i, stage in enumerate(AT_STAGES) for j, name in enumerate(SUMS) if (i - j) % 3 == 0]


def at_every_stage(cells):
    found = {}
    for stage, name in cells:
        first, (one, parts) = AT_STAGES[stage], SUMS[name]
        want = both_routes([*first(), one])
        attached, pure = both_routes([*first(), *parts()])
        # Both routes have the same bits, and those of the optimizer but for a rounding of each part.
        found[stage, name] = [torch.equal(attached[k], pure[k]) for k in pure]
        found[stage, name] += [torch.allclose(attached[k], w[k], rtol=1e-5, atol=1e-6) for w in want for k in w]
    # Gradients of whole rows, at owners.
    tx = zf.chain(zf.shard(), zf.centralize(), zf.trace(0.9), zf.scale_by_lr(0.1))
    state, rank = zf.init(tx, {"w": draw(3, 5), "b": draw(4, seed=1)}), torch.distributed.get_rank()
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum() + p["b"].square().sum(), tx)
    for i in range(3):
        state, _ = step(state, draw(3, 5, seed=10 * i + rank))
    return found, zf.full_params(tx, state)


@pytest.mark.parametrize("cells", [SOME, pytest.param(CELLS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_at_every_stage_and_by_both_routes(cells):
    p, b, m, n = draw(3, 5), draw(4, seed=1), 0.0, 0.0
    for i in range(3):
        g = sum(2 * p * draw(3, 5, seed=10 * i + rank) ** 2 for rank in (0, 1)) / 2
        m, n = 0.9 * m + g - g.mean(1, keepdim=True), 0.9 * n + 2 * b
        p, b = p - 0.1 * m, b - 0.1 * n
    for found, centred in zf.launch(at_every_stage, 2, cells, timeout=limit()):
        assert not [where for where, equal in found.items() if not all(equal)]
        torch.testing.assert_close(centred, {"w": p, "b": b}, rtol=1e-12, atol=1e-14)


def test_within_backward_and_inside_of_others():
    def run(parts, **more):
        model = make()
        opt = zf.attach(model, zf.chain(*parts), **more)
        for i in range(3):
            model(draw(4, 5, seed=i, dtype=torch.float32)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return list(opt.detach().state_dict().values())

    one, parts = SUMS["adamw"]
    assert all(map(torch.equal, run(parts(), in_backward=True), run(parts())))
    labels = lambda path: "a" if "weight" in path else "b"  # noqa: E731
    want = run([zf.partition({"a": one, "b": zf.sgd(0.1)}, labels)])
    for x, y in zip(run([zf.partition({"a": zf.chain(*parts()), "b": zf.sgd(0.1)}, labels)]), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- lion, rmsprop


def test_lion_by_hand_in_float64():
    p, m = draw(3, 5, seed=99), torch.zeros(3, 5, dtype=F64)
    start = p.clone()
    for i in range(6):
        g = draw(3, 5, seed=i)
        p = p - 0.02 * ((0.9 * m + 0.1 * g).sign() + 0.3 * p)
        m = 0.99 * m + 0.01 * g
    got = trained(zf.lion(0.02, weight_decay=0.3), dtype=F64)
    torch.testing.assert_close(got - start, p - start, rtol=1e-12, atol=1e-15)
    # In fp32 the same signs, and a unit in the last place for each of six steps.
    got = trained(zf.lion(0.02, weight_decay=0.3)).double()
    torch.testing.assert_close(got, p, rtol=6 * 1.2e-7, atol=1e-7)


def rmsprop_of_torch(lr, dtype, of_grads, **options):
    """Parameters of `torch.optim.RMSprop` and of `rmsprop` after six steps; gradients have the digits of `of_grads`."""
    w = nn.Parameter(draw(40, seed=99, dtype=dtype))
    opt, tx = torch.optim.RMSprop([w], lr=lr, foreach=False, **options), zf.rmsprop(lr, **options)
    state = zf.init(tx, {"w": w.detach().clone()})
    for i in range(6):
        w.grad = draw(40, seed=i, dtype=of_grads).to(dtype)
        opt.step()
        state, _ = zf.update(tx, {"w": w.grad}, state)
    return w.detach(), state.params["w"]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rmsprop_is_torchs_to_the_bit_where_products_are_exact(momentum):
    """torch fuses products with sums on some processors, which changes no bit of exact ones. Its roots of float32 are
    not always the nearest numbers, those of `rmsprop` are: in float64 both are torch's."""
    expected, got = rmsprop_of_torch(2.0**-6, F64, torch.bfloat16, alpha=0.75, momentum=momentum)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_rmsprop_is_torchs_within_its_roundings(momentum, centered, weight_decay):
    """In each of six steps a product and a root may be rounded once more, and the parameter, of |p| < 4, once."""
    options = {"momentum": momentum, "centered": centered, "weight_decay": weight_decay, "alpha": 0.9}
    for dtype in (torch.float32, F64):
        expected, got = rmsprop_of_torch(0.02, dtype, dtype, **options)
        bound = 12 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
