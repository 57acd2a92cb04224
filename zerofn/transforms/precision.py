"""`precision`: the dtypes in which parameters are stored, seen, differentiated and reduced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import Dtypes, Layout, Leaf, Ranks, Spec, Transform, View, check_dtype, labels_by_path, transform

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _cast(dtypes: Dtypes) -> View:
    """The view: a cast to the dtype the model sees; its transpose casts the cotangent back."""

    def view(x: Tensor, leaf: Leaf) -> Tensor:
        seen = dtypes.of(leaf).param_dtype
        return x.to(seen) if seen else x

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        return g.to(dtypes.gradient(leaf))

    def store(x: Tensor, leaf: Leaf) -> Tensor:
        return x.to(dtypes.stored(leaf))

    def changes(leaf: Leaf) -> bool:
        own = dtypes.of(leaf)
        stored = own.store_dtype or leaf.dtype
        return own.param_dtype not in (None, stored) or dtypes.gradient(leaf) != stored

    return View(view, pull, store, changes, dtypes=dtypes)


def _through(spec: Spec) -> Spec:
    spec.refuse("cast_by", "the dtypes would be set twice", spec.once)
    spec.refuse("changed_by", "it would act on gradients in the compute dtype, before they are cast to their own")
    spec.refuse("summed_by", "gradients would be added up in the compute dtype; cast them first")
    spec.refuse("unscaled_by", "gradients would be unscaled in the compute dtype, where small ones vanish")
    return spec.after("cast_by")


Dtype = torch.dtype | None | Mapping[str, torch.dtype | None]


@transform
def precision(
    param_dtype: Dtype = None,
    store_dtype: Dtype = None,
    grad_dtype: Dtype = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    labels: Any = None,
    buffer_dtype: Dtype = None,
) -> Transform:
    """Choose dtypes. Names follow FSDP2's `MixedPrecisionPolicy`; `None` leaves a dtype as it is.

    With `store_dtype=torch.float32, param_dtype=torch.bfloat16` the state keeps fp32 masters and the model computes in
    bf16; with `store_dtype=torch.bfloat16` parameters are their own masters, for `low_precision_adam`, which loses no
    small update. Floating-point *inputs* of an attached model are cast too, as in FSDP2; in the pure route they are
    yours. The first three may be dicts from label to dtype, of leaves that `labels` names: docs/precision.md. Where
    parameters are seen in several, inputs stay as they are, and the model casts in between: `x.to(self.weight.dtype)`.

    Args:
        param_dtype: dtype the model sees parameters in.
        store_dtype: dtype the state keeps parameters in.
        grad_dtype: dtype of gradients as the update half gets them (fp32 on bf16 parameters: summed in fp32 over
            backwards). By default that of storage; fp32 of fp16, below whose smallest number many gradients lie.
        reduce_dtype: dtype of sums over ranks; by default the one parameters are seen in, and fp32 where that is fp16.
        output_dtype: dtype of the model's floating-point outputs, which are copies then: of `y, h = model(x)` with `y`
            computed from `h` inside, a hook on `h`, `h.retain_grad()` and `torch.autograd.grad(y, h)` raise in a
            backward that comes by way of `y`. `y.float()` outside has no such limit.
        labels: a function `path -> label`, or a tree of labels that may stop above the leaves; a label is what hashes.
        buffer_dtype: dtype of an attached model's floating-point buffers (not of complex ones and integers) until it is
            detached; by default as they are. Those before are in memory too: afterwards they are there again, and
            elements that have not changed have lost no bits. May be a dict by label, if `labels` is a function, which
            is given buffers' names. Running statistics in bf16 stop following what is below 2 ** -9 of them.

    Raises:
        ValueError: a dtype that is no floating-point one of 16 to 64 bits; labels without dtypes by label, or these
            without those; when a state is made, a leaf or buffer whose label has no dtype, a label that none has, or
            `buffer_dtype` in `zf.init`: a tree has no buffers, and those of `torch.func.functional_call` are yours.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.ones(1)})
    >>> out, pullback = zf.vjp(lambda p: p["w"] * 3, tx, state)
    >>> out.dtype, pullback(torch.ones(1, dtype=torch.bfloat16))[0]
    (torch.bfloat16, {'w': tensor([3.])})
    >>> by_label = {"head": torch.float32, "rest": torch.bfloat16}
    >>> tx = zf.chain(zf.precision(by_label, labels=lambda path: "head" if "head" in path else "rest"), zf.sgd(1.0))
    >>> state = zf.init(tx, {"head": torch.ones(1), "w": torch.ones(1)})
    >>> zf.bind(lambda p: (p["head"].dtype, p["w"].dtype), tx, state)(state.params)
    (torch.float32, torch.bfloat16)
    """
    given: dict[str, Any] = {"param_dtype": param_dtype, "store_dtype": store_dtype, "grad_dtype": grad_dtype}
    several = {name: x for name, x in given.items() if isinstance(x, Mapping)}
    _check_given({**given, "buffer_dtype": buffer_dtype}, labels)
    check_dtype("precision", "reduce_dtype", reduce_dtype, FLOATS)
    check_dtype("precision", "output_dtype", output_dtype, FLOATS)
    buffers = None if buffer_dtype is None else partial(_of_buffers, buffer_dtype, labels)
    one = {**given, **dict.fromkeys(several)}
    dtypes = Dtypes(**one, reduce_dtype=reduce_dtype, output_dtype=output_dtype, buffers=buffers)
    view = partial(_view, dtypes, several, labels)
    return Transform("precision", needs="element", view_fn=view, through=_through)


def _view(dtypes: Dtypes, several: Mapping[str, Mapping[str, Any]], labels: Any, layout: Layout, ranks: Ranks) -> View:
    """The cast of each leaf to its dtypes, of which `several` has some by label."""
    if several:
        of = labels_by_path(labels, layout, {label for x in several.values() for label in x})
        _check_labels(several, of)
        own = {label: replace(dtypes, **{name: x[label] for name, x in several.items()}) for label in set(of.values())}
        dtypes = replace(dtypes, by_path={path: own[label] for path, label in of.items()})
    return _cast(dtypes)


def _check_given(given: Mapping[str, Dtype], labels: Any) -> None:
    several = [name for name, x in given.items() if isinstance(x, Mapping)]
    right = 'precision(param_dtype={"head": torch.float32, "rest": torch.bfloat16}, labels=lambda path: ...)'
    if bool(several) != (labels is not None):
        why = "dtypes by label are for leaves that have labels" if several else "no dtype is given by label"
        raise ValueError(explain(f"precision({', '.join(several) or 'labels'}=...)", why, right))
    if "buffer_dtype" in several and not callable(labels):
        why = "a tree of labels has those of parameters, and buffers are in no such tree"
        raise ValueError(explain("precision(buffer_dtype={...}, labels=...)", why, right.replace("param", "buffer")))
    for name, x in given.items():
        for dtype in x.values() if isinstance(x, Mapping) else (x,):
            check_dtype("precision", name, dtype, FLOATS)


def _of_buffers(given: Any, labels: Any, names: Sequence[str]) -> dict[str, torch.dtype | None]:
    """Which buffers of a model are cast to what, by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    of = {name: labels(name) for name in names}
    if wrong := [(name, f"{x!r} cannot be a key of a dict") for name, x in of.items() if not isinstance(x, Hashable)]:
        raise TypeError(bad_leaves("wrong labels of buffers", wrong, "a function path -> label"))
    _check_labels({"buffer_dtype": given}, of, "buffer")
    return {name: given[label] for name, label in of.items()}


def _check_labels(several: Mapping[str, Mapping[str, Any]], of: Mapping[str, Any], what: str = "leaf") -> None:
    """Every leaf's (or buffer's) label must have a dtype, and every label a leaf: else it was meant otherwise."""
    known = {label for x in several.values() for label in x}
    wrong = [
        (path, f"label {label!r} is not in {name}")
        for path, label in of.items()
        for name, x in several.items()
        if label not in x
    ]
    if wrong:
        right = f"one of {_listed(known)}; None leaves a dtype as it is"
        raise ValueError(bad_leaves("precision: labels without a dtype", wrong, right))
    if idle := known - set(of.values()):
        told = f"precision(..., labels=...) with {_listed(idle)} among the labels"
        given = _listed(of.values()) or "none"
        many = "leaves" if what == "leaf" else "buffers"
        raise ValueError(explain(told, f"no {what} has it; {many} have {given}", f"labels that {many} have"))


def _listed(labels: Iterable[Any]) -> str:
    return ", ".join(sorted(set(map(repr, labels))))
