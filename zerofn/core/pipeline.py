"""`Pipeline`: a chain resolved for a tree of parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from ..ranks.group import Group
from ..ranks.process_groups import group_for
from .bucketed_views import Road, at_model, check_axes, groups_of, on_ranks
from .chain import as_transform, replace_innermost
from .context import Context, Norms, OneProcess, Prepared, Reduction, check_prepared
from .counts import apart, whole
from .executor import GRAD_NORM, Stretch, stretches
from .facts import OF_PIECES, Scope
from .forms import Form, elsewhere
from .guest import complete
from .halves import joins
from .layout import Layout, Leaf, Leaves, Placement, canonical
from .number_graphs import check_numbers
from .returned_values import COMPARED, CheckedUpdate, Comparing, own_prepared, own_start
from .spec import Station
from .state import State, check_replaced, counter
from .survey import (
    NEEDED,
    at_views,
    check_complete,
    check_cut_views,
    check_factor,
    check_pieces,
    check_reading,
    check_views,
    hand_to_owners,
    keeping_form,
    survey,
)
from .transform import Transform, TransformState, no_state, nothing_to_prepare, number_tensors, pass_through
from .tree import check_state, tree_map
from .view import WIRE, Dtypes, Factor, IncompleteWire, LeafView, Ranks, View, Wire, cutting_wires, place_in

# ----------------------------------------------------------------------------------------------------------------------
# A `Pipeline` is a chain resolved for one tree of parameters: its views and its update halves for them.
#
# A parameter has three forms, and the views of a chain lie between them. *Stored* is in the state. *Resident* is in an
# attached model between steps: full under `reduce_scatter`, which all-gathers once a step, else the stored one. *Seen*
# is what the model computes with.


T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """The parts of a chain in order, resolved for a layout.

    Attributes:
        tx: the chain as it was given.
        layout: the layout of the parameters.
        parts: the members of the chain; a guest that ends it is made the optimizer.
        views: the view half of each part; `None` if it has no effect on leaves.
        dtypes: of parameters and gradients.
        factors: the factors of cotangents inside the model: by name of a transform, a function of its state.
        stations: the `Spec` of gradients in front of each part and behind it.
        road: the views between the model and storage.
        model: the groups of several ranks over which the model itself is sharded. The chain does not know of them.
        named: the meshes that transforms have named, `None` for all ranks, each with its group.
        checked: whether every step makes the checks that otherwise only the first few make.
        looked_at: empty until a step has looked for graphs in what functions return.
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
    named: tuple[tuple[Any, Group], ...] = ()
    checked: bool = False
    looked_at: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    _made: dict[Callable[[Pipeline], Any], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, make: Callable[[Pipeline], T]) -> T:
        """`make(self)`, computed once; `make` is a function at the top of a module."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def with_cached_properties(self) -> Pipeline:
        """This pipeline, with all cached properties computed: computing one takes a lock, which no graph can have."""
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
        """The same pipeline, whose views call `state_of(name)` for their transform's state whenever they run."""
        if not self.reads:
            return self
        views = tuple([v if v is None else v.reading(partial(state_of, v.name)) for v in self.views])
        road = replace(self.road, stages=tuple([view for view in views if view is not None]))
        return replace(self, views=views, road=road)

    @cached_property
    def stages(self) -> tuple[View, ...]:
        """The views that have an effect, from the model to storage."""
        return self.road.stages

    @cached_property
    def sharding(self) -> Wire | None:
        """The wire that shards stored leaves, the last of several; `None` if they are not sharded."""
        return next(reversed(cutting_wires(self.stages)), None)

    @cached_property
    def gathering(self) -> Wire | None:
        """The wire that shards resident parameters, which are then gathered on use; `None` if they are full."""
        return next(reversed(cutting_wires(self.road.at_use)), None)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Every group of ranks over which gradients are reduced."""
        return groups_of(self.stages)

    @cached_property
    def step_groups(self) -> tuple[Group, ...]:
        """Every group of ranks that must step together, also those over which the model itself is sharded."""
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
    def wants(self) -> dict[str, str]:
        """The numbers that a step must be given, each with the transform that wants it."""
        return wanted_by(self.parts)

    @cached_property
    def largest(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the wanted numbers that are tensors, of which transforms get the largest elements."""
        return largest_of(self.parts)

    @cached_property
    def second(self) -> Transform | None:
        """The transform that asks for a second gradient (`Facts.evaluates_at`); `None` if there is none."""
        return next((part for part in self.parts if part.facts.evaluates_at is not None), None)

    def second_point(self, grads: Leaves, state: State, ctx: Context) -> State:
        """The state with the parameters at which the second gradient is asked for; `state` is not written."""
        assert self.second is not None and self.second.facts.evaluates_at is not None
        given = {path: state.leaves[path] for path in grads}
        return replace(state, leaves={**state.leaves, **self.second.facts.evaluates_at(grads, given, ctx)})

    @cached_property
    def averaged_before_weights(self) -> tuple[Group, ...]:
        """The groups over which gradients are averaged before an accumulation gives them weights."""
        if not self.weighted:
            return ()
        return groups_of(self.road.pulled)

    @cached_property
    def leaf_views(self) -> dict[str, LeafView]:
        """By path: the view of each leaf from storage; from the resident form where the reduction is late."""
        return self.road.composed(at_model(self.road.pulled), self.dtypes.gradient)

    @cached_property
    def views_at_use(self) -> dict[str, LeafView]:
        """By path: the view of each resident parameter in an attached model."""
        return self.road.composed(at_model(self.road.at_use), self.road.resident_grad_dtype)

    @cached_property
    def updates(self) -> tuple[Transform, ...]:
        """The update halves that have something to do, in order."""
        return _updates(self)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The update halves, grouped as they are run."""
        return stretches(self.updates)

    @cached_property
    def verdicts(self) -> int | None:
        """The place of the first part that may skip a step by a number of the device; `None` if there is none."""
        return next((i for i, part in enumerate(self.parts) if part.facts.skips), None)

    @cached_property
    def keeps_verdicts(self) -> bool:
        """Whether, on a GPU, verdicts on a step stay on the device, and with them counts of what they skip.

        False if a reduction follows the verdict, since skipped steps would reduce too, and if a later transform has to
        read a number.
        """
        if self.verdicts is None or self.road.late or self.layout.placement.owners:
            return False
        return all([part.facts.capturable for part in self.updates])

    @cached_property
    def numbers(self) -> tuple[tuple[str, Tensor], ...]:
        """The tensors among the arguments of its transforms, with their names."""
        return number_tensors(self.tx)

    def unrecorded(self, right: str, weight: Any = None) -> dict[str, Any]:
        """Entries for the context of a step that is not recorded, by which it refuses numbers that require grad.

        Arguments are checked here, and rates of schedules when they are computed. Whether functions make graphs of what
        they have from elsewhere is looked at in the first step.

        Raises:
            RuntimeError: an argument or the weight requires grad; each is named. `right` is the right code.
        """
        if self.numbers or isinstance(weight, Tensor):
            check_numbers((*self.numbers, ("weight=...", weight)), right)
        return {"unrecorded": right, "looks": not self.looked_at}

    def looked(self) -> None:
        """Note that a step has looked at what functions return, and that they have made no graphs."""
        self.looked_at[:] = [True]

    def context(self, **given: Any) -> Context:
        """The context that update halves get."""
        return self.context_of_step(norms=None if given.get("recorded") else Norms(), **given)

    @cached_property
    def context_of_step(self) -> Callable[..., Context]:
        """Makes the context from what differs between steps."""
        return partial(Context, self.layout, offsets=self.road.offsets, reduction=self.reduction)

    @cached_property
    def reduction(self) -> Reduction:
        """How scalars are reduced over ranks."""
        if not self.step_groups:
            return OneProcess()
        # Only several ranks need this module.
        from ..ranks.scalar_reduction import RankReduction

        within = {leaf.path: leaf.within for leaf in self.layout.leaves if leaf.within is not None}
        elsewhere = frozenset([path for path, whole in within.items() if not whole.first])
        shared = bool(self.model) and not all([whole.cut for whole in within.values()])
        return RankReduction(self.road.cutting, self.groups, self.model, elsewhere, shared)

    def scale_of(self, transforms: dict[str, TransformState]) -> Tensor | None:
        """The current loss scale: the product of all factors."""
        found = None
        for name, factor in self.factors:
            one = factor(transforms[name])
            found = one if found is None else found * one
        return found


def first_state(pipe: Pipeline, stored: Leaves, transforms: dict[str, TransformState] | None = None) -> State:
    """The state before any step, of stored parameters (meta tensors too). Pass `transforms` if they have states."""
    own = init_transforms(pipe, stored) if transforms is None else transforms
    state = State(stored, own, counter(), counter(), pipe.layout).fitting(pipe.tx)
    return with_counters_on_device(pipe, state, pipe.verdicts) if pipe.keeps_verdicts else state


def on_one_gpu(leaves: Leaves) -> bool:
    """Whether all leaves are on one GPU: a verdict, and counts of what it skips, can be on one device alone."""
    devices = set(map(attrgetter("device"), leaves.values()))
    return len(devices) == 1 and devices.pop().type == "cuda"


def with_counters_on_device(pipe: Pipeline, state: State, first: int | None = None) -> State:
    """The same state with counters where the parameters are, if on one GPU.

    Args:
        pipe: its pipeline.
        state: the state.
        first: the place of the first part whose counters, and those of parts behind it, are moved; by default all are,
            and micro-steps are counted there.

    Raises:
        ValueError: all are to be moved, and parameters are on several devices.
    """
    if not on_one_gpu(state.leaves):
        others = [(path, f"on {x.device}") for path, x in state.leaves.items()]
        if first is None and any([x.is_cuda for x in state.leaves.values()]):
            right = "all parameters on one GPU, or no capturable=True"
            raise ValueError(bad_leaves("capturable=True of parameters on several devices", others, right))
        return state
    device = next(iter(state.leaves.values())).device
    own = dict(state.transforms)
    for part in pipe.parts[first or 0 :]:
        if part.name in own:
            constant = set(part.facts.constant)
            own[part.name] = {key: _moved(x, device, constant, key) for key, x in own[part.name].items()}
    micro_step = state.micro_step.to(device) if first is None else state.micro_step
    return replace(state, transforms=own, step=state.step.to(device), micro_step=micro_step).fitting(state._fits)


def _moved(x: Any, device: torch.device, constant: Set[str], name: str) -> Any:
    """Tensors of a state, on a device; those named as constant and counters of leaves that are one tensor stay so."""
    if name in constant:
        return x
    if isinstance(x, dict):
        together = whole(x.values()) if all(isinstance(y, Tensor) for y in x.values()) else None
        if together is not None:
            return dict(zip(x, apart(_moved(together, device, constant, name)), strict=True))
        return {key: _moved(y, device, constant, f"{name}/{key}") for key, y in x.items()}
    return tree_map(lambda y: y.to(device) if isinstance(y, Tensor) and y.is_cpu else y, x)


def _check_shards(pipe: Pipeline, stored: Leaves, states: dict[str, TransformState]) -> None:
    """Refuse first states of shards whose tensors neither have the shards' shapes nor are numbers.

    Nothing would say whether such a tensor differs between ranks, or is the same on all.
    """
    if not pipe.road.cutting and not pipe.model:
        return
    from .state_entries import entries

    wrong = [
        (e.key, f"of shape {tuple(e.value.shape)}, of a shard of shape {tuple(stored[e.path].shape)}")
        for e in entries(State(stored, states, counter(), counter(), pipe.layout))
        if e.of_part
    ]
    if wrong:
        right = (
            "tensors of the shape of the leaf that init is handed, such as torch.zeros_like(p), or 0-d ones;\n"
            'Facts(fixed=("slot",)) of a Transform, for a slot whose tensors are equal on all ranks;\n'
            'needs="leaf", by which each leaf is updated whole, at one rank'
        )
        raise ValueError(bad_leaves("a first state in other shapes than the shards of its leaves", wrong, right))


def init_transforms(pipe: Pipeline, stored: Leaves) -> dict[str, TransformState]:
    """The first state of each transform, by name, for stored parameters (meta tensors too)."""
    states = {part.name: _first_of(pipe, part, stored) for part in pipe.parts}
    for name, factor in pipe.factors:
        check_factor(name, factor, states[name])
    if pipe.reads:
        check_reading(pipe.parts, pipe.views, pipe.stations, pipe.layout, states)
    _check_shards(pipe, stored, states)
    return states


def _first_of(pipe: Pipeline, part: Transform, stored: Leaves) -> TransformState:
    """The first state of one transform. Sums have the dtype and shape of the gradients that are added to them."""
    if not (part.facts.holds or part.facts.owes):
        return part.init_fn({path: stored[path] for path in pipe.layout.trained}, pipe.layout)
    sums = {leaf.path: _like_gradient(pipe, leaf, stored[leaf.path]) for leaf in pipe.layout.trainable}
    return part.init_fn(sums, pipe.layout)


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
            # The transpose of the view runs once for each window, before the part's own update half.
            late = partial(pipe.road.reduced_late, view)
            kept.append(replace(part, scope=Scope.WHOLE, prepare_fn=nothing_to_prepare, update_fn=late))
        if not part.idle:
            kept.append(part)
    if not any(["grad_norm" in p.facts.reported(pipe.layout, pipe.layout.every) for p in kept]):
        at = next(i for i, p in enumerate(kept) if p.facts.optimizes or p.facts.directs)
        kept.insert(at, GRAD_NORM)
    return tuple(kept)


# ----------------------------------------------------------------------------------------------------------------------
# `check_signatures` refuses a transform whose functions do not take the positional arguments that they are called
# with.


def check_signatures(t: Transform) -> None:
    """Raise if a function of a transform cannot be called with the arguments that it will get.

    Raises:
        TypeError: names the transform, the function and its arguments.
    """
    called = (
        ("init_fn", t.init_fn, "leaves, layout"),
        ("prepare_fn", t.prepare_fn, "state, grads, params, ctx"),
        ("update_fn", t.update_fn, "grads, state, params, carry, ctx"),
        ("view_fn", t.view_fn, "layout, ranks"),
    )
    for name, fn, given in called:
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            continue  # a C function has no signature to check
        try:
            signature.bind(*given.split(", "))
        except TypeError as error:
            why = f"it is called with ({given}): {error}"
            raise TypeError(explain(f"{t.name}: {name}{signature}", why, f"def {name}({given}): ...")) from None


# ----------------------------------------------------------------------------------------------------------------------
# These functions refuse chains that cannot run where the model itself is sharded (tensor parallelism).
#
# The chain does not know of that sharding.


TOGETHER = "zf.partition of the chain, by which parameters that are cut get an optimizer with needs='element'"


def with_model_ranks(placement: Placement, model: Sequence[Group]) -> Placement:
    """The same placement, for a state that also lies over the ranks over which the model itself is sharded."""
    if not model:
        return placement
    return replace(
        placement,
        together=placement.together * prod([group.size for group in model]),
        axes=(*placement.axes, *[group.ranks for group in model]),
        unreduced=placement.unreduced and with_model_ranks(placement.unreduced, model),
    )


def check_model_axes(reduced: Sequence[tuple[str, Group]], model: Sequence[Group]) -> None:
    """Refuse a reduction over ranks among which the model itself is cut; `reduced` as for `check_axes`."""
    for (name, group), other in product(reduced, model):
        both = sorted(set(other.ranks) & set(group.ranks))
        if len(both) > 1:
            raise ValueError(
                explain(
                    f"chain(..., {name}, ...) over ranks {sorted(group.ranks)} of a model whose parameters "
                    f"are DTensors over ranks {sorted(other.ranks)}",
                    f"ranks {both} have different parts of one parameter, and a mean of different parts has no meaning",
                    "mesh = init_device_mesh(device, (replicas, parts), mesh_dim_names=('dp', 'tp'))\n"
                    f"         parallelize_module(model, mesh['tp'], plan); zf.{name}(mesh['dp'])",
                )
            )


def check_model_parts(parts: Sequence[Transform], layout: Layout, where: str, attached: bool) -> None:
    """Refuse transforms that must see more of a leaf than this rank has, and states that belong to an attached model.

    Args:
        parts: of a chain.
        layout: the layout of the parameters.
        where: the function that asks, for messages.
        attached: whether the ranks over which the model is cut are known.
    """
    within = {leaf.path: leaf.within for leaf in layout.leaves if leaf.within is not None}
    if within and not attached:
        why = "its parameters are parts of DTensors, and functions of a state do not know over which ranks these lie"
        right = "what the attached model has: opt.step(), model.state_dict(), zf.save(directory, opt)"
        raise ValueError(explain(f"{where} with the state of a model that is itself cut over ranks", why, right))
    cut = {path: whole for path, whole in within.items() if whole.cut}
    bad: list[tuple[str, str]] = []

    def look(t: Transform, paths: Set[str], place: str) -> Transform:
        for leaf in layout.trainable:
            if t.needs not in OF_PIECES and leaf.path in paths & cut.keys():
                share = f"this rank has {tuple(leaf.shape)} of {tuple(cut[leaf.path].shape)}"
                bad.append((leaf.path, f"{t.name} needs {NEEDED[t.needs]} (needs={t.needs!r}), and {share}"))
        return t

    for part in parts:
        if cut and part.needs not in OF_PIECES:
            replace_innermost(part, look, layout)
    if bad:
        raise ValueError(bad_leaves(f"{where}: the model itself is cut over ranks", bad, TOGETHER))


BESIDE_COMPLEX = (
    'zf.partition({"complex": zf.adamw(lr=1e-3), "rest": ...}, labels=lambda path: ...), by which complex leaves\n'
    "         get a transform of elements, such as adamw, sgd, lion; or a real parameter p of a last dimension of 2,\n"
    "         and torch.view_as_complex(p) in forward, for a transform that is to see it as it is stored"
)


def check_complex(parts: Sequence[Transform], layout: Layout, where: str) -> None:
    """Refuse transforms that see rows or whole leaves of complex parameters, of which they would see pairs of numbers.

    Raises:
        ValueError: every such leaf is named.
    """
    dtypes = {leaf.path: leaf.dtype.to_complex() for leaf in layout.complexes if leaf.trainable}
    bad: list[tuple[str, str]] = []

    def look(t: Transform, paths: Set[str], place: str) -> Transform:
        for path in [path for path in dtypes if t.needs not in OF_PIECES and path in paths]:
            why = "which of a complex parameter are of real and imaginary parts"
            bad.append((path, f"{dtypes[path]}, and {t.name} needs {NEEDED[t.needs]} (needs={t.needs!r}), {why}"))
        return t

    for part in parts:
        replace_innermost(part, look, layout)
    if bad:
        raise ValueError(
            bad_leaves(f"{where}: a transform that has no meaning for complex numbers", bad, BESIDE_COMPLEX)
        )


# ----------------------------------------------------------------------------------------------------------------------
# `pipeline` resolves a chain for a tree of parameters: it finds which views have an effect, and how leaves lie over
# ranks.


def pipeline(
    tx: Transform,
    layout: Layout,
    where: str,
    ranks: Ranks = group_for,
    model: tuple[Group, ...] = (),
    checked: bool = False,
) -> Pipeline:
    """Resolve a transform for a layout.

    Args:
        tx: the transform.
        layout: the layout of the parameters.
        where: the public function that was called, for messages.
        ranks: opens groups of ranks.
        model: the groups over which the model itself is cut.
        checked: whether every step makes the checks that else the first few make.

    Raises:
        ValueError: it cannot train these parameters.
    """
    named: list[tuple[Any, Group]] = []

    def opened(function: str, mesh: Any) -> Group:
        named.append((mesh, ranks(function, mesh)))
        return named[-1][1]

    tx = as_transform(tx)
    parts = complete(tx.members)
    check_complete(parts, where)
    guarded = partial(_guarded, checked=checked)
    parts = tuple([replace_innermost(part, guarded, layout) for part in parts])
    if wanted := wanted_by(parts):
        from .given_numbers import with_sums_of_given

        held = partial(with_sums_of_given, wanted.keys(), largest_of(parts))
        parts = tuple([replace_innermost(p, held, layout) for p in parts])
    found = [_resolved(part, layout, opened) for part in parts]
    parts = tuple([_sending(part, view, layout, checked) for part, view in zip(parts, found, strict=True)])
    for around in [view.around for view in found if view is not None and view.around is not None]:
        parts = tuple([replace_innermost(part, partial(_within, around), layout) for part in parts])
    check_views(found, layout)
    talking = frozenset([view.name for view in found if view is not None and view.wire is not None])
    factors = tuple([(view.name, view.factor) for view in found if view is not None and view.factor is not None])
    found = [view if view is not None and view.of_leaves else None for view in found]
    dtypes = next((view.dtypes for view in found if view is not None and view.dtypes is not None), Dtypes())
    parts = tuple([replace_innermost(part, partial(_as_wide, dtypes), layout) for part in parts])
    views, cutting = _over_ranks(found, dtypes)
    fixed = tuple([(part.name, slot) for part in parts for slot in _fixed_slots(part, layout)])
    stages = tuple([view for view in views if view is not None])
    reduced = [(view.name, view.wire.group) for view in stages if view.wire is not None]
    check_axes(reduced)
    check_model_axes(reduced, model)
    check_model_parts(parts, layout, where, bool(model))
    if layout.complexes:
        check_complex(parts, layout, where)
    model = tuple([group for group in model if group.size > 1])
    scaled_by = tuple([name for name, _ in factors])
    stations = survey(layout.leaves, parts, views, dtypes, scaled_by, talking)
    check_cut_views(parts, views, stations, layout)
    road = Road(layout.leaves, stages, dtypes, _held(parts, views), at_views(stations, views))
    _check_second(parts, road)
    _check_owing(parts)
    placement = with_model_ranks(_placement(road, parts), model)
    # A transform that contains others needs as much as any of them.
    if cutting and any([part.needs not in OF_PIECES for part in parts]):
        parts, placement = _with_owners(parts, layout, placement, cutting)
        hand_to_owners(stations, placement)
        check_pieces(parts, stations, where)
    placement = replace(placement, fixed=fixed if cutting or model else ())
    layout = canonical(replace(layout, placement=placement))
    return Pipeline(tx, layout, parts, views, dtypes, factors, stations, road, model, tuple(named), checked)


def _sending(part: Transform, view: View | None, layout: Layout, checked: bool) -> Transform:
    """The transform with the update half of its view, if that has one."""
    if view is None or view.update is None:
        return part
    return guard(replace(part, update_fn=view.update), len(layout.leaves), checked)


def _within(around: Callable[..., Transform], t: Transform, paths: Set[str], where: str) -> Transform:
    """A transform as `View.around` has it."""
    return around(t, paths)


def _check_second(parts: Sequence[Transform], road: Road) -> None:
    """Refuse chains that would not evaluate a second gradient, or would evaluate it at other points on other ranks."""
    asking = [part.name for part in parts if part.facts.evaluates_at is not None]
    inside = [repr(part) for part in parts if any(map(_asks_inside, part.parts))]
    if inside:
        why = "the second gradient is taken for all parameters at once, at a point that all gradients determine"
        raise ValueError(explain(inside[0], why, "zf.chain(..., zf.sam(), ...), as a member of the chain itself"))
    if len(asking) > 1:
        why = "both ask for a second gradient, and each would get the one of the other"
        raise ValueError(explain(f"chain(..., {', ..., '.join(asking)}, ...)", why, "one of the two"))
    if asking and road.late:
        why = "accumulate comes before the reduction, so each rank would move by its own unreduced gradient"
        right = f"chain(reduce_scatter(), {asking[0]}(), accumulate(4), ...), or shard() in front"
        raise ValueError(explain(f"chain(accumulate(4), reduce_scatter(), ..., {asking[0]}(), ...)", why, right))


def _check_owing(parts: Sequence[Transform]) -> None:
    """Refuse a transform that adds to gradients before their reduction, if they are reduced during backward."""
    for i, part in enumerate(parts):
        if part.facts.owes and not any(before.facts.holds for before in parts[:i]):
            why = f"{part.name} adds to unreduced gradients, and here backward reduces them"
            raise ValueError(explain(f"chain({part!r}, ...)", why, f"chain(accumulate(2), {part!r}, ...)"))


def _asks_inside(t: Transform) -> bool:
    return t.facts.evaluates_at is not None or any(map(_asks_inside, t.parts))


def largest_of(parts: Sequence[Transform]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of which these transforms want the largest elements."""
    found: dict[str, tuple[int, ...]] = {}
    for part in parts:
        found = {**largest_of(part.parts), **dict(part.facts.wants_largest), **found}
    return found


