"""`layer_drop`: blocks left out of a step at random (stochastic depth), alike on all ranks and in a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zerofn.extend import explain, kind_of, leaf_key, random_bits

# A stream of the counter generator that no rounding draws from.
_STREAM = 78


def layer_drop(blocks: Any, schedule: Callable[..., Any], *, step: Any = None, seed: int = 0) -> Any:
    """Leave blocks out of steps at random, deeper ones more often (progressive layer drop, Zhang & He, 2020).

    Block `i` of `L` is kept with probability `p = schedule(step, i / L)`. One that is kept gives `x + (block(x) - x)
    / p`, so that its expected change of `x` is what it is without drops; one that is left out gives `x`, is not run,
    and under `shard` not gathered. With `p = 1` it gives `block(x)` itself, to the bit. Draws are a function of seed,
    step and block alone: equal on all ranks, in what a checkpoint repeats, and after a resumed run.

    Args:
        blocks: functions `x -> x`, called one after the other, as many as there are; or a module, attached or not:
            its outermost `ModuleList`, or that itself. In evaluation (`module.eval()`) none of its blocks is left out.
        schedule: probability of a step and a depth in (0, 1], such as `zf.schedules.layer_keep(0.5, 0.001)`.
        step: of a module, a function without arguments that gives the step: `lambda: opt.state.step`.
        seed: of the draws.

    Returns:
        Of functions, `run(x, *args, step)`, where `args` are handed to each. Of a module, a handle: `remove()`, or
        the end of `with`, keeps all blocks again.

    Raises:
        TypeError: `blocks`, `schedule` or `step` is none; a block that gives no tensor.
        ValueError: a module without a `ModuleList`, or with several; a block whose output has another shape than its
            input; a probability outside of (0, 1].

    >>> import torch, zerofn as zf
    >>> run = zf.layer_drop([torch.sin, torch.cos], zf.schedules.layer_keep(0.5, 0.01))
    >>> x = torch.ones(2)
    >>> torch.equal(run(x, step=0), x.sin().cos())
    True
    """
    if not callable(schedule):
        why = "schedule is a function of step and depth"
        right = "layer_drop(blocks, zf.schedules.layer_keep(0.5, 0.001))"
        raise TypeError(explain(f"layer_drop(schedule={schedule!r})", why, right))
    if isinstance(blocks, nn.Module):
        if not callable(step):
            why = "of a module's calls no step is known, and draws are made by it"
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
    """The draws of blocks to keep, and the calls of those that are kept."""

    def __init__(self, schedule: Callable[..., Any], seed: int):
        self.schedule, self.seed = schedule, seed

    def keep(self, i: int, blocks: int, step: int) -> tuple[bool, float]:
        """Whether block `i` is kept, and how likely that was."""
        p = float(self.schedule(step, (i + 1) / blocks))
        if not 0.0 < p <= 1.0:
            raise ValueError(f"layer_drop: the schedule gave {p} at step {step} for block {i}; it is to lie in (0, 1].")
        bits = int(random_bits(1, seed=self.seed, step=step, key=leaf_key(f"block {i}"), stream=_STREAM))
        return (bits & 0xFFFFFFFF) < p * 2**32, p

    def of(self, block: Callable, i: int, blocks: int, step: Any, x: Any, args: tuple, more: dict) -> Any:
        """`block(x, *args, **more)`, or `x`."""
        kept, p = self.keep(i, blocks, int(step))
        if not kept:
            return x
        y = block(x, *args, **more)
        if not isinstance(y, Tensor) or not isinstance(x, Tensor):
            raise TypeError(
                explain(
                    f"layer_drop of block {i}, which makes {kind_of(y)} of {kind_of(x)}",
                    "a block that is left out gives what it was given, so it is to take a tensor first and give one",
                    "a block that returns its hidden state alone",
                )
            )
        if y.shape != x.shape:
            raise ValueError(
                explain(
                    f"layer_drop of block {i}, which makes {tuple(y.shape)} of {tuple(x.shape)}",
                    "where it is left out, the next one is given what it was given",
                    "the blocks between which shapes stay: layer_drop(model.blocks, ...)",
                )
            )
        return y if p == 1.0 else x + (y - x) / p


class LayerDrop:
    """Blocks of a module that may be left out, until `remove`."""

    def __init__(self, blocks: nn.ModuleList, draws: Draws, step: Callable[[], Any]):
        self.blocks = list(blocks)
        for i, block in enumerate(self.blocks):
            # Not a hook, which could not keep a block from running. Copies of the block have it too.
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
    """Stands in place of a block's forward."""

    def __init__(self, block: nn.Module, i: int, blocks: int, draws: Draws, step: Callable[[], Any]):
        self.block, self.i, self.blocks, self.draws, self.step = block, i, blocks, draws, step

    def __call__(self, *args: Any, **more: Any) -> Any:
        run = type(self.block).forward
        if not self.block.training:
            return run(self.block, *args, **more)
        if not args:
            given = ", ".join(more) or "nothing"
            raise TypeError(
                f"layer_drop: a block was called with {given}; the hidden state is to come first, by position."
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
        why = f"blocks are the elements of its outermost ModuleList, and there is more or less than one: {found}"
        right = f"layer_drop(model.{next(iter(outer), 'blocks')}, ...)"
        raise ValueError(explain(f"layer_drop({type(model).__name__}(...))", why, right))
    blocks = next(iter(outer.values()))
    replaced = [i for i, block in enumerate(blocks) if "forward" in vars(block)]
    shared = [i for i, block in enumerate(blocks) if any(block is other for other in blocks[:i])]
    why, right = "the list is empty", "a list of blocks"
    if replaced:
        why, right = f"blocks {replaced} have a forward of their own already", "handle.remove() of the first, or one"
    elif shared:
        why = f"blocks {shared} stand in the list before, and a call of one does not say for which place it is"
        right = "run = layer_drop([*blocks], schedule) and run(x, step=step) in forward"
    if replaced or shared or not len(blocks):
        raise ValueError(explain(f"layer_drop({type(model).__name__}(...))", why, right))
    return blocks
