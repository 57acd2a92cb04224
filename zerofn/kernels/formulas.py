"""Terms of transforms' formulas, `x + factor * a * b`, a step towards another tensor; and formulas on many leaves.

Each is one operation if the factor is a number: it reads memory once, and autograd saves its inputs instead of
intermediate products. If the factor is a tensor (a learned rate, or one that differs along a batch) there is no such
operation.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_float
from functools import cache
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._compat.functorch import functorch_active, is_wrapped
from .._compat.tensors import foreach, foreach_mul, has_triton
from .recording import certain, differentiated, recorded

# Every step reads the dtype of every leaf, so this is a C function. The compiler does not know it: no graph uses it.
_DTYPE = attrgetter("dtype")


def once(*numbers: Any) -> tuple[Any, ...]:
    """The same numbers; in a compiled graph they are tensors in memory, which are computed once.

    Without `once` the compiler inlines the computation of a small tensor into the loop over elements that uses it. With
    the two powers of a bias correction in that loop, AdamW takes three times as long. `once` passes the tensors through
    `torch.stack`, because the compiler does not inline what is stacked.
    """
    if not torch.compiler.is_compiling():
        return numbers
    found, kinds = list(numbers), {}
    for i, x in enumerate(numbers):
        if isinstance(x, Tensor):
            kinds.setdefault((x.dtype, x.device, x.shape), []).append(i)
    for places in kinds.values():
        # One tensor is stacked twice, since a stack of one would be a view of it.
        for i, x in zip(places, torch.stack([found[i] for i in (*places, places[0])]).unbind(), strict=False):
            found[i] = x
    return tuple(found)


def beside(number: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number to compute with beside `like`: on its device, and in this dtype if one is given.

    A 0-d tensor of the host may stay there: operations of a GPU read it as a number, and a copy would wait.
    """
    if number.is_cpu and not number.ndim and like.device.type == "cuda" and not recorded((number,)):
        return number.to(dtype or number.dtype)
    return number.to(like.device, dtype or number.dtype)


def times(x: Tensor, factor: Any) -> Tensor:
    """`factor * x` in the dtype of `x`; the factor is a number, or a 0-d tensor on any device.

    Examples:
        >>> times(torch.ones(2, dtype=torch.bfloat16), torch.tensor(3.0))
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    return (x * beside(factor, x)).to(x.dtype) if isinstance(factor, Tensor) else x * factor


def plus(x: Tensor, factor: Any, y: Tensor) -> Tensor:
    """`x + factor * y`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]))
        tensor([2., 3.])
    """
    return x + beside(factor, y) * y if isinstance(factor, Tensor) else x.add(y, alpha=factor)


def plus_product(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a * b`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus_product(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([3.0, 3.0]))
        tensor([4., 7.])
    """
    return x + beside(factor, a) * a * b if isinstance(factor, Tensor) else x.addcmul(a, b, value=factor)


def plus_quotient(x: Tensor, factor: Any, a: Tensor, b: Tensor) -> Tensor:
    """`x + factor * a / b`, where the factor is a number or a 0-d tensor on any device.

    Examples:
        >>> plus_quotient(torch.ones(2), 0.5, torch.tensor([2.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor([1.5000, 2.0000])
    """
    return x + beside(factor, a) * a / b if isinstance(factor, Tensor) else x.addcdiv(a, b, value=factor)


def at_most(norm: Tensor, most: Any) -> Tensor | None:
    """The factor `min(1, most / (norm + 1e-6))`, which brings a norm down to `most`; `None` if it is 1.

    With `None` the caller leaves out the multiplication, so no bit of a gradient changes. If nothing records and the
    norm is on the CPU, `at_most` reads the norm. On a GPU it does not read the norm, which would synchronise.

    Examples:
        >>> at_most(torch.tensor(5.0), 1.0), at_most(torch.tensor(0.5), 1.0)
        (tensor(0.2000), None)
    """
    read = norm.is_cpu and not recorded((norm, most))
    if read and norm.item() * 1.001 + 1e-5 < most:
        return None
    if norm.is_cuda and not recorded((norm, most)):
        return ((TensorList([norm]) + 1e-6).reciprocal() * most).clamp(max=1.0).tensors[0]
    ratio = (norm + 1e-6).reciprocal().mul(most)
    if read:
        # A factor of at most 1, or NaN, needs no clamp.
        return None if ratio.item() > 1 else ratio
    return None if norm.is_cpu and certain(ratio > 1) else once(ratio.clamp(max=1.0))[0]


def scaled(tensors: dict[str, Tensor], factor: Tensor | None) -> dict[str, Tensor]:
    """Each tensor times a 0-d factor, which is rounded to its dtype first; one call for all if nothing records.

    `None` is a factor of one.

    Examples:
        >>> scaled({"w": torch.ones(2)}, torch.tensor(0.5))
        {'w': tensor([0.5000, 0.5000])}
    """
    if factor is None:
        return tensors
    if factor.is_cuda and on_lists([[*tensors.values()], [factor]]):
        of_lists = Term("scalar", (factor,), factor.dtype)
        return over_leaves(
            lambda x: x * (_as(of_lists, x.dtype) if isinstance(x, TensorList) else factor.to(x.dtype)), tensors
        )
    if not recorded((factor, *tensors.values())) and len(dtypes := set(map(_DTYPE, tensors.values()))) == 1:
        return dict(zip(tensors, foreach_mul(list(tensors.values()), factor.to(*dtypes)), strict=True))
    factors = {dtype: factor.to(dtype) for dtype in {x.dtype for x in tensors.values()}}
    return {path: x * factors[x.dtype] for path, x in tensors.items()}


