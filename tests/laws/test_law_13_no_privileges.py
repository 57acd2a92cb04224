"""Law 13: a transform made outside of the package from `zerofn.extend` alone behaves as the built-in, bit for bit.

All files of `zerofn/transforms` are copied to a package of their own, under other names of modules, factories, classes
and transforms. Pipelines of the copies and of the originals are run side by side in every stage and route.
"""

import re
import sys
from pathlib import Path

import optree
import pytest
import torch
from pairs import grid
from routes import mean_square, micro_steps
from stages import STAGES, around
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn import extend

BUILT_IN = Path(zf.__file__).parent / "transforms"
NAMES = (
    *("shard", "reduce_scatter", "all_reduce", "precision", "scale_loss", "accumulate", "clip_by_global_norm"),
    *("clip_by_value", "sgd", "adam", "adamw", "low_precision_adam", "offload", "ema"),
)
MIDDLE = {
    "fp32": lambda z: ([], [z.clip_by_global_norm(0.5), z.adamw(1e-2)]),
    "fp16": lambda z: ([z.precision(param_dtype=torch.float16), z.scale_loss(init_scale=256.0)], [z.sgd(0.1, 0.9)]),
    "bf16": lambda z: (
        [z.precision(store_dtype=torch.bfloat16, grad_dtype=torch.float32)],
        [z.clip_by_value(0.1), z.low_precision_adam(1e-2, rounding="stochastic"), z.ema(0.9)],
    ),
    "on the host": lambda z: ([], [z.offload(z.adam(1e-2))]),
}


def copy_to(directory):
    """The copies, as a package called `copies` in a directory."""
    package = directory / "copies"
    package.mkdir()
    words = re.compile(r"\b(" + "|".join(NAMES) + r")\b")
    for path in BUILT_IN.glob("*.py"):
        text = path.read_text().replace("from ..", "from zerofn.")
        (package / (words.sub(r"my_\1", path.stem) + ".py")).write_text(words.sub(r"my_\1", text))
    lines = []
    for path in package.glob("*.py"):
        found = re.findall(r"^def (my_\w+)\(", path.read_text(), re.M)
        lines += [f"from .{path.stem} import {name} as {name.removeprefix('my_')}" for name in found]
    (package / "__init__.py").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("outside")
    copy_to(directory)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))
    for name in [m for m in sys.modules if m.split(".")[0] == "copies"]:
        del sys.modules[name]


def train(z, stage, middle, route, rank):
    """All tensors of the state after four micro-steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    head, tail = MIDDLE[middle](z)
    tx = zf.chain(*around(stage, *head, z.accumulate(2), of=z), *tail)
    batches = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(rank))
    if route == "pure":
        batches = batches.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(middle, torch.float32))
    *_, (state, _) = micro_steps(route, model, tx, batches, mean_square)
    # By their places: the copies have other names.
    return [x.clone() for x in optree.tree_leaves([*state.transforms.values(), state.leaves])]


# Every stage, middle and route with each of the others, two at a time.
CELLS = grid(STAGES, MIDDLE, ("eager", "pure"))


def both(rank):
    import copies  # type: ignore[import-not-found]

    found = {}
    for cell in CELLS:
        built_in, outside = (train(z, *cell, rank) for z in (zf, copies))
        assert len(built_in) == len(outside) > 0
        moved = any(x.is_floating_point() and x.numel() and bool(x.any()) for x in outside)
        same = all(torch.equal(x, y) for x, y in zip(built_in, outside, strict=True))
        found[cell] = moved and same
    return found


def on_a_rank():
    import torch.distributed as dist

    return both(dist.get_rank())


def test_on_one_process(copies):
    assert all(both(0).values())


def test_on_two_ranks(copies):
    for found in zf.launch(on_a_rank, 2, timeout=limit(120)):
        assert found and not [k for k, same in found.items() if not same]


def test_the_page_of_names_has_a_line_for_each_name_of_extend():
    page = (Path(__file__).parents[2] / "docs" / "extend" / "names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M)
    assert sorted(name for name, _ in rows) == sorted(extend.__all__)
    # A plain sentence each.
    assert all(re.fullmatch(r"[A-Z`].*\.", line) for _, line in rows)
    assert [name for name in extend.__all__ if not hasattr(extend, name)] == []
