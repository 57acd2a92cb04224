"""The C library: compile it, keep it on disk, check it, call it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zerofn._errors import explain

# ----------------------------------------------------------------------------------------------------------------------
# Built libraries lie in a directory that only this user can write. Checksums show damaged files.
#
# A damaged library ends the process with a signal that Python cannot catch, and a library from another user would run
# as this user. So a library's name contains a checksum of its content, which is compared before loading. A file of
# another user, or one that others can write, is ignored. A directory in which others can replace files is not used.


T = TypeVar("T")

# Temporary files of a build are removed at this age, in seconds: no compiler runs that long.
_ABANDONED = 86_400


def directory() -> Path:
    """The directory of built libraries; it is made if need be.

    ``$XDG_CACHE_HOME/zerofn/kernels`` (``~/.cache/zerofn/kernels``). If that cannot be written, or others can write
    into it, a directory of this user under the temporary one.

    Raises:
        OSError: there is no directory that only this user can write.
    """
    tried = list(_candidates())
    for outer in tried:
        with contextlib.suppress(OSError):
            inner = outer / "kernels"
            # Three calls, since `mkdir(parents=True)` gives the mode to the last directory only.
            outer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            outer.mkdir(mode=0o700, exist_ok=True)
            # This check comes before anything is made inside: another user may have put a link there.
            if not _private(outer):
                continue
            inner.mkdir(mode=0o700, exist_ok=True)
            if _private(inner) and os.access(inner, os.W_OK | os.X_OK):
                return inner.resolve()
    raise OSError(
        "no directory for built kernels that only this user can write: tried "
        + (", ".join(map(str, tried)) or "nothing, as there is neither a home nor a temporary directory")
    )


def _candidates() -> Iterator[Path]:
    # The XDG Base Directory Specification says to ignore a relative path. Without $HOME, ~ is not expanded; with an
    # empty one it would become /.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache") if os.environ.get("HOME", "/") else ""
    if os.path.isabs(base):
        yield Path(base) / "zerofn"
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"zerofn-{os.getuid()}"


def _private(path: Path) -> bool:
    """Whether a directory, and what it may link to, belong to this user, and nobody else can write into it."""
    status = path.stat()
    mine = path.lstat().st_uid == status.st_uid == os.getuid()
    return mine and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022


def find(where: Path, key: str) -> Path | None:
    """The library with this key, if its checksum is right.

    A damaged one is not removed: another process may have replaced it in the meantime.
    """
    return next((file for file in sorted(where.glob(f"adam-{key}-*.so")) if _sound(file)), None)


def _sound(file: Path) -> bool:
    """Whether a file is complete, not a link, and writable by this user only."""
    try:
        # Non-blocking: a file of this name may be a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return False
        try:
            return file.stem.rpartition("-")[2] == _checksum(opened.read())
        except OSError:
            return False


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def keep(where: Path, key: str, build: Callable[[str], T]) -> T:
    """Build and load a library, and keep it; return what ``build`` returns.

    It is loaded before it is renamed: a library that does not load is not kept, and it does not matter here what
    another process does to the final name.

    Args:
        where: the directory.
        key: a hash of everything that could change the code.
        build: writes the library to a path, and loads it.

    Raises:
        OSError: it could not be built, loaded or written.
    """
    _tidy(where, key)
    descriptor, temporary = tempfile.mkstemp(suffix=".so", prefix="building-", dir=where)
    os.close(descriptor)
    try:
        loaded = build(temporary)
        # The linker has replaced the temporary file by a new one, which has the default mode.
        os.chmod(temporary, 0o700)
        with open(temporary, "rb") as built:
            library = where / f"adam-{key}-{_checksum(built.read())}.so"
        os.replace(temporary, library)
        return loaded
    finally:
        remove(Path(temporary))


def _tidy(where: Path, key: str) -> None:
    """Remove temporary files of killed builds, and damaged libraries with this key."""
    for file in where.glob("building-*"):
        with contextlib.suppress(OSError):
            if time.time() - file.lstat().st_mtime > _ABANDONED:
                file.unlink()
    for file in where.glob(f"adam-{key}-*.so"):
        if not _sound(file):
            remove(file)


# ----------------------------------------------------------------------------------------------------------------------
# Find the C compiler, and run it under a time limit: a compiler that hangs must not hang training.


# Seconds for one library; it usually takes half a second.
LIMIT = 60.0

_SYSTEM = ("cc", "gcc", "clang")

# -fno-fast-math: $CC may ask for fast math, and a library linked with it makes the whole process flush subnormals to
# zero. It stands first, since it would undo the others. -ffp-contract=off: eager torch fuses no product with a sum. The
# last two give up errno and traps, but no bit; without them roots and selections are not vectorised.
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-pthread", "-fno-fast-math"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# The first that the compiler accepts is used. By itself gcc prefers vectors of 32 bytes; 64 are 5 to 15 % faster here.
TUNING = (["-march=native", "-mprefer-vector-width=512"], ["-march=native"], ["-mcpu=native"], [])

Command = tuple[str, ...]  # a compiler's path and arguments that come before ours

_SWITCH = "ZEROFN_NATIVE"
_ON, _OFF, _REQUIRE = ("1", "true", "yes", "on"), ("0", "false", "no", "off"), "require"


def wanted() -> bool:
    """Whether ``$ZEROFN_NATIVE`` lets C kernels be built; yes if it is unset or empty.

    Raises:
        ValueError: its value is unknown.
    """
    return _switch() not in _OFF


def required() -> bool:
    """Whether a missing C kernel is an error."""
    return _switch() == _REQUIRE


def _switch() -> str:
    value = os.environ.get(_SWITCH, "")
    word = value.strip().lower()
    if not word or word in (*_ON, *_OFF, _REQUIRE):
        return word
    raise ValueError(
        explain(
            f"{_SWITCH}={value!r} in the environment",
            f"to build and use C kernels: {', '.join(_ON)}; not to: {', '.join(_OFF)};\n"
            f"to raise an error if they cannot be built: {_REQUIRE}",
            f"{_SWITCH}=0 for eager torch only, or unset it",
        )
    )


def asked_for(cc: str, path: str | None) -> Command | None:
    """The command that ``$CC`` names, in make's form: a program and arguments. `None` if the program cannot be run.

    Examples:
        >>> asked_for("no-such-compiler -O1", os.environ.get("PATH")) is None
        True
    """
    if whole := shutil.which(cc, path=path):
        return (whole,)
    try:
        words = shlex.split(cc)
    except ValueError:  # a quote is not closed
        return None
    program = shutil.which(words[0], path=path) if words else None
    return None if program is None else (program, *words[1:])


def of_system(path: str | None) -> Command | None:
    """``cc``, ``gcc`` or ``clang``, whichever is found first."""
    found = next((where for name in _SYSTEM if (where := shutil.which(name, path=path))), None)
    return None if found is None else (found,)


def identity(command: Command, path: str | None) -> tuple:
    """All that may change the code that a compiler makes: command, programs (``ccache gcc``), flags, processor."""
    programs = [os.stat(where) for word in command if (where := shutil.which(word, path=path))]
    return command, [(s.st_size, s.st_mtime_ns) for s in programs], FLAGS, TUNING, processor()


@functools.cache
def processor() -> str:
    """A text that differs between processors for which -march=native makes different code."""
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
        OSError: the compiler fails (with the end of its output), or runs longer than `LIMIT` seconds.
    """
    end = time.monotonic() + LIMIT
    code, output = 0, ""
    for tuning in TUNING:
        code, output = _run([*command, *FLAGS, *tuning, *defines, str(source), "-o", target], end)
        if code == 0:
            return
    raise OSError(f"{shlex.join(command)} failed on {source.name}: {output or f'exit status {code}'}")


