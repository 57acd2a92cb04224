"""What a model writes in forward into parameters that it sees as copies: stored from there, or refused."""

from __future__ import annotations

import torch
from torch import Tensor

from .._compat.functorch import innermost, is_wrapped
from .._compat.tensors import version
from .._errors import bad_leaves
from ..core.linear_map import is_linear_map
from ..sharded.write_back import carried, same
from .active_calls import Seen
from .boundary import Sight
from .parameter_views import address


def carry_written(sight: Sight, seen: Seen) -> None:
    """What a model writes into a parameter that it sees in another dtype goes into a copy, and is stored from there.

    `w.data` and NumPy write without a version's counting it, and are looked for as `Sampling` says.
    """
    _check_underived(seen)
    bad: dict[str, str] = {}
    local, model = sight.local, sight.model()
    mode = model is not None and model.training
    compares, late = local.sampling.next(mode)
    for path, (stored, view, begin) in seen.items():
        stages = sight.pipe.views_at_use[path].stages
        exact = not stages or all(s.only_dtype for s in stages)
        exchanged = address(view) != begin
        if not exchanged and view.dtype == stored.dtype and (exact or sight.views.suspended):
            continue
        # A transform's wrapper counts nothing that `foreach` or `.data` writes; the tensor inside of it does.
        inner = innermost(view)
        counted = not inner.is_inference() and max(version(view), version(inner)) > 0
        if not (exchanged or counted or (compares and begin is not None and exact and not _same(view, stored))):
            continue
        if not exact:
            bad[path] = "seen through a view half of the pipeline, which has no way back from here"
        elif is_wrapped(view):
            bad[path] = "inside of a transform of torch.func"
        elif view.shape != stored.shape:
            bad[path] = f"its .data was exchanged for {tuple(view.shape)}"
        elif late and not (exchanged or counted):
            bad[path] = "by .data or NumPy, and in no call before that was compared"
        else:
            local.sampling.found = True
            _carry(view, stored)
    if bad:
        right = (
            "with torch.no_grad(): self.w.copy_(new), in a pipeline whose view halves change dtypes alone;\n"
            "         else write outside of the call, or keep what the model writes in a buffer"
        )
        raise RuntimeError(
            bad_leaves("the model wrote into parameters in its forward, where they are copies", bad.items(), right)
        )


@torch.no_grad()
def _carry(view: Tensor, stored: Tensor) -> None:
    seen = view.detach()
    stored.copy_(carried(seen, stored.detach().to(seen.dtype), stored.detach()))


def _check_underived(seen: Seen) -> None:
    """Torch refuses that of a leaf. It cannot see here that it is one."""
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


@torch.no_grad()
def _same(view: Tensor, stored: Tensor) -> bool:
    return same(view.detach(), stored.detach().to(view.dtype))
