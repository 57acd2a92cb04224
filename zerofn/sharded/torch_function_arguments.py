"""Arguments of torch functions: tensors in lists, columns of `foreach` functions, wholes in the place of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .part_origin import OriginOf

FOREACH = "_foreach_"


class Wholes:
    """Gathers the parts among a function's arguments, each once.

    Args:
        whole: gathers a part; `None` of what is no part.
    """

    def __init__(self, whole: Callable[[Any], Tensor | None]):
        self.whole = whole
        self.found: dict[int, Tensor] = {}

    def of(self, x: Any) -> Any:
        """The same argument with wholes in the place of parts, in lists and dicts too."""
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
    """`Wholes` for the function of that name."""
    return Wholes(lambda x: None if (of := origin_of(x)) is None else of.whole(x, name))


def tensors_in(args: Any) -> Iterator[Tensor]:
    """Tensors among arguments, and in lists among them."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from tensors_in(x)


def columns_of(args: tuple) -> Iterator[tuple]:
    """The arguments of a `foreach` function for each tensor of its lists, as lists of one element."""
    longest = max((len(x) for x in args if type(x) in (list, tuple)), default=0)
    for i in range(longest):
        yield tuple(type(x)(x[i : i + 1]) if type(x) in (list, tuple) else x for x in args)


def side_by_side(args: tuple) -> Iterator[tuple]:
    """Tensors that a `foreach` function takes together: the n-th elements of its lists, and tensors beside them."""
    lists = [x for x in args if type(x) in (list, tuple)]
    alone = [x for x in args if isinstance(x, Tensor)]
    return (column + tuple(alone) for column in zip(*lists, strict=False))
