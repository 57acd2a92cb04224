"""Hooks on steps and state dicts, in the lists that torch.optim.Optimizer registers them in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

HOOKED = ("step", "state_dict", "load_state_dict")
LISTS = [f"_optimizer_{what}_{when}_hooks" for what in HOOKED for when in ("pre", "post")]


def prepare(opt: torch.optim.Optimizer) -> None:
    """The lists, which the constructor of the base class would make. Those of steps are run by torch."""
    for name in LISTS:
        setattr(opt, name, OrderedDict())


def saved(opt: torch.optim.Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict that `make` gives, as hooks want it."""
    for hook in opt._optimizer_state_dict_pre_hooks.values():
        hook(opt)
    found = make()
    for hook in opt._optimizer_state_dict_post_hooks.values():
        other = hook(opt, found)
        found = found if other is None else other
    return found


def loaded(opt: torch.optim.Optimizer, given: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """`load` a state dict that hooks have seen first."""
    if opt._optimizer_load_state_dict_pre_hooks:
        given = given.copy()
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        other = hook(opt, given)
        given = given if other is None else other
    load(given)
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)
