"""`from_torch`: a class of `torch.optim`, or one of your own like it, as a transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofn.extend import (
    LeafList,
    LeafStep,
    ScalarOrSchedule,
    Transform,
    check_lr,
    explain,
    kept_out_of_graphs,
    optimizer,
    typed,
    unknown_keyword,
    with_kernel,
)

# Options that say how a class runs. The pipeline decides that.
RUNS = ("foreach", "fused", "capturable", "differentiable")
# A class's count of updates per leaf. The state counts updates itself, as `count`.
STEP = "step"
RESERVED = ("count", STEP)
# Tolerance in float64: a product in another order differs by 1e-16, an update that is not elementwise by far more.
CLOSE = 1e-9


@kept_out_of_graphs(
    "it tries the class on a small leaf, and the class's in-place update cannot be compiled",
    "zf.adam, zf.sgd or another optimizer of this library in torch.compile(zf.make_step(loss_fn, tx), fullgraph=True)",
    "from_torch(...)",
)
def from_torch(
    optimizer_class: type[torch.optim.Optimizer], lr: ScalarOrSchedule | None = None, **options: Any
) -> Transform:
    """Use a class of `torch.optim` as a transform: `zf.from_torch(torch.optim.NAdam, lr=2e-3)`.

    The update of the class must be elementwise: it computes each element from this element's gradient, parameter and
    state alone. The classes of torch with such an update are `NAdam`, `RAdam`, `Adagrad`, `Adadelta`, `Adamax`,
    `RMSprop`, `Rprop`, `ASGD`, `SGD`, `Adam` and `AdamW`. At every ZeRO stage the class gets this rank's shards.

    State entries have the class's names, so `opt.load_state_dict` takes a checkpoint of the class. Before the first
    update of a leaf its entries are zero.

    In each step an optimizer of the class is made for one bucket of leaves, and its `step` is called in the
    single-tensor form. That costs a copy of a bucket of gradients, about 4 MB. The class writes in place, so its step
    has no derivative, and cannot run under `vmap` or in a compiled graph; `zf.adam`, `zf.sgd` and this library's other
    optimizers can.

    Args:
        optimizer_class: the class, not an instance.
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step; by default the class's own.
        options: of the class, such as `betas`, `weight_decay` or `maximize`.

    Raises:
        TypeError: not an optimizer class, an option that it does not have, or no `lr` where the class has no default.
        ValueError: its update is not elementwise (`LBFGS`, `Muon`, `Adafactor`, `SparseAdam`), as a trial on 12
            numbers, whole and in two pieces, shows; or the class refuses an option.
        RuntimeError: at a step that autograd or torch.func differentiates, or a compiler traces.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.from_torch(torch.optim.Adagrad, lr=0.5)
        >>> tx
        from_torch(optimizer_class=Adagrad, lr=0.5)
        >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
        >>> state.params["w"], sorted(state.transforms["from_torch"])
        (tensor([-0.5000, -0.5000]), ['count', 'step', 'sum'])

    Notes:
        The bits are those of the class.
    """
    known = _options(optimizer_class)
    name = optimizer_class.__name__
    for given in options:
        if given in RUNS:
            wrong, why = f"from_torch({name}, {given}={options[given]!r})", "the pipeline sets these options"
            raise TypeError(explain(wrong, why, f"zf.from_torch({name}, lr=...), without {given}"))
        if given not in known:
            names = ["lr", *(k for k in known if k not in ("lr", *RUNS))]
            raise TypeError(unknown_keyword(f"from_torch({name}, ...)", given, names))
    rate = known["lr"] if lr is None else lr
    if rate is inspect.Parameter.empty:
        why = "the class has no default for its learning rate"
        raise TypeError(explain(f"from_torch({name}) without lr", why, f"zf.from_torch({name}, lr=1e-3)"))
    check_lr("from_torch", rate)
    made = _Class(optimizer_class, {**{k: False for k in ("foreach", "fused") if k in known}, **options})
    _check_elements(made)
    numbers = {k: v for k, v in {**known, **options}.items() if k != "lr" and _number(v)}
    config = {"optimizer_class": optimizer_class, **({} if lr is None else {"lr": lr}), **options}
    return replace(_transform(made, rate, numbers), factory=from_torch, config=config)


from_torch.__rebuild__ = lambda config, parts: from_torch(**config)  # type: ignore[attr-defined]


class _Slot(NamedTuple):
    """An entry of a class's state for a leaf: a tensor of the leaf's shape, or a number."""

    of_elements: bool
    dtype: torch.dtype
    kind: type

    def given(self, x: Tensor) -> Any:
        """The value in the form that the class keeps."""
        return x if self.kind is Tensor else self.kind(x.item())


@dataclass(frozen=True)
class _Class:
    """A class with its options, and the entries of its state for a leaf, by the leaf's dtype."""

    cls: type
    options: Mapping[str, Any]
    found: dict[torch.dtype, dict[str, _Slot]] = field(default_factory=dict, compare=False)

    def over(self, params: list[Tensor], lr: float, numbers: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.cls(params, lr=lr, **{**self.options, **numbers})

    def kept(self, dtype: torch.dtype) -> dict[str, _Slot]:
        """The entries of a leaf's state by name, found by two trial steps on a small leaf."""
        if dtype not in self.found:
            first, second = (_slots(self, _after(self, _leaf().to(dtype), updates), updates) for updates in (1, 2))
            if first != second:
                raise _unfit(self, f"its state of a leaf changes from {first} to {second} with its second step")
            self.found[dtype] = first
        return self.found[dtype]


def _transform(made: _Class, lr: Any, numbers: Mapping[str, Any]) -> Transform:
    names = [name for name in made.kept(torch.float32) if name != STEP]

    def start(name: str, x: Tensor) -> Tensor:
        slot = made.kept(x.dtype)[name]
        return (
            torch.zeros_like(x, dtype=slot.dtype)
            if slot.of_elements
            else torch.zeros((), dtype=slot.dtype, device="cpu")
        )

    def kernel(group: LeafList) -> None:
        own = [p.detach() for p in group.params]
        for x, g in zip(own, typed(group.params, group.grads), strict=True):
            # The gradient is copied, since some classes write into gradients, and some keep them.
            x.grad = g.clone()
        inner = made.over(own, float(group.lr), group.numbers)
        for i, x in enumerate(own if group.count > 1 else ()):
            slots = made.kept(x.dtype)
            inner.state[x] = {name: slots[name].given(group.slots[name][i]) for name in names}
            if STEP in slots:
                inner.state[x][STEP] = slots[STEP].given(torch.tensor(group.count - 1, dtype=slots[STEP].dtype))
        inner.step()
        for i, x in enumerate(own):
            for name in names:
                group.slots[name][i].copy_(torch.as_tensor(inner.state[x][name]))

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        why = f"{made.cls.__name__} writes into parameters in place, which cannot be recorded"
        right = "zf.adam, zf.adamw, zf.sgd, zf.rmsprop or zf.lion; or a formula, @zf.leafwise(optimizer=True)"
        wrong = f"from_torch({made.cls.__name__}) under torch.func, autograd or a compiler"
        raise RuntimeError(explain(wrong, why, right))

    slots = {name: functools.partial(start, name) for name in names}
    # Only these may be set while training: other options, and a momentum of 0, decide which state there is.
    settable = {name: numbers[name] for name in ("betas", "weight_decay", "momentum") if name in numbers}
    if not settable.get("momentum", True):
        del settable["momentum"]
    made_of = optimizer("from_torch", lr, slots, formula, numbers, settable=settable, counterpart=made.cls)
    made_of = with_kernel(made_of, kernel)
    # The class reads its rate and its options as Python numbers, which a captured graph would not read again.
    return replace(made_of, facts=replace(made_of.facts, capturable=False))


def _options(cls: Any) -> dict[str, Any]:
    """The options of a class and their defaults, without `params`."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        what = f"{type(cls).__name__}(...)" if isinstance(cls, torch.optim.Optimizer) else repr(cls)
        why = "it takes the class, not an instance: the pipeline makes one for this rank's shards"
        raise TypeError(explain(f"from_torch({what})", why, "zf.from_torch(torch.optim.NAdam, lr=2e-3)"))
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    known = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "lr" not in known:
        why = "the class has no argument lr, and an optimizer of a chain has a learning rate"
        right = "class WithRate(ItsClass): def __init__(self, params, lr=1e-3): ..."
        raise TypeError(explain(f"from_torch({cls.__name__})", why, right))
    return known


def _number(value: Any) -> bool:
    """Whether `value` is a hyperparameter that may change during training."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaf() -> Tensor:
    return torch.linspace(-1.0, 1.3, 12, dtype=torch.float64, device="cpu").view(3, 4)


def _after(made: _Class, leaf: Tensor, updates: int, first: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """A leaf and its state after trial updates. Gradients depend on an element's index, counted from `first`."""
    x = leaf.clone()
    places = torch.arange(first, first + x.numel(), dtype=torch.float64, device="cpu").view_as(x)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            inner = made.over([x], 0.01, {})
            group = _group(inner)
            for update in range(updates):
                x.grad = (places * (update + 1.7)).sin().to(x.dtype)
                inner.step()
        except Exception as error:
            raise _unfit(made, f"a trial step of it raised {type(error).__name__}: {error}") from error
    if _group(inner) != group:
        raise _unfit(made, "it changes its param_groups in a step, which belong to the pipeline")
    return x, dict(inner.state[x])


def _group(inner: torch.optim.Optimizer) -> str:
    return repr({k: v for k, v in inner.param_groups[0].items() if k != "params"})


def _slots(made: _Class, after: tuple[Tensor, dict[str, Any]], updates: int) -> dict[str, _Slot]:
    leaf, state = after
    slots: dict[str, _Slot] = {}
    for name, x in state.items():
        kind: Callable[..., Any] = Tensor if isinstance(x, Tensor) else type(x)
        shape = x.shape if isinstance(x, Tensor) else torch.Size()
        if kind not in (Tensor, int, float) or shape not in (leaf.shape, torch.Size()):
            what = f"a tensor of shape {tuple(shape)}" if kind is Tensor else f"a {kind.__name__}"
            raise _unfit(made, f"for a leaf of shape {tuple(leaf.shape)} its state {name!r} is {what}")
        slots[name] = _Slot(shape == leaf.shape, torch.as_tensor(x).dtype, kind)
        if name in RESERVED and (name != STEP or slots[name].of_elements or x != updates):
            why = (
                f"the name {name!r} is reserved for a leaf's count of updates, and the class keeps another value there"
            )
            raise _unfit(made, why)
    return slots


def _check_elements(made: _Class) -> None:
    """Refuse a class whose update is not elementwise: it updates pieces of a leaf differently from the whole leaf."""
    whole = _leaf()
    new, state = _after(made, whole, 3)
    slots = _slots(made, (new, state), 3)
    # Each piece is a leaf of its own, as a shard is.
    pieces = [_after(made, whole.flatten()[low:high], 3, low) for low, high in ((0, 5), (5, 12))]
    pairs = [(new, torch.cat([x for x, _ in pieces]))]
    for name, slot in slots.items():
        parts = [torch.as_tensor(own[name]) for _, own in pieces]
        pairs += [(state[name], torch.cat(parts))] if slot.of_elements else [(state[name], part) for part in parts]
    for a, b in pairs:
        a, b = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in (a, b))
        if not torch.allclose(a, b, rtol=CLOSE, atol=CLOSE):
            raise _unfit(made, "a trial leaf in two pieces was updated differently from the whole leaf")


def _unfit(made: _Class, why: str) -> ValueError:
    right = (
        "zf.muon for orthogonal momentum, zf.adafactor;\n"
        "@zf.leafwise(optimizer=True), which gets full leaves at every stage;\n"
        "an elementwise class, such as zf.from_torch(torch.optim.NAdam); on one process, the class itself"
    )
    return ValueError(explain(f"from_torch({made.cls.__name__})", f"its update is not elementwise: {why}", right))
