"""`Context`: the argument that every update half gets in a step, and the metrics that it reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._compat.tensors import foreach, foreach_of
from .._errors import explain, kind_of
from .._interrupts import Writing
from ..kernels.joined import Passes
from ..kernels.lists import at_once, in_place
from ..kernels.norms import leaf_norms
from ..kernels.program import TensorList, write_where
from ..kernels.recording import concrete, number
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY, known_formats
from .layout import Layout, Leaves

# ----------------------------------------------------------------------------------------------------------------------
# `Norms` computes norms of gradients for metrics, in the optimizer's kernel or in a pass of their own.


@dataclass
class Norms:
    """The norm of each gradient of a step, bucket after bucket.

    A kernel that reads the gradients anyway computes their norms at less cost than another pass. It need not: norms
    that no kernel has added are computed when the next bucket comes. Requests are for tensors, not for paths: a
    gradient that a transform before the optimizer has changed is another tensor, and its norm is not the metric.

    Attributes:
        found: norms by path, each 0-d, or a number where a kernel has found it.
        requests: gradients whose norms are requested and not computed yet; nobody writes them until the next request.
    """

    found: dict[str, Any] = field(default_factory=dict)
    requests: Leaves = field(default_factory=dict)

    def expect(self, paths: Sequence[str]) -> None:
        """Drop requests for norms that a waiting program computes, so that their gradients can be freed."""
        for path in paths:
            if path in self.requests:
                del self.requests[path]

    def add(self, paths: Sequence[str], norms: Sequence[float]) -> None:
        """Take norms that a kernel has computed of requested gradients."""
        self.expect(paths)
        self.found.update(zip(paths, norms, strict=True))

    def all(self) -> dict[str, Any]:
        """All requested norms; computes those that no kernel has added."""
        if self.requests:
            self.found.update(leaf_norms(self.requests))
            self.requests = {}
        return self.found


class Rounding(NamedTuple):
    """How results are rounded at random where they are stored in 16 bits (`precision(rounding="stochastic")`).

    Attributes:
        seed: of the random bits.
        form: the format of the draws, a number; a tensor under `vmap`.
        step: the number of this update, for a transform that does not count the updates of each leaf; else `None`.
    """

    seed: int
    form: Any
    step: Any = None


class RoundedToNearest(UserWarning):
    """Moments of an optimizer that rounds to nearest are stored in bf16."""


def format_of(state: Mapping[str, Any]) -> Any:
    """The format of the random bits of a transform's state: a number, or a tensor under `torch.func.vmap`.

    A state without one has the first format: it was pickled before there was another.
    """
    form = state.get(FORMAT_ENTRY, FIRST_FORMAT)
    return number(form) if isinstance(form, Tensor) else form


def check_format(name: str, state: Mapping[str, Any], ctx: Context) -> None:
    """Refuse the state of a transform of this name with a format of random bits that this version does not know."""
    if FORMAT_ENTRY in state:
        form = state[FORMAT_ENTRY]
        ctx.check(form, lambda x: x in known_formats(), lambda: _unknown_format(name, form))


def _unknown_format(name: str, form: Tensor) -> Exception:
    return ValueError(
        explain(
            f"a state of {name} with {FORMAT_ENTRY} {form.item()}",
            f"this zerofn knows the formats {known_formats()}: a newer one made the state, or it is damaged",
            "an update of zerofn; or start with new moments: zf.init(tx, zf.full_params(tx, state))",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# Every update half is given a `Context` in each step. It decides a `Prepared` once per step.


class Reduction(Protocol):
    """Reductions of scalars over all ranks that have a shard of the gradient."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over shards; replicas count once. If the model itself is sharded, only `total` counts right."""
        ...

    def total(self, number: Callable[[Leaves], Any], leaves: Leaves) -> Tensor:
        """The sum of `number(leaves)` over ranks. Every element counts once, whichever ranks have it."""
        ...

    def mean(self, x: Tensor) -> Tensor:
        """Mean over all ranks."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Maximum over all ranks."""
        ...

    def replicate(self, x: Tensor) -> Tensor:
        """`x`, equal on all ranks, for use with a shard: its cotangents are summed over shards."""
        ...

    def alike(self, x: Tensor) -> Tensor:
        """`x`, made of `replicate`d numbers, as one number again: its cotangent is divided equally among ranks."""
        ...


