"""All-gather, reduce-scatter and all-reduce as wires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._compat.tensors import foreach_copy_
from ..extend import Group, Leaf, all_gather_into, all_reduce_, check_batch, reduce_scatter_into, span, width

# ----------------------------------------------------------------------------------------------------------------------
# In a compiled graph leaves are packed into the buffer of a collective by `torch.cat`, not in place.
#
# Outside of graphs a wire writes leaves into a buffer, in one pass over memory. In a graph that is slow: for each
# write the compiler copies the whole buffer, or proves that it need not, so that the cost grows with the square of
# the number of leaves. The numbers are the same either way.


def row_of(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Parts (n, ...) of leaves end to end, each padded with zeros to its width.

    >>> row_of([torch.ones(2), torch.ones(1)], [2, 3])
    tensor([1., 1., 1., 0., 0.])
    """
    return torch.cat([_filled(x, each) for x, each in zip(parts, widths, strict=True)])


def wholes_of(rows: Tensor, widths: Sequence[int], numels: Sequence[int]) -> list[Tensor]:
    """The inverse of `row_of`, of the rows of all ranks: whole leaves (numel, ...).

    >>> wholes_of(torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 6.0]]), [2, 1], [3, 2])
    [tensor([0., 1., 2.]), tensor([5., 6.])]
    """
    blocks = rows.split(list(widths), dim=1)
    return [x.reshape(-1, *rows.shape[2:])[:n] for x, n in zip(blocks, numels, strict=True)]


