"""Reads a checkpoint: places of tensors from the manifest, checksums before data, no pickle that runs code."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ranks.group import Group
from . import manifest as _manifest
from .dcp import DataFiles, Piece, checksums, chunk, dcp, first_error
from .lock import Lock
from .manifest import damaged

Choose = Callable[[dict[str, Any]], dict[str, Piece]]
Renamed = Callable[[dict[str, Any]], dict[str, Any]]


class _Place(NamedTuple):
    """Where a piece is in a data file. DCP's reader asks for these attributes; its own class is private."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Each rank reads the saved pieces that overlap its own."""

    def __init__(self, reader: _Reader):
        super().__init__()
        self.reader = reader

    def set_up_planner(self, state_dict: dict[str, Any], metadata=None, is_coordinator=False) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> Any:
        saved = self.reader.open()
        items = []
        for key, piece in self.reader.pieces.items():
            wanted = [chunk(piece.offset, piece.data.numel())] if piece.data.numel() else []
            items += dcp.planner_helpers.create_read_items_for_chunk_list(key, saved[key], wanted)
        return dcp.planner.LoadPlan(items)

    def lookup_tensor(self, index: Any) -> Tensor:
        return self.reader.pieces[index.fqn].data


class _Reader(dcp.FileSystemReader):
    """Takes places from the manifest, and compares the checksum of every piece before it is read."""

    def __init__(self, directory: Path, choose: Choose, lock: Lock, renamed: Renamed):
        super().__init__(directory)
        self.fs = DataFiles()
        self.directory = directory
        self.choose, self.renamed = choose, renamed
        self.pieces: dict[str, Piece] = {}
        self.manifest: dict[str, Any] = {}
        self.sums: dict[Any, int] = {}
        self.lock = lock

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        # DCP logs what is raised here and goes on. The planner calls `open`, whose errors reach all ranks.
        return dcp.Metadata({}, storage_data={})

    def open(self) -> dict[str, Any]:
        """Read the manifest and choose the pieces; returns DCP's metadata of each saved tensor."""
        if self.directory.is_dir():
            self.lock.acquire(self.directory, exclusive=False)
        # Data files have no names, so tensors may be called otherwise from here on.
        self.manifest = self.renamed(_manifest.read(self.directory))
        self.pieces = self.choose(self.manifest)
        known = {}
        for key, about in self.manifest["tensors"].items():
            numel, chunks = torch.Size(about["shape"]).numel(), about["chunks"]
            self._check_chunks(key, numel, chunks)
            known[key] = dcp.metadata.TensorStorageMetadata(
                dcp.metadata.TensorProperties(getattr(torch, about["dtype"])),
                torch.Size([numel]),
                [chunk(offset, length) for offset, length, *_ in chunks],
            )
            for offset, _, file, at, size, crc in chunks:
                index = dcp.metadata.MetadataIndex(key, torch.Size([offset]))
                self.storage_data[index] = _Place(file, at, size)
                self.sums[index] = crc
        return known

    def _check_chunks(self, key: str, numel: int, chunks: list[list[Any]]) -> None:
        bounds = [0, *accumulate(length for _, length, *_ in chunks)]
        files = all(_manifest.DATA_FILE.fullmatch(file) for _, _, file, *_ in chunks)
        if [*(offset for offset, *_ in chunks), numel] != bounds or not files:
            raise damaged(self.directory / _manifest.NAME, f"the pieces of {key} are not its {numel} elements")

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted = list(dict.fromkeys(item.storage_index for item in plan.items))
        places = [self.storage_data[index] for index in wanted]
        try:
            sums = checksums(self.directory, places)
        except FileNotFoundError as error:
            why = "it is missing; all ranks must see one file system, and its files must stay together"
            raise damaged(Path(error.filename), why) from None
        for index, at, crc in zip(wanted, places, sums, strict=True):
            if crc != self.sums[index]:
                raise damaged(self.directory / at.relative_path, f"the checksum of {index.fqn} does not fit")
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:
            # torch's own message advises to turn the protection off.
            why = "a piece holds something else than numbers; it was not run"
            raise damaged(self.directory, why) from None


def load_pieces(directory: Path, group: Group, choose: Choose, renamed: Renamed = lambda x: x) -> dict[str, Any]:
    """Fill pieces from a checkpoint; every rank of `group` calls it. Returns the manifest, `renamed`.

    Args:
        directory: of the checkpoint.
        group: the ranks that load.
        choose: from the manifest to the pieces to write into, by name; their number and ranges need not be those that
            were saved. It raises if the checkpoint does not fit; nothing has been read then.
        renamed: the manifest with the names of tensors by which they are chosen.
    """
    lock = Lock()
    reader = _Reader(directory, choose, lock, renamed)
    try:
        # DCP warns that one process is one process.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # No names: which to read is known only once the manifest is.
            dcp.load(
                {},
                storage_reader=reader,
                planner=_LoadPlanner(reader),
                process_group=group.pg,
                no_dist=group.size == 1,
            )
    except dcp.CheckpointException as error:
        raise first_error(error) from None
    finally:
        lock.release()
        lock.close()
    return reader.manifest
