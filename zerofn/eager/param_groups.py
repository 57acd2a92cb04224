"""`opt.param_groups`, one group for each optimizer of a pipeline: what schedulers of torch.optim read and set."""

from __future__ import annotations

import inspect
import math
from numbers import Integral, Real
from operator import is_
from typing import Any, NoReturn

from torch import Tensor

from .._errors import bad_leaves, explain
from ..core.arguments import learning_rate, misfit
from ..core.layout import Leaves
from ..core.number_graphs import ATTACHED
from ..core.pipeline import Pipeline
from ..core.transform import Transform

# A group whose optimizer has no rate shows this factor. A scheduler multiplies it, so its change is noticed.
NO_RATE = 1.0
# The keys that this library puts into each group, and that a `state_dict` must have.
OWN = ("name", "lr")
# The hyperparameters that torch.optim keeps in groups. Setting one that the optimizer lacks or cannot change raises.
HYPERPARAMETERS = (
    "alpha", "amsgrad", "betas", "centered", "dampening", "eps", "lr_decay", "maximize", "momentum", "momentum_decay",
    "nesterov", "rho", "weight_decay",
)  # fmt: skip
NOT_PLAIN = object()


class NamedGroup(dict[str, Any]):
    """A group with a name, whose keys are only torch's: torch's functions copy every key to other optimizers.

    Attributes:
        name: of the optimizer of the pipeline; `group["name"]` gives it too, unless that has been set.

    >>> group = NamedGroup("adamw", {"lr": 0.1})
    >>> group["name"], list(group)
    ('adamw', ['lr'])
    """

    def __init__(self, name: str, own: dict[str, Any]):
        super().__init__(own)
        self.name = name

    def __missing__(self, key: str) -> Any:
        if key == "name":
            return self.name
        raise KeyError(key)


