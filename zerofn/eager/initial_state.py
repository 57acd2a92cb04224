"""The first states of transforms for an attached model: on every rank, or on none, and then the model is as it was."""

from __future__ import annotations

from ..core import rank_agreement
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..core.transform import TransformState
from ..ranks.group import Group
from ..sharded.round_agreement import told_by_all
from .existing_gradients import Earlier


def first_states(pipe: Pipeline, stored: Leaves, control: Group | None, earlier: Earlier) -> dict[str, TransformState]:
    """The states of all transforms, by name; gradients from before are cut once all ranks have them.

    One message once a model is attached, so that a rank that failed alone leaves nobody who believes in the model.

    Raises:
        Exception: what a transform raised on this rank.
        RuntimeError: on the others.
    """
    had: list[int] = []

    def tell(failed: bool) -> list[int]:
        if control is None:
            return []
        rows = told_by_all([int(failed), int(bool(earlier.grads))], control)
        had.extend(grads for _, grads in rows)
        return [rank for rank, (other, _) in zip(control.ranks, rows, strict=True) if other]

    states = rank_agreement.first_states(pipe, stored, tell, "zf.attach(model, tx)")
    if any(had):
        earlier.cut(stored)
    return states
