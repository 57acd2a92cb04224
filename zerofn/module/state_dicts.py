"""`model.state_dict()` and `load_state_dict` of an attached model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.tensors import registered
from .._errors import bad_leaves
from ..core.bucketed_views import uncast
from ..core.layout import Leaf, Leaves, rows_between, span
from ..core.pipeline import Pipeline
from ..core.view import see
from ..ranks.dtensor import as_dtensors, as_local, in_full, is_distributed, of_this_rank
from ..sharded.gather_on_use import Units
from ..sharded.opaque import Opaque, opaque, plain
from .boundary import ModelBoundary
from .forward_hooks import Hook

# ----------------------------------------------------------------------------------------------------------------------
# State dicts of a sharded model have its DTensors. torch's DCP saves and loads them in place, and full tensors can be
# loaded: each rank takes its rows.
#
# In a file that one rank writes they are useless, and who finds that out has lost the model, so pickling them is
# refused. Gathering instead would hang the many programs that save on one rank alone. The functions of
# `torch.distributed.checkpoint.state_dict`, which every rank calls, get what the model sees, where the user's view lies
# between the stored and the seen parameter.


# The module of `get_model_state_dict`, which may not be loaded.
DCP_STATE_DICT = "torch.distributed.checkpoint.state_dict"


def _calling_function() -> str:
    """The name of the function of torch's DCP that asks for a state dict; `""` if none does."""
    frame = sys._getframe(2) if DCP_STATE_DICT in sys.modules else None
    name = ""
    while frame is not None:
        # If there are several, the outermost: the user called that one.
        if frame.f_globals.get("__name__") == DCP_STATE_DICT:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


class SeenRows:
    """Converts the entries of one model's state dicts, where the model computes with other numbers than are stored.

    Args:
        pipe: with a `shard`.
    """

    def __init__(self, pipe: Pipeline):
        assert pipe.gathering is not None
        self.wire, self.road = pipe.gathering, pipe.road

    def renumbers(self, leaf: Leaf) -> bool:
        """Whether what is stored of a leaf are not the numbers that the model computes with."""
        return any([view.renumbers and view.changes(leaf) for view in uncast(self.road)])

    def to_dtensor(self, mine: Tensor, leaf: Leaf) -> Tensor:
        """What the model computes with as a DTensor, of what this rank stores; all ranks call it."""
        whole = see(uncast(self.road), mine, leaf)
        if not leaf.shape:
            # A number has no rows, and torch takes a plain tensor for the same on all ranks.
            return whole
        low, high = span(leaf.shape, self.wire.group.rank, self.wire.group.size)
        rows = rows_between(leaf.shape, low, high)
        assert rows is not None
        mine = whole.reshape(-1)[low:high].clone()
        return as_dtensors({leaf.path: (mine, rows, tuple(leaf.shape))}, self.wire.group)[leaf.path]


def hook_state_dicts(
    model: nn.Module,
    params: Leaves,
    pipe: Pipeline,
    units: Units,
    undo: list[Callable[[], object]],
) -> None:
    """Make state dicts of a sharded model return DTensors, inside `opt.gathered()` full tensors; and load both.

    Args:
        model: its parameters are DTensors.
        params: its parameters by path.
        pipe: its pipeline.
        units: says whether parameters are full now, inside `opt.gathered()`.
        undo: gets functions that remove the hooks.
    """
    seen = SeenRows(pipe)
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}

    def give(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        caller = _calling_function()
        for name, leaf in own.items():
            x = state.get(prefix + name)
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
                continue
            if units.suspended:
                state[prefix + name] = as_local(x)
            elif caller and (not leaf.shape or type(x) is Opaque or seen.renumbers(leaf)):
                state[prefix + name] = seen.to_dtensor(_stored(x), leaf)
            elif caller and type(x).__module__ == FACES:
                # Each rank may save its own with torch.save.
                from ..sharded.face import as_torchs

                state[prefix + name] = as_torchs(x)

    def take(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, told: Any, *_: Any) -> None:
        # With `assign=True` torch would put other parameters in. Their values are taken instead.
        told.pop("assign_to_params_buffers", None)
        for name, leaf in {} if units.suspended else own.items():
            x = state.get(prefix + name)
            if not isinstance(x, Tensor) or type(x) is Opaque or x.shape != leaf.shape:
                continue
            if is_distributed(x) and type(x).__module__ != FACES:
                here = of_this_rank(x, [seen.wire.group])
                if isinstance(here, str):
                    right = "with opt.gathered(): torch.save(model.state_dict(), f) on one rank, and that file on "
                    right += "every\nrank; torch.distributed.checkpoint.save and load; or zf.save(directory, opt)"
                    raise ValueError(bad_leaves("model.load_state_dict of a sharded model", [(leaf.path, here)], right))
                state[prefix + name] = x = here
            if is_distributed(params[leaf.path]) and not seen.renumbers(leaf):
                continue
            if type(x).__module__ == FACES:
                continue
            kept = seen.road.kept(in_full(x.detach()), leaf)
            if is_distributed(params[leaf.path]):
                state[prefix + name] = _as_entry(params[leaf.path], kept)
                continue
            state[prefix + name] = opaque(kept, f"an entry of the state dict of the parameter {leaf.path}", leaf.shape)

    for module in model.modules():
        own = {n: leaves[id(p)] for n, p in dict.items(registered(module)[0]) if id(p) in leaves}
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(functools.partial(give, own))).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(functools.partial(take, own))).remove)


# The module of DTensors that stand for sharded parameters, which may not be loaded.
FACES = "zerofn.sharded.face"


def _as_entry(p: Any, mine: Tensor) -> Tensor:
    """What this rank stores, flat, as an entry for a parameter that is a DTensor."""
    from ..sharded.face import wrap

    return wrap(mine, p.of._replace(how="an entry of a state dict", whole=None))


def _stored(x: Any) -> Tensor:
    """What this rank stores of an entry, flat."""
    if is_distributed(x):
        from ..sharded.face import local_shard

        return local_shard(x.detach())
    return plain(x).detach()


# ----------------------------------------------------------------------------------------------------------------------
# State dicts of a model that sees its parameters through the user's views have what the model computes with.
#
# The model's parameters are the stored ones. `model.state_dict()` has copies of the seen ones, and `load_state_dict`
# passes its values through `store`. So a file has the same numbers at every stage and in a plain model. Sharded
# parameters have their own functions, above.


def hook_seen_state_dicts(
    model: nn.Module, boundary: ModelBoundary, params: Leaves, undo: list[Callable[[], object]]
) -> None:
    """Make state dicts of a model return and load what it computes with, where its parameters are other numbers.

    Args:
        model: a model with full parameters.
        boundary: gives forward the views of its parameters.
        params: its parameters by path.
        undo: gets functions that remove the hooks.
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
    """Replace the entries of these leaves by `fn` of each; with `keep_vars=True` entries stay the parameters."""
    if boundary.views.suspended:
        return
    for name, leaf in own.items():
        x = state.get(prefix + name)
        if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or not x.is_floating_point():
            continue
        if x.shape == leaf.shape:
            state[prefix + name] = fn(x, leaf)
