"""Train a vision encoder and a language model in groups of ranks of their own: other pipelines, one loss.

    python examples/disaggregated_vlm.py                         # groups of local ranks; pip install '.[ray]'
    python examples/disaggregated_vlm.py --engine ray            # Ray actors
    python examples/disaggregated_vlm.py --sequence-parallel     # the language model's ranks share each sequence
    python examples/disaggregated_vlm.py --resume                # go on from the last save of both

The encoder is ZeRO-1 in fp16 with a loss scale of its own; the language model is ZeRO-3 with moments in bf16.
Embeddings go one way and their gradients come back, each with the number of its step. Both are clipped by one norm. The
script compares how parameters have changed in the first steps with one process that trains the joint model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from vlm_engines import LaunchEngine, WorkerLost
from vlm_models import HELD_OUT, digits, models, rows_of
from vlm_ray import RayEngine
from vlm_workers import TextWorker, VisionWorker, loss_of, text_pipeline, vision_pipeline

import zerofn as zf

ENGINES = {"launch": LaunchEngine, "ray": RayEngine}
# What runs over ranks with numbers of 16 bits differs from one process by at most this part of the largest change.
BOUND = 0.05


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="launch")
    parser.add_argument("--vision", type=int, default=2, help="ranks of the vision encoder")
    parser.add_argument("--text", type=int, default=2, help="ranks of the language model")
    parser.add_argument("--sequence-parallel", action="store_true", help="ranks of the language model share sequences")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", type=int, default=3, help="steps after which one process is compared; 0: never")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("vlm-run"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die", default="", help="GROUP:RANK:STEP, to see what the death of a worker does")
    o = parser.parse_args(argv)
    for name, ranks in (("--vision", o.vision), ("--text", o.text)):
        if ranks < 1 or o.batch % ranks:
            parser.error(f"--batch {o.batch} cannot be shared by {name} {ranks}: it must be a multiple")
    o.first = json.loads((o.out / "last.json").read_text())["step"] if o.resume else 0
    return o


class Run:
    """The driver: it knows which worker does what and when, and holds no tensors."""

    def __init__(self, engine: Any, o: argparse.Namespace):
        self.engine, self.o = engine, o
        self.vision = engine.start("vision", VisionWorker, o.vision, o)
        self.text = engine.start("text", TextWorker, o.text, o)
        self.both(("start",), ("start",))
        self.norms: list[list[float]] = []

    def both(self, vision: tuple, text: tuple) -> tuple[list[Any], list[Any]]:
        """Calls of both groups at once."""
        calls = [*self.engine.call(self.vision, *vision), *self.engine.call(self.text, *text)]
        found = self.engine.results(calls)
        return found[: len(self.vision)], found[len(self.vision) :]

    def of(self, workers: Any, *call: Any) -> list[Any]:
        return self.engine.results(self.engine.call(workers, *call))

    def step(self, step: int) -> float:
        embeddings = self.of(self.vision, "embed", step)
        found = self.of(self.text, "loss", step, embeddings)
        gradients = [gradient for _, gradient in found]
        self.of(self.vision, "backward", step, gradients, self.o.text)
        vision, text = self.both(("apply", step), ("apply", step))
        # One norm for both groups, on all of their ranks.
        self.norms.append([metrics["grad_norm"] for metrics in [*vision, *text] if "grad_norm" in metrics])
        return sum(loss for loss, _ in found) / len(found)

    def accuracy(self) -> float:
        embeddings = self.of(self.vision, "embed_held_out")
        return sum(self.of(self.text, "right_captions", embeddings)) / HELD_OUT

    def save(self, step: int) -> None:
        """Both groups, and only then the word that this is the last."""
        self.both(("save", step), ("save", step))
        fresh = self.o.out / "last.json.new"
        fresh.write_text(json.dumps({"step": step}))
        fresh.replace(self.o.out / "last.json")

    def parameters(self) -> dict[str, torch.Tensor]:
        (vision, *_), (text, *_) = self.both(("parameters",), ("parameters",))
        named = {f"{name}.{path}": x for name, of in (("vision", vision), ("text", text)) for path, x in of.items()}
        # Copies, since what comes from an engine's store may be read only.
        return {path: torch.tensor(x) for path, x in named.items()}


def joint(o: argparse.Namespace, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Parameters before and after some steps of one process, and norms: one graph through both models, no hand-over."""
    vision, text = models(o.width, o.layers, o.seed)
    named = lambda: {  # noqa: E731
        f"{name}.{path}": p.detach().clone()
        for name, model in (("vision", vision), ("text", text))
        for path, p in model.named_parameters()
    }
    before, norms = named(), []
    total = torch.zeros(())
    opts = [
        zf.attach(vision, vision_pipeline(o, lambda squares: total)),
        zf.attach(text, text_pipeline(o, lambda squares: total)),
    ]
    for step in range(steps):
        patches, captions = (x[rows_of(step, o.batch, o.seed)] for x in digits())
        loss_of(text, vision(patches), captions, 0, 1, split=False).backward()
        gradients = [p.grad for model in (vision, text) for p in model.parameters() if p.grad is not None]
        total = torch.stack([g.double().square().sum() for g in gradients]).sum()
        norms.append(float(total.sqrt()))
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return before, named(), norms


