"""Whole leaves where leaves are cut over ranks: each leaf has an owner, who updates it.

Parameters stay cut. For an update the pieces of a leaf's gradient and parameter travel to its owner, which runs the
transform on whole leaves as one process would, and the result comes back cut. States live at the owner alone. A matrix
is worked on once in the whole job, and what travels is an all-to-all each way: a rank sends what it has of others'
leaves and gets what others have of its own. The alternative, to gather every leaf on every rank, costs as many bytes
times the number of ranks, and the work of each leaf on all of them.

On other ranks than the owner a state has its shape and no memory: one element, expanded. So the structure of a state is
the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .._compat import is_shape_only
from ..ranks.collectives import exchange_into
from .by_rows import Rows, by_rows, keeps_leaves_alone, rows_here
from .groups import over_each
from .transform import OF_LEAVES, Context, Scope, Transform, TransformState
from .tree import Layout, Leaf, Leaves, tree_map
from .views import Wire


def owners(leaves: Sequence[Leaf], size: int) -> dict[str, int]:
    """By path: the rank that updates the leaf. Chosen by the sizes of leaves and the number of ranks alone.

    The largest first, each to the rank that has the least.

    >>> shapes = {"a": 6, "b": 5, "c": 4, "d": 3}
    >>> leaves = [Leaf(path, torch.Size([n]), torch.float32, "cpu") for path, n in shapes.items()]
    >>> owners(leaves, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0] * size
    found: dict[str, int] = {}
    for leaf in sorted(leaves, key=lambda leaf: -leaf.numel):
        found[leaf.path] = min(range(size), key=lambda rank: load[rank])
        # A leaf without elements is work too, or one rank would have all of them.
        load[found[leaf.path]] += leaf.numel + 1
    return found


class Exchange(Protocol):
    """The way from pieces to whole leaves at their owners, and back.

    Attributes:
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner, by its `place_in` the cut.
    """

    @property
    def leaves(self) -> tuple[Leaf, ...]: ...
    @property
    def rank_of(self) -> dict[str, int]: ...

    def mine(self, paths: Iterable[str]) -> list[str]:
        """Those of this rank."""
        ...

    def to_owners(self, pieces: Leaves) -> Leaves:
        """Whole leaves of this rank from the pieces of all. The same paths on every rank."""
        ...

    def to_pieces(self, wholes: Leaves, like: Leaves) -> Leaves:
        """This rank's pieces of all leaves from the whole ones that owners have.

        Args:
            wholes: of this rank.
            like: a tensor of the dtype and device of each piece, by path; the same paths on every rank.
        """
        ...


