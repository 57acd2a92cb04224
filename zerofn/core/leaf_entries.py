"""What a transform's state has of some leaves: taken out for a bucket, a leaf or an owner, and put back.

A dict that stands below a name is by path if all of its keys are leaves' paths. It may stand at any depth, in dicts,
lists and tuples, and may have names beside paths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from .tree import tree_map


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
    if below and is_by_path(state, paths):
        return Place.BY_PATH
    if isinstance(state, Mapping):
        found = {key: places(x, paths, True) for key, x in state.items()}
        if below:
            found.update({k: Place.OF_LEAF for k, at in found.items() if at is Place.SHARED and k in paths})
    elif isinstance(state, tuple | list):
        found = {i: places(x, paths, below) for i, x in enumerate(state)}
    else:
        return Place.SHARED
    found = {key: at for key, at in found.items() if at is not Place.SHARED}
    return found or Place.SHARED


def of_leaves(state: Any, at: Places, own: Collection[str]) -> Any:
    """The same state, of the leaves in `own` alone; what is of no leaf as it is.

    >>> state = {"opt": {"m": {"w": 1, "b": 2}, "count": 3}}
    >>> of_leaves(state, places(state, {"w", "b"}), ["b"])
    {'opt': {'m': {'b': 2}, 'count': 3}}
    """
    if at is Place.BY_PATH:
        return {path: state[path] for path in own if path in state}
    if not isinstance(at, dict):
        return state
    if not isinstance(state, Mapping):
        return like_items(state, [of_leaves(x, at.get(i, Place.SHARED), own) for i, x in enumerate(state)])
    found = dict(state)
    for key, place in at.items():
        # In backward this is done for each leaf, so a dict of tensors is told without a call.
        if place is Place.BY_PATH:
            entry = state[key]
            found[key] = {path: entry[path] for path in own if path in entry}
        elif place is not Place.OF_LEAF:
            found[key] = of_leaves(state[key], place, own)
        elif key not in own:
            del found[key]
    return found


def overlaid(old: Any, new: Any) -> Any:
    """A state with the entries that another one has; `new` itself where it has all.

    >>> overlaid({"m": {"w": 1, "b": 2}, "count": 3}, {"m": {"b": 5}, "count": 4})
    {'m': {'w': 1, 'b': 5}, 'count': 4}
    """
    if old is new:
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        found = {key: x if key not in old or old[key] is x else overlaid(old[key], x) for key, x in new.items()}
        if list(found) == list(old):
            return new if all([found[key] is x for key, x in new.items()]) else found
        return {**old, **found}
    if isinstance(old, tuple | list) and type(old) is type(new) and len(old) == len(new):
        return like_items(new, list(map(overlaid, old, new)))
    return new


def map_overlaid(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn(x, was)` of what a state has, and of what the state that it is laid over has there; new keys as they are."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: map_overlaid(fn, old[key], x) if key in old else x for key, x in new.items()}
    if isinstance(old, tuple | list) and type(old) is type(new) and len(old) == len(new):
        return like_items(new, [map_overlaid(fn, was, x) for was, x in zip(old, new, strict=True)])
    return fn(new, old) if isinstance(new, Tensor) else tree_map(fn, new, old)


def like_items(like: Any, items: Iterable[Any]) -> Any:
    """A tuple, a list or a NamedTuple of other items; the same one where nothing is another."""
    items = list(items)
    if all(x is y for x, y in zip(like, items, strict=True)):
        return like
    # A NamedTuple takes its fields one by one.
    return type(like)(items) if type(like) in (tuple, list) else type(like)(*items)