def wanted_by(parts: Sequence[Transform]) -> dict[str, str]:
    """By name, the numbers that a step must be given for these transforms, each with the one that wants it."""
    found: dict[str, str] = {}
    for part in parts:
        names = (*part.facts.wants, *dict(part.facts.wants_largest))
        # A wrapper has the name of what it wraps, and takes over its facts.
        name = part.name if part.factory is None else part.factory.__name__
        found = {**dict.fromkeys(names, name), **wanted_by(part.parts), **found}
    return found


def _guarded(t: Transform, paths: Set[str], where: str, checked: bool = False) -> Transform:
    """The same transform with checks and copies of the tensors that it returns or keeps."""
    check_signatures(t)
    return guard(t, len(paths), checked)


def guard(t: Transform, leaves: int, checked: bool) -> Transform:
    """The same transform, whose functions raise where they return what does not fit its leaves.

    What it returns is copied where it shares memory with tensors that a later transform writes, unless
    `Facts(keeps=False)` says that it never does.

    Args:
        t: the transform.
        leaves: how many it is handed in a step.
        checked: whether addresses are compared in every step.
    """
    keeps = t.facts.keeps
    # Twice as many calls are compared: a step may call `prepare_fn` once more, only to see whether it raises.
    prepares = Comparing(math.inf if checked else 2 * COMPARED)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        made = [check_state(t.name, t.init_fn(leaves, layout), leaves, layout.every)]
        return own_start(made) if keeps else made[0]

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        found = check_prepared(t.name, t.prepare_fn(state, grads, params, ctx))
        own = own_prepared(found, state, grads, params, ctx, prepares.numbers(ctx, 1))
        if own is not found:
            prepares.copied()
        return own

    # A group of optimizers may leave out the leaves that it does not train.
    some = t.facts.optimizes and t.members_fn is not None
    budget = math.inf if checked else COMPARED * max(leaves, 1)
    update = CheckedUpdate(t.name, t.facts, t.update_fn, some, keeps and not joins(t.update_fn), budget)
    # The executor knows functions that do nothing by identity, and does not run them. So they are not wrapped.
    return replace(
        t,
        init_fn=init if t.init_fn is not no_state else t.init_fn,
        prepare_fn=prepare if keeps and t.prepare_fn is not nothing_to_prepare else t.prepare_fn,
        update_fn=t.update_fn if t.update_fn is pass_through else update,
    )


