"""`Attachment` binds a model to a pipeline, from attach to detach."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import chain
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .._compat.autograd import NO_BACKWARD, graph_task
from .._compat.functorch import NO_LEVEL, forward_level, innermost_transform
from .._compat.tensors import (
    clear_grads,
    parameters_and_modules,
    read_grad,
    sharded_by_torch,
    version,
    version_of_local,
    write_grad,
)
from .._errors import bad_leaves, explain
from .._interrupts import Writing, interrupts_held, take_back
from ..core.context import Context, Norms
from ..core.layout import Layout, Leaves, make_layout, parameters_of
from ..core.number_graphs import ATTACHED, check_numbers
from ..core.pipeline import pipeline, with_counters_on_device
from ..core.rank_agreement import tell_narrow_sums, tell_unreduced
from ..core.transform import Transform
from ..core.tree import flatten
from ..core.update import apply
from ..core.wrapper_names import modules_of, names_with_wrappers
from ..kernels.recording import recorded
from ..module.attach_checks import (
    Owner,
    check_alone,
    check_complex_ways,
    check_free,
    check_hookable,
    check_initialised,
    check_not_distributed,
    check_trainable,
)
from ..module.complex_parameters import parts_of
from ..ranks.dtensor import is_distributed
from ..ranks.process_groups import lease, together
from .accumulation_window import AccumulationWindow
from .param_groups import ParamGroups, as_text
from .resident_params import AveragedParameters, ResidentParams, Start, from_rows, from_values, hook_one_process
from .stored_parameters import StoredParameters, make_whole, move_out, put

if TYPE_CHECKING:
    from ..module.fully_sharded import FullySharded
    from .in_backward import InBackward
    from .loading import LoadedStates, ToLoad
    from .state_dicts import StateDicts

# ----------------------------------------------------------------------------------------------------------------------
# These functions turn a model back into a plain one: for `opt.detach()`, and after an attach that has raised.


def leave(home: ResidentParams, steps: list[Callable[[], object]]) -> None:
    """Make the model plain: full parameters, no hooks. No collective of it is running when this is called.

    Args:
        home: of the model.
        steps: an empty list at first. After an interrupt such as Ctrl-C, the next call goes on with the steps left.
    """
    if not home.left:
        steps += _steps(home)[::-1]
        home.left = True
    take_back(steps)


def _steps(home: ResidentParams) -> list[Callable[[], object]]:
    at = home.stored_params
    # What transforms keep of parameters has no use any more.
    steps: list[Callable[[], object]] = [at.shadows.clear, at.take_data, at.store_writes]
    steps.append(home.gradients.forget_all)
    if home.units is not None:
        # A prefetched all-gather that nobody will use must end before its group is closed.
        steps.append(home.units.schedule.reshard)
    if home.fully_sharded is not None:
        return [*steps, functools.partial(take_back, home.undo)]
    whole = functools.partial(make_whole, home.pipe, home.params, home.current.state.leaves, "opt.detach()")
    out = functools.partial(move_out, home.pipe, home.params, home.grad_dtypes)
    return [*steps, functools.partial(_end_units, home), whole, functools.partial(take_back, home.undo), out]


def _end_units(home: ResidentParams) -> None:
    if home.units is not None:
        home.units.suspended = home.units.left = True


def give_up(home: ResidentParams, error: BaseException) -> None:
    """Put a model back because of an error in `attach`. A note on the error says what could not be put back.

    Full parameters are gathered if all ranks have raised, as they do when first states are made. In the rest of
    `attach` one rank may be interrupted alone, and the others would not come to a gather.
    """
    take_back(home.undo)
    if home.start is not from_values:
        # The model was on the meta device, and full parameters might not fit.
        return
    if home.hooked or home.first_stored:
        begun = home.current.begun
        if begun and home.units is not None:
            _end_units(home)
        if not begun:
            make_whole(home.unread, home.params, home.first_stored, "zf.attach failed")
        elif all(group.size == 1 for group in home.pipe.groups):
            make_whole(home.pipe, home.params, home.current.state.leaves, "zf.attach failed")
        else:
            error.add_note("zf.attach failed on this rank alone, whose parameters may be parts: make the model anew.")
        _cast_back(home, error)
        home.hooked, home.first_stored = False, {}
    move_out(home.pipe, home.params, home.grad_dtypes)


def _cast_back(home: ResidentParams, error: BaseException) -> None:
    """Cast parameters back to their old dtypes. Values that a narrower dtype has rounded are lost: no copy is kept."""
    rounded = []
    for leaf in home.pipe.layout.leaves:
        p, dtype, narrow = home.params[leaf.path], home.dtypes[leaf.path], home.pipe.dtypes.stored(leaf)
        if p.dtype != dtype:
            put(home.pipe, p, p.detach().to(dtype), "zf.attach failed")
        if torch.promote_types(narrow, dtype) != narrow:
            rounded.append(leaf.path)
    if rounded:
        names = ", ".join(rounded[:3]) + (", ..." if len(rounded) > 3 else "")
        error.add_note(f"zf.attach failed once these were stored in a narrower dtype, and are rounded to it: {names}.")


# ----------------------------------------------------------------------------------------------------------------------
# A `Watch` notices that a model has changed since it was attached.


# The attributes of a parameter that must not change, beside its address. Every step reads them of all parameters, so
# it is a C function. The device is not among them: a parameter on another device has another address.
FIXED = attrgetter("shape", "dtype", "requires_grad")
MADE_BY_TORCH = "made a DTensor by fully_shard or parallelize_module"
ATTACH_LAST = (
    "fully_shard of each block, and of the model, first (after parallelize_module), then opt = zf.attach(model, tx)\n"
    "         with a tx without shard, reduce_scatter and all_reduce: FSDP2 reduces the gradients"
)
FROZEN_AT_ATTACH = "frozen when it was attached, and a captured step does not train it; requires_grad became True"


class Watch:
    """Remembers what must not change in a model while it is attached.

    Args:
        model: the model.
        layout: its leaves.
        params: its parameters by path, in their resident form.
        shown: by path, the parameters that the model has.
        stored: the stored form of parameters.
        captured: whether steps may be captured, whose leaves stay those that had states when it was attached.

    Attributes:
        unfrozen: the paths of leaves that have no state and require grad now: the next step makes one.
        frozen: names these, and the leaves that have a state and do not require grad now; empty if there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        params: Leaves,
        shown: Leaves,
        stored: StoredParameters,
        captured: bool = False,
    ):
        self.stored, self.captured = stored, captured
        self.paths = [leaf.path for leaf in layout.leaves]
        self.held = frozenset(layout.trained)
        self.params = shown
        self.unfrozen, self.frozen = self._frozen()
        self.shown = [shown[path] for path in self.paths]
        with torch.DisableTorchFunctionSubclass():
            # The memory of a DTensor is that of its local tensor.
            self.tensors = [
                shown[p] if shown[p].is_complex() and not is_distributed(shown[p]) else params[p] for p in self.paths
            ]
            self.devices = [x.device for x in self.shown]
        # Submodules are watched too: one that is put in later would run and not be trained.
        self.modules = list(modules_of(model))
        self.all = [module for _, module in self.modules]
        self.registered = self._registered()
        self.known = self.now()

    def check(self) -> None:
        """Refuse a model that has changed: it would be trained wrongly without an error.

        Leaves may be frozen and unfrozen: autograd computes no gradient for a frozen one, and a leaf without a gradient
        keeps its value and its state, as in torch.optim. One without a state gets it in the next step.

        Raises:
            RuntimeError: everything that has changed is named.
        """
        if self.now() != self.known:
            self.look()

    def look(self) -> None:
        """As `check`, once something has changed: go on where it may."""
        self.stored.take_data()
        now = self.now()
        with torch.DisableTorchFunctionSubclass():
            bad = [(path, why) for path, why in self._reasons() if why]
        pairs = zip(self.registered, self._registered(), strict=True)
        changed = [found for (name, before), (_, after) in pairs for found in _changed(name, before, after)]
        if not bad and not changed:
            # Allowed changes: leaves were frozen or unfrozen; the user gave sharded parameters other memory, in which
            # they are stored from then on (`adopted`); submodules without parameters came, which steps watch from now.
            self.unfrozen, self.frozen = self._frozen()
            self.known = (*now[:2], *self.known[2:])
        else:
            right = "opt.detach() before the change and opt = zf.attach(model, tx) after it"
            if any(reason == MADE_BY_TORCH for _, reason in changed):
                right = ATTACH_LAST
            elif changed:
                right += ":\n         attach after adding adapters"
            if any(reason == FROZEN_AT_ATTACH for _, reason in bad):
                right += (
                    ".\n         To unfreeze leaves between captured steps: zf.attach(model, tx, capturable=True,\n"
                    "         hold_frozen=True), which makes states for frozen leaves too, and a new capture"
                )
            raise RuntimeError(bad_leaves("the model changed after it was attached", bad + changed, right))

    def _frozen(self) -> tuple[frozenset[str], str]:
        with torch.DisableTorchFunctionSubclass():
            other = [path for path in self.paths if self.params[path].requires_grad != (path in self.held)]
        late = [path for path in other if path not in self.held]
        named = {"frozen": [path for path in other if path in self.held], "unfrozen": late}
        return frozenset(late), ", ".join([f"{how}: {' '.join(paths)}" for how, paths in named.items() if paths])

    def _registered(self) -> list[tuple[str, dict[str, Any]]]:
        """Two entries for each module, by its name: its parameters, and its submodules."""
        return [(name, dict.copy(found)) for name, m in self.modules for found in parameters_and_modules(m)]

    def now(self) -> tuple[list[int], list[tuple[Any, ...]], list[int], list[int]]:
        """The values that every step compares, read by C functions alone.

        They are the address and the `FIXED` attributes of each parameter; for each module the numbers and the ids of
        its parameters and submodules, by the methods of `dict`: a module's own dict of parameters may return views.
        """
        with torch.DisableTorchFunctionSubclass():
            found = list(chain.from_iterable(map(parameters_and_modules, self.all)))
            ids = list(map(id, chain.from_iterable(map(dict.values, found))))
            fixed = list(map(FIXED, self.shown))
            return list(map(Tensor.data_ptr, self.tensors)), fixed, list(map(dict.__len__, found)), ids

    def _reasons(self) -> Iterator[tuple[str, str]]:
        addresses = [self.stored.at[path] for path in self.paths] if self.stored.movable else self.known[0]
        known = zip(self.paths, self.tensors, self.devices, addresses, self.known[1], strict=True)
        for path, p, device, address, (shape, dtype, _) in known:
            held = path in self.held or not self.captured
            yield path, _reason(p, self.params[path], address, shape, dtype, device, held)


