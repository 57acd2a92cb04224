"""A state as a flat list of named entries, for tables and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import explain
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.dtensor_shards import as_dtensors
from ..ranks.group import Group
from .row_sharding import cut_by_rows, rows_between
from .state import State
from .tensor_parallel_leaves import Within
from .tree import flatten, tree_keys, unflatten


class Entry(NamedTuple):
    """One tensor of a state, or a plain value in the state of a transform from another library.

    Attributes:
        owner: the transform, `"params"`, or `""` for the counters of the state itself.
        slot: what it is to its owner, for instance `"exp_avg"`.
        path: the leaf it belongs to, or `""`; a tree that is one tensor has a leaf of that path too.
        value: the tensor as this process holds it.
        shape: of the whole tensor over all ranks.
        offset: flat index in the whole of this process's first element; `None` where it holds all of it.
        of_leaf: whether it belongs to a leaf.
        at_owner: whether one rank has all of it, the owner of the leaf.
        elsewhere: whether that is another one than this.
        within: where the model itself has cut the leaf, how; then elements are counted box by box.
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

    @property
    def key(self) -> str:
        """Its name in a checkpoint.

        >>> Entry("adamw", "exp_avg", "blocks.0.weight", None, ()).key
        'adamw/exp_avg/blocks.0.weight'
        """
        above = [part for part in (self.owner, self.slot) if part]
        return "/".join([*above, self.path] if self.of_leaf else above)

    def part(self, whole: Tensor) -> Tensor:
        """What this process keeps of the whole tensor.

        >>> Entry("adamw", "exp_avg", "w", torch.zeros(2), (2, 2), offset=1).part(torch.eye(2))
        tensor([0., 0.])
        """
        if self.offset is None:
            return whole.reshape(self.shape)
        mine, low = whole, self.offset
        if self.within is not None:
            mine, low = self.within.part(whole), low - self.within.before
        return mine.reshape(-1)[low : low + self.value.numel()].reshape(self.value.shape)


def before(e: Entry) -> int | None:
    """The value of an entry that checkpoints of older versions lack; `None` for one that all have.

    >>> [before(Entry("low_precision_adam", slot, "", None, (), of_leaf=False)) for slot in ("rounding_format", "step")]
    [1, None]
    """
    return FIRST_FORMAT if not e.of_leaf and e.slot.split("/")[-1] == FORMAT_ENTRY else None


def entries(state: State) -> list[Entry]:
    """Every entry: parameters, transforms in the order of the chain, counters; leaves in the tree's order."""
    slots: list[tuple[str, str, Mapping[Any, Any]]] = [("params", "", state.leaves)]
    paths = {leaf.path for leaf in state.layout.leaves}
    for owner, own in state.transforms.items():
        found: dict[str, dict[str | None, Any]] = {}
        for keys, value in zip(tree_keys(own), flatten(own)[0], strict=True):
            slot, path = _split(keys, paths)
            found.setdefault(slot, {})[path] = value
        # A tree library sorts the keys of a dict; a transform has put its slots in an order of its own.
        first = {slot: i for i, slot in enumerate(own)}
        slots += [
            (owner, slot, found[slot]) for slot in sorted(found, key=lambda s: (first.get(s.split("/")[0], 0), s))
        ]
    slots += [("", "step", {None: state.step}), ("", "micro_step", {None: state.micro_step})]
    return [e for owner, slot, values in slots for e in _slot(state, owner, slot, values)]


def _split(keys: tuple[str, ...], paths: Collection[str]) -> tuple[str, str | None]:
    """Slot and leaf of what a transform keeps under `keys`; `None` where it belongs to no leaf."""
    *above, last = keys
    return ("/".join(above), last) if above and last in paths else ("/".join(keys), None)


def _slot(state: State, owner: str, slot: str, values: Mapping[str | None, Any]) -> list[Entry]:
    """The entries of one slot. It is sharded if everything in it is flat and as long as this rank's part."""
    placement = state.layout.placement
    if owned := placement.owners_of(owner, slot):
        of_owners, rest = _parted(values, owned[1])
        found = list(_at_owners(state, owner, slot, of_owners, *owned))
        return found + _of_pieces(state, owner, slot, rest) if rest else found
    return _of_pieces(state, owner, slot, values)


def _parted(
    values: Mapping[str | None, Any], ranks: Mapping[str, int]
) -> tuple[dict[str | None, Any], dict[str | None, Any]]:
    """Of a slot's values, those of leaves that owners update, and the others."""
    rest: dict[str | None, Any] = {p: x for p, x in values.items() if p is not None and p not in ranks}
    return {path: x for path, x in values.items() if path not in rest}, rest


def _of_pieces(state: State, owner: str, slot: str, values: Mapping[str | None, Any]) -> list[Entry]:
    placement = state.layout.placement.of(owner)
    spans = {leaf.path: placement.range_of(leaf) for leaf in state.layout.leaves if leaf.path in values}
    sharded = placement.size > 1 and bool(spans)
    sharded = sharded and all(_flat(values[path], *span) for path, span in spans.items())
    rows = []
    for leaf in state.layout.leaves:
        if leaf.path in values:
            x = values[leaf.path]
            offset = spans[leaf.path][0] if sharded else None
            e = Entry(owner, slot, leaf.path, x, tuple(leaf.shape) if sharded else _shape(x), offset)
            rows.append(e if leaf.within is None or not leaf.within.cut else _of_part(e, leaf.shape, leaf.within))
    if None in values:
        rows.append(Entry(owner, slot, "", values[None], _shape(values[None]), of_leaf=False))
    return rows


