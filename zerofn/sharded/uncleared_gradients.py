"""What torch keeps in `p.grad` between steps, where gradients are reduced in backward and `p.grad` is `None`.

In torch a loop that never clears gradients adds them up. Here those of the last step are gone, and the second step
is refused. To keep them would silently add up gradients for a loop that clears behind `if p.grad is not None:`.
`zero_grad(set_to_none=False)` leaves zeros in torch, with which momentum and decay go on for a leaf that no backward
reaches: a step is given zeros for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from torch import Tensor

from .._errors import explain
from ..core.layout import Leaves


class UnclearedGradients:
    """Which gradients of one attached model were used and cleared.

    Args:
        zero: makes the zero gradient of a leaf, from its path.
    """

    def __init__(self, zero: Callable[[str], Tensor]):
        self.zero = zero
        # Paths of leaves that had a gradient since it was cleared, and of those whose gradient was set to zero.
        self.had: set[str] = set()
        self.zeros: set[str] = set()
        # Those of the last step were used, and are not cleared yet.
        self.used = False
        self.warned = False

    def take(self, grads: Leaves) -> Leaves:
        """The gradients of a step, with zeros where torch has them. The step says that it has `used` them.

        Raises:
            RuntimeError: those of the last step are not cleared.
        """
        if self.used and grads:
            raise RuntimeError(
                explain(
                    "opt.step() with gradients that were never cleared since the last step",
                    "torch adds them to those of this step; here they have left to be reduced, and are used up",
                    "opt.zero_grad() after opt.step(); or opt.backward(loss), which drops what the last step has used",
                )
            )
        self.used = False
        self.had.update(grads)
        if missing := self.zeros - grads.keys():
            grads = grads | {path: self.zero(path) for path in sorted(missing)}
        return grads

    def clear(self, to_none: bool, more: Iterable[str] = ()) -> None:
        """The user clears gradients.

        Args:
            to_none: `set_to_none` of `zero_grad`.
            more: paths of gradients that have arrived since the last step.
        """
        self.used = False
        self.zeros = set() if to_none else self.had | set(more)
        self.had = set(self.zeros)

    def missed(self) -> None:
        """The user reads `p.grad`, whose gradient is being reduced. Warns the first time."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                explain(
                    "p.grad is read between backward and step, and is None",
                    "the gradient has left during backward: what edits it, or asks whether there is one, has no effect",
                    "a transform in the chain: zf.clip_by_value(c), or one of your own by zf.leafwise; or\n"
                    "zf.shard() instead of zf.reduce_scatter() or zf.all_reduce(), and no in_backward=True",
                ),
                UserWarning,
                stacklevel=3,
            )
