"""Private names of torch.func and of the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

# ----------------------------------------------------------------------------------------------------------------------
# The compiler: whether it is tracing, which functions it must not trace, and which classes it takes as constants.


# torch's pytree library, which the compiler traces.
pytree = torch.utils._pytree  # type: ignore[attr-defined]

# Decides what the compiler does with each function that is called.
_eval_frame = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Before torch 2.13 a compiled function can neither make a frozen dataclass, such as a state, nor take it as a constant.
COMPILES_STATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# Before torch 2.13 a compiled function cannot take an attribute of a module away again: not by `module.__dict__.pop`
# nor `del module.__dict__[name]`, and `delattr` deletes the parameter of that name too.
COMPILES_REMOVALS = COMPILES_STATES

# The compiler's modules, which ask a tensor for its sizes to compare them with those in memory.
COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def asked_by_compiler(frame: FrameType) -> bool:
    """Whether the compiler looks at a tensor from this frame: then it means the tensor as it is in memory."""
    return frame.f_globals.get("__name__", "").startswith(COMPILER)


def while_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `fn` so that the compiler calls it instead of tracing it; its result is a constant in the graph.

    As torch.compiler.assume_constant_result, which would import the compiler.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


@while_traced
def exports() -> bool:
    """Whether torch.export is recording. Before torch 2.13 `torch.compiler.is_exporting` is true in every graph."""
    return torch.compiler._is_exporting_flag


def graph_under_way() -> object | None:
    """The compiler's context for the graph that it is making; another object for each graph."""
    return torch._guards.TracingContext.try_get()  # type: ignore[attr-defined]


# The mode in which `make_fx` and torch.func.linearize record operations with proxy tensors; `None` outside of it.
makes_proxies: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode,  # type: ignore[attr-defined]
    torch._C._TorchDispatchModeKey.PROXY,  # type: ignore[attr-defined]
)


@while_traced
def traced_symbolically() -> bool:
    """Whether torch.fx.symbolic_trace is recording. `make_fx` sets torch's flag too."""
    return is_fx_symbolic_tracing() and makes_proxies() is None


_OUTSIDE = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
Fn = TypeVar("Fn", bound=Callable[..., Any])


def uncompiled(fn: Fn, why: str | None = None) -> Fn:
    """Keep `fn`, and what it calls, out of graphs: a graph ends before it.

    As `torch.compiler.disable`, which would import the compiler at once and makes each call 1 us longer. The attribute
    is for a compiler that traces the caller; the strategy is for one that compiles functions as they are called.
    Rejected: `fn` asks whether it is traced. The compiler would make a graph of that question for each kind of
    argument, give up at the eighth, and then compile what `fn` calls.

    With `fullgraph=True` the error has the text `why`, or else the docstring of `fn`.
    """
    # A copy of the code object: functions made by one decorator share theirs, as those of torch's optimizers do.
    fn.__code__ = fn.__code__.replace()
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = why or fn.__doc__  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(fn.__code__, _OUTSIDE)
    return fn


_ITSELF = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)

# The callback that compiles functions as they are called; `None` or `False` if there is none.
makes_graphs: Callable[[], Any] = _eval_frame.get_eval_frame_callback


def begins_uncompiled(fn: Fn) -> Fn:
    """Make Python run `fn` where compilation would start with it: graphs start with the functions that it calls.

    If a compiled function calls it, it is traced like any other.
    """
    fn.__code__ = fn.__code__.replace()
    _eval_frame.set_code_exec_strategy(fn.__code__, _ITSELF)
    return fn


@begins_uncompiled
def whole_graph_wanted() -> bool:
    """Whether `torch.compile(..., fullgraph=True)` is about to compile the functions that are called here."""
    return getattr(getattr(makes_graphs(), "_torchdynamo_orig_backend", None), "_one_graph", False)


