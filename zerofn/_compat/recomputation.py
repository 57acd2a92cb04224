"""Activation checkpoints in functions of parameters: backward recomputes with the parameters of forward.

`torch.utils.checkpoint` calls its function again in backward. By then `torch.func.functional_call` has put the module's
own parameters back, so torch recomputes with those: gradients are wrong, without an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import stateless

from .._errors import explain
from .functorch import functorch_active

_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_CALL = stateless._functional_call.__code__


class _Evaluation(threading.local):
    """The function that runs in this thread: its name in messages, and whether `torch.autograd.grad` follows."""

    where: str | None = None
    by_grad = False


_evaluation = _Evaluation()


@contextmanager
def recomputes_as_called(where: str, by_grad: bool) -> Iterator[None]:
    """A context around a function of parameters: what it checkpoints is recomputed with its parameters.

    Args:
        where: the caller, for messages.
        by_grad: whether gradients come from `torch.autograd.grad`, which torch's reentrant checkpoints do not allow.
    """
    _extend_checkpoints()
    before = _evaluation.where, _evaluation.by_grad
    _evaluation.where, _evaluation.by_grad = where, by_grad
    try:
        yield
    finally:
        _evaluation.where, _evaluation.by_grad = before


@cache
def _extend_checkpoints() -> None:
    """Let torch's checkpoints call `_again`. It returns their function unchanged outside of `recomputes_as_called`."""
    frame, function = torch.utils.checkpoint._CheckpointFrame, torch.utils.checkpoint.CheckpointFunction
    begin = frame.__init__

    def begin_as_called(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        begin(self, _again(recompute_fn, False), *args, **kwargs)

    def apply_as_called(cls: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return super(function, cls).apply(_again(run_function, True), *args)  # type: ignore[misc]

    frame.__init__ = begin_as_called
    function.apply = classmethod(apply_as_called)  # type: ignore[assignment]


def _again(fn: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    """The function of a checkpoint that begins, with the tensors that `functional_call` has put into modules by now."""
    where, by_grad = _evaluation.where, _evaluation.by_grad
    if where is None or not torch.is_grad_enabled():
        return fn
    if functorch_active() and (reentrant or not _hooks_allowed()):
        _refuse(f"torch.utils.checkpoint in {where} inside of torch.func", "torch.func differentiates no checkpoint")
    if reentrant and by_grad:
        raise RuntimeError(
            explain(
                f"torch.utils.checkpoint(..., use_reentrant=True) in {where}",
                "torch.autograd.grad, which differentiates it, does not go through reentrant checkpoints",
                "use_reentrant=False; in transformers model.gradient_checkpointing_enable({'use_reentrant': False})",
            )
        )
    calls, mapped = _calls(), functorch_active()

    def again(*args: Any, **kwargs: Any) -> Any:
        if mapped:
            _refuse(f"torch.utils.checkpoint in {where} inside of torch.func.vmap", "backward recomputes outside of it")
        with recomputes_as_called(where, by_grad):
            return _within(calls, fn, *args, **kwargs)

    return again


def _refuse(wrong: str, why: str) -> NoReturn:
    right = "the function without a checkpoint; or checkpoint(torch.func.vmap(f), x) in place of vmap of a checkpoint"
    raise RuntimeError(explain(wrong, why, right))


class _Within(nn.Module):
    """Calls a function while `functional_call` has put tensors into a module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)


# A module, the tensors that are in it now by name, and whether tied places get one tensor.
_Call = tuple[nn.Module, dict[str, Tensor], bool]


def _within(calls: list[_Call], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` as inside of these calls of `functional_call`, the outermost first."""
    if not calls:
        return fn(*args, **kwargs)
    (module, tensors, tie), rest = calls[0], calls[1:]
    given = {f"module.{name}": x for name, x in tensors.items()}
    return functional_call(_Within(module), given, (partial(_within, rest, fn), args, kwargs), tie_weights=tie)


def _calls() -> list[_Call]:
    """The calls of `functional_call` that are running in this thread, the outermost first."""
    found: list[_Call] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            held = frame.f_locals
            module, given = held["module"], held["parameters_and_buffers"]
            # The module may have replaced a tensor since it was called, such as a buffer.
            found.append((module, {n: attrgetter(n)(module) for n in given}, held["tie_weights"]))
        frame = frame.f_back
    return found[::-1]
