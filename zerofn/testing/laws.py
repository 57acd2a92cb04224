"""The laws that every transform keeps, as one check: `check_transform`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import memories
from .._errors import bad_leaves, explain
from ..core.chain import as_transform, chain
from ..core.context import Context
from ..core.facts import OF_PIECES, Scope
from ..core.layout import Layout, Leaf, Leaves, make_layout
from ..core.passes import reasons
from ..core.pipeline import pipeline
from ..core.rank_agreement import misjoined, misjoined_message
from ..core.spec import Spec
from ..core.state import State
from ..core.survey import effect
from ..core.transform import Transform, TransformState
from ..core.tree import Tree, clone, flatten, tensors_of, tree_map, tree_paths
from ..core.update import apply
from ..core.view import Ranks, View
from ..eager.optimizer import attach
from ..kernels import print_c
from ..pure.api import init, update
from ..pure.step import make_step
from ..ranks.backend import CollectiveBegun, no_collectives
from ..ranks.group import Group
from ..transforms.sgd import sgd
from .cutting import (
    AsModel,
    Case,
    Spans,
    check_cut,
    completed,
    draw_cut,
    fit_for_pieces,
    fit_for_rows,
    inner,
    innermost,
    loss,
    singly,
    start,
)
from .trees import assert_trees_close, assert_trees_equal, difference, random_like, sample_params

# ----------------------------------------------------------------------------------------------------------------------
# `check_facts` compares each of a transform's `Facts` with what its update half does.


# Parameters are shifted by this much. New parameters shift with them, gradients do not.
SHIFT = 1.0
# How many windows are searched for memory that a transform keeps.
WINDOWS = 6
NO = "keeps=False says that"


def check_facts(t: Transform, state: State) -> None:
    """Raise an `AssertionError` if a transform does something else than its `Facts` say.

    Args:
        t: not a chain, and not another library's.
        state: of a pipeline that contains it; it runs on the stored parameters.
    """
    run = _Run(t, state.layout, state.leaves)
    for why in (_window(run), _parameters(run), _old(run), _reports(run), _settable(run), _weights(run), _keeps(run)):
        if why:
            raise AssertionError(f"{t!r}: it does what its `Facts` say. {why}")


@dataclass(frozen=True)
class _Run:
    """A transform by itself, which gets the same gradients again and again."""

    t: Transform
    layout: Layout
    leaves: Leaves

    def steps(
        self,
        shift: float = 0.0,
        weights: tuple[float, ...] = (),
        windows: int = 1,
        handed: list[Tensor] | None = None,
        old: float | None = None,
        **given: Any,
    ) -> Iterator[tuple[Leaves | None, TransformState, Mapping[str, Tensor]]]:
        """For each micro-step: its result (`None` if it holds), its state, and the metrics.

        The arguments of its update half are appended to `handed`. With `old`, all old parameters are that number, for a
        transform that watches.
        """
        params = {p: x + shift if x.is_floating_point() else x for p, x in self.leaves.items()}
        state = self.t.init_fn(params, self.layout)
        for i in range(windows * self.t.facts.window):
            grads = params if self.t.facts.watches else random_like(self.leaves, seed=100 + i)
            if handed is not None:
                handed += [*grads.values(), *params.values()]
            weight = weights[i] if weights else 2.0 if self.t.facts.weighted else None
            numbers = dict.fromkeys(self.t.facts.wants, torch.tensor(2.0))
            numbers |= {name: torch.full(shape, 2.0) for name, shape in self.t.facts.wants_largest}
            ctx = Context(self.layout, weight=weight, given=numbers, **given)
            before = params if old is None else {p: torch.full_like(x, old) for p, x in params.items()}
            prepared = self.t.prepare_fn(state, grads, before, ctx)
            out, own = self.t.update_fn(grads, state, before, prepared.carry, ctx)
            if prepared.close is not None:
                prepared.close()
            ctx.wait_for_copies()
            state = {**state, **own, **prepared.state}
            yield (out if prepared.emit else None), state, ctx.metrics

    def each(self, **given: Any) -> list[Tree]:
        """The results and states of each micro-step: a step may leave its update out."""
        return [(out or {}, state) for out, state, _ in self.steps(**given)]

    def last(self, **given: Any) -> tuple[Leaves, TransformState, Mapping[str, Tensor]]:
        """Its result at the end of a window, its state then, and the metrics of that step."""
        *_, (out, state, metrics) = self.steps(**given)
        return out or {}, state, metrics


def _window(run: _Run) -> str:
    window = run.t.facts.window
    going = [i for i, (out, *_) in enumerate(run.steps(), 1) if out is not None]
    if going == [window]:
        return ""
    gave = f"in {', '.join(map(str, going))} of the first {window}" if going else f"in none of the first {window}"
    return f"window={window} says that one micro-step of so many goes on, the last. It gave gradients {gave}."


def _parameters(run: _Run) -> str:
    if not run.t.facts.optimizes:
        return ""
    unshifted, shifted = run.last()[0], run.last(shift=SHIFT)[0]
    moved = [(shifted[p].double() - x.double()).flatten() for p, x in unshifted.items() if x.is_floating_point()]
    if not moved or not (all_of := torch.cat(moved)).numel() or all_of.mean() > SHIFT / 2:
        return ""
    return "optimizes=True says that it gives new parameters. Those would move with the old ones: it gives gradients."


def _reports(run: _Run) -> str:
    missing = sorted(run.t.facts.reported(run.layout, run.leaves.keys()) - run.last()[2].keys())
    return f"reports={missing} says that it shows these metrics. It has no ctx.report of them." if missing else ""


def _old(run: _Run) -> str:
    if not run.t.facts.watches or run.t.facts.sees_old or _same(run.last(), run.last(old=torch.nan)):
        return ""
    return "sees_old=False says that it reads no old parameters. With other old parameters it gives other numbers."


def _settable(run: _Run) -> str:
    facts = run.t.facts
    if facts.rate is not None:
        rate = 2 * facts.rate + 0.01 if isinstance(facts.rate, float) else 0.125
        # It makes two steps, since the first may only begin a state.
        if _same(run.each(windows=2), run.each(windows=2, lr={"": rate})):
            return f"rate={facts.rate!r} says that its rate is set from outside. It does not use ctx.lr[ctx.prefix]."
    for name, value in facts.settable:
        numbers = {"": {name: tuple(map(_other, value)) if isinstance(value, tuple) else _other(value)}}
        # It makes three steps, since the decay of a momentum takes effect in the next step.
        if _same(run.each(windows=3), run.each(windows=3, numbers=numbers)):
            return f"{name!r} is settable from outside. It does not use ctx.numbers[ctx.prefix][{name!r}]."
    return ""


def _weights(run: _Run) -> str:
    if not run.t.facts.weighted or run.t.facts.window == 1:
        return ""
    equal = (1.0,) * run.t.facts.window
    if not _same(run.last(weights=equal)[0], run.last(weights=(3.0, *equal[1:]))[0]):
        return ""
    return "weighted=True says that it weighs micro-batches. It does not use ctx.weight."


def _keeps(run: _Run) -> str:
    if run.t.facts.keeps:
        return ""
    first = run.t.init_fn(dict(run.leaves), run.layout)
    if why := _kept("first state", first, run.leaves.values()):
        return why
    handed: list[Tensor] = []
    # A buffer may begin as the gradient itself, and be a new tensor afterwards.
    for i, (out, state, _) in enumerate(run.steps(windows=WINDOWS, handed=handed), 1):
        made = (out or {}).values() if run.t.facts.optimizes else ()
        if why := _kept(f"state after micro-step {i}", state, (*handed, *made)):
            return why
        # The parameters that it got in this step are the last tensors in `handed`.
        params = dict(zip(run.leaves, handed[-len(run.leaves) :], strict=True))
        moved = [x for path, x in (out or {}).items() if x is not params[path]]
        if not memories(moved).isdisjoint(memories(handed if run.t.facts.optimizes else params.values())):
            more = "no gradient, and " if run.t.facts.optimizes else ""
            return f"{NO} it gives {more}no parameter of another leaf, nor a view of one. It does, in micro-step {i}."
    return ""


def _kept(which: str, state: TransformState, others: Iterable[Tensor]) -> str:
    """How a state shares memory with other tensors, or with itself; "" if it does not."""
    own = tensors_of(state)
    if not memories(others).isdisjoint(memories(own)):
        return f"{NO} its state shares no memory with what it is handed, or new parameters; its {which} does."
    spans = sorted(_span(x) for x in own if x.numel() and memories([x]))
    if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
        return f"{NO} its state has no memory at two places; its {which} does."
    return ""


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses from the first element of a tensor to behind its last. Counts of leaves are of one tensor."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _other(value: Any) -> Any:
    """Another value of a hyperparameter, valid if it must lie between 0 and 1."""
    return (0.5 if value == 0.25 else 0.25) if type(value) in (float, int) else value


def _same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flatten(a)[0], flatten(b)[0], strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# `check_places` and `check_dtypes` compare the gradients after each transform with the `Spec` of the chain's survey.


RIGHT = "a `through` that says what its transform does: spec.to(dtype), spec.placed(Shard(0))"


def check_places(tx: Transform, params: Tree, ranks: int) -> None:
    """Raise an `AssertionError` if leaves are placed otherwise than a transform says, on any of so many ranks.

    Nothing is sent: the chain is only resolved.
    """
    layout, _ = make_layout(params)
    for rank in range(ranks):
        groups = _silent_groups(rank, ranks)
        views = [part.view_fn(layout, groups) for part in tx.members]
        wired = [t for t, v in zip(tx.members, views, strict=True) if v is not None and v.wire is not None]
        for part in wired:
            try:
                pipe = pipeline(chain(part, sgd(0.1)), layout, "check_transform", groups)
            except ValueError as error:
                raise AssertionError(f"{part!r}: it says where gradients lie.\n{error}") from error
            for view in pipe.stages:
                if rows := misjoined(view, layout.leaves):
                    raise AssertionError(f"{part!r}: a wire gives whole leaves.\n{misjoined_message(view, rows)}")


def _silent_groups(rank: int, size: int) -> Ranks:
    """Groups of `size` ranks in which nothing is ever sent."""

    def group(function: str, mesh: Any) -> Group:
        return Group(rank, size, tuple(range(size)))

    return group


def check_dtypes(tx: Transform, params: Tree, gradients: Sequence[Leaves], step_options: Mapping[str, Any]) -> None:
    """Raise an `AssertionError` if an update half's result has another dtype than the survey says.

    Args:
        tx: with an optimizer.
        params: on one process.
        gradients: for each micro-step.
        step_options: of the context.
    """
    layout, tensors = make_layout(params)
    first = pipeline(tx, layout, "check_transform")
    says = {s.transform: s.gives for s in first.stations}
    # The optimizer of these leaves returns masters, and its wrapper parameters.
    split = {leaf.path for leaf in layout.leaves if first.dtypes.of(leaf).residual}
    wrong: dict[str, dict[str, str]] = {}

    def recording(part: Transform) -> Transform:
        def update(grads: Leaves, state: Any, leaves: Leaves, carry: Any, ctx: Any):
            out, new = part.update_fn(grads, state, leaves, carry, ctx)
            given = {p: x for p, x in (out or {}).items() if not (part.facts.optimizes and p in split)}
            wrong.setdefault(part.name, {}).update(_wrong_dtypes(says[part.name], given))
            return out, new

        return part if part.idle else replace(part, update_fn=update)

    pipe = pipeline(chain(*map(recording, tx.members)), layout, "check_transform")
    state = start(pipe, tensors)
    for grads in gradients:
        cast = {leaf.path: grads[leaf.path].to(pipe.dtypes.gradient(leaf)) for leaf in layout.trainable}
        state, _ = apply(pipe, cast, state, pipe.context(micro_step=state.micro_step, **step_options))
    for part in tx.members:
        if rows := wrong.get(part.name):
            raise AssertionError(bad_leaves(f"{part!r}: it says which dtype it gives.", rows.items(), RIGHT))


def _wrong_dtypes(says: Mapping[str, Spec], out: Leaves) -> dict[str, str]:
    dtypes = {path: (says[path].dtype, x.dtype) for path, x in out.items()}
    return {
        path: f"in {got}, where its station says {expected}"
        for path, (expected, got) in dtypes.items()
        if expected != got
    }


# ----------------------------------------------------------------------------------------------------------------------
# `check_views` checks the laws of view halves: `view` after `store` is the identity, `pull` is the transpose, pieces
# are seen as in the whole leaf, and a view without a wire sends nothing.


# Tolerance in units in the last place: of a view after its store, and of an inner product.
ULPS = 16.0


def check_views(tx: Transform, params: Tree) -> None:
    """Raise an `AssertionError` if a view half of a chain breaks a law, or `through` promises a wire that no view has.

    Wires are not checked: on one process they do nothing.
    """
    layout, leaves = make_layout(params)
    for part in tx.members:
        view = part.view_fn(layout, _one_process)
        _check_words(part, view)
        if view is None or view.wire is not None or not view.of_leaves:
            continue
        touched = [leaf for leaf in layout.leaves if view.changes(leaf)]
        state = part.init_fn({path: leaves[path] for path in layout.trained}, layout)
        read = view.reading(lambda state=state: state)
        _check_writes(part, read, touched, leaves)
        _check_store(part, read, touched, leaves)
        _check_pull(part, read, touched, leaves)
        _check_silent(part, read, touched, leaves)
        if part.needs in (*OF_PIECES, "row"):
            _check_pieces(part, view, touched, layout, leaves)


def _one_process(function: str, mesh: Any) -> Group:
    return Group()


def _check_words(part: Transform, view: View | None) -> None:
    says = effect(part)
    words = [w for w in ("sharded_by", "scattered_by", "averaged_by") if getattr(says, w)]
    assert not words or (view is not None and view.wire is not None), (
        f"{part!r}: its `through` says {words[0]!r}, and no view of it has a wire that could do it.\n"
        "  write: a `through` without it; or view_fn=lambda layout, ranks: over_ranks(wire, resident=...)"
    )


def _each(part: Transform, law: str, right: str, rows: Iterator[tuple[str, str | None]]) -> None:
    if wrong := [(path, reason) for path, reason in rows if reason]:
        raise AssertionError(bad_leaves(f"{part!r}: {law}", wrong, right))


def _functions(view: View) -> dict[str, Callable[[Tensor, Leaf], Tensor]]:
    return {"view": view.view, "pull": view.pull, "store": view.store}


def _check_writes(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            for name, fn in _functions(view).items():
                given = leaves[leaf.path].clone()
                fn(given, leaf)
                yield leaf.path, f"`{name}` wrote it" if not torch.equal(given, leaves[leaf.path]) else None

    _each(
        part, "a view writes into none of its arguments: they are what is stored.", "x * 2, and not x.mul_(2)", rows()
    )


def _check_store(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            seen = view.view(view.store(leaves[leaf.path], leaf), leaf)
            yield leaf.path, difference(view.view(view.store(seen, leaf), leaf), seen, (ULPS, 1.0))

    right = "View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)"
    _each(part, "view after store is the identity on what is seen.", right, rows())


def _check_pull(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    """`<view(x), g> == <x, pull(g)>` for a linear view. For others `pull` stands for a derivative: not checked."""
    cotangents = random_like(leaves, seed=32)

    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            x, seen = leaves[leaf.path], view.view(leaves[leaf.path], leaf)
            if seen.is_complex() or not _linear(view, x, leaf):
                continue
            g = cotangents[leaf.path].to(seen.dtype)
            left, right = _terms(seen, g), _terms(x, view.pull(g, leaf))
            eps = max(torch.finfo(seen.dtype).eps, torch.finfo(x.dtype).eps)
            room = ULPS * eps * float(left.abs().sum() + right.abs().sum())
            one, two = float(left.sum()), float(right.sum())
            yield leaf.path, None if abs(one - two) <= room else f"<view(x), g> = {one:.6g}, <x, pull(g)> = {two:.6g}"

    law = "`pull` of a linear view is its transpose: the vjp of the view."
    right = "the transpose; what is to multiply gradients alone is an update half: zf.leafwise(lambda grad, param: ...)"
    _each(part, law, right, rows())


def _linear(view: View, x: Tensor, leaf: Leaf) -> bool:
    """Whether the view keeps sums and multiples; by odd factors, so that rounding to a grid is not linear."""
    y = random_like({"y": x}, seed=31)["y"]
    pairs = [(view.view(x + y, leaf), view.view(x, leaf) + view.view(y, leaf))]
    pairs += [(view.view(by * x, leaf), by * view.view(x, leaf)) for by in (0.3719, 1000.13)]
    return not any(difference(a, e, (ULPS, 4.0)) for a, e in pairs)


def _terms(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).reshape(-1)


def _check_silent(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            for name, fn in _functions(view).items():
                given = leaves[leaf.path].clone()
                try:
                    with no_collectives():
                        fn(given, leaf)
                except CollectiveBegun as error:
                    yield leaf.path, f"`{name}` called {error}"
                except Exception as error:
                    yield leaf.path, f"`{name}` raised where there are several ranks: {error}"

    law = "a view without a wire talks to no other rank: its calls are in no order that ranks have in common."
    _each(part, law, "what travels is packed, sent and unpacked by a wire: over_ranks(wire, resident=...)", rows())


def _check_pieces(part: Transform, view: View, touched: Sequence[Leaf], layout: Layout, leaves: Leaves) -> None:
    """A view of a piece, or of some rows, is that piece of the view of the full leaf."""
    by_rows = part.needs == "row"
    for ranks in (2, 3, 4):
        for spans in draw_cut(layout, ranks, seed=ranks, by_rows=by_rows):
            _check_piece(part, view, touched, layout, leaves, spans)


def _check_piece(
    part: Transform, view: View, touched: Sequence[Leaf], layout: Layout, leaves: Leaves, spans: Spans
) -> None:
    def piece(leaf: Leaf) -> Tensor:
        return _piece(leaves[leaf.path], leaf, spans, part.needs)

    trained = {leaf.path: leaf for leaf in layout.trainable}
    whole = part.init_fn({path: leaves[path] for path in trained}, layout)
    own = part.init_fn({path: piece(leaf) for path, leaf in trained.items()}, layout)
    of_whole, of_piece = (_functions(view.reading(lambda state=state: state)) for state in (whole, own))

    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            low, high = spans[leaf.path]
            for name in of_whole:
                expected = _piece(of_whole[name](leaves[leaf.path], leaf), leaf, spans, part.needs)
                try:
                    reason = difference(of_piece[name](piece(leaf), leaf), expected, (2.0, 1.0))
                except Exception as error:
                    reason = f"it raised {type(error).__name__}: {error}"
                yield f"{leaf.path}[{low}:{high}]", None if reason is None else f"`{name}`: {reason}"

    some = "some rows of a leaf are" if part.needs == "row" else "a flat piece of a leaf is"
    law = f"it says needs={part.needs!r}: {some} seen, pulled back and stored as in the whole leaf."
    _each(part, law, 'needs="leaf", and it stands in front of what cuts leaves: chain(view, shard(), ...)', rows())


def _piece(x: Tensor, leaf: Leaf, spans: Mapping[str, tuple[int, int]], needs: str) -> Tensor:
    low, high = spans[leaf.path]
    flat = x.reshape(-1)[low:high]
    if needs != "row" or not leaf.shape:
        return flat
    row = leaf.shape[1:].numel()
    return flat.reshape((high - low) // row if row else 0, *leaf.shape[1:])


# ----------------------------------------------------------------------------------------------------------------------
# `check_transform` checks all laws that every transform obeys.


# These are texts for transforms that draw random numbers.
DRAWN = "draws of torch's generators depend on the number of ranks, and on whether a run was resumed"
RANDOM_BITS = """random_bits(grad.numel(), seed=seed, step=step, key=leaf_key(path), offset=offset)
as in docs/writing-a-transform.md; in zerofn/transforms/add_noise.py for a transform that is not leafwise"""


def check_transform(tx: Any, params: Tree = None) -> list[str]:
    """Check a transform, or a pipeline, against the laws that every transform obeys.

    If a chain has no optimizer, `check_transform` adds `sgd`. The laws:

    * It prints, compares and pickles.
    * `init` takes meta tensors. The structure of the state depends neither on values, nor on hyperparameters, nor on
      the number of updates.
    * No input is written. Strides of gradients do not matter. A leaf without a gradient is left alone.
    * The same step gives the same bits again: nothing draws from torch's random generator.
    * A leafwise transform updates a leaf alone as it updates the leaf in a bigger tree.
    * `donate=True` gives the bits of `donate=False`, in metrics too. `vmap` over stacked states is a loop over states.
    * In an attached model a transform after the optimizer gets the same old and new parameters as in a step.
    * A held or skipped step changes nothing but its transform's counters.
    * With `needs="element"` or `needs="number"`, flat pieces of leaves, cut anywhere, are updated as in full leaves.
      With `needs="row"`, some rows of a leaf are updated as in the full leaf.
    * The gradients that it returns have the dtype and placement that its `through` and its view say.
    * It does what its `Facts` say: it holds the declared number of micro-steps, returns parameters, and reports its
      metrics. If it declares hyperparameters that users may set (`rate`, `settable`), it uses the numbers they set.
    * A view without a wire writes into none of its arguments, and communicates with no other rank.
    * In a view without a wire, `store` then `view` gives back what the model sees. If `view` is linear, `pull` is its
      transpose.
    * With `needs="element"` or `needs="number"`, a view without a wire maps flat pieces of leaves as in full leaves.
      With `needs="row"`, it maps some rows of a leaf as in the full leaf.

    A transform of another library is not asked for `vmap`, meta tensors, missing gradients or pickling.

    Args:
        tx: whatever a chain accepts.
        params: a tree to check it on; by default `sample_params()`.

    Returns:
        Why functions of yours with `needs="element"` run by torch's operations and not as kernels, or are called in
        each step, with the line that was the reason; an empty list if all of them are kernels that are made once
        (docs/your-formula-is-a-kernel.md).

    Raises:
        AssertionError: names the transform, the law, and every leaf that breaks it.
        ValueError, TypeError: `zf.init` or a step refuses what the transform does, such as leaving out a leaf.

    Examples:
        >>> import torch, zerofn as zf
        >>> @zf.leafwise
        ... def doubled(grad, param):
        ...     return grad.mul_(2)
        >>> check_transform(doubled())
        Traceback (most recent call last):
        ...
        AssertionError: doubled(): an update writes none of its inputs. The gradients were written.
        ...

    Notes:
        Results for pieces may differ from those for full leaves. For each step the check allows two units in the last
        place of a number as large as the gradients, because some of torch's kernels (fused Adam, `add` with `alpha` in
        16 bits, `sigmoid`, `pow`) round the last elements of a tensor differently.
    """
    tx = as_transform(tx)
    case = Case(tx, completed(tx), sample_params() if params is None else params)
    for law in LAWS:
        law(case)
    state = init(case.pipe, clone(case.params))
    return reasons(lambda: update(case.pipe, case.grads(state, 0), state, **case.numbers), print_c)


def _purity(case: Case) -> None:
    law = "an update writes none of its inputs. "
    params = clone(case.params)
    state = init(case.pipe, params)
    assert_trees_equal(params, case.params, case.broken("`init` writes none of its inputs."))
    for i in range(case.steps):
        grads, before = case.grads(state, i), clone(state)
        given = clone(grads)
        new, _ = update(case.pipe, grads, state, **case.numbers)
        assert_trees_equal(grads, given, case.broken(law + "The gradients were written."))
        assert_trees_equal(state, before, case.broken(law + "The state was written."))
        state = new
    moved = any(not torch.equal(state.leaves[p], x) for p, x in init(case.pipe, case.params).leaves.items())
    law = f"after {case.steps} micro-steps some parameter has changed. None has, so nothing is tested."
    assert moved, case.broken(law)


def _repeats(case: Case) -> None:
    draws, law = torch.get_rng_state(), "the same arguments give the same bits. "
    right = "init=torch.zeros_like: a state that follows from the parameter alone"
    try:
        state = init(case.pipe, case.params)
        assert_trees_equal(init(case.pipe, case.params), state, case.broken(law + "Two calls of `init` differ:"))
        right = RANDOM_BITS
        for i in range(case.steps):
            new, again = (update(case.pipe, case.grads(state, i), state, **case.numbers)[0] for _ in range(2))
            assert_trees_equal(again, new, case.broken(law + f"Micro-step {i}, made twice, differs:"))
            state = new
    except AssertionError as error:
        why = DRAWN
        if torch.equal(draws, torch.get_rng_state()):
            why, right = "it reads something beside its arguments", "what changes as a part of the state"
        raise AssertionError(explain(str(error).partition("\n  write:")[0], why, right)) from None


def _identity(case: Case) -> None:
    tx = case.tx
    assert repr(tx) and "object at 0x" not in repr(tx), case.broken("it prints, without addresses.")
    if case.has_guests:
        return
    try:
        again = pickle.loads(pickle.dumps(tx))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        law = f"it pickles. Define its functions at the top of a module: {error}"
        raise AssertionError(case.broken(law)) from error
    same = again == tx and hash(again) == hash(tx) and repr(again) == repr(tx)
    assert same, case.broken(f"pickled and loaded it is the same. It became {again!r}")


def _layout(case: Case) -> None:
    state = init(case.pipe, case.params)
    expected = _skeleton(state)
    law = "structure, dtypes and shapes of the state depend on parameters and transforms alone. They changed "
    assert_trees_equal(_skeleton(case.run(state)), expected, case.broken(law + "with an update."))
    layout, leaves = make_layout(case.params)
    # Values are drawn leaf by leaf, so that tied parameters stay tied.
    other = init(case.pipe, layout.join(random_like(leaves, seed=8)))
    assert_trees_equal(_skeleton(other), expected, case.broken(law + "with values of parameters."))
    if case.has_guests:
        return
    meta = init(case.pipe, layout.join({p: x.to("meta") for p, x in leaves.items()}))
    assert_trees_equal(_skeleton(meta), expected, case.broken(law + "on meta tensors."))
    for changed in _perturbed(case.pipe):
        found = _skeleton(init(changed, case.params))
        assert_trees_equal(found, expected, case.broken(law + f"with a hyperparameter: {changed!r}"))


def _skeleton(tree: Tree) -> Tree:
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else type(x), tree)


def _perturbed(t: Transform) -> list[Transform]:
    """The transform with its positive float hyperparameters changed, one at a time."""
    if t.parts and t.in_turn:
        return [chain(*t.parts[:i], new, *t.parts[i + 1 :]) for i, p in enumerate(t.parts) for new in _perturbed(p)]
    found = []
    for name, value in t.config.items():
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(v, float) and v > 0 for v in values):
            continue
        new = tuple(v * 0.75 for v in values)
        try:
            built = t.factory(**{**t.config, name: new if isinstance(value, tuple) else new[0]})  # type: ignore[misc]
        except ValueError:
            continue
        found.append(replace(built, name=t.name))
    return found


def _strides(case: Case) -> None:
    def transposed(state: State, i: int) -> Tree:
        def other_strides(x: Any) -> Any:
            return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x

        return tree_map(other_strides, case.grads(state, i))

    state = init(case.pipe, case.params)
    law = "strides of a gradient do not matter."
    # A sum over a leaf follows the order in memory.
    ulps = 0 if case.tx.needs == "element" else 8
    assert_trees_close(case.run(state, transposed), case.run(state), ulps, floor=1.0, what=case.broken(law))


def _missing(case: Case) -> None:
    """A leaf that never gets a gradient keeps its value; weight decay and momentum do not move it either."""
    if case.has_guests:
        return
    state = init(case.pipe, case.params)
    path = next(leaf.path for leaf in state.layout.leaves if leaf.numel)

    def without(s: State, i: int) -> Tree:
        return s.layout.join_once({p: g for p, g in make_layout(case.grads(s, i))[1].items() if p != path})

    if len(state.leaves) > 1:
        left = case.run(state, without).leaves[path]
        assert_trees_equal(left, state.leaves[path], case.broken(f"a leaf without a gradient ({path}) is left alone."))


def _one_leaf(case: Case) -> None:
    if not all(t.scope is Scope.LEAF and not t.facts.adds for t in innermost(case.tx)):
        return
    whole = case.run(init(case.pipe, case.params))
    layout = init(case.pipe, case.params).layout
    for leaf in layout.leaves:
        alone = layout.join({leaf.path: make_layout(case.params)[1][leaf.path]})

        def grads(s: State, i: int, path: str = leaf.path) -> Tree:
            return layout.join_once({path: make_layout(case.grads(whole, i))[1][path]})

        got = case.run(init(case.pipe, alone), grads).leaves[leaf.path]
        law = f"one leaf alone ({leaf.path}) is that leaf in a bigger tree, for leafwise transforms."
        assert_trees_equal(got, whole.leaves[leaf.path], case.broken(law))


def _donate(case: Case) -> None:
    states, shown = [], []
    for donate in (False, True):
        step = make_step(loss, case.pipe, donate=donate)
        state = init(case.pipe, case.params)
        for i in range(case.steps):
            state, metrics = step(state, random_like(case.params, seed=i), **case.numbers)
            shown.append(metrics)
        states.append(state)
    law = "donate=True gives the bits of donate=False."
    assert_trees_equal(states[1], states[0], case.broken(law))
    for pure, donated in zip(shown[: case.steps], shown[case.steps :], strict=True):
        assert_trees_equal(donated, pure, case.broken(f"{law} Metrics differ:"))


def _attached(case: Case) -> None:
    """In every route, a transform after the optimizer gets the parameters before and after the update."""
    if not any(t.facts.compares for t in innermost(case.pipe)):
        return
    step, state = make_step(loss, case.pipe), init(case.pipe, case.params)
    model = AsModel(make_layout(case.params)[1])
    opt = attach(model, case.pipe)
    law = "an attached model gives the bits of `make_step`, with the parameters before and after an update for what "
    law += "stands behind the optimizer."
    for i in range(case.steps):
        data = random_like(case.params, seed=i)
        model(make_layout(data)[1]).backward()
        opt.step(**case.numbers)
        opt.zero_grad()
        state, metrics = step(state, data, **case.numbers)
        # Leaves are compared by path, since the two trees have different containers.
        assert_trees_equal(dict(opt.state.leaves), dict(state.leaves), case.broken(f"{law} Parameters differ:"))
        assert_trees_equal(opt.state.transforms, state.transforms, case.broken(f"{law} States differ:"))
        del metrics["loss"]
        assert_trees_equal(opt.metrics, metrics, case.broken(f"{law} Metrics differ:"))
    opt.detach()


def _ensemble(case: Case) -> None:
    if case.has_guests:
        return
    step = make_step(loss, case.pipe)
    seeds = (1, 2)
    states = [init(case.pipe, random_like(case.params, seed=s)) for s in seeds]
    together = _stack(states)
    for i in range(case.steps):
        batches = [random_like(case.params, seed=10 * s + i) for s in seeds]
        states = [step(s, b, **case.numbers)[0] for s, b in zip(states, batches, strict=True)]
        # A dict by path, since torch.func's tree library does not know classes that are registered with optree.
        rows = torch.vmap(lambda s, leaves: step(s, s.layout.join(leaves), **case.numbers)[0])
        try:
            together = rows(together, _stack([make_layout(b)[1] for b in batches]))
        except RuntimeError as error:
            if "called random operation" not in str(error):
                raise
            raise AssertionError(explain(case.broken("it draws no random numbers."), DRAWN, RANDOM_BITS)) from error
    law = "vmap over stacked states is a loop over states."
    # Fused kernels and the formula under vmap round differently, once or twice an update; an ulp in fp32 may move a
    # rounding to 16 bits by a unit there.
    apart = _stack(states)
    assert_trees_close(together, apart, ulps=32, floor=1.0, what=case.broken(law))
    # Dtypes are compared too: a float64 number turns a 0-d leaf into float64, and its values stay close.
    found, wanted = ([x.dtype for x in flatten(tree)[0]] for tree in (together, apart))
    wrong = [(p, f"{x} instead of {y}") for p, x, y in zip(tree_paths(apart), found, wanted, strict=True) if x != y]
    assert not wrong, bad_leaves(case.broken(f"{law} Dtypes differ:"), wrong, "what is kept .to the dtype of the old")


def _stack(trees: list[Tree]) -> Tree:
    return tree_map(lambda *xs: torch.stack(xs), *trees)


def _held(case: Case) -> None:
    law = "a held or skipped step changes nothing but its own counters. "
    keepers = {t.name for t in case.pipe.members if t.facts.holds}
    state = init(case.pipe, case.params)
    for i in range(case.steps):
        new, metrics = update(case.pipe, case.grads(state, i), state, **case.numbers)
        if not metrics["updated"]:
            _assert_untouched(case, state, new, keepers | case.scaling, law + "A held one changed:")
        state = new
    if case.scaling:
        for value in (torch.nan, torch.inf, -torch.inf):
            grads = tree_map(lambda g, v=value: None if g is None else torch.full_like(g, v), case.grads(state, 0))
            new, _ = update(case.pipe, grads, state, **case.numbers)
            _assert_untouched(case, state, new, case.scaling, law + f"One of {value} changed:")


def _assert_untouched(case: Case, old: State, new: State, own: set[str], law: str) -> None:
    def rest(s: State) -> Tree:
        return s.leaves, s.step, {k: v for k, v in s.transforms.items() if k not in own}

    assert_trees_equal(rest(new), rest(old), case.broken(law))


def _cut_anywhere(case: Case, ulps: float = 2.0) -> None:
    def check(subject: Transform, pipe: Transform, by_rows: bool = False) -> None:
        # Small and large gradients, in case a transform treats those above a threshold differently.
        for ranks, size in ((2, 1.0), (3, 30.0), (4, 1e-3)):
            layout, leaves = make_layout(case.params)
            grads = [random_like(leaves, seed=100 * ranks + i) for i in range(case.steps)]
            grads = [{path: g * size for path, g in given.items()} for given in grads]
            bound = None if ulps == 0 else (ulps * case.steps, max(1.0, 4 * size))
            cut = draw_cut(layout, ranks, seed=ranks, by_rows=by_rows)
            check_cut(subject, pipe, case.params, grads, case.of_context, cut, partial(difference, bound=bound))

    for subject, pipe in fit_for_pieces(case.tx):
        try:
            check(subject, pipe)
        except AssertionError:
            # Name the member that breaks the law, if it does so by itself.
            for member, alone in singly(subject):
                check(member, alone)
            raise
    for subject, pipe in fit_for_rows(case.tx):
        check(subject, pipe, by_rows=True)


def _stations(case: Case) -> None:
    check_places(case.tx, case.params, ranks=3)
    leaves = make_layout(case.params)[1]
    check_dtypes(
        case.pipe, case.params, [random_like(leaves, seed=100 + i) for i in range(case.steps)], case.of_context
    )


def _facts(case: Case) -> None:
    state = init(case.pipe, case.params)
    for member in case.tx.members:
        if not any(t.facts.adds for t in inner(member)):
            check_facts(member, state)


def _views(case: Case) -> None:
    # `init` refuses views that do not fit their leaves, with messages of its own.
    init(case.pipe, clone(case.params))
    check_views(case.tx, case.params)


LAWS = (
    *(_views, _purity, _repeats, _identity, _layout, _facts, _strides, _missing, _one_leaf, _donate),
    *(_attached, _ensemble, _held, _cut_anywhere, _stations),
)
