"""`Attachment` binds a model to a pipeline, from attach to detach."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from .._compat import autograd
from .._compat.tensors import sharded_by_torch
from .._errors import explain
from .._interrupts import interrupts_held
from ..core.layout import Leaves, make_layout, parameters_of
from ..core.number_graphs import ATTACHED, check_numbers
from ..core.pipeline import pipeline
from ..core.rank_agreement import tell_unreduced
from ..core.transform import Transform
from ..core.wrapper_names import names_with_wrappers
from ..module.attach_checks import (
    Owner,
    Watch,
    check_alone,
    check_free,
    check_hookable,
    check_initialised,
    check_trainable,
)
from ..module.boundary import take_back
from ..module.fully_sharded import FullySharded, check_ways, with_shapes
from ..module.scaled_checks import check_inner_hooks
from ..module.tensor_parallel import DistributedModel
from ..ranks.process_groups import lease, together
from .loading import LoadedStates, ToLoad
from .masters import make_whole, move_out, put
from .param_groups import ParamGroups
from .resident_params import AveragedParameters, ResidentParams, Start, from_rows, from_values
from .state_dicts import StateDicts
from .steps import Steps

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
    steps: list[Callable[[], object]] = [home.masters.carry_over]
    if home.gradient_hooks.stream is not None:
        steps.append(functools.partial(home.micro_step.forget, always=True))
    if home.units is not None:
        # A gather that was begun for nobody ends before its channel is closed.
        steps.append(home.units.gathered.drop)
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
        # It was on the meta device, and might not fit whole.
        return
    if home.hooked or home.stored:
        begun = home.current.begun
        if begun and home.units is not None:
            _end_units(home)
        if not begun:
            make_whole(home.unread, home.params, home.stored, "zf.attach failed")
        elif all(group.size == 1 for group in home.pipe.groups):
            make_whole(home.pipe, home.params, home.current.state.leaves, "zf.attach failed")
        else:
            error.add_note("zf.attach failed on this rank alone, whose parameters may be parts: make the model anew.")
        _cast_back(home, error)
        home.hooked, home.stored = False, {}
    move_out(home.pipe, home.params, home.grad_dtypes)
    home.existing.put_back()


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
# An `Attachment` binds a model to a pipeline, from `attach` to `detach`.


class Attachment:
    """A model that is bound to a pipeline.

    Args:
        model: the model.
        tx: the pipeline's transform.
        in_backward: whether leaves are updated in backward.
        start: returns the first values of parameters.
        hold_frozen: whether frozen parameters have states too, so that they can be unfrozen later.
        check: whether every step makes the checks that otherwise the first steps make.
    """

    def __init__(
        self,
        model: nn.Module,
        tx: Transform,
        in_backward: bool,
        start: Start,
        hold_frozen: bool = False,
        check: bool = False,
    ):
        check_hookable(model)
        named = parameters_of(model)
        check_free(named)
        check_initialised(named, "attach")
        self.model, self.here = model, True
        self.params: Leaves = {}
        self.fully_sharded: FullySharded | None = None
        if sharded_by_torch(model):
            check_ways(in_backward, start is not from_values)
            self.fully_sharded = FullySharded(model, named)
        self.distributed = DistributedModel(model, named if self.fully_sharded is None else {})
        if self.fully_sharded is not None:
            named, start = self.fully_sharded.rows, from_rows
        self.distributed.check_attached(in_backward, start is not from_values)
        self.distributed.enter()
        try:
            named = parameters_of(model) if self.distributed.named else named
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
        model, model_groups, within = self.model, self.distributed.groups, self.distributed.within
        fully = self.fully_sharded
        if fully is not None:
            tx, model_groups, within = fully.chain(tx), fully.groups, fully.within
        layout, params = make_layout(named, held.__contains__, within, names_with_wrappers(model))
        check_trainable(layout)
        self.params = params
        if fully is not None:
            # FSDP2 calls the model and gathers its parameters: no module is hooked, and none is watched.
            layout, self.params, model = with_shapes(layout, fully.shapes), fully.parameters, nn.Module()
        # Not by way of `self`: an optimizer that is dropped is gone at once, and its hooks with it.
        myself = weakref.ref(self)
        with lease() as channels:
            pipe = pipeline(tx, layout, "zf.attach", model=model_groups, checked=check)
            if fully is not None:
                fully.check(pipe)
            if not check_alone(model, bool(pipe.step_groups)):
                tell_unreduced(pipe, "zf.attach(model, tx)")
            if pipe.scaled:
                check_inner_hooks(model)
            check_numbers(pipe.numbers, ATTACHED)
            # Before the model is changed: a schedule is asked for its first rate, and may raise.
            self.groups = ParamGroups(pipe, self.params)
            context = (lambda: self.steps.context()) if in_backward else None
            unchanged, forms = lambda: _check(myself()), self.distributed.forms
            self.home = ResidentParams(model, pipe, params, context, unchanged, start, forms, fully)
            try:
                self.home.settle()
            except BaseException as error:
                # Before the groups are closed.
                give_up(self.home, error)
                raise
        self.pipe = self.home.pipe
        self.averages = AveragedParameters(self.home.current, self.home.refresh)
        self.watch = Watch(model, layout, params)
        self.leave = functools.partial(_leave, self.home, [], self.distributed)
        self.steps = Steps(self.home, self.groups, self.watch)
        self.dicts = StateDicts(self.home, self.groups)
        if self.home.channels.control is not None:
            # The last that is undone.
            self.home.undo.insert(0, functools.partial(channels.close, self.home.channels.control.ranks))

    def give_up(self, error: BaseException) -> None:
        """Put the model back because of an error in `attach`."""
        self.here = False
        home = getattr(self, "home", None)
        if home is not None:
            give_up(home, error)
        for p in self.params.values():
            vars(p).pop("_zerofn_owner", None)
        self.distributed.leave()

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
        """Refuse `opt.what()` after `detach` and in a backward; unless `inside`, also in `averaged` and `gathered`."""
        if not self.here:
            raise RuntimeError(
                f"opt.{what}() after opt.detach(): the model is plain. Attach it anew: opt = zf.attach(model, tx)."
            )
        if autograd.in_backward():
            why = "gradients are still arriving, so some parameters would be updated with half of theirs"
            right = "call it after loss.backward() has returned"
            raise RuntimeError(explain(f"opt.{what}() in the middle of a backward", why, right))
        if not inside and (self.averages.on or self.home.is_full):
            self._refuse_inside(what)

    def _refuse_inside(self, what: str) -> None:
        self.averages.refuse(f"opt.{what}()")
        if self.home.is_full:
            why = "the parameters are gathered ones there, and what was stored of them comes back at its end"
            raise RuntimeError(
                explain(f"opt.{what}() inside of `with opt.gathered():`", why, f"opt.{what}() behind it")
            )

    def agree_on_writes(self) -> None:
        """Refuse writes by hand into full parameters on some ranks only. All ranks call it."""
        if self.home.wholes is not None:
            self.home.wholes.agree()

    def check_state_dict(self) -> None:
        """Refuse `opt.state_dict()` while parameters are averages, or in the middle of a step."""
        self.averages.refuse("opt.state_dict()")
        self.home.current.check("opt.state_dict()")
        if self.steps.under_way:
            raise RuntimeError(
                explain(
                    "opt.state_dict() between a backward and opt.step(), with in_backward=True",
                    "leaves that had a gradient are updated and counters are not: another run would go on from that",
                    "opt.state_dict() after opt.step()",
                )
            )
        self.dicts.check_complete()

    def load(self, call: str, read: Callable[[], ToLoad], more: Callable[[], object] | None = None) -> LoadedStates:
        """Copy what `read` finds in a state dict into the state and into the model; `more` is a part of the load."""
        self.check(call)

        def rest() -> None:
            # The loaded window need not divide losses as the window that was given up did.
            self.steps.window.averaged = None
            if more is not None:
                more()

        with interrupts_held():
            found = read()
            self.dicts.write(found, rest)
        return found.told

    def detach(self) -> None:
        """Make the model a plain module again, if it is not yet. All ranks call it."""
        self._refuse_inside("detach")
        if self.here:
            self.home.micro_step.give_up_backward()
            self.meet("opt.detach()", "opt.detach() on every rank")
            self.leave()
            for p in self.params.values():
                vars(p).pop("_zerofn_owner", None)
            self.here = False


def _leave(home: ResidentParams, steps: list[Callable[[], object]], distributed: DistributedModel) -> None:
    """Make the model plain again, with its old classes of parameters."""
    leave(home, steps)
    distributed.leave()


def _check(attachment: Attachment | None) -> None:
    if attachment is not None and attachment.here:
        attachment.watch.check()
