"""Every torch name that is private or has changed between releases, looked up once."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function

# torch's tree library, which the compiler reads.
pytree = torch.utils._pytree  # type: ignore[attr-defined]

# What torch.func wraps tensors in, and the levels of its transforms.
_functorch = torch._C._functorch  # type: ignore[attr-defined]

# What a torch.compile that is under way does with each function that is called.
_eval_frame = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]

# Horizontally fused kernels: the ones behind torch.optim's `fused` and `foreach`.
fused_adam_ = torch._fused_adam_  # type: ignore[attr-defined]
fused_adamw_ = torch._fused_adamw_  # type: ignore[attr-defined]
foreach_norm = torch._foreach_norm  # type: ignore[attr-defined]
foreach_add = torch._foreach_add  # type: ignore[attr-defined]
foreach_mul = torch._foreach_mul  # type: ignore[attr-defined]
foreach_copy_ = torch._foreach_copy_  # type: ignore[attr-defined]

# For a subclass that works below autograd alone.
no_torch_function = nn.Parameter.__torch_function__
without_memory = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# The code of every call of a module, by which its frame is found.
CALL = nn.Module.__call__.__code__
# Names of parameters in this attribute of a model are none of DistributedDataParallel's business.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
# By which `p.data = x` asks whether the two are alike. It looks and does not compute.
SHALLOW = "_has_compatible_shallow_copy_type"
# The function of `torch.distributed.checkpoint.state_dict` that asks for a state dict in order to load into it.
LOADS_STATES = "_load_optim_state_dict"


# How often a tensor's memory was written into, as autograd counts it.
version: Callable[[Tensor], int] = attrgetter("_version")


def base_of(x: Tensor) -> Tensor:
    """What autograd knows `x` to be a view of; itself for no view."""
    return x if x._base is None else x._base


def schema(op: Any) -> Any:
    """What an operator's arguments are called, and which of them it writes into."""
    return op._schema


Registered = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
# A module's own dicts of parameters, submodules and buffers.
registered: Callable[[nn.Module], Registered] = attrgetter("_parameters", "_modules", "_buffers")


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module its first values again, by torch's convention; some of torch's own keep it to themselves."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def register_in(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Let `parameters` be the module's own dict of them."""
    vars(module)["_parameters"] = parameters


# The forward hooks of one module, in the order in which they run.
forward_hooks: Callable[[nn.Module], Any] = attrgetter("_forward_hooks")


def set_flat_weights(module: Any, weights: Callable[[list[str]], list[Any]], ref: Any) -> None:
    """Give a recurrent module the list of weights that its kernel takes, from their names.

    `ref` stands for what it compares the list with, to see that the weights are others.
    """
    names = module._flat_weights_names
    module._flat_weights = weights(names)
    module._flat_weight_refs = [ref] * len(names)


# In which attribute an optimizer registers hooks that run before (`pre`) or after (`post`) its methods.
HOOKS_OF = {
    (what, when): f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
}


def tell_autograd(written: list[Tensor]) -> None:
    """Count a write that a kernel made without counting it: a backward that saved one of these tensors must notice."""
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:
        # Tensors of inference mode have no count.
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


# Before, the compiler could neither take a frozen dataclass for a constant nor make one: a state is such.
COMPILES_STATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


# The compiler's own modules: they ask a tensor for its sizes in order to compare them with what is in memory.
COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def while_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which the compiler calls while it makes a graph instead of tracing it; what it returns is a constant there.

    As torch.compiler.assume_constant_result, which imports the compiler at once.
    """
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


# The same as a function of C, `None` outside, for who has asked whether the compiler traces, which cannot read it.
innermost_transform = _functorch.peek_interpreter_stack


@while_traced
def functorch_active() -> bool:
    """Whether the caller runs inside torch.func.grad, vjp, jvp or vmap."""
    return _functorch.peek_interpreter_stack() is not None


@while_traced
def differentiating() -> bool:
    """Whether the caller runs inside torch.func.grad, vjp or jvp, however deep in vmap."""
    if _functorch.peek_interpreter_stack() is None:
        return False
    return any(level.key().name in ("Grad", "Jvp") for level in _functorch.get_interpreter_stack())


def only_reverse() -> bool:
    """Whether nothing but derivatives backwards is under way: plain autograd, torch.func.grad and vjp, in any depth."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level >= 0:
        return False
    stack = _functorch.get_interpreter_stack() if functorch_active() else ()
    return all(level.key().name == "Grad" for level in stack)


