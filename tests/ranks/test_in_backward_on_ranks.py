"""The update during backward on ranks: bit for bit that of the same pipeline after backward, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofn as zf

BF16 = torch.bfloat16
STEPS = 5
FIRST = {0: [zf.all_reduce], 2: [zf.reduce_scatter], 3: [zf.shard]}


def by_shape(path: str) -> str:
    return "vectors" if path.endswith("bias") else "matrices"


LAST: dict[str, Callable[[], list[zf.Transform]]] = {
    "adamw": lambda: [zf.adamw(1e-2, weight_decay=0.1)],
    "bf16, stochastic": lambda: [
        zf.precision(store_dtype=BF16),
        zf.low_precision_adam(1e-2, rounding="stochastic", seed=3),
    ],
    "partition": lambda: [
        zf.partition({"matrices": zf.adamw(1e-2, weight_decay=0.3), "vectors": zf.adamw(3e-2)}, by_shape)
    ],
}


class Net(nn.Module):
    """Blocks of which a rank may leave one out, a tied weight, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, without: int) -> Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i != without:
                h = h + torch.tanh(block(h))
        return self.head(h).float()


def train(stage: int, last: str, in_backward: bool) -> tuple[dict[str, Tensor], Any, list[bool]]:
    """Stored parameters after a few steps, states, and whether any gradient was ever left."""
    model = Net()
    opt = zf.attach(model, zf.chain(*(f() for f in FIRST[stage]), *LAST[last]()), in_backward=in_backward)
    left = []
    for i in range(STEPS):
        # Everybody leaves the last block out in one step, and one rank the first in another.
        without = 2 if i == 1 else 0 if i == 3 and dist.get_rank() == 1 and stage < 3 else -1
        x = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(10 * dist.get_rank() + i))
        loss = nn.functional.cross_entropy(model(x, without).flatten(0, 1), x.roll(1).flatten())
        loss.backward()
        left.append(any(p.grad is not None for p in model.parameters()))
        opt.step()
        opt.zero_grad()
    state = {f"{part}/{k}": v.detach().clone() for part, e in opt.state.transforms.items() for k, v in flat(e).items()}
    stored = {path: x.detach().clone() for path, x in opt.state.leaves.items()}
    opt.detach()
    return stored, state, left


def flat(entries: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(entries, Tensor):
        return {prefix: entries}
    return {k: v for name, entry in entries.items() for k, v in flat(entry, f"{prefix}/{name}").items()}


def both(stage: int) -> dict[str, Any]:
    return {last: (train(stage, last, False), train(stage, last, True)) for last in LAST}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equals_the_update_after_backward_bit_for_bit(stage: int):
    for rank, found in enumerate(zf.launch(both, 2, stage, timeout=200)):
        for last, ((after, states, _), (during, mine, left)) in found.items():
            where = f"rank {rank}, {last}"
            assert not any(left), f"{where}: a gradient was kept"
            assert after.keys() == during.keys() and states.keys() == mine.keys()
            for path, x in after.items():
                assert torch.equal(x, during[path]), f"{where}: {path}"
            for key, x in states.items():
                assert torch.equal(x, mine[key]), f"{where}: state {key}"
            begun = dict(Net().named_parameters())
            moved = {path for path, x in during.items() if x.numel() and x.shape == begun[path].shape}
            assert all(not torch.equal(during[p].float(), begun[p]) for p in moved), f"{where}: nothing moved"


def differing() -> str:
    """One rank leaves a block out under `shard`."""
    model = Net()
    zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)), in_backward=True)
    try:
        model(torch.arange(4)[None], 0 if dist.get_rank() else -1).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
def test_parts_of_a_gradient_that_come_apart_are_refused():
    """What a rank hands in late could not be added to what has been used."""
    for message in zf.launch(differing, 2, timeout=100):
        assert "second gradient" in message and "ranks that use other blocks" in message
        assert "attach without in_backward" in message
