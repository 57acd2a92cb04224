"""Keys of a DeepSpeed configuration without a transform: those to ignore, and what to write for the others."""

from __future__ import annotations

from difflib import get_close_matches

# Settings of stage 3 alone.
STAGE_3 = (
    *("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"),
    *("gather_16bit_weights_on_model_save", "module_granularity_threshold", "model_persistence_threshold"),
    "use_all_reduce_for_fetch_params",
)

# By block: how DeepSpeed runs, and not what it computes. They have no effect here.
TUNING = {
    "": {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer", "prescale_gradients", "gradient_predivide_factor", "vocabulary_size"}
    | {"disable_python_gc", "log_level", "disable_allgather", "ddp_bf16"},
    "zero_optimization": {"overlap_comm", "reduce_bucket_size", "contiguous_gradients", "allgather_bucket_size"}
    | {"allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size", "ignore_unused_parameters"}
    | {"stage3_gather_fp16_weights_on_model_save", "stage3_allgather_sequential", "elastic_checkpoint"}
    | {"cpu_offload_use_pin_memory", "load_from_fp32_weights", "use_multi_rank_bucket_allreduce", "legacy_stage1"}
    | {"memory_efficient_linear", "log_trace_cache_warnings", "pipeline_loading_checkpoint", "override_module_apply"}
    | {"parameter_alignment", "enable_sanity_checks", "allgather_sequential"}
    # Each with the prefix that it has in most files, and without.
    | {f"{prefix}{name}" for prefix in ("stage3_", "") for name in STAGE_3},
    "zero_optimization.offload_optimizer": {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "ratio"}
    | {"pipeline_write", "nvme_path", "max_in_cpu", "pipeline"},
    # Beside "device": "none", as in many templates.
    "zero_optimization.offload_param": {"pin_memory", "buffer_count", "buffer_size", "nvme_path", "max_in_cpu"},
    "fp16": {"auto_cast"},
    "bf16": {"immediate_grad_update"},
}

# Blocks that change no number of a training: what to write yourself, if anything.
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

# By path: what to write instead.
REPLACEMENTS = {
    "amp": "torch.autocast around the forward, with zf.scale_loss() for fp16",
    "zero_optimization.offload_param": "{'device': 'none'}: parameters are sharded, gathered on use, and not offloaded",
    "zero_optimization.zero_quantized_weights": "precision(param_dtype=torch.bfloat16): gathered in 16 bits, not 8",
    "zero_optimization.zero_quantized_nontrainable_weights": "false: parameters are gathered as the model sees them",
    "zero_optimization.zero_quantized_gradients": "communication_data_type: 'bf16', for sums the narrowest",
    "zero_optimization.zero_hpz_partition_size": HIERARCHY,
    "zero_optimization.mics_shard_size": HYBRID,
    "zero_optimization.mics_hierarchical_params_gather": "false",
    "zero_optimization.zenflow": "zero_optimization.offload_optimizer: {'device': 'cpu'}",
    "elasticity": "zf.save and zf.load, between any numbers of ranks",
    "curriculum_learning": "a sampler of your own",
    "compression_training": "a view of your own: docs/writing-a-transform.md",
    "quantize_training": "a view of your own: docs/writing-a-transform.md",
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
    "sparse_attention": "torch.nn.attention.flex_attention",
    "zero_optimization.cpu_offload_params": "{'device': 'none'} in offload_param: parameters are not offloaded",
    "zero_optimization.cpu_offload_param": "{'device': 'none'} in offload_param: parameters are not offloaded",
    "zero_optimization.zeropp_loco_param": "communication_data_type: 'bf16', for sums the narrowest",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "zf.muon, chained behind",
    "data_types.param_dtype": "bf16 or fp16: {'enabled': true}",
    "data_types.buffer_dtype": "zf.precision(buffer_dtype=...)",
    "data_types.keep_in_fp32_modules": "a view of your own: docs/writing-a-transform.md",
    "gradient_allreduce_op": "'mean', and a loss multiplied by the number of ranks for the sum",
    "pipeline": "a pipeline of your own: stages of a model are not made here",
    "sequence_parallel_size": "sequences that several ranks share: docs/sequence-parallel.md",
    "expert_parallel": "experts of your own, on another axis of the mesh",
    "weight_quantization": "a view of your own: docs/writing-a-transform.md",
    "datastates_ckpt": "zf.save and zf.load",
}

# By path of REPLACEMENTS: the values besides null, false and "none" by which DeepSpeed does nothing.
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
    "zero_optimization.offload_optimizer.device",
    *("optimizer.type", "optimizer.params", "optimizer.legacy_fusion", "scheduler.type", "scheduler.params"),
    *(f"{kind}.{key}" for kind in ("fp16", "bf16") for key in ("enabled", f"{kind}_master_weights_and_grads")),
    *("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis"),
    *("fp16.min_loss_scale", "bf16.bf16_optimizer_states", "bf16.check_grad_overflow"),
    *("torch_autocast.enabled", "torch_autocast.dtype"),
)


def nearest(path: str) -> str:
    """A hint at the known key that an unknown path is meant to be, or "".

    >>> nearest("zero_optimization.offload_parm"), nearest("overlap_comm"), nearest("spam")
    ('; did you mean zero_optimization.offload_param?', '; did you mean zero_optimization.overlap_comm?', '')
    """
    tuned = [f"{block}.{name}" if block else name for block, names in TUNING.items() for name in sorted(names)]
    known = [*TAKEN, *ASIDE, *REPLACEMENTS, *tuned]
    last = path.rpartition(".")[2]
    elsewhere = [p for p in known if p.rpartition(".")[2] == last and last != "enabled"]
    close = [x for x in elsewhere if x != path] or get_close_matches(path, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
