"""The matrix of dtypes as one table: what may be combined, what is refused and why, and which cells are run.

`docs/precision.md` has a section made from it: `python tests/support/precision_matrix.py --write docs/precision.md`.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from channels import Channels
from stages import around
from torch import Tensor, nn

import zerofn as zf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPLIT = "bf16+8"  # bf16 parameters, and residuals of 8 bits: the optimizer updates masters in fp32
IN_STATE = {**DTYPES, SPLIT: torch.bfloat16}
# Moments as codes, with a scale of 4 bytes for each block of 128.
CODES = {"8 bits": 8, "4 bits": 4}
BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {k: n / 8 + 4 / 128 for k, n in CODES.items()}
BYTES[SPLIT] = 3
# Half the distance between neighbours, relative to the larger. A code is off by 2**-6 of the largest number at most,
# and is read in the second of two steps alone, where half of the moment comes from it.
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "8 bits": 2.0**-8, SPLIT: 2.0**-16}


class Cell(NamedTuple):
    """One combination; each field takes the values of `AXES`."""

    stored: str
    gradients: str
    moments: str
    compute: str
    reduce: str
    autocast: str
    scale: str
    zero: str
    offload: str
    rounding: str

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self._asdict().items())


AXES: dict[str, tuple[str, ...]] = {
    "stored": ("fp32", SPLIT, "bf16", "fp16"),
    "gradients": ("fp32", "bf16", "fp16"),
    "moments": ("fp32", "bf16", "fp16", "8 bits"),
    "compute": ("fp32", "bf16", "fp16"),
    "reduce": ("fp32", "bf16", "fp16"),
    "autocast": ("off", "bf16"),
    "scale": ("none", "dynamic"),
    "zero": ("0", "1", "2", "3"),
    "offload": ("none", "optimizer", "accumulate", "both"),
    "rounding": ("nearest", "stochastic", "kahan"),
}

AXES_IN_WORDS = {
    "stored": "dtype of the stored parameters",
    "gradients": "dtype of gradients",
    "moments": "dtype of the moments of `low_precision_adam`",
    "compute": "dtype in which the model computes",
    "reduce": "dtype of sums over ranks",
    "autocast": "`torch.autocast`",
    "scale": "loss scale",
    "zero": "ZeRO stage",
    "offload": "what `offload` keeps in CPU memory",
    "rounding": "rounding of `low_precision_adam`",
}

# (which cells, the words of the error, why). The error is raised before anything trains.
REFUSED = (
    (
        "fp16 moments",
        lambda c: c.moments == "fp16",
        r"low_precision_adam\(state_dtype=torch.float16\)(.|\n)*6e-8",
        "squared gradients fall below fp16's smallest number",
    ),
    (
        "`kahan` with fp32 or bf16+8 parameters",
        lambda c: c.stored in ("fp32", SPLIT) and c.rounding == "kahan",
        r"low_precision_adam\(rounding='kahan', .*nothing to round(.|\n)*: stored in torch.float32",
        "updates are in fp32: nothing is rounded to 16 bits",
    ),
    (
        "`stochastic` with fp32 moments, and fp32 or bf16+8 parameters",
        lambda c: c.stored in ("fp32", SPLIT) and c.moments == "fp32" and c.rounding == "stochastic",
        r"low_precision_adam\(rounding='stochastic', .*nothing to round(.|\n)*: stored in torch.float32",
        "nothing is rounded to 16 bits",
    ),
    (
        "`stochastic` with 8-bit moments, and fp32 or bf16+8 parameters",
        lambda c: c.stored in ("fp32", SPLIT) and c.moments in CODES and c.rounding == "stochastic",
        r"low_precision_adam\(rounding='stochastic', .*nothing to round(.|\n)*: stored in torch.float32",
        "nothing is rounded to 16 bits",
    ),
)


def refusal(cell: Cell) -> tuple[str, str] | None:
    """The words of the error and the reason, if the cell is refused."""
    return next(((words, why) for _, refuses, words, why in REFUSED if refuses(cell)), None)


def every_cell() -> Iterable[Cell]:
    return (Cell(*values) for values in itertools.product(*AXES.values()))


def covering(strength: int) -> list[Cell]:
    """Cells that run, such that any values of any `strength` axes that run together do so in one of them.

    Greedy: each new cell starts from a combination that is missing and takes, axis by axis, the value that
    brings the most of the others. Deterministic, and about as many cells as the best known arrays have.
    """
    axes = list(AXES)
    values = [[v for v in AXES[a] if v != "fp16" or a != "moments"] for a in axes]
    groups = list(itertools.combinations(range(len(axes)), strength))
    missing = {(g, combo) for g in groups for combo in itertools.product(*(values[i] for i in g)) if _runs(g, combo)}
    cells = []
    while missing:
        group, combo = min(missing)
        row: list[str | None] = [None] * len(axes)
        for i, v in zip(group, combo, strict=True):
            row[i] = v
        for i in range(len(axes)):
            if row[i] is None:
                options = [v for v in values[i] if _runs(*_given([*row[:i], v, *row[i + 1 :]]))]
                row[i] = max(options, key=lambda v, i=i: _brings([*row[:i], v, *row[i + 1 :]], i, groups, missing))
        cell = Cell(*row)  # type: ignore[arg-type]
        missing -= {(g, tuple(cell[i] for i in g)) for g in groups}
        cells.append(cell)
    return cells


def _given(row: list[str | None]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    known = [(i, v) for i, v in enumerate(row) if v is not None]
    return tuple(i for i, _ in known), tuple(v for _, v in known)


def _runs(group: tuple[int, ...], combo: tuple[str, ...]) -> bool:
    """Whether some cell with these values is not refused. Only three axes decide about that."""
    row = dict(zip((list(AXES)[i] for i in group), combo, strict=True))
    free = {"stored": "bf16", "moments": "bf16", "rounding": "nearest"}
    rest = {a: v[0] for a, v in AXES.items()}
    return refusal(Cell(**{**rest, **free, **row})) is None


def _brings(row: list[str | None], at: int, groups: list, missing: set) -> int:
    found = 0
    for g in groups:
        if at in g:
            combo = tuple(row[i] for i in g)
            found += None not in combo and (g, combo) in missing
    return found


# ---------------------------------------------------------------- what a cell trains

LR, BETAS, EPS, DECAY = 0.05, (0.9, 0.99), 0.05, 0.1
STEPS, MICRO, RANKS = 2, 2, 2


class EveryKindOfLeaf(nn.Module):
    """Every kind of leaf: odd sizes that two ranks cannot halve, one element, none at all, no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])
        self.gain = nn.Parameter(torch.empty(()))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            # Of one magnitude and away from zero, so that one bound on roundings holds for all elements.
            for p in self.parameters():
                sign = torch.randint(2, p.shape, generator=generator) * 2 - 1
                p.copy_((0.5 + 0.5 * torch.rand(p.shape, generator=generator)) * sign)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x))) * self.gain


