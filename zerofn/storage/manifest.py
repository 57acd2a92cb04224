"""The manifest of a checkpoint: one JSON file; replacing it is the moment at which a save takes effect.

A checkpoint is a directory of data files and `zerofn.json`, the manifest. Each save writes data files under new names.
When all are on disk, the manifest that names them replaces the old one atomically, and only then are the old data
files deleted. So a save that dies at any moment leaves the last complete checkpoint. Renaming a whole directory into
place would not do: it cannot replace one that has files, and fails on a mount point and on most network file systems.

From the replacement on (`ManifestWriter.place`) no file that the manifest names is deleted, whatever fails. Files that
no manifest names can be left behind; the next save removes them. It knows files of saves by the form of their names,
and never touches others.

Nothing here is pickled: whoever can write a pickle that is loaded can run code.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from .._errors import explain
from .files import create, discard, sync_directory

NAME = "zerofn.json"
FORMAT = "zerofn checkpoint"
VERSION = 3  # version 1 had no buffers, version 2 no tensors whose elements are saved box by box
ROW_MAJOR = 2
DATA_FILE = re.compile(r"([0-9a-f]{12})_\d+_\d+\.distcp")
TEMPORARY = re.compile(rf"{re.escape(NAME)}(\.[0-9a-f]{{12}})?\.tmp")  # version 1 had one name for all


class ManifestWriter:
    """Writes a new manifest under a temporary name, and puts it in place of the old one.

    Attributes:
        placed: whether it is in place; `None` while that is unknown.
    """

    def __init__(self, directory: Path, token: str):
        self.directory = directory
        self.token = token
        self.temporary = directory / f"{NAME}.{token}.tmp"
        self.placed: bool | None = False

    def write(self, body: dict[str, Any]) -> None:
        """Write it under its temporary name, with fsync of file and directory."""
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
        """Remove it after a failure; whether it is certain that it is not in place, and will not be."""
        if self.placed is None:
            # If it is still there under its temporary name it is not in place; else it may be.
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
    except ValueError as error:  # also if it is no UTF-8
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
    return body


class Damaged(ValueError):
    """A file of a checkpoint is not what was written."""


def damaged(file: Path, why: str) -> Damaged:
    """The error for a file that is not what was written."""
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
        # Of a directory, and of a socket.
        if isinstance(error, IsADirectoryError) or error.errno == errno.ENXIO:
            raise damaged(path, "it is no regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise damaged(path, "it is no regular file")
    return file


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
    """The data files that the manifest in place names; `None` where it cannot be read, whatever the reason."""
    try:
        return {chunk[2] for about in read(directory)["tensors"].values() for chunk in about["chunks"]}
    except Exception:
        return None


def remove_files(directory: Path, which: Callable[[str], bool]) -> list[OSError]:
    """Remove files of saves; returns the errors of those that could not be removed.

    Args:
        directory: of the checkpoint.
        which: whether to remove a file, by its name. Only names of the form that saves give are asked about.
    """
    try:
        files = [f for f in directory.iterdir() if DATA_FILE.fullmatch(f.name) or TEMPORARY.fullmatch(f.name)]
    except OSError as error:
        return [error]
    failed = [discard(f) for f in files if which(f.name) and (f.is_symlink() or not f.is_dir())]
    return [error for error in failed if error is not None]
