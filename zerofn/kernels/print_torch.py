"""Runs a program by torch's operations: the reference for other printers, and what runs on a CPU without a compiler.

On a CPU it runs in chunks that stay in the cache. The allocator reuses temporaries of this size, where temporaries of
the size of a large leaf cost ten times as much. Each call of torch costs a microsecond at any size, so small leaves are
copied into one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codes import MAPS as MAPS
from .codes import Coded, coding_of
from .operations import OPERATIONS
from .program import KINDS, Draws, Program
from .rounding import as_int32, block_ranges, draw, stochastic_round, stream_key, stride_of

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
    count = len(columns[0])
    total = torch.zeros((len(program.sums), count), dtype=torch.float64, device=columns[0][0].device)
    for batch in _batches(program, columns, draws):
        parts = [_parts(column, batch) for column in columns]
        row = [x[0] if len(x) == 1 else torch.cat(x) for x in parts]
        found = _registers(program, row, numbers, scalars, draws, batch, entries)
        sizes = [part.numel() for part in parts[0]]
        # All results are there before the first is written: columns may share memory.
        for i, name in enumerate(program.sums):
            addends = _split(_addend(program, found, name), sizes)
            for of, addend in zip(batch, addends, strict=True):
                total[i, of.leaf] += addend.sum()
        for column, name in program.stores:
            for part, x in zip(parts[column], _split(found[name], sizes), strict=True):
                part.copy_(x) if isinstance(x, Tensor) else part.fill_(x)
    if not program.sums:
        return torch.empty(0)
    total = total.sqrt() if roots else total
    return total if each else total.sum(1)


class _Part(NamedTuple):
    """Elements of a leaf: from `start` to `stop` of the flattened one, or all, in its own shape."""

    leaf: int
    start: int = 0
    stop: int | None = None


# Elements of a chunk for one thread. torch gives a thread at least so many.
CHUNK = 1 << 15
# torch fuses the product in these, but not in the last elements of a tensor: leaves do not share a chunk.
_FUSED = {"plus", "addcmul", "lerp", "lerp_back"}


def _batches(program: Program, columns: Sequence[Sequence[Any]], draws: Draws | None) -> Iterator[list[_Part]]:
    """What is computed together: on a CPU a part of a leaf, or many small leaves."""
    count = len(columns[0])
    on_host = all([x.is_cpu and x.is_contiguous() for column in columns for x in column])
    if not on_host or program.spread or program.scalars or (draws is not None and isinstance(draws.step, Tensor)):
        yield from ([_Part(i)] for i in range(count))
        return
    limit = CHUNK * max(2, torch.get_num_threads())
    alone = bool(program.entries) or any([name in _FUSED for name, _, _ in program.steps])
    batch: list[_Part] = []
    total = 0
    for i, x in enumerate(columns[0]):
        offset = 0 if draws is None else draws.offsets[i]
        # Random bits have another key after 2**32 elements of a leaf.
        for start, stop in block_ranges(offset, x.numel(), limit):
            if batch and (alone or total + stop - start > limit):
                yield batch
                batch, total = [], 0
            batch.append(_Part(i, start - offset, stop - offset))
            total += stop - start
    if batch:
        yield batch


def _parts(column: Sequence[Tensor], batch: Sequence[_Part]) -> list[Tensor]:
    return [
        column[of.leaf] if of.stop is None else column[of.leaf].detach().view(-1)[of.start : of.stop] for of in batch
    ]


def _split(x: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if len(sizes) == 1 or not isinstance(x, Tensor):
        return [x] * len(sizes)
    return x.split(sizes)


def _words(x: Tensor, batch: Sequence[_Part], draws: Draws, stream: int) -> Tensor:
    """The random bits for the elements of a batch, in a few calls."""
    if batch[0].stop is None:
        return draws.words(x, batch[0].leaf, stream)
    stride, begin = stride_of(draws.form), 0
    first, second = [], []
    for of in batch:
        index = draws.offsets[of.leaf] + of.start
        key = stream_key(draws.seed, draws.step, draws.keys[of.leaf], block=index >> 32, stream=stream)
        first.append(as_int32((index - begin) * stride + key[0]))
        second.append(as_int32(key[1]))
        assert of.stop is not None
        begin += of.stop - of.start
    counter = torch.arange(begin, dtype=torch.int32).mul_(as_int32(stride))
    if len(batch) == 1:
        return draw(counter.add_(first[0]), second[0])
    sizes = torch.tensor([of.stop - of.start for of in batch if of.stop is not None])
    words = torch.tensor([first, second], dtype=torch.int32).repeat_interleave(sizes, dim=1)
    return draw(counter.add_(words[0]), words[1])


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
    batch: Sequence[_Part],
    entries: Sequence[Tensor],
) -> dict[str, Any]:
    """The registers of what is computed together, that are stored or added up: numbers, and tensors in their dtypes."""
    if program.spread:
        width = program.widths([[x] for x in row])[0]
        spread = (*program.spread, *repeat("", len(row) - len(program.spread)))
        row = [_spread(x, of, width, row[0]) for x, of in zip(row, spread, strict=True)]
    found: dict[str, Any] = {f"x{i}": row[i] for i in range(len(program.loads))}
    # A result that is an argument unchanged must not change with it.
    for name in {name for _, name in program.stores} & found.keys():
        found[name] = found[name].clone()
    found |= {
        f"n{i}": int(x) if kind == 4 else x for i, (x, kind) in enumerate(zip(numbers, program.numbers, strict=True))
    }
    found |= {f"s{i}": x for i, x in enumerate(scalars)}
    for i, (x, kind) in enumerate(zip(entries, program.entries, strict=True)):
        # Numbers that differ by leaf are those of one leaf alone.
        found[f"e{i}"] = x[batch[0].leaf].to(row[0].device, _DTYPES[kind])
    words: dict[str, Tensor] = {}
    wide: dict[str, Any] = {}

    def of(name: str) -> Any:
        """A register to compute with: those of 16 bits are in float32."""
        if name not in wide:
            x = found[name]
            wide[name] = _wide(x) if isinstance(x, Tensor) else x
        return wide[name]

    for i, ((name, given, kind), dead) in enumerate(zip(program.steps, _last_used(program), strict=True)):
        if dead is None:
            continue
        if name == "random":
            assert draws is not None
            x, stream = of(given[0]), given[1]
            if stream not in words:
                words[stream] = _words(x, batch, draws, int(stream[1:]))
            shift = int(given[2])
            bits = words[stream] >> shift if shift else words[stream]
            made = stochastic_round(x, _DTYPES[kind], bits=bits)
        elif name == "to":
            made = of(given[0])
        else:
            made = (OPERATIONS[name].torch or getattr(torch, name))(*_arguments(name, [of(x) for x in given]))
        found[f"x{i + len(program.loads)}"] = made.to(_DTYPES[kind]) if isinstance(made, Tensor) else made
        # What is not needed any more makes room in the cache.
        for x in dead:
            wide.pop(x, None)
            found.pop(x, None)
    return found


@cache
def _last_used(program: Program) -> list[list[str] | None]:
    """For each step the registers that are used in it for the last time, and are no results; `None` if nobody needs it.

    Squares that are added up are made in float64, of their roots.
    """
    kept = {name for _, name in program.stores} | {program.squared(name) or name for name in program.sums}
    found: list[list[str] | None] = []
    for i in range(len(program.steps) - 1, -1, -1):
        if f"x{i + len(program.loads)}" not in kept:
            found.append(None)
            continue
        last = [x for x in dict.fromkeys(program.steps[i][1]) if x[0] == "x" and x not in kept]
        kept.update(last)
        found.append(last)
    return found[::-1]


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
