"""Parameters whose `.grad` is not the whole gradient: what torch does with it would be wrong without a word.

Under `reduce_scatter`, `all_reduce` and in backward the gradient has left, and
`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, a line of nearly every training loop, would do
nothing; under `shard`, and before a late reduction, every rank would clip by another norm. `model.zero_grad()`
would leave what has left. Whoever else reads `.grad` finds what there is.

A subclass, since a parameter does not say otherwise that it is asked. Who asks is told by the frame of the
call: to replace torch's functions would reach programs that have nothing to do with this one, and to give out
what the other ranks have, on being asked, would hang those that ask on one rank alone, for a log.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._compat.compiler import COMPILER, uncompiled
from .._compat.modules import CONVERTING
from .._compat.tensors import version
from .._errors import explain
from ..core.layout import Leaves
from .part import plain

PACKAGE = __name__.partition(".")[0]
OURS = f"{PACKAGE}."
INSIDE = (OURS, *COMPILER)
# Who reads `.grad` and knows what to do where there is none.
LIBRARIES = ("torch", PACKAGE)
LOGGING = "accelerate"
CLIPPING = torch.nn.utils.clip_grad.__name__
CLEARING = nn.Module.zero_grad.__code__
APPLYING = CONVERTING.__code__
COPYING = nn.Parameter.__new__.__code__
# As for a plain parameter. For those who ask often and mean what there is: through the property it takes 2 us longer.
read, _write = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[attr-defined]
BY_NORM = ("clip_grad_norm_",)
BY_ANYTHING = (*BY_NORM, "clip_grads_with_norm_", "clip_grad_value_")


def ours(frame: FrameType) -> bool:
    """Whether this package asks."""
    return frame.f_globals.get("__name__", "").startswith(OURS)


def in_memory(frame: FrameType) -> bool:
    """Whether who asks for sizes works on what is in memory: this package, and the compiler."""
    return frame.f_globals.get("__name__", "").startswith(INSIDE)


@uncompiled
def write(p: Tensor, value: Tensor | None) -> None:
    """As for a plain parameter. The compiler of torch 2.14 fails at descriptors."""
    _write(p, value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of its comprehensions."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _asking() -> frozenset[int]:
    clips = [inspect.unwrap(f) for f in vars(torch.nn.utils.clip_grad).values() if inspect.isfunction(f)]
    return frozenset(id(code) for top in (CLEARING, *(f.__code__ for f in clips)) for code in _codes(top))


# Code objects that live as long as torch does, and are compared by what is in them, which takes longer.
ASKING = _asking()


def pieces(tensors: Mapping[str, Tensor]) -> Leaves:
    """Each as a state has it: of parameters and parts of an attached model this rank's pieces, as plain tensors."""
    return {path: x if type(x) is Tensor else _piece(x) for path, x in tensors.items()}


def _piece(x: Tensor) -> Tensor:
    with torch.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, Partial) else plain(x)


class Asks(NamedTuple):
    """What a parameter asks of the gradients of its model.

    Attributes:
        left: whether some have left to be reduced, and are not used yet.
        gone: whether some have left, or have been used within backward, since the last step.
        cleared: is told that the user clears them otherwise than by `opt.zero_grad()`, and whether to `None`.
        missed: is told that the user reads one that is gone.
        moved: is told the path of a sharded parameter that the user has given other memory.
    """

    left: Callable[[], bool]
    gone: Callable[[], bool]
    cleared: Callable[[bool], None]
    missed: Callable[[], None]
    moved: Callable[[str], None]


