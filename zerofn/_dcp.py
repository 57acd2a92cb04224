"""Pieces of flat tensors through `torch.distributed.checkpoint`, which plans who writes and who reads what.

Its planners, its data files and its handling of errors on some ranks are used as they are. Its `.metadata`
is not: that is a pickle, read with `pickle.load`, so to open a checkpoint would be to run it. What it would
say stands in `zerofn.json`, with a checksum of every piece. Data files are read with `weights_only`.

Imported at the first save or load, since the library takes 0.7 s to import.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _manifest
from ._collectives import checkpoint_library
from ._group import Group
from ._manifest import Lock, damaged

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


Choose = Callable[[dict[str, Any]], dict[str, Piece]]


def _chunk(offset: int, length: int) -> Any:
    return dcp.metadata.ChunkStorageMetadata(torch.Size([offset]), torch.Size([length]))


class _SavePlanner(dcp.DefaultSavePlanner):
    """Every process offers its pieces; what several offer, one writes."""

    def __init__(self, pieces: dict[str, Piece]):
        super().__init__(flatten_state_dict=False)
        self.pieces = pieces

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta=None, is_coordinator=False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> Any:
        items = [self._item(k, p) for k, p in self.pieces.items() if p.data.numel() or not p.numel]
        self.plan = dcp.planner.SavePlan(items)
        return self.plan

    def _item(self, key: str, piece: Piece) -> Any:
        properties = dcp.metadata.TensorProperties.create_from_tensor(piece.data)
        data = dcp.planner.TensorWriteData(
            _chunk(piece.offset, piece.data.numel()), properties, torch.Size([piece.numel])
        )
        index = dcp.metadata.MetadataIndex(key, torch.Size([piece.offset]))
        return dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: Any) -> Tensor:
        return self.pieces[index.fqn].data


class _Writer(dcp.FileSystemWriter):
    """Data files under new names, their checksums, and the table of contents at the end."""

    def __init__(self, directory: Path, header: dict[str, Any]):
        super().__init__(directory, sync_files=True)
        self.directory = directory
        self.header = header
        self.prefix = ""
        self.lock: Lock | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: Any) -> Any:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            _manifest.sync_directory(self.directory.parent)
        if self.is_coordinator:
            self.lock = Lock(self.directory, exclusive=True)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        self.prefix = self.save_id.replace("-", "")[:12]
        prefix = dcp.filesystem._StoragePrefix
        return [replace(p, storage_data=prefix(f"{self.prefix}_{i}_")) for i, p in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            raise _disk_error(error) from None
        # Read back from the system's cache: what the library hands to the file is seen nowhere else.
        sums = _checksums(self.directory, [r.storage_data for r in written])
        done: Any = torch.futures.Future()
        done.set_result(list(zip(written, sums, strict=True)))
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """On the coordinator, once everything is on disk."""
        tensors = {key: {**about, "chunks": []} for key, about in self.header["tensors"].items()}
        lengths = {
            (key, chunk.offsets[0]): chunk.sizes[0]
            for key, about in metadata.state_dict_metadata.items()
            for chunk in about.chunks
        }
        for result, crc in (pair for pairs in results for pair in pairs):
            key, offset, at = result.index.fqn, result.index.offset[0], result.storage_data
            chunk = [offset, lengths[key, offset], at.relative_path, at.offset, at.length, crc]
            tensors[key]["chunks"].append(chunk)
        for about in tensors.values():
            about["chunks"].sort()
        _manifest.write(self.directory, {**self.header, "tensors": tensors})
        used = {chunk[2] for about in tensors.values() for chunk in about["chunks"]}
        _manifest.remove_data(self.directory, keep=used)

    def close(self, failed: bool) -> None:
        if failed and self.prefix:
            _manifest.remove_data(self.directory, keep=set(), prefix=self.prefix)
        if failed and self.lock is not None:
            (self.directory / f"{_manifest.NAME}.tmp").unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.close()


def _disk_error(error: RuntimeError) -> BaseException:
    """The disk's own error, where torch's archive writer has covered it with one of its state."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _checksums(directory: Path, places: list[Any]) -> list[int]:
    sums = []
    for at in places:
        with open(directory / at.relative_path, "rb") as file:
            file.seek(at.offset)
            crc, left = 0, at.length
            while left:
                block = file.read(min(BLOCK, left))
                if not block:
                    have = (directory / at.relative_path).stat().st_size
                    raise damaged(directory / at.relative_path, f"it ends after {have} bytes")
                crc = zlib.crc32(block, crc)
                left -= len(block)
            sums.append(crc)
    return sums


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Each process reads the saved pieces that overlap its own."""

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
            wanted = [_chunk(piece.offset, piece.data.numel())] if piece.data.numel() else []
            items += dcp.planner_helpers.create_read_items_for_chunk_list(key, saved[key], wanted)
        return dcp.planner.LoadPlan(items)

    def lookup_tensor(self, index: Any) -> Tensor:
        return self.reader.pieces[index.fqn].data


class _Reader(dcp.FileSystemReader):
    """Places from the table of contents; every piece is checked before it is read."""

    def __init__(self, directory: Path, choose: Choose):
        super().__init__(directory)
        self.directory = directory
        self.choose = choose
        self.pieces: dict[str, Piece] = {}
        self.manifest: dict[str, Any] = {}
        self.sums: dict[Any, int] = {}
        self.lock: Lock | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        # The library logs what is raised here and goes on; `open` is called where errors count.
        return dcp.Metadata({}, storage_data={})

    def open(self) -> dict[str, Any]:
        """Read the table of contents and choose the pieces; gives what the library must know of each."""
        if self.directory.is_dir():
            self.lock = Lock(self.directory, exclusive=False)
        self.manifest = _manifest.read(self.directory)
        self.pieces = self.choose(self.manifest)
        known = {}
        for key, about in self.manifest["tensors"].items():
            numel, chunks = torch.Size(about["shape"]).numel(), about["chunks"]
            self._check_chunks(key, numel, chunks)
            known[key] = dcp.metadata.TensorStorageMetadata(
                dcp.metadata.TensorProperties(getattr(torch, about["dtype"])),
                torch.Size([numel]),
                [_chunk(offset, length) for offset, length, *_ in chunks],
            )
            for offset, _, file, at, size, crc in chunks:
                index = dcp.metadata.MetadataIndex(key, torch.Size([offset]))
                self.storage_data[index] = dcp.filesystem._StorageInfo(file, at, size)
                self.sums[index] = crc
        return known

    def _check_chunks(self, key: str, numel: int, chunks: list[list[Any]]) -> None:
        end = 0
        for offset, length, file, *_ in chunks:
            if offset != end or not _manifest.DATA_FILE.fullmatch(file):
                break
            end += length
        else:
            if end == numel:
                return
        raise damaged(self.directory / _manifest.NAME, f"the pieces of {key} are not its {numel} elements")

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted = list(dict.fromkeys(item.storage_index for item in plan.items))
        places = [self.storage_data[index] for index in wanted]
        try:
            sums = _checksums(self.directory, places)
        except FileNotFoundError as error:
            why = "it is missing; all ranks must see one file system, and its files must stay together"
            raise damaged(Path(error.filename), why) from None
        for index, at, crc in zip(wanted, places, sums, strict=True):
            if crc != self.sums[index]:
                raise damaged(self.directory / at.relative_path, f"the checksum of {index.fqn} does not fit")
        return super().read_data(plan, planner)


def save_pieces(pieces: dict[str, Piece], directory: Path, group: Group, header: dict[str, Any]) -> None:
    """Write one checkpoint together; every rank of `group` calls it.

    Args:
        pieces: by name; what this process has. The same piece on several ranks is written once.
        directory: is made if it is not there.
        group: those who save.
        header: what the table of contents is to say; its `tensors` gets the places of the pieces.
    """
    writer, failed = _Writer(directory, header), True
    try:
        with _quiet():
            # The planner has the pieces: the library would look into each for a state_dict of its own.
            dcp.save(
                {},
                storage_writer=writer,
                planner=_SavePlanner(pieces),
                process_group=group.pg,
                no_dist=group.size == 1,
            )
        failed = False
    except dcp.CheckpointException as error:
        raise _first(error) from None
    finally:
        writer.close(failed)


def load_pieces(directory: Path, group: Group, choose: Choose) -> dict[str, Any]:
    """Fill pieces from a checkpoint; every rank of `group` calls it. Gives the table of contents.

    Args:
        directory: of the checkpoint.
        group: those who load.
        choose: gives, for the table of contents, the pieces to write into, whose number and ranges need not
            be those that were saved. It raises if the checkpoint does not fit; nothing has been read then.
    """
    reader = _Reader(directory, choose)
    try:
        with _quiet():
            # Which names to read is known once the table is, so the library gets none.
            dcp.load(
                {},
                storage_reader=reader,
                planner=_LoadPlanner(reader),
                process_group=group.pg,
                no_dist=group.size == 1,
            )
    except dcp.CheckpointException as error:
        raise _first(error) from None
    finally:
        if reader.lock is not None:
            reader.lock.close()
    return reader.manifest


def _first(error: Any) -> BaseException:
    """The error itself, of the first rank that had one; the library wraps it in a BaseException."""
    rank, (cause, _) = min(error.failures.items())
    if len(error.failures) > 1 or rank:
        cause.add_note(f"on rank {', '.join(map(str, sorted(error.failures)))}")
    return cause


def _quiet() -> Any:
    """Without the warning that one process is one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
