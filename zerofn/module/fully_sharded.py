"""Models that FSDP2's `fully_shard` shards and gathers itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.autograd import has_hooks
from .._compat.tensors import full_parameters_of, local_of, sharded_by_torch, version
from .._errors import bad_leaves, explain
from ..core.chain import chain
from ..core.layout import Layout, Within, canonical
from ..core.pipeline import Pipeline
from ..core.spec import Spec
from ..core.state_entries import Entry
from ..core.transform import Transform
from ..core.view import View, over_ranks
from ..core.wires import Sharding
from ..ranks.dtensor import Form, Rows, is_distributed, rows_over, why_not_by_rows
from ..ranks.group import Group
from ..ranks.process_groups import group_for

# ----------------------------------------------------------------------------------------------------------------------
# While a model of `fully_shard` is attached, FSDP2 all-gathers its parameters and reduces their gradients. The chain
# gets this rank's rows of both.
#
# Its update halves then run as behind `shard` over the same ranks: the rows are those that `shard` would give a rank.
# So norms, rounding, owners and checkpoints are those of `shard`. The model has no hook of ours. `opt.step()` reads
# `p.grad` and writes into the memory of `p`.


PLACE = "fully_shard"
REDUCING = ("all_reduce", "reduce_scatter", "shard")
HOOKED = "has a hook, which FSDP2 does not run"
ITS_POLICY = "fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"


class FullySharded:
    """A model whose parameters are DTensors that FSDP2's hooks gather.

    Args:
        model: the model, after `fully_shard` of its blocks and of itself.
        named: its parameters by path, a tied one under each of its names.

    Attributes:
        parameters: the model's DTensors by path, each once.
        rows: by path, a parameter on the memory of this rank's rows, flat where there are several ranks. Between steps
            it has no gradient.
        within: by path, how tensor parallelism has cut the tensor whose rows are shared.
        shapes: by path, of that tensor.
        groups: of the ranks of tensor parallelism: one, or none.

    Raises:
        ValueError: parameters are not sharded by rows over the same ranks, or have no values. Each is named.
    """

    def __init__(self, model: nn.Module, named: dict[str, nn.Parameter]):
        self.modules: list[Any] = [model.get_submodule(name) for name in sharded_by_torch(model)]
        _check(named)
        lie = {path: rows_over(p) for path, p in named.items()}
        first = next(iter(lie.values()))
        _check_same_ranks(lie, first)
        self.mesh = first.mesh
        self.shapes = {path: x.shape for path, x in lie.items()}
        self.parameters: dict[str, Any] = {}
        # optree sorts the keys of other dicts.
        self.rows: OrderedDict[str, nn.Parameter] = OrderedDict()
        made: dict[int, nn.Parameter] = {}
        for path, p in named.items():
            if id(p) not in made:
                local = local_of(p).detach()
                # On one rank a leaf is not sharded, and keeps its shape.
                mine = local.view(-1) if len(first.ranks) > 1 else local.view_as(local)
                made[id(p)] = nn.Parameter(mine, p.requires_grad)
                self.parameters[path] = p
            self.rows[path] = made[id(p)]
        self.groups, self.within = _tensor_parallel(lie)
        # By id of a parameter, the version of the full one in the last step; a write of before `attach` is over.
        self.written = {id(p): version(full) for module in self.modules for p, full in full_parameters_of(module)}

    def chain(self, tx: Transform) -> Transform:
        """The chain behind a `shard` over the same ranks, for which FSDP2 does the gathering and the reducing."""
        mesh = self.mesh

        def view(layout: Layout, ranks: Any) -> View:
            return over_ranks(Sharding(group_for(PLACE, mesh)), resident=False, traceable=True)

        members = [member.name for member in tx.members]
        if found := [name for name in members if name in REDUCING]:
            why = "FSDP2 shards parameters and reduces gradients already"
            right = f"zf.attach(model, zf.chain(...)) without {found[0]};\n"
            right += "or zf.attach(model, tx) of the model before fully_shard, which zf.shard replaces"
            raise ValueError(explain(f"attach: {found[0]} in the chain, and a model of fully_shard", why, right))
        return chain(Transform("shard", needs="element", view_fn=view, through=_sharded_already), tx)

    def check(self, pipe: Pipeline) -> None:
        """Refuse transforms that change what the model computes with: FSDP2 gathers, and runs nothing of theirs."""
        names = [view.name for view in pipe.views[1:] if view is not None]
        names += [name for name, _ in pipe.factors if name not in names]
        if names:
            why = "it casts or scales inside of the model, where FSDP2's hooks exchange the parameters"
            right = f"{ITS_POLICY} for dtypes;\n"
            right += "or zf.attach(model, zf.chain(zf.shard(), ...)) of the model before fully_shard"
            raise ValueError(explain(f"attach: {names[0]} in the chain, and a model of fully_shard", why, right))

    def bring(self) -> None:
        """Give the rows the gradients that FSDP2 has reduced, on the same memory."""
        moved = [path for path, p in self.parameters.items() if self._has_moved(path, p)]
        if moved:
            bad = [(path, "has other memory, or another dtype, than it had when it was attached") for path in moved]
            right = "model.to(...) and load_state_dict(..., assign=True) before zf.attach;\n"
            right += "opt.detach() before the change and opt = zf.attach(model, tx) after it"
            raise RuntimeError(bad_leaves("the model changed after it was attached", bad, right))
        if hooked := [(path, HOOKED) for path, p in self.parameters.items() if has_hooks(p)]:
            right = "a hook on the module, or a transform of your own in the chain"
            raise RuntimeError(bad_leaves("opt.step() of a model of fully_shard", hooked, right))
        self._check_not_written()
        for path, p in self.parameters.items():
            mine, grad = self.rows[path], p.grad
            if p.requires_grad != mine.requires_grad:
                mine.requires_grad_(p.requires_grad)
            mine.grad = None if grad is None else local_of(grad).reshape(mine.shape)

    def _check_not_written(self) -> None:
        """Refuse a model whose forward writes into its parameters: FSDP2 drops what it wrote, with any optimizer."""
        now = {id(p): version(full) for module in self.modules for p, full in full_parameters_of(module)}
        before, self.written = self.written, now
        bad = [path for path, p in self.parameters.items() if now.get(id(p), 0) != before.get(id(p), 0)]
        if bad:
            why = "written in forward, where FSDP2 has a full copy; the copy is dropped, and the write with it"
            right = "the write between steps; a buffer in place of the parameter;\n"
            right += "or zf.attach(model, zf.chain(zf.shard(), ...)) of the model before fully_shard, which stores it"
            raise RuntimeError(bad_leaves("forward of a model of fully_shard", [(path, why) for path in bad], right))

    def _has_moved(self, path: str, p: Any) -> bool:
        local, mine = local_of(p), self.rows[path]
        return local.data_ptr() != mine.data_ptr() or local.dtype != mine.dtype

    def take(self) -> None:
        """Take the gradients away from the rows, and from the model those that `accumulate` has added to its sum."""
        for path, p in self.parameters.items():
            if self.rows[path].grad is None:
                p.grad = None
            self.rows[path].grad = None

    def is_alike(self, e: Entry) -> bool:
        """Whether an entry of the state is sharded like its parameter."""
        mine = self.rows.get(e.path) if e.of_leaf and not e.at_owner else None
        return mine is not None and isinstance(e.value, Tensor) and e.value.shape == mine.shape

    def as_dtensor(self, x: Tensor, path: str) -> Tensor:
        """Such an entry as a DTensor like the parameter, on the same memory."""
        p = self.parameters[path]
        return Form.of(p).wrap(x.view(local_of(p).shape))

    def clear(self, to_none: bool) -> None:
        """Clear the gradients of the model."""
        for p in self.parameters.values():
            if to_none or p.grad is None:
                p.grad = None
            else:
                local_of(p.grad).zero_()

    def reshard(self) -> None:
        """Drop full parameters that FSDP2 keeps after a forward: they are older than what is stored now."""
        for module in self.modules:
            module.reshard()


def check_ways(in_backward: bool, made: bool) -> None:
    """Refuse `in_backward=True`, and `zf.materialize` (`made`), for a model of `fully_shard`."""
    if in_backward:
        why = "FSDP2 reduces the gradients of a block at once, and shows none of them before backward has ended"
        right = "zf.attach(model, tx), whose step() updates all leaves;\n"
        right += "zf.attach(model, zf.chain(zf.shard(), ...), in_backward=True) of the model before fully_shard"
        raise ValueError(explain("attach(model, tx, in_backward=True), and a model of fully_shard", why, right))
    if made:
        why = "fully_shard has sharded the model's meta tensors already"
        right = "model.to_empty(device=...), first values of its parameters, and zf.attach(model, tx);\n"
        right += "zf.materialize(model, zf.chain(zf.shard(), ...)) of the model before fully_shard"
        raise ValueError(explain("materialize(model, tx), and a model of fully_shard", why, right))


def _sharded_already(spec: Spec) -> Spec:
    return spec.after("sharded_by").by_rows()


def _check(named: dict[str, nn.Parameter]) -> None:
    bad = []
    for path, p in named.items():
        if not is_distributed(p):
            bad.append((path, "a plain parameter, which fully_shard leaves out: nothing reduces its gradient"))
        elif local_of(p).is_meta:
            bad.append((path, "on the meta device: it has no data yet; model.to_empty(...) and its first values"))
        elif (why := why_not_by_rows(p)) is not None:
            bad.append((path, why))
        elif has_hooks(p):
            bad.append((path, HOOKED))
    if bad:
        raise ValueError(
            bad_leaves(
                "attach: parameters of a model of fully_shard",
                bad,
                "fully_shard of each block, and of the model, by rows over one mesh, and zf.attach of that",
            )
        )


def _check_same_ranks(lie: dict[str, Rows], first: Rows) -> None:
    bad = [(path, f"over ranks {list(x.ranks)}") for path, x in lie.items() if x.ranks != first.ranks]
    if bad:
        raise ValueError(
            bad_leaves(
                f"attach: parameters of fully_shard lie over other ranks than {list(first.ranks)}",
                bad,
                "fully_shard(..., mesh=mesh) with one mesh for all blocks",
            )
        )


def _tensor_parallel(lie: dict[str, Rows]) -> tuple[tuple[Group, ...], dict[str, Within]]:
    """The group of tensor parallelism, and where each leaf lies in its full tensor."""
    forms = [x.tensor_parallel for x in lie.values() if x.tensor_parallel is not None]
    if not forms:
        return (), {}
    within = {path: within_of(x.shape, x.tensor_parallel, forms[0].place) for path, x in lie.items()}
    return (group_for("zf.attach", forms[0].mesh),), within


def within_of(shape: torch.Size, form: Form | None, place: int) -> Within:
    """Where a leaf lies in its full tensor.

    Args:
        shape: of a leaf that all ranks have.
        form: of a leaf that tensor parallelism has made a DTensor; `None` for others.
        place: the index of this rank among those of tensor parallelism.
    """
    full = shape if form is None else form.shape
    boxes = (((0,) * len(full), tuple(full)),) if form is None else form.boxes
    cut = len(boxes) > 1
    return Within(full, boxes, place if cut else 0, cut or place == 0)


def with_shapes(layout: Layout, shapes: Mapping[str, torch.Size]) -> Layout:
    """The layout whose leaves have the shapes of the tensors that are sharded, and not of this rank's rows."""
    leaves = tuple([replace(leaf, shape=shapes[leaf.path]) for leaf in layout.leaves])
    return canonical(replace(layout, leaves=leaves))
