"""`precision(rounding="stochastic")` in front of any optimizer: what is stored in 16 bits is rounded at random.

The bits are the same on any ranks, in any kernel, after a resume, and inside of torch.func.
"""

import functools

import pytest
import torch
from covering import covering, few_and_all
from stages import STAGES, around
from time_limits import limit

import zerofn as zf
from zerofn.kernels import lists  # inside: from which size on leaves are computed in C

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 3
SHAPES = {"w": (6, 10), "bias": (7,), "gain": (), "empty": (0, 4), "one": (1,)}


@zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
def momentum(grad, param, state, *, lr):
    state = 0.9 * state + grad
    return param - lr * state, state


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}, needs="element")
def normalised(grad, param, state):
    m, v = state["m"] + 0.25 * (grad - state["m"]), state["v"] + 0.25 * (grad * grad - state["v"])
    return m / (v.sqrt() + 0.1), {"m": m, "v": v}


@zf.leafwise(needs="leaf", init=torch.zeros_like, optimizer=True)
def by_rows(grad, param, state, *, lr):
    state = 0.9 * state + grad - (grad.mean() if grad.numel() else 0.0)
    return param - lr * state, state


def matrices(of):
    return zf.partition({"matrix": of, "rest": zf.sgd(0.01)}, lambda path: "matrix" if path == "w" else "rest")


