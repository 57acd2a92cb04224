"""Views of many leaves at once: leaves are put into buckets, with one collective for each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._ranges import VIEW, ranged
from .layout import Leaf, Leaves
from .views import View, summed_in

# Bytes of a bucket: a sixteenth of all leaves, so that buffers are small beside the model; but not so small that
# latency dominates, and no larger than full bandwidth needs.
LEAST_BYTES, BUCKET_BYTES, BUCKETS = 1 << 22, 1 << 24, 16


class Like(NamedTuple):
    """The form of a gradient at one stage of the road, whether or not this rank has one."""

    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def cut(leaves: Sequence[Leaf], dtypes: dict[str, torch.dtype], limit: int | None = None) -> list[list[Leaf]]:
    """Leaves in order, in buckets of one dtype and about `limit` bytes each."""
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


def view_all(view: View, xs: Leaves, leaves: Sequence[Leaf], into: Leaves | None = None) -> Leaves:
    """A view of many leaves, with one all-gather for each bucket, written `into` plain tensors. Not differentiable."""
    with ranged(VIEW, view.name):
        wire = view.wire
        if wire is None or not wire.cuts:
            return {leaf.path: view.view(xs[leaf.path], leaf) for leaf in leaves}
        if into:
            # A caller who says where to write to gives the leaves of one bucket.
            flat = [into[leaf.path].view(-1) for leaf in leaves]
            wire.join_parts(wire.send_parts([xs[leaf.path] for leaf in leaves], leaves)[1], leaves, flat)
            return into
        out: Leaves = {}
        for bucket in cut(leaves, {p: x.dtype for p, x in xs.items()}):
            fulls = wire.join_parts(wire.send_parts([xs[leaf.path] for leaf in bucket], bucket)[1], bucket)
            out.update({leaf.path: x.reshape(view.given(leaf).shape) for leaf, x in zip(bucket, fulls, strict=True)})
        return out


def pull_all(view: View, gs: Leaves, leaves: Sequence[Leaf], like: dict[str, Like]) -> Leaves:
    """A view's transpose for many leaves, with one reduction for each bucket. Not differentiable.

    Buckets are the same on all ranks, whichever leaves have a gradient here.
    """
    with ranged(VIEW, view.name):
        wire = view.wire
        if wire is None:
            return {leaf.path: view.pull(gs[leaf.path], leaf) for leaf in leaves if leaf.path in gs}
        out: Leaves = {}
        for bucket in cut(leaves, {p: x.dtype for p, x in like.items()}):
            flat = [gs[leaf.path].reshape(-1) if leaf.path in gs else None for leaf in bucket]
            first, numels = like[bucket[0].path], [like[leaf.path].numel for leaf in bucket]
            buffer = wire.pack(flat, bucket, numels, summed_in(wire, first.dtype), first.device)
            for leaf, g in zip(bucket, wire.unpack(wire.send(buffer)[1], bucket, numels), strict=True):
                if g is not None:
                    # A shard stays flat.
                    out[leaf.path] = g if wire.cuts else g.reshape(like[leaf.path].shape)
        # Buckets are of one dtype each.
        return {leaf.path: out[leaf.path] for leaf in leaves if leaf.path in out}
