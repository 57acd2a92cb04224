"""`model.state_dict()` and `load_state_dict` of an attached model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from torch import Tensor, nn

from .._compat.tensors import registered
from .._errors import bad_leaves
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..ranks.dtensor import as_local, is_distributed, of_this_rank
from ..sharded.gather_on_use import Units
from .forward_hooks import Hook

# State dicts of a sharded model have its DTensors. torch's DCP saves and loads them in place, and full tensors can be
# loaded: each rank takes its rows.
#
# In a file that one rank writes they are useless, and who finds that out has lost the model, so pickling them is
# refused. Gathering instead would hang the many programs that save on one rank alone. The functions of
# `torch.distributed.checkpoint.state_dict`, which every rank calls, get DTensors of torch's own class.
#
# There are two forms because each of them alone loses a program. If all got torch's class,
# `if rank == 0: torch.save(model.state_dict(), file)` would write the rows of one rank, and the error would come when
# the file is loaded; and `model.state_dict()[name].norm().item()` would be another number on each rank. If all got
# Faces, `dcp.async_save` would fail, which asks each tensor for its memory and copies its attributes, with them the
# process group of a Face; so would `torch.save(get_model_state_dict(model), file_of_the_rank)`, which pickles. torch
# calls `model.state_dict()` for its own function without an argument that says so: only the caller's name tells.


# The module of `get_model_state_dict`, which may not be loaded.
DCP_STATE_DICT = "torch.distributed.checkpoint.state_dict"


def _calling_function() -> str:
    """The name of the function of torch's DCP that asks for a state dict; `""` if none does."""
    frame = sys._getframe(2) if DCP_STATE_DICT in sys.modules else None
    name = ""
    while frame is not None:
        # Of several, the outermost one is kept: the user called that one.
        if frame.f_globals.get("__name__") == DCP_STATE_DICT:
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def hook_state_dicts(
    model: nn.Module,
    params: Leaves,
    pipe: Pipeline,
    units: Units | None,
    suspended: Callable[[], bool],
    undo: list[Callable[[], object]],
    store: Callable[[str, Tensor], object] | None = None,
    copies: Collection[str] = (),
) -> None:
    """Make state dicts of a sharded model return DTensors, inside `opt.gathered()` full tensors; and load both.

    Where the numbers that are stored are not those that the model computes with, state dicts are refused outside of
    `opt.gathered()`.

    Args:
        model: the model.
        params: its parameters by path.
        pipe: its pipeline.
        units: gathers its parameters, if they are sharded.
        suspended: whether parameters are now what the model computes with, inside `opt.gathered()`.
        undo: gets functions that remove the hooks.
        store: stores values of a parameter that is a copy in another dtype. What is loaded would be rounded in it.
        copies: the paths of such parameters.
    """
    views = [view for view in pipe.road.at_use if view.renumbers]
    other = {leaf.path for leaf in pipe.layout.leaves if any([view.changes(leaf) for view in views])}
    if units is not None:
        other |= {path for path, p in params.items() if not is_distributed(p)}
    hooked = [leaf for leaf in pipe.layout.leaves if units is not None or leaf.path in other or leaf.path in copies]
    leaves = {id(params[leaf.path]): leaf for leaf in hooked}

    def give(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        caller = _calling_function()
        for name, leaf in own.items():
            entry: Any = state.get(prefix + name)
            x = entry
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
                continue
            if units is None and leaf.path not in other:
                continue
            if suspended():
                state[prefix + name] = as_local(x)
            elif leaf.path in other:
                _refuse(f"{caller or 'model.state_dict'}(...)", other)
            elif caller:
                from ..sharded.face import as_torchs

                # torch's class can be pickled, since each rank may torch.save its own. A 0-d tensor has no rows.
                state[prefix + name] = as_torchs(x) if x.ndim else entry.full_tensor()

    def take(own: dict[str, Leaf], module: nn.Module, state: dict[str, Any], prefix: str, local: Any, *_: Any) -> None:
        if units is not None:
            # With `assign=True` torch would put other parameters in. Their values are taken instead.
            local.pop("assign_to_params_buffers", None)
        for name, leaf in {} if suspended() else own.items():
            x = state.get(prefix + name)
            if isinstance(x, Tensor) and leaf.path in other:
                _refuse("model.load_state_dict(...)", other)
            if leaf.path in copies:
                if store is not None and isinstance(x, Tensor) and not is_distributed(x) and not x.is_meta:
                    store(leaf.path, x)
                continue
            if is_distributed(x) and type(x).__module__ != FACES:
                assert pipe.gathering is not None
                rows = of_this_rank(x, [pipe.gathering.group])  # type: ignore[arg-type]
                if isinstance(rows, str):
                    right = "with opt.gathered(): torch.save(model.state_dict(), f) on one rank, and that file on "
                    right += "every\nrank; torch.distributed.checkpoint.save and load; or zf.save(directory, opt)"
                    raise ValueError(bad_leaves("model.load_state_dict of a sharded model", [(leaf.path, rows)], right))
                state[prefix + name] = rows

    for module in model.modules():
        own = {n: leaves[id(p)] for n, p in dict.items(registered(module)[0]) if id(p) in leaves}
        if own:
            undo.append(module.register_state_dict_post_hook(Hook(functools.partial(give, own))).remove)
            undo.append(module.register_load_state_dict_pre_hook(Hook(functools.partial(take, own))).remove)


# The module of DTensors that stand for sharded parameters, which may not be loaded.
FACES = "zerofn.sharded.face"


def _refuse(how: str, other: Collection[str]) -> NoReturn:
    bad = [(path, "the model sees it through a view of one's own, or a wire of one's own shards it") for path in other]
    raise RuntimeError(
        bad_leaves(
            f"{how} of an attached model whose stored parameters are not what it computes with",
            sorted(bad),
            "with opt.gathered(): the same, on every rank; zf.full_params(tx, opt.state);\n"
            "         zf.export_safetensors(path, opt), zf.load_safetensors(path, like=opt); zf.save(directory, opt)",
        )
    )
