"""Replaces files atomically: locks, fsync, the manifest of a checkpoint."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import struct
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .._errors import explain

# ----------------------------------------------------------------------------------------------------------------------
# These functions open files safely: new ones exclusively, existing ones without blocking on pipes. They fsync
# directories.


# Errors of a system that cannot fsync a directory, or does not allow it. Any other error means that the disk fails.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSYS}


def absolute_path(call: str, directory: str | os.PathLike) -> Path:
    """The absolute path, which stays right when the process changes its working directory.

    Raises:
        ValueError: `directory` is "", for instance from an empty setting. pathlib would take the working directory.
    """
    if not os.fspath(directory):
        why = "an empty name would mean the working directory of the process"
        raise ValueError(explain(call.format('""'), why, call.format('"runs/net"')))
    return Path(directory).absolute()


def random_token() -> str:
    """Twelve hexadecimal digits for a file name that no other save has."""
    return uuid.uuid4().hex[:12]


def create(path: Path) -> BinaryIO:
    """Open a new file for writing. If anything has that name, even a link or a pipe, this raises."""
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
    """Remove a file if it exists. Return the error if it could not be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


# ----------------------------------------------------------------------------------------------------------------------
# `Lock` is an flock on a directory. It is released when its process dies, and an interrupt never leaves it behind.


PATIENCE = 300.0  # seconds that a save waits for another save or load in the same directory


