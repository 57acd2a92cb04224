"""`zf.load`: reads a checkpoint, all of it or what fits, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._errors import explain, printable
from ..core.arguments import check_flag
from ..core.layout import joined
from ..core.pipeline import Pipeline, init_transforms
from ..core.state import State
from ..core.state_entries import Entry, before, entries, rebuild
from ..core.transform import Transform
from ..core.uncompiled import kept_out_of_graphs
from ..eager.optimizer import Optimizer
from ..eager.param_groups import packed
from ..pure.api import pipe_of
from ..ranks.backend import gather_objects
from ..ranks.group import Group
from ..ranks.process_groups import join_background_threads
from .files import absolute_path
from .pieces import Piece, load_pieces
from .saving import (
    buffers_of,
    checkpoint_group,
    copies_in,
    differences,
    in_other_order,
    load_with_buffers,
    misfit_message,
    name_to_read,
    state_of,
    wait_for_all_ranks,
    warn_of_missing,
    without_buffers,
)

# ----------------------------------------------------------------------------------------------------------------------
# `load(strict=False)` loads what fits, and the pipeline makes the rest anew. A report says which is which.


@dataclass(frozen=True)
class Loaded:
    """The report of `zf.load(..., strict=False)`, by names as in a checkpoint: `adamw/exp_avg/blocks.0.weight`.

    Attributes:
        loaded: the entries that were read.
        made_anew: the entries that were not read, and why. The pipeline has made them for the loaded parameters; a
            parameter or a buffer among them is unchanged.
        left_out: the entries that only the checkpoint has.
    """

    loaded: tuple[str, ...]
    made_anew: dict[str, str]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        rows = [f"loaded {len(self.loaded)} tensors and numbers"]
        rows += [f"  made anew: {printable(key)} ({printable(why)})" for key, why in self.made_anew.items()]
        return "\n".join(rows + [f"  left out: {printable(key)}" for key in self.left_out])


@dataclass
class PartialLoad:
    """Entries that do not fit, collected while a checkpoint is read.

    Attributes:
        directory: of the checkpoint, for messages.
        anew: by key, why an entry is made anew.
        left_out: keys that only the checkpoint has.
    """

    directory: Any
    anew: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def note(self, bad: list[tuple[str, str]], wanted: list[Entry]) -> None:
        """Record which entries to make anew. With one tensor of a leaf, all tensors of that transform for it are.

        A count without its moments would give a bias correction for moments that are lost.
        """
        reasons = dict(bad)
        about = {e.key: (e.owner, e.path if e.of_leaf else None) for e in wanted}
        first = {about[key]: key for key in reversed(reasons) if key in about}
        for e in wanted:
            if (cause := first.get(about[e.key])) is not None:
                self.anew[e.key] = reasons.get(e.key, f"{cause} is, which belongs to it")
        self.left_out += [key for key in reasons if key not in about]

    def agree(self, group: Group) -> None:
        """Make `anew` the same on all ranks: a rank that has no element of a slot cannot see a misfit."""
        for other in gather_objects(self.anew, group):
            self.anew |= {key: why for key, why in other.items() if key not in self.anew}

    def check(self, wanted: list[Entry]) -> None:
        """Raise if none of the parameters fits: the checkpoint is of another model."""
        if all(e.key in self.anew for e in wanted if e.owner == "params"):
            wrong = f"zf.load({str(self.directory)!r}, ..., strict=False) found none of the parameters"
            rows = [f"{key}: {why}" for key, why in list(self.anew.items())[:3]]
            raise ValueError(explain(wrong, "\n".join(rows), "the checkpoint of a model with some of the same paths"))

    def state(self, like: State, pipe: Pipeline, read: Callable[[Entry], Any]) -> State:
        """The state of the entries that were read and those that the pipeline makes anew for these parameters."""
        if not self.anew:
            return rebuild(like, read)
        start = rebuild(like, lambda e: e.value.clone() if e.key in self.anew else read(e))
        made = {e.key: e.value for e in entries(replace(start, transforms=init_transforms(pipe, start.leaves)))}
        return rebuild(like, lambda e: made[e.key] if e.key in self.anew else read(e))

    def report(self, wanted: list[Entry]) -> Loaded:
        return Loaded(tuple(e.key for e in wanted if e.key not in self.anew), self.anew, tuple(self.left_out))


def groups_by_name(opt: Optimizer, saved: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The optimizer's param_groups, each updated by the checkpoint's group of the same name."""
    if saved is None:
        return None
    known = {group["name"]: group for group in saved}
    return [known.get(group["name"], packed(group)) for group in opt._own.groups.to_save()]


