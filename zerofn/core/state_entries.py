"""Lists a state as named entries, for files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import explain
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.dtensor import as_dtensors, is_distributed
from ..ranks.group import Group
from .chain import complete, replace_innermost
from .facts import OF_PIECES
from .layout import (
    ALONG,
    FIXED,
    OTHER,
    Layout,
    Leaf,
    Leaves,
    Placement,
    SlotForm,
    Within,
    canonical,
    cut_by_rows,
    form_of,
    rows_between,
)
from .owners import some_numbers
from .state import State
from .transform import Transform, TransformState, no_state
from .tree import Tree, flatten, is_by_path, tree_keys, unflatten

# ----------------------------------------------------------------------------------------------------------------------
# An `Entry` is one tensor of a state: its name, and how it lies over ranks.


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a state, or a plain value in the state of a transform from another library.

    Attributes:
        owner: the transform, `"params"`, or `""` for the counters of the state itself.
        slot: its name in the owner's state, for instance `"exp_avg"`.
        path: the leaf to which it belongs, or `""`; a tree that is one tensor has a leaf of that path too.
        value: this process's tensor.
        shape: the full shape over all ranks.
        offset: flat index in the full tensor of this process's first element; `None` if it has all of it.
        of_leaf: whether it belongs to a leaf.
        at_owner: whether only the owner of the leaf has it, in full.
        elsewhere: whether that owner is another rank.
        within: how the model itself has sharded the leaf, if it has; then elements are counted box by box.
        below: keys in the leaf's own tree, if its state is a tree, with slashes between them.
        of_part: whether its layout over ranks is unknown: then it loads on the same number of ranks only.
    """

    owner: str
    slot: str
    path: str
    value: Any
    shape: tuple[int, ...]
    offset: int | None = None
    of_leaf: bool = True
    at_owner: bool = False
    elsewhere: bool = False
    within: Within | None = None
    below: str = ""
    of_part: bool = False

    @property
    def key(self) -> str:
        """Its name in a checkpoint.

        >>> Entry("adamw", "exp_avg", "blocks.0.weight", None, ()).key
        'adamw/exp_avg/blocks.0.weight'
        """
        above = [part for part in (self.owner, self.slot) if part]
        keys = [*above, self.path] if self.of_leaf else above
        return "/".join([*keys, self.below] if self.below else keys)

    def part(self, whole: Tensor) -> Tensor:
        """This process's shard of the full tensor.

        >>> import torch
        >>> Entry("adamw", "exp_avg", "w", torch.zeros(2), (2, 2), offset=1).part(torch.eye(2))
        tensor([0., 0.])
        """
        if self.offset is None:
            return whole.reshape(self.shape)
        mine, low = whole, self.offset
        if self.within is not None:
            mine, low = self.within.part(whole), low - self.within.before
        return mine.reshape(-1)[low : low + self.value.numel()].reshape(self.value.shape)


# ----------------------------------------------------------------------------------------------------------------------
# These functions find what each tensor of a transform's state belongs to: its slot, its leaf and its place in the
# leaf's own tree; and whether it is sharded like the leaf, element by element.
#
# They ask `init`, which they call on leaves of two lengths, the long ones without memory: a tensor that is as long as
# the leaf both times belongs to it element by element. This rank's state alone would tell less, because any tensor may
# happen to be as long as a shard.


# A length that no other tensor is likely to have; few rows of a wide leaf.
SHORT = 11
# How much longer the second leaf is: more than a block of elements that share a number.
LONG = 2**20


class Name(NamedTuple):
    """The name of one tensor in a transform's state.

    Attributes:
        slot: keys above the leaf's path, with slashes between them; all keys if it belongs to no leaf.
        path: of the leaf, or `None`.
        below: keys below the path, where the state of a leaf is a tree.
    """

    slot: str
    path: str | None = None
    below: str = ""


