"""`Pipeline`: a chain resolved for one tree of parameters: its views and update halves there.

The views of a chain lie between three forms of a parameter. *Stored* is what the state keeps. *Resident* is what an
attached model holds between steps: full parameters under `reduce_scatter`, which all-gathers once a step, the stored
ones otherwise. *Seen* is what the model computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.recording import only_compiled
from ..ranks.group import Group
from ..ranks.scalar_reduction import RankReduction
from .dtypes import Dtypes
from .facts import Scope
from .grad_norm import GRAD_NORM
from .layout import Layout, Leaf, Leaves
from .linear_map import LeafView
from .metric_norms import Norms
from .number_graphs import check_numbers
from .road import Road, groups_of
from .segments import Stretch, stretches
from .spec import Station
from .state import State, counter
from .state_slots import with_slots
from .transform import Transform, TransformState, nothing_to_prepare, number_tensors
from .update_context import Context, OneProcess, Reduction
from .view_checks import check_factor, check_forms, check_reading
from .views import Factor, View, Wire, cutting_wires

T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """The parts of a chain in order, resolved for a layout.

    Attributes:
        tx: the chain as it was given.
        layout: of the parameters.
        parts: the members of the chain; a guest that ends it is made the optimizer.
        views: the view half of each part; `None` where it does nothing to leaves.
        dtypes: of parameters and gradients.
        factors: what cotangents are multiplied by inside of the model: by name of a transform, a function of its state.
        stations: what gradients are in front of each part and behind it.
        road: the views between the model and storage.
        model: the groups of several ranks over which the model itself is cut, of which the chain does not know.
    """

    tx: Transform
    layout: Layout
    parts: tuple[Transform, ...]
    views: tuple[View | None, ...]
    dtypes: Dtypes
    factors: tuple[tuple[str, Factor], ...]
    stations: tuple[Station, ...]
    road: Road
    model: tuple[Group, ...] = ()
    _begun: set[bool] = field(default_factory=set, init=False, repr=False, compare=False)
    _made: dict[Callable[[Pipeline], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, make: Callable[[Pipeline], T]) -> T:
        """`make(self)`, computed once; `make` is a function at the top of a module."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def with_cached_properties(self) -> Pipeline:
        """This pipeline, with all cached properties computed: that takes a lock, which the compiler does not know."""
        for each in (self.road, self):
            for name, value in vars(type(each)).items():
                if isinstance(value, cached_property):
                    getattr(each, name)
        return self

    @cached_property
    def reads(self) -> bool:
        """Whether a view reads the state of its transform, so that it cannot be called before `reading`."""
        return any([view.reads for view in self.stages])

    def reading(self, state_of: Callable[[str], TransformState]) -> Pipeline:
        """The same, whose views call `state_of(name)` for the state of their transform whenever they are called."""
        if not self.reads:
            return self
        views = tuple([v if v is None else v.reading(partial(state_of, v.name)) for v in self.views])
        road = replace(self.road, stages=tuple([view for view in views if view is not None]))
        return replace(self, views=views, road=road)

    @cached_property
    def stages(self) -> tuple[View, ...]:
        """The views that do something, from the model to storage."""
        return self.road.stages

    @cached_property
    def sharding(self) -> Wire | None:
        """The wire that cuts stored leaves over ranks, the last of several; `None` where they are whole."""
        return next(reversed(cutting_wires(self.stages)), None)

    @cached_property
    def gathering(self) -> Wire | None:
        """The wire that cuts resident parameters, which are then gathered on use; `None` where they are whole."""
        return next(reversed(cutting_wires(self.road.at_use)), None)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Every group of ranks that gradients are reduced over."""
        return groups_of(self.stages)

    @cached_property
    def step_groups(self) -> tuple[Group, ...]:
        """Every group of ranks that must step together: those over which the model itself is cut as well."""
        return (*self.groups, *self.model)

    @cached_property
    def traceable(self) -> bool:
        """Whether a compiler can make a graph of the collectives."""
        return all([view.traceable for view in self.stages if view.wire is not None])

    @cached_property
    def scaled(self) -> bool:
        """Whether cotangents are multiplied by a factor inside of the model."""
        return bool(self.factors)

    @cached_property
    def weighted(self) -> bool:
        """Whether micro-batches have weights."""
        return any([part.facts.weighted for part in self.parts])

    @cached_property
    def averaged_before_weights(self) -> tuple[Group, ...]:
        """The groups over which gradients are averaged before an accumulation gives them weights."""
        if not self.weighted:
            return ()
        return groups_of(self.road.pulled)

    @cached_property
    def leaf_views(self) -> dict[str, LeafView]:
        """By path: the view of each leaf from storage; from the resident form where the reduction is late."""
        return self.road.composed(self.road.pulled, self.dtypes.gradient)

    @cached_property
    def views_at_use(self) -> dict[str, LeafView]:
        """By path: the view of each resident parameter in an attached model."""
        return self.road.composed(self.road.at_use, self.road.resident_grad_dtype)

    @cached_property
    def updates(self) -> tuple[Transform, ...]:
        """The update halves that have something to do, in order."""
        return _updates(self)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The update halves, grouped as they are run."""
        return stretches(self.updates)

    @cached_property
    def numbers(self) -> tuple[tuple[str, Tensor], ...]:
        """The tensors among the arguments of its transforms, with their names."""
        return number_tensors(self.tx)

    def unrecorded(self, right: str, weight: Any = None) -> dict[str, Any]:
        """Of the context of a step that is not recorded, although autograd would: it refuses numbers that require grad.

        Arguments are looked at here, rates of schedules when they are asked for, and what functions of a user's have
        from elsewhere in the first step.

        Raises:
            RuntimeError: an argument or the weight requires grad; each is named. `right` is what to write.
        """
        if self.numbers or isinstance(weight, Tensor):
            check_numbers((*self.numbers, ("weight=...", weight)), right)
        first = not self._begun
        self._begun.add(True)
        return {"unrecorded": right, "looks": first}

    def context(self, **given: Any) -> Context:
        """The context that update halves are handed."""
        norms = Norms() if not given.get("recorded") and self._shows_norm else None
        return Context(self.layout, offsets=self.road.offsets, reduction=self.reduction, norms=norms, **given)

    @cached_property
    def _shows_norm(self) -> bool:
        """Whether the norm of gradients is a metric that no transform computes for itself."""
        return any([part is GRAD_NORM for part in self.updates])

    @cached_property
    def reduction(self) -> Reduction:
        """How scalars are reduced over ranks."""
        if not self.step_groups:
            return OneProcess()
        within = {leaf.path: leaf.within for leaf in self.layout.leaves if leaf.within is not None}
        elsewhere = frozenset([path for path, whole in within.items() if not whole.first])
        shared = bool(self.model) and not all([whole.cut for whole in within.values()])
        return RankReduction(self.road.cutting, self.groups, self.model, elsewhere, shared)

    def scale_of(self, transforms: dict[str, TransformState]) -> Tensor | None:
        """The loss scale in force: the product of all factors."""
        found = None
        for name, factor in self.factors:
            one = factor(transforms[name])
            found = one if found is None else found * one
        return found


