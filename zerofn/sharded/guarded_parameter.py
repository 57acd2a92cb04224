"""Parameters that guard their `.grad`, where it has left to be reduced or used, or is reduced later.

Under `reduce_scatter`, `all_reduce` and with `in_backward=True` gradients leave `p.grad` in backward. If it were `None`
then, `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, a line of nearly every training loop, would do nothing,
and `model.zero_grad()` would not clear what is being reduced. So `p.grad` is a `GoneGradient` until it is cleared. It
has the gradient's shape and no numbers: to compute with it raises. Before a late reduction `p.grad` has the numbers of
this rank, and each rank would clip by another norm: there it is an `UnreducedGradient`.

`p.grad` is a property of a subclass of `nn.Parameter`, which autograd does not read: it adds to the tensor beneath.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._compat.functorch import COMPILER, graph_under_way, uncompiled
from .._compat.tensors import CONVERTING, alias_of, read_grad, without_memory, write_grad
from .._errors import explain
from ..core.layout import Leaves
from ..core.tree import flatten
from ..ranks.dtensor import is_distributed
from .opaque import plain

PACKAGE = __name__.partition(".")[0]
OURS = f"{PACKAGE}."
INSIDE = (OURS, *COMPILER)
APPLYING = CONVERTING.__code__
CLEARING = "model.zero_grad(), or p.grad = None,"


def in_memory(frame: FrameType) -> bool:
    """Whether the caller means sizes in memory: this package, and the compiler."""
    return frame.f_globals.get("__name__", "").startswith(INSIDE)


def pieces(tensors: Mapping[str, Tensor]) -> Leaves:
    """Plain tensors: of parameters and parts of an attached model this rank's shards."""
    return {path: x if type(x) is Tensor else _piece(x) for path, x in tensors.items()}


def _piece(x: Tensor) -> Tensor:
    if is_distributed(x):
        from .face import local_shard

        return local_shard(x)
    with torch.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, GuardedParameter) else plain(x)


class Asks(NamedTuple):
    """Callbacks of a parameter to the attached model.

    Attributes:
        left: whether gradients are being reduced, or are reduced and not used yet.
        gone: the same, or used within backward since the last step, or used by that step and not cleared yet.
        cleared: the user has cleared gradients otherwise than by `opt.zero_grad()`; whether to `None`.
        moved: the user has given a sharded parameter other memory; its path.
        numbers: the mean over ranks of the gradient that has left, in full, by path; `None` if it is used.
    """

    left: Callable[[], bool]
    gone: Callable[[], bool]
    cleared: Callable[[bool], None]
    moved: Callable[[str], None]
    numbers: Callable[[str], Tensor | None] = lambda path: None


# ----------------------------------------------------------------------------------------------------------------------
# These gradients are given out by `p.grad` where its numbers are gone, or are not reduced yet.


IN_CHAIN = (
    "a transform in the chain, before the optimizer: zf.clip_by_global_norm(max_norm) for\n"
    "torch.nn.utils.clip_grad_norm_ (of a Hugging Face Trainer: max_grad_norm=0 as well),\n"
    "zf.clip_by_value(max_value) for clip_grad_value_, one of your own by zf.leafwise for anything else"
)
# The right code if `scaler.unscale_(optimizer)` comes to such a gradient, which it does by a kernel only.
INSTEAD_OF_SCALER = (
    'zf.scale_loss("dynamic") in the chain for torch.amp.GradScaler: delete scaler.scale, unscale_, step and update;\n'
    "zf.clip_by_global_norm(max_norm) behind it for clip_grad_norm_"
)
UNREDUCED = "p.grad is this rank's own gradient, which is averaged over ranks later: each rank would clip differently"
NORMS = frozenset({"norm", "linalg_vector_norm"})
COPIES = frozenset({"clone", "_to_copy"})