def _as_wide(dtypes: Dtypes, t: Transform, paths: Set[str], where: str) -> Transform:
    """The same transform, whose first state is made from leaves in the dtype of gradients, if its facts say so."""
    if not t.facts.starts_wide or t.init_fn is no_state:
        return t

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        wide = {
            leaf.path: torch.promote_types(leaves[leaf.path].dtype, dtypes.gradient(leaf))
            for leaf in layout.leaves
            if leaf.path in leaves
        }
        return t.init_fn({path: x.to(wide[path]) for path, x in leaves.items()}, layout)

    return replace(t, init_fn=init)


def _resolved(part: Transform, layout: Layout, ranks: Ranks) -> View | None:
    """The view half of a transform, with its name. Its functions skip the leaves for which `changes` is false.

    `changes` is called here, once, because each step needs to know these leaves.
    """
    try:
        view = part.view_fn(layout, ranks)
    except IncompleteWire as error:
        wrong = f"{part.name}: over_ranks({error.kind}(...), ...)"
        why = f"a wire has {', '.join(WIRE)}; {error.kind} has no {', '.join(error.missing)}"
        right = "all of them, as zerofn.extend.Wire says; docs/extend/wire.md has one of each"
        raise TypeError(explain(wrong, why, right)) from None
    if view is None:
        return None
    if not isinstance(view, View):
        why = "a view_fn returns a zerofn.extend.View, or None"
        right = "view_fn=lambda layout, ranks: View(view=..., pull=...)"
        raise TypeError(explain(f"{part.name}: a view_fn that gives {kind_of(view)}", why, right))
    touched = frozenset([leaf.path for leaf in layout.leaves if view.changes(leaf)])
    view = keeping_form(view, part.name)
    if len(touched) < len(layout.leaves):
        view = view.only_on(touched)
    return replace(view, name=part.name, changes=lambda leaf: leaf.path in touched)


