"""State dicts of an attached model: made in torch's form, and loaded from it or from the forms of older versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..core.state import State
from ..core.state_by_parameter import LeafTensors
from ..core.state_entries import check_torch_cuts, cut_as_by_torch
from ..ranks.dtensor_shards import as_local
from ..ranks.rendezvous import together
from .param_groups import ParamGroups
from .resident_params import ResidentParams
from .state_dict import as_dict, pairs
from .state_numbers import NoTensor, with_marks, with_numbers
from .torch_state_dict import LoadedStates, Loading, Names, ToLoad, as_state_dict, group_form, is_torch_form


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
        return as_dict(self.pipe, state, self.groups.to_save() if groups is None else self._own_groups(groups), parts)

    def _own_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of a state dict, without what is the chain's, under the names of ours."""
        found = []
        for i, group in enumerate(groups):
            o = self.groups.optimizers[i] if i < len(self.groups.optimizers) else None
            fixed = set() if o is None else group_form(o.transform).keys() - {"lr", *o.settable}
            named = {} if o is None else {"name": o.name}
            found.append({**named, **{k: x for k, x in group.items() if k not in fixed}})
        return found

    def check_complete(self) -> None:
        """Refuse models that are themselves cut over ranks: these formats know the chain's shards only."""
        if any(leaf.within is not None and leaf.within.cut for leaf in self.pipe.layout.leaves):
            why = "its states are of parts, over ranks that this form does not know"
            right = "zf.save(directory, opt) and zf.load(directory, like=opt); model.state_dict() of parameters alone"
            raise ValueError(explain("opt.state_dict() of a model that is itself cut over ranks", why, right))

    def check_loadable(self, given: Any) -> None:
        """Refuse a state dict that could not say of which parts it is."""
        self.check_complete()
        if not is_torch_form(given):
            check_torch_cuts("load_state_dict", self.home.current.state, self.pipe.road.cutting)

    def to_save(self) -> dict[str, Any]:
        """What `opt.state_dict()` returns."""
        return as_state_dict(self.pipe, self.home.settled(), self.groups, self.paths, self._meet)

    def _meet(self, call: str = "opt.state_dict()") -> None:
        """Wait for the other ranks, which make the same call."""
        if self.home.channels.control is not None:
            right = f"{call} on every rank; then `if rank == 0:` around what one rank does with it"
            together(call, self.home.channels.control.ranks, right)

    def named(self, state: State) -> Callable[[str, LeafTensors], LeafTensors]:
        """Gives what `opt.state[p]` has the names of a state dict."""
        found: list[Names] = []

        def named(path: str, kept: LeafTensors) -> LeafTensors:
            if not found:
                found.append(Names(self.pipe, state, self.groups, self.paths))
            return found[0].listed(path, kept)

        return named

    @torch.no_grad()
    def load(self, given: dict[str, Any], rest: Callable[[], object]) -> LoadedStates:
        """Copy a state dict of any form into the model's own tensors.

        Args:
            given: the state dict.
            rest: what else belongs to the load; called once the model has what is loaded.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group, and nothing is changed.
        """
        state, current = self.home.settled(), self.home.current
        found = self._read(state, given)
        self.groups.check(found.groups)
        # Until all of it is done: what is made from the state, and rates, are those of before.
        current.tear()
        for mine, theirs in found.pairs:
            mine.copy_(theirs)
        current.state = with_numbers(state, found.numbers)
        self.home.refresh()
        self.groups.load(found.groups)
        rest()
        current.mend()
        return found.told

    def _read(self, state: State, given: dict[str, Any]) -> ToLoad:
        if is_torch_form(given):
            self._meet("opt.load_state_dict(...)")
            names = Names(self.pipe, with_marks(state), self.groups, self.paths)
            return Loading(names, given, self.home.channels.control).run()
        both = pairs(self.of(with_marks(state)), given)
        found = [(as_local(x), as_local(y)) for x, y in both if isinstance(x, Tensor)]
        numbers = {x.at: y for x, y in both if isinstance(x, NoTensor)}
        return ToLoad(found, numbers, given["param_groups"], LoadedStates("name"))
