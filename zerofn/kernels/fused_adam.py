"""torch's fused Adam over lists of tensors: by torch's kernel, by a faster C kernel, and as an operator for graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zerofn._compat.functorch import functorch_active, is_wrapped
from zerofn._compat.tensors import foreach, fused_adam_, fused_adamw_
from zerofn._errors import explain, kind_of
from zerofn.kernels import native, program
from zerofn.kernels.joined import Passes
from zerofn.kernels.masters import Master
from zerofn.kernels.native import same_bits, sample
from zerofn.kernels.numbers import NotOnLists
from zerofn.kernels.plans import Plans
from zerofn.kernels.recording import concrete, operator

# ----------------------------------------------------------------------------------------------------------------------
# `check_step` checks the number of an update, with which Adam corrects its moments: a whole number from 1.


def check_step(function: str, step: Any) -> None:
    """Refuse a number of an update that is not a whole number from 1.

    At 0 the bias correction divides by zero, and all parameters would become NaN; 1.5 would mean 1 to one kernel and
    1.5 to another. A tensor that Python cannot read without waiting (on a GPU, in a batch of vmap) is not checked.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not a whole number from 1, or a tensor of a shape other than `()`.

    Examples:
        >>> check_step("fused_update", 0)
        Traceback (most recent call last):
        ...
        ValueError: fused_update(step=0)
          why:   steps are counted from 1: at 0 the bias correction of moments divides by zero
          write: fused_update(step=count + 1), with count the updates before this one
    """
    if type(step) is int and step >= 1:
        return
    right = f"{function}(step=count + 1), with count the updates before this one"
    value: Any = step
    if isinstance(step, Tensor):
        if not concrete(step):
            return
        if step.ndim:
            shape = tuple(step.shape)
            why = "all entries of the lists have the same number of updates, so step is one number"
            raise ValueError(explain(f"{function}(step=a tensor of shape {shape})", why, right))
        if type(step) is not Tensor or step.device.type != "cpu":
            return
        value = step.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        why = f"step is the number of this update, from 1, and {value!r} is {kind_of(value)}"
        raise TypeError(explain(f"{function}(step={step!r})", why, right))
    number = float(value)
    if not number >= 1:
        why = "steps are counted from 1: at 0 the bias correction of moments divides by zero"
        raise ValueError(explain(f"{function}(step={step!r})", why, right))
    if number % 1:
        raise ValueError(explain(f"{function}(step={step!r})", "updates are counted in whole numbers", right))


# ----------------------------------------------------------------------------------------------------------------------
# These functions check lists of tensors before a fused kernel is called, and give gradients their parameters' layout.


# Every step calls these on every leaf, so they are C functions.
_DTYPE, _DEVICE, _IS_CPU = attrgetter("dtype"), attrgetter("device"), attrgetter("is_cpu")
_STRIDE = methodcaller("stride")


def plain(tensors: list[Tensor]) -> bool:
    """Whether a fused kernel can take the tensors: one dtype and device, no torch.func wrapper."""
    return not_wrapped(tensors) and alike(tensors)


def not_wrapped(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor is batched or differentiated by torch.func."""
    return not (functorch_active() and any(map(is_wrapped, tensors)))


def alike(tensors: list[Tensor]) -> bool:
    """Whether a fused kernel can take the tensors together: one dtype and device.

    Examples:
        >>> alike([torch.ones(2), torch.ones(3)]), alike([torch.ones(2), torch.ones(2).double()])
        (True, False)
    """
    return len(set(map(_DTYPE, tensors))) == 1 and (all(map(_IS_CPU, tensors)) or len(set(map(_DEVICE, tensors))) == 1)


