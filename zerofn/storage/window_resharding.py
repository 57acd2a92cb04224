"""Loads an open accumulation window on another number of ranks: unreduced gradient sums are averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..core.state_entries import Entry
from .checkpoint_match import copies_in, saved_name


def share_windows(
    sums: list[Entry], flat: dict[str, Tensor], manifest: dict[str, Any], read: Callable[[Callable], dict[str, Any]]
) -> None:
    """Give every rank the mean of the copies that were saved of sums that are not yet reduced.

    Their reduction is a mean over ranks, and the mean of equal copies is any of them, so its result is the same.
    One copy is read at a time.

    Args:
        sums: the entries that are not yet reduced.
        flat: by key, the memory to write into; it has the first copy.
        manifest: of the checkpoint.
        read: reads the pieces that its argument chooses, and returns the manifest.
    """
    from .dcp import Piece

    if not sums:
        return
    copies = copies_in(manifest)
    total = {e.key: torch.zeros_like(flat[e.key], dtype=_sum_dtype(flat[e.key])) for e in sums}
    here = flat
    for copy in range(copies):
        if copy:
            here = {e.key: torch.empty_like(flat[e.key]) for e in sums}
            pieces = {saved_name(e, copy): Piece(here[e.key], e.offset or 0, e.shape) for e in sums}
            if read(lambda _, pieces=pieces: pieces) != manifest:
                raise ValueError("the checkpoint was written anew while it was read; load it again.")
        for e in sums:
            if _is_open(e, here):
                total[e.key] += here[e.key].to(total[e.key].dtype)
    for key, x in total.items():
        into = flat[key]
        into.copy_(x / copies if into.is_floating_point() else x.bool() if into.dtype == torch.bool else x // copies)


def check_views(sums: list[Entry], flat: dict[str, Tensor], manifest: dict[str, Any], later: tuple[str, ...]) -> None:
    """Raise if a view changes the gradient before the sum in the checkpoint and after it here, or the reverse.

    Args:
        sums: entries that are not yet reduced, in the checkpoint or here.
        flat: by key, what was read.
        manifest: of the checkpoint.
        later: the views that the sums have yet to pass here.
    """
    others = sorted({*later} ^ {*manifest.get("later", ())})
    if others and any(_is_open(e, flat) and bool(flat[e.key].any()) for e in sums):
        why = f"its sum and the one here differ in whether they have come through {', '.join(others)} already,\n"
        why += "which changes gradients, and stands behind a reduction that is made at the end of a window"
        right = "zf.save after a step that ends a window (opt.is_boundary), or zf.load on as many ranks as saved it"
        raise ValueError(explain(f"zf.load of an open window, saved by {manifest['ranks']} ranks", why, right))


def _is_open(e: Entry, flat: dict[str, Tensor]) -> bool:
    """Whether a sum belongs to an open window: `accumulate` does not clear the sums of a closed one."""
    seen = flat.get(replace(e, slot="seen", below="").key)
    return seen is None or bool(seen.any())


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64
