"""The persistent buffers of a module, such as running means: no part of a state, and needed to go on."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.modules import persistent_buffers
from .._compat.tensors import is_wrapper
from .._errors import bad_leaves, explain
from ..core.state_entries import Entry

OWNER = "buffers"


def buffers_of(model: nn.Module) -> list[Entry]:
    """The buffers that `model.state_dict()` has, under its names."""
    return [Entry(OWNER, "", name, x, tuple(x.shape)) for name, x in persistent_buffers(model).items()]


def check_can_be_saved(model: nn.Module, buffers: list[Entry]) -> None:
    """Raise on a buffer that a checkpoint has no form for, and warn of what it leaves out."""
    bad = [(e.key, why) for e in buffers if (why := _why_not(e.value))]
    if bad:
        right = (
            "register_buffer(..., persistent=False), for what the model makes anew\n"
            "         zf.save(directory, opt.state), which leaves buffers out, and torch.save for them"
        )
        raise TypeError(bad_leaves("zf.save: these buffers cannot be saved", bad, right))
    extra = [name or "the model" for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    if extra:
        warnings.warn(
            f"zf.save(directory, opt): what get_extra_state gives, of {', '.join(extra)}, is not in the checkpoint. It "
            "may be anything, and only a pickle could keep it: torch.save it beside the checkpoint.",
            stacklevel=4,
        )


def _why_not(x: Tensor) -> str:
    if x.layout is not torch.strided or x.is_quantized or is_wrapper(x):
        return f"a {type(x).__name__} of layout {x.layout} is no plain tensor"
    return ""


def without(manifest: dict[str, Any]) -> dict[str, Any]:
    """A table of contents as of a state alone, without buffers."""
    names = set(manifest.get(OWNER) or ())
    return {**manifest, "tensors": {key: about for key, about in manifest["tensors"].items() if key not in names}}


def tell_of_missing(directory: Any, buffers: list[Entry], manifest: dict[str, Any]) -> None:
    """Warn where a model has buffers and the checkpoint none."""
    if not buffers or manifest.get(OWNER) is not None:
        return
    names = ", ".join(e.path for e in buffers[:3]) + (f" and {len(buffers) - 3} more" if len(buffers) > 3 else "")
    older = manifest["version"] == 1
    why = "it is of an older zerofn, which saved none" if older else "it was saved from a state, which has none"
    warnings.warn(
        explain(
            f"zf.load({str(directory)!r}, like=opt): the model's buffers ({names}) stay as they are",
            f"the checkpoint has no buffers: {why}",
            "zf.save(directory, opt), which saves them; and load those of this checkpoint from where they are",
        ),
        # The line of the user who calls `zf.load`.
        stacklevel=5,
    )


def check_can_be_written(call: str, buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Raise on a buffer that cannot be written, unless it has the numbers already."""
    bad = [
        (e.key, "its elements share memory (it is expanded), so they cannot be written")
        for e in buffers
        if _expanded(e.value) and not torch.equal(e.value, new[e.key])
    ]
    if bad:
        raise ValueError(bad_leaves(f"{call}: these buffers cannot be loaded", bad, "register_buffer(name, x.clone())"))


@torch.no_grad()
def write(buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Load buffers in place: whoever holds one has the new numbers."""
    for e in buffers:
        if not _expanded(e.value):
            e.value.copy_(new[e.key])


def _expanded(x: Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))
