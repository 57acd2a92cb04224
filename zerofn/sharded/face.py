"""A sharded tensor outside of a block: a DTensor of which torch's functions give what they give of the whole.

Under `shard` the parameters of an attached model are `Face`s, and so are `p.data`, `p.detach()`, `p.grad`, the tensors
of `model.state_dict()` and those of `opt.state[p]`. A `Face` is a DTensor, `Shard(0)` in torch's chunks of rows.

Elementwise functions of Faces run on this rank's rows, which hooks on parameters need: they may not gather. A plain
tensor beside a Face is taken for the whole. All else is computed of gathered wholes, and gives a plain tensor, the same
on all ranks. What autograd records is computed of wholes too. Only `x.redistribute(...)` goes by torch's own rules for
DTensors. By these rules `x.norm().item()` would be this rank's alone, `x.data = y` would have no effect, `normal_`
under one seed would give all ranks the same rows, a plain tensor beside a DTensor would be an error, and a rank that
asks alone would hang.

A gather is a collective in the middle of the user's code. Any rank may gather the values of a parameter alone: the
others join. Before the gather of anything else, such as a gradient, ranks meet, and a rank that asks alone raises.
Within backward, where ranks may come to a gather in different orders, it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from .._compat.autograd import arguments_of_functions, in_backward
from .._compat.functorch import asked_by_compiler, functorch_active, uncompiled
from .._compat.tensors import (
    CONVERTING,
    asked_by_fully_shard,
    dispatched_in_python,
    local_of,
    memory,
    schema,
    set_local,
    spec_of,
    version,
)
from ..ranks.dtensor import why_not_of_this_rank
from . import face_refusals as no
from .gathering import Origin, rows_of
from .torch_functions import (
    ALIKE,
    COLLECTIVES,
    COMPUTED,
    CONVERSIONS,
    FOREACH,
    FUSED,
    GIVING_MEMORY,
    LIKE,
    NORMS,
    RANDOM,
    SAME_SIZES,
    VIEWS,
    first_by_position,
    from_init,
    in_place,
    looks,
    pointwise,
    tensors_in,
)

DETACH = torch.ops.aten.detach.default
APPLYING = CONVERTING.__code__
# Functions that torch does not run for tensor subclasses.
BY_VALUE = frozenset({"tolist", "numpy"})


# ----------------------------------------------------------------------------------------------------------------------
# `Face`. Operations of autograd in C++ come to its `__torch_dispatch__`, all others to `__torch_function__`.


@dispatched_in_python
class Face(DTensor):
    """This rank's rows of a leaf as a DTensor; or a tensor that all ranks have, which was computed of such.

    Attributes:
        of: what it is of; what all ranks have is of nothing, and has the place of what it was computed of.
        lent: whether it is a view of a gathered tensor, in which a write would be lost.
        node_is_known: whether user code has the autograd node that accumulates its gradient, and may have put a hook
            on it.
    """

    of: Origin
    lent = node_is_known = False

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(map(_of_others, types)):
            return NotImplemented
        frame = sys._getframe(1)
        with torch.DisableTorchFunctionSubclass():
            if asked_by_compiler(frame):
                return func(*args, **kwargs or {})
            args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
            return _call(func, func.__name__.partition(".")[0], args, kwargs, frame)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DETACH:
            # Autograd does this once for each leaf in each backward, so it is fast.
            (x,) = args
            made: Any = Face(local_of(x).detach(), spec_of(x), requires_grad=False)
            # The result may be a leaf. A graph from it must not lead to the parameter, so `whole` is left out.
            made.of, made.lent = x.of if x.of.whole is None else x.of._replace(whole=None), x.lent
            return made
        return _below_autograd(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's rows as a plain tensor, differentiable, as `DTensor.to_local`."""
        with torch.DisableTorchFunctionSubclass():
            if self.requires_grad and torch.is_grad_enabled():
                return ToLocal.apply(self)
            return local_of(self).view_as(local_of(self))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full tensor as a plain one, gathered and differentiable: every rank must call it."""
        with torch.DisableTorchFunctionSubclass():
            full = _whole(self, "full_tensor")
            # The full tensor of a parameter may be lazy. A copy gathers it.
            return full.clone() if self.lent or (self.of.whole is not None and not is_whole(self)) else full

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """A DTensor with other placements, as `DTensor.redistribute`; torch's own class, and torch's own rules."""
        with torch.DisableTorchFunctionSubclass():
            if not is_whole(self):
                _check_gather("redistribute", self)
                self.of.by.meet_for(f"redistribute of {self.of}")
            how: Any = dict(run_check=False, shape=self.shape, stride=self.stride())
            mine = DTensor.from_local(self.to_local(), self.device_mesh, self.placements, **how)
            return mine.redistribute(device_mesh, placements, **kwargs)

    # torch's DCP calls the next three methods to save and load a rank's part. It does not take `Partial`, the placement
    # of a 0-d tensor, so there the first rank saves it.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        if self.dim():
            return super().__create_write_items__(fqn, object)
        from .._compat.checkpoint import items_to_write

        return items_to_write(fqn, self._number()) if flat(self).numel() else []

    def __create_chunk_list__(self) -> Any:
        if self.dim():
            return super().__create_chunk_list__()
        from .._compat.checkpoint import chunks_to_read

        return chunks_to_read(self._number()) if flat(self).numel() else []

    def __get_tensor_shard__(self, index: Any) -> Any:
        return super().__get_tensor_shard__(index) if self.dim() else self._number()

    def _number(self) -> Tensor:
        return local_of(self).detach()

    def set_(self, *source: Any, **more: Any) -> Tensor:
        # torch does not call `__torch_function__` for `set_`. Setting a parameter to itself (spectral_norm) is allowed.
        if not source or source[0] is not self:
            no.refuse_set(self.of)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            mine = local_of(self).detach()
            if is_whole(self):
                return repr(mine)
            low, high = self.of.by.wire.span(self.of.leaf)
            mine_in_words = f"elements {low} to {high - 1}" if high > low else "none"
            where = f"shape={tuple(self.shape)}, {self.placements[0]}, of which this rank has {mine_in_words}"
            return f"Face({self.of}, {where}:\n{mine!r})"

    def __deepcopy__(self, memo: dict) -> Any:
        with torch.DisableTorchFunctionSubclass():
            mine = local_of(self).detach().clone()
            return (
                mine if is_whole(self) else wrap(mine, self.of._replace(whole=None)).requires_grad_(self.requires_grad)
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_whole(self):
            no.refuse_memory(self.of)
        with torch.DisableTorchFunctionSubclass():
            return local_of(self).detach().clone().__reduce_ex__(protocol)


@lru_cache(1024)
def _of_others(cls: Any) -> bool:
    """Whether another library's class of tensors is to answer."""
    how = cls.__torch_function__
    return not issubclass(cls, DTensor) and getattr(how, "__func__", how) not in PLAIN


