"""A pipeline over shards, run in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import bad_leaves
from ..core.chain import chain
from ..core.facts import OF_PIECES
from ..core.layout import Layout, Leaf, Leaves, make_layout
from ..core.pipeline import Pipeline, first_state, largest_of, pipeline, wanted_by
from ..core.spec import as_it_is
from ..core.state import State
from ..core.state_entries import entries
from ..core.survey import effect
from ..core.transform import Transform
from ..core.tree import Tree, flatten
from ..core.update import apply
from ..core.view import no_view, over_ranks
from ..core.wires import Sharding
from ..pure.api import update
from ..ranks.group import Group
from ..transforms.sgd import sgd
from .trees import random_like

# ----------------------------------------------------------------------------------------------------------------------
# Every law of `check_transform` gets a `Case`: a transform, the pipeline in which it is checked, and parameters.


@dataclass(frozen=True)
class Case:
    """A transform, the pipeline it stands in, and parameters."""

    tx: Transform
    pipe: Transform
    params: Tree

    @property
    def steps(self) -> int:
        """As many micro-steps as close the accumulation window twice and open it a third time."""
        return 2 * math.prod(t.facts.window for t in self.pipe.members) + 1

    @property
    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of a step: a weight, and the numbers that transforms want."""
        return {**self.weight, **self.of_context["given"]}

    @property
    def weight(self) -> dict[str, Any]:
        return {"weight": 2.0} if any(t.facts.weighted for t in self.pipe.members) else {}

    @property
    def of_context(self) -> dict[str, Any]:
        """The same for a context."""
        most = {name: torch.full(shape, 2.0) for name, shape in largest_of(self.pipe.members).items()}
        return {**self.weight, "given": {**dict.fromkeys(wanted_by(self.pipe.members), 2.0), **most}}

    @property
    def has_guests(self) -> bool:
        """Whether one of the transforms is another library's."""
        return any(t.facts.adds for t in innermost(self.pipe))

    @property
    def scaling(self) -> set[str]:
        """The names of transforms that unscale gradients: they count skipped steps."""
        return {t.name for t in self.pipe.members if effect(t).unscaled_by}

    def grads(self, state: State, seed: int) -> Tree:
        """A gradient for each leaf; for a tied leaf at its first place only."""
        return state.layout.join_once(random_like(state.leaves, seed=100 + seed))

    def run(self, state: State, grads: Callable[[State, int], Tree] | None = None, steps: int = 0) -> State:
        for i in range(steps or self.steps):
            state, _ = update(self.pipe, (grads or self.grads)(state, i), state, **self.numbers)
        return state

    def broken(self, law: str) -> str:
        """The message of an error: this transform, and the law that it breaks."""
        return f"{self.tx!r}: {law}"


def inner(t: Transform) -> list[Transform]:
    """The transform and everything nested in it."""
    return [t, *(x for part in t.parts for x in inner(part))]


def innermost(t: Transform) -> list[Transform]:
    """The transforms in `inner(t)` that contain no others."""
    return [x for x in inner(t) if not x.parts]


def loss(params: Tree, data: Tree) -> Tensor:
    """A loss whose gradient depends on data and parameters, and is zero in no leaf."""
    pairs = zip(flatten(params)[0], flatten(data)[0], strict=True)
    terms = [(p.float() * d.float() + 0.1 * p.float() ** 2).sum() for p, d in pairs if p is not None]
    return torch.stack(terms).sum()


class AsModel(nn.Module):
    """A model whose parameters have these paths; its output is `loss` of them and of data by path."""

    def __init__(self, leaves: Leaves):
        super().__init__()
        self.paths = list(leaves)
        for path, x in leaves.items():
            *above, name = path.split(".")
            module: nn.Module = self
            for key in above:
                if key not in module._modules:
                    module.add_module(key, nn.Module())
                module = module.get_submodule(key)
            module.register_parameter(name, nn.Parameter(x.detach().clone()))

    def forward(self, data: Leaves) -> Tensor:
        # Not `get_parameter`: what a view casts is a plain tensor in forward.
        params = {path: attrgetter(path)(self) for path in self.paths}
        return loss(params, {path: data[path] for path in self.paths})


