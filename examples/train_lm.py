"""Train a byte-level GPT on real text through a zerofn pipeline.

    python examples/train_lm.py                   # bf16 states; three to four minutes on two idle cores
    python examples/train_lm.py --compare         # and fp32 AdamW on the same data, side by side
    python examples/train_lm.py --rounding kahan  # 8 bytes per parameter instead of 6
    python examples/train_lm.py --route pure      # functions of a state, no loss.backward(): the same losses
    python examples/train_lm.py --resume          # go on where Ctrl-C stopped it, bit for bit
    torchrun --nproc-per-node 2 examples/train_lm.py --zero 3
    torchrun --nproc-per-node 2 examples/train_lm.py --sequence-parallel 2  # each rank half of every sequence

The text is the language reference in the standard library, or `--data FILE`. `--out` receives a checkpoint,
`loss.png` and `run.json`.
"""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Threads that wait shall sleep: spinning, they make a step five times slower on cores that are shared with
# another process. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from lm_data import Text, read_text
from lm_model import GPT, generate, next_byte_loss
from lm_options import options
from lm_process import RANK, WORLD, Interrupt, over_ranks
from lm_report import (
    History,
    Progress,
    bytes_per_parameter,
    comparison,
    draw_curve,
    read_record,
    record_of,
    write_record,
)
from lm_sequence import WHOLE, Parts
from torch import Tensor
from torch.func import functional_call

import zerofn as zf

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
PROMPT = b"The "

# ---------------------------------------------------------------- what is trained, and how


