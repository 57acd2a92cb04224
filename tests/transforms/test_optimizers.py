"""Optimizers and members of their papers: against loops in float64 written from the papers, and against torch.optim.

One table has for each of them a transform and its formula on one leaf. Every test runs over it.
"""

import functools
import re

import pytest
import torch
from refusals import Refusals
from stages import around
from time_limits import limit
from torch.func import functional_call

import zerofn as zf
from zerofn.testing import check_transform

F64, BF16 = torch.float64, torch.bfloat16
LR = 0.05


def draw(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# ---- formulas: from a leaf to a function (parameter, gradient, update) -> new parameter, which keeps its state ----


def zeros(p, names):
    return {name: torch.zeros_like(p) for name in names}


def ratio(a, b):
    return a / b if a > 0 and b > 0 else 1.0


def lamb(p):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"], s["v"] = 0.9 * s["m"] + 0.1 * g, 0.99 * s["v"] + 0.01 * g**2
        u = (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.99**t)).sqrt() + 1e-6) + 0.1 * p
        return p - LR * ratio(p.norm(), u.norm()) * u

    return step


def lars(p, nesterov=False):
    s = zeros(p, "m")

    def step(p, g, t):
        u = LR * ratio(0.3 * p.norm(), g.norm() + 0.1 * p.norm()) * (g + 0.1 * p)
        s["m"] = 0.9 * s["m"] + u
        return p - (u + 0.9 * s["m"] if nesterov else s["m"])

    return step


def adaptive_clip(p):
    def norm(x):
        return x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1)) if x.ndim > 1 else x.norm()

    def step(p, g, t):
        most = 0.3 * norm(p).clamp(min=1e-3)
        return p - LR * torch.where(norm(g) > most, g * most / norm(g), g)

    return step


def adabelief(p):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"] = 0.9 * s["m"] + 0.1 * g
        s["v"] = 0.99 * s["v"] + 0.01 * (g - s["m"]) ** 2 + 1e-8
        m, v = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
        return p * (1 - LR * 0.1) - LR * m / (v.sqrt() + 1e-8)

    return step


def adan(p):
    s = zeros(p, "mwng")

    def step(p, g, t):
        d = g - s["g"] if t > 1 else torch.zeros_like(g)
        s["g"], s["m"], s["w"] = g, 0.9 * s["m"] + 0.1 * g, 0.8 * s["w"] + 0.2 * d
        s["n"] = 0.7 * s["n"] + 0.3 * (g + 0.8 * d) ** 2
        u = s["m"] / (1 - 0.9**t) + 0.8 * s["w"] / (1 - 0.8**t)
        return (p - LR * u / ((s["n"] / (1 - 0.7**t)).sqrt() + 1e-8)) / (1 + LR * 0.1)

    return step


def adopt(p, clipped=True):
    s = zeros(p, "mv")

    def step(p, g, t):
        if t == 1:
            s["v"] = g**2
            return p
        u, most = g / s["v"].sqrt().clamp(min=1e-6), (t - 1) ** 0.25
        s["m"] = 0.9 * s["m"] + 0.1 * (u.clamp(-most, most) if clipped else u)
        s["v"] = 0.99 * s["v"] + 0.01 * g**2
        return p * (1 - LR * 0.1) - LR * s["m"]

    return step


def mars(p):
    s, adam = {}, adamw(p)

    def step(p, g, t):
        c = g + 0.5 * 0.9 / (1 - 0.9) * (g - s.get("g", g))
        s["g"] = g
        return adam(p, c / max(1.0, float(c.norm())), t)

    return step


def adamw(p, decay=0.0):
    s = zeros(p, "mv")

    def step(p, g, t):
        s["m"], s["v"] = 0.9 * s["m"] + 0.1 * g, 0.99 * s["v"] + 0.01 * g**2
        return p - LR * ((s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.99**t)).sqrt() + 1e-8) + decay * p)

    return step


def cautious_adamw(p, by_parts=True):
    adam = adamw(p, 0.0 if by_parts else 0.1)

    def step(p, g, t):
        u = p - adam(p, g, t)
        mask = (u * g > 0).double()
        u = u * mask / mask.mean().clamp(min=1e-3)
        return p - u - (LR * 0.1 * p if by_parts else 0.0)

    return step


