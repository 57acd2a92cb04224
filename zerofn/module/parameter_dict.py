"""A module's dict of parameters that gives views of them while the model is being called.

`module.weight` is looked up in the module's dict of parameters. In place of that dict stands one that
gives, inside a call of the attached model, the differentiable view of the stored parameter: cast,
unscaled on the way back. Everything that walks the dict outside of a call (`parameters()`, `state_dict()`,
`to()`) still finds the stored ones. Swapping the values for the time of a call instead would miss
recomputation by activation checkpointing, which happens in backward, after the call; swapping the module's
class would break pickle.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .._compat.compiler import uncompiled
from .boundary import Sight


class SeenParameters(dict):
    """A module's dict of parameters whose items are views while the model is being called."""

    def __init__(self, parameters: dict[str, Any], paths: dict[str, str], sight: Sight, beside: torch.dtype | None):
        super().__init__(parameters)
        self.paths = paths
        self.sight = sight
        # The dtype they must have in the module's kernel: that of its buffers, which nobody casts.
        self.beside = beside
        # Put here by the model during a call (torch.func.functional_call): of the inside already.
        self.inner: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        stored = super().__getitem__(name)
        if stored is None or name not in self.paths or name in self.inner:
            return stored
        return _seen(self, name, stored)

    def __setitem__(self, name: str, value: Any) -> None:
        self.inner.discard(name)
        if name in self.paths and self._walked_by_model():
            origin = self.sight.views.origin(self.paths[name], value)
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
        # Lazily, since whoever asks for the first parameter's device does not want all views.
        return ((n, self[n]) for n in list(self)) if self._walked_by_model() else super().items()

    def values(self) -> Any:
        return (self[n] for n in list(self)) if self._walked_by_model() else super().values()

    def _walked_by_model(self) -> bool:
        # The compiler looks at modules too, in the middle of their calls; and hooks of the user's do, in
        # the middle of a backward, where nothing but what is repeated has gradients enabled.
        if self.sight.local.calls:
            return not torch.compiler.is_compiling()
        return torch.is_grad_enabled() and self.sight.repeating()

    def __reduce__(self):
        # A copy of an attached model is a plain module.
        return dict, (dict(self),)


@uncompiled
def _seen(parameters: SeenParameters, name: str, stored: Tensor) -> Tensor:
    sight = parameters.sight
    if not sight.active():
        return stored
    path = parameters.paths[name]
    seen = sight.views.look(path, stored)
    if parameters.beside not in (None, seen.dtype):
        seen = seen.to(parameters.beside)
    sight.local.given[path] = (weakref.ref(seen), stored)
    return seen
