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

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from zerofn._compat.functorch import uncompiled as _uncompiled
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
    check_seed,
    given,
    misfit,
    no_weight,
    weight_of,
)
from zerofn.core.chain import (
    as_transform,
    chain,
    labels_by_path,
    of_members,
    texts_of_labels,
    values_by_path,
    wrapped,
    wrapped_optimizer,
)
from zerofn.core.context import Context, Prepared
from zerofn.core.executor import buckets
from zerofn.core.facts import AVERAGE, COUNT, OVERFLOW_LEAF, SKIPPED_STEPS, Facts, Scope
from zerofn.core.layout import AxisPlacement, Flat, Layout, Leaf, Leaves, Owner, Partial, Replicate, Shard, span, width
from zerofn.core.leafwise import transform
from zerofn.core.number_graphs import Unrecorded
from zerofn.core.optimizer import (
    LeafList,
    LeafStep,
    UpdateOfStored,
    direction,
    like,
    optimizer,
    rate_of,
    stored_fn_of,
    wide_copy,
    without_elements,
)
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
from zerofn.core.state import State, counter
from zerofn.core.transform import ScalarOrSchedule, Transform, TransformState, no_state
from zerofn.core.tree import flatten, select, tree_map, unflatten
from zerofn.core.uncompiled import kept_out_of_graphs
from zerofn.core.view import Dtypes, Ranks, View, ViewOf, Wire, no_view, over_ranks
from zerofn.core.wrapper_names import buffers_in
from zerofn.kernels.formulas import (
    LeafSums,
    at_most,
    at_once,
    in_batches,
    moment_root,
    on_stacks,
    once,
    over_leaves,
    plus,
    plus_product,
    plus_quotient,
    scaled,
    sums_over_leaves,
    times,
    towards,
)
from zerofn.kernels.fused_adam import (
    alike,
    fused_on_device,
    fused_operator,
    fused_update,
    many_for_fused,
    plain,
    typed,
)
from zerofn.kernels.masters import (
    Master,
    Room,
    bf16_of_master,
    laid_out,
    master_of,
    residual_of_master,
    taken_apart,
    together,
)
from zerofn.kernels.norms import length, not_finite, not_finite_each, squared_norm
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
    without_derivative,
)
from zerofn.ranks.group import Group

if _TYPE_CHECKING:
    from zerofn.core.narrow import codes_of_wire as codes_of_wire
    from zerofn.core.narrow import narrow_mean as narrow_mean
    from zerofn.core.offload import MASTERS as MASTERS
    from zerofn.core.offload import Conveyor as Conveyor
    from zerofn.core.offload import update_on_host as update_on_host
    from zerofn.core.state_entries import Entry as Entry
    from zerofn.core.state_entries import entries as entries
    from zerofn.core.state_entries import rebuild as rebuild
    from zerofn.core.wires import Averaging as Averaging
    from zerofn.core.wires import CodedSharding as CodedSharding
    from zerofn.core.wires import Sharding as Sharding
    from zerofn.kernels.adam import adam_ as adam_
    from zerofn.kernels.adam import adam_on_device as adam_on_device
    from zerofn.kernels.adam import adam_operator as adam_operator
    from zerofn.kernels.adam import adam_update as adam_update
    from zerofn.kernels.adam import has_kernel as has_kernel
    from zerofn.kernels.adam import implementation_for as implementation_for
    from zerofn.kernels.coded_adam import CodedAdam as CodedAdam
    from zerofn.kernels.codes import BlockDraws as BlockDraws
    from zerofn.kernels.codes import Coded as Coded
    from zerofn.kernels.codes import Codes as Codes
    from zerofn.kernels.codes import Draws as Draws
    from zerofn.kernels.master_adam import MasterAdam as MasterAdam
    from zerofn.kernels.rounding import FIRST_FORMAT as FIRST_FORMAT
    from zerofn.kernels.rounding import FORMAT as FORMAT
    from zerofn.kernels.rounding import FORMAT_ENTRY as FORMAT_ENTRY
    from zerofn.kernels.rounding import known_formats as known_formats
    from zerofn.kernels.rounding import leaf_key as leaf_key
    from zerofn.kernels.rounding import random_bits as random_bits
    from zerofn.kernels.rounding import stochastic_round as stochastic_round
    from zerofn.ranks.collectives import all_gather_into as all_gather_into
    from zerofn.ranks.collectives import all_reduce_ as all_reduce_
    from zerofn.ranks.collectives import reduce_scatter_into as reduce_scatter_into
    from zerofn.ranks.differentiable import check_batch as check_batch
    from zerofn.ranks.scalar_reduction import mean_over as mean_over

