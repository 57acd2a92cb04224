"""Parameters gathered when they are used, freed when the next are, and gathered again in backward.

A *unit* is what is gathered together: a block of the model, an element of its outermost `ModuleList` or
`Sequential`; parameters outside of any are units by module, small neighbours together. At most two are
gathered at a time.

What an operation saves for backward of a gathered parameter is not the tensor but a note of where it came from
(`saved_tensors`); backward gathers the unit again. So nothing gathered outlives its use, nothing is computed twice,
and no storage is ever resized under a tensor that somebody holds: a use after that frees memory under running
code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from .._compat import after_this_node, at_end_of_backward, eagerly, functorch_active, graph_task, in_backward, is_batch
from .._errors import explain
from ..core.gradients import check_dense
from ..core.linear_map import over
from ..core.pipeline import Pipeline
from ..core.tree import Leaf, Leaves
from ..core.views import cut
from ..ranks.group import Group
from ..ranks.join import STEP, Rounds
from .guarded_parameter import writes
from .lazy_tensor import Lazy
from .written_in_forward import Written

# Kinds of collective: parameters, sums of gradients, and cotangents of gradients (second derivatives).
PARAMETERS, GRADIENTS, TANGENTS = 1, 2, 3
ALIVE = 2
KEPT = "how much of their gradients has come since they were last cleared"
# Elements up to which parameters that stand outside of blocks, one after the other, are one unit.
SMALL = 1 << 18


class Units:
    """Gathered parameters: those of one attached model, or of one evaluation of a function.

    Args:
        units: leaves that are gathered together.
        pipe: a pipeline with a `shard`.
        params: this rank's shards by path.
        groups: one for the data and one for the exchange before each collective.
        scale: the loss scale in force.
        accept: takes the gradient of a shard that other ranks' backward brought about.
        ended: called at the end of a backward, when it has ended on all ranks.
        alone: leaves that may be asked for one by one as well, as they are stored and outside of the loss scale.
    """

    def __init__(
        self,
        units: list[list[Leaf]],
        pipe: Pipeline,
        params: Leaves,
        groups: tuple[Group, Group],
        scale: Callable[[], Tensor | None],
        accept: Callable[[Leaf, Tensor], None],
        ended: Callable[[], None] = lambda: None,
        alone: tuple[Leaf, ...] = (),
    ):
        data, control = groups
        assert pipe.sharding is not None
        self.wire = pipe.sharding.on(data, pipe.sharding.reduce_dtype)
        stages = pipe.stages[: pipe.cut]
        at = next(n for n, stage in enumerate(stages) if stage.wire is not None)
        # What parts are seen through before they are gathered, and what whole leaves are seen through after it.
        self.of_parts, self.of_wholes = stages[at + 1 :], stages[:at]
        self.pipe, self.params, self.scale, self.accept, self.ended = pipe, params, scale, accept, ended
        self.rounds = Rounds(control, self._join)
        self.units = [*units, *([leaf] for leaf in alone)]
        self.place = {leaf.path: (i, j) for i, unit in enumerate(units) for j, leaf in enumerate(unit)}
        self.blocks = len(units)
        self.alone = {leaf.path: i for i, leaf in enumerate(alone, len(units))}
        self.live: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.seen: dict[tuple, tuple[Tensor, ...]] = {}
        self.known: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.refs: dict[int, list[StorageWeakRef]] = {}
        # Backwards since the last step that have not come to their end.
        self.waiting: set[int] = set()
        self.most_alive = 0
        # Counts updates of the parameters; and by leaf, what else was written into its part.
        self.updates = 0
        self.writes = [[0] * len(unit) for unit in self.units]
        self.counts = [writes([params[leaf.path] for leaf in unit]) for unit in self.units]
        self.watch = Written(units, params, self.wire.span, pipe.exact)
        # Leaves of which other ranks may still bring a part of the gradient of this backward.
        self.partial: set[str] = set()
        # Sums of gradients since gradients were last cleared, of which every rank has its part, or has dropped it.
        self.kept = 0
        # The parameters are full ones for a while, so that they are seen as they are.
        self.suspended = False
        # The model is a plain one again.
        self.left = False

    def look(self, path: str, keep: bool) -> Tensor:
        """A gathered parameter, differentiable; with `keep` the same tensor until its unit is let go."""
        if self.suspended:
            return self.params[path].detach().to(self.pipe.dtypes.param_dtype or self.params[path].dtype)
        i, j = self.place[path]
        if functorch_active():
            return self._look_within(i)[j]
        key = (i, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        found = self.seen.get(key) if keep else None
        if found is None:
            found = GatherUnit.apply(self, i, PARAMETERS, *(self.params[leaf.path] for leaf in self.units[i]))
            self.watch.give(i, found)
            if keep:
                self.seen[key] = found
        elif i in self.live:
            self.live.move_to_end(i)
        return found[j]

    def _look_within(self, i: int) -> tuple[Tensor, ...]:
        """For a function that forward gives to torch.func.vmap or jvp: tensors of that level, of no use outside."""
        with torch.DisableTorchFunctionSubclass():
            found = GatherUnit.apply(self, i, PARAMETERS, *(self.params[leaf.path] for leaf in self.units[i]))
        self.watch.give(i)
        return found

    def look_alone(self, path: str) -> Tensor:
        """A parameter as it is stored, in full, for the world outside of the model; differentiable."""
        return GatherUnit.apply(self, self.alone[path], PARAMETERS, self.params[path])[0]

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """Of which parameter, by unit and place in it, a tensor is a view."""
        entry = self.known.get(StorageWeakRef(t.untyped_storage()).cdata)
        # An address may be used again once the storage that had it is gone.
        return None if entry is None or entry[0].expired() else entry[1:]

    def parameters(self, i: int) -> list[Tensor]:
        """The unit's full parameters in the compute dtype, from the two that are kept or gathered now."""
        if writes([self.params[leaf.path] for leaf in self.units[i]]) != self.counts[i]:
            # Somebody has written into a part between two calls, and a copy that is kept has old values.
            for j in range(len(self.units[i])):
                self.age(i, j)
        if i not in self.live:
            self.drop(ALIVE - 1)
            self.live[i] = self._perform(PARAMETERS, i, lambda: self._gather(i, self._mine(i)))
            self._note(i)
            if i < self.blocks:
                self.watch.begin(i, self.live[i])
        self.live.move_to_end(i)
        return self.live[i]

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
        return self.parameters(i)[j]

    def lazies(self, i: int) -> list[Lazy]:
        """The unit's full parameters before anything is computed with them."""
        metas = [torch.empty(leaf.shape, dtype=self._seen_dtype(i, leaf), device="meta") for leaf in self.units[i]]
        return [Lazy(self, (i, j), meta) for j, meta in enumerate(metas)]

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Gather something else of the parameters' layout."""
        return self._perform(TANGENTS, i, lambda: self._gather(i, self._filled(i, shards)))

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards: averaged over ranks, unscaled."""
        check_dense({leaf.path: g for leaf, g in zip(self.units[i], fulls, strict=True) if g is not None})
        found = self._perform(GRADIENTS, i, lambda: self._scatter(i, fulls))
        self.kept += 1
        if not self.rounds.together:
            self.partial.update(leaf.path for leaf in self.units[i])
        return found

    def drop(self, keep: int = 0) -> None:
        """Let gathered units go until `keep` are left."""
        self._look_again()
        while len(self.live) > keep:
            self._forget(next(iter(self.live)))

    def _forget(self, i: int) -> None:
        """Let a gathered unit go. What forward has written into it is stored."""
        if i not in self.live:
            return
        self._settle(i)
        views, dtypes = self.watch.leave(i), [full.dtype for full in self.live[i]]
        del self.live[i]
        for key in [k for k in self.seen if k[0] == i]:
            del self.seen[key]
        if views is not None:
            self.watch.hold(i, views, self.refs[i], dtypes)

    def _settle(self, i: int) -> None:
        """Store what forward has written into a unit's copy so far."""
        if i in self.live and self.watch.settle(i, self.live[i]):
            self._counted(i)

    def _look_again(self) -> None:
        """Store what forward has written into copies that it has and that are kept here no longer."""
        for i in self.watch.look_again():
            self._counted(i)
            self._discard(i)

    def _counted(self, i: int) -> None:
        """What we have written into the parts of a unit is no write of the user's."""
        self.counts[i] = writes([self.params[leaf.path] for leaf in self.units[i]])

    def _discard(self, i: int) -> None:
        """A unit's copy holds old values."""
        self.watch.leave(i)
        self._forget(i)

    def renew(self) -> None:
        """The parameters have changed."""
        self.watch.forget()
        self.drop()
        self.updates += 1

    def age(self, i: int, j: int) -> int:
        """How often a parameter has been updated, or written into by the user, or by the model in forward."""
        (count,) = writes([self.params[self.units[i][j].path]])
        if count != self.counts[i][j]:
            # What was borrowed may have been read alone, so that is no reason to refuse a graph.
            self.writes[i][j] += count.version != self.counts[i][j].version
            self.counts[i][j] = count
            self._discard(i)
        return self.updates + self.writes[i][j] + (self.watch.version(i, j) if i < self.blocks else 0)

    def end_of_call(self) -> None:
        """A call has ended: its tensors belong to its graph alone, and other ranks may still be in theirs."""
        self._store_written()
        self.seen.clear()
        if not in_backward() and not self.suspended:
            self.rounds.rest()
            self.watch.check()

    def _store_written(self) -> None:
        for i in list(self.live):
            self._settle(i)
        self._look_again()
        self.watch.forget()

    def _perform(self, kind: int, i: int, work: Callable[[], Any]) -> Any:
        if self.left:
            raise RuntimeError(
                explain(
                    "backward through a graph from before opt.detach()",
                    "under shard parameters are gathered again, and this rank has no parts of them any more",
                    "all backwards of a graph before opt.detach(), or the forward again after it",
                )
            )
        if in_backward():
            self.rest_after_backward()
        with lasting():
            return self.rounds.perform(kind, i, work)

    def rest_after_backward(self) -> None:
        """Stay available at the end of this backward: other ranks' may be longer."""
        if is_dynamo_compiling():
            # Collectives, and what ends a backward, are no part of a compiled one.
            return eagerly(self.rest_after_backward)

        def rest() -> None:
            self.waiting.discard(task)
            # The end of a nested backward is the middle of the outer one.
            if not after_this_node(self.rest_after_backward):
                # A checkpoint repeats what forward writes.
                self._store_written()
                self.rounds.rest()
                self.ended()
                self.watch.check()

        task = graph_task()
        if task not in self.waiting:
            self.waiting.add(task)
            at_end_of_backward(rest)

    def rest_at_step(self) -> dict[str, int]:
        """Wait for all ranks at a step; what must be equal on all of them, by name.

        A rank that has cleared gradients half-way through a micro-step of the others has dropped its parts of
        sums of which they have theirs.
        """
        agreed = self.rounds.rest(STEP, lambda: self.kept)
        self.waiting.clear()
        self.drop()
        return {KEPT: 0 if agreed else 1 + self.kept, **self.watch.marks()}

    def rest_for_unfinished(self) -> None:
        """The rest of a backward that this rank has given up: another one may still be in it.

        One that has ended has rested, and to rest once more would be to wait for something that never comes.
        """
        if self.waiting:
            self.waiting.clear()
            self.rounds.rest()

    def _join(self, kind: int, i: int) -> None:
        """Take part in a collective for other ranks."""
        nothing: tuple = (None,) * len(self.units[i])
        with lasting(), torch.no_grad():
            if kind == PARAMETERS:
                self.drop(ALIVE - 1)
                self._gather(i, self._mine(i))
            elif kind == TANGENTS:
                self._gather(i, self._filled(i, nothing))
            else:
                self.kept += 1
                for leaf, g in zip(self.units[i], self._scatter(i, nothing), strict=True):
                    if g is not None and leaf.trainable:
                        self.accept(leaf, g)

    def _mine(self, i: int) -> list[Tensor]:
        self._settle(i)
        return [self.params[leaf.path].detach() for leaf in self.units[i]]

    def _filled(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        pairs = zip(self.units[i], shards, strict=True)
        return [torch.zeros_like(self.params[leaf.path]) if x is None else x for leaf, x in pairs]

    def _seen_dtype(self, i: int, leaf: Leaf) -> torch.dtype:
        return self.pipe.dtypes.stored(leaf) if i >= self.blocks else self.pipe.dtypes.seen(leaf)

    def _buckets(self, i: int) -> list[list[Leaf]]:
        return cut(self.units[i], {leaf.path: self._seen_dtype(i, leaf) for leaf in self.units[i]}, 1 << 62)

    def _gather(self, i: int, shards: list[Tensor]) -> list[Tensor]:
        named = dict(zip((leaf.path for leaf in self.units[i]), shards, strict=True))
        out: Leaves = {}
        for bucket in self._buckets(i):
            parts = [self._seen_part(i, leaf, named[leaf.path]) for leaf in bucket]
            for leaf, full in zip(bucket, self.wire.gather(parts, bucket), strict=True):
                full = full.reshape(leaf.shape)
                for stage in reversed(self.of_wholes):
                    full = stage.view(full, leaf)
                out[leaf.path] = full
        return [out[leaf.path] for leaf in self.units[i]]

    def _seen_part(self, i: int, leaf: Leaf, part: Tensor) -> Tensor:
        """This rank's part through the views that come before it is gathered; alone, in the dtype it is stored in."""
        for stage in reversed(self.of_parts):
            part = part if stage.only_dtype and i >= self.blocks else stage.view(part, leaf)
        return part.to(self._seen_dtype(i, leaf))

    def _scatter(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        named = {leaf.path: g for leaf, g in zip(self.units[i], fulls, strict=True) if g is not None}
        out: dict[str, Tensor] = {}
        scale = self.scale() if i < self.blocks else None
        for bucket in self._buckets(i):
            dtype, numels = self.wire.reduce_dtype or self._seen_dtype(i, bucket[0]), [leaf.numel for leaf in bucket]
            for leaf in bucket:
                for stage in self.of_wholes if leaf.path in named else ():
                    named[leaf.path] = stage.pull(named[leaf.path], leaf)
            flat = [named[leaf.path].reshape(-1) if leaf.path in named else None for leaf in bucket]
            rows = self.wire.pack(flat, bucket, numels, dtype, self.params[bucket[0].path].device)
            for leaf, g in zip(bucket, self.wire.unpack(self.wire.send(rows)[1], bucket, numels), strict=True):
                if g is not None:
                    for stage in self.of_parts:
                        g = g if stage.only_dtype else stage.pull(g, leaf)
                    own = self.pipe.resident_grad_dtype(leaf)
                    out[leaf.path] = g.to(own, copy=True) if scale is None else over(g, scale, own)
        return [out.get(leaf.path) for leaf in self.units[i]]

    def _note(self, i: int) -> None:
        self.refs[i] = [StorageWeakRef(full.untyped_storage()) for full in self.live[i]]
        for j, (full, ref) in enumerate(zip(self.live[i], self.refs[i], strict=True)):
            storage = full.untyped_storage()
            if storage.nbytes():
                self.known[ref.cdata] = (ref, i, j)
        self.known = {k: entry for k, entry in self.known.items() if not entry[0].expired()}
        self.most_alive = max(self.most_alive, len({unit for _, unit, _ in self.known.values()}))


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
        return tuple(full.data for full in fulls)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i = inputs[0], inputs[1]
        ctx.set_materialize_grads(False)
        if inputs[2] == PARAMETERS:
            leaves = inputs[0].units[inputs[1]]
            ctx.mark_non_differentiable(*(x for x, leaf in zip(output, leaves, strict=True) if not leaf.trainable))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:  # type: ignore[override]
        # Parameters have no dimension for vmap: that there is a rule is all that torch wants to know.
        raise RuntimeError(BATCHED)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_unbatched(gs)
        if is_dynamo_compiling():
            return None, None, None, *eagerly(ScatterUnit.apply, ctx.units, ctx.i, *gs)
        return None, None, None, *ScatterUnit.apply(ctx.units, ctx.i, *gs)


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
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_unbatched(gs)
        return None, None, *GatherUnit.apply(ctx.units, ctx.i, TANGENTS, *gs)


def check_unbatched(gs: tuple[Tensor | None, ...]) -> None:
    """Several cotangents at once: each would be a message of its own, for which collectives have no rule."""
    if any(g is not None and is_batch(g) for g in gs):
        raise RuntimeError(BATCHED)


def lasting() -> AbstractContextManager[Any]:
    """Where tensors are made that outlive a call under `torch.inference_mode`: of its own, training can use none.

    A unit that an evaluation has gathered may be the next one that training wants, and gradients come to a
    rank that rests between two calls, whatever mode it rests in.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def split(model: nn.Module, leaves: tuple[Leaf, ...], params: Leaves) -> list[list[Leaf]]:
    """Leaves by unit, in the model's order."""
    named = {id(p): path for path, p in params.items()}
    by_path = {leaf.path: leaf for leaf in leaves}
    done: set[str] = set()
    units: list[list[Leaf]] = []
    loose: list[Leaf] = []  # the last unit, if it is no block

    def take(parameters: Any, block: bool) -> None:
        nonlocal loose
        paths = [named[id(p)] for p in parameters]
        unit = [by_path[p] for p in dict.fromkeys(paths) if p not in done]
        done.update(leaf.path for leaf in unit)
        if not unit:
            return
        if not block and loose and sum(leaf.numel for leaf in (*loose, *unit)) <= SMALL:
            loose.extend(unit)
            return
        units.append(unit)
        loose = [] if block else unit

    def visit(module: nn.Module, container: bool) -> None:
        if container:
            take(module.parameters(), True)
            return
        take(module.parameters(recurse=False), False)
        inside = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child in module.children():
            visit(child, inside)

    visit(model, False)
    return units
