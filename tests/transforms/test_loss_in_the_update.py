"""What computes with the loss of a step: at every stage, by both routes, on windows, against formulas in float64."""

import re

import pytest
import torch
from models import Regression, regression_batch
from refusals import Refusals
from stages import around
from time_limits import limit
from torch.func import functional_call

import zerofn as zf
from zerofn.extend import Facts, Prepared, Transform, transform

F64 = torch.float64
LR = 0.3


@transform
def by_number():
    """Multiplies gradients by a number that a step is given by another name than `loss`."""

    def prepare(state, grads, params, ctx):
        return Prepared(carry=ctx.given["scale"] if ctx.given else None)

    def update(grads, state, params, scale, ctx):
        return {path: g * scale for path, g in grads.items()}, state

    return Transform("by_number", needs="element", facts=Facts(wants=("scale",)), prepare_fn=prepare, update_fn=update)


def everything(path):
    return "all"


def plateau(lr=LR):
    return zf.reduce_on_plateau(zf.sgd(lr, momentum=0.5), 0.5, patience=1, rtol=0.3, cooldown=1, accumulation_size=2)


CHAINS = {
    "polyak": (lambda: [zf.scale_by_polyak(0.1, 0.4, 1e-3), zf.sgd(LR)]),
    "polyak of members": (lambda: [zf.scale_by_polyak(0.1, 0.4), zf.partition({"all": plateau()}, everything)]),
    "momo": (lambda: [zf.scale_by_momo(0.8, 0.1, 3.0), zf.sgd(LR)]),
    "plateau": (lambda: [plateau(zf.schedules.linear(LR, 0.1, 9))]),
    "plateau, clip": (lambda: [zf.clip_by_value(0.5), plateau()]),
}


def by_hand(name, updates, window, ranks, weights):
    """The parameters after the updates, by the formulas, in a loop of plain torch."""
    model = Regression()
    params = dict(model.named_parameters())
    scale, best, waited, cooling, seen, moment = 1.0, float("inf"), 0, 0, [], {}
    product, steps = 0.0, []
    for t in range(updates):
        total, loss = sum(weights(t * window + i, r) for i in range(window) for r in ranks), 0.0
        for p in params.values():
            p.grad = None
        for i in range(window):
            for r in ranks:
                x, y = regression_batch(t * window + i, r)
                one = (model(x) - y).square().mean() * weights(t * window + i, r) / total
                one.backward()
                loss += one.item()
        g, rate = {k: p.grad.clone() for k, p in params.items()}, LR
        if "polyak" in name:
            square = sum(float(x.square().sum()) for x in g.values()) + (1e-3 if name == "polyak" else 0)
            g = {k: x * min((loss - 0.1) / square, 0.4) for k, x in g.items()}
        if "clip" in name:
            g = {k: x.clamp(-0.5, 0.5) for k, x in g.items()}
        if name == "momo":
            b = 0.8 if t else 0.0
            moment = {k: b * moment[k] + (1 - b) * x if t else x for k, x in g.items()}
            seen = [b * seen[0] + (1 - b) * loss if t else loss]
            product = b * product + (1 - b) * sum(float((x * params[k].detach()).sum()) for k, x in g.items())
            gap = seen[0] - 0.1 + sum(float((x * params[k].detach()).sum()) for k, x in moment.items()) - product
            steps.append(min(max(gap, 0) / sum(float(x.square().sum()) for x in moment.values()), 3.0))
            g = {k: x * steps[-1] for k, x in moment.items()}
        if name not in ("momo", "polyak"):
            rate = LR + (0.1 - LR) * t / 9 if name == "plateau" else LR
            seen.append(loss)
            if len(seen) == 2:
                mean, seen = sum(seen) / 2, []
                better = mean < 0.7 * best
                best, waited = (mean, 0) if better else (best, waited + 1)
                if cooling:
                    waited, cooling = 0, cooling - 1
                elif waited == 1:
                    scale, waited, cooling = scale * 0.5, 0, 1
            moment = {k: 0.5 * moment[k] + x if moment else x for k, x in g.items()}
            g = moment
        with torch.no_grad():
            for k, p in params.items():
                p -= rate * scale * g[k]
    assert len(ranks) > 1 or not steps or 0 < min(steps) < 3.0, "no step is that of the model"
    return {k: p.detach().clone() for k, p in params.items()}, scale


def equal(step, rank):
    return 1.0


def unequal(step, rank):
    return float((step * 7 + rank * 3) % 4)


def trained(name, stage, window, route, weighted, ranks):
    model = Regression()
    weights = unequal if weighted else equal
    held = zf.accumulate(window, weighted)
    front = around(stage, window=held)
    tx = zf.chain(*front, *[held] * (held not in front), *CHAINS[name]())
    micro_steps = [(t, *regression_batch(t, ranks[0])) for t in range(8 * window)]
    if route == "pure":
        state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
        step = zf.make_step(lambda p, x, y: (functional_call(model, p, (x,)) - y).square().mean(), tx)
        for t, x, y in micro_steps:
            more = {"weight": weights(t, ranks[0])} if weighted else {}
            state, _ = step(state, x, y, **more)
        return {k: x.clone() for k, x in zf.full_params(tx, state).items()}
    opt = zf.attach(model, tx)
    for t, x, y in micro_steps:
        loss = (model(x) - y).square().mean()
        more = {"weight": weights(t, ranks[0])} if weighted else {}
        if route == "given":
            loss.backward()
            more["loss"] = loss.item()
        else:
            opt.backward(loss)
        opt.step(**more)
        opt.zero_grad()
    return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}


