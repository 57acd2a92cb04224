"""Checks of the order of transforms: when a chain is built, and when leaves and ranks are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .._errors import explain, kind_of
from .facts import OF_PIECES
from .spec import (
    NOT_REDUCED,
    OF_ITS_OWN,
    USED_UP,
    Misplaced,
    Spec,
    Station,
    changes_gradients,
    makes_parameters,
    watches_parameters,
)
from .transform import Transform


def check_order(parts: Sequence[Transform]) -> None:
    """Raise a `ValueError` that names both transforms, the reason and an order that works."""
    spec = Spec()
    for part in parts:
        spec = passed(part, replace(spec, here=part.name))


def passed(part: Transform, spec: Spec, leaf: str = "", talks: bool = False) -> Spec:
    """The spec of a gradient behind a transform; a `ValueError` where the transform cannot stand there.

    Args:
        part: the transform.
        spec: of the gradient before it, with the transform's name and axis.
        leaf: the path of the leaf, if one is known.
        talks: whether its view has a wire, which reduces the gradient over ranks.
    """
    of = f" of {leaf}" if leaf else ""
    facts = part.facts
    by_facts = makes_parameters if facts.optimizes else watches_parameters if facts.watches else changes_gradients
    try:
        if talks:
            spec.refuse("local_by", NOT_REDUCED, "one of the two")
            spec.refuse("changed_by", OF_ITS_OWN)
        if not facts.optimizes and not facts.watches:
            spec.refuse("updated_by", USED_UP)
        found = (part.through or by_facts)(spec)
    except Misplaced as error:
        raise ValueError(
            explain(
                f"chain(..., {error.left}, ..., {part.name}, ...){of}",
                f"{error.left} comes before {part.name}: {error.why}",
                error.right or f"chain(..., {part.name}, ..., {error.left}, ...)",
            )
        ) from None
    except Exception as error:
        raise ValueError(_broken(part, of, f"its `through` raised {type(error).__name__}: {error}")) from error
    if not isinstance(found, Spec):
        raise TypeError(_broken(part, of, f"its `through` gives {kind_of(found)} and no Spec"))
    return found


def _broken(part: Transform, of: str, why: str) -> str:
    """The message where a `through` gives nothing that could be read."""
    right = "through=lambda spec: spec.after('changed_by'), or as_it_is, or Misplaced where it cannot stand"
    return explain(f"chain(..., {part.name}, ...){of}", why, right)


def effect(part: Transform) -> Spec:
    """The spec of a gradient behind a transform that stands alone."""
    return passed(part, Spec(here=part.name))


def check_complete(parts: Sequence[Transform], where: str) -> None:
    """A pipeline that trains has an optimizer; a part of one need not."""
    if not any([p.facts.optimizes for p in parts]):
        names = ", ".join(p.name for p in parts) or "nothing"
        raise ValueError(
            explain(
                f"{where} with chain({names})",
                "the chain has no optimizer, so nothing would ever change a parameter",
                f"zf.chain({'..., ' if parts else ''}zf.adamw(lr=1e-3))",
            )
        )


NEEDED = {"row": "whole rows", "leaf": "whole leaves", "tree": "the whole tree"}


def check_pieces(parts: Sequence[Transform], stations: Sequence[Station], where: str) -> None:
    """Where leaves are cut over ranks, refuse transforms that must see more than a piece of a leaf."""
    found = [entry for part in parts for entry in _more_than_pieces(part, "")]
    by = [s for s in stations if any(spec.in_parts for spec in s.gives.values())] if found else []
    if not by:
        return
    cut, ranks = by[0].transform, max(spec.parts for spec in by[-1].gives.values())
    told = ", ".join(f"{name} needs {NEEDED[t.needs]} (needs={t.needs!r})" for name, t in found)
    raise ValueError(
        explain(
            f"{where} with chain({', '.join(p.name for p in parts)}) and leaves cut over {ranks} ranks",
            f"{told}, and under {cut} each rank has one flat piece of every leaf: a norm, a mean, a sort, a matrix "
            "product or the shape of a piece is another one, and the update would be wrong without a word",
            'zf.leafwise(needs="element") or zf.guest(transformation, needs="element") where it is made, if each '
            "element of the update comes from the same element of gradient, parameter and state alone;\n"
            f"zf.all_reduce() in place of {cut} if not: data parallel, nothing is cut. What needs a whole leaf and "
            "is written with zf.leafwise is run at one rank for each leaf.",
        )
    )


def _more_than_pieces(t: Transform, inside: str) -> Iterator[tuple[str, Transform]]:
    """The innermost transforms that need more than pieces, each by a name that tells in which of the chain it is."""
    if t.needs in OF_PIECES:
        return
    name = f"{t.name} in {inside}" if inside and inside != t.name else t.name
    deeper = [entry for part in t.parts for entry in _more_than_pieces(part, inside or t.name)]
    # What holds others may need more than all of them.
    yield from deeper or [(name, t)]
