"""In a compiled call of a model: parameters are gathered and cast by operations that are part of its graph.

`torch.compile(model, fullgraph=True)` of an attached model traces the hooks of its modules. There the parameters of a
block are all-gathered by a collective of the graph, and stand in the modules under their names until the block's call
ends. The transpose reduce-scatters gradients. Nothing is noted, prefetched or freed here: when a collective begins and
how long its result lives is the compiler's to choose. Without `shard` parameters are only cast, and stand in the
modules until the model's call ends: where the model is what is compiled, the end of its call is not in the graph.

There are no messages before these collectives: ranks run equal graphs, as under FSDP2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .._compat.functorch import COMPILES_REMOVALS, pytree, while_traced
from .._compat.tensors import registered
from .._errors import explain
from ..core.layout import Leaf, as_real
from ..core.pipeline import Pipeline
from ..core.view import pull
from .gather_on_use import Units
from .units import Plan, UnitPlans, pieces


class Slot(NamedTuple):
    """Where a module has a parameter, and the dtype that its kernel needs there; mostly `None`, that of `precision`."""

    module: nn.Module
    name: str
    dtype: torch.dtype | None

    def put(self, x: Tensor) -> None:
        # Python finds this attribute before the module's parameter of the same name.
        self.module.__dict__[self.name] = x if self.dtype is None or x.is_complex() else x.to(self.dtype)


class Made(NamedTuple):
    """Parameters that are made together, as forward sees them, when a module is called.

    Attributes:
        make: makes them from what is given.
        given: parameters; where they are gathered, this rank's shards, flat, and what gets their gradients.
        slots: the places of each.
    """

    make: Callable[..., Any]
    given: list[Tensor]
    slots: list[list[Slot]]


def gathered(plans: UnitPlans, unit: Sequence[Leaf]) -> Callable[..., Any]:
    """A function that returns full parameters. A compiler can trace it and its transpose.

    It takes this rank's shards, flat, and behind them as many tensors that get their gradients: a gradient may have
    another dtype than its shard, which autograd allows for no tensor in a graph.

    Args:
        plans: the views on both sides of the all-gather.
        unit: the leaves, which travel together.
    """
    plan, wire = plans.plan_of(unit), plans.model_wire
    trained = any(leaf.trainable for leaf in unit)

    def unsharded(*given: Tensor) -> tuple[Tensor, ...]:
        found: list[Any] = [None] * len(unit)
        for bucket, mine in zip(plan.buckets, plans.to_gather(plan, given), strict=True):
            for leaf, full in plans.gathered(bucket, wire.send_parts(mine, bucket)[1]):
                found[plan.place[leaf.path]] = full
        return tuple(found)

    # Each unit has its own class, since the compiler takes only tensors and constants as arguments of `apply`.
    class Unshard(Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
            return unsharded(*given)

        @staticmethod
        def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return (*[None] * len(unit), *_reduced(plans, plan, gs))

    # If nothing is recorded, the compiler of torch 2.13 would call `forward` without its first argument.
    return lambda *given: Unshard.apply(*given) if trained and torch.is_grad_enabled() else unsharded(*given)


def _reduced(plans: UnitPlans, plan: Plan, gs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """This rank's shards of the mean over ranks of full gradients, flat; `None` for leaves that are not trained."""
    wire = plans.wire
    found: dict[int, Tensor] = {}
    for leaves, numels, dtype in plan.grad_buckets:
        full = [pull(plans.full_stages, as_real(gs[plan.place[x.path]], x), x).reshape(-1) for x in leaves]
        mine = wire.send(wire.pack(full, leaves, numels, dtype, gs[0].device))[1]
        for leaf, g in zip(leaves, wire.unpack(mine, leaves, numels, [True] * len(leaves)), strict=True):
            # A graph has a gradient for every leaf.
            assert g is not None
            found[plan.place[leaf.path]] = pull(plans.pull_stages, g, leaf).to(plan.grad_dtypes[leaf.path])
    return tuple([found.get(j) for j in range(len(gs))])