def _over_ranks(views: Sequence[View | None], dtypes: Dtypes) -> tuple[tuple[View | None, ...], tuple[Wire, ...]]:
    """The views, and the wires that shard leaves, one after the other.

    Views over one rank become `None`. The others sum in the dtype of reductions, and shard the shards of earlier ones.
    """
    found: list[View | None] = []
    cutting: tuple[Wire, ...] = ()
    for view in views:
        if view is not None and view.wire is not None:
            several = view.wire.group.size > 1
            view = on_ranks(view, cutting, dtypes.reduce_dtype) if several else None
            if view is not None and view.wire is not None and view.wire.cuts:
                cutting = (*cutting, view.wire)
        found.append(view)
    return tuple(found), cutting


def _held(parts: Sequence[Transform], views: Sequence[View | None]) -> tuple[str, ...]:
    """The transforms, by name, that accumulate gradients in front of the first view of `Road.after_update`."""
    first = next((i for i, view in enumerate(views) if view is not None and view.resident), 0)
    return tuple([part.name for part in parts[:first] if part.facts.holds])


def _fixed_slots(part: Transform, layout: Layout) -> list[str]:
    """The slots in the state of a transform, and of those inside of it, that `Facts.fixed` declares."""
    found: list[str] = []

    def note(t: Transform, paths: Set[str], where: str) -> Transform:
        found.extend([where + slot for slot in t.facts.fixed])
        if t.members_fn is None:
            return t
        # `replace_innermost` does not look into a group with an update half of its own.
        for key, (member, own) in t.members_by_key(layout.only(paths)).items():
            found.extend([f"{where}{key}/{slot}" for slot in _fixed_slots(member, layout.only(own))])
        return t

    replace_innermost(part, note, layout)
    return found


