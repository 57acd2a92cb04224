"""Norms of large leaves, against float64."""

import pytest
import torch

import zerofn as zf


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 11, 1 << 11)])
def test_the_norm_of_a_large_leaf_is_exact_to_fp32(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = g.double().norm()
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(1.0))
    state, metrics = zf.update(tx, {"w": g.clone()}, zf.init(tx, {"w": torch.zeros(shape)}))
    # Rounding of the sums of 2^17 squares in fp32; in one sum of all the norm is 7e-5 too small.
    torch.testing.assert_close(metrics["grad_norm"].double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(state.params["w"].double().norm(), torch.tensor(1.0).double(), rtol=3e-6, atol=0)