def on_a_rank(cells):
    rank = torch.distributed.get_rank()
    return [trained(*cell, [rank]) for cell in cells]


STAGES = ("ZeRO-3", "ZeRO-2", "ZeRO-1", "data parallel")
EVERY = [
    (name, stage, window, route, weighted)
    for name in CHAINS
    for stage in STAGES
    for window in (1, 2)
    for route in ("pure", "given", "backward")
    # Weights that differ between ranks are known in time by a pure step alone, or where sums come first.
    for weighted in (False, True)
    if not weighted or (window == 2 and (route == "pure" or stage == "ZeRO-1"))
]
SOME = [EVERY[i] for i in range(3, len(EVERY), 11)]


@pytest.mark.parametrize(
    ("cells", "size"),
    [(SOME[::3], 1), (SOME, 2), *[pytest.param(EVERY, n, marks=pytest.mark.slow) for n in (1, 2, 3)]],
    ids=["some on 1", "some on 2", "all on 1", "all on 2", "all on 3"],
)
def test_stages_and_windows_are_the_formula(cells, size):
    found = (
        [[trained(*cell, [0]) for cell in cells]]
        if size == 1
        else zf.launch(on_a_rank, size, cells, timeout=limit(240))
    )
    wrong = []
    for i, cell in enumerate(cells):
        name, _, window, _, weighted = cell
        want, scale = by_hand(name, 8, window, range(size), unequal if weighted else equal)
        assert scale < 1 or "plateau" not in name, "the rate never falls: the data of this test are dead"
        worst = [max(float((x[i][k] - want[k]).abs().max()) for k in want) for x in found]
        wrong += [(cell, worst)] if not max(worst) < 1e-9 else []
    assert not wrong


def test_a_number_of_ones_own_is_given_by_its_name():
    tx = zf.chain(zf.accumulate(2), by_number(), zf.sgd(1.0))
    state = zf.init(tx, {"w": torch.zeros(1, dtype=F64)})
    step = zf.make_step(lambda p: p["w"].sum(), tx)
    for scale in (1.0, 4.0):
        state, _ = step(state, scale=scale)
    assert state.params["w"] == -2.5
    with pytest.raises(TypeError, match=r"step\(state, loss=...\)"):
        step(state, loss=1.0, scale=1.0)


@pytest.mark.parametrize("skip", [zf.skip_nonfinite, lambda: zf.scale_loss(8.0)])
@pytest.mark.parametrize("by_loss", [zf.scale_by_polyak, zf.scale_by_momo])
def test_the_loss_of_a_skipped_micro_batch_does_not_count(by_loss, skip):
    def run(batches):
        tx = zf.chain(skip(), zf.accumulate(2), by_loss(), zf.sgd(0.3))
        state, step = zf.init(tx, {"w": torch.ones(2)}), zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)
        for x in batches:
            state, _ = step(state, torch.tensor(x))
        return state

    nan, good = float("nan"), [1.0, 2.0, 3.0, 0.5]
    assert torch.equal(run([nan, 1.0, nan, *good[1:], nan]).params["w"], run(good).params["w"])
    assert run(good).step == 2


def test_a_derivative_goes_through_the_loss():
    tx = zf.chain(zf.scale_by_polyak(max_learning_rate=10.0), zf.sgd(1.0))
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)
    state = zf.init(tx, {"w": torch.tensor([1.0, 2.0], dtype=F64)})
    x = torch.tensor([0.5, 1.5], dtype=F64)

    def by_formula(x):
        w = torch.tensor([1.0, 2.0], dtype=F64)
        g = 2 * w * x**2
        return (w - (w * x).square().sum() / g.square().sum() * g).square().sum()

    slope = torch.func.grad(lambda x: step(state, x)[0].params["w"].square().sum())(x)
    torch.testing.assert_close(slope, torch.func.grad(by_formula)(x))


# ---- tensors of which the largest elements count ----


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"q": torch.nn.Linear(3, 4), "k": torch.nn.Linear(3, 4, bias=i == 0)}) for i in range(2)
        ).to(F64)

    def forward(self, x):
        """The loss, and the largest logit by layer and head."""
        most, total = [], 0.0
        for layer in self.layers:
            q, k = (layer[name](x).unflatten(-1, (2, 2)).transpose(0, 1) for name in "qk")
            logits = 5 * q @ k.mT
            total = total + logits.square().mean()
            most.append(logits.detach().amax((1, 2)))
        return total, torch.stack(most)


PAIRS = [("layers.0.q", "layers.0.k"), ("layers.1.q", "layers.1.k")]
TAU = 2.0


