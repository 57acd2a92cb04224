"""`param_groups`, one for each optimizer of a pipeline: what learning-rate schedulers of torch.optim see and set."""

from __future__ import annotations

import inspect
from numbers import Integral, Real
from operator import is_
from typing import Any, NoReturn

from torch import Tensor

from .._errors import explain
from ..core.arguments import learning_rate
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..core.transform import Transform

# What a group shows whose optimizer has no rate: the factor that schedulers multiply, so that none goes unnoticed.
NO_RATE = 1.0
# Of each group, what this library puts there and a `state_dict` must have.
OWN = ("name", "lr")
# What torch.optim keeps in groups: of an optimizer that does not have it, or cannot change it, to set it is an error.
HYPERPARAMETERS = (
    "alpha", "amsgrad", "betas", "centered", "dampening", "eps", "lr_decay", "maximize", "momentum", "momentum_decay",
    "nesterov", "rho", "weight_decay",
)  # fmt: skip
NOT_PLAIN = object()


class ParamGroups:
    """The groups of one attached model, and who owns their learning rates.

    Attributes:
        groups: what `opt.param_groups` is.
    """

    def __init__(self, pipe: Pipeline, params: Leaves):
        self.optimizers = _optimizers(pipe)
        self.groups = [_group(pre, t, [params[p] for p in paths]) for pre, (t, paths) in self.optimizers.items()]
        # The rates as zerofn set them: others have been set by somebody else.
        self.shown = [g["lr"] for g in self.groups]
        self.params = [list(g["params"]) for g in self.groups]
        # The names in each that have been looked at, so that new ones are looked at once.
        self.names: list[set[str]] = [set() for _ in self.groups]
        # The hyperparameters that have been looked at, so that a change is looked at once.
        self.checked = [dict(t.facts.settable) for t, _ in self.optimizers.values()]

    def given(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """By prefix: learning rates, where the groups and not a schedule own them, and hyperparameters that have been
        set to something else than the pipeline has.

        Raises:
            ValueError: what is set would have no effect, or the optimizer does not take it.
        """
        _check_params(self.groups, self.params)
        rates: dict[str, float] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for i, (group, (prefix, (t, _))) in enumerate(zip(self.groups, self.optimizers.items(), strict=True)):
            if group.keys() != self.names[i]:
                _check_names(group, t)
                self.names[i] = set(group)
            if t.facts.rate is not None and not callable(t.facts.rate):
                rates[prefix] = group["lr"]
            elif group["lr"] != self.shown[i]:
                _refuse_rate(group["lr"], t)
            known = dict(t.facts.settable)
            # One that somebody has taken out is that of the pipeline.
            values = list(map(group.get, known, known.values()))
            if all(map(is_, values, known.values())):
                continue
            now = dict(zip(known, values, strict=True))
            if any(now[k] is not x and not _same(now[k], x) for k, x in self.checked[i].items()):
                assert t.factory is not None
                t.factory(**{**t.config, **now})
                self.checked[i] = now
            if own := {k: now[k] for k, x in known.items() if not _same(now[k], x)}:
                numbers[prefix] = own
        return rates, numbers

    def told(self) -> list[dict[str, Any]]:
        """The groups without hyperparameters that are the pipeline's, which another pipeline may have otherwise."""
        entries = zip(self.groups, self.optimizers.values(), strict=True)
        settable = ((group, dict(t.facts.settable)) for group, (t, _) in entries)
        return [{k: v for k, v in g.items() if k not in own or not _same(v, own[k])} for g, own in settable]

    def show(self, metrics: dict[str, Tensor]) -> None:
        """The rates that the pipeline has used, where groups do not own them."""
        for i, (group, (prefix, (t, _))) in enumerate(zip(self.groups, self.optimizers.items(), strict=True)):
            if callable(t.facts.rate) and prefix + "lr" in metrics:
                group["lr"] = self.shown[i] = float(metrics[prefix + "lr"])

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Go on with the rates of a `state_dict`, and with what schedulers had put beside them.

        What is not in there stays: a scheduler that was made before has put it here.
        """
        for group, there, (t, _) in zip(self.groups, saved, self.optimizers.values(), strict=True):
            group["lr"] = NO_RATE if t.facts.rate is None else there["lr"]
            group.update(_others(there))
            # JSON knows no tuples.
            given = {k: there.get(k, x) for k, x in t.facts.settable}
            group.update({k: tuple(x) if isinstance(x, list) else x for k, x in given.items()})
        self.shown = [g["lr"] for g in self.groups]


def as_text(rates: dict[str, Any], numbers: dict[str, dict[str, Any]]) -> str:
    """What groups set, the same text for the same numbers; a rate on another device is not waited for."""
    told = [f"{prefix}lr={_number(rate)}" for prefix, rate in rates.items()]
    for prefix, own in numbers.items():
        told += [f"{prefix}{name}={_number(x)}" for name, x in own.items()]
    return ", ".join(told)


def _number(x: Any) -> Any:
    if isinstance(x, Tensor):
        return float(x) if x.device.type == "cpu" and x.numel() == 1 else "a tensor"
    if isinstance(x, tuple | list):
        return tuple(map(_number, x))
    # Those of numpy print otherwise.
    return float(x) if isinstance(x, Real) else x


def _check_params(groups: list[dict[str, Any]], params: list[list[Tensor]]) -> None:
    """Refuse groups of other parameters: which there are, and what updates each, the pipeline says."""
    same = len(groups) == len(params)
    for group, mine in zip(groups, params, strict=False):
        there = group.get("params", ())
        same = same and len(there) == len(mine) and all(map(is_, there, mine))
        if "lr" not in group:
            raise ValueError(explain("a group of param_groups without lr", "a step asks for it", 'group["lr"] = 0.0'))
    if not same:
        there = [g.get("params", ()) for g in groups]
        has, mine = (", ".join(str(len(x)) for x in xs) or "no" for xs in (there, params))
        raise ValueError(
            explain(
                f"param_groups of {has} parameters while the pipeline has {mine}, or others than these",
                "what is added, taken out or exchanged there would have no effect: every parameter stays with its\n"
                "part of the pipeline",
                "p.requires_grad_(False), or zf.partition({'a': zf.adamw(1e-3), 'b': zf.sgd(1e-2)}, labels), before "
                "zf.attach;\nopt.detach() and another zf.attach later on",
            )
        )


def _refuse_rate(rate: Any, t: Transform) -> NoReturn:
    """A rate was set of which the optimizer has none, or one of its own."""
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


def _check_names(group: dict[str, Any], t: Transform) -> None:
    """Refuse what was put into a group and could have no effect."""
    settable = dict(t.facts.settable)
    fixed = [k for k in group if k in t.config or k in HYPERPARAMETERS]
    if useless := [k for k in fixed if k not in (*OWN, "params", *settable)]:
        can = " and ".join(["lr", *settable])
        has = t.factory is not None and useless[0] in inspect.signature(t.factory).parameters
        raise ValueError(
            explain(
                f"param_groups with {useless[0]} = {group[useless[0]]!r}",
                f"of this group only {can} can be set; {useless[0]} is part of the pipeline or of none: {t!r}",
                f"{t.name}({useless[0]}=...) before zf.attach" if has else "an optimizer that has it, before zf.attach",
            )
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def packed(group: dict[str, Any]) -> dict[str, Any]:
    """A group for a `state_dict`: its name and rate, and what schedulers and users have put there."""
    return {**{k: group[k] for k in OWN if k in group}, **_others(group)}


def _others(group: dict[str, Any]) -> dict[str, Any]:
    kept = {k: _plain(v) for k, v in group.items() if k not in OWN and k != "params"}
    return {k: v for k, v in kept.items() if v is not NOT_PLAIN}


def _plain(x: Any) -> Any:
    """A copy of numbers, text and 0-d tensors, in lists and dicts too: what JSON and `torch.load` can bring back."""
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, Tensor):
        return x.detach().clone() if x.ndim == 0 else NOT_PLAIN
    if isinstance(x, Real):
        # Those of numpy become Python's.
        return int(x) if isinstance(x, Integral) else float(x)
    if isinstance(x, list | tuple):
        values = [_plain(v) for v in x]
        return NOT_PLAIN if any(v is NOT_PLAIN for v in values) else tuple(values) if isinstance(x, tuple) else values
    if isinstance(x, dict) and all(isinstance(k, str) for k in x):
        values = {k: _plain(v) for k, v in x.items()}
        return NOT_PLAIN if any(v is NOT_PLAIN for v in values.values()) else values
    return NOT_PLAIN


def _group(prefix: str, t: Transform, params: list[Tensor]) -> dict[str, Any]:
    lr = NO_RATE if t.facts.rate is None else t.facts.rate
    return {
        "params": params,
        "lr": float(learning_rate(t.name, lr, 0)) if callable(lr) else lr,
        "name": prefix.rstrip(".") or t.name,
        **dict(t.facts.settable),
    }


def _optimizers(pipe: Pipeline) -> dict[str, tuple[Transform, list[str]]]:
    """Each optimizer of the pipeline by the prefix under which it runs, with its leaves."""
    found: dict[str, tuple[Transform, list[str]]] = {}
    trainable = list(pipe.layout.trained)

    def visit(t: Transform, prefix: str, paths: list[str]) -> None:
        if not t.facts.optimizes and not t.in_turn:
            return
        if t.members_fn is None:
            for part in t.parts if t.in_turn else ():
                visit(part, prefix, paths)
            if t.facts.optimizes:
                found[prefix] = (t.parts[0] if t.parts else t, paths)
            return
        for label, (member, own) in t.members_fn(pipe.layout).items():
            visit(member, prefix + label, [p for p in paths if p in own])

    for part in pipe.parts:
        visit(part, "", trainable)
    return found