def _with_owners(
    parts: tuple[Transform, ...], layout: Layout, placement: Placement, cutting: tuple[Wire, ...]
) -> tuple[tuple[Transform, ...], Placement]:
    """The chain with transforms that need whole leaves run at owners, and the placement with those owners."""
    from .owners import run_at_owners

    found = [run_at_owners(part, layout, cutting) for part in parts]
    named = [(part.name, where, ranks) for part, owners_at in found for where, ranks in owners_at.items()]
    owners = tuple([(name, where, tuple(ranks.items())) for name, where, ranks in named])
    return tuple([part for part, _ in found]), replace(placement, owners=owners)


def _placement(road: Road, parts: Sequence[Transform]) -> Placement:
    """How stored leaves lie over ranks, and gradient sums that are not yet reduced."""
    seen_by = tuple([view.name for view in road.stages if view.renumbers])
    placement = replace(_behind(road, len(road.stages)), seen_by=seen_by)
    if not road.late:
        return placement
    copy, copies = place_in([view.wire for view in road.after_update if view.wire is not None])
    unreduced = _behind(road, len(road.at_use))
    apart = (*road.held, *[part.name for part in parts if part.facts.owes])
    return replace(placement, apart=apart, copy=copy, copies=copies, unreduced=unreduced)


def _behind(road: Road, stages: int) -> Placement:
    """How leaves lie over ranks behind so many stages."""
    groups = groups_of(road.stages[:stages])
    rank, size = place_in(cutting_wires(road.stages[:stages]))
    found = Placement(rank, size, math.prod([group.size for group in groups]), tuple([group.ranks for group in groups]))
    if size == 1:
        return found
    usual = {shape: found.span(shape) for shape in {leaf.shape for leaf in road.leaves}}
    spans = [(leaf, road.specs[stages][leaf.path].range) for leaf in road.leaves]
    return replace(found, ranges=tuple([(leaf.path, own) for leaf, own in spans if own != usual[leaf.shape]]))


