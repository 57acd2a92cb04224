"""Collectives that write into given buffers: counted, watched, over shared memory where ranks share a machine.

Sums only: an average is the caller's division *before* the sum, where fp16 cannot overflow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _collectives as raw
from ._group import Group
from ._lane import INLINE, Passage
from ._waiting import DONE, Landing, Watched, run


def _publish(t: Tensor, what: str, group: Group, land: Callable[[list[Tensor]], None], async_op: bool) -> Any:
    """A collective over shared memory: what every rank has published is handed to `land`."""
    assert group.lane is not None
    passage = group.lane.publish(t)

    def read() -> None:
        land(passage.parts(t))
        passage.close()

    work = Landing(Watched(passage, what, group), read)
    return work if async_op else work.wait() and None


def _add_up(parts: list[Tensor], out: Tensor) -> None:
    """The sum in the order of ranks; 16-bit floats are added in fp32 and rounded once."""
    if len(parts) == 2 and out.is_floating_point():
        torch.add(*parts, out=out)
    else:
        torch.sum(torch.stack(parts), 0, dtype=out.dtype, out=out)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """A buffer, not initialised, for what is to be sent over a group: one that travels without another copy."""
    if group.lane is not None and device.type == "cpu" and torch.Size(shape).numel():
        return group.lane.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def _no_fp8(t: Tensor, what: str) -> None:
    if t.is_floating_point() and t.element_size() == 1:
        raise TypeError(f"{what} cannot add {t.dtype} values; cast to bfloat16 or float32 first (reduce_dtype=)")


def all_gather_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Concatenates every rank's `inp` (n, ...) along axis 0 into `out` (size * n, ...), both contiguous.

    `inp` may be this rank's own part of `out`. Returns a work handle if `async_op`.
    """
    if group.size == 1 and out.data_ptr() != inp.data_ptr():
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return DONE if async_op else None
    group.traffic.count("all_gather", group.size, out.numel() * out.element_size())
    if group.lane is not None and out.is_cpu:

        def land(parts: list[Tensor]) -> None:
            for into, part in zip(out.detach().view(-1).chunk(group.size), parts, strict=True):
                into.copy_(part)

        return _publish(inp, "all_gather", group, land, async_op)
    work = raw.begin_gather(out, inp, group)
    return run(work, "all_gather", group, async_op)


class Numbers:
    """A few whole numbers of each rank, on their way."""

    def __init__(self, mine: Sequence[int], group: Group) -> None:
        self.group = group
        self.told: Passage | None = None
        self.form = struct.Struct(f"={len(mine)}q")
        if group.size > 1 and group.lane is not None and self.form.size <= INLINE:
            group.traffic.count("all_gather", group.size, group.size * self.form.size)
            self.told = group.lane.tell(self.form.pack(*mine))
            self.work: Any = Watched(self.told, "all_gather", group)
            return
        # The buffers must live until the work is done.
        self.sent = torch.tensor(list(mine), dtype=torch.int64, device=group.device)
        self.every = self.sent.new_empty((group.size, len(mine)))
        self.work = all_gather_into(self.every.view(-1), self.sent, group, async_op=True)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def read(self) -> list[list[int]]:
        """Every rank's."""
        self.work.wait()
        if self.told is None:
            return self.every.tolist()
        found = [list(self.form.unpack(data)) for data in self.told.told()]
        self.told.close()
        return found


class Rows:
    """One row of each rank, to be read where it lies: a gather whose result is put together by the caller.

    Attributes:
        mine: this rank's, to be filled before `begin`.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: Group) -> None:
        self.group = group
        self.work: Any = None
        self.found: Passage | None = None
        self.shared = group.lane is not None and device.type == "cpu" and torch.Size(shape).numel() > 0
        if self.shared:
            self.mine = scratch(shape, dtype, device, group)
        else:
            self.all = torch.empty((group.size, *shape), dtype=dtype, device=device)
            self.mine = self.all[group.rank]

    def begin(self) -> Rows:
        """Tell the others that this rank's is there."""
        group, mine = self.group, self.mine
        if not self.shared:
            self.work = all_gather_into(self.all.view(-1), mine.view(-1), group, async_op=True)
            return self
        assert group.lane is not None
        group.traffic.count("all_gather", group.size, group.size * mine.numel() * mine.element_size())
        self.found = group.lane.publish(mine)
        self.work = Watched(self.found, "all_gather", group)
        return self

    def read(self) -> list[Tensor]:
        """Every rank's, until `close`."""
        self.work.wait()
        if self.found is None:
            return list(self.all)
        return [part.view(self.mine.shape) for part in self.found.parts(self.mine)]

    def close(self) -> None:
        """They have been read."""
        if self.found is not None:
            self.found.close()


