"""Hooks on steps and state dicts, in the lists that torch.optim.Optimizer registers them in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from .._compat.modules import HOOKS_OF


def prepare(opt: torch.optim.Optimizer) -> None:
    """The lists, which the constructor of the base class would make. Those of steps are run by torch."""
    for name in HOOKS_OF.values():
        setattr(opt, name, OrderedDict())


def saved(opt: torch.optim.Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict that `make` gives, as hooks want it."""
    for hook in _registered(opt, "state_dict", "pre"):
        hook(opt)
    found = make()
    for hook in _registered(opt, "state_dict", "post"):
        other = hook(opt, found)
        found = found if other is None else other
    return found


def loaded(opt: torch.optim.Optimizer, given: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """`load` a state dict that hooks have seen first."""
    hooks = _registered(opt, "load_state_dict", "pre")
    if hooks:
        given = given.copy()
    for hook in hooks:
        other = hook(opt, given)
        given = given if other is None else other
    load(given)
    for hook in _registered(opt, "load_state_dict", "post"):
        hook(opt)


def _registered(opt: torch.optim.Optimizer, what: str, when: str) -> list[Callable[..., Any]]:
    return list(getattr(opt, HOOKS_OF[what, when]).values())
