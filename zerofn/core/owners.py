"""Whole leaves at an owner, and whole rows, where leaves are sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import is_shape_only
from .._errors import bad_leaves, explain
from ..kernels.recording import concrete, numbers_alone
from ..ranks.backend import gather_objects
from ..ranks.differentiable import exchange_rows, nothing_of
from .bucketed_views import spans_by_rank
from .chain import replace_innermost
from .context import Context
from .facts import OF_LEAVES, Scope
from .layout import Layout, Leaf, Leaves, rows_between
from .transform import Transform, TransformState, no_state
from .tree import Name, flatten, named, of_leaves, overlaid, places, renamed, tree_map
from .view import Wire, place_in

# ----------------------------------------------------------------------------------------------------------------------
# An owner is the one rank that updates a whole leaf, where leaves are sharded over ranks.
#
# Parameters stay sharded. For an update the shards of a leaf's gradient and parameter travel to the owner. It runs the
# transform on whole leaves, as one process would, and sends the result back in shards. Only the owner keeps the state.
# Each matrix is computed once in the whole job, and the traffic is one all-to-all each way: a rank sends its shards of
# others' leaves, and gets others' shards of its own. The alternative, to all-gather every leaf, sends as many bytes
# times the number of ranks, and all ranks compute every leaf.
#
# With the shards each owner sends back a flag that says whether its function raised. So all ranks raise in the same
# step, and none waits for another. First states are not sent back, so there owners send the flag by itself.


IN_UPDATE = "an update of whole leaves that failed at their owner"
GO_ON = "a function without that error, or on every rank: except Exception: opt.zero_grad()"
IN_INIT = "a first state of whole leaves (init=) that failed at their owner"
INIT_AGAIN = "an init= without that error"


class OwnerFailed(RuntimeError):
    """An owner could not update its leaves, or make their first states. It is raised on every rank.

    Args:
        lines: for each owner that failed, its rank and why.
        wrong: the call that failed.
        right: the right code.
    """

    def __init__(self, lines: Sequence[str], wrong: str = IN_UPDATE, right: str = GO_ON):
        self.lines = list(lines)
        super().__init__(explain(wrong, "\n".join(lines), right))


def assign_owners(leaves: Sequence[Leaf], size: int, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """By path: the rank that updates the leaf, chosen by the sizes of leaves and the number of ranks alone.

    The largest leaf comes first, and each goes to the rank that has least to do. Leaves that have an owner keep it.

    >>> shapes = {"a": 6, "b": 5, "c": 4, "d": 3}
    >>> leaves = [Leaf(path, torch.Size([n]), torch.float32, "cpu") for path, n in shapes.items()]
    >>> assign_owners(leaves, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0] * size
    found: dict[str, int] = {}
    known = known or {}
    for leaf in sorted(leaves, key=lambda leaf: (leaf.path not in known, -leaf.numel)):
        found[leaf.path] = known.get(leaf.path, min(range(size), key=lambda rank: load[rank]))
        # A leaf without elements counts as 1, so that not all of these go to one rank.
        load[found[leaf.path]] += leaf.numel + 1
    return found


