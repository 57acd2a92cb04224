"""Norms of large leaves, against float64."""

import math

import pytest
import torch

import zerofn as zf
from zerofn.kernels.norms import sum_of_squares  # inside: a kernel by itself


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 11, 1 << 11)])
def test_the_norm_of_a_large_leaf_is_exact_to_fp32(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = g.double().norm()
    tx = zf.chain(zf.clip_by_global_norm(1.0), zf.sgd(1.0))
    state, metrics = zf.update(tx, {"w": g.clone()}, zf.init(tx, {"w": torch.zeros(shape)}))
    # Rounding of the sums of 2^17 squares in fp32; in one sum of all the norm is 7e-5 too small.
    torch.testing.assert_close(metrics["grad_norm"].double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(state.params["w"].double().norm(), torch.tensor(1.0).double(), rtol=3e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [None, math.inf, math.nan])
def test_the_norm_of_small_leaves_is_that_of_their_elements(dtype, odd):
    """Whatever their shapes and strides. They are joined first, below 2^17 elements in all."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (3, 0), (7,), (4, 5), (2, 3, 4, 4), *[(8,)] * 100]
    leaves = {f"w{i}": torch.randn(shape, generator=draw, dtype=dtype) for i, shape in enumerate(shapes)}
    leaves["t"], leaves["last"] = (
        torch.randn(9, 5, generator=draw, dtype=dtype).t(),
        leaves["w5"].contiguous(memory_format=torch.channels_last),
    )
    if odd is not None:
        leaves["w7"][3] = odd
    want = sum(x.double().square().sum() for x in leaves.values()).sqrt()
    torch.testing.assert_close(zf.global_norm(leaves), want.to(dtype), rtol=1e-6, atol=0, equal_nan=True)
    other_way = zf.global_norm(dict(reversed(leaves.items())))
    torch.testing.assert_close(other_way, zf.global_norm(leaves), rtol=0, atol=0, equal_nan=True)


NORMS = [3.0, 4.0, 1e-30, 5e18, 0.0, 1.5]


@pytest.mark.parametrize("tensors", [[], [0], [1, 4], range(6)], ids=["none", "one", "two", "all"])
@pytest.mark.parametrize("norms", [NORMS, [math.inf, *NORMS[1:]], [math.nan, *NORMS[1:]], [math.nan, math.inf] * 3])
def test_squares_are_added_of_numbers_and_of_tensors_alike(norms, tensors):
    given = {f"w{i}": torch.tensor(x) if i in tensors else x for i, x in enumerate(norms)}
    want = torch.tensor(norms, dtype=torch.float64).square().sum()
    # One rounding to fp32 of each square and of each sum.
    torch.testing.assert_close(sum_of_squares(given).double(), want, rtol=1e-6, atol=0, equal_nan=True)


def test_a_norm_beyond_fp32_is_infinite_and_no_error():
    """The square of 1e25 is: so it was when fp32 tensors were squared."""
    assert sum_of_squares({"a": 1e25, "b": 1.0}) == math.inf


def test_a_sum_of_numbers_is_the_same_in_any_order():
    norms = {f"w{i}": math.pi**i / 3**i for i in range(40)}
    assert sum_of_squares(dict(reversed(norms.items()))) == sum_of_squares(norms)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_norm_of_complex_leaves_is_that_of_torch(dtype, recorded):
    z = torch.view_as_complex(torch.linspace(-1, 1, 12, dtype=torch.float64).view(6, 2)).to(dtype)
    leaf = z.clone().requires_grad_(recorded)
    found, want = (
        zf.global_norm({"z": leaf, "r": torch.ones(2)}),
        torch.linalg.vector_norm(torch.cat([z, z.new_ones(2)])),
    )
    torch.testing.assert_close(found.detach().double(), want.double(), rtol=1e-6, atol=0)
    if recorded:
        other = z.clone().requires_grad_()
        torch.linalg.vector_norm(torch.cat([other, z.new_ones(2)])).backward()
        found.backward()
        torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-7)
        # As numbers without one have it.
        torch.testing.assert_close(found.detach(), zf.global_norm({"z": z, "r": torch.ones(2)}), rtol=1e-6, atol=0)


def test_a_norm_of_zeros_has_a_derivative_of_zero():
    zeros = torch.zeros(3)
    tx = zf.sgd(0.1)
    state = zf.init(tx, {"w": zeros})
    for norm in (lambda w: zf.global_norm({"w": w}), lambda w: zf.global_norm({"w": w}, tx, state)):
        assert torch.equal(torch.func.grad(norm)(zeros), zeros)
        assert torch.func.jvp(norm, (zeros,), (torch.ones(3),))[1] == 0
        leaf = zeros.clone().requires_grad_()
        norm(leaf).backward()
        assert torch.equal(leaf.grad, zeros)
        torch.testing.assert_close(torch.func.grad(norm)(torch.tensor([3.0, 4.0, 0.0])), torch.tensor([0.6, 0.8, 0.0]))
