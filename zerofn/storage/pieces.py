"""Reads and writes the data files of a checkpoint: pieces of flat tensors, each with a checksum."""

from __future__ import annotations

import errno
import io
import os
import warnings
import zlib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._errors import bad_leaves, users_line
from ..ranks.backend import gather_objects, raised_on
from ..ranks.group import Group
from . import files as _manifest
from .files import (
    Lock,
    ManifestWriter,
    create,
    damaged,
    is_plain_archive,
    make_directory,
    open_regular,
    random_token,
    sync_directory,
)

# ----------------------------------------------------------------------------------------------------------------------
# Reader and writer share these definitions: pieces of tensors, and steps that all ranks make together.
#
# A data file has one piece after the other, each as `torch.save` writes a tensor, and is read with `weights_only`.
# Which pieces are where is in the manifest. Those of zerofn 0.2 and older were written by
# `torch.distributed.checkpoint`, in the same form.


T = TypeVar("T")


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


class Place(NamedTuple):
    """A piece in a data file, as the manifest lists it.

    Attributes:
        offset: the index of its first element in the tensor.
        length: how many elements it has.
        file: the name of the data file.
        at: where its bytes begin there.
        size: how many bytes it has.
        crc: their CRC-32.
    """

    offset: int
    length: int
    file: str
    at: int
    size: int
    crc: int


def _is_whole(about: dict[str, Any]) -> bool:
    """Whether the pieces of a manifest's entry, in order, are all elements of its tensor, each once."""
    bounds = [0, *accumulate(length for _, length, *_ in about["chunks"])]
    return [*(offset for offset, *_ in about["chunks"]), torch.Size(about["shape"]).numel()] == bounds


class Failed(Exception):
    """Some ranks have raised in a step that all make together. `failures` has their errors, by rank."""

    def __init__(self, failures: dict[int, BaseException]):
        super().__init__(failures)
        self.failures = failures

    def first(self) -> BaseException:
        """The error of the first rank that had one, with a note that says on which ranks there were errors."""
        rank, error = min(self.failures.items())
        if len(self.failures) > 1 or rank:
            error.add_note(f"on rank {', '.join(map(str, sorted(self.failures)))}")
        return error


def _on_all_ranks(group: Group, step: Callable[[], T]) -> list[T]:
    """The results of `step` on all ranks.

    Raises:
        Failed: on every rank, if it has raised on any.
    """
    result: Any = None
    failure: BaseException | None = None
    try:
        result = step()
    except BaseException as error:
        failure = error
    answers = gather_objects((result, failure), group)
    everyone = zip(group.ranks, answers, strict=True)
    if failures := {i: raised_on(x, rank) for i, (rank, (_, x)) in enumerate(everyone) if x is not None}:
        raise Failed(failures) from None
    return [x for x, _ in answers]


# ----------------------------------------------------------------------------------------------------------------------
# The reader loads a checkpoint: places of tensors from the manifest, checksums before data, no pickle that runs code.


Choose = Callable[[dict[str, Any]], dict[str, Piece]]


def load_pieces(directory: Path, group: Group, choose: Choose) -> dict[str, Any]:
    """Fill pieces from a checkpoint; every rank of `group` calls it. Returns the manifest.

    Args:
        directory: of the checkpoint.
        group: the ranks that load.
        choose: takes the manifest and returns the pieces to write into, by name. Their number and ranges may differ
            from the saved ones. It raises if the checkpoint does not fit, before anything is read.
    """
    lock, found, pieces = Lock(), dict[str, Any](), dict[str, Piece]()

    def look() -> None:
        if directory.is_dir():
            lock.acquire(directory, exclusive=False)
        found.update(_manifest.read(directory))
        _check_places(directory, found["tensors"])
        pieces.update(choose(found))

    try:
        _on_all_ranks(group, look)
        _on_all_ranks(group, lambda: _read(directory, found["tensors"], pieces))
    except Failed as error:
        raise error.first() from None
    finally:
        lock.release()
        lock.close()
    return found


def _check_places(directory: Path, tensors: dict[str, Any]) -> None:
    for key, about in tensors.items():
        if not isinstance(getattr(torch, about["dtype"], None), torch.dtype):
            raise damaged(directory / _manifest.NAME, f"torch has no dtype {about['dtype']!r}, which {key} has")
        if not _is_whole(about):
            why = f"the pieces of {key} are not its {torch.Size(about['shape']).numel()} elements"
            raise damaged(directory / _manifest.NAME, why)


