"""One rank of the vision group and one of the language model's: what they do in a step, and what passes between them.

Nothing here knows which engine runs it. What an engine gives a worker is a `post`: `put` and `get` of values that go to
other workers, and `meet`, which adds a number up over the groups.
"""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vlm_models import (
    CAPTION,
    END,
    HELD_OUT,
    PATCHES,
    digits,
    losses_of,
    models,
    rows_of,
    shifted,
    targets_of,
)

import zerofn as zf

MAX_NORM = 1.0


class Parcel(NamedTuple):
    """Values on their way to another group: of which step, and which rows of its batch."""

    step: int
    first: int
    values: Any  # a numpy array of (rows, 4, width)


class StepMismatch(RuntimeError):
    """Something came that is of another step, came twice, or does not fit what it is the gradient of."""


def vision_pipeline(o: Namespace, over: Any) -> zf.Transform:
    """ZeRO-1: fp16 in the model with a scale of its own, fp32 in the states, of which a rank has its part."""
    return zf.chain(
        zf.precision(param_dtype=torch.float16, output_dtype=torch.float32),
        zf.scale_loss(init_scale=2.0**12),
        zf.accumulate(1),
        zf.reduce_scatter(),
        zf.clip_by_global_norm(MAX_NORM, over=over),
        zf.skip_nonfinite(),
        zf.adamw(o.lr, eps=1e-4),
    )


def text_pipeline(o: Namespace, over: Any) -> zf.Transform:
    """ZeRO-3: a rank has its part of all, gathered on use; bf16 moments."""
    return zf.chain(
        zf.shard(),
        zf.clip_by_global_norm(MAX_NORM, over=over),
        zf.skip_nonfinite(),
        zf.low_precision_adam(o.lr, eps=1e-4, state_dtype=torch.bfloat16, seed=o.seed),
    )


class Worker:
    """What both groups' workers have.

    Args:
        name: of the group.
        rank: in it.
        size: of it.
        o: the options of the run.
        post: what the engine gives.
    """

    def __init__(self, name: str, rank: int, size: int, o: Namespace, post: Any):
        self.name, self.rank, self.size, self.o, self.post = name, rank, size, o, post
        self.seconds, self.copying, self.bytes = 0.0, 0.0, 0
        self.step = 0
        self.met = False

    def attach(self, model: torch.nn.Module, pipeline: Any) -> None:
        self.model = model
        self.opt = zf.attach(model, pipeline(self.o, self._over_groups))
        if self.o.resume:
            zf.load(self._place(self.o.first), like=self.opt)

    def _over_groups(self, squares: Tensor) -> float:
        """The sum of squares of both groups' gradients."""
        self.met = True
        return self.post.meet(self.step, self.name, float(squares))

    def apply(self, step: int) -> dict[str, float]:
        """The update of a step; both groups come here at once."""
        self.step, self.met = step, False
        if self.o.die == f"{self.name}:{self.rank}:{step}":
            (Path(self.o.out) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with self.timed():
            self.opt.step()
            if not self.met:
                # Left out because of an overflow, so the other group, which waits for our norm, leaves it out too.
                self.post.meet(step, self.name, float("nan"))
            self.opt.zero_grad()
        return {key: value for key, value in zf.floats(self.opt.metrics).items() if key in ("grad_norm", "skipped")}

    @contextmanager
    def timed(self):
        """Time of this thread on a core: what it waits for, other workers and a free core, is left out."""
        begun, copied = time.thread_time(), self.copying
        yield
        self.seconds += time.thread_time() - begun - (self.copying - copied)

    def put(self, step: int, first: int, x: Tensor) -> Any:
        begun = time.thread_time()
        handle = self.post.put(Parcel(step, first, x.detach().contiguous().numpy()))
        self.copying += time.thread_time() - begun
        self.bytes += x.numel() * x.element_size()
        return handle

    def get(self, handles: list[Any], step: int) -> list[Parcel]:
        begun = time.thread_time()
        parcels = self.post.get(handles)
        self.copying += time.thread_time() - begun
        for parcel in parcels:
            if parcel.step != step:
                raise StepMismatch(f"{self.name}[{self.rank}] is at step {step} and was given a value of {parcel.step}")
        return parcels

    def rows(self, parts: int, part: int) -> tuple[int, int]:
        each = self.o.batch // parts
        return part * each, (part + 1) * each

    def report(self) -> dict[str, float]:
        return {"seconds": self.seconds, "copying": self.copying, "bytes": self.bytes}

    def save(self, step: int) -> None:
        zf.save(self._place(step), self.opt)

    def _place(self, step: int) -> Path:
        return Path(self.o.out) / f"step-{step}" / self.name

    def parameters(self) -> dict[str, Any]:
        """All of them, in full, as numpy arrays; every rank is asked."""
        with self.opt.gathered():
            return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}


