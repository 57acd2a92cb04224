"""The loss with wires of 8 bits: the byte-level GPT of `train_lm.py` under ZeRO-3 on two ranks, paired by seed.

python examples/benchmarks/narrow_wires.py --seeds 0 1 2 3

Configurations of one seed start from the same weights and see the same bytes in the same order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss
from lm_report import write_atomically
from update_kernel import machine

import zerofn as zf

RANKS = 2
WIDE = "fp32 wires"
WIRES: dict[str, Callable[[], zf.Transform]] = {
    WIDE: zf.shard,
    "int8 gradients": lambda: zf.shard(reduce_wire="int8"),
    "fp8 parameters": lambda: zf.shard(wire="fp8"),
    "fp8 parameters, int8 gradients": lambda: zf.shard(wire="fp8", reduce_wire="int8"),
    "int8 parameters, int8 gradients": lambda: zf.shard(wire="int8", reduce_wire="int8"),
}


def train(name: str, seed: int, o: argparse.Namespace) -> dict[str, Any]:
    """On each rank, on its half of each batch: the mean loss of each step, its time, and the bytes that it sends."""
    rank, text = torch.distributed.get_rank(), Text.split(read_text(None), o.seq)
    torch.manual_seed(seed)
    model = GPT(o.d_model, o.layers, o.heads, o.seq)
    rate = zf.schedules.warmup_cosine(o.lr, max(1, o.steps // 10), max(2, o.steps))
    tx = zf.chain(WIRES[name](), zf.clip_by_global_norm(1.0), zf.adamw(rate, (0.9, 0.99), weight_decay=0.1))
    opt = zf.attach(model, tx)
    before, losses, begin = sent(), [], time.perf_counter()
    for i in range(o.steps):
        x, y = (part.chunk(RANKS)[rank] for part in text.batch(seed, i, o.batch, o.seq))
        loss = next_byte_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    took, bytes_sent = time.perf_counter() - begin, sent() - before
    torch.distributed.all_reduce(mean)
    opt.detach()
    return {
        "loss": (mean / RANKS).tolist(),
        "step_ms": took / o.steps * 1e3,
        "bytes": bytes_sent / o.steps,
    }


def sent() -> int:
    return sum(group.traffic.bytes for group in zf.collectives.opened())


def table(runs: dict[str, dict[str, Any]], last: int) -> str:
    """Losses minus those of fp32 wires of the same seed, with standard errors; bytes and time of a step."""
    lines = [f"| wires | seeds | final (last {last}) | mean | bytes in a step | ms |", "|---|---|---|---|---|---|"]
    for name, by_seed in runs.items():
        seeds = [s for s in by_seed if s in runs[WIDE]]
        cells = []
        for over in (slice(-last, None), slice(None)):
            mine, wide = ([statistics.fmean(runs[n][s]["loss"][over]) for s in seeds] for n in (name, WIDE))
            gaps = mine if name == WIDE else [a - b for a, b in zip(mine, wide, strict=True)]
            deviation = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
            form = ".4f" if name == WIDE else "+.4f"
            cells.append(f"{statistics.fmean(gaps):{form}} ± {deviation:.4f} ({deviation / len(gaps) ** 0.5:.4f})")
        sizes, ms = (statistics.fmean(by_seed[s][key] for s in seeds) for key in ("bytes", "step_ms"))
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} | {sizes:,.0f} | {ms:.0f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000, help="optimizer steps (1000)")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and data (0 1 2)")
    p.add_argument("--d-model", type=int, default=96, help="width (96; with 2 layers, 279 k parameters)")
    p.add_argument("--layers", type=int, default=2, help="depth (2)")
    p.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    p.add_argument("--batch", type=int, default=8, help="sequences in a step, over both ranks (8)")
    p.add_argument("--seq", type=int, default=64, help="bytes in a sequence (64)")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (0.002)")
    p.add_argument("--only", nargs="+", choices=list(WIRES), default=list(WIRES), metavar="WIRES")
    p.add_argument("--out", type=Path, default=Path("runs/narrow_wires"), help="folder of loss.json")
    o = p.parse_args(argv)
    file = o.out / "loss.json"
    runs: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for seed in o.seeds:
        for name in o.only:
            if str(seed) not in runs.setdefault(name, {}):
                runs[name][str(seed)] = zf.launch(train, RANKS, name, seed, o)[0]
                write_atomically(file, lambda f: f.write(json.dumps(runs).encode()))
                print(f"seed {seed}, {name}: {runs[name][str(seed)]['step_ms']:.0f} ms a step", flush=True)
    print("\n" + table(runs, min(50, o.steps)) + "\n\n" + machine())


if __name__ == "__main__":
    main()
