"""What the Hugging Face Trainer's arguments say for the "auto" of a DeepSpeed configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..ranks.process_groups import world_group

# Fields by which such arguments are known; no package is imported for that.
NEEDED = {"learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "max_steps"}


@dataclass
class Values:
    """Values by dotted path.

    Attributes:
        known: the value, the name of the argument that says it, and whether a value in the configuration must agree.
        lacking: what the arguments would have to say for the others.
    """

    known: dict[str, tuple[Any, str, bool]] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)


def is_arguments(x: Any) -> bool:
    """Whether it is a dataclass with the fields of `TrainingArguments`."""
    return is_dataclass(x) and not isinstance(x, type) and {f.name for f in fields(x)} >= NEEDED


def from_arguments(args: Any) -> Values:
    """The values that the Trainer would fill in, or compare with what is there."""
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
        why = "the Trainer counts the data for it; give max_steps to the TrainingArguments, or the number here"
        values.lacking["scheduler.params.total_num_steps"] = why
    else:
        values.known["scheduler.params.total_num_steps"] = (total, "max_steps", True)
    warm = _warm_up(args, total)
    if warm is None:
        why = "a share of max_steps, which the TrainingArguments do not have; give them max_steps or warmup_steps"
        values.lacking["scheduler.params.warmup_num_steps"] = why
    else:
        values.known["scheduler.params.warmup_num_steps"] = (max(1, warm), "warmup_steps", True)
    return values


def _warm_up(args: Any, total: int | None) -> int | None:
    """Steps of the warm-up; below 1, and as `warmup_ratio`, it is a share of all steps."""
    steps = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    if steps >= 1 or steps == 0:
        return int(steps)
    return None if total is None else math.ceil(steps * total)