# ----------------------------------------------------------------------------------------------------------------------
# `load` reads a checkpoint into a state of the same pipeline, or what fits of another pipeline's.


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
    """Read a checkpoint into a new state. Training from it continues the saved run bit for bit.

    No code in a checkpoint is run, whoever wrote it: it has JSON and numbers, each piece with a checksum.

    Args:
        directory: the directory of `zf.save`.
        like: a state of the same pipeline and model, `zf.init(tx, params)`, on any number of ranks. It gives structure,
            devices and dtypes, and is not written: with `strict` it may be a state that was donated. Or an attached
            model's `opt`: once everything has been read, `load` writes into its state, its param_groups and the
            module's buffers. If the checkpoint has no buffers (it was saved from a state, or by an older version),
            `load` warns and does not change the buffers.
        strict: whether the checkpoint must be of exactly this pipeline and model. With `False`, `load` loads the
            entries whose path, shape and dtype agree, for instance after you have added a clip or an average. The
            pipeline makes all other entries from the loaded parameters, so that an average begins at the loaded
            parameters. If one tensor of a transform is missing for a leaf, all tensors of this transform for this leaf
            are made again, the count of updates too.
        tx: the pipeline of `like`, if `like` is a state and `strict=False`.

    Returns:
        The state; with `like=opt`, `opt.state`. With `strict=False` also a report, which prints: the names `loaded`,
        those `made_anew`, each with the reason, and those `left_out`, which only the checkpoint has.

    Raises:
        FileNotFoundError: the directory has no checkpoint.
        ValueError: the checkpoint is of another pipeline or model (the message names every missing or unexpected path,
            and every path with another shape or dtype), or of another format version, or it is truncated or changed.
            With `strict=False`, the checkpoint has none of the parameters.
        TypeError: `like` is a state, `strict=False`, and there is no `tx`; or `tx` is given in any other case.
        RuntimeError: only some ranks call it, as for `save`; with `strict=False`, `like` was donated or half written.

    Examples:
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
    if opt is not None:
        opt._own.train_unfrozen("zf.load(directory, like=opt)")
    state = state_of(like, "zf.load(directory, like={})", form=strict)
    path = absolute_path("zf.load({}, like=state)", directory)
    return _load(directory, path, state, opt, strict, _pipe(state, opt, strict, tx))


def _load(
    directory: Any, path: Path, like: State, opt: Optimizer | None, strict: bool, pipe: Pipeline | None
) -> State | tuple[State, Loaded]:
    """Read into new memory on all ranks; an attached model is written only once that has succeeded."""
    join_background_threads()
    placement = like.layout.placement
    wait_for_all_ranks("zf.load(directory, like=state)", placement)
    group = checkpoint_group(placement)
    reading = _Reading(directory, like, opt, strict)
    manifest = load_pieces(path, group, reading.choose)
    if copies_in(manifest) != placement.copies:
        reading.check_windows()
    reading.finish()
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
        flat: by key, the memory to read into: `new` in one dimension if it is contiguous.
        manifest: of the checkpoint; set by `choose`, as `read` and `wholes`.
        read: the entries that are read.
        wholes: entries whose elements the checkpoint has in another order: memory for the full tensor, and the order.
    """

    def __init__(self, directory: Any, like: State, opt: Optimizer | None, strict: bool):
        self.directory, self.placement, self.opt, self.strict = directory, like.layout.placement, opt, strict
        self.entries = entries(like)
        self.buffers = [] if opt is None else buffers_of(opt._own.model)
        self.partial = PartialLoad(directory)
        self.manifest: dict[str, Any] = {}
        self.read: list[Entry] = []
        self.wholes: list[tuple[Entry, Tensor, Any]] = []
        every = [*self.entries, *self.buffers]
        self.new = {e.key: _empty(e.value) for e in every}
        self.flat = {key: x.view(-1) if x.is_contiguous() else x.new_empty(x.numel()) for key, x in self.new.items()}

    def saved_entries(self) -> list[Entry]:
        """The entries to look for: a checkpoint of a state has no buffers."""
        return self.entries if self.manifest.get("buffers") is None else [*self.entries, *self.buffers]

    def choose(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The pieces to read, by their names in the checkpoint."""
        self.manifest = manifest
        wanted = self.saved_entries()
        # A state has no buffers; those of the module that was saved with it are left out.
        bad = differences(wanted, without_buffers(manifest) if self.opt is None else manifest)
        if bad and self.strict:
            raise ValueError(misfit_message(self.directory, bad))
        self.partial.note(bad, wanted)
        # Entries that an older checkpoint lacks or has as Python numbers. Missing ones get the value that held then.
        old = {
            e.key: manifest["values"].get(e.key, before(e)) for e in self.entries if e.key not in manifest["tensors"]
        }
        defaults = {key: x for key, x in old.items() if x is not None}
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

    def check_windows(self) -> None:
        """Refuse sums, or errors, of gradients that are each rank's own, from another number of ranks.

        With `strict=False` they are given up: the transform that holds them begins anew.
        """
        there = self.manifest["tensors"]
        apart = {*self.placement.apart, *(e.owner for e in self.read if e.key not in there)}
        numbers = [e for e in self.read if e.owner in apart and not e.of_leaf and not e.shape]
        if not (held := {e.owner for e in numbers if bool(self.flat[e.key])}):
            return
        saved = copies_in(self.manifest)
        if not self.strict:
            why = f"in the middle of a window of {saved} ranks, here are {self.placement.copies}"
            self.partial.note([(e.key, why) for e in self.entries if e.owner in held], self.entries)
            return
        wrong = f"zf.load({str(self.directory)!r}) on {self.placement.copies} ranks in the middle of a window"
        why = f"{saved} ranks saved it, each with its own sum, or error, of gradients in {', '.join(sorted(held))}"
        right = f"zf.load on {saved} ranks; zf.save after a step that ends a window (opt.is_boundary); or\n"
        right += "zf.load(..., strict=False), which leaves these out"
        raise ValueError(explain(wrong, why, right))

    def finish(self) -> None:
        """Fill `new` from tensors that were read in another order or into other strides."""
        for e, x, boxes in self.wholes:
            self.flat[e.key].copy_(e.part(x if boxes is None else joined(x.view(-1), e.shape, boxes)).reshape(-1))
        self.wholes.clear()
        for key, x in self.new.items():
            if not x.is_contiguous():
                x.copy_(self.flat[key].view(x.shape))

    def value(self, e: Entry) -> Tensor:
        return self.new[e.key]


def _pipe(like: State, opt: Optimizer | None, strict: bool, tx: Transform | None) -> Pipeline | None:
    """The pipeline that makes the entries that the checkpoint does not have."""
    if strict or opt is not None:
        if tx is not None:
            why = "tx is used only with like=state and strict=False, to make entries that the checkpoint lacks"
            raise TypeError(explain("zf.load(directory, like, tx=tx)", why, "zf.load(directory, like=like)"))
        return None if strict or opt is None else opt._own.pipe
    if tx is None:
        why = "the pipeline makes the entries that the checkpoint lacks, and a state does not have its pipeline"
        right = "zf.load(directory, like=state, strict=False, tx=tx), or like=opt of an attached model"
        raise TypeError(explain("zf.load(directory, like=state, strict=False)", why, right))
    return pipe_of(tx, like, "zf.load")


def _empty(like: Tensor) -> Tensor:
    """Memory for a tensor to read: on the device of `like`, pinned if that is; on the CPU for a meta tensor."""
    device = "cpu" if like.is_meta else like.device
    pinned = device != "cpu" and like.device.type == "cpu" and like.is_pinned()
    return torch.empty_like(like, device=device, pin_memory=pinned, requires_grad=False)
