"""The first states of transforms for an attached model: on every rank, or on none, and then the model is as it was."""

from __future__ import annotations

from ..core.agreement import failed_elsewhere
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..core.transform import TransformState
from ..ranks.group import Group
from ..sharded.agreement_on_rounds import told_by_all
from .earlier_gradients import Earlier


def first_states(pipe: Pipeline, stored: Leaves, control: Group | None, earlier: Earlier) -> dict[str, TransformState]:
    """The states of all transforms, by name; gradients from before are cut once all ranks have them.

    One message once a model is attached, so that a rank that failed alone leaves nobody who believes in the model.

    Raises:
        Exception: what a transform raised on this rank.
        RuntimeError: on the others.
    """
    states: dict[str, TransformState] = {}
    failure: Exception | None = None
    try:
        states = pipe.init_transforms(stored)
    except Exception as error:
        failure = error
    if control is not None:
        rows = told_by_all([int(failure is not None), int(bool(earlier.grads))], control)
        bad = [str(rank) for rank, (failed, _) in zip(control.ranks, rows, strict=True) if failed]
        if bad and failure is None:
            failure = failed_elsewhere(bad, "zf.attach(model, tx)")
        if failure is None and any([had for _, had in rows]):
            earlier.cut(stored)
    if failure is not None:
        raise failure
    return states
