"""`load_deepspeed`: go on from a universal checkpoint of DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofn import Optimizer, State
from zerofn.extend import Entry, bad_leaves, buffers_in, entries, explain, kind_of, rebuild, users_line

# These have no public name: the pipeline of an attached model, which cannot be resolved from a state alone if tensor
# parallelism cuts the model; and how ranks raise an error together.
from ..core.bucketed_views import stored_part
from ..core.pipeline import init_transforms
from ..storage.files import damaged, is_plain_archive
from ..storage.saving import checkpoint_group, raise_on_all_ranks, wait_for_all_ranks

# ----------------------------------------------------------------------------------------------------------------------
# `read_run` and `read_counts` read what a DeepSpeed checkpoint has besides moments: counts, frozen parameters, buffers.
#
#     <directory>/zero/optimizer_state.pt                      at stage 3 the counts of updates, by parameter group
#                 mp_rank_00_model_states.pt                   at stages 0 to 2 the whole model, the counts of the run
#                 zero_pp_rank_<i>_mp_rank_00_model_states.pt  at stage 3 rank i's shard of frozen parameters; buffers
#
# Its converter copies the model's files as they are. They contain pickles of DeepSpeed's classes, which are not
# imported here.


FULL_MODEL, SHARDED_MODEL = "mp_rank_00_model_states.pt", "zero_pp_rank_*_mp_rank_00_model_states.pt"


class _Passed:
    """Stands in for a class that a file names: accepts anything, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __setstate__(self, state: Any) -> None: ...


def read(file: Path) -> Any:
    """The contents of a file, memory-mapped; objects of classes that torch does not allow are left empty.

    Raises:
        OSError: the file cannot be opened.
        Damaged: it has something else than torch.save writes; the message names it.
    """
    # torch raises a ValueError if the file, which it searches for names of classes, is not an archive.
    if not is_plain_archive(file):
        raise damaged(file, "it could not be read: it is no archive of torch.save, or it is compressed")
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals([(_Passed, name) for name in names]):
            return torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception:
        # torch's message would advise to load with weights_only=False, which runs code of the file.
        raise damaged(file, "it could not be read: it has something else than tensors, numbers and text") from None


def as_count(x: Any, where: str) -> int:
    """A count of updates.

    Raises:
        Damaged: it is none: no whole number from 0 to 2^53, the last that a float counts to.
    """
    value = x.item() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex() else x
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**53 or value != int(value):
        raise damaged(Path(where), f"{value!r} is no count of updates" if value is not None else "it has no count")
    return int(value)


@dataclass
class Run:
    """A run, as the model's files describe it; empty if the directory has none.

    Attributes:
        tensors: full tensors by name: at stage 3 frozen parameters and buffers, at other stages the whole model.
        optimizer: at stage 0, which shards nothing, the optimizer's state dict.
        groups: names of trained parameters, by DeepSpeed's parameter group.
        updates: how many updates were made; schedules go on from this step.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    groups: list[list[str]] = field(default_factory=list)
    updates: int | None = None


def read_run(directory: Path) -> Run:
    """Read the model's files. If tensor parallelism cuts the model, only the counts are read from them."""
    whole, parts = directory / FULL_MODEL, sorted(directory.glob(SHARDED_MODEL), key=_number)
    if not whole.is_file() and not parts:
        return Run()
    saved = [read(file) for file in (parts or [whole])]
    first = saved[0]
    name = str(parts[0] if parts else whole)
    made, skipped = (as_count(first.get(key, 0), f"{name}, {key},") for key in ("global_steps", "skipped_steps"))
    run = Run(updates=as_count(made - skipped, f"{name}, global_steps less skipped_steps,"))
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
        # The last rank's shard is padded.
        flat = torch.cat([rank["frozen_param_fragments"][name].reshape(-1) for rank in saved])
        run.tensors[name] = flat[: shape.numel()].view(shape)
    return run