def _of_part(e: Entry, shape: torch.Size, within: Within) -> Entry:
    """The entry of a leaf that is itself a part; a value of another shape is the same on every rank."""
    if e.offset is None and _shape(e.value) != tuple(shape):
        return e
    return e._replace(shape=tuple(within.shape), offset=(e.offset or 0) + within.before, within=within)


def _at_owners(
    state: State, owner: str, slot: str, values: Mapping[str | None, Any], where: str, ranks: Mapping[str, int]
) -> Iterator[Entry]:
    """The entries of a transform that is run on whole leaves: an owner has all of a leaf's, the others nothing."""
    here = state.layout.placement.rank
    for path, x in [(leaf.path, values[leaf.path]) for leaf in state.layout.leaves if leaf.path in values]:
        yield _at_owner(Entry(owner, slot, path, x, _shape(x)), ranks[path] == here)
    if None in values:
        e = Entry(owner, slot, "", values[None], _shape(values[None]), of_leaf=False)
        # A leaf's own state may be a tree: then the leaf's path stands in the middle.
        path = next((part for part in slot.removeprefix(where).split("/") if part in ranks), None)
        yield e if path is None else _at_owner(e, ranks[path] == here)


def _at_owner(e: Entry, here: bool) -> Entry:
    if not isinstance(e.value, Tensor):
        return e
    if here:
        return e._replace(offset=0, at_owner=True)
    return e._replace(value=e.value.new_empty(0), offset=e.value.numel(), at_owner=True, elsewhere=True)


def _flat(x: Any, low: int, high: int) -> bool:
    return isinstance(x, Tensor) and tuple(x.shape) == (high - low,)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()


def rebuild(state: State, fn: Callable[[Entry], Any], elsewhere: bool = False) -> State:
    """The same state with `fn(entry)` in the place of every entry.

    Args:
        state: of which it is made.
        fn: called in the order of `entries`.
        elsewhere: also in the place of what another rank has, which keeps its shape by default.
    """
    found = entries(state)
    paths = {leaf.path for leaf in state.layout.leaves}
    new: dict[tuple[str | None, str, str | None], Any] = {}
    for i, e in enumerate(found):
        # A transform may have the name "params".
        owner = None if i < len(state.leaves) else e.owner
        value = fn(e)
        if elsewhere or not e.elsewhere:
            new[owner, e.slot, e.path if e.of_leaf else None] = value
    transforms = {
        owner: unflatten(
            flatten(own)[1],
            # What is elsewhere keeps its shape.
            [
                new.get((owner, *_split(keys, paths)), x)
                for keys, x in zip(tree_keys(own), flatten(own)[0], strict=True)
            ],
        )
        for owner, own in state.transforms.items()
    }
    leaves = {path: new[None, "", path] for path in state.leaves}
    step, micro_step = new["", "step", None], new["", "micro_step", None]
    return replace(state, leaves=leaves, transforms=transforms, step=step, micro_step=micro_step)


def over_ranks(state: State, shards: Sequence[Group], rank: int) -> State:
    """The same state with shards as DTensors, and state that only one rank has under the name of that rank.

    Plain tensors are then equal on all ranks, as `torch.distributed.checkpoint` assumes. State that only the owner of a
    leaf has is in the result on the owner and on no other rank.

    Args:
        state: over several ranks.
        shards: the ranks that share a leaf, along each axis that it is cut over.
        rank: this one among all that hold the state.
    """
    if state.layout.placement.ranges or len(shards) > 1:
        raise ValueError(
            explain(
                "opt.state_dict() of leaves that are cut twice or by a wire of one's own",
                "torch's distributed tensors are cut once, by rows, in chunks of torch's own lengths",
                "zf.save(directory, opt), which asks the wire",
            )
        )
    found, unreduced = entries(state), state.layout.placement.apart
    cut = {i: e for i, e in enumerate(found) if e.offset is not None and not e.at_owner and e.owner not in unreduced}
    if state.layout.placement.size == 1:
        # Parts of what the model itself has cut are whole leaves to the chain.
        cut = {}
    size = shards[0].size
    whole = as_dtensors({i: (e.value, *_as_chunk(e, size)) for i, e in cut.items()}, shards[0])
    given = iter([_GONE if e.elsewhere else whole.get(i, e.value) for i, e in enumerate(found)])
    out = rebuild(state, lambda _: next(given), elsewhere=True)
    left = {name: _without_gone(own) for name, own in out.transforms.items()}
    transforms = {name: {} if own is _GONE else own for name, own in left.items()}
    own = {e.owner for e in found if state.layout.placement.size > 1 and has_unknown_leaf(e)}
    apart = {o: {of_rank(rank): x} for o, x in transforms.items() if o in own or o in unreduced}
    return replace(out, transforms={**transforms, **apart})


# In the place of an entry that is to be removed.
_GONE = object()


def _without_gone(own: Any) -> Any:
    """A state without `_GONE`; a dict or a tuple that has nothing else is removed as a whole."""
    if isinstance(own, dict):
        left = {key: y for key, x in own.items() if (y := _without_gone(x)) is not _GONE}
        return left if left or not own else _GONE
    gone = isinstance(own, tuple | list) and own and all(_without_gone(x) is _GONE for x in own)
    return _GONE if gone else own


def _as_chunk(e: Entry, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a part and of its whole: rows of the leaf, or a range of it laid out flat."""
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
    """Whether it may be of shards of leaves that nothing names, as lists of tensors in states of other libraries."""
    return not (e.of_leaf or e.at_owner) and isinstance(e.value, Tensor) and e.value.ndim > 0
