"""Configurations as projects publish them, with "auto" where a Trainer or the caller fills values in.

Each becomes its chain, or each refused key is told what to write.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import zerofn as zf

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
AUTO = "auto"
SIZES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
FP16 = {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
FP16 |= {"min_loss_scale": 1}
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)}
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)}
DECAY = {"type": "WarmupDecayLR", "params": WARMUP["params"] | {"total_num_steps": AUTO}}
ZERO2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True}
ZERO2 |= {"reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}
ZERO3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
ZERO3 |= {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
ZERO3 |= {"stage3_gather_16bit_weights_on_model_save": True}
ZERO3 |= dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), AUTO
)
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
TAIL = {"steps_per_print": 2000, "wall_clock_breakdown": False, "gradient_clipping": AUTO, **SIZES}
# Activation checkpointing as many write it out, with everything off or with what their models use.
RECOMPUTED = {"partition_activations": True, "cpu_checkpointing": False, "contiguous_memory_optimization": False}
RECOMPUTED |= {"number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False}


@dataclass
class Arguments:
    """The fields of `TrainingArguments` that are read, with its defaults."""

    learning_rate: float = 5e-5
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 4
    max_grad_norm: float = 1.0
    max_steps: int = 100
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    fp16: bool = False
    bf16: bool = True
    warmup_steps: float = 10
    warmup_ratio: float | None = None


def schedule(block: dict[str, Any], lr: float = 5e-5) -> Any:
    """The schedule of a `scheduler` block without any "auto"."""
    tx = quiet({"optimizer": {"type": "AdamW", "params": {"lr": lr}}, "scheduler": block})
    return tx.parts[-1].config["lr"]


def quiet(config: dict[str, Any], **given: Any) -> zf.Transform:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zf.from_deepspeed(config, **given)


CLIP, MIXED = zf.clip_by_global_norm(1.0), zf.precision(param_dtype=BF16, store_dtype=F32)
HALF = zf.precision(param_dtype=F16, store_dtype=F32)
SCALE = {"growth_interval": 1000, "hysteresis": 2, "min_scale": 1.0}
MINE = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RATES = {f"optimizer.params.{k}": v for k, v in MINE.items()}
AUTO_TOLD = "'auto' is filled in by the Hugging Face Trainer; here you write its value"
COEFFICIENTS = {"bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01}
WARM = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10}
# By where it is from: a configuration, what else is given, and the chain that one would write.
TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], list[zf.Transform]]] = {
    "trainer, stage 2": (
        {"fp16": FP16, "optimizer": OPTIMIZER, "scheduler": WARMUP, "zero_optimization": ZERO2 | CPU, **TAIL},
        {"values": Arguments(fp16=True, bf16=False)},
        [
            *(zf.reduce_scatter(), HALF, zf.scale_loss("dynamic", init_scale=2.0**16, **SCALE), zf.accumulate(4)),
            *(CLIP, zf.offload(zf.adamw(schedule({"type": "WarmupLR", "params": WARM}), weight_decay=0.1))),
        ],
    ),
    "trainer, stage 3": (
        {"fp16": FP16, "bf16": {"enabled": AUTO}, "optimizer": OPTIMIZER, "scheduler": DECAY}
        | {"zero_optimization": ZERO3 | CPU | {"offload_param": {"device": "none", "pin_memory": True}}, **TAIL},
        {"values": Arguments(max_grad_norm=0.5)},
        [
            *(zf.shard(), MIXED, zf.accumulate(4), zf.clip_by_global_norm(0.5)),
            zf.offload(
                zf.adamw(
                    schedule({"type": "WarmupDecayLR", "params": WARM | {"total_num_steps": 100}}), weight_decay=0.1
                )
            ),
        ],
    ),
    "trainer with its own optimizer": (
        {"bf16": {"enabled": AUTO}, "zero_optimization": ZERO3, **TAIL},
        {"values": Arguments(), "optimizer": zf.adamw},
        [zf.shard(), MIXED, zf.accumulate(4), CLIP, zf.adamw()],
    ),
    "fine-tuning of a language model, stage 0": (
        {**SIZES, "gradient_clipping": AUTO, "zero_allow_untested_optimizer": True, "fp16": FP16}
        | {"bf16": {"enabled": AUTO}, "zero_optimization": ZERO2 | {"stage": 0, "round_robin_gradients": True}},
        {"values": Arguments(), "optimizer": zf.adamw},
        [MIXED, zf.accumulate(4), zf.all_reduce(), CLIP, zf.adamw()],
    ),
    "fine-tuning with an adapter, stage 1": (
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": AUTO}}
        | {"fp16": {**FP16, "auto_cast": False}, "compile": {"disable": False, "backend": "inductor"}, **TAIL},
        {"values": Arguments(), "optimizer": functools.partial(zf.adamw, weight_decay=0.0)},
        [MIXED, zf.accumulate(4), zf.reduce_scatter(), CLIP, zf.adamw(weight_decay=0.0)],
    ),
    "an instruction-tuned model, stage 3": (
        {"bf16": {"enabled": True}, "zero_optimization": ZERO3, "optimizer": OPTIMIZER, "steps_per_print": 5}
        | {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": AUTO, "gradient_clipping": 1.0},
        {"values": Arguments()},
        [zf.shard(), MIXED, zf.accumulate(4), CLIP, zf.adamw(5e-5, weight_decay=0.1)],
    ),
    "images": (
        {"train_batch_size": 16, "steps_per_print": 2000, "prescale_gradients": False, "gradient_clipping": 1.0}
        | {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "weight_decay": 3e-7}}}
        | {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001}}}
        | {"fp16": {**FP16, "enabled": True, "loss_scale_window": 500, "initial_scale_power": 15}}
        | {"zero_optimization": {"stage": 0, "cpu_offload": False, "reduce_bucket_size": 50000000}},
        {},
        [
            *(HALF, zf.scale_loss("dynamic", init_scale=2.0**15, **(SCALE | {"growth_interval": 500}))),
            *(zf.all_reduce(), CLIP),
            zf.adamw(
                schedule({"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001}}),
                betas=(0.8, 0.999),
                weight_decay=3e-7,
            ),
        ],
    ),
    "the older name of offloading": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}}
        | {"optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "gradient_clipping": 1.0},
        {},
        [zf.reduce_scatter(), CLIP, zf.offload(zf.adamw(0.00015, weight_decay=0.0))],
    ),
    "a first tour": (
        {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
        | {
            "fp16": {"enabled": True, "opt_level": "O3"},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        },
        {},
        [
            HALF,
            zf.scale_loss("dynamic", init_scale=2.0**16, **SCALE),
            zf.reduce_scatter(),
            CLIP,
            zf.offload(zf.adamw(1e-4, weight_decay=0.0)),
        ],
    ),
    "a GPT of a parallel trainer": (
        {"train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 1, "gradient_clipping": 1.0}
        | {"zero_optimization": {"stage": 2}, "activation_checkpointing": RECOMPUTED, "wall_clock_breakdown": False}
        | {"optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "zero_allow_untested_optimizer": False},
        {},
        [zf.reduce_scatter(), CLIP, zf.adamw(0.00015, weight_decay=0.0)],
    ),
    "bf16 with gradients in fp32": (
        {"bf16": {"enabled": True, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        | {"communication_data_type": "fp32", "gradient_clipping": 1.0, "dump_state": True}
        | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "adam_w_mode": True}}},
        {},
        [
            zf.precision(param_dtype=BF16, store_dtype=F32, reduce_dtype=F32, grad_dtype=F32),
            *(zf.all_reduce(), CLIP, zf.adamw(1e-5, weight_decay=0.0)),
        ],
    ),
    "the older name of bf16": (
        {"bfloat16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}},
        {"optimizer": zf.adamw},
        [MIXED, zf.reduce_scatter(), CLIP, zf.adamw()],
    ),
    "a video model: a scheduler, and no optimizer": (
        {"zero_allow_untested_optimizer": True, "zero_optimization": ZERO2 | CPU, "gradient_clipping": 1.0}
        | {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, **WARM}}}
        | {"activation_checkpointing": dict.fromkeys(RECOMPUTED, False), "steps_per_print": 100}
        | {"train_micro_batch_size_per_gpu": 8},
        {"optimizer": zf.adamw},
        [zf.reduce_scatter(), CLIP, zf.offload(zf.adamw(schedule({"type": "WarmupLR", "params": WARM})))],
    ),
    "a cycle without momentum": (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "gradient_clipping": 0}
        | {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000}
                | {"cycle_momentum": False, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
            }
        },
        {},
        [
            zf.all_reduce(),
            zf.adamw(
                schedule(
                    {
                        "type": "OneCycle",
                        "params": {"cycle_min_lr": 0.004, "cycle_max_lr": 0.015, "cycle_first_step_size": 1000}
                        | {"cycle_momentum": False},
                    }
                ),
                weight_decay=0.0,
            ),
        ],
    ),
    "logs and profiles of every kind": (
        {"gradient_clipping": 1.0, "comms_config": {"verbose": True}, "monitor_config": {"tensorboard": True}}
        | {"tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "run"}, "memory_breakdown": True}
        | {"csv_monitor": {"enabled": True}, "wandb": {"enabled": True, "project": "p"}, "comet": {"enabled": True}}
        | {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1}, "timers": {"throughput": {}}}
        | {"comms_logger": {"enabled": True, "prof_ops": []}, "aio": {"block_size": 1048576, "queue_depth": 8}}
        | {"checkpoint": {"tag_validation": "Warn"}, "_comment": "of ours", "prescale_gradients": True}
        | {"gradient_predivide_factor": 8, "autotuning": {"enabled": False, "fast": True}},
        {"optimizer": zf.adamw},
        [zf.all_reduce(), CLIP, zf.adamw()],
    ),
    "BERT with LAMB, and attention of blocks": (
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "prescale_gradients": False}
        | {"optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, **COEFFICIENTS}}}
        | {"gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 0}}
        | {"sparse_attention": {"mode": "fixed", "block": 16, "different_layout_per_head": True}},
        {},
        [
            *(HALF, zf.scale_loss("dynamic", init_scale=2.0**16, **SCALE), zf.accumulate(1024), zf.all_reduce(), CLIP),
            zf.lamb(11e-3, eps=1e-8, weight_decay=0.01, bias_correction=False, ratio_bounds=(0.01, 0.3)),
        ],
    ),
    "questions about texts: Adam without bias correction": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "steps_per_print": 10, "fp16": {"enabled": True}}
        | {
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-5, "max_grad_norm": 0.5, "weight_decay": 0.0, "bias_correction": False},
            }
        },
        {},
        [
            *(HALF, zf.scale_loss("dynamic", init_scale=2.0**16, **SCALE), zf.accumulate(4), zf.all_reduce()),
            *(zf.clip_by_global_norm(0.5), zf.adamw(3e-5, weight_decay=0.0, bias_correction=False)),
        ],
    ),
    "parameters and states on a disk": (
        {"aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": False, "thread_count": 2}}
        | {
            "zero_optimization": {
                **{"stage": 3, "stage3_param_persitance_threshold": 1e5, "stage3_max_live_parameters": 1e9},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 4, "pipeline_read": False},
                "offload_param": {"device": "nvme", "nvme_path": "/x", "max_in_cpu": 1, "pin_memory": True},
            },
            "gradient_clipping": 1.0,
        },
        {"optimizer": zf.adamw},
        [zf.shard(), CLIP, zf.offload(zf.adamw())],
    ),
    "fine-tuning, stage 3, with all on the host": (
        {**SIZES, "gradient_clipping": AUTO, "fp16": FP16, "bf16": {"enabled": AUTO}}
        | {"zero_optimization": ZERO3 | CPU | {"offload_param": {"device": "cpu", "pin_memory": True}}}
        | {"monitor_config": {"enabled": True, "tag": "x", "csv_monitor": {"enabled": False}}},
        # fp16 needs no value, since bf16 is enabled.
        {
            "values": {"bf16.enabled": True, "gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
            "optimizer": zf.adamw,
        },
        [zf.shard(), MIXED, zf.accumulate(2), CLIP, zf.offload(zf.adamw())],
    ),
    # Values by path, as a dict, where there is no Trainer.
    "values by path, and no clipping": (
        {"zero_optimization": ZERO3, "optimizer": OPTIMIZER, "gradient_clipping": AUTO, "fp16": FP16}
        | {"bf16": {"enabled": AUTO}},
        {"values": {**RATES, "gradient_clipping": 0, "fp16.enabled": True, "bf16.enabled": False}},
        [zf.shard(), HALF, zf.scale_loss("dynamic", init_scale=2.0**16, **SCALE), zf.adamw(**MINE)],
    ),
    "nested values": (
        {"zero_optimization": ZERO3, "optimizer": OPTIMIZER, "gradient_clipping": 1.0},
        {"values": {"optimizer": {"params": MINE}}},
        [zf.shard(), CLIP, zf.adamw(**MINE)],
    ),
    "batch sizes that say how many micro-batches": (
        {**SIZES, "optimizer": OPTIMIZER, "gradient_clipping": 1.0},
        {"values": {**RATES, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 8}},
        [zf.accumulate(3), zf.all_reduce(), CLIP, zf.adamw(**MINE)],
    ),
    "what is switched off": (
        {"optimizer": OPTIMIZER, "gradient_clipping": 1.0, "elasticity": {"enabled": False}}
        | {"flops_profiler": {"enabled": False, "profile_step": 1}, "comms_logger": {"enabled": False, "verbose": True}}
        | {"curriculum_learning": {"enabled": False, "max_difficulty": 7}, "tensorboard": {"enabled": False}},
        {"values": RATES},
        [zf.all_reduce(), CLIP, zf.adamw(**MINE)],
    ),
    "stage 3 without the prefix, and switched-off parts": (
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True, "prefetch_bucket_size": 1e7}}
        | {"tensor_parallel": {"autotp_size": 1}, "amp": {"enabled": False, "opt_level": "O1"}}
        | {"elasticity": {"enabled": False}, "gradient_allreduce_op": "mean", "gradient_clipping": 1.0},
        {"optimizer": zf.adamw},
        [zf.shard(), CLIP, zf.adamw()],
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_published_is_taken_as_it_is_meant(name: str):
    config, given, parts = TAKEN[name]
    assert quiet(config, **given) == zf.chain(*parts)


NO_SCHEDULE = "scheduler: needs an optimizer to set the lr of: from_deepspeed(config, optimizer=zf.adamw)"
# By where it is from: a configuration, what else is given, and every line of the refusal, by its beginning.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    **{
        f"an auto without a value, {kind['type']}": (
            {"gradient_clipping": AUTO, "optimizer": OPTIMIZER, "scheduler": kind, "gradient_accumulation_steps": AUTO},
            {},
            sorted(
                f"{path}: {AUTO_TOLD}"
                for path in (
                    *("gradient_accumulation_steps", "gradient_clipping", *RATES),
                    *(f"scheduler.params.{k}" for k in kind["params"]),
                )
            ),
        )
        for kind in (WARMUP, DECAY)
    },
    "a value for nothing": (
        {"gradient_clipping": 1.0},
        {"values": {"gradient_clipping": 2.0}},
        ["gradient_clipping: values={'gradient_clipping': ...}, but the configuration has no 'auto' there"],
    ),
    "bad values for auto": (
        {"gradient_clipping": AUTO, "gradient_accumulation_steps": AUTO},
        {"values": {"gradient_clipping": -1.0, "gradient_accumulation_steps": 0}},
        ["gradient_accumulation_steps: 0 is no positive int", "gradient_clipping: -1.0"],
    ),
    "a scheduler, and no optimizer": (
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, **WARM}}, "fp16": {"enabled": True}},
        {},
        [NO_SCHEDULE],
    ),
    "1-bit Adam": (
        {"train_micro_batch_size_per_gpu": 16, "steps_per_print": 100, "fp16": {"enabled": True, "loss_scale": 0}}
        | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False}}}
        | {"scheduler": {"type": "WarmupDecayLR", "params": WARM | {"total_num_steps": 100}}},
        {},
        ["optimizer.type: 'OneBitAdam'; use Adam, AdamW, Lamb or SGD, or AdamW itself: gradients are sent whole here"],
    ),
    "BERT with Adam": (
        {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0, "progressive_layer_drop": {"enabled": True}}
        | {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": False, "max_grad_norm": 1.0}}}
        | {"sparse_attention": {"mode": "fixed", "block": 16}},
        {},
        [
            "progressive_layer_drop.enabled: not supported; use zf.layer_drop",
        ],
    ),
    "weights in 8 bits, over two levels": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}}
        | {"bf16": {"enabled": True}},
        {},
        [
            "zero_optimization.zero_hpz_partition_size: not supported; use zf.shard(mesh['node'])",
            "zero_optimization.zero_quantized_weights: not supported; use zf.shard(wire='int8')",
        ],
    ),
    "a chosen few updated on the host": (
        {"zero_optimization": {"stage": 2, **CPU, "zenflow": {"topk_ratio": 0.1, "update_interval": 4}}}
        | {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}},
        {},
        [
            "zero_optimization.zenflow.topk_ratio: not supported; use zero_optimization.offload_optimizer",
            "zero_optimization.zenflow.update_interval: not supported; use zero_optimization.offload_optimizer",
        ],
    ),
    "tensor parallelism": (
        {"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}},
        {},
        ["tensor_parallel.autotp_size: not supported; use torch.distributed.tensor.parallel on another axis"],
    ),
    "keys at a wrong place, misspelt, and of another program": (
        {"overlap_comm": True, "train_micro_batch_size_per_gpus": 1, "zero_optimisation": {"stage": 2}, "student": {}}
        | {"fp16": {"enable": True}, "data": "x.bin", "bf16": {"enabled": False}},
        {},
        [
            "data: unknown",
            "fp16.enable: unknown; did you mean fp16.enabled?",
            "overlap_comm: unknown; did you mean zero_optimization.overlap_comm?",
            "train_micro_batch_size_per_gpus: unknown; did you mean train_micro_batch_size_per_gpu?",
            "zero_optimisation.stage: unknown; did you mean zero_optimization.stage?",
        ],
    ),
    "a cycle of the momentum": (
        {"optimizer": {"type": "Adam"}}
        | {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_min_mom": 0.85},
            }
        },
        {},
        ["scheduler.params.cycle_momentum: betas are constant here"],
    ),
    "a misspelt scheduler": (
        {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLr", "params": {"warmup_num_steps": 3}}},
        {},
        ["scheduler.type: 'WarmupLr' is none of WarmupLR, "],
    ),
    "arguments that say something else": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_accumulation_steps": 2},
        {"values": Arguments()},
        [
            "gradient_accumulation_steps: 2, but gradient_accumulation_steps of the TrainingArguments says 4",
            "optimizer.params.lr: 0.001, but learning_rate of the TrainingArguments says 5e-05; write 'auto'",
        ],
    ),
    "arguments that do not say how many steps": (
        {"optimizer": OPTIMIZER, "scheduler": DECAY},
        {"values": Arguments(max_steps=-1, warmup_steps=0.1)},
        [
            "scheduler.params.total_num_steps: 'auto'; the Trainer takes it from the length of the data; set max_steps",
            "scheduler.params.warmup_num_steps: 'auto'; it is a share of max_steps, which is not set; set max_steps",
        ],
    ),
    "two optimizers": (
        {"optimizer": {"type": "AdamW"}},
        {"optimizer": zf.adamw},
        ["optimizer.type: 'AdamW', and optimizer= is given too; leave one of them out"],
    ),
    "sums, boundaries, and a norm that is not computed": (
        {"gradient_allreduce_op": "sum", "managed_gradient_accumulation": False}
        | {"zero_optimization": {"compute_grad_norm": False, "misspelt_param": True}},
        {},
        [
            "gradient_allreduce_op: not supported; use 'mean'",
            "managed_gradient_accumulation: use true, and call opt.set_boundary(...)",
            "zero_optimization.compute_grad_norm: clipping needs the norm; write gradient_clipping: 0",
            "zero_optimization.misspelt_param: unknown",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_pipeline_is_told_key_by_key(name: str):
    config, given, told = REFUSED[name]
    with pytest.raises(ValueError) as error:
        quiet(config, **given)
    lines = sorted(line.strip() for line in str(error.value).splitlines()[1:-1])
    assert len(lines) == len(told), "\n".join(lines)
    assert all(line.startswith(want) for line, want in zip(lines, told, strict=True)), "\n".join(lines)


def test_only_what_is_asked_for_is_in_the_remedy():
    with pytest.raises(ValueError) as error:
        quiet({"gradient_clipping": AUTO})
    assert str(error.value).rstrip().endswith("write: from_deepspeed(config, values={'gradient_clipping': ...})")


@pytest.mark.parametrize("kind", [WARMUP, DECAY], ids=["warmup", "decay"])
def test_schedules_are_filled_in(kind: dict[str, Any]):
    more = {"total_num_steps": 20} if kind is DECAY else {}
    values = {f"scheduler.params.{k}": v for k, v in (WARM | {"warmup_max_lr": 3e-4} | more).items()}
    tx = quiet({"optimizer": OPTIMIZER, "scheduler": kind, "gradient_clipping": 0}, values={**RATES, **values})
    wanted = schedule({**kind, "params": WARM | {"warmup_max_lr": 3e-4} | more}, 3e-4)
    assert tx.parts[-1].config["lr"] == wanted
    rates = [wanted(i) for i in (0, 5, 11, 20)]
    assert rates[2] == 3e-4 and len(set(rates)) > 2


def test_one_warning_names_what_changes_no_number():
    config, given, _ = TAKEN["logs and profiles of every kind"]
    with pytest.warns(UserWarning) as told:
        zf.from_deepspeed(config, **given)
    (text,) = [str(x.message) for x in told]
    for block in ("tensorboard", "csv_monitor", "wandb", "comet", "monitor_config"):
        assert f"{block} is yours to write: opt.metrics, a dict of numbers after each step." in text
    for words in ("flops_profiler is yours to write: zf.profile(opt).", "checkpoint is yours to write: zf.save"):
        assert words in text
    assert "aio.block_size" in text and "autotuning" not in text and "_comment" not in text
    assert told[0].filename == __file__


def test_what_stays_on_the_device_or_in_memory_is_told():
    config, given, _ = TAKEN["parameters and states on a disk"]
    with pytest.warns(UserWarning) as told:
        zf.from_deepspeed(config, **given)
    (text,) = [str(x.message) for x in told]
    assert "offload_optimizer.device: 'nvme' is taken as 'cpu'" in text
    assert "zero_optimization.offload_param: each rank keeps its shard of the parameters on the device" in text
    for config in ({"cpu_offload_params": True}, {"stage": 3, "offload_param": {"device": "cpu"}}):
        with pytest.warns(UserWarning, match="offload_param: each rank keeps its shard"):
            zf.from_deepspeed({"zero_optimization": config})


def by_hand(kind: str, params: dict[str, Any], p: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """DeepSpeed's arithmetic on one leaf: its Adam decouples the decay, its LAMB corrects the length of the step."""
    first, second, decay = 0.9, 0.999, params["weight_decay"]
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g**2
        c1, c2 = (1 - first**t, 1 - second**t) if params["bias_correction"] else (1.0, 1.0)
        if kind == "Adam":
            p = p - params["lr"] * (m / c1 / ((v / c2).sqrt() + 1e-8) + decay * p)
        else:
            u = m / (v.sqrt() + 1e-8) + decay * p
            coefficient = (p.norm() / u.norm()).clamp(params["min_coeff"], params["max_coeff"])
            p = p - params["lr"] * c2**0.5 / c1 * coefficient * u
    return p


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("kind", ["Adam", "Lamb, low", "Lamb, between", "Lamb, high"])
def test_the_numbers_of_its_optimizers(kind: str, corrected: bool):
    bounds = {"low": (0.001, 0.002), "between": (0.01, 100.0), "high": (20.0, 30.0)}.get(kind.split()[-1])
    params = {"lr": 0.1, "weight_decay": 0.1, "bias_correction": corrected}
    params |= {} if bounds is None else {"min_coeff": bounds[0], "max_coeff": bounds[1]}
    kind = kind.split(",")[0]
    tx = zf.from_deepspeed({"optimizer": {"type": kind, "params": params}, "gradient_clipping": 0})
    draw = torch.Generator().manual_seed(0)
    p, *gradients = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(6))
    state = zf.init(tx, {"w": p})
    for g in gradients:
        state, _ = zf.update(tx, {"w": g}, state)
    want = by_hand(kind, params, p, gradients)
    assert (want - p).abs().max() > 1e-5
    torch.testing.assert_close(state.params["w"] - p, want - p, rtol=1e-9, atol=1e-12)


def test_the_shares_of_arguments_become_steps():
    for args in (
        Arguments(warmup_steps=0.25),
        Arguments(warmup_steps=0, warmup_ratio=0.25),
        Arguments(warmup_steps=25),
    ):
        tx = quiet({"optimizer": OPTIMIZER, "scheduler": WARMUP}, values=args)
        params = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 25}
        assert tx.parts[-1].config["lr"] == schedule({"type": "WarmupLR", "params": params})


@pytest.mark.integrations
def test_the_arguments_of_the_trainer_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        *(str(tmp_path),),
        **{"use_cpu": True, "bf16": True, "learning_rate": 5e-5, "weight_decay": 0.1, "max_steps": 100},
        **{"warmup_steps": 10, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5, "report_to": "none"},
    )
    config, _, parts = TAKEN["trainer, stage 3"]
    assert quiet(config, values=args) == zf.chain(*parts)
