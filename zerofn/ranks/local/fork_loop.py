"""The process that ranks are forked from: it forks one per message, tells how each ends, and ends those of a caller
that is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Container
from typing import NoReturn

from .rank import adopt_orphans, be_rank, own_group

NUMBER = struct.Struct("q")


def serve(fd: int) -> NoReturn:
    """Forks a rank per message, tells its pid and exit code, kills it when its caller lets go."""
    control = socket.socket(fileno=fd)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    _preload()
    # stderr was there for a failed import; from now on nobody's stream is held open by this process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # ranks share these pages as long as no collector writes in them
    loop = _Loop(control, wake, waker)
    while True:
        for key, _ in loop.selector.select():
            loop.handle(key.fileobj)


class _Loop:
    """What the server waits for: its caller, the end of a rank, and the end of the wait for one.

    Args:
        control: the caller's orders.
        wake, waker: a pipe that a signal writes to.
    """

    def __init__(self, control: socket.socket, wake: int, waker: int):
        self.control, self.wake, self.waker = control, wake, waker
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(wake, selectors.EVENT_READ)
        self.chans: dict[int, socket.socket] = {}
        self.pids: dict[socket.socket, int] = {}

    def handle(self, source: object) -> None:
        """Something has come from there."""
        if source is self.control:
            self._order()
        elif source == self.wake:
            os.read(self.wake, 4096)
            self._reap()
        elif isinstance(source, socket.socket) and source in self.pids:
            self._word(source)

    def _order(self) -> None:
        """A rank is wanted, or the caller is gone."""
        message, fds, _, _ = socket.recv_fds(self.control, NUMBER.size, 8)
        if not message:
            for pid in self.chans:
                _kill(pid)
            _sweep({})
            os._exit(0)
        _, _, chan_fd, *_ = fds
        chan = socket.socket(fileno=chan_fd)
        pid = os.fork()
        if pid == 0:
            self._become(NUMBER.unpack(message)[0], fds, chan)
        for i, other in enumerate(fds):
            if i != 2:
                os.close(other)
        own_group(pid)
        self.chans[pid], self.pids[chan] = chan, pid
        self.selector.register(chan, selectors.EVENT_READ)
        _tell(chan, pid)

    def _become(self, rank: int, fds: list[int], chan: socket.socket) -> NoReturn:
        """In the child: be that rank."""
        job, store, _, gate, result, note, out, err = fds
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (self.control, chan, self.selector, *self.chans.values()):
            other.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        for other in (self.wake, self.waker, out, err):
            os.close(other)
        be_rank(rank, job, store, gate, result, note)

    def _word(self, chan: socket.socket) -> None:
        """Of the caller's thread that waits for a rank: where it is, or that it is not wanted any more."""
        try:
            word = chan.recv(1)
        except OSError:
            word = b""
        if word == b"D":
            os.kill(self.pids[chan], signal.SIGUSR1)
        else:
            self.selector.unregister(chan)
            _kill(self.pids.pop(chan))

    def _reap(self) -> None:
        while (pid := _ended()) is not None:
            _kill(pid)  # what the rank started and left behind
            _, status = os.waitpid(pid, 0)
            if pid not in self.chans:
                continue
            chan = self.chans.pop(pid)
            if self.pids.pop(chan, None):
                self.selector.unregister(chan)
            _sweep(self.chans)
            _tell(chan, os.waitstatus_to_exitcode(status))
            chan.close()


def _kill(pid: int) -> None:
    """A process and its group."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


def _ended() -> int | None:
    """A child that has ended, not reaped yet: while it is a zombie its number is its own, and so is its group's."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def _sweep(ranks: Container[int]) -> None:
    """End what ranks that have ended left behind: it has become this process's, as theirs are as long as they live."""
    until = time.monotonic() + 5
    while (left := [pid for pid in _children() if pid not in ranks]) and time.monotonic() < until:
        for pid in left:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        # What one of them has started becomes this process's when it has ended.
        time.sleep(0.002)


def _children() -> list[int]:
    """Of this process, by their numbers; none where there is no /proc."""
    found, me = [], str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == me:
                    found.append(int(name))
    return found


def _preload() -> None:
    """What every rank will need, imported once. Nothing here may start a thread or touch a GPU.

    The compiler is what the first `vmap`, optimizer or checkpoint of a process imports (0.7 s).
    """
    import importlib

    for name in ("zerofn", "optree", "numpy", "cloudpickle"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import torch

        torch.compiler.disable(_preload)


def _tell(chan: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, and its ranks are being ended for it
        chan.sendall(NUMBER.pack(number))
