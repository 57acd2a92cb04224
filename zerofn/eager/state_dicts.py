"""`opt.state_dict()` and `opt.load_state_dict()` of an attached model.

A state dict has the form of `torch.optim` (`torch_form.py`). One in the form of older versions, by transform and path
(`path_form.py`), is told by its content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import memories
from .._errors import explain, kind_of
from ..core.state import LeafTensors, State
from ..core.state_entries import check_torch_cuts, cut_as_by_torch
from ..ranks.dtensor import as_local
from ..ranks.group import Group
from ..ranks.process_groups import together
from .loading import ON_EACH_RANK, LoadedStates, Misfit, NoTensor, ToLoad, on_all_ranks, with_marks, with_numbers
from .param_groups import ParamGroups
from .path_form import by_path, is_path_form, pairs
from .resident_params import ResidentParams
from .torch_form import Names, as_state_dict, group_form, is_torch_form, open_windows
from .torch_form_loading import Loading


def form_of_torch(given: Any) -> bool:
    """Whether a state dict is in the form of `torch.optim`, and not of older versions.

    Raises:
        ValueError: it is a state dict of no optimizer, as a file that holds several.
    """
    if not is_torch_form(given) and not is_path_form(given):
        has = f"a dict of {sorted(map(str, given))}" if isinstance(given, dict) else kind_of(given)
        why = "a state dict has 'state' and 'param_groups'; one of an older version has 'transforms'"
        right = "opt.load_state_dict(checkpoint['optimizer']), with the key under which opt.state_dict() was saved"
        raise ValueError(explain(f"opt.load_state_dict of {has}", why, right))
    return is_torch_form(given)


class StateDicts:
    """Makes and loads the state dicts of one attached model.

    Args:
        home: where its parameters and its state are.
        groups: what has been set in `opt.param_groups`.
    """

    def __init__(self, home: ResidentParams, groups: ParamGroups):
        self.pipe, self.home, self.groups = home.pipe, home, groups
        self.paths = {id(p): path for path, p in home.shown.items()}

    def of(self, state: State, groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A dict to be loaded, of any state of the pipeline, with the rates of now, or of `groups`."""
        parts = not cut_as_by_torch(state, self.pipe.road.cutting)
        return by_path(self.pipe, state, self.groups.to_save() if groups is None else self._own_groups(groups), parts)

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
        """Refuse a state dict that could not say of which shards it is."""
        self.check_complete()
        if not is_torch_form(given):
            check_torch_cuts("load_state_dict", self.home.current.state, self.pipe.road.cutting)

    def to_save(self) -> dict[str, Any]:
        """What `opt.state_dict()` returns."""
        state = self.home.state_now()
        if self.pipe.road.cutting or open_windows(state):
            # What one rank has is a part: a file of it alone could be loaded by no other.
            right = "zf.save(directory, opt) on every rank. A Trainer does it on every rank by its mixin,\n"
            right += "class Trainer(zf.integrations.TrainerMixin, transformers.Trainer). For one file of\n"
            right += "whole states: get_optimizer_state_dict(model, opt, options=StateDictOptions(\n"
            right += "full_state_dict=True, cpu_offload=True)) on every rank, of which the first one has them"
            self._meet("opt.state_dict()", right)
        return as_state_dict(self.pipe, state, self.groups, self.paths)

    def _meet(self, call: str, right: str) -> None:
        """Wait for the other ranks, which make the same call."""
        if self.home.channels.control is not None:
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
    def read(self, given: dict[str, Any]) -> ToLoad:
        """What a state dict of any form has for this rank. Every rank calls it.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group.
        """
        state = self.home.state_now()
        self._meet("opt.load_state_dict(...)", "opt.load_state_dict(...) on every rank")
        control = self.home.channels.control
        forms = on_all_ranks(lambda: form_of_torch(given), control)
        if len(set(forms)) > 1:
            older = [(f"rank {i}", "of an older version") for i, of_torch in enumerate(forms) if not of_torch]
            raise Misfit(older, ON_EACH_RANK, "load_state_dict: ranks have state dicts of two forms")
        if forms[0]:
            names = Names(self.pipe, with_marks(state), self.groups, self.paths)
            return Loading(names, given, control, self._open_groups()).run()
        return self._read_by_path(state, given, control)

    @torch.no_grad()
    def read_state(self, given: State, groups: list[dict[str, Any]] | None = None) -> ToLoad:
        """The same of a state of this pipeline, with the rates of now or of `groups`; one rank may be alone."""
        return self._read_by_path(self.home.state_now(), self.of(given, groups), None)

    def _read_by_path(self, state: State, given: dict[str, Any], control: Group | None) -> ToLoad:
        both = pairs(self.of(with_marks(state)), given, self._open_groups(), control)
        on_all_ranks(lambda: self.groups.check(given["param_groups"]), control)
        found = [(as_local(x), as_local(y)) for x, y in both if isinstance(x, Tensor)]
        numbers = {x.at: y for x, y in both if isinstance(x, NoTensor)}
        return ToLoad(found, numbers, given["param_groups"], LoadedStates("name"))

    def _open_groups(self) -> list[Group]:
        """The groups over which a DTensor can be gathered: first those over which leaves are cut."""
        control = self.home.channels.control
        # Beside groups of GPUs it sends numbers of the host alone.
        alike = control is not None and all(group.device == control.device for group in self.pipe.groups)
        return [*self.pipe.road.cutting, *([control] if control is not None and alike else []), *self.pipe.groups]

    @torch.no_grad()
    def write(self, found: ToLoad, rest: Callable[[], object]) -> None:
        """Copy what was read into the model's own tensors.

        Args:
            found: of `read`.
            rest: what else belongs to the load; called once the model has what is loaded.
        """
        state, current = self.home.state_now(), self.home.current
        # Until all of it is done: what is made from the state, and rates, are those of before.
        current.tear()
        for mine, theirs in found.pairs:
            # A dict that torch has loaded in place may have our own memory, seen in another order of dimensions.
            mine.copy_(theirs.clone() if memories([mine]) & memories([theirs]) else theirs)
        current.state = with_numbers(state, found.numbers)
        self.home.refresh()
        self.groups.load(found.groups)
        rest()
        current.mend()
