"""Collectives into buffers, and work handles of running ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import innermost_transform, makes_proxies
from .._compat.tensors import outlasting, profiler_runs
from .._errors import explain
from .._profiler_ranges import NOTHING, WAIT, heard, ranged
from . import backend as raw
from .backend import RECORDED
from .group import Group
from .process_groups import FAILED, FINISHED, Waiting, begun, presence

# ----------------------------------------------------------------------------------------------------------------------
# Work handles of collectives make each wait a range of the profiler, and raise if a peer never comes.


# After this wait in a collective of gloo, a rank checks whether its peers are still there.
_LOOK = timedelta(seconds=2)


class Done:
    """The work handle of a collective that had nothing to wait for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def done_within(self, seconds: float) -> bool:
        return True


DONE = Done()


class Work:
    """A running collective: making this object begins and counts it.

    If gloo waits long, `wait` checks whether the peers are still there. A peer whose loop was shorter has left for
    good, and one that makes other calls waits for this rank elsewhere. Without the check it would wait half an hour.

    Args:
        what: the name of the collective, in traffic, profiles and errors.
        sent: the bytes that this rank sends.
        group: of ranks.
        collective: a function of torch.distributed, which is called with `given`.
        finish: copies the result to its place, once it has arrived.

    Raises:
        RuntimeError: make_fx records operations, and would leave this one out; or the process is a forked child of
            the rank, in which gloo has no threads, so that it would wait for ever.
    """

    def __init__(
        self,
        what: str,
        sent: int,
        group: Group,
        collective: Callable[..., Any],
        *given: Any,
        finish: Callable[[], object] | None = None,
    ):
        if makes_proxies():
            raise RuntimeError(RECORDED)
        if group.process != os.getpid():
            raise RuntimeError(_in_child(what))
        group.traffic.sent(what, sent)
        self.work: Any
        if group.silent:
            self.work = None
        elif profiler_runs():
            with outlasting(what):
                self.work = collective(*given, group=group.pg, async_op=True)
        else:
            self.work = collective(*given, group=group.pg, async_op=True)
        self.what, self.group, self.finish = what, group, finish
        self.number = group.traffic.begun

    def wait(self) -> bool:
        """Return once the result is where it belongs."""
        if self.work is None:
            return True
        listened = heard() is not None or profiler_runs()
        with ranged(WAIT, self.what) if listened else NOTHING:
            if self.group.device.type != "cpu":
                self.work.wait()
            else:
                try:
                    self.work.wait(_LOOK)
                except RuntimeError as error:
                    self._wait_for_peers(error)
        if self.finish is not None:
            with torch.no_grad():
                self.finish()
        self.work = self.finish = None
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or self.work.is_completed()

    def done_within(self, seconds: float) -> bool:
        """Wait for so many seconds at most. Return whether `wait` would return at once now."""
        deadline = time.monotonic() + seconds
        while not self.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self.group.device.type != "cpu":
                # NCCL's `wait` makes the GPU wait, and not the host, so the host polls.
                time.sleep(5e-5)
                continue
            # Polling would take processor time from gloo's own threads. `wait` raises errors, so they are ignored here.
            # gloo counts in milliseconds, and 0 ms would be no limit.
            with suppress(RuntimeError):
                self.work.wait(timedelta(seconds=max(left, 1e-3)))
        return True

    def _wait_for_peers(self, error: RuntimeError) -> None:
        """Go on after a wait that has ended with `error`. Any error but that of a time limit is raised."""
        reason, announced = "", False
        try:
            while not self.work.is_completed():
                if "timed out" not in str(error).lower():
                    raise error
                if not announced and (store := presence()) is not None:
                    mine = Waiting(self.what, self.group.pg.group_name, self.number, True, begun())
                    _quietly(store.set_waiting, mine)
                announced = True
                before, reason = reason, self._why_endless()
                # Only a second check with the same result counts: a message from another rank may be on its way.
                if reason and reason == before:
                    raise RuntimeError(reason) from None
                try:
                    self.work.wait(_LOOK)
                except RuntimeError as later:
                    error = later
            # The collective may have ended between the time limit and the check. `wait` then raises its error, if any.
            self.work.wait()
        finally:
            if announced and (store := presence()) is not None:
                _quietly(store.clear_waiting)

    def _why_endless(self) -> str:
        """Why this wait will not end; empty while it may."""
        store = presence()
        if store is None:
            return ""
        ended = {r: how for r in self.group.ranks if (how := _quietly(store.how_ended, r))}
        if failed := [str(r) for r, how in ended.items() if how == FAILED]:
            return (
                f"this rank waits in {self.what} for rank {', '.join(failed)}, which {FAILED}: its own error says why"
            )
        if ended:
            return (
                f"this rank waits in {self.what} for rank {', '.join(map(str, ended))}, which {FINISHED}. "
                "Every rank must make the same number of steps: give all of them as many batches, or end "
                "every loop with the shortest. Under shard calls of the model count too: "
                "after the last step, evaluate on every rank."
            )
        mine, channel = begun(), self.group.pg.group_name
        for rank in self.group.ranks:
            other: Waiting | None = _quietly(store.waiting, rank) if rank != store.rank else None
            if other is None or not other.bound:
                continue
            # Crossed: both are at the same number of one group, in different collectives, so neither can end rightly.
            # Missed: each has left out a collective for which the other one waits.
            crossed = (other.channel, other.number) == (channel, self.number) and other.what != self.what
            missed = other.begun.get(channel, self.number) < self.number
            if crossed or (missed and mine.get(other.channel, other.number) < other.number):
                return explain(
                    f"this rank waits in {self.what} for rank {rank}, and rank {rank} in {other.what} for this one",
                    "the ranks make different calls, and each waits for the other's",
                    "the same calls of zerofn in the same order on every rank; inside of them what one rank does alone",
                )
        return ""


