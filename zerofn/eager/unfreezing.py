"""States of leaves that were frozen when a model was attached, and that are trained from now on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.counts import apart, whole
from ..core.pipeline import Pipeline, first_state, pipeline
from ..core.state import State
from ..core.tree import of_leaves, overlaid, places
from ..ranks.group import Group
from .resident_params import first_states


def with_trained(pipe: Pipeline, state: State, paths: Collection[str], control: Group | None) -> tuple[Pipeline, State]:
    """The pipeline and the state of a model in which these leaves are trained too.

    What the state has of other leaves stays, on the same memory; the new leaves get first values, of the present
    parameters. All ranks call it.

    Args:
        pipe: the pipeline of the model, whose views read no state.
        state: its state.
        paths: of the leaves.
        control: the ranks that step together.

    Raises:
        Exception: what a transform raised on this rank, while it made first states.
        RuntimeError: on the others.
    """
    leaves = tuple([replace(x, trainable=x.trainable or x.path in paths) for x in pipe.layout.leaves])
    # With the placement comes the owner of each leaf that has a state: the state stays where it is.
    new = _resolved(pipe, replace(pipe.layout, leaves=leaves))
    alone = _resolved(pipe, new.layout.only(frozenset(paths)))
    stored = {path: x for path, x in state.leaves.items() if path in paths}
    first = first_state(alone, stored, first_states(alone, stored, control))
    found = {name: _merged(first.transforms[name], own, new) for name, own in state.transforms.items()}
    return new, State(state.leaves, found, state.step, state.micro_step, new.layout).fitting(new.tx)


def with_entries(state: State, of: State) -> State:
    """The state of one step, with the counters of another state and its entries of the leaves that it has."""
    paths = state.layout.trained
    found = {}
    for name, own in state.transforms.items():
        both = overlaid(own, of.transforms[name])
        found[name] = _counted_together(of_leaves(both, places(both, state.layout.every), paths), own)
    return State(of.leaves, found, of.step, of.micro_step, state.layout).fitting(state._fits)


def _resolved(pipe: Pipeline, layout: Any) -> Pipeline:
    """The same chain over the same groups, for another layout."""
    groups = iter([group for _, group in pipe.named])
    return pipeline(pipe.tx, layout, "zf.attach", lambda function, mesh: next(groups), pipe.model, pipe.checked)


def _merged(first: Any, own: Any, pipe: Pipeline) -> Any:
    """The state of one transform, with the entries of new leaves, in the order of all leaves."""
    both = overlaid(first, own)
    return _counted_together(of_leaves(both, places(both, pipe.layout.every), pipe.layout.trained), own)


def _counted_together(new: Any, old: Any) -> Any:
    """The same entries. Counters that were elements of one tensor are elements of one again."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    if old and all([isinstance(x, Tensor) for x in old.values()]) and whole(old.values()) is not None:
        return dict(zip(new, apart(torch.stack([*new.values()])), strict=True))
    return {key: _counted_together(x, old.get(key)) for key, x in new.items()}
