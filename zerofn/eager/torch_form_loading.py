"""Loads a state dict in the form of `torch.optim`, of ours and of torch's.

Its tensors may be full or DTensors of any placements: each rank takes its shard. Parameters are matched by name where
the state dict has names, else by their place in the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._errors import explain, kind_of
from ..core.pipeline import init_transforms
from ..core.state import State
from ..core.state_entries import Entry, before, entries
from ..core.wrapper_names import remedy
from ..ranks.dtensor import as_local, in_full, is_distributed, mesh_of, of_this_rank
from ..ranks.group import Group
from .loading import ON_EACH_RANK, LoadedStates, Misfit, ToLoad, form_of, on_all_ranks
from .param_groups import HYPERPARAMETERS, same_value
from .torch_form import (
    BESIDE,
    COUNTED,
    OWN_ENTRY,
    OWN_KEY,
    STEP,
    UPDATES,
    NamedEntry,
    Names,
    group_form,
    has_value,
    in_own_rows,
    is_counted,
)

# The message for a parameter that two places of the groups name.
DOUBLED = "doubled: it stands in param_groups more than once"


class Loading:
    """Reads one state dict in the form of `torch.optim`; nothing is written.

    Args:
        names: of our state.
        given: the state dict.
        control: the ranks that load it together; `None` on one process.
        groups: over which a DTensor of the same ranks can be gathered.

    Raises:
        ValueError: every missing, unexpected, doubled or misshapen entry is named, on all ranks.
    """

    def __init__(self, names: Names, given: Mapping[str, Any], control: Group | None, groups: Sequence[Group]):
        self.names, self.given, self.control, self.groups = names, given, control, groups
        ours = given.get(OWN_KEY)
        self.own_key: Mapping[str, Any] = ours if isinstance(ours, Mapping) else {}
        self.bad: list[tuple[str, str]] = []
        self.other_dtypes, self.of_other_ranks = 0, False
        self.by, self.taken = "name", list[int]()
        self.given_numbers: dict[str, Any] = {}
        self.fits: list[tuple[Entry, Tensor]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.anew: list[NamedEntry] = []
        cutting = names.pipe.road.cutting
        placement = names.state.layout.placement
        self.single = cutting[0] if len(cutting) == 1 and not placement.ranges else None

    def run(self) -> ToLoad:
        """Check the state dict on all ranks, and return what to write."""
        # This comes before any tensor is sent, and before anything is written.
        counts = on_all_ranks(self._compare, self.control)
        if bad := [(name, x) for name, x in counts[0].items() if any(of.get(name) != x for of in counts)]:
            rows = [(name, ", ".join(f"{of.get(name)} on rank {i}" for i, of in enumerate(counts))) for name, _ in bad]
            raise Misfit(rows, ON_EACH_RANK, "load_state_dict: ranks have state dicts of other steps")
        self._fit_all()
        self._make_anew()
        return ToLoad(self.pairs, self.own_groups, LoadedStates(self.by, self.made_anew))

    def _compare(self) -> dict[str, float]:
        """Find the new value of each entry, refuse what does not fit, and return counts that must be equal on ranks."""
        by_path = self.there = self._by_path()
        counts = {path: self.names.updates(path, x) for path, x in by_path.items()}
        updates = [float(x) for x in counts.values() if _is_number(x)]
        updates += [1.0 for path, x in by_path.items() if counts[path] is None and _states(x)]
        self.most = max(updates, default=0.0)
        self.given_numbers = self._given_numbers()
        # Other libraries count under the name `step` only. Where no leaf has a count, 0 updates are written.
        by_step = any(_states(x) and self.names.counts.get(path, STEP) == STEP for path, x in by_path.items())
        noted: Any = self.given_numbers.get(UPDATES)
        told = noted is not None and (int(noted or 0) > 0 or any(map(_is_number, counts.values())))
        self.stale = by_step and told and int(noted or 0) != int(self.most)
        self.absent = self._absent()
        self.made_anew = tuple([path for path, own in self.names.leaves.items() if own and not _states(by_path[path])])
        for path, own in self.names.leaves.items():
            if path in self.made_anew:
                self.anew += own.values()
            else:
                self._leaf(path, own, by_path[path])
        self._numbers()
        self._params()
        self._refuse()
        self.own_groups = self._groups()
        self.names.groups.check(self.own_groups)
        counters = [(name, x) for name in COUNTED if _is_number(x := self.given_numbers.get(OWN_ENTRY + name))]
        return {"updates": self.most} | {name: float(x) for name, x in counters}

    def _refuse(self) -> None:
        if not self.bad:
            return
        right = "a state dict of the same model and optimizer; of another chain zf.save(directory, opt), and\n"
        right += "         zf.load(directory, like=opt, strict=False), which makes anew what is missing"
        right += remedy(name for name, _ in self.bad)
        if self.of_other_ranks:
            right = ON_EACH_RANK
        if self.other_dtypes:
            dtypes = "a state dict in these dtypes: dtypes are never changed silently. To go on in others, with the\n"
            dtypes += "  moments begun anew:\n"
            dtypes += "         old = zf.attach(model, old_tx); old.load_state_dict(d); old.detach()\n"
            dtypes += "         opt = zf.attach(model, tx)"
            right = dtypes if self.other_dtypes == len(self.bad) else f"{right};\n         {dtypes}"
        raise Misfit(self.bad, right)

    def _by_path(self) -> dict[str, dict[str, Any]]:
        """The given entries of each of our leaves; none for a leaf that is missing.

        It sets how leaves were matched, and for each of our groups which given group it takes.
        """
        theirs, state = self.given["param_groups"], self.given["state"]
        if bad := _malformed(theirs, state):
            raise Misfit(bad, "a state dict as opt.state_dict() and torch.optim have it")
        mine = [[self.names.paths[id(p)] for p in g["params"]] for g in self.names.groups.groups]
        keys = [list(g["params"]) for g in theirs]
        flat = [key for own in keys for key in own]
        names = _names_given(theirs, self.own_key, keys)
        if names is None:
            lengths = [len(x) for x in mine], [len(x) for x in keys]
            if lengths[0] != lengths[1]:
                wrong = f"load_state_dict of groups of {lengths[1]} parameters into groups of {lengths[0]}"
                why = "this state dict has no names, so parameters are matched by their place in the groups,\n"
                why += "and the groups are those of zf.partition"
                right = "the chain of that checkpoint, with the groups of that checkpoint; or names in it:\n"
                right += "torch.optim.AdamW(model.named_parameters()), get_optimizer_state_dict(model, optimizer)"
                raise ValueError(explain(wrong, why, right))
            labels = dict(zip([path for own in mine for path in own], flat, strict=True))
            self.by, self.taken = "order", list(range(len(mine)))
        else:
            labels = self._by_name(mine, keys, names)
        self.bad += [(str(key), DOUBLED) for key in sorted({x for x in flat if flat.count(x) > 1}, key=str)]
        self.bad += [(key, "unexpected") for key in self.given if key not in ("state", "param_groups", OWN_KEY)]
        older = [f"param_groups/{i}/{OWN_KEY}" for i, g in enumerate(theirs) if OWN_KEY in g]
        self.bad += [(key, "unexpected: of zerofn 0.2 or older") for key in older]
        self.labels = {path: path if key == path else f"{path} ({key})" for path, key in labels.items()}
        self.bad += [(str(k), "unexpected: no group has it") for k in state if k not in flat]
        return {path: _entries(state.get(labels.get(path), {})) for of in mine for path in of}

    def _by_name(self, mine: list[list[str]], keys: list[list[Any]], names: list[list[str]]) -> dict[str, Any]:
        every = [name for own in names for name in own]
        at = {name: (i, key) for i, own in enumerate(names) for name, key in zip(own, keys[i], strict=True)}
        own = [path for of in mine for path in of]
        self.bad += [(name, "doubled: two parameters have this name") for name in at if every.count(name) > 1]
        self.bad += [(path, "missing") for path in own if path not in at]
        self.bad += [(name, "unexpected") for name in at if name not in own]
        for i, of in enumerate(mine):
            groups = list(dict.fromkeys(at[path][0] for path in of if path in at))
            rates = {str(self.given["param_groups"][k].get("lr")) for k in groups}
            if len(rates) > 1:
                why = f"parameters of one group here are in groups of other rates there, {sorted(rates)}"
                self.bad.append((f"param_groups/{i}", why))
            self.taken.append(groups[0] if groups else min(i, len(keys) - 1))
        return {path: at[path][1] for path in own if path in at}

    def _given_numbers(self) -> dict[str, Any]:
        """The given entries that belong to no leaf, by name."""
        found: dict[str, Any] = {}
        for own in self.there.values():
            found |= {name: x for name, x in own.items() if name.startswith(OWN_ENTRY)}
        for name in COUNTED:
            if name in self.own_key:
                found.setdefault(OWN_ENTRY + name, self.own_key[name])
        return found

    def _absent(self) -> set[str]:
        """Transforms that hold gradients and have no given entries: at the end of a window they hold nothing."""
        names = {name for own in self.there.values() for name in own}
        found = set()
        for part in self.names.pipe.parts:
            of_leaves = {n for own in self.names.leaves.values() for n, x in own.items() if x.entry.owner == part.name}
            numbers = {name for name, x in self.names.numbers.items() if x.entry.owner == part.name}
            if part.facts.holds and not (of_leaves & names) and not (numbers & self.given_numbers.keys()):
                found.add(part.name)
        return found

    def _leaf(self, path: str, own: dict[str, NamedEntry], there: dict[str, Any]) -> None:
        label = self.labels[path]
        for name in there:
            if name not in own and not name.startswith(OWN_ENTRY):
                self.bad.append((f"{label}: {name}", "unexpected"))
        optimizer = self.names.optimizer_of(path)
        for _, name in optimizer.facts.torch_names if float(there.get(STEP, 1)) == 0 else ():
            if isinstance(there.get(name), Tensor) and bool(as_local(there[name]).any()):
                why = f"0 beside a {name}: read from a checkpoint without counts? Set this one to 1"
                self.bad.append((f"{label}: {STEP}", why))
        for name, x in own.items():
            place = f"{label}: {name}"
            if x.entry.owner in self.names.apart:
                # The window is closed, so its sums are not used.
                self.pairs += [(x.entry.value, torch.zeros((), dtype=x.entry.value.dtype))]
            elif x.entry.owner in self.absent:
                self.anew.append(x)
            elif name not in there:
                if name == STEP:
                    # torch's SGD keeps no count, and the leaf has a state, so there was an update.
                    self._take(place, x, torch.tensor(1))
                elif not x.entry.elsewhere and has_value(x):
                    self.bad.append((place, "missing"))
            elif has_value(x):
                self._take(place, x, there[name])

    def _take(self, place: str, x: NamedEntry, given: Any) -> None:
        e = x.entry
        if not isinstance(given, Tensor | int | float | bool):
            self.bad.append((place, f"{given!r} instead of {form_of(e)}"))
            return
        new = torch.as_tensor(given)
        shape, counted = torch.Size(e.shape), not e.shape and not e.value.is_floating_point()
        if new.shape != shape or (new.dtype != e.value.dtype and not counted):
            self.other_dtypes += new.dtype != e.value.dtype
            self.bad.append((place, f"{form_of(new)} instead of {form_of(e)}"))
        elif not is_distributed(new):
            self.fits.append((e, new))
        elif isinstance(local := of_this_rank(new, self.groups), str):
            self.of_other_ranks = True
            self.bad.append((place, local))
        else:
            self.fits.append((e, local))

    def _numbers(self) -> None:
        known = self.names.numbers.keys() | {UPDATES, OWN_ENTRY + STEP, OWN_ENTRY + "micro_step"}
        self.bad += [(name, "unexpected") for name in self.given_numbers if name not in known]
        ours = any(name not in (OWN_ENTRY + STEP, OWN_ENTRY + "micro_step") for name in self.given_numbers)
        for name, x in self.names.numbers.items():
            e, given = x.entry, self.given_numbers.get(name)
            if is_counted(name, x) and (given is None or self.stale or _is_coarse(given)):
                self.pairs.append((e.value, torch.tensor(self.most)))
            elif given is not None:
                if e.owner in self.names.apart and _is_number(given) and float(given):
                    why = f"{float(given):g}: in the middle of a window, and here each rank has its own sums"
                    self.bad.append((name, why))
                self._number(name, x, given)
            elif e.owner in self.absent:
                self.anew.append(x)
            elif ours and (first := before(e)) is not None:
                self.pairs.append((e.value, torch.full_like(e.value, first)))
            elif ours and not e.elsewhere:
                self.bad.append((name, "missing"))

    def _number(self, name: str, x: NamedEntry, given: Any) -> None:
        e = x.entry
        if not isinstance(given, Tensor | int | float) or torch.as_tensor(given).shape != e.shape:
            self.bad.append((name, f"{form_of(given)} instead of {form_of(e)}"))
        else:
            # torch's `load_state_dict` may have cast it to the dtype of its parameter.
            self.fits.append((e, torch.as_tensor(given).to(e.value.dtype)))

    def _params(self) -> None:
        given = self.own_key.get("params")
        if given is None:
            return
        own = self.names.params
        self.bad += [(f"params/{path}", "missing") for path in own if path not in given]
        self.bad += [(f"params/{path}", "unexpected") for path in given if path not in own]
        for path in own.keys() & given.keys():
            self._take(f"params/{path}", own[path], given[path])
        self.fits.sort(key=lambda fit: fit[0].key)

    def _fit_all(self) -> None:
        """Take this rank's shard of each tensor. All ranks gather tensors that are sharded in another way than here."""
        sent = [is_distributed(new) and not self._lies_alike(e, new) for e, new in self.fits]
        for (e, new), message in zip(self.fits, sent, strict=True):
            if is_distributed(new) and not message:
                self.pairs.append((e.value, as_local(new).reshape(e.value.shape)))
                continue
            whole = in_full(new)
            if not e.elsewhere:
                mine = e.part(whole)
                # A copy of the shard lets the gathered tensor be freed.
                self.pairs.append((e.value, mine.clone() if message else mine))

    def _lies_alike(self, e: Entry, new: Any) -> bool:
        single = self.single
        if single is None or e.offset is None or e.at_owner or mesh_of(new) != single.ranks:
            return False
        return in_own_rows(e, single.size) if new.shape == torch.Size(e.shape) else not in_own_rows(e, single.size)

    def _make_anew(self) -> None:
        anew = {x.entry.key for x in self.anew if not x.entry.elsewhere}
        if not anew:
            return
        state = self.names.state
        made = init_transforms(self.names.pipe, state.leaves)
        fresh = State(state.leaves, made, state.step, state.micro_step, state.layout)
        for x, e in zip(entries(state), entries(fresh), strict=True):
            if x.key in anew:
                self.pairs.append((x.value, e.value))

    def _groups(self) -> list[dict[str, Any]]:
        """For each group the rate, the keys that schedulers have added, and hyperparameters that the user has set."""
        chains = self.own_key.get("chain", ())
        found, bad = [], []
        for i, (k, optimizer) in enumerate(zip(self.taken, self.names.groups.optimizers, strict=True)):
            given, t = self.given["param_groups"][k], optimizer.transform
            form = group_form(t)
            chain = chains[k] if k < len(chains) else {}
            was_set = [key for key, x in chain.items() if key in given and not same_value(given[key], x)]
            out = {*BESIDE, *HYPERPARAMETERS, *form, *t.config, "params", "param_names", "name", OWN_KEY} - set(was_set)
            found.append({"lr": given.get("lr"), **{key: x for key, x in given.items() if key not in {*out, "lr"}}})
            if given.get("maximize") and not form.get("maximize"):
                bad.append((f"param_groups/{i}: maximize", "True, and this optimizer goes down"))
        if bad:
            right = "the negative of the loss; or zf.from_torch(torch.optim.AdamW, maximize=True) in the chain"
            raise Misfit(bad, right, "load_state_dict: of an optimizer that goes another way")
        return found


