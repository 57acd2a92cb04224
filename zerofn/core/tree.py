"""Pytrees: the one importer of optree; which tensors of a state belong to which leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from torch import Tensor

from .._compat.functorch import pytree
from .._compat.tensors import memories
from .._errors import explain, kind_of

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
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [tuple(map(_entry, accessor)) for accessor in accessors]


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
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


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
    >>> followed([{"a": torch.ones(2)}, {"b": {"c": w}}]), followed([{"a": w.detach()}])
    (True, False)
    """
    todo = list(trees) if torch.is_grad_enabled() else []
    while todo:
        values = todo.pop().values()
        try:
            if any(map(_REQUIRES_GRAD, values)):
                return True
        except AttributeError:  # a dict is among the values
            for x in values:
                if isinstance(x, dict):
                    todo.append(x)
                elif x.requires_grad:
                    return True
    return False


def unflatten(spec: Any, leaves: list[Any]) -> Tree:
    """The inverse of `flatten`."""
    if spec is ONE_LEAF:
        return leaves[0]
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten(leaves, spec)
    return optree.tree_unflatten(spec, leaves)


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
    return optree.tree_map(fn, tree, *rests, none_is_leaf=True, namespace=NAMESPACE)


def select(pred: bool | Tensor, new: Any, old: Any) -> Any:
    """`new` where `pred`, else `old`, over two trees of tensors of one structure.

    It is a choice and not a product with zero, so a NaN in the branch that is not taken does not reach the result.
    """
    if isinstance(pred, bool):
        return new if pred else old
    news, spec = flatten(new)
    olds, _ = flatten(old)
    pairs = zip(news, olds, strict=True)
    return unflatten(spec, [_chosen(pred, n, o) if n is not o and isinstance(n, Tensor) else n for n, o in pairs])