def typed(params: list[Tensor], grads: list[Tensor], of_one_dtype: bool = False) -> list[Tensor]:
    """Gradients in their parameters' dtypes and strides; the same tensors if they are already.

    Fused kernels walk memory, so a channels-last parameter needs a channels-last gradient.

    Args:
        params: the parameters.
        grads: their gradients.
        of_one_dtype: whether all parameters are known to have one dtype.
    """
    if of_one_dtype and params:
        alike = set(map(_DTYPE, grads)) == {params[0].dtype}
    else:
        alike = list(map(_DTYPE, params)) == list(map(_DTYPE, grads))
    if alike:
        # Nearly all tensors are contiguous. Comparing strides takes longer, since it makes tuples.
        rows = all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))
        if rows or list(map(_STRIDE, params)) == list(map(_STRIDE, grads)):
            return grads
    found = list(grads)
    others = [
        i for i, (p, g) in enumerate(zip(params, grads, strict=True)) if g.dtype != p.dtype or g.stride() != p.stride()
    ]
    copies = [torch.empty_like(params[i]) for i in others]
    foreach("copy_", copies, [grads[i] for i in others])
    for i, x in zip(others, copies, strict=True):
        found[i] = x
    return found


# ----------------------------------------------------------------------------------------------------------------------
# `run` is torch's fused Adam as a program in C, for large fp32 leaves on the CPU: the same bits, faster, with the norms
# of the gradients.
#
# The update is bound by memory bandwidth. torch's kernel relies on the hardware prefetcher, which stops at each page
# of 4 KiB, and the gradients' norm for metrics takes a second pass. The program does both in one pass, with prefetch
# instructions. Without a C compiler torch's kernel runs, without a warning: it has the same bits and is slower.
#
# Source: Kingma and Ba, "Adam", ICLR 2015, in the order of operations of `torch._fused_adamw_`.


# Lists of parameters, gradients and both moments; and of residuals where parameters are masters of 24 bits.
Columns = Sequence[list[Tensor]]

# The C kernel is used from this many elements in all leaves. Smaller updates fit into one core's cache, where neither
# the arguments of a call nor the time of the compiler pays.
LARGE = 1 << 20
# torch's kernel rounds the last elements of a leaf (fewer than its vectors have) in another way. So those beyond a
# multiple of this, which is at least the length of a vector, are left to torch's kernel.
LINE = 16

_PLAIN = {Tensor, torch.nn.Parameter}


def formula(p: Any, g: Any, m: Any, v: Any, n: Mapping[str, Any], decoupled: bool) -> tuple[Any, Any, Any]:
    """torch's fused Adam in five lines: its order of operations, and its products that are fused with sums.

    Returns the new parameter in fp32, and the new moments.
    """
    x, g = p.to(torch.float32), g.to(torch.float32)
    x, g = (x * n["keep"], g) if decoupled else (x, g.add(x, alpha=n["decay"]))
    m = m.to(torch.float32).lerp(g, n["weight"])
    v = (v.to(torch.float32) * n["beta2"]).addcmul(g, g, value=n["rest"])
    return x.addcdiv(m, v.sqrt() / n["spread"] + n["eps"], value=n["rate"]), m, v


@functools.cache
def _plans(decoupled: bool) -> Plans:
    """The programs of `formula`."""

    def traced(lists: list[Any], numbers: Any, norms: bool) -> Any:
        p, g, m, v = lists
        return formula(p, g, m, v, numbers, decoupled), [g.to(torch.float32).square()] if norms else []

    return Plans(traced)


def can(columns: Columns, decoupled: bool, beta1: float) -> bool:
    """Whether `run` takes these lists of parameters, gradients and moments, which are `LARGE` together.

    Gradients are all fp32, or all bf16.
    """
    for i, column in enumerate(columns):
        dtypes = set(map(_DTYPE, column))
        if set(map(type, column)) - _PLAIN or not (
            dtypes == {torch.float32} or (i == 1 and dtypes == {torch.bfloat16})
        ):
            return False
        if not all(map(_IS_CPU, column)) or not all(map(Tensor.is_contiguous, column)):
            return False
    if program.looked_at():
        return True
    return native.quiet_compiler() is not None and gives_bits(decoupled, beta1 > 0.5, columns[1][0].dtype)