# Names that few transforms need are imported when they are used, so that `adamw` on one process loads no collectives.
_LATER = {
    "codes_of_wire": "zerofn.core.narrow",
    "narrow_mean": "zerofn.core.narrow",
    "MASTERS": "zerofn.core.offload",
    "Conveyor": "zerofn.core.offload",
    "update_on_host": "zerofn.core.offload",
    "Entry": "zerofn.core.state_entries",
    "entries": "zerofn.core.state_entries",
    "rebuild": "zerofn.core.state_entries",
    "Averaging": "zerofn.core.wires",
    "CodedSharding": "zerofn.core.wires",
    "Sharding": "zerofn.core.wires",
    "adam_": "zerofn.kernels.adam",
    "adam_on_device": "zerofn.kernels.adam",
    "adam_operator": "zerofn.kernels.adam",
    "adam_update": "zerofn.kernels.adam",
    "has_kernel": "zerofn.kernels.adam",
    "implementation_for": "zerofn.kernels.adam",
    "BlockDraws": "zerofn.kernels.codes",
    "Codes": "zerofn.kernels.codes",
    "Draws": "zerofn.kernels.codes",
    "Coded": "zerofn.kernels.codes",
    "CodedAdam": "zerofn.kernels.coded_adam",
    "MasterAdam": "zerofn.kernels.master_adam",
    "FIRST_FORMAT": "zerofn.kernels.rounding",
    "FORMAT": "zerofn.kernels.rounding",
    "FORMAT_ENTRY": "zerofn.kernels.rounding",
    "known_formats": "zerofn.kernels.rounding",
    "leaf_key": "zerofn.kernels.rounding",
    "random_bits": "zerofn.kernels.rounding",
    "stochastic_round": "zerofn.kernels.rounding",
    "all_gather_into": "zerofn.ranks.collectives",
    "all_reduce_": "zerofn.ranks.collectives",
    "reduce_scatter_into": "zerofn.ranks.collectives",
    "mean_over": "zerofn.ranks.scalar_reduction",
    "check_batch": "zerofn.ranks.differentiable",
}


@_uncompiled  # else the compiler would trace an import
def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "AVERAGE",
    "COUNT",
    "FIRST_FORMAT",
    "FORMAT",
    "FORMAT_ENTRY",
    "MASTERS",
    "NOT_REDUCED",
    "OF_ITS_OWN",
    "ONE_OF_TWO",
    "OVERFLOW_LEAF",
    "SKIPPED_STEPS",
    "TINY",
    "Averaging",
    "AxisPlacement",
    "BlockDraws",
    "Coded",
    "CodedAdam",
    "CodedSharding",
    "Codes",
    "Context",
    "Conveyor",
    "Draws",
    "Dtypes",
    "Entry",
    "Facts",
    "Flat",
    "Group",
    "Layout",
    "Leaf",
    "LeafList",
    "LeafStep",
    "LeafSums",
    "Leaves",
    "Master",
    "MasterAdam",
    "Misplaced",
    "Owner",
    "Partial",
    "Prepared",
    "Ranks",
    "Replicate",
    "Room",
    "ScalarOrSchedule",
    "Scope",
    "Shard",
    "Sharding",
    "Spec",
    "State",
    "Through",
    "Transform",
    "TransformState",
    "Unrecorded",
    "UpdateOfStored",
    "View",
    "ViewOf",
    "Wire",
    "adam_",
    "adam_on_device",
    "adam_operator",
    "adam_update",
    "alike",
    "all_gather_into",
    "all_reduce_",
    "as_it_is",
    "as_transform",
    "at_most",
    "at_once",
    "bad_leaves",
    "bf16_of_master",
    "buckets",
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
    "check_seed",
    "codes_of_wire",
    "concrete",
    "context_of",
    "counter",
    "differentiated",
    "direction",
    "entries",
    "explain",
    "flatten",
    "fused_on_device",
    "fused_operator",
    "fused_update",
    "given",
    "has_kernel",
    "implementation_for",
    "in_batches",
    "kept_out_of_graphs",
    "kind_of",
    "known_formats",
    "labels_by_path",
    "laid_out",
    "leaf_key",
    "length",
    "like",
    "listener",
    "listening",
    "makes_parameters",
    "many_for_fused",
    "master_of",
    "may",
    "mean_over",
    "misfit",
    "moment_root",
    "narrow_mean",
    "no_state",
    "no_view",
    "no_weight",
    "not_finite",
    "not_finite_each",
    "number",
    "of_members",
    "on_stacks",
    "once",
    "optimizer",
    "over_leaves",
    "over_ranks",
    "plain",
    "plus",
    "plus_product",
    "plus_quotient",
    "random_bits",
    "rate_of",
    "rebuild",
    "recorded",
    "reduce_scatter_into",
    "residual_of_master",
    "root",
    "scaled",
    "select",
    "span",
    "squared_norm",
    "stochastic_round",
    "stored_fn_of",
    "straight_through",
    "sums_over_leaves",
    "taken_apart",
    "texts_of_labels",
    "times",
    "together",
    "towards",
    "transform",
    "tree_map",
    "typed",
    "unflatten",
    "unknown_keyword",
    "update_on_host",
    "users_line",
    "values_by_path",
    "watches_parameters",
    "weight_of",
    "where",
    "wide_copy",
    "width",
    "without_derivative",
    "without_elements",
    "wrapped",
    "wrapped_optimizer",
]
