"""`from_deepspeed`: a DeepSpeed configuration as a chain."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

import torch

from zerofn import (
    accumulate,
    adam,
    adamw,
    all_reduce,
    chain,
    clip_by_global_norm,
    lamb,
    low_precision_adam,
    offload,
    precision,
    reduce_scatter,
    scale_loss,
    sgd,
    shard,
)
from zerofn.collectives import world_group
from zerofn.extend import TINY, Transform, bad_leaves, explain, kind_of, misfit, users_line

# ----------------------------------------------------------------------------------------------------------------------
# Keys of a DeepSpeed configuration that become no transform: which to ignore, and what to write for the others.


# Settings of stage 3 only.
STAGE_3 = (
    *("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"),
    *("gather_16bit_weights_on_model_save", "module_granularity_threshold", "model_persistence_threshold"),
    "use_all_reduce_for_fetch_params",
)

# By block, keys that say how DeepSpeed runs, not what it computes. They have no effect here.
TUNING = {
    "": {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer", "prescale_gradients", "gradient_predivide_factor", "vocabulary_size"}
    | {"disable_python_gc", "log_level", "disable_allgather", "ddp_bf16"},
    "zero_optimization": {"overlap_comm", "reduce_bucket_size", "contiguous_gradients", "allgather_bucket_size"}
    | {"allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size", "ignore_unused_parameters"}
    | {"stage3_gather_fp16_weights_on_model_save", "stage3_allgather_sequential", "elastic_checkpoint"}
    | {"cpu_offload_use_pin_memory", "load_from_fp32_weights", "use_multi_rank_bucket_allreduce", "legacy_stage1"}
    | {"memory_efficient_linear", "log_trace_cache_warnings", "pipeline_loading_checkpoint", "override_module_apply"}
    | {"parameter_alignment", "enable_sanity_checks", "allgather_sequential", "cpu_offload_params"}
    # DeepSpeed's own examples misspell the second one.
    | {"cpu_offload_param", "stage3_param_persitance_threshold"}
    # Most files write these keys with the prefix, some without.
    | {f"{prefix}{name}" for prefix in ("stage3_", "") for name in STAGE_3},
    "zero_optimization.offload_optimizer": {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "ratio"}
    | {"pipeline_write", "nvme_path", "max_in_cpu", "pipeline"},
    # Many templates have these keys beside "device": "none".
    "zero_optimization.offload_param": {"device", "pin_memory", "buffer_count", "buffer_size", "nvme_path"}
    | {"max_in_cpu"},
    # `opt_level` is a key of apex, which DeepSpeed does not read there.
    "fp16": {"auto_cast", "opt_level"},
    "bf16": {"immediate_grad_update"},
}

# Blocks that change no number of a training run: what to write yourself, if anything.
METRICS = "opt.metrics, a dict of numbers after each step"
ASIDE = {
    "tensorboard": METRICS,
    "wandb": METRICS,
    "csv_monitor": METRICS,
    "comet": METRICS,
    "monitor_config": METRICS,
    "comms_logger": "torch.profiler, whose trace shows every collective",
    "comms_config": "torch.profiler, whose trace shows every collective",
    "flops_profiler": "zf.profile(opt)",
    "activation_checkpointing": "torch.utils.checkpoint.checkpoint in the model",
    "aio": "",
    "timers": "",
    # DeepSpeed only stores this block, for models whose code reads it.
    "sparse_attention": "torch.nn.attention.flex_attention in the model",
    "zero_optimization.leaf_module": "",
    "checkpoint": "zf.save and zf.load",
    "compile": "torch.compile on the model",
    "hybrid_engine": "with opt.gathered(): model.generate(...)",
    "autotuning": "zf.plan(tx, params, world_size), the bytes of a pipeline beforehand",
}

# Paths that must be blocks of keys.
BLOCKS = {"fp16", "bf16", "data_types", "torch_autocast", "optimizer", "optimizer.params"} | {
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "scheduler",
    "scheduler.params",
}

HIERARCHY = "zf.shard(mesh['node']) and zf.reduce_scatter(mesh['nodes']), over a mesh of two dimensions"
HYBRID = "zf.shard(mesh['node']) and zf.all_reduce(mesh['nodes']), over a mesh of two dimensions"

# By path, the code to write instead.
REPLACEMENTS = {
    "amp": "torch.autocast around the forward, with zf.scale_loss() for fp16",
    "zero_optimization.zero_quantized_weights": "zf.shard(wire='int8'), in a chain of your own",
    "zero_optimization.zero_quantized_nontrainable_weights": "false: parameters are gathered as the model sees them",
    "zero_optimization.zero_quantized_gradients": "zf.reduce_scatter(wire='int8'), in a chain of your own",
    "zero_optimization.zero_hpz_partition_size": HIERARCHY,
    "zero_optimization.mics_shard_size": HYBRID,
    "zero_optimization.mics_hierarchical_params_gather": "false",
    "zero_optimization.zenflow": "zero_optimization.offload_optimizer: {'device': 'cpu'}",
    "elasticity": "zf.save and zf.load, between any numbers of ranks",
    "curriculum_learning": "a sampler of your own",
    "compression_training": "a view of your own: docs/extend/view.md",
    "quantize_training": "a view of your own: docs/extend/view.md",
    "eigenvalue": "zf.curvature.max_eigenvalue(loss_fn, tx, state, *batch)",
    "tensor_parallel": "torch.distributed.tensor.parallel on another axis of the mesh",
    "nebula": "zf.save and zf.load",
    "sparse_gradients": "dense gradients: nn.Embedding(..., sparse=False)",
    "seq_parallel_communication_data_type": "communication_data_type, of gradients",
    "dataloader_drop_last": "drop_last of your DataLoader",
    "use_data_before_expert_parallel_": "false",
    "graph_harvesting": "torch.compile on the model",
    "progressive_layer_drop": "zf.layer_drop, with zf.schedules.layer_keep(theta, gamma)",
    "torch_autocast.lower_precision_safe_modules": "communication_data_type, for all parameters",
    "fp16.consecutive_hysteresis": "zf.scale_loss(hysteresis=...): a growth of the scale refills it",
    "data_efficiency": "a sampler of your own",
    "zero_optimization.zeropp_loco_param": "zf.reduce_scatter(wire='int8'), in a chain of your own",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "zf.muon, chained behind",
    "data_types.param_dtype": "bf16 or fp16: {'enabled': true}",
    "data_types.buffer_dtype": "zf.precision(buffer_dtype=...)",
    "data_types.keep_in_fp32_modules": "a view of your own: docs/extend/view.md",
    "gradient_allreduce_op": "'mean', and a loss multiplied by the number of ranks for the sum",
    "pipeline": "a pipeline of your own: stages of a model are not made here",
    "sequence_parallel_size": "sequences that several ranks share: docs/sequence-parallel.md",
    "expert_parallel": "experts of your own, on another axis of the mesh",
    "weight_quantization": "a view of your own: docs/extend/view.md",
    "datastates_ckpt": "zf.save and zf.load",
}

# By path of REPLACEMENTS, values other than null, false and "none" that switch the feature off.
NEUTRAL = {
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.mics_shard_size": (-1,),
    "tensor_parallel.autotp_size": (0, 1),
    "sequence_parallel_size": (1,),
    "gradient_allreduce_op": ("mean",),
    "data_types.keep_in_fp32_modules": ("auto",),
}

# Paths that become a transform, or say how large a batch is.
TAKEN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "communication_data_type", "data_types.grad_accum_dtype"),
    *("zero_optimization.stage", "zero_optimization.cpu_offload", "zero_optimization.compute_grad_norm"),
    *("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),
    *("optimizer.type", "optimizer.params", "optimizer.legacy_fusion", "scheduler.type", "scheduler.params"),
    *(f"{kind}.{key}" for kind in ("fp16", "bf16") for key in ("enabled", f"{kind}_master_weights_and_grads")),
    *("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis"),
    *("fp16.min_loss_scale", "bf16.bf16_optimizer_states", "bf16.check_grad_overflow"),
    *("torch_autocast.enabled", "torch_autocast.dtype"),
)


def nearest(path: str) -> str:
    """A hint at the known key that an unknown path may mean, or "".

    Examples:
        >>> nearest("zero_optimization.offload_parm"), nearest("overlap_comm"), nearest("spam")
        ('; did you mean zero_optimization.offload_param?', '; did you mean zero_optimization.overlap_comm?', '')
    """
    tuned = [f"{block}.{name}" if block else name for block, names in TUNING.items() for name in sorted(names)]
    known = [*TAKEN, *ASIDE, *REPLACEMENTS, *filter(None, TUNING), *tuned]
    last = path.rpartition(".")[2]
    elsewhere = [p for p in known if p.rpartition(".")[2] == last and last != "enabled"]
    close = [x for x in elsewhere if x != path] or get_close_matches(path, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


# ----------------------------------------------------------------------------------------------------------------------
# Checks of values in a DeepSpeed configuration. Each returns what is wrong with a value, or `None`.


Check = Callable[[Any], str | None]


def flag(value: Any) -> str | None:
    """A bool. Any text is truthy, "false" too, so text is refused."""
    return None if isinstance(value, bool) else f"{value!r} is neither true nor false"


def count(value: Any) -> str | None:
    """An int from 1."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63
    return None if good else f"{value!r} is no positive int"


