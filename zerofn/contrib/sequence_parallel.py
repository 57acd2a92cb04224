"""Sequence parallelism: each rank has a chunk of every sequence, exchanged for heads around attention (Ulysses)."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerofn.collectives import Group, all_gather, all_to_all, mesh_group, world_group
from zerofn.extend import all_gather_into, explain

# ----------------------------------------------------------------------------------------------------------------------
# Between two all-to-alls each rank has whole sequences and some of the heads, and runs attention on those.


Attention = Callable[..., Any]


def around(attention: Attention, group: Group, heads: int, sequence: int) -> Attention:
    """Wrap `attention` over whole sequences as a function of this rank's chunks.

    Args:
        attention: a function of queries, keys and values, of a mask as fourth argument or `attn_mask`, and of anything
            else.
        group: the ranks that share a sequence.
        heads: the dimension of heads.
        sequence: the dimension of positions.
    """

    @functools.wraps(attention)
    def parallel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if group.size == 1:
            return attention(query, key, value, *args, **kwargs)
        if args and isinstance(args[0], Tensor):
            kwargs, args = {"attn_mask": args[0], **kwargs}, args[1:]
            if args:
                raise TypeError(
                    explain(
                        "attention(query, key, value, mask, ...) under sequence_parallel",
                        "arguments after the mask have different meanings in different attentions",
                        "attention(query, key, value, mask, is_causal=True), by keyword",
                    )
                )
        of_heads = query.dim() + heads if heads < 0 else heads
        of_positions = query.dim() + sequence if sequence < 0 else sequence
        key, value = (_repeated(x, query, group.size, of_heads) for x in (key, value))
        lengths: list[int] = []
        q = all_to_all(query, group, of_heads, of_positions, lengths=lengths)
        k, v = (all_to_all(x, group, of_heads, of_positions) for x in (key, value))
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor):
            own = query.shape[of_positions], key.shape[of_positions]
            full = q.shape[of_positions], k.shape[of_positions]
            kwargs["attn_mask"] = _of_my_heads(_full_mask(mask, own, full, group), query.shape[of_heads], group)
        out = attention(q, k, v, *args, **kwargs)
        if out.dim() != q.dim() or any(out.shape[d] != q.shape[d] for d in (of_heads, of_positions)):
            raise ValueError(
                explain(
                    f"an attention that returns {tuple(out.shape)} for queries {tuple(q.shape)}",
                    f"its result is sent back to the ranks by heads, dimension {of_heads}, and positions, "
                    f"dimension {of_positions}, so both must have the lengths of the queries",
                    "sequence_parallel(attention, mesh, heads=2, sequence=1) for (batch, sequence, heads, features)",
                )
            )
        return all_to_all(out, group, of_positions, of_heads, splits=lengths)

    return parallel


def _repeated(x: Tensor, query: Tensor, size: int, heads: int) -> Tensor:
    """Repeat keys or values with fewer heads than queries, if a cut by heads would separate them from their queries."""
    many, few = query.shape[heads], x.shape[heads]
    if many == few or (many % size == 0 and few % size == 0) or not few or many % few:
        return x
    return x.repeat_interleave(many // few, dim=heads)


def _full_mask(mask: Tensor, own: tuple[int, int], full: tuple[int, int], group: Group) -> Tensor:
    """The mask (..., queries, keys) of whole sequences: as given, or all-gathered from masks of chunks."""
    shape = (1, 1, *mask.shape)[-2:]
    rows, dims = _of_all_ranks([*shape, *own, *full], group), mask.dim()

    def is_on_all(i: int) -> set[str]:
        ways = {"one": lambda row: 1, "own": lambda row: row[2 + i], "whole": lambda row: row[4 + i]}
        return {way for way, length in ways.items() if all(row[i] == length(row) for row in rows)}

    queries, keys = is_on_all(0), is_on_all(1)
    if queries & {"one", "whole"} and keys & {"one", "whole"}:
        return mask
    if "own" in keys and "one" in queries:
        return all_gather(mask.movedim(-1, 0), group).movedim(0, -1)
    if "own" in queries and keys & {"one", "whole"}:
        return all_gather(mask.movedim(dims - 2, 0), group).movedim(0, dims - 2)
    raise ValueError(
        explain(
            f"attn_mask of {tuple(mask.shape)} for this rank's {own[0]} queries and {own[1]} keys",
            f"attention sees whole sequences, {full[0]} queries and {full[1]} keys, and the mask fits neither",
            f"a mask of (..., {full[0]}, {full[1]}) for all; of (..., {own[0]}, {full[1]}) for this rank's "
            "queries and all keys;\n"
            f"of (..., 1, {own[1]}) for this rank's keys, such as a padding mask; or is_causal=True",
        )
    )


def _of_all_ranks(numbers: list[int], group: Group) -> list[list[int]]:
    """The numbers of each rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=group.device)
    every = mine.new_empty(group.size * len(numbers))
    all_gather_into(every, mine, group, what="match")
    return every.view(group.size, len(numbers)).tolist()


