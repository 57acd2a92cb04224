"""Build the C kernels on first use with the system's compiler, keep them on disk, and call them.

The libraries lie in ``$XDG_CACHE_HOME/zerofn`` (``~/.cache/zerofn``), or in a directory of the user's own
under the temporary directory if that cannot be written. A library's name is a hash of all that could
change its code: source, compiler, flags, processor and dtypes. It is built under a name of its own and
renamed, so that processes building the same one at the same time each end with a whole file.

C through ctypes, and not a torch extension: that needs torch's headers and takes half a minute to compile,
this a sixth of a second.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zerofn._rounding import FORMAT, stride_of

_SOURCE, *_HEADERS = (Path(__file__).with_name(f"_native{name}") for name in (".c", "_numbers.h", "_threads.h"))

# -ffp-contract=off: eager torch fuses no product with a sum. The two -fno only give up errno and traps,
# no bit; roots and selections are not vectorised without them.
_FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-pthread"]
_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# The first that the compiler takes. gcc prefers vectors of 32 bytes where 64 are 5 to 15 % faster here.
_TUNING = (["-march=native", "-mprefer-vector-width=512"], ["-march=native"], ["-mcpu=native"], [])

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class _Job(ctypes.Structure):
    """``job`` of ``_native.c``."""

    _fields_ = [
        ("entries", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in "pgmvc"),
        ("numel", ctypes.POINTER(ctypes.c_int64)),
        ("key", ctypes.POINTER(ctypes.c_uint64)),
        ("offset", ctypes.POINTER(ctypes.c_uint64)),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("scalars", ctypes.c_float * 7),
    ]


def compiler() -> str | None:
    """Path of the compiler (``$CC``, ``cc``, ``gcc``, ``clang``); without one, one warning and ``None``.

    ``ZEROFN_NATIVE=0`` in the environment also gives ``None``, without a word: no compiler is to be run.
    """
    if os.environ.get("ZEROFN_NATIVE", "1") in ("", "0"):
        return None
    cc = _find_compiler(os.environ.get("CC"), os.environ.get("PATH"))
    # One kernel is built to see whether any can be: a compiler without headers is found, too.
    return cc if cc and _load(cc, (torch.float32,) * 4, 0, FORMAT) else None


@functools.cache
def _find_compiler(cc: str | None, path: str | None) -> str | None:
    # Cached on what it depends on: looked up once, warned about once, and a changed environment is seen.
    names = [cc, "cc", "gcc", "clang"] if cc else ["cc", "gcc", "clang"]
    found = next((where for name in names if (where := shutil.which(name, path=path))), None)
    if found is None or sys.platform == "win32":
        warn("no C compiler was found (tried " + ", ".join(names) + ")")
        return None
    return found


@functools.cache
def warn(why: str) -> None:
    """Say that and why there is no kernel, once for each reason."""
    warnings.warn(
        f"zerofn: {why}, so low_precision_adam on the CPU runs through eager torch: the same bits, 10 to 20 times "
        "slower; norms of 16-bit tensors are 3 times slower. Install gcc or clang, or name one in $CC; "
        "ZEROFN_NATIVE=0 silences this.",
        RuntimeWarning,
        stacklevel=2,
    )


def cache_directory() -> Path:
    """Where built libraries are kept; made if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        directory = Path(base) / "zerofn"
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    # Others may write to the temporary directory: a library of theirs must not be loaded.
    directory = Path(tempfile.gettempdir()) / f"zerofn-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that only this user can write. Remove it.")
    return directory


@functools.cache
def _processor() -> str:
    """What -march=native depends on."""
    name = f"{platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    wanted = ("model name", "flags", "Features", "CPU part")
    return name + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def build(cc: str, defines: Sequence[str]) -> Path:
    """The shared library for these ``-D`` flags, from disk or built; raises `OSError` if it cannot be."""
    status = os.stat(cc)
    identity = (cc, status.st_size, status.st_mtime_ns, _FLAGS, _TUNING, tuple(defines), _processor())
    texts = b"".join(file.read_bytes() for file in (_SOURCE, *_HEADERS))
    digest = hashlib.sha256(texts + repr(identity).encode()).hexdigest()[:32]
    directory = cache_directory()
    library = directory / f"adam-{digest}.so"
    if library.exists():
        return library
    descriptor, temporary = tempfile.mkstemp(suffix=".so", prefix="building-", dir=directory)
    os.close(descriptor)
    try:
        result = None
        for tuning in _TUNING:
            command = [cc, *_FLAGS, *tuning, *defines, str(_SOURCE), "-o", temporary]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                os.replace(temporary, library)
                return library
        assert result is not None
        raise OSError(f"{cc} failed on {_SOURCE.name}: {result.stderr.strip()[-400:]}")
    finally:
        Path(temporary).unlink(missing_ok=True)


