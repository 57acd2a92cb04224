"""Under `shard` a reduce-scatter is under way while backward goes on: its numbers come later, and none is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from time_limits import limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf


class Blocks(nn.Module):
    """Blocks whose activations can be watched."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(count))

    def forward(self, x: Tensor, watch=None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if watch is not None:
                x.register_hook(lambda g, i=i: watch(i))
            x = torch.tanh(block(x))
        return x


def models() -> tuple[Blocks, Blocks]:
    torch.manual_seed(0)
    plain = Blocks().double()
    return plain, copy.deepcopy(plain)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    ).requires_grad_()


def mean_loss(model: nn.Module, world: int, step: int) -> Tensor:
    return sum(model(batch(rank, step)).square().mean() for rank in range(world)) / world  # type: ignore[return-value]


def when_gradients_come() -> tuple[dict[int, list[bool]], float]:
    plain, model = models()
    world, rank = dist.get_world_size(), dist.get_rank()
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    there: dict[int, list[bool]] = {}
    weights = [block.weight for block in model.blocks]

    def watch(i: int) -> None:
        # Called when the gradient of block i's input is there, behind that of its parameters.
        there[i] = [weight.grad is not None for weight in weights]

    mean_loss(plain, world, 0).backward()
    model(batch(rank, 0), watch).square().mean().backward()
    wanted = [p.grad for p in plain.parameters()]
    found = [p.grad.full_tensor() for p in model.parameters()]
    return there, max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradients_of_one_block_come_while_the_next_one_computes(world: int):
    for there, far in zf.launch(when_gradients_come, world, timeout=limit()):
        # Block 1 has computed its own, and they are on their way: block 0 computes meanwhile.
        assert there[1] == [False, False, True, True], there
        # Sums over ranks are made in another order.
        assert far < 1e-14


def after_a_failed_backward(clears: str) -> float:
    plain, model = models()
    world, rank = dist.get_world_size(), dist.get_rank()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    torchs = torch.optim.SGD(plain.parameters(), 0.1)

    def fails(i: int) -> None:
        if i == 1:
            raise ValueError("on every rank")

    with pytest.raises(ValueError, match="on every rank"):
        model(batch(rank, 0), fails).square().mean().backward()
    if clears == "the optimizer":
        opt.zero_grad()
    elif clears == "the model":
        model.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    before = [p.detach().clone() for p in plain.parameters()]
    for step in (1, 2):
        torchs.zero_grad()
        mean_loss(plain, world, step).backward()
        torchs.step()
        opt.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        opt.step()
    changes = [(a.detach() - b).norm() for a, b in zip(plain.parameters(), before, strict=True)]
    far = [(a - b.full_tensor()).norm() for a, b in zip(plain.parameters(), model.parameters(), strict=True)]
    opt.detach()
    return max(float(d / c) for d, c in zip(far, changes, strict=True))


def test_nothing_of_a_backward_that_raised_comes_later():
    """A reduce-scatter was under way when it raised. Sums over ranks are made in another order: 1e-12 of a change."""
    for row, found in one_launch(
        2, after_a_failed_backward, [("the optimizer",), ("the model",), ("by hand",)]
    ).items():
        assert max(found) < 1e-12, row


# ----------------------------------------------------------------------------------------------------------------------
# Programs that look at gradients, clear them or fail while a reduction is under way. All ranks have the same batch, so
# plain torch runs the same lines.


class Run:
    """A model and an optimizer, of plain torch or sharded."""

    def __init__(self, model: Blocks, opt: torch.optim.Optimizer, nested: tuple[int, ...]):
        self.model, self.opt, self.nested = model, opt, nested
        self.params = list(model.parameters())

    def loss(self, step: int, watch=None) -> Tensor:
        x = batch(0, step)
        for i, block in enumerate(self.model.blocks):
            if watch is not None:
                x.register_hook(lambda g, i=i: watch(i))
            run = lambda x, block=block: torch.tanh(block(x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=True) if i in self.nested else run(x)
        return x.square().mean()

    def fails(self, at: int) -> None:
        """A backward that raises when it comes to the input of a block; then gradients are cleared by hand."""

        def watch(i: int) -> None:
            if i == at:
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            self.loss(0, watch).backward()
        self.clear()

    def clear(self) -> None:
        for p in self.params:
            p.grad = None

    def steps(self, first: int, between=lambda run: None) -> None:
        for step in range(first, first + 2):
            self.opt.zero_grad()
            self.loss(step).backward()
            between(self)
            self.opt.step()


def at(place: int, do) -> Callable[[int], None]:
    return lambda i: do() if i == place else None


def nested_then_raises(run: Run) -> None:
    run.fails(2)
    run.steps(1)


def clips_after_one_that_raised(run: Run) -> None:
    run.fails(2)
    run.steps(1, lambda run: torch.nn.utils.clip_grad_norm_(run.params, 0.01))


def freezes_before_backward(run: Run) -> None:
    loss = run.loss(0)
    run.params[2].requires_grad_(False)
    loss.backward()
    run.params[2].requires_grad_(True)
    run.opt.step()
    run.steps(1)


def hooks_of_backward_itself(run: Run) -> None:
    """Block 2 has its gradient when block 1 is reached: hooks from there on are of the next backward."""
    made = []
    run.loss(0, at(1, lambda: made.append(run.params[6].register_hook(lambda g: 10 * g)))).backward()
    made[0].remove()
    run.opt.step()


def hooks_on_nodes(run: Run) -> None:
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in run.params]
    hooks = [node.register_prehook(lambda gs: tuple(2 * g for g in gs)) for node in nodes]
    run.loss(0).backward()
    for hook in hooks:
        hook.remove()
    run.opt.step()


def another_dtype_of_gradients(run: Run) -> None:
    for p in run.params:
        p.grad_dtype = torch.float32
    run.loss(0).backward()
    for p in run.params:
        assert p.grad.dtype == torch.float32
        p.grad, p.grad_dtype = None, None
    run.steps(1)


def clears_in_backward(run: Run) -> None:
    run.loss(0, at(1, run.opt.zero_grad)).backward()
    run.opt.step()


# With each, blocks whose forward backward repeats in a backward inside of itself.
PROGRAMS: list[tuple[Callable[[Run], None], tuple[int, ...]]] = [
    (nested_then_raises, (2,)),
    (clips_after_one_that_raised, (0,)),
    (freezes_before_backward, ()),
    (hooks_of_backward_itself, ()),
    (hooks_on_nodes, ()),
    (another_dtype_of_gradients, ()),
    (clears_in_backward, ()),
]


def programs() -> dict[str, float]:
    found = {}
    for program, nested in PROGRAMS:
        plain, model = models()
        before = [p.detach().clone() for p in plain.parameters()]
        program(Run(plain, torch.optim.SGD(plain.parameters(), 0.1), nested))
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)), hold_frozen=True)
        program(Run(model, opt, nested))
        changes = [float((a.detach() - b).norm()) for a, b in zip(plain.parameters(), before, strict=True)]
        assert max(changes) > 0
        far = [float((a - b.full_tensor()).norm()) for a, b in zip(plain.parameters(), model.parameters(), strict=True)]
        found[program.__name__] = max(far) / max(changes)
        opt.detach()
    return found


def test_gradients_come_where_torch_brings_them():
    """The mean of equal gradients of two ranks is exact, but for a norm, whose sum is made in another order."""
    for found in zf.launch(programs, 2, timeout=limit()):
        assert {name: far for name, far in found.items() if not far < 1e-12} == {}