def cast(dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """A function of parameters that casts them."""
    return lambda *parameters: [p.to(dtype) for p, dtype in zip(parameters, dtypes, strict=True)]


def _forward_must_not_write_into_a_parameter(x: Tensor, version: int) -> None:
    """Refuse a write of forward, which would be lost.

    The check runs while the graph is compiled, and is not in it. The compiler's error has a text of its own, which
    quotes the line that calls this function.
    """
    torch._check(x._version == version, lambda: WRITTEN)


NO_COMPLEX = explain(
    "torch.compile(model, fullgraph=True) of complex parameters under shard",
    "torch cannot trace DTensors of complex numbers on the memory of real ones",
    "zf.reduce_scatter() in place of zf.shard(); or the model without torch.compile",
)
WRITTEN = "forward wrote into a parameter in a compiled call, where it is a copy; keep what it writes in a buffer"


class CompiledCalls:
    """The work of the hooks of one attached model in compiled calls.

    A compiler is not given the model's parameters where they are gathered, which are DTensors of a class that it does
    not know, but plain tensors over the same memory. Their gradients are handed on to the parameters.

    Args:
        pipe: its pipeline.
        model: the model.
        paths: `id(parameter)` to path.
        units: gathers parameters on use; `None` where nothing is gathered.
        dtype_beside: the dtype that a module's kernel needs, if it is not that of `precision`.

    Attributes:
        open: whether a compiled call is running, or is being traced.
        ends: ids of the modules at whose calls parameters are made, which need a hook at their end.
        at: by id of a module, the parameters that are made when it is called; filled at the first compiled call.
        versions: of what was made for the calls that are running.
        prepare: fills `at`, and returns whether the compiler can trace what begins and ends calls; with `traced`, of
            the model's own call too. A compiler that comes to it runs it.
    """

    def __init__(
        self,
        pipe: Pipeline,
        model: nn.Module,
        paths: Mapping[int, str],
        units: Units | None,
        dtype_beside: Callable[[nn.Module], torch.dtype | None],
    ):
        self.pipe, self.model, self.paths, self.units, self.dtype_beside = pipe, model, paths, units, dtype_beside
        self.input_dtype, self.output_dtype = pipe.dtypes.inputs, pipe.dtypes.output_dtype
        self.open = False
        self.ends = {id(piece) for piece, _ in self._slots()}
        self.at: dict[int, Made] = {}
        self.versions: list[int] = []

        # The reference is weak: a cycle would keep a dropped model until a garbage collection.
        this = weakref.ref(self)

        def prepare(traced: bool) -> bool:
            calls = this()
            assert calls is not None
            if not calls.at:
                calls._prepare()
            if calls.units is not None and calls.pipe.layout.complexes:
                raise RuntimeError(NO_COMPLEX)
            return COMPILES_REMOVALS or not calls.at or (calls.units is None and not traced)

        self.prepare = while_traced(prepare)

    def _slots(self) -> Iterator[tuple[nn.Module, dict[str, list[Slot]]]]:
        """Each module at whose calls parameters are made, and by path the places of these parameters."""
        leaves = {leaf.path: leaf for leaf in self.pipe.layout.leaves}
        for piece, block in pieces(self.model):
            slots: dict[str, list[Slot]] = {}
            for module in piece.modules() if block else [piece]:
                for name, p in dict.items(registered(module)[0]):
                    path = self.paths.get(id(p))
                    # Complex parameters are not cast.
                    casts = path is not None and not p.is_complex() and self.pipe.dtypes.seen(leaves[path]) != p.dtype
                    if path is not None and (self.units is not None or casts):
                        slots.setdefault(path, []).append(Slot(module, name, self.dtype_beside(module)))
            if slots:
                yield piece, slots

    def _prepare(self) -> None:
        leaves = {leaf.path: leaf for leaf in self.pipe.layout.leaves}
        takers: dict[str, Tensor] = {}
        for piece, slots in self._slots():
            unit = [leaves[path] for path in slots]
            given = [dict.__getitem__(registered(slot.module)[0], slot.name) for slot, *_ in slots.values()]
            if self.units is None:
                make = cast([self.pipe.dtypes.seen(leaf) for leaf in unit])
            else:
                parameters = dict(zip(slots, given, strict=True))
                make, params = gathered(self.units.plans, unit), self.units.params
                with torch.DisableTorchFunctionSubclass():
                    given = [params[leaf.path].detach().as_subclass(Tensor) for leaf in unit]
                for leaf, shard in zip(unit, list(given), strict=True):
                    if leaf.path not in takers:
                        takers[leaf.path] = self._taker(self.units, leaf, shard, parameters[leaf.path])
                    given.append(takers[leaf.path])
            self.at[id(piece)] = Made(make, given, list(slots.values()))

    def _taker(self, units: Units, leaf: Leaf, shard: Tensor, p: Tensor) -> Tensor:
        """A tensor that gets the gradient of a shard, and hands it on to the parameter; of one element in memory."""
        zero = torch.zeros((), dtype=self.pipe.road.resident_grad_dtype(leaf), device=shard.device)
        taker = zero.expand(shard.shape).requires_grad_(leaf.trainable)
        if leaf.trainable:
            taker.register_post_accumulate_grad_hook(partial(_hand_on, units.schedule.accept, leaf, p))
        return taker

    def begins(self, traced: bool) -> bool:
        """Whether a call of the model that begins now may be one graph: not inside of `opt.gathered()`.

        Args:
            traced: whether the caller is compiled, and the hooks of the model's own call are in the graph.
        """
        self.versions.clear()
        self.open = self.prepare(traced) and (self.units is None or not self.units.suspended)
        return self.open

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a call of a module; return what the model is called with."""
        made = self.at.get(id(module))
        if made is not None:
            for x, slots in zip(made.make(*made.given), made.slots, strict=True):
                for slot in slots:
                    slot.put(x)
                    self.versions.append(slot.module.__dict__[slot.name]._version)
        if module is not self.model:
            return None
        return cast_in(args, self.input_dtype), cast_in(kwargs, self.input_dtype)

    def end(self, module: nn.Module, output: Any) -> Any:
        """End a call of a module; return what the model gives."""
        made = self.at.get(id(module))
        if made is not None:
            for slots in reversed(made.slots):
                for slot in reversed(slots):
                    x, version = slot.module.__dict__[slot.name], self.versions.pop()
                    _forward_must_not_write_into_a_parameter(x, version)
                    if self.units is not None:
                        slot.module.__dict__.pop(slot.name)
        if module is not self.model:
            return None
        if self.units is None:
            for made in self.at.values():
                for slots in made.slots:
                    for slot in slots:
                        slot.module.__dict__.pop(slot.name, None)
        self.open = False
        return cast_in(output, self.output_dtype)


def _hand_on(accept: Callable[[Leaf, Tensor, bool], None], leaf: Leaf, p: Tensor, taker: Tensor) -> None:
    g, taker.grad = taker.grad, None
    if g is not None and p.requires_grad:
        with torch.no_grad():
            accept(leaf, g, True)


def cast_in(tree: Any, dtype: torch.dtype | None) -> Any:
    """The same tree, with its floating-point tensors in this dtype."""
    if dtype is None:
        return tree
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)
