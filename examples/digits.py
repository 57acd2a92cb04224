"""1797 handwritten digits in a CSV file that comes with scikit-learn: 64 pixels and a label in a row."""

from __future__ import annotations

import csv
import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor


def where() -> Path:
    # Found without an import, which takes seconds.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def read_digits(path: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images with pixels between 0 and 1, and labels."""
    path = path or where()
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        rows = torch.tensor([[float(x) for x in row] for row in csv.reader(file)])
    return rows[:, :-1] / 16, rows[:, -1].long()
