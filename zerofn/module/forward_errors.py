"""Notes on errors that the forward of an attached model raises: what has changed, and which dtypes meet in it."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from ..core.pipeline import Pipeline
from ..core.wrapper_names import buffers_in, modules_of

# In torch's messages about two dtypes that it does not promote, which differ from kernel to kernel.
DTYPE_ERROR = re.compile(r"dtype|scalar type|should be the same|BFloat16|Half", re.IGNORECASE)
MOST_NAMED = 5


def add_notes(error: BaseException, model: nn.Module, pipe: Pipeline, check_unchanged: Callable[[], None]) -> None:
    """Add to an error what has changed since the model was attached, or in which dtypes it computes.

    A note and no error of ours: torch's message names the operation, the caller may catch its class, and torch makes a
    warning of what a hook raises after an error.

    Args:
        error: what forward raised.
        model: the attached one.
        pipe: its pipeline.
        check_unchanged: raises if the model is not what was attached.
    """
    try:
        check_unchanged()
    except RuntimeError as changed:
        error.add_note(f"zerofn: {changed}")
        return
    if isinstance(error, RuntimeError | TypeError) and DTYPE_ERROR.search(str(error)):
        _add_dtypes(error, model, pipe)


def _add_dtypes(error: BaseException, model: nn.Module, pipe: Pipeline) -> None:
    seen = pipe.dtypes.inputs
    where = _where_raised(error, model, pipe)
    if pipe.dtypes.by_path and seen is None:
        _add_several(error, pipe, where)
    if seen is None:
        return
    named = [(n, b.dtype) for n, b in buffers_in(model) if b.is_floating_point() and b.dtype != seen]
    shown = ", ".join(f"{n} {dtype}" for n, dtype in named[:MOST_NAMED])
    rest = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    buffers = f"buffers have their own dtypes: {shown}{rest}; " if named else ""
    error.add_note(
        f"zerofn: the pipeline has {seen} parameters and inputs in forward (precision)\n"
        f"  why:   {where}{buffers}a tensor made in forward is {torch.get_default_dtype()} unless it says otherwise\n"
        "  write: self.buffer.to(x.dtype) and torch.zeros(n, dtype=x.dtype) in forward, or torch.zeros_like(x);\n"
        f"         buffers that may lose bits: precision(..., buffer_dtype={seen})"
    )


def _where_raised(error: BaseException, model: nn.Module, pipe: Pipeline) -> str:
    """The innermost module of the model in whose code torch raised, with the dtypes of its own tensors."""
    names = {id(m): name for name, m in modules_of(model)}
    at, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        at = owner if isinstance(owner, nn.Module) and id(owner) in names else at
        trace = trace.tb_next
    if at is None:
        return ""
    prefix = f"{names[id(at)]}." if names[id(at)] else ""
    leaves = {leaf.path: pipe.dtypes.seen(leaf) for leaf in pipe.layout.leaves}
    own = {name: leaves[prefix + name] for name, _ in at.named_parameters(recurse=False) if prefix + name in leaves}
    own |= {name: b.dtype for name, b in at.named_buffers(recurse=False) if b.is_floating_point()}
    has = ", ".join(f"{prefix}{name} {dtype}" for name, dtype in own.items())
    return f"raised in {names[id(at)] or 'the model itself'} ({type(at).__name__}){f', with {has}' if has else ''}; "


def _add_several(error: BaseException, pipe: Pipeline, where: str) -> None:
    """Which leaves forward has in which dtype; the rarest dtype first, which most likely met another one."""
    groups: dict[torch.dtype, list[str]] = {}
    for leaf in pipe.layout.leaves:
        groups.setdefault(pipe.dtypes.seen(leaf), []).append(leaf.path)
    if len(groups) < 2:
        return
    lines = [where.removesuffix("; ")] if where else []
    for dtype, paths in sorted(groups.items(), key=lambda group: len(group[1])):
        rest = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        lines.append(f"{dtype}: {', '.join(paths[:MOST_NAMED])}{rest}")
    told = "\n         ".join(lines)
    error.add_note(
        f"zerofn: precision(..., labels=...) gives the model parameters in several dtypes\n"
        f"  why:   {told}\n"
        "  write: x.to(self.weight.dtype) in forward where what one computes goes into another; inputs of the model "
        "stay as they are"
    )
