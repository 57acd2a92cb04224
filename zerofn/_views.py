"""How an attached model sees its parameters: at the moment of use, inside its own calls only.

`module.weight` is looked up in the module's dict of parameters. In place of that dict stands one that
gives, inside a call of the attached model, the differentiable view of the stored parameter: cast,
unscaled on the way back. Everything that walks the dict outside of a call (`parameters()`, `state_dict()`,
`to()`) still finds the stored ones. Swapping the values for the time of a call instead would miss
recomputation by activation checkpointing, which happens in backward, after the call; swapping the module's
class would break pickle.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ._boundary import EntryMap, ExitMap, LeafView, differentiable
from ._compat import differentiating, executing, graph_task, next_sequence, outside_compile
from ._containers import map_outputs, map_tensors
from ._crossing import Crossing, Edge, Spans, crossing_of
from ._errors import bad_leaves, explain
from ._escape import Attributes, Shown, check_closed
from ._pipeline import Pipeline
from ._units import Units

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class _Thread(threading.local):
    """What each thread that calls the model has for itself."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        # By path and mode: the stored tensor, and its view in the call under way.
        self.seen: dict[tuple, tuple[Tensor, Tensor]] = {}
        # Where the numbers of autograd nodes stood when a cotangent last crossed the boundary.
        self.mark: int | None = None
        # By path: the view that was given last, and what it is the view of.
        self.given: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.task = -1
        self.backwards = 0


class _Call:
    """A call under way: of which module, whether its caller is outside the model, and the first node made in it."""

    __slots__ = ("module", "outermost", "shown", "start", "undo")

    def __init__(self, module: nn.Module, outermost: bool, start: int):
        self.module = module
        self.outermost = outermost
        self.start = start
        self.shown: Shown | None = None
        self.undo = ExitStack()


