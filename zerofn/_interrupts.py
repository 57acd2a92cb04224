"""A signal in the middle of a write waits until the write is done: Ctrl-C, and every other one with a Python handler.

Python delivers a signal between two instructions of the main thread. An exception that its handler raises between the
writes of two leaves would leave a state that belongs neither to the step before nor to the one after: KeyboardInterrupt
by Ctrl-C, SystemExit by a handler of SIGTERM that ends a preempted job, TimeoutError by one of SIGALRM.
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

SIGNALS = sorted(map(int, _signal.valid_signals()))
_getsignal, _set = _signal.getsignal, _signal.signal


class _Handlers:
    """The handlers of all signals, as they were seen last.

    Attributes:
        seen: one for each of `SIGNALS`; and those that are Python functions, each with its signal.
        outer: the `interrupts_held` whose body runs in the main thread, or ran last.
    """

    seen: tuple[list[Any], list[tuple[int, Any]]] = [], []
    outer: interrupts_held | None = None


class interrupts_held:
    """While the body runs, signals are only noted; after it their previous handlers are called, which may raise.

    It holds those that have a Python handler. A second SIGINT, a second after the first, goes to its handler at once,
    as the body may hang. Does nothing inside of another one, and in threads where Python delivers no signals. Costs a
    few microseconds per body.

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

    __slots__ = ("came", "held", "note")

    def __enter__(self) -> interrupts_held:
        # The signals that are held, with their handlers. They are put back from the end.
        self.held: list[tuple[int, Any]] = []
        outer = _Handlers.outer
        if outer is not None and outer.held and _getsignal(outer.held[0][0]) is outer.note:
            return self
        # When each signal came first and where, in the order in which they came.
        self.came: dict[int, tuple[float, FrameType | None]] = {}
        self.note = self._note
        # Handlers nearly never change: to compare two lists takes less time than to ask each handler whether it is one.
        found, (seen, callables) = list(map(_getsignal, SIGNALS)), _Handlers.seen
        if found != seen:
            callables = [(n, x) for n, x in zip(SIGNALS, found, strict=True) if callable(x)]
            _Handlers.seen = found, callables
        try:
            for entry in callables:
                self.held.append(entry)
                # Python calls the previous handler for a signal that has come already, and this one from here on.
                _set(entry[0], self.note)
            _Handlers.outer = self
        except ValueError:
            # This is not the main thread, and only the main thread gets signals.
            self.held.clear()
        except BaseException:
            # It was raised by the handler of a signal that is not held yet.
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # Handlers are put back, and those whose signals came are called. What one raises stops neither.
        if not self.held:
            return
        try:
            while self.held:
                number, handler = self.held[-1]
                # The body may have set another handler; or `_note` has put the previous one back.
                if _getsignal(number) is self.note:
                    _set(number, handler)
                else:
                    self.came.pop(number, None)
                self.held.pop()
        finally:
            if self.held:
                self.__exit__()
            elif self.came:
                self._deliver()

    def _deliver(self) -> None:
        try:
            number = next(iter(self.came))
            _, frame = self.came.pop(number)
            handler = _getsignal(number)
            if callable(handler):
                handler(number, frame)
        finally:
            if self.came:
                self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number not in self.came:
            self.came[number] = now, frame
        elif number == SIGINT and now - self.came[number][0] > PATIENCE:
            for n, handler in self.held:
                if n == number:
                    _set(number, handler)
                    handler(number, frame)


class Writing(interrupts_held):
    """`Context.written` of a step: signals are held from the first write into the state on, to the end of `with`.

    What a step computes before it writes (norms, overflows, rates, traced formulas) may be interrupted: the state is
    then that of before.

    Attributes:
        add: notes that the transform with this prefix writes.
        prefixes: what was noted.

    Examples:
        >>> import signal
        >>> try:
        ...     with Writing() as written:
        ...         written.add("adamw.")
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("to the end")
        ... except KeyboardInterrupt:
        ...     print("and then")
        to the end
        and then
    """

    __slots__ = ("add", "prefixes")

    def __enter__(self) -> Writing:
        self.held: list[tuple[int, Any]] = []
        self.prefixes: set[str] = set()
        self.add: Callable[[str], object] = self._begin
        return self

    def _begin(self, prefix: str) -> None:
        # It may raise, and then nothing is written.
        interrupts_held.__enter__(self)
        self.prefixes.add(prefix)
        self.add = self.prefixes.add

    def __bool__(self) -> bool:
        return bool(self.prefixes)

    def __exit__(self, *error: object) -> None:
        # `_begin` is a method of this object: a cycle.
        self.add = self.prefixes.add
        if self.held:
            interrupts_held.__exit__(self, *error)


def take_back(actions: list[Callable[[], object]]) -> None:
    """Call functions that undo something, from the last to the first. An interrupted one (Ctrl-C) is called again."""
    while actions:
        actions[-1]()
        actions.pop()
