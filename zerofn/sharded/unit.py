"""One unit: leaves whose parameters are all-gathered, and whose gradients are reduce-scattered, together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from operator import add, is_not
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import version, writes
from .._profiler_ranges import VIEW, ranged
from ..core.layout import Leaf, Leaves, as_real
from ..core.view import divided, pull
from .forward_writes import ForwardWrites
from .units import GradBucket, Plan, UnitPlans

NOTHING = type(None)


class Unit:
    """The leaves of one unit, and its full parameters while it is unsharded.

    A unit does not choose when it is unsharded and resharded; `schedule.Schedule` does.

    Args:
        plans: what the collectives of each unit carry.
        i: the number of this one.
        params: this rank's shards by path.
        scale: the current loss scale.
        forward_writes: stores what forward writes into full parameters.

    Attributes:
        leaves: its leaves.
        plan: what its collectives carry, from its first one on.
        shards: this rank's shard of each.
        fulls: the full parameters; `None` while it is sharded.
        seen: the tensors on them that the model got in the current call; `None` if it got none.
        changes: for each leaf, how often user code has changed its shard.
        counts: for each shard, the count of writes at the last check.
    """

    def __init__(
        self,
        plans: UnitPlans,
        i: int,
        params: Leaves,
        scale: Callable[[], Tensor | None],
        forward_writes: ForwardWrites,
    ):
        self.plans, self.i, self.scale, self.forward_writes = plans, i, scale, forward_writes
        self.leaves = plans.units[i]
        self.plan: Plan | None = None
        self.shards = [params[leaf.path] for leaf in self.leaves]
        self.fulls: list[Tensor] | None = None
        self.seen: tuple[Tensor, ...] | None = None
        self.changes = [0] * len(self.leaves)
        self.counts = writes(self.shards)
        # The tensors on the full parameters that forward got, and the autograd nodes that made them.
        self.given: list[tuple[Tensor, ...]] = []
        self.nodes: list[Any] = []
        # For each leaf, how many writes into the given tensors are stored, and how many came before these tensors.
        self.stored = self.earlier = [0] * len(self.leaves)

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives. Each is begun by one function, which returns another one that waits: one for each dtype in a unit.

    def unshard(self) -> Callable[[], list[Tensor]]:
        """Begin an all-gather of the parameters. Return a function that waits, and returns them."""
        if self.given:
            self.store_writes()
        with torch.DisableTorchFunctionSubclass():
            return self.gather(list(map(Tensor.detach, self.shards)))

    def gather(self, parts: Sequence[Tensor | None]) -> Callable[[], list[Tensor]]:
        """Begin an all-gather of tensors that are laid out like the shards; `None` is zeros."""
        plan = self.plan = self.plan or self.plans.plan(self.i)
        wire = self.plans.model_wire if self.i < self.plans.blocks else self.plans.wire
        mine: Any = parts
        if NOTHING in map(type, parts):
            mine = [torch.zeros_like(own) if x is None else x for own, x in zip(self.shards, parts, strict=True)]
        with ranged(VIEW, self.plans.name):
            # All are packed before the first is sent: if a view raises, no other rank waits for the rest.
            packed = self.plans.to_gather(plan, mine)
            sent: list[tuple[list[Leaf], Any, Tensor]] = []
            for bucket, seen in zip(plan.buckets, packed, strict=True):
                sent.append((bucket, *wire.send_parts(seen, bucket, async_op=True)))
        return partial(self._wait_for_gather, plan, sent)

    def _wait_for_gather(self, plan: Plan, sent: list[tuple[list[Leaf], Any, Tensor]]) -> list[Tensor]:
        out: list[Any] = [None] * len(self.leaves)
        while sent:
            # Buffers are popped, so that each is freed before the next is unpacked.
            bucket, work, rows = sent.pop()
            if work is not None:
                work.wait()
            for leaf, full in self.plans.gathered(bucket, rows):
                out[plan.place[leaf.path]] = full
        return out

    def reduce(self, grads: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin a reduce-scatter.

        Args:
            grads: the full gradient of each leaf; `None` where this rank has none.

        Returns:
            A function that waits, and returns the true gradient of each shard: averaged over ranks and unscaled, `None`
            where no rank has one.
        """
        packed: list[tuple[GradBucket, Tensor, list[bool]]] = []
        plan = self.plan = self.plan or self.plans.plan(self.i)
        wire, full_stages = self.plans.wire, self.plans.full_stages
        for bucket in plan.grad_buckets:
            flat: list[Tensor | None] = []
            device = None
            for leaf in bucket.leaves:
                g = grads[plan.place[leaf.path]]
                if g is not None:
                    g = g if leaf.complex is None else as_real(g, leaf)
                    g = pull(full_stages, g, leaf) if full_stages else g
                    g = g if g.ndim == 1 else g.reshape(-1)
                    device = device or g.device
                flat.append(g)
            with ranged(VIEW, self.plans.name):
                # The device comes from a gradient if there is one: attributes of a sharded parameter take longer.
                device = device or self.shards[plan.place[bucket.leaves[0].path]].device
                rows = wire.pack(flat, bucket.leaves, bucket.numels, bucket.dtype, device)
            packed.append((bucket, rows, list(map(is_not, flat, repeat(None)))))
        # As in `gather`: none is sent before all are packed.
        sent: list[tuple[GradBucket, list[bool], Any, Tensor]] = []
        for bucket, rows, given in packed:
            sent.append((bucket, given, *wire.send(rows, async_op=True)))
        return partial(self._wait_for_reduce, plan, sent)

    def _wait_for_reduce(
        self, plan: Plan, sent: list[tuple[GradBucket, list[bool], Any, Tensor]]
    ) -> list[Tensor | None]:
        out: list[Tensor | None] = [None] * len(self.leaves)
        scale = self.scale() if self.i < self.plans.blocks else None
        for bucket, given, work, mine in sent:
            work.wait()
            found = self.plans.wire.unpack(mine, bucket.leaves, bucket.numels, given)
            # Gradients are views of one buffer, which any of them keeps alive. They are copied if the buffer has more.
            copy = NOTHING in map(type, found)
            for leaf, g in zip(bucket.leaves, found, strict=True):
                if g is not None:
                    g = pull(self.plans.pull_stages, g, leaf) if self.plans.pull_stages else g
                    dtype = plan.grad_dtypes[leaf.path]
                    # `.data` has a version count of its own, unlike a view.
                    if scale is not None:
                        g = divided(g, scale, dtype)
                    else:
                        g = g.to(dtype, copy=copy).data if copy or g.dtype != dtype else g.data
                    out[plan.place[leaf.path]] = g
        return out

    def reshard(self, stored: bool = False) -> None:
        """Free the full parameters. Unless `stored`, store first what forward has written into them."""
        if not stored:
            self.store_writes()
        refs = [(leaf, weakref.ref(v)) for views in self.given for leaf, v in zip(self.leaves, views, strict=True)]
        self.forget_given()
        self.fulls = self.seen = None
        for leaf, ref in refs:
            view = ref()
            if view is not None and not view.is_inference():
                self.forward_writes.freed.append((leaf, view, version(view)))

    # ------------------------------------------------------------------------------------------------------------------
    # Writes of forward into full parameters, and of user code into shards.

    def give(self, views: tuple[Tensor, ...]) -> None:
        """Record that forward is given these tensors on the full parameters."""
        self.given.append(views)
        # One node made all of them, if any has a node.
        self.nodes += [v.grad_fn for v in views if v.grad_fn is not None][:1]

    def forget_given(self) -> None:
        """Stop watching the tensors that forward was given."""
        if self.given:
            self.earlier = list(map(add, self.earlier, self._written()))
            self.stored = [0] * len(self.leaves)
            self.given.clear()
            self.nodes.clear()

    def _written(self) -> list[int]:
        """For each leaf, how often the tensors that forward got were written into, as autograd counts it."""
        counts = [0] * len(self.leaves)
        for views in self.given:
            for j, v in enumerate(views):
                if not v.is_inference():
                    counts[j] += version(v)
        return counts

    def store_writes(self) -> None:
        """Store what forward has written into the full parameters so far."""
        if self.fulls is None or not self.given or (written := self._written()) == self.stored:
            return
        changed = False
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            for j, leaf in enumerate(self.leaves):
                views = [each[j] for each in self.given]
                if any(v.grad_fn is not None and v.grad_fn not in self.nodes for v in views):
                    self.forward_writes.lost[leaf.path] = "written with gradients enabled"
                elif written[j] != self.stored[j]:
                    changed |= self.forward_writes.store(leaf, self.fulls[j])
        self.stored = written
        if changed:
            self.counts = writes(self.shards)

    def has_changed(self, j: int) -> bool:
        """Whether the shard of a leaf was written into since this was last asked."""
        (count,) = writes([self.shards[j]])
        before, self.counts[j] = self.counts[j], count
        # A read of `.data` frees the full parameter too, since it may be a write. It is no reason to refuse a graph.
        self.changes[j] += count[0] != before[0]
        return count != before

    def age(self, j: int) -> int:
        """How often a leaf has changed: by user code, and by the model in forward."""
        if self.i >= self.plans.blocks:
            return self.changes[j]
        if not self.given:
            return self.changes[j] + self.earlier[j]
        return self.changes[j] + self.earlier[j] + sum(version(x[j]) for x in self.given if not x[j].is_inference())


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leaves `torch.inference_mode`, for tensors that outlive the call: training cannot use inference tensors.

    Training may next use a unit that an evaluation has gathered, and a rank that waits between two calls gets
    gradients in whatever mode it is.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
