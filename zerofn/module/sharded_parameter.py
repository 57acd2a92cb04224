"""`nn.Parameter` under `shard`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .._compat.autograd import gradient_hooks, hooks_after, in_backward
from .._compat.functorch import uncompiled
from .._compat.tensors import SHALLOW_COPY_CHECK
from .._errors import explain
from ..sharded.guarded_parameter import GuardedParameter, in_memory, ours
from ..sharded.lazy_tensor import Lazy
from ..sharded.parameter import (
    BY_NAME,
    COMPUTED,
    FOREACH,
    HANDLERS,
    INIT,
    OF_IMAGES,
    PRIVATE,
    SIZES,
    AfterGradients,
    Handed,
    Kind,
    Origin,
    Piece,
    Wholes,
    as_norm,
    check_no_argument,
    check_sizes,
    check_unwritten,
    columns_of,
    draws,
    exchanged,
    first_by_position,
    in_place,
    kept,
    kind_of,
    likes,
    own_shard,
    part_of,
    pointwise,
    printed,
    reshapes,
    sizes,
    tensors_in,
    written,
)
from ..sharded.parameter import origin_of as of_part
from .tensor_parallel import shown_gradients

# ----------------------------------------------------------------------------------------------------------------------
# These functions refuse what a sharded parameter cannot do: take other memory, be copied, or give views that look for
# the edge of a graph.


def refuse_edge(name: str, path: str) -> NoReturn:
    """Refuse `p.view_as(p)` and the like, by which programs find the AccumulateGrad node of `p` for a hook on it.

    The hook would never be called: the graph of a block ends at the gathered parameter.
    """
    raise RuntimeError(
        explain(
            f"p.{name}(p) of the sharded parameter {path}, as register_multi_grad_hook(params, fn) looks for an edge",
            "under shard its gradient is reduced where its block ends, and comes to no such edge of a graph",
            "p.register_hook(fn) of each, or register_multi_grad_hook(params, fn, mode='any')",
        )
    )


def check_data(value: Tensor, mine: Tensor) -> None:
    """Refuse `model.half()`, `model.to(device)` and `p.data = full`, which exchange this rank's shard."""
    if value.shape != mine.shape or value.dtype != mine.dtype or value.device != mine.device:
        got, has = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (value, mine))
        raise RuntimeError(
            explain(
                f"other data for a sharded parameter: {got} in place of {has}",
                "under shard it holds this rank's flat part, in the dtype and on the device it was attached with",
                "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)",
            )
        )


def check_parametrization(frame: FrameType, args: tuple) -> None:
    """Refuse `orthogonal`, which writes by index into `torch.zeros_like(p)` before it exchanges the memory of `p`."""
    if frame.f_globals.get("__name__") == parametrizations.__name__ and not args[0].is_whole():
        refuse_memory(f"{parametrizations.__name__}.orthogonal(...)", args[0].path)


def refuse_memory(how: str, path: str) -> NoReturn:
    """Refuse `p.set_(x)`, by which parametrizations with a `right_inverse` exchange a parameter's memory."""
    raise RuntimeError(
        explain(
            f"{how} of the sharded parameter {path}",
            "it gives the parameter other memory, and under shard this rank's part is stored in what it has",
            "torch.nn.utils.parametrize and parametrizations before zf.attach, or after opt.detach();\n"
            "to write values alone, with torch.no_grad(): p.copy_(x)",
        )
    )


