"""torch's own operators and kernels, and the profiler."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Horizontally fused kernels: the ones behind torch.optim's `fused` and `foreach`.
fused_adam_ = torch._fused_adam_  # type: ignore[attr-defined]
fused_adamw_ = torch._fused_adamw_  # type: ignore[attr-defined]
foreach_norm = torch._foreach_norm  # type: ignore[attr-defined]
foreach_add = torch._foreach_add  # type: ignore[attr-defined]
foreach_mul = torch._foreach_mul  # type: ignore[attr-defined]
foreach_copy_ = torch._foreach_copy_  # type: ignore[attr-defined]


def schema(op: Any) -> Any:
    """The names of an operator's arguments, and which of them it writes."""
    return op._schema


def has_triton() -> bool:
    """Whether triton is installed and supports this GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (7, 0)


def tagged_pointwise(name: str) -> bool:
    """Whether torch tags an operator as pointwise: an element of its result depends on those at its place alone."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, type(torch.ops.aten.add)):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


# Whether torch's profiler runs in this thread.
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@contextmanager
def outlasting(name: str) -> Iterator[None]:
    """To begin asynchronous work that may end after the profiler: it shows that the work began, and does not follow it.

    When such work ends, gloo writes into the profiler's memory from a thread of its own, even after the profiler has
    gone: a bare `all_gather_single(..., async_op=True)` inside `torch.profiler.profile()` with its `wait()` outside
    kills the process in every second run.
    """
    with torch.profiler.record_function(f"zerofn::{name}"):
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


def with_globals(fn: Any, names: dict[str, Any]) -> Any:
    """A copy of a Python function of torch's with other values for some global names.

    Raises:
        RuntimeError: the function does not use these names in this release of torch.
    """
    missing = [name for name in names if name not in fn.__globals__ or name not in fn.__code__.co_names]
    if missing:
        raise RuntimeError(f"{fn.__name__} of torch {torch.__version__} does not use {', '.join(missing)}")
    copy = types.FunctionType(fn.__code__, {**fn.__globals__, **names}, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
