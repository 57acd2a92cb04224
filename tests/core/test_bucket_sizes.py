"""How many bytes one collective moves: more on GPUs, and more with more ranks."""

from __future__ import annotations

import pytest
import torch

from zerofn.core.bucketed_views import bucket_bytes  # inside: the sizes of messages
from zerofn.extend import Group

MIB = 1 << 20


@pytest.mark.parametrize(
    ("total", "ranks", "device", "limit"),
    [
        # As before on a CPU.
        (MIB, 2, "cpu", 4 * MIB),
        (160 * MIB, 2, "cpu", 10 * MIB),
        (4096 * MIB, 64, "cpu", 16 * MIB),
        (4096 * MIB, 256, "cpu", 64 * MIB),
        # 1.42 B parameters in bf16: as DistributedDataParallel, and then a sixteenth of them.
        (2 * 1_420_000_000, 8, "cuda", 25 * MIB),
        (2 * 1_420_000_000, 64, "cuda", 64 * MIB),
        (2 * 1_420_000_000, 1024, "cuda", 177_500_000),
        (MIB, 1024, "cuda", 4 * MIB),
    ],
)
def test_a_bucket_grows_with_ranks_and_on_gpus(total, ranks, device, limit):
    group = Group(0, ranks, tuple(range(ranks)), torch.device(device))
    assert bucket_bytes(total, group) == limit