def first_state(pipe: Pipeline, stored: Leaves, transforms: dict[str, TransformState] | None = None) -> State:
    """The state before any step, of stored parameters (meta tensors too); `transforms` if theirs are made already."""
    own = init_transforms(pipe, stored) if transforms is None else transforms
    cut = pipe.road.cutting or pipe.model
    return State(stored, own, counter(), counter(), pipe.once(_layout_of_states) if cut else pipe.layout)


def _layout_of_states(pipe: Pipeline) -> Layout:
    """The layout, which knows what of a state lies along leaves."""
    return with_slots(pipe.layout, pipe.tx.members)


def init_transforms(pipe: Pipeline, stored: Leaves) -> dict[str, TransformState]:
    """The first state of each transform, by name, for stored parameters (meta tensors too)."""
    leaves = {path: stored[path] for path in pipe.layout.trained}
    sums = {leaf.path: _like_gradient(pipe, leaf, leaves[leaf.path]) for leaf in pipe.layout.trainable}
    # Sums have the dtype of gradients, and before a late reduction also their shape.
    states = {p.name: p.init_fn(sums if p.facts.holds else leaves, pipe.layout) for p in pipe.parts}
    for name, factor in pipe.factors:
        check_factor(name, factor, states[name])
    if pipe.reads:
        check_reading(pipe.parts, pipe.views, pipe.stations, pipe.layout, pipe.dtypes, states)
    # Fused neighbours share their counters from the first step on, and to a compiler a tensor that is in two places is
    # another structure: a second graph.
    for here in pipe.stretches:
        states = here.spread(here.states(states), states)
    return states


def check_first_views(pipe: Pipeline, tensors: Leaves) -> None:
    """Raise a `ValueError` where a view does not fit its leaves, or the state that it reads, before anything is stored.

    Of a state without memory. A transform that cannot make one is looked at when its first state is there.
    """
    devices = {path: x.device for path, x in tensors.items()}
    check_forms(pipe.views, pipe.stations, pipe.layout, pipe.dtypes, devices)
    if not pipe.reads:
        return
    leaves = {
        leaf.path: torch.empty(pipe.road.stored_shape(leaf), dtype=pipe.dtypes.stored(leaf), device="meta")
        for leaf in pipe.layout.trainable
    }
    try:
        states = {p.name: p.init_fn(leaves, pipe.layout) for p in pipe.parts}
    except Exception:
        return
    check_reading(pipe.parts, pipe.views, pipe.stations, pipe.layout, pipe.dtypes, states)


def _like_gradient(pipe: Pipeline, leaf: Leaf, stored: Tensor) -> Tensor:
    """A tensor of the shape and dtype of the gradient that `zf.update` is given; `stored` itself if that has both."""
    dtype = pipe.dtypes.gradient(leaf)
    if not pipe.road.late and dtype == stored.dtype:
        return stored
    return stored.new_zeros(pipe.road.grad_shape(leaf), dtype=dtype)


def _updates(pipe: Pipeline) -> tuple[Transform, ...]:
    """The update halves, among them late reductions, and the norm that metrics show."""
    kept: list[Transform] = []
    for part, view in zip(pipe.parts, pipe.views, strict=True):
        if pipe.road.late and view is not None and view.dtypes is None and view in pipe.road.after_update:
            kept.append(_late_half(pipe, part, view))
        if not part.idle:
            kept.append(part)
    if not any(["grad_norm" in p.facts.reported(pipe.layout, pipe.layout.every) for p in kept]):
        at = next(i for i, p in enumerate(kept) if p.facts.optimizes or p.facts.directs)
        kept.insert(at, GRAD_NORM)
    return tuple(kept)


def _late_half(pipe: Pipeline, part: Transform, view: View) -> Transform:
    """The update half of a view whose transpose is applied once a window, before the part's own update half."""

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        together = not ctx.recorded or only_compiled(grads.values())
        pull = pipe.road.pull if together else pipe.road.pull_recorded
        return pull((view,), grads, params), state

    return replace(part, scope=Scope.WHOLE, prepare_fn=nothing_to_prepare, update_fn=update)