def read_counts(directory: Path, groups: list[list[str]]) -> dict[str | None, int]:
    """Counts of updates by name, from `optimizer_state.pt`; under `None` the common one, if all are equal.

    A group's count is in the state of its one flat tensor or, with DeepSpeed's fused Adam, among its settings.
    """
    file = directory / "zero" / "optimizer_state.pt"
    saved = read(file) if file.is_file() else {}
    state = (saved.get("optimizer_state_dict") or {}).get("state") or {}
    found = {i: group["step"] for i, group in enumerate(saved.get("param_groups") or []) if "step" in group}
    found |= {i: kept["step"] for i, kept in state.items() if isinstance(kept, Mapping) and "step" in kept}
    found = {i: as_count(x, str(file)) for i, x in found.items()}
    counts: dict[str | None, int] = {}
    for i, names in enumerate(groups):
        counts |= {name: found[i] for name in names if i in found}
    if len(set(found.values())) == 1:
        counts[None] = next(iter(found.values()))
    return counts


def _number(file: Path) -> int:
    return int(file.name.split("_")[3])


# ----------------------------------------------------------------------------------------------------------------------
# `load_deepspeed` loads parameters, moments and counts from a universal checkpoint of DeepSpeed.
#
#     <directory>/zero/<name of a parameter>/fp32.pt        {"param": tensor, ...}, at stage 3 the flat tensor
#                                            exp_avg.pt     the same for each of the optimizer's tensors
#                                            step.pt        updates, a number; none at stage 3
#
# DeepSpeed itself saves shards for its ranks, with pickles of its classes; its `ds_to_universal.py` converts them into
# full tensors under the model's names. For frozen parameters, buffers and second names of tied parameters it writes
# only `fp32.pt` at stages 1 and 2, and nothing at stage 3.


WEIGHT, STEP = "fp32", "step"
# Slots that count updates: of a leaf, of a transform or the state, and of the state's micro-steps.
COUNTS = ("count", STEP, "micro_step")
# Contents by leaf and name of the file.
Files = dict[tuple[str, str], Any]


