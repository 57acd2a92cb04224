"""Hooks on modules: they give forward its views of parameters, and find where calls begin and end."""

from __future__ import annotations

import functools
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.autograd import close_checkpoints, next_sequence_nr, set_grad_mode
from .._compat.functorch import (
    begins_uncompiled,
    exports,
    innermost,
    is_wrapped,
    traced_symbolically,
    uncompiled,
    whole_graph_traced,
    whole_graph_wanted,
)
from .._compat.tensors import (
    CALL,
    frame_of_call,
    has_backward_hooks,
    register_in,
    registered,
    set_flat_weights,
    version,
)
from .._errors import bad_leaves, explain
from ..core.pipeline import Pipeline
from ..core.view import is_linear_map
from ..core.wrapper_names import buffers_in, modules_of
from ..sharded.compiled import CompiledCalls
from ..sharded.forward_writes import carried
from ..sharded.notes import noting
from .boundary import ActiveCall, GraphOfCall, ModelBoundary, Seen, address
from .nested_tensors import map_tensors, tensors_in
from .scaled_checks import check_hooks_of_call

# ----------------------------------------------------------------------------------------------------------------------
# `ParameterViewDict` is a module's dict of parameters that returns views of them while the model is being called.
#
# Python looks up `module.weight` in the module's dict of parameters, and this dict takes its place. Inside a call of
# the attached model it returns the differentiable view of the stored parameter: cast forward, unscaled backward.
# Outside of a call, code that walks it (`parameters()`, `state_dict()`, `to()`) finds the stored parameters.
# Exchanging the values for the time of a call would miss what activation checkpointing recomputes in backward, after
# the call. Exchanging the module's class would break pickle.


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
        # The dtype that the module's kernel needs: that of its buffers, which are not cast.
        self.beside = beside
        # Names of tensors that the model puts here during a call (torch.func.functional_call). They need no view.
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
        # This is lazy: code that reads the first parameter's device needs only one view.
        return ((n, self[n]) for n in list(self)) if self._walked_by_model() else super().items()

    def values(self) -> Any:
        return (self[n] for n in list(self)) if self._walked_by_model() else super().values()

    def _walked_by_model(self) -> bool:
        # The compiler, which looks at modules in the middle of their calls, is not the model. Nor is a user's hook in a
        # backward: gradients are enabled there only in a forward that a checkpoint repeats.
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
        # User code outside of a call gets the stored parameter.
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


# ----------------------------------------------------------------------------------------------------------------------
# `ContainerHook` refuses containers of parameters that forward builds, such as a slice of an `nn.ParameterList`.
#
# torch's containers turn every tensor that is no parameter into an `nn.Parameter`. Made of a view, it would be a leaf
# on the view's memory, and the model's parameter would get no gradient from it. torch asks a hook what to register.


CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class ContainerHook:
    """The hook on the registration of parameters in any module, of one attached model."""

    def __init__(self, boundary: ModelBoundary):
        # torch keeps the hook as long as the process lives, or until the model is detached.
        self.boundary = weakref.ref(boundary)

    @uncompiled
    def __call__(self, module: nn.Module, name: str, param: Any) -> None:
        boundary = self.boundary()
        if boundary is None or not isinstance(module, CONTAINERS) or not isinstance(param, Tensor):
            return
        if (boundary.calls() or boundary.repeating()) and _is_view(boundary, param):
            why = "there it is a view of the parameter, of which the container would make a new parameter without a "
            why += "gradient"
            right = "a list or dict: [*self.rows][1:] for self.rows[1:], dict(self.named) for self.named.copy(), "
            right += "[*self.rows, self.extra];\nor the container is filled before zf.attach"
            kind = type(module).__name__
            wrong = f"a parameter, or what shares its memory, was put into an nn.{kind} in forward, at {name!r}"
            raise RuntimeError(explain(wrong, why, right))


def hook_containers(boundary: ModelBoundary) -> None:
    """Refuse containers that forward builds of views; `boundary.undo` undoes it."""
    handle = nn.modules.module.register_module_parameter_registration_hook(ContainerHook(boundary))
    hooks = handle.hooks_dict_ref() or {}
    # This removes hooks of models that were dropped without `detach`. A finalizer could run while torch walks hooks.
    for key, hook in list(hooks.items()):
        if isinstance(hook, ContainerHook) and hook.boundary() is None:
            del hooks[key]
    boundary.undo.append(handle.remove)


