"""The parameters of an attached model: stored form, resident form, and what goes between them.

On one process the parameters of the model are the stored ones. Under `reduce_scatter` and `all_reduce` the
model keeps full parameters, whose gradients are reduced during backward, and which are gathered
again after an update. Under `shard` its parameters are flat shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._interrupts import interrupts_held
from ..core.pipeline import Pipeline, first_state
from ..core.rank_agreement import agree_on_start
from ..core.state import State
from ..core.update_context import Context
from ..module.attach_checks import check_memory
from ..module.boundary import ModelBoundary, take_back
from ..module.buffer_dtypes import cast_buffers, dtypes_of_buffers
from ..module.forward_hooks import install, needs_boundary
from ..module.parameter_guards import gathering_of, label
from ..module.seen_state_dict import hook_seen_state_dicts
from ..ranks.dtensor_parameters import Form
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks
from ..sharded.unit_assignment import split
from ..sharded.unit_plans import UnitPlans
from .channels import open_channels
from .current_state import CurrentState
from .existing_gradients import ExistingGradients, first_states
from .gradient_hooks import GradientHooks
from .in_backward import InBackward
from .manual_writes import WholeParameters
from .master_weights import MasterWeights
from .micro_step import MicroStep
from .resident_form import put, to_resident
from .sharded_state_views import ShardedStateViews, gathering_of_states
from .step_agreement import StepAgreement
from .temporary_parameters import full_parameters

_DATA, _DTYPE = attrgetter("data"), attrgetter("dtype")
# From a pipeline and parameters by path, on which ranks then agree: what gives them their resident form, and returns
# the stored ones.
Start = Callable[[Pipeline, dict[str, Tensor]], Callable[[], dict[str, Tensor]]]


def from_values(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A `Start` of parameters that have their first values: each rank takes its part of them."""
    check_memory(params)
    agree_on_start(pipe, params, "zf.attach(model, tx)")

    def settle() -> dict[str, Tensor]:
        before = dict(zip(params, map(_DATA, params.values()), strict=True))
        try:
            return {leaf.path: to_resident(pipe, leaf, params[leaf.path]) for leaf in pipe.layout.leaves}
        except BaseException:
            for path, x in before.items():
                put(pipe, params[path], x, "zf.attach failed")
            raise

    return settle


