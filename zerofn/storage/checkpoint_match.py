"""Whether a checkpoint is one of a state, and under which names it keeps what."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .._errors import bad_leaves
from ..core.layout import Placement
from ..core.state_entries import Entry, before
from .formatting import dtype_name


def name_of(e: Entry, copy: int | None) -> str:
    return e.key if copy is None else f"{e.key}@{copy}"


def copies_in(manifest: dict[str, Any]) -> int:
    """How many sums there are of gradients that are not yet reduced; in older checkpoints one for each rank."""
    return manifest.get("copies", manifest["ranks"])


def boxes_of(e: Entry) -> dict[str, Any]:
    """What a table of contents says of the order of a tensor's elements, where they are kept box by box."""
    if e.within is None or e.within.ordered:
        return {}
    return {"boxes": [[list(x) for x in box] for box in e.within.boxes]}


def reordered(e: Entry, about: dict[str, Any] | None) -> bool:
    """Whether a checkpoint keeps the elements of an entry in another order than the entry counts them."""
    return about is not None and about.get("boxes") != boxes_of(e).get("boxes")


def source(e: Entry, manifest: dict[str, Any], placement: Placement) -> str:
    """Under which name an entry of `like` stands in the checkpoint."""
    if e.key in manifest["tensors"]:
        return e.key
    # With another number of copies the first one, to which the others are added.
    return name_of(e, placement.copy if copies_in(manifest) == placement.copies else 0)


def differences(wanted: list[Entry], manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Every path in which a checkpoint is not one of this state, and how."""
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
            if reordered(e, about) and e.key not in manifest["tensors"]:
                bad.append((e.key, "sums that are not reduced yet, of a model that was cut otherwise; end the window"))
    return bad + [(key, "unexpected: only the checkpoint has it") for key in found]


def _base(name: str, manifest: dict[str, Any]) -> str:
    """A name without its copy. A key may hold the sign itself, but then not for copy after copy."""
    base, _, copy = name.rpartition("@")
    copies = copies_in(manifest)
    apart = copy.isdecimal() and all(f"{base}@{i}" in manifest["tensors"] for i in range(copies))
    return base if apart and copies > 1 else name


def _misfits(e: Entry, about: dict[str, Any]) -> list[str]:
    found = []
    shape, dtype = tuple(about["shape"]), about["dtype"]
    # A rank whose part of every leaf is empty cannot tell shards from a slot that has no elements at all.
    vacant = e.offset is not None and e.value.numel() == 0 and shape == (0,)
    # Where a rank has no elements of a leaf that has none, its shape is that of the whole or of the piece.
    vacant = vacant or (e.value.numel() == 0 and math.prod(shape) == 0 and math.prod(e.shape) == 0)
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
