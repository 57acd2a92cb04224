"""A module's dict of parameters that gives views of them while the model is being called.

`module.weight` is looked up in the module's dict of parameters. This dict takes its place. Inside a call of the
attached model it gives the differentiable view of the stored parameter: cast forward, unscaled backward. Whoever walks
it outside of a call (`parameters()`, `state_dict()`, `to()`) finds the stored parameters. To exchange the values for
the time of a call would miss what activation checkpointing recomputes in backward, after the call. To exchange the
module's class would break pickle.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import set_grad_mode
from .._compat.compiler import uncompiled
from .boundary import ModelBoundary


class ParameterViewDict(dict):
    """A module's dict of parameters whose items are views while the model is being called."""

    def __init__(
        self,
        parameters: dict[str, Any],
        paths: dict[str, str],
        boundary: ModelBoundary,
        beside: torch.dtype | None,
    ):
        super().__init__(parameters)
        self.paths = paths
        self.boundary = boundary
        # The dtype that the module's kernel needs them in: that of its buffers, which are not cast.
        self.beside = beside
        # Names of what the model puts here during a call (torch.func.functional_call), which needs no view.
        self.inner: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        stored = super().__getitem__(name)
        if stored is None or name not in self.paths or name in self.inner:
            return stored
        return _seen(self, name, stored)

    def __setitem__(self, name: str, value: Any) -> None:
        self.inner.discard(name)
        if name in self.paths and self._walked_by_model():
            origin = self.boundary.views.origin(self.paths[name], value)
            if origin is None:
                self.inner.add(name)
            else:
                value = origin
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        # Lazily: who asks for the first parameter's device needs one view.
        return ((n, self[n]) for n in list(self)) if self._walked_by_model() else super().items()

    def values(self) -> Any:
        return (self[n] for n in list(self)) if self._walked_by_model() else super().values()

    def _walked_by_model(self) -> bool:
        # Not by the compiler, which looks at modules in the middle of their calls. And not by a hook of the user's in a
        # backward: there gradients are enabled only in what a checkpoint repeats.
        if self.boundary.calls():
            return not torch.compiler.is_compiling()
        return torch.is_grad_enabled() and self.boundary.repeating()

    def __reduce__(self):
        # A copy of an attached model is a plain module.
        return dict, (dict(self),)


@uncompiled
def _seen(parameters: ParameterViewDict, name: str, stored: Tensor) -> Tensor:
    boundary = parameters.boundary
    local = boundary.local
    if not boundary.calls() and not boundary.repeating():
        # Asked by the user.
        return stored
    path = parameters.paths[name]
    mode = torch.is_grad_enabled()
    try:
        seen = boundary.views.get(path, stored)
    except BaseException:
        set_grad_mode(mode)
        raise
    if parameters.beside not in (None, seen.dtype):
        seen = seen.to(parameters.beside)
    local.last_views[path] = (weakref.ref(seen), stored)
    return seen
