"""`layer_drop`: skip blocks of a model at random (stochastic depth), alike on all ranks and in a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zerofn.extend import explain, kind_of, leaf_key, random_bits

# A stream of the counter-based generator that stochastic rounding does not use.
_STREAM = 78


def layer_drop(blocks: Any, schedule: Callable[..., Any], *, step: Any = None, seed: int = 0) -> Any:
    """Skip blocks at random in each step, deeper ones more often (progressive layer drop, Zhang & He, 2020).

    Block `i` of `L` is kept with probability `p = schedule(step, i / L)`, counting `i` from 1. A kept block returns `x
    + (block(x) - x) / p`, so that the expected change of `x` is the change without drops. A skipped block is not run,
    and under `shard` not gathered: it returns `x`. Draws depend on seed, step and block alone, so they are the same on
    all ranks, in a recomputation by activation checkpointing, and after a resumed run.

    Args:
        blocks: functions `x -> x`, called one after the other; or a module, attached or not, whose outermost
            `ModuleList` is taken, or a `ModuleList` itself. In evaluation (`module.eval()`) no block is skipped.
        schedule: `schedule(step, depth)`, a probability in (0, 1], such as `zf.schedules.layer_keep(0.5, 0.001)`.
        step: for a module, a function without arguments that returns the step: `lambda: opt.state.step`.
        seed: of the draws.

    Returns:
        For functions, `run(x, *args, step)`, which passes `args` to each block. For a module, a handle: `remove()`, or
        the end of a `with` block, keeps all blocks again.

    Raises:
        TypeError: `blocks`, `schedule` or `step` is not as above; when called, a block takes or returns no tensor.
        ValueError: a module without a `ModuleList`, or with several; when called, a block changes the shape, or a
            probability is outside of (0, 1].

    Examples:
        >>> import torch, zerofn as zf
        >>> run = zf.layer_drop([torch.sin, torch.cos], zf.schedules.layer_keep(0.5, 0.01))
        >>> x = torch.ones(2)
        >>> torch.equal(run(x, step=0), x.sin().cos())
        True

    Notes:
        With `p = 1` a block's output is `block(x)` itself, to the last bit.
    """
    if not callable(schedule):
        why = "schedule is a function of step and depth"
        right = "layer_drop(blocks, zf.schedules.layer_keep(0.5, 0.001))"
        raise TypeError(explain(f"layer_drop(schedule={schedule!r})", why, right))
    if isinstance(blocks, nn.Module):
        if not callable(step):
            why = "draws depend on the step, which a call of a module does not tell"
            right = "layer_drop(model, schedule, step=lambda: opt.state.step)"
            raise TypeError(explain(f"layer_drop({type(blocks).__name__}(...), step={step!r})", why, right))
        return LayerDrop(_outermost(blocks), Draws(schedule, seed), step)
    if not isinstance(blocks, Sequence) or not blocks or not all(map(callable, blocks)):
        why = f"blocks are functions of x, or a module, and this is {kind_of(blocks)}"
        raise TypeError(explain(f"layer_drop({blocks!r})", why, "layer_drop([block_0, block_1], schedule)"))
    draws = Draws(schedule, seed)

    def run(x: Tensor, *args: Any, step: Any) -> Tensor:
        for i, block in enumerate(blocks):
            x = draws.of(block, i, len(blocks), step, x, args, {})
        return x

    return run


class Draws:
    """Draws which blocks to keep, and calls those."""

    def __init__(self, schedule: Callable[..., Any], seed: int):
        self.schedule, self.seed = schedule, seed

    def keep(self, i: int, blocks: int, step: int) -> tuple[bool, float]:
        """Whether block `i` is kept, and the probability of that."""
        p = float(self.schedule(step, (i + 1) / blocks))
        if not 0.0 < p <= 1.0:
            wrong, why = f"layer_drop: schedule({step}, {(i + 1) / blocks:g}) is {p}", "a probability lies in (0, 1]"
            raise ValueError(explain(wrong, why, "layer_drop(blocks, zf.schedules.layer_keep(0.5, 0.001))"))
        bits = int(random_bits(1, seed=self.seed, step=step, key=leaf_key(f"block {i}"), stream=_STREAM))
        return (bits & 0xFFFFFFFF) < p * 2**32, p

    def of(self, block: Callable, i: int, blocks: int, step: Any, x: Any, args: tuple, more: dict) -> Any:
        """`block(x, *args, **more)`, or `x` if the block is skipped."""
        kept, p = self.keep(i, blocks, int(step))
        if not kept:
            return x
        y = block(x, *args, **more)
        if not isinstance(y, Tensor) or not isinstance(x, Tensor):
            raise TypeError(
                explain(
                    f"layer_drop of block {i}, which returns {kind_of(y)} for {kind_of(x)}",
                    "a skipped block returns its first argument, so a block must take a tensor first and return one",
                    "a block that returns its hidden state alone",
                )
            )
        if y.shape != x.shape:
            raise ValueError(
                explain(
                    f"layer_drop of block {i}, which returns {tuple(y.shape)} for {tuple(x.shape)}",
                    "a skipped block returns its input, so a block must keep the shape",
                    "layer_drop(model.blocks, ...) with the blocks that keep the shape",
                )
            )
        return y if p == 1.0 else x + (y - x) / p


class LayerDrop:
    """The handle of `layer_drop(module, ...)`: its blocks may be skipped until `remove()`."""

    def __init__(self, blocks: nn.ModuleList, draws: Draws, step: Callable[[], Any]):
        self.blocks = list(blocks)
        for i, block in enumerate(self.blocks):
            # A hook cannot skip forward, so forward is replaced: as an attribute of the instance, which copies keep.
            block.forward = _Kept(block, i, len(self.blocks), draws, step)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Keep all blocks again."""
        for block in self.blocks:
            vars(block).pop("forward", None)

    def __enter__(self) -> LayerDrop:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class _Kept:
    """The forward of a block that may be skipped."""

    def __init__(self, block: nn.Module, i: int, blocks: int, draws: Draws, step: Callable[[], Any]):
        self.block, self.i, self.blocks, self.draws, self.step = block, i, blocks, draws, step

    def __call__(self, *args: Any, **more: Any) -> Any:
        run = type(self.block).forward
        if not self.block.training:
            return run(self.block, *args, **more)
        if not args:
            given = ", ".join(more) or "nothing"
            raise TypeError(
                explain(
                    f"layer_drop: a block was called with {given} by keyword",
                    "the hidden state is a block's first positional argument",
                    "block(x, mask=mask)",
                )
            )

        def block(x: Any, *rest: Any, **further: Any) -> Any:
            return run(self.block, x, *rest, **further)

        return self.draws.of(block, self.i, self.blocks, self.step(), args[0], args[1:], more)