def completed(tx: Transform) -> Transform:
    """The pipeline with an optimizer: if it has none, `sgd` at its end, or before transforms that watch parameters."""
    parts = tx.members
    if any(t.facts.optimizes for t in parts):
        return tx
    at = next((i for i, t in enumerate(parts) if t.facts.watches), len(parts))
    return chain(*parts[:at], sgd(0.1), *parts[at:])


# ----------------------------------------------------------------------------------------------------------------------
# Run a pipeline over shards of leaves in one process: what each rank would compute, without ranks.
#
# Numbers of the whole tree (a norm, an overflow) are recorded in the run over full leaves. In the runs over shards they
# replace reductions over ranks, so that no sum is made in another order.


# By path, the flat range of a leaf that a rank holds.
Spans = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Pieces(Sharding):
    """A sharding that cuts where it is told, and communicates with nobody.

    Attributes:
        spans: of this rank.
    """

    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def span(self, leaf: Leaf) -> tuple[int, int]:
        return self.spans[leaf.path]


class RecordedNumbers:
    """A reduction over ranks that run one after the other.

    Attributes:
        given: the argument of each call, with its name.
        answers: the result of each call: what was `given` in the run over full leaves; `None` in that run itself.
    """

    def __init__(self, answers: Sequence[tuple[str, Tensor]] | None = None):
        self.given: list[tuple[str, Tensor]] = []
        self.answers = answers

    def sum(self, x: Tensor) -> Tensor:
        return self._ask("sum", x)

    def total(self, number: Callable[[Leaves], Any], leaves: Leaves) -> Tensor:
        return self.sum(torch.as_tensor(number(leaves)))

    def mean(self, x: Tensor) -> Tensor:
        return self._ask("mean", x)

    def max(self, x: Tensor) -> Tensor:
        return self._ask("max", x)

    def replicate(self, x: Tensor) -> Tensor:
        return x

    def alike(self, x: Tensor) -> Tensor:
        return x

    def _ask(self, kind: str, x: Tensor) -> Tensor:
        self.given.append((kind, x.clone()))
        if self.answers is None:
            return x
        i = len(self.given) - 1
        asked = self.answers[i][0] if i < len(self.answers) else "nothing"
        if asked != kind:
            raise ValueError(f"number {i} that ranks exchange is a {kind} on pieces, and {asked} on whole leaves")
        return self.answers[i][1].clone()


@dataclass(frozen=True)
class Run:
    """Some micro-steps.

    Attributes:
        states: the state after each of them.
        numbers: the numbers that were reduced over ranks.
    """

    states: list[State]
    numbers: RecordedNumbers


