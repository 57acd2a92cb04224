"""Many leaves through their views at once, in buckets: one collective carries several leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .._errors import explain
from .._profiler_ranges import VIEW, ranged
from ..kernels.recording import only_compiled, recorded
from ..ranks.group import Group
from .layout import Leaf, Leaves, rows_between
from .spec import Spec
from .view import (
    Dtypes,
    Grads,
    LeafView,
    View,
    Wire,
    cutting_wires,
    divided,
    over_ranks,
    see,
    store,
    stored_by,
    summable,
    summed_in,
)

if TYPE_CHECKING:
    from .context import Context
    from .transform import TransformState

# ----------------------------------------------------------------------------------------------------------------------
# These functions apply views to many leaves at once. They pack leaves into buckets and make one collective per bucket.


# One collective moves a sixteenth of the bytes of all leaves, so that buffers are small beside the model. A smaller
# bucket than LEAST_BYTES would be dominated by latency. A larger one than MOST_BYTES gains no bandwidth.
LEAST_BYTES, MOST_BYTES, BUCKETS = 1 << 22, 1 << 24, 16
# The largest bucket on GPUs is 25 MiB, as that of DistributedDataParallel. It grows with the number of ranks, since
# each rank sends its part of a bucket: that part is at least 256 KiB over gloo, and 1 MiB between GPUs.
GPUS, RANKS_OF_GPUS, RANKS = 25 / 16, 16, 64


def bucket_bytes(total: int, group: Group | None = None) -> int:
    """About how many bytes of leaves one collective moves.

    Args:
        total: bytes of all leaves.
        group: the ranks.

    Examples:
        >>> [bucket_bytes(n << 20) >> 20 for n in (16, 160, 1600)]
        [4, 10, 16]
    """
    size, on_host = (1, True) if group is None else (group.size, group.device.type == "cpu")
    most = MOST_BYTES * (max(1, size / RANKS) if on_host else max(GPUS, size / RANKS_OF_GPUS))
    return int(min(max(total // BUCKETS, LEAST_BYTES), most))


class Like(NamedTuple):
    """The shape, dtype and device of a gradient at one stage of the road, even if this rank has no gradient."""

    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def into_buckets(
    leaves: Sequence[Leaf], dtypes: dict[str, torch.dtype], group: Group | None = None, limit: int | None = None
) -> list[list[Leaf]]:
    """Leaves in order, in buckets of one dtype and about `limit` bytes each, by default as for these ranks."""
    if limit is None:
        limit = bucket_bytes(sum(leaf.numel * dtypes[leaf.path].itemsize for leaf in leaves), group)
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
            # A caller that passes `into` passes the leaves of one bucket.
            flat = [into[x.path] if len(x.shape) == 1 else into[x.path].view(-1) for x in leaves]
            wire.join_parts(wire.send_parts([xs[leaf.path] for leaf in leaves], leaves)[1], leaves, flat)
            return into
        out: Leaves = {}
        for bucket in into_buckets(leaves, {p: x.dtype for p, x in xs.items()}, wire.group):
            fulls = wire.join_parts(wire.send_parts([xs[leaf.path] for leaf in bucket], bucket)[1], bucket)
            out.update({leaf.path: x.reshape(view.given(leaf).shape) for leaf, x in zip(bucket, fulls, strict=True)})
        return out


class SumBucket(NamedTuple):
    """Leaves whose gradients are reduced together.

    Attributes:
        leaves: of one dtype, in the order of the road.
        paths: of these leaves.
        numels: of their gradients, even if this rank has none.
        shapes: of their reduced gradients.
        dtype: in which they are summed.
    """

    leaves: list[Leaf]
    paths: list[str]
    numels: list[int]
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype


def pull_all(view: View, gs: Leaves, leaves: Sequence[Leaf], buckets: Sequence[SumBucket], stored: Leaves) -> Leaves:
    """A view's transpose for many leaves, with one reduction for each bucket. Not differentiable.

    Buckets are the same on all ranks, whichever leaves have a gradient here. Of `stored` only devices are used.
    """
    with ranged(VIEW, view.name):
        wire = view.wire
        if wire is None:
            return {leaf.path: view.pull(gs[leaf.path], leaf) for leaf in leaves if leaf.path in gs}
        out: Leaves = {}
        for bucket, paths, numels, shapes, dtype in buckets:
            flat = [g if g is None or g.ndim == 1 else g.reshape(-1) for g in map(gs.get, paths)]
            buffer = wire.pack(flat, bucket, numels, dtype, stored[paths[0]].device)
            found = wire.unpack(wire.send(buffer)[1], bucket, numels, list(map(gs.__contains__, paths)))
            if not wire.cuts:
                # A wire that cuts returns flat shards, which stay flat.
                found = [g if g is None else g.reshape(shape) for g, shape in zip(found, shapes, strict=True)]
            out.update({path: g for path, g in zip(paths, found, strict=True) if g is not None})
        # With several dtypes the buckets have leaves in another order.
        return out if len(buckets) == 1 else {leaf.path: out[leaf.path] for leaf in leaves if leaf.path in out}


# ----------------------------------------------------------------------------------------------------------------------
# `Road` takes stored parameters through the views of a chain to the model, and gradients back.
#
# It handles many leaves at once, in buckets, with one collective for each. `LeafView` is the differentiable form for
# one leaf.


def groups_of(stages: Sequence[View]) -> tuple[Group, ...]:
    """The groups of ranks over which views communicate."""
    return tuple([view.wire.group for view in stages if view.wire is not None])


def at_model(stages: Sequence[View]) -> tuple[View, ...]:
    """The views through which the model sees its parameters."""
    return tuple([stage.at_model for stage in stages])


@dataclass(frozen=True)
class Road:
    """The views between the model and storage.

    Attributes:
        leaves: all parameters.
        stages: the views that have an effect, from the model to storage.
        dtypes: of parameters and gradients.
        held: the transforms, by name, that accumulate gradients in front of the first view of `after_update`.
        specs: by path, the `Spec` of the gradient in front of each stage, and behind the last one.
    """

    leaves: tuple[Leaf, ...]
    stages: tuple[View, ...]
    dtypes: Dtypes
    held: tuple[str, ...]
    specs: tuple[Mapping[str, Spec], ...]

    @cached_property
    def at_use(self) -> tuple[View, ...]:
        """The views that an attached model applies to its resident parameters at each use."""
        return tuple(takewhile(lambda view: not view.resident, self.stages))

    @cached_property
    def after_update(self) -> tuple[View, ...]:
        """The views that make resident parameters once after an update; the first reduces their gradients."""
        return self.stages[len(self.at_use) :]

    @cached_property
    def behind_reduction(self) -> tuple[View, ...]:
        """The views of `after_update` whose transposes gradients pass once they are reduced."""
        return tuple([view for view in self.after_update[1:] if view.dtypes is None])

    @cached_property
    def casts_after_update(self) -> bool:
        """Whether resident parameters have the dtypes that the model sees, and not those that are stored."""
        return any([view.dtypes is not None for view in self.after_update])

    @cached_property
    def renumbers_after_update(self) -> bool:
        """Whether resident parameters are other numbers than the stored ones, beyond a cast."""
        return any([view.renumbers for view in self.after_update])

    @cached_property
    def late(self) -> bool:
        """Whether gradients are accumulated first, and reduced once a window as an update half of its own."""
        return bool(self.held and self.after_update)

    @cached_property
    def pulled(self) -> tuple[View, ...]:
        """The views whose transposes a gradient has passed when it is given to `zf.update`."""
        return self.at_use if self.late else self.stages

    @cached_property
    def cutting(self) -> tuple[Group, ...]:
        """The groups of ranks over which leaves are sharded, one after the other."""
        return tuple([wire.group for wire in cutting_wires(self.stages)])

    @cached_property
    def trainable(self) -> list[Leaf]:
        """The leaves that have gradients."""
        return [leaf for leaf in self.leaves if leaf.trainable]

    @cached_property
    def sums(self) -> dict[str, tuple[SumBucket, ...]]:
        """By the name of a stage, the buckets in which it reduces gradients; none if it has no wire."""
        return {
            stage.name: () if stage.wire is None else _sums(specs, self.trainable, stage.wire)
            for stage, specs in zip(self.stages, self.specs, strict=False)
        }

    @cached_property
    def grad_dtypes(self) -> dict[str, torch.dtype]:
        """By path: the dtype of a gradient once it is pulled back."""
        return {leaf.path: self.dtypes.gradient(leaf) for leaf in self.leaves}

    @cached_property
    def exact(self) -> bool:
        """Whether views only cast and communicate, so that the seen numbers are the stored ones up to casts."""
        return not any([view.renumbers for view in self.stages])

    def composed(self, stages: tuple[View, ...], dtype: Callable[[Leaf], torch.dtype]) -> dict[str, LeafView]:
        """By path: the views in `stages` (from the model to storage) as one; `dtype` is that of the stored gradient."""
        return {x.path: LeafView(x, tuple([s for s in stages if s.changes(x)]), dtype(x)) for x in self.leaves}

    def resident_grad_dtype(self, leaf: Leaf) -> torch.dtype:
        """The dtype of `p.grad` in an attached model."""
        return summable(self.dtypes.summed(leaf)) if self.casts_after_update else self.dtypes.gradient(leaf)

    def stored_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a leaf in the state of this rank."""
        return self.specs[-1][leaf.path].local_shape

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of the gradient that `zf.update` is given."""
        return self.specs[len(self.pulled)][leaf.path].local_shape

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Index of each leaf's first stored element in the whole leaf, counted box by box if the model itself is cut.

        Empty if every leaf is stored whole.
        """
        begin = {x.path: 0 if x.within is None else x.within.before for x in self.leaves}
        if not self.cutting:
            return begin if any(begin.values()) else {}
        return {path: before + self.specs[-1][path].range[0] for path, before in begin.items()}

    def pull(self, stages: tuple[View, ...], grads: Leaves, stored: Leaves, scale: Tensor | None = None) -> Leaves:
        """Gradients through the transposes of these stages, in the order of `self.stages`; then divided by `scale`.

        Leaves in the same order on every rank; one may have no gradient here. Of `stored` only devices are used.
        """
        dtypes = self.grad_dtypes
        if stages or scale is not None:
            with torch.no_grad():
                for stage in stages:
                    if scale is None or stage.dtypes is None:
                        grads = pull_all(stage, grads, self.trainable, self.sums[stage.name], stored)
                if scale is not None:
                    return {p: divided(g, scale, dtypes[p]) for p, g in grads.items()}
        return {p: g if g.dtype is dtypes[p] else g.to(dtypes[p]) for p, g in grads.items()}

    def pull_recorded(self, stages: tuple[View, ...], grads: Leaves, stored: Leaves) -> Leaves:
        """As `pull`, differentiably: leaf by leaf, and a leaf without a gradient here has zeros to send."""
        views = {p: v for p, v in self.composed(stages, self.dtypes.gradient).items() if v.leaf.trainable}
        missing = {p: stored[p].new_zeros(self.grad_shape(v.leaf)) for p, v in views.items() if grads.get(p) is None}
        return {p: v.transposed(missing[p] if p in missing else grads[p], None) for p, v in views.items()}

    def reduced_late(
        self, view: View, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
    ) -> tuple[Leaves, TransformState]:
        """The update half of a reduction that runs once for each window: gradients through the transpose of `view`."""
        if view.corrects is not None:
            grads, state = view.corrects(grads, state, ctx)
        together = not ctx.recorded or only_compiled(grads.values())
        return (self.pull if together else self.pull_recorded)((view,), grads, params), state

    def see(
        self, stages: tuple[View, ...], leaves: Leaves, which: Sequence[Leaf] | None = None, into: Leaves | None = None
    ) -> Leaves:
        """Stored parameters, or those in `which`, through the views of these stages. Not differentiable.

        If the last view is an all-gather it writes `into` tensors that are given, in one collective.
        """
        if stages:
            which_leaves = self.leaves if which is None else which
            with torch.no_grad():
                for i, stage in reversed(list(enumerate(stages))):
                    leaves = view_all(stage, leaves, which_leaves, None if i else into)
        return leaves

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The stored form of a full parameter; differentiable if autograd records it."""
        x = stored_by(self.stages, x, leaf) if recorded((x,)) else store(self.stages, x, leaf)
        return x.to(self.dtypes.stored(leaf))

    def kept(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The resident form of a full parameter, in the dtype of `x`."""
        return store(uncast(self), x, leaf)

    def own(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The shard of a resident parameter that this rank stores, in the dtype of `x`."""
        return store([stage for stage in self.after_update if stage.wire is not None], x, leaf)

    def whole(self, leaves: Leaves) -> Leaves:
        """Full parameters, in the dtype in which they are stored; differentiable if autograd records it.

        If a view still `reads` a state here, there is none: its transform's first state could not be made.
        """
        stages = tuple([stage for stage in self.stages if stage.dtypes is None and not stage.reads])
        if not recorded(leaves.values()):
            return self.see(stages, leaves)
        return {p: view(leaves[p], None) for p, view in self.composed(stages, lambda x: leaves[x.path].dtype).items()}


def uncast(road: Road) -> list[View]:
    """The views between resident parameters and those that the model sees, without casts."""
    return [stage for stage in road.at_use if stage.dtypes is None]


def _sums(specs: Mapping[str, Spec], leaves: Sequence[Leaf], wire: Wire) -> tuple[SumBucket, ...]:
    """The buckets in which gradients that arrive with these specs are reduced over a wire."""
    dtypes: dict[str, torch.dtype] = {}
    for leaf in leaves:
        dtype = specs[leaf.path].sum_dtype
        assert dtype is not None
        dtypes[leaf.path] = dtype
    found = []
    for bucket in into_buckets(leaves, dtypes, wire.group):
        paths = [leaf.path for leaf in bucket]
        forms = [specs[path] for path in paths]
        numels, shapes = [spec.numel for spec in forms], [spec.local_shape for spec in forms]
        found.append(SumBucket(bucket, paths, numels, shapes, summed_in(wire, dtypes[paths[0]])))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# `ShardsOfShards` shards leaves along two axes of a mesh: the second wire shards what the first one left of each leaf.
#
# `shard(mesh["node"])` gives a rank a range of each leaf, and a `reduce_scatter(mesh["nodes"])` behind it cuts that
# range. A wire cuts whole leaves, so the second wire is given the range as a leaf of its own: as rows where the range
# consists of whole rows, else flat. All ranks of the second wire have the same range, because the axes of a mesh
# cross, so what one of them sends is what the others expect. Between the two wires a shard is flat.


@dataclass(frozen=True)
class ShardsOfShards:
    """A wire over the shards that another wire has left of leaves.

    Attributes:
        first: the wire that cuts leaves.
        wire: the wire that cuts its shards.
    """

    first: Wire
    wire: Wire
    cuts: ClassVar[bool] = True

    @property
    def group(self) -> Group:
        return self.wire.group

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.wire.reduce_dtype

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> ShardsOfShards:
        return replace(self, wire=self.wire.on(group, reduce_dtype))

    def given(self, leaf: Leaf) -> Leaf:
        """The shard that the first wire leaves of a leaf, as a leaf: some of its rows, or a flat range."""
        low, high = self.first.span(leaf)
        return replace(leaf, shape=torch.Size(rows_between(leaf.shape, low, high) or (high - low,)))

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's range of the flattened whole leaf."""
        begin = self.first.span(leaf)[0]
        low, high = self.wire.span(self.given(leaf))
        return begin + low, begin + high

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        return self.wire.view(x, self.given(leaf)).reshape(*x.shape[:-1], -1)

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        part = self.given(leaf)
        return self.wire.pull(g.reshape(*g.shape[:-1], *part.shape), part)

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        return self.wire.store(x, self.given(leaf))

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        return self.wire.send_parts(parts, self._given(leaves), async_op)

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        return self.wire.join_parts(rows, self._given(leaves), into)

    def pack(
        self, grads: Grads, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.wire.pack(grads, self._given(leaves), numels, dtype, device)

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        return self.wire.send(buffer, async_op)

    def unpack(
        self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int], given: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        return self.wire.unpack(mine, self._given(leaves), numels, given)

    def _given(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [self.given(leaf) for leaf in leaves]


def spans_by_rank(cutting: Sequence[Wire], leaf: Leaf) -> Iterator[tuple[int, int]]:
    """Each rank's range of a flattened leaf, rank by rank, where several wires shard it one after the other."""
    first, *rest = cutting
    for rank in range(first.group.size):
        wire = first.on(replace(first.group, rank=rank), None)
        if rest:
            # `on_ranks` has made every wire that cuts behind another one.
            yield from spans_by_rank([replace(cast(ShardsOfShards, rest[0]), first=wire), *rest[1:]], leaf)
        else:
            yield wire.span(leaf)


def on_ranks(view: View, cutting: Sequence[Wire], reduce_dtype: torch.dtype | None) -> View:
    """The view of a wire with sums in `reduce_dtype`, over shards where other wires have cut leaves before."""
    assert view.wire is not None
    wire, given = view.wire.on(view.wire.group, reduce_dtype), view.given
    of_model = view.model_wire and view.model_wire.on(view.wire.group, reduce_dtype)
    cut: Callable[[Leaf], Leaf] = given
    if cutting and wire.cuts:
        of_model = of_model and ShardsOfShards(cutting[-1], of_model)
        wire = shards = ShardsOfShards(cutting[-1], wire)
        cut = shards.given
        given = lambda leaf: replace(leaf, shape=torch.Size([shards.given(leaf).numel]))  # noqa: E731
    made = over_ranks(wire, view.resident, view.traceable, of_model)
    return replace(made, name=view.name, given=given, corrects=view.corrects and partial(view.corrects, cut))


def check_axes(reduced: Sequence[tuple[str, Group]]) -> None:
    """Refuse two reductions over the same ranks: two axes of a mesh may have only one rank in common.

    Args:
        reduced: the transforms that reduce, by name, and over which ranks.
    """
    for i, (name, group) in enumerate(reduced):
        for other, before in reduced[:i]:
            both = sorted(set(before.ranks) & set(group.ranks))
            if len(both) > 1:
                raise ValueError(
                    explain(
                        f"chain(..., {other}, ..., {name}, ...) that both reduce over ranks {both}",
                        "the first has reduced over these ranks already, so the second has nothing to add up",
                        "mesh = init_device_mesh(device, (nodes, ranks_of_one), mesh_dim_names=('nodes', 'node'))\n"
                        f"         zf.{other}(mesh['node']), ..., zf.{name}(mesh['nodes'])",
                    )
                )


# ----------------------------------------------------------------------------------------------------------------------
# These functions convert parameters between storage and other programs, shard by shard: they export what the model
# computes with.
#
# A stored shard goes out through the user's views (`seen_part`), and comes back through their `store` (`stored_part`).
# Casts are skipped: an exported tensor has the dtype in which it is stored.


def seen_part(road: Road, stored: Tensor, leaf: Leaf) -> Tensor:
    """The values that the model sees for a stored shard, sharded in the same way. All ranks call it.

    A view in front of the sharding needs the full leaf, which is gathered for it.
    """
    if not _renumbered(road, leaf):
        return stored
    stages = [stage for stage in road.stages if stage.dtypes is None]
    return store([stage for stage in stages if stage.wire is not None], see(stages, stored, leaf), leaf)


def stored_part(road: Road, seen: Tensor, leaf: Leaf) -> Tensor:
    """The stored values for a shard of those that the model is to see, sharded in the same way. All ranks call it."""
    if not _renumbered(road, leaf):
        return seen
    return road.store(see([stage for stage in road.stages if stage.wire is not None], seen, leaf), leaf)


def _renumbered(road: Road, leaf: Leaf) -> bool:
    return any([stage.renumbers and stage.changes(leaf) for stage in road.stages])
