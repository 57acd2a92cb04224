"""Laws of a transform as one check, and assertions over trees that report every bad leaf.

>>> import zerofn as zf
>>> from zerofn.testing import check_transform
>>> check_transform(zf.chain(zf.clip_by_value(1.0), zf.adamw(lr=0.1)))
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.compose import as_transform, chain
from ..core.order import effect
from ..core.state import State
from ..core.transform import Scope, Transform
from ..core.tree import Tree, flatten, make_layout, tree_map, tree_paths
from ..pure.api import init, update
from ..pure.step import make_step
from ..transforms.sgd import sgd
from .cutting import check_cut, draw_cut, fit_for_pieces, fit_for_rows, singly
from .stations import check_dtypes, check_places


def assert_trees_equal(actual: Tree, expected: Tree, what: str = "trees differ") -> None:
    """Same structure, shapes, dtypes and bits; NaN equals NaN. Every leaf that differs is named.

    >>> import torch
    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> assert_trees_equal({"w": one, "b": [one]}, {"w": one, "b": [zero]})
    Traceback (most recent call last):
    ...
    AssertionError: trees differ
      b.0: 1 of 1 elements differ, the worst by 1 at (0,): 1 instead of 0
      write: two trees that are equal
    """
    _compare(actual, expected, what, None)


def assert_trees_close(
    actual: Tree, expected: Tree, ulps: float, floor: float = 0.0, what: str = "trees differ"
) -> None:
    """Same structure, shapes and dtypes, and `|a - e| <= ulps * eps * max(|e|, floor)` everywhere.

    Args:
        actual: a tree of tensors.
        expected: the reference; in float64 where it is more exact than what is checked.
        ulps: how many units in the last place of the actual dtype.
        floor: magnitude below which the error is absolute: that of the terms whose sum a small number is.
        what: first line of the message.

    >>> import torch
    >>> assert_trees_close(torch.tensor(1.0), torch.tensor(1.0 + 1e-7, dtype=torch.float64), ulps=1)
    """
    _compare(actual, expected, what, (ulps, floor))


def _compare(actual: Tree, expected: Tree, what: str, bound: tuple[float, float] | None) -> None:
    mine, theirs = tree_paths(actual), tree_paths(expected)
    bad = [(p, "missing") for p in theirs if p not in mine] + [(p, "extra") for p in mine if p not in theirs]
    if not bad:
        for path, a, e in zip(mine, flatten(actual)[0], flatten(expected)[0], strict=True):
            if reason := _difference(a, e, bound):
                bad.append((path, reason))
    if bad:
        raise AssertionError(bad_leaves(what, bad, "two trees that are " + ("equal" if bound is None else "close")))


def _difference(a: Any, e: Any, bound: tuple[float, float] | None) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(e, Tensor):
        return None if a is e or a == e else f"{a!r} instead of {e!r}"
    if a.shape != e.shape or (a.dtype != e.dtype and bound is None):
        return f"{a.dtype} of shape {tuple(a.shape)} instead of {e.dtype} of shape {tuple(e.shape)}"
    if a.is_meta or e.is_meta:
        return None
    if a.is_complex() != e.is_complex():
        return f"{a.dtype} instead of {e.dtype}"
    a, e = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, e))
    a, e, eps = a.detach().cpu(), e.detach().cpu(), _eps(a.dtype)
    both_nan = a.isnan() & e.isnan()
    if bound is None:
        wrong = (a != e) & ~both_nan
    else:
        room = bound[0] * eps * e.double().abs().clamp(min=bound[1])
        # Infinities minus each other are NaN, which is within no room: equal ones are right all the same.
        wrong = ~((a.double() - e.double()).abs() <= room) & ~both_nan & (a != e)
    if not wrong.any():
        return None
    distance = (a.double() - e.double()).abs().masked_fill(~wrong, -1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(distance.flatten().argmax(), a.shape))
    worst = f"{float(distance[at]):.3g} at {at}: {a[at].item():.9g} instead of {e[at].item():.9g}"
    return f"{int(wrong.sum())} of {a.numel()} elements differ, the worst by {worst}"


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def clone(tree: Tree) -> Tree:
    """A tree of copies.

    >>> import torch
    >>> clone({"w": torch.ones(1)})
    {'w': tensor([1.])}
    """
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def random_like(tree: Tree, seed: int) -> Tree:
    """Normal numbers in the shapes and dtypes of `tree`, from a generator of their own.

    >>> import torch
    >>> random_like({"w": torch.zeros(2), "b": None}, seed=0)
    {'w': tensor([ 1.5410, -0.2934]), 'b': None}
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    return tree_map(draw, tree)


