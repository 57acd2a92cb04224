"""A training function as it is under `torchrun`, run by Ray Train's `TorchTrainer`: reported metrics, resumable saves.

    python examples/ray_train.py --out ray-run          # pip install '.[ray]'; two workers on this machine
    python examples/ray_train.py --out ray-run --steps 60    # goes on from the last save
    torchrun --nproc-per-node 2 examples/ray_train.py --out plain-run    # the same function, without Ray

Ray Train starts the workers and the process group; zerofn makes its own on top of it. Every rank saves, into one
directory that all see, from which any of these commands goes on. The metrics are those of `opt.metrics`; Ray Train
keeps them with a copy of the save, which is its `Checkpoint`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from vlm_ray import start_ray

import zerofn as zf


def batch(step: int, rank: int, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a step, of each rank its own."""
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.sin().sum(1, keepdim=True)


def train(config: dict[str, Any], report: Any = None) -> dict[str, float]:
    """Train to `config["steps"]`, from the newest save in `config["out"]` if there is one.

    Args:
        config: `steps`, `out`, `save_every`.
        report: called with metrics and the directory of the save after each, on every rank.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(3e-3)))
    saves = zf.Checkpoints(Path(config["out"]).absolute(), last=2)
    rank = int(os.environ.get("RANK", "0"))
    saves.load(like=opt)
    metrics: dict[str, float] = {}
    for step in range(int(opt.state.step), config["steps"]):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % config["save_every"] == 0 or step + 1 == config["steps"]:
            saves.save(opt)
            metrics = {"loss": float(loss.detach()), **zf.floats(opt.metrics)}
            if report is not None:
                report(metrics, saves.at(step + 1))
    return metrics


def in_ray(config: dict[str, Any]) -> None:
    """The same in a worker of Ray Train, which only has to be told where metrics and saves go."""
    from ray.train import Checkpoint, get_context, report

    def tell(metrics: dict[str, float], save: Path) -> None:
        # Metrics that come without a checkpoint are in no result. One worker's, since all write into one directory.
        first = get_context().get_world_rank() == 0
        report(metrics, checkpoint=Checkpoint.from_directory(save) if first else None)

    train(config, tell)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("ray-run"))
    o = parser.parse_args(argv)
    config = {"steps": o.steps, "save_every": o.save_every, "out": str(o.out.absolute())}
    if "RANK" in os.environ:
        return train(config)
    return with_ray(config, o.workers)


def with_ray(config: dict[str, Any], workers: int) -> dict[str, float]:
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray = start_ray({}, num_cpus=workers + 1)
    try:
        trainer = TorchTrainer(
            in_ray,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
            run_config=RunConfig(
                storage_path=f"{config['out']}/ray", checkpoint_config=CheckpointConfig(num_to_keep=2)
            ),
        )
        result = trainer.fit()
        if result.checkpoint is None:
            # Nothing was left to do.
            return {}
        print(f"kept by Ray Train: {result.checkpoint.path}")
        return result.metrics
    finally:
        ray.shutdown()


if __name__ == "__main__":
    print({key: round(value, 4) for key, value in sorted(main().items())})
