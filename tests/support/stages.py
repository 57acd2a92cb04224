"""The stages of ZeRO, and pipelines around what a test is of.

`around` takes them by name or by ZeRO's number, 0 to 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import zerofn as zf

# What stands before the rest of a pipeline, at work in every micro-step, and what behind it, once for a window.
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one process": ((), ()),
    "data parallel": (("all_reduce",), ()),
    "data parallel, late": ((), ("all_reduce",)),
    "ZeRO-1": ((), ("reduce_scatter",)),
    "ZeRO-2": (("reduce_scatter",), ()),
    "ZeRO-3": (("shard",), ()),
}
STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# Transforms that make a stage where they come first.
FIRST = {"all_reduce": zf.all_reduce, "reduce_scatter": zf.reduce_scatter, "shard": zf.shard}


def around(stage: str | int, *middle: Any, window: Any = None, of: Any = zf) -> list[Any]:
    """The stage's transforms around `middle`, made by the factories of `of`.

    `window`, if given, is what late reductions wait for: it stands in front of them, and at other stages nowhere.
    """
    early, late = PLACES[STAGES[stage] if isinstance(stage, int) else stage]
    held = [window] if late and window is not None else []
    return [*(getattr(of, name)() for name in early), *middle, *held, *(getattr(of, name)() for name in late)]


def front(stage: str | int) -> list[Any]:
    """What a pipeline of the stage begins with; under ZeRO-1 a window is of two micro-steps."""
    return around(stage, window=zf.accumulate(2))


def fronts(*stages: str) -> dict[str, Any]:
    """What makes `front`, by stage."""
    return {stage: partial(front, stage) for stage in stages}
