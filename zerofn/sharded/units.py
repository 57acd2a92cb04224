"""Which leaves travel together, and the collectives of one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._profiler_ranges import VIEW, ranged
from ..core.bucketed_views import Road, into_buckets
from ..core.layout import Leaf, Leaves
from ..core.view import View, Wire, divided, pull, see, summed_in

# ----------------------------------------------------------------------------------------------------------------------
# `UnitPlans` knows what the collectives of each unit carry: leaves by bucket, dtypes, and the views on both sides.
#
# All of it follows from the pipeline. The pure route makes new `Units` in every evaluation, so it is computed once.


NO_LIMIT = 1 << 62


class GradBucket(NamedTuple):
    """The leaves whose gradients one collective reduces, how many elements each has, and the dtype of the sum."""

    leaves: list[Leaf]
    numels: list[int]
    dtype: torch.dtype


class Plan(NamedTuple):
    """The contents of one unit's collectives.

    Attributes:
        stages: views that are applied to shards before they are gathered, from the model to storage.
        dtypes: by path, the dtype in which the leaf is gathered.
        buckets: leaves of one dtype, which one collective gathers.
        grad_buckets: the same for gradients.
        grad_dtypes: by path, the dtype of the true gradient of the shard.
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
        """The plan of a unit, made at its first use: most leaves are never gathered alone."""
        found = self.plans[i]
        if found is None:
            found = self.plans[i] = self.plan_of(self.units[i], alone=i >= self.blocks)
        return found

    def plan_of(self, unit: Sequence[Leaf], alone: bool = False) -> Plan:
        """The plan of these leaves as one unit; with `alone` in the stored dtype."""
        # Shards are cast to `dtypes` in any case, so casts alone need no view; among others their order counts.
        stages = self.pull_stages if alone or not self.pull_stages else self.shard_stages
        of = self.road.dtypes.stored if alone else self.road.dtypes.seen
        dtypes = {leaf.path: of(leaf) for leaf in unit}
        grad_buckets = [
            GradBucket(bucket, [leaf.numel for leaf in bucket], summed_in(self.wire, dtypes[bucket[0].path]))
            for bucket in into_buckets([leaf for leaf in unit if leaf.trainable], dtypes, NO_LIMIT)
        ]
        grad_dtypes = {leaf.path: self.road.resident_grad_dtype(leaf) for leaf in unit}
        place = {leaf.path: j for j, leaf in enumerate(unit)}
        buckets = into_buckets(unit, dtypes, NO_LIMIT)
        return Plan(stages, dtypes, buckets, grad_buckets, grad_dtypes, place)

    def to_gather(self, plan: Plan, shards: Sequence[Tensor]) -> list[list[Tensor]]:
        """What this rank sends of its shards, by bucket."""
        return [
            [see(plan.stages, shards[plan.place[leaf.path]], leaf).to(plan.dtypes[leaf.path]) for leaf in bucket]
            for bucket in plan.buckets
        ]

    def gathered(self, bucket: Sequence[Leaf], rows: Tensor) -> Iterator[tuple[Leaf, Tensor]]:
        """The full parameters of a bucket, from the rows of all ranks."""
        for leaf, full in zip(bucket, self.wire.join_parts(rows, bucket), strict=True):
            yield leaf, see(self.full_stages, full.view(leaf.shape), leaf)


# ----------------------------------------------------------------------------------------------------------------------
# `UnitCollectives` runs the collectives of one unit: all-gather of shards, reduce-scatter of full gradients.


NOTHING = type(None)


