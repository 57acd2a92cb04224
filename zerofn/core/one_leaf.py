"""Update halves run one leaf at a time, in whatever order gradients come, through groups of leaves too.

`core.executor` hands a `partition` the whole tree, since a member may want to look at its whole group. Where no member
does, each leaf has a road of its own through the members that are there for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .._ranges import UPDATE, ranged
from .executor import slice_entry, updated
from .joined import join, spread
from .transform import Context, Prepared, Transform, TransformState
from .tree import Leaves


def members(part: Transform, where: str) -> Iterator[tuple[str, Transform]]:
    """The transforms that a leaf may meet in `part`, each with where it stands."""
    if part.in_turn or part.members_fn is not None:
        for inner in part.parts:
            yield from members(inner, where if inner.in_turn else f"{where}({inner.name})")
    else:
        yield where, part


class OneByOne:
    """One step of transforms in a row.

    Args:
        parts: none that must see the tree.
        states: by name of the transform, as at the beginning of the step.
        leaves: stored parameters that may get a gradient.
        ctx: of the step.
    """

    def __init__(self, parts: Sequence[Transform], states: dict[str, TransformState], leaves: Leaves, ctx: Context):
        self.given, self.ctx = states, ctx
        parts, self.old, self.joined = join(parts, states)
        states, self.parts = self.old, parts
        self.prepared: dict[str, Prepared] = {}
        self.groups: dict[str, dict[str, _Group]] = {}
        for part in parts:
            if part.members_fn is None:
                with ranged(UPDATE, ctx.prefix + part.name):
                    self.prepared[part.name] = part.prepare_fn(states[part.name], None, leaves, ctx)
            else:
                self.groups[part.name] = {
                    # The key of a member's state is what follows the name in its prefix.
                    prefix.split(".", 1)[1][:-1]: _Group(member, paths, prefix, states[part.name], leaves, ctx)
                    for prefix, (member, paths) in part.members_fn(ctx.layout).items()
                }
        self.changed: dict[str, TransformState] = {part.name: {} for part in parts}

    def update(self, path: str, grad: Tensor | None, stored: Tensor) -> Tensor | None:
        """The new parameter, if an optimizer is among the parts; `None` for a leaf that is nobody's.

        A leaf without a gradient is only watched, by what follows the optimizer.
        """
        signal = grad
        for part in self.parts:
            if signal is None:
                if not part.facts.watches:
                    continue
                # It has kept its value, and that is watched too.
                signal = stored
            if part.name in self.groups:
                group = next((g for g in self.groups[part.name].values() if path in g.paths), None)
                if group is not None:
                    signal = group.steps.update(path, signal, stored)
                elif part.facts.optimizes:
                    signal = None
                continue
            state = {k: slice_entry(v, [path]) for k, v in self.old[part.name].items()}
            carry = self.prepared[part.name].carry
            out, own = updated(part, {path: signal}, state, {path: stored}, carry, self.ctx)
            for slot, entry in own.items():
                if isinstance(entry, dict):
                    self.changed[part.name].setdefault(slot, {}).update(entry)
                else:
                    self.changed[part.name][slot] = entry
            signal = None if out is None else out.get(path)
        return signal

    def states(self) -> dict[str, TransformState]:
        """The states at the end of the step."""
        new = dict(self.old)
        for part in self.parts:
            if part.name in self.groups:
                new[part.name] = {**self.old[part.name], **{k: g.state() for k, g in self.groups[part.name].items()}}
                continue
            entries = dict(self.old[part.name])
            for slot, entry in self.changed[part.name].items():
                old = entries.get(slot)
                entries[slot] = {**old, **entry} if isinstance(old, dict) and isinstance(entry, dict) else entry
            new[part.name] = {**entries, **self.prepared[part.name].state}
        return spread(new, self.joined, self.given)


class _Group:
    """The leaves of one label, and the transform that is theirs."""

    def __init__(
        self,
        member: Transform,
        paths: set[str],
        prefix: str,
        states: TransformState,
        leaves: Leaves,
        ctx: Context,
    ):
        self.paths = paths
        state = states[prefix.split(".", 1)[1][:-1]]
        # A chain keeps the states of its parts by name; of another transform the state is its own.
        self.only = None if member.in_turn else member.name
        self.steps = OneByOne(
            (member,) if self.only else member.parts,
            {self.only: state} if self.only else state,
            {p: x for p, x in leaves.items() if p in paths},
            ctx.inside(prefix[:-1]),
        )

    def state(self) -> TransformState:
        states = self.steps.states()
        return states[self.only] if self.only else states
