"""`zf.launch`: runs a function on local ranks. This file is the caller's side."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from .._errors import explain
from .backend import default_backend
from .fork_server import NOTE, NUMBER, load, main_file, pack, pickler, read, server, store_path, unnamed_file

# ----------------------------------------------------------------------------------------------------------------------
# The caller's side of one `launch` starts ranks, waits for them, and raises what the first one raised.
#
# Each rank has two sockets, so that if any process ends the others do:
#
# * `control`, between server and caller: the server sends the rank's pid, later its exit code. When the caller's end
#   closes, also because the caller died, the server kills the rank's process group.
# * `gate`, between rank and caller: the rank sends "finished", and ends when all have and the caller says so. A rank
#   that ended earlier would close sockets that the others still use.


# Seconds to wait for the rank that failed first, after one that may have failed because of it; a busy machine is slow.
_GRACE = 3.0
# The end of a process may be seen this many seconds late. Used if another rank has an error that it did not cause.
_LATE = 0.5


class RankError(RuntimeError):
    """A rank raised or died.

    `rank` is its number, `exitcode` that of its process (negative: by a signal), `traceback` the text of its traceback
    ("" if it died without one).
    """

    def __init__(self, message: str, rank: int = -1, exitcode: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback


class RankTimeout(RankError, TimeoutError):
    """Ranks did not finish in time. `ranks` are the numbers of all of them, `rank` is the first."""

    ranks: list[int]


class ServerEnded(RuntimeError):
    """The process that forks ranks has ended. `began` says whether it had forked a rank of this launch."""

    def __init__(self, began: bool) -> None:
        right = "zf.launch(fn, nproc) again, which starts another such process"
        super().__init__(explain("zf.launch(fn, nproc)", "the process that starts ranks has ended", right))
        self.began = began


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.control, self.their_control = socket.socketpair()
        self.gate, self.their_gate = socket.socketpair()
        self.result, self.note = unnamed_file(), unnamed_file()
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.finished = False
        self.ended_at = float("inf")

    def files_of_rank(self) -> list[int]:
        return [self.their_control.fileno(), self.their_gate.fileno(), self.result, self.note]

    def close_their_ends(self) -> None:
        self.their_control.close()
        self.their_gate.close()

    def close(self) -> None:
        self.close_their_ends()
        self.control.close()
        self.gate.close()
        os.close(self.result)
        os.close(self.note)

    def error(self) -> tuple[float, str] | None:
        """When and with what traceback the function raised, if it did."""
        note = read(self.note)
        if note[:1] not in (b"E", b"C"):
            return None
        return struct.unpack_from("d", note, 8)[0], note[NOTE:].decode(errors="replace")

    def cause(self) -> int:
        """The rank that has raised the error which this one was told of and raised too; its own number by default."""
        note = read(self.note)
        rank = struct.unpack_from("i", note, 4)[0] if note[:1] in (b"E", b"C") else -1
        return self.rank if rank < 0 else rank

    def may_be_consequence(self) -> bool:
        return read(self.note)[:1] != b"E"

    def stack(self) -> str:
        return read(self.note, NOTE).decode(errors="replace").strip("\0").rstrip()


class Run:
    """The ranks of one call, from start to end."""

    def __init__(self, nproc: int, job: bytes) -> None:
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.job, self.store = unnamed_file(), unnamed_file()
        with os.fdopen(os.dup(self.job), "wb") as file:
            file.write(job)
        for rank in range(nproc):
            self.ranks.append(_Rank(rank))

    def start(self) -> None:
        # Ranks print to the files 1 and 2, even if a notebook or a test has replaced `sys.stdout`: flush that first.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for r in self.ranks:
            server.fork(r.rank, [self.job, self.store, *r.files_of_rank(), 1, 2])
            r.close_their_ends()
            self.selector.register(r.control, selectors.EVENT_READ, r)
            self.selector.register(r.gate, selectors.EVENT_READ, r)

    def wait(self, timeout: float | None) -> None:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while any(r.exitcode is None for r in self.ranks):
            if all(r.finished for r in self.ranks):
                deadline = None  # all results are there, and the ranks were told to end
            if not self.step(deadline):
                raise self.timed_out(timeout)
            failed = [r for r in self.ranks if r.exitcode or (r.exitcode == 0 and not r.finished)]
            if failed:
                # A rank that ends closes its sockets, and the others fail because of it: wait for the first one.
                until = time.monotonic() + (_GRACE if all(r.may_be_consequence() for r in failed) else 0)
                while any(r.exitcode is None and not r.finished for r in self.ranks) and self.step(until):
                    pass
                raise self.first_error()

    def step(self, deadline: float | None) -> bool:
        """Wait for messages until the deadline, and handle them; False once it has passed."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        for key, _ in self.selector.select(left):
            r: _Rank = key.data
            if key.fileobj is r.gate:
                r.finished |= r.gate.recv(1) == b"F"
                self.selector.unregister(r.gate)
                if all(other.finished for other in self.ranks):
                    for other in self.ranks:
                        with contextlib.suppress(OSError):  # it was killed at the gate: its exit code says so
                            other.gate.send(b"G")
            else:
                self.receive(r)
        return deadline is None or time.monotonic() < deadline or all(r.exitcode is not None for r in self.ranks)

    def receive(self, r: _Rank) -> None:
        data = r.control.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) < NUMBER.size:
            raise ServerEnded(any(other.pid is not None for other in self.ranks))
        number = NUMBER.unpack(data)[0]
        if r.pid is None:
            r.pid = number
        else:
            r.exitcode, r.ended_at = number, time.monotonic()
            self.selector.unregister(r.control)

    def first_error(self) -> RankError:
        failed = [r for r in self.ranks if r.exitcode is not None and not (r.exitcode == 0 and r.finished)]
        errors = {r.rank: r.error() for r in failed}
        timed_out = _LATE if any(errors[r.rank] and not r.may_be_consequence() for r in failed) else _GRACE

        def when(r: _Rank) -> float:
            error = errors[r.rank]
            # A process is seen to end only after its sockets have closed, and other ranks may have failed before.
            return error[0] if error else r.ended_at - timed_out

        first = min(failed, key=when)
        first = next((r for r in failed if r.rank == first.cause()), first)
        others = [r.rank for r in failed if r is not first]
        tail = f"\n(ranks {others} failed after it)" if others else ""
        error, code = errors[first.rank], first.exitcode
        assert code is not None
        if error:
            text = error[1]
            return RankError(f"rank {first.rank} raised:\n\n{text.rstrip()}{tail}", first.rank, code, text)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        stack = first.stack()
        where = f"\n\n{stack}" if stack else ""
        return RankError(
            f"rank {first.rank} {how} before the function returned (exit code {code}){where}{tail}",
            first.rank,
            code,
        )

    def timed_out(self, timeout: float | None) -> RankTimeout:
        slow = [r for r in self.ranks if not r.finished and r.exitcode is None]
        for r in slow:
            r.control.send(b"D")  # the server asks the rank where it is
        time.sleep(0.1)
        stacks = "".join(f"\n\nrank {r.rank} is at:\n{r.stack()}" for r in slow)
        names = [r.rank for r in slow]
        error = RankTimeout(
            f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))} of {len(self.ranks)} did not "
            f"finish within timeout={timeout} seconds{stacks}",
            names[0] if names else -1,
        )
        error.ranks = names
        return error

    def results(self) -> list[Any]:
        out = []
        for r in self.ranks:
            with os.fdopen(os.dup(r.result), "rb") as file:
                file.seek(0)
                out.append(load(file))
        return out

    def close(self) -> None:
        """End the ranks that still run, and return when they have ended."""
        for r in self.ranks:
            if r.exitcode is None and r.their_control.fileno() == -1:
                r.control.shutdown(socket.SHUT_WR)  # the server reads this as the order to kill
                r.control.settimeout(10)
                try:
                    while r.exitcode is None:
                        self.receive(r)
                except (OSError, RuntimeError, KeyError, ValueError):
                    pass  # without a server there are no ranks: they die with it
        self.selector.close()
        for r in self.ranks:
            r.close()
        os.close(self.job)
        os.close(self.store)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ----------------------------------------------------------------------------------------------------------------------
