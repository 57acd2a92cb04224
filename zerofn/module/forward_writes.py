"""Writes of a model's forward into parameters that are copies there: stored, or refused."""

from __future__ import annotations

from operator import attrgetter, itemgetter

import torch

from .._compat.functorch import innermost, is_wrapped
from .._compat.tensors import version
from .._errors import bad_leaves
from ..core.linear_map import is_linear_map
from ..sharded.write_back import carried
from .active_calls import Seen
from .boundary import ModelBoundary
from .parameter_views import address

# Of what is seen of a parameter. By functions of C.
_VIEW, _NODE = itemgetter(1), attrgetter("grad_fn")


@torch.no_grad()
def carry_written(boundary: ModelBoundary, seen: Seen) -> None:
    """Store what forward wrote into views of parameters in another dtype, which are copies.

    What counts a version is stored, in every call. Writes of NumPy and through `w.data` count none, and are lost.

    Args:
        boundary: of the model.
        seen: the views of the call, as in `ThreadState`.

    Raises:
        RuntimeError: every parameter is named whose write cannot be stored.
    """
    _check_leaves(seen)
    bad: dict[str, str] = {}
    inexact, suspended = boundary.views.inexact, boundary.views.suspended
    for path, (stored, view, begin) in seen.items():
        exact, exchanged = path not in inexact, address(view) != begin
        if not exchanged and view.dtype == stored.dtype and (exact or suspended):
            continue
        # `foreach` and `.data` count writes in the tensor inside of a wrapper of torch.func, and not in the wrapper.
        inner = innermost(view)
        # A view half that gives its argument back gives no copy: what is written into it is stored, and counted there.
        copied = exact or address(inner) != address(stored)
        counted = copied and not inner.is_inference() and max(version(view), version(inner)) > 0
        if not (exchanged or counted):
            continue
        if not exact:
            bad[path] = "seen through a view half of the pipeline, which has no way back from here"
        elif is_wrapped(view):
            bad[path] = "inside of a transform of torch.func"
        elif view.shape != stored.shape:
            bad[path] = f"its .data was exchanged for {tuple(view.shape)}"
        else:
            new, old = view.detach(), stored.detach()
            stored.copy_(carried(new, old.to(new.dtype), old))
    if bad:
        right = (
            "with torch.no_grad(): self.w.copy_(new), in a pipeline whose view halves change dtypes alone;\n"
            "         else write outside of the call, or keep what the model writes in a buffer"
        )
        raise RuntimeError(
            bad_leaves("the model wrote into parameters in its forward, where they are copies", bad.items(), right)
        )


def _check_leaves(seen: Seen) -> None:
    """Refuse what torch refuses of a leaf: a write with gradients enabled. To torch the view is no leaf."""
    # A class of nodes is that of linear maps, or is not.
    kinds = {type(node): node for node in map(_NODE, map(_VIEW, seen.values())) if node is not None}
    if all(map(is_linear_map, kinds.values())):
        return
    bad = [
        (path, f"changed by {view.grad_fn.name()}")
        for path, (stored, view, _) in seen.items()
        if view.grad_fn is not None and view is not stored and not is_linear_map(view.grad_fn)
    ]
    if bad:
        raise RuntimeError(
            bad_leaves(
                "the model wrote into parameters in its forward with gradients enabled; what it wrote is in them",
                bad,
                "w = self.weight * 2 instead of self.weight.mul_(2), or the write under torch.no_grad()",
            )
        )
