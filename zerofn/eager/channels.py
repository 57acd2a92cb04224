"""`Channels`: the process groups of one attached model, so that collectives of one do not wait for those of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.bucketed_views import groups_of
from ..core.pipeline import Pipeline
from ..core.view import View
from ..ranks.group import Group
from ..ranks.process_groups import channels


class Channels(NamedTuple):
    """The process groups that are opened for one attached model; none on one process.

    Attributes:
        groups: one for each group of the pipeline. They run all-gathers of parameters that are gathered on use, and
            reductions in backward. Other collectives of a step use the pipeline's own groups.
        control: ranks compare numbers on it at a step. This group and the next two send numbers of the host, by gloo
            where the others use NCCL: reading them waits for no GPU, and kernels of NCCL keep one order.
        wanted: where parameters are gathered on use, ranks say on it which ones they gather next.
        more: where gradients are reduced as they arrive, ranks say on it whether they have more.
        equals: connects ranks that have the same full parameter, of which each stores a shard.
    """

    groups: tuple[Group, ...] = ()
    control: Group | None = None
    wanted: Group | None = None
    more: Group | None = None
    equals: Group | None = None


def open_channels(pipe: Pipeline, gathers: bool = True) -> Channels:
    """Open the groups that a pipeline needs. Every rank of the job must call it, and waits for the others once.

    Args:
        pipe: the pipeline.
        gathers: whether sharded parameters are gathered here, and not by FSDP2.
    """
    if not pipe.step_groups:
        return Channels()
    joining: dict[str, Sequence[Group]] = {"control": pipe.step_groups}
    if pipe.gathering is not None and gathers:
        joining["wanted"] = [pipe.gathering.group]
    if reduction(pipe) is not None:
        joining["more"] = pipe.step_groups
    stored_in_parts = pipe.sharding is not pipe.gathering
    if stored_in_parts and (pipe.gathering is not None or pipe.model):
        joining["equals"] = groups_of(pipe.road.after_update)
    opened = channels([*([group] for group in pipe.groups), *joining.values()], numbers=len(joining))
    n = len(pipe.groups)
    found = Channels(tuple(opened[:n]), **dict(zip(joining, opened[n:], strict=True)))
    # If all ranks have the same full parameters, they compare them in the channel of the step's message, after it.
    return found if found.equals is not None or not stored_in_parts else found._replace(equals=found.control)


def reduction(pipe: Pipeline) -> View | None:
    """The view whose wire reduces gradients as they arrive, if the first update half is a reduction."""
    return None if pipe.road.late else next((view for view in pipe.road.after_update if view.wire is not None), None)
