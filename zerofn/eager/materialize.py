"""`materialize`: parameters of a model on the meta device are made, and each rank keeps its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.tensors import is_wrapper
from .._errors import explain
from ..core.arguments import check_flag
from ..core.initializers import Init, check_init, device_of, first_values
from ..core.layout import Leaf
from ..core.pipeline import Pipeline
from ..core.rank_agreement import check_finite
from ..core.transform import Transform
from ..module.attach_checks import check_memory
from ..module.meta_modules import Made, by_function, by_reset, check_resets
from .optimizer import Optimizer
from .resident_form import to_resident


def materialize(
    model: nn.Module,
    tx: Transform,
    init: Init | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    in_backward: bool = False,
    hold_frozen: bool = False,
) -> Optimizer:
    """`zf.attach` for a model on the meta device: it is made leaf by leaf, and each rank keeps its part under `shard`.

    So a model may be larger than the memory of any rank: while it is made, a rank holds its parts and one leaf. Draws
    depend on `seed` and path alone: the numbers are the same on any number of ranks, and those of
    `zf.init(tx, params, init=init)`. On another kind of device they are others.

    Args:
        model: made by `with torch.device("meta"): model = Model()`. What is not on the meta device stays as it is.
        tx: as for `zf.attach`.
        init: `init(path, x)` writes the first values of a parameter or buffer into `x`, which has its shape and dtype.
            Without one, modules' own `reset_parameters` are called, as their constructors do, and a rank holds its
            parts and one such module, with all that is below it, at a time. A tied parameter is made by the module
            where it comes first.
        seed: of the draws. torch's generators are seeded by it and the path for each leaf, or module, and put back.
        device: where the model is to be; by default where torch makes tensors.
        in_backward: as for `zf.attach`.
        hold_frozen: as for `zf.attach`.

    Returns:
        The `Optimizer` of `zf.attach`. Parameters of `model` are the objects that they were.

    Raises:
        ValueError: modules with something on the meta device that have no `reset_parameters`, and no `init` is given,
            all of them; what was not initialised; other numbers on other ranks. The model is as it was then.

    >>> import torch, zerofn as zf
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> opt = zf.materialize(model, zf.chain(zf.shard(), zf.adamw(lr=1e-3)), seed=1)
    >>> model(torch.ones(2, 8)).shape
    torch.Size([2, 1])
    """
    if not isinstance(model, nn.Module):
        why = "it hooks a torch.nn.Module, as zf.attach does"
        right = "zf.materialize(model, tx); for a tree of meta tensors, zf.init(tx, params, init=init)"
        raise TypeError(explain(f"materialize({type(model).__name__}, tx)", why, right))
    check_init("zf.materialize", init, seed)
    check_flag("materialize", "in_backward", in_backward)
    check_flag("materialize", "hold_frozen", hold_frozen)
    if init is None:
        check_resets(model)
    at = device_of(device)

    def start(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        made = by_reset(model, seed, at) if init is None else by_function(model, init, seed, at)
        return _start(pipe, params, model, made)

    return Optimizer(model, tx, in_backward, start, hold_frozen)


def _start(
    pipe: Pipeline, params: dict[str, Tensor], model: nn.Module, made: Iterator[Made]
) -> Callable[[], dict[str, Tensor]]:
    """As `from_values`, of parameters that are made meanwhile, beside the model."""
    there = {path: p for path, p in params.items() if is_wrapper(p) or not p.is_meta}
    check_memory(there)
    check_finite(there)
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}
    others: list[Made] = []
    settled: dict[str, nn.Parameter] = {}

    def whole() -> Iterator[tuple[Leaf, Tensor]]:
        for x in made:
            if id(x.old) in leaves:
                yield leaves[id(x.old)], x.new
            else:
                others.append(x)
            # Not alive while the next is made.
            del x
        yield from ((leaf, params[leaf.path]) for leaf in pipe.layout.leaves if leaf.path in there)

    def keep(leaf: Leaf, x: Tensor) -> Tensor:
        settled[leaf.path] = new = nn.Parameter(x.detach(), requires_grad=params[leaf.path].requires_grad)
        return to_resident(pipe, leaf, new)

    stored = first_values(pipe, whole(), keep, "zf.materialize(model, tx)")

    def settle() -> dict[str, Tensor]:
        for path, new in settled.items():
            old = params[path]
            new.__class__ = type(old)  # type: ignore[assignment]
            vars(new).update(vars(old))
            # The same object as before, at all of its places: whoever holds it has the parameter.
            torch.utils.swap_tensors(old, new)
        _put_in_place(model, others)
        return stored

    return settle


def _put_in_place(model: nn.Module, others: list[Made]) -> None:
    """Buffers, and parameters of integers, at each place that they stand at."""
    new: dict[int, Any] = {id(x.old): x for x in others}
    for module in model.modules():
        for name, x in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(x) in new:
                setattr(module, name, new[id(x)].new)
        for name, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(x) in new:
                setattr(module, name, nn.Parameter(new[id(x)].new, requires_grad=False))
