"""States in which nobody could tell what belongs to a leaf: refused where a transform makes its first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor

from .._errors import explain, kind_of
from .layout import Leaves
from .leaf_entries import is_by_path
from .tree import tree_keys


def check_state(name: str, state: Any, leaves: Leaves, paths: Collection[str]) -> dict[str, Any]:
    """The first state of a hand-written transform; refused if its entries have no names of their own.

    Args:
        name: of the transform.
        state: what its `init_fn` gave for `leaves`.
        leaves: by path.
        paths: of all leaves of the model.
    """
    right = 'return {"value": {path: ... for path in leaves}}'
    if not isinstance(state, dict):
        why = "a state is a dict of entries by name; without one it is {}"
        raise TypeError(explain(f"{name}: an init_fn that gives {kind_of(state)}", why, right))
    if state.keys() == leaves.keys() and any(_of_leaf(x, leaves[path], paths) for path, x in state.items()):
        why = "what belongs to leaves stands below a name: an entry may have the name of a leaf"
        raise ValueError(explain(f"{name}: a state that is by path itself", why, right))
    twice = [key for key, n in Counter(map("/".join, tree_keys(state))).items() if n > 1]
    if twice:
        why = "they are saved and loaded by that name"
        raise ValueError(
            explain(f"{name}: two entries of a state by the name {twice[0]!r}", why, "keys that are strings without /")
        )
    for slot, entry in state.items():
        _check_no_path(name, entry, paths, repr(slot))
    return state


def _of_leaf(x: Any, leaf: Tensor, paths: Collection[str]) -> bool:
    return x.shape == leaf.shape if isinstance(x, Tensor) else not is_by_path(x, paths)


def check_at_owners(name: str, state: dict[str, Any], paths: Collection[str]) -> None:
    """Refuse what owners could not tell: names that leaves have beside entries by path, and those in other containers.

    Args:
        name: of the transform.
        state: of the form that all ranks know.
        paths: of leaves that have owners.
    """
    for slot, entry in state.items():
        _check_below(name, entry, paths, repr(slot))


def _check_below(name: str, x: Any, paths: Collection[str], where: str) -> None:
    if isinstance(x, dict):
        mixed = [k for k, y in x.items() if k in paths and not isinstance(y, dict | tuple | list)]
        named = [k for k, y in x.items() if k not in paths and not _keys(y).isdisjoint(paths)]
        if mixed and named:
            wrong = f"{name}: a state whose entry {where} has {mixed[0]!r} beside {named[0]!r}"
            why = (
                f"{named[0]!r} is by path, and {mixed[0]!r} is the path of a parameter too: what has the name of one\n"
                "is kept by the owner of that parameter alone"
            )
            raise ValueError(
                explain(wrong, why, f"another name, as {'n_' + str(mixed[0])!r}, or that entry in no dict")
            )
    elif not isinstance(x, Tensor | tuple | list) and not _keys(x).isdisjoint(paths):
        wrong = f"{name}: a state by path in the {type(x).__name__} of its entry {where}"
        why = "each owner keeps the entries of its own leaves, which are found in dicts, tuples and lists"
        raise ValueError(
            explain(wrong, why, f"return grads, {{{where.split('[')[0]}: {{path: ... for path in grads}}}}")
        )
    if not is_by_path(x, paths):
        for y, at in _inside(x, where):
            _check_below(name, y, paths, at)


def _check_no_path(name: str, x: Any, paths: Collection[str], where: str) -> None:
    """Refuse dicts by path whose own names are paths too."""
    if isinstance(x, dict) and is_by_path(x, paths) and all([is_by_path(y, paths) for y in x.values()]):
        first = next(iter(x))
        wrong = f"{name}: a state whose entry {where} has dicts by path by the names of parameters, as {first!r}"
        why = "that may be a name or the path of a leaf, whose own state is that dict"
        raise ValueError(explain(wrong, why, f"another name, as {'n_' + str(first)!r}"))
    for y, at in _inside(x, where):
        _check_no_path(name, y, paths, at)


def _inside(x: Any, where: str) -> list[tuple[Any, str]]:
    """What stands in a dict, tuple or list, each with the place of it."""
    found = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, tuple | list) else ()
    return [(y, f"{where}[{key!r}]") for key, y in found]


def _keys(tree: Any) -> set[str]:
    return {key for keys in tree_keys(tree) for key in keys}
