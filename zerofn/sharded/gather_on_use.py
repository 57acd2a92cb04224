"""Parameters are gathered when they are used, and freed when the next ones are.

A *unit* is the parameters that are gathered together (`units.split`). Two units have full parameters at a time: the one
in use, and the next (`schedule.Schedule`).

What an operation saves of a full parameter for backward is a note (`notes`), from which backward gathers the unit
again. So no full parameter outlives its use and nothing is computed twice. No storage is resized to free a tensor that
user code may hold: a later use would read memory that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.autograd import applied, graph_task, has_hooks, reaches
from .._compat.functorch import beneath_functorch, functorch_active, is_batch, uncompiled
from .._compat.tensors import all_plain
from .._errors import explain
from ..core.layout import Leaf, Leaves, as_complex
from ..core.pipeline import Pipeline
from ..core.returned_values import check_dense
from ..core.view import untracked
from ..ranks.group import Group
from .forward_writes import ForwardWrites
from .lazy_tensor import Lazy
from .schedule import GRADIENTS, PARAMETERS, TANGENTS, Schedule
from .unit import Unit, outside_inference_mode
from .units import UnitPlans


class Faces(Protocol):
    """Converts gradients of an attached model between flat shards and the tensors that user code has of them."""

    def gradient(self, leaf: Leaf, g: Tensor | None) -> Tensor | None: ...
    def shard(self, leaf: Leaf, x: Tensor | None) -> Tensor | None: ...
    def local(self, p: Tensor) -> Tensor: ...


class Units:
    """The sharded parameters of one attached model, or of one evaluation of a function, and what gathers them.

    Args:
        plans: which leaves are gathered together, and how.
        pipe: a pipeline with a `shard`.
        params: this rank's shards by path.
        control: a group on which ranks tell each other what they want.
        scale: the current loss scale.
        accept: takes a shard's gradient that autograd does not bring to it, and whether hooks on it are to be run.
        prefetch: whether the unit that is expected next is gathered before it is used.
        update: see `Schedule`.
        shown: by path, the tensors that the graph of a gather leads to: the shards themselves, or what a model has in
            their place.
        faces: converts gradients between shards and what leads to them; `None` where those are the shards.

    Attributes:
        suspended: inside `opt.gathered()`: the model's parameters are full ones and are used as they are.
        left: the model is detached.
        unfrozen: by unit, for each leaf the sum of full gradients that came since it was unfrozen. Until the next step
            no bucket has a place for them.
    """

    def __init__(
        self,
        plans: UnitPlans,
        pipe: Pipeline,
        params: Leaves,
        control: Group,
        scale: Callable[[], Tensor | None],
        accept: Callable[[Leaf, Tensor, bool], None],
        prefetch: bool = True,
        update: Callable[[], object] | None = None,
        shown: Leaves | None = None,
        faces: Faces | None = None,
    ):
        self.plans, self.units, self.blocks = plans, plans.units, plans.blocks
        self.shown, self.faces = params if shown is None else shown, faces
        self.inputs = [[self.shown[leaf.path] for leaf in unit] for unit in plans.units]
        self.pipe, self.params = pipe, params
        exact = pipe.road.exact and plans.model_wire is plans.wire
        forward_writes = ForwardWrites(params, plans.wire.span, exact)
        units = [Unit(plans, i, params, scale, forward_writes) for i in range(len(plans.units))]
        data = plans.wire.group
        self.schedule = Schedule(units, forward_writes, control, data, accept, prefetch, update)
        # (unit, place in it) -> how often a parameter has changed.
        self.age = self.schedule.age
        self.suspended = self.left = False
        self.unfrozen: dict[int, dict[str, Tensor]] = {}
        self.all_trained = len(pipe.layout.trained) == len(pipe.layout.leaves)

    def look(self, path: str, keep: bool) -> Tensor:
        """A full parameter, differentiable; with `keep`, each call returns the same tensor until its unit is freed."""
        i, j = self.plans.place[path]
        seen = self.schedule.units[i].seen
        if keep and seen is not None and i == self.schedule.current and not (self.suspended or functorch_active()):
            return seen[j]
        if self.suspended:
            whole = self.shown[path]
            with torch.DisableTorchFunctionSubclass():
                stored = whole.view_as(whole) if self.faces is None else self.faces.local(whole)
            return stored.to(self.pipe.dtypes.of(self.units[i][j]).param_dtype or stored.dtype)
        if functorch_active():
            # To a transform of torch.func that runs inside of forward it is a constant, as a plain parameter is.
            with beneath_functorch():
                return self.look(path, keep)
        with self.schedule.lock:
            self.schedule.recorded = torch.is_grad_enabled()
            unit = self.schedule.units[i]
            if keep and unit.seen is not None:
                self.schedule.use(i)
                return unit.seen[j]
            # All grad modes get the same tensor, as of a plain parameter.
            with outside_inference_mode(), torch.enable_grad():
                found = applied(GatherUnit)(self, i, PARAMETERS, *self.inputs[i])
            unit.give(found)
            if keep:
                unit.seen = found
            return found[j]

    def gather_alone(self, path: str) -> Tensor:
        """A full parameter in the stored dtype, for code outside of the model; differentiable."""
        return GatherUnit.apply(self, self.plans.alone[path], PARAMETERS, self.shown[path])[0]

    def parameters(self, i: int) -> list[Tensor]:
        """The unit's full parameters in the compute dtype, gathered now if they are not here."""
        with self.schedule.lock:
            found = self.schedule.full(i)
            if found is None:
                with self._sending():
                    found = self.schedule.unshard(i)
            return found

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        """One full parameter, for a graph that was recorded when the parameter had changed `age` times.

        Raises:
            RuntimeError: it has changed since. Autograd has no version to compare here.
        """
        with self.schedule.lock:
            if age != self.age(i, j):
                raise RuntimeError(
                    explain(
                        "backward through a graph from before the parameters were updated",
                        "under shard they are gathered again in backward, and have changed since forward",
                        "all backwards of a graph before opt.step() or a change by hand, or the forward again after it",
                    )
                )
            fulls = self.schedule.units[i].fulls
            if fulls is None:
                return self.parameters(i)[j]
            # `age` has covered writes into this parameter. Writes into its neighbours are found when those are used.
            self.schedule.use(i)
            return fulls[j]

    def lazies(self, i: int) -> list[Lazy]:
        """The unit's full parameters as tensors that are gathered when something is computed with them."""
        dtypes = self.plans.plan(i).dtypes
        metas = (
            as_complex(torch.empty(leaf.shape, dtype=dtypes[leaf.path], device="meta"), leaf) for leaf in self.units[i]
        )
        return [Lazy(self, (i, j), meta) for j, meta in enumerate(metas)]

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Full tensors, gathered from shards that are laid out like the unit's parameters."""
        if self.faces is not None:
            shards = tuple(map(self.faces.shard, self.units[i], shards))
        with self._sending():
            return self.schedule.perform(TANGENTS, i, shards)

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards, averaged over ranks and unscaled, from full ones."""
        with self._sending():
            found = self.schedule.perform(GRADIENTS, i, fulls)
        return found if self.faces is None else list(map(self.faces.gradient, self.units[i], found))

    def keep_unfrozen(self, node: Any, grads: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients of leaves that were unfrozen since the last step, until the next one."""
        found = [
            (x.path, g) for x, g in zip(self.units[node.i], grads, strict=True) if g is not None and not x.trainable
        ]
        if not found:
            return
        if reaches([leads_to for leads_to, _ in node.next_functions if leads_to is not None]) is None:
            raise RuntimeError(
                explain(
                    f"torch.autograd.grad by {found[0][0]}, unfrozen since the last step, under shard",
                    "the step after it is unfrozen makes a place for its gradient in what ranks send to each other",
                    "loss.backward() and opt.step() first; or zf.attach(model, tx, hold_frozen=True)",
                )
            )
        kept = self.unfrozen.setdefault(node.i, {})
        for path, g in found:
            kept[path] = g.detach() if path not in kept else kept[path] + g.detach()

    def reduce_unfrozen(self, paths: Collection[str]) -> None:
        """Reduce the gradients that were kept of these leaves. All ranks call it, with the same paths."""
        kept, self.unfrozen = self.unfrozen, {}
        for i, unit in enumerate(self.units):
            if any([leaf.path in paths for leaf in unit]):
                own = kept.get(i, {})
                with self._sending(), torch.no_grad():
                    found = self.schedule.perform(GRADIENTS, i, tuple([own.get(leaf.path) for leaf in unit]))
                    for leaf, g in zip(unit, found, strict=True):
                        if g is not None:
                            self.schedule.accept(leaf, g, True)

    def reduced_later(self, node: Any, grads: tuple[Tensor | None, ...]) -> bool:
        """Reduce the gradients of a node's unit while backward goes on, if nothing needs them before its end.

        Autograd needs them now where it returns them (`torch.autograd.grad`), and where a leaf has hooks, a dtype of
        its own for gradients, or was frozen after forward. A leaf that is updated in backward has a hook of ours.
        """
        nodes = next(zip(*node.next_functions, strict=True), ())
        with torch.DisableTorchFunctionSubclass():
            for p, leads_to in zip(self.inputs[node.i], nodes, strict=True):
                if has_hooks(p) or p.grad_dtype not in (None, p.dtype) or (leads_to is not None) != p.requires_grad:
                    return False
                # Of a `Face` user code may have put a hook on this node.
                if getattr(p, "node_is_known", False):
                    return False
        # A leaf that is frozen on this rank only has no node. Gradients of other ranks for it are still taken.
        wanted = reaches(nodes)
        if wanted is None:
            return False
        with self._sending():
            if not self.schedule.alone():
                # Another backward could add to the same `p.grad` in between.
                return False
            self.schedule.reduce_later(node.i, grads, wanted)
        return True

    def _sending(self) -> AbstractContextManager[Any]:
        """The context of each collective."""
        if self.left:
            raise RuntimeError(
                explain(
                    "backward through a graph from before opt.detach()",
                    "under shard backward gathers parameters again, and after detach this rank has no shards",
                    "all backwards of a graph before opt.detach(), or the forward again after it",
                )
            )
        if graph_task() not in self.schedule.unfinished:
            self.schedule.after_backward()
        return outside_inference_mode()

    @contextmanager
    def updating(self, paths: Iterable[str]) -> Iterator[None]:
        """Inside, these leaves are updated, in backward."""
        with self.schedule.updating([at for p in paths for at in (self.plans.place[p], (self.plans.alone[p], 0))]):
            yield

    def end_of_call(self) -> None:
        """Forget the tensors that a call of the model was given: from its end on they belong to its graph alone."""
        with self.schedule.lock:
            self.schedule.store_writes()
            for unit in self.schedule.live.values():
                unit.seen = None
        if not self.suspended:
            self.schedule.after_call()