def _run(words: list[str], end: float) -> tuple[int, str]:
    """Exit status, and the end of the output. The compiler and its child processes have ended when this returns.

    Output goes to a file. A pipe would stay open until every child process has closed it, and some stay on purpose,
    such as the server of a compiler cache.
    """
    with tempfile.TemporaryFile(dir=Path(words[-1]).parent) as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise OSError(f"{words[0]} had not ended after {LIMIT:g} s") from None
        finally:
            if process.poll() is None:
                # The whole process group: the driver has started the compiler proper.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(max(os.fstat(output.fileno()).st_size - 1600, 0))
        return code, output.read(1600).decode(errors="replace").strip()[-400:]


# ----------------------------------------------------------------------------------------------------------------------
# C kernels are built on first use with the system's compiler, kept on disk, and called.
#
# The libraries lie in ``$XDG_CACHE_HOME/zerofn/kernels`` (``~/.cache/zerofn/kernels``). A library's name contains a
# hash of everything that could change its code: source, compiler, flags, processor and dtypes. It is built under a
# temporary name and renamed, so that of several processes each gets a complete file. Importing this module builds,
# reads and hashes nothing.
#
# Rejected: a torch extension, which needs torch's headers and half a minute to build. C with ctypes takes a sixth of a
# second.


