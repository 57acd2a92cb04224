"""Checks before a state is made: no NaN, and the same pipeline and parameters on all ranks."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .._compat.functorch import constant, is_wrapped
from .._errors import bad_leaves, explain, users_line
from ..kernels.recording import concrete
from ..ranks.backend import gather_objects
from ..ranks.group import Group
from ..ranks.process_groups import world_size
from ..ranks.rendezvous import together
from .layout import Leaves
from .pipeline import Pipeline, check_first_views, init_transforms
from .transform import TransformState
from .wire_agreement import unequal_wires, wires_over


def agree_on_start(pipe: Pipeline, tensors: Leaves, call: str) -> None:
    """Raise on NaN, and on every rank, naming what differs where, if ranks have other pipelines, trees or values.

    Ranks that start from different random parameters would otherwise train a mixture of them without an error.
    """
    check_finite(tensors)
    check_first_views(pipe, tensors)
    agree_on_chain(pipe, call)
    if pipe.groups:
        right = "torch.manual_seed(0) before the model is made, or the same checkpoint on every rank"
        agree_on_fingerprints(pipe.groups, {path: fingerprint(x) for path, x in tensors.items()}, right)
    if pipe.model:
        whole = [leaf.path for leaf in pipe.layout.leaves if leaf.within is not None and not leaf.within.cut]
        right = "torch.manual_seed(0) before the model is made and parallelize_module, on every rank"
        agree_on_fingerprints(pipe.model, {path: fingerprint(tensors[path]) for path in whole}, right)


def tell_unreduced(pipe: Pipeline, call: str) -> None:
    """Warn where there are several ranks, no transform reduces gradients over them, and none says that it is meant.

    Each rank warns: where another one's chain does reduce, that rank waits for this one.
    """
    size = world_size()
    if size == 1 or not unreduced(pipe) or math.prod([group.size for group in pipe.model]) >= size:
        return
    wrong = f"{call} on {size} ranks, and no transform reduces gradients over them"
    why = f"each rank steps by its own gradients, so {size} different models are trained;\n"
    why += "a rank whose chain does reduce waits for this one"
    right = (
        "zf.chain(zf.all_reduce(), ...) for data parallelism, or shard or reduce_scatter, on every rank;\n"
        "zf.chain(zf.local(), ...) where it is meant, or DistributedDataParallel averages gradients"
    )
    warnings.warn(explain(wrong, why, right), UserWarning, stacklevel=users_line())


def unreduced(pipe: Pipeline) -> bool:
    """Whether no transform reduces gradients over ranks, nor says that they are to stay each rank's own."""
    behind = pipe.stations[-1].gives.values()
    return bool(behind) and not any([spec.over_ranks or spec.local_by for spec in behind])


def agree_on_chain(pipe: Pipeline, call: str) -> None:
    """Raise on every rank if ranks have other pipelines, or other trees of parameters.

    Args:
        pipe: the pipeline.
        call: as the user writes it. Ranks that are late are waited for without a limit, as they may be loading data;
            ranks that wait in another call, as after an error that one rank alone has caught, raise an error.
    """
    if not pipe.step_groups:
        return
    for group in pipe.step_groups:
        together(call, group.ranks, f"{call} on every rank", math.inf)
    # The address of a function differs between processes that run the same code.
    tx = re.sub(r" at 0x[0-9a-f]+", "", repr(pipe.tx))
    leaves = pipe.layout.leaves
    tree = "\n".join([f"{x.path} {tuple((x.within or x).shape)} {x.dtype} {x.trainable}" for x in leaves])
    texts = {
        "the pipeline": f"{', '.join([p.name for p in pipe.parts])} #{_digest(tx)}",
        "the tree of parameters": f"{len(leaves)} leaves #{_digest(tree)}",
    }
    for group in pipe.step_groups:
        wires = {"what wires send": wires_over(pipe, group)}
        agree_on_all(texts | wires, group, {"what wires send": partial(unequal_wires, pipe, group)})


def check_finite(tensors: Leaves) -> None:
    """Raise a ValueError for NaN in parameters: no training removes it."""
    bad = [
        (p, f"{int(torch.isnan(x).sum())} of {x.numel()} elements are NaN") for p, x in tensors.items() if _has_nan(x)
    ]
    if bad:
        raise ValueError(
            bad_leaves("NaN in parameters", bad, "initialise them (torch.nn.init) or load a good checkpoint")
        )


def _has_nan(x: Tensor) -> bool:
    return not x.is_meta and not is_wrapped(x) and concrete(x) and bool(torch.isnan(x.detach()).any())


def agree_on_fingerprints(
    groups: Sequence[Group], prints: dict[str, int], right: str, failure: Exception | None = None
) -> None:
    """Raise on every rank if a leaf has another fingerprint on another rank.

    Args:
        groups: the ranks, along each axis.
        prints: fingerprints by path.
        right: the right code, for the message.
        failure: the error because of which this rank has no fingerprints. It is raised here, and named on the others.
    """
    problem = failure
    for group in groups:
        # Gathered along every axis, after a failure too: ranks along the others wait for this one.
        every = gather_objects((None if problem is None else f"{problem}", prints), group)
        lost = [f"rank {r}: {why}" for r, (why, _) in zip(group.ranks, every, strict=True) if why is not None]
        if lost:
            problem = problem or ValueError("parameters could not be initialised on " + "; ".join(lost))
            continue
        bad = []
        for path, first in every[0][1].items():
            other = [r for r, (_, found) in zip(group.ranks, every, strict=True) if found[path] != first]
            if other:
                bad.append((path, f"rank {', '.join(map(str, other))} has other values than rank {group.ranks[0]}"))
        if bad:
            problem = ValueError(bad_leaves("ranks start from different parameters", bad, right))
    if problem is not None:
        raise problem


