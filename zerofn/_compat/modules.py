"""Private attributes of modules, optimizers and their wrappers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The code of `module(...)`, by which the frame of a call is found.
CALL = nn.Module.__call__.__code__


def frame_of_call() -> Any:
    """The frame of the innermost `module(...)` that is under way."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    return frame


def has_ended(frame: Any) -> bool:
    """Whether a call has returned or raised; nothing of it is needed any more then."""
    try:
        frame.clear()
    except RuntimeError:
        # Python clears no frame that is executing.
        return False
    return True


# The code by which containers make an `nn.Parameter` of a tensor, and the file of their other methods.
_PUTTING = {nn.ParameterList.__setitem__.__code__, nn.ParameterDict.__setitem__.__code__}
_CONTAINERS = nn.ParameterList.__setitem__.__code__.co_filename

# The attribute of a model with names of parameters that DistributedDataParallel ignores.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"

Registered = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

# A module's own dicts of parameters, submodules and buffers.
registered: Callable[[nn.Module], Registered] = attrgetter("_parameters", "_modules", "_buffers")


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module's parameters, by torch's convention; private in some of torch's modules."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def put_into_container() -> list[Any] | None:
    """What the method that fills a container at this moment was given, up to one tuple deep; for registration hooks.

    The container itself has lost it: it goes on with the parameter that it made of it. `None` where no method of the
    container's does it, as in `module.rows[0] = x`, whose `x` nobody holds.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in _PUTTING:
        frame = frame.f_back
    frame = frame and frame.f_back
    if frame is None or frame.f_code.co_filename != _CONTAINERS:
        return None
    found = list(frame.f_locals.values())
    return [*found, *(x for several in found if isinstance(several, (tuple, list)) for x in several)]


def register_in(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Make `parameters` the dict in which the module has its own parameters."""
    vars(module)["_parameters"] = parameters


# The forward hooks of one module, in the order in which they run.
forward_hooks: Callable[[nn.Module], Any] = attrgetter("_forward_hooks")


def set_flat_weights(module: Any, weights: Callable[[list[str]], list[Any]], ref: Any) -> None:
    """Set the list of weights that the kernel of a recurrent module takes, given their names.

    `ref` takes the place of the weak references by which the module sees that weights were replaced.
    """
    names = module._flat_weights_names
    module._flat_weights = weights(names)
    module._flat_weight_refs = [ref] * len(names)


# The attribute of an optimizer with the hooks that run before (`pre`) or after (`post`) a method.
HOOKS_OF = {
    (what, when): f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}


class Wrapper(NamedTuple):
    """A class of modules that wrap another one, and the attribute in which they have it."""

    module: str
    name: str
    attribute: str


# By the modules that define them, which may not be loaded.
WRAPPERS = (
    Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"
    ),
    Wrapper("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    Wrapper("torch.nn.parallel", "DistributedDataParallel", "module"),
    Wrapper("torch.nn.parallel", "DataParallel", "module"),
)


def wrapper_attributes() -> Callable[[Any], str | None]:
    """The function that says in which attribute a wrapper has what it wraps; `None` of any other module."""
    loaded = [(getattr(sys.modules[w.module], w.name), w.attribute) for w in WRAPPERS if w.module in sys.modules]
    return lambda module: next((attribute for cls, attribute in loaded if isinstance(module, cls)), None)


def sharded_by_torch(model: nn.Module) -> list[str]:
    """The names of modules to which `torch.distributed.fsdp.fully_shard` was applied."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [name for name, x in model.named_modules() if isinstance(x, fsdp.FSDPModule)]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether `backward_hooks` has any: asked of each module in each call."""
    every = torch.nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or every._global_backward_hooks or every._global_backward_pre_hooks)


def backward_hooks(module: nn.Module) -> list[str]:
    """The functions by which the backward hooks of `module` were registered, those for all modules too."""
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


# The method by which `module.to`, `half`, `cuda` and the like convert parameters.
CONVERTING = torch.nn.Module._apply


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers in `model.state_dict()`, and parameters of integers, by name, with what wrappers add to it.

    The state dict itself would run hooks, which may rename or remove entries.
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
