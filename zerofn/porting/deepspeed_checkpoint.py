"""`load_deepspeed`: loads parameters, moments and counts from a universal checkpoint of DeepSpeed.

    <directory>/zero/<name of a parameter>/fp32.pt        {"param": tensor, ...}
                                           exp_avg.pt     so for each tensor that the optimizer keeps of it
                                           step.pt        updates, a number

DeepSpeed itself saves shards for its ranks, with pickles of its own classes; its `ds_to_universal.py` converts them
into whole tensors under the names of the model.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from ..core.outside_form import stored_part
from ..core.pipeline import init_transforms
from ..core.state import State
from ..core.state_entries import Entry, entries, rebuild
from ..eager.optimizer import Optimizer
from ..storage.saving_ranks import checkpoint_group, raise_on_all_ranks, wait_for_all_ranks

WEIGHT, STEP = "fp32", "step"
# Slots that count updates: of a leaf, of a transform or the state, and of the state's micro-steps.
COUNTS = ("count", STEP, "micro_step")
# Contents by leaf and name of the file.
Files = dict[tuple[str, str], Any]


def load_deepspeed(directory: str | os.PathLike, like: Optimizer) -> State:
    """Go on from a universal checkpoint of DeepSpeed, each rank with the part that it keeps.

    `python ds_to_universal.py --input_folder global_step100 --output_folder directory` of DeepSpeed makes one from a
    checkpoint of any ZeRO stage. Read are the trained parameters, in fp32 and cast to what the state stores, each
    tensor that the optimizer keeps of them, under the same name (`exp_avg`, `exp_avg_sq`), and the count of updates,
    by which schedules go on. One tensor is in memory at a time. Not read: learning rates and schedulers (those of the
    chain hold), loss scale, frozen parameters and buffers (`model.load_state_dict` of the consolidated
    `pytorch_model.bin` has them), the place in the data. States beside the optimizer, such as an `ema`, begin anew.

    For weights alone no such directory is needed: what `zero_to_fp32.py` writes is loaded by `model.load_state_dict`,
    at every stage, or by `zf.load_safetensors`.

    Args:
        directory: the one that holds the folder `zero`.
        like: an attached model's `opt`, which is written in place.

    Returns:
        `like.state`.

    Raises:
        TypeError: `like` is no attached model.
        FileNotFoundError: no folder `zero` in the directory.
        ValueError: parameters or tensors that are missing, unexpected, of another shape or dtype; all of them by name.
        RuntimeError: only some ranks call it, as for `zf.load`.

    >>> import pathlib, tempfile, torch, zerofn as zf
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(lr=1e-3)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     folder = pathlib.Path(directory, "zero", "weight")
    ...     folder.mkdir(parents=True)
    ...     for name in ("fp32", "exp_avg", "exp_avg_sq"):
    ...         torch.save({"param": torch.ones(1, 2)}, folder / f"{name}.pt")
    ...     torch.save(torch.tensor(7.0), folder / "step.pt")
    ...     state = zf.load_deepspeed(directory, like=opt)
    >>> model.weight.data, int(state.step)
    (tensor([[1., 1.]]), 7)
    """
    if not isinstance(like, Optimizer):
        why, right = f"it is {kind_of(like)}", "opt = zf.attach(model, tx), and zf.load_deepspeed(directory, like=opt)"
        raise TypeError(explain("zf.load_deepspeed(directory, like) of something that is not attached", why, right))
    state = like.state
    wait_for_all_ranks("zf.load_deepspeed(directory, like)", state.layout.placement)
    files: Files = {}
    failure: Exception | None = None
    try:
        files = _files(Path(directory), like)
    except (ValueError, OSError) as error:
        failure = error
    raise_on_all_ranks(failure, checkpoint_group(state.layout.placement))
    like.load_state(_filled(like, files))
    return like.state


def _filled(opt: Optimizer, files: Files) -> State:
    """The state with the contents of the files, and with initial states where there is no file."""
    state = opt.state
    most = max((int(x) for (_, name), x in files.items() if name == STEP), default=int(state.step))

    def read(e: Entry, name: str) -> Tensor:
        return e.part(files[e.path, name]).to(e.value.device, e.value.dtype, copy=True)

    def weight(e: Entry) -> Any:
        return read(e, WEIGHT) if e.owner == "params" and (e.path, WEIGHT) in files else e.value

    def kept(e: Entry) -> Any:
        name = e.slot.rpartition("/")[2]
        if e.of_leaf and name == COUNTS[0] and (e.path, STEP) in files:
            return torch.full_like(e.value, int(files[e.path, STEP]))
        if e.of_leaf and e.owner != "params" and (e.path, name) in files:
            return read(e, name)
        return torch.full_like(e.value, most) if not e.of_leaf and name in COUNTS else e.value

    road, leaves = opt._own.pipe.road, rebuild(state, weight).leaves
    with torch.no_grad():
        # What DeepSpeed has is what its model computes with; a view of one's own stores another form of it.
        read_here = [leaf for leaf in state.layout.leaves if (leaf.path, WEIGHT) in files]
        leaves = {**leaves, **{leaf.path: stored_part(road, leaves[leaf.path], leaf) for leaf in read_here}}
    fresh = State(leaves, init_transforms(opt._own.pipe, leaves), state.step, state.micro_step, state.layout)
    return rebuild(fresh, kept)


def _files(directory: Path, opt: Optimizer) -> Files:
    """All files, memory-mapped.

    Raises:
        FileNotFoundError: there is no folder `zero`.
        ValueError: files that do not fit, all of them by leaf.
    """
    folder = directory / "zero"
    if not folder.is_dir():
        right = f"python ds_to_universal.py --input_folder {directory} --output_folder {directory}_universal"
        why = "a checkpoint as DeepSpeed saves it is cut for its ranks, and told by pickles of its own classes"
        raise FileNotFoundError(explain(f"zf.load_deepspeed({str(directory)!r}): no folder zero in it", why, right))
    layout, wanted = opt.state.layout, dict(_wanted(opt))
    names: dict[str, str] = {}
    for path, name in zip(layout.at, layout.paths, strict=True):
        if path is not None and (folder / name).is_dir():
            names.setdefault(path, name)
    bad = [(p, "no such folder in zero") for p in dict.fromkeys(p for p, _ in wanted) if p not in names]
    # Folders of frozen parameters are ignored: an earlier run may have trained them.
    extra = {x.name for x in folder.iterdir() if x.is_dir()} - set(layout.paths)
    bad += [(name, "is in the checkpoint and not in the model") for name in sorted(extra)]
    found: Files = {}
    for path in dict.fromkeys(p for p, _ in wanted if p in names):
        there = {x.stem for x in (folder / names[path]).glob("*.pt")}
        of_leaf = {name for p, name in wanted if p == path}
        bad += [(path, f"{name}.pt is missing") for name in sorted(of_leaf - there)]
        bad += [(path, f"{name}.pt is of another optimizer") for name in sorted(there - of_leaf - {STEP})]
        # Schedules go on by the count of updates, also of an optimizer that keeps none.
        for name in sorted(there & (of_leaf | {STEP})):
            x = found[path, name] = _read(folder / names[path] / f"{name}.pt")
            if name != STEP and (problem := _misfit(x, *wanted[path, name], name == WEIGHT)):
                bad.append((path, f"{name}.pt {problem}"))
    if bad:
        right = "the universal checkpoint of this model, and the optimizer that it was trained by"
        raise ValueError(bad_leaves(f"zf.load_deepspeed({str(directory)!r}): it does not fit", bad, right))
    return found


def _wanted(opt: Optimizer) -> Iterator[tuple[tuple[str, str], tuple[torch.Size, torch.dtype]]]:
    """Shape and dtype by leaf and file, of parameters and of the optimizer's states."""
    trained = set(opt.state.layout.trained)
    made_by = {part.name for part in opt._own.pipe.parts if part.facts.optimizes}
    for e in entries(opt.state):
        if e.path in trained and e.owner == "params":
            yield (e.path, WEIGHT), (torch.Size(e.shape), e.value.dtype)
        elif e.path in trained and e.owner in made_by:
            name = e.slot.rpartition("/")[2]
            yield (e.path, STEP if name == COUNTS[0] else name), (torch.Size(e.shape), e.value.dtype)


def _read(file: Path) -> Any:
    try:
        x = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise OSError(f"{file} could not be read: {error}") from None
    return x.get("param") if isinstance(x, dict) else x


def _misfit(x: Any, shape: torch.Size, dtype: torch.dtype, cast: bool) -> str:
    """Why a tensor does not fit, or "". A flat one with as many elements fits."""
    if not isinstance(x, Tensor) or x.shape not in (shape, (shape.numel(),)):
        return f"is {f'of shape {tuple(x.shape)}' if isinstance(x, Tensor) else kind_of(x)} instead of {tuple(shape)}"
    return "" if cast or x.dtype == dtype else f"is of {x.dtype} instead of {dtype}; dtypes are not changed silently"
