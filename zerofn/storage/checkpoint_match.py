"""Compares the manifest of a checkpoint with a state: names, shapes, dtypes and the order of elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._errors import bad_leaves
from ..core.layout import Placement
from ..core.state_entries import Entry, before
from ..core.wrapper_names import unwrapped_names
from .formatting import dtype_name


def saved_name(e: Entry, copy: int | None) -> str:
    """The name of an entry in a checkpoint: of sums that are not yet reduced there is one for each copy."""
    return e.key if copy is None else f"{e.key}@{copy}"


def copies_in(manifest: dict[str, Any]) -> int:
    """How many copies of each unreduced gradient sum a checkpoint has; in older checkpoints one for each rank."""
    return manifest.get("copies", manifest["ranks"])


def box_order(e: Entry) -> dict[str, Any]:
    """The boxes of a tensor, for the manifest, if its elements are saved box by box and not in row-major order."""
    if e.within is None or e.within.ordered:
        return {}
    return {"boxes": [[list(x) for x in box] for box in e.within.boxes]}


def in_other_order(e: Entry, about: dict[str, Any] | None) -> bool:
    """Whether the checkpoint has the elements of an entry in another order than the entry."""
    return about is not None and about.get("boxes") != box_order(e).get("boxes")


def name_to_read(e: Entry, manifest: dict[str, Any], placement: Placement) -> str:
    """The name under which an entry of `like` is read."""
    if e.key in manifest["tensors"]:
        return e.key
    # With another number of copies the first one; `share_windows` adds the others.
    return saved_name(e, placement.copy if copies_in(manifest) == placement.copies else 0)


def with_names_of(wanted: list[Entry], manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest with the names of `wanted` where its own differ by what wrappers of modules add; and these names.

    Checkpoints of before names were those of the plain model have them, and those of a tree that was a wrapped model's
    `state_dict()`.
    """
    given = dict.fromkeys([*map(_base_in(manifest), manifest["tensors"]), *manifest["values"]])
    found = unwrapped_names(given, [e.key for e in wanted])
    if not found:
        return manifest, found
    new = {theirs: mine for mine, theirs in found.items()}
    base = _base_in(manifest)

    def named(name: str) -> str:
        return new.get(base(name), base(name)) + name[len(base(name)) :]

    renamed = {part: {named(name): x for name, x in manifest[part].items()} for part in ("tensors", "values")}
    buffers = manifest.get("buffers")
    return {**manifest, **renamed, "buffers": None if buffers is None else list(map(named, buffers))}, found


def _base_in(manifest: dict[str, Any]) -> Callable[[str], str]:
    return lambda name: _base(name, manifest)


def differences(wanted: list[Entry], manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Every path in which the checkpoint and the state differ, with the difference."""
    saved = {_base(name, manifest): about for name, about in manifest["tensors"].items()}
    found = {**dict.fromkeys(manifest["values"]), **saved}
    bad = []
    for e in wanted:
        if e.key not in found:
            if before(e) is None:
                bad.append((e.key, "missing: the checkpoint does not have it"))
            continue
        about = found.pop(e.key)
        if (about is None) == isinstance(e.value, Tensor):
            there, here = ("a plain value", "a tensor") if about is None else ("a tensor", "a plain value")
            bad.append((e.key, f"{there} in the checkpoint, {here} here"))
        elif about is not None:
            bad += [(e.key, reason) for reason in _misfits(e, about)]
            if in_other_order(e, about) and e.key not in manifest["tensors"]:
                bad.append((e.key, "sums that are not reduced yet, of a model that was cut otherwise; end the window"))
    return bad + [(key, "unexpected: only the checkpoint has it") for key in found]


def _base(name: str, manifest: dict[str, Any]) -> str:
    """A name without its "@copy". A key may contain "@" itself, but then not for every copy."""
    base, _, copy = name.rpartition("@")
    copies = copies_in(manifest)
    apart = copy.isdecimal() and all(f"{base}@{i}" in manifest["tensors"] for i in range(copies))
    return base if apart and copies > 1 else name


def _misfits(e: Entry, about: dict[str, Any]) -> list[str]:
    found = []
    shape, dtype = tuple(about["shape"]), about["dtype"]
    # A rank whose part of every leaf is empty cannot tell shards from a slot that has no elements at all; the shape of
    # a leaf without elements is that of the whole or of the part.
    empty = e.value.numel() == 0 and math.prod(shape) == 0
    vacant = empty and (math.prod(e.shape) == 0 or (e.offset is not None and shape == (0,)))
    if shape != tuple(e.shape) and not vacant:
        found.append(f"shape {shape} in the checkpoint, {tuple(e.shape)} here")
    if dtype != dtype_name(e.value.dtype):
        found.append(f"{dtype} in the checkpoint, {dtype_name(e.value.dtype)} here")
    return found


def misfit_message(directory: Any, bad: list[tuple[str, str]]) -> str:
    right = "zf.load(directory, like=zf.init(tx, params)) with the pipeline and the model that saved it"
    if all(" in the checkpoint, " in reason and not reason.startswith("shape") for _, reason in bad):
        right += (
            "; dtypes are never changed silently. To change the pipeline, load with the old one and begin anew:\n"
            "         old = zf.load(directory, like=zf.init(old_tx, params))\n"
            "         state = zf.init(new_tx, zf.full_params(old_tx, old))"
        )
    if all(key.startswith("buffers/") for key, _ in bad):
        right = "the model that saved it; without its buffers, opt.load_state(zf.load(directory, like=opt.state))"
    return bad_leaves(f"the checkpoint in {directory} does not fit this state", bad, right)
