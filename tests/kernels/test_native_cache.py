"""Where built kernels lie, and which are never loaded."""

import os
import shutil
import stat
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from compilers import REAL, build, calls, copier, kept
from steps_of_low_precision import update
from test_kernels import needs_compiler, state

from zerofn.kernels import native as _native_cache  # inside: how kernels are built, loaded and kept

# ---- what is never loaded ----


def cut(share):
    return lambda file, whole: file.write_bytes(whole[: int(len(whole) * share)])


def zeros(file, whole):
    file.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))


def one_bit(file, whole):
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])


def link(file, whole):
    other = file.parent.parent / "elsewhere.so"
    other.write_bytes(whole)
    file.symlink_to(other)


def open_to(mode):
    def write(file, whole):
        file.write_bytes(whole)
        file.chmod(mode)

    return write


def of_another_user(file, whole):
    file.write_bytes(whole)
    if os.getuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(file, 12345, 12345)


def pipe(file, whole):
    os.mkfifo(file)


DAMAGE = {
    **{f"cut to {share:.0%}": cut(share) for share in (0.0, 0.2, 0.4, 0.6, 0.8)},
    "a tail of zeros": zeros,
    "one bit": one_bit,
    "a link": link,
    "the group may write": open_to(0o720),
    "others may write": open_to(0o702),
    "another user's": of_another_user,
    "a pipe": pipe,
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_or_others_is_built_again_without_a_word(fresh_kernels, damage):
    command = copier(fresh_kernels)
    build(command)
    (library,) = kept(fresh_kernels)
    assert calls(fresh_kernels) == 1 and stat.S_IMODE(library.stat().st_mode) == 0o700
    build(command)
    assert calls(fresh_kernels) == 1  # it is used as long as it is as it was
    whole = library.read_bytes()
    library.unlink()  # it is mapped into this process: another file, under the same name
    DAMAGE[damage](library, whole)
    assert build(command).zerofn_squares
    assert calls(fresh_kernels) == 2
    (again,) = kept(fresh_kernels)
    assert again == library and again.read_bytes() == whole and not again.is_symlink()


@needs_compiler
def test_a_whole_library_that_does_not_load_is_built_once_more(fresh_kernels):
    """One of another system, in a home directory that both have."""
    command = copier(fresh_kernels)
    build(command)
    (library,) = kept(fresh_kernels)
    text = b"of another system"
    library.rename(library.with_name(library.name.rpartition("-")[0] + f"-{_native_cache._checksum(text)}.so"))
    (foreign,) = kept(fresh_kernels)
    foreign.unlink()
    foreign.write_bytes(text)
    foreign.chmod(0o700)
    assert build(command) and kept(fresh_kernels) == [library] and calls(fresh_kernels) == 2


@needs_compiler
def test_what_builds_have_left_that_were_killed(fresh_kernels):
    where = _native_cache.directory()
    old, new = where / "building-old.so", where / "building-new.so"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    build(copier(fresh_kernels))
    assert not old.exists() and new.exists()


# ---- where it lies ----


@pytest.fixture
def places(fresh_kernels, monkeypatch):
    """A home, a temporary directory and a working directory of their own."""
    for name in ("home", "temporary", "here"):
        (fresh_kernels / name).mkdir()
    monkeypatch.setenv("HOME", str(fresh_kernels / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(tempfile, "tempdir", str(fresh_kernels / "temporary"))
    monkeypatch.chdir(fresh_kernels / "here")
    yield fresh_kernels
    assert not list((fresh_kernels / "here").iterdir()), "something lies below the working directory"


def of_our_own(places):
    return places / "temporary" / f"zerofn-{os.getuid()}" / "kernels"


def test_in_the_cache_of_the_home_directory(places, monkeypatch):
    found = _native_cache.directory()
    assert found == places / "home" / ".cache" / "zerofn" / "kernels"
    assert stat.S_IMODE(found.stat().st_mode) == stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    assert _native_cache.directory() == places / "xdg" / "zerofn" / "kernels"


@pytest.mark.parametrize("relative", ["cache", "./cache", "~/cache"])
def test_a_relative_cache_home_is_ignored(places, monkeypatch, relative):
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    assert _native_cache.directory() == places / "home" / ".cache" / "zerofn" / "kernels"


@pytest.mark.parametrize("home", ["", "relative", "a file", "nobody's"])
def test_without_a_home_that_can_be_written(places, monkeypatch, home):
    (places / "a file").write_text("")
    monkeypatch.setenv("HOME", str(places / "a file") if home == "a file" else home)
    if home == "nobody's":  # a user without an entry, as containers have them
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert _native_cache.directory() == of_our_own(places)
    assert stat.S_IMODE(of_our_own(places).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("begun", [False, True])
def test_a_home_that_may_be_read_only(begun):
    """In a process that is not root's, which writes where it likes."""
    user = os.getuid() or 12345
    top = Path(tempfile.mkdtemp(prefix="zerofn-read-only-"))
    try:
        kernels = top / "home" / ".cache" / "zerofn" / "kernels"
        (kernels if begun else top / "home").mkdir(parents=True)
        (top / "temporary").mkdir()
        for place in (top, *top.rglob("*")):
            os.chown(place, user, -1)
            place.chmod(0o500 if "home" in place.parts else 0o700)
        result = top / "temporary" / "result"
        with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 12) else nullcontext():
            child = os.fork()  # of threads of torch's it has none, and needs none
        if not child:
            try:
                os.setuid(user)
                os.environ["HOME"], tempfile.tempdir = str(top / "home"), str(top / "temporary")
                os.environ.pop("XDG_CACHE_HOME", None)
                result.write_text(str(_native_cache.directory()))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert result.read_text() == str(top / "temporary" / f"zerofn-{user}" / "kernels")
    finally:
        for place in (top, *top.rglob("*")):
            place.chmod(0o700)
        shutil.rmtree(top)


def test_never_where_others_can_write(places, monkeypatch):
    base = places / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    usual = base / "zerofn" / "kernels"
    assert _native_cache.directory() == usual
    for place, mode, sound in [
        (usual, 0o777, False),
        (usual, 0o770, False),
        (usual, 0o1777, False),  # ours or not, all could put files there
        (usual, 0o755, True),
        (usual.parent, 0o777, False),
        (usual.parent, 0o1777, False),
        (usual.parent, 0o755, True),
    ]:
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)
        assert (_native_cache.directory() == usual) == sound, (place, oct(mode))
        assert sound or _native_cache.directory() == of_our_own(places)
        place.chmod(before)
    if os.getuid() == 0:
        for place in (usual, usual.parent):
            os.chown(place, 12345, 12345)
            assert _native_cache.directory() == of_our_own(places)
            os.chown(place, 0, 0)
        # Planted beforehand: a link of another user's, to a directory that is ours.
        shutil.rmtree(usual.parent)
        (places / "home" / "target").mkdir()
        usual.parent.symlink_to(places / "home" / "target")
        os.chown(usual.parent, 12345, 12345, follow_symlinks=False)
        assert _native_cache.directory() == of_our_own(places)
        assert not list((places / "home" / "target").iterdir())


def test_where_there_is_no_such_place_eager_runs(places, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "open"))
    for name in ("open/zerofn", f"temporary/zerofn-{os.getuid()}"):
        (places / name).mkdir(parents=True)
        (places / name).chmod(0o777)
    lists = state(70_000)
    if REAL is not None:
        with pytest.warns(
            RuntimeWarning, match="no directory for built kernels .* tried .*eager torch.*Let XDG_CACHE_HOME"
        ):
            update(lists)
    assert not [x for x in places.rglob("*.so") if x.name != "built"]
