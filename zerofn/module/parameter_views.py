"""The parameters of an attached model as its forward sees them: one view of each in a call of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import current_function
from .._compat.functorch import NOT_WRAPPED, level_of
from .._errors import bad_leaves
from ..core.linear_map import LeafView, differentiable
from ..core.pipeline import Pipeline
from ..core.views import View
from ..ranks.dtensor_parameters import Form, is_distributed
from ..sharded.gather_on_use import Units
from ..sharded.unit_rounds import outside_inference_mode
from ..sharded.write_back import Region, place
from .active_calls import ThreadState
from .crossing import Crossing, Edge


class ParameterViews:
    """The views of the parameters of one attached model.

    Args:
        pipe: its pipeline.
        units: what gathers sharded parameters.
        local: what each thread that calls the model has.
        crossing: makes the crossing of a view, where there is a loss scale.
        forms: by path, which DTensor forward has in place of a local tensor.

    Attributes:
        suspended: for a while the model sees its parameters in full, through casts alone.
        inexact: paths of those that are seen through more than casts.
    """

    def __init__(
        self,
        pipe: Pipeline,
        units: Units | None,
        local: ThreadState,
        crossing: Callable[[Edge, bool], Crossing],
        forms: Mapping[str, Form],
    ):
        self.pipe, self.units, self.local, self.crossing = pipe, units, local, crossing
        self.scaled, self.forms = pipe.scaled, forms
        self.suspended = False
        found = pipe.views_at_use.items()
        self.inexact = {path for path, view in found if not all([stage.dtypes is not None for stage in view.stages])}

    def get(self, path: str, stored: Tensor) -> Tensor:
        """The view of a parameter: one all through a call, so that a parameter used twice has one cotangent."""
        form = self.forms.get(path)
        if form is None:
            return self._get(path, stored)
        given = form.local(stored) if is_distributed(stored) else stored
        # In no mode of the caller's: what an operation does with the view is decided where it is used. To the views the
        # parameter is its local tensor.
        with outside_inference_mode(), torch.enable_grad(), torch.DisableTorchFunctionSubclass():
            return form.wrap(self._get(path, given))

    def _get(self, path: str, stored: Tensor) -> Tensor:
        view = self.pipe.views_at_use[path]
        handed = self._handed(path)
        if handed is not None:
            return handed
        if self.units is not None:
            if stored is self.units.params[path]:
                return self.units.look(path, keep=bool(self.local.calls))
            view = _of_another(view, stored)
        elif self.suspended:
            # In full they have the dtype that is stored, whichever side of a reduction casts.
            view = _only_cast(view, stored, self.pipe.road.stages)
        if not view.stages and not (self.scaled and torch.is_grad_enabled() and differentiable(stored)):
            return stored
        if not self.local.calls:
            return self._through(view, stored)
        found = self.local.seen.get(path)
        if found is None or found[0] is not stored:
            # The same tensor in every mode, as a parameter is: what is written into it under `no_grad` is in it. To
            # enter modes that are on already would make the view a fifth slower.
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                seen = self._through(view, stored)
            else:
                with outside_inference_mode(), torch.enable_grad():
                    seen = self._through(view, stored)
            found = self.local.seen[path] = (stored, seen, address(seen))
        return found[1]

    def _handed(self, path: str) -> Tensor | None:
        """The view that the user's `autograd.Function`, whose backward calls a module again, was given in forward.

        That backward, as of an adjoint method, asks for the gradient of its argument, so the module computes with it.
        """
        ctx = current_function()
        if ctx is None:
            return None
        edges = [(node, output) for node, output in ctx.next_functions if self._gives(node, output, path)]
        if not edges:
            return None
        last = self.local.last_views.get(path, (lambda: None, None))[0]()
        found = [last, *ctx.saved_tensors]
        return next((x for x in found if x is not None and (x.grad_fn, x.output_nr) in edges), None)

    def _gives(self, node: Any, output: int, path: str) -> bool:
        """Whether an output of an autograd node is a view of a parameter."""
        if self.units is not None and getattr(node, "units", None) is self.units:
            return self.units.plans.place[path] == (node.i, output)
        made_by = getattr(getattr(node, "forth", None), "__self__", None)
        made_by = made_by.edge if isinstance(made_by, Crossing) else made_by
        return isinstance(made_by, LeafView) and made_by.leaf is self.pipe.views_at_use[path].leaf

    def _through(self, view: LeafView, stored: Tensor) -> Tensor:
        return self.crossing(view, True).cross(stored) if self.scaled else view(stored, None)

    def origin(self, path: str, x: Any) -> Any:
        """The stored tensor that `x` is the view of; `None` for another tensor."""
        view, stored = self.local.last_views.get(path, (lambda: None, None))
        return stored if view() is x else None


def address(x: Tensor) -> Region | None:
    """Where a tensor's memory is; `None` for a wrapper of torch.func, which has none."""
    return place(x) if level_of(x) == NOT_WRAPPED else None


def _of_another(view: LeafView, given: Tensor) -> LeafView:
    """The view of a full tensor that torch.func.functional_call puts in a sharded parameter's place: not gathered."""
    if given.shape != view.leaf.shape:
        raise RuntimeError(
            bad_leaves(
                "a call of a sharded model with other parameters (torch.func.functional_call) takes full ones",
                [(view.leaf.path, f"given in shape {tuple(given.shape)}, in full it is {tuple(view.leaf.shape)}")],
                "with opt.gathered(): params = {n: p.clone() for n, p in model.named_parameters()}",
            )
        )
    return _only_cast(view, given, view.stages)


def _only_cast(view: LeafView, given: Tensor, stages: Sequence[View]) -> LeafView:
    casts = tuple([s for s in stages if s.dtypes is not None and s.changes(view.leaf)])
    return replace(view, stages=casts, grad_dtype=given.dtype)
