"""Where an attached model's parameters live: the stored form, the resident form, and the way between them.

On one process the parameters of the model are the stored ones. Under `reduce_scatter` and `all_reduce` the
model keeps full parameters, whose gradients are streamed during backward, and which are gathered
again after an update. Under `shard` its parameters are flat shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..core.pipeline import Pipeline, first_state
from ..core.rank_agreement import agree_on_start
from ..core.state import State
from ..core.transform import TransformState
from ..core.update_context import Context
from ..module.attach_checks import check_memory
from ..module.boundary import Sight
from ..module.buffer_dtypes import cast_buffers, dtypes_of_buffers
from ..module.forward_hooks import install, needs_sight
from ..module.parameter_guards import gathering_of, label
from ..ranks.dtensor_parameters import Form
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks
from ..sharded.unit_assignment import split
from ..sharded.unit_plans import UnitPlans
from .channels import open_channels
from .existing_gradients import Earlier
from .gathered import full_for_a_while
from .gradient_hooks import Arrivals
from .in_backward import InBackward
from .initial_state import first_states
from .manual_writes import Wholes
from .master_weights import Copies
from .micro_step import MicroStep
from .refresh_params import Anew
from .resident_form import make_whole, move_out, settle_in
from .sharded_state_views import ShownStates
from .step_agreement import MARKS, Agreement

# From a pipeline and parameters by path, on which ranks then agree: what gives them their resident form, and returns
# the stored ones.
Start = Callable[[Pipeline, dict[str, Tensor]], Callable[[], dict[str, Tensor]]]


def as_they_are(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Parameters that have their first values: each rank takes its part of them."""
    check_memory(params)
    agree_on_start(pipe, params, "zf.attach(model, tx)")
    return lambda: {leaf.path: settle_in(pipe, leaf, params[leaf.path]) for leaf in pipe.layout.leaves}


