"""How an attached model sees its parameters: at the moment of use, inside its own calls only.

`module.weight` is looked up in the module's dict of parameters. In place of that dict stands one that
gives, inside a call of the attached model, the differentiable view of the stored parameter: cast,
unscaled on the way back. Everything that walks the dict (`parameters()`, `state_dict()`, `to()`) still finds
the stored ones. Swapping the values for the time of a call instead would miss recomputation by activation
checkpointing, which happens in backward, after the call; swapping the module's class would break pickle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ._boundary import EntryMap, ExitMap, LeafView, LinearMap, differentiable
from ._compat import in_backward
from ._containers import map_tensors
from ._pipeline import Pipeline
from ._units import Units


class Sight:
    """Whether parameters are being seen by the model now, and through which maps.

    One for each attached model. The loss scale is read when backward runs, so that both sides of the
    boundary use the same one even if a step changed it in between.
    """

    def __init__(self, pipe: Pipeline, scale: Callable[[], Tensor | None], units: Units | None):
        self.pipe = pipe
        self.scale = scale
        self.units = units
        # One entry for each call under way: the module's id, whether its caller is outside the model,
        # and what is to be undone when it ends.
        self.calls: list[tuple[int, bool, ExitStack]] = []
        self.seen: dict[tuple, Tensor] = {}
        # Modules whose last call came from inside another of the model's. Recomputation repeats such
        # a call from backward, where nothing else tells it from a call by the user.
        self.nested: set[int] = set()

    def active(self) -> bool:
        """Whether the model itself is asking: during its calls, and in recomputation during backward."""
        return bool(self.calls) or in_backward()

    def look(self, path: str, stored: Tensor) -> Tensor:
        """The view of a parameter. One for each call of the model, so that a parameter used twice has one cotangent."""
        if self.units is not None:
            return self.units.look(path, keep=bool(self.calls))
        view = self.pipe.views_at_use[path]
        if not self.calls:
            return self._through(view, stored)
        key = (path, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = self._through(view, stored)
        return found

    def _through(self, view: LeafView, stored: Tensor) -> Tensor:
        if self.pipe.scale is None and not view.stages:
            return stored
        # The scale is read inside the maps rather than saved: checkpointing counts saved tensors.
        return LinearMap.apply(
            stored, None, lambda x, _: view.forth(x, None), lambda g, _: view.back(g, self.scale())
        )

    def forget(self) -> None:
        """The outermost call has ended: its views belong to its graph alone."""
        self.seen.clear()
        if self.units is not None:
            self.units.end_of_call()

    def enter(self, x: Tensor) -> Tensor:
        """An input on its way in: cast to the compute dtype."""
        dtype = self.pipe.cast.param_dtype or self.pipe.cast.store_dtype
        if not x.is_floating_point() or (dtype in (None, x.dtype) and not (self.scaled and differentiable(x))):
            return x
        edge = EntryMap(dtype, x.dtype)
        return LinearMap.apply(x, None, edge.forth, lambda g, _: edge.back(g, self.scale()))

    def leave(self, y: Tensor) -> Tensor:
        """An output on its way out."""
        dtype = self.pipe.cast.output_dtype
        if not y.is_floating_point() or (dtype in (None, y.dtype) and not (self.scaled and differentiable(y))):
            return y
        edge = ExitMap(dtype, y.dtype)
        return LinearMap.apply(y, None, edge.forth, lambda g, _: edge.back(g, self.scale()))

    @property
    def scaled(self) -> bool:
        return self.pipe.scale is not None


class SeenParameters(dict):
    """A module's dict of parameters whose items are views while the model is being called."""

    def __init__(self, parameters: dict[str, Any], paths: dict[str, str], sight: Sight):
        super().__init__(parameters)
        self.paths = paths
        self.sight = sight

    def __getitem__(self, name: str) -> Any:
        stored = super().__getitem__(name)
        if stored is None or name not in self.paths or not self.sight.active():
            return stored
        return self.sight.look(self.paths[name], stored)

    def __reduce__(self):
        # A copy of an attached model is a plain module.
        return dict, (dict(self),)


class _Hook:
    """A hook that a copied or pickled module carries along without effect."""

    def __init__(self, fn: Callable[..., Any] | None):
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        return None if self.fn is None else self.fn(*args)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return _Hook(None)

    def __reduce__(self):
        return _Hook, (None,)


def needs_sight(pipe: Pipeline) -> bool:
    """Whether the model differs from its plain self at all: without a cast or a scale nothing is hooked."""
    return pipe.scale is not None or pipe.cast.output_dtype is not None or any(v.stages for v in pipe.views_at_use.values())


def install(model: nn.Module, sight: Sight, paths: dict[int, str]) -> Callable[[], None]:
    """Make `model` see its parameters through `sight`; what is returned undoes it.

    Args:
        model: its parameters are the resident ones.
        sight: how they are seen.
        paths: `id(parameter)` to path.
    """
    undo: list[Callable[[], Any]] = []
    for module in model.modules():
        plain = module._parameters
        names = {n: paths[id(p)] for n, p in plain.items() if p is not None}
        if names:
            module.__dict__["_parameters"] = SeenParameters(plain, names, sight)
            undo.append(functools.partial(_restore, module, plain))
        pre = _Hook(functools.partial(_before, sight, module is model))
        post = _Hook(functools.partial(_after, sight))
        undo.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True).remove)
        undo.append(module.register_forward_hook(post, always_call=True).remove)

    def uninstall() -> None:
        for action in reversed(undo):
            action()

    return uninstall


def _restore(module: nn.Module, plain: dict) -> None:
    plain.clear()
    plain.update(dict(module._parameters.items()))
    module.__dict__["_parameters"] = plain


def _before(sight: Sight, is_root: bool, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
    """Note the call; at the outermost one, let the inputs in."""
    recomputed = in_backward() and not is_root and id(module) in sight.nested
    outermost = not sight.calls and not recomputed
    if not in_backward():
        (sight.nested.add if sight.calls else sight.nested.discard)(id(module))
    undo = ExitStack()
    sight.calls.append((id(module), outermost, undo))
    if outermost and sight.units is not None:
        undo.enter_context(sight.units.saved())
    if isinstance(module, nn.RNNBase):
        # Recurrent kernels take this list, which was filled when the module was made.
        module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
    if not outermost:
        return None
    return (
        tuple(map_tensors(sight.enter, a, f"argument {i} of the model") for i, a in enumerate(args)),
        {k: map_tensors(sight.enter, v, f"argument {k}= of the model") for k, v in kwargs.items()},
    )


def _after(sight: Sight, module: nn.Module, args: tuple, output: Any) -> Any:
    """Let the outputs of the outermost call out. Runs after an exception too."""
    if not sight.calls or sight.calls[-1][0] != id(module):
        # A hook of the user's raised before the call was noted.
        return None
    _, outermost, undo = sight.calls.pop()
    undo.close()
    if not sight.calls:
        sight.forget()
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [dict.get(module._parameters, n) for n in module._flat_weights_names]
    return map_tensors(sight.leave, output, "the output of the model") if outermost else None