def formula_of_torch(decoupled: bool) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """`formula` as `zerofn.extend.optimizer` wants it, with slots `exp_avg` and `exp_avg_sq`.

    Args:
        decoupled: whether the weight decay is decoupled from the gradient.

    Returns:
        A function of a parameter, a gradient, the slots and a `LeafStep`. Its products that are fused with sums have
        the bits of torch's fused kernel where it is printed in C or Triton.

    Examples:
        >>> from types import SimpleNamespace
        >>> numbers = {"beta1": 0.5, "beta2": 0.5, "eps": 0.0, "weight_decay": 0.0}
        >>> at = SimpleNamespace(count=1, lr=0.25, numbers=numbers)
        >>> zeros = {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        >>> formula_of_torch(True)(torch.ones(1), torch.ones(1), zeros, at)[0]
        tensor([0.7500])
    """

    def of_step(p: Any, g: Any, slots: Mapping[str, Any], at: Any) -> tuple[Any, dict[str, Any]]:
        numbers: dict[str, Any] = dict(zip(NAMES, scalars(at.count, at.lr, **at.numbers), strict=True))
        # Without a decay the kernel adds no term: 0 * p would be NaN for an infinite parameter.
        no_sum = decoupled or at.numbers["weight_decay"] == 0
        x, m, v = formula(p, g, slots["exp_avg"], slots["exp_avg_sq"], numbers, no_sum)
        return x, {"exp_avg": m, "exp_avg_sq": v}

    return of_step


def takes_stored(decoupled: bool, beta1: float, param: Any, g: Tensor, moments: Sequence[Any]) -> bool:
    """Whether `formula` has the bits of torch's kernel on a leaf as it is stored.

    Args:
        decoupled: whether the weight decay is decoupled from the gradient.
        beta1: the decay of the first moment.
        param: a tensor, or a `Master`.
        g: its gradient.
        moments: each a tensor, or a `Coded`.
    """
    masters = type(param) is Master
    p: Tensor = param.p if masters else param
    dtype = torch.float32 if masters else p.dtype
    if dtype not in _LINES or g.dtype not in _LINES or any([x.dtype is not dtype for x in moments]):
        return False
    if not p.is_cpu:
        return dtype is torch.float32
    # torch's kernel rounds the last elements of a leaf in another way.
    if p.numel() % _LINES[dtype] or (dtype is torch.bfloat16 and g.dtype is not dtype):
        return False
    return native.quiet_compiler() is not None and gives_bits(decoupled, beta1 > 0.5, g.dtype, dtype)


# Vectors of torch's kernel have at most so many numbers.
_LINES = {torch.float32: 16, torch.bfloat16: 32}


def run(
    columns: Columns,
    step: int,
    lr: Any,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    norms: list[float] | None = None,
    passes: Passes | None = None,
) -> None:
    """One update in place, of all elements except `ends`, as `run_program` does it."""
    # Without a decay the kernel adds no term: 0 * p would be NaN for an infinite parameter.
    no_sum = decoupled or weight_decay == 0
    run_program(columns, scalars(step, float(lr), beta1, beta2, eps, weight_decay), no_sum, norms, passes)


def ends(columns: Columns) -> Columns:
    """Views of the elements beyond a multiple of `LINE`, for leaves that have some: torch's kernel updates them."""
    chosen = [i for i, x in enumerate(columns[0]) if has_end(x)]
    return [[_end(column[i]) for i in chosen] for column in columns]


