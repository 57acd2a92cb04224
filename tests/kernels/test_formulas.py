"""Matrices of a list that are computed together: the numbers of each by itself, in as few calls as are worth it."""

import pytest
import torch

from zerofn.kernels import lists  # inside: which matrices share a call
from zerofn.kernels.lists import TILE, on_stacks  # inside: as above
from zerofn.kernels.program import TensorList  # inside: as above
from zerofn.transforms.muon import orthogonal  # inside: a function of stacks by itself

# Shapes, and the calls that they take: small matrices of as many rows share one, transposed or not.
CALLS = {
    "a block": ([(8, 24), (8, 8), (8, 32), (32, 8)] * 3, 1),
    "one shape": ([(3, 5)] * 4, 1),
    "one matrix": ([(5, 3)], 1),
    "other rows": ([(3, 5), (4, 5), (5, 4), (7, 3)], 2),
    "experts": ([(2, 3, 5), (2, 4, 3), (3, 5)], 2),
    "other experts": ([(2, 3, 5), (3, 3, 5)], 2),
    "no elements": ([(3, 0), (3, 4), (0, 4), (2, 0, 3)], 3),
}
# The same where zeros of six columns and two rows are worth a call, and no more.
FEW = TILE * 2 * 6
LIMITED = {
    "as many zeros": ([(2, 8), (2, 2)], 1),
    "one too many": ([(2, 9), (2, 2)], 2),
    "of two matrices": ([(2, 8), (2, 2), (2, 2)], 2),
    "of each shape": ([(2, 8), (2, 2), (2, 5), (5, 2)], 1),
    "many rows": ([(80, 96), (80, 80)], 2),
}
EVERY = [(name, *row, lists.WIDENED) for name, row in CALLS.items()]
EVERY += [(name, *row, FEW) for name, row in LIMITED.items()]


@pytest.mark.parametrize(("shapes", "calls", "most"), [x[1:] for x in EVERY], ids=[x[0] for x in EVERY])
def test_matrices_share_a_call_and_are_what_each_is_alone(shapes, calls, most, monkeypatch):
    monkeypatch.setattr(lists, "WIDENED", most)
    monkeypatch.setattr(lists, "stacks_on", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    called = []

    def direction(x):
        called.append(x.shape)
        return orthogonal(x, 5, x.dtype)

    factor = {shape: 1.0 + i for i, shape in enumerate(dict.fromkeys(shapes))}
    found = on_stacks(direction, lambda shape: factor[tuple(shape)], TensorList(given)).tensors
    assert len(called) == calls, called
    for x, shape, made in zip(given, shapes, found, strict=True):
        alone = orthogonal(x, 5, x.dtype) * factor[shape]
        torch.testing.assert_close(made, alone, rtol=1e-10, atol=1e-12)
        assert made.is_contiguous()


@pytest.mark.parametrize("factors", [(2.0, 2.0, 2.0), (2.0, 3.0, 0.5)])
def test_on_a_cpu_each_matrix_has_the_bits_that_it_has_alone(factors):
    """Also where the iteration is in another dtype than the result."""
    shapes = [(8, 300), (300, 8), (4, 8, 16)]
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in shapes]
    factor = dict(zip(shapes, factors, strict=True))

    def direction(x):
        return orthogonal(x, 5, x.dtype)

    found = on_stacks(direction, lambda shape: factor[tuple(shape)], TensorList(given), torch.float32).tensors
    for x, shape, made in zip(given, shapes, found, strict=True):
        assert torch.equal(made, direction(x).float() * factor[shape])
