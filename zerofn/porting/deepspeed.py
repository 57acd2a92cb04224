"""`from_deepspeed`: turns a DeepSpeed configuration into the chain that one would write by hand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._errors import explain, kind_of
from ..core.chain import chain
from ..core.transform import Transform
from ..ranks.process_groups import world_group
from ..transforms.accumulate import accumulate
from ..transforms.adam import adam, adamw
from ..transforms.clip import clip_by_global_norm
from ..transforms.loss_scale import scale_loss
from ..transforms.low_precision_adam import low_precision_adam
from ..transforms.offload import offload
from ..transforms.precision import precision
from ..transforms.sgd import sgd
from ..transforms.sharding import all_reduce, reduce_scatter, shard
from .deepspeed_config import ConfigReader
from .deepspeed_schedules import schedule_of
from .deepspeed_values import between, count, decay, flag, number, one_of, pair, positive

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


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str],
    values: Any = None,
    optimizer: Callable[..., Transform] | None = None,
) -> Transform:
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
    (`rounding="nearest"`). Without an `optimizer` block the pipeline has none: give `optimizer`, or chain one of yours
    behind it. One warning names the keys that change no number: how DeepSpeed runs (buckets, overlap, printing), and
    what you write elsewhere (logs, profiles, `activation_checkpointing`).

    Args:
        config: a dict, or the path of a JSON file.
        values: for what is "auto" in the configuration, and would be filled in by the Hugging Face Trainer: a dict,
            by dotted path, `{"optimizer.params.lr": 3e-4}`, or in the structure of the configuration; or the
            `TrainingArguments` themselves, which must not contradict it. An "auto" batch size may be left out where
            the others give it. Sizes of buckets, which come from the model's hidden size, need no value.
        optimizer: where the configuration has no such block: a function that makes the optimizer, such as `zf.adamw`
            or `functools.partial(zf.lion, weight_decay=0.1)`. It is called with `lr`, the schedule of the `scheduler`
            block, or without arguments if there is none; `offload_optimizer` is put around what it returns.

    Raises:
        TypeError: `config`, `values` or `optimizer` of another kind.
        ValueError: unknown or unsupported keys, each with its path and what to use instead; batch sizes
            that contradict each other; an "auto" without a value, or a value where there is no "auto".

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
        why = "the schedule of the configuration is its lr, so it is made by a function"
        right = "from_deepspeed(config, optimizer=zf.adamw), or functools.partial(zf.adamw, weight_decay=0.1)"
        raise TypeError(explain(f"from_deepspeed(config, optimizer={optimizer!r})", why, right))
    reader = ConfigReader(config, values)
    every = _batches(reader)
    stage = reader.take("zero_optimization.stage", 0, one_of(0, 1, 2, 3))
    dtypes, scale, low = _precision(reader)
    clipping = reader.take("gradient_clipping", CLIPPING, number)
    if not reader.take("zero_optimization.compute_grad_norm", True, flag) and clipping:
        reader.refuse("zero_optimization.compute_grad_norm", "clipping needs the norm; write gradient_clipping: 0")
    built = _optimizer(reader, low, optimizer)
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
    return chain(*(t for t in (*orders[stage], clip, built) if t is not None))


def _batches(reader: ConfigReader) -> int:
    """`gradient_accumulation_steps`, which follows from any two of the three batch sizes."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    automatic = reader.left.get(keys[2]) == "auto"
    if not reader.take("managed_gradient_accumulation", True, flag):
        reader.refuse("managed_gradient_accumulation", "true, and opt.set_boundary(...) before each backward")
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
        wrong = f"train_batch_size={total} is not {micro} * {every} * {world}"
        why = "it is train_micro_batch_size_per_gpu * gradient_accumulation_steps * the number of ranks"
        right = f"train_batch_size={max(micro, 1) * max(every, 1) * world}, or leave one of the three out"
        raise ValueError(explain(wrong, why, right))
    return every