@dataclass(frozen=True)
class AxisExchange:
    """Sends shards to the owners of leaves, and results back, along one axis of ranks.

    Attributes:
        wire: the wire that shards leaves along it.
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner's place along the axis.
        spans: for each rank, by path: its range of the flat leaf, or of the shard that this axis has of it.
    """

    wire: Wire
    leaves: tuple[Leaf, ...]
    rank_of: dict[str, int]
    spans: list[dict[str, tuple[int, int]]]

    @classmethod
    def of(cls, wire: Wire, leaves: tuple[Leaf, ...], rank_of: dict[str, int]) -> AxisExchange:
        """The exchange of leaves that this wire shards. It computes spans here: a compiled graph cannot."""
        group = wire.group
        wires = [wire.on(replace(group, rank=rank), None) for rank in range(group.size)]
        found = [{leaf.path: each.span(leaf) for leaf in leaves} for each in wires]
        begin = {leaf.path: min(spans[leaf.path][0] for spans in found) for leaf in leaves}
        spans = [{p: (low - begin[p], high - begin[p]) for p, (low, high) in own.items()} for own in found]
        return cls(wire, leaves, rank_of, spans)

    def to_owners(self, pieces: Leaves, received: list[Tensor]) -> Leaves:
        out: Leaves = {}
        for leaves in self._by_dtype(pieces):
            like, owned = pieces[leaves[0].path], self._by_owner(leaves)
            mine = owned[self.wire.group.rank]
            sent = [[pieces[leaf.path] for leaf in of_rank] for of_rank in owned]
            lengths = [[self._length(rank, leaf) for leaf in mine] for rank in self._ranks]
            got, rows = self._exchange(sent, lengths, like)
            received.append(rows)
            for i, leaf in enumerate(mine):
                in_turn = sorted(self._ranks, key=lambda rank, path=leaf.path: self.spans[rank][path])
                full = torch.cat([got[rank][i] for rank in in_turn])
                out[leaf.path] = full.view(leaf.shape if full.numel() == leaf.numel else -1)
        return out

    def to_pieces(self, wholes: Leaves | Exception, like: Leaves, first: Tensor, nothing: Tensor | None) -> Leaves:
        out: Leaves = {}
        own_rank = self.wire.group.rank
        # If no leaf travels along this axis, a flag is sent all the same: a rank that owns none may have failed too.
        for leaves in self._by_dtype(like) or [[]]:
            first, owned = like[leaves[0].path] if leaves else first, self._by_owner(leaves)
            mine = owned[own_rank]
            if isinstance(wholes, Exception):
                flat = {leaf.path: first.new_zeros(leaf.numel) for leaf in mine}
            else:
                flat = {leaf.path: wholes[leaf.path].to(first.dtype).reshape(-1) for leaf in mine}
            sent = [[flat[x.path][slice(*self.spans[rank][x.path])] for x in mine] for rank in self._ranks]
            lengths = [[self._length(own_rank, x) for x in of_rank] for of_rank in owned]
            # A graph sends no flag: Python cannot branch in it, and a function that raises does so while it is traced.
            sends_flag = concrete(first)
            if not sends_flag and not leaves:
                continue
            if sends_flag:
                flag = first.new_full((1,), float(isinstance(wholes, Exception)))
                sent, lengths = [[*parts, flag] for parts in sent], [[*of_rank, 1] for of_rank in lengths]
                group = self.wire.group
                group.traffic.of_numbers["all_to_all"] += (group.size - 1) * flag.element_size()
            got, _ = self._exchange(sent, lengths, first, nothing)
            if sends_flag and bool(torch.cat([parts.pop() for parts in got]).any()):
                raise OwnerFailed(self.failures(wholes))
            for of_rank, parts in zip(owned, got, strict=True):
                out.update({leaf.path: part.view(-1) for leaf, part in zip(of_rank, parts, strict=True)})
        if isinstance(wholes, Exception):
            raise wholes
        return {path: out[path] for path in like}

    def failures(self, wholes: Leaves | Exception | None) -> list[str]:
        """A line for each owner of this axis that failed; asks all of its ranks."""
        group = self.wire.group
        mine: list[str] = []
        if isinstance(wholes, OwnerFailed):
            mine = wholes.lines
        elif isinstance(wholes, Exception):
            mine = [f"rank {group.ranks[group.rank]}: {type(wholes).__name__}: {wholes}"]
        return list(dict.fromkeys(line for lines in gather_objects(mine, group) for line in lines))

    @property
    def _ranks(self) -> range:
        return range(self.wire.group.size)

    def _by_owner(self, leaves: list[Leaf]) -> list[list[Leaf]]:
        """For each rank, the leaves that it owns."""
        return [[leaf for leaf in leaves if self.rank_of[leaf.path] == rank] for rank in self._ranks]

    def _length(self, rank: int, leaf: Leaf) -> int:
        low, high = self.spans[rank][leaf.path]
        return high - low

    def _by_dtype(self, tensors: Leaves) -> list[list[Leaf]]:
        """Lists of leaves, each of which travels in one message."""
        found: dict[Any, list[Leaf]] = {}
        for leaf in self.leaves:
            if leaf.path in tensors:
                found.setdefault((tensors[leaf.path].dtype, tensors[leaf.path].device), []).append(leaf)
        return list(found.values())

    def _exchange(
        self, sent: list[list[Tensor]], lengths: list[list[int]], like: Tensor, nothing: Tensor | None = None
    ) -> tuple[list[list[Tensor]], Tensor]:
        """All-to-all of lists of tensors, one list for each rank; `lengths` are those that each rank receives.

        The results are columns, and all of them one below the other: in a second derivative `torch.cat` leaves out
        tensors with one axis and no elements. They depend on `nothing`.
        """
        hung = [like.new_empty((0, 1)) if nothing is None else nothing.to(like)]
        rows = torch.cat([*hung, *(x.reshape(-1, 1) for parts in sent for x in parts)])
        totals = [sum(of_rank) for of_rank in lengths]
        out = exchange_rows(rows, totals, [sum(x.numel() for x in parts) for parts in sent], self.wire.group)
        return [list(got.split(of_rank)) for got, of_rank in zip(out.split(totals), lengths, strict=True)], out


