"""Trees of tensors: paths, ties and strict matching. The only module that imports optree.

optree sorts dict keys and torch's own tree library does not, so no list of leaves ever crosses
from one to the other: everything inside zerofn is a `dict` from path to tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._compat import memories, pytree, register_constant
from .._errors import bad_leaves, explain
from ..ranks.distributed_tensors import is_distributed
from .rows import span
from .within import Within

# A class registered under this optree namespace, or globally, is a node of a parameter tree.
NAMESPACE = "zerofn"
DISTRIBUTED = "a DTensor, which a model has and no tree: zf.attach(model, tx), or p.to_local() of each"

# The structure of a tree that is one leaf.
ONE_LEAF = optree.treespec_leaf(none_is_leaf=True, namespace=NAMESPACE)

_REQUIRES_GRAD = attrgetter("requires_grad")

Tree = Any
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Leaf:
    """What is known of one parameter wherever it lives.

    Attributes:
        path: its place in the tree, for instance ``"blocks.0.weight"``.
        shape: its global shape; of a leaf that the model itself has cut, that of the part.
        dtype: the dtype it was given in.
        device: the type of device it was given on, for instance ``"cpu"``.
        trainable: whether a gradient is wanted.
        within: where it lies in a tensor of the model's that is cut over other ranks than those of a chain.
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
        rank: this rank among those that share a leaf.
        size: how many those are.
        together: how many ranks hold this state between them, replicas among them.
        axes: the ranks along each axis that they lie on.
        apart: transforms whose state is of gradients that are not yet reduced: sums, of which there are several.
        copies: how many, one for each rank that the reduction is over.
        copy: which of them this rank has.
        unreduced: how each of them lies over ranks; whole, by default.
        later: the views that change gradients, by name, which those sums have yet to come through once reduced.
        owners: of transforms that update whole leaves: the name in the chain, where in the state under that name theirs
            is, and by path who updates the leaf, one of those that share it.
        ranges: by path, this rank's flat range of leaves that are cut in another way than `span` says.
    """

    rank: int = 0
    size: int = 1
    together: int = 1
    # Where they lie and not how: a plan, made without ranks, has none.
    axes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    apart: tuple[str, ...] = ()
    copies: int = 1
    copy: int = 0
    unreduced: Placement | None = None
    later: tuple[str, ...] = ()
    ranges: tuple[tuple[str, tuple[int, int]], ...] = ()
    owners: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = ()

    def of(self, owner: str) -> Placement:
        """How the state of a transform lies."""
        return (self.unreduced or Placement()) if owner in self.apart else self

    def owners_of(self, owner: str, slot: str) -> tuple[str, dict[str, int]] | None:
        """Where in a transform's state the part of it is that updates whole leaves, and by path who does.

        `None` where the slot is of pieces.
        """
        found = [(where, ranks) for name, where, ranks in self.owners if name == owner and slot.startswith(where)]
        where, ranks = max(found, key=lambda x: len(x[0]), default=("", None))
        return None if ranks is None else (where, dict(ranks))

    def range_of(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's flat range of a leaf."""
        return self._ranges.get(leaf.path) or self.span(leaf.shape)

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        return dict(self.ranges)

    def span(self, shape: torch.Size) -> tuple[int, int]:
        """This rank's flat range of a leaf of that shape; the last ranks' may be short, or empty.

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
        at: for every position, the path of its leaf, or `None`.
        trainable: the leaves that want a gradient.
        trained: their paths.
        numbered: the tree with the number of each position at it: the structure as the compiler can read it.
    """

    leaves: tuple[Leaf, ...]
    places: tuple[int, ...]
    paths: tuple[str, ...]
    spec: Any = field(repr=False)
    placement: Placement = Placement()
    numbered: Any = field(init=False, repr=False, compare=False)
    at: tuple[str | None, ...] = field(init=False, repr=False, compare=False)
    trainable: tuple[Leaf, ...] = field(init=False, repr=False, compare=False)
    trained: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple([None if i < 0 else self.leaves[i].path for i in self.places]))
        object.__setattr__(self, "trainable", tuple([leaf for leaf in self.leaves if leaf.trainable]))
        object.__setattr__(self, "trained", tuple([leaf.path for leaf in self.trainable]))
        object.__setattr__(self, "numbered", optree.tree_unflatten(self.spec, list(range(len(self.places)))))

    def join(self, leaves: Mapping[str, Any]) -> Tree:
        """The tree with `leaves[path]` at its place, a tied tensor at each of its places."""
        flat = list(map(leaves.get, self.at))  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            return pytree.tree_map(lambda i: flat[i], self.numbered)
        return optree.tree_unflatten(self.spec, flat)

    def join_once(self, leaves: Mapping[str, Any]) -> Tree:
        """As `join`, with `None` at all places of a tied tensor but the first, so that places add up to the leaf."""
        first: set[int] = set()
        flat = []
        for i in self.places:
            flat.append(None if i < 0 or i in first else leaves.get(self.leaves[i].path))
            first.add(i)
        return optree.tree_unflatten(self.spec, flat)

    def tied(self, leaf: Leaf) -> bool:
        """Whether the leaf stands at several places."""
        return len(self.places) > len(self.leaves) and self.places.count(self.leaves.index(leaf)) > 1

    def match(self, tree: Tree, what: str, right: str) -> list[tuple[int, str, Any]]:
        """The entries of `tree` at the positions of this layout: (index of leaf, path, entry)."""
        try:
            entries = self.spec.flatten_up_to(tree)
        except RecursionError as error:
            raise _endless(tree, error) from error
        except (ValueError, TypeError) as error:
            raise ValueError(_structure_message(self, tree, what, right)) from error
        return [(i, p, e) for i, p, e in zip(self.places, self.paths, entries, strict=True) if i >= 0]

    def split(self, tree: Tree) -> Leaves:
        """Path to tensor for a tree of parameters; of a tied tensor the first place counts."""
        found: Leaves = {}
        for i, _, entry in self.match(tree, "these are not the parameters of this state", "state.params"):
            found.setdefault(self.leaves[i].path, entry)
        return found

    def map_places(self, fn: Callable[[Leaf, Tensor], Tensor], tree: Tree) -> Tree:
        """`fn(leaf, tensor)` at every position by itself: under torch.func ties are separate variables."""
        entries = self.match(tree, "these are not the stored parameters of this state", "state.params")
        done = iter([fn(self.leaves[i], entry) for i, _, entry in entries])
        return optree.tree_unflatten(self.spec, [None if i < 0 else next(done) for i in self.places])


