"""`Saving`: a checkpoint that a thread writes from copies in host memory while training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._errors import explain
from ..core.state import State
from ..core.tree import flatten
from ..ranks.background_thread import Background
from ..sharded.guarded_parameter import writes


class Saving:
    """A save under way: what `zf.save(directory, state, wait=False)` returns.

    An error is printed when it happens and raised by `wait()`; the checkpoint that was there is then unchanged. The
    process does not end before the save has, and the next save or load waits for it.
    """

    def __init__(self, directory: str | os.PathLike, write: Callable[[], None]):
        self.directory = os.fspath(directory)
        self._thread = Background(f"zf.save({self.directory!r}, ..., wait=False)", write)

    @property
    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is done.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it was not done by then, and goes on.
            Exception: what the save raised.
        """
        self._thread.join(timeout)
        if not self.done:
            raise TimeoutError(f"the save in {self.directory!r} was not done after {timeout} s; it goes on.")
        if self._thread.error is not None:
            raise self._thread.error

    def __repr__(self) -> str:
        status = "under way" if not self.done else "failed" if self._thread.error else "done"
        return f"Saving({self.directory!r}, {status})"


def copy_to_host(pieces: dict[str, Any]) -> dict[str, Any]:
    """The pieces in host memory of their own, so that a step may write into the tensors that they came from."""
    return {key: piece._replace(data=piece.data.to("cpu", copy=True)) for key, piece in pieces.items()}


def check_no_step_since(writes: Callable[[], int]) -> Callable[[], None]:
    """A function that raises if an attached model has made a step since this call, or was making one during it.

    It compares a counter and takes no lock: with a lock training would wait for a disk.

    Args:
        writes: how often writing has begun or ended; odd in between.
    """
    before = writes()

    def check() -> None:
        if before % 2 or writes() != before:
            wrong = "zf.save(directory, opt) in another thread while opt makes a step, or between a backward and "
            wrong += "opt.step() with in_backward=True, where backward is the step"
            right = "zf.save(directory, opt) after opt.step(); with wait=False in the thread that trains: it copies, "
            right += "and writes meanwhile"
            raise RuntimeError(explain(wrong, "some of what is kept is of before the step and some of after it", right))

    return check


def check_not_written_since(state: State) -> Callable[[], None]:
    """A function that raises if a state has been donated since this call, or one of its tensors written into."""
    tensors = [x for x in flatten(state)[0] if isinstance(x, Tensor)]
    before = writes(tensors)

    def check() -> None:
        state.check_usable("zf.save(directory, state)")
        if writes(tensors) != before:
            wrong = "zf.save(directory, state) while something writes into the state, in another thread"
            right = "zf.save(directory, opt) of an attached model; else zf.save(directory, state, wait=False) in the "
            right += "thread that\nwrites: it copies first"
            raise RuntimeError(explain(wrong, "some of what is kept is of before it and some of after it", right))

    return check


def check_once(check: Callable[[], None]) -> Callable[[], None]:
    """`check` is called at once, and the function that is returned raises its error.

    Copies have been made by then, so a later step does no harm. The error waits for the moment at which all ranks
    raise together.
    """
    found: Exception | None = None
    try:
        check()
    except RuntimeError as error:
        found = error

    def raise_found() -> None:
        if found is not None:
            raise found

    return raise_found
