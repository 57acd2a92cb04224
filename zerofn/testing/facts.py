"""Whether a transform does what its `Facts` say: each fact is compared with what the update half gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import memories
from ..core.layout import Layout, Leaves
from ..core.state import State
from ..core.transform import Transform, TransformState
from ..core.tree import Tree, flatten, tensors_of
from ..core.update_context import Context
from .trees import random_like

# How far parameters are moved to tell new parameters, which move along, from gradients, which do not.
SHIFT = 1.0
# So many windows are looked at for what a transform keeps in some step.
WINDOWS = 6
NO = "keeps=False says that"


def check_facts(t: Transform, state: State) -> None:
    """Raise an `AssertionError` where a transform does other things than its `Facts` say.

    Args:
        t: no chain, and no guest of another library.
        state: of a pipeline that it stands in, on whose parameters it is run as they are stored.
    """
    run = _Run(t, state.layout, state.leaves)
    for why in (_window(run), _parameters(run), _old(run), _reports(run), _settable(run), _weights(run), _keeps(run)):
        if why:
            raise AssertionError(f"{t!r}: it does what its `Facts` say. {why}")


@dataclass(frozen=True)
class _Run:
    """A transform by itself, fed with the same gradients again and again."""

    t: Transform
    layout: Layout
    leaves: Leaves

    def steps(
        self,
        shift: float = 0.0,
        weights: tuple[float, ...] = (),
        windows: int = 1,
        handed: list[Tensor] | None = None,
        old: float | None = None,
        **given: Any,
    ) -> Iterator[tuple[Leaves | None, TransformState, Mapping[str, Tensor]]]:
        """What it gives in each micro-step, `None` where it holds, its state then, and the metrics.

        What its update half is handed goes into `handed` too. With `old` all old parameters are that number, for one
        that watches.
        """
        params = {p: x + shift if x.is_floating_point() else x for p, x in self.leaves.items()}
        state = self.t.init_fn(params, self.layout)
        for i in range(windows * self.t.facts.window):
            grads = params if self.t.facts.watches else random_like(self.leaves, seed=100 + i)
            if handed is not None:
                handed += [*grads.values(), *params.values()]
            weight = weights[i] if weights else 2.0 if self.t.facts.weighted else None
            ctx = Context(self.layout, weight=weight, **given)
            before = params if old is None else {p: torch.full_like(x, old) for p, x in params.items()}
            prepared = self.t.prepare_fn(state, grads, before, ctx)
            out, own = self.t.update_fn(grads, state, before, prepared.carry, ctx)
            if prepared.close is not None:
                prepared.close()
            ctx.settle()
            state = {**state, **own, **prepared.state}
            yield (out if prepared.emit else None), state, ctx.metrics

    def last(self, **given: Any) -> tuple[Leaves, TransformState, Mapping[str, Tensor]]:
        """What it gives at the end of a window, its state then, and the metrics of that step."""
        *_, (out, state, metrics) = self.steps(**given)
        return out or {}, state, metrics


def _window(run: _Run) -> str:
    window = run.t.facts.window
    going = [i for i, (out, *_) in enumerate(run.steps(), 1) if out is not None]
    if going == [window]:
        return ""
    gave = f"in {', '.join(map(str, going))} of the first {window}" if going else f"in none of the first {window}"
    return f"window={window} says that one micro-step of so many goes on, the last. It gave gradients {gave}."


def _parameters(run: _Run) -> str:
    if not run.t.facts.optimizes:
        return ""
    here, there = run.last()[0], run.last(shift=SHIFT)[0]
    moved = [(there[p].double() - x.double()).flatten() for p, x in here.items() if x.is_floating_point()]
    if not moved or not (all_of := torch.cat(moved)).numel() or all_of.mean() > SHIFT / 2:
        return ""
    return "optimizes=True says that it gives new parameters. Those would move with the old ones: it gives gradients."


def _reports(run: _Run) -> str:
    missing = sorted(run.t.facts.reported(run.layout, run.leaves.keys()) - run.last()[2].keys())
    return f"reports={missing} says that it shows these metrics. It has no ctx.report of them." if missing else ""


def _old(run: _Run) -> str:
    if not run.t.facts.watches or run.t.facts.sees_old or _same(run.last(), run.last(old=torch.nan)):
        return ""
    return "sees_old=False says that it looks at no old parameters. With other ones it gives other numbers."


def _settable(run: _Run) -> str:
    facts = run.t.facts
    if facts.rate is not None:
        rate = 2 * facts.rate + 0.01 if isinstance(facts.rate, float) else 0.125
        if _same(run.last()[0], run.last(lr={"": rate})[0]):
            return f"rate={facts.rate!r} says that its rate is set from outside. It does not use ctx.lr[ctx.prefix]."
    for name, value in facts.settable:
        numbers = {"": {name: tuple(map(_other, value)) if isinstance(value, tuple) else _other(value)}}
        # Three steps: a decay of a momentum has an effect on the next one.
        if _same(run.last(windows=3)[:2], run.last(windows=3, numbers=numbers)[:2]):
            return f"{name!r} is settable from outside. It does not use ctx.numbers[ctx.prefix][{name!r}]."
    return ""


def _weights(run: _Run) -> str:
    if not run.t.facts.weighted or run.t.facts.window == 1:
        return ""
    equal = (1.0,) * run.t.facts.window
    if not _same(run.last(weights=equal)[0], run.last(weights=(3.0, *equal[1:]))[0]):
        return ""
    return "weighted=True says that it weighs micro-batches. It does not use ctx.weight."


def _keeps(run: _Run) -> str:
    if run.t.facts.keeps:
        return ""
    first = run.t.init_fn(dict(run.leaves), run.layout)
    if why := _kept("first state", first, run.leaves.values()):
        return why
    handed: list[Tensor] = []
    # A buffer may begin as the gradient itself, and be another one afterwards.
    for i, (out, state, _) in enumerate(run.steps(windows=WINDOWS, handed=handed), 1):
        made = (out or {}).values() if run.t.facts.optimizes else ()
        if why := _kept(f"state after micro-step {i}", state, (*handed, *made)):
            return why
        # What it was handed last.
        params = dict(zip(run.leaves, handed[-len(run.leaves) :], strict=True))
        moved = [x for path, x in (out or {}).items() if x is not params[path]]
        if not memories(moved).isdisjoint(memories(handed if run.t.facts.optimizes else params.values())):
            more = "no gradient, and " if run.t.facts.optimizes else ""
            return f"{NO} it gives {more}no parameter of another leaf, nor a view of one. It does, in micro-step {i}."
    return ""


def _kept(which: str, state: TransformState, others: Iterable[Tensor]) -> str:
    """What of memory that is not its own a state has."""
    own = tensors_of(state)
    if not memories(others).isdisjoint(memories(own)):
        return f"{NO} its state shares no memory with what it is handed, or new parameters; its {which} does."
    if len(memories(own)) < len([x for x in own if memories([x])]):
        return f"{NO} its state has no memory at two places; its {which} does."
    return ""


def _other(value: Any) -> Any:
    """Another value of a hyperparameter, valid where the first is between 0 and 1."""
    return (0.5 if value == 0.25 else 0.25) if isinstance(value, float) else value


def _same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flatten(a)[0], flatten(b)[0], strict=True))
