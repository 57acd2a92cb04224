"""`watch`: metrics of an update, from the old and the new parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    Context,
    ElementSums,
    Facts,
    Joining,
    Layout,
    LeafSums,
    Leaves,
    Prepared,
    Transform,
    TransformState,
    explain,
    labels_by_path,
    texts_of_labels,
    transform,
)

RIGHT = 'zf.watch(lambda old, new: {"moved": (new - old).square().sum()}, lambda moved: {"distance": moved.sqrt()})'


@transform
def watch(fn: Callable[..., Any], then: Callable[..., Any] | None = None, labels: Any = None) -> Transform:
    """Compute metrics of an update from the old and new parameters, such as how far it moved them.

    Put `watch` after the optimizer; it changes nothing. `fn(old, new)` gets one leaf before and after the update and
    returns *sums over elements* by name. zerofn adds these sums over leaves and ranks, and passes the totals by name to
    `then`, which returns the metrics. So the metrics are equal at every ZeRO stage, on any number of ranks, and with
    `in_backward=True`. In a step that updates nothing the metrics are 0.

    A metric is called `"watch.ratio"`, after the transform; `zf.watch(...).named("update")` calls it `"update.ratio"`.

    Cost: one message per step between ranks if leaves are sharded. Sums of arithmetic ride on the pass of the
    optimizer (docs/your-formula-is-a-kernel.md). For others, and for leaves that are small together, there is a copy of
    one bucket of old parameters at a time.

    Args:
        fn: of two tensors of one shape, in fp32 if the parameter has 16 bits; of a sharded leaf, flat local shards.
            Returns a dict of 0-d tensors. It also gets parameters without a gradient in this step, with `old` equal to
            `new`; it does not get frozen ones.
        then: takes the sums by name as keyword arguments, and returns metrics by name; by default the sums are the
            metrics.
        labels: a function `path -> label`, or a tree of labels that may stop above the leaves. Each label has its own
            metrics then, called `"watch.{label}.ratio"`.

    Raises:
        TypeError: `fn` or `then` is not a function, or returns something other than a dict of numbers.
        ValueError: `fn` raises, or returns what does not add up over pieces of a leaf, such as a norm, a mean, a
            maximum.

    Examples:
        The ratio of the update to the weights, for each block of a model:

        >>> import torch, zerofn as zf
        >>> ratio = zf.watch(
        ...     lambda old, new: {"update": (new - old).square().sum(), "weight": old.square().sum()},
        ...     lambda update, weight: {"ratio": (update / weight).sqrt()},
        ...     labels=lambda path: path.split(".")[0],
        ... )
        >>> tx = zf.chain(zf.sgd(0.1), ratio)
        >>> params = {"embed": {"w": torch.full((2,), 3.0)}, "head": {"w": torch.ones(4), "b": torch.ones(1)}}
        >>> state = zf.init(tx, params)
        >>> loss = lambda p: p["embed"]["w"].sum() + 2 * p["head"]["w"].sum() + 0 * p["head"]["b"].sum()
        >>> state, metrics = zf.make_step(loss, tx)(state)
        >>> print(*(f"{name} {metrics[name]:.4f}" for name in ("watch.embed.ratio", "watch.head.ratio")))
        watch.embed.ratio 0.0333 watch.head.ratio 0.1789
    """
    for what, given in (("fn", fn), ("then", then)):
        if not callable(given) and not (what == "then" and given is None):
            raise TypeError(explain(f"watch({what}={given!r})", f"{what} is a function of tensors", RIGHT))
    return _named("watch", fn, then, labels, *_names(fn, then))


def _named(
    name: str,
    fn: Callable[..., Any],
    then: Callable[..., Any] | None,
    labels: Any,
    of_sums: tuple[str, ...],
    of_metrics: tuple[str, ...],
) -> Transform:
    """The transform under this name, which its metrics contain."""

    def groups(layout: Layout, paths: Collection[str]) -> dict[str, list[str]]:
        """The paths of each group, by the prefix of its metrics: the same groups in the same order on every rank."""
        if labels is None:
            return {f"{name}.": list(paths)}
        given = labels_by_path(labels, layout, only=set(paths))
        texts = texts_of_labels(dict.fromkeys(given.values()), name)
        found: dict[str, list[str]] = {}
        for path in paths:
            found.setdefault(f"{name}.{texts[given[path]]}.", []).append(path)
        return found

    def reports(layout: Layout, paths: Collection[str]) -> frozenset[str]:
        return frozenset(group + metric for group in groups(layout, paths) for metric in of_metrics)

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        found = groups(ctx.layout, params.keys())
        rows: Leaves = {}
        dtypes = {torch.promote_types(x.dtype, torch.float32) for x in params.values()}
        device = next(iter(params.values())).device if params else torch.device("cpu")

        def close() -> None:
            totals = ctx.total(lambda rows: _added(rows, found, len(of_sums), device), rows)
            totals = totals.to(torch.float64 if dtypes == {torch.float64} else torch.float32)
            for i, group in enumerate(found):
                sums = dict(zip(of_sums, totals[i * len(of_sums) : (i + 1) * len(of_sums)].unbind(), strict=True))
                for metric, value in (sums if then is None else _checked(then(**sums), of_metrics, "then")).items():
                    ctx.report(group + metric, value)

        return Prepared(carry=rows, close=close)

    def sums_of_leaf(new: Any, old: Any) -> list[Any]:
        wide = torch.promote_types(new.dtype, torch.float32)
        return [*_checked(fn(old.to(wide), new.to(wide)), of_sums, "fn").values()]

    summed = ElementSums(sums_of_leaf, reads=fn)

    def update(params: Leaves, state: TransformState, old: Leaves, rows: Leaves, ctx: Context):
        summed(ctx, rows, {path: new for path, new in params.items() if new.numel()}, old)
        return params, state

    return Transform(
        name,
        needs="element",
        facts=Facts(watches=True, reports=reports, keeps=False, capturable=True),
        prepare_fn=prepare,
        update_fn=Joining(update),
        named_fn=lambda other: _named(other, fn, then, labels, of_sums, of_metrics),
    )


def _added(rows: Leaves, groups: Mapping[str, list[str]], count: int, device: torch.device) -> Tensor:
    """The sums of each group, concatenated; zeros for a group without elements on this rank."""
    found = []
    for paths in groups.values():
        own = [rows[path].to(device) for path in paths if path in rows and rows[path].numel()]
        wide = torch.float32 if device.type == "mps" else torch.float64
        found.append(torch.stack(own).sum(0) if own else torch.zeros(count, dtype=wide, device=device))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=device)


def _names(fn: Callable[..., Any], then: Callable[..., Any] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of sums and metrics, from a trial on six numbers; raises if sums over pieces do not add up."""
    at = torch.arange(1.0, 7.0, dtype=torch.float32, device="cpu")
    old, new = at.sin(), at.sin() + 0.1 * at.cos()
    sums = _called(fn, (old, new), {}, "fn")
    pieces = [_called(fn, (old[part], new[part]), {}, "fn") for part in (slice(0, 2), slice(2, 6))]
    for name, value in sums.items():
        total, summed = float(value), sum(float(piece.get(name, torch.nan)) for piece in pieces)
        if not abs(total - summed) <= 1e-4 * max(abs(total), abs(summed), 1e-3):
            wrong = (
                f"watch(fn): {name!r} of six numbers is {total:.4g}, but {summed:.4g} summed over two and four of them"
            )
            why = "leaves are sharded, so fn returns sums over elements; roots and quotients of sums belong into then"
            raise ValueError(explain(wrong, why, RIGHT))
    if then is None:
        return tuple(sums), tuple(sums)
    return tuple(sums), tuple(_called(then, (), {name: torch.as_tensor(x).float() for name, x in sums.items()}, "then"))


