"""`AccumulationWindow`: which steps of an attached model close the window, and whether its sum is divided."""

from __future__ import annotations

from .._errors import explain
from ..core.facts import COUNT
from ..core.pipeline import Pipeline
from ..core.transform import Transform, TransformState
from .current_state import CurrentState


class AccumulationWindow:
    """The window of all accumulations of a pipeline together.

    Args:
        pipe: the pipeline.
        current: its current state.

    Attributes:
        forced: the user's decision for the next step; `None` where `accumulate` counts.
        averaged: whether the sum is divided; `None` until `opt.backward` says so.
        every: micro-batches in a window.
        holds: whether any step is held at all.
    """

    def __init__(self, pipe: Pipeline, current: CurrentState):
        self.parts = [p for p in pipe.parts if p.facts.holds]
        self.current = current
        self.forced: bool | None = None
        self.averaged: bool | None = None
        self.every = 1
        for part in self.parts:
            self.every *= part.facts.window
        self.holds = self.every > 1

    def of(self, pipe: Pipeline) -> AccumulationWindow:
        """The same window, for a pipeline of the same chain in which more leaves are trained."""
        made = AccumulationWindow(pipe, self.current)
        made.forced, made.averaged = self.forced, self.averaged
        return made

    def closes(self) -> bool:
        """Whether the next step closes it."""
        if self.forced is not None:
            return self.forced
        if not self.parts:
            return True
        own = [(p, self.current.state.arriving[p.name]) for p in self.parts]
        return all(_counted(p, state) + 1 >= p.facts.window for p, state in own if state)

    def force(self, boundary: bool | None) -> None:
        """Run `opt.set_boundary`.

        Raises:
            TypeError, ValueError: no such setting, or one without effect.
        """
        if boundary is not None and not isinstance(boundary, bool):
            why = "give True, False, or None to count again"
            raise TypeError(explain(f"opt.set_boundary({boundary!r})", why, "opt.set_boundary(True)"))
        if boundary is not None and not self.holds:
            why = "a boundary has no effect without accumulate(k) in the pipeline: every step is one"
            right = "zf.chain(zf.accumulate(4), ...), or leave set_boundary() out"
            raise ValueError(explain(f"opt.set_boundary({boundary!r})", why, right))
        self.forced = boundary

    def average(self, scale_wrt_gas: bool) -> None:
        """Take the argument of `backward(scale_wrt_gas=...)`, which must be the same for a whole window.

        Raises:
            ValueError: weights divide already, or the window has begun with the other value.
        """
        if not scale_wrt_gas and any(p.facts.weighted for p in self.parts):
            why = "with accumulate(weighted=True) the sum is divided by the weights, not by the number of micro-steps"
            raise ValueError(explain("opt.backward(loss, scale_wrt_gas=False)", why, "opt.backward(loss)"))
        if self.averaged is not None and self.averaged is not scale_wrt_gas:
            raise ValueError(
                explain(
                    f"opt.backward(loss, scale_wrt_gas={scale_wrt_gas}) in a window that began with {self.averaged}",
                    "all losses of a window must be divided, or none",
                    "the same scale_wrt_gas until step() has closed the window",
                )
            )
        self.averaged = scale_wrt_gas


def _counted(part: Transform, state: TransformState) -> int:
    """The micro-steps in the open window of a transform."""
    if COUNT not in state:
        raise ValueError(
            explain(
                f"opt.is_boundary with {part.name}, which holds {part.facts.window} micro-steps",
                f"how many it has is read from {COUNT!r} in its state, which has {', '.join(map(repr, state))}",
                "an init_fn that returns {zerofn.extend.COUNT: counter(), ...}",
            )
        )
    return int(state[COUNT])