# `launch` runs a function on a few local ranks, from a script, a test or a notebook.


__all__ = ["RankError", "RankTimeout", "launch"]

_MARK = "ZEROFN_RANK"  # set in ranks and inherited by what they start: launches do not nest


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = 1,
    backend: str | None = None,
    init: bool = True,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` local ranks, and return their results in the order of ranks.

    In each rank RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as under torchrun.
    A single rank is a process of its own too. Output of ranks goes where this process prints. `atexit` handlers do not
    run in ranks, as in `multiprocessing`.

    When the call ends, also by an interrupt or a kill of this process, all ranks have ended. The processes that ranks
    started have ended too, even those in sessions of their own. (Outside of Linux, processes that have left their
    rank's process group stay.)

    Args:
        fn: a function of a module, which is sent by name; or, if `cloudpickle` is installed, a function of a script, a
            notebook or another function, which is sent by value. Without `cloudpickle` each rank runs a script again to
            find its function, so the call of `launch` stands under `if __name__ == "__main__":` there.
        nproc: the number of ranks.
        args: its arguments. Tensors in arguments and results are sent by value, and arrive on the CPU.
        timeout: seconds for the whole run; None or infinity for no limit.
        threads: threads of each rank; None for torch's own choice.
        backend: of the default process group; by default NCCL and gloo if there is a GPU per rank, else gloo.
        init: whether to initialise the default process group; if not, `fn` does.

    Returns:
        A list of the results, one per rank.

    Raises:
        RankError: a rank raised or died; with its rank and traceback.
        RankTimeout: ranks did not finish in time; with the stack of each.
        TypeError, ValueError: an argument is wrong.

    Examples:
        >>> def hello(greeting):
        ...     import torch.distributed as dist
        ...     return f"{greeting} from rank {dist.get_rank()} of {dist.get_world_size()}"
        >>> launch(hello, 2, "hello")                                       # doctest: +SKIP
        ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """
    _check(fn, nproc, timeout, threads, backend, init)
    nproc = int(nproc)
    backend = backend or default_backend(nproc)
    job = {
        "payload": pack(fn, args),
        "main": main_file(),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "backend": backend,
        "threads": threads,
        "init": init,
    }
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_reserve_port())
        job["env"] = {**os.environ, **_rank_env(nproc, port.getsockname()[1], threads)}
        job["store"] = stack.enter_context(store_path())
        message = pickle.dumps(job)
        limit = None if timeout is None or math.isinf(timeout) else float(timeout)
        try:
            return _run(nproc, message, limit)
        except ServerEnded as error:
            if error.began:
                raise
        # The server ended between two launches: no rank of this one has been forked.
        server.renew()
        return _run(nproc, message, limit)


def _run(nproc: int, job: bytes, timeout: float | None) -> list[Any]:
    with contextlib.closing(Run(nproc, job)) as run:
        run.start()
        run.wait(timeout)
        return run.results()


def _check(fn: Any, nproc: Any, timeout: Any, threads: Any, backend: Any, init: Any) -> None:
    """Refuse wrong arguments, and a launch from inside of a rank or on a system without fork."""
    number = lambda x, kind: isinstance(x, kind) and not isinstance(x, bool)  # noqa: E731
    if not callable(fn):
        wrong = f"zf.launch({type(fn).__name__}, {nproc!r})"
        why = "it needs the function itself, to be called on every rank with the arguments after nproc"
        raise TypeError(explain(wrong, why, "launch(train, 2, config), not launch(train(config), 2)"))
    if not number(nproc, Integral):
        raise TypeError(explain(f"zf.launch(fn, {nproc!r})", "nproc is a number of ranks", "zf.launch(fn, 2, *args)"))
    if nproc < 1:
        raise ValueError(explain(f"zf.launch(fn, nproc={nproc})", "at least one rank is needed", "zf.launch(fn, 2)"))
    if timeout is not None and not number(timeout, Real):
        raise TypeError(_wrong("timeout", timeout, "it is a number of seconds, or None for no limit", "60"))
    if timeout is not None and not timeout > 0:
        raise ValueError(_wrong("timeout", timeout, "it is seconds greater than zero, or None for no limit", "60"))
    if threads is not None and not number(threads, Integral):
        raise TypeError(_wrong("threads", threads, "it is a number of threads, or None for torch's own choice", "1"))
    if threads is not None and threads < 1:
        raise ValueError(_wrong("threads", threads, "each rank needs a thread to compute with", "1"))
    if backend is not None and not (isinstance(backend, str) and backend):
        raise TypeError(
            _wrong("backend", backend, "it is a name of torch.distributed, or None for the fitting", "'gloo'")
        )
    if not isinstance(init, bool):
        raise TypeError(_wrong("init", init, "it is True, or False where fn makes the process group", "False"))
    if _MARK in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        wrong = f"launch inside rank {os.environ.get('RANK', '?')} of a job that is running already"
        why, right = "its ranks are there", "fn(*args), on every rank"
        if pickler() is pickle:
            why += "; or this is a script, which each rank runs again, since cloudpickle is missing"
            right += '; or if __name__ == "__main__": zf.launch(fn, 2)'
        raise RuntimeError(explain(wrong, why, right))
    if not hasattr(socket, "send_fds"):
        why = "launch forks its ranks, which this system cannot"
        raise RuntimeError(explain("zf.launch(fn, nproc)", why, "torchrun --nproc-per-node 2 script.py"))


def _wrong(name: str, value: Any, why: str, right: str) -> str:
    return explain(f"zf.launch(fn, nproc, {name}={value!r})", why, f"zf.launch(fn, nproc, {name}={right})")


def _rank_env(nproc: int, port: int, threads: int | None) -> dict[str, str]:
    env = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _MARK: "1",
    }
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    # Local ranks need the loopback only; the address of the host name may not be reachable.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = loopback[0]
    return env


def _reserve_port() -> socket.socket:
    """A port on which rank 0 can serve a store, if `fn` makes a process group by itself.

    It stays bound here without listening while the ranks run: the system gives it to no other process, and SO_REUSEADDR
    lets rank 0 listen on it.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held
