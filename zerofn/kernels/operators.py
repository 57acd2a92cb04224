"""Kernels as custom operators, `zerofn::...`, for compiled graphs: the schema says which arguments they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("zerofn", "FRAGMENT")


def operator(schema: str, run: Callable[..., None]) -> Any:
    """`run` as an operator that returns nothing; `schema` marks the arguments that it writes.

    It has neither a derivative nor a batching rule: to be called only where nothing records (`kernels.recording`).

    Not by `torch.library.custom_op`: what that puts around a call, a count for each tensor that is written and a search
    for memory that two arguments have in common, takes on 148 small leaves longer than AdamW itself, some 0.3 ms.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofn::{name}", lambda *_: None, lib=_LIBRARY)
    return getattr(torch.ops.zerofn, name).default
