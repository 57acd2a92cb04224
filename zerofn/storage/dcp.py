"""Reads and writes data files with torch's distributed checkpoint library (DCP)."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .._errors import bad_leaves, users_line
from ..ranks.backend import checkpoint_library
from ..ranks.group import Group
from . import files as _manifest
from .files import Lock, ManifestWriter, create, damaged, make_directory, open_regular, sync_directory

# ----------------------------------------------------------------------------------------------------------------------
# Reader and writer share these: pieces of flat tensors for `torch.distributed.checkpoint` (DCP), and checksums.
#
# DCP's planners, its data files and its handling of errors on some ranks are used unchanged. Its `.metadata` is not
# used: it is a pickle, read with `pickle.load`, so opening a checkpoint would run code. `zerofn.json` has the same
# content, and a checksum of every piece. Data files are read with `weights_only`.
#
# This is imported at the first save or load, since DCP takes 0.7 s to import.


dcp = checkpoint_library()
BLOCK_BYTES = 1 << 24  # read at once for a checksum


class Piece(NamedTuple):
    """A contiguous range of a tensor's elements in row-major order, which this rank writes or reads.

    Attributes:
        data: the range, one-dimensional.
        offset: the index of its first element.
        shape: of the full tensor.
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
    """Opens data files for DCP: new ones exclusively, existing ones only if they are regular files."""

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
    """The error of the first rank that had one, from DCP's CheckpointException, which is no Exception."""
    rank, (cause, _) = min(error.failures.items())
    if len(error.failures) > 1 or rank:
        cause.add_note(f"on rank {', '.join(map(str, sorted(error.failures)))}")
    return cause


# ----------------------------------------------------------------------------------------------------------------------
# The reader loads a checkpoint: places of tensors from the manifest, checksums before data, no pickle that runs code.


Choose = Callable[[dict[str, Any]], dict[str, Piece]]
Renamed = Callable[[dict[str, Any]], dict[str, Any]]


class _Place(NamedTuple):
    """The place of a piece in a data file. DCP's reader asks for these attributes; its own class is private."""

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
        """Read the manifest and choose the pieces. Return DCP's metadata of each saved tensor."""
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
        choose: takes the manifest and returns the pieces to write into, by name. Their number and ranges may differ
            from the saved ones. It raises if the checkpoint does not fit, before anything is read.
        renamed: takes the manifest and returns it with the names that `choose` uses.
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


# ----------------------------------------------------------------------------------------------------------------------
# The writer saves a checkpoint: every rank writes its data files. The first rank writes the manifest, and it alone
# removes files.


