"""Update halves that tell more about themselves than what they return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .returned_values import CheckedUpdate


class Joining(partial):
    """An update half whose pass over memory may be joined with those of its neighbours in a chain.

    `Joining(update_fn)` is called like `update_fn`. If `ctx.passes` is given, the half leaves its programs there, and
    calls `ctx.settle()` before it looks at what is in a tensor of a leaf. What it returns has memory of its own
    (`Facts.keeps`). A wrapper's half is another function: it looks at what the inner one returns. A kernel by hand
    (`with_kernel`) is `Joining` too, if it leaves its programs in `LeafList.passes`.

    Attributes:
        apart: a function of a parameter: whether this half leaves no program for that leaf. Such leaves are updated in
            a call of their own, so that the others are joined. By default there are none.
    """

    apart: Callable[[Tensor], bool] | None = None

    def __new__(cls, update_fn: Callable[..., Any], *given: Any, apart: Callable[[Tensor], bool] | None = None) -> Any:
        made = super().__new__(cls, update_fn, *given)
        if apart is not None:
            made.apart = apart
        return made


class UpdateOfStored(partial):
    """An update half with a second function that updates leaves in the form in which they are stored.

    `UpdateOfStored(update_fn, stored_fn)` is called like `update_fn`.

    Attributes:
        stored_fn: a function with the arguments of `update_fn`, for slots whose tensors are each a
            `zerofn.kernels.codes.Coded`, or for parameters that are each a `zerofn.kernels.masters.Master`. It returns
            new parameters and slots of only those leaves that it can update in this form. If the state is donated, it
            writes the new values into the memory of the old ones.
        joins: `update_fn`, if that is `Joining`.
    """

    stored_fn: Callable[..., tuple[Any, Any]]
    joins: Joining | None

    def __new__(
        cls,
        update_fn: Callable[..., tuple[Any, Any]],
        stored_fn: Callable[..., tuple[Any, Any]],
    ) -> UpdateOfStored:
        made = super().__new__(cls, update_fn)
        made.stored_fn, made.joins = stored_fn, update_fn if isinstance(update_fn, Joining) else None
        return made


def stored_fn_of(update_fn: Any) -> Callable[..., tuple[Any, Any]] | None:
    """The `stored_fn` of an update half, also of one whose results are checked; `None` if it has none."""
    update_fn = update_fn.update_fn if type(update_fn) is CheckedUpdate else update_fn
    return update_fn.stored_fn if type(update_fn) is UpdateOfStored else None


def joins(update_fn: Any) -> Joining | None:
    """An update half that is `Joining`, also of one whose results are checked; `None` if it is none."""
    update_fn = update_fn.update_fn if type(update_fn) is CheckedUpdate else update_fn
    update_fn = update_fn.joins if type(update_fn) is UpdateOfStored else update_fn
    return update_fn if type(update_fn) is Joining else None