# The `__torch_function__`s of plain tensors, parameters and DTensors.
PLAIN = (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__, DTensor.__torch_function__)  # type: ignore[attr-defined]


def wrap(local: Tensor, of: Origin, cls: type[Face] = Face, requires_grad: bool = False) -> Any:
    """A Face on the memory of this rank's elements of a leaf, flat or in the shape of its rows."""
    spec, rows = of.by.placed(of.leaf, local)
    if not rows and not local.numel():
        local = local.new_zeros(())
    mine = local if local.shape == rows else local.view(rows)
    # torch's constructor does one thing more: it keeps itself out of graphs, which takes longer than making the tensor.
    made: Any = cls.__new__(cls, mine, spec, requires_grad=requires_grad)
    made.of = of
    return made


def same(local: Any, like: Any, how: str = "") -> Any:
    """A Face of the same leaf as another one.

    Args:
        local: this rank's elements, or a Face, which is returned as it is.
        like: the other one.
        how: the expression by which the user gets it, for messages.
    """
    if isinstance(local, Face):
        return local
    if is_whole(like):
        return _replicated(local, like.of, like.lent)
    return wrap(local, like.of._replace(whole=None, how=how or like.of.how))


def _replicated(whole: Tensor, of: Origin, lent: bool) -> Any:
    made: Any = Face(whole, of.by.replicated(whole), requires_grad=False)
    made.of, made.lent = of, lent
    return made


def is_whole(x: Any) -> bool:
    """Whether a Face is one that all ranks have."""
    return spec_of(x).placements[0].is_replicate()


def is_shard(x: Any) -> bool:
    """Whether a tensor is a Face of which this rank has some rows."""
    return isinstance(x, Face) and not is_whole(x)


