"""Metrics as Python's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._errors import explain, kind_of


def floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats, for a log: those of one device come over in one copy, and not one by one.

    Args:
        metrics: `opt.metrics`, or what a step returned; 0-d tensors or numbers by name.

    Returns:
        The same names; what was a bool is 0.0 or 1.0.

    Raises:
        TypeError: one is no number, such as a whole batch of them under `vmap`; it is named.

    >>> import torch, zerofn as zf
    >>> tx = zf.sgd(0.5)
    >>> _, metrics = zf.update(tx, {"w": torch.ones(4)}, zf.init(tx, {"w": torch.zeros(4)}))
    >>> zf.floats(metrics)
    {'updated': 1.0, 'step': 1.0, 'skipped': 0.0, 'lr': 0.5, 'grad_norm': 2.0}
    """
    for name, x in metrics.items():
        if not (isinstance(x, int | float) or (isinstance(x, Tensor) and x.ndim == 0 and not x.is_complex())):
            what = f"a tensor of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else kind_of(x)
            right = "zf.floats({name: x for name, x in metrics.items() if x.ndim == 0})"
            raise TypeError(explain(f"zf.floats({{{name!r}: ...}})", f"it is {what}, and no number", right))
    tensors = {name: x.detach() for name, x in metrics.items() if isinstance(x, Tensor)}
    found: dict[str, float] = {}
    for device in {x.device for x in tensors.values()}:
        here = [name for name, x in tensors.items() if x.device == device]
        # In float64: a step is counted beyond 2 ** 24.
        wide = torch.float64 if device.type != "mps" else torch.float32
        found |= dict(zip(here, torch.stack([tensors[name].to(wide) for name in here]).tolist(), strict=True))
    return {name: found[name] if name in found else float(x) for name, x in metrics.items()}
