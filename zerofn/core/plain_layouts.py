"""A layout as plain containers, which `torch.load` reads with its defaults, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .._errors import explain
from .layout import Layout, Leaf, Placement, Within
from .tree import flatten

_KINDS: tuple[type, ...] = (Leaf, Placement, Within)


def as_plain(layout: Layout) -> dict[str, Any]:
    """The layout in dicts, lists, text and numbers, and in the containers that parameters were given in.

    >>> from .layout import make_layout
    >>> import torch
    >>> layout, _ = make_layout({"w": [torch.ones(2)]})
    >>> as_plain(layout)["tree"], from_plain(as_plain(layout)) == layout
    ({'w': [0]}, True)
    """
    return {
        "leaves": [_plain(leaf) for leaf in layout.leaves],
        "places": list(layout.places),
        "paths": list(layout.paths),
        "tree": layout.numbered,
        "placement": _plain(layout.placement),
    }


def from_plain(given: dict[str, Any]) -> Layout:
    """The inverse of `as_plain`."""
    leaves, placement = map(_made, given["leaves"]), _made(given["placement"])
    return Layout(tuple(leaves), tuple(given["places"]), tuple(given["paths"]), flatten(given["tree"])[1], placement)


def _plain(x: Any) -> Any:
    for kind in _KINDS:
        if type(x) is kind:
            return {"kind": kind.__name__, **{name: _plain(getattr(x, name)) for name in _fields(kind)}}
    return tuple(map(_plain, x)) if type(x) is tuple else x


def _made(x: Any) -> Any:
    if type(x) is dict:
        if x.get("slots"):
            why = "it does not say how slots lie over ranks in the words of this version"
            right = "zf.save(directory, state) with that version, and zf.load(directory, like=state) with this one"
            raise ValueError(explain("a state that zerofn 0.2 has pickled on several ranks", why, right))
        kind = next(kind for kind in _KINDS if kind.__name__ == x["kind"])
        # A field that this version does not know is left out, and one that the file lacks has its default.
        return kind(**{name: _made(x[name]) for name in _fields(kind) if name in x})
    return tuple(map(_made, x)) if type(x) is tuple else x


def _fields(kind: type) -> list[str]:
    return [x.name for x in fields(kind) if x.init]
