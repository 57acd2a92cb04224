"""What a transform of one's own may need. The built-in ones are written with it as well.

A `Transform` is a record of functions; `transform` makes a function that builds one remember its arguments, so that
it prints, compares and pickles. A `View` says how the model sees what is stored, a `Wire` carries leaves over ranks,
`Facts` tell the runner what it may not ask, and `through` says where in a chain it may stand.

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

from ._errors import bad_leaves, explain
from .core.arguments import (
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
from .core.chain import as_transform, chain
from .core.coalesced_views import Like
from .core.dtypes import Dtypes
from .core.facts import AVERAGE, COUNT, OVERFLOW_LEAF, SKIPPED_STEPS, Facts, Scope
from .core.layout import Layout, Leaf, Leaves
from .core.leaf_arguments import LeafList, LeafStep
from .core.leafwise import transform
from .core.optimizer_transform import direction, like, optimizer, without_elements
from .core.partition import labels_by_path, of_members, texts_of_labels, values_by_path
from .core.placements import AxisPlacement, Flat, Owner, Partial, Replicate, Shard
from .core.row_sharding import span, width
from .core.spec import (
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
from .core.state import counter
from .core.state_prefetch import Conveyor
from .core.transform import ScalarOrSchedule, Transform, TransformState
from .core.tree import flatten, select, tree_map
from .core.update_context import Context, Prepared
from .core.views import Ranks, View, ViewOf, Wire, no_view, over_ranks
from .kernels.adam import adam_, adam_update
from .kernels.adam_operator import adam_operator, has_kernel
from .kernels.fused_operator import fused_operator, fused_update, many_for_fused
from .kernels.norms import not_finite, squared_norm
from .kernels.recording import certain, concrete, differentiated, number, recorded, root, straight_through
from .kernels.rounding import FIRST_FORMAT, FORMAT, FORMAT_ENTRY, known_formats, leaf_key, random_bits, stochastic_round
from .kernels.tensor_lists import alike, plain, typed
from .kernels.terms import moment_root, once, plus, plus_product, plus_quotient, scaled
from .ranks.collectives import all_gather_into, all_reduce_, reduce_scatter_into
from .ranks.group import Group
from .ranks.vmap_checks import check_batch

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
    "AxisPlacement",
    "Context",
    "Conveyor",
    "Dtypes",
    "Facts",
    "Flat",
    "Group",
    "Layout",
    "Leaf",
    "LeafList",
    "LeafStep",
    "Leaves",
    "Like",
    "Misplaced",
    "Owner",
    "Partial",
    "Prepared",
    "Ranks",
    "Replicate",
    "ScalarOrSchedule",
    "Scope",
    "Shard",
    "Spec",
    "Through",
    "Transform",
    "TransformState",
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
    "bad_leaves",
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
    "counter",
    "differentiated",
    "direction",
    "explain",
    "flatten",
    "fused_operator",
    "fused_update",
    "given",
    "has_kernel",
    "known_formats",
    "labels_by_path",
    "leaf_key",
    "like",
    "makes_parameters",
    "many_for_fused",
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
    "transform",
    "tree_map",
    "typed",
    "values_by_path",
    "watches_parameters",
    "weight_of",
    "width",
    "without_elements",
]