register_constant(Layout)


def _structure_message(layout: Layout, tree: Tree, what: str, right: str) -> str:
    """Name the missing and the extra leaves; the kind of container where the leaves agree."""
    given = set(tree_paths(tree))
    expected = {p for i, p in zip(layout.places, layout.paths, strict=True) if i >= 0}
    rows = [(p, "missing") for p in sorted(expected - given)] + [(p, "extra") for p in sorted(given - expected)]
    if not rows:
        kind = f"same leaves in another kind of container: {optree.tree_structure(tree, none_is_leaf=True)}"
        rows = [("", f"{kind} instead of {layout.spec}")]
    return bad_leaves(f"wrong structure: {what}", rows, right)


def tree_keys(tree: Tree) -> list[tuple[str, ...]]:
    """The keys on the way to every leaf."""
    if torch.compiler.is_compiling():
        return [tuple(_key(k) for k in keys) for keys, _ in pytree.tree_flatten_with_path(tree)[0]]
    try:
        accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error
    return [tuple(_entry(e) for e in accessor) for accessor in accessors]


def tree_paths(tree: Tree) -> list[str]:
    """The dotted path of every leaf.

    >>> tree_paths({"w": [1, 2], "b": 3})
    ['b', 'w.0', 'w.1']
    """
    return [".".join(keys) for keys in tree_keys(tree)]


def _entry(entry: Any) -> str:
    name = getattr(entry, "name", None)
    if isinstance(name, str):
        return name
    # A NamedTuple entry knows its field, a mapping its key, a sequence its index.
    field_name = getattr(entry, "field", None)
    return str(field_name if isinstance(field_name, str) else entry.entry)


def _key(key: Any) -> str:
    """As `_entry`, of torch's own library: a mapping's key, a sequence's index, an attribute's name."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Leaves and structure; `None` is a leaf. In a graph by torch's own library, which the compiler reads."""
    if torch.compiler.is_compiling():
        return pytree.tree_flatten(tree)
    if type(tree) is Tensor:
        return [tree], ONE_LEAF
    try:
        return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error