def flat(x: Any) -> Tensor:
    """This rank's elements of a Face, flat, on the same memory."""
    local = local_of(x)
    if not local.dim() and not is_whole(x) and x.of.by.wire.group.rank:
        return local.new_empty(0)
    return local.reshape(-1)


def as_torchs(x: Any) -> Any:
    """A Face as a DTensor of torch's own class on the same memory, which may be pickled."""
    mine = local_of(x).detach()
    how: Any = dict(run_check=False, shape=x.shape, stride=x.stride())
    return DTensor.from_local(mine, x.device_mesh, x.placements, **how)


def local_shard(x: Any) -> Any:
    """This rank's elements of a Face, flat and differentiable; anything else as it is."""
    if not isinstance(x, Face):
        return x
    with torch.DisableTorchFunctionSubclass():
        return x.to_local().reshape(-1)[: flat(x).numel()] if x.requires_grad else flat(x)


# ----------------------------------------------------------------------------------------------------------------------
# These functions take this rank's rows of a Face, or gather it, each with a derivative.


class ToLocal(Function):
    """This rank's rows of a Face; its derivative is `FromLocal`."""

    @staticmethod
    def forward(x: Any) -> Tensor:
        return local_of(x).view_as(local_of(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.x = inputs[0]
        ctx.of = None if is_whole(ctx.x) else ctx.x.of

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        if (ctx.of is None) != is_whole(ctx.x):
            no.refuse_old_graph("the end of opt.gathered()" if ctx.of is None else "opt.gathered()")
        return g if ctx.of is None else FromLocal.apply(g, ctx.of)


class FromLocal(Function):
    """A Face of this rank's rows; its derivative is `ToLocal`."""

    @staticmethod
    def forward(rows: Tensor, of: Origin) -> Any:
        return wrap(rows.contiguous(), of._replace(how="a gradient", whole=None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx: Any, v: Any) -> tuple:  # type: ignore[override]
        # Autograd may bring a plain tensor, which is the whole.
        return v.to_local() if isinstance(v, Face) else rows_of(v, ctx.of).clone(), None


def _whole(x: Any, asked: str) -> Tensor:
    """The full tensor of a Face, differentiable."""
    if is_whole(x):
        return x.to_local() if x.requires_grad else local_of(x)
    if x.of.whole is not None:
        _check_no_argument()
        return x.of.whole()
    _check_gather(asked, x)
    return x.of.by.whole(local_shard(x), x.of.leaf, f"{asked} of {x.of}")


def _check_gather(asked: str, x: Any) -> None:
    if in_backward():
        no.refuse_gather_in_backward(asked, x.of)
    _check_no_argument()


def _check_no_argument() -> None:
    """Refuse to gather inside an `autograd.Function` that is given a Face and has to return its gradient."""
    for x in arguments_of_functions():
        if is_shard(x) and x.requires_grad:
            no.refuse_argument(x.of)


# ----------------------------------------------------------------------------------------------------------------------
# These functions run a torch function that is given Faces.


def _call(func: Any, name: str, args: tuple, kwargs: dict, frame: Any) -> Any:
    """Run a torch function that is given a Face."""
    x: Any = args[0] if args else None
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if name == "__format__":
        return func(_whole(x, name), *args[1:]) if args[1] or is_whole(x) else repr(x)
    if name == "storage_offset":
        return 0
    if name == "is_same_size":
        return x.shape == (args[1] if args[1:] else kwargs["other"]).shape
    if looks(name):
        # `fully_shard` calls this for every parameter before it changes any.
        if name == "is_contiguous" and asked_by_fully_shard(frame):
            no.refuse_fully_shard(x.of)
        return func(*args, **kwargs)
    if name in GIVING_MEMORY:
        return func(local_of(x), *args[1:], **kwargs) if is_whole(x) else no.refuse_memory(x.of)
    if name.startswith("new_"):
        return func(*_map(_local, args), **kwargs)
    if isinstance(x, Face):
        if name == "detach":
            # It is detached above autograd, so that both tensors have one count of writes.
            return same(local_of(x).detach(), x, "x.detach()")
        if name in CONVERSIONS:
            return _converted(func, name, args, kwargs, frame)
        if name in SAME_SIZES and is_shard(x) and len({y.shape for y in tensors_in((*args, *kwargs.values()))}) == 1:
            return _itself(x)
    if (name.startswith(FOREACH) or name in FUSED) and kwargs.get("out") is None:
        # Lists run one tensor after the other, so that only two full tensors are in memory, and not a model.
        found = [_run(func, name, column, kwargs) for column in _columns(args)]
        return args[0] if in_place(name) else tuple([y for (y,) in found])
    return _run(func, name, args, kwargs)


def _run(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a torch function on this rank's rows, where these give the rows of its result, and else on wholes."""
    faces = _faces(args, kwargs)
    if not faces:
        return func(*args, **kwargs)
    args, kwargs = _exchanged(name, args, kwargs, faces[0])
    target = kwargs["out"] if kwargs.get("out") is not None else args[0] if in_place(name) else None
    written = _faces((target,), {})
    for x in written:
        if x.requires_grad and torch.is_grad_enabled() and not from_init(func):
            no.refuse_write(name, x.of)
        if x.lent:
            no.refuse_lent(name)
    # A write is not recorded, as torch records none in `p.grad`.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not written):
        like = next((x for x in written or faces if is_shard(x)), None)
        if like is not None and _rows_do(func, name, args, kwargs, target, like):
            return _on_rows(func, name, args, kwargs, target, like)
        if len(written) > 1 and kwargs.get("out") is None:
            no.refuse_list(name, written[0].of)
        return _on_wholes(func, name, args, kwargs, target)


def _rows_do(func: Any, name: str, args: tuple, kwargs: dict, target: Any, like: Any) -> bool:
    """Whether rows of the result are those of the arguments, and the result may be a Face."""
    tensors = [*tensors_in((*args, *kwargs.values()))]
    if not all(_stays(x, like) for x in tensors) or not all(is_shard(x) for x in tensors_in((target,))):
        return False
    if target is not None:
        return not _drawn(func, name) and (pointwise(name) or (name == "__setitem__" and _all_of_it(args[1])))
    if name in LIKE:
        return True
    nonzero = name == "where" and len(args) + len(kwargs) == 1
    return pointwise(name) and not nonzero and not _records(args, kwargs) and not _beside_a_full(tensors, like)


def _stays(x: Any, like: Any) -> bool:
    """Whether an operand broadcasts to the shape of a Face, so that rows of the result are those of the operands."""
    if is_shard(x):
        return x.shape == like.shape and x.of.by.wire.group.ranks == like.of.by.wire.group.ranks
    shape, whole = x.shape, like.shape
    aligned = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in aligned)


def _beside_a_full(tensors: list[Tensor], like: Any) -> bool:
    """Whether one operand is a plain tensor of the full shape, as in `average.data * 0.9 + p.data * 0.1`.

    That result is gathered, since the next line often is `average.data = result`: `average` is a plain tensor, so torch
    asks no subclass, gives it the memory of a shard that it cannot read, and the process dies at the next use. A hook
    on a parameter may not gather, and returns its result to the Face.
    """
    return not in_backward() and any(not isinstance(x, Face) and x.shape == like.shape for x in tensors)


def _drawn(func: Any, name: str) -> bool:
    """Whether a function fills a tensor, whatever it held, with numbers that are drawn for the whole."""
    return name in RANDOM or from_init(func)


def _all_of_it(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _on_rows(func: Any, name: str, args: tuple, kwargs: dict, target: Any, like: Any) -> Any:
    """Run an elementwise function on what this rank has of Faces that lie like one of them."""
    mine = local_of(like)

    def own(x: Any) -> Tensor:
        local = _local(x)
        return local if is_whole(like) or is_shard(x) or not local.dim() else rows_of(local, like.of)

    def shown(y: Tensor) -> Tensor:
        if y.shape != mine.shape:
            return y
        made = _settled(same(y.detach().contiguous(), like))
        return made.requires_grad_() if y.requires_grad else made

    out = func(*_map(own, args), **_map(own, kwargs))
    if target is None:
        return _map(shown, out)
    if name in FUSED:
        # torch counts no write of these kernels, so a gathered copy would seem up to date.
        increment_version(mine)
    for x in _faces(args, kwargs):
        _settled(x)
    return target


def _settled(x: Any) -> Any:
    """A number lies on the first rank, and the others have zeros, whatever was computed of them."""
    if not x.shape and not is_whole(x) and x.of.by.wire.group.rank:
        local_of(x).zero_()
    return x


def _on_wholes(func: Any, name: str, args: tuple, kwargs: dict, target: Any = None) -> Any:
    """Run a function on gathered wholes, and store what it has written into them."""
    faces = _faces(args, kwargs)
    written = {id(x) for x in tensors_in((target,))}
    given: dict[int, Tensor] = {}

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, Face):
            return x
        if id(x) not in given:
            given[id(x)] = _to_write(func, name, x) if id(x) in written else _whole(x, name)
        return given[id(x)]

    wholes, named = _map(whole, args), _map(whole, kwargs)
    before, recorded = {key: _version(x) for key, x in given.items()}, _records(wholes, named)
    if name in BY_VALUE:
        # The full tensor of a parameter may be lazy. A copy gathers it.
        wholes = (wholes[0].clone(), *wholes[1:])
    out = func(*wholes, **named)
    # Collectives write into their first or second argument, without a change of its version.
    sends = getattr(func, "__module__", None) == COLLECTIVES
    if sends and callable(wait := getattr(out, "wait", None)):
        wait()
    for x in faces:
        full = given[id(x)]
        if sends or id(x) in written or _version(full) != before[id(x)]:
            _store(name, x, full)
    if target is not None or recorded:
        return out if target is None else target
    # Inside `opt.gathered()` parameters are whole, and a write into a view of one is stored: views are no lent memory.
    shared = {memory(given[id(x)]) for x in faces if x.lent or is_shard(x)} - {0}
    norm = name in NORMS or all(map(is_whole, faces))

    def shown(y: Tensor) -> Tensor:
        view = type(y) is Tensor and memory(y) in shared
        return _replicated(y, faces[0].of, view) if view or (norm and type(y) is Tensor and not y.requires_grad) else y

    return _map(shown, out)


def _to_write(func: Any, name: str, x: Any) -> Tensor:
    """The full tensor of what a Face has now, in memory of its own: a function is about to write into it."""
    if is_whole(x):
        return local_of(x)
    if _drawn(func, name):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check_gather(name, x)
    return x.of.by.gather(flat(x).detach(), x.of.leaf, f"{name} of {x.of}")


def _store(name: str, x: Any, full: Tensor) -> None:
    if full.shape != x.shape or (x.requires_grad and torch.is_grad_enabled()):
        no.refuse_write(name, x.of)
    if is_shard(x):
        with torch.no_grad():
            local_of(x).copy_(rows_of(full.detach(), x.of))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else version(x)


def _converted(func: Any, name: str, args: tuple, kwargs: dict, frame: Any) -> Any:
    """Run `clone`, `to` and the like. `model.to(...)` of what the parameters are already changes nothing."""
    x, own = args[0], local_of(args[0]).detach()
    out = func(own, *_map(_local, args[1:]), **_map(_local, kwargs))
    if APPLYING in (frame.f_code, getattr(frame.f_back, "f_code", None)):
        # torch would replace the parameter object, because the result is no plain tensor.
        if (out.dtype, out.device) != (own.dtype, own.device):
            no.refuse_other_data(x.of, out, own)
        return local_of(x)
    if out is own:
        return x
    other_strides = kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d)
    return _on_wholes(func, name, args, kwargs) if other_strides or _records(args, kwargs) else same(out, x)


def _itself(x: Any) -> Any:
    """A view in the same sizes: by `p.view_as(p)` programs find the node that accumulates the gradient of `p`."""
    if not _records((x,), {}):
        return same(local_of(x), x)
    x.node_is_known = True
    return Tensor.view_as(x, x)


def _columns(args: tuple) -> Iterator[tuple]:
    """The arguments of a function of lists for each tensor of its lists, as lists of one element."""
    longest = max((len(x) for x in args if type(x) in (list, tuple)), default=0)
    for i in range(longest):
        yield tuple(type(x)(x[i : i + 1]) if type(x) in (list, tuple) else x for x in args)


def _records(args: tuple, kwargs: dict) -> bool:
    """Whether autograd, or a transform of torch.func, differentiates a function of these arguments."""
    if functorch_active():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((*args, *kwargs.values())))


def _faces(args: tuple, kwargs: dict) -> list[Any]:
    return [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, Face)]


