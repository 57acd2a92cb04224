"""Saves that fail at a certain place: after they have taken effect, on a rank that dies, in a directory of others."""

import builtins
import errno
import io
import multiprocessing
import os
import signal
import socket
import stat
import time
import uuid
from pathlib import Path

import pytest
import torch
from time_limits import limit

import zerofn as zf
from zerofn.storage import files as _lock  # inside: its locks and files are looked at and broken
from zerofn.storage import files as _manifest  # inside: its locks and files are looked at and broken
from zerofn.storage import pieces as writing  # inside: a save is stopped while it writes

TX = zf.adamw(1e-2)
IN_PLACE, AS_IT_WAS = "the new checkpoint is in place", "a checkpoint that was there is as it was"


def state(value, tx=TX):
    return zf.init(tx, {"a": torch.full((50, 4), float(value)), "b": torch.full((3,), float(value))})


def value_in(directory):
    """The number that is saved there, whole."""
    loaded = zf.load(directory, like=state(-1))
    (value,) = {float(x) for leaf in loaded.params.values() for x in leaf.unique()}
    return value


def files(directory):
    return sorted(p.name for p in Path(directory).iterdir())


def notes(error):
    return [*getattr(error.value, "__notes__", []), str(error.value)]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """With 1 saved in it."""
    monkeypatch.setattr(_lock, "PATIENCE", 1.0)
    zf.save(tmp_path / "checkpoint", state(1))
    return tmp_path / "checkpoint"


def raising(error):
    """A function that does nothing but raise."""

    def call(*args, **kwargs):
        raise error

    return call


def full_disk():
    return raising(OSError(errno.ENOSPC, "No space left on device"))


# ------------------------------------------------------------------- at, and after, the commit of a save


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError(), OSError(errno.EIO, "I/O error")])
def test_an_error_as_the_table_is_replaced(directory, monkeypatch, error):
    """The system has done it, and Python does not know yet."""
    real = os.replace

    def replace(*args):
        real(*args)
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(type(error)) as seen:
        zf.save(directory, state(2))
    assert any(IN_PLACE in note for note in notes(seen)) and not any(AS_IT_WAS in note for note in notes(seen))
    monkeypatch.undo()
    assert value_in(directory) == 2
    zf.save(directory, state(3))
    assert value_in(directory) == 3 and len(files(directory)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "I/O error")])
def test_an_error_instead_of_replacing_the_table(directory, monkeypatch, error):
    before = files(directory)
    monkeypatch.setattr(os, "replace", raising(error))
    with pytest.raises(type(error)) as seen:
        zf.save(directory, state(2))
    assert any(AS_IT_WAS in note for note in notes(seen)) and not any(IN_PLACE in note for note in notes(seen))
    monkeypatch.undo()
    assert value_in(directory) == 1 and files(directory) == before


def test_an_interrupt_while_old_files_are_removed(directory, monkeypatch):
    monkeypatch.setattr(os, "unlink", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as seen:
        zf.save(directory, state(2))
    assert notes(seen)[0] == IN_PLACE
    monkeypatch.undo()
    assert value_in(directory) == 2
    zf.save(directory, state(3))
    assert len(files(directory)) == 2


def test_old_files_that_cannot_be_removed(directory, monkeypatch):
    old = set(files(directory))
    real = os.unlink

    def unlink(path, *args, **kwargs):
        if Path(path).name in old:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.warns(UserWarning, match=rf"{IN_PLACE}, but files of an older one are still there[\s\S]*not permitted"):
        zf.save(directory, state(2))
    assert value_in(directory) == 2 and len(files(directory)) == 3
    monkeypatch.undo()
    zf.save(directory, state(3))
    assert value_in(directory) == 3 and len(files(directory)) == 2


def test_a_directory_that_may_not_be_durable(directory, monkeypatch):
    """Once the table is replaced, but the disk does not confirm it: the old files are kept, whichever it will be."""
    syncs, real = [], os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            syncs.append(handle)
            if len(syncs) == fails:
                raise OSError(errno.EIO, "Input/output error")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    fails = 2  # the first comes before the table is replaced
    old = set(files(directory))
    with pytest.warns(UserWarning, match="Input/output error"):
        zf.save(directory, state(2))
    assert value_in(directory) == 2 and old <= set(files(directory))
    fails = 3
    with pytest.raises(OSError, match=AS_IT_WAS):
        zf.save(directory, state(3))
    assert value_in(directory) == 2


def after_the_commit(directory):
    """Of two ranks one loses the other, or is interrupted, once the first has put the new table in its place."""
    zf.save(directory, state(1, zf.chain(zf.shard(), TX)))
    rank, new = zf.collectives.world_group("test").rank, state(2, zf.chain(zf.shard(), TX))
    real, calls = writing.gather_objects, []

    def gather_objects(mine, group):
        out = real(mine, group)
        calls.append(mine)
        if len(calls) == 3:
            raise RuntimeError("Connection closed by peer") if rank == 0 else KeyboardInterrupt
        return out

    writing.gather_objects = gather_objects
    try:
        zf.save(directory, new)
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error).__name__, error.__notes__
    finally:
        writing.gather_objects = real


