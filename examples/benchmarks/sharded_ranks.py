"""One rank of one contender of `sharded.py`: builds it, and takes steps when told to.

A contender's own collectives are all that runs between its ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from lm_data import Text, read_text
from lm_model import GPT, next_byte_loss

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
BF16 = torch.bfloat16
Step = Callable[[Tensor, Tensor], Tensor]


class Tiny(nn.Module):
    """Many leaves of 8 elements, in blocks of ten: nearly all the time of a step is Python's."""

    def __init__(self, leaves: int):
        super().__init__()
        sizes = [min(10, leaves - i) for i in range(0, leaves, 10)]
        self.blocks = nn.ModuleList(TinyBlock(n) for n in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TinyBlock(nn.Module):
    def __init__(self, leaves: int):
        super().__init__()
        self.names = [f"w{i}" for i in range(leaves)]
        for i, name in enumerate(self.names):
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, 8) + 0.01 * i))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.stack([getattr(self, n) for n in self.names]).sum(0)


def model_of(o: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if o["leaves"]:
        return Tiny(o["leaves"])
    return GPT(o["d_model"], o["layers"], max(1, o["d_model"] // 64), o["seq"])


def loss_of(o: dict[str, Any], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).float().square().mean() if o["leaves"] else next_byte_loss(model(x), y)


def batches(o: dict[str, Any], rank: int, size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The same stream of global batches for every contender; each rank takes its rows."""
    if o["leaves"]:
        return lambda i: (torch.ones(8), torch.ones(8))
    text = Text.split(read_text(None), o["seq"])
    rows = o["batch"] * size

    def batch(i: int) -> tuple[Tensor, Tensor]:
        x, y = text.batch(0, i, rows, o["seq"])
        mine = slice(rank * o["batch"], (rank + 1) * o["batch"])
        return x[mine], y[mine]

    return batch


# ---------------------------------------------------------------- contenders


def loop(o: dict[str, Any], model: nn.Module, opt: Any, context: Callable[[], Any] | None = None) -> Step:
    """The loop that everybody writes."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        if context is None:
            loss = loss_of(o, model, x, y)
        else:
            with context():
                loss = loss_of(o, model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


def zerofn(o: dict[str, Any]) -> tuple[Step, Any]:
    import zerofn as zf

    # Behind the reduction, `precision` casts parameters once after an update. Without accumulation a step of ZeRO-1 is
    # one of ZeRO-2.
    dtypes = [zf.precision(param_dtype=BF16, reduce_dtype=BF16)] if o["dtype"] == "bf16" else []
    reduction = {0: zf.all_reduce, 1: zf.reduce_scatter, 2: zf.reduce_scatter, 3: zf.shard}[o["stage"]]
    road = [reduction(), *dtypes]
    tx = zf.chain(*road, zf.adamw(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY))
    model = model_of(o)
    opt = zf.attach(model, tx)
    return loop(o, model, opt), (model, opt)


def alone(o: dict[str, Any]) -> tuple[Step, Any]:
    """No communication at all, as many ranks at once: what the arithmetic costs. Trains another model."""
    model = model_of(o)
    model = model.to(BF16) if o["dtype"] == "bf16" else model
    return loop(o, model, adamw(model.parameters())), None


def in_bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and takes no strings
    """DDP's own `bf16_compress_hook` by another name, since that one refuses gloo."""
    wide = bucket.buffer()
    work = dist.all_reduce(wide.to(BF16).div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: wide.copy_(future.value()[0]))


def ddp(o: dict[str, Any]) -> tuple[Step, Any]:
    """Stage 1 is `ZeroRedundancyOptimizer`. bf16 is autocast with gradients sent in bf16."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model_of(o), gradient_as_bucket_view=True)
    if o["stage"] == 0:
        opt = adamw(model.parameters())
    else:
        kind = torch.optim.AdamW
        more = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "fused": True}
        opt = ZeroRedundancyOptimizer(model.parameters(), kind, parameters_as_bucket_view=True, **more)
    if o["dtype"] == "fp32":
        return loop(o, model, opt), None
    model.register_comm_hook(None, in_bf16)
    return loop(o, model, opt, lambda: torch.autocast("cpu", BF16)), None


def fsdp2(o: dict[str, Any]) -> tuple[Step, Any]:
    """Stage 2 is `reshard_after_forward=False`: full parameters from forward to backward, shards otherwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(o)
    policy = MixedPrecisionPolicy(param_dtype=BF16) if o["dtype"] == "bf16" else MixedPrecisionPolicy()
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": o["stage"] == 3,
        "mp_policy": policy,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return loop(o, model, adamw(model.parameters())), None


def deepspeed(o: dict[str, Any]) -> tuple[Step, Any]:
    # CPU tensors lack this method, which stage 3 calls; streams mean nothing there.
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    import deepspeed as ds

    model = model_of(o)
    config = {
        "train_micro_batch_size_per_gpu": max(1, o["batch"]),
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": o["dtype"] == "bf16"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        # Its defaults are half a billion elements, which it allocates; these are FSDP2's and DDP's sizes.
        "zero_optimization": {
            "stage": o["stage"],
            "reduce_bucket_size": 1 << 23,
            "allgather_bucket_size": 1 << 23,
            "stage3_prefetch_bucket_size": 1 << 22,
            "stage3_max_live_parameters": 1 << 23,
            "stage3_max_reuse_distance": 1 << 23,
        },
    }
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(o, engine, x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine


CONTENDERS = {"zerofn": zerofn, "alone": alone, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}


# ---------------------------------------------------------------- what zerofn keeps and sends


def distinct(tensors: Any) -> int:
    """Bytes of memory that the tensors cover; a shard within a full parameter counts once."""
    total = end = 0
    for low, high in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def model_state(o: dict[str, Any], model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> int:
    """Bytes of parameters, gradients and optimizer state of this rank after a backward and its reductions."""
    loss_of(o, model, x, y).backward()
    grads = list(opt._own.home.gradients.collect(None, "").values())
    slots = [t for s in opt.state.transforms.values() for e in s.values() if isinstance(e, dict) for t in e.values()]
    held = [t for t in slots if t.ndim]
    tensors = [*model.parameters(), *opt.state.leaves.values(), *grads, *held]
    total = distinct([t.to_local() if isinstance(t, DTensor) else t for t in tensors])
    opt.zero_grad()
    return total


def traffic(opt: Any) -> dict[str, int]:
    """Bytes sent so far by this rank: tensors, and the small messages by which ranks agree."""
    data = control = 0
    channels = opt._own.home.channels
    groups = {id(g): g for g in [*opt._own.pipe.groups, *channels.groups]}
    for g in groups.values():
        data += sum(n for op, n in g.traffic.by_op.items())
    others = [channels.control, channels.wanted, channels.more, channels.equals]
    for g in {id(g): g for g in others if g is not None and id(g) not in groups}.values():
        control += g.traffic.bytes
    return {"data": data, "control": control}


# ---------------------------------------------------------------- the process


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def warm() -> None:
    """What every step of PyTorch's loads and starts once, so that it is not taken for a contender's memory."""
    p = nn.Parameter(torch.ones(64, 64))
    opt = adamw([p])
    for dtype in (torch.float32, BF16):
        nn.functional.gelu(p.to(dtype) @ p.to(dtype)).float().sum().backward()
    opt.step()
    dist.all_reduce(torch.ones(1))


def serve(o: dict[str, Any], env: dict[str, str], orders: Any) -> None:
    """Take steps as the parent says, until it says nothing more."""
    os.environ.update(env)
    torch.set_num_threads(1)
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    name = o["name"]
    if name == "deepspeed":
        import deepspeed  # noqa: F401
    dist.init_process_group("gloo")
    warm()
    batch = batches(o, rank, size)
    before = memory("VmRSS")
    step, held = CONTENDERS[name](o)
    orders.send({"ready": True})
    done = 0
    while (order := orders.recv()) is not None:
        losses, times, cpu = [], [], time.process_time()
        sent = traffic(held[1]) if name == "zerofn" else None
        if order["reset"]:
            reset_peak()
        for _ in range(order["steps"]):
            x, y = batch(done)
            begun = time.perf_counter()
            losses.append(float(step(x, y)))
            times.append(time.perf_counter() - begun)
            done += 1
        out: dict[str, Any] = {"losses": losses, "times": times, "peak": memory("VmHWM") - before}
        out["cpu"] = 1e3 * (time.process_time() - cpu) / order["steps"]
        if sent is not None:
            now = traffic(held[1])
            out["traffic"] = {k: now[k] - sent[k] for k in now}
            if order["measure"]:
                out["state"] = model_state(o, *held, *batch(done))
                with torch.DisableTorchFunctionSubclass():
                    out["widths"] = {n: tuple(p.shape) for n, p in held[0].named_parameters()}
        orders.send(out)