class VisionWorker(Worker):
    """Makes embeddings of its part of the batch, and takes their gradients."""

    def start(self) -> None:
        self.attach(models(self.o.width, self.o.layers, self.o.seed)[0], vision_pipeline)
        self.waiting: dict[int, Tensor] = {}

    def embed(self, step: int) -> Any:
        with self.timed():
            low, high = self.rows(self.size, self.rank)
            out = self.model(digits()[0][rows_of(step, self.o.batch, self.o.seed)[low:high]])
            # What is older has had no gradient, and gets none any more.
            self.waiting = {step: out}
            return self.put(step, low, out)

    def backward(self, step: int, handles: list[Any], groups: int) -> None:
        """The gradients of a step's embeddings, from each of the `groups` ranks of the other group."""
        with self.timed():
            out = self.waiting.get(step)
            if out is None:
                now = ", ".join(map(str, self.waiting)) or "none"
                raise StepMismatch(
                    f"a gradient of step {step} came to vision[{self.rank}], which waits for that of step {now}: it is "
                    "late, or came twice"
                )
            low, high = self.rows(self.size, self.rank)
            parcels, g = self.get(handles, step), torch.zeros_like(out)
            for parcel in parcels:
                part = torch.from_numpy(parcel.values.copy())
                if part.dtype != out.dtype or part.shape[1:] != out.shape[1:]:
                    raise StepMismatch(
                        f"embeddings of step {step} are {tuple(out.shape)} {out.dtype}, and their gradient came as "
                        f"{tuple(part.shape)} {part.dtype}"
                    )
                begin, end = max(low, parcel.first), min(high, parcel.first + len(part))
                if begin < end:
                    g[begin - low : end - low] += part[begin - parcel.first : end - parcel.first]
            # The loss of all is the mean of those of the other group's ranks, and gradients here are a mean over ranks.
            del self.waiting[step]
            out.backward(gradient=g * (self.size / groups))

    @torch.no_grad()
    def embed_held_out(self) -> Any:
        first, rows = _held_out(self.size, self.rank)
        return self.put(-1, first, self.model(digits()[0][rows]))


class TextWorker(Worker):
    """Reads embeddings, with a part of the rows or, under sequence parallelism, with a part of every sequence."""

    def start(self) -> None:
        model = models(self.o.width, self.o.layers, self.o.seed)[1]
        self.parallel = zf.sequence_parallel(model) if self.o.sequence_parallel else None
        self.attach(model, text_pipeline)

    def loss(self, step: int, handles: list[Any]) -> tuple[float, Any]:
        with self.timed():
            whole = self.parallel is not None
            low, high = (0, self.o.batch) if whole else self.rows(self.size, self.rank)
            images = self._images(self.get(handles, step), low, high).requires_grad_()
            caption = digits()[1][rows_of(step, self.o.batch, self.o.seed)[low:high]]
            loss = loss_of(self.model, images, caption, *((self.rank, self.size) if whole else (0, 1)), split=whole)
            loss.backward()
            assert images.grad is not None
            return float(loss.detach()), self.put(step, low, images.grad)

    @staticmethod
    def _images(parcels: list[Parcel], low: int, high: int) -> Tensor:
        parts = sorted(parcels, key=lambda parcel: parcel.first)
        every = torch.cat([torch.from_numpy(parcel.values.copy()) for parcel in parts])
        first = parts[0].first
        return every[low - first : high - first]

    @torch.no_grad()
    def right_captions(self, handles: list[Any]) -> int:
        """Of the held-out images that are this rank's, how many captions are right to the last byte."""
        whole = self.parallel is not None
        first, rows = _held_out(1, 0) if whole else _held_out(self.size, self.rank)
        images = self._images(self.get(handles, -1), first, first + len(rows))
        said = torch.zeros(len(rows), CAPTION, dtype=torch.long)
        for i in range(CAPTION):
            part = (self.rank, self.size) if whole else (0, 1)
            logits = self.model(images, shifted(said), *part)
            if whole:
                every = zf.collectives.all_gather(logits.transpose(0, 1).contiguous(), zf.collectives.world_group())
                logits = every.transpose(0, 1)
            byte = logits[:, PATCHES + i].argmax(-1)
            ended = (said == END).any(1)
            said[:, i] = torch.where(ended, 0, byte)
        right = (said == digits()[1][rows]).all(1).sum()
        return int(right) if not whole or self.rank == 0 else 0


def loss_of(model: Any, images: Tensor, caption: Tensor, part: int, parts: int, split: bool) -> Tensor:
    """The mean over captions, each as one; where sequences are cut, of whole ones."""
    targets, weights = (x.tensor_split(parts, dim=1)[part] for x in targets_of(caption))
    losses = losses_of(model(images, shifted(caption), part, parts), targets)
    if split:
        return zf.sequence_mean(losses, weights=weights)[0]
    return (losses * weights).sum() / len(caption)


def _held_out(parts: int, part: int) -> tuple[int, Tensor]:
    rows = torch.arange(HELD_OUT).tensor_split(parts)[part]
    return int(rows[0]), rows
