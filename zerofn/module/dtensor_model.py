"""A model of torch's tensor parallelism: plain local parameters stand in for its DTensors while it is attached.

`parallelize_module` makes DTensors of the parameters of a model, over one axis of a mesh. The library works on plain
tensors, over another axis. So each parameter is exchanged for one on the same memory, which forward has as the DTensor
that it was; `opt.detach()` puts the old objects back.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._compat.autograd import has_hooks
from .._compat.modules import registered, sharded_by_torch
from .._compat.tensors import local_of, set_local
from .._errors import bad_leaves, explain
from ..core.tensor_parallel_leaves import Within
from ..ranks.dtensor_parameters import CUT, Form, is_distributed, why_not_attachable
from ..ranks.group import Group
from ..ranks.process_groups import group_for


class DistributedModel:
    """The parameters of a model that are DTensors.

    Args:
        model: the model.
        named: its parameters by path, tied ones under each path.

    Attributes:
        forms: by path, which DTensor a parameter is.
        within: by path, where the local tensor lies in its whole: of plain parameters too, which all ranks have.
        groups: of the ranks over which parameters are distributed: one, or none.

    Raises:
        ValueError: every parameter is named that is cut over several axes or over other ranks than the rest, is a
            partial sum, or has hooks.
    """

    def __init__(self, model: nn.Module, named: dict[str, nn.Parameter]):
        self.model = model
        self.named = {path: p for path, p in named.items() if is_distributed(p)}
        self.locals: dict[int, nn.Parameter] = {}
        self.forms: dict[str, Form] = {}
        self.within: dict[str, Within] = {}
        self.groups: tuple[Group, ...] = ()
        if not self.named:
            return
        _check_cared_for(model)
        self._check()
        self.forms = {path: Form.of(p) for path, p in self.named.items()}
        first = next(iter(self.forms.values()))
        self.groups = (group_for("zf.attach", first.mesh),)
        for path, p in named.items():
            boxes = self.forms[path].boxes if path in self.forms else (((0,) * p.ndim, tuple(p.shape)),)
            at = first.place if len(boxes) > 1 else 0
            self.within[path] = Within(p.shape, boxes, at, len(boxes) > 1 or first.place == 0)

    def _check(self) -> None:
        bad = [(path, why) for path, p in self.named.items() if (why := why_not_attachable(p)) is not None]
        meshes: list[Any] = [p.device_mesh for p in self.named.values()]  # type: ignore[attr-defined]
        if not bad:
            told = [(path, mesh.mesh.tolist()) for path, mesh in zip(self.named, meshes, strict=True)]
            bad = [(path, f"lies over ranks {x}, and {told[0][0]} over {told[0][1]}") for path, x in told]
            bad = [] if all(mesh == meshes[0] for mesh in meshes) else bad
        hooked = [path for path, p in self.named.items() if has_hooks(p)]
        bad += [(path, "has hooks, which are to be registered after zf.attach") for path in hooked]
        if bad:
            raise ValueError(bad_leaves("attach: DTensors that cannot be parameters of a pipeline", bad, CUT))

    def check_attached(self, in_backward: bool, made: bool) -> None:
        """Refuse `in_backward=True`, and `zf.materialize` (`made`), of such a model."""
        if self.named and (in_backward or made):
            how = "zf.materialize(model, tx)" if made else "zf.attach(model, tx, in_backward=True)"
            why = "a leaf's update would be made of what one rank has before the others have sent theirs"
            if made:
                why = "every rank would draw the same numbers for its part"
            rows = [(path, f"a DTensor: {why}") for path in self.named]
            raise ValueError(
                bad_leaves(f"{how} of a model that is itself cut over ranks", rows, "zf.attach(model, tx)")
            )

    def enter(self) -> None:
        """Exchange DTensors for local parameters."""
        for p in self.named.values():
            if id(p) not in self.locals:
                self.locals[id(p)] = _local(p, Form.of(p))
        self._exchange(dict(self.locals))

    def leave(self) -> None:
        """Put the DTensors back, with the values of the local parameters."""
        back: dict[int, nn.Parameter] = {}
        for path, p in self.named.items():
            mine = self.locals.get(id(p))
            if mine is not None and id(mine) not in back:
                back[id(mine)] = _distributed(p, mine, self.forms[path])
        self._exchange(back)
        self.locals.clear()

    def _exchange(self, new: dict[int, nn.Parameter]) -> None:
        for module in self.model.modules() if new else ():
            for name, p in list(registered(module)[0].items()):
                if id(p) in new:
                    setattr(module, name, new[id(p)])


def _check_cared_for(model: nn.Module) -> None:
    if names := sharded_by_torch(model):
        raise ValueError(
            bad_leaves(
                "attach: a model that fully_shard gathers and cuts itself",
                [
                    (name or "<root>", "its parameters are DTensors that FSDP2's hooks exchange in forward")
                    for name in names
                ],
                "zf.attach(model, zf.chain(zf.shard(), ...)) of the model before fully_shard, which shard replaces",
            )
        )


def _local(p: Any, form: Form) -> nn.Parameter:
    """A local parameter on the memory of a DTensor, which is left without memory."""
    mine = nn.Parameter(local_of(p).detach(), p.requires_grad)
    vars(mine).update(vars(p))
    if p.grad is not None:
        mine.grad = form.local(p.grad.detach())
        p.grad = None
    # Who holds it still finds neither numbers nor memory.
    set_local(p, torch.empty_like(local_of(p), device="meta"))
    if p.requires_grad:
        vars(p)["_zerofn_refusal"] = p.register_hook(_refuse)
    return mine


def _distributed(p: Any, mine: nn.Parameter, form: Form) -> nn.Parameter:
    refusal = vars(p).pop("_zerofn_refusal", None)
    if refusal is not None:
        refusal.remove()
    if mine.dtype == p.dtype:
        set_local(p, mine.detach())
    else:
        # A tensor cannot change its dtype.
        made = nn.Parameter(form.wrap(mine.detach()), mine.requires_grad)
        vars(made).update(vars(p))
        p = made
    if p.requires_grad != mine.requires_grad:
        p.requires_grad_(mine.requires_grad)
    if mine.grad is not None and mine.grad.dtype == p.dtype:
        p.grad = form.wrap(mine.grad)
    return p


def _refuse(g: Tensor) -> NoReturn:
    raise RuntimeError(
        explain(
            "a backward to a parameter from before zf.attach",
            "a model whose parameters are DTensors has others while it is attached, so this one is not trained",
            "model.get_parameter(path), or model.parameters() after zf.attach",
        )
    )
