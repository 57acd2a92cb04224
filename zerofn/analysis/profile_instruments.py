"""What listens while a step is measured: a clock of phases, a counter of operations, and differences of traffic."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._compat.autograd import at_end_of_backward, in_backward
from .._compat.functorch import is_wrapped
from .._ranges import PHASE, UPDATE, VIEW, WAIT, listener, listening
from ..module.nested_tensors import tensors_in
from ..ranks.open_groups import opened
from .flops import Flops
from .profile_report import PHASES, Measured

# Phases of which operations are counted.
COUNTED = ("forward", "backward", "update")


class Clock:
    """Seconds by phase: a moment counts for the innermost range, and outside of all ranges for the phase that is set.

    It listens to ranges. Those of view halves are of the phase that they are in.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.transforms: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        # Of each range that is open: kind, name, and whether a range inside of it has told what it moves.
        self.open: list[list[Any]] = []
        self.outside = "elsewhere"
        self.mark = _now()

    @property
    def phase(self) -> str:
        """That of this moment, waiting apart."""
        kind, name = next(((k, n) for k, n, _ in reversed(self.open) if k in (PHASE, UPDATE)), (PHASE, self.outside))
        return "update" if kind == UPDATE else name

    @property
    def transform(self) -> str:
        """The one whose update half runs; none is `""`."""
        return next((name for kind, name, _ in reversed(self.open) if kind == UPDATE), "")

    def tick(self) -> None:
        """Count the time since the last tick."""
        now = _now()
        spent, self.mark = now - self.mark, now
        kind, name = next(((k, n) for k, n, _ in reversed(self.open) if k != VIEW), (PHASE, ""))
        self.seconds["collectives" if kind == WAIT else self.phase] += spent
        if kind == WAIT:
            self.waited[name] += spent
        elif kind == UPDATE:
            self.transforms[name] += spent

    def now_outside(self, phase: str) -> None:
        """What is in no range counts for this phase from here on."""
        self.tick()
        self.outside = phase

    def begin(self, kind: str, name: str) -> None:
        self.tick()
        self.open.append([kind, name, False])

    def end(self) -> None:
        self.tick()
        *_, told = self.open.pop()
        if told and self.open:
            self.open[-1][2] = True

    def moved(self, name: str, read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        if self.open[-1][2]:
            return
        self.open[-1][2] = True
        for counter, given in ((self.read, read), (self.written, written)):
            for owner, values in given.items():
                counter[owner or name] += sum(map(_bytes, values))


class Calls:
    """Phases of a model that is called and differentiated by PyTorch's own means, told by hooks on all modules.

    Where a backward begins torch does not say; what can be seen is that the gradient of an output arrives.
    """

    def __init__(self, clock: Clock):
        self.clock, self.depth = clock, 0
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> Calls:
        self.undo = [
            register_module_forward_pre_hook(self._before).remove,
            register_module_forward_hook(self._after, always_call=True).remove,
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for action in self.undo:
            action()

    def _mine(self) -> bool:
        """Whether a call is of this thread, outside of steps that have phases of their own, and not made again."""
        return listener() is self.clock and not self.clock.open and not in_backward()

    def _before(self, module: Any, args: Any) -> None:
        if self._mine():
            self.depth += 1
            if self.depth == 1:
                self.clock.now_outside("forward")

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if not self._mine() or self.depth == 0:
            return
        self.depth -= 1
        if self.depth == 0:
            self.clock.now_outside("loss")
            hooked = [x for x in tensors_in(output) if x.requires_grad and not is_wrapped(x)]
            self.undo += [x.register_hook(self._arrived).remove for x in hooked]

    def _arrived(self, grad: Tensor) -> None:
        if self.clock.outside != "backward":
            self.clock.now_outside("backward")
            at_end_of_backward(lambda: self.clock.now_outside("elsewhere"))


class Measuring:
    """One step under measurement, as a context; `found` has the numbers afterwards."""

    def __init__(self, flops: bool):
        self.clock = Clock()
        self.flops = Flops(self.clock) if flops else None
        self.before = _traffic()
        self.stack = ExitStack()

    def __enter__(self) -> Measuring:
        with ExitStack() as stack:
            stack.enter_context(Calls(self.clock))
            if self.flops is not None:
                stack.enter_context(self.flops)
            stack.enter_context(listening(self.clock))
            self.stack = stack.pop_all()
        self.clock.mark = _now()
        return self

    def __exit__(self, *error: Any) -> None:
        self.clock.tick()
        self.stack.__exit__(*error)

    def found(self) -> Measured:
        """The numbers."""
        clock, sent, calls = self.clock, Counter[str](), Counter[str]()
        for group, (sums, counts) in _traffic().items():
            old_sums, old_counts = self.before.get(group, ({}, {}))
            sent.update({op: n - old_sums.get(op, 0) for op, n in sums.items()})
            calls.update({op: n - old_counts.get(op, 0) for op, n in counts.items()})
        made = {op: n for op, n in calls.items() if n > 0}
        seconds = dict(clock.seconds)
        if "backward" not in seconds:
            # A model was called, and of what followed nothing came back into it.
            seconds["elsewhere"] = seconds.get("elsewhere", 0.0) + seconds.pop("loss", 0.0)
        counted = {} if self.flops is None else self.flops.by_phase
        ran = {phase for phase in (*counted, *seconds) if phase in COUNTED and self.flops is not None}
        return Measured(
            seconds={phase: seconds[phase] for phase in PHASES if phase in seconds},
            flops={phase: counted.get(phase, {"": 0}) for phase in PHASES if phase in ran},
            transforms=dict(clock.transforms),
            read=dict(clock.read),
            written=dict(clock.written),
            sent={op: sent[op] for op in made},
            calls=made,
            waited={op: clock.waited[op] for op in made},
        )


def _traffic() -> dict[Any, tuple[dict[str, int], dict[str, int]]]:
    return {group: (group.traffic.by_op, group.traffic.calls_by_op) for group in opened()}


def _now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _bytes(x: Any) -> int:
    """What a tensor has of memory, which is less than its shape says where it is expanded."""
    if not isinstance(x, Tensor):
        return 0
    size = x.numel() * x.element_size()
    return size if is_wrapped(x) or x.layout is not torch.strided else min(size, x.untyped_storage().nbytes())