def names_in(owner: str, own: Tree, paths: Collection[str], placement: Placement) -> list[Name]:
    """The names of the tensors in a transform's state, in the order of `flatten`.

    A leaf's path stands below at least one key. The first key may be a leaf's path too, if all its neighbours are.

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
    """The same layout with the forms of the state that transforms keep for leaves."""
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
        """The slots of a leaf, with their shapes."""
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
    return _Tried(given, state, {name: _shape_or_none(x) for name, x in zip(names, flatten(state)[0], strict=True)})


def _sample(leaf: Leaf, t: Transform, length: int, device: str) -> Tensor:
    """A leaf of another length, in a form that `init` may get for a shard: flat, or with more rows."""
    flat = t.needs in OF_PIECES
    n, row = (leaf.numel, ()) if flat or not leaf.shape else (leaf.shape[0], leaf.shape[1:])
    shape = 2 * n + LONG if length == LONG else length, *row
    return torch.empty(shape, dtype=leaf.dtype, device=device) if device == "meta" else some_numbers(shape, leaf.dtype)


def _compared(owner: str, where: str, short: _Tried, long: _Tried, alike: dict[str, list[str]]) -> list[SlotForm]:
    """The forms of slots; `alike` are the leaves that each of the long ones represents."""
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


def _shape_or_none(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None


# ----------------------------------------------------------------------------------------------------------------------
# `entries` lists a state as flat, named entries, for tables and checkpoints.


def before(e: Entry) -> int | None:
    """The value of an entry that checkpoints of older versions lack; `None` for one that all have.

    >>> [before(Entry("low_precision_adam", slot, "", None, (), of_leaf=False)) for slot in ("rounding_format", "step")]
    [1, None]
    """
    return FIRST_FORMAT if not e.of_leaf and e.slot.split("/")[-1] == FORMAT_ENTRY else None


def entries(state: State) -> list[Entry]:
    """Every entry: parameters, transforms in the order of the chain, counters; leaves in the tree's order."""
    slots: list[tuple[str, str, str, Mapping[Any, Any]]] = [("params", "", "", state.leaves)]
    for owner, own in state.transforms.items():
        found: dict[tuple[str, str], dict[str | None, Any]] = {}
        for name, value in zip(_names(state, owner), flatten(own)[0], strict=True):
            found.setdefault((name.slot, name.below), {})[name.path] = value
        # A tree library sorts the keys of a dict; a transform has put its slots in an order of its own.
        first = {slot: i for i, slot in enumerate(own)}
        order = sorted(found, key=lambda s: (first.get(s[0].split("/")[0], 0), *s))
        slots += [(owner, slot, below, found[slot, below]) for slot, below in order]
    slots += [("", "step", "", {None: state.step}), ("", "micro_step", "", {None: state.micro_step})]
    return [e for owner, slot, below, values in slots for e in _slot(state, owner, slot, below, values)]


def _names(state: State, owner: str) -> list[Name]:
    """The names of what a transform keeps, in the order of `flatten`."""
    return names_in(owner, state.transforms[owner], state.layout.every, state.layout.placement)


def _slot(state: State, owner: str, slot: str, below: str, values: Mapping[str | None, Any]) -> list[Entry]:
    """The entries of one slot."""
    placement = state.layout.placement
    found: list[Entry] = []
    if owned := placement.owners_of(owner, slot):
        of_owners, values = _parted(values, owned[1])
        found += _at_owners(state, owner, slot, below, of_owners, *owned)
    return found + _of_pieces(state, owner, slot, below, values) if values else found


def _parted(
    values: Mapping[str | None, Any], ranks: Mapping[str, int]
) -> tuple[dict[str | None, Any], dict[str | None, Any]]:
    """A slot's values in two groups: those of leaves that owners update, and the others."""
    rest: dict[str | None, Any] = {p: x for p, x in values.items() if p is not None and p not in ranks}
    return {path: x for path, x in values.items() if path not in rest}, rest


def _of_pieces(state: State, owner: str, slot: str, below: str, values: Mapping[str | None, Any]) -> list[Entry]:
    placement = state.layout.placement.of(owner)
    leaves = [leaf for leaf in state.layout.leaves if leaf.path in values]
    spans = {leaf.path: placement.range_of(leaf) for leaf in leaves}
    flat = {path for path, span in spans.items() if _flat(values[path], *span)}
    forms = state.layout.placement.forms_of(owner)
    rows = []
    for leaf in leaves:
        x, form = values[leaf.path], form_of(forms, slot, below, leaf.path)
        # Of what makes no state of other leaves: a slot is cut if everything in it is as long as this rank's shard.
        along = leaf.path in flat and (form == ALONG if form else len(flat) == len(leaves))
        sharded = placement.size > 1 and along
        e = Entry(owner, slot, leaf.path, x, tuple(leaf.shape) if sharded else _shape(x), below=below)
        if sharded:
            e = replace(e, offset=spans[leaf.path][0])
        within = leaf.within if leaf.within is not None and leaf.within.cut and form != FIXED else None
        e = e if within is None else _of_part(e, leaf.shape, within)
        cut = placement.size > 1 or within is not None
        rows.append(replace(e, of_part=cut and e.offset is None and form != FIXED and _is_array(x)))
    if None in values:
        rows.append(Entry(owner, slot, "", values[None], _shape(values[None]), of_leaf=False))
    return rows


