"""`Elementwise` and `ElementSums`: formulas on each leaf alone, which are traced once and run in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..kernels.lists import batches, on_lists, results, sums_over_leaves
from ..kernels.numbers import TOLD, NotOnLists, tell
from ..kernels.plans import Plans
from ..kernels.program import LeafSums, TensorList, computed
from .context import Context
from .layout import Leaves
from .outside import constants, may_change


class Elementwise:
    """A formula of tensors of one leaf, element by element, and of numbers.

    Call it in an update half that is `Joining`, with the context, a dict from path to tensor for each tensor of the
    formula, and its numbers by name. Leaves that are large together are computed in one pass over memory, which may be
    joined with those of the neighbours in the chain. Others are computed leaf by leaf, as lists of leaves, or by
    `instead`.

    Args:
        function: of tensors and, by keyword, numbers. It returns a tensor, or a tuple of several, and writes none of
            its arguments.
        replaces: how many of the tensors its results replace, from the first one on: a result is converted to the dtype
            of the old tensor, and written into its memory if that is donated. With 0 the result is new.
        instead: a function of the arguments of a call, which returns the results by path where no program computes
            them, for instance by one foreach call for many small leaves. By default the formula runs leaf by leaf.

    Examples:
        >>> import torch
        >>> from zerofn.core.layout import make_layout
        >>> average = Elementwise(lambda old, x, weight: old + weight * (x - old), replaces=1)
        >>> ctx = Context(make_layout({"w": torch.ones(2)}))
        >>> average(ctx, {"w": torch.zeros(2)}, {"w": torch.ones(2)}, weight=0.5)
        ({'w': tensor([0.5000, 0.5000])},)
    """

    def __init__(self, function: Callable[..., Any], replaces: int = 0, instead: Callable[..., Leaves] | None = None):
        self.function, self.replaces, self.instead = function, replaces, instead
        self.plans = Plans(self._traced)

    def __call__(self, ctx: Context, *columns: Mapping[str, Any], **numbers: Any) -> tuple[Leaves, ...]:
        """The results by path, for each result of the formula. The paths are those of the first column."""
        paths = list(columns[0])
        found: list[Leaves] = [{} for _ in range(self.replaces or 1)]
        rows = [list(map(column.__getitem__, paths)) for column in columns]
        alone = list(range(len(paths)))
        if not ctx.recorded and ctx.choosing is None and on_lists(rows):
            alone = self._by_plans(ctx, paths, rows, numbers, found)
        if alone:
            ctx.settle()
            rest: list[Mapping[str, Any]] = [{paths[i]: row[i] for i in alone} for row in rows]
            if self.instead is None:
                self._by_results(ctx, rest, numbers, found)
            else:
                found[0].update(self.instead(ctx, *rest, **numbers))
            found = [{path: of[path] for path in paths} for of in found]
        return tuple(found)

    def _traced(self, lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        return self._replacing(lists, _several(self.function(*lists, **numbers))), []

    def _replacing(self, olds: Any, made: tuple[Any, ...]) -> list[Any]:
        """The results in the dtypes of what they replace."""
        return [x.to(old.dtype) for x, old in zip(made, olds, strict=False)] if self.replaces else list(made)

    def _by_plans(
        self, ctx: Context, paths: list[str], rows: list[list[Any]], numbers: Mapping[str, Any], found: list[Leaves]
    ) -> list[int]:
        """Compute leaves by a program of the formula. Returns the places of those for which there is none."""
        values: dict[str, Any] = {
            name: x.item() if isinstance(x, Tensor) and x.is_cpu else x for name, x in numbers.items()
        }
        if not set(map(type, values.values())) <= {int, float, bool}:
            return list(range(len(paths)))
        into = None
        if self.replaces and ctx.donate:
            ctx.written.add(ctx.prefix)
            into = list(range(self.replaces))
        rest: list[int] = []
        for batch, lists in batches(*rows):
            try:
                made, _ = self.plans.run(lists, values, into, passes=ctx.passes)
            except NotOnLists:
                rest += batch
                continue
            for of, tensors in zip(found, made, strict=True):
                of.update(zip([paths[i] for i in batch], tensors, strict=True))
        return rest

    def _by_results(
        self, ctx: Context, columns: list[Mapping[str, Any]], numbers: Mapping[str, Any], found: list[Leaves]
    ) -> None:
        """Compute leaves one by one, or as lists of them by torch's operations."""

        def written(*row: Any) -> list[Any]:
            made = self._replacing(row, _several(self.function(*row, **numbers)))
            return list(map(ctx.into, row, made)) if self.replaces else made

        for paths, made in results(written, *columns):
            computed(*[x for x in made if isinstance(x, TensorList)])
            for of, x in zip(found, made, strict=True):
                of.update(zip(paths, x.tensors if isinstance(x, TensorList) else [x], strict=True))


class ElementSums:
    """Sums over the elements of each leaf.

    Call it in an update half that is `Joining`, with the context, a dict that gets the sums, and a dict from path to
    tensor for each tensor of the function. The sums ride on the pass of the neighbours in the chain, so they may be
    there only after the update half has returned: read them in `Prepared.close`.

    Args:
        function: of tensors of one leaf. It returns a list of sums, which are numbers or 0-d tensors.
        reads: a function of the user's that it calls. If that reads what may change and is no argument, it is called in
            each step, in a pass of its own.

    Examples:
        >>> import torch
        >>> from zerofn.core.layout import make_layout
        >>> squares, found = ElementSums(lambda x: [x.square().sum()]), {}
        >>> squares(Context(make_layout({"w": torch.ones(2)})), found, {"w": torch.ones(2)})
        >>> found
        {'w': tensor([2.], dtype=torch.float64)}
    """

    def __init__(self, function: Callable[..., Sequence[Any]], reads: Callable[..., Any] | None = None):
        self.function, self.reads = function, function if reads is None else reads
        self.plans = Plans(self._traced)

    def __call__(self, ctx: Context, found: Leaves, *columns: Mapping[str, Any]) -> None:
        """Put a float64 tensor of shape (sums,) into `found` for each path of the first column."""
        paths = list(columns[0])
        rows = [list(map(column.__getitem__, paths)) for column in columns]
        rest = list(range(len(paths)))
        if not ctx.recorded and ctx.choosing is None and on_lists(rows):
            known = constants(self.reads)
            if known is not None:
                rest = self._by_plans(ctx, found, paths, rows, known)
            elif TOLD:
                tell(*may_change(self.reads, {}))
        if rest:
            ctx.settle()
            found |= sums_over_leaves(self.function, *[{paths[i]: row[i] for i in rest} for row in rows])

    def _traced(self, lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        sums = self.function(*lists)
        if not all([isinstance(x, LeafSums) for x in sums]):
            raise NotOnLists("a number of each leaf")
        return [], [x.of for x in sums]

    def _by_plans(
        self, ctx: Context, found: Leaves, paths: list[str], rows: list[list[Any]], known: tuple[Any, ...]
    ) -> list[int]:
        """Add up leaves by a program of the function. Returns the places of those for which there is none."""
        rest: list[int] = []
        for batch, lists in batches(*rows):
            own = [paths[i] for i in batch]

            def take(sums: Tensor, own: list[str] = own) -> None:
                found.update(zip(own, sums.double().mT.unbind(), strict=True))

            try:
                self.plans.run(lists, {}, None, known, passes=ctx.passes, take=take)
            except NotOnLists:
                rest += batch
        return rest


def _several(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)