class Lock:
    """A lock that allows one save at a time in a directory, and none while it is read.

    Use it with `finally: lock.release(); lock.close()`.

    Attributes:
        held: whether it is held. Not every file system has locks; there the caller must make one save at a time.
        release: unlocks. It is a C function: Python delivers an interrupt between instructions of Python code, so
            before it or after it and never inside. Closing the file would not unlock it: a process that was forked
            meanwhile, such as a data loader's worker, still has the file open.
    """

    def __init__(self) -> None:
        self.held = False
        self.release: Callable[[], Any] = bool
        self._handle: int | None = None

    def acquire(self, directory: Path, exclusive: bool, patience: float | None = None) -> None:
        """Wait for the lock.

        Args:
            directory: the directory to lock.
            exclusive: excludes every other lock (`LOCK_EX`), or only exclusive ones (`LOCK_SH`).
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
        # Set before locking, since an interrupt may come in between. Unlocking an unlocked file does no harm.
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


# ----------------------------------------------------------------------------------------------------------------------
# The manifest of a checkpoint is one JSON file. A save takes effect at the moment when it replaces the manifest.
#
# A checkpoint is a directory of data files and `zerofn.json`, the manifest. Each save writes data files under new
# names. When all are on disk, the manifest that names them replaces the old one atomically, and only then are the old
# data files deleted. So a save that dies at any moment leaves the last complete checkpoint. Renaming a whole
# directory into place would not do: it cannot replace one that has files, and fails on a mount point and on most
# network file systems.
#
# From the replacement on (`ManifestWriter.place`) no file that the manifest names is deleted, whatever fails. Files
# that no manifest names can be left behind; the next save removes them. It knows files of saves by the form of their
# names, and never touches others.
#
# Nothing here is pickled: whoever can write a pickle that is loaded can run code.


NAME = "zerofn.json"
FORMAT = "zerofn checkpoint"
VERSION = 3  # version 1 had no buffers, version 2 no tensors whose elements are saved box by box
ROW_MAJOR = 2
DATA_FILE = re.compile(r"([0-9a-f]{12})_\d+_\d+\.distcp")
TEMPORARY = re.compile(rf"{re.escape(NAME)}(\.[0-9a-f]{{12}})?\.tmp")  # version 1 had one name for all


class ManifestWriter:
    """Writes a new manifest under a temporary name, and puts it in place of the old one.

    Attributes:
        placed: whether the new manifest is in place; `None` while that is unknown.
    """

    def __init__(self, directory: Path, token: str):
        self.directory = directory
        self.token = token
        self.temporary = directory / f"{NAME}.{token}.tmp"
        self.placed: bool | None = False

    def write(self, body: dict[str, Any]) -> None:
        """Write the manifest under its temporary name, with fsync of file and directory."""
        body = {"format": FORMAT, "version": VERSION, **body}
        with create(self.temporary) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            json.dump({**body, "checksum": _checksum(body)}, text, indent=1)
            text.flush()
            os.fsync(file.fileno())
        sync_directory(self.directory)

    def place(self) -> None:
        """Replace the old manifest atomically. This is the moment at which a save takes effect."""
        # An interrupt may come between the replacement and the next line.
        self.placed = None
        os.replace(self.temporary, self.directory / NAME)
        self.placed = True

    def withdraw(self) -> bool:
        """Remove the new manifest after a failure. Return whether it is certainly not in place, and will not be."""
        if self.placed is None:
            # A manifest that still has its temporary name is not in place. Otherwise it may be.
            try:
                os.unlink(self.temporary)
                self.placed = False
            except OSError:
                names = named_files(self.directory)
                self.placed = None if names is None else any(name.startswith(self.token) for name in names)
        elif not self.placed:
            discard(self.temporary)
        return self.placed is False


def read(directory: Path) -> dict[str, Any]:
    """The manifest of the last complete save.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another format version.
    """
    try:
        with open_regular(directory / NAME) as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(_why_not(directory)) from None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # also if it is no UTF-8
        raise damaged(directory / NAME, str(error)) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise damaged(directory / NAME, f"it does not say {FORMAT!r}")
    if body.get("version") not in range(1, VERSION + 1):
        wrong = f"the checkpoint in {directory} has format version {body.get('version')!r}"
        why = f"this zerofn reads versions 1 to {VERSION}; the file was written by zerofn {body.get('zerofn')}"
        right = f"pip install 'zerofn=={body.get('zerofn')}', or save it again with the version you have"
        raise ValueError(explain(wrong, why, right))
    if body.pop("checksum", None) != _checksum(body):
        raise damaged(directory / NAME, "its checksum does not fit")
    if wrong := next(_not_as_written({**DEFAULTS, **body}), None):
        raise damaged(directory / NAME, wrong)
    return {**DEFAULTS, **body}


# What manifests of the first version may lack.
DEFAULTS: dict[str, Any] = {"values": {}, "param_groups": None, "buffers": None}
MOST = 1 << 62  # of any number of elements or bytes


def _is_count(x: Any, least: int = 0, most: int = MOST) -> bool:
    return type(x) is int and least <= x < most


def _is_chunk(x: Any) -> bool:
    if not isinstance(x, list) or len(x) != 6:
        return False
    offset, length, file, at, size, crc = x
    counts = all(map(_is_count, (offset, length, at, size))) and _is_count(crc, most=1 << 32)
    return counts and isinstance(file, str) and DATA_FILE.fullmatch(file) is not None


def _is_shape(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_count, x)) and math.prod(x) < MOST


def _is_box(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(map(_is_shape, x)) and len(x[0]) == len(x[1])


def _is_number(x: Any) -> bool:
    return x is None or isinstance(x, float) or (isinstance(x, int) and -MOST < x < MOST)


def _not_as_written(body: dict[str, Any]) -> Iterator[str]:
    """What no save writes into a manifest: another type, a number out of range, deeper containers.

    A checksum tells of accidents. Who writes a file on purpose also writes its checksum.
    """
    for key in ("tensors", "values"):
        if not isinstance(body.get(key), dict):
            yield f"its {key} are no dict"
            return
    # Older saves wrote what is no tensor in a state of another library.
    if not all([isinstance(x, str) or _is_number(x) for x in body["values"].values()]):
        yield "its values are no numbers"
    if not _is_count(body.get("ranks"), 1) or not _is_count(body.get("copies", 1), 1):
        yield "its ranks are no count"
    for key, about in body["tensors"].items():
        if not isinstance(about, dict) or not _is_shape(about.get("shape")):
            yield f"{key} has no shape"
            return
        if not isinstance(about.get("dtype"), str):
            yield f"{key} has no dtype"
        if not isinstance(about.get("chunks"), list) or not all(map(_is_chunk, about["chunks"])):
            yield f"the places of {key} are none"
        if not isinstance(about.get("boxes", []), list) or not all(map(_is_box, about.get("boxes", []))):
            yield f"the boxes of {key} are none"
    groups, buffers = body["param_groups"], body["buffers"]
    if groups is not None and not (isinstance(groups, list) and all([isinstance(x, dict) for x in groups])):
        yield "its param_groups are no list of dicts"
    named = isinstance(buffers, list) and all([str(x) in body["tensors"] for x in buffers])
    if buffers is not None and not named:
        yield "its buffers are no names of tensors"
    if not _is_count(body.get("order", 0)) or not isinstance(body.get("score"), str | None):
        yield "its order or score is none"
    elif body.get("score") is not None and not _NUMBER.fullmatch(body["score"]):
        yield "its score is no number"


_NUMBER = re.compile(r"-?(nan|inf|[0-9][0-9.e+-]{0,30})")


class Damaged(ValueError):
    """A file of a checkpoint differs from what was written."""


def damaged(file: Path, why: str) -> Damaged:
    """The error for a file that differs from what was written."""
    right = "an older checkpoint, or a copy of this one; nothing was loaded"
    return Damaged(explain(f"the checkpoint file {file} is damaged", why, right))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe is refused at once: opening it would wait for a writer.

    A link to a file is followed: caches of downloads are made of links.

    Raises:
        Damaged: it is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        file = open(path, "rb", opener=opener)  # noqa: SIM115
    except OSError as error:
        # `open` raises the first for a directory and the second for a socket.
        if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:
            raise damaged(path, "it is no regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise damaged(path, "it is no regular file")
    return file


def is_plain_archive(file: Any) -> bool:
    """Whether a file is an archive in which nothing is compressed, as torch writes them: it grows by nothing when read.

    Args:
        file: a path, or an open file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            found = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return False
    return all([x.compress_type == zipfile.ZIP_STORED and x.file_size == x.compress_size for x in found])


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _why_not(directory: Path) -> str:
    names = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
    if not directory.exists():
        why = "there is no such directory"
    elif not directory.is_dir():
        why = "that is a file; a checkpoint is a directory"
    elif ".metadata" in names:
        why = "it holds a checkpoint of torch.distributed.checkpoint that zf.save did not write"
    elif any(DATA_FILE.fullmatch(name) for name in names):
        why = "its first save was cut off before it was complete"
    else:
        why = f"it has no {NAME}"
    return explain(f"no checkpoint in {directory}", why, f"zf.save({str(directory)!r}, state) first")