class GoneGradient(Tensor):
    """`p.grad` of a parameter whose gradient has left: its shape, dtype and device, and no numbers.

    It can be cleared, by `p.grad = None` or `p.grad.zero_()`, as `model.zero_grad()` does. A copy of it has the mean
    over ranks, if it is not used yet: every rank must make the copy. Its norm is infinite, for
    programs that ask for the norm only to log it: those divide infinity by it, and scale by the NaN that comes of it,
    which changes nothing here. Whoever clips scales by a number, which is refused as everything else is.
    """

    of: GuardedParameter

    def __new__(cls, of: GuardedParameter) -> GoneGradient:
        made = without_memory(cls, of.shape, dtype=of.grad_dtype or of.dtype, device=of.device, storage_size=0)
        made.of = of
        return made

    # Calls in Python are left alone: all operations come to `__torch_dispatch__`.
    __torch_function__ = nn.Parameter.__torch_function__  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        listed, name = name.startswith("_foreach_"), name.removeprefix("_foreach_")
        first = args[0] if args and listed else args[:1]
        if first and all([isinstance(x, GoneGradient) for x in first]):
            if name == "detach":
                return first[0]
            if name == "zero_":
                first[0].of.clear("p.grad.zero_()", to_none=False)
                return None if listed else first[0]
            if name in NORMS:
                norms = [torch.full((), math.inf, device=x.device) for x in first]
                return norms if listed else norms[0]
            if name == "mul_" and isinstance(args[1], Tensor) and not args[1].ndim and bool(args[1].isnan()):
                return None if listed else first[0]
            if name in COPIES and not listed and (found := first[0].of.asks.numbers(first[0].of.path)) is not None:
                return func(found.to(first[0].dtype), *args[1:], **kwargs or {})
        gone = next(x for x in flatten((args, kwargs))[0] if isinstance(x, GoneGradient))
        wrong = f"{name} with p.grad of the parameter {gone.of.path}, which has no numbers here"
        raise RuntimeError(explain(wrong, gone.of.why, INSTEAD_OF_SCALER if name.startswith("_amp_") else IN_CHAIN))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GoneGradient(of {self.of.path}, of shape {tuple(self.shape)}: {self.of.why})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        wrong = f"a copy of p.grad of the parameter {self.of.path}, which has no numbers here"
        raise RuntimeError(explain(wrong, self.of.why, IN_CHAIN))