def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.to(y.dtype) - y).square().mean()


def pipeline(cell: Cell) -> zf.Transform:
    dtypes = zf.precision(
        store_dtype=SPLIT if cell.stored == SPLIT else DTYPES[cell.stored],
        grad_dtype=DTYPES[cell.gradients],
        param_dtype=DTYPES[cell.compute],
        reduce_dtype=DTYPES[cell.reduce],
    )
    scale = [] if cell.scale == "none" else [zf.scale_loss("dynamic", init_scale=64.0)]
    accumulate = zf.accumulate(MICRO)
    adam = optimizer(cell.moments, cell.rounding, LR, BETAS, EPS, DECAY)
    if cell.offload in ("accumulate", "both"):
        accumulate = zf.offload(accumulate)
    if cell.offload in ("optimizer", "both"):
        adam = zf.offload(adam)
    return zf.chain(*around(int(cell.zero), dtypes, *scale, accumulate), adam)


def optimizer(moments: str, rounding: str, *given: Any) -> zf.Transform:
    """The optimizer, with its moments as codes where these say so."""
    adam = zf.low_precision_adam(*given, state_dtype=DTYPES.get(moments, torch.float32), rounding=rounding)
    return zf.quantize(adam, CODES[moments], slots=("exp_avg", "exp_avg_sq")) if moments in CODES else adam