# Those without second moments, which fp16 cannot hold.
SIMPLE = {
    "sgd": lambda: zf.sgd(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, dampening": lambda: zf.sgd(0.01, momentum=0.9, dampening=0.5),
    "rmsprop": lambda: zf.rmsprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: zf.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: zf.adafactor(0.01),
    "trace": lambda: zf.chain(zf.trace(0.9, nesterov=True), zf.scale_by_lr(0.01)),
    "muon": lambda: matrices(zf.muon(0.01)),
    "lookahead": lambda: zf.lookahead(zf.sgd(0.01), 2),
    "apply_if": lambda: zf.apply_if(zf.sgd(0.01, momentum=0.5), lambda step: step != 1),
    "user's optimizer": lambda: momentum(lr=0.01),
    "user's, of leaves": lambda: by_rows(lr=0.01),
    "partition": lambda: matrices(zf.chain(zf.trace(0.5), zf.lion(0.01))),
    "on the host": lambda: zf.offload(zf.sgd(0.01, momentum=0.9), compute="host"),
}
ALL = SIMPLE | {
    "adam": lambda: zf.adam(1e-3, weight_decay=0.1),
    "adamw": lambda: zf.adamw(1e-3, weight_decay=0.1),
    "adamw, schedule": lambda: zf.adamw(zf.schedules.warmup(1e-3, 4)),
    "nadam": lambda: zf.nadam(1e-3),
    "radam": lambda: zf.radam(1e-3),
    "adan": lambda: zf.adan(1e-3),
    "adopt": lambda: zf.adopt(1e-3),
    "adabelief": lambda: zf.adabelief(1e-3),
    "soap": lambda: matrices(zf.soap(1e-3)),
    "shampoo": lambda: matrices(zf.shampoo(0.01, momentum=0.9)),
    "scale_by_adam": lambda: zf.chain(zf.cautious(zf.scale_by_adam()), zf.scale_by_lr(0.01)),
    "offload": lambda: zf.offload(zf.adamw(1e-3)),
    "quantize": lambda: zf.quantize(zf.adamw(1e-3)),
    "user's direction": lambda: zf.chain(normalised(), zf.scale_by_lr(0.01)),
    "ema": lambda: zf.chain(zf.adamw(1e-3), zf.ema(0.9)),
}
# Norms of whole leaves are added up in another order on ranks, and stacks of matrices multiplied in another.
NORMS = {"lamb": lambda: zf.lamb(1e-3), "lars": lambda: zf.lars(0.01), "mars": lambda: zf.chain(zf.mars(), zf.sgd(0.1))}


def makers(dtype):
    return SIMPLE if dtype is F16 else ALL


def pipeline(made, dtype=BF16, stage="one process", rounding="stochastic", seed=5):
    how = {"rounding": rounding} | ({"seed": seed} if rounding == "stochastic" else {})
    cast = zf.precision(store_dtype=dtype, grad_dtype=F32, reduce_dtype=F32, **how)
    held = [zf.accumulate(1)] if stage == "ZeRO-1" else []
    return zf.chain(*around(stage, cast, *held), *made.members)


def params(shapes=SHAPES):
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def slopes(step, shapes=SHAPES):
    """Eighths: their mean over ranks is exact."""
    g = torch.Generator().manual_seed(step)
    return {name: torch.randint(-8, 9, shape, generator=g) / 8 for name, shape in shapes.items()}


def loss_of(given, slope):
    return sum([(given[name].float() * x).sum() for name, x in slope.items()])


def steps(tx, state, of=range(STEPS), shapes=SHAPES):
    for i in of:
        state, _ = zf.update(tx, slopes(i, shapes), state)
    return state


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, x in params().items():
            self.register_parameter(name, torch.nn.Parameter(x))

    def forward(self, slope):
        return loss_of(dict(self.named_parameters()), slope)


def on_ranks(rows):
    """Parameters of each pipeline in its stage, by both routes."""
    found = {}
    for dtype, name, stage in rows:
        tx = pipeline(makers(dtype)[name](), dtype, stage)
        state, step = zf.init(tx, params()), zf.make_step(loss_of, tx)
        opt = zf.attach(model := Model(), tx)
        for i in range(STEPS):
            state, _ = step(state, slopes(i))
            model(slopes(i)).backward()
            opt.step()
            opt.zero_grad()
        opt.detach()
        found[dtype, name, stage, "pure"] = {k: x.clone() for k, x in zf.full_params(tx, state).items()}
        found[dtype, name, stage, "eager"] = {k: x.detach().clone() for k, x in model.named_parameters()}
    return found


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def bits(state):
    """Every tensor of a state."""
    return {e.key: e.value for e in zf.extend.entries(state)}


EACH = [(dtype, name, stage) for dtype in (BF16, F16) for name in makers(dtype) for stage in STAGES]


# Each dtype at each stage, and each optimizer at one; slowly each two of those three.
@pytest.mark.parametrize("rows", few_and_all(covering(EACH, key=lambda row: (row[1], row[::2])), covering(EACH, 2)))
@pytest.mark.parametrize("size", [1, 2])
def test_stages_ranks_and_routes_change_no_bit(size, rows):
    rows = [row for row in rows if size > 1 or row[2] == "ZeRO-3"]
    found = zf.launch(on_ranks, size, rows, timeout=limit(200))
    for dtype, name, stage in rows:
        tx = pipeline(makers(dtype)[name](), dtype)
        want = zf.full_params(tx, steps(tx, zf.init(tx, params())))
        assert {x.dtype for x in want.values()} == {dtype}
        for rank in found:
            for route in ("pure", "eager"):
                assert equal(rank[dtype, name, stage, route], want), (dtype, name, stage, route)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.filterwarnings("ignore:.*stored in bf16, and so are the moments")
def test_other_bits_than_to_nearest_and_of_another_seed(dtype):
    for name, make in (makers(dtype) | (NORMS if dtype is BF16 else {})).items():
        found = []
        for how in ({"rounding": "nearest"}, {"seed": 1}, {"seed": 2}):
            tx = pipeline(make(), dtype, **how)
            found.append(steps(tx, zf.init(tx, params())).params)
        nearest, one, other = found
        assert not equal(one, nearest) and not equal(one, other), name


def _nothing():
    return pytest.MonkeyPatch.context()


# ---- kernels ----


# The bits of a product of matrices differ between one matrix and a stack.
BITS = [name for name in ALL if name != "muon"]


@pytest.mark.parametrize("name", [*BITS, *NORMS])
def test_c_and_torchs_operations_have_the_same_bits(name, monkeypatch):
    """Leaves that are small together are computed by torch's operations, leaf by leaf."""
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(lists, "LARGE", least)
        tx = pipeline((ALL | NORMS)[name]())
        found.append(bits(steps(tx, zf.init(tx, params()))))
    assert equal(*found)


def test_fp16_has_the_same_bits_in_c(monkeypatch):
    for make in (SIMPLE["sgd"], SIMPLE["rmsprop"], SIMPLE["user's optimizer"]):
        found = []
        for least in (0, 1 << 40):
            monkeypatch.setattr(lists, "LARGE", least)
            tx = pipeline(make(), F16)
            found.append(bits(steps(tx, zf.init(tx, params()))))
        assert equal(*found)


# ---- a run that goes on ----


@pytest.mark.parametrize("name", ["sgd", "adamw", "trace", "user's direction", "muon", "quantize", "offload"])
def test_a_resumed_run_goes_on_bit_for_bit(name, tmp_path):
    tx = pipeline(ALL[name]())
    state = steps(tx, zf.init(tx, params()), range(2))
    zf.save(tmp_path, state)
    again = zf.load(tmp_path, like=zf.init(tx, params()))
    assert equal(bits(steps(tx, state, range(2, 5))), bits(steps(tx, again, range(2, 5))))


def test_the_state_has_the_format_of_the_draws_and_goes_on_in_it():
    tx = pipeline(zf.sgd(0.01, momentum=0.9))
    state = zf.init(tx, params())
    assert int(state.transforms["sgd"]["rounding_format"]) == 2
    first = zf.extend.rebuild(state, lambda e: torch.ones_like(e.value) if e.slot == "rounding_format" else e.value)
    after = steps(tx, first)
    assert int(after.transforms["sgd"]["rounding_format"]) == 1
    assert not equal(after.params, steps(tx, state).params)
    unknown = zf.extend.rebuild(state, lambda e: e.value + 7 if e.slot == "rounding_format" else e.value)
    with pytest.raises(ValueError, match="a state of sgd with rounding_format 9"):
        steps(tx, unknown)


# ---- what it is for ----


def test_the_mean_is_right():
    """An update of an eighth of the spacing is never made to nearest, and on average made at random."""
    n, spacing = 1 << 14, 2.0**-7
    for make in (lambda: zf.sgd(1.0), lambda: momentum(lr=1.0), lambda: zf.chain(zf.trace(0.5), zf.scale_by_lr(1.0))):
        changes = []
        for seed in range(8):
            tx = pipeline(make(), seed=seed)
            state, _ = zf.update(tx, {"w": torch.full((n,), -spacing / 8)}, zf.init(tx, {"w": torch.ones(n)}))
            changes.append(state.params["w"].float() - 1)
        together = torch.cat(changes)
        assert set(together.tolist()) == {0.0, spacing}
        # Three times the deviation of the mean of so many draws with probability 1/8.
        deviation = spacing * (1 / 8 * 7 / 8 / len(together)) ** 0.5
        assert abs(together.double().mean() - spacing / 8) < 3 * deviation


def test_a_slot_is_right_on_average():
    """The momentum of these gradients is 1 + 2**-10, between two bf16 numbers."""
    tx = pipeline(zf.sgd(0.0, momentum=0.5))
    state = zf.init(tx, {"w": torch.zeros(1 << 16)})
    state, _ = zf.update(tx, {"w": torch.full((1 << 16,), 1.0 + 2.0**-10)}, state)
    found = state.transforms["sgd"]["momentum"]["w"].float()
    assert set(found.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(found.double().mean() - 1 - 2.0**-10) < 3 * 2.0**-7 * (7 / 64 / found.numel()) ** 0.5


def test_a_second_moment_falls():
    """By a thousandth in each update, which is less than half a unit of bf16."""
    shapes = {"w": (1 << 12,)}
    found = {}
    for rounding in ("nearest", "stochastic"):
        with pytest.warns(UserWarning, match="never falls") if rounding == "nearest" else _nothing():
            state = zf.init(tx := pipeline(zf.adamw(0.0, betas=(0.9, 0.999)), rounding=rounding), params(shapes))
        state, _ = zf.update(tx, {"w": torch.full((1 << 12,), 1.0)}, state)
        first = state.transforms["adamw"]["exp_avg_sq"]["w"].double().mean()
        for _ in range(200):
            state, _ = zf.update(tx, {"w": torch.zeros(1 << 12)}, state)
        found[rounding] = (state.transforms["adamw"]["exp_avg_sq"]["w"].double().mean() / first).item()
    assert found["nearest"] == 1.0
    assert abs(found["stochastic"] - 0.999**200) < 0.005


def test_adam_draws_what_low_precision_adam_draws():
    """Both store the same numbers but where their fp32 arithmetic differs in the last place, a draw in thousands."""
    shapes, how = {"w": (300, 50)}, {"betas": (0.99, 0.999), "eps": 1e-8}
    given = {"w": torch.randn(300, 50, generator=torch.Generator().manual_seed(3))}
    ours = pipeline(zf.adamw(0.01, weight_decay=0.0, **how), seed=4)
    theirs = zf.chain(
        zf.precision(store_dtype=BF16, grad_dtype=F32), zf.low_precision_adam(0.01, weight_decay=0.0, seed=4, **how)
    )
    a, b = (zf.update(tx, given, zf.init(tx, params(shapes)))[0] for tx in (ours, theirs))
    pairs = {
        name: (a.transforms["adamw"][name]["w"], b.transforms["low_precision_adam"][name]["w"])
        for name in ("exp_avg", "exp_avg_sq")
    } | {"p": (a.params["w"], b.params["w"])}
    for name, (x, y) in pairs.items():
        same = (x == y).float().mean().item()
        assert same > 0.995, (name, same)


# ---- derivatives and batches ----


def test_a_derivative_passes_straight_through():
    """The change of a parameter by its gradient is minus the rate, whatever the rounding does."""
    tx = pipeline(zf.sgd(0.5, momentum=0.5))
    state = zf.init(tx, params())

    def after(g):
        new, _ = zf.update(tx, {**slopes(0), "w": g}, state)
        return new.params["w"].float().sum(), new

    by, new = torch.func.grad(after, has_aux=True)(slopes(0)["w"])
    assert torch.equal(by, torch.full((6, 10), -0.5))
    assert equal(new.params, steps(tx, state, [0]).params)


def test_members_of_a_batch_have_the_bits_of_each_alone():
    for make in (ALL["adamw"], ALL["sgd"], ALL["user's direction"], ALL["trace"]):
        tx = pipeline(make())
        state = zf.init(tx, params())
        given = [slopes(i) for i in range(3)]
        together = {name: torch.stack([g[name] for g in given]) for name in SHAPES}
        new = torch.func.vmap(lambda g, tx=tx, state=state: zf.update(tx, g, state)[0].params)(together)
        for i, g in enumerate(given):
            assert equal({k: x[i] for k, x in new.items()}, zf.update(tx, g, state)[0].params)


# ---- refusals ----

ROUNDED = functools.partial(zf.precision, store_dtype=BF16, rounding="stochastic")


def refused(*made):
    return lambda: zf.init(zf.chain(ROUNDED(), *made), params())


WRONG = {
    "kahan": (lambda: zf.precision(rounding="kahan"), 'low_precision_adam(lr, rounding="kahan")'),
    "unknown": (lambda: zf.precision(rounding="up"), "rounding is 'nearest' or 'stochastic'"),
    "a seed alone": (lambda: zf.precision(store_dtype=BF16, seed=1), "rounding to nearest draws nothing"),
    "no seed": (lambda: ROUNDED(seed=1.5), "a seed is an int of 64 bits"),
    "fp32": (lambda: zf.precision(store_dtype=F32, rounding="stochastic"), "nothing to round at random"),
    "masters": (lambda: zf.precision(store_dtype="bf16+8", rounding="stochastic"), "nothing to round at random"),
    "fp32 as it is": (
        lambda: zf.init(zf.chain(zf.precision(rounding="stochastic"), zf.sgd(0.1)), params()),
        "bias: stored in torch.float32",
    ),
    "low_precision_adam": (refused(zf.low_precision_adam(0.1)), "low_precision_adam rounds its results itself"),
    "cautious": (refused(zf.cautious(zf.sgd(0.1))), "cautious rounds its results itself"),
    "schedule_free": (refused(zf.schedule_free(zf.sgd(0.1))), "schedule_free rounds its results itself"),
    "host masters": (
        refused(zf.offload(zf.sgd(0.1), compute="host", master_dtype=F32)),
        "copies of masters that lose nothing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_have_no_effect_is_refused(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
    assert "write:" in str(error.value)


def test_leaves_in_fp32_beside_those_in_16_bits_stay():
    how = {"store_dtype": {"wide": F32, "narrow": BF16}, "labels": lambda path: "wide" if path == "w" else "narrow"}
    rounded, nearest = (
        zf.chain(zf.precision(grad_dtype=F32, rounding=r, **how), zf.sgd(0.01, momentum=0.9))
        for r in ("stochastic", "nearest")
    )
    a, b = (steps(tx, zf.init(tx, params())).params for tx in (rounded, nearest))
    assert torch.equal(a["w"], b["w"]) and a["w"].dtype is F32
    assert not torch.equal(a["bias"], b["bias"])
