"""Checks of values in a DeepSpeed configuration: each returns the reason against a value, or `None`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core.arguments import TINY, misfit

Check = Callable[[Any], str | None]


def flag(value: Any) -> str | None:
    """A bool. Text is always true, "false" as well."""
    return None if isinstance(value, bool) else f"{value!r} is neither true nor false"


def count(value: Any) -> str | None:
    """An int from 1."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63
    return None if good else f"{value!r} is no positive int"


def from_zero(value: Any) -> str | None:
    """An int from 0."""
    return None if value == 0 and type(value) is int else count(value) and f"{value!r} is no int from 0"


def between(low: float, high: float = math.inf) -> Check:
    """A number in [low, high), finite in float32."""

    def check(value: Any) -> str | None:
        reason = misfit("it", value, low, high)
        return None if reason is None else f"{value!r}: {reason}"

    return check


def one_of(*values: Any) -> Check:
    """One of `values`, and of its type."""

    def check(value: Any) -> str | None:
        good = any(value == v and type(value) is type(v) for v in values)
        return None if good else f"{value!r} is none of {', '.join(map(str, values))}"

    return check


def or_null(check: Check) -> Check:
    """As `check`, or null."""
    return lambda value: None if value is None else check(value)


def pair(value: Any) -> str | None:
    """Two decays."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return f"{value!r} is no pair of numbers, such as [0.9, 0.999]"
    return next(filter(None, map(between(0.0, 1.0), value)), None)


number = between(0.0)
positive = between(TINY)
decay = between(0.0, 1.0)
