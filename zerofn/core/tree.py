"""Pytrees: the one importer of optree; which tensors of a state belong to which leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from enum import Enum
from operator import attrgetter
from typing import Any

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from torch import Tensor

from .._compat.functorch import pytree
from .._compat.tensors import memories
from .._errors import explain

# ----------------------------------------------------------------------------------------------------------------------
# These functions work on trees of tensors: their paths, flat lists of leaves, maps over them. Only this file imports
# optree.
#
# optree sorts dict keys and torch's own tree library does not, so a list of leaves never passes from one to the other.
# Everything inside zerofn is a `dict` from path to tensor.


# A class registered under this optree namespace, or globally, is a node of a parameter tree.
NAMESPACE = "zerofn"

# The structure of a tree that is one leaf.
ONE_LEAF = optree.treespec_leaf(none_is_leaf=True, namespace=NAMESPACE)

_REQUIRES_GRAD = attrgetter("requires_grad")

Tree = Any


def tree_keys(tree: Tree) -> list[tuple[str, ...]]:
    """The keys on the way to every leaf."""
    if torch.compiler.is_compiling():
        return [tuple(_key(k) for k in keys) for keys, _ in pytree.tree_flatten_with_path(tree)[0]]
    try:
        accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error
    return [tuple(_entry(e) for e in accessor) for accessor in accessors]


def tree_paths(tree: Tree) -> list[str]:
    """The dotted path of every leaf.

    >>> tree_paths({"w": [1, 2], "b": 3})
    ['b', 'w.0', 'w.1']
    """
    return [".".join(keys) for keys in tree_keys(tree)]


def tree_codes(params: Tree) -> list[str]:
    """How each leaf of a tree of parameters is written in Python.

    >>> tree_codes({"w": [1, 2]})
    ["params['w'][0]", "params['w'][1]"]
    """
    accessors = optree.tree_accessors(params, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify("params") for accessor in accessors]


def _entry(entry: Any) -> str:
    name = getattr(entry, "name", None)
    if isinstance(name, str):
        return name
    # A NamedTuple entry knows its field, a mapping its key, a sequence its index.
    field_name = getattr(entry, "field", None)
    return str(field_name if isinstance(field_name, str) else entry.entry)


def _key(key: Any) -> str:
    """As `_entry`, for torch's own tree library: a mapping's key, a sequence's index, an attribute's name."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Leaves and structure; `None` is a leaf. In a graph by torch's own library, which the compiler can trace."""
    if torch.compiler.is_compiling():
        return pytree.tree_flatten(tree, is_leaf)
    if type(tree) is Tensor:
        return [tree], ONE_LEAF
    try:
        return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error


def one_level(node: Tree) -> tuple[list[Any], Any]:
    """The children of a container, with its structure for `unflatten`; for a leaf, the leaf itself."""

    def below(x: Any) -> bool:
        return x is not node

    if torch.compiler.is_compiling():
        return pytree.tree_flatten(node, below)
    return optree.tree_flatten(node, below, none_is_leaf=True, namespace=NAMESPACE)


def tensors_of(tree: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of nested dicts, in no particular order, in a third of the time of `flatten`."""
    found: list[Any] = []
    todo: list[Mapping[str, Any]] = [tree]
    while todo:
        values = todo.pop().values()
        if dict not in set(map(type, values)):
            found += values
            continue
        for x in values:
            (todo if type(x) is dict else found).append(x)
    if set(map(type, found)) <= {Tensor}:
        return found
    return [t for x in found for t in ([x] if isinstance(x, Tensor) else flatten(x)[0]) if isinstance(t, Tensor)]


def followed(trees: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a tensor of nested dicts requires grad; by `map` over C functions, since there are many.

    >>> w = torch.ones(2, requires_grad=True)
    >>> followed([{"a": torch.ones(2)}, {"b": {"c": 1.0, "d": (w, w)}}]), followed([{"a": w.detach()}])
    (True, False)
    """
    todo = list(trees) if torch.is_grad_enabled() else []
    while todo:
        values = todo.pop().values()
        try:
            if any(map(_REQUIRES_GRAD, values)):
                return True
        except AttributeError:  # of a dict, or of a container of a user's
            for x in values:
                if isinstance(x, dict):
                    todo.append(x)
                elif x.requires_grad if type(x) is Tensor else _any_requires_grad(x):
                    return True
    return False


def _any_requires_grad(tree: Tree) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in flatten(tree)[0])


def _endless(tree: Tree, error: RecursionError) -> Exception:
    found = _inside_itself(tree)
    if found is None:
        return error
    why = "flattening it to its leaves would never end"
    right = "containers of tensors, none of which contains itself"
    return ValueError(explain(f"a tree that contains itself, at {'.'.join(found)}", why, right))


def _inside_itself(tree: Tree) -> list[str] | None:
    """The keys on the way to a container that holds one it lies in."""
    # Ways down and the containers on them, instead of a recursion, which is what has failed.
    ways: list[tuple[list[str], list[int], Any]] = [([], [], tree)]
    while ways:
        keys, above, node = ways.pop()
        if id(node) in above:
            return keys
        below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        ways += [([*keys, str(k)], [*above, id(node)], x) for k, x in below]
    return None


def unflatten(spec: Any, leaves: list[Any]) -> Tree:
    """The inverse of `flatten`."""
    if spec is ONE_LEAF:
        return leaves[0]
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten(leaves, spec)
    return optree.tree_unflatten(spec, leaves)


def flatten_up_to(spec: Any, tree: Tree) -> list[Any]:
    """The subtrees of `tree` at the leaves of a structure."""
    try:
        return spec.flatten_up_to(tree)
    except RecursionError as error:
        raise _endless(tree, error) from error


