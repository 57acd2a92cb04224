"""Owners: where leaves are cut over ranks, one rank for each leaf that updates it whole.

Parameters stay cut. For an update the shards of a leaf's gradient and parameter travel to its owner, which runs the
transform on whole leaves as one process would, and the result travels back in shards. States live at the owner alone.
A matrix is worked on once in the whole job, and what travels is one all-to-all each way: a rank sends its shards of
others' leaves, and gets others' shards of its own. The alternative, to all-gather every leaf, sends as many bytes times
the number of ranks, and all ranks work on each leaf.

With the shards each owner sends back a flag that says whether its function raised, so that all ranks raise in the same
step and none waits for another. First states are not sent back: there owners send the flag by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..kernels.recording import concrete
from ..ranks.all_to_all import exchange_rows
from ..ranks.backend import gather_objects
from .layout import Leaf, Leaves
from .views import Wire

IN_UPDATE = "an update of whole leaves that failed at their owner"
GO_ON = "a function without that error, or on every rank: except Exception: opt.zero_grad()"
IN_INIT = "a first state of whole leaves (init=) that failed at their owner"
INIT_AGAIN = "an init= without that error"


class OwnerFailed(RuntimeError):
    """An owner could not update its leaves, or make their first states. Raised on every rank.

    Args:
        lines: for each owner that failed, its rank and why.
        wrong: what failed.
        right: what to write.
    """

    def __init__(self, lines: Sequence[str], wrong: str = IN_UPDATE, right: str = GO_ON):
        self.lines = list(lines)
        super().__init__(explain(wrong, "\n".join(lines), right))


def assign_owners(leaves: Sequence[Leaf], size: int) -> dict[str, int]:
    """By path: the rank that updates the leaf, chosen by the sizes of leaves and the number of ranks alone.

    The largest leaf first, each to the rank that has least to do.

    >>> shapes = {"a": 6, "b": 5, "c": 4, "d": 3}
    >>> leaves = [Leaf(path, torch.Size([n]), torch.float32, "cpu") for path, n in shapes.items()]
    >>> assign_owners(leaves, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0] * size
    found: dict[str, int] = {}
    for leaf in sorted(leaves, key=lambda leaf: -leaf.numel):
        found[leaf.path] = min(range(size), key=lambda rank: load[rank])
        # A leaf without elements is work too, or one rank would have all of them.
        load[found[leaf.path]] += leaf.numel + 1
    return found