def _precision(
    reader: ConfigReader,
) -> tuple[dict[str, torch.dtype], Transform | None, tuple[torch.dtype, bool] | None]:
    """Arguments of `precision`; `scale_loss`; for 16-bit masters their dtype and whether states have it too."""
    dtypes: dict[str, torch.dtype] = {}
    scale, low = None, None
    half, brain = reader.take("fp16.enabled", False, flag), reader.take("bf16.enabled", False, flag)
    if half and brain:
        reader.refuse("bf16.enabled", "fp16 is enabled too; choose one")
    settings = {k: reader.take(f"fp16.{k}", v, check) for k, (v, check) in SCALE.items()}
    if settings["min_loss_scale"] > 2.0 ** settings["initial_scale_power"]:
        reader.refuse("fp16.min_loss_scale", f"{settings['min_loss_scale']!r} is above the scale to begin with")
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


# By key of fp16: DeepSpeed's default, and the check of a value. A scale of 2 ** 128 is infinite in float32.
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
    known = {"adam": ADAM, "adamw": ADAM, "sgd": SGD}.get(name)
    if known is None:
        instead = OTHERS.get(name, "leave the block out and chain your own, or from_deepspeed(config, optimizer=...)")
        reader.refuse("optimizer.type", f"{kind!r}; use Adam, AdamW or SGD, or {instead}")
        schedule_of(reader, given.get("lr", 1e-3))
        return None
    for key, only in FIXED.items():
        if given.get(key, only) is not only:
            reader.refuse(f"optimizer.params.{key}", f"{given[key]!r} is not supported; use {only}")
    clip = given.pop("max_grad_norm", 0)
    if clip:
        reader.refuse("optimizer.params.max_grad_norm", f"write it as gradient_clipping: {clip!r}")
    for key in given.keys() - known.keys() - IDLE - FIXED.keys():
        reader.refuse(f"optimizer.params.{key}", f"unknown; {kind} takes {', '.join(known)}")
    for key in given.keys() & known.keys():
        if reason := VALUES[key](given[key]):
            reader.refuse(f"optimizer.params.{key}", reason)
    values = {**known, **{k: v for k, v in given.items() if k in known}}
    values["lr"] = schedule_of(reader, values["lr"])
    if reader.bad or reader.unfilled:
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


def _offload_device(reader: ConfigReader) -> str:
    """Where the optimizer's states are: "none" or "cpu". `cpu_offload` is its older name."""
    path = "zero_optimization.offload_optimizer.device"
    older = reader.take("zero_optimization.cpu_offload", False, flag)
    device = reader.take(path, "cpu" if older else "none")
    if device not in ("none", "cpu"):
        reader.refuse(path, f"{device!r}; use 'cpu'")
    return device


def _given(reader: ConfigReader, device: str, make: Callable[..., Transform] | None) -> Transform | None:
    """The optimizer of a configuration that has no block for it; `None` if nobody gives one."""
    block = "or an optimizer block"
    scheduled = any(key.startswith("scheduler.") and x is not None for key, x in reader.left.items())
    if make is None:
        call = "from_deepspeed(config, optimizer=zf.adamw)"
        if device == "cpu":
            why = f"needs an optimizer: {call}, {block}; or zf.offload(...) around yours"
            reader.refuse("zero_optimization.offload_optimizer.device", why)
        if scheduled:
            reader.refuse("scheduler", f"needs an optimizer, whose lr it is: {call}, {block}")
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


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True}
SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
VALUES = {"lr": number, "betas": pair, "eps": number, "weight_decay": number, "adam_w_mode": flag} | {
    "momentum": decay,
    "dampening": between(0.0, 1.0 + 1e-12),
    "nesterov": flag,
}
# Which of its implementations DeepSpeed uses; no effect here.
IDLE = {"torch_adam", "fused", "foreach"}
FIXED = {"amsgrad": False, "bias_correction": True}

# What to write for DeepSpeed's other optimizers.
OTHERS = {
    "onebitadam": "AdamW itself: gradients are sent whole here, at best in 16 bits (communication_data_type)",
    "zerooneadam": "AdamW itself: gradients are sent whole here, at best in 16 bits (communication_data_type)",
    "onebitlamb": "leave the block out and chain a transform of your own: docs/writing-a-transform.md",
    "lamb": "leave the block out and chain a transform of your own: docs/writing-a-transform.md",
    "lion": "leave the block out and write from_deepspeed(config, optimizer=zf.lion)",
    "muon": "leave the block out and write from_deepspeed(config, optimizer=zf.muon)",
    "rmsprop": "leave the block out and write from_deepspeed(config, optimizer=zf.rmsprop)",
    "adagrad": "leave the block out and chain zf.from_torch(torch.optim.Adagrad, lr=...)",
}
