"""The directory of built libraries: only this user can write there, and checksums show damaged files.

A library that is damaged ends the process with a signal that Python cannot catch, and one that another user has put
there runs as this user. So the name of a library holds a checksum of its content, which is compared before it is
loaded; a file of another user, or one that others can write, is ignored; and a directory in which others can replace
files is not used.
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
from typing import TypeVar

T = TypeVar("T")

# Age in seconds from which on temporary files of a build are removed: no compiler runs that long.
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
            outer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            outer.mkdir(mode=0o700, exist_ok=True)
            # Before anything is made inside: another user may have put a link there.
            if not _mine(outer):
                continue
            inner.mkdir(mode=0o700, exist_ok=True)
            if _private(inner.resolve()) and os.access(inner, os.W_OK | os.X_OK):
                return inner.resolve()
    raise OSError(
        "there is no place for built kernels that this user can write and nobody else, down from /: tried "
        + (", ".join(map(str, tried)) or "nothing, as there is neither a home nor a temporary directory")
    )


def _candidates() -> Iterator[Path]:
    # A relative path is to be ignored, says the XDG Base Directory Specification. Without a home ~ stays as it is;
    # with an empty one it would be /.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache") if os.environ.get("HOME", "/") else ""
    if os.path.isabs(base):
        yield Path(base) / "zerofn"
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"zerofn-{os.getuid()}"


def _mine(path: Path) -> bool:
    """Whether a path, and what it may be a link to, belong to this user."""
    return path.lstat().st_uid == path.stat().st_uid == os.getuid()


def _private(inner: Path) -> bool:
    """Whether only this user can exchange what lies in a directory.

    Above it nobody else may write, but where the sticky bit keeps what is not theirs. A group is somebody else, though
    some systems give each user one of their own: who is in it is not known without asking the network, and to be
    turned away costs one build in half a second, in the next place.
    """
    status = inner.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return False
    above, owners = [place.stat() for place in inner.parents], _trusted()
    return all(s.st_uid in owners and (not s.st_mode & 0o022 or s.st_mode & stat.S_ISVTX) for s in above)


def _trusted() -> set[int]:
    """Owners of directories that may lie above ours: this user and root, also where a container does not map root."""
    users = {0, os.getuid()}
    with contextlib.suppress(OSError, ValueError):  # there is no such file but on Linux
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
        if not _numbered(nobody, Path("/proc/self/uid_map").read_text()):
            users.add(nobody)
    return users


def _numbered(user: int, table: str) -> bool:
    """Whether a user id is mapped, by a user namespace's table of (first id here, first id outside, count).

    >>> _numbered(65534, "0 0 4294967295"), _numbered(65534, "1000 1000 1")
    (True, False)
    """
    rows = [[int(word) for word in line.split()] for line in table.splitlines()]
    return any(first <= user < first + count for first, _, count in rows)


def find(where: Path, key: str) -> Path | None:
    """The library of this key, if its checksum is right.

    A damaged one is not removed: another process may have replaced it meanwhile.
    """
    return next((file for file in sorted(where.glob(f"adam-{key}-*.so")) if _sound(file)), None)


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


def keep(where: Path, key: str, build: Callable[[str], T]) -> T:
    """Build and load a library, and keep it; returns what ``build`` returns.

    It is loaded before it is renamed: what does not load is not kept, and what another process does to the final name
    does not matter here.

    Args:
        where: the directory.
        key: a hash of all that could change its code.
        build: writes the library to a path, and loads it.

    Raises:
        OSError: it could not be built, loaded or written.
    """
    _tidy(where, key)
    descriptor, temporary = tempfile.mkstemp(suffix=".so", prefix="building-", dir=where)
    os.close(descriptor)
    try:
        loaded = build(temporary)
        # A linker makes the file anew, with the mode of all new files.
        os.chmod(temporary, 0o700)
        with open(temporary, "rb") as built:
            library = where / f"adam-{key}-{_checksum(built.read())}.so"
            # Without this the file could be empty after a crash of the machine: a rename may reach the disk first.
            os.fsync(built.fileno())
        os.replace(temporary, library)
        _sync(where)
        return loaded
    finally:
        remove(Path(temporary))


def _sync(where: Path) -> None:
    # Not all file systems can; there a checksum shows a file that was lost.
    with contextlib.suppress(OSError):
        descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _tidy(where: Path, key: str) -> None:
    """Remove temporary files of builds that were killed, and damaged libraries of this key."""
    for file in where.glob("building-*"):
        with contextlib.suppress(OSError):
            if time.time() - file.lstat().st_mtime > _ABANDONED:
                file.unlink()
    for file in where.glob(f"adam-{key}-*.so"):
        if not _sound(file):
            remove(file)
