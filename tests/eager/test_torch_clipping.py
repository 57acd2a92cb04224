"""torch's own clipping of gradients that are not there is refused where it would do nothing, and right on parts."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import rank_programs as P
import torch
from gone_gradients import is_gone
from time_limits import limit
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

import zerofn as zf

CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda m: clip_grad_norm_(m.parameters(), 0.01),
    "clip_grads_with_norm_": lambda m: clip_grads_with_norm_(m.parameters(), 0.01, torch.tensor(2.0)),
    "clip_grad_value_": lambda m: clip_grad_value_(m.parameters(), 0.01),
}


def pipe(stage: int) -> zf.Transform:
    return P.pipe_of(stage, zf.sgd(1.0))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 5)


def backward(model: nn.Module) -> None:
    rank, _ = P.rank_and_size()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()


def clip(stage: int, name: str) -> Any:
    """What it says; or else, where it is right, by how much the step changes the parameters."""
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    opt = zf.attach(model, pipe(stage))
    backward(model)
    try:
        CLIPS[name](model)
    except RuntimeError as error:
        opt.step()
        opt.detach()
        return str(error)
    opt.step()
    opt.detach()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


def everything() -> dict[tuple[int, str], Any]:
    return {(stage, name): clip(stage, name) for stage in P.STAGES for name in CLIPS}


WHY = {
    0: "has left to be reduced",
    1: "is averaged over ranks later",
    2: "has left to be reduced",
}


def mean_clipped(name: str) -> list[torch.Tensor]:
    """The step of one process on the mean over ranks."""
    plain = model_of()
    before = [p.detach().clone() for p in plain.parameters()]
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    (sum(plain(x).square().mean() for x in batches) / 2).backward()
    CLIPS[name](plain)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    return [p.detach() - b for p, b in zip(plain.parameters(), before, strict=True)]


def test_refused_where_it_would_be_wrong_and_right_on_parts():
    for found in zf.launch(everything, 2, timeout=limit()):
        for (stage, name), said in found.items():
            if stage == 3:
                for got, expected in zip(said, mean_clipped(name), strict=True):
                    # fp32, sums in another order, and a difference of parameters near one.
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7, msg=name)
                continue
            assert isinstance(said, str) and WHY[stage] in said and "of the parameter weight" in said
            assert "zf.clip_by_global_norm(max_norm) for\n" in said and "max_grad_norm=0" in said
            assert "zf.clip_by_value(max_value) for clip_grad_value_" in said


def test_as_ever_where_the_gradient_is_there():
    """One process: at every stage as without zerofn."""
    for stage in P.STAGES:
        for name in CLIPS:
            plain = model_of()
            before = [p.detach().clone() for p in plain.parameters()]
            backward(plain)
            CLIPS[name](plain)
            torch.optim.SGD(plain.parameters(), lr=1.0).step()
            for got, p, b in zip(clip(stage, name), plain.parameters(), before, strict=True):
                torch.testing.assert_close(got, p.detach() - b, rtol=0, atol=0)


def norms_for_logs() -> dict[int, list[float]]:
    """What a Trainer without clipping asks for, and whether the step is that of a run in which nobody asks."""
    found = {}
    for stage in P.STAGES:
        moved = []
        for asked in (False, True):
            model = model_of()
            opt = zf.attach(model, pipe(stage))
            backward(model)
            found[stage] = [float(clip_grad_norm_(model.parameters(), math.inf))] if asked else []
            opt.step()
            opt.detach()
            moved.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *moved)), stage
    return found


def test_a_norm_that_is_asked_for_a_log_is_infinite_where_the_gradient_has_left():
    for norms in zf.launch(norms_for_logs, 2, timeout=limit()):
        assert [math.isinf(*norms[stage]) for stage in P.STAGES] == [stage in (0, 2) for stage in P.STAGES]


def edits() -> dict[tuple[int, str], str]:
    """By stage and edit, what is said where ranks would differ, or where there is nothing to edit."""
    found = {}
    for stage in P.STAGES:
        model = model_of()
        opt = zf.attach(model, pipe(stage))
        for name, edit in EDITS.items():
            backward(model)
            with torch.no_grad():
                try:
                    for p in model.parameters():
                        edit(p)
                    found[stage, name] = ""
                except RuntimeError as error:
                    found[stage, name] = str(error)
            opt.zero_grad()
        opt.detach()
    return found


EDITS: dict[str, Callable[[Any], Any]] = {
    "noise": lambda p: p.grad.add_(torch.ones_like(p)),
    "product": lambda p: p.grad.mul_(0.5),
    "mask": lambda p: p.grad.mul_(torch.ones_like(p)),
    "factor": lambda p: p.grad.mul_(torch.tensor(0.5)),
    "value": lambda p: p.grad.clamp_(min=-0.01),
    "ascent": lambda p: p.add_(p.grad),
    "asked": lambda p: p.grad.isfinite().all(),
    "copy": lambda p: copy.deepcopy(p.grad),
    "printed": lambda p: repr(p.grad),
    "optimizer": lambda p: torch.optim.Adam([p]).step(),
    "sizes": lambda p: (p.grad.shape == p.shape, p.grad.dtype, p.grad.device, p.grad.numel()),
}


def test_edits_of_gradients_are_made_or_refused():
    looks, unlike = {"printed", "sizes", "copy"}, {"factor", "value"}
    for found in zf.launch(edits, 2, timeout=limit()):
        for (stage, name), said in found.items():
            if name == "optimizer":
                wrong = "a step of torch.optim with p.grad of the parameter weight, of an attached model"
                assert (wrong in said and "and opt.step() alone" in said) if stage < 3 else not said, (stage, said)
            elif stage in (0, 2) and name not in looks:
                assert "weight, which has no numbers here\n  why:   it has left to be reduced over ranks" in said, name
            elif stage == 1 and name in unlike:
                assert "this rank's own gradient, which is averaged over ranks later" in said, name
            else:
                assert said == "", (stage, name)


def others() -> None:
    """Whoever else asks finds what there is; copies and the model after detach() are plain."""
    model = model_of()
    opt = zf.attach(model, pipe(2))
    model.weight.grad = torch.ones(5, 3)
    assert torch.equal(model.weight.grad, torch.ones(5, 3))
    del model.weight.grad
    backward(model)
    assert all(map(is_gone, model.parameters()))
    opt.step()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    twin = copy.deepcopy(model)
    for p in (*twin.parameters(), *opt.detach().parameters()):
        assert type(p) is nn.Parameter
        assert not {"why", "unreduced"} & vars(p).keys()
    backward(twin)
    assert clip_grad_norm_(twin.parameters(), 1.0) > 0


def test_others_are_not_disturbed():
    zf.launch(others, 2, timeout=limit())
