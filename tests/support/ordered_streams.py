"""Which accesses to memory nothing orders, found on the device that does not exist: a happens-before checker.

Imported in a process of `virtual_cuda.processes` of its own. Each stream, and the host, has a vector clock. Every
operator is an access to ranges of bytes on the current stream, and so is each copy that the host does not wait for.

Two accesses to one range, one of them a write, on two streams that nothing orders, are a race. So is memory of the
device that is freed while another stream may still use it: the allocator hands it out again on the stream on which it
was allocated, unless `record_stream` has named the other stream.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import virtual_cuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from virtual_steps import formulas_by_torch

import zerofn as zf
from zerofn.core import executor, offload  # inside: how large a bucket is, a step that raises between two of them
from zerofn.eager import in_backward  # inside: how many bytes of gradients wait
from zerofn.kernels import program as program_module  # inside: as above

HOST = "host"
# Operators that read and write no elements, besides those that launch nothing.
NOTHING = {"is_pinned", "_pin_memory", "pin_memory", "empty_like", "new_empty", "new_empty_strided"}


class Access(NamedTuple):
    stream: str
    time: int
    low: int
    high: int
    writes: bool
    what: str


class Memory:
    """A storage: where it was allocated, which streams use it with the allocator's knowledge, and who used it."""

    def __init__(self, stream: str, there: bool, nbytes: int, what: str):
        self.stream, self.there, self.nbytes, self.what = stream, there, nbytes, what
        self.recorded: set[str] = set()
        self.accesses: list[Access] = []


class Stream:
    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0
    numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.device, self.name = torch.device("cuda", 0), f"stream {next(self.numbers)}"

    def wait_stream(self, other: Stream) -> None:
        join(self.name, CLOCKS[other.name])

    def wait_event(self, event: Event) -> None:
        join(self.name, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(HOST, CLOCKS[self.name])

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_: Any, **__: Any):
        self.clock: Counter[str] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Counter(CLOCKS[(stream or CURRENT[-1]).name])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or CURRENT[-1]).wait_event(self)

    def synchronize(self) -> None:
        join(HOST, self.clock)

    def query(self) -> bool:
        return True


CLOCKS: dict[str, Counter[str]] = defaultdict(Counter)
MEMORY: dict[int, Memory] = {}
FOUND: list[str] = []
KEYS = itertools.count(1)
CURRENT = [Stream()]


def join(stream: str, clock: Counter[str]) -> None:
    mine = CLOCKS[stream]
    for name, time in clock.items():
        mine[name] = max(mine[name], time)


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    CURRENT.append(stream)
    try:
        yield
    finally:
        CURRENT.pop()


torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, on  # type: ignore[misc, assignment]
torch.cuda.current_stream = lambda device=None: CURRENT[-1]  # type: ignore[assignment]
torch.Tensor.record_stream = lambda self, stream: memory(self).recorded.add(stream.name)  # type: ignore[assignment]


def memory(x: Tensor) -> Memory:
    storage: Any = x.untyped_storage()
    if not hasattr(storage, "number"):
        storage.number = next(KEYS)
        MEMORY[storage.number] = Memory(CURRENT[-1].name, x.is_cuda, storage.nbytes(), virtual_cuda._where())
        weakref.finalize(storage, freed, storage.number)
    return MEMORY[storage.number]


def freed(key: int) -> None:
    gone = MEMORY.pop(key)
    # What the host has waited for is before all that it launches later.
    now = CLOCKS[gone.stream] | CLOCKS[HOST]
    for used in gone.accesses if gone.there else ():
        if used.stream not in (gone.stream, HOST, *gone.recorded) and now[used.stream] < used.time:
            FOUND.append(f"{used.what} on {used.stream}, and freed by {virtual_cuda._where()}")