def differences(o: argparse.Namespace, run: Run) -> dict[str, float]:
    """Of the changes of all parameters, over the largest change of the group; of norms, over those of one process.

    Norms tell what changes do not: to Adam a gradient and half of it are one.
    """
    after = run.parameters()
    before, want, norms = joint(o, o.compare)
    worst, of_norms = 0.0, 0.0
    for there, norm in zip(run.norms, norms, strict=True):
        of_norms = max(of_norms, *(abs(x - norm) / norm for x in there))
    for group in ("vision", "text"):
        paths = [path for path in want if path.startswith(group)]
        change = max(float((want[path] - before[path]).abs().max()) for path in paths)
        worst = max(worst, *(float((after[path] - want[path]).abs().max()) / change for path in paths))
    return {"difference": worst, "of_norms": of_norms}


def train(run: Run, o: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {"first": o.first}
    begun = time.perf_counter()
    for step in range(o.first, o.steps):
        loss = run.step(step)
        done = step + 1
        if done == o.compare and not o.first:
            record |= differences(o, run)
        if done % o.save_every == 0 or done == o.steps:
            run.save(done)
            print(f"step {done}  loss {loss:.4f}  {(time.perf_counter() - begun) / (done - o.first):.3f} s a step")
    record |= {"loss": loss, "accuracy": run.accuracy(), "wall": time.perf_counter() - begun}
    for group, workers in (("vision", run.vision), ("text", run.text)):
        reports = run.of(workers, "report")
        record[group] = {key: sum(report[key] for report in reports) for key in reports[0]}
    return record


def tell(record: dict[str, Any]) -> None:
    vision, text = record["vision"], record["text"]
    copying = vision["copying"] + text["copying"]
    whole = vision["seconds"] + text["seconds"] + copying
    sent = vision["bytes"] + text["bytes"]
    print(
        f"time on cores: vision {vision['seconds']:.1f} s, text {text['seconds']:.1f} s, copying of the hand-over "
        f"{copying:.2f} s ({copying / whole:.1%}) for {sent / 1e6:.1f} MB"
    )
    started = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in record["started"].items())
    print(
        f"captions right: {record['accuracy']:.1%} of {HELD_OUT} held-out images, trained in {record['wall']:.0f} s; "
        f"before that, started: {started}"
    )
    if "difference" in record:
        print(
            f"largest difference to one process: of a change, over the largest change, {record['difference']:.1e}; "
            f"of a norm {record['of_norms']:.1e}"
        )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    o = options(argv)
    if o.first >= o.steps:
        raise SystemExit(f"step {o.first} is saved already, of --steps {o.steps}: nothing is left to do")
    o.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    engine = ENGINES[o.engine](groups=2)
    there = time.perf_counter()
    try:
        run = Run(engine, o)
        started = {"engine": there - begun, "groups": time.perf_counter() - there}
        record = {**train(run, o), "started": started}
    except WorkerLost as error:
        raise SystemExit(f"{error}\n--resume goes on from the last save in {o.out}") from None
    finally:
        engine.close()
    tell(record)
    if max(record.get("difference", 0.0), record.get("of_norms", 0.0)) > BOUND:
        raise SystemExit(f"the groups have not trained what one process does: more than {BOUND} apart")
    (o.out / "run.json").write_text(json.dumps(record))
    return record


if __name__ == "__main__":
    main()
