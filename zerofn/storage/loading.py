"""`load`: read a checkpoint into a state of the same pipeline, or what fits of another pipeline's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._errors import explain
from ..core.arguments import check_flag
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import Entry, before, entries, rebuild
from ..core.tensor_parallel_leaves import joined
from ..core.transform import Transform
from ..core.wrapper_names import warn_of_other_names
from ..eager.optimizer import Optimizer
from ..pure.states import pipe_of
from ..pure.uncompiled import kept_out_of_graphs
from ..ranks.background_thread import settle
from .buffers import buffers_of, load_with_buffers, warn_of_missing, without_buffers
from .checkpoint import state_of
from .checkpoint_match import copies_in, differences, in_other_order, misfit_message, name_to_read, with_names_of
from .files import absolute_path
from .partial_load import Loaded, PartialLoad, groups_by_name
from .saving_ranks import checkpoint_group, wait_for_all_ranks
from .window_resharding import check_views, share_windows


@overload
def load(directory: str | os.PathLike, like: State | Optimizer, *, strict: Literal[True] = True) -> State: ...
@overload
def load(
    directory: str | os.PathLike, like: State | Optimizer, *, strict: Literal[False], tx: Transform | None = None
) -> tuple[State, Loaded]: ...
@kept_out_of_graphs("it reads files", "zf.load(directory, state), outside of what is compiled")
def load(
    directory: str | os.PathLike, like: State | Optimizer, *, strict: bool = True, tx: Transform | None = None
) -> State | tuple[State, Loaded]:
    """Read a checkpoint into a new state; going on from it is going on from what was saved, bit for bit.

    Nothing in a checkpoint is run, whoever wrote it: it holds JSON and numbers, each piece with a checksum.

    Args:
        directory: of `zf.save`.
        like: a state of the same pipeline and model, `zf.init(tx, params)`, which gives structure, devices and dtypes,
            on any number of ranks, and is not written: with `strict` one that was donated will do. Or an attached
            model's `opt`, which is written, in place, once everything has been read, with its param_groups and the
            module's buffers; these stay as they are, with a warning, if the checkpoint has none (that of a state, or
            of an older version).
        strict: whether it must be a checkpoint of this very pipeline and model. `False` loads what has the same path,
            shape and dtype, when a clip or an average was added; the pipeline makes the rest anew for the parameters
            that were loaded, so that an average begins at them. A leaf for which one tensor of a transform is missing
            has all that the transform keeps of it made anew, its count too.
        tx: with `strict=False` and a state, its pipeline.

    Returns:
        The state; with `like=opt`, `opt.state`. With `strict=False` beside it a report, which prints: the names
        `loaded`, those `made_anew`, each with the reason, and those `left_out`, which only the checkpoint has.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: of another pipeline or model (every missing, unexpected, misshapen and mistyped path is named) or
            format version; truncated or changed; with `strict=False`, none of the parameters is in it.
        TypeError: `strict=False` of a state without `tx`, or `tx` without it.
        RuntimeError: only some ranks call it, as for `save`; with `strict=False`, `like` was donated or half written.

    >>> import tempfile, torch, zerofn as zf
    >>> tx, params = zf.adamw(lr=1e-3), {"w": torch.zeros(2)}
    >>> longer = zf.chain(tx, zf.ema(0.9))
    >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, params))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     zf.save(directory, state)
    ...     loaded = zf.load(directory, like=zf.init(tx, params))
    ...     _, report = zf.load(directory, like=zf.init(longer, params), strict=False, tx=longer)
    >>> int(loaded.step), torch.equal(loaded.params["w"], state.params["w"])
    (1, True)
    >>> print(report)
    loaded 7 tensors and numbers
      made anew: ema/average/w (missing: the checkpoint does not have it)
    """
    check_flag("load", "strict", strict)
    opt = like if isinstance(like, Optimizer) else None
    state = state_of(like, "zf.load(directory, like={})", form=strict)
    path = absolute_path("zf.load({}, like=state)", directory)
    return _load(directory, path, state, opt, strict, _pipe(state, opt, strict, tx))


def _load(
    directory: Any, path: Path, like: State, opt: Optimizer | None, strict: bool, pipe: Pipeline | None
) -> State | tuple[State, Loaded]:
    """Read into new memory on all ranks; an attached model is written only once that has succeeded."""
    from .dcp_reader import load_pieces

    settle()
    placement = like.layout.placement
    wait_for_all_ranks("zf.load(directory, like=state)", placement)
    group = checkpoint_group(placement)
    reading = _Reading(directory, like, opt, strict)
    manifest = load_pieces(path, group, reading.choose, reading.renamed)
    if copies_in(manifest) != placement.copies:
        sums = [e for e in reading.read if e.key not in manifest["tensors"]]
        share_windows(sums, reading.flat, manifest, lambda choose: load_pieces(path, group, choose, reading.renamed))
        held = [e for e in reading.entries if e.owner in placement.apart and e.key in reading.flat]
        check_views([*sums, *held], reading.flat, manifest, placement.later)
    reading.finish()
    warn_of_other_names(f"zf.load({str(directory)!r}, ...)", reading.other_names)
    if pipe is None:
        state = rebuild(like, reading.value)
    else:
        reading.partial.agree(group)
        reading.partial.check(reading.entries)
        state = reading.partial.state(like, pipe, reading.value)
    if opt is not None:
        state = _write_into(opt, state, reading)
    return state if strict else (state, reading.partial.report(reading.saved_entries()))


def _write_into(opt: Optimizer, state: State, reading: _Reading) -> State:
    """Write state, learning rates and buffers into an attached model, in place."""
    buffers = [e for e in reading.buffers if e.key not in reading.partial.anew]
    if reading.manifest.get("buffers") is None:
        warn_of_missing(reading.directory, buffers, reading.manifest)
        buffers = []
    groups = reading.manifest["param_groups"]
    groups = groups if reading.strict else groups_by_name(opt, groups)
    load_with_buffers(opt, "zf.load", state, groups, buffers, reading.new)
    return opt.state


class _Reading:
    """The entries of a state and the buffers of a module that are read, and the memory that they are read into.

    Attributes:
        new: by key, a tensor like the entry's own.
        flat: by key, the memory to read into: `new` as one dimension where it is contiguous.
        manifest: of the checkpoint; set by `choose`, as `read` and `wholes`.
        read: the entries that are read.
        other_names: by our name, the checkpoint's, where they differ by what wrappers of modules add.
        wholes: entries whose elements the checkpoint has in another order: memory for the whole tensor, and the order.
    """

    def __init__(self, directory: Any, like: State, opt: Optimizer | None, strict: bool):
        self.directory, self.placement, self.opt, self.strict = directory, like.layout.placement, opt, strict
        self.entries = entries(like)
        self.buffers = [] if opt is None else buffers_of(opt._own.model)
        self.partial = PartialLoad(directory)
        self.manifest: dict[str, Any] = {}
        self.other_names: dict[str, str] = {}
        self.read: list[Entry] = []
        self.wholes: list[tuple[Entry, Tensor, Any]] = []
        every = [*self.entries, *self.buffers]
        self.new = {e.key: _empty(e.value) for e in every if isinstance(e.value, Tensor)}
        self.flat = {key: x.view(-1) if x.is_contiguous() else x.new_empty(x.numel()) for key, x in self.new.items()}

    def saved_entries(self) -> list[Entry]:
        """The entries to look for: a checkpoint of a state has no buffers."""
        return self.entries if self.manifest.get("buffers") is None else [*self.entries, *self.buffers]

    def renamed(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The manifest by our names, where its own differ by what wrappers of modules add."""
        manifest, self.other_names = with_names_of([*self.entries, *self.buffers], manifest)
        return manifest

    def choose(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The pieces to read, by their names in the checkpoint."""
        from .dcp import Piece

        self.manifest = manifest
        wanted = self.saved_entries()
        # A state has no buffers; those of the module that was saved with it are left out.
        bad = differences(wanted, without_buffers(manifest) if self.opt is None else manifest)
        if bad and self.strict:
            raise ValueError(misfit_message(self.directory, bad))
        self.partial.note(bad, wanted)
        # Entries that older checkpoints do not have, with the value that they had then.
        defaults = {e.key: x for e in self.entries if e.key not in manifest["tensors"] and (x := before(e)) is not None}
        for key, x in defaults.items():
            self.flat[key].fill_(x)
        skipped = defaults.keys() | self.partial.anew.keys()
        self.read = [e for e in wanted if e.key in self.new and e.key not in skipped]
        pieces = {}
        for e in self.read:
            name = name_to_read(e, manifest, self.placement)
            about = manifest["tensors"].get(name)
            if in_other_order(e, about):
                # This rank's elements may be anywhere in the tensor, so all of it is read.
                whole = torch.empty(torch.Size(e.shape), dtype=e.value.dtype)
                self.wholes.append((e, whole, about.get("boxes")))
                pieces[name] = Piece(whole.view(-1), 0, e.shape)
            else:
                pieces[name] = Piece(self.flat[e.key], e.offset or 0, e.shape)
        return pieces

    def finish(self) -> None:
        """Fill `new` from what has been read in another order or into other strides."""
        for e, x, boxes in self.wholes:
            self.flat[e.key].copy_(e.part(x if boxes is None else joined(x.view(-1), e.shape, boxes)).reshape(-1))
        self.wholes.clear()
        for key, x in self.new.items():
            if not x.is_contiguous():
                x.copy_(self.flat[key].view(x.shape))

    def value(self, e: Entry) -> Any:
        return self.new[e.key] if e.key in self.new else self.manifest["values"][e.key]


def _pipe(like: State, opt: Optimizer | None, strict: bool, tx: Transform | None) -> Pipeline | None:
    """The pipeline that makes what the checkpoint does not have."""
    if strict or opt is not None:
        if tx is not None:
            why = "tx makes what a checkpoint does not have, of a state and with strict=False"
            raise TypeError(explain("zf.load(directory, like, tx=tx)", why, "zf.load(directory, like=like)"))
        return None if strict or opt is None else opt._own.pipe
    if tx is None:
        why = "what the checkpoint does not have is made by the pipeline, and a state does not say by which"
        right = "zf.load(directory, like=state, strict=False, tx=tx), or like=opt of an attached model"
        raise TypeError(explain("zf.load(directory, like=state, strict=False)", why, right))
    return pipe_of(tx, like, "zf.load")


def _empty(like: Tensor) -> Tensor:
    """Memory for a tensor that is read: on the same device, pinned alike; on the CPU for a meta tensor."""
    device = "cpu" if like.is_meta else like.device
    pinned = device != "cpu" and like.device.type == "cpu" and like.is_pinned()
    return torch.empty_like(like, device=device, pin_memory=pinned, requires_grad=False)