def reference(stored: str) -> dict[str, Tensor]:
    """The change of each parameter in float64: plain autograd on the whole batch, Adam from its definition."""
    model = EveryKindOfLeaf().to(IN_STATE[stored]).double()
    params = dict(model.named_parameters())
    start = {k: p.detach().clone() for k, p in params.items()}
    m = {k: torch.zeros_like(p) for k, p in start.items()}
    v = {k: torch.zeros_like(p) for k, p in start.items()}
    for t in range(1, STEPS + 1):
        parts = [batch(t, i) for i in range(MICRO)]
        loss = sum(loss_of(model(x.double()), y.double()) for x, y in parts) / MICRO
        grads = torch.autograd.grad(loss, list(params.values()))
        for (k, p), g in zip(params.items(), grads, strict=True):
            m[k] = BETAS[0] * m[k] + (1 - BETAS[0]) * g
            v[k] = BETAS[1] * v[k] + (1 - BETAS[1]) * g * g
            m_hat, v_hat = m[k] / (1 - BETAS[0] ** t), v[k] / (1 - BETAS[1] ** t)
            p.data = p.data - LR * (m_hat / (v_hat.sqrt() + EPS) + DECAY * p.data)
    return {k: p.detach() - start[k] for k, p in params.items()}


def bound(cell: Cell) -> float:
    """What each element of the change may be off by; the largest changes of each leaf are 0.08 to 0.11.

    Roundings of a stored parameter, which is below 2 and mostly below 1: half its spacing to nearest in each
    step, all of it at random; under `kahan` only what the last one left. And what comes through the
    gradient: the slope of Adam's update in it is at most 1 / EPS, a gradient here is below 1, and it was
    rounded on the way to the coarsest of the grids it met.
    """
    often = {"nearest": 1 * STEPS, "stochastic": 2 * STEPS, "kahan": 1}[cell.rounding]
    # The model sees masters rounded to bf16: so does who measures the change, and each of two gradients.
    seen = UNIT["bf16"] if cell.stored == SPLIT else 0.0
    grids = [cell.gradients, cell.compute, cell.reduce, cell.moments]
    grids += ["bf16"] * (cell.autocast == "bf16" or cell.stored == SPLIT)
    return seen + often * UNIT[cell.stored] + STEPS * LR / EPS * max(UNIT[g] for g in grids)


def run_cells(cells: list[Cell]) -> list[dict[str, dict[str, Tensor]]]:
    """On each rank, for each cell: changes of full parameters, and facts about what is kept."""
    import torch.distributed as dist

    rank, channels, found = dist.get_rank(), Channels(), []
    for cell in cells:
        channels.next = 0
        found.append(_run_cell(cell, rank))
    return found


