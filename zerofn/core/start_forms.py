"""The form of a first state of leaves that this rank has not, or not whole: what `init` makes of leaves without
memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .layout import Layout
from .transform import Transform, TransformState
from .tree import tree_map


def form_of_start(t: Transform, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], layout: Layout) -> TransformState:
    """The first state of leaves of these shapes and dtypes, on the device `meta`.

    An `init` that asks for the numbers of a leaf is handed some in memory of the CPU, of all these leaves at once.

    Raises:
        Exception: whatever `init` raises of both.

    >>> import zerofn as zf
    >>> norms = zf.leafwise(lambda g, p, s: (g, s), init=lambda p: torch.full((2,), p.norm().item()))()
    >>> form_of_start(norms, {"w": (torch.Size([3]), torch.float32)}, None)
    {'value': {'w': tensor(..., device='meta', size=(2,))}}
    """
    try:
        return t.init_fn({p: torch.empty(shape, dtype=d, device="meta") for p, (shape, d) in shapes.items()}, layout)
    except Exception:
        # Its draws are none of the run's.
        with torch.random.fork_rng(devices=[]):
            state = t.init_fn({p: some_numbers(shape, d) for p, (shape, d) in shapes.items()}, layout)
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, state)


def some_numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A leaf of numbers from 1 to 2: neither its norm nor its variance is zero, whatever `init` divides by.

    >>> some_numbers((3,), torch.float32)
    tensor([1.0000, 1.5000, 2.0000])
    """
    return torch.linspace(1, 2, math.prod(shape)).reshape(tuple(shape)).to(dtype)
