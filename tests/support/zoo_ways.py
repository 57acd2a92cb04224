"""An architecture trained in a way by zerofn on ranks, and by torch's AdamW on one process on the data of all ranks."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

import zerofn as zf

STEPS, RANKS, LR, DECAY = 2, 2, 1e-3, 0.1
# Of the distance from torch's change, divided by the largest change: a leaf whose gradient is rounding alone, such as a
# bias of attention keys, moves by 1e-16 / eps of the rate.
BOUND = 1e-7
# At ZeRO-3 in bf16, of the norm of the distance, divided by the norm of the change: torch adds up the gradients of a
# tied weight in bf16, `shard` in float64. An element whose gradient is near zero then moves the other way.
BOUND_WHERE_TIED = 0.05
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        chain: what stands before AdamW.
        micro: micro-batches of a step.
        bf16: whether the model computes in bf16.
        pure: whether `make_step` runs, in place of `attach`.
        bound: of the distance from torch.
    """

    chain: tuple[zf.Transform, ...]
    micro: int = 1
    bf16: bool = False
    pure: bool = False
    bound: float = BOUND


# The reduction is in float64, as that of the reference is.
NARROW = zf.precision(param_dtype=BF16, buffer_dtype=BF16, reduce_dtype=torch.float64)
WAYS = {
    "plain": Way((zf.all_reduce(),)),
    "ZeRO-1": Way((zf.accumulate(2), zf.reduce_scatter()), micro=2),
    "ZeRO-2": Way((zf.reduce_scatter(),)),
    "ZeRO-3": Way((zf.shard(),)),
    "bf16": Way((NARROW, zf.all_reduce()), bf16=True),
    "bf16, ZeRO-3": Way((zf.shard(), NARROW), bf16=True, bound=BOUND_WHERE_TIED),
    "accumulate": Way((zf.shard(), zf.accumulate(2)), micro=2),
    "pure": Way((zf.shard(),), pure=True),
}
Update = dict[str, Tensor]


@contextlib.contextmanager
def seeded(step: int, rank: int, micro: int) -> Iterator[int]:
    """The number of a micro-batch, by which all generators are seeded."""
    number = (step * RANKS + rank) * 2 + micro
    zoo.seed(number)
    yield number


def narrowed(x: Any) -> Any:
    """Inputs as an attached model casts them for `param_dtype=torch.bfloat16`."""
    if isinstance(x, Tensor):
        return x.to(BF16) if x.is_floating_point() else x
    if isinstance(x, dict):
        return {k: narrowed(v) for k, v in x.items()}
    return type(x)(map(narrowed, x)) if isinstance(x, list | tuple) else x


def cast(model: nn.Module) -> Update:
    """The parameters in bf16, by one name for each module and parameter; a tied parameter is cast once.

    With `tie_weights=True` torch's `functional_call` leaves its tensors in a module that has two paths.
    """
    made = {p: p.to(BF16) if p.is_floating_point() else p for p in model.parameters()}
    names = {}
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                names[f"{path}.{key}" if path else key] = made[p]
    return names


def changes(model: nn.Module, start: Update) -> Update:
    return {k: (p.detach() - start[k]) for k, p in model.named_parameters()}


def parameters(model: nn.Module) -> Update:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def by_torch(name: str, way: Way) -> Update:
    """What two steps of AdamW change, on one process: the mean of the losses of all ranks.

    Each rank has buffers of its own, as in zerofn and in DDP with `broadcast_buffers=False`.
    """
    model = zoo.built(name)
    if way.bf16:
        for module in model.modules():
            for key, x in module._buffers.items():
                if x is not None and x.is_floating_point():
                    module._buffers[key] = x.to(BF16)
    start = parameters(model)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    buffers = [{k: x.clone() for k, x in model.named_buffers()} for _ in range(RANKS)]
    for step in range(STEPS):
        for rank in range(RANKS):
            with torch.no_grad():
                for k, x in model.named_buffers():
                    x.copy_(buffers[rank].get(k, x))  # some are made in the first call
            for micro in range(way.micro):
                with seeded(step, rank, micro) as number:
                    given = zoo.inputs(name, number)
                    # A checkpoint computes again in backward.
                    with _reparametrize_module(model, cast(model)) if way.bf16 else contextlib.nullcontext():
                        output = zoo.called(model, narrowed(given) if way.bf16 else given)
                        (zoo.loss_of(output) / (RANKS * way.micro)).backward()
            buffers[rank] = {k: x.clone() for k, x in model.named_buffers()}
        opt.step()
        opt.zero_grad()
    return changes(model, start)


def attached(name: str, way: Way) -> Update:
    model, rank = zoo.built(name), dist.get_rank()
    start = parameters(model)
    opt = zf.attach(model, zf.chain(*way.chain, zf.adamw(LR, weight_decay=DECAY)))
    for step in range(STEPS):
        for micro in range(way.micro):
            with seeded(step, rank, micro) as number:
                zoo.loss_of(zoo.called(model, zoo.inputs(name, number))).backward()
            opt.step()
            opt.zero_grad()
    opt.detach()
    return changes(model, start)


