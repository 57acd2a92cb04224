"""What a step would ask of a GPU, counted on a device that does not exist: no waits, and few launches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import virtual_cuda
from time_limits import limit

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(virtual_cuda.COMPILER is None, reason="no C++ compiler to build the device with"),
]

# Steps that make the host wait, with the number of waits and the reason.
WAITS: dict[str, tuple[int, str]] = {
    "clip over pipelines": (1, "what a function of the user's returns is checked before it is used"),
    "clip, on the host": (1, "the host computes, so it waits for each bucket of gradients"),
    "on the host, masters": (1, "as above"),
}

# Launches of one step of an attached model with 148 leaves, none of which may grow. A second number is the aim, where
# it is not reached: budgets can only fall.
LAUNCHES: dict[str, int | tuple[int, int]] = {
    "sgd": 5,
    "sgd, momentum": 5,
    "adam": 10,
    "adamw": 10,
    "adamw, schedule": 10,
    "clip, adamw": 11,
    "clip by value, adamw": 11,
    "low precision, stochastic": 6,
    "low precision, kahan": 6,
    "low precision, nearest": 6,
    "clip, low precision": 6,
    # Each gradient is divided by the scale as it leaves backward, in 148 launches; two are of the output. In fp16, for
    # which the scale is, these launches cast the gradient in any case. At the end of backward it would be too late: by
    # then a gradient is added to an older `p.grad`, or to one that came past the model, and hooks have seen it. A node
    # of autograd for many leaves would run the hooks of those without a gradient.
    "scale, clip, low precision": (170, 12),
    "scale, overflow": (168, 12),
    "rmsprop": 5,
    "lion": 5,
    # Matrices of three shapes in one stack: five iterations, three products of matrices, and two copies that they are
    # added to. Large matrices are a stack for each shape, with 30 launches (`kernels/test_formulas.py`).
    "muon, adamw": 43,
    "adamw, ema": 11,
    "accumulate, adamw": 1,
    "accumulate, weighted": 13,
    "clip over pipelines": 16,
    "partition": 8,
    "watch": 20,
    # torchopt's own operations.
    "guest": 2964,
    "masked": 11,
    "skip nonfinite": 16,
    # Matrices in one launch, and one for their norms; vectors, which are not coded, as without `quantize`.
    "quantize": 11,
    "quantize, low precision": 7,
    # Torch's operations, on all moments whose rows are of one length: three here.
    "quantize, dynamic": (371, 40),
    # Twelve that put masters together, nine for each part of them, and copies that lay leaves out.
    "masters": 55,
    "offload": 10,
    "offload, low precision": 6,
    "offload, chain": 13,
    "clip, on the host": 14,
    "on the host, masters": 12,
}


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessPoolExecutor]:
    with virtual_cuda.processes() as pool:
        yield pool


def ask(pool: ProcessPoolExecutor, *args, module: str = "virtual_steps", **kwargs):
    return pool.submit(virtual_cuda.call, module, *args, **kwargs).result(timeout=limit())


# A pipeline in each of the two routes in turn; the other one is slow.
IN_TURN = [(route, name, i) for i, name in enumerate(LAUNCHES) for route in ("attached", "pure")]


@pytest.mark.parametrize(
    ("route", "pipeline"),
    [
        pytest.param(route, name, marks=() if i % 2 == (route == "pure") else pytest.mark.slow)
        for route, name, i in IN_TURN
    ],
)
def test_a_step_makes_the_host_wait_for_nothing(device, pipeline, route):
    """Law 14."""
    waits = ask(device, "counts", route, pipeline)["waits"]
    assert sum(waits.values()) <= WAITS.get(pipeline, (0, ""))[0], waits


# What comes behind `scale_loss` or `skip_nonfinite`.
BEHIND_A_VERDICT = [
    "adam",
    "adamw, schedule",
    "adamw, own schedule",
    "clip, adamw",
    "clip by value, adamw",
    "sgd",
    "sgd, momentum",
    "sgd, dampening",
    "rmsprop",
    "lion",
    "lion, schedule",
    "building blocks",
    "trace",
    "adamw, ema",
    "accumulate",
    "accumulate, then skip",
    "skip",
    "skip behind clip",
    "partition",
    "masked",
    "muon",
    "lamb",
    "lars",
    "adabelief",
    "nadam",
    "radam",
    "adan",
    "adopt",
    "adafactor",
    "adaptive clip, mars",
    "cautious",
    "add noise",
    "offload",
    "weighted",
    "watch",
    "own transform",
    "low precision",
    "low precision, kahan",
]
# Waits of three steps behind a verdict, with the reason; all others have none.
READ_BEHIND = {
    "adamw, own schedule": (3, "a function of the user's may ask for the number of its step"),
    "offload": (6, "counts of updates are the host's, with the states, of which the program asks"),
    "weighted": (3, "the weights of a window are checked, and are the host's"),
}


@pytest.mark.parametrize(
    ("route", "pipeline"),
    [
        pytest.param(route, x, marks=pytest.mark.slow if "low" in x or i % 2 == (route == "pure") else ())
        for i, x in enumerate(BEHIND_A_VERDICT)
        for route in ("attached", "pure")
    ],
)
def test_a_skipped_step_is_answered_on_the_device(device, pipeline, route):
    """The host waits for no verdict, and parameters, states and metrics are those of the CPU, which reads it."""
    wrong, waits = ask(device, "skipping", pipeline, route)
    assert wrong == [] and waits <= READ_BEHIND.get(pipeline, (0, ""))[0]


# Transforms that no table above has, and rates of the user's.
WITH_A_RATE = [
    *("sgd", "adam", "adamw", "lion", "rmsprop", "nadam", "radam", "adabelief", "adan", "adopt", "adafactor", "lamb"),
    *("lars", "schedule_free_adamw", "momentum", "low precision", "muon", "soap", "shampoo", "building blocks"),
    *("cautious", "lookahead", "mars, adaptive clip", "every, centralize"),
]


@pytest.mark.parametrize(
    ("name", "of_host"),
    [
        pytest.param(name, of_host, marks=pytest.mark.slow if i % 3 != 1 or "low" in name else ())
        for i, (name, of_host) in enumerate((name, of_host) for name in WITH_A_RATE for of_host in (True, False))
    ],
)
def test_a_rate_in_a_tensor_of_the_host_is_not_waited_for(device, name, of_host):
    waits, wrong = ask(device, "with_a_rate", name, of_host)
    # Torch asks whether its solver of eigenvectors has failed.
    assert all("eigh" in where and name == "shampoo" for where in waits) and wrong == []


@pytest.mark.parametrize("pipeline", ["adamw", "low precision, stochastic"])
def test_a_step_within_backward_makes_the_host_wait_for_nothing(device, pipeline):
    assert ask(device, "counts", "attached", pipeline, in_backward=True)["waits"] == {}


# Bytes of gradients that wait within backward, and launches of a step: the 148 leaves have 25 KB.
@pytest.mark.parametrize(("most", "launches"), [(1 << 25, 6), (1 << 13, 12), (0, 296)])
def test_leaves_are_updated_together_within_backward(device, most, launches):
    assert ask(device, "within_backward", "adamw", most) == (launches, [])


@pytest.mark.parametrize("pipeline", LAUNCHES)
def test_launches_do_not_grow(device, pipeline):
    found = ask(device, "counts", "attached", pipeline, leaves=148)
    now, _aim = budget if isinstance(budget := LAUNCHES[pipeline], tuple) else (budget, budget)
    assert found["launches"] <= now, found["by"]
    # A budget that is met by far is a budget to lower.
    assert found["launches"] > now - 3, f"{found['launches']} launches: lower the budget of {now}"


@pytest.mark.parametrize(("pipeline", "step"), [("scale, clip, low precision", 20), ("scale, overflow", 18)])
def test_a_loss_scale_takes_one_launch_for_each_leaf_and_that_within_backward(device, pipeline, step):
    """One more scales the loss, and one copies it; those of `opt.step()` do not grow with leaves."""
    for leaves in (148, 160):
        found = ask(device, "counts", "attached", pipeline, leaves=leaves)
        assert (found["launches"] - found["step"], found["step"]) == (leaves + 2, step)


@pytest.mark.parametrize(("stored", "more"), [(False, 11), (True, 15)], ids=["computed", "stored"])
@pytest.mark.parametrize("leaves", [148, pytest.param(160, marks=pytest.mark.slow)])
def test_a_loss_scale_for_fp16_has_no_launch_for_each_leaf(device, stored, more, leaves):
    """The launch that casts a gradient to float32 in any case divides it, too."""
    scaled, plain = ask(device, "with_and_without_a_scale", leaves, stored)
    assert (scaled - plain, plain > leaves) == (more, True)


@pytest.mark.parametrize("pipeline", ["offload", "offload, chain"])
@pytest.mark.parametrize("route", ["attached", "pure"])
def test_offloaded_states_are_copied_in_buckets(device, pipeline, route):
    """One copy each way for each transform that has a state by leaf: all 148 leaves are in one bucket."""
    assert ask(device, "counts", route, pipeline, leaves=148)["copies"] == {"offload": 2, "offload, chain": 4}[pipeline]


# Those that launch something for each leaf: a budget of theirs has an aim, apart from torchopt's.
EACH_LEAF = {"scale, clip, low precision", "scale, overflow", "guest"}


# Of these the gradients, and what comes back, are copied in batches of leaves.
ON_THE_HOST = {"clip, on the host", "on the host, masters"}


GROWING = [x for x in LAUNCHES if x not in EACH_LEAF | ON_THE_HOST]


@pytest.mark.parametrize(
    "pipeline", [pytest.param(x, marks=pytest.mark.slow if i % 9 else ()) for i, x in enumerate(GROWING)]
)
def test_500_leaves_take_at_most_twice_the_budget_of_148(device, pipeline):
    now, _aim = budget if isinstance(budget := LAUNCHES[pipeline], tuple) else (budget, budget)
    assert ask(device, "counts", "attached", pipeline, leaves=500)["launches"] <= 2 * now


@pytest.mark.parametrize("pipeline", ["clip, adamw", "clip, low precision", "adamw, ema", "lion"])
def test_launches_do_not_grow_with_the_size_of_leaves(device, pipeline):
    """32 MB of parameters, which a CPU updates in eight buckets."""
    small, large = ask(device, "by_size", pipeline)
    # torch's fused kernels and operations on lists take a launch for each 21 M elements.
    assert large <= small + 2


@pytest.mark.parametrize("pipeline", ["sgd, momentum", "lion", "rmsprop", "clip, adamw", "accumulate, weighted"])
def test_without_triton_torchs_operations_on_lists_are_launched(device, pipeline):
    """Three to nine launches for each operation of a formula; the numbers are the same."""
    launches, wrong = ask(device, "without_triton", pipeline)
    assert launches <= 46 and wrong == []


def test_every_transform_is_in_the_table(device):
    assert set(ask(device, "names")) == set(LAUNCHES)
    assert ask(device, "names_of_skipping") == BEHIND_A_VERDICT
    assert ask(device, "names_of_optimizers") == WITH_A_RATE


# Kernels that Triton interprets take seconds: these stand for all. Those of formulas have the bits of torch, whatever
# the formula (`kernels/test_triton_lists.py`).
FIRST = ("low precision, stochastic", "lion", "watch")
SLOW = (
    *("scale, clip, low precision", "low precision, nearest", "offload, low precision"),
    *("low precision, kahan", "clip, low precision"),
)


@pytest.mark.parametrize(
    ("pipeline", "interpreted"),
    [
        *((x, False) for x in LAUNCHES if "low" not in x),
        *(pytest.param(x, True, marks=() if x in FIRST else pytest.mark.slow) for x in LAUNCHES),
    ],
)
def test_bits_are_those_of_the_cpu(device, pipeline, interpreted):
    """Also that nothing is left on the wrong device. A clipped step has another order of sums."""
    assert ask(device, "compare", pipeline, interpreted=interpreted) == []


# Pipelines whose steps are recorded on the device, and repeated without a line of their code.
CAPTURED = [
    *("adamw", "adamw, schedule", "adamw, function", "adam, tensor", "clip, adamw, ema", "sgd", "sgd, dampening"),
    *("lion", "rmsprop", "nadam", "lamb", "building blocks", "muon, adamw", "masked", "watch", "scale, overflow"),
    *("skip", "accumulate", "scale, accumulate", "low precision", "low precision, kahan"),
]
# Kernels that Triton interprets take seconds.
REPLAYED = [
    pytest.param(name, route, marks=pytest.mark.slow if "low" in name or (i % 2 == (route == "pure") and i > 1) else ())
    for i, name in enumerate(CAPTURED)
    for route in ("attached", "pure")
]


@pytest.mark.parametrize(("pipeline", "route"), REPLAYED)
def test_replays_of_a_captured_step_are_steps(device, pipeline, route):
    """Each replay counts, has the rate of its step, draws anew, and asks nothing of the host."""
    wrong, of_host = ask(device, "replayed", route, pipeline, module="virtual_graphs")
    assert wrong == [] and of_host == []


# Clipped gradients have other addresses in each step, which a kernel's table has as numbers.
@pytest.mark.parametrize(
    "pipeline",
    ["adamw, schedule", "scale, accumulate", pytest.param("low precision, kahan", marks=pytest.mark.slow)],
)
def test_two_captured_steps_have_the_same_operations(device, pipeline):
    """Nothing that differs from step to step is a number of the host."""
    assert ask(device, "alike", pipeline, module="virtual_graphs") == []


def test_every_captured_pipeline_is_in_the_table(device):
    assert ask(device, "names", module="virtual_graphs") == CAPTURED


@pytest.mark.parametrize("capturable", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_state_with_counters_on_the_device_is_saved_and_loaded(device, capturable, tmp_path):
    found = ask(device, "saved", str(tmp_path / "run"), capturable, module="virtual_graphs")
    assert found == {"same": [True] * 3, "steps": [5] * 4, "in place": capturable or found["in place"]}


def test_the_first_step_of_a_state_is_not_captured(device):
    told = ask(device, "refused", module="virtual_graphs")
    assert told.startswith("a step of a new state while a CUDA graph is captured")


@pytest.mark.parametrize(
    "pipeline",
    [pytest.param(x, marks=pytest.mark.slow if x in SLOW or i % 2 else ()) for i, x in enumerate(LAUNCHES)],
)
def test_leaves_on_two_devices_are_updated_as_on_one(device, pipeline):
    assert ask(device, "compare", pipeline, apart=True) == []


@pytest.mark.parametrize("route", ["attached", "in backward", "pure"])
def test_an_update_in_a_captured_graph_is_refused(device, route):
    told = ask(device, "captured", route)
    assert told.startswith("an update while a CUDA graph is captured") and "opt.step() outside of it" in told


def test_leaves_on_two_devices_are_refused(device):
    assert "entry 0 are on devices [0, -1, 0, 0]" in ask(device, "on_two_devices")


def test_an_offloaded_state_is_written_in_its_own_memory(device):
    assert ask(device, "written_states") == [True] * 6


def test_a_rate_in_a_tensor_of_the_host_is_not_captured(device):
    told = ask(device, "captured_with_a_rate_of_the_host")
    assert "adamw: its rate is a tensor of the host" in told


def test_a_step_of_leaves_on_two_devices_is_not_captured(device):
    told = ask(device, "capturable_on_two_devices")
    assert told.startswith("capturable=True of parameters on several devices") and "p000: on cpu" in told


def test_triton_without_a_compiler_is_told_once_and_plain_torch_runs(device):
    said, wrong = ask(device, "without_a_compiler")
    # Of the kernel of the optimizer, and of those of formulas.
    assert 1 <= len(said) <= 2 and all("Failed to find C compiler" in one for one in said) and wrong == []


def test_gradients_are_where_they_are_in_this_step(device):
    assert ask(device, "gradients_elsewhere_in_each_step") == (3, [])


@pytest.mark.parametrize("scale", [2.0**10, 1000.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gradient_is_divided_by_the_scale_in_one_launch(device, dtype, scale):
    """With the bits of the CPU, of four parameters and of an input; and the output's cotangent is multiplied."""
    assert ask(device, "scaled_gradients", dtype, scale) == ([], 6)


