"""Checks that a model can be attached; casts its buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from .._compat.tensors import is_wrapper, registered, self_overlapping, sharing_memory
from .._errors import bad_leaves, explain
from ..core.layout import Layout
from ..core.pipeline import Pipeline
from ..core.view import Dtypes
from ..core.wrapper_names import buffers_in, modules_of
from ..ranks.dtensor import is_distributed

# ----------------------------------------------------------------------------------------------------------------------
# These functions check a model when it is attached.


class Owner:
    """Marks a parameter as attached to an optimizer. The mark of a copied or unpickled parameter refers to none."""

    def __init__(self, opt: Any = None, leave: Callable[[], None] = lambda: None, strong: bool = False):
        self.opt: Callable[[], Any] = lambda: None
        self.leave = leave
        if opt is not None:
            # Over ranks the reference is strong: only detach() on all of them at once can restore full parameters.
            self.opt = (lambda: opt) if strong else weakref.ref(opt)

    def __reduce__(self):
        return Owner, ()


def check_free(named: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that are attached to another optimizer."""
    taken = [(n, "attached already") for n, p in named.items() if _taken(p)]
    if taken:
        raise ValueError(
            bad_leaves(
                "attach: parameters belong to another optimizer; two would both update them",
                taken,
                "opt.detach() on the first, or one pipeline for both with zf.partition",
            )
        )


def _taken(p: nn.Parameter) -> bool:
    owner = getattr(p, "_zerofn_owner", None)
    if owner is None or owner.opt() is not None:
        return owner is not None
    # Its optimizer was dropped without detach(): its hooks would act a second time.
    owner.leave()
    return False