def sample_params() -> Tree:
    """Parameters that transforms trip over: nested containers, `None`; 0-d, zero-size and 1-element leaves.

    >>> len(sample_params())
    5
    """
    empty = {
        "block": [{"weight": torch.zeros(3, 5), "bias": torch.zeros(5)}, (torch.zeros(2, 1, 3), None)],
        "kernel": torch.zeros(2, 3, 2, 2),
        "gain": torch.zeros(()),
        "empty": torch.zeros(0, 4),
        "one": torch.zeros(1),
    }
    return random_like(empty, seed=7)


@dataclass(frozen=True)
class _Case:
    """What every law is given: the transform, the pipeline it stands in, and parameters."""

    tx: Transform
    pipe: Transform
    params: Tree

    @property
    def steps(self) -> int:
        """Micro-steps that close a window twice."""
        every = 1
        for t in self.pipe.members:
            every *= t.facts.window
        return 2 * every + 1

    @property
    def weight(self) -> dict[str, Any]:
        return {"weight": 2.0} if any(t.facts.weighted for t in self.pipe.members) else {}

    @property
    def guests(self) -> bool:
        return any(t.facts.adds for t in _inner(self.pipe))

    @property
    def scaling(self) -> set[str]:
        """The transforms that divide a loss scale out, by name: their counters count what is skipped."""
        return {t.name for t in self.pipe.members if effect(t).unscaled_by}

    def grads(self, state: State, seed: int) -> Tree:
        return random_like(state.params, seed=100 + seed)

    def run(self, state: State, grads: Callable[[State, int], Tree] | None = None, steps: int = 0) -> State:
        for i in range(steps or self.steps):
            state, _ = update(self.pipe, (grads or self.grads)(state, i), state, **self.weight)
        return state


def _inner(t: Transform) -> list[Transform]:
    """The transform and everything nested in it."""
    return [t, *(x for part in t.parts for x in _inner(part))]


def _loss(params: Tree, data: Tree) -> Tensor:
    """Its gradient depends on data and on parameters, and is alive in every leaf."""
    # Under vmap the structure is the same and the tensors are wrapped, so all this is plain arithmetic.
    pairs = zip(flatten(params)[0], flatten(data)[0], strict=True)
    terms = [(p.float() * d.float() + 0.1 * p.float() ** 2).sum() for p, d in pairs if p is not None]
    return torch.stack(terms).sum()


def check_transform(tx: Any, params: Tree = None) -> None:
    """Put a transform, or a pipeline, through the laws every transform obeys.

    A part of a pipeline is completed by `sgd`. Checked are: it prints, compares and pickles; `init`
    takes meta tensors; the layout of the state depends on neither values nor hyperparameters nor the
    number of updates; inputs are not written; strides of gradients do not matter; a leaf without a gradient
    is left alone; one leaf alone is that leaf in a bigger tree (leafwise transforms); `donate=True` gives the
    bits of `donate=False`; `vmap` over stacked states is a loop over states; a held or skipped
    step changes nothing but its own counters; what says `needs="element"`, or needs one number of the tree, gives
    on flat pieces of leaves, cut anywhere, what it gives on whole ones, and what needs rows on some of them; gradients
    behind it have the dtype and the place that its `through` and its view say. A guest of
    another library is not asked for `vmap`, meta tensors, missing gradients or pickling.

    Pieces are compared with wholes within two units in the last place of a number as large as the gradients, for each
    step: some of torch's kernels (fused Adam, `add` with `alpha` in 16 bits, `sigmoid`, `pow`) round the last
    elements of a tensor otherwise than those before.

    Args:
        tx: what a chain accepts.
        params: a tree to check it on; by default `sample_params()`.

    Raises:
        AssertionError: names the transform, the law, and every leaf that breaks it.

    >>> import torch, zerofn as zf
    >>> @zf.leafwise
    ... def doubled(grad, param):
    ...     return grad.mul_(2)
    >>> check_transform(doubled())
    Traceback (most recent call last):
    ...
    AssertionError: doubled(): an update writes none of its inputs. The gradients were written.
    ...
    """
    tx = as_transform(tx)
    case = _Case(tx, _completed(tx), sample_params() if params is None else params)
    for law in LAWS:
        law(case)


def _completed(tx: Transform) -> Transform:
    parts = tx.members
    if any(t.facts.optimizes for t in parts):
        return tx
    return chain(sgd(0.1), tx) if parts and parts[0].facts.watches else chain(tx, sgd(0.1))


