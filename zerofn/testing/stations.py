"""Whether gradients behind each transform have the dtype and the placement that the chain's stations say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._errors import bad_leaves
from ..core.chain import chain
from ..core.layout import Leaves, make_layout
from ..core.resolve import pipeline
from ..core.spec import Spec
from ..core.transform import Transform
from ..core.tree import Tree
from ..core.update import apply
from ..core.views import Ranks
from ..core.wire_agreement import misjoined, misjoined_message
from ..ranks.group import Group
from ..transforms.sgd import sgd
from .cutting import start

RIGHT = "a `through` that says what its transform does: spec.to(dtype), spec.placed(Shard(0))"


def check_places(tx: Transform, params: Tree, ranks: int) -> None:
    """Raise an `AssertionError` where leaves lie elsewhere than a transform says, on any of so many ranks.

    Nothing is sent: a chain is only resolved.
    """
    layout, _ = make_layout(params)
    for rank in range(ranks):
        groups = _silent_groups(rank, ranks)
        views = [part.view_fn(layout, groups) for part in tx.members]
        wired = [t for t, v in zip(tx.members, views, strict=True) if v is not None and v.wire is not None]
        for part in wired:
            try:
                pipe = pipeline(chain(part, sgd(0.1)), layout, "check_transform", groups)
            except ValueError as error:
                raise AssertionError(f"{part!r}: it says where gradients lie.\n{error}") from error
            for view in pipe.stages:
                if rows := misjoined(view, layout.leaves):
                    raise AssertionError(f"{part!r}: a wire gives whole leaves.\n{misjoined_message(view, rows)}")


def _silent_groups(rank: int, size: int) -> Ranks:
    """Groups of so many ranks in which nothing is ever sent."""

    def group(function: str, mesh: Any) -> Group:
        return Group(rank, size, tuple(range(size)))

    return group


def check_dtypes(tx: Transform, params: Tree, gradients: Sequence[Leaves], step_options: Mapping[str, Any]) -> None:
    """Raise an `AssertionError` where what an update half gives has another dtype than the station behind it says.

    Args:
        tx: with an optimizer.
        params: on one process.
        gradients: for each micro-step.
        step_options: of the context.
    """
    layout, tensors = make_layout(params)
    says = {s.transform: s.gives for s in pipeline(tx, layout, "check_transform").stations}
    wrong: dict[str, dict[str, str]] = {}

    def recording(part: Transform) -> Transform:
        def update(grads: Leaves, state: Any, leaves: Leaves, carry: Any, ctx: Any):
            out, new = part.update_fn(grads, state, leaves, carry, ctx)
            wrong.setdefault(part.name, {}).update(_wrong_dtypes(says[part.name], {} if out is None else out))
            return out, new

        return part if part.idle else replace(part, update_fn=update, joins=None)

    pipe = pipeline(chain(*map(recording, tx.members)), layout, "check_transform")
    state = start(pipe, tensors)
    for grads in gradients:
        cast = {leaf.path: grads[leaf.path].to(pipe.dtypes.gradient(leaf)) for leaf in layout.trainable}
        state, _ = apply(pipe, cast, state, pipe.context(micro_step=state.micro_step, **step_options))
    for part in tx.members:
        if rows := wrong.get(part.name):
            raise AssertionError(bad_leaves(f"{part!r}: it says which dtype it gives.", rows.items(), RIGHT))


def _wrong_dtypes(says: Mapping[str, Spec], out: Leaves) -> dict[str, str]:
    told = {path: (says[path].dtype, x.dtype) for path, x in out.items()}
    return {path: f"in {got}, where its station says {said}" for path, (said, got) in told.items() if said != got}
