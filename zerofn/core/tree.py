"""Trees of tensors: their paths, flat lists of their leaves, and functions over them. Only here is optree imported.

optree sorts dict keys and torch's own tree library does not, so no list of leaves ever crosses
from one to the other: everything inside zerofn is a `dict` from path to tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE  # type: ignore[attr-defined]
from torch import Tensor

from .._compat.compiler import pytree
from .._compat.tensors import memories
from .._errors import explain

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
    """As `_entry`, of torch's own library: a mapping's key, a sequence's index, an attribute's name."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Leaves and structure; `None` is a leaf. In a graph by torch's own library, which the compiler reads."""
    if torch.compiler.is_compiling():
        return pytree.tree_flatten(tree, is_leaf)
    if type(tree) is Tensor:
        return [tree], ONE_LEAF
    try:
        return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error


def one_level(node: Tree) -> tuple[list[Any], Any]:
    """The parts of a container, with its structure for `unflatten`; of a leaf, the leaf itself alone."""

    def below(x: Any) -> bool:
        return x is not node

    if torch.compiler.is_compiling():
        return pytree.tree_flatten(node, below)
    return optree.tree_flatten(node, below, none_is_leaf=True, namespace=NAMESPACE)


def tensors_of(tree: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of nested dicts, in no order to rely on, in a third of the time of `flatten`."""
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
    why = "a tree is flattened to its leaves, of which there would be no end"
    right = "containers of tensors, none of which lies inside itself"
    return ValueError(explain(f"a tree that holds itself, at {'.'.join(found)}", why, right))


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
    """What `tree` has at the leaves of a structure, which may be trees themselves."""
    try:
        return spec.flatten_up_to(tree)
    except RecursionError as error:
        raise _endless(tree, error) from error


def parted(tree: Tree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Tree]]:
    """Its tensors, and a function that makes the tree of others in their places."""
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
    return unflatten(spec, [torch.where(pred, n, o) if isinstance(n, Tensor) else n for n, o in pairs])


def clone(tree: Tree) -> Tree:
    """A tree of copies.

    >>> import torch
    >>> clone({"w": torch.ones(1)})
    {'w': tensor([1.])}
    """
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def apart(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """`tree`, with copies of the tensors that share memory with `tensors`, which will be written in place."""
    if torch.compiler.is_compiling():
        # Addresses cannot be compared while tracing. A compiler that generates code removes copies without a use.
        return clone(tree)
    taken = memories(tensors)
    if taken.isdisjoint(memories(tensors_of(tree if type(tree) is dict else {"": tree}))):
        return tree
    values, spec = flatten(tree)
    shared = [isinstance(t, Tensor) and not taken.isdisjoint(memories([t])) for t in values]
    return unflatten(spec, [t.clone() if one else t for t, one in zip(values, shared, strict=True)])


def register_global(cls: type, flatten_fn: Callable, unflatten_fn: Callable) -> None:
    """Make `cls` a node for optree, in every namespace."""
    optree.register_pytree_node(cls, flatten_fn, unflatten_fn, namespace=GLOBAL_NAMESPACE)
