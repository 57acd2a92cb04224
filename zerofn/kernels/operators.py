"""Kernels as operators of torch's, `zerofn::...`, which a compiled graph can call: it is told what they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("zerofn", "FRAGMENT")


def operator(schema: str, run: Callable[..., None]) -> Any:
    """`run` as an operator that gives nothing back; `schema` marks the arguments that it writes.

    It has no derivative and no rule for batches: who calls it has asked whether anybody records (`kernels.recording`).

    Not by `torch.library.custom_op`: what that puts around a call, a count for each tensor that is written and a search
    for memory that two arguments have in common, takes on 148 small leaves longer than AdamW itself, some 0.3 ms.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofn::{name}", lambda *_: None, lib=_LIBRARY)
    return getattr(torch.ops.zerofn, name).default
