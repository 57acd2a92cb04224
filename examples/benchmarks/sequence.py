"""Activation memory of a rank, and bytes that it sends, where ranks share each sequence.

    python examples/benchmarks/sequence.py                    # to 8192 bytes of context on 4 ranks: some minutes
    python examples/benchmarks/sequence.py --lengths 256 --ranks 1 2 --width 32 --layers 1

A byte-level GPT, forward and backward of one sequence, for each length and number of ranks. *Saved* are the bytes that
autograd keeps from forward for backward, parameters left out, of the rank with the most, each storage once. *Peak* is
what the process grows by until the end of backward, gradients of parameters among it. *Sent* are the bytes of
all-to-alls of the first rank, beside the formula: four of each layer forward and four backward, each of (N - 1) / N of
the rank's queries, (sequence / N) * width numbers.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

# For the ranks, which are processes of their own: what is freed goes back to the system at once. What malloc keeps for
# later would be in the peak, a third of it on 4 ranks and an eighth on one.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 16))

import torch
from sharded_ranks import memory, reset_peak
from torch import Tensor, nn
from update_kernel import machine

sys.path.insert(0, str(Path(__file__).parent.parent))

from lm_model import GPT
from lm_sequence import Parts

import zerofn as zf


class Saved:
    """What autograd keeps for backward: each storage once, without those of parameters."""

    def __init__(self, model: nn.Module):
        self.sizes: dict[int, int] = {}
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def step(model: nn.Module, parts: Parts, length: int) -> int:
    """Forward and backward of one sequence, of which this rank has a part. What autograd has kept."""
    whole = torch.arange(length + 1)[None] * 7919 % 256
    x, y = parts.cut(whole[:, :-1]), parts.cut(whole[:, 1:])
    saved = Saved(model)
    with parts.of(model):
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            loss = parts.loss(model(x, parts.first), y)
        loss.backward()
    return saved.bytes


def measure(ranks: int, length: int, o: argparse.Namespace) -> dict[str, int]:
    """Of one rank: bytes saved, bytes of the peak, and bytes sent."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(o.width, o.layers, o.heads, length)
    # What a first step loads and starts is not counted.
    step(model, Parts(ranks, 8 * ranks), 8 * ranks)
    parts = Parts(ranks, length)
    group = zf.collectives.world_group() if parts.mesh is None else zf.collectives.mesh_group(parts.mesh)
    model.zero_grad()
    group.traffic.reset()
    gc.collect()
    reset_peak()
    before = memory("VmRSS")
    saved = step(model, parts, length)
    return {"saved": saved, "peak": memory("VmHWM") - before, "sent": group.traffic.by_op.get("all_to_all", 0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    o = parser.parse_args()
    print(machine())
    print(
        f"width {o.width}, {o.layers} layers, {o.heads} heads, fp32; saved and peak in MiB, and over those of one rank"
    )
    print("context  ranks     saved            peak             sent, bytes  formula")
    for length in o.lengths:
        alone: dict[str, int] = {}
        for ranks in o.ranks:
            found = zf.launch(measure, ranks, ranks, length, o, timeout=1200)
            most = {key: max(rank[key] for rank in found) for key in found[0]}
            alone = alone or most
            cells = (f"{most[key] / 2**20:9.1f} {most[key] / alone[key]:6.3f}" for key in ("saved", "peak"))
            # Of the first rank: its part, and of its heads those that stay, are what `tensor_split` gives it.
            part = len(torch.arange(length).tensor_split(ranks)[0])
            away = o.heads - len(torch.arange(o.heads).tensor_split(ranks)[0])
            formula = 8 * o.layers * part * away * (o.width // o.heads) * 4
            print(f"{length:7}  {ranks:5}  {'  '.join(cells)}  {found[0]['sent']:12,}  {formula:12,}", flush=True)


if __name__ == "__main__":
    main()
