"""What a step would ask of a GPU, counted on a device that does not exist: no waits, and few launches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import virtual_cuda
from time_limits import limit

pytestmark = pytest.mark.skipif(virtual_cuda.COMPILER is None, reason="no C++ compiler to build the device with")

# Steps that make the host wait, with the number of waits and the reason.
WAITS: dict[str, tuple[int, str]] = {
    "scale, clip, low precision": (1, "counts of updates are the host's, so it must know whether this step counts"),
    "scale, overflow": (1, "as above; and the first leaf that overflowed is found"),
    "skip nonfinite": (1, "as above"),
    "offload": (1, "copies to the host are waited for at the end of the step"),
    "offload, low precision": (1, "as above"),
}

# Launches of one step of an attached model with 148 leaves, none of which may grow. A second number is the aim, where
# it is not reached: budgets can only fall.
LAUNCHES: dict[str, int | tuple[int, int]] = {
    "sgd": (156, 8),
    "sgd, momentum": (452, 8),
    "adam": (14, 10),
    "adamw": (14, 10),
    "adamw, schedule": (14, 10),
    "clip, adamw": (22, 16),
    "clip by value, adamw": (162, 16),
    "low precision, stochastic": (7, 6),
    "low precision, kahan": (7, 6),
    "low precision, nearest": (7, 6),
    "clip, low precision": (163, 9),
    "scale, clip, low precision": (470, 12),
    "scale, overflow": (174, 12),
    "rmsprop": (1340, 12),
    "lion": (1784, 12),
    "muon, adamw": (2712, 60),
    "adamw, ema": (162, 14),
    "accumulate, adamw": (148, 4),
    "masked": (156, 16),
    "skip nonfinite": (24, 16),
    "offload": (14, 10),
    "offload, low precision": (7, 6),
}


@pytest.fixture(scope="module")
def device() -> Iterator[ProcessPoolExecutor]:
    with virtual_cuda.processes() as pool:
        yield pool


def ask(pool: ProcessPoolExecutor, *args, **kwargs):
    return pool.submit(virtual_cuda.call, "virtual_steps", *args, **kwargs).result(timeout=limit())


@pytest.mark.parametrize("route", ["attached", "pure"])
@pytest.mark.parametrize("pipeline", LAUNCHES)
def test_a_step_makes_the_host_wait_for_nothing(device, pipeline, route):
    """Law 14."""
    waits = ask(device, "counts", route, pipeline)["waits"]
    assert sum(waits.values()) <= WAITS.get(pipeline, (0, ""))[0], waits


@pytest.mark.parametrize("pipeline", LAUNCHES)
def test_launches_do_not_grow(device, pipeline):
    found = ask(device, "counts", "attached", pipeline, leaves=148)
    now, _aim = budget if isinstance(budget := LAUNCHES[pipeline], tuple) else (budget, budget)
    assert found["launches"] <= now, found["by"]
    # A budget that is met by far is a budget to lower.
    assert found["launches"] > now - 3, f"{found['launches']} launches: lower the budget of {now}"


@pytest.mark.parametrize("pipeline", ["adamw", "clip, adamw", "low precision, stochastic", "clip, low precision"])
def test_launches_grow_slower_than_leaves(device, pipeline):
    few, many = (ask(device, "counts", "attached", pipeline, leaves=n)["launches"] for n in (148, 500))
    assert many <= 2.1 * few + (500 - 148) * (pipeline == "clip, low precision")


def test_every_transform_is_in_the_table(device):
    assert set(ask(device, "names")) == set(LAUNCHES)


@pytest.mark.parametrize("pipeline", LAUNCHES)
def test_bits_are_those_of_the_cpu(device, pipeline):
    """Also that nothing is left on the wrong device. A clipped step has another order of sums."""
    assert ask(device, "compare", pipeline) == []


def test_the_device_hears_of_waits_and_launches(device):
    """The log itself: what a wait is, and how operators on lists are packed into launches."""
    rows = ask(device, "known")
    assert rows["waits"] == ["_local_scalar_dense", "copy to the host", "copy to the device", "nonzero"]
    assert rows["launches"] == {"add": 1, "_foreach_add_": 2, "_fused_adamw_": 5}
    assert rows["copies"] == 1
