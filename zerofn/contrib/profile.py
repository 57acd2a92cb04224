"""`profile`: operations, bytes and seconds of a training step, by phase, module, transform and collective."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zerofn import Optimizer
from zerofn.collectives import opened
from zerofn.extend import check_flag, explain, kind_of, listener, listening

# These have no public name: wrappers of torch's private names, and the layout of tables.
from .._compat.autograd import at_end_of_backward, in_backward
from .._compat.functorch import is_wrapped
from ..core.html import BYTES, COUNTS, SECONDS, card, table
from ..storage.tables import align_columns, format_bytes

# ----------------------------------------------------------------------------------------------------------------------
# `Measured`: the numbers of a measured step, and their tables as text and HTML.


PHASES = ("forward", "loss", "backward", "update", "collectives", "elsewhere")
MAX_MODULES = 24  # lines of modules in a table


@dataclass(frozen=True)
class Measured:
    """The measurements of a step, or their means over steps; see `zf.profile`.

    Attributes:
        seconds: by phase.
        flops: operations by phase and module, `""` for all modules; empty if they were not counted.
        transforms: seconds by transform.
        read: bytes by transform.
        written: bytes by transform.
        sent: bytes by collective.
        calls: number of calls by collective.
        waited: seconds by collective.
    """

    seconds: Mapping[str, float]
    flops: Mapping[str, Mapping[str, float]]
    transforms: Mapping[str, float]
    read: Mapping[str, float]
    written: Mapping[str, float]
    sent: Mapping[str, float]
    calls: Mapping[str, float]
    waited: Mapping[str, float]


def mean_of(steps: Sequence[Measured]) -> Measured:
    """The mean over steps; what did not run in a step counts as zero for that step."""
    if len(steps) == 1:
        return steps[0]
    plain = [f.name for f in fields(Measured) if f.name != "flops"]
    found: dict[str, Any] = {name: _mean([getattr(s, name) for s in steps]) for name in plain}
    phases = dict.fromkeys(phase for s in steps for phase in s.flops)
    return Measured(flops={phase: _mean([s.flops.get(phase, {}) for s in steps]) for phase in phases}, **found)


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: sum(one.get(name, 0) for one in each) / len(each) for name in names}


Table = tuple[tuple[str, ...], list[tuple[str, ...]], list[float]]


def _tables(m: Measured) -> list[Table]:
    """The header and rows of each table, and the length of each row's bar."""
    total = sum(m.seconds.values())
    shown = [(p, m.seconds.get(p)) for p in PHASES if p in m.seconds or p in ("forward", "backward", "update")]
    found: list[Table] = [
        (
            ("phase", "time", "share"),
            [(p, "did not run", "") if s is None else (p, _time(s), f"{s / total:.0%}") for p, s in shown],
            [s or 0.0 for _, s in shown],
        )
    ]
    if m.flops:
        phases = [p for p in PHASES if p in m.flops]
        counted = _modules(m.flops, phases)
        rows = [(name or "all", *map(_count, counts)) for name, counts in counted]
        found.append((("operations", *phases), rows, [sum(counts) for _, counts in counted]))
    owners = dict.fromkeys((*m.read, *m.transforms))
    if owners:
        moved = [[format_bytes(sizes.get(o, 0)) for sizes in (m.read, m.written)] for o in owners]
        rows = [(o, *sizes, _time(m.transforms.get(o))) for o, sizes in zip(owners, moved, strict=True)]
        found.append((("states", "read", "written", "time"), rows, [m.read.get(o, 0) for o in owners]))
    if m.calls:
        rows = [(o, _number(n), format_bytes(m.sent[o]), _time(m.waited[o])) for o, n in m.calls.items()]
        found.append((("collectives", "calls", "sent", "waited"), rows, [m.sent[o] for o in m.calls]))
    return found


