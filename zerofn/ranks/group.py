"""`Group`: one axis of ranks with a process group of its own, and the traffic that was sent over it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch


class Traffic:
    """Counts what one rank has sent over one group: calls and bytes, by collective.

    Bytes are those of a ring, which is optimal and what backends use for large buffers: (N-1)/N of the full buffer for
    an all-gather and for a reduce-scatter, twice that for an all-reduce. Collectives of objects and barriers count as
    calls without bytes. `of_numbers` are those of them with which ranks agree, and of scalars such as norms.

    >>> t = Traffic()
    >>> t.sent("all_gather", 3 * 800 // 4)
    >>> t.bytes, t.calls, t.by_op
    (600, 1, {'all_gather': 600})
    """

    __slots__ = ("_bytes", "_calls", "begun", "of_numbers", "thread")

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self.of_numbers: Counter[str] = Counter()
        # The number of the last collective, by which ranks see whether they are in the same one, and the thread that
        # began it. Never reset.
        self.begun, self.thread = 0, 0

    def sent(self, op: str, sent: int) -> None:
        """Count a collective in which this rank sends so many bytes."""
        self.begun += 1
        self.thread = threading.get_ident()
        self._bytes[op] += sent
        self._calls[op] += 1

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    @property
    def calls(self) -> int:
        return self._calls.total()

    @property
    def by_op(self) -> dict[str, int]:
        return dict(self._bytes)

    @property
    def calls_by_op(self) -> dict[str, int]:
        return dict(self._calls)

    def reset(self) -> None:
        self._bytes.clear()
        self._calls.clear()
        self.of_numbers.clear()

    def __repr__(self) -> str:
        return f"Traffic(bytes={self.bytes}, calls={self.calls_by_op})"


@dataclass(frozen=True, eq=False)
class Group:
    """One axis of ranks, and a channel between them that nobody else uses.

    Equality is identity: two groups over the same ranks are two channels, and a collective waits for its peers on the
    same channel only. A group of one has no process group and needs no environment.

    Examples:
        >>> Group().size, Group().rank, Group().device
        (1, 0, device(type='cpu'))
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # the members, as ranks of the world, in the order of `rank`
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    purpose: Hashable = ""
    pg: Any = field(default=None, repr=False)  # torch's process group
    silent: bool = False  # collectives are counted and nothing is sent, to check the code around them
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)  # which opened it: a forked child has no connections

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # copies of a model use the same channel

    def __reduce__(self) -> Any:
        if self.size == 1:
            return (Group, (0, 1, self.ranks, self.device, self.purpose))
        raise TypeError(
            "a Group is an open channel between running processes and cannot be pickled; "
            "pickle what it was made from (the transform, the mesh) and open it again on arrival"
        )