_FILES = ("squares.c", "native_lines.h", "native_prefetch.h", "native_threads.h")
_SOURCE, *_HEADERS = map(Path(__file__).with_name, _FILES)

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Choice(NamedTuple):
    """A compiler; or why there is none, and what the user can do."""

    command: Command | None
    why: str = ""
    remedy: str = "Install gcc or clang, or name one in $CC"


INSTALL = _Choice(None).remedy


def compiler() -> Command | None:
    """The compiler (``$CC``, ``cc``, ``gcc``, ``clang``) as words of a command; without one, a warning and ``None``.

    With ``ZEROFN_NATIVE=0`` in the environment, ``None`` without a warning.

    Raises:
        ValueError: the value of ``$ZEROFN_NATIVE`` is unknown.
        RuntimeError: there is no compiler, and ``ZEROFN_NATIVE=require``.
    """
    choice = _chosen()
    if choice is not None and choice.command is None:
        give_up(choice.why, choice.remedy)
    return choice and choice.command


def quiet_compiler() -> Command | None:
    """As `compiler`, without a warning or an error: for kernels that torch has too."""
    choice = _chosen()
    return choice and choice.command


def _chosen() -> _Choice | None:
    return _choose(os.environ.get("CC", "").strip(), os.environ.get("PATH")) if wanted() else None


@functools.cache
def _choose(cc: str, path: str | None) -> _Choice:
    """The compiler that ``$CC`` names, if it builds a kernel; else the system's, if that does (it may lack headers).

    Cached by the environment variables that it depends on, so that a change of them is noticed.
    """
    if sys.platform == "win32":
        return _Choice(None, "C kernels are not built on Windows", "Use Linux or macOS")
    try:
        directory()
    except OSError as error:  # no directory: no other compiler would help
        return _Choice(None, str(error), "Let XDG_CACHE_HOME or TMPDIR name a directory of your own")
    system, problem = of_system(path), ""
    if cc:
        own = asked_for(cc, path)
        problem = "names no program that can be run" if own is None else _problem(own)
        if not problem:
            return _Choice(own)
        problem = f"$CC is {cc!r}, which {problem}; "
    if system is None:
        return _Choice(None, f"{problem}no C compiler was found (tried cc, gcc, clang)")
    if useless := _problem(system):
        return _Choice(None, f"{problem}{system[0]} {useless}")
    if problem:
        _tell(f"{problem}{system[0]} is used instead. Unset CC, or name a C compiler in it")
    return _Choice(system)


def _problem(command: Command) -> str:
    """Why a compiler builds no kernel; empty if it does."""
    try:
        _build(command, torch.float32)
    except (OSError, AttributeError) as error:
        return f"builds no kernel that can be loaded ({error})"
    return ""


def _tell(what: str) -> None:
    warnings.warn(f"zerofn: {what}.", RuntimeWarning, stacklevel=3)


def give_up(why: str, remedy: str = INSTALL) -> None:
    """Warn that there is no kernel, once for each reason; with ``ZEROFN_NATIVE=require`` raise a RuntimeError."""
    if required():
        right = f"{remedy}; or unset ZEROFN_NATIVE: eager torch gives the same bits, slower"
        raise RuntimeError(explain("ZEROFN_NATIVE=require, and there is no C kernel", why, right))
    warn(why, remedy)


@functools.cache
def warn(why: str, remedy: str) -> None:
    _tell(
        f"{why}; so low_precision_adam on the CPU runs through eager torch: the same bits, 10 to 20 times "
        f"slower; norms of 16-bit tensors are 3 times slower. {remedy}; ZEROFN_NATIVE=0 silences this"
    )


@functools.cache
def _build(command: Command, dtype: torch.dtype) -> ctypes.CDLL:
    """The library that adds squares of numbers of this dtype, from disk or newly built.

    Raises:
        OSError: it cannot be built or loaded.
        AttributeError: the built library has no kernel.
    """
    return library(command, (_SOURCE, *_HEADERS), [f"-DZF_KIND={_KINDS[dtype]}"], _declared)


def library(
    command: Command, files: Sequence[Path], defines: Sequence[str], declared: Callable[[ctypes.CDLL], ctypes.CDLL]
) -> ctypes.CDLL:
    """The library of the first of these files, which includes the others, from disk or newly built.

    Args:
        command: the compiler.
        files: the files that its code depends on.
        defines: macro definitions.
        declared: declares the types of its functions.

    Raises:
        OSError: it cannot be built or loaded.
        AttributeError: a function is missing.
    """
    about = (identity(command, os.environ.get("PATH")), list(defines))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files) + repr(about).encode()).hexdigest()[:32]
    where = directory()

    def build(target: str) -> ctypes.CDLL:
        compile_to(command, files[0], defines, target)
        return declared(ctypes.CDLL(target))

    return _kept(where, key, declared, build)


