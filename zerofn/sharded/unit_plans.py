"""What is sent for each unit: which leaves travel together, in which dtypes, and what they are seen through before.

All of it follows from the pipeline, so the pure route, which gathers anew in every evaluation, finds it once.
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


class Sum(NamedTuple):
    """What is summed in one collective: leaves, and in which dtype."""

    leaves: list[Leaf]
    numels: list[int]
    dtype: torch.dtype


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


class UnitPlans:
    """The plans of the units of one model.

    Args:
        units: leaves that are gathered together.
        road: of a pipeline with a `shard`.
        wire: how they are, over the ranks.
        alone: leaves that may be asked for one by one as well, as they are stored and outside of the loss scale.

    Attributes:
        units: these, and those of one leaf behind them.
        blocks: how many of them the model sees.
        place: by path, the unit of a leaf that the model sees, and the place in it.
        alone: by path, the unit of the leaf by itself.
        frozen: places of leaves that are not trained, by unit.
    """

    def __init__(self, units: list[list[Leaf]], road: Road, wire: Wire, alone: tuple[Leaf, ...] = ()):
        self.road, self.wire = road, wire
        self.units = [*units, *([leaf] for leaf in alone)]
        self.blocks = len(units)
        self.place = {leaf.path: (i, j) for i, unit in enumerate(units) for j, leaf in enumerate(unit)}
        self.alone = {leaf.path: i for i, leaf in enumerate(alone, self.blocks)}
        self.frozen = [[j for j, leaf in enumerate(unit) if not leaf.trainable] for unit in self.units]
        stages = road.at_use
        at = next(n for n, stage in enumerate(stages) if stage.wire is not None)
        self.name = stages[at].name
        # From the model to storage: what whole leaves are seen through, and what parts are before they are gathered.
        self.of_wholes, self.of_parts = stages[:at], stages[at + 1 :]
        self.pulled_by = [stage for stage in self.of_parts if not stage.only_dtype]
        self.plans: list[Plan | None] = [None] * len(self.units)

    def plan(self, i: int) -> Plan:
        """What is sent for a unit, found at its first use: most leaves never travel alone."""
        found = self.plans[i]
        if found is None:
            unit, alone = self.units[i], i >= self.blocks
            # What is sent is cast in any case: a cast by itself needs no view, and one between others has its place.
            stages = self.pulled_by if alone or not self.pulled_by else self.of_parts
            of = self.road.dtypes.stored if alone else self.road.dtypes.seen
            dtypes = {leaf.path: of(leaf) for leaf in unit}
            sums = [
                Sum(bucket, [leaf.numel for leaf in bucket], summed_in(self.wire, dtypes[bucket[0].path]))
                for bucket in cut([leaf for leaf in unit if leaf.trainable], dtypes, NO_LIMIT)
            ]
            kept = {leaf.path: self.road.resident_grad_dtype(leaf) for leaf in unit}
            place = {leaf.path: j for j, leaf in enumerate(unit)}
            found = self.plans[i] = Plan(stages[::-1], dtypes, cut(unit, dtypes, NO_LIMIT), sums, kept, place)
        return found