def test_an_overflow_is_found_without_a_wait(device):
    """Whether there is one, and where."""
    waits, first = ask(device, "overflowed")
    assert waits == {} and first == 7


# Launches of an update of 20 leaves of two dtypes: what lists do not have runs leaf by leaf.
OWN = {
    "formula, path": 47,
    # Bfloat16 as a list, float32 leaf by leaf.
    "formula, dtype": 47,
    "leafwise": 9,
    "leafwise, two states": 51,
    "leafwise, branching": 51,
    "leafwise, a state of another shape": 109,
    "leafwise, path": 69,
    "leafwise, rows": 69,
    "watch": 101,
    "watch, a constant": 217,
    "watch, comparing": 187,
}


@pytest.mark.parametrize("name", OWN)
def test_a_function_of_the_users_runs_on_lists_or_leaf_by_leaf(device, name):
    assert ask(device, "own_transform", name) == (OWN[name], [])


def test_the_device_hears_of_waits_and_launches(device):
    """The log itself: what a wait is, and how operators on lists are packed into launches."""
    rows = ask(device, "known")
    assert rows["waits"] == ["_local_scalar_dense", "copy to the host", "copy to the device", "nonzero"]
    assert rows["launches"] == {"add": 1, "_foreach_add_": 2, "_fused_adamw_": 5}
    assert rows["copies"] == 1


