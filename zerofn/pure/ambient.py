"""What a function depends on beside its arguments, random numbers and autocast, for running it again later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Ambient:
    """Torch's random numbers and autocast as they are now; a generator of the user's own is not known here.

    Args:
        tensors: on whose devices random numbers may be drawn.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)
        kinds = {"cpu", *(x.device.type for x in tensors if x.device.type != "meta")}
        self.casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside it is as it was; afterwards as it is now.

        >>> ambient, first = Ambient([]), torch.rand(2)
        >>> with ambient.again():
        ...     torch.equal(torch.rand(2), first)
        True
        """
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices))
            torch.set_rng_state(self.random)
            set_device_states(self.devices, self.states)
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            yield
