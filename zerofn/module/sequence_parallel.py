"""`sequence_parallel`: attention over sequences shared by ranks (Ulysses), of a function or of a whole module."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .._compat.operators import with_globals
from .._errors import explain
from ..ranks.group import Group
from ..ranks.process_groups import group_for
from ..ranks.ulysses import around


def sequence_parallel(attention: Any, mesh: Any = None, *, heads: int = -3, sequence: int = -2) -> Any:
    """Attention over whole sequences of which each rank has a part (Ulysses).

    Before attention an all-to-all takes queries, keys and values from (all heads, part of the sequence) to (part of
    the heads, whole sequence); after it another takes the result back. In between attention is what it is on one
    process. Everything else in a model works on a rank's own positions, so activations of a rank fall as 1/N. Ranks'
    parts follow one another by rank; heads and lengths need not divide. Each rank sends (N - 1) / N of its queries,
    keys, values and outputs, and the same in backward. Gradients are of this rank's loss as in data parallelism:
    average them over all ranks (`zf.shard()`, `zf.all_reduce()`), with the loss of `zf.sequence_mean`. (A mean over a
    rank's own tokens is right too where all ranks have as many; where not, weights of steps are not enough.)

    Positions are the caller's: rank `r` of `n` is given `x.tensor_split(n, dim=1)[r]` and the same part of the
    position ids. `is_causal=True` sees whole sequences. A mask is that of whole sequences (queries, keys); or of own
    queries and all keys; or, with one row, of own keys, as padding is. Keys and values that have fewer heads than
    queries are repeated before they are sent, unless the number of ranks divides both.

    Args:
        attention: a function of queries, keys and values, of the mask as fourth argument or `attn_mask`, and of
            anything else by keyword: `F.scaled_dot_product_attention` and its like. Or a module, attached or not,
            whose attentions are calls of `F.scaled_dot_product_attention` or `F.multi_head_attention_forward`, by
            whatever modules, those that a checkpoint repeats in backward too. Not what `torch.compile` compiled.
        mesh: the ranks that share a sequence: a one-dimensional `DeviceMesh` such as `mesh["sequence"]`; by default
            all. heads: the dimension of heads, of a function's arguments. sequence: the dimension of positions; for
            (batch, sequence, heads, features): `heads=2, sequence=1`.

    Returns:
        Of a function, a function. Of a module, a handle: `remove()`, or the end of `with`, lets it compute
        with whole sequences again.

    Raises:
        TypeError: `attention` is neither, or `mesh` no mesh. ValueError: when called: a mask that fits neither whole
            sequences nor this rank's part; parts that differ in more than their length.
        RuntimeError: a module made parallel calls no attention that is seen, or one that also returns its weights.

    >>> import torch, zerofn as zf
    >>> attend = zf.sequence_parallel(torch.nn.functional.scaled_dot_product_attention)
    >>> attend(*torch.ones(3, 1, 2, 4, 8), is_causal=True).shape
    torch.Size([1, 2, 4, 8])
    """
    if not callable(attention):
        raise TypeError(
            explain(
                f"sequence_parallel({attention!r})",
                "it goes around a function of queries, keys and values, or around a module",
                "sequence_parallel(torch.nn.functional.scaled_dot_product_attention, mesh)",
            )
        )
    group = group_for("sequence_parallel", mesh)
    if isinstance(attention, nn.Module):
        return SequenceParallel(attention, group)
    return around(attention, group, heads, sequence)


class SequenceParallel:
    """A module whose attentions are parallel, until `remove`."""

    def __init__(self, model: nn.Module, group: Group):
        seen = _Attentions(group)
        self.handles: list[Any] = []
        # On every module, since a checkpoint repeats parts of a model in backward, outside of the model's own call.
        for module in model.modules() if group.size > 1 else ():
            ends = functools.partial(_end, seen, module is model)
            self.handles += [
                module.register_forward_pre_hook(functools.partial(_begin, seen)),
                module.register_forward_hook(ends, always_call=True),
            ]

    def remove(self) -> None:
        """Compute with whole sequences on this rank again."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


class _Attentions(TorchFunctionMode):
    """A mode in which attention functions of torch are parallel ones.

    Attributes:
        group: the ranks that share a sequence.
        inside: by thread, modules whose calls are under way, and how many attentions were called in them.
    """

    def __init__(self, group: Group):
        self.group, self.inside = group, _Inside()
        attention: Any = F.scaled_dot_product_attention
        self.parallel = around(attention, group, heads=-3, sequence=-2)
        # It calls attention by a global name, while modes are off: in a copy of it that name is the parallel function.
        names = {"scaled_dot_product_attention": self.parallel, "has_torch_function": lambda _: False}
        self.multi_head = with_globals(F.multi_head_attention_forward, names)

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.inside.attentions += 1
            return self.parallel(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                raise RuntimeError(
                    explain(
                        "nn.MultiheadAttention(...)(..., need_weights=True), the default, under sequence_parallel",
                        "it returns the weights between whole sequences, and computes them from this rank's part alone",
                        "attention(query, key, value, need_weights=False)",
                    )
                )
            self.inside.attentions += 1
            return self.multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _Attentions:
        return _Attentions(self.group)

    def __reduce__(self) -> Any:
        return _Attentions, (self.group,)


class _Inside(threading.local):
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.attentions = 0


def _begin(seen: _Attentions, module: nn.Module, args: Any) -> None:
    if not seen.inside.modules:
        seen.inside.attentions = 0
        seen.__enter__()
    seen.inside.modules.append(module)


def _end(seen: _Attentions, outermost: bool, module: nn.Module, args: Any, output: Any) -> None:
    # It runs after an error too, even after one of a hook that came before `_begin`.
    if not seen.inside.modules or seen.inside.modules[-1] is not module:
        return
    seen.inside.modules.pop()
    if seen.inside.modules:
        return
    seen.__exit__(None, None, None)
    if outermost and not seen.inside.attentions and output is not None:
        raise RuntimeError(
            explain(
                f"{type(module).__name__} under sequence_parallel called no attention that could be seen",
                "each rank would attend to its own part of a sequence alone; attention is known by the function "
                "torch.nn.functional.scaled_dot_product_attention",
                "attn_implementation='sdpa' for a model of transformers; or sequence_parallel(attention, mesh) "
                "around the function that the model calls",
            )
        )
