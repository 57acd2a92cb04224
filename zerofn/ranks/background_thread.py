"""A thread for work beside training, such as an asynchronous save; the interpreter waits for it at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """A function that runs in a thread from now on.

    Args:
        name: of the thread, for the traceback that is printed if it fails.
        work: the function, called once.

    Attributes:
        error: what it raised; it is printed as well, since the caller may not ask.
    """

    def __init__(self, name: str, work: Callable[[], None]):
        super().__init__(name=name, daemon=False)
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        assert self.work is not None
        try:
            self.work()
        except BaseException as error:
            self.error = error
            raise
        finally:
            # It may hold a copy of all parameters.
            self.work = None


def settle() -> None:
    """Wait for all background threads of this process, before the same channels are used or the process ends."""
    for thread in threading.enumerate():
        if isinstance(thread, Background) and thread is not threading.current_thread():
            thread.join()
