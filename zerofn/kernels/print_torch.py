"""Runs a program by torch's operations, leaf by leaf: the reference, with which other printers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .codes import MAPS as MAPS
from .codes import Coded, coding_of
from .operations import OPERATIONS
from .program import KINDS, Draws, Program
from .rounding import stochastic_round

_DTYPES = list(KINDS)


def can(program: Program) -> bool:
    """Whether a program can be run: each can."""
    return True


def run(
    program: Program,
    columns: Sequence[Sequence[Any]],
    numbers: Sequence[float],
    scalars: Sequence[Tensor],
    each: bool = True,
    draws: Draws | None = None,
    entries: Sequence[Tensor] = (),
    comes: Tensor | None = None,
    roots: bool = False,
    fresh: frozenset[int] = frozenset(),
) -> Tensor:
    """Compute a program over all leaves: the arguments of `print_c.run` and `print_triton.run`, on any device."""
    if coding_of(columns) is not None or comes is not None:
        given = program, columns, numbers, scalars, each, draws, entries
        return _on_copies(*given, comes=comes, roots=roots, fresh=fresh)
    sums: list[list[Tensor]] = []
    for i, row in enumerate(zip(*columns, strict=True)):
        found = _registers(program, row, numbers, scalars, draws, i, entries)
        made = [found[name] for _, name in program.stores]
        # All results are there before the first is written: columns may share memory.
        for (column, _), value in zip(program.stores, made, strict=True):
            row[column].copy_(value) if isinstance(value, Tensor) else row[column].fill_(value)
        sums.append([_addend(program, found, name).sum() for name in program.sums])
    if not program.sums:
        return torch.empty(0)
    total = torch.stack([torch.stack(of_leaf) for of_leaf in sums], 1)
    total = total.sqrt() if roots else total
    return total if each else total.sum(1)


def _on_copies(
    program: Program, columns: Sequence[Sequence[Any]], *given: Any, comes: Any, roots: bool, fresh: frozenset[int]
) -> Tensor:
    """`run` on decoded numbers, which are encoded again, or of a step that may be skipped."""
    shapes = [x.shape for x in next(column for column in columns if type(column[0]) is not Coded)]

    def decoded(x: Any, shape: Sequence[int]) -> Tensor:
        return x.how.decode_by_torch(*x.tensors, shape) if type(x) is Coded else x.clone()

    copies = [list(map(decoded, column, shapes)) for column in columns]
    found = run(program, copies, *given, roots=roots)
    for i in dict(program.stores):
        for x, new in zip(columns[i], copies[i], strict=True):
            if type(x) is Coded:
                for old, made in zip(x.tensors, x.how.encode_by_torch(new, x.draws), strict=True):
                    old.copy_(made)
            else:
                x.copy_(new if comes is None or i in fresh else torch.where(comes, new, x))
    return found


def _addend(program: Program, found: dict[str, Any], name: str) -> Tensor:
    """What is added up, in float64; a square is squared in it."""
    root = program.squared(name)
    return found[name].double() if root is None else found[root].double().square()


def _registers(
    program: Program,
    row: Sequence[Tensor],
    numbers: Sequence[float],
    scalars: Sequence[Tensor],
    draws: Draws | None,
    leaf: int,
    entries: Sequence[Tensor],
) -> dict[str, Any]:
    """The registers of one leaf. Those of 16 bits are in float32, rounded to 16."""
    if program.spread:
        width = program.widths([[x] for x in row])[0]
        spread = (*program.spread, *repeat("", len(row) - len(program.spread)))
        row = [_spread(x, of, width, row[0]) for x, of in zip(row, spread, strict=True)]
    found: dict[str, Any] = {f"x{i}": _wide(row[i]) for i in range(len(program.loads))}
    # A result that is an argument unchanged must not change with it.
    written = {column for column, _ in program.stores}
    found |= {f"x{i}": x.clone() for i in written if i < len(program.loads) and (x := found[f"x{i}"]) is row[i]}
    found |= {
        f"n{i}": int(x) if kind == 4 else x for i, (x, kind) in enumerate(zip(numbers, program.numbers, strict=True))
    }
    found |= {f"s{i}": _wide(x) for i, x in enumerate(scalars)}
    for i, (x, kind) in enumerate(zip(entries, program.entries, strict=True)):
        found[f"e{i}"] = _wide(x[leaf].to(row[0].device, _DTYPES[kind]))
    for i, (name, given, kind) in enumerate(program.steps, len(program.loads)):
        if name == "random":
            assert draws is not None
            x = found[given[0]]
            made = stochastic_round(x, _DTYPES[kind], bits=draws.words(x, leaf, int(given[1][1:]), int(given[2])))
        elif name == "to":
            made = found[given[0]]
        else:
            made = (OPERATIONS[name].torch or getattr(torch, name))(*_arguments(name, [found[x] for x in given]))
        found[f"x{i}"] = _wide(made.to(_DTYPES[kind])) if isinstance(made, Tensor) else made
    return found


def _spread(x: Tensor, of: str, width: int, like: Tensor) -> Tensor:
    """Numbers of rows, or of columns, for each element of a leaf."""
    matrix = x.reshape((-1, 1) if of == "rows" else (1, -1))
    return matrix.expand(like.numel() // width, width).reshape(like.shape) if of else x


def _arguments(name: str, given: list[Any]) -> list[Any]:
    """The arguments of torch's function, which takes a number first in a product or a sum alone."""
    if name in ("add", "mul") and not isinstance(given[0], Tensor):
        return [given[1], given[0]]
    return given


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
