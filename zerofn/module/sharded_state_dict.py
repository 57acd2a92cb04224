"""`model.state_dict()` of a sharded model: parts that are refused where they would be saved for the whole.

Its tensors are this rank's flat parts. They serve within the run (the best weights so far, put back by
`load_state_dict`), but a file of them is of no use to anybody, and whoever finds that out has lost the model. To
gather instead would hang the many programs that save on one rank alone. Full tensors can be loaded: each rank
takes its part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import explain
from ..core.tree import Leaf, parameters_of
from ..sharded.part import STATE, Part, part_of
from .forward_hooks import Hook

# Where `get_model_state_dict` lives, of which whoever does not use it need not load.
BY_OPTIONS = "torch.distributed.checkpoint.state_dict"


def _check_not_in_full() -> None:
    """What torch.distributed.checkpoint asks for by an option, it would be given in parts."""
    asker: Any = sys.modules.get(BY_OPTIONS)
    frame = sys._getframe(2) if asker is not None else None
    while asker is not None and frame is not None:
        options = frame.f_locals.get("options") if frame.f_globals.get("__name__") == BY_OPTIONS else None
        if isinstance(options, asker.StateDictOptions) and getattr(options, "full_state_dict", False):
            raise RuntimeError(
                explain(
                    f"{frame.f_code.co_name}(..., options=StateDictOptions(full_state_dict=True)) of a sharded model",
                    "under shard its tensors are this rank's flat parts, which torch takes for the whole",
                    f"with opt.gathered(): {frame.f_code.co_name}(...), on every rank",
                )
            )
        frame = frame.f_back


def mark(
    model: nn.Module,
    leaves: dict[int, Leaf],
    kept: Callable[[Tensor, Leaf], Tensor],
    is_whole: Callable[[], bool],
) -> list[Callable[[], None]]:
    """Let a sharded model give parts that say so, and take full tensors; what is returned undoes it.

    Args:
        model: its parameters are this rank's parts.
        leaves: `id(parameter)` to leaf.
        kept: a full tensor to what this rank keeps of it.
        is_whole: whether the parameters are full ones for a while.
    """

    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if not is_whole() and names[module]:
            _check_not_in_full()
        for name in () if is_whole() else names[module]:
            x = state.get(prefix + name)
            if isinstance(x, Tensor):
                state[prefix + name] = part_of(x, STATE)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, leaf in {} if is_whole() else names[module].items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor) and not isinstance(x, Part) and x.shape == torch.Size(leaf.shape):
                state[prefix + name] = kept(x.detach(), leaf)

    names: dict[nn.Module, dict[str, Leaf]] = {
        module: {n: leaves[id(p)] for n, p in parameters_of(module, recurse=False).items()}
        for module in model.modules()
    }
    undo: list[Callable[[], None]] = []
    for module, own in names.items():
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(give)).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(take)).remove)
    return undo