class Sight:
    """Whether parameters are being seen by the model now, and through which maps. One for each attached model."""

    def __init__(self, pipe: Pipeline, scale: Callable[[], Tensor | None], units: Units | None, model: nn.Module):
        self.pipe = pipe
        self.scaled = pipe.scale is not None
        self.scale = scale
        self.units = units
        self.model = weakref.ref(model)
        self.local = _Thread()
        self.spans = Spans()
        self.attributes = Attributes(self, list(model.modules()))
        # The hook that ends each module's calls, and the one that shows the user's hooks an output.
        self.ends: dict[int, int] = {}
        self.shows: dict[int, int] = {}
        self.undo: list[Callable[[], Any]] = []

    def active(self) -> bool:
        """Whether the model itself is asking: during its calls, and when checkpointing repeats a part of one."""
        return bool(self.local.calls) or self.repeating()

    def repeating(self, module: nn.Module | None = None) -> bool:
        """Whether a part of a call is being repeated in a backward, and not the whole call of `module`.

        Told by the node that backward executes: it was made during a call of the model, or else the
        user is the one who asks (a checkpoint around a call, a hook of the user's).
        """
        node = executing()
        if node is None or crossing_of(node, self) is not None or node.name() == "BackwardHookFunctionBackward":
            return False
        number = node._sequence_nr()
        if number not in self.spans or (module is not None and self.spans.maker(number) == id(module)):
            return False
        # What is made now belongs to the call as well: a checkpoint inside a checkpoint.
        now = next_sequence()
        self.spans.add(now if self.local.mark is None else self.local.mark, now)
        return True

    def forget_calls(self) -> None:
        """Calls that were left without a trace."""
        while self.local.calls:
            self.local.calls.pop().undo.close()
        self.local.seen.clear()

    def look(self, path: str, stored: Tensor) -> Tensor:
        """The view of a parameter. One for each call of the model, so that a parameter used twice has one cotangent."""
        view = self.pipe.views_at_use[path]
        if self.units is not None:
            if stored is self.units.params[path]:
                return self.units.look(path, keep=bool(self.local.calls))
            view = _of_another(view, stored)
        if not view.stages and not (self.scaled and torch.is_grad_enabled() and differentiable(stored)):
            return stored
        if not self.local.calls:
            return self._through(view, stored)
        key = (path, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        found = self.local.seen.get(key)
        if found is None or found[0] is not stored:
            found = self.local.seen[key] = (stored, self._through(view, stored))
        return found[1]

    def _through(self, view: LeafView, stored: Tensor) -> Tensor:
        return self._crossing(view, True).cross(stored)

    def origin(self, path: str, x: Any) -> Any:
        """The stored tensor that `x` is the view of; `None` for another tensor."""
        view, stored = self.local.given.get(path, (lambda: None, None))
        return stored if view() is x else None

    def enter(self, x: Tensor) -> Tensor:
        """An input on its way in: cast to the compute dtype."""
        dtype = self.pipe.cast.param_dtype or self.pipe.cast.store_dtype
        if not x.is_floating_point() or (dtype in (None, x.dtype) and not self.scaled):
            return x
        if dtype in (None, x.dtype) and not differentiable(x):
            # Another tensor on the same memory: if the model asks for its gradient, that one is of the inside.
            return x.view_as(x) if torch.is_grad_enabled() else x
        return self._crossing(EntryMap(dtype, x.dtype), True).cross(x)

    def leave(self, y: Tensor) -> Tensor:
        """An output on its way out."""
        if self.units is not None and y.grad_fn is not None:
            # Every backward rests at its end, on every rank as often, whether or not it has to gather anything.
            units = self.units
            y.grad_fn.register_prehook(lambda _: units.rest_after_backward())
        dtype = self.pipe.cast.output_dtype
        if not y.is_floating_point() or (dtype in (None, y.dtype) and not (self.scaled and differentiable(y))):
            return y
        return self._crossing(ExitMap(dtype, y.dtype), False).cross(y)

    def show(self, y: Tensor) -> Tensor:
        """An inner tensor as the user may have it: as an output, but for its dtype."""
        return self._crossing(ExitMap(None, y.dtype), False).cross(y) if self.scaled and differentiable(y) else y

    def leave_all(self, output: Any) -> Any:
        """The outputs of a call on their way out."""
        return map_outputs(self.leave, output, "the output of the model")

    def show_all(self, output: Any) -> Any:
        """An output inside of the model as hooks of the user's may have it."""
        return map_outputs(self.show, output, "an output inside the model")

    def admit(self, x: Tensor) -> Tensor:
        """A tensor of the user's that the model finds in an attribute: as an input, but for its dtype."""
        return self._crossing(EntryMap(None, x.dtype), True).cross(x) if x.is_floating_point() else x

    def _crossing(self, edge: Edge, inward: bool) -> Crossing:
        return Crossing(self, edge, inward, self.scale, self.noticed if self.scaled else None)

    def noticed(self, crossing: Crossing) -> None:
        """A cotangent crosses. Now and then, the whole graph is searched for one that does not."""
        if torch.compiler.is_compiling():
            return
        local, task = self.local, graph_task()
        local.mark = next_sequence()
        if task != local.task:
            local.task = task
            local.backwards += 1
            # In backward 1, 2, 4, 8, ...: programs repeat themselves, and the search takes time.
            if local.backwards & (local.backwards - 1) == 0:
                check_closed(self, self.spans)


def _of_another(view: LeafView, given: Tensor) -> LeafView:
    """How the full tensor that torch.func.functional_call puts in a sharded parameter's place is seen: not gathered."""
    if given.shape != view.leaf.shape:
        raise RuntimeError(
            bad_leaves(
                "a call of a sharded model with other parameters (torch.func.functional_call) takes full ones",
                [(view.leaf.path, f"given in shape {tuple(given.shape)}, in full it is {tuple(view.leaf.shape)}")],
                "with opt.gathered(): params = {n: p.clone() for n, p in model.named_parameters()}",
            )
        )
    return replace(view, stages=tuple(s for s in view.stages if s.only_dtype), grad_dtype=given.dtype)


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
            origin = self.sight.origin(self.paths[name], value)
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


def _seen(parameters: SeenParameters, name: str, stored: Tensor) -> Tensor:
    if is_dynamo_compiling():
        return _seen_eagerly(parameters, name, stored)
    sight = parameters.sight
    if not sight.active():
        return stored
    path = parameters.paths[name]
    seen = sight.look(path, stored)
    if parameters.beside not in (None, seen.dtype):
        seen = seen.to(parameters.beside)
    sight.local.given[path] = (weakref.ref(seen), stored)
    return seen


@outside_compile
def _seen_eagerly(parameters: SeenParameters, name: str, stored: Tensor) -> Tensor:
    return _seen(parameters, name, stored)


class _Hook:
    """A hook that a copied or pickled module carries along without effect."""

    def __init__(self, fn: Callable[..., Any] | None):
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            return _call_eagerly(self.fn, *args)
        return None if self.fn is None else self.fn(*args)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return _Hook(None)

    def __reduce__(self):
        return _Hook, (None,)


class _Begin(_Hook):
    """The hook before each call of one module. Most calls are inside of another one, and need no notice.

    One that does gets a hook for its end as well.
    """

    def __init__(self, sight: Sight, module: nn.Module):
        super().__init__(functools.partial(_before, sight))
        self.sight = sight
        self.plain = not isinstance(module, nn.RNNBase) and module is not sight.model()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self.plain and not is_dynamo_compiling():
            calls = self.sight.local.calls
            # Only ours is at the end of the call: no hook of the user's is to be shown anything.
            quiet = not self.sight.scaled or len(module._forward_hooks) == (id(module) in self.sight.ends)
            if quiet and calls and not any(call.module is module for call in calls):
                return None
        return super().__call__(module, args, kwargs)


@outside_compile
def _call_eagerly(fn: Callable[..., Any] | None, *args: Any) -> Any:
    return None if fn is None else fn(*args)


def needs_sight(pipe: Pipeline) -> bool:
    """Whether the model differs from its plain self at all: without a cast or a scale nothing is hooked.

    Inputs are cast to the dtype of the parameters even where these are resident in it.
    """
    cast = pipe.cast
    return (
        pipe.scale is not None
        or any(d is not None for d in (cast.output_dtype, cast.param_dtype, cast.store_dtype))
        or any(v.stages for v in pipe.views_at_use.values())
    )


def install(model: nn.Module, sight: Sight, paths: dict[int, str]) -> Callable[[], None]:
    """Make `model` see its parameters through `sight`; what is returned undoes it.

    Args:
        model: its parameters are the resident ones.
        sight: how they are seen.
        paths: `id(parameter)` to path.
    """
    for module in model.modules():
        plain = module._parameters
        names = {n: paths[id(p)] for n, p in plain.items() if p is not None}
        if names:
            module.__dict__["_parameters"] = SeenParameters(plain, names, sight, _buffers_dtype(module))
            sight.undo.append(functools.partial(_restore, module, plain))
        pre = _Begin(sight, module)
        sight.undo.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True).remove)
    # Before any hook of the user's, who sees outputs in the dtype they have outside.
    _end(sight, model)

    def uninstall() -> None:
        for action in reversed(sight.undo):
            action()

    return uninstall


