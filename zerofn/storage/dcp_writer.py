"""Writing a checkpoint: data files by every rank, the table of contents by the first, which alone removes files."""

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

from ..ranks.group import Group
from . import manifest as _manifest
from .dcp import Files, Piece, checksums, chunk, dcp, first
from .files import make_directory, sync_directory
from .lock import Lock
from .manifest import Table

# What a directory holds after a save that failed.
IN_PLACE = "the new checkpoint is in place"
AS_IT_WAS = "a checkpoint that was there is as it was"
UNKNOWN = (
    "it cannot be told here whether the new checkpoint is in place or the one that was there; one of them is, whole"
)


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
            chunk(piece.offset, piece.data.numel()), properties, torch.Size([piece.numel])
        )
        index = dcp.metadata.MetadataIndex(key, torch.Size([piece.offset]))
        return dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: Any) -> Tensor:
        return self.pieces[index.fqn].data


def _noting(fate: str) -> Callable[[Callable], Callable]:
    """Let the errors of a method say what is true of the directory after them, to every rank that is told of them."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def noting(*args: Any) -> Any:
            try:
                return method(*args)
            except BaseException as error:
                error.add_note(fate)
                raise

        return noting

    return decorate


class _Writer(dcp.FileSystemWriter):
    """Data files under new names, their checksums, and the table of contents at the end.

    Another rank than the first never removes a file: it does not know whether the first has named it in a table, which
    may happen after this one was interrupted or has lost its connection. Nor does the first from that moment on.
    """

    def __init__(self, directory: Path, header: dict[str, Any], lock: Lock, unchanged: Callable[[], None]):
        super().__init__(directory, sync_files=True)
        self.fs = Files()
        self.directory = directory
        self.header = header
        self.lock = lock
        self.unchanged = unchanged
        self.is_coordinator = False
        self.prefix = self.save_id.replace("-", "")[:12]  # of the first rank's are the names of files
        self.table = Table(directory, self.prefix)
        self.old: set[str] | None = None
        self.left: list[OSError] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    @_noting(AS_IT_WAS)
    def prepare_local_plan(self, plan: Any) -> Any:
        make_directory(self.directory)
        if self.is_coordinator:
            self.lock.acquire(self.directory, exclusive=True)
            old = self.old = _manifest.named(self.directory)
            # What saves that died have left takes room that this one may need. Where no table can be read, it
            # stays until there is one: somebody may want to save what can be saved.
            if self.lock.held and old is not None:
                _manifest.remove(self.directory, lambda name: name not in old)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        named = [p.storage_data for p in super().prepare_global_plan(plans)]
        return [
            replace(p, storage_data=replace(name, prefix=f"{self.prefix}_{i}_"))
            for i, (p, name) in enumerate(zip(plans, named, strict=True))
        ]

    @_noting(AS_IT_WAS)
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            raise _disk_error(error) from None
        self.unchanged()
        # Read back from the system's cache: what the library hands to the file is seen nowhere else.
        sums = checksums(self.directory, [r.storage_data for r in written])
        done: Any = torch.futures.Future()
        done.set_result(list(zip(written, sums, strict=True)))
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """On the first rank, once everything is on disk."""
        new = self._write_table(self._places(metadata, results))
        try:
            self.table.place()
            self._remove_old(new)
        except BaseException as error:
            # The other ranks are told of the error, and of this with it.
            error.add_note(self.fate())
            raise

    @_noting(AS_IT_WAS)
    def _write_table(self, tensors: dict[str, Any]) -> set[str]:
        """The files that it names."""
        new = {at[2] for about in tensors.values() for at in about["chunks"]}
        _check_there(self.directory, new)
        self.table.write({**self.header, "tensors": tensors})
        return new

    def _places(self, metadata: Any, results: list[list[Any]]) -> dict[str, Any]:
        """What the table says of each tensor."""
        tensors = {key: {**about, "chunks": []} for key, about in self.header["tensors"].items()}
        lengths = {
            (key, part.offsets[0]): part.sizes[0]
            for key, about in metadata.state_dict_metadata.items()
            for part in about.chunks
        }
        for result, crc in (pair for pairs in results for pair in pairs):
            key, offset, at = result.index.fqn, result.index.offset[0], result.storage_data
            where = [offset, lengths[key, offset], at.relative_path, at.offset, at.length, crc]
            tensors[key]["chunks"].append(where)
        for about in tensors.values():
            about["chunks"].sort()
        return tensors

    def _remove_old(self, new: set[str]) -> None:
        """Once the new table is there to stay; until then a failing disk may bring the old one back."""
        try:
            sync_directory(self.directory)
        except OSError as error:
            self.left = [error]
            return
        # Without a lock another save may be under way, whose files no table names yet.
        old = None if self.lock.held else self.old or set()
        self.left = _manifest.remove(self.directory, lambda name: name not in new and (old is None or name in old))

    def fate(self) -> str:
        """On the first rank after a failure: which checkpoint is there. Removes the files of one that is not."""
        if self.table.withdraw():
            old = self.old or set()
            _manifest.remove(self.directory, lambda name: name.startswith(self.prefix) and name not in old)
            return AS_IT_WAS
        return IN_PLACE if self.table.placed else UNKNOWN


def _check_there(directory: Path, names: set[str]) -> None:
    """A table names only what the rank that writes it can see, whoever wrote it."""
    for name in names:
        if not (directory / name).exists():
            why = "it does not see here what another rank has written; all ranks must see one file system"
            raise FileNotFoundError(errno.ENOENT, why, str(directory / name))


def _disk_error(error: RuntimeError) -> BaseException:
    """The disk's own error, where torch's archive writer has covered it with one of its state."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def save_pieces(
    pieces: dict[str, Piece],
    directory: Path,
    group: Group,
    header: dict[str, Any],
    unchanged: Callable[[], None] = lambda: None,
) -> None:
    """Write one checkpoint together; every rank of `group` calls it.

    An error carries a note that says which checkpoint is there: `IN_PLACE`, `AS_IT_WAS` or `UNKNOWN`.

    Args:
        pieces: by name; what this process has. The same piece on several ranks is written once.
        directory: is made if it is not there.
        group: those who save.
        header: what the table of contents is to say; its `tensors` gets the places of the pieces.
        unchanged: raises if the pieces have been written into since the save began; the checkpoint is then as it was.
    """
    lock = Lock()
    writer = _Writer(directory, header, lock, unchanged)
    try:
        if group.size == 1:
            _save_alone(writer, _SavePlanner(pieces))
        else:
            # The planner has the pieces: the library would look into each for a state_dict of its own.
            dcp.save({}, storage_writer=writer, planner=_SavePlanner(pieces), process_group=group.pg)
    except BaseException as error:
        told: Any = error if isinstance(error, dcp.CheckpointException) else None
        cause = first(told) if told else error
        # Where the first rank has failed too, it may have been after the new table was put in its place.
        early = told and 0 not in told.failures
        fate = writer.fate() if group.rank == 0 else AS_IT_WAS if early else UNKNOWN
        if not any(note in (IN_PLACE, AS_IT_WAS, UNKNOWN) for note in getattr(cause, "__notes__", [])):
            cause.add_note(fate)
        if told:
            raise cause from None
        raise
    finally:
        lock.release()
        lock.close()
    if writer.left:
        _warn(directory, writer.left)


def _save_alone(writer: _Writer, planner: _SavePlanner) -> None:
    """What `dcp.save` does in one process, without its warning that it is one.

    A save may run in a thread, where a filter for warnings would be one for all threads.
    """
    planner.set_up_planner({}, is_coordinator=True)
    writer.reset()
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])


def _warn(directory: Path, errors: list[OSError]) -> None:
    warnings.warn(
        f"zf.save({str(directory)!r}): {IN_PLACE}, but files of an older one are still there, which the next save "
        f"tries again to remove: {errors[0]}",
        stacklevel=6,
    )
