"""Parameters are gathered when they are used, freed when the next ones are, and gathered again in backward.

A *unit* is the parameters that are gathered together (`unit_assignment`). Two units have full parameters at a time: the
one that is used, and the next.

What an operation saves of a full parameter for backward is a note, from which backward gathers the unit again
(`saved_tensors`). So no full parameter outlives its use and nothing is computed twice. No storage is resized to free
a tensor that user code may hold: a later use would read memory that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from .forward_writes import ForwardWrites
from .gathered_units import ALIVE, GatheredUnits, updating
from .lazy_tensor import Lazy
from .unit_collectives import UnitCollectives
from .unit_plans import UnitPlans
from .unit_rounds import GRADIENTS, PARAMETERS, TANGENTS, UnitRounds, outside_inference_mode
from .write_back import WriteBack


class Units:
    """The sharded parameters of one attached model, or of one evaluation of a function, and what gathers them.

    Args:
        plans: which leaves are gathered together, and how.
        pipe: a pipeline with a `shard`.
        params: this rank's shards by path.
        control: a group on which ranks tell each other what they want.
        scale: the loss scale in force.
        accept: takes the gradient of a shard that came by a reduce-scatter which only other ranks wanted.
        prefetch: whether the unit that is expected next is gathered before it is used.

    Attributes:
        suspended: the model's parameters are full ones for a while, and are seen as they are.
        left: the model is detached.
    """

    def __init__(
        self,
        plans: UnitPlans,
        pipe: Pipeline,
        params: Leaves,
        control: Group,
        scale: Callable[[], Tensor | None],
        accept: Callable[[Leaf, Tensor], None],
        prefetch: bool = True,
    ):
        self.plans, self.units, self.blocks = plans, plans.units, plans.blocks
        self.collectives = UnitCollectives(plans, params, scale)
        self.pipe, self.params = pipe, params
        write_back = WriteBack(params, plans.wire.span, pipe.road.exact)
        self.forward_writes = ForwardWrites(self.units, write_back)
        self.gathered = GatheredUnits(self.units, self.blocks, params, self.forward_writes)
        # By unit and place in it: how often a parameter has changed.
        self.age = self.gathered.age
        self.rounds = UnitRounds(control, self.collectives, self.gathered, accept, prefetch)
        self.rests = Rests(self.rounds, self.gathered, write_back)
        self.suspended = self.left = False

    def look(self, path: str, keep: bool) -> Tensor:
        """A full parameter, differentiable; with `keep` the same tensor until its unit is freed."""
        i, j = self.plans.place[path]
        if self.suspended:
            with torch.DisableTorchFunctionSubclass():
                stored = self.params[path].view_as(self.params[path])
            return stored.to(self.pipe.dtypes.of(self.units[i][j]).param_dtype or stored.dtype)
        if functorch_active():
            # A transform of torch.func in forward takes it for a constant, as it does a plain parameter.
            with beneath_functorch():
                return self.look(path, keep)
        gathered = self.gathered
        with self.rounds.lock:
            found = gathered.seen.get(i) if keep else None
            if found is None:
                # The same tensor in every mode, as a parameter is.
                with outside_inference_mode(), torch.enable_grad():
                    found = GatherUnit.apply(self, i, PARAMETERS, *gathered.parts[i])
                self.forward_writes.give(i, found)
                if keep:
                    gathered.seen[i] = found
            elif i in gathered.live:
                gathered.live.move_to_end(i)
            return found[j]

    def gather_alone(self, path: str) -> Tensor:
        """A full parameter in the stored dtype, for code outside of the model; differentiable."""
        return GatherUnit.apply(self, self.plans.alone[path], PARAMETERS, self.params[path])[0]

    def parameters(self, i: int) -> list[Tensor]:
        """The unit's full parameters in the compute dtype: those that are here, or gathered now."""
        with self.rounds.lock:
            found = self.gathered.get(i)
            if found is None:
                self.gathered.drop(ALIVE - 1)
                with self._sending():
                    found = self.rounds.perform(PARAMETERS, i)
                self.gathered.put(i, found)
            return found

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        """One full parameter, for a graph that was made when it had changed `age` times.

        Raises:
            RuntimeError: it has changed since. Autograd has no version to compare here.
        """
        with self.rounds.lock:
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
            # Its age told of writes into this one; writes into its neighbours are found where those are used.
            self.gathered.live.move_to_end(i)
            return self.gathered.live[i][j]

    def lazies(self, i: int) -> list[Lazy]:
        """The unit's full parameters as tensors that are gathered when something is computed with them."""
        dtypes = self.plans.plan(i).dtypes
        metas = (torch.empty(leaf.shape, dtype=dtypes[leaf.path], device="meta") for leaf in self.units[i])
        return [Lazy(self, (i, j), meta) for j, meta in enumerate(metas)]

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Full tensors of something else that is cut as the unit's parameters are."""
        with self._sending():
            return self.rounds.perform(TANGENTS, i, shards)

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards, averaged over ranks and unscaled, from full ones."""
        with self._sending():
            return self.rounds.perform(GRADIENTS, i, fulls)

    def _sending(self) -> AbstractContextManager[Any]:
        """The context of each collective."""
        if self.left:
            raise RuntimeError(
                explain(
                    "backward through a graph from before opt.detach()",
                    "under shard parameters are gathered again, and this rank has no parts of them any more",
                    "all backwards of a graph before opt.detach(), or the forward again after it",
                )
            )
        self.rests.after_backward()
        return outside_inference_mode()

    @contextmanager
    def updating(self, path: str) -> Iterator[None]:
        """Inside, one leaf is updated alone, in backward."""
        with self.rounds.lock, updating(self.gathered, {self.plans.place[path], (self.plans.alone[path], 0)}):
            yield

    def end_of_call(self) -> None:
        """A call of the model has ended: the tensors it was given belong to its graph alone."""
        with self.rounds.lock:
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
        # Not views: torch refuses to use one of several views after a write into another.
        return tuple([full.data for full in fulls])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i = inputs[0], inputs[1]
        ctx.set_materialize_grads(False)
        if inputs[2] == PARAMETERS:
            # Those that are frozen for this call too: their neighbours in the unit need gradients, and what came of
            # one would be dropped here and taken by the ranks that only join.
            trained = ctx.needs_input_grad[3:]
            ctx.mark_non_differentiable(*(x for x, needed in zip(output, trained, strict=True) if not needed))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:  # type: ignore[override]
        # Parameters have no dimension for vmap: torch asks only whether there is a rule.
        raise RuntimeError(BATCHED)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_alone(ctx.units.units[ctx.i], gs)
        units: Units = ctx.units
        # Without a node where nobody would differentiate it.
        found = units.gradients(ctx.i, gs) if untracked() else ScatterUnit.apply(units, ctx.i, *gs)
        # What other ranks have of a leaf that was frozen here alone: autograd drops it.
        for leaf, g, needed in zip(units.units[ctx.i], found, ctx.needs_input_grad[3:], strict=True):
            if g is not None and not needed:
                units.rounds.late.append((leaf, g.detach()))
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
    """Refuse cotangents that no collective takes: batches of `vmap`, and sparse ones."""
    if all_plain(gs):
        return
    there = {leaf.path: g for leaf, g in zip(unit, gs, strict=True) if g is not None}
    if any(map(is_batch, there.values())):
        raise RuntimeError(BATCHED)
    check_dense(there)
