"""The parameters of an attached model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._compat.autograd import grad_mode_kept
from .._compat.tensors import read_grad, write_grad
from .._errors import bad_leaves, explain
from .._interrupts import interrupts_held, take_back
from ..core import rank_agreement
from ..core.context import Context
from ..core.layout import Leaves
from ..core.pipeline import Pipeline, first_state
from ..core.rank_agreement import agree_on_chain, agree_on_start, check_finite
from ..core.state import State, averages_of
from ..core.transform import TransformState
from ..module.attach_checks import cast_buffers, check_memory, dtypes_of_buffers, needs_boundary
from ..module.complex_parameters import ComplexParameters
from ..module.sparse_gradients import make_gradients_dense
from ..ranks.group import Group
from .channels import open_channels
from .current_state import CurrentState
from .stored_parameters import StoredParameters, put, to_resident

if TYPE_CHECKING:
    from ..module.boundary import ModelBoundary
    from ..module.fully_sharded import FullySharded
    from ..module.sharded_parameter import ModelFaces
    from ..sharded.gather_on_use import Units
    from .in_backward import InBackward
    from .sharded_states import StateViews
    from .step_agreement import WholeParameters

# ----------------------------------------------------------------------------------------------------------------------
# `opt.gathered()` and `opt.averaged()` put other values in the place of the parameters for a while.


@contextmanager
def full_parameters(
    pipe: Pipeline,
    params: Leaves,
    current: CurrentState,
    shown: Leaves,
    faces: ModelFaces | None,
    took: Callable[[str, Tensor], object],
) -> Iterator[set[str]]:
    """Put full parameters in the place of shards or copies, and store those that have changed at the end.

    An exception stores them too, as on unsharded parameters, and as FSDP and DeepSpeed do.

    Args:
        pipe: the pipeline of the model.
        params: its parameters by path.
        current: the current state.
        shown: by path, the parameters that the model has.
        faces: those of them that are DTensors.
        took: called with the path of a stored leaf, and which of its elements have changed.

    Yields:
        The paths that were stored, once it has ended.
    """
    # Imported here: one process without shards does not load the folder.
    from ..sharded.opaque import plain

    parts = {path: plain(p.data) for path, p in params.items()}
    with grad_mode_kept():
        stored = current.state.leaves
        # What is not sharded is the stored tensor itself. A write must not go there unnoticed.
        fulls = {
            p: x.clone() if x.data_ptr() == stored[p].data_ptr() else x for p, x in pipe.road.whole(stored).items()
        }
    # Views that lose information cannot be inverted, so a parameter that nobody wrote into keeps its stored value.
    before = None if pipe.road.exact else {path: full.clone() for path, full in fulls.items()}
    grads = {path: read_grad(p) for path, p in shown.items()}
    written: set[str] = set()
    made: list[str] = []
    inside = False
    try:
        with grad_mode_kept():
            for path, full in fulls.items():
                put(pipe, params[path], full, None)
            if faces is not None:
                faces.show_wholes()
        inside = True
        yield written
    finally:
        with interrupts_held():
            try:
                if inside:
                    written |= _store(pipe, params, current.state.leaves, before, took)
            except BaseException:
                current.tear()
                raise
            finally:
                for path, p in params.items():
                    put(pipe, p, parts[path], "the end of opt.gathered()")
                if faces is not None:
                    faces.show_rows()
                made = [] if pipe.gathering is None else _drop_gradients(shown, grads)
    _check_gradients(made)


def _drop_gradients(params: Leaves, before: Mapping[str, Tensor | None]) -> list[str]:
    """Drop gradients that were computed inside: they are full and of this rank alone. Return their paths."""
    made = [path for path, p in params.items() if (g := read_grad(p)) is not None and g is not before[path]]
    for path in made:
        write_grad(params[path], None)
    return made


def _check_gradients(made: list[str]) -> None:
    """Raise for gradients that were computed inside."""
    if made:
        raise RuntimeError(
            explain(
                f"with opt.gathered(): ... .backward(), which gave {made[0]} a gradient",
                "inside parameters are full, and a step takes each rank's shard of the mean over ranks",
                "the backward outside of it; torch.autograd.grad(loss, parameters) inside; opt.zero_grad() at its end",
            )
        )


@torch.no_grad()
def _store(
    pipe: Pipeline,
    params: Leaves,
    stored: Leaves,
    before: Leaves | None,
    took: Callable[[str, Tensor], object],
) -> set[str]:
    """Store full parameters that have changed. Return the paths whose stored values differ now."""
    written = set()
    for leaf in pipe.layout.leaves:
        if before is not None and torch.equal(before[leaf.path], params[leaf.path]):
            continue
        mine, home = pipe.road.store(params[leaf.path].detach(), leaf), stored[leaf.path]
        changed = mine != home
        if changed.any():
            written.add(leaf.path)
            home.copy_(mine)
            took(leaf.path, changed)
    return written


class AveragedParameters:
    """Puts averages in the place of an attached model's parameters.

    Args:
        current: the current state.
        refresh: writes the stored values into the model's parameters.

    Attributes:
        on: whether parameters are averages now.
    """

    def __init__(self, current: CurrentState, refresh: Callable[[], None]):
        self.current, self.refresh, self.on = current, refresh, False

    @contextmanager
    def during(self, state: State, of: str | None) -> Iterator[None]:
        """Write averages over the stored parameters, and write the parameters back at the end."""
        with self.replaced(state, averages_of(state, of, "opt.averaged({})")):
            yield

    @contextmanager
    def replaced(self, state: State, values: Leaves) -> Iterator[None]:
        """Write these over the stored parameters, and write the parameters back at the end."""
        kept = {path: state.leaves[path].clone() for path in values}
        try:
            with interrupts_held():
                self.on = True
                _write(state, values)
                self.refresh()
            yield
        finally:
            try:
                self._end(state, kept)
            except BaseException:
                if self.on:
                    # A signal came before `interrupts_held` was entered.
                    self._end(state, kept)
                raise

    def _end(self, state: State, kept: Leaves) -> None:
        with interrupts_held():
            try:
                self._put_back(state, kept)
            finally:
                self.on = False

    def _put_back(self, state: State, kept: Leaves) -> None:
        """Write parameters back. An interrupt leaves them stored, and the model may have other values."""
        try:
            _write(state, kept)
            self.refresh()
        except BaseException:
            self.current.tear()
            _write(state, kept)
            raise

    def refuse(self, what: str) -> None:
        """Raise for a call that would take averages for parameters."""
        if self.on:
            why = "inside of it the parameters are averages, and not the values that are trained"
            raise RuntimeError(explain(f"{what} inside of `with opt.averaged():`", why, f"{what} behind it"))


@torch.no_grad()
def _write(state: State, leaves: Leaves) -> None:
    for path, x in leaves.items():
        state.leaves[path].copy_(x)


# ----------------------------------------------------------------------------------------------------------------------
# `attach` makes first states on all ranks or on none.


def refuse_gradients(params: Leaves) -> None:
    """Refuse gradients from before `attach`, where parameters become shards: they would be whole beside shards."""
    if bad := [
        (path, "has a gradient of the whole parameter") for path, p in params.items() if read_grad(p) is not None
    ]:
        wrong = "zf.attach(model, tx) of parameters with gradients, which become shards"
        right = "model.zero_grad() before zf.attach, and the backward behind it"
        raise ValueError(bad_leaves(wrong, bad, right))


def first_states(pipe: Pipeline, stored: Leaves, control: Group | None) -> dict[str, TransformState]:
    """The first states of all transforms, by name.

    Ranks exchange one message, so that after an error on one rank no other rank keeps an attached model.

    Raises:
        Exception: what a transform raised on this rank.
        RuntimeError: on the others.
    """

    def tell(failed: bool) -> list[int]:
        if control is None:
            return []
        from ..ranks.collectives import gather_numbers

        rows = gather_numbers([int(failed)], control)
        return [rank for rank, (other,) in zip(control.ranks, rows, strict=True) if other]

    return rank_agreement.first_states(pipe, stored, tell, "zf.attach(model, tx)")


# ----------------------------------------------------------------------------------------------------------------------
# `OwnGradients` takes the gradients from `p.grad`, where they stay until a step.


class OwnGradients:
    """The gradients of one attached model on one process, where they are neither reduced nor used in backward.

    Args:
        pipe: its pipeline.
        params: its parameters by path.
        stored_params: the stored form of parameters that are copies.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, stored_params: StoredParameters):
        self.pipe, self.stored_params = pipe, stored_params
        # Where parameters are DTensors, or complex, these convert their gradients.
        self.faces: ModelFaces | ComplexParameters | None = None
        self.trainable = {leaf.path: params[leaf.path] for leaf in pipe.layout.trainable}

    def grads(self) -> Leaves:
        """This rank's gradients in `p.grad`, flat if they are shards."""
        with torch.DisableTorchFunctionSubclass():
            found = dict(zip(self.trainable, map(read_grad, self.trainable.values()), strict=True))
        # Nearly always each leaf has a gradient, which C functions find.
        if NoneType in map(type, found.values()):
            found = {p: g for p, g in found.items() if g is not None}
        return found if self.faces is None else self.faces.mine_of(found)

    def collect(self, boundary: bool | None, given: str) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: the argument of `set_boundary` for this step, the same on all ranks.
            given: the settings of `opt.param_groups` as text, the same on all ranks.
        """
        self.stored_params.store_writes()
        return self.grads()

    # The next methods concern gradients that have left `p.grad`. Here none have, so they do nothing.

    def go_on_from(self, before: OwnGradients) -> None:
        """Take over gradients of this micro-step: the model is hooked anew."""

    def bring_unfrozen(self, paths: Collection[str]) -> None:
        """Bring the gradients of these leaves, which are trained from now on, to `p.grad`. All ranks call it."""

    def used(self) -> None:
        """A step has used the gradients that it was given."""

    def accumulated(self) -> None:
        """The gradients in `p.grad` are cleared: a sum has them, or they were used and are dropped."""

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step."""

    def give_up_backward(self) -> None:
        """Leave a backward that an exception has stopped on this rank; other ranks may still be in theirs."""

    def forget_all(self) -> None:
        """Forget the gradients of this micro-step, also those that another rank reduces."""


