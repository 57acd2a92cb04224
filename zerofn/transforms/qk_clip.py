"""`qk_clip`: projections of queries and keys, scaled down where attention logits have become too large (MuonClip)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import (
    TINY,
    Context,
    Facts,
    Layout,
    Leaves,
    Prepared,
    Transform,
    TransformState,
    check_count,
    check_number,
    transform,
)


@transform
def qk_clip(pairs: Sequence[tuple[str, str]], heads: int, threshold: float = 100.0, alpha: float = 0.5) -> Transform:
    """Scale the projections of a head down if its largest attention logit exceeds a threshold (Kimi K2, 2025).

    Put it after the optimizer. For each layer and head with `s = max_logits[layer, head] > threshold`, the rows of that
    head in the query's projection are multiplied by `(threshold / s)^alpha`, and in the key's by `(threshold / s)^(1 -
    alpha)`; biases too. `MuonClip` is `chain(muon(...), qk_clip(...))`.

    Pass the largest logit of each head to the step: `opt.step(max_logits=logits)`, a tensor of the shape (layers,
    heads). zerofn uses the maximum over ranks and over the micro-batches of `accumulate`. A number that is not finite
    clips nothing.

    Args:
        pairs: for each layer the modules of the two projections, by name: `[("blocks.0.query", "blocks.0.key")]`.
        heads: the number of heads of a layer. Both projections have `heads` equal groups of rows.
        threshold: the largest logit that is not scaled down.
        alpha: the exponent of the query's factor, in [0, 1]; the key's factor has the exponent `1 - alpha`.

    Raises:
        ValueError: an argument is out of range; when the state is made, a module has no parameter, or its rows do not
            divide by heads; at a step, `max_logits` is missing or has another shape.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.sgd(0.0), zf.qk_clip([("q", "k")], heads=2, threshold=10.0))
        >>> state = zf.init(tx, {"q": {"weight": torch.ones(2, 2)}, "k": {"weight": torch.ones(2, 2)}})
        >>> grads = {"q": {"weight": torch.ones(2, 2)}, "k": {"weight": torch.ones(2, 2)}}
        >>> state, _ = zf.update(tx, grads, state, max_logits=torch.tensor([[5.0, 40.0]]))
        >>> state.params["q"]["weight"]  # the second head by sqrt(10 / 40)
        tensor([[1.0000, 1.0000],
                [0.5000, 0.5000]])
    """
    check_count("qk_clip", "heads", heads, "heads")
    check_number("qk_clip", "threshold", threshold, low=TINY)
    check_number("qk_clip", "alpha", alpha, high=1.0 + 1e-12)
    places = _places(pairs)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        shapes = {leaf.path: tuple(leaf.shape) for leaf in layout.leaves}
        modules = {path.rpartition(".")[0] for path in shapes}
        bad = [(name, "no module of this name has a parameter") for name in places if name not in modules]
        for path, shape in shapes.items():
            if path.rpartition(".")[0] in places and (not shape or shape[0] % heads):
                bad.append((path, f"of shape {shape}, whose rows are not those of {heads} heads"))
        if bad:
            right = "qk_clip([(name of the query's projection, name of the key's)], heads) of separate projections"
            raise ValueError(bad_leaves("qk_clip: projections of queries and keys", bad, right))
        return {}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        if not ctx.given:
            return Prepared()
        most = ctx.given["max_logits"]
        gamma = torch.where((most > threshold) & most.isfinite(), threshold / most, 1.0)
        return Prepared(carry=torch.stack([gamma**alpha, gamma ** (1 - alpha)]))

    def update(new: Leaves, state: TransformState, old: Leaves, factors: Tensor, ctx: Context):
        sizes = {leaf.path: leaf.numel for leaf in ctx.layout.leaves}
        kept = dict(new)
        for path, x in new.items():
            place = places.get(path.rpartition(".")[0])
            if place is None or not x.numel():
                continue
            # The head of an element follows from its index in the whole leaf; this rank may have only a shard.
            first, each = ctx.offsets.get(path, 0), sizes[path] // heads
            head = torch.arange(first, first + x.numel(), device=x.device) // each
            factor = factors[place].to(x.device)[head].view(x.shape)
            kept[path] = ctx.into(x, (x * factor).to(x.dtype))
        return kept, {}

    shape = (len(set(map(_layer, places.values()))), heads)
    facts = Facts(watches=True, sees_old=False, keeps=False, capturable=True, wants_largest=(("max_logits", shape),))
    return Transform("qk_clip", needs="element", facts=facts, init_fn=init, prepare_fn=prepare, update_fn=update)


def _layer(place: tuple[int, int]) -> int:
    return place[1]


def _places(pairs: Any) -> dict[str, tuple[int, int]]:
    """By the name of a module: 0 for a query and 1 for a key, and its layer."""
    good = isinstance(pairs, list | tuple) and pairs and all(isinstance(x, list | tuple) and len(x) == 2 for x in pairs)
    names = [name for pair in pairs for name in pair] if good else []
    if not good or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        why = "it takes a pair of names for each layer: the modules that make queries and keys, each once"
        right = 'qk_clip([("blocks.0.query", "blocks.0.key")], heads=8)'
        raise ValueError(explain(f"qk_clip({pairs!r}, ...)", why, right))
    return {name: (side, layer) for layer, pair in enumerate(pairs) for side, name in enumerate(pair)}
