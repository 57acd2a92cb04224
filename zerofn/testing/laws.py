"""The laws that every transform obeys, as one check."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.chain import as_transform, chain
from ..core.facts import Scope
from ..core.layout import make_layout
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, clone, flatten, tree_map
from ..eager.attach import attach
from ..pure.api import update
from ..pure.states import init
from ..pure.step import make_step
from .case import AsModel, Case, completed, inner, innermost, loss
from .cutting import check_cut, draw_cut, fit_for_pieces, fit_for_rows, singly
from .facts import check_facts
from .stations import check_dtypes, check_places
from .trees import assert_trees_close, assert_trees_equal, difference, random_like, sample_params
from .views import check_views


def check_transform(tx: Any, params: Tree = None) -> None:
    """Put a transform, or a pipeline, through the laws every transform obeys.

    A part of a pipeline is completed by `sgd`. Checked are: it prints, compares and pickles; `init`
    takes meta tensors; the layout of the state depends on neither values nor hyperparameters nor the
    number of updates; inputs are not written; strides of gradients do not matter; a leaf without a gradient
    is left alone; one leaf alone is that leaf in a bigger tree (leafwise transforms); `donate=True` gives the
    bits of `donate=False`, in metrics too; what stands behind the optimizer is handed the same old and new parameters
    in an attached model as in a step; `vmap` over stacked states is a loop over states; a held or skipped
    step changes nothing but its own counters; a transform that says `needs="element"`, or needs one number of the
    tree, gives on flat pieces of leaves, cut anywhere, what it gives on whole leaves, and one that needs rows gives it
    on some of the rows; gradients behind it have the dtype and the place that its `through` and its view say; it does
    what its `Facts` say: holds so many micro-steps, gives parameters, shows its metrics, uses what is set. A view
    without a wire writes none of its arguments, is the identity after its `store`, has its transpose for `pull` where
    it is linear, gives on pieces what it gives on whole leaves where it says so, and talks to no other rank. A guest
    of another library is not asked for `vmap`, meta tensors, missing gradients or pickling.

    Pieces are compared with wholes within two units in the last place of a number as large as the gradients, for each
    step: some of torch's kernels (fused Adam, `add` with `alpha` in 16 bits, `sigmoid`, `pow`) round the last
    elements of a tensor otherwise than those before.

    Args:
        tx: what a chain accepts.
        params: a tree to check it on; by default `sample_params()`.

    Raises:
        AssertionError: names the transform, the law, and every leaf that breaks it.
        ValueError, TypeError: it does what every step refuses, such as to leave out a leaf, or `zf.init`.

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
    case = Case(tx, completed(tx), sample_params() if params is None else params)
    for law in LAWS:
        law(case)


def _purity(case: Case) -> None:
    law = "an update writes none of its inputs. "
    params = clone(case.params)
    state = init(case.pipe, params)
    assert_trees_equal(params, case.params, case.broken("`init` writes none of its inputs."))
    for i in range(case.steps):
        grads, before = case.grads(state, i), clone(state)
        given = clone(grads)
        new, _ = update(case.pipe, grads, state, **case.weight)
        assert_trees_equal(grads, given, case.broken(law + "The gradients were written."))
        assert_trees_equal(state, before, case.broken(law + "The state was written."))
        state = new
    moved = any(not torch.equal(state.leaves[p], x) for p, x in init(case.pipe, case.params).leaves.items())
    law = f"after {case.steps} micro-steps some parameter has changed. None has, so nothing is tested."
    assert moved, case.broken(law)


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
    # By leaf, so that tied parameters stay tied.
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


def _strides(case: Case) -> None:
    def transposed(state: State, i: int) -> Tree:
        def other_strides(x: Any) -> Any:
            return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x

        return tree_map(other_strides, case.grads(state, i))

    state = init(case.pipe, case.params)
    law = "strides of a gradient do not matter."
    # A sum over a leaf is made in the order of memory.
    ulps = 0 if case.tx.needs == "element" else 8
    assert_trees_close(case.run(state, transposed), case.run(state), ulps, floor=1.0, what=case.broken(law))


def _missing(case: Case) -> None:
    """A leaf whose gradient never comes keeps its value; weight decay and momentum do not move it either."""
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
            state, metrics = step(state, random_like(case.params, seed=i), **case.weight)
            shown.append(metrics)
        states.append(state)
    law = "donate=True gives the bits of donate=False."
    assert_trees_equal(states[1], states[0], case.broken(law))
    for pure, donated in zip(shown[: case.steps], shown[case.steps :], strict=True):
        assert_trees_equal(donated, pure, case.broken(f"{law} Metrics differ:"))


def _attached(case: Case) -> None:
    """Behind the optimizer a transform is handed the parameters before and after the update, in every route."""
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
        opt.step(**case.weight)
        opt.zero_grad()
        state, metrics = step(state, data, **case.weight)
        # Leaf by leaf, as the trees of parameters have other containers.
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
    if not all([isinstance(x, Tensor) for x in flatten(states[0])[0]]):
        # Neither `None` nor a count in Python has a row for each member.
        return
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
    assert_trees_close(together, _stack(states), ulps=32, floor=1.0, what=case.broken(law))


def _stack(trees: list[Tree]) -> Tree:
    return tree_map(lambda *xs: torch.stack(xs), *trees)


def _held(case: Case) -> None:
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


def _assert_untouched(case: Case, old: State, new: State, own: set[str], law: str) -> None:
    def rest(s: State) -> Tree:
        return s.leaves, s.step, {k: v for k, v in s.transforms.items() if k not in own}

    assert_trees_equal(rest(new), rest(old), case.broken(law))


def _cut_anywhere(case: Case, ulps: float = 2.0) -> None:
    def check(subject: Transform, pipe: Transform, by_rows: bool = False) -> None:
        # Small and large gradients, in case something is done to those above a threshold only.
        for ranks, size in ((2, 1.0), (3, 30.0), (4, 1e-3)):
            layout, leaves = make_layout(case.params)
            grads = [random_like(leaves, seed=100 * ranks + i) for i in range(case.steps)]
            grads = [{path: g * size for path, g in given.items()} for given in grads]
            bound = None if ulps == 0 else (ulps * case.steps, max(1.0, 4 * size))
            cut = draw_cut(layout, ranks, seed=ranks, by_rows=by_rows)
            check_cut(subject, pipe, case.params, grads, case.weight, cut, partial(difference, bound=bound))

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


def _stations(case: Case) -> None:
    check_places(case.tx, case.params, ranks=3)
    leaves = make_layout(case.params)[1]
    check_dtypes(case.pipe, case.params, [random_like(leaves, seed=100 + i) for i in range(case.steps)], case.weight)


def _facts(case: Case) -> None:
    state = init(case.pipe, case.params)
    for member in case.tx.members:
        if not any(t.facts.adds for t in inner(member)):
            check_facts(member, state)


def _views(case: Case) -> None:
    # What does not fit its leaves is refused here, with words of its own.
    init(case.pipe, clone(case.params))
    check_views(case.tx, case.params)


LAWS = (
    *(_views, _purity, _identity, _layout, _facts, _strides, _missing, _one_leaf, _donate, _attached, _ensemble),
    *(_held, _cut_anywhere, _stations),
)
