"""The calls of an attached model that are under way, in each thread that calls it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor, nn

from .._compat.autograd import saved_tensors_hooks
from .._compat.modules import has_ended
from ..sharded.gather_on_use import Units
from ..sharded.saved_tensors import Walks
from ..sharded.write_back import Region
from .leaked_tensors import HookedOutput
from .output_graph import OutputTracker

Seen = dict[str, tuple[Tensor, Tensor, Region | None]]


class ThreadState(threading.local):
    """What each thread that calls the model has for itself.

    Attributes:
        calls: of modules, the outermost first.
        walks: exchange gathered parameters that graphs of calls have saved for notes.
        seen: by path, of the call under way: the stored tensor, its view, and where the view's memory was.
        crossed_at: the number of the next autograd node when a cotangent last crossed the boundary.
        last_views: by path, the last view of a parameter, and the stored tensor that it is the view of.
        searched: by the numbers of the backwards whose graphs have been searched, the last one and those inside of it,
            the loss scale all through them.
        tracker: of the outputs of the call under way; `None` where outputs are not copied.
    """

    def __init__(self, units: Units | None) -> None:
        self.calls: list[ActiveCall] = []
        self.walks = None if units is None else Walks(units)
        self.seen: Seen = {}
        self.crossed_at: int | None = None
        self.last_views: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.searched: dict[int, Tensor | None] = {}
        self.tracker: OutputTracker | None = None

    def stale(self) -> bool:
        """Whether the calls that are noted have ended without their hooks, as Ctrl-C ends them."""
        return bool(self.calls) and self.calls[0].frame is not None and has_ended(self.calls[0].frame)

    def drop_stale_calls(self) -> None:
        """Forget calls that ended without their hooks."""
        while self.calls:
            self.calls.pop().undo.close()
        self.seen.clear()
        self.tracker = None
        if self.walks is not None:
            self.walks.open.clear()


class ActiveCall:
    """A call under way.

    Attributes:
        module: is called.
        outermost: whether its caller is outside of the model.
        callers: of an outermost one, the modules that are called from outside together with it.
        start: the number of the first autograd node that may be made in it.
        shown: its output as hooks of the user's see it.
        error: what was being handled when it began, to be told from what the call raises.
        frame: of an outermost one, that of Python, which tells whether it is under way.
        undo: runs at its end.
    """

    __slots__ = ("callers", "error", "frame", "module", "outermost", "shown", "start", "undo")

    def __init__(self, module: nn.Module, outermost: bool, start: int, error: BaseException | None, frame: Any):
        self.module, self.outermost, self.start, self.error, self.frame = module, outermost, start, error, frame
        self.callers: Collection[int] = ()
        self.shown: HookedOutput | None = None
        self.undo = ExitStack()


class CalledTogether:
    """Modules that are called from outside of the model inside of the same hooks of the user's on saved tensors.

    A checkpoint around several calls repeats all of them at the first node of the last one's graph.
    """

    def __init__(self) -> None:
        # By what unpacks saved tensors, which they keep alive.
        self.by_hooks: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def called(self, module: nn.Module) -> set[int]:
        """Those that are called together with this one, which is called now, by `id`."""
        together, hooks = set[int](), saved_tensors_hooks()
        if hooks is not None:
            # What is no key is no checkpoint's.
            with suppress(TypeError):
                together = self.by_hooks.setdefault(hooks[1], together)
        together.add(id(module))
        return together