@dataclass(frozen=True)
class AxisExchange:
    """The way from pieces to whole leaves at their owners, and back, along one axis of ranks.

    Attributes:
        wire: how leaves are cut along it.
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner's place along the axis.
        spans: for each rank, by path: its range of what the ranks of this axis share, a flat leaf or a shard of it.
    """

    wire: Wire
    leaves: tuple[Leaf, ...]
    rank_of: dict[str, int]
    spans: list[dict[str, tuple[int, int]]]

    @classmethod
    def of(cls, wire: Wire, leaves: tuple[Leaf, ...], rank_of: dict[str, int]) -> AxisExchange:
        """The exchange of leaves that this wire cuts. Spans are found here: a compiled graph cannot find them."""
        group = wire.group
        wires = [wire.on(replace(group, rank=rank), None) for rank in range(group.size)]
        found = [{leaf.path: each.span(leaf) for leaf in leaves} for each in wires]
        begin = {leaf.path: min(spans[leaf.path][0] for spans in found) for leaf in leaves}
        spans = [{p: (low - begin[p], high - begin[p]) for p, (low, high) in own.items()} for own in found]
        return cls(wire, leaves, rank_of, spans)

    def to_owners(self, pieces: Leaves, received: list[Tensor]) -> Leaves:
        out: Leaves = {}
        for leaves in self._by_dtype(pieces):
            like, owned = pieces[leaves[0].path], self._by_owner(leaves)
            mine = owned[self.wire.group.rank]
            sent = [[pieces[leaf.path] for leaf in of_rank] for of_rank in owned]
            lengths = [[self._length(rank, leaf) for leaf in mine] for rank in self._ranks]
            got, rows = self._exchange(sent, lengths, like)
            received.append(rows)
            for i, leaf in enumerate(mine):
                in_turn = sorted(self._ranks, key=lambda rank, path=leaf.path: self.spans[rank][path])
                full = torch.cat([got[rank][i] for rank in in_turn])
                out[leaf.path] = full.view(leaf.shape if full.numel() == leaf.numel else -1)
        return out

    def to_pieces(self, wholes: Leaves | Exception, like: Leaves, first: Tensor, nothing: Tensor | None) -> Leaves:
        out: Leaves = {}
        here = self.wire.group.rank
        # Where no leaf travels along this axis a flag does all the same: a rank that owns none may have failed too.
        for leaves in self._by_dtype(like) or [[]]:
            first, owned = like[leaves[0].path] if leaves else first, self._by_owner(leaves)
            mine = owned[here]
            if isinstance(wholes, Exception):
                flat = {leaf.path: first.new_zeros(leaf.numel) for leaf in mine}
            else:
                flat = {leaf.path: wholes[leaf.path].to(first.dtype).reshape(-1) for leaf in mine}
            sent = [[flat[x.path][slice(*self.spans[rank][x.path])] for x in mine] for rank in self._ranks]
            lengths = [[self._length(here, x) for x in of_rank] for of_rank in owned]
            # Not in a graph: Python cannot branch there, and a function that raises has done so before its graph runs.
            tells = concrete(first)
            if not tells and not leaves:
                continue
            if tells:
                said = first.new_full((1,), float(isinstance(wholes, Exception)))
                sent, lengths = [[*parts, said] for parts in sent], [[*of_rank, 1] for of_rank in lengths]
            got, _ = self._exchange(sent, lengths, first, nothing)
            if tells and bool(torch.cat([parts.pop() for parts in got]).any()):
                raise OwnerFailed(self.failures(wholes))
            for of_rank, parts in zip(owned, got, strict=True):
                out.update({leaf.path: part.view(-1) for leaf, part in zip(of_rank, parts, strict=True)})
        if isinstance(wholes, Exception):
            raise wholes
        return {path: out[path] for path in like}

    def failures(self, wholes: Leaves | Exception | None) -> list[str]:
        """A line for each owner of this axis that failed; asks all of its ranks."""
        group = self.wire.group
        mine: list[str] = []
        if isinstance(wholes, OwnerFailed):
            mine = wholes.lines
        elif isinstance(wholes, Exception):
            mine = [f"rank {group.ranks[group.rank]}: {type(wholes).__name__}: {wholes}"]
        return list(dict.fromkeys(line for lines in gather_objects(mine, group) for line in lines))

    @property
    def _ranks(self) -> range:
        return range(self.wire.group.size)

    def _by_owner(self, leaves: list[Leaf]) -> list[list[Leaf]]:
        """For each rank, those of the leaves that it owns."""
        return [[leaf for leaf in leaves if self.rank_of[leaf.path] == rank] for rank in self._ranks]

    def _length(self, rank: int, leaf: Leaf) -> int:
        low, high = self.spans[rank][leaf.path]
        return high - low

    def _by_dtype(self, tensors: Leaves) -> list[list[Leaf]]:
        """Lists of leaves, each of which travels in one message."""
        found: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.path in tensors:
                found.setdefault((tensors[leaf.path].dtype, tensors[leaf.path].device), []).append(leaf)
        return list(found.values())

    def _exchange(
        self, sent: list[list[Tensor]], lengths: list[list[int]], like: Tensor, nothing: Tensor | None = None
    ) -> tuple[list[list[Tensor]], Tensor]:
        """All-to-all of lists of tensors, one list for each rank; `lengths` are those of what comes from each.

        What comes are columns, and all of them one below the other: of a second derivative `torch.cat` leaves out what
        has one axis and no elements. They are functions of `nothing`.
        """
        hung = [like.new_empty((0, 1)) if nothing is None else nothing.to(like)]
        rows = torch.cat([*hung, *(x.reshape(-1, 1) for parts in sent for x in parts)])
        totals = [sum(of_rank) for of_rank in lengths]
        out = exchange_rows(rows, totals, [sum(x.numel() for x in parts) for parts in sent], self.wire.group)
        return [list(got.split(of_rank)) for got, of_rank in zip(out.split(totals), lengths, strict=True)], out


