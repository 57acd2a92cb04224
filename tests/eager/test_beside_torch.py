"""What torch has for several ranks beside an attached model: right where it can be, refused where it would be wrong."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofn as zf

LR = 0.1


def pipe(stage: int) -> zf.Transform:
    return P.pipe_of(stage, zf.sgd(LR))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    # As many outputs as ranks, so that parts have equal shapes.
    return nn.Linear(4, 2)


def said(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def wrapped() -> dict[Any, Any]:
    rank, _ = P.rank_and_size()
    # Makes the group that the wrappers of torch take.
    mesh = init_device_mesh("cpu", (2,))
    found: dict[Any, Any] = {}
    for stage in P.STAGES:
        found["attach(ddp)", stage] = said(
            lambda s=stage: zf.attach(nn.Sequential(DistributedDataParallel(model_of())), pipe(s))
        )
        model = model_of()
        opt = zf.attach(model, pipe(stage))

        def train(model: nn.Module = model, opt: Any = opt) -> None:
            ddp = DistributedDataParallel(model)
            ddp(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
            opt.step()

        found["ddp(attached)", stage] = said(train)
        opt.detach()
        found["after", stage] = [p.detach() for p in model.parameters()]
        DistributedDataParallel(model)
    # Without a reduction in the pipeline it is the wrapper that reduces.
    ddp = DistributedDataParallel(model_of())
    opt = zf.attach(ddp, zf.chain(zf.scale_loss(64.0), zf.sgd(LR)))
    ddp(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    opt.step()
    found["alone"] = [p.detach() for p in ddp.parameters()]
    sharded = model_of()
    fully_shard(sharded, mesh=mesh)
    found["fsdp"] = [said(lambda tx=tx: zf.attach(sharded, tx)) for tx in (pipe(3), zf.chain(zf.sgd(LR)))]
    return found


def both() -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrapped()


def test_other_wrappers():
    plain = model_of()
    begun = [p.detach() for p in model_of().parameters()]
    for rank in range(2):
        (plain(torch.ones(2, 4) * (rank + 1)).square().sum() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    for found in zf.launch(both, 2, timeout=limit()):
        for stage in P.STAGES:
            assert "<root>" not in found["attach(ddp)", stage]
            assert (
                "0: DistributedDataParallel\n  write: zf.attach(model, tx) on the model itself"
                in found["attach(ddp)", stage]
            )
            # Averaged twice is averaged once; but parts of different places have no average.
            told = found["ddp(attached)", stage]
            assert ("doesn't have any parameter" in told) == (stage == 3) and bool(told) == (stage == 3)
            for got, p, b in zip(found["after", stage], plain.parameters(), begun, strict=True):
                torch.testing.assert_close(got - b, torch.zeros_like(b) if stage == 3 else p.detach() - b)
        for got, p in zip(found["alone"], plain.parameters(), strict=True):
            torch.testing.assert_close(got, p.detach())
        # A chain that reduces nothing is FSDP2's to run.
        told, nothing = found["fsdp"]
        assert "shard in the chain, and a model of fully_shard" in told and "before fully_shard" in told and not nothing


class Rows(nn.Embedding):
    """Sparse gradients of no `nn.Embedding(sparse=True)`, which `zf.attach` would know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


def sparse() -> list[str]:
    found = []
    # Under ZeRO-3 any gradient is made dense where it is reduced.
    for stage in [stage for stage in P.STAGES if "shard" not in str(pipe(stage))]:
        torch.manual_seed(0)
        model = nn.Sequential(Rows(10, 4), nn.Linear(4, 2))
        opt = zf.attach(model, pipe(stage))

        def train(model: nn.Module = model, opt: Any = opt) -> None:
            model(torch.tensor([1, 2, 3])).sum().backward()
            opt.step()

        found.append(said(train))
    return found


def test_sparse_gradients_are_refused_by_path():
    for found in zf.launch(sparse, 2, timeout=limit()):
        for told in found:
            assert (
                "0.weight: a gradient of layout torch.sparse_coo; make it dense: nn.Embedding(..., sparse=False)"
                in told
            )