def access(x: Tensor, stream: str, writes: bool, what: str) -> None:
    if not x.numel():
        return
    low = x.storage_offset() * x.element_size()
    high = low + (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()
    mine, time, kept = memory(x), CLOCKS[stream][stream], []
    for other in mine.accesses:
        before = other.stream == stream or CLOCKS[stream][other.stream] >= other.time
        if not before and (writes or other.writes) and other.low < high and low < other.high:
            FOUND.append(f"{other.what} on {other.stream}, and {what} on {stream}")
        if not (before and writes and low <= other.low and other.high <= high) and other[2:] != (
            low,
            high,
            writes,
            what,
        ):
            kept.append(other)
    mine.accesses = [*kept, Access(stream, time, low, high, writes, what)]


class Checker(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch.DisableTorchFunctionSubclass():
            note(func, args, kwargs or {}, out)
        return out


def note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    name = func._schema.name.split("::")[1]
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    for x in made:
        memory(x)
    if name in virtual_cuda.FREE or name in NOTHING or func.is_view:
        return
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument in func._schema.arguments:
        tensors = [x for x in tree_leaves(given.get(argument.name)) if isinstance(x, Tensor)]
        # Fused optimizers write gradients only if they are given a scale.
        writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        (written if writes else read).extend(() if name.endswith("_like") else tensors)
    written += [x for x in made if not any(x is y for y in written)]
    every = [*read, *written]
    there = any(x.is_cuda for x in every)
    stream = CURRENT[-1].name if there else HOST
    if there:
        # A launch comes after all that the host knows of.
        join(stream, CLOCKS[HOST])
    CLOCKS[stream][stream] += 1
    what = f"{name} of {virtual_cuda._where()}"
    for tensors, writes in (read, False), (written, True):
        for x in tensors:
            access(x, stream, writes, what)
    crossing = there and any(x.is_cpu for x in every) and name in ("copy_", "_to_copy")
    free = given.get("non_blocking") and all(x.is_cuda or x.is_pinned() for x in every)
    if name in virtual_cuda.WAITS or (crossing and not free):
        join(HOST, CLOCKS[stream])


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """What is unordered inside is in `FOUND`."""
    FOUND.clear()
    with Checker():
        yield
    gc.collect()


# ---------------------------------------------------------------- the checker itself


def _beside(x: Tensor, stream: Stream) -> Tensor:
    stream.wait_stream(CURRENT[-1])
    with on(stream):
        return x.add_(1)


def _read_early(x: Tensor, stream: Stream) -> Any:
    return _beside(x, stream) * 2


def _read(x: Tensor, stream: Stream) -> Any:
    _beside(x, stream)
    CURRENT[-1].wait_stream(stream)
    return x * 2


def _free_early(x: Tensor, stream: Stream) -> Any:
    _beside(x, stream)


def _recorded(x: Tensor, stream: Stream) -> Any:
    _beside(x, stream).record_stream(stream)  # type: ignore[arg-type]


def _host(x: Tensor, stream: Stream, waits: bool = True) -> Any:
    home = torch.empty(8, pin_memory=True)
    home.copy_(x, non_blocking=True)
    if waits:
        CURRENT[-1].record_event().synchronize()
    return home + 1


def _host_early(x: Tensor, stream: Stream) -> Any:
    return _host(x, stream, False)


def judged() -> dict[str, bool]:
    """Whether the checker finds something in each of these programs."""
    found = {}
    for program in (_read, _read_early, _recorded, _free_early, _host, _host_early):
        with checking():
            program(torch.ones(8, device="cuda"), Stream())
        found[program.__name__] = bool(FOUND)
    return found


# ---------------------------------------------------------------- offload


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Failed(RuntimeError): ...


def _fail(*_: Any) -> Any:
    raise Failed


def steps(opt: Any, model: nn.Module, n: int = 3) -> None:
    for _ in range(n):
        model(torch.randn(4, 8).cuda()).square().sum().backward()
        opt.step()
        opt.zero_grad()


def _whole(opt: Any, model: nn.Module) -> None:
    steps(opt, model)


def _failed_backward(opt: Any, model: Any) -> None:
    hook = model.layers[3].weight.register_hook(_fail)
    with contextlib.suppress(Failed):
        model(torch.randn(4, 8).cuda()).square().sum().backward()
    hook.remove()
    opt.zero_grad()


def _failed_step(opt: Any, model: nn.Module) -> None:
    plain, calls = offload.Conveyor.take_back, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.Conveyor, "take_back", lambda *args: _fail() if next(calls) == 3 else plain(*args))
        with contextlib.suppress(Failed):
            steps(opt, model, 1)
    opt.zero_grad()


def _two_streams(opt: Any, model: nn.Module) -> None:
    other = Stream()
    for _ in range(2):
        steps(opt, model, 1)
        other.wait_stream(CURRENT[-1])
        with on(other):
            steps(opt, model, 1)
        CURRENT[-1].wait_stream(other)


def _read_states(opt: Any, model: nn.Module) -> None:
    for _ in range(2):
        steps(opt, model, 1)
        for slots in opt.state.values():
            for x in slots.values():
                torch.as_tensor(x).sum()
        opt.load_state_dict(opt.state_dict())
        steps(opt, model, 1)


CHAINS: dict[str, Callable[[], zf.Transform]] = {
    "adamw": lambda: zf.offload(zf.adamw(1e-3)),
    "accumulation, clip": lambda: zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.offload(zf.adamw(1e-3))),
    "two": lambda: zf.chain(zf.skip_nonfinite(), zf.offload(zf.adamw(1e-3)), zf.offload(zf.ema(0.9))),
    "low precision": lambda: zf.chain(
        zf.precision(store_dtype=torch.bfloat16, param_dtype=torch.float32), zf.offload(zf.low_precision_adam(1e-3))
    ),
    "codes": lambda: zf.offload(zf.quantize(zf.adamw(1e-3))),
    "groups": lambda: zf.offload(
        zf.partition({"a": zf.muon(1e-2), "b": zf.adamw(1e-3)}, lambda p: "a" if "weight" in p else "b")
    ),
    "on the host": lambda: zf.offload(zf.adamw(1e-3), compute="host"),
}
PROGRAMS = {
    "whole steps": _whole,
    "a backward that fails": _failed_backward,
    "a step that fails": _failed_step,
    "two streams": _two_streams,
    "states are read and loaded": _read_states,
}


