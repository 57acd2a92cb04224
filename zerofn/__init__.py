"""Training steps as compositions of pure functions over trees of tensors.

Examples:
    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-3))
    >>> state = zf.init(tx, {"w": torch.zeros(2)})
    >>> step = zf.make_step(lambda params, x: ((params["w"] - x) ** 2).sum(), tx)
    >>> state, metrics = step(state, torch.ones(2))
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._compat.functorch import uncompiled as _uncompiled
from ._compat.saved_states import let_torch_load_states as _let_torch_load_states

if _TYPE_CHECKING:
    from . import collectives, extend, integrations, schedules
    from .contrib import curvature
    from .contrib.deepspeed import from_deepspeed as from_deepspeed
    from .contrib.deepspeed_checkpoint import load_deepspeed as load_deepspeed
    from .contrib.from_torch import from_torch as from_torch
    from .contrib.layer_drop import layer_drop as layer_drop
    from .contrib.profile import profile as profile
    from .contrib.replay import record as record
    from .contrib.replay import replay as replay
    from .contrib.sequence_parallel import sequence_mean as sequence_mean
    from .contrib.sequence_parallel import sequence_parallel as sequence_parallel
    from .contrib.torchopt import as_torchopt as as_torchopt
    from .contrib.unroll import unroll as unroll
    from .core.arguments import floats as floats
    from .core.chain import chain as chain
    from .core.chain import masked as masked
    from .core.chain import partition as partition
    from .core.guest import guest as guest
    from .core.leafwise import leafwise as leafwise
    from .core.state import State as State
    from .core.transform import Transform as Transform
    from .eager.materialize import materialize as materialize
    from .eager.optimizer import Optimizer as Optimizer
    from .eager.optimizer import attach as attach
    from .pure.api import bind as bind
    from .pure.api import full_params as full_params
    from .pure.api import gather as gather
    from .pure.api import global_norm as global_norm
    from .pure.api import init as init
    from .pure.api import update as update
    from .pure.api import vjp as vjp
    from .pure.step import make_step as make_step
    from .ranks.launch import RankError as RankError
    from .ranks.launch import launch as launch
    from .storage.checkpoints import Checkpoints as Checkpoints
    from .storage.loading import load as load
    from .storage.safetensors import export_safetensors as export_safetensors
    from .storage.safetensors import load_safetensors as load_safetensors
    from .storage.saving import save as save
    from .storage.tables import describe as describe
    from .storage.tables import plan as plan
    from .transforms.accumulate import accumulate as accumulate
    from .transforms.adabelief import adabelief as adabelief
    from .transforms.adafactor import adafactor as adafactor
    from .transforms.adam import adam as adam
    from .transforms.adam import adamw as adamw
    from .transforms.adan import adan as adan
    from .transforms.adaptive_clip import adaptive_clip as adaptive_clip
    from .transforms.add_noise import add_noise as add_noise
    from .transforms.adopt import adopt as adopt
    from .transforms.apply_if import apply_if as apply_if
    from .transforms.building_blocks import add_decayed_weights as add_decayed_weights
    from .transforms.building_blocks import scale_by_adam as scale_by_adam
    from .transforms.building_blocks import scale_by_lr as scale_by_lr
    from .transforms.building_blocks import trace as trace
    from .transforms.cautious import cautious as cautious
    from .transforms.centralize import centralize as centralize
    from .transforms.clip import clip_by_global_norm as clip_by_global_norm
    from .transforms.clip import clip_by_value as clip_by_value
    from .transforms.ema import ema as ema
    from .transforms.every import every as every
    from .transforms.lamb import lamb as lamb
    from .transforms.lars import lars as lars
    from .transforms.lion import lion as lion
    from .transforms.lookahead import lookahead as lookahead
    from .transforms.loss_scale import scale_loss as scale_loss
    from .transforms.low_precision_adam import low_precision_adam as low_precision_adam
    from .transforms.mars import mars as mars
    from .transforms.momo import scale_by_momo as scale_by_momo
    from .transforms.muon import muon as muon
    from .transforms.nadam import nadam as nadam
    from .transforms.offload import offload as offload
    from .transforms.polyak import scale_by_polyak as scale_by_polyak
    from .transforms.precision import precision as precision
    from .transforms.qk_clip import qk_clip as qk_clip
    from .transforms.quantize import quantize as quantize
    from .transforms.quantize import quantize_state as quantize_state
    from .transforms.radam import radam as radam
    from .transforms.reduce_on_plateau import reduce_on_plateau as reduce_on_plateau
    from .transforms.rmsprop import rmsprop as rmsprop
    from .transforms.sam import sam as sam
    from .transforms.schedule_free import schedule_free as schedule_free
    from .transforms.schedule_free import schedule_free_adamw as schedule_free_adamw
    from .transforms.sgd import sgd as sgd
    from .transforms.shampoo import shampoo as shampoo
    from .transforms.sharding import all_reduce as all_reduce
    from .transforms.sharding import local as local
    from .transforms.sharding import reduce_scatter as reduce_scatter
    from .transforms.sharding import shard as shard
    from .transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite
    from .transforms.soap import soap as soap
    from .transforms.watch import watch as watch

__version__ = "0.3.0"

_let_torch_load_states()


# The names of each module. It is imported when a name is asked for, so a program does not load what it does not use.
_NAMES_OF = {
    "contrib.profile": "profile",
    "contrib.replay": "record replay",
    "core.chain": "chain masked partition",
    "core.guest": "guest",
    "core.leafwise": "leafwise",
    "core.arguments": "floats",
    "core.state": "State",
    "core.transform": "Transform",
    "eager.optimizer": "attach Optimizer",
    "eager.materialize": "materialize",
    "contrib.layer_drop": "layer_drop",
    "contrib.sequence_parallel": "sequence_mean sequence_parallel",
    "contrib.deepspeed": "from_deepspeed",
    "contrib.deepspeed_checkpoint": "load_deepspeed",
    "contrib.torchopt": "as_torchopt",
    "pure.api": "bind full_params gather global_norm init update vjp",
    "pure.step": "make_step",
    "contrib.unroll": "unroll",
    "ranks.launch": "launch RankError",
    "storage.saving": "save",
    "storage.checkpoints": "Checkpoints",
    "storage.tables": "describe plan",
    "storage.safetensors": "export_safetensors load_safetensors",
    "storage.loading": "load",
    "transforms.adam": "adam adamw",
    "transforms.building_blocks": "add_decayed_weights scale_by_adam scale_by_lr trace",
    "transforms.clip": "clip_by_global_norm clip_by_value",
    "contrib.from_torch": "from_torch",
    "transforms.loss_scale": "scale_loss",
    "transforms.quantize": "quantize quantize_state",
    "transforms.sharding": "all_reduce local reduce_scatter shard",
    "transforms.schedule_free": "schedule_free schedule_free_adamw",
    "transforms.momo": "scale_by_momo",
    "transforms.polyak": "scale_by_polyak",
}
# Transforms that are alone in a module of their name.
_ALONE = (
    "accumulate adabelief adafactor adan adaptive_clip add_noise adopt apply_if cautious centralize ema every lamb "
    "lars lion lookahead low_precision_adam mars muon nadam offload precision qk_clip radam reduce_on_plateau rmsprop "
    "sam sgd shampoo skip_nonfinite soap watch"
)
_LATER = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_LATER |= {name: f"transforms.{name}" for name in _ALONE.split()}
_MODULES = {
    "collectives": "collectives",
    "curvature": "contrib.curvature",
    "extend": "extend",
    "integrations": "integrations",
    "schedules": "schedules",
    "testing": "testing",
}


@_uncompiled  # else the compiler would trace an import
def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _importlib.import_module(f".{_MODULES[name]}", __name__)
    if name not in _LATER:
        missing = _importlib.import_module("._errors", __name__).missing
        raise AttributeError(missing(__name__, name, __dir__()), name=name)
    found = globals()[name] = getattr(_importlib.import_module(f".{_LATER[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})


# For `from zerofn import *`.
__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
