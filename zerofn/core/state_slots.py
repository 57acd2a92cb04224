"""What the tensors in a transform's state belong to: its slot, the leaf, the place in the leaf's own tree; and whether
they lie along the leaf, element by element, and are cut as it is.

That is asked of `init`, which is handed leaves of two lengths without memory: what is as long as the leaf both times
lies along it. What this rank has of a state would tell less: anything may happen to be as long as a piece.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chain import complete
from .facts import OF_PIECES
from .layout import Layout, Leaf, Leaves, Placement, canonical
from .partition import replace_innermost
from .slot_forms import ALONG, FIXED, OTHER, SlotForm
from .transform import Transform, TransformState, no_state
from .tree import Tree, flatten, tree_keys

# How much longer the second leaf is: more than a block of elements that share a number.
LONGER = 2**20


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
    keys = tree_keys(own)
    beside: dict[tuple[str, ...], bool] = {}
    for here in keys:
        for i in range(1, len(here)):
            beside[here[:i]] = beside.get(here[:i], True) and here[i] in paths
    known = placement.forms_of(owner)
    return [_name(here, paths, beside, known) for here in keys]


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
    found: list[tuple[str, Transform, set[str], str]] = []
    for t in complete(tuple(members)):

        def note(inner: Transform, paths: set[str], where: str, name: str = t.name) -> Transform:
            if inner.init_fn is not no_state:
                found.append((name, inner, paths, where))
            return inner

        replace_innermost(t, note, layout)
    slots = tuple([form for name, t, paths, where in found for form in _forms(name, t, paths, where, layout)])
    return canonical(replace(layout, placement=replace(layout.placement, slots=slots)))


def _forms(owner: str, t: Transform, paths: set[str], where: str, layout: Layout) -> list[SlotForm]:
    """The forms of the slots of one transform; none if it makes no state of such leaves."""
    by_kind: dict[Any, list[Leaf]] = {}
    for leaf in layout.trainable:
        if leaf.path in paths:
            by_kind.setdefault((leaf.shape, leaf.dtype, leaf.path.rpartition(".")[2]), []).append(leaf)
    kinds = list(by_kind.values())
    # A model has many leaves of few kinds: one of each is asked for, all where `init` needs what is not among those.
    for groups in (kinds, [[leaf] for leaves in kinds for leaf in leaves]):
        # Lengths that an `init` which asks for the numbers can be given are few.
        for device, less, more in (("meta", None, LONGER), ("cpu", 2, 5)):
            two = [{leaf.path: _sample(leaf, t, length, device) for leaf, *_ in groups} for length in (less, more)]
            try:
                with torch.random.fork_rng(devices=[]):
                    short, long = (t.init_fn(dict(given), layout) for given in two)
            except Exception:
                continue  # what it raises of the leaves themselves is raised where their state is made
            if set(map(type, short.values())) == {Tensor}:
                return []  # counters, of no leaf
            return _compared(owner, where, (short, long), two, {leaves[0].path: leaves for leaves in groups})
    return []


def _sample(leaf: Leaf, t: Transform, length: int | None, device: str) -> Tensor:
    """A leaf of another length as `init` might be handed a part of it: flat, or with more rows."""
    flat = t.needs in OF_PIECES
    n, row = (leaf.numel, ()) if flat or not leaf.shape else (leaf.shape[0], leaf.shape[1:])
    of_length = n + 1 if length is None else length if length < LONGER else 2 * n + length
    return torch.zeros((of_length, *row), dtype=leaf.dtype, device=device)


def _compared(
    owner: str,
    where: str,
    states: tuple[TransformState, TransformState],
    leaves: list[Leaves],
    alike: dict[str, list[Leaf]],
) -> list[SlotForm]:
    """The forms of slots from states of leaves of two lengths; `alike` are the leaves that each stands for."""
    paths = leaves[0].keys()
    named = [dict(zip(names_in(owner, x, paths, Placement()), flatten(x)[0], strict=True)) for x in states]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, x in named[0].items():
        if name.path is not None:
            shapes = [_shape(x), _shape(named[1].get(name))]
            of_leaf = [tuple(given[name.path].shape) for given in leaves]
            form = ALONG if shapes == of_leaf else FIXED if shapes[0] == shapes[1] else OTHER
            of_kind = {leaf.path: form for leaf in alike[name.path]}
            found.setdefault((where + name.slot, name.below), {}).update(of_kind)
    forms = []
    for (slot, below), by_path in found.items():
        for form in dict.fromkeys(by_path.values()):
            of_form = tuple([path for path, x in by_path.items() if x == form])
            forms.append(SlotForm(owner, slot, below, form, () if len(of_form) == len(by_path) else of_form))
    return forms


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None
