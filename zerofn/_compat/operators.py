"""Operators and kernels of torch's own, and what a profiler is shown of them."""

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
    """What an operator's arguments are called, and which of them it writes into."""
    return op._schema


def has_triton() -> bool:
    """Whether kernels can be compiled for the GPU at hand: triton is there, and takes no older ones."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (7, 0)


def tagged_pointwise(name: str) -> bool:
    """Whether torch says of an operator that each element of what it gives comes from those in the same place."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, type(torch.ops.aten.add)):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


# Whether a profiler of torch's is under way in this thread.
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@contextmanager
def outlasting(name: str) -> Iterator[None]:
    """For beginning work that may outlast the profiler under way, which is shown that it began and does not follow it.

    When gloo ends such work it writes into the profiler's memory from a thread of its own, also where the profiler is
    gone: a bare `all_gather_single(..., async_op=True)` inside `torch.profiler.profile()` and its `wait()` outside kill
    the process in every second run.
    """
    with torch.profiler.record_function(f"zerofn::{name}"):
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


def with_globals(fn: Any, names: dict[str, Any]) -> Any:
    """A copy of a function of torch's own in Python that finds other things under some names of its module.

    Raises:
        RuntimeError: it knows none by these names, in this release of torch.
    """
    missing = [name for name in names if name not in fn.__globals__ or name not in fn.__code__.co_names]
    if missing:
        raise RuntimeError(f"{fn.__name__} of torch {torch.__version__} does not use {', '.join(missing)}")
    copy = types.FunctionType(fn.__code__, {**fn.__globals__, **names}, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