def schedule_free(p):
    """As the authors write it: without the average, which is read from `y` and `z`."""
    s = {"z": p, "v": torch.zeros_like(p), "sum": 0.0, "top": 0.0}

    def step(y, g, t):
        rate = LR * min(1.0, t / 3)
        s["v"], s["top"] = 0.99 * s["v"] + 0.01 * g**2, max(s["top"], rate)
        weight = t**0.5 * s["top"] ** 2
        s["sum"] += weight
        c = weight / s["sum"]
        u = g / ((s["v"] / (1 - 0.99**t)).sqrt() + 1e-8) + 0.1 * y
        y = y + c * (s["z"] - y) + rate * (0.9 * (1 - c) - 1) * u
        s["z"] = s["z"] - rate * u
        return y

    return step


def schedule_free_sgd(p, at_y=False):
    """As the paper writes it, with a decay of `z`, or of `y`."""
    s = {"z": p, "x": p, "m": torch.zeros_like(p), "sum": 0.0}

    def step(y, g, t):
        rate = LR * min(1.0, t / 3)
        s["m"] = 0.5 * s["m"] + (g if at_y else g + 0.1 * s["z"])
        s["z"] = s["z"] - rate * (s["m"] + (0.2 * y if at_y else 0.0))
        weight = t * rate
        s["sum"] += weight
        s["x"] = s["x"] + weight / s["sum"] * (s["z"] - s["x"])
        return 0.2 * s["z"] + 0.8 * s["x"]

    return step


def matrix(x):
    return x.flatten(1) if x.ndim > 2 else x


def shampoo(p):
    sides = [i for i in range(2) if p.ndim > 1 and matrix(p).shape[i] <= 4]
    s = {"m": 0.0, "v": 0.1} | {i: 0.1 * torch.eye(matrix(p).shape[i], dtype=F64) for i in sides}
    roots = {}

    def step(p, g, t):
        g = g + 0.1 * p
        u = matrix(g)
        for i in sides:
            s[i] = s[i] + (matrix(g) @ matrix(g).T if i == 0 else matrix(g).T @ matrix(g))
            if t % 2 == 1:
                roots[i] = torch.linalg.matrix_power(s[i], -1)
                for _ in range(1 + (len(sides) == 2)):
                    roots[i] = square_root(roots[i])
            u = roots[i] @ u if i == 0 else u @ roots[i]
        s["v"] = s["v"] + g**2
        s["m"] = 0.5 * s["m"] + (u.reshape(g.shape) if sides else g / s["v"].sqrt())
        return p - LR * s["m"]

    return step


def square_root(x):
    """By the iteration of Denman and Beavers (1976), and no spectrum."""
    y, z = x, torch.eye(len(x), dtype=F64)
    for _ in range(30):
        y, z = (y + z.inverse()) / 2, (z + y.inverse()) / 2
    return y


def soap(p):
    sides = [i for i in range(2) if p.ndim > 1 and matrix(p).shape[i] <= 4]
    s, total, basis = zeros(p, "mv"), dict.fromkeys(sides, 0.0), {}

    def turned(x, back=False):
        y = matrix(x)
        for i in sides:
            q = basis[i].T if back else basis[i]
            y = q.T @ y if i == 0 else y @ q
        return y.reshape(x.shape)

    def step(p, g, t):
        grams = {i: matrix(g) @ matrix(g).T if i == 0 else matrix(g).T @ matrix(g) for i in sides}
        if sides and t == 1:
            total.update({i: 0.05 * x for i, x in grams.items()})
            basis.update({i: torch.linalg.eigh(x)[1].flip(1) for i, x in total.items()})
            return p
        n = t - 1 if sides else max(t - 1, 1)
        s["m"] = 0.9 * s["m"] + 0.1 * g
        s["v"] = 0.95 * s["v"] + 0.05 * turned(g) ** 2
        u = turned(s["m"], False) / (1 - 0.9**n) / ((s["v"] / (1 - 0.95**n)).sqrt() + 1e-8)
        p = (p - LR * turned(u, True)) * (1 - LR * 0.1)
        for i in sides:
            total[i] = 0.95 * total[i] + 0.05 * grams[i]
            if n % 2 == 0:
                basis[i] = torch.linalg.qr(total[i] @ basis[i])[0]
        return p

    return step


