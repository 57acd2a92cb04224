"""Lets `torch.load` with its defaults load a state: it calls `state_from`, and no other function of this package.

Files of `torch.save(state)` contain the name of this module, so it must not be renamed.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.serialization import add_safe_globals


def state_from(form: int, *parts: Any) -> Any:
    """The `State` that was saved as these parts: tensors, numbers, text and containers of them."""
    # The module is imported by its name at the call, since it imports this one.
    return importlib.import_module("zerofn.core.state").restored(form, *parts)


def let_torch_load_states() -> None:
    """Allow `state_from` in `torch.load(path)`, which refuses functions that it does not know."""
    add_safe_globals([state_from])