class ResidentParams:
    """The parameters of one attached model, its state, and the hooks on both. The model is changed by `settle`.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path, each once.
        context: of a step, where the update is to run within backward.
        unchanged: raises if the model is no longer what was attached.
        start: where their first values come from.
        forms: by path, what distributed tensors the model itself has made of them.

    Attributes:
        current: the state in force.
        is_full: whether full parameters are in the places of shards or copies, within `gathered`.
        units: gathers sharded parameters on use; `None` where they are not sharded.
        undo: takes off what was put on the model; the last one first.
        stored: parameters as they are stored at first; none before that.
        hooked, left: whether the model is attached to the end, and whether it has begun to be a plain one again.
    """

    def __init__(
        self,
        model: nn.Module,
        pipe: Pipeline,
        params: dict[str, Tensor],
        context: Callable[[], Context] | None,
        unchanged: Callable[[], None],
        start: Start,
        forms: Mapping[str, Form],
    ):
        self.context, self.unchanged, self.start, self.forms = context, unchanged, start, forms
        self.current, self.is_full = CurrentState(), False
        # Views that read a state change with a held step, too.
        self.unread, self.reads, pipe = pipe, pipe.reads, pipe.reading(self.current.of_transform)
        self.model, self.pipe, self.params = model, pipe, params
        # Before parameters are changed: it refuses pipelines that cannot run in backward.
        self.in_backward = None if context is None else InBackward(pipe, self.current, context)
        self.buffers = dtypes_of_buffers(model, pipe.dtypes)
        # With the views that read a state as they are: there is none yet.
        self.make = start(self.unread, params)
        self.channels = open_channels(pipe)
        # By path: the dtype that gradients were to have, where it was not the parameter's own.
        self.grad_dtypes = {path: p.grad_dtype for path, p in params.items() if p.grad_dtype != p.dtype}
        self.dtypes = dict(zip(params, map(_DTYPE, params.values()), strict=True))
        self.undo: list[Callable[[], object]] = []
        self.stored: dict[str, Tensor] = {}
        self.hooked, self.left, self.units = False, False, None
        self.existing = ExistingGradients(pipe, params)

    def settle(self) -> None:
        """Give parameters their resident form, make the first state, and hook the model. `leaving` takes it back."""
        pipe = self.pipe
        self.existing.take()
        self.stored = self.make()
        states = first_states(pipe, self.stored, self.channels.control, self.existing)
        self.current.state = first_state(pipe, self.stored, states)
        with _unfrozen([self.params[path] for path in pipe.layout.trained]):
            self._hook()
        self.hooked = True
        self.existing.grads.clear()
        self.stored = {}

    def _hook(self) -> None:
        model, pipe, params, channels = self.model, self.pipe, self.params, self.channels
        context, forms = self.context, self.forms
        self.masters = MasterWeights(pipe, params, self.current)
        carry = self.masters.carry_leaf
        self.gradient_hooks = hooks = GradientHooks(pipe, params, channels, self.in_backward, carry, self.undo)
        # Buffers before modules are hooked, which look at the dtypes of their buffers.
        cast_buffers(model, self.buffers, self.undo)
        self.units, blocks = _units(self)
        hooks.units = self.units
        self.boundary: ModelBoundary | None = None
        if forms or needs_boundary(pipe):
            self.boundary = ModelBoundary(pipe, self.scale, self.units, model, self.unchanged, forms)
            self.undo.append(functools.partial(take_back, self.boundary.undo))
            install(model, self.boundary, {id(p): path for path, p in params.items()}, blocks)
            hook_seen_state_dicts(model, self.boundary, params, self.undo)
        self.wholes = None if channels.equals is None else WholeParameters(params, channels.equals, self.current)
        if self.wholes is not None and hooks.stream is not None and context is not None:
            hooks.stream.agreement.opening = functools.partial(self.wholes.before_backward, hooks.stream.control)
        agreement = StepAgreement(channels.control, self.wholes)
        self.micro_step = ends = MicroStep(hooks, agreement, self.masters, self.refresh)
        asks = Asks(hooks.left, hooks.gone, ends.cleared, ends.uncleared.missed, self._moved)
        gathering = None if self.units is None else gathering_of(self.units)
        by = gathering or gathering_of_states(pipe, channels.control, lambda: self.left)
        self.state_views = ShardedStateViews(by)
        label(self.undo, model, pipe, params, gathering, self.units, context is not None, asks, forms)
        if not pipe.road.exact:
            # What the model keeps is what is stored, seen; where that loses something it is not what was attached.
            self.refresh()

    def scale(self) -> Tensor | None:
        """The loss scale in force."""
        return self.pipe.scale_of(self.current.state.transforms)

    def settled(self) -> State:
        """The state, once what was written by hand and what a backward has updated is in it."""
        with interrupts_held():
            self.masters.carry_over()
            if self.in_backward is not None:
                self.in_backward.settle()
        return self.current.state

    def _moved(self, path: str) -> None:
        """A sharded parameter has other memory: it is stored there from now on, and who kept the old one has that."""
        if self.units is not None and path not in self.masters.copies:
            # What is stored elsewhere than in parameters is carried over.
            (leaf,) = self.units.units[self.units.plans.alone[path]]
            mine = self.params[path].detach().as_subclass(Tensor)
            self.current.state.leaves[path].data = self.pipe.road.own(mine, leaf)

    def refresh(self) -> None:
        """Make the model's parameters from the stored ones."""
        if self.in_backward is not None:
            # Of a step under way when a state was loaded nothing is left in what is stored.
            self.in_backward.forget()
        if self.units is not None:
            self.units.gathered.renew()
        if self.masters.buckets:
            self.masters.refresh()
            if self.wholes is not None:
                self.wholes.note()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Full parameters in the model. What is written to them inside is stored afterwards, by an exception too."""
        if self.is_full:
            # Within another one, which stores what is written.
            yield
            return
        if self.units is None and self.pipe.road.exact:
            try:
                yield
            finally:
                self.masters.carry_over()
            return
        written: set[str] = set()
        try:
            with _suspended(self), full_parameters(self.pipe, self.params, self.current) as written:
                yield
        finally:
            if written:
                self._refresh_whole()

    def _refresh_whole(self) -> None:
        """Refresh what was stored by hand; of an interrupt copies are behind it."""
        try:
            self.refresh()
        except BaseException:
            self.current.tear()
            raise


def _units(home: ResidentParams) -> tuple[Units | None, list[nn.Module]]:
    """What gathers sharded parameters on use, if it is to be, and the modules that they are parameters of."""
    pipe, channels, wire = home.pipe, home.channels, home.pipe.gathering
    if wire is None or channels.wanted is None:
        return None, []
    wire = wire.on(channels.groups[pipe.groups.index(wire.group)], wire.reduce_dtype)
    units, blocks = split(home.model, pipe.layout.leaves, home.params)
    plans = UnitPlans(units, pipe.road, wire, pipe.layout.leaves)
    return Units(plans, pipe, home.params, channels.wanted, home.scale, home.gradient_hooks.accept), blocks


@contextmanager
def _unfrozen(params: list[Tensor]) -> Iterator[None]:
    """Inside, parameters require grad: torch hooks no others, and those that are frozen now may be unfrozen later."""
    with torch.DisableTorchFunctionSubclass():
        frozen = [p for p in params if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
    try:
        yield
    finally:
        with torch.DisableTorchFunctionSubclass():
            for p in frozen:
                p.requires_grad_(False)


@contextmanager
def _suspended(home: ResidentParams) -> Iterator[None]:
    """Inside, the model computes with its parameters as they are: nothing is gathered or cast on use."""
    # What was written into copies before is seen inside, and not lost at the end.
    home.masters.carry_over()
    views: list[Any] = [
        x for x in (home.units, None if home.boundary is None else home.boundary.views) if x is not None
    ]
    for x in views:
        x.suspended = True
    home.is_full = True
    try:
        yield
    finally:
        home.is_full = False
        for x in views:
            x.suspended = False
        if home.units is not None:
            home.units.gathered.drop()
