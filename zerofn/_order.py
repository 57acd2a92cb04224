"""Which orders of transforms have a meaning. Checked when a chain is built, so that nothing runs in a wrong order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ._errors import explain
from ._types import OF_PIECES, Role, Transform

LAYOUT = {Role.SHARD, Role.SCATTER, Role.REDUCE}
VIEWS = LAYOUT | {Role.CAST, Role.SCALE}

# (roles of the left one, roles of the right one, why the order has no meaning). The remedy is to swap.
SWAPPED: tuple[tuple[set[Role], set[Role], str], ...] = (
    (
        {Role.OPTIMIZER},
        set(Role) - {Role.OPTIMIZER, Role.AFTER},
        "an optimizer turns the gradient into new parameters, so nothing that acts on gradients can follow it",
    ),
    ({Role.AFTER}, {Role.OPTIMIZER}, "it watches the new parameters, which only the optimizer makes"),
    (
        {Role.GRADIENT},
        {Role.SCALE},
        "the gradient is still multiplied by the loss scale there, and overflow has not been looked for",
    ),
    (
        {Role.GRADIENT},
        LAYOUT,
        "each rank would see its own part of the gradient before it is reduced over ranks",
    ),
    ({Role.GRADIENT}, {Role.CAST}, "it would act on gradients in the compute dtype, before they are cast to their own"),
    (
        {Role.ACCUMULATE},
        {Role.SCALE},
        "gradients under different loss scales would be added up, and one overflow would spoil the whole window",
    ),
    ({Role.ACCUMULATE}, {Role.SHARD}, "under shard no rank ever holds a full gradient that could be accumulated"),
    ({Role.ACCUMULATE}, {Role.CAST}, "gradients would be added up in the compute dtype; cast them first"),
    ({Role.SCALE}, {Role.SHARD}, "gradients would be unscaled before they are reduced, in the compute dtype"),
    ({Role.SCALE}, {Role.CAST}, "gradients would be unscaled in the compute dtype, where small ones vanish"),
    (
        {Role.CAST},
        {Role.SHARD},
        "full parameters would be gathered in the storage dtype and cast afterwards, so both copies live",
    ),
    ({Role.REDUCE}, {Role.SHARD, Role.SCATTER}, "a full gradient would be averaged before it is cut into shards"),
)

TWICE = {
    Role.OPTIMIZER: "the first one has used the gradient up",
    Role.CAST: "the dtypes would be set twice",
    Role.SCALE: "the loss would be scaled twice; several models have a pipeline, and a scale, each",
    Role.SHARD: "parameters are cut once",
    Role.SCATTER: "gradients are cut once",
    Role.REDUCE: "gradients are averaged once",
}


def check_order(parts: Sequence[Transform]) -> None:
    """Raise a `ValueError` that names both transforms, the reason and an order that works."""
    for j, right in enumerate(parts):
        for left in parts[:j]:
            if left.role is right.role and left.role in TWICE:
                _refuse(
                    left, right, TWICE[left.role], f"chain(..., {right.name}, ...) with one of them" + _groups(left)
                )
            if {left.role, right.role} == {Role.SHARD, Role.SCATTER}:
                why = "both cut the parameters over the ranks: shard is ZeRO-3, reduce_scatter ZeRO-1 and ZeRO-2"
                _refuse(left, right, why, "one of the two")
            for lefts, rights, why in SWAPPED:
                if left.role in lefts and right.role in rights:
                    _refuse(left, right, why, f"chain(..., {right.name}, ..., {left.name}, ...)")


def _groups(t: Transform) -> str:
    if t.role is Role.OPTIMIZER:
        return "; for several groups of parameters: zf.partition({'decay': ..., 'rest': ...}, labels)"
    return ""


def _refuse(left: Transform, right: Transform, why: str, order: str) -> None:
    raise ValueError(
        explain(
            f"chain(..., {left.name}, ..., {right.name}, ...)", f"{left.name} comes before {right.name}: {why}", order
        )
    )


def check_complete(parts: Sequence[Transform], where: str) -> None:
    """A pipeline that trains has an optimizer; a part of one need not."""
    if not any(p.role is Role.OPTIMIZER for p in parts):
        names = ", ".join(p.name for p in parts) or "nothing"
        raise ValueError(
            explain(
                f"{where} with chain({names})",
                "the chain has no optimizer, so nothing would ever change a parameter",
                f"zf.chain({'..., ' if parts else ''}zf.adamw(lr=1e-3))",
            )
        )


WHOLE = {"row": "whole rows", "leaf": "whole leaves", "tree": "the whole tree"}


def check_pieces(parts: Sequence[Transform], ranks: int, where: str) -> None:
    """Where leaves are cut over ranks, refuse what must see more than a piece of them. On one rank nothing is cut."""
    found = [entry for part in parts for entry in _more_than_pieces(part, "")] if ranks > 1 else []
    if not found:
        return
    cut = next(p.name for p in parts if p.role in (Role.SHARD, Role.SCATTER))
    told = ", ".join(f"{name} needs {WHOLE[t.needs]} (needs={t.needs!r})" for name, t in found)
    raise ValueError(
        explain(
            f"{where} with chain({', '.join(p.name for p in parts)}) and leaves cut over {ranks} ranks",
            f"{told}, and under {cut} each rank has one flat piece of every leaf: a norm, a mean, a sort, a matrix "
            "product or the shape of a piece is another one, and the update would be wrong without a word",
            'zf.leafwise(needs="element") or zf.guest(transformation, needs="element") where it is made, if each '
            "element of the update comes from the same element of gradient, parameter and state alone;\n"
            f"zf.all_reduce() in place of {cut} if not: data parallel, nothing is cut. (A later version is to run "
            "whole leaves at one rank each.)",
        )
    )


def _more_than_pieces(t: Transform, inside: str) -> Iterator[tuple[str, Transform]]:
    """The transforms that say so, each with the one in the chain that it stands in."""
    if t.needs in OF_PIECES:
        return
    name = f"{t.name} in {inside}" if inside and inside != t.name else t.name
    deeper = [entry for part in t.parts for entry in _more_than_pieces(part, inside or t.name)]
    # What holds others may need more than all of them.
    yield from deeper or [(name, t)]