def _reason(
    p: Tensor, shown: Tensor, address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, held: bool
) -> str:
    if shown.dtype != dtype or shown.device != device:
        return f"moved to {shown.dtype} on {shown.device}; attached as {dtype} on {device}"
    if p.data_ptr() not in (address, vars(p).get("adopted")) or shown.shape != shape:
        # torch calls every tensor on a GPU shared.
        if p.is_shared() and device.type == "cpu":
            copied = "with opt.gathered(): copy.deepcopy(model).share_memory()"
            return f"moved to shared memory, where no step would update it; share a copy: {copied}"
        return "its data were replaced; write in place: p.copy_(...) under torch.no_grad()"
    return FROZEN_AT_ATTACH if shown.requires_grad and not held else ""


def _changed(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    """Paths of parameters and submodules that have changed, and how. Submodules without parameters may come and go."""
    names = sorted(n for n in before.keys() | now.keys() if before.get(n) is not now.get(n))
    of_parameters = [n for n in names if _has_parameters(before.get(n)) or _has_parameters(now.get(n))]
    return [(f"{name}.{n}".lstrip("."), _change(now.get(n))) for n in of_parameters]


def _change(now: nn.Module | nn.Parameter | None) -> str:
    # Under `shard` the attached parameters are DTensors too. They are told apart by the mark of their optimizer.
    of_torch = is_distributed(now) and "_zerofn_owner" not in vars(now)
    return MADE_BY_TORCH if of_torch else "added, removed or replaced"


def _has_parameters(x: nn.Module | nn.Parameter | None) -> bool:
    return next(x.parameters(), None) is not None if isinstance(x, nn.Module) else x is not None


# ----------------------------------------------------------------------------------------------------------------------
# `SpentGradients` drops the gradients that a step has used, for loops of `opt.backward`: nobody clears `p.grad` there.
#
# They are noted from the first `opt.backward` on: loops of `loss.backward()` do not pay for it.


class SpentGradients:
    """The gradients in `p.grad` that the last step has used. What arrives after it has another version.

    Args:
        params: the parameters that the model has, by path.
    """

    def __init__(self, params: Leaves):
        self.params = params
        local = set(map(is_distributed, params.values()))
        self.version = version if local == {False} else version_of_local if local == {True} else _version_of_either
        self.kept: list[tuple[Tensor, weakref.ref[Tensor], int]] = []

    def note(self, paths: Iterable[str]) -> None:
        """Remember the gradients of these leaves, which a step has used, without keeping them alive."""
        with torch.DisableTorchFunctionSubclass():
            params = list(map(self.params.__getitem__, paths))
            grads = list(map(read_grad, params))
            self.kept = [*zip(params, map(weakref.ref, grads), map(self.version, grads), strict=True)]

    def drop(self) -> None:
        """Drop those of them that are in `p.grad` and that nobody has written since."""
        with torch.DisableTorchFunctionSubclass():
            for p, used, count in self.kept:
                grad = read_grad(p)
                if grad is not None and grad is used() and self.version(grad) == count:
                    write_grad(p, None)
        self.kept = []


def _version_of_either(grad: Tensor) -> int:
    return version_of_local(grad) if is_distributed(grad) else version(grad)


# ----------------------------------------------------------------------------------------------------------------------
# An `Attachment` binds a model to a pipeline, from `attach` to `detach`.


# For a step without tensors among its arguments: a rate that a schedule returns may still require grad.
LOST = {"unrecorded": ATTACHED}
CLOSURE = """def closure():
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss
opt.step(closure)"""


class Attachment:
    """A model that is bound to a pipeline, and the steps of its optimizer.

    Args:
        model: the model.
        tx: the pipeline's transform.
        in_backward: whether leaves are updated in backward.
        start: returns the first values of parameters.
        hold_frozen: whether frozen parameters have states too, so that they can be unfrozen later.
        check: whether every step makes the checks that otherwise the first steps make.
        capturable: whether steps may be captured in a CUDA graph.

    Attributes:
        home: its parameters, gradients and state.
        groups: the rates and numbers that were set.
        watch: notices that the model has changed.
        window: says which steps close the accumulation window.
        spent: the gradients that the last step has used; `None` until somebody calls `opt.backward`.
    """

    def __init__(
        self,
        model: nn.Module,
        tx: Transform,
        in_backward: bool,
        start: Start,
        hold_frozen: bool = False,
        check: bool = False,
        capturable: bool = False,
    ):
        check_hookable(model)
        named = parameters_of(model)
        check_free(named)
        check_initialised(named, "attach")
        self.model, self.here, self.capturable = model, True, capturable
        if capturable:
            _check_capturable_ways(in_backward, bool(sharded_by_torch(model)))
        self.params: Leaves = {}
        self.fully_sharded: FullySharded | None = None
        if sharded_by_torch(model):
            from ..module.fully_sharded import FullySharded, check_ways

            check_ways(in_backward, start is not from_values)
            self.fully_sharded = FullySharded(model, named)
            named, start = self.fully_sharded.rows, from_rows
        else:
            check_not_distributed(named)
        try:
            held = {path for path, p in named.items() if hold_frozen or p.requires_grad}
            self._bind(named, held, tx, in_backward, start, check)
        except BaseException as error:
            self.give_up(error)
            raise

    def _bind(
        self,
        named: dict[str, nn.Parameter],
        held: Set[str],
        tx: Transform,
        in_backward: bool,
        start: Start,
        check: bool,
    ) -> None:
        model, fully = self.model, self.fully_sharded
        within, groups = {}, ()
        if fully is not None:
            tx, groups, within = fully.chain(tx), fully.groups, fully.within
        layout, params = make_layout(named, held.__contains__, within, names_with_wrappers(model))
        check_trainable(layout)
        self.params, shown = params, None
        if layout.complexes:
            check_complex_ways(layout, fully is not None, start is not from_values)
            params, shown = parts_of(layout, params, named)
            self.params = shown
        if fully is not None:
            from ..module.fully_sharded import with_shapes

            # FSDP2 calls the model and gathers its parameters: no module is hooked, and none is watched.
            layout, self.params, model = with_shapes(layout, fully.shapes), fully.parameters, nn.Module()
        # The hooks get a weak reference, so that a dropped optimizer is freed at once, and its hooks with it.
        myself = weakref.ref(self)
        with lease() as channels:
            pipe = pipeline(tx, layout, "zf.attach", model=groups, checked=check)
            if fully is not None:
                fully.check(pipe)
            if self.capturable:
                from ..core.capture import check_capturable

                check_capturable(pipe, "zf.attach")
            if pipe.second is not None:
                _check_second_ways(pipe.second.name, in_backward, fully is not None)
            if not check_alone(model, bool(pipe.step_groups)):
                tell_unreduced(pipe, "zf.attach(model, tx)")
            tell_narrow_sums(pipe, "zf.attach(model, tx)")
            if pipe.scaled:
                from ..module.scaled_checks import check_inner_hooks

                check_inner_hooks(model)
            check_numbers(pipe.numbers, ATTACHED)
            # This comes before the model is changed: it calls schedules for their first rates, and they may raise.
            self.groups = ParamGroups(pipe, self.params)
            context = self._context_in_backward if in_backward else None
            hook = hook_one_process
            if pipe.step_groups or in_backward or fully is not None:
                # Only models whose gradients leave `p.grad`, or are shards there, need this module.
                from .over_ranks import hook
            unchanged = functools.partial(_check, myself)
            self.home = ResidentParams(model, pipe, params, context, unchanged, start, hook, fully, shown)
            try:
                self.home.install()
            except BaseException as error:
                # The model is put back before the lease closes the groups.
                give_up(self.home, error)
                raise
        self.pipe = self.home.pipe
        if self.capturable:
            self.home.current.state = with_counters_on_device(self.pipe, self.home.current.state)
        self.averages = AveragedParameters(self.home.current, self.home.refresh)
        # From here on `shown` has DTensors in the places of sharded parameters.
        self.params = self.home.shown
        # The tensors whose gradients a step takes.
        self.leaves = params if fully is not None else self.params
        if self.home.faces is not None:
            self.groups.exchange(self.params)
        self.home.stored_params.movable &= not self.capturable
        self._observe()
        self.leave = functools.partial(leave, self.home, [])
        self.window = AccumulationWindow(self.pipe, self.home.current)
        self._writes = 0
        self.spent: SpentGradients | None = None
        # The value of `writes` at the last `opt.zero_grad`.
        self._cleared = 0
        # The sum of the losses of `opt.backward` since the last step, if a transform wants it.
        self.loss: Tensor | None = None
        if self.home.channels.control is not None:
            # `undo` runs from its end, so this comes last.
            self.home.undo.insert(0, functools.partial(channels.close, self.home.channels.control.ranks))
            self.home.lasting += 1

    def _observe(self) -> None:
        """Watch the model, as it is now."""
        home = self.home
        of = home.pipe.layout, home.params, self.leaves, home.stored_params
        self.watch = Watch(home.model, *of, captured=self.capturable)

    def _train_more(self) -> None:
        """Give states to leaves that were frozen when the model was attached, and that require grad now.

        All ranks call it, and have compared which leaves these are.
        """
        from .unfreezing import with_trained

        home = self.home
        control, paths = home.channels.control, self.watch.unfrozen
        compiled = None if home.boundary is None else home.boundary.compiled
        if home.units is not None and compiled is not None and compiled.at:
            refuse_in_graph(paths)
        home.begin_again(*with_trained(home.unread, home.state_now(), paths, control))
        self.pipe = home.pipe
        self.groups.regroup(self.pipe, self.params)
        self.window = self.window.of(self.pipe)
        vars(self).pop("dicts", None)
        self._observe()
        home.gradients.bring_unfrozen(paths)

    def train_unfrozen(self, call: str) -> None:
        """As `_train_more`, if there are such leaves, before what is loaded. All ranks make this call."""
        if self.watch.now() != self.watch.known:
            self.watch.look()
        if self.watch.unfrozen:
            if self.home.channels.control is not None:
                right = "the same parameters frozen and unfrozen on every rank"
                together(call, self.home.channels.control.ranks, right, state=self.watch.frozen)
            with interrupts_held():
                self._train_more()

    def _collect(self, rates: dict[str, Any], numbers: dict[str, dict[str, Any]]) -> Leaves:
        """The gradients of this micro-step, once ranks have compared what must be equal on all.

        The exchange says whether all ranks have unfrozen the same leaves, so only then these get states.
        """
        home, forced = self.home, self.window.forced
        if home.alone:
            if self.watch.unfrozen and home.in_backward is None:
                with interrupts_held():
                    self._train_more()
            return home.gradients.grads()
        settings = as_text(rates, numbers, self.watch.frozen)
        grads = home.gradients.collect(forced, settings)
        if self.watch.unfrozen and home.in_backward is None:
            self._train_more()
            grads = home.gradients.collect(forced, settings)
        return grads

    @functools.cached_property
    def dicts(self) -> StateDicts:
        """Makes and loads state dicts; imported by the first program that asks for one."""
        from .state_dicts import StateDicts

        return StateDicts(self.home, self.groups)

    def give_up(self, error: BaseException) -> None:
        """Put the model back because of an error in `attach`."""
        self.here = False
        home = getattr(self, "home", None)
        if home is not None:
            give_up(home, error)
        for p in self.params.values():
            vars(p).pop("_zerofn_owner", None)

    def belongs_to(self, opt: Any) -> None:
        """Mark the parameters, so that no other optimizer takes them."""
        for p in self.params.values():
            p._zerofn_owner = Owner(opt, self.leave, bool(self.pipe.step_groups))  # type: ignore[attr-defined]

    def meet(self, call: str, right: str) -> None:
        """Wait for the other ranks, which make the same call."""
        if self.home.channels.control is not None:
            together(call, self.home.channels.control.ranks, right)

    def meet_if_sharded(self, call: str, right: str) -> None:
        """`meet`, if parameters are sharded, so that the call gathers them."""
        if self.home.units is not None:
            self.meet(call, right)

    def check(self, what: str, inside: bool = False) -> None:
        """Refuse `opt.what()` after `detach`, in a backward and in a step.

        Unless `inside`, also in `averaged` and `gathered`.
        """
        if self._writes & 1:
            self._refuse_in_step(what)
        if not self.here:
            right = f"opt = zf.attach(model, tx), then opt.{what}()"
            raise RuntimeError(explain(f"opt.{what}() after opt.detach()", "the model is plain", right))
        if graph_task() != NO_BACKWARD:
            why = "gradients are still arriving, so some parameters would be updated with a part of their gradients"
            right = "call it after loss.backward() has returned"
            raise RuntimeError(explain(f"opt.{what}() in the middle of a backward", why, right))
        if not inside and (self.averages.on or self.home.is_full):
            self._refuse_inside(what)

    def _refuse_in_step(self, what: str) -> None:
        why = "a schedule, a function of a transform or another thread has called it while a step is under way, whose\n"
        why += "gradients would be used twice"
        right = "zf.adamw(lr=lambda step: 0.1 / (1 + step)), a schedule that calls nothing of opt; steps in one thread"
        raise RuntimeError(explain(f"opt.{what}() inside of opt.step()", why, right))

    def _refuse_inside(self, what: str) -> None:
        self.averages.refuse(f"opt.{what}()")
        if self.home.is_full:
            why = "inside of it parameters are full, and their stored values come back at its end"
            raise RuntimeError(
                explain(f"opt.{what}() inside of `with opt.gathered():`", why, f"opt.{what}() behind it")
            )

    def numbers_of_step(self, given: dict[str, Any], result: Any) -> dict[str, Any]:
        """The numbers that a transform wants; `result` is that of the closure."""
        from ..core.given_numbers import check_given

        wanted = self.pipe.wants
        loss = self.loss if result is None else result
        if "loss" in wanted and "loss" not in given and loss is not None:
            given = {**given, "loss": loss}
        check_given(given.keys(), wanted, "opt.step({}=...)")
        self.loss = None
        return given

    def evaluate_again(self, closure: Callable[[], Any] | None) -> None:
        """Replace the gradients that have arrived by those at the point that a transform asks for.

        Raises:
            ValueError: there is no closure.
        """
        home, asking = self.home, self.pipe.second
        assert asking is not None
        if closure is None:
            wrong, why = f"opt.step() through {asking.name}", "a transform asks for the gradient at a second point"
            raise ValueError(explain(wrong, why, CLOSURE))
        self.watch.check()
        with interrupts_held():
            grads = self._collect(*self.groups.given())
        if home.reduces:
            home.gradients.used()
        loss, state = self.loss, home.current.state
        with torch.no_grad():
            moved = self.pipe.second_point(grads, state, self.pipe.context_of_step()).leaves
            moved = {path: x for path, x in moved.items() if x is not state.leaves[path]}
        self.clear(True)
        with self.averages.replaced(state, moved), torch.enable_grad():
            closure()
        self.loss = loss

    def step(self, weight: Any, given: Mapping[str, Any], written: set[str] | Writing) -> dict[str, Tensor]:
        """Run one micro-step. Return its metrics, each a tensor of its own.

        Args:
            weight, given: as `opt.step` gets them.
            written: begins to hold signals when the state is first written. Its `with` block is the caller's.
        """
        home, early = self.home, self.home.in_backward
        self.check("step")
        if self.watch.now() != self.watch.known:
            self.watch.look()
        if early is not None and weight is not None:
            why = "with in_backward=True it has no effect: only accumulate(weighted=True) has a use for it"
            raise ValueError(explain("opt.step(weight=...)", why, "opt.step()"))
        self._writes += 1
        before = home.current.state
        try:
            # Settings are read first: they may be refused, and collected gradients cannot be put back.
            rates, numbers = self.groups.given()
            if self.watch.unfrozen:
                grads = self._collect(rates, numbers)
                before = home.current.state
            elif home.alone:
                grads = home.gradients.grads()
            else:
                frozen = self.watch.frozen
                settings = as_text(rates, numbers, frozen) if rates or numbers or frozen else ""
                grads = home.gradients.collect(self.window.forced, settings)
            if home.current.torn:
                # This comes after the exchange, in which all ranks raise if only some have a torn state.
                home.current.check("opt.step()")
            if early is None:
                metrics = self._update(grads, weight, rates, numbers, given, written)
            else:
                metrics = self._finish(early, grads)
            # If only a GPU knows whether the step was skipped, parameters are refreshed in any case.
            updated = metrics["updated"]
            if home.refreshing and (home.reads or not updated.is_cpu or bool(updated)):
                for refresh in home.refreshing:
                    refresh()
            if self.groups.scheduled:
                self.groups.show(metrics)
            return metrics
        except BaseException:
            if home.current.state is not before:
                # The model's parameters may be those of the step before.
                home.current.tear()
            raise
        finally:
            self._writes += 1

    def step_fully_sharded(
        self, fully: FullySharded, weight: Any, given: Mapping[str, Any], written: set[str] | Writing
    ) -> dict[str, Tensor]:
        """Run one micro-step of a model whose gradients FSDP2 has reduced."""
        self.check("step")
        fully.bring()
        try:
            metrics = self.step(weight, given, written)
        finally:
            fully.take()
        if self.spent is not None:
            self.spent.note([path for path, p in fully.parameters.items() if p.grad is not None])
        return metrics

    def writes(self) -> int:
        """How often a write into the state has begun or ended; odd during a step. A save beside training compares it.

        A step within backward begins with the first gradient: leaves are then updated, and counters are not.
        """
        return self._writes | self.under_way

    @property
    def under_way(self) -> bool:
        """Whether a step within backward has begun and not ended."""
        step = self.home.in_backward
        return step is not None and step.under_way is not None

    def _finish(self, early: InBackward, grads: Leaves) -> dict[str, Tensor]:
        """End the step that backward has made."""
        before, current = self.home.current.state, self.home.current
        self._bring(early, grads)
        if not self.watch.unfrozen:
            return early.finish()
        # Leaves that were unfrozen are updated by a second step, with the counters of the first one.
        begun = early.under_way is not None
        metrics = early.finish() if begun else {}
        after, current.state = current.state, before
        self._train_more()
        late = self.home.in_backward
        assert late is not None
        self._bring(late, self.home.gradients.collect(None, self.watch.frozen))
        if late.under_way is not None or not begun:
            metrics = {**late.finish(), **metrics}
        if begun:
            from .unfreezing import with_entries

            current.state = with_entries(current.state, after)
        return metrics

    def _bring(self, early: InBackward, grads: Leaves) -> None:
        """Update leaves with gradients in `p.grad`, which the user has put there: those of backward have left it."""
        for path, grad in grads.items():
            write_grad(self.leaves[path], None)
            early.arrived(path, grad)

    def _update(
        self,
        grads: Leaves,
        weight: Any,
        rates: dict[str, Any],
        numbers: dict[str, Any],
        given: Mapping[str, Any],
        written: set[str] | Writing,
    ) -> dict[str, Tensor]:
        """Run the update halves on the gradients that have arrived."""
        if weight is not None:
            from ..core.weights import equal_weight

            equal_weight(self.pipe, weight)
        window, current = self.window, self.home.current
        closes, old = window.averaged is not None and window.closes(), current.state
        record = innermost_transform() is not None or forward_level() != NO_LEVEL
        pipe = self.pipe
        if not pipe.looked_at or numbers or pipe.numbers or weight is not None:
            lost = self._lost_graphs(record, numbers, weight, torch.is_grad_enabled())
        else:
            lost = {} if record or not torch.is_grad_enabled() else LOST
        ctx = self.pipe.context_of_step(
            norms=Norms(),
            donate=True,
            recorded=record,
            unread=self.capturable and not record,
            weight=weight,
            given=given,
            boundary=window.forced,
            averaged=window.averaged is not False,
            lr=rates,
            numbers=numbers,
            micro_step=old.micro_step,
            written=written,
            **lost,
        )
        try:
            checked = self.home.reduces and not pipe.road.behind_reduction
            new, metrics = apply(pipe, grads, old, ctx, checked)
            if any(map(is_not, new.leaves.values(), old.leaves.values())):
                _store(new.leaves, old.leaves, ctx)
            current.state = new
        except BaseException:
            if written:
                current.tear()
            raise
        if self.home.reduces:
            self.home.gradients.used()
        if window.holds:
            # `accumulate` has added these gradients to its sum. A loop that never clears them would count them twice.
            if self.home.reduces:
                self.home.gradients.accumulated()
            clear_grads(map(self.leaves.__getitem__, grads))
        elif self.spent is not None and self.fully_sharded is None and not self.home.reduces:
            self.spent.note(grads)
        if closes and not bool(metrics["skipped"]):
            window.averaged = None
        return metrics

    def _context_in_backward(self) -> Context:
        """The context of a step that runs in backward."""
        self._writes += 2
        self.home.stored_params.take_data()
        rates, numbers = self.groups.given()
        # Grad mode is off in every backward, so it does not say that the user wants constants.
        lost = self._lost_graphs(recorded(), numbers, None, enabled=True)
        return self.pipe.context(donate=True, lr=rates, numbers=numbers, written=Writing(), **lost)

    def _lost_graphs(self, record: bool, numbers: dict[str, Any], weight: Any, enabled: bool) -> dict[str, Any]:
        """The entries of a step's context by which numbers that require grad are refused, if grad mode is `enabled`."""
        if record or not enabled:
            return {}
        if numbers:
            set_there = [(f"param_groups: {key}", x) for of in numbers.values() for key, x in of.items()]
            check_numbers([(key, one) for key, x in set_there for one in flatten(x)[0]], ATTACHED)
        return self.pipe.unrecorded(ATTACHED, weight)

    def clear(self, to_none: bool) -> None:
        """Run `opt.zero_grad`."""
        if not to_none and self.home.in_backward is not None:
            wrong = "opt.zero_grad(set_to_none=False) with in_backward=True"
            why = "each gradient is freed once its leaf is updated, so p.grad cannot be set to zeros"
            raise ValueError(explain(wrong, why, "opt.zero_grad()"))
        self.home.gradients.clear(to_none)
        self.loss, self._cleared = None, self._writes
        if self.fully_sharded is not None:
            self.fully_sharded.clear(to_none)
            return
        with torch.DisableTorchFunctionSubclass():
            for p in self.params.values():
                grad = read_grad(p)
                if grad is not None:
                    write_grad(p, None if to_none else torch.zeros_like(grad))

    def backward(self, loss: Any, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """Run `opt.backward`."""
        _check_loss(loss)
        if self.spent is None:
            self._check_cleared()
            self.spent = SpentGradients(self.home.shown)
        before = self.window.averaged
        self.window.average(scale_wrt_gas)
        self.home.gradients.accumulated()
        self.spent.drop()
        try:
            loss.backward(torch.ones_like(loss), retain_graph=retain_graph)
        except BaseException:
            self.window.averaged = before
            raise
        if "loss" in self.pipe.wants:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss / self.window.every if scale_wrt_gas else loss

    def _check_cleared(self) -> None:
        """Refuse the first `opt.backward` if `p.grad` may have gradients that a step has used: steps noted none."""
        if self._writes == self._cleared:
            return
        with torch.DisableTorchFunctionSubclass():
            bad = [path for path, p in self.params.items() if read_grad(p) is not None]
        if bad:
            wrong = f"the first opt.backward(loss), after steps of loss.backward(), with a gradient in {bad[0]}.grad"
            why = "opt.backward drops gradients that a step has used; steps note them after the first opt.backward"
            raise RuntimeError(
                explain(wrong, why, "opt.zero_grad() after each step; or opt.backward in every micro-step")
            )

    def agree_on_writes(self) -> None:
        """Refuse writes by hand into full parameters on some ranks only. All ranks call it."""
        if self.home.wholes is not None:
            self.home.wholes.agree()

    def check_state_dict(self) -> None:
        """Refuse `opt.state_dict()` while parameters are averages, or in the middle of a step."""
        self.averages.refuse("opt.state_dict()")
        self.home.current.check("opt.state_dict()")
        if self.under_way:
            raise RuntimeError(
                explain(
                    "opt.state_dict() between a backward and opt.step(), with in_backward=True",
                    "leaves with a gradient are updated and counters are not: no run can go on from such a state",
                    "opt.state_dict() after opt.step()",
                )
            )
        self.dicts.check_complete()

    def load(self, call: str, read: Callable[[], ToLoad], more: Callable[[], object] | None = None) -> LoadedStates:
        """Copy what `read` finds in a state dict into the state and into the model; `more` is a part of the load."""
        self.check(call)
        self.train_unfrozen(f"opt.{call}(...)")

        def rest() -> None:
            # The loaded window need not divide losses as the window that was given up did.
            self.window.averaged = None
            if more is not None:
                more()

        with interrupts_held():
            found = read()
            self.dicts.write(found, rest)
        return found.matched

    def restart(self, paths: list[str]) -> None:
        """Write first values over the optimizers' entries of these leaves. All ranks call it."""
        self.check("state.reset")
        with interrupts_held():
            self.dicts.restart(set(paths))

    def detach(self) -> None:
        """Make the model a plain module again, if it is not yet. All ranks call it."""
        self._refuse_inside("detach")
        if self.here:
            self.home.gradients.give_up_backward()
            self.meet("opt.detach()", "opt.detach() on every rank")
            self.leave()
            for p in self.params.values():
                vars(p).pop("_zerofn_owner", None)
            self.here = False


def _check_second_ways(name: str, in_backward: bool, fully: bool) -> None:
    if in_backward or fully:
        how = "in_backward=True" if in_backward else "a model of fully_shard"
        why = "a transform asks for a second gradient, for which the step moves the parameters and moves them back"
        right = f"zf.attach(model, zf.chain(zf.shard(), zf.{name}(), ...)), and opt.step(closure)"
        raise ValueError(explain(f"zf.attach with {name} and {how}", why, right))


def _check_capturable_ways(in_backward: bool, fully: bool) -> None:
    if not in_backward and not fully:
        return
    wrong = "zf.attach(model, tx, capturable=True" + (", in_backward=True)" if in_backward else ") of fully_shard")
    why = "hooks of the host update leaves within backward" if in_backward else "FSDP2 gathers on the host's orders"
    raise ValueError(
        explain(wrong, f"{why}, and a replay runs no Python code", f"{wrong.split(', capt')[0]}) without it")
    )


def _check(of: Callable[[], Attachment | None]) -> None:
    attachment = of()
    if attachment is not None and attachment.here:
        attachment.watch.check()


def refuse_in_graph(paths: Iterable[str]) -> NoReturn:
    """Refuse leaves that were unfrozen behind the calls of a graph that has no place for their gradients."""
    bad = [(path, "frozen when the graph was made, which sends no gradient of it") for path in sorted(paths)]
    right = "zf.attach(model, tx, hold_frozen=True), which makes states for frozen leaves too;\n"
    right += "         or opt.detach(), the change, attach and compile again"
    raise RuntimeError(bad_leaves("unfrozen under shard and torch.compile(model, fullgraph=True)", bad, right))


@torch.no_grad()
def _store(new: Leaves, old: Leaves, ctx: Context) -> None:
    """Copy new parameters with memory of their own into the memory of the old ones."""
    for path, x in old.items():
        if new[path] is not x:
            new[path] = ctx.into(x, new[path])


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            explain(
                f"opt.backward({got})",
                "it takes a loss of one element that requires a gradient",
                "output.backward(gradient): any backward of PyTorch's own is right here",
            )
        )
