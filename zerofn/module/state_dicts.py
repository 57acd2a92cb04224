"""`model.state_dict()` and `load_state_dict` of an attached model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.tensors import registered
from .._errors import bad_leaves, explain
from ..core.bucketed_views import spans_by_rank, uncast
from ..core.layout import Leaf, Leaves, cut_by_rows, rows_between, span
from ..core.pipeline import Pipeline
from ..core.view import see
from ..ranks.dtensor import Form, as_dtensors, as_local, in_full, is_distributed, mesh_of, of_this_rank
from ..sharded.gather_on_use import Units
from ..sharded.parameter import Origin, Part, Piece, part_of
from .boundary import ModelBoundary
from .forward_hooks import Hook

# ----------------------------------------------------------------------------------------------------------------------
# State dicts of a sharded model have guarded shards. torch's DCP gets DTensors, and full tensors can be loaded.
#
# The tensors of `model.state_dict()` are this rank's flat shards. They serve within the run (the best weights so far,
# put back by `load_state_dict`). In a file they are useless, and who finds that out has lost the model, so saving them
# is refused. Gathering instead would hang the many programs that save on one rank alone. Full tensors can be loaded:
# each rank takes its shard. The functions of `torch.distributed.checkpoint.state_dict`, which every rank calls, get
# DTensors of the full shapes, sharded by rows, of what the model sees. A leaf is gathered first where ranks have other
# rows than torch would give them, or where the user's view lies between the stored and the seen parameter.


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


class StateDictParts:
    """The entries of one model's state dicts.

    Args:
        pipe: with a `shard`.
        forms: by path, the DTensor that a parameter was before it was attached.
        pieces: by path, this rank's range of the leaf.
    """

    def __init__(self, pipe: Pipeline, forms: Mapping[str, Form], pieces: Mapping[str, tuple[Piece, ...]]):
        assert pipe.gathering is not None
        self.wire, self.road = pipe.gathering, pipe.road
        self.forms, self.pieces = forms, pieces

    def guarded(self, part: Tensor, leaf: Leaf) -> Part:
        """A shard that refuses to be saved as if it were the full tensor."""
        form = self.forms.get(leaf.path)
        pieces, shape = (self.pieces[leaf.path], leaf.shape) if form is None else ((), form.shape)
        return part_of(part, Origin("a part in the sharded model's state_dict()", leaf.path, False, pieces, shape))

    def to_dtensor(self, part: Tensor, leaf: Leaf, caller: str) -> Tensor:
        """A shard as a DTensor, on the same memory if ranks have the rows that torch would give them."""
        if leaf.within is not None and leaf.within.cut:
            why = f"{leaf.path} is cut over other ranks besides, and this rank has a flat part of its part"
            right = f"with opt.gathered(): {caller}(...), on every rank, or zf.save(directory, opt)"
            raise RuntimeError(explain(f"{caller} of a sharded model that is itself cut over ranks", why, right))
        mine, group = part.as_subclass(Tensor).detach(), self.wire.group
        if self._cut_alike(leaf):
            low, high = self.wire.span(leaf)
        else:
            whole = see(uncast(self.road), mine, leaf)
            if not leaf.shape:
                # A number has no rows, and torch takes a plain tensor for the same on all ranks.
                return whole
            # torch's chunks of rows: of a leaf of few rows some ranks have none.
            each = -(-leaf.shape[0] // group.size) * leaf.shape[1:].numel()
            low, high = (min(i * each, leaf.numel) for i in (group.rank, group.rank + 1))
            mine = whole.reshape(-1)[low:high].clone()
        rows = rows_between(leaf.shape, low, high)
        assert rows is not None
        return as_dtensors({leaf.path: (mine, rows, tuple(leaf.shape))}, group)[leaf.path]

    def from_full(self, given: Tensor, leaf: Leaf) -> Part:
        """This rank's shard of a full tensor or a DTensor."""
        form, group = self.forms.get(leaf.path), self.wire.group
        if is_distributed(given):
            here = of_this_rank(given, [group])
            if isinstance(here, str):
                right = "with opt.gathered(): torch.save(model.state_dict(), f) on one rank, and that file on every\n"
                right += "rank; torch.distributed.checkpoint.save and load; or zf.save(directory, opt)"
                raise ValueError(bad_leaves("model.load_state_dict of a sharded model", [(leaf.path, here)], right))
            given = here
        full = given.detach() if form is None else form.local(given.detach())
        if mesh_of(full) == group.ranks and self._cut_alike(leaf):
            return self.guarded(as_local(full).reshape(-1), leaf)
        return self.guarded(self.road.kept(in_full(full), leaf), leaf)

    def _cut_alike(self, leaf: Leaf) -> bool:
        """Whether every rank has the rows that torch would give it, as the model sees them; equal on all ranks."""
        if any([view.renumbers and view.changes(leaf) for view in uncast(self.road)]):
            return False
        size = self.wire.group.size
        chunks = [span(leaf.shape, rank, size) for rank in range(size)]
        return cut_by_rows(leaf.shape, size) and list(spans_by_rank([self.wire], leaf)) == chunks


def hook_state_dicts(
    model: nn.Module,
    params: Leaves,
    pipe: Pipeline,
    units: Units,
    forms: Mapping[str, Form],
    pieces: Mapping[str, tuple[Piece, ...]],
    undo: list[Callable[[], object]],
) -> None:
    """Make state dicts of a sharded model return guarded shards, and load full tensors.

    Args:
        model: its parameters are this rank's shards.
        params: its parameters by path.
        pipe: its pipeline.
        units: says whether parameters are full now, inside `opt.gathered()`.
        forms: by path, the DTensor that a parameter was before it was attached.
        pieces: by path, this rank's range of the leaf.
        undo: gets functions that remove the hooks.
    """
    parts = StateDictParts(pipe, forms, pieces)
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}

    def give(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if units.suspended:
            return
        caller = _calling_function()
        for name, leaf in own.items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor):
                state[prefix + name] = parts.to_dtensor(x, leaf, caller) if caller else parts.guarded(x, leaf)

    def take(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, leaf in {} if units.suspended else own.items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor) and not isinstance(x, Part) and x.shape == torch.Size((leaf.within or leaf).shape):
                state[prefix + name] = parts.from_full(x, leaf)

    for module in model.modules():
        own = {n: leaves[id(p)] for n, p in dict.items(registered(module)[0]) if id(p) in leaves}
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(functools.partial(give, own))).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(functools.partial(take, own))).remove)


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
        x, form = state.get(prefix + name), boundary.views.forms.get(leaf.path)
        if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or not x.is_floating_point():
            continue
        if form is None:
            if x.shape == leaf.shape:
                state[prefix + name] = fn(x, leaf)
        elif is_distributed(x) and x.shape == form.shape:
            # torch nowhere accepts a plain tensor for a DTensor.
            state[prefix + name] = form.wrap(fn(form.local(x), leaf))
