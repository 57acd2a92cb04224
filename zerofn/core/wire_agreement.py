"""What the wires of ranks send must be of one length, or backends end the process: compared before a state is made.

Nothing is sent to find it out: a wire is asked for its collectives on tensors without memory, over a group that is
silent. So it costs a run nothing but one more line in what ranks tell each other anyway at the start. What a wire makes
of what has come is looked at in the same way: of another length torch would refuse it where a model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, kind_of
from ..ranks.backend import gather_objects
from ..ranks.group import Group, Traffic
from .layout import Leaf
from .pipeline import Pipeline
from .views import View, Wire

META = torch.device("meta")
RIGHT = "a wire whose lengths follow from the leaf and the number of ranks alone: pad what is sent to the longest part"


def wires_over(pipe: Pipeline, group: Group) -> str:
    """What wires send over a group, as text: one on all ranks that fit together, another on each where one does not."""
    told, leaves, here = [], pipe.layout.leaves, f"on rank {group.rank}"
    for view in _over(pipe, group):
        told.append(f"{view.name} {_sent(view, leaves)}")
        told += [f"{path} {here}" for path, _ in _gaps(view, leaves)]
        told += [f"{path} {here}: {text}" for path, text in misjoined(view, leaves)]
    return ", ".join(told)


def unequal_wires(pipe: Pipeline, group: Group) -> str:
    """The message where wires do not fit together, the same on every rank of the group, which all call it.

    Empty where nobody can tell: a wire that must see numbers on some ranks.
    """
    views, leaves = _over(pipe, group), pipe.layout.leaves
    mine = {v.name: (_by_leaf(v, leaves), dict(_gaps(v, leaves)), misjoined(v, leaves)) for v in views}
    every = gather_objects(mine, group)
    messages = []
    for view in views:
        rows = []
        for leaf in leaves:
            sent = [there[view.name][0][leaf.path] for there in every]
            told = [there[view.name][1][leaf.path] for there in every if leaf.path in there[view.name][1]]
            for n, kind in enumerate(("parts to be gathered", "gradients to be summed")):
                if len({s[n] for s in sent} - {None}) > 1:
                    lengths = ", ".join(f"{s[n]} bytes on rank {r}" for r, s in zip(group.ranks, sent, strict=True))
                    told.append(f"{kind} have {lengths}")
            rows += [(leaf.path, text) for text in told]
        if rows:
            messages.append(bad_leaves(f"{view.name}: its wire does not fit together over ranks", rows, RIGHT))
        elif joined := [row for there in every for row in there[view.name][2]]:
            messages.append(misjoined_message(view, joined))
    return "\n".join(messages)


def _over(pipe: Pipeline, group: Group) -> list[View]:
    return [view for view in pipe.stages if view.wire is not None and view.wire.group is group]


def _by_leaf(view: View, leaves: Sequence[Leaf]) -> dict[str, tuple[int | None, int | None]]:
    return {leaf.path: _sent(view, [leaf]) for leaf in leaves}


def _sent(view: View, leaves: Sequence[Leaf]) -> tuple[int | None, int | None]:
    """Bytes that this rank sends to gather these leaves, and to sum gradients of one of each form, all in fp32."""
    wire = view.wire
    assert wire is not None
    # Of leaves of one form that are cut alike one is packed: torch takes 0.3 ms for each that has no memory.
    few = list({(leaf.shape, leaf.dtype, wire.span(leaf)): leaf for leaf in leaves}.values())
    numels = [view.given(leaf).numel for leaf in few]
    fulls = [torch.empty(n, device=META) for n in numels]

    def gather(silent: Wire) -> None:
        silent.send_parts(_parts(silent, leaves), leaves)

    def sum_up(silent: Wire) -> None:
        silent.send(silent.pack(fulls, few, numels, torch.float32, META))

    return _bytes_of(gather, wire) if wire.cuts else 0, _bytes_of(sum_up, wire)


def _silent(wire: Wire) -> tuple[Wire, Traffic]:
    """The same wire over ranks to which nothing is sent, and what would be."""
    traffic = Traffic()
    return wire.on(replace(wire.group, traffic=traffic, silent=True), wire.reduce_dtype), traffic


def _parts(wire: Wire, leaves: Sequence[Leaf]) -> list[Tensor]:
    """This rank's shards of leaves, without memory; of a wire that cuts."""
    return [torch.empty(high - low, device=META) for low, high in map(wire.span, leaves)]


def _bytes_of(send: Callable[[Wire], None], wire: Wire) -> int | None:
    """What it sends; `None` of a wire that must see numbers, and fails without."""
    silent, traffic = _silent(wire)
    try:
        send(silent)
    except Exception:
        return traffic.bytes if traffic.calls else None
    return traffic.bytes


def misjoined(view: View, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """By path, where what the wire of a view gives has other lengths or shapes than it is to have."""
    if view.wire is None or not view.wire.cuts:
        return []
    wire, rank = _silent(view.wire)[0], view.wire.group.ranks[view.wire.group.rank]
    given = [view.given(leaf) for leaf in leaves]
    parts = _parts(wire, leaves)
    found: dict[str, str] = {}

    def compare(name: str, of: Sequence[Leaf], make: Callable[[], Sequence[Any]], shapes: Any) -> None:
        try:
            made = make()
        except Exception:
            return
        if len(made) != len(of):
            found.update({x.path: f"`{name}` gives {len(made)} tensors of {len(of)} leaves" for x in of})
            return
        for leaf, x, shape in zip(of, made, shapes, strict=True):
            got = tuple(x.shape) if isinstance(x, Tensor) else kind_of(x)
            if got != shape:
                found.setdefault(leaf.path, f"`{name}` gives {got} on rank {rank}, and not {shape}")

    flat = [(x.numel,) for x in given]
    compare("join_parts", leaves, lambda: wire.join_parts(wire.send_parts(parts, leaves)[1], leaves), flat)
    # One leaf by one, of those that are given as they are: one of each shape.
    alone = {x.shape: (x, part) for x, leaf, part in zip(given, leaves, parts, strict=True) if x.shape == leaf.shape}
    some, shapes = [x for x, _ in alone.values()], [tuple(shape) for shape in alone]
    compare("view", some, lambda: [wire.view(part, x) for x, part in alone.values()], shapes)
    cut = [tuple(part.shape) for _, part in alone.values()]
    compare("store", some, lambda: [wire.store(torch.empty(x.shape, device=META), x) for x in some], cut)
    return sorted(found.items())


def misjoined_message(view: View, rows: Sequence[tuple[str, str]]) -> str:
    """The message about what a wire gives that does not fit its leaves."""
    right = (
        "join_parts that gives each leaf flat, of leaf.numel elements and in the order of leaves; a view of leaf.shape;"
    )
    right += " a store of the elements of this rank's span, flat"
    return bad_leaves(f"{view.name}: what its wire gives does not fit its leaves", rows, right)


def _gaps(view: View, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """By path, where this rank's part of a leaf does not end at the beginning of the next rank's."""
    wire = view.wire
    if wire is None or not wire.cuts:
        return []
    group = wire.group
    place = {rank: wire.on(replace(group, rank=rank), wire.reduce_dtype) for rank in (0, (group.rank + 1) % group.size)}
    found = []
    for leaf in leaves:
        low, high = wire.span(leaf)
        if group.rank + 1 < group.size:
            end = place[group.rank + 1].span(leaf)[0]
        else:
            end = place[0].span(leaf)[0] + view.given(leaf).numel
        if high != end:
            found.append((leaf.path, f"rank {group.ranks[group.rank]} has elements {low} to {high}, not to {end}"))
    return found
