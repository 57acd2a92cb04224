"""The collectives of one unit: its parts, gathered to full parameters, and full gradients, summed to parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .._ranges import VIEW, ranged
from ..core.layout import Leaf, Leaves
from ..core.linear_map import over
from .unit_plans import Plan, Sum, UnitPlans

NOTHING = type(None)


class UnitCollectives:
    """Collectives of the units of one model; one for each dtype that is in a unit.

    Args:
        plans: what is sent for each.
        params: this rank's parts by path.
        scale: the loss scale in force.
    """

    def __init__(self, plans: UnitPlans, params: Leaves, scale: Callable[[], Tensor | None]):
        self.plans, self.wire, self.params, self.scale = plans, plans.wire, params, scale

    def begin_gather(self, i: int, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to gather something of the parameters' layout; what is returned waits, and gives full tensors.

        Args:
            i: the unit.
            parts: of this rank, for each leaf.
        """
        sent: list[tuple[list[Leaf], Any, Tensor]] = []
        plan = self.plans.plan(i)
        with ranged(VIEW, self.plans.name):
            for bucket in plan.buckets:
                mine = []
                for leaf in bucket:
                    part = parts[plan.place[leaf.path]]
                    for stage in plan.stages:
                        part = stage.view(part, leaf)
                    mine.append(part.to(plan.dtypes[leaf.path]))
                sent.append((bucket, *self.wire.send_parts(mine, bucket, async_op=True)))
        return partial(self._end_gather, plan, sent)

    def _end_gather(self, plan: Plan, sent: list[tuple[list[Leaf], Any, Tensor]]) -> list[Tensor]:
        out: list[Any] = [None] * len(plan.place)
        while sent:
            # What has been joined is let go.
            bucket, work, rows = sent.pop()
            if work is not None:
                work.wait()
            for leaf, full in zip(bucket, self.wire.join_parts(rows, bucket), strict=True):
                full = full.view(leaf.shape)
                for stage in self.plans.of_wholes[::-1]:
                    full = stage.view(full, leaf)
                out[plan.place[leaf.path]] = full
        return out

    def begin_scatter(self, i: int, fulls: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin to sum full gradients; what is returned waits, and gives true ones of this rank's parts.

        Args:
            i: the unit.
            fulls: a gradient for each leaf, where this rank has one.
        """
        sent: list[tuple[Sum, Any, Tensor]] = []
        plan = self.plans.plan(i)
        for sum_ in plan.sums:
            flat: list[Tensor | None] = []
            device = None
            for leaf in sum_.leaves:
                g = fulls[plan.place[leaf.path]]
                if g is not None:
                    for stage in self.plans.of_wholes:
                        g = stage.pull(g, leaf)
                    g, device = g.reshape(-1), g.device
                flat.append(g)
            with ranged(VIEW, self.plans.name):
                # A parameter that is a part is asked for nothing that a gradient tells: that takes longer.
                device = device or self.params[sum_.leaves[0].path].device
                rows = self.wire.pack(flat, sum_.leaves, sum_.numels, sum_.dtype, device)
                sent.append((sum_, *self.wire.send(rows, async_op=True)))
        return partial(self._end_scatter, i, plan, sent)

    def _end_scatter(self, i: int, plan: Plan, sent: list[tuple[Sum, Any, Tensor]]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(plan.place)
        scale = self.scale() if i < self.plans.blocks else None
        for sum_, work, mine in sent:
            work.wait()
            found = self.wire.unpack(mine, sum_.leaves, sum_.numels)
            # What is a part of one buffer keeps all of it: that of a bucket of which all are kept anyway may be.
            copy = NOTHING in map(type, found)
            for leaf, g in zip(sum_.leaves, found, strict=True):
                if g is not None:
                    for stage in self.plans.pulled_by:
                        g = stage.pull(g, leaf)
                    own = plan.kept[leaf.path]
                    # With a count of its own of what is written into it, unlike a view.
                    g = g.to(own, copy=copy).data if scale is None else over(g, scale, own)
                    out[plan.place[leaf.path]] = g
        return out
