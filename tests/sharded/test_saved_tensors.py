"""Hooks for saved tensors that stand around the calls of a sharded model: a checkpoint, save_on_cpu, another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rank_programs as P
import torch
from time_limits import limit
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from units_alive import UnitsAlive

import zerofn as zf

BLOCKS = 3


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(BLOCKS)))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.blocks(x)


class Counted:
    """Hooks of the user's, which change the tensors' place and count them."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def pack(self, t: Tensor) -> list[Tensor]:
        self.packed += 1
        return [t.clone()]

    def unpack(self, held: list[Tensor]) -> Tensor:
        self.unpacked += 1
        return held[0]


def counting(call: Callable[[Tensor], Tensor], x: Tensor, found: dict[str, Any]) -> Tensor:
    hooks = Counted()
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        out = call(x)
    out.square().mean().backward()
    found["packed"], found["unpacked"] = hooks.packed, hooks.unpacked
    return out


def checkpointed(call: Callable[[Tensor], Tensor], x: Tensor, found: dict[str, Any]) -> Tensor:
    out: Any = checkpoint(call, x, use_reentrant=False)
    out.square().mean().backward()
    return out


def twice_checkpointed(call: Callable[[Tensor], Tensor], x: Tensor, found: dict[str, Any]) -> Tensor:
    """A checkpoint inside of a checkpoint."""
    inner = lambda y: checkpoint(call, y, use_reentrant=False)  # noqa: E731
    out: Any = checkpoint(inner, x, use_reentrant=False)
    out.square().mean().backward()
    return out


def on_cpu(call: Callable[[Tensor], Tensor], x: Tensor, found: dict[str, Any]) -> Tensor:
    with save_on_cpu():
        out = call(x)
    out.square().mean().backward()
    return out


WAYS = (counting, checkpointed, twice_checkpointed, on_cpu)


def one(how: Callable[..., Tensor], tx: zf.Transform | None) -> dict[str, Any]:
    rank, _ = P.rank_and_size()
    model = CountsCalls()
    opt = zf.attach(model, tx) if tx is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    alive = None if tx is None else UnitsAlive(opt)
    found: dict[str, Any] = {}
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    found["out"] = how(model, x, found).detach()
    found["x.grad"], found["runs"] = x.grad, model.runs
    if alive is None:
        found |= {n: p.grad for n, p in model.named_parameters()}
    else:
        found["most"] = alive.most
        before = {n: p.detach().clone() for n, p in CountsCalls().named_parameters()}
        opt.step()
        opt.detach()
        found |= {n: (before[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}
    return found


def both() -> dict[tuple[str, str], dict[str, Any]]:
    pipes = {
        "plain": lambda: None,
        "shard": lambda: zf.chain(zf.shard(), zf.sgd(0.1)),
        "scaled": lambda: zf.chain(zf.shard(), zf.scale_loss(64.0), zf.sgd(0.1)),
    }
    return {(how.__name__, pipe): one(how, make()) for how in WAYS for pipe, make in pipes.items()}


def test_hooks_around_a_call_act_inside_of_it():
    ranks = zf.launch(both, 2, timeout=limit())
    for how in (f.__name__ for f in WAYS):
        for pipe in ("shard", "scaled"):
            for found in ranks:
                got, plain = found[how, pipe], found[how, "plain"]
                assert got["runs"] == plain["runs"] == (2 if "checkpointed" in how else 1)
                # All but the parameters: those are gathered again.
                if how == "counting":
                    assert got["packed"] >= plain["packed"] - BLOCKS > 0
                    assert got["unpacked"] == got["packed"]
                assert got["most"] <= 2
                torch.testing.assert_close(got["out"], plain["out"])
                torch.testing.assert_close(got["x.grad"], plain["x.grad"])
                for n, _ in CountsCalls().named_parameters():
                    want = sum(r[how, "plain"][n] for r in ranks) / len(ranks)
                    # The change of a parameter near 0.4 over a rate of 0.1, in fp32.
                    torch.testing.assert_close(got[n], want, rtol=1e-4, atol=2e-6)
                    assert want.norm() > 0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.own(x @ weight)) @ weight


class Outer(nn.Module):
    """Calls another model with a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]
        self.weight = nn.Parameter(torch.eye(6) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x, self.weight)


def nested(sharded: bool) -> list[Tensor]:
    """Gradients of all parameters: of plain modules, or as the step shows them."""
    torch.manual_seed(0)
    inner = Inner()
    models = (inner, Outer(inner))
    before = [p.detach().clone() for m in models for p in m.parameters()]
    opts = [zf.attach(m, zf.chain(zf.shard(), zf.sgd(1.0))) for m in models if sharded]
    models[1](torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean().backward()
    for opt in opts:
        opt.step()
        opt.detach()
    params = [p for m in models for p in m.parameters()]
    return [b - p.detach() if sharded else p.grad for b, p in zip(before, params, strict=True)]  # type: ignore[misc]


def test_a_sharded_model_inside_of_another():
    want = nested(sharded=False)
    for found in zf.launch(nested, 2, True, timeout=limit()):
        for got, expected in zip(found, want, strict=True):
            # A difference of numbers near 0.5, in fp32.
            assert expected.norm() > 0 and (got - expected).abs().max() < 1e-6
