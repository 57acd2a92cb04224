"""Hooks by which an attached model notices its calls: where they begin and end, and which of them is the outermost."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .._compat.autograd import next_sequence
from .._compat.compiler import uncompiled
from .._compat.modules import CALL, backward_hooks, forward_hooks, register_in, registered, set_flat_weights
from .._errors import explain
from ..core.pipeline import Pipeline
from ..sharded.saved_tensors import noting
from .active_calls import Call
from .backward_hooks import check_hooks_of_call
from .boundary import Sight
from .forward_errors import note
from .forward_writes import carry_written
from .leaked_tensors import Shown
from .nested_tensors import map_tensors, tensors_in
from .parameter_dict import SeenParameters

# fmt: off
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)
# fmt: on


class Hook:
    """A hook that a copied or pickled module carries along without effect."""

    def __init__(self, fn: Callable[..., Any] | None):
        self.fn = fn

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        return None if self.fn is None else self.fn(*args)

    def __deepcopy__(self, memo: dict) -> Hook:
        return Hook(None)

    def __reduce__(self):
        return Hook, (None,)


class _Weights(list):
    """Views of a recurrent module's parameters: no list of the user's, whose tensors another thread's call lets in."""


GONE = weakref.ref(_Weights())
_MODULE = attrgetter("module")


class _Begin(Hook):
    """The hook before each call of one module. Most calls are inside of another one, and need no notice.

    One that does gets a hook for its end as well.
    """

    def __init__(self, sight: Sight, module: nn.Module):
        recurrent = isinstance(module, nn.RNNBase)
        # Held during calls of a recurrent module: the list that its kernel takes is the same for all threads.
        # Parts that a backward repeats take it too, in whatever thread: who waits for a backward is in no such
        # call, unless a hook of the user's on that very module runs one.
        turn = threading.RLock() if recurrent else None
        super().__init__(functools.partial(_before, sight, turn))
        self.sight = sight
        self.plain = not recurrent and module is not sight.model()
        self.block = id(module) in sight.blocks

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self.plain:
            local = self.sight.local
            # Only ours is at the end of the call: no hook of the user's is to be shown anything.
            quiet = not self.sight.scaled or not (_others(self.sight, module) or backward_hooks(module))
            if quiet and local.calls and module not in map(_MODULE, local.calls):
                if self.block and local.walks is not None:
                    local.walks.begin(module)
                return None
        return super().__call__(module, args, kwargs)


def needs_sight(pipe: Pipeline) -> bool:
    """Whether the model differs from its plain self at all: without a cast or a scale nothing is hooked.

    Inputs are cast to the dtype of the parameters even where these are resident in it.
    """
    return pipe.scaled or pipe.dtypes.seen_otherwise or any(v.stages for v in pipe.views_at_use.values())


def install(model: nn.Module, sight: Sight, paths: dict[int, str], blocks: list[nn.Module]) -> Callable[[], None]:
    """Make `model` see its parameters through `sight`; what is returned undoes it.

    Args:
        model: its parameters are the resident ones.
        sight: how they are seen.
        paths: `id(parameter)` to path.
        blocks: modules whose parameters are gathered.
    """
    sight.blocks = {id(m) for m in blocks}
    for module in model.modules():
        plain = registered(module)[0]
        names = {n: paths[id(p)] for n, p in plain.items() if id(p) in paths}
        if names:
            register_in(module, SeenParameters(plain, names, sight, _buffers_dtype(module)))
            sight.undo.append(functools.partial(_restore, module, plain))
        pre = _Begin(sight, module)
        sight.undo.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True).remove)
        if id(module) in sight.blocks:
            sight.undo.append(module.register_forward_hook(Hook(functools.partial(_end_block, sight))).remove)
    # Before any hook of the user's, who sees outputs in the dtype they have outside.
    _end(sight, model)

    def uninstall() -> None:
        for action in reversed(sight.undo):
            action()

    return uninstall


def _end_block(sight: Sight, module: nn.Module, args: tuple, output: Any) -> None:
    """Let go of what the graph of a block's call has saved of its parameters."""
    walks = sight.local.walks
    if walks is not None and walks.open:
        walks.end(module, tensors_in(output))


def _others(sight: Sight, module: nn.Module) -> bool:
    """Whether a module has forward hooks that are not ours."""
    return len(forward_hooks(module)) > (id(module) in sight.ends) + (id(module) in sight.blocks)


def _end(sight: Sight, module: nn.Module) -> None:
    handle = module.register_forward_hook(Hook(functools.partial(_after, sight)), always_call=True)
    sight.undo.append(handle.remove)
    sight.ends[id(module)] = handle.id


def _buffers_dtype(module: nn.Module) -> torch.dtype | None:
    """Of a normalisation with running statistics, whose kernel wants parameters of their dtype."""
    mean = getattr(module, "running_mean", None) if isinstance(module, NORMS) else None
    return None if mean is None else mean.dtype


def _restore(module: nn.Module, plain: dict) -> None:
    plain.clear()
    plain.update(dict(registered(module)[0]))
    register_in(module, plain)


def _before(
    sight: Sight, turn: AbstractContextManager[Any] | None, module: nn.Module, args: tuple, kwargs: dict
) -> tuple | None:
    """Note the call; at the outermost one, let the inputs in."""
    local = sight.local
    if id(module) not in sight.ends:
        # Only now, for most modules are never called from outside, and to run it takes time.
        _end(sight, module)
    if local.calls and module is sight.model() and not _calls_itself(module):
        # Ctrl-C leaves no trace on its way out of a call, and everything after would look nested.
        sight.forget_calls()
    outermost = not local.calls and not sight.repeating(module)
    if sight.scaled:
        check_hooks_of_call(sight.model(), module, outermost, args)
    if outermost and torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            explain(
                "torch.jit.trace of an attached model",
                "what it records would have in it how this pipeline sees parameters, and none of their later values",
                "torch.jit.trace(opt.detach(), example) after training; torch.compile(model) while it is attached",
            )
        )
    call = Call(module, outermost, next_sequence())
    call.error = sys.exception()
    if not local.calls:
        sight.begin()
    if local.walks is not None and (not local.calls or id(module) in sight.blocks):
        local.walks.begin(module)
    local.calls.append(call)
    if outermost and sight.units is not None:
        call.undo.enter_context(noting(sight.units))
    if turn is not None:
        call.undo.enter_context(turn)
        _fill(module)
    if sight.scaled and _others(sight, module):
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
    error = sys.exception()
    if isinstance(module, nn.RNNBase):
        _empty(module)
    call.undo.close()
    if call.outermost and error is not None and error is not call.error:
        note(error, module, sight.pipe, sight.unchanged)
    seen = dict(local.seen) if not local.calls else {}
    if local.walks is not None and not local.calls:
        local.walks.end(module, tensors_in(output))
        local.walks.open.clear()
    try:
        if not local.calls:
            sight.let_attributes_out(call.start, at_once=False)
        if call.shown is not None:
            # What the user's hooks were shown is outside already.
            return output if call.outermost else call.shown.result(output, sight.enter)
        return sight.leave_all(output) if call.outermost else None
    finally:
        if not local.calls:
            local.seen.clear()
            sight.let_attributes_out(call.start, at_once=True)
            local.leaving = None
            sight.spans.add(call.start, next_sequence(), id(module) if call.outermost else None)
            carry_written(sight, seen)
            if sight.units is not None:
                sight.units.end_of_call()


def _fill(module: Any) -> None:
    """Recurrent kernels take this list, which was filled when the module was made."""
    set_flat_weights(module, lambda names: _Weights(getattr(module, n) for n in names), None)
    module.flatten_parameters()


def _empty(module: Any) -> None:
    """The stored parameters again; where the module is used by itself it is to look at them anew."""
    set_flat_weights(module, lambda names: [dict.get(registered(module)[0], n) for n in names], GONE)


def _show_to_hooks(sight: Sight, module: nn.Module) -> None:
    """The user's forward hooks run between two of ours, and see an output that has left the model."""
    hooks = forward_hooks(module)
    if id(module) not in sight.shows:
        handle = module.register_forward_hook(Hook(functools.partial(_show, sight)))
        sight.shows[id(module)] = handle.id
        sight.undo.append(handle.remove)
    hooks.move_to_end(sight.shows[id(module)], last=False)
    hooks.move_to_end(sight.ends[id(module)])


def _show(sight: Sight, module: nn.Module, args: tuple, output: Any) -> Any:
    calls = sight.local.calls
    if not calls or calls[-1].module is not module:
        return None
    if calls[-1].outermost:
        sight.let_attributes_out(calls[-1].start, at_once=False)
    calls[-1].shown = Shown(output, sight.leave_all if calls[-1].outermost else sight.show_all)
    return calls[-1].shown.outer


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of the module is under way further up, besides the one that begins now."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count > 1