def muon(p):
    if p.ndim not in (2, 3):
        return lambda p, g, t: p - LR * g
    s = zeros(p, "m")

    def of_a_matrix(u):
        x = u / u.norm()
        for _ in range(3):
            x = 3.0 * x - 3.2 * x @ x.T @ x + 1.2 * x @ x.T @ x @ x.T @ x
        return 0.2 * max(u.shape) ** 0.5 * x

    def step(p, g, t):
        s["m"] = 0.9 * s["m"] + 0.1 * g
        u = 0.1 * g + 0.9 * s["m"]
        u = of_a_matrix(u) if u.ndim == 2 else torch.stack([of_a_matrix(x) for x in u])
        return p - LR * (u + 0.1 * p)

    return step


def everything(path):
    return "all"


def by_matrices(path):
    return "matrix" if path in ("w", "square", "experts") or path.endswith("weight") else "rest"


def lookahead(p):
    s = {"m": torch.zeros_like(p), "slow": p}

    def step(p, g, t):
        s["m"] = 0.5 * s["m"] + g if t > 1 else g
        p = p - LR * s["m"]
        if t % 3 == 0:
            s["slow"] = p = s["slow"] + 0.7 * (p - s["slow"])
        return p

    return step


def later(step):
    return step != 2


def now_and_then(p):
    s, adam = {"updates": 0}, adamw(p)

    def step(p, g, t):
        if not later(t - 1):
            return p
        s["updates"] += 1
        return adam(p, g, s["updates"])

    return step


def clipped_later(p):
    return lambda p, g, t: p - LR * (g.clamp(-0.5, 0.5) if later(t - 1) else g)


def by_torch(cls, **options):
    def make(p):
        leaf = p.clone().requires_grad_()
        opt = cls([leaf], lr=LR, **options)

        def step(p, g, t):
            leaf.grad = g.clone()
            opt.step()
            return leaf.detach().clone()

        return step

    return make


