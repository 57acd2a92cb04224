"""What the parameters of an attached model are attributes of themselves, so that misuse is attributes where it happens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._compat.modules import IGNORED_BY_DDP
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..ranks.dtensor_parameters import Form
from ..sharded.gather_on_use import Units
from ..sharded.gather_part import Gathering, piece_of
from ..sharded.guarded_parameter import BY_ANYTHING, BY_NORM, Asks, Partial, tell
from ..sharded.part import part_of
from ..sharded.part_origin import Origin
from .accelerate import prepare
from .dtensor_parameter import DTensorParameter
from .sharded_parameter import ShardedParameter, wrap_existing_hooks
from .sharded_state_dict import hook_state_dicts


def label(
    model: nn.Module,
    pipe: Pipeline,
    params: Leaves,
    gathering: Gathering | None,
    units: Units | None,
    in_backward: bool,
    asks: Asks,
    forms: Mapping[str, Form],
) -> list[Callable[[], None]]:
    """Tell each parameter what it, or its gradient, is a part of; what is returned undoes it.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path.
        gathering: how parts of sharded ones are gathered.
        units: what gathers those in calls of the model.
        in_backward: whether gradients are used as they arrive.
        asks: what they ask of the gradients of this model.
        forms: by path, what distributed tensors the model itself has made of them.
    """
    if in_backward:
        why, refused = "p.grad is None: with in_backward=True a gradient is used as it arrives", BY_ANYTHING
    elif not pipe.every_group and not forms:
        return []
    elif pipe.road.late:
        why, refused = "p.grad is what this rank found, and is reduced later: ranks would differ", BY_ANYTHING
    elif pipe.road.after_update:
        why, refused = "p.grad is None: the gradient has left to be reduced over ranks", BY_ANYTHING
    else:
        why, refused = "p.grad is a part of the gradient, and has another norm on every rank", BY_NORM if forms else ()
    attributes = {"why": why, "refused": refused, "asks": asks}
    apart = [prepare(model)] if pipe.every_group else []
    apart += [
        _distributed(path, params[path], form, units, attributes) for path, form in forms.items() if path in params
    ]
    if units is None or gathering is None:
        return apart + [tell(p, Partial, path=path, **attributes) for path, p in params.items() if path not in forms]
    is_whole = lambda: units.suspended  # noqa: E731
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}
    pieces = {leaf.path: piece_of(gathering, leaf, params[leaf.path]) for leaf in pipe.layout.leaves}
    undo: list[Callable[[], None]] = []
    for leaf in pipe.layout.leaves:
        path, p = leaf.path, params[leaf.path]
        if path in forms:
            continue
        whole = functools.partial(units.look_alone, path)
        of = {"path": path, "full": leaf.shape, "pieces": pieces[path]}
        undo.append(tell(p, ShardedParameter, whole=whole, is_whole=is_whole, **of, **attributes))
        if isinstance(p, ShardedParameter):
            undo.append(wrap_existing_hooks(p))
    local = lambda x, leaf: _local(x, forms.get(leaf.path))  # noqa: E731

    def shown(x: Tensor, leaf: Leaf) -> Tensor:
        form = forms.get(leaf.path)
        cut, shape = ((), form.shape) if form is not None else (pieces[leaf.path], leaf.shape)
        return part_of(x, Origin("a part in the sharded model's state_dict()", leaf.path, False, cut, shape))

    return apart + undo + hook_state_dicts(model, leaves, pipe, is_whole, local, shown) + [_hide_from_ddp(model)]


def gathering_of(units: Units) -> Gathering:
    """How parts of the leaves of the model are gathered outside of its calls."""
    return Gathering(units.collectives.wire, units.rounds.meet, lambda: units.left)


def _distributed(
    path: str, p: Tensor, form: Form, units: Units | None, attributes: dict[str, Any]
) -> Callable[[], None]:
    """As `tell`, one that was a distributed tensor."""

    def whole() -> Tensor:
        # Gathered where it is wanted, and not when it is used: torch's distributed tensors hold plain ones.
        return form.wrap(p if units is None or units.suspended else units.look_alone(path).clone())

    in_parts = (lambda: False) if units is None else (lambda: not units.suspended)
    return tell(p, DTensorParameter, form=form, path=path, whole=whole, in_parts=in_parts, **attributes)


def _local(x: Tensor, form: Form | None) -> Tensor:
    return x if form is None else form.local(x)


def _hide_from_ddp(model: nn.Module) -> Callable[[], None]:
    """DistributedDataParallel copies the first rank's parameters to all, parts too; this is how it is attributes of others.

    It then refuses a model that has no parameters for it.
    """
    # No list, which would be searched for tensors before and after each call (`module.graph_check`).
    names: Any = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    setattr(model, IGNORED_BY_DDP, names)
    return functools.partial(delattr, model, IGNORED_BY_DDP)
