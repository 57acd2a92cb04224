"""A signal at a chosen moment: at an operation of torch, or at any place where Python delivers signals."""

from __future__ import annotations

import contextlib
import signal
import sys
import weakref
from collections.abc import Iterator
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


# Signals that a batch system or a program sends, and what a handler of the user's raises.
RAISES: dict[signal.Signals, type[BaseException]] = {
    signal.SIGTERM: SystemExit,
    signal.SIGALRM: TimeoutError,
    signal.SIGUSR1: SystemExit,
}
RAISED = (KeyboardInterrupt, SystemExit, TimeoutError)


@contextlib.contextmanager
def by_signal(number: signal.Signals) -> Iterator[None]:
    """Inside, each `Moment` brings this signal, whose handler raises, in the place of SIGINT."""

    def handler(*_: object) -> None:
        raise RAISES[number]

    before, Moment.number = signal.signal(number, handler), number
    try:
        yield
    finally:
        Moment.number = signal.SIGINT
        signal.signal(number, before)


class Moment:
    """SIGINT at the n-th place inside where Python delivers signals, and maybe a second one; none for an `n` of 0.

    Python delivers them where a function of its own begins and where a function of C has returned (and in loops, which
    call something), so a sweep over `n` meets what Ctrl-C can do to a program, and nothing else: a real signal, to the
    handler that is set at that moment.

    Args:
        n: which place.
        files: count those in files of these names alone; all places without any.
        then: how many places behind the first one a second SIGINT comes, also while the first is handled; none for 0.

    Attributes:
        seen: the places that were passed, up to the last SIGINT.
        where: the place where SIGINT came; `None` where there are fewer.
        again: the place of the second one; `None` where there are fewer.
    """

    number = signal.SIGINT

    def __init__(self, n: int, files: tuple[str, ...] = (), then: int = 0):
        self.n, self.seen, self.files, self.then = n, 0, files, then
        self.where: str | None = None
        self.again: str | None = None

    def __enter__(self) -> Moment:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
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
        if frame.f_code.co_name in ("_push_cm_exit", "_push_exit_callback"):
            # An `ExitStack` has entered something, and has not yet noted how it is left. torch.func has such a stack.
            return
        if (
            event == "c_return"
            and frame.f_code.co_name == "__enter__"
            and frame.f_code.co_filename == contextlib.__file__
        ):
            # What was entered is closed by nobody but the garbage collector: Python has not begun the `with` yet.
            return
        if event == "c_return" and getattr(arg, "__name__", "") == "__enter__":
            # The same, of what is written in C: Python 3.14 delivers signals there, and leaves open what was entered.
            return
        if "ExactWeakKeyDictionary" in frame.f_code.co_qualname or frame.f_code.co_filename == weakref.__file__:
            # A tensor goes, and weak references to it call this. Python prints what is raised in there, and goes on.
            return
        if self.files and not frame.f_code.co_filename.endswith(self.files):
            return
        self.seen += 1
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_qualname}, {event}"
        if self.seen == self.n:
            self.where = place
            if self.then:
                # Python takes the profile off where it raises. The frame that is told of the error puts it on again.
                above: FrameType | None = frame
                while above is not None:
                    above.f_trace, above = self._raised, above.f_back
                sys.settrace(self._raised)
            else:
                sys.setprofile(None)
            signal.raise_signal(self.number)
        elif self.where is not None and self.seen == self.n + self.then:
            sys.settrace(None)
            sys.setprofile(None)
            self.again = place
            signal.raise_signal(self.number)

    def _raised(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            sys.settrace(None)
            sys.setprofile(self._event)
            return None
        return self._raised


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
        signal.getsignal(Moment.number),
    )