def _is_view(boundary: ModelBoundary, param: Tensor) -> bool:
    """Whether a new parameter shares its memory with a live view."""
    region = address(param)
    for view, stored in boundary.local.last_views.values():
        x = view()
        if x is not None and stored is not param and x is not param and x.shape == param.shape and address(x) == region:
            return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# These functions add notes to errors that the forward of an attached model raises: what has changed, and which dtypes
# meet in it.


# Finds torch's messages about two dtypes that it does not promote. Their words differ from kernel to kernel.
DTYPE_ERROR = re.compile(r"dtype|scalar type|should be the same|BFloat16|Half", re.IGNORECASE)
MOST_NAMED = 5
# The class of torch's parametrization `orthogonal`, which in bf16 gives gradients of 1e29.
ORTHOGONAL = "_Orthogonal"


def add_notes(error: BaseException, model: nn.Module, pipe: Pipeline, check_unchanged: Callable[[], None]) -> None:
    """Add a note to an error: what has changed since the model was attached, or in which dtypes it computes.

    A note is better than an error of ours: torch's message names the operation, the caller may catch its class, and
    torch turns an error that a hook raises after an error into a warning.

    Args:
        error: the error that forward raised.
        model: the attached model.
        pipe: its pipeline.
        check_unchanged: raises if the model has changed since it was attached.
    """
    in_place = [p for m in model.modules() for p in dict.values(registered(m)[0]) if p is not None]
    try:
        # torch.func.functional_call puts tensors in the places of parameters until it returns: that is no change.
        if all([isinstance(p, nn.Parameter) for p in in_place]):
            check_unchanged()
    except RuntimeError as changed:
        error.add_note(f"zerofn: {changed}")
        return
    if isinstance(error, RuntimeError | TypeError) and DTYPE_ERROR.search(str(error)):
        _add_dtypes(error, model, pipe)


def _add_dtypes(error: BaseException, model: nn.Module, pipe: Pipeline) -> None:
    seen = pipe.dtypes.inputs
    if seen is None:
        return
    where, of = _raised_in(error, model)
    if of == ORTHOGONAL:
        why = f"this parametrization of torch has no right gradients in {seen}, also with buffer_dtype={seen}"
        right = f"m = model.get_submodule({where!r}); forward = m.forward\n"
        right += "         m.forward = lambda w: forward(w.float()).to(w.dtype), before zf.attach"
    elif "not implemented for" in str(error):
        why = f"torch has no kernel of this function for {seen}"
        right = "x.float() and w.float() for what the function is given in forward, and .to(x.dtype) of its result"
    else:
        named = [(n, b.dtype) for n, b in buffers_in(model) if b.is_floating_point() and b.dtype != seen]
        # First those of the module itself.
        named.sort(key=lambda one: not (where and one[0].startswith(f"{where}.")))
        shown = ", ".join(f"{n} {dtype}" for n, dtype in named[:MOST_NAMED])
        rest = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        buffers = f"buffers have their own dtypes: {shown}{rest}; " if named else ""
        why = f"{buffers}a tensor made in forward is {torch.get_default_dtype()} unless it says otherwise"
        right = "self.buffer.to(x.dtype) and torch.zeros(n, dtype=x.dtype) in forward, or torch.zeros_like(x);\n"
        right += f"         buffers that may lose bits: precision(..., buffer_dtype={seen})"
    place = f", where {where or 'the model'} ({of}) raised this error" if of else ""
    error.add_note(
        f"zerofn: the pipeline has {seen} parameters and inputs in forward (precision){place}\n"
        f"  why:   {why}\n  write: {right}"
    )


