"""Ctrl-C in the middle of a write waits until the write is done.

Python delivers a signal between two instructions of the main thread. A KeyboardInterrupt between the writes of two
leaves would leave a state that belongs neither to the step before nor to the one after.
"""

from __future__ import annotations

# The C functions: those of `signal` make enums of handlers first, which takes twenty times as long.
import _signal  # type: ignore[import]
import time
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any

# A second Ctrl-C after this many seconds is delivered at once: a write takes milliseconds, unless a collective hangs.
# A sooner one is the same keystroke, or the key held down.
PATIENCE = 1.0


class interrupts_held:
    """While the body runs, SIGINT is only noted; after it the previous handler is called, which usually raises.

    A second SIGINT, a second after the first, goes to that handler at once, as the body may hang. Does nothing inside
    of another one, in threads where Python delivers no signals, and if the handler is not a Python function. Costs two
    calls of C per body, a microsecond together.

    Examples:
        >>> import signal
        >>> try:
        ...     with interrupts_held():
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("to the end")
        ... except KeyboardInterrupt:
        ...     print("and then")
        to the end
        and then
    """

    __slots__ = ("came", "handler")

    def __enter__(self) -> interrupts_held:
        self.came: float | None = None
        self.handler: Any = _signal.getsignal(SIGINT)
        if not callable(self.handler) or getattr(self.handler, "__func__", None) is interrupts_held._note:
            self.handler = None
            return self
        try:
            # Python calls the previous handler for a signal that has come already, and this one from here on.
            _signal.signal(SIGINT, self._note)
        except ValueError:
            # This is not the main thread, and only the main thread gets signals.
            self.handler = None
        return self

    def __exit__(self, *error: object) -> None:
        if self.handler is None or _signal.getsignal(SIGINT) != self._note:
            # In the second case the body set another handler, or `_note` restored the previous one.
            return
        _signal.signal(SIGINT, self.handler)
        if self.came is not None:
            self.handler(SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.came is None:
            self.came = now
        elif now - self.came > PATIENCE:
            _signal.signal(SIGINT, self.handler)
            self.handler(number, frame)


def take_back(actions: list[Callable[[], object]]) -> None:
    """Call functions that undo something, from the last to the first. An interrupted one (Ctrl-C) is called again."""
    while actions:
        actions[-1]()
        actions.pop()
