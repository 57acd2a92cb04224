"""The ranks of one call of `launch`, as the caller sees them.

Every rank has two channels, so that whatever ends ends the rest:

* `chan`, server to caller: the rank's pid, later its exit code. When the caller's end closes, by will or
  by death, the server kills the rank's process group.
* `gate`, rank to caller: "finished"; the rank leaves when all are finished and the caller says so. A rank
  that left earlier would take its sockets from under the others.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

from .fork_loop import NUMBER
from .fork_server import fork_rank
from .rank import NOTE
from .serialization import load, read, scratch

# Seconds to wait for the cause after the first consequence was seen; on a busy machine a process takes long to end.
_GRACE = 3.0
# Seconds by which a death is seen late, where it is compared with an error that is no consequence of it.
_LATE = 0.5


class RankError(RuntimeError):
    """A rank raised or died. `rank` is which, `exitcode` how its process ended (negative: by a signal),
    `traceback` the text of its traceback ("" if it died without one)."""

    def __init__(self, message: str, rank: int = -1, exitcode: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback


class RankTimeout(RankError, TimeoutError):
    """Ranks were not finished in time. `ranks` are all of them, `rank` the first."""

    ranks: list[int]


class ServerEnded(RuntimeError):
    """The process that forks ranks has ended. `began` tells whether a rank had been forked."""

    def __init__(self, began: bool) -> None:
        super().__init__("the process that starts ranks has ended; call launch again for a new one")
        self.began = began


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.chan, self.their_chan = socket.socketpair()
        self.gate, self.their_gate = socket.socketpair()
        self.result, self.note = scratch(), scratch()
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.finished = False
        self.ended_at = float("inf")

    def hand_over(self) -> list[int]:
        return [self.their_chan.fileno(), self.their_gate.fileno(), self.result, self.note]

    def close_theirs(self) -> None:
        self.their_chan.close()
        self.their_gate.close()

    def close(self) -> None:
        self.close_theirs()
        self.chan.close()
        self.gate.close()
        os.close(self.result)
        os.close(self.note)

    def error(self) -> tuple[float, str] | None:
        """When and with what traceback the function raised, if it did."""
        note = read(self.note)
        if note[:1] not in (b"E", b"C"):
            return None
        return struct.unpack_from("d", note, 8)[0], note[NOTE:].decode(errors="replace")

    def may_be_consequence(self) -> bool:
        return read(self.note)[:1] != b"E"

    def stack(self) -> str:
        return read(self.note, NOTE).decode(errors="replace").strip("\0").rstrip()


class Run:
    """The ranks of one call, from start to end."""

    def __init__(self, nproc: int, job: bytes) -> None:
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.job, self.store = scratch(), scratch()
        with os.fdopen(os.dup(self.job), "wb") as file:
            file.write(job)
        for rank in range(nproc):
            self.ranks.append(_Rank(rank))

    def start(self) -> None:
        # What this process prints to: `sys.stdout` may be a notebook's or a test's, its file number is ours.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for r in self.ranks:
            fork_rank(r.rank, [self.job, self.store, *r.hand_over(), 1, 2])
            r.close_theirs()
            self.selector.register(r.chan, selectors.EVENT_READ, r)
            self.selector.register(r.gate, selectors.EVENT_READ, r)

    def wait(self, timeout: float | None) -> None:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while any(r.exitcode is None for r in self.ranks):
            if all(r.finished for r in self.ranks):
                deadline = None  # the results are there, and the ranks are told to leave
            if not self.step(deadline):
                raise self.late(timeout)
            failed = [r for r in self.ranks if r.exitcode or (r.exitcode == 0 and not r.finished)]
            if failed:
                # A rank that ends closes its sockets, and the others fail of that: wait for the cause.
                until = time.monotonic() + (_GRACE if all(r.may_be_consequence() for r in failed) else 0)
                while any(r.exitcode is None and not r.finished for r in self.ranks) and self.step(until):
                    pass
                raise self.failure()

    def step(self, deadline: float | None) -> bool:
        """Takes in what has happened; False when the deadline passed with nothing happening."""
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
                        with contextlib.suppress(OSError):  # killed at the gate: its exit code will tell
                            other.gate.send(b"G")
            else:
                self.hear(r)
        return deadline is None or time.monotonic() < deadline or all(r.exitcode is not None for r in self.ranks)

    def hear(self, r: _Rank) -> None:
        data = r.chan.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) < NUMBER.size:
            raise ServerEnded(any(other.pid is not None for other in self.ranks))
        number = NUMBER.unpack(data)[0]
        if r.pid is None:
            r.pid = number
        else:
            r.exitcode, r.ended_at = number, time.monotonic()
            self.selector.unregister(r.chan)

    def failure(self) -> RankError:
        failed = [r for r in self.ranks if r.exitcode is not None and not (r.exitcode == 0 and r.finished)]
        errors = {r.rank: r.error() for r in failed}
        late = _LATE if any(errors[r.rank] and not r.may_be_consequence() for r in failed) else _GRACE

        def when(r: _Rank) -> float:
            error = errors[r.rank]
            # A process is seen to end only after its sockets have closed and others failed for it.
            return error[0] if error else r.ended_at - late

        first = min(failed, key=when)
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

    def late(self, timeout: float | None) -> RankTimeout:
        slow = [r for r in self.ranks if not r.finished and r.exitcode is None]
        for r in slow:
            r.chan.send(b"D")  # the server asks the rank where it is
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
        """Ends what still runs, and returns when it has ended."""
        for r in self.ranks:
            if r.exitcode is None and r.their_chan.fileno() == -1:
                r.chan.shutdown(socket.SHUT_WR)  # the server reads this as the order to kill
                r.chan.settimeout(10)
                try:
                    while r.exitcode is None:
                        self.hear(r)
                except (OSError, RuntimeError, KeyError, ValueError):
                    pass  # no server, no ranks: they die with it
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
