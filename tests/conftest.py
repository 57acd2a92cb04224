"""Settings of the whole suite: one thread, time limits, and examples of hypothesis that are the same in every run."""

import pytest
import pytest_timeout
import torch
from hypothesis import HealthCheck, settings
from time_limits import limit

# Numbers are compared to the last bit in places, and a sum over threads is another sum.
torch.set_num_threads(1)

# No deadline: the first call of an operator builds its kernels, and machines are shared.
settings.register_profile(
    "zerofn", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zerofn")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Limits of whole tests are seconds on a quiet machine, as those inside of tests are."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit(settings.timeout)))
