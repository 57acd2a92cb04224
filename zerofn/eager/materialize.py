"""`materialize`: makes the parameters of a model on the meta device, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compat.tensors import is_wrapper, registered, reset_of, version
from .._errors import bad_leaves, explain
from ..core.arguments import check_flag
from ..core.layout import Leaf
from ..core.pipeline import Pipeline
from ..core.rank_agreement import (
    INIT,
    Init,
    blank,
    check_finite,
    check_init,
    device_of,
    first_values,
    made_by,
    seeded,
    unset,
)
from ..core.transform import Transform
from ..core.wrapper_names import modules_of
from ..module.attach_checks import check_memory
from .optimizer import Optimizer
from .stored_parameters import to_resident

# ----------------------------------------------------------------------------------------------------------------------
# These classes compute values for modules on the meta device, with the modules' own `reset_parameters`, one module
# after the other.
#
# A *unit* is made at once: the outermost module that has a `reset_parameters`, with all modules below it, into which
# it may write too (`nn.MultiheadAttention` does). Within it modules are reset from the inside out, in the order in
# which constructors run. Resets write into stand-ins, which become `Made`; the model stays as it is.


class Made(NamedTuple):
    """A tensor on the meta device, and its values."""

    old: Tensor
    new: Tensor


def missing(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Tensors on the meta device: module, name in it, path and the tensor; a tied one at its first place."""
    seen: set[int] = set()
    for prefix, module in modules_of(model, wrappers=False):
        yield from ((module, n, p, x) for n, p, x in _own(module, prefix) if id(x) not in seen and not seen.add(id(x)))


def _own(module: nn.Module, prefix: str) -> Iterator[tuple[str, str, Tensor]]:
    parameters, _, buffers = registered(module)
    for name, x in [*dict.items(parameters), *buffers.items()]:
        if x is not None and x.is_meta:
            yield name, f"{prefix}.{name}".lstrip("."), x


def by_function(model: nn.Module, init: Init, seed: int, device: torch.device) -> Iterator[Made]:
    """Make each tensor by `init(path, x)`."""
    for _, _, path, x in missing(model):
        yield Made(x, made_by(init, x, path, seed, device))


def by_reset(model: nn.Module, seed: int, device: torch.device) -> Iterator[Made]:
    """Make the tensors unit by unit, by the modules' `reset_parameters`."""
    done: set[int] = set()
    for prefix, unit in units(model):
        for made in _reset(prefix, unit, seed, device):
            # The module in which a tied tensor comes first makes it.
            if id(made.old) not in done:
                done.add(id(made.old))
                yield made
            # This frees the unit's tensors before the next unit is made.
            del made


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below `model` that reset themselves and have something on the meta device; or `model`."""
    above: list[str] = []
    for prefix, module in modules_of(model, wrappers=False):
        inside = any(not p or prefix == p or prefix.startswith(f"{p}.") for p in above)
        if not inside and reset_of(module) and any(missing(module)):
            above.append(prefix)
            yield prefix, module


def check_resets(model: nn.Module) -> None:
    """Refuse tensors that nothing would initialise, and a model that could only be made all at once."""
    found = list(units(model))
    if found and not found[0][0] and any(any(_own(m, "")) for m in model.modules() if m is not found[0][1]):
        name = type(found[0][1]).__name__
        why = f"{name}.reset_parameters is the whole model's: it would have to be there whole, on each rank"
        raise ValueError(bad_leaves("materialize: no way to make this model in parts", [("", why)], _remedy()))
    covered = {id(m) for _, unit in found for m in unit.modules()}
    bad = [(path, _why(module, name)) for module, name, path, _ in missing(model) if id(module) not in covered]
    if bad:
        raise ValueError(bad_leaves("materialize: on the meta device, and nothing initialises them", bad, _remedy()))


def _why(module: nn.Module, name: str) -> str:
    kind, buffer = type(module).__name__, name in registered(module)[2]
    return f"{kind} has no reset_parameters" + (
        f", and what its constructor put into {name!r} is lost" if buffer else ""
    )


def _remedy() -> str:
    indent = "\n         "
    return f"zf.materialize(model, tx, {INIT}), called for buffers too;{indent}or a method reset_parameters(self)"


def _reset(prefix: str, unit: nn.Module, seed: int, device: torch.device) -> list[Made]:
    """Make the tensors of one unit. Its modules are unchanged when this returns."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    stand_ins: dict[int, Tensor] = {}
    places: list[tuple[nn.Module, str, str, Tensor]] = []
    named = [(f"{prefix}.{below}".strip("."), module) for below, module in modules_of(unit, wrappers=False)]
    calls = [(path, reset) for path, m in named if any(missing(m)) and (reset := reset_of(m)) is not None]
    try:
        for path, module in named:
            parameters, _, buffers = registered(module)
            for own in (parameters, buffers):
                kept.append((own, dict(dict.items(own))))
            for name, full, x in list(_own(module, path)):
                places.append((module, name, full, x))
                if id(x) not in stand_ins:
                    stand_ins[id(x)] = _stand_in(x, device)
                (parameters if name in parameters else buffers)[name] = stand_ins[id(x)]
        before = {key: version(x) for key, x in stand_ins.items()}
        # Resets run from the inside out: `calls` has a module before those below it.
        for path, reset in reversed(calls):
            with seeded(seed, path, device):
                reset()
        # Tensors are looked up by name, since a reset may have registered another one.
        found = [(path, Made(old, _registered(m, name))) for m, name, path, old in places]
        bad = [
            (path, f"left unset by {type(unit).__name__}.reset_parameters")
            for path, made in found
            if unset(made.new, before[id(made.old)] if made.new is stand_ins[id(made.old)] else -1)
        ]
    finally:
        for own, entries in kept:
            own.clear()
            own.update(entries)
    if bad:
        raise ValueError(bad_leaves("materialize: a module does not initialise all that it has", bad, _remedy()))
    return [Made(made.old, made.new.detach()) for _, made in found]