class UnreducedGradient(Tensor):
    """`p.grad` of a parameter whose gradient is reduced later, on its own memory.

    What is linear commutes with the mean over ranks. So to clip it is refused: `clamp_`, and in-place products with a
    tensor of one number, by which torch's functions scale to a norm. A Python number is the same on every rank.
    """

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            name = func.__name__.removeprefix("_foreach_")
            if name in ("mul_", "__imul__"):
                by = args[1]
                bad = isinstance(by, Tensor) and not by.ndim and bool(by != 1)
            else:
                bad = name in ("clamp_", "clamp_min_", "clamp_max_", "clip_")
            if bad:
                first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
                wrong = f"p.grad.{name}(...) of the parameter {vars(first).get('path', '')}, as torch's clipping does"
                raise RuntimeError(explain(wrong, UNREDUCED, IN_CHAIN))
            return func(*args, **kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.as_subclass(Tensor).clone()


class GuardedParameter(nn.Parameter):
    """A parameter whose `.grad` is a part of its gradient, or `None`."""

    # Its class before, which it gets again when it is detached or copied.
    plain: type[nn.Parameter]
    path: str
    # Why its gradient is gone, for messages.
    why: str
    # Whether its gradient is reduced later.
    unreduced: bool
    asks: Asks
    # How often `.data` was read, through which writes are not counted by the tensor's version.
    lent: int = 0
    # The address of memory that the user has given it by `p.data = x`, which the stored parameter shares.
    adopted: int | None = None

    @uncompiled
    def _get(self) -> Tensor | None:
        # The compiler does not trace this: the result may be of a class of this package.
        grad = read_grad(self)
        if grad is None:
            # While the compiler makes a graph, it reads `p.grad` as it is in memory.
            gone = self.asks.gone() and self.requires_grad and graph_under_way() is None
            if gone:
                refuse_optimizer(sys._getframe(1), self.path, self.why)
            return GoneGradient(self) if gone else None
        if self.unreduced:
            refuse_optimizer(sys._getframe(1), self.path, "p.grad is this rank's own gradient: ranks would drift apart")
        shown = self._shown(grad, "p.grad")
        if (
            self.unreduced
            and type(shown) is Tensor
            and shown is grad
            and grad.grad_fn is None
            and graph_under_way() is None
        ):
            shown = alias_of(grad, UnreducedGradient)
            shown.path = self.path
        return shown

    def _shown(self, x: Tensor, how: str) -> Tensor:
        """The tensor that the user gets for the stored `x`; `how` is the expression, for messages."""
        return x

    @uncompiled
    def _set(self, value: Tensor | None) -> None:
        self._before(value, CLEARING if value is None else "p.grad = g")
        write_grad(self, self._own(value, "p.grad = x"))

    def _before(self, value: Tensor | None, how: str) -> None:
        """Refuse a gradient that the user sets where one has left; or note that the user clears it."""
        if not is_dynamo_compiling():
            self._check_clearing(how)
            if value is None:
                self.asks.cleared(True)

    def clear(self, how: str, to_none: bool) -> None:
        """Note that the user clears gradients, or refuse it while they are being reduced."""
        self._check_clearing(how)
        self.asks.cleared(to_none)

    def _own(self, value: Tensor | None, how: str) -> Tensor | None:
        """What to store for `value` that the user sets."""
        check_plain(value, how, f"the parameter {self.path}")
        return plain(value)

    @uncompiled
    def _delete(self) -> None:
        self._before(None, "del p.grad")
        Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    grad = property(_get, _set, _delete)  # type: ignore[assignment]

    @property
    @uncompiled
    def data(self) -> Tensor:  # type: ignore[override]
        self.lent += 1
        return self._shown(Tensor.data.__get__(self), "p.data")  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        value, mine = self._own(value, "p.data = x"), Tensor.data.__get__(self)  # type: ignore[assignment,attr-defined]
        kept = value.shape == mine.shape and value.dtype == mine.dtype and value.device == mine.device
        if kept and not is_dynamo_compiling() and sys._getframe(1).f_code is APPLYING:
            # `model.to("cpu:0")`, as accelerate calls it, copies into the memory that the optimizer has.
            with torch.DisableTorchFunctionSubclass():
                mine.copy_(value)
        else:
            # It counts as a write, which ranks compare.
            self.lent += 1
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def _check_clearing(self, how: str) -> None:
        if self.asks.left():
            raise RuntimeError(
                explain(
                    f"{how} after a backward of an attached model",
                    "the gradients have left to be reduced over ranks, and would be a part of the next step",
                    "opt.zero_grad()",
                )
            )

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self.data.clone().as_subclass(self.plain).requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def refuse_optimizer(reader: FrameType, path: str, why: str) -> None:
    """Refuse a step of torch's optimizers on gradients that are gone or not reduced; they may be cleared."""
    if reader.f_globals.get("__name__", "").startswith("torch.optim.") and reader.f_code.co_name != "zero_grad":
        wrong = f"a step of torch.optim with p.grad of the parameter {path}, of an attached model"
        raise RuntimeError(explain(wrong, why, "opt = zf.attach(model, tx), and opt.step() alone"))


def check_plain(x: Any, how: str, what: str) -> None:
    """Refuse a DTensor in the place of a tensor that is full on this rank, which stands for other ranks too.

    What writes one into such a tensor ends in torch's own words.
    """
    if is_distributed(x):
        why, right = f"{what} is a plain tensor here, of its whole shape", how.replace("= x", "= x.full_tensor()")
        raise RuntimeError(explain(f"{how} with a DTensor x", why, f"{right}, on every rank"))


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
    # Attributes are set before the class, whose methods read them.
    vars(p).update(attributes, plain=plain)
    p.__class__ = cls
