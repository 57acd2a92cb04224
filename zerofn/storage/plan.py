"""`plan`: tables of a state, of gradients and of bytes sent, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._compat.tensors import NoNumbers, shape_only
from .._errors import explain
from ..core.layout import Leaves, make_layout
from ..core.parameter_checks import check_own_memory, not_a_parameter, parameters_of
from ..core.pipeline import Pipeline, first_state
from ..core.resolve import pipeline
from ..core.transform import Transform
from ..core.tree import Tree, flatten, tree_map, tree_paths
from ..core.views import Ranks
from ..core.wrapper_names import names_with_wrappers
from ..module.attach_checks import check_initialised
from ..module.buffer_dtypes import dtypes_of_buffers
from ..pure.uncompiled import kept_out_of_graphs
from ..ranks.backend import ranks_of
from ..ranks.group import Group
from .describe import Table, rows_of_buffers, table_of
from .stations_table import stations_table


@kept_out_of_graphs("it makes a table and no numbers", "zf.plan(tx, params), outside of what is compiled")
def plan(tx: Transform, params: Tree | nn.Module, world_size: int = 1, rank: int = 0) -> Table:
    """The table of a state before anything is allocated, exactly as `describe` will show it, and its `road`.

    The road is the stations of the chain, printed below the table: behind each transform the dtype of gradients, how
    ranks along each axis have them, and by what they are scaled; the ZeRO stage that follows; bytes of gradients that
    this rank holds until a step, and those that it sends for one. A transform of one's own stands there by what its
    `through` and its view say.

    Args:
        tx: the pipeline.
        params: a tree of tensors as for `zf.init`, or a module as for `zf.attach`. Meta tensors do:
            `with torch.device("meta"): model = Model()`.
        world_size: ranks that the pipeline's sharding will find.
        rank: the one whose part is shown, of all ranks of the world. The first holds the most.

    Raises:
        ValueError: no such rank or world, or a transform whose first state follows from the numbers of parameters.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.accumulate(4), zf.adamw(lr=1e-3))
    >>> table = zf.plan(tx, {"w": torch.empty(1_000_000, 1000, device="meta")}, world_size=1)
    >>> zf.plan(zf.chain(zf.shard(), zf.sgd(0.1)), {"w": torch.empty(6, 2)}, world_size=2).road.stations[1].placements
    (Shard(0),)
    >>> round(table.bytes_per_parameter), table.by_transform["accumulate"]
    (16, 4000000009)
    """
    for name, value, low, high in (("world_size", world_size, 1, 1 << 30), ("rank", rank, 0, world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            why = f"{name} is an int, at least {low}" + (f", below {world_size}" if name == "rank" else "")
            raise ValueError(explain(f"plan({name}={value!r})", why, "zf.plan(tx, params, world_size=8)"))
    trainable, model, wrapped = {}, None, None
    if isinstance(params, nn.Module):
        model = params
        # In the order of the module, as in `attach`: a tree library sorts the keys of a plain dict.
        params, wrapped = parameters_of(params), names_with_wrappers(params)
        check_initialised(params, "plan")
        trainable = {path: p.requires_grad for path, p in params.items()}
    tensors = zip(tree_paths(params), flatten(params)[0], strict=True)
    once = {id(x): (path, x) for path, x in tensors if isinstance(x, Tensor) and not not_a_parameter(x)}
    check_own_memory("zf.plan(tx, params)", dict(once.values()))
    with shape_only() as fake:
        # Tied leaves are recognised by identity, so each tensor gets one stand-in.
        known: dict[int, Tensor] = {}
        # Nested tensors, of which there are none without memory, are refused with the leaves that are no parameters.
        plain = lambda x: isinstance(x, Tensor) and not x.is_nested  # noqa: E731
        stand_ins = tree_map(lambda x: known.setdefault(id(x), fake(x)) if plain(x) else x, params)
        layout, leaves = make_layout(stand_ins, lambda path: trainable.get(path, True), wrapped=wrapped)
        pipe = pipeline(tx, layout, "zf.plan", _ranks_of(world_size, rank))
        stored = _stored(pipe, leaves)
        buffers = () if model is None else rows_of_buffers(model, dtypes_of_buffers(model, pipe.dtypes))
        try:
            state = first_state(pipe, stored)
        except NoNumbers as error:
            why = (
                f"the first state of a transform follows from numbers ({error}), and a plan has shapes and dtypes alone"
            )
            raise ValueError(explain("zf.plan(tx, params)", why, "zf.describe(zf.init(tx, params))")) from error
        return replace(table_of(state, buffers), road=stations_table(pipe, world_size))


def _stored(pipe: Pipeline, leaves: Leaves) -> Leaves:
    """This rank's part of each leaf in the stored dtype, by the last station; a whole leaf keeps its strides."""
    found: Leaves = {}
    for path, spec in pipe.stations[-1].gives.items():
        x = leaves[path]
        found[path] = (x.new_empty(spec.local_shape) if spec.in_parts else x).to(spec.stored_dtype)
    return found


def _ranks_of(world_size: int, rank: int) -> Ranks:
    """The process groups that a rank of such a world would open, as sizes and ranks alone."""

    def group(function: str, mesh: Any) -> Group:
        size = world_size if mesh is None else mesh.size()
        if world_size % size:
            right = f"zf.plan(tx, params, world_size={size})"
            why = f"{function} has a mesh of {size} ranks, which must divide the world"
            raise ValueError(explain(f"plan(world_size={world_size})", why, right))
        # Along an outer axis of a mesh, neighbours are as many ranks apart as the inner axes have ranks.
        row = range(size) if mesh is None else ranks_of(mesh)
        apart = row[1] - row[0] if size > 1 else 1
        return Group(rank // apart % size, size)

    return group
