"""Training steps as compositions of pure functions over trees of tensors.

>>> import torch, zerofn as zf
>>> tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-3))
>>> state = zf.init(tx, {"w": torch.zeros(2)})
>>> step = zf.make_step(lambda params, x: ((params["w"] - x) ** 2).sum(), tx)
>>> state, metrics = step(state, torch.ones(2))
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import collectives as collectives
from . import extend as extend
from . import schedules as schedules
from ._compat.compiler import uncompiled as _uncompiled
from .core.chain import chain as chain
from .core.chain import guest as guest
from .core.leafwise import leafwise as leafwise
from .core.metrics import floats as floats
from .core.partition import masked as masked
from .core.partition import partition as partition
from .core.state import State as State
from .core.transform import Transform as Transform
from .pure.api import bind as bind
from .pure.api import update as update
from .pure.api import vjp as vjp
from .pure.gather_trees import gather as gather
from .pure.gather_trees import global_norm as global_norm
from .pure.states import full_params as full_params
from .pure.states import init as init
from .pure.step import make_step as make_step
from .ranks.ulysses import sequence_mean as sequence_mean
from .transforms.accumulate import accumulate as accumulate
from .transforms.adam import adam as adam
from .transforms.adam import adamw as adamw
from .transforms.building_blocks import add_decayed_weights as add_decayed_weights
from .transforms.building_blocks import scale_by_adam as scale_by_adam
from .transforms.building_blocks import scale_by_lr as scale_by_lr
from .transforms.building_blocks import trace as trace
from .transforms.centralize import centralize as centralize
from .transforms.clip import clip_by_global_norm as clip_by_global_norm
from .transforms.clip import clip_by_value as clip_by_value
from .transforms.ema import ema as ema
from .transforms.from_torch import from_torch as from_torch
from .transforms.lion import lion as lion
from .transforms.loss_scale import scale_loss as scale_loss
from .transforms.low_precision_adam import low_precision_adam as low_precision_adam
from .transforms.muon import muon as muon
from .transforms.offload import offload as offload
from .transforms.precision import precision as precision
from .transforms.rmsprop import rmsprop as rmsprop
from .transforms.sgd import sgd as sgd
from .transforms.sharding import all_reduce as all_reduce
from .transforms.sharding import reduce_scatter as reduce_scatter
from .transforms.sharding import shard as shard
from .transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite

if _TYPE_CHECKING:
    from .analysis import curvature as curvature
    from .analysis.profile import profile as profile
    from .analysis.replay import record as record
    from .analysis.replay import replay as replay
    from .eager.attach import attach as attach
    from .eager.materialize import materialize as materialize
    from .eager.optimizer import Optimizer as Optimizer
    from .module.layer_drop import layer_drop as layer_drop
    from .module.sequence_parallel import sequence_parallel as sequence_parallel
    from .porting.deepspeed import from_deepspeed as from_deepspeed
    from .porting.deepspeed_checkpoint import load_deepspeed as load_deepspeed
    from .porting.torchopt_form import as_torchopt as as_torchopt
    from .pure.unroll import unroll as unroll
    from .ranks.local.launch import RankError as RankError
    from .ranks.local.launch import launch as launch
    from .storage.checkpoint import save as save
    from .storage.checkpoints import Checkpoints as Checkpoints
    from .storage.describe import describe as describe
    from .storage.load_safetensors import load_safetensors as load_safetensors
    from .storage.loading import load as load
    from .storage.plan import plan as plan
    from .storage.safetensors import export_safetensors as export_safetensors

__version__ = "0.1.0"


# Imported when they are asked for: a step needs none of them, and they would be a quarter of what is imported.
_LATER = {
    "attach": "eager.attach",
    "Optimizer": "eager.optimizer",
    "profile": "analysis.profile",
    "record": "analysis.replay",
    "replay": "analysis.replay",
    "materialize": "eager.materialize",
    "layer_drop": "module.layer_drop",
    "sequence_parallel": "module.sequence_parallel",
    "from_deepspeed": "porting.deepspeed",
    "load_deepspeed": "porting.deepspeed_checkpoint",
    "as_torchopt": "porting.torchopt_form",
    "unroll": "pure.unroll",
    "RankError": "ranks.local.launch",
    "launch": "ranks.local.launch",
    "save": "storage.checkpoint",
    "Checkpoints": "storage.checkpoints",
    "describe": "storage.describe",
    "plan": "storage.plan",
    "load_safetensors": "storage.load_safetensors",
    "load": "storage.loading",
    "export_safetensors": "storage.safetensors",
}
_MODULES = {"curvature": "analysis.curvature", "testing": "testing"}


@_uncompiled  # or the compiler would look into all that an import runs
def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _importlib.import_module(f".{_MODULES[name]}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module(f".{_LATER[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})


# For `from zerofn import *`.
__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
