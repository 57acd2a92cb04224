"""DeepSpeed's learning-rate schedules as functions of the step, and the `scheduler` block that names one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .deepspeed_config import ConfigReader
from .deepspeed_values import Check, count, flag, from_zero, number, one_of, or_null


def _ramp(i: int, steps: int, kind: str) -> float:
    """The fraction of a warm-up that is done after `i` steps of the scheduler."""
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


@dataclass(frozen=True)
class WarmupLR:
    """DeepSpeed's warm-up, logarithmic or linear, then constant.

    Its scheduler is stepped after each update, so update `step` has the rate of scheduler step `step - 1`, and the
    first two updates use `start`.

    >>> schedule = WarmupLR(0.0, 1e-3, 10, "linear")
    >>> [schedule(step) for step in (0, 1, 6, 11, 12)]
    [0.0, 0.0, 0.0005, 0.001, 0.001]
    """

    start: float
    peak: float
    steps: int
    kind: str = "log"

    def __call__(self, step: int) -> float:
        i, steps = step - 1, max(2, self.steps)
        if i < 0:
            return self.start
        done = _ramp(i, steps, self.kind) if i < steps else self.after(i, steps)
        return self.start + (self.peak - self.start) * done

    def after(self, i: int, steps: int) -> float:
        """The fraction of the way from `start` to `peak` after the warm-up."""
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """DeepSpeed's warm-up and linear decay back to `start`; `total` counts both."""

    total: int = 0

    def after(self, i: int, steps: int) -> float:
        return max(0.0, (self.total - i) / max(1.0, self.total - steps))


