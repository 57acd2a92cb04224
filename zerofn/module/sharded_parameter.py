"""Sharded parameters that are used outside of the model's calls: in a penalty, in a loss defined elsewhere.

Under `shard` a parameter of an attached model is this rank's flat part, and `w.norm()` of that would be a
wrong number with a wrong gradient, without a word. So what is computed from a parameter is computed from
the full one, gathered for the purpose and in the dtype it is stored in. What looks at it (`p.shape`,
`p.data`, `p.grad`, `p.detach()`) or writes into it finds the part that is stored (`sharded.part`).

A subclass, since only a tensor's class is asked before a function runs on it. The parameter stays the
object it was, as hooks, ties and `p.grad` require. Giving out the full tensor where the module is asked for
its `weight` would be simpler, but `model.weight.grad` would always be `None`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._compat import SHALLOW
from .._errors import explain
from ..sharded.guarded_parameter import Partial, ours
from ..sharded.lazy_tensor import Lazy
from ..sharded.mixing import (
    LOSSES,
    check_beside_part,
    check_beside_whole,
    check_placed,
    check_slice,
    in_place,
    pointwise,
)
from ..sharded.part import Origin, handed, part_of

# What looks at a tensor, makes one that belongs beside it, or has the tensor among the ends of a graph.
# fmt: off
LOOKING = frozenset({
    "__set__", "__delete__", "__len__", "__repr__", "__format__", "__dir__", "backward", "data_ptr", "detach", "dim",
    "element_size", "get_device", "grad", "ndimension", "nelement", "numel", "retain_grad", "size", "stride", "type",
    "untyped_storage", SHALLOW,
})
# fmt: on
# Attributes that are computed.
COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# What torch leaves to subclasses.
BY_VALUE = {"tolist": Lazy.tolist, "numpy": Lazy.numpy}
BEGINNINGS = ("is_", "has_", "new_", "register_", "storage")
PRIVATE = frozenset(name for name in dir(Tensor) if name.startswith("_") and not name.startswith("__"))
# What gives out this rank's part, or the gradient of it.
GIVING = frozenset({"detach", "grad", "register_hook"})
# What fills a tensor with random numbers, or makes one beside it.
RANDOM = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "kaiming_uniform_",
        "log_normal_",
        "normal_",
        "random_",
        "trunc_normal_",
        "uniform_",
        "rand_like",
        "randint_like",
        "randn_like",
    }
)
# What functions of torch ask that take parameters for full ones without computing with them, and where they live.
ASKED = frozenset({"dim", "ndimension", "numel"})
WHOLES = (nn.init.__name__, nn.utils.convert_parameters.__name__)
# What `model.to(device)` does to every parameter, mostly without effect.
CONVERSIONS = frozenset({"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to"})


class Parted(Partial):
    """A parameter of which this rank has a part."""

    # The full one, differentiable.
    whole: Callable[[], Tensor]
    # Whether it is the full one for a while.
    is_whole: Callable[[], bool]
    path: str
    full: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            # An operator of torch.ops has its overload in its name.
            name, kwargs = func.__name__.partition(".")[0], kwargs or {}
            if name == "__set__" and func.__self__.__name__ == "data":
                _check_data(*args)
            if (name in ASKED or name in RANDOM) and not is_dynamo_compiling():
                _check_asker(args, sys._getframe(1))
            if name in RANDOM:
                _check_drawn([x for x in (*args, *kwargs.values()) if isinstance(x, Parted)], name)
            if name in GIVING and not is_dynamo_compiling():
                return _give(func, name, args, kwargs, sys._getframe(1))
            if _looks(func, name):
                return func(*args, **kwargs)
            if name in CONVERSIONS and _changes_nothing(func(*args, **kwargs), args, kwargs):
                return args[0]
            written = 1 if in_place(name) else 0
            if written and args and isinstance(args[0], Parted) and not args[0].is_whole():
                check_placed(name, f"the sharded parameter {args[0].path}")
            if not is_dynamo_compiling() and (pointwise(name) or name in LOSSES or name == "__setitem__"):
                if written and args and _is_part(args[0]):
                    return func(*_parts(name, args), **kwargs)
                _check_beside_wholes(name, [*args, *kwargs.values()])
            args = (*args[:written], *(_whole(x) for x in args[written:]))
            # `nn.init.constant_` hands on what it writes into by the name of its argument.
            kwargs = {k: x if written and k == "tensor" else _whole(x) for k, x in kwargs.items()}
            return BY_VALUE.get(name, func)(*args, **kwargs)

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        if is_dynamo_compiling() or self.is_whole() or ours(frame):
            return x
        return part_of(x, Origin(how, self.path, how in ("p.grad", "a gradient")))

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        _check_copied(self, "copy.deepcopy(model)")
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _check_copied(self, "torch.save(model, file)")
        return super().__reduce_ex__(protocol)


def _give(func: Any, name: str, args: tuple, kwargs: dict, frame: FrameType) -> Any:
    """What gives parts to others, who are told that they are."""
    if name == "detach":
        return args[0]._shown(func(*args, **kwargs), "p.detach()", frame)
    if name == "register_hook":
        p, hook = args
        given = hook if p.is_whole() or ours(frame) else handed(hook, Origin("what a hook is given", p.path, True))
        return func(p, given)
    found = func(*args, **kwargs)
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = inputs if isinstance(inputs, Sequence) else [inputs]
    return tuple(
        p._shown(g, "a gradient", frame) if isinstance(p, Parted) and isinstance(g, Tensor) else g
        for p, g in zip(inputs, found, strict=True)
    )


def _looks(func: Any, name: str) -> bool:
    if name == "__get__":
        return func.__self__.__name__ not in COMPUTED
    return name in LOOKING or name in PRIVATE or name.startswith(BEGINNINGS) or name.endswith("_like")


def _changes_nothing(converted: Tensor, args: tuple, kwargs: dict) -> bool:
    """Whether a conversion gives what was there. `to("cpu:0")`, as accelerate writes it, is a copy to torch."""
    p = args[0]
    same = converted.dtype == p.dtype and converted.device == p.device and converted.stride() == p.stride()
    # Of `to(..., non_blocking, copy)` the last.
    wanted = kwargs.get("copy", len(args) > 3 and isinstance(args[-2], bool) and args[-1])
    return converted is p or (same and not wanted)


def _is_part(x: Any) -> bool:
    """Whether it is a parameter, or a list of them for one of the `foreach` functions, that is a part now."""
    return any(map(_is_part, x)) if type(x) in (list, tuple) else isinstance(x, Parted) and not x.is_whole()


def _parts(name: str, args: tuple) -> tuple:
    """What an operation on elements that writes into a part is given: parts of other parameters stand beside it."""
    if not isinstance(args[0], Parted):
        return args
    target, beside = args[0], args[1:]
    if name == "__setitem__":
        check_slice("p[index] = x", beside[0], f"the sharded parameter {target.path}")
        beside = beside[1:]
    what = f"a part of the sharded parameter {target.path}"
    check_beside_part(name, [x for x in beside if not _like(x, target)], target, what)
    return args


def _like(x: Any, target: Parted) -> bool:
    return isinstance(x, Parted) and x.full == target.full


def _check_beside_wholes(name: str, args: list[Any]) -> None:
    beside = [x for x in args if not isinstance(x, Parted)]
    for p in args:
        if isinstance(p, Parted) and not p.is_whole():
            check_beside_whole(name, beside, p, p.full, p.path)


def _whole(x: Any) -> Any:
    if isinstance(x, Parted):
        return x if x.is_whole() else x.whole()
    return type(x)(map(_whole, x)) if type(x) in (list, tuple) else x


def _check_data(p: Parted, value: Tensor) -> None:
    """What `model.half()`, `model.to(device)` and `p.data = full` do."""
    same = value.shape == p.data.shape and value.dtype == p.dtype and value.device == p.device
    if not same and not p.is_whole():
        got, has = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (value, p.data))
        raise RuntimeError(
            explain(
                f"other data for a sharded parameter: {got} in place of {has}",
                "under shard it holds this rank's flat part, in the dtype and on the device it was attached with",
                "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)",
            )
        )


def _check_drawn(parts: list[Parted], name: str) -> None:
    """With one seed on all ranks, which is the rule, every part would get the same numbers."""
    if not all(p.is_whole() for p in parts):
        raise RuntimeError(
            explain(
                f"{name} of an attached sharded parameter",
                "under shard each rank would draw numbers for its part, and with one seed the same ones",
                f"with opt.gathered(): {name}, with one seed on all ranks",
            )
        )


def _check_asker(args: tuple, frame: Any) -> None:
    """`nn.init.orthogonal_` would say that it has one dimension, `vector_to_parameters` that sizes do not fit."""
    name, asks = "", ""
    while frame is not None and frame.f_globals.get("__name__") in WHOLES:
        # Of functions that call one another, the one that the user has called.
        asks, name, frame = frame.f_globals["__name__"], frame.f_code.co_name, frame.f_back
    if asks and not args[0].is_whole():
        seeds = ", with one seed on all ranks" if asks == nn.init.__name__ else ""
        raise RuntimeError(
            explain(
                f"{asks}.{name} of an attached sharded parameter",
                "under shard it is this rank's flat part to whatever looks at it or writes into it",
                f"with opt.gathered(): {name}{seeds}",
            )
        )


def _check_copied(p: Parted, how: str) -> None:
    """A copy would be a plain model with flat parts for parameters, of no use to anybody."""
    if not p.is_whole():
        raise RuntimeError(
            explain(
                f"{how} of an attached sharded model",
                "under shard its parameters are this rank's flat parts, and a copy would have no other",
                f"with opt.gathered(): {how}",
            )
        )
