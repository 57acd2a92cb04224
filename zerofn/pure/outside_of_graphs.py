"""Public functions that the compiler leaves alone, each with a reason by its name where it is to make one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .._compat.compiler import uncompiled
from .._errors import explain

Fn = TypeVar("Fn", bound=Callable[..., Any])


def outside_of_graphs(fn: Fn) -> Fn:
    """`fn` as what ends a graph. With `fullgraph=True` it is refused by its name, and not by a line inside of it.

    Left to the compiler they were cut into many graphs at what it cannot read, and the graphs of a pullback, which may
    be called again, were refused by autograd.
    """
    return _outside(
        fn,
        "it resolves a pipeline for a tree of parameters, by code that is in no graph",
        "step = torch.compile(zf.make_step(loss_fn, tx), fullgraph=True), a whole step that is one graph;\n"
        "zf.vjp(torch.compile(fn, fullgraph=True), tx, state, x), outside of what is compiled",
    )


def outside_since(why: str, right: str) -> Callable[[Fn], Fn]:
    """As `outside_of_graphs`, for another reason.

    Args:
        why: it can be in no graph.
        right: what to write.
    """
    return lambda fn: _outside(fn, why, right)


def _outside(fn: Fn, why: str, right: str) -> Fn:
    named = f"zf.{fn.__name__} inside of torch.compile(..., fullgraph=True)"
    return uncompiled(
        fn, explain(named, why, f"{right};\nor torch.compile without fullgraph, where it runs uncompiled")
    )