def only_vmap() -> int | None:
    """The level of the vmap that is under way, where it is the only transform of torch.func and no graph is made."""
    return None if torch.compiler.is_compiling() else vmap_level()


@while_traced
def vmap_level() -> int | None:
    """As `only_vmap`, while the compiler traces too."""
    if not functorch_active() or torch.autograd.forward_ad._current_level >= 0:
        return None
    levels = _functorch.get_interpreter_stack()
    return levels[0].level() if len(levels) == 1 and levels[0].key().name == "Vmap" else None


def behind(x: Tensor, level: int) -> Tensor | None:
    """The members of a batch of that vmap in one tensor; `None` of one that all members share. Traced as well."""
    return _functorch._unwrap_batched(x, level)[0] if _functorch.is_batchedtensor(x) else None


def stacked(x: Tensor) -> Tensor | None:
    """The members of a batch one behind the other, as a plain tensor; `None` of one that all members share."""
    return _functorch.get_unwrapped(x).movedim(_functorch.maybe_get_bdim(x), 0) if is_wrapped(x) else None


def as_batch(x: Tensor, level: int) -> Tensor:
    """A tensor as a batch of its rows in the vmap of that level."""
    return _functorch._add_batch_dim(x, 0, level)


# Inside, tensors are made as if no transform of torch.func were under way: it takes them for constants.
beneath_functorch = temporarily_clear_interpreter_stack


def innermost(x: Tensor) -> Tensor:
    """The plain tensor inside of those that transforms of torch.func have wrapped around it."""
    while _functorch.maybe_get_level(x) != -1:
        x = _functorch.get_unwrapped(x)
    return x


def is_wrapped(x: object) -> bool:
    """Whether `x` is a tensor of a torch.func transform, whose value no Python branch may read."""
    return isinstance(x, Tensor) and _functorch.maybe_get_level(x) != -1


def constant(x: Tensor) -> Tensor:
    """`x` as no function of anything, at any level of torch.func; a batch is one still."""
    if not is_wrapped(x):
        with beneath_functorch():
            return x.detach()
    inner = constant(_functorch.get_unwrapped(x))
    if _functorch.is_batchedtensor(x):
        return _functorch._add_batch_dim(inner, _functorch.maybe_get_bdim(x), _functorch.maybe_get_level(x))
    return inner


def is_function(x: Tensor) -> bool:
    """Whether `x` is a function of something that is differentiated, at any level."""
    while True:
        if x.requires_grad or torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None:
            return True
        if not is_wrapped(x):
            return False
        x = _functorch.get_unwrapped(x)


def is_batch(x: Tensor) -> bool:
    """Whether `x` stands for several tensors: in torch.func.vmap, or as a cotangent of `is_grads_batched`.

    The latter are of an older vmap, of which nothing shows but that they have no storage.
    """
    if _functorch.maybe_get_level(x) != -1:
        return True
    if x.layout is not torch.strided:  # one that is sparse has none either
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return True
    return False


def levels(x: Tensor) -> frozenset[int]:
    """The nested vmaps in which a tensor is batched."""
    found = set()
    while is_wrapped(x):
        if _functorch.is_batchedtensor(x):
            found.add(_functorch.maybe_get_level(x))
        x = _functorch.get_unwrapped(x)
    return frozenset(found)


_CDATA = attrgetter("_cdata")


def memory(x: Tensor) -> int:
    """A number for the memory that a tensor is a view of; 0 for one that has none of its own."""
    other = type(x) is not Tensor and is_wrapper(x)
    if other or _functorch.maybe_get_level(x) != -1 or x.layout is not torch.strided:
        return 0
    return x.untyped_storage()._cdata


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """What `memory` says of these, but 0."""
    tensors = list(tensors)
    if set(map(type, tensors)) <= {Tensor} and _functorch.peek_interpreter_stack() is None:
        try:
            # Without a call in Python for each, of which most steps have nothing to tell.
            return set(map(_CDATA, map(Tensor.untyped_storage, tensors)))
        except NotImplementedError:  # one is sparse
            pass
    return {memory(innermost(x)) for x in tensors} - {0}


def all_plain(tensors: Sequence[object]) -> bool:
    """Whether all are tensors of no subclass that have memory: neither `None`, nor sparse, nor a batch of any kind.

    Told from C and of all together, for who asks often and mostly finds so.
    """
    if not set(map(type, tensors)) <= {Tensor} or _functorch.peek_interpreter_stack() is not None:
        return False
    try:
        for _ in map(Tensor.untyped_storage, tensors):  # type: ignore[arg-type]
            pass
    except NotImplementedError:
        return False
    return True