@while_traced
def whole_graph_traced() -> bool:
    """Whether the graph that is being traced was asked for with `fullgraph=True`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().one_graph
    except AttributeError:
        return False  # torch.export traces without that compiler


def register_pytree_node(cls: type, flatten, unflatten) -> None:
    """Make `cls` a node of torch's pytrees, which have no public registration."""
    pytree.register_pytree_node(  # type: ignore[attr-defined]
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


def register_constant(cls: type) -> None:
    """Make the compiler take instances of `cls` as constants, compared by `==`."""
    pytree.register_constant(cls)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------------------
# torch.func: which transforms are running, and the tensors inside of their wrappers.


# Wrapped tensors, and the levels of transforms.
functorch = torch._C._functorch  # type: ignore[attr-defined]

# The innermost running transform; `None` outside of any. A C function, which the compiler cannot trace.
innermost_transform = functorch.peek_interpreter_stack

# The level of the transform that wrapped a tensor, even if it has ended; `NOT_WRAPPED` for a plain tensor.
level_of: Callable[[Tensor], int] = functorch.maybe_get_level
NOT_WRAPPED = -1

# Removes a wrapper whose transform has ended; returns other tensors unchanged.
unwrapped_if_dead: Callable[[Tensor], Tensor] = functorch.unwrap_if_dead


# The level of running forward-mode AD, from 0 on: of `torch.autograd.forward_ad`, torch.func.jvp or linearize.
forward_level: Callable[[], int] = functools.partial(attrgetter("_current_level"), torch.autograd.forward_ad)
NO_LEVEL = -1


@while_traced
def functorch_active() -> bool:
    """Whether torch.func.grad, vjp, jvp or vmap is running."""
    return functorch.peek_interpreter_stack() is not None


@while_traced
def differentiating() -> bool:
    """Whether torch.func.grad, vjp or jvp is running at any level, or plain forward mode."""
    if forward_level() != NO_LEVEL:
        return True
    if functorch.peek_interpreter_stack() is None:
        return False
    return any(level.key().name in ("Grad", "Jvp") for level in functorch.get_interpreter_stack())


def forward_levels() -> tuple[int, bool]:
    """How many transforms of torch.func are in forward mode, and whether any is in reverse mode."""
    names = [level.key().name for level in functorch.get_interpreter_stack() or ()]
    return names.count("Jvp"), "Grad" in names


def only_reverse() -> bool:
    """Whether only reverse mode is running: plain autograd, torch.func.grad and vjp, at any level."""
    if torch.compiler.is_compiling() or forward_level() != NO_LEVEL:
        return False
    stack = functorch.get_interpreter_stack() if functorch_active() else ()
    return all(level.key().name == "Grad" for level in stack)


def only_vmap() -> int | None:
    """The level of the running vmap, if it is the only transform of torch.func and the compiler does not trace."""
    return None if torch.compiler.is_compiling() else vmap_level()


@while_traced
def vmap_level() -> int | None:
    """As `only_vmap`, also while the compiler traces."""
    if not functorch_active() or forward_level() != NO_LEVEL:
        return None
    levels = functorch.get_interpreter_stack()
    return levels[0].level() if len(levels) == 1 and levels[0].key().name == "Vmap" else None


def behind(x: Tensor, level: int) -> Tensor | None:
    """The tensor inside of a batched tensor of that level of vmap, batch axis included; else `None`. Can be traced."""
    return functorch._unwrap_batched(x, level)[0] if functorch.is_batchedtensor(x) else None


def stacked(x: Tensor) -> Tensor | None:
    """The tensor inside of a batched tensor of vmap, batch axis first; `None` if `x` is not batched."""
    return functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0) if is_wrapped(x) else None


def as_batch(x: Tensor, level: int) -> Tensor:
    """`x` as a batched tensor in the vmap of that level: its rows are the members of the batch."""
    return functorch._add_batch_dim(x, 0, level)


# A context in which no transform of torch.func runs: tensors that are made inside are constants to it.
beneath_functorch = temporarily_clear_interpreter_stack


def innermost(x: Tensor) -> Tensor:
    """The plain tensor inside of all wrappers of torch.func."""
    while functorch.maybe_get_level(x) != -1:
        x = functorch.get_unwrapped(x)
    return x


def is_wrapped(x: object) -> bool:
    """Whether torch.func has wrapped `x`, so that no Python branch may read its value."""
    return isinstance(x, Tensor) and functorch.maybe_get_level(x) != -1


def constant(x: Tensor) -> Tensor:
    """`x` detached at every level of torch.func; a batched tensor stays batched."""
    if not is_wrapped(x):
        with beneath_functorch():
            return x.detach()
    inner = constant(functorch.get_unwrapped(x))
    if functorch.is_batchedtensor(x):
        return functorch._add_batch_dim(inner, functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))
    return inner


def is_function(x: Tensor) -> bool:
    """Whether `x` has a gradient or a tangent, at any level of torch.func."""
    while True:
        # A batched tensor has neither itself, but the tensor inside may.
        alone = not functorch.is_batchedtensor(x)
        if alone and (x.requires_grad or torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None):
            return True
        if not is_wrapped(x):
            return False
        x = functorch.get_unwrapped(x)


def is_batch(x: Tensor) -> bool:
    """Whether `x` is wrapped by torch.func, or is a batched cotangent of `is_grads_batched`.

    The latter comes from an older vmap, and is recognised only by having no storage.
    """
    if functorch.maybe_get_level(x) != -1:
        return True
    if x.layout is not torch.strided:  # sparse tensors have no storage either
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return True
    return False


def levels(x: Tensor) -> frozenset[int]:
    """The levels of the vmaps that have batched a tensor."""
    found = set()
    while is_wrapped(x):
        if functorch.is_batchedtensor(x):
            found.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return frozenset(found)


class _Reinterpret(Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Reinterpret.apply(x, dtype), in_dims[0]


def reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of `x` as a dtype of the same size. In torch 2.11 `Tensor.view(dtype)` has no rule for vmap."""
    wrapped = not torch.compiler.is_compiling() and is_wrapped(x)
    return _Reinterpret.apply(x, dtype) if wrapped else x.view(dtype)
