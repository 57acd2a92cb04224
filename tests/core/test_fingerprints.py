"""What ranks compare of parameters before they train: fingerprints of the bits, and that none is NaN."""

import pytest
import torch
from torch import nn

import zerofn as zf
from zerofn.core.rank_agreement import WORDS, fingerprint  # inside: only a difference between ranks shows it

# The last has words in three pieces, and bytes behind them.
LENGTHS = [1, 2, 3, 7, 8, 9, 1000, 2 * 8 * WORDS + 5]
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def bits(n, seed=0):
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("n", LENGTHS)
def test_equal_bits_have_one_fingerprint_and_a_changed_one_has_another(n):
    x = bits(n)
    known = fingerprint(x)
    assert 0 <= known < 1 << 62
    assert fingerprint(x.clone()) == known
    # Where the memory begins is no part of it.
    assert fingerprint(torch.cat([bits(3), x])[3:]) == known
    for i in {0, n // 2, n - 1}:
        other = x.clone()
        other[i] ^= 1
        assert fingerprint(other) != known


@pytest.mark.parametrize("far", [1, 8, 8 * WORDS, 16 * WORDS], ids=["a byte", "a word", "a piece", "two pieces"])
def test_numbers_that_change_places_have_another_fingerprint(far):
    x = torch.zeros(24 * WORDS + 3, dtype=torch.uint8)
    x[5] = 1
    y = torch.zeros_like(x)
    y[5 + far] = 1
    assert fingerprint(x) != fingerprint(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_has_a_fingerprint_of_its_numbers(dtype):
    x = bits(35).to(dtype).view(5, 7)
    assert fingerprint(x) == fingerprint(x.t().contiguous().t())
    assert fingerprint(x) != fingerprint(1 - x if dtype != torch.bool else ~x)
    assert fingerprint(x[:0]) == fingerprint(x.to("meta")) == 0


@pytest.mark.parametrize(
    "numbers, bad", [([1.0, torch.nan], True), ([torch.inf, -torch.inf], False), ([6e4, 6e4], False)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_parameter_that_is_nan_is_refused_and_an_infinite_one_is_not(numbers, bad, dtype):
    model = nn.ParameterDict({"w": torch.tensor(numbers, dtype=dtype)})
    if bad:
        with pytest.raises(ValueError, match="1 of 2 elements are NaN"):
            zf.attach(model, zf.sgd(0.1))
    else:
        zf.attach(model, zf.sgd(0.1))
