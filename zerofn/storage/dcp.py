"""What reader and writer share: pieces of flat tensors for `torch.distributed.checkpoint` (DCP), and checksums.

DCP's planners, its data files and its handling of errors on some ranks are used as they are. Its `.metadata` is not:
that is a pickle, read with `pickle.load`, so opening a checkpoint would run code. What it would contain is in
`zerofn.json`, with a checksum of every piece. Data files are read with `weights_only`.

Imported at the first save or load, since DCP takes 0.7 s to import.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..ranks.backend import checkpoint_library
from .files import create
from .manifest import damaged, open_regular

dcp = checkpoint_library()
BLOCK_BYTES = 1 << 24  # read at once for a checksum


class Piece(NamedTuple):
    """A contiguous range of a tensor's elements in row-major order, to be written or read by this rank.

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


class DataFiles(dcp.filesystem.FileSystem):
    """How DCP opens data files: new ones exclusively, existing ones only if they are regular files."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[BinaryIO]:
        with create(Path(path)) if mode == "wb" else open_regular(Path(path)) as stream:
            yield stream


def checksums(directory: Path, places: list[Any]) -> list[int]:
    """The CRC-32 of pieces as they are in data files."""
    sums = []
    for at in places:
        with open_regular(directory / at.relative_path) as file:
            file.seek(at.offset)
            crc, left = 0, at.length
            while left:
                block = file.read(min(BLOCK_BYTES, left))
                if not block:
                    have = os.fstat(file.fileno()).st_size
                    raise damaged(directory / at.relative_path, f"it ends after {have} bytes")
                crc = zlib.crc32(block, crc)
                left -= len(block)
            sums.append(crc)
    return sums


def first_error(error: Any) -> BaseException:
    """The error of the first rank that had one, out of DCP's CheckpointException, which is no Exception."""
    rank, (cause, _) = min(error.failures.items())
    if len(error.failures) > 1 or rank:
        cause.add_note(f"on rank {', '.join(map(str, sorted(error.failures)))}")
    return cause