def _of_part(e: Entry, shape: torch.Size, within: Within) -> Entry:
    """The entry of a leaf that the model itself has sharded. A value of another shape is the same on every rank."""
    if e.offset is None and _shape(e.value) != tuple(shape):
        return e
    return replace(e, shape=tuple(within.shape), offset=(e.offset or 0) + within.before, within=within)


def _at_owners(
    state: State,
    owner: str,
    slot: str,
    below: str,
    values: Mapping[str | None, Any],
    where: str,
    ranks: Mapping[str, int],
) -> Iterator[Entry]:
    """The entries of a transform that runs on whole leaves: the owner has all of a leaf's state, the others none."""
    here = state.layout.placement.rank
    for path, x in [(leaf.path, values[leaf.path]) for leaf in state.layout.leaves if leaf.path in values]:
        yield _at_owner(Entry(owner, slot, path, x, _shape(x), below=below), ranks[path] == here)
    if None in values:
        e = Entry(owner, slot, "", values[None], _shape(values[None]), of_leaf=False)
        # Beside what belongs to no leaf, the path of one may stand anywhere.
        path = next((part for part in slot.removeprefix(where).split("/") if part in ranks), None)
        yield e if path is None else _at_owner(e, ranks[path] == here)


def _at_owner(e: Entry, here: bool) -> Entry:
    if not isinstance(e.value, Tensor):
        return e
    if here:
        return replace(e, offset=0, at_owner=True)
    return replace(e, value=e.value.new_empty(0), offset=e.value.numel(), at_owner=True, elsewhere=True)


def held_by_owners(state: State) -> Iterator[tuple[str, str, Tensor, int]]:
    """Tensors that only the owner of their leaf has, another rank: slot, path, the placeholder here, and that rank."""
    placement = state.layout.placement
    for owner, own in state.transforms.items():
        for name, x in zip(_names(state, owner), flatten(own)[0], strict=True):
            owned = placement.owners_of(owner, name.slot)
            rank = None if owned is None or name.path is None else owned[1].get(name.path)
            if rank is not None and name.path is not None and rank != placement.rank and isinstance(x, Tensor):
                yield name.slot, name.path, x, rank


def _flat(x: Any, low: int, high: int) -> bool:
    return isinstance(x, Tensor) and tuple(x.shape) == (high - low,)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()


def rebuild(state: State, fn: Callable[[Entry], Any], elsewhere: bool = False) -> State:
    """The same state with `fn(entry)` in the place of every entry but `None`.

    Args:
        state: the old state.
        fn: called in the order of `entries`.
        elsewhere: whether to replace also placeholders of tensors that another rank has; by default they stay.
    """
    found = entries(state)
    new: dict[tuple[str | None, Name], Any] = {}
    for i, e in enumerate(found):
        # A transform may have the name "params".
        owner = None if i < len(state.leaves) else e.owner
        value = fn(e)
        if elsewhere or not e.elsewhere:
            new[owner, Name(e.slot, e.path if e.of_leaf else None, e.below)] = None if e.value is None else value
    transforms = {
        owner: unflatten(
            flatten(own)[1],
            # What is elsewhere keeps its shape.
            [new.get((owner, name), x) for name, x in zip(_names(state, owner), flatten(own)[0], strict=True)],
        )
        for owner, own in state.transforms.items()
    }
    leaves = {path: new[None, Name("", path)] for path in state.leaves}
    step, micro_step = new["", Name("step")], new["", Name("micro_step")]
    return replace(state, leaves=leaves, transforms=transforms, step=step, micro_step=micro_step)


def cut_as_by_torch(state: State, shards: Sequence[Group]) -> bool:
    """Whether DTensors can describe how leaves are sharded."""
    return not state.layout.placement.ranges and len(shards) <= 1