def parted(tree: Tree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Tree]]:
    """The tensors of a tree, and a function that makes the tree with other tensors in their places."""
    leaves, spec = flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def joined(tensors: Iterable[Tensor]) -> Tree:
        others = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            others[i] = x
        return unflatten(spec, others)

    return [leaves[i] for i in places], joined


def tree_map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """`fn` over the leaves of trees of one structure; `None` is a leaf."""
    kind = type(tree)
    if kind is Tensor and not rests:
        return fn(tree)
    if torch.compiler.is_compiling():
        return pytree.tree_map(fn, tree, *rests)
    try:
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error


def select(pred: bool | Tensor, new: Any, old: Any) -> Any:
    """`new` where `pred`, else `old`, over two trees of tensors of one structure.

    A choice, never a product with zero: NaN in the branch not taken must not come through.
    """
    if isinstance(pred, bool):
        return new if pred else old
    news, spec = flatten(new)
    olds, _ = flatten(old)
    pairs = zip(news, olds, strict=True)
    return unflatten(spec, [torch.where(pred.to(n.device), n, o) if isinstance(n, Tensor) else n for n, o in pairs])


def clone(tree: Tree) -> Tree:
    """A tree of copies.

    Args:
        tree: its tensors are copied; other leaves stay.

    Examples:
        >>> import torch
        >>> clone({"w": torch.ones(1)})
        {'w': tensor([1.])}
    """
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


# Numbers of tensors, equal where two of them are one: `memories`, or `objects`.
Numbers = Callable[[Iterable[Tensor]], set[int]]


def objects(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of these tensors as objects, as `memories` gives those of their storages."""
    return set(map(id, tensors))


def apart(tree: Tree, tensors: Iterable[Tensor], numbers: Numbers = memories) -> Tree:
    """`tree`, with copies of tensors that share memory with `tensors`, which will be written in place.

    Args:
        tree: of tensors and others.
        tensors: the tensors that will be written.
        numbers: identifies tensors that are the same: `memories`, or `objects`, which does not see views.
    """
    if torch.compiler.is_compiling():
        # Addresses cannot be compared while tracing. A compiler that generates code removes copies without a use.
        return clone(tree)
    taken = numbers(tensors)
    if taken.isdisjoint(numbers(tensors_of(tree if type(tree) is dict else {"": tree}))):
        return tree
    values, spec = flatten(tree)
    shared = [isinstance(t, Tensor) and not taken.isdisjoint(numbers([t])) for t in values]
    return unflatten(spec, [t.clone() if one else t for t, one in zip(values, shared, strict=True)])


def register_global(cls: type, flatten_fn: Callable, unflatten_fn: Callable) -> None:
    """Make `cls` a node for optree, in every namespace."""
    optree.register_pytree_node(cls, flatten_fn, unflatten_fn, namespace=GLOBAL_NAMESPACE)


# ----------------------------------------------------------------------------------------------------------------------
# These functions take the entries of some leaves out of a transform's state, for a bucket, a leaf or an owner, and put
# them back.
#
# A dict inside a state is keyed by path if all of its keys are paths of leaves. It may stand at any depth, in dicts,
# lists, tuples and other containers that are nodes of a tree, and may have names beside paths.


class Place(Enum):
    """How a part of a state relates to the leaves."""

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
    """Where a state has entries of leaves.

    Args:
        state: of a transform, or a part of it.
        paths: of all leaves.
        below: whether it stands below a name: the name of an entry may be that of a leaf.
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
    """The same state with the entries of leaves in `own` only; entries that belong to no leaf stay.

    Examples:
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
    """A dict of the same class with the same entries. The compiler cannot trace `copy.copy`."""
    return dict(entry) if type(entry) is dict else copy(entry)


def _some(entry: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """An entry by path, with some leaves only, in a dict of the same class."""
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
    """The entries of nested dicts that are not the same object in `old`; other values unchanged."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    # The compiler cannot tell whether two tuples are one object, so tuples and lists are always taken.
    return {k: moved(x, old.get(k)) for k, x in new.items() if isinstance(x, tuple | list) or x is not old.get(k)}


def map_overlaid(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn(x, was)` over the tensors of a state, where `was` is the tensor at the same place of the state below.

    An entry that has another structure there stays unchanged.
    """
    if isinstance(new, Tensor):
        return fn(new, old)
    if isinstance(old, dict) and isinstance(new, dict):
        found = copied(new)
        found.update({key: map_overlaid(fn, old[key], x) for key, x in new.items() if key in old})
        return found
    return _by_parts(lambda was, x: map_overlaid(fn, was, x), old, new)


def _by_parts(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn` over the children of two containers of one class and length; for anything else, `new` itself."""
    if type(old) is not type(new):
        return new
    (before, _), (parts, made_of) = _parts(old), _parts(new)
    if len(before) != len(parts) or not parts:
        return new
    return made_of([fn(was, x) for was, x in zip(before, parts, strict=True)])


def _same(x: Any, y: Any) -> bool:
    """Whether they are one object. The compiler cannot tell for tuples, so their elements are compared."""
    return x is y if isinstance(x, dict | Tensor) and isinstance(y, dict | Tensor) else False


def _parts(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The children of a container, and a function that makes a container of the same class; nothing for a leaf."""
    kind = type(x)
    if isinstance(x, tuple | list):
        # A NamedTuple takes its fields one by one.
        return list(x), kind if kind in (tuple, list) else lambda parts: kind(*parts)
    parts, spec = one_level(x)
    return ([], lambda _: x) if len(parts) == 1 and parts[0] is x else (parts, lambda made: unflatten(spec, made))
