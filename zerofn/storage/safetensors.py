"""`export_safetensors`: the full model in one file of the safetensors format."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import explain, users_line
from ..core.facts import AVERAGE
from ..core.layout import Leaf
from ..core.outside_form import check_known, seen_part
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import Entry, entries
from ..core.tensor_parallel_leaves import joined
from ..core.transform import Transform
from ..eager.optimizer import Optimizer
from ..pure.states import pipe_of
from ..pure.uncompiled import kept_out_of_graphs
from ..ranks.backend import gather_objects
from ..ranks.collectives import all_gather_into
from ..ranks.group import Group
from .atomic_replace import replace_file
from .checkpoint import state_of
from .saving_ranks import checkpoint_group, raise_on_all_ranks, wait_for_all_ranks


@kept_out_of_graphs("it writes a file", "zf.export_safetensors(path, state), outside of what is compiled")
def export_safetensors(
    path: str | os.PathLike, state: State | Optimizer, of: str = "params", tx: Transform | None = None
) -> None:
    """Write the full model under its own names, in the dtype it is stored in, for the `safetensors` format.

    Numbers are those of `zf.full_params`: what the model computes with before it is cast. Behind a view of one's own
    that is not what is stored (weights on a grid), which `zf.save` keeps. fp32 masters are written as they are.

    Of tied names the first is written, the others stand in the metadata as the name they are tied to:
    `safetensors.torch.load_model` ties them again. The file appears in one step when it is complete.
    Buffers of a module, such as running means, are no parameters and not in a state.

    With a sharded state every rank calls it; the first writes, and needs memory for the whole model.

    Args:
        path: of the file.
        state: of `zf.init` or of a step, or an attached model's `opt`.
        of: `"params"`, or the name of an `ema` for the averages.
        tx: the pipeline, needed where `state` is a state whose parameters are seen through a view of one's own.

    Raises:
        ImportError: safetensors is not installed: `pip install 'zerofn[safetensors]'`.
        OSError: it cannot be written. A file that was there is as it was.
        RuntimeError: only some ranks call it, as for `zf.save`.
        TypeError: a state that is seen through a view of one's own, without `tx`.

    >>> import tempfile, torch, zerofn as zf
    >>> from safetensors.torch import load_file
    >>> state = zf.init(zf.adamw(lr=1e-3), {"w": torch.arange(2.0)})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     zf.export_safetensors(f"{directory}/model.safetensors", state)
    ...     load_file(f"{directory}/model.safetensors")
    {'w': tensor([0., 1.])}
    """
    save_file = safetensors_function("save_file", "zf.export_safetensors")
    given = state_of(state, "zf.export_safetensors(path, {})")
    pipe = _pipe(state, tx)
    wait_for_all_ranks("zf.export_safetensors(path, state)", given.layout.placement)
    if isinstance(state, Optimizer):
        state._own.agree_on_writes()
    owner, slot = ("params", "") if of == "params" else (of, AVERAGE)
    found = {e.path: e for e in entries(given) if (e.owner, e.slot) == (owner, slot)}
    if not found:
        names = [name for name, own in given.transforms.items() if AVERAGE in own]
        raise ValueError(f"export_safetensors(of={of!r}): this state has {names or 'no ema; add zf.ema(0.999)'}.")
    group = checkpoint_group(given.layout.placement, path)
    # An ema watches trainable leaves; frozen ones are as they are.
    params = {e.path: e for e in entries(given) if e.owner == "params"}
    leaves = {leaf.path: leaf for leaf in given.layout.leaves}
    tensors = {path: _gather(_seen(pipe, found.get(path, e), leaves[path]), group) for path, e in params.items()}
    failure = None
    if group.rank == 0:
        names = zip(given.layout.paths, given.layout.at, strict=True)
        tied = {name: path for name, path in names if path not in (name, None)}
        try:
            _write(Path(path), lambda temporary: save_file(tensors, temporary, {"format": "pt", **tied}))
        except OSError as error:
            failure = error
    raise_on_all_ranks(failure, group)


def _pipe(state: State | Optimizer, tx: Transform | None) -> Pipeline | None:
    """The pipeline of a state; `None` where nobody says it, of a state that is seen as it is stored."""
    if isinstance(state, Optimizer):
        return state._own.pipe
    pipe = None if tx is None else pipe_of(tx, state, "zf.export_safetensors")
    right = "zf.export_safetensors(path, state, tx=tx), or of opt, an attached model's"
    check_known(state.layout.placement, pipe, "zf.export_safetensors(path, state)", right)
    return pipe


@torch.no_grad()
def _seen(pipe: Pipeline | None, e: Entry, leaf: Leaf) -> Entry:
    """The entry of a parameter, or of its average, as the model sees it."""
    return e if pipe is None else replace(e, value=seen_part(pipe.road, e.value.detach(), leaf))


def safetensors_function(name: str, caller: str) -> Any:
    """A function of the package safetensors.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        why, right = "the package safetensors is not installed", "pip install 'zerofn[safetensors]'"
        raise ImportError(explain(f"{caller}(...)", why, right)) from error
    return getattr(safetensors.torch, name)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        not_durable = replace_file(path, write)
    except OSError:
        raise
    except Exception as error:
        # safetensors has an exception of its own, also for a full disk.
        raise OSError(f"{path} could not be written: {error}") from error
    if not_durable is not None:
        warnings.warn(
            f"{path} is in place, but may not survive a loss of power: {not_durable}", stacklevel=users_line()
        )


def _gather(e: Entry, group: Group) -> Tensor:
    """All-gather a sharded tensor: the whole on the CPU of the first rank, an empty one on the others."""
    x = e.value.detach()
    if e.offset is not None:
        numel = torch.Size(e.shape).numel()
        ranges = gather_objects((e.offset, x.numel()), group)
        longest = max(n for _, n in ranges)
        padded = x.new_zeros(longest, device=group.device)
        padded[: x.numel()] = x.reshape(-1)
        rows = padded.new_empty((group.size, longest))
        all_gather_into(rows.view(-1), padded, group)
        x = x.new_empty(numel if group.rank == 0 else 0, device="cpu")
        if group.rank == 0:
            for (offset, n), row in zip(ranges, rows, strict=True):
                x[offset : offset + n] = row[:n]
            x = x.view(e.shape) if e.within is None else joined(x, e.shape, e.within.boxes)
    return x.cpu().contiguous() if group.rank == 0 else x.new_empty(0)
