"""State dicts of an attached model: in our form, in that of `torch.optim`, and back from either."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..core.state import State
from ..core.state_entries import check_torch_cuts, cut_as_by_torch
from ..ranks.dtensor_shards import as_local
from . import torch_state_dict
from .full_state_dict import empty_rows, full_state
from .param_groups import ParamGroups
from .resident_params import ResidentParams
from .state_dict import as_dict, pairs
from .state_numbers import NoTensor, with_marks, with_numbers
from .torch_state_dict import Purpose, in_torch_form


class StateDicts:
    """Makes and loads the state dicts of one attached model.

    Args:
        home: where its parameters and its state are.
        groups: what has been set in `opt.param_groups`.
    """

    def __init__(self, home: ResidentParams, groups: ParamGroups):
        self.pipe, self.home, self.groups = home.pipe, home, groups
        self.paths = {id(p): path for path, p in home.params.items()}

    def of(self, state: State, groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A dict to be loaded, of any state of the pipeline, with the rates of now, or of `groups`."""
        parts = not cut_as_by_torch(state, self.pipe.road.cutting)
        return as_dict(self.pipe, state, self.groups.to_save() if groups is None else groups, parts)

    def check_complete(self) -> None:
        """Refuse models that are themselves cut over ranks: these formats know the chain's shards only."""
        if any(leaf.within is not None and leaf.within.cut for leaf in self.pipe.layout.leaves):
            why = "its states are of parts, over ranks that this form does not know"
            right = "zf.save(directory, opt) and zf.load(directory, like=opt); model.state_dict() of parameters alone"
            raise ValueError(explain("opt.state_dict() of a model that is itself cut over ranks", why, right))

    def check_loadable(self, given: Any) -> None:
        """Refuse a state dict that could not say of which parts it is."""
        self.check_complete()
        if not torch_state_dict.is_torch_form(given):
            check_torch_cuts("load_state_dict", self.home.current.state, self.pipe.road.cutting)

    def to_save(self, caller: FrameType) -> dict[str, Any]:
        """In our form; in that of `torch.optim` where a function of torch calls `opt.state_dict()` that needs it."""
        state, purpose = self.home.settled(), torch_state_dict.purpose_of(caller)
        if purpose is None or purpose is Purpose.PARTS:
            own = as_dict(self.pipe, state, self.groups.to_save())
            return own if purpose is None else in_torch_form(own, self.groups, self.paths)
        state = (full_state if purpose is Purpose.FULL else empty_rows)(state, self.pipe.road.cutting)
        own = {"transforms": state.transforms, "step": state.step, "micro_step": state.micro_step}
        return in_torch_form(own, self.groups, self.paths, purpose)

    @torch.no_grad()
    def load(self, given: dict[str, Any], rest: Callable[[], object]) -> None:
        """Copy a state dict of either form into the model's own tensors.

        Args:
            given: the state dict.
            rest: what else belongs to the load; called once the model has what is loaded.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group, and nothing is changed.
        """
        state, current = self.home.settled(), self.home.current
        numbers: dict[tuple[str, int], Any] = {}
        if torch_state_dict.is_torch_form(given):
            found = torch_state_dict.pairs_of(state, self.groups, self.paths, given, self.pipe.road.cutting)
            groups = torch_state_dict.groups_of(self.groups, given["param_groups"])
        else:
            both = pairs(self.of(with_marks(state)), given)
            found = [(as_local(x), as_local(y)) for x, y in both if isinstance(x, Tensor)]
            numbers = {x.at: y for x, y in both if isinstance(x, NoTensor)}
            groups = given["param_groups"]
        self.groups.check(groups)
        # Until all of it is done: what is made from the state, and rates, are those of before.
        current.tear()
        for mine, theirs in found:
            mine.copy_(theirs)
        current.state = with_numbers(state, numbers)
        self.home.refresh()
        self.groups.load(groups)
        rest()
        current.mend()
