"""Leaves in the buffer of a collective: written in place and concatenated in a graph, with the same bits."""

import itertools

import pytest
import torch
from covering import covering

from zerofn.extend import span, width
from zerofn.kernels.packing import flagged, flat_to_sum, row_of, rows_to_sum, wholes_of  # inside: a kernel by itself

SHAPES = [(5, 3), (4,), (1,), (0, 2), (), (2, 3)]
# Each is compiled anew.
SIZES = [1, 3, pytest.param(2, marks=pytest.mark.slow)]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


def both(fn, *given):
    """What `fn` gives outside of a graph, and within one."""
    torch._dynamo.reset()
    return fn(*given), torch.compile(fn, backend="eager", fullgraph=True)(*given)


def leaves(dtype):
    torch.manual_seed(0)
    return [torch.randn(torch.Size(s).numel()).to(dtype) for s in SHAPES]


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_shards_are_whole_leaves_again(size):
    given, widths = leaves(torch.float32), [width(s, size) for s in SHAPES]
    numels = [torch.Size(s).numel() for s in SHAPES]
    for graph in (0, 1):
        rows = []
        for rank in range(size):
            shards = [x[slice(*span(s, rank, size))] for s, x in zip(SHAPES, given, strict=True)]
            rows.append(both(lambda parts, into: row_of(parts, widths, into), shards, torch.zeros(sum(widths))))
        every = torch.stack([row[graph] for row in rows])
        for found in both(lambda x: wholes_of(x, widths, numels), every):
            assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
        for few in (False, True):
            into = [torch.full_like(x, torch.nan) for x in given]
            wholes_of(every, widths, numels, into, few)
            assert all(torch.equal(a, b) for a, b in zip(into, given, strict=True))


def outside(fn, *given):
    """In the place of `both`, where no graph is made."""
    return [fn(*given)] * 2


CELLS = list(itertools.product(((1, (1, 5)), (3, (1, 5)), (3, ())), DTYPES))
MORE = list(itertools.product(((2, (1, 5)), (2, ())), DTYPES))
# In graphs each dtype over ranks, and one of one process: what a graph does with one it does with all.
SOON = [CELLS[0], *covering(CELLS[len(DTYPES) :])]


@pytest.mark.parametrize(
    ("size", "missing", "dtypes", "run"),
    [
        *((*ranks, dtypes, both if (ranks, dtypes) in SOON else outside) for ranks, dtypes in CELLS),
        *(pytest.param(*x, y, both, marks=pytest.mark.slow) for x, y in [*CELLS, *MORE] if (x, y) not in SOON),
    ],
)
def test_what_is_to_be_summed_is_the_same_in_a_graph(size, missing, dtypes, run):
    given, widths = leaves(dtypes[0]), [width(s, size) for s in SHAPES]
    numels = [x.numel() for x in given]
    grads = [None if i in missing else x for i, x in enumerate(given)]
    kind, cpu = dtypes[1], torch.device("cpu")
    here, there = run(lambda xs: rows_to_sum(xs, widths, numels, size, kind, cpu), grads)
    assert torch.equal(here, rows_to_sum(grads, widths, numels, size, kind, cpu, few=True))
    assert here.dtype == kind and here.shape == (size, sum(widths) + len(SHAPES)) and torch.equal(here, there)
    # Divided in the wider of the two dtypes.
    means = [
        torch.zeros(n, dtype=kind) if x is None else (x.to(torch.promote_types(x.dtype, kind)) / size).to(kind)
        for x, n in zip(grads, numels, strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(wholes_of(here[:, : sum(widths)], widths, numels), means, strict=True))
    flat, in_graph = run(lambda xs: flat_to_sum(xs, numels, size, kind, cpu), grads)
    assert torch.equal(flat, in_graph) and torch.equal(flat[: sum(numels)], torch.cat(means))
    for flags in (here[0, sum(widths) :], flat[sum(numels) :]):
        assert flagged(flags) == [x is not None for x in grads]
    assert run is outside or both(flagged, flat[sum(numels) :])[1] == [True] * len(SHAPES)