def told_late(directory):
    """The first rank is interrupted after the commit, and the other is told of the interrupt alone."""
    tx = zf.chain(zf.shard(), TX)
    zf.save(directory, state(1, tx))
    real = writing._Writer.finish

    def interrupted(writer, written):
        real(writer, written)
        raise KeyboardInterrupt

    writing._Writer.finish = interrupted
    try:
        zf.save(directory, state(2, tx))
    except KeyboardInterrupt as error:
        return error.__notes__
    finally:
        writing._Writer.finish = real


def elsewhere(directory):
    """Ranks that see other file systems."""
    tx = zf.chain(zf.shard(), TX)
    zf.save(directory, state(1, tx))
    mine = directory if zf.collectives.world_group("test").rank == 0 else directory + "/node"
    try:
        zf.save(mine, state(2, tx))
    except OSError as error:
        return str(error)


def two_ranks(root):
    return elsewhere(root + "/elsewhere"), told_late(root + "/late"), after_the_commit(root + "/lost")


def test_two_ranks(tmp_path):
    (one, other), late, (first, second) = zip(*zf.launch(two_ranks, 2, str(tmp_path), timeout=limit()), strict=True)
    assert first == ("RuntimeError", [IN_PLACE])
    kind, said = second
    assert kind == "KeyboardInterrupt" and "it cannot be told here" in said[0]
    assert value_in(tmp_path / "lost") == 2
    for text in (one, other):
        assert "all ranks must see one file system" in text and AS_IT_WAS in text
    assert value_in(tmp_path / "elsewhere") == 1
    assert value_in(tmp_path / "late") == 2
    assert IN_PLACE in late[0] and AS_IT_WAS not in [*late[0], *late[1]]


# ----------------------------------------------------------------------------------------------- locks


def test_a_read_only_file_system(directory, monkeypatch):
    """Nothing can be made or removed; the next load in this process does not wait for the save that failed."""
    frozen = raising(OSError(errno.EROFS, "Read-only file system"))
    # Path.open and open are one function under two names.
    for module, real in ((builtins, builtins.open), (io, io.open)):

        def read_only(path, mode="r", *args, real=real, **kwargs):
            return (real if mode in ("r", "rb") else frozen)(path, mode, *args, **kwargs)

        monkeypatch.setattr(module, "open", read_only)
    monkeypatch.setattr(os, "unlink", frozen)
    with pytest.raises(OSError, match=AS_IT_WAS) as seen:
        zf.save(directory, state(2))
    assert seen.value.errno == errno.EROFS
    assert value_in(directory) == 1


