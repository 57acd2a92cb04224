"""Initial values of parameters on the meta device: leaves are made one after the other by an initialiser.

A leaf is made whole, since torch's initialisers need it so (a fan, an orthogonal matrix), and freed once this rank has
taken its part. Its draws come from a generator that is seeded by `seed` and its path alone, so that they do not depend
on the number of ranks, on other leaves, or on the order in which they are made. With one generator for all leaves, as
in a constructor, each would depend on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import version
from .._errors import explain, kind_of
from ..kernels.rounding import leaf_key, stream_key
from .layout import Leaf, Leaves
from .pipeline import Pipeline
from .rank_agreement import agree_on_chain, agree_on_fingerprints, fingerprint

Init = Callable[[str, Tensor], Any]
# For messages: the right code.
INIT = "init=lambda path, x: torch.nn.init.normal_(x, std=0.02)"


@contextmanager
def seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """torch's generators begin anew inside, by `seed` and `path`; afterwards they go on as if nothing had been drawn.

    >>> with seeded(0, "w", torch.device("cpu")):
    ...     first = torch.rand(2)
    >>> with seeded(0, "w", torch.device("cpu")):
    ...     print(torch.equal(first, torch.rand(2)))
    True
    """
    k0, k1 = stream_key(seed, 0, leaf_key(path))
    key = (k1 & 0x7FFFFFFF) << 32 | k0
    # By device: `torch.manual_seed` would also seed generators that are not restored.
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
    """An empty tensor like a meta tensor; floats are filled with NaN, by which `unset` sees what is not written."""
    x = torch.empty_like(like, device=device, requires_grad=False)
    return x.fill_(torch.nan) if x.is_floating_point() or x.is_complex() else x


def unset(x: Tensor, before: int) -> bool:
    """Whether an element of what `blank` made is not written; of integers, whether its version is still `before`."""
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
        why = "what it is given is to be written in place, every element of it, and it left some as they were"
        raise ValueError(explain(f"init({path!r}, x of shape {tuple(x.shape)})", why, INIT))
    return x


def first_values(
    pipe: Pipeline, whole: Iterator[tuple[Leaf, Tensor]], keep: Callable[[Leaf, Tensor], Tensor], call: str
) -> Leaves:
    """What this rank keeps of leaves that are made one after the other, once all ranks have made the same.

    Args:
        pipe: whose ranks must agree.
        whole: leaves as they are made, in full, every one of the layout in any order.
        keep: what is kept of one, in memory of its own.
        call: as the user writes it.
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
    """Refuse what is no function, and a seed that is no int."""
    if init is not None and not callable(init):
        why = f"an initialiser is a function of a path and a tensor, and {init!r} is {kind_of(init)}"
        raise TypeError(explain(f"{where}(init={init!r})", why, INIT))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            explain(f"{where}(seed={seed!r})", "a seed is an int, the same on all ranks", f"{where}(seed=0)")
        )


def device_of(device: Any) -> torch.device:
    """Where leaves are made: as given, else where torch makes tensors by default."""
    device = torch.get_default_device() if device is None else torch.device(device)
    return torch.device("cpu") if device.type == "meta" else device
