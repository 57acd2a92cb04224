"""Programs by torch's operations: in chunks of leaves, or of many leaves, no bit is another one."""

from __future__ import annotations

import list_programs
import pytest
import torch
from hypothesis import given, settings

from zerofn.kernels import print_torch  # inside: how many elements are computed together
from zerofn.kernels.program import Draws, Program  # inside: a program by itself

KINDS = (list_programs.F32, list_programs.BF16, list_programs.F16, list_programs.F64)
SIZES = (0, 1, 31, 32, 33, 64, 100, 257)


def leaf_by_leaf(drawn, columns):
    """Each leaf in one piece, alone."""
    found = []
    for i in range(len(drawn.sizes)):
        draws = drawn.draws and drawn.draws._replace(keys=drawn.draws.keys[i : i + 1], offsets=drawn.draws.offsets[i:])
        own = [[column[i]] for column in columns]
        found.append(print_torch.run(drawn.program, own, drawn.numbers, [], True, draws))
    return torch.cat(found, 1) if drawn.program.sums else None


def check(drawn, chunk, monkeypatch):
    theirs = list_programs.tensors(drawn)
    want = leaf_by_leaf(drawn, theirs)
    mine = list_programs.tensors(drawn)
    with monkeypatch.context() as only:
        # Of one thread so many elements twice.
        only.setattr(print_torch, "CHUNK", chunk)
        sums = print_torch.run(drawn.program, mine, drawn.numbers, [], True, drawn.draws)
    assert list_programs.different(mine, theirs) == []
    if want is not None:
        torch.testing.assert_close(sums, want, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_have_the_bits_of_leaves_for_any_program(chunk, monkeypatch):
    @settings(max_examples=60)
    @given(list_programs.programs(KINDS, SIZES, more=True))
    def holds(drawn):
        check(drawn, chunk, monkeypatch)

    holds()


def test_a_result_in_the_memory_of_a_column_that_is_stored_and_added_up_is_read_before():
    # The second column gets what the first one had; the sum is of what was read.
    made = Program((0, 0), (), (0,), (("add", ("x0", "n0"), 0),), ((0, "x2"), (1, "x0")), (0, 0), ("x1", "x0"))
    a, b = torch.arange(4.0), torch.full((4,), 7.0)
    sums = print_torch.run(made, [[a], [b]], [1.0], [])
    assert a.tolist() == [1, 2, 3, 4] and b.tolist() == [0, 1, 2, 3] and sums.tolist() == [[28.0], [6.0]]


def test_a_leaf_whose_bits_get_another_key_is_cut_there(monkeypatch):
    made = Program((0,), (), (), (("random", ("x0", "r0", "0"), 1),), ((1, "x1"),), (1,), (), (0,), 2)
    x, offset = torch.linspace(-3, 2, 100), 2**32 - 17
    whole, parts = [torch.zeros(100, dtype=torch.bfloat16)], torch.zeros(100, dtype=torch.bfloat16)
    print_torch.run(made, [[x], whole], [], [], True, Draws(5, 3, 2, [7], [offset]))
    for low, high in ((0, 17), (17, 100)):
        print_torch.run(made, [[x[low:high]], [parts[low:high]]], [], [], True, Draws(5, 3, 2, [7], [offset + low]))
    assert torch.equal(whole[0], parts) and not torch.equal(parts.float(), x)
