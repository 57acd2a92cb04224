"""Gradients of embeddings with `sparse=True` are made dense, before anything else takes them.

Optimizers, sums and collectives take dense gradients. A chain then updates such an embedding as one without `sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .._compat.tensors import read_grad, registered, write_grad


def _make_dense(p: Tensor) -> None:
    # A tensor hook may not return a gradient of another layout.
    with torch.no_grad(), torch.DisableTorchFunctionSubclass():
        g = read_grad(p)
        if g is not None and g.layout != torch.strided:
            write_grad(p, g.to_dense())


def make_gradients_dense(model: nn.Module, params: Iterable[Tensor], undo: list[Callable[[], object]]) -> None:
    """Make gradients of embeddings dense that are sparse.

    Args:
        model: the model.
        params: its trainable parameters. No hook that takes their gradients is there yet.
        undo: gets functions that end it.
    """
    own = set(map(id, params))
    sparse = [registered(m)[0].get("weight") for m in model.modules() if getattr(m, "sparse", None) is True]
    for p in {id(p): p for p in sparse if p is not None and id(p) in own}.values():
        undo.append(p.register_post_accumulate_grad_hook(_make_dense).remove)
