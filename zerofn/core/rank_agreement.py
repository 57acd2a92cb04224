"""Ranks compare at the start the things that must be equal: the chain, values, wires."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat.functorch import constant, is_wrapped
from .._compat.tensors import version
from .._errors import bad_leaves, explain, kind_of, users_line
from ..kernels.recording import concrete
from ..kernels.rounding import leaf_key, stream_key
from ..ranks.backend import axes_of_root, gather_objects, not_sent_from
from ..ranks.group import Group, Traffic
from ..ranks.process_groups import reduces_nothing, together, world_size
from .layout import Leaf, Leaves
from .pipeline import Pipeline, init_transforms
from .transform import TransformState
from .view import View, Wire

# ----------------------------------------------------------------------------------------------------------------------
# Ranks compare the lengths of all messages before a state is made, because a backend ends the process on a mismatch.
#
# Nothing is sent to compute the lengths: each wire runs its collectives on tensors without memory, over a group that
# sends nothing. A run pays one more line in the message that ranks exchange at the start anyway. What a wire makes of
# received data is checked in the same way: with another length, torch would raise in the middle of the model.


META = torch.device("meta")
RIGHT = "a wire whose lengths follow from the leaf and the number of ranks alone: pad what is sent to the longest part"


def wires_over(pipe: Pipeline, group: Group) -> str:
    """The sizes that wires send over a group, as text: equal on all ranks if they fit together."""
    lines, leaves, suffix = [], pipe.layout.leaves, f"on rank {group.rank}"
    for view in _over(pipe, group):
        lines.append(f"{view.name} {_sent(view, leaves)}")
        lines += [f"{path} {suffix}" for path, _ in _gaps(view, leaves)]
        lines += [f"{path} {suffix}: {text}" for path, text in misjoined(view, leaves)]
    return ", ".join(lines)


def unequal_wires(pipe: Pipeline, group: Group) -> str:
    """The message if wires do not fit together, the same on every rank of the group. All ranks call it.

    It is empty if that cannot be known, because a wire must see numbers on some ranks.
    """
    views, leaves = _over(pipe, group), pipe.layout.leaves
    mine = {v.name: (_by_leaf(v, leaves), dict(_gaps(v, leaves)), misjoined(v, leaves)) for v in views}
    every = gather_objects(mine, group)
    messages = []
    for view in views:
        rows = []
        for leaf in leaves:
            sent = [answer[view.name][0][leaf.path] for answer in every]
            texts = [answer[view.name][1][leaf.path] for answer in every if leaf.path in answer[view.name][1]]
            for n, kind in enumerate(("parts to be gathered", "gradients to be summed")):
                if len({s[n] for s in sent} - {None}) > 1:
                    lengths = ", ".join(f"{s[n]} bytes on rank {r}" for r, s in zip(group.ranks, sent, strict=True))
                    texts.append(f"{kind} have {lengths}")
            rows += [(leaf.path, text) for text in texts]
        if rows:
            messages.append(bad_leaves(f"{view.name}: its wire does not fit together over ranks", rows, RIGHT))
        elif joined := [row for answer in every for row in answer[view.name][2]]:
            messages.append(misjoined_message(view, joined))
    return "\n".join(messages)


def _over(pipe: Pipeline, group: Group) -> list[View]:
    return [view for view in pipe.stages if view.wire is not None and view.wire.group is group]


def _by_leaf(view: View, leaves: Sequence[Leaf]) -> dict[str, tuple[int | None, int | None]]:
    return {leaf.path: _sent(view, [leaf]) for leaf in leaves}


def _sent(view: View, leaves: Sequence[Leaf]) -> tuple[int | None, int | None]:
    """Bytes that this rank sends to gather these leaves, and to sum gradients of one of each form, all in fp32."""
    wire = view.wire
    assert wire is not None
    # One leaf of each form and cut is packed: torch takes 0.3 ms for each tensor without memory.
    few = list({(leaf.shape, leaf.dtype, wire.span(leaf)): leaf for leaf in leaves}.values())
    numels = [view.given(leaf).numel for leaf in few]
    fulls = [torch.empty(n, device=META) for n in numels]

    def gather(silent: Wire) -> None:
        silent.send_parts(parts_of(silent, leaves), leaves)

    def sum_up(silent: Wire) -> None:
        silent.send(silent.pack(fulls, few, numels, torch.float32, META))

    return bytes_of(gather, wire) if wire.cuts else 0, bytes_of(sum_up, wire)


def _silent(wire: Wire) -> tuple[Wire, Traffic]:
    """The same wire over a group that sends nothing, and the traffic that it would send."""
    traffic = Traffic()
    return wire.on(replace(wire.group, traffic=traffic, silent=True), wire.reduce_dtype), traffic


def parts_of(wire: Wire, leaves: Sequence[Leaf], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """This rank's shards of leaves, without memory, for a wire that shards."""
    return [torch.empty(high - low, dtype=dtype, device=META) for low, high in map(wire.span, leaves)]