def _called(
    fn: Callable[..., Any], given: tuple[Tensor, ...], named: dict[str, Tensor], what: str
) -> Mapping[str, Any]:
    try:
        found = fn(*given, **named)
    except Exception as error:
        arguments = f"tensors of shape {tuple(given[0].shape)}" if given else f"the sums {', '.join(named)}"
        wrong = f"watch({what}=...): {what} of {arguments} raised {type(error).__name__}: {error}"
        why = "fn is called with (old, new), a leaf or a flat shard of it; then is called with the sums of fn by name"
        raise ValueError(explain(wrong, why, RIGHT)) from error
    return _checked(found, None, what)


def _checked(found: Any, names: tuple[str, ...] | None, what: str) -> Mapping[str, Any]:
    """The result of `fn` or `then` in the order of `names`; raises if it is not a dict of numbers with these names."""
    why = f"{what} returns a dict of 0-d tensors or numbers by name"
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) and name for name in found):
        raise TypeError(explain(f"watch({what}=...): {what} returned {found!r}", why, RIGHT))
    for name, x in found.items():
        plain = isinstance(x, int | float | LeafSums)
        if not (x.ndim == 0 and not x.is_complex() if isinstance(x, Tensor) else plain):
            shown = f"a tensor of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else repr(x)
            raise TypeError(explain(f"watch({what}=...): {what} returned {shown} for {name!r}", why, RIGHT))
    if names is None:
        return found
    if set(found) != set(names):
        wrong = f"watch({what}=...): {what} returned the names {', '.join(found)}, and {', '.join(names)} before"
        raise TypeError(explain(wrong, "every leaf and every step must return the same names", RIGHT))
    return {name: found[name] for name in names}
