"""Autograd: the backward under way, the nodes of its graph, and what they have saved."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor


def tell_autograd(written: list[Tensor]) -> None:
    """Count a write that a kernel made without counting it: a backward that saved one of these tensors must notice."""
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:
        # Tensors of inference mode have no count.
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


def has_hooks(p: Any) -> bool:
    """Whether anybody has registered a hook for the gradient of a leaf."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def gradient_hooks(p: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    """The hooks on the gradient of a tensor, by number, as a dict that may be written: what stands in it is called."""
    return p._backward_hooks or {}  # type: ignore[return-value]


# What `graph_task` gives outside of a backward; in one, its number.
NO_BACKWARD = -1
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass: a recomputation, or a hook."""
    return graph_task() != NO_BACKWARD


# The autograd node that this thread executes; `None` outside of backward.
executing: Callable[[], Any] = torch._C._current_autograd_node


def after_this_node(fn: Callable[[], None]) -> bool:
    """Run `fn` once the autograd node that this thread executes is done, in its backward; whether there is one.

    Inside a backward nested in a node, as reentrant checkpointing makes them, this reaches the outer one.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return False

    def after(*_: Any) -> None:
        handle.remove()
        fn()

    handle = node.register_hook(after)
    return True


# The number that the next autograd node made by this thread will have: nodes are numbered as they are made.
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]

# The number of a node.
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")


def run_when_ready(node: Any) -> None:
    """Let backward run a node as soon as it can: among the nodes that it could run, it takes the one made last."""
    node._set_sequence_nr((1 << 63) - 1)


_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


def backward_call() -> tuple[list[Any], tuple]:
    """The nodes at which the backward under way began, and the tensors that it is to give the gradients of.

    Autograd does not say, so they are read from the frame of the call. A GPU's nodes run in a thread without
    such a frame: there it is that of the one other thread which is in a backward. Nothing is known of a backward
    inside of another one, and nothing where several threads are in one.
    """
    found = _engine_frames(sys._getframe(1))
    if not found:
        callers = [frames for frame in sys._current_frames().values() if (frames := _engine_frames(frame))]
        found = callers[0] if len(callers) == 1 else []
    if len(found) != 1:
        return [], ()
    held = found[0].f_locals
    roots = held["tensors" if found[0].f_code is _BACKWARD else "outputs"]
    nodes = [n for x in _several(roots) if (n := x.grad_fn if isinstance(x, Tensor) else x.node) is not None]
    return nodes, _several(held["inputs"])


def _engine_frames(frame: Any) -> list[Any]:
    found = []
    while frame is not None:
        if frame.f_code in (_BACKWARD, _GRAD):
            found.append(frame)
        frame = frame.f_back
    return found


def _several(given: Any) -> tuple:
    """One tensor or edge, a sequence of them, or none."""
    one = isinstance(given, Tensor | torch.autograd.graph.GradientEdge)
    return (given,) if one else tuple(given or ())


# The hooks for saved tensors that this thread has entered last, as (pack, unpack); `None` where there are none.
saved_tensors_hooks: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks,  # type: ignore[attr-defined]
    True,
)


@functools.cache
def _saving(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node: Any) -> list[Any]:
    """What an autograd node has saved for backward, before it is unpacked: each has `data` and `register_hooks`.

    Nodes without such attributes, those of C++ that the user has written and of writes into views, show nothing.
    """
    found: list[Any] = []
    for name in _saving(type(node)):
        try:
            one = getattr(node, name)
        except RuntimeError:
            # It has been let go: a backward has gone through already.
            continue
        if isinstance(one, tuple | list):
            found.extend(one)
        else:
            found.append(one)
    return found


# Runs a function when the backward that is under way has finished. Public torch has no such moment.
_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback
