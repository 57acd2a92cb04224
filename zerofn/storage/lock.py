"""An flock on a directory: released when its process dies, and never left behind by an interrupt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds that a save waits for another save or load in the same directory


class Lock:
    """One save at a time in a directory, and none while it is read.

    Use it with `finally: lock.release(); lock.close()`.

    Attributes:
        held: whether it is held. Not every file system has locks; there the caller must make one save at a time.
        release: unlocks. It is a C function: Python delivers an interrupt between instructions of Python code, so
            before it or after it and never inside. Closing the file would not unlock it: a process that was forked
            meanwhile, such as a data loader's worker, has the file open too.
    """

    def __init__(self) -> None:
        self.held = False
        self.release: Callable[[], Any] = bool
        self._handle: int | None = None

    def acquire(self, directory: Path, exclusive: bool, patience: float | None = None) -> None:
        """Wait for the lock.

        Args:
            directory: what is locked.
            exclusive: against every other lock (`LOCK_EX`), or against exclusive ones only (`LOCK_SH`).
            patience: seconds to wait; `PATIENCE` by default.

        Raises:
            TimeoutError: it was not free in that time.
        """
        try:
            import fcntl
        except ImportError:
            return
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        patience = PATIENCE if patience is None else patience
        self._handle = os.open(directory, os.O_RDONLY)
        # Set before locking: an interrupt may come between, and unlocking what is not locked does no harm.
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
