"""A Hugging Face Trainer under torchrun, with DistributedDataParallel and torch.optim, and with each stage attached."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers

import zerofn as zf

STAGES: dict[str, list[Any]] = {
    "zero0": [lambda: zf.all_reduce()],
    "zero1": [lambda: zf.accumulate(2), lambda: zf.reduce_scatter()],
    "zero2": [lambda: zf.reduce_scatter()],
    "zero3": [lambda: zf.shard()],
}
RATE = 1e-2


class Trainer(zf.integrations.TrainerMixin, transformers.Trainer):
    pass


class Logs(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off))


def data() -> list[dict]:
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (16,), generator=g) for _ in range(64)]
    return [{"input_ids": x, "labels": x} for x in rows]


def train(
    net: torch.nn.Module,
    optimizer: Any,
    folder: str,
    resume: Any = None,
    falls: bool = True,
    kind: type = transformers.Trainer,
    callbacks: Any = (),
    **more: Any,
) -> Logs:
    logs = Logs()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 1 / (1 + e) if falls else 1.0)
    fixed = {"per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True}
    told = {"disable_tqdm": True, "max_steps": 4, "save_strategy": "no", "output_dir": folder, **fixed, **more}
    args = transformers.TrainingArguments(**told)
    tested = {"eval_dataset": data()[:16]} if more.get("load_best_model_at_end") else {}
    both = (optimizer, schedule)
    trainer = kind(net, args, train_dataset=data(), optimizers=both, callbacks=[logs, *callbacks], **tested)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return logs


def plain(folder: str, **more: Any) -> tuple[list[torch.Tensor], Logs]:
    net = model()
    logs = train(net, torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.1, fused=True), folder, **more)
    return [p.detach() for p in net.parameters()], logs


def attached(stage: str, folder: str, clip: bool, **more: Any) -> tuple[list[torch.Tensor], Logs]:
    net = model()
    parts = [make() for make in STAGES[stage]] + [zf.clip_by_global_norm(1.0)] * clip
    opt = zf.attach(net, zf.chain(*parts, zf.adamw(RATE, weight_decay=0.1)))
    logs = train(net, opt, folder, max_grad_norm=0.0, kind=Trainer, **more)
    opt.detach()
    return [p.detach() for p in net.parameters()], logs


def check(name: str, mine: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    """The change of every parameter. Adam's first steps divide by the root of what may be rounding."""
    for a, b, s in zip(mine, plain, [p.detach() for p in model().parameters()], strict=True):
        assert (a - b).norm() < 1e-3 * (b - s).norm(), f"{name}: {((a - b).norm() / (b - s).norm()).item()}"


def stages(folder: str) -> None:
    """With the trainer's accumulation, and with the pipeline's: its micro-steps are the trainer's steps then."""
    for clip in (False, True):
        reference, told = plain(folder, max_grad_norm=float(clip), gradient_accumulation_steps=2)
        for stage in ("zero0", "zero2", "zero3"):
            params, logs = attached(stage, folder, clip, gradient_accumulation_steps=2)
            check(f"{stage}, clip {clip}", params, reference)
            for a, b in zip(logs.rows[:-1], told.rows[:-1], strict=True):
                assert math.isclose(a["loss"], b["loss"], rel_tol=1e-4)
                assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-3), (stage, a, b)
        reference, told = plain(folder, max_grad_norm=float(clip), gradient_accumulation_steps=2, falls=False)
        params, logs = attached("zero1", folder, clip, max_steps=8, falls=False)
        check(f"zero1, clip {clip}", params, reference)
        for a, b in zip(logs.rows[1:-1:2], told.rows[:-1], strict=True):
            # The last micro-step of each window.
            assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-3), (a, b)


def resumed(folder: str) -> None:
    """At every stage; the best model is the last one, or one before it."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    more = {**saving, "load_best_model_at_end": True, "max_steps": 6}
    for stage in STAGES:
        straight, _ = attached(stage, f"{folder}/{stage}a", True, **more)
        again, _ = attached(stage, f"{folder}/{stage}b", True, resume=f"{folder}/{stage}a/checkpoint-2", **more)
        assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True)), stage


class Gradual(transformers.TrainerCallback):
    """Freezes the first block for two steps, then the second. A reference instead drops gradients before its step."""

    def __init__(self, net: Any, drops: bool):
        self.net, self.drops = net, drops

    def frozen(self, state: Any) -> list[torch.nn.Parameter]:
        return list(self.net.transformer.h[int(state.global_step >= 2)].parameters())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.drops:
            self.net.requires_grad_(True)
            for p in self.frozen(state):
                p.requires_grad_(False)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.drops:
            for p in self.frozen(state):
                p.grad = None


def frozen(folder: str) -> None:
    """Blocks are frozen and unfrozen between steps, at every stage."""
    net = model()
    opt: Any = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.1, fused=True)
    train(net, opt, folder, max_grad_norm=0.0, callbacks=[Gradual(net, True)])
    reference = [p.detach() for p in net.parameters()]
    for stage, parts in STAGES.items():
        net = model()
        # Without an accumulation, whose windows would not end where blocks are frozen.
        tx = zf.chain(parts[-1](), zf.adamw(RATE, weight_decay=0.1))
        opt = zf.attach(net, tx, hold_frozen=True)
        train(net, opt, folder, max_grad_norm=0.0, kind=Trainer, callbacks=[Gradual(net, False)])
        opt.detach()
        check(f"frozen, {stage}", [p.detach() for p in net.parameters()], reference)


def refused(folder: str) -> None:
    for more, words in (({"max_grad_norm": 1.0}, "zf.clip_by_global_norm"), ({"bf16": True}, "zf.precision")):
        net = model()
        opt = zf.attach(net, zf.chain(zf.reduce_scatter(), zf.adamw(RATE)))
        try:
            train(net, opt, folder, **{"max_grad_norm": 0.0, **more})
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{more} was not refused")
        opt.detach()
    # Last, since the first rank alone is told it and the others wait for it in their steps: each ends by an error.
    net = model()
    opt = zf.attach(net, zf.chain(zf.reduce_scatter(), zf.adamw(RATE)))
    try:
        train(net, opt, folder, max_grad_norm=0.0, save_strategy="steps", save_steps=2)
    except RuntimeError as error:
        assert dist.get_rank() or "opt.state_dict() on rank 0 and not on every rank" in str(error), error
        assert dist.get_rank() or "zf.integrations.TrainerMixin" in str(error), error
    else:
        raise AssertionError("shards of one rank were saved")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    {"stages": stages, "resumed": resumed, "frozen": frozen, "refused": refused}[sys.argv[1]](sys.argv[2])
    # One write: lines of ranks would mix.
    sys.stdout.write(f"right {sys.argv[1]}\n")
    dist.destroy_process_group()
