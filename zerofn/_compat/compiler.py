"""torch.compile: functions that it does not trace, whether it runs, and classes that it takes as constants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

# torch's pytree library, which the compiler traces.
pytree = torch.utils._pytree  # type: ignore[attr-defined]

# What the compiler does with each function that is called.
_eval_frame = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Before torch 2.13 a compiled function can neither make a frozen dataclass, such as a state, nor take it as a constant.
COMPILES_STATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# The modules of the compiler, which ask a tensor for its sizes to compare them with those in memory.
COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def asked_by_compiler(frame: FrameType) -> bool:
    """Whether the compiler looks at a tensor from this frame: it means the tensor as it is in memory."""
    return frame.f_globals.get("__name__", "").startswith(COMPILER)


def while_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which the compiler calls instead of tracing it; what it returns is a constant in the graph.

    As torch.compiler.assume_constant_result, but for that one's import of the compiler.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


@while_traced
def exports() -> bool:
    """Whether torch.export records. Before torch 2.13 `torch.compiler.is_exporting` is true in every graph."""
    return torch.compiler._is_exporting_flag


def graph_under_way() -> object | None:
    """What the compiler has for the one graph that it makes at the moment; another object for each."""
    return torch._guards.TracingContext.try_get()


# The mode in which `make_fx` and torch.func.linearize record operations, by proxies of tensors; `None` outside of it.
makes_proxies: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode,  # type: ignore[attr-defined]
    torch._C._TorchDispatchModeKey.PROXY,  # type: ignore[attr-defined]
)


_OUTSIDE = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
Fn = TypeVar("Fn", bound=Callable[..., Any])


def uncompiled(fn: Fn, why: str | None = None) -> Fn:
    """`fn`, not compiled, nor what it calls: graphs end before it.

    As `torch.compiler.disable`, which imports the compiler at once and makes each call 1 us longer. The attribute is
    for a compiler that traces the caller; the strategy is for one that compiles functions as they are called. If `fn`
    itself asked whether it is traced, the compiler would make a graph of that question for each kind of argument, give
    up at the eighth, and compile what `fn` calls all the same.

    With `fullgraph=True` the error has `why`, or else the docstring of `fn`.
    """
    # A copy of the code: functions that one decorator has made share theirs, those of torch's optimizers too.
    fn.__code__ = fn.__code__.replace()
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = why or fn.__doc__  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(fn.__code__, _OUTSIDE)
    return fn


_ITSELF = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)

# The callback that compiles functions as they are called; `None` or `False` if there is none.
makes_graphs: Callable[[], Any] = _eval_frame.get_eval_frame_callback


def begins_uncompiled(fn: Fn) -> Fn:
    """`fn`, run by Python where compilation would begin with it, so that graphs begin with the functions that it calls.

    If a compiled function calls it, it is traced as any other.
    """
    fn.__code__ = fn.__code__.replace()
    _eval_frame.set_code_exec_strategy(fn.__code__, _ITSELF)
    return fn


def register_pytree_node(cls: type, flatten, unflatten) -> None:
    """Make `cls` a node of torch's pytrees, which have no public registration."""
    pytree.register_pytree_node(  # type: ignore[attr-defined]
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


def register_constant(cls: type) -> None:
    """Have the compiler take instances of `cls` as constants, compared by `==`."""
    pytree.register_constant(cls)  # type: ignore[attr-defined]
