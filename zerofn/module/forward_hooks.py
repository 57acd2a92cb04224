"""Forward hooks of an attached model: where its calls begin and end, and which of them is the outermost."""

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

from .._compat.autograd import next_sequence_nr, set_grad_mode
from .._compat.compiler import exports, uncompiled
from .._compat.modules import (
    CALL,
    forward_hooks,
    frame_of_call,
    has_backward_hooks,
    register_in,
    registered,
    set_flat_weights,
)
from .._errors import explain
from ..core.pipeline import Pipeline
from ..sharded.saved_tensors import noting
from .active_calls import ActiveCall
from .backward_hooks import check_hooks_of_call
from .boundary import ModelBoundary
from .forward_errors import add_notes
from .forward_writes import carry_written
from .leaked_tensors import HookedOutput
from .nested_tensors import map_tensors, tensors_in
from .parameter_containers import hook_containers
from .parameter_dict import ParameterViewDict

# fmt: off
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)
# fmt: on


class Hook:
    """A hook that does nothing in a copied or unpickled module."""

    def __init__(self, fn: Callable[..., Any] | None):
        self.fn = fn

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        if self.fn is None:
            return None
        mode = torch.is_grad_enabled()
        try:
            return self.fn(*args)
        except BaseException:
            set_grad_mode(mode)
            raise

    def __deepcopy__(self, memo: dict) -> Hook:
        return Hook(None)

    def __reduce__(self):
        return Hook, (None,)


class _FlatWeights(list):
    """Views of a recurrent module's parameters. A class into which `AttributeTensors` does not look."""


GONE = weakref.ref(_FlatWeights())
_MODULE = attrgetter("module")


class _PreForwardHook(Hook):
    """The hook before each call of one module. Most calls are inside of another call, and nothing is to be done."""

    def __init__(self, boundary: ModelBoundary, module: nn.Module):
        recurrent = isinstance(module, nn.RNNBase)
        # Held during calls of a recurrent module, for all threads share the list of weights that its kernel takes.
        # Calls that a checkpoint repeats in backward take the lock too, in whatever thread. A thread that waits for a
        # backward is in no such call, unless a hook of the user's on that very module runs one.
        lock = threading.RLock() if recurrent else None
        super().__init__(functools.partial(_begin_call, boundary, lock))
        self.boundary = boundary
        self.plain = not recurrent and module is not boundary.model()
        self.block = id(module) in boundary.blocks

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self.plain:
            local, calls = self.boundary.local, self.boundary.calls()
            # Without a hook of the user's nothing of the inside is shown.
            quiet = not self.boundary.scaled or not (
                _has_user_hooks(self.boundary, module) or has_backward_hooks(module)
            )
            if quiet and calls and module not in map(_MODULE, calls):
                if self.block and local.walks is not None:
                    local.walks.begin(module)
                return None
        return super().__call__(module, args, kwargs)


def needs_boundary(pipe: Pipeline) -> bool:
    """Whether modules need hooks: for a cast, a loss scale or a gather.

    Inputs are cast to the dtype that parameters have in forward even where they are stored in it.
    """
    return pipe.scaled or pipe.dtypes.seen_otherwise or any(v.stages for v in pipe.views_at_use.values())


def install(model: nn.Module, boundary: ModelBoundary, paths: dict[int, str], blocks: list[nn.Module]) -> None:
    """Hook a model, and give it views of its parameters in forward; `boundary.undo` undoes it.

    Args:
        model: its modules are hooked.
        boundary: gives the views, and takes inputs in and outputs out.
        paths: `id(parameter)` to path.
        blocks: modules whose parameters are gathered together.
    """
    boundary.blocks = {id(m) for m in blocks}
    hook_containers(boundary)
    for module in model.modules():
        plain = registered(module)[0]
        names = {n: paths[id(p)] for n, p in plain.items() if id(p) in paths}
        if names:
            views = ParameterViewDict(plain, names, boundary, _buffers_dtype(module))
            boundary.undo.append(functools.partial(_restore, module, plain))
            register_in(module, views)
        pre = _PreForwardHook(boundary, module)
        boundary.undo.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True).remove)
        if id(module) in boundary.blocks:
            boundary.undo.append(module.register_forward_hook(Hook(functools.partial(_end_block, boundary))).remove)
    # Before any hook of the user's, which sees outputs in the dtype that they have outside.
    _add_end_hook(boundary, model)


def _end_block(boundary: ModelBoundary, module: nn.Module, args: tuple, output: Any) -> None:
    """Exchange gathered parameters that the graph of a block's call has saved for notes."""
    walks = boundary.local.walks
    if walks is not None and walks.open:
        walks.end(module, tensors_in(output))


def _has_user_hooks(boundary: ModelBoundary, module: nn.Module) -> bool:
    """Whether a module has forward hooks of the user's."""
    return len(forward_hooks(module)) > (id(module) in boundary.end_hooks) + (id(module) in boundary.blocks)


def _add_end_hook(boundary: ModelBoundary, module: nn.Module) -> None:
    handles: list[Any] = []
    boundary.undo.append(lambda: [handle.remove() for handle in handles])
    handles.append(module.register_forward_hook(Hook(functools.partial(_end_call, boundary)), always_call=True))
    boundary.end_hooks[id(module)] = handles[0].id


