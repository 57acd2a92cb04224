"""Decorators of public functions that torch.compile leaves alone, and refuses by name with `fullgraph=True`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat.functorch import (
    NO_LEVEL,
    begins_uncompiled,
    beneath_functorch,
    exports,
    forward_level,
    functorch_active,
    innermost_transform,
    makes_graphs,
    makes_proxies,
    uncompiled,
)
from .._errors import explain

Fn = TypeVar("Fn", bound=Callable[..., Any])


def kept_out_of_graphs(why: str, right: str, name: str | None = None) -> Callable[[Fn], Fn]:
    """A decorator that keeps a function out of graphs: a graph ends before each call of it.

    With `fullgraph=True` the error names the function instead of a line inside of it. Otherwise the compiler would cut
    such a function into many graphs, at whatever it cannot trace, and autograd refuses to run the graphs of a pullback
    twice.

    Args:
        why: why it cannot be in a graph.
        right: the right code.
        name: what the user called; by default `zf.` and the name of the function.
    """

    def decorate(fn: Fn) -> Fn:
        named = f"{name or f'zf.{fn.__name__}'} inside of torch.compile(..., fullgraph=True)"
        uncompiled_is_fine = f"{right};\nor torch.compile without fullgraph, where it runs uncompiled"
        return uncompiled(fn, explain(named, why, uncompiled_is_fine))

    return decorate


RESOLVES = "it resolves a pipeline for a tree of parameters, by code that is in no graph"
outside_of_graphs = kept_out_of_graphs(
    RESOLVES,
    "step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step that is one graph;\n"
    "zf.vjp(torch.compile(fn, fullgraph=True), tx, state, x), outside of what is compiled",
)


def torch_func_check() -> Callable[[], bool]:
    """Make a function that says whether torch.func is calling compiled code. torch makes no graph inside torch.func.

    With `fullgraph=True` that function refuses the call by name. Otherwise it returns True, and the caller has to run
    uncompiled: pieces that run beneath the transform, such as the forward of a `Function`, would be compiled for
    tensors of the transform.
    """

    def in_a_graph(x: Tensor) -> None:
        _not_there(x)

    @begins_uncompiled
    def called_by_torch_func() -> bool:
        if torch.compiler.is_compiling() or innermost_transform() is None or not makes_graphs():
            return False
        with beneath_functorch():
            # The compiler skips a function without a tensor among its arguments.
            in_a_graph(torch.empty(0))
        return True

    # The compiler remembers by code object whether a graph may break in a function. So each function gets a copy.
    in_a_graph.__code__ = in_a_graph.__code__.replace()
    return called_by_torch_func


def check_not_exported() -> None:
    """Refuse a step that torch.export or make_fx records as a program of tensors.

    torch.func.linearize records by make_fx as well, in a dual level.

    Raises:
        RuntimeError: there is one at work.
    """
    # `is_compiling` is true during torch.export too. The compiler cannot trace `makes_proxies`.
    if torch.compiler.is_compiling():
        what = "torch.export.export" if exports() else ""
    else:
        what = "make_fx" if makes_proxies() and forward_level() == NO_LEVEL and not functorch_active() else ""
    if not what:
        return
    why = "a step counts and branches in Python (rates, windows, clips), which an exported program of tensors cannot"
    right = "torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step that is one graph;\n"
    right += "torch.export.export(model, inputs) of a plain model, after opt.detach(), for what is to be served"
    raise RuntimeError(explain(f"{what} over a step of zf.make_step", why, right))


@uncompiled
def _not_there(x: Tensor) -> None:
    """torch.func.grad, vjp, jvp or vmap over what is compiled: torch makes no graph inside of its transforms.

    write: torch.compile(torch.func.grad(fn), fullgraph=True) of a function that calls the step as zf.make_step returned
    it; or torch.func.grad of that function; or torch.compile(step) without fullgraph, which runs uncompiled there
    """