def _malformed(groups: Any, state: Any) -> list[tuple[str, str]]:
    """By key, why this is no state dict of any optimizer."""
    if not isinstance(state, Mapping) or not isinstance(groups, list | tuple):
        both = (("state", state, Mapping, "dict"), ("param_groups", groups, list | tuple, "list"))
        return [(key, f"{kind_of(x)} instead of a {kind}") for key, x, cls, kind in both if not isinstance(x, cls)]
    bad = [(f"state/{key}", own) for key, own in state.items() if not isinstance(own, Mapping)]
    bad += [(f"param_groups/{i}", g) for i, g in enumerate(groups) if not isinstance(g, Mapping)]
    named = [(i, g) for i, g in enumerate(groups) if isinstance(g, Mapping)]
    missing = [(f"param_groups/{i}/{k}", "missing") for i, g in named for k in ("params", "lr") if k not in g]
    return [(key, f"{kind_of(x)} instead of a dict") for key, x in bad] + missing


def _names_given(groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any], keys: list[list[Any]]) -> Any:
    """For each group the names of its parameters; `None` if any parameter has no name."""
    if all(len(g.get("param_names") or ()) == len(k) for g, k in zip(groups, keys, strict=True)) and any(keys):
        return [list(g["param_names"]) for g in groups]
    if any(keys) and all(isinstance(key, str) for k in keys for key in k):
        return keys
    names = own.get("param_names")
    alike = names is not None and [len(x) for x in names] == [len(k) for k in keys]
    return names if alike else None


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    """The given entries of a leaf, without those that stand for nothing, as torch has for a momentum of 0."""
    return {
        name: x
        for name, x in own.items()
        if name.startswith(OWN_ENTRY) or (x is not None and not (isinstance(x, Mapping) and not x))
    }


def _is_number(x: Any) -> TypeGuard[Any]:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)


def _states(own: Mapping[str, Any]) -> bool:
    """Whether a leaf has a state."""
    return any(not name.startswith(OWN_ENTRY) for name in own)


def _is_coarse(x: Any) -> bool:
    """Whether a count has been rounded: torch casts a state to the dtype of its parameter."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
