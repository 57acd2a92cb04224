"""Methods and attributes of an optimizer that are a part's, or are worked out from its parts, with their docstrings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

from . import unsupported

P = ParamSpec("P")
T = TypeVar("T")


def forwarded(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """`method` of the attribute `part`, as a method of who has that.

    >>> class Words:
    ...     parts = ["a", "b"]
    ...     index = forwarded("parts", list.index)
    >>> Words().index("b")
    1
    """

    @functools.wraps(method)
    def call(whole: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(whole, part), *args, **kwargs)

    return call


class Shown(Generic[T]):
    """A property without a setter, or with one that says what to write instead.

    `property` itself would hide the type of what is read, where it is not a decorator.

    Args:
        read: from the optimizer to the value; its docstring is the attribute's.
        why: why it is not assigned, where somebody may try; else that is refused as of any property.
        instead: the code that does what is meant.

    >>> def two(of): "The number two."; return 2
    >>> class Counts:
    ...     two = Shown(two)
    ...     also = Shown(two, "it is one", "counts = Counts()")
    >>> Counts().two, Counts.two.__doc__
    (2, 'The number two.')
    >>> try:
    ...     Counts().also = 4
    ... except AttributeError as error:
    ...     print("counts = Counts()" in str(error))
    True
    """

    def __init__(self, read: Callable[[Any], T], why: str = "", instead: str = ""):
        self.read, self.why, self.instead = read, why, instead
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, opt: None, owner: Any = None) -> Shown[T]: ...
    @overload
    def __get__(self, opt: object, owner: Any = None) -> T: ...
    def __get__(self, opt: Any, owner: Any = None) -> Any:
        return self if opt is None else self.read(opt)

    def __set__(self, opt: Any, value: Any) -> NoReturn:
        if self.why:
            raise unsupported.replaced(self.name, self.why, self.instead)
        raise AttributeError(f"property {self.name!r} of {type(opt).__name__!r} object has no setter")
