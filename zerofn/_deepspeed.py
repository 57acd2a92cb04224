"""`from_deepspeed`: a DeepSpeed configuration as the pipeline that one would write by hand, and its schedules."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._accumulate import accumulate
from ._adam import adam, adamw
from ._clip import clip_by_global_norm
from ._compose import chain
from ._errors import bad_leaves, explain
from ._groups import world_group
from ._loss_scale import scale_loss
from ._low_precision import low_precision_adam
from ._offload import offload
from ._precision import precision
from ._sgd import sgd
from ._shard import all_reduce, reduce_scatter, shard
from ._types import Transform

DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

# DeepSpeed clips unless told otherwise since its pull request 8068.
CLIPPING = 1.0

# How DeepSpeed is to run rather than what it is to compute; here it has no counterpart.
TUNING = {
    "": {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer"},
    "zero_optimization": {"overlap_comm", "reduce_bucket_size", "contiguous_gradients", "allgather_bucket_size"}
    | {"allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size", "ignore_unused_parameters"}
    | {"stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"}
    | {"stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"},
    "zero_optimization.offload_optimizer": {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "ratio"}
    | {"pipeline_write"},
    "fp16": {"auto_cast"},
    "bf16": {"immediate_grad_update"},
}

INSTEAD = {
    "amp": "torch.autocast around the forward, with zf.scale_loss() for fp16",
    "activation_checkpointing": "torch.utils.checkpoint.checkpoint in the model",
    "zero_optimization.offload_param": "zf.shard(): parameters are gathered on use; they have no offload",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer: {'device': 'cpu'}",
    "progressive_layer_drop": "a schedule of your own handed to the model",
    "flops_profiler": "torch.utils.flop_counter.FlopCounterMode",
    "tensorboard": "opt.metrics, a dict of numbers after each step",
    "wandb": "opt.metrics, a dict of numbers after each step",
    "csv_monitor": "opt.metrics, a dict of numbers after each step",
    "prescale_gradients": "nothing: gradients are averaged without overflow",
    "gradient_predivide_factor": "nothing: gradients are averaged without overflow",
    "torch_autocast.lower_precision_safe_modules": "communication_data_type, for all parameters",
    "fp16.consecutive_hysteresis": "zf.scale_loss(hysteresis=...): a growth of the scale refills it",
    "compile": "torch.compile on the model",
    "checkpoint": "zf.save and zf.load",
    "data_efficiency": "a sampler of your own",
    "sparse_attention": "torch.nn.attention.flex_attention",
}


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Transform:
    """The pipeline that a DeepSpeed configuration describes; `print` shows what one would write by hand.

    | key | becomes |
    |---|---|
    | `gradient_accumulation_steps` | `accumulate(k)`; the three batch sizes are checked against each other |
    | `zero_optimization.stage` 0, 1, 2, 3 | `all_reduce`, `reduce_scatter` after or before `accumulate`, `shard` |
    | `offload_optimizer` | `offload(optimizer)` |
    | `fp16`, `bf16`, `communication_data_type`, `data_types.grad_accum_dtype` | `precision`, `scale_loss` |
    | `bf16_master_weights_and_grads`, `fp16_master_weights_and_grads` | `precision(store_dtype=...)` |
    | `bf16_optimizer_states` | `low_precision_adam` |
    | `gradient_clipping` | `clip_by_global_norm`; where the key is absent DeepSpeed clips at 1.0, and so does this |
    | `optimizer` | `adamw` (DeepSpeed's Adam too decouples its decay), `adam`, `sgd` |
    | `scheduler` | a function of the step |

    Low-precision states are rounded stochastically; DeepSpeed rounds to nearest, which loses small updates
    (`rounding="nearest"`). Without an `optimizer` block the pipeline has none: chain one of yours behind it.
    Keys about how DeepSpeed runs (buckets, overlap, printing) are named in one warning.

    Args:
        config: a dict, or the path of a JSON file.

    Raises:
        ValueError: unknown or unsupported keys, each with its path and what to use instead; batch sizes
            that contradict each other.

    >>> import zerofn as zf
    >>> schedule = WarmupLR(0.0, 1e-3, 10, "linear")
    >>> [schedule(step) for step in (0, 1, 6, 11, 12)]
    [0.0, 0.0, 0.0005, 0.001, 0.001]
    """
    reader = _Reader(config)
    every = _batches(reader)
    stage = reader.take("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        reader.refuse("zero_optimization.stage", f"{stage!r} is none of 0, 1, 2, 3")
    dtypes, scale, low = _precision(reader)
    clipping = reader.take("gradient_clipping", CLIPPING)
    optimizer = _optimizer(reader, low)
    reader.close()

    cast = precision(**dtypes) if dtypes else None
    held = accumulate(every) if every > 1 else None
    orders = {
        0: (cast, scale, held, all_reduce()),
        1: (cast, scale, held, reduce_scatter()),
        2: (reduce_scatter(), cast, scale, held),
        3: (shard(), cast, scale, held),
    }
    clip = clip_by_global_norm(clipping) if clipping else None
    return chain(*(t for t in (*orders[stage], clip, optimizer) if t is not None))


class _Reader:
    """A configuration from which keys are taken one by one, so that what is left over is known."""

    def __init__(self, config: Any):
        if isinstance(config, str | os.PathLike):
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        if not isinstance(config, Mapping):
            raise TypeError(f"from_deepspeed({type(config).__name__}): give a dict, or the path of a JSON file.")
        self.left: dict[str, Any] = dict(_leaves(config, ""))
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []

    def take(self, path: str, default: Any = None) -> Any:
        """The entry at a dotted path, which is then dealt with."""
        value = self.left.pop(path, default)
        if value == "auto":
            self.refuse(path, "'auto' is filled in by the Hugging Face Trainer; write the number")
            return default
        return value

    def block(self, path: str) -> dict[str, Any]:
        """All entries below a path."""
        found = {k: self.take(k) for k in list(self.left) if k.startswith(path + ".")}
        return {k[len(path) + 1 :]: v for k, v in found.items()}

    def refuse(self, path: str, reason: str) -> None:
        """Note a bad key; `close` raises."""
        self.bad.append((path, reason))

    def close(self) -> None:
        """Raise for everything bad or left over; warn of what has no effect."""
        for path, value in self.left.items():
            head, _, name = path.rpartition(".")
            instead = next((INSTEAD[p] for p in (path, *_parents(path)) if p in INSTEAD), None)
            if name in TUNING.get(head, ()):
                self.idle.append(path)
            elif instead is None:
                self.refuse(path, "unknown")
            elif (
                value is not False
                and value not in (None, "none")
                and (path, value) != ("gradient_predivide_factor", 1.0)
            ):
                self.refuse(path, f"not supported; use {instead}")
        if self.bad:
            raise ValueError(
                bad_leaves("from_deepspeed: keys that have no pipeline", self.bad, "the configuration without them")
            )
        if self.idle:
            warnings.warn(
                f"from_deepspeed: {', '.join(self.idle)} say how DeepSpeed runs and have no effect here.", stacklevel=3
            )


def _leaves(block: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in block.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + str(key), value))
    return found


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]


def _batches(reader: _Reader) -> int:
    """The micro-batches of a window, from any two of the three batch sizes."""
    total, micro, every = (
        reader.take(k) for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    for name, value in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro)):
        if value is not None and (not isinstance(value, int) or value < 1):
            reader.refuse(name, f"{value!r} is no positive int")
            return 1
    if total is None or (micro is None and every is None):
        return 1 if every is None else every
    world = world_group().size
    if micro is None:
        micro = total // (every * world)
    if every is None:
        every = total // (micro * world)
    if total != micro * every * world:
        raise ValueError(
            explain(
                f"train_batch_size={total} is not {micro} * {every} * {world}",
                "it is train_micro_batch_size_per_gpu * gradient_accumulation_steps * the number of ranks",
                f"train_batch_size={max(micro, 1) * max(every, 1) * world}, or leave one of the three out",
            )
        )
    return every


def _precision(reader: _Reader) -> tuple[dict[str, torch.dtype], Transform | None, tuple[torch.dtype, bool] | None]:
    """Arguments of `precision`; the loss scale; stored dtype and whether states have it too, where that is low."""
    dtypes: dict[str, torch.dtype] = {}
    scale, low = None, None
    half, brain = reader.take("fp16.enabled", False), reader.take("bf16.enabled", False)
    if half and brain:
        reader.refuse("bf16.enabled", "fp16 is enabled too; choose one")
    settings = {k: reader.take(f"fp16.{k}", v) for k, v in SCALE.items()}
    masters = {
        kind: any([reader.take(f"{kind}.{kind}_master_weights_and_{g}", False) for g in ("grads", "gradients")])
        for kind in ("fp16", "bf16")
    }
    states = reader.take("bf16.bf16_optimizer_states", False)
    check = reader.take("bf16.check_grad_overflow", False)
    if half or brain:
        compute = torch.float16 if half else torch.bfloat16
        master = masters["fp16" if half else "bf16"]
        dtypes = {"param_dtype": compute, "store_dtype": compute if master else torch.float32}
        # Squared gradients lie below what fp16 can hold, so states of an fp16 master stay in fp32.
        low = (compute, bool(states)) if master else None
    if states and not (brain and masters["bf16"]):
        reader.refuse("bf16.bf16_optimizer_states", "needs bf16.enabled and bf16.bf16_master_weights_and_grads")
    if half:
        scale = _scale(settings)
    elif brain and check:
        scale = scale_loss(1.0)
    if reader.take("torch_autocast.enabled", False):
        dtype = _dtype(reader, "torch_autocast.dtype", "bfloat16")
        # What torch.amp.GradScaler does by default, which is what DeepSpeed uses there.
        scale = scale or (scale_loss("dynamic") if dtype is torch.float16 else None)
        warnings.warn(
            f"from_deepspeed: torch_autocast is yours to write: torch.autocast(device, {dtype}) around the model.",
            stacklevel=3,
        )
    else:
        reader.take("torch_autocast.dtype")
    for key, name in (("communication_data_type", "reduce_dtype"), ("data_types.grad_accum_dtype", "grad_dtype")):
        if (dtype := _dtype(reader, key, None)) is not None:
            dtypes[name] = dtype
    return dtypes, scale, low


SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


def _scale(settings: dict[str, Any]) -> Transform:
    if settings["loss_scale"]:
        return scale_loss(float(settings["loss_scale"]))
    return scale_loss(
        "dynamic",
        init_scale=2.0 ** settings["initial_scale_power"],
        growth_interval=settings["loss_scale_window"],
        min_scale=float(settings["min_loss_scale"]),
        hysteresis=settings["hysteresis"],
    )


def _dtype(reader: _Reader, path: str, default: str | None) -> torch.dtype | None:
    name = reader.take(path, default)
    if name is not None and str(name).removeprefix("torch.") not in DTYPES:
        reader.refuse(path, f"{name!r} is none of {', '.join(DTYPES)}")
        return None
    return None if name is None else DTYPES[str(name).removeprefix("torch.")]


def _optimizer(reader: _Reader, low: tuple[torch.dtype, bool] | None) -> Transform | None:
    kind = reader.take("optimizer.type")
    given = reader.block("optimizer.params")
    device = reader.take("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        reader.refuse("zero_optimization.offload_optimizer.device", f"{device!r}; use 'cpu'")
    if kind is None:
        if reader.left.get("scheduler.type") is not None:
            reader.refuse("scheduler", "needs an optimizer block; or give your optimizer lr=a function of the step")
        return None
    name = str(kind).lower()
    known = {"adam": ADAM, "adamw": ADAM, "sgd": SGD}.get(name)
    if known is None:
        reader.refuse("optimizer.type", f"{kind!r}; use Adam, AdamW or SGD, or leave the block out and chain your own")
        return None
    for key, only in FIXED.items():
        if given.get(key, only) is not only:
            reader.refuse(f"optimizer.params.{key}", f"{given[key]!r} is not supported; use {only}")
    for key in given.keys() - known.keys() - IDLE - FIXED.keys():
        reader.refuse(f"optimizer.params.{key}", f"unknown; {kind} takes {', '.join(known)}")
    values = {**known, **{k: v for k, v in given.items() if k in known}}
    values["lr"] = _schedule(reader, values["lr"])
    if reader.bad:
        return None
    if name == "sgd":
        if low is not None:
            reader.refuse("optimizer.type", "SGD on 16-bit masters loses small updates; use AdamW")
            return None
        built = sgd(**values)
    else:
        decoupled = values.pop("adam_w_mode") or name == "adamw"
        values["betas"] = tuple(values["betas"])
        if low is None:
            built = (adamw if decoupled else adam)(**values)
        elif decoupled or not values["weight_decay"]:
            built = low_precision_adam(**values, state_dtype=low[0] if low[1] else torch.float32)
        else:
            reader.refuse("optimizer.params.adam_w_mode", "low-precision states need decoupled weight decay: true")
            return None
    return offload(built) if device == "cpu" else built


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True}
SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
# Which of its implementations DeepSpeed is to take.
IDLE = {"torch_adam", "fused", "foreach"}
FIXED = {"amsgrad": False, "bias_correction": True}


def _schedule(reader: _Reader, lr: float) -> Any:
    kind = reader.take("scheduler.type")
    given = reader.block("scheduler.params")
    if kind is None:
        return lr
    if kind not in SCHEDULES:
        reader.refuse(
            "scheduler.type",
            f"{kind!r} is none of {', '.join(SCHEDULES)}; a torch scheduler takes zf.attach's optimizer",
        )
        return lr
    cls, defaults, renamed = SCHEDULES[kind]
    for key in given.keys() - defaults.keys():
        reader.refuse(f"scheduler.params.{key}", f"unknown; {kind} takes {', '.join(defaults)}")
    values = {**defaults, **{k: v for k, v in given.items() if k in defaults}}
    if values.pop("cycle_momentum", False):
        reader.refuse("scheduler.params.cycle_momentum", 'betas are constant here; write "cycle_momentum": false')
    values = {k: lr if v is BASE else v for k, v in values.items()}
    missing = [k for k, v in values.items() if v is NEEDED]
    for key in missing:
        reader.refuse(f"scheduler.params.{key}", "missing; it has no default")
    arguments = {renamed.get(k, k): v for k, v in values.items()}
    return lr if missing else cls(**arguments, **({"peak": lr} if cls is WarmupCosineLR else {}))


def _ramp(i: int, steps: int, kind: str) -> float:
    """How much of a warm-up is done after `i` steps of the scheduler."""
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


@dataclass(frozen=True)
class WarmupLR:
    """DeepSpeed's warm-up, logarithmic or linear, then constant.

    Its scheduler is stepped after each update, so update `step` uses number `step - 1` and the first two
    updates use `start`.
    """

    start: float
    peak: float
    steps: int
    kind: str = "log"

    def __call__(self, step: int) -> float:
        i, steps = step - 1, max(2, self.steps)
        if i < 0:
            return self.start
        return self.start + (self.peak - self.start) * (
            _ramp(i, steps, self.kind) if i < steps else self.after(i, steps)
        )

    def after(self, i: int, steps: int) -> float:
        """The part of the way from `start` to `peak` after the warm-up."""
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


NEEDED = object()
BASE = object()

_WARMUP = {"warmup_min_lr": "start", "warmup_max_lr": "peak", "warmup_num_steps": "steps", "warmup_type": "kind"}

# By DeepSpeed's name: the class, DeepSpeed's parameters with their defaults, and what they are called here.
SCHEDULES: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "WarmupLR": (
        WarmupLR,
        {"warmup_min_lr": 0.0, "warmup_max_lr": BASE, "warmup_num_steps": 1000, "warmup_type": "log"},
        _WARMUP,
    ),
    "WarmupDecayLR": (
        WarmupDecayLR,
        {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 1e-3,
            "warmup_num_steps": 1000,
            "warmup_type": "log",
            "total_num_steps": NEEDED,
        },
        {**_WARMUP, "total_num_steps": "total"},
    ),
    "WarmupCosineLR": (
        WarmupCosineLR,
        {
            "total_num_steps": NEEDED,
            "warmup_min_ratio": 0.0,
            "warmup_num_steps": 1000,
            "cos_min_ratio": 1e-4,
            "warmup_type": "log",
        },
        {
            "total_num_steps": "total",
            "warmup_min_ratio": "start",
            "warmup_num_steps": "steps",
            "cos_min_ratio": "end",
            "warmup_type": "kind",
        },
    ),
    "OneCycle": (
        OneCycle,
        {
            "cycle_min_lr": NEEDED,
            "cycle_max_lr": NEEDED,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_lr_rate": 0.0,
            "decay_step_size": 0,
            "cycle_momentum": True,
        },
        {
            "cycle_min_lr": "low",
            "cycle_max_lr": "high",
            "cycle_first_step_size": "up",
            "cycle_second_step_size": "down",
            "cycle_first_stair_count": "stairs",
            "cycle_second_stair_count": "down_stairs",
            "decay_lr_rate": "rate",
            "decay_step_size": "decay_every",
        },
    ),
    "LRRangeTest": (
        LRRangeTest,
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
        {
            "lr_range_test_min_lr": "low",
            "lr_range_test_step_size": "every",
            "lr_range_test_step_rate": "rate",
            "lr_range_test_staircase": "staircase",
        },
    ),
}