@dataclass(frozen=True)
class WarmupCosineLR:
    """DeepSpeed's warm-up and half cosine, as fractions of `peak`. Its first update has rate 0."""

    peak: float
    total: int
    start: float = 0.0
    steps: int = 1000
    end: float = 1e-4
    kind: str = "log"

    def __call__(self, step: int) -> float:
        i, steps = step - 1, max(2, self.steps)
        if i < 0:
            return 0.0
        if i < steps:
            return self.peak * (self.start + (1 - self.start) * _ramp(i, steps, self.kind))
        done = min(1.0, (i - steps + 1) / max(1, self.total - steps))
        return self.peak * (self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class OneCycle:
    """DeepSpeed's cycle: up from `low` to `high`, down again, then a decay by `1 / (1 + rate * t)`."""

    low: float
    high: float
    up: int = 2000
    down: int | None = None
    stairs: int = 0
    down_stairs: int | None = None
    rate: float = 0.0
    decay_every: int = 0

    def __call__(self, step: int) -> float:
        down = self.up if self.down is None else self.down
        if step > self.up + down:
            late = (step - self.up - down) / self.decay_every if self.decay_every else 0.0
            return self.low / (1 + self.rate * late)
        rising = step <= self.up
        part = step / self.up if rising else (self.up + down - step) / down
        stairs = self.stairs if rising or self.down_stairs is None else self.down_stairs
        return self.low + (self.high - self.low) * (math.floor(part * stairs + 1e-9) / stairs if stairs else part)


@dataclass(frozen=True)
class LRRangeTest:
    """DeepSpeed's search for the largest rate: `low * (1 + rate * step / every)`, in stairs if asked for."""

    low: float = 1e-3
    every: int = 2000
    rate: float = 1.0
    staircase: bool = False

    def __call__(self, step: int) -> float:
        part = step / self.every
        return self.low * (1 + self.rate * (math.floor(part) if self.staircase else part))


# In the place of a default: the configuration must give a value; the optimizer's learning rate.
NEEDED, BASE = object(), object()

# Checks of values, by the name of an argument of the classes above.
VALUES: dict[str, Check] = {
    **dict.fromkeys(("start", "peak", "end", "low", "high", "rate"), number),
    **dict.fromkeys(("total", "up", "every"), count),
    **dict.fromkeys(("steps", "stairs", "decay_every"), from_zero),
    "down": or_null(count),
    "down_stairs": or_null(from_zero),
    "kind": one_of("log", "linear"),
    "staircase": flag,
    "cycle_momentum": flag,
}

_WARMUP = {
    "warmup_min_lr": ("start", 0.0),
    "warmup_max_lr": ("peak", BASE),
    "warmup_num_steps": ("steps", 1000),
    "warmup_type": ("kind", "log"),
}

# By DeepSpeed's name: the class, and for each of DeepSpeed's parameters the argument and its default.
SCHEDULES: dict[str, tuple[Any, dict[str, tuple[str, Any]]]] = {
    "WarmupLR": (WarmupLR, _WARMUP),
    "WarmupDecayLR": (WarmupDecayLR, _WARMUP | {"warmup_max_lr": ("peak", 1e-3), "total_num_steps": ("total", NEEDED)}),
    "WarmupCosineLR": (
        WarmupCosineLR,
        {
            "total_num_steps": ("total", NEEDED),
            "warmup_min_ratio": ("start", 0.0),
            "warmup_num_steps": ("steps", 1000),
            "cos_min_ratio": ("end", 1e-4),
            "warmup_type": ("kind", "log"),
        },
    ),
    "OneCycle": (
        OneCycle,
        {
            "cycle_min_lr": ("low", NEEDED),
            "cycle_max_lr": ("high", NEEDED),
            "cycle_first_step_size": ("up", 2000),
            "cycle_second_step_size": ("down", None),
            "cycle_first_stair_count": ("stairs", 0),
            "cycle_second_stair_count": ("down_stairs", None),
            "decay_lr_rate": ("rate", 0.0),
            "decay_step_size": ("decay_every", 0),
            "cycle_momentum": ("cycle_momentum", True),
        },
    ),
    "LRRangeTest": (
        LRRangeTest,
        {
            "lr_range_test_min_lr": ("low", 1e-3),
            "lr_range_test_step_size": ("every", 2000),
            "lr_range_test_step_rate": ("rate", 1.0),
            "lr_range_test_staircase": ("staircase", False),
        },
    ),
}


# Parameters of the schedulers that say nothing here, and the value that they must have.
START = {"last_batch_iteration": -1}
MOMENTUM = {"cycle_min_mom", "cycle_max_mom", "decay_mom_rate"}


def schedule_of(reader: ConfigReader, lr: float | None) -> Any:
    """The schedule of the `scheduler` block; `lr` itself without one, or if the block is refused.

    Args:
        reader: the configuration.
        lr: the rate of the `optimizer` block; `None` if there is no such block.
    """
    kind = reader.take("scheduler.type")
    given = reader.block("scheduler.params")
    if kind is None:
        for key in given:
            reader.refuse(f"scheduler.params.{key}", "needs a scheduler.type")
        return lr
    if not isinstance(kind, str) or kind not in SCHEDULES:
        near = get_close_matches(str(kind), SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; a torch scheduler takes zf.attach's optimizer"
        reader.refuse("scheduler.type", f"{kind!r} is none of {', '.join(SCHEDULES)}{hint}")
        return lr
    cls, known = SCHEDULES[kind]
    for key, only in START.items():
        if given.pop(key, only) != only:
            reader.refuse(f"scheduler.params.{key}", f"use {only}: zf.load and zf.load_deepspeed say where a run is")
    if cls is OneCycle:
        given = {key: x for key, x in given.items() if key not in MOMENTUM}
    for key in given.keys() - known.keys():
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        reader.refuse(f"scheduler.params.{key}", f"unknown; {hint}{kind} takes {', '.join(known)}")
    for key in given.keys() & known.keys():
        if reason := VALUES[known[key][0]](given[key]):
            reader.refuse(f"scheduler.params.{key}", reason)
    values = {name: given.get(key, default) for key, (name, default) in known.items()}
    if values.pop("cycle_momentum", False):
        reader.refuse("scheduler.params.cycle_momentum", 'betas are constant here; write "cycle_momentum": false')
    missing = [key for key, (name, _) in known.items() if values.get(name) is NEEDED]
    for key in missing:
        reader.refuse(f"scheduler.params.{key}", "missing; it has no default")
    if lr is None and (cls is WarmupCosineLR or BASE in values.values()):
        key = "optimizer.params.lr" if cls is WarmupCosineLR else "scheduler.params.warmup_max_lr"
        reader.refuse(key, f"missing; {kind} goes up to it")
        return lr
    arguments: dict[str, Any] = {name: lr if x is BASE else x for name, x in values.items()}
    if cls is WarmupCosineLR:
        arguments["peak"] = lr
    return lr if missing else cls(**arguments)
