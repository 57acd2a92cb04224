"""The command line of `train_lm.py`: defaults that fit two cores, refusals that say what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

from lm_process import WORLD, device
from lm_report import read_record

# What may differ between a run and its continuation: the routes give the same bits, and a checkpoint fits any
# ZeRO stage and number of ranks.
FREE = {"out", "route", "zero", "world", "compare", "resume", "sample", "device", "sequence_parallel"}


def positive(kind: type) -> type:
    """An argparse type: numbers above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse  # type: ignore[return-value]


def parser(description: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = positive(int)
    p.add_argument("--d-model", type=count, default=256, help="width (256)")
    p.add_argument("--layers", type=count, default=4, help="depth (4)")
    p.add_argument("--heads", type=count, help="attention heads (one for each 64 of the width)")
    p.add_argument("--steps", type=count, default=600, help="optimizer steps (600)")
    p.add_argument("--batch", type=count, default=8, help="sequences in a step, over all ranks (8)")
    p.add_argument("--seq", type=count, default=128, help="bytes in a sequence (128)")
    p.add_argument("--accumulate", type=count, default=1, help="micro-batches a batch is cut into (1)")
    p.add_argument("--data", metavar="FILE", help="text to train on (the language reference in the standard library)")
    p.add_argument("--lr", type=positive(float), default=1e-3, help="peak learning rate (0.001)")
    p.add_argument("--seed", type=int, default=0, help="of the model, the data order and stochastic rounding (0)")
    p.add_argument("--out", type=Path, default=Path("runs/lm"), help="folder of the results (runs/lm)")
    p.add_argument("--route", choices=["pure", "eager"], default="eager", help="both give the same losses (eager)")
    p.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO stage under torchrun (0)")
    p.add_argument(
        "--sequence-parallel",
        type=count,
        default=1,
        metavar="N",
        help="ranks that share a sequence, with torchrun (1)",
    )
    p.add_argument(
        "--compute",
        choices=["float32", "bfloat16"],
        help="dtype of forward and backward; states are bf16 in any case (bfloat16 on a GPU; float32 on a "
        "CPU, most of which multiply bf16 several times slower)",
    )
    p.add_argument(
        "--rounding",
        choices=["stochastic", "kahan", "nearest"],
        default="stochastic",
        help="of the bf16 parameters (stochastic; kahan keeps two bytes more for each)",
    )
    p.add_argument("--sample", type=count, default=300, help="bytes to generate at the end (300)")
    p.add_argument("--compare", action="store_true", help="train with fp32 AdamW too, and print both side by side")
    p.add_argument("--resume", action="store_true", help="go on from what is in --out, with its settings")
    return p


def options(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """Settings in full. Of a run that is resumed they are its own, and what would change it is refused."""
    p = parser(description)
    o = p.parse_args(argv)
    saved = {}
    if o.resume:
        try:
            saved, _ = read_record(o.out / "run.json")
        except FileNotFoundError:
            p.error(f"--resume: there is no run in {o.out}. Start one without --resume.")
        p.set_defaults(**{k: v for k, v in saved.items() if k not in ("out", "resume")})
        o = p.parse_args(argv)
    o.device = device()
    o.world = WORLD
    o.heads = o.heads or max(1, o.d_model // 64)
    o.compute = o.compute or ("bfloat16" if o.device.type == "cuda" else "float32")
    changed = [
        f"--{k.replace('_', '-')} {v} (was {saved[k]})"
        for k, v in vars(o).items()
        if saved.get(k, v) != v and k not in FREE
    ]
    if changed:
        p.error(
            f"--resume goes on with the same settings, but: {', '.join(changed)}. "
            "Leave them out, or start a run in another --out."
        )
    check(o, p)
    return o


def check(o: argparse.Namespace, p: argparse.ArgumentParser) -> None:
    """Refuse what cannot run, before anything is allocated."""
    if o.d_model % o.heads:
        p.error(f"--d-model {o.d_model} must be a multiple of --heads {o.heads}.")
    if WORLD % o.sequence_parallel:
        p.error(f"--sequence-parallel {o.sequence_parallel} must divide the number of ranks, {WORLD}.")
    groups = WORLD // o.sequence_parallel
    if o.batch % (groups * o.accumulate):
        ranks = f"{groups} groups of ranks" if o.sequence_parallel > 1 else f"{groups} ranks"
        p.error(f"--batch {o.batch} must be a multiple of {ranks} times --accumulate {o.accumulate}.")
    if o.data is not None and not Path(o.data).is_file():
        p.error(f"--data {o.data}: no such file.")
    if o.compare and WORLD > 1:
        p.error("--compare is for one process: plain AdamW would train each rank on its own part of the batch.")
