"""`opt.state_dict()`, `opt.load_state_dict()` and `opt.load_state()` of an attached model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .._compat.tensors import memories
from .._errors import explain, kind_of
from ..core.offload import MASTERS
from ..core.pipeline import init_transforms
from ..core.state import LeafTensors, State
from ..core.state_entries import Entry, entries
from ..ranks.group import Group
from ..ranks.process_groups import together
from .loading import LoadedStates, Misfit, ToLoad, on_all_ranks
from .param_groups import ParamGroups, packed
from .resident_params import ResidentParams
from .torch_form import Names, as_state_dict, group_form, is_torch_form, open_windows
from .torch_form_loading import Loading


def check_form(given: Any) -> None:
    """Refuse a state dict of no optimizer, as a file that holds several, and of versions before 0.3.

    Raises:
        ValueError: it is one of these.
    """
    if is_torch_form(given):
        return
    if isinstance(given, dict) and "transforms" in given:
        wrong, why = (
            "opt.load_state_dict of a file of zerofn 0.2 or older",
            "it is by transform and path, not by parameter",
        )
        right = "pip install 'zerofn<0.3' to load it and zf.save(directory, opt), which this version reads:\n"
        right += "zf.load(directory, like=opt)"
        raise ValueError(explain(wrong, why, right))
    has = f"a dict of {sorted(map(str, given))}" if isinstance(given, dict) else kind_of(given)
    why = "a state dict has 'state' and 'param_groups'"
    right = "opt.load_state_dict(checkpoint['optimizer']), with the key under which opt.state_dict() was saved"
    raise ValueError(explain(f"opt.load_state_dict of {has}", why, right))


class StateDicts:
    """Makes and loads the state dicts of one attached model.

    Args:
        home: where its parameters and its state are.
        groups: what has been set in `opt.param_groups`.
    """

    def __init__(self, home: ResidentParams, groups: ParamGroups):
        self.pipe, self.home, self.groups = home.pipe, home, groups
        self.paths = {id(p): path for path, p in home.shown.items()}

    def _own_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of a state dict, without keys that the chain sets, under the names of our groups."""
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
            why = "its states belong to parts of tensors, and a state dict does not say over which ranks these lie"
            right = "zf.save(directory, opt) and zf.load(directory, like=opt); model.state_dict() of parameters alone"
            raise ValueError(explain("opt.state_dict() of a model that is itself cut over ranks", why, right))

    def to_save(self) -> dict[str, Any]:
        """The result of `opt.state_dict()`."""
        state = self.home.state_now()
        if held := open_windows(state):
            wrong = "opt.state_dict() with sums, or errors, of gradients that are each rank's own"
            why = f"those of {', '.join(held)} differ between ranks until they are reduced, and a dict is for all ranks"
            right = (
                "zf.save(directory, opt); of sums, opt.state_dict() after a step that ends a window (opt.is_boundary)"
            )
            raise RuntimeError(explain(wrong, why, right))
        if self.pipe.road.cutting:
            # Each rank has a part of the state, which no other rank could load, so all ranks must come.
            right = "zf.save(directory, opt) on every rank. A Trainer does it on every rank by its mixin,\n"
            right += "class Trainer(zf.integrations.TrainerMixin, transformers.Trainer). For one file of\n"
            right += "whole states: get_optimizer_state_dict(model, opt, options=StateDictOptions(\n"
            right += "full_state_dict=True, cpu_offload=True)) on every rank, of which the first one has them"
            self._meet("opt.state_dict()", right)
        self.home.stored_params.hand_out()
        return as_state_dict(self.pipe, state, self.groups, self.paths)

    def _meet(self, call: str, right: str) -> None:
        """Wait for the other ranks, which make the same call."""
        if self.home.channels.control is not None:
            together(call, self.home.channels.control.ranks, right)

    def named(self, state: State) -> Callable[[str, LeafTensors], LeafTensors]:
        """A function that gives the entries of `opt.state[p]` the names of a state dict."""
        found: list[Names] = []

        def named(path: str, kept: LeafTensors) -> LeafTensors:
            if not found:
                found.append(Names(self.pipe, state, self.groups, self.paths))
            return found[0].listed(path, kept)

        return named

    @torch.no_grad()
    def read(self, given: dict[str, Any]) -> ToLoad:
        """This rank's part of a state dict of any form. Every rank calls it.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group.
        """
        state = self.home.state_now()
        self._meet("opt.load_state_dict(...)", "opt.load_state_dict(...) on every rank")
        control = self.home.channels.control
        on_all_ranks(lambda: check_form(given), control)
        names = Names(self.pipe, state, self.groups, self.paths)
        return Loading(names, given, control, self._open_groups()).run()

    def read_state(self, given: State, groups: list[dict[str, Any]] | None = None) -> ToLoad:
        """As `read`, for a state of this pipeline, with the present rates or those of `groups`. One rank may call it.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group.
        """
        own = self.groups.to_save()
        saved = [packed(g) for g in (own if groups is None else self._own_groups(groups))]
        mine, theirs = (sorted(entries(x), key=lambda e: e.key) for x in (self.home.state_now(), given))
        bad = [(f"param_groups/{i}/lr", "missing") for i, g in enumerate(saved) if "lr" not in g]
        bad += [("param_groups", f"{len(saved)} instead of {len(own)}")] if len(saved) != len(own) else []
        _check_entries(mine, theirs, bad)
        self.groups.check(saved)
        tensors = [(a.value, b.value) for a, b in zip(mine, theirs, strict=True) if not a.elsewhere]
        return ToLoad(tensors, saved, LoadedStates("name"))

    @torch.no_grad()
    def restart(self, paths: set[str]) -> None:
        """Write first values, of the present parameters, over what transforms keep of the gradients of these leaves.

        Raises:
            ValueError: a transform has sums over all leaves that its entries of these leaves are in.
        """
        self._check_restart()
        state = self.home.state_now()
        if self.pipe.road.cutting:
            self._meet("opt.state.reset(...)", "opt.state.reset(parameters), del or pop on every rank")
        made = init_transforms(self.pipe, state.leaves)
        fresh = State(state.leaves, made, state.step, state.micro_step, state.layout)
        # What follows from parameters stays (more exact copies, slow weights, averages), and so do sums of a window.
        facts = {part.name: part.facts for part in self.pipe.parts}
        begun = {name for name, f in facts.items() if not (f.holds or f.owes or f.watches)}
        kept = self.home.stored_params.shadows.keys() | {(name, MASTERS) for name in begun}
        current = self.home.current
        current.tear()
        for mine, new in zip(entries(state), entries(fresh), strict=True):
            if mine.owner not in begun or (mine.owner, mine.slot) in kept or mine.elsewhere:
                continue
            if mine.of_leaf and mine.path in paths:
                mine.value.copy_(new.value)
        current.state = state
        current.mend()

    def _check_restart(self) -> None:
        for part in self.pipe.parts:
            own = self.home.current.state.transforms.get(part.name, {})
            if "loss" in part.facts.wants and not part.facts.optimizes and own:
                why = f"{part.name} keeps averages over all parameters, of which moments of one cannot be taken out"
                right = "tx = opt.tx; opt.detach(); opt = zf.attach(model, tx) for states made anew"
                raise ValueError(explain(f"opt.state.reset(...) of a chain with {part.name}", why, right))

    def _open_groups(self) -> list[Group]:
        """The groups over which a DTensor can be gathered: first those over which leaves are cut."""
        control = self.home.channels.control
        # Beside groups of GPUs `control` sends numbers of the host only, so no DTensor is gathered over it.
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
        # The state is torn until rates, and all that is made from the state, are loaded too.
        current.tear()
        for mine, theirs in found.pairs:
            # torch may have loaded the dict in place, into our memory with dimensions in another order.
            mine.copy_(theirs.clone() if memories([mine]) & memories([theirs]) else theirs)
        current.state = state
        self.home.refresh()
        self.groups.load(found.groups)
        rest()
        current.mend()


