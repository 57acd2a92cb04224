"""Ctrl-C at a chosen operation of torch."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Interrupt(TorchDispatchMode):
    """Raises at the n-th operation inside; `left` is above 0 where there are fewer."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return function(*args, **(kwargs or {}))