@dataclass(frozen=True)
class OwnerExchange:
    """The way from pieces to whole leaves at their owners, and back, along each axis of ranks that leaves are cut over.

    Pieces go along the last axis first, which joins what it has cut: each goes along each axis once, and no channel
    between all ranks is needed.

    Attributes:
        axes: the exchange along each, in the order in which they cut leaves.
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner: its place among the ranks that share a leaf, as `place_in` counts.
    """

    axes: tuple[AxisExchange, ...]
    leaves: tuple[Leaf, ...]
    rank_of: dict[str, int]

    def mine(self, paths: Iterable[str]) -> list[str]:
        """Those of leaves that this rank owns."""
        return _owned_here(self.axes, paths)

    def to_owners(self, pieces: Leaves, received: list[Tensor]) -> Leaves:
        """The whole leaves that this rank owns, from the pieces of all ranks. The same paths on every rank.

        What has come, which is nothing where this rank owns nothing, goes into `received` too.
        """
        for axis in reversed(self.axes):
            pieces = axis.to_owners(pieces, received)
        return pieces

    def to_pieces(
        self, wholes: Leaves | Exception, like: Leaves, first: Tensor, nothing: Tensor | None = None
    ) -> Leaves:
        """This rank's pieces of all leaves, from the whole ones at their owners.

        Args:
            wholes: the leaves that this rank owns; or why there are none.
            like: a tensor of the dtype and device of each piece, by path; the same paths on every rank.
            first: a tensor on that device.
            nothing: of no elements; the pieces are functions of it.

        Raises:
            OwnerFailed: on every rank, if there are none on one.
        """
        for i, axis in enumerate(self.axes):
            here = _owned_here(self.axes[i + 1 :], like)
            try:
                wholes = axis.to_pieces(wholes, {path: like[path] for path in here}, first, nothing)
            except Exception as error:  # which the other axes are told too
                wholes = error
        if isinstance(wholes, Exception):
            raise wholes
        return wholes

    def agree(self, failure: Exception | None) -> None:
        """Where nothing comes back: tell all ranks why this one has failed, if it has.

        Raises:
            Exception: `failure`.
            OwnerFailed: on the other ranks.
        """
        for axis in self.axes:
            lines = axis.failures(failure)
            if failure is None and lines:
                failure = OwnerFailed(lines, IN_INIT, INIT_AGAIN)
        if failure is not None:
            raise failure


def _owned_here(axes: Sequence[AxisExchange], paths: Iterable[str]) -> list[str]:
    """Those of paths whose owner has this rank's place along each axis."""
    return [p for p in paths if all([axis.rank_of[p] == axis.wire.group.rank for axis in axes])]


def place_in(cutting: Sequence[Wire]) -> tuple[int, int]:
    """This rank's number among those that share a leaf, in the order of their shards, and how many they are."""
    rank, size = 0, 1
    for wire in cutting:
        rank, size = rank * wire.group.size + wire.group.rank, size * wire.group.size
    return rank, size


def owner_exchange(cutting: Sequence[Wire], leaves: tuple[Leaf, ...]) -> OwnerExchange:
    """The exchange of leaves that these wires cut, one after the other."""
    size = place_in(cutting)[1]
    rank_of = assign_owners(leaves, size)
    axes = []
    for wire in cutting:
        # How many ranks have one part of a leaf behind this axis.
        size //= wire.group.size
        along = {path: rank // size % wire.group.size for path, rank in rank_of.items()}
        axes.append(AxisExchange.of(wire, leaves, along))
    return OwnerExchange(tuple(axes), leaves, rank_of)