# ----------------------------------------------------------------------------------------------------------------------
# `ResidentParams` keeps the parameters of an attached model: their stored form, their resident form, and the views
# between the two.
#
# On one process the parameters of the model are the stored ones. Under `reduce_scatter` and `all_reduce` the model has
# full parameters. Their gradients are reduced during backward, and they are all-gathered again after an update. Under
# `shard` the model's parameters are flat shards.


_DATA, _DTYPE = attrgetter("data"), attrgetter("dtype")
# Takes a pipeline and parameters by path. Returns a function, called once ranks agree, that gives the parameters their
# resident form and returns the stored ones.
Start = Callable[[Pipeline, dict[str, Tensor]], Callable[[], dict[str, Tensor]]]


def from_rows(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A `Start` for parameters of which each rank has its shards already."""
    check_memory(params)
    check_finite(params)
    agree_on_chain(pipe, "zf.attach(model, tx)", {p.device.type for p in params.values()})
    return lambda: {path: p.detach() for path, p in params.items()}


def from_values(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A `Start` for parameters that have their first values: each rank takes its shards of them."""
    check_memory(params)
    agree_on_start(pipe, params, "zf.attach(model, tx)")

    def make_resident() -> dict[str, Tensor]:
        before = dict(zip(params, map(_DATA, params.values()), strict=True))
        try:
            return {leaf.path: to_resident(pipe, leaf, params[leaf.path]) for leaf in pipe.layout.leaves}
        except BaseException:
            for path, x in before.items():
                put(pipe, params[path], x, "zf.attach failed")
            raise

    return make_resident


class ResidentParams:
    """The parameters of one attached model, its state, and the hooks on both. The model is changed by `install`.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path, each once.
        context: returns the context of a step, for an update that runs within backward.
        unchanged: raises if the model has changed since it was attached.
        start: returns their first values.
        hook: hooks parameters and modules, and sets `gradients`.
        fully_sharded: the model, if FSDP2 gathers its parameters and reduces their gradients.
        shown: by path, the parameters that the model has, if some are complex: `params` have their parts.

    Attributes:
        shown: by path, the parameters that the model has: `params`, complex ones, or DTensors of which `params` have
            the rows.
        faces: the DTensors that are in the places of sharded parameters; `None` where there are none.
        current: the current state.
        is_full: whether full parameters are in the places of shards or copies, within `gathered`.
        gradients: brings the gradients of a step.
        units: gathers sharded parameters on use; `None` where they are not sharded.
        boundary: of the model's calls; `None` if its modules have no hooks.
        wholes: full parameters of which each rank stores a shard, if ranks compare them.
        state_views: shows shards of states in their full shapes; `None` where they are shown as they are.
        undo: functions that remove what was put on the model, called from the last to the first.
        gatherers: `units` again, as a weak reference, for those that are in the places of sharded parameters.
        lasting: how many of the first of them stay when the model is hooked anew.
        first_stored: the first stored parameters; empty before they are made.
        hooked, left: whether `attach` has come to its end, and whether `detach` has begun.
    """

    def __init__(
        self,
        model: nn.Module,
        pipe: Pipeline,
        params: dict[str, Tensor],
        context: Callable[[], Context] | None,
        unchanged: Callable[[], None],
        start: Start,
        hook: Callable[[ResidentParams], None],
        fully_sharded: FullySharded | None = None,
        shown: Leaves | None = None,
    ):
        self.fully_sharded = fully_sharded
        self.faces: ModelFaces | None = None
        self.shown: Leaves = (shown or params) if fully_sharded is None else fully_sharded.parameters
        self.context, self.unchanged, self.start = context, unchanged, start
        self.hook = hook
        self.current, self.is_full = CurrentState(), False
        # Views that read a state change with a held step, too.
        self.unread, self.reads, pipe = pipe, pipe.reads, pipe.reading(self.current.of_transform)
        self.model, self.pipe, self.params = model, pipe, params
        # This comes before parameters are changed: it refuses pipelines that cannot run in backward.
        self.in_backward = None if context is None else _in_backward(pipe, self.current, context)
        self.buffers = dtypes_of_buffers(model, pipe.dtypes)
        if pipe.gathering is not None:
            refuse_gradients(params if fully_sharded is not None else self.shown)
        # There is no state yet, so `start` gets the pipeline whose views are not bound to one.
        self.make = start(self.unread, params)
        self.channels = open_channels(pipe, gathers=fully_sharded is None)
        # By path, the `grad_dtype` that was set before, if it was not the parameter's own dtype.
        self.grad_dtypes = {path: p.grad_dtype for path, p in params.items() if p.grad_dtype != p.dtype}
        self.dtypes = dict(zip(params, map(_DTYPE, params.values()), strict=True))
        self.undo: list[Callable[[], object]] = []
        self.lasting = 0
        self.gatherers: list[weakref.ref[Units]] = []
        self.first_stored: dict[str, Tensor] = {}
        self.hooked, self.left = False, False
        self.units: Units | None = None
        self.boundary: ModelBoundary | None = None
        self.wholes: WholeParameters | None = None
        self.state_views: StateViews[Any] | None = None
        self.gradients: OwnGradients
        # Whether there is no other rank and no parameter that is a copy: a step then takes gradients as they are.
        self.alone = False
        # Whether gradients leave `p.grad` during backward to be reduced.
        self.reduces = False
        # Functions that run after a step or a load, to write the stored values into the model's parameters.
        self.refreshing: list[Callable[[], object]] = []

    def install(self) -> None:
        """Give parameters their resident form, make the first state, and hook the model. `leaving` takes it back."""
        pipe = self.pipe
        self.first_stored = self.make()
        states = first_states(pipe, self.first_stored, self.channels.control)
        self.current.state = first_state(pipe, self.first_stored, states)
        with _unfrozen(self, pipe.layout.trained):
            self._hook()
        self.hooked = True
        self.first_stored = {}

    def begin_again(self, pipe: Pipeline, state: State) -> None:
        """Hook the model anew, for a pipeline of the same chain in which more leaves are trained.

        No rank is in a collective of the model. Its parameters stay the same objects, and its process groups open.

        Args:
            pipe: the pipeline, whose views read no state.
            state: its state.
        """
        before, last = self.gradients, self.stored_params.last
        if self.units is not None:
            self.units.schedule.reshard()
            self.units.left = True
        hooks = self.undo[self.lasting :]
        del self.undo[self.lasting :]
        take_back(hooks)
        self.unread, self.pipe = pipe, pipe.reading(self.current.of_transform)
        if self.context is not None:
            self.in_backward = _in_backward(self.pipe, self.current, self.context)
        self.current.state = state
        self.refreshing, self.boundary = [], None
        with _unfrozen(self, pipe.layout.trained):
            self._hook()
        self.stored_params.last = last
        self.gradients.go_on_from(before)

    def _hook(self) -> None:
        self.stored_params = StoredParameters(self.pipe, self.params, self.current)
        if self.pipe.gathering is None:
            # Where parameters are gathered, so is the place where their gradients are made dense.
            make_gradients_dense(self.model, self.shown.values(), self.undo)
        self.hook(self)
        self.stored_params.movable &= self.fully_sharded is None
        self.alone = self.channels.control is None and not self.stored_params.watched
        self.reduces = self.channels.more is not None
        if self.in_backward is not None:
            # A loaded state has nothing of a step that was under way, so that step is forgotten.
            self.refreshing.append(self.in_backward.forget)
        if self.units is not None:
            self.refreshing.append(self.units.schedule.renew)
        if self.fully_sharded is not None:
            self.refreshing.append(self.fully_sharded.reshard)
        if self.stored_params.buckets:
            self.refreshing.append(self.stored_params.refresh)
            if self.units is not None:
                # This write is no one's from outside, which would make units that are prefetched out of date.
                self.refreshing.append(self.units.schedule.recount)
        if self.wholes is not None:
            self.refreshing.append(self.wholes.note)
        if not self.pipe.road.exact:
            # The views lose something, so the model gets the values that they make of the stored ones.
            self.refresh()
        if self.stored_params.shadows:
            self.refreshing.append(self.stored_params.note)
            self.stored_params.note()
            if self.in_backward is not None:
                self.in_backward.updated = self.stored_params.note_of

    def hook_modules(self, blocks: list[nn.Module]) -> None:
        """Cast buffers, and hook the model's modules if forward sees something else than its parameters.

        Args:
            blocks: the modules that own units.
        """
        # Buffers are cast before modules are hooked, since hooking reads their dtypes.
        cast_buffers(self.model, self.buffers, self.undo)
        if self.fully_sharded is not None or not needs_boundary(self.pipe):
            return
        from ..module.boundary import ModelBoundary
        from ..module.forward_hooks import install
        from ..module.state_dicts import hook_state_dicts

        self.boundary = ModelBoundary(self.pipe, self.scale, self.units, self.model, self.unchanged)
        self.undo.append(functools.partial(take_back, self.boundary.undo))
        install(self.model, self.boundary, {id(p): path for path, p in self.shown.items()}, blocks)
        if self.units is None:
            views = self.boundary.views
            of = self.stored_params
            hook_state_dicts(
                self.model, self.shown, self.pipe, None, lambda: views.suspended, self.undo, of.take, of.copies
            )

    def complexes(self) -> ComplexParameters | None:
        """Converts gradients of complex parameters; `None` where there are none."""
        layout = self.pipe.layout
        return ComplexParameters(layout, self.shown) if layout.complexes else None

    def lie_elsewhere(self) -> None:
        """Forget what was prepared for compiled calls: parameters have other memory from now on."""
        if self.boundary is not None and self.boundary.compiled is not None:
            self.boundary.compiled.at.clear()

    def scale(self) -> Tensor | None:
        """The current loss scale."""
        return self.pipe.scale_of(self.current.state.arriving)

    def state_now(self) -> State:
        """The state, after writes by hand and updates within backward were stored in it."""
        with interrupts_held():
            self.stored_params.take_data()
            self.stored_params.store_writes()
            if self.in_backward is not None:
                self.in_backward.wait_for_copies()
        return self.current.state

    def refresh(self) -> None:
        """Write the stored values into the model's parameters."""
        for refresh in self.refreshing:
            refresh()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the model has full parameters. Writes inside are stored afterwards, after an exception too."""
        if self.is_full:
            # It is inside of another `gathered`, which stores writes at its end.
            yield
            return
        self.stored_params.take_data()
        if self.units is None and self.pipe.road.exact and not self.stored_params.copies:
            try:
                yield
            finally:
                self.stored_params.take_data()
                self.stored_params.store_writes()
            return
        written: set[str] = set()
        try:
            took = self.stored_params.written
            whole = full_parameters(self.pipe, self.params, self.current, self.shown, self.faces, took)
            with _suspended(self), whole as written:
                yield
        finally:
            if written:
                self._refresh_whole()
            else:
                self.stored_params.note()

    def _refresh_whole(self) -> None:
        """Refresh parameters whose values were stored by hand; after an interrupt copies are older than the state."""
        try:
            self.refresh()
        except BaseException:
            self.current.tear()
            raise


def hook_one_process(home: ResidentParams) -> None:
    """Hook a model whose gradients stay in `p.grad` until a step takes them."""
    home.hook_modules([])
    home.gradients = OwnGradients(home.pipe, home.shown, home.stored_params)
    home.gradients.faces = home.complexes()
    if home.pipe.layout.complexes:
        from .sharded_states import as_complex_numbers

        home.state_views = as_complex_numbers(home.pipe.layout)


def _in_backward(pipe: Pipeline, current: CurrentState, context: Callable[[], Context]) -> InBackward:
    from .in_backward import InBackward

    return InBackward(pipe, current, context)


@contextmanager
def _unfrozen(home: ResidentParams, trained: Iterable[str]) -> Iterator[None]:
    """Inside, parameters require grad: torch hooks no others, and a frozen one may be unfrozen later."""
    with torch.DisableTorchFunctionSubclass():
        # What is kept of a leaf that the user has unfrozen may still be frozen.
        frozen = [path for path in trained if not home.shown[path].requires_grad]
        for path in trained:
            for p in (home.params[path], home.shown[path]):
                p.requires_grad_(True)
    try:
        yield
    finally:
        with torch.DisableTorchFunctionSubclass():
            for path in frozen:
                for p in (home.params[path], home.shown[path]):
                    p.requires_grad_(False)


@contextmanager
def _suspended(home: ResidentParams) -> Iterator[None]:
    """Inside, the model computes with its parameters as they are: nothing is gathered or cast on use."""
    # Earlier writes into copies are seen inside, and not lost at the end.
    home.stored_params.store_writes()
    views: list[Any] = [
        x for x in (home.units, None if home.boundary is None else home.boundary.views) if x is not None
    ]
    try:
        for x in views:
            x.suspended = True
        home.is_full = True
        yield
    finally:
        home.is_full = False
        for x in views:
            x.suspended = False
        if home.units is not None:
            home.units.schedule.reshard()
        home.lie_elsewhere()
