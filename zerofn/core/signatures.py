"""Functions of a transform are called with arguments by position; one that takes others is refused by its name."""

from __future__ import annotations

import inspect

from .._errors import explain
from .transform import Transform


def check_signatures(t: Transform) -> None:
    """Raise if a function of a transform cannot be called as it will be.

    Raises:
        TypeError: names the transform, the function and what it is called with.
    """
    called = (
        ("init_fn", t.init_fn, "leaves, layout"),
        ("prepare_fn", t.prepare_fn, "state, grads, params, ctx"),
        ("update_fn", t.update_fn, "grads, state, params, carry, ctx"),
        ("view_fn", t.view_fn, "layout, ranks"),
    )
    for name, fn, given in called:
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            continue  # of C, which tells nothing
        try:
            signature.bind(*given.split(", "))
        except TypeError as error:
            why = f"it is called with ({given}): {error}"
            raise TypeError(explain(f"{t.name}: {name}{signature}", why, f"def {name}({given}): ...")) from None