def towards(x: Tensor, y: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
    """`x + weight * (y - x)` in the dtype of `x`; into `out` if that is given and the weight is a number.

    Examples:
        >>> towards(torch.zeros(2), torch.ones(2), 0.25)
        tensor([0.2500, 0.2500])
    """
    y = y.to(x.dtype)
    return x + (y - x) * weight.to(x) if isinstance(weight, Tensor) else torch.lerp(x, y, weight, out=out)


def moment_root(x: Tensor) -> Tensor:
    """The root of a second moment, to which the caller adds an epsilon; at least 1e-19 if derivatives may be asked for.

    `moment_root` takes a third of the operations of `root`. A value below the smallest normal number of its dtype
    counts as that number, and its derivative is 0. The root of that number is 1e-19 in float32, which changes no digit
    of an epsilon of 1e-10 or more. In float64 the root is 1.5e-154, too small beside any epsilon.

    Examples:
        >>> torch.func.grad(lambda x: moment_root(x * x) + 1e-8)(torch.tensor(0.0))
        tensor(0.)
    """
    if not differentiated(x):
        return x.sqrt()
    least = torch.finfo(x.dtype).tiny
    # `<` is false for NaN, so that NaN stays.
    return torch.where(x < least, least, x).sqrt()


# ----------------------------------------------------------------------------------------------------------------------
# `TensorList` has the operations of a tensor, and computes a formula on many leaves in one launch.
#
# A GPU computes a small leaf in less time than the host takes to launch a kernel, 5 to 10 us. A formula on one leaf,
# which has a dozen operations, would launch a dozen kernels for each leaf. So a list remembers the operations on it,
# and what is wanted of them is computed at the end: by one kernel of Triton that reads each tensor once and makes no
# temporaries (`zerofn.kernels.triton_lists`), or, without Triton, by torch's operations on lists, one after the other.
# Here the formula is written once, for one tensor.


# Elements of a batch of leaves for torch's operations. They make a few temporaries of this size, where leaf by leaf
# they make them of the size of a leaf; 64 MiB in float32 take a GPU 50 us to read, many times what a launch takes.
BATCH = 1 << 24


class NotOnLists(Exception):
    """A formula asked for something that a list of tensors does not have; it runs leaf by leaf."""


class Term:
    """An operation of a formula that has not run: its name, what it is of, and the dtype of its result.

    Its arguments are terms and numbers. `"load"` is of a list of tensors, and `"scalar"` of one 0-d tensor.
    """

    __slots__ = ("args", "dtype", "name")

    def __init__(self, name: str, args: tuple[Any, ...], dtype: torch.dtype):
        self.name, self.args, self.dtype = name, args, dtype


class TensorList:
    """Tensors of one dtype and device, with operations element by element, which run when `tensors` is asked for.

    Attributes:
        term: what the list is.
        like: tensors of its shapes and strides.
        memory: tensors that hold it once it is computed; `None` until there are some.

    Examples:
        >>> x = TensorList([torch.ones(2), torch.ones(1)])
        >>> (x * 2 + x).sqrt().tensors
        [tensor([1.7321, 1.7321]), tensor([1.7321])]
    """

    def __init__(self, tensors: Sequence[Tensor], term: Term | None = None):
        self.like: list[Tensor] = list(tensors)
        self.memory = self.like if term is None else None
        self.term = term or Term("load", (self.like,), self.like[0].dtype)

    def __getattr__(self, name: str) -> Any:
        raise NotOnLists(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.add(x, y)` is `x.add(y)`; with `out=x` it is `x.add_(y)`."""
        kwargs = dict(kwargs or {})
        name, first = function.__name__.strip("_"), args[0]
        if "out" in kwargs:
            out = kwargs.pop("out")
            name += "" if out is None else "_"
            if out is not None and out is not first:
                raise NotOnLists(f"{name}(out=)")
        if name == "where":
            return _where(*args, **kwargs)
        if name in ("add", "mul") and not isinstance(first, TensorList):
            args = args[1], first
        if not isinstance(args[0], TensorList) or name not in _METHODS:
            raise NotOnLists(name)
        return getattr(args[0], name)(*args[1:], **kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        computed(self)
        assert self.memory is not None
        return self.memory

    @property
    def pending(self) -> bool:
        """Whether its memory does not hold it yet."""
        return self.memory is None or self.term.name != "load" or self.term.args[0] is not self.memory

    @property
    def dtype(self) -> torch.dtype:
        return self.term.dtype

    @property
    def device(self) -> torch.device:
        return self.like[0].device

    def to(self, dtype: Any, copy: bool = False) -> TensorList:
        if not isinstance(dtype, torch.dtype):
            raise NotOnLists("to")
        return self if dtype == self.dtype and not copy else TensorList(self.like, _as(self.term, dtype))

    def clone(self) -> TensorList:
        return TensorList(self.like, self.term)

    def copy_(self, other: TensorList) -> TensorList:
        self.term = _as(_term(other), self.dtype)
        return self

    def add(self, other: Any, *, alpha: Any = 1) -> TensorList:
        if isinstance(alpha, int | float) and alpha == 1:
            return self._with("add", other)
        return self._with("plus", _term(other), _number(alpha))

    def sub(self, other: Any) -> TensorList:
        return self._with("sub", other)

    def mul(self, other: Any) -> TensorList:
        return self._with("mul", other)

    def div(self, other: Any) -> TensorList:
        return self._with("div", other)

    def addcmul(self, a: TensorList, b: TensorList, *, value: Any = 1) -> TensorList:
        return self._with("addcmul", _term(a), _term(b), _number(value))

    def addcdiv(self, a: TensorList, b: TensorList, *, value: Any = 1) -> TensorList:
        return self._with("addcdiv", _term(a), _term(b), _number(value))

    def lerp(self, end: TensorList, weight: Any) -> TensorList:
        return self._with("lerp", _term(end), _number(weight))

    def clamp(self, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> TensorList:
        low, high = low if min is None else min, high if max is None else max
        made = self if low is None else self._with("clamp_min", _number(low))
        return made if high is None else made._with("clamp_max", _number(high))

    def sqrt(self) -> TensorList:
        return self._with("sqrt")

    def square(self) -> TensorList:
        return self._with("mul", self)

    def pow(self, exponent: Any) -> TensorList:
        if exponent not in (2, 0.5):
            raise NotOnLists("pow")
        return self.square() if exponent == 2 else self.sqrt()

    def reciprocal(self) -> TensorList:
        return self._with("reciprocal")

    def sign(self) -> TensorList:
        return self._with("sign")

    def neg(self) -> TensorList:
        return self._with("neg")

    def abs(self) -> TensorList:
        return self._with("abs")

    def where(self, condition: Any, other: Any) -> TensorList:
        return _where(condition, self, other)

    def logical_not(self) -> TensorList:
        return TensorList(self.like, Term("logical_not", (_truth(self),), torch.bool))

    def sum(self) -> LeafSums:
        if not self.dtype.is_floating_point:
            raise NotOnLists("a count")
        return LeafSums(self)

    def add_(self, other: Any, *, alpha: Any = 1) -> TensorList:
        return self.copy_(self.add(other, alpha=alpha))

    def sub_(self, other: Any) -> TensorList:
        return self.copy_(self.sub(other))

    def mul_(self, other: Any) -> TensorList:
        return self.copy_(self.mul(other))

    def div_(self, other: Any) -> TensorList:
        return self.copy_(self.div(other))

    def lerp_(self, end: TensorList, weight: Any) -> TensorList:
        return self.copy_(self.lerp(end, weight))

    def __add__(self, other: Any) -> TensorList:
        return self.add(other)

    def __sub__(self, other: Any) -> TensorList:
        return self.sub(other)

    def __mul__(self, other: Any) -> TensorList:
        return self.mul(other)

    def __truediv__(self, other: Any) -> TensorList:
        return self.div(other)

    def __radd__(self, other: Any) -> TensorList:
        return self.add(other)

    def __rmul__(self, other: Any) -> TensorList:
        return self.mul(other)

    def __rsub__(self, other: Any) -> TensorList:
        return self.neg().add(other)

    def __neg__(self) -> TensorList:
        return self.neg()

    def __pow__(self, exponent: Any) -> TensorList:
        return self.pow(exponent)

    def __abs__(self) -> TensorList:
        return self.abs()

    def __lt__(self, other: Any) -> TensorList:
        return self._compared("lt", other)

    def __le__(self, other: Any) -> TensorList:
        return self._compared("le", other)

    def __gt__(self, other: Any) -> TensorList:
        return self._compared("gt", other)

    def __ge__(self, other: Any) -> TensorList:
        return self._compared("ge", other)

    def __eq__(self, other: Any) -> TensorList:  # type: ignore[override]
        return self._compared("eq", other)

    def __ne__(self, other: Any) -> TensorList:  # type: ignore[override]
        return self._compared("ne", other)

    def __and__(self, other: Any) -> TensorList:
        return TensorList(self.like, Term("logical_and", (_truth(self), _truth(other)), torch.bool))

    def __or__(self, other: Any) -> TensorList:
        return TensorList(self.like, Term("logical_or", (_truth(self), _truth(other)), torch.bool))

    def __invert__(self) -> TensorList:
        return self.logical_not()

    def _refused(self, *_: Any) -> Any:
        raise NotOnLists("an operator")

    # Python looks these up in the class, not by `__getattr__`, and some have defaults, which would be wrong.
    __bool__ = __len__ = __iter__ = __getitem__ = __rtruediv__ = __hash__ = _refused  # type: ignore[assignment]
    __matmul__ = __float__ = _refused

    def _with(self, name: str, *others: Any) -> TensorList:
        """The operation `name` of this list and others, or numbers: in the dtype of this one."""
        if not (self.dtype.is_floating_point or (self.dtype in _WHOLE and name in _OF_INTEGERS)):
            raise NotOnLists(f"{name} of {self.dtype}")
        terms = [_argument(x, self.dtype) for x in others]
        wide = [x.dtype for x in terms if isinstance(x, Term) and x.name != "scalar"]
        if any(torch.promote_types(self.dtype, dtype) != self.dtype for dtype in wide):
            raise NotOnLists("a wider dtype")
        if name == "sub" and torch.bool in wide:
            raise NotOnLists("a bool that is subtracted")
        return TensorList(self.like, Term(name, (self.term, *terms), self.dtype))

    def _compared(self, name: str, other: Any) -> TensorList:
        """A list of bools."""
        if self.dtype is torch.bool:
            raise NotOnLists(f"{name} of bools")
        given = _argument(other, self.dtype)
        if isinstance(given, Term) and given.dtype != self.dtype:
            raise NotOnLists(f"{name} of two dtypes")
        return TensorList(self.like, Term(name, (self.term, given), torch.bool))


class LeafSums:
    """The sum over each leaf of a list, for `sums_of`; nothing else can be computed of it."""

    def __init__(self, of: TensorList):
        self.of = of

    def __getattr__(self, name: str) -> Any:
        raise NotOnLists(name)

    def _refused(self, *_: Any) -> Any:
        raise NotOnLists("an operator")

    __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __hash__ = __float__ = __neg__ = __abs__ = _refused  # type: ignore[assignment]
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused


_METHODS = {name for name in vars(TensorList) if not name.startswith("_")} - {"dtype", "device", "tensors", "pending"}
# The integer dtypes in which lists are computed, and the operations whose results stay integers.
_WHOLE = {torch.int64}
_OF_INTEGERS = {"add", "sub", "mul", "neg", "abs", "clamp_min", "clamp_max"}


def _as(term: Term, dtype: torch.dtype) -> Term:
    return term if term.dtype == dtype else Term("to", (term,), dtype)


def _term(x: Any) -> Term:
    if not isinstance(x, TensorList):
        raise NotOnLists("a tensor that is no list")
    return x.term


def _number(x: Any) -> float:
    """A number as a float: kernels get numbers in float64."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or (isinstance(x, int) and abs(x) > 1 << 53):
        raise NotOnLists("a number that is a tensor")
    return x


def _argument(x: Any, dtype: torch.dtype) -> Any:
    """A list, a number, or a tensor of one number; that of the host is read, which waits for nothing.

    With integers the result of a number that is none would have another dtype.
    """
    if isinstance(x, Term | TensorList):
        found: Any = x if isinstance(x, Term) else x.term
    elif isinstance(x, Tensor) and not x.ndim and not x.is_complex() and not x.requires_grad:
        found = x.item() if x.is_cpu else Term("scalar", (x,), x.dtype)
    else:
        found = _number(x)
    whole = not (found.dtype.is_floating_point if isinstance(found, Term) else isinstance(found, float))
    if not whole and not dtype.is_floating_point:
        raise NotOnLists("a number that is no integer")
    return found


def _truth(x: Any) -> Term:
    """The term of a bool: of a list, or of a tensor of one element."""
    found = _argument(x, torch.bool)
    if not isinstance(found, Term) or found.dtype is not torch.bool:
        raise NotOnLists("a number that is no bool")
    return found


def _where(condition: Any, a: Any, b: Any) -> TensorList:
    """`torch.where` of lists and numbers, of which one is a list; they have one dtype."""
    several = [x for x in (a, b) if isinstance(x, TensorList)]
    if not several:
        raise NotOnLists("where of numbers")
    first = several[0]
    terms = [_argument(x, first.dtype) for x in (a, b)]
    if any(x.dtype != first.dtype if isinstance(x, Term) else first.dtype is torch.bool for x in terms):
        raise NotOnLists("where of two dtypes")
    return TensorList(first.like, Term("where", (_truth(condition), *terms), first.dtype))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_where(chosen: Tensor, olds: Sequence[Tensor], news: Sequence[Tensor]) -> None:
    """Write `news` into `olds`, if a 0-d bool tensor of their device is true.

    Many tensors of one dtype are written together: `old + chosen * (new - old)`, in integers of their bits, since NaN
    times zero is NaN.

    Examples:
        >>> x = [torch.tensor([0.1, torch.nan]), torch.tensor([-0.0])]
        >>> write_where(torch.tensor(False), x, [torch.full((2,), torch.nan), torch.ones(1)]); x
        [tensor([0.1000,    nan]), tensor([-0.])]
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, old in enumerate(olds):
        kinds.setdefault((old.dtype, old.device), []).append(i)
    for (dtype, device), places in kinds.items():
        on_one_device, flag = [olds[i] for i in places], chosen.to(device)
        if len(on_one_device) == 1 or dtype.itemsize not in _INTEGERS:
            for i in places:
                olds[i].copy_(torch.where(flag, news[i].to(dtype), olds[i]))
            continue
        bits = [x.view(_INTEGERS[dtype.itemsize]) for x in on_one_device]
        foreach("add_", bits, _change(flag, [news[i].to(dtype) for i in places], bits))


def _change(chosen: Tensor, news: Sequence[Tensor], bits: list[Tensor]) -> list[Tensor]:
    """The integers to add to the bits of old tensors: zero if `chosen` is false."""
    kind = bits[0].dtype
    change = foreach("sub", [x.view(kind) for x in news], bits)
    foreach("mul_", change, chosen.to(kind))
    return change


# ----------------------------------------------------------------------------------------------------------------------
# `computed` runs the operations that lists remember.


def computed(*lists: TensorList) -> None:
    """Compute these lists into their memory, those that are not there yet, in one launch.

    Every tensor is read before any is written.
    """
    pending = [x for x in lists if x.pending]
    if pending and not _by_triton(pending):
        _by_torch(pending)
    for x in pending:
        assert x.memory is not None
        x.term = Term("load", (x.memory,), x.dtype)


def in_one_launch(*lists: TensorList) -> bool:
    """Whether a kernel of Triton computes these lists together, and adds them up."""
    return _Program(lists).module(lists) is not None


def sums_of(*lists: TensorList, each: bool = True) -> list[Tensor]:
    """The sums over leaves, in float32 or wider: of each list one for each leaf, (leaves,), or one for all, 0-d."""
    found = _Program(lists)
    if (module := found.module(lists)) is not None:
        return list(found.run(module, [], lists, each).unbind())
    known: dict[int, Any] = {}
    sums = [torch.stack([x.sum(dtype=_wide(x)) for x in _on_torch(one.term, known)]) for one in lists]
    return sums if each else [x.sum() for x in sums]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_triton(pending: Sequence[TensorList]) -> bool:
    """Whether a kernel of Triton has computed them."""
    found = _Program(pending)
    if (module := found.module()) is None:
        return False
    for x in pending:
        if x.memory is None:
            x.memory = [torch.empty_like(t, dtype=x.dtype) for t in x.like]
    found.run(module, pending, [])
    increment_version([t for x in pending for t in x.memory or ()])
    return True


class _Program:
    """The operations of some lists in their order, for a kernel.

    Attributes:
        columns: the tensors that are read, or are memory that is written.
        numbers: of the host.
        kinds: the dtype in which each number is computed.
        scalars: tensors of one number.
        steps: operations that are not loads: name, arguments by name of a register, dtype of the result.
        names: the register of each term.
    """

    def __init__(self, lists: Sequence[TensorList]):
        order: dict[int, Term] = {}
        for x in lists:
            _in_order(x.term, order)
        self.columns: list[list[Tensor]] = []
        self.numbers: list[float] = []
        self.kinds: list[torch.dtype] = []
        self.scalars: list[Tensor] = []
        self.steps: list[tuple[str, tuple[str, ...], torch.dtype]] = []
        self.names: dict[int, str] = {}
        for term in order.values():
            if term.name == "load":
                self.names[id(term)] = f"x{self._column(term.args[0])}"
        self.loads = len(self.columns)
        for term in order.values():
            if term.name == "scalar":
                if not any(x is term.args[0] for x in self.scalars):
                    self.scalars.append(term.args[0])
                at = next(i for i, x in enumerate(self.scalars) if x is term.args[0])
                self.names[id(term)] = f"s{at}"
            elif term.name != "load":
                self._step(term)
        for x in lists:
            if x.memory is not None:
                self._column(x.memory)

    def _column(self, tensors: list[Tensor]) -> int:
        for i, column in enumerate(self.columns):
            if column is tensors:
                return i
        self.columns.append(tensors)
        return len(self.columns) - 1

    def _step(self, term: Term) -> None:
        name, given = term.name, list(term.args)
        if name == "lerp" and given[2] >= 0.5:
            # torch.lerp starts from the nearer end.
            less = given[2] if term.dtype is torch.float64 else c_float(given[2]).value
            name, given[2] = "lerp_back", less - 1
        # A comparison is computed in the dtype of its arguments, any other operation in that of its result.
        dtype = given[0].dtype if name in _COMPARED else term.dtype
        if name.startswith("clamp") or name in _COMPARED:
            given = [x if isinstance(x, Term) else torch.tensor(x, dtype=dtype).item() for x in given]
        args = []
        for i, x in enumerate(given):
            if not isinstance(x, Term):
                args.append(f"n{len(self.numbers)}")
                self.numbers.append(x)
                self.kinds.append(dtype)
            elif name == "to" or (name == "where" and not i) or _computed_in(x.dtype) == _computed_in(dtype):
                args.append(self.names[id(x)])
            else:
                args.append(self._register("to", (self.names[id(x)],), dtype))
        self.names[id(term)] = self._register(name, tuple(args), term.dtype)

    def _register(self, name: str, args: tuple[str, ...], dtype: torch.dtype) -> str:
        self.steps.append((name, args, dtype))
        return f"x{self.loads + len(self.steps) - 1}"

    def module(self, sums: Sequence[TensorList] = ()) -> Any:
        """`zerofn.kernels.triton_lists`, if it can compute this and add up `sums`; else `None`."""
        dtypes = {x.dtype for x in (*(column[0] for column in self.columns), *self.scalars)}
        dtypes |= {dtype for _, _, dtype in self.steps}
        module = triton_for(self.columns[0][0].device)
        if sums and any(_computed_in(x.dtype) is not torch.float32 for x in sums):
            return None
        return module if module is not None and dtypes <= module.KINDS.keys() and _alike(self.columns) else None

    def run(self, module: Any, written: Sequence[TensorList], sums: Sequence[TensorList], each: bool = True) -> Tensor:
        kinds = module.KINDS
        stores = tuple([(self._column(x.memory or []), self.names[id(x.term)]) for x in written])
        program = module.Program(
            tuple([kinds[column[0].dtype] for column in self.columns[: self.loads]]),
            tuple([kinds[x.dtype] for x in self.scalars]),
            tuple([kinds[dtype] for dtype in self.kinds]),
            tuple([(name, args, kinds[dtype]) for name, args, dtype in self.steps]),
            stores,
            tuple([kinds[self.columns[i][0].dtype] for i, _ in stores]),
            tuple([self.names[id(x.term)] for x in sums]),
        )
        return module.run(program, self.columns, self.numbers, self.scalars, each)


_COMPARED = {"lt", "le", "gt", "ge", "eq", "ne"}


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes numbers of this one."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _in_order(term: Term, found: dict[int, Term]) -> None:
    """Add a term to `found` after its arguments."""
    if id(term) not in found:
        for x in term.args:
            if isinstance(x, Term):
                _in_order(x, found)
        found[id(term)] = term


def _alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of each leaf have their elements in the same order in memory, without gaps."""
    if all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return True
    return all(len({x.stride() for x in row}) == 1 and _dense(row[0]) for row in zip(*columns, strict=True))


def _dense(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.ndim in formats and x.is_contiguous(memory_format=formats[x.ndim]))


@cache
def triton_module(name: str) -> Any:
    """A module of this folder that needs triton, such as `triton_adam`; `None` if triton is not installed."""
    return importlib.import_module(f".{name}", __package__) if has_triton() else None


def gives_bits(check: Callable[[], bool], kernel: str, instead: str) -> bool:
    """Whether a kernel of Triton runs on a device and gives what torch gives on the CPU; else a warning.

    Args:
        check: runs the kernel on a sample, and compares.
        kernel: its name.
        instead: what runs in its place.
    """
    try:
        why = "" if check() else "gives other bits on this device than torch on the CPU"
    except Exception as error:  # triton's own, the driver's, or the compiler's that builds triton's launcher
        why = f"cannot run on this device ({type(error).__name__}: {str(error)[-300:]})"
    if why:
        remedy = "Triton needs a C compiler ($CC, gcc or clang) for its launcher"
        warnings.warn(f"zerofn: {kernel} {why}; so {instead}. {remedy}.", RuntimeWarning, stacklevel=3)
    return not why


@cache
def triton_for(device: torch.device) -> Any:
    """`zerofn.kernels.triton_lists`, if Triton is installed and runs on this device; else `None`, maybe with a warning.

    A small kernel is run, once in a process for each device, and its result compared.
    """
    triton_lists = triton_module("triton_lists") if device.type == "cuda" else None
    if triton_lists is None:
        return None
    x = torch.linspace(-2.0, 2.0, 100, dtype=torch.float32)
    given, found = x.to(device), torch.empty(100, dtype=torch.float32, device=device)
    steps = (("mul", ("x0", "n0"), 0), ("plus", ("x1", "x0", "n1"), 0))
    program = triton_lists.Program((0,), (), (0, 0), steps, ((1, "x2"),), (0,), ())

    def check() -> bool:
        triton_lists.run(program, [[given], [found]], [3.0, 0.1], [])
        return torch.allclose(found.cpu(), torch.add(x * 3.0, x, alpha=0.1))

    instead = "updates take more launches, by torch's operations on lists of tensors"
    return triton_lists if gives_bits(check, f"Triton on {device}", instead) else None


def _by_torch(pending: Sequence[TensorList]) -> None:
    """Compute these lists by torch's operations on lists, one after the other."""
    known: dict[int, Any] = {}
    values = [_on_torch(Term("to", (x.term,), x.dtype) if x.term.name == "load" else x.term, known) for x in pending]
    for x, value in zip(pending, values, strict=True):
        if x.memory is None:
            x.memory = value
        else:
            foreach("copy_", x.memory, value)


def _on_torch(term: Term, known: dict[int, Any]) -> Any:
    """The tensors of a term, or its number."""
    if term.name in ("load", "scalar"):
        return term.args[0]
    if id(term) not in known:
        first, *given = [_on_torch(x, known) if isinstance(x, Term) else x for x in term.args]
        known[id(term)] = _one_operation(term, first, given)
    return known[id(term)]


def _one_operation(term: Term, first: Any, given: list[Any]) -> Any:
    if term.name == "to":
        if isinstance(first, Tensor):
            return first.to(term.dtype)
        made = [torch.empty_like(x, dtype=term.dtype) for x in first]
        foreach("copy_", made, first)
        return made
    if term.name == "plus":
        return foreach("add", first, given[0], alpha=given[1])
    if term.name in ("addcmul", "addcdiv"):
        return foreach(term.name, first, *given[:2], value=given[2])
    if term.name == "where" and isinstance(first, Tensor) and all(isinstance(x, list) for x in given):
        bits = [x.view(_INTEGERS[term.dtype.itemsize]) for x in given[1]]
        return [x.view(term.dtype) for x in foreach("add", bits, _change(first, given[0], bits))]
    if term.dtype is torch.bool or term.name == "where":
        # torch has no foreach form of these.
        columns = [x if isinstance(x, list) else repeat(x) for x in (first, *given)]
        return [getattr(torch, term.name)(*row) for row in zip(*columns, strict=False)]
    # Operations on lists of two dtypes run tensor by tensor.
    given = [_one_operation(Term("to", (), term.dtype), x, []) if _other(x, term.dtype) else x for x in given]
    return foreach(term.name, first, *given)


def _other(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, list) and x[0].dtype != dtype


# ----------------------------------------------------------------------------------------------------------------------
# These functions group leaves that are computed together, and run a formula on each group.


_PLAIN = {Tensor, torch.nn.Parameter}


def on_lists(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether leaves are computed as lists: on a GPU, if nothing records.

    A single leaf is one too, as within backward: torch's operations on a GPU would round elsewhere than the kernels.
    """
    first = columns[0]
    if not (first and isinstance(first[0], Tensor) and first[0].is_cuda):
        return False
    tensors = [x for column in columns for x in column if isinstance(x, Tensor)]
    # A generator, since the compiler, which traces this, does not know attrgetter.
    if not all(t.is_cuda for t in tensors) or not set(map(type, tensors)) <= _PLAIN:
        return False
    return not recorded(tensors) and not (functorch_active() and any(map(is_wrapped, tensors)))


def batches(*columns: Sequence[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Leaves in batches: their places, and each column as a `TensorList`.

    A batch has one device, one dtype in each column and, where torch's operations compute it, at most `BATCH` elements,
    or one leaf. A column of other things than tensors has one value in a batch.
    """
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        kind = tuple((x.dtype, x.device) if isinstance(x, Tensor) else x for x in row)
        kinds.setdefault(kind, []).append(i)
    for places in kinds.values():
        batch: list[int] = []
        size = 0
        most = BATCH if triton_for(columns[0][places[0]].device) is None else math.inf
        for i in places:
            numel = columns[0][i].numel()
            if batch and size + numel > most:
                yield batch, _columns(columns, batch)
                batch, size = [], 0
            batch.append(i)
            size += numel
        yield batch, _columns(columns, batch)


def _columns(columns: Sequence[Sequence[Any]], batch: list[int]) -> list[Any]:
    rows = [[column[i] for i in batch] for column in columns]
    return [TensorList(row) if isinstance(row[0], Tensor) else row[0] for row in rows]


def over_leaves(function: Callable[..., Any], *columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """Call `function` on each leaf, and return the results by path. On a GPU one call takes many leaves.

    Args:
        function: takes one value from each column, and computes element by element. It may write the first value with
            `out=`.
        columns: dicts from path to a tensor or another value; the paths are those of the first column.

    Examples:
        >>> over_leaves(lambda x, y: x + 2 * y, {"w": torch.ones(1)}, {"w": torch.ones(1), "v": torch.ones(1)})
        {'w': tensor([3.])}
    """
    found: dict[str, Tensor] = {}
    for paths, made in results(function, *columns):
        found.update(zip(paths, made.tensors if isinstance(made, TensorList) else [made], strict=True))
    return {path: found[path] for path in columns[0]}


def results(function: Callable[..., Any], *columns: Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """Paths of leaves, and the result of `function` of them: of a batch on a GPU, whose columns are lists; else of one.

    Args:
        function: of one value from each column; what raises on lists runs leaf by leaf.
        columns: tensors, or other values, by path; the paths are those of the first column.

    Examples:
        >>> list(results(torch.neg, {"w": torch.ones(1)}))
        [(['w'], tensor([-1.]))]
    """
    paths = list(columns[0])
    lists = [[column[path] for path in paths] for column in columns]
    alone: list[int] = []
    if on_lists(lists):
        for batch, given in batches(*lists):
            try:
                made = function(*given)
            except Exception:
                # A function that gets lists may raise any error. It then runs leaf by leaf, and a real error is raised
                # again there, about one leaf.
                alone += batch
            else:
                yield [paths[i] for i in batch], made
    else:
        alone = list(range(len(paths)))
    for i in alone:
        yield [paths[i]], function(*(column[i] for column in lists))


def sums_over_leaves(function: Callable[..., Sequence[Any]], *columns: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sums over the elements of each leaf: by path, a float64 tensor of shape (sums,). On a GPU one call takes many.

    Args:
        function: takes one value from each column, and returns a list of sums, which are numbers or 0-d tensors.
        columns: dicts from path to a tensor or another value; the paths are those of the first column.

    Examples:
        >>> sums_over_leaves(lambda x: [x.sum(), x.square().sum()], {"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([3., 5.], dtype=torch.float64)}
    """

    def sums_of_row(*row: Any) -> Sequence[Any]:
        made = function(*row)
        if isinstance(row[0], TensorList) and not all(isinstance(x, LeafSums) for x in made):
            raise NotOnLists("a number of each leaf")
        return made

    found: dict[str, Tensor] = {}
    for paths, sums in results(sums_of_row, *columns):
        first = columns[0][paths[0]]
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        if isinstance(sums[0], LeafSums):
            made = torch.stack(sums_of(*[x.of for x in sums])).to(wide).mT.unbind()
        else:
            made = [torch.stack([torch.as_tensor(x, device=first.device).to(wide) for x in sums])]
        found.update(zip(paths, made, strict=True))
    return {path: found[path] for path in columns[0]}


def at_once(function: Callable[..., Sequence[Any]], *numbers: Any) -> list[Any]:
    """Call `function`, which does arithmetic on 0-d tensors or on tensors of one shape. On a GPU it takes one launch.

    Args:
        function: takes `numbers`, and returns a list of tensors. It computes with operators, `torch.where` and the
            methods of tensors. In a product with a bool tensor, write the bool tensor second: `x * due`. To return one
            value twice, as two tensors, return `x` and `x.clone()`.
        numbers: the arguments of `function`. On a GPU `function` gets each tensor as a `TensorList` of one tensor.

    Examples:
        >>> at_once(lambda n, due: [(n + 1) * due, torch.where(due, n, 0)], torch.tensor(2), torch.tensor(True))
        [tensor(3), tensor(2)]
    """
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    # Without a kernel, lists would take as many of torch's operations as tensors.
    if on_lists([tensors]) and triton_for(tensors[0].device) is not None:
        try:
            lists = function(*(TensorList([x]) if isinstance(x, Tensor) else x for x in numbers))
            computed(*lists)
            return [x.tensors[0] for x in lists]
        except NotOnLists:
            pass
    return list(function(*numbers))


def in_batches(*columns: Sequence[Tensor]) -> Iterator[Sequence[Any]]:
    """Iterate over leaves, for a kernel that writes in place.

    Each item is a row: one entry of each column. On a GPU a row has the leaves of a batch, and its entries are
    `TensorList`s; elsewhere it has one leaf, and its entries are tensors. What your loop writes into the lists of a row
    is computed when the loop asks for the next row.

    Examples:
        >>> for p, g in in_batches([torch.ones(1)], [torch.ones(1)]):
        ...     p.add_(g, alpha=2)
        tensor([3.])
    """
    if on_lists(columns):
        for _, row in batches(*columns):
            yield row
            computed(*row)
    else:
        yield from zip(*columns, strict=True)


def in_place(operation: str, olds: list[Tensor], given: Any) -> None:
    """torch's operation on lists of tensors that writes the first one; the second is a list or a number.

    Examples:
        >>> x = torch.ones(2)
        >>> in_place("add_", [x], 1.0)
        >>> x
        tensor([2., 2.])
    """
    several = isinstance(given, list)
    if not on_lists([olds, given] if several else [olds]):
        foreach(operation, olds, given)
        return
    for row in in_batches(olds, given) if several else in_batches(olds):
        getattr(row[0], operation)(*(row[1:] if several else [given]))


# Matrices of equal rows get columns of zeros up to the widest, if a product then takes at most this many more
# multiplications. These take a GPU 10 us in float32, as long as two launches. One stack less saves thirty launches.
WIDENED = 1 << 28
# A GPU computes this many rows of a product together: fewer take no less time.
TILE = 64


def on_stacks(function: Callable[[Tensor], Tensor], factor: Callable[[torch.Size], Any], x: Any) -> Any:
    """Call `function` on matrices, and multiply its result by a factor. For a `TensorList` a call takes many matrices.

    Args:
        function: maps matrices (..., rows, columns) to matrices of the same shape. If its argument is transposed, its
            result must be transposed too. If columns of zeros are appended to its argument, they must be zeros in its
            result, and the other columns may change only by the order of sums.
        factor: maps the shape of a tensor to a number.
        x: the argument of a formula: a tensor or a `TensorList`. In a list, the tensors of one shape make one stack.
            Tensors whose transpose has this shape join the stack. Small matrices with the same number of rows also
            join it, with columns of zeros appended.

    Examples:
        >>> on_stacks(lambda x: x / x.norm(), lambda shape: 2.0, torch.ones(1, 1))
        tensor([[2.]])
    """
    if not isinstance(x, TensorList):
        return function(x) * factor(x.shape)
    tensors, found = x.tensors, dict[int, Tensor]()
    wide = [t.mT if t.shape[-2] > t.shape[-1] else t for t in tensors]
    for columns, together in _stacks([t.shape for t in wide]):
        places = sorted(together, key=lambda i: tensors[i].shape)
        most = columns - min([wide[i].shape[-1] for i in places])
        zeros = wide[places[0]].new_zeros(*wide[places[0]].shape[:-1], most) if most else None
        parts: list[Tensor] = []
        for i in places:
            parts.append(wide[i])
            if zeros is not None and (missing := columns - wide[i].shape[-1]):
                parts.append(zeros[..., :missing])
        made = function(torch.cat(parts, -1).unflatten(-1, (len(places), columns)).movedim(-2, 0))
        for shape, numbered in groupby(enumerate(places), lambda at: tensors[at[1]].shape):
            numbers, of_shape = zip(*numbered, strict=True)
            part = made[numbers[0] : numbers[-1] + 1, ..., : wide[of_shape[0]].shape[-1]]
            part = part.mT if shape[-2] > shape[-1] else part
            # The kernel takes only contiguous tensors here, as the other tensors of the formula are.
            out = torch.mul(part, factor(shape), out=part.new_empty(part.shape))
            found |= zip(of_shape, out.unbind(), strict=True)
    return TensorList([found[i] for i in range(len(tensors))])


def _stacks(shapes: Sequence[torch.Size]) -> list[tuple[int, list[int]]]:
    """Groups of these wide matrices that are stacked: the number of columns, and the indices of the matrices."""
    by_rows: dict[torch.Size, dict[int, list[int]]] = {}
    for i, shape in enumerate(shapes):
        by_rows.setdefault(shape[:-1], {}).setdefault(shape[-1], []).append(i)
    found = []
    for rows, by_columns in by_rows.items():
        widest = max(by_columns)
        together = []
        for columns, places in by_columns.items():
            more = math.prod(rows) * (widest - columns) * len(places) * max(rows[-1], TILE)
            if more <= WIDENED:
                together += places
            else:
                found.append((columns, places))
        found.append((widest, together))
    return found
