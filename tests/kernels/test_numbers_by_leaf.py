"""Numbers that differ by leaf in printed programs: norms, products of momenta; against torch's operations on a leaf."""

import itertools

import pytest
import torch

import zerofn as zf
from zerofn.core import executor  # inside: what takes norms otherwise
from zerofn.extend import like, optimizer
from zerofn.kernels import lists  # inside: which leaves are computed together
from zerofn.kernels.numbers import NotOnLists  # inside: what is no program
from zerofn.kernels.plans import Plans  # inside: programs by themselves
from zerofn.kernels.program import printer_for  # inside: as above

printed = pytest.mark.skipif(printer_for(torch.device("cpu")) is None, reason="there is no C compiler")
SIZES = (0, 1, 31, 33, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def both(x, y, n, lr):
    """A result of every element, one that is a number of the leaf everywhere, and the number's own."""
    safe = torch.where(n > 0.5, n, 2.0)
    return [x - lr * (y * (1.0 / 3.0 + safe).reciprocal()), (n * n).clamp(max=0.7), n.to(torch.float64) * lr + 1]


@printed
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_of_each_leaf_is_torchs_number_without_dimensions(dtype):
    def formula(columns, numbers, about):
        x, constant, number = both(*columns[:2], columns[3], numbers["lr"])
        return [x, columns[2] * 0.0 + constant, number], []

    plans = Plans(formula)
    generator = torch.Generator().manual_seed(0)
    for lr in (0.5, 0.3):
        xs, ys, outs = ([torch.randn(n, generator=generator).to(dtype) for n in SIZES] for _ in range(3))
        numbers = torch.rand(len(SIZES), generator=generator).to(dtype)
        expected = [both(x, y, n, lr) for x, y, n in zip(xs, ys, numbers, strict=True)]

        (x, constant, number), sums = plans.run([xs, ys, outs, numbers], {"lr": lr}, into=[0, 2, 3])
        assert sums is None and x is xs and constant is outs and len(plans.known) == 1
        for i, (of_x, of_constant, of_number) in enumerate(expected):
            assert torch.equal(xs[i], of_x) and torch.equal(number[i], of_number.to(dtype))
            assert torch.equal(outs[i], of_constant.expand(SIZES[i]))


@printed
@pytest.mark.parametrize(
    ("formula", "into"),
    [
        (lambda columns, *_: ([columns[1] * columns[0]], []), None),  # torch would not widen to float64
        (lambda columns, *_: ([columns[0] * 2.0], []), 1),  # no number of a leaf
    ],
)
def test_what_is_no_number_of_a_leaf_is_no_program(formula, into):
    try:
        Plans(formula).run([[torch.ones(4)], torch.ones(1, dtype=torch.float64)], {}, into=[into])
    except NotOnLists:
        return
    raise AssertionError("it ran")


def by_two_norms(p, g, slots, at):
    m = at.numbers["beta"] * slots["m"] + g

    def then(of_param, of_step):
        return p - at.lr * (of_param + 1.0) / (of_step + 2.0) * m, {"m": m}

    return (p, m), then


MADE = {
    "lamb": lambda: zf.lamb(0.1, weight_decay=0.1),
    "lamb, bounds": lambda: zf.lamb(0.1, ratio_bounds=(0.5, 2.0)),
    "lars": lambda: zf.lars(0.5, weight_decay=0.1, nesterov=True),
    "mars, sgd": lambda: zf.chain(zf.mars(), zf.sgd(0.1)),
    "nadam": lambda: zf.nadam(0.1, weight_decay=0.1),
    "nadam, decoupled": lambda: zf.nadam(0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "schedule_free_adamw": lambda: zf.schedule_free_adamw(0.1, weight_decay=0.1),
    "schedule_free(sgd)": lambda: zf.schedule_free(zf.sgd(0.1), weight_decay_at_y=0.1),
    "own": lambda: optimizer("own", 0.1, {"m": like}, by_two_norms, numbers={"beta": 0.9}, of_norms=True, in_fp32=True),
}


def trained(tx, dtype, attached=False):
    """Parameters and tensors of the state after three steps: one leaf has zeros, one none, one gets no gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (40, 50), "b": (77,), "none": (0,), "number": (), "zeros": (9,), "alone": (5,)}
    params = {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in shapes.items()}
    params["zeros"].zero_()
    state = zf.init(tx, params)
    for i in range(3):
        grads = {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in shapes.items()}
        if i == 1:
            grads["alone"] = None
        state, _ = zf.update(tx, grads, state)
    return dict(tensors({"params": dict(state.params), "own": dict(state.transforms)}))


def tensors(x, path=""):
    if isinstance(x, torch.Tensor):
        yield path, x
    elif hasattr(x, "items"):
        for key, value in x.items():
            yield from tensors(value, f"{path}/{key}")


@printed
@pytest.mark.filterwarnings("ignore:.*bf16.*", "ignore:.*bfloat16.*")
@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(MADE, (torch.float32, torch.bfloat16))), ids=str)
def test_large_leaves_have_the_bits_of_small_ones(name, dtype, monkeypatch):
    ran, run = [], Plans.run
    monkeypatch.setattr(Plans, "run", lambda *args, **given: ran.append(1) or run(*args, **given))
    small = trained(MADE[name](), dtype)
    assert not ran
    monkeypatch.setattr(lists, "LARGE", 1)
    large = trained(MADE[name](), dtype)
    assert ran and small.keys() == large.keys()
    assert not [path for path, x in small.items() if not torch.equal(x, large[path])]


@printed
def test_norms_of_leaves_are_those_of_float64(monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(2)) * 1e3
    g = torch.randn(100_003, generator=torch.Generator().manual_seed(3))
    tx = zf.lars(1.0, momentum=0.0, trust_coefficient=0.5)
    state, _ = zf.update(tx, {"x": g}, zf.init(tx, {"x": x.clone()}))
    expected = -0.5 * x.double().norm() / g.double().norm() * g.double()
    error = (state.params["x"].double() - x.double() - expected).norm() / expected.norm()
    assert error < 1e-6


@printed
@pytest.mark.parametrize("made", [lambda: zf.lamb(0.1), lambda: zf.lars(0.1), lambda: zf.nadam(0.1)])
def test_the_metric_of_a_norm_rides_on_the_pass_of_the_optimizer(made, monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 1)

    def another_pass(*args):
        raise AssertionError("gradients are read once more")

    for name in ("squared_norm_unrecorded", "leaf_squares"):
        monkeypatch.setattr(executor, name, another_pass)
    tx = zf.chain(zf.precision(), made())
    grads = {"x": torch.full((1000,), 1e15), "y": torch.full((3, 5), 2.0)}
    state = zf.init(tx, {path: torch.ones_like(g) for path, g in grads.items()})
    step = zf.make_step(lambda p: sum((x * grads[path]).sum() for path, x in p.items()), tx, donate=True)
    _, metrics = step(state)
    assert metrics["grad_norm"].item() == pytest.approx(1e15 * 1000**0.5, rel=1e-6)
