"""The caller's end of the fork server: the process, started once, that ranks are forked from.

The server has imported torch and done nothing with it; it runs `fork_loop`. A launch of two ranks takes 0.03 s, after
2 s for the first. Rejected alternatives:

* `spawn` takes 1.7 s for every launch;
* `fork` of the caller breaks once the caller has run a backward, whose thread pool does not survive a fork, or has
  used a GPU;
* the forkserver of the standard library is as fast, but runs `__main__` again in every rank (a script without a guard
  starts itself over, pytest imports itself), takes the environment and the standard streams of the moment when it was
  started (a notebook or pytest has replaced them since), and leaves ranks running when the caller is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading

from ..._errors import explain
from .fork_loop import NUMBER


class _Server:
    """The server of this process: started at the first launch, ended with this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def fork(self, rank: int, fds: list[int]) -> None:
        """Have the server fork a rank, and hand it these files."""
        with self.lock:
            if self.process is None or self.control is None or self.process.poll() is not None:
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
        # First, so that `stop` ends the process also where an interrupt comes before it is noted.
        self.control, theirs = socket.socketpair()
        serve = "from zerofn.ranks.local.fork_loop import serve"
        code = f"import sys; sys.path[:] = {sys.path!r}; {serve}; serve({theirs.fileno()})"
        # A session of its own: an interrupt typed at the terminal reaches the caller, who ends the ranks.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def stop(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.wait()
        self.process = self.control = None

    def renew(self) -> None:
        """After the server has ended: have the next fork start another."""
        with self.lock:
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)  # it may be on its way out still
                    self.stop()

    def forget(self) -> None:
        """In a forked child of this process: the server is the parent's, and must see it when the parent ends."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.returncode = 0  # not a child of this process: nothing to wait for, nothing to warn of
        self.process = self.control = None
        self.lock = threading.Lock()


server = _Server()
atexit.register(server.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=server.forget)