def _local(x: Any) -> Any:
    return local_of(x) if isinstance(x, Face) else x


def _map(fn: Callable[[Any], Any], x: Any) -> Any:
    """`fn` of each tensor among arguments, in lists and dicts too."""
    if isinstance(x, Tensor):
        return fn(x)
    if type(x) is tuple or isinstance(x, list):
        mapped = [_map(fn, y) for y in x]
        return tuple(mapped) if type(x) is tuple else mapped
    if type(x) is dict:
        return {k: _map(fn, y) for k, y in x.items()}
    return x


# ----------------------------------------------------------------------------------------------------------------------
# What the user assigns in the place of a Face, and DTensors of torch's beside one.


def _attribute(func: Any, name: str, args: tuple) -> Any:
    attribute, x = func.__self__.__name__, args[0]
    if name == "__get__":
        if attribute in COMPUTED:
            return _on_wholes(func, attribute, args, {})
        return same(local_of(x).detach(), x, "x.data") if attribute == "data" else func(*args)
    if attribute == "data":
        return set_data(x, args[1])
    if attribute == "grad" and args[1] is not None:
        return func(x, own_face(x, args[1], "x.grad = y"))
    return func(*args)


def set_data(x: Any, value: Any, how: str = "x.data = y") -> None:
    """Run `x.data = value`: the Face takes the memory of another Face, or of this rank's rows of a full tensor."""
    mine = local_of(x)
    if type(value) is Tensor and value.data_ptr() == mine.data_ptr() and value.shape == mine.shape:
        return
    value = own_face(x, value, how)
    if value.dtype != x.dtype or value.device != x.device:
        no.refuse_other_data(x.of, value, x)
    set_local(x, local_of(value).detach())


