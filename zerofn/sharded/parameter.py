"""A sharded parameter outside of its block: local shard, global shape."""

from __future__ import annotations

import enum
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

from .._compat.autograd import arguments_of_functions, in_backward
from .._compat.functorch import asked_by_compiler, uncompiled
from .._compat.tensors import SHALLOW_COPY_CHECK, alias_of, memory, tagged_pointwise, version
from .._errors import explain
from ..core.layout import Leaf, rows_of, span, width
from ..core.view import Wire, over_ranks
from ..ranks.dtensor import (
    by_rows,
    distributed_class,
    in_full,
    is_distributed,
    mesh_of_group,
    of_this_rank,
    replicated,
    why_not_of_this_rank,
)

# ----------------------------------------------------------------------------------------------------------------------
# Each torch function on a sharded tensor has a kind: elementwise, asking for sizes, reshaping, writing, computing, ...


class Kind(enum.Enum):
    """The kind of a torch function, by which a `Part` runs it."""

    ELEMENTS = enum.auto()  # elementwise
    LOOKS = enum.auto()  # asks about the tensor, or gives the same elements
    SIZES = enum.auto()  # asks for sizes
    PRINTS = enum.auto()
    RESHAPES = enum.auto()  # gives the same elements in another shape
    JOINS = enum.auto()  # concatenates tensors
    SPLITS = enum.auto()  # takes them apart again
    INDEXES = enum.auto()
    LIKE = enum.auto()  # makes a tensor beside it
    MAKES = enum.auto()  # makes a tensor of a given shape
    DRAWS = enum.auto()  # makes a tensor of random numbers beside it
    SAVES = enum.auto()  # gives out the memory
    COMPARES = enum.auto()
    WRITES = enum.auto()  # writes into its first argument, and not elementwise
    COMPUTES = enum.auto()  # all else


# fmt: off
# Elementwise, and not tagged as such by torch.
POINTWISE = frozenset({
    "copy", "divide", "fill", "floor_divide", "isclose", "masked_fill", "multiply", "not_equal", "square", "subtract",
    "zero",
})
# Names of an elementwise function and of a reduction.
REDUCING = frozenset({"max", "min"})
LOOKS = frozenset({
    "__delete__", "__dir__", "__hash__", "__set__", "alias", "as_subclass", "backward", "bfloat16", "clone",
    "contiguous", "cpu", "cuda", "detach", "detach_", "double", "element_size", "float", "get_device", "half",
    "pin_memory", "requires_grad_", "retain_grad", "to", "type", "type_as",
    SHALLOW_COPY_CHECK,
})
# Functions and attributes.
SIZES = frozenset({
    "__len__", "dim", "dim_order", "is_contiguous", "is_same_size", "nbytes", "ndim", "ndimension", "nelement", "numel",
    "shape", "size", "storage_offset", "stride",
})
BEGINNINGS = ("is_", "has_", "register_")
PRIVATE = frozenset({name for name in dir(Tensor) if name.startswith("_") and not name.startswith("__")})
# Attributes that are computed.
COMPUTED = frozenset({"T", "mT", "H", "mH", "real", "imag"})
BY_NAME = {
    Kind.LOOKS: LOOKS | PRIVATE,
    Kind.SIZES: SIZES,
    Kind.PRINTS: frozenset({"__format__", "__repr__"}),
    Kind.RESHAPES: frozenset({
        "flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as",
    }),
    Kind.JOINS: frozenset({"cat", "concat", "concatenate", "hstack"}),
    Kind.SPLITS: frozenset({"split", "split_with_sizes"}),
    Kind.INDEXES: frozenset({"__getitem__"}),
    # torch.save, safetensors and NumPy read memory with these.
    Kind.SAVES: frozenset({"__reduce_ex__", "__array__", "data_ptr", "numpy", "storage", "untyped_storage"}),
    Kind.COMPARES: frozenset({"allclose", "equal"}),
}
# Functions that fill a tensor with random numbers, whatever it held.
RANDOM = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_uniform_", "log_normal_", "normal_", "random_",
    "trunc_normal_", "uniform_",
})
# `__radd__`, `__iadd__` and `__add__` are one operation.
DUNDERS = frozenset({
    "abs", "add", "and", "div", "eq", "floordiv", "ge", "gt", "invert", "le", "lshift", "lt", "mod", "mul", "ne", "neg",
    "or", "pow", "rshift", "sub", "truediv", "xor",
})
WRITING = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})
# fmt: on
INIT = nn.init.__name__


@functools.cache
def pointwise(name: str) -> bool:
    """Whether a function is elementwise, and broadcasts its arguments.

    >>> pointwise("_foreach_lerp_"), pointwise("__radd__"), pointwise("isnan"), pointwise("sum")
    (True, True, True, False)
    """
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return inner in DUNDERS or inner[1:] in DUNDERS
    base = name.removeprefix("_foreach_").rstrip("_")
    return base in POINTWISE or (base not in REDUCING and tagged_pointwise(base))


def in_place(name: str) -> bool:
    """Whether a function writes into its first argument.

    >>> in_place("mul_"), in_place("__iadd__"), in_place("__add__"), in_place("requires_grad_")
    (True, True, False, True)
    """
    return name in WRITING or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def kind_of(name: str, attribute: str = "") -> Kind:
    """The kind of a function.

    Args:
        name: its name.
        attribute: the name of the attribute, if it is `__get__` of one.

    >>> kind_of("mul_"), kind_of("norm"), kind_of("view"), kind_of("__get__", "T"), kind_of("cumsum_")
    (<Kind.ELEMENTS: 1>, <Kind.COMPUTES: 15>, <Kind.RESHAPES: 5>, <Kind.COMPUTES: 15>, <Kind.WRITES: 14>)
    """
    if name == "__get__":
        return Kind.SIZES if attribute in SIZES else Kind.COMPUTES if attribute in COMPUTED else Kind.LOOKS
    for kind, names in BY_NAME.items():
        if name in names:
            return kind
    if name.startswith(BEGINNINGS):
        return Kind.LOOKS
    if name.startswith("new_"):
        return Kind.MAKES
    if name.endswith("_like"):
        return Kind.DRAWS if name.startswith("rand") else Kind.LIKE
    if pointwise(name):
        return Kind.ELEMENTS
    return Kind.WRITES if in_place(name) else Kind.COMPUTES


def from_init(func: object) -> bool:
    """Whether a function is one of `torch.nn.init`."""
    return getattr(func, "__module__", None) == INIT


def dtype_in(args: tuple, kwargs: dict) -> bool:
    """Whether a dtype is among the arguments, as in `x.view(dtype)`."""
    return any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))


# ----------------------------------------------------------------------------------------------------------------------
# Views of a gathered full tensor refuse writes, which would be lost.
#
# In torch `p.grad[0].zero_()` writes into the gradient through a view. Of a sharded gradient the row is gathered, and
# is no view.


PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


class ReadOnly(Tensor):
    """A view of a gathered whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_other_class(types, (ReadOnly, Norm)):
            return NotImplemented
        kwargs = kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if not is_dynamo_compiling():
                check_unwritten(func.__name__.partition(".")[0], args, kwargs)
            out = func(*args, **kwargs)
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, ReadOnly)]
            return out if is_dynamo_compiling() or func.__name__ == "as_subclass" else read_only(out, given)


def has_other_class(types: Any, ours: tuple[type, ...]) -> bool:
    """Whether another class than `ours` handles the function: that of sharded parameters, or one of the user's."""
    return any(t not in ours and getattr(t.__torch_function__, "__func__", None) is not PLAIN for t in types)


