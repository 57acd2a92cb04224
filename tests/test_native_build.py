"""Building the C kernels: which compiler, how long it may take, where the result lies, and what is never loaded."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from test_kernels import assert_same_bits, needs_compiler, state, update
from time_limits import limit

from zerofn import _native, _native_cache, _native_compiler
from zerofn._kernels import implementation_for

BF16 = torch.bfloat16
REAL = _native_compiler.of_system(os.environ.get("PATH"))


def script(where, text, name="compiler"):
    """A compiler of our own."""
    file = where / name
    file.write_text("#!/bin/sh\n" + text + "\n")
    file.chmod(0o755)
    return str(file)


def copier(where):
    """A compiler that builds by copying, at once, and counts its calls."""
    library = where / "built"
    if not library.exists():
        defines = [f"-DZF_{name}=f32" for name in "PGMV"] + ["-DZF_MODE=0", "-DZF_STRIDE=1u"]
        _native_compiler.compile_to(REAL, _native._SOURCE, defines, str(library))
    return script(where, f'echo . >> {where}/calls\nfor last; do :; done\ncp {library} "$last"')


def calls(where):
    return len((where / "calls").read_text().split()) if (where / "calls").exists() else 0


def build(command):
    _native._build.cache_clear()
    return _native._build((command,), (torch.float32,) * 4, 0, 2)


def kept(where):
    return sorted((where / "cache" / "zerofn" / "kernels").iterdir())


# ---- which compiler ----


@pytest.mark.parametrize("kind", ["missing", "broken", "fuses products with sums"])
def test_without_a_usable_compiler_eager_runs_after_one_warning(fresh_kernels, monkeypatch, kind):
    expected = state(3000)
    update(expected, implementation="eager")
    monkeypatch.setenv("PATH", str(fresh_kernels))
    if kind == "missing":
        message = "no C compiler was found.*Install gcc"
    elif kind == "broken":
        script(fresh_kernels, "echo stdlib.h not found >&2; exit 1", "cc")
        message = "builds no kernel.*stdlib.h not found.*Install gcc"
    else:
        if REAL is None or "x86" not in _native_compiler.processor():
            pytest.skip("needs a compiler and a processor that can fuse products with sums")
        # Not -ffast-math: a library linked with it makes the whole process flush subnormals to zero.
        text = f'PATH={os.path.dirname(REAL[0])} exec {REAL[0]} "$@" -ffp-contract=fast'
        monkeypatch.setenv("CC", script(fresh_kernels, text))
        message = "gives other bits"
    actual = state(3000)
    with pytest.warns(RuntimeWarning, match=message):
        update(actual)
    assert_same_bits(actual, expected)
    update(actual, step=2)  # warnings are errors in these tests
    if kind != "fuses products with sums":
        assert implementation_for(actual[0]) == "eager"


@needs_compiler
@pytest.mark.parametrize(
    ("cc", "why"),
    [
        ("no-such-compiler -O1", "is not found"),
        ('"', "is not found"),
        ("false", "builds no kernel.*false failed on _native.c: exit status 1"),
        ("true", "builds no kernel.*too short"),
    ],
)
def test_a_bad_cc_is_said_and_the_compiler_of_the_system_used(fresh_kernels, monkeypatch, cc, why):
    monkeypatch.setenv("CC", cc)
    with pytest.warns(RuntimeWarning, match=rf"\$CC is .*{why}.*; {REAL[0]} is used instead. Unset CC"):
        assert _native.compiler() == REAL
    assert implementation_for(state(3)[0]) == "native"  # and no second warning


def test_a_bad_cc_and_no_other(fresh_kernels, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh_kernels))
    monkeypatch.setenv("CC", "nothing")
    with pytest.warns(RuntimeWarning, match="CC is 'nothing', which is not found; no C compiler.*eager torch"):
        assert _native.compiler() is None


@needs_compiler
def test_a_cc_with_arguments_is_taken_as_make_takes_it(fresh_kernels, monkeypatch):
    wrapper = script(fresh_kernels, f'echo "$@" >> {fresh_kernels}/log; exec "$@"', "ccache")
    monkeypatch.setenv("CC", f"{wrapper} {REAL[0]} -O1")
    assert _native.compiler() == (wrapper, REAL[0], "-O1")
    line = (fresh_kernels / "log").read_text().splitlines()[0]
    assert line.startswith(f"{REAL[0]} -O1 -O3 ")
    spaced = fresh_kernels / "with space"
    spaced.mkdir()
    own = script(spaced, f'exec {REAL[0]} "$@"')
    monkeypatch.setenv("CC", own)
    assert _native.compiler() == (own,)
    # Another compiler, another library; the programs among the words count as well.
    path = os.environ["PATH"]
    first = _native_compiler.identity((wrapper, own), path)
    script(spaced, f'exec {REAL[0]} "$@" ')
    assert _native_compiler.identity((wrapper, own), path) != first


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "False", " OFF "])
def test_no_compiler_is_run_where_that_is_asked_for(fresh_kernels, monkeypatch, value):
    monkeypatch.setenv("ZEROFN_NATIVE", value)
    assert implementation_for(state(3)[0]) == "eager"
    update(state(3))
    assert not (fresh_kernels / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "True", ""])
def test_it_is_run_where_that_is_asked_for(fresh_kernels, monkeypatch, value):
    monkeypatch.setenv("ZEROFN_NATIVE", value)
    monkeypatch.setenv("CC", copier(fresh_kernels))
    assert implementation_for(state(3)[0]) == "native"


@pytest.mark.parametrize("value", ["2", "nein", "disable"])
def test_anything_else_is_an_error(fresh_kernels, monkeypatch, value):
    monkeypatch.setenv("ZEROFN_NATIVE", value)
    lists = state(3)
    before = lists[0][0].clone()
    with pytest.raises(ValueError, match=f"(?s)ZEROFN_NATIVE='{value}'.*1, true, yes, on; .*0, false, no, off.*write:"):
        update(lists)
    assert lists[0][0].equal(before)


# ---- how long ----


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(fresh_kernels, monkeypatch):
    monkeypatch.setattr(_native_compiler, "LIMIT", 1.0)
    hang = f"sleep 10000 & echo $! > {fresh_kernels}/pid; wait"
    with monkeypatch.context() as only:
        # By its whole path: with nothing else in PATH there is no compiler of the system to turn to.
        only.setenv("CC", script(fresh_kernels, f"PATH={os.environ['PATH']}; {hang}"))
        only.setenv("PATH", str(fresh_kernels / "empty"))
        begin = time.monotonic()
        with pytest.warns(RuntimeWarning, match="had not ended after 1 s.*no C compiler was found.*eager torch"):
            update(state(3))
        assert time.monotonic() - begin < limit(10)
        update(state(3))  # no second warning, no second wait
    child = int((fresh_kernels / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the compiler had started is still there")
    assert kept(fresh_kernels) == []


@needs_compiler
def test_what_outlives_the_compiler_on_purpose_is_not_waited_for(fresh_kernels):
    """As the server of a compiler cache does, with the outputs that it was given."""
    server = script(
        fresh_kernels, f'sleep 10000 & echo $! > {fresh_kernels}/pid; exec {copier(fresh_kernels)} "$@"', "x"
    )
    begin = time.monotonic()
    try:
        assert build(server)
        assert time.monotonic() - begin < limit(10)
    finally:
        os.kill(int((fresh_kernels / "pid").read_text()), 9)


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


def written_by_others(file, whole):
    file.write_bytes(whole)
    file.chmod(0o722)


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
    "writable by others": written_by_others,
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
    assert build(command).zerofn_adam
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
def test_it_is_on_disk_before_it_has_its_name(fresh_kernels, monkeypatch):
    seen = []
    fsync, replace = os.fsync, os.replace

    def note(descriptor):
        seen.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("name"), replace(a, b)))
    build(copier(fresh_kernels))
    assert seen == ["file", "name", "directory"]


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


@pytest.mark.skipif(os.getuid() == 0, reason="root writes where it likes")
def test_a_home_that_may_be_read_only(places):
    (places / "home").chmod(0o555)
    assert _native_cache.directory() == of_our_own(places)


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
        (usual.parent, 0o1777, True),  # nobody else can rename what is ours
        (base, 0o777, False),
        (base, 0o1777, True),
        (base, 0o775, True),  # a group, which in many systems has one member
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
    for name in ("open", "temporary"):
        (places / name).mkdir(exist_ok=True)
        (places / name).chmod(0o777)
    lists = state(3)
    if REAL is not None:
        with pytest.warns(RuntimeWarning, match="no directory in which only this user can write: tried .*eager torch"):
            update(lists)
    assert not [x for x in places.rglob("*.so") if x.name != "built"]


@needs_compiler
def test_processes_may_build_at_the_same_time(fresh_kernels):
    program = """
import torch
from zerofn._kernels import adam_
from zerofn._rounding import leaf_key
p, g, m, v = (torch.linspace(0.5, 2, 999).bfloat16() for _ in range(4))
adam_([p], [g], [m], [v], step=1, lr=0.1, keys=[leaf_key("w")], offsets=[0], implementation="native")
print(leaf_key("w"), p.double().sum().item(), v.double().sum().item())
"""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = [subprocess.Popen([sys.executable, "-W", "error", "-c", program], **options) for _ in range(2)]
    results = [run.communicate(timeout=limit()) for run in runs]
    assert all(run.returncode == 0 for run in runs), results
    assert results[0][0] == results[1][0] != ""
    names = sorted(path.name for path in (fresh_kernels / "cache" / "zerofn" / "kernels").iterdir())
    assert len(names) == 2 and all(name.startswith("adam-") for name in names), names
