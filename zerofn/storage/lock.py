"""A lock on a directory: the system frees it when its process dies, and an interrupt does not leave it behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds that a save waits for another save, or for a load, in the same directory


class Lock:
    """One save at a time in a directory, and none while it is read.

    Whoever takes it writes `finally: lock.release(); lock.close()`.

    Attributes:
        held: whether it is. Not every file system has locks: one save at a time is then the caller's business.
        release: lets go. It is a function of C: an interrupt, which Python delivers between the instructions
            of functions of its own, comes before it or after it, and not into it. To close the file would
            not do: a process that was forked meanwhile, such as a data loader's, has it open too.
    """

    def __init__(self) -> None:
        self.held = False
        self.release: Callable[[], Any] = bool
        self._handle: int | None = None

    def acquire(self, directory: Path, exclusive: bool, patience: float | None = None) -> None:
        """Wait for it.

        Args:
            directory: what is locked.
            exclusive: against everybody, or only against those who want it for themselves.
            patience: seconds to wait; `PATIENCE`.

        Raises:
            TimeoutError: somebody has had it for too long.
        """
        try:
            import fcntl
        except ImportError:
            return
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        patience = PATIENCE if patience is None else patience
        self._handle = os.open(directory, os.O_RDONLY)
        # Before it is locked: a lock that is not held may be released too.
        self.release = partial(fcntl.flock, self._handle, fcntl.LOCK_UN)
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
                self.held = True
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"{directory} has been in use by another save or load, of this process or of another one, "
                        f"for {patience:.0f} s. Save into a directory of its own, and from one process if the state "
                        "is not sharded."
                    ) from None
                time.sleep(0.02)
            except OSError:
                self.release = bool
                return

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
