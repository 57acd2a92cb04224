"""Autograd: the backward that is running, the nodes of its graph, and the tensors that they have saved."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor


def has_hooks(p: Any) -> bool:
    """Whether a leaf has hooks for its gradient."""
    with torch.DisableTorchFunctionSubclass():
        return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def gradient_hooks(p: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    """The hooks on a tensor's gradient, by number: the dict from which autograd calls them."""
    with torch.DisableTorchFunctionSubclass():
        return p._backward_hooks or {}  # type: ignore[return-value]


def hooks_after(p: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    """The post-accumulate-grad hooks of a leaf, by number, as `gradient_hooks`."""
    with torch.DisableTorchFunctionSubclass():
        return p._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def share_hooks(given: Any, to: Any) -> None:
    """Let a leaf have the hooks of another one: whoever removes one removes it from both."""
    with torch.DisableTorchFunctionSubclass():
        if given._backward_hooks is not None:
            to._backward_hooks = given._backward_hooks
        if given._post_accumulate_grad_hooks is not None:
            to._post_accumulate_grad_hooks = given._post_accumulate_grad_hooks


# The number of the backward that this thread is running; `NO_BACKWARD` outside of one.
NO_BACKWARD = -1
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is running a backward: it is in a hook, a recomputation or a backward function."""
    return graph_task() != NO_BACKWARD


# The autograd node that this thread is executing; `None` outside of a backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def reaches(nodes: Iterable[Any]) -> list[bool] | None:
    """For each node that takes a leaf's gradient, whether the running backward reaches it; true where there is no node.

    Returns:
        `None` if a gradient is asked for by `torch.autograd.grad`, which adds none and must be given its numbers.
    """
    try:
        # Not in a comprehension, which is a call for each backward of a unit.
        found = []
        for node in nodes:
            found.append(node is None or torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
        return found
    except RuntimeError:
        return None


def current_function() -> Any:
    """The `ctx` of the `autograd.Function` whose backward is recording operations; `None` if there is none."""
    node = current_node()
    if node is None or not torch.is_grad_enabled():
        return None
    return node if isinstance(node, torch.autograd.function.BackwardCFunction) else None


def applied(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`cls.apply` outside of torch.func, for a full list of positional arguments that torch.func has not wrapped.

    Before torch 2.14 `apply` is Python code that searches all arguments for wrappers, a fifth of the call's time.
    """
    in_python = "apply" in vars(torch.autograd.Function)
    return super(torch.autograd.Function, cls).apply if in_python else cls.apply  # type: ignore[misc]


def arguments_of_functions() -> list[Any]:
    """The arguments of all `autograd.Function`s whose forward is running in this thread.

    From torch 2.14 on `apply` is in C and has no frame, so the frame of `forward` is searched for, by its code. That
    also finds a forward without `ctx`.
    """
    if torch.is_grad_enabled():
        return []
    found, frame, codes = [], sys._getframe(1), _forwards(torch.autograd.Function)
    while frame is not None:
        if frame.f_code in codes:
            names, flags = frame.f_code.co_varnames, frame.f_code.co_flags
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            found += [frame.f_locals[name] for name in names[:count] if name in frame.f_locals]
            if flags & inspect.CO_VARARGS:
                found += frame.f_locals.get(names[count], ())
        frame = frame.f_back
    return found


def _forwards(cls: type) -> set[Any]:
    """The code of `forward` in each subclass of `cls`."""
    classes, codes = [cls], set()
    while classes:
        made = classes.pop()
        classes += made.__subclasses__()
        codes.add(getattr(made.forward, "__code__", None))  # type: ignore[attr-defined]
    return codes


def after_this_node(fn: Callable[[], None]) -> bool:
    """Run `fn` in backward, after the node that this thread is executing; returns whether there is such a node.

    In a backward inside of a node, as in reentrant checkpointing, that is the node of the outer backward.
    """
    node = current_node()
    if node is None:
        return False

    def after(*_: Any) -> None:
        handle.remove()
        fn()

    handle = node.register_hook(after)
    return True


# The sequence number that the next node of this thread will get.
next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]

# The sequence number of a node.
sequence_nr: Callable[[Any], int] = methodcaller("_sequence_nr")