def _fail(case: _Case, law: str) -> str:
    return f"{case.tx!r}: {law}"


def _purity(case: _Case) -> None:
    law = "an update writes none of its inputs. "
    params = clone(case.params)
    state = init(case.pipe, params)
    assert_trees_equal(params, case.params, _fail(case, "`init` writes none of its inputs."))
    for i in range(case.steps):
        grads, before = case.grads(state, i), clone(state)
        given = clone(grads)
        new, _ = update(case.pipe, grads, state, **case.weight)
        assert_trees_equal(grads, given, _fail(case, law + "The gradients were written."))
        assert_trees_equal(state, before, _fail(case, law + "The state was written."))
        state = new
    moved = any(not torch.equal(state.leaves[p], x) for p, x in init(case.pipe, case.params).leaves.items())
    assert moved, _fail(
        case, f"after {case.steps} micro-steps some parameter has changed. None has, so nothing is tested."
    )


def _identity(case: _Case) -> None:
    tx = case.tx
    assert repr(tx) and "object at 0x" not in repr(tx), _fail(case, "it prints, without addresses.")
    if case.guests:
        return
    try:
        again = pickle.loads(pickle.dumps(tx))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(
            _fail(case, f"it pickles. Define its functions at the top of a module: {error}")
        ) from error
    same = again == tx and hash(again) == hash(tx) and repr(again) == repr(tx)
    assert same, _fail(case, f"pickled and loaded it is the same. It became {again!r}")


def _layout(case: _Case) -> None:
    state = init(case.pipe, case.params)
    expected = _skeleton(state)
    law = "structure, dtypes and shapes of the state depend on parameters and transforms alone. They changed "
    assert_trees_equal(_skeleton(case.run(state)), expected, _fail(case, law + "with an update."))
    other = init(case.pipe, random_like(case.params, seed=8))
    assert_trees_equal(_skeleton(other), expected, _fail(case, law + "with values of parameters."))
    if case.guests:
        return
    meta = init(case.pipe, tree_map(lambda x: None if x is None else x.to("meta"), case.params))
    assert_trees_equal(_skeleton(meta), expected, _fail(case, law + "on meta tensors."))
    for changed in _perturbed(case.pipe):
        found = _skeleton(init(changed, case.params))
        assert_trees_equal(found, expected, _fail(case, law + f"with a hyperparameter: {changed!r}"))


def _skeleton(tree: Tree) -> Tree:
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else type(x), tree)


def _perturbed(t: Transform) -> list[Transform]:
    """The transform with its positive float hyperparameters changed, one after the other."""
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


def _strides(case: _Case) -> None:
    def transposed(state: State, i: int) -> Tree:
        def other_strides(x: Any) -> Any:
            return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x

        return tree_map(other_strides, case.grads(state, i))

    state = init(case.pipe, case.params)
    law = "strides of a gradient do not matter."
    # A sum over a leaf is made in the order of memory.
    ulps = 0 if case.tx.needs == "element" else 8
    assert_trees_close(case.run(state, transposed), case.run(state), ulps, floor=1.0, what=_fail(case, law))


def _missing(case: _Case) -> None:
    """A leaf whose gradient never comes keeps its value; weight decay and momentum do not move it either."""
    if case.guests:
        return
    state = init(case.pipe, case.params)
    path = next(leaf.path for leaf in state.layout.leaves if leaf.numel)

    def without(s: State, i: int) -> Tree:
        return s.layout.join({p: g for p, g in make_layout(case.grads(s, i))[1].items() if p != path})

    if len(state.leaves) > 1:
        left = case.run(state, without).leaves[path]
        assert_trees_equal(left, state.leaves[path], _fail(case, f"a leaf without a gradient ({path}) is left alone."))


def _one_leaf(case: _Case) -> None:
    if not all(_leafwise(t) for t in _inner(case.tx) if not t.parts):
        return
    whole = case.run(init(case.pipe, case.params))
    layout = init(case.pipe, case.params).layout
    for leaf in layout.leaves:
        alone = layout.join({leaf.path: make_layout(case.params)[1][leaf.path]})

        def grads(s: State, i: int, path: str = leaf.path) -> Tree:
            return layout.join({path: make_layout(case.grads(whole, i))[1][path]})

        got = case.run(init(case.pipe, alone), grads).leaves[leaf.path]
        law = f"one leaf alone ({leaf.path}) is that leaf in a bigger tree, for leafwise transforms."
        assert_trees_equal(got, whole.leaves[leaf.path], _fail(case, law))


