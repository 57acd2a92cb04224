"""`zf.load(..., strict=False)`: into a chain that has changed, against runs that had the chain from the start."""

from typing import Any

import pytest
import torch
from stages import around
from time_limits import limit
from torch import nn

import zerofn as zf

ADAMW = zf.adamw(1e-2)


def net(seed: int = 0, last: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, last))


def train(model: nn.Module, opt: zf.Optimizer, first: int, last: int) -> None:
    for i in range(first, last):
        model(torch.randn(6, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _changed(stage: str, folder: str) -> dict[str, Any]:
    first = around(stage)
    model, other = net(), net(5)
    old = zf.attach(model, zf.chain(*first, ADAMW))
    train(model, old, 0, 3)
    zf.save(folder, old)
    # A clip that never clips, so that the numbers are those of the run without.
    new = zf.attach(other, zf.chain(*first, zf.clip_by_global_norm(1e9), ADAMW, zf.ema(0.5)))
    with pytest.raises(ValueError, match=r"ema/average/0\.weight: missing"):
        zf.load(folder, new)
    state, report = zf.load(folder, new, strict=False)
    average = {p: x.clone() for p, x in state.transforms["ema"]["average"].items()}
    begins = all(torch.equal(x, state.leaves[p]) for p, x in average.items())
    train(model, old, 3, 5)
    train(other, new, 3, 5)
    same = all(torch.equal(x, new.state.leaves[p]) for p, x in old.state.leaves.items())
    buffers = all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    # Back to the shorter chain.
    zf.save(folder, new)
    shorter, left = zf.load(folder, old, strict=False)
    back = all(torch.equal(x, new.state.leaves[p]) for p, x in shorter.leaves.items())
    old.detach()
    new.detach()
    return {"report": report, "left": left, "ok": (begins, same, buffers, back)}


def _expect(found: dict[str, Any]) -> None:
    assert found["ok"] == (True, True, True, True)
    paths = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    report, left = found["report"], found["left"]
    assert list(report.made_anew) == [f"ema/average/{p}" for p in paths]
    assert set(report.made_anew.values()) == {"missing: the checkpoint does not have it"}
    assert not report.left_out and "adamw/exp_avg/0.weight" in report.loaded and "step" in report.loaded
    assert sorted(left.left_out) == sorted(report.made_anew) and not left.made_anew


def test_a_clip_and_an_average_are_added_and_taken_away(tmp_path: Any):
    _expect(_changed("one process", str(tmp_path)))


@pytest.mark.parametrize("stage", ["ZeRO-2", "ZeRO-3"])
def test_so_on_two_ranks(stage: str, tmp_path: Any):
    for found in zf.launch(_changed, 2, stage, str(tmp_path), timeout=limit()):
        _expect(found)


def test_a_leaf_of_another_shape_is_made_anew_with_all_that_is_kept_of_it(tmp_path: Any):
    model, other = net(), net(5, last=3)
    old, new = zf.attach(model, ADAMW), zf.attach(other, ADAMW)
    train(model, old, 0, 3)
    zf.save(tmp_path, old)
    before = other[2].weight.detach().clone()
    state, report = zf.load(tmp_path, new, strict=False)
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[2].weight, before)
    own = state.transforms["adamw"]
    assert int(own["count"]["0.weight"]) == 3 and int(own["count"]["2.weight"]) == 0
    assert not own["exp_avg"]["2.weight"].any() and own["exp_avg"]["2.weight"].shape == (3, 4)
    assert report.made_anew["params/2.weight"] == "shape (2, 4) in the checkpoint, (3, 4) here"
    assert report.made_anew["adamw/count/2.weight"] == "adamw/exp_avg/2.weight is, which belongs to it"
    assert "made anew: adamw/count/2.weight (adamw/exp_avg/2.weight is" in str(report)


def test_another_optimizer_is_made_anew(tmp_path: Any):
    params = {"w": torch.ones(3), "b": torch.ones(2)}
    zf.save(tmp_path, zf.update(ADAMW, params, zf.init(ADAMW, params))[0])
    tx = zf.sgd(0.1, momentum=0.9)
    like = zf.init(tx, {k: torch.zeros_like(x) for k, x in params.items()})
    state, report = zf.load(tmp_path, like, strict=False, tx=tx)
    assert torch.allclose(state.params["w"], torch.full((3,), 0.99 - 1e-4)) and int(state.step) == 1
    assert not like.params["w"].any() and {k.split("/")[0] for k in report.made_anew} == {"sgd"}
    assert {k.split("/")[0] for k in report.left_out} == {"adamw"}