def reduce_scatter_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Adds every rank's `inp` (size * n, ...) and leaves this rank's part in `out` (n, ...).

    Only sums: an average is the caller's division, made *before* the sum (gloo's own averages after it,
    and overflows in fp16). `out` may be this rank's own part of `inp`. Returns a work handle if `async_op`.
    """
    if group.size == 1 and out.data_ptr() != inp.data_ptr():
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return DONE if async_op else None
    _no_fp8(inp, "reduce_scatter")
    group.traffic.count("reduce_scatter", group.size, inp.numel() * inp.element_size())
    if group.device.type != "cpu":
        return run(raw.begin_scatter(out, inp, group), "reduce_scatter", group, async_op)
    if group.lane is not None and out.is_cpu:

        def land(parts: list[Tensor]) -> None:
            _add_up([p.chunk(group.size)[group.rank] for p in parts], out.detach().view(-1))

        return _publish(inp, "reduce_scatter", group, land, async_op)
    # gloo's own is a copy and an all-reduce: twice the bytes, and 16-bit floats rounded after every addition.
    received = torch.empty_like(inp)
    sent = raw.begin_exchange(received, inp, group)

    def add() -> None:
        parts = received.reshape(group.size, *out.shape)
        torch.sum(parts, 0, dtype=out.dtype, out=out.detach())

    work = Landing(Watched(sent, "reduce_scatter", group), add)
    return work if async_op else work.wait() and None


def all_reduce_(t: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduces `t` over the ranks in place; `op` is "sum", "max" or "min"."""
    if op not in raw.REDUCE:
        raise ValueError(f'op={op!r} is not one of "sum", "max", "min" (an average is a division before the sum)')
    if group.size == 1 or not t.numel():
        return DONE if async_op else None
    _no_fp8(t, "all_reduce")
    group.traffic.count("all_reduce", group.size, t.numel() * t.element_size())
    if _at_once(t, group):

        def land(parts: list[Tensor]) -> None:
            whole = t.detach()
            if op == "sum":
                _add_up([p.view(t.shape) for p in parts], whole)
            else:
                stacked = torch.stack([p.view(t.shape) for p in parts])
                whole.copy_(stacked.amax(0) if op == "max" else stacked.amin(0))

        return _publish(t, "all_reduce", group, land, async_op)
    work = raw.begin_reduce(t, op, group)
    return run(work, "all_reduce", group, async_op)


def _at_once(t: Tensor, group: Group) -> bool:
    """Whether each rank reads all of what the others send: from three ranks on, only if that is little."""
    few = group.size == 2 or t.numel() * t.element_size() <= 1 << 16
    return (
        group.lane is not None and t.is_cpu and few and (t.is_floating_point() or t.dtype in (torch.int32, torch.int64))
    )


def all_reduce_into(buffer: Tensor, blocks: Sequence[Tensor], group: Group) -> tuple[Any, Sequence[Tensor]]:
    """The sum over ranks of a buffer from `scratch`, which is used up; (work handle, where the sum will be).

    Args:
        blocks: flat tensors that, end to end, have room for it: it is in them, or in as many parts of the buffer.
    """
    if group.size == 1 or not _at_once(buffer, group) or not buffer.numel():
        return all_reduce_(buffer, group, async_op=True), buffer.split([len(x) for x in blocks])
    _no_fp8(buffer, "all_reduce")
    group.traffic.count("all_reduce", group.size, buffer.numel() * buffer.element_size())

    def land(parts: list[Tensor]) -> None:
        cut = (p.split([len(x) for x in blocks]) for p in parts)
        for block, *found in zip(blocks, *cut, strict=True):
            _add_up(found, block)

    return _publish(buffer, "all_reduce", group, land, True), blocks


def broadcast_(t: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Copies `t` of rank `src` (a rank of the group) into `t` of every rank."""
    if group.size == 1 or not t.numel():
        return DONE if async_op else None
    group.traffic.count("broadcast", group.size, t.numel() * t.element_size())
    return run(raw.begin_broadcast(t, src, group), "broadcast", group, async_op)
