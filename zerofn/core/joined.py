"""Neighbours of a chain that are run as one, where one pass over memory gives what they give one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .transform import Transform, TransformState

States = dict[str, TransformState]


def join(parts: Sequence[Transform], states: States) -> tuple[list[Transform], States, dict[str, Sequence[Transform]]]:
    """The parts as they are run, the states by their names, and which each stands for, if it does for several."""
    if not any(part.joins for part in parts):
        return list(parts), states, {}
    found: list[Transform] = []
    joined: dict[str, Sequence[Transform]] = {}
    i = 0
    while i < len(parts):
        one, length = (parts[i].joins and parts[i].joins(parts[i + 1 :])) or (parts[i], 0)  # type: ignore[misc]
        if length:
            members = parts[i : i + 1 + length]
            one = replace(one, name="+".join(p.name for p in members), base=None)
            joined[one.name] = members
        found.append(one)
        i += 1 + length
    apart = {p.name for members in joined.values() for p in members}
    kept = {name: state for name, state in states.items() if name not in apart}
    for name, members in joined.items():
        # An entry of the same name means the same to all of them.
        kept[name] = {slot: entry for p in members for slot, entry in states[p.name].items()}
    return found, kept, joined


def spread(states: States, joined: dict[str, Sequence[Transform]], before: States) -> States:
    """The states by the names of the parts as they stand in the chain, in the order of `before`."""
    if not joined:
        return states
    new = dict(states)
    for name, members in joined.items():
        whole = new.pop(name)
        for p in members:
            new[p.name] = {slot: whole[slot] for slot in before[p.name]}
    return {name: new[name] for name in before}