STAGES = ["all_reduce", "zero-1", "zero-2", "zero-3"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessPoolExecutor]:
    """A process that is one rank of a job, for good."""
    with virtual_cuda.processes() as pool:
        yield pool


def test_a_model_that_the_backend_does_not_send_is_refused(ranks):
    told = ranks.submit(virtual_cuda.call, "equal_ranks", "refused_on_the_host").result(timeout=limit())
    assert told.startswith("zf.attach(model, tx) of parameters on cpu") and "sends tensors of cuda alone" in told


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_waits_for_nothing(ranks, stage):
    """Law 14, of one rank among 8, in a model of 6 blocks. Messages between ranks are the host's.

    Which leaves are used is read from a bucket for which this rank lacks a gradient, and from no other.
    """
    waits = ranks.submit(virtual_cuda.call, "equal_ranks", "waits", stage).result(timeout=limit())
    assert waits == {}
    scaled = ranks.submit(virtual_cuda.call, "equal_ranks", "waits", stage, scaled=True).result(timeout=limit())
    assert scaled == {}
    unused = ranks.submit(virtual_cuda.call, "equal_ranks", "waits", stage, unused=True).result(timeout=limit())
    assert sum(unused.values()) == 1, unused


# Of 38 leaves: under `shard` those of a unit are updated together, before the next gather.
@pytest.mark.parametrize(("stage", "launches"), [("all_reduce", 3), ("reduce_scatter", 3), ("shard", 14)])
def test_leaves_of_a_rank_are_updated_together_within_backward(ranks, stage, launches):
    found = ranks.submit(virtual_cuda.call, "equal_ranks", "within_backward", stage).result(timeout=limit())
    assert found == (launches, {}, [])
