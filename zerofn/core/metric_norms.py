"""Norms of gradients for metrics: computed by the optimizer's kernel, or in a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor

from ..kernels.norms import leaf_norms
from .layout import Leaves


class Norms:
    """The norm of each gradient of a step, bucket after bucket.

    A kernel that reads the gradients anyway computes their norms for less than another pass does. It may leave that:
    norms that no kernel has added are computed when the next bucket comes. Requests are for tensors, and not for paths:
    a gradient that a transform before the optimizer has changed is another tensor, whose norm the metric must not show.

    Attributes:
        found: norms by path, each 0-d, or a number where a kernel has found it.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._requests: Leaves = {}

    def request(self, grads: Leaves) -> None:
        """Request the norms of these gradients, which must not be written until the next request."""
        self._compute()
        self._requests = dict(grads)

    def requested(self, paths: Sequence[str], grads: Sequence[Tensor]) -> bool:
        """Whether the norms of just these tensors are requested and not there yet."""
        return bool(self._requests) and all(map(is_, map(self._requests.get, paths), grads))

    def add(self, paths: Sequence[str], norms: Sequence[float]) -> None:
        """Take norms that a kernel has computed of requested gradients."""
        for path, norm in zip(paths, norms, strict=True):
            del self._requests[path]
            self.found[path] = norm

    def _compute(self) -> None:
        """Compute the requested norms that no kernel has added."""
        if self._requests:
            self.found.update(leaf_norms(self._requests))
            self._requests = {}

    def all(self) -> dict[str, Any]:
        """All requested norms."""
        self._compute()
        return self.found
