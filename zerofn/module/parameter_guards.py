"""Guards of an attached model: misuse of its parameters raises where it happens, and no library wraps it again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .._compat.tensors import IGNORED_BY_DDP
from .._errors import explain
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks, GuardedParameter, tell
from .opaque_parameter import OpaqueParameter
from .state_dicts import hook_state_dicts

if TYPE_CHECKING:
    from .sharded_parameter import ModelFaces

# The attribute that accelerate looks for before it wraps a model a second time.
PREPARED = "_is_accelerate_prepared"


def label(
    undo: list[Callable[[], object]],
    model: nn.Module,
    pipe: Pipeline,
    params: Leaves,
    units: Units | None,
    in_backward: bool,
    asks: Asks,
    faces: ModelFaces | None,
) -> None:
    """Guard the parameters of a model, and its state dicts.

    Args:
        undo: gets functions that undo the guards, each before its guard is made.
        model: the model.
        pipe: its pipeline.
        params: its parameters by path.
        units: gathers sharded parameters inside its calls.
        in_backward: whether gradients are used as they arrive.
        asks: callbacks by which parameters ask about the gradients of this model.
        faces: the sharded parameters that are DTensors.
    """
    if not (pipe.step_groups or in_backward):
        return
    why = (
        "with in_backward=True a gradient is used as it arrives"
        if in_backward
        else "it has left to be reduced over ranks"
    )
    guard = {"why": why, "unreduced": pipe.road.late, "asks": asks}
    if pipe.step_groups:
        _put(undo, model, PREPARED, Prepared())
    if units is None or faces is None:
        for path, p in params.items():
            tell(undo, p, GuardedParameter, path=path, **guard)
        return
    for path in params:
        if path in faces.origins:
            vars(params[path]).update(guard)
        else:
            shape = next(leaf.shape for leaf in pipe.layout.leaves if leaf.path == path)
            in_parts = lambda: not units.suspended  # noqa: E731
            tell(undo, params[path], OpaqueParameter, path=path, full=shape, in_parts=in_parts, **guard)
    hook_state_dicts(model, params, pipe, units, lambda: units.suspended, undo)
    # DistributedDataParallel is to ignore all parameters: it would copy the first rank's shards to all ranks. It then
    # refuses a model that has no parameters for it. Not a list: `scaled_checks` would look for tensors in it.
    _put(undo, model, IGNORED_BY_DDP, frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)))


def _put(undo: list[Callable[[], object]], model: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a model for as long as it is attached."""
    undo.append(lambda: vars(model).pop(name, None))
    setattr(model, name, value)


class Prepared:
    """Tells accelerate, and so a Hugging Face Trainer, that the model is wrapped already.

    The pipeline reduces over ranks, and DistributedDataParallel would do so a second time. accelerate then leaves out
    autocast too, so autocast is refused here, where accelerate asks.
    """

    def __bool__(self) -> bool:
        accelerate: Any = sys.modules.get("accelerate.state")
        dtype = "no" if accelerate is None else str(accelerate.AcceleratorState().mixed_precision)
        if dtype != "no":
            raise RuntimeError(
                explain(
                    f"accelerate with mixed_precision={dtype!r} and a model that is attached over ranks",
                    "the pipeline says in which dtype the model computes, and accelerate's autocast would not run",
                    'mixed_precision="no", of a Hugging Face Trainer bf16=False and fp16=False, and in the chain\n'
                    "zf.precision(param_dtype=torch.bfloat16)",
                )
            )
        return True
