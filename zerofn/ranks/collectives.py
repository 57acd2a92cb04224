"""Collectives into given buffers: all-gather, reduce-scatter, all-reduce, all-to-all, with traffic counted.

Sums only: an average is the caller's division *before* the sum, where fp16 cannot overflow.

In a graph of the compiler they are nodes that give the same numbers. Python does not run with the graph, so there they
are not counted, and a wait does not look for peers. `async_op` does nothing there: the compiler orders collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import innermost_transform
from . import backend as raw
from .group import Group
from .work_handles import DONE, Work


def _refuse_fp8(t: Tensor, what: str) -> None:
    if t.is_floating_point():
        raise TypeError(f"{what} cannot add {t.dtype} values; cast to bfloat16 or float32 first (reduce_dtype=)")


def _fp8_as_bytes(*tensors: Tensor) -> tuple[Tensor, ...]:
    # fp8 is unknown to gloo. To move it needs no arithmetic, so it may travel as bytes; to reduce it does.
    return tuple(t.view(torch.uint8) if t.is_floating_point() else t for t in tensors)


def all_gather_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False, what: str = "all_gather") -> Any:
    """Concatenate every rank's `inp` (n, ...) along axis 0 into `out` (size * n, ...), both contiguous.

    `inp` may be this rank's own part of `out`. `what` is its name in traffic, profiles and errors. Returns a work
    handle if `async_op`.
    """
    if group.size == 1:
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return DONE if async_op else None
    if inp.element_size() == 1:
        out, inp = _fp8_as_bytes(out, inp)
    if torch.compiler.is_compiling():
        raw.all_gather_single(out, inp, group=group.pg)
        return DONE if async_op else None
    sent = (group.size - 1) * out.nbytes // group.size
    if group.size != 2 or group.device.type != "cpu":
        work = Work(what, sent, group, raw.all_gather_single, out, inp)
    else:
        # gloo's own gathers into memory of its own and copies all of it from there.
        rows = out.detach().chunk(2)
        # Tensors that torch.func has wrapped have no address.
        if innermost_transform() is not None or rows[group.rank].data_ptr() != inp.data_ptr():
            rows[group.rank].copy_(inp.detach())
        work = _swap(what, sent, group, rows[1 - group.rank], inp)
    return work if async_op else work.wait() and None


def gather_numbers(numbers: Sequence[int], group: Group, what: str = "all_gather") -> list[list[int]]:
    """The integers of each rank, in rank order; every rank gives as many."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    every = mine.new_empty(group.size * len(numbers))
    all_gather_into(every, mine, group, what=what)
    return every.view(group.size, len(numbers)).tolist()


def reduce_scatter_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Add every rank's `inp` (size * n, ...) and write this rank's part of the sum into `out` (n, ...).

    Only sums: an average is the caller's division, made *before* the sum (gloo's own averages after it,
    and overflows in fp16). `out` may be this rank's own part of `inp`. Returns a work handle if `async_op`.
    """
    if group.size == 1:
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return DONE if async_op else None
    if inp.element_size() == 1:
        _refuse_fp8(inp, "reduce_scatter")
    if torch.compiler.is_compiling():
        _scatter_in_graph(out, inp, group)
        return DONE if async_op else None
    what, sent = "reduce_scatter", (group.size - 1) * inp.nbytes // group.size
    # gloo's own is a copy and an all-reduce: twice the bytes, and 16-bit floats rounded after every addition.
    if group.device.type != "cpu":
        work = Work(what, sent, group, raw.reduce_scatter_single, out, inp)
    elif group.size == 2:
        rows, received = inp.detach().chunk(2), torch.empty_like(out)
        # The same number as that of `sum`, which takes three times as long for 16-bit floats; but -0.0 stays negative.
        add = lambda: torch.add(rows[group.rank], received, out=out.detach())  # noqa: E731
        work = _swap(what, sent, group, received, rows[1 - group.rank], add)
    else:
        received = torch.empty_like(inp)
        parts = received.reshape(group.size, *out.shape)
        add = lambda: torch.sum(parts, 0, dtype=out.dtype, out=out.detach())  # noqa: E731
        work = Work(what, sent, group, raw.all_to_all_single, received, inp, finish=add)
    return work if async_op else work.wait() and None


def _swap(
    what: str, sent: int, group: Group, out: Tensor, inp: Tensor, finish: Callable[[], object] | None = None
) -> Work:
    """Of two ranks: send `inp` to the other one, and receive that of the other, of the same length, in `out`."""
    n = inp.shape[0]
    lengths = [0, n] if group.rank == 0 else [n, 0]
    return Work(what, sent, group, raw.all_to_all_single, out, inp, lengths, lengths, finish=finish)


def _scatter_in_graph(out: Tensor, inp: Tensor, group: Group) -> None:
    if group.device.type != "cpu":
        raw.reduce_scatter_single(out, inp, group=group.pg)
        return
    received = torch.empty_like(inp)
    raw.all_to_all_single(received, inp, group=group.pg)
    out.copy_(received.reshape(group.size, *out.shape).sum(0, dtype=out.dtype))


def exchange_into(out: Tensor, inp: Tensor, outs: list[int], ins: list[int], group: Group) -> None:
    """Send `ins[r]` elements of `inp` to rank r of several, in turn; `outs[r]` come from it. Both are flat."""
    if inp.element_size() == 1:
        out, inp = _fp8_as_bytes(out, inp)
    # Also where this rank has nothing to send or to get: others may have.
    if torch.compiler.is_compiling():
        raw.all_to_all_single(out, inp, outs, ins, group=group.pg)
        return
    sent = (inp.numel() - ins[group.rank]) * inp.element_size()
    Work("all_to_all", sent, group, raw.all_to_all_single, out, inp, outs, ins).wait()


def all_reduce_(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `t` over the ranks in place; `op` is "sum", "max" or "min"."""
    if op not in raw.REDUCE:
        raise ValueError(f'op={op!r} is not one of "sum", "max", "min" (an average is a division before the sum)')
    if group.size == 1 or not t.numel():
        return DONE if async_op else None
    if t.element_size() == 1:
        _refuse_fp8(t, "all_reduce")
    if torch.compiler.is_compiling():
        raw.all_reduce(t, raw.REDUCE[op], group=group.pg)
        return DONE if async_op else None
    sent = 2 * (group.size - 1) * t.nbytes // group.size
    work = Work("all_reduce", sent, group, raw.all_reduce, t, raw.REDUCE[op])
    return work if async_op else work.wait() and None
