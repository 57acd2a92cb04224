"""Modules, optimizers and what wraps them: what they keep to themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# The code of every call of a module, by which its frame is found.
CALL = nn.Module.__call__.__code__

# Names of parameters in this attribute of a model are none of DistributedDataParallel's business.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"

# The function of `torch.distributed.checkpoint.state_dict` that asks for a state dict in order to load into it.
LOADS_STATES = "_load_optim_state_dict"
Registered = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

# A module's own dicts of parameters, submodules and buffers.
registered: Callable[[nn.Module], Registered] = attrgetter("_parameters", "_modules", "_buffers")


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module its first values again, by torch's convention; some of torch's own keep it to themselves."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def register_in(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Let `parameters` be the module's own dict of them."""
    vars(module)["_parameters"] = parameters


# The forward hooks of one module, in the order in which they run.
forward_hooks: Callable[[nn.Module], Any] = attrgetter("_forward_hooks")


def set_flat_weights(module: Any, weights: Callable[[list[str]], list[Any]], ref: Any) -> None:
    """Give a recurrent module the list of weights that its kernel takes, from their names.

    `ref` stands for what it compares the list with, to see that the weights are others.
    """
    names = module._flat_weights_names
    module._flat_weights = weights(names)
    module._flat_weight_refs = [ref] * len(names)


# In which attribute an optimizer registers hooks that run before (`pre`) or after (`post`) its methods.
HOOKS_OF = {
    (what, when): f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}


def sharded_by_torch(model: nn.Module) -> list[str]:
    """The modules that `torch.distributed.fsdp.fully_shard` cares for, by name; none where nobody has called it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [name for name, x in model.named_modules() if isinstance(x, fsdp.FSDPModule)]


def backward_hooks(module: nn.Module) -> list[str]:
    """What registered the backward hooks that a call of `module` would run: its own and those of all modules."""
    every = torch.nn.modules.module
    found = []
    if module._backward_pre_hooks or every._global_backward_pre_hooks:
        found.append("register_full_backward_pre_hook")
    if module._backward_hooks:
        found.append("register_full_backward_hook" if module._is_full_backward_hook else "register_backward_hook")
    if every._global_backward_hooks:
        full = every._global_is_full_backward_hook
        found.append("register_module_full_backward_hook" if full else "register_backward_hook")
    return found


# The method that `module.to` and its kin end in.
CONVERTING = torch.nn.Module._apply


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that `model.state_dict()` has, and parameters of integers, which are like them.

    To ask it would run hooks, which may rename or leave out.
    """
    kept: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return {
        f"{prefix}.{name}" if prefix else name: x
        for prefix, module in model.named_modules(remove_duplicate=False)
        for named in (module.named_parameters(**kept), module.named_buffers(**kept))
        for name, x in named
        if name not in module._non_persistent_buffers_set
        and not (isinstance(x, torch.nn.Parameter) and (x.dtype.is_floating_point or x.dtype.is_complex))
    }