def stepped(name: str, way: Way) -> Update:
    model, rank = zoo.built(name), dist.get_rank()
    start = parameters(model)
    tx = zf.chain(*way.chain, zf.adamw(LR, weight_decay=DECAY))

    def loss(params: Update, given: Any) -> Tensor:
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        return zoo.loss_of(functional_call(model, params, args, kwargs))

    state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters() if p.requires_grad})
    step_fn = zf.make_step(loss, tx)
    for step in range(STEPS):
        with seeded(step, rank, 0) as number:
            state, _ = step_fn(state, zoo.inputs(name, number))
    now = zf.full_params(tx, state)
    return {k: now[k] - start[k] if k in now else torch.zeros_like(start[k]) for k in start}


def functional_call_is_right(name: str) -> None:
    """Raise if torch's own `functional_call`, without zerofn, raises or has other gradients than the module."""
    model = zoo.built(name)
    given = zoo.inputs(name, 0)
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    params = {k: p.detach().clone().requires_grad_(p.requires_grad) for k, p in model.named_parameters()}
    zoo.seed(0)
    zoo.loss_of(functional_call(model, params, args, kwargs)).backward()
    model.zero_grad()
    zoo.seed(0)
    zoo.loss_of(zoo.called(model, given)).backward()
    for k, p in model.named_parameters():
        if p.grad is not None:
            assert params[k].grad is not None, f"functional_call has no gradient of {k}"
            torch.testing.assert_close(params[k].grad, p.grad)


def by_fsdp2(name: str) -> Update:
    """FSDP2, wrapped from the inside out, and torch's AdamW."""
    from torch.distributed.fsdp import fully_shard

    model, rank = zoo.built(name), dist.get_rank()
    start = parameters(model)
    blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    for block in reversed(dict.fromkeys(child for m in blocks for child in m.children())):
        # A list has no forward, so FSDP2 takes none.
        if list(block.parameters()) and not isinstance(block, nn.ModuleList | nn.ModuleDict):
            fully_shard(block)
    if not isinstance(model, nn.ModuleList):
        fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        with seeded(step, rank, 0) as number:
            zoo.loss_of(zoo.called(model, zoo.inputs(name, number))).backward()
        opt.step()
        opt.zero_grad()
    found = {k: getattr(p, "full_tensor", lambda p=p: p)().detach() for k, p in model.named_parameters()}
    return {k: found[k] - start[k] for k in start}


def distance(found: Update, want: Update, whole: bool) -> tuple[float, str]:
    """The largest distance of two changes, divided by the largest change of any leaf; and its leaf.

    With `whole` it is the norm of all distances, divided by the norm of all changes.
    """
    if whole:
        far = sum(float((found[k] - x).square().sum()) for k, x in want.items())
        return (far / sum(float(x.square().sum()) for x in want.values())) ** 0.5, ""
    scale = max((float(x.abs().max()) for x in want.values() if x.numel()), default=0.0)
    far = [(float((found[k] - x).abs().max()) / scale, k) for k, x in want.items() if x.numel()]
    return max(((d if d == d else float("inf"), k) for d, k in far), default=(0.0, ""))


def right(name: str, way: str, answer: Any) -> bool:
    return not isinstance(answer, str) and answer[0] < max(WAYS[way].bound, zoo.NEAR.get(name, 0.0))


def on_a_rank(cells: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """By architecture and way: the distance from torch, or the error."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float32)
    found: dict[str, dict[str, Any]] = {}
    wanted: dict[Any, Any] = {}
    for name, ways in cells.items():
        for label in ways:
            way = WAYS[label]
            key = (name, way.micro, way.bf16)
            if key not in wanted:
                wanted[key] = _tried(by_torch, name, way)
            if isinstance(wanted[key], str):
                answer: Any = f"torch: {wanted[key]}"
            else:
                answer = _tried(stepped if way.pure else attached, name, way)
                answer = answer if isinstance(answer, str) else distance(answer, wanted[key], way.bound != BOUND)
                if way.pure and not right(name, label, answer):
                    torch_too = _tried(functional_call_is_right, name)
                    answer = f"torch: {torch_too}" if isinstance(torch_too, str) else answer
            found.setdefault(name, {})[label] = answer
        wanted.clear()
    return found


def fsdp2_on_a_rank(names: list[str], seconds: float) -> dict[str, Any]:
    """By architecture: FSDP2's distance from torch, or the error. It ends behind one at which a rank waits in vain."""
    warnings.simplefilter("ignore")
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)
    found: dict[str, Any] = {}
    for name in names:
        want = _tried(by_torch, name, WAYS["ZeRO-3"])
        answer = _tried(by_fsdp2, name)
        both = not isinstance(want, str) and not isinstance(answer, str)
        found[name] = distance(answer, want, False) if both else answer
        if isinstance(answer, str) and any(words in answer for words in ("imed out", "onnection closed", "peer")):
            found[name] = HANGS
            break
    return found


HANGS = "a rank waits in vain"


def _tried(fn: Any, *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error!s}"
