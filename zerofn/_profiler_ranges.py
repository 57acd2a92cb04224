"""Named ranges around what runs, for torch.profiler and for a listener in this thread.

Without either, a range costs two checks. The compiler does not see ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from ._compat.tensors import profiler_runs

# Kinds of ranges: a phase of a step, the update half of a transform, its view half, a wait for other ranks.
PHASE, UPDATE, VIEW, WAIT = "phase", "update", "view", "wait"

NOTHING = nullcontext()


class Listener(Protocol):
    """Gets the ranges of a thread; ranges are nested."""

    def begin(self, kind: str, name: str) -> None: ...

    def end(self) -> None: ...

    def moved(self, name: str, read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        """Get what the update whose range is about to end read and wrote: `""` its state, `"params"` parameters."""
        ...


_LISTENER: ContextVar[Listener | None] = ContextVar("zerofn_listener", default=None)
# Returns the listener of this thread. It is a C function, since every step calls it. The compiler does not know it.
heard = _LISTENER.get


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` what this thread runs inside of the `with` block: `begin(kind, name)` and `end()` of each range.

    A range is a phase of a step (kind `"phase"`), the update half or the view half of a transform (`"update"`,
    `"view"`), or a wait for other ranks (`"wait"`). Ranges are nested. Before an `"update"` range ends,
    `moved(name, read, written)` gets what the update read and wrote, as two dicts: `""` is the key of the tensors of
    the transform's state, and `"params"` is the key of parameters.
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def listener() -> Listener | None:
    """The listener of this thread."""
    return None if torch.compiler.is_dynamo_compiling() else heard()


def ranged(kind: str, name: str) -> AbstractContextManager[Any]:
    """A range, as a context.

    Examples:
        >>> ranged(UPDATE, "adamw") is ranged(WAIT, "all_gather")  # nobody listens
        True
    """
    if torch.compiler.is_dynamo_compiling():
        return nullcontext()
    if heard() is None and not profiler_runs():
        return NOTHING
    return _range(heard(), kind, name)


def ranges_wanted() -> bool:
    """Whether a profiler or a listener gets ranges; asked once before many of them."""
    return not torch.compiler.is_dynamo_compiling() and (heard() is not None or profiler_runs())


@contextmanager
def _range(to: Listener | None, kind: str, name: str) -> Iterator[None]:
    shown = f"zerofn::wait for {name}" if kind == WAIT else f"zerofn::{name}"
    with torch.profiler.record_function(shown) if profiler_runs() else NOTHING:
        if to is None:
            yield
            return
        to.begin(kind, name)
        try:
            yield
        finally:
            to.end()
