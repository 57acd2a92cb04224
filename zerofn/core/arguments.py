"""Checks of public arguments and of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from .._errors import explain, kind_of
from ..kernels.recording import concrete
from .facts import NEEDS
from .number_graphs import check_numbers
from .transform import Schedule

# ----------------------------------------------------------------------------------------------------------------------
# These functions check the arguments of public functions: numbers, counts, flags, dtypes and learning rates.
#
# Each argument is checked where the user writes it, because a wrong number shows late or never: a loss scale that is
# infinite in float32 skips every step, and a flag of "no" is true.


LARGEST, TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


Made = TypeVar("Made", bound=Callable[..., Any])


def made_outside_of_graphs(fn: Made) -> Made:
    """Keep `fn`, which makes a transform, out of graphs; with `fullgraph=True` the error names it."""
    wrong = f"{fn.__name__}(...) inside of torch.compile(..., fullgraph=True)"
    why = "it checks its arguments by code that the compiler cannot put into a graph"
    right = (
        f"tx = ...{fn.__name__}(...), outside of what is compiled; a number that changes between steps is a tensor,\n"
        "which a graph reads: rate = torch.tensor(0.1), zf.sgd(lr=rate), and later rate.fill_(0.05)"
    )
    return uncompiled(fn, explain(wrong, why, right))


def plain(value: Any) -> Any:
    """A numpy number as a Python number, in lists and tuples too; anything else unchanged.

    So a transform prints, compares, pickles and computes with the same number: the value of `np.float32(0.1)`.
    """
    if isinstance(value, np.generic):
        return float(value) if isinstance(value, np.floating) else value.item()
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def check_number(function: str, name: str, value: Any, low: float = 0.0, high: float = math.inf) -> None:
    """Raise a ValueError unless `value` is a number in [low, high) that is finite in float32, or a 0-d tensor.

    Args:
        function: the function that has the argument, for the message.
        name: the argument's name.
        value: its value.
        low, high: its range.

    Examples:
        >>> check_number("mine", "decay", 1.5, high=1.0)
        Traceback (most recent call last):
        ...
        ValueError: mine(decay=1.5)
          why:   decay must lie in [0, 1)
          write: mine(decay=0.9)
    """
    if why := misfit(name, value, low, high):
        raise ValueError(explain(f"{function}({name}={value!r})", why, f"{function}({name}={_example(low, high)})"))


def misfit(name: str, value: Any, low: float, high: float) -> str | None:
    """Why `value` is not a number in [low, high) that is finite in float32; `None` if it is."""
    if isinstance(value, Tensor) and value.ndim == 0:
        if not concrete(value):
            return None  # Python cannot read it: vmap has a batch of numbers, a graph has its value only when it runs
        value = value.item()
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} is a number, and {value!r} is {kind_of(value)}"
    if not low <= value < high:
        return f"{name} must lie in [{low:g}, {high:g})"
    if value > LARGEST:
        return f"{name} is used in float32, whose largest number is {LARGEST:.3g}: there it is infinite"
    return None


def check_betas(function: str, betas: Any, example: tuple[float, ...] = (0.9, 0.999)) -> None:
    """Raise unless `betas` is a tuple of numbers in [0, 1), as many as there are in `example`."""
    if not isinstance(betas, tuple | list) or len(betas) != len(example):
        kind = "a pair of numbers" if len(example) == 2 else f"{len(example)} numbers"
        why: str | None = f"betas is {kind}, and {betas!r} is none"
    else:
        why = next(filter(None, (misfit("each of betas", beta, 0.0, 1.0) for beta in betas)), None)
    if why:
        raise ValueError(explain(f"{function}(betas={betas!r})", why, f"{function}(betas={example!r})"))


def given(value: Any) -> bool:
    """Whether a hyperparameter is used, where zero means "none". A tensor counts as used: its value may change."""
    return isinstance(value, Tensor) or bool(value)


def check_count(function: str, name: str, value: Any, of: str) -> None:
    """Raise unless `value` is a positive int that a counter of 64 bits can reach. `of` names the things it counts."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 63:
        why = f"{name} is a number of {of}: an int, at least 1"
        right = f"{function}({name}={_count(value)})"
        raise ValueError(explain(f"{function}({name}={value!r})", why, right))


def _count(value: Any) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 1 << 63
    return round(value) if number else 4