def _leafwise(t: Transform) -> bool:
    return t.scope is Scope.LEAF and not t.facts.adds


def _donate(case: _Case) -> None:
    states = []
    for donate in (False, True):
        step = make_step(_loss, case.pipe, donate=donate)
        state = init(case.pipe, case.params)
        for i in range(case.steps):
            state, _ = step(state, random_like(case.params, seed=i), **case.weight)
        states.append(state)
    assert_trees_equal(states[1], states[0], _fail(case, "donate=True gives the bits of donate=False."))


def _ensemble(case: _Case) -> None:
    if case.guests:
        return
    step = make_step(_loss, case.pipe)
    seeds = (1, 2)
    states = [init(case.pipe, random_like(case.params, seed=s)) for s in seeds]
    together = _stack(states)
    for i in range(case.steps):
        batches = [random_like(case.params, seed=10 * s + i) for s in seeds]
        states = [step(s, b, **case.weight)[0] for s, b in zip(states, batches, strict=True)]
        # A dict by path crosses into torch.func, whose tree library knows no class registered with optree.
        rows = torch.vmap(lambda s, leaves: step(s, s.layout.join(leaves), **case.weight)[0])
        together = rows(together, _stack([make_layout(b)[1] for b in batches]))
    law = "vmap over stacked states is a loop over states."
    # Fused kernels and the formula that vmap runs round differently, once or twice an update; an ulp in fp32
    # may move a rounding to 16 bits by one unit there.
    assert_trees_close(together, _stack(states), ulps=32, floor=1.0, what=_fail(case, law))


def _stack(trees: list[Tree]) -> Tree:
    return tree_map(lambda *xs: torch.stack(xs), *trees)


def _held(case: _Case) -> None:
    law = "a held or skipped step changes nothing but its own counters. "
    keepers = {t.name for t in case.pipe.members if t.facts.holds}
    state = init(case.pipe, case.params)
    for i in range(case.steps):
        new, metrics = update(case.pipe, case.grads(state, i), state, **case.weight)
        if not metrics["updated"]:
            _assert_untouched(case, state, new, keepers | case.scaling, law + "A held one changed:")
        state = new
    if case.scaling:
        for value in (torch.nan, torch.inf, -torch.inf):
            grads = tree_map(lambda g, v=value: None if g is None else torch.full_like(g, v), case.grads(state, 0))
            new, _ = update(case.pipe, grads, state, **case.weight)
            _assert_untouched(case, state, new, case.scaling, law + f"One of {value} changed:")


def _assert_untouched(case: _Case, old: State, new: State, own: set[str], law: str) -> None:
    def rest(s: State) -> Tree:
        return s.leaves, s.step, {k: v for k, v in s.transforms.items() if k not in own}

    assert_trees_equal(rest(new), rest(old), _fail(case, law))


def _cut_anywhere(case: _Case, ulps: float = 2.0) -> None:
    def check(subject: Transform, pipe: Transform, by_rows: bool = False) -> None:
        # Small and large gradients, in case something is done to those above a threshold only.
        for ranks, size in ((2, 1.0), (3, 30.0), (4, 1e-3)):
            layout, leaves = make_layout(case.params)
            grads = [random_like(leaves, seed=100 * ranks + i) for i in range(case.steps)]
            grads = [{path: g * size for path, g in given.items()} for given in grads]
            bound = None if ulps == 0 else (ulps * case.steps, max(1.0, 4 * size))
            cut = draw_cut(layout, ranks, seed=ranks, by_rows=by_rows)
            check_cut(subject, pipe, case.params, grads, case.weight, cut, partial(_difference, bound=bound))

    for subject, pipe in fit_for_pieces(case.tx):
        try:
            check(subject, pipe)
        except AssertionError:
            # Name the one that lies, if it does so alone.
            for member, alone in singly(subject):
                check(member, alone)
            raise
    for subject, pipe in fit_for_rows(case.tx, make_layout(case.params)[0]):
        check(subject, pipe, by_rows=True)


def _stations(case: _Case) -> None:
    check_places(case.tx, case.params, ranks=3)
    leaves = make_layout(case.params)[1]
    check_dtypes(case.pipe, case.params, [random_like(leaves, seed=100 + i) for i in range(case.steps)], case.weight)


LAWS = (_purity, _identity, _layout, _strides, _missing, _one_leaf, _donate, _ensemble, _held, _cut_anywhere, _stations)