def _in_child(what: str) -> str:
    return explain(
        f"{what} in a child of a rank's process, such as a worker of a DataLoader",
        "a forked process has no connection to other ranks; a sharded model gathers its parameters by them",
        "with opt.gathered(): plain = copy.deepcopy(model), on every rank before the workers start;\n"
        "plain in the workers",
    )


def _quietly(ask: Callable[..., Any], *given: Any) -> Any:
    """`ask(*given)`; None if the store is gone, where gloo itself raises for the collective."""
    try:
        return ask(*given)
    except RuntimeError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# These functions run collectives into given buffers: all-gather, reduce-scatter, all-reduce, all-to-all. They count
# traffic.
#
# They only sum: to average, the caller divides *before* the sum, so that fp16 does not overflow.
#
# In a graph of the compiler they are nodes that give the same numbers. Python does not run with the graph, so there
# they are not counted, and a wait does not look for peers. `async_op` has no effect there: the compiler orders
# collectives.


def _refuse_fp8(t: Tensor, what: str) -> None:
    if t.is_floating_point():
        raise TypeError(f"{what} cannot add {t.dtype} values; cast to bfloat16 or float32 first (reduce_dtype=)")


def _fp8_as_bytes(*tensors: Tensor) -> tuple[Tensor, ...]:
    # gloo does not know fp8. Moving it needs no arithmetic, so it is sent as bytes. Reducing it needs some.
    return tuple(t.view(torch.uint8) if t.is_floating_point() else t for t in tensors)


