"""Private names of tensors, modules and operators."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import repeat
from math import gcd
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .functorch import functorch, innermost, uncompiled

# ----------------------------------------------------------------------------------------------------------------------
# Tensors: memory, version, and subclasses with or without memory.


# The `__torch_function__` of a subclass that only has a `__torch_dispatch__`.
no_torch_function = nn.Parameter.__torch_function__
without_memory = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# With this function `p.data = x` checks that the types are compatible; it computes nothing.
SHALLOW_COPY_CHECK = "_has_compatible_shallow_copy_type"

# Autograd's count of writes into a tensor's memory.
version: Callable[[Tensor], int] = attrgetter("_version")
# The version of a DTensor's local tensor, to which FSDP2 adds the gradients of later backwards.
version_of_local: Callable[[Any], int] = attrgetter("_local_tensor._version")


# The tensor that a tensor is a view of; `None` if it is no view.
viewed: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def base_of(x: Tensor) -> Tensor:
    """The tensor that `x` is a view of; `x` itself if it is not a view."""
    return x if x._base is None else x._base


storage_number = attrgetter("_cdata")


def memory(x: Tensor) -> int:
    """A number that identifies the storage of a tensor; 0 for one without storage of its own."""
    other = type(x) is not Tensor and is_wrapper(x)
    if other or functorch.maybe_get_level(x) != -1 or x.layout is not torch.strided:
        return 0
    return x.untyped_storage()._cdata


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of these tensors' storages, without 0."""
    tensors = list(tensors)
    if set(map(type, tensors)) <= {Tensor} and functorch.peek_interpreter_stack() is None:
        try:
            # No Python call per tensor.
            return set(map(storage_number, map(Tensor.untyped_storage, tensors)))
        except NotImplementedError:  # one is sparse
            pass
    return {memory(innermost(x)) for x in tensors} - {0}


