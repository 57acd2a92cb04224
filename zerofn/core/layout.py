"""`Leaf` and `Layout`: every parameter by path, and this rank's shard of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._compat.functorch import pytree, register_constant
from .._compat.tensors import sharing_memory
from .._errors import bad_leaves, explain
from ..ranks.dtensor import Box, in_box, is_distributed
from .tree import Tree, flatten, tree_codes, tree_paths, unflatten
from .wrapper_names import without_wrappers

# ----------------------------------------------------------------------------------------------------------------------
# A leaf is sharded over ranks by rows of its first dimension, as torch cuts a tensor into chunks.
#
# No row is split, so a rank's shard is what torch calls `Shard(0)`. Nothing is padded: the last ranks' shards may be
# shorter, or empty. A shard is one range of the flattened leaf, which norms, checkpoints and the counters of
# stochastic rounding need. Of a leaf with fewer rows than ranks the first ranks have a row each. A number has no rows:
# the first rank has it.


def width(shape: Sequence[int], size: int) -> int:
    """How many elements of a leaf the first of `size` ranks has. The other ranks have as many or fewer.

    Examples:
        >>> width((5, 3), 2), width((2, 3), 4), width((), 2)
        (9, 3, 1)
    """
    return -(-shape[0] // size) * prod(shape[1:]) if shape else 1


def span(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """The range of the flattened leaf that a rank holds.

    Examples:
        >>> [span((5, 3), rank, 2) for rank in range(2)], [span((2, 3), rank, 4) for rank in range(4)]
        ([(0, 9), (9, 15)], [(0, 3), (3, 6), (6, 6), (6, 6)])
    """
    each, numel = width(shape, size), prod(shape)
    return min(rank * each, numel), min((rank + 1) * each, numel)


def rows_between(shape: Sequence[int], low: int, high: int) -> tuple[int, ...] | None:
    """The shape of a range of the flattened leaf, if it is of whole rows; else `None`. A 0-d leaf is one row.

    >>> rows_between((5, 3), 9, 15), rows_between((5, 3), 2, 6), rows_between((5, 3), 15, 15)
    ((2, 3), None, (0, 3))
    >>> rows_between((), 0, 1), rows_between((), 1, 1)
    ((), (0,))
    """
    if not shape:
        return () if high > low else (0,)
    row = prod(shape[1:])
    if row and (low % row or high % row):
        return None
    return ((high - low) // row if row else 0, *shape[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Placements say how a tensor lies on the ranks along one axis of a mesh: torch's three, and two of our own.
#
# `Replicate`, `Shard` and `Partial` are called, made and printed like torch's. They are records of our own because
# `import torch.distributed.tensor` takes half as long as `import torch`, and a chain is surveyed on one process too.


@dataclass(frozen=True)
class Replicate:
    """Each rank has the full tensor."""


@dataclass(frozen=True)
class Shard:
    """Each rank has a chunk along a dimension, as `torch.chunk` cuts: the last chunks may be shorter, or empty."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Each rank has a term; the tensor is the mean of the terms, or another reduction of them."""

    op: str = "avg"

    def __repr__(self) -> str:
        return f"Partial({self.op})"


@dataclass(frozen=True)
class Flat:
    """Each rank has a range of the flattened tensor. The range may begin within a row. torch has no such placement."""


@dataclass(frozen=True)
class Owner:
    """One rank has the full tensor, and the other ranks have nothing. torch has no such placement."""

    rank: int

    def __repr__(self) -> str:
        return f"Owner({self.rank})"


AxisPlacement = Replicate | Shard | Partial | Flat | Owner


# ----------------------------------------------------------------------------------------------------------------------
# `Within` says where a leaf lies in a tensor that the model itself has sharded (tensor parallelism).
#
# The chain does not know of this sharding: it is along another mesh axis than those it reduces over, and transforms
# and wires see the local shard as a leaf of its own shape. `Within` knows which elements of the full tensor they are,
# and on which of several ranks that hold the same elements they count.
#
# The elements of the full tensor are numbered box by box, as they lie on ranks. Where rows are cut, that is the order
# of the tensor itself, so a checkpoint and the draws of stochastic rounding are those of one process. Where columns
# are cut, the elements of one rank are still a range, and no two ranks have the same numbers.


