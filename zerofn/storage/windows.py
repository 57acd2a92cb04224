"""An accumulation window that is open in a checkpoint, for another number of ranks than saved it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.entries import Entry
from .fit import copies_in, name_of


def share_windows(
    own: list[Entry], flat: dict[str, Tensor], manifest: dict[str, Any], read: Callable[[Callable], dict[str, Any]]
) -> None:
    """Give every rank the mean of the copies that were saved, each on its way to a reduction.

    The reduction is a mean over ranks, and the mean of equal things is any of them: so it comes out as it would have.
    One copy is read at a time.

    Args:
        own: what was not reduced yet.
        flat: by key, what to write into; holds the first copy.
        manifest: of the checkpoint.
        read: fills the pieces that its argument gives for a manifest.
    """
    from .dcp import Piece

    if not own:
        return
    copies = copies_in(manifest)
    total = {e.key: torch.zeros_like(flat[e.key], dtype=_sum_dtype(flat[e.key])) for e in own}
    here = flat
    for copy in range(copies):
        if copy:
            here = {e.key: torch.empty_like(flat[e.key]) for e in own}
            names = {name_of(e, copy): Piece(here[e.key], e.offset or 0, e.shape) for e in own}
            if read(lambda _, names=names: names) != manifest:
                raise ValueError("the checkpoint was written anew while it was read; load it again.")
        for e in own:
            seen = here.get(e._replace(slot="seen").key)
            # `accumulate` does not clear a sum that it has forgotten.
            if seen is None or bool(seen.any()):
                total[e.key] += here[e.key].to(total[e.key].dtype)
    for key, x in total.items():
        into = flat[key]
        into.copy_(x / copies if into.is_floating_point() else x.bool() if into.dtype == torch.bool else x // copies)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64
