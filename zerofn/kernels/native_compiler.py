"""Finds the C compiler and runs it under a time limit: a compiler that hangs must not hang training."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from zerofn._errors import explain

# Seconds for one library, which takes half of one.
LIMIT = 60.0
# Bytes that a compiler may print: a program that $CC names by mistake may print without end.
TALK = 1_000_000

_SYSTEM = ("cc", "gcc", "clang")

# -fno-fast-math, before the others, which it would undo: a library linked for fast math has the whole process flush
# subnormals to zero, and $CC may ask for it. -ffp-contract=off: eager torch fuses no product with a sum. The two after
# it only give up errno and traps, no bit; roots and selections are not vectorised without them.
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-pthread", "-fno-fast-math"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# The first that the compiler takes. gcc prefers vectors of 32 bytes where 64 are 5 to 15 % faster here.
TUNING = (["-march=native", "-mprefer-vector-width=512"], ["-march=native"], ["-mcpu=native"], [])

Command = tuple[str, ...]  # a compiler's path and arguments that come before ours

_SWITCH = "ZEROFN_NATIVE"
_ON, _OFF, _MUST = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), "require"


def wanted() -> bool:
    """Whether ``$ZEROFN_NATIVE`` lets C be built; nothing, or the empty string, is yes.

    Raises:
        ValueError: it says nothing of the kind.
    """
    return _word() not in _OFF


def required() -> bool:
    """Whether it is an error that there is no C kernel."""
    return _word() == _MUST


def _word() -> str:
    said = os.environ.get(_SWITCH, "")
    word = said.strip().lower()
    if not word or word in (*_ON, *_OFF, _MUST):
        return word
    raise ValueError(
        explain(
            f"{_SWITCH}={said!r} in the environment",
            f"it says whether C kernels are built and used: {', '.join(_ON)}; or not: {', '.join(_OFF)};\n"
            f"or that it is an error where they cannot be: {_MUST}",
            f"{_SWITCH}=0 for eager torch alone, or unset it",
        )
    )


def asked_for(cc: str, path: str | None) -> Command | None:
    """The command that ``$CC`` names, as make takes it: a program and arguments. `None` if there is none to run.

    >>> asked_for("no-such-compiler -O1", os.environ.get("PATH")) is None
    True
    """
    if whole := shutil.which(cc, path=path):
        return (whole,)
    try:
        words = shlex.split(cc)
    except ValueError:  # a quotation without an end
        return None
    program = shutil.which(words[0], path=path) if words else None
    return None if program is None else (program, *words[1:])


def of_system(path: str | None) -> Command | None:
    """``cc``, ``gcc`` or ``clang``, whichever is found first."""
    found = next((where for name in _SYSTEM if (where := shutil.which(name, path=path))), None)
    return None if found is None else (found,)


def identity(command: Command, path: str | None) -> tuple:
    """What of a compiler could change the code that it makes: command, programs (``ccache gcc``), flags, processor."""
    programs = [os.stat(where) for word in command if (where := shutil.which(word, path=path))]
    return command, [(s.st_size, s.st_mtime_ns) for s in programs], FLAGS, TUNING, processor()


@functools.cache
def processor() -> str:
    """What -march=native depends on."""
    name = f"{platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    kinds = ("model name", "flags", "Features", "CPU part")
    return name + "".join(sorted({line for line in lines if line.startswith(kinds)}))


def compile_to(command: Command, source: Path, defines: Sequence[str], target: str) -> None:
    """Build a shared library.

    Raises:
        OSError: the compiler fails, with the end of what it said, or has not ended after `LIMIT` seconds,
            or says more than `TALK` bytes.
    """
    end = time.monotonic() + LIMIT
    code, said = 0, ""
    for tuning in TUNING:
        code, said = _run([*command, *FLAGS, *tuning, *defines, str(source), "-o", target], end)
        if code == 0:
            return
    raise OSError(f"{shlex.join(command)} failed on {source.name}: {said or f'exit status {code}'}")


def _run(words: list[str], end: float) -> tuple[int, str]:
    """Exit status, and the end of the output. The compiler and its child processes have ended when this returns.

    Output goes to a file: a pipe stays open until every child process has closed it, also those that stay on purpose,
    such as the server of a compiler cache.
    """
    with tempfile.TemporaryFile(dir=Path(words[-1]).parent) as said:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _wait(process, words[0], said.fileno(), end)
        finally:
            if process.poll() is None:
                # With its child processes: a driver waits for the compiler proper.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(max(os.fstat(said.fileno()).st_size - 1600, 0))
        return code, said.read(1600).decode(errors="replace").strip()[-400:]


def _wait(process: subprocess.Popen[bytes], name: str, said: int, end: float) -> int:
    """Exit status. Reads the size of the output every tenth of a second: a limit set in the child would need code
    between fork and exec, which is not safe beside torch's threads."""
    while True:
        try:
            return process.wait(max(min(end - time.monotonic(), 0.1), 0.0))
        except subprocess.TimeoutExpired:
            if os.fstat(said).st_size > TALK:
                raise OSError(f"{name} printed more than {TALK} bytes and had not ended") from None
            if time.monotonic() >= end:
                raise OSError(f"{name} had not ended after {LIMIT:g} s") from None
