"""Refusal of backward hooks on modules inside of a scaled model, whose cotangents have the loss scale in them.

A clamp, a threshold or a statistic of a scaled number is wrong in silence. To give true gradients to the hooks would
take a hook of ours before theirs and one after, which torch has for gradients of inputs and not for those of outputs;
and in fp16 true gradients underflow, which is why there is a scale. Hooks on the model itself see true gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._compat.modules import backward_hooks
from .._errors import bad_leaves
from ..core.wrapper_names import modules_of


def check_inner_hooks(model: nn.Module) -> None:
    """Refuse all that there are when the model is attached.

    Raises:
        ValueError: a module inside of the model has a backward hook.
    """
    found = [(name, hooks) for name, m in modules_of(model) if m is not model and (hooks := backward_hooks(m))]
    if found:
        raise ValueError(_message([(name, ", ".join(hooks)) for name, hooks in found]))


def check_hooks_of_call(model: nn.Module | None, module: nn.Module, outermost: bool, args: tuple) -> None:
    """Refuse the hooks of a module that is called, if they would be given cotangents of the inside.

    Args:
        model: the attached one.
        module: is called.
        outermost: whether by the user: then cotangents of its outputs are true, and those of its inputs are not.
        args: what it is called with.

    Raises:
        RuntimeError: there is such a hook.
    """
    hooks = backward_hooks(module)
    if not hooks or not torch.is_grad_enabled():
        return
    if outermost and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
        hooks = [h for h in hooks if h == "register_backward_hook"]
    elif outermost:
        hooks = [h for h in hooks if h != "register_full_backward_pre_hook"]
    if hooks:
        names = [name for name, m in modules_of(model) if m is module] if model is not None else []
        raise RuntimeError(_message([(names[0] if names else type(module).__name__, ", ".join(hooks))]))


def _message(found: list[tuple[str, str]]) -> str:
    return bad_leaves(
        "backward hooks on modules of a model under scale_loss: there cotangents are multiplied by the loss scale, "
        "and whatever a hook reads, clamps or replaces would be wrong",
        found,
        "no scale_loss: bf16 needs none, zf.precision(param_dtype=torch.bfloat16);\n         or a hook on a "
        "parameter or on an output of the model, which see true gradients; or p.grad and opt.metrics after backward",
    )
