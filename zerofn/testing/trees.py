"""Assertions over trees that report every bad leaf, and trees to check transforms on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.tree import Tree, flatten, tree_map, tree_paths


def assert_trees_equal(actual: Tree, expected: Tree, what: str = "trees differ") -> None:
    """Assert that two trees have the same structure, shapes, dtypes and bits; NaN equals NaN.

    Args:
        actual: a tree of tensors.
        expected: the reference.
        what: first line of the message.

    Raises:
        AssertionError: names every leaf that differs.

    Examples:
        >>> import torch
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> assert_trees_equal({"w": one, "b": [one]}, {"w": one, "b": [zero]})
        Traceback (most recent call last):
        ...
        AssertionError: trees differ
          b.0: 1 of 1 elements differ, the worst by 1 at (0,): 1 instead of 0
          write: two trees that are equal
    """
    _compare(actual, expected, what, None)


def assert_trees_close(
    actual: Tree, expected: Tree, ulps: float, floor: float = 0.0, what: str = "trees differ"
) -> None:
    """Assert the same structure and shapes, and `|a - e| <= ulps * eps * max(|e|, floor)` for every element.

    Args:
        actual: a tree of tensors.
        expected: the reference. It may be in float64, to be more exact than `actual`.
        ulps: units in the last place of the actual dtype.
        floor: magnitude below which the tolerance is absolute. Choose the magnitude of the terms if an element is a sum
            of larger terms.
        what: first line of the message.

    Raises:
        AssertionError: names every leaf that differs.

    Examples:
        >>> import torch
        >>> assert_trees_close(torch.tensor(1.0), torch.tensor(1.0 + 1e-7, dtype=torch.float64), ulps=1)
    """
    _compare(actual, expected, what, (ulps, floor))


def _compare(actual: Tree, expected: Tree, what: str, bound: tuple[float, float] | None) -> None:
    mine, theirs = tree_paths(actual), tree_paths(expected)
    bad = [(p, "missing") for p in theirs if p not in mine] + [(p, "extra") for p in mine if p not in theirs]
    if not bad:
        for path, a, e in zip(mine, flatten(actual)[0], flatten(expected)[0], strict=True):
            if reason := difference(a, e, bound):
                bad.append((path, reason))
    if bad:
        raise AssertionError(bad_leaves(what, bad, "two trees that are " + ("equal" if bound is None else "close")))


def difference(a: Any, e: Any, bound: tuple[float, float] | None) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(e, Tensor):
        return None if a is e or a == e else f"{a!r} instead of {e!r}"
    if a.shape != e.shape or (a.dtype != e.dtype and bound is None):
        return f"{a.dtype} of shape {tuple(a.shape)} instead of {e.dtype} of shape {tuple(e.shape)}"
    if a.is_meta or e.is_meta:
        return None
    if a.is_complex() != e.is_complex():
        return f"{a.dtype} instead of {e.dtype}"
    a, e = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, e))
    a, e, eps = a.detach().cpu(), e.detach().cpu(), _eps(a.dtype)
    both_nan = a.isnan() & e.isnan()
    if bound is None:
        wrong = (a != e) & ~both_nan
    else:
        room = bound[0] * eps * e.double().abs().clamp(min=bound[1])
        # `a != e`: equal infinities are right, though their difference is NaN.
        wrong = ~((a.double() - e.double()).abs() <= room) & ~both_nan & (a != e)
    if not wrong.any():
        return None
    distance = (a.double() - e.double()).abs().masked_fill(~wrong, -1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(distance.flatten().argmax(), a.shape))
    worst = f"{float(distance[at]):.3g} at {at}: {a[at].item():.9g} instead of {e[at].item():.9g}"
    return f"{int(wrong.sum())} of {a.numel()} elements differ, the worst by {worst}"


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def random_like(tree: Tree, seed: int) -> Tree:
    """Normal numbers in the shapes and dtypes of `tree`.

    Args:
        tree: of tensors; other leaves stay.
        seed: of a generator of its own.

    Examples:
        >>> import torch
        >>> random_like({"w": torch.zeros(2), "b": None}, seed=0)
        {'w': tensor([ 1.5410, -0.2934]), 'b': None}
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    return tree_map(draw, tree)


def sample_params() -> Tree:
    """Parameters that are hard for transforms: nested containers, `None`; 0-d, empty and 1-element leaves.

    Examples:
        >>> len(sample_params())
        5
    """
    empty = {
        "block": [{"weight": torch.zeros(3, 5), "bias": torch.zeros(5)}, (torch.zeros(2, 1, 3), None)],
        "kernel": torch.zeros(2, 3, 2, 2),
        "gain": torch.zeros(()),
        "empty": torch.zeros(0, 4),
        "one": torch.zeros(1),
    }
    return random_like(empty, seed=7)
