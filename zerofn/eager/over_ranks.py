"""Hooks of an attached model whose gradients leave `p.grad`: over ranks, or with updates in backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._errors import explain
from ..core.bucketed_views import uncast
from ..core.layout import Leaf
from ..core.view import Wire
from ..module.parameter_guards import label
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks
from ..sharded.units import UnitPlans, split
from .gradients import GradientHooks, MicroStep
from .resident_params import ResidentParams
from .sharded_states import as_complex_numbers, as_dtensors, as_shards, gathering_of_states
from .step_agreement import StepAgreement, WholeParameters

if TYPE_CHECKING:
    from ..module.sharded_parameter import ModelFaces


def hook(home: ResidentParams) -> None:
    """Hook parameters and modules: gradients are reduced or used as they arrive, and full parameters gathered."""
    pipe, params, channels = home.pipe, home.params, home.channels
    faces = home.faces or _faces(home)
    complexes = home.complexes()
    leaves = params if faces is None and complexes is None else home.shown
    hooks = GradientHooks(
        pipe,
        params,
        leaves,
        faces or complexes,
        channels,
        home.in_backward,
        home.stored_params.store_writes_of,
        home.undo,
    )
    home.units, blocks = _units(home, hooks.accept, faces)
    hooks.units = home.units
    if home.units is not None and home.in_backward is not None:
        home.in_backward.updating = home.units.updating
    # The reference is weak: a cycle would keep the process groups of a detached model until a garbage collection.
    home.gatherers[:] = [] if home.units is None else [weakref.ref(home.units)]
    home.hook_modules(blocks)
    limited = _limited(home)
    # Under `all_reduce` ranks would drift apart by what these embeddings write, so there it is compared too.
    equals = channels.equals or (channels.control if limited and pipe.gathering is None else None)
    if equals is not None:
        home.wholes = WholeParameters(params, equals, home.current, limited)
        if hooks.stream is not None and home.context is not None:
            hooks.stream.agreement.opening = functools.partial(home.wholes.before_backward, hooks.stream.control)
    agreement = StepAgreement(channels.control, home.wholes)
    home.gradients = ends = MicroStep(hooks, agreement, home.stored_params, home.refresh)
    asks = Asks(hooks.left, ends.gone, ends.cleared, functools.partial(_moved, home), ends.mean)
    if home.fully_sharded is not None:
        home.state_views = as_dtensors(home.fully_sharded)
        return
    by = gathering_of_states(pipe, channels.control, lambda: home.left) if faces is None else faces.by
    home.state_views = as_complex_numbers(pipe.layout) if by is None else as_shards(by)
    label(home.undo, home.model, pipe, home.shown, home.units, home.context is not None, asks, faces)


def _limited(home: ResidentParams) -> frozenset[str]:
    """The paths of weights of embeddings with `max_norm`."""
    paths = {id(p): path for path, p in home.shown.items()}
    found = [m.weight for m in home.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm]
    return frozenset([paths[id(p)] for p in found if id(p) in paths])


def _wire(home: ResidentParams) -> Wire | None:
    """The wire that gathers parameters on use, if they are sharded."""
    pipe, channels, wire = home.pipe, home.channels, home.pipe.gathering
    if wire is None or channels.wanted is None:
        return None
    return wire.on(channels.groups[pipe.groups.index(wire.group)], wire.reduce_dtype)


def _faces(home: ResidentParams) -> ModelFaces | None:
    """Put DTensors in the places of sharded parameters."""
    wire = _wire(home)
    if wire is None or home.fully_sharded is not None:
        return None
    from ..module.sharded_parameter import ModelFaces
    from ..sharded.gathering import Gathering

    # A write into the local rows of a DTensor is a write into the stored values. With a view that changes numbers it
    # is not, so these leaves are listed.
    seen = [view for view in uncast(home.pipe.road) if view.renumbers]
    other = [leaf.path for leaf in home.pipe.layout.leaves if any([view.changes(leaf) for view in seen])]
    at = home.gatherers
    by = Gathering(wire, lambda asked: _there(at).schedule.meet(asked), lambda: (of := at[0]()) is None or of.left)
    faces = ModelFaces(by, lambda path: _there(at).gather_alone(path), home.pipe.layout, home.params, other)
    faces.put(home.model, home.undo)
    home.shown, home.faces, home.lasting = faces.shown, faces, len(home.undo)
    return faces


def _there(at: list[weakref.ref[Units]]) -> Units:
    units = at[0]()
    if units is None:
        why, right = "the optimizer that gathered it is gone", "the model's own parameters, which are plain ones again"
        raise RuntimeError(explain("a sharded parameter after opt.detach()", why, right))
    return units


def _units(
    home: ResidentParams, accept: Callable[[Leaf, Tensor, bool], None], faces: ModelFaces | None
) -> tuple[Units | None, list[nn.Module]]:
    """The `Units` that gather sharded parameters on use, if they are sharded, and the modules that own them."""
    pipe, wire, wanted = home.pipe, _wire(home), home.channels.wanted
    if wire is None or wanted is None:
        return None, []
    units, blocks = split(home.model, pipe.layout.leaves, home.shown)
    plans = UnitPlans(units, pipe.road, wire, pipe.layout.leaves)
    # Units call this before an all-gather, so that leaves whose gradients wait are updated first.
    update = None if home.in_backward is None else home.in_backward.update
    how: Any = dict(update=update, shown=home.shown, faces=faces)
    return Units(plans, pipe, home.params, wanted, home.scale, accept, **how), blocks


def _moved(home: ResidentParams, path: str) -> None:
    """Store a sharded parameter in the new memory that the user has given it; the old memory is no longer used."""
    if home.units is not None and path not in home.stored_params.copies:
        # A copy's values are carried over to the tensor that is stored elsewhere.
        (leaf,) = home.units.units[home.units.plans.alone[path]]
        mine = home.params[path].detach().as_subclass(Tensor)
        home.current.state.leaves[path].data = home.pipe.road.own(mine, leaf)
        home.stored_params.written(path)
        home.lie_elsewhere()
