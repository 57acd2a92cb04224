"""Which parameters are gathered together: those of a block, or small neighbours outside of all blocks.

A block is an element of one of the model's outermost `ModuleList`, `Sequential` or `ModuleDict`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..core.layout import Leaf, Leaves

# How many elements neighbours outside of blocks have at most to be one unit.
SMALL = 1 << 18


def split(model: nn.Module, leaves: tuple[Leaf, ...], params: Leaves) -> tuple[list[list[Leaf]], list[nn.Module]]:
    """Leaves by unit, in the model's order; and the modules that own them, each block as one module."""
    named = {id(p): path for path, p in params.items()}
    by_path = {leaf.path: leaf for leaf in leaves}
    done: set[str] = set()
    units: list[list[Leaf]] = []
    modules: list[nn.Module] = []
    loose: list[Leaf] = []  # the last unit, if it is no block
    for module, block in _pieces(model, False):
        paths = [named[id(p)] for p in module.parameters(recurse=block) if id(p) in named]
        unit = [by_path[p] for p in dict.fromkeys(paths) if p not in done]
        if paths:
            modules.append(module)
        done.update(leaf.path for leaf in unit)
        if not unit:
            continue
        if not block and loose and sum(leaf.numel for leaf in (*loose, *unit)) <= SMALL:
            loose.extend(unit)
            continue
        units.append(unit)
        loose = [] if block else unit
    return units, modules


def _pieces(module: nn.Module, inside: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Modules in order, and whether each is a block. Modules inside of a block are not listed."""
    yield module, inside
    if not inside:
        container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for child in module.children():
            yield from _pieces(child, container)
