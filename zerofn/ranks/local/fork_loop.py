"""The loop of the fork server: it forks ranks, sends their exit codes, and kills ranks whose caller has ended."""

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

from .rank import adopt_orphans, own_group, run_rank

NUMBER = struct.Struct("q")


def serve(fd: int) -> NoReturn:
    """Fork a rank per message, send its pid and exit code, and kill it when its caller closes its socket."""
    control = socket.socket(fileno=fd)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    _preload()
    # Until here stderr shows a failed import; from here on this process holds no stream open.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # ranks share these pages with this process as long as no garbage collector writes into them
    loop = _Loop(control, wake, waker)
    while True:
        for key, _ in loop.selector.select():
            loop.handle(key.fileobj)


class _Loop:
    """Handles requests of the caller, ends of ranks, and callers that close the socket of a rank.

    Args:
        control: a socket with the caller's requests.
        wake, waker: a pipe that signals write to.
    """

    def __init__(self, control: socket.socket, wake: int, waker: int):
        self.control, self.wake, self.waker = control, wake, waker
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(wake, selectors.EVENT_READ)
        self.controls: dict[int, socket.socket] = {}
        self.pids: dict[socket.socket, int] = {}

    def handle(self, source: object) -> None:
        """Read a message from `source`."""
        if source is self.control:
            self._fork()
        elif source == self.wake:
            os.read(self.wake, 4096)
            self._reap()
        elif isinstance(source, socket.socket) and source in self.pids:
            self._on_control(source)

    def _fork(self) -> None:
        """Fork a rank that the caller asks for, or end all if the caller has ended."""
        message, fds, _, _ = socket.recv_fds(self.control, NUMBER.size, 8)
        if not message:
            for pid in self.controls:
                _kill(pid)
            _sweep({})
            os._exit(0)
        _, _, control_fd, *_ = fds
        rank_control = socket.socket(fileno=control_fd)
        pid = os.fork()
        if pid == 0:
            self._run_rank(NUMBER.unpack(message)[0], fds, rank_control)
        for i, other in enumerate(fds):
            if i != 2:
                os.close(other)
        own_group(pid)
        self.controls[pid], self.pids[rank_control] = rank_control, pid
        self.selector.register(rank_control, selectors.EVENT_READ)
        _send(rank_control, pid)

    def _run_rank(self, rank: int, fds: list[int], rank_control: socket.socket) -> NoReturn:
        """In the child: run as that rank."""
        job, store, _, gate, result, note, out, err = fds
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (self.control, rank_control, self.selector, *self.controls.values()):
            other.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        for other in (self.wake, self.waker, out, err):
            os.close(other)
        run_rank(rank, job, store, gate, result, note)

    def _on_control(self, rank_control: socket.socket) -> None:
        """Have a rank write its stack if the caller asks for it, or kill it if the caller has closed its socket."""
        try:
            word = rank_control.recv(1)
        except OSError:
            word = b""
        if word == b"D":
            os.kill(self.pids[rank_control], signal.SIGUSR1)
        else:
            self.selector.unregister(rank_control)
            _kill(self.pids.pop(rank_control))

    def _reap(self) -> None:
        while (pid := _ended()) is not None:
            _kill(pid)  # what the rank started and left behind
            _, status = os.waitpid(pid, 0)
            if pid not in self.controls:
                continue
            rank_control = self.controls.pop(pid)
            if self.pids.pop(rank_control, None):
                self.selector.unregister(rank_control)
            _sweep(self.controls)
            _send(rank_control, os.waitstatus_to_exitcode(status))
            rank_control.close()


def _kill(pid: int) -> None:
    """Kill a process and its group."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


def _ended() -> int | None:
    """A child that has ended and is not reaped: as long as it is a zombie no other process or group has its number."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def _sweep(ranks: Container[int]) -> None:
    """Kill the processes that ended ranks left behind: those that are children of this process, and no ranks."""
    until = time.monotonic() + 5
    while (left := [pid for pid in _children() if pid not in ranks]) and time.monotonic() < until:
        for pid in left:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        # When one of them ends, the processes that it started become children of this one.
        time.sleep(0.002)


def _children() -> list[int]:
    """The numbers of this process's children; none where there is no /proc."""
    found, me = [], str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == me:
                    found.append(int(name))
    return found


def _preload() -> None:
    """Import what every rank will need. Nothing here may start a thread or use a GPU.

    The compiler too, which the first `vmap`, optimizer or checkpoint of a process imports (0.7 s).
    """
    import importlib

    ours = ("zerofn.extend", "zerofn.pure.step", "zerofn.eager.attach", "zerofn.transforms.sharding")
    for name in ("optree", "numpy", "cloudpickle", *ours):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import torch

        torch.compiler.disable(_preload)


def _send(rank_control: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller has ended, and its ranks are killed for it
        rank_control.sendall(NUMBER.pack(number))
