"""Leaves sharded along two axes of a mesh: the second wire shards what the first has left of each leaf.

`shard(mesh["node"])` gives a rank a range of each leaf; a `reduce_scatter(mesh["nodes"])` behind it cuts that range.
A wire cuts whole leaves, so the second one is given the range as a leaf of its own: its rows, if it is of whole rows,
else a flat one. All ranks of the second wire have the same range, since axes of a mesh cross: what one of them sends is
what the others expect. Between the two wires a shard is flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from .._errors import explain
from ..ranks.group import Group
from .layout import Leaf
from .row_sharding import rows_between
from .views import View, Wire, over_ranks


@dataclass(frozen=True)
class ShardsOfShards:
    """A wire over the shards that another one has left of leaves.

    Attributes:
        first: the wire that cuts leaves.
        wire: the wire that cuts its shards.
    """

    first: Wire
    wire: Wire
    cuts: ClassVar[bool] = True

    @property
    def group(self) -> Group:
        return self.wire.group

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.wire.reduce_dtype

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> ShardsOfShards:
        return replace(self, wire=self.wire.on(group, reduce_dtype))

    def given(self, leaf: Leaf) -> Leaf:
        """The shard that the first wire leaves of a leaf, as a leaf: some of its rows, or a flat range."""
        low, high = self.first.span(leaf)
        return replace(leaf, shape=torch.Size(rows_between(leaf.shape, low, high) or (high - low,)))

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's range of the flattened whole leaf."""
        begin = self.first.span(leaf)[0]
        low, high = self.wire.span(self.given(leaf))
        return begin + low, begin + high

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        return self.wire.view(x, self.given(leaf)).reshape(*x.shape[:-1], -1)

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        part = self.given(leaf)
        return self.wire.pull(g.reshape(*g.shape[:-1], *part.shape), part)

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        return self.wire.store(x, self.given(leaf))

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        return self.wire.send_parts(parts, self._given(leaves), async_op)

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.wire.join_parts(rows, self._given(leaves), into)

    def pack(
        self,
        grads: Sequence[Tensor | None],
        leaves: Sequence[Leaf],
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return self.wire.pack(grads, self._given(leaves), numels, dtype, device)

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        return self.wire.send(buffer, async_op)

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int]) -> list[Tensor | None]:
        return self.wire.unpack(mine, self._given(leaves), numels)

    def _given(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [self.given(leaf) for leaf in leaves]


def spans_by_rank(cutting: Sequence[Wire], leaf: Leaf) -> Iterator[tuple[int, int]]:
    """Each rank's range of a flattened leaf, rank by rank, where wires cut it one behind the other."""
    first, *rest = cutting
    for rank in range(first.group.size):
        wire = first.on(replace(first.group, rank=rank), None)
        if rest:
            # What cuts behind another wire was made by `on_ranks`.
            yield from spans_by_rank([replace(cast(ShardsOfShards, rest[0]), first=wire), *rest[1:]], leaf)
        else:
            yield wire.span(leaf)


def on_ranks(view: View, cutting: Sequence[Wire], reduce_dtype: torch.dtype | None) -> View:
    """The view of a wire with sums in `reduce_dtype`, over shards where other wires have cut leaves before."""
    assert view.wire is not None
    wire, given = view.wire.on(view.wire.group, reduce_dtype), view.given
    if cutting and wire.cuts:
        wire = shards = ShardsOfShards(cutting[-1], wire)
        given = lambda leaf: replace(leaf, shape=torch.Size([shards.given(leaf).numel]))  # noqa: E731
    return replace(over_ranks(wire, view.resident, view.traceable), name=view.name, given=given)


def check_axes(reduced: Sequence[tuple[str, Group]]) -> None:
    """Refuse two reductions over the same ranks: two axes of a mesh have one rank in common.

    Args:
        reduced: the transforms that reduce, by name, and over which ranks.
    """
    for i, (name, group) in enumerate(reduced):
        for other, before in reduced[:i]:
            both = sorted(set(before.ranks) & set(group.ranks))
            if len(both) > 1:
                raise ValueError(
                    explain(
                        f"chain(..., {other}, ..., {name}, ...) that both reduce over ranks {both}",
                        "the second finds nothing to add up there: what those ranks have is reduced over them already",
                        "mesh = init_device_mesh(device, (nodes, ranks_of_one), mesh_dim_names=('nodes', 'node'))\n"
                        f"         zf.{other}(mesh['node']), ..., zf.{name}(mesh['nodes'])",
                    )
                )
