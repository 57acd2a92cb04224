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
# Keywords for dtypes that people give to the transforms of ranks, and what they are in `precision`.
REDUCTIONS = ("shard", "reduce_scatter", "all_reduce")
DTYPES = {"dtype": "reduce_dtype", "reduce_dtype": "reduce_dtype", "communication_data_type": "reduce_dtype"}
DTYPES |= {name: name for name in ("param_dtype", "store_dtype", "grad_dtype", "output_dtype")}


def printable(text: str) -> str:
    """A text, such as the name of a parameter, with an escape for each character that a terminal would obey.

    >>> print(printable("block.0.weight"), printable("w" + chr(27) + chr(10)))
    block.0.weight w\\x1b\\n
    """
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text])


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def explain(wrong: str, why: str, right: str) -> str:
    """Write a message: the wrong code, why it is wrong, the right code.

    Examples:
        >>> print(explain("adam(lr=-1)", "a learning rate is not negative", "adam(lr=1e-3)"))
        adam(lr=-1)
          why:   a learning rate is not negative
          write: adam(lr=1e-3)
    """
    indent = "\n         "
    wrong, why, right = map(_lines, (wrong, why, right))
    return f"{wrong}\n  why:   {why.replace(chr(10), indent)}\n  write: {right.replace(chr(10), indent)}"


