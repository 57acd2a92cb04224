"""The pure route under `shard`: the parameters that `fn` is given, and their gradients.

A leaf of `fn`'s tree is a `Lazy`. What autograd saves for backward is one too, which gathers again, and nothing
has to be packed: saved-tensor hooks, which the eager route needs for plain parameters, would not allow
torch.func inside of `fn`.

A leaf's cotangents add up as those of any tensor do, once for all its uses, and leave as this rank's
shards as soon as those of its whole block are complete.
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

# A list's element that is one tensor of no more elements than this is cheaper to keep than to announce.
TINY = 1 << 10


class Handles(Function):
    """The lazy parameters of one block; their cotangents are summed over ranks."""

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
        shards = {p: x.detach() for p, x in resident.items()}
        self.found: Leaves = {}
        self.open = False
        self.written = {p: version(x) for p, x in shards.items()}
        collect = functools.partial(_collect, self.found)
        super().__init__(pipe.once(_plans), pipe, shards, group, lambda: scale, collect, prefetch=False)

    def handles(self, anchor: Tensor) -> Leaves:
        """Lazy parameters by path, which have a gradient if `anchor` has."""
        found: Leaves = {}
        for i in range(len(self.units)):
            lazies = Handles.apply(anchor, self, i)
            found.update(zip(self.plans.plan(i).place, lazies, strict=True))
            for x in lazies:
                if x.grad_fn is not None:
                    # Nodes that are made first run last, and all full gradients would wait for that. All have one.
                    run_when_ready(x.grad_fn)
                    break
        return found

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Parameters may be used inside. Ends when it has ended on every rank."""
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

    def parameters(self, i: int) -> list[Tensor]:
        self._check_open()
        return super().parameters(i)

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        self._check_open()
        return super().parameter(i, j, age)

    def _check_open(self) -> None:
        if not self.open:
            raise RuntimeError(
                explain(
                    "a parameter is used after the function that it was given to has returned",
                    "under shard it is gathered when it is used, which all ranks have to take part in",
                    "return what is computed from it, or keep params['w'].clone()",
                )
            )

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Nobody may be there any more.
            self.open = False
            raise

    def pull(self, run: Callable[[], Any]) -> tuple[Leaves, Any]:
        """Gradients of shards from the backward that `run` makes, and what it returns."""
        changed = [p for p, x in self.params.items() if version(x) != self.written[p]]
        if changed:
            raise RuntimeError(
                explain(
                    f"pullback after the state was written to ({changed[0]})",
                    "under shard backward gathers parameters again, and they are no longer those of forward",
                    "pull back before a step with donate=True",
                )
            )
        # A backward that `fn` itself has run is its own business.
        self.found.clear()
        try:
            with self.evaluation(), torch.no_grad():
                result = run()
            return self._averaged(self.found), result
        finally:
            self.found.clear()
            self.gathered.drop()

    def _averaged(self, grads: Leaves) -> Leaves:
        """Gradients of shards over the replicas of hybrid sharding too, in the dtype of accumulation."""
        road = self.pipe.road
        later = () if self.pipe.road.late else tuple(stage for stage in road.after_update if not stage.only_dtype)
        there = {leaf.path: grads[leaf.path] for leaf in self.pipe.layout.trainable if leaf.path in grads}
        return road.pull(later, there, self.params)


def _plans(pipe: Pipeline) -> UnitPlans:
    assert pipe.gathering is not None
    return UnitPlans(by_prefix(pipe.layout.leaves), pipe.road, pipe.gathering)


def _collect(found: Leaves, leaf: Leaf, g: Tensor) -> None:
    old = found.get(leaf.path)
    found[leaf.path] = g if old is None else old.add_(g)


def by_prefix(leaves: tuple[Leaf, ...]) -> list[list[Leaf]]:
    """Leaves by unit: elements of the outermost lists, or of dicts with numbers for names, and the others.

    >>> from zerofn.core.layout import make_layout
    >>> w = torch.zeros(99, 99)
    >>> layout, _ = make_layout({"blocks": [{"a": w + 0, "b": w + 0}, {"a": w + 0}], "head": w + 0, "tail": w + 0})
    >>> [[leaf.path for leaf in unit] for unit in by_prefix(layout.leaves)]
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
