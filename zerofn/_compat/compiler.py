"""What torch's compiler reads, and what it leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# torch's tree library, which the compiler reads.
pytree = torch.utils._pytree  # type: ignore[attr-defined]

# What a torch.compile that is under way does with each function that is called.
_eval_frame = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Before torch 2.13 the compiler can neither take a frozen dataclass, such as a state, for a constant nor make one.
COMPILES_STATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# The compiler's own modules: they ask a tensor for its sizes in order to compare them with what is in memory.
COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def while_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which the compiler calls while it makes a graph instead of tracing it; what it returns is a constant there.

    As torch.compiler.assume_constant_result, which imports the compiler at once.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


# The mode in which `make_fx` and torch.func.linearize record operations, by proxies of tensors; `None` outside of it.
makes_proxies: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode,  # type: ignore[attr-defined]
    torch._C._TorchDispatchModeKey.PROXY,  # type: ignore[attr-defined]
)


_OUTSIDE = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
Fn = TypeVar("Fn", bound=Callable[..., Any])


def uncompiled(fn: Fn, why: str | None = None) -> Fn:
    """`fn` as what the compiler leaves alone, with all that it calls: graphs end before it.

    As `torch.compiler.disable`, which imports the compiler at once and makes each call 1 us longer. The one mark is for
    code that is traced into, the other for code that is run while a compiler waits for functions to compile. If `fn`
    asked by itself whether it is traced, the compiler would make a graph of that question for each kind of argument,
    give `fn` up at the eighth, and compile what `fn` calls all the same.

    Whoever asks for a whole graph (`fullgraph=True`) is told why, else the docstring of `fn`.
    """
    # A copy: all functions that a decorator of torch's has made share one code, those of torch's optimizers too.
    fn.__code__ = fn.__code__.replace()
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = why or fn.__doc__  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(fn.__code__, _OUTSIDE)
    return fn


_ITSELF = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)

# What makes graphs of the functions that are called here: `None` or `False` where nothing does.
makes_graphs: Callable[[], Any] = _eval_frame.get_eval_frame_callback


def begins_uncompiled(fn: Fn) -> Fn:
    """`fn` as one that Python runs where a compiled function begins with it: a graph begins with what it calls.

    Traced into it is as any other.
    """
    fn.__code__ = fn.__code__.replace()
    _eval_frame.set_code_exec_strategy(fn.__code__, _ITSELF)
    return fn


def register_pytree_node(cls: type, flatten, unflatten) -> None:
    """Make `cls` a node for torch.func, whose tree library has no public registration."""
    pytree.register_pytree_node(  # type: ignore[attr-defined]
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


def register_constant(cls: type) -> None:
    """Let the compiler take what is of this class for constants, compared by `==`."""
    pytree.register_constant(cls)  # type: ignore[attr-defined]
