"""Values for modules on the meta device, made by their own `reset_parameters`, one module after the other.

What is made at once is a *unit*: the outermost module that has a `reset_parameters`, with all modules below it, into
which it may write too (`nn.MultiheadAttention` does). Within it modules are reset from the inside out, in the order
in which constructors run. Resets write into stand-ins, which become `Made`; the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compat.modules import registered, reset_of
from .._compat.tensors import version
from .._errors import bad_leaves
from ..core.initializers import INIT, Init, blank, made_by, seeded, unset
from ..core.wrapper_names import modules_of


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
    """Each as `init(path, x)` writes it."""
    for _, _, path, x in missing(model):
        yield Made(x, made_by(init, x, path, seed, device))


def by_reset(model: nn.Module, seed: int, device: torch.device) -> Iterator[Made]:
    """Unit by unit."""
    done: set[int] = set()
    for prefix, unit in units(model):
        for made in _reset(prefix, unit, seed, device):
            # A tied tensor is made by the module in which it comes first.
            if id(made.old) not in done:
                done.add(id(made.old))
                yield made
            # It is not to be alive while the next unit is made.
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
    """Refuse tensors that nothing would initialise, and a model that could only be made whole."""
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
    """What one unit makes. Its modules are as they were when this returns."""
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
        # From the inside out: a module comes before those below it.
        for path, reset in reversed(calls):
            with seeded(seed, path, device):
                reset()
        # Looked up by name: a reset may have registered another tensor.
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
