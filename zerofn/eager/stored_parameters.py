"""Converts parameters between their stored and their resident form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.tensors import Writes, read_grad, write_grad, writes
from .._errors import explain
from .._interrupts import interrupts_held
from ..core.bucketed_views import into_buckets
from ..core.chain import replace_innermost
from ..core.facts import Shadow
from ..core.layout import Layout, Leaf, Leaves
from ..core.pipeline import Pipeline
from ..core.transform import Transform
from ..core.view import same_tensor, see, store
from ..module.complex_parameters import follow
from .current_state import CurrentState

# ----------------------------------------------------------------------------------------------------------------------
# `StoredParameters` refreshes parameters whose stored form is another tensor, and stores what the user writes into
# them.
#
# Where `all_reduce` or `reduce_scatter` makes full parameters, they are all-gathered again after an update, one bucket
# at a time. Where `precision(param_dtype=...)` follows one of them, the model has full parameters in the compute dtype
# and the state has their masters. `model.load_state_dict`, `nn.init` and `p.data.clamp_()` write into the copy, and
# the next update would overwrite it from the masters without an error. So writes are stored, element by element: an
# element that was not written is more exact in its master.
#
# A write by NumPy through `p.detach().numpy()` changes no version counter, and is lost.
#
# A transform may keep slots that follow from a parameter (`Facts.shadows`): the iterate of `schedule_free`, the slow
# weights of `lookahead`. Where somebody writes into the parameter, these are taken anew from it. Which elements were
# written shows a copy of the parameter. It is kept from the first write into a leaf on, since nearly no program writes;
# at that first write all elements are taken anew that differ.


class StoredParameters:
    """The stored form of an attached model's parameters, where it is another tensor than the parameter.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        current: the current state.

    Attributes:
        buckets: the leaves that `refresh` writes at once, each with its parameters; none if parameters are the stored
            tensors, and are seen as they are.
        leaves: those whose parameter is a copy: in another dtype, or seen through a view that changes numbers.
        copies: their parameters by path.
        movable: whether `p.data = x` may give a parameter other memory: not under `shard`, where a parameter says so
            itself, and not where the memory is DTensors' or that of a captured graph.
        at: by path, the address of each parameter's memory.
        shadows: the slots that follow from a parameter, each with the transform that has it, and its place there.
        watched: the parameters by path into which writes are noted: all if there are `shadows`, else `copies`.
        last: copies of stored leaves that were written into before, as the last step has left them.
        handed_out: by transform, slot and path, how often a shadow was written when somebody last got the state's own
            tensors, in a `state_dict`. Who writes into both, as `dcp.load` does, has loaded both.
    """

    def __init__(self, pipe: Pipeline, params: Leaves, current: CurrentState):
        self.pipe, self.params, self.current = pipe, params, current
        # The views between the stored and the resident form.
        self.views = pipe.road.after_update
        changed = any([view.view is not same_tensor for view in self.views])
        group = next((view.wire.group for view in self.views if view.wire is not None), None)
        self.dtypes = {path: x.dtype for path, x in params.items()}
        buckets = into_buckets(pipe.layout.leaves, self.dtypes, group) if changed else []
        self.buckets = [(bucket, {leaf.path: params[leaf.path] for leaf in bucket}) for bucket in buckets]
        stored, viewed = current.state.leaves, pipe.road.renumbers_after_update
        self.leaves = [x for x in pipe.layout.leaves if viewed or params[x.path].dtype != stored[x.path].dtype]
        self.copies = {leaf.path: params[leaf.path] for leaf in self.leaves}
        self.leaf_of = {leaf.path: leaf for leaf in pipe.layout.leaves}
        self.shadows = _shadows(pipe)
        self.watched = params if self.shadows else self.copies
        self.last: dict[str, Tensor] = {}
        self.handed_out: dict[tuple[str, str, str], Writes] = {}
        # Plain full parameters can be written directly, without a view of each.
        self.plain = set(map(type, params.values())) <= {Tensor, nn.Parameter}
        self.counts = self._counts()
        self.movable = pipe.gathering is None and self.plain
        self.at, self.strides = self._addresses(), {path: x.stride() for path, x in params.items()}

    def _addresses(self) -> dict[str, int]:
        with torch.DisableTorchFunctionSubclass():
            return dict(zip(self.params, map(Tensor.data_ptr, self.params.values()), strict=True))

    @torch.no_grad()
    def take_data(self) -> None:
        """Store what the user has put in by `p.data = x`, as `torch.nn.utils.vector_to_parameters` does.

        The parameter gets memory of its own for it: the user's tensor, and one kept from before, stay as they are.
        """
        if not self.movable or self.current.torn or self._addresses() == self.at:
            return
        with torch.DisableTorchFunctionSubclass():
            for leaf in self.pipe.layout.leaves:
                p, stored = self.params[leaf.path], self.current.state.leaves[leaf.path]
                given, strides = p.detach(), self.strides[leaf.path]
                same = p.shape == leaf.shape and p.dtype == self.dtypes[leaf.path] and p.device == stored.device
                if p.data_ptr() == self.at[leaf.path] or not same or (p.is_cpu and p.is_shared()):
                    continue
                Tensor.data.__set__(p, torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device))  # type: ignore[attr-defined]
                # Graphs of a backward under way have saved `p`, whose numbers stay as they are.
                p.detach().data.copy_(given)
                if leaf.path in self.copies:
                    self._store(leaf)
                    (self.counts[leaf.path],) = writes([p])
                else:
                    stored.data = self.pipe.road.own(p.detach(), leaf)
                    self.written(leaf.path)
                    if leaf.path in self.watched:
                        (self.counts[leaf.path],) = writes([p])
                self.at[leaf.path] = p.data_ptr()

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the stored values into the parameters, as the model sees them."""
        stored, road = self.current.state.leaves, self.pipe.road
        for bucket, params in self.buckets:
            plain = params
            if not self.plain:
                # Write into the local shard; without this guard copy_ would all-gather.
                with torch.DisableTorchFunctionSubclass():
                    plain = dict(zip(params, map(Tensor.detach, params.values()), strict=True))
            seen = road.see(self.views, stored, bucket, plain)
            for path, x in seen.items() if seen is not plain else ():
                if x is not plain[path] and x.data_ptr() != plain[path].data_ptr():
                    plain[path].copy_(x)
        if self.watched:
            self.counts = self._counts()

    def store_writes(self) -> None:
        """Store new writes into copies. Of a torn state nothing is stored: its copies are older than the state."""
        if self.current.torn:
            return
        if self._counts() != self.counts:
            with interrupts_held():
                for path in self.watched:
                    self.store_writes_of(path)

    def store_writes_of(self, path: str) -> None:
        """Store new writes into a parameter, if it is watched."""
        p = self.watched.get(path)
        if p is None or self.current.torn:
            return
        (now,), before = writes([p]), self.counts[path]
        if now == before:
            return
        if path in self.copies:
            self._store(self.leaf_of[path])
        elif now[0] != before[0] or path in self.last:
            # Where only `p.data` was read, nothing tells whether it was written.
            self.written(path)
        (self.counts[path],) = writes([p])

    @torch.no_grad()
    def _store(self, leaf: Leaf) -> None:
        """Store the elements of a copy that differ from its master."""
        master = self.current.state.leaves[leaf.path]
        new = store(self.views, self.params[leaf.path].detach(), leaf)
        copy, seen = self._both(leaf)
        changed = copy != seen
        master.copy_(torch.where(changed, new.to(master.dtype), master))
        self.written(leaf.path, changed)

    @torch.no_grad()
    def take(self, path: str, full: Tensor) -> None:
        """Store values that are about to be written into a copy, whose dtype would round them."""
        leaf = self.leaf_of[path]
        if self.current.torn or full.shape != leaf.shape or self.pipe.road.renumbers_after_update:
            return
        # What was written before is stored first, since the copy shows it no longer afterwards.
        self.store_writes_of(path)
        master = self.current.state.leaves[path]
        new = self.pipe.road.store(full.detach().to(master.device), leaf)
        changed = new != master
        master.copy_(new)
        self.written(path, changed)

    @torch.no_grad()
    def written(self, path: str, changed: Tensor | None = None) -> None:
        """Take anew what transforms keep of a stored leaf that was written into.

        Args:
            path: of the leaf.
            changed: which of its elements; by default those that differ from `last`, or all.

        Raises:
            RuntimeError: this rank cannot, since the owner of the leaf keeps it whole, or it is kept in codes.
        """
        if not self.shadows:
            return
        state = self.current.state
        new, last = state.leaves[path], self.last.get(path)
        if changed is None:
            changed = None if last is None else new != last
        if changed is not None and not changed.any():
            return
        # Nearly no program writes, and this module would be loaded for each.
        from ..core.state_entries import entries

        found = entries(state)
        numbers = {(e.owner, e.slot): e.value for e in found if not e.of_leaf}
        for e in found:
            key = e.owner, e.slot, e.path or ""
            where, shadow = self.shadows.get(key[:2], ("", None)) if e.path == path else ("", None)
            if shadow is None:
                continue
            if shadow.due is not None:
                owner = e.owner
                if not shadow.due(lambda slot, at=where, owner=owner: numbers[owner, at + slot], int(state.step)):
                    continue
            if key in self.handed_out and writes([e.value]) != [self.handed_out[key]]:
                continue
            if e.at_owner or e.below or e.value.shape != new.shape:
                raise _cannot_follow(path, e.owner, shadow.slot, e.at_owner)
            value = torch.zeros_like(e.value) if shadow.residual else new.to(e.value)
            # Elements that the parameter's dtype does not tell from the new ones keep what is more exact.
            other = changed if changed is not None or shadow.residual else e.value.to(new) != new
            e.value.copy_(value if other is None else torch.where(other.to(e.value.device), value, e.value))
        if last is not None or changed is None:
            self.last[path] = new.clone()

    def hand_out(self) -> None:
        """Note that somebody gets the state's own tensors."""
        if self.shadows:
            from ..core.state_entries import entries

            found = [x for x in entries(self.current.state) if (x.owner, x.slot) in self.shadows and x.path]
            found = [x for x in found if not (x.below or x.at_owner)]
            counts = writes([x.value for x in found])
            self.handed_out = {(x.owner, x.slot, x.path or ""): n for x, n in zip(found, counts, strict=True)}

    def note(self) -> None:
        """Count writes from now on: a step or a load has written the stored leaves."""
        if self.shadows:
            self.handed_out = {}
            self.counts = self._counts()
            for path, x in self.last.items():
                x.copy_(self.current.state.leaves[path])

    def note_of(self, paths: Iterable[str]) -> None:
        """As `note`, of these leaves, which were updated in backward."""
        for path in paths if self.shadows else ():
            (self.counts[path],) = writes([self.watched[path]])
            if path in self.last:
                self.last[path].copy_(self.current.state.leaves[path])

    def _both(self, leaf: Leaf) -> tuple[Tensor, Tensor]:
        """The rows of the copy that this rank stores, and the same rows computed from the master."""
        copy = self.pipe.road.own(self.params[leaf.path].detach(), leaf)
        seen = see([view for view in self.views if view.wire is None], self.current.state.leaves[leaf.path], leaf)
        return copy, seen.to(copy.dtype)

    def _counts(self) -> dict[str, Writes]:
        return dict(zip(self.watched, writes(self.watched.values()), strict=True))


