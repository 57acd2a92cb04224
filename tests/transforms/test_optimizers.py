"""Optimizers and members of their papers: against loops in float64 written from the papers, and against torch.optim.

Rows of the table of transforms that have a formula on one leaf. Every test runs over them.
"""

import re

import pytest
import torch
from covering import covering
from formulas import F64, LR, later
from refusals import Refusals
from stages import around
from time_limits import limit
from torch.func import functional_call
from transforms_table import FORMULAS, ROWS

import zerofn as zf
from zerofn.testing import check_transform

BF16 = torch.bfloat16


def draw(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# The transform and its formula.
TABLE = {name: (row.make(FORMULAS), row.formula) for name, row in ROWS.items() if row.formula}
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
        # Of a sum that nearly vanishes the rounding shows; cautious leaves out what then has another sign. A product of
        # matrices has sums of up to 8 numbers, in an order that the processor decides.
        terms = 8 if name in ("muon", "shampoo", "soap") else 1
        torch.testing.assert_close(p.double(), want[k], rtol=2 * unit, atol=2 * unit + 10 * LR * unit * terms)


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
KINDS += ("mars", "cautious", "schedule_free", "schedule_free, of members", "lookahead", "apply_if", "add_noise")
SOME = [(name, STAGES[i % 3], ("eager", "pure")[i % 2]) for i, name in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("cells", "size"),
    [(SOME, 2), pytest.param(covering(EVERY, 2), 3, marks=pytest.mark.slow)],
    ids=["some on 2", "pairs on 3"],
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


WRONG = Refusals()
WRONG.rows(
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
        re.compile("have state entries of the same name, and one would be lost: 'average'"),
    ),
    (lambda: zf.schedule_free(zf.clip_by_value(1.0)), re.compile(r"schedule_free\(clip_by_value\(...\)\)")),
    (lambda: zf.schedule_free(without_a_rate()), re.compile("iterates are weighted by its learning rate")),
    (
        lambda: zf.init(zf.schedule_free(zf.lookahead(zf.sgd(0.1))), {"w": torch.zeros(2)}),
        re.compile("the wrapper and sgd have state entries of the same name, and one would be lost: 'average'"),
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
WRONG.rows(TypeError, (lambda: zf.apply_if(zf.sgd(0.1), 3), "apply_if(sgd(...), 3)"))


@WRONG(TypeError, "fn returns a bool, and 1 is")
def a_step_that_a_number_applies():
    tx = zf.apply_if(zf.sgd(0.1), lambda step: 1)
    state = zf.init(tx, {"w": torch.ones(1)})
    yield state
    zf.update(tx, {"w": torch.ones(1)}, state)


@pytest.mark.parametrize("row", WRONG)
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
@pytest.mark.parametrize("rows", [3, 40])
def test_eigenvectors_of_nan_are_named(name, rows):
    """LAPACK says so for small matrices only."""
    tx = getattr(zf, name)(0.1)
    state = zf.init(tx, {"w": draw((rows, rows), 0)})
    with pytest.raises(FloatingPointError, match=rf"{name}: the eigenvectors of w\n(.|\n)*zf.skip_nonfinite"):
        zf.update(tx, {"w": torch.full((rows, rows), torch.nan, dtype=F64)}, state)


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


@pytest.mark.parametrize("frequency", [2, 10])
def test_soap_conforms(frequency):
    """On leaves with more rows than columns, and fewer: on the longer side a gradient has eigenvalues of zero."""
    shapes = {"w": (4, 4), "tall": (5, 2), "b": (3,), "kernel": (2, 2, 2), "none": (0, 3), "gain": ()}
    params = {k: draw(s, i, torch.float32) for i, (k, s) in enumerate(shapes.items())}
    check_transform(zf.soap(0.01, precondition_frequency=frequency), params)


def low_rank(seed, shape):
    return draw((shape[0], 2), seed) @ draw((2, shape[1]), seed + 50)


def zero_rows(seed, shape):
    return draw(shape, seed) * (torch.arange(shape[0]) % 2).unsqueeze(1)


def equal_rows(seed, shape):
    return draw(shape, seed)[torch.arange(shape[0]) // 2]


def orthogonal(seed, shape):
    return torch.linalg.qr(draw((max(shape), max(shape)), seed)).Q[: shape[0], : shape[1]]


@pytest.mark.parametrize("shape", [(4, 4), (9, 5), (5, 12)], ids=str)
@pytest.mark.parametrize("kind", [low_rank, zero_rows, equal_rows, orthogonal], ids=lambda f: f.__name__)
@pytest.mark.parametrize("frequency", [3, 10])
def test_a_rounding_of_gradients_is_no_more_in_soap(kind, shape, frequency):
    """Where gradients have equal singular values, or zeros, a basis is as a rounding has it, if nobody chooses one."""

    def change(noise):
        tx = zf.soap(0.01, weight_decay=0.0, precondition_frequency=frequency)
        state = zf.init(tx, {"w": torch.zeros(shape, dtype=F64)})
        for i in range(8):
            gradient = kind(i, shape) * (1 + noise * draw(shape, 100 + i))
            state, _ = zf.update(tx, {"w": gradient}, state)
        return state.params["w"]

    # In a direction without a gradient Adam divides the rounding by `eps`, 1e-8. Of the largest changes, 0.06, a basis
    # that a rounding has chosen makes 0.01 another.
    bound = 1e-4 if kind in (zero_rows, equal_rows) else 1e-12
    torch.testing.assert_close(change(1e-15), change(0.0), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [low_rank, zero_rows, equal_rows, orthogonal], ids=lambda f: f.__name__)
def test_the_first_bases_of_soap(kind, dtype):
    """Of `L + t D` for a small `t`, with the roots of 0, 1, 2, ... in `D`: then no two eigenvalues are equal."""
    g, tx = kind(0, (9, 5)), zf.soap(0.01)
    state = zf.init(tx, {"w": torch.zeros(9, 5, dtype=dtype)})
    bases = zf.update(tx, {"w": g.to(dtype)}, state)[0].transforms["soap"]
    for side, x in (("rows", g), ("columns", g.mT)):
        want = torch.linalg.eigh(x @ x.mT + 1e-8 * torch.arange(len(x), dtype=F64).sqrt().diag()).eigenvectors.flip(-1)
        products = bases[f"{side}_basis"]["w"].double().mT @ want
        torch.testing.assert_close(products.abs(), torch.eye(len(x), dtype=F64), rtol=0, atol=1e-5)


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
