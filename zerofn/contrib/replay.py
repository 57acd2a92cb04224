"""`replay` runs a step twice and compares bits; `record` finds the step and the leaf where a NaN began."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofn import State
from zerofn.extend import check_count, entries, explain, kept_out_of_graphs, kind_of, tree_map

Tree = Any

# Integer dtypes by size in bytes.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """The first number that differs between two runs, in the order of the chain, or that is not finite.

    Attributes:
        owner: the name of the transform whose state it is in; `"params"`, or `""` for the state's counters and metrics.
        slot: its name there, such as `"exp_avg"`.
        path: the leaf, or `""`.
        element: its index in this process's tensor of the leaf, flattened.
        values: of the two runs, or the one that is not finite.
        step: the step, counted from 0; of `replay` always 0.
    """

    owner: str
    slot: str
    path: str
    element: int
    values: tuple[float, ...]
    step: int = 0


@kept_out_of_graphs(
    "it runs a step twice and compares the results in Python",
    "zf.replay(torch.compile(step), state, *batch), outside of what is compiled",
)
def replay(step: Callable[..., tuple[State, Any]], state: State, *batch: Tree, **keywords: Any) -> Difference | None:
    """Run a step twice from copies of one state and one batch, and find the first number whose bits differ.

    A step of zerofn is deterministic. A difference comes from the loss (dropout, or a kernel that adds in any order),
    from a schedule that keeps a state of its own, or from a machine that computes wrongly.

    Args:
        step: from `zf.make_step`. torch's random generators are restored after each run, so that a loss that draws from
            them draws the same numbers.
        state: the state before the step. It is not written, even if the step donates.
        batch: the step's other arguments.
        keywords: the step's keyword arguments, such as `weight=`.

    Returns:
        `None` if all bits agree, else the first `Difference`: states of transforms in the order of the chain, then
        parameters. Each rank compares its own shards.

    Raises:
        TypeError: `step` cannot be called, or `state` is not a `State`.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.1)
        >>> state = zf.init(tx, {"w": torch.ones(3)})
        >>> zf.replay(zf.make_step(lambda p: p["w"].sum(), tx), state) is None
        True
        >>> calls = []
        >>> def forgetful(p):
        ...     calls.append(0)
        ...     return (p["w"] * torch.tensor([1.0, len(calls), 1.0])).sum()
        >>> found = zf.replay(zf.make_step(forgetful, tx), state)
        >>> found.owner, found.path, found.element
        ('params', 'w', 1)
    """
    _check_step("zf.replay", step)
    if not isinstance(state, State):
        right = "state = zf.init(tx, params), and the step of zf.make_step(loss_fn, tx)"
        raise TypeError(explain(f"zf.replay got a {type(state).__name__}", "it is not a state", right))
    one, other = (_run(step, state, batch, keywords)[0] for _ in range(2))
    return _first_difference(one, other)


class Record:
    """A step that keeps its last states and batches; see `zf.record`.

    Attributes:
        kept: for each of the last steps, the oldest first: its number, and copies of state, batch and keywords.
    """

    def __init__(self, step: Callable[..., tuple[State, Any]], last: int):
        self.step, self.kept, self.count = step, deque(maxlen=last), 0

    def __call__(self, state: State, *batch: Tree, **keywords: Any) -> tuple[State, Any]:
        self.kept.append((self.count, _copy(state), _copy(batch), _copy(keywords)))
        self.count += 1
        return self.step(state, *batch, **keywords)

    def trouble(self) -> Difference | None:
        """Run the kept steps again; return the first number that becomes infinite or NaN, or whose bits change.

        `None` if there is none. A number that was not finite before a step does not count: it comes from an earlier
        step, or is meant to be so.
        """
        for number, state, batch, keywords in self.kept:
            (new, metrics), (other, _) = (_run(self.step, state, batch, keywords) for _ in range(2))
            found = _first_difference(new, other) or _not_finite(state, new, metrics)
            if found is not None:
                return found._replace(step=number)
        return None


def record(step: Callable[..., tuple[State, Any]], last: int = 8) -> Record:
    """Wrap a step so that it keeps its last states and batches, to find out later where a NaN came from.

    Args:
        step: from `zf.make_step`.
        last: how many steps to keep. Each kept step takes the memory of a state and a batch.

    Returns:
        A function like `step`. Its `trouble()` runs the kept steps again, and returns the first `Difference`: step,
        transform, leaf and element where a number became infinite or NaN, or changes from run to run. A fault in a
        transform without state shows in the next state after it, or in the parameters.

    Raises:
        TypeError: `step` cannot be called.
        ValueError: `last` is not a positive int.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.1)
        >>> step = zf.record(zf.make_step(lambda p, x: (p["w"] * x).sum(), tx))
        >>> state = zf.init(tx, {"w": torch.ones(2)})
        >>> for x in (1.0, 2.0, float("inf"), 3.0):
        ...     state, _ = step(state, torch.tensor([0.0, x]))
        >>> found = step.trouble()
        >>> found.step, found.owner, found.path, found.element
        (2, 'params', 'w', 1)
    """
    _check_step("zf.record", step)
    check_count("zf.record", "last", last, "steps that are kept")
    return Record(step, last)


def _check_step(function: str, step: Any) -> None:
    if not callable(step):
        why = f"the first argument is a step, and {step!r} is {kind_of(step)}"
        raise TypeError(explain(f"{function}({step!r}, ...)", why, f"{function}(zf.make_step(loss_fn, tx), ...)"))


def _run(step: Callable[..., Any], state: State, batch: Tree, keywords: dict[str, Any]) -> tuple[State, Any]:
    """Run a step on copies, and restore torch's random generators."""
    with torch.random.fork_rng():
        return step(_copy(state), *_copy(batch), **keywords)


def _first_difference(one: State, other: State) -> Difference | None:
    for (owner, slot, path, a), (*_, b) in zip(_in_order(one), _in_order(other), strict=True):
        differ = (_bits(a) != _bits(b)).flatten().nonzero()
        if len(differ):
            i = int(differ[0])
            return Difference(owner, slot, path, i, (a.flatten()[i].item(), b.flatten()[i].item()))
    return None


def _not_finite(old: State, new: State, metrics: Any) -> Difference | None:
    for (owner, slot, path, a), (*_, b) in zip(_in_order(new), _in_order(old), strict=True):
        if a.is_floating_point() and a.shape == b.shape:
            fresh = (~a.isfinite() & b.isfinite()).flatten().nonzero()
            if len(fresh):
                i = int(fresh[0])
                return Difference(owner, slot, path, i, (a.flatten()[i].item(),))
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    if isinstance(loss, Tensor) and not loss.isfinite():
        return Difference("", "loss", "", 0, (loss.item(),))
    return None


def _in_order(state: State) -> list[tuple[str, str, str, Tensor]]:
    """The tensors of a state: transforms in the order of the chain, then parameters, then counters."""
    found = [e for e in entries(state) if isinstance(e.value, Tensor)]
    rank = {**{name: i for i, name in enumerate(state.transforms)}, "params": len(state.transforms)}
    found.sort(key=lambda e: rank.get(e.owner, len(rank)))
    return [(e.owner, e.slot, e.path, e.value) for e in found]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.element_size()]) if x.is_floating_point() else x


def _copy(tree: Tree) -> Tree:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)
