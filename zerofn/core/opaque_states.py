"""States in classes that trees do not look into: refused where they have tensors.

Nobody would copy, save, load or move those: a parameter that is kept in one is written by the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from .tree import Tree, flatten, tree_keys

# What is not searched: it has no tensors, or is no part of a state.
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device, torch.Generator),
    *(FunctionType, BuiltinFunctionType, ModuleType),
)
# So many objects inside of one are looked at.
MANY = 10_000


def open_state(name: str, state: Tree) -> Tree:
    """The state of the transform `name`; a `TypeError` where it has tensors in an object that is no node of a tree."""
    if torch.compiler.is_compiling():
        return state
    values = flatten(state)[0]
    if all([isinstance(x, (Tensor, *PLAIN)) for x in values]):
        return state
    for keys, x in zip(tree_keys(state), values, strict=True):
        if not isinstance(x, Tensor) and (inside := _way_to_a_tensor(x)) is not None:
            at = ".".join([*keys, *inside])
            wrong = f"{name}, whose state is or has a {type(x).__name__}, with a tensor at {at}"
            why = (
                "a state is a tree of tensors, and trees do not look into this class: a parameter that is kept there\n"
            )
            why += "would be written by the next step, and nothing there is saved, loaded or moved"
            raise TypeError(explain(wrong, why, _right(type(x), inside)))
    return state


def _way_to_a_tensor(x: Any) -> list[str] | None:
    """The names on the way from an object to a tensor that it has; `None` if there is none."""
    seen: dict[int, Any] = {}
    todo: deque[tuple[list[str], Any]] = deque([([], x)])
    while todo and len(seen) < MANY:
        names, node = todo.popleft()
        if isinstance(node, Tensor):
            return names
        if id(node) not in seen and not isinstance(node, PLAIN):
            seen[id(node)] = node
            todo += [([*names, str(name)], part) for name, part in _parts(node)]
    return None


def _parts(x: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        yield from x.items()
    elif isinstance(x, list | tuple | set | frozenset | deque):
        yield from enumerate(x)
    elif isinstance(x, partial):
        yield from enumerate([*x.args, *x.keywords.values()])
    yield from getattr(x, "__dict__", {}).items()
    for kind in type(x).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, name):
                yield name, getattr(x, name)


def _right(kind: type, inside: list[str]) -> str:
    """What to keep instead, and how the class is made a node."""
    name = kind.__name__
    if kind.__module__ in ("builtins", "collections") or issubclass(kind, Mapping):
        return "a dict, a list, a tuple or a NamedTuple of tensors"
    of, back = f"((s.{inside[0] if inside else '...'},), None)", f"lambda _, parts: {name}(*parts)"
    if issubclass(kind, SimpleNamespace):
        of, back = "(vars(s).values(), (*vars(s),))", f"lambda names, parts: {name}(**dict(zip(names, parts)))"
    register = f"optree.register_pytree_node({name}, lambda s: {of}, {back}, namespace='zerofn')"
    if is_dataclass(kind):
        register = f"optree.dataclasses.dataclass({name}, namespace='zerofn')"
    return f"a NamedTuple or a dict; or once, before:\n         {register}"