def load_deepspeed(directory: str | os.PathLike, like: Optimizer, step: int | None = None) -> State:
    r"""Go on from a universal checkpoint of DeepSpeed; each rank reads its shards.

    DeepSpeed's converter makes one from a checkpoint of stage 1, 2 or 3:

        python -m deepspeed.checkpoint.ds_to_universal --input_folder run/global_step100 --output_folder directory \
            --inject_missing_state

    A checkpoint of stage 0 is not sharded, and is loaded as it is (`run/global_step100`).

    It loads the parameters, from fp32 into the stored dtype; each tensor of the optimizer, under the same name
    (`exp_avg`, `exp_avg_sq`); the count of updates, from which schedules go on; frozen parameters and buffers. One
    tensor is in memory at a time. It does not load learning rates and schedulers (the chain's hold), the loss scale, or
    the place in the data. States beside the optimizer, such as an `ema`, start anew.

    For weights alone use `model.load_state_dict` on what `zero_to_fp32.py` writes, at every stage, or
    `zf.load_safetensors`.

    Args:
        directory: the one that contains the folder `zero`.
        like: an attached model's `opt`, which is written in place.
        step: the number of updates made, instead of what `step.pt` of each parameter, `zero/optimizer_state.pt` or
            `*_model_states.pt` say.

    Returns:
        `like.state`.

    Raises:
        TypeError: `like` is not an attached optimizer.
        FileNotFoundError: the directory has no folder `zero`.
        ValueError: `step` is not a non-negative int; parameters or tensors are missing, unexpected, or of another shape
            or dtype, all of them named; or a file has something else than DeepSpeed writes, or is compressed.
        RuntimeError: only some ranks call it, as in `zf.load`.

    Warns:
        UserWarning: the directory lacks frozen parameters; the model's stay as they are.

    Examples:
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
    found = Found()
    failure: Exception | None = None
    try:
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            right = "zf.load_deepspeed(directory, like=opt, step=100)"
            why = "step is a number of updates, an int from 0"
            raise ValueError(explain(f"load_deepspeed(step={step!r})", why, right))
        found = _found(Path(directory), like, step)
    except (ValueError, OSError) as error:
        failure = error
    raise_on_all_ranks(failure, checkpoint_group(state.layout.placement))
    like.load_state(_filled(like, found))
    with torch.no_grad():
        for name, buffer in buffers_in(like._own.model):
            if name in found.buffers:
                buffer.copy_(found.buffers[name])
    if found.kept:
        warnings.warn(
            f"zf.load_deepspeed({os.fspath(directory)!r}): the directory does not have these frozen parameters; "
            f"the model's stay as they are: {', '.join([repr(path)[1:-1] for path in found.kept])}.",
            stacklevel=users_line(),
        )
    return like.state


@dataclass
class Found:
    """The contents of a directory that a model can load.

    Attributes:
        files: contents by leaf and name of the file.
        buffers: the model's buffers, by name.
        kept: frozen parameters that the directory lacks.
        updates: how many updates were made, if it says so.
    """

    files: Files = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    updates: int | None = None


def _filled(opt: Optimizer, found: Found) -> State:
    """The state with the contents of the files, and initial states where there is no file."""
    state, files = opt.state, found.files
    most = max((int(x) for (_, name), x in files.items() if name == STEP), default=found.updates)
    most = int(state.step) if most is None else most
    updates = most if found.updates is None else found.updates

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
        if e.of_leaf or name not in COUNTS:
            return e.value
        # DeepSpeed may make a step without gradients before the first; then its optimizer counts one more than the run.
        return torch.full_like(e.value, most if e.owner else updates)

    road, leaves = opt._own.pipe.road, rebuild(state, weight).leaves
    with torch.no_grad():
        # DeepSpeed saves what the model computes with; `stored_part` maps it to the stored form, through all views.
        read_here = [leaf for leaf in state.layout.leaves if (leaf.path, WEIGHT) in files]
        leaves = {**leaves, **{leaf.path: stored_part(road, leaves[leaf.path], leaf) for leaf in read_here}}
    fresh = State(leaves, init_transforms(opt._own.pipe, leaves), state.step, state.micro_step, state.layout)
    return rebuild(fresh, kept)


def _found(directory: Path, opt: Optimizer, step: int | None) -> Found:
    """All files, memory-mapped.

    Raises:
        FileNotFoundError: there is no folder `zero`, and the model's files are not of stage 0.
        ValueError: files that do not fit, all of them by leaf.
    """
    try:
        run = read_run(directory)
        if (directory / "zero").is_dir():
            files, bad = _universal(directory, opt, run, step)
        elif run.optimizer:
            files, bad = _stage_0(opt, run)
        else:
            raise FileNotFoundError(_no_folder(directory))
    except (AttributeError, LookupError, TypeError, RuntimeError) as error:
        # A container is of another kind than DeepSpeed writes. Torch's tensors raise a RuntimeError.
        why = f"what it has is not as DeepSpeed writes it ({type(error).__name__}: {str(error).splitlines()[:1]})"
        raise damaged(directory, why) from error
    found = Found(files, updates=run.updates if step is None else step)
    if step is not None:
        files.update({key: step for key in files if key[1] == STEP})
    bad += _frozen(opt, run, found, directory / "zero")
    bad += _buffers(opt, run, found, directory / "zero")
    if bad:
        right = "the universal checkpoint of this model, with the optimizer that trained it"
        raise ValueError(bad_leaves(f"zf.load_deepspeed({str(directory)!r}): it does not fit", bad, right))
    return found


def _no_folder(directory: Path) -> str:
    source = directory
    if (directory / "latest").is_file():
        source = directory / (directory / "latest").read_text().strip()
    command = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state"
    right = f"{command} --input_folder {source} --output_folder {source}_universal"
    why = "DeepSpeed's own checkpoints are sharded for its ranks and pickled with its classes; convert this one first"
    return explain(f"zf.load_deepspeed({str(directory)!r}): no folder zero in it", why, right)


def _universal(directory: Path, opt: Optimizer, run: Run, step: int | None) -> tuple[Files, list[tuple[str, str]]]:
    """The files of trained parameters and of their states, and what does not fit."""
    folder = directory / "zero"
    layout, wanted = opt.state.layout, dict(_wanted(opt))
    folders: dict[str, set[str]] = {x.name: {f.stem for f in x.glob("*.pt")} for x in folder.iterdir() if x.is_dir()}
    names: dict[str, str] = {}
    for path, name in zip(layout.at, layout.paths, strict=True):
        # A tied parameter is read by the name with moments: the others only have a copy in the compute dtype.
        if path is not None and name in folders and len(folders[name]) > len(folders.get(names.get(path, ""), ())):
            names[path] = name
    bad = [(p, "has no folder in zero") for p in dict.fromkeys(p for p, _ in wanted) if p not in names]
    buffers = {name for name, _ in buffers_in(opt._own.model)}
    extra = folders.keys() - set(layout.paths) - buffers
    bad += [(name, "is in the checkpoint and not in the model") for name in sorted(extra)]
    counts = read_counts(directory, run.groups)
    files: Files = {}
    for path in dict.fromkeys(p for p, _ in wanted if p in names):
        files_of_name = folders[names[path]]
        of_leaf = {name for p, name in wanted if p == path}
        bad += [(path, f"{name}.pt is missing") for name in sorted(of_leaf - files_of_name - {STEP})]
        bad += [(path, f"{name}.pt is of another optimizer") for name in sorted(files_of_name - of_leaf - {STEP})]
        # The count of updates is read even if the optimizer keeps none: schedules go on from it.
        for name in sorted(files_of_name & (of_leaf | {STEP})):
            x = files[path, name] = _tensor(folder / names[path] / f"{name}.pt")
            if name == STEP:
                files[path, name] = as_count(x, str(folder / names[path] / "step.pt"))
            elif problem := _misfit(x, *wanted[path, name], name == WEIGHT):
                bad.append((path, f"{name}.pt {problem}"))
        if STEP not in files_of_name:
            common = counts.get(None, run.updates)
            count = counts.get(names[path], common) if step is None else step
            if count is not None:
                files[path, STEP] = count
            elif STEP in of_leaf:
                says = "neither step.pt nor zero/optimizer_state.pt nor *_model_states.pt says how many updates were"
                bad.append((path, f"{says} made: zf.load_deepspeed(directory, like=opt, step=...)"))
    return files, bad


def _stage_0(opt: Optimizer, run: Run) -> tuple[Files, list[tuple[str, str]]]:
    """The same from a checkpoint of stage 0: the state dict of torch's optimizer, by number, and the whole model."""
    saved = run.optimizer or {}
    layout, wanted = opt.state.layout, dict(_wanted(opt))
    # In 16 bits DeepSpeed wraps the optimizer, and keeps fp32 parameters beside it.
    inner = saved.get("optimizer_state_dict", saved)
    masters = [x for group in saved.get("fp32_groups") or [] for x in group]
    groups, kept = inner.get("param_groups") or [], inner.get("state") or {}
    numbers = [i for group in groups for i in group["params"]]
    if len(groups) != 1 or len(numbers) != len(layout.trained):
        lengths = [len(group["params"]) for group in groups]
        why = f"its parameters have numbers, in groups of {lengths}, and here {len(layout.trained)} are trained"
        return {}, [("optimizer", f"{why}, so their names are unknown: save with zero_optimization.stage 1")]
    files: Files = {}
    bad: list[tuple[str, str]] = []
    for place, (number, path) in enumerate(zip(numbers, layout.trained, strict=True)):
        names = [n for p, n in zip(layout.at, layout.paths, strict=True) if p == path and n in run.tensors]
        own = dict(kept.get(number) or {})
        if names:
            own[WEIGHT] = masters[place].detach() if masters else run.tensors[names[0]]
        of_leaf = {name for p, name in wanted if p == path}
        bad += [(path, f"no {name}") for name in sorted(of_leaf - own.keys())]
        bad += [(path, f"{name} is of another optimizer") for name in sorted(own.keys() - of_leaf - {STEP})]
        for name in sorted(own.keys() & (of_leaf | {STEP})):
            files[path, name] = as_count(own[name], f"the optimizer's {STEP} of {path}") if name == STEP else own[name]
            if name != STEP and (problem := _misfit(own[name], *wanted[path, name], name == WEIGHT)):
                bad.append((path, f"{name} {problem}"))
    return files, bad


