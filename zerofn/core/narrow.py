"""Messages of 8 bits for each number: codes for blocks of numbers, a scale for each block, and sums of what arrives.

As in ZeRO++ (Wang et al., 2023), each rank codes its gradients for each other rank, sends the codes in one hop, and
adds the decoded numbers in fp32. Codes are never added. Unlike ZeRO++, gradients are rounded stochastically, so that
the sum is right on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._errors import explain
from ..kernels.codes import BlockDraws, Codes, Float8
from ..ranks.collectives import all_gather_into, all_to_all_into
from ..ranks.group import Group

# ----------------------------------------------------------------------------------------------------------------------
# A message has one row of bytes for each rank: codes, then scales in fp32, then flags.
#
# A leaf begins at a block of its own, so that its codes do not depend on the leaves that travel with it: both routes
# and all sizes of buckets give the same bits.


AnyCodes = Codes | Float8
# The codes that a user chooses by name.
INT8 = Codes(8, 128, "linear", signed=True)
CODES: dict[str, AnyCodes] = {"int8": INT8, "fp8": Float8(128)}


def codes_of_wire(function: str, wire: str | None, known: Sequence[str] = ("int8",), name: str = "wire") -> Any:
    """Return the codes for an argument `wire=` of a function; `None` if numbers are sent uncoded.

    Args:
        function: the function that was called.
        wire: the argument.
        known: the names that the function allows.
        name: the argument's name.

    Raises:
        ValueError: the function does not allow this name.

    Examples:
        >>> codes_of_wire("reduce_scatter", "int8").nbytes(128)
        132
    """
    if wire is None:
        return None
    if wire not in known:
        why = f"{name} is one of {', '.join(map(repr, known))}, or None: numbers as they are"
        raise ValueError(explain(f"{function}({name}={wire!r})", why, f"{function}({name}={known[0]!r})"))
    return CODES[wire]


def _padded(widths: Sequence[int], block: int) -> list[int]:
    return [-(-width // block) * block for width in widths]


def coded_rows(rows: Tensor, widths: Sequence[int], codes: AnyCodes, draws: BlockDraws | None) -> Tensor:
    """Rows of numbers, and flags behind them, as rows of bytes.

    Args:
        rows: (ranks, sum of widths + flags), fp32.
        widths: of each leaf in a row.
        codes: of 8 bits.
        draws: how numbers are rounded; by default to nearest.
    """
    numbers, flags = rows.split_with_sizes([sum(widths), rows.shape[1] - sum(widths)], dim=1)
    padded = _padded(widths, codes.block)
    if padded != list(widths):
        numbers = torch.cat(
            [
                pad(x, (0, each - x.shape[1]))
                for x, each in zip(numbers.split_with_sizes(list(widths), dim=1), padded, strict=True)
            ],
            dim=1,
        )
    coded, scales = codes.encode(numbers.contiguous(), draws)  # type: ignore[arg-type]
    return torch.cat([coded, scales.view(torch.uint8), (flags > 0).to(torch.uint8)], dim=1)


def decoded_rows(message: Tensor, widths: Sequence[int], codes: AnyCodes) -> tuple[Tensor, Tensor]:
    """The numbers of rows of bytes, fp32 (ranks, sum of padded widths), and the flags (ranks, flags)."""
    total = sum(_padded(widths, codes.block))
    sizes = [total, total // codes.block * 4]
    coded, scales, flags = message.split_with_sizes([*sizes, message.shape[1] - sum(sizes)], dim=1)
    scales = scales.reshape(-1).view(torch.float32).view(len(message), total // codes.block)
    return codes.decode(coded, scales, (len(message), total)), flags


def summed_rows(message: Tensor, widths: Sequence[int], codes: AnyCodes) -> tuple[list[Tensor], Tensor]:
    """Sums over ranks of the rows that they have sent: the numbers of each leaf, in fp32, and the flags."""
    rows, flags = decoded_rows(message, widths, codes)
    blocks = rows.sum(0).split_with_sizes(_padded(widths, codes.block))
    return [x[:n] for x, n in zip(blocks, widths, strict=True)], flags.sum(0)


class Decoding:
    """The work handle of an all-gather of codes: `wait` decodes what has arrived."""

    def __init__(self, work: Any, decode: Callable[[], object]):
        self.work, self.decode = work, decode

    def wait(self) -> bool:
        self.work.wait()
        with torch.no_grad():
            self.decode()
        return True


def gather_codes(
    parts: Sequence[Tensor], widths: Sequence[int], codes: AnyCodes, group: Group
) -> tuple[Decoding, Tensor]:
    """Begin to all-gather codes of shards (n,): a work handle, and the rows of all ranks, which `wait` fills.

    Rows are (ranks, sum of widths) in the dtype of the shards. Shards are padded with zeros.
    """
    row = torch.cat([pad(x.to(torch.float32), (0, n - len(x))) for x, n in zip(parts, widths, strict=True)])
    mine = coded_rows(row[None], widths, codes, None)
    every = mine.new_empty((group.size, mine.shape[1]))
    rows = parts[0].new_empty((group.size, sum(widths)))

    def decode() -> None:
        found = decoded_rows(every, widths, codes)[0]
        padded = _padded(widths, codes.block)
        if padded != list(widths):
            blocks = found.split_with_sizes(padded, dim=1)
            found = torch.cat([x[:, :n] for x, n in zip(blocks, widths, strict=True)], dim=1)
        rows.copy_(found)

    return Decoding(all_gather_into(every.view(-1), mine.view(-1), group, async_op=True), decode), rows


def narrow_mean(xs: Sequence[Tensor], group: Group, codes: AnyCodes) -> list[Tensor]:
    """The mean of flat tensors over ranks, fp32 and equal on all of them: a reduce-scatter and an all-gather of codes.

    Each rank sends `2 (N-1)/N` codes for each number. A number is rounded once on each rank, and its mean once more.
    """
    size, rank, numels = group.size, group.rank, [x.numel() for x in xs]
    padded = _padded(numels, codes.block)
    each = _padded([-(-sum(padded) // size)], codes.block)[0]
    flat = torch.cat([pad(x.to(torch.float32), (0, n - x.numel())) for x, n in zip(xs, padded, strict=True)])
    rows = pad(flat, (0, size * each - len(flat))).view(size, each) / size
    sent = coded_rows(rows, [each], codes, BlockDraws(rank))
    received = torch.empty_like(sent)
    all_to_all_into(received, sent, group, what="reduce_scatter")
    (mean,), _ = summed_rows(received, [each], codes)
    mine = coded_rows(mean[None], [each], codes, BlockDraws(size + rank))
    every = mine.new_empty((size, mine.shape[1]))
    all_gather_into(every.view(-1), mine.view(-1), group)
    found = decoded_rows(every, [each], codes)[0].reshape(-1)[: len(flat)].split_with_sizes(padded)
    return [x[:n] for x, n in zip(found, numels, strict=True)]
