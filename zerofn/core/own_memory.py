"""What a transform gives and keeps has memory of its own: copies of what it shares with what is written later.

A gradient is its caller's, who may write into it or add the next one to it. Parameters are written in place, one after
the other, and so are states, by a step or when another one is loaded.
"""

from __future__ import annotations

from typing import Any

from .facts import Facts
from .layout import Leaves
from .tree import Tree, apart, clone


def own_update(
    facts: Facts, returned: tuple[Leaves | None, Any], state: Any, grads: Leaves, params: Leaves
) -> tuple[Leaves | None, Any]:
    """What an update half returned, with copies of what shares memory.

    Args:
        facts: of the transform.
        returned: updates, `None` where it holds, and a state.
        state: what it was handed, which shares none.
        grads: what it was handed.
        params: stored parameters of these leaves.
    """
    out, own = returned
    if out and out is not grads:
        # A parameter that stays as it is may be returned. That of another leaf is written before it is read.
        moved = {path: x for path, x in out.items() if x is not params.get(path)}
        if moved and (found := apart(moved, params.values())) is not moved:
            out = {**out, **found}
    if own is state or not own:
        return out, own
    made = out.values() if facts.optimizes and out else ()
    return out, apart(own, (*grads.values(), *params.values(), *made))


def own_start(state: Tree) -> Tree:
    """A first state, copied: it may be a parameter, one tensor for two leaves, or one for every state that is made."""
    return clone(state)
