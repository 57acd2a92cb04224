"""Formulas as programs: `TensorList` traces a formula, `Program` orders it for a printer, `computed` runs it.

`TensorList` has the operations of a tensor, and computes a formula on many leaves in one launch or call.

A GPU computes a small leaf in less time than the host takes to launch a kernel, 5 to 10 us, and a CPU reads a large
leaf once for each of torch's operations. A formula on one leaf has a dozen operations. So a list remembers the
operations on it, and what is wanted of them is computed at the end: by one kernel that reads each tensor once and makes
no temporaries, which `print_c` or `print_triton` prints, or, without one, by torch's operations on lists, one after the
other. So a formula is written once, for one tensor.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from functools import cache, partial
from itertools import repeat
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._compat.tensors import foreach, has_triton, rounded_to
from .native import same_bits, sample
from .numbers import TOLD, NotOnLists, Number, line_that_runs
from .operations import COMPARED, OPERATIONS
from .rounding import random_bits, stochastic_round


class Term:
    """An operation of a formula that has not run: its name, what it is of, and the dtype of its result.

    Its arguments are terms and numbers. `"load"` is of a list of tensors, `"scalar"` of one 0-d tensor, `"entries"` of
    the place of a tensor with a number for each leaf, and `"constant"` of a number. `"random"` is of a term and of
    `Bits`. Other names are rows of `zerofn.kernels.operations`.
    """

    __slots__ = ("args", "dtype", "name")

    def __init__(self, name: str, args: tuple[Any, ...], dtype: torch.dtype):
        self.name, self.args, self.dtype = name, args, dtype


class Draws(NamedTuple):
    """The random bits of an update of some leaves, as `zerofn.kernels.rounding.random_bits` makes them.

    Attributes:
        seed: of all draws.
        step: the number of the update; of a GPU maybe a tensor, of one number or of one for each leaf.
        form: the format of the draws.
        keys: of each leaf.
        offsets: the global index of each leaf's first element.
    """

    seed: Any
    step: Any
    form: int
    keys: Sequence[int]
    offsets: Sequence[int]

    def words(self, x: Tensor, leaf: int, stream: int, shift: int = 0) -> Tensor:
        """The bits for the elements of a leaf's tensor, as int32 of its shape, from the bit `shift` on."""
        step = self.step[leaf] if isinstance(self.step, Tensor) and self.step.ndim else self.step
        where: Any = dict(seed=self.seed, step=step, key=self.keys[leaf], offset=self.offsets[leaf], form=self.form)
        return random_bits(x.numel(), **where, stream=stream, device=x.device).view(x.shape) >> shift


class Bits(NamedTuple):
    """Random bits for each element: a word of a stream of `draws`, from its bit `shift` on."""

    draws: Draws
    stream: int
    shift: int = 0

    def __rshift__(self, by: int) -> Bits:
        return self._replace(shift=self.shift + by)


def _refusal(what: str) -> Any:
    """A method that says that a formula has asked for something which is no program."""

    def refused(self: Any, *_: Any) -> Any:
        raise NotOnLists(what)

    return refused


