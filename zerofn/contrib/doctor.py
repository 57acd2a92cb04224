"""`python -m zerofn doctor`: check versions, processor, kernels, local ranks, and say what would be slow."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zerofn import __version__, attach, launch, low_precision_adam
from zerofn.collectives import world_group
from zerofn.extend import all_reduce_

# These have no public name: the directory of built kernels, and the backends that torch was built with.
from ..kernels import native as native_cache
from ..ranks.backend import available

# Elements in the update that is timed: 16 MiB of parameters, gradients and moments in bf16.
ELEMENTS = 1 << 21
OPTIONAL = {
    "safetensors": "zf.export_safetensors, zf.load_safetensors",
    "cloudpickle": "zf.launch of functions of a notebook",
    "matplotlib": "curves of the examples",
}


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        about: the subject.
        result: what was found.
        remedy: what to do about it; empty if all is well.
        broken: whether something does not work at all, rather than being slow.
    """

    about: str
    result: str
    remedy: str = ""
    broken: bool = False

    def __str__(self) -> str:
        mark = "FAIL" if self.broken else "slow" if self.remedy else "ok"
        return f"{mark:>4}  {self.about:<10} {self.result}" + (f"\n{'':18}-> {self.remedy}" if self.remedy else "")


def examine(nproc: int = 2) -> Iterator[Finding]:
    """Check this machine, one finding at a time. Takes a few seconds.

    Args:
        nproc: local ranks to start as a test; 0 for none.

    Examples:
        >>> [found.broken for found in examine(nproc=0)]
        [False, False, False, False, False, False, False, False]
    """
    yield _versions()
    yield _processor()
    yield _devices()
    yield _gpu_kernel()
    yield _gpu_ranks()
    yield _kernel()
    yield _cache()
    yield _optional()
    if nproc:
        yield _ranks(nproc)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Finding:
    versions = [f"zerofn {__version__}", f"torch {torch.__version__}", f"optree {_version('optree')}"]
    versions += [f"numpy {_version('numpy')}", f"Python {platform.python_version()}", platform.platform(terse=True)]
    return Finding("versions", ", ".join(versions))


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads, ranks = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    result = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores, {threads} threads"
    if threads * ranks > cores:
        of_ranks = f" in each of {ranks} ranks" if ranks > 1 else ""
        return Finding("processor", result + of_ranks, f"OMP_NUM_THREADS={max(1, cores // ranks)}: threads share cores")
    return Finding("processor", result)


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices() -> Finding:
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(_gpus())) or "no GPU: everything runs on the CPU"
    return Finding("devices", f"{names}; torch is built for {torch.version.cuda or torch.version.hip or 'the CPU'}")


def _gpu_kernel() -> Finding:
    """The kernel that updates `low_precision_adam` on a GPU. If there is a GPU, the kernel is run there."""
    plain, triton = "eager torch, a dozen launches for each leaf", _version("triton")
    if triton == "not installed":
        remedy = "pip install triton, in the version of this torch" if _gpus() else ""
        return Finding("on a GPU", f"low_precision_adam would run {plain}: triton is not installed", remedy)
    if _c_compiler() is None:
        remedy = "a C compiler: apt install gcc, or CC=its path" if _gpus() else ""
        why = f"triton {triton} has no C compiler for its launchers"
        return Finding("on a GPU", f"low_precision_adam would run {plain}: {why}", remedy)
    one = f"triton {triton}, one launch for all leaves"
    if not _gpus():
        return Finding("on a GPU", f"low_precision_adam would run by {one}")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            _updates(torch.device("cuda"), 1 << 10)()
        except Exception as error:
            return Finding("on a GPU", f"{type(error).__name__}: {error}".splitlines()[0], "see ZEROFN_NATIVE", True)
    if warned:
        return Finding("on a GPU", f"low_precision_adam runs {plain}", str(warned[0].message))
    return Finding("on a GPU", f"low_precision_adam runs by {one}, with the bits of eager torch")