def self_overlapping(x: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as after `expand`.

    Examples:
        >>> self_overlapping(torch.ones(2).expand(3, 2)), self_overlapping(torch.ones(3, 2).T)
        (True, False)
    """
    span, doubtful = 0, False
    for stride, size in sorted([(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]):
        if not stride:
            return True
        doubtful |= stride <= span
        span += stride * (size - 1)
    if not doubtful:
        return False
    # Dimensions may interleave without an overlap. That is rare, so elements are counted.
    places = torch.arange(span + 1).as_strided(x.shape, x.stride())
    return places.unique().numel() < x.numel()


def sharing_memory(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors that share an element with an earlier tensor: by name, the name of the earlier one.

    Views of one storage that share no element, such as columns of one matrix, are not among them.

    Examples:
        >>> x = torch.zeros(2, 4)
        >>> sharing_memory({"a": x[0], "b": x[1], "left": x[:, :2], "right": x[:, 2:], "empty": x[:0]})
        {'left': 'a', 'right': 'a'}
    """
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in named.items():
        x = innermost(x)
        if x.numel() and (key := memory(x)):
            storages.setdefault(key, []).append((name, x))
    found: dict[str, str] = {}
    for views in storages.values():
        # Views are sorted by their first byte, so that each is compared only with views that reach into it.
        reach: list[tuple[int, int, str, Tensor]] = []
        for i, (name, x) in sorted(enumerate(views), key=lambda item: _bytes_of(item[1][1])[0]):
            low, high = _bytes_of(x)
            reach = [item for item in reach if item[0] > low]
            for _, j, other, y in reach:
                if _common(x, y):
                    first, second = (other, name) if j < i else (name, other)
                    found.setdefault(second, first)
            reach.append((high, i, name, x))
    return {name: found[name] for name in named if name in found}


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that contains the elements of a tensor."""
    last = sum(int(stride) * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    first = int(x.storage_offset())
    return first * x.itemsize, (first + last + 1) * x.itemsize


def _common(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors over one storage, whose ranges overlap, share a byte."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    unit = gcd(x.itemsize, y.itemsize)
    (low, high), (other_low, other_high) = _bytes_of(x), _bytes_of(y)
    begin = min(low, other_low)
    taken = torch.zeros((max(high, other_high) - begin) // unit, dtype=torch.bool)

    def places(t: Tensor) -> Tensor:
        n = t.itemsize // unit
        strides = [stride * n for stride in t.stride()]
        return taken.as_strided((*t.shape, n), (*strides, 1), (t.storage_offset() * t.itemsize - begin) // unit)

    places(x).fill_(True)
    return bool(places(y).any())


def all_plain(tensors: Sequence[object]) -> bool:
    """Whether all are of class `Tensor` and have storage: not `None`, not sparse, not batched.

    Checked in C for all together, for hot paths.
    """
    if not set(map(type, tensors)) <= {Tensor} or functorch.peek_interpreter_stack() is not None:
        return False
    try:
        for _ in map(Tensor.untyped_storage, tensors):  # type: ignore[arg-type]
            pass
    except NotImplementedError:
        return False
    return True


def is_wrapper(x: Tensor) -> bool:
    """Whether `x` is a subclass that holds other tensors and no memory, such as DTensor or torchao's tensors."""
    return type(x) is not Tensor and hasattr(x, "__tensor_flatten__")


def local_of(x: Any) -> Tensor:
    """The local tensor of a DTensor itself, not a view of it."""
    return x._local_tensor


# The local tensors of many DTensors, read in C. The compiler does not know this function.
locals_of: Callable[[Iterable[Any]], Iterator[Tensor]] = partial(map, attrgetter("_local_tensor"))


def set_local(x: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor, even by one on another device."""
    x._local_tensor = local


# The mesh and the placements of a DTensor, and its sizes.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def set_spec(x: Any, spec: Any) -> None:
    """Change the mesh and the placements of a DTensor."""
    x._spec = spec


Class = TypeVar("Class", bound=type[Any])


def dispatched_in_python(cls: Class) -> Class:
    """Have torch call the `__torch_dispatch__` of this subclass of DTensor. torch does so by itself from 2.13 on.

    torch 2.11 runs operators of every DTensor in C++, by DTensor's own rules: for a subclass too it computes with this
    rank's rows and returns plain DTensors. It first asks for a rule that is registered for the operator and exactly
    this class, and calls that one. So each of the 3,200 operators gets one, which takes 0.2 s once in a process.
    """
    if torch.__version__ < "2.13":
        # torch forgets the rules when this object is deleted.
        own: Any = cls
        own.rules = torch.library.Library("aten", "FRAGMENT")
        rule = own.__torch_dispatch__.__func__
        for name in torch._C._dispatch_get_all_op_names():  # type: ignore[attr-defined]
            if name.startswith("aten::"):
                torch.library.register_torch_dispatch(name, cls, rule, lib=own.rules)
    return cls


def alias_of(x: Tensor, cls: type[Any]) -> Any:
    """A detached tensor of another class, on the same memory and with the same version counter."""
    return Tensor._make_subclass(cls, x)  # type: ignore[attr-defined]


# Raised when the numbers of a `shape_only` tensor are asked for.
NoNumbers = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def shape_only() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors made inside have shape, dtype and device but no memory; yields a function that makes a tensor such a one.

    Meta tensors would lose the device.
    """
    with FakeTensorMode() as mode:
        yield mode.from_tensor


def is_shape_only(x: Tensor) -> bool:
    """Whether a tensor was made inside `shape_only`."""
    return isinstance(x, FakeTensor)


# ----------------------------------------------------------------------------------------------------------------------
# Private attributes of modules, of optimizers and of their wrappers.


# The code of `module(...)`, to find the frame of a call.
CALL = nn.Module.__call__.__code__


def frame_of_call() -> Any:
    """The frame of the innermost running `module(...)`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    return frame


def has_ended(frame: Any) -> bool:
    """Whether a call has returned or raised. If it has, its frame is cleared: nothing of it is needed any more."""
    try:
        frame.clear()
    except RuntimeError:
        # Python does not clear a frame that is executing.
        return False
    return True


# The attribute of a model that lists the parameters that DistributedDataParallel ignores.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"

Registered = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

# A module's own dicts of parameters, submodules and buffers.
registered: Callable[[nn.Module], Registered] = attrgetter("_parameters", "_modules", "_buffers")
parameters_and_modules: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any]]] = attrgetter(
    "_parameters", "_modules"
)


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module's parameters, by torch's convention; private in some of torch's modules."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def register_in(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Make `parameters` the module's dict of its own parameters."""
    vars(module)["_parameters"] = parameters


# The forward hooks of one module, in the order in which they run.
forward_hooks: Callable[[nn.Module], Any] = attrgetter("_forward_hooks")


def set_flat_weights(module: Any, weights: Callable[[list[str]], list[Any]], ref: Any) -> None:
    """Set the list of weights that a recurrent module's kernel takes, from their names.

    The module has a weak reference to each weight, by which it notices that the weight was replaced. `ref` is put in
    the place of each.
    """
    names = module._flat_weights_names
    module._flat_weights = weights(names)
    module._flat_weight_refs = [ref] * len(names)


# The attribute of an optimizer with the hooks that run before (`pre`) or after (`post`) a method.
HOOKS_OF = {
    (what, when): f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}


class Wrapper(NamedTuple):
    """A class of modules that wrap another module, and the attribute that holds it."""

    module: str
    name: str
    attribute: str


# Their defining modules may not be loaded, so wrappers are given by name.
WRAPPERS = (
    Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"
    ),
    Wrapper("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    Wrapper("torch.nn.parallel", "DistributedDataParallel", "module"),
    Wrapper("torch.nn.parallel", "DataParallel", "module"),
)


def wrapper_attributes(model: nn.Module) -> Callable[[Any], str | None] | None:
    """A function that returns the attribute in which a wrapper holds its module, and `None` for any other module.

    `None` if no module of the model is a wrapper.
    """
    loaded = [(getattr(sys.modules[w.module], w.name), w.attribute) for w in WRAPPERS if w.module in sys.modules]
    wrappers = tuple([cls for cls, _ in loaded])
    # A model has few classes of modules, and mostly no wrapper: no Python call for each module.
    if not any(map(issubclass, set(map(type, model.modules())), repeat(wrappers))):
        return None
    return lambda module: next((attribute for cls, attribute in loaded if isinstance(module, cls)), None)


def sharded_by_torch(model: nn.Module) -> list[str]:
    """The names of modules that `torch.distributed.fsdp.fully_shard` was applied to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [name for name, x in model.named_modules() if isinstance(x, fsdp.FSDPModule)]


def full_parameters_of(module: Any) -> list[tuple[Tensor, Tensor]]:
    """Parameters that `fully_shard` has sharded for a module, each with the full one that FSDP2 keeps for forward.

    It keeps one from the first forward on, and counts its versions as those of forward: an all-gather is no write.
    """
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
    found = [(x.sharded_param, getattr(x, "_unsharded_param", None)) for x in getattr(group, "fsdp_params", ())]
    return [(p, full) for p, full in found if full is not None]


def asked_by_fully_shard(frame: FrameType) -> bool:
    """Whether `fully_shard` looks at a tensor from this frame, to shard it; or torch's `replicate`, made of it."""
    return frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp._fully_shard")


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether `backward_hooks` would find any. It is fast, since every call asks it for every module."""
    every = torch.nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or every._global_backward_hooks or every._global_backward_pre_hooks)


def backward_hooks(module: nn.Module) -> list[str]:
    """The functions that registered the backward hooks of `module`, those for all modules included."""
    every = torch.nn.modules.module
    found = []
    if module._backward_pre_hooks or every._global_backward_pre_hooks:
        found.append("register_full_backward_pre_hook")
    if module._backward_hooks:
        found.append("register_full_backward_hook" if module._is_full_backward_hook else "register_backward_hook")
    if every._global_backward_hooks:
        full = every._global_is_full_backward_hook
        found.append("register_module_full_backward_hook" if full else "register_backward_hook")
    return found


# The method that `module.to`, `half`, `cuda` and the like use to convert parameters.
CONVERTING = torch.nn.Module._apply


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers in `model.state_dict()`, and integer parameters, by name, with the prefixes that wrappers add.

    `state_dict()` itself would run hooks, which may rename or remove entries.
    """
    kept: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return {
        f"{prefix}.{name}" if prefix else name: x
        for prefix, module in model.named_modules(remove_duplicate=False)
        for named in (module.named_parameters(**kept), module.named_buffers(**kept))
        for name, x in named
        if name not in module._non_persistent_buffers_set
        and not (isinstance(x, torch.nn.Parameter) and (x.dtype.is_floating_point or x.dtype.is_complex))
    }


# ----------------------------------------------------------------------------------------------------------------------
# torch's own operators and kernels, and its profiler.


# Horizontally fused kernels: the ones behind torch.optim's `fused` and `foreach`.
fused_adam_ = torch._fused_adam_  # type: ignore[attr-defined]
fused_adamw_ = torch._fused_adamw_  # type: ignore[attr-defined]
foreach_norm = torch._foreach_norm  # type: ignore[attr-defined]
foreach_add = torch._foreach_add  # type: ignore[attr-defined]
foreach_mul = torch._foreach_mul  # type: ignore[attr-defined]
foreach_copy_ = torch._foreach_copy_  # type: ignore[attr-defined]

# Copies pieces of a flat tensor into given tensors, without the view of each piece that `foreach_copy_` needs.
split_into = torch.split_with_sizes_copy

# Tensors end to end, as one flat tensor. If they are flat already, `torch.cat` takes a third of the time.
joined: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors  # type: ignore[attr-defined]


@cache
def foreach_of(name: str) -> Callable[..., Any]:
    """torch's operation `name` on lists of tensors: one launch for many on a GPU."""
    return getattr(torch, f"_foreach_{name}")


def foreach(name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of torch's operation `name` on lists of tensors, as a list.

    Examples:
        >>> foreach("add", [torch.ones(1), torch.ones(2)], 1)
        [tensor([2.]), tensor([2., 2.])]
    """
    found = foreach_of(name)(*args, **kwargs)
    return found if found is None else list(found)


def schema(op: Any) -> Any:
    """An operator's schema: the names of its arguments, and which of them it writes."""
    return op._schema


def rounded_to(x: float, dtype: torch.dtype) -> float:
    """A number rounded to a dtype; what listens to torch's functions hears nothing of it."""
    with torch._C.DisableTorchFunction():
        return torch.tensor(x, dtype=dtype).item()


def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def tagged_pointwise(name: str) -> bool:
    """Whether torch tags an operator as pointwise: each element of the result depends only on elements at its place."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, type(torch.ops.aten.add)):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


# Whether torch's profiler runs in this thread.
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@contextmanager
def outlasting(name: str) -> Iterator[None]:
    """Begin asynchronous work that may end after the profiler does: the profiler sees its begin only.

    When such work ends, gloo writes into the profiler's memory from its own thread, even after the profiler has gone. A
    bare `all_gather_single(..., async_op=True)` inside `torch.profiler.profile()`, with its `wait()` outside, kills the
    process in every second run.
    """
    with torch.profiler.record_function(f"zerofn::{name}"):
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------------------
# These functions read and write `p.grad`, and count writes into parameters, without their classes' own properties.


# The `grad` properties of this package's classes of parameters take 2 us longer. Only functions that are kept out of
# graphs may call `write_grad_alone`.
read_grad, write_grad_alone = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[attr-defined]


@uncompiled
def write_grad(p: Tensor, value: Tensor | None) -> None:
    """`p.grad = value` of a plain parameter. The compiler of torch 2.14 fails at descriptors."""
    write_grad_alone(p, value)


@uncompiled
def clear_grads(params: Iterable[Tensor]) -> None:
    """`p.grad = None` of parameters of any class."""
    with torch.DisableTorchFunctionSubclass():
        for p in params:
            write_grad_alone(p, None)


# How often a tensor may have been written into: its version, and how often its `.data` was read.
Writes = tuple[int, int]
_LENT = attrgetter("lent")


def writes(tensors: Collection[Tensor]) -> list[Writes]:
    """`Writes` of each tensor, without a Python call for each: every step and every call of a model reads them."""
    with torch.DisableTorchFunctionSubclass():
        try:
            return list(zip(map(version, tensors), map(_LENT, tensors), strict=True))
        except (AttributeError, RuntimeError):
            # A tensor is no parameter of an attached model, or was made in inference mode and has no version.
            return [(0 if p.is_inference() else version(p), getattr(p, "lent", 0)) for p in tensors]


# ----------------------------------------------------------------------------------------------------------------------
# `operations_told` tells of torch's operations; `numbers_unreadable` tells whether a function asks for the number in a
# tensor.


class operations_told(TorchDispatchMode):
    """Inside, `told` is called after each of torch's operations.

    Args:
        told: a function of whether the operation only makes views, of its arguments, and of its result. Where the
            operation reads and writes no element, such as `torch.empty_like`, it is said to make views.

    Examples:
        >>> x = torch.ones(2)
        >>> with operations_told(lambda views, given, made: print(views, len(given), made.shape)):
        ...     _ = x.view(2, 1), x + x
        True 2 torch.Size([2, 1])
        False 2 torch.Size([2])
    """

    def __init__(self, told: Callable[[bool, tuple[Any, ...], Any], None]):
        super().__init__()
        self.told = told

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled inside, and to keep the compiler away would import it first, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        views = func.is_view or func.name().rpartition("::")[2].startswith(("empty", "new_empty"))
        self.told(views, (*args, *(kwargs or {}).values()), found)
        return found


class NumberRead(Exception):
    """Python has asked for the number in a tensor, inside of `numbers_unreadable`."""


class numbers_unreadable(TorchDispatchMode):
    """Inside, to ask for the number in a tensor raises `NumberRead`.

    Examples:
        >>> with numbers_unreadable():
        ...     torch.ones(()).item()
        Traceback (most recent call last):
        ...
        zerofn._compat.tensors.NumberRead
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise NumberRead
        return func(*args, **(kwargs or {}))
