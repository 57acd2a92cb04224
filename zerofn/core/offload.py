"""States on another device: copied to their parameters before an update and back after it, one bucket at a time.

A bucket is one piece of memory at either end, and one copy each way. While one bucket is updated, the next one is on
its way to the device and the one before on its way back. The host waits for nothing: the device waits for a bucket
before it updates it, and in the next step for what is still on its way back. `State.transforms` waits for all copies
before it returns states. In a step the device holds about three buckets of the state, and after it none, once the last
copies have ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._compat.tensors import foreach, is_shape_only
from ..kernels.recording import concrete
from .context import Context
from .executor import buckets
from .layout import Leaves
from .pipeline import guard
from .transform import Transform, TransformState
from .tree import map_overlaid, memories

# ----------------------------------------------------------------------------------------------------------------------
# `CopyQueue` copies between a device and the host in one direction. On CUDA it has its own stream beside the
# computation.


class PendingCopy:
    """A copy that was begun. Until it is waited for, nobody may touch a target or write a source.

    It owns targets and sources until they may be freed: once a wait has ended; or, if nobody waits any more (the step
    has ended, or was given up), once the allocator knows of the copy, and hands out their memory when it has ended.
    """

    def __init__(self, queue: CopyQueue, event: torch.Event | None, pairs: Sequence[tuple[Tensor, Tensor]]):
        self.queue, self.event, self.pairs = queue, event, pairs

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Leave targets and sources to the allocator. Within a step a wait frees them sooner."""
        for x in chain.from_iterable(self.pairs):
            if x.is_cuda:
                # The allocator of pinned memory knows of each copy by itself.
                x.record_stream(self.queue.stream)  # type: ignore[arg-type]
        self.pairs = ()

    def wait_on_device(self) -> None:
        """Make later computations of the device wait for the copy. The host goes on."""
        if self.event is not None:
            torch.cuda.current_stream(self.queue.device).wait_event(self.event)
        self.pairs = ()

    def wait_on_host(self) -> None:
        """Return once the host may read and write targets and sources."""
        if self.event is not None:
            self.event.synchronize()
        self.pairs = ()