def check_seed(function: str, seed: Any) -> None:
    """Raise unless `seed` is an int of 64 bits. A longer seed would draw the same as its low 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64:
        why = "a seed is an int of 64 bits, as for torch.manual_seed"
        raise ValueError(explain(f"{function}(seed={seed!r})", why, f"{function}(seed=0)"))


def check_flag(function: str, name: str, value: Any) -> None:
    """Raise unless `value` is a bool: any text is true, even "no"."""
    if not isinstance(value, bool):
        why = f"{name} is True or False, and {value!r} is {kind_of(value)}"
        raise ValueError(explain(f"{function}({name}={value!r})", why, f"{function}({name}=True)"))


def _example(low: float, high: float) -> str:
    return f"{0.9 if high == 1.0 else max(low, 1e-3):g}"


def check_dtype(function: str, name: str, value: Any, allowed: tuple[torch.dtype | str, ...]) -> None:
    """Refuse a dtype that is not among `allowed`; `None` stands for "as it is" and passes."""
    if value is not None and value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(
            explain(
                f"{function}({name}={value!r})",
                f"{name} is one of {names}, or None",
                f"{function}({name}={allowed[0]})",
            )
        )


def check_function(where: str, fn: Any) -> None:
    """Raise unless `fn` can be called, before anything is computed or `fn` is kept for later."""
    if not callable(fn):
        why = f"the first argument is a function of parameters, and {fn!r} is {kind_of(fn)}"
        raise TypeError(explain(f"{where}({fn!r}, tx, ...)", why, f"{where}(lambda params, *inputs: ..., tx, ...)"))


def check_positional(where: str, keywords: dict[str, Any]) -> None:
    """Raise a TypeError for keyword arguments where all arguments are passed on by position."""
    if keywords:
        given = ", ".join(map("{}=...".format, keywords))
        why = "these arguments are passed on by position"
        raise TypeError(explain(f"{where}, {given})", why, f"{where}, {', '.join(keywords)})"))


def weight_of(weight: Any) -> Tensor:
    """The weight of a micro-batch in float64, on its device; raises if it is not a number."""
    x = plain(weight)
    if isinstance(x, Tensor):
        good = x.ndim == 0 and x.dtype != torch.bool and not x.is_complex()
    else:
        good = isinstance(x, int | float) and not isinstance(x, bool)
    if not good:
        raise no_weight(weight)
    return torch.as_tensor(x, dtype=torch.float64)


def no_weight(weight: Any) -> ValueError:
    """The error for a weight of a micro-batch that is not one finite, non-negative number."""
    return ValueError(
        explain(
            f"weight={weight!r}",
            "a weight is one number, finite and not negative",
            "step(state, *batch, weight=number_of_tokens)",
        )
    )


def check_lr(function: str, lr: Any) -> None:
    """A learning rate is a non-negative number or a function of the step."""
    if not callable(lr):
        check_number(function, "lr", lr)


def learning_rate(function: str, lr: float | Tensor | Schedule, step: Any, unrecorded: str = "") -> Any:
    """The learning rate at an optimizer step; what a schedule returns is checked.

    Args:
        function: the transform, for messages.
        lr: a number, or a schedule.
        step: optimizer steps so far.
        unrecorded: as of a `Context`.
    """
    value = plain(lr(step) if callable(lr) else lr)
    if unrecorded and isinstance(value, Tensor):
        if callable(lr):
            # The step runs under no_grad, where no result requires grad. So the schedule is called again to find out.
            with torch.enable_grad():
                check_numbers([(f"{function}(lr={_name(lr)})", lr(step))], unrecorded)
        else:
            check_numbers([(f"{function}(lr=...)", value)], unrecorded)
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(
            explain(
                f"{function}(lr={_name(lr)}) returned {value!r} at step {step}",
                "a schedule returns a number",
                f"{function}(lr=lambda step: 1e-3 * 0.99 ** step)",
            )
        )
    if isinstance(value, Tensor) and value.ndim:
        raise TypeError(
            explain(
                f"{function}(lr={_name(lr)}) returned a tensor of shape {tuple(value.shape)} at step {step}",
                "a learning rate is one number; per-leaf rates are groups",
                "zf.partition({'a': zf.adamw(1e-3), 'b': zf.adamw(1e-4)}, labels)",
            )
        )
    # Reading a tensor of a GPU would wait for the device. Inside vmap reading it raises.
    looked_at = isinstance(value, int | float) or (concrete(value) and value.device.type == "cpu")
    if looked_at and not 0 <= value <= LARGEST:
        raise ValueError(
            explain(
                f"{function}(lr={_name(lr)}) returned {value!r} at step {step}",
                "a learning rate is finite, in float32 too, and not negative",
                f"{function}(lr=zf.schedules.cosine(1e-3, 1000))",
            )
        )
    return value


def _name(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def check_needs(function: str, needs: Any, allowed: tuple[str, ...], why: str) -> None:
    """Raise unless `needs` is among `NEEDS`, and, for the reason `why`, among those that `function` allows."""
    if needs in NEEDS and needs in allowed:
        return
    known = ", ".join(map(repr, NEEDS))
    reason = why if needs in NEEDS else f"how much an update must see to be right is one of {known}"
    right = " or ".join(f'{function}(needs="{word}")' for word in (allowed[0], allowed[-1]))
    raise ValueError(explain(f"{function}(needs={needs!r})", reason, right))


# ----------------------------------------------------------------------------------------------------------------------
# `floats` turns metrics into Python numbers.


def floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats, for a log. All metrics of one device are copied to the host at once, not one by one.

    Args:
        metrics: `opt.metrics`, or those that a step returned; 0-d tensors or numbers by name.

    Returns:
        The same names with floats; a bool becomes 0.0 or 1.0.

    Raises:
        TypeError: a metric is no number, for example a batch of numbers from `vmap`. The message names the metric.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.5)
        >>> _, metrics = zf.update(tx, {"w": torch.ones(4)}, zf.init(tx, {"w": torch.zeros(4)}))
        >>> zf.floats(metrics)
        {'updated': 1.0, 'step': 1.0, 'skipped': 0.0, 'lr': 0.5, 'grad_norm': 2.0}
    """
    for name, x in metrics.items():
        if not (isinstance(x, int | float) or (isinstance(x, Tensor) and x.ndim == 0 and not x.is_complex())):
            what = f"a tensor of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else kind_of(x)
            right = "zf.floats({name: x for name, x in metrics.items() if x.ndim == 0})"
            raise TypeError(explain(f"zf.floats({{{name!r}: ...}})", f"it is {what}, and no number", right))
    tensors = {name: x.detach() for name, x in metrics.items() if isinstance(x, Tensor)}
    found: dict[str, float] = {}
    for device in {x.device for x in tensors.values()}:
        names = [name for name, x in tensors.items() if x.device == device]
        # fp32 cannot count steps beyond 2 ** 24. MPS has no float64.
        wide = torch.float64 if device.type != "mps" else torch.float32
        found |= dict(zip(names, torch.stack([tensors[name].to(wide) for name in names]).tolist(), strict=True))
    return {name: found[name] if name in found else float(x) for name, x in metrics.items()}