def _modules(flops: Mapping[str, Mapping[str, float]], phases: list[str]) -> list[tuple[str, list[float]]]:
    """Operations by phase for each module; modules whose names differ only in numbers share a row."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for phase in phases for name in flops[phase]):
        groups.setdefault(re.sub(r"\.\d+", ".*", name), []).append(name)
    rows = []
    for pattern, names in sorted(groups.items()):
        counts = [sum(flops[phase].get(name, 0) for name in names) for phase in phases]
        rows.append((f"{pattern} x{len(names)}" if len(names) > 1 else names[0], counts))
    rest = len(rows) - MAX_MODULES
    return rows if rest <= 0 else [*rows[:MAX_MODULES], (f"... {rest} more lines", [0.0] * len(phases))]


def _title(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}, on this rank"
    return f"mean of {len(numbers)} steps ({numbers[0]} to {numbers[-1]}), on this rank"


def lines_of(m: Measured, numbers: Sequence[int]) -> list[str]:
    """The tables as text."""
    lines = [_title(numbers)]
    for head, rows, _ in _tables(m):
        lines += align_columns([head, *((f"  {name}", *cells) for name, *cells in rows)], left=1)
    return lines


def html_of(m: Measured, numbers: Sequence[int]) -> str:
    """The tables as HTML. Each row shows one number, as a bar too; the text has all of them."""
    units = {"phase": SECONDS, "operations": COUNTS, "states": BYTES, "collectives": BYTES}
    about = {"phase": "time", "operations": "operations", "states": "bytes read", "collectives": "bytes sent"}
    parts = []
    for head, rows, sizes in _tables(m):
        sized = [([name], size) for (name, *_), size in zip(rows, sizes, strict=True)]
        parts.append(card(about[head[0]], table([head[0]], sized, units[head[0]])))
    return card(_title(numbers), *parts, text="\n".join(lines_of(m, numbers)))


def _time(seconds: float | None) -> str:
    """Seconds in a fitting unit.

    Examples:
        >>> [_time(s) for s in (1.5, 0.0123, 4.5e-5, None)]
        ['1.50 s', '12.3 ms', '45 us', '']
    """
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _count(n: float) -> str:
    """Operations in a fitting unit.

    Examples:
        >>> [_count(n) for n in (0, 999, 1500, 2.5e9, 3e15)]
        ['0', '999', '1.50 k', '2.50 G', '3000.00 T']
    """
    for unit in ("", " k", " M", " G"):
        if n < 1000:
            return f"{n:.2f}{unit}" if unit else _number(n)
        n /= 1000
    return f"{n:.2f} T"


def _number(n: float) -> str:
    return f"{n:g}"


# ----------------------------------------------------------------------------------------------------------------------
# `profile` measures with a clock of phases, hooks on modules, a counter of operations, and counts of bytes sent.


# The kinds of ranges that a listener gets.
PHASE, UPDATE, VIEW, WAIT = "phase", "update", "view", "wait"

# Phases of which operations are counted.
COUNTED = ("forward", "backward", "update")

# Before 2.15 torch's flop counter has no formula for attention on the CPU. Other devices' formula is the same.
_ATTENTION = (
    ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward"),
)


class PhaseClock:
    """Measures seconds by phase, as a listener of ranges.

    Time counts for the innermost range, and outside of all ranges for the phase `outside`. A view half counts for the
    phase it runs in.

    Attributes:
        seconds: by phase.
        transforms: seconds by transform.
        waited: seconds by collective.
        read: bytes by transform.
        written: bytes by transform.
        open: for each open range: kind, name, and whether a range inside of it has reported bytes.
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
        """The current phase; waiting for a collective is not a phase here."""
        kind, name = next(((k, n) for k, n, _ in reversed(self.open) if k in (PHASE, UPDATE)), (PHASE, self.outside))
        return "update" if kind == UPDATE else name

    @property
    def transform(self) -> str:
        """The transform whose update is running, or `""`."""
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
        """From now on count time outside of all ranges for this phase."""
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
    """Global module hooks that set the phase during the model's forward and torch's own backward.

    torch does not say where a backward begins. Here it begins when the gradient of a module's output arrives.
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
        """Whether this call counts: in this thread, outside of all ranges, and not recomputed in backward."""
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
            hooked = [x for x in _tensors_in(output) if x.requires_grad and not is_wrapped(x)]
            self.undo += [x.register_hook(self._arrived).remove for x in hooked]

    def _arrived(self, grad: Tensor) -> None:
        if self.clock.outside != "backward":
            self.clock.set_outside("backward")
            at_end_of_backward(lambda: self.clock.set_outside("elsewhere"))


class Flops:
    """A counter of floating-point operations, as a context.

    torch's counter adds up over phases, so each of its formulas is wrapped in one that asks for the phase.

    Attributes:
        by_phase: operations by phase and module or transform; `""` is all of them.
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
    """Measures one step, as a context; `result()` returns the numbers afterwards."""

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
            # The step called a model without a backward, so the time after the call was not spent on a loss.
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


