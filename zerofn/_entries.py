"""A state as a flat list of named entries: what a table shows and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._collectives import as_distributed
from ._group import Group
from ._state import State
from ._tree import flatten, tree_keys, unflatten


class Entry(NamedTuple):
    """One tensor of a state, or a plain value in the state of a transform from another library.

    Attributes:
        owner: the transform, `"params"`, or `""` for the counters of the state itself.
        slot: what it is to its owner, for instance `"exp_avg"`.
        path: the leaf it belongs to, or `""`.
        value: the tensor as this process holds it.
        shape: of the whole tensor over all ranks.
        offset: flat index in the whole of this process's first element; `None` where it holds all of it.
    """

    owner: str
    slot: str
    path: str
    value: Any
    shape: tuple[int, ...]
    offset: int | None = None

    @property
    def key(self) -> str:
        """Its name in a checkpoint.

        >>> Entry("adamw", "exp_avg", "blocks.0.weight", None, ()).key
        'adamw/exp_avg/blocks.0.weight'
        """
        return "/".join(part for part in (self.owner, self.slot, self.path) if part)


def entries(state: State) -> list[Entry]:
    """Every entry: parameters, transforms in the order of the chain, counters; leaves in the tree's order."""
    slots = [("params", "", state.leaves)]
    order = {leaf.path: i for i, leaf in enumerate(state.layout.leaves)}
    for owner, own in state.transforms.items():
        found: dict[str, dict[str, Any]] = {}
        for keys, value in zip(tree_keys(own), flatten(own)[0], strict=True):
            *above, last = keys
            path = last if above and last in order else ""
            found.setdefault("/".join(above if path else keys), {})[path] = value
        # A tree library sorts the keys of a dict; a transform has put its slots in an order of its own.
        first = {slot: i for i, slot in enumerate(own)}
        slots += [
            (owner, slot, found[slot]) for slot in sorted(found, key=lambda s: (first.get(s.split("/")[0], 0), s))
        ]
    slots += [("", "step", {"": state.step}), ("", "micro_step", {"": state.micro_step})]
    return [e for owner, slot, values in slots for e in _slot(state, owner, slot, values)]


def _slot(state: State, owner: str, slot: str, values: dict[str, Any]) -> list[Entry]:
    """The entries of one slot. It is sharded if everything in it is flat and as long as this rank's part."""
    placement = state.layout.placement
    spans = {leaf.path: placement.span(leaf.numel) for leaf in state.layout.leaves if leaf.path in values}
    sharded = placement.size > 1 and bool(spans) and owner not in placement.apart
    sharded = sharded and all(_flat(values[path], *span) for path, span in spans.items())
    rows = []
    for leaf in state.layout.leaves:
        if leaf.path in values:
            x = values[leaf.path]
            offset = spans[leaf.path][0] if sharded else None
            rows.append(Entry(owner, slot, leaf.path, x, tuple(leaf.shape) if sharded else _shape(x), offset))
    if "" in values:
        rows.append(Entry(owner, slot, "", values[""], _shape(values[""])))
    return rows


def _flat(x: Any, low: int, high: int) -> bool:
    return isinstance(x, Tensor) and tuple(x.shape) == (high - low,)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()


def rebuild(state: State, fn: Callable[[Entry], Any]) -> State:
    """The same state with `fn(entry)` in the place of every entry."""
    found = entries(state)
    new: dict[tuple[str | None, str], Any] = {}
    for i, e in enumerate(found):
        # A transform may have the name "params".
        owner = None if i < len(state.leaves) else e.owner
        new[owner, "/".join(part for part in (e.slot, e.path) if part)] = fn(e)
    transforms = {
        owner: unflatten(flatten(own)[1], [new[owner, "/".join(keys)] for keys in tree_keys(own)])
        for owner, own in state.transforms.items()
    }
    leaves = {path: new[None, path] for path in state.leaves}
    step, micro_step = new["", "step"], new["", "micro_step"]
    return replace(state, leaves=leaves, transforms=transforms, step=step, micro_step=micro_step)


def over_ranks(state: State, shards: Group, rank: int) -> State:
    """The same state with shards as distributed tensors, and what is each rank's own under a name of its own.

    So whoever takes a plain tensor for one that is equal on all ranks, as torch's checkpoints do, is right.

    Args:
        state: over several ranks.
        shards: the ranks that share a leaf.
        rank: this one among all that hold the state.
    """
    cut = {i: e for i, e in enumerate(entries(state)) if e.offset is not None}
    whole = as_distributed({i: (e.value, torch.Size(e.shape).numel()) for i, e in cut.items()}, shards)
    position = count()
    out = rebuild(state, lambda e: whole.get(next(position), e.value))
    apart = {owner: {f"rank{rank}": out.transforms[owner]} for owner in state.layout.placement.apart}
    return replace(out, transforms={**out.transforms, **apart})
