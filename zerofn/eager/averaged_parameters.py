"""`opt.averaged()`: averages in the place of parameters, for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .._errors import explain
from ..core.layout import Leaves
from ..core.parameter_averages import averages_of
from ..core.state import State


class AveragedParameters:
    """Puts averages in the place of an attached model's parameters.

    Args:
        refresh: makes the model's parameters from the stored ones.

    Attributes:
        on: whether parameters are averages at the moment.
    """

    def __init__(self, refresh: Callable[[], None]):
        self.refresh, self.on = refresh, False

    @contextmanager
    def during(self, state: State, of: str | None) -> Iterator[None]:
        """Write averages over the stored parameters, and these back at the end."""
        averages = averages_of(state, of, "opt.averaged({})")
        kept = {path: state.leaves[path].clone() for path in averages}
        self.on = True
        try:
            self._write(state, averages)
            yield
        finally:
            self._write(state, kept)
            self.on = False

    @torch.no_grad()
    def _write(self, state: State, leaves: Leaves) -> None:
        for path, x in leaves.items():
            state.leaves[path].copy_(x)
        self.refresh()

    def refuse(self, what: str) -> None:
        """An error where averages would be taken for parameters."""
        if self.on:
            why = "the parameters are averages there, and would be taken for what is trained"
            raise RuntimeError(explain(f"{what} inside of `with opt.averaged():`", why, f"{what} behind it"))