@dataclass(frozen=True)
class Within:
    """The full tensor that a leaf is a shard of.

    Attributes:
        shape: of the full tensor.
        boxes: the shards of all ranks, in their order, each once: its offsets and its sizes.
        at: the index of the leaf among them.
        first: whether this rank is the first of those that have it, and counts it in sums.

    >>> columns = Within(torch.Size([2, 4]), (((0, 0), (2, 2)), ((0, 2), (2, 2))), at=1, first=True)
    >>> columns.before, columns.ordered
    (4, False)
    >>> Within(torch.Size([2, 4]), (((0, 0), (1, 4)), ((1, 0), (1, 4))), at=1, first=True).ordered
    True
    """

    shape: torch.Size
    boxes: tuple[Box, ...]
    at: int
    first: bool

    @property
    def cut(self) -> bool:
        """Whether ranks have different shards of it."""
        return len(self.boxes) > 1

    @property
    def before(self) -> int:
        """The number of the leaf's first element, counted box by box."""
        return sum(torch.Size(sizes).numel() for _, sizes in self.boxes[: self.at])

    @property
    def ordered(self) -> bool:
        """Whether elements that are counted box by box are in the order of the tensor."""
        return all(tuple(sizes[1:]) == tuple(self.shape[1:]) for _, sizes in self.boxes)

    def part(self, whole: Tensor) -> Tensor:
        """The leaf's box of the full tensor."""
        return in_box(whole, self.boxes[self.at])


