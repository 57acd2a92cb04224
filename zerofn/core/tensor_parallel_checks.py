"""Refusals where the model itself is cut over ranks (tensor parallelism), of which the chain does not know."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from itertools import product
from math import prod

from .._errors import bad_leaves, explain
from ..ranks.group import Group
from .chain_order import NEEDED
from .facts import OF_PIECES
from .layout import Layout, Placement
from .partition import replace_innermost
from .transform import Transform

TOGETHER = "zf.partition of the chain, by which parameters that are cut get an optimizer with needs='element'"


def with_model_ranks(placement: Placement, model: Sequence[Group]) -> Placement:
    """The same placement, of a state that lies over the ranks over which the model is cut as well."""
    if not model:
        return placement
    return replace(
        placement,
        together=placement.together * prod([group.size for group in model]),
        axes=(*placement.axes, *[group.ranks for group in model]),
        unreduced=placement.unreduced and with_model_ranks(placement.unreduced, model),
    )


def check_model_axes(reduced: Sequence[tuple[str, Group]], model: Sequence[Group]) -> None:
    """Refuse a reduction over ranks among which the model itself is cut; `reduced` as for `check_axes`."""
    for (name, group), other in product(reduced, model):
        both = sorted(set(other.ranks) & set(group.ranks))
        if len(both) > 1:
            raise ValueError(
                explain(
                    f"chain(..., {name}, ...) over ranks {sorted(group.ranks)} of a model whose parameters "
                    f"are DTensors over ranks {sorted(other.ranks)}",
                    f"ranks {both} have different parts of one parameter, of which there is no mean",
                    "mesh = init_device_mesh(device, (replicas, parts), mesh_dim_names=('dp', 'tp'))\n"
                    f"         parallelize_module(model, mesh['tp'], plan); zf.{name}(mesh['dp'])",
                )
            )


def check_model_parts(parts: Sequence[Transform], layout: Layout, where: str, attached: bool) -> None:
    """Refuse transforms that must see more of a leaf than this rank has, and states that belong to an attached model.

    Args:
        parts: of a chain.
        layout: of the parameters.
        where: the function that asks, for messages.
        attached: whether the ranks over which the model is cut are known.
    """
    within = {leaf.path: leaf.within for leaf in layout.leaves if leaf.within is not None}
    if within and not attached:
        why = "its parameters are parts of distributed tensors, over ranks that functions of a state do not know"
        right = "what the attached model has: opt.step(), model.state_dict(), zf.save(directory, opt)"
        raise ValueError(explain(f"{where} with the state of a model that is itself cut over ranks", why, right))
    cut = {path: whole for path, whole in within.items() if whole.cut}
    bad: list[tuple[str, str]] = []

    def look(t: Transform, paths: Set[str], place: str) -> Transform:
        for leaf in layout.trainable:
            if t.needs not in OF_PIECES and leaf.path in paths & cut.keys():
                has = f"this rank has {tuple(leaf.shape)} of {tuple(cut[leaf.path].shape)}"
                bad.append((leaf.path, f"{t.name} needs {NEEDED[t.needs]} (needs={t.needs!r}), and {has}"))
        return t

    for part in parts:
        if cut and part.needs not in OF_PIECES:
            replace_innermost(part, look, layout)
    if bad:
        raise ValueError(bad_leaves(f"{where}: the model itself is cut over ranks", bad, TOGETHER))
