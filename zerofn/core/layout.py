"""`Layout`: the structure of a parameter tree; `Leaf`: one parameter; `Placement`: how it lies over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .._compat.compiler import pytree, register_constant
from .._errors import bad_leaves, explain
from .parameter_checks import not_a_parameter
from .row_sharding import span
from .slot_forms import FormsOfSlots, SlotForm, by_owner
from .tensor_parallel_leaves import Within
from .tree import Tree, flatten, flatten_up_to, tree_codes, tree_paths, unflatten
from .wrapper_names import unwrapped_names

Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Leaf:
    """One parameter, without its values.

    Attributes:
        path: its place in the tree, for instance ``"blocks.0.weight"``.
        shape: its global shape; of a leaf that the model itself has cut, that of this rank's part.
        dtype: the dtype it was given in.
        device: the type of device it was given on, for instance ``"cpu"``.
        trainable: whether a gradient is wanted.
        within: where it lies in a tensor that the model itself has cut (tensor parallelism).
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    device: str
    trainable: bool = True
    within: Within | None = None

    @property
    def numel(self) -> int:
        """Global number of elements."""
        return self.shape.numel()


@dataclass(frozen=True)
class Placement:
    """How stored leaves lie over ranks: whole on each, or cut by rows into consecutive ranges.

    Attributes:
        rank: this rank's number among those that share a leaf.
        size: how many ranks share a leaf.
        together: how many ranks hold the state, replicas included.
        axes: the ranks along each axis of the mesh.
        apart: transforms whose state has sums of gradients that are not reduced yet, and differ between ranks.
        copies: how many such sums there are, one for each rank that the reduction is over.
        copy: which of them this rank has.
        unreduced: how each such sum lies over ranks; whole, by default.
        later: names of views that change gradients, through which these sums go once they are reduced.
        ranges: by path, this rank's range of flattened leaves that are cut in another way than `span` says.
        owners: for each transform that updates whole leaves its name in the chain, the prefix of their slots in its
            state, and by path the rank that updates the leaf, counted among those that share it.
        slots: what transforms keep of leaves, where leaves are cut.
        seen_by: names of the views of one's own through which the model sees what is stored.
    """

    rank: int = 0
    size: int = 1
    together: int = 1
    # Not compared: it says where leaves lie and not how, and a plan, which is made without ranks, has none.
    axes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    apart: tuple[str, ...] = ()
    copies: int = 1
    copy: int = 0
    unreduced: Placement | None = None
    later: tuple[str, ...] = ()
    ranges: tuple[tuple[str, tuple[int, int]], ...] = ()
    owners: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = ()
    slots: tuple[SlotForm, ...] = ()
    seen_by: tuple[str, ...] = ()

    def of(self, owner: str) -> Placement:
        """How the state of the transform of this name lies over ranks."""
        return (self.unreduced or Placement()) if owner in self.apart else self

    def owners_of(self, owner: str, slot: str) -> tuple[str, dict[str, int]] | None:
        """Of a slot of whole leaves, the prefix of such slots in the transform's state, and by path each leaf's owner.

        `None` where the slot is of shards.
        """
        found = [(where, ranks) for name, where, ranks in self.owners if name == owner and slot.startswith(where)]
        where, ranks = max(found, key=lambda x: len(x[0]), default=("", None))
        return None if ranks is None else (where, dict(ranks))

    def forms_of(self, owner: str) -> FormsOfSlots:
        """The forms of what the transform of this name keeps of leaves."""
        return self._forms.get(owner, {})

    @cached_property
    def _forms(self) -> dict[str, FormsOfSlots]:
        return by_owner(self.slots)

    def range_of(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's range of a flattened leaf."""
        return self._ranges.get(leaf.path) or self.span(leaf.shape)

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        return dict(self.ranges)

    def span(self, shape: torch.Size) -> tuple[int, int]:
        """This rank's range of a flattened leaf of that shape; the last ranks' may be short, or empty.

        >>> [Placement(rank, 4).span(torch.Size([10])) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        """
        return span(shape, self.rank, self.size)


@dataclass(frozen=True)
class Layout:
    """The structure of a parameter tree, without its values: hashable, comparable, picklable.

    Attributes:
        leaves: each distinct tensor once, in the order of the tree.
        places: for every position of the tree, the index into `leaves`, or -1 for `None`.
        paths: for every position, its path; tied tensors have several.
        placement: how what is stored lies over ranks.
        wrapped: for every position, its name in a model whose modules are wrapped; empty where none is.
        at: for every position, the path of its leaf, or `None`.
        trainable: the leaves that want a gradient.
        trained: their paths.
        every: the paths of all leaves.
        numbered: the tree with the number of each position in its place, for a compiler.
        readable: whether torch's own library of trees knows the containers.
    """

    leaves: tuple[Leaf, ...]
    places: tuple[int, ...]
    paths: tuple[str, ...]
    spec: Any = field(repr=False)
    placement: Placement = Placement()
    # Not compared: a state is the same however its model was wrapped.
    wrapped: tuple[str, ...] = field(default=(), repr=False, compare=False)
    numbered: Any = field(init=False, repr=False, compare=False)
    readable: bool = field(init=False, repr=False, compare=False)
    at: tuple[str | None, ...] = field(init=False, repr=False, compare=False)
    trainable: tuple[Leaf, ...] = field(init=False, repr=False, compare=False)
    trained: tuple[str, ...] = field(init=False, repr=False, compare=False)
    every: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple([None if i < 0 else self.leaves[i].path for i in self.places]))
        object.__setattr__(self, "trainable", tuple([leaf for leaf in self.leaves if leaf.trainable]))
        object.__setattr__(self, "trained", tuple([leaf.path for leaf in self.trainable]))
        object.__setattr__(self, "every", frozenset([leaf.path for leaf in self.leaves]))
        object.__setattr__(self, "numbered", unflatten(self.spec, list(range(len(self.places)))))
        object.__setattr__(self, "readable", set(map(type, pytree.tree_leaves(self.numbered))) <= {int})

    def join(self, leaves: Mapping[str, Any]) -> Tree:
        """The tree with `leaves[path]` at its place, a tied tensor at each of its places."""
        flat = list(map(leaves.get, self.at))  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            return pytree.tree_map(lambda i: flat[i], self.numbered)
        return unflatten(self.spec, flat)

    def join_once(self, leaves: Mapping[str, Any]) -> Tree:
        """As `join`, with `None` at all places of a tied tensor but the first, so that a sum counts it once."""
        first: set[int] = set()
        flat = []
        for i in self.places:
            flat.append(None if i < 0 or i in first else leaves.get(self.leaves[i].path))
            first.add(i)
        return unflatten(self.spec, flat)

    def tied(self, leaf: Leaf) -> bool:
        """Whether the leaf is at several places of the tree."""
        return len(self.places) > len(self.leaves) and self.places.count(self.leaves.index(leaf)) > 1

    def match(self, tree: Tree, what: str, right: str) -> list[tuple[int, str, Any]]:
        """The entries of `tree` at the positions of this layout: (index of leaf, path, entry)."""
        try:
            entries = flatten_up_to(self.spec, tree)
        except (ValueError, TypeError) as error:
            raise ValueError(_structure_message(self, tree, what, right)) from error
        return [(i, p, e) for i, p, e in zip(self.places, self.paths, entries, strict=True) if i >= 0]

    def split(self, tree: Tree) -> Leaves:
        """Path to tensor for a tree of parameters; of a tied tensor the first place counts."""
        found: Leaves = {}
        for i, _, entry in self.match(tree, "these are not the parameters of this state", "state.params"):
            found.setdefault(self.leaves[i].path, entry)
        return found

    def only(self, paths: Set[str]) -> Layout:
        """The layout of the leaves of these paths: what is inside of a group is not asked of leaves of others."""
        if paths >= self.every:
            return self
        leaves = tuple([leaf for leaf in self.leaves if leaf.path in paths])
        numbers: dict[str | None, int] = {leaf.path: i for i, leaf in enumerate(leaves)}
        return replace(self, leaves=leaves, places=tuple([numbers.get(path, -1) for path in self.at]))

    def map_places(self, fn: Callable[[Leaf, Tensor], Tensor], tree: Tree) -> Tree:
        """`fn(leaf, tensor)` at every position by itself: to torch.func tied places are separate variables."""
        entries = self.match(tree, "these are not the stored parameters of this state", "state.params")
        done = iter([fn(self.leaves[i], entry) for i, _, entry in entries])
        return unflatten(self.spec, [None if i < 0 else next(done) for i in self.places])