def joined(flat: Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> Tensor:
    """The full tensor. `flat` has its elements box by box.

    >>> joined(torch.arange(4), (2, 2), [((0, 0), (2, 1)), ((0, 1), (2, 1))])
    tensor([[0, 2],
            [1, 3]])
    """
    whole, begin = flat.new_empty(torch.Size(shape)), 0
    for box in boxes:
        part = in_box(whole, box)
        part.copy_(flat[begin : begin + part.numel()].view(part.shape))
        begin += part.numel()
    return whole


# ----------------------------------------------------------------------------------------------------------------------
# These functions find the parameters of a module, and say why an entry of a tree is not a parameter.


DISTRIBUTED = "a DTensor, which a model has and no tree: zf.attach(model, tx), or p.to_local() of each"


def parameters_of(model: nn.Module) -> OrderedDict[str, nn.Parameter]:
    """The parameters of a module by path, a tied one under each of its names.

    A path is the name without what wrappers add (torch.compile, checkpoint_wrapper, DistributedDataParallel). Those of
    integers are left out, which quantizers keep frozen: nothing trains or casts them, and every rank keeps them whole,
    as it does buffers.

    Raises:
        ValueError: two have one name without what wrappers add.
    """
    named = model.named_parameters(remove_duplicate=False)
    kept = OrderedDict((name, p) for name, p in named if p.dtype.is_floating_point or p.dtype.is_complex)
    return OrderedDict(without_wrappers(model, kept))


def not_a_parameter(leaf: Any) -> str | None:
    """Why an entry of a tree is no parameter, and what to pass instead; `None` for a parameter, and for `None`."""
    if leaf is None:
        return None
    if isinstance(leaf, UninitializedParameter | UninitializedBuffer):
        return "not initialised yet, as in a lazy module; run the model once on a batch before"
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return "a nested tensor, of rows of several lengths; give x.to_padded_tensor(0.0), or its rows, x.unbind()"
        if not leaf.is_floating_point() and not leaf.is_complex():
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


def check_own_memory(call: str, leaves: Mapping[str, Tensor]) -> None:
    """Refuse two leaves over one memory, as `state_dict()` of a model with tied parameters has them.

    Which tensors are one parameter is told by the tensor object. Two objects would become two parameters.

    Args:
        call: as the user writes it.
        leaves: by path, a tied tensor once.
    """
    shared = sharing_memory(leaves).items()
    bad = [(path, f"shares memory with {first}, and is another tensor object") for path, first in shared]
    if bad:
        right = (
            "the same tensor object at each place of a tied parameter, as of a model\n"
            "         dict(model.named_parameters(remove_duplicate=False)); or params[name] = x.clone() for two"
        )
        raise ValueError(bad_leaves(f"{call}: leaves that are over one memory would become two parameters", bad, right))


# ----------------------------------------------------------------------------------------------------------------------
# A complex parameter is a leaf of real numbers: its real and imaginary parts, as `torch.optim` updates them.
#
# `make_layout`, `Layout.match` and `Layout.join` convert between a tree, whose tensors are complex, and leaves by path,
# which are real. Behind them no transform, kernel or wire knows of complex numbers. Both parts of a number are in one
# row, so they lie on one rank.


def as_real(x: Tensor, leaf: Leaf, flat: bool = False) -> Tensor:
    """The real and imaginary parts of a tensor of a complex leaf, on its memory; any other tensor as it is.

    Args:
        x: the whole leaf, or a flat shard of it.
        leaf: the leaf.
        flat: whether it is a shard.
    """
    if leaf.complex is None or not isinstance(x, Tensor) or not x.is_complex():
        return x
    parts = torch.view_as_real(x.resolve_conj())
    if not x.ndim:
        parts = parts.unsqueeze(0)
    return parts.flatten(-2) if flat or x.shape != leaf.complex else parts


def as_complex(x: Tensor, leaf: Leaf) -> Tensor:
    """The inverse of `as_real`: of a whole leaf or a flat shard. A tensor of another shape is returned as it is.

    It is on the same memory where torch allows it: at an even offset, in a dtype that complex numbers have.
    """
    if leaf.complex is None or not isinstance(x, Tensor) or x.is_complex() or x.dtype not in COMPLEX:
        return x
    if x.shape != leaf.shape and (x.ndim != 1 or x.numel() % 2):
        return x
    parts = x if x.shape == leaf.shape else x.unflatten(0, (-1, 2))
    if x.device.type != "meta" and (
        x.storage_offset() % 2 or parts.stride(-1) != 1 or any(map(_odd, parts.stride()[:-1]))
    ):
        parts = parts.contiguous().clone()
    found = torch.view_as_complex(parts)
    return found.view(leaf.complex) if x.shape == leaf.shape else found


# The dtypes of the parts of complex numbers.
COMPLEX = frozenset({torch.float16, torch.float32, torch.float64})


def _odd(x: int) -> bool:
    return bool(x % 2)


def complex_form(leaf: Leaf) -> Leaf:
    """A leaf as the user has it: of a complex tensor with its own shape and dtype; any other leaf as it is."""
    return (
        leaf if leaf.complex is None else replace(leaf, shape=leaf.complex, dtype=leaf.dtype.to_complex(), complex=None)
    )


# ----------------------------------------------------------------------------------------------------------------------
# `Layout` is the structure of a parameter tree, `Leaf` is one parameter, `Placement` is how a leaf lies over ranks.


Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Leaf:
    """One parameter, without its values.

    Attributes:
        path: its place in the tree, for instance ``"blocks.0.weight"``.
        shape: its global shape; of a leaf that the model itself has cut, that of this rank's shard.
        dtype: the dtype of the tensor that the user gave.
        device: the type of the device of that tensor, for instance ``"cpu"``.
        trainable: whether a gradient is wanted.
        within: its place in a tensor that the model itself has cut (tensor parallelism).
        complex: the shape of a complex tensor. The leaf then has its real and imaginary parts, in a last dimension, and
            `shape`, `dtype` and `numel` are of these.
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    device: str
    trainable: bool = True
    within: Within | None = None
    complex: torch.Size | None = None

    @property
    def numel(self) -> int:
        """Global number of elements."""
        return self.shape.numel()


@dataclass(frozen=True)
class Placement:
    """How stored leaves lie over ranks: replicated, or sharded by rows into consecutive ranges.

    Attributes:
        rank: this rank's number among those that share a leaf.
        size: how many ranks share a leaf.
        together: how many ranks hold the state, replicas included.
        axes: the ranks along each axis of the mesh.
        apart: transforms whose state has sums of gradients that are not reduced yet, and differ between ranks.
        copies: how many such sums there are, one for each rank of the reduction.
        copy: the index of this rank's sum among them.
        unreduced: how each such sum lies over ranks; by default in full on one rank.
        ranges: by path, this rank's range of flattened leaves that are not sharded as `span` says.
        owners: for each transform that updates whole leaves its name in the chain, the prefix of their slots in its
            state, and by path the rank that updates the leaf, counted among those that share it.
        fixed: by name of a transform, slots whose tensors of leaves have a shape of their own and are equal on all
            ranks, where leaves are sharded (`Facts.fixed`). Any other tensor of a leaf is sharded like it, or 0-d.
        seen_by: names of the user's views through which the model sees stored parameters.
    """

    rank: int = 0
    size: int = 1
    together: int = 1
    # Not compared: a plan, which is made without ranks, has no axes and is equal to the placement on ranks.
    axes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    apart: tuple[str, ...] = ()
    copies: int = 1
    copy: int = 0
    unreduced: Placement | None = None
    ranges: tuple[tuple[str, tuple[int, int]], ...] = ()
    owners: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()
    seen_by: tuple[str, ...] = ()

    def of(self, owner: str) -> Placement:
        """How the state of the transform of this name lies over ranks."""
        return (self.unreduced or Placement()) if owner in self.apart else self

    def owners_of(self, owner: str, slot: str) -> tuple[str, dict[str, int]] | None:
        """For a slot of whole leaves, the prefix of such slots in the transform's state, and by path each leaf's owner.

        `None` if the slot has shards.
        """
        found = [(where, ranks) for name, where, ranks in self.owners if name == owner and slot.startswith(where)]
        where, ranks = max(found, key=lambda x: len(x[0]), default=("", None))
        return None if ranks is None else (where, dict(ranks))

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
        placement: how stored tensors are placed over ranks.
        wrapped: for every position, its name in a model whose modules are wrapped; empty where none is.
        at: for every position, the path of its leaf, or `None`.
        trainable: the leaves that want a gradient.
        trained: the paths of the trainable leaves.
        every: the paths of all leaves.
        elements: the number of elements of all leaves together.
        complexes: the leaves of complex tensors.
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
    elements: int = field(init=False, repr=False, compare=False)
    complexes: tuple[Leaf, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple([None if i < 0 else self.leaves[i].path for i in self.places]))
        object.__setattr__(self, "trainable", tuple([leaf for leaf in self.leaves if leaf.trainable]))
        object.__setattr__(self, "trained", tuple([leaf.path for leaf in self.trainable]))
        object.__setattr__(self, "every", frozenset([leaf.path for leaf in self.leaves]))
        object.__setattr__(self, "elements", sum([leaf.numel for leaf in self.leaves]))
        object.__setattr__(self, "complexes", tuple([leaf for leaf in self.leaves if leaf.complex is not None]))
        object.__setattr__(self, "numbered", unflatten(self.spec, list(range(len(self.places)))))
        object.__setattr__(self, "readable", set(map(type, pytree.tree_leaves(self.numbered))) <= {int})

    def join(self, leaves: Mapping[str, Any]) -> Tree:
        """The tree with `leaves[path]` at its place, a tied tensor at each of its places."""
        leaves = self.given_form(leaves)
        flat = list(map(leaves.get, self.at))  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            return pytree.tree_map(lambda i: flat[i], self.numbered)
        return unflatten(self.spec, flat)

    def join_once(self, leaves: Mapping[str, Any]) -> Tree:
        """As `join`, with `None` at all places of a tied tensor but the first, so that a sum counts it once."""
        leaves = self.given_form(leaves)
        first: set[int] = set()
        flat = []
        for i in self.places:
            flat.append(None if i < 0 or i in first else leaves.get(self.leaves[i].path))
            first.add(i)
        return unflatten(self.spec, flat)

    def given_form(self, leaves: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leaves by path, those of complex tensors as complex tensors."""
        if not self.complexes:
            return leaves
        return {**leaves, **{x.path: as_complex(leaves[x.path], x) for x in self.complexes if x.path in leaves}}

    def tied(self, leaf: Leaf) -> bool:
        """Whether the leaf is at several places of the tree."""
        return len(self.places) > len(self.leaves) and self.places.count(self.leaves.index(leaf)) > 1

    def match(self, tree: Tree, what: str, right: str) -> list[tuple[int, str, Any]]:
        """The entries of `tree` at the positions of this layout: (index of leaf, path, entry).

        Complex tensors come as their real and imaginary parts.
        """
        try:
            entries = self.spec.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            raise ValueError(_structure_message(self, tree, what, right)) from error
        found = [(i, p, e) for i, p, e in zip(self.places, self.paths, entries, strict=True) if i >= 0]
        if not self.complexes:
            return found
        # A shard of a leaf of one element may have the shape of the leaf.
        cut = self.placement.size > 1 and self.placement.unreduced is None
        # A tensor at several places stays one tensor.
        parts: dict[int, Any] = {}
        for i, _, e in found:
            if id(e) not in parts:
                parts[id(e)] = as_real(e, self.leaves[i], flat=cut and isinstance(e, Tensor) and e.ndim == 1)
        return [(i, p, parts[id(e)]) for i, p, e in found]

    def only(self, paths: Set[str]) -> Layout:
        """The layout of only the leaves in `paths`."""
        if paths >= self.every:
            return self
        leaves = tuple([leaf for leaf in self.leaves if leaf.path in paths])
        numbers: dict[str | None, int] = {leaf.path: i for i, leaf in enumerate(leaves)}
        return replace(self, leaves=leaves, places=tuple([numbers.get(path, -1) for path in self.at]))

    def map_places(self, fn: Callable[[Leaf, Tensor], Tensor], tree: Tree) -> Tree:
        """`fn(leaf, tensor)` at every position by itself: to torch.func tied places are separate variables."""
        entries = self.match(tree, "these are not the stored parameters of this state", "state.params")
        done = iter([as_complex(fn(self.leaves[i], entry), self.leaves[i]) for i, _, entry in entries])
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
    try:
        values, spec = flatten(prefix, is_value)
        for value, below in zip(values, spec.flatten_up_to(layout.numbered), strict=True):
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
        TypeError: a leaf is no floating-point or complex tensor; every such leaf is named.
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
            leaf = Leaf(path, tensor.shape, tensor.dtype, tensor.device.type, trainable(path), of)
            if tensor.is_complex():
                own, leaf = tensor.shape, replace(leaf, complex=tensor.shape)
                tensor = as_real(tensor, leaf)
                leaf = replace(leaf, shape=tensor.shape, dtype=tensor.dtype, complex=own)
            leaves.append(leaf)
            tensors[path] = tensor
    names = tuple([wrapped.get(path, path) for path in paths]) if wrapped else ()
    return canonical(Layout(tuple(leaves), tuple(places), tuple(paths), spec, wrapped=names)), tensors


def canonical(layout: Layout) -> Layout:
    """The one object for all equal layouts. A compiled step compares it by identity, and then makes no new graph."""
    # `axes` is in the key: placements over other ranks compare equal without it, but save other shards.
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


# ----------------------------------------------------------------------------------------------------------------------
# A layout as plain containers, which `torch.load` reads with its defaults, and back.


_KINDS: tuple[type, ...] = (Leaf, Placement, Within)


def as_plain(layout: Layout) -> dict[str, Any]:
    """The layout in dicts, lists, text and numbers, and in the containers that parameters were given in.

    >>> layout, _ = make_layout({"w": [torch.ones(2)]})
    >>> as_plain(layout)["tree"], from_plain(as_plain(layout)) == layout
    ({'w': [0]}, True)
    """
    return {
        "leaves": [_plain(leaf) for leaf in layout.leaves],
        "places": list(layout.places),
        "paths": list(layout.paths),
        "tree": layout.numbered,
        "placement": _plain(layout.placement),
    }


def from_plain(given: dict[str, Any]) -> Layout:
    """The inverse of `as_plain`."""
    leaves, placement = map(_made, given["leaves"]), _made(given["placement"])
    return Layout(tuple(leaves), tuple(given["places"]), tuple(given["paths"]), flatten(given["tree"])[1], placement)


def _plain(x: Any) -> Any:
    for kind in _KINDS:
        if type(x) is kind:
            return {"kind": kind.__name__, **{name: _plain(getattr(x, name)) for name in _fields(kind)}}
    return tuple(map(_plain, x)) if type(x) is tuple else x


def _made(x: Any) -> Any:
    if type(x) is dict:
        if x.get("slots"):
            why = "it describes how slots lie over ranks in a format that this version does not read"
            right = "zf.save(directory, state) with that version, and zf.load(directory, like=state) with this one"
            raise ValueError(explain("a state that zerofn 0.2 has pickled on several ranks", why, right))
        kind = next(kind for kind in _KINDS if kind.__name__ == x["kind"])
        # A field that this version does not know is left out, and one that the file lacks has its default.
        return kind(**{name: _made(x[name]) for name in _fields(kind) if name in x})
    return tuple(map(_made, x)) if type(x) is tuple else x


def _fields(kind: type) -> list[str]:
    return [x.name for x in fields(kind) if x.init]
