"""Ctrl-C in the middle of a write: it waits until the write is done.

Python delivers a signal between two instructions of the main thread. A KeyboardInterrupt between the writes of two
leaves would leave a state that is neither that of the step before nor the one after.
"""

from __future__ import annotations

# The functions of C: those of `signal` make enums of handlers first, which takes twenty times as long.
import _signal  # type: ignore[import]
import time
from signal import SIGINT
from types import FrameType
from typing import Any

# Seconds after which a second Ctrl-C is delivered at once: what is held takes milliseconds, unless it hangs in a
# collective. One sooner is the same keystroke, or the key held down.
PATIENCE = 1.0


class interrupts_held:
    """While the body runs, SIGINT is noted; behind it the handler that was set is called, which raises as a rule.

    A second SIGINT, a second after the first, goes to that handler at once: the body may hang. Does nothing inside of
    another one, in threads that Python delivers no signals in, and where the handler is not a function of Python. Two
    calls of C for each body, of a microsecond together.

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
            # It calls the handler of before for what has come, and this one for what comes from here on.
            _signal.signal(SIGINT, self._note)
        except ValueError:
            # Not the main thread, the only one that signals are delivered in.
            self.handler = None
        return self

    def __exit__(self, *error: object) -> None:
        if self.handler is None or _signal.getsignal(SIGINT) != self._note:
            # The second is another handler that the body has set, or the same again after a second interrupt.
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