def draw_cut(layout: Layout, ranks: int, seed: int, by_rows: bool = False) -> list[Spans]:
    """Draw a flat range of every leaf for each rank: uneven ranges, empty ranges, a whole leaf on one rank.

    Args:
        layout: the layout of the parameters.
        ranks: how many.
        seed: of the draw.
        by_rows: whether to cut only between rows of the first dimension.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Spans] = [{} for _ in range(ranks)]
    for leaf in layout.leaves:
        row = leaf.shape[1:].numel() if by_rows else 1
        places = leaf.numel // row + 1 if row else 1
        inner = (torch.randint(0, places, (ranks - 1,), generator=generator).sort().values * row).tolist()
        for spans, low, high in zip(found, [0, *inner], [*inner, leaf.numel], strict=True):
            spans[leaf.path] = low, high
    return found


def run_pieces(
    tx: Transform,
    params: Tree,
    gradients: Sequence[Leaves],
    step_options: Mapping[str, Any],
    piece: tuple[int, Sequence[Spans]] | None = None,
    whole: Run | None = None,
) -> Run:
    """Micro-steps over full leaves, or over one rank's pieces of them.

    Args:
        tx: with an optimizer. Its own layout over ranks is left out.
        params: full.
        gradients: full, for each micro-step.
        step_options: of the context.
        piece: the rank and the cut.
        whole: the run over full leaves, for its numbers.
    """
    parts = [p for p in tx.members if not effect(p).over_ranks]
    if piece is not None:
        rank, cut = piece
        stage = Pieces(Group(rank, len(cut), tuple(range(len(cut)))), spans=cut[rank])
        # Its name has a dot, which the name of a user's transform cannot have.
        view = over_ranks(stage, resident=False)
        parts.insert(0, Transform(".pieces", needs="element", view_fn=lambda *_: view, through=as_it_is))
    layout, tensors = make_layout(params)
    pipe = pipeline(chain(*parts), layout, "check_transform")
    state = start(pipe, tensors)
    numbers = RecordedNumbers(None if whole is None else whole.numbers.given)
    states = []
    for grads in gradients:
        mine = {leaf.path: _shard_of(pipe, grads[leaf.path], leaf) for leaf in layout.leaves}
        context = replace(pipe.context(micro_step=state.micro_step, **step_options), reduction=numbers)
        state, _ = apply(pipe, mine, state, context)
        states.append(state)
    return Run(states, numbers)


def start(pipe: Pipeline, tensors: Leaves) -> State:
    """The first state of a pipeline, from copies of the parameters."""
    stored = {leaf.path: pipe.road.store(tensors[leaf.path], leaf).clone() for leaf in pipe.layout.leaves}
    return first_state(pipe, stored)


def _shard_of(pipe: Pipeline, grad: Tensor, leaf: Leaf) -> Tensor:
    grad = grad.to(pipe.dtypes.gradient(leaf))
    return (grad if pipe.sharding is None else pipe.sharding.store(grad, leaf)).clone()


def compared(whole: State, part: State, spans: Spans) -> Iterator[tuple[str, Any, Any]]:
    """Entries of a rank's state as (name, actual, expected); the name shows the range if the entry is cut.

    An entry that is not a tensor of a leaf is compared only if its shape is the same in both states.
    """
    theirs = {(e.owner, e.slot, e.path, e.below): e for e in entries(part) if e.owner != ".pieces"}
    for e in entries(whole):
        mine = theirs.pop((e.owner, e.slot, e.path, e.below), None)
        name = f"{e.key}[{spans[e.path][0]}:{spans[e.path][1]}]" if e.path in spans and e.of_leaf else e.key
        if mine is None:
            yield name, "missing", e.value
        elif not (isinstance(e.value, Tensor) and isinstance(mine.value, Tensor)):
            yield name, mine.value, e.value
        elif e.of_leaf:
            # An entry of a wrong shape is not cut, so that the message shows its shape.
            cut = mine.offset is not None and tuple(e.value.shape) == mine.shape
            yield name, mine.value, mine.part(e.value) if cut else e.value
        elif mine.value.shape == e.value.shape:
            yield name, mine.value, e.value
    for key, mine in theirs.items():
        yield "/".join(key), mine.value, "nothing"


LAW = (
    "flat pieces of leaves are updated as whole leaves are, each element from the same element of gradient, parameter "
    "and state, and not from others, from its place, or from the shape of what is handed over."
)
LAW_OF_ROWS = (
    "some rows of a leaf are updated as they are in the whole, each row of the first dimension from the same row of "
    "gradient, parameter and state, and not from others or from its place."
)


def check_cut(
    subject: Transform,
    tx: Transform,
    params: Tree,
    gradients: Sequence[Leaves],
    step_options: Mapping[str, Any],
    cut: Sequence[Spans],
    difference: Callable[[Any, Any], str | None],
) -> None:
    """Raise an `AssertionError` if ranks with pieces of a cut compute something else than one rank with full leaves.

    Args:
        subject: the transform that the message names.
        tx: the pipeline it stands in.
        params: full.
        gradients: full, for each micro-step.
        step_options: of the context.
        cut: the ranges that each rank holds.
        difference: describes how two entries of a state differ, if they do.
    """
    law = f"{subject!r} says needs={subject.needs!r}: {LAW_OF_ROWS if subject.needs == 'row' else LAW} "
    whole = run_pieces(tx, params, gradients, step_options)
    pieces = []
    for rank, spans in enumerate(cut):
        try:
            pieces.append(run_pieces(tx, params, gradients, step_options, (rank, cut), whole))
        except Exception as error:
            raise AssertionError(f"{law}On pieces it raised {type(error).__name__}: {error}") from error
        for i, (mine, theirs) in enumerate(zip(pieces[-1].states, whole.states, strict=True), 1):
            rows = [(name, difference(a, e)) for name, a, e in compared(theirs, mine, spans)]
            if wrong := [(name, reason) for name, reason in rows if reason]:
                right = 'needs="leaf", or each element from its own elements alone'
                raise AssertionError(bad_leaves(f"{law}After micro-step {i}:", wrong, right))
    check_numbers(subject, whole, pieces)


def check_numbers(tx: Transform, whole: Run, pieces: list[Run]) -> None:
    """Check that reducing the ranks' numbers gives that of the run over full leaves, up to the order of the sum."""
    counts = {len(run.numbers.given) for run in (whole, *pieces)}
    assert len(counts) == 1, f"{tx!r}: every rank asks for the same numbers. On pieces they are {sorted(counts)}."
    for i, (kind, expected) in enumerate(whole.numbers.given):
        given = torch.stack([run.numbers.given[i][1].double() for run in pieces])
        found = {"sum": given.sum(0), "mean": given.mean(0), "max": given.amax(0)}[kind]
        law = f"{tx!r}: the {kind} over pieces is that over whole leaves, number {i}."
        torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=0, equal_nan=True, msg=law)


