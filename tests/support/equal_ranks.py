"""A job of N ranks in one process: all others do the same as this one, so what is gathered is its own N times.

torch's fake process group knows sizes and ranks, and sends nothing; here its collectives compute what equal ranks get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from virtual_cuda import LOG, Row, places
from virtual_steps import counting

import zerofn as zf
from zerofn.eager import in_backward  # inside: how many bytes of gradients wait
from zerofn.ranks import backend  # inside: the collectives below, of one process and of several


class Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def start(ranks: int) -> None:
    """Make this process the first of `ranks` equal ones, for good."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    size, done = dist.get_world_size, Done()

    def gather(out: Tensor, given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        with torch.no_grad():
            flat = given.detach().reshape(-1).clone()
            out.detach().view(size(group), -1).copy_(flat.expand(size(group), -1))
        return done if async_op else None

    def scatter(out: Tensor, given: Tensor, group: Any = None, async_op: bool = False, **_: Any) -> Any:
        with torch.no_grad():
            out.detach().copy_(given.detach().view(size(group), *out.shape)[0] * size(group))
        return done if async_op else None

    def exchange(out: Tensor, given: Tensor, *splits: Any, group: Any = None, async_op: bool = False) -> Any:
        with torch.no_grad():
            if not splits and out.numel() == given.numel():
                out.detach().copy_(given.detach())
        return done if async_op else None

    def reduce(x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        with torch.no_grad():
            if op == dist.ReduceOp.SUM:
                x.detach().mul_(size(group))
        return done if async_op else None

    def objects(out: list[Any], given: Any, group: Any = None) -> None:
        for i in range(len(out)):
            out[i] = given

    backend.all_gather_single, backend.reduce_scatter_single = gather, scatter
    backend.all_to_all_single, backend.all_reduce = exchange, reduce
    dist.all_gather_object = objects
    dist.barrier = lambda *_, **__: None  # type: ignore[assignment]
    backend.device_of = lambda device_type=None: torch.device("cuda", 0)
    backend.job_store = lambda prefix: None


# ---------------------------------------------------------------- a step of one of them

BLOCKS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        # Large enough to be units of their own. Small leaves outside of blocks share one, and each use of it has
        # gradients for some of them.
        self.tokens, self.head = nn.Embedding(20_000, width), nn.Linear(width, 20_000, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


STAGES: dict[str, Callable[..., zf.Transform]] = {
    "all_reduce": lambda *rest: zf.chain(zf.all_reduce(), *rest),
    "zero-1": lambda *rest: zf.chain(zf.accumulate(1), zf.reduce_scatter(), *rest),
    "zero-2": lambda *rest: zf.chain(zf.reduce_scatter(), zf.accumulate(1), *rest),
    "zero-3": lambda *rest: zf.chain(zf.shard(), *rest),
}

# No window of micro-steps, which updates within backward do not have.
STAGES_WITHOUT_WINDOWS: dict[str, Callable[[], zf.Transform]] = {
    "all_reduce": lambda: zf.chain(zf.all_reduce(), zf.adamw(1e-3)),
    "reduce_scatter": lambda: zf.chain(zf.reduce_scatter(), zf.adamw(1e-3)),
    "shard": lambda: zf.chain(zf.shard(), zf.adamw(1e-3)),
}


def waits(stage: str, ranks: int = 8, unused: bool = False, scaled: bool = False) -> dict[str, int]:
    """Where the host waits in one step of a rank among `ranks`, after steps that agree on the order of units.

    Args:
        stage: of `STAGES`.
        ranks: how many.
        unused: whether the first block has a leaf without a gradient.
        scaled: whether there is a loss scale.
    """
    if not dist.is_initialized():
        start(ranks)
    model = Model()
    if unused:
        model.blocks[0].unused = nn.Parameter(torch.ones(3))
    model = model.cuda()
    scale, rest = [zf.scale_loss(init_scale=8.0)] if scaled else [], [zf.clip_by_global_norm(1.0), zf.adamw(1e-3)]
    # Gradients are unscaled behind `shard`, and before anything adds them up.
    tx = STAGES[stage](*scale, *rest) if stage == "zero-3" else zf.chain(*scale, STAGES[stage](*rest))
    opt = zf.attach(model, tx)
    x = torch.arange(8, device="cuda").view(1, 8)
    found: dict[str, int] = {}
    for _ in range(4):
        with counting(), LOG() as rows:
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        found = places([row for row in rows if row.where], "wait")
    opt.detach()
    return found


def within_backward(stage: str, ranks: int = 8) -> tuple[int, dict[str, int], list[str]]:
    """Of a step within backward: launches of updates, waits, and what has other bits than leaf by leaf."""
    if not dist.is_initialized():
        start(ranks)
    known, last, found = in_backward.TOGETHER, list[Row](), []
    for most in (0, known):
        in_backward.TOGETHER = most
        torch.manual_seed(0)
        model = Model().cuda()
        opt = zf.attach(model, STAGES_WITHOUT_WINDOWS[stage](), in_backward=True)
        for x in torch.arange(24, device="cuda").view(3, 1, 8):
            with LOG() as rows:
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
            last = rows
        found.append({path: x.detach().cpu() for path, x in opt.state.params.items()})
        opt.detach()
    in_backward.TOGETHER = known
    alone, together = found
    launches = sum(row.count for row in last if row.kind == "launch" and "kernels/fused_adam.py" in row.where)
    wrong = [path for path, x in alone.items() if not torch.equal(x, together[path])]
    return launches, places([row for row in last if row.where], "wait"), wrong


def refused_on_the_host(ranks: int = 8) -> str:
    """What a rank hears that leaves its model on the CPU in a job whose backend is NCCL alone."""
    if not dist.is_initialized():
        start(ranks)
    kept, dist.get_backend_config = dist.get_backend_config, lambda: "cuda:nccl"  # type: ignore[assignment]
    try:
        zf.attach(Model(), zf.chain(zf.all_reduce(), zf.adamw(1e-3)))
    except ValueError as error:
        return str(error)
    finally:
        dist.get_backend_config = kept
    return ""
