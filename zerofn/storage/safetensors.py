"""Exports and loads models in the safetensors format."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, users_line
from ..core.bucketed_views import seen_part, stored_part
from ..core.facts import AVERAGE
from ..core.layout import Leaf, as_complex, as_real, joined
from ..core.pipeline import Pipeline, init_transforms
from ..core.state import State
from ..core.state_entries import Entry, entries, in_given_form
from ..core.transform import Transform
from ..core.uncompiled import kept_out_of_graphs
from ..core.wrapper_names import remedy
from ..eager.optimizer import Optimizer
from ..pure.api import pipe_of
from ..ranks.backend import gather_objects
from ..ranks.collectives import all_gather_into
from ..ranks.group import Group
from .files import replace_file
from .saving import buffers_of, checkpoint_group, load_with_buffers, raise_on_all_ranks, state_of, wait_for_all_ranks

# ----------------------------------------------------------------------------------------------------------------------
# `export_safetensors` writes the full model into one file of the safetensors format.


@kept_out_of_graphs("it writes a file", "zf.export_safetensors(path, state), outside of what is compiled")
def export_safetensors(
    path: str | os.PathLike, state: State | Optimizer, of: str = "params", tx: Transform | None = None
) -> None:
    """Write the full model under its own names, in the dtype in which it is stored, in the `safetensors` format.

    The numbers are those of `zf.full_params`: what the model computes with, before any cast. With a view of your own
    they may differ from the stored numbers (for example weights on a grid); `zf.save` keeps the stored numbers. fp32
    masters are written unchanged.

    Of tied parameters only the first name is written. The metadata maps each other name to this first name, and
    `safetensors.torch.load_model` ties them again. The file appears in one step when it is complete; a process that is
    killed before leaves a hidden one beside it, `.model.safetensors.<12 digits>.tmp`. Buffers of a module, such as
    running means, are not written: they are not parameters.

    With a sharded state every rank must call it. The first rank writes, and needs memory for the whole model.

    Args:
        path: of the file.
        state: of `zf.init` or of a step, or an attached model's `opt`.
        of: `"params"`, or the name of an `ema` for the averages.
        tx: the pipeline, needed if `state` is a state whose model sees parameters through a view of your own.

    Raises:
        ImportError: safetensors is not installed: `pip install 'zerofn[safetensors]'`.
        OSError: the file cannot be written. An old file is unchanged.
        ValueError: there is no such average; or parameters are of complex128, which the format does not have.
        RuntimeError: only some ranks call it, as for `zf.save`.
        TypeError: the state needs `tx`, because of a view of your own.

    Examples:
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
    _check_complex(given)
    pipe = _exporting_pipeline(state, tx)
    wait_for_all_ranks("zf.export_safetensors(path, state)", given.layout.placement)
    if isinstance(state, Optimizer):
        state._own.agree_on_writes()
    owner, slot = ("params", "") if of == "params" else (of, AVERAGE)
    found = {e.path: e for e in entries(given) if (e.owner, e.slot) == (owner, slot)}
    if not found:
        names = [name for name, own in given.transforms.items() if AVERAGE in own]
        why = f"this state has {names or 'no ema'}"
        right = f"export_safetensors(path, state, of={names[0]!r})" if names else "add zf.ema(0.999) to the pipeline"
        raise ValueError(explain(f"export_safetensors(of={of!r})", why, right))
    group = checkpoint_group(given.layout.placement, path)
    # An ema watches trainable leaves; frozen ones are as they are.
    params = {e.path: e for e in entries(given) if e.owner == "params"}
    leaves = {leaf.path: leaf for leaf in given.layout.leaves}
    tensors = {path: _gather(_seen(pipe, found.get(path, e), leaves[path]), group) for path, e in params.items()}
    tensors = {path: as_complex(x, leaves[path]) for path, x in tensors.items()}
    failure = None
    if group.rank == 0:
        names = zip(given.layout.paths, given.layout.at, strict=True)
        tied = {name: path for name, path in names if path not in (name, None)}
        try:
            _write(Path(path), lambda temporary: save_file(tensors, temporary, {"format": "pt", **tied}))
        except OSError as error:
            failure = error
    raise_on_all_ranks(failure, group)


def _check_complex(state: State) -> None:
    """Refuse complex numbers that the format does not have."""
    bad = [(x.path, f"{x.dtype.to_complex()}") for x in state.layout.complexes if x.dtype != torch.float32]
    if bad:
        wrong = "zf.export_safetensors of complex parameters that the format does not have: it has torch.complex64"
        raise ValueError(
            bad_leaves(wrong, bad, "zf.save(directory, state); or torch.save of zf.full_params(tx, state)")
        )


