"""Backward hooks on modules inside of a scaled model, which would see cotangents multiplied by the loss scale.

They are refused, since a clamp, a threshold or a statistic of a scaled number is wrong in silence. To give them true
ones would take a hook of ours before theirs and one after, which torch has for gradients of inputs and not for those
of outputs; and in fp16 true ones are zeros now and then, which is why there is a scale. Hooks on the model itself see
what is outside.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from .._compat.modules import backward_hooks
from .._errors import bad_leaves


def check_inner_hooks(model: nn.Module) -> None:
    """At attach: name every one there is.

    Raises:
        ValueError: a module inside of the model has a backward hook.
    """
    found = [(name, hooks) for name, m in model.named_modules() if m is not model and (hooks := backward_hooks(m))]
    if found:
        raise ValueError(_message([(name, ", ".join(hooks)) for name, hooks in found]))


def check_hooks_of_call(model: nn.Module | None, module: nn.Module, outermost: bool, args: tuple) -> None:
    """At a call of a module that has some: of an outermost one the outputs are true, and the inputs are not.

    Args:
        model: the attached one.
        module: is called.
        outermost: whether by the user.
        args: what it is called with.

    Raises:
        RuntimeError: they would see cotangents of the inside.
    """
    hooks = backward_hooks(module)
    if outermost and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
        hooks = [h for h in hooks if h == "register_backward_hook"]
    elif outermost:
        hooks = [h for h in hooks if h != "register_full_backward_pre_hook"]
    if hooks and torch.is_grad_enabled():
        _refuse(model, module, hooks)


def _refuse(model: nn.Module | None, module: nn.Module, hooks: list[str]) -> NoReturn:
    names = [name for name, m in model.named_modules() if m is module] if model is not None else []
    raise RuntimeError(_message([(names[0] if names else type(module).__name__, ", ".join(hooks))]))


def _message(found: list[tuple[str, str]]) -> str:
    return bad_leaves(
        "backward hooks on modules of a model under scale_loss: there cotangents are multiplied by the loss scale, "
        "and whatever a hook reads, clamps or replaces would be wrong",
        found,
        "no scale_loss: bf16 needs none, zf.precision(param_dtype=torch.bfloat16);\n         or a hook on a "
        "parameter or on an output of the model, which see true gradients; or p.grad and opt.metrics after backward",
    )