def check_torch_cuts(call: str, state: State, shards: Sequence[Group]) -> None:
    """Refuse `opt.call` if leaves are sharded in a way that DTensors cannot describe."""
    if not cut_as_by_torch(state, shards):
        wrong = f"opt.{call}() of leaves that are cut twice or by a wire of one's own"
        why = "torch's distributed tensors are cut once, by rows, in chunks of torch's own lengths"
        right = "zf.save(directory, opt) and zf.load(directory, like=opt), which ask the wire"
        raise ValueError(explain(wrong, why, right))


def over_ranks(state: State, shards: Sequence[Group], rank: int, parts: bool = False) -> State:
    """The same state with shards as DTensors, and state that only one rank has under the name of that rank.

    Plain tensors are then equal on all ranks, as `torch.distributed.checkpoint` assumes. State that only the owner of a
    leaf has is in the result on the owner and on no other rank.

    Args:
        state: over several ranks.
        shards: the ranks that share a leaf, along each axis over which it is sharded.
        rank: this one among all that have the state.
        parts: whether to keep this rank's own shards as plain tensors, to compare states of one rank.
    """
    if not parts:
        check_torch_cuts("state_dict", state, shards)
    found, unreduced = entries(state), state.layout.placement.apart
    cut = {i: e for i, e in enumerate(found) if e.offset is not None and not e.at_owner and e.owner not in unreduced}
    if parts or state.layout.placement.size == 1:
        # Parts of what the model itself has cut are whole leaves to the chain.
        cut = {}
    size = shards[0].size
    whole = as_dtensors({i: (e.value, *_as_chunk(e, size)) for i, e in cut.items()}, shards[0])
    given = iter([_GONE if e.elsewhere else whole.get(i, e.value) for i, e in enumerate(found)])
    out = rebuild(state, lambda _: next(given), elsewhere=True)
    left = {name: _without_gone(_in_lists(own, state.layout.every)) for name, own in out.transforms.items()}
    transforms = {name: {} if own is _GONE else own for name, own in left.items()}
    own = {e.owner for e in found if state.layout.placement.size > 1 and has_unknown_leaf(e)}
    apart = {o: {of_rank(rank): x} for o, x in transforms.items() if o in own or o in unreduced}
    return replace(out, transforms={**transforms, **apart})


def _in_lists(own: Any, paths: Set[str]) -> Any:
    """A state with lists in place of tuples that differ over ranks: DCP would pickle those tuples on one rank alone.

    They are tuples of DTensors, or of dicts keyed by path.
    """
    if isinstance(own, dict):
        return {key: _in_lists(x, paths) for key, x in own.items()}
    if not isinstance(own, tuple | list):
        return own
    by_path = any(is_by_path(x, paths) for x in own)
    if not by_path and not any(map(is_distributed, flatten(own)[0])):
        return own
    return [_in_lists(x, paths) for x in own]


# In the place of an entry that is to be removed.
_GONE = object()


def _without_gone(own: Any) -> Any:
    """A state without `_GONE`; a dict or a tuple that has nothing else is removed as a whole."""
    if isinstance(own, dict):
        left = {key: y for key, x in own.items() if (y := _without_gone(x)) is not _GONE}
        return left if left or not own else _GONE
    if not isinstance(own, tuple | list) or not any(x is _GONE for x in flatten(own)[0]):
        return own
    items = [_without_gone(x) for x in own]
    # What stands in a list keeps its place.
    return _GONE if all(x is _GONE for x in items) else [{} if x is _GONE else x for x in items]


def _as_chunk(e: Entry, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a shard and the full shape: rows of the leaf, or a range of the flattened leaf."""
    shape, low = e.shape, e.offset or 0
    if e.within is not None:
        shape, low = e.within.boxes[e.within.at][1], low - e.within.before
    if not cut_by_rows(shape, size):
        return tuple(e.value.shape), (torch.Size(shape).numel(),)
    mine = rows_between(shape, low, low + e.value.numel())
    assert mine is not None
    return mine, shape


def of_rank(rank: int) -> str:
    """The key of state that only this rank has."""
    return f"rank{rank}"


def has_unknown_leaf(e: Entry) -> bool:
    """Whether it may belong to shards of leaves that no key names, as lists of tensors in other libraries' states."""
    return e.of_part or (not (e.of_leaf or e.at_owner) and _is_array(e.value))


def _is_array(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0
