"""What an optimizer shows of the state and the counters of its model, each a function of the optimizer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..core.facts import OVERFLOW_LEAF, SKIPPED_STEPS
from ..core.state import State
from ..core.transform import Transform
from . import unsupported
from .attachment import Attachment


class Optimizer(Protocol):
    """Of an optimizer, what is looked at here."""

    metrics: dict[str, Tensor]
    _own: Attachment
    _tx: Transform


def state(opt: Optimizer) -> State:
    """The pipeline's state. On one process its stored parameters are the model's own.

    To libraries that expect that of `torch.optim` it is a mapping: `opt.state[model.weight]["exp_avg"]`, of the
    shape of the weight; under `shard` a part, as `model.weight` is one.
    """
    settled, seen = opt._own.home.settled(), opt._own.home.shown_states
    return settled.keyed_by(opt._own.params, lambda x: seen.shown(settled, x))


def tx(opt: Optimizer) -> Transform:
    """The pipeline that the model was attached with."""
    return opt._tx


def global_steps(opt: Optimizer) -> int:
    """Updates that were applied: `state.step`."""
    return int(opt._own.home.state.step)


def micro_steps(opt: Optimizer) -> int:
    """Calls of `step`, those that were held or skipped too: `state.micro_step`."""
    return int(opt._own.home.state.micro_step)


def skipped_steps(opt: Optimizer) -> int:
    """Micro-steps that `scale_loss` or `skip_nonfinite` has left out; 0 without them."""
    return sum(int(own[SKIPPED_STEPS]) for own in opt._own.home.state.transforms.values() if SKIPPED_STEPS in own)


def overflow_leaf(opt: Optimizer) -> str | None:
    """Path of the first leaf whose gradient overflowed in the last `step`, on any rank; `None` if none did."""
    index = int(opt.metrics.get(OVERFLOW_LEAF, -1))
    return None if index < 0 else opt._own.pipe.layout.leaves[index].path


def is_boundary(opt: Optimizer) -> bool:
    """Whether the next `step` closes the accumulation window."""
    return opt._own.steps.window.closes()


def supports_amp_scaling(opt: Optimizer) -> bool:
    """What torch.amp.GradScaler asks before a step. On one process it may scale; over ranks it would hang."""
    if opt._own.pipe.every_group:
        raise unsupported.scaler_over_ranks()
    return False
