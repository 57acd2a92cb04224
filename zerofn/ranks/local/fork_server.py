"""The quiet process that ranks are forked from: both ends of it.

Ranks are forked from a *server*: one quiet process per caller that has imported torch and done nothing
with it. A launch of two ranks then takes 0.03 s, after 2 s for the first. What was weighed:

* `spawn` takes 1.7 s for every launch;
* `fork` of the caller breaks once the caller has run a backward (its thread pool does not survive a
  fork) or touched a GPU;
* the standard library's forkserver is as fast, but runs `__main__` again in every rank (a script without
  a guard starts itself over, pytest imports itself), takes the environment and the standard streams from
  the moment it was started (a notebook or pytest has replaced them since), and leaves ranks running when
  the caller is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Container
from typing import NoReturn

from ..._errors import explain
from .rank import adopt_orphans, be_rank, own_group

NUMBER = struct.Struct("q")


# ----------------------------------------------------------------------------- the caller's side


class _Server:
    """This process's end of the server: started at the first launch, ended with this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def fork(self, rank: int, fds: list[int]) -> None:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
            assert self.control is not None
            try:
                socket.send_fds(self.control, [NUMBER.pack(rank)], fds)
            except ConnectionError:  # it has just died
                self.start()
                socket.send_fds(self.control, [NUMBER.pack(rank)], fds)

    def start(self) -> None:
        self.stop()
        if not sys.executable:
            why = "launch starts another Python, and sys.executable does not say which"
            raise RuntimeError(explain("zf.launch(fn, nproc)", why, "torchrun --nproc-per-node 2 script.py"))
        ours, theirs = socket.socketpair()
        serve = "from zerofn.ranks.local.fork_server import _serve"
        code = f"import sys; sys.path[:] = {sys.path!r}; {serve}; _serve({theirs.fileno()})"
        # A session of its own: an interrupt typed at the terminal reaches the caller, who ends the ranks.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.control = ours

    def stop(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.wait()
        self.process = self.control = None

    def renew(self) -> None:
        """After the server has ended: the next fork starts another."""
        with self.lock:
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)  # it may be on its way out still
                    self.stop()

    def forget(self) -> None:
        """After a fork of this process: the server is the parent's, and must see the parent end."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.returncode = 0  # not a child of this process: nothing to wait for, nothing to warn of
        self.process = self.control = None
        self.lock = threading.Lock()


_server = _Server()
atexit.register(_server.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_server.forget)


def renew() -> None:
    """Have the next rank forked by another server than the one that has ended."""
    _server.renew()


def fork_rank(rank: int, fds: list[int]) -> None:
    """Have the server fork a rank and hand it these files."""
    _server.fork(rank, fds)


# ----------------------------------------------------------------------------- the server's side


def _serve(fd: int) -> NoReturn:
    """Forks a rank per message, tells its pid and exit code, kills it when its caller lets go."""
    control = socket.socket(fileno=fd)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    _preload()
    # stderr was there for a failed import; from now on nobody's stream is held open by this process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # ranks share these pages as long as no collector writes in them

    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    chans: dict[int, socket.socket] = {}
    pids: dict[socket.socket, int] = {}

    def reap() -> None:
        while (pid := _ended()) is not None:
            _kill(pid)  # what the rank started and left behind
            _, status = os.waitpid(pid, 0)
            if pid not in chans:
                continue
            chan = chans.pop(pid)
            if pids.pop(chan, None):
                selector.unregister(chan)
            _sweep(chans)
            _tell(chan, os.waitstatus_to_exitcode(status))
            chan.close()

    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                message, fds, _, _ = socket.recv_fds(control, NUMBER.size, 8)
                if not message:
                    for pid in chans:
                        _kill(pid)
                    _sweep({})
                    os._exit(0)
                job, store, chan_fd, gate, result, note, out, err = fds
                chan = socket.socket(fileno=chan_fd)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for other in (control, chan, selector, *chans.values()):
                        other.close()
                    os.dup2(out, 1)
                    os.dup2(err, 2)
                    for other in (wake_r, wake_w, out, err):
                        os.close(other)
                    be_rank(NUMBER.unpack(message)[0], job, store, gate, result, note)
                for other in (job, store, gate, result, note, out, err):
                    os.close(other)
                own_group(pid)
                chans[pid], pids[chan] = chan, pid
                selector.register(chan, selectors.EVENT_READ)
                _tell(chan, pid)
            elif key.fileobj == wake_r:
                os.read(wake_r, 4096)
                reap()
            elif key.fileobj in pids:
                chan = key.fileobj
                assert isinstance(chan, socket.socket)
                try:
                    order = chan.recv(1)
                except OSError:
                    order = b""
                if order == b"D":
                    os.kill(pids[chan], signal.SIGUSR1)
                else:
                    selector.unregister(chan)
                    _kill(pids.pop(chan))


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
