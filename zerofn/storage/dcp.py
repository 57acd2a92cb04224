"""Pieces of flat tensors through `torch.distributed.checkpoint`, which plans who writes and who reads what.

Its planners, its data files and its handling of errors on some ranks are used as they are. Its `.metadata`
is not: that is a pickle, read with `pickle.load`, so to open a checkpoint would be to run it. What it would
say stands in `zerofn.json`, with a checksum of every piece. Data files are read with `weights_only`.

Imported at the first save or load, since the library takes 0.7 s to import.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..ranks.backend import checkpoint_library
from .files import NotAFile, create, open_regular
from .manifest import damaged

dcp = checkpoint_library()
BLOCK = 1 << 24  # bytes read at once for a checksum


class Piece(NamedTuple):
    """What a process has, or wants, of a tensor: a contiguous range of its elements in row-major order.

    Attributes:
        data: the range, one-dimensional.
        offset: where it begins.
        shape: of the whole tensor.
    """

    data: Tensor
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def chunk(offset: int, length: int) -> Any:
    return dcp.metadata.ChunkStorageMetadata(torch.Size([offset]), torch.Size([length]))


class Files(dcp.filesystem.FileSystem):
    """How the library opens files, in a directory that others may write into too."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[BinaryIO]:
        with create(Path(path)) if mode == "wb" else open_piece(Path(path)) as stream:
            yield stream


def open_piece(path: Path) -> BinaryIO:
    """Open a data file to read."""
    try:
        return open_regular(path)
    except NotAFile as error:
        raise damaged(path, str(error)) from None


def checksums(directory: Path, places: list[Any]) -> list[int]:
    """Of pieces as they stand in data files."""
    sums = []
    for at in places:
        with open_piece(directory / at.relative_path) as file:
            file.seek(at.offset)
            crc, left = 0, at.length
            while left:
                block = file.read(min(BLOCK, left))
                if not block:
                    have = os.fstat(file.fileno()).st_size
                    raise damaged(directory / at.relative_path, f"it ends after {have} bytes")
                crc = zlib.crc32(block, crc)
                left -= len(block)
            sums.append(crc)
    return sums


def first(error: Any) -> BaseException:
    """The error itself, of the first rank that had one; the library wraps it in a BaseException."""
    rank, (cause, _) = min(error.failures.items())
    if len(error.failures) > 1 or rank:
        cause.add_note(f"on rank {', '.join(map(str, sorted(error.failures)))}")
    return cause


def quiet() -> Any:
    """Without the warning that one process is one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
