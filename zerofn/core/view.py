"""`View` and `Wire`: a differentiable map from storage to model, and how leaves travel over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.autograd import applied
from .._compat.functorch import (
    NO_LEVEL,
    forward_level,
    innermost_transform,
    is_wrapped,
    makes_proxies,
    unwrapped_if_dead,
)
from .._errors import explain
from .._profiler_ranges import VIEW, ranged
from ..ranks.group import Group
from .layout import Layout, Leaf, as_complex, as_real

# ----------------------------------------------------------------------------------------------------------------------
# `Dtypes` says in which dtypes parameters are stored and seen, and gradients are reduced and accumulated.


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of parameters and gradients; `None` leaves one as it is.

    Attributes:
        param_dtype: the dtype of parameters in the model.
        store_dtype: the dtype of parameters in the state.
        grad_dtype: the dtype of gradients that update halves get.
        reduce_dtype: the dtype in which gradients are summed over ranks.
        output_dtype: the dtype of the model's floating-point outputs.
        residual: whether the optimizer updates in fp32, and keeps in 8 bits more what the stored bf16 has rounded away.
        buffers: by name, the dtype to which each floating-point buffer of an attached model is cast.
        by_path: the dtypes of leaves that have their own.
    """

    param_dtype: torch.dtype | None = None
    store_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    residual: bool = False
    buffers: Callable[[Sequence[str]], Mapping[str, torch.dtype | None]] | None = None
    by_path: Mapping[str, Dtypes] = field(default_factory=dict)

    def of(self, leaf: Leaf) -> Dtypes:
        """The dtypes of one leaf. Complex tensors are not cast."""
        return AS_IT_IS if leaf.complex is not None else self.by_path.get(leaf.path, self)

    def stored(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf in the state."""
        return self.of(leaf).store_dtype or leaf.dtype

    def seen(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf in the model."""
        own = self.of(leaf)
        return own.param_dtype or own.store_dtype or leaf.dtype

    def gradient(self, leaf: Leaf) -> torch.dtype:
        """The dtype of the leaf's gradient once it is pulled back."""
        own = self.of(leaf)
        stored = own.store_dtype or leaf.dtype
        return own.grad_dtype or (torch.float32 if stored == torch.float16 else stored)

    def summed(self, leaf: Leaf) -> torch.dtype:
        """The dtype in which gradients of the leaf are summed over ranks."""
        return self.reduce_dtype or summable(self.seen(leaf))

    @property
    def inputs(self) -> torch.dtype | None:
        """The dtype to which floating-point inputs of a model are cast: the one dtype of all its parameters."""
        given = {d.param_dtype or d.store_dtype for d in (self.by_path.values() or (self,))}
        return given.pop() if len(given) == 1 else None

    @property
    def seen_otherwise(self) -> bool:
        """Whether a model may compute in other dtypes than it was made in."""
        every = (self, *self.by_path.values())
        given = [x for d in every for x in (d.param_dtype, d.store_dtype, d.output_dtype, d.buffers)]
        return any(x is not None for x in given)


AS_IT_IS = Dtypes()


def summable(dtype: torch.dtype) -> torch.dtype:
    """The default dtype of sums of gradients: their own, but fp32 for fp16, since fp16 overflows at 65504."""
    return torch.float32 if dtype == torch.float16 else dtype


# ----------------------------------------------------------------------------------------------------------------------
# A `View` says how the model sees a stored leaf. A `Wire` says how leaves travel between ranks.
#
# A `View` is a record of functions on one leaf. The executor never asks which transform a view belongs to. It reads
# what the view says of itself: its wire, whether it only changes dtypes, whether its output stays in the model between
# steps.


# Gradients of leaves; `None` for a leaf that has none on this rank.
Grads = Sequence[Tensor | None]


class Wire(Protocol):
    """How leaves are packed, sent to other ranks and unpacked, many in one collective.

    Attributes:
        group: the ranks it talks to.
        reduce_dtype: the dtype in which gradients are summed; by default the dtype in which they arrive.
        cuts: whether a rank keeps a shard of each leaf, a range of the flattened leaf, so that `view` all-gathers.
    """

    @property
    def group(self) -> Group: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...

    cuts: ClassVar[bool]

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Wire:
        """The same wire over another group of the same ranks, with sums in that dtype."""
        ...

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's range of the flattened leaf: its first element, and the one behind its last."""
        ...

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The whole leaf from this rank's shard, with any number of batch dimensions in front."""
        ...

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        """The transpose of `view`, with any number of batch dimensions in front: this rank's shard of the mean."""
        ...

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """This rank's shard of the whole leaf."""
        ...

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """All-gather shards of one dtype in one collective: (work handle or `None`, the received buffer)."""
        ...

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Full leaves, flat, from the received buffer, in memory of their own or written to `into`."""
        ...

    def pack(
        self, grads: Grads, leaves: Sequence[Leaf], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Flat gradients as one buffer, to be reduced over ranks; `None` where this rank has no gradient."""
        ...

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Reduce the buffer over ranks: (work handle, this rank's share of the result)."""
        ...

    def unpack(
        self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int], given: Sequence[bool] = ()
    ) -> list[Tensor | None]:
        """This rank's flat mean gradient of every leaf; `None` where no rank had one.

        Args:
            mine: from `send`, whose work handle has been waited for.
            leaves: what is in it.
            numels: as `pack` got them.
            given: for each leaf, whether this rank has packed a gradient. If it has packed one for every leaf, the
                gradients of other ranks decide nothing, and the host reads nothing from the device.
        """
        ...


# (tensor, leaf) -> tensor; of a view that reads its transform's state (tensor, leaf, state) -> tensor.
OnLeaf = Callable[..., Tensor]
# (state of a transform) -> the number that cotangents are multiplied by inside of the model.
Factor = Callable[[Mapping[str, Any]], Tensor]


def same_tensor(x: Tensor, leaf: Leaf) -> Tensor:
    """The `view`, `pull` and `store` of a view that does nothing to leaves."""
    return x


@dataclass(frozen=True)
class View:
    """The view half on one leaf. All functions take `(tensor, leaf)` and any number of batch dimensions in front.

    Attributes:
        view: maps the stored tensor to the seen one. It is linear, or `pull` replaces its derivative (straight-through
            rounding).
        pull: the transpose of `view`: maps a cotangent of the seen tensor to one of the stored tensor.
        store: maps the seen tensor to the stored one; `view` after `store` is the identity.
        changes: whether the view changes a leaf; other leaves are stored as they are seen. A view with a wire changes
            all leaves.
        wire: how leaves travel between ranks, if they do; the three functions above are then the wire's.
        model_wire: the wire by which the model gets its parameters, if that is not `wire`. It may round them.
            Full parameters for anything but the model, such as checkpoints, come by `wire`.
        corrects: a function `(given, gradients, state, ctx) -> (gradients, state)` of the transform, which runs in
            front of a reduction that is made once a window. `given` returns the leaf that the wire cuts.
        resident: whether the seen tensors stay in an attached model between steps, and are made once after an update.
        dtypes: the dtypes to which the view casts, if casting is all that it does; `None` for other views.
        name: the name of the view's transform, for profilers.
        given: maps the `Leaf` of the full parameter to the `Leaf` that this view gets from the model's side. That is
            the full parameter, or its shard if an earlier view in the chain shards it.
        factor: the factor that multiplies cotangents where they enter the model (at its outputs) and divides them where
            they leave it (at its inputs and parameters), as a function of the transform's state: a 0-d tensor in fp32
            on the CPU, neither zero nor infinite. Factors of several views are multiplied. The factor must be a number,
            because only a number commutes with the derivative of every model. So no gradient that leaves the model
            contains the factor, whatever the order of the derivative.
        reads: whether `view` and `pull` take the transform's state from before the step as a third argument. `store`
            does not, since stored parameters exist before any state. Derivatives take the state for a constant: make
            a learned number a parameter.
        update: a function that zerofn calls in place of the transform's `update_fn`. An update that sends tensors over
            ranks needs it, because only `view_fn` gets the group of ranks.
        around: a function `(transform, paths) -> transform` of every other transform of the chain and the leaves that
            it gets, for a view that decides how updates are stored: an optimizer keeps bits of its parameters in its
            state (`precision(store_dtype="bf16+8")`), or results are rounded at random.
        traceable: whether a compiler can make a graph of the wire: `unpack` then returns a gradient for every leaf,
            since a graph cannot branch on a number.
    """

    view: OnLeaf = same_tensor
    pull: OnLeaf = same_tensor
    store: OnLeaf = same_tensor
    changes: Callable[[Leaf], bool] = lambda leaf: True
    wire: Wire | None = None
    model_wire: Wire | None = None
    corrects: Callable[..., tuple[Any, Any]] | None = None
    resident: bool = False
    dtypes: Dtypes | None = None
    name: str = ""
    given: Callable[[Leaf], Leaf] = lambda leaf: leaf
    factor: Factor | None = None
    reads: bool = False
    update: Callable[..., Any] | None = None
    around: Callable[[Any, Set[str]], Any] | None = None
    traceable: bool = False

    def reading(self, state: Callable[[], Mapping[str, Any]]) -> View:
        """The same view, whose functions call `state()` for the state whenever they run."""
        if not self.reads:
            return self
        look, back = self.view, self.pull
        view, pull = (lambda x, leaf: look(x, leaf, state())), (lambda g, leaf: back(g, leaf, state()))
        return replace(self, view=view, pull=pull, reads=False)

    def only_on(self, touched: frozenset[str]) -> View:
        """The same view, whose functions change only the leaves of these paths."""
        view, pull, store = (_only_on(touched, fn) for fn in (self.view, self.pull, self.store))
        return replace(self, view=view, pull=pull, store=store)

    @property
    def at_model(self) -> View:
        """The view through which the model sees its parameters."""
        wire = self.model_wire
        return self if wire is None else replace(self, view=wire.view, wire=wire, model_wire=None)

    @property
    def of_leaves(self) -> bool:
        """Whether the view has an effect on leaves."""
        return not (self.view is self.pull is self.store is same_tensor)

    @property
    def renumbers(self) -> bool:
        """Whether it changes the numbers of a leaf, beyond a cast or a collective."""
        return self.wire is None and self.dtypes is None


def _only_on(touched: frozenset[str], fn: OnLeaf) -> OnLeaf:
    if fn is same_tensor:
        return fn
    return lambda x, leaf, *state: fn(x, leaf, *state) if leaf.path in touched else x


def summed_in(wire: Wire, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a wire sums gradients of a dtype."""
    return wire.reduce_dtype or summable(dtype)


# The attributes that every wire must have.
WIRE = ("group", "reduce_dtype", "cuts", "on", "span", "view", "pull", "store")
WIRE += ("send_parts", "join_parts", "pack", "send", "unpack")


class IncompleteWire(TypeError):
    """A wire lacks some of the required attributes.

    Attributes:
        kind: the name of its class.
        missing: the attributes that it lacks.
    """

    def __init__(self, kind: str, missing: list[str]):
        super().__init__(f"{kind} is no Wire, without {', '.join(missing)}; see zerofn.extend.Wire")
        self.kind, self.missing = kind, missing


def over_ranks(wire: Wire, resident: bool, traceable: bool = False, model_wire: Wire | None = None) -> View:
    """The view of a wire.

    Args:
        wire: the wire.
        resident: whether the model keeps full leaves between steps (`reduce_scatter`), instead of gathering on use
            (`shard`).
        traceable: whether the compiler may trace the wire: it branches on no number.
        model_wire: see `View`.

    Raises:
        IncompleteWire: the wire lacks a function.
    """
    known = dir(wire)
    if missing := [name for name in WIRE if name not in known]:
        raise IncompleteWire(type(wire).__name__, missing)

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        # A wire with a reduce_dtype casts while it packs.
        return wire.pull(g if wire.reduce_dtype is not None else g.to(summable(g.dtype)), leaf)

    known_by = dict(wire=wire, model_wire=model_wire, resident=resident, traceable=traceable)
    return View(wire.view, pull, wire.store, **known_by)  # type: ignore[arg-type]


# Opens the group of a mesh, or of all ranks, for the function that is named in messages.
Ranks = Callable[[str, Any], Group]
ViewOf = Callable[[Layout, Ranks], View | None]


def no_view(layout: Layout, ranks: Ranks) -> View | None:
    """The `view_fn` of a transform without a view half; returns `None`."""
    return None


def cutting_wires(views: Sequence[View]) -> tuple[Wire, ...]:
    """The wires that shard leaves, one after the other."""
    return tuple([view.wire for view in views if view.wire is not None and view.wire.cuts])


def place_in(cutting: Sequence[Wire]) -> tuple[int, int]:
    """This rank's number among those that share a leaf, in the order of their shards, and how many they are."""
    rank, size = 0, 1
    for wire in cutting:
        rank, size = rank * wire.group.size + wire.group.rank, size * wire.group.size
    return rank, size


# ----------------------------------------------------------------------------------------------------------------------
# These functions compose the views of one leaf, for every route and stage.
#
# `views` are in the order of their chain, from the model to storage. `bucketed_views.py` makes one collective for many
# leaves; `LeafView` is the differentiable form.


def see(views: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """The tensor that the model sees for a stored one; `x` itself if no view changes it."""
    for view in reversed(views):
        with ranged(VIEW, view.name):
            x = view.view(x, leaf)
    return x


def pull(views: Sequence[View], g: Tensor, leaf: Leaf) -> Tensor:
    """The transpose of `see`: maps a cotangent of the seen tensor to one of the stored tensor."""
    for view in views:
        with ranged(VIEW, view.name):
            g = view.pull(g, leaf)
    return g


def store(views: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """The stored tensor for one that the model sees."""
    for view in views:
        x = view.store(x, leaf)
    return x


# ----------------------------------------------------------------------------------------------------------------------
# The boundary of a model consists of linear maps on inputs, parameters and outputs, in pairs of transposes.
#
# Seen from outside, a model is a function with true gradients of any order, whatever loss scale or dtype is used
# inside. On outputs (`leave`): identity forward, cotangent times S backward. On inputs (`enter`) and parameters
# (`LeafView`): identity (or cast, or gather) forward, cotangent over S backward. The backward of each map is its
# partner, whose backward is the first map again: if both had the same factor, second derivatives would carry S or 1/S.


# (tensor with any leading batch dimensions, loss scale or None) -> tensor
Map = Callable[[Tensor, Tensor | None], Tensor]

# Dtypes that `wide` leaves as they are, found without a call into torch.
WIDE = frozenset((torch.float32, torch.float64))


class LinearMap(Function):
    """`forth(x)`, whose derivative is `back`, whose derivative is `forth`; applied by `linear_map`.

    The scale is an argument and not part of the maps, because under `vmap` each member of an ensemble
    has its own. It has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:  # type: ignore[override]
        _keep(ctx, scale, forth, back)
        return forth(x, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        scale = ctx.saved_tensors[0] if ctx.has_scale else None
        pulled = ctx.back(g, scale) if untracked() else linear_map(g, scale, ctx.back, ctx.forth)
        return pulled, None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return linear_map(x, ctx.saved_tensors[0] if ctx.has_scale else None, ctx.forth, ctx.back)


class LinearMapInFunc(Function):
    """`LinearMap` for torch.func and torch.compile: `forward` without `ctx`, and a rule for `vmap`.

    This class would do for eager code too, but torch then reads the signature of `forward` at each call: 20 us.
    """

    backward = LinearMap.backward  # type: ignore[assignment]
    jvp = LinearMap.jvp  # type: ignore[assignment]

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:
        return forth(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _keep(ctx, *inputs[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> tuple:  # type: ignore[override]
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        if scale is not None and in_dims[1] is not None:
            scale = scale.movedim(in_dims[1], 0).to(x.device)
            scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
        return linear_map(x, scale, forth, back), 0


_apply = applied(LinearMap)


def _keep(ctx: Any, scale: Tensor | None, forth: Map, back: Map) -> None:
    ctx.forth, ctx.back, ctx.has_scale = forth, back, scale is not None
    if scale is not None:
        ctx.save_for_backward(scale)
        ctx.save_for_forward(scale)


def linear_map(x: Tensor, scale: Tensor | None, forth: Map, back: Map) -> Tensor:
    """`forth(x, scale)`, whose derivative is `back`."""
    if torch.compiler.is_compiling() or innermost_transform() is not None:
        return LinearMapInFunc.apply(x, scale, forth, back)  # type: ignore[return-value]
    if scale is not None:
        return LinearMap.apply(x, scale, forth, back)  # type: ignore[return-value]
    return _apply(unwrapped_if_dead(x), None, forth, back)


def is_linear_map(node: Any) -> bool:
    """Whether an autograd node is that of a linear map, or of torch's own cast."""
    return callable(getattr(node, "forth", None)) or is_cast(node)


def is_cast(node: Any) -> bool:
    """Whether an autograd node is that of torch's own cast, which no write in place has."""
    return node is not None and node.name() == "ToCopyBackward0"


def untracked() -> bool:
    """Whether nobody differentiates the current backward, so that its operations need no node: 10 us for each."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return innermost_transform() is None and forward_level() == NO_LEVEL


def wide(x: Tensor) -> Tensor:
    """`x` in fp32 at least: a 16-bit cotangent is multiplied in fp32, and rounded once afterwards."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def multiplied(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * scale` in `dtype`: multiplied in fp32 and rounded once."""
    if x.is_complex():
        return _by_parts(multiplied, x, scale, dtype)
    if x.is_cuda and _on_gpu(x, scale):
        return _cast_within(torch.mul, x, scale, dtype)
    return (wide(x) * scale).to(dtype)


def divided(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x / scale` in `dtype`: divided in fp32 and rounded once; after a cast to fp16 small gradients would be zero."""
    if x.is_complex():
        return _by_parts(divided, x, scale, dtype)
    if x.dtype == dtype and _is_number(scale):
        # By a Python number torch divides 16-bit tensors in fp32, without the two copies in fp32 that would show in the
        # peak of memory. Not by a tensor: some kernels cast it to fp16 first, where 65536 is infinite.
        return x / float(scale)
    if x.is_cuda and _on_gpu(x, scale):
        return _cast_within(torch.div, x, scale, dtype)
    return (wide(x) / scale).to(dtype)


def _on_gpu(x: Tensor, scale: Tensor) -> bool:
    """Whether one kernel computes it, of an `x` on a GPU: nobody differentiates it, and there is no batch of scales."""
    return scale.is_cuda and not scale.ndim and type(x) is type(scale) is Tensor and untracked()


def _cast_within(operation: Callable[..., Tensor], x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`operation(x, scale)` in fp32 at least, stored in `dtype`, in one launch and without a copy of `x` in fp32.

    The scale gets the dimensions of `x`: torch ignores a 0-d tensor when it chooses the dtype of an operation. A kernel
    of a GPU casts what it reads and writes.
    """
    return operation(x, scale.reshape((1,) * x.ndim), out=torch.empty_like(x, dtype=dtype))


def _by_parts(fn: Callable[..., Tensor], x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`fn` on the real and the imaginary part: torch takes a scale for `scale + 0i`, and the zero times inf is NaN."""
    part, x = dtype.to_real(), x.resolve_conj()  # the imaginary part of a lazy conjugate has no rule for vmap
    return torch.complex(fn(x.real, scale, part), fn(x.imag, scale, part))


def _is_number(scale: Tensor) -> bool:
    """Whether Python can read it at once. Under vmap there are several values, while traced none; a GPU would wait."""
    if scale.ndim or not scale.is_cpu or torch.compiler.is_compiling() or makes_proxies() or type(scale) is not Tensor:
        return False
    return innermost_transform() is None or not is_wrapped(scale)


def identity(x: Tensor) -> Tensor:
    """A view of `x`: a Function must not return its input."""
    return x.view_as(x)


@dataclass(frozen=True)
class LeafView:
    """The views of one leaf, from the model to storage, and the dtype of its stored gradient."""

    leaf: Leaf
    stages: tuple[View, ...]
    grad_dtype: torch.dtype

    def forth(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Map the stored parameter to the one that the model sees."""
        if self.stages and x.is_complex():
            # An attached model has complex parameters, of which views see the parts.
            return as_complex(self.forth(as_real(x, self.leaf), scale), self.leaf)
        seen = see(self.stages, x, self.leaf) if self.stages else x
        if seen is not x:
            return seen
        # `detach` and not a view: torch refuses to use a view after a write into its memory, such as that of a layer
        # which clamps its weights. Both have one version counter all the same.
        return identity(seen) if torch.compiler.is_compiling() or innermost_transform() is not None else seen.detach()

    def back(self, g: Tensor, scale: Tensor | None) -> Tensor:
        """Map a cotangent of the seen parameter to the true gradient of the stored one."""
        if self.stages and g.is_complex():
            return as_complex(self.back(as_real(g, self.leaf), scale), self.leaf)
        narrow = g
        if self.stages:
            stages = self.stages if scale is None else [stage for stage in self.stages if stage.dtypes is None]
            narrow = pull(stages, g, self.leaf)
        narrow = narrow.to(self.grad_dtype) if scale is None else divided(narrow, scale, self.grad_dtype)
        return identity(narrow) if narrow is g else narrow

    @cached_property
    def cast(self) -> torch.dtype | None:
        """The dtype to which the views cast the parameter, if they do nothing else to it."""
        # A `Function` in Python takes ten times as long as torch's own cast, in forward and in backward.
        dtypes = self.stages[0].dtypes if len(self.stages) == 1 else None
        if dtypes is None or dtypes.gradient(self.leaf) != self.grad_dtype:
            return None
        return dtypes.of(self.leaf).param_dtype

    def __call__(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """The parameter that the model sees, differentiable; `x` itself if no view changes it."""
        if scale is None and not self.stages:
            return x
        # The transpose of torch's cast gives a gradient in the dtype of `x`.
        if scale is None and self.cast not in (None, x.dtype) and x.dtype == self.grad_dtype:
            with ranged(VIEW, self.stages[0].name):
                return x.to(self.cast)
        return linear_map(x, scale, self.forth, self.back)

    def transposed(self, g: Tensor, scale: Tensor | None) -> Tensor:
        """`back` as recorded operations, for a gradient that is differentiated in turn.

        The scale is a plain division here, not a `linear_map`: that is for tensors behind the boundary only, and the
        loss may also depend on other tensors, such as those of its closure.
        """
        for stage in self.stages:
            if stage.wire is not None:
                g = linear_map(g, None, _of_leaf(stage.pull, self.leaf), _of_leaf(stage.view, self.leaf))
            elif scale is None or stage.dtypes is None:
                g = stage.pull(g, self.leaf)
        return g.to(self.grad_dtype) if scale is None else divided(g, scale.detach(), self.grad_dtype)


def stored_by(stages: Sequence[View], x: Tensor, leaf: Leaf) -> Tensor:
    """The stored form of a parameter that all ranks have, differentiable: all ranks get its gradient too."""
    for stage in stages:
        if stage.wire is None:
            x = stage.store(x, leaf)
        else:
            x = linear_map(x, None, _of_leaf(stage.store, leaf), _of_leaf(stage.view, leaf))
    return x


def _of_leaf(fn: Callable[[Tensor, Leaf], Tensor], leaf: Leaf) -> Map:
    def run(x: Tensor, scale: Tensor | None) -> Tensor:
        out = fn(x, leaf)
        return identity(out) if out is x else out

    return run


class ForwardOnlyView(LeafView):
    """A view that refuses a backward, because that would average gradients over ranks without their weights."""

    @cached_property
    def cast(self) -> None:
        """None: torch's own cast would let a backward through."""

    def back(self, g: Tensor, scale: Tensor | None) -> NoReturn:
        raise ValueError(
            explain(
                "a derivative of zf.bind(fn, tx, state) where accumulate(weighted=True) comes before the reduction",
                "this backward would average it over ranks before the weights are known",
                "out, pullback = zf.vjp(fn, tx, state, *inputs); grads, *_ = pullback(torch.ones_like(out)); "
                "zf.update(tx, grads, state, weight=...)",
            )
        )


@dataclass(frozen=True)
class EdgeMap:
    """The map of one input or output: it casts to `dtype`, if given; it scales the cotangent in fp32 and casts it back.

    Attributes:
        by: `multiplied` for an output, `divided` for an input.
        dtype: to cast to, or `None`.
        own: the dtype of the tensor, and of its cotangent.
    """

    by: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    dtype: torch.dtype | None
    own: torch.dtype

    def forth(self, x: Tensor, scale: Tensor | None) -> Tensor:
        # A new tensor even without a cast: writes of the caller into a view would be an error under a Function, and
        # silently wrong under a tensor hook.
        return x.to(self.dtype) if self.dtype not in (None, x.dtype) else x.clone()

    def back(self, g: Tensor, scale: Tensor | None) -> Tensor:
        out = g.to(self.own) if scale is None else self.by(g, scale, self.own)
        return identity(out) if out is g else out


def crosses(x: Tensor) -> bool:
    """Whether tensors of its dtype have derivatives, so that they pass through the boundary."""
    return x.is_floating_point() or x.is_complex()


def cast_to(x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype to cast `x` to; none for a complex tensor, which a real dtype would rob of its imaginary part."""
    return None if x.is_complex() else dtype


def differentiable(x: Tensor) -> bool:
    """Whether `x` may get a cotangent. A tensor wrapped by `vmap` does not say so, even if the inner one does."""
    return x.requires_grad or is_wrapped(x)


def leave(y: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Let one output leave a model."""
    return y if scale is None and dtype is None else _crossed(multiplied, y, scale, dtype)


def enter(x: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Let one input enter a model."""
    return x if scale is None and dtype is None else _crossed(divided, x, scale, dtype)


def _crossed(by: Callable[..., Tensor], x: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    dtype = cast_to(x, dtype)
    if not crosses(x) or (dtype in (None, x.dtype) and (scale is None or not differentiable(x))):
        return x
    edge = EdgeMap(by, dtype, x.dtype)
    return linear_map(x, scale, edge.forth, edge.back)