def all_gather_into(
    out: Tensor, inp: Tensor, group: Group, async_op: bool = False, what: str = "all_gather", numbers: bool = False
) -> Any:
    """Concatenate every rank's `inp` (n, ...) along axis 0 into `out` (size * n, ...), both contiguous.

    `inp` may be this rank's own rows of `out`. `what` is its name in traffic, profiles and errors, and `numbers` says
    that ranks agree by it (`Traffic.of_numbers`). Returns a work handle if `async_op`.
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
    if numbers:
        group.traffic.of_numbers[what] += sent
    if group.size != 2 or group.device.type != "cpu":
        work = Work(what, sent, group, raw.all_gather_single, out, inp)
    else:
        # gloo's all-gather gathers into its own memory and copies everything from there. A swap needs no copy.
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
    all_gather_into(every, mine, group, what=what, numbers=True)
    return as_rows(every.view(group.size, len(numbers)), mine)


def as_rows(every: Tensor, mine: Tensor) -> list[list[int]]:
    """The rows of integers that all ranks have sent; one list for all of them if they are equal.

    They nearly always are. Then the time in Python does not grow with the number of ranks, which may be thousands.

    Examples:
        >>> rows = as_rows(torch.ones(3, 2), torch.ones(2))
        >>> rows[0], rows[2] is rows[0]
        ([1.0, 1.0], True)
    """
    return [mine.tolist()] * len(every) if torch.equal(every, mine.expand_as(every)) else every.tolist()


def reduce_scatter_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False) -> Any:
    """Add every rank's `inp` (size * n, ...) and write this rank's rows of the sum into `out` (n, ...).

    It only sums: to average, the caller divides *before* the sum (gloo's own average divides after it,
    and overflows in fp16). `out` may be this rank's own rows of `inp`. Returns a work handle if `async_op`.
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
    # gloo's reduce-scatter is a copy and an all-reduce: it sends twice the bytes, and rounds 16-bit floats after every
    # addition. So on CPUs ranks swap rows, or exchange them by an all-to-all, and sum them here.
    if group.device.type != "cpu":
        work = Work(what, sent, group, raw.reduce_scatter_single, out, inp)
    elif group.size == 2:
        rows, received = inp.detach().chunk(2), torch.empty_like(out)
        # `torch.sum` gives the same numbers, except for -0.0, and takes three times as long for 16-bit floats.
        add = partial(torch.add, rows[group.rank], received, out=out.detach())
        work = _swap(what, sent, group, received, rows[1 - group.rank], add)
    else:
        received = torch.empty_like(inp)
        parts = received.reshape(group.size, *out.shape)
        add = partial(torch.sum, parts, 0, dtype=out.dtype, out=out.detach())
        work = Work(what, sent, group, raw.all_to_all_single, received, inp, finish=add)
    return work if async_op else work.wait() and None


def _swap(
    what: str, sent: int, group: Group, out: Tensor, inp: Tensor, finish: Callable[[], object] | None = None
) -> Work:
    """Between two ranks: send `inp` to the other one, and receive the other's, of the same length, in `out`."""
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


def all_to_all_into(out: Tensor, inp: Tensor, group: Group, async_op: bool = False, what: str = "all_to_all") -> Any:
    """Send row r of `inp` (size, n) to rank r, and receive row r of `out` from it, both contiguous.

    `what` is its name in traffic, profiles and errors. Returns a work handle if `async_op`.
    """
    if group.size == 1:
        out.copy_(inp)
    if group.size == 1 or not out.numel():
        return DONE if async_op else None
    if torch.compiler.is_compiling():
        raw.all_to_all_single(out, inp, group=group.pg)
        return DONE if async_op else None
    work = Work(what, (group.size - 1) * inp.nbytes // group.size, group, raw.all_to_all_single, out, inp)
    return work if async_op else work.wait() and None


def exchange_into(out: Tensor, inp: Tensor, outs: list[int], ins: list[int], group: Group) -> None:
    """Send `ins[r]` elements of `inp` to rank r of several, in turn; `outs[r]` come from it. Both are flat."""
    if inp.element_size() == 1:
        out, inp = _fp8_as_bytes(out, inp)
    # A rank with nothing to send or receive takes part too, since others may have something.
    if torch.compiler.is_compiling():
        raw.all_to_all_single(out, inp, outs, ins, group=group.pg)
        return
    sent = (inp.numel() - ins[group.rank]) * inp.element_size()
    Work("all_to_all", sent, group, raw.all_to_all_single, out, inp, outs, ins).wait()


def all_reduce_(t: Tensor, group: Group, op: str = "sum", async_op: bool = False, numbers: bool = False) -> Any:
    """Reduce `t` over the ranks in place; `op` is "sum", "max" or "min". `numbers` as in `all_gather_into`."""
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
    if numbers:
        group.traffic.of_numbers["all_reduce"] += sent
    work = Work("all_reduce", sent, group, raw.all_reduce, t, raw.REDUCE[op])
    return work if async_op else work.wait() and None