def is_wrapper(x: Tensor) -> bool:
    """Whether `x` holds other tensors and no memory of its own, as torch's distributed and quantized ones."""
    return type(x) is not Tensor and hasattr(x, "__tensor_flatten__")


def has_hooks(p: Any) -> bool:
    """Whether anybody has registered a hook for the gradient of a leaf."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def gradient_hooks(p: Tensor) -> dict[int, Callable[[Tensor], Any]]:
    """The hooks on the gradient of a tensor, by number; one that is exchanged here is called in its place."""
    return p._backward_hooks or {}  # type: ignore[return-value]


def local_of(x: Any) -> Tensor:
    """What one of torch's distributed tensors has on this rank, itself and no view of it."""
    return x._local_tensor


def sharded_by_torch(model: nn.Module) -> list[str]:
    """The modules that `torch.distributed.fsdp.fully_shard` cares for, by name; whoever has not called it has none."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [name for name, x in model.named_modules() if isinstance(x, fsdp.FSDPModule)]


def set_local(x: Any, local: Tensor) -> None:
    """Exchange what a distributed tensor has on this rank, of whatever device."""
    x._local_tensor = local


# The number of the backward pass this thread is in, or that.
NO_BACKWARD = -1
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward pass: a recomputation, or a hook."""
    return graph_task() != NO_BACKWARD


# The autograd node that this thread executes; `None` outside of backward.
executing: Callable[[], Any] = torch._C._current_autograd_node


def after_this_node(fn: Callable[[], None]) -> bool:
    """Run `fn` once the autograd node that this thread executes is done, in that node's backward; whether there is one.

    Inside a backward nested in a node, as reentrant checkpointing makes them, this reaches the outer one.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return False

    def after(*_: Any) -> None:
        handle.remove()
        fn()

    handle = node.register_hook(after)
    return True


# The number that the next autograd node made by this thread will have: nodes are numbered as they are made.
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
# That of a node.
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")


def run_when_ready(node: Any) -> None:
    """Let backward run a node as soon as it can: among the nodes that it could run, it takes the one made last."""
    node._set_sequence_nr((1 << 63) - 1)


_BACKWARD, _GRAD = torch.autograd.backward.__code__, torch.autograd.grad.__code__


def backward_call() -> tuple[list[Any], tuple]:
    """The nodes at which the backward under way began, and the tensors that it is to give the gradients of.

    Autograd does not say, so they are read from the frame of the call. A GPU's nodes run in a thread without
    such a frame: there it is that of the one other thread which is in a backward. Nothing is known of a backward
    inside of another one, and nothing where several threads are in one.
    """
    found = _engine_frames(sys._getframe(1))
    if not found:
        callers = [frames for frame in sys._current_frames().values() if (frames := _engine_frames(frame))]
        found = callers[0] if len(callers) == 1 else []
    if len(found) != 1:
        return [], ()
    held = found[0].f_locals
    roots = held["tensors" if found[0].f_code is _BACKWARD else "outputs"]
    nodes = [n for x in _several(roots) if (n := x.grad_fn if isinstance(x, Tensor) else x.node) is not None]
    return nodes, _several(held["inputs"])


def _engine_frames(frame: Any) -> list[Any]:
    found = []
    while frame is not None:
        if frame.f_code in (_BACKWARD, _GRAD):
            found.append(frame)
        frame = frame.f_back
    return found


def _several(given: Any) -> tuple:
    """One tensor or edge, a sequence of them, or none."""
    one = isinstance(given, Tensor | torch.autograd.graph.GradientEdge)
    return (given,) if one else tuple(given or ())


def backward_hooks(module: nn.Module) -> list[str]:
    """What registered the backward hooks that a call of `module` would run: its own and those of all modules."""
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


_OUTSIDE = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)

Fn = TypeVar("Fn", bound=Callable[..., Any])


def uncompiled(fn: Fn, why: str | None = None) -> Fn:
    """`fn` as what the compiler leaves alone, with all that it calls: graphs end before it.

    As `torch.compiler.disable`, which imports the compiler at once and makes each call 1 us longer. The one mark is for
    code that is traced into, the other for code that is run while a compiler waits for functions to compile. Where
    `fn` asked by itself whether it is traced, a graph was made of that question, for each kind of argument anew; at
    the eighth the compiler gives `fn` up, and what `fn` calls is compiled all the same.

    Whoever asks for a whole graph (`fullgraph=True`) is told why, else the docstring of `fn`.
    """
    # What a decorator of torch's makes has the code of all that it makes, torch's optimizers among them.
    fn.__code__ = fn.__code__.replace()
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = why or fn.__doc__  # type: ignore[attr-defined]
    _eval_frame.set_code_exec_strategy(fn.__code__, _OUTSIDE)
    return fn


class _Reinterpret(Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Reinterpret.apply(x, dtype), in_dims[0]


def reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits in a dtype of the same size. `Tensor.view` has no rule for torch.func.vmap in torch 2.11."""
    wrapped = not torch.compiler.is_compiling() and is_wrapped(x)
    return _Reinterpret.apply(x, dtype) if wrapped else x.view(dtype)


