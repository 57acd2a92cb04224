"""Every argument of every factory: what it may be is in one table, and whatever else is drawn is refused at once."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from public_names import NAMES

import zerofn as zf

F32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Number:
    """In [low, high), and finite in float32. `open`: without `low` itself."""

    low: float = 0.0
    high: float = math.inf
    open: bool = False

    def good(self) -> st.SearchStrategy:
        return st.floats(0.3, 0.7) if self.high < 2 else st.floats(max(self.low, 0.1), 1e6)

    def bad(self) -> st.SearchStrategy:
        below = [-1.0, -1, -1e-30, *([self.low] if self.open else []), self.low - 0.1]
        above = [] if math.isinf(self.high) else [self.high, 1.5, 10]
        return st.sampled_from([math.nan, math.inf, -math.inf, 1e39, 1 << 200, *below, *above, *NO_NUMBERS])


@dataclass(frozen=True)
class Count:
    """A positive int."""

    def good(self) -> st.SearchStrategy:
        return st.integers(3, 1 << 40)

    def bad(self) -> st.SearchStrategy:
        return st.sampled_from([0, -1, -7, 2.0, 1.5, math.nan, math.inf, 1 << 63, 1 << 200, *NO_NUMBERS])


@dataclass(frozen=True)
class Flag:
    """A bool."""

    def good(self) -> st.SearchStrategy:
        return st.booleans()

    def bad(self) -> st.SearchStrategy:
        return st.sampled_from([0, 1, 2, 1.0, math.nan, "yes", "no", "", None, [], (True,), torch.ones(1)])


@dataclass(frozen=True)
class Seed:
    """An int of 64 bits."""

    def good(self) -> st.SearchStrategy:
        return st.integers(-(1 << 63), (1 << 63) - 1)

    def bad(self) -> st.SearchStrategy:
        return st.sampled_from([1 << 64, -(1 << 63) - 1, 1.0, math.nan, *NO_NUMBERS])


@dataclass(frozen=True)
class Pair:
    """Two numbers in [0, 1), or as many as `count`."""

    count: int = 2

    def good(self) -> st.SearchStrategy:
        return st.tuples(*[Number(high=1).good()] * self.count)

    def bad(self) -> st.SearchStrategy:
        one, rest = Number(high=1), [Number(high=1).good()] * (self.count - 2)
        wrong = st.one_of(st.tuples(one.good(), one.bad(), *rest), st.tuples(one.bad(), one.good(), *rest))
        others = [0.9, "ab", None, (), (0.9,), (0.9,) * (self.count + 1), {0.9: 0.99}]
        return st.one_of(wrong, st.sampled_from(others))


NO_NUMBERS = [
    "3",
    "dynamik",
    "",
    None,
    True,
    False,
    1j,
    [],
    [1.0],
    (),
    {},
    Fraction(1, 2),
    torch.ones(2),
    np.bool_(True),
]
POSITIVE = Number(open=True)
LR = Number()
ADAM = {"lr": LR, "betas": Pair(), "eps": Number(), "weight_decay": Number()}

# Of each factory: what its arguments may be; `None` for what is no number, which other tests have.
TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "sgd": (
        zf.sgd,
        {
            "lr": LR,
            "momentum": Number(high=1),
            "dampening": Number(high=1.1),
            "weight_decay": Number(),
            "nesterov": Flag(),
        },
        {"lr": 0.1, "momentum": 0.5},
    ),
    "adam": (zf.adam, {**ADAM, "bias_correction": Flag()}, {}),
    "adamw": (zf.adamw, {**ADAM, "bias_correction": Flag()}, {}),
    "low_precision_adam": (
        zf.low_precision_adam,
        {**ADAM, "seed": Seed(), "state_dtype": None, "rounding": None},
        {},
    ),
    "muon": (
        zf.muon,
        {
            "lr": LR,
            "momentum": Number(high=1),
            "nesterov": Flag(),
            "steps": Count(),
            "weight_decay": Number(),
            "dtype": None,
            "ns_coefficients": None,
            "adjust_lr_fn": None,
        },
        {},
    ),
    "skip_nonfinite": (zf.skip_nonfinite, {"patience": Count()}, {}),
    "lion": (zf.lion, {"lr": LR, "betas": Pair(), "weight_decay": Number()}, {}),
    "rmsprop": (
        zf.rmsprop,
        {
            "lr": LR,
            "alpha": Number(high=1),
            "eps": Number(),
            "weight_decay": Number(),
            "momentum": Number(high=1),
            "centered": Flag(),
        },
        {},
    ),
    "lamb": (zf.lamb, {**ADAM, "bias_correction": Flag(), "ratio_bounds": None}, {}),
    "lars": (
        zf.lars,
        {
            "lr": LR,
            "momentum": Number(high=1),
            "weight_decay": Number(),
            "trust_coefficient": Number(),
            "nesterov": Flag(),
        },
        {"lr": 0.1},
    ),
    "adabelief": (zf.adabelief, ADAM, {}),
    "nadam": (zf.nadam, {**ADAM, "momentum_decay": Number(), "decoupled_weight_decay": Flag()}, {}),
    "radam": (zf.radam, {**ADAM, "decoupled_weight_decay": Flag()}, {}),
    "adan": (zf.adan, {**ADAM, "betas": Pair(3)}, {}),
    "adopt": (zf.adopt, {**ADAM, "use_clipping": Flag()}, {}),
    "adafactor": (
        zf.adafactor,
        {"lr": LR, "beta2_decay": None, "eps": None, "d": Number(1), "weight_decay": Number()},
        {},
    ),
    "sam": (zf.sam, {"rho": POSITIVE}, {}),
    "qk_clip": (
        zf.qk_clip,
        {"pairs": None, "heads": Count(), "threshold": POSITIVE, "alpha": Number(high=1.1)},
        {"pairs": [("q", "k")], "heads": 2},
    ),
    "every": (
        zf.every,
        {"updates": Count(), "outer": None, "mesh": None, "wire": None},
        {"outer": zf.sgd(0.1)},
    ),
    "scale_by_momo": (
        zf.scale_by_momo,
        {"beta": Number(high=1.0), "lower_bound": None, "max_learning_rate": POSITIVE},
        {},
    ),
    "scale_by_polyak": (
        zf.scale_by_polyak,
        {"f_min": None, "max_learning_rate": POSITIVE, "eps": Number()},
        {},
    ),
    "reduce_on_plateau": (
        zf.reduce_on_plateau,
        {
            "transform": None,
            "factor": Number(high=1),
            "patience": Count(),
            "rtol": Number(high=1.1),
            "atol": Number(),
            "cooldown": Number(),
            "accumulation_size": Count(),
            "min_scale": Number(),
        },
        {"transform": zf.sgd(0.1)},
    ),
    "schedule_free": (
        zf.schedule_free,
        {
            "transform": None,
            "momentum": Number(high=1),
            "r": Number(),
            "weight_lr_power": Number(),
            "weight_decay_at_y": Number(),
        },
        {"transform": zf.sgd(0.1)},
    ),
    "schedule_free_adamw": (
        zf.schedule_free_adamw,
        {**ADAM, "r": Number(), "weight_lr_power": Number()},
        {},
    ),
    "shampoo": (
        zf.shampoo,
        {
            "lr": LR,
            "momentum": Number(high=1),
            "weight_decay": Number(),
            "eps": POSITIVE,
            "update_freq": Count(),
            "max_precond_dim": Count(),
        },
        {},
    ),
    "soap": (zf.soap, {**ADAM, "precondition_frequency": Count(), "max_precond_dim": Count()}, {}),
    "adaptive_clip": (zf.adaptive_clip, {"clipping": POSITIVE, "eps": Number()}, {"clipping": 0.1}),
    "add_noise": (zf.add_noise, {"eta": Number(), "gamma": Number(), "seed": Seed()}, {"eta": 0.1}),
    "mars": (zf.mars, {"gamma": Number(), "beta1": Number(high=1)}, {}),
    "cautious": (zf.cautious, {"transform": None}, {}),
    "lookahead": (
        zf.lookahead,
        {"transform": None, "sync_period": Count(), "slow_step_size": Number(high=1.1, open=True)},
        {"transform": zf.sgd(0.1)},
    ),
    "apply_if": (zf.apply_if, {"transform": None, "fn": None}, {}),
    "scale_by_adam": (zf.scale_by_adam, {"betas": Pair(), "eps": Number()}, {}),
    "trace": (zf.trace, {"decay": Number(high=1), "nesterov": Flag()}, {"decay": 0.9}),
    "add_decayed_weights": (zf.add_decayed_weights, {"weight_decay": Number()}, {}),
    "scale_by_lr": (zf.scale_by_lr, {"lr": LR}, {}),
    "centralize": (zf.centralize, {}, {}),
    "clip_by_global_norm": (zf.clip_by_global_norm, {"max_norm": POSITIVE, "over": None}, {}),
    "clip_by_value": (zf.clip_by_value, {"max_value": POSITIVE}, {}),
    "ema": (zf.ema, {"decay": Number(high=1)}, {}),
    "accumulate": (zf.accumulate, {"every": Count(), "weighted": Flag()}, {"every": 4}),
    "scale_loss": (
        zf.scale_loss,
        {
            "scale": POSITIVE,
            "init_scale": Number(low=1),
            "growth_factor": Number(low=1),
            "backoff_factor": Number(high=1, open=True),
            "growth_interval": Count(),
            "min_scale": POSITIVE,
            "hysteresis": Count(),
        },
        {"init_scale": 1e7},
    ),
    "precision": (
        zf.precision,
        {
            **dict.fromkeys(("param_dtype", "store_dtype", "grad_dtype", "reduce_dtype", "output_dtype", "labels")),
            **dict.fromkeys(("buffer_dtype", "rounding")),
            "seed": Seed(),
        },
        {"store_dtype": torch.bfloat16, "rounding": "stochastic"},
    ),
    "quantize": (
        zf.quantize,
        {**dict.fromkeys(("transform", "bits", "code", "rounding", "slots")), "block": Count(), "seed": Seed()},
        {"transform": zf.adamw(0.1)},
    ),
    "offload": (zf.offload, dict.fromkeys(("transform", "device", "compute", "master_dtype")), {}),
    "masked": (zf.masked, {"transform": None, "mask": None}, {}),
    "partition": (zf.partition, {"transforms": None, "labels": None}, {}),
    "shard": (zf.shard, {"mesh": None, "wire": None, "reduce_wire": None}, {}),
    "reduce_scatter": (zf.reduce_scatter, {"mesh": None, "wire": None, "error_feedback": None}, {}),
    "all_reduce": (zf.all_reduce, {"mesh": None}, {}),
    "local": (zf.local, {"mesh": None}, {}),
    "watch": (zf.watch, {"fn": None, "then": None, "labels": None}, {}),
    "constant": (zf.schedules.constant, {"value": Number()}, {}),
    "linear": (
        zf.schedules.linear,
        {"start": Number(), "end": Number(), "steps": Count()},
        {"start": 1, "end": 0, "steps": 9},
    ),
    "warmup": (zf.schedules.warmup, {"peak": Number(), "steps": Count()}, {"peak": 1, "steps": 9}),
    "cosine": (
        zf.schedules.cosine,
        {"peak": Number(), "steps": Count(), "end": Number()},
        {"peak": 1, "steps": 9},
    ),
    "warmup_cosine": (
        zf.schedules.warmup_cosine,
        {"peak": Number(), "warmup_steps": Count(), "steps": Count(), "end": Number()},
        {"peak": 1, "warmup_steps": 1, "steps": 1 << 50},
    ),
    "layer_keep": (zf.schedules.layer_keep, {"theta": Number(high=1.1, open=True), "gamma": Number()}, {}),
    "step": (
        zf.schedules.step,
        {"value": Number(), "every": Count(), "gamma": Number()},
        {"value": 1, "every": 9},
    ),
}
# Others check the arguments of Adam by the same function as `adam`: one of them tells that they do.
LIKE_ADAM = {name for name, (_, kinds, _) in TABLE.items() if name != "adam" and kinds.items() >= ADAM.items()}
CELLS = [
    pytest.param(name, argument, marks=pytest.mark.slow if name in LIKE_ADAM and argument in ADAM else ())
    for name, (_, kinds, _) in TABLE.items()
    for argument, kind in kinds.items()
    if kind and not (name in LIKE_ADAM and argument in ADAM and argument != "eps")
]
# The static scale stands beside no other argument.
ALONE = {("scale_loss", "scale")}


def built(name: str, argument: str, value: Any) -> Any:
    factory, _, base = TABLE[name]
    return factory(**{**({} if (name, argument) in ALONE else base), argument: value})


def test_the_table_has_every_argument_of_every_factory():
    public = {n: f for n, f in NAMES.items() if hasattr(f, "__rebuild__") and n != "chain"}
    own = vars(zf.schedules).items()
    public |= {n: f for n, f in own if inspect.isfunction(f) and f.__module__ == zf.schedules.__name__ and n[0] != "_"}
    public.pop("linear_warmup")
    # What these may be given is another library's.
    assert public.keys() - {"guest", "from_torch"} == TABLE.keys()
    for name, (factory, kinds, _) in TABLE.items():
        assert list(inspect.signature(factory).parameters) == sorted(
            kinds, key=list(inspect.signature(factory).parameters).index
        ), name


@pytest.mark.parametrize(("name", "argument"), CELLS)
@given(data=st.data())
def test_what_is_wrong_is_refused_by_name(name, argument, data):
    value = data.draw(TABLE[name][1][argument].bad())
    with pytest.raises(ValueError) as caught:
        built(name, argument, value)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{name}(") and f"{argument}=" in lines[0]
    assert lines[1].startswith("  why:   ") and lines[2].startswith("  write: ")
    # What it says to write is right.
    eval(
        lines[2].removeprefix("  write: "), {name: lambda *args, **given: built(name, argument, *args, *given.values())}
    )


@pytest.mark.parametrize(("name", "argument"), CELLS)
@given(data=st.data())
def test_a_number_of_numpy_is_the_number_it_is(name, argument, data):
    kind = TABLE[name][1][argument]
    value = data.draw(kind.good())
    as_numpy: Any
    if isinstance(kind, Pair):
        as_numpy = tuple(np.float32(x) for x in value)
        value = tuple(float(x) for x in as_numpy)
    elif isinstance(kind, Flag):
        as_numpy = np.bool_(value)
    elif isinstance(kind, Number):
        as_numpy = data.draw(st.sampled_from([np.float16, np.float32, np.float64]))(value if value < 6e4 else 6e4)
        value = float(as_numpy)
    else:
        as_numpy = np.int64(value)
    one, other = built(name, argument, as_numpy), built(name, argument, value)
    assert one == other and repr(one) == repr(other)
    again = pickle.loads(pickle.dumps(one))
    assert again == other and repr(again) == repr(other)


@pytest.mark.parametrize("rate", [np.float32(0.25), np.float64(0.25), np.float16(0.25)])
def test_rates_of_numpy_train(rate):
    """Given, returned by a schedule, and set by hand, as a scheduler does that computes with numpy."""
    for lr in (rate, lambda step: rate):
        tx = zf.sgd(lr)
        state, metrics = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.ones(2)}))
        assert state.params["w"].tolist() == [0.75, 0.75] and float(metrics["lr"]) == 0.25
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    opt = zf.attach(model, zf.adamw(1.0, weight_decay=0.0))
    opt.param_groups[0]["lr"] = rate
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.25)


@pytest.mark.parametrize("scale", [F32.max, F32.tiny, 3e38])
def test_the_last_numbers_of_float32_are_numbers(scale):
    assert float(zf.scale_loss(scale).init({"w": torch.ones(1)})["scale"]) == np.float32(scale)