def with_scaler(model: nn.Module, opt: torch.optim.Optimizer, unscale: bool = False) -> list[torch.Tensor]:
    """What `torch.amp.GradScaler` makes of three steps, the second of which overflows."""
    rank, _ = P.rank_and_size()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
    for step in range(3):
        # Scaled by 2 to the 120 the gradient of a loss of 2 to the 10 does not fit into fp32.
        loss = model(torch.ones(2, 4) * (rank + 1)).square().sum() * (2.0**10 if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def sharing(model: nn.Module, opt: Any) -> None:
    with opt.gathered():
        shared = copy.deepcopy(model).share_memory()
        assert all(type(p) is nn.Parameter and p.is_shared() for p in shared.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    model.share_memory()
    opt.step()


class Calls(torch.utils.data.Dataset):
    def __init__(self, model: nn.Module):
        self.model = model

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.ones(4))


def in_a_worker(model: nn.Module, opt: Any) -> None:
    """gloo has no threads in a forked process, where a gather would never end."""
    (got,) = torch.utils.data.DataLoader(Calls(model), num_workers=1, multiprocessing_context="fork")
    torch.testing.assert_close(got[0], model_of()(torch.ones(4)))


REFUSED = {
    "scaler.step": (with_scaler, "torch.amp.GradScaler with a pipeline over ranks", 'zf.scale_loss("dynamic")'),
    "scaler.unscale_": (
        lambda model, opt: with_scaler(model, opt, unscale=True),
        "",  # at one stage it is the step that is refused
        'zf.scale_loss("dynamic")',
    ),
    "share_memory": (sharing, "memory", "with opt.gathered(): "),
    "a worker": (in_a_worker, "in a child of a rank's process", "with opt.gathered(): "),
}


def refused() -> dict[Any, str]:
    found = {}
    for name, (program, *_) in REFUSED.items():
        for stage in P.STAGES:
            model = model_of()
            found[name, stage] = said(lambda m=model, s=stage, p=program: p(m, zf.attach(m, pipe(s))))
    return found


def test_what_is_refused_over_ranks():
    for found in zf.launch(refused, 2, timeout=limit()):
        for (name, stage), told in found.items():
            _, wrong, right = REFUSED[name]
            # Without shard a forward gathers nothing.
            right_there = not told if name == "a worker" and stage != 3 else wrong in told and right in told
            assert right_there, (name, stage, told)


def test_a_grad_scaler_is_refused_with_updates_within_backward():
    model = model_of()
    told = said(lambda: with_scaler(model, zf.attach(model, zf.chain(zf.sgd(LR)), in_backward=True)))
    assert "torch.amp.GradScaler with in_backward=True" in told and "without in_backward" in told


def test_a_grad_scaler_on_one_process():
    plain, model = model_of(), model_of()
    # A power of two: torch fuses the product of a rate with a sum on some processors.
    want = with_scaler(plain, torch.optim.SGD(plain.parameters(), lr=0.125))
    got = with_scaler(model, zf.attach(model, zf.chain(zf.sgd(0.125))))
    begun = [p.detach() for p in model_of().parameters()]
    for g, w, b in zip(got, want, begun, strict=True):
        assert not torch.equal(w, b)
        torch.testing.assert_close(g - b, w - b, rtol=0, atol=0)


def with_evaluation(who: int | None, stages: tuple[int, ...]) -> dict[int, Any]:
    """By stage: parameters after five steps, and what one rank saw in evaluations of its own in between."""
    rank, _ = P.rank_and_size()
    found = {}
    for stage in stages:
        model = P.make()
        opt = zf.attach(model, pipe(stage))
        seen: list[torch.Tensor] = []

        def evaluate(model: nn.Module = model, seen: list[torch.Tensor] = seen) -> None:
            with torch.no_grad():
                seen.append(model(P.batch(0, 9)[0]))

        for step in range(5):
            for _ in range(3 if rank == who and step in (1, 2, 4) else 0):
                evaluate()
            x, y = P.batch(rank, step)
            ((model(x, "ab"[rank % 2]) - y) ** 2).mean().backward()
            if rank == who and step == 3:
                evaluate()
            opt.step()
            opt.zero_grad()
        opt.detach()
        found[stage] = [p.detach() for p in model.parameters()], seen
    return found


@pytest.mark.parametrize(
    ("size", "who", "stages"),
    [(2, 0, (0, 3)), *(pytest.param(*x, P.STAGES, marks=pytest.mark.slow) for x in ((2, 0), (3, 1)))],
)
def test_an_evaluation_on_one_rank_between_steps(size: int, who: int, stages: tuple[int, ...]):
    """Ranks that gather nothing, and those that gather for every call."""
    plain, found = (zf.launch(with_evaluation, size, w, stages, timeout=limit()) for w in (None, who))
    for stage in stages:
        outputs = found[who][stage][1]
        assert len(outputs) == 10 and torch.equal(outputs[0], outputs[2])
        # Those of stage 0, which gathers nothing.
        assert all((a - b).abs().max() < 1e-13 for a, b in zip(outputs, found[who][0][1], strict=True))
        for got, want in zip(found, plain, strict=True):
            for p, q in zip(got[stage][0], want[stage][0], strict=True):
                # Ranks that are not in step send their gradients one by one: another order of sums.
                assert p.numel() == 0 or (p - q).abs().max() < 1e-14


class Marked(nn.Parameter):
    """A class of the user's, with something of its own."""

    def doubled(self) -> torch.Tensor:
        return 2 * self


def marked() -> None:
    for stage in P.STAGES:
        model = model_of()
        model.weight = Marked(model.weight.detach())
        plain = copy.deepcopy(model)
        opt = zf.attach(model, pipe(stage))
        # Where parameters are sharded the model has DTensors in their places, as under FSDP2.
        if stage == 3 and P.rank_and_size()[1] > 1:
            assert not isinstance(model.weight, Marked)
            assert opt.detach() is model and type(model.weight) is Marked
            continue
        assert isinstance(model.weight, Marked)
        if stage < 3:
            assert type(copy.deepcopy(model).weight) is Marked
        for m in (model, plain):
            loss = m(torch.ones(2, 4)).square().sum() + m.weight.norm() + m.weight.doubled().sum()
            loss.backward()
        opt.step()
        assert opt.detach() is model and type(model.weight) is Marked and not vars(model.weight)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(q.detach() - p.detach(), LR * q.grad)


def test_parameters_of_a_class_of_the_users():
    zf.launch(marked, 2, timeout=limit())
