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
from ..core.tree import Leaf
from ..sharded.mixing import check_beside_part, pointwise
from .forward_hooks import Hook

# Where `get_model_state_dict` lives, of which whoever does not use it need not load.
BY_OPTIONS = "torch.distributed.checkpoint.state_dict"
# By which torch.save, safetensors and NumPy come at what a tensor holds.
SAVING = frozenset({"__reduce_ex__", "__array__", "data_ptr", "numpy", "storage", "untyped_storage"})


class Part(Tensor):
    """A part of a parameter, or a copy of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.__name__ in SAVING:
            raise RuntimeError(
                explain(
                    "saving the state_dict() of an attached sharded model",
                    "under shard its tensors are this rank's flat parts",
                    "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
                    "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from",
                )
            )
        with torch.DisableTorchFunctionSubclass():
            if pointwise(func.__name__):
                part = next((x for x in args if isinstance(x, Part)), None)
                if part is not None:
                    check_beside_part(func.__name__, list(args), part, "in a state_dict()")
            if func.__name__ == "__deepcopy__":
                return args[0].clone().as_subclass(cls)
            out = func(*args, **(kwargs or {}))
        # A copy on the CPU, or in another dtype, is no more of use.
        copied = type(out) is Tensor and isinstance(args[0], Part) and out.shape == args[0].shape
        return out.as_subclass(cls) if copied else out


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
            if type(x) is Tensor:
                state[prefix + name] = x.as_subclass(Part)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, leaf in {} if is_whole() else names[module].items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor) and not isinstance(x, Part) and x.shape == torch.Size(leaf.shape):
                state[prefix + name] = kept(x.detach(), leaf)

    names: dict[nn.Module, dict[str, Leaf]] = {
        module: {n: leaves[id(p)] for n, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        for module in model.modules()
    }
    undo: list[Callable[[], None]] = []
    for module, own in names.items():
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(give)).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(take)).remove)
    return undo