def schedule(o: Namespace) -> Any:
    """Learning rate by step: a tenth of the run to warm up, then a cosine to zero."""
    return zf.schedules.warmup_cosine(o.lr, max(1, o.steps // 10), max(2, o.steps))


def pipeline(o: Namespace) -> zf.Transform:
    """The training step. Left to right is the road of a gradient, from the model to storage."""
    dtypes = zf.precision(store_dtype=torch.bfloat16, param_dtype=getattr(torch, o.compute))
    accumulate = zf.accumulate(o.accumulate)
    # The ZeRO stage is the order of composition.
    match o.zero:
        case 0:
            road = [dtypes, *([zf.all_reduce()] if WORLD > 1 else []), accumulate]
        case 1:
            road = [dtypes, accumulate, zf.reduce_scatter()]
        case 2:
            road = [dtypes, zf.reduce_scatter(), accumulate]
        case _:
            road = [zf.shard(), dtypes, accumulate]
    return zf.chain(
        *road,
        zf.clip_by_global_norm(MAX_NORM),
        zf.low_precision_adam(schedule(o), BETAS, weight_decay=WEIGHT_DECAY, rounding=o.rounding, seed=o.seed),
    )


def fresh_model(o: Namespace) -> GPT:
    torch.manual_seed(o.seed)
    return GPT(o.d_model, o.layers, o.heads, o.seq).to(o.device)


class PureRoute:
    """The step as a function `(state, batch) -> (state, metrics)`."""

    def __init__(self, model: GPT, tx: zf.Transform, parts: Parts = WHOLE):
        self.state = zf.init(tx, dict(model.named_parameters()))
        # The state has parameters of its own; of the model only the code is needed.
        self.model, self.tx, self.parts = model.to("meta"), tx, parts
        self.pure_step = zf.make_step(self.loss, tx, donate=True)

    def forward(self, params: dict[str, Tensor], x: Tensor, first: int = 0) -> Tensor:
        return functional_call(self.model, params, (x, first))

    def loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.parts.loss(self.forward(params, x, self.parts.first), y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with self.parts.of(self.model):
            self.state, metrics = self.pure_step(self.state, x, y)
        return metrics["loss"]

    def logits(self, x: Tensor) -> Tensor:
        return zf.bind(self.forward, self.tx, self.state)(self.state.params, x)

    def save(self, checkpoint: Path) -> None:
        zf.save(checkpoint, self.state)

    def load(self, checkpoint: Path) -> None:
        self.state = zf.load(checkpoint, like=self.state)


class EagerRoute:
    """The step as PyTorch users write it, with a pipeline for an optimizer."""

    def __init__(self, model: GPT, tx: zf.Transform, parts: Parts = WHOLE):
        self.model, self.parts = model, parts
        self.opt = zf.attach(model, tx)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with self.parts.of(self.model):
            loss = self.parts.loss(self.model(x, self.parts.first), y)
            loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        return self.model(x)

    def save(self, checkpoint: Path) -> None:
        zf.save(checkpoint, self.opt)

    def load(self, checkpoint: Path) -> None:
        zf.load(checkpoint, like=self.opt)

    @property
    def state(self) -> zf.State:
        return self.opt.state


class PlainAdamW:
    """What `--compare` compares with: torch.optim.AdamW in fp32, without zerofn."""

    def __init__(self, model: GPT, o: Namespace):
        self.model = model
        self.opt = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        at = schedule(o)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda step: at(step) / o.lr)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = next_byte_loss(self.model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.opt.step()
        self.opt.zero_grad()
        self.rates.step()
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        return self.model(x)

    @property
    def state(self) -> dict[str, Any]:
        moments = {str(i): s for i, s in enumerate(self.opt.state.values())}
        return {"params": dict(self.model.named_parameters()), "moments": moments}


# ---------------------------------------------------------------- the loop


def micro_batches(text: Text, step: int, o: Namespace) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the batch of a step, cut into the micro-batches that are accumulated."""
    x, y = (o.parts.cut(part).to(o.device) for part in text.batch(o.seed, step, o.batch, o.seq))
    return list(zip(x.chunk(o.accumulate), y.chunk(o.accumulate), strict=True))


@torch.no_grad()
def validate(route: Any, text: Text, o: Namespace) -> float:
    """Mean loss on the held-out text."""
    losses = [next_byte_loss(route.logits(x.to(o.device)), y.to(o.device)) for x, y in text.validation(o.batch, o.seq)]
    return float(torch.stack(losses).mean())


def train(label: str, route: Any, text: Text, o: Namespace, history: History, save: Callable) -> bool:
    """Run the steps that `history` does not have yet, saving now and then; False if interrupted."""
    progress = Progress(label, o.steps, len(history.loss), o.batch * o.seq, silent=RANK > 0)
    with Interrupt(o.device) as interrupt, progress:
        for step in range(len(history.loss), o.steps):
            begun = time.perf_counter()
            losses = [route.step(x, y) for x, y in micro_batches(text, step, o)]
            # Reading the loss waits for the device, once a step, so that times are those of whole steps.
            loss = float(over_ranks(torch.stack(losses).mean(), "mean"))
            if not math.isfinite(loss):
                raise SystemExit(diverged(label, loss, step + 1, history, o))
            history.loss.append(loss)
            history.seconds.append(time.perf_counter() - begun)
            stopped = interrupt.stops()
            if stopped or (step + 1) % max(1, o.steps // 10) == 0 or step + 1 == o.steps:
                history.validation.append((step + 1, validate(route, text, o)))
                save()
            progress.show(history, bytes_per_parameter(route.state, o.parameters))
            if stopped:
                break
    return len(history.loss) == o.steps


def diverged(label: str, loss: float, step: int, history: History, o: Namespace) -> str:
    """What to say of a loss that is no number; the parameters of this step are not saved."""
    at = history.validation[-1][0] if history.validation else 0
    kept = (
        f"What was saved at step {at} is in {o.out / 'checkpoint'}" if at and label == "zerofn" else "Nothing is saved"
    )
    return f"\n{label}: the loss of step {step} is {loss}. {kept}. Begin anew with a smaller --lr."


# ---------------------------------------------------------------- the command


def run_pipeline(model: GPT, text: Text, o: Namespace) -> tuple[History, dict[str, Any], bool]:
    """Train through the pipeline: what was measured, its summary, and whether all steps were done."""
    route = {"pure": PureRoute, "eager": EagerRoute}[o.route](model, pipeline(o), o.parts)
    history = History()
    checkpoint = o.out / "checkpoint"
    if o.resume:
        route.load(checkpoint)
        history = read_record(o.out / "run.json")[1].until(int(route.state.step))

    def save() -> None:
        # The record first: one that knows of later steps than the checkpoint can be cut, not the reverse.
        if RANK == 0:
            write_record(o.out / "run.json", record_of(o, history))
        route.save(checkpoint)

    finished = train("zerofn", route, text, o, history, save)
    summary = {**history.summary(), "bytes_per_parameter": bytes_per_parameter(route.state, o.parameters)}
    if finished:
        summary["sample"] = generate(route.logits, PROMPT, o.sample, o.seq, o.device)
    return history, summary, finished


def run_adamw(text: Text, o: Namespace) -> tuple[History, dict[str, Any]]:
    """The same steps on the same data with fp32 AdamW."""
    route, history = PlainAdamW(fresh_model(o), o), History()
    train("AdamW fp32", route, text, o, history, save=lambda: None)
    return history, {
        **history.summary(),
        "bytes_per_parameter": bytes_per_parameter(route.state, o.parameters),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train and report; returns the record that is also written to `run.json`."""
    o = options(argv, __doc__)
    o.parts = Parts(o.sequence_parallel, o.seq, o.device)
    text, model = Text.split(read_text(o.data), o.seq), fresh_model(o)
    o.parameters = sum(p.numel() for p in model.parameters())
    say(f"{o.parameters:,} parameters, {len(text.train):,} bytes of text, {o.device}, {o.route} route")
    say(repr(pipeline(o)))
    history, summary, finished = run_pipeline(model, text, o)
    record, curves = record_of(o, history) | summary, {"zerofn": history}
    if o.compare and finished:
        curves["AdamW fp32"], record["adamw"] = run_adamw(text, o)
        say(comparison({"zerofn": record, "AdamW fp32": record["adamw"]}))
    if RANK == 0:
        write_record(o.out / "run.json", record)
        drawn = draw_curve(o.out / "loss.png", curves)
        say(f"\n{summary['sample']}\n" if finished else f"stopped after {len(history.loss)} steps; go on with --resume")
        say(f"in {o.out}: checkpoint, run.json" + ", loss.png" * drawn)
    return record


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