def _exporting_pipeline(state: State | Optimizer, tx: Transform | None) -> Pipeline | None:
    """The pipeline of a state; `None` if it was not given, for a state without a view of the user's."""
    if isinstance(state, Optimizer):
        return state._own.pipe
    pipe = None if tx is None else pipe_of(tx, state, "zf.export_safetensors")
    if pipe is None and (seen_by := state.layout.placement.seen_by):
        why = f"the model sees it through {', '.join(seen_by)}, and a state has only their names"
        right = "zf.export_safetensors(path, state, tx=tx), or of opt, an attached model's"
        raise TypeError(explain("zf.export_safetensors(path, state)", why, right))
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
        # safetensors raises its own exception, even if the disk is full.
        raise OSError(f"{path} could not be written: {error}") from error
    if not_durable is not None:
        warnings.warn(
            f"{path} is in place, but may not survive a loss of power: {not_durable}", stacklevel=users_line()
        )


def _gather(e: Entry, group: Group) -> Tensor:
    """All-gather a sharded tensor: the full one on the CPU of the first rank, an empty one on the others."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `load_safetensors` reads a file of the safetensors format. Each rank reads only the rows that it stores.


FLOATS = ("F64", "F32", "F16", "BF16")
COMPLEXES = ("C64",)


@kept_out_of_graphs("it reads files", "zf.load_safetensors(path, like=state), outside of what is compiled")
def load_safetensors(
    path: str | os.PathLike,
    like: State | Optimizer,
    tx: Transform | None = None,
    only: Callable[[str], bool] | None = None,
) -> State:
    """Read parameters by their names from a file of the `safetensors` format. Each rank reads only its shards.

    This reads files of `export_safetensors` and weights that others have trained: names are those of
    `model.state_dict()`. A rank reads only the rows that it keeps, so it needs no memory for the whole model; `like`
    may be a state of meta tensors. Numbers are cast to the stored dtype. The numbers of the file are those that the
    model will compute with: with a view of your own, `store` of the view converts them to stored numbers.

    At step 0 `load_safetensors` makes the states of transforms again, from the new parameters (an `ema` begins at
    them). At later steps it does not change the states of transforms.

    Args:
        path: a file, or the `.json` index that says in which of several files beside it each tensor is.
        like: a state, which is not written; or an attached model's `opt`, which is written in place, with the buffers
            that the file has. Of tied names one is enough.
        tx: the pipeline, if `like` is a state.
        only: a function that gets a tensor's name and returns whether to read this tensor; by default all tensors are
            read. If `like` is a state and the file has buffers, leave the buffers out, because a state has no place for
            them: `only=lambda name: "running_" not in name`.

    Returns:
        The state; with `like=opt`, `opt.state`.

    Raises:
        ImportError: safetensors is not installed: `pip install 'zerofn[safetensors]'`.
        FileNotFoundError: no such file.
        ValueError: tensors are missing, unexpected, of another shape or of an integer dtype; all are named.
        TypeError: `like` is a state, and there is no `tx`.
        RuntimeError: only some ranks call it, as for `zf.load`.

    Examples:
        >>> import tempfile, torch, zerofn as zf
        >>> tx = zf.chain(zf.shard(), zf.adamw(lr=1e-3))
        >>> like = zf.init(tx, {"w": torch.empty(2, 2, device="meta")})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     zf.export_safetensors(f"{directory}/a", zf.init(tx, {"w": torch.eye(2)}))
        ...     state = zf.load_safetensors(f"{directory}/a", like=like, tx=tx)
        >>> state.params["w"]
        tensor([[1., 0.],
                [0., 1.]])
    """
    safe_open = safetensors_function("safe_open", "zf.load_safetensors")
    state = state_of(like, "zf.load_safetensors(path, like={})")
    opt = like if isinstance(like, Optimizer) else None
    pipe = _loading_pipeline(state, opt, tx)
    wait_for_all_ranks("zf.load_safetensors(path, like)", state.layout.placement)
    buffers = {e.path: e for e in buffers_of(opt._own.model)} if opt else {}
    leaves, others = _read_all(path, state, buffers, only, safe_open)
    with torch.no_grad():
        leaves = {leaf.path: stored_part(pipe.road, leaves[leaf.path], leaf) for leaf in state.layout.leaves}
    new = _with_parameters(state, leaves, pipe)
    if opt is None:
        return new
    found, values = [buffers[name] for name in others], {buffers[name].key: x for name, x in others.items()}
    load_with_buffers(opt, "zf.load_safetensors", new, None, found, values)
    return opt.state


def _with_parameters(state: State, leaves: dict[str, Tensor], pipe: Pipeline) -> State:
    """The state with new parameters; before the first step also with the states that transforms make from them."""
    fresh = state.micro_step.is_meta or not int(state.micro_step)
    transforms = init_transforms(pipe, leaves) if fresh else state.transforms
    step, micro_step = (torch.zeros((), dtype=x.dtype) if x.is_meta else x for x in (state.step, state.micro_step))
    return State(leaves, transforms, step, micro_step, state.layout)


def _read_all(
    path: Any, state: State, buffers: dict[str, Entry], only: Callable[[str], bool] | None, safe_open: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's shards of the parameters by path, and the file's buffers by name.

    Raises:
        ValueError, OSError: on every rank, if one could not read.
    """
    complexes = {leaf.path: leaf for leaf in state.layout.complexes}
    wanted = {e.path: in_given_form(e, complexes) for e in entries(state) if e.owner == "params"}
    leaves: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    failure: BaseException | None = None
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, "pt")) for file in _files(Path(path))]
            rows = {name: file.get_slice(name) for file in files for name in file.keys() if only is None or only(name)}  # noqa: SIM118
            names = _names(state, wanted, buffers, rows, path)
            leaves = {p: _read(rows[name], wanted[p]) for p, name in names.items() if p in wanted}
            others = {p: _read(rows[name], buffers[p]) for p, name in names.items() if p in buffers}
    except (ValueError, OSError) as error:
        failure = error
    except Exception as error:
        # safetensors raises its own exception.
        failure = OSError(f"{path} could not be read: {error}")
    raise_on_all_ranks(failure, checkpoint_group(state.layout.placement))
    for p, leaf in complexes.items():
        leaves[p] = as_real(leaves[p], leaf, flat=wanted[p].offset is not None)
    return leaves, others


