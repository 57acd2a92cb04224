"""Resident parameters made anew from the stored ones after an update, one bucket at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.coalesced_views import cut
from ..core.layout import Leaves
from ..core.pipeline import Pipeline


class Anew:
    """The way from what is stored of one attached model to what it keeps, where that is another tensor.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form, which they keep.
    """

    def __init__(self, pipe: Pipeline, params: Leaves):
        self.road = pipe.road
        buckets = cut(pipe.layout.leaves, {p: x.dtype for p, x in params.items()}) if pipe.road.after_update else []
        self.buckets = [(bucket, {leaf.path: params[leaf.path] for leaf in bucket}) for bucket in buckets]

    @torch.no_grad()
    def make(self, stored: Leaves) -> None:
        """Write what `stored` is seen as into the parameters."""
        for bucket, into in self.buckets:
            # Of a parameter that stays a part it is the part that is written, and not what it is a part of.
            with torch.DisableTorchFunctionSubclass():
                plain = dict(zip(into, map(Tensor.detach, into.values()), strict=True))
            seen = self.road.see(self.road.after_update, {path: stored[path] for path in into}, bucket, plain)
            for path, x in seen.items():
                if x.data_ptr() != plain[path].data_ptr():
                    plain[path].copy_(x)
