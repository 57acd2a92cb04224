"""Keys of a DeepSpeed configuration without a transform: those to ignore, and replacements for the others."""

from __future__ import annotations

# By block: how DeepSpeed runs, and not what it computes. They have no effect here.
TUNING = {
    "": {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"}
    | {"zero_force_ds_cpu_optimizer"},
    "zero_optimization": {"overlap_comm", "reduce_bucket_size", "contiguous_gradients", "allgather_bucket_size"}
    | {"allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size", "ignore_unused_parameters"}
    | {"stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"}
    | {"stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"}
    | {"stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold"}
    | {"stage3_model_persistence_threshold", "stage3_use_all_reduce_for_fetch_params", "elastic_checkpoint"}
    | {
        "load_from_fp32_weights",
        "use_multi_rank_bucket_allreduce",
        "memory_efficient_linear",
        "log_trace_cache_warnings",
    },
    "zero_optimization.offload_optimizer": {"pin_memory", "buffer_count", "fast_init", "pipeline_read", "ratio"}
    | {"pipeline_write", "nvme_path", "max_in_cpu"},
    # Beside "device": "none", as in many templates.
    "zero_optimization.offload_param": {"pin_memory", "buffer_count", "buffer_size", "nvme_path", "max_in_cpu"},
    "fp16": {"auto_cast"},
    "bf16": {"immediate_grad_update"},
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
    "activation_checkpointing": "torch.utils.checkpoint.checkpoint in the model",
    "zero_optimization.offload_param": "{'device': 'none'}: parameters are sharded, gathered on use, and not offloaded",
    "zero_optimization.zero_quantized_weights": "precision(param_dtype=torch.bfloat16): gathered in 16 bits, not 8",
    "zero_optimization.zero_quantized_nontrainable_weights": "false: parameters are gathered as the model sees them",
    "zero_optimization.zero_quantized_gradients": "communication_data_type: 'bf16', for sums the narrowest",
    "zero_optimization.zero_hpz_partition_size": HIERARCHY,
    "zero_optimization.mics_shard_size": HYBRID,
    "zero_optimization.mics_hierarchical_params_gather": "false",
    "zero_optimization.zenflow": "zero_optimization.offload_optimizer: {'device': 'cpu'}",
    "comms_logger": "torch.profiler, whose trace shows every collective",
    "aio": "{'device': 'cpu'} in offload_optimizer: nothing is kept on a disk, so nothing reads one",
    "elasticity": "zf.save and zf.load, between any numbers of ranks",
    "autotuning": "zf.plan(tx, params, world_size), the bytes of a pipeline beforehand",
    "curriculum_learning": "a sampler of your own",
    "compression_training": "a view of your own: docs/writing-a-transform.md",
    "quantize_training": "a view of your own: docs/writing-a-transform.md",
    "eigenvalue": "zf.curvature.max_eigenvalue(loss_fn, tx, state, *batch)",
    "hybrid_engine": "with opt.gathered(): model.generate(...)",
    "tensor_parallel": "torch.distributed.tensor.parallel on another axis of the mesh",
    "nebula": "zf.save and zf.load",
    "comet": "opt.metrics, a dict of numbers after each step",
    "sparse_gradients": "dense gradients: nn.Embedding(..., sparse=False)",
    "disable_allgather": "false",
    "seq_parallel_communication_data_type": "communication_data_type, of gradients",
    "dataloader_drop_last": "drop_last of your DataLoader",
    "use_data_before_expert_parallel_": "false",
    "vocabulary_size": "nothing: it was for a check",
    "graph_harvesting": "torch.compile on the model",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer: {'device': 'cpu'}",
    "progressive_layer_drop": "zf.layer_drop, with zf.schedules.layer_keep(theta, gamma)",
    "flops_profiler": "zf.profile(opt)",
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
