"""Checks pipelines that step in a captured CUDA graph: `attach(capturable=True)`, `make_step(capturable=True)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import NumberRead, numbers_unreadable
from .._errors import bad_leaves, explain
from .pipeline import Pipeline
from .transform import OfTensors, Transform


def check_capturable(pipe: Pipeline, call: str) -> None:
    """Refuse a pipeline whose captured step would not be a step when it is replayed.

    A replay repeats the kernels of the captured step, with its addresses and with the Python numbers that it had. No
    Python code runs.

    Args:
        pipe: the pipeline.
        call: what the user has called, for messages.

    Raises:
        ValueError: a transform reads a number in Python, or needs the host for something else; every one is named.
    """
    bad = [(_shown(part), _why(part)) for part in pipe.updates if not part.facts.capturable]
    on_host = all([leaf.device == "cpu" for leaf in pipe.layout.leaves])
    for part in pipe.parts:
        for name, rate in _rates(part):
            if callable(rate) and (reason := _asks(rate)):
                bad.append((name, reason))
            elif isinstance(rate, Tensor) and rate.is_cpu and not on_host:
                bad.append((name, "its rate is a tensor of the host, and every replay would use its present value"))
    if any(group.size > 1 for group in pipe.step_groups):
        sharing = next((view.name for view in pipe.stages if view.wire is not None), "ranks")
        bad.append((sharing, "ranks exchange messages of the host in every step, which a replay does not"))
    if not bad:
        return
    right = f"{call}(...) without capturable=True: capture forward and backward, and step after graph.replay();\n"
    right += "a rate that is a number or a 0-d tensor of the device, a schedule of zf.schedules,\n"
    right += "or torch's functions of its step;\n"
    right += "Facts(capturable=True) of a transform of your own that reads no number and writes by its context"
    raise ValueError(bad_leaves(f"{call}(capturable=True): these need the host in every step", bad, right))


def _why(part: Transform) -> str:
    for inner in part.parts:
        if not inner.facts.capturable:
            return f"{_shown(inner)} in it: {_why(inner)}"
    return "its update half may read a number, or has its state on the host"


def _shown(part: Transform) -> str:
    text = repr(part)
    return text if len(text) <= 60 and not part.in_turn else part.name


def _rates(t: Transform) -> Iterator[tuple[str, Any]]:
    """The rates in a transform, with the names of their optimizers."""
    if not t.parts:
        yield t.name, t.facts.rate
    for part in t.parts:
        yield from _rates(part)


def _asks(rate: Any) -> str | None:
    """Why a schedule cannot be captured: it asks for the number of its step, or gives one."""
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        with numbers_unreadable():
            found = rate(step)
    except NumberRead:
        return f"its schedule {_name(rate)} asks for the number of its step, which is on the device"
    if isinstance(found, Tensor) or isinstance(rate, OfTensors):
        return None
    return f"its schedule {_name(rate)} returned {found!r}, which would be the rate of every replay"


def _name(rate: Any) -> str:
    return getattr(rate, "__name__", repr(rate))


def refuse_cold_capture() -> None:
    """Refuse the first step of a state in a capture: it moves counters to the device, which a replay would do again."""
    if torch.cuda.is_current_stream_capturing():
        why = "the first step moves the state's counters to the device, and each replay would start from them again"
        right = "state, metrics = step(state, *batch) once or more before the capture, on a side stream as torch asks"
        raise RuntimeError(explain("a step of a new state while a CUDA graph is captured", why, right))
