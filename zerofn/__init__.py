"""Training steps as compositions of pure functions over trees of tensors.

>>> import torch, zerofn as zf
>>> tx = zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-3))
>>> state = zf.init(tx, {"w": torch.zeros(2)})
>>> step = zf.make_step(lambda params, x: ((params["w"] - x) ** 2).sum(), tx)
>>> state, metrics = step(state, torch.ones(2))
"""

from . import schedules as schedules
from ._accumulate import accumulate as accumulate
from ._adam import adam as adam
from ._adam import adamw as adamw
from ._attach import Optimizer as Optimizer
from ._attach import attach as attach
from ._checkpoint import load as load
from ._checkpoint import save as save
from ._clip import clip_by_global_norm as clip_by_global_norm
from ._clip import clip_by_value as clip_by_value
from ._compose import chain as chain
from ._compose import guest as guest
from ._compose import masked as masked
from ._compose import partition as partition
from ._deepspeed import from_deepspeed as from_deepspeed
from ._describe import describe as describe
from ._describe import plan as plan
from ._ema import ema as ema
from ._export import export_safetensors as export_safetensors
from ._factory import leafwise as leafwise
from ._launch import RankError as RankError
from ._launch import launch as launch
from ._loss_scale import scale_loss as scale_loss
from ._low_precision import low_precision_adam as low_precision_adam
from ._offload import offload as offload
from ._precision import precision as precision
from ._pure import bind as bind
from ._pure import full_params as full_params
from ._pure import init as init
from ._pure import make_step as make_step
from ._pure import update as update
from ._pure import vjp as vjp
from ._sgd import sgd as sgd
from ._shard import all_reduce as all_reduce
from ._shard import reduce_scatter as reduce_scatter
from ._shard import shard as shard
from ._state import State as State
from ._types import Transform as Transform