def refuse_copy(how: str) -> NoReturn:
    """Refuse a copy: it would be a plain model with flat shards for parameters, of no use to anybody."""
    raise RuntimeError(
        explain(
            f"{how} of an attached sharded model",
            "under shard its parameters are this rank's flat parts, and a copy would have no other",
            f"with opt.gathered(): {how}",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# A sharded parameter can be used outside of the model's calls: in a penalty, or in a loss defined elsewhere.
#
# Under `shard` a parameter of an attached model holds this rank's flat shard, and `w.norm()` of the shard would be a
# wrong number with a wrong gradient, without an error. So a computation with the parameter gathers the full one, in
# the dtype in which it is stored. `p.data`, `p.grad` and `p.detach()` are the stored shard (`sharded.parameter.Part`).
# A write into the parameter writes into the shard: this rank keeps its rows. `p.shape`, `p.numel()` and `print(p)`
# show the full shape without a gather. Code of this package sees the shard's own.
#
# This is a subclass because torch asks only the class of a tensor (`__torch_function__`) before a function runs on it.
# The parameter stays the same object, as hooks, ties and `p.grad` require. Returning the full tensor for the module's
# attribute `weight` would be simpler, but then `model.weight.grad` would always be `None`.


# Functions that look at a tensor, make one of its dtype and device, or treat it as the leaf of a graph.
LOOKING = frozenset({
    "__set__", "__delete__", "__dir__", "backward", "data_ptr", "element_size", "get_device", "requires_grad_",
    "retain_grad", "type", "untyped_storage", SHALLOW_COPY_CHECK,
})  # fmt: skip
# Functions that torch does not run for tensor subclasses.
BY_VALUE = {"tolist": Lazy.tolist, "numpy": Lazy.numpy}
BEGINNINGS = ("is_", "has_", "new_", "register_", "storage")
# Functions that give out this rank's shard, or its gradient.
GIVING = frozenset({"detach", "grad", "register_hook", "register_post_accumulate_grad_hook"})
# Functions that ask their second argument for its sizes alone.
BESIDE = frozenset({"expand_as", "reshape_as", "view_as"})
PRINTING = BY_NAME[Kind.PRINTS]
# Functions that `model.to(device)` runs on every parameter, mostly without effect.
CONVERSIONS = frozenset({"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to"})


class ShardedParameter(GuardedParameter):
    """A parameter of which this rank has a shard.

    Attributes:
        whole: gathers the full parameter, differentiable.
        is_whole: whether it has the full tensor now, inside `opt.gathered()`.
        full: the full shape.
        pieces: this rank's range of it.
    """

    whole: Callable[[], Tensor]
    is_whole: Callable[[], bool]
    full: torch.Size
    pieces: tuple[Piece, ...]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Not traced: between two graph breaks torch 2.11 and 2.15 take what was looked up of a tensor for what was
        # computed, so that `(w * 2).sum() / w.numel() + w.trace()` adds the number of elements.
        with torch.DisableTorchFunctionSubclass():
            # An operator of torch.ops has its overload in its name.
            name = func.__name__.partition(".")[0]
            args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
            if name not in SIZES and name != "__get__":
                args, kwargs = exchanged(name, args, kwargs, origin_of, part_of, lambda x: _gathered(x, name))
            attribute = func.__self__.__name__ if name == "__get__" else ""
            frame = sys._getframe(1)
            if name in SIZES or attribute in SIZES:
                return func(*args, **kwargs) if in_memory(frame) else sizes(func, name, args, kwargs, origin_of)
            if name in PRINTING:
                return _print(func, name, args, kwargs)
            if name == "__set__" and func.__self__.__name__ == "data":
                p, value = args
                if not p.is_whole():
                    check_data(value, Tensor.data.__get__(p))  # type: ignore[attr-defined]
            if name in GIVING:
                return _give(func, name, args, kwargs, frame)
            if name.endswith("_like") and not ours(frame):
                check_parametrization(frame, args)
                return kept((draws if name.startswith("rand") else likes)(func, name, args, kwargs, origin_of))
            if _looks(name, attribute):
                return func(*args, **kwargs)
            plainly = name in CONVERSIONS and kwargs.get("memory_format") not in OF_IMAGES
            if plainly and _changes_nothing(func(*args, **kwargs), args, kwargs):
                return args[0]
            if in_place(name) or kwargs.get("out") is not None:
                return _write(func, name, args, kwargs)
            if name in BESIDE:
                if not isinstance(args[0], ShardedParameter):
                    return _beside(func, name, args, kwargs)
                if args[1:] and args[-1] is args[0] and torch.is_grad_enabled() and not args[0].is_whole():
                    refuse_edge(name, args[0].path)
                if frame.f_globals.get("__name__") == INIT and not args[0].is_whole():
                    return _filled(func, name, args, kwargs)
            return _compute(func, name, args, kwargs)

    # The method itself, so that `__torch_function__` is called.
    detach = Tensor.detach

    def set_(self, *source: Any, **more: Any) -> Tensor:
        # torch does not call `__torch_function__` for it. To set a parameter to itself (spectral_norm) is allowed.
        if not self.is_whole() and not (source and source[0] is self):
            refuse_memory("p.set_(x)", self.path)
        return super().set_(*source, **more)

    @property
    def of(self) -> Origin:
        """The full parameter that it is a shard of."""
        return Origin("the values", self.path, False, self.pieces, self.full)

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        gradient = how in ("p.grad", "a gradient")
        # A gradient from before is a shard while the parameter is full, too.
        if (self.is_whole() and not (gradient and x.shape != self.full)) or in_memory(frame):
            return x
        return part_of(x, Origin(how, self.path, gradient, self.pieces, self.full, gradient and in_backward()))

    def _own(self, value: Tensor | None, how: str, frame: FrameType) -> Tensor | None:
        if ours(frame) or self.is_whole():
            return super()._own(value, how, frame)
        if isinstance(value, ShardedParameter) and not value.is_whole():
            value = part_of(Tensor.data.__get__(value), value.of)  # type: ignore[attr-defined]
        return own_shard(Tensor.data.__get__(self), self.of, value, how)  # type: ignore[attr-defined]

    def _moved(self, frame: FrameType) -> None:
        # Its old memory is the user's: `kept = p.data; p.data = average; evaluate(); p.data = kept`.
        if not ours(frame) and not self.is_whole():
            self.lent += 1
            self.asks.moved(self.path)
            self.adopted = Tensor.data_ptr(self)

    def to_local(self) -> Tensor:
        """This rank's rows as a plain tensor on the same memory, in no graph; inside `opt.gathered()` the full tensor.

        It is flat where ranks split rows, which they do if a leaf has fewer rows than ranks.
        """
        with torch.DisableTorchFunctionSubclass():
            mine = self.detach().as_subclass(Tensor)
            return mine if self.is_whole() else self.of.local(mine)

    @property
    def device_mesh(self) -> Any:
        """The mesh of the ranks that have its shards, as `DTensor.device_mesh`."""
        return self.of.placed(self.device.type)[0]

    @property
    def placements(self) -> tuple[Any, ...]:
        """`(Shard(0),)`, as those of a DTensor; an `AttributeError` where ranks split rows."""
        return self.of.placed(self.device.type)[1]

    def full_tensor(self) -> Tensor:
        """The full parameter, gathered: a plain tensor of its own, differentiable."""
        return self.clone()

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if not self.is_whole():
            refuse_copy("copy.deepcopy(model)")
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_whole():
            refuse_copy("torch.save(model, file)")
        return super().__reduce_ex__(protocol)


def _give(func: Any, name: str, args: tuple, kwargs: dict, frame: FrameType) -> Any:
    """Run a function of `GIVING`: its result is marked as a shard."""
    if name == "detach":
        args[0]._check_new(frame)
        return args[0]._shown(func(*args, **kwargs), "p.detach()", frame)
    if name == "register_hook":
        p, hook = args
        return func(p, hook if ours(frame) else Handed(hook, _of_hooks(p)))
    if name == "register_post_accumulate_grad_hook":
        p, hook = args
        return func(p, hook if ours(frame) else AfterGradients(hook, p))
    return shown_gradients(func, args, kwargs, frame)


def _of_hooks(p: ShardedParameter) -> Origin:
    return Origin("what a hook is given", p.path, True, p.pieces, p.full)


def wrap_existing_hooks(p: ShardedParameter, undone: list[Callable[[], object]]) -> None:
    """Call hooks from before `attach` with shards too, as later ones; `undone` gets a function that ends it."""

    def undo() -> None:
        # Later ones too.
        for hooks in (gradient_hooks(p), hooks_after(p)):
            given = [(number, hook) for number, hook in hooks.items() if isinstance(hook, Handed | AfterGradients)]
            hooks.update((number, hook.hook) for number, hook in given)
            for _, hook in given:
                if isinstance(hook, AfterGradients):
                    hook.watch.remove()

    undone.append(undo)
    hooks, after = gradient_hooks(p), hooks_after(p)
    hooks.update((number, Handed(hook, _of_hooks(p))) for number, hook in hooks.items())
    after.update((number, AfterGradients(hook, p)) for number, hook in after.items())


def _looks(name: str, attribute: str) -> bool:
    if name == "__get__":
        return attribute not in COMPUTED
    return name in LOOKING or name in PRIVATE or name.startswith(BEGINNINGS) or name.endswith("_like")


def _print(func: Any, name: str, args: tuple, kwargs: dict) -> str:
    p = args[0]
    if p.is_whole() or any(args[1:]):
        # torch refuses `f"{p:.3f}"` of a parameter.
        return func(*args, **kwargs)
    return printed(p, p.of)


def _changes_nothing(converted: Tensor, args: tuple, kwargs: dict) -> bool:
    """Whether a conversion changes nothing. torch makes a copy for `to("cpu:0")`, as accelerate writes it."""
    p = args[0]
    same = converted.dtype == p.dtype and converted.device == p.device and converted.stride() == p.stride()
    # The last argument of `to(..., non_blocking, copy)`.
    wanted = kwargs.get("copy", len(args) > 3 and isinstance(args[-2], bool) and args[-1])
    return converted is p or (same and not wanted)


def origin_of(x: Any) -> Origin | None:
    """The origin of a shard; `None` for anything else, and for a parameter that is full now."""
    return (None if x.is_whole() else x.of) if isinstance(x, ShardedParameter) else of_part(x)


def _filled(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """The reshaped parameter that `nn.init.orthogonal_` fills, as a shard, so that the write is stored."""
    p = args[0]
    return kept(reshapes(func, name, (part_of(p.detach(), p.of), *args[1:]), kwargs, origin_of))


def _beside(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a function of `BESIDE` with a parameter as its second argument, by its full sizes."""
    p = args[1] if args[1:] else kwargs["other"]
    if of_part(args[0]) is not None:
        return kept(HANDLERS[kind_of(name)](func, name, args, kwargs, origin_of))
    return func(args[0], p if p.is_whole() else torch.empty(p.full, device="meta"))


def _compute(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a differentiable function of full tensors; `foreach` lists one by one, so that two full tensors are alive."""
    if name.startswith(FOREACH):
        return tuple(func(*_wholes(name).of(column), **kwargs)[0] for column in columns_of(args))
    if pointwise(name) or name in BY_NAME[Kind.COMPARES]:
        _check_beside(name, [*args, *kwargs.values()])
    wholes = _wholes(name)
    return as_norm(name, BY_VALUE.get(name, func)(*wholes.of(args), **wholes.of(kwargs)))


def _check_beside(name: str, args: list[Any]) -> None:
    for p in args:
        if isinstance(p, ShardedParameter) and not p.is_whole():
            for x in args:
                if isinstance(x, Tensor) and origin_of(x) is None:
                    check_sizes(name, p.of, p, x)


def _write(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a function that writes, into a parameter or into another tensor."""
    if name.startswith(FOREACH):
        for column in columns_of(args):
            _write_one(func, name, column, kwargs)
        return args[0]
    return _write_one(func, name, args, kwargs)


def _write_one(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    out = kwargs.get("out")
    target = args[0] if out is None else out
    if any(origin_of(x) is not None for x in tensors_in([target])):
        return written(func, name, args, kwargs, origin_of)
    check_unwritten(name, args, kwargs)
    wholes, at = _wholes(name), 1 if out is None else 0
    others = {k: x if k == "out" else wholes.of(x) for k, x in kwargs.items()}
    return func(*args[:at], *wholes.of(args[at:]), **others)


def _wholes(name: str) -> Wholes:
    """Replaces parameters and shards among arguments by full tensors, differentiable."""
    return Wholes(lambda x: _gathered(x, name))


def _gathered(x: Any, name: str) -> Tensor | None:
    """A parameter or a shard as a full tensor, differentiable; `None` for anything else."""
    if isinstance(x, ShardedParameter):
        if x.is_whole():
            return None
        check_no_argument()
        return x.whole()
    of = of_part(x)
    return None if of is None else of.whole(x, name)
