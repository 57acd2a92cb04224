"""Runs of DeepSpeed itself, saved after three and after six updates, and converted by its own `ds_to_universal`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn

RATE, DECAY, BEFORE, AFTER = 1e-2, 0.1, 3, 6
# By name: the stage, and what is trained in. `groups`: two groups of parameters, one without decay.
KINDS = {f"{dtype}-{stage}": (stage, dtype) for dtype in ("fp32", "bf16") for stage in range(4)}
KINDS |= {f"masters-{stage}": (stage, "masters") for stage in (1, 2, 3)}
KINDS |= {f"groups-{stage}": (stage, "groups") for stage in (1, 3)}


class Tied(nn.Module):
    """Tied weights, a frozen layer, buffers, and leaves that no number of ranks divides."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(5))
        self.register_buffer("seen", torch.tensor(100 + seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(self.embed(x))) * self.scale
        return self.head(self.frozen(h + self.shift.to(h.dtype)))


def loss_of(model: nn.Module, step: int, ranks: tuple[int, ...]) -> torch.Tensor:
    """The mean loss over what these of two ranks have in one step."""
    draws = [torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(10 * step + r)) for r in ranks]
    x = torch.cat(draws)
    return nn.functional.cross_entropy(model(x).float(), (x + 1) % 7)


def groups_of(model: nn.Module) -> list[dict]:
    """Matrices, which decay, and the others, which do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    return [{"params": [p for p in trained if p.ndim > 1]}, plain]


def run(directory: str) -> list[str]:
    """Train and save every kind, on each of two ranks; what went wrong."""
    # What DeepSpeed and torch say of each other is not ours.
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    for name, (stage, dtype) in KINDS.items():
        model = Tied()
        trained = [p for p in model.parameters() if p.requires_grad]
        given = groups_of(model) if dtype == "groups" else trained
        config: dict = {"train_micro_batch_size_per_gpu": 6, "zero_allow_untested_optimizer": True}
        config |= {"gradient_clipping": 0.0, "steps_per_print": 1000, "zero_optimization": {"stage": stage}}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if dtype in ("bf16", "masters"):
            config["bf16"] = {"enabled": True}
        if dtype == "masters":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        optimizer = torch.optim.AdamW(given, RATE, weight_decay=DECAY)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        for step in range(AFTER):
            engine.backward(loss_of(engine, step, (dist.get_rank(),)))
            engine.step()
            if step + 1 in (BEFORE, AFTER):
                engine.save_checkpoint(f"{directory}/{name}", tag=str(step + 1))
        dist.barrier()
        if dist.get_rank() == 0 and stage:
            for step in (BEFORE, AFTER):
                _convert(f"{directory}/{name}/{step}", stage)
        dist.barrier()
        engine.destroy()
    return []


def goes_on_from(weights: dict, states: dict, steps: range) -> dict[str, torch.Tensor]:
    """Weights and a full state dict of torch's form go on in DeepSpeed at stage 0; its numbers after some steps.

    At stage 0 DeepSpeed trains by the optimizer that it was given. At the others it reads no state dict but its own.
    """
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    model = Tied(seed=9)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1.0)
    config: dict = {"train_micro_batch_size_per_gpu": 6, "zero_allow_untested_optimizer": True}
    config |= {"gradient_clipping": 0.0, "steps_per_print": 1000, "zero_optimization": {"stage": 0}}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.module.load_state_dict(weights)
    set_optimizer_state_dict(engine.module, optimizer, states, options=StateDictOptions(full_state_dict=True))
    drawn = (dist.get_rank(),) if dist.get_world_size() == 2 else (0, 1)
    for step in steps:
        engine.backward(loss_of(engine, step, drawn))
        engine.step()
    found = {f"{k} fp32": p.detach().clone() for k, p in model.named_parameters()}
    for k, p in model.named_parameters():
        found |= {f"{k} {n}": x.detach().clone() for n, x in optimizer.state[p].items()} if p.requires_grad else {}
    engine.destroy()
    return found


def _convert(source: str, stage: int) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    given = argparse.Namespace(input_folder=source, output_folder=f"{source}_universal", num_extract_workers=1)
    given.num_merge_workers, given.keep_temp_folder, given.strict, given.inject_missing_state = 1, False, True, True
    with contextlib.redirect_stdout(io.StringIO()):
        main(given)