def printed(
    command: Command, text: str, headers: Sequence[Path], declared: Callable[[ctypes.CDLL], ctypes.CDLL]
) -> ctypes.CDLL:
    """The library of a printed source, from disk or newly built.

    Args:
        command: the compiler.
        text: the source.
        headers: the files of this folder that it includes.
        declared: declares the types of its functions.

    Raises:
        OSError: it cannot be built or loaded.
        AttributeError: a function is missing.
    """
    about = repr((identity(command, os.environ.get("PATH")), text))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in headers) + about.encode()).hexdigest()[:32]
    where = directory()

    def build(target: str) -> ctypes.CDLL:
        source = Path(target).with_suffix(".c")
        try:
            source.write_text(text)
            compile_to(command, source, [f"-I{headers[0].parent}"], target)
        finally:
            remove(source)
        return declared(ctypes.CDLL(target))

    return _kept(where, key, declared, build)


def _kept(
    where: Path, key: str, declared: Callable[[ctypes.CDLL], ctypes.CDLL], build: Callable[[str], ctypes.CDLL]
) -> ctypes.CDLL:
    """The library with this key, from disk or newly built."""
    found = find(where, key)
    if found is not None:
        try:
            return declared(ctypes.CDLL(str(found)))
        except (OSError, AttributeError):  # built on another system that shares the home directory
            remove(found)
    return keep(where, key, build)


@functools.cache
def _attempt(command: Command, dtype: torch.dtype) -> ctypes.CDLL | str:
    """As `_build`, or why it failed. Cached, so that a failed build is not tried again at every step."""
    try:
        return _build(command, dtype)
    except (OSError, AttributeError) as error:
        return f"the C kernel could not be built or loaded ({shlex.join(command)}: {error})"


def _load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library, or ``None`` after one warning."""
    if (command := compiler()) is None:
        return None
    found = _attempt(command, dtype)
    return give_up(found) if isinstance(found, str) else found


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    squares = library.zerofn_squares
    squares.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    squares.restype = ctypes.c_double
    return library


@functools.cache
def parallel() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch has loaded, whichever that is."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def squares(x: Tensor) -> float | None:
    """The sum of squares of a contiguous CPU tensor in float32, bfloat16 or float16; ``None`` without a compiler.

    Summed in double, in which squares of 16-bit numbers are exact and sums of finite ones are finite; the result is the
    same on any number of threads. Torch casts 16-bit tensors to float32 in memory first, which takes three times as
    long.
    """
    address = x.data_ptr()
    if not address or not x.is_cpu:
        check_memory([[x]], [[address]])
    library = _load(x.dtype)
    threads = torch.get_num_threads()
    return None if library is None else library.zerofn_squares(address, x.numel(), threads, parallel())


def check_memory(tensors: Sequence[Sequence[Tensor]], addresses: Sequence[Sequence[int]]) -> None:
    """Raise for tensors that C would read at address 0 or on another device, which would end the process."""
    for ts, row in zip(tensors, addresses, strict=True):
        for i, (t, address) in enumerate(zip(ts, row, strict=True)):
            if t.numel() and not (t.is_cpu and address):
                wrong = f"the C kernel on entry {i} of a list, a {t.dtype} tensor of shape {tuple(t.shape)}"
                why = f"it is on {t.device}{'' if address else ', without memory'}, where C cannot read it"
                raise ValueError(explain(wrong, why, "tensors on the CPU"))


# ----------------------------------------------------------------------------------------------------------------------
# Before a C kernel is used, its bits are compared with torch's on these numbers.


def sample(numel: int) -> list[list[Tensor]]:
    """A parameter, a gradient and both moments, as lists of one float32 tensor each.

    Numbers from subnormal to infinite; each magnitude in one meets many magnitudes in the others.
    """
    i = torch.arange(numel)
    return [
        [(1 + i % 97 / 97) * 2.0 ** (i * stride % 279 - 150) * sign]
        for stride, sign in zip((1, 2, 4, 5), (1 - i % 2 * 2, 1 - i % 3, 1, 1), strict=True)
    ]


def same_bits(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Whether lists of one tensor each are equal to the bit; a NaN equals any NaN."""
    pairs = zip(found, expected, strict=True)
    return all(a.nan_to_num(nan=0.5).equal(b.nan_to_num(nan=0.5)) for (a,), (b,) in pairs)
