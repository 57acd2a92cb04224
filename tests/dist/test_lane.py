"""Shared memory between ranks of one machine: the bits of gloo, memory used again, an end that is seen."""

import os
import time
import time

import pytest
import torch

from zerofn._collectives import barrier
from zerofn._groups import world_group
from zerofn._meeting import SWITCH
from zerofn._transfers import Rows, all_gather_into, all_reduce_, all_reduce_into, reduce_scatter_into, scratch
from zerofn._launch import RankError, launch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def every_collective(shared):
    os.environ[SWITCH] = shared
    group = world_group("here")
    assert (group.lane is not None) == (shared == "1")
    n, r = group.size, group.rank
    out = []
    for dtype in DTYPES:
        # Inside a message, in one page, and in many.
        for numel in (1, 7, 2000, 70_001):
            torch.manual_seed(r)
            whole = torch.randn(n * numel).mul(3).to(dtype) if dtype.is_floating_point else torch.arange(n * numel) % 5
            whole = whole.to(dtype)
            full, part = torch.empty_like(whole), torch.empty(numel, dtype=dtype)
            all_gather_into(full, whole[:numel].clone(), group)
            reduce_scatter_into(part, whole, group)
            rows = Rows((numel,), dtype, group.device, group)
            rows.mine.copy_(whole[:numel])
            same = all(torch.equal(a, b) for a, b in zip(rows.begin().read(), full.chunk(n), strict=True))
            rows.close()
            assert same
            total = whole.clone()
            all_reduce_(total, group)
            buffer = scratch(whole.shape, dtype, group.device, group)
            buffer.copy_(whole)
            into = [torch.empty(k, dtype=dtype) for k in (numel, (n - 1) * numel)]
            work, sums = all_reduce_into(buffer, into, group)
            work.wait()
            assert torch.equal(torch.cat(tuple(sums)), total)
            top = whole.clone()
            all_reduce_(top, group, "max")
            out += [full, part, total, top]
    return out, group.traffic.by_op


@pytest.mark.parametrize("n", [2, 3])
def test_the_bits_and_the_counts_of_gloo(n):
    here, there = (launch(every_collective, n, shared, timeout=120) for shared in "10")
    for (ours, sent), (theirs, expected) in zip(here, there, strict=True):
        assert sent == expected
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            if n == 2 or not a.dtype.is_floating_point:
                assert torch.equal(a, b)
            else:  # the order of a sum of three differs
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def many_under_way():
    group = world_group("here")
    lane = group.lane
    work = []
    for i in range(40):
        x = torch.full((5000,), float(i + group.rank))
        out = torch.empty(2500)
        work.append((reduce_scatter_into(out, x, group, async_op=True), out, 2.0 * i + 1))
        x.fill_(-1.0)  # what was given is free again, unlike with gloo
        if i % 3 == 2:
            # Out of their order, as far as they are here.
            for handle, got, expected in reversed(work):
                handle.wait()
                assert (got == expected).all()
            work.clear()
    for handle, got, expected in work:
        handle.wait()
        assert (got == expected).all()
    barrier(group)
    # Sizes that come and go: regions that nobody reads are used again or given back.
    for i in range(60):
        t = torch.ones(1000 * (1 + i % 7))
        all_reduce_(t, group)
        assert (t == 2).all()
    return len(lane.regions), len([k for k in lane.theirs if k[0] != group.rank])


def test_memory_is_used_again():
    for mine, theirs in launch(many_under_way, 2, timeout=60):
        assert mine <= 12
        assert theirs <= 12


def scratch_is_kept_apart():
    group = world_group("here")
    a, b = scratch((1000,), torch.float32, group.device, group), scratch((1000,), torch.float32, group.device, group)
    assert a.data_ptr() != b.data_ptr()
    address = a.data_ptr()
    del a
    c = scratch((1000,), torch.float32, group.device, group)
    b.fill_(group.rank)
    c.fill_(10)
    work, (sums,) = all_reduce_into(b, [torch.empty(1000)], group)
    d = scratch((1000,), torch.float32, group.device, group).fill_(7)
    work.wait()
    return c.data_ptr() == address, sums[0].item(), d.data_ptr() not in (b.data_ptr(), c.data_ptr())


def test_a_buffer_is_nobody_elses_until_it_was_read():
    assert launch(scratch_is_kept_apart, 2, timeout=60) == [(True, 1.0, True)] * 2


def ends_early():
    group = world_group("here")
    if group.rank == 1:
        os._exit(3)
    begun = time.monotonic()
    try:
        all_reduce_(torch.ones(100_000), group)
    except RuntimeError as error:
        assert "has ended" in str(error) or "broke" in str(error)
        assert time.monotonic() - begun < 30
        raise
    return "no error"


def test_the_end_of_a_rank_is_seen_at_once():
    with pytest.raises(RankError, match=r"rank 1 ended with exit code 3"):
        launch(ends_early, 2, timeout=60)


def of_two_sizes():
    group = world_group("here")
    all_reduce_(torch.ones(100 + group.rank), group)


def test_collectives_of_different_sizes_are_an_error():
    with pytest.raises(RankError, match=r"40[04] bytes and rank \d of the group in one of 40[04]"):
        launch(of_two_sizes, 2, timeout=60)


def one_refuses(rank):
    os.environ[SWITCH] = "0" if int(os.environ["RANK"]) == rank else "1"
    group = world_group("here")
    t = torch.ones(3)
    all_reduce_(t, group)
    return group.lane is None, t[0].item()


def test_all_ranks_come_to_the_same_decision():
    assert launch(one_refuses, 3, 1, timeout=60) == [(True, 3.0)] * 3
