"""The collectives of one unit: all-gather of shards to full parameters, reduce-scatter of full gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .._ranges import VIEW, ranged
from ..core.composed_view import pull, see
from ..core.layout import Leaf, Leaves
from ..core.linear_map import over
from .unit_plans import GradBucket, Plan, UnitPlans

NOTHING = type(None)


class UnitCollectives:
    """Begins collectives of the units of one model: one for each dtype in a unit.

    Args:
        plans: what they carry.
        params: this rank's shards by path.
        scale: the loss scale in force.
    """

    def __init__(self, plans: UnitPlans, params: Leaves, scale: Callable[[], Tensor | None]):
        self.plans, self.wire, self.params, self.scale = plans, plans.wire, params, scale

    def begin_gather(self, i: int, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin an all-gather.

        Args:
            i: the unit.
            parts: for each leaf this rank's shard, or something that is cut as it is.

        Returns:
            A function that waits, and gives full tensors.
        """
        plan = self.plans.plan(i)
        with ranged(VIEW, self.plans.name):
            # All of them before the first is sent: a view that raises leaves none that other ranks have only half of.
            mine = [
                [see(plan.stages, parts[plan.place[leaf.path]], leaf).to(plan.dtypes[leaf.path]) for leaf in bucket]
                for bucket in plan.buckets
            ]
            sent = [
                (bucket, *self.wire.send_parts(seen, bucket, async_op=True))
                for bucket, seen in zip(plan.buckets, mine, strict=True)
            ]
        return partial(self._end_gather, plan, sent)

    def _end_gather(self, plan: Plan, sent: list[tuple[list[Leaf], Any, Tensor]]) -> list[Tensor]:
        out: list[Any] = [None] * len(plan.place)
        while sent:
            # From the end, so that each buffer is freed before the next is unpacked.
            bucket, work, rows = sent.pop()
            if work is not None:
                work.wait()
            for leaf, full in zip(bucket, self.wire.join_parts(rows, bucket), strict=True):
                out[plan.place[leaf.path]] = see(self.plans.full_stages, full.view(leaf.shape), leaf)
        return out

    def begin_scatter(self, i: int, fulls: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin a reduce-scatter.

        Args:
            i: the unit.
            fulls: the full gradient of each leaf; `None` where this rank has none.

        Returns:
            A function that waits, and gives true gradients of this rank's shards.
        """
        packed: list[tuple[GradBucket, Tensor]] = []
        plan = self.plans.plan(i)
        for bucket in plan.grad_buckets:
            flat: list[Tensor | None] = []
            device = None
            for leaf in bucket.leaves:
                g = fulls[plan.place[leaf.path]]
                if g is not None:
                    g = pull(self.plans.full_stages, g, leaf).reshape(-1)
                    device = g.device
                flat.append(g)
            with ranged(VIEW, self.plans.name):
                # Of a gradient if there is one: attributes of a sharded parameter take longer.
                device = device or self.params[bucket.leaves[0].path].device
                packed.append((bucket, self.wire.pack(flat, bucket.leaves, bucket.numels, bucket.dtype, device)))
        # As in `begin_gather`: none is sent before all are packed.
        sent: list[tuple[GradBucket, Any, Tensor]] = []
        for bucket, rows in packed:
            sent.append((bucket, *self.wire.send(rows, async_op=True)))
        return partial(self._end_scatter, i, plan, sent)

    def _end_scatter(self, i: int, plan: Plan, sent: list[tuple[GradBucket, Any, Tensor]]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(plan.place)
        scale = self.scale() if i < self.plans.blocks else None
        for bucket, work, mine in sent:
            work.wait()
            found = self.wire.unpack(mine, bucket.leaves, bucket.numels)
            # Gradients are views of one buffer, which any of them keeps alive. Copied where the buffer has more.
            copy = NOTHING in map(type, found)
            for leaf, g in zip(bucket.leaves, found, strict=True):
                if g is not None:
                    g = pull(self.plans.pull_stages, g, leaf)
                    dtype = plan.grad_dtypes[leaf.path]
                    # `.data` has a version count of its own, unlike a view.
                    g = g.to(dtype, copy=copy).data if scale is None else over(g, scale, dtype)
                    out[plan.place[leaf.path]] = g
        return out
