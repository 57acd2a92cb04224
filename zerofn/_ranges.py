"""Ranges with names around what runs, for torch.profiler and for who listens in this thread

Where neither is there a range is nothing: two questions are asked. The compiler is shown none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from ._compat.operators import profiler_runs

# What a range is of: a phase of a step; the update half of a transform; its view half; a wait for other ranks.
PHASE, UPDATE, VIEW, WAIT = "phase", "update", "view", "wait"

_NOTHING = nullcontext()


class Listener(Protocol):
    """Who is told of ranges: each begins and ends inside of the one before it."""

    def begin(self, kind: str, name: str) -> None: ...

    def end(self) -> None: ...

    def moved(self, name: str, read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        """Of the update that ends: what it was given of states and parameters, and what it gave back, by owner."""
        ...


_LISTENER: ContextVar[Listener | None] = ContextVar("zerofn_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of what this thread does inside."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def listener() -> Listener | None:
    """Who listens in this thread."""
    return None if torch.compiler.is_dynamo_compiling() else _LISTENER.get()


def ranged(kind: str, name: str) -> AbstractContextManager[Any]:
    """A range for `with`.

    >>> ranged(UPDATE, "adamw") is ranged(WAIT, "all_gather")  # nobody listens
    True
    """
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    heard = _LISTENER.get()
    if heard is None and not profiler_runs():
        return _NOTHING
    return _told(heard, kind, name)


def told() -> bool:
    """Whether anybody is told of ranges: asked once before many of them."""
    return not torch.compiler.is_dynamo_compiling() and (_LISTENER.get() is not None or profiler_runs())


@contextmanager
def _told(heard: Listener | None, kind: str, name: str) -> Iterator[None]:
    shown = f"zerofn::wait for {name}" if kind == WAIT else f"zerofn::{name}"
    with torch.profiler.record_function(shown) if profiler_runs() else _NOTHING:
        if heard is None:
            yield
            return
        heard.begin(kind, name)
        try:
            yield
        finally:
            heard.end()
