"""The pure route under `shard`: parameters all-gathered on use, and gradients reduce-scattered.

Each leaf that `fn` is given is a `Lazy`, which is all-gathered when something is computed with it. What autograd
saves for backward is a `Lazy` too and is gathered again in backward. So nothing has to be packed: saved-tensor hooks,
which the eager route needs for plain parameters, would not allow torch.func inside of `fn`.

Autograd adds up the cotangents of all uses of a leaf. As soon as those of a whole block are complete they are
reduce-scattered to this rank's shards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.autograd import run_when_ready
from .._compat.tensors import version
from .._errors import explain
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.gather_on_use import Units, check_alone
from ..sharded.lazy_tensor import Lazy
from ..sharded.unit_assignment import SMALL
from ..sharded.unit_plans import UnitPlans

# An element of a list that is one tensor of at most so many elements is no unit of its own: each gather has a latency.
TINY = 1 << 10


class LazyParameters(Function):
    """The lazy parameters of one block; backward reduce-scatters their cotangents."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, blocks: Blocks, i: int) -> tuple[Lazy, ...]:
        ctx.blocks, ctx.i = blocks, i
        ctx.set_materialize_grads(False)
        lazies = blocks.lazies(i)
        frozen = [x for x, leaf in zip(lazies, blocks.units[i], strict=True) if not leaf.trainable]
        ctx.mark_non_differentiable(*frozen)
        return tuple(lazies)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        blocks, i = ctx.blocks, ctx.i
        check_alone(blocks.units[i], gs)
        for leaf, g in zip(blocks.units[i], blocks.gradients(i, gs), strict=True):
            if g is not None and leaf.trainable:
                blocks.rounds.accept(leaf, g)
        return None, None, None


class Blocks(Units):
    """The parameters of one evaluation of `fn`.

    All its collectives are of one thread, and all ranks make the same ones in the same order, so the
    pipeline's own group does for the data and for the exchange before it.

    Args:
        pipe: a pipeline with a `shard`.
        resident: this rank's shards.
        scale: the loss scale.
    """

    def __init__(self, pipe: Pipeline, resident: Leaves, scale: Tensor | None):
        assert pipe.gathering is not None
        group = pipe.gathering.group
        # For every leaf in every step, hence from C.
        shards = dict(zip(resident, map(Tensor.detach, resident.values()), strict=True))
        self.versions = list(map(version, shards.values()))
        self.found: Leaves = {}
        self.open = False
        collect = functools.partial(_collect, self.found)
        super().__init__(pipe.once(_plans), pipe, shards, group, lambda: scale, collect, prefetch=False)

    def lazy_parameters(self, anchor: Tensor) -> Leaves:
        """Lazy parameters by path, which require grad where `anchor` does."""
        found: Leaves = {}
        for i in range(len(self.units)):
            lazies = LazyParameters.apply(anchor, self, i)
            found.update(zip(self.plans.plan(i).place, lazies, strict=True))
            for x in lazies:
                if x.grad_fn is not None:
                    # One node for all of the block. Autograd runs nodes that are made first last, and full gradients
                    # of all blocks would be kept until then.
                    run_when_ready(x.grad_fn)
                    break
        return found

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Parameters may be used inside. At its end this rank waits until all ranks have come to theirs."""
        self.open = True
        try:
            yield
        except Exception:
            self.gathered.drop()
            if self.open:
                # The others may still be in theirs.
                self.rounds.rest()
            raise
        else:
            self.rounds.rest()
        finally:
            self.open = False

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        if not self.open:
            raise RuntimeError(
                explain(
                    "a parameter is used after the function that it was given to has returned",
                    "under shard it is gathered when it is used, which all ranks have to take part in",
                    "return what is computed from it, or keep params['w'].clone()",
                )
            )
        return super().parameter(i, j, age)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Other ranks may be gone: no further collective is begun.
            self.open = False
            raise

    def pull(self, run: Callable[[], Any]) -> tuple[Leaves, Any]:
        """Run a backward, `run`; return the gradients of shards that came of it, and what `run` returned."""
        now = list(map(version, self.params.values()))
        if now != self.versions:
            changed = next(p for p, a, b in zip(self.params, now, self.versions, strict=True) if a != b)
            raise RuntimeError(
                explain(
                    f"pullback after the state was written to ({changed})",
                    "under shard backward gathers parameters again, and they are no longer those of forward",
                    "pull back before a step with donate=True",
                )
            )
        # Gradients of a backward inside of `fn` are no part of this one.
        self.found.clear()
        try:
            with self.evaluation(), torch.no_grad():
                result = run()
            return self._averaged(self.found), result
        finally:
            self.found.clear()
            self.gathered.drop()

    def _averaged(self, grads: Leaves) -> Leaves:
        """Gradients of shards, averaged over the replicas of hybrid sharding too, in the dtype they accumulate in."""
        road = self.pipe.road
        later = () if self.pipe.road.late else tuple(stage for stage in road.after_update if stage.dtypes is None)
        there = {leaf.path: grads[leaf.path] for leaf in self.pipe.layout.trainable if leaf.path in grads}
        return road.pull(later, there, self.params)


def _plans(pipe: Pipeline) -> UnitPlans:
    assert pipe.gathering is not None
    return UnitPlans(units_by_prefix(pipe.layout.leaves), pipe.road, pipe.gathering)


def _collect(found: Leaves, leaf: Leaf, g: Tensor) -> None:
    old = found.get(leaf.path)
    found[leaf.path] = g if old is None else old.add_(g)


def units_by_prefix(leaves: tuple[Leaf, ...]) -> list[list[Leaf]]:
    """Which leaves are gathered together: those of each element of an outermost list (or of a dict whose keys are
    numbers), and small neighbours outside of any.

    >>> from zerofn.core.layout import make_layout
    >>> w = torch.zeros(99, 99)
    >>> layout, _ = make_layout({"blocks": [{"a": w + 0, "b": w + 0}, {"a": w + 0}], "head": w + 0, "tail": w + 0})
    >>> [[leaf.path for leaf in unit] for unit in units_by_prefix(layout.leaves)]
    [['blocks.0.a', 'blocks.0.b'], ['blocks.1.a'], ['head', 'tail']]
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(_block(leaf) or f"{leaf.path}.", []).append(leaf)
    units: list[list[Leaf]] = []
    loose: list[Leaf] = []  # the last unit, if it is no block
    for name, unit in groups.items():
        block = not name.endswith(".")
        if not block and loose and sum(leaf.numel for leaf in itertools.chain(loose, unit)) <= SMALL:
            loose.extend(unit)
            continue
        units.append(unit)
        loose = [] if block else unit
    return units


def _block(leaf: Leaf) -> str | None:
    keys = leaf.path.split(".")
    at = next((n for n, key in enumerate(keys, 1) if key.isdigit()), None)
    if at is None or (at == len(keys) and leaf.numel <= TINY):
        return None
    return ".".join(keys[:at])
