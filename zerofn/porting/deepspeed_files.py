"""What the files of a DeepSpeed checkpoint say beside the moments: counts, frozen parameters, buffers.

    <directory>/zero/optimizer_state.pt                      at stage 3 the counts of updates, by group of parameters
                mp_rank_00_model_states.pt                   at stages 0 to 2 the whole model, the counts of the run
                zero_pp_rank_<i>_mp_rank_00_model_states.pt  at stage 3 rank i's part of each frozen parameter, buffers

Its converter copies the files of the model as they are. They hold pickles of DeepSpeed's own classes; none is imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WHOLE, PARTS = "mp_rank_00_model_states.pt", "zero_pp_rank_*_mp_rank_00_model_states.pt"


class _Passed:
    """In the place of a class that a file names: takes anything, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __setstate__(self, state: Any) -> None: ...


def read(file: Path) -> Any:
    """The contents of a file, memory-mapped; objects of other classes than torch allows are left empty.

    Raises:
        OSError: it is no such file; the message names it.
    """
    # ValueError: torch looks for the names of classes in a file that is no archive.
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals([(_Passed, name) for name in names]):
            return torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise OSError(f"{file} could not be read: {error}") from None


@dataclass
class Run:
    """A run as the files of its model have it; empty where the directory has none.

    Attributes:
        tensors: whole tensors by name: at stage 3 frozen parameters and buffers, at the others the whole model.
        optimizer: at stage 0, where nothing is cut, the optimizer's state dict.
        groups: names of the trained parameters, by the group that DeepSpeed has them in.
        updates: how many updates were made, by which schedules go on.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    groups: list[list[str]] = field(default_factory=list)
    updates: int | None = None


def read_run(directory: Path) -> Run:
    """Read the files of the model. Of a model that is cut over ranks by itself they hold parts: then only counts."""
    whole, parts = directory / WHOLE, sorted(directory.glob(PARTS), key=_number)
    if not whole.is_file() and not parts:
        return Run()
    saved = [read(file) for file in (parts or [whole])]
    first = saved[0]
    run = Run(updates=int(first.get("global_steps", 0)) - int(first.get("skipped_steps", 0)))
    run.groups = [list(group) for group in first.get("param_shapes") or []]
    if any(directory.glob("*mp_rank_01*_model_states.pt")):
        return run
    module = first.get("module") or {}
    if not parts:
        run.tensors = {name: x for name, x in module.items() if isinstance(x, Tensor)}
        run.optimizer = first.get("optimizer")
        return run
    run.tensors = {name: module[name] for name in first.get("buffer_names") or [] if name in module}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        # The last parts are padded.
        flat = torch.cat([rank["frozen_param_fragments"][name].reshape(-1) for rank in saved])
        run.tensors[name] = flat[: shape.numel()].view(shape)
    return run


def read_counts(directory: Path, groups: list[list[str]]) -> dict[str | None, int]:
    """Counts of updates by name, from `optimizer_state.pt`; under `None` that of all, where they are alike.

    A group has its count in the state of its one flat tensor, or, with DeepSpeed's fused Adam, among its settings.
    """
    file = directory / "zero" / "optimizer_state.pt"
    saved = read(file) if file.is_file() else {}
    state = (saved.get("optimizer_state_dict") or {}).get("state") or {}
    found = {i: group["step"] for i, group in enumerate(saved.get("param_groups") or []) if "step" in group}
    found |= {i: kept["step"] for i, kept in state.items() if isinstance(kept, Mapping) and "step" in kept}
    counts: dict[str | None, int] = {}
    for i, names in enumerate(groups):
        counts |= {name: int(found[i]) for name in names if i in found}
    if len(set(map(int, found.values()))) == 1:
        counts[None] = int(next(iter(found.values())))
    return counts


def _number(file: Path) -> int:
    return int(file.name.split("_")[3])
