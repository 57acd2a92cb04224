"""Files that are whole or not there: made anew, opened without waiting, made durable."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import BinaryIO

from .._errors import explain

# What a system says that cannot make a directory durable, or lets nobody try. Others mean that the disk is failing.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS}


class NotAFile(ValueError):
    """Something else than a regular file has the name of one: a directory, a pipe, a device, a socket."""


def place_of(call: str, directory: str | os.PathLike) -> Path:
    """The absolute path, which stays right where the process changes its directory. An empty one is refused.

    Raises:
        ValueError: `directory` is "", as of a setting that was left out. To pathlib that is the process's directory.
    """
    if not os.fspath(directory):
        why = "no name would be the directory that the process is in, among whatever else lies there"
        raise ValueError(explain(call.format('""'), why, call.format('"runs/net"')))
    return Path(directory).absolute()


def token() -> str:
    """A part of a name that no other process and no other save has."""
    return uuid.uuid4().hex[:12]


def create(path: Path) -> BinaryIO:
    """Open a new file to write into. Whatever has that name already, a link or a pipe too, is an error."""
    return open(path, "xb")  # O_CREAT with O_EXCL, which follows no link


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. A pipe is refused at once: to open one would wait for somebody to write into it.

    A link to a file is followed: caches of downloads are made of them.

    Raises:
        NotAFile: it is none.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        file = open(path, "rb", opener=opener)  # noqa: SIM115
    except OSError as error:
        # A directory, and a socket.
        if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:
            raise NotAFile("it is no regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFile("it is no regular file")
    return file


def make_directory(directory: Path) -> None:
    """Make a directory with those above it, durably."""
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for p in missing:
        sync_directory(p.parent)


def sync_directory(directory: Path) -> None:
    """Make names durable, where the system can (Windows cannot, and need not)."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def discard(path: Path) -> OSError | None:
    """Remove a file if it is there and can be removed; why not, if not."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None
