"""What accelerate, and a Hugging Face Trainer with it, is told of a model that is attached over ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .._errors import explain

# What accelerate asks of a model before it wraps it a second time.
PREPARED = "_is_accelerate_prepared"


class Prepared:
    """True, to whoever asks.

    The reduction over ranks is the pipeline's, and DistributedDataParallel around the model would be a second one. What
    accelerate then leaves out with it is autocast: that is refused here, which is where it is left out.
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


def prepare(model: nn.Module) -> Callable[[], None]:
    """Tell accelerate that nothing is to be wrapped around the model; what is returned undoes it."""
    setattr(model, PREPARED, Prepared())

    def undo() -> None:
        vars(model).pop(PREPARED, None)

    return undo
