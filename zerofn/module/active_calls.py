"""The calls of an attached model that are under way, in each thread that calls it."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack

from torch import Tensor, nn

from ..sharded.gather_on_use import Units
from ..sharded.saved_tensors import Walks
from ..sharded.write_back import Place, Sampling
from .leaked_tensors import Shown
from .output_graph import Leaving

Seen = dict[str, tuple[Tensor, Tensor, Place | None]]


class Local(threading.local):
    """What each thread that calls the model has for itself."""

    def __init__(self, units: Units | None) -> None:
        self.calls: list[Call] = []
        # What their graphs have saved of parameters that were gathered.
        self.walks = None if units is None else Walks(units)
        # By path: the stored tensor, its view in the call under way, and where that was.
        self.seen: Seen = {}
        # At whose ends all of what the model saw is compared.
        self.sampling = Sampling()
        # Where the numbers of autograd nodes stood when a cotangent last crossed the boundary.
        self.mark: int | None = None
        # By path: the view that was given last, and what it is the view of.
        self.given: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        # Backwards whose graphs have been searched: the last one, and those inside of it.
        self.tasks: set[int] = set()
        # What leaves at the end of the call under way; none where nothing is copied on its way out.
        self.leaving: Leaving | None = None


class Call:
    """A call under way: of which module, whether its caller is outside the model, and the first node made in it."""

    __slots__ = ("error", "module", "outermost", "shown", "start", "undo")

    def __init__(self, module: nn.Module, outermost: bool, start: int):
        self.module = module
        self.outermost = outermost
        self.start = start
        self.shown: Shown | None = None
        # What was being handled when it began, to be told from what it raises.
        self.error: BaseException | None = None
        self.undo = ExitStack()