class CopyQueue:
    """Copies in one direction, one after the other: on a CUDA stream of their own, else at once.

    Args:
        device: one end of the copies; the other end is the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> PendingCopy:
        """Begin to copy pairs of (target, source).

        The stream waits for computations that were launched before, since they may write a source or read a target. The
        copy runs beside those that are launched afterwards.
        """
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return PendingCopy(self, None, ())
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return PendingCopy(self, self.stream.record_event(), pairs)


@functools.cache
def queue(device: torch.device, back: bool) -> CopyQueue:
    """The queue to a device or back from it, and its stream: one of each for all steps of a process."""
    return CopyQueue(device)


# ----------------------------------------------------------------------------------------------------------------------
# A `Bucket` is those tensors of a state that are copied together.


ALIGNED = 64  # bytes to which tensors of a bucket are aligned, so that kernels read them with their widest loads


class Packed:
    """How tensors lie one after the other in one piece of memory."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.like = tensors
        self.offsets: list[int] = []
        self.nbytes = 0
        for x in tensors:
            self.offsets.append(self.nbytes)
            self.nbytes += -(-x.numel() * x.element_size() // ALIGNED) * ALIGNED

    def empty(self, device: torch.device, pin: bool = False) -> Tensor:
        """Memory for the tensors, of bytes."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device, pin_memory=pin)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Tensors like these in such memory."""
        found = []
        for x, at in zip(self.like, self.offsets, strict=True):
            flat = memory[at : at + x.numel() * x.element_size()].view(x.dtype)
            found.append(flat.view(x.shape) if x.is_contiguous() else flat.as_strided(x.shape, _strides(x)))
        return found

    def memory(self) -> Tensor | None:
        """The memory in which these tensors lie in this very way, and nothing else; `None` if they do not."""
        storage = self.like[0].untyped_storage()
        if storage.nbytes() != self.nbytes:
            return None
        start = storage.data_ptr()
        for x, at in zip(self.like, self.offsets, strict=True):
            if x.data_ptr() != start + at or not (x.is_contiguous() or x.stride() == _strides(x)):
                return None
        return torch.empty(0, dtype=torch.uint8, device=self.like[0].device).set_(storage)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of `x` in memory of its own: as they are, if its elements fill a piece of memory."""
    return torch.empty_like(x, device="meta").stride()


class Bucket:
    """Tensors of a state that are copied together: to the device of their parameters, and back.

    Args:
        tensors: where they live.
        device: of their parameters.
        paths: of the parameters; empty for tensors that belong to no leaf.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, paths: Sequence[str]):
        self.tensors, self.device, self.paths = tensors, device, paths
        self.packed = Packed(tensors)
        self.flat: Tensor | None = None
        self.beside: list[Tensor] = []  # on the device, in `flat`
        self.coming: Any = None
        self.home: Tensor | None = None
        self.homes: list[Tensor] = []  # of the new state, in `home`
        self.changed: dict[int, Tensor] = {}  # by index, new tensors that do not lie in `flat`
        self.taken: set[int] = set()
        self.leaving: Any = None

    def fetch(self) -> None:
        """Begin to copy the tensors to the device, if that has not begun."""
        if self.flat is None:
            self.flat = self.packed.empty(self.device)
            self.beside = self.packed.views(self.flat)
            # The tensors of a bucket may be apart, as in a state from a file, until the first step lays them together.
            # A bucket that was sent back lies in `home`.
            memory = self.packed.memory() if self.home is None else self.home
            pairs = list(zip(self.beside, self.tensors, strict=True)) if memory is None else [(self.flat, memory)]
            self.coming = queue(self.device, False).copy(pairs)

    def put(self, i: int, new: Tensor, donate: bool) -> Tensor:
        """The tensor of the new state in the place of the i-th of these; its value comes with `send`."""
        if self.home is None:
            self._make_home(donate)
        if new is not self.beside[i]:
            # `new` may be in the memory of the bucket, where another tensor would be written over it.
            assert self.flat is not None
            self.changed[i] = new if memories([new]).isdisjoint(memories([self.flat])) else new.clone()
        self.taken.add(i)
        self.leaving = None
        return self.homes[i]

    def _make_home(self, donate: bool) -> None:
        home_device = self.tensors[0].device
        pin = self.device.type == "cuda" and home_device.type == "cpu"
        memory = self.packed.memory() if donate else None
        if memory is not None and (not pin or memory.is_pinned()):
            self.home, self.homes = memory, list(self.tensors)
        else:
            self.home = self.packed.empty(home_device, pin)
            self.homes = self.packed.views(self.home)

    @property
    def complete(self) -> bool:
        """Whether all of its tensors have new values."""
        return len(self.taken) == len(self.tensors)

    def send(self) -> PendingCopy:
        """Begin to copy new values back, if that has not begun."""
        if self.leaving is None:
            assert self.flat is not None and self.home is not None
            if self.changed:
                foreach("copy_", [self.beside[i] for i in self.changed], list(self.changed.values()))
                self.changed = {}
            self.leaving = queue(self.device, True).copy([(self.home, self.flat)])
            # The copy wrote their common memory, so autograd has not counted it as a write into each of them.
            increment_version(self.homes)
        return self.leaving

    def wait_on_host(self) -> None:
        """Return once the new values have been copied back. A later use on the parameters' device copies them again."""
        self.send().wait_on_host()
        self.drop()

    def drop(self) -> None:
        """Free the memory of the device."""
        self.flat, self.beside, self.coming = None, [], None


# ----------------------------------------------------------------------------------------------------------------------
# `Conveyor` makes the copies of one transform's state in one step.


