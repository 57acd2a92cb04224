"""Every torch name that is private or has changed between releases, looked up once."""

from __future__ import annotations

import torch
from torch import Tensor

_functorch = torch._C._functorch

# From torch 2.10 on a leaf may say in which dtype its .grad is kept.
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


def functorch_active() -> bool:
    """Whether the caller runs inside torch.func.grad, vjp, jvp or vmap."""
    return _functorch.peek_interpreter_stack() is not None


def differentiating() -> bool:
    """Whether the caller runs inside torch.func.grad, vjp or jvp, however deep in vmap."""
    if not functorch_active():
        return False
    kinds = {_functorch.TransformType.Grad, _functorch.TransformType.Jvp}
    return any(level.key() in kinds for level in _functorch.get_interpreter_stack())


def is_wrapped(x: object) -> bool:
    """Whether `x` is a tensor of a torch.func transform, whose value no Python branch may read."""
    return isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x)


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass: a recomputation, or a hook."""
    return torch._C._current_graph_task_id() != -1


def set_grad_dtype(leaf: Tensor, dtype: torch.dtype) -> None:
    """Let `leaf.grad` be kept in `dtype`; a no-op where it is the leaf's own."""
    if leaf.dtype != dtype:
        if not HAS_GRAD_DTYPE:
            raise ValueError(
                f"precision(grad_dtype={dtype}) on {leaf.dtype} parameters needs Tensor.grad_dtype, "
                f"which torch {torch.__version__} does not have. Use torch >= 2.10 or the parameters' dtype."
            )
        leaf.grad_dtype = dtype


def register_pytree_node(cls: type, flatten, unflatten) -> None:
    """Make `cls` a node for torch.func, whose tree library has no public registration."""
    torch.utils._pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


def at_end_of_backward(fn) -> None:
    """Run `fn` when the backward that is under way has finished. Public torch has no such moment."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)  # type: ignore[attr-defined]
