"""The number of an update, by which kernels of Adam correct moments: a whole number from 1."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

from zerofn._errors import explain, kind_of
from zerofn.kernels.recording import concrete


def check_step(function: str, step: Any) -> None:
    """Refuse the number of an update that is none.

    At 0 the correction of moments divides by zero, and parameters were NaN from there on; one kernel reads 1.5 as 1 and
    another does not. A tensor that Python cannot read for nothing, on a GPU or in a batch of vmap, is not looked at.

    Raises:
        TypeError: no number.
        ValueError: no whole number from 1, or a tensor of another shape than `()`.

    >>> check_step("adam_", 0)
    Traceback (most recent call last):
    ...
    ValueError: adam_(step=0)
      why:   steps are counted from 1: at 0 the correction of moments divides by zero
      write: adam_(step=count + 1), with count the updates before this one
    """
    if type(step) is int and step >= 1:
        return
    right = f"{function}(step=count + 1), with count the updates before this one"
    value: Any = step
    if isinstance(step, Tensor):
        if not concrete(step):
            return
        if step.ndim:
            shape = tuple(step.shape)
            why = "all entries of the lists have had equally many updates, so it is one number"
            raise ValueError(explain(f"{function}(step=a tensor of shape {shape})", why, right))
        if type(step) is not Tensor or step.device.type != "cpu":
            return
        value = step.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        why = f"it is the number of this update, from 1, and {value!r} is {kind_of(value)}"
        raise TypeError(explain(f"{function}(step={step!r})", why, right))
    number = float(value)
    if not number >= 1:
        why = "steps are counted from 1: at 0 the correction of moments divides by zero"
        raise ValueError(explain(f"{function}(step={step!r})", why, right))
    if number % 1:
        raise ValueError(explain(f"{function}(step={step!r})", "updates are counted in whole numbers", right))
