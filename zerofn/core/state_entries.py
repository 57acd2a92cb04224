"""Lists a state as named entries, for files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.group import Group
from .layout import COMPLEX, Leaf, Within, as_complex, rows_between
from .state import State
from .tree import Name, named, renamed

# ----------------------------------------------------------------------------------------------------------------------
# An `Entry` is one tensor of a state: its name, and how it lies over ranks.


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a state.

    Attributes:
        owner: the name of the transform whose state has the tensor, `"params"`, or `""` for the counters of the state
            itself.
        slot: the tensor's name in the owner's state, for instance `"exp_avg"`.
        path: the leaf to which the tensor belongs, or `""`. A tree that is one tensor has a leaf of path `""` too, so
            see `of_leaf`.
        value: this process's tensor.
        shape: the full shape over all ranks.
        offset: flat index in the full tensor of this process's first element; `None` if this process has the full
            tensor.
        of_leaf: whether the tensor belongs to a leaf.
        at_owner: whether one rank, the owner of the leaf, has the full tensor, and the other ranks have nothing of it.
        elsewhere: whether the tensor is on another rank, the owner of the leaf (see `at_owner`).
        within: how the model itself has sharded the leaf, or `None` if it has not. `offset` then counts the elements
            of one rank's shard after those of another rank's.
        below: keys in the leaf's own tree, if its state is a tree, with slashes between them.
        of_part: whether zerofn does not know how the tensor is laid out over ranks. A checkpoint of such a tensor loads
            on the same number of ranks only. The state that `init` makes has no such tensor.
    """

    owner: str
    slot: str
    path: str
    value: Tensor
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
        for name, value in named(own, state.layout.every):
            found.setdefault((name.slot, name.below), {})[name.path] = value
        # Slots keep the order in which the transform has them.
        first = {slot: i for i, slot in enumerate(own)}
        order = sorted(found, key=lambda s: (first.get(s[0].split("/")[0], 0), *s))
        slots += [(owner, slot, below, found[slot, below]) for slot, below in order]
    slots += [("", "step", "", {None: state.step}), ("", "micro_step", "", {None: state.micro_step})]
    return [e for owner, slot, below, values in slots for e in _slot(state, owner, slot, below, values)]


def in_given_form(e: Entry, leaves: Mapping[str, Leaf]) -> Entry:
    """The entry of a complex parameter as a complex tensor on the same memory; any other entry as it is.

    Args:
        e: the entry.
        leaves: the leaves of complex parameters, by path.
    """
    leaf = leaves.get(e.path) if e.of_leaf else None
    if leaf is None or tuple(e.shape) != leaf.shape or e.value.dtype not in COMPLEX or e.value.storage_offset() % 2:
        return e
    assert leaf.complex is not None
    offset = None if e.offset is None else e.offset // 2
    return replace(e, value=as_complex(e.value, leaf), shape=tuple(leaf.complex), offset=offset)


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
    fixed = (owner, slot) in state.layout.placement.fixed
    rows = []
    for leaf in [leaf for leaf in state.layout.leaves if leaf.path in values]:
        x, (low, high) = values[leaf.path], placement.range_of(leaf)
        sharded = placement.size > 1 and not fixed and tuple(x.shape) == (high - low,)
        e = Entry(owner, slot, leaf.path, x, tuple(leaf.shape if sharded else x.shape), below=below)
        if sharded:
            e = replace(e, offset=low)
        elif placement.size > 1 and not fixed and x.ndim == 2:
            e = _of_rows(e, leaf.shape, low, high)
        within = leaf.within if leaf.within is not None and leaf.within.cut and not fixed else None
        e = e if within is None else _of_part(e, leaf.shape, within)
        cut = placement.size > 1 or within is not None
        rows.append(replace(e, of_part=cut and e.offset is None and not fixed and x.ndim > 0))
    if None in values:
        rows.append(Entry(owner, slot, "", values[None], tuple(values[None].shape), of_leaf=False))
    return rows


def _of_rows(e: Entry, shape: torch.Size, low: int, high: int) -> Entry:
    """The entry of a tensor with some numbers for each of this rank's rows of a leaf."""
    rows, row = rows_between(shape, low, high), shape[1:].numel()
    if rows is None or len(rows) < 2 or e.value.shape[0] != rows[0] or not row:
        return e
    return replace(e, shape=(shape[0], e.value.shape[1]), offset=low // row * e.value.shape[1])


def _of_part(e: Entry, shape: torch.Size, within: Within) -> Entry:
    """The entry of a leaf that the model itself has sharded. A value of another shape is the same on every rank."""
    if e.offset is None and e.value.shape != shape:
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
    own_rank = state.layout.placement.rank
    for path, x in [(leaf.path, values[leaf.path]) for leaf in state.layout.leaves if leaf.path in values]:
        yield _at_owner(Entry(owner, slot, path, x, tuple(x.shape), below=below), ranks[path] == own_rank)
    if None in values:
        yield Entry(owner, slot, "", values[None], tuple(values[None].shape), of_leaf=False)


def _at_owner(e: Entry, here: bool) -> Entry:
    if here:
        return replace(e, offset=0, at_owner=True)
    return replace(e, value=e.value.new_empty(0), offset=e.value.numel(), at_owner=True, elsewhere=True)


def held_by_owners(state: State) -> Iterator[tuple[str, str, Tensor, int]]:
    """Tensors that only the owner of their leaf has, another rank: slot, path, the placeholder here, and that rank."""
    placement = state.layout.placement
    for owner, own in state.transforms.items():
        for name, x in named(own, state.layout.every):
            owned = placement.owners_of(owner, name.slot)
            rank = None if owned is None or name.path is None else owned[1].get(name.path)
            if rank is not None and name.path is not None and rank != placement.rank:
                yield name.slot, name.path, x, rank


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
        # `None` stands for parameters: a transform may have the name "params".
        owner = None if i < len(state.leaves) else e.owner
        value = fn(e)
        if elsewhere or not e.elsewhere:
            new[owner, Name(e.slot, e.path if e.of_leaf else None, e.below)] = None if e.value is None else value
    # A placeholder of a tensor that another rank has stays as it is.
    transforms = {
        owner: renamed(own, state.layout.every, lambda name, x, owner=owner: new.get((owner, name), x))
        for owner, own in state.transforms.items()
    }
    leaves = {path: new[None, Name("", path)] for path in state.leaves}
    step, micro_step = new["", Name("step")], new["", Name("micro_step")]
    return replace(state, leaves=leaves, transforms=transforms, step=step, micro_step=micro_step)


def cut_as_by_torch(state: State, shards: Sequence[Group]) -> bool:
    """Whether DTensors can describe how leaves are sharded."""
    return not state.layout.placement.ranges and len(shards) <= 1


def of_rank(rank: int) -> str:
    """The key of state that only this rank has."""
    return f"rank{rank}"


def has_unknown_leaf(e: Entry) -> bool:
    """Whether it may belong to a shard of a leaf that its key does not name, as in lists of other libraries' states."""
    return e.of_part or (not (e.of_leaf or e.at_owner) and e.value.ndim > 0)