def _end(sight: Sight, module: nn.Module) -> None:
    handle = module.register_forward_hook(_Hook(functools.partial(_after, sight)), always_call=True)
    sight.undo.append(handle.remove)
    sight.ends[id(module)] = handle.id


def _buffers_dtype(module: nn.Module) -> torch.dtype | None:
    """Of a normalisation with running statistics, whose kernel wants parameters of their dtype."""
    mean = getattr(module, "running_mean", None) if isinstance(module, NORMS) else None
    return None if mean is None else mean.dtype


def _restore(module: nn.Module, plain: dict) -> None:
    plain.clear()
    plain.update(dict(module._parameters))
    module.__dict__["_parameters"] = plain


def _before(sight: Sight, module: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
    """Note the call; at the outermost one, let the inputs in."""
    local = sight.local
    if sight.units is not None and differentiating():
        raise RuntimeError(
            explain(
                "torch.func.grad, vjp or jvp of a function that calls an attached sharded model",
                "parameters are gathered again in backward through saved-tensor hooks, which torch.func does not have",
                "zf.bind(fn, tx, state) for torch.func, zf.vjp(fn, tx, state, *inputs), or plain torch.autograd.grad",
            )
        )
    if id(module) not in sight.ends:
        # Only now, for most modules are never called from outside, and to run it takes time.
        _end(sight, module)
    if local.calls and module is sight.model() and not _calls_itself(module):
        # Ctrl-C leaves no trace on its way out of a call, and everything after would look nested.
        sight.forget_calls()
    outermost = not local.calls and not sight.repeating(module)
    call = _Call(module, outermost, next_sequence())
    if not local.calls and sight.scaled:
        sight.attributes.hide(sight.admit)
    local.calls.append(call)
    if outermost and sight.units is not None:
        call.undo.enter_context(sight.units.saved())
    if isinstance(module, nn.RNNBase):
        # Recurrent kernels take this list, which was filled when the module was made.
        module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
    if sight.scaled and len(module._forward_hooks) > 1:
        _show_to_hooks(sight, module)
    if not outermost:
        return None
    return (
        tuple(map_tensors(sight.enter, a, f"argument {i} of the model") for i, a in enumerate(args)),
        {k: map_tensors(sight.enter, v, f"argument {k}= of the model") for k, v in kwargs.items()},
    )


def _after(sight: Sight, module: nn.Module, args: tuple, output: Any) -> Any:
    """Let the outputs of the outermost call out. Runs after an exception too."""
    local = sight.local
    if not local.calls or local.calls[-1].module is not module:
        # It was not noticed, or a hook of the user's raised before it could be.
        return None
    call = local.calls.pop()
    call.undo.close()
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [dict.get(module._parameters, n) for n in module._flat_weights_names]
    seen = dict(local.seen) if not local.calls else {}
    try:
        if call.shown is not None:
            # What the user's hooks were shown is outside already.
            return output if call.outermost else call.shown.result(output, sight.enter)
        return sight.leave_all(output) if call.outermost else None
    finally:
        if not local.calls:
            local.seen.clear()
            if sight.scaled:
                sight.attributes.show(sight.show, call.start)
            sight.spans.add(call.start, next_sequence(), id(module) if call.outermost else None)
            _check_unwritten(seen)
            if sight.units is not None:
                sight.units.end_of_call()


def _show_to_hooks(sight: Sight, module: nn.Module) -> None:
    """The user's forward hooks run between two of ours, and see an output that has left the model."""
    hooks: Any = module._forward_hooks
    if id(module) not in sight.shows:
        handle = module.register_forward_hook(_Hook(functools.partial(_show, sight)))
        sight.shows[id(module)] = handle.id
        sight.undo.append(handle.remove)
    hooks.move_to_end(sight.shows[id(module)], last=False)
    hooks.move_to_end(sight.ends[id(module)])


def _show(sight: Sight, module: nn.Module, args: tuple, output: Any) -> Any:
    calls = sight.local.calls
    if not calls or calls[-1].module is not module:
        return None
    calls[-1].shown = Shown(output, sight.leave_all if calls[-1].outermost else sight.show_all)
    return calls[-1].shown.outer


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of the module is under way further up, besides the one that begins now."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count > 1


def _check_unwritten(seen: dict[tuple, tuple[Tensor, Tensor]]) -> None:
    """What a model in another dtype writes into a parameter goes into a copy and would be lost."""
    bad = [
        (path, f"seen in {view.dtype}, stored in {stored.dtype}")
        for (path, _, inference), (stored, view) in seen.items()
        if view.dtype != stored.dtype and not inference and view._version
    ]
    if bad:
        right = "write outside of the call, or keep what the model writes in a buffer"
        raise RuntimeError(
            bad_leaves("the model wrote into parameters in its forward, where they are cast copies", bad, right)
        )