class UnitCollectives:
    """Begins collectives of the units of one model: one for each dtype in a unit.

    Args:
        plans: the contents of the collectives.
        params: this rank's shards by path.
        scale: the current loss scale.
    """

    def __init__(self, plans: UnitPlans, params: Leaves, scale: Callable[[], Tensor | None]):
        self.plans, self.wire, self.params, self.scale = plans, plans.wire, params, scale

    def begin_gather(self, i: int, parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin an all-gather.

        Args:
            i: the unit.
            parts: for each leaf this rank's shard, or another tensor with the shard's layout.

        Returns:
            A function that waits, and returns full tensors.
        """
        plan = self.plans.plan(i)
        with ranged(VIEW, self.plans.name):
            # All are packed before the first is sent: if a view raises, no other rank waits for the rest.
            mine = self.plans.to_gather(plan, parts)
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
            for leaf, full in self.plans.gathered(bucket, rows):
                out[plan.place[leaf.path]] = full
        return out

    def begin_scatter(self, i: int, fulls: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin a reduce-scatter.

        Args:
            i: the unit.
            fulls: the full gradient of each leaf; `None` where this rank has none.

        Returns:
            A function that waits, and returns true gradients of this rank's shards.
        """
        packed: list[tuple[GradBucket, Tensor, list[bool]]] = []
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
                # A gradient's device if there is one: attributes of a sharded parameter take longer.
                device = device or self.params[bucket.leaves[0].path].device
                rows = self.wire.pack(flat, bucket.leaves, bucket.numels, bucket.dtype, device)
            packed.append((bucket, rows, [g is not None for g in flat]))
        # As in `begin_gather`: none is sent before all are packed.
        sent: list[tuple[GradBucket, list[bool], Any, Tensor]] = []
        for bucket, rows, given in packed:
            sent.append((bucket, given, *self.wire.send(rows, async_op=True)))
        return partial(self._end_scatter, i, plan, sent)

    def _end_scatter(
        self, i: int, plan: Plan, sent: list[tuple[GradBucket, list[bool], Any, Tensor]]
    ) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(plan.place)
        scale = self.scale() if i < self.plans.blocks else None
        for bucket, given, work, mine in sent:
            work.wait()
            found = self.wire.unpack(mine, bucket.leaves, bucket.numels, given)
            # Gradients are views of one buffer, which any of them keeps alive. Copied where the buffer has more.
            copy = NOTHING in map(type, found)
            for leaf, g in zip(bucket.leaves, found, strict=True):
                if g is not None:
                    g = pull(self.plans.pull_stages, g, leaf)
                    dtype = plan.grad_dtypes[leaf.path]
                    # `.data` has a version count of its own, unlike a view.
                    g = g.to(dtype, copy=copy).data if scale is None else divided(g, scale, dtype)
                    out[plan.place[leaf.path]] = g
        return out


# ----------------------------------------------------------------------------------------------------------------------
# `split` puts parameters into units: those of a block, or small neighbours outside of all blocks.
#
# A block is an element of one of the model's outermost `ModuleList`, `Sequential` or `ModuleDict`.


# How many elements neighbours outside of blocks have at most to be one unit.
SMALL = 1 << 18


def split(model: nn.Module, leaves: tuple[Leaf, ...], params: Leaves) -> tuple[list[list[Leaf]], list[nn.Module]]:
    """Leaves by unit, in the model's order; and the modules that own them, each block as one module."""
    named = {id(p): path for path, p in params.items()}
    by_path = {leaf.path: leaf for leaf in leaves}
    done: set[str] = set()
    units: list[list[Leaf]] = []
    modules: list[nn.Module] = []
    loose: list[Leaf] = []  # the last unit, if it is no block
    for module, block in pieces(model):
        paths = [named[id(p)] for p in module.parameters(recurse=block) if id(p) in named]
        unit = [by_path[p] for p in dict.fromkeys(paths) if p not in done]
        if paths:
            modules.append(module)
        done.update(leaf.path for leaf in unit)
        if not unit:
            continue
        if not block and loose and sum(leaf.numel for leaf in (*loose, *unit)) <= SMALL:
            loose.extend(unit)
            continue
        units.append(unit)
        loose = [] if block else unit
    return units, modules


def pieces(module: nn.Module, inside: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Modules in order, and whether each is a block. Modules inside of a block are not listed."""
    yield module, inside
    if not inside:
        container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child in module.children():
            yield from pieces(child, container)
