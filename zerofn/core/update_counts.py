"""How many updates each leaf has had, and the numbers of a formula that follow from that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._compat.operators import foreach_add
from ..kernels.recording import concrete
from ..kernels.terms import once
from .leaf_arguments import Numbers

# (updates of a leaf, rate, hyperparameters) -> numbers by name
Derived = Callable[[Any, Any, Numbers], Numbers]


def one_more(counts: list[Tensor], recorded: bool) -> list[Tensor]:
    """Each count plus one; in one call, since on many small leaves that is a good part of a step."""
    if not counts or recorded:
        return [c + 1 for c in counts]
    return list(foreach_add(counts, 1))


def by_count(counts: dict[str, Tensor]) -> dict[int, list[str]]:
    """Leaves that have had equally many updates, which is nearly always all of them."""
    # They are on the CPU: one by one they are read in a third of the time of a copy of all.
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
    """Every leaf's path, its count, and numbers that follow from it, computed once for all leaves with one count.

    Args:
        dtypes: those in which tensors that are derived are computed with.
    """
    if recorded and not all(map(concrete, counts.values())):
        # Rounded together, lest there be a cast in the graph for each leaf; of several dtypes each by itself.
        narrow = all(dtype is torch.float32 for dtype in dtypes)
        yield from _unread(counts, rate, numbers, derived, torch.float32 if narrow else torch.float64)
        return
    for count, paths in by_count(counts).items():
        made = derived(count, _wide(rate), {k: _wide(x) for k, x in numbers.items()}) if derived else {}
        yield from ((path, count, made) for path in paths)


def _unread(
    counts: dict[str, Tensor], rate: Any, numbers: Numbers, derived: Derived | None, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, Numbers]]:
    """As `each` under vmap and in a graph, where counts are tensors: numbers are derived for all leaves together."""
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
