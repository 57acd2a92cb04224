"""Containers of parameters that forward builds, such as a slice of an `nn.ParameterList`: they hold views too.

torch's containers make an `nn.Parameter` of every tensor that is none. Made of a view it would be a leaf on the view's
memory, and what is computed with it would bring the model's parameter no gradient. torch asks a hook what to register.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from .._compat.compiler import uncompiled
from .._compat.modules import put_into_container
from .._errors import explain
from .boundary import ModelBoundary
from .parameter_views import address

CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class ContainerHook:
    """The hook on the registration of parameters in any module, of one attached model."""

    def __init__(self, boundary: ModelBoundary):
        # torch keeps the hook as long as the process lives, or until the model is detached.
        self.boundary = weakref.ref(boundary)

    @uncompiled
    def __call__(self, module: nn.Module, name: str, param: Any) -> Any:
        """The view to register in the place of a parameter that was made of it; `None` for any other parameter."""
        boundary = self.boundary()
        if boundary is None or not isinstance(module, CONTAINERS) or not isinstance(param, Tensor):
            return None
        if not boundary.calls() and not boundary.repeating():
            return None
        found = _view_of(boundary, param)
        if found is None:
            return None
        given = put_into_container()
        if given is None:
            raise _refused(module, name)
        # Given a detached tensor on the same memory, the container has a leaf, as in plain PyTorch.
        return found if any(x is found for x in given) else None


def hook_containers(boundary: ModelBoundary) -> None:
    """Have containers that forward builds hold views; `boundary.undo` undoes it."""
    handle = nn.modules.module.register_module_parameter_registration_hook(ContainerHook(boundary))
    hooks = handle.hooks_dict_ref() or {}
    # Those of models that went without `detach`. A finalizer could run while torch walks the hooks.
    for key, hook in list(hooks.items()):
        if isinstance(hook, ContainerHook) and hook.boundary() is None:
            del hooks[key]
    boundary.undo.append(handle.remove)


def _view_of(boundary: ModelBoundary, param: Tensor) -> Tensor | None:
    """The live view on whose memory a new parameter is."""
    here = address(param)
    for view, stored in boundary.local.last_views.values():
        x = view()
        if x is not None and stored is not param and x is not param and x.shape == param.shape and address(x) == here:
            return x
    return None


def _refused(module: nn.Module, name: str) -> RuntimeError:
    kind = type(module).__name__
    return RuntimeError(
        explain(
            f"a parameter, or what shares its memory, was put into an nn.{kind} in forward, at {name!r}",
            "there it is a view of the parameter, of which the container would make a new parameter without a gradient",
            "a list or dict instead, rows = [*self.rows, self.extra]; or the container is filled before zf.attach",
        )
    )