def offloaded(chain: str, program: str, within: bool, broken: bool = False) -> tuple[list[str], int, int]:
    """What is unordered; the bytes of states on the device after a step; and how many copies came to the device.

    Args:
        chain: of `CHAINS`.
        program: of `PROGRAMS`.
        within: whether updates run in backward.
        broken: whether a copy that nobody waits for is forgotten.
    """
    copies = 0

    def copy(self: Any, pairs: Any) -> Any:
        nonlocal copies
        copies += pairs[0][0].is_cuda
        return plain(self, pairs)

    plain = offload.CopyQueue.copy
    with pytest.MonkeyPatch.context() as patch, formulas_by_torch():
        patch.setattr(executor, "DEVICE_BUCKET_BYTES", 1)
        patch.setattr(executor, "BUCKET_BYTES", 8)
        patch.setattr(in_backward, "TOGETHER", 64)
        patch.setattr(program_module, "triton_for", lambda device: None)
        patch.setattr(offload.CopyQueue, "copy", copy)
        if broken:
            patch.setattr(offload.PendingCopy, "release", lambda self: None)
        offload.queue.cache_clear()
        model = Layers().cuda()
        with checking():
            opt = zf.attach(model, CHAINS[chain](), in_backward=within)
            steps(opt, model, 2)
            PROGRAMS[program](opt, model)
            gc.collect()
            kept = sum(x.nbytes for x in MEMORY.values() if "core/offload.py" in x.what and x.there)
            opt.detach()
            del opt, model
        return sorted(set(FOUND)), kept, copies
