"""What a transform of your own may need. The built-in transforms are written with it.

A `Transform` is a record of functions. `@transform` marks a function that builds one, so that its result prints,
compares and pickles by its arguments. A `View` says how the model sees what is stored, a `Wire` carries leaves over
ranks, `Facts` are the static properties of a transform, and `through` says where in a chain it may stand. See
docs/writing-a-transform.md.

Examples:
    >>> import torch, zerofn as zf
    >>> from zerofn.extend import Transform, View, as_it_is, transform
    >>> @transform
    ... def factor(by):
    ...     view = View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)
    ...     return Transform("factor", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)
    >>> tx = zf.chain(factor(2.0), zf.sgd(lr=1.0))
    >>> state = zf.init(tx, {"w": torch.tensor([6.0])})
    >>> state.params, zf.full_params(tx, state)
    ({'w': tensor([3.])}, {'w': tensor([6.])})
"""

from zerofn._errors import bad_leaves, explain, kind_of, unknown_keyword, users_line
from zerofn._profiler_ranges import listener, listening
from zerofn.core.arguments import (
    TINY,
    check_betas,
    check_count,
    check_dtype,
    check_flag,
    check_lr,
    check_number,
    given,
    misfit,
    no_weight,
    weight_of,
)
from zerofn.core.chain import as_transform, chain, labels_by_path, of_members, texts_of_labels, values_by_path
from zerofn.core.context import Context, Prepared
from zerofn.core.facts import AVERAGE, COUNT, OVERFLOW_LEAF, SKIPPED_STEPS, Facts, Scope
from zerofn.core.layout import AxisPlacement, Flat, Layout, Leaf, Leaves, Owner, Partial, Replicate, Shard, span, width
from zerofn.core.leafwise import transform
from zerofn.core.number_graphs import Unrecorded
from zerofn.core.offload import Conveyor
from zerofn.core.optimizer import LeafList, LeafStep, direction, like, optimizer, without_elements
from zerofn.core.pipeline import context_of
from zerofn.core.spec import (
    NOT_REDUCED,
    OF_ITS_OWN,
    ONE_OF_TWO,
    Misplaced,
    Spec,
    Through,
    as_it_is,
    changes_gradients,
    makes_parameters,
    watches_parameters,
)
from zerofn.core.state import counter
from zerofn.core.state_entries import Entry, entries, rebuild
from zerofn.core.transform import ScalarOrSchedule, Transform, TransformState
from zerofn.core.tree import flatten, select, tree_map, unflatten
from zerofn.core.uncompiled import kept_out_of_graphs
from zerofn.core.view import Dtypes, Ranks, View, ViewOf, Wire, no_view, over_ranks
from zerofn.core.wires import Averaging, Sharding
from zerofn.core.wrapper_names import buffers_in
from zerofn.kernels.adam import adam_, adam_operator, adam_update, has_kernel, implementation_for
from zerofn.kernels.formulas import (
    at_most,
    moment_root,
    once,
    plus,
    plus_product,
    plus_quotient,
    scaled,
    times,
    towards,
)
from zerofn.kernels.fused_adam import alike, fused_operator, fused_update, many_for_fused, plain, typed
from zerofn.kernels.norms import length, not_finite, squared_norm
from zerofn.kernels.recording import (
    certain,
    concrete,
    differentiated,
    may,
    number,
    recorded,
    root,
    straight_through,
    where,
)
from zerofn.kernels.rounding import (
    FIRST_FORMAT,
    FORMAT,
    FORMAT_ENTRY,
    known_formats,
    leaf_key,
    random_bits,
    stochastic_round,
)
from zerofn.ranks.collectives import all_gather_into, all_reduce_, reduce_scatter_into
from zerofn.ranks.differentiable import check_batch
from zerofn.ranks.group import Group

__all__ = [
    "AVERAGE",
    "COUNT",
    "FIRST_FORMAT",
    "FORMAT",
    "FORMAT_ENTRY",
    "NOT_REDUCED",
    "OF_ITS_OWN",
    "ONE_OF_TWO",
    "OVERFLOW_LEAF",
    "SKIPPED_STEPS",
    "TINY",
    "Averaging",
    "AxisPlacement",
    "Context",
    "Conveyor",
    "Dtypes",
    "Entry",
    "Facts",
    "Flat",
    "Group",
    "Layout",
    "Leaf",
    "LeafList",
    "LeafStep",
    "Leaves",
    "Misplaced",
    "Owner",
    "Partial",
    "Prepared",
    "Ranks",
    "Replicate",
    "ScalarOrSchedule",
    "Scope",
    "Shard",
    "Sharding",
    "Spec",
    "Through",
    "Transform",
    "TransformState",
    "Unrecorded",
    "View",
    "ViewOf",
    "Wire",
    "adam_",
    "adam_operator",
    "adam_update",
    "alike",
    "all_gather_into",
    "all_reduce_",
    "as_it_is",
    "as_transform",
    "at_most",
    "bad_leaves",
    "buffers_in",
    "certain",
    "chain",
    "changes_gradients",
    "check_batch",
    "check_betas",
    "check_count",
    "check_dtype",
    "check_flag",
    "check_lr",
    "check_number",
    "concrete",
    "context_of",
    "counter",
    "differentiated",
    "direction",
    "entries",
    "explain",
    "flatten",
    "fused_operator",
    "fused_update",
    "given",
    "has_kernel",
    "implementation_for",
    "kept_out_of_graphs",
    "kind_of",
    "known_formats",
    "labels_by_path",
    "leaf_key",
    "length",
    "like",
    "listener",
    "listening",
    "makes_parameters",
    "many_for_fused",
    "may",
    "misfit",
    "moment_root",
    "no_view",
    "no_weight",
    "not_finite",
    "number",
    "of_members",
    "once",
    "optimizer",
    "over_ranks",
    "plain",
    "plus",
    "plus_product",
    "plus_quotient",
    "random_bits",
    "rebuild",
    "recorded",
    "reduce_scatter_into",
    "root",
    "scaled",
    "select",
    "span",
    "squared_norm",
    "stochastic_round",
    "straight_through",
    "texts_of_labels",
    "times",
    "towards",
    "transform",
    "tree_map",
    "typed",
    "unflatten",
    "unknown_keyword",
    "users_line",
    "values_by_path",
    "watches_parameters",
    "weight_of",
    "where",
    "width",
    "without_elements",
]
