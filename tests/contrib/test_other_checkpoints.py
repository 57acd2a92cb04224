"""Runs that others have begun go on here, and ours with them: FSDP2, and full optimizer states of sharded pipelines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stages import FIRST
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import zerofn as zf

RATE, DECAY = 1e-2, 0.1
FULL = StateDictOptions(full_state_dict=True)
AT_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def net(seed: int = 0) -> nn.Module:
    """Leaves that neither rows nor elements of which two ranks share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
    for i in range(first, last):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)


def attached(stage: str, seed: int = 0, state: Any = None) -> tuple[nn.Module, zf.Optimizer]:
    model = net(seed)
    if state is not None:
        model.load_state_dict(state)
    return model, zf.attach(model, zf.chain(FIRST[stage](), zf.adamw(RATE, weight_decay=DECAY)))


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Parameters, moments and counts by name."""
    if isinstance(opt, zf.Optimizer):
        with opt.gathered():
            params = {k: x.clone() for k, x in model.state_dict().items()}
    else:
        params = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, opt, options=FULL)["state"]
    return params | {f"{path}/{k}": x.clone() for path, own in state.items() for k, x in own.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [k for k in a.keys() | b.keys() if k not in a or k not in b or not torch.equal(a[k], b[k])]


def far(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> list[str]:
    """What has not changed alike: two kernels of Adam round their tails otherwise, by about 1e-7 of a change."""
    return [k for k in a if (a[k] - b[k]).norm() > 1e-5 * (a[k] - start[k]).norm()]


def _from_fsdp(folder: str) -> dict[str, list[str]]:
    straight = net()
    fully_shard(straight)
    optimizer = adamw(straight)
    train(straight, optimizer, 0, 3)
    for group in optimizer.param_groups:
        group["lr"] = RATE / 2
    start = whole(straight, optimizer)
    params = get_model_state_dict(straight, options=FULL)
    # Counts are the optimizer's own tensors.
    full = copy.deepcopy(get_optimizer_state_dict(straight, optimizer, options=FULL))
    parts = copy.deepcopy(get_optimizer_state_dict(straight, optimizer))
    dcp.save({"optimizer": parts, "model": get_model_state_dict(straight)}, checkpoint_id=f"{folder}/dcp")
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/dcp", f"{folder}/whole.pt")
    dist.barrier()
    train(straight, optimizer, 3, 4)
    after, wrong = whole(straight, optimizer), {}
    for stage in FIRST:
        for way in ("full", "parts", "first", "dcp"):
            stored = torch.load(f"{folder}/whole.pt") if way == "dcp" else None
            model, opt = attached(stage, 7, stored["model"] if stored else params)
            if stored:
                opt.load_state_dict(stored["optimizer"])
            elif way == "parts":
                set_optimizer_state_dict(model, opt, copy.deepcopy(parts))
            else:
                given = full if way == "full" or dist.get_rank() == 0 else {}
                set_optimizer_state_dict(
                    model, opt, copy.deepcopy(given), options=FULL if way == "full" else FROM_FIRST
                )
            bad = same(whole(model, opt), start)
            bad += [] if opt.param_groups[0]["lr"] == RATE / 2 and int(opt.state.step) == 3 else ["numbers"]
            train(model, opt, 3, 4)
            wrong[f"{stage} {way}"] = bad + far(after, whole(model, opt), start)
            opt.detach()
    return wrong


@pytest.mark.filterwarnings("ignore:.*torch.distributed", "ignore:TypedStorage is deprecated")
def test_fsdp2_goes_on_here(tmp_path):
    """From full and sharded state dicts, from those of the first rank alone, and from a directory of torch's."""
    for wrong in zf.launch(_from_fsdp, 2, str(tmp_path), timeout=limit()):
        assert len(wrong) == 12 and not any(wrong.values()), wrong