def _read(directory: Path, tensors: dict[str, Any], pieces: dict[str, Piece]) -> None:
    for key, piece in pieces.items():
        low, high = piece.offset, piece.offset + piece.data.numel()
        for place in [Place(*place) for place in tensors[key]["chunks"]]:
            begin, end = max(low, place.offset), min(high, place.offset + place.length)
            if begin < end:
                x = _read_piece(directory / place.file, key, place, getattr(torch, tensors[key]["dtype"]))
                piece.data[begin - low : end - low].copy_(x[begin - place.offset : end - place.offset])


def _read_piece(path: Path, key: str, place: Place, dtype: torch.dtype) -> Tensor:
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) < place.at + place.size:
                raise damaged(path, f"it ends after {size} bytes")
            file.seek(place.at)
            content = file.read(place.size)
    except FileNotFoundError:
        why = "it is missing; all ranks must see one file system, and its files must stay together"
        raise damaged(path, why) from None
    if zlib.crc32(content) != place.crc:
        raise damaged(path, f"the checksum of {key} does not fit")
    if not is_plain_archive(io.BytesIO(content)):
        raise damaged(path, f"{key} is no archive of torch.save")
    try:
        x = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:
        # torch's message would advise to load with weights_only=False, which runs code of the file.
        raise damaged(path, f"{key} is something else than numbers; it was not run") from None
    if not isinstance(x, Tensor) or x.dtype != dtype or x.numel() != place.length:
        raise damaged(path, f"{key} is something else than {place.length} numbers of {dtype}")
    return x.reshape(-1)


# ----------------------------------------------------------------------------------------------------------------------
# The writer saves a checkpoint: every rank writes its data file. The first rank writes the manifest, and it alone
# removes files.


# The ends of messages about a save that failed: they say which checkpoint is in place.
IN_PLACE = "the new checkpoint is in place"
AS_IT_WAS = "a checkpoint that was there is as it was"
UNKNOWN = (
    "it cannot be told here whether the new checkpoint is in place or the one that was there; one of them is, whole"
)


class _Checked:
    """A file that `torch.save` writes a piece to: counts the bytes, and computes their checksum."""

    def __init__(self, file: BinaryIO):
        self.file, self.size, self.crc = file, 0, 0
        # torch's archive writer would hide an error of the disk behind one about its own state, so it is kept here.
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            self.file.write(content)
        except OSError as error:
            self.failure = error
            raise
        self.crc = zlib.crc32(content, self.crc)
        self.size += len(content)
        return len(content)

    def flush(self) -> None: ...