def _c_compiler() -> str | None:
    """The compiler that triton would take."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang") or shutil.which("gcc")


def _gpu_ranks() -> Finding:
    """The backends of ranks on GPUs: tensors go over NCCL, and numbers of the host over gloo."""
    missing = [name for name in ("nccl", "gloo") if name not in available()]
    result = f"ranks use nccl for tensors{', gloo for numbers of the host' * ('gloo' not in missing)}"
    if missing:
        result += f"; this torch lacks {' and '.join(missing)}"
    broken = _gpus() > 1 and bool(missing)
    return Finding("on GPUs", result, "a torch with gloo and, for CUDA, nccl" if broken else "", broken)


def _kernel() -> Finding:
    """The update of `low_precision_adam`, timed with the C kernel and without."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            implementation = "native" if native_cache.compiler() else "eager"
            fast = _time()
        except Exception as error:
            return Finding("kernel", f"{type(error).__name__}: {error}".splitlines()[0], "see ZEROFN_NATIVE", True)
    with _without_kernels():
        slow = _time()
    times = f"takes {fast * 1e3:.1f} ms, eager torch {slow * 1e3:.1f} ms"
    result = f"{implementation}: an update of 2 M bf16 elements {times}"
    if implementation == "native" and not warned:
        return Finding("kernel", result)
    why = (
        str(warned[0].message) if warned else "ZEROFN_NATIVE=0 in the environment: low_precision_adam runs eager torch"
    )
    return Finding("kernel", result, why)


@contextmanager
def _without_kernels() -> Iterator[None]:
    known = os.environ.get("ZEROFN_NATIVE")
    os.environ["ZEROFN_NATIVE"] = "0"
    try:
        yield
    finally:
        if known is None:
            del os.environ["ZEROFN_NATIVE"]
        else:
            os.environ["ZEROFN_NATIVE"] = known


def _time() -> float:
    once = _updates(torch.device("cpu"), ELEMENTS)
    once()  # the first call builds the kernel
    return min(_seconds(once) for _ in range(3))


def _updates(device: torch.device, elements: int) -> Callable[[], object]:
    """A function that makes one update of so many bf16 elements."""
    p = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16, device=device))
    opt = attach(torch.nn.ParameterList([p]), low_precision_adam(1e-3))
    p.grad = torch.ones_like(p)
    return opt.step


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _cache() -> Finding:
    try:
        where = native_cache.directory()
    except OSError as error:
        remedy = "XDG_CACHE_HOME=a directory of yours; kernels are built anew in every process"
        return Finding("cache", f"no directory for built kernels: {error}", remedy)
    return Finding("cache", f"built kernels lie in {where}")


def _optional() -> Finding:
    missing = [f"{name} ({use})" for name, use in OPTIONAL.items() if _version(name) == "not installed"]
    return Finding("optional", f"not installed: {', '.join(missing)}" if missing else "all packages are there")


def _ranks(nproc: int) -> Finding:
    backends = available()
    if "gloo" not in backends:
        return Finding("ranks", f"torch has {', '.join(backends) or 'no backends'}", "a torch with gloo", True)
    begun = time.perf_counter()
    try:
        found = launch(_add_up, nproc, timeout=60)
    except Exception as error:
        return Finding("ranks", f"{nproc} local ranks: {error}".splitlines()[0], "zf.launch says more", True)
    result = f"{nproc} local ranks took {time.perf_counter() - begun:.1f} s to start, add up and end"
    if found != [float(nproc)] * nproc:
        return Finding("ranks", f"{result}, and added up to {found}", "another build of torch", True)
    return Finding("ranks", f"{result}; {', '.join(backends)}")


def _add_up() -> float:
    x = torch.ones(())
    all_reduce_(x, world_group("doctor"))
    return float(x)


def main(nproc: int) -> int:
    """Print the report; return 1 if something does not work, else 0."""
    broken = False
    for found in examine(nproc):
        print(found, flush=True)
        broken |= found.broken
    return int(broken)
