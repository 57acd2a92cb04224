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
from zerofn._errors import bad_leaves as bad_leaves
from zerofn._errors import explain as explain
from zerofn._errors import kind_of as kind_of
from zerofn._errors import unknown_keyword as unknown_keyword
from zerofn._errors import users_line as users_line
from zerofn._profiler_ranges import listener as listener
from zerofn._profiler_ranges import listening as listening
from zerofn.core.arguments import TINY as TINY
from zerofn.core.arguments import check_betas as check_betas
from zerofn.core.arguments import check_count as check_count
from zerofn.core.arguments import check_dtype as check_dtype
from zerofn.core.arguments import check_flag as check_flag
from zerofn.core.arguments import check_lr as check_lr
from zerofn.core.arguments import check_number as check_number
from zerofn.core.arguments import check_seed as check_seed
from zerofn.core.arguments import given as given
from zerofn.core.arguments import misfit as misfit
from zerofn.core.arguments import no_weight as no_weight
from zerofn.core.arguments import weight_of as weight_of
from zerofn.core.chain import as_transform as as_transform
from zerofn.core.chain import chain as chain
from zerofn.core.chain import labels_by_path as labels_by_path
from zerofn.core.chain import of_members as of_members
from zerofn.core.chain import texts_of_labels as texts_of_labels
from zerofn.core.chain import values_by_path as values_by_path
from zerofn.core.chain import wrapped as wrapped
from zerofn.core.chain import wrapped_optimizer as wrapped_optimizer
from zerofn.core.context import Context as Context
from zerofn.core.context import Prepared as Prepared
from zerofn.core.context import RoundedToNearest as RoundedToNearest
from zerofn.core.context import Rounding as Rounding
from zerofn.core.context import check_format as check_format
from zerofn.core.context import format_of as format_of
from zerofn.core.elementwise import ElementSums as ElementSums
from zerofn.core.elementwise import Elementwise as Elementwise
from zerofn.core.executor import buckets as buckets
from zerofn.core.facts import AVERAGE as AVERAGE
from zerofn.core.facts import COUNT as COUNT
from zerofn.core.facts import OVERFLOW_LEAF as OVERFLOW_LEAF
from zerofn.core.facts import SKIPPED_STEPS as SKIPPED_STEPS
from zerofn.core.facts import Facts as Facts
from zerofn.core.facts import Scope as Scope
from zerofn.core.facts import Shadow as Shadow
from zerofn.core.halves import Joining as Joining
from zerofn.core.halves import UpdateOfStored as UpdateOfStored
from zerofn.core.halves import stored_fn_of as stored_fn_of
from zerofn.core.kernels_by_hand import LeafList as LeafList
from zerofn.core.layout import AxisPlacement as AxisPlacement
from zerofn.core.layout import Flat as Flat
from zerofn.core.layout import Layout as Layout
from zerofn.core.layout import Leaf as Leaf
from zerofn.core.layout import Leaves as Leaves
from zerofn.core.layout import Owner as Owner
from zerofn.core.layout import Partial as Partial
from zerofn.core.layout import Replicate as Replicate
from zerofn.core.layout import Shard as Shard
from zerofn.core.layout import span as span
from zerofn.core.layout import width as width
from zerofn.core.leaf_step import LeafStep as LeafStep
from zerofn.core.leafwise import transform as transform
from zerofn.core.number_graphs import Unrecorded as Unrecorded
from zerofn.core.optimizer import direction as direction
from zerofn.core.optimizer import like as like
from zerofn.core.optimizer import optimizer as optimizer
from zerofn.core.optimizer import rate_of as rate_of
from zerofn.core.optimizer import wide_copy as wide_copy
from zerofn.core.optimizer import with_kernel as with_kernel
from zerofn.core.optimizer import with_lists as with_lists
from zerofn.core.optimizer import without_elements as without_elements
from zerofn.core.pipeline import context_of as context_of
from zerofn.core.spec import NOT_REDUCED as NOT_REDUCED
from zerofn.core.spec import OF_ITS_OWN as OF_ITS_OWN
from zerofn.core.spec import ONE_OF_TWO as ONE_OF_TWO
from zerofn.core.spec import Misplaced as Misplaced
from zerofn.core.spec import Spec as Spec
from zerofn.core.spec import Through as Through
from zerofn.core.spec import as_it_is as as_it_is
from zerofn.core.spec import changes_gradients as changes_gradients
from zerofn.core.spec import makes_parameters as makes_parameters
from zerofn.core.spec import watches_parameters as watches_parameters
from zerofn.core.state import State as State
from zerofn.core.state import counter as counter
from zerofn.core.transform import ScalarOrSchedule as ScalarOrSchedule
from zerofn.core.transform import Transform as Transform
from zerofn.core.transform import TransformState as TransformState
from zerofn.core.transform import no_state as no_state
from zerofn.core.tree import flatten as flatten
from zerofn.core.tree import select as select
from zerofn.core.tree import tree_map as tree_map
from zerofn.core.tree import unflatten as unflatten
from zerofn.core.uncompiled import kept_out_of_graphs as kept_out_of_graphs
from zerofn.core.view import Dtypes as Dtypes
from zerofn.core.view import Ranks as Ranks
from zerofn.core.view import View as View
from zerofn.core.view import ViewOf as ViewOf
from zerofn.core.view import Wire as Wire
from zerofn.core.view import no_view as no_view
from zerofn.core.view import over_ranks as over_ranks
from zerofn.core.wrapper_names import buffers_in as buffers_in
from zerofn.kernels.formulas import at_most as at_most
from zerofn.kernels.formulas import moment_root as moment_root
from zerofn.kernels.formulas import once as once
from zerofn.kernels.formulas import plus as plus
from zerofn.kernels.formulas import plus_product as plus_product
from zerofn.kernels.formulas import plus_quotient as plus_quotient
from zerofn.kernels.formulas import rounded as rounded
from zerofn.kernels.formulas import times as times
from zerofn.kernels.formulas import towards as towards
from zerofn.kernels.fused_adam import alike as alike
from zerofn.kernels.fused_adam import formula_of_torch as formula_of_torch
from zerofn.kernels.fused_adam import fused_on_device as fused_on_device
from zerofn.kernels.fused_adam import fused_operator as fused_operator
from zerofn.kernels.fused_adam import fused_update as fused_update
from zerofn.kernels.fused_adam import has_end as has_end
from zerofn.kernels.fused_adam import many_for_fused as many_for_fused
from zerofn.kernels.fused_adam import plain as plain
from zerofn.kernels.fused_adam import takes_stored as takes_stored
from zerofn.kernels.fused_adam import typed as typed
from zerofn.kernels.lists import at_once as at_once
from zerofn.kernels.lists import in_batches as in_batches
from zerofn.kernels.lists import on_stacks as on_stacks
from zerofn.kernels.lists import over_leaves as over_leaves
from zerofn.kernels.lists import scaled as scaled
from zerofn.kernels.lists import sums_over_leaves as sums_over_leaves
from zerofn.kernels.masters import Master as Master
from zerofn.kernels.masters import Room as Room
from zerofn.kernels.masters import bf16_of_master as bf16_of_master
from zerofn.kernels.masters import laid_out as laid_out
from zerofn.kernels.masters import master_of as master_of
from zerofn.kernels.masters import residual_of_master as residual_of_master
from zerofn.kernels.masters import taken_apart as taken_apart
from zerofn.kernels.masters import together as together
from zerofn.kernels.norms import length as length
from zerofn.kernels.norms import not_finite as not_finite
from zerofn.kernels.norms import not_finite_each as not_finite_each
from zerofn.kernels.norms import squared_norm as squared_norm
from zerofn.kernels.plans import Plans as Plans
from zerofn.kernels.program import LeafSums as LeafSums
from zerofn.kernels.recording import certain as certain
from zerofn.kernels.recording import concrete as concrete
from zerofn.kernels.recording import differentiated as differentiated
from zerofn.kernels.recording import may as may
from zerofn.kernels.recording import number as number
from zerofn.kernels.recording import recorded as recorded
from zerofn.kernels.recording import root as root
from zerofn.kernels.recording import straight_through as straight_through
from zerofn.kernels.recording import where as where
from zerofn.kernels.recording import without_derivative as without_derivative
from zerofn.kernels.sides import by_shape as by_shape
from zerofn.kernels.sides import eigenvectors as eigenvectors
from zerofn.kernels.sides import numbers_of_leaves as numbers_of_leaves
from zerofn.kernels.sides import squares_of_one as squares_of_one
from zerofn.kernels.sides import squares_of_sides as squares_of_sides
from zerofn.ranks.group import Group as Group

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
    from zerofn.kernels.codes import BlockDraws as BlockDraws
    from zerofn.kernels.codes import Coded as Coded
    from zerofn.kernels.codes import Codes as Codes
    from zerofn.kernels.codes import Draws as Draws
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
_NAMES_OF = {
    "zerofn.core.narrow": "codes_of_wire narrow_mean",
    "zerofn.core.offload": "Conveyor MASTERS update_on_host",
    "zerofn.core.state_entries": "entries Entry rebuild",
    "zerofn.core.wires": "Averaging CodedSharding Sharding",
    "zerofn.kernels.codes": "BlockDraws Coded Codes Draws",
    "zerofn.kernels.rounding": "FIRST_FORMAT FORMAT FORMAT_ENTRY known_formats leaf_key random_bits stochastic_round",
    "zerofn.ranks.collectives": "all_gather_into all_reduce_ reduce_scatter_into",
    "zerofn.ranks.scalar_reduction": "mean_over",
    "zerofn.ranks.differentiable": "check_batch",
}
_LATER = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


@_uncompiled  # else the compiler would trace an import
def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