class Conveyor:
    """The copies of one transform's state in one step.

    Args:
        state: the state of the transform.
        params: the leaves of the transform, in the order in which they are updated, or in the reverse order, as in
            backward.
        ctx: the context of the step. If autograd or torch.func records the step (`ctx.recorded`), nothing is
            prefetched, and each copy is a plain `Tensor.to`.
    """

    def __init__(self, state: TransformState, params: Leaves, ctx: Context):
        self.params, self.recorded = params, ctx.recorded
        self.buckets = [] if ctx.recorded else list(_buckets(state, params))
        # id(tensor) -> its bucket and its index in the bucket.
        self.places = {id(x): (bucket, i) for bucket in self.buckets for i, x in enumerate(bucket.tensors)}
        self.of_leaf: dict[str, list[int]] = {}
        for i, bucket in enumerate(self.buckets):
            for path in bucket.paths:
                self.of_leaf.setdefault(path, []).append(i)
        self.of_all = [i for i, bucket in enumerate(self.buckets) if not bucket.paths]
        # The device of tensors that belong to no leaf.
        devices = {x.device for x in params.values()}
        self.device = devices.pop() if len(devices) == 1 else None
        self.last = -1
        self.sent: deque[Bucket] = deque()

    @staticmethod
    def guarded(inner: Transform) -> Transform:
        """`inner` with the guard that copies results which share memory, if `inner` has to be guarded.

        The guard belongs inside of the conveyor: around the conveyor it would copy once more.
        """
        return guard(inner, 1, True) if inner.facts.keeps else inner

    @staticmethod
    def laid_out(state: TransformState, params: Leaves, pin: bool) -> TransformState:
        """A state with its tensors in the memory in which they are copied together, pinned or not.

        Tensors of `zf.plan` have no memory, and are left as they are.
        """
        if not all(concrete(x) and not is_shape_only(x) for x in params.values()):
            return state
        new: dict[int, Tensor] = {}
        for bucket in _buckets(state, params):
            memory = bucket.packed.empty(bucket.tensors[0].device, pin)
            views = bucket.packed.views(memory)
            foreach("copy_", views, list(bucket.tensors))
            new.update(zip(map(id, bucket.tensors), views, strict=True))

        def over(x: Any) -> Any:
            return {key: over(y) for key, y in x.items()} if isinstance(x, dict) else new.get(id(x), x)

        return over(state)

    def bring(self, state: TransformState, paths: Collection[str]) -> TransformState:
        """The state, in which the tensors of the leaves `paths` are on the devices of their parameters.

        `bring` also begins to copy the tensors of the bucket of leaves that is updated next.
        """
        needed = dict.fromkeys(self.of_all)
        for path in paths:
            needed.update(dict.fromkeys(self.of_leaf.get(path, ())))
        if needed:
            while len(self.sent) > 1:
                # This frees its memory on the device for the next bucket.
                sent = self.sent.popleft()
                sent.send().wait_on_device()
                sent.drop()
            for i in needed:
                self.buckets[i].fetch()
            self._prefetch(min(needed), max(needed))
            for i in needed:
                self.buckets[i].coming.wait_on_device()
        return {slot: self._beside(entry, self.device) for slot, entry in state.items()}

    def _beside(self, x: Any, device: torch.device | None) -> Any:
        """An entry with its tensors on their parameters' devices; what is in no bucket is moved by a plain copy."""
        if isinstance(x, dict):
            return {k: self._beside(y, self.params[k].device if k in self.params else device) for k, y in x.items()}
        # Where nothing is copied no id is asked for: torch.compile would make the graph anew for each state.
        if self.places and id(x) in self.places:
            bucket, i = self.places[id(x)]
            return bucket.beside[i] if bucket.beside else x
        return x.to(device) if isinstance(x, Tensor) and device is not None and x.ndim else x

    def take_back(self, new: TransformState, homes: TransformState, ctx: Context) -> TransformState:
        """The new state, on the device of the old one. If the step donates the old state, it is in the same memory."""
        touched: dict[int, Bucket] = {}

        def back(x: Any, old: Any) -> Any:
            if not isinstance(old, Tensor) or x.device == old.device:
                return x
            bucket, i = self.places.get(id(old), (None, 0)) if self.places else (None, 0)
            if ctx.recorded or bucket is None or not bucket.beside or not _alike(x, old):
                return x.to(old.device)
            if ctx.donate:
                ctx.written.add(ctx.prefix)
            touched[id(bucket)] = bucket
            return bucket.put(i, x, ctx.donate)

        out = {slot: map_overlaid(back, homes.get(slot), entry) for slot, entry in new.items()}
        for bucket in touched.values():
            ctx.before_the_end(bucket)
            if bucket.complete:
                bucket.send()
                if bucket not in self.sent:
                    self.sent.append(bucket)
        return out

    def _prefetch(self, first: int, last: int) -> None:
        """Begin to copy the bucket that is updated next: the one behind, or in backward the one before."""
        backwards = last < self.last or (self.last < 0 and first > 0)
        self.last = first if backwards else last
        following = first - 1 if backwards else last + 1
        if 0 <= following < len(self.buckets) and not self.buckets[following].taken:
            self.buckets[following].fetch()


def _buckets(state: TransformState, params: Leaves) -> Iterator[Bucket]:
    """The tensors of a state that are not on their parameters' device, in buckets of leaves.

    Tensors of another library that belong to no leaf go to the parameters' device, if there is only one.
    """
    devices = {x.device for x in params.values()}
    found: dict[str | None, list[Tensor]] = {}

    def look(x: Any, path: str | None) -> None:
        if isinstance(x, dict):
            for key, y in x.items():
                look(y, key if key in params else path)
        elif isinstance(x, Tensor) and x.numel() and x.ndim:
            device = params[path].device if path is not None else next(iter(devices)) if len(devices) == 1 else None
            if device is not None and x.device != device:
                found.setdefault(path, []).append(x)

    for entry in state.values():
        look(entry, None)
    if not found:
        return
    if None in found:
        yield Bucket(found[None], devices.pop(), ())
    away = {path: x for path, x in params.items() if path in found}
    for device in dict.fromkeys(x.device for x in away.values()):
        for paths in buckets({path: x for path, x in away.items() if x.device == device}):
            tensors = [x for path in paths for x in found[path]]
            for home in dict.fromkeys(x.device for x in tensors):
                yield Bucket([x for x in tensors if x.device == home], device, paths)


