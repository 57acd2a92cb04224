"""Parameters whose `.grad` is not the whole gradient: clipping it by torch's functions would be wrong without a word.

Under `reduce_scatter`, `all_reduce` and in backward the gradient has left, and
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, a line of nearly every training loop, would do
nothing; under `shard`, and before a late reduction, every rank would clip by another norm. Whoever else reads
`.grad` finds what there is.

A subclass, since a parameter does not say otherwise that it is asked. Clipping is told by its module: to
replace torch's functions would reach programs that have nothing to do with this one, and to give out what
the other ranks have, on being asked, would hang those that ask on one rank alone, for a log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import explain

CLIPPING = torch.nn.utils.clip_grad.__name__
BY_NORM = ("clip_grad_norm_",)
BY_ANYTHING = (*BY_NORM, "clip_grads_with_norm_", "clip_grad_value_")


class Partial(nn.Parameter):
    """A parameter whose `.grad` is a part of its gradient, or nothing."""

    why: str
    # The functions that would be wrong.
    refused: tuple[str, ...]

    def _get(self) -> Tensor | None:
        if sys._getframe(1).f_globals.get("__name__") == CLIPPING:
            self._check(sys._getframe(1))
        return Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    def _set(self, value: Tensor | None) -> None:
        Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    def _delete(self) -> None:
        Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    grad = property(_get, _set, _delete)  # type: ignore[assignment]

    def _check(self, frame: Any) -> None:
        while frame is not None and frame.f_globals.get("__name__") == CLIPPING:
            name = frame.f_code.co_name.removeprefix("_")
            if name in self.refused:
                clip = (
                    "zf.clip_by_value(max_value)" if name == "clip_grad_value_" else "zf.clip_by_global_norm(max_norm)"
                )
                right = (
                    f"{clip} in the chain, before the optimizer (of a Hugging Face Trainer: max_grad_norm=0 as well)"
                )
                raise RuntimeError(explain(f"torch.nn.utils.{name} on an attached model", self.why, right))
            frame = frame.f_back

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def tell(p: Tensor, cls: type[Partial], **attributes: Any) -> Callable[[], None]:
    """Exchange the class of a parameter, which stays the object it was; what is returned undoes it.

    As `torch.nn.parameter` does for lazy modules. A parameter of a class of the user's stays as it is.
    """
    if type(p) is not nn.Parameter:
        return lambda: None
    p.__class__ = cls
    vars(p).update(attributes)

    def undo() -> None:
        p.__class__ = nn.Parameter
        for name in attributes:
            delattr(p, name)

    return undo
