"""What is sent for one unit: its parts, gathered to full parameters, and full gradients, summed to parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ranges import VIEW, ranged
from ..core.linear_map import over
from ..core.pipeline import Pipeline
from ..core.tree import Leaf, Leaves
from ..core.views import View, cut, summed_in
from ..ranks.group import Group

NOTHING = type(None)


class Sum(NamedTuple):
    """What is summed in one collective: leaves, in which dtype and where."""

    leaves: list[Leaf]
    numels: list[int]
    dtype: torch.dtype
    device: torch.device


class Plan(NamedTuple):
    """What is sent for a unit.

    Attributes:
        stages: what parts are seen through before they are gathered.
        dtypes: in which they are, by path.
        buckets: leaves of one dtype, which one collective gathers.
        sums: of gradients.
        kept: the dtypes of gradients that are true ones, by path.
        place: where in the unit each leaf stands, by path.
    """

    stages: Sequence[View]
    dtypes: dict[str, torch.dtype]
    buckets: list[list[Leaf]]
    sums: list[Sum]
    kept: dict[str, torch.dtype]
    place: dict[str, int]


class UnitCollectives:
    """Collectives of the units of one model; one for each dtype that is in a unit.

    Args:
        units: leaves that are gathered together.
        blocks: how many of them the model sees; the others are leaves by themselves, as they are stored.
        pipe: a pipeline with a `shard`.
        group: the ranks.
        params: this rank's parts by path.
        scale: the loss scale in force.
    """

    def __init__(
        self,
        units: list[list[Leaf]],
        blocks: int,
        pipe: Pipeline,
        group: Group,
        params: Leaves,
        scale: Callable[[], Tensor | None],
    ):
        assert pipe.gathering is not None
        self.units, self.blocks, self.pipe, self.params, self.scale = units, blocks, pipe, params, scale
        self.wire = pipe.gathering.on(group, pipe.gathering.reduce_dtype)
        stages = pipe.road.at_use
        at = next(n for n, stage in enumerate(stages) if stage.wire is not None)
        self.name = stages[at].name
        # From the model to storage: what whole leaves are seen through, and what parts are before they are gathered.
        self.of_wholes, self.of_parts = stages[:at], stages[at + 1 :]
        self.pulled_by = [stage for stage in self.of_parts if not stage.only_dtype]
        self.plans: list[Plan | None] = [None] * len(units)

    def plan(self, i: int) -> Plan:
        """What is sent for a unit, found at its first use: most leaves never travel alone."""
        found = self.plans[i]
        if found is None:
            unit, alone = self.units[i], i >= self.blocks
            # What is sent is cast in any case: a cast by itself needs no view, and one between others has its place.
            stages = self.pulled_by if alone or not self.pulled_by else self.of_parts
            of = self.pipe.dtypes.stored if alone else self.pipe.dtypes.seen
            dtypes = {leaf.path: of(leaf) for leaf in unit}
            summed = cut([leaf for leaf in unit if leaf.trainable], dtypes, 1 << 62)
            kept = {leaf.path: self.pipe.road.resident_grad_dtype(leaf) for leaf in unit}
            sums = [self._sum_of(bucket, dtypes) for bucket in summed]
            place = {leaf.path: j for j, leaf in enumerate(unit)}
            found = self.plans[i] = Plan(stages[::-1], dtypes, cut(unit, dtypes, 1 << 62), sums, kept, place)
        return found

    def _sum_of(self, bucket: list[Leaf], dtypes: dict[str, torch.dtype]) -> Sum:
        first = bucket[0].path
        dtype = summed_in(self.wire, dtypes[first])
        return Sum(bucket, [leaf.numel for leaf in bucket], dtype, self.params[first].device)

    def begin_gather(self, i: int, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to gather something of the parameters' layout; what is returned waits, and gives full tensors.

        Args:
            i: the unit.
            parts: of this rank, for each leaf.
        """
        sent: list[tuple[list[Leaf], Any, Tensor]] = []
        plan = self.plan(i)
        with ranged(VIEW, self.name):
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
                for stage in self.of_wholes[::-1]:
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
        plan = self.plan(i)
        for sum_ in plan.sums:
            flat: list[Tensor | None] = []
            for leaf in sum_.leaves:
                g = fulls[plan.place[leaf.path]]
                if g is not None:
                    for stage in self.of_wholes:
                        g = stage.pull(g, leaf)
                    g = g.reshape(-1)
                flat.append(g)
            with ranged(VIEW, self.name):
                rows = self.wire.pack(flat, sum_.leaves, sum_.numels, sum_.dtype, sum_.device)
                sent.append((sum_, *self.wire.send(rows, async_op=True)))
        return partial(self._end_scatter, i, plan, sent)

    def _end_scatter(self, i: int, plan: Plan, sent: list[tuple[Sum, Any, Tensor]]) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(plan.place)
        scale = self.scale() if i < self.blocks else None
        for sum_, work, mine in sent:
            work.wait()
            found = self.wire.unpack(mine, sum_.leaves, sum_.numels)
            # What is a part of one buffer keeps all of it: that of a bucket of which all are kept anyway may be.
            copy = NOTHING in map(type, found)
            for leaf, g in zip(sum_.leaves, found, strict=True):
                if g is not None:
                    for stage in self.pulled_by:
                        g = stage.pull(g, leaf)
                    own = plan.kept[leaf.path]
                    # With a count of its own of what is written into it, unlike a view.
                    g = g.to(own, copy=copy).data if scale is None else over(g, scale, own)
                    out[plan.place[leaf.path]] = g
        return out