def _alike(x: Tensor, old: Tensor) -> bool:
    return x.shape == old.shape and x.dtype == old.dtype


# ----------------------------------------------------------------------------------------------------------------------
# `update_on_host` runs an update half on the host: gradients go there, and new parameters come back.


def update_on_host(
    inner: Transform, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
) -> tuple[Leaves, TransformState]:
    """The update half of an optimizer that treats leaves alone, run where its state is. The host waits for gradients.

    Args:
        inner: the optimizer.
        grads: gradients.
        state: a state on the host. Its entries `MASTERS` are the parameters that are updated, in a wider dtype.
        params: parameters, of which those with a gradient are updated.
        carry: what `inner` has prepared.
        ctx: the step's context.
    """
    host, own = torch.device("cpu"), {slot: x for slot, x in state.items() if slot != MASTERS}
    host_params, host_grads = {path: params[path] for path in grads}, grads
    staged: list[_Staged] = []
    if ctx.recorded:
        host_params, host_grads = (
            {path: x.to(host) for path, x in leaves.items()} for leaves in (host_params, host_grads)
        )
    else:
        away = {path: x for path, x in host_params.items() if x.device != host}
        for device in dict.fromkeys(x.device for x in away.values()):
            staged.append(_Staged([path for path, x in away.items() if x.device == device], params, grads))
        for one in staged:
            host_params, host_grads = {**host_params, **one.params}, {**host_grads, **one.grads}
    masters = state.get(MASTERS)
    wide = (
        host_params if masters is None else {path: _current(masters[path], x, ctx) for path, x in host_params.items()}
    )
    out, new = inner.update_fn(host_grads, own, wide, carry, ctx)
    if masters is not None:
        new = {**new, MASTERS: {**masters, **out}}
        out = {path: x.to(params[path].dtype) for path, x in out.items()}
    if ctx.recorded:
        return {path: x.to(params[path].device) for path, x in out.items()}, new
    for one in staged:
        out = {**out, **one.back(out, params, ctx.donate)}
    if ctx.donate:
        ctx.written.add(ctx.prefix)
        out = {path: x if x is params[path] or path in away else params[path].copy_(x) for path, x in out.items()}
    return {path: out[path] for path in grads}, new


MASTERS = "master"


def _current(master: Tensor, seen: Tensor, ctx: Context) -> Tensor:
    """The master of a parameter. Elements that somebody has written into the parameter have their new values."""
    before = master.to(seen.dtype)
    if not ctx.recorded and torch.equal(before, seen):
        return master
    return torch.where(before == seen, master, seen.to(master.dtype))


class _Staged:
    """Parameters and gradients of one device on the host, in one piece of memory.

    Attributes:
        params: by path, on the host.
        grads: by path, on the host.
    """

    def __init__(self, paths: Sequence[str], params: Leaves, grads: Leaves):
        self.paths = paths
        tensors = [*(params[path] for path in paths), *(grads[path] for path in paths)]
        device, packed = tensors[0].device, Packed(tensors)
        self.flat, self.home = packed.empty(device), packed.empty(torch.device("cpu"), device.type == "cuda")
        self.there, on_host = packed.views(self.flat), packed.views(self.home)
        foreach("copy_", self.there, tensors)
        self.home.copy_(self.flat)
        self.end = packed.offsets[len(paths)]
        self.params, self.grads = (
            dict(zip(paths, x, strict=True)) for x in (on_host[: len(paths)], on_host[len(paths) :])
        )

    def back(self, new: Leaves, params: Leaves, donate: bool) -> Leaves:
        """New parameters on the device, in the memory of the old ones if that is donated."""
        for path, x in self.params.items():
            if new[path] is not x:
                x.copy_(new[path])
        self.flat[: self.end].copy_(self.home[: self.end], non_blocking=True)
        mine = [params[path] if donate else torch.empty_like(params[path]) for path in self.paths]
        foreach("copy_", mine, self.there[: len(mine)])
        return dict(zip(self.paths, mine, strict=True))
