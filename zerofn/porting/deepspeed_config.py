"""A DeepSpeed configuration from which keys are taken one by one, and what is said of those that are left."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .._errors import bad_leaves, explain
from .deepspeed_values import Check

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

BLOCKS = {"fp16", "bf16", "data_types", "torch_autocast", "optimizer", "optimizer.params"} | {
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "scheduler",
    "scheduler.params",
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


class Reader:
    """A configuration from which keys are taken one by one, so that what is left over is known."""

    def __init__(self, config: Any):
        if isinstance(config, str | os.PathLike):
            config = _read(config)
        if not isinstance(config, Mapping):
            raise TypeError(f"from_deepspeed({type(config).__name__}): give a dict, or the path of a JSON file.")
        self.left: dict[str, Any] = dict(_leaves(config, ""))
        self.bad: list[tuple[str, str]] = []
        self.idle: list[str] = []

    def take(self, path: str, default: Any = None, check: Check | None = None) -> Any:
        """The entry at a dotted path, which is then dealt with; the default where `check` has a reason against it.

        A null is as if the key were absent, where there is no default.
        """
        if path not in self.left:
            return default
        value = self.left.pop(path)
        if isinstance(value, str) and value == "auto":
            self.refuse(path, "'auto' is filled in by the Hugging Face Trainer; write the number")
            return default
        if check is not None and not (value is None is default) and (reason := check(value)):
            self.refuse(path, reason)
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
                self.refuse(path, f"{value!r} is no block of keys" if path in BLOCKS else "unknown")
            elif (
                value is not False
                and value not in (None, "none")
                and (path, value) != ("gradient_predivide_factor", 1.0)
            ):
                self.refuse(path, f"not supported; use {instead}")
        if self.bad:
            raise ValueError(
                bad_leaves(
                    "from_deepspeed: keys that have no pipeline",
                    self.bad,
                    "each as its line says, or the configuration without it",
                )
            )
        if self.idle:
            warnings.warn(
                f"from_deepspeed: {', '.join(self.idle)} say how DeepSpeed runs and have no effect here.", stacklevel=3
            )


def _read(path: str | os.PathLike[str]) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file, object_pairs_hook=_once)
        except ValueError as error:
            # Cut short, not text, or a key twice: json does not know the name of the file.
            raise ValueError(
                explain(
                    f"from_deepspeed({os.fspath(path)!r})",
                    f"the file cannot be read as JSON: {error}",
                    f"python -m json.tool {os.fspath(path)}, which shows where; or a dict",
                )
            ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"twice in one block: {', '.join(sorted({repr(k) for k in keys if keys.count(k) > 1}))}")
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
