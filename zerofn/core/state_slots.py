"""What the tensors in a transform's state belong to: its slot, the leaf, the place in the leaf's own tree; and whether
they lie along the leaf, element by element, and are cut as it is.

That is asked of `init`, which is handed leaves of two lengths, the long ones without memory: what is as long as the
leaf both times lies along it. What this rank has of a state would tell less: anything may happen to be as long as a
piece.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chain import complete
from .facts import OF_PIECES
from .layout import Layout, Leaf, Leaves, Placement, canonical
from .partition import replace_innermost
from .slot_forms import ALONG, FIXED, OTHER, SlotForm
from .start_forms import some_numbers
from .transform import Transform, TransformState, no_state
from .tree import Tree, flatten, tree_keys

# A length that no other tensor is likely to have; few rows of a wide leaf.
SHORT = 11
# How much longer the second leaf is: more than a block of elements that share a number.
LONG = 2**20


class Name(NamedTuple):
    """The name of one tensor in a transform's state.

    Attributes:
        slot: keys above the leaf's path, with slashes between them; all keys where it belongs to no leaf.
        path: of the leaf, or `None`.
        below: keys below the path, where the state of a leaf is a tree.
    """

    slot: str
    path: str | None = None
    below: str = ""


def names_in(owner: str, own: Tree, paths: Collection[str], placement: Placement) -> list[Name]:
    """The names of what a transform's state has, in the order of `flatten`.

    A leaf's path stands below a key, the first of which may be a leaf's path as well, among paths alone.

    >>> own = {"value": {"w": {"m": 1, "w": 2}}, "step": 3}
    >>> [tuple(name) for name in names_in("mine", own, {"w"}, Placement())]
    [('step', None, ''), ('value', 'w', 'm'), ('value', 'w', 'w')]
    """
    if (found := _names_by_path(own, paths)) is not None:
        return found
    keys = tree_keys(own)
    beside: dict[tuple[str, ...], bool] = {}
    for here in keys:
        for i in range(1, len(here)):
            beside[here[:i]] = beside.get(here[:i], True) and here[i] in paths
    known = placement.forms_of(owner)
    return [_name(here, paths, beside, known) for here in keys]


def _names_by_path(own: Tree, paths: Collection[str]) -> list[Name] | None:
    """The names of the usual state, of tensors and of dicts of tensors by path; `None` of any other."""
    if type(own) is not dict or set(map(type, own)) != {str}:
        return None
    found = []
    for slot in sorted(own):
        x = own[slot]
        if type(x) is Tensor:
            found.append(Name(slot))
        elif type(x) is dict and set(map(type, x.values())) == {Tensor} and all([path in paths for path in x]):
            found += [Name(slot, path) for path in sorted(x)]
        else:
            return None
    return found


def _name(
    keys: tuple[str, ...], paths: Collection[str], beside: dict[tuple[str, ...], bool], known: Collection
) -> Name:
    found = [(i, Name("/".join(keys[:i]), keys[i], "/".join(keys[i + 1 :]))) for i in range(1, len(keys))]
    found = [(i, name) for i, name in found if keys[i] in paths]
    for _, name in found:
        if (name.slot, name.below) in known:
            return name
    for i, name in found:
        # A name among others that are no paths, as of a leaf's own dict, is a path at the end alone.
        if beside[keys[:i]] or i == len(keys) - 1:
            return name
    return Name("/".join(keys))


def with_slots(layout: Layout, members: Sequence[Transform]) -> Layout:
    """The same layout, which knows how what transforms keep of leaves is shaped."""
    found: list[tuple[str, Transform, Set[str], str]] = []
    for t in complete(tuple(members)):

        def note(inner: Transform, paths: Set[str], where: str, name: str = t.name) -> Transform:
            if inner.init_fn is not no_state:
                found.append((name, inner, paths, where))
            return inner

        replace_innermost(t, note, layout)
    slots = tuple([form for name, t, paths, where in found for form in _forms(name, t, paths, where, layout)])
    return canonical(replace(layout, placement=replace(layout.placement, slots=slots)))


def _forms(owner: str, t: Transform, paths: Set[str], where: str, layout: Layout) -> list[SlotForm]:
    """The forms of the slots of one transform; none if it makes no state of such leaves."""
    leaves = [leaf for leaf in layout.trainable if leaf.path in paths]
    # A tensor without memory takes torch fifty times as long to make as a small one.
    short = _tried(t, leaves, layout, "cpu", SHORT) or _tried(t, leaves, layout, "meta", SHORT)
    if short is None or set(map(type, short.state.values())) == {Tensor}:
        # What it raises of the leaves themselves is raised where their state is made; counters are of no leaf.
        return []
    kinds: dict[Any, list[str]] = {}
    for leaf in leaves:
        kinds.setdefault((leaf.shape, leaf.dtype, short.of_leaf(leaf.path)), []).append(leaf.path)
    # Many leaves are of few kinds: one of each is asked for, all where `init` needs another one.
    firsts = {of_kind[0]: of_kind for of_kind in kinds.values()}
    long = _tried(t, [leaf for leaf in leaves if leaf.path in firsts], layout, "meta", LONG)
    if long is None:
        firsts = {leaf.path: [leaf.path] for leaf in leaves}
        # Of an `init` that asks for the numbers.
        long = _tried(t, leaves, layout, "meta", LONG) or _tried(t, leaves, layout, "cpu", 2 * SHORT)
    return [] if long is None else _compared(owner, where, short, long, firsts)


@dataclass(frozen=True)
class _Tried:
    """The state of leaves of one length.

    Attributes:
        leaves: the leaves by path.
        state: theirs.
        shapes: of each tensor of a leaf.
    """

    leaves: Leaves
    state: TransformState
    shapes: dict[Name, tuple[int, ...] | None]

    @cached_property
    def _by_path(self) -> dict[str | None, list[tuple[str, str, tuple[int, ...] | None]]]:
        found: dict[str | None, list[tuple[str, str, tuple[int, ...] | None]]] = {}
        for name, shape in self.shapes.items():
            found.setdefault(name.path, []).append((name.slot, name.below, shape))
        return found

    def of_leaf(self, path: str) -> tuple[Any, ...]:
        """The slots of a leaf, and their shapes."""
        return tuple(self._by_path.get(path, ()))


def _tried(t: Transform, leaves: Sequence[Leaf], layout: Layout, device: str, length: int) -> _Tried | None:
    """The first state of leaves of another length; `None` where `init` raises."""
    given = {leaf.path: _sample(leaf, t, length, device) for leaf in leaves}
    try:
        # What is made without a word on its device has no memory either.
        with torch.random.fork_rng(devices=[]), torch.device(device) if device == "meta" else nullcontext():
            state = t.init_fn(dict(given), layout)
    except Exception:
        return None
    names = names_in("", state, given.keys(), Placement())
    return _Tried(given, state, {name: _shape(x) for name, x in zip(names, flatten(state)[0], strict=True)})


def _sample(leaf: Leaf, t: Transform, length: int, device: str) -> Tensor:
    """A leaf of another length as `init` might be handed a part of it: flat, or with more rows."""
    flat = t.needs in OF_PIECES
    n, row = (leaf.numel, ()) if flat or not leaf.shape else (leaf.shape[0], leaf.shape[1:])
    shape = 2 * n + LONG if length == LONG else length, *row
    return torch.empty(shape, dtype=leaf.dtype, device=device) if device == "meta" else some_numbers(shape, leaf.dtype)


def _compared(owner: str, where: str, short: _Tried, long: _Tried, alike: dict[str, list[str]]) -> list[SlotForm]:
    """The forms of slots; `alike` are the leaves that each of the long ones stands for."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, shape in short.shapes.items():
        if name.path in alike:
            shapes = [shape, long.shapes.get(name)]
            of_leaf = [tuple(given.leaves[name.path].shape) for given in (short, long)]
            form = ALONG if shapes == of_leaf else FIXED if shapes[0] == shapes[1] else OTHER
            found.setdefault((where + name.slot, name.below), {}).update(dict.fromkeys(alike[name.path], form))
    forms = []
    for (slot, below), by_path in found.items():
        for form in dict.fromkeys(by_path.values()):
            of_form = tuple([path for path, x in by_path.items() if x == form])
            forms.append(SlotForm(owner, slot, below, form, () if len(of_form) == len(by_path) else of_form))
    return forms


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None
