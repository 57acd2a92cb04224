"""Work beside training in a thread of its own, which is over before the process is."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """A function that runs beside the caller. The interpreter waits for it at its end.

    Args:
        name: of what is done, for the traceback that is printed where it fails.
        work: is called once.

    Attributes:
        error: what it raised; it is printed as well, since nobody may ask.
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
            # What it holds may be a copy of all parameters.
            self.work = None


def settle() -> None:
    """Wait for all such work of this process: what follows may use the same channels, or end the process."""
    for thread in threading.enumerate():
        if isinstance(thread, Background) and thread is not threading.current_thread():
            thread.join()
