"""`save` and `load`: a state on disk, by path, for any number of ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._attach import Optimizer
from ._entries import Entry, entries, rebuild
from ._errors import bad_leaves, explain
from ._param_groups import packed
from ._savers import check_replicas, group_of, meet, row_major
from ._state import State
from ._tree import Placement, tree_map

# What a transform of another library may keep besides tensors.
PLAIN = (bool, int, float, str, type(None))


def save(directory: str | os.PathLike, state: State | Optimizer) -> None:
    """Write a checkpoint; one that is there is replaced.

    Every tensor is kept by its path (`params/blocks.0.weight`, `adamw/exp_avg/blocks.0.weight`), whole or in
    the pieces that ranks have, so any number of ranks can load it. A save that fails or dies at any moment
    leaves the checkpoint that was there: the new one takes its place in a single step, at the end. It needs
    room for both until then.

    With a sharded state every rank calls it, and all must see the same file system. Where parts of a job train
    a model each (a pipeline over one axis of a mesh), all call it together, each part with its own directory.

    Args:
        directory: where; made if it is not there.
        state: of `zf.init` or of a step. Of an attached model `opt.state`, or `opt` itself, which keeps the
            learning rates of `param_groups` too: what a scheduler of torch.optim has set is in no state.

    Raises:
        TypeError: no state, or a value in it that is neither a tensor nor a plain number or text.
        OSError: the disk is full or the directory cannot be written. Nothing is lost.
        RuntimeError: only some ranks call it (`if rank == 0: zf.save(...)`), or some make another call. A rank that is
            late is waited for as long as it is seen to compute, and else for the 25 seconds that
            ZEROFN_TOGETHER_TIMEOUT in the environment may set otherwise. Nothing is written.

    >>> import tempfile, torch, zerofn as zf
    >>> tx = zf.adamw(lr=1e-3)
    >>> state = zf.init(tx, {"w": torch.arange(3.0)})
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     zf.save(directory, state)
    ...     loaded = zf.load(directory, like=zf.init(tx, {"w": torch.zeros(3)}))
    >>> loaded.params["w"]
    tensor([0., 1., 2.])
    """
    from ._dcp_writer import Piece, save_pieces

    groups = [_numbers(packed(g)) for g in state.param_groups] if isinstance(state, Optimizer) else None
    given = state_of(state, "zf.save(directory, {})")
    placement = given.layout.placement
    meet("zf.save(directory, state)", placement)
    group = group_of(placement, directory)
    pieces: dict[str, Piece] = {}
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    bad = []
    for e in entries(given):
        if e.key in tensors or e.key in values:
            bad.append((e.key, "two entries have this name; give the transform another: tx.named('other')"))
        elif isinstance(e.value, Tensor):
            if e.value.is_meta:
                bad.append((e.key, "is on the meta device and has no data"))
            else:
                apart = e.owner in placement.apart
                for rank in range(placement.together if apart else 1):
                    about = {"dtype": _dtype(e.value.dtype), "shape": list(e.shape)}
                    tensors[_name(e, rank if apart else None)] = about
                name = _name(e, group.rank if apart else None)
                pieces[name] = Piece(row_major(e.value), e.offset or 0, e.shape)
        elif isinstance(e.value, PLAIN):
            values[e.key] = e.value
        else:
            bad.append((e.key, f"a {type(e.value).__name__} cannot be saved"))
    if bad:
        right = "a state of tensors, numbers and text, each under a name of its own"
        raise TypeError(bad_leaves("zf.save: this state cannot be saved", bad, right))
    check_replicas(given, group)
    header = {
        "zerofn": _version(),
        "torch": torch.__version__,
        "ranks": placement.together,
        "values": values,
        "param_groups": groups,
        "tensors": tensors,
    }
    try:
        save_pieces(pieces, Path(directory), group, header)
    except TimeoutError:
        raise  # of the lock: no disk has failed
    except OSError as error:
        raise _unwritten(directory, error) from error


def load(directory: str | os.PathLike, like: State | Optimizer) -> State:
    """Read a checkpoint into a new state; going on from it is going on from what was saved, bit for bit.

    Nothing in a checkpoint is run, whoever wrote it: it holds JSON and numbers. Every piece that is read is
    checked against its checksum.

    Args:
        directory: of `zf.save`.
        like: a state of the same pipeline and model: `zf.init(tx, params)`. It gives structure, devices and
            dtypes, and is not written. The number of ranks may be another than when it was saved. Or an
            attached model's `opt`, which is written, in place, once everything has been read.

    Returns:
        The state; with `like=opt`, `opt.state`.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: of another pipeline or model, with every missing, unexpected, misshapen and mistyped
            path; of another format version; truncated or changed.
        RuntimeError: only some ranks call it, as for `save`.

    >>> import tempfile, torch, zerofn as zf
    >>> tx = zf.adamw(lr=1e-3)
    >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     zf.save(directory, state)
    ...     loaded = zf.load(directory, like=zf.init(tx, {"w": torch.zeros(2)}))
    >>> int(loaded.step), torch.equal(loaded.params["w"], state.params["w"])
    (1, True)
    """
    from ._dcp_reader import Piece, load_pieces

    model = state_of(like, "zf.load(directory, like={})")
    placement = model.layout.placement
    meet("zf.load(directory, like=state)", placement)
    group = group_of(placement)
    wanted = entries(model)
    new: dict[str, Tensor] = {}
    flat: dict[str, Tensor] = {}
    for e in wanted:
        if isinstance(e.value, Tensor):
            device = "cpu" if e.value.is_meta else e.value.device
            pinned = device != "cpu" and e.value.device.type == "cpu" and e.value.is_pinned()
            x = new[e.key] = torch.empty_like(e.value, device=device, pin_memory=pinned, requires_grad=False)
            flat[e.key] = x.view(-1) if x.is_contiguous() else x.new_empty(x.numel())

    def choose(manifest: dict[str, Any]) -> dict[str, Piece]:
        bad = _differences(wanted, manifest)
        if bad:
            raise ValueError(_misfit_message(directory, bad))
        return {
            _source(e, manifest, placement, group.rank): Piece(flat[e.key], e.offset or 0, e.shape)
            for e in wanted
            if e.key in new
        }

    manifest = load_pieces(Path(directory), group, choose)
    if manifest["ranks"] != placement.together:
        own = [e for e in wanted if e.key in new and e.key not in manifest["tensors"]]
        _share_windows(own, flat, manifest, lambda pick: load_pieces(Path(directory), group, pick))
    for key, x in new.items():
        if not x.is_contiguous():
            x.copy_(flat[key].view(x.shape))
    state = rebuild(model, lambda e: new[e.key] if e.key in new else manifest["values"][e.key])
    if isinstance(like, Optimizer):
        like.load_state(state, manifest["param_groups"])
        return like.state
    return state


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A group as JSON can hold it."""
    return tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, group)


