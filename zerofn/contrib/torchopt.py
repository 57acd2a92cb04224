"""`as_torchopt`: a transform as the `init` and `update` pair that torchopt and posteriors take."""

from __future__ import annotations

from typing import Any

import torch

from zerofn.extend import Transform, explain, flatten, no_view, recorded, unflatten

Tree = Any


def as_torchopt(tx: Transform) -> Any:
    """A transform, or a chain, as a `torchopt.base.GradientTransformation`.

    It can be passed to `torchopt.chain`, `torchopt.FuncOptimizer`, `torchopt.Optimizer`, `torchopt.MetaOptimizer` and
    `posteriors.vi.diag`. Its `update` returns what to add to the parameters: zeros while `accumulate` holds gradients
    back. `update` writes into none of its arguments, whatever `inplace` is, and can be differentiated. For the other
    direction, a chain takes a transformation of torchopt itself, or `zf.guest(torchopt.adam(1e-3))`.

    Args:
        tx: transforms of gradients only: not `shard`, `precision` or `scale_loss`, which change what the model sees.

    Raises:
        ImportError: torchopt is not installed.
        TypeError: `tx` is not a transform.
        ValueError: `tx` has a view; at an update, `params` is missing.

    Examples:
        >>> import torch, zerofn as zf
        >>> torchopt = __import__("pytest").importorskip("torchopt")
        >>> pair = zf.as_torchopt(zf.chain(zf.clip_by_value(1.0), zf.sgd(0.5)))
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = pair.update({"w": torch.tensor([3.0, 0.5])}, pair.init(params), params=params)
        >>> torchopt.apply_updates(params, updates)
        {'w': tensor([-0.5000, -0.2500])}
    """
    if not isinstance(tx, Transform):
        wrong = f"as_torchopt({type(tx).__name__})"
        raise TypeError(explain(wrong, "it is not a transform", "zf.as_torchopt(zf.adamw(lr=1e-3))"))
    seen = [part.name for part in tx.members if part.view_fn is not no_view]
    if seen:
        why = f"{seen[0]} changes what the model sees, and torchopt's pair only gets gradients"
        right = "a chain of transforms of gradients; zf.make_step(loss_fn, tx) or zf.attach(model, tx) for this one"
        raise ValueError(explain(f"as_torchopt(chain({seen[0]}(...), ...))", why, right))
    try:
        from torchopt.base import GradientTransformation
    except ImportError as error:
        why, right = "the package torchopt is not installed", "pip install torchopt"
        raise ImportError(explain("zf.as_torchopt(...)", why, right)) from error

    def update(updates: Tree, state: Any, *, params: Tree | None = None, inplace: bool = True) -> tuple[Tree, Any]:
        if params is None:
            why = "an optimizer of this library also needs the parameters"
            raise ValueError(explain("update(grads, state)", why, "update(grads, state, params=params)"))
        grads, form = flatten(updates)
        # torchopt's classes pass a tuple of gradients even if `init` got a list of parameters.
        like = flatten(params)[1]
        given = unflatten(like, grads) if like.num_leaves == len(grads) else updates
        numbers = _numbers(tx)
        # Parameters of a model require grad; without this a step by hand would record a graph that nobody uses.
        with torch.set_grad_enabled(torch.is_grad_enabled() and recorded([*grads, *flatten(state)[0], *numbers])):
            out, new = tx.update(given, state, params)
        steps = map(torch.zeros_like, flatten(params)[0]) if out is None else flatten(out)[0]
        return unflatten(form, list(steps)), new

    return GradientTransformation(init=tx.init, update=update)


def _numbers(tx: Transform) -> list[Any]:
    """The arguments of a transform and of its members; tensors among them may require grad."""
    found: list[Any] = []
    for part in tx.members:
        found += flatten([x for x in part.config.values() if isinstance(x, torch.Tensor | dict | list | tuple)])[0]
        found += [x for one in part.parts for x in _numbers(one)]
    return found
