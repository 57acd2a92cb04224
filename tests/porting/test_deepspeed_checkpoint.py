"""Runs of DeepSpeed go on here: universal checkpoints and consolidated weights, written by hand in their layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zerofn as zf

RATE, DECAY = 1e-2, 0.1
FULL = StateDictOptions(full_state_dict=True)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
    model[3].requires_grad_(False)
    return model


def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
    """On the same data on every rank, whose mean is then that of one process."""
    for i in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), RATE, weight_decay=DECAY, fused=True)


def written(directory: str, model: nn.Module, opt: torch.optim.Optimizer, flat: bool = False) -> None:
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        folder = Path(directory, "zero", name)
        folder.mkdir(parents=True)
        for file, x in {"fp32": p.detach(), **opt.state[p]}.items():
            x = x.clone().reshape(-1) if flat else x.clone()
            torch.save(x if file == "step" else {"param": x, "cat_dim": 0}, folder / f"{file}.pt")


def _goes_on(directory: str, consolidated: str) -> list[str]:
    straight, wrong = net(), []
    optimizer = adamw(straight)
    train(straight, optimizer, 0, 3)
    start, state = copy.deepcopy(straight.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    train(straight, optimizer, 3, 5)
    after = straight.state_dict()
    for stage, first in FIRST.items():
        model = net(7)
        model.load_state_dict({k: x for k, x in torch.load(consolidated).items() if k.startswith("3.")}, strict=False)
        opt = zf.attach(model, zf.chain(first(), zf.adamw(RATE, weight_decay=DECAY), zf.ema(0.5)))
        zf.load_deepspeed(directory, like=opt)
        found = get_optimizer_state_dict(model, opt, options=FULL)["state"]
        for i, kept in state.items():
            now = found[[name for name, p in model.named_parameters() if p.requires_grad][i]]
            wrong += [f"{stage} {i} {k}" for k, x in kept.items() if not torch.equal(now[k], x)]
        with opt.averaged(), opt.gathered():
            wrong += [f"{stage} average {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
        with opt.gathered():
            wrong += [f"{stage} {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
        train(model, opt, 3, 5)
        wrong += [] if int(opt.state.step) == 5 else [f"{stage} step"]
        with opt.gathered():
            # Two kernels of Adam round the ends of parts otherwise, by about 1e-7 of a change.
            wrong += [
                f"{stage} later {k}"
                for k, x in model.state_dict().items()
                if (x - after[k]).norm() > 1e-5 * (after[k] - start[k]).norm()
            ]
        opt.detach()
    model = net(7)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(RATE)))
    model.load_state_dict(torch.load(consolidated))
    with opt.gathered():
        wrong += [f"consolidated {k}" for k, x in model.state_dict().items() if not torch.equal(x, start[k])]
    return wrong


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_goes_on_at_every_stage(tmp_path, flat):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 3)
    written(str(tmp_path), model, opt, flat)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    given = str(tmp_path), str(tmp_path / "pytorch_model.bin")
    found = [_goes_on(*given)] if flat else zf.launch(_goes_on, 2, *given, timeout=limit())
    assert found == [[]] * len(found)


def test_what_does_not_fit_is_named_at_once_and_nothing_changes(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    zero = tmp_path / "zero"
    (zero / "0.bias" / "exp_avg_sq.pt").unlink()
    torch.save(torch.zeros(2), zero / "0.weight" / "momentum_buffer.pt")
    torch.save({"param": torch.zeros(5, 3)}, zero / "2.weight" / "exp_avg.pt")
    torch.save({"param": torch.zeros(3, dtype=torch.bfloat16)}, zero / "2.bias" / "exp_avg.pt")
    (zero / "head.weight").mkdir()
    other = net(7)
    before = copy.deepcopy(other.state_dict())
    attached = zf.attach(other, zf.adamw(RATE))
    with pytest.raises(ValueError) as error:
        zf.load_deepspeed(tmp_path, like=attached)
    for words in (
        "0.bias: exp_avg_sq.pt is missing",
        "0.weight: momentum_buffer.pt is of another optimizer",
        "2.weight: exp_avg.pt is of shape (5, 3) instead of (3, 5)",
        "2.bias: exp_avg.pt is of torch.bfloat16 instead of torch.float32",
        "head.weight: is in the checkpoint and not in the model",
    ):
        assert words in str(error.value)
    assert all(torch.equal(x, before[k]) for k, x in other.state_dict().items())
    (zero / "2.bias" / "exp_avg.pt").write_bytes(b"no checkpoint")
    with pytest.raises(OSError, match=r"exp_avg.pt could not be read"):
        zf.load_deepspeed(tmp_path, like=attached)
    with pytest.raises(FileNotFoundError, match=r"no folder zero in it(?s:.*)ds_to_universal.py"):
        zf.load_deepspeed(zero, like=attached)
    with pytest.raises(TypeError, match="not attached"):
        zf.load_deepspeed(tmp_path, like=attached.state)


def _on_one_rank_alone(directory: str) -> str:
    opt = zf.attach(net(), zf.chain(zf.shard(), zf.adamw(RATE)))
    try:
        zf.load_deepspeed(directory if dist.get_rank() == 0 else f"{directory}/zero", like=opt)
    except FileNotFoundError as error:
        return str(error)
    return ""


def test_what_one_rank_does_not_find_no_rank_loads(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    assert all("no folder zero" in said for said in zf.launch(_on_one_rank_alone, 2, str(tmp_path), timeout=limit()))


@zf.leafwise(optimizer=True, needs="element")
def plain_steps(grad: torch.Tensor, param: torch.Tensor, *, lr: float) -> torch.Tensor:
    return param - lr * grad


@pytest.mark.parametrize("step", [None, 7])
def test_an_optimizer_that_keeps_no_count(tmp_path, step):
    """The count of the state, by which schedules go on, is that of the directory where it has one."""
    model = nn.Linear(2, 1, bias=False)
    opt = zf.attach(model, plain_steps(lr=0.1))
    folder = tmp_path / "zero" / "weight"
    folder.mkdir(parents=True)
    torch.save({"param": torch.ones(1, 2)}, folder / "fp32.pt")
    if step is not None:
        torch.save(torch.tensor(float(step)), folder / "step.pt")
    state = zf.load_deepspeed(tmp_path, like=opt)
    assert torch.equal(model.weight, torch.ones(1, 2)) and int(state.step) == (step or 0)


def test_a_file_without_its_tensor_is_named(tmp_path):
    model = net()
    opt = adamw(model)
    train(model, opt, 0, 1)
    written(str(tmp_path), model, opt)
    torch.save({"other": torch.ones(5)}, tmp_path / "zero" / "0.bias" / "exp_avg.pt")
    with pytest.raises(ValueError, match=r"0.bias: exp_avg.pt is a NoneType instead of \(5,\)"):
        zf.load_deepspeed(tmp_path, like=zf.attach(net(7), zf.adamw(RATE)))
