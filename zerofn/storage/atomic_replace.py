"""One file, replaced in one step by what a library writes that knows paths only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from .files import create, sync_directory, token
from .lock import Lock

END = ".tmp"


def put_in_place(path: Path, write: Callable[[Path], None]) -> OSError | None:
    """Replace a file by what `write` writes to the path that it is given.

    That path lies in a new directory beside the file, hidden and of this call alone. The library may make other
    files there, and replace the one that it was given; nobody has planted a link there. A process that is killed
    leaves the directory behind, and the next that writes the same file removes it: it is locked by nobody.

    Returns:
        Why it is not known to be durable, although it is in place; `None` if it is.

    Raises:
        OSError: it could not be written or put in place. A file that was there is as it was.
    """
    _sweep(path)
    while True:
        own, lock = path.with_name(f".{path.name}.{token()}{END}"), Lock()
        try:
            if _claimed(own, lock):
                return _fill(own / path.name, path, write)
        finally:
            try:
                shutil.rmtree(own, ignore_errors=True)
            finally:
                lock.release()
                lock.close()


def _claimed(own: Path, lock: Lock) -> bool:
    """Make a directory and lock it; whether it is still there then, or another has swept it before it was locked."""
    own.mkdir(0o700)
    with contextlib.suppress(FileNotFoundError):
        lock.acquire(own, exclusive=True)
    return own.exists()


def _fill(own: Path, path: Path, write: Callable[[Path], None]) -> OSError | None:
    with create(own) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    write(own)
    # What others may do with a new file is the user's to say (umask); some libraries let nobody read it.
    os.chmod(own, mode)
    with open(own, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(own, path)
    try:
        sync_directory(path.parent)
    except OSError as error:
        return error
    return None


def _sweep(path: Path) -> None:
    """Remove what processes that were killed have left. Where there are no locks nobody can tell, so it stays."""
    ours = re.compile(rf"{re.escape(f'.{path.name}.')}[0-9a-f]{{12}}{re.escape(END)}")
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if ours.fullmatch(other.name) and not other.is_symlink():
                _remove_if_free(other)


def _remove_if_free(other: Path) -> None:
    lock = Lock()
    try:
        # A pipe of that name would be waited for: only directories are opened.
        if other.is_dir():
            lock.acquire(other, exclusive=True, patience=0)
        if lock.held:
            shutil.rmtree(other, ignore_errors=True)
    except OSError:
        pass  # in use, or gone
    finally:
        lock.release()
        lock.close()
