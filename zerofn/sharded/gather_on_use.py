"""Parameters gathered when they are used, freed when the next are, and gathered again in backward.

A *unit* is what is gathered together (`units`); two are alive at a time, the one that is used and the next.

What an operation saves for backward of a gathered parameter is not the tensor but a note of where it came from
(`saved_tensors`); backward gathers the unit again. So nothing gathered outlives its use, nothing is computed twice,
and no storage is ever resized under a tensor that somebody holds: a use after that frees memory under running
code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.compiler import uncompiled
from .._compat.functorch import beneath_functorch, functorch_active, is_batch
from .._compat.tensors import all_plain
from .._errors import explain
from ..core.gradient_checks import check_dense
from ..core.layout import Leaf, Leaves
from ..core.linear_map import untracked
from ..core.pipeline import Pipeline
from ..ranks.group import Group
from .flush import Rests
from .forward_writes import Written
from .gathered_units import ALIVE, Gathered
from .lazy_tensor import Lazy
from .prefetch import Course
from .unit_collectives import UnitCollectives
from .unit_plans import UnitPlans
from .unit_rounds import PARAMETERS, TANGENTS, UnitRounds, lasting


class Units:
    """Gathered parameters: those of one attached model, or of one evaluation of a function.

    Args:
        plans: which leaves are gathered together, and how.
        pipe: a pipeline with a `shard`.
        params: this rank's shards by path.
        control: a group for the exchange of what is wanted.
        scale: the loss scale in force.
        accept: takes the gradient of a shard that other ranks' backward brought about.
        ended: called at the end of a backward, when it has ended on all ranks.
        early: whether the unit that is expected next is gathered before it is used.
    """

    def __init__(
        self,
        plans: UnitPlans,
        pipe: Pipeline,
        params: Leaves,
        control: Group,
        scale: Callable[[], Tensor | None],
        accept: Callable[[Leaf, Tensor], None],
        ended: Callable[[], None] = lambda: None,
        early: bool = True,
    ):
        self.plans, self.units, self.blocks = plans, plans.units, plans.blocks
        self.collectives = UnitCollectives(plans, params, scale)
        self.pipe, self.params = pipe, params
        self.watch = Written(self.units, params, plans.wire.span, pipe.road.exact)
        self.gathered = Gathered(self.units, self.blocks, params, self.watch)
        # By unit and place in it: how often a parameter has changed.
        self.age = self.gathered.age
        self.rounds = UnitRounds(control, self.collectives, self.gathered, accept, Course() if early else None)
        self.rests = Rests(self.rounds, self.gathered, self.watch.back, ended)
        # The parameters are full ones for a while, so that they are seen as they are.
        self.suspended = False
        # The model is a plain one again.
        self.left = False

    def look(self, path: str, keep: bool) -> Tensor:
        """A gathered parameter, differentiable; with `keep` the same tensor until its unit is let go."""
        if self.suspended:
            i, j = self.plans.place[path]
            stored = self.params[path].detach()
            return stored.to(self.pipe.dtypes.of(self.units[i][j]).param_dtype or stored.dtype)
        i, j = self.plans.place[path]
        if functorch_active():
            # A transform of torch.func in forward takes it for a constant, as it does a plain parameter.
            with beneath_functorch():
                return self.look(path, keep)
        gathered = self.gathered
        found = gathered.seen.get(i) if keep else None
        if found is None:
            # The same tensor in every mode, as a parameter is.
            with lasting(), torch.enable_grad():
                found = GatherUnit.apply(self, i, PARAMETERS, *gathered.parts[i])
            self.watch.give(i, found)
            if keep:
                gathered.seen[i] = found
        elif i in gathered.live:
            gathered.live.move_to_end(i)
        return found[j]

    def look_alone(self, path: str) -> Tensor:
        """A parameter as it is stored, in full, for the world outside of the model; differentiable."""
        return GatherUnit.apply(self, self.plans.alone[path], PARAMETERS, self.params[path])[0]

    def parameters(self, i: int) -> list[Tensor]:
        """The unit's full parameters in the compute dtype, from those that are gathered or gathered now."""
        found = self.gathered.get(i)
        if found is None:
            self.gathered.drop(ALIVE - 1)
            with self._sending():
                found = self.rounds.parameters(i)
            self.gathered.put(i, found)
        return found

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        """One of them.

        Args:
            i: the unit.
            j: the leaf's place in it.
            age: its age when the graph was made that it is for. One that was made with other values is
                refused, since autograd knows of no version here.
        """
        if age != self.age(i, j):
            raise RuntimeError(
                explain(
                    "backward through a graph from before the parameters were updated",
                    "under shard they are gathered again, and are no longer those of forward",
                    "all backwards of a graph before opt.step() or a change by hand, or the forward again after it",
                )
            )
        if i not in self.gathered.live:
            return self.parameters(i)[j]
        # Its age has told of writes into this one; those into its neighbours are told where they are used.
        self.gathered.live.move_to_end(i)
        return self.gathered.live[i][j]

    def lazies(self, i: int) -> list[Lazy]:
        """The unit's full parameters before anything is computed with them."""
        dtypes = self.plans.plan(i).dtypes
        metas = [torch.empty(leaf.shape, dtype=dtypes[leaf.path], device="meta") for leaf in self.units[i]]
        return [Lazy(self, (i, j), meta) for j, meta in enumerate(metas)]

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Gather something else of the parameters' layout."""
        with self._sending():
            return self.rounds.tangents(i, shards)

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards: averaged over ranks, unscaled."""
        with self._sending():
            return self.rounds.gradients(i, fulls)

    def _sending(self) -> AbstractContextManager[Any]:
        """What stands around each collective."""
        if self.left:
            raise RuntimeError(
                explain(
                    "backward through a graph from before opt.detach()",
                    "under shard parameters are gathered again, and this rank has no parts of them any more",
                    "all backwards of a graph before opt.detach(), or the forward again after it",
                )
            )
        self.rests.after_backward()
        return lasting()

    def end_of_call(self) -> None:
        """A call has ended: its tensors belong to its graph alone."""
        self.gathered.settle_all()
        self.gathered.seen.clear()
        if not self.suspended:
            self.rests.after_call()


BATCHED = explain(
    "torch.autograd.grad(..., is_grads_batched=True), or vectorize=True, by parameters under shard",
    "gradients are averaged over ranks in backward, for which torch.distributed has no batching rule",
    "[torch.autograd.grad(y, params, v, retain_graph=True) for v in vectors]; by inputs alone it works",
)


class GatherUnit(Function):
    """Shards to full parameters, as the model sees them; its derivative is `ScatterUnit`."""

    @staticmethod
    def forward(units: Units, i: int, kind: int, *shards: Tensor | None) -> tuple[Tensor, ...]:
        if kind == PARAMETERS and i >= units.blocks:
            return tuple(units.lazies(i))
        fulls = units.parameters(i) if kind == PARAMETERS else units.tangents(i, shards)
        # No views, of which torch lets nobody use one after another has been written into.
        return tuple([full.data for full in fulls])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i = inputs[0], inputs[1]
        ctx.set_materialize_grads(False)
        if inputs[2] == PARAMETERS:
            frozen = inputs[0].plans.frozen[inputs[1]]
            ctx.mark_non_differentiable(*[output[j] for j in frozen])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:  # type: ignore[override]
        # Parameters have no dimension for vmap: that there is a rule is all that torch wants to know.
        raise RuntimeError(BATCHED)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_alone(ctx.units.units[ctx.i], gs)
        # As what a Function returns, but for a node that nobody would go through.
        found = ctx.units.gradients(ctx.i, gs) if untracked() else ScatterUnit.apply(ctx.units, ctx.i, *gs)
        return None, None, None, *found


class ScatterUnit(Function):
    """Cotangents of full parameters to true gradients of shards; its derivative is `GatherUnit`."""

    @staticmethod
    def forward(units: Units, i: int, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(units.gradients(i, gs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i = inputs[0], inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_alone(ctx.units.units[ctx.i], gs)
        return None, None, *GatherUnit.apply(ctx.units, ctx.i, TANGENTS, *gs)


def check_alone(unit: list[Leaf], gs: tuple[Tensor | None, ...]) -> None:
    """Refuse cotangents of which there are several at once, each a message of its own for which collectives have no
    rule; and sparse ones, which no message takes."""
    if all_plain(gs):
        return
    there = {leaf.path: g for leaf, g in zip(unit, gs, strict=True) if g is not None}
    if any(map(is_batch, there.values())):
        raise RuntimeError(BATCHED)
    check_dense(there)