def named_files(directory: Path) -> set[str] | None:
    """The data files that the current manifest names; `None` if it cannot be read, whatever the reason."""
    try:
        return {chunk[2] for about in read(directory)["tensors"].values() for chunk in about["chunks"]}
    except Exception:
        return None


def remove_files(directory: Path, which: Callable[[str], bool]) -> list[OSError]:
    """Remove files of saves. Return the errors of those that could not be removed.

    Args:
        directory: of the checkpoint.
        which: whether to remove a file, by its name. It is called only for names in the form that saves use.
    """
    try:
        files = [f for f in directory.iterdir() if DATA_FILE.fullmatch(f.name) or TEMPORARY.fullmatch(f.name)]
    except OSError as error:
        return [error]
    failed = [discard(f) for f in files if which(f.name) and (f.is_symlink() or not f.is_dir())]
    return [error for error in failed if error is not None]


# ----------------------------------------------------------------------------------------------------------------------
# `replace_file` lets a library write to a temporary file, and then replaces one file atomically.


SUFFIX = ".tmp"


def replace_file(path: Path, write: Callable[[Path], None]) -> OSError | None:
    """Replace a file by the one that `write` writes to the path of its argument, a new hidden file beside it.

    A killed process leaves the hidden file behind.

    Returns:
        Why the file, although it is in place, may not survive a loss of power; `None` if it will.

    Raises:
        OSError: it could not be written or put in place. The old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{random_token()}{SUFFIX}")
    with create(temporary) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        write(temporary)
        # The permissions of a new file follow the user's umask; some libraries make it unreadable to others.
        os.chmod(temporary, mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        discard(temporary)
        raise
    try:
        sync_directory(path.parent)
    except OSError as error:
        return error
    return None