# Which checkpoint is there after a save that failed.
IN_PLACE = "the new checkpoint is in place"
AS_IT_WAS = "a checkpoint that was there is as it was"
UNKNOWN = (
    "it cannot be told here whether the new checkpoint is in place or the one that was there; one of them is, whole"
)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Every rank offers its pieces; DCP lets one rank write a piece that several offer."""

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
            chunk(piece.offset, piece.data.numel()), properties, torch.Size([piece.numel])
        )
        index = dcp.metadata.MetadataIndex(key, torch.Size([piece.offset]))
        return dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: Any) -> Tensor:
        return self.pieces[index.fqn].data


def _before_commit(method: Callable) -> Callable:
    """Wrap a method that runs before the new manifest is in place, so that its errors say so on all ranks."""

    @wraps(method)
    def noting(*args: Any) -> Any:
        try:
            return method(*args)
        except BaseException as error:
            error.add_note(AS_IT_WAS)
            raise

    return noting


class _Writer(dcp.FileSystemWriter):
    """Writes data files under new names, with checksums, and at the end the manifest.

    Only the first rank removes files. Another rank does not know whether the first has put a manifest in place that
    names them; that may happen after the other was interrupted or has lost its connection.

    Attributes:
        old: data files of the old checkpoint; `None` if its manifest cannot be read.
        not_removed: the errors of removing them.
    """

    def __init__(self, directory: Path, header: dict[str, Any], lock: Lock, check: Callable[[], None]):
        super().__init__(directory, sync_files=True)
        self.fs = DataFiles()
        self.directory = directory
        self.header = header
        self.lock = lock
        self.check = check
        self.is_coordinator = False
        self.prefix = self.save_id.replace("-", "")[:12]  # files of all ranks get that of the first
        self.manifest = ManifestWriter(directory, self.prefix)
        self.old: set[str] | None = None
        self.not_removed: list[OSError] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    @_before_commit
    def prepare_local_plan(self, plan: Any) -> Any:
        make_directory(self.directory)
        if self.is_coordinator:
            self.lock.acquire(self.directory, exclusive=True)
            old = self.old = _manifest.named_files(self.directory)
            # Files of saves that died take room that this one may need. Where no manifest can be read they stay until
            # there is one: the user may want to recover data from them.
            if self.lock.held and old is not None:
                _manifest.remove_files(self.directory, lambda name: name not in old)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        named = [p.storage_data for p in super().prepare_global_plan(plans)]
        return [
            replace(p, storage_data=replace(name, prefix=f"{self.prefix}_{i}_"))
            for i, (p, name) in enumerate(zip(plans, named, strict=True))
        ]

    @_before_commit
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            raise _disk_error(error) from None
        self.check()
        # Read back, from the system's page cache: DCP gives no access to the bytes that it writes.
        sums = checksums(self.directory, [r.storage_data for r in written])
        done: Any = torch.futures.Future()
        done.set_result(list(zip(written, sums, strict=True)))
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """End the save on the first rank, once all data files are on disk: write and place the manifest."""
        new = self._write_manifest(self._places(metadata, results))
        try:
            self.manifest.place()
            self._remove_old(new)
        except BaseException as error:
            # The other ranks receive the error with its notes.
            error.add_note(self.outcome())
            raise

    @_before_commit
    def _write_manifest(self, tensors: dict[str, Any]) -> set[str]:
        """Write the manifest under its temporary name. Return the data files that it names."""
        new = {at[2] for about in tensors.values() for at in about["chunks"]}
        for name in new:
            if not (self.directory / name).exists():
                why = "it does not see here what another rank has written; all ranks must see one file system"
                raise FileNotFoundError(errno.ENOENT, why, str(self.directory / name))
        self.manifest.write({**self.header, "tensors": tensors})
        return new

    def _places(self, metadata: Any, results: list[list[Any]]) -> dict[str, Any]:
        """The manifest's entry for each tensor, with the places of its chunks in data files."""
        tensors = {key: {**about, "chunks": []} for key, about in self.header["tensors"].items()}
        lengths = {
            (key, part.offsets[0]): part.sizes[0]
            for key, about in metadata.state_dict_metadata.items()
            for part in about.chunks
        }
        written = [pair for pairs in results for pair in pairs]
        if unknown := sorted({result.index.fqn for result, _ in written} - tensors.keys()):
            rows = [(key, "rank 0 has no such entry") for key in unknown]
            right = "an init that makes all that update will keep, also on ranks that own none of these leaves"
            raise ValueError(bad_leaves("zf.save: ranks have states of several structures", rows, right))
        for result, crc in written:
            key, offset, at = result.index.fqn, result.index.offset[0], result.storage_data
            where = [offset, lengths[key, offset], at.relative_path, at.offset, at.length, crc]
            tensors[key]["chunks"].append(where)
        for about in tensors.values():
            about["chunks"].sort()
        return tensors

    def _remove_old(self, new: set[str]) -> None:
        """Remove the old data files, after an fsync: until then a failing disk may bring the old manifest back."""
        try:
            sync_directory(self.directory)
        except OSError as error:
            self.not_removed = [error]
            return
        # Without a lock another save may be under way, whose files no manifest names yet.
        old = None if self.lock.held else self.old or set()
        self.not_removed = _manifest.remove_files(
            self.directory, lambda name: name not in new and (old is None or name in old)
        )

    def outcome(self) -> str:
        """On the first rank after a failure: say which checkpoint is in place. Remove the other one's files."""
        if self.manifest.withdraw():
            old = self.old or set()
            _manifest.remove_files(self.directory, lambda name: name.startswith(self.prefix) and name not in old)
            return AS_IT_WAS
        return IN_PLACE if self.manifest.placed else UNKNOWN


def _disk_error(error: RuntimeError) -> BaseException:
    """The OSError that torch's archive writer has replaced by a RuntimeError about its own state."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def save_pieces(
    pieces: dict[str, Piece],
    directory: Path,
    group: Group,
    header: dict[str, Any],
    check: Callable[[], None],
) -> None:
    """Write one checkpoint together; every rank of `group` calls it.

    An error has a note that says which checkpoint is in place: `IN_PLACE`, `AS_IT_WAS` or `UNKNOWN`.

    Args:
        pieces: of this rank, by name. The same piece on several ranks is written once.
        directory: it is made if it does not exist.
        group: the ranks that save.
        header: the manifest; the places of the pieces are added to its `tensors`.
        check: raises if the pieces have been written into since the save began; the old checkpoint then stays.
    """
    lock = Lock()
    writer = _Writer(directory, header, lock, check)
    try:
        if group.size == 1:
            _save_alone(writer, _SavePlanner(pieces))
        else:
            # The planner has the pieces: in a state_dict DCP would look into each.
            dcp.save({}, storage_writer=writer, planner=_SavePlanner(pieces), process_group=group.pg)
    except BaseException as error:
        reported: Any = error if isinstance(error, dcp.CheckpointException) else None
        cause = first_error(reported) if reported else error
        # If the first rank has failed too, it may have been after it had put the new manifest in place.
        early = reported and 0 not in reported.failures
        outcome = writer.outcome() if group.rank == 0 else AS_IT_WAS if early else UNKNOWN
        if not any(note in (IN_PLACE, AS_IT_WAS, UNKNOWN) for note in getattr(cause, "__notes__", [])):
            cause.add_note(outcome)
        if reported:
            raise cause from None
        raise
    finally:
        lock.release()
        lock.close()
    if writer.not_removed:
        warnings.warn(
            f"zf.save({str(directory)!r}): {IN_PLACE}, but files of an older one are still there, which the next save "
            f"tries again to remove: {writer.not_removed[0]}",
            stacklevel=users_line(),
        )


def _save_alone(writer: _Writer, planner: _SavePlanner) -> None:
    """Run `dcp.save` in one process, without its warning that there is only one.

    A save may run in a thread, and a warning filter would affect all threads.
    """
    planner.set_up_planner({}, is_coordinator=True)
    writer.reset()
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])