def check_initialised(named: dict[str, nn.Parameter], where: str) -> None:
    """Refuse parameters of lazy modules before their first call, which have no shapes."""
    lazy = [(n, type(p).__name__) for n, p in named.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        right = f"model(example) once, which gives lazy modules their shapes, and zf.{where}(...) after it"
        raise ValueError(bad_leaves(f"{where}: parameters are not initialised yet", lazy, right))


def check_not_distributed(named: dict[str, nn.Parameter]) -> None:
    """Refuse DTensors that FSDP2 does not gather, as torch's tensor parallelism makes them."""
    lie: list[tuple[str, Any]] = [(path, p) for path, p in named.items() if is_distributed(p)]
    bad = [(path, f"a DTensor over ranks {p.device_mesh.mesh.tolist()}") for path, p in lie]
    if bad:
        raise ValueError(
            bad_leaves(
                "attach: parameters are DTensors already, as parallelize_module makes them",
                bad,
                "fully_shard(block, mesh=mesh['dp']) of each block, and of the model, after parallelize_module, also\n"
                "         where mesh['dp'] has one rank; and zf.attach(model, tx) with a tx without shard",
            )
        )


def check_complex_ways(layout: Layout, fully_sharded: bool, made: bool) -> None:
    """Refuse complex parameters where they would have to be cut by others, or made anew."""
    if not fully_sharded and not made:
        return
    where, right = "zf.materialize", "the model on its device, and zf.attach(model, tx)"
    if fully_sharded:
        where, right = (
            "attach of a model of fully_shard",
            "zf.attach(model, zf.chain(zf.shard(), ...)) of the plain model",
        )
    bad = [(leaf.path, f"{leaf.dtype.to_complex()}") for leaf in layout.complexes]
    raise ValueError(bad_leaves(f"{where}: complex parameters", bad, right))


def check_trainable(layout: Layout) -> None:
    """Refuse a model without a trainable parameter: no step could ever be made."""
    if not layout.leaves:
        why, right = "there is nothing to train", "zf.attach(model, tx) of a model that has parameters"
        raise ValueError(explain("attach: the model has no parameters", why, right))
    if not any(leaf.trainable for leaf in layout.leaves):
        first = ", ".join(leaf.path for leaf in layout.leaves[:3])
        raise ValueError(
            explain(
                f"attach: no parameter requires a gradient ({len(layout.leaves)} are frozen: {first}, ...)",
                "nothing would ever change",
                "p.requires_grad_(True) for those to be trained, and adapters added, before zf.attach; a model that "
                "is\nnot trained needs no optimizer",
            )
        )


def check_hookable(model: nn.Module) -> None:
    """Refuse TorchScript modules, which run and keep their parameters outside of Python."""
    found: list[tuple[str, str]] = []
    for name, m in modules_of(model):
        if isinstance(m, torch.jit.ScriptModule) and not any(name.startswith(f"{n}.") or not n for n, _ in found):
            found.append((name, f"{type(m).__name__} of {m.original_name}"))
    if found:
        raise ValueError(
            bad_leaves(
                "attach: modules were compiled by torch.jit: they take no hooks, which a pipeline needs to see inputs, "
                "outputs and parameters",
                found,
                "zf.attach(model, tx) on the modules as they were before torch.jit, and after training "
                "torch.jit.script(opt.detach());\n         or torch.compile, whose modules can be attached",
            )
        )


def check_alone(model: nn.Module, over_ranks: bool) -> bool:
    """Whether DistributedDataParallel averages gradients of the model, or of some of its modules.

    Raises:
        ValueError: the pipeline reduces too: gradients would be averaged twice, or DDP would find shards.
    """
    wrapped = [n for n, m in modules_of(model) if isinstance(m, nn.parallel.DistributedDataParallel)]
    if wrapped and over_ranks:
        raise ValueError(
            bad_leaves(
                "attach: modules are wrapped in DistributedDataParallel, and the pipeline reduces gradients as well",
                [(n, "DistributedDataParallel") for n in wrapped],
                "zf.attach(model, tx) on the model itself; all_reduce is what DistributedDataParallel does",
            )
        )
    return bool(wrapped)


def check_memory(params: dict[str, Tensor]) -> None:
    """Refuse parameters without memory of their own.

    Two parameters on one memory, or two elements at one address, would each be updated by both gradients.
    """
    shared = sharing_memory(params)
    bad = []
    for path, p in params.items():
        if is_wrapper(p):
            bad.append(
                (path, f"a {type(p.data).__name__}, which is not plain memory: attach the model before that is made")
            )
        elif p.is_meta:
            bad.append((path, "on the meta device: it has no data yet; zf.materialize(model, tx) makes it"))
        elif self_overlapping(p):
            bad.append((path, f"of strides {p.stride()}: elements share memory; nn.Parameter(x.contiguous())"))
        elif path in shared:
            why = f"shares memory with {shared[path]} but is another Parameter; tie them: a.weight = b.weight"
            bad.append((path, why))
    if bad:
        raise ValueError(
            bad_leaves("attach: parameters cannot be stored", bad, "one Parameter object for one piece of memory")
        )


def needs_boundary(pipe: Pipeline) -> bool:
    """Whether modules need hooks: for a cast, a loss scale or a gather.

    Inputs are cast to the parameters' dtype in forward even if parameters are stored in it.
    """
    return pipe.scaled or pipe.dtypes.seen_otherwise or any(v.stages for v in pipe.views_at_use.values())


# ----------------------------------------------------------------------------------------------------------------------
# These functions cast buffers of a model to other dtypes for as long as it is attached.


def dtypes_of_buffers(model: nn.Module, dtypes: Dtypes) -> dict[str, torch.dtype]:
    """By name, the new dtype of each floating-point buffer; a buffer at several places has its first name."""
    own = {name: x.dtype for name, x in buffers_in(model) if x.is_floating_point()}
    given = dtypes.buffers(list(own)) if dtypes.buffers is not None else {}
    return {name: given.get(name) or dtype for name, dtype in own.items()}


@torch.no_grad()
def cast_buffers(model: nn.Module, wanted: Mapping[str, torch.dtype], undone: list[Callable[[], object]]) -> None:
    """Exchange buffers for casts of them, as `module.to(dtype)` does. Functions put into `undone` undo it.

    A cast at each lookup would lose what forward writes into the copy.
    """
    casts = [(x, x.to(wanted[name])) for name, x in buffers_in(model) if x.dtype != wanted.get(name, x.dtype)]

    @torch.no_grad()
    def undo() -> None:
        ids = {id(x) for x in model.buffers()}
        for old, new in casts:
            if id(new) in ids and old.shape == new.shape:
                # An element that was not written keeps its old bits.
                same = old.to(new.dtype) == new
                old.copy_(torch.where(same, old, new.to(old.dtype)))
        _replace(model, {id(new): old for old, new in casts if old.shape == new.shape})

    undone.append(undo)
    _replace(model, {id(old): new for old, new in casts})


def _replace(model: nn.Module, others: Mapping[int, Tensor]) -> None:
    """Exchange buffers, by id, at every place where the model has them."""
    for module in model.modules():
        buffers: dict[str, Any] = registered(module)[2]
        for name, x in list(buffers.items()):
            if x is not None and id(x) in others:
                buffers[name] = others[id(x)]
