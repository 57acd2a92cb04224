"""`Measured`: the numbers of a measured step, and their tables as text and HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .._errors import explain
from ..core.html import bars
from ..storage.formatting import align_columns, format_bytes

PHASES = ("forward", "loss", "backward", "update", "collectives", "elsewhere")
MAX_MODULES = 24  # lines of modules in a table


class Absent(KeyError):
    """The number was not measured."""

    def __str__(self) -> str:
        return self.args[0]  # a KeyError would show it quoted, on one line


class ByName(dict):
    """Numbers by name; a missing name raises `Absent`, which says why."""

    def __init__(self, numbers: Mapping[str, Any], what: str):
        super().__init__(numbers)
        self.what = what

    def __missing__(self, name: str) -> Any:
        if self.what == "flops" and not self:
            why, right = "operations were not counted: it was asked for with flops=False", "zf.profile(target)"
        else:
            why = f"nothing of this name ran in what was measured, but {', '.join(map(repr, self)) or 'nothing at all'}"
            right = "zf.profile around a step in which it runs; one that ran and took nothing has 0"
        raise Absent(explain(f"{self.what}[{name!r}]", why, right))

    def __reduce__(self) -> Any:
        return ByName, (dict(self), self.what)


@dataclass(frozen=True)
class Measured:
    """What was measured of a step, or the mean over steps; see `zf.profile`.

    Attributes:
        seconds: by phase.
        flops: by phase and module, `""` for all of them; empty where they were not counted.
        transforms: seconds by transform.
        read: bytes by transform.
        written: bytes by transform.
        sent: bytes by collective.
        calls: by collective.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name == "flops":
                given = {phase: ByName(counts, f"flops[{phase!r}]") for phase, counts in given.items()}
            object.__setattr__(self, field.name, ByName(given, field.name))


def mean_of(steps: Sequence[Measured]) -> Measured:
    """The mean over steps; what did not run in a step counts as zero in it."""
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
    """Head and rows of each table, and for each row the length of its bar."""
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
    """Operations by phase of each module; modules whose names differ in numbers only share a row."""
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
    """The tables as HTML: each row with the cells of the text, and a bar for its first number."""
    parts = []
    for head, rows, sizes in _tables(m):
        lines = [(row[0], " / ".join(c for c in row[1:] if c), x) for row, x in zip(rows, sizes, strict=True)]
        parts.append(bars(lines, f"{head[0]}: {' / '.join(head[1:])}"))
    return f"<p>{_title(numbers)}</p>{''.join(parts)}"


def _time(seconds: float | None) -> str:
    """Seconds in a unit of their size.

    >>> [_time(s) for s in (1.5, 0.0123, 4.5e-5, None)]
    ['1.50 s', '12.3 ms', '45 us', '']
    """
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _count(n: float) -> str:
    """Operations in a unit of their size.

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