# ----------------------------------------------------------------------------------------------------------------------
# `check_fits` refuses a state whose tensors have other shapes, dtypes or devices than those which the chain makes.
#
# Each state is compared once, where it comes in. One that `init` or a step of this very chain has made is not compared.


def _form(pipe: Pipeline) -> Form:
    specs = pipe.road.specs[-1]
    leaves = {
        leaf.path: torch.empty(pipe.road.stored_shape(leaf), dtype=specs[leaf.path].stored_dtype, device="meta")
        for leaf in pipe.layout.leaves
    }
    return Form.of(
        {"": lambda: {"params": leaves}, **{p.name: partial(_first_of, pipe, p, leaves) for p in pipe.parts}}
    )


def check_fits(pipe: Pipeline, state: State, where: str, stacked: bool = True) -> None:
    """Refuse a state of another form than the pipeline makes; mark it if it has that form.

    Args:
        pipe: the pipeline.
        state: the state.
        where: the call, for the message.
        stacked: whether it may be several states one upon the other, of which each tensor has one more dimension.

    Raises:
        ValueError: entries are missing or unexpected, or of another shape, dtype or device; all are named by path.
    """
    if state._fits is pipe.tx or torch.compiler.is_compiling():
        return
    lead = tuple(getattr(state.step, "shape", ())) if stacked else ()
    grown = {part.name for part in pipe.parts if _of_guest(part)}
    found = {"": {"params": state.leaves}, **state.arriving}
    rows = pipe.once(_form).misfits(found, pipe.layout.every, lead, grown.__contains__)
    for name, x in (("step", state.step), ("micro_step", state.micro_step)):
        if not isinstance(x, Tensor) or tuple(x.shape) != lead or x.dtype != torch.int64:
            rows.append((name, f"is {x!r} instead of a count"))
    rows = rows or elsewhere(state.arriving, state.leaves)
    if rows:
        right = "a state of zf.init(tx, params), or of a step, with this very tx and these parameters"
        raise ValueError(bad_leaves(f"{where}: the state was made by another pipeline", rows, right))
    if state._replaced:
        check_replaced(pipe.tx)
    if not lead:
        state.fitting(pipe.tx)


