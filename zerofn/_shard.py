"""`shard`, `reduce_scatter` and `all_reduce`: where parameters and gradients live, as linear maps.

Every leaf is cut by itself, flat, into equal consecutive ranges; the last ranks' may be shorter or empty. So a
shard depends on the leaf and the number of ranks alone, no padding is ever stored, and norms, checkpoints
and rounding see exactly the leaf's elements.

Gradients are averaged over ranks: each rank's loss is the mean over its own part of the batch. They
are divided *before* they are summed, where fp16 cannot overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ._batched import check_batch
from ._errors import explain
from ._factory import transform
from ._group import Group
from ._groups import mesh_group, world_group
from ._transfers import all_gather_into, all_reduce_, reduce_scatter_into
from ._tree import Layout, Leaf
from ._types import Role, Stage, Transform

# Bytes of one collective's buffer: a sixteenth of all, so that buffers under way are small beside the model, but
# no smaller than what a message costs anyway and no larger than full bandwidth needs.
LEAST_BYTES, BUCKET_BYTES, BUCKETS = 1 << 22, 1 << 24, 16


def span(numel: int, rank: int, size: int) -> tuple[int, int]:
    """The flat range of a leaf that a rank holds.

    >>> [span(10, r, 4) for r in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    width = -(-numel // size)
    return min(rank * width, numel), min((rank + 1) * width, numel)


@dataclass(frozen=True)
class Sharding:
    """The view of `shard` and of `reduce_scatter`: gather; its transpose, the mean over ranks cut into shards.

    Attributes:
        group: the ranks that share a leaf.
        reduce_dtype: dtype in which gradients are summed; by default the one they arrive in.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    only_dtype: ClassVar[bool] = False

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's flat range of the leaf."""
        return span(leaf.numel, self.group.rank, self.group.size)

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        low, high = self.span(leaf)
        return x.reshape(-1)[low:high] if self.group.size > 1 else x

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        batch = x.shape[:-1]
        if batch and self.group.size > 1:
            check_batch(batch, leaf.path, self.group, x.reshape(batch.numel(), x.shape[-1]))
        rows = x.movedim(-1, 0).reshape(x.shape[-1], batch.numel())
        (full,) = self.gather([rows], [leaf])
        return full.reshape(leaf.numel, *batch).movedim(0, -1).reshape((*batch, *leaf.shape))

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        batch = g.shape[: g.ndim - len(leaf.shape)]
        if batch and self.group.size > 1:
            check_batch(batch, leaf.path, self.group)
        rows = g.reshape(*batch, leaf.numel).movedim(-1, 0).reshape(leaf.numel, batch.numel())
        buffer = self.pack([rows], [leaf], self.reduce_dtype or g.dtype, g.device)
        (mine,) = self.unpack(self.send(buffer)[1], [leaf])
        assert mine is not None
        return mine.reshape(mine.shape[0], *batch).movedim(0, -1)

    def changes(self, leaf: Leaf) -> bool:
        return self.group.size > 1

    def gather(
        self, shards: Sequence[Tensor], leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Full flat leaves (numel, ...) from this rank's shards of one dtype, in one collective.

        Args:
            shards: of this rank.
            leaves: what they are shards of.
            into: flat tensors to write to; new ones by default.
        """
        size = self.group.size
        tail = shards[0].shape[1:]
        widths = [_width(leaf, size) for leaf in leaves]
        # Each rank's row holds its range of every leaf, so a leaf is a block of columns over all rows.
        rows = shards[0].new_empty((size, sum(widths), *tail))
        mine = rows[self.group.rank]
        for x, part in zip(shards, mine.split(widths), strict=True):
            part[: len(x)] = x
        all_gather_into(rows.reshape(-1, *tail), mine, self.group)
        fulls = into or [rows.new_empty((leaf.numel, *tail)) for leaf in leaves]
        for full, block, width in zip(fulls, rows.split(widths, dim=1), widths, strict=True):
            whole = len(full) // width if width else 0
            full[: whole * width].view(whole, width, *tail).copy_(block[:whole])
            if whole * width < len(full):
                full[whole * width :] = block[whole, : len(full) - whole * width]
        return list(fulls)

    def pack(
        self, fulls: Sequence[Tensor | None], leaves: Sequence[Leaf], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Full flat leaves, over the number of ranks, as (ranks, widths + flags, ...) rows to be summed.

        A leaf without gradient here is sent as zeros; a flag for each leaf tells whether any rank had one.
        """
        size = self.group.size
        tail = next((x.shape[1:] for x in fulls if x is not None), torch.Size())
        widths = [_width(leaf, size) for leaf in leaves]
        rows = torch.empty((size, sum(widths) + len(leaves), *tail), dtype=dtype, device=device)
        blocks = rows.split([*widths, len(leaves)], dim=1)
        for x, leaf, width, block in zip(fulls, leaves, widths, blocks, strict=False):
            whole = leaf.numel // width if width else 0
            if x is None:
                block.zero_()
                continue
            _over(x[: whole * width].reshape(whole, width, *tail), size, block[:whole])
            if whole < size:
                block[whole:] = 0
                rest = leaf.numel - whole * width
                _over(x[whole * width :], size, block[whole, :rest])
        _flag(blocks[-1], fulls)
        return rows

    def send(self, rows: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Sum the rows over ranks; (work handle, this rank's row)."""
        mine = rows.new_empty(rows.shape[1:])
        return reduce_scatter_into(mine, rows.reshape(-1, *rows.shape[2:]), self.group, async_op), mine

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf]) -> list[Tensor | None]:
        """This rank's shard of every leaf; `None` where no rank had a gradient."""
        widths = [_width(leaf, self.group.size) for leaf in leaves]
        *blocks, flags = mine.split([*widths, len(leaves)], dim=0)
        used = _used(flags)
        lengths = [high - low for low, high in map(self.span, leaves)]
        return [b[:n] if u else None for b, n, u in zip(blocks, lengths, used, strict=True)]

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Shape of what this rank stores."""
        low, high = self.span(leaf)
        return (high - low,) if self.group.size > 1 else tuple(leaf.shape)


@dataclass(frozen=True)
class Averaging:
    """The view of `all_reduce`: the identity; its transpose, the mean over ranks.

    Leaves may be full or shards of another axis of the mesh: shapes are those of the tensors given.
    """

    group: Group
    reduce_dtype: torch.dtype | None = None
    only_dtype: ClassVar[bool] = False

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        return x

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        # A gradient without a batch has the shape of the leaf, or is a flat part of it.
        if g.shape != leaf.shape and (g.ndim != 1 or not leaf.shape):
            plain = g.shape[g.ndim - len(leaf.shape) :] == leaf.shape
            check_batch(g.shape[: g.ndim - len(leaf.shape) if plain else -1], leaf.path, self.group)
        mean = (g.to(self.reduce_dtype or g.dtype) / self.group.size).contiguous()
        all_reduce_(mean, self.group)
        return mean

    def changes(self, leaf: Leaf) -> bool:
        return self.group.size > 1


@dataclass(frozen=True)
class Flat:
    """How a bucket of an `Averaging` travels: leaves end to end, of the lengths they have on this rank."""

    group: Group
    numels: dict[str, int]

    def pack(
        self, fulls: Sequence[Tensor | None], leaves: Sequence[Leaf], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        lengths = [self.numels[leaf.path] for leaf in leaves]
        flat = torch.empty(sum(lengths) + len(leaves), dtype=dtype, device=device)
        *blocks, flags = flat.split([*lengths, len(leaves)])
        for x, block in zip(fulls, blocks, strict=True):
            _ = block.zero_() if x is None else _over(x, self.group.size, block)
        _flag(flags.unsqueeze(0), fulls)
        return flat

    def send(self, flat: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        return all_reduce_(flat, self.group, async_op=async_op), flat

    def unpack(self, flat: Tensor, leaves: Sequence[Leaf]) -> list[Tensor | None]:
        lengths = [self.numels[leaf.path] for leaf in leaves]
        *blocks, flags = flat.split([*lengths, len(leaves)])
        return [b if u else None for b, u in zip(blocks, _used(flags), strict=True)]


def _width(leaf: Leaf, size: int) -> int:
    return -(-leaf.numel // size)


def _over(x: Tensor, size: int, out: Tensor) -> None:
    """`x / size` into `out`: divided in the wider of the two dtypes, in one pass over memory."""
    if torch.promote_types(x.dtype, out.dtype) == x.dtype:
        torch.div(x, size, out=out)
    else:
        out.copy_(x).div_(size)


def _flag(flags: Tensor, fulls: Sequence[Tensor | None]) -> None:
    for i, x in enumerate(fulls):
        flags[:, i] = 0.0 if x is None else 1.0


def _used(flags: Tensor) -> list[bool]:
    # NaN is no answer here: an overflow in the leaf does not reach its flag.
    return (flags.reshape(len(flags), -1)[:, 0] > 0).tolist() if len(flags) else []


def cut(leaves: Sequence[Leaf], dtypes: dict[str, torch.dtype], limit: int | None = None) -> list[list[Leaf]]:
    """Leaves of one dtype each, in order, about `limit` bytes together: what one collective carries."""
    if limit is None:
        total = sum(leaf.numel * dtypes[leaf.path].itemsize for leaf in leaves)
        limit = min(max(total // BUCKETS, LEAST_BYTES), BUCKET_BYTES)
    found: list[list[Leaf]] = []
    open_: dict[torch.dtype, tuple[list[Leaf], int]] = {}
    for leaf in leaves:
        dtype = dtypes[leaf.path]
        bucket, size = open_.get(dtype, ([], 0))
        if not bucket or size + leaf.numel * dtype.itemsize > limit:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(leaf)
        open_[dtype] = bucket, size + leaf.numel * dtype.itemsize
    return found


def view_all(
    stage: Stage, xs: dict[str, Tensor], leaves: Sequence[Leaf], into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A stage's view of many leaves; gathers are coalesced, and written to `into`. Not differentiable."""
    if not isinstance(stage, Sharding) or stage.group.size == 1:
        return {leaf.path: stage.view(xs[leaf.path], leaf) if stage.changes(leaf) else xs[leaf.path] for leaf in leaves}
    out: dict[str, Tensor] = {}
    # A caller who says where to write to has cut them already.
    for bucket in [leaves] if into else cut(leaves, {p: x.dtype for p, x in xs.items()}):
        flat = [into[leaf.path].detach().view(-1) for leaf in bucket] if into else None
        fulls = stage.gather([xs[leaf.path] for leaf in bucket], bucket, flat)
        out.update({leaf.path: x.reshape(leaf.shape) for leaf, x in zip(bucket, fulls, strict=True)})
    return out


class Like(NamedTuple):
    """What a gradient would be, whether or not this rank has it."""

    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def pull_all(stage: Stage, gs: dict[str, Tensor], leaves: Sequence[Leaf], like: dict[str, Like]) -> dict[str, Tensor]:
    """A stage's transpose for many leaves, coalesced and in a fixed order whichever have a gradient here.

    Not differentiable.
    """
    if not isinstance(stage, Sharding | Averaging):
        return {leaf.path: stage.pull(gs[leaf.path], leaf) for leaf in leaves if leaf.path in gs}
    wire = wire_of(stage, like)
    out: dict[str, Tensor] = {}
    for bucket in cut(leaves, {p: x.dtype for p, x in like.items()}):
        first = like[bucket[0].path]
        fulls = [gs[leaf.path].reshape(-1) if leaf.path in gs else None for leaf in bucket]
        buffer = wire.pack(fulls, bucket, stage.reduce_dtype or first.dtype, first.device)
        for leaf, g in zip(bucket, wire.unpack(wire.send(buffer)[1], bucket), strict=True):
            if g is not None:
                out[leaf.path] = g if isinstance(stage, Sharding) else g.reshape(like[leaf.path].shape)
    return out


def like_after(stage: Stage, leaf: Leaf, before: Like) -> Like:
    """What a gradient is once it has been pulled through a stage."""
    if isinstance(stage, Sharding):
        shape = stage.shape(leaf)
        return Like(shape[0], shape, stage.reduce_dtype or before.dtype, before.device)
    if isinstance(stage, Averaging):
        return before._replace(dtype=stage.reduce_dtype or before.dtype)
    return before


def wire_of(stage: Sharding | Averaging, like: dict[str, Like]) -> Sharding | Flat:
    """How a stage's buckets are packed, sent and unpacked."""
    return stage if isinstance(stage, Sharding) else Flat(stage.group, {p: x.numel for p, x in like.items()})


def _group(function: str, mesh: Any, purpose: Any = "") -> Group:
    if mesh is None:
        return world_group(purpose)
    if type(mesh).__name__ != "DeviceMesh":
        raise TypeError(
            explain(
                f"{function}({mesh!r})",
                "mesh is a one-dimensional DeviceMesh, or None for all ranks",
                f"{function}(init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))['shard'])",
            )
        )
    return mesh_group(mesh, purpose=purpose)


@transform
def shard(mesh: Any = None) -> Transform:
    """ZeRO-3: parameters, gradients and optimizer state live as shards; full parameters are gathered on use.

    As FSDP2's `fully_shard`; Rajbhandari et al., 2020. A block's parameters are gathered when one of them is
    used and freed when the next block's are; backward gathers them again. In the eager route `p` and `p.grad`
    are then this rank's flat shard. Stands first in a chain: gradients are reduced in the compute dtype, or in
    `precision(reduce_dtype=...)`.

    Args:
        mesh: a one-dimensional `DeviceMesh`, such as `mesh["shard"]`; by default all ranks.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.shard(), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.ones(2, 2)})
    >>> state.params["w"].shape, zf.full_params(tx, state)["w"].shape
    (torch.Size([2, 2]), torch.Size([2, 2]))
    """
    return Transform("shard", Role.SHARD, needs="element", linear=True, stage_fn=OverRanks("shard", mesh, Sharding))


@transform
def reduce_scatter(mesh: Any = None) -> Transform:
    """ZeRO-2, or ZeRO-1 after an `accumulate`: gradients are reduced to shards, and so are optimizer states.

    Full parameters stay resident and are gathered once after each update. Before `accumulate` every
    micro-step sends its gradient and holds a shard of the sum; after it full gradients pile up and
    one reduction is sent for the whole window.

    Args:
        mesh: a one-dimensional `DeviceMesh`; by default all ranks.

    >>> import torch, zerofn as zf
    >>> zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.sgd(1.0)).parts[1]
    reduce_scatter(mesh=None)
    """
    return Transform(
        "reduce_scatter",
        Role.SCATTER,
        needs="element",
        linear=True,
        stage_fn=OverRanks("reduce_scatter", mesh, Sharding),
    )


@transform
def all_reduce(mesh: Any = None) -> Transform:
    """Data parallelism: gradients are averaged over ranks that hold the same parameters.

    After `shard` on another axis of the mesh it is hybrid sharding:
    `chain(shard(mesh["shard"]), all_reduce(mesh["replicate"]), ...)`.

    Args:
        mesh: a one-dimensional `DeviceMesh`; by default all ranks.

    >>> import torch, zerofn as zf
    >>> zf.chain(zf.all_reduce(), zf.sgd(1.0)).parts[0]
    all_reduce(mesh=None)
    """
    return Transform(
        "all_reduce", Role.REDUCE, needs="element", linear=True, stage_fn=OverRanks("all_reduce", mesh, Averaging)
    )


class OverRanks:
    """Opens the group when a pipeline is made, never when a transform is built or unpickled."""

    def __init__(self, function: str, mesh: Any, kind: Callable[..., Any]):
        self.function, self.mesh, self.kind = function, mesh, kind

    def __call__(self, layout: Layout) -> Sharding | Averaging:
        return self.kind(_group(self.function, self.mesh))
