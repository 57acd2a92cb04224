"""A layout as plain containers, which `torch.load` reads with its defaults, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .layout import Layout, Leaf, Placement, Within
from .slot_forms import fixed_of
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
        if "slots" in x and "fixed" not in x:
            # Written by an older version, which wrote the form of every slot.
            forms = [{name: form[name] for name in form if name != "kind"} for form in x["slots"]]
            x = {**x, "fixed": fixed_of(forms)}
        kind = next(kind for kind in _KINDS if kind.__name__ == x["kind"])
        # A field that this version does not know is left out, and one that the file lacks has its default.
        return kind(**{name: _made(x[name]) for name in _fields(kind) if name in x})
    return tuple(map(_made, x)) if type(x) is tuple else x


def _fields(kind: type) -> list[str]:
    return [x.name for x in fields(kind) if x.init]
