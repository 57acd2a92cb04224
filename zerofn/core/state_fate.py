"""What has become of the memory of a state: given to the next one, or half written by a step that raised.

The mark is an attribute of the counter `micro_step`. Each state has that counter to itself; a batch of states and the
states that a step under `vmap` is given have one in common.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from torch import Tensor

from .._compat.functorch import innermost, innermost_transform
from .._errors import explain


class Fate(Enum):
    """What has become of the memory of a state."""

    NONE = auto()
    DONATED = auto()  # the next state is in it
    TORN = auto()  # the step, or the load, that wrote into it has raised


def mark(micro_step: Tensor, fate: Fate) -> None:
    """Say what has become of the memory of the state that has this counter."""
    mine: Any = innermost(micro_step)
    mine._zerofn_fate = fate.name  # text, which torch.load takes with its defaults


def check_usable(micro_step: Tensor, where: str) -> None:
    """Raise a RuntimeError if the memory of the state that has this counter was given away, or half written."""
    mine = micro_step if innermost_transform() is None else innermost(micro_step)
    fate = getattr(mine, "_zerofn_fate", Fate.NONE.name)
    if fate == Fate.DONATED.name:
        raise RuntimeError(
            explain(
                f"{where} of a state that was donated",
                "a step with donate=True has written the next state into its memory",
                "state, metrics = step(state, *batch), and no use of the old one;\n"
                "zf.make_step(loss_fn, tx), without donate, to keep both",
            )
        )
    if fate == Fate.TORN.name:
        raise RuntimeError(
            explain(
                f"{where} of a state into which a step or a load was writing when it raised",
                "some leaves or sums have their new values, the others and the counters their old ones",
                "zf.load(directory, like=...) to go back to a checkpoint;\n"
                "zf.make_step(loss_fn, tx), without donate, where a step may raise: it leaves its state alone",
            )
        )