def own_face(x: Any, value: Any, how: str) -> Any:
    """A value that the user assigns in the place of a Face, as a Face like it. It may be a full tensor or a DTensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{how} of {x.of}: a tensor is expected, and this is {type(value).__name__}")
    if isinstance(value, DTensor) and not isinstance(value, Face):
        value = _of_dtensor(value, x, how)
    if value.shape != x.shape:
        no.refuse_other_shape(how, x.of, value, x.shape)
    if isinstance(value, Face) and is_whole(value) == is_whole(x):
        return value if type(value) is Face else same(local_of(value).detach(), x)
    full = (_whole(value, how) if isinstance(value, Face) else value).detach()
    if is_whole(x):
        return _replicated(full, x.of, False)
    return wrap(rows_of(full, x.of).clone(memory_format=torch.contiguous_format), x.of._replace(whole=None))


def _exchanged(name: str, args: tuple, kwargs: dict, face: Any) -> tuple[tuple, dict]:
    """The arguments with Faces in the place of other DTensors."""
    if all(isinstance(x, Face) or not isinstance(x, DTensor) for x in tensors_in((*args, *kwargs.values()))):
        return args, kwargs
    taken = lambda x: _of_dtensor(x, face, name) if isinstance(x, DTensor) and not isinstance(x, Face) else x  # noqa: E731
    return _map(taken, args), _map(taken, kwargs)


def _of_dtensor(x: Any, beside: Any, name: str) -> Any:
    """A DTensor of torch's as a Face on its memory, if it lies like one; what all ranks have as a plain tensor."""
    spec, recorded = spec_of(beside), x.requires_grad and torch.is_grad_enabled()
    why = why_not_of_this_rank(x)
    if why is None and x.device_mesh.mesh.equal(spec.mesh.mesh):
        if spec_of(x).placements == spec.placements and x.shape == beside.shape and not recorded:
            return same(local_of(x).detach(), beside)
        if all(placement.is_replicate() for placement in x.placements):
            return x.to_local()
    no.refuse_dtensor(name, beside.of, beside.shape, x, why)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd itself adds, detaches and copies gradients that are Faces.


def _below_autograd(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator below autograd."""
    name, faces = schema(func).name.partition("::")[2], _faces(args, kwargs)
    like = next(filter(is_shard, faces), faces[0])
    mine = local_of(like)
    if name in VIEWS and tuple(args[1]) == tuple(like.shape):
        return same(mine.view_as(mine), like)
    if name == "new_empty_strided" and tuple(args[1]) == tuple(like.shape):
        # Autograd copies a gradient that somebody else holds into such a tensor.
        return same(mine.new_empty(mine.shape, dtype=kwargs.get("dtype")), like)
    if name not in ALIKE and not pointwise(name):
        no.refuse_operator(name, like.of)
    return _on_rows(func, name, args, kwargs, args[0] if in_place(name) else None, like)