BATCHED = explain(
    "torch.autograd.grad(..., is_grads_batched=True), or vectorize=True, by parameters under shard",
    "gradients are averaged over ranks in backward, for which torch.distributed has no batching rule",
    "[torch.autograd.grad(y, params, v, retain_graph=True) for v in vectors]; by inputs alone it works",
)


class GatherUnit(Function):
    """Gathers shards to full parameters, as the model sees them; its derivative is `ScatterUnit`."""

    @staticmethod
    def forward(units: Units, i: int, kind: int, *shards: Tensor | None) -> tuple[Tensor, ...]:
        if kind == PARAMETERS and i >= units.blocks:
            return tuple(units.lazies(i))
        fulls = units.parameters(i) if kind == PARAMETERS else units.tangents(i, shards)
        # `.data` makes no views, of which torch refuses to use one after a write into another.
        return tuple([full.data for full in fulls])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i, ctx.kind = inputs[:3]
        ctx.set_materialize_grads(False)
        if ctx.kind == PARAMETERS:
            # Outputs of frozen leaves are marked, so that backward computes no gradient for them. This rank would drop
            # it, and ranks that only join this backward would take it.
            trained = ctx.needs_input_grad[3:]
            ctx.mark_non_differentiable(*(x for x, needed in zip(output, trained, strict=True) if not needed))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:  # type: ignore[override]
        # Parameters have no dimension for vmap: torch asks only whether there is a rule.
        raise RuntimeError(BATCHED)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        units: Units = ctx.units
        if not all_plain(gs):
            gs = tuple([g if g is None or g.layout == torch.strided else g.to_dense() for g in gs])
            check_alone(units.units[ctx.i], gs)
        if not units.all_trained:
            units.keep_unfrozen(ctx, gs)
        # If nobody differentiates this backward, it needs no node.
        plain = untracked()
        if plain and ctx.kind == PARAMETERS and units.reduced_later(ctx, gs):
            return (None,) * (3 + len(gs))
        found = units.gradients(ctx.i, gs) if plain else ScatterUnit.apply(units, ctx.i, *gs)
        # Autograd drops the gradient of a leaf that is frozen on this rank only, so it is taken here.
        for leaf, g, needed in zip(units.units[ctx.i], found, ctx.needs_input_grad[3:], strict=True):
            if g is not None and not needed:
                late = g if units.faces is None else units.faces.shard(leaf, g)
                assert late is not None
                units.schedule.late.append((leaf, late.detach(), True))
        return None, None, None, *found


class ScatterUnit(Function):
    """Reduces cotangents of full parameters to true gradients of shards; its derivative is `GatherUnit`."""

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
        if ctx.units.faces is None:
            check_alone(ctx.units.units[ctx.i], gs)
        found = GatherUnit.apply(ctx.units, ctx.i, TANGENTS, *gs)
        # A leaf without a cotangent, such as one that the call did not use, gets no derivative.
        return None, None, *[x if needed else None for x, needed in zip(found, ctx.needs_input_grad[2:], strict=True)]


def check_alone(unit: list[Leaf], gs: tuple[Tensor | None, ...]) -> None:
    """Refuse cotangents that no collective can send: batches of `vmap`, and sparse tensors."""
    if all_plain(gs):
        return
    present = {leaf.path: g for leaf, g in zip(unit, gs, strict=True) if g is not None}
    if any(map(is_batch, present.values())):
        raise RuntimeError(BATCHED)
    check_dense(present)