class Partial(nn.Parameter):
    """A parameter whose `.grad` is a part of its gradient, or nothing."""

    # The class it had, and has again when it is detached or copied.
    plain: type[nn.Parameter]
    path: str
    why: str
    # The functions that would be wrong.
    refused: tuple[str, ...]
    asks: Asks
    # How often somebody has had `.data`, through which a tensor is written without its version counting it.
    lent: int = 0
    # Where the memory is that the user has given it, of which what is stored is a part as well.
    adopted: int | None = None

    def _get(self) -> Tensor | None:
        # Asked for several times a step and leaf: half a microsecond less than by the name of the module.
        asking = not is_dynamo_compiling() and id(sys._getframe(1).f_code) in ASKING
        if asking and self._check_asked(sys._getframe(1)):
            return torch.full((), math.nan, device=self.device)
        grad = read(self)
        if grad is None and not is_dynamo_compiling() and self.asks.gone() and self.requires_grad:
            package, _, _ = sys._getframe(1).f_globals.get("__name__", "torch").partition(".")
            if package not in LIBRARIES:
                self.asks.missed()
        return grad if grad is None else self._shown(grad, "p.grad", sys._getframe(1))

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        """As whoever asks has what is kept."""
        return x

    def _set(self, value: Tensor | None) -> None:
        # A graph that the compiler made has no name.
        asks = not is_dynamo_compiling() and sys._getframe(1).f_globals.get("__name__", OURS)
        if asks and not asks.startswith(OURS):
            self._check_clearing("p.grad = None" if value is None else "p.grad = g")
            if value is None:
                self.asks.cleared(True)
        write(self, self._own(value, "p.grad = x", sys._getframe(1)))

    def _own(self, value: Tensor | None, how: str, frame: FrameType) -> Tensor | None:
        """As what is kept has what is set by whoever asks."""
        return plain(value)

    def _delete(self) -> None:
        Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    grad = property(_get, _set, _delete)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        self.lent += 1
        return self._shown(Tensor.data.__get__(self), "p.data", sys._getframe(1))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        frame = sys._getframe(1)
        value, mine = self._own(value, "p.data = x", frame), Tensor.data.__get__(self)  # type: ignore[assignment,attr-defined]
        kept = value.shape == mine.shape and value.dtype == mine.dtype and value.device == mine.device
        if kept and not is_dynamo_compiling() and frame.f_code is APPLYING:
            # Into the memory that there is, which the optimizer has: `model.to("cpu:0")`, as accelerate writes it.
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
        """Refuse `nn.Parameter(p)`, which torch makes by `p.detach()` and would refuse in words about that."""
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
        """It has other memory now."""

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
        """Whether it is a norm for a log, of which nothing is clipped; an error where it would be wrong."""
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


def _logs(frame: Any) -> bool:
    """Whether accelerate asks for the norm of gradients that nobody clips, as a Hugging Face Trainer does for its log.

    It is given NaN: that is not in the way, and cannot be taken for the norm.
    """
    most = None
    while frame is not None and frame.f_globals.get("__name__") == CLIPPING:
        most, frame = frame.f_locals.get("max_norm", most), frame.f_back
    asks = "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    return asks == LOGGING and most == math.inf


# How often a tensor may have been written into: as autograd counts it, and how often its memory was lent.
Writes = tuple[int, int]
_LENT = attrgetter("lent")


def writes(tensors: Collection[Tensor]) -> list[Writes]:
    """Of each tensor; from C, since steps and calls ask of every leaf."""
    with torch.DisableTorchFunctionSubclass():
        try:
            return list(zip(map(version, tensors), map(_LENT, tensors), strict=True))
        except (AttributeError, RuntimeError):
            # One is no parameter of an attached model, or was made in inference mode, where nothing is counted.
            return [(0 if p.is_inference() else version(p), getattr(p, "lent", 0)) for p in tensors]


def tell(p: Tensor, cls: type[Partial], **attributes: Any) -> Callable[[], None]:
    """Exchange the class of a parameter, which stays the object it was; what is returned undoes it.

    As `torch.nn.parameter` does for lazy modules. A parameter of a class of the user's gets one that is of
    both, unless that one has a `__torch_function__`, of which a tensor has only one.
    """
    plain: Any = type(p)
    if plain is not nn.Parameter:
        if not isinstance(p, nn.Parameter) or plain.__torch_function__ is not nn.Parameter.__torch_function__:
            return lambda: None
        cls = type(f"{cls.__name__}{plain.__name__}", (cls, plain), {})
    p.__class__ = cls
    vars(p).update(attributes, plain=plain)

    def undo() -> None:
        p.__class__ = plain
        for name in (*attributes, "plain", "lent", "adopted"):
            vars(p).pop(name, None)

    return undo