def _tensors_in(value: Any, depth: int = 8) -> list[Tensor]:
    """The tensors in a module's output; objects of any class are searched."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or not depth or isinstance(value, str | bytes | int | float | complex | type | torch.nn.Module):
        return []
    if isinstance(value, Mapping):
        held: Iterable[Any] = value.values()
    else:
        held = value if isinstance(value, tuple | list) else list(getattr(value, "__dict__", {}).values())
    return [x for one in held for x in _tensors_in(one, depth - 1)]


def _now() -> float:
    """Seconds on the clock, once the device has finished its queue."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _bytes(x: Any) -> int:
    """Bytes of a tensor's memory. An expanded tensor has fewer than its shape says."""
    if not isinstance(x, Tensor):
        return 0
    size = x.numel() * x.element_size()
    return size if is_wrapped(x) or x.layout is not torch.strided else min(size, x.untyped_storage().nbytes())


# ----------------------------------------------------------------------------------------------------------------------
# `profile`: operations, bytes and seconds of a training step, by phase, module, transform and collective.


_UNDER_WAY: ContextVar[bool] = ContextVar("zerofn_profile", default=False)


class Profile:
    """Measures steps; see `zf.profile`.

    Attributes:
        measured: `Measured` by number of the step.
        count: steps begun so far.
    """

    def __init__(self, target: Any, steps: frozenset[int] | None, flops: bool):
        self.target, self.steps, self.flops = target, steps, flops
        self.measured: dict[int, Measured] = {}
        self.count = 0
        self._open: ExitStack | None = None
        self._measurement: Measurement | None = None

    def __enter__(self) -> Profile:
        if torch.compiler.is_compiling() or _UNDER_WAY.get():
            outer = "torch.compile" if torch.compiler.is_compiling() else "a zf.profile"
            why = "the work of the inner profile would be counted and timed as the step's"
            right = "one profile around the step: it shows all phases, modules, transforms and collectives"
            raise RuntimeError(explain(f"zf.profile inside of {outer}", why, right))
        token = _UNDER_WAY.set(True)
        with ExitStack() as stack:
            stack.callback(_UNDER_WAY.reset, token)
            if self.steps is None or self.count in self.steps:
                self._measurement = stack.enter_context(Measurement(self.flops))
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._open is not None
        self._open.__exit__(kind, error, trace)
        if self._measurement is not None and kind is None:
            self.measured[self.count] = self._measurement.result()
        self.count, self._open, self._measurement = self.count + 1, None, None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the step, and measure it if its number is in `steps`."""
        if isinstance(self.target, Optimizer):
            why = "a step of an attached model is several calls: the model, loss.backward() and opt.step()"
            right = "with profile: loss = model(x).mean(); loss.backward(); opt.step(); opt.zero_grad()"
            raise TypeError(explain("a call of zf.profile(opt)", why, right))
        with self:
            return self.target(*args, **keywords)

    @property
    def mean(self) -> Measured:
        """The mean over the measured steps.

        Raises:
            RuntimeError: no step was measured.
        """
        if not self.measured:
            begun = f"{self.count} steps began, and {_planned(self.steps)} to be measured"
            why = f"{begun}; a step that raises is not kept"
            right = "with profile: around a whole step, or profile(state, *batch); steps=None measures all"
            raise RuntimeError(explain("a zf.profile that has measured no step", why, right))
        return mean_of(list(self.measured.values()))

    def __repr__(self) -> str:
        if not self.measured:
            return f"zf.profile: no step measured yet ({self.count} begun, {_planned(self.steps)} to be)"
        return "\n".join(lines_of(self.mean, list(self.measured)))

    def _repr_html_(self) -> str:
        return html_of(self.mean, list(self.measured)) if self.measured else f"<p>{self!r}</p>"


def profile(target: Optimizer | Callable[..., Any], steps: Iterable[int] | None = None, flops: bool = True) -> Profile:
    """Measure training steps: operations by module, bytes of states, bytes sent, and seconds of each phase.

    For an attached model write `with profile:` around a step. A step of `zf.make_step` is called through the profile:
    `state, metrics = profile(state, *batch)`. Print the profile for tables; in notebooks it shows as one.
    `profile.mean` has the numbers of an average step, `profile.measured[i]` those of step i. Each rank measures its own
    step; all ranks must make the same calls. The results of the step do not change. On a GPU the host waits for the
    device at each end of a measured range.

    Args:
        target: an attached model's `opt`, or a step: any function that calls zerofn.
        steps: the numbers of the steps to measure, counted from 0; by default all. Other steps run as without a
            profile.
        flops: whether to count floating-point operations, by the formulas of `torch.utils.flop_counter`: matrix
            products, convolutions and attention; a multiplication and an addition count as two. Every operator then
            passes through Python, and compiled code runs uncompiled; with `flops=False` the seconds are those of a
            plain step.

    Fields of `Measured`:

    ===============  ================================================================================================
    `seconds`        by phase; they add up to the total. `"forward"`: calls of the model. `"loss"`: from the end of
                     forward to the first gradient at the model's output. `"backward"`, `"update"`. `"collectives"`:
                     waiting for other ranks. `"elsewhere"`: the rest.
    `flops`          by phase (`"forward"`, `"backward"`, `"update"`) and module, children included; `""` is the total.
                     Names begin with the class of the outermost module. For the update, by transform. Recomputation by
                     activation checkpointing counts as backward.
    `transforms`     seconds in each transform's update, without those of transforms inside of it.
    `read`           bytes of state that each transform's update reads; `"params"`: the parameters that an optimizer
                     reads.
    `written`        bytes of state and parameters that each transform's update writes. Like `read`, it counts only
                     leaves of this rank that have a gradient.
    `sent`           bytes that this rank sends, by collective, counted as for a ring.
    `calls`          number of collectives.
    `waited`         seconds that this rank waits for other ranks, by collective. On a GPU, waits in backward are not
                     counted.
    ===============  ================================================================================================

    A number that was not measured, such as the seconds of a backward that did not run, is not there.

    Raises:
        TypeError: `target` is neither an attached optimizer nor a function.
        ValueError: `opt` is detached; `flops` is not a bool; `steps` is empty, or has something other than ints from 0.
        RuntimeError: on entering, inside of another profile or of `torch.compile`.

    Examples:
        >>> import torch, zerofn as zf
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> opt = zf.attach(model, zf.adamw(1e-3))
        >>> with zf.profile(opt) as profile:
        ...     model(torch.ones(2, 8)).sum().backward()
        ...     opt.step()
        >>> profile.mean.flops["forward"], profile.mean.flops["backward"][""]  # 2 * 2 * 8 * 4; by the weight alone
        ({'': 128, 'Linear': 128}, 128)
        >>> profile.mean.read["params"], profile.mean.written["params"]
        (128, 128)
    """
    if not isinstance(target, Optimizer) and (not callable(target) or isinstance(target, torch.nn.Module)):
        right = "zf.profile(opt) of opt = zf.attach(model, tx), or zf.profile(step) of step = zf.make_step(loss_fn, tx)"
        raise TypeError(explain(f"zf.profile({kind_of(target)})", "it is not a training step", right))
    if isinstance(target, Optimizer) and not target.attached:
        right = "opt = zf.attach(model, tx); zf.profile(opt)"
        raise ValueError(explain("zf.profile(opt) after opt.detach()", "a detached optimizer makes no steps", right))
    check_flag("zf.profile", "flops", flops)
    return Profile(target, _step_numbers(steps), flops)


def _step_numbers(steps: Any) -> frozenset[int] | None:
    if steps is None:
        return None
    found = list(steps) if isinstance(steps, Iterable) else []
    numbers = [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if not numbers or len(numbers) < len(found):
        why = "steps is a list of ints from 0, with at least one"
        raise ValueError(explain(f"zf.profile(steps={steps!r})", why, "zf.profile(opt, steps=[10, 20])"))
    return frozenset(numbers)


def _planned(steps: frozenset[int] | None) -> str:
    return "all are" if steps is None else f"{sorted(steps)} {'is' if len(steps) == 1 else 'are'}"
