"""A CUDA device that does not exist: real tensors on `cuda:0` over the host's memory, and a log of what a step asks.

Imported first in a process of its own (`processes`), before torch: torch asks for a device's guard once. Values,
shapes and autograd are the CPU's. The log has one row for each kernel that a GPU would launch, each copy, and each wait
of the host, with the line of code that asked for it. It says nothing of time, streams, the allocator, or bits of CUDA's
kernels.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++")


def processes() -> ProcessPoolExecutor:
    """One process with the device; `pool.submit(virtual_cuda.call, "module", "function", *args)` runs there."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=install)


def call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    # By name: the modules import torch, and this one must be first.
    return getattr(import_module(module), function)(*args, **kwargs)


def _library() -> Path:
    """The built library; it is built once for each torch and source, in some 20 seconds."""
    torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
    about = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    folder = Path(tempfile.gettempdir()) / f"zerofn-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"virtual_cuda_{hashlib.sha256(about).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
            linked = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
            made = built.with_suffix(f".{os.getpid()}")
            command = [str(COMPILER), "-O0", "-std=c++20", "-shared", "-fPIC", *includes, str(SOURCE), "-o", str(made)]
            subprocess.run([*command, *linked], check=True, capture_output=True)
            os.replace(made, built)
    return built


# ---------------------------------------------------------------- the log


class Row(NamedTuple):
    """One thing that was asked of the device.

    Attributes:
        kind: `"launch"`, `"wait"` (the host waits for the device), `"copy"` (the host does not wait), `"stream"`.
        name: of the operator.
        count: launches.
        where: lines of code that asked for it, the innermost first; those of zerofn, and of torch's optimizers.
    """

    kind: str
    name: str
    count: int
    where: str


# Operators that return something to the host, or whose result has a shape that only the device knows.
WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select", "unique_dim", "unique_consecutive"),
    *("is_nonzero", "repeat_interleave", "item", "_linalg_eigh"),
}
# Operators that launch nothing: metadata, and memory.
FREE = {
    *("empty", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "resize_", "unfold", "record_stream"),
    *("detach", "alias", "_unsafe_view", "view_as_real", "view_as_complex", "is_same_size", "is_set_to", "_conj"),
}
# As ATen/native/cuda/MultiTensorApply.cuh packs tensors and chunks into launches.
MOST, CHUNK, BLOCKS = (110, 64, 48, 36, 30), 65536, 320


class Log:
    def __init__(self) -> None:
        self.rows: list[Row] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[Row]]:
        """What is asked of the device inside."""
        before, self.rows = self.rows, []
        try:
            yield self.rows
        finally:
            self.rows = before

    def add(self, kind: str, name: str, count: int = 1) -> None:
        if self.rows is not None:
            self.rows.append(Row(kind, name, count, _where()))

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        before, self.rows = self.rows, None
        try:
            yield
        finally:
            self.rows = before


LOG = Log()


def count(rows: list[Row], kind: str) -> int:
    return sum(row.count for row in rows if row.kind == kind)


def places(rows: list[Row], kind: str) -> dict[str, int]:
    """How often something was asked for, by operator and place."""
    found: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row.kind == kind:
            found[f"{row.name} at {row.where}"] += row.count
    return dict(found.most_common())


def _where() -> str:
    frame: Any = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/zerofn/" in name or "/torch/optim/" in name:
            found.append(f"{name.rpartition('/zerofn/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def _launches(lists: int, numels: list[int], name: str) -> int:
    depth = 4 if name.startswith("_fused") else min(lists + (0 if name.endswith("_") else 1), 5)
    launches = tensors = blocks = 0
    for numel in numels:
        if not numel:
            continue
        tensors += 1
        chunks = -(-numel // CHUNK)
        for i in range(chunks):
            blocks += 1
            if (tensors == MOST[depth - 1] and i == chunks - 1) or blocks == BLOCKS:
                launches, blocks, tensors = launches + 1, 0, int(i < chunks - 1)
    return max(1, launches + (blocks > 0))


def _heard(name: bytes, copies: int, non_blocking: int, lists: int, length: int, numels: Any) -> None:
    if LOG.rows is None:
        return
    plain = name.decode()
    if copies in (1, 2):
        LOG.add("copy" if non_blocking else "wait", "copy to the host" if copies == 1 else "copy to the device")
    elif plain in WAITS:
        LOG.add("wait", plain)
    elif plain.startswith(("_foreach", "_fused", "_amp_foreach")):
        LOG.add("launch", plain, _launches(lists, [numels[i] for i in range(length)], plain))
    elif plain not in FREE:
        LOG.add("launch", plain)


# ---------------------------------------------------------------- torch.cuda


class Stream:
    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device

    def wait_stream(self, other: Any) -> None:
        LOG.add("stream", "wait_stream")

    def wait_event(self, event: Any) -> None:
        LOG.add("stream", "wait_event")

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        LOG.add("wait", "stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None:
        LOG.add("stream", "event.wait")

    def synchronize(self) -> None:
        LOG.add("wait", "event.synchronize")

    def query(self) -> bool:
        return True


class Device:
    """`torch.cuda.device`."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


KEPT: list[Any] = []


def install() -> None:
    """Make the device known to this process, in which torch has not been imported."""
    assert "torch" not in sys.modules, "the device must be there before torch"
    # Triton runs kernels on the host's memory, which is the device's too.
    os.environ["TRITON_INTERPRET"] = "1"
    built = _library()
    # Torch asks for the runtime of CUDA when it is imported, and never again.
    library = ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)
    import torch

    heard = ctypes.CFUNCTYPE(
        None,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int64),
    )(_heard)
    KEPT.append(heard)
    library.virtual_install(heard)
    library.virtual_resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    torch.set_num_threads(1)

    stream, private = Stream(), torch._C
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_initialized = cuda.is_available = lambda: True
    cuda.current_device = private._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.device = Device
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda s: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: LOG.add("wait", "cuda.synchronize")
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "a device that does not exist"
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0

    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        library.virtual_resize(self._cdata, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: LOG.add("stream", "record_stream")  # type: ignore[assignment]
    for name in ("tensor", "as_tensor"):
        _logged(torch, name)
    for name in list(vars(torch)):
        if name.startswith("_foreach_"):
            _one_by_one(torch, name)


def _one_by_one(torch: Any, name: str) -> None:
    """Lists of tensors on several devices, as torch's own operators take them: one tensor after the other."""
    plain = getattr(torch, name)

    def over(*args: Any, **kwargs: Any) -> Any:
        lists = [i for i, x in enumerate(args) if isinstance(x, list | tuple)]
        if not lists or len({x.device for x in args[lists[0]]}) < 2:
            return plain(*args, **kwargs)
        alone = [[[x[n]] if i in lists else x for i, x in enumerate(args)] for n in range(len(args[lists[0]]))]
        found = [plain(*one, **kwargs) for one in alone]
        return None if found[0] is None else [x for (x,) in found]

    setattr(torch, name, over)


def _logged(torch: Any, name: str) -> None:
    """These copy from the host inside of C++, where no operator is seen."""
    plain = getattr(torch, name)

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda" or isinstance(data, torch.Tensor):
            return plain(data, *args, **({} if device is None else {"device": device}), **kwargs)
        return plain(data, *args, **kwargs).to(device)

    setattr(torch, name, made)
