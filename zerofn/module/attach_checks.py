"""Checks that a model can be attached, and that it has not changed since."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from .._compat.tensors import is_wrapper, registered, self_overlapping, sharing_memory
from .._errors import bad_leaves, explain
from ..core.layout import Layout, Leaves
from ..core.view import Dtypes
from ..core.wrapper_names import buffers_in, modules_of

# ----------------------------------------------------------------------------------------------------------------------
# These functions check a model when it is attached, and check later that it has not changed since.


# What must stay of a parameter beside its address. `attrgetter` is C, and every step asks of all parameters.
FIXED = attrgetter("shape", "dtype", "device", "requires_grad")
FROZEN_AT_ATTACH = "frozen when it was attached, so it has no state; requires_grad became True"


class Owner:
    """Marks a parameter as attached to an optimizer. The mark of a copied or unpickled parameter refers to none."""

    def __init__(self, opt: Any = None, leave: Callable[[], None] = lambda: None, strong: bool = False):
        self.opt: Callable[[], Any] = lambda: None
        self.leave = leave
        if opt is not None:
            # Strong over ranks: only detach(), on all of them at once, can give full parameters back.
            self.opt = (lambda: opt) if strong else weakref.ref(opt)

    def __reduce__(self):
        return Owner, ()


class Watch:
    """Remembers what must not change in a model while it is attached.

    Args:
        model: the model.
        layout: its leaves.
        params: its parameters by path, in their resident form.

    Attributes:
        frozen: names the leaves that have a state and do not require grad now; empty if there are none.
    """

    def __init__(self, model: nn.Module, layout: Layout, params: Leaves):
        self.paths = [leaf.path for leaf in layout.leaves]
        self.held = layout.trained
        self.params = params
        self.frozen = self._frozen()
        self.tensors = [params[path] for path in self.paths]
        with torch.DisableTorchFunctionSubclass():
            self.data = self._properties()
        # Submodules as well: one that is put in later would run and not be trained.
        self.modules = list(modules_of(model))
        self.registered = self._registered()
        self.ids = self._ids()

    def check(self) -> None:
        """Refuse a model that has changed: it would be trained wrongly without an error.

        Leaves that have a state may be frozen and unfrozen: autograd computes no gradient for a frozen one, and a leaf
        without a gradient keeps its value and its state, as in torch.optim.

        Raises:
            RuntimeError: everything that has changed is named.
        """
        with torch.DisableTorchFunctionSubclass():
            # All leaves at once: in nearly all steps nothing has changed.
            same = self._properties() == self.data
            bad = [] if same else [(path, why) for path, why in self._reasons() if why]
            if not same and not bad:
                # Frozen or unfrozen; or sharded parameters that the user gave other memory, in which they are stored
                # since (`adopted`).
                self.data = self._properties()
                self.frozen = self._frozen()
        changed: list[tuple[str, str]] = []
        if self._ids() != self.ids:
            pairs = zip(self.registered, self._registered(), strict=True)
            found = [path for (name, before), (_, now) in pairs for path in _changed(name, before, now)]
            changed = [(path, "added, removed or replaced") for path in found]
        if bad or changed:
            right = "opt.detach() before the change and opt = zf.attach(model, tx) after it"
            if changed:
                right += ":\n         attach after adding adapters"
            if any(reason == FROZEN_AT_ATTACH for _, reason in bad):
                right += (
                    ".\n         To unfreeze leaves between steps: zf.attach(model, tx, hold_frozen=True), which makes "
                    "states for frozen leaves too;\n         or attach first and freeze after it"
                )
            raise RuntimeError(bad_leaves("the model changed after it was attached", bad + changed, right))

    def _frozen(self) -> str:
        found = [path for path in self.held if not self.params[path].requires_grad]
        return f"frozen: {' '.join(found)}" if found else ""

    # By the methods of `dict`, since a dict of parameters may give views by its own.

    def _registered(self) -> list[tuple[str, dict[str, Any]]]:
        """Two entries for each module, by its name: its parameters, and its submodules."""
        return [(name, dict.copy(found)) for name, m in self.modules for found in registered(m)[:2]]

    def _ids(self) -> list[list[int]]:
        """The ids of all parameters and submodules."""
        return [[*map(id, dict.values(found))] for _, m in self.modules for found in registered(m)[:2]]

    def _properties(self) -> list[tuple[int, tuple[Any, ...]]]:
        return list(zip(map(Tensor.data_ptr, self.tensors), map(FIXED, self.tensors), strict=True))

    def _reasons(self) -> Iterator[tuple[str, str]]:
        held = set(self.held)
        for path, p, (address, (*fixed, _)) in zip(self.paths, self.tensors, self.data, strict=True):
            yield path, _reason(p, address, *fixed, held=path in held)


def _reason(p: Tensor, address: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, held: bool) -> str:
    if p.dtype != dtype or p.device != device:
        return f"moved to {p.dtype} on {p.device}; attached as {dtype} on {device}"
    if p.data_ptr() not in (address, vars(p).get("adopted")) or p.shape != shape:
        return "its data were replaced; write in place: p.copy_(...) under torch.no_grad()"
    return FROZEN_AT_ATTACH if p.requires_grad and not held else ""


def _changed(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Paths of parameters and submodules that have changed. Submodules without parameters may come and go."""
    names = sorted(n for n in before.keys() | now.keys() if before.get(n) is not now.get(n))
    of_parameters = [n for n in names if _has_parameters(before.get(n)) or _has_parameters(now.get(n))]
    return [f"{name}.{n}".lstrip(".") for n in of_parameters]


def _has_parameters(x: nn.Module | nn.Parameter | None) -> bool:
    return next(x.parameters(), None) is not None if isinstance(x, nn.Module) else x is not None


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
        there = {id(x) for x in model.buffers()}
        for old, new in casts:
            if id(new) in there and old.shape == new.shape:
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
