"""The C kernels: built on first use with the system's compiler, kept on disk, and called.

The libraries lie in ``$XDG_CACHE_HOME/zerofn/kernels`` (``~/.cache/zerofn/kernels``; see `kernels.native_cache`). A
library's name has a hash of all that could change its code: source, compiler, flags, processor and dtypes. It is
built under a name of its own and renamed: processes building the same one at once each end with a whole file.
Importing this builds, reads and hashes nothing.

C through ctypes, and not a torch extension: that needs torch's headers and half a minute, this a sixth of a second.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerofn._errors import explain
from zerofn.kernels import native_cache as cache
from zerofn.kernels.native_compiler import Command, asked_for, compile_to, identity, of_system, required, wanted
from zerofn.kernels.rounding import FORMAT, stride_of

_FILES = ("native.c", "native_numbers.h", "native_sums.h", "native_threads.h")
_SOURCE, *_HEADERS = map(Path(__file__).with_name, _FILES)

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PLAIN = (torch.float32,) * 4
_IS_CPU = attrgetter("is_cpu")

Dtypes = tuple[torch.dtype, ...]


class _Job(ctypes.Structure):
    """``job`` of ``native.c``."""

    _fields_ = [
        ("entries", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in "pgmvc"),
        ("numel", ctypes.POINTER(ctypes.c_int64)),
        ("key", ctypes.POINTER(ctypes.c_uint64)),
        ("offset", ctypes.POINTER(ctypes.c_uint64)),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("scalars", ctypes.c_float * 7),
        ("squares", ctypes.POINTER(ctypes.c_double)),
    ]


class _Choice(NamedTuple):
    """A compiler; or why there is none, and what the user can do."""

    command: Command | None
    why: str = ""
    remedy: str = "Install gcc or clang, or name one in $CC"


def compiler() -> Command | None:
    """The compiler (``$CC``, ``cc``, ``gcc``, ``clang``) as words of a command; without one, a warning and ``None``.

    ``ZEROFN_NATIVE=0`` in the environment also gives ``None``, without a word: no compiler is to be run.

    Raises:
        ValueError: ``$ZEROFN_NATIVE`` says nothing that is known.
        RuntimeError: there is no compiler, and ``ZEROFN_NATIVE=require``.
    """
    choice = _chosen()
    if choice is not None and choice.command is None:
        give_up(choice.why, choice.remedy)
    return choice and choice.command


def quiet_compiler() -> Command | None:
    """As `compiler`, without a warning or an error where there is none: for kernels that torch has, too."""
    choice = _chosen()
    return choice and choice.command


def _chosen() -> _Choice | None:
    return _choose(os.environ.get("CC", "").strip(), os.environ.get("PATH")) if wanted() else None


@functools.cache
def _choose(cc: str, path: str | None) -> _Choice:
    """The compiler that ``$CC`` names, if it builds a kernel; else the system's, if that does: it may lack headers.

    Cached by the environment variables that it depends on, so that a change of them is seen.
    """
    if sys.platform == "win32":
        return _Choice(None, "C kernels are not built on Windows", "Use Linux or macOS")
    try:
        cache.directory()
    except OSError as error:  # not the compiler's fault
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
        _build(command, _PLAIN, 0, FORMAT)
    except (OSError, AttributeError) as error:
        return f"builds no kernel that can be loaded ({error})"
    return ""


def _tell(what: str) -> None:
    warnings.warn(f"zerofn: {what}.", RuntimeWarning, stacklevel=3)


def give_up(why: str, remedy: str = _Choice(None).remedy) -> None:
    """Warn that there is no kernel, once for each reason; raise a RuntimeError where ``ZEROFN_NATIVE=require``."""
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
def _build(command: Command, dtypes: Dtypes, mode: int, form: int) -> ctypes.CDLL:
    """The library for these dtypes, this mode and this format of random draws, from disk or built.

    Raises:
        OSError: it cannot be built or loaded.
        AttributeError: what was built has no kernel.
    """
    defines = [f"-DZF_{name}={_NAMES[dtype]}" for name, dtype in zip("PGMV", dtypes, strict=True)]
    defines += [f"-DZF_MODE={mode}", f"-DZF_STRIDE={stride_of(form)}u"]
    return library(command, (_SOURCE, *_HEADERS), defines, _declared)


def library(
    command: Command, files: Sequence[Path], defines: Sequence[str], declared: Callable[[ctypes.CDLL], ctypes.CDLL]
) -> ctypes.CDLL:
    """The library of the first of these files, which includes the others, from disk or built.

    Args:
        command: the compiler.
        files: what its code depends on.
        defines: of macros.
        declared: tells it the types of its functions.

    Raises:
        OSError: it cannot be built or loaded.
        AttributeError: a function is missing.
    """
    about = (identity(command, os.environ.get("PATH")), list(defines))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files) + repr(about).encode()).hexdigest()[:32]
    where = cache.directory()

    def build(target: str) -> ctypes.CDLL:
        compile_to(command, files[0], defines, target)
        return declared(ctypes.CDLL(target))

    found = cache.find(where, key)
    if found is not None:
        try:
            return declared(ctypes.CDLL(str(found)))
        except (OSError, AttributeError):  # of another system that shares the home directory
            cache.remove(found)
    return cache.keep(where, key, build)


@functools.cache
def _attempt(command: Command, dtypes: Dtypes, mode: int, form: int) -> ctypes.CDLL | str:
    """As `_build`, or why it failed. Cached, so that a build that has failed is not tried again at every step."""
    try:
        return _build(command, dtypes, mode, form)
    except (OSError, AttributeError) as error:
        return f"the C kernel could not be built or loaded ({shlex.join(command)}: {error})"


def _load(dtypes: Dtypes, mode: int, form: int) -> ctypes.CDLL | None:
    """The library, or ``None`` after one warning."""
    if (command := compiler()) is None:
        return None
    found = _attempt(command, dtypes, mode, form)
    return give_up(found) if isinstance(found, str) else found


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    adam, squares = library.zerofn_adam, library.zerofn_squares
    adam.argtypes, adam.restype = [ctypes.POINTER(_Job), ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    squares.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    squares.restype = ctypes.c_double
    return library


@functools.cache
def parallel() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch loaded, whichever that is."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def load(dtypes: Dtypes, mode: int, form: int):
    """The kernel for dtypes of (parameter, gradient, first, second moment), or ``None`` if there is none.

    ``mode``: sum of KAHAN = 1, STOCHASTIC_P = 2, STOCHASTIC_M = 4, STOCHASTIC_V = 8; ``form``: of the random draws.
    """
    library = _load(dtypes, mode, form)
    return None if library is None else library.zerofn_adam


def squares(x: Tensor) -> float | None:
    """The sum of squares of a contiguous CPU tensor in float32, bfloat16 or float16; ``None`` without a compiler.

    Summed in double, where squares of 16-bit numbers are exact and sums of finite ones are finite; the same on any
    number of threads. Torch casts 16-bit tensors to float32 first, in memory: three times as long.
    """
    address = x.data_ptr()
    if not address or not x.is_cpu:
        _check_memory([[x]], [[address]])
    library = _load((_PLAIN[0], x.dtype, *_PLAIN[2:]), 0, FORMAT)
    threads = torch.get_num_threads()
    return None if library is None else library.zerofn_squares(address, x.numel(), threads, parallel())


def run(
    function,
    tensors: Sequence[Sequence[Tensor]],
    *,
    keys: Sequence[int],
    offsets: Sequence[int],
    seed: int,
    step: int,
    scalars: Sequence[float],
    norms: bool = False,
) -> list[float]:
    """Call ``function`` on contiguous CPU tensors, on as many threads as torch uses.

    ``tensors``: lists of parameters, gradients, first and second moments and, for KAHAN, compensations.
    Everything but the gradients is overwritten behind autograd's back; the caller tells it. With `norms` those of the
    gradients are returned, whose squares are added up in double on the way.
    """
    count = len(keys)
    addresses = [list(map(Tensor.data_ptr, ts)) for ts in tensors]
    if not all(all(map(_IS_CPU, ts)) for ts in tensors) or not all(map(all, addresses)):
        _check_memory(tensors, addresses)
    pointers = [(ctypes.c_void_p * count)(*row) for row in addresses]
    squares = (ctypes.c_double * count)() if norms else None
    job = _Job(
        count,
        *pointers,
        *[None] * (5 - len(pointers)),
        (ctypes.c_int64 * count)(*map(Tensor.numel, tensors[0])),
        # ctypes takes the low 64 bits of any int.
        (ctypes.c_uint64 * count)(*keys),
        (ctypes.c_uint64 * count)(*offsets),
        seed,
        step,
        (ctypes.c_float * 7)(*scalars),
        squares,
    )
    if function(ctypes.byref(job), torch.get_num_threads(), parallel()):
        raise MemoryError("no memory for the sums of squares of gradients")
    return [x**0.5 for x in squares or ()]


def _check_memory(tensors: Sequence[Sequence[Tensor]], addresses: Sequence[Sequence[int]]) -> None:
    """Raise for tensors that C would read at address 0, or at an address of another device: that ends the process."""
    for place, (ts, row) in enumerate(zip(tensors, addresses, strict=True)):
        for i, (t, address) in enumerate(zip(ts, row, strict=True)):
            if t.numel() and not (t.is_cpu and address):
                raise ValueError(
                    f"the C kernel cannot read entry {i} of list {place}: a {t.dtype} tensor of shape {tuple(t.shape)} "
                    f"on {t.device}{'' if address else ' without memory'}. Give it tensors of the CPU."
                )
