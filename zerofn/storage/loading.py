"""`load`: a checkpoint into a state, of the pipeline that saved it, or what fits of another's."""

from __future__ import annotations

import os
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
from ..eager.optimizer import Optimizer
from ..pure.states import pipe_of
from ..pure.uncompiled import outside_since
from ..ranks.background_thread import settle
from .buffers import buffers_of, check_can_be_written, tell_of_missing
from .buffers import without as without_buffers
from .buffers import write as write_buffers
from .checkpoint import state_of
from .checkpoint_match import copies_in, differences, misfit_message, reordered, source
from .files import place_of
from .partial_load import Loaded, Partial, groups_by_name
from .saving_ranks import group_of, meet
from .window_resharding import check_views, share_windows


@overload
def load(directory: str | os.PathLike, like: State | Optimizer) -> State: ...
@overload
def load(directory: str | os.PathLike, like: State | Optimizer, *, strict: Literal[True]) -> State: ...
@overload
def load(
    directory: str | os.PathLike, like: State | Optimizer, *, strict: Literal[False], tx: Transform | None = None
) -> tuple[State, Loaded]: ...
@outside_since("it reads files", "zf.load(directory, state), outside of what is compiled")
def load(
    directory: str | os.PathLike, like: State | Optimizer, *, strict: bool = True, tx: Transform | None = None
) -> State | tuple[State, Loaded]:
    """Read a checkpoint into a new state; going on from it is going on from what was saved, bit for bit.

    Nothing in a checkpoint is run, whoever wrote it: it holds JSON and numbers, each piece with a checksum.

    Args:
        directory: of `zf.save`.
        like: a state of the same pipeline and model, `zf.init(tx, params)`, which gives structure, devices and dtypes,
            on any number of ranks, and is not written. Or an attached model's `opt`, which is written, in place, once
            everything has been read, with its param_groups and the module's buffers; these stay as they are, with a
            warning, if the checkpoint has none (that of a state, or of an older version).
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
        RuntimeError: only some ranks call it, as for `save`.

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
    state = state_of(like, "zf.load(directory, like={})")
    place = place_of("zf.load({}, like=state)", directory)
    return _load(directory, place, state, opt, strict, _pipe(state, opt, strict, tx))


def _load(
    directory: Any, place: Any, model: State, opt: Optimizer | None, strict: bool, pipe: Pipeline | None
) -> State | tuple[State, Loaded]:
    """Read into new memory on all ranks; what is attached is written once that has ended well."""
    from .dcp_reader import load_pieces

    settle()
    meet("zf.load(directory, like=state)", model.layout.placement)
    group = group_of(model.layout.placement)
    wanted = _Wanted(directory, model, [] if opt is None else buffers_of(opt._model), opt is not None, strict)
    manifest = load_pieces(place, group, wanted.choose)
    if copies_in(manifest) != model.layout.placement.copies:
        own, placement = wanted.of_a_rank(manifest), model.layout.placement
        share_windows(own, wanted.flat, manifest, lambda pick: load_pieces(place, group, pick))
        held = [e for e in wanted.entries if e.owner in placement.apart and e.key in wanted.flat]
        check_views([*own, *held], wanted.flat, manifest, placement.later)
    new = wanted.read()
    partial = wanted.partial
    if pipe is None:
        state = rebuild(model, lambda e: wanted.value(e, manifest))
    else:
        partial.agree(group)
        partial.check(wanted.entries)
        state = partial.state(model, pipe, lambda e: wanted.value(e, manifest))
    if opt is not None:
        state = _written(opt, state, wanted, new, manifest)
    return state if strict else (state, partial.report(wanted.saved_entries(manifest)))


def _written(opt: Optimizer, state: State, wanted: _Wanted, new: dict[str, Tensor], manifest: dict[str, Any]) -> State:
    """The state of an attached model, with its rates and the module's buffers, in the memory that they have."""
    buffers = [e for e in wanted.buffers if e.key not in wanted.partial.anew]
    if manifest.get("buffers") is None:
        tell_of_missing(wanted.directory, buffers, manifest)
        buffers = []
    check_can_be_written("zf.load", buffers, new)
    groups = manifest["param_groups"]
    opt.load_state(state, groups if wanted.strict else groups_by_name(opt, groups))
    write_buffers(buffers, new)
    return opt.state


