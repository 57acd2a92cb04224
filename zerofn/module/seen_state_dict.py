"""State dicts of a model whose parameters are seen through views of one's own: they have what the model computes with.

Its parameters are what is stored. In `model.state_dict()` stand copies of what is seen, and what `load_state_dict` is
given goes through `store`: a file has the same numbers at every stage, and in a plain model. Where parameters are parts
it is `sharded_state_dict`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.modules import registered
from ..core.composed_view import see
from ..core.layout import Leaf, Leaves
from ..core.road import uncast
from ..ranks.dtensor_parameters import is_distributed
from .boundary import ModelBoundary
from .forward_hooks import Hook


def hook_seen_state_dicts(
    model: nn.Module, boundary: ModelBoundary, params: Leaves, undo: list[Callable[[], object]]
) -> None:
    """Let the state dicts of a model give and take what it sees, where that is not what its parameters are.

    Args:
        model: of whole parameters.
        boundary: gives forward the views of its parameters.
        params: they by path.
        undo: is given what undoes it.
    """
    views = [view for view in boundary.pipe.road.at_use if view.renumbers]
    leaves = {id(params[x.path]): x for x in boundary.pipe.layout.leaves if any([view.changes(x) for view in views])}
    if boundary.units is not None or not leaves:
        return
    for module in model.modules():
        own = {n: leaves[id(p)] for n, p in dict.items(registered(module)[0]) if id(p) in leaves}
        if own:
            give, take = (Hook(functools.partial(fn, boundary, own)) for fn in (_give, _take))
            undo.append(module.register_state_dict_post_hook(give).remove)
            undo.append(module.register_load_state_dict_pre_hook(take).remove)


def _give(
    boundary: ModelBoundary, own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    views = uncast(boundary.pipe.road)
    _replace(boundary, own, state, prefix, lambda x, leaf: see(views, x, leaf).detach())


def _take(
    boundary: ModelBoundary, own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    _replace(boundary, own, state, prefix, boundary.pipe.road.kept)


@torch.no_grad()
def _replace(
    boundary: ModelBoundary,
    own: dict[str, Leaf],
    state: dict[str, Any],
    prefix: str,
    fn: Callable[[Tensor, Leaf], Tensor],
) -> None:
    """`fn` of the entries of these leaves, in the place of each; of parameters themselves (`keep_vars=True`) none."""
    if boundary.views.suspended:
        return
    for name, leaf in own.items():
        x, form = state.get(prefix + name), boundary.views.forms.get(leaf.path)
        if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or not x.is_floating_point():
            continue
        if form is None:
            if x.shape == leaf.shape:
                state[prefix + name] = fn(x, leaf)
        elif is_distributed(x) and x.shape == form.shape:
            # torch takes a plain tensor for a DTensor nowhere.
            state[prefix + name] = form.wrap(fn(form.local(x), leaf))