def _of_guest(part: Transform) -> bool:
    """Whether another library has made the transform, or one inside of it, which may make entries as it goes on."""
    return part.facts.adds or any(map(_of_guest, part.parts))


# ----------------------------------------------------------------------------------------------------------------------
# `resolve_for` resolves the pipeline for a state that a user passes. `context_of` gives its context to analysis tools.


def resolve_for(tx: Transform, state: Any, where: str, stacked: bool = True) -> Pipeline:
    """Resolve a pipeline for the parameters of a state. One that another pipeline has made is refused.

    Args:
        tx: the chain.
        state: what the user has passed as a state.
        where: the call, for messages.
        stacked: as for `check_fits`.
    """
    if not isinstance(state, State):
        raise TypeError(
            explain(f"{where} got a {type(state).__name__}", "it is not a state", "state = zf.init(tx, params)")
        )
    state.check_usable(where)
    pipe = pipeline(tx, state.layout, where)
    names = [p.name for p in pipe.parts]
    if list(state.transforms) != names:
        raise ValueError(
            explain(
                f"{where} with a pipeline of {names} and a state of {list(state.transforms)}",
                "the state was made by another pipeline",
                "state = zf.init(tx, params) with this very tx",
            )
        )
    mine, theirs = pipe.layout.placement, state.layout.placement
    if (mine.rank, mine.size) != (theirs.rank, theirs.size):
        wrong = f"{where} on rank {mine.rank} of {mine.size}, of a state that has the shards of rank {theirs.rank} of "
        why = "each rank has its own shards, and a file of torch.save has the shards of one rank"
        right = "torch.save(state, f'{rank}.pt') on each rank, and torch.load of its own on as many;\n"
        right += "zf.save(directory, state) and zf.load(directory, like=zf.init(tx, params)) for any number of ranks"
        raise ValueError(explain(f"{wrong}{theirs.size}", why, right))
    check_fits(pipe, state, where, stacked)
    return pipe


def context_of(tx: Transform, state: Any, where: str) -> Context:
    """Make the `Context` of an update half, for a function of a chain and a state such as a tool of analysis.

    Its `layout` has the leaves. Its `offsets` say where this rank's shard of a leaf begins; a leaf that is not there
    begins at 0. Its `reduction` adds numbers up over the ranks.

    Args:
        tx: the pipeline.
        state: the pipeline's state, from `zf.init` or `opt.state`.
        where: what the user has called, for errors.

    Raises:
        TypeError: `state` is not a `State`.
        ValueError: another pipeline, or another number of ranks, has made it.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.sgd(0.1), {"w": torch.tensor([3.0, 4.0])})
        >>> ctx = context_of(zf.sgd(0.1), state, "squares")
        >>> ctx.offsets.get("w", 0), ctx.reduction.sum((state.leaves["w"] ** 2).sum())
        (0, tensor(25.))
    """
    return resolve_for(tx, state, where).context()