@dataclass(frozen=True)
class Owners:
    """The exchange along one axis of ranks.

    Attributes:
        wire: how leaves are cut.
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner.
        spans: for each rank, by path: the flat range that it has of what all have between them, a leaf or a part.
    """

    wire: Wire
    leaves: tuple[Leaf, ...]
    rank_of: dict[str, int]
    spans: list[dict[str, tuple[int, int]]]

    @classmethod
    def of(cls, wire: Wire, leaves: tuple[Leaf, ...], rank_of: dict[str, int]) -> Owners:
        """Those of leaves that this wire cuts. Not found out at the first use: the compiler cannot."""
        group = wire.group
        wires = [wire.on(replace(group, rank=rank), None) for rank in range(group.size)]
        found = [{leaf.path: each.span(leaf) for leaf in leaves} for each in wires]
        begin = {leaf.path: min(spans[leaf.path][0] for spans in found) for leaf in leaves}
        spans = [{p: (low - begin[p], high - begin[p]) for p, (low, high) in own.items()} for own in found]
        return cls(wire, leaves, rank_of, spans)

    def mine(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if self.rank_of[path] == self.wire.group.rank]

    def to_owners(self, pieces: Leaves) -> Leaves:
        out: Leaves = {}
        for leaves in self._by_dtype(pieces):
            like = pieces[leaves[0].path]
            mine = [leaf for leaf in leaves if self.rank_of[leaf.path] == self.wire.group.rank]
            sent = [[pieces[leaf.path] for leaf in leaves if self.rank_of[leaf.path] == rank] for rank in self._ranks]
            lengths = [[self._length(rank, leaf) for leaf in mine] for rank in self._ranks]
            got = self._exchange(sent, lengths, like)
            for i, leaf in enumerate(mine):
                full = like.new_empty(max(spans[leaf.path][1] for spans in self.spans))
                for rank in self._ranks:
                    low, high = self.spans[rank][leaf.path]
                    full[low:high] = got[rank][i]
                out[leaf.path] = full.view(leaf.shape) if full.numel() == leaf.numel else full
        return out

    def to_pieces(self, wholes: Leaves, like: Leaves) -> Leaves:
        out: Leaves = {}
        here = self.wire.group.rank
        for leaves in self._by_dtype(like):
            first = like[leaves[0].path]
            mine = [leaf for leaf in leaves if self.rank_of[leaf.path] == here]
            flat = {leaf.path: wholes[leaf.path].to(first.dtype).reshape(-1) for leaf in mine}
            sent = [[flat[x.path][slice(*self.spans[rank][x.path])] for x in mine] for rank in self._ranks]
            theirs = [[leaf for leaf in leaves if self.rank_of[leaf.path] == rank] for rank in self._ranks]
            got = self._exchange(sent, [[self._length(here, x) for x in of_rank] for of_rank in theirs], first)
            for of_rank, parts in zip(theirs, got, strict=True):
                out.update({leaf.path: part for leaf, part in zip(of_rank, parts, strict=True)})
        return {path: out[path] for path in like}

    @property
    def _ranks(self) -> range:
        return range(self.wire.group.size)

    def _length(self, rank: int, leaf: Leaf) -> int:
        low, high = self.spans[rank][leaf.path]
        return high - low

    def _by_dtype(self, tensors: Leaves) -> list[list[Leaf]]:
        """Leaves that travel in one message each."""
        found: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.path in tensors:
                found.setdefault((tensors[leaf.path].dtype, tensors[leaf.path].device), []).append(leaf)
        return list(found.values())

    def _exchange(self, sent: list[list[Tensor]], lengths: list[list[int]], like: Tensor) -> list[list[Tensor]]:
        """Send a list of flat tensors to each rank; what each rank has sent, of these lengths."""
        flat = torch.cat([like.new_empty(0), *(x.reshape(-1) for parts in sent for x in parts)])
        totals = [sum(of_rank) for of_rank in lengths]
        out = like.new_empty(sum(totals))
        exchange_into(out, flat, totals, [sum(x.numel() for x in parts) for parts in sent], self.wire.group)
        return [list(got.split(of_rank)) for got, of_rank in zip(out.split(totals), lengths, strict=True)]


@dataclass(frozen=True)
class OwnersBehind:
    """The exchange where leaves are cut along several axes: along the last one first, which joins what it cut.

    So a piece goes along each axis once, and no channel between all ranks is needed.

    Attributes:
        first: the exchange of what the first axis cuts.
        rest: that of its parts.
        size: of the rest: how many ranks have one part of a leaf.
    """

    first: Owners
    rest: Exchange
    size: int

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.first.leaves

    @property
    def rank_of(self) -> dict[str, int]:
        return {path: rank * self.size + self.rest.rank_of[path] for path, rank in self.first.rank_of.items()}

    def mine(self, paths: Iterable[str]) -> list[str]:
        return self.first.mine(self.rest.mine(paths))

    def to_owners(self, pieces: Leaves) -> Leaves:
        return self.first.to_owners(self.rest.to_owners(pieces))

    def to_pieces(self, wholes: Leaves, like: Leaves) -> Leaves:
        here = {path: like[path] for path in self.rest.mine(like)}
        return self.rest.to_pieces(self.first.to_pieces(wholes, here), like)


def place_in(cutting: Sequence[Wire]) -> tuple[int, int]:
    """This rank among all that share a leaf, in the order of their parts of it, and how many those are."""
    rank, size = 0, 1
    for wire in cutting:
        rank, size = rank * wire.group.size + wire.group.rank, size * wire.group.size
    return rank, size


def owners_of(cutting: Sequence[Wire], leaves: tuple[Leaf, ...]) -> Exchange:
    """The exchange of leaves that are cut along these axes, one after the other."""
    return _exchange_of(cutting, leaves, owners(leaves, place_in(cutting)[1]))