class OneProcess:
    """The reduction of a world of one."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def total(self, number: Callable[[Leaves], Any], leaves: Leaves) -> Tensor:
        return number(leaves)

    def mean(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x

    def replicate(self, x: Tensor) -> Tensor:
        return x

    def alike(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class WithinBucket:
    """The reduction of an update half that gets some of the leaves only: it refuses.

    A number would cover these leaves only, and ranks would ask for it at different times.
    """

    whole: Reduction

    def sum(self, x: Tensor) -> Tensor:
        raise _of_a_bucket("ctx.reduction.sum(x)")

    def total(self, number: Callable[[Leaves], Any], leaves: Leaves) -> Tensor:
        raise _of_a_bucket("ctx.total(number, leaves)")

    def mean(self, x: Tensor) -> Tensor:
        raise _of_a_bucket("ctx.reduction.mean(x)")

    def max(self, x: Tensor) -> Tensor:
        raise _of_a_bucket("ctx.reduction.max(x)")

    def replicate(self, x: Tensor) -> Tensor:
        return self.whole.replicate(x)

    def alike(self, x: Tensor) -> Tensor:
        return self.whole.alike(x)


def _of_a_bucket(call: str) -> ValueError:
    why = "update_fn is called once for each bucket of leaves, so this would be a number of one bucket, not of the tree"
    right = (
        'in a prepare_fn of Transform("mine", Scope.TREE, needs="number", ...), which is called once with all leaves;\n'
    )
    right += "or Scope.WHOLE, whose update_fn is handed all leaves at once; or zf.watch for sums over old and new ones"
    return ValueError(explain(f"{call} in an update_fn that treats leaves alone", why, right))


class UnderWay(Protocol):
    """Copies into a new state, of which some may wait for more leaves."""

    def send(self) -> Any:
        """Begin all of them. Returns the copy, which `State` waits for when somebody looks at it."""
        ...

    def wait_on_host(self) -> None:
        """Begin all of them, and return once they have ended."""
        ...


@dataclass(frozen=True, eq=False)
class Context:
    """The argument of every update half besides gradients, state and parameters.

    Attributes:
        layout: the structure of the parameters.
        donate: whether state and parameters may be written in place. Gradients never are.
        donate_to_kernels: whether kernels may write in place although `donate` is false. It is true only in a compiled
            graph or under `vmap`, if the state is donated and no later `torch.where` reads the old values.
        recorded: whether torch.func, the compiler or autograd records what is computed. Then the functions of the
            context write into no tensor, a number may be a tensor that Python cannot read, and an update half must call
            only kernels that can be recorded.
        unrecorded: a part of an error message: the code to write instead if a number requires grad in a step that is
            not recorded. If the text is empty, numbers that require grad are not refused.
        looks: whether the step raises if a result of an update half has a `grad_fn`. It is true in the first step of a
            pipeline, unless the step is recorded.
        weight: weight of this micro-batch, for instance its number of tokens.
        given: the numbers of this step, by name, that a transform wants (`Facts.wants`), such as the loss. Each is a
            0-d tensor on the device of the parameters, and the mean over ranks. For a transform after `accumulate` it
            is the mean over ranks and over the window. Tensors of `Facts.wants_largest` are in `given` too. `given` is
            empty if a step calls `prepare_fn` only for the learning rate.
        given_weight: the weight of this micro-batch, averaged over ranks.
        boundary: whether the accumulation window closes in this step. With `None`, `accumulate` decides.
        averaged: whether accumulated gradients are divided; if not, the caller has divided the losses.
        lr: learning rates set from outside, by the optimizer's prefix.
        numbers: other hyperparameters set from outside, by the same prefix and by name.
        offsets: global index of the first stored element of a leaf, where this rank has a shard of it.
        reduction: the object with methods that reduce scalars over ranks: `sum`, `total`, `mean` and `max`.
        micro_step: the number of micro-steps before this one.
        metrics: the metrics of this step, by name. `report` adds to them.
        norms: norms of gradients for a metric; not used in a step that is recorded.
        verdicts: whether `verdict` returns a tensor on the device, which Python does not read, in place of a bool.
        unread: whether Python may not read the numbers of the state in a step that is not recorded, because they stay
            on the device. It is true if the step can be captured in a CUDA graph, and for a transform after one whose
            `emit` is a tensor on the device. Then `number` and `read` return tensors, and functions that write into
            donated memory do not change it if `comes` is false.
        comes: whether an update reaches this transform in this step: a bool, or a 0-d bool tensor. It can be a tensor
            in a compiled graph, under `vmap`, and for a transform after one whose `emit` is a tensor on the device.
        standing: the metrics of this transform, by name, for a step in which no update reaches the transform.
        under_way: copies into the new state, filled by `before_the_end`.
        written: prefixes of the transforms that have begun to write into donated memory. If an error is raised after
            that, the state is neither the old one nor the new. Filled by `own` and `into`. The first one may begin to
            hold signals (`_interrupts.Writing`).
        prefix: the place of a nested transform, for instance ``"partition.decay."``.
        rounding: how a transform that says `Facts.rounds` rounds what it stores in 16 bits; by default to nearest.
        passes: where an update half that is `Joining` leaves its programs, which run together with its neighbours'.
            With `None` a program runs at once.
    """

    layout: Layout
    donate: bool = False
    donate_to_kernels: bool = False
    recorded: bool = False
    unrecorded: str = ""
    looks: bool = False
    weight: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)
    given_weight: Any = 1.0
    boundary: bool | None = None
    averaged: bool = True
    lr: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    reduction: Reduction = field(default_factory=OneProcess)
    micro_step: Any = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    norms: Norms | None = None
    verdicts: bool = False
    unread: bool = False
    comes: bool | Tensor = True
    standing: Mapping[str, Any] = field(default_factory=dict)
    under_way: list[UnderWay] = field(default_factory=list)
    written: set[str] | Writing = field(default_factory=set)
    prefix: str = ""
    rounding: Rounding | None = None
    passes: Passes | None = None

    @property
    def loss(self) -> Tensor:
        """The loss of this step, for a transform that says `Facts(wants=("loss",))`."""
        if "loss" not in self.given:
            raise missing_number("loss", "a transform that computes with ctx.loss")
        return self.given["loss"]

    def own(self, x: Tensor) -> Tensor:
        """A tensor that may be written: `x` itself when donated, else a copy."""
        if not self.donate or self.unread:
            return x.clone()
        self.written.add(self.prefix)
        return x

    def into(self, old: Tensor, new: Tensor) -> Tensor:
        """The new value of a state tensor: copied into the memory of `old` if that is donated, else `new` itself."""
        if not self.donate:
            return new
        if self.unread:
            return self._write(old, new)
        self.written.add(self.prefix)
        return old.copy_(new)

    def copied(self, old: Tensor, new: Tensor) -> Tensor:
        """As `into`, for a tensor that belongs to somebody else, such as a gradient: a copy if nothing is donated."""
        if not self.donate:
            # A recorded step writes nothing in place, so there the tensors may share memory.
            return new.to(old.dtype, copy=not self.recorded)
        if self.unread:
            return self._write(old, new)
        self.written.add(self.prefix)
        return old.copy_(new)

    def put(self, operation: Callable[..., Tensor], old: Tensor, *given: Any) -> Tensor:
        """`operation(old, *given)` in the dtype of `old`; in the memory of `old` if it is donated.

        Args:
            operation: a function of torch that takes `out=`, such as `torch.add`, or the word `towards`.
            old: its first argument, which the result replaces.
            given: its other arguments.
        """
        if not self.donate:
            return operation(old, *given).to(old.dtype)
        if self.unread:
            return self._write(old, operation(old, *given))
        self.written.add(self.prefix)
        return operation(old, *given, out=old)

    def settle(self) -> None:
        """Run the programs that wait in `passes`, before an update half looks at what is in a tensor of a leaf."""
        if self.passes is not None:
            self.passes.settle()

    @property
    def choosing(self) -> Tensor | None:
        """The tensor on the device that says whether donated memory is written; `None` where it is always written."""
        return self.comes if self.unread and isinstance(self.comes, Tensor) else None

    def _write(self, old: Tensor, new: Tensor) -> Tensor:
        """Write new values into donated memory."""
        self.written.add(self.prefix)
        if self.choosing is None:
            return old.copy_(new)
        several: Any = old
        if not isinstance(several, TensorList):
            write_where(self.choosing, [old], [new])
        elif new is not old:
            # A formula may return its argument unchanged (new is old): there is nothing to write, maybe no element.
            chosen: Any = torch.where(self.choosing, new.to(old.dtype), old)
            several.copy_(chosen)
        return old

    def wants_norms(self, paths: Sequence[str], grads: Leaves) -> bool:
        """Whether a metric needs the norms of these gradients, which then ride on a pass that reads them anyway."""
        # Norms are requested for tensors, so a gradient that a member of a group has changed is not among them.
        asked = self.norms.requests if self.norms is not None else {}
        return bool(asked) and all(map(is_, map(asked.get, paths), map(grads.__getitem__, paths)))

    def number(self, x: Any) -> Any:
        """The Python number in a 0-d tensor; the tensor itself if `recorded` or `unread` is true."""
        return x if self.recorded or self.unread or not isinstance(x, Tensor) else x.item()

    def read(self, x: Tensor) -> Any:
        """The Python number in a 0-d tensor that nobody differentiates; the tensor itself if Python cannot read it."""
        if self.unread:
            return x
        return number(x) if self.recorded else x.item()

    def read_each(self, xs: Leaves) -> dict[str, Any]:
        """`read` of each of these numbers, by path."""
        if self.unread:
            return dict(xs)
        return dict(zip(xs, map(number if self.recorded else Tensor.item, xs.values()), strict=True))

    def verdict(self, x: Tensor) -> Any:
        """The value for `Prepared.emit` from a 0-d bool tensor that says whether the step goes on.

        The value is a bool if Python can read the tensor, and otherwise the tensor itself. On a GPU the value is the
        tensor also if `verdicts` is true, so that Python does not wait for the GPU. `verdicts` can be true only if
        every transform of the chain declares `Facts.capturable`.
        """
        return x if self.verdicts else self.read(x)

    @property
    def late(self) -> bool:
        """Whether a verdict stays on the device."""
        return self.verdicts or self.unread

    def put_each(self, operation: str, olds: Leaves, given: Any, begun: Mapping[str, Any] | None = None) -> Leaves:
        """`put` for several leaves in one call: the results by path, in the memory of `olds` if it is donated.

        Args:
            operation: the name of an operation of torch that has a foreach form, such as `"add"`.
            olds: the first argument of the operation for each leaf, by path. The result replaces it.
            given: the second argument of the operation: one number for all leaves, or a tensor for each leaf, by path.
                A leaf without a tensor in this dict has no result.
            begun: for each path, a bool or 0-d bool tensor (from `read_each`). If it is false, the result for the leaf
                is a copy of the second argument, and the first argument is not used. By default all are true.
        """
        several = isinstance(given, Mapping)
        if several and len(given) < len(olds):
            olds = {path: x for path, x in olds.items() if path in given}
        if begun is not None and (self.recorded or set(map(begun.__getitem__, olds)) != {True}):
            return self._put_where(operation, olds, given, begun)
        if not olds or self.recorded or not self.donate:
            op = getattr(torch, operation)
            return {path: self.put(op, x, given[path] if several else given) for path, x in olds.items()}
        self.written.add(self.prefix)
        tensors, second = list(olds.values()), list(map(given.__getitem__, olds)) if several else given
        if self.unread and self.choosing is not None:
            write_where(self.choosing, tensors, foreach(operation, tensors, second))
        elif tensors[0].is_cuda:
            in_place(f"{operation}_", tensors, second)
        else:
            foreach_of(f"{operation}_")(tensors, second)
        return dict(olds)

    def _put_where(self, operation: str, olds: Leaves, given: Any, begun: Mapping[str, Any]) -> Leaves:
        """`put_each` where some of the first arguments do not count, or Python cannot read whether they do."""
        counting = {path: x for path, x in olds.items() if begun[path] is not False}
        found = self.put_each(operation, counting, given)
        found |= self._copied_each({path: x for path, x in olds.items() if path not in counting}, given)
        for path, old in counting.items():
            if begun[path] is not True:
                found[path] = torch.where(begun[path].to(old.device), found[path], self.copied(old, given[path]))
        return {path: found[path] for path in olds}

    def _copied_each(self, olds: Leaves, given: Leaves) -> Leaves:
        """`copied` of each leaf, by path."""
        if not olds or self.recorded or not self.donate:
            return {path: self.copied(x, given[path]) for path, x in olds.items()}
        self.written.add(self.prefix)
        tensors, news = list(olds.values()), list(map(given.__getitem__, olds))
        if not self.unread or self.choosing is None:
            (in_place if tensors[0].is_cuda else foreach)("copy_", tensors, news)
        else:
            write_where(self.choosing, tensors, news)
        return dict(olds)

    def into_each(self, olds: Leaves, news: Leaves) -> Leaves:
        """`into` of each tensor, by name: one call for all that are of one dtype."""
        if not self.donate:
            return dict(news)
        found: Leaves = {}
        for dtype in {x.dtype for x in olds.values()}:
            found |= self._copied_each({name: x for name, x in olds.items() if x.dtype == dtype}, news)
        return found

    def marked(self, flags: Leaves, paths: Collection[str], known: Mapping[str, Any]) -> Leaves:
        """`flags`, in which the flags of the leaves in `paths` become true.

        Args:
            flags: a 0-d bool tensor for each leaf, by path.
            paths: the leaves whose flags become true.
            known: the values of `flags` by path, from `read_each`. A flag whose value here is `True` stays the same
                tensor.
        """
        if not self.recorded and set(map(known.__getitem__, paths)) <= {True}:
            return flags
        return {p: torch.ones_like(x) if p in paths and known[p] is not True else x for p, x in flags.items()}

    def on_host(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """0-d tensors of one dtype in host memory, for `check` and `agreed`; copied together, so that a GPU waits once.

        If the step is recorded the tensors stay where they are.
        """
        if self.recorded or all([x.is_cpu for x in numbers]):
            return numbers
        return torch.stack(numbers).cpu().unbind()

    def check(
        self, x: Tensor, good: Callable[[Any], bool], error: Callable[[], Exception], every: int | None = None
    ) -> None:
        """Raise `error()` unless the number in a 0-d tensor is good.

        In a compiled graph and under `vmap` Python cannot read the number. Then nothing is checked.

        Args:
            x: the 0-d tensor.
            good: a function of the number that returns whether the number is good.
            error: a function that makes the exception.
            every: check a tensor on a GPU only once in `every` micro-steps, because reading the number waits for the
                GPU. All ranks check in the same micro-steps. If `unread` is true, a tensor on a GPU is never checked.
                By default the number is checked in every micro-step.
        """
        if self.recorded and not concrete(x):
            return
        if every is not None and not x.is_cpu and (self.unread or (int(self.micro_step) + 1) % every):
            return
        if not good(x.item()):
            raise error()

    def agreed(self, x: Tensor, error: Callable[[Tensor], Exception]) -> None:
        """Raise `error(largest)` on every rank if ranks do not have the same finite number in a 0-d tensor.

        In a compiled graph and under `vmap` Python cannot read the number. Then nothing is compared.
        """
        if self.recorded and not concrete(x):
            return
        most, least = self.reduction.max(x), -self.reduction.max(-x)
        if most != least:
            raise error(most)

    def replicated(self, x: Any) -> Any:
        """A number that all ranks have, such as a rate, for use with each rank's shard of a leaf.

        Its cotangents are summed over ranks; without this its gradient covers this rank's shard only. Anything but a
        tensor is returned unchanged. The result of `total` does not need it.
        """
        return self.reduction.replicate(x) if self.recorded and isinstance(x, Tensor) else x

    def total(self, number: Callable[[Leaves], Any], leaves: Leaves) -> Tensor:
        """A number of the whole tree that is a sum over elements: `ctx.total(squared_norm, grads)`.

        It is summed over all ranks, and every element counts once, whichever ranks have it, also if the model itself is
        sharded. You may combine the result with each rank's shard of a leaf without a call of `replicated`.
        """
        return self.reduction.total(number, leaves)

    def total_each(self, rows: Leaves) -> Leaves:
        """Sum over ranks a row of numbers for each leaf, by path, in one message.

        Each number is a sum over the elements that this rank has of the leaf. The result has a row for each leaf, and
        not one number for all leaves as with `total`. Every rank must pass the same paths in the same order.
        """
        if not rows:
            return {}
        first, lengths = next(iter(rows.values())), [row.numel() for row in rows.values()]
        wide = functools.reduce(torch.promote_types, [row.dtype for row in rows.values()])

        def listed(here: Leaves) -> Tensor:
            # `total` empties the row of a leaf that another rank counts. Zeros keep the length of the message.
            both = zip(here.values(), lengths, strict=True)
            found = [row if row.numel() == length else row.new_zeros(length) for row, length in both]
            return torch.cat([row.to(first.device, wide) for row in found])

        found = self.total(listed, rows).split(lengths)
        return {path: x.to(row) for (path, row), x in zip(rows.items(), found, strict=True)}

    def report(self, name: str, value: Any, own: bool = False, of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a number to the step's metrics. If a name is reported twice in a step, the first number stays.

        If you differentiate the metric, compute the number from results of `total` and `replicated`.

        Args:
            name: the name of the metric.
            value: the number: a Python number or a 0-d tensor.
            own: whether `value` is a tensor that was made for the metric alone. Then it is not copied.
            of: a function of the tensor; the metric is its result, such as the square root.
        """
        given = value
        if isinstance(value, float):
            # A default dtype of 16 bits would round a rate of 0.001.
            wide = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
            value = torch.full((), value, dtype=wide)
        elif not isinstance(value, Tensor):
            value = torch.as_tensor(value)
        if isinstance(self.comes, Tensor) and name in self.standing:
            held = self.standing[name]
            if isinstance(held, Tensor):
                held = held.to(value.device, value.dtype)
            elif not value.is_floating_point():
                held = int(held)
            (value,) = at_once(_standing, self.comes.to(value.device), value, held, of)
        elif of is not None:
            value = of(value)
        elif value is given and not own:
            # The metric needs a copy: later steps write into a state, and the user writes into the tensor of a rate.
            value = value.clone()
        if self.recorded and value.is_floating_point():
            value = self.reduction.alike(value)
        self.metrics.setdefault(self.prefix + name, value)

    def before_the_end(self, copies: UnderWay) -> None:
        """Register copies into the new state. They begin before the step returns, and may end after that."""
        if copies not in self.under_way:
            self.under_way.append(copies)

    def begun_copies(self, before: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Begin all registered copies, and return the copies for which a reader of the new state must wait.

        These are the copies that this call begins, and the copies in `before` whose queue gets no copy from this call.
        The copies of one queue end in the order in which they begin.

        Args:
            before: copies that earlier steps began.
        """
        found = [copies.send() for copies in self.under_way]
        for copy in found:
            # Nobody waits for it before the next step.
            copy.release()
        self.under_way.clear()
        later = {copy.queue for copy in found}
        return (*[copy for copy in before if copy.queue not in later], *found)

    def wait_for_copies(self) -> None:
        """Begin all registered copies, and return once they have ended."""
        while self.under_way:
            self.under_way.pop().wait_on_host()

    def inside(self, name: str) -> Context:
        """The context of a transform nested in `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")


def _standing(comes: Any, value: Any, held: Any, of: Any) -> list[Any]:
    """The metric of this step if an update reaches the transform, else `held`, which may be a Python number."""
    value = value if of is None else of(value)
    if isinstance(value, Tensor) and not isinstance(held, Tensor):
        # torch.full writes the number on the device. Copying a tensor of the host to a GPU would wait.
        held = torch.full((), held, dtype=value.dtype, device=value.device)
    return [torch.where(comes, value, held)]


def missing_number(name: str, who: str) -> ValueError:
    """The error for a step without a number that a transform wants."""
    right = f"opt.step({name}=...), zf.update(tx, grads, state, {name}=...)"
    if name == "loss":
        right = "opt.backward(loss) in place of loss.backward(); or opt.step(loss=loss), opt.step(closure);\n"
        right += "zf.update(tx, grads, state, loss=loss). A step of zf.make_step knows its loss"
    return ValueError(explain(f"a step without {name}= through {who}", f"it computes with the {name}", right))


@dataclass(frozen=True)
class Prepared:
    """The decisions of a transform once per step, before it sees leaves one by one.

    Attributes:
        carry: passed to the update of every leaf.
        state: the shared entries of its state that change.
        emit: whether updates go on to the next transform. A 0-d bool tensor under `vmap`, and where `Context.verdict`
            gives one.
        close: called once all leaves have been updated, to report a number of the whole tree that only metrics show. It
            is gathered bucket by bucket, while a bucket is in the cache for its update.
        given: means over a window of the numbers that a step is given, for later transforms.
        chosen: names of entries in `state` that keep their old values by themselves where `Context.choosing` is false.
        carries_state: whether the carry has the state, as that of a chain has the states of its transforms. Then each
            call of the update half is handed the state of all leaves, and returns entries of all leaves.
    """

    carry: Any = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    emit: bool | Tensor = True
    close: Callable[[], None] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    chosen: Collection[str] = ()
    carries_state: bool = False


def check_prepared(name: str, given: Any) -> Any:
    """The result of a `prepare_fn`, checked to be a `Prepared` whose `emit` is one bool.

    Raises:
        TypeError: it is something else, or its `emit` is.
    """
    if not isinstance(given, Prepared):
        why = "a prepare_fn returns a zerofn.extend.Prepared"
        right = "return Prepared(), or Prepared(carry=..., state={...})"
        raise TypeError(explain(f"{name}: a prepare_fn that gives {kind_of(given)}", why, right))
    emit = given.emit
    if isinstance(emit, bool) or (isinstance(emit, Tensor) and emit.dtype is torch.bool and not emit.ndim):
        return given
    shown = f"<tensor of shape {tuple(emit.shape)}, {emit.dtype}>" if isinstance(emit, Tensor) else repr(emit)
    wrong = f"{name}: a prepare_fn that gives Prepared(emit={shown})"
    why = "emit is a bool, or a 0-d tensor of bools: it says whether the whole step goes on to the next transform"
    raise TypeError(explain(wrong, why, "Prepared(emit=torch.isfinite(norm)) of a 0-d norm; flags.all() of several"))
