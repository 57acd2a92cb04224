"""The groups that are open in this process, which models use each, and the last collective begun on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from . import backend as raw
from .group import Group
from .rank_liveness import Presence


class _Registry:
    """The open groups of this process by (mesh, purpose).

    Every rank opens a group at once, so the key must be the same on every rank: it is the whole mesh, not this rank's
    row of it. `functools.lru_cache` cannot list the groups to close, nor notice that the user destroyed the default
    group and with it every group made on top of it.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, Hashable], Group | None] = {}  # None on ranks outside of it
        # By key, the users of a group: the leases of attached models, or None for one without an end, as a pure state.
        self.holders: dict[tuple[Any, Hashable], set[Any]] = {}
        self.holder: Any = None  # the user for whom groups are opened at the moment
        self.opened = 0  # how many channels were opened so far
        self.default: Any = None  # the default group that these were made on
        self.ours = False  # whether the library made that default group
        self.made = 0  # how many default groups the library has made so far
        self.presence: Presence | None = None  # of the ranks of the default group

    def current(self) -> dict[tuple[Any, Hashable], Group | None]:
        """The open groups; none after the user has destroyed or replaced the default group."""
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
    """Groups that are asked for inside are used by `holder`, until `let_go(holder)`."""
    before, registry.holder = registry.holder, holder
    try:
        yield
    finally:
        registry.holder = before


def held_alone(holder: Any) -> list[Any]:
    """The keys of groups that only `holder` uses, in the order in which they were opened."""
    return [key for key in registry.current() if registry.holders[key] == {holder}]


def let_go(holder: Any, close: bool) -> None:
    """End the use of groups by `holder`. Every rank of the world must call it, when nothing is sent there any more.

    Args:
        holder: as given to `held_by`.
        close: whether groups that nobody else uses are closed; else they stay open for the next who asks.
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
        # Not None, which to torch is the default group.
        object.__setattr__(group, "pg", Closed())


class Closed:
    """In place of the process group of a group that was closed: any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "a channel between ranks was used after opt.detach(), which closes it. Attach the model anew."
        )


def close_all() -> None:
    """Close every group that the library opened, the default group too if the library made it."""
    for group in list(registry.groups.values()):
        if group and group.pg is not None:
            raw.destroy(group.pg)
    registry.groups.clear()
    registry.holders.clear()
    if registry.ours:
        raw.destroy(None)
    registry.current()


def presence() -> Presence | None:
    """What ranks tell each other in the job's store; None before any group was opened."""
    registry.current()
    return registry.presence


def finished(failed: bool = False) -> None:
    """Tell the other ranks that this one takes part in no more collectives; after an error if it has failed."""
    if registry.presence is not None:
        registry.presence.set_finished(failed)


def opened() -> list[Group]:
    """The groups of several ranks that are open in this process."""
    return [g for g in registry.current().values() if g is not None and g.pg is not None]


def begun() -> dict[str, int]:
    """By channel, the number of the last collective or common call that this process has begun.

    Without channels on which another thread of this process began the last one: it may begin more.
    """
    here, me = presence(), threading.get_ident()
    counts = {g.pg.group_name: g.traffic.begun for g in opened() if g.traffic.thread in (0, me)}
    return {**counts, **(here.calls if here is not None else {})}
