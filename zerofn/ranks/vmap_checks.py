"""Batches of `torch.func.vmap` over ranks: refused if lengths differ, or if `hessian` or `jacfwd` made them.

A vector in the layout of a sharded state is cut over ranks as the state is. A batch of such vectors is sent member by
member: member i of every rank together. `jacfwd`, `hessian` and `jacrev` of a gradient make a batch on each rank, the
basis vectors of this rank's shard. Member i of two ranks would be two basis vectors in one, and the result a sum of two
columns. Such a batch differs from others in its numbers alone, so these are read: one pass over a batch, and one small
message.
"""

from __future__ import annotations

import itertools
import zlib

import torch
from torch import Tensor

from .._errors import explain
from .backend import gather_objects
from .collectives import gather_numbers
from .group import Group

PRODUCTS = """products with vectors that are laid out as state.params is, alone or under vmap:
torch.func.jvp(torch.func.grad(fn_stored), (state.params,), (vector,))[1]
or what such products tell: zf.curvature.max_eigenvalue, spectrum, trace
or each rank's own Hessian, of full parameters, averaged:
own = torch.func.hessian(fn)(zf.full_params(tx, state), x)
mean = zf.collectives.all_reduce(own["w"]["w"], group) / group.size"""


def check_batch(batch: tuple[int, ...], path: str, group: Group, parts: Tensor | None = None) -> None:
    """Raise on every rank where the ranks' batches do not belong together. Every rank of the group calls it.

    Args:
        batch: the shape of the batch.
        path: of the leaf.
        group: the ranks.
        parts: (members, elements) of vectors, where each rank has a part of them.

    Raises:
        ValueError: batches differ in shape, or are bases on several ranks.
    """
    low, high = (0, 0) if parts is None else _basis(parts)
    rows = gather_numbers([zlib.crc32(repr(tuple(batch)).encode()), low, high], group, "match")
    bases = sorted((lo, hi, rank) for rank, (_, lo, hi) in zip(group.ranks, rows, strict=True) if lo < hi)
    differ = len({shape for shape, _, _ in rows}) > 1
    if bases and (differ or any(one[1] > two[0] for one, two in itertools.pairwise(bases))):
        raise ValueError(_no_basis(path))
    if differ:
        shapes = gather_objects(tuple(batch), group)
        by_rank = ", ".join(f"{shape} on rank {rank}" for rank, shape in zip(group.ranks, shapes, strict=True))
        raise ValueError(
            explain(
                f"torch.func.vmap over batches that differ between ranks, through {path}: {by_rank}",
                "what a member of the batch does with the parameters is exchanged with the same member of other ranks",
                "batches of one length on every rank: as many samples, or outputs of a Jacobian"
                + ("" if parts is None else f". Where it was torch.func.hessian, jacfwd or jacrev:\n{PRODUCTS}"),
            )
        )


def _basis(parts: Tensor) -> tuple[int, int]:
    """The first member of a batch that is a basis vector of this rank's part, and the one after the last; else (0, 0).

    `chunk_size` may cut a basis anywhere. A single vector counts as a basis vector if its one nonzero is 1.
    """
    members, elements = parts.shape
    count = int(torch.count_nonzero(parts))
    if not 0 < count <= min(members, elements):
        return 0, 0
    i, j = torch.nonzero(parts).unbind(1)
    diagonal = bool((i - i[0] == torch.arange(count, device=i.device)).all()) and bool((j - i == j[0] - i[0]).all())
    if not diagonal or (count == 1 and float(parts[i[0], j[0]]) != 1.0):
        return 0, 0
    return int(i[0]), int(i[-1]) + 1


def _no_basis(path: str) -> str:
    return explain(
        f"torch.func.hessian, jacfwd, or jacrev of a gradient, of a bound function on several ranks ({path})",
        "the stored parameters are spread over ranks, and every rank has put in the basis of its own part at the same "
        "time:\nmember by member these are one vector, so columns would be added up",
        PRODUCTS,
    )
