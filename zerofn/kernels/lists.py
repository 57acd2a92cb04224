"""Formulas on many leaves: which leaves are computed together, and how a function of one tensor runs on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import functorch_active, is_wrapped
from .._compat.tensors import foreach, foreach_mul
from . import program
from .numbers import NotOnLists
from .program import LeafSums, TensorList, Term, as_dtype, computed, sums_of
from .recording import recorded

# Every step reads the dtype of every leaf, so this is a C function. The compiler does not know it: no graph uses it.
_DTYPE = attrgetter("dtype")


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
            lambda x: x * (as_dtype(of_lists, x.dtype) if isinstance(x, TensorList) else factor.to(x.dtype)), tensors
        )
    if not recorded((factor, *tensors.values())) and len(dtypes := set(map(_DTYPE, tensors.values()))) == 1:
        return dict(zip(tensors, foreach_mul(list(tensors.values()), factor.to(*dtypes)), strict=True))
    factors = {dtype: factor.to(dtype) for dtype in {x.dtype for x in tensors.values()}}
    return {path: x * factors[x.dtype] for path, x in tensors.items()}


# Elements of a batch of leaves for torch's operations. They make a few temporaries of this size, where leaf by leaf
# they make them of the size of a leaf; 64 MiB in float32 take a GPU 50 us to read, many times what a launch takes.
BATCH = 1 << 24
# ----------------------------------------------------------------------------------------------------------------------
# These functions group leaves that are computed together, and run a formula on each group.


_PLAIN = {Tensor, torch.nn.Parameter}
_IS_CPU, _IS_CUDA = attrgetter("is_cpu"), attrgetter("is_cuda")

# On a CPU leaves with at least this many elements together are computed as lists. Below it the operations of torch take
# less time than the tracing of a formula, and the compiler would take longer than they ever will.
LARGE = 1 << 16


def on_lists(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether leaves are computed as lists, if nothing records: on a GPU; on a CPU if they are large together.

    A single leaf is one too, as within backward. It does not matter for numbers on a CPU which leaves are, since the
    library's formulas have the same bits there (`zerofn.kernels.formulas`).
    """
    first = columns[0]
    if torch.compiler.is_compiling() or not (first and isinstance(first[0], Tensor)):
        return False
    tensors = [x for column in columns for x in column if isinstance(x, Tensor)]
    if not set(map(type, tensors)) <= _PLAIN:
        return False
    if first[0].is_cpu:
        if not enough(sum(map(Tensor.numel, first)), first) or not all(map(_IS_CPU, tensors)):
            return False
        if program.printer_for(first[0].device) is None:
            return False
    elif not all(map(_IS_CUDA, tensors)):
        return False
    return not recorded(tensors) and not (functorch_active() and any(map(is_wrapped, tensors)))


def enough(numel: int, tensors: Iterable[Tensor] = ()) -> bool:
    """Whether so many elements on a CPU are computed as lists, or as many as these tensors stand for."""
    return numel >= LARGE or (bool(program.INSTEAD) and program.stands_for(tensors, LARGE))


def batches(*columns: Sequence[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Leaves in batches: their places, and of each column the tensors, a list.

    A batch has one device, one dtype in each column and, where torch's operations compute it, at most `BATCH` elements,
    or one leaf. A column of other things than tensors has one value in a batch.
    """
    for places in _kinds(columns):
        device = columns[0][places[0]].device
        # A kernel makes no temporaries. On a CPU nothing else computes lists (`on_lists`).
        in_kernels = device.type == "cpu" or program.printer_for(device) is not None
        several = [places] if in_kernels else _of_at_most(BATCH, places, columns[0])
        for batch in several:
            rows = columns if len(batch) == len(columns[0]) else [[column[i] for i in batch] for column in columns]
            yield batch, [list(row) if isinstance(row[0], Tensor) else row[0] for row in rows]


def listed(columns: Sequence[Any]) -> list[Any]:
    """The columns of a batch, with each list of tensors as a `TensorList`."""
    return [TensorList(x) if isinstance(x, list) else x for x in columns]


def _kinds(columns: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The places of the leaves of each kind."""
    if all(_of_one_kind(column) for column in columns):
        # Nearly always. The loop below shows in a step of many small leaves.
        return [list(range(len(columns[0])))]
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        kinds.setdefault(tuple((x.dtype, x.device) if isinstance(x, Tensor) else x for x in row), []).append(i)
    return list(kinds.values())


def _of_at_most(most: int, places: list[int], leaves: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places in batches of at most so many elements, or one leaf."""
    batch: list[int] = []
    size = 0
    for i in places:
        numel = leaves[i].numel()
        if batch and size + numel > most:
            yield batch
            batch, size = [], 0
        batch.append(i)
        size += numel
    yield batch


def _of_one_kind(column: Sequence[Any]) -> bool:
    """Whether a column has one value, or tensors of one dtype and device."""
    if not isinstance(column[0], Tensor):
        return all(x is column[0] for x in column)
    return len(set(map(_DTYPE, column))) == 1 and (all(map(_IS_CPU, column)) or len({x.device for x in column}) == 1)


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
                made = function(*listed(given))
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
    if on_lists([tensors]) and program.printer_for(tensors[0].device) is not None:
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
        for _, batch in batches(*columns):
            row = listed(batch)
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


def stacks_on(device: torch.device) -> bool:
    """Whether matrices are stacked there."""
    return device.type != "cpu"


def on_stacks(
    function: Callable[[Tensor], Tensor], factor: Callable[[torch.Size], Any], x: Any, dtype: torch.dtype | None = None
) -> Any:
    """Call `function` on matrices, and multiply its result by a factor. On a GPU one call takes many of a `TensorList`.

    Args:
        function: maps matrices (..., rows, columns) to matrices of the same shape. If its argument is transposed, its
            result must be transposed too. If columns of zeros are appended to its argument, they must be zeros in its
            result, and the other columns may change only by the order of sums.
        factor: maps the shape of a tensor to a number.
        x: the argument of a formula: a tensor or a `TensorList`. On a GPU the tensors of one shape make one stack.
            Tensors whose transpose has this shape join the stack. Small matrices with the same number of rows also
            join it, with columns of zeros appended.
        dtype: of the result, before it is multiplied; by default that of `x`.

    Examples:
        >>> on_stacks(lambda x: x / x.norm(), lambda shape: 2.0, torch.ones(1, 1))
        tensor([[2.]])
    """
    dtype = dtype or x.dtype
    if not isinstance(x, TensorList):
        return function(x).to(dtype) * factor(x.shape)
    tensors, found = x.tensors, dict[int, Tensor]()
    if not stacks_on(tensors[0].device):
        # Products of stacks are no faster there: they take copies, and may have other bits than one matrix.
        made = [function(t).contiguous() for t in tensors]
        factors = [factor(t.shape) for t in tensors]
        if len(set(factors)) == 1:
            # In the pass that takes the result.
            return TensorList(made).to(dtype) * factors[0]
        return TensorList([t.to(dtype) * by for t, by in zip(made, factors, strict=True)])
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
        made = function(torch.cat(parts, -1).unflatten(-1, (len(places), columns)).movedim(-2, 0)).to(dtype)
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
