"""Which tensors are parameters: those of a module, and why an entry of a tree is none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._compat.tensors import sharing_memory
from .._errors import bad_leaves
from ..ranks.dtensor_parameters import is_distributed
from .wrapper_names import without_wrappers

DISTRIBUTED = "a DTensor, which a model has and no tree: zf.attach(model, tx), or p.to_local() of each"


def parameters_of(model: nn.Module) -> OrderedDict[str, nn.Parameter]:
    """The parameters of a module by path, a tied one under each of its names.

    A path is the name without what wrappers add (torch.compile, checkpoint_wrapper, DistributedDataParallel). Those of
    integers are left out, which quantizers keep frozen: nothing trains or casts them, and every rank keeps them whole,
    as it does buffers.

    Raises:
        ValueError: two have one name without what wrappers add.
    """
    named = model.named_parameters(remove_duplicate=False)
    kept = OrderedDict((name, p) for name, p in named if p.dtype.is_floating_point or p.dtype.is_complex)
    return OrderedDict(without_wrappers(model, kept))


def not_a_parameter(leaf: Any) -> str | None:
    """Why an entry of a tree is no parameter, and what to give instead; `None` of one, and of `None`."""
    if leaf is None:
        return None
    if isinstance(leaf, UninitializedParameter | UninitializedBuffer):
        return "not initialised yet, as of a lazy module; run the model once on a batch before"
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return "a nested tensor, of rows of several lengths; give x.to_padded_tensor(0.0), or its rows, x.unbind()"
        if leaf.is_complex():
            return f"{leaf.dtype}; store the real and imaginary parts as two leaves (torch.view_as_real)"
        if not leaf.is_floating_point():
            return f"{leaf.dtype} has no gradient; keep it outside of the parameters"
        if leaf.dtype.itemsize < 2:
            return f"{leaf.dtype} is a format of storage without arithmetic; give at least 16 bits"
        if leaf.layout != torch.strided:
            return f"layout {leaf.layout}; only strided tensors are parameters"
        return DISTRIBUTED if is_distributed(leaf) else None
    if is_dataclass(leaf) and any(isinstance(getattr(leaf, f.name), Tensor) for f in fields(leaf)):
        name = type(leaf).__name__
        return f"dataclass {name} is not registered: optree.dataclasses.dataclass({name}, namespace='zerofn')"
    return f"{type(leaf).__name__} is no tensor"


def check_own_memory(call: str, leaves: Mapping[str, Tensor]) -> None:
    """Refuse two leaves over one memory, as `state_dict()` of a model with tied parameters has them.

    Which tensors are one parameter is told by the tensor object. Two objects would become two parameters.

    Args:
        call: as the user writes it.
        leaves: by path, a tied tensor once.
    """
    shared = sharing_memory(leaves).items()
    bad = [(path, f"shares memory with {first}, and is another tensor object") for path, first in shared]
    if bad:
        right = (
            "the same tensor object at each place of a tied parameter, as of a model\n"
            "         dict(model.named_parameters(remove_duplicate=False)); or params[name] = x.clone() for two"
        )
        raise ValueError(bad_leaves(f"{call}: leaves that are over one memory would become two parameters", bad, right))
