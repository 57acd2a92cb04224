"""Models that parts of a job train each: their states are saved, loaded and exported by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rank_programs as P
import torch
from safetensors.torch import load_file
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf

LR = 0.1


def params(part: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(part)
    return {"w": torch.randn(5, 3, generator=g), "b": torch.randn(3, generator=g)}


def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).square().mean()


def x_of(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def pipelines(mesh: Any) -> dict[str, zf.Transform]:
    """Over rows, over columns, and over two axes of three."""
    return {
        "rows": zf.chain(zf.local(mesh["a"]), zf.shard(mesh["part", "a", "b"]["b"]), zf.adamw(LR)),
        "columns": zf.chain(zf.local(mesh["b"]), zf.reduce_scatter(mesh["part", "a", "b"]["a"]), zf.adamw(LR)),
        "hybrid": zf.chain(zf.shard(mesh["b"]), zf.all_reduce(mesh["a"]), zf.adamw(LR)),
    }


def part_of(name: str, rank: int) -> int:
    """Which model a rank of a (1, 2, 2) mesh trains."""
    return {"rows": rank // 2, "columns": rank % 2, "hybrid": 0}[name]


def go(step: Any, state: Any, first: int) -> Any:
    for i in range(first, first + 2):
        state, _ = step(state, x_of(i))
    return state


def by_part(directory: str) -> dict[str, Any]:
    rank, _ = P.rank_and_size()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("part", "a", "b"))
    found: dict[str, Any] = {}
    for name, tx in pipelines(mesh).items():
        part = part_of(name, rank)
        where = Path(directory) / name / str(part)
        step = zf.make_step(loss, tx)
        state = go(step, zf.init(tx, params(part)), 0)
        said = ""
        if name != "hybrid":
            try:
                zf.save(Path(directory) / name / "one", state)
            except ValueError as error:
                said = str(error)
        zf.save(where, state)
        zf.export_safetensors(f"{where}.safetensors", state)
        again = zf.load(where, like=zf.init(tx, params(7)))
        ends = [zf.full_params(tx, go(step, s, 2)) for s in (state, again)]
        found[name] = part, said, zf.full_params(tx, state), *ends
    return found


def test_each_part_has_its_own(tmp_path: Path):
    ranks = zf.launch(by_part, 4, str(tmp_path), timeout=limit())
    for name in ("rows", "columns", "hybrid"):
        for found in ranks:
            part, said, saved, straight, resumed = found[name]
            if name != "hybrid":
                assert "each of these parts of the job has a state of its own" in said and "/one'" in said
                assert not (tmp_path / name / "one").exists()
            exported = load_file(tmp_path / name / f"{part}.safetensors")
            # One process reads what two ranks wrote, and goes on.
            tx = zf.adamw(LR)
            alone = zf.load(tmp_path / name / str(part), like=zf.init(tx, params(7)))
            end = zf.full_params(tx, go(zf.make_step(loss, tx), alone, 2))
            for leaf in ("w", "b"):
                assert torch.equal(resumed[leaf], straight[leaf]) and torch.equal(exported[leaf], saved[leaf])
                assert not torch.equal(saved[leaf], params(part)[leaf])
                # All ranks have the same data, so their mean is each one's, up to the order of sums.
                torch.testing.assert_close(end[leaf], straight[leaf])
    assert not torch.equal(ranks[0]["rows"][2]["w"], ranks[2]["rows"][2]["w"])