class _Writer:
    """Writes data files under new names, and at the end the manifest.

    Only the first rank removes files. Another rank does not know whether the first has put a manifest in place that
    names them; that may happen after the other was interrupted or has lost its connection.

    Attributes:
        old: data files of the old checkpoint; `None` if its manifest cannot be read.
        not_removed: the errors of removing them.
    """

    def __init__(self, directory: Path, group: Group, header: dict[str, Any], lock: Lock):
        self.directory, self.group, self.header, self.lock = directory, group, header, lock
        self.prefix = random_token()  # files of all ranks get that of the first
        self.manifest = ManifestWriter(directory, self.prefix)
        self.old: set[str] | None = None
        self.not_removed: list[OSError] = []

    def prepare(self, pieces: dict[str, Piece]) -> tuple[str, list[tuple[str, int, int]]]:
        """Make room. Return the names of files, and what this rank has: key, offset and length of each piece."""
        make_directory(self.directory)
        if self.group.rank == 0:
            self.lock.acquire(self.directory, exclusive=True)
            old = self.old = _manifest.named_files(self.directory)
            # Files of saves that died take room that this one may need. Where no manifest can be read they stay until
            # there is one: the user may want to recover data from them.
            if self.lock.held and old is not None:
                _manifest.remove_files(self.directory, lambda name: name not in old)
        return self.prefix, [(key, p.offset, p.data.numel()) for key, p in pieces.items() if p.data.numel()]

    def write_data(self, name: str, pieces: dict[str, Piece]) -> dict[str, Place]:
        """Write these pieces into a new file, durably. Return where each is."""
        found: dict[str, Place] = {}
        if not pieces:
            return found
        at = 0
        with create(self.directory / name) as file:
            for key, piece in pieces.items():
                out: Any = _Checked(file)
                data = piece.data.cpu()
                # torch.save would write the whole storage of a view.
                data = data if data.untyped_storage().nbytes() == data.numel() * data.itemsize else data.clone()
                try:
                    torch.save(data, out)
                except RuntimeError:
                    if out.failure is not None:
                        raise out.failure from None
                    raise
                found[key] = Place(piece.offset, data.numel(), name, at, out.size, out.crc)
                at += out.size
            file.flush()
            os.fsync(file.fileno())
        return found

    def finish(self, written: list[dict[str, Place]]) -> None:
        """End the save on the first rank, once all data files are on disk: write and place the manifest."""
        tensors = self._places(written)
        new = {place.file for about in tensors.values() for place in about["chunks"]}
        for name in new:
            if not (self.directory / name).exists():
                why = "it does not see here what another rank has written; all ranks must see one file system"
                raise FileNotFoundError(errno.ENOENT, why, str(self.directory / name))
        self.manifest.write({**self.header, "tensors": tensors})
        self.manifest.place()
        self._remove_old(new)

    def _places(self, written: list[dict[str, Place]]) -> dict[str, Any]:
        """The manifest's entry for each tensor, with the places of its pieces in data files."""
        tensors = {key: {**about, "chunks": []} for key, about in self.header["tensors"].items()}
        if unknown := sorted({key for found in written for key in found} - tensors.keys()):
            rows = [(key, "rank 0 has no such entry") for key in unknown]
            right = "an init that makes all that update will keep, also on ranks that own none of these leaves"
            raise ValueError(bad_leaves("zf.save: ranks have states of several structures", rows, right))
        for found in written:
            for key, place in found.items():
                tensors[key]["chunks"].append(place)
        for about in tensors.values():
            about["chunks"].sort()
        why = "ranks do not have all of its elements, each once"
        if bad := [(key, why) for key, about in tensors.items() if not _is_whole(about)]:
            right = "a state in which each leaf is sharded over ranks, or equal on all of them"
            raise ValueError(bad_leaves("zf.save: ranks have states of several structures", bad, right))
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


def _shares(plans: list[list[tuple[str, int, int]]]) -> list[set[str]]:
    """For each rank the names of the pieces that it writes. If several ranks have one, the rank with least to write."""
    holders: dict[tuple[str, int, int], list[int]] = {}
    for rank, plan in enumerate(plans):
        for piece in plan:
            holders.setdefault(piece, []).append(rank)
    sizes, shares = [0] * len(plans), [set[str]() for _ in plans]
    for (key, _, length), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        rank = min(ranks, key=sizes.__getitem__)
        sizes[rank] += length
        shares[rank].add(key)
    return shares


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
    writer = _Writer(directory, group, header, lock)
    finishing = False

    def write(name: str, mine: set[str]) -> dict[str, Place]:
        written = writer.write_data(name, {key: pieces[key] for key in pieces if key in mine})
        check()
        return written

    def finish(written: list[dict[str, Place]]) -> None:
        try:
            writer.finish(written)
        except BaseException as error:
            # The other ranks receive the error with its notes.
            error.add_note(writer.outcome())
            raise

    try:
        prefixes, plans = zip(*_on_all_ranks(group, lambda: writer.prepare(pieces)), strict=True)
        mine = _shares(list(plans))[group.rank]
        written = _on_all_ranks(group, lambda: write(f"{prefixes[0]}_{group.rank}_0.distcp", mine))
        finishing = True
        _on_all_ranks(group, lambda: finish(written) if group.rank == 0 else None)
    except BaseException as error:
        cause = error.first() if isinstance(error, Failed) else error
        # Before the last step the first rank has no manifest to put in place. A rank that was interrupted, or has lost
        # its connection, does not know how far the first rank has come.
        early = isinstance(error, Failed) and not finishing
        outcome = writer.outcome() if group.rank == 0 else AS_IT_WAS if early else UNKNOWN
        if not any(note in (IN_PLACE, AS_IT_WAS, UNKNOWN) for note in getattr(cause, "__notes__", [])):
            cause.add_note(outcome)
        if cause is error:
            raise
        raise cause from None
    finally:
        lock.release()
        lock.close()
    if writer.not_removed:
        warnings.warn(
            f"zf.save({str(directory)!r}): {IN_PLACE}, but files of an older one are still there, which the next save "
            f"tries again to remove: {writer.not_removed[0]}",
            stacklevel=users_line(),
        )