def bytes_of(send: Callable[[Wire], object], wire: Wire) -> int | None:
    """The bytes that a wire sends; `None` if it must see numbers, and fails without them."""
    silent, traffic = _silent(wire)
    try:
        send(silent)
    except Exception:
        return traffic.bytes if traffic.calls else None
    return traffic.bytes


def misjoined(view: View, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """The leaves for which the wire of a view returns wrong lengths or shapes, by path, each with a description."""
    if view.wire is None or not view.wire.cuts:
        return []
    wire, rank = _silent(view.wire)[0], view.wire.group.ranks[view.wire.group.rank]
    given = [view.given(leaf) for leaf in leaves]
    parts = parts_of(wire, leaves)
    found: dict[str, str] = {}

    def compare(name: str, of: Sequence[Leaf], make: Callable[[], Sequence[Any]], shapes: Any) -> None:
        try:
            made = make()
        except Exception:
            return
        if len(made) != len(of):
            found.update({x.path: f"`{name}` gives {len(made)} tensors of {len(of)} leaves" for x in of})
            return
        for leaf, x, shape in zip(of, made, shapes, strict=True):
            got = tuple(x.shape) if isinstance(x, Tensor) else kind_of(x)
            if got != shape:
                found.setdefault(leaf.path, f"`{name}` gives {got} on rank {rank}, and not {shape}")

    flat = [(x.numel,) for x in given]
    compare("join_parts", leaves, lambda: wire.join_parts(wire.send_parts(parts, leaves)[1], leaves), flat)
    # `view` and `store` take one leaf. They are tried on one leaf of each shape, among those that the wire gets whole.
    alone = {x.shape: (x, part) for x, leaf, part in zip(given, leaves, parts, strict=True) if x.shape == leaf.shape}
    some, shapes = [x for x, _ in alone.values()], [tuple(shape) for shape in alone]
    compare("view", some, lambda: [wire.view(part, x) for x, part in alone.values()], shapes)
    cut = [tuple(part.shape) for _, part in alone.values()]
    compare("store", some, lambda: [wire.store(torch.empty(x.shape, device=META), x) for x in some], cut)
    return sorted(found.items())


def misjoined_message(view: View, rows: Sequence[tuple[str, str]]) -> str:
    """The message about results of a wire that do not fit its leaves."""
    right = (
        "join_parts that gives each leaf flat, of leaf.numel elements and in the order of leaves; a view of leaf.shape;"
    )
    right += " a store of the elements of this rank's span, flat"
    return bad_leaves(f"{view.name}: what its wire gives does not fit its leaves", rows, right)


def _gaps(view: View, leaves: Sequence[Leaf]) -> list[tuple[str, str]]:
    """The leaves, by path, of which this rank's shard does not end where the next rank's begins."""
    wire = view.wire
    if wire is None or not wire.cuts:
        return []
    group = wire.group
    place = {rank: wire.on(replace(group, rank=rank), wire.reduce_dtype) for rank in (0, (group.rank + 1) % group.size)}
    found = []
    for leaf in leaves:
        low, high = wire.span(leaf)
        if group.rank + 1 < group.size:
            end = place[group.rank + 1].span(leaf)[0]
        else:
            end = place[0].span(leaf)[0] + view.given(leaf).numel
        if high != end:
            found.append((leaf.path, f"rank {group.ranks[group.rank]} has elements {low} to {high}, not to {end}"))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Before a state is made, these functions check that parameters have no NaN, and that the pipeline and parameters are
# the same on all ranks.


def agree_on_start(pipe: Pipeline, tensors: Leaves, call: str) -> None:
    """Raise on NaN. Raise on every rank, naming the difference, if ranks have different pipelines, trees or values.

    Ranks that start from different random parameters would otherwise train a mixture of them without an error.
    """
    check_finite(tensors)
    agree_on_chain(pipe, call, {x.device.type for x in tensors.values()})
    if pipe.groups:
        right = "torch.manual_seed(0) before the model is made, or the same checkpoint on every rank"
        agree_on_fingerprints(pipe.groups, {path: fingerprint(x) for path, x in tensors.items()}, right)
    if pipe.model:
        whole = [leaf.path for leaf in pipe.layout.leaves if leaf.within is not None and not leaf.within.cut]
        right = "torch.manual_seed(0) before the model is made and parallelize_module, on every rank"
        agree_on_fingerprints(pipe.model, {path: fingerprint(tensors[path]) for path in whole}, right)


def tell_narrow_sums(pipe: Pipeline, call: str) -> None:
    """Warn if gradients are summed over ranks in fp16 and no transform scales the loss."""
    narrow = pipe.dtypes.reduce_dtype
    if narrow != torch.float16 or pipe.scaled or not any([view.wire is not None for view in pipe.stages]):
        return
    wrong = f"{call}: precision(reduce_dtype={narrow}), and no scale_loss in the chain"
    why = "gradients below 6e-8 become zero in fp16, and a sum over 65504 becomes infinite: so do parameters"
    right = (
        "precision(reduce_dtype=torch.bfloat16) or torch.float32;\n"
        "or chain(..., zf.scale_loss(), ...), which skips a step whose gradients overflow"
    )
    warnings.warn(explain(wrong, why, right), UserWarning, stacklevel=users_line())


def tell_unreduced(pipe: Pipeline, call: str) -> None:
    """Warn if there are several ranks, no transform reduces gradients over them, and none says that this is meant.

    Each rank warns. If another rank's chain does reduce, that rank waits for this one, reads in the store which call
    this one has made, and raises. So do ranks along an axis of a mesh of which the chain names another axis.
    """
    size = world_size()
    for name, ranks in unnamed_axes(pipe).items():
        wrong = f"{call}: the mesh has an axis {name!r} of {len(ranks)} ranks, which no transform of the chain names"
        why = f"ranks {ranks} do not reduce gradients with each other, so each of them trains a model of its own"
        right = (
            f"zf.all_reduce(mesh[{name!r}]) in the chain, if these ranks are to have the same parameters;\n"
            f"zf.local(mesh[{name!r}]) where they are not: stages of a pipeline, parts of a layer, experts"
        )
        warnings.warn(explain(wrong, why, right), UserWarning, stacklevel=users_line())
    if size == 1 or not unreduced(pipe) or math.prod([group.size for group in pipe.model]) >= size:
        return
    reduces_nothing(call)
    wrong = f"{call} on {size} ranks, and no transform reduces gradients over them"
    why = f"each rank steps by its own gradients, so {size} different models are trained;\n"
    why += "a rank whose chain does reduce waits for this one, and raises"
    right = (
        "zf.chain(zf.all_reduce(), ...) for data parallelism, or shard or reduce_scatter, on every rank;\n"
        "zf.chain(zf.local(), ...) where it is meant, or DistributedDataParallel averages gradients"
    )
    warnings.warn(explain(wrong, why, right), UserWarning, stacklevel=users_line())


def unnamed_axes(pipe: Pipeline) -> dict[str, list[int]]:
    """The axes along which no transform works, of meshes of which one names another axis: by name, the ranks here.

    Ranks along such an axis may be replicas, which then drift apart, or have parameters of their own. What they have
    does not tell which: stages of a pipeline may be equal, and replicas are compared along the named axes alone.
    """
    groups = [group for _, group in pipe.named] + list(pipe.model)
    axes: dict[str, list[int]] = {}
    for mesh, _ in pipe.named:
        axes |= {} if mesh is None else axes_of_root(mesh)
    apart = lambda ranks: len(ranks) > 1 and all([len({*ranks} & {*group.ranks}) < 2 for group in groups])  # noqa: E731
    return {name: ranks for name, ranks in axes.items() if apart(ranks)}


def unreduced(pipe: Pipeline) -> bool:
    """Whether no transform reduces gradients over ranks, nor says that they are to stay each rank's own."""
    behind = pipe.stations[-1].gives.values()
    return bool(behind) and not any([spec.over_ranks or spec.local_by for spec in behind])


def agree_on_chain(pipe: Pipeline, call: str, devices: Collection[str] = ()) -> None:
    """Raise on every rank if ranks have other pipelines, or other trees of parameters, or these on other devices.

    Args:
        pipe: the pipeline.
        call: the call as the user writes it. It waits for late ranks without a limit, since they may be loading data.
            If ranks wait in another call, for instance because one rank alone has caught an error, it raises.
        devices: the kinds of devices that parameters are on.
    """
    if not pipe.step_groups:
        return
    for group in pipe.step_groups:
        together(call, group.ranks, f"{call} on every rank", math.inf, opens=True)
    # The address of a function differs between processes that run the same code.
    tx = re.sub(r" at 0x[0-9a-f]+", "", repr(pipe.tx))
    leaves = pipe.layout.leaves
    tree = "\n".join([f"{x.path} {tuple((x.within or x).shape)} {x.dtype} {x.trainable}" for x in leaves])
    kinds = " and ".join(sorted(devices))
    texts = {
        "the pipeline": f"{', '.join([p.name for p in pipe.parts])} #{_digest(tx)}",
        "the tree of parameters": f"{len(leaves)} leaves #{_digest(tree)}",
        DEVICES: kinds,
    }
    for group in pipe.step_groups:
        wires = {"what wires send": wires_over(pipe, group)}
        messages = {
            "what wires send": partial(unequal_wires, pipe, group),
            DEVICES: partial(_other_devices, kinds, group),
        }
        agree_on_all(texts | wires, group, messages)
    on_gpus = any([group.device.type != "cpu" for group in pipe.groups])
    if on_gpus and (unsent := not_sent_from(devices)):
        why = f"the backend of this job sends tensors of {', '.join(unsent.values())} alone"
        right = "model.to(device) before it, with a device of that kind; or, before that,\n"
        right += 'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
        raise ValueError(explain(f"{call} of parameters on {', '.join(unsent)}", why, right))


DEVICES = "the devices of parameters"


def _other_devices(kinds: str, group: Group) -> str:
    """The error text if ranks have parameters on different kinds of devices; the same text on every rank."""
    found = _by_value(gather_objects(kinds, group), group)
    why = "ranks send tensors on devices of one kind; with several kinds some ranks would wait for ever"
    return explain(f"parameters on devices of several kinds: {found}", why, "model.to(device) alike on every rank")


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
    if x.is_meta or is_wrapped(x) or not concrete(x):
        return False
    x = x.detach()
    # A sum with a NaN is NaN, and takes a fourth of the time of isnan. With both infinities it is NaN too.
    if x.element_size() > 1 and not torch.isnan(x.sum()):
        return False
    return bool(torch.isnan(x).any())


def agree_on_fingerprints(
    groups: Sequence[Group], prints: dict[str, int], right: str, failure: Exception | None = None
) -> None:
    """Raise on every rank if the fingerprint of a leaf differs between ranks.

    Args:
        groups: the ranks, along each axis.
        prints: fingerprints by path.
        right: the right code, for the message.
        failure: the error because of which this rank has no fingerprints. It is raised here, and named on the others.
    """
    problem = failure
    for group in groups:
        # Every axis is gathered along, after a failure too: the ranks of the other axes wait for this one.
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
    """Raise on every rank if gradients that the chain expects to be averaged over ranks differ between them.

    torch.func.grad of each rank's own loss gives such gradients, and replicas would diverge without an error. It costs
    one message along each axis, in the first update of a state: a loop computes its gradients alike in all steps.
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
        # The ranks of other axes have compared other shards. All raise if one has found a difference.
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
        # KeyboardInterrupt is caught too: the other ranks wait for this one.
        failure = error
    bad = tell(failure is not None)
    if failure is None and bad:
        why = "a transform raised on that rank; its own error says more. All ranks make first states together"
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


# MASK has the bits of a fingerprint. A tensor is summed WORDS words at a time, and the sum of earlier words is
# multiplied by MIX, an odd number.
MASK, WORDS, MIX = (1 << 62) - 1, 1 << 16, -7046029254386353131


def fingerprint(x: Tensor) -> int:
    """A number below 2^62 that is equal for equal bits at equal places, and hardly ever for others.

    Zero for a meta tensor, and under `torch.func.vmap`.
    """
    if x.is_meta or not x.numel() or not concrete(x):
        return 0
    bits = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    total: Any = 0
    if more := len(bits) % 8:
        total = F.pad(bits[-more:], (0, 8 - more)).view(torch.int64)[0]
        bits = bits[:-more]
    # Each word has its own factor: without, a permutation would have the same sum. An even factor would lose a bit.
    words = bits.view(torch.int64)
    factors = torch.arange(1, 2 * min(len(words), WORDS) + 1, 2, device=x.device)
    for piece in words.split(WORDS) if len(words) else ():
        mine = factors[: len(piece)]
        # Sums wrap around. torch.dot has no kernel for integers on GPUs.
        total = total * MIX + (torch.dot(piece, mine) if x.device.type == "cpu" else (piece * mine).sum())
    return int(total) & MASK


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def agree_on_all(texts: dict[str, str], group: Group, messages: Mapping[str, Callable[[], str]]) -> None:
    """Raise a `ValueError` on *every* rank unless all have the same texts (a digest, a name), by the same keys.

    The message names the first difference. If that key has an entry in `messages`, every rank calls it for the message;
    an empty message is no error.

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


# ----------------------------------------------------------------------------------------------------------------------
# An initialiser gives values to parameters on the meta device, one leaf after the other.
#
# A leaf is made whole, because torch's initialisers need it so (a fan, an orthogonal matrix), and freed once this rank
# has copied its shard. The random numbers of a leaf come from a generator seeded by `seed` and the path alone. So they
# do not depend on the number of ranks, on other leaves, or on the order of the leaves. With one generator for all
# leaves, as in a constructor, each leaf would depend on those before it.


Init = Callable[[str, Tensor], Any]
# For messages: the right code.
INIT = "init=lambda path, x: torch.nn.init.normal_(x, std=0.02)"


@contextmanager
def seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators are seeded by `seed` and `path`; afterwards they are restored.

    >>> with seeded(0, "w", torch.device("cpu")):
    ...     first = torch.rand(2)
    >>> with seeded(0, "w", torch.device("cpu")):
    ...     print(torch.equal(first, torch.rand(2)))
    True
    """
    k0, k1 = stream_key(seed, 0, leaf_key(path))
    key = (k1 & 0x7FFFFFFF) << 32 | k0
    # Only the generator of this device is seeded: `torch.manual_seed` would also seed some that are not restored.
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.default_generator.manual_seed(key)
            torch.get_device_module(device).manual_seed(key)
            yield


def blank(like: Tensor, device: torch.device) -> Tensor:
    """An empty tensor like a meta tensor. Floats are filled with NaN, so that `unset` finds unwritten elements."""
    x = torch.empty_like(like, device=device, requires_grad=False)
    return x.fill_(torch.nan) if x.is_floating_point() or x.is_complex() else x


def unset(x: Tensor, before: int) -> bool:
    """Whether a tensor of `blank` has an unwritten element; for integers, whether its version is still `before`."""
    if x.is_meta:
        return True
    if x.is_floating_point() or x.is_complex():
        return bool(torch.isnan(x).any())
    return x.numel() > 0 and version(x) == before


def made_by(init: Init, like: Tensor, path: str, seed: int, device: torch.device) -> Tensor:
    """A leaf as `init(path, x)` writes it."""
    x = blank(like, device)
    before = version(x)
    with seeded(seed, path, device), torch.no_grad():
        init(path, x)
    if unset(x, before):
        why = "init must write every element of x in place, and some elements were not written"
        raise ValueError(explain(f"init({path!r}, x of shape {tuple(x.shape)})", why, INIT))
    return x


def first_values(
    pipe: Pipeline, whole: Iterator[tuple[Leaf, Tensor]], keep: Callable[[Leaf, Tensor], Tensor], call: str
) -> Leaves:
    """This rank's shards of leaves that are made one after the other, checked to be equal on all ranks.

    Args:
        pipe: its ranks must agree.
        whole: yields full leaves, every one of the layout, in any order.
        keep: returns this rank's shard of a leaf, in memory of its own.
        call: the call as the user writes it.
    """
    agree_on_chain(pipe, call)
    kept: Leaves = {}
    prints: dict[str, int] = {}
    failure: Exception | None = None
    try:
        for leaf, x in whole:
            kept[leaf.path], prints[leaf.path] = keep(leaf, x), fingerprint(x)
            del x
    except Exception as error:
        # The other ranks wait for this one's fingerprints: the error goes to them.
        failure = error
    right = "draws from torch's own generators, which are seeded for each leaf, and nothing that depends on the rank"
    agree_on_fingerprints(pipe.groups, {} if failure else prints, right, failure)
    return {leaf.path: kept[leaf.path] for leaf in pipe.layout.leaves}


def check_init(where: str, init: Any, seed: Any) -> None:
    """Raise unless `init` is a function and `seed` an int."""
    if init is not None and not callable(init):
        why = f"an initialiser is a function of a path and a tensor, and {init!r} is {kind_of(init)}"
        raise TypeError(explain(f"{where}(init={init!r})", why, INIT))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            explain(f"{where}(seed={seed!r})", "a seed is an int, the same on all ranks", f"{where}(seed=0)")
        )


def device_of(device: Any) -> torch.device:
    """The device on which leaves are made: the given one, or torch's default device."""
    device = torch.get_default_device() if device is None else torch.device(device)
    return torch.device("cpu") if device.type == "meta" else device