def _without_end(x: Tensor) -> Tensor:
    numel = x.numel()
    return x.detach().view(-1)[: numel // LINE * LINE] if numel % LINE else x


def _end(x: Tensor) -> Tensor:
    return x.detach().view(-1)[x.numel() // LINE * LINE :]


def scalars(step: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any) -> tuple[Any, ...]:
    """The numbers of `formula`: `NAMES`."""
    rate, spread = -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return beta2, 1 - beta1, 1 - beta2, rate, spread, eps, 1 - lr * weight_decay, weight_decay


NAMES = ("beta2", "weight", "rest", "rate", "spread", "eps", "keep", "decay")


def has_end(x: Tensor) -> bool:
    """Whether a leaf has elements beyond a multiple of `LINE`."""
    return x.numel() % LINE != 0


def run_program(
    columns: Columns,
    scalars: Sequence[float],
    decoupled: bool,
    norms: list[float] | None = None,
    passes: Passes | None = None,
) -> None:
    """One call of a kernel on leaves of a CPU: all elements except `ends` are updated.

    Args:
        norms: gets the norms of the gradients, when the program has run.
        passes: where it waits for others, if no leaf has `ends`; by default it runs now.

    Raises:
        NotOnLists: there is no kernel.
    """
    lists = [list(map(_without_end, column)) for column in columns]
    # These are read before the update, since a gradient may share memory with a tensor that is written.
    rests = [float(_end(g).double().square().sum()) if norms is not None and has_end(g) else 0.0 for g in columns[1]]

    def take(squares: Tensor) -> None:
        assert norms is not None
        norms.extend([(x + rest) ** 0.5 for x, rest in zip(squares[0].tolist(), rests, strict=True)])

    numbers: dict[str, float] = dict(zip(NAMES, scalars, strict=True))
    _plans(decoupled).run(lists, numbers, [0, 2, 3], norms is not None, passes=passes, take=take)


@functools.cache
def gives_bits(decoupled: bool, near: bool, dtype: torch.dtype, param: torch.dtype = torch.float32) -> bool:
    """Whether `formula` runs as a program in C and gives the bits of torch's kernel on a sample.

    Which products torch's kernel fuses with sums depends on torch's compiler and on the processor.

    Args:
        decoupled: whether the weight decay is decoupled from the gradient.
        near: whether ``1 - beta1`` is below a half: `torch.lerp` has a formula for either case.
        dtype: of gradients, fp32 or bf16.
        param: the dtype of parameters and moments, fp32 or bf16.
    """
    mine, torchs = ([[x.to(param)] for (x,) in _sample()] for _ in range(2))
    mine[1] = [x.to(dtype) for x in mine[1]]
    torchs[1] = [x.to(param) for x in mine[1]]
    beta1 = 0.9 if near else 0.25
    try:
        run_program(mine, scalars(3, 0.01, beta1, 0.999, 1e-8, 0.1), decoupled)
    except NotOnLists:
        return False
    fused: Any = fused_adamw_ if decoupled else fused_adam_
    how = dict(lr=0.01, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False)
    fused(*torchs, [], [torch.tensor(3.0)], **how)
    return same_bits([mine[0], *mine[2:]], [torchs[0], *torchs[2:]])


def _sample() -> list[list[Tensor]]:
    """One leaf whose length is a multiple of `LINE`: `sample`, followed by ordinary numbers."""
    i = torch.arange(1, 252 * LINE + 1)
    p, g, m, v = (torch.sin(i * k) for k in (1.0, 2.1, 3.7, 5.3))
    return [[torch.cat([*x, y])] for x, y in zip(sample(252 * LINE), (p, g, m, v.abs()), strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# `fused_update` runs torch's fused Adam over lists of leaves, and `zerofn::fused_adam_` is its custom operator for
# compiled graphs.
#
# The formula puts a dozen operations per leaf into a graph. The compiler looks for pairs of them to fuse, so with many
# leaves it spends most of its time on AdamW. The operator is one node for all leaves. With few leaves the formula is
# better: the scaling of gradients is fused into its loop, while an operator reads scaled gradients from memory.


# The operator is used from this many leaves: it saves time of the compiler at the price of a pass over the gradients.
MANY = 32


def fused_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    decoupled: bool,
    lr: Any,
    norms: list[float] | None = None,
    passes: Passes | None = None,
    **numbers: Any,
) -> None:
    """One update by torch's kernel, in place, of leaves of one dtype and device with the same number of updates.

    Args:
        step: the number of this update, from 1.
        decoupled: whether the weight decay is decoupled from the gradient (AdamW).
        lr: a number or a 0-d tensor.
        norms: a list. If the kernel computes the norms of the gradients on its way, they are appended.
        passes: where a program with the bits of torch's kernel waits for others; what cannot wait runs behind them.
        numbers: beta1, beta2, eps and weight_decay.

    Raises:
        TypeError, ValueError: `step` is not a whole number from 1.
    """
    if type(step) is not int or step < 1:
        check_step("fused_update", step)
    fused: Any = fused_adamw_ if decoupled else fused_adam_
    lists: Columns = params, grads, exp_avgs, exp_avg_sqs
    # The list is asked first, since every step comes here.
    large = sum(map(Tensor.numel, params)) >= LARGE or (bool(program.INSTEAD) and program.stands_for(params, LARGE))
    taken = large and can(lists, decoupled, numbers["beta1"])
    if passes is not None and not (taken and not any(map(has_end, params))):
        passes.settle()
        passes = None
    if not taken:
        lists = params, typed(params, grads, of_one_dtype=True), exp_avgs, exp_avg_sqs
        taken = large and lists[1] is not grads and can(lists, decoupled, numbers["beta1"])
    # Metrics show the norms of the given gradients, not of gradients that were cast to their parameters' dtype.
    asked = norms is not None and lists[1] is grads
    if taken:
        run(lists, step, lr, **numbers, decoupled=decoupled, norms=norms if asked else None, passes=passes)
        lists = ends(lists)
        lists = lists[0], typed(lists[0], lists[1], of_one_dtype=True), *lists[2:]
    if lists[0]:
        count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        fused(*lists, [], [count] * len(lists[0]), lr=lr, amsgrad=False, maximize=False, **numbers)
    increment_version([*params, *exp_avgs, *exp_avg_sqs])


def fused_on_device(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: Tensor,
    decoupled: bool,
    lr: Any,
    comes: Tensor | None = None,
    **numbers: Any,
) -> None:
    """As `fused_update`, where the numbers of the updates are on the device: nothing is read by the host.

    Args:
        steps: the number of this update for each leaf, of the shape `(leaves,)`.
        lr: a number; or a 0-d tensor, which is rounded to float32.
        comes: a 0-d bool tensor. If it is false, nothing is written.
    """
    fused: Any = fused_adamw_ if decoupled else fused_adam_
    lists: Columns = params, typed(params, grads), exp_avgs, exp_avg_sqs
    counts = list(steps.to(torch.float32).unbind())
    rate = lr.to(params[0].device, torch.float32) if isinstance(lr, Tensor) else lr
    found = None if comes is None else torch.logical_not(comes, out=torch.empty_like(comes, dtype=torch.float32))
    fused(*lists, [], counts, lr=rate, amsgrad=False, maximize=False, found_inf=found, **numbers)
    increment_version([*params, *exp_avgs, *exp_avg_sqs])


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Tensor,
    numbers: Tensor,
    decoupled: bool,
) -> None:
    """As `fused_update`, for leaves that may have different numbers of updates.

    Args:
        steps: the number of this update, for each leaf; on the CPU.
        numbers: lr, beta1, beta2, eps and weight_decay, in float64; on the CPU.
    """
    how: Any = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), numbers.tolist(), strict=True))
    lists, counts = (params, grads, exp_avgs, exp_avg_sqs), steps.tolist()
    for step in set(counts):
        chosen = lists if counts.count(step) == len(counts) else [_chosen(xs, counts, step) for xs in lists]
        fused_update(*chosen, step=step, decoupled=decoupled, **how)


