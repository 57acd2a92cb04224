"""The channels that are open in this process, who has asked for each, and what was last begun on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from . import backend as raw
from .group import Group
from .rank_liveness import Presence


class _Registry:
    """The open groups of this process, so that the same (mesh, purpose) is the same channel everywhere.

    Opening a group is a collective act, so what is looked up must be the same on every rank: the key is
    the whole mesh (equal on all ranks of a world), not this rank's own row of it. `functools.lru_cache`
    would do for looking up, but it cannot list what is to be closed nor notice that the user destroyed
    the default group, which destroys every group made on top of it.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, Hashable], Group | None] = {}  # None: not a member
        # By key, who asked for a group: an attached model, or None for what has no end, such as a pure state.
        self.holders: dict[tuple[Any, Hashable], set[Any]] = {}
        self.holder: Any = None  # who asks now
        self.opened = 0  # how many channels were opened so far
        self.default: Any = None  # the default group these were made on
        self.ours = False  # whether that default group was made here
        self.made = 0  # how many default groups were made here so far
        self.presence: Presence | None = None  # of the ranks of the default group

    def current(self) -> dict[tuple[Any, Hashable], Group | None]:
        default = raw.default_group()
        if default is not self.default:
            self.groups.clear()
            self.holders.clear()
            self.default, self.ours, self.presence = default, False, None
        return self.groups

    def get(self, key: Any, purpose: Hashable, make: Callable[[], Group | None]) -> Group | None:
        groups = self.current()
        self.holders.setdefault((key, purpose), set()).add(self.holder)
        if (key, purpose) not in groups:
            groups[key, purpose] = make()
        return groups[key, purpose]


registry = _Registry()


@contextmanager
def held_by(holder: Any) -> Iterator[None]:
    """Groups that are asked for inside are `holder`'s, until it lets them go."""
    before, registry.holder = registry.holder, holder
    try:
        yield
    finally:
        registry.holder = before


def held_alone(holder: Any) -> list[Any]:
    """The keys of groups that only `holder` has asked for, in the order in which they were opened."""
    return [key for key in registry.current() if registry.holders[key] == {holder}]


def let_go(holder: Any, close: bool) -> None:
    """Take `holder` off the groups it asked for. Every rank of the world must call it, after all that is sent there.

    Args:
        holder: as given to `held_by`.
        close: those that nobody else has asked for; else they stay open for whoever asks next.
    """
    for key in held_alone(holder) if close else ():
        _close(key)
    for holders in registry.holders.values():
        if holder in holders:
            holders.remove(holder)
            holders.update(() if holders else {None})


def _close(key: Any) -> None:
    group = registry.groups.pop(key)
    del registry.holders[key]
    if group is not None and group.pg is not None:
        raw.destroy(group.pg)
        # Not None, which to torch is the default group. What is left of a group has nothing open.
        object.__setattr__(group, "pg", Closed())


class Closed:
    """The process group of a group that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "a channel between ranks was used after opt.detach(), which closes it. Attach the model anew."
        )


def close_all() -> None:
    """Close every group opened here, and the default group if it was made here."""
    for group in list(registry.groups.values()):
        if group and group.pg is not None:
            raw.destroy(group.pg)
    registry.groups.clear()
    registry.holders.clear()
    if registry.ours:
        raw.destroy(None)
    registry.current()


def presence() -> Presence | None:
    """What the ranks of this job tell each other outside of collectives; None before any group was opened."""
    registry.current()
    return registry.presence


def finished() -> None:
    """Tell the other ranks that this one takes part in nothing any more."""
    if registry.presence is not None:
        registry.presence.finished()


def opened() -> list[Group]:
    """The groups of several ranks that are open in this process."""
    return [g for g in registry.current().values() if g is not None and g.pg is not None]


def begun() -> dict[str, int]:
    """By channel, the number of the last collective or common call that this process has begun.

    Not of channels on which another thread of this process was the last: that one may go on.
    """
    here, me = presence(), threading.get_ident()
    counts = {g.pg.group_name: g.traffic.begun for g in opened() if g.traffic.thread in (0, me)}
    return {**counts, **(here.calls if here is not None else {})}
