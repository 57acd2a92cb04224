"""What a step would ask of a GPU, counted on a device that does not exist: no waits, and few launches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import count_launches
import pytest
import torch
import virtual_cuda
from time_limits import limit
from transforms_table import ROWS, row_params

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(virtual_cuda.COMPILER is None, reason="no C++ compiler to build the device with"),
    # torch's own kernels for GPUs are registered there already, and the process would end.
    pytest.mark.skipif(
        (torch.version.cuda or torch.version.hip) is not None,
        reason="the device needs the CPU build of torch: pip install torch --index-url https://download.pytorch.org/whl/cpu",
    ),
]

# Rows with a budget of launches, which has their waits too.
COUNTED = [name for name, row in ROWS.items() if not isinstance(row.launches, str)]


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessPoolExecutor]:
    with virtual_cuda.processes() as pool:
        yield pool


def ask(pool: ProcessPoolExecutor, *args, module: str = "virtual_steps", **kwargs):
    return pool.submit(virtual_cuda.call, module, *args, **kwargs).result(timeout=limit())


def in_turn(kind: str, names: list[str], each: int = 1) -> list[Any]:
    """Each row by one of the two routes, in turn; all but every first one of `each` are slow."""
    return [
        pytest.param(
            ("attached", "pure")[i // each % 2 == 0],
            *row.values,
            marks=pytest.mark.slow if row.marks or i % each else (),
        )
        for i, row in enumerate(row_params(kind, names))
    ]


# An attached model waits for nothing with 148 leaves in `test_launches_do_not_grow`, of the rows that run there.
@pytest.mark.parametrize(
    ("route", "pipeline"),
    [
        pytest.param(*row.values, marks=pytest.mark.slow)
        if row.values[0] == "attached" and "launches" in ROWS[row.values[1]].often.split()
        else row
        for row in in_turn("waits", COUNTED)
    ],
)
def test_a_step_makes_the_host_wait_for_nothing(device, pipeline, route):
    """Law 14."""
    waits = ask(device, "counts", route, pipeline)["waits"]
    assert sum(waits.values()) <= ROWS[pipeline].waits[0], waits


@pytest.mark.parametrize(("route", "pipeline"), in_turn("verdict", [x for x, row in ROWS.items() if row.verdict]))
def test_a_skipped_step_is_answered_on_the_device(device, pipeline, route):
    """The host waits for no verdict, and parameters, states and metrics are those of the CPU, which reads it."""
    wrong, waits = ask(device, "skipping", pipeline, route)
    assert wrong == [] and waits <= ROWS[pipeline].read[0]


# Of a rate that is a tensor of the user's. Other libraries take numbers, and behind a verdict of the device a kernel of
# torch's takes a copy.
NO_RATE = ("guest", "from_torch", "every", "scale_loss, overflow")
RATED = [x for x in COUNTED if ROWS[x].place == "optimizer" and x not in NO_RATE]


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(*x.values, marks=pytest.mark.slow if x.marks or i % 2 or "quantize" in x.values[0] else ())
        for i, x in enumerate(row_params("waits", RATED))
    ],
)
def test_a_rate_in_a_tensor_of_the_host_is_not_waited_for(device, pipeline):
    waits, wrong = ask(device, "with_a_rate_of_the_host", pipeline)
    assert sum(waits.values()) <= ROWS[pipeline].waits[0] and wrong == []


# Of formulas without a root: the members of a batch run on tensors, and this device takes torch's root on the CPU,
# which is off by a unit in the last place, where that of the CPU is exact.
@pytest.mark.parametrize("name", ["sgd", "adopt"])
def test_rates_of_the_host_may_be_a_batch(device, name):
    assert ask(device, "batched_rates_of_the_host", name) == []


@pytest.mark.parametrize("pipeline", ["adamw", "low precision, stochastic"])
def test_a_step_within_backward_makes_the_host_wait_for_nothing(device, pipeline):
    assert ask(device, "counts", "attached", pipeline, in_backward=True)["waits"] == {}


# Bytes of gradients that wait within backward, and launches of a step: the 148 leaves have 25 KB.
@pytest.mark.parametrize(("most", "launches"), [(1 << 25, 6), (1 << 13, 12), (0, 296)])
def test_leaves_are_updated_together_within_backward(device, most, launches):
    assert ask(device, "within_backward", "adamw", most) == (launches, [])


def budget(name: str) -> int:
    """The launches of now; beside an aim."""
    most: Any = ROWS[name].launches
    return most[0] if isinstance(most, tuple) else most


@pytest.mark.parametrize("pipeline", row_params("launches", COUNTED))
def test_launches_do_not_grow(device, pipeline):
    """Law 14 holds with many leaves too."""
    found, most = ask(device, "counts", "attached", pipeline, leaves=148), budget(pipeline)
    assert sum(found["waits"].values()) <= ROWS[pipeline].waits[0], found["waits"]
    assert found["launches"] <= most, found["by"]
    # A budget that is met by far is a budget to lower.
    assert found["launches"] > most - 3, f"{found['launches']} launches: lower the budget of {most}"


@pytest.mark.parametrize(("pipeline", "step"), [("scale, clip, low precision", 21), ("scale_loss, overflow", 18)])
def test_a_loss_scale_takes_one_launch_for_each_leaf_and_that_within_backward(device, pipeline, step):
    """One more scales the loss, and one copies it; those of `opt.step()` do not grow with leaves."""
    for leaves in (148, 160):
        found = ask(device, "counts", "attached", pipeline, leaves=leaves)
        assert (found["launches"] - found["step"], found["step"]) == (leaves + 2, step)


@pytest.mark.parametrize(("stored", "more"), [(False, 11), (True, 16)], ids=["computed", "stored"])
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


GROWING = [x for x in COUNTED if not ROWS[x].by_leaf]


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(x, marks=pytest.mark.slow if i % 9 or "quantize" in x else ())
        for i, x in enumerate(GROWING)
        if i % 3 == 0 or x == "quantize"
    ],
)
def test_500_leaves_take_at_most_twice_the_budget_of_148(device, pipeline):
    assert ask(device, "counts", "attached", pipeline, leaves=500)["launches"] <= 2 * budget(pipeline)


@pytest.mark.parametrize("pipeline", ["clip_by_global_norm", "clip, low precision", "ema", "lion"])
def test_launches_do_not_grow_with_the_size_of_leaves(device, pipeline):
    """32 MB of parameters, which a CPU updates in eight buckets."""
    small, large = ask(device, "by_size", pipeline)
    # torch's fused kernels and operations on lists take a launch for each 21 M elements.
    assert large <= small + 2


@pytest.mark.parametrize(
    "pipeline",
    [
        "lion",
        "clip_by_global_norm",
        "accumulate, weighted",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("sgd, momentum", "rmsprop, plain")),
    ],
)
def test_without_triton_torchs_operations_on_lists_are_launched(device, pipeline):
    """Three to nine launches for each operation of a formula; the numbers are the same."""
    launches, wrong = ask(device, "without_triton", pipeline)
    assert launches <= 46 and wrong == []


# Kernels that Triton interprets take seconds: these stand for all. Those of formulas have the bits of torch, whatever
# the formula (`kernels/test_print_triton.py`).
FIRST = ("low precision, stochastic", "lion", "watch")


@pytest.mark.parametrize(
    ("pipeline", "interpreted"),
    [
        *(
            pytest.param(*x.values, False, marks=x.marks)
            for x in row_params("bits", COUNTED)
            if "low" not in x.values[0]
        ),
        *(pytest.param(x, True, marks=() if x in FIRST else pytest.mark.slow) for x in COUNTED),
    ],
)
def test_bits_are_those_of_the_cpu(device, pipeline, interpreted):
    """Also that nothing is left on the wrong device. A clipped step has another order of sums."""
    assert ask(device, "compare", pipeline, interpreted=interpreted) == []


# Steps that are recorded on the device, and repeated without a line of their code.
@pytest.mark.parametrize(
    ("route", "pipeline"), in_turn("graph", [x for x, row in ROWS.items() if not row.host and not row.loss], 3)
)
def test_replays_of_a_captured_step_are_steps(device, pipeline, route):
    """Each replay counts, has the rate of its step, draws anew, and asks nothing of the host."""
    wrong, of_host = ask(device, "replayed", route, pipeline, module="virtual_graphs")
    assert wrong == [] and of_host == []


# Launches of a step of 148 leaves whose counts, rates and derived numbers are on the device: they are data of the same
# programs. What is derived from all counts at once takes some launches of its own.
CAPTURED = {
    "sgd": 12, "lion": 12, "rmsprop": 12, "adopt": 19, "adabelief": 23, "adan": 28, "lamb": 38, "radam": 48,
    "nadam": 54, "schedule_free_adamw": 55,
}  # fmt: skip


@pytest.mark.parametrize("pipeline", CAPTURED)
def test_launches_of_a_step_that_reads_no_count_do_not_grow_with_leaves(device, pipeline):
    found = ask(device, "counts", "attached", pipeline, leaves=148, capturable=True)
    assert found["waits"] == {} and found["launches"] <= CAPTURED[pipeline], found["by"]


def test_a_number_of_a_member_that_never_changes_stays_on_the_host(device):
    """The format of random bits of `low_precision_adam` in a group is read in a captured step too."""
    assert ask(device, "replayed", "pure", "partition, of partitions", module="virtual_graphs") == ([], [])


# Clipped gradients have other addresses in each step, which a kernel's table has as numbers.
@pytest.mark.parametrize(
    "pipeline",
    ["adamw, schedule", "scale_loss, accumulate", pytest.param("low precision, kahan", marks=pytest.mark.slow)],
)
def test_two_captured_steps_have_the_same_operations(device, pipeline):
    """Nothing that differs from step to step is a number of the host."""
    assert ask(device, "alike", pipeline, module="virtual_graphs") == []


@pytest.mark.parametrize("capturable", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_state_with_counters_on_the_device_is_saved_and_loaded(device, capturable, tmp_path):
    found = ask(device, "saved", str(tmp_path / "run"), capturable, module="virtual_graphs")
    assert found == {"same": [True] * 3, "steps": [5] * 4, "in place": capturable or found["in place"]}


def test_the_first_step_of_a_state_is_not_captured(device):
    told = ask(device, "refused", module="virtual_graphs")
    assert told.startswith("a step of a new state while a CUDA graph is captured")


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(*x.values, marks=pytest.mark.slow if x.marks or "low" in x.values[0] or i % 2 else ())
        for i, x in enumerate(row_params("bits", COUNTED))
        # Masters of one device are laid out as one, and torch's kernel rounds the last elements of that in another way.
        if x.values[0] != "masters"
    ],
)
def test_leaves_on_two_devices_are_updated_as_on_one(device, pipeline):
    assert ask(device, "compare", pipeline, apart=True) == []


@pytest.mark.parametrize("route", ["attached", "in backward", "pure"])
def test_an_update_in_a_captured_graph_is_refused(device, route):
    told = ask(device, "captured", route)
    assert told.startswith("an update while a CUDA graph is captured") and "opt.step() outside of it" in told


def test_leaves_on_two_devices_are_refused(device):
    told = ask(device, "on_two_devices")
    assert told.startswith("gradients do not fit the parameters") and "w: " in told and "cpu" in told


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
    "leafwise, two states": 22,
    "leafwise, branching": 22,
    "leafwise, a state of another shape": 80,
    "leafwise, path": 40,
    "leafwise, rows": 40,
    "watch": 68,
    "watch, a constant": 188,
    "watch, comparing": 158,
}


@pytest.mark.parametrize("name", OWN)
def test_a_function_of_the_users_runs_on_lists_or_leaf_by_leaf(device, name):
    assert ask(device, "own_transform", name) == (OWN[name], [])


def test_a_table_has_launches_by_leaves_and_what_cannot_be_counted(device):
    """`count_launches.py`, whose rows are all of the table's."""
    assert set(ask(device, "names", module="count_launches")) == set(ROWS)
    leaves = [10, 20]
    one, other, loss, wrong = count_launches.rows(
        device, ["lion", "adaptive_clip", "scale_by_momo", "no such row"], leaves
    )
    assert one[10] == one[20] == (4, 0, 0, 4) and count_launches.line(one, leaves).startswith(
        "| lion | 4 | 4 | 12 met |"
    )
    assert other[20][0] > other[10][0] and "12 MISSED" in count_launches.line(other, leaves)
    assert loss[10][1] == 0 and loss["error"] == ""
    assert wrong["error"] == "'no such row'" and 10 not in wrong


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