def rows_to_sum(
    grads: Sequence[Tensor | None], widths: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Leaves (numel, ...) divided by `size`, cut into `size` rows; at the end of each row a flag for each leaf.

    >>> rows_to_sum([torch.tensor([2.0, 4.0, 6.0]), None], [2, 1], 2, torch.float32, torch.device("cpu"))
    tensor([[1., 2., 0., 1., 0.],
            [3., 0., 0., 1., 0.]])
    """
    tail = next((x.shape[1:] for x in grads if x is not None), torch.Size())
    one = torch.ones((size, 1, *tail), dtype=dtype, device=device)
    blocks = [
        one.new_zeros((size, each, *tail)) if x is None else _filled(over(x, size, dtype), size * each)
        for x, each in zip(grads, widths, strict=True)
    ]
    cut = [x.reshape(size, each, *tail) for x, each in zip(blocks, widths, strict=True)]
    return torch.cat([*cut, *(torch.zeros_like(one) if x is None else one for x in grads)], dim=1)


def flat_to_sum(
    grads: Sequence[Tensor | None], numels: Sequence[int], size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Leaves divided by `size`, end to end; at the end a flag for each leaf.

    >>> flat_to_sum([torch.tensor([2.0, 4.0]), None], [2, 1], 2, torch.float32, torch.device("cpu"))
    tensor([1., 2., 0., 1., 0.])
    """
    one = torch.ones(1, dtype=dtype, device=device)
    flat = [one.new_zeros(n) if x is None else over(x, size, dtype) for x, n in zip(grads, numels, strict=True)]
    return torch.cat([*flat, *(torch.zeros_like(one) if x is None else one for x in grads)])


def over(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`x / size` in `dtype`, divided in the wider of the two dtypes."""
    wide = torch.promote_types(x.dtype, dtype) == x.dtype
    return (x / size).to(dtype) if wide else x.to(dtype) / size


def _filled(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros((length - len(x), *x.shape[1:]))]) if len(x) < length else x


# ----------------------------------------------------------------------------------------------------------------------
# Wires send leaves over ranks: all-gather and reduce-scatter of flat shards, and all-reduce of whole leaves.
#
# Each leaf is cut by itself, by rows of its first dimension; the last ranks' shards may be shorter or empty. So a
# shard depends on the leaf and the number of ranks alone. No padding is stored: norms, checkpoints and rounding see
# exactly the leaf's elements, laid out flat.
#
# Gradients are averaged over ranks, since each rank's loss is the mean over its own part of the batch. They are
# divided *before* they are summed, so that a sum in fp16 does not overflow.


_SHAPE = attrgetter("shape")


class Cuts(NamedTuple):
    """How leaves lie in the buffer of one collective. Each list has one entry for each leaf.

    Attributes:
        widths: the elements of the leaf in each rank's row, padding included.
        numels: the elements of the whole leaf.
        spans: this rank's flat range of the leaf.
    """

    widths: list[int]
    numels: list[int]
    spans: list[tuple[int, int]]


def _cuts(shapes: Sequence[torch.Size], rank: int, size: int) -> Cuts:
    widths, spans = [width(x, size) for x in shapes], [span(x, rank, size) for x in shapes]
    return Cuts(widths, [prod(x) for x in shapes], spans)


# Of leaves that travel together, which every step asks for several times; and of each by itself, while it is attached.
_known_cuts = cache(_cuts)


@dataclass(frozen=True)
class Sharding:
    """The wire of `shard` and `reduce_scatter`: an all-gather; its transpose, reduce-scatter of the mean over ranks.

    Attributes:
        group: the ranks that share a leaf.
        reduce_dtype: dtype in which gradients are summed; by default the one they arrive in.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    cuts: ClassVar[bool] = True

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Sharding:
        return replace(self, group=group, reduce_dtype=reduce_dtype)

    def span(self, leaf: Leaf) -> tuple[int, int]:
        return self._cut((leaf,)).spans[0]

    def _cut(self, leaves: Sequence[Leaf]) -> Cuts:
        group = self.group
        if torch.compiler.is_compiling():
            # The compiler cannot read an `attrgetter`, and would guard on what is looked up while it traces.
            return _cuts([leaf.shape for leaf in leaves], group.rank, group.size)
        return _known_cuts(tuple(map(_SHAPE, leaves)), group.rank, group.size)

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        low, high = self.span(leaf)
        return x.reshape(-1)[low:high]

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        batch = x.shape[:-1]
        if batch:
            check_batch(batch, leaf.path, self.group, x.reshape(batch.numel(), x.shape[-1]))
        rows = x.movedim(-1, 0).reshape(x.shape[-1], batch.numel())
        (full,) = self.join_parts(self.send_parts([rows], [leaf])[1], [leaf])
        return full.reshape(leaf.numel, *batch).movedim(0, -1).reshape((*batch, *leaf.shape))

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        batch = g.shape[: g.ndim - len(leaf.shape)]
        if batch:
            check_batch(batch, leaf.path, self.group)
        rows = g.reshape(*batch, leaf.numel).movedim(-1, 0).reshape(leaf.numel, batch.numel())
        buffer = self.pack([rows], [leaf], [leaf.numel], self.reduce_dtype or g.dtype, g.device)
        (mine,) = self.unpack(self.send(buffer)[1], [leaf], [leaf.numel])
        assert mine is not None
        return mine.reshape(mine.shape[0], *batch).movedim(0, -1)

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """All-gather this rank's shards, all of one dtype: (work handle, rows of all ranks).

        Args:
            parts: shards of this rank.
            leaves: what they are shards of.
            async_op: return before the rows of other ranks have arrived.
        """
        tail = parts[0].shape[1:]
        widths = self._cut(leaves).widths
        if torch.compiler.is_compiling():
            mine = row_of(parts, widths)
            every = mine.new_empty((self.group.size * len(mine), *tail))
            return all_gather_into(every, mine, self.group, async_op), every.reshape(self.group.size, -1, *tail)
        # Each rank's row holds its range of every leaf, so a leaf is a block of columns over all rows.
        rows = parts[0].new_empty((self.group.size, sum(widths), *tail))
        mine = rows[self.group.rank]
        foreach_copy_(
            [part[: x.shape[0]] for x, part in zip(parts, mine.split_with_sizes(widths), strict=True)], list(parts)
        )
        return all_gather_into(rows.reshape(-1, *tail), mine, self.group, async_op), rows

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Full flat leaves (numel, ...) from rows of all ranks.

        Args:
            rows: of `send_parts`, whose work handle has been waited for.
            leaves: what is in them.
            into: flat tensors to write to; new ones by default.
        """
        tail = rows.shape[2:]
        widths, numels, _ = self._cut(leaves)
        if into is None and torch.compiler.is_compiling():
            return wholes_of(rows, widths, numels)
        fulls = into or [rows.new_empty((n, *tail)) for n in numels]
        places, blocks = [], []
        for full, block, each in zip(fulls, rows.split_with_sizes(widths, dim=1), widths, strict=True):
            n = full.shape[0]
            whole = n // each if each else 0
            rest = n - whole * each
            places.append((full[: whole * each] if rest else full).view(whole, each, *tail))
            blocks.append(block[:whole])
            if rest:
                places.append(full[whole * each :])
                blocks.append(block[whole, :rest])
        foreach_copy_(places, blocks)
        return list(fulls)

    def pack(
        self,
        grads: Sequence[Tensor | None],
        leaves: Sequence[Leaf],
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Full flat leaves, divided by the number of ranks, as rows (ranks, widths + flags, ...) to be summed.

        A leaf without a gradient is sent as zeros. One flag for each leaf tells whether any rank has a gradient.
        """
        size = self.group.size
        widths, wholes, _ = self._cut(leaves)
        if torch.compiler.is_compiling():
            return rows_to_sum(grads, widths, size, dtype, device)
        tail = _dims_behind_first(grads)
        rows = torch.empty((size, sum(widths) + len(leaves), *tail), dtype=dtype, device=device)
        blocks = rows.split_with_sizes([*widths, len(leaves)], dim=1)
        for x, numel, each, block in zip(grads, wholes, widths, blocks, strict=False):
            whole = numel // each if each else 0
            if x is None:
                block.zero_()
                continue
            _divide_into(x[: whole * each].reshape(whole, each, *tail), size, block[:whole])
            if whole < size:
                block[whole:] = 0
                rest = numel - whole * each
                _divide_into(x[whole * each :], size, block[whole, :rest])
        _write_flags(blocks[-1], grads)
        return rows

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Sum the rows over ranks; (work handle, this rank's row)."""
        mine = buffer.new_empty(buffer.shape[1:])
        return reduce_scatter_into(mine, buffer.reshape(-1, *buffer.shape[2:]), self.group, async_op), mine

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int]) -> list[Tensor | None]:
        """This rank's shard of every leaf; `None` where no rank had a gradient."""
        widths, _, spans = self._cut(leaves)
        *blocks, flags = mine.split_with_sizes([*widths, len(leaves)], dim=0)
        return [b[: high - low] if u else None for b, (low, high), u in zip(blocks, spans, _used(flags), strict=True)]


@dataclass(frozen=True)
class Averaging:
    """The wire of `all_reduce`: the identity; its transpose, the mean over ranks.

    Leaves may be full or shards of another axis of the mesh: shapes are those of the tensors given.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    cuts: ClassVar[bool] = False

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Averaging:
        return replace(self, group=group, reduce_dtype=reduce_dtype)

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """All of it."""
        return 0, leaf.numel

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        # A gradient without a batch has the shape of the leaf, or is a flat part of it.
        if g.shape != leaf.shape and (g.ndim != 1 or not leaf.shape):
            plain = g.shape[g.ndim - len(leaf.shape) :] == leaf.shape
            check_batch(g.shape[: g.ndim - len(leaf.shape) if plain else -1], leaf.path, self.group)
        mean = over(g, self.group.size, self.reduce_dtype or g.dtype).contiguous()
        all_reduce_(mean, self.group)
        return mean

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """What every rank has already."""
        return None, torch.cat([x.reshape(-1) for x in parts])

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """What every rank has already."""
        fulls = list(rows.split_with_sizes([leaf.numel for leaf in leaves]))
        return fulls if into is None else [full.copy_(x) for full, x in zip(into, fulls, strict=True)]

    def pack(
        self,
        grads: Sequence[Tensor | None],
        leaves: Sequence[Leaf],
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Leaves end to end as this rank has them, divided by the number of ranks, and one flag for each."""
        if torch.compiler.is_compiling():
            return flat_to_sum(grads, numels, self.group.size, dtype, device)
        flat = torch.empty(sum(numels) + len(leaves), dtype=dtype, device=device)
        *blocks, flags = flat.split_with_sizes([*numels, len(leaves)])
        for x, block in zip(grads, blocks, strict=True):
            _ = block.zero_() if x is None else _divide_into(x, self.group.size, block)
        _write_flags(flags.unsqueeze(0), grads)
        return flat

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Sum the buffer over ranks, in place."""
        return all_reduce_(buffer, self.group, async_op=async_op), buffer

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int]) -> list[Tensor | None]:
        """The mean of every leaf; `None` where no rank had a gradient."""
        *blocks, flags = mine.split_with_sizes([*numels, len(leaves)])
        return [b if u else None for b, u in zip(blocks, _used(flags), strict=True)]


def _dims_behind_first(grads: Sequence[Tensor | None]) -> torch.Size:
    """The dimensions behind the first, which are equal in all gradients."""
    for x in grads:
        if x is not None:
            return x.shape[1:]
    return torch.Size()


def _divide_into(x: Tensor, size: int, out: Tensor) -> None:
    """`x / size` into `out`: divided in the wider of the two dtypes, in one pass over memory."""
    if torch.promote_types(x.dtype, out.dtype) == x.dtype:
        torch.div(x, size, out=out)
    else:
        out.copy_(x).div_(size)


def _write_flags(flags: Tensor, fulls: Sequence[Tensor | None]) -> None:
    flags.fill_(1.0)
    for i, x in enumerate(fulls):
        if x is None:
            flags[:, i] = 0.0


def _used(flags: Tensor) -> list[bool]:
    # A graph cannot branch on a number: there a leaf without a gradient on any rank has one of zeros.
    if torch.compiler.is_compiling():
        return [True] * len(flags)
    # Flags are never NaN: an overflow in a leaf does not reach its flag.
    return (flags.reshape(len(flags), -1)[:, 0] > 0).tolist() if len(flags) else []
