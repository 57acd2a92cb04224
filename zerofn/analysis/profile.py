"""`profile`: operations, bytes and seconds of a training step, by phase, module, transform and collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch

from .._errors import explain, kind_of
from ..core.arguments import check_flag
from ..eager.optimizer import Optimizer
from .profile_instruments import Measurement
from .profile_report import Measured, html_of, lines_of, mean_of

_UNDER_WAY: ContextVar[bool] = ContextVar("zerofn_profile", default=False)


class Profile:
    """Measures steps; see `zf.profile`.

    Attributes:
        measured: by number of the step, its `Measured`.
        count: steps that were begun.
    """

    def __init__(self, target: Any, steps: frozenset[int] | None, flops: bool):
        self.target, self.steps, self.flops = target, steps, flops
        self.measured: dict[int, Measured] = {}
        self.count = 0
        self._open: ExitStack | None = None
        self._measurement: Measurement | None = None

    def __enter__(self) -> Profile:
        if torch.compiler.is_compiling() or _UNDER_WAY.get():
            outer = "torch.compile" if torch.compiler.is_compiling() else "a zf.profile"
            why = "what the inner one does would be counted and timed as the step's own"
            right = "one profile around the step: it has all phases, modules, transforms and collectives"
            raise RuntimeError(explain(f"zf.profile inside of {outer}", why, right))
        token = _UNDER_WAY.set(True)
        with ExitStack() as stack:
            stack.callback(_UNDER_WAY.reset, token)
            if self.steps is None or self.count in self.steps:
                self._measurement = stack.enter_context(Measurement(self.flops))
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._open is not None
        self._open.__exit__(kind, error, trace)
        if self._measurement is not None and kind is None:
            self.measured[self.count] = self._measurement.result()
        self.count, self._open, self._measurement = self.count + 1, None, None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the step, and measure it if its number is in `steps`."""
        if isinstance(self.target, Optimizer):
            why = "a step of an attached model is a call of it, a backward and opt.step(), and not one function"
            right = "with profile: loss = model(x).mean(); loss.backward(); opt.step(); opt.zero_grad()"
            raise TypeError(explain("a call of zf.profile(opt)", why, right))
        with self:
            return self.target(*args, **keywords)

    @property
    def mean(self) -> Measured:
        """The mean over the measured steps.

        Raises:
            RuntimeError: no step was measured.
        """
        if not self.measured:
            begun = f"{self.count} were begun, and {_planned(self.steps)} to be measured"
            why = f"{begun}; of one that ends in an exception nothing is kept"
            right = "with profile: around a whole step, or profile(state, *batch); steps=None measures all"
            raise RuntimeError(explain("a zf.profile that has measured no step", why, right))
        return mean_of(list(self.measured.values()))

    def __repr__(self) -> str:
        if not self.measured:
            return f"zf.profile: no step measured yet ({self.count} begun, {_planned(self.steps)} to be)"
        return "\n".join(lines_of(self.mean, list(self.measured)))

    def _repr_html_(self) -> str:
        return html_of(self.mean, list(self.measured)) if self.measured else f"<p>{self!r}</p>"


def profile(target: Optimizer | Callable[..., Any], steps: Iterable[int] | None = None, flops: bool = True) -> Profile:
    """Measure steps: operations by module and phase, bytes of states, bytes sent, seconds of each phase.

    Around a step of an attached model it is entered, `with profile:`; a step of `zf.make_step` is called through it,
    `state, metrics = profile(state, *batch)`. In print and in notebooks it is a table; `profile.mean` has the numbers
    of a step on average, `profile.measured[i]` those of step i. Over ranks each measures itself, and all must make the
    same calls. A measured step computes the same numbers as another; a GPU is waited for at each end of a range.

    Args:
        target: an attached model's `opt`, or a step: any function that calls zerofn.
        steps: numbers of the steps to measure, counted from 0 where the profile is entered or called; by default all.
            The others run as if there was no profile.
        flops: count floating-point operations, by the formulas of `torch.utils.flop_counter`: matrix products,
            convolutions and attention, a multiplication and an addition as two. Every operator is looked at, in Python,
            and compiled code is run uncompiled: without it times are those of a plain step.

    What `Measured` has:

    ===============  ================================================================================================
    `seconds`        by phase; they add up to the whole. `"forward"`: calls of the model. `"loss"`: from their end to
                     the first gradient that comes back into the model: a loss outside of it, with its derivative.
                     `"backward"`, `"update"`. `"collectives"`: this rank waited for others. `"elsewhere"`: the rest.
    `flops`          by phase (`"forward"`, `"backward"`, `"update"`) and module, with all that is inside of it;
                     `""` is the whole. Names begin with the class of the outermost module. Of an update, by transform.
                     What activation checkpointing computes again counts as backward.
    `transforms`     seconds in the update half of each transform, without those of transforms inside of it.
    `read`           bytes of its state that each transform's update was given; `"params"` those an optimizer was.
    `written`        bytes of state and parameters that it gave back. Both of this rank, of leaves with a gradient.
    `sent`           bytes that this rank has sent, by collective, as a ring sends them.
    `calls`          of collectives.
    `waited`         seconds that this rank has waited for them. On a GPU those in forward and update alone.
    ===============  ================================================================================================

    A number that was not measured, such as the seconds of a backward that did not run, raises a `KeyError` that says
    so.

    Raises:
        TypeError: `target` is neither.
        ValueError: `opt` is detached; `flops` is no bool; a number of a step is no int, or negative, or there is none.
        RuntimeError: on entering, inside of another profile.

    >>> import torch, zerofn as zf
    >>> model = torch.nn.Linear(8, 4, bias=False)
    >>> opt = zf.attach(model, zf.adamw(1e-3))
    >>> with zf.profile(opt) as profile:
    ...     model(torch.ones(2, 8)).sum().backward()
    ...     opt.step()
    >>> profile.mean.flops["forward"], profile.mean.flops["backward"][""]  # 2 * 2 * 8 * 4; by the weight alone
    ({'': 128, 'Linear': 128}, 128)
    >>> profile.mean.read["params"], profile.mean.written["params"]
    (128, 128)
    """
    if not isinstance(target, Optimizer) and (not callable(target) or isinstance(target, torch.nn.Module)):
        right = "zf.profile(opt) of opt = zf.attach(model, tx), or zf.profile(step) of step = zf.make_step(loss_fn, tx)"
        raise TypeError(explain(f"zf.profile({kind_of(target)})", "it makes no training step", right))
    if isinstance(target, Optimizer) and not target._own.here:
        right = "opt = zf.attach(model, tx); zf.profile(opt)"
        raise ValueError(explain("zf.profile(opt) after opt.detach()", "it makes no steps any more", right))
    check_flag("zf.profile", "flops", flops)
    return Profile(target, _step_numbers(steps), flops)


def _step_numbers(steps: Any) -> frozenset[int] | None:
    if steps is None:
        return None
    found = list(steps) if isinstance(steps, Iterable) else []
    numbers = [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if not numbers or len(numbers) < len(found):
        why = "numbers of steps are ints from 0 on, and there is at least one"
        raise ValueError(explain(f"zf.profile(steps={steps!r})", why, "zf.profile(opt, steps=[10, 20])"))
    return frozenset(numbers)


def _planned(steps: frozenset[int] | None) -> str:
    return "all are" if steps is None else f"{sorted(steps)} {'is' if len(steps) == 1 else 'are'}"