def test_an_interrupt_of_the_cleaning_up(directory, monkeypatch):
    """Ctrl-C twice: the second while the first is seen to. The errors are kept, as an interactive session does."""
    monkeypatch.setattr(os, "fsync", raising(KeyboardInterrupt()))
    monkeypatch.setattr(os, "unlink", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        zf.save(directory, state(2))
    monkeypatch.undo()
    monkeypatch.setattr(_lock, "PATIENCE", 1.0)
    assert value_in(directory) == 1
    zf.save(directory, state(3))
    assert len(files(directory)) == 2


@pytest.mark.parametrize("where", ["table", "piece"])
def test_an_interrupt_of_a_load(directory, monkeypatch, where):
    """As the table is read, and in the midst of a piece; a save that comes next in this process does not wait."""
    if where == "table":
        monkeypatch.setattr(_manifest, "read", raising(KeyboardInterrupt()))
    else:
        monkeypatch.setattr(torch, "load", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as kept:
        zf.load(directory, like=state(1))
    monkeypatch.undo()
    monkeypatch.setattr(_lock, "PATIENCE", 1.0)
    zf.save(directory, state(2))
    assert value_in(directory) == 2 and kept.tb is not None


def test_a_lock_that_a_fork_has_too(tmp_path):
    """Such as the worker of a data loader that was started while a save was under way."""
    lock, again = _lock.Lock(), _lock.Lock()
    lock.acquire(tmp_path, exclusive=True)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10_000,))
    worker.start()
    lock.release()
    lock.close()
    again.acquire(tmp_path, exclusive=True, patience=0)
    assert again.held
    again.release()
    again.close()
    worker.kill()
    worker.join(limit(10))


def test_who_holds_a_lock_is_not_told_for_another(directory):
    lock = _lock.Lock()
    lock.acquire(directory, exclusive=True)
    with pytest.raises(TimeoutError, match="of this process or of another one") as seen:
        zf.load(directory, like=state(1))
    lock.release()
    lock.close()
    assert "free space" not in str(seen.value)


# --------------------------------------------------------------------- what is there under the names


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "socket", "directory"])
@pytest.mark.parametrize("name", ["zerofn.json", "data"])
def test_no_file(directory, monkeypatch, what, name):
    path = next(directory.glob("*.distcp")) if name == "data" else directory / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as s:
            monkeypatch.chdir(directory)  # a name of a socket is short
            s.bind(path.name)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged[\s\S]*no regular file"):
        zf.load(directory, like=state(1))
    if what == "directory" and name == "zerofn.json":
        with pytest.raises(OSError, match=AS_IT_WAS):
            zf.save(directory, state(2))
        assert path.is_dir() and len(files(directory)) == 2
    else:
        zf.save(directory, state(2))
        assert value_in(directory) == 2


def test_links_to_files_are_read(directory, tmp_path):
    """As a cache of downloads keeps them. A save replaces the links and leaves what they point to."""
    blobs, links = tmp_path / "blobs", tmp_path / "links"
    directory.rename(blobs)
    links.mkdir()
    for name in files(blobs):
        (links / name).symlink_to(blobs / name)
    assert value_in(links) == 1
    zf.save(links, state(2))
    assert value_in(links) == 2 and value_in(blobs) == 1
    assert len(files(links)) == 2


def plant(path, what):
    """A link or a pipe in the place of a file that is to be written; what the link points to."""
    mine = path.parent.parent / "mine"
    mine.write_text("precious")
    if what == "link":
        path.symlink_to(mine)
    else:
        os.mkfifo(path)
    return mine


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["link", "pipe"])
@pytest.mark.parametrize("name", ["zerofn.json.tmp", "zerofn.json.000000000000.tmp", "000000000000_0_0.distcp"])
def test_names_that_are_taken(directory, monkeypatch, what, name):
    """Whoever plants something under the name of a new file makes the save fail at most; nobody waits."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    monkeypatch.setattr(_manifest, "remove_files", lambda *args: [])  # which would take it for a leftover
    mine = plant(directory / name, what)
    if name == "zerofn.json.tmp":
        zf.save(directory, state(2))
        assert value_in(directory) == 2
    else:
        with pytest.raises(FileExistsError, match=AS_IT_WAS):
            zf.save(directory, state(2))
        assert value_in(directory) == 1
    assert mine.read_text() == "precious"


def test_a_number_that_is_drawn_twice(directory, monkeypatch):
    """What is there is not taken for what the save that failed has made."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    zf.save(directory, state(2))
    with pytest.raises(FileExistsError, match=AS_IT_WAS):
        zf.save(directory, state(3))
    assert value_in(directory) == 2


# ------------------------------------------------------------------------ what saves that died have left