def state_of(given: Any, where: str) -> State:
    state = given.state if isinstance(given, Optimizer) else given
    if not isinstance(state, State):
        wrong = where.format(type(given).__name__)
        raise TypeError(explain(wrong, "it is not a state", where.format("zf.init(tx, params)")))
    return state


def _name(e: Entry, rank: int | None) -> str:
    return e.key if rank is None else f"{e.key}@{rank}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version() -> str:
    try:
        return version("zerofn")
    except PackageNotFoundError:
        return "unknown"


def _source(e: Entry, manifest: dict[str, Any], placement: Placement, rank: int) -> str:
    """Under which name an entry of `like` stands in the checkpoint."""
    if e.key in manifest["tensors"]:
        return e.key
    # Of another number of ranks the first one's, to which the others' are added.
    return _name(e, rank if manifest["ranks"] == placement.together else 0)


def _differences(wanted: list[Entry], manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Every path in which a checkpoint is not one of this state, and how."""
    saved = {_base(name, manifest): about for name, about in manifest["tensors"].items()}
    found = {**dict.fromkeys(manifest["values"]), **saved}
    bad = []
    for e in wanted:
        if e.key not in found:
            bad.append((e.key, "missing: the checkpoint does not have it"))
            continue
        about = found.pop(e.key)
        if (about is None) == isinstance(e.value, Tensor):
            there, here = ("a plain value", "a tensor") if about is None else ("a tensor", "a plain value")
            bad.append((e.key, f"{there} in the checkpoint, {here} here"))
        elif about is not None:
            bad += [(e.key, reason) for reason in _misfits(e, about)]
    return bad + [(key, "unexpected: only the checkpoint has it") for key in found]


def _base(name: str, manifest: dict[str, Any]) -> str:
    """A name without its rank. A key may hold the sign itself, but then not for rank after rank."""
    base, _, rank = name.rpartition("@")
    apart = rank.isdecimal() and all(f"{base}@{r}" in manifest["tensors"] for r in range(manifest["ranks"]))
    return base if apart and manifest["ranks"] > 1 else name


def _misfits(e: Entry, about: dict[str, Any]) -> list[str]:
    found = []
    shape, dtype = tuple(about["shape"]), about["dtype"]
    # A rank whose part of every leaf is empty cannot tell shards from a slot that has no elements at all.
    vacant = e.offset is not None and e.value.numel() == 0 and shape == (0,)
    if shape != tuple(e.shape) and not vacant:
        found.append(f"shape {shape} in the checkpoint, {tuple(e.shape)} here")
    if dtype != _dtype(e.value.dtype):
        found.append(f"{dtype} in the checkpoint, {_dtype(e.value.dtype)} here")
    return found


def _misfit_message(directory: Any, bad: list[tuple[str, str]]) -> str:
    right = "zf.load(directory, like=zf.init(tx, params)) with the pipeline and the model that saved it"
    if all(" in the checkpoint, " in reason and not reason.startswith("shape") for _, reason in bad):
        right += (
            "; dtypes are never changed silently. To change the pipeline, load with the old one and begin anew:\n"
            "         old = zf.load(directory, like=zf.init(old_tx, params))\n"
            "         state = zf.init(new_tx, zf.full_params(old_tx, old))"
        )
    return bad_leaves(f"the checkpoint in {directory} does not fit this state", bad, right)


def _share_windows(
    own: list[Entry], flat: dict[str, Tensor], manifest: dict[str, Any], read: Callable[[Callable], dict[str, Any]]
) -> None:
    """Give every rank the mean of what each of the ranks that saved had for itself, on its way to a reduction.

    The reduction is a mean over ranks, and the mean of equal things is any of them: so it comes out as it would have.
    One rank's are read at a time.

    Args:
        own: what ranks had for themselves.
        flat: by key, what to write into; holds the first rank's.
        manifest: of the checkpoint.
        read: fills the pieces that its argument gives for a manifest.
    """
    from ._dcp import Piece

    if not own:
        return
    ranks = manifest["ranks"]
    total = {e.key: torch.zeros_like(flat[e.key], dtype=_sum_dtype(flat[e.key])) for e in own}
    here = flat
    for rank in range(ranks):
        if rank:
            here = {e.key: torch.empty_like(flat[e.key]) for e in own}
            names = {_name(e, rank): Piece(here[e.key], 0, e.shape) for e in own}
            if read(lambda _, names=names: names) != manifest:
                raise ValueError("the checkpoint was written anew while it was read; load it again.")
        for e in own:
            seen = here.get(e._replace(slot="seen").key)
            # `accumulate` does not clear a sum that it has forgotten.
            if seen is None or bool(seen.any()):
                total[e.key] += here[e.key].to(total[e.key].dtype)
    for key, x in total.items():
        into = flat[key]
        into.copy_(x / ranks if into.is_floating_point() else x.bool() if into.dtype == torch.bool else x // ranks)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64


def _unwritten(directory: Any, error: OSError) -> OSError:
    """The error of a disk, with what has become of the checkpoint."""
    notes = getattr(error, "__notes__", [])
    where = "".join(f" {note}" for note in notes if note.startswith("on rank"))
    fate = "".join(f"; {note}" for note in notes if not note.startswith("on rank"))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    right = "free space; room is needed for the old and the new checkpoint" if full else "another directory"
    message = explain(f"zf.save({str(directory)!r}) could not write{where}", f"{error.strerror or error}{fate}", right)
    return type(error)(error.errno, message) if error.errno else type(error)(message)
