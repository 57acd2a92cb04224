"""`model.state_dict()` of a sharded model: parts that are refused where they would be saved for the whole.

Its tensors are this rank's flat parts. They serve within the run (the best weights so far, put back by
`load_state_dict`), but a file of them is of no use to anybody, and whoever finds that out has lost the model. To
gather instead would hang the many programs that save on one rank alone. Full tensors can be loaded: each rank
takes its part. The functions of `torch.distributed.checkpoint.state_dict`, which every rank calls, are given
distributed tensors of the leaves' shapes, cut by rows; where ranks have other parts than torch would give them, of rows
that are gathered first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.modules import registered
from .._errors import explain
from ..core.layout import Leaf
from ..core.nested_sharding import spans_of_all
from ..core.pipeline import Pipeline
from ..core.row_sharding import cut_by_rows, rows_between, span
from ..ranks.dtensor_shards import as_distributed, as_local, in_full, mesh_of
from ..sharded.part import Part
from .forward_hooks import Hook

# Where `get_model_state_dict` lives, of which whoever does not use it need not load.
BY_OPTIONS = "torch.distributed.checkpoint.state_dict"


def _calling_function() -> str:
    """Which function of torch's asks for a state dict, to make distributed or whole tensors of it; or `""`."""
    frame = sys._getframe(2) if BY_OPTIONS in sys.modules else None
    name = ""
    while frame is not None:
        # Of several the outermost, which the user has called.
        if frame.f_globals.get("__name__") == BY_OPTIONS:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


class DTensorParts:
    """Parts of one model's parameters as torch's distributed tensors, and back.

    Args:
        pipe: with a `shard`.
    """

    def __init__(self, pipe: Pipeline):
        assert pipe.gathering is not None
        self.wire, self.road = pipe.gathering, pipe.road

    def of(self, part: Tensor, leaf: Leaf, caller: str) -> Tensor:
        """A part as a distributed tensor, over the same memory where ranks have the rows that torch would give them."""
        if leaf.within is not None and leaf.within.cut:
            why = f"{leaf.path} is cut over other ranks besides, and this rank has a flat part of its part"
            right = f"with opt.gathered(): {caller}(...), on every rank, or zf.save(directory, opt)"
            raise RuntimeError(explain(f"{caller} of a sharded model that is itself cut over ranks", why, right))
        if not self.road.exact:
            raise RuntimeError(
                explain(
                    f"{caller} of a sharded model whose parameters are seen through a view of one's own",
                    f"what this rank has of {leaf.path} is what is stored, and not what the model sees",
                    f"with opt.gathered(): {caller}(...), on every rank",
                )
            )
        mine, group = part.as_subclass(Tensor).detach(), self.wire.group
        if self._cut_alike(leaf):
            low, high = self.wire.span(leaf)
        else:
            whole = self.wire.view(mine, leaf)
            if not leaf.shape:
                # A number has no rows: torch takes what is no distributed tensor for the same on all ranks.
                return whole
            # By torch's chunks: of a leaf of few rows some ranks have none.
            each = -(-leaf.shape[0] // group.size) * leaf.shape[1:].numel()
            low, high = (min(i * each, leaf.numel) for i in (group.rank, group.rank + 1))
            mine = whole.reshape(-1)[low:high].clone()
        rows = rows_between(leaf.shape, low, high)
        assert rows is not None
        return as_distributed({leaf.path: (mine, rows, tuple(leaf.shape))}, group)[leaf.path]

    def part(self, given: Tensor, leaf: Leaf) -> Tensor:
        """What this rank keeps of a whole or a distributed tensor."""
        if mesh_of(given) == self.wire.group.ranks and self._cut_alike(leaf):
            return as_local(given).reshape(-1)
        return self.road.kept(in_full(given.detach()), leaf)

    def _cut_alike(self, leaf: Leaf) -> bool:
        """Whether every rank has the rows that torch would give it; the same answer on all."""
        size = self.wire.group.size
        chunks = [span(leaf.shape, rank, size) for rank in range(size)]
        return cut_by_rows(leaf.shape, size) and list(spans_of_all([self.wire], leaf)) == chunks


def hook_state_dicts(
    model: nn.Module,
    leaves: dict[int, Leaf],
    pipe: Pipeline,
    is_whole: Callable[[], bool],
    local: Callable[[Tensor, Leaf], Tensor],
    shown: Callable[[Tensor, Leaf], Tensor],
) -> list[Callable[[], None]]:
    """Let a sharded model give parts that say so, and take full tensors; what is returned undoes it.

    Args:
        model: its parameters are this rank's parts.
        leaves: `id(parameter)` to leaf.
        pipe: its pipeline.
        is_whole: whether the parameters are full ones for a while.
        local: of what is given for a leaf that the model itself has cut the part of this rank; else what is given.
        shown: a part of a leaf as one that says so.
    """

    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        caller = _calling_function() if names[module] and not is_whole() else ""
        for name, leaf in {} if is_whole() else names[module].items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor):
                state[prefix + name] = rows.of(x, leaf, caller) if caller else shown(x, leaf)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, leaf in {} if is_whole() else names[module].items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor) and not isinstance(x, Part) and x.shape == torch.Size((leaf.within or leaf).shape):
                state[prefix + name] = shown(rows.part(local(x.detach(), leaf), leaf), leaf)

    rows = DTensorParts(pipe)
    names: dict[nn.Module, dict[str, Leaf]] = {
        module: {n: leaves[id(p)] for n, p in dict.items(registered(module)[0]) if id(p) in leaves}
        for module in model.modules()
    }
    undo: list[Callable[[], None]] = []
    for module, own in names.items():
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(give)).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(take)).remove)
    return undo