class TensorList:
    """Tensors of one dtype and device, with operations element by element, which run when `tensors` is asked for.

    Attributes:
        term: what the list is.
        like: tensors of its shapes and strides.
        memory: tensors that hold it once it is computed; `None` until there are some.
        written_at: for those who look, the line that has written into it last.

    Examples:
        >>> x = TensorList([torch.ones(2), torch.ones(1)])
        >>> (x * 2 + x).sqrt().tensors
        [tensor([1.7321, 1.7321]), tensor([1.7321])]
    """

    written_at = ""

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
        if isinstance(dtype, torch.device) and dtype == self.device and not copy:
            return self
        if not isinstance(dtype, torch.dtype):
            raise NotOnLists("to")
        return self if dtype == self.dtype and not copy else TensorList(self.like, as_dtype(self.term, dtype))

    def float(self) -> TensorList:
        return self.to(torch.float32)

    def zeros_like(self) -> TensorList:
        return TensorList(self.like, Term("constant", (0,), self.dtype))

    def random(self, dtype: torch.dtype, bits: Bits) -> TensorList:
        """Rounded at random to a dtype of 16 bits: `zerofn.kernels.rounding.stochastic_round`."""
        if self.dtype is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
            raise NotOnLists(f"stochastic rounding of {self.dtype} to {dtype}")
        return TensorList(self.like, Term("random", (self.term, bits), dtype))

    def joined(self, residual: TensorList) -> TensorList:
        """The masters of 24 bits, in fp32, of these bf16 numbers and their residuals (`zerofn.kernels.masters`)."""
        return TensorList(
            self.like, Term("joined", (as_dtype(self.term, torch.float32), _term(residual)), torch.float32)
        )

    def upper_half(self) -> TensorList:
        """The bf16 numbers of masters."""
        return TensorList(self.like, Term("upper_half", (self.term,), torch.bfloat16))

    def residual(self) -> TensorList:
        """The residuals of masters."""
        return TensorList(self.like, Term("residual", (self.term,), torch.int8))

    def isfinite(self) -> TensorList:
        return TensorList(self.like, Term("isfinite", (self.term,), torch.bool))

    def clone(self) -> TensorList:
        return TensorList(self.like, self.term)

    def copy_(self, other: TensorList) -> TensorList:
        if TOLD:
            self.written_at = line_that_runs()
        self.term = as_dtype(_term(other), self.dtype)
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
        made = self if low is None else self._with("clamp_min", low)
        return made if high is None else made._with("clamp_max", high)

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

    # Python looks these up in the class, not by `__getattr__`, and some have defaults, which would be wrong.
    __bool__ = _refusal("a question about the values of a tensor")
    __float__ = __int__ = __index__ = _refusal("the value of a tensor, for Python")
    __len__ = __iter__ = __getitem__ = _refusal("single elements of a tensor")
    __rtruediv__ = _refusal("a number over a tensor")
    __matmul__ = _refusal("a product of matrices")
    __hash__ = _refusal("a tensor as a key")  # type: ignore[assignment]

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

    _refused = _refusal("a function of a sum over a leaf")
    __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __hash__ = __float__ = __neg__ = __abs__ = _refused
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused


_METHODS = {name for name in vars(TensorList) if not name.startswith("_")} - {
    "dtype",
    "device",
    "tensors",
    "pending",
    "float",
}
# The integer dtypes in which lists are computed, and the operations whose results stay integers.
_WHOLE = {torch.int64}
_OF_INTEGERS = {"add", "sub", "mul", "neg", "abs", "clamp_min", "clamp_max"}


def as_dtype(term: Term, dtype: torch.dtype) -> Term:
    return term if term.dtype == dtype else Term("to", (term,), dtype)


def _term(x: Any) -> Term:
    if not isinstance(x, TensorList):
        raise NotOnLists("a tensor that is no list")
    return x.term


def _number(x: Any) -> Any:
    """A number of Python, or one that is traced: kernels get numbers in float64."""
    if isinstance(x, Number):
        return x
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
    value = found.now if isinstance(found, Number) else found
    whole = not (found.dtype.is_floating_point if isinstance(found, Term) else isinstance(value, float))
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


def computed(*lists: TensorList, sums: Sequence[TensorList] = ()) -> Tensor | None:
    """Compute these lists into their memory, those that are not there yet, in one pass.

    Every element is read before it is written.

    Args:
        lists: what to compute.
        sums: lists whose sums over each leaf ride on the pass.

    Returns:
        The sums, (sums, leaves); `None` if no kernel computes them.
    """
    # A function may return one list twice.
    pending = list({id(x): x for x in lists if x.pending}.values())
    found = _by_kernel(pending, sums) if pending else None
    if pending and found is None:
        _by_torch(pending)
    for x in pending:
        assert x.memory is not None
        x.term = Term("load", (x.memory,), x.dtype)
    return found if sums else None


def in_one_launch(*lists: TensorList) -> bool:
    """Whether a kernel computes these lists together, and adds them up."""
    found = Traced(lists)
    return found.printer(found.program([], lists)) is not None