def from_zero(value: Any) -> str | None:
    """An int from 0."""
    return None if value == 0 and type(value) is int else count(value) and f"{value!r} is no int from 0"


def between(low: float, high: float = math.inf) -> Check:
    """A number in [low, high), finite in float32."""

    def check(value: Any) -> str | None:
        reason = misfit("it", value, low, high)
        return None if reason is None else f"{value!r}: {reason}"

    return check


def one_of(*values: Any) -> Check:
    """One of `values`, and of its type."""

    def check(value: Any) -> str | None:
        good = any(value == v and type(value) is type(v) for v in values)
        return None if good else f"{value!r} is none of {', '.join(map(str, values))}"

    return check


def or_null(check: Check) -> Check:
    """As `check`, or null."""
    return lambda value: None if value is None else check(value)


def pair(value: Any) -> str | None:
    """Two decays, each in [0, 1)."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return f"{value!r} is no pair of numbers, such as [0.9, 0.999]"
    return next(filter(None, map(between(0.0, 1.0), value)), None)


number = between(0.0)
positive = between(TINY)
decay = between(0.0, 1.0)


# ----------------------------------------------------------------------------------------------------------------------
# The values that the Hugging Face Trainer's arguments give for "auto" in a DeepSpeed configuration.


# Fields by which such arguments are recognised, without importing transformers.
NEEDED = {"learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "max_steps"}


@dataclass
class Values:
    """Values by dotted path.

    Attributes:
        known: the value, the name of its argument, and whether the configuration must agree with it.
        lacking: why there is no value, for the other paths.
    """

    known: dict[str, tuple[Any, str, bool]] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)


def is_arguments(x: Any) -> bool:
    """Whether `x` is a dataclass with the fields of `TrainingArguments`."""
    return is_dataclass(x) and not isinstance(x, type) and {f.name for f in fields(x)} >= NEEDED


def from_arguments(args: Any) -> Values:
    """The values that the Trainer would fill in, or compare with the configuration's."""
    micro, every = args.per_device_train_batch_size, args.gradient_accumulation_steps
    values = Values()
    for path, value, name in (
        ("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", every, "gradient_accumulation_steps"),
        ("train_batch_size", micro * every * world_group().size, "per_device_train_batch_size"),
        ("gradient_clipping", args.max_grad_norm, "max_grad_norm"),
        ("optimizer.params.lr", args.learning_rate, "learning_rate"),
        ("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
        ("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"),
        ("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
        ("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate"),
        ("fp16.enabled", bool(args.fp16), "fp16"),
        ("bf16.enabled", bool(args.bf16), "bf16"),
    ):
        values.known[path] = (value, name, True)
    values.known["scheduler.params.warmup_min_lr"] = (0, "nothing", False)
    total = args.max_steps if args.max_steps > 0 else None
    if total is None:
        why = "the Trainer takes it from the length of the data; set max_steps, or write the number here"
        values.lacking["scheduler.params.total_num_steps"] = why
    else:
        values.known["scheduler.params.total_num_steps"] = (total, "max_steps", True)
    warm = _warm_up(args, total)
    if warm is None:
        why = "it is a share of max_steps, which is not set; set max_steps or warmup_steps in the TrainingArguments"
        values.lacking["scheduler.params.warmup_num_steps"] = why
    else:
        values.known["scheduler.params.warmup_num_steps"] = (max(1, warm), "warmup_steps", True)
    return values


def _warm_up(args: Any, total: int | None) -> int | None:
    """Steps of the warm-up; a `warmup_steps` below 1, and `warmup_ratio`, are shares of all steps."""
    steps = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    if steps >= 1 or steps == 0:
        return int(steps)
    return None if total is None else math.ceil(steps * total)


# ----------------------------------------------------------------------------------------------------------------------
# `ConfigReader` takes keys out of a DeepSpeed configuration, and reports those that are left.


class ConfigReader:
    """A configuration from which keys are taken one by one; `close` reports what is left.

    Args:
        config: a mapping, or the path of a file.
        values: what to put in place of "auto": a mapping, in the structure of the configuration or by dotted path; or
            `TrainingArguments`.

    Attributes:
        left: entries that nobody has taken yet, by dotted path.
        values: values that no "auto" has used yet, by dotted path.
        lacking: for `TrainingArguments`, why a path has no value.
        unfilled: paths of "auto" without a value.
        bad: refused paths, each with the reason.
        idle: paths of keys that have no effect.
        aside: blocks that change no number, for which something else may be written.
        notes: sentences of the warning about keys that are taken otherwise than DeepSpeed takes them.
    """

    def __init__(self, config: Any, values: Any = None):
        if isinstance(config, str | os.PathLike):
            config = _read(config)
        if not isinstance(config, Mapping):
            why, right = f"it is {kind_of(config)}", "from_deepspeed({'zero_optimization': {'stage': 2}, ...})"
            raise TypeError(explain("from_deepspeed(config)", why, f"{right}, or the path of a JSON file"))
        self.left: dict[str, Any] = {_renamed(path, config): x for path, x in _leaves(config, "")}
        self.unfilled: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []
        self.aside: list[str] = []
        self.notes: list[str] = []
        self.lacking: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        if is_arguments(values):
            self._match(from_arguments(values))
        elif values is None or isinstance(values, Mapping):
            self.values = dict(_leaves(values or {}, ""))
        else:
            why = f"it is {kind_of(values)}"
            right = "a dict, such as {'optimizer.params.lr': 3e-4}, or the Hugging Face Trainer's TrainingArguments"
            raise TypeError(explain("from_deepspeed(config, values=...)", why, right))

    def _match(self, given: Values) -> None:
        """Fill in the arguments' values, and refuse what contradicts them, as the Trainer does."""
        self.lacking = given.lacking
        for path, (value, name, compared) in given.known.items():
            configured = self.left.get(path)
            configured = list(configured) if isinstance(configured, tuple) else configured
            if configured == "auto":
                self.values[path] = value
            elif compared and configured is not None and configured != value:
                difference = f"{configured!r}, but {name} of the TrainingArguments says {value!r}"
                self.bad.append((path, f"{difference}; write 'auto', or make them equal"))

    def take(self, path: str, default: Any = None, check: Check | None = None, needed: bool = True) -> Any:
        """Take out the entry at a dotted path; return the default if it is absent, or if `check` refuses it.

        If the default is `None`, null counts as absent. An "auto" without a value counts as absent if it is not
        `needed`.
        """
        if path not in self.left:
            return default
        value = self.left.pop(path)
        if isinstance(value, str) and value == "auto":
            if path not in self.values:
                if needed:
                    self.report_unfilled(path)
                return default
            value = self.values.pop(path)
        if check is not None and not (value is None is default) and (reason := check(value)):
            self.refuse(path, reason)
            return default
        return value

    def block(self, path: str) -> dict[str, Any]:
        """Take out all entries below a path."""
        found = {k: self.take(k) for k in list(self.left) if k.startswith(path + ".")}
        return {k[len(path) + 1 :]: v for k, v in found.items()}

    def report_unfilled(self, path: str) -> None:
        """Report an "auto" without a value, unless its path is refused already."""
        if path not in dict(self.bad):
            self.unfilled.append(path)

    def refuse(self, path: str, reason: str) -> None:
        """Report a bad key, unless it is an "auto" without a value, which is reported as that."""
        if path not in self.unfilled:
            self.bad.append((path, reason))

    def close(self) -> None:
        """Raise for all that is bad or left over, in one error; warn of keys that have no effect."""
        for path, value in self.left.items():
            self._pass_over(path, value)
        self.bad += [(p, self._auto(p)) for p in self.unfilled]
        unused = "values={{{0!r}: ...}}, but the configuration has no 'auto' there"
        self.bad += [(p, unused.format(p)) for p in self.values]
        if self.bad:
            raise ValueError(bad_leaves("from_deepspeed: keys without a transform", self.bad, self._advice()))
        notes = [f"{', '.join(self.idle)} say how DeepSpeed runs and have no effect here."] if self.idle else []
        notes += self.notes
        notes += [f"{head} is yours to write: {ASIDE[head]}." for head in dict.fromkeys(self.aside) if ASIDE[head]]
        if notes:
            warnings.warn(f"from_deepspeed: {' '.join(notes)}", stacklevel=users_line())

    def _pass_over(self, path: str, value: Any) -> None:
        """Decide about a key that became no transform: switched off, without effect, a note, or an error."""
        heads = (path, *_parents(path))
        block, _, name = path.rpartition(".")
        aside = next((p for p in heads if p in ASIDE), None)
        instead = next((REPLACEMENTS[p] for p in heads if p in REPLACEMENTS), None)
        if self._off(path) or path == block:
            return
        if name in TUNING.get(block, ()):
            self.idle.append(path)
        elif aside is not None:
            if ASIDE[aside] == "":
                self.idle.append(path)
            elif value not in (None, False, 0, "none"):
                self.aside.append(aside)
        elif instead is None:
            # Many people write comments into JSON as keys that begin with one of these.
            if not name.startswith(("_", "#", "//")):
                self.refuse(path, f"{value!r} is not a dict" if path in BLOCKS else f"unknown{nearest(path)}")
        elif value is not False and value not in (None, "none", *NEUTRAL.get(path, ())):
            self.refuse(path, f"not supported; use {instead}")

    def _auto(self, path: str) -> str:
        if path in self.lacking:
            return f"'auto'; {self.lacking[path]}"
        return "'auto' is filled in by the Hugging Face Trainer; here you write its value"

    def _advice(self) -> str:
        advice = []
        unexplained = [p for p in self.unfilled if p not in self.lacking]
        if unexplained:
            advice.append(f"from_deepspeed(config, values={{{', '.join(f'{p!r}: ...' for p in unexplained)}}})")
        if len(self.bad) > len(unexplained):
            advice.append("each key as its line says, or leave it out")
        return " and ".join(advice)

    def _off(self, path: str) -> bool:
        """Whether a key is in a block that is switched off, as many are in templates."""
        heads = _parents(path)
        top = path.partition(".")[0]
        if top in {*REPLACEMENTS, *ASIDE} and any(self.left.get(f"{head}.enabled") is False for head in heads):
            return True
        param = "zero_optimization.offload_param"
        return path.startswith(f"{param}.") and self.left.get(f"{param}.device") in (None, "none")


# DeepSpeed's older names of blocks.
OLDER = {"bfloat16": "bf16"}


def _renamed(path: str, config: Mapping[str, Any]) -> str:
    top, dot, rest = path.partition(".")
    return f"{OLDER[top]}{dot}{rest}" if top in OLDER and OLDER[top] not in config else path


def _read(path: str | os.PathLike[str]) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_unique_keys)
        except ValueError as error:
            # The file is cut short, is not text, or has a key twice. json's error does not name the file.
            name, why = os.fspath(path), f"the file cannot be read as JSON: {error}"
            right = f"python -m json.tool {name} shows where (JSON has no comments); or give a dict"
            raise ValueError(explain(f"from_deepspeed({name!r})", why, right)) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"keys twice in a block: {', '.join(sorted({repr(k) for k in keys if keys.count(k) > 1}))}")
    return found


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


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's learning-rate schedules as functions of the step, and the `scheduler` block, which names one.


