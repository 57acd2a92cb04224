"""Learning rates as functions of the optimizer step (0 before the first update).

Any function `step -> float` is a schedule. The schedules of this module can be compared, printed and pickled, and take
a `step` that is a 0-d tensor, as in an ensemble under `torch.vmap`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ._errors import explain, missing
from .core.arguments import TINY, check_count, check_number, plain
from .core.html import card, curve
from .core.transform import OfTensors

if not TYPE_CHECKING:  # for a type checker a module with this function has every name

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing(__name__, name, globals()), name=name)


SHOWN = 100  # steps in the plot of a schedule without an end


def _call(name: str, **given: Any) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


@dataclass(frozen=True, repr=False)
class _Schedule(OfTensors):
    """The base class: schedules compare by their numbers, and print as the call that made them.

    Attributes:
        written: that call, for printing.
        function: the name of the function that makes one.
    """

    written: str = field(default="", compare=False, kw_only=True)
    function: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.written:
            given = {x.name: getattr(self, x.name) for x in fields(self) if x.compare}
            object.__setattr__(self, "written", _call(self.function, **given))

    def __repr__(self) -> str:
        return f"schedules.{self.written}"

    @property
    def length(self) -> int:
        """The number of steps after which the rate no longer changes."""
        return SHOWN

    def __call__(self, step: Any) -> Any:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """A curve, up to a tenth beyond `length`."""
        steps = self.length + max(1, self.length // 10)
        values = [float(self(i)) for i in range(0, steps, max(1, steps // 320))]
        return card(repr(self), curve(values, steps - 1))


@dataclass(frozen=True, repr=False)
class Constant(_Schedule):
    """The same rate at every step."""

    value: float
    function = "constant"

    def __call__(self, step: Any) -> Any:
        return self.value


@dataclass(frozen=True, repr=False)
class Linear(_Schedule):
    """A straight line from `start` to `end` in `steps` steps, then `end`."""

    start: float
    end: float
    steps: int
    function = "linear"

    @property
    def length(self) -> int:
        return self.steps

    def __call__(self, step: Any) -> Any:
        return self.start + (self.end - self.start) * _ramp(step, self.steps)


@dataclass(frozen=True, repr=False)
class Cosine(_Schedule):
    """Half a cosine from `peak` to `end` in `steps` steps, then `end` (Loshchilov & Hutter, 2017)."""

    peak: float
    steps: int
    end: float = 0.0
    function = "cosine"

    @property
    def length(self) -> int:
        return self.steps

    def __call__(self, step: Any) -> Any:
        x = math.pi * _ramp(step, self.steps)
        wave = torch.cos(x) if isinstance(x, Tensor) else math.cos(x)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + wave)


@dataclass(frozen=True, repr=False)
class Piecewise(_Schedule):
    """`before` for the first `boundary` steps, then `after`, whose own step starts at zero."""

    before: Any
    boundary: int
    after: Any
    function = "Piecewise"

    @property
    def length(self) -> int:
        return self.boundary + getattr(self.after, "length", SHOWN)

    def __call__(self, step: Any) -> Any:
        if isinstance(step, Tensor):
            both = self.before(step), self.after(step - self.boundary)
            # torch.where of two floats is float32. torch.full writes a number on a GPU, where a copy would wait.
            wide: dict[str, Any] = dict(dtype=torch.float64, device=step.device)
            rates = [x.to(**wide) if isinstance(x, Tensor) else torch.full((), x, **wide) for x in both]
            return torch.where(step < self.boundary, *rates)
        return self.before(step) if step < self.boundary else self.after(step - self.boundary)


@dataclass(frozen=True, repr=False)
class Step(_Schedule):
    """`value * gamma ** (step // every)`."""

    value: float
    every: int
    gamma: float
    function = "step"

    @property
    def length(self) -> int:
        return 5 * self.every

    def __call__(self, step: Any) -> Any:
        past = step // self.every
        return self.value * self.gamma ** (past.double() if isinstance(past, Tensor) else past)


@dataclass(frozen=True, repr=False)
class LayerKeep(_Schedule):
    """The probability that a layer is kept: `1 - depth * (1 - theta) * (1 - exp(-gamma * step))`."""

    theta: float
    gamma: float
    function = "layer_keep"

    @property
    def length(self) -> int:
        """The number of steps after which less than a hundredth of the change is left."""
        return math.ceil(math.log(100.0) / self.gamma) if self.gamma else SHOWN

    def __call__(self, step: Any, depth: float = 1.0) -> Any:
        faded = torch.exp(-self.gamma * step.double()) if isinstance(step, Tensor) else math.exp(-self.gamma * step)
        return 1.0 - depth * (1.0 - self.theta) * (1.0 - faded)


def _ramp(step: Any, steps: int) -> Any:
    # An integer tensor would divide to float32, and an ensemble would train at other rates than a single run. So the
    # step is converted to float64.
    return (step.double() / steps).clamp(max=1.0) if isinstance(step, Tensor) else min(step / steps, 1.0)


def constant(value: float) -> Constant:
    """The same rate at every step.

    Args:
        value: the rate; not negative.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> constant(0.1)(5)
        0.1
    """
    return Constant(*_checked("constant", value=value))


def linear(start: float, end: float, steps: int) -> Linear:
    """A straight line: `start + (end - start) * min(step / steps, 1)`.

    Args:
        start: the rate at step 0.
        end: the rate from step `steps` on.
        steps: positive.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> linear(1.0, 0.0, 4)(1)
        0.75
    """
    return Linear(*_checked("linear", start=start, end=end, steps=steps))


def warmup(peak: float, steps: int) -> Linear:
    """Linear warm-up: `peak * min((step + 1) / steps, 1)`, so that the rate of the first update is not zero.

    Args:
        peak: the rate from step `steps - 1` on.
        steps: positive.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> [warmup(1.0, 4)(s) for s in (0, 3, 9)]
        [0.25, 1.0, 1.0]
    """
    peak, steps = _checked("warmup", peak=peak, steps=steps)
    # This is a line from `peak / steps` at step 0 to the peak at step `steps - 1`.
    written = _call("warmup", peak=peak, steps=steps)
    return Linear(peak / steps if steps > 1 else peak, peak, max(steps - 1, 1), written=written)


linear_warmup = warmup


def cosine(peak: float, steps: int, end: float = 0.0) -> Cosine:
    """Half a cosine: `end + (peak - end) * (1 + cos(pi * min(step / steps, 1))) / 2` (Loshchilov & Hutter, 2017).

    Args:
        peak: the rate at step 0.
        steps: positive.
        end: the rate from step `steps` on.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> round(cosine(1.0, 10)(5), 6)
        0.5
    """
    return Cosine(*_checked("cosine", peak=peak, steps=steps, end=end))


def warmup_cosine(peak: float, warmup_steps: int, steps: int, end: float = 0.0) -> Piecewise:
    """Linear warm-up to `peak`, then half a cosine to `end`.

    Args:
        peak: the rate after the warm-up.
        warmup_steps: steps of the warm-up.
        steps: all steps, the warm-up included.
        end: the rate from step `steps` on.

    Raises:
        ValueError: `warmup_steps` is not less than `steps`, or a number is out of range.

    Examples:
        >>> s = warmup_cosine(1.0, 2, 10)
        >>> [round(s(i), 3) for i in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    given = {"peak": peak, "warmup_steps": warmup_steps, "steps": steps, "end": end}
    peak, warmup_steps, steps, end = _checked("warmup_cosine", **given)
    if warmup_steps >= steps:
        wrong, why = f"warmup_cosine(warmup_steps={warmup_steps}, steps={steps})", "steps includes the warm-up"
        right = f"warmup_cosine({peak}, warmup_steps={warmup_steps}, steps={warmup_steps + steps})"
        raise ValueError(explain(wrong, why, right))
    written = _call("warmup_cosine", peak=peak, warmup_steps=warmup_steps, steps=steps, end=end)
    return Piecewise(warmup(peak, warmup_steps), warmup_steps, Cosine(peak, steps - warmup_steps, end), written=written)


def step(value: float, every: int, gamma: float = 0.1) -> Step:
    """Step decay: `value * gamma ** (step // every)`.

    Args:
        value: the first rate.
        every: steps from one drop to the next.
        gamma: the factor of each drop.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> step(1.0, 10, 0.5)(25)
        0.25
    """
    return Step(*_checked("step", value=value, every=every, gamma=gamma))


def layer_keep(theta: float = 0.5, gamma: float = 0.001) -> LayerKeep:
    """The probability that `zf.layer_drop` keeps a layer, by step and depth.

    `theta(t) = (1 - theta) exp(-gamma t) + theta`, and `p = 1 - depth * (1 - theta(t))`. Layer `i` of `L`, counted from
    1, has `depth = i / L` (progressive layer drop, Zhang & He, 2020). At step 0 all layers are kept; for the last layer
    `p` tends to `theta`.

    Args:
        theta: in (0, 1].
        gamma: speed of the decay, not negative; with 0 nothing is dropped. The paper takes `100 / T` for a run of `T`
            steps.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> keep = layer_keep(0.5, 0.1)
        >>> keep(0), round(keep(10, 1.0), 3), round(keep(10, 0.25), 3)
        (1.0, 0.684, 0.921)
    """
    check_number("layer_keep", "theta", theta, low=TINY, high=1.0 + 1e-12)
    check_number("layer_keep", "gamma", gamma)
    return LayerKeep(plain(theta), plain(gamma))


def _checked(function: str, **numbers: Any) -> list[Any]:
    """The numbers, checked, as Python's own numbers in their order."""
    for name, value in numbers.items():
        if name.endswith("steps") or name == "every":
            check_count(function, name, plain(value), "steps")
        else:
            check_number(function, name, value)
    return [plain(value) for value in numbers.values()]
