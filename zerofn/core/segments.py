"""How update halves are grouped: stretches that run bucket by bucket, and neighbours fused into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .._errors import explain
from .facts import Scope
from .transform import Transform, TransformState, gives_parameters

States = dict[str, TransformState]


@dataclass(frozen=True)
class Stretch:
    """Transforms in a row that can be run together: the first may look at the whole tree, the others at leaves alone.

    Attributes:
        given: the transforms as they stand in the chain.
        parts: the transforms as they are run, of which one may be several neighbours fused.
        joined: by the name of a fused one, the transforms that it is made of.
        keeps_old: whether a transform in it compares the new parameters with the old, which another one in it writes.
        keeps_old_for_later: whether a transform of a later stretch does.
    """

    given: tuple[Transform, ...]
    parts: tuple[Transform, ...]
    joined: Mapping[str, tuple[Transform, ...]]
    keeps_old: bool = False
    keeps_old_for_later: bool = False

    def states(self, given: States) -> States:
        """States by the names of `parts`, from those by the names of `given`."""
        apart = {p.name for members in self.joined.values() for p in members}
        kept = {name: state for name, state in given.items() if name not in apart}
        for name, members in self.joined.items():
            # An entry of the same name means the same to all of them.
            kept[name] = {slot: entry for p in members for slot, entry in given[p.name].items()}
        return kept

    def spread(self, states: States, before: States) -> States:
        """States by the names of `given`, from those by the names of `parts`, in the order of `before`."""
        new = dict(states)
        for name, members in self.joined.items():
            whole = new.pop(name)
            for p in members:
                new[p.name] = {slot: whole[slot] for slot in before[p.name]}
        return {name: new[name] for name in before}


def stretch(given: Iterable[Transform]) -> Stretch:
    """The stretch of these transforms, with neighbours fused where one of them can (`Transform.joins`)."""
    given = tuple(given)
    found: list[Transform] = []
    joined: dict[str, tuple[Transform, ...]] = {}
    i = 0
    while i < len(given):
        one, length = (given[i].joins and given[i].joins(given[i + 1 :])) or (given[i], 0)  # type: ignore[misc]
        if not 0 <= length <= len(given) - i - 1:
            wrong = f"{given[i].name}: joins(...) that takes {length} of the {len(given) - i - 1} transforms behind it"
            why = "a fused transform stands for itself and for the first few that joins is given"
            raise ValueError(explain(wrong, why, "return fused, how_many_of_them"))
        if length:
            members = given[i : i + 1 + length]
            one = replace(one, name="+".join(p.name for p in members), base=None)
            joined[one.name] = members
        found.append(one)
        i += 1 + length
    writes = next((i for i, part in enumerate(found) if gives_parameters(part)), len(found))
    return Stretch(given, tuple(found), joined, any([part.facts.compares for part in found[writes:]]))


def stretches(parts: Sequence[Transform]) -> tuple[Stretch, ...]:
    """The stretches of a chain: one begins where a transform must see the whole tree (a norm, an overflow)."""
    found = []
    i = 0
    while i < len(parts):
        j = i + 1
        while j < len(parts) and parts[i].scope is not Scope.WHOLE and parts[j].scope is Scope.LEAF:
            j += 1
        here = stretch(parts[i:j])
        if any(map(gives_parameters, here.given)) and any([part.facts.compares for part in parts[j:]]):
            here = replace(here, keeps_old_for_later=True)
        found.append(here)
        i = j
    return tuple(found)