def _chosen(tensors: list[Tensor], counts: list[int], step: int) -> list[Tensor]:
    return [x for x, count in zip(tensors, counts, strict=True) if count == step]


_OPERATOR = operator(
    "fused_adam_(Tensor(a0!)[] params, Tensor[] grads, Tensor(a2!)[] exp_avgs, Tensor(a3!)[] exp_avg_sqs, "
    "Tensor steps, Tensor numbers, bool decoupled) -> ()",
    _run,
)


def many_for_fused(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether a graph should call the operator on these leaves: many, of one dtype and device, fp32 or fp64.

    Examples:
        >>> x = [torch.ones(2)]
        >>> many_for_fused(x, x), many_for_fused(x * 100, x * 100), many_for_fused(x * 100, [x[0].double()] * 100)
        (False, True, False)
    """
    # Not `alike`, which the compiler cannot trace.
    dtype, device = params[0].dtype, params[0].device
    same = all(x.dtype is dtype and x.device == device for x in (*params, *grads))
    return len(params) >= MANY and same and dtype in (torch.float32, torch.float64)


def fused_operator(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: Tensor,
    decoupled: bool,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
) -> None:
    """Call the kernel of `adam` and `adamw` by the operator. `step` is (leaves,); numbers may be tensors."""
    given = (lr, beta1, beta2, eps, weight_decay)
    numbers = torch.stack([torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in given])
    lists = list(params), list(grads), list(exp_avgs), list(exp_avg_sqs)
    _OPERATOR(*lists, step, numbers, decoupled)