def close_checkpoints(error: BaseException, until: BaseException | None = None) -> None:
    """Close the saved-tensor hooks of checkpoints that an error has left.

    torch 2.11 closes these hooks only when the traceback of the error is freed. Until then they take the tensors of
    later graphs, whose backward raises a `CheckpointError`. A notebook keeps the traceback of its last error.

    Args:
        error: the error.
        until: the error that was being handled before; it and those before it have been looked at.
    """
    code = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and at is not until and id(at) not in seen:
        seen.add(id(at))
        frames = [frame for frame, _ in traceback.walk_tb(at.__traceback__) if frame.f_code is code]
        # The inner ones first: torch closes the hooks that were entered last, whosever they are.
        for frame in reversed(frames):
            opened = frame.f_locals.get("gen")
            if opened is not None:
                opened.close()
        at = at.__context__


def run_when_ready(node: Any) -> None:
    """Make backward run a node as soon as it can: of the nodes that are ready it takes the highest number."""
    node._set_sequence_nr((1 << 63) - 1)


_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


def roots_of_backward() -> list[Any]:
    """The nodes at which the running backward began; none where `_call_of_backward` finds no call."""
    call, found = _call_of_backward(), []
    for x in () if call is None else _as_tuple(call.f_locals["tensors" if call.f_code is _BACKWARD else "outputs"]):
        node = x.grad_fn if isinstance(x, Tensor) else x.node
        if node is not None:
            found.append(node)
    return found


def inputs_of_backward() -> tuple:
    """The tensors that the running backward is asked for gradients of, as `roots_of_backward`."""
    call = _call_of_backward()
    return () if call is None else _as_tuple(call.f_locals["inputs"])


def _call_of_backward() -> Any:
    """The frame of the call that runs the present backward.

    Autograd does not tell a node how backward was called, so its arguments are read from the frame of the call. Nodes
    on a GPU run in another thread, which does not have that frame. There the frames of all threads are searched, and
    the call is found if only one thread runs a backward. The result is `None` if several threads do, and in a backward
    inside of another one.
    """
    found = _engine_frames(sys._getframe(1))
    if not found:
        callers = [frames for frame in sys._current_frames().values() if (frames := _engine_frames(frame))]
        found = callers[0] if len(callers) == 1 else []
    return found[0] if len(found) == 1 else None


def _engine_frames(frame: Any) -> list[Any]:
    found = []
    while frame is not None:
        if frame.f_code in (_BACKWARD, _GRAD):
            found.append(frame)
        frame = frame.f_back
    return found


def _as_tuple(given: Any) -> tuple:
    """One tensor or edge, a sequence of them, or none."""
    one = isinstance(given, Tensor | torch.autograd.graph.GradientEdge)
    return (given,) if one else tuple(given or ())


# The innermost saved-tensors hooks of this thread, as (pack, unpack); `None` if there are none.
saved_tensors_hooks: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks,  # type: ignore[attr-defined]
    True,
)


@functools.cache
def _saved_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node: Any) -> list[Any]:
    """The `SavedTensor`s of an autograd node, not unpacked: each has `data` and `register_hooks`.

    A user's nodes in C++, and nodes of writes into views, have no such attributes.
    """
    found: list[Any] = []
    for name in _saved_attributes(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:
            # A backward has freed the node's saved tensors.
            continue
        found.extend(saved if isinstance(saved, tuple | list) else (saved,))
    return found


# Runs a function when the running backward has finished; torch has no public name for it.
_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback

# A C function, to restore the mode after Ctrl-C. `torch.no_grad` and `torch.set_grad_enabled` are Python classes: if
# the interrupt comes while one is entered or left, the mode stays changed.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled  # type: ignore[attr-defined]


class grad_mode_kept:
    """A context around code that enters and leaves grad modes: if it raises, the mode is restored.

    Examples:
        >>> try:
        ...     with grad_mode_kept():
        ...         set_grad_mode(False)  # as an interrupt behind the first line of `with torch.no_grad():` leaves it
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt:
        ...     torch.is_grad_enabled()
        True
    """

    __slots__ = ("mode",)

    def __enter__(self) -> None:
        self.mode = torch.is_grad_enabled()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            set_grad_mode(self.mode)