def _outermost(model: nn.Module) -> nn.ModuleList:
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {n: m for n, m in lists.items() if not any(o != n and f"{n}.".startswith(f"{o}.") for o in lists if o)}
    if "" in lists:
        outer = {"": lists[""]}
    if len(outer) != 1:
        found = ", ".join(outer) or "none"
        why = f"blocks are the elements of its outermost ModuleList, and it does not have exactly one: {found}"
        right = f"layer_drop(model.{next(iter(outer), 'blocks')}, ...)"
        raise ValueError(explain(f"layer_drop({type(model).__name__}(...))", why, right))
    blocks = next(iter(outer.values()))
    replaced = [i for i, block in enumerate(blocks) if "forward" in vars(block)]
    shared = [i for i, block in enumerate(blocks) if any(block is other for other in blocks[:i])]
    why, right = "the list is empty", "a list of blocks"
    if replaced:
        why = f"blocks {replaced} have a forward of their own already"
        right = "handle.remove() of the earlier layer_drop first"
    elif shared:
        why = f"blocks {shared} are also earlier in the list, and a call does not tell which place it is for"
        right = "run = layer_drop([*blocks], schedule) and run(x, step=step) in forward"
    if replaced or shared or not len(blocks):
        raise ValueError(explain(f"layer_drop({type(model).__name__}(...))", why, right))
    return blocks