def clipped_by_hand(window, ranks):
    model, clipped = Attention(), 0
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for t in range(4):
        most = torch.full((2, 2), -torch.inf, dtype=F64)
        opt.zero_grad()
        for i in range(window):
            for r in ranks:
                loss, logits = model(regression_batch(t * window + i, r)[0])
                (loss / len(ranks) / window).backward()
                most = torch.maximum(most, logits)
        opt.step()
        with torch.no_grad():
            for i, layer in enumerate(model.layers):
                for h in range(2):
                    if most[i, h] > TAU:
                        clipped += 1
                        for name, share in (("q", 0.25), ("k", 0.75)):
                            for p in layer[name].parameters():
                                p[2 * h : 2 * h + 2] *= (TAU / most[i, h]) ** share
    assert 2 < clipped < 16
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def clipped(stage, window, route, ranks):
    model, held = Attention(), zf.accumulate(window)
    front = around(stage, window=held)
    tx = zf.chain(*front, *[held] * (held not in front), zf.sgd(1e-3), zf.qk_clip(PAIRS, 2, TAU, 0.25))
    batches = [regression_batch(t, ranks[0])[0] for t in range(4 * window)]
    if route == "eager":
        opt = zf.attach(model, tx)
        for x in batches:
            loss, logits = model(x)
            loss.backward()
            opt.step(max_logits=logits)
            opt.zero_grad()
        return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}
    state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
    step = zf.make_step(lambda p, x: functional_call(model, p, (x,))[0], tx)
    for x in batches:
        params = zf.full_params(tx, state)
        state, _ = step(state, x, max_logits=functional_call(model, params, (x,))[1])
    return {k: x.clone() for k, x in zf.full_params(tx, state).items()}


def clipped_on_a_rank(cells):
    return [clipped(*cell, [torch.distributed.get_rank()]) for cell in cells]


CLIPPED = [(stage, window, route) for stage in STAGES for window in (1, 2) for route in ("eager", "pure")]


def test_the_largest_logits_of_ranks_and_windows_clip_heads():
    cells, size = CLIPPED[::3], 2
    found = zf.launch(clipped_on_a_rank, size, cells, timeout=limit(60))
    wrong = []
    for i, cell in enumerate(cells):
        want = clipped_by_hand(cell[1], range(size))
        worst = [max(float((x[i][k] - want[k]).abs().max()) for k in want) for x in found]
        wrong += [(cell, worst)] if not max(worst) < 1e-10 else []
    assert not wrong


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (
        lambda: zf.attach(Regression(), zf.chain(*CHAINS["polyak"]()), in_backward=True),
        re.compile("computes with the loss"),
    ),
    (lambda: zf.reduce_on_plateau(zf.clip_by_value(1.0)), re.compile(r"reduce_on_plateau\(clip_by_value\(...\)\)")),
    (lambda: zf.qk_clip(["q"], 2), re.compile(r"qk_clip\(\['q'\], ...\)")),
    (
        lambda: zf.init(zf.chain(zf.sgd(0.1), zf.qk_clip([("q", "k")], 2)), {"q": {"weight": torch.ones(3, 2)}}),
        re.compile(r"k: no module of this name(.|\n)*q.weight: of shape \(3, 2\)"),
    ),
    (lambda: zf.scale_by_polyak().update({"w": torch.ones(1)}, {}, {"w": torch.ones(1)}), "a step without loss="),
)


@ROWS(ValueError, "a step without loss= through scale_by_polyak", "opt.backward(loss) in place of loss.backward()")
def a_backward_that_tells_no_loss():
    model = Regression()
    opt = zf.attach(model, zf.chain(*CHAINS["polyak"]()))
    model(regression_batch(0, 0)[0]).sum().backward()
    yield dict(model.named_parameters())
    opt.step()


@ROWS(ValueError, "a step without loss= through reduce_on_plateau")
def an_update_without_a_loss():
    tx = plateau()
    state = zf.init(tx, {"w": torch.ones(1)})
    yield state
    zf.update(tx, {"w": torch.ones(1)}, state)


@ROWS(TypeError, "zf.update(tx, grads, state, loss=...)", "no transform of this pipeline wants loss")
def a_loss_that_nobody_wants():
    state = zf.init(zf.sgd(0.1), {"w": torch.ones(1)})
    yield state
    zf.update(zf.sgd(0.1), {"w": torch.ones(1)}, state, loss=1.0)


@ROWS(ValueError, "the max_logits of a step is a tensor of shape (1, 2)")
def logits_of_all_layers_as_one():
    tx = zf.chain(zf.sgd(0.1), zf.qk_clip([("q", "k")], 2))
    params = {"q": {"weight": torch.ones(2, 2)}, "k": {"weight": torch.ones(2, 2)}}
    state = zf.init(tx, params)
    yield state
    zf.update(tx, params, state, max_logits=torch.ones(2))


@ROWS(ValueError, "the loss of a step is one number")
def losses_of_a_batch():
    tx = plateau()
    state = zf.init(tx, {"w": torch.ones(1)})
    yield state
    zf.update(tx, {"w": torch.ones(1)}, state, loss=torch.ones(3))


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