def _loading_pipeline(state: State, opt: Optimizer | None, tx: Transform | None) -> Pipeline:
    if opt is not None:
        return opt._own.pipe
    if tx is None:
        why = "the pipeline makes the states of its transforms anew, and a state does not have its pipeline"
        right = "zf.load_safetensors(path, like=state, tx=tx), or like=opt of an attached model"
        raise TypeError(explain("zf.load_safetensors(path, like=state)", why, right))
    return pipe_of(tx, state, "zf.load_safetensors")


def _files(path: Path) -> list[Path]:
    if path.suffix != ".json":
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}. Of several files give the .json beside them that names them.")
        return [path]
    named = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    # The index may come from anybody, so only files in its own directory are opened.
    return [path.parent / Path(name).name for name in dict.fromkeys(named)]


def _names(
    state: State, wanted: dict[str, Entry], buffers: dict[str, Entry], here: dict[str, Any], path: Any
) -> dict[str, str]:
    """The name in the file of each leaf and each buffer.

    Raises:
        ValueError: tensors do not fit; all are named.
    """
    found, bad = {}, []
    leaf_of = dict(zip(state.layout.paths, state.layout.at, strict=True))
    for name in here:
        if (leaf := leaf_of.get(name)) is not None:
            found.setdefault(leaf, name)
        elif name in buffers:
            found[name] = name
        else:
            bad.append((name, "is in the file and not in the model"))
    for p, e in [*wanted.items(), *buffers.items()]:
        name = found.get(p, p)
        if name not in here:
            bad += [(p, "is in the model and not in the file")] if p in wanted else []
            continue
        shape, dtype = tuple(here[name].get_shape()), here[name].get_dtype()
        if shape != tuple(e.shape):
            bad.append((name, f"is of shape {shape} in the file and of {tuple(e.shape)} in the model"))
        elif p in wanted and dtype not in (COMPLEXES if e.value.is_complex() else FLOATS):
            bad.append((name, f"is of {dtype} in the file, whole numbers that another program knows how to read"))
    if bad:
        right = "a file of this model: zf.export_safetensors, or safetensors.torch.save_model"
        right += remedy(here)
        raise ValueError(bad_leaves(f"zf.load_safetensors({os.fspath(path)!r}): the file does not fit", bad, right))
    return found


def _read(part: Any, e: Entry) -> Tensor:
    """This rank's range of a tensor of the file, in the dtype and on the device of the state."""
    like, shape = e.value, tuple(e.shape)
    device = "cpu" if like.is_meta else like.device
    if e.offset is None:
        return part[...].to(device, like.dtype, copy=True).view(like.shape)
    if e.within is not None:
        return e.part(part[...]).to(device, like.dtype, copy=True)
    low, high = e.offset, e.offset + like.numel()
    if not shape:
        return part[...].view(1)[low:high].to(device, like.dtype, copy=True)
    row = max(1, torch.Size(shape[1:]).numel())
    first = low // row
    rows = part[first : max(first, -(-high // row))].reshape(-1)
    return rows[low - first * row : high - first * row].to(device, like.dtype, copy=True).view(like.shape)
