"""What is nested, by where it stands."""

from __future__ import annotations

from typing import Any


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """What dicts, tuples and lists hold, by its path: `{"/a/0": x}`."""
    if isinstance(tree, dict):
        return {k: x for name, sub in tree.items() for k, x in flat(sub, f"{above}/{name}").items()}
    if isinstance(tree, tuple | list):
        return {k: x for i, sub in enumerate(tree) for k, x in flat(sub, f"{above}/{i}").items()}
    return {above: tree}
