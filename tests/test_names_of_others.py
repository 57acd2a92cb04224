"""A name of another library tells what to write here. What is to be written exists."""

from __future__ import annotations

import re

import pytest

import zerofn as zf
from zerofn._errors import OTHER_NAMES  # inside: the table

# What `optax` 0.2.8 has at its top, without its modules and types.
OF_OPTAX = re.findall(
    r"\w+",
    """
AdaptiveGradClipState AddDecayedWeightsState AddNoiseState ApplyEvery ApplyIfFiniteState ClipByGlobalNormState
ClipState ConditionallyMaskState ConditionallyTransformState EmaState EmptyState FactoredState
GradientTransformation GradientTransformationExtraArgs InjectHyperparamsState InjectStatefulHyperparamsState
LookaheadState MaskedNode MaskedState MonitorState MultiSteps MultiStepsState MultiTransformState
NonNegativeParamsState OptState PartitionState ScaleByAdaDeltaState ScaleByAdamState ScaleByAdanState
ScaleByAmsgradState ScaleByBacktrackingLinesearchState ScaleByBeliefState ScaleByLBFGSState ScaleByLionState
ScaleByNovogradState ScaleByRStdDevState ScaleByRmsState ScaleByRpropState ScaleByRssState ScaleBySM3State
ScaleByScheduleState ScaleByTrustRatioState ScaleByZoomLinesearchState ScaleState Schedule ShouldSkipUpdateFunction
SnapshotState TraceState TransformInitFn TransformUpdateExtraArgsFn TransformUpdateFn WrappedSchedule ZeroNansState
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan adaptive_grad_clip add_decayed_weights add_noise
amsgrad apply_every apply_if_finite apply_updates assignment bias_correction centralize chain clip clip_by_block_rms
clip_by_global_norm conditionally_mask conditionally_transform constant_schedule convex_kl_divergence
cosine_decay_schedule cosine_distance cosine_onecycle_schedule cosine_similarity ctc_loss
ctc_loss_with_forward_probs ema exponential_decay flatten freeze fromage generalized_kl_divergence global_norm
hinge_loss huber_loss identity incremental_update init_empty_state inject_hyperparams inject_stateful_hyperparams
join_schedules keep_params_nonnegative kl_divergence l2_loss lamb lars lbfgs linear_onecycle_schedule
linear_schedule lion log_cosh lookahead losses masked matrix_inverse_pth_root measure_with_ema microbatch
microbatching monitor multi_normal multi_transform nadam nadamw named_chain nnls noisy_sgd normalize_by_update_norm
novograd ntxent optimistic_adam optimistic_adam_v2 optimistic_gradient_descent partition
per_example_global_norm_clip per_example_layer_norm_clip periodic_update perturbations piecewise_constant_schedule
piecewise_interpolate_schedule polyak_sgd polynomial_schedule power_iteration projections radam rmsprop rprop
safe_increment safe_int32_increment safe_norm safe_root_mean_squares safe_softmax_cross_entropy scale
scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_backtracking_linesearch
scale_by_belief scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_learning_rate
scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms
scale_by_polyak scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_schedule scale_by_sign scale_by_sm3
scale_by_stddev scale_by_trust_ratio scale_by_yogi scale_by_zoom_linesearch scale_gradient schedules second_order
selective_transform set_to_zero sgd sgdr_schedule sigmoid_binary_cross_entropy sigmoid_focal_loss sign_sgd signum
skip_large_updates skip_not_finite sm3 smooth_labels snapshot softmax_cross_entropy
softmax_cross_entropy_with_integer_labels squared_error stateless stateless_with_tree_map trace tree tree_map_params
tree_utils update_infinity_moment update_moment update_moment_per_elem_norm value_and_grad_from_state
warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule with_extra_args_support yogi
zero_nans
""",
)


@pytest.mark.parametrize("module", [zf, zf.schedules], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", OF_OPTAX)
def test_a_name_of_optax_is_here_or_tells_what_to_write(module, name):
    if not hasattr(zf, name):
        with pytest.raises(AttributeError, match=r"write: ."):
            getattr(module, name)


def test_the_table_has_no_name_that_is_here():
    assert not OTHER_NAMES.keys() & set(zf.__all__)


def test_what_is_to_be_written_exists():
    for name, write in OTHER_NAMES.items():
        for path in re.findall(r"zf\.([\w.]*\w)", write):
            found = zf
            for part in path.split("."):
                found = getattr(found, part)
        assert re.match(r"[\w@]", write), name


def test_a_name_of_nobody_is_answered_by_the_nearest():
    with pytest.raises(AttributeError, match=r"write: zf\.accumulate$"):
        zf.acumulate  # noqa: B018
    with pytest.raises(AttributeError, match=r"write: zf\.schedules\.cosine$"):
        zf.schedules.cosin  # noqa: B018
    with pytest.raises(AttributeError, match=r"write: dir\(zf\)$"):
        zf.qqqqqq  # noqa: B018
