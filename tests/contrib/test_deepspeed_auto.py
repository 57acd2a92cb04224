"""Configurations in the shapes that people have them in, with "auto" where the Hugging Face Trainer fills values in."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zerofn as zf

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
AUTO = "auto"
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": AUTO}}
SIZES = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO}
HALF = {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
ZERO2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True} | {
    "reduce_scatter": True,
    "reduce_bucket_size": AUTO,
    "contiguous_gradients": True,
}
ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9} | {
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
RATES = {"optimizer.params.lr": 3e-4, "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-8} | {
    "optimizer.params.weight_decay": 0.1
}
RAMP = {"scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 3e-4} | {
    "scheduler.params.warmup_num_steps": 10
}
OFF = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
MINE = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def adamw() -> zf.Transform:
    return zf.adamw(**MINE)


def of(config: dict[str, Any], auto: dict[str, Any] | None) -> zf.Transform:
    with warnings.catch_warnings():
        # Of keys that say how DeepSpeed runs.
        warnings.simplefilter("ignore")
        return zf.from_deepspeed(config, values=auto)


CAST = {"param_dtype": BF16, "store_dtype": F32}
SCALE = {"init_scale": 2.0**16, "growth_interval": 1000, "min_scale": 1.0, "hysteresis": 2}
ONE = {"gradient_clipping": 1.0}
# By name: a configuration, values for "auto", and the chain that one would write.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, list[zf.Transform]]] = {
    "stage 0": ({"optimizer": ADAMW, **ONE}, RATES, [zf.all_reduce(), zf.clip_by_global_norm(1.0), adamw()]),
    "stage 1, bf16": (
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": AUTO}, "fp16": HALF}
        | {"optimizer": ADAMW, "gradient_clipping": AUTO, **SIZES, "wall_clock_breakdown": False},
        {**RATES, "bf16.enabled": True, "fp16.enabled": False, "gradient_clipping": 0.5}
        | {"gradient_accumulation_steps": 4},
        [zf.precision(**CAST), zf.accumulate(4), zf.reduce_scatter(), zf.clip_by_global_norm(0.5), adamw()],
    ),
    "stage 2, fp16": (
        {
            "fp16": HALF | {"min_loss_scale": 1},
            "bf16": {"enabled": AUTO},
            "optimizer": ADAMW,
            "zero_optimization": ZERO2,
        }
        | {**ONE, "gradient_accumulation_steps": AUTO, "steps_per_print": 2000},
        {**RATES, "fp16.enabled": True, "bf16.enabled": False, "gradient_accumulation_steps": 2},
        [
            zf.reduce_scatter(),
            zf.precision(param_dtype=F16, store_dtype=F32),
            zf.scale_loss("dynamic", **SCALE),
            zf.accumulate(2),
            zf.clip_by_global_norm(1.0),
            adamw(),
        ],
    ),
    "stage 2, offloaded": (
        {"zero_optimization": ZERO2 | OFF, "optimizer": ADAMW, **ONE},
        RATES,
        [zf.reduce_scatter(), zf.clip_by_global_norm(1.0), zf.offload(adamw())],
    ),
    "stage 3, without": (
        {"zero_optimization": ZERO3, "optimizer": ADAMW, "gradient_clipping": AUTO},
        {**RATES, "gradient_clipping": 0},
        [zf.shard(), adamw()],
    ),
    "stage 3, parameters not offloaded": (
        {"zero_optimization": ZERO3 | {"offload_param": {"device": "none", "pin_memory": True}} | OFF}
        | {"optimizer": ADAMW, **ONE},
        RATES,
        [zf.shard(), zf.clip_by_global_norm(1.0), zf.offload(adamw())],
    ),
    "nested values": (
        {"zero_optimization": ZERO3, "optimizer": ADAMW, **ONE},
        {"optimizer": {"params": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}}},
        [zf.shard(), zf.clip_by_global_norm(1.0), adamw()],
    ),
    "batch sizes that say it": (
        {**SIZES, "optimizer": ADAMW, **ONE},
        {**RATES, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 8},
        [zf.accumulate(3), zf.all_reduce(), zf.clip_by_global_norm(1.0), adamw()],
    ),
    "what is switched off": (
        {"optimizer": ADAMW, **ONE, "flops_profiler": {"enabled": False, "profile_step": 1, "top_modules": 3}}
        | {"comms_logger": {"enabled": False, "verbose": True}, "tensorboard": {"enabled": False, "job_name": "x"}}
        | {"curriculum_learning": {"enabled": False, "max_difficulty": 7}, "elasticity": {"enabled": False}},
        RATES,
        [zf.all_reduce(), zf.clip_by_global_norm(1.0), adamw()],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_template_is_the_chain_that_one_would_write(name: str):
    config, auto, parts = KINDS[name]
    assert of(config, auto) == zf.chain(*parts)


@pytest.mark.parametrize("kind", [WARMUP, DECAY], ids=["warmup", "decay"])
def test_schedules_are_filled_in(kind: dict[str, Any]):
    more = {"scheduler.params.total_num_steps": 20} if kind is DECAY else {}
    tx = of({"optimizer": ADAMW, "scheduler": kind, "gradient_clipping": 0}, {**RATES, **RAMP, **more})
    plain = {**kind["params"], "warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10}
    plain |= {"total_num_steps": 20} if kind is DECAY else {}
    optimizer = {"type": "AdamW", "params": {k.rpartition(".")[2]: v for k, v in RATES.items()}}
    want = of({"optimizer": optimizer, "scheduler": {**kind, "params": plain}, "gradient_clipping": 0}, None)
    assert tx == want
    rates = [tx.parts[-1].config["lr"](i) for i in (0, 5, 11, 20)]
    assert rates[2] == 3e-4 and len(set(rates)) > 2


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, list[str]]] = {
    "all of them at once": (
        {"optimizer": ADAMW, "gradient_clipping": AUTO, **SIZES},
        None,
        [
            "gradient_clipping: 'auto' is filled in by the Hugging Face Trainer; here you write its value",
            "gradient_accumulation_steps: 'auto'",
            "optimizer.params.lr: 'auto'",
            "write: from_deepspeed(config, values={",
        ],
    ),
    "a value for nothing": (
        {"gradient_clipping": 1.0},
        {"gradient_clipping": 2.0},
        ["gradient_clipping: values={'gradient_clipping': ...}, but the configuration has no 'auto' there"],
    ),
    "a bad number": ({"gradient_clipping": AUTO}, {"gradient_clipping": -1.0}, ["gradient_clipping: -1.0"]),
    "a bad count": (
        {"gradient_accumulation_steps": AUTO},
        {"gradient_accumulation_steps": 0},
        ["gradient_accumulation_steps: 0 is no positive int"],
    ),
    "offloaded parameters": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
        None,
        ["offload_param.device: not supported; use {'device': 'none'}"],
    ),
    "a disk": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}
        | {"aio": {"block_size": 1048576, "queue_depth": 8}},
        None,
        ["offload_optimizer.device: 'nvme'; use 'cpu'"],
    ),
    "quantized weights": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
        None,
        [
            "zero_quantized_weights: not supported; use zf.shard(wire='int8')",
            "zero_hpz_partition_size: not supported; use zf.shard",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_pipeline_is_told_by_its_path_and_what_to_write(name: str):
    config, auto, told = REFUSED[name]
    with pytest.raises(ValueError) as error:
        of(config, auto)
    for text in told:
        assert text in str(error.value), str(error.value)
    assert "unknown" not in str(error.value)


def test_only_what_is_asked_for_is_in_the_remedy():
    with pytest.raises(ValueError) as error:
        of({"gradient_clipping": AUTO}, None)
    assert str(error.value).rstrip().endswith("write: from_deepspeed(config, values={'gradient_clipping': ...})")


@pytest.mark.parametrize("scheduler", [WARMUP, DECAY], ids=["warmup", "decay"])
def test_an_auto_without_a_value_is_told_in_one_line(scheduler: dict[str, Any]):
    with pytest.raises(ValueError) as error:
        of({"gradient_clipping": AUTO, "optimizer": ADAMW, "scheduler": scheduler}, None)
    _, *lines, remedy = str(error.value).splitlines()
    paths = ["gradient_clipping", *RATES, *(f"scheduler.params.{k}" for k in scheduler["params"])]
    told = "'auto' is filled in by the Hugging Face Trainer; here you write its value"
    assert sorted(lines) == sorted(f"  {path}: {told}" for path in paths)
    assert remedy.endswith("...})"), remedy


def test_a_bad_value_for_auto_is_told_in_one_line():
    with pytest.raises(ValueError) as error:
        of({"gradient_accumulation_steps": AUTO}, {"gradient_accumulation_steps": 0})
    _, *lines, _ = str(error.value).splitlines()
    assert lines == ["  gradient_accumulation_steps: 0 is no positive int"]
