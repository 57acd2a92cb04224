"""Numbers of a formula that is traced: each remembers how it is computed from the numbers of a step."""

from __future__ import annotations

import inspect
import linecache
import operator
import os
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

# Functions that are told why a formula is no program, or is traced in each step (`zerofn.core.passes`).
TOLD: list[Callable[[str], None]] = []
# The code of functions that run formulas for those who are told: whoever calls them is no formula.
RUN_BY: set[CodeType] = set()


class NotOnLists(Exception):
    """A formula asked for something that a list of tensors does not have; it runs leaf by leaf.

    Args:
        why: what it asked for.
        line: where, if that is not the line that runs.
    """

    def __init__(self, why: str, line: str = ""):
        super().__init__(why)
        if TOLD:
            tell(why, line or line_that_runs())


def tell(why: str, line: str) -> None:
    """Tell those who look why a formula is no program."""
    for told in TOLD:
        told(f"{why}{line}")


def line_that_runs() -> str:
    """The line of a function of the user's that runs, and the function, for a message; empty if none runs."""
    frame = inspect.currentframe()
    while frame is not None and not _of_users(frame):
        frame = None if frame.f_code in RUN_BY else frame.f_back
    return "" if frame is None else line_of(frame.f_code, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """As `line_that_runs`, of the line that raised an error."""
    found, at = "", error.__traceback__
    while at is not None:
        found = line_of(at.tb_frame.f_code, at.tb_lineno) if _of_users(at.tb_frame) else found
        at = at.tb_next
    return found


def line_of(code: CodeType, number: int) -> str:
    """A line of a function, for a message."""
    line = linecache.getline(code.co_filename, number).strip()
    return f", in {code.co_name}, line {number} of {os.path.basename(code.co_filename)}: {line}"


def _of_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("zerofn", "torch")


class Unknown:
    """What several leaves have not in common, such as their path: a formula that asks for it runs leaf by leaf."""

    def _refused(self, *_: Any) -> Any:
        raise NotOnLists("the path or the offset of a leaf")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refused()

    __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refused  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _refused
    __int__ = __index__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = _refused
    __str__ = __repr__ = __format__ = _refused  # type: ignore[assignment]


UNKNOWN: Any = Unknown()

Values = Mapping[Any, Any]


class Number:
    """A number of a formula that is traced: its value now, and how to compute it from the numbers of another step.

    Args:
        of: the value from the numbers of a step.
        now: the value in the step that is traced: a number of Python, or a 0-d tensor of the host, with which torch
            computes in its dtype.
        guards: what the trace has asked numbers so far, and the answers.

    Examples:
        >>> guards = []
        >>> x = Number(lambda given: given["beta"], 0.5, guards)
        >>> (1 - x).of({"beta": 0.25}), bool(x > 0.125), len(guards)
        (0.75, True, 1)
    """

    __slots__ = ("guards", "now", "of")

    def __init__(self, of: Callable[[Values], Any], now: Any, guards: list[Guard]):
        self.of, self.now, self.guards = of, now, guards

    def through(self, function: Callable[[Any], Any]) -> Number:
        """A function of this number."""
        of = self.of
        return Number(lambda given: function(of(given)), function(self.now), self.guards)

    def _with(self, function: Callable[[Any, Any], Any], other: Any, swapped: bool = False) -> Any:
        if not isinstance(other, Number | int | float):
            return NotImplemented
        mine, theirs = self.of, other.of if isinstance(other, Number) else lambda given: other
        if swapped:
            mine, theirs = theirs, mine
        now = other.now if isinstance(other, Number) else other
        value = function(now, self.now) if swapped else function(self.now, now)
        return Number(lambda given: function(mine(given), theirs(given)), value, self.guards)

    def _asked(self, function: Callable[[Any, Any], bool], other: Any) -> Any:
        if not isinstance(other, Number | int | float):
            return NotImplemented
        found = self._with(function, other)
        self.guards.append(Guard(found.of, found.now))
        return found.now

    def __add__(self, other: Any) -> Any:
        return self._with(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._with(operator.add, other, True)

    def __sub__(self, other: Any) -> Any:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(operator.sub, other, True)

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with(operator.mul, other, True)

    def __truediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other, True)

    def __pow__(self, other: Any) -> Any:
        return self._with(operator.pow, other)

    def __rpow__(self, other: Any) -> Any:
        return self._with(operator.pow, other, True)

    def __neg__(self) -> Any:
        return self._with(operator.mul, -1)

    def __lt__(self, other: Any) -> Any:
        return self._asked(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._asked(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._asked(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._asked(operator.ge, other)

    def __eq__(self, other: Any) -> Any:
        return self._asked(operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        return self._asked(operator.ne, other)

    def __bool__(self) -> bool:
        return self._asked(operator.ne, 0)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.lerp(x, y, number)` is a question for the lists among its arguments."""
        lists = [kind for kind in types if kind is not cls]
        if not lists:
            raise NotOnLists(function.__name__)
        return lists[0].__torch_function__(function, types, args, kwargs)

    def _refused(self, *_: Any) -> Any:
        raise NotOnLists("a function of numbers")

    # Python would make these of others, and the trace would keep the number of one step.
    __hash__ = __float__ = __int__ = __index__ = __abs__ = __round__ = __mod__ = __floordiv__ = _refused  # type: ignore[assignment]


class Guard(NamedTuple):
    """A question that a trace has asked its numbers, and the answer."""

    of: Callable[[Values], Any]
    answer: Any