class Residence:
    """The parameters of one attached model.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path, each once.
        context: of a step, where the update is to run within backward.
        unchanged: raises if the model is no longer what was attached.
        start: where their first values come from.
        forms: by path, what distributed tensors the model itself has made of them.
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
        mine = weakref.ref(self)
        # What the model keeps of views that read a state follows a held step, too.
        self.reads, pipe = pipe.reads, pipe.reading(lambda name: _state_now(mine(), name))
        self.model, self.pipe, self.params = model, pipe, params
        buffers = dtypes_of_buffers(model, pipe.dtypes)
        settle = start(pipe, params)
        self.channels = channels = open_channels(pipe)
        # By path: the dtype that gradients were to have, where it was not the parameter's own.
        self.grad_dtypes = {path: p.grad_dtype for path, p in params.items() if p.grad_dtype != p.dtype}
        earlier = Earlier(pipe, params)
        stored = settle()
        try:
            states = first_states(pipe, stored, channels.control, earlier)
        except Exception:
            if start is as_they_are:
                # Nothing is hooked yet. One that is materialized was on the meta device, and might not fit whole.
                make_whole(pipe, params, stored, "zf.attach failed")
                move_out(pipe, params, self.grad_dtypes)
                earlier.put_back()
            raise
        self.state = first_state(pipe, stored, states)
        self.in_backward = None if context is None else InBackward(pipe, lambda: self.state, context)
        carry = lambda leaf: self.copies.carry_leaf(leaf)  # noqa: E731
        self.arrivals = Arrivals(pipe, params, channels, MARKS, self.in_backward, carry)
        # Before modules are hooked, which look at the dtypes of their buffers.
        self.undo: list[Callable[[], Any]] = [*self.arrivals.undo, cast_buffers(model, buffers)]
        self.units, blocks = _units(self)
        self.arrivals.units = self.units
        self.sight: Sight | None = None
        if forms or needs_sight(pipe):
            self.sight = Sight(pipe, self.scale, self.units, model, unchanged, forms)
            self.undo.append(install(model, self.sight, {id(p): path for path, p in params.items()}, blocks))
        self.anew = Anew(pipe, params)
        self.copies = Copies(pipe, params, lambda: self.state.leaves, context is None)
        self.wholes = Wholes(params, channels.equals if context is None else None)
        now = lambda: self.state  # noqa: E731
        agreement = Agreement(channels.control, self.wholes, now)
        self.micro_step = MicroStep(pipe, self.arrivals, agreement, self.copies, now, self._gave_up)
        ends = self.micro_step
        asks = Asks(self.arrivals.left, self.arrivals.gone, ends.cleared, ends.uncleared.missed, self._moved)
        gathering = None if self.units is None else gathering_of(self.units)
        self.shown_states = ShownStates(gathering)
        self.undo += label(model, pipe, params, gathering, self.units, self.in_backward is not None, asks, forms)
        if not pipe.road.exact:
            # What the model keeps is what is stored, seen; where that loses something it is not what was attached.
            self.refresh()

    def scale(self) -> Tensor | None:
        """The loss scale in force."""
        return self.pipe.scale_of(self.state.transforms)

    def settled(self) -> State:
        """The state, once what was written by hand and what a backward has updated is in it."""
        self.copies.carry_over()
        if self.in_backward is not None:
            self.in_backward.settle()
        return self.state

    def _moved(self, path: str) -> None:
        """A sharded parameter has other memory: it is stored there from now on, and who kept the old one has that."""
        if self.units is not None and path not in self.copies.copies:
            # What is stored elsewhere than in parameters is carried over.
            (leaf,) = self.units.units[self.units.plans.alone[path]]
            mine = self.params[path].detach().as_subclass(Tensor)
            self.state.leaves[path].data = self.pipe.road.own(mine, leaf)

    def refresh(self) -> None:
        """Resident parameters from the stored ones."""
        if self.in_backward is not None:
            # Of a step under way when a state was loaded nothing is left in what is stored.
            self.in_backward.forget()
        if self.units is not None:
            self.units.gathered.renew()
        if self.anew.buckets:
            self.anew.make(self.state.leaves)
            self.copies.note()
            self.wholes.note()

    def _gave_up(self, state: State) -> None:
        self.state = state
        self.refresh()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters in the model. What is written to them inside is stored afterwards."""
        if self.units is None and self.pipe.road.exact:
            yield self.model
            self.copies.carry_over()
            return
        with self._suspended(), full_for_a_while(self.pipe, self.params, lambda: self.state.leaves) as written:
            yield self.model
        if written:
            self.refresh()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """The model's parameters are what it sees, inside."""
        seers: list[Any] = [x for x in (self.units, None if self.sight is None else self.sight.views) if x is not None]
        for x in seers:
            x.suspended = True
        try:
            yield
        finally:
            for x in seers:
                x.suspended = False
            if self.units is not None:
                self.units.gathered.drop()

    def leave(self) -> None:
        """Full parameters and no hooks: a plain model. Nothing of it is on its way between ranks."""
        self.copies.carry_over()
        if self.arrivals.stream is not None:
            self.micro_step.forget(always=True)
        if self.units is not None:
            # A gather that was begun for nobody ends before its channel is closed.
            self.units.gathered.drop()
            self.units.suspended = self.units.left = True
        make_whole(self.pipe, self.params, self.state.leaves, "opt.detach()")
        for action in reversed(self.undo):
            action()
        self.undo.clear()
        move_out(self.pipe, self.params, self.grad_dtypes)


def _units(home: Residence) -> tuple[Units | None, list[nn.Module]]:
    """What gathers sharded parameters on use, if it is to be, and the modules that they are parameters of."""
    pipe, channels, wire = home.pipe, home.channels, home.pipe.gathering
    if wire is None or channels.wanted is None:
        return None, []
    wire = wire.on(channels.groups[pipe.groups.index(wire.group)], wire.reduce_dtype)
    units, blocks = split(home.model, pipe.layout.leaves, home.params)
    plans = UnitPlans(units, pipe.road, wire, pipe.layout.leaves)
    takes, ended = home.arrivals.accept, home.arrivals.release
    return Units(plans, pipe, home.params, channels.wanted, home.scale, takes, ended), blocks


def _state_now(home: Residence | None, name: str) -> TransformState:
    """What a view that reads its transform's state is given: what it is when a leaf is seen."""
    assert home is not None
    return home.state.transforms[name]