def _exchange_of(cutting: Sequence[Wire], leaves: tuple[Leaf, ...], rank_of: dict[str, int]) -> Exchange:
    first, *rest = cutting
    size = place_in(rest)[1]
    here = Owners.of(first, leaves, {path: rank // size for path, rank in rank_of.items()})
    if not rest:
        return here
    return OwnersBehind(here, _exchange_of(rest, leaves, {path: rank % size for path, rank in rank_of.items()}), size)


def may_be_owned(t: Transform) -> bool:
    """Whether it needs whole leaves and no more, and none of another library is inside."""
    return t.needs in OF_LEAVES and not t.facts.adds and all(p.needs != "tree" and not p.facts.adds for p in _inside(t))


def _inside(t: Transform) -> list[Transform]:
    return [x for part in t.parts for x in (part, *_inside(part))]


def run_at_owners(t: Transform, layout: Layout, cutting: Sequence[Wire]) -> tuple[Transform, dict[str, dict[str, int]]]:
    """The same transform with what needs whole leaves run at their owners.

    Of a `partition` only the leaves of members that need them whole travel, and of one that needs rows only those that
    are not cut by rows. Who owners are is told by path, for each place in the state of `t` where whole leaves have
    theirs.
    """
    ranks: dict[str, dict[str, int]] = {}

    def owned(part: Transform, paths: set[str], where: str) -> Transform:
        leaves = tuple(leaf for leaf in layout.trainable if leaf.path in paths)
        if not may_be_owned(part):
            return part
        rows: Rows = rows_here(cutting, leaves) if part.needs == "row" else {}
        if rows and keeps_leaves_alone(part, leaves, layout):
            part, leaves = by_rows(part, rows), tuple(leaf for leaf in leaves if leaf.path not in rows)
        if not leaves:
            return replace(part, needs="element")
        at = owners_of(cutting, leaves)
        ranks[where] = at.rank_of
        return at_owners(part, at)

    return over_each(t, owned, layout), ranks


def at_owners(part: Transform, at: Exchange) -> Transform:
    """The same transform, run at the owners of these leaves; of others it is handed what this rank has."""
    owned = {leaf.path for leaf in at.leaves}

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        metas = {x.path: torch.empty(x.shape, dtype=pieces[x.path].dtype, device="meta") for x in at.leaves}
        here = {path: x for path, x in pieces.items() if path not in owned}
        if all(x.is_meta or is_shape_only(x) for x in pieces.values()):
            return part.init_fn({**here, **{p: pieces[p].new_empty(m.shape) for p, m in metas.items()}}, layout)
        wholes = at.to_owners({path: x.detach() for path, x in pieces.items()})
        # Of leaves that are not this rank's, what a state would be.
        everywhere, own = part.init_fn(metas, layout), part.init_fn({**here, **wholes}, layout)
        device = next(iter(pieces.values())).device
        return _laid_over(tree_map(lambda x: _without_memory(x, device), everywhere), own)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        given = {path: params[path] for path in grads if path in owned}
        theirs = {path: g for path, g in grads.items() if path in owned}
        here = grads.keys() - owned
        own = _of(state, {*here, *at.mine(theirs)}, owned | here)
        wholes = {**{path: params[path] for path in here}, **at.to_owners(given)}
        all_of = {**{path: grads[path] for path in here}, **at.to_owners(theirs)}
        out, new = part.update_fn(all_of, own, wholes, carry, replace(ctx, offsets={}))
        if out is None:
            return None, _laid_over(state, new)
        pieces = at.to_pieces(out, given if part.facts.optimizes else theirs)
        return {path: pieces[path] if path in owned else out[path] for path in grads}, _laid_over(state, new)

    return replace(part, scope=Scope.WHOLE, needs="element", init_fn=init, update_fn=update)


def _without_memory(x: Any, device: torch.device) -> Any:
    if not isinstance(x, Tensor) or not x.is_meta:
        return x
    return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)


def _of(state: Any, own: set[str], paths: set[str]) -> Any:
    """Of every entry by path, those of some leaves."""
    if not isinstance(state, dict):
        return state
    if state.keys() & paths and state.keys() <= paths:
        return {path: x for path, x in state.items() if path in own}
    return {key: _of(x, own, paths) for key, x in state.items()}


def _laid_over(old: Any, new: Any) -> Any:
    """A state with the entries that another one has."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _laid_over(old[key], x) if key in old else x for key, x in new.items()}}
    return new
