"""How a model becomes plain again: by `opt.detach()`, and after an attach that has raised."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..module.boundary import take_back
from .resident_form import make_whole, move_out, put
from .resident_params import ResidentParams, from_values


def leave(home: ResidentParams, steps: list[Callable[[], object]]) -> None:
    """Full parameters and no hooks: a plain model. Nothing of it is on its way between ranks.

    Args:
        home: of the model.
        steps: empty at first. What was interrupted, as by Ctrl-C, goes on with those that are left in it.
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
    whole = functools.partial(make_whole, home.pipe, home.params, home.current.state.leaves, "opt.detach()")
    out = functools.partial(move_out, home.pipe, home.params, home.grad_dtypes)
    return [*steps, functools.partial(_end_units, home), whole, functools.partial(take_back, home.undo), out]


def _end_units(home: ResidentParams) -> None:
    if home.units is not None:
        home.units.suspended = home.units.left = True


def give_up(home: ResidentParams, error: BaseException) -> None:
    """Put a model back because of an error in `attach`. What has become of it otherwise is noted on the error.

    Whole parameters are gathered where all ranks have raised, as they do of first states. In the rest of `attach` one
    rank may be interrupted alone, and the others do not come.
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
    """The dtypes that parameters had. Values that a narrower one has rounded are gone: both would not fit in memory."""
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