def agree_on_gradients(pipe: Pipeline, grads: Leaves) -> None:
    """Raise on every rank if gradients that the chain takes for averaged over ranks differ between them.

    As those that torch.func.grad makes of each rank's own loss: replicas would part without an error. One message along
    each axis, in the first update of a state: a loop makes its gradients alike in all steps.
    """
    averaged = [view for view in pipe.road.pulled if view.wire is not None and not view.wire.cuts]
    prints = {
        leaf.path: fingerprint(constant(g) if is_wrapped(g) else g) if (g := grads.get(leaf.path)) is not None else None
        for leaf in pipe.layout.trainable
    }
    bad: dict[str, str] = {}
    for view in averaged:
        assert view.wire is not None
        group = view.wire.group
        every = gather_objects(prints, group)
        for path, first in every[0].items():
            other = [r for r, found in zip(group.ranks, every, strict=True) if found[path] != first]
            if other:
                bad[path] = f"rank {', '.join(map(str, other))} has another one than rank {group.ranks[0]}"
    for group in pipe.groups if averaged and len(pipe.groups) > 1 else ():
        # Ranks along the other axes have other parts, and wait for this one.
        for found in gather_objects(bad, group):
            bad = {**found, **bad}
    if bad:
        names = ", ".join([view.name for view in averaged])
        wrong = f"zf.update with gradients that differ between ranks, which {names} takes for averaged over them"
        right = (
            "step = zf.make_step(loss_fn, tx); or gradients of zf.vjp(loss_fn, tx, state, x), or of\n"
            "         torch.func.grad(zf.bind(loss_fn, tx, state))(state.params, x), which are averaged;\n"
            f"         zf.local() in place of {names}, if each rank is to train a model of its own"
        )
        raise ValueError(bad_leaves(wrong, sorted(bad.items()), right))


def first_states(
    pipe: Pipeline, stored: Leaves, tell: Callable[[bool], list[int]], call: str
) -> dict[str, TransformState]:
    """The first states of all transforms; on every rank, or on none.

    Args:
        pipe: of the transforms.
        stored: parameters.
        tell: a collective: takes whether this rank has failed, and returns the ranks that have.
        call: as the user writes it, for messages.

    Raises:
        Exception: what a transform raised on this rank.
        RuntimeError: on the others.
    """
    states: dict[str, TransformState] = {}
    failure: BaseException | None = None
    try:
        states = init_transforms(pipe, stored)
    except BaseException as error:
        # Ctrl-C too: the others wait for this rank.
        failure = error
    bad = tell(failure is not None)
    if failure is None and bad:
        why = "a transform raised there, which says more, and all ranks make first states together"
        right = f"{call} again, with a transform that does not raise"
        failure = RuntimeError(explain(f"first states failed on rank {', '.join(map(str, bad))}", why, right))
    if failure is not None:
        raise failure
    return states


def failed_ranks(groups: Sequence[Group], failed: bool) -> list[int]:
    """The ranks that have failed. Gathered along one axis after the other, each with the result of the one before."""
    bad: list[int] = []
    for group in groups:
        answers = zip(group.ranks, gather_objects(failed or bool(bad), group), strict=True)
        bad = bad or [rank for rank, failed_there in answers if failed_there]
    return bad


def fingerprint(x: Tensor) -> int:
    """A hash of a tensor's bits and their places. Zero for a meta tensor, and under `torch.func.vmap`."""
    if x.is_meta or not x.numel() or not concrete(x):
        return 0
    flat = x.detach().contiguous().reshape(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    # In pieces, since the products are up to four times as large as the tensor. Sums wrap.
    for i, piece in enumerate(flat.view(kind).split(1 << 18)):
        bits = piece.to(torch.int64)
        place = torch.arange(1, len(bits) + 1, device=bits.device)
        total += (i + 1) * ((bits * place).sum() * 31 + bits.sum())
    return int(total)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def agree_on_all(texts: dict[str, str], group: Group, messages: Mapping[str, Callable[[], str]]) -> None:
    """Raise a `ValueError` on *every* rank unless all hold the same texts (a digest, a name), by the same keys.

    The message names the first that differs. Where that has an entry in `messages`, every rank calls it for the
    message; an empty one is no error.

    >>> agree_on_all({"the pipeline": "shard,adam"}, Group(), {})
    """
    answers = gather_objects(tuple(texts.values()), group)
    if len(set(answers)) == 1:
        return
    by_key = dict(zip(texts, zip(*answers, strict=True), strict=True))
    what = next(what for what, found in by_key.items() if len(set(found)) > 1)
    if what in messages:
        if message := messages[what]():
            raise ValueError(message)
        return
    raise ValueError(
        f"the ranks disagree on {what}: {_by_value(by_key[what], group)}; "
        "build it from the same values on every rank (and seed whatever is random alike)"
    )


def _by_value(values: Sequence[str], group: Group) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    # Long values are cut, but never so that two different ones look the same.
    width = 16
    while width < max(map(len, holders)) and len({v[:width] for v in holders}) < len(holders):
        width *= 2
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        f"ha{'ve' if len(ranks) > 1 else 's'} {v[:width] + ('...' if len(v) > width else '')!r}"
        for v, ranks in holders.items()
    )