def _frozen(opt: Optimizer, run: Run, found: Found, folder: Path) -> list[tuple[str, str]]:
    """Find the frozen parameters, and return what does not fit."""
    layout = opt.state.layout
    names: dict[str, list[str]] = {}
    for path, name in zip(layout.at, layout.paths, strict=True):
        if path is not None:
            names.setdefault(path, []).append(name)
    bad = []
    for leaf in layout.leaves:
        if leaf.path in layout.trained:
            continue
        # If an earlier run trained it, the folder has it in fp32.
        x = next((x for name in names[leaf.path] if (x := _beside(name, run, folder)) is not None), None)
        if x is None:
            found.kept.append(leaf.path)
            continue
        found.files[leaf.path, WEIGHT] = x
        shape = leaf.shape if leaf.within is None else torch.Size(leaf.within.shape)
        if problem := _misfit(x, shape, x.dtype, True):
            bad.append((leaf.path, f"fp32.pt {problem}"))
    return bad


def _buffers(opt: Optimizer, run: Run, found: Found, folder: Path) -> list[tuple[str, str]]:
    """Find the buffers, and return what does not fit."""
    bad = []
    for name, buffer in buffers_in(opt._own.model):
        x = run.tensors.get(name)
        if (x := _beside(name, run, folder) if x is None else x) is None:
            continue
        if x.shape != buffer.shape and x.shape != (buffer.numel(),):
            bad.append((name, f"is a buffer of shape {tuple(x.shape)} instead of {tuple(buffer.shape)}"))
        found.buffers[name] = x.reshape(buffer.shape) if x.numel() == buffer.numel() else x
    return bad


