"""Counts of updates of each leaf, and numbers derived from them, such as bias corrections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._compat.operators import foreach_add
from ..kernels.recording import concrete
from ..kernels.terms import once
from .layout import Leaves
from .leaf_arguments import Numbers

# (updates of a leaf, rate, hyperparameters) -> numbers by name
Derived = Callable[[Any, Any, Numbers], Numbers]


def one_more(counts: Leaves, paths: Collection[str], recorded: bool) -> Leaves:
    """Counts of these leaves plus one, by one `foreach` call: single additions show in a step of many small leaves."""
    before = list(map(counts.__getitem__, paths))
    after = [c + 1 for c in before] if recorded or not before else foreach_add(before, 1)
    return dict(zip(paths, after, strict=True))


def by_count(counts: dict[str, Tensor]) -> dict[int, list[str]]:
    """Paths of leaves by their count; nearly always all leaves have the same one."""
    # Counts are 0-d CPU tensors: `item` of each takes a third of the time of `torch.stack(...).tolist()`.
    numbers = list(map(Tensor.item, counts.values()))
    if len(set(numbers)) == 1:
        return {numbers[0]: list(counts)}  # type: ignore[dict-item]
    groups: dict[int, list[str]] = {}
    for path, n in zip(counts, numbers, strict=True):
        groups.setdefault(n, []).append(path)  # type: ignore[arg-type]
    return groups


def each(
    counts: dict[str, Tensor],
    rate: Any,
    numbers: Numbers,
    derived: Derived | None,
    recorded: bool,
    dtypes: Iterable[torch.dtype] = (torch.float64,),
):
    """Every leaf's path, its count, and numbers derived from it, once for all leaves with the same count.

    Args:
        dtypes: of the tensors that derived tensors are combined with.
    """
    if recorded and not all(map(concrete, counts.values())):
        # For float32 cast for all leaves together, and not by one operation in the graph for each leaf.
        narrow = all(dtype is torch.float32 for dtype in dtypes)
        yield from _unread(counts, rate, numbers, derived, torch.float32 if narrow else torch.float64)
        return
    for count, paths in by_count(counts).items():
        made = derived(count, _wide(rate), {k: _wide(x) for k, x in numbers.items()}) if derived else {}
        yield from ((path, count, made) for path in paths)


def _unread(
    counts: dict[str, Tensor], rate: Any, numbers: Numbers, derived: Derived | None, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Numbers]]:
    """As `each` where Python cannot read counts, under vmap and in a graph: derived from one tensor of all counts."""
    if derived is None:
        yield from ((path, count, {}) for path, count in counts.items())
        return
    # Counts are on the CPU, and a rate may be elsewhere: torch mixes devices of 0-d tensors only, and these are not.
    given = [x.device for x in (rate, *numbers.values()) if isinstance(x, Tensor) and x.device.type != "cpu"]
    together = torch.stack(list(counts.values()))
    together = together.to(given[0]) if given else together
    made = derived(_wide(together), _wide(rate), {k: _wide(x) for k, x in numbers.items()})
    spread = once(*(x.to(dtype).expand(len(counts)) if isinstance(x, Tensor) else x for x in made.values()))
    columns = [x.unbind() if isinstance(x, Tensor) else [x] * len(counts) for x in spread]
    for i, (path, count) in enumerate(counts.items()):
        yield path, count, {name: column[i] for name, column in zip(made, columns, strict=True)}


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x
