"""Every pipeline on a device other than the CPU: nothing is left on the wrong one, and the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from other_device import AVAILABLE, CASES, compare, register

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch registers no device from Python")
KEPT: list = []


def start() -> None:
    KEPT.extend(register())


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: a device that is registered once stays."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=start) as pool:
        yield pool


@pytest.mark.parametrize("pipeline, route", CASES)
def test_bits_are_those_of_the_cpu(apart, pipeline, route):
    assert apart.submit(compare, pipeline, route).result(timeout=120) == []