def _buffers_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of running statistics: the kernel of a normalization takes parameters of no other one."""
    mean = getattr(module, "running_mean", None) if isinstance(module, NORMS) else None
    return None if mean is None else mean.dtype


def _restore(module: nn.Module, plain: dict) -> None:
    now = registered(module)[0]
    if now is not plain:
        plain.clear()
        plain.update(dict(now))
        register_in(module, plain)


def _recorded(recorder: str) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{recorder} of an attached model",
            "what it records would have in it how this pipeline sees parameters, and none of their later values",
            f"{recorder}(opt.detach(), example) after training; torch.compile(model) while it is attached",
        )
    )


def _begin_call(
    boundary: ModelBoundary,
    lock: AbstractContextManager[Any] | None,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
) -> tuple | None:
    """Note that a call begins; take the inputs of an outermost one in."""
    local = boundary.local
    if id(module) not in boundary.end_hooks:
        # Only here, for most modules are never called from outside, and a hook takes time.
        _add_end_hook(boundary, module)
    calls = boundary.calls()
    if calls and calls[0].frame is None and module is boundary.model() and not _calls_itself(module):
        # In compiled code, where no frame tells whether a call has ended: the next one of the model does.
        local.drop_stale_calls()
    outermost = not local.calls and not boundary.repeating(module)
    if boundary.scaled:
        check_hooks_of_call(boundary.model(), module, outermost, args)
    if outermost and (torch.jit.is_tracing() or exports()):  # type: ignore[attr-defined]
        raise _recorded("torch.export.export" if exports() else "torch.jit.trace")
    frame = None if local.calls else frame_of_call()
    call = ActiveCall(module, outermost, next_sequence_nr(), sys.exception(), frame)
    if not local.calls:
        boundary.begin()
    if local.walks is not None and (not local.calls or id(module) in boundary.blocks):
        local.walks.begin(module)
    local.calls.append(call)
    if outermost:
        call.callers = boundary.together.called(module)
        if boundary.units is not None:
            call.undo.enter_context(noting(boundary.units))
    if lock is not None:
        call.undo.enter_context(lock)
        call.undo.callback(_reset_flat_weights, module)
        _fill_flat_weights(module)
    if boundary.scaled and _has_user_hooks(boundary, module):
        _order_user_hooks(boundary, module)
    if not outermost:
        return None
    return (
        tuple(map_tensors(boundary.enter, a, f"argument {i} of the model") for i, a in enumerate(args)),
        {k: map_tensors(boundary.enter, v, f"argument {k}= of the model") for k, v in kwargs.items()},
    )


def _end_call(boundary: ModelBoundary, module: nn.Module, args: tuple, output: Any) -> Any:
    """Note that a call has ended; take the outputs of an outermost one out. Runs after an exception too."""
    local = boundary.local
    if not local.calls or local.calls[-1].module is not module:
        # Its begin was not noted, for one because a hook of the user's raised before.
        return None
    call = local.calls.pop()
    error = sys.exception()
    call.undo.close()
    if call.outermost and error is not None and error is not call.error:
        add_notes(error, module, boundary.pipe, boundary.check_unchanged)
    if local.walks is not None and not local.calls:
        local.walks.end(module, tensors_in(output))
        local.walks.open.clear()
    try:
        if not local.calls:
            boundary.collect_attributes(call.start)
        if call.shown is not None:
            # What hooks of the user's were given is outside already.
            return output if call.outermost else call.shown.result(output, boundary.enter)
        return boundary.leave_all(output) if call.outermost else None
    finally:
        if not local.calls:
            seen = dict(local.seen)
            local.seen.clear()
            boundary.release_attributes()
            local.tracker = None
            boundary.node_ranges.add(call.start, next_sequence_nr(), call.callers)
            if boundary.units is not None:
                boundary.units.end_of_call()
            # The last, for it may refuse what the model wrote.
            carry_written(boundary, seen)


def _fill_flat_weights(module: Any) -> None:
    """Fill the list of weights that a recurrent kernel takes with views."""
    set_flat_weights(module, lambda names: _FlatWeights(getattr(module, n) for n in names), None)
    module.flatten_parameters()


def _reset_flat_weights(module: Any) -> None:
    """Fill the list with the stored parameters; the reference makes the module look at them again when it is called."""
    set_flat_weights(module, lambda names: [dict.get(registered(module)[0], n) for n in names], GONE)


def _order_user_hooks(boundary: ModelBoundary, module: nn.Module) -> None:
    """Let the user's forward hooks run between two of ours, which give them an output that has left the model."""
    hooks = forward_hooks(module)
    if id(module) not in boundary.show_hooks:
        handle = module.register_forward_hook(Hook(functools.partial(_show_to_hooks, boundary)))
        boundary.show_hooks[id(module)] = handle.id
        boundary.undo.append(handle.remove)
    hooks.move_to_end(boundary.show_hooks[id(module)], last=False)
    hooks.move_to_end(boundary.end_hooks[id(module)])


def _show_to_hooks(boundary: ModelBoundary, module: nn.Module, args: tuple, output: Any) -> Any:
    calls = boundary.local.calls
    if not calls or calls[-1].module is not module:
        return None
    if calls[-1].outermost:
        boundary.collect_attributes(calls[-1].start)
    calls[-1].shown = HookedOutput(output, boundary.leave_all if calls[-1].outermost else boundary.show_all)
    return calls[-1].shown.outer


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of the module is under way further up, besides the one that begins here."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count > 1
