"""Ctrl-C at a chosen moment: at an operation of torch, or at any place where Python delivers signals."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType
from typing import Any

import torch
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


class Moment:
    """SIGINT at the n-th place inside where Python delivers signals; no SIGINT for an `n` of 0.

    Python delivers them where a function of its own begins and where a function of C has returned (and in loops, which
    call something), so a sweep over `n` meets what Ctrl-C can do to a program, and nothing else: a real signal, to the
    handler that is set at that moment.

    Args:
        n: which place.
        files: count those in files of these names alone; all places without any.

    Attributes:
        seen: the places that were passed, up to the n-th.
        where: the place where SIGINT came; `None` where there are fewer.
    """

    def __init__(self, n: int, files: tuple[str, ...] = ()):
        self.n, self.seen, self.files = n, 0, files
        self.where: str | None = None

    def __enter__(self) -> Moment:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code is Moment.__exit__.__code__:
            return
        if frame.f_code.co_name == "<genexpr>":
            # `any` and `all` throw one away, and Python ignores what is raised while it is closed, an interrupt too.
            return
        if frame.f_code.co_name == "__exit__" and frame.f_code.co_filename == contextlib.__file__:
            # Python itself loses what is left to be closed: of an `ExitStack` the callbacks behind this one.
            return
        if self.files and not frame.f_code.co_filename.endswith(self.files):
            return
        self.seen += 1
        if self.seen == self.n:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_qualname}, {event}"
            signal.raise_signal(signal.SIGINT)


def modes() -> tuple[Any, ...]:
    """What an interrupt must leave as it was: modes of torch, and who is called for the next SIGINT."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False) is None,
        torch._C._functorch.maybe_current_level(),
        signal.getsignal(signal.SIGINT),
    )
