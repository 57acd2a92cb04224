"""What a transform's state has of some leaves: taken out for a bucket, a leaf or an owner, and put back.

A dict that stands below a name is by path if all of its keys are leaves' paths. It may stand at any depth, in dicts,
lists, tuples and other containers that are nodes of a tree, and may have names beside paths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from enum import Enum
from typing import Any

from torch import Tensor

from .tree import one_level, unflatten


class Place(Enum):
    """What a part of a state is to the leaves."""

    SHARED = "of no leaf"
    BY_PATH = "a dict by path"
    OF_LEAF = "of the leaf under whose path it stands, beside names"


# In place of a tree with dicts by path in it: those of its parts that are not shared, by key or index.
Places = Place | Mapping[Any, "Places"]


def is_by_path(x: Any, paths: Collection[str]) -> bool:
    """Whether this is a dict by path, where it stands below a name.

    >>> is_by_path({"w": 1}, {"w", "b"}), is_by_path({"w": 1, "count": 2}, {"w", "b"}), is_by_path({}, {"w", "b"})
    (True, False, False)
    """
    return isinstance(x, Mapping) and bool(x) and all([key in paths for key in x])


def places(state: Any, paths: Collection[str], below: bool = False) -> Places:
    """Where a state has something of leaves.

    Args:
        state: of a transform, or a part of it.
        paths: of all leaves.
        below: whether it stands below a name: that of an entry may be that of a leaf.
    """
    if isinstance(state, Tensor):
        return Place.SHARED
    if below and is_by_path(state, paths):
        return Place.BY_PATH
    if isinstance(state, dict):
        found = {key: places(x, paths, True) for key, x in state.items()}
        # Beside entries by path it is a name, which a leaf has too.
        if below and all([at is Place.SHARED for k, at in found.items() if k not in paths]):
            found.update({k: Place.OF_LEAF for k, at in found.items() if at is Place.SHARED and k in paths})
    else:
        found = {i: places(x, paths, below) for i, x in enumerate(_parts(state)[0])}
    found = {key: at for key, at in found.items() if at is not Place.SHARED}
    return found or Place.SHARED


def of_leaves(state: Any, at: Places, own: Collection[str]) -> Any:
    """The same state, of the leaves in `own` alone; what is of no leaf as it is.

    >>> state = {"opt": {"m": {"w": 1, "b": 2}, "count": 3}}
    >>> of_leaves(state, places(state, {"w", "b"}), ["b"])
    {'opt': {'m': {'b': 2}, 'count': 3}}
    """
    if at is Place.BY_PATH:
        return _some(state, own)
    if not isinstance(at, dict):
        return state
    if not isinstance(state, dict):
        parts, made_of = _parts(state)
        return made_of([of_leaves(x, at.get(i, Place.SHARED), own) for i, x in enumerate(parts)])
    found = copied(state)
    for key, place in at.items():
        if place is not Place.OF_LEAF:
            found[key] = of_leaves(state[key], place, own)
        elif key not in own:
            del found[key]
    return found


def copied(entry: dict[str, Any]) -> dict[str, Any]:
    """A dict of the same class, with the same entries. The compiler reads no `copy.copy`."""
    return dict(entry) if type(entry) is dict else copy(entry)


def _some(entry: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """An entry by path of some leaves, in a dict of the same class."""
    if type(entry) is dict:
        return {path: entry[path] for path in own if path in entry}
    found = copied(entry)
    for path in entry:
        if path not in own:
            del found[path]
    return found


def overlaid(old: Any, new: Any) -> Any:
    """A state with the entries that another one has; `new` itself where it has all.

    >>> overlaid({"m": {"w": 1, "b": 2}, "count": 3}, {"m": {"b": 5}, "count": 4})
    {'m': {'w': 1, 'b': 5}, 'count': 4}
    """
    if isinstance(new, Tensor):
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        found = {key: x if key not in old or _same(old[key], x) else overlaid(old[key], x) for key, x in new.items()}
        if list(found) == list(old) and all([_same(found[key], x) for key, x in new.items()]):
            return new
        merged = copied(old)
        merged.update(found)
        return merged
    return _by_parts(overlaid, old, new)


def moved(new: Any, old: Any) -> Any:
    """Of nested dicts what is not at its place in `old` already; anything else as it is."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    # Of tuples the compiler cannot tell whether they are one object.
    return {k: moved(x, old.get(k)) for k, x in new.items() if isinstance(x, tuple | list) or x is not old.get(k)}


def map_overlaid(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn(x, was)` of the tensors of a state, and of what the state that it is laid over has there.

    What is in another form than there stays as it is.
    """
    if isinstance(new, Tensor):
        return fn(new, old)
    if isinstance(old, dict) and isinstance(new, dict):
        found = copied(new)
        found.update({key: map_overlaid(fn, old[key], x) for key, x in new.items() if key in old})
        return found
    return _by_parts(lambda was, x: map_overlaid(fn, was, x), old, new)


def _by_parts(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn` over the parts of two containers of one class and length; `new` itself of anything else."""
    if type(old) is not type(new):
        return new
    (before, _), (parts, made_of) = _parts(old), _parts(new)
    if len(before) != len(parts) or not parts:
        return new
    return made_of([fn(was, x) for was, x in zip(before, parts, strict=True)])


def _same(x: Any, y: Any) -> bool:
    """Whether they are one object. Of tuples the compiler cannot tell; they are made of the same parts."""
    return x is y if isinstance(x, dict | Tensor) and isinstance(y, dict | Tensor) else False


def _parts(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What a container has in it, and what makes one of the same class of others; nothing of a leaf."""
    kind = type(x)
    if isinstance(x, tuple | list):
        # A NamedTuple takes its fields one by one.
        return list(x), kind if kind in (tuple, list) else lambda parts: kind(*parts)
    parts, spec = one_level(x)
    return ([], lambda _: x) if len(parts) == 1 and parts[0] is x else (parts, lambda made: unflatten(spec, made))