def _run_cell(cell: Cell, rank: int) -> dict:
    model = EveryKindOfLeaf()
    try:
        opt = zf.attach(model, pipeline(cell))
        with opt.gathered():
            start = {k: p.detach().to(torch.float64, copy=True) for k, p in model.named_parameters()}
        alive, losses = set(), []
        for t in range(1, STEPS + 1):
            for i in range(MICRO):
                x, y = (part[rank::RANKS] for part in batch(t, i))
                with torch.autocast("cpu", torch.bfloat16, enabled=cell.autocast == "bf16"):
                    out = model(x)
                loss = loss_of(out, y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(float(loss.detach()))
        for k, entry in opt.state.transforms["low_precision_adam"]["exp_avg"].items():
            x = kept(entry)[-1]
            if x.numel() and bool((x != 0).any()):
                alive.add(k)
        with opt.gathered():
            end = {k: p.detach().double() for k, p in model.named_parameters()}
        slots = opt.state.transforms["low_precision_adam"]
        sums = opt.state.transforms["accumulate"]["sum"]
        return {
            "change": {k: end[k] - start[k] for k in end},
            "alive": alive,
            "updates": int(opt.state.step),
            "skipped": opt.skipped_steps,
            "dtypes": {
                "stored": {x.dtype for x in opt.state.leaves.values()},
                "moments": {
                    x.dtype for slot in ("exp_avg", "exp_avg_sq") for entry in slots[slot].values() for x in kept(entry)
                },
                "gradients": {x.dtype for x in sums.values()},
            },
        }
    except Exception as error:  # told by the name of its cell
        raise RuntimeError(f"cell {cell}") from error


def kept(entry: Tensor | dict[str, Tensor]) -> list[Tensor]:
    """What is kept of a leaf's moment: itself, or codes and scales."""
    return list(entry.values()) if isinstance(entry, dict) else [entry]


# ---------------------------------------------------------------- the section of docs/precision.md


def state_bytes(stored: str, gradients: str, moments: str, rounding: str) -> float:
    """Bytes per parameter of parameters, gradients, two moments and a compensation; codes of rows that fill blocks."""
    carried = BYTES[stored] if rounding == "kahan" else 0
    return BYTES[stored] + BYTES[gradients] + 2 * BYTES[moments] + carried


def markdown() -> str:
    """The section: axes, refused cells, bytes."""
    two, three, total = covering(2), covering(3), sum(1 for _ in every_cell())
    refused = sum(refusal(c) is not None for c in every_cell())
    lines = [
        "| what you choose | values |",
        "|---|---|",
        *(f"| {AXES_IN_WORDS[axis]} | {', '.join(values)} |" for axis, values in AXES.items()),
        "",
        "## What is refused",
        "",
        f"One value for each of the {len(AXES)} choices makes a combination. zerofn refuses {refused:,} of the "
        f"{total:,} combinations with an error, before the first step:",
        "",
        "| refused combination | because |",
        "|---|---|",
        *(f"| {which} | {why} |" for which, _, _, why in REFUSED),
        "",
        f"The other {total - refused:,} combinations run. A test trains a small model on {RANKS} ranks with one "
        "combination after another, and compares the change of every parameter with a float64 reference. How many "
        "combinations the test tries depends on the command:",
        "",
        "| command | combinations that the test tries |",
        "|---|---|",
        f"| `pytest` | {len(two)} |",
        f"| `pytest -m slow` | {len(three)} |",
        "| `ZEROFN_MATRIX=all python -m pytest tests/transforms/test_precision_matrix.py` | all |",
        "",
        "If zerofn allows two values of two different choices together, one of the "
        f"{len(two)} combinations of `pytest` has both values. If zerofn allows three values of three different "
        f"choices together, one of the {len(three)} combinations of `pytest -m slow` has all three values.",
        "",
        "On 2 cores the command with `ZEROFN_MATRIX=all` tries about 1,500 combinations in a minute.",
        "",
        "## Bytes per parameter",
        "",
        "The table shows bytes per parameter: the sum of the parameter, its gradient, its two moments, the rounding "
        "error that `kahan` keeps and the residual that `bf16+8` keeps. A row is named by the dtype of the stored "
        "parameters and the dtype of gradients. A column is named by the dtype of the moments. The column `kahan` "
        'has moments in bf16 and `rounding="kahan"`. "In backward" means `zf.attach(..., in_backward=True)`, which '
        "frees each gradient during backward. Under ZeRO divide the bytes of each sharded tensor by the number of "
        "ranks.",
        "",
        "| stored, gradients | fp32 | bf16 | `kahan` | bf16, in backward | 8 bits | 8, in backward | 4 bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stored, gradients in itertools.product(AXES["stored"], AXES["gradients"]):
        row = [state_bytes(stored, gradients, m, "nearest") for m in ("fp32", "bf16")]
        kahan = "refused" if stored in ("fp32", SPLIT) else str(state_bytes(stored, gradients, "bf16", "kahan"))
        eight, four = (state_bytes(stored, gradients, m, "nearest") for m in CODES)
        less = BYTES[gradients]
        cells = [*row, kahan, row[1] - less, f"{eight:.2f}", f"{eight - less:.2f}", f"{four:.2f}"]
        lines.append(f"| {stored}, {gradients} | {' | '.join(map(str, cells))} |")
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 100) for line in lines)


OPEN, CLOSE = "<!-- matrix -->", "<!-- /matrix -->"


def section(text: str) -> str | None:
    """What stands between the markers of a page."""
    if OPEN not in text or CLOSE not in text:
        return None
    return text.split(OPEN)[1].split(CLOSE)[0].strip()


def write(page: Path) -> None:
    text = page.read_text()
    before, rest = text.split(OPEN)
    page.write_text(f"{before}{OPEN}\n{markdown()}\n{CLOSE}{rest.split(CLOSE)[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]))
    else:
        print(markdown())
