"""Persistent buffers of a module, such as running means: in a checkpoint of `opt` and in no state."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.tensors import is_wrapper
from .._errors import bad_leaves, explain, users_line
from ..core.state import State
from ..core.state_entries import Entry
from ..core.wrapper_names import modules_of, saved_buffers
from ..eager.optimizer import Optimizer

OWNER = "buffers"


def buffers_of(model: nn.Module) -> list[Entry]:
    """The buffers in `model.state_dict()`, by the names that they have in the plain model."""
    return [Entry(OWNER, "", name, x, tuple(x.shape)) for name, x in saved_buffers(model).items()]


def check_can_be_saved(model: nn.Module, buffers: list[Entry]) -> None:
    """Raise for buffers that are no plain tensors; warn that `get_extra_state` is not saved."""
    bad = [
        (e.key, f"a {type(e.value).__name__} of layout {e.value.layout} is no plain tensor")
        for e in buffers
        if e.value.layout is not torch.strided or e.value.is_quantized or is_wrapper(e.value)
    ]
    if bad:
        right = (
            "register_buffer(..., persistent=False), for what the model makes anew\n"
            "         zf.save(directory, opt.state), which leaves buffers out, and torch.save for them"
        )
        raise TypeError(bad_leaves("zf.save: these buffers cannot be saved", bad, right))
    plain = nn.Module.get_extra_state
    extra = [name or "the model" for name, m in modules_of(model) if type(m).get_extra_state is not plain]
    if extra:
        warnings.warn(
            f"zf.save(directory, opt): what get_extra_state gives, of {', '.join(extra)}, is not in the checkpoint. It "
            "may be anything, and only a pickle could keep it: torch.save it beside the checkpoint.",
            stacklevel=users_line(),
        )


def without_buffers(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without the buffers, as of a saved state."""
    names = set(manifest.get(OWNER) or ())
    return {**manifest, "tensors": {key: about for key, about in manifest["tensors"].items() if key not in names}}


def warn_of_missing(directory: Any, buffers: list[Entry], manifest: dict[str, Any]) -> None:
    """Warn if a model has buffers and the checkpoint has none."""
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
        stacklevel=users_line(),
    )


def _check_can_be_written(call: str, buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Raise for buffers that cannot be written in place, unless they have these values already."""
    bad = [
        (e.key, "its elements share memory (it is expanded), so they cannot be written")
        for e in buffers
        if _expanded(e.value) and not torch.equal(e.value, new[e.key])
    ]
    if bad:
        raise ValueError(bad_leaves(f"{call}: these buffers cannot be loaded", bad, "register_buffer(name, x.clone())"))


def load_with_buffers(
    opt: Optimizer,
    call: str,
    state: State,
    groups: list[dict[str, Any]] | None,
    buffers: list[Entry],
    new: dict[str, Tensor],
) -> None:
    """Write a state, learning rates and buffers into an attached model: one load, which is whole or refused.

    Args:
        opt: of the model.
        call: the function that was called, for messages.
        state: what is loaded.
        groups: learning rates; by default they stay.
        buffers: those to write.
        new: their values, by key.
    """
    _check_can_be_written(call, buffers, new)
    own = opt._own
    own.load(own.dicts.of(state, groups), "load_state", partial(_write_buffers, buffers, new))


@torch.no_grad()
def _write_buffers(buffers: list[Entry], new: dict[str, Tensor]) -> None:
    """Copy new values into the buffers in place, so that references to them stay valid."""
    for e in buffers:
        if not _expanded(e.value):
            e.value.copy_(new[e.key])


def _expanded(x: Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True))