@dataclass(frozen=True)
class OwnerExchange:
    """Sends shards to the owners of leaves, and results back, along each axis of ranks that shards leaves.

    Shards go along the last axis first, which joins the shards that it has made. Each goes along each axis once, and
    no group of all ranks is needed.

    Attributes:
        axes: the exchange along each axis, in the order in which these shard leaves.
        leaves: all of them, in one order on all ranks.
        rank_of: by path, the owner: its place among the ranks that share a leaf, as `place_in` counts.
    """

    axes: tuple[AxisExchange, ...]
    leaves: tuple[Leaf, ...]
    rank_of: dict[str, int]

    def to_owners(self, pieces: Leaves, received: list[Tensor]) -> Leaves:
        """The whole leaves that this rank owns, from the shards of all ranks. Every rank passes the same paths.

        The received tensors are added to `received` too: none if this rank owns nothing.
        """
        for axis in reversed(self.axes):
            pieces = axis.to_owners(pieces, received)
        return pieces

    def to_pieces(
        self, wholes: Leaves | Exception, like: Leaves, first: Tensor, nothing: Tensor | None = None
    ) -> Leaves:
        """This rank's shards of all leaves, from the whole leaves at their owners.

        Args:
            wholes: the leaves that this rank owns; or the error because of which there are none.
            like: a tensor of the dtype and device of each shard, by path; the same paths on every rank.
            first: a tensor on that device.
            nothing: a tensor without elements, on which the shards are made to depend.

        Raises:
            OwnerFailed: on every rank, if there are none on one.
        """
        for i, axis in enumerate(self.axes):
            owned = _owned_here(self.axes[i + 1 :], like)
            try:
                wholes = axis.to_pieces(wholes, {path: like[path] for path in owned}, first, nothing)
            except Exception as error:  # the exchanges along the other axes send it on
                wholes = error
        if isinstance(wholes, Exception):
            raise wholes
        return wholes

    def agree(self, failure: Exception | None, form: TransformState) -> TransformState:
        """Tell all ranks why this one has failed, if it has, and the form of the first state that it has made.

        Returns:
            The states of all ranks, of tensors without memory.

        Raises:
            Exception: `failure`.
            OwnerFailed: on the other ranks.
        """
        for axis in self.axes:
            lines = axis.failures(failure)
            if failure is None and lines:
                failure = OwnerFailed(lines, IN_INIT, INIT_AGAIN)
            for other in gather_objects(form, axis.wire.group):
                form = overlaid(other, form)
        if failure is not None:
            raise failure
        return form


