"""Every pipeline on a device other than the CPU: nothing is left on the wrong one, and the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from late_copies import compare_late
from other_device import AVAILABLE, CASES, compare, register
from time_limits import limit

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch registers no device from Python")
KEPT: list = []
# A seventh of them at once, and another slowly: `test_waits_and_launches` has the same pipelines on a device with
# streams.
EVERY = [
    pytest.param(*case, marks=pytest.mark.slow if i % 7 else ()) for i, case in enumerate(CASES) if i % 7 in (0, 3)
]
OFFLOADED = [case for case in EVERY if case.values[0].startswith("offload")]


def start() -> None:
    KEPT.extend(register())


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: a device that is registered once stays."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=start) as pool:
        yield pool


@pytest.mark.parametrize("pipeline, route", EVERY)
def test_bits_are_those_of_the_cpu(apart, pipeline, route):
    assert apart.submit(compare, pipeline, route).result(timeout=limit()) == []


@pytest.mark.parametrize("pipeline, route", OFFLOADED)
def test_offload_reads_and_writes_nothing_while_it_is_copied(apart, pipeline, route):
    """Copies happen when they are waited for, which is as late as a stream may make them."""
    wrong, coming, lost = apart.submit(compare_late, pipeline, route).result(timeout=limit())
    assert wrong == [] and lost == 0
    # The next bucket came while one was updated, and not all the buckets there are. Three transforms of a pipeline are
    # in one pass over the leaves, and send for the next one each on its own. Another library's transformation has its
    # whole state at once.
    assert 1 <= max(coming) <= 3 or pipeline == "offload, guest"