class _Wanted:
    """The entries of a state, and of the module beside it, that are to be read, and the memory to read them into."""

    def __init__(self, directory: Any, model: State, buffers: list[Entry], module: bool, strict: bool):
        self.directory, self.placement = directory, model.layout.placement
        self.entries, self.buffers, self.module, self.strict = entries(model), buffers, module, strict
        self.partial = Partial(directory)
        # What the checkpoint keeps in another order: the whole of it, and that order.
        self.otherwise: list[tuple[Entry, Tensor, Any]] = []
        every = [*self.entries, *buffers]
        self.new = {e.key: _empty(e.value) for e in every if isinstance(e.value, Tensor)}
        self.flat = {key: x.view(-1) if x.is_contiguous() else x.new_empty(x.numel()) for key, x in self.new.items()}

    def saved_entries(self, manifest: dict[str, Any]) -> list[Entry]:
        """The entries to look for: a checkpoint of a state has no buffers."""
        return [*self.entries, *(self.buffers if manifest.get("buffers") is not None else ())]

    def choose(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """What to read, by the names of the checkpoint."""
        from .dcp import Piece

        wanted = self.saved_entries(manifest)
        # A state has no buffers, and does not mind those of the module from which it was saved.
        bad = differences(wanted, manifest if self.module else without_buffers(manifest))
        if bad and self.strict:
            raise ValueError(misfit_message(self.directory, bad))
        self.partial.note(bad, wanted)
        late = {e.key: x for e in self.entries if e.key not in manifest["tensors"] and (x := before(e)) is not None}
        for key, x in late.items():
            self.flat[key].fill_(x)
        read = [e for e in wanted if e.key in self.new and e.key not in late and e.key not in self.partial.anew]
        names = {e.key: source(e, manifest, self.placement) for e in read}
        # Of a tensor that a model had cut otherwise all is read: this rank's elements may be anywhere in it.
        self.otherwise = [
            (e, torch.empty(torch.Size(e.shape), dtype=e.value.dtype), manifest["tensors"][names[e.key]].get("boxes"))
            for e in read
            if reordered(e, manifest["tensors"].get(names[e.key]))
        ]
        pieces = {names[e.key]: Piece(self.flat[e.key], e.offset or 0, e.shape) for e in read}
        return pieces | {names[e.key]: Piece(whole.view(-1), 0, e.shape) for e, whole, _ in self.otherwise}

    def of_a_rank(self, manifest: dict[str, Any]) -> list[Entry]:
        """What each rank had for itself."""
        return [
            e
            for e in self.entries
            if e.key in self.new and e.key not in manifest["tensors"] and e.key not in self.partial.anew
            if before(e) is None
        ]

    def read(self) -> dict[str, Tensor]:
        """What has been read, in the strides of what it is for."""
        for e, read, boxes in self.otherwise:
            self.flat[e.key].copy_(e.part(read if boxes is None else joined(read.view(-1), e.shape, boxes)).reshape(-1))
        self.otherwise.clear()
        for key, x in self.new.items():
            if not x.is_contiguous():
                x.copy_(self.flat[key].view(x.shape))
        return self.new

    def value(self, e: Entry, manifest: dict[str, Any]) -> Any:
        return self.new[e.key] if e.key in self.new else manifest["values"][e.key]


def _pipe(model: State, opt: Optimizer | None, strict: bool, tx: Transform | None) -> Pipeline | None:
    """The pipeline that makes what the checkpoint does not have."""
    if strict or opt is not None:
        if tx is not None:
            why = "tx makes what a checkpoint does not have, of a state and with strict=False"
            raise TypeError(explain("zf.load(directory, like, tx=tx)", why, "zf.load(directory, like=like)"))
        return None if strict or opt is None else opt._pipe
    if tx is None:
        why = "what the checkpoint does not have is made by the pipeline, and a state does not say by which"
        right = "zf.load(directory, like=state, strict=False, tx=tx), or like=opt of an attached model"
        raise TypeError(explain("zf.load(directory, like=state, strict=False)", why, right))
    return pipe_of(tx, model, "zf.load")


def _empty(like: Tensor) -> Tensor:
    """Memory for what is read: where, and pinned as, the old tensor is; on the CPU for one of the meta device."""
    device = "cpu" if like.is_meta else like.device
    pinned = device != "cpu" and like.device.type == "cpu" and like.is_pinned()
    return torch.empty_like(like, device=device, pin_memory=pinned, requires_grad=False)
