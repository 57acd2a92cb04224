"""Peak memory of a rank while a GPT comes to life under `shard`: made on meta, or made whole and then attached.

    MALLOC_MMAP_THRESHOLD_=65536 python examples/benchmarks/sharded_start.py

Each number is of fresh processes: the most that the process ever had in memory, less what it had before the model was
built, the largest of the ranks. Beside it what is unavoidable: this rank's parts, and the largest leaf. The optimizer
is plain SGD, whose state is none. The variable lets glibc give freed memory back; without it the heap keeps holes
between parts that were allocated while whole leaves were alive.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import zerofn as zf

sys.path.insert(0, str(Path(__file__).parents[1]))
from lm_model import GPT
from sharded_ranks import memory, reset_peak

MIB = 2**20


def gpt(width: int, layers: int) -> GPT:
    return GPT(width, layers, width // 64, 128)


def init(path: str, x: torch.Tensor) -> None:
    if x.ndim == 2:
        torch.nn.init.normal_(x, std=0.02)
    else:
        x.fill_(1.0 if "norm" in path and path.endswith("weight") else 0.0)


def peak(how: str, width: int, layers: int) -> tuple[int, float]:
    """Bytes above those before the model, and a number of the parameters."""
    torch.set_num_threads(1)
    tx = zf.chain(zf.shard(), zf.sgd(0.1))
    # What the first use of ranks and generators takes is no part of it.
    zf.init(tx, {"w": torch.empty(4, device="meta")}, init=init)
    reset_peak()
    before = memory("VmRSS")
    if how == "attach":
        torch.manual_seed(0)
        opt = zf.attach(gpt(width, layers), tx)
    else:
        with torch.device("meta"):
            model = gpt(width, layers)
        opt = zf.materialize(model, tx, init if how == "init" else None)
    found = memory("VmHWM") - before
    return found, float(sum(x.double().square().sum() for x in opt.state.leaves.values()))


def main(argv: list[str] | None = None) -> dict[tuple[str, int], int]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    o = p.parse_args(argv)
    with torch.device("meta"):
        sizes = [x.numel() * 4 for x in gpt(o.width, o.layers).parameters()]
    print(f"{sum(sizes) / 4e6:.1f} M parameters, {sum(sizes) / MIB:.0f} MiB; largest leaf {max(sizes) / MIB:.1f} MiB")
    print(f"{'':24}" + "".join(f"{f'{n} ranks':>12}" for n in o.ranks))
    found: dict[tuple[str, int], int] = {}
    for how, name in (("init", "materialize, init"), ("reset", "materialize, resets"), ("attach", "attach")):
        for n in o.ranks:
            found[how, n] = max(bytes for bytes, _ in zf.launch(peak, n, how, o.width, o.layers))
        print(f"{name + ', MiB':24}" + "".join(f"{found[how, n] / MIB:12.1f}" for n in o.ranks))
    print(f"{'parts + a leaf, MiB':24}" + "".join(f"{(sum(sizes) / n + max(sizes)) / MIB:12.1f}" for n in o.ranks))
    return found


if __name__ == "__main__":
    main()
