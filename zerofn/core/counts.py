"""Counts of the updates of each leaf, and numbers that are derived from them, such as bias corrections."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import foreach, foreach_add, viewed
from ..kernels.formulas import once
from ..kernels.recording import concrete
from .context import Context
from .layout import Leaves
from .leaf_step import Numbers

# (updates of a leaf, rate, hyperparameters) -> numbers by name
Derived = Callable[[Any, Any, Numbers], Numbers]


def counters(paths: Collection[str]) -> Leaves:
    """A counter for each of these leaves: the elements of one tensor, so that all of them are read at once."""
    return dict(zip(paths, apart(torch.zeros(len(paths), dtype=torch.int64)), strict=True))


def apart(together: Tensor) -> tuple[Tensor, ...]:
    """The elements of a tensor of counters, which remembers them in its `elements`: a step may write these at once."""
    found = together.unbind()
    if not torch.compiler.is_compiling():
        # The references are weak: the elements keep their tensor alive, and strong ones would make a cycle.
        together.elements = list(map(weakref.ref, found))  # type: ignore[attr-defined]
    return found


def whole(counts: Collection[Tensor]) -> Tensor | None:
    """The tensor of which these counters are all the elements, in their order; `None` if there is none.

    Others on the same memory are counters of another state: members of a batch share those of the one that they were
    made from.
    """
    found = None if not counts else viewed(next(iter(counts)))
    known = getattr(found, "elements", ())
    return found if len(known) == len(counts) and all(map(is_, counts, map(weakref.ref.__call__, known))) else None


def one_more(counts: Leaves, paths: Collection[str], ctx: Context) -> Leaves:
    """Counts of these leaves plus one, by one `foreach` call: single additions show in a step of many small leaves."""
    before = list(map(counts.__getitem__, paths))
    if ctx.unread and before:
        return dict(zip(paths, _counted_unread(before, ctx), strict=True))
    after = [c + 1 for c in before] if ctx.recorded or not before else foreach_add(before, 1)
    return dict(zip(paths, after, strict=True))


def _counted_unread(before: list[Tensor], ctx: Context) -> list[Tensor]:
    """Counts plus one if the step counts, without reading them; in their memory if that is donated."""
    one: Any = 1 if ctx.choosing is None else ctx.choosing
    together = whole(before)
    if ctx.donate:
        ctx.written.add(ctx.prefix)
        if together is not None:
            together.add_(one)
        else:
            # It gets a list, since torch would read a single 0-d tensor as a number and wait for the device.
            foreach("add_", before, [one.to(before[0])] * len(before) if isinstance(one, Tensor) else one)
        return before
    return [*apart((torch.stack(before) if together is None else together) + one)]


def next_counts(counts: Leaves, paths: Collection[str]) -> tuple[dict[int, list[str]], list[int], Tensor | None]:
    """The counts of these leaves in this update, which Python can read.

    Leaves nearly always step together. Then their counts are all the elements of one tensor, and are read at once.

    Returns:
        The paths by their count in this update; the counts before it; and the tensor that has all of these as its
        elements, if there is one.
    """
    before = list(map(counts.__getitem__, paths))
    together = whole(before)
    numbers: Any = None if together is None else together.tolist()
    if numbers is None or len(set(numbers)) > 1:
        # `item` of each takes a third of the time of `torch.stack(...).tolist()`.
        numbers = list(map(Tensor.item, before))
    groups: dict[int, list[str]] = {}
    if len(set(numbers)) == 1:
        groups[numbers[0] + 1] = list(paths)
    else:
        for path, n in zip(paths, numbers, strict=True):
            groups.setdefault(n + 1, []).append(path)
    return groups, numbers, together


def by_count(counts: Leaves) -> dict[int, list[str]]:
    """Paths of leaves by their count."""
    return {n - 1: paths for n, paths in next_counts(counts, counts)[0].items()}


def by_leaf(
    counts: Leaves,
    rate: Any,
    numbers: Numbers,
    derived: Derived | None,
    ctx: Context,
    dtypes: Collection[torch.dtype] = (torch.float64,),
) -> Iterator[tuple[str, Any, Numbers]]:
    """Every leaf's path, its count, and numbers derived from it, once for all leaves with the same count.

    Args:
        counts: of updates, by path.
        rate: the learning rate.
        numbers: hyperparameters by name.
        derived: makes the numbers.
        ctx: the step's context.
        dtypes: of the tensors that derived tensors are combined with.
    """
    if not ctx.unread and (not ctx.recorded or all(map(concrete, counts.values()))):
        for count, paths in by_count(counts).items():
            made = derived(count, wide(rate), {k: wide(x) for k, x in numbers.items()}) if derived else {}
            yield from ((path, count, made) for path in paths)
        return
    found = derived_of_all(counts, rate, numbers, derived, ctx, dtypes)[1] if derived else {}
    columns = [x.unbind() if isinstance(x, Tensor) else [x] * len(counts) for x in found.values()]
    for i, (path, count) in enumerate(counts.items()):
        yield path, count, {name: column[i] for name, column in zip(found, columns, strict=True)}


def derived_of_all(
    counts: Leaves,
    rate: Any,
    numbers: Numbers,
    derived: Derived | None,
    ctx: Context,
    dtypes: Collection[torch.dtype] = (torch.float64,),
) -> tuple[Tensor, Numbers]:
    """The counts of all leaves, (leaves,), and numbers derived from them: numbers, or tensors of that shape.

    The arguments are those of `by_leaf`. Python need not read the counts.
    """
    each = list(counts.values())
    # Counts are mostly on the CPU, and a rate may be elsewhere: torch mixes devices of 0-d tensors only.
    given = [x.device for x in (rate, *numbers.values()) if isinstance(x, Tensor) and x.device.type != "cpu"]
    known = whole(each) if ctx.unread else None
    together = torch.stack(each) if known is None else known
    together = together.to(given[0]) if given and together.is_cpu else together
    if derived is None:
        return together, {}
    made = derived(wide(together), wide(rate), {k: wide(x) for k, x in numbers.items()})
    # If all leaves are float32, one cast serves all of them, in place of one operation in the graph for each.
    dtype = torch.float32 if set(dtypes) == {torch.float32} else torch.float64
    spread = once(*(x.to(dtype).expand(len(counts)) if isinstance(x, Tensor) else x for x in made.values()))
    return together, dict(zip(made, spread, strict=True))


def wide(x: Any) -> Any:
    """A number in float64, if it is a tensor."""
    return x.double() if isinstance(x, Tensor) else x
