"""What a user reads of an attached model's state_dict, writes into masters and gradients, or clears, at every stage."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

LR = 0.1
BF16 = torch.bfloat16


def pipe(stage: int, *middle: zf.Transform) -> zf.Transform:
    return P.pipe_of(stage, zf.sgd(LR), middle)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.BatchNorm1d(2))


def others_weights() -> dict[str, Tensor]:
    """Of a checkpoint: numbers that bf16 and fp16 have, since a copy in 16 bits takes no others."""
    torch.manual_seed(1)
    # Multiples of 1/64 below 4 are numbers of either format.
    found = model_of().state_dict()
    return {
        n: torch.randint(1, 64, t.shape).to(t.dtype).div_(64) if t.is_floating_point() else t for n, t in found.items()
    }


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def loss_of(model: nn.Module) -> Tensor:
    return model(X).square().mean() + model(X).sum()


@torch.no_grad()
def by_copy(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.5)


def masters() -> list[Tensor]:
    """Stored parameters where one element of the copy was written, after a step of which the masters need every bit."""
    found = []
    for stage in (0, 2):
        model = model_of()
        opt = zf.attach(model, pipe(stage, zf.precision(param_dtype=BF16, output_dtype=torch.float32)))
        loss_of(model).backward()
        opt.step()
        before = zf.full_params(opt.tx, opt.state)["0.weight"].clone()
        next(model.parameters()).data[1, 2] = 7.0
        after = zf.full_params(opt.tx, opt.state)["0.weight"].clone()
        assert not torch.equal(before, before.to(BF16).float())
        assert (after[1, 2] == 7.0).all() and int((after != before).sum()) == 1
        found.append(after)
    return found


def test_masters_of_other_elements_keep_every_bit():
    zf.launch(masters, 2, timeout=limit())


def graph_from_before() -> None:
    """As in plain torch, where the version of a saved tensor tells; a change through `.data` tells nobody there."""
    model = model_of()
    opt = zf.attach(model, pipe(3))
    loss = loss_of(model)
    by_copy(model)
    with pytest.raises(RuntimeError, match=r"before opt.step\(\) or a change by hand, or the forward again"):
        loss.backward()
    opt.zero_grad()
    seen = loss_of(model)
    assert all(p.data.numel() >= 0 for p in model.parameters())
    seen.backward()
    opt.step()


def test_backward_of_a_graph_from_before_the_writing():
    zf.launch(graph_from_before, 2, timeout=limit())


def saving(folder: str) -> None:
    rank, _ = P.rank_and_size()
    model = model_of()
    opt = zf.attach(model, pipe(3))
    ways: list[Callable[[Any], Any]] = [
        lambda d: torch.save(d, io.BytesIO()),
        lambda d: torch.save({"epoch": 1, "model": d}, io.BytesIO()),
        lambda d: torch.save({n: t.cpu() for n, t in d.items()}, io.BytesIO()),
        lambda d: torch.save({n: t.half().contiguous() for n, t in d.items()}, io.BytesIO()),
        lambda d: torch.save(copy.deepcopy(d), io.BytesIO()),
        lambda d: pickle.dumps(d),
        lambda d: {n: t.numpy() for n, t in d.items()},
    ]
    for save in ways:
        for found in (model.state_dict(), model.state_dict(keep_vars=True) if save is ways[0] else model.state_dict()):
            with pytest.raises(RuntimeError, match=r"this rank.s shards.*\n.*with opt.gathered\(\)"):
                save(found)
    with opt.gathered():
        torch.save(model.state_dict(), Path(folder) / f"{rank}.pt")
    read = torch.load(Path(folder) / f"{rank}.pt")
    want = model_of().state_dict()
    assert read.keys() == want.keys() and all(torch.equal(read[n], want[n]) for n in want)
    # Looking at parts disturbs nobody, and buffers are no parts.
    parts = model.state_dict()
    assert "Face" in repr(parts["0.weight"]) and float(parts["0.weight"].to_local().abs().sum()) > 0
    assert type(parts["3.running_mean"]) is Tensor and type(parts["0.weight"] + 1.0) is not nn.Parameter
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict({**want, "0.weight": torch.ones(4, 4)})
    with opt.gathered():
        model.load_state_dict(others_weights())
    opt.detach()
    assert all(torch.equal(t, others_weights()[n]) for n, t in model.state_dict().items())
    torch.save(model.state_dict(), io.BytesIO())


def test_parts_are_not_saved_for_the_whole(tmp_path: Path):
    zf.launch(saving, 2, str(tmp_path), timeout=limit())


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def clearing() -> None:
    for stage in P.STAGES:
        model = model_of()
        opt = zf.attach(model, pipe(stage))
        # Before a backward, and after a step, both are what they are in plain torch.
        model.zero_grad()
        loss_of(model).backward()
        if stage in (0, 2):
            with pytest.raises(
                RuntimeError, match=r"model.zero_grad\(\), or p.grad = None, after a.*\n.*\n  write: opt.zero_grad"
            ):
                model.zero_grad()
            with pytest.raises(RuntimeError, match=r"p.grad = None, after a backward"):
                clear(model)
            with pytest.raises(RuntimeError, match=r"del p.grad after a backward"):
                del next(model.parameters()).grad
            opt.zero_grad()
        else:
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        loss_of(model).backward()
        opt.step()
        model.zero_grad()
        clear(model)
        del next(model.parameters()).grad


def test_gradients_that_have_left_are_cleared_by_the_optimizer():
    zf.launch(clearing, 2, timeout=limit())


def gradients_by_hand(size: int, sharded: bool) -> dict[Any, list[Tensor]]:
    """Gradients that the user computed and put in place: changes of the parameters by a step with them."""
    out: dict[Any, list[Tensor]] = {}
    rank, _ = P.rank_and_size()
    for stage in P.STAGES if sharded else ("plain",):
        model = model_of()
        opt: Any = zf.attach(model, pipe(stage)) if isinstance(stage, int) else torch.optim.SGD(model.parameters(), LR)
        for step in range(2):
            params = list(model.parameters())
            total: list[Tensor] = []
            for r in (rank,) if sharded else range(size):
                grads = torch.autograd.grad(model(X + r + step).square().mean(), params)
                total = [
                    a + b / (1 if sharded else size) for a, b in zip(total or [torch.zeros(())] * 6, grads, strict=True)
                ]
            for p, g in zip(params, total, strict=True):
                p.grad = g
            opt.step()
            opt.zero_grad()
        if sharded:
            opt.detach()
        out[stage] = [p.detach() - b.detach() for p, b in zip(model.parameters(), model_of().parameters(), strict=True)]
    return out


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_put_in_place_by_hand(size: int):
    plain = gradients_by_hand(size, False)["plain"]
    for found in zf.launch(gradients_by_hand, size, size, True, timeout=limit()):
        for stage, got in found.items():
            for g, want in zip(got, plain, strict=True):
                # Before a batch norm a bias has a gradient of zero, up to rounding.
                assert (g - want).norm() <= 1e-5 * max(want.norm(), 0.1), stage


def replaced() -> None:
    for stage in (0, 2):
        model = model_of()
        opt = zf.attach(model, pipe(stage))
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match=r"p.grad = g after a backward.*\n.*have left.*\n  write: opt.zero_grad"):
            next(model.parameters()).grad = torch.ones(5, 3)
        opt.step()


def test_gradients_that_have_left_are_not_replaced():
    zf.launch(replaced, 2, timeout=limit())