def _owned_here(axes: Sequence[AxisExchange], paths: Iterable[str]) -> list[str]:
    """The paths whose owner has this rank's place along each axis."""
    return [p for p in paths if all([axis.rank_of[p] == axis.wire.group.rank for axis in axes])]


def owner_exchange(
    cutting: Sequence[Wire], leaves: tuple[Leaf, ...], known: Mapping[str, int] | None = None
) -> OwnerExchange:
    """The exchange of leaves that these wires cut, one after the other; `known` has owners by path."""
    size = place_in(cutting)[1]
    rank_of = assign_owners(leaves, size, known)
    axes = []
    for wire in cutting:
        # The number of ranks among which the later axes divide one shard of this axis.
        size //= wire.group.size
        along = {path: rank // size % wire.group.size for path, rank in rank_of.items()}
        axes.append(AxisExchange.of(wire, leaves, along))
    return OwnerExchange(tuple(axes), leaves, rank_of)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives through updates at owners need the same collectives on every rank in backward, whatever a rank owns.
#
# The result of a rank that owns nothing depends on none of its inputs, so its backward would leave out collectives
# that others wait for. On every rank all results, pieces and states, are therefore made functions of all inputs of the
# update. A tensor without elements is added, which changes no number.


def nothing_of_all(values: Iterable[Any]) -> Tensor | None:
    """A tensor without elements that depends on all tensors in these trees; `None` if none requires grad.

    It is computed by an exponential of their sum, so that derivatives of any order, by any of them, depend on all.

    >>> w = torch.ones(2, requires_grad=True)
    >>> nothing_of_all([{"w": w}, 0.1]).shape, nothing_of_all([{"w": w.detach()}])
    (torch.Size([0, 1]), None)
    """
    found = [x for tree in values for x in flatten(tree)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    if numbers_alone(found) or not found:
        return None
    one = [nothing_of(x).to(found[0].device, torch.float32) for x in found]
    return torch.stack(one).sum(0).exp()


def hung_on(nothing: Tensor | None, state: Any) -> Any:
    """Add a zero that depends on all inputs, so that every rank has the collective in its backward graph."""
    if nothing is None:
        return state
    zero = nothing.sum()

    def hung(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        # Subtracting 0.0 changes no bit. Adding 0.0 would turn -0.0 into 0.0.
        if x.numel() > 1 and not any(x.stride()):
            # A leaf that another rank owns: it stays one element, expanded.
            return (x[(0,) * x.dim()] - zero.to(x)).expand(x.shape)
        return x - zero.to(x)

    return tree_map(hung, state)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms that need whole rows run on each rank's own rows, where leaves are cut by rows.
#
# Shards are flat. Such a transform is given this rank's rows of the leaf, of shape `(rows, ...)`, maybe none. A tensor
# of its state for a leaf has the shape of those rows, and is stored flat, as all shards are; or it has `k` numbers for
# each of them, of shape `(rows, k)`, and is stored so. A leaf that is not cut by rows goes to an owner.


# By path: the shape of this rank's rows of a leaf.
Rows = dict[str, tuple[int, ...]]


def local_rows(cutting: Sequence[Wire], leaves: Sequence[Leaf]) -> Rows:
    """The shape of this rank's rows, for each leaf of which every rank has whole rows."""
    found: Rows = {}
    for leaf in leaves:
        if all(rows_between(leaf.shape, *span) is not None for span in spans_by_rank(cutting, leaf)):
            mine = rows_between(leaf.shape, *cutting[-1].span(leaf))
            assert mine is not None
            # A 0-d leaf is a row of one element: 0-d, its state could not be distinguished from a counter.
            found[leaf.path] = mine or (1,)
    return found


def on_rows(t: Transform, rows: Rows, paths: Collection[str]) -> Transform:
    """The same transform, which gets rows of these leaves in place of flat shards; `paths` are those of all leaves."""
    flat: Rows = dict.fromkeys(rows, (-1,))

    def reshaped(state: TransformState, shapes: Rows) -> TransformState:
        def over(at: Name, x: Any) -> Any:
            cut = at.path in rows and at.slot not in t.facts.fixed and isinstance(x, Tensor)
            alike = cut and (x.ndim == 1 or tuple(x.shape) == rows[at.path])  # type: ignore[index]
            return x.reshape(shapes[at.path]) if alike else x  # type: ignore[index]

        return renamed(state, paths, over)

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        state = t.init_fn(_reshaped(pieces, rows), layout)
        _check_rows(t, named(state, paths), rows)
        return reshaped(state, flat)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        by_row = reshaped(state, rows)
        out, new = t.update_fn(_reshaped(grads, rows), by_row, _reshaped(params, rows), carry, ctx)
        return None if out is None else _reshaped(out, flat), reshaped(new, flat)

    return replace(t, needs="element", init_fn=init, update_fn=update)


def _check_rows(t: Transform, found: Sequence[tuple[Name, Any]], rows: Rows) -> None:
    """Refuse a first state with a tensor of another shape than the rows: stored flat, it would lose its shape."""
    name = t.name
    wrong = [
        ("/".join(filter(None, at)), f"of shape {tuple(x.shape)}, of rows of shape {rows[at.path]}")
        for at, x in found
        if at.path in rows
        and at.slot not in t.facts.fixed
        and not (t.facts.even_numbers if not x.ndim else by_rows(tuple(x.shape), rows[at.path]))
    ]
    if wrong:
        what = f'{name}: needs="row", and a first state in other shapes than the rows that a rank has of its leaves'
        right = 'needs="leaf", by which each leaf is updated whole, at one rank; or torch.zeros_like(p);\n'
        right += "         or of shape (rows, k), k numbers for each row"
        raise ValueError(bad_leaves(what, wrong, right))


def by_rows(shape: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether a tensor has the shape of a leaf's rows, or as many numbers for each of them.

    >>> [by_rows(shape, (4, 3, 2)) for shape in ((4, 3, 2), (4, 5), (4,), (3, 2))]
    [True, True, False, False]
    """
    return shape == rows or (len(shape) == 2 and len(rows) > 1 and shape[0] == rows[0])


def _reshaped(tensors: Leaves, shapes: Rows) -> Leaves:
    return {path: x.reshape(shapes[path]) if path in shapes else x for path, x in tensors.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Transforms that need whole leaves run at owners, where leaves are sharded over ranks.
#
# Only the owner has the state. On other ranks that state has the same shape and no memory (one element, expanded), so
# that states have the same structure on all ranks.


def _may_be_owned(t: Transform) -> bool:
    """Whether it needs whole leaves and no more, and has no transformation of another library inside."""
    return t.needs in OF_LEAVES and not t.facts.adds and all(p.needs != "tree" and not p.facts.adds for p in _inside(t))


def _inside(t: Transform) -> list[Transform]:
    return [x for part in t.parts for x in (part, *_inside(part))]


def run_at_owners(t: Transform, layout: Layout, cutting: Sequence[Wire]) -> tuple[Transform, dict[str, dict[str, int]]]:
    """The same transform, in which transforms that need whole leaves run at the owners.

    Of a `partition` only leaves of members that need whole leaves are sent; for a member that needs rows only leaves
    that are not sharded by rows. It also returns the owners by path, for each place in the state of `t` that has whole
    leaves.
    """
    ranks: dict[str, dict[str, int]] = {}
    # A layout that is resolved again, with more leaves that are trained, has owners of the others.
    before = layout.placement.owners if layout.placement.size == place_in(cutting)[1] else ()

    def owned(part: Transform, paths: Set[str], where: str) -> Transform:
        leaves = tuple(leaf for leaf in layout.trainable if leaf.path in paths)
        if not _may_be_owned(part):
            return part
        if part.idle and part.init_fn is no_state:
            # It has only a view, so owners would send back the gradients that they got.
            return replace(part, needs="element")
        rows: Rows = local_rows(cutting, leaves) if part.needs == "row" else {}
        if rows:
            part, leaves = on_rows(part, rows, layout.every), tuple(leaf for leaf in leaves if leaf.path not in rows)
        if not leaves:
            return replace(part, needs="element")
        known = {path: rank for name, at, of in before if (name, at) == (t.name, where) for path, rank in of}
        at = owner_exchange(cutting, leaves, known)
        ranks[where] = at.rank_of
        return _at_owners(part, at, layout.every)

    return replace_innermost(t, owned, layout), ranks


def _at_owners(part: Transform, at: OwnerExchange, paths: Set[str]) -> Transform:
    """The same transform, run on leaves of the exchange at their owners, and on this rank's shards of the others.

    Args:
        part: the transform.
        at: the exchange, which knows the owner of each leaf.
        paths: of all leaves.
    """
    owned = {leaf.path for leaf in at.leaves}

    def init(pieces: Leaves, layout: Layout) -> TransformState:
        unowned = {path: x for path, x in pieces.items() if path not in owned}
        shapes = {**{path: x.shape for path, x in unowned.items()}, **{x.path: x.shape for x in at.leaves}}
        forms = {path: (shapes[path], x.dtype) for path, x in pieces.items()}
        if all(x.is_meta or is_shape_only(x) for x in pieces.values()):
            return part.init_fn({p: pieces[p].new_empty(shape) for p, (shape, _) in forms.items()}, layout)
        received: list[Tensor] = []
        wholes = at.to_owners(pieces, received)
        failure: Exception | None = None
        own: TransformState = {}
        try:
            own = part.init_fn(_ordered({**unowned, **wholes}, pieces), layout)
        except Exception as error:
            # Each owner makes states of other leaves, so it may fail on this rank alone. `agree` tells the others.
            failure = error
        device = next(iter(pieces.values())).device
        made = overlaid(
            tree_map(lambda x: _expanded(x, device), at.agree(failure, tree_map(_without_numbers, own))), own
        )
        # The states of ranks were merged one after the other; `of_leaves` restores the order of leaves.
        return hung_on(nothing_of_all(received), of_leaves(made, places(made, paths), pieces))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        owned_params = {path: params[path] for path in grads if path in owned}
        owned_grads = {path: g for path, g in grads.items() if path in owned}
        unowned = {path: g for path, g in grads.items() if path not in owned}
        received: list[Tensor] = []
        wholes = _ordered({**{path: params[path] for path in unowned}, **at.to_owners(owned_params, received)}, grads)
        all_of = _ordered({**unowned, **at.to_owners(owned_grads, received)}, grads)
        own = of_leaves(state, places(state, paths), all_of)
        nothing = nothing_of_all((received, state, carry)) if ctx.recorded else None
        like, first = owned_params if part.facts.optimizes else owned_grads, next(iter(params.values()))
        try:
            out, new = part.update_fn(all_of, own, wholes, carry, replace(ctx, offsets={}))
        except Exception as error:
            # Each owner updates other leaves, so it may fail on this rank alone. The others wait for its results, and
            # get a flag with them.
            with contextlib.suppress(OwnerFailed):
                at.to_pieces(error, like, first, nothing)
            raise
        kept = hung_on(nothing, overlaid(state, new))
        if out is None:
            return None, kept
        pieces = at.to_pieces(out, like, first, nothing)
        return {path: pieces[path] if path in owned else out[path] for path in grads}, kept

    return replace(part, scope=Scope.WHOLE, needs="element", init_fn=init, update_fn=update)


def _ordered(found: Leaves, like: Leaves) -> Leaves:
    """Leaves in the order of `like`. Leaves that were sent come by dtype, behind the others."""
    return {path: found[path] for path in like if path in found}


def _without_numbers(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _expanded(x: Tensor, device: torch.device) -> Tensor:
    """The place of a tensor that another rank has: its shape, in the memory of one element."""
    return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)
