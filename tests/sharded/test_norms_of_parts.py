"""Norms of parts: the number of the whole, under FSDP2's spelling too; plain tensors in logs, copies and files."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from time_limits import limit
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import zerofn as zf

WAYS = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_, one by one": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "clip_grad_norm_, largest": lambda model: clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "get_total_norm": lambda model: get_total_norm([p.grad for p in model.parameters()]),
    "norm of a gradient": lambda model: model[0].weight.grad.norm(),
    "vector_norm": lambda model: torch.linalg.vector_norm(model[0].weight.grad, 3.0),
    "foreach": lambda model: torch._foreach_norm([p.grad for p in model.parameters()])[1],
    "norm of norms": lambda model: torch.stack([p.grad.norm().to("cpu") for p in model.parameters()]).norm(),
    "of values": lambda model: model[2].weight.data.norm(),
    "of a parameter": lambda model: torch.no_grad()(torch.linalg.norm)(model[0].weight),
}
LOGGED = {
    "fixed": lambda n: f"{n:.3f}",
    "printed": lambda n: f"{n} {n!r}",
    "item": lambda n: n.item(),
    "product": lambda n: (n * 2).tolist(),
    "quotient": lambda n: torch.clamp(0.5 / (n + 1e-6), max=1.0).item(),
    "copied": lambda n: type(copy.deepcopy(n)) is Tensor and copy.deepcopy(n).item(),
    "saved": lambda n: saved(n).item(),
    "added": lambda n: torch.zeros(()).add_(n).item(),
    "compiled": lambda n: torch.compile(lambda x: x * 3, backend="eager")(n).item(),
}


def saved(n: Tensor) -> Any:
    torch.save(n, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 6).view(2, 3)).square().mean().backward()


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def attached() -> tuple[dict[str, Any], dict[str, Any], bool]:
    model = model_of()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    found = {}
    for name, way in WAYS.items():
        backward(model)
        norm = way(model)
        found[name] = (norm.item(), norm.full_tensor().item(), type(norm.full_tensor()) is Tensor)
    norm = model[0].weight.grad.norm()
    logged = {name: write(norm) for name, write in LOGGED.items()}
    # What is scaled by a norm is a part as before.
    scaled = model[0].weight.grad / norm
    whole = model[0].weight.grad.full_tensor()
    alike = torch.equal(scaled.full_tensor(), whole / norm.full_tensor()) and scaled.to_local().numel() < whole.numel()
    alike = alike and torch.equal((norm * model[0].weight.grad).full_tensor(), whole * norm.full_tensor())
    # Of what has a graph the norm is differentiable, and as torch gives it.
    penalty = model[0].weight.norm()
    alike = alike and type(penalty) is Tensor and penalty.requires_grad
    opt.detach()
    return found, logged, alike


def test_full_tensor_of_a_norm_is_the_number():
    plain = model_of()
    want = {name: (backward(plain), way(plain).item())[1] for name, way in WAYS.items()}
    norm = plain[0].weight.grad.norm()
    for found, logged, alike in zf.launch(attached, 2, timeout=limit()):
        for name, (number, full, is_plain) in found.items():
            torch.testing.assert_close(number, want[name], rtol=1e-5, atol=1e-7, msg=lambda m, at=name: f"{at}: {m}")
            assert full == number and is_plain, name
        for name, write in LOGGED.items():
            text = write(norm)
            if isinstance(text, str):
                assert logged[name][:6] == text[:6] and "Norm" not in logged[name], (name, logged[name])
            else:
                torch.testing.assert_close(logged[name], text, rtol=1e-5, atol=1e-7)
        assert alike
