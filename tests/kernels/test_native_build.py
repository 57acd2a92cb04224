"""Building the C kernels: which compiler, how long it may take, and many at once."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from compilers import REAL, build, calls, copier, gone, kept, script
from steps_of_low_precision import update
from test_kernels import assert_same_bits, needs_compiler, state
from time_limits import limit

from zerofn.kernels import native as _native  # inside: how kernels are built, loaded and kept
from zerofn.kernels import native as _native_compiler  # inside: how kernels are built, loaded and kept
from zerofn.kernels import program  # inside: which kernel is taken

BF16 = torch.bfloat16


def taken():
    """What computes programs on a CPU."""
    return program.printer_for(torch.device("cpu")).__name__.rpartition(".")[2]


# ---- which compiler ----


@pytest.mark.parametrize("kind", ["missing", "broken", "fuses products with sums"])
def test_without_a_usable_compiler_eager_runs_after_one_warning(fresh_kernels, monkeypatch, kind):
    expected = state(70_000)
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
    actual = state(70_000)
    with pytest.warns(RuntimeWarning, match=message):
        update(actual)
    assert_same_bits(actual, expected)
    update(actual, step=2)  # warnings are errors in these tests
    if kind != "fuses products with sums":
        assert taken() == "print_torch"


@needs_compiler
@pytest.mark.parametrize(
    ("cc", "why"),
    [
        ("no-such-compiler -O1", "names no program that can be run"),
        *(pytest.param(cc, "names no program that can be run", marks=pytest.mark.slow) for cc in ('"', "/")),
        ("false", "builds no kernel.*false failed on squares.c: exit status 1"),
        ("true", "builds no kernel.*too short"),
    ],
)
def test_a_bad_cc_is_said_and_the_compiler_of_the_system_used(fresh_kernels, monkeypatch, cc, why):
    monkeypatch.setenv("CC", cc)
    with pytest.warns(RuntimeWarning, match=rf"\$CC is .*{why}.*; {REAL[0]} is used instead. Unset CC"):
        assert _native.compiler() == REAL
    assert taken() == "print_c"  # and no second warning


def test_a_bad_cc_and_no_other(fresh_kernels, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh_kernels))
    monkeypatch.setenv("CC", "nothing")
    with pytest.warns(
        RuntimeWarning, match="CC is 'nothing', which names no program that can be run; no C compiler.*eager torch"
    ):
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
    assert taken() == "print_torch"
    update(state(70_000))
    assert not (fresh_kernels / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "True", "", "require"])
def test_it_is_run_where_that_is_asked_for(fresh_kernels, monkeypatch, value):
    monkeypatch.setenv("ZEROFN_NATIVE", value)
    monkeypatch.setenv("CC", copier(fresh_kernels))
    assert taken() == "print_c"


@pytest.mark.parametrize("value", ["2", "nein", "disable"])
def test_anything_else_is_an_error(fresh_kernels, monkeypatch, value):
    monkeypatch.setenv("ZEROFN_NATIVE", value)
    lists = state(70_000)
    before = lists[0][0].clone()
    with pytest.raises(
        ValueError, match=f"(?s)ZEROFN_NATIVE='{value}'.*1, true, yes, on; .*0, false, no, off;.*require.*write:"
    ):
        update(lists)
    assert lists[0][0].equal(before)


def test_where_kernels_are_required_their_lack_is_an_error(fresh_kernels, monkeypatch):
    """At every call, with the reason, and before anything is written; also where it was only said before."""
    monkeypatch.setenv("PATH", str(fresh_kernels))
    monkeypatch.setenv("CC", "nothing")
    with pytest.warns(RuntimeWarning, match="names no program"):
        assert _native.compiler() is None
    monkeypatch.setenv("ZEROFN_NATIVE", "require")
    lists = state(70_000)
    before = [tensors[0].clone() for tensors in lists]
    message = (
        "(?s)ZEROFN_NATIVE=require, and there is no C kernel.*why: .*'nothing', which names no program.*write: .*gcc"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            update(lists)
        with pytest.raises(RuntimeError, match=message):
            _native.squares(torch.ones(3, dtype=BF16))
    assert all(tensors[0].equal(x) for tensors, x in zip(lists, before, strict=True))


@needs_compiler
@pytest.mark.parametrize("required", [False, True])
def test_a_compiler_that_fails_later(fresh_kernels, monkeypatch, required):
    """One kernel was built; of those after it every one is an error where it is required, and once a warning else."""
    monkeypatch.setenv("ZEROFN_NATIVE", "require" if required else "1")
    whole = copier(fresh_kernels)
    # The first library is of float32, which is what a compiler is tried with.
    monkeypatch.setenv(
        "CC", script(fresh_kernels, f'case "$*" in *ZF_KIND=1*) echo no more; exit 3;; esac; exec {whole} "$@"', "cc")
    )
    x = torch.ones(3, dtype=BF16)
    if not required:
        with pytest.warns(RuntimeWarning, match=r"could not be built or loaded \(.*no more"):
            assert _native.squares(x) is None
        assert _native.squares(x) is None
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)could not be built or loaded .*no more"):
            _native.squares(x)


@pytest.mark.slow
def test_importing_builds_and_reads_nothing(fresh_kernels, monkeypatch):
    monkeypatch.setenv("CC", script(fresh_kernels, f"echo . >> {fresh_kernels}/calls"))
    program = (
        "import zerofn, zerofn.kernels.native as c, zerofn.kernels.native as n;"
        "assert not c.processor.cache_info().misses and not n._choose.cache_info().misses"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert calls(fresh_kernels) == 0 and not (fresh_kernels / "cache").exists()


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
            update(state(70_000))
        assert time.monotonic() - begin < limit(10)
        update(state(70_000))  # no second warning, no second wait
    assert gone(int((fresh_kernels / "pid").read_text())), "what the compiler had started is still there"
    assert kept(fresh_kernels) == []


def test_of_what_a_compiler_says_the_end_is_told(fresh_kernels, monkeypatch):
    talk = "i=0; while [ $i -lt 999 ]; do echo line $i; i=$((i+1)); done; printf '\\377 the end'; exit 1"
    with pytest.raises(OSError, match=r"(?s)failed on squares.c: .*line 998\n.* the end$") as caught:
        build(script(fresh_kernels, talk))
    assert len(str(caught.value)) < 700


@pytest.mark.slow
@needs_compiler
def test_a_process_that_is_killed_while_it_builds_leaves_nothing_that_is_loaded(fresh_kernels):
    """Half a library is there, the compiler still runs, and the next process builds its own."""
    half = f'for last; do :; done; head -c 9000 {fresh_kernels}/built > "$last"; echo $$ > {fresh_kernels}/pid'
    whole = copier(fresh_kernels)
    slow = script(
        fresh_kernels, f'if [ -e {fresh_kernels}/again ]; then exec {whole} "$@"; fi; {half}; exec sleep 10000', "slow"
    )
    program = (
        "import zerofn.kernels.native as n; print(n.compiler()); import torch; assert n.squares(torch.ones(3)) == 3"
    )
    first = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "CC": slow})
    end = time.monotonic() + limit()
    while not (fresh_kernels / "pid").exists() or not (fresh_kernels / "pid").read_text():
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    try:
        (left,) = kept(fresh_kernels)
        assert left.name.startswith("building-") and left.stat().st_size == 9000
        (fresh_kernels / "again").touch()
        second = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**os.environ, "CC": slow},
            capture_output=True,
            text=True,
        )
        assert second.returncode == 0 and slow in second.stdout, second.stderr
        assert left in kept(fresh_kernels) and left.stat().st_size == 9000
    finally:
        os.kill(int((fresh_kernels / "pid").read_text()), 9)


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


@pytest.mark.slow
@needs_compiler
def test_processes_may_build_at_the_same_time(fresh_kernels):
    program = """
import torch
import zerofn as zf
from zerofn.kernels.rounding import leaf_key
x = torch.linspace(0.5, 2, 70_000).bfloat16()
tx = zf.low_precision_adam(0.1)
state, _ = zf.update(tx, {"w": x}, zf.init(tx, {"w": x}))
own = state.transforms["low_precision_adam"]
print(leaf_key("w"), *(x["w"].double().sum().item() for x in (state.params, own["exp_avg_sq"])))
"""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = [subprocess.Popen([sys.executable, "-W", "error", "-c", program], **options) for _ in range(2)]
    results = [run.communicate(timeout=limit()) for run in runs]
    assert all(run.returncode == 0 for run in runs), results
    assert results[0][0] == results[1][0] != ""
    # Of each library, those of the formulas too, at most one of each process; and nothing half done.
    names = [path.name for path in (fresh_kernels / "cache" / "zerofn" / "kernels").iterdir()]
    built = Counter(name.rpartition("-")[0] for name in names)
    assert max(built.values()) <= 2 and all(name.startswith("adam-") for name in names), names