def _check_entries(mine: list[Entry], theirs: list[Entry], bad: list[tuple[str, str]]) -> None:
    """Refuse a state whose entries do not fit those of the model, or that is `bad` in another way."""
    own, given = Counter(e.key for e in mine), Counter(e.key for e in theirs)
    bad = [*bad, *((key, "missing") for key in own - given), *((key, "unexpected") for key in given - own)]
    known = {e.key: e for e in theirs}
    pairs = [(a, known[a.key]) for a in mine if a.key in known]
    bad += [(a.key, f"{_shown(b)} instead of {_shown(a)}") for a, b in pairs if _kind(a) != _kind(b)]
    if not bad:
        return
    right = "a state of this pipeline on this model"
    if any(a.value.shape != b.value.shape for a, b in pairs):
        right += ", on as many ranks. Between other ranks:\n"
        right += "         zf.save(directory, opt) and zf.load(directory, like=opt)"
    if any(a.value.dtype != b.value.dtype for a, b in pairs):
        right += "; dtypes are never changed silently. To go on in others, with the moments begun anew:\n"
        right += "         old = zf.attach(model, old_tx); old.load_state(state); old.detach()\n"
        right += "         opt = zf.attach(model, tx)"
    raise Misfit(bad, right)


def _kind(e: Entry) -> Any:
    """The properties in which an entry must equal the one that replaces it."""
    return e.value.shape, e.value.dtype, tuple(e.shape)


def _shown(e: Entry) -> str:
    part = "" if e.value.shape == tuple(e.shape) else f", of which this rank has {tuple(e.value.shape)}"
    return f"{tuple(e.shape)} {e.value.dtype}{part}"
