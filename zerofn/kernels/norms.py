"""Norms over trees, in one pass over memory and in fp32 or wider."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import foreach, foreach_norm, joined
from .lists import batches, on_lists
from .native import squares
from .program import TensorList, in_one_launch, sums_of
from .recording import differentiated, recorded, root

CHUNK = 1 << 17

_NARROW = (torch.bfloat16, torch.float16)
_WIDE = {torch.float32, torch.float64}

# Every step calls these on every leaf, so they are C functions.
_DTYPE, _IS_CPU, _DEVICE = attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("device")
_NDIM = attrgetter("ndim")


def leaf_norms(leaves: dict[str, Tensor], order: float = 2.0) -> dict[str, Tensor]:
    """The norm of every leaf by path, each 0-d, in fp32 or wider. For leaves without elements see `leaf_squares`."""
    if not leaves:
        return {}
    tensors: list[Tensor] = list(leaves.values())
    if not any(map(_IS_CPU, tensors)) and not recorded(tensors):
        found = _norms_on_device(tensors, order)
    elif not set(map(_DTYPE, tensors)) <= _WIDE:
        found = [_norm(t, order, max(torch.float32, t.dtype, key=lambda d: d.itemsize)) for t in tensors]
    elif max(map(Tensor.numel, tensors)) <= CHUNK:
        found = foreach_norm(tensors, order)
    else:
        pieces = [t.view(-1).split(CHUNK) if _in_pieces(t) else (t,) for t in tensors]
        norms = iter(foreach_norm([x for of_one in pieces for x in of_one], order))
        found = [_joined([next(norms) for _ in of_one], order) for of_one in pieces]
    return dict(zip(leaves, found, strict=True))


def _norms_on_device(tensors: list[Tensor], order: float) -> list[Tensor]:
    """In one call for each dtype: torch computes a list of one dtype in a few launches."""
    found: dict[int, Tensor] = {}
    dtypes = list(map(_DTYPE, tensors))
    for dtype in dict.fromkeys(dtypes):
        places = [i for i, other in enumerate(dtypes) if other == dtype]
        wide = {} if dtype in _WIDE else {"dtype": torch.float32}
        found |= zip(places, foreach_norm([tensors[i] for i in places], order, **wide), strict=True)
    return [found[i] for i in range(len(tensors))]


def _in_pieces(t: Tensor) -> bool:
    """Whether to take the norm in pieces: a large, contiguous CPU tensor.

    On a CPU torch adds squares up in a few fp32 sums: of 16 M numbers the norm is 7e-4 too small, in pieces 4e-7. A
    norm in another dtype casts the whole tensor first; pieces that stay in the cache take a seventh of the time, and no
    fp32 copy of the largest leaf raises the peak of memory.
    """
    return t.numel() > CHUNK and t.device.type == "cpu" and t.is_contiguous()


def _norm(t: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if order == 2.0 and (total := _squares(t)) is not None:
        return torch.tensor(total**0.5, dtype=dtype)
    if not _in_pieces(t):
        return foreach_norm([t], order, dtype=dtype)[0]
    return _joined(list(foreach_norm(t.view(-1).split(CHUNK), order, dtype=dtype)), order)


def _joined(norms: list[Tensor], order: float) -> Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _squares(t: Tensor) -> float | None:
    """The sum of squares by the C kernel, for 16-bit CPU tensors, where it is faster; else `None`."""
    plain = type(t) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
    if not plain or t.device.type != "cpu" or t.dtype not in _NARROW or not t.is_contiguous():
        return None
    return squares(t)


def not_finite(leaves: dict[str, Tensor]) -> Tensor:
    """Zero if every number is finite, else NaN; 0-d."""
    leaves = {path: t for path, t in leaves.items() if t.numel()}
    tensors = list(leaves.values())
    if not tensors:
        return torch.zeros(())
    if recorded():
        # A formula instead of a kernel, so that the compiler can fuse it. It has no derivative, so leaves are detached.
        return torch.stack([(t.detach() * 0.0).sum(dtype=torch.float32) for t in tensors]).sum()
    if all(map(_IS_CPU, tensors)):
        bounds = torch.aminmax if set(map(_DTYPE, tensors)) <= _WIDE else _bounds
        return torch.stack([*chain.from_iterable(map(bounds, tensors))]).to(torch.float32).mul(0.0).sum()
    if (found := _total_on_device(lambda x: x * 0.0, tensors)) is not None:
        return found
    norms = _on_one_device([n.to(torch.float32) for n in leaf_norms(leaves, math.inf).values()])
    return torch.stack(norms).mul(0.0).sum()


def _on_one_device(norms: list[Tensor]) -> list[Tensor]:
    """The same norms; if they are on several devices, on the host, whose 0-d tensors work with any device."""
    if all(map(_IS_CPU, norms)) or recorded(norms) or len(set(map(_DEVICE, norms))) == 1:
        return norms
    return [n.cpu() for n in norms]


def not_finite_each(leaves: dict[str, Tensor], paths: Sequence[str]) -> Tensor:
    """For each path 0 if every number of its leaf is finite, or if there is no leaf, else NaN: (paths,), in float32.

    On a GPU in one call for all.
    """
    present = [path for path in paths if path in leaves]
    tensors = [leaves[path] for path in present]
    found: dict[str, Tensor] = {}
    if not recorded(tensors) and _for_kernels(tensors):
        for places, (x,) in batches(tensors):
            zeros = TensorList(x).to(torch.float32) * 0.0
            if in_one_launch(zeros):
                (row,) = sums_of(zeros)
                if len(places) == len(paths):
                    return row
                found.update(zip([present[i] for i in places], row.unbind(), strict=True))
    if missing := {path: leaves[path] for path in present if path not in found}:
        if recorded() or any(map(_IS_CPU, tensors)) or not all(map(Tensor.numel, missing.values())):
            found |= {path: not_finite({path: t}) for path, t in missing.items()}
        else:
            norms = leaf_norms(missing, math.inf)
            found.update(zip(norms, foreach("mul", list(norms.values()), 0.0), strict=True))
    device = tensors[0].device
    none = torch.zeros((), device=device)
    return torch.stack([found.get(path, none).to(device, torch.float32) for path in paths])


def _bounds(t: Tensor) -> tuple[Tensor, ...]:
    """Numbers that are finite if all of `t` are. On a CPU a norm of order infinity takes twelve times as long."""
    total = _squares(t)
    return torch.aminmax(t) if total is None else (torch.tensor(total * 0.0),)


def squared_norm(leaves: dict[str, Tensor]) -> Tensor:
    """The sum of squares, 0-d; fp64 where every leaf is, else fp32.

    Summed in the order of paths: a tree in another kind of container has the same norm to the last bit.
    """
    return added(leaf_squares(leaves)) if recorded(leaves.values()) else squared_norm_unrecorded(leaves)


def squared_norm_unrecorded(leaves: dict[str, Tensor]) -> Tensor:
    """`squared_norm` of leaves that nobody records."""
    tensors: list[Tensor] = list(map(leaves.__getitem__, sorted(leaves)))
    if all(map(_IS_CPU, tensors)):
        # Small leaves are joined first, since the norm of one takes longer than its copy.
        dtypes = set(map(_DTYPE, tensors))
        if len(dtypes) == 1 and dtypes <= _WIDE and sum(map(Tensor.numel, tensors)) <= CHUNK:
            return (torch.cat if set(map(_NDIM, tensors)) == {1} else joined)(tensors).norm().square()
        return sum_of_squares(leaf_norms(leaves))
    found = _total_on_device(lambda x: x.square(), tensors)
    return sum_of_squares(leaf_norms(leaves)) if found is None else found


def _total_on_device(function: Callable[[Any], Any], tensors: list[Tensor]) -> Tensor | None:
    """The sum of a function of every element, in float32, in a launch for each dtype; `None` if there is no kernel."""
    # For one leaf, as within backward, torch's one launch costs the host less than a kernel and its table.
    if len(tensors) < 2 or not _for_kernels(tensors):
        return None
    lists = [TensorList(x).to(torch.float32) for _, (x,) in batches(tensors)]
    if not all(map(in_one_launch, lists)):
        return None
    totals = [sums_of(function(x), each=False)[0] for x in lists]
    return totals[0] if len(totals) == 1 else torch.stack(_on_one_device(totals)).sum()


def _for_kernels(tensors: list[Tensor]) -> bool:
    """Whether kernels of a GPU add up numbers of these leaves, in float32."""
    return on_lists([tensors]) and torch.float64 not in set(map(_DTYPE, tensors))


def leaf_squares(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of squares of every leaf, by path, each 0-d; fp32 at least. It can be differentiated.

    A norm cannot where a leaf is zero, so no norms are squared. A leaf without elements has a sum too: the dtype in
    which sums are added must not depend on the shards that a rank has, since ranks add up the results.
    """
    wide = {p: x.to(torch.promote_types(x.dtype, torch.float32)) for p, x in leaves.items()}
    # `x * x` has two products as its derivative, `x.square()` a power, which is slower.
    return {p: ((x * x.conj()).real if x.is_complex() else x * x).sum() for p, x in wide.items()}