def _raised_in(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """The path and the class of the innermost module whose call an error has ended; empty where none is known."""
    called = [f.f_locals.get("self") for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code is CALL]
    paths = {id(m): path for path, m in modules_of(model)}
    last = next((m for m in reversed(called) if id(m) in paths), None)
    return ("", "") if last is None else (paths[id(last)], type(last).__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Where the model's parameters are copies, these functions store what its forward writes into them, or refuse it.


# Read the view, and the node of a tensor, of every parameter in every call, so they are C functions.
_VIEW, _NODE = itemgetter(1), attrgetter("grad_fn")


@torch.no_grad()
def carry_written(boundary: ModelBoundary, seen: Seen) -> None:
    """Store what forward wrote into views of parameters in another dtype, which are copies.

    A write that changes the version is stored, in every call. Writes of NumPy, through `w.data` and
    `w.data = x` do not, and are lost.

    Args:
        boundary: of the model.
        seen: the views of the call, as in `ThreadState`.

    Raises:
        RuntimeError: every parameter is named whose write cannot be stored.
    """
    _check_leaves(seen)
    bad: dict[str, str] = {}
    inexact, suspended = boundary.views.inexact, boundary.views.suspended
    for path, (stored, view) in seen.items():
        exact = path not in inexact
        if view.dtype == stored.dtype and (exact or suspended):
            continue
        # `foreach` and `.data` count writes in the tensor inside of a wrapper of torch.func, and not in the wrapper.
        inner = innermost(view)
        # A view half that returns its argument makes no copy, so a write goes into the stored parameter.
        copied = exact or address(inner) != address(stored)
        if not copied or inner.is_inference() or not max(version(view), version(inner)):
            continue
        if not exact:
            bad[path] = "seen through a view half of the pipeline, which has no way back from here"
        elif is_wrapped(view):
            bad[path] = "inside of a transform of torch.func"
        else:
            new, old = view.detach(), stored.detach()
            stored.copy_(carried(new, old.to(new.dtype), old))
    if bad:
        right = (
            "with torch.no_grad(): self.w.copy_(new), in a pipeline whose view halves change dtypes alone;\n"
            "         else write outside of the call, or keep what the model writes in a buffer"
        )
        raise RuntimeError(
            bad_leaves("the model wrote into parameters in its forward, where they are copies", bad.items(), right)
        )


def _check_leaves(seen: Seen) -> None:
    """Refuse a write with gradients enabled, as torch refuses it for a leaf. To torch the view is no leaf."""
    kinds = {type(node): node for node in map(_NODE, map(_VIEW, seen.values())) if node is not None}
    if all(map(is_linear_map, kinds.values())):
        return
    bad = [
        (path, f"changed by {view.grad_fn.name()}")
        for path, (stored, view) in seen.items()
        if view.grad_fn is not None and view is not stored and not is_linear_map(view.grad_fn)
    ]
    if bad:
        raise RuntimeError(
            bad_leaves(
                "the model wrote into parameters in its forward with gradients enabled; what it wrote is in them",
                bad,
                "w = self.weight * 2 instead of self.weight.mul_(2), or the write under torch.no_grad()",
            )
        )


# ----------------------------------------------------------------------------------------------------------------------
# Forward hooks of an attached model find where its calls begin and end, and which call is the outermost.


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

    @property
    def __name__(self) -> str:
        # torch.jit.script asks a hook for its name first of all.
        raise AttributeError(_recorded("torch.jit.script"))

    @uncompiled
    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    @uncompiled
    def run(self, *args: Any) -> Any:
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
    """Views of a recurrent module's parameters. `AttributeTensors` does not look into this class."""


GONE = weakref.ref(_FlatWeights())
_MODULE = attrgetter("module")


class _PreForwardHook(Hook):
    """The hook before each call of one module. Most calls are inside of another call, and it does nothing."""

    def __init__(self, boundary: ModelBoundary, module: nn.Module):
        recurrent = isinstance(module, nn.RNNBase)
        # Calls of a recurrent module hold this lock, since all threads share the list of weights that its kernel takes.
        # Calls that a checkpoint repeats in backward hold it too, in any thread. A thread that waits for a backward is
        # in no such call, unless a user's hook on that very module runs a backward.
        lock = threading.RLock() if recurrent else None
        super().__init__(functools.partial(_begin_call, boundary, lock))
        self.boundary = boundary
        self.plain = not recurrent and module is not boundary.model()
        self.block = id(module) in boundary.blocks
        self.root = module is boundary.model()

    @begins_uncompiled
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        compiled = self.boundary.compiled
        if compiled is not None and (compiled.open or self.root):
            if torch.compiler.is_compiling():
                # A caller of the model is compiled, so these hooks are in the graph too.
                if compiled.open or (whole_graph_traced() and compiled.begins(True)):
                    return compiled.begin(module, args, kwargs)
            elif self.root:
                # Ctrl-C may have ended the previous call before its end hook.
                compiled.open = False
                if whole_graph_wanted() and _uncompiled(compiled.begins, False):
                    return _uncompiled(compiled.begin, module, args, kwargs)
        return self.run(module, args, kwargs)

    @uncompiled
    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """An attached model whose calls are no whole graph: with a loss scale, recurrent layers, views of one's own
        that change numbers or read a state, inside of opt.gathered(), or before torch 2.13 with shard, or with
        precision in a compiled caller; or a part of an attached model that is compiled by itself.

        write: torch.compile(model) without fullgraph, which ends a graph at each parameter; or precision in place of
        scale_loss; or torch.compile of the model that was attached; or torch 2.13
        """
        if self.plain:
            local, calls = self.boundary.local, self.boundary.calls()
            if calls and module not in map(_MODULE, calls):
                if self.boundary.scaled and has_backward_hooks(module):
                    check_hooks_of_call(self.boundary.model(), module, False, args)
                if self.block and local.walks is not None:
                    local.walks.begin(module)
                return None
        return super().run(module, args, kwargs)


class _EndHook(Hook):
    """The hook after each call of one module."""

    def __init__(self, boundary: ModelBoundary, end: Callable[..., Any]):
        super().__init__(functools.partial(end, boundary))
        self.boundary, self.of_block = boundary, end is _end_block
        # A block without gathered parameters has a hook for compiled calls alone.
        self.idle = self.of_block and boundary.units is None

    @begins_uncompiled
    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        compiled = self.boundary.compiled
        if compiled is not None and compiled.open:
            if self.of_block == (module is compiled.model):
                # A module may have both hooks: the model ends with its call, others with their block.
                return None
            if torch.compiler.is_compiling():
                return compiled.end(module, output)
            return _uncompiled(compiled.end, module, output)
        return None if self.idle else self.run(module, args, output)


@uncompiled
def _uncompiled(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function. Python calls the hooks of the compiled module itself, before and behind the graph."""
    return fn(*args)


def install(model: nn.Module, boundary: ModelBoundary, paths: dict[int, str], blocks: list[nn.Module]) -> None:
    """Hook a model, and give it views of its parameters in forward; `boundary.undo` undoes it.

    Args:
        model: its modules are hooked.
        boundary: gives the views, and takes inputs in and outputs out.
        paths: `id(parameter)` to path.
        blocks: modules whose parameters are gathered together.
    """
    boundary.blocks = {id(m) for m in blocks}
    boundary.compiled = _compiled_calls(boundary, model, paths)
    hook_containers(boundary)
    _add_end_hook(boundary, model)
    for module in model.modules():
        plain = registered(module)[0]
        names = {n: paths[id(p)] for n, p in plain.items() if id(p) in paths}
        if names:
            views = ParameterViewDict(plain, names, boundary, _buffers_dtype(module))
            boundary.undo.append(functools.partial(_restore, module, plain))
            register_in(module, views)
        pre = _PreForwardHook(boundary, module)
        boundary.undo.append(module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True).remove)
        if id(module) in boundary.blocks or (boundary.compiled is not None and id(module) in boundary.compiled.ends):
            hook = _EndHook(boundary, _end_block)
            # It runs before the end hook of the model's call.
            boundary.undo.append(module.register_forward_hook(hook, prepend=True).remove)


def _compiled_calls(boundary: ModelBoundary, model: nn.Module, paths: dict[int, str]) -> CompiledCalls | None:
    """The hooks' work in compiled calls; `None` if such calls cannot be one graph, and hooks run between graphs."""
    pipe, units = boundary.pipe, boundary.units
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    unknown = any([v.reads for v in pipe.stages]) or (units is None and boundary.views.inexact)
    if boundary.scaled or recurrent or not pipe.traceable or unknown:
        return None
    return CompiledCalls(pipe, model, paths, units, _buffers_dtype)


def _end_block(boundary: ModelBoundary, module: nn.Module, args: tuple, output: Any) -> None:
    """Replace gathered parameters that the graph of a block's call has saved by notes."""
    walks = boundary.local.walks
    if walks is not None and walks.open:
        walks.end(module, tensors_in(output))


def _add_end_hook(boundary: ModelBoundary, module: nn.Module) -> None:
    handles: list[Any] = []
    boundary.undo.append(lambda: [handle.remove() for handle in handles])
    # This runs before the user's hooks, which see outputs after they have left.
    handles.append(module.register_forward_hook(_EndHook(boundary, _end_call), prepend=True, always_call=True))
    boundary.end_hooks[id(module)] = handles[0].id


def _buffers_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of running statistics: the kernel of a normalization takes only parameters of that dtype."""
    mean = getattr(module, "running_mean", None) if isinstance(module, NORMS) else None
    return None if mean is None else mean.dtype


def _restore(module: nn.Module, plain: dict) -> None:
    now = registered(module)[0]
    if now is not plain:
        plain.clear()
        plain.update(dict(now))
        register_in(module, plain)


def _recorded(recorder: str) -> str:
    example = "" if recorder in ("torch.jit.script", "torch.fx.symbolic_trace") else ", example"
    return explain(
        f"{recorder} of an attached model",
        "the recording would contain the casts and gathers of this pipeline, and no later values of parameters",
        f"{recorder}(opt.detach(){example}) after training; torch.compile(model) while it is attached",
    )


def _begin_call(
    boundary: ModelBoundary,
    lock: AbstractContextManager[Any] | None,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
) -> tuple | None:
    """Record that a call begins. Let the inputs of an outermost call enter."""
    local = boundary.local
    if id(module) not in boundary.end_hooks:
        # The end hook is added at the first call: most modules are never called from outside, and a hook takes time.
        _add_end_hook(boundary, module)
    calls = boundary.calls()
    if calls and calls[0].frame is None and module is boundary.model() and not _calls_itself(module):
        # In compiled code no frame shows whether a call has ended. The next call of the model shows it.
        local.drop_stale_calls()
    outermost = not local.calls and not boundary.repeating(module)
    if boundary.scaled:
        check_hooks_of_call(boundary.model(), module, outermost, args)
    if outermost and (torch.jit.is_tracing() or exports() or traced_symbolically()):  # type: ignore[attr-defined]
        recorder = "torch.fx.symbolic_trace" if traced_symbolically() else "torch.jit.trace"
        raise RuntimeError(_recorded("torch.export.export" if exports() else recorder))
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
    if not outermost or not (boundary.scaled or boundary.input_dtype is not None):
        return None
    return (
        tuple(map_tensors(boundary.enter, a, f"argument {i} of the model") for i, a in enumerate(args)),
        {k: map_tensors(boundary.enter, v, f"argument {k}= of the model") for k, v in kwargs.items()},
    )


def _end_call(boundary: ModelBoundary, module: nn.Module, args: tuple, output: Any) -> Any:
    """Record that a call has ended. Let the outputs of an outermost call leave. Runs after an exception too."""
    local = boundary.local
    if not local.calls or local.calls[-1].module is not module:
        # The begin of this call was not recorded, for instance because a user's hook raised before.
        return None
    call = local.calls.pop()
    error = sys.exception()
    if not call.outermost or error is call.error:
        error = None
    if error is not None:
        # Before `undo`, which closes the hooks that were entered last.
        close_checkpoints(error, call.error)
    call.undo.close()
    if error is not None:
        add_notes(error, module, boundary.pipe, boundary.check_unchanged)
    if local.walks is not None and not local.calls:
        local.walks.end(module, tensors_in(output))
        local.walks.open.clear()
    try:
        return boundary.leave_all(output) if call.outermost else None
    finally:
        if not local.calls:
            seen = dict(local.seen)
            local.seen.clear()
            local.left = None
            graph = GraphOfCall(call.callers)
            graph.live_with(tensors_in(output))
            boundary.node_ranges.add(call.start, next_sequence_nr(), graph)
            if boundary.units is not None:
                boundary.units.end_of_call()
            # This comes last, since it may raise for a write of the model.
            if seen:
                carry_written(boundary, seen)


def _fill_flat_weights(module: Any) -> None:
    """Fill the list of weights that a recurrent kernel takes with views."""
    set_flat_weights(module, lambda names: _FlatWeights(getattr(module, n) for n in names), None)
    module.flatten_parameters()


def _reset_flat_weights(module: Any) -> None:
    """Fill the list with the stored parameters. Their references make the module look at them again at a call."""
    set_flat_weights(module, lambda names: [dict.get(registered(module)[0], n) for n in names], GONE)


def _calls_itself(module: nn.Module) -> bool:
    """Whether another call of the module is running further up, besides the one that begins here."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count > 1
