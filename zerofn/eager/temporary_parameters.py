"""Other values in the place of parameters for a while: `opt.gathered()` and `opt.averaged()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .._errors import explain
from .._interrupts import interrupts_held
from ..core.layout import Leaves
from ..core.parameter_averages import averages_of
from ..core.pipeline import Pipeline
from ..core.state import State
from ..sharded.guarded_parameter import read, write
from .current_state import CurrentState
from .resident_form import put


@contextmanager
def full_parameters(pipe: Pipeline, params: Leaves, current: CurrentState) -> Iterator[set[str]]:
    """Put full parameters in the place of shards or copies, and store those that have changed at the end.

    By an exception too, as where parameters are whole, and as FSDP's and DeepSpeed's do.

    Args:
        pipe: the pipeline of the model.
        params: its parameters by path.
        current: the state in force.

    Yields:
        The paths that were stored, once it has ended.
    """
    parts = {path: p.data for path, p in params.items()}
    fulls = pipe.road.whole(current.state.leaves)
    # Views that lose something have no way back, so what nobody wrote into is left as it is stored.
    before = None if pipe.road.exact else {path: full.clone() for path, full in fulls.items()}
    grads = {path: read(p) for path, p in params.items()}
    written: set[str] = set()
    made: list[str] = []
    inside = False
    try:
        for path, full in fulls.items():
            put(pipe, params[path], full, None)
        inside = True
        yield written
    finally:
        with interrupts_held():
            try:
                if inside:
                    written |= _store(pipe, params, current.state.leaves, before)
            except BaseException:
                current.tear()
                raise
            finally:
                for path, p in params.items():
                    put(pipe, p, parts[path], "the end of opt.gathered()")
                made = [] if pipe.gathering is None else _drop_gradients(params, grads)
    _check_gradients(made)


def _drop_gradients(params: Leaves, before: Mapping[str, Tensor | None]) -> list[str]:
    """Drop gradients from inside, which are whole and of this rank alone; their paths."""
    made = [path for path, p in params.items() if (g := read(p)) is not None and g is not before[path]]
    for path in made:
        write(params[path], None)
    return made


def _check_gradients(made: list[str]) -> None:
    """Refuse gradients from inside."""
    if made:
        raise RuntimeError(
            explain(
                f"with opt.gathered(): ... .backward(), which gave {made[0]} a gradient",
                "inside parameters are whole, and a step takes each rank's part of the mean over ranks",
                "the backward outside of it; torch.autograd.grad(loss, parameters) inside; opt.zero_grad() at its end",
            )
        )


@torch.no_grad()
def _store(pipe: Pipeline, params: Leaves, stored: Leaves, before: Leaves | None) -> set[str]:
    """Store full parameters that have changed; the paths of those that differ from what was stored."""
    written = set()
    for leaf in pipe.layout.leaves:
        if before is not None and torch.equal(before[leaf.path], params[leaf.path]):
            continue
        mine, home = pipe.road.store(params[leaf.path].detach(), leaf), stored[leaf.path]
        if not torch.equal(mine, home):
            written.add(leaf.path)
        home.copy_(mine)
    return written


class AveragedParameters:
    """Puts averages in the place of an attached model's parameters.

    Args:
        current: the state in force.
        refresh: makes the model's parameters from the stored ones.

    Attributes:
        on: whether parameters are averages at the moment.
    """

    def __init__(self, current: CurrentState, refresh: Callable[[], None]):
        self.current, self.refresh, self.on = current, refresh, False

    @contextmanager
    def during(self, state: State, of: str | None) -> Iterator[None]:
        """Write averages over the stored parameters, and these back at the end."""
        averages = averages_of(state, of, "opt.averaged({})")
        kept = {path: state.leaves[path].clone() for path in averages}
        try:
            with interrupts_held():
                self.on = True
                _write(state, averages)
                self.refresh()
            yield
        finally:
            try:
                self._end(state, kept)
            except KeyboardInterrupt:
                if self.on:
                    # It came before it was held.
                    self._end(state, kept)
                raise

    def _end(self, state: State, kept: Leaves) -> None:
        with interrupts_held():
            try:
                self._put_back(state, kept)
            finally:
                self.on = False

    def _put_back(self, state: State, kept: Leaves) -> None:
        """Write parameters back. Where that is interrupted they are stored, and the model may have other values."""
        try:
            _write(state, kept)
            self.refresh()
        except BaseException:
            self.current.tear()
            _write(state, kept)
            raise

    def refuse(self, what: str) -> None:
        """An error where averages would be taken for parameters."""
        if self.on:
            why = "the parameters are averages there, and would be taken for what is trained"
            raise RuntimeError(explain(f"{what} inside of `with opt.averaged():`", why, f"{what} behind it"))


@torch.no_grad()
def _write(state: State, leaves: Leaves) -> None:
    for path, x in leaves.items():
        state.leaves[path].copy_(x)