def fit_for_pieces(tx: Transform) -> list[tuple[Transform, Transform]]:
    """The transforms to check on flat pieces, each with its pipeline.

    All parts that may get pieces are one chain. If a part may not, each transform inside of it that may is checked.
    """
    parts = [p for p in tx.members if not effect(p).over_ranks]
    fit = [p for p in parts if p.needs in OF_PIECES]
    casts = [p for p in fit if effect(p).cast_by]
    inside = [x for p in parts if p.needs not in OF_PIECES for x in _fit_inside(p)]
    together = [(tx if len(fit) == len(tx.members) else chain(*fit), completed(chain(*fit)))] if fit else []
    return together + [(x, completed(chain(*casts, x))) for x in inside]


def fit_for_rows(tx: Transform) -> list[tuple[Transform, Transform]]:
    """The transforms to check on rows: each part with `needs="row"`, and its pipeline."""
    casts = [p for p in tx.members if effect(p).cast_by]
    of_rows = [p for p in tx.members if p.needs == "row" and not p.idle]
    # The view is left out: `check_views` checks it, and it never stands behind what cuts.
    return [(p, completed(chain(*casts, replace(p, view_fn=no_view)))) for p in of_rows]


def singly(tx: Transform) -> list[tuple[Transform, Transform]]:
    """Each part of a chain with a pipeline of its own; for a part that contains others, each of those."""
    casts = [p for p in tx.members if effect(p).cast_by]
    return [(x, completed(chain(*casts, x))) for p in tx.members if p not in casts for x in innermost(p)]


def _fit_inside(t: Transform) -> list[Transform]:
    return [t] if t.needs in OF_PIECES else [x for part in t.parts for x in _fit_inside(part)]