def _beside(name: str, run: Run, folder: Path) -> Tensor | None:
    """A tensor that is not trained, from its folder or else from the model's files."""
    file = folder / name / f"{WEIGHT}.pt"
    return _tensor(file) if file.is_file() else run.tensors.get(name)


def _wanted(opt: Optimizer) -> Iterator[tuple[tuple[str, str], tuple[torch.Size, torch.dtype]]]:
    """Shape and dtype by leaf and file, for parameters and the optimizer's states."""
    trained = set(opt.state.layout.trained)
    made_by = {part.name for part in opt._own.pipe.parts if part.facts.optimizes}
    for e in entries(opt.state):
        if e.path in trained and e.owner == "params":
            yield (e.path, WEIGHT), (torch.Size(e.shape), e.value.dtype)
        elif e.path in trained and e.owner in made_by:
            name = e.slot.rpartition("/")[2]
            yield (e.path, STEP if name == COUNTS[0] else name), (torch.Size(e.shape), e.value.dtype)


def _tensor(file: Path) -> Any:
    x = read(file)
    return x.get("param") if isinstance(x, dict) else x


def _misfit(x: Any, shape: torch.Size, dtype: torch.dtype, cast: bool) -> str:
    """Why a tensor does not fit, or "". A flat one with as many elements fits."""
    if not isinstance(x, Tensor) or x.shape not in (shape, (shape.numel(),)):
        return f"is {f'of shape {tuple(x.shape)}' if isinstance(x, Tensor) else kind_of(x)} instead of {tuple(shape)}"
    return "" if cast or x.dtype == dtype else f"is of {x.dtype} instead of {dtype}; dtypes are not changed silently"