def _shadows(pipe: Pipeline) -> dict[tuple[str, str], tuple[str, Shadow]]:
    """The slots that follow from a parameter, by the name of their transform and their own, each with its place."""
    found: dict[tuple[str, str], tuple[str, Shadow]] = {}

    def look(owner: str, part: Transform, layout: Layout, above: str) -> None:
        def note(t: Transform, paths: Set[str], where: str) -> Transform:
            found.update({(owner, above + where + one.slot): (above + where, one) for one in t.facts.shadows})
            # `replace_innermost` does not look into a group with an update half of its own.
            for key, (member, own) in {} if t.members_fn is None else t.members_by_key(layout.only(paths)).items():
                look(owner, member, layout.only(own), f"{above}{where}{key}/")
            return t

        replace_innermost(part, note, layout)

    for part in pipe.updates:
        look(part.name, part, pipe.layout, "")
    return found


def _cannot_follow(path: str, owner: str, slot: str, at_owner: bool) -> RuntimeError:
    why = "only the rank that owns the leaf has it, and whole" if at_owner else "it is kept in codes"
    return RuntimeError(
        explain(
            f"a write into {path} of an attached model, of which {owner} keeps a copy, {slot!r}",
            f"{why}, so it cannot follow the write, and the old values would win at the next update",
            "the write before opt = zf.attach(model, tx), or opt.detach(), the write, and attach again",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# These functions convert one parameter of an attached model between its resident and its stored form, and set the
# dtype of `p.grad`.


def to_resident(pipe: Pipeline, leaf: Leaf, p: Tensor) -> Tensor:
    """Give a parameter its resident form, and return its stored one, in the same memory where possible."""
    full = p.detach()
    wide = full.to(pipe.dtypes.stored(leaf))
    resident = pipe.road.kept(wide, leaf)
    if pipe.gathering is not None:
        resident = resident.clone()
    if pipe.road.casts_after_update:
        resident = resident.to(pipe.dtypes.of(leaf).param_dtype or resident.dtype)
    if not dense(resident) or (pipe.road.after_update and not resident.is_contiguous()):
        resident = resident.contiguous()
    put(pipe, p, resident, "zf.attach")
    keep_grads_in(p, pipe.road.resident_grad_dtype(leaf))
    if resident.dtype != wide.dtype or pipe.road.renumbers_after_update:
        return pipe.road.store(full, leaf).clone(memory_format=torch.contiguous_format)
    # The stored tensor is a view of `p`, so that a step's write into it counts as a write into `p`. Under `shard` it is
    # not: graphs there gather again and count updates themselves, and the version of `p` counts the user's writes only.
    return pipe.road.own(p.detach() if pipe.gathering is None else resident.detach(), leaf)


def put(pipe: Pipeline, p: Tensor, x: Tensor, since: str | None) -> None:
    """Run `p.data = x`, where a sharded `x` has another size and graphs of the old size may be alive.

    torch keeps the AccumulateGrad node of `p` as long as any graph has it, and checks gradients of later graphs against
    the old size: one output that a notebook keeps is enough. It makes a new node for another dtype.

    Args:
        pipe: the pipeline of the model.
        p: the parameter.
        x: its new data.
        since: the change, for the message to a backward through an old graph; `None` if the size will come back.
    """
    if pipe.gathering is None:
        p.data = x
        follow(p)
        return

    def refuse(grads: Any) -> None:
        raise RuntimeError(
            explain(
                f"backward through a graph from before {since}",
                "its gradients have other sizes than the parameters have now",
                f"all backwards of a graph before {since}, or the forward again after it",
            )
        )

    with torch.DisableTorchFunctionSubclass():
        if p.requires_grad and since is not None:
            with torch.enable_grad():
                use = p.expand_as(p).grad_fn
            end = None if use is None else use.next_functions[0][0]
            if end is not None:
                end.register_prehook(refuse)
        other = torch.float16 if p.dtype != torch.float16 else torch.float32
        Tensor.data.__set__(p, p.new_empty(0, dtype=other))  # type: ignore[attr-defined]
        Tensor.data.__set__(p, x)  # type: ignore[attr-defined]
        follow(p)


@torch.no_grad()
def make_whole(pipe: Pipeline, params: Leaves, stored: Leaves, since: str) -> None:
    """Put full parameters in the model for good, in memory of their own. All ranks call it."""
    for path, full in pipe.road.whole(stored).items() if pipe.stages else ():
        if pipe.gathering is not None or full.dtype != params[path].dtype or not pipe.road.exact:
            put(pipe, params[path], full.detach().clone(), since)


def move_out(pipe: Pipeline, params: Leaves, grad_dtypes: Mapping[str, torch.dtype | None]) -> None:
    """Give `p.grad` of full parameters the dtype that it had before `attach`, and drop gradients that are shards.

    Args:
        pipe: the pipeline.
        params: by path.
        grad_dtypes: dtypes of gradients by path, where they are not those of parameters.
    """
    for leaf in pipe.layout.leaves:
        p = params[leaf.path]
        grad = read_grad(p)
        if grad is not None and grad.shape != p.shape:
            # This is a shard, to which a later backward could not add a full gradient.
            write_grad(p, None)
        keep_grads_in(p, grad_dtypes.get(leaf.path, p.dtype))


def keep_grads_in(p: Tensor, dtype: torch.dtype | None) -> None:
    """Set `p.grad_dtype`: the dtype of `p.grad`, any for `None`. An existing gradient is cast.

    From then on the gradient's dtype no longer follows the parameter's, and torch has no way back. Who casts the
    detached model (`model.float()`) must set `p.grad_dtype` as well.
    """
    if p.grad_dtype == dtype:
        return
    grad = read_grad(p)
    if grad is None or dtype in (None, grad.dtype):
        p.grad_dtype = dtype
        return
    # torch refuses a `grad_dtype` that differs from the dtype of an existing gradient.
    write_grad(p, None)
    p.grad_dtype = dtype
    write_grad(p, grad.to(dtype))


def dense(x: Tensor) -> bool:
    """Whether the elements fill memory without gaps or overlap, in any order of dimensions."""
    return torch.empty_like(x, device="meta").stride() == x.stride()
