"""Settings of the whole suite: one thread, and examples of hypothesis that are the same in every run."""

import torch
from hypothesis import HealthCheck, settings

# Numbers are compared to the last bit in places, and a sum over threads is another sum.
torch.set_num_threads(1)

# No deadline: the first call of an operator builds its kernels, and machines are shared.
settings.register_profile(
    "zerofn", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zerofn")
