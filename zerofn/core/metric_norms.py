"""Norms of gradients that metrics ask for: found by a kernel on its way, or in a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.norms import leaf_norms
from .layout import Leaves


class Norms:
    """The norm of each gradient of a step, bucket after bucket.

    A kernel that goes over the gradients anyway finds their norms for less than another pass does: it looks at a piece
    that the update then reads from the cache. Nobody has to: what no kernel has told is found when the next bucket
    comes. Nor can a kernel tell what was not asked, the norm of a gradient that a transform in between has changed:
    asked is for tensors, and not for paths.

    Attributes:
        found: norms by path, each 0-d.
    """

    def __init__(self) -> None:
        self.found: Leaves = {}
        self._asked: Leaves = {}
        self._numbers: dict[str, float] = {}

    def ask(self, grads: Leaves) -> None:
        """Ask for the norms of these gradients, which live and are not written until the next are asked for."""
        self.settle()
        self._asked = dict(grads)

    def wanted(self, paths: Sequence[str], grads: Sequence[Tensor]) -> bool:
        """Whether somebody has asked for the norms of just these tensors."""
        asked = self._asked
        return bool(asked) and all(asked.get(path) is g for path, g in zip(paths, grads, strict=True))

    def tell(self, paths: Sequence[str], norms: Sequence[float]) -> None:
        """What a kernel has found of what was asked for."""
        for path, norm in zip(paths, norms, strict=True):
            del self._asked[path]
            self._numbers[path] = norm

    def settle(self) -> None:
        """Find what nobody has told."""
        if self._asked:
            self.found.update(leaf_norms(self._asked))
            self._asked = {}

    def all(self) -> Leaves:
        """All that were asked for, each 0-d."""
        self.settle()
        if self._numbers:
            # One tensor of all, and not one for each bucket.
            numbers = torch.tensor(list(self._numbers.values()), dtype=torch.float32)
            self.found.update(zip(self._numbers, numbers.unbind(), strict=True))
            self._numbers = {}
        return self.found
