"""Writes a checkpoint: every rank its data files, the first rank the manifest; it alone removes files."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, users_line
from ..ranks.group import Group
from . import manifest as _manifest
from .dcp import DataFiles, Piece, checksums, chunk, dcp, first_error
from .files import make_directory, sync_directory
from .lock import Lock
from .manifest import ManifestWriter

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
    """A method that runs before the new manifest is in place: its errors say so, to all ranks that receive them."""

    @wraps(method)
    def noting(*args: Any) -> Any:
        try:
            return method(*args)
        except BaseException as error:
            error.add_note(AS_IT_WAS)
            raise

    return noting


class _Writer(dcp.FileSystemWriter):
    """Data files under new names, their checksums, and at the end the manifest.

    Only the first rank removes files. Another rank does not know whether the first has put a manifest in place that
    names them, which may happen after the other was interrupted or has lost its connection.

    Attributes:
        old: data files of the checkpoint that was there; `None` where its manifest cannot be read.
        not_removed: errors of removing them.
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
        """On the first rank, once all data files are on disk."""
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
        """Write it under its temporary name; returns the data files that it names."""
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
        """After an fsync of the new manifest's name; until then a failing disk may bring the old one back."""
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
        """On the first rank after a failure: which checkpoint is there. Removes the files of one that is not."""
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

    An error has a note that says which checkpoint is there: `IN_PLACE`, `AS_IT_WAS` or `UNKNOWN`.

    Args:
        pieces: of this rank, by name. The same piece on several ranks is written once.
        directory: is made if it is not there.
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
    """What `dcp.save` does in one process, without its warning that it is one.

    A save may run in a thread, and filters for warnings are those of all threads.
    """
    planner.set_up_planner({}, is_coordinator=True)
    writer.reset()
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])
