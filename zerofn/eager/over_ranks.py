"""Hooks of an attached model whose gradients leave `p.grad`: over ranks, or with updates in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from ..core.layout import Leaf
from ..module.parameter_guards import gathering_of, label
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks
from ..sharded.units import UnitPlans, split
from .gradients import GradientHooks, MicroStep
from .resident_params import ResidentParams
from .sharded_states import as_dtensors, as_shards, gathering_of_states
from .step_agreement import StepAgreement, WholeParameters


def hook(home: ResidentParams) -> None:
    """Hook parameters and modules: gradients are reduced or used as they arrive, and full parameters gathered."""
    pipe, params, channels = home.pipe, home.params, home.channels
    hooks = GradientHooks(pipe, params, channels, home.in_backward, home.stored_params.store_writes_of, home.undo)
    home.units, blocks = _units(home, hooks.accept)
    hooks.units = home.units
    home.hook_modules(blocks)
    if channels.equals is not None:
        home.wholes = WholeParameters(params, channels.equals, home.current)
        if hooks.stream is not None and home.context is not None:
            hooks.stream.agreement.opening = functools.partial(home.wholes.before_backward, hooks.stream.control)
    agreement = StepAgreement(channels.control, home.wholes)
    home.gradients = ends = MicroStep(hooks, agreement, home.stored_params, home.refresh)
    asks = Asks(hooks.left, ends.gone, ends.cleared, functools.partial(_moved, home))
    if home.fully_sharded is not None:
        home.state_views = as_dtensors(home.fully_sharded)
        return
    gathering = None if home.units is None else gathering_of(home.units)
    by = gathering or gathering_of_states(pipe, channels.control, lambda: home.left)
    home.state_views = None if by is None else as_shards(by)
    label(home.undo, home.model, pipe, params, gathering, home.units, home.context is not None, asks, home.forms)


def _units(home: ResidentParams, accept: Callable[[Leaf, Tensor], None]) -> tuple[Units | None, list[nn.Module]]:
    """The `Units` that gather sharded parameters on use, if they are sharded, and the modules that own them."""
    pipe, channels, wire = home.pipe, home.channels, home.pipe.gathering
    if wire is None or channels.wanted is None:
        return None, []
    wire = wire.on(channels.groups[pipe.groups.index(wire.group)], wire.reduce_dtype)
    units, blocks = split(home.model, pipe.layout.leaves, home.params)
    plans = UnitPlans(units, pipe.road, wire, pipe.layout.leaves)
    # An update in backward takes the gradient that is there.
    alone = home.in_backward is not None
    return Units(plans, pipe, home.params, channels.wanted, home.scale, accept, sums_by_themselves=alone), blocks


def _moved(home: ResidentParams, path: str) -> None:
    """Store a sharded parameter in the new memory that the user has given it; the old memory is no longer used."""
    if home.units is not None and path not in home.stored_params.copies:
        # A copy's values are carried over to the tensor that is stored elsewhere.
        (leaf,) = home.units.units[home.units.plans.alone[path]]
        mine = home.params[path].detach().as_subclass(Tensor)
        home.current.state.leaves[path].data = home.pipe.road.own(mine, leaf)
        home.lie_elsewhere()
