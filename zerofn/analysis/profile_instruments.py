"""Instruments of `profile`: a clock of phases, hooks on modules, a counter of operations, bytes sent."""

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
from .profile_report import PHASES, Measured

# Phases of which operations are counted.
COUNTED = ("forward", "backward", "update")

# torch before 2.15 has no formula for attention on the CPU; it is that of the kernel of other devices.
_ATTENTION = (
    ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward"),
)


class PhaseClock:
    """Seconds by phase, from the ranges that it listens to.

    Time counts for the innermost range, and outside of all ranges for `outside`. A view half counts for the phase that
    it runs in.

    Attributes:
        seconds: by phase.
        transforms: seconds by transform.
        waited: seconds by collective.
        read: bytes by transform.
        written: bytes by transform.
        open: of each range that is open: kind, name, and whether a range inside of it has reported bytes.
        outside: the phase outside of all ranges.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.transforms: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.open: list[list[Any]] = []
        self.outside = "elsewhere"
        self.mark = _now()

    @property
    def phase(self) -> str:
        """The current one; waiting for a collective is no phase here."""
        kind, name = next(((k, n) for k, n, _ in reversed(self.open) if k in (PHASE, UPDATE)), (PHASE, self.outside))
        return "update" if kind == UPDATE else name

    @property
    def transform(self) -> str:
        """The transform whose update half runs, or `""`."""
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

    def set_outside(self, phase: str) -> None:
        """Time outside of all ranges counts for this phase from here on."""
        self.tick()
        self.outside = phase

    def begin(self, kind: str, name: str) -> None:
        self.tick()
        self.open.append([kind, name, False])

    def end(self) -> None:
        self.tick()
        *_, reported = self.open.pop()
        if reported and self.open:
            self.open[-1][2] = True

    def moved(self, name: str, read: Mapping[str, Any], written: Mapping[str, Any]) -> None:
        if self.open[-1][2]:
            return
        self.open[-1][2] = True
        for counter, given in ((self.read, read), (self.written, written)):
            for owner, values in given.items():
                counter[owner or name] += sum(map(_bytes, values))


class ModelHooks:
    """Global module hooks that set the phase while a model is called and differentiated by PyTorch's own means.

    torch does not say where a backward begins; it is taken to begin when the gradient of an output arrives.
    """

    def __init__(self, clock: PhaseClock):
        self.clock, self.depth = clock, 0
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> ModelHooks:
        self.undo = [
            register_module_forward_pre_hook(self._before).remove,
            register_module_forward_hook(self._after, always_call=True).remove,
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for action in self.undo:
            action()

    def _counts(self) -> bool:
        """Whether a call is in this thread, outside of all ranges, and no recomputation in backward."""
        return listener() is self.clock and not self.clock.open and not in_backward()

    def _before(self, module: Any, args: Any) -> None:
        if self._counts():
            self.depth += 1
            if self.depth == 1:
                self.clock.set_outside("forward")

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if not self._counts() or self.depth == 0:
            return
        self.depth -= 1
        if self.depth == 0:
            self.clock.set_outside("loss")
            hooked = [x for x in tensors_in(output) if x.requires_grad and not is_wrapped(x)]
            self.undo += [x.register_hook(self._arrived).remove for x in hooked]

    def _arrived(self, grad: Tensor) -> None:
        if self.clock.outside != "backward":
            self.clock.set_outside("backward")
            at_end_of_backward(lambda: self.clock.set_outside("elsewhere"))


class Flops:
    """A counter of floating-point operations, as a context.

    torch's own adds up over phases, so its formulas are wrapped in one that looks which phase it is.

    Attributes:
        by_phase: operations by phase and module, or transform; `""` is all of them.
    """

    def __init__(self, clock: PhaseClock):
        # Imported here: it takes as long to import as zerofn.
        from torch.utils.flop_counter import FlopCounterMode

        self.clock = clock
        self.by_phase: dict[str, dict[str, int]] = {}
        self.mode = FlopCounterMode(display=False)
        formulas = dict(self.mode.flop_registry)
        for name, same in _ATTENTION:
            formulas.setdefault(getattr(torch.ops.aten, name), formulas[getattr(torch.ops.aten, same)])
        self.mode.flop_registry = {op: self._counting(formula) for op, formula in formulas.items()}

    def __enter__(self) -> Flops:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)

    def _counting(self, formula: Any) -> Any:
        def count(*args: Any, **keywords: Any) -> int:
            flops = formula(*args, **keywords)
            phase = self.clock.phase
            if phase != "update":
                phase = "backward" if phase == "backward" or in_backward() else "forward"
            inside = {self.clock.transform} if phase == "update" else self.mode.mod_tracker.parents - {"Global"}
            counts = self.by_phase.setdefault(phase, {"": 0})
            for name in {"", *inside}:
                counts[name] = counts.get(name, 0) + flops
            return flops

        return count


class Measurement:
    """Measures one step, as a context; `result` has the numbers afterwards."""

    def __init__(self, flops: bool):
        self.clock = PhaseClock()
        self.flops = Flops(self.clock) if flops else None
        self.before = _traffic()
        self.stack = ExitStack()

    def __enter__(self) -> Measurement:
        with ExitStack() as stack:
            stack.enter_context(ModelHooks(self.clock))
            if self.flops is not None:
                stack.enter_context(self.flops)
            stack.enter_context(listening(self.clock))
            self.stack = stack.pop_all()
        self.clock.mark = _now()
        return self

    def __exit__(self, *error: Any) -> None:
        self.clock.tick()
        self.stack.__exit__(*error)

    def result(self) -> Measured:
        clock, sent, calls = self.clock, Counter[str](), Counter[str]()
        for group, (sums, counts) in _traffic().items():
            old_sums, old_counts = self.before.get(group, ({}, {}))
            sent.update({op: n - old_sums.get(op, 0) for op, n in sums.items()})
            calls.update({op: n - old_counts.get(op, 0) for op, n in counts.items()})
        made = {op: n for op, n in calls.items() if n > 0}
        seconds = dict(clock.seconds)
        if "backward" not in seconds:
            # A model was called, and no gradient has come back into it.
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
    """Seconds, after the device has finished its queue."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _bytes(x: Any) -> int:
    """Bytes of a tensor's memory: fewer than its shape says if it is expanded."""
    if not isinstance(x, Tensor):
        return 0
    size = x.numel() * x.element_size()
    return size if is_wrapped(x) or x.layout is not torch.strided else min(size, x.untyped_storage().nbytes())
