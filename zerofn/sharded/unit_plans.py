"""What the collectives of each unit carry: leaves by bucket, dtypes, and the views on both sides.

All of it follows from the pipeline, so the pure route, which makes new `Units` in every evaluation, finds it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.coalesced_views import cut
from ..core.layout import Leaf
from ..core.road import Road
from ..core.views import View, Wire, summed_in

NO_LIMIT = 1 << 62


class GradBucket(NamedTuple):
    """What one collective reduces: gradients of leaves, how many elements each has, the dtype of the sum."""

    leaves: list[Leaf]
    numels: list[int]
    dtype: torch.dtype


class Plan(NamedTuple):
    """What the collectives of one unit carry.

    Attributes:
        stages: views of shards, from the model to storage, before they are gathered.
        dtypes: by path, in which they are gathered.
        buckets: leaves of one dtype, which one collective gathers.
        grad_buckets: of gradients.
        grad_dtypes: by path, of true gradients of shards.
        place: by path, the leaf's place in the unit.
    """

    stages: Sequence[View]
    dtypes: dict[str, torch.dtype]
    buckets: list[list[Leaf]]
    grad_buckets: list[GradBucket]
    grad_dtypes: dict[str, torch.dtype]
    place: dict[str, int]


class UnitPlans:
    """The plans of the units of one model.

    Args:
        units: leaves that are gathered together.
        road: of a pipeline with a `shard`.
        wire: the collectives.
        alone: leaves that may also be gathered one by one, in the stored dtype and without the loss scale.

    Attributes:
        units: these, and behind them one unit for each leaf of `alone`.
        blocks: how many of them the model sees.
        place: by path, the unit of a leaf that the model sees, and the place in it.
        alone: by path, the unit of the leaf by itself.
        full_stages: views that full gradients are pulled back through, in this order.
        shard_stages: views of shards, from the model to storage.
        pull_stages: those of them that do more than change the dtype.
    """

    def __init__(self, units: list[list[Leaf]], road: Road, wire: Wire, alone: tuple[Leaf, ...] = ()):
        self.road, self.wire = road, wire
        self.units = [*units, *([leaf] for leaf in alone)]
        self.blocks = len(units)
        self.place = {leaf.path: (i, j) for i, unit in enumerate(units) for j, leaf in enumerate(unit)}
        self.alone = {leaf.path: i for i, leaf in enumerate(alone, self.blocks)}
        stages = road.at_use
        at = next(n for n, stage in enumerate(stages) if stage.wire is not None)
        self.name = stages[at].name
        # From the model to storage, on both sides of the all-gather.
        self.full_stages, self.shard_stages = stages[:at], stages[at + 1 :]
        self.pull_stages = [stage for stage in self.shard_stages if stage.dtypes is None]
        self.plans: list[Plan | None] = [None] * len(self.units)

    def plan(self, i: int) -> Plan:
        """What the collectives of a unit carry, found at its first use: most leaves are never gathered alone."""
        found = self.plans[i]
        if found is None:
            unit, alone = self.units[i], i >= self.blocks
            # Shards are cast to `dtypes` in any case, so casts alone need no view; among others their order counts.
            stages = self.pull_stages if alone or not self.pull_stages else self.shard_stages
            of = self.road.dtypes.stored if alone else self.road.dtypes.seen
            dtypes = {leaf.path: of(leaf) for leaf in unit}
            grad_buckets = [
                GradBucket(bucket, [leaf.numel for leaf in bucket], summed_in(self.wire, dtypes[bucket[0].path]))
                for bucket in cut([leaf for leaf in unit if leaf.trainable], dtypes, NO_LIMIT)
            ]
            grad_dtypes = {leaf.path: self.road.resident_grad_dtype(leaf) for leaf in unit}
            place = {leaf.path: j for j, leaf in enumerate(unit)}
            buckets = cut(unit, dtypes, NO_LIMIT)
            found = self.plans[i] = Plan(stages, dtypes, buckets, grad_buckets, grad_dtypes, place)
        return found