def tensors_of(tree: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of nested dicts, in their order, which nobody is to rely on: in a third of the time of `flatten`."""
    found: list[Any] = []
    todo: list[Mapping[str, Any]] = [tree]
    while todo:
        values = todo.pop().values()
        if dict not in set(map(type, values)):
            found += values
            continue
        for x in values:
            (todo if type(x) is dict else found).append(x)
    if set(map(type, found)) <= {Tensor}:
        return found
    return [t for x in found for t in ([x] if isinstance(x, Tensor) else flatten(x)[0]) if isinstance(t, Tensor)]


def followed(trees: Iterable[Mapping[str, Any]]) -> bool:
    """Whether autograd follows a tensor of nested dicts, asked from C: there are many, of which hardly ever one is.

    >>> w = torch.ones(2, requires_grad=True)
    >>> followed([{"a": torch.ones(2)}, {"b": {"c": 1.0, "d": (w, w)}}]), followed([{"a": w.detach()}])
    (True, False)
    """
    todo = list(trees) if torch.is_grad_enabled() else []
    while todo:
        values = todo.pop().values()
        try:
            if any(map(_REQUIRES_GRAD, values)):
                return True
        except AttributeError:  # of a dict, or of a container of a user's
            for x in values:
                if isinstance(x, dict):
                    todo.append(x)
                elif x.requires_grad if type(x) is Tensor else _any_requires_grad(x):
                    return True
    return False


def _any_requires_grad(tree: Tree) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in flatten(tree)[0])


def _endless(tree: Tree, error: RecursionError) -> Exception:
    found = _inside_itself(tree)
    if found is None:
        return error
    why = "a tree is flattened to its leaves, of which there would be no end"
    right = "containers of tensors, none of which lies inside itself"
    return ValueError(explain(f"a tree that holds itself, at {'.'.join(found)}", why, right))


def _inside_itself(tree: Tree) -> list[str] | None:
    """The keys on the way to a container that holds one it lies in."""
    # Ways down and the containers on them, instead of a recursion, which is what has failed.
    ways: list[tuple[list[str], list[int], Any]] = [([], [], tree)]
    while ways:
        keys, above, node = ways.pop()
        if id(node) in above:
            return keys
        below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        ways += [([*keys, str(k)], [*above, id(node)], x) for k, x in below]
    return None


def unflatten(spec: Any, leaves: list[Any]) -> Tree:
    """The inverse of `flatten`."""
    if spec is ONE_LEAF:
        return leaves[0]
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten(leaves, spec)
    return optree.tree_unflatten(spec, leaves)


def parted(tree: Tree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Tree]]:
    """Its tensors, and a function that makes the tree of others in their places."""
    leaves, spec = flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def joined(tensors: Iterable[Tensor]) -> Tree:
        others = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            others[i] = x
        return unflatten(spec, others)

    return [leaves[i] for i in places], joined


def tree_map(fn: Callable[..., Any], tree: Tree, *rests: Tree) -> Tree:
    """`fn` over the leaves of trees of one structure; `None` is a leaf."""
    kind = type(tree)
    if kind is Tensor and not rests:
        return fn(tree)
    if torch.compiler.is_compiling():
        return pytree.tree_map(fn, tree, *rests)
    try:
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError as error:
        raise _endless(tree, error) from error


def apart(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """`tree`, with copies of what lies in the memory of `tensors`, which will be written in place."""
    if torch.compiler.is_compiling():
        # Nobody can ask for memory there. A compiler that generates code leaves out copies that nobody needs.
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)
    taken = memories(tensors)
    if taken.isdisjoint(memories(tensors_of(tree if type(tree) is dict else {"": tree}))):
        return tree
    values, spec = flatten(tree)
    shared = [isinstance(t, Tensor) and not taken.isdisjoint(memories([t])) for t in values]
    return unflatten(spec, [t.clone() if one else t for t, one in zip(values, shared, strict=True)])


def prefix_values(prefix: Tree, layout: Layout, what: str) -> dict[str, Any]:
    """Spread a tree of values (a mask, labels) that may stop above the leaves of `layout`."""
    found: dict[str, Any] = {}
    try:
        values, spec = flatten(prefix)
        for value, below in zip(values, spec.flatten_up_to(layout.numbered), strict=True):
            for position in optree.tree_leaves(below, none_is_leaf=True, namespace=NAMESPACE):
                if layout.places[position] >= 0:
                    found[layout.leaves[layout.places[position]].path] = value
    except (ValueError, TypeError) as error:
        raise ValueError(
            _structure_message(layout, prefix, what, "a tree of the parameters' structure, or a function of the path")
        ) from error
    return found


def parameters_of(model: nn.Module, recurse: bool = True) -> OrderedDict[str, nn.Parameter]:
    """The parameters of a module by path, a tied one under each of its names.

    Those of integers are left out, which quantizers keep frozen: nothing trains or casts them, and every rank keeps
    them whole, as it does buffers.
    """
    named = model.named_parameters(recurse=recurse, remove_duplicate=False)
    return OrderedDict((name, p) for name, p in named if p.dtype.is_floating_point or p.dtype.is_complex)


def make_layout(
    params: Tree, trainable: Callable[[str], bool] = lambda path: True, within: Mapping[str, Within] | None = None
) -> tuple[Layout, Leaves]:
    """The layout of a tree of parameters and its tensors by path.

    Args:
        params: the tree.
        trainable: whether the leaf of a path wants a gradient.
        within: by path, where leaves lie in tensors that the model itself has cut.

    Raises:
        TypeError: a leaf is no floating-point tensor; every such leaf is named.
        ValueError: the tree has no leaf, or two leaves have the same path.
    """
    entries, spec = flatten(params)
    paths = tree_paths(params)
    wrong = [(p, reason) for p, e in zip(paths, entries, strict=True) if (reason := _not_a_parameter(e))]
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
    if not leaves:
        raise ValueError("the tree of parameters is empty. Give at least one tensor: zf.init(tx, {'w': w}).")
    return the_one(Layout(tuple(leaves), tuple(places), tuple(paths), spec)), tensors


def the_one(layout: Layout) -> Layout:
    """The same object for equal layouts: by that a compiled step knows a state again, and makes no further graph."""
    # Placements over other ranks are equal, see there, and yet not the same: what one of them saves is its own.
    return _first_of(layout, layout.placement.axes)


@lru_cache(maxsize=256)
def _first_of(layout: Layout, _axes: tuple[tuple[int, ...], ...]) -> Layout:
    return layout


def _same_path(params: Tree, paths: list[str], path: str) -> str:
    accessors = optree.tree_accessors(params, none_is_leaf=True, namespace=NAMESPACE)
    places = [a.codify("params") for a, p in zip(accessors, paths, strict=True) if p == path]
    return explain(
        f"several leaves have the path {path!r}: {', '.join(places)}",
        "a path is the text of the keys with dots between them, and it names a leaf in checkpoints and messages; keys "
        "of one text (1 and '1'), or a key that holds a dot, can give one path twice",
        "other keys, so that all paths differ, for instance {'a': ..., 'b': ...}",
    )


def _not_a_parameter(leaf: Any) -> str | None:
    if leaf is None:
        return None
    if isinstance(leaf, UninitializedParameter | UninitializedBuffer):
        return "not initialised yet, as of a lazy module; run the model once on a batch before"
    if isinstance(leaf, Tensor):
        if leaf.is_complex():
            return f"{leaf.dtype}; store the real and imaginary parts as two leaves (torch.view_as_real)"
        if not leaf.is_floating_point():
            return f"{leaf.dtype} has no gradient; keep it outside of the parameters"
        if leaf.dtype.itemsize < 2:
            return f"{leaf.dtype} is a format of storage without arithmetic; give at least 16 bits"
        if leaf.layout != torch.strided:
            return f"layout {leaf.layout}; only strided tensors are parameters"
        return DISTRIBUTED if is_distributed(leaf) else None
    if is_dataclass(leaf) and any(isinstance(getattr(leaf, f.name), Tensor) for f in fields(leaf)):
        name = type(leaf).__name__
        return f"dataclass {name} is not registered: optree.dataclasses.dataclass({name}, namespace='zerofn')"
    return f"{type(leaf).__name__} is no tensor"


def register_global(cls: type, flatten_fn: Callable, unflatten_fn: Callable) -> None:
    """Make `cls` a node for optree, in every namespace."""
    optree.register_pytree_node(cls, flatten_fn, unflatten_fn, namespace=GLOBAL_NAMESPACE)