def _of_my_heads(mask: Tensor, heads: int, group: Group) -> Tensor:
    if mask.dim() < 3 or mask.shape[-3] == 1 or mask.shape[-3] != heads:
        return mask
    return mask.tensor_split(group.size, dim=-3)[group.rank]


def _group(function: str, mesh: Any) -> Group:
    """The ranks of a mesh; all ranks for `None`."""
    if mesh is None:
        return world_group()
    if type(mesh).__name__ != "DeviceMesh":
        raise TypeError(
            explain(
                f"{function}(..., mesh={mesh!r})",
                "mesh is a one-dimensional DeviceMesh, or None for all ranks",
                f"{function}(..., init_device_mesh('cpu', (2, 2), mesh_dim_names=('data', 'sequence'))['sequence'])",
            )
        )
    return mesh_group(mesh)


def sequence_mean(losses: Tensor, mesh: Any = None, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean loss over the tokens of whole sequences that ranks share, and the number of tokens.

    `sum(weights * losses) / sum(weights)`, with sums over this rank's tokens and the ranks of `mesh`. Under sequence
    parallelism each rank's gradient contains pieces of all ranks' losses. So a mean over this rank's tokens, weighted
    afterwards, is wrong if ranks have different numbers of tokens. The result is equal on all ranks of `mesh`. Its
    gradients, averaged over ranks by `shard` or `all_reduce`, are those of one process. If there are several groups of
    ranks with different sequences, weight each group by its tokens: `zf.accumulate(k, weighted=True)` and
    `opt.step(weight=tokens)`.

    Args:
        losses: one for each of this rank's tokens, of any shape.
        mesh: the ranks that share a sequence: a one-dimensional `DeviceMesh`, or `None` for all.
        weights: of the shape of `losses`; 0 or False for a token that does not count. By default all count.

    Returns:
        The mean, in the dtype of `losses`, and the sum of weights over ranks in float64. If no token counts both are 0.

    Raises:
        TypeError: `mesh` is not a `DeviceMesh`.
        ValueError: `weights` has another shape.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.sequence_mean(torch.tensor([1.0, 2.0, 9.0]), weights=torch.tensor([True, True, False]))
        (tensor(1.5000), tensor(2., dtype=torch.float64))
    """
    group = _group("sequence_mean", mesh)
    if weights is not None and weights.shape != losses.shape:
        raise ValueError(
            explain(
                f"sequence_mean with weights of shape {tuple(weights.shape)}, losses of shape {tuple(losses.shape)}",
                "each loss has one weight",
                "sequence_mean(losses, mesh, weights=(targets != -100)), of the shape of losses",
            )
        )
    counts = torch.ones_like(losses, dtype=torch.float64) if weights is None else weights.double()
    wide = losses.double()
    # `where`, because a loss that does not count may be NaN, and 0 * NaN is NaN.
    total = torch.where(counts == 0, torch.zeros_like(wide), wide * counts).sum()
    # The backward of the all-gather adds up N equal cotangents, since N ranks have the same mean; averaging gradients
    # over ranks divides by N again. The sums are in float64, in which counts above 2**24 are exact.
    sums = all_gather(torch.stack((total, counts.sum())).view(1, 2), group).sum(0)
    tokens = sums[1].detach()
    return (sums[0] / torch.where(tokens == 0, torch.ones_like(tokens), tokens)).to(losses.dtype), tokens


# ----------------------------------------------------------------------------------------------------------------------
# `sequence_parallel` wraps an attention function, or the attentions of a module.


def sequence_parallel(attention: Any, mesh: Any = None, *, heads: int = -3, sequence: int = -2) -> Any:
    """Run attention over whole sequences of which each rank has a chunk (DeepSpeed-Ulysses, Jacobs et al., 2023).

    Before attention an all-to-all exchanges (all heads, this rank's positions) for (this rank's heads, all positions);
    after it another one takes the result back. Everything else in a model works on a rank's own positions, so each rank
    has 1 / N of the activations, where N is the number of ranks. Chunks are in the order of ranks. N need not divide
    the number of heads or the length. Each rank sends (N - 1) / N of its queries, keys, values and outputs in forward,
    and as much in backward.

    Gradients are those of this rank's loss, as in data parallelism: average them over all ranks (`zf.shard()`,
    `zf.all_reduce()`), and compute the loss by `zf.sequence_mean`. A mean over a rank's own tokens is right only if all
    ranks have equally many tokens; weights of steps cannot correct it.

    Cut the inputs yourself: rank `r` of `n` gets `x.tensor_split(n, dim=1)[r]`, and the same chunk of position ids.
    `is_causal=True` refers to whole sequences. A mask may have the shape (all queries, all keys), (this rank's queries,
    all keys), or (1, this rank's keys), as a padding mask has. Keys and values with fewer heads than queries are
    repeated before they are sent, unless N divides both numbers.

    Args:
        attention: a function of queries, keys and values, of the mask as fourth argument or `attn_mask`, and of
            anything else by keyword, such as `F.scaled_dot_product_attention`. Or a module, attached or not, which
            calls `F.scaled_dot_product_attention` or `F.multi_head_attention_forward`, in whatever submodule, also in
            an activation checkpoint. Not what `torch.compile` compiled.
        mesh: the ranks that share a sequence: a one-dimensional `DeviceMesh` such as `mesh["sequence"]`; by default
            all.
        heads: the dimension of heads of a function's arguments.
        sequence: their dimension of positions; for (batch, sequence, heads, features): `heads=2, sequence=1`.

    Returns:
        For a function, a function. For a module, a handle: `remove()`, or the end of a `with` block, undoes it.

    Raises:
        TypeError: `attention` cannot be called, or `mesh` is not a `DeviceMesh`.
        ValueError: when called, a mask fits neither whole sequences nor this rank's chunk; chunks differ in more than
            their length.
        RuntimeError: when called, a module calls no attention that can be seen, or one that also returns its weights.

    Examples:
        >>> import torch, zerofn as zf
        >>> attend = zf.sequence_parallel(torch.nn.functional.scaled_dot_product_attention)
        >>> attend(*torch.ones(3, 1, 2, 4, 8), is_causal=True).shape
        torch.Size([1, 2, 4, 8])
    """
    if not callable(attention):
        raise TypeError(
            explain(
                f"sequence_parallel({attention!r})",
                "it wraps a function of queries, keys and values, or a module",
                "sequence_parallel(torch.nn.functional.scaled_dot_product_attention, mesh)",
            )
        )
    group = _group("sequence_parallel", mesh)
    if isinstance(attention, nn.Module):
        return SequenceParallel(attention, group)
    return around(attention, group, heads, sequence)


class SequenceParallel:
    """The handle of `sequence_parallel(module, ...)`: the module's attentions are parallel until `remove()`."""

    def __init__(self, model: nn.Module, group: Group):
        seen = _Attentions(group)
        self.handles: list[Any] = []
        # Every module gets hooks: an activation checkpoint calls submodules again in backward, outside of the model's.
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
    """A mode that replaces torch's attention functions by parallel ones.

    Attributes:
        group: the ranks that share a sequence.
        inside: by thread, the modules whose calls are open, and how many attentions were called in them.
    """

    def __init__(self, group: Group):
        self.group, self.inside = group, _Inside()
        attention: Any = F.scaled_dot_product_attention
        self.parallel = around(attention, group, heads=-3, sequence=-2)
        # torch's function calls attention by a global name, with modes off. Its copy has the parallel function there.
        names = {"scaled_dot_product_attention": self.parallel, "has_torch_function": lambda _: False}
        self.multi_head = _with_globals(F.multi_head_attention_forward, names)

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
                        "it would compute the weights from this rank's chunk instead of whole sequences",
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


def _with_globals(fn: Any, names: dict[str, Any]) -> Any:
    """A copy of one of torch's Python functions, with other values for some global names.

    Raises:
        RuntimeError: this release of torch does not use these names there.
    """
    missing = [name for name in names if name not in fn.__globals__ or name not in fn.__code__.co_names]
    if missing:
        raise RuntimeError(
            explain(
                f"sequence_parallel(module) with torch {torch.__version__}",
                f"{fn.__name__} of this release does not use {', '.join(missing)}, which would be replaced",
                "sequence_parallel(attention, mesh) around the attention function that the model calls",
            )
        )
    copy = types.FunctionType(fn.__code__, {**fn.__globals__, **names}, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


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
    # This hook also runs after an error, even one in a hook that ran before `_begin`.
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
                "each rank would attend to its own chunk only; attention is recognised by calls of "
                "torch.nn.functional.scaled_dot_product_attention",
                "attn_implementation='sdpa' for a model of transformers; or sequence_parallel(attention, mesh) "
                "around the function that the model calls",
            )
        )
