"""What a run shows and leaves behind: progress, a loss curve, a JSON record."""

from __future__ import annotations

import json
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zerofn as zf


@dataclass
class History:
    """What was measured, one entry for each step.

    Attributes:
        loss: training loss.
        seconds: time of the step.
        validation: pairs of step and loss on the held-out text.
    """

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def until(self, step: int) -> History:
        """The part before `step`: what belongs to a checkpoint made there."""
        return History(self.loss[:step], self.seconds[:step], [v for v in self.validation if v[0] <= step])

    def summary(self) -> dict[str, Any]:
        """The numbers that two runs are compared by."""
        return {
            "final_loss": statistics.fmean(self.loss[-50:]) if self.loss else None,
            "mean_loss": statistics.fmean(self.loss) if self.loss else None,
            "validation_loss": self.validation[-1][1] if self.validation else None,
            "step_seconds": statistics.median(self.seconds) if self.seconds else None,
        }


class Progress:
    """A live bar where there is a terminal and tqdm, else a line now and then; silent on all ranks but 0."""

    def __init__(self, label: str, steps: int, start: int, tokens: int, silent: bool):
        self.label, self.steps, self.tokens, self.silent = label, steps, tokens, silent
        self.bar = None if silent or not sys.stderr.isatty() else _bar(label, steps, start)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, history: History, bytes_per_parameter: float) -> None:
        step = len(history.loss)
        numbers = f"{self._numbers(history)}, {bytes_per_parameter:.2f} bytes/parameter"
        if self.bar is not None:
            self.bar.set_postfix_str(numbers, refresh=False)
            self.bar.update(1)
        elif not self.silent and (step % max(1, self.steps // 20) == 0 or step == self.steps):
            print(f"{self.label}: step {step}/{self.steps}, {numbers}", flush=True)

    def _numbers(self, history: History) -> str:
        recent = history.seconds[-20:]
        speed = f"{len(recent) * self.tokens / sum(recent):,.0f} tokens/s"
        held_out = [f"validation {history.validation[-1][1]:.3f}"] if history.validation else []
        return ", ".join([f"loss {history.loss[-1]:.3f}", *held_out, speed])


def _bar(label: str, steps: int, start: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, initial=start, desc=label, unit="step", dynamic_ncols=True)


def named_tensors(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a state, or in nested dicts, by its path."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if isinstance(tree, zf.State):
        counters = {"step": tree.step, "micro_step": tree.micro_step}
        tree = {"params": tree.leaves, "transforms": tree.transforms, "counters": counters}
    return {k: x for name, sub in tree.items() for k, x in named_tensors(sub, f"{prefix}/{name}").items()}


def bytes_per_parameter(state: Any, parameters: int) -> float:
    """Bytes of all tensors of a state (of this rank) over the number of parameters of the model."""
    return sum(x.numel() * x.element_size() for x in named_tensors(state).values()) / parameters


def write_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as f:
        write(f)
    os.replace(beside, path)


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, lambda f: f.write(json.dumps(record, indent=1).encode()))


def read_record(path: Path) -> tuple[dict[str, Any], History]:
    """A run's settings and what it has measured."""
    record = json.loads(path.read_text())
    return record["settings"], History(**record["history"])


def record_of(options: Namespace, history: History) -> dict[str, Any]:
    """What a run was, where it ran and what it measured."""
    versions = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
    }
    settings = {k: v if isinstance(v, int | float | None) else str(v) for k, v in vars(options).items() if k != "parts"}
    return {"settings": settings, "versions": versions, **history.summary(), "history": asdict(history)}


def draw_curve(path: Path, curves: dict[str, History]) -> bool:
    """Losses over steps as PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no loss curve: it needs matplotlib. pip install "zerofn[examples]"')
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (label, history) in enumerate(curves.items()):
        steps = range(1, len(history.loss) + 1)
        axes.plot(steps, history.loss, color=f"C{i}", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(history.loss), color=f"C{i}", label=f"{label}: training, mean of 20 steps")
        if history.validation:
            axes.plot(*zip(*history.validation, strict=True), "o--", color=f"C{i}", label=f"{label}: validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT")
    axes.legend()
    axes.grid(alpha=0.3)
    write_atomically(path, lambda f: figure.savefig(f, format="png", dpi=120))
    return True


def _smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - 19) : i + 1]) for i in range(len(values))]


def comparison(columns: dict[str, dict[str, Any]]) -> str:
    """Summaries side by side."""
    rows = [
        ("final loss (mean of last 50)", "final_loss", "{:.4f}"),
        ("mean loss", "mean_loss", "{:.4f}"),
        ("validation loss", "validation_loss", "{:.4f}"),
        ("state bytes per parameter", "bytes_per_parameter", "{:.2f}"),
        ("step time (median, ms)", "step_seconds", "{:.1f}"),
    ]
    lines = [" " * 30 + "".join(f"{name:>22}" for name in columns)]
    for label, key, form in rows:
        factor = 1000 if key == "step_seconds" else 1
        lines.append(f"{label:30}" + "".join(f"{form.format(c[key] * factor):>22}" for c in columns.values()))
    return "\n".join(lines)