def _to_others() -> dict[str, list[str]]:
    wrong = {}
    for stage in FIRST:
        straight, opt = attached(stage)
        train(straight, opt, 0, 3)
        start = whole(straight, opt)
        with opt.gathered():
            params = copy.deepcopy(straight.state_dict())
        full = copy.deepcopy(get_optimizer_state_dict(straight, opt, options=FULL))
        alone = copy.deepcopy(get_optimizer_state_dict(straight, opt, options=AT_FIRST))
        assert bool(alone.get("state")) is (dist.get_rank() == 0)
        train(straight, opt, 3, 4)
        after = whole(straight, opt)
        model = net(7)
        fully_shard(model)
        other = adamw(model)
        set_model_state_dict(model, copy.deepcopy(params), options=FULL)
        set_optimizer_state_dict(model, other, copy.deepcopy(full), options=FULL)
        bad = same(whole(model, other), start)
        train(model, other, 3, 4)
        wrong[f"{stage} to FSDP2"] = bad + far(after, whole(model, other), start)
        for target in FIRST:
            model, other = attached(target, 7, params)
            set_optimizer_state_dict(model, other, copy.deepcopy(alone), options=FROM_FIRST)
            bad = same(whole(model, other), start)
            bad += [] if int(other.state.step) == 3 else ["numbers"]
            train(model, other, 3, 4)
            # Between stages bits differ at the ends of parts.
            wrong[f"{stage} to {target}"] = bad + far(after, whole(model, other), start)
            other.detach()
        opt.detach()
    return wrong


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_full_states_go_on_elsewhere():
    for wrong in zf.launch(_to_others, 2, timeout=limit()):
        assert len(wrong) == 12 and not any(wrong.values()), wrong


def _at_owners() -> tuple[bool, list[str]]:
    """Whole matrices at owners, a schedule and a loss scale beside; in the middle of a window there is no whole."""
    labels = lambda path: "matrix" if path.endswith("weight") else "rest"  # noqa: E731
    optimizer = zf.partition({"matrix": zf.muon(zf.schedules.cosine(RATE, 9)), "rest": zf.adamw(RATE)}, labels)
    tx = zf.chain(zf.shard(), zf.scale_loss(8.0), optimizer)
    straight = net()
    opt = zf.attach(straight, tx)
    train(straight, opt, 0, 3)
    with opt.gathered():
        params = copy.deepcopy(straight.state_dict())
    full = copy.deepcopy(get_optimizer_state_dict(straight, opt, options=FULL))
    model = net(7)
    model.load_state_dict(params)
    other = zf.attach(model, tx)
    set_optimizer_state_dict(model, other, full, options=FULL)
    train(straight, opt, 3, 6)
    train(model, other, 3, 6)
    equal = not same(whole(model, other), whole(straight, opt))
    model = net()
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.adamw(RATE)))
    messages = []
    for step in range(2):
        train(model, opt, step, step + 1)
        try:
            given = get_optimizer_state_dict(model, opt, options=AT_FIRST)
            other = net()
            into = zf.attach(other, zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.adamw(RATE)))
            set_optimizer_state_dict(other, into, copy.deepcopy(given), options=FROM_FIRST)
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return equal, messages


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_full_states_of_owners_and_of_windows():
    for equal, (within, after) in zf.launch(_at_owners, 2, timeout=limit()):
        assert equal and not after
        assert "opt.state_dict() in the middle of a window" in within and "opt.is_boundary" in within


def test_names_and_not_their_order_tell_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    opt = zf.attach(model, zf.adamw(RATE))
    names = [name for name, _ in model.named_parameters()]
    state = {
        name: {"step": torch.tensor(2.0), "exp_avg": torch.full_like(p, i), "exp_avg_sq": torch.full_like(p, -i)}
        for i, (name, p) in enumerate(model.named_parameters())
    }
    opt.load_state_dict({"state": state, "param_groups": [{"lr": RATE, "params": names[::-1]}]})
    for i, p in enumerate(model.parameters()):
        assert (opt.state[p]["exp_avg"] == i).all() and (opt.state[p]["exp_avg_sq"] == -i).all()
    assert int(opt.state.step) == 2
