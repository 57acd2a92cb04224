"""How messages are built: the wrong code, why it is wrong, the right code; and all bad leaves in one message."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Any

# Keywords of optax, DeepSpeed, FSDP2 and the Hugging Face Trainer, and what they are here.
SYNONYMS = {
    "learning_rate": "lr",
    "b1": "betas",
    "b2": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "wd": "weight_decay",
    "mu_dtype": "state_dtype",
    "max_grad_norm": "max_norm",
    "clip_norm": "max_norm",
    "every_k_schedule": "every",
    "gradient_accumulation_steps": "every",
    "steps": "every",
    "loss_scale": "scale",
    "dtype": "param_dtype",
    "compute_dtype": "param_dtype",
    "process_group": "mesh",
    "group": "mesh",
}


def explain(wrong: str, why: str, right: str) -> str:
    """Write a message: the wrong code, why it is wrong, the right code.

    Examples:
        >>> print(explain("adam(lr=-1)", "a learning rate is not negative", "adam(lr=1e-3)"))
        adam(lr=-1)
          why:   a learning rate is not negative
          write: adam(lr=1e-3)
    """
    indent = "\n         "
    return f"{wrong}\n  why:   {why.replace(chr(10), indent)}\n  write: {right.replace(chr(10), indent)}"


# Names of optax, torch, DeepSpeed and FSDP2 that this package has not under that name, and what to write here.
_FORMULA = "your formula by @zf.leafwise(optimizer=True): docs/writing-a-transform.md"
_LEAF = "a function of one tensor by @zf.leafwise: docs/writing-a-transform.md"
_STEP = "any function of the step: zf.adamw(lr=lambda step: ...)"
_LOSS = "the loss of torch.nn.functional"
_PER_EXAMPLE = "torch.func.vmap(torch.func.grad(loss)): examples/research/dp_sgd.py"
_SEARCH = "torch.optim.LBFGS(params, line_search_fn='strong_wolfe') and its step(closure), on one process"
_RECORD = "zf.Transform, a record of functions: docs/extend/tree-numbers.md"
OTHER_NAMES = {
    # Chains and steps.
    "apply_updates": "zf.update(tx, grads, state): the next state has the new parameters",
    "value_and_grad_from_state": "zf.vjp(loss_fn, tx, state, *batch), or zf.make_step(loss_fn, tx)",
    "value_and_grad": "zf.vjp(loss_fn, tx, state, *batch), or zf.make_step(loss_fn, tx)",
    "grad": "torch.func.grad(zf.bind(loss_fn, tx, state))(state.params, *batch)",
    "GradientTransformation": _RECORD,
    "GradientTransformationExtraArgs": _RECORD,
    "TransformInitFn": _RECORD,
    "TransformUpdateFn": _RECORD,
    "TransformUpdateExtraArgsFn": _RECORD,
    "with_extra_args_support": _RECORD,
    "init_empty_state": _RECORD,
    "stateless": _LEAF,
    "stateless_with_tree_map": _LEAF,
    "identity": "nothing: leave it out of the chain",
    "flatten": "nothing: leaves are updated in buckets",
    "named_chain": "zf.chain(...): state.transforms has the transforms' names",
    "multi_transform": "zf.partition(transforms, labels)",
    "MaskedNode": "zf.masked(transform, mask)",
    "selective_transform": "zf.masked(transform, mask)",
    "freeze": "zf.partition({'train': tx, 'freeze': None}, labels)",
    "set_to_zero": "zf.partition({'train': tx, 'freeze': None}, labels)",
    "MultiSteps": "zf.accumulate(k), in front of the optimizer",
    "ApplyEvery": "zf.accumulate(k), in front of the optimizer",
    "apply_every": "zf.accumulate(k), in front of the optimizer",
    "microbatch": "zf.accumulate(k), in front of the optimizer",
    "microbatching": "zf.accumulate(k), in front of the optimizer",
    "inject_hyperparams": "rate = torch.tensor(1e-3), zf.adamw(lr=rate), and later rate.fill_(1e-4)",
    "inject_stateful_hyperparams": "rate = torch.tensor(1e-3), zf.adamw(lr=rate), and later rate.fill_(1e-4)",
    "incremental_update": "zf.ema(0.999), behind the optimizer",
    "periodic_update": "zf.ema(0.999), behind the optimizer",
    "measure_with_ema": "zf.watch(sums, metrics)",
    "monitor": "zf.watch(sums, metrics)",
    "snapshot": "zf.watch(sums, metrics)",
    # Gradients.
    "scale": "zf.scale_by_lr(lr) for a step; for a factor a function by @zf.leafwise",
    "scale_gradient": "zf.scale_by_lr(lr) for a step; for a factor a function by @zf.leafwise",
    "scale_by_learning_rate": "zf.scale_by_lr(lr)",
    "scale_by_schedule": "zf.scale_by_lr(schedule)",
    "clip": "zf.clip_by_value(1.0)",
    "adaptive_grad_clip": "zf.adaptive_clip(0.01)",
    "clip_by_block_rms": _LEAF,
    "normalize_by_update_norm": "docs/extend/tree-numbers.md: unit_norm",
    "scale_by_sign": _LEAF,
    "scale_by_param_block_norm": _LEAF,
    "scale_by_param_block_rms": _LEAF,
    "per_example_global_norm_clip": _PER_EXAMPLE,
    "per_example_layer_norm_clip": _PER_EXAMPLE,
    "differentially_private_aggregate": _PER_EXAMPLE,
    "dpsgd": _PER_EXAMPLE,
    "apply_if_finite": "zf.skip_nonfinite()",
    "skip_not_finite": "zf.skip_nonfinite()",
    "zero_nans": "zf.skip_nonfinite()",
    "skip_large_updates": "zf.apply_if(tx, condition)",
    "conditionally_mask": "zf.apply_if(tx, condition)",
    "conditionally_transform": "zf.apply_if(tx, condition)",
    "ShouldSkipUpdateFunction": "zf.apply_if(tx, condition)",
    "keep_params_nonnegative": "p.clamp_(min=0) under torch.no_grad(), behind opt.step()",
    # Optimizers.
    "adadelta": "zf.from_torch(torch.optim.Adadelta, lr=1.0)",
    "adagrad": "zf.from_torch(torch.optim.Adagrad, lr=1e-2)",
    "adamax": "zf.from_torch(torch.optim.Adamax, lr=2e-3)",
    "adamaxw": "zf.from_torch(torch.optim.Adamax, lr=2e-3)",
    "amsgrad": "zf.from_torch(torch.optim.Adam, lr=1e-3, amsgrad=True)",
    "nadamw": "zf.nadam(2e-3, decoupled_weight_decay=True)",
    "rprop": "zf.from_torch(torch.optim.Rprop, lr=1e-2)",
    "lbfgs": _SEARCH,
    "sign_sgd": _FORMULA,
    "signum": _FORMULA,
    "fromage": _FORMULA,
    "novograd": _FORMULA,
    "yogi": _FORMULA,
    "sm3": _FORMULA,
    "optimistic_adam": _FORMULA,
    "optimistic_adam_v2": _FORMULA,
    "optimistic_gradient_descent": _FORMULA,
    "momo": "zf.chain(zf.scale_by_momo(), zf.sgd(1.0))",
    "polyak_sgd": "zf.chain(zf.scale_by_polyak(), zf.sgd(1.0))",
    "noisy_sgd": "zf.chain(zf.add_noise(0.01), zf.sgd(0.1))",
    "scale_by_adadelta": "zf.from_torch(torch.optim.Adadelta, lr=1.0)",
    "scale_by_adamax": "zf.from_torch(torch.optim.Adamax, lr=2e-3)",
    "scale_by_amsgrad": "zf.from_torch(torch.optim.Adam, lr=1e-3, amsgrad=True)",
    "scale_by_rss": "zf.from_torch(torch.optim.Adagrad, lr=1e-2)",
    "scale_by_rprop": "zf.from_torch(torch.optim.Rprop, lr=1e-2)",
    "scale_by_rms": "zf.rmsprop(1e-2)",
    "scale_by_stddev": "zf.rmsprop(1e-2, centered=True)",
    "scale_by_lion": "zf.lion(1e-4)",
    "scale_by_adan": "zf.adan(1e-3)",
    "scale_by_belief": "zf.adabelief(1e-3)",
    "scale_by_radam": "zf.radam(1e-3)",
    "scale_by_factored_rms": "zf.adafactor(1e-2)",
    "scale_by_trust_ratio": "zf.lamb(1e-3), or zf.lars(0.1)",
    "scale_by_novograd": _FORMULA,
    "scale_by_yogi": _FORMULA,
    "scale_by_sm3": _FORMULA,
    "scale_by_optimistic_gradient": _FORMULA,
    "scale_by_distance_over_gradients": _FORMULA,
    "scale_by_lbfgs": _SEARCH,
    "scale_by_backtracking_linesearch": "zf.update again with a smaller rate, until the loss falls: docs/optimizers.md",
    "scale_by_zoom_linesearch": _SEARCH,
    "LookaheadParams": "zf.lookahead(tx)",
    # Schedules.
    "constant_schedule": "zf.schedules.constant(1e-3)",
    "linear_schedule": "zf.schedules.linear(1e-3, 0.0, steps)",
    "cosine_decay_schedule": "zf.schedules.cosine(1e-3, steps)",
    "exponential_decay": "zf.schedules.step(1e-3, every, gamma)",
    "warmup_constant_schedule": "zf.schedules.warmup(1e-3, steps)",
    "warmup_cosine_decay_schedule": "zf.schedules.warmup_cosine(1e-3, warmup_steps, steps)",
    "warmup_exponential_decay_schedule": "zf.schedules.Piecewise(before, boundary, after)",
    "join_schedules": "zf.schedules.Piecewise(before, boundary, after)",
    "polynomial_schedule": _STEP,
    "piecewise_constant_schedule": _STEP,
    "piecewise_interpolate_schedule": _STEP,
    "cosine_onecycle_schedule": _STEP,
    "linear_onecycle_schedule": _STEP,
    "sgdr_schedule": _STEP,
    "Schedule": _STEP,
    "StatefulSchedule": _STEP,
    "WrappedSchedule": _STEP,
    # Losses and trees.
    **dict.fromkeys(
        (
            *(
                "convex_kl_divergence",
                "cosine_distance",
                "cosine_similarity",
                "ctc_loss",
                "ctc_loss_with_forward_probs",
            ),
            *(
                "generalized_kl_divergence",
                "hinge_loss",
                "huber_loss",
                "kl_divergence",
                "l2_loss",
                "log_cosh",
                "losses",
            ),
            *("ntxent", "safe_softmax_cross_entropy", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss"),
            *("smooth_labels", "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels", "squared_error"),
        ),
        _LOSS,
    ),
    "tree": "zf.extend.tree_map(function, tree)",
    "tree_utils": "zf.extend.tree_map(function, tree)",
    "tree_map_params": "zf.extend.tree_map(function, tree)",
    "bias_correction": "zf.scale_by_adam(), which does it",
    "update_moment": "zf.scale_by_adam(), which does it",
    "update_moment_per_elem_norm": "zf.scale_by_adam(), which does it",
    "update_infinity_moment": "zf.from_torch(torch.optim.Adamax, lr=2e-3)",
    "safe_increment": "zf.extend.counter(), which has 64 bits",
    "safe_int32_increment": "zf.extend.counter(), which has 64 bits",
    "safe_norm": "zf.extend.length(x)",
    "safe_root_mean_squares": "zf.extend.root(x.square().mean())",
    "matrix_inverse_pth_root": "torch.linalg.eigh",
    "power_iteration": "zf.curvature.max_eigenvalue(loss_fn, tx, state, *batch)",
    "second_order": "zf.curvature.max_eigenvalue(loss_fn, tx, state, *batch)",
    "multi_normal": "torch.distributions.MultivariateNormal",
    "perturbations": "torch.distributions",
    "projections": "a function of yours on parameters, behind opt.step()",
    "nnls": "a function of yours on parameters, behind opt.step()",
    "assignment": "scipy.optimize.linear_sum_assignment",
    # torch, FSDP2 and DeepSpeed.
    "Adam": "zf.adam(1e-3)",
    "AdamW": "zf.adamw(1e-3)",
    "SGD": "zf.sgd(0.1, momentum=0.9)",
    "RMSprop": "zf.rmsprop(1e-2)",
    "Muon": "zf.muon(1e-2)",
    "clip_grad_norm": "zf.clip_by_global_norm(1.0), in the chain",
    "clip_grad_norm_": "zf.clip_by_global_norm(1.0), in the chain",
    "clip_grad_value_": "zf.clip_by_value(1.0), in the chain",
    "GradScaler": 'zf.scale_loss("dynamic"), in the chain',
    "autocast": "zf.precision(param_dtype=torch.bfloat16), in the chain; torch.autocast works too",
    "no_sync": "zf.accumulate(k), in front of the reduction",
    "MixedPrecisionPolicy": "zf.precision(param_dtype=torch.bfloat16), in the chain",
    "fully_shard": "zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-3)))",
    "FullyShardedDataParallel": "zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-3)))",
    "DistributedDataParallel": "zf.attach(model, zf.chain(zf.all_reduce(), zf.adamw(1e-3)))",
    "ZeroRedundancyOptimizer": "zf.attach(model, zf.chain(zf.reduce_scatter(), zf.adamw(1e-3)))",
    "initialize": "zf.attach(model, zf.from_deepspeed(config))",
}


def missing(module: str, name: str, names: Iterable[str]) -> str:
    """The message for a name that a module has not; it tells what to write for a name of another library.

    Examples:
        >>> print(missing("zerofn", "scale_by_learning_rate", ["scale_by_lr"]))
        zf.scale_by_learning_rate
          why:   it is another library's name
          write: zf.scale_by_lr(lr)
        >>> print(missing("zerofn.schedules", "cosin", ["cosine", "step"]))
        zf.schedules.cosin
          why:   there is no such name
          write: zf.schedules.cosine
    """
    if name.startswith("__"):  # Python looks these up, and does not need them
        return f"module {module!r} has no attribute {name!r}"
    short = module.replace("zerofn", "zf", 1)
    if name in OTHER_NAMES:
        return explain(f"{short}.{name}", "it is another library's name", OTHER_NAMES[name])
    if name.endswith("State"):
        why = "a state is a dict of tensors, by the names of transforms"
        return explain(f"{short}.{name}", why, "state.transforms, or zf.describe(state)")
    near = get_close_matches(name, [n for n in names if not n.startswith("_")], 1)
    return explain(f"{short}.{name}", "there is no such name", f"{short}.{near[0]}" if near else f"dir({short})")


def bad_leaves(what: str, leaves: Iterable[tuple[str, str]], right: str) -> str:
    """Write a message that lists every offending leaf with its path.

    Examples:
        >>> print(bad_leaves("muon is for matrices", [("bias", "of shape (3,)")], "zf.partition(...)"))
        muon is for matrices
          bias: of shape (3,)
          write: zf.partition(...)
    """
    rows = "\n".join(f"  {path or '<root>'}: {reason}" for path, reason in leaves)
    return f"{what}\n{rows}\n  write: {right}"


def users_line() -> int:
    """The `stacklevel` with which a warning given by the caller names a line of the user's.

    That is the first line outside of zerofn, of torch (whose decorators lie in between), and of the package that calls
    `users_line`. A fixed `stacklevel` would name a wrong line, because the number of calls in between varies: the user
    may call `zf.load`, or `Checkpoints.load`, which calls `zf.load`.
    """
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    # `__main__` is the user's program.
    passed = {"zerofn", "torch", _package_of(frame)} - {"__main__"}
    while frame is not None and _package_of(frame) in passed:
        level, frame = level + 1, frame.f_back
    return level


def _package_of(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]


def kind_of(x: Any) -> str:
    """Return the name of the type of `x`, with an article.

    Examples:
        >>> kind_of("3"), kind_of(3), kind_of(OSError())
        ('a str', 'an int', 'an OSError')
    """
    name = type(x).__name__
    return f"a{'n' * (name[0] in 'aeiouAEIO')} {name}"


def unknown_keyword(function: str, given: str, known: Iterable[str]) -> str:
    """The message for an unknown keyword, with a hint by synonym first and by spelling second.

    Examples:
        >>> unknown_keyword("adam", "learning_rate", ["lr", "betas"])
        "adam() has no keyword 'learning_rate'. Did you mean lr=? It takes: lr, betas."
    """
    known = list(known)
    hint = SYNONYMS.get(given)
    if hint not in known:
        close = get_close_matches(given, known, n=1)
        hint = close[0] if close else None
    tail = f" Did you mean {hint}=?" if hint else ""
    return f"{function}() has no keyword {given!r}.{tail} It takes: {', '.join(known) or 'nothing'}."