# What to write, and the names of optax, torch, DeepSpeed and FSDP2 in whose place, which this package lacks.
_NAMES = {
    # Chains and steps.
    "zf.update(tx, grads, state): the next state has the new parameters": "apply_updates",
    "zf.vjp(loss_fn, tx, state, *batch), or zf.make_step(loss_fn, tx)": "value_and_grad_from_state value_and_grad",
    "torch.func.grad(zf.bind(loss_fn, tx, state))(state.params, *batch)": "grad",
    "zf.Transform, a record of functions: docs/extend/tree-numbers.md": (
        "GradientTransformation GradientTransformationExtraArgs TransformInitFn TransformUpdateFn "
        "TransformUpdateExtraArgsFn with_extra_args_support init_empty_state"
    ),
    "nothing: leave it out of the chain": "identity",
    "nothing: leaves are updated in buckets": "flatten",
    "zf.chain(...): state.transforms has the transforms' names": "named_chain",
    "zf.partition(transforms, labels)": "multi_transform",
    "zf.masked(transform, mask)": "MaskedNode selective_transform",
    "zf.partition({'train': tx, 'freeze': None}, labels)": "freeze set_to_zero",
    "zf.accumulate(k), in front of the optimizer": (
        "MultiSteps multi_steps ApplyEvery apply_every microbatch microbatching"
    ),
    "rate = torch.tensor(1e-3), zf.adamw(lr=rate), and later rate.fill_(1e-4)": (
        "inject_hyperparams inject_stateful_hyperparams"
    ),
    "zf.ema(0.999), behind the optimizer": "incremental_update periodic_update",
    "zf.watch(sums, metrics)": "measure_with_ema monitor snapshot",
    # Gradients.
    "zf.scale_by_lr(lr) for a step; for a factor a function by @zf.leafwise": "scale scale_gradient",
    "zf.scale_by_lr(lr)": "scale_by_learning_rate",
    "zf.scale_by_lr(schedule)": "scale_by_schedule",
    "zf.clip_by_value(1.0)": "clip",
    "zf.adaptive_clip(0.01)": "adaptive_grad_clip",
    "a function of one tensor by @zf.leafwise: docs/writing-a-transform.md": (
        "stateless stateless_with_tree_map clip_by_block_rms scale_by_sign scale_by_param_block_norm "
        "scale_by_param_block_rms"
    ),
    "docs/extend/tree-numbers.md: unit_norm": "normalize_by_update_norm",
    "torch.func.vmap(torch.func.grad(loss)): examples/research/dp_sgd.py": (
        "per_example_global_norm_clip per_example_layer_norm_clip differentially_private_aggregate dpsgd"
    ),
    "zf.skip_nonfinite()": "apply_if_finite skip_not_finite zero_nans",
    "zf.apply_if(tx, condition)": (
        "skip_large_updates conditionally_mask conditionally_transform ShouldSkipUpdateFunction"
    ),
    "p.clamp_(min=0) under torch.no_grad(), behind opt.step()": "keep_params_nonnegative",
    # Optimizers.
    "zf.from_torch(torch.optim.Adadelta, lr=1.0)": "adadelta scale_by_adadelta",
    "zf.from_torch(torch.optim.Adagrad, lr=1e-2)": "adagrad scale_by_rss",
    "zf.from_torch(torch.optim.Adamax, lr=2e-3)": "adamax adamaxw scale_by_adamax update_infinity_moment",
    "zf.from_torch(torch.optim.Adam, lr=1e-3, amsgrad=True)": "amsgrad scale_by_amsgrad",
    "zf.nadam(2e-3, decoupled_weight_decay=True)": "nadamw",
    "zf.from_torch(torch.optim.Rprop, lr=1e-2)": "rprop scale_by_rprop",
    "torch.optim.LBFGS(params, line_search_fn='strong_wolfe') and its step(closure), on one process": (
        "lbfgs scale_by_lbfgs scale_by_zoom_linesearch"
    ),
    "your formula by @zf.leafwise(optimizer=True): docs/writing-a-transform.md": (
        "sign_sgd signum fromage novograd yogi sm3 optimistic_adam optimistic_adam_v2 "
        "optimistic_gradient_descent scale_by_novograd scale_by_yogi scale_by_sm3 "
        "scale_by_optimistic_gradient scale_by_distance_over_gradients"
    ),
    "zf.chain(zf.scale_by_momo(), zf.sgd(1.0))": "momo",
    "zf.chain(zf.scale_by_polyak(), zf.sgd(1.0))": "polyak_sgd",
    "zf.chain(zf.add_noise(0.01), zf.sgd(0.1))": "noisy_sgd",
    "zf.rmsprop(1e-2)": "scale_by_rms RMSprop",
    "zf.rmsprop(1e-2, centered=True)": "scale_by_stddev",
    "zf.lion(1e-4)": "scale_by_lion",
    "zf.adan(1e-3)": "scale_by_adan",
    "zf.adabelief(1e-3)": "scale_by_belief",
    "zf.radam(1e-3)": "scale_by_radam",
    "zf.adafactor(1e-2)": "scale_by_factored_rms",
    "zf.lamb(1e-3), or zf.lars(0.1)": "scale_by_trust_ratio",
    "zf.update again with a smaller rate, until the loss falls: docs/optimizers.md": "scale_by_backtracking_linesearch",
    "zf.lookahead(tx)": "LookaheadParams",
    # Schedules.
    "zf.schedules.constant(1e-3)": "constant_schedule",
    "zf.schedules.linear(1e-3, 0.0, steps)": "linear_schedule",
    "zf.schedules.cosine(1e-3, steps)": "cosine_decay_schedule",
    "zf.schedules.step(1e-3, every, gamma)": "exponential_decay",
    "zf.schedules.warmup(1e-3, steps), whose first rate is 1e-3 / steps": "warmup_constant_schedule",
    "zf.schedules.warmup_cosine(1e-3, warmup_steps, steps), whose first rate is 1e-3 / warmup_steps": (
        "warmup_cosine_decay_schedule"
    ),
    "zf.schedules.Piecewise(before, boundary, after)": "warmup_exponential_decay_schedule join_schedules",
    "any function of the step: zf.adamw(lr=lambda step: ...)": (
        "polynomial_schedule piecewise_constant_schedule piecewise_interpolate_schedule "
        "cosine_onecycle_schedule linear_onecycle_schedule sgdr_schedule Schedule StatefulSchedule "
        "WrappedSchedule"
    ),
    # Losses and trees.
    "the loss of torch.nn.functional": (
        "convex_kl_divergence cosine_distance cosine_similarity ctc_loss ctc_loss_with_forward_probs "
        "generalized_kl_divergence hinge_loss huber_loss kl_divergence l2_loss log_cosh losses ntxent "
        "safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels "
        "softmax_cross_entropy softmax_cross_entropy_with_integer_labels squared_error"
    ),
    "zf.extend.tree_map(function, tree)": "tree tree_utils tree_map_params",
    "zf.scale_by_adam(), which does it": "bias_correction update_moment update_moment_per_elem_norm",
    "zf.extend.counter(), which has 64 bits": "safe_increment safe_int32_increment",
    "zf.extend.length(x)": "safe_norm",
    "zf.extend.root(x.square().mean())": "safe_root_mean_squares",
    "torch.linalg.eigh": "matrix_inverse_pth_root",
    "zf.curvature.max_eigenvalue(loss_fn, tx, state, *batch)": "power_iteration second_order",
    "torch.distributions.MultivariateNormal": "multi_normal",
    "torch.distributions": "perturbations",
    "a function of yours on parameters, behind opt.step()": "projections nnls",
    "scipy.optimize.linear_sum_assignment": "assignment",
    # torch, FSDP2 and DeepSpeed.
    "zf.adam(1e-3)": "Adam",
    "zf.adamw(1e-3)": "AdamW",
    "zf.sgd(0.1, momentum=0.9)": "SGD",
    "zf.muon(1e-2)": "Muon",
    "zf.clip_by_global_norm(1.0), in the chain": "clip_grad_norm clip_grad_norm_",
    "zf.clip_by_value(1.0), in the chain": "clip_grad_value_",
    'zf.scale_loss("dynamic"), in the chain': "GradScaler",
    "zf.precision(param_dtype=torch.bfloat16), in the chain; torch.autocast works too": "autocast",
    "zf.accumulate(k), in front of the reduction": "no_sync",
    "zf.precision(param_dtype=torch.bfloat16), in the chain": "MixedPrecisionPolicy",
    "zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-3)))": "fully_shard FullyShardedDataParallel",
    "zf.attach(model, zf.chain(zf.all_reduce(), zf.adamw(1e-3)))": "DistributedDataParallel",
    "zf.attach(model, zf.chain(zf.reduce_scatter(), zf.adamw(1e-3)))": "ZeroRedundancyOptimizer",
    "zf.attach(model, zf.from_deepspeed(config))": "initialize",
}
# By such a name, what to write.
OTHER_NAMES = {name: right for right, names in _NAMES.items() for name in names.split()}


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
    rows = "\n".join(f"  {printable(path) or '<root>'}: {_lines(reason)}" for path, reason in leaves)
    return f"{_lines(what)}\n{rows}\n  write: {_lines(right)}"


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
    if function in REDUCTIONS and given in DTYPES:
        tail = f" The dtype is set by precision: write chain({function}(...), precision({DTYPES[given]}=...), ...)."
    return f"{function}() has no keyword {given!r}.{tail} It takes: {', '.join(known) or 'nothing'}."
