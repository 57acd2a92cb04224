"""One file, replaced atomically by what a library writes to a path in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from .files import create, random_token, sync_directory
from .lock import Lock

SUFFIX = ".tmp"


def replace_file(path: Path, write: Callable[[Path], None]) -> OSError | None:
    """Replace a file by what `write` writes to the path that it is given.

    That path is in a new hidden directory beside the file, which belongs to this call alone: the library may make other
    files there, and no other user can have put a link there. A process that is killed leaves the directory behind,
    unlocked, and the next call for the same file removes it.

    Returns:
        Why the file, although it is in place, may not survive a loss of power; `None` if it will.

    Raises:
        OSError: it could not be written or put in place. A file that was there is unchanged.
    """
    _remove_abandoned(path)
    while True:
        directory, lock = path.with_name(f".{path.name}.{random_token()}{SUFFIX}"), Lock()
        try:
            if _make_locked(directory, lock):
                return _write_and_move(directory / path.name, path, write)
        finally:
            try:
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                lock.release()
                lock.close()


def _make_locked(directory: Path, lock: Lock) -> bool:
    """Make a directory and lock it; `False` if another process has removed it before it was locked."""
    directory.mkdir(0o700)
    with contextlib.suppress(FileNotFoundError):
        lock.acquire(directory, exclusive=True)
    return directory.exists()


def _write_and_move(temporary: Path, path: Path, write: Callable[[Path], None]) -> OSError | None:
    with create(temporary) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    write(temporary)
    # The permissions of a new file follow the user's umask; some libraries make it unreadable to others.
    os.chmod(temporary, mode)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    try:
        sync_directory(path.parent)
    except OSError as error:
        return error
    return None


def _remove_abandoned(path: Path) -> None:
    """Remove directories of killed processes. On a file system without locks nobody can tell, so they stay."""
    ours = re.compile(rf"{re.escape(f'.{path.name}.')}[0-9a-f]{{12}}{re.escape(SUFFIX)}")
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if ours.fullmatch(other.name) and not other.is_symlink():
                _remove_if_unlocked(other)


def _remove_if_unlocked(other: Path) -> None:
    lock = Lock()
    try:
        # Only a directory is opened: opening a pipe of that name would wait for a writer.
        if other.is_dir():
            lock.acquire(other, exclusive=True, patience=0)
        if lock.held:
            shutil.rmtree(other, ignore_errors=True)
    except OSError:
        pass  # in use, or gone
    finally:
        lock.release()
        lock.close()
