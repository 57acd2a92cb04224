"""Where built libraries are kept: files that are what they were when they were built, where only this user writes.

A library is run without a question, and one that is damaged ends the process with a signal that Python cannot
catch. So its name holds a checksum of its content, which is looked at before it is loaded; a file of another user,
or one that others could write, is not looked at; and a directory in which others could exchange files is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Seconds after which what a build has left behind is nobody's: no compiler is given as much.
_ABANDONED = 86_400


def directory() -> Path:
    """Where libraries are kept; made if need be.

    ``$XDG_CACHE_HOME/zerofn/kernels`` (``~/.cache/zerofn/kernels``); where that cannot be written, or others can write
    into it, a directory of this user's own under the temporary one.

    Raises:
        OSError: there is none in which only this user can write.
    """
    tried = list(_candidates())
    for outer in tried:
        with contextlib.suppress(OSError):
            inner = outer / "kernels"
            # One after the other: the mode is that of the last one alone.
            outer.parent.mkdir(parents=True, exist_ok=True)
            outer.mkdir(mode=0o700, exist_ok=True)
            # Before anything is made inside: another user may have put a link there.
            if not _mine(outer):
                continue
            inner.mkdir(mode=0o700, exist_ok=True)
            if _private(inner.resolve()) and os.access(inner, os.W_OK | os.X_OK):
                return inner.resolve()
    raise OSError(f"no directory in which only this user can write: tried {', '.join(map(str, tried))}")


def _candidates() -> Iterator[Path]:
    # A relative path is to be ignored, says the XDG Base Directory Specification. Without a home ~ stays as it is.
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base):
        yield Path(base) / "zerofn"
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"zerofn-{os.getuid()}"


def _mine(path: Path) -> bool:
    """Whether a path, and what it may be a link to, belong to this user."""
    return path.lstat().st_uid == path.stat().st_uid == os.getuid()


def _private(inner: Path) -> bool:
    """Whether only this user can exchange what lies in a directory.

    Above it nobody else may write, but where the sticky bit keeps what is not theirs. The group is let be there: many
    systems give each user one of their own, and a directory of somebody else's is seen by its owner.
    """
    status = inner.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return False
    above = [place.stat() for place in inner.parents]
    open_to_all = [s for s in above if s.st_mode & stat.S_IWOTH]
    return all(s.st_mode & stat.S_ISVTX and s.st_uid in (0, os.getuid()) for s in open_to_all)


def find(where: Path, key: str) -> Path | None:
    """A library that was kept under this key and is as it was; what is not is removed."""
    for file in sorted(where.glob(f"adam-{key}-*.so")):
        if _sound(file):
            return file
        remove(file)
    return None


def _sound(file: Path) -> bool:
    """Whether a file is whole, no link, and this user's alone."""
    try:
        # Not blocking: what has this name may be a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return False
        try:
            return file.stem.rpartition("-")[2] == _checksum(opened.read())
        except OSError:
            return False


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def keep(where: Path, key: str, build: Callable[[str], None]) -> Path:
    """Have a library built, and keep it.

    Args:
        where: the directory.
        key: of all that could change it.
        build: writes it to the path that it is given.

    Raises:
        OSError: it could not be built or written.
    """
    _tidy(where)
    descriptor, temporary = tempfile.mkstemp(suffix=".so", prefix="building-", dir=where)
    os.close(descriptor)
    try:
        build(temporary)
        # A linker makes the file anew, with the mode of all new files.
        os.chmod(temporary, 0o700)
        with open(temporary, "rb") as built:
            library = where / f"adam-{key}-{_checksum(built.read())}.so"
            # Renamed first and written later, it would be empty after a crash of the machine.
            os.fsync(built.fileno())
        os.replace(temporary, library)
        _sync(where)
        return library
    finally:
        remove(Path(temporary))


def _sync(where: Path) -> None:
    # Not all file systems can; the checksum tells what is lost then.
    with contextlib.suppress(OSError):
        descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tidy(where: Path) -> None:
    """Remove what builds that were killed have left."""
    for file in where.glob("building-*"):
        with contextlib.suppress(OSError):
            if time.time() - file.lstat().st_mtime > _ABANDONED:
                file.unlink()
