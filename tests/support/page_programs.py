"""Programs of the documentation's pages, for tests that take them further."""

import re
from pathlib import Path

import torch

import zerofn as zf
from zerofn.extend import Transform, transform

PAGES = Path(__file__).parents[2] / "docs"


def of_page(name, page="extend/wire.md"):
    """What a page's first block that mentions `name` defines under that name."""
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    names = {"torch": torch, "zf": zf, "transform": transform, "Transform": Transform, "__name__": __name__}
    exec(next(block for block in blocks if name in block), names)
    return names[name]