def has_triton() -> bool:
    """Whether kernels can be compiled for the GPU at hand: triton is there, and takes no older ones."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (7, 0)


def register_pytree_node(cls: type, flatten, unflatten) -> None:
    """Make `cls` a node for torch.func, whose tree library has no public registration."""
    pytree.register_pytree_node(  # type: ignore[attr-defined]
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


def register_constant(cls: type) -> None:
    """Let the compiler take what is of this class for constants, compared by `==`."""
    pytree.register_constant(cls)  # type: ignore[attr-defined]


# The hooks for saved tensors that this thread has entered last, as (pack, unpack); `None` where there are none.
saved_tensors_hooks: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks,  # type: ignore[attr-defined]
    True,
)


def alias_of(x: Tensor, cls: type[Any]) -> Any:
    """The same memory and version count, of another class; outside of autograd."""
    return Tensor._make_subclass(cls, x)  # type: ignore[attr-defined]


def tagged_pointwise(name: str) -> bool:
    """Whether torch says of an operator that each element of what it gives comes from those in the same place."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, type(torch.ops.aten.add)):
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


@functools.cache
def _saving(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node: Any) -> list[Any]:
    """What an autograd node has saved for backward, before it is unpacked: each has `data` and `register_hooks`.

    Nodes without such attributes, those of C++ that the user has written and of writes into views, show nothing.
    """
    found: list[Any] = []
    for name in _saving(type(node)):
        try:
            one = getattr(node, name)
        except RuntimeError:
            # It has been let go: a backward has gone through already.
            continue
        if isinstance(one, tuple | list):
            found.extend(one)
        else:
            found.append(one)
    return found


# Runs a function when the backward that is under way has finished. Public torch has no such moment.
_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
at_end_of_backward: Callable[[Callable[[], None]], None] = _engine.queue_callback


@contextmanager
def shape_only() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors made inside have shape, dtype and device and no memory; what is given turns a tensor into such.

    Meta tensors would do but for the device, which they forget.
    """
    with FakeTensorMode() as mode:
        yield mode.from_tensor


# What `module.to` and its kin end in.
CONVERTING = torch.nn.Module._apply


def is_shape_only(x: Tensor) -> bool:
    """Whether a tensor was made inside `shape_only`."""
    return isinstance(x, FakeTensor)


def persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that `model.state_dict()` has, and parameters of integers, which are like them.

    To ask it would run hooks, which may rename or leave out.
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


# Whether a profiler of torch's is under way in this thread.
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def outlasting(name: str, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begin work that may outlast the profiler's: a profiler is shown that it began, and does not follow it.

    When gloo ends such work it writes into the profiler's memory from a thread of its own, also where the profiler is
    gone: a bare `all_gather_single(..., async_op=True)` inside `torch.profiler.profile()` and its `wait()` outside kill
    the process in every second run.
    """
    if not profiler_runs():
        return begin(*args, **kwargs)
    with torch.profiler.record_function(f"zerofn::{name}"):
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
        try:
            return begin(*args, **kwargs)
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]


def with_globals(fn: Any, names: dict[str, Any]) -> Any:
    """A copy of a function of torch's own in Python that finds other things under some names of its module.

    Raises:
        RuntimeError: it knows none by these names, in this release of torch.
    """
    missing = [name for name in names if name not in fn.__globals__ or name not in fn.__code__.co_names]
    if missing:
        raise RuntimeError(f"{fn.__name__} of torch {torch.__version__} does not use {', '.join(missing)}")
    copy = types.FunctionType(fn.__code__, {**fn.__globals__, **names}, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
