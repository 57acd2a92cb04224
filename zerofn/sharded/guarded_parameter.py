"""Parameters whose `.grad` is not the full gradient refuse torch functions that would silently be wrong.

Under `reduce_scatter`, `all_reduce` and with `in_backward=True` the gradient is reduced or used in backward, and
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, a line of nearly every training loop, would do nothing. Under
`shard`, and before a late reduction, every rank would clip by another norm. `model.zero_grad()` would not clear what is
being reduced. Other readers of `.grad` get what there is.

A subclass of `nn.Parameter`, since nothing else sees that `.grad` is read. The caller is found by its frame. To replace
torch's functions would reach other programs in this process; to gather would hang a rank that reads `.grad` alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._compat.functorch import COMPILER, uncompiled
from .._compat.tensors import CONVERTING, read_grad, write_grad
from .._errors import explain
from ..core.layout import Leaves
from ..ranks.dtensor import is_distributed
from .parameter import IN_FULL, WRITING, check_plain, in_place, plain, refuse_distributed

PACKAGE = __name__.partition(".")[0]
OURS = f"{PACKAGE}."
INSIDE = (OURS, *COMPILER)
# Packages that read `.grad` and expect `None`.
LIBRARIES = ("torch", PACKAGE)
LOGGING = "accelerate"
CLIPPING = torch.nn.utils.clip_grad.__name__
CLEARING = nn.Module.zero_grad.__code__
APPLYING = CONVERTING.__code__
COPYING = nn.Parameter.__new__.__code__
CLIPPING_BY_NORM = ("clip_grad_norm_",)
CLIPPING_FUNCTIONS = (*CLIPPING_BY_NORM, "clip_grads_with_norm_", "clip_grad_value_")


def ours(frame: FrameType) -> bool:
    """Whether the caller is of this package."""
    return frame.f_globals.get("__name__", "").startswith(OURS)


def in_memory(frame: FrameType) -> bool:
    """Whether the caller means sizes in memory: this package, and the compiler."""
    return frame.f_globals.get("__name__", "").startswith(INSIDE)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of its comprehensions."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _asking() -> frozenset[int]:
    clips = [inspect.unwrap(f) for f in vars(torch.nn.utils.clip_grad).values() if inspect.isfunction(f)]
    return frozenset(id(code) for top in (CLEARING, *(f.__code__ for f in clips)) for code in _codes(top))


# Ids of code objects of torch, which live as long as the process: to compare code objects takes longer.
ASKING = _asking()


def pieces(tensors: Mapping[str, Tensor]) -> Leaves:
    """Plain tensors: of parameters and parts of an attached model this rank's shards."""
    return {path: x if type(x) is Tensor else _piece(x) for path, x in tensors.items()}


def _piece(x: Tensor) -> Tensor:
    with torch.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, GuardedParameter) else plain(x)


class Asks(NamedTuple):
    """Callbacks of a parameter to the attached model.

    Attributes:
        left: whether gradients are being reduced, or are reduced and not used yet.
        gone: the same, or used within backward since the last step.
        cleared: the user has cleared gradients otherwise than by `opt.zero_grad()`; whether to `None`.
        missed: the user has read `.grad` of one whose gradient is gone.
        moved: the user has given a sharded parameter other memory; its path.
    """

    left: Callable[[], bool]
    gone: Callable[[], bool]
    cleared: Callable[[bool], None]
    missed: Callable[[], None]
    moved: Callable[[str], None]