class _GroupOptimizer:
    """The optimizer of one group, and which entries of the group have been checked.

    Attributes:
        prefix: the prefix under which its optimizer runs.
        transform: that optimizer.
        params: its parameters.
        settable: the hyperparameters that may be set, with the pipeline's values.
        owns_rate: whether the group sets the learning rate: the optimizer has one, and no schedule sets it.
        rate: the learning rate that this library has set; if the group's differs, somebody else has set it.
        names: the keys that were checked, so that new ones are checked once.
        checked: the hyperparameters that were checked, so that a change is checked once.
    """

    def __init__(self, prefix: str, transform: Transform, params: list[Tensor]):
        self.prefix, self.transform, self.params = prefix, transform, params
        self.settable = self.checked = dict(transform.facts.settable)
        rate = transform.facts.rate
        self.owns_rate = rate is not None and not callable(rate)
        rate = NO_RATE if rate is None else rate
        self.rate: Any = float(learning_rate(transform.name, rate, 0, ATTACHED)) if callable(rate) else rate
        self.names: set[str] = set()

    def group(self) -> dict[str, Any]:
        """The group as it is when the model is attached."""
        return NamedGroup(self.name, {"params": list(self.params), "lr": self.rate, **self.settable})

    @property
    def name(self) -> str:
        """The name of the group, in checkpoints too."""
        return self.prefix.rstrip(".") or self.transform.name

    def check_names(self, group: dict[str, Any]) -> None:
        """Refuse keys of the group that would have no effect."""
        if "lr" not in group:
            raise ValueError(explain("a group of param_groups without lr", "a step asks for it", 'group["lr"] = 0.0'))
        t = self.transform
        fixed = [k for k in group if k in t.config or k in HYPERPARAMETERS]
        if useless := [k for k in fixed if k not in (*OWN, "params", *self.settable)]:
            can = " and ".join(["lr", *self.settable])
            is_argument = t.factory is not None and useless[0] in inspect.signature(t.factory).parameters
            right = f"{t.name}({useless[0]}=...)" if is_argument else "an optimizer that has it,"
            raise ValueError(
                explain(
                    f"param_groups with {useless[0]} = {group[useless[0]]!r}",
                    f"of this group only {can} can be set; {useless[0]} is part of the pipeline or of none: {t!r}",
                    f"{right} before zf.attach",
                )
            )
        self.names = set(group)

    def changed(self, values: list[Any]) -> dict[str, Any]:
        """The hyperparameters, of all that may be set, whose values differ from the pipeline's."""
        now = dict(zip(self.settable, values, strict=True))
        if any(now[k] is not x and not same_value(now[k], x) for k, x in self.checked.items()):
            t = self.transform
            assert t.factory is not None
            t.factory(**{**t.config, **now})
            self.checked = now
        return {k: now[k] for k, x in self.settable.items() if not same_value(now[k], x)}

    def set_in(self, group: dict[str, Any]) -> list[str]:
        """The hyperparameters of the group that were set to other values than the pipeline's."""
        return [k for k, x in self.settable.items() if k in group and not same_value(group[k], x)]

    def without_own(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group without hyperparameters that have the pipeline's values."""
        kept = self.set_in(group)
        return {k: v for k, v in group.items() if k not in self.settable or k in kept}

    def given_by(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a saved group, with tuples where JSON has made lists."""
        values = {k: saved.get(k, x) for k, x in self.settable.items()}
        return {k: tuple(x) if isinstance(x, list) else x for k, x in values.items()}

    def misfit(self, saved: dict[str, Any]) -> str | None:
        """Why a saved group cannot be loaded; `None` if it can."""
        t, given = self.transform, self.given_by(saved)
        if t.facts.rate is not None and (why := misfit("lr", saved.get("lr"), 0.0, math.inf)):
            return why
        try:
            if t.factory is not None and not all(same_value(given[k], x) for k, x in self.settable.items()):
                t.factory(**{**t.config, **given})
        except (TypeError, ValueError) as error:
            return str(error).splitlines()[0] + " is refused"
        return None


class ParamGroups:
    """The groups of one attached model, and who owns their learning rates.

    Attributes:
        groups: the list `opt.param_groups`.
        optimizers: the optimizer of each group.
        scheduled: whether a schedule of the pipeline sets any of the rates.
    """

    def __init__(self, pipe: Pipeline, params: Leaves):
        self._owned = [*_optimizers(pipe)]
        self.optimizers = [_GroupOptimizer(pre, t, [params[p] for p in paths]) for pre, t, paths in self._owned]
        self.groups = [optimizer.group() for optimizer in self.optimizers]
        self.scheduled = any(callable(optimizer.transform.facts.rate) for optimizer in self.optimizers)

    def exchange(self, params: Leaves) -> None:
        """Put the parameters that the model has since it is attached in the places of those that it had."""
        for group, optimizer, (_, _, paths) in zip(self.groups, self.optimizers, self._owned, strict=True):
            optimizer.params = [params[path] for path in paths]
            group["params"] = list(optimizer.params)

    def regroup(self, pipe: Pipeline, params: Leaves) -> None:
        """Put in parameters that are trained from now on. What is set in the groups stays."""
        before = {x.prefix: (x, group) for x, group in zip(self.optimizers, self.groups, strict=True)}
        made = ParamGroups(pipe, params)
        pairs = [before.get(x.prefix, (x, group)) for x, group in zip(made.optimizers, made.groups, strict=True)]
        self._owned, self.scheduled = made._owned, made.scheduled
        self.optimizers = [optimizer for optimizer, _ in pairs]
        # It is the list that schedulers of torch have.
        self.groups[:] = [group for _, group in pairs]
        self.exchange(params)

    def given(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """By prefix: learning rates and hyperparameters that were set to other values than the pipeline's.

        Raises:
            ValueError: a setting would have no effect, or the optimizer does not take it.
        """
        rates: dict[str, float] = {}
        numbers: dict[str, dict[str, Any]] = {}
        if len(self.groups) != len(self.optimizers):
            self._refuse_params()
        for group, optimizer in zip(self.groups, self.optimizers, strict=True):
            params = group.get("params", ())
            if len(params) != len(optimizer.params) or not all(map(is_, params, optimizer.params)):
                self._refuse_params()
            if group.keys() != optimizer.names:
                optimizer.check_names(group)
            rate = group["lr"]
            if not optimizer.owns_rate:
                if rate is not optimizer.rate and rate != optimizer.rate:
                    _refuse_rate(rate, optimizer.transform)
            elif rate is not optimizer.transform.facts.rate and not same_value(rate, optimizer.transform.facts.rate):
                rates[optimizer.prefix] = rate
            known = optimizer.settable
            # A deleted key counts as the pipeline's value.
            values = list(map(group.get, known, known.values()))
            if not all(map(is_, values, known.values())) and (changed := optimizer.changed(values)):
                numbers[optimizer.prefix] = changed
        return rates, numbers

    def to_save(self) -> list[dict[str, Any]]:
        """The groups without the pipeline's own hyperparameters, which may differ in the pipeline that loads them."""
        pairs = zip(self.groups, self.optimizers, strict=True)
        return [{"name": o.name, **o.without_own(g)} for g, o in pairs]

    def show(self, metrics: dict[str, Tensor]) -> None:
        """Write the rates of the pipeline's schedules into the groups."""
        for group, optimizer in zip(self.groups, self.optimizers, strict=True):
            if callable(optimizer.transform.facts.rate) and optimizer.prefix + "lr" in metrics:
                rate = metrics[optimizer.prefix + "lr"]
                # A tensor on a GPU is not read before somebody looks at it.
                group["lr"] = optimizer.rate = float(rate) if rate.is_cpu else rate

    def check(self, saved: list[dict[str, Any]]) -> None:
        """Raise a ValueError for groups of a `state_dict` that `load` cannot take: the next step would refuse them."""
        both = enumerate(zip(self.optimizers, saved, strict=True))
        found = [(f"param_groups/{i}", optimizer.misfit(saved_group)) for i, (optimizer, saved_group) in both]
        if bad := [(group, why) for group, why in found if why]:
            right = "numbers, as opt.state_dict() has them; opt.param_groups[0]['lr'] = 1e-3 before or behind the load"
            raise ValueError(bad_leaves("load_state_dict: these groups cannot be set", bad, right))

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Load the rates of a `state_dict`, and the keys that schedulers have put beside them.

        Other keys of the groups stay: a scheduler that was made before has put them here.
        """
        for group, saved_group, optimizer in zip(self.groups, saved, self.optimizers, strict=True):
            rate = NO_RATE if optimizer.transform.facts.rate is None else saved_group["lr"]
            # Tensors are copied: schedulers write into them, and they may belong to another optimizer.
            group["lr"] = optimizer.rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
            group.update(_others(saved_group))
            group.update(optimizer.given_by(saved_group))

    def _refuse_params(self) -> NoReturn:
        """Raise for groups with other parameters: the pipeline says which there are, and what updates each."""
        params = [g.get("params", ()) for g in self.groups]
        own = [optimizer.params for optimizer in self.optimizers]
        has, mine = (", ".join(str(len(x)) for x in xs) or "no" for xs in (params, own))
        raise ValueError(
            explain(
                f"param_groups of {has} parameters while the pipeline has {mine}, or others than these",
                "what is added, taken out or exchanged there would have no effect: every parameter stays with its\n"
                "part of the pipeline",
                "p.requires_grad_(False), or zf.partition({'a': zf.adamw(1e-3), 'b': zf.sgd(1e-2)}, labels), before "
                "zf.attach;\nopt.detach() and another zf.attach later on",
            )
        )


def as_text(rates: dict[str, Any], numbers: dict[str, dict[str, Any]], frozen: str = "") -> str:
    """The settings of groups as text, equal for equal numbers. This does not wait for a rate on another device.

    Args:
        rates: by prefix.
        numbers: by prefix, other hyperparameters.
        frozen: which leaves are frozen, as text.
    """
    parts = []
    for prefix, rate in rates.items():
        parts.append(f"{prefix}lr={_number(rate)}")
    for prefix, own in numbers.items():
        parts += [f"{prefix}{name}={_number(x)}" for name, x in own.items()]
    if frozen:
        parts.append(frozen)
    return ", ".join(parts)


def _number(x: Any) -> Any:
    if isinstance(x, Tensor):
        return float(x) if x.device.type == "cpu" and x.numel() == 1 else "a tensor"
    if isinstance(x, tuple | list):
        return tuple(map(_number, x))
    # numpy's numbers print differently, so they become Python's.
    return float(x) if isinstance(x, Real) else x


def _refuse_rate(rate: Any, t: Transform) -> NoReturn:
    """Raise for a rate that was set, where the optimizer has none or a schedule sets it."""
    if t.facts.rate is None:
        why = "that optimizer has no learning rate"
        right = (
            "a keyword-only argument lr in a function of your own, def mine(grad, param, *, lr), which is given\n"
            "what is set here; a transformation of another library with a schedule of its own"
        )
    else:
        why = "that transform owns its learning rate"
        right = "adamw(lr=1e-3) with a torch.optim.lr_scheduler, or the schedule alone"
    wrong = f"param_groups lr was set to {rate!r} while the pipeline has {t!r}"
    raise ValueError(explain(wrong, f"{why}, so what is set here would have no effect", right))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a hyperparameter are equal; tensors only if they are the same object."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def packed(group: dict[str, Any]) -> dict[str, Any]:
    """A group for a `state_dict`: its name and rate, and the keys that schedulers and users have added."""
    return {**{k: group[k] for k in OWN if k in group}, **_others(group)}


def _others(group: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _plain(v) for k, v in group.items() if k not in OWN and k != "params"}
    return {k: v for k, v in kept.items() if v is not NOT_PLAIN}


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a file can store."""
    return {k: v for k, x in values.items() if (v := _plain(x)) is not NOT_PLAIN}


def _plain(x: Any) -> Any:
    """A copy of numbers, text and 0-d tensors, in lists and dicts too: what JSON and `torch.load` can load."""
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, Tensor):
        return x.detach().clone() if x.ndim == 0 else NOT_PLAIN
    if isinstance(x, Real):
        # numpy's numbers become Python's.
        return int(x) if isinstance(x, Integral) else float(x)
    if isinstance(x, list | tuple):
        values = [_plain(v) for v in x]
        return NOT_PLAIN if any(v is NOT_PLAIN for v in values) else tuple(values) if isinstance(x, tuple) else values
    if isinstance(x, dict) and all(isinstance(k, str) for k in x):
        values = {k: _plain(v) for k, v in x.items()}
        return NOT_PLAIN if any(v is NOT_PLAIN for v in values.values()) else values
    return NOT_PLAIN


def _optimizers(pipe: Pipeline) -> list[tuple[str, Transform, list[str]]]:
    """Each optimizer of the pipeline: the prefix under which it runs, the transform, and the paths of its leaves."""
    found: list[tuple[str, Transform, list[str]]] = []

    def visit(t: Transform, prefix: str, paths: list[str]) -> None:
        if t.members_fn is not None and (t.facts.optimizes or t.in_turn):
            for label, (member, own) in t.members_fn(pipe.layout.only(set(paths))).items():
                visit(member, prefix + label, [p for p in paths if p in own])
            return
        for part in t.parts if t.in_turn else ():
            visit(part, prefix, paths)
        if t.facts.optimizes:
            found.append((prefix, t.parts[0] if t.parts else t, paths))

    for part in pipe.parts:
        visit(part, "", list(pipe.layout.trained))
    return found
