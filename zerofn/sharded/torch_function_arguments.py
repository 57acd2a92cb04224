"""What functions of torch are given: tensors in lists, columns of `foreach` functions, wholes in the place of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .part_origin import OriginOf

FOREACH = "_foreach_"


class Wholes:
    """What a function of wholes is given in the place of parts, each gathered once.

    Args:
        whole: of a part; `None` of what is none.
    """

    def __init__(self, whole: Callable[[Any], Tensor | None]):
        self.whole = whole
        self.found: dict[int, Tensor] = {}

    def of(self, x: Any) -> Any:
        """A part's whole; of what is none itself; of a list each of its elements."""
        if type(x) in (list, tuple):
            return type(x)(map(self.of, x))
        if type(x) is dict:
            return {k: self.of(y) for k, y in x.items()}
        found = self.found.get(id(x))
        if found is None:
            found = self.whole(x)
            if found is None:
                return x
            self.found[id(x)] = found
        return found


def wholes(name: str, origin_of: OriginOf) -> Wholes:
    """For the function of that name."""
    return Wholes(lambda x: None if (of := origin_of(x)) is None else of.whole(x, name))


def tensors_in(args: Any) -> Iterator[Tensor]:
    """Tensors among arguments, and in lists of them."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from tensors_in(x)


def columns_of(args: tuple) -> Iterator[tuple]:
    """The arguments of a `foreach` function for each tensor of its lists: lists of one."""
    longest = max((len(x) for x in args if type(x) in (list, tuple)), default=0)
    for i in range(longest):
        yield tuple(type(x)(x[i : i + 1]) if type(x) in (list, tuple) else x for x in args)


def side_by_side(args: tuple) -> Iterator[tuple]:
    """What meets in a `foreach` function: the first elements of its lists and what is no list, the second ones, ..."""
    lists = [x for x in args if type(x) in (list, tuple)]
    alone = [x for x in args if isinstance(x, Tensor)]
    return (column + tuple(alone) for column in zip(*lists, strict=False))
