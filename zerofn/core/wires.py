"""The wires of `shard`, `reduce_scatter` and `all_reduce`: all-gather, reduce-scatter and all-reduce of many leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels.codes import BlockDraws, Codes
from ..kernels.packing import (
    FEW,
    divided_by_ranks,
    flagged,
    flat_to_sum,
    remembered_by_shape,
    row_of,
    rows_to_sum,
    wholes_of,
)
from ..ranks.collectives import all_gather_into, all_reduce_, all_to_all_into, reduce_scatter_into
from ..ranks.differentiable import check_batch
from ..ranks.group import Group
from .layout import Leaf, span, width
from .narrow import INT8, AnyCodes, coded_rows, decoded_rows, gather_codes, summed_rows
from .view import Grads, same_tensor

# ----------------------------------------------------------------------------------------------------------------------
# `Sharding` all-gathers and reduce-scatters flat shards, `CodedSharding` with gradients in 8 bits; `Averaging`
# all-reduces full leaves.
#
# Each leaf is sharded by itself, by rows of its first dimension; the last ranks' shards may be shorter or empty. So a
# shard depends only on the leaf and the number of ranks. No padding is stored: norms, checkpoints and rounding see
# exactly the leaf's elements, laid out flat.
#
# Gradients are averaged over ranks, since each rank's loss is the mean over its own samples.


class Cuts(NamedTuple):
    """Where leaves are in the buffer of one collective. Each list has one entry per leaf.

    Attributes:
        widths: elements of the leaf in each rank's row, padding included.
        numels: elements of the full leaf.
        spans: this rank's flat range of the leaf.
        sizes: elements in that range.
        few: whether leaves are so small that they are permuted together.
    """

    widths: list[int]
    numels: list[int]
    spans: list[tuple[int, int]]
    sizes: list[int]
    few: bool


# Every step needs the cuts of the same leaves several times.
@remembered_by_shape
def _cuts(shapes: tuple[torch.Size, ...], rank: int, size: int) -> Cuts:
    spans = [span(x, rank, size) for x in shapes]
    sizes = [high - low for low, high in spans]
    numels = [prod(x) for x in shapes]
    return Cuts([width(x, size) for x in shapes], numels, spans, sizes, sum(numels) <= FEW * len(numels))


@dataclass(frozen=True)
class Sharding:
    """The wire of `shard` and `reduce_scatter`: an all-gather; its transpose reduce-scatters the mean over ranks.

    Attributes:
        group: the ranks that share a leaf.
        reduce_dtype: dtype in which gradients are summed; by default the dtype of the gradient.
        gathered: the codes in which shards are sent, rounded to nearest; `None` to send shards as they are. A rank
            decodes its own shard from the same codes as the other ranks do.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    gathered: AnyCodes | None = None
    cuts: ClassVar[bool] = True

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Sharding:
        return replace(self, group=group, reduce_dtype=reduce_dtype)

    def span(self, leaf: Leaf) -> tuple[int, int]:
        return _cuts((leaf,), self.group.rank, self.group.size).spans[0]

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        low, high = self.span(leaf)
        return x.reshape(-1)[low:high]

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        batch = x.shape[:-1]
        if batch:
            check_batch(batch, leaf.path, self.group, x.reshape(batch.numel(), x.shape[-1]))
        # Each member of a batch is sent as a leaf of its own, with its own codes.
        leaves = [leaf] * batch.numel()
        fulls = self.join_parts(self.send_parts(list(x.reshape(len(leaves), x.shape[-1])), leaves)[1], leaves)
        return torch.stack(fulls).reshape(*batch, *leaf.shape) if batch else fulls[0].reshape(leaf.shape)

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        batch = g.shape[: g.ndim - len(leaf.shape)]
        if batch:
            check_batch(batch, leaf.path, self.group)
        leaves, numels = [leaf] * batch.numel(), [leaf.numel] * batch.numel()
        dtype = self.reduce_dtype or g.dtype
        buffer = self.pack(list(g.reshape(len(leaves), leaf.numel)), leaves, numels, dtype, g.device)
        found = self.unpack(self.send(buffer)[1], leaves, numels, [True] * len(leaves))
        mine = [x for x in found if x is not None]
        return torch.stack(mine).reshape(*batch, len(mine[0])) if batch else mine[0]

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """All-gather this rank's shards, all of one dtype: (work handle, rows of all ranks).

        Args:
            parts: shards of this rank.
            leaves: the leaves that they are shards of.
            async_op: whether to return before the rows of other ranks have arrived.
        """
        # Each rank's row has its range of every leaf, so a leaf is a block of columns over all rows.
        rank, size = self.group.rank, self.group.size
        widths = _cuts(leaves, rank, size).widths
        each = sum(widths)
        if self.gathered is not None:
            work, rows = gather_codes(parts, widths, self.gathered, self.group)
            return work if async_op else work.wait() and None, rows
        every = parts[0].new_empty(size * each)
        mine = row_of(parts, widths, every[rank * each : (rank + 1) * each])
        return all_gather_into(every, mine, self.group, async_op), every.view(size, each)

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Full flat leaves (numel,) from the rows of all ranks.

        Args:
            rows: from `send_parts`, whose work handle has been waited for.
            leaves: what is in them.
            into: flat tensors to write into; new ones by default.
        """
        cuts = _cuts(leaves, self.group.rank, self.group.size)
        return wholes_of(rows, cuts.widths, cuts.numels, into, cuts.few)

    def pack(
        self, grads: Grads, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The buffer that is reduce-scattered: a tensor with a row for each rank.

        A row has the rank's shard of every gradient, divided by the number of ranks, and then a flag for each leaf. The
        flag says whether this rank has a gradient of the leaf. A leaf without a gradient is sent as zeros.

        Args:
            grads: full flat gradients; `None` for a leaf without a gradient.
            leaves: the leaves of the gradients.
            numels: the number of elements of each leaf.
            dtype: the dtype of the sum.
            device: the device of the sum.
        """
        cuts = _cuts(leaves, self.group.rank, self.group.size)
        return rows_to_sum(grads, cuts.widths, cuts.numels, self.group.size, dtype, device, cuts.few)

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Reduce-scatter the rows: (work handle, this rank's row of the sum)."""
        mine = buffer.new_empty(buffer.shape[1:])
        return reduce_scatter_into(mine, buffer.reshape(-1), self.group, async_op), mine

    def unpack(
        self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int], given: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """This rank's shard of every gradient; `None` if no rank had one."""
        cuts = _cuts(leaves, self.group.rank, self.group.size)
        *blocks, flags = mine.split_with_sizes([*cuts.widths, len(leaves)], dim=0)
        if given and all(given) and cuts.sizes == cuts.widths:
            return [*blocks]
        return _shards(blocks, flags, given, cuts)


def _shards(blocks: list[Tensor], flags: Tensor, given: Sequence[bool], cuts: Cuts) -> list[Tensor | None]:
    """This rank's shard of every gradient, from blocks that may be padded; `None` if no rank had one."""
    used = flagged(flags, given)
    if cuts.sizes == cuts.widths and all(used):
        return [*blocks]
    return [
        None if not u else b if n == each else b[:n]
        for b, n, each, u in zip(blocks, cuts.sizes, cuts.widths, used, strict=True)
    ]


@dataclass(frozen=True)
class CodedSharding(Sharding):
    """The wire `Sharding`, except that each rank sends gradients as codes, and sums the decoded gradients in fp32.

    Attributes:
        codes: the codes in which gradients are sent.
    """

    reduce_dtype: torch.dtype | None = torch.float32
    codes: Codes = INT8

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> CodedSharding:
        return replace(self, group=group)

    def pack(
        self, grads: Grads, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The rows of `Sharding.pack`, encoded as bytes."""
        rows = super().pack(grads, leaves, numels, torch.float32, device)
        # Random bits depend on the rank, so that ranks with equal gradients do not round them alike.
        return coded_rows(rows, self._widths(leaves), self.codes, BlockDraws(self.group.rank))

    def rounded(self, g: Tensor, leaf: Leaf) -> Tensor:
        """This rank's full flat gradient after encoding and decoding, in fp32.

        These are the numbers that other ranks decode from the message of this rank.
        """
        widths = self._widths([leaf])
        message = self.pack([g], [leaf], [leaf.numel], torch.float32, g.device)
        (full,) = wholes_of(decoded_rows(message, widths, self.codes)[0][:, : widths[0]], widths, [leaf.numel])
        return full * self.group.size

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Send each rank its row: (work handle, the rows of all ranks to be summed)."""
        received = torch.empty_like(buffer)
        return all_to_all_into(received, buffer, self.group, async_op, "reduce_scatter"), received

    def unpack(
        self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int], given: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """Decode and sum: this rank's shard of every gradient; `None` if no rank had one."""
        cuts = _cuts(leaves, self.group.rank, self.group.size)
        return _shards(*summed_rows(mine, cuts.widths, self.codes), given, cuts)

    def _widths(self, leaves: Sequence[Leaf]) -> list[int]:
        return _cuts(leaves, self.group.rank, self.group.size).widths


@dataclass(frozen=True)
class Averaging:
    """The wire of `all_reduce`: the identity; its transpose is the mean over ranks.

    Leaves may be full, or shards along another axis of the mesh: shapes are those of the given tensors.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    cuts: ClassVar[bool] = False

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Averaging:
        return replace(self, group=group, reduce_dtype=reduce_dtype)

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """All of the leaf."""
        return 0, leaf.numel

    store = view = staticmethod(same_tensor)

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        # A gradient without a batch dimension has the shape of the leaf, or is a flat shard of it.
        if g.shape != leaf.shape and (g.ndim != 1 or not leaf.shape):
            plain = g.shape[g.ndim - len(leaf.shape) :] == leaf.shape
            check_batch(g.shape[: g.ndim - len(leaf.shape) if plain else -1], leaf.path, self.group)
        mean = divided_by_ranks(g, self.group.size, self.reduce_dtype or g.dtype).contiguous()
        all_reduce_(mean, self.group)
        return mean

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """Nothing is sent: every rank has all of it."""
        return None, torch.cat([x.reshape(-1) for x in parts])

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The leaves, which every rank has already."""
        fulls = list(rows.split_with_sizes([leaf.numel for leaf in leaves]))
        return fulls if into is None else [full.copy_(x) for full, x in zip(into, fulls, strict=True)]

    def pack(
        self, grads: Grads, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Gradients end to end as this rank has them, divided by the number of ranks, and one flag for each."""
        return flat_to_sum(grads, numels, self.group.size, dtype, device)

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """All-reduce the buffer, in place."""
        return all_reduce_(buffer, self.group, async_op=async_op), buffer

    def unpack(
        self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int], given: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """The mean of every gradient; `None` if no rank had one."""
        *blocks, flags = mine.split_with_sizes([*numels, len(leaves)])
        used = flagged(flags, given)
        return [*blocks] if all(used) else [b if u else None for b, u in zip(blocks, used, strict=True)]
