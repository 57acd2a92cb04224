"""The update halves on a state, by either route, and whether gradients and state are what they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._compat import differentiating
from ._errors import bad_leaves, explain
from ._pipeline import Pipeline
from ._run import finish, run
from ._state import State
from ._tree import Leaf, Leaves, Tree, flatten, tree_paths
from ._types import Context, check_dense, misshapen, select

Metrics = dict[str, Tensor]


def check_grads(pipe: Pipeline, grads: Leaves, stored: Leaves) -> None:
    """Gradients have the shape of what is stored and the dtype that `precision` says."""
    bad = []
    for leaf in pipe.layout.leaves:
        g = grads.get(leaf.path)
        if g is None:
            continue
        if reason := _misfit(g, leaf, pipe.grad_shape(leaf), {pipe.cast.gradient(leaf), stored[leaf.path].dtype}):
            bad.append((leaf.path, reason))
    if bad:
        right = "gradients from zf.vjp, from torch.func.grad of a bound function, or p.grad"
        raise ValueError(bad_leaves("gradients do not fit the parameters", bad, right))


def _misfit(g: Any, leaf: Leaf, shape: tuple[int, ...], dtypes: set[torch.dtype]) -> str | None:
    if reason := misshapen(g, shape):
        return reason
    # fp32 loses nothing and is what sums are made in.
    if g.dtype not in {*dtypes, torch.float32}:
        return f"gradient in {g.dtype} instead of {' or '.join(sorted(map(str, dtypes)))}"
    if not leaf.trainable:
        return "a gradient for a frozen parameter"
    return None


def apply(pipe: Pipeline, grads: Leaves, state: State, ctx: Context) -> tuple[State, Metrics]:
    """The update halves on leaves by path; writes into the state only where `ctx.donate`."""
    if not grads and not (pipe.late and pipe.groups):
        raise ValueError(
            explain(
                "a step in which no parameter has a gradient",
                "the loss does not depend on the parameters, or no backward ran since the last step",
                "loss.backward() before opt.step(); a loss_fn that uses its params",
            )
        )
    if ctx.weight is not None and not any(p.config.get("weighted") for p in pipe.parts):
        raise ValueError(
            explain(
                "a step with weight= through a pipeline that weights nothing",
                "only accumulate(weighted=True) has a use for it, so it would have no effect",
                "zf.chain(..., zf.accumulate(4, weighted=True), ...), or no weight=",
            )
        )
    check_dense(grads)
    if differentiating() or any(x.requires_grad for x in state.leaves.values()):
        raise RuntimeError(
            explain(
                "an update inside a function that is being differentiated",
                "updates are written in place and fused, not recorded, so their derivative would be zero in silence",
                "differentiate zf.bind(fn, tx, state), and update outside; torch.func.vmap over a step is fine",
            )
        )
    trainable = {leaf.path: state.leaves[leaf.path] for leaf in pipe.layout.leaves if leaf.trainable}
    ctx = replace(ctx, micro_step=state.micro_step)
    # A transform that only looks at gradients, such as the norm among the metrics, has no entry.
    given = {p.name: state.transforms.get(p.name, {}) for p in pipe.updates}
    try:
        with torch.no_grad():
            signal, states, emitted = run(pipe.updates, grads, {**state.transforms, **given}, trainable, ctx)
            leaves = {**state.leaves, **finish(signal, trainable, emitted)}
    except (KeyError, RuntimeError) as error:
        if wrong := misfits(pipe, state):
            right = "state = zf.init(tx, params) with this very tx"
            raise ValueError(bad_leaves("the state was made by another pipeline", wrong, right)) from error
        raise
    finally:
        ctx.settle()
    step = select(emitted, state.step + 1, state.step)
    new = State(leaves, {p.name: states[p.name] for p in pipe.parts}, step, state.micro_step + 1, pipe.layout)
    defaults = {"skipped": torch.tensor(False)}
    shown = {"updated": torch.as_tensor(emitted), "step": step, **defaults, **ctx.metrics}
    return new, shown


def misfits(pipe: Pipeline, state: State) -> list[tuple[str, str]]:
    """Where the entries of a state differ from those its pipeline would make. Too slow to ask at each step."""
    meta = {p: torch.empty_like(x, device="meta") for p, x in state.leaves.items()}
    expected, found = (_entries(s) for s in (pipe.init_transforms(meta), state.transforms))
    bad = [(k, "missing") for k in expected.keys() - found.keys()] + [
        (k, "unexpected") for k in found.keys() - expected.keys()
    ]
    for k in expected.keys() & found.keys():
        if expected[k] != found[k]:
            bad.append((k, f"of shape {tuple(found[k])} instead of {tuple(expected[k])}"))
    return sorted(bad)


def _entries(states: Tree) -> dict[str, Any]:
    return {p: x.shape for p, x in zip(tree_paths(states), flatten(states)[0], strict=True) if isinstance(x, Tensor)}
