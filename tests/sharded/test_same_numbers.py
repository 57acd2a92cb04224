"""When a copy of a leaf counts as not written into: the same numbers, or the same bits."""

import pytest
import torch

from zerofn.sharded.forward_writes import same  # inside: a comparison by itself

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 4096])
def test_one_element_written_anywhere_is_seen(dtype, n):
    torch.manual_seed(0)
    memory = (3 * torch.randn(n + 8)).to(dtype)
    for offset in (0, 1, 2, 3, 4):
        a, b = memory[offset : offset + n], memory[offset : offset + n].clone()
        assert same(a, b)
        for at in {0, n // 2, n - 1} if n else ():
            was = b[at].clone()
            b[at] = not was if dtype is torch.bool else was + 1 if dtype is torch.int8 else -was - 1
            assert not same(a, b)
            b[at] = was


@pytest.mark.parametrize("n", [2, 4096])
def test_nan_is_the_same_by_its_bits_and_zeros_of_either_sign_by_their_numbers(n):
    a = torch.zeros(n)
    assert same(a, -a)
    a[-1] = float("nan")
    b = a.clone()
    assert same(a, b)
    b[0] = 1
    assert not same(a, b)