class GuardedParameter(nn.Parameter):
    """A parameter whose `.grad` is a part of its gradient, or `None`."""

    # The class it had, and gets again when it is detached or copied.
    plain: type[nn.Parameter]
    path: str
    # Why `refused` functions would be wrong.
    why: str
    refused: tuple[str, ...]
    asks: Asks
    # How often `.data` was read, through which writes are not counted by the tensor's version.
    lent: int = 0
    # The address of memory that the user has given it by `p.data = x`, which the stored parameter shares.
    adopted: int | None = None

    @uncompiled
    def _get(self) -> Tensor | None:
        # Not traced: what is given is of this package's classes, and depends on who asks.
        # Read several times a step and leaf: half a microsecond less than by the name of the module.
        asking = id(sys._getframe(1).f_code) in ASKING
        if asking and self._check_asked(sys._getframe(1)):
            return torch.full((), math.nan, device=self.device)
        grad = read_grad(self)
        if grad is None and self.asks.gone() and self.requires_grad:
            package, _, _ = sys._getframe(1).f_globals.get("__name__", "torch").partition(".")
            if package not in LIBRARIES:
                self.asks.missed()
        return grad if grad is None else self._shown(grad, "p.grad", sys._getframe(1))

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        """What the caller is given for the stored `x`; `how` it was asked for, for messages."""
        return x

    @uncompiled
    def _set(self, value: Tensor | None) -> None:
        self._before(value, "p.grad = None" if value is None else "p.grad = g", sys._getframe(1))
        write_grad(self, self._own(value, "p.grad = x", sys._getframe(1)))

    def _before(self, value: Tensor | None, how: str, frame: FrameType) -> None:
        """Refuse a gradient that the user sets where one has left; or note that the user clears it."""
        # A function that the compiler made has no module name.
        asks = not is_dynamo_compiling() and frame.f_globals.get("__name__", OURS)
        if asks and not asks.startswith(OURS):
            self._check_clearing(how)
            if value is None:
                self.asks.cleared(True)

    def _own(self, value: Tensor | None, how: str, frame: FrameType) -> Tensor | None:
        """What to store for `value` that the caller sets."""
        check_plain(value, how, f"the parameter {self.path}")
        return plain(value)

    @uncompiled
    def _delete(self) -> None:
        self._before(None, "del p.grad", sys._getframe(1))
        Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    grad = property(_get, _set, _delete)  # type: ignore[assignment]

    @property
    @uncompiled
    def data(self) -> Tensor:  # type: ignore[override]
        self.lent += 1
        return self._shown(Tensor.data.__get__(self), "p.data", sys._getframe(1))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        frame = sys._getframe(1)
        value, mine = self._own(value, "p.data = x", frame), Tensor.data.__get__(self)  # type: ignore[assignment,attr-defined]
        kept = value.shape == mine.shape and value.dtype == mine.dtype and value.device == mine.device
        if kept and not is_dynamo_compiling() and frame.f_code is APPLYING:
            # Into the memory that the optimizer has: `model.to("cpu:0")`, as accelerate calls it.
            with torch.DisableTorchFunctionSubclass():
                mine.copy_(value)
        else:
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._moved(frame)

    def detach(self) -> Tensor:
        if not is_dynamo_compiling():
            self._check_new(sys._getframe(1))
        return Tensor.detach(self)

    def _check_new(self, frame: FrameType) -> None:
        """Refuse `nn.Parameter(p)`, which calls `p.detach()`: torch's own message would be about `detach`."""
        if frame.f_code is COPYING:
            raise RuntimeError(
                explain(
                    f"nn.Parameter(p) of the parameter {self.path} of an attached model",
                    "it would be a second parameter over memory in which a pipeline keeps the first; "
                    "weight_norm and\nother parametrizations make one",
                    "nn.Parameter(p.detach().clone()) for one of its own; parametrizations before zf.attach, or after "
                    "opt.detach()",
                )
            )

    def _moved(self, frame: FrameType) -> None:
        """The user has given it other memory."""

    def _check_clearing(self, how: str) -> None:
        if self.asks.left():
            raise RuntimeError(
                explain(
                    f"{how} after a backward of an attached model",
                    "the gradients have left to be reduced over ranks, and would be a part of the next step",
                    "opt.zero_grad()",
                )
            )

    def _check_asked(self, frame: Any) -> bool:
        """Whether the caller wants a norm for a log and does not clip; raises if the caller's function is refused."""
        if frame.f_code is CLEARING:
            self._check_clearing("model.zero_grad()")
            self.asks.cleared(frame.f_locals.get("set_to_none", True))
        while frame is not None and frame.f_globals.get("__name__") == CLIPPING:
            name = frame.f_code.co_name.removeprefix("_")
            if name in self.refused and _logs(frame):
                return True
            if name in self.refused:
                clip = (
                    "zf.clip_by_value(max_value)" if name == "clip_grad_value_" else "zf.clip_by_global_norm(max_norm)"
                )
                right = (
                    f"{clip} in the chain, before the optimizer (of a Hugging Face Trainer: max_grad_norm=0 as well)"
                )
                raise RuntimeError(explain(f"torch.nn.utils.{name} on an attached model", self.why, right))
            frame = frame.f_back
        return False

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self.data.clone().as_subclass(self.plain).requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class Replica(GuardedParameter):
    """A parameter that this rank has in full: what writes into it refuses DTensors, which stand for other ranks too.

    Methods, and no `__torch_function__`, which every use of a parameter in forward would pass. So what is no method
    (`torch._foreach_copy_`), `p.data` and `p.grad` end in torch's words, as of any plain tensor.
    """


def _without_dtensors(name: str) -> Callable[..., Any]:
    """The method of `Tensor` of that name, which refuses DTensors."""
    method = getattr(Tensor, name)

    # Not torch's docstring: its examples are no doctests of ours.
    @functools.wraps(method, assigned=("__name__",))
    def checked(self: Replica, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_distributed, (*args, *kwargs.values()))):
            refuse_distributed(f"{name} of a parameter", f"the parameter {self.path}", IN_FULL)
        return method(self, *args, **kwargs)

    return checked


for _name in [name for name in dir(Tensor) if name in WRITING or (in_place(name) and name[0] != "_")]:
    setattr(Replica, _name, _without_dtensors(_name))


def _logs(frame: Any) -> bool:
    """Whether accelerate computes a norm without clipping, as a Hugging Face Trainer does for its log.

    It is given NaN, which changes nothing and cannot be taken for the norm.
    """
    most = None
    while frame is not None and frame.f_globals.get("__name__") == CLIPPING:
        most, frame = frame.f_locals.get("max_norm", most), frame.f_back
    asks = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    return asks == LOGGING and most == math.inf


def tell(undone: list[Callable[[], object]], p: Tensor, cls: type[GuardedParameter], **attributes: Any) -> None:
    """Change the class of a parameter in place, as `torch.nn.parameter` does for lazy modules.

    What is put into `undone` undoes it, whether the change has come to its end or not.

    A parameter of a class of the user's gets a class that is both. It is left as it is where the user's class has a
    `__torch_function__`: a tensor has only one.
    """
    plain: Any = type(p)
    if plain is not nn.Parameter:
        if not isinstance(p, nn.Parameter) or plain.__torch_function__ is not nn.Parameter.__torch_function__:
            return
        cls = type(f"{cls.__name__}{plain.__name__}", (cls, plain), {})

    def undo() -> None:
        p.__class__ = plain
        for name in (*attributes, "plain", "lent", "adopted"):
            vars(p).pop(name, None)

    undone.append(undo)
    # Before the class, whose methods look at them.
    vars(p).update(attributes, plain=plain)
    p.__class__ = cls
