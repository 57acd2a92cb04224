"""What the wires of ranks send must be of one length, or backends end the process: compared before a state is made.

Nothing is sent to find it out: a wire is asked for its collectives on tensors without memory, over a group that stops
at the first one. So it costs a run nothing but one more line in what ranks tell each other anyway at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch

from .._errors import bad_leaves
from ..ranks.backend import gather_objects
from ..ranks.group import Group
from .layout import Leaf
from .pipeline import Pipeline
from .views import View, Wire

META = torch.device("meta")
RIGHT = "a wire whose lengths follow from the leaf and the number of ranks alone: pad what is sent to the longest part"


class _Stopped(Exception):
    """A collective was about to begin, in which this rank sends so many bytes."""

    def __init__(self, sent: int):
        super().__init__(sent)
        self.sent = sent


class _Stop:
    """In the place of a group's `Traffic`, which counts a collective just before it begins."""

    def sent(self, op: str, sent: int) -> NoReturn:
        raise _Stopped(sent)


def wires_over(pipe: Pipeline, group: Group) -> str:
    """What wires send over a group, as text: one on all ranks that fit together, another on each where one does not."""
    told = [f"{view.name} {_sent(view.wire, pipe.layout.leaves)}" for view in pipe.stages if _over(view, group)]
    gaps = [f"{path} on rank {group.rank}" for view in pipe.stages for path, _ in _gaps(view, group, pipe)]
    return ", ".join(told + gaps)


def unequal_wires(pipe: Pipeline, group: Group) -> str:
    """The message where wires do not fit together, the same on every rank of the group, which all call it.

    Empty where nobody can tell: a wire that must see numbers on some ranks.
    """
    views = [view for view in pipe.stages if _over(view, group)]
    mine = {view.name: (_by_leaf(view, pipe.layout.leaves), dict(_gaps(view, group, pipe))) for view in views}
    every = gather_objects(mine, group)
    messages = []
    for view in views:
        rows = []
        for leaf in pipe.layout.leaves:
            sent = [there[view.name][0][leaf.path] for there in every]
            told = [there[view.name][1][leaf.path] for there in every if leaf.path in there[view.name][1]]
            for n, kind in enumerate(("parts to be gathered", "gradients to be summed")):
                if len({s[n] for s in sent} - {None}) > 1:
                    lengths = ", ".join(f"{s[n]} bytes on rank {r}" for r, s in zip(group.ranks, sent, strict=True))
                    told.append(f"{kind} have {lengths}")
            rows += [(leaf.path, text) for text in told]
        if rows:
            messages.append(bad_leaves(f"{view.name}: its wire does not fit together over ranks", rows, RIGHT))
    return "\n".join(messages)


def _over(view: View, group: Group) -> bool:
    return view.wire is not None and view.wire.group is group


def _by_leaf(view: View, leaves: Sequence[Leaf]) -> dict[str, tuple[int | None, int | None]]:
    assert view.wire is not None
    return {leaf.path: _sent(view.wire, [leaf]) for leaf in leaves}


def _sent(wire: Wire | None, leaves: Sequence[Leaf]) -> tuple[int | None, int | None]:
    """Bytes that this rank sends to gather these leaves, and to sum their gradients, all in fp32."""
    assert wire is not None
    stopped = wire.on(replace(wire.group, traffic=cast(Any, _Stop())), wire.reduce_dtype)
    spans = [stopped.span(leaf) if wire.cuts else (0, leaf.numel) for leaf in leaves]
    parts = [torch.empty(high - low, device=META) for low, high in spans]
    fulls = [torch.empty(leaf.numel, device=META) for leaf in leaves]

    def gather() -> None:
        stopped.send_parts(parts, leaves)

    def sum_up() -> None:
        stopped.send(stopped.pack(fulls, leaves, [leaf.numel for leaf in leaves], torch.float32, META))

    return _bytes_of(gather) if wire.cuts else 0, _bytes_of(sum_up)


def _bytes_of(send: Callable[[], None]) -> int | None:
    """What it sends; `None` of a wire that must see numbers, and fails without."""
    try:
        send()
    except _Stopped as stopped:
        return stopped.sent
    except Exception:
        return None
    return 0


def _gaps(view: View, group: Group, pipe: Pipeline) -> list[tuple[str, str]]:
    """By path, where this rank's part of a leaf does not end at the beginning of the next rank's."""
    wire = view.wire
    if wire is None or wire.group is not group or not wire.cuts:
        return []
    place = {rank: wire.on(replace(group, rank=rank), wire.reduce_dtype) for rank in (0, (group.rank + 1) % group.size)}
    found = []
    for leaf in pipe.layout.leaves:
        low, high = wire.span(leaf)
        if group.rank + 1 < group.size:
            end = place[group.rank + 1].span(leaf)[0]
        else:
            end = place[0].span(leaf)[0] + view.given(leaf).numel
        if high != end:
            found.append((leaf.path, f"rank {group.ranks[group.rank]} has elements {low} to {high}, not to {end}"))
    return found