LEFT = ["0123456789ab_0_0.distcp", "0123456789ab_1_0.distcp", "zerofn.json.0123456789ab.tmp", "zerofn.json.tmp"]
FOREIGN = ["0123456789ab_0_0.distcp.bak", "x_0_0.distcp", "zerofn.json.bak", "notes.tmp", "0123456789AB_0_0.distcp"]


def test_leftovers_go_before_anything_is_written(directory, monkeypatch):
    """They take room that the save needs."""
    there = set(files(directory))
    for name in LEFT + FOREIGN:
        (directory / name).write_text("x")
    monkeypatch.setattr(os, "fsync", full_disk())
    with pytest.raises(OSError, match="No space left"):
        zf.save(directory, state(2))
    monkeypatch.undo()
    assert value_in(directory) == 1
    assert set(files(directory)) == there | set(FOREIGN)
    zf.save(directory, state(2))
    assert len(files(directory)) == 2 + len(FOREIGN) and set(FOREIGN) <= set(files(directory))


def test_nothing_is_removed_beside_a_table_that_cannot_be_read(directory, monkeypatch):
    """Somebody may want to save what can be saved; once there is a new checkpoint it is replaced."""
    (directory / "zerofn.json").write_text("{")
    before = files(directory)
    monkeypatch.setattr(os, "fsync", full_disk())
    with pytest.raises(OSError, match="No space left"):
        zf.save(directory, state(2))
    monkeypatch.undo()
    assert files(directory) == before
    zf.save(directory, state(2))
    assert value_in(directory) == 2 and len(files(directory)) == 2


def test_without_locks_only_what_the_old_table_named_is_removed(directory, monkeypatch):
    """Other files may be those of another save that is under way."""
    import fcntl

    def no_lock(*args):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    old = next(directory.glob("*.distcp")).name
    (directory / LEFT[0]).write_text("x")
    monkeypatch.setattr(fcntl, "flock", no_lock)
    zf.save(directory, state(2))
    assert value_in(directory) == 2
    assert LEFT[0] in files(directory) and old not in files(directory) and len(files(directory)) == 3


# ------------------------------------------------------------------------------------- one exported file


def in_file(path):
    from safetensors.torch import load_file

    (value,) = {float(x) for leaf in load_file(path).values() for x in leaf.unique()}
    return value


def export_and_die(path):
    """Killed when the file is written, and not yet in its place."""
    os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    zf.export_safetensors(path, state(2))


def test_what_a_killed_export_has_left(tmp_path):
    path = tmp_path / "x.safetensors"
    zf.export_safetensors(path, state(1))
    process = multiprocessing.get_context("fork").Process(target=export_and_die, args=(path,))
    process.start()
    process.join(limit(30))
    assert process.exitcode == -signal.SIGKILL
    assert in_file(path) == 1 and len(files(tmp_path)) == 2
    zf.export_safetensors(path, state(3))
    # What the killed process has left may as well be what another one writes.
    assert in_file(path) == 3 and len(files(tmp_path)) == 2


@pytest.mark.timeout(60)
def test_an_export_follows_no_link(tmp_path):
    mine, path = tmp_path / "mine", tmp_path / "x.safetensors"
    mine.write_text("precious")
    for name in ("x.safetensors", "x.safetensors.tmp"):
        (tmp_path / name).symlink_to(mine)
    zf.export_safetensors(path, state(1))
    assert mine.read_text() == "precious" and in_file(path) == 1 and not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    zf.export_safetensors(path, state(2))
    assert in_file(path) == 2


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_an_export(tmp_path, mask):
    """What the user's mask for new files says, and not what the library that writes it would like."""
    before = os.umask(mask)
    try:
        zf.export_safetensors(tmp_path / "x", state(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask


def test_an_export_that_is_interrupted(tmp_path, monkeypatch):
    path = tmp_path / "x"
    zf.export_safetensors(path, state(1))
    monkeypatch.setattr(os, "replace", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        zf.export_safetensors(path, state(2))
    monkeypatch.undo()
    assert in_file(path) == 1 and files(tmp_path) == ["x"]
    monkeypatch.setattr(os, "fsync", full_disk())
    with pytest.raises(OSError, match="No space left"):
        zf.export_safetensors(path, state(2))
    assert in_file(path) == 1 and files(tmp_path) == ["x"]