def _chosen(pred: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(pred.to(new.device), new, old)


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


# A function that numbers tensors, and gives equal tensors one number: `memories`, or `objects`.
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
# The state of a transform is nested dicts with tensors at their ends. These functions take the entries of some leaves
# out of a state, for a bucket, a leaf or an owner, and put them back.
#
# A dict inside a state is keyed by path if all of its keys are paths of leaves. It stands below a name, at any depth.


# Where a state has dicts by path. `True` stands for such a dict; keys without one below them are left out.
Places = bool | Mapping[str, "Places"]


def nested(tree: Tree) -> Any:
    """The tensors of a tree of any containers in nested dicts, by the keys on the way to each.

    >>> one = torch.tensor(1)
    >>> nested([{"m": one}, (one, [], None, "word")]), nested(one), nested(())
    ({'0': {'m': tensor(1)}, '1': {'0': tensor(1)}}, tensor(1), {})
    """
    both = zip(tree_keys(tree), flatten(tree)[0], strict=True)
    return under_keys([(keys, x) for keys, x in both if isinstance(x, Tensor)])


def under_keys(entries: Iterable[tuple[Sequence[str], Any]]) -> Any:
    """Nested dicts of these values, each with the keys on the way to it."""
    found: dict[str, Any] = {}
    for keys, x in entries:
        if not keys:
            return x
        at = found
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = x
    return found


def is_by_path(x: Any, paths: Collection[str]) -> bool:
    """Whether this is a dict by path, where it stands below a name.

    >>> is_by_path({"w": 1}, {"w", "b"}), is_by_path({"w": 1, "count": 2}, {"w", "b"}), is_by_path({}, {"w", "b"})
    (True, False, False)
    """
    return isinstance(x, dict) and bool(x) and all([key in paths for key in x])


class Name(NamedTuple):
    """The name of one tensor in a transform's state.

    Attributes:
        slot: keys above the leaf's path, with slashes between them; all keys if it belongs to no leaf.
        path: of the leaf, or `None`.
        below: keys below the path, where a leaf has a dict of its own.
    """

    slot: str
    path: str | None = None
    below: str = ""


def named(state: Mapping[str, Any], paths: Collection[str]) -> list[tuple[Name, Any]]:
    """The tensors of a transform's state with their names, slot by slot.

    >>> [tuple(name) for name, _ in named({"value": {"w": {"m": 1, "w": 2}}, "step": 3}, {"w"})]
    [('value', 'w', 'm'), ('value', 'w', 'w'), ('step', None, '')]
    """
    found: list[tuple[Name, Any]] = []
    renamed(state, paths, lambda name, x: found.append((name, x)))
    return found


def renamed(state: Mapping[str, Any], paths: Collection[str], fn: Callable[[Name, Any], Any]) -> dict[str, Any]:
    """The same state with `fn(name, x)` in the place of each tensor."""

    def over(x: Any, keys: tuple[str, ...], at: int) -> Any:
        """`at`: the place of a path among the keys; 0 if there is none."""
        if not isinstance(x, dict):
            slot, path, below = (keys[:at], keys[at], keys[at + 1 :]) if at else (keys, None, ())
            return fn(Name("/".join(slot), path, "/".join(below)), x)
        at = at or (len(keys) if keys and is_by_path(x, paths) else 0)
        return {key: over(y, (*keys, key), at) for key, y in x.items()}

    return over(dict(state), (), 0)


def places(state: Any, paths: Collection[str], below: bool = False) -> Places:
    """Where a state has entries of leaves.

    Args:
        state: of a transform, or a part of it.
        paths: of all leaves.
        below: whether it stands below a name: the name of an entry may be that of a leaf.
    """
    if not isinstance(state, dict):
        return False
    if below and is_by_path(state, paths):
        return True
    found = {key: places(x, paths, True) for key, x in state.items()}
    return {key: at for key, at in found.items() if at}


def of_leaves(state: Any, at: Places, own: Collection[str]) -> Any:
    """The same state with the entries of leaves in `own` only; entries that belong to no leaf stay.

    Examples:
        >>> state = {"opt": {"m": {"w": 1, "b": 2}, "count": 3}}
        >>> of_leaves(state, places(state, {"w", "b"}), ["b"])
        {'opt': {'m': {'b': 2}, 'count': 3}}
    """
    if at is True:
        return {path: state[path] for path in own if path in state}
    if not isinstance(at, Mapping) or not at:
        return state
    return {**state, **{key: of_leaves(state[key], part, own) for key, part in at.items()}}


def overlaid(old: Any, new: Any) -> Any:
    """A state with the entries that another one has; `new` itself where it has all.

    >>> overlaid({"m": {"w": 1, "b": 2}, "count": 3}, {"m": {"b": 5}, "count": 4})
    {'m': {'w': 1, 'b': 5}, 'count': 4}
    """
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    found = {key: x if x is old.get(key) else overlaid(old.get(key), x) for key, x in new.items()}
    if list(found) == list(old) and all([found[key] is x for key, x in new.items()]):
        return new
    return {**old, **found}


def moved(new: Any, old: Any) -> Any:
    """The entries of nested dicts that are not the same object in `old`; other values unchanged."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    return {k: moved(x, old.get(k)) for k, x in new.items() if x is not old.get(k)}


def map_overlaid(fn: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """`fn(x, was)` over the tensors of a state, where `was` is the tensor at the same place of the state below.

    An entry that is not there stays unchanged.
    """
    if isinstance(new, dict):
        return {k: map_overlaid(fn, old[k], x) if isinstance(old, dict) and k in old else x for k, x in new.items()}
    return fn(new, old)


# ----------------------------------------------------------------------------------------------------------------------
# `check_state` refuses a state of another form than nested dicts of tensors, and keys that are ambiguous with paths.


RIGHT_STATE = 'return {"value": {path: ... for path in leaves}}'


def check_state(name: str, state: Any, leaves: Mapping[str, Tensor], paths: Collection[str]) -> dict[str, Any]:
    """A transform's state, if it is nested dicts of tensors whose keys cannot be mistaken for paths of parameters.

    Args:
        name: of the transform.
        state: what its `init_fn` or its update returned for `leaves`.
        leaves: by path.
        paths: of all leaves of the model.
    """
    if type(state) is not dict:
        why = "a state is a dict of entries by name; without one it is {}"
        raise TypeError(explain(f"{name}: an init_fn that gives {kind_of(state)}", why, RIGHT_STATE))
    own = [isinstance(x, Tensor) and p in leaves and x.shape == leaves[p].shape for p, x in state.items()]
    if own and all(own) and state.keys() == leaves.keys():
        why = "tensors of leaves stand in a named entry, since an entry of the state may have the same name as a leaf"
        raise ValueError(explain(f"{name}: a state that is by path itself", why, RIGHT_STATE))
    check_entries(name, state, paths)
    twice = [key for key, n in Counter(map("/".join, tree_keys(state))).items() if n > 1]
    if twice:
        wrong, why = (
            f"{name}: two entries of a state by the name {twice[0]!r}",
            "they are saved and loaded by that name",
        )
        raise ValueError(explain(wrong, why, "keys without /"))
    return state


def check_form(name: str, state: Mapping[str, Any], paths: Collection[str]) -> None:
    """Refuse what an update returned as its state, if it has something else than tensors and dicts."""
    if not _is_nested(state):
        check_entries(name, state, paths)


def _is_nested(x: Mapping[str, Any]) -> bool:
    kinds = set(map(type, x.values()))
    return kinds <= {Tensor, dict} and (
        dict not in kinds or all([_is_nested(y) for y in x.values() if type(y) is dict])
    )


def check_entries(name: str, state: Mapping[str, Any], paths: Collection[str]) -> None:
    """Refuse entries of a state that are no nested dicts of tensors, or whose keys may be taken for paths."""
    for slot, entry in state.items():
        _check_entry(name, entry, paths, (slot,))


def _check_entry(name: str, x: Any, paths: Collection[str], keys: tuple[Any, ...]) -> None:
    where = repr(keys[0]) + "".join([f"[{key!r}]" for key in keys[1:]])
    if not isinstance(keys[-1], str):
        wrong, why = f"{name}: a state with the key {keys[-1]!r}", "entries are saved and loaded by names"
        raise TypeError(explain(wrong, why, "keys that are strings"))
    if isinstance(x, Tensor):
        return
    if type(x) is not dict:
        why = "a state consists of dicts and tensors only, which files, other ranks and the compiler can handle"
        right = "torch.tensor(0) for a number" if isinstance(x, int | float) else '{"m": ..., "v": ...}, a dict'
        raise TypeError(explain(f"{name}: a state whose entry {where} is {kind_of(x)}", why, right))
    mixed = [key for key, y in x.items() if key in paths and isinstance(y, Tensor)]
    if is_by_path(x, paths):
        first = next(iter(x))
        if all([is_by_path(y, paths) for y in x.values()]):
            wrong = f"{name}: a state whose entry {where} has dicts by path by the names of parameters, as {first!r}"
            why = f"it cannot be told whether {first!r} is such a name, or the path of a leaf with a dict of its own"
            raise ValueError(explain(wrong, why, f"another name, as {'n_' + first!r}"))
        # Below the path of a leaf, keys may be any names.
        paths = ()
    elif mixed:
        other = next(key for key in x if key not in mixed)
        wrong = f"{name}: a state whose entry {where} has {mixed[0]!r} beside {other!r}"
        why = f"{mixed[0]!r} is the path of a parameter, and a dict by path has no other names"
        right = f"{other!r} in an entry of its own; or another name, as {'n_' + mixed[0]!r}"
        raise ValueError(explain(wrong, why, right))
    for key, y in x.items():
        _check_entry(name, y, paths, (*keys, key))