def added(squares_by_path: dict[str, Tensor]) -> Tensor:
    """The squared norm of a tree, from the sums of squares of its leaves; in fp64 if every leaf is, else in fp32."""
    # Sums are added in the order of paths. The compiler, which traces this, does not know attrgetter.
    found = list(map(squares_by_path.__getitem__, sorted(squares_by_path)))
    wide = torch.float64 if {n.dtype for n in found} <= {torch.float64} else torch.float32
    return torch.stack(found).to(wide).sum() if found else torch.zeros(())


def sum_of_squares(norms_by_path: dict[str, Any]) -> Tensor:
    """The squared norm of a tree, from the norms of its leaves: tensors, or floats from a C kernel."""
    kinds = set(map(type, norms_by_path.values()))
    if kinds == {float}:
        # One torch operation instead of three per leaf. `fsum` is exact, hence the same in any order.
        return torch.tensor(math.fsum([n * n for n in norms_by_path.values()]), dtype=torch.float32)
    if float in kinds:
        of_kernels = {p: torch.tensor(n, dtype=torch.float32) for p, n in norms_by_path.items() if type(n) is float}
        norms_by_path = {**norms_by_path, **of_kernels}
    norms = _on_one_device(list(map(norms_by_path.__getitem__, sorted(norms_by_path))))
    wide = torch.float64 if set(map(_DTYPE, norms)) <= {torch.float64} else torch.float32
    if not norms:
        return torch.zeros(())
    together = torch.stack(norms).to(wide)
    # On a GPU `dot` takes one launch instead of two. On the CPU it would have other bits.
    return together.square().sum() if together.is_cpu or recorded([together]) else together.dot(together)


def length(x: Tensor) -> Tensor:
    """The norm of one tensor; for zeros its derivative is zero, to any order."""
    return root(x.square().sum()) if differentiated(x) else x.norm()
