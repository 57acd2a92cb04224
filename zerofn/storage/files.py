"""Opening files safely: new ones exclusively, existing ones without blocking on pipes; fsync of directories."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import BinaryIO

from .._errors import explain

# Errors of a system that cannot fsync a directory, or allows nobody to. Any other means that the disk is failing.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS}


def absolute_path(call: str, directory: str | os.PathLike) -> Path:
    """The absolute path, which stays right when the process changes its working directory.

    Raises:
        ValueError: `directory` is "", as from an empty setting. pathlib would take it for the working directory.
    """
    if not os.fspath(directory):
        why = "no name would be the directory that the process is in, among whatever else lies there"
        raise ValueError(explain(call.format('""'), why, call.format('"runs/net"')))
    return Path(directory).absolute()


def random_token() -> str:
    """Twelve hexadecimal digits for a file name that no other save has."""
    return uuid.uuid4().hex[:12]


def create(path: Path) -> BinaryIO:
    """Open a new file for writing. Anything of that name, a link or a pipe too, is an error."""
    return open(path, "xb")  # O_CREAT with O_EXCL, which follows no link


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, each with an fsync of the directory above it."""
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for p in missing:
        sync_directory(p.parent)


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that the names in it are durable (Windows cannot, and need not)."""
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
    """Remove a file if it is there; the error, if it could not be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None