def _ramp(i: int, steps: int, kind: str) -> float:
    """The fraction of a warm-up that is done after `i` steps of the scheduler."""
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


@dataclass(frozen=True)
class WarmupLR:
    """DeepSpeed's warm-up, logarithmic or linear, then a constant rate.

    DeepSpeed steps its scheduler after each update. So update `step` uses the rate of scheduler step `step - 1`, and
    the first two updates use `start`.

    Examples:
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
        """The fraction of the way from `start` to `peak`, after the warm-up."""
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """DeepSpeed's warm-up and linear decay back to `start`; `total` counts both."""

    total: int = 0

    def after(self, i: int, steps: int) -> float:
        return max(0.0, (self.total - i) / max(1.0, self.total - steps))


@dataclass(frozen=True)
class WarmupCosineLR:
    """DeepSpeed's warm-up and half cosine, as fractions of `peak`. The first update has rate 0."""

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


# Stand-ins for a default: the configuration must give a value; the default is the optimizer's learning rate.
NEEDED_BY_SCHEDULE, BASE = object(), object()

# Checks of values, by the name of an argument of the classes above.
SCHEDULE_VALUES: dict[str, Check] = {
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

# By DeepSpeed's name of a schedule: the class, and by DeepSpeed's parameter the class's argument and its default.
SCHEDULES: dict[str, tuple[Any, dict[str, tuple[str, Any]]]] = {
    "WarmupLR": (WarmupLR, _WARMUP),
    "WarmupDecayLR": (
        WarmupDecayLR,
        _WARMUP | {"warmup_max_lr": ("peak", 1e-3), "total_num_steps": ("total", NEEDED_BY_SCHEDULE)},
    ),
    "WarmupCosineLR": (
        WarmupCosineLR,
        {
            "total_num_steps": ("total", NEEDED_BY_SCHEDULE),
            "warmup_min_ratio": ("start", 0.0),
            "warmup_num_steps": ("steps", 1000),
            "cos_min_ratio": ("end", 1e-4),
            "warmup_type": ("kind", "log"),
        },
    ),
    "OneCycle": (
        OneCycle,
        {
            "cycle_min_lr": ("low", NEEDED_BY_SCHEDULE),
            "cycle_max_lr": ("high", NEEDED_BY_SCHEDULE),
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


# Parameters of schedulers that have no meaning here, and the only value that they may have.
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
            reader.refuse(f"scheduler.params.{key}", f"use {only}: zf.load and zf.load_deepspeed restore the step")
    if cls is OneCycle:
        given = {key: x for key, x in given.items() if key not in MOMENTUM}
    for key in given.keys() - known.keys():
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        reader.refuse(f"scheduler.params.{key}", f"unknown; {hint}{kind} takes {', '.join(known)}")
    for key in given.keys() & known.keys():
        if reason := SCHEDULE_VALUES[known[key][0]](given[key]):
            reader.refuse(f"scheduler.params.{key}", reason)
    values = {name: given.get(key, default) for key, (name, default) in known.items()}
    if values.pop("cycle_momentum", False):
        instead = '"cycle_momentum": false, and set opt.param_groups[0]["betas"] before a step'
        reader.refuse("scheduler.params.cycle_momentum", f"betas are constant here; write {instead}")
    missing = [key for key, (name, _) in known.items() if values.get(name) is NEEDED_BY_SCHEDULE]
    for key in missing:
        reader.refuse(f"scheduler.params.{key}", "missing; it has no default")
    if lr is None and (cls is WarmupCosineLR or BASE in values.values()):
        key = "optimizer.params.lr" if cls is WarmupCosineLR else "scheduler.params.warmup_max_lr"
        reader.refuse(key, f"missing; it is the peak rate of {kind}")
        return lr
    arguments: dict[str, Any] = {name: lr if x is BASE else x for name, x in values.items()}
    if cls is WarmupCosineLR:
        arguments["peak"] = lr
    return lr if missing else cls(**arguments)


# ----------------------------------------------------------------------------------------------------------------------
# `from_deepspeed` turns a DeepSpeed configuration into the chain that one would write by hand.


DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

# DeepSpeed clips by default, since its pull request 8068.
CLIPPING = 1.0


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str],
    values: Any = None,
    optimizer: Callable[..., Transform] | None = None,
) -> Transform:
    """The chain for a DeepSpeed configuration; `print` it to see what to write by hand.

    | key | becomes |
    |---|---|
    | `gradient_accumulation_steps` | `accumulate(k)`; the three batch sizes are checked against each other |
    | `zero_optimization.stage: 0` | `all_reduce`, after `accumulate` |
    | `zero_optimization.stage: 1` | `reduce_scatter`, after `accumulate` |
    | `zero_optimization.stage: 2` | `reduce_scatter`, before `accumulate` |
    | `zero_optimization.stage: 3` | `shard`, before `accumulate` |
    | `offload_optimizer` | `offload(optimizer)` |
    | `fp16`, `bf16`, `communication_data_type`, `data_types.grad_accum_dtype` | `precision`, `scale_loss` |
    | `bf16_master_weights_and_grads`, `fp16_master_weights_and_grads` | `precision(store_dtype=...)` |
    | `bf16_optimizer_states` | `low_precision_adam` |
    | `gradient_clipping`, `max_grad_norm` | `clip_by_global_norm`; by default at 1.0, as in DeepSpeed |
    | `optimizer` | `adamw` (DeepSpeed's Adam too decouples its decay), `adam`, `lamb`, `sgd` |
    | `scheduler` | a function of the step |

    Low-precision states are rounded stochastically. DeepSpeed rounds to nearest, which loses small updates
    (`rounding="nearest"`). Without an `optimizer` block the chain has no optimizer: give `optimizer`, or chain your own
    after it. One warning names the keys that change no number: how DeepSpeed runs (buckets, overlap, printing), and
    what you write elsewhere (logs, profiles, `activation_checkpointing`).

    Args:
        config: a dict, or the path of a JSON file.
        values: what to put in place of "auto" in the configuration, as the Hugging Face Trainer would: a dict by dotted
            path, `{"optimizer.params.lr": 3e-4}`, or in the structure of the configuration; or `TrainingArguments`,
            which must not contradict it. An "auto" batch size needs no value if the others determine it; nor do bucket
            sizes, which depend on the model's hidden size.
        optimizer: if the configuration has no such block, a function that makes the optimizer, such as `zf.adamw` or
            `functools.partial(zf.lion, weight_decay=0.1)`. It is called with `lr=` the schedule of the `scheduler`
            block, or without arguments if there is none. With `offload_optimizer` its result is wrapped in `offload`.

    Raises:
        TypeError: `config`, `values` or `optimizer` is of another kind.
        ValueError: unknown or unsupported keys, each with its path and what to write instead; batch sizes that
            contradict each other; an "auto" without a value, or a value where there is no "auto".

    Examples:
        >>> import zerofn as zf
        >>> config = {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
        >>> zf.from_deepspeed(config | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}})
        chain(
            reduce_scatter(),
            accumulate(every=4),
            clip_by_global_norm(max_norm=1.0),
            adamw(lr=0.0003, weight_decay=0.0),
        )
    """
    if optimizer is not None and (isinstance(optimizer, Transform) or not callable(optimizer)):
        why = "it is a function that makes the optimizer, because its lr is the configuration's schedule"
        right = "from_deepspeed(config, optimizer=zf.adamw), or functools.partial(zf.adamw, weight_decay=0.1)"
        raise TypeError(explain(f"from_deepspeed(config, optimizer={optimizer!r})", why, right))
    reader = ConfigReader(config, values)
    every = _batches(reader)
    stage = reader.take("zero_optimization.stage", 0, one_of(0, 1, 2, 3))
    dtypes, scale, low = _precision(reader)
    clipping = _clipping(reader)
    if not reader.take("zero_optimization.compute_grad_norm", True, flag) and clipping:
        reader.refuse("zero_optimization.compute_grad_norm", "clipping needs the norm; write gradient_clipping: 0")
    built = _optimizer(reader, low, optimizer)
    reader.close()

    how: dict[str, Any] = dtypes
    cast = precision(**how) if how else None
    held = accumulate(every) if every > 1 else None
    orders = {
        0: (cast, scale, held, all_reduce()),
        1: (cast, scale, held, reduce_scatter()),
        2: (reduce_scatter(), cast, scale, held),
        3: (shard(), cast, scale, held),
    }
    clip = clip_by_global_norm(clipping) if clipping else None
    return chain(*(t for t in (*orders[stage], clip, built) if t is not None))


def _batches(reader: ConfigReader) -> int:
    """`gradient_accumulation_steps`, which any two of the three batch sizes determine."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    automatic = reader.left.get(keys[2]) == "auto"
    if not reader.take("managed_gradient_accumulation", True, flag):
        reader.refuse("managed_gradient_accumulation", "use true, and call opt.set_boundary(...) before each backward")
    total, micro, every = (reader.take(k, None, count, needed=False) for k in keys)
    if automatic and not (every or (total and micro)):
        reader.report_unfilled(keys[2])
    if total is None or (micro is None and every is None):
        return 1 if every is None else every
    world = world_group().size
    if micro is None:
        micro = total // (every * world)
    if every is None:
        every = total // (micro * world)
    if total != micro * every * world:
        product = f"{micro} * {every} * {world}, train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks"
        right = max(micro, 1) * max(every, 1) * world
        reader.refuse(keys[0], f"{total} is not {product}; write {right}, or leave one of the three out")
        return max(every, 1)
    return every


def _clipping(reader: ConfigReader) -> float:
    """The norm to clip at: `gradient_clipping`, or the older `max_grad_norm` of the optimizer."""
    given, path = reader.left.get("gradient_clipping") is not None, "optimizer.params.max_grad_norm"
    clipping = reader.take("gradient_clipping", CLIPPING, number)
    older = reader.take(path, 0, number)
    if older and given and older != clipping:
        reader.refuse(path, f"{older!r}, but gradient_clipping says {clipping!r}; leave one of them out")
    return older or clipping


def _precision(
    reader: ConfigReader,
) -> tuple[dict[str, torch.dtype], Transform | None, tuple[torch.dtype, bool] | None]:
    """Arguments of `precision`; `scale_loss`; and for 16-bit masters their dtype, and whether states have it too."""
    dtypes: dict[str, torch.dtype] = {}
    scale, low = None, None
    half, brain = _sixteen_bits(reader)
    if half and brain:
        reader.refuse("bf16.enabled", "fp16 is enabled too; choose one")
    settings = {k: reader.take(f"fp16.{k}", v, check) for k, (v, check) in SCALE.items()}
    if settings["min_loss_scale"] > 2.0 ** settings["initial_scale_power"]:
        reader.refuse("fp16.min_loss_scale", f"{settings['min_loss_scale']!r} is above the initial scale")
        settings["min_loss_scale"] = 1
    masters = {
        kind: any([reader.take(f"{kind}.{kind}_master_weights_and_{g}", False, flag) for g in ("grads", "gradients")])
        for kind in ("fp16", "bf16")
    }
    states = reader.take("bf16.bf16_optimizer_states", False, flag)
    check = reader.take("bf16.check_grad_overflow", False, flag)
    if half or brain:
        compute = torch.float16 if half else torch.bfloat16
        master = masters["fp16" if half else "bf16"]
        dtypes = {"param_dtype": compute, "store_dtype": compute if master else torch.float32}
        # Squared gradients underflow in fp16, so the states of an fp16 master stay in fp32.
        low = (compute, bool(states)) if master else None
    if states and not (brain and masters["bf16"]):
        reader.refuse("bf16.bf16_optimizer_states", "needs bf16.enabled and bf16.bf16_master_weights_and_grads")
    if half:
        scale = _scale(settings)
    elif brain and check:
        scale = scale_loss(1.0)
    if reader.take("torch_autocast.enabled", False, flag):
        dtype = _dtype(reader, "torch_autocast.dtype", "bfloat16")
        # DeepSpeed uses torch.amp.GradScaler there, whose default is a dynamic scale.
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


def _sixteen_bits(reader: ConfigReader) -> list[bool]:
    """Whether fp16 and bf16 are enabled. If one is, an "auto" of the other needs no value."""
    paths = ["fp16.enabled", "bf16.enabled"]
    unknown = [p for p in paths if reader.left.get(p) == "auto" and p not in reader.values]
    found = [reader.take(p, False, flag, needed=False) for p in paths]
    if not any(found):
        for path in unknown:
            reader.report_unfilled(path)
    return found


# By key of fp16: DeepSpeed's default, and the check of its value. A scale of 2 ** 128 is infinite in float32.
SCALE: dict[str, tuple[Any, Any]] = {
    "loss_scale": (0, number),
    "initial_scale_power": (16, between(0, 128)),
    "loss_scale_window": (1000, count),
    "hysteresis": (2, count),
    "min_loss_scale": (1, positive),
}


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


def _dtype(reader: ConfigReader, path: str, default: str | None) -> torch.dtype | None:
    name = reader.take(path, default)
    if name is not None and str(name).removeprefix("torch.") not in DTYPES:
        reader.refuse(path, f"{name!r} is none of {', '.join(DTYPES)}")
        return None
    return None if name is None else DTYPES[str(name).removeprefix("torch.")]


def _optimizer(
    reader: ConfigReader, low: tuple[torch.dtype, bool] | None, given_one: Callable[..., Transform] | None
) -> Transform | None:
    kind = reader.take("optimizer.type")
    given = reader.block("optimizer.params")
    reader.take("optimizer.legacy_fusion", False, flag)
    device = _offload_device(reader)
    if kind is None:
        for key in given:
            reader.refuse(f"optimizer.params.{key}", "needs an optimizer.type; or give it to your own optimizer")
        return _given(reader, device, given_one)
    if given_one is not None:
        reader.refuse("optimizer.type", f"{kind!r}, and optimizer= is given too; leave one of them out")
    name = str(kind).lower()
    known = {"adam": ADAM, "adamw": ADAM, "sgd": SGD, "lamb": LAMB}.get(name)
    if known is None:
        instead = OTHERS.get(name, "leave the block out and chain your own, or from_deepspeed(config, optimizer=...)")
        reader.refuse("optimizer.type", f"{kind!r}; use Adam, AdamW, Lamb or SGD, or {instead}")
        schedule_of(reader, given.get("lr", 1e-3))
        return None
    for key in given.keys() - known.keys() - IDLE:
        reader.refuse(f"optimizer.params.{key}", f"unknown; {kind} takes {', '.join(known)}")
    for key in given.keys() & known.keys():
        if reason := VALUES[key](given[key]):
            reader.refuse(f"optimizer.params.{key}", reason)
    values = {**known, **{k: v for k, v in given.items() if k in known}}
    for key in FIXED & known.keys():
        if values.pop(key):
            reader.refuse(f"optimizer.params.{key}", "true is not supported; use false")
    if name == "lamb" and not reader.bad and values["min_coeff"] > values["max_coeff"]:
        reader.refuse("optimizer.params.min_coeff", f"{values['min_coeff']!r} is above max_coeff")
    values["lr"] = schedule_of(reader, values["lr"])
    decoupled = bool(values.pop("adam_w_mode", True)) or name == "adamw"
    if low is not None:
        if name in ("sgd", "lamb"):
            reader.refuse("optimizer.type", f"{kind} on 16-bit masters loses small updates; use AdamW")
        elif not decoupled and values["weight_decay"]:
            reader.refuse("optimizer.params.adam_w_mode", "low-precision states need decoupled weight decay: true")
        elif not values.pop("bias_correction"):
            reader.refuse("optimizer.params.bias_correction", "low-precision states need it: true")
    if reader.bad or reader.unfilled:
        return None
    if name == "sgd":
        built = sgd(**values)
    else:
        values["betas"] = tuple(values["betas"])
        if name == "lamb":
            built = _lamb(**values)
        elif low is None:
            built = (adamw if decoupled else adam)(**values)
        else:
            built = low_precision_adam(**values, state_dtype=low[0] if low[1] else torch.float32)
    return offload(built) if device == "cpu" else built


def _lamb(min_coeff: float, max_coeff: float, bias_correction: bool, **values: Any) -> Transform:
    """DeepSpeed's LAMB, which corrects the length of a step for the bias of the moments, and not the moments."""
    if bias_correction:
        values["lr"] = CorrectedRate(values["lr"], values["betas"])
    return lamb(**values, bias_correction=False, ratio_bounds=(min_coeff, max_coeff))


@dataclass(frozen=True)
class CorrectedRate:
    """A rate multiplied by Adam's bias corrections, as DeepSpeed's LAMB does with `bias_correction: true`.

    Examples:
        >>> rate = CorrectedRate(1.0, (0.9, 0.99))
        >>> round(rate(0), 6), round(rate(10000), 6)
        (1.0, 1.0)
    """

    lr: Any
    betas: tuple[float, float]

    def __call__(self, step: int) -> float:
        lr: Any = self.lr
        rate: Any = lr(step) if callable(lr) else lr
        first, second = (1 - beta ** (step + 1) for beta in self.betas)
        return rate * math.sqrt(second) / first


def _offload_device(reader: ConfigReader) -> str:
    """Where the optimizer's states live: "none" or "cpu". `cpu_offload` is the key's older name."""
    path = "zero_optimization.offload_optimizer.device"
    older = reader.take("zero_optimization.cpu_offload", False, flag)
    device = reader.take(path, "cpu" if older else "none", one_of("none", "cpu", "nvme"))
    if device == "nvme":
        reader.notes.append(f"{path}: 'nvme' is taken as 'cpu', so the states are in the memory of the host.")
    _offloaded_parameters(reader)
    return "none" if device == "none" else "cpu"


def _offloaded_parameters(reader: ConfigReader) -> None:
    """Note that shards of parameters stay on the device. The key is left, since `close` reads it once more."""
    path = "zero_optimization.offload_param.device"
    if reason := one_of("none", "cpu", "nvme", None)(reader.left.get(path)):
        reader.refuse(path, reason)
    older = [reader.left.get(f"zero_optimization.cpu_offload_param{s}") for s in ("", "s")]
    if reader.left.get(path) in ("cpu", "nvme") or True in older:
        reader.notes.append(f"zero_optimization.offload_param: {SHARDS_STAY}.")


def _given(reader: ConfigReader, device: str, make: Callable[..., Transform] | None) -> Transform | None:
    """The optimizer, if the configuration has no block for it; `None` if nobody gives one."""
    block = "or an optimizer block"
    scheduled = any(key.startswith("scheduler.") and x is not None for key, x in reader.left.items())
    if make is None:
        call = "from_deepspeed(config, optimizer=zf.adamw)"
        if device == "cpu":
            why = f"needs an optimizer: {call}, {block}; or zf.offload(...) around yours"
            reader.refuse("zero_optimization.offload_optimizer.device", why)
        if scheduled:
            reader.refuse("scheduler", f"needs an optimizer to set the lr of: {call}, {block}")
            schedule_of(reader, None)
        return None
    lr = schedule_of(reader, None)
    if reader.bad or reader.unfilled:
        return None
    built = make(lr=lr) if scheduled else make()
    if not isinstance(built, Transform):
        why, right = f"it returned {kind_of(built)}", "from_deepspeed(config, optimizer=zf.adamw)"
        raise TypeError(explain("from_deepspeed(config, optimizer=...)", why, right))
    return offload(built) if device == "cpu" else built


SHARDS_STAY = (
    "each rank keeps its shard of the parameters on the device; zf.offload(zf.adamw(...), compute='host', "
    "master_dtype=torch.float32) behind zf.precision(store_dtype=torch.bfloat16) leaves only 16 bits of each there"
)

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True} | {
    "bias_correction": True,
    "amsgrad": False,
}
LAMB = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_coeff": 10.0, "min_coeff": 0.01} | {
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "amsgrad": False,
}
SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
VALUES = {"lr": number, "betas": pair, "eps": number, "weight_decay": number} | {
    **dict.fromkeys(("adam_w_mode", "bias_correction", "amsgrad", "eps_inside_sqrt"), flag),
    **dict.fromkeys(("min_coeff", "max_coeff"), number),
    "momentum": decay,
    "dampening": between(0.0, 1.0 + 1e-12),
    "nesterov": flag,
}
# These choose among DeepSpeed's implementations, and have no effect here.
IDLE = {"torch_adam", "fused", "foreach"}
# These must be false.
FIXED = {"amsgrad", "eps_inside_sqrt"}

# What to write for DeepSpeed's other optimizers.
OTHERS = {
    "onebitadam": "AdamW itself: gradients are sent whole here, at best in 16 bits (communication_data_type)",
    "zerooneadam": "AdamW itself: gradients are sent whole here, at best in 16 bits (communication_data_type)",
    "onebitlamb": "leave the block out and chain a transform of your own: docs/writing-a-transform.md",
    "lion": "leave the block out and write from_deepspeed(config, optimizer=zf.lion)",
    "muon": "leave the block out and write from_deepspeed(config, optimizer=zf.muon)",
    "rmsprop": "leave the block out and write from_deepspeed(config, optimizer=zf.rmsprop)",
    "adagrad": "leave the block out and chain zf.from_torch(torch.optim.Adagrad, lr=...)",
}