def sums_of(*lists: TensorList, each: bool = True) -> list[Tensor]:
    """The sums over leaves, in float32 or wider: of each list one for each leaf, (leaves,), or one for all, 0-d."""
    if (made := Traced(lists).run([], lists, each)) is not None:
        return list(made.unbind())
    known: dict[int, Any] = {}
    sums = [torch.stack([x.sum(dtype=_wide(x)) for x in _on_torch(one.term, known)]) for one in lists]
    return sums if each else [x.sum() for x in sums]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_kernel(pending: Sequence[TensorList], sums: Sequence[TensorList]) -> Tensor | None:
    """The sums, if a kernel has computed all."""
    for x in pending:
        if x.memory is None:
            x.memory = [torch.empty_like(t, dtype=x.dtype) for t in x.like]
    made = Traced([*pending, *sums]).run(pending, sums)
    if made is not None:
        increment_version([t for x in pending for t in x.memory or ()])
    return made


# The dtypes of columns and registers, as programs number them.
KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int64: 4,
    torch.bool: 5,
    torch.int8: 6,
}


class Program(NamedTuple):
    """A formula as a printer is given it. Two formulas of one structure, with other numbers, are one program.

    Registers are `x0`, `x1`, ...: first the columns that are read, then the result of each step.

    Attributes:
        loads: the kinds of the columns that are read, in `KINDS`.
        scalars: the kinds of tensors of one number, `s0`, `s1`, ...
        numbers: in which kind each number of the host is computed, `n0`, `n1`, ...
        steps: operations in their order: name, arguments, kind of the result. Arguments have the kind in which the
            operation is computed.
        stores: column and register of each result; columns beyond those that are read are written only.
        written: the kinds of the columns of `stores`.
        sums: registers that are added up over each leaf, of kinds that are computed in float32.
        streams: the streams of random bits, `r0`, `r1`, ..., which steps named `random` are given, with a shift.
        form: the format of the draws; 0 if there are none.
        entries: in which kind each number that differs by leaf is computed, `e0`, `e1`, ...
        spread: for each column that is read `""` if it has the elements of a leaf; `"rows"` if it has one number for
            each row of a leaf that is a matrix, `"columns"` if one for each column of it. Empty if all have elements,
            as the first one always has.
    """

    loads: tuple[int, ...]
    scalars: tuple[int, ...]
    numbers: tuple[int, ...]
    steps: tuple[tuple[str, tuple[str, ...], int], ...]
    stores: tuple[tuple[int, str], ...]
    written: tuple[int, ...]
    sums: tuple[str, ...]
    streams: tuple[int, ...] = ()
    form: int = 0
    entries: tuple[int, ...] = ()
    spread: tuple[str, ...] = ()

    def of_elements(self, columns: Sequence[Any]) -> list[Any]:
        """Those of the columns that have the elements of each leaf."""
        return [x for i, x in enumerate(columns) if i >= len(self.spread) or not self.spread[i]]

    def widths(self, columns: Sequence[Sequence[Tensor]]) -> list[int]:
        """The elements of a row of each leaf, if there are columns of rows or of columns."""
        i = next(i for i, of in enumerate(self.spread) if of)
        pairs = zip(columns[0], columns[i], strict=True)
        return [y.numel() if self.spread[i] == "columns" else x.numel() // y.numel() for x, y in pairs]

    @property
    def kinds(self) -> dict[int, int]:
        """The kind of each column."""
        return {i: kind for i, kind in enumerate(self.loads)} | {
            column: kind for (column, _), kind in zip(self.stores, self.written, strict=True)
        }

    def is_step(self, name: str) -> bool:
        """Whether a register is the result of a step."""
        return name[0] == "x" and int(name[1:]) >= len(self.loads)

    def squared(self, name: str) -> str | None:
        """The register whose square this one is; `None` if it is no square.

        Squares are added up in double, since that of a large number overflows in float.
        """
        if not self.is_step(name):
            return None
        operation, given, _ = self.steps[int(name[1:]) - len(self.loads)]
        return given[0] if operation == "mul" and given[0] == given[1] else None


class Traced:
    """The operations of some lists in their order, and the tensors and numbers that they are of.

    Attributes:
        columns: the tensors that are read, or are memory that is written.
        numbers: of the host.
        kinds: the dtype in which each number is computed.
        scalars: tensors of one number.
        entries: the dtypes of numbers that differ by leaf.
        steps: operations that are not loads: name, arguments by name of a register, dtype of the result.
        names: the register of each term.
        draws: of the random bits, if there are some.
        streams: of the random bits.
    """

    def __init__(self, lists: Sequence[TensorList]):
        order: dict[int, Term] = {}
        for x in lists:
            in_order(x.term, order)
        self.columns: list[list[Tensor]] = []
        self.numbers: list[float] = []
        self.kinds: list[torch.dtype] = []
        self.scalars: list[Tensor] = []
        self.entries: list[torch.dtype] = []
        self.steps: list[tuple[str, tuple[str, ...], torch.dtype]] = []
        self.names: dict[int, str] = {}
        self.draws: Draws | None = None
        self.streams: set[int] = set()
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
            elif term.name == "entries":
                # Terms are in the order in which they are found, the numbers in that of their places.
                self.entries += [term.dtype] * (term.args[0] + 1 - len(self.entries))
                self.entries[term.args[0]] = term.dtype
                self.names[id(term)] = f"e{term.args[0]}"
            elif term.name == "constant":
                self.names[id(term)] = self._number(term.args[0], term.dtype)
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

    def _number(self, x: float, dtype: torch.dtype) -> str:
        self.numbers.append(x)
        self.kinds.append(dtype)
        return f"n{len(self.numbers) - 1}"

    def _step(self, term: Term) -> None:
        name, given = term.name, list(term.args)
        if name == "random":
            self._random(term, *given)
            return
        if name == "lerp" and given[2] >= 0.5:
            # torch.lerp starts from the nearer end.
            name, given[2] = "lerp_back", _through(partial(_less_one, term.dtype), given[2])
        # A comparison is computed in the dtype of its arguments, any other operation in that of its result.
        dtype = given[0].dtype if name in COMPARED or name == "residual" else term.dtype
        if name.startswith("clamp") or name in COMPARED:
            given = [x if isinstance(x, Term) else _through(partial(in_dtype, dtype), x) for x in given]
        args = []
        for i, x in enumerate(given):
            if not isinstance(x, Term):
                args.append(self._number(x, dtype))
            elif (
                name in ("to", "joined") or (name == "where" and not i) or _computed_in(x.dtype) == _computed_in(dtype)
            ):
                args.append(self.names[id(x)])
            else:
                args.append(self._register("to", (self.names[id(x)],), dtype))
        self.names[id(term)] = self._register(name, tuple(args), term.dtype)

    def _random(self, term: Term, of: Term, bits: Bits) -> None:
        if self.draws is not None and self.draws != bits.draws:
            raise NotOnLists("random bits of two kinds")
        self.draws = bits.draws
        self.streams.add(bits.stream)
        given = self.names[id(of)], f"r{bits.stream}", str(bits.shift)
        self.names[id(term)] = self._register("random", given, term.dtype)

    def _register(self, name: str, args: tuple[str, ...], dtype: torch.dtype) -> str:
        self.steps.append((name, args, dtype))
        return f"x{self.loads + len(self.steps) - 1}"

    def printer(self, program: Program) -> Any:
        """The printer that can compute this on the device of its columns; else `None`."""
        found = printer_for(self.columns[0][0].device)
        return found if found is not None and found.can(program) and alike(self.columns) else None

    def program(self, written: Sequence[TensorList], sums: Sequence[TensorList]) -> Program:
        """The program that writes lists and adds up others.

        Raises:
            NotOnLists: a dtype has no kind, or a sum would be of float64.
        """
        dtypes = {x.dtype for x in (*(column[0] for column in self.columns), *self.scalars)}
        dtypes |= {dtype for _, _, dtype in self.steps}
        if not dtypes <= KINDS.keys() or any(_computed_in(x.dtype) is not torch.float32 for x in sums):
            raise NotOnLists("a dtype")
        stores = tuple([(self._column(x.memory or []), self.names[id(x.term)]) for x in written])
        return Program(
            tuple([KINDS[column[0].dtype] for column in self.columns[: self.loads]]),
            tuple([KINDS[x.dtype] for x in self.scalars]),
            tuple([KINDS[dtype] for dtype in self.kinds]),
            tuple([(name, args, KINDS[dtype]) for name, args, dtype in self.steps]),
            stores,
            tuple([KINDS[self.columns[i][0].dtype] for i, _ in stores]),
            tuple([self.names[id(x.term)] for x in sums]),
            tuple(sorted(self.streams)),
            0 if self.draws is None else self.draws.form,
            tuple([KINDS[dtype] for dtype in self.entries]),
        )

    def run(self, written: Sequence[TensorList], sums: Sequence[TensorList], each: bool = True) -> Tensor | None:
        """Compute all in one pass. Returns the sums; `None` if there is no kernel: then nothing is written."""
        try:
            program = self.program(written, sums)
        except NotOnLists:
            return None
        printer = self.printer(program)
        if printer is None:
            return None
        return printer.run(program, self.columns, self.numbers, self.scalars, each, self.draws)


def _through(function: Callable[[Any], Any], x: Any) -> Any:
    return x.through(function) if isinstance(x, Number) else function(x)


def _less_one(dtype: torch.dtype, weight: float) -> float:
    return (float(weight) if dtype is torch.float64 else c_float(weight).value) - 1


def in_dtype(dtype: torch.dtype, x: float) -> float:
    """A number rounded to a dtype. A formula that is traced may ask for it (`plans._Alone`)."""
    return rounded_to(x, dtype)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes numbers of this one."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def in_order(term: Term, found: dict[int, Term]) -> None:
    """Add a term to `found` after its arguments."""
    if id(term) not in found:
        for x in term.args:
            if isinstance(x, Term):
                in_order(x, found)
        found[id(term)] = term


def alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors of each leaf have as many elements, in the same order in memory, without gaps."""
    lengths = list(map(Tensor.numel, columns[0]))
    # A kernel would read behind the end of a shorter one.
    if any([list(map(Tensor.numel, column)) != lengths for column in columns[1:]]):
        return False
    if all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return True
    return all(len({x.stride() for x in row}) == 1 and _dense(row[0]) for row in zip(*columns, strict=True))


def _dense(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.ndim in formats and x.is_contiguous(memory_format=formats[x.ndim]))


@cache
def triton_module(name: str) -> Any:
    """A module of this folder that needs triton, such as `print_triton`; `None` if triton is not installed."""
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


# A printer in here takes the place of those of all devices (`zerofn.core.passes`); in one thread, if it has a `thread`.
INSTEAD: list[Any] = []


def _here(printer: Any) -> bool:
    """Whether a printer in `INSTEAD` is one for this thread. Another one may train meanwhile."""
    return getattr(printer, "thread", None) in (None, get_ident())


def looked_at() -> bool:
    """Whether somebody looks at the programs of a step, on small tensors that stand for others."""
    return bool(INSTEAD) and INSTEAD[-1] is not None and _here(INSTEAD[-1])


def stands_for(tensors: Iterable[Tensor], most: int) -> bool:
    """Whether somebody looks, and these tensors stand for as many elements as `most`, or for any number of them."""
    if not looked_at():
        return False
    elements = getattr(INSTEAD[-1], "elements", None)
    return elements is None or elements(tensors) >= most


@contextmanager
def printed_by(implementation: str, device: torch.device) -> Iterator[None]:
    """Inside, programs run in C (`"native"`), in `"triton"` or by `"torch"`; with others there are none."""
    ways = {"native": _c_for, "triton": triton_for, "torch": lambda device: _by_name("print_torch")}
    INSTEAD.append(ways[implementation](device) if implementation in ways else None)
    try:
        yield
    finally:
        INSTEAD.pop()


def _by_name(name: str) -> Any:
    """A printer, which imports this module."""
    return importlib.import_module(f".{name}", __package__)


def _c_for(device: torch.device) -> Any:
    """`print_c`; `None` without a compiler."""
    print_c = _by_name("print_c")
    return print_c if device.type == "cpu" and print_c.works() else None


def printer_for(device: torch.device) -> Any:
    """The module that runs programs on this device; `None` without one.

    It is `print_c` or `print_triton`, and on a CPU without a compiler `print_torch`.
    """
    if INSTEAD and _here(INSTEAD[-1]):
        return INSTEAD[-1]
    found = _c_for(device)
    if found is None and (device.type == "cuda" or interpreted()):
        found = triton_for(device)
    return _by_name("print_torch") if found is None and device.type == "cpu" else found


@cache
def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU: for tests, far slower than torch's operations."""
    # This comes before the import of triton, which takes a second.
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return False
    print_triton = triton_module("print_triton")
    return print_triton is not None and print_triton.interpreted()


# What formulas compute, and how it is rounded when it is stored: to nearest and at random in 16 bits, in 24 bits.
_SAMPLE = Program(
    (0, 1, 6),
    (),
    (0,),
    (
        ("joined", ("x1", "x2"), 0),
        ("mul", ("x0", "x3"), 0),
        ("add", ("x4", "n0"), 0),
        ("abs", ("x0",), 0),
        ("sqrt", ("x6",), 0),
        ("div", ("x5", "x7"), 0),
        ("random", ("x8", "r0", "0"), 1),
        ("random", ("x8", "r1", "16"), 2),
        ("residual", ("x8",), 6),
        ("to", ("x8",), 2),
    ),
    ((0, "x8"), (1, "x9"), (2, "x11"), (3, "x10"), (4, "x12")),
    (0, 1, 6, 2, 2),
    (),
    (0, 1),
    2,
)


@cache
def triton_for(device: torch.device) -> Any:
    """`print_triton`, if Triton is installed and runs on this device; else `None`, maybe with a warning.

    A small kernel is run, once in a process for each device, and its result compared.
    """
    print_triton = triton_module("print_triton")
    if print_triton is None:
        return None

    def check() -> bool:
        print_torch = _by_name("print_torch")
        # More than one chunk, so that full chunks and ends are checked.
        numel = 17_001
        columns = [[x] for (x,) in sample(numel)[:2]]
        columns[1] = [columns[1][0].bfloat16()]
        columns += [[(torch.arange(numel) % 256 - 128).to(torch.int8)]]
        columns += [[torch.empty(numel, dtype=torch.float16)] for _ in range(2)]
        found = [[x.to(device, copy=True)] for (x,) in columns]
        draws = Draws(-3, (1 << 33) + 5, _SAMPLE.form, [(1 << 62) + 1], [(1 << 32) - 9])
        print_triton.run(_SAMPLE, found, [0.1], [], True, draws)
        print_torch.run(_SAMPLE, columns, [0.1], [], True, draws)
        same = [
            same_bits([[x.cpu()]], [[y]]) for (x,), (y,) in zip(found, columns, strict=True) if y.is_floating_point()
        ]
        return all(same) and torch.equal(found[2][0].cpu(), columns[2][0])

    instead = "updates take more launches, by torch's operations on lists of tensors"
    return print_triton if gives_bits(check, f"Triton on {device}", instead) else None


def _by_torch(pending: Sequence[TensorList]) -> None:
    """Compute these lists by torch's operations on lists, one after the other."""
    known: dict[int, Any] = {}
    # All terms live until the end, since values are known by the addresses of terms.
    terms = [Term("to", (x.term,), x.dtype) if x.term.name == "load" else x.term for x in pending]
    values = [_on_torch(term, known) for term in terms]
    for x, value in zip(pending, values, strict=True):
        if x.memory is None:
            x.memory = value
        else:
            foreach("copy_", x.memory, value)


def _on_torch(term: Term, known: dict[int, Any]) -> Any:
    """The tensors of a term, or its number."""
    if term.name in ("load", "scalar", "constant"):
        return term.args[0]
    if term.name == "random":
        draws, *where = term.args[1]
        first = _on_torch(term.args[0], known)
        return [stochastic_round(x, term.dtype, bits=draws.words(x, i, *where)) for i, x in enumerate(first)]
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
    row = OPERATIONS[term.name]
    if term.dtype is torch.bool or term.name == "where" or (row.torch is not None and first[0].is_cpu):
        # torch has no foreach form of these.
        columns = [x if isinstance(x, list) else repeat(x) for x in (first, *given)]
        return [(row.torch or getattr(torch, term.name))(*x) for x in zip(*columns, strict=False)]
    if not isinstance(first, list):
        # A constant; no operation on lists takes a number first.
        constant: Any = first
        first = [torch.full_like(x, constant) for x in given[0]]
    # Operations on lists of two dtypes run tensor by tensor.
    given = [_one_operation(Term("to", (), term.dtype), x, []) if _other(x, term.dtype) else x for x in given]
    return foreach(term.name, first, *given)


def _other(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, list) and x[0].dtype != dtype