register_constant(Layout)


def _structure_message(layout: Layout, tree: Tree, what: str, right: str) -> str:
    """A message that names missing and extra leaves; or the kind of container, where the leaves agree."""
    given = set(tree_paths(tree))
    expected = {p for i, p in zip(layout.places, layout.paths, strict=True) if i >= 0}
    rows = [(p, "missing") for p in sorted(expected - given)] + [(p, "extra") for p in sorted(given - expected)]
    if not rows:
        kind = f"same leaves in another kind of container: {flatten(tree)[1]}"
        rows = [("", f"{kind} instead of {layout.spec}")]
    return bad_leaves(f"wrong structure: {what}", rows, right)


def prefix_values(
    prefix: Tree, layout: Layout, what: str, is_value: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """By path of each place: a tree of values (a mask, labels) that may stop above the leaves of `layout`.

    `is_value` says of a node of `prefix` whether it is a value, such as a label that is a tuple.
    """
    found: dict[str, Any] = {}
    if isinstance(prefix, Mapping):
        # Names of a wrapped model are taken as well.
        new = {
            given: path
            for path, given in unwrapped_names([k for k in prefix if isinstance(k, str)], layout.paths).items()
        }
        prefix = type(prefix)((new.get(k, k), x) for k, x in prefix.items()) if new else prefix  # type: ignore[call-arg]
    try:
        values, spec = flatten(prefix, is_value)
        for value, below in zip(values, flatten_up_to(spec, layout.numbered), strict=True):
            for position in flatten(below)[0]:
                if layout.places[position] >= 0:
                    found[layout.paths[position]] = value
    except (ValueError, TypeError) as error:
        raise ValueError(
            _structure_message(layout, prefix, what, "a tree of the parameters' structure, or a function of the path")
        ) from error
    return found


def make_layout(
    params: Tree,
    trainable: Callable[[str], bool] = lambda path: True,
    within: Mapping[str, Within] | None = None,
    wrapped: Mapping[str, str] | None = None,
) -> tuple[Layout, Leaves]:
    """The layout of a tree of parameters and its tensors by path.

    Args:
        params: the tree.
        trainable: whether the leaf of a path wants a gradient.
        within: by path, where leaves lie in tensors that the model itself has cut.
        wrapped: by path, names in a model whose modules are wrapped, where these differ.

    Raises:
        TypeError: a leaf is no floating-point tensor; every such leaf is named.
        ValueError: the tree has no leaf, or two leaves have the same path.
    """
    entries, spec = flatten(params)
    paths = tree_paths(params)
    wrong = [(p, reason) for p, e in zip(paths, entries, strict=True) if (reason := not_a_parameter(e))]
    if wrong:
        raise TypeError(
            bad_leaves("not every leaf is a parameter", wrong, "a tree whose leaves are floating-point tensors")
        )
    first: dict[int, int] = {}
    leaves: list[Leaf] = []
    tensors: Leaves = {}
    places = []
    for path, tensor in zip(paths, entries, strict=True):
        if tensor is None:
            places.append(-1)
        elif id(tensor) in first:
            places.append(first[id(tensor)])
        else:
            if path in tensors:
                raise ValueError(_same_path(params, paths, path))
            first[id(tensor)] = len(leaves)
            places.append(len(leaves))
            of = None if within is None else within.get(path)
            leaves.append(Leaf(path, tensor.shape, tensor.dtype, tensor.device.type, trainable(path), of))
            tensors[path] = tensor
    names = tuple([wrapped.get(path, path) for path in paths]) if wrapped else ()
    return canonical(Layout(tuple(leaves), tuple(places), tuple(paths), spec, wrapped=names)), tensors


def canonical(layout: Layout) -> Layout:
    """One object for all equal layouts: a compiled step recognises a state by it, and makes no further graph."""
    # Placements over other ranks compare equal, since `axes` is not compared, and still save other shards.
    return _first_of(layout, layout.placement.axes, layout.wrapped)


_first_of = lru_cache(maxsize=256)(lambda layout, *_: layout)


def _same_path(params: Tree, paths: list[str], path: str) -> str:
    places = [code for code, p in zip(tree_codes(params), paths, strict=True) if p == path]
    return explain(
        f"several leaves have the path {path!r}: {', '.join(places)}",
        "a path is the text of the keys with dots between them, and it names a leaf in checkpoints and messages; keys "
        "of one text (1 and '1'), or a key that holds a dot, can give one path twice",
        "other keys, so that all paths differ, for instance {'a': ..., 'b': ...}",
    )
