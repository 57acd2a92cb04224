"""What the parameters of an attached model are told of themselves, so that misuse is told where it happens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .._compat import IGNORED_BY_DDP
from ..core.pipeline import Pipeline
from ..core.tree import Leaves
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import BY_ANYTHING, BY_NORM, Asks, Partial, tell
from .accelerate import prepare
from .sharded_parameter import Parted
from .sharded_state_dict import mark


def label(
    model: nn.Module,
    pipe: Pipeline,
    params: Leaves,
    units: Units | None,
    in_backward: bool,
    asks: Asks,
) -> list[Callable[[], None]]:
    """Tell each parameter what it, or its gradient, is a part of; what is returned undoes it.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path.
        units: what gathers sharded ones.
        in_backward: whether gradients are used as they arrive.
        asks: what they ask of the gradients of this model.
    """
    if in_backward:
        why, refused = "p.grad is None: with in_backward=True a gradient is used as it arrives", BY_ANYTHING
    elif not pipe.groups:
        return []
    elif pipe.late:
        why, refused = "p.grad is what this rank found, and is reduced later: ranks would differ", BY_ANYTHING
    elif pipe.road.after_update:
        why, refused = "p.grad is None: the gradient has left to be reduced over ranks", BY_ANYTHING
    else:
        why, refused = "p.grad is a part of the gradient, and has another norm on every rank", BY_NORM
    told = {"why": why, "refused": refused, "asks": asks}
    apart = [prepare(model)] if pipe.groups else []
    if units is None:
        return apart + [tell(p, Partial, **told) for p in params.values()]
    is_whole = lambda: units.suspended  # noqa: E731
    shapes = {leaf.path: tuple(leaf.shape) for leaf in pipe.layout.leaves}
    undo = [
        tell(
            p,
            Parted,
            whole=functools.partial(units.look_alone, path),
            is_whole=is_whole,
            path=path,
            full=shapes[path],
            **told,
        )
        for path, p in params.items()
    ]
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}
    return apart + undo + mark(model, leaves, pipe, is_whole) + [_hide_from_ddp(model)]


def _hide_from_ddp(model: nn.Module) -> Callable[[], None]:
    """DistributedDataParallel copies the first rank's parameters to all, parts too; this is how it is told of others.

    It then refuses a model that has no parameters for it.
    """
    names: Any = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    setattr(model, IGNORED_BY_DDP, names)
    return functools.partial(delattr, model, IGNORED_BY_DDP)