def _stand_in(x: Tensor, device: torch.device) -> Tensor:
    new = blank(x, device)
    return nn.Parameter(new, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else new


def _registered(module: nn.Module, name: str) -> Tensor:
    parameters, _, buffers = registered(module)
    return parameters[name] if name in parameters else buffers[name]


# ----------------------------------------------------------------------------------------------------------------------
# `materialize` makes the parameters of a model on the meta device. Each rank keeps its shards.


def materialize(
    model: nn.Module,
    tx: Transform,
    init: Init | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    in_backward: bool = False,
    hold_frozen: bool = False,
    check: bool = False,
) -> Optimizer:
    """`zf.attach` for a model on the meta device: makes it leaf by leaf. Under `shard` each rank keeps its shards.

    So a model may be larger than the memory of any rank: a rank holds at most its shards and one full leaf. Random
    numbers depend on `seed` and path alone. So they are equal on any number of ranks, and equal to those of
    `zf.init(tx, params, init=init)`. They differ between kinds of device.

    Args:
        model: made by `with torch.device("meta"): model = Model()`. Tensors on other devices stay as they are.
        tx: as for `zf.attach`.
        init: `init(path, x)` writes the first values of a parameter or buffer into `x`, which has its shape and dtype.
            By default the modules' own `reset_parameters` are called, as their constructors do. Then a rank holds its
            shards and one such module, with its submodules, at a time. The first module that has a tied parameter makes
            this parameter.
        seed: of the random numbers. torch's generators are seeded by it and the path, for each leaf or module, and
            restored afterwards.
        device: the model's new device; by default torch's default device.
        in_backward: as for `zf.attach`.
        hold_frozen, check: as for `zf.attach`.

    Returns:
        The `Optimizer` of `zf.attach`. Parameters of `model` are the objects that they were; under
            `shard` on several ranks they are DTensors, as after `zf.attach`.

    Raises:
        ValueError: there is no `init`, and modules with tensors on the meta device have no `reset_parameters` (all are
            named); tensors were not initialised; or ranks have different numbers. The model is then unchanged.

    Examples:
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
    check_flag("materialize", "check", check)
    if init is None:
        check_resets(model)
    at = device_of(device)

    def start(pipe: Pipeline, params: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        made = by_reset(model, seed, at) if init is None else by_function(model, init, seed, at)
        return _start(pipe, params, model, made)

    return Optimizer(model, tx, in_backward, start, hold_frozen, check)


def _start(
    pipe: Pipeline, params: dict[str, Tensor], model: nn.Module, made: Iterator[Made]
) -> Callable[[], dict[str, Tensor]]:
    """As `from_values`, for parameters that are made meanwhile, beside the model."""
    others_there = {path: p for path, p in params.items() if is_wrapper(p) or not p.is_meta}
    check_memory(others_there)
    check_finite(others_there)
    leaves = {id(params[leaf.path]): leaf for leaf in pipe.layout.leaves}
    others: list[Made] = []
    resident: dict[str, nn.Parameter] = {}

    def whole() -> Iterator[tuple[Leaf, Tensor]]:
        for x in made:
            if id(x.old) in leaves:
                yield leaves[id(x.old)], x.new
            else:
                others.append(x)
            # This frees the leaf before the next is made.
            del x
        yield from ((leaf, params[leaf.path]) for leaf in pipe.layout.leaves if leaf.path in others_there)

    def keep(leaf: Leaf, x: Tensor) -> Tensor:
        resident[leaf.path] = new = nn.Parameter(x.detach(), requires_grad=params[leaf.path].requires_grad)
        return to_resident(pipe, leaf, new)

    stored = first_values(pipe, whole(), keep, "zf.materialize(model, tx)")

    def swap_in() -> dict[str, Tensor]:
        for path, new in resident.items():
            old = params[path]
            new.__class__ = type(old)  # type: ignore[assignment]
            vars(new).update(vars(old))
            # The parameter stays the same object at all of its places, for code that holds it.
            torch.utils.swap_tensors(old, new)
        _put_in_place(model, others)
        return stored

    return swap_in


def _put_in_place(model: nn.Module, others: list[Made]) -> None:
    """Put buffers and integer parameters into the model, at each place where it has them."""
    new: dict[int, Any] = {id(x.old): x for x in others}
    for module in model.modules():
        for name, x in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(x) in new:
                setattr(module, name, new[id(x)].new)
        for name, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(x) in new:
                setattr(module, name, nn.Parameter(new[id(x)].new, requires_grad=False))
