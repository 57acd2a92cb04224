"""One process for all tests of Triton's kernels: to start it takes as long as many of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import interpreted
import pytest


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    with interpreted.processes() as pool:
        yield pool
