"""The table of contents of a checkpoint: one JSON file, whose replacement is the moment a save takes effect.

A checkpoint is a directory of data files and `zerofn.json`. Data files get new names at each save and are
never written again; the table that names them is replaced in one step when all are on disk, and only then
are those of the checkpoint before deleted. So a save that dies at any moment leaves the last complete one.
Renaming a whole directory into place would not do: it cannot replace one that has files, and fails on a
mount point and on most network file systems.

Nothing here is pickled: whoever can write a pickle that is loaded can run code.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

from ._errors import explain

NAME = "zerofn.json"
FORMAT = "zerofn checkpoint"
VERSION = 1
DATA_FILE = re.compile(r"[0-9a-f]{12}_\d+_\d+\.distcp")
PATIENCE = 300.0  # seconds that a save waits for another save, or for a load, in the same directory


def write(directory: Path, body: dict[str, Any]) -> None:
    """Put a new table in the place of the old one, in one step."""
    body = {"format": FORMAT, "version": VERSION, **body}
    temporary = directory / f"{NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**body, "checksum": _checksum(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)
    os.replace(temporary, directory / NAME)
    sync_directory(directory)


def read(directory: Path) -> dict[str, Any]:
    """The table of the last complete save.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another format version.
    """
    try:
        text = (directory / NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(_why_not(directory)) from None
    except UnicodeDecodeError as error:
        raise damaged(directory / NAME, str(error)) from None
    try:
        body = json.loads(text)
    except ValueError as error:
        raise damaged(directory / NAME, str(error)) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise damaged(directory / NAME, f"it does not say {FORMAT!r}")
    if body.get("version") != VERSION:
        raise ValueError(
            explain(
                f"the checkpoint in {directory} has format version {body.get('version')!r}",
                f"this zerofn reads version {VERSION}; the file was written by zerofn {body.get('zerofn')}",
                f"pip install 'zerofn=={body.get('zerofn')}', or save it again with the version you have",
            )
        )
    if body.pop("checksum", None) != _checksum(body):
        raise damaged(directory / NAME, "its checksum does not fit")
    return body


def damaged(file: Path, why: str) -> ValueError:
    """The error for a file that is not what was written."""
    right = "an older checkpoint, or a copy of this one; nothing was loaded"
    return ValueError(explain(f"the checkpoint file {file} is damaged", why, right))


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


def remove_data(directory: Path, keep: set[str], prefix: str = "") -> None:
    """Delete data files that no table names: of the save before, and of saves that died."""
    for file in directory.iterdir():
        if DATA_FILE.fullmatch(file.name) and file.name not in keep and file.name.startswith(prefix):
            file.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make names durable, where the system can (Windows cannot, and need not)."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


class Lock:
    """One save at a time in a directory, and none while it is read; the system frees it when a process dies."""

    def __init__(self, directory: Path, exclusive: bool):
        self._handle: int | None = None
        try:
            import fcntl
        except ImportError:
            return
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        self._handle = os.open(directory, os.O_RDONLY)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    self.close()
                    raise TimeoutError(
                        f"{directory} has been in use by another save or load for {PATIENCE:.0f} s. "
                        "Save into a directory of its own, and from one process if the state is not sharded."
                    ) from None
                time.sleep(0.02)
            except OSError:
                return  # a file system without locks: one save at a time is then the caller's business

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