def read_only(out: Any, given: list[Any]) -> Any:
    """The result of a function. Views of `given`, the tensors that were gathered for it, become `ReadOnly`."""
    if type(out) is Tensor and any(memory(out) == memory(x) for x in given):
        return out.as_subclass(ReadOnly)
    return type(out)(read_only(x, given) for x in out) if type(out) in (list, tuple) else out


def check_unwritten(name: str, args: tuple, kwargs: dict) -> None:
    """Refuse a function that writes into a read-only view."""
    into = [args[0] if args and in_place(name) else None, kwargs.get("out")]
    if name != "requires_grad_" and any(_is(x) for x in into):
        raise RuntimeError(
            explain(
                f"{name} of a view of what was gathered",
                "p.grad[index], p.data.T and opt.state[p][name][index] of a shard are made of all ranks' shards,\n"
                "and what is written into them would be lost",
                "p.grad[index] = new, or x[index] = x[index] + 1 in place of x[index] += 1, on every rank;\n"
                "x.clone() for a tensor of one's own; for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach",
            )
        )


# Functions whose result over norms is a norm, and moves of one.
OF_NORMS = frozenset({
    "clone", "cpu", "cuda", "detach", "double", "float", "linalg_norm", "linalg_vector_norm", "norm", "sqrt", "stack",
    "to",
})  # fmt: skip
# Methods of a tensor for logs and files, which ask for its class.
OUTSIDE = frozenset({"__deepcopy__", "__format__", "__reduce_ex__", "__repr__"})
NORMS = frozenset({"_foreach_norm", "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "norm"})


class Norm(Tensor):
    """The norm of a whole, or of several, as `torch.nn.utils.clip_grad_norm_` returns it: the same on all ranks.

    FSDP2's is a DTensor, of which programs ask `.full_tensor()`: here that is the number itself, and no collective.
    Any other computation with it gives a plain tensor, and so does pickling.
    """

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_other_class(types, (Norm,)):
            return NotImplemented
        with torch.DisableTorchFunctionSubclass():
            if func.__name__ in OUTSIDE:
                args = (args[0].as_subclass(Tensor), *args[1:])
            out = func(*args, **kwargs or {})
            if func.__name__ in OF_NORMS:
                return _norm(out)
            return out.as_subclass(Tensor) if type(out) is Norm else out

    def full_tensor(self) -> Tensor:
        """The number as a plain tensor. Named as that of DTensor."""
        with torch.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _norm(out: Any) -> Any:
    return out.as_subclass(Norm) if type(out) is Tensor and not out.requires_grad else out


def as_norm(name: str, out: Any) -> Any:
    """The result of a function of that name on wholes: a `Norm` where it is one and has no graph."""
    if name not in NORMS:
        return out
    return type(out)(map(_norm, out)) if type(out) in (list, tuple) else _norm(out)


def _is(x: Any) -> bool:
    return any(map(_is, x)) if type(x) in (list, tuple) else isinstance(x, ReadOnly)


# ----------------------------------------------------------------------------------------------------------------------
# These functions all-gather shards of a leaf, or of several concatenated leaves, in the user's code.
#
# A rank can join the gather of a parameter at any line. It cannot join that of a gradient or of a result before it has
# computed it. So ranks meet first (`Rounds.meet`): a rank that asks alone raises, and all raise where they have come
# to different lines.
#
# The derivative of this gather averages the cotangents over ranks and shards the mean. Every rank computes the same
# from the full tensor, so a sum over ranks would count it once per rank. Each of the two is the other's derivative.


# Dtypes of so many bytes that every backend sends. Others, of integers, travel as these.
SENT_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Gathering:
    """Gathers shards of the leaves of one attached model.

    Args:
        wire: the wire that shards the parameters.
        meet: waits until all ranks have come to the line that its argument names, the same on all ranks; if one will
            not come, returns where the others are.
        left: whether the model is detached.

    Attributes:
        gathers: how many gathers there were, so that the derivatives of two of them have different names.
    """

    def __init__(self, wire: Wire, meet: Callable[[str], str], left: Callable[[], bool]):
        self.wire, self.meet, self.left = wire, meet, left
        self.gathers = 0
        self._meshes: dict[str, Any] = {}

    def mesh(self, kind: str) -> Any:
        """The ranks as a `DeviceMesh` of one axis, for a type of device."""
        if kind not in self._meshes:
            self._meshes[kind] = mesh_of_group(self.wire.group, kind)
        return self._meshes[kind]

    def gather(self, part: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """The full tensor, flat.

        Args:
            part: this rank's elements of `pieces`, concatenated, flat.
            pieces: the ranges of leaves that the shard consists of.
            asked: the function that needs it, the same on all ranks.
        """
        self.meet_for(f"{asked} {part.dtype}")
        self.gathers += 1
        # Training could not use a tensor that is made under `torch.inference_mode`.
        with torch.inference_mode(False), torch.no_grad():
            number = part.is_floating_point() or part.is_complex()
            sent = part if number else part.view(SENT_AS[part.element_size()])
            leaves = [piece.leaf for piece in pieces]
            # A state may lie in host memory.
            sent = sent.to(self.wire.group.device)
            _, rows = self.wire.send_parts(sent.split([piece.numel for piece in pieces]), leaves)
            fulls = self.wire.join_parts(rows, leaves)
            return (fulls[0] if len(fulls) == 1 else torch.cat(fulls)).view(part.dtype).to(part.device)

    def mean(self, full: Tensor, pieces: Sequence[Piece], asked: str) -> Tensor:
        """This rank's shards of the mean over ranks of a flat full tensor."""
        self.meet_for(asked)
        view = over_ranks(self.wire.on(self.wire.group, None), False)
        fulls = full.split([piece.leaf.numel for piece in pieces])
        with torch.inference_mode(False), torch.no_grad():
            means = (view.pull(x.view(piece.leaf.shape), piece.leaf) for x, piece in zip(fulls, pieces, strict=True))
            return torch.cat([mean.reshape(-1) for mean in means]).to(full.dtype)

    def meet_for(self, asked: str) -> None:
        """Wait until all ranks have come to the same line.

        Raises:
            RuntimeError: one of them will not come, or the model was detached.
        """
        if self.left():
            why, right = "this rank's part is that of a model that is a plain one again", "it before opt.detach()"
            raise RuntimeError(explain(f"{asked}, after opt.detach()", why, right))
        apart = self.meet(asked)
        if apart:
            raise RuntimeError(
                explain(
                    f"{asked}, which not all ranks ask for",
                    f"under shard each has a part, and the whole is gathered from all: {apart}",
                    "the same line on every rank, and what is done with its result on one:\n"
                    "norm = p.grad.norm()\nif rank == 0: log(norm)",
                )
            )


@dataclass(frozen=True)
class Piece:
    """This rank's flat range of a leaf, from `low` to `high`, and what gathers it."""

    leaf: Leaf
    low: int
    high: int
    by: Gathering

    @property
    def numel(self) -> int:
        """How many elements of the leaf this rank has."""
        return self.high - self.low

    def alike(self, other: Piece) -> bool:
        """Whether every rank has the same range of both."""
        return self is other or (self.by is other.by and self.leaf.shape == other.leaf.shape and self.low == other.low)


def piece_of(by: Gathering, leaf: Leaf, part: Tensor) -> tuple[Piece, ...]:
    """The piece that a shard is; none where a leaf is stored in another form than its shard has."""
    low, high = by.wire.span(leaf)
    return (Piece(leaf, low, high, by),) if part.numel() == high - low else ()


def gathered(part: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
    """The full tensor of a shard, flat; differentiable."""
    if part.requires_grad and torch.is_grad_enabled():
        return GatherParts.apply(part, pieces, asked)
    return pieces[0].by.gather(part.detach().reshape(-1), pieces, asked)


def cut(full: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """This rank's shards of a full tensor, flat."""
    flat = full.reshape(-1)
    if len(pieces) == 1:
        return flat[pieces[0].low : pieces[0].high]
    fulls = flat.split([piece.leaf.numel for piece in pieces])
    return torch.cat([x[piece.low : piece.high] for x, piece in zip(fulls, pieces, strict=True)])


class GatherParts(Function):
    """Gathers shards to full tensors; its derivative is `MeanOfWholes`."""

    @staticmethod
    def forward(part: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
        return pieces[0].by.gather(part.reshape(-1), pieces, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.pieces, asked = inputs
        ctx.asked = f"the derivative of {asked} (gather {ctx.pieces[0].by.gathers})"

    @staticmethod
    @uncompiled
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return MeanOfWholes.apply(g, ctx.pieces, ctx.asked), None, None


class MeanOfWholes(Function):
    """Averages cotangents of full tensors over ranks, and shards the mean; its derivative is `GatherParts`."""

    @staticmethod
    def forward(g: Tensor, pieces: tuple[Piece, ...], asked: str) -> Tensor:
        return pieces[0].by.mean(g.reshape(-1), pieces, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.pieces, ctx.asked = inputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, v: Tensor) -> tuple:  # type: ignore[override]
        return GatherParts.apply(v, ctx.pieces, f"the derivative of {ctx.asked}"), None, None


# ----------------------------------------------------------------------------------------------------------------------
# An `Origin` says which leaf a shard is of, and how to gather it. These functions refuse where it cannot be gathered.


class Origin(NamedTuple):
    """Where a shard comes from, and how to gather it.

    Attributes:
        how: the expression by which the user got it, for messages.
        path: of the parameter; empty for a shard of several.
        gradient: whether it is a gradient.
        pieces: this rank's pieces of leaves, concatenated; empty where they cannot be gathered.
        shape: of the full tensor.
        state: whether it is of the optimizer's state.
    """

    how: str
    path: str
    gradient: bool
    pieces: tuple[Piece, ...] = ()
    shape: torch.Size = torch.Size()
    state: bool = False

    def __str__(self) -> str:
        return f"{self.how} of the sharded parameter {self.path}" if self.path else self.how

    def alike(self, other: Origin) -> bool:
        """Whether both have the same ranges on every rank, so that elementwise functions may run on the shards."""
        if self.shape != other.shape or len(self.pieces) != len(other.pieces):
            return False
        return self.pieces is other.pieces or all(map(Piece.alike, self.pieces, other.pieces))

    def whole(self, part: Tensor, name: str) -> Tensor:
        """Gather the full tensor, for the function of that name; differentiable."""
        if not self.pieces or in_backward():
            refuse(name, self)
        check_no_argument()
        return gathered(part.as_subclass(Tensor), self.pieces, f"{name} of {self}").view(self.shape)

    def local(self, part: Tensor) -> Tensor:
        """This rank's shard in the shape of its rows, as `Shard(0)` of torch has it; flat where ranks split rows."""
        rows = self.local_shape
        return part if rows is None or part.ndim != 1 else part.view(rows)

    @property
    def local_shape(self) -> tuple[int, ...] | None:
        """The shape of this rank's rows; `None` where ranks split rows, or it is of several leaves."""
        if len(self.pieces) != 1:
            return None
        (piece,) = self.pieces
        return rows_of(self.shape, piece.leaf.shape, piece.low, piece.high, piece.by.wire.group.size)

    @property
    def is_chunk(self) -> bool:
        """Whether the shard is the chunk of rows that torch would give this rank; a wire may cut in another way."""
        if self.local_shape is None:
            return False
        (piece,) = self.pieces
        group = piece.by.wire.group
        return (piece.low, piece.high) == span(self.shape, group.rank, group.size)

    def placed(self, kind: str) -> tuple[Any, tuple[Any, ...]]:
        """The mesh and the placements of a DTensor with the same shards.

        Args:
            kind: the type of device.

        Raises:
            AttributeError: ranks split rows, or the placement is not known here.
        """
        if not self.is_chunk:
            why = f"it is cut flat over ranks, as {tuple(self.shape)} has fewer rows than ranks or is not cut by rows"
            right = "x.full_tensor(), which every rank calls; distribute_tensor(x.full_tensor(), mesh, placements)"
            raise AttributeError(explain(f"placements of {self}", why, right))
        return self.pieces[0].by.mesh(kind), by_rows()

    def rows(self, full: Tensor) -> Tensor:
        """This rank's flat shard of a tensor that broadcasts to the full shape."""
        return cut(full.expand(self.shape), self.pieces)


# Returns the origin of a shard; `None` for anything else.
OriginOf = Callable[[Any], Origin | None]


class Stay(NamedTuple):
    """The result of a handler that is a part: its flat shard, and its origin."""

    part: Tensor
    of: Origin


def refuse(name: str, of: Origin) -> Any:
    """Raise for a function that would gather in the middle of backward, or gather a shard that has no `pieces`."""
    of_gradients = (
        'opt.metrics["grad_norm"] after opt.step(), which is that of the whole; or it after backward;\n'
        "zf.clip_by_global_norm(max_norm), or a zf.leafwise function of whole gradients, in the chain"
    )
    of_values = f"p.{name}(...) of the parameter itself, on every rank, which gathers it\nwith opt.gathered(): the same"
    of_states = (
        "x.mul_(2.0), x.zero_(): what is elementwise runs on every rank's shard\n"
        "zf.save(directory, opt) and zf.load, for the whole of each leaf's state"
    )
    why = "it is not gathered here, and what this rank has of it alone would give another result"
    if of.pieces:
        why = "the whole of it is gathered, for which ranks would wait for each other: in the middle of\n"
        why += "backward one of them may never come to it"
    instead = of_gradients if of.gradient else of_states if of.state else of_values
    raise RuntimeError(
        explain(
            f"{name} of {of}",
            why,
            f"{instead}\nx.to_local() for this rank's piece by itself",
        )
    )


def check_no_argument() -> None:
    """Refuse to gather inside an `autograd.Function` that is given a shard and has to return its gradient."""
    for x in arguments_of_functions():
        of = getattr(x, "of", None)
        # A parameter may be whole for a while.
        if isinstance(of, Origin) and x.requires_grad and not getattr(x, "is_whole", bool)():
            raise RuntimeError(
                explain(
                    f"an autograd.Function that is given {of}",
                    "under shard its gradient is a part, and the function's backward would give that of the whole",
                    "Function.apply(x, p.clone()): the whole, at every stage",
                )
            )


def refuse_saving(of: Origin) -> Any:
    """Raise for a function that exposes the shard's memory: `torch.save`, NumPy."""
    raise RuntimeError(
        explain(
            f"saving {of}",
            "its tensors are this rank's shards",
            "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
            "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from\n"
            "x.full_tensor() for the whole, on every rank; x.to_local() for this rank's piece by itself",
        )
    )


def check_sizes(name: str, of: Origin, part: Tensor, x: Tensor) -> None:
    """Refuse a plain operand that has the shard's shape and does not broadcast to the full shape."""
    if x.shape in (part.shape, of.local_shape) and not _fits(x.shape, of.shape):
        raise RuntimeError(
            explain(
                f"{name} of {of}, {tuple(of.shape)}, and a tensor of shape {tuple(x.shape)}",
                "under shard a plain tensor beside it is of the whole's shape, and this one has that of a piece",
                "torch.zeros_like(p), p.grad * 2: what is made of such tensors, or beside them, is one as well\n"
                "p.to_local(), p.grad.to_local(): pieces by themselves, as plain tensors, on both sides",
            )
        )


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(shape, whole)
    except RuntimeError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# These functions read arguments of torch functions: tensors in lists, columns of `foreach` functions, gathered tensors
# in the place of shards.


FOREACH = "_foreach_"


class Wholes:
    """Gathers the shards among a function's arguments, each once.

    Args:
        whole: gathers a shard; returns `None` for anything else.
    """

    def __init__(self, whole: Callable[[Any], Tensor | None]):
        self.whole = whole
        self.found: dict[int, Tensor] = {}

    def of(self, x: Any) -> Any:
        """The same argument with full tensors in the place of shards, in lists and dicts too."""
        if type(x) in (list, tuple):
            return type(x)(map(self.of, x))
        if type(x) is dict:
            return {k: self.of(y) for k, y in x.items()}
        found = self.found.get(id(x))
        if found is None:
            found = self.whole(x)
            if found is None:
                return x
            self.found[id(x)] = found
        return found


def wholes(name: str, origin_of: OriginOf) -> Wholes:
    """`Wholes` for the function of that name."""
    return Wholes(lambda x: None if (of := origin_of(x)) is None else of.whole(x, name))


def tensors_in(args: Any) -> Iterator[Tensor]:
    """Tensors among arguments, and in lists among them."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from tensors_in(x)


def columns_of(args: tuple) -> Iterator[tuple]:
    """The arguments of a `foreach` function for each tensor of its lists, as lists of one element."""
    longest = max((len(x) for x in args if type(x) in (list, tuple)), default=0)
    for i in range(longest):
        yield tuple(type(x)(x[i : i + 1]) if type(x) in (list, tuple) else x for x in args)


def side_by_side(args: tuple) -> Iterator[tuple]:
    """The tensors of each call of a `foreach` function: the n-th elements of its lists, and single tensors."""
    lists = [x for x in args if type(x) in (list, tuple)]
    alone = [x for x in args if isinstance(x, Tensor)]
    return (column + tuple(alone) for column in zip(*lists, strict=False))


# ----------------------------------------------------------------------------------------------------------------------
# These functions run a torch function on gathered full tensors, and store in the shard what it writes into one.


# The module of all-reduces, broadcasts and the like.
COLLECTIVES = "torch.distributed.distributed_c10d"


def computes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that needs full tensors, which are gathered."""
    if name.startswith(FOREACH) and any(type(x) in (list, tuple) for x in args[:1]):
        found = [_of_wholes(func, name, column, kwargs, origin_of) for column in columns_of(args)]
        return None if found and found[0] is None else tuple(x[0] for x in found)
    return _of_wholes(func, name, args, kwargs, origin_of)


def _of_wholes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    out, found = with_wholes(func, name, args, kwargs, origin_of)
    return as_norm(name, read_only(out, found))


def with_wholes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> tuple[Any, list[Tensor]]:
    """Run a function on full tensors in the place of shards. Return its result, and the full tensors.

    What it writes into one is stored. Functions of torch.distributed, custom operators and functions with several
    tensors as `out` write, and their names do not show it.
    """
    given = wholes(name, origin_of)
    taken, named = given.of(args), given.of(kwargs)
    before = {key: version(x) for key, x in given.found.items()}
    out = func(*taken, **named)
    # Collectives write into their first or second argument, and no version counts it.
    sends = getattr(func, "__module__", None) == COLLECTIVES
    if sends and callable(wait := getattr(out, "wait", None)):
        wait()
    for x in tensors_in((*args, *kwargs.values())):
        of, whole = origin_of(x), given.found.get(id(x))
        if of is not None and whole is not None and (sends or version(whole) != before[id(x)]):
            _store(x, whole.detach(), of, name)
    return out, list(given.found.values())


def _store(part: Tensor, whole: Tensor, of: Origin, name: str) -> None:
    """Keep this rank's rows of a full tensor into which a function has written."""
    if whole.shape != of.shape:
        refuse(name, of)
    with torch.no_grad():
        rows = of.rows(whole)
        if torch.equal(rows, part.as_subclass(Tensor)):
            return
    if part.requires_grad and torch.is_grad_enabled():
        refuse(name, of)
    with torch.no_grad():
        part.copy_(rows)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes, strides and `print` of a sharded tensor are those of the full one, without a gather, so one rank may ask
# alone.
#
# Strides are contiguous, as in the gathered tensor.


# The most frequent questions, answered without a meta tensor.
BY_SHAPE: dict[str, Callable[[torch.Size], Any]] = {
    "shape": torch.Size, "size": torch.Size, "dim": len, "ndim": len, "numel": math.prod, "nelement": math.prod,
}  # fmt: skip


def sizes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: Callable[[Any], Origin | None]) -> Any:
    """The result of a function on meta tensors of the full shape in the place of shards."""
    of = origin_of(args[0])
    answer = BY_SHAPE.get(func.__self__.__name__ if name == "__get__" else name)
    if answer is not None and of is not None and len(args) == 1 and not kwargs:
        return answer(of.shape)

    def on_meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        of = origin_of(x)
        return torch.empty_like(x, device="meta") if of is None else torch.empty(of.shape, dtype=x.dtype, device="meta")

    return func(*map(on_meta, args), **{k: on_meta(x) for k, x in kwargs.items()})


def printed(x: Tensor, of: Origin) -> str:
    """The text that `print` shows for a shard."""
    has = f"{x.numel()}" if len(of.pieces) != 1 else f"elements {of.pieces[0].low} to {of.pieces[0].high}"
    local = x.detach().as_subclass(Tensor)
    return f"Part({of}, shape={tuple(of.shape)}, of which this rank has {has}:\n{local!r})"


# ----------------------------------------------------------------------------------------------------------------------
# Elementwise torch functions of sharded tensors give a sharded tensor. Others gather, and give a plain tensor.
#
# An elementwise function runs on this rank's shard if all sharded arguments have the same rows. Beside a tensor of the
# full shape, and for all other functions (`g.norm()`, `g1 @ g2`, `g.view(-1)[i]`), shards are gathered first, and the
# result is a plain tensor, the same on all ranks. `foreach` functions that gather go through their lists one by one,
# so that two full tensors are in memory at a time, and not a model.
#
# A handler takes the function, its name, its arguments, and a function that gives the origin of a shard.


# Memory formats that a flat shard cannot have.
OF_IMAGES = (torch.channels_last, torch.channels_last_3d)


def elements(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run an elementwise function that writes into none of its arguments."""
    if name.startswith(FOREACH):
        if all_stay(name, args, kwargs, origin_of):
            return _each(func(*args, **kwargs), [first_of(column, origin_of) for column in side_by_side(args)])
        return tuple(elements_of_one(func, name, column, kwargs, origin_of)[0] for column in columns_of(args))
    return elements_of_one(func, name, args, kwargs, origin_of)


def elements_of_one(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """The same for single tensors, or for one column of the lists of a `foreach` function."""
    if not stays(name, args, kwargs, origin_of):
        local = _rows_beside(args, kwargs, origin_of)
        if local is None:
            return computes(func, name, args, kwargs, origin_of)
        args, kwargs = local
    out = func(*args, **kwargs)
    of = first_of((*args, *kwargs.values()), origin_of)
    return Stay(out, of) if isinstance(out, Tensor) else _each(out, [of] * len(out))


def _rows_beside(args: tuple, kwargs: dict, origin_of: OriginOf) -> tuple[tuple, dict] | None:
    """In backward, as in a gradient hook, the arguments with this rank's rows of plain operands, such as a mask.

    Nothing is gathered there. `None` elsewhere, and where an operand has more than
    this rank's rows of a tensor that broadcasts to the full shape.
    """
    tensors = [*tensors_in((*args, *kwargs.values()))]
    parts = [of for of in map(origin_of, tensors) if of is not None]
    of = parts[0]
    if not in_backward() or not all(map(of.alike, parts)):
        return None
    beside = [x for x in tensors if origin_of(x) is None]
    if any((x.requires_grad and torch.is_grad_enabled()) or not _expands(x.shape, of.shape) for x in beside):
        return None
    cut = Wholes(lambda x: of.rows(x) if isinstance(x, Tensor) and x.dim() and origin_of(x) is None else None)
    return cut.of(args), cut.of(kwargs)


def _expands(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether `x.expand(whole)` is right for an `x` of this shape."""
    aligned = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in aligned)


def reshapes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `view`, `reshape` and the like: the full shape changes, the shard stays flat."""
    x, of = args[0], origin_of(args[0])
    if of is None or dtype_in(args, kwargs):
        return computes(func, name, args, kwargs, origin_of)
    if len(args) == 2 and type(args[1]) is int and args[1] == -1:
        # The most frequent one, without a meta tensor, which takes longer than the rest.
        return Stay(x.view(-1), of._replace(shape=torch.Size((of.shape.numel(),))))
    shape = sizes(func, name, args, kwargs, origin_of).shape
    return Stay(x.view(x.shape), of._replace(shape=shape))


def joins(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `torch.cat`: flat shards give a shard of several concatenated leaves; others are gathered."""
    tensors = args[0]
    origins = [origin_of(x) for x in tensors] if type(tensors) in (list, tuple) else []
    along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    known = [of for of in origins if of is not None and len(of.shape) == 1 and of.pieces]
    pieces = tuple(piece for of in known for piece in of.pieces)
    if along not in (0, -1) or len(known) < len(origins) or len({id(piece.by) for piece in pieces}) != 1:
        return computes(func, name, args, kwargs, origin_of)
    shape = torch.Size((sum(of.shape.numel() for of in known),))
    several = Origin("parts of several sharded parameters", "", all(of.gradient for of in known), pieces, shape)
    return Stay(func(*args, **kwargs), several)


def splits(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `torch.split`: a flat shard split where leaves end gives shards; elsewhere it is gathered."""
    x, of = args[0], origin_of(args[0])
    wanted: list[int] = [*args[1]] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    ends = list(itertools.accumulate(wanted, initial=0))
    if of is None or len(of.shape) != 1 or not wanted or ends[-1] != of.shape.numel():
        return computes(func, name, args, kwargs, origin_of)
    found = [y for low, high in itertools.pairwise(ends) if (y := _leaves(of, low, high)) is not None]
    if len(found) < len(wanted):
        return computes(func, name, args, kwargs, origin_of)
    return tuple(_some(x, of, first, last) for first, last in found)


def indexes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run an index: `x[:]`, or a flat slice that begins and ends where leaves do, gives a shard; others gather."""
    of, index = origin_of(args[0]), args[1]
    if of is None or all_of_it(index):
        return Stay(func(*args, **kwargs), of) if of else computes(func, name, args, kwargs, origin_of)
    if len(of.shape) == 1 and isinstance(index, slice) and index.step in (None, 1):
        low, high, _ = index.indices(of.shape.numel())
        found = _leaves(of, low, high)
        if found is not None:
            return _some(args[0], of, *found)
    return computes(func, name, args, kwargs, origin_of)


def _leaves(of: Origin, low: int, high: int) -> tuple[int, int] | None:
    """The range of leaves between two elements of a flat full tensor; `None` if no leaf begins or ends there."""
    ends = list(itertools.accumulate((piece.leaf.numel for piece in of.pieces), initial=0))
    if low == high:
        # A leaf without elements.
        return next(((i, i + 1) for i, pair in enumerate(itertools.pairwise(ends)) if pair == (low, high)), None)
    if low > high or low not in ends or high not in ends:
        return None
    return len(ends) - 1 - ends[::-1].index(low), ends.index(high)


def _some(part: Tensor, of: Origin, first: int, last: int) -> Stay:
    """The shard of some of the leaves, taken from a flat shard of several."""
    begin, length = (sum(piece.numel for piece in x) for x in (of.pieces[:first], of.pieces[first:last]))
    pieces = of.pieces[first:last]
    shape = torch.Size((sum(piece.leaf.numel for piece in pieces),))
    path = pieces[0].leaf.path if len(pieces) == 1 else ""
    return Stay(part[begin : begin + length], Origin("a part" if path else of.how, path, of.gradient, pieces, shape))


def likes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `zeros_like` and the like, which give a shard."""
    of = origin_of(args[0])
    out = func(*args, **kwargs)
    return out if of is None or out.shape != args[0].shape else Stay(out, of._replace(how=f"{name}(...)"))


def draws(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `randn_like` and the like: draw the full tensor, as in one process, and keep this rank's rows."""
    x, of = args[0], origin_of(args[0])
    if of is None or not of.pieces:
        return refuse(name, of) if of else func(*args, **kwargs)
    whole = func(torch.empty(of.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    return Stay(of.rows(whole.detach()).clone().requires_grad_(whole.requires_grad), of._replace(how=f"{name}(...)"))


def compares(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `equal` and `allclose` on full tensors."""
    x0, x1 = args[0], kwargs["other"] if "other" in kwargs else args[1]
    for x, y in ((x0, x1), (x1, x0)):
        of = origin_of(x)
        if of is not None and origin_of(y) is None:
            check_sizes(name, of, x, y)
    return computes(func, name, args, kwargs, origin_of)


def prints(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `print(x)`; for `f"{x:.3f}"` the number is gathered."""
    of = origin_of(args[0])
    return computes(func, name, args, kwargs, origin_of) if of is None or any(args[1:]) else printed(args[0], of)


def looks(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that asks about a tensor, or returns the same elements."""
    if kwargs.get("memory_format") in OF_IMAGES:
        return computes(func, name, args, kwargs, origin_of)
    out, of = func(*args, **kwargs), origin_of(args[0])
    same = name != "as_subclass" and of is not None and type(out) is Tensor and out.shape == args[0].shape
    return Stay(out, of) if same and of else out


def makes(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run `new_zeros` and the like, which give a plain tensor."""
    return func(*args, **kwargs)


def saves(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Refuse a function that exposes memory: its caller would take the shard for the full tensor."""
    return refuse_saving(first_of(args, origin_of))


HANDLERS: dict[Kind, Callable[[Any, str, tuple, dict, OriginOf], Any]] = {
    Kind.ELEMENTS: elements,
    Kind.LOOKS: looks,
    Kind.SIZES: sizes,
    Kind.PRINTS: prints,
    Kind.RESHAPES: reshapes,
    Kind.JOINS: joins,
    Kind.SPLITS: splits,
    Kind.INDEXES: indexes,
    Kind.LIKE: likes,
    Kind.MAKES: makes,
    Kind.DRAWS: draws,
    Kind.SAVES: saves,
    Kind.COMPARES: compares,
    Kind.COMPUTES: computes,
}


def all_of_it(index: Any) -> bool:
    """Whether an index takes everything."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def first_of(args: Sequence[Any], origin_of: OriginOf) -> Origin:
    """The origin of the first shard among the arguments."""
    return next(of for of in map(origin_of, tensors_in(args)) if of is not None)


def all_stay(name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> bool:
    """Whether a `foreach` function may run on shards: each column of its lists has shards, with the same ranges."""
    columns = list(side_by_side(args))
    if any(all(origin_of(x) is None for x in tensors_in(column)) for column in columns):
        return False
    return all(stays(name, column, kwargs, origin_of) for column in columns)


def _each(out: Any, origins: list[Origin]) -> Any:
    return type(out)(Stay(x, of) for x, of in zip(out, origins, strict=True)) if type(out) in (list, tuple) else out


def stays(name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> bool:
    """Whether an elementwise function may run on shards: they have the same ranges, and all else is numbers."""
    part, of = None, None
    for x in tensors_in((*args, *kwargs.values()) if kwargs else args):
        own = origin_of(x)
        if own is not None and of is None:
            part, of = x, own
        elif own is not None and of is not None and not (of.alike(own) and x.shape == part.shape):  # type: ignore[union-attr]
            return _unknown(name, own, of)
    assert part is not None and of is not None
    return all(beside(x, part, of, name) for x in tensors_in((*args, *kwargs.values())) if origin_of(x) is None)


def beside(x: Tensor, part: Tensor, of: Origin, name: str) -> bool:
    """Whether a plain operand is one number, so that the function may run on the shard."""
    if len(x.shape) < 2 and x.numel() == 1 and x.requires_grad and torch.is_grad_enabled():
        # Its derivative is a sum over all elements, not only over this rank's.
        return _unknown(name, of)
    if x.dim() == 0:
        return True
    if x.dim() == 1 and len(x) == 1:
        # With a full tensor without dimensions the result would have one.
        return len(of.shape) > 0
    check_sizes(name, of, part, x)
    return _unknown(name, of)


def _unknown(name: str, *origins: Origin) -> bool:
    for of in origins:
        if not of.pieces:
            refuse(name, of)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Functions that write into a sharded tensor write elementwise into the shard, or else into the gathered full tensor.
#
# Other operands of an elementwise write may be tensors sharded alike, numbers, or tensors that broadcast to the full
# shape, of which this rank takes its rows: `p.grad.mul_(mask)`, `p.data.copy_(full)`, `p.add_(g / g.norm())`. Writes
# by index, along a dimension or at random (`p.grad[0] = 0`, `p.renorm_(2, 0, 1)`, `p.normal_()`) go to the full
# tensor, as in one process.


def write(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument: a shard, or a list of shards."""
    if name.startswith(FOREACH):
        if (
            pointwise(name)
            and all(origin_of(x) is not None for x in args[0])
            and all_stay(name, args, kwargs, origin_of)
        ):
            func(*args, **kwargs)
            return args[0]
        for column in columns_of(args):
            if origin_of(column[0][0]) is None:
                func(*wholes(name, origin_of).of(column), **kwargs)
            else:
                _write_one(func, name, column, kwargs, origin_of)
        return args[0]
    return _write_one(func, name, args, kwargs, origin_of)


def into_plain(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument, a full tensor, and gather the shards among the others."""
    target: Tensor = args[0]
    _check_target(name, target, args[1:], origin_of)
    given = wholes(name, origin_of)
    func(target, *given.of(args[1:]), **given.of(kwargs))
    return target


def _check_target(name: str, target: Any, args: tuple, origin_of: OriginOf) -> None:
    for x in tensors_in(args) if isinstance(target, Tensor) and pointwise(name) else ():
        of = origin_of(x)
        if of is not None:
            check_sizes(name, of, x, target)


def into_out(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function with `out=`: on shards if it is elementwise and all have the same ranges, else on full tensors."""
    target = kwargs["out"]
    of = origin_of(target)
    if of is not None and pointwise(name) and stays(name, (target, *args), kwargs, origin_of):
        return func(*args, **kwargs)
    if of is not None and not of.pieces:
        refuse(f"{name} with out=", of)
    if of is None:
        _check_target(name, target, args, origin_of)
        with_wholes(func, name, args, kwargs, origin_of)
        return target
    into = torch.empty(of.shape, dtype=target.dtype, device=target.device)
    given = wholes(name, origin_of)
    func(*given.of(args), **given.of(kwargs | {"out": into}))
    with torch.no_grad():
        target.copy_(of.rows(into))
    return target


def _write_one(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    listed = name.startswith(FOREACH)
    target: Tensor = args[0][0] if listed else args[0]
    of = origin_of(target)
    if of is None:
        raise RuntimeError(
            explain(
                f"{name} into parts",
                "under shard each has this rank's rows of a leaf; what this does to a list of them is not known",
                'a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")',
            )
        )
    if pointwise(name) or _of_elements(name, args, target, of, origin_of):
        rest = (_local(x, target, of, name, origin_of) for x in args[1:])
        func(args[0], *rest, **{k: _local(x, target, of, name, origin_of) for k, x in kwargs.items()})
        return args[0]
    if not of.pieces or (target.requires_grad and not target.is_leaf and torch.is_grad_enabled()):
        refuse(name, of)
    drawn = name in RANDOM or from_init(func)
    with torch.no_grad():
        if drawn:
            whole = torch.empty(of.shape, dtype=target.dtype, device=target.device)
        else:
            whole = of.whole(target.detach(), name)
        given = wholes(name, origin_of)
        others = {k: whole if x is target else given.of(x) for k, x in kwargs.items()}
        func(whole, *given.of(args[1:]), **others)
    if whole.shape != of.shape:
        refuse(name, of)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not from_init(func)):
        target.copy_(of.rows(whole))
    return args[0]


def _of_elements(name: str, args: tuple, target: Tensor, of: Origin, origin_of: OriginOf) -> bool:
    """Whether a function is an elementwise `x[index] = value`: all elements, or a mask and one number."""
    if name != "__setitem__":
        return False
    index, value = args[1:]
    if all_of_it(index):
        return True
    number = not isinstance(value, Tensor) or (value.dim() == 0 and origin_of(value) is None)
    own = origin_of(index) if isinstance(index, Tensor) and index.dtype == torch.bool else None
    return number and own is not None and of.alike(own)


def _local(x: Any, target: Tensor, of: Origin, name: str, origin_of: OriginOf) -> Any:
    """This rank's shard of an operand of a write into a shard; numbers as they are."""
    if type(x) in (list, tuple):
        return type(x)(_local(y, target, of, name, origin_of) for y in x)
    if not isinstance(x, Tensor):
        return x
    own = origin_of(x)
    if x.requires_grad and torch.is_grad_enabled():
        if target.requires_grad and not target.is_leaf and own is None:
            # The derivative of this rank's rows alone would lack the other ranks' terms.
            refuse(name, of)
        # As p.grad keeps no graph.
        x = x if target.requires_grad else x.detach()
    if own is not None and of.alike(own) and x.shape == target.shape:
        return x
    if own is not None:
        return of.rows(own.whole(x, name))
    return x if beside(x, target, of, name) else of.rows(x)


# ----------------------------------------------------------------------------------------------------------------------
# DTensors may be operands beside sharded tensors: `p.copy_(x)`, `p.grad.mul_(x)`, `p.grad = x` with a DTensor `x`.
#
# A DTensor that is sharded over the same ranks in the same rows is taken by its local tensor, and nothing is sent. One
# with another placement (`Replicate`, `Shard(1)`, `Partial`) is gathered by its own `full_tensor()`, once all ranks
# have come to the line. One of other ranks is refused. A function that writes into a DTensor gets the gathered full
# tensors.


def exchanged(
    name: str,
    args: tuple,
    kwargs: dict,
    origin_of: OriginOf,
    part_of: Callable[[Tensor, Origin], Tensor],
    whole: Callable[[Any], Tensor | None],
) -> tuple[tuple, dict]:
    """The arguments of a function with shards or full tensors in the place of DTensors; or the reverse.

    Args:
        name: of the function, for messages.
        args, kwargs: its arguments.
        origin_of: the origin of a shard or a sharded parameter.
        part_of: makes a `Part`.
        whole: for a function that writes into a DTensor: gathers a shard or a parameter, `None` for anything else.
    """
    kind = distributed_class()
    if kind is None:
        return args, kwargs
    found = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, kind)]
    if not found:
        return args, kwargs
    out = kwargs.get("out")
    target = next(tensors_in([args[0] if out is None else out]), None)
    if isinstance(target, kind) and (out is not None or name.endswith("_") or name.startswith("__i")):
        replicated = _Replicated(target, whole)
        given = Wholes(replicated)
        return (args[0], *given.of(args[1:])), {k: x if k == "out" else given.of(x) for k, x in kwargs.items()}
    tensors = [*tensors_in((*args, *kwargs.values()))]
    beside = [of for x in tensors if (of := origin_of(x)) is not None]
    if not beside:
        paths = ", ".join([vars(x)["path"] for x in tensors if isinstance(x, nn.Parameter) and "path" in vars(x)])
        refuse_distributed(f"{name} of a parameter", f"the parameter {paths}", IN_FULL)
    given = Wholes(lambda x: as_part(x, beside, name, part_of) if isinstance(x, kind) else None)
    return given.of(args), given.of(kwargs)


class _Replicated:
    """Gathers shards to replicated DTensors on a mesh."""

    def __init__(self, target: Any, whole: Callable[[Any], Tensor | None]):
        self.mesh, self.whole = target.device_mesh, whole

    def __call__(self, x: Any) -> Tensor | None:
        full = self.whole(x)
        return None if full is None else replicated(full, self.mesh)


def as_part(x: Any, beside: Iterable[Origin], name: str, part_of: Callable[[Tensor, Origin], Tensor]) -> Tensor:
    """A DTensor as a shard with the ranges of one of `beside`; else its full tensor, gathered by all ranks."""
    known = list(beside)
    for of in known:
        if of.shape == x.shape and _cut_alike(x, of):
            mine = of._replace(how="a DTensor", gradient=False)
            return part_of(x.to_local().reshape(-1), mine)
    return _full(x, name, known[0])


def _cut_alike(x: Any, of: Origin) -> bool:
    """Whether each rank has the same rows of both."""
    if len(of.pieces) != 1 or len(x.placements) != 1 or not x.placements[0].is_shard(0):
        return False
    (piece,) = of.pieces
    group, row = piece.by.wire.group, prod(x.shape[1:])
    # torch's chunks are ours where ranks have whole rows. A short leaf is cut flat, mostly within a row.
    torch_width = -(-x.shape[0] // group.size) * row
    rows = piece.leaf.shape == x.shape and width(x.shape, group.size) == torch_width
    return (
        rows
        and of.is_chunk
        and tuple(x.device_mesh.mesh.tolist()) == group.ranks
        and x.to_local().numel() == piece.numel
        and why_not_of_this_rank(x) is None
    )


def _full(x: Any, name: str, of: Origin) -> Tensor:
    where = f"over ranks {x.device_mesh.mesh.tolist()} as {', '.join(map(str, x.placements))}"
    wrong = f"{name} of {of}, {tuple(of.shape)}, and a DTensor of shape {tuple(x.shape)} {where}"
    if not of.pieces or in_backward():
        why = "it is cut otherwise, and would be gathered, for which ranks would wait for each other here"
        raise RuntimeError(explain(wrong, why, "x.full_tensor() in its place, gathered before on every rank"))
    by = of.pieces[0].by
    missing = set(by.wire.group.ranks) - set(x.device_mesh.mesh.flatten().tolist())
    if missing:
        why = f"ranks {sorted(missing)} have a part of the parameter, and none of the DTensor"
        right = "a DTensor of a mesh with all ranks of the parameter; or a plain tensor of the whole, on every rank"
        raise RuntimeError(explain(wrong, why, right))
    here = of_this_rank(x, [by.wire.group])
    if isinstance(here, str):
        right = "a DTensor of this rank and job; or a plain tensor of the whole, on every rank"
        raise RuntimeError(explain(wrong, f"it has {here}", right))
    by.meet_for(f"{name} of {of} and a DTensor of shape {tuple(x.shape)}")
    return in_full(here)


def check_plain(x: Any, how: str, path: str) -> None:
    """Refuse a DTensor in the place of a tensor that is full on this rank."""
    if is_distributed(x):
        refuse_distributed(how, path, how.replace("= x", "= x.full_tensor()"))


IN_FULL = "x.full_tensor() in the place of x"


def refuse_distributed(how: str, what: str, right: str) -> NoReturn:
    """Raise for a DTensor beside what is whole on this rank.

    Args:
        how: what is done with the DTensor.
        what: what is whole.
        right: what to write.
    """
    why = f"{what} is a plain tensor here, of its whole shape"
    raise RuntimeError(explain(f"{how} with a DTensor x", why, f"{right}, on every rank"))


# ----------------------------------------------------------------------------------------------------------------------
# A `Part` is this rank's shard as a tensor of the global shape. Elementwise functions run on it, others gather.
#
# Under `shard` these are Parts: `p.data`, `p.detach()`, `p.grad`, the results of `torch.autograd.grad`, the arguments
# of a hook on `p`, and the tensors of `model.state_dict()`. Behind `reduce_scatter` those of `opt.state[p]` are too. A
# Part holds this rank's flat shard, and has the sizes and strides of the full tensor. Elementwise functions (a decay,
# a clamp, a difference, an average of Parts) run on the shard. Reductions, products, indices and functions of a Part
# and a full tensor gather it, and all ranks get the same plain result. A function that writes keeps this rank's rows
# of the result. A gather is a collective in the middle of the user's code: a rank that calls it alone raises. Within
# backward, where ranks may come to it in different orders, it is refused.
#
# torch's DTensor answers the same need, but `w.norm().item()`, `w.max().item()` and `bool(isnan(g).any())` of one are
# silently of this rank alone, `p.data = x` has no effect, `normal_` under one seed gives all ranks the same rows, a
# full tensor beside it is an error, and clipping by the largest element hangs where a rank has no rows.
#
# An elementwise function takes some 5 us longer. The library itself works on plain tensors, as `x.to_local()` gives.


WRITTEN = (Kind.ELEMENTS, Kind.WRITES)
# Names of the first argument of torch's functions. If a function has two of these, the one that is first here is first.
FIRST = ("condition", "sorted_sequence", "input", "tensors", "tensor", "self")


class Part(Tensor):
    """This rank's flat shard of a parameter or gradient, or of the elementwise result of one.

    Attributes:
        of: the leaf that it is a shard of, and how it is gathered.
    """

    of: Origin

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Not traced: in a graph a `Part` would be a plain tensor, and its norm would be of this rank's shard alone.
        if has_other_class(types, (Part, ReadOnly, Norm)):
            return NotImplemented
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if asked_by_compiler(sys._getframe(1)):
                return func(*args, **kwargs)
            if name == "__deepcopy__":
                return part_of(args[0].as_subclass(Tensor).clone(), args[0].of)
            return kept(_call(func, name, args, kwargs))

    def to_local(self) -> Tensor:
        """This rank's shard as a plain tensor on the same memory: its rows; flat where ranks split rows."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.local(self.as_subclass(Tensor))

    def full_tensor(self) -> Tensor:
        """The full tensor as a plain one, gathered: every rank must call it. As `DTensor.full_tensor`."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.whole(self, "full_tensor")

    @property
    def device_mesh(self) -> Any:
        """The mesh of the ranks that have its shards, as `DTensor.device_mesh`."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.placed(self.device.type)[0]

    @property
    def placements(self) -> tuple[Any, ...]:
        """`(Shard(0),)`, as those of a DTensor; an `AttributeError` where ranks split rows."""
        with torch.DisableTorchFunctionSubclass():
            return self.of.placed(self.device.type)[1]

    def set_(self, *source: Any, **more: Any) -> Tensor:
        # torch does not call `__torch_function__` for it. This object would get other memory, and `p.grad` would not.
        why = "p.grad and p.data are another object each time, on the same memory"
        raise RuntimeError(explain(f"x.set_(y) of {self.of}", why, "x.copy_(y); p.grad = y; p.data = y"))


def _call(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a torch function that is given shards, by its kind."""
    if not args:
        args, kwargs = first_by_position(kwargs)
    args, kwargs = exchanged(name, args, kwargs, origin_of, part_of, lambda x: _whole(x, name))
    attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
    if attribute == "data" and name == "__set__":
        return set_data(*args)
    if func is torch.autograd.grad:
        return _derivatives(*args, **kwargs)
    kind = kind_of(name, attribute)
    if (kind in WRITTEN and in_place(name)) or kwargs.get("out") is not None:
        return written(func, name, args, kwargs, origin_of)
    # `where(condition)` gives indices.
    handler = HANDLERS[Kind.COMPUTES if name == "where" and len(args) == 1 and not kwargs else kind]
    return handler(func, name, args, kwargs, origin_of)


def _whole(x: Any, name: str) -> Tensor | None:
    of = origin_of(x)
    return None if of is None else of.whole(x, name)


def _derivatives(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple:
    """Run `torch.autograd.grad` by shards: each derivative is a shard."""
    found = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    by = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    pairs = [(g, origin_of(x)) for g, x in zip(found, by, strict=True)]
    return tuple([g if of is None or g is None else Stay(plain(g), of._replace(gradient=True)) for g, of in pairs])


def first_by_position(kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with the first one by position, if it was given by name."""
    first = next((k for k in FIRST if k in kwargs), "")
    return ((kwargs[first],), {k: x for k, x in kwargs.items() if k != first}) if first else ((), kwargs)


def written(func: Any, name: str, args: tuple, kwargs: dict, origin_of: OriginOf) -> Any:
    """Run a function that writes into its first argument, or into `out`."""
    check_unwritten(name, args, kwargs)
    given = kwargs.get("out")
    target = args[0] if given is None else given
    if given is not None:
        return into_out(func, name, args, kwargs, origin_of)
    into = write if type(target) in (list, tuple) or origin_of(target) is not None else into_plain
    return into(func, name, args, kwargs, origin_of)


def origin_of(x: Any) -> Origin | None:
    """The origin of a `Part`; `None` for anything else."""
    return x.of if isinstance(x, Part) else None


def part_of(x: Tensor, of: Origin) -> Part:
    """A `Part` on the memory of `x`."""
    # No view for autograd, which would refuse `p.grad.detach_()`.
    part = x.as_subclass(Part) if x.requires_grad else alias_of(x, Part)
    part.of = of
    return part


def plain(x: Any) -> Any:
    """A `Part` or a read-only view as a plain tensor; anything else as it is."""
    return x.as_subclass(Tensor) if isinstance(x, Part | ReadOnly) else x


def own_shard(mine: Tensor, of: Origin, value: Any, how: str) -> Any:
    """This rank's shard of a tensor that the user assigns in the place of a shard, as a plain tensor.

    Args:
        mine: the old shard, as a plain tensor.
        of: its origin.
        value: a shard with the same ranges, or a tensor of the full shape.
        how: the user's expression, for messages.
    """
    if is_distributed(value):
        value = as_part(value, [of], how, part_of)
    own, value = origin_of(value), plain(value)
    if value is None or (own is not None and of.alike(own)):
        return value
    if own is not None and own.shape == of.shape:
        value = own.whole(value, how)
    elif own is not None or value.shape != of.shape:
        check_sizes(how, of, mine, value)
        shape = tuple(value.shape if own is None else own.shape)
        why = f"it is of the whole's shape, {tuple(of.shape)}, as at any other stage"
        raise RuntimeError(explain(f"{how} of shape {shape} for {of}", why, "a tensor of that shape"))
    return of.rows(value.detach()).clone() if of.pieces else refuse(how, of)


def set_data(part: Part, value: Any) -> None:
    """Run `p.grad.data = x`: write into the memory of `p.grad`, since each access to `p.grad` makes a new object."""
    mine = plain(part)
    value = own_shard(mine, part.of, value, "x.data = y")
    if value.dtype != mine.dtype or value.device != mine.device:
        got, has = (f"{x.dtype} on {x.device}" for x in (value, mine))
        right = "p.grad = x, of the dtype of p.grad"
        raise RuntimeError(explain(f"other data for {part.of}: {got}", f"it is {has}", right))
    with torch.no_grad():
        mine.copy_(value)


class Handed(NamedTuple):
    """A gradient hook of the user's, and the origin of the `Part` that it is given."""

    hook: Callable[[Tensor], Any]
    of: Origin

    def __call__(self, g: Tensor | None) -> Any:
        if g is None:  # its block is in the graph, and this leaf is not: torch runs no hook of a plain one
            return None
        return own_shard(g, self.of, self.hook(part_of(g, self.of)), "what a hook returns")


class AfterGradients:
    """A hook of the user's that runs once a gradient has been added to `p.grad`, and only then.

    torch runs it for all leaves of a block that is in the graph, also for those that the loss does not depend on.
    """

    def __init__(self, hook: Callable[[Tensor], Any], p: Tensor):
        self.hook, self.came = hook, False
        self.watch = p.register_hook(self.arrives)

    def arrives(self, g: Tensor | None) -> None:
        self.came = g is not None

    def __call__(self, p: Tensor) -> None:
        if self.came:
            self.hook(p)


def kept(out: Any) -> Any:
    """The result of a handler, with each `Stay` in it as a `Part`."""
    if type(out) is Stay:
        return part_of(out.part, out.of) if type(out.part) is Tensor else out.part
    return type(out)(map(kept, out)) if type(out) in (list, tuple) else out
