"""Groups leaves into units, which are gathered together, and plans the collectives of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.bucketed_views import Road, into_buckets
from ..core.layout import Leaf, Leaves, as_complex
from ..core.view import View, Wire, see, summed_in

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
        model_wire: the wire that gathers what the model sees; the same one, or one that rounds.
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
        # Units of the model may be gathered by another wire, which rounds. A leaf alone is gathered as it is stored.
        of_model = stages[at].model_wire
        self.model_wire = wire if of_model is None else of_model.on(wire.group, wire.reduce_dtype)
        # The views before and behind the all-gather, from the model to storage.
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
        # Shards are cast to `dtypes` in any case. So views that cast are left out, unless there are others, between
        # which casts must keep their place.
        stages = self.pull_stages if alone or not self.pull_stages else self.shard_stages
        of = self.road.dtypes.stored if alone else self.road.dtypes.seen
        dtypes = {leaf.path: of(leaf) for leaf in unit}
        grad_buckets = [
            GradBucket(bucket, [leaf.numel for leaf in bucket], summed_in(self.wire, dtypes[bucket[0].path]))
            for bucket in into_buckets([leaf for leaf in unit if leaf.trainable], dtypes, limit=NO_LIMIT)
        ]
        grad_dtypes = {leaf.path: self.road.resident_grad_dtype(leaf) for leaf in unit}
        place = {leaf.path: j for j, leaf in enumerate(unit)}
        buckets = into_buckets(unit, dtypes, limit=NO_LIMIT)
        return Plan(stages, dtypes, buckets, grad_buckets, grad_dtypes, place)

    def to_gather(self, plan: Plan, shards: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors that this rank sends, by bucket."""
        found: list[list[Tensor]] = []
        for bucket in plan.buckets:
            seen = [shards[plan.place[leaf.path]] for leaf in bucket]
            if plan.stages:
                seen = [see(plan.stages, x, leaf) for x, leaf in zip(seen, bucket, strict=True)]
            # Comparing takes less time than a call of `to`.
            dtype = plan.dtypes[bucket[0].path]
            found.append([x if x.dtype == dtype else x.to(dtype) for x in seen])
        return found

    def gathered(self, bucket: Sequence[Leaf], rows: Tensor) -> Iterator[tuple[Leaf, Tensor]]:
        """The full parameters of a bucket, from the rows of all ranks."""
        for leaf, full in zip(bucket, self.wire.join_parts(rows, bucket), strict=True):
            seen = full if len(leaf.shape) == 1 else full.view(leaf.shape)
            seen = see(self.full_stages, seen, leaf) if self.full_stages else seen
            yield leaf, seen if leaf.complex is None else as_complex(seen, leaf)


# ----------------------------------------------------------------------------------------------------------------------
# `split` puts parameters into units: those of a block, or of small neighbours.
#
# A block is an element of one of the model's outermost `ModuleList`, `Sequential` or `ModuleDict`. A collective takes
# its time even if it moves nearly nothing, so small neighbours travel together.


# Neighbours with at most SMALL elements are one unit. Blocks in one unit also have at most 1 / SHARES of the elements
# of all blocks, so that two units are a small part of the model.
SMALL, SHARES = 1 << 18, 8


def split(model: nn.Module, leaves: tuple[Leaf, ...], params: Leaves) -> tuple[list[list[Leaf]], list[nn.Module]]:
    """Leaves by unit, in the model's order; and the modules that own them, each block as one module."""
    named = {id(p): path for path, p in params.items()}
    by_path = {leaf.path: leaf for leaf in leaves}
    done: set[str] = set()
    found: list[tuple[list[Leaf], int, bool]] = []  # leaves of a block or of another module, and how many elements
    modules: list[nn.Module] = []
    for module, block in pieces(model):
        paths = [named[id(p)] for p in module.parameters(recurse=block) if id(p) in named]
        unit = [by_path[p] for p in dict.fromkeys(paths) if p not in done]
        if paths:
            modules.append(module)
        if unit:
            found.append((unit, sum(leaf.numel for leaf in unit), block))
        done.update(leaf.path for leaf in unit)
    share = min(SMALL, sum(size for _, size, block in found if block) // SHARES)
    units: list[list[Leaf]] = []
    filled, of_blocks = 0, None
    for unit, size, block in found:
        if block is of_blocks and filled + size <= (share if block else SMALL):
            units[-1].extend(unit)
            filled += size
        else:
            units.append(unit)
            filled, of_blocks = size, block
    return units, modules


def pieces(module: nn.Module, inside: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Modules in order, and whether each is a block. Modules inside of a block are not listed."""
    yield module, inside
    if not inside:
        container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child in module.children():
            yield from pieces(child, container)