@functools.cache
def _load(cc: str, dtypes: tuple[torch.dtype, ...], mode: int, form: int):
    """The library for these dtypes and this mode, or ``None`` with one warning."""
    defines = [f"-DZF_{name}={_NAMES[dtype]}" for name, dtype in zip("PGMV", dtypes, strict=True)]
    defines += [f"-DZF_MODE={mode}", f"-DZF_STRIDE={stride_of(form)}u"]
    try:
        library = build(cc, defines)
        try:
            loaded = _declared(ctypes.CDLL(str(library)))
        except OSError:  # a damaged file, or one of another system in a shared home directory
            library.unlink(missing_ok=True)
            loaded = _declared(ctypes.CDLL(str(build(cc, defines))))
    except (OSError, AttributeError) as error:
        warn(f"the C kernel could not be built or loaded ({error})")
        return None
    return loaded


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    adam, squares = library.zerofn_adam, library.zerofn_squares
    adam.argtypes, adam.restype = [ctypes.POINTER(_Job), ctypes.c_int, ctypes.c_void_p], None
    squares.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    squares.restype = ctypes.c_double
    return library


@functools.cache
def _parallel() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch loaded, whichever that is."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def load(dtypes: tuple[torch.dtype, ...], mode: int, form: int = FORMAT):
    """The kernel for dtypes of (parameter, gradient, first, second moment), or ``None`` if there is none.

    ``mode``: sum of KAHAN = 1, STOCHASTIC_P = 2, STOCHASTIC_M = 4, STOCHASTIC_V = 8; ``form``: of the random draws.
    """
    cc = compiler()
    library = None if cc is None else _load(cc, dtypes, mode, form)
    return None if library is None else library.zerofn_adam


def squares(x: Tensor) -> float | None:
    """The sum of squares of a contiguous CPU tensor in float32, bfloat16 or float16; ``None`` without a compiler.

    Summed in double, where squares of 16-bit numbers are exact and sums of finite ones are finite; the same on any
    number of threads. Torch casts 16-bit tensors to float32 first, in memory: three times as long.
    """
    address = x.data_ptr()
    if not address or not x.is_cpu:
        _check_memory([[x]], [[address]])
    cc = compiler()
    library = None if cc is None else _load(cc, (torch.float32, x.dtype, torch.float32, torch.float32), 0, FORMAT)
    if library is None:
        return None
    return library.zerofn_squares(address, x.numel(), torch.get_num_threads(), _parallel())


def run(
    function,
    tensors: Sequence[Sequence[Tensor]],
    *,
    keys: Sequence[int],
    offsets: Sequence[int],
    seed: int,
    step: int,
    scalars: Sequence[float],
) -> None:
    """Call ``function`` on contiguous CPU tensors, on as many threads as torch uses.

    ``tensors``: lists of parameters, gradients, first and second moments and, for KAHAN, compensations.
    Everything but the gradients is overwritten behind autograd's back; the caller tells it.
    """
    count = len(keys)
    addresses = [[t.data_ptr() for t in ts] for ts in tensors]
    if not all(t.is_cpu for ts in tensors for t in ts) or not all(map(all, addresses)):
        _check_memory(tensors, addresses)
    pointers = [(ctypes.c_void_p * count)(*row) for row in addresses]
    mask = (1 << 64) - 1
    job = _Job(
        count,
        *pointers,
        *[None] * (5 - len(pointers)),
        (ctypes.c_int64 * count)(*(t.numel() for t in tensors[0])),
        (ctypes.c_uint64 * count)(*(key & mask for key in keys)),
        (ctypes.c_uint64 * count)(*offsets),
        seed & mask,
        step,
        (ctypes.c_float * 7)(*scalars),
    )
    function(ctypes.byref(job), torch.get_num_threads(), _parallel())


def _check_memory(tensors: Sequence[Sequence[Tensor]], addresses: Sequence[Sequence[int]]) -> None:
    """The last look before C, which would read from address 0, or from that of another device, and end the process."""
    for place, (ts, row) in enumerate(zip(tensors, addresses, strict=True)):
        for i, (t, address) in enumerate(zip(ts, row, strict=True)):
            if t.numel() and not (t.is_cpu and address):
                raise ValueError(
                    f"the C kernel cannot read entry {i} of list {place}: a {t.dtype} tensor of shape {tuple(t.shape)} "
                    f"on {t.device}{'' if address else ' without memory'}. Give it tensors of the CPU."
                )