BETAS = (0.9, 0.99)
ADAM = {"lr": LR, "betas": BETAS, "eps": 1e-8}
TABLE = {
    "lamb": (zf.lamb(LR, BETAS, weight_decay=0.1), lamb),
    "lars": (zf.lars(LR, weight_decay=0.1, trust_coefficient=0.3), lars),
    "lars nesterov": (
        zf.lars(LR, weight_decay=0.1, trust_coefficient=0.3, nesterov=True),
        functools.partial(lars, nesterov=True),
    ),
    "adaptive_clip": (zf.chain(zf.adaptive_clip(0.3), zf.sgd(LR)), adaptive_clip),
    "adabelief": (zf.adabelief(**{**ADAM, "eps": 1e-8}, weight_decay=0.1), adabelief),
    "nadam": (zf.nadam(**ADAM, weight_decay=0.1), by_torch(torch.optim.NAdam, betas=BETAS, weight_decay=0.1)),
    "nadam decoupled": (
        zf.nadam(**ADAM, weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True),
        by_torch(torch.optim.NAdam, betas=BETAS, weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True),
    ),
    "radam": (zf.radam(**ADAM, weight_decay=0.1), by_torch(torch.optim.RAdam, betas=BETAS, weight_decay=0.1)),
    # Here the second moment is never known; there only in the last updates.
    "radam never known": (zf.radam(LR, (0.9, 0.6)), by_torch(torch.optim.RAdam, betas=(0.9, 0.6))),
    "radam decoupled": (
        zf.radam(**ADAM, weight_decay=0.1, decoupled_weight_decay=True),
        by_torch(torch.optim.RAdam, betas=BETAS, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "adan": (zf.adan(LR, (0.9, 0.8, 0.7), weight_decay=0.1), adan),
    "adafactor": (zf.adafactor(LR, weight_decay=0.1), by_torch(torch.optim.Adafactor, weight_decay=0.1)),
    "adafactor clipped": (
        zf.adafactor(LR, -0.5, (1e-2, 0.1), 1.5),
        by_torch(torch.optim.Adafactor, beta2_decay=-0.5, eps=(1e-2, 0.1), d=1.5),
    ),
    "adopt": (zf.adopt(LR, BETAS, weight_decay=0.1), adopt),
    "adopt unclipped": (
        zf.adopt(LR, BETAS, weight_decay=0.1, use_clipping=False),
        functools.partial(adopt, clipped=False),
    ),
    "schedule_free_adamw": (
        zf.schedule_free_adamw(zf.schedules.warmup(LR, 3), BETAS, weight_decay=0.1, r=0.5),
        schedule_free,
    ),
    "schedule_free": (
        zf.schedule_free(zf.sgd(zf.schedules.warmup(LR, 3), momentum=0.5, weight_decay=0.1), 0.8, 1.0, 1.0),
        schedule_free_sgd,
    ),
    "schedule_free of members": (
        zf.partition(
            {"all": zf.schedule_free(zf.sgd(zf.schedules.warmup(LR, 3), 0.5), 0.8, 1.0, 1.0, 0.2)}, everything
        ),
        functools.partial(schedule_free_sgd, at_y=True),
    ),
    "shampoo": (zf.shampoo(LR, 0.5, 0.1, 0.1, update_freq=2, max_precond_dim=4), shampoo),
    # Sides that a gradient fills: the basis of what it leaves would be as rounding has it.
    "soap": (zf.soap(LR, (0.9, 0.95), weight_decay=0.1, precondition_frequency=2, max_precond_dim=4), soap),
    "muon": (
        zf.partition(
            {
                "matrix": zf.muon(LR, 0.9, True, 3, 0.1, None, (3.0, -3.2, 1.2), "match_rms_adamw"),
                "rest": zf.sgd(LR),
            },
            by_matrices,
        ),
        muon,
    ),
    "lookahead": (zf.lookahead(zf.sgd(LR, momentum=0.5), 3, 0.7), lookahead),
    "apply_if": (zf.apply_if(zf.adamw(**ADAM, weight_decay=0.0), later), now_and_then),
    "apply_if clip": (zf.chain(zf.apply_if(zf.clip_by_value(0.5), later), zf.sgd(LR)), clipped_later),
    "mars": (zf.chain(zf.mars(0.5, 0.9), zf.adamw(**ADAM, weight_decay=0.0)), mars),
    "cautious": (
        zf.chain(zf.cautious(zf.scale_by_adam(BETAS)), zf.add_decayed_weights(0.1), zf.scale_by_lr(LR)),
        cautious_adamw,
    ),
    "cautious optimizer": (
        zf.cautious(zf.adamw(**ADAM, weight_decay=0.1)),
        functools.partial(cautious_adamw, by_parts=False),
    ),
}
SHAPES = {
    "w": (6, 4),
    "square": (4, 4),
    "b": (5,),
    "g": (),
    "experts": (3, 4, 2),
    "kernel": (3, 2, 2, 2),
    "none": (0, 3),
}
STEPS = 7


def expected(make, params, gradients):
    steps, found = {k: make(p) for k, p in params.items() if p.numel()}, dict(params)
    for t, grads in enumerate(gradients, 1):
        found |= {k: step(found[k], grads[k], t) for k, step in steps.items()}
    return found


def leaves(seed, dtype=F64, size=1.0):
    return {k: draw(s, 10 * seed + i, dtype) * size for i, (k, s) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("name", TABLE)
def test_the_formula_in_float64(name):
    tx, make = TABLE[name]
    params = leaves(0)
    # Small and large ones: below and above where something is clipped.
    gradients = [leaves(1 + i, size=(0.05, 1.0, 4.0)[i % 3]) for i in range(STEPS)]
    want, state = expected(make, params, gradients), zf.init(tx, params)
    for grads in gradients:
        state, _ = zf.update(tx, grads, state)
    # torch keeps the product of NAdam's momenta in fp32, and so does this; and sums of weights.
    bound = 1e-6 if "nadam" in name or "free" in name else 1e-10
    for k, p in params.items():
        assert p.numel() == 0 or (want[k] - p).abs().max() > 1e-4
        torch.testing.assert_close(state.params[k] - p, want[k] - p, rtol=bound, atol=bound * LR)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:.*stored in bf16")
def test_two_updates_in_narrow_storage(name, dtype):
    """Each rounds a parameter once, and what it keeps once; nothing is computed in 16 bits."""
    tx, make = TABLE[name]
    params, gradients = leaves(0, dtype), [leaves(1 + i, dtype) for i in range(2)]
    state = zf.init(tx, params)
    for grads in gradients:
        state, _ = zf.update(tx, grads, state)
    wide = {k: p.double() for k, p in params.items()}
    want = expected(make, wide, [{k: g.double() for k, g in grads.items()} for grads in gradients])
    unit = torch.finfo(dtype).eps
    for k, p in state.params.items():
        assert p.dtype == dtype
        # Of a sum that nearly vanishes the rounding shows; cautious leaves out what then has another sign.
        torch.testing.assert_close(p.double(), want[k], rtol=2 * unit, atol=2 * unit + 10 * LR * unit)


# ---- at every stage, by both routes, on one to three ranks ----


class UnevenLeaves(torch.nn.Module):
    """Leaves that ranks cannot halve, and one without rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 5)])
        self.gain = torch.nn.Parameter(torch.tensor(0.8))
        self.experts = torch.nn.Parameter(torch.randn(3, 3, 3) / 2)
        self.to(F64)

    def forward(self, x):
        return self.layers[1]((torch.tanh(self.layers[0](x)) @ self.experts).mean(0)) * self.gain


AT_RANKS = {name: tx for name, (tx, _) in TABLE.items()} | {
    "add_noise": zf.chain(zf.add_noise(0.01), zf.sgd(LR)),
}
STAGES = ("ZeRO-3", "ZeRO-2", "ZeRO-1", "data parallel")


def batches(step, ranks):
    return [(draw((8, 3), 100 * step + r), draw((8, 5), 100 * step + 50 + r)) for r in ranks]


def trained(name, stage, route, ranks, size, start=None, steps=range(4), directory=None):
    """The parameters after four steps on the data of these ranks; halfway the state is saved, if it is told where."""
    model, tx = UnevenLeaves(), zf.chain(*around(stage), AT_RANKS[name])

    def loss(params, step):
        found = [(functional_call(model, params, (x,)) - y).square().mean() for x, y in batches(int(step), ranks)]
        return sum(found) / len(ranks)

    if route == "eager":
        opt = zf.attach(model, tx)
        for step in steps:
            (sum((model(x) - y).square().mean() for x, y in batches(step, ranks)) / len(ranks)).backward()
            opt.step()
            opt.zero_grad()
        return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}
    state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
    state = state if start is None else zf.load(start, like=state)
    one = zf.make_step(loss, tx)
    for step in steps:
        state, _ = one(state, torch.tensor(step))
        if directory is not None and step == 1:
            zf.save(directory, state)
    return {k: x.clone() for k, x in zf.full_params(tx, state).items()}


def on_a_rank(cells, directory):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [
        trained(*cell, [rank], size, directory=f"{directory}/{i}" if cell[2] == "pure" else None)
        for i, cell in enumerate(cells)
    ]


EVERY = [(name, stage, route) for name in AT_RANKS for stage in STAGES for route in ("eager", "pure")]
# One for each way in which states lie and numbers travel; the others treat elements alone.
KINDS = ("lamb", "muon", "adaptive_clip", "nadam", "adafactor", "schedule_free_adamw", "shampoo", "soap")
KINDS += ("mars", "cautious", "schedule_free", "schedule_free of members", "lookahead", "apply_if", "add_noise")
SOME = [(name, STAGES[i % 3], ("eager", "pure")[i % 2]) for i, name in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("cells", "size"),
    [(SOME, 2), *(pytest.param(EVERY, size, marks=pytest.mark.slow) for size in (2, 3))],
    ids=["some on 2", "all on 2", "all on 3"],
)
def test_stages_are_one_process(cells, size, tmp_path):
    """Also of a run that is saved on the ranks, and goes on in one process."""
    found = zf.launch(on_a_rank, size, cells, str(tmp_path), timeout=limit(60 if len(cells) < 50 else 300))
    wrong = []
    for i, (name, stage, route) in enumerate(cells):
        want = trained(name, "one process", "pure", range(size), 1)
        got = [ranks[i] for ranks in found]
        if route == "pure":
            more = dict(start=f"{tmp_path}/{i}", steps=range(2, 4))
            got.append(trained(name, "one process", "pure", range(size), 1, **more))
        # A sum over ranks in another order, in float64; of NAdam one number is kept in fp32.
        worst = [max(float((x[k] - want[k]).abs().max()) for k in want) for x in got]
        wrong += [(name, stage, route, worst)] if not max(worst) < 1e-9 else []
    assert not wrong


@zf.leafwise(needs="element", optimizer=True)
def without_a_rate(grad, param):
    return param - grad


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (lambda: zf.adafactor(eps=1e-3), re.compile(r"adafactor\(eps=0.001\)")),
    (lambda: zf.adafactor(eps=(1e-3, None)), re.compile(r"eps is a pair of numbers")),
    (lambda: zf.adafactor(beta2_decay=0.8), re.compile(r"beta2_decay must lie in \[-1, 0\)")),
    (lambda: zf.muon(adjust_lr_fn="rms"), re.compile("adjust_lr_fn is 'original' or 'match_rms_adamw'")),
    (lambda: zf.muon(ns_coefficients=(1, 2)), re.compile("ns_coefficients is 3 numbers")),
    (lambda: zf.init(zf.muon(), {"w": torch.ones(1, 2, 3, 4)}), re.compile(r"muon is for matrices\n +w: of shape")),
    (lambda: zf.adan(betas=(0.9, 0.99)), re.compile(r"betas is 3 numbers")),
    (lambda: zf.cautious(zf.chain(zf.scale_by_adam(), zf.scale_by_lr(0.1))), re.compile(r"cautious\(chain\(...\)\)")),
    (lambda: zf.cautious(zf.accumulate(2)), re.compile(r"cautious\(accumulate\(...\)\)")),
    (lambda: zf.lookahead(zf.clip_by_value(1.0)), re.compile(r"lookahead\(clip_by_value\(...\)\)")),
    (lambda: zf.lookahead(zf.chain(zf.clip_by_value(1.0), zf.sgd(0.1))), re.compile(r"lookahead\(chain\(...\)\)")),
    (
        lambda: zf.init(zf.lookahead(zf.schedule_free_adamw()), {"w": torch.zeros(2)}),
        re.compile("both would keep 'average'"),
    ),
    (lambda: zf.schedule_free(zf.clip_by_value(1.0)), re.compile(r"schedule_free\(clip_by_value\(...\)\)")),
    (lambda: zf.schedule_free(without_a_rate()), re.compile("iterates are weighted by its learning rate")),
    (
        lambda: zf.init(zf.schedule_free(zf.lookahead(zf.sgd(0.1))), {"w": torch.zeros(2)}),
        re.compile("both would keep 'average' in the state of sgd"),
    ),
    (lambda: zf.lookahead(zf.sgd(0.1), slow_step_size=1.5), re.compile("slow_step_size must lie in")),
    (lambda: zf.apply_if(zf.chain(zf.clip_by_value(1.0), zf.sgd(0.1)), later), re.compile(r"apply_if\(chain\(...\)")),
    (lambda: zf.apply_if(zf.accumulate(2), later), re.compile(r"apply_if\(accumulate\(...\)")),
    (lambda: zf.apply_if(zf.skip_nonfinite(), later), re.compile(r"apply_if\(skip_nonfinite\(...\)")),
    (
        lambda: zf.init(zf.lamb(), {"w": torch.zeros(2, dtype=torch.float16)}),
        re.compile("lamb: squared gradients fall below"),
    ),
    (lambda: zf.attach(torch.nn.Linear(2, 2), zf.lamb(), in_backward=True), re.compile("lamb")),
)
ROWS.rows(TypeError, (lambda: zf.apply_if(zf.sgd(0.1), 3), "apply_if(sgd(...), 3)"))


@ROWS(TypeError, "fn returns a bool, and 1 is")
def a_step_that_a_number_applies():
    tx = zf.apply_if(zf.sgd(0.1), lambda step: 1)
    state = zf.init(tx, {"w": torch.ones(1)})
    yield state
    zf.update(tx, {"w": torch.ones(1)}, state)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_derivative_through_eigenvectors_is_refused(name):
    tx = TABLE[name][0]
    state = zf.init(tx, {"w": draw((3, 3), 0)})

    def after(g):
        return zf.update(tx, {"w": g}, state)[0].params["w"].sum()

    for call in (torch.func.grad(after), lambda g: after(g.requires_grad_())):
        with pytest.raises(RuntimeError, match=rf"a derivative through {name}\(...\)\n(.|\n)*zf.muon"):
            call(draw((3, 3), 1))


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_eigenvectors_of_nan_are_named(name):
    tx = TABLE[name][0]
    state = zf.init(tx, {"w": draw((3, 3), 0)})
    with pytest.raises(FloatingPointError, match=rf"{name}: the eigenvectors of w\n(.|\n)*zf.skip_nonfinite"):
        zf.update(tx, {"w": torch.full((3, 3), torch.nan, dtype=F64)}, state)


def test_a_derivative_through_norms_of_leaves_is_that_of_the_formula():
    for name in ("lamb", "lars", "mars", "adafactor", "adaptive_clip"):
        tx, make = TABLE[name]
        p, state = draw((3, 2), 0), zf.init(TABLE[name][0], {"w": draw((3, 2), 0)})

        def ours(g, tx=tx, state=state):
            return zf.update(tx, {"w": 3 * g}, state)[0].params["w"].square().sum()

        def by_hand(g, make=make, p=p):
            return make(p)(p, 3 * g, 1).square().sum()

        g, slopes = draw((3, 2), 1), []
        for i in range(6):
            by = 1e-6 * torch.eye(6, dtype=F64)[i].view(3, 2)
            slopes.append((by_hand(g + by) - by_hand(g - by)) / 2e-6)
        want = torch.stack(slopes).view(3, 2)
        torch.testing.assert_close(torch.func.grad(ours)(g), want, rtol=1e-5, atol=1e-7)


def test_soap_conforms():
    """On leaves whose gradients fill their sides: the rest of a basis is as rounding has it."""
    shapes = {"w": (4, 4), "b": (3,), "kernel": (2, 2, 2), "none": (0, 3), "gain": ()}
    params = {k: draw(s, i, torch.float32) for i, (k, s) in enumerate(shapes.items())}
    check_transform(zf.soap(0.01, max_precond_dim=4), params)


@pytest.mark.parametrize("name", ["schedule_free_adamw", "lookahead"])
def test_weights_to_evaluate(name):
    """Of an attached model too: of Lookahead the slow ones, of the other one the average in the authors' form."""
    tx = TABLE[name][0]
    model = torch.nn.Linear(3, 2).to(F64)
    opt, state = zf.attach(model, tx), zf.init(tx, {k: p.detach().clone() for k, p in model.named_parameters()})
    slow = {k: p.detach().clone() for k, p in model.named_parameters()}
    for i in range(4):
        for p in model.parameters():
            p.grad = draw(p.shape, i)
        state, _ = zf.update(tx, {k: draw(p.shape, i) for k, p in model.named_parameters()}, state)
        opt.step()
        slow = {k: p.detach().clone() for k, p in model.named_parameters()} if i == 2 else slow
    want = slow
    if name == "schedule_free_adamw":
        z = state.transforms[name]["z"]
        want = {k: y + (1 - 1 / 0.9) * (z[k] - y) for k, y in state.params.items()}
    with opt.averaged():
        for k, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), want[k], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(zf.full_params(tx, state, of=tx.name), want, rtol=1e-10, atol=1e-12)
