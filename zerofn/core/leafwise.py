"""`leafwise`: transforms from functions on one tensor; `transform`: factories that record their arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of, unknown_keyword
from ..kernels.lists import batches, listed, on_lists
from ..kernels.numbers import TOLD, NotOnLists, line_of_error, tell
from ..kernels.plans import SHARED, Plans
from ..kernels.program import TensorList, computed
from ..kernels.recording import number
from .arguments import check_flag, check_needs, learning_rate, made_outside_of_graphs, plain
from .context import Context, Prepared
from .facts import Facts
from .halves import Joining
from .layout import Layout, Leaves
from .leaf_step import SHORT, LeafStep
from .leaf_updates import places_of
from .outside import constants, may_change
from .returned_values import misfit, own_update
from .state import counter
from .transform import Transform, TransformState
from .tree import flatten, tree_map, unflatten

P = ParamSpec("P")
# The library passes these to a function that has them as keyword-only arguments without a default.
STEP, PATH, OFFSET = "step", "path", "offset"
WIDER = ": it would lose bits there"
# The number of the update, by which results are rounded at random. No argument has this name.
ROUNDED = "rounded at random"


@made_outside_of_graphs
def transform(factory: Callable[P, Transform]) -> Callable[P, Transform]:
    """Make `factory` record its arguments in the transform and hint at misspelt keywords."""
    signature = inspect.signature(factory)
    names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]

    @made_outside_of_graphs
    @functools.wraps(factory)
    def build(*args: P.args, **kwargs: P.kwargs) -> Transform:
        for given in kwargs:
            if given not in names:
                raise TypeError(unknown_keyword(factory.__name__, given, names))
        bound = signature.bind(*map(plain, args), **{name: plain(x) for name, x in kwargs.items()})
        bound.apply_defaults()
        return replace(factory(*bound.args, **bound.kwargs), factory=build, config=dict(bound.arguments))

    # Pickling goes through the arguments: closures inside a transform need not be picklable.
    build.__rebuild__ = lambda config, parts: build(**config)  # type: ignore[attr-defined]
    return build


@made_outside_of_graphs
def leafwise(
    function: Callable | None = None,
    *,
    init: Callable[[Tensor], Tensor] | None = None,
    optimizer: bool = False,
    needs: str = "leaf",
) -> Callable[..., Any]:
    """Make a transform of your own from a function on one tensor: docs/writing-a-transform.md.

    The function takes `(grad, param)` and returns the new gradient; with `init` it takes `(grad, param, state)` and
    returns `(grad, state)`. All tensors, also the result, have the stored shape of the leaf. The function must not
    write into its arguments. It may return them: zerofn copies a state that is the gradient or the parameter itself.

    Keyword-only arguments of the function become arguments of the transform. The argument `lr` of an optimizer is its
    learning rate. If the user passes a schedule, the function gets the schedule's number. `opt.param_groups` and the
    metrics show the rate, and a `torch.optim.lr_scheduler` can set it. If `step`, `path` or `offset` is a keyword-only
    argument without a default, zerofn passes it: `step` is the number of earlier updates (a 0-d tensor in a compiled
    graph and under `vmap`), `path` is the leaf's path, and `offset` is the place of the first element of `grad` in the
    whole leaf, which `random_bits` needs.

    Args:
        function: of tensors of one leaf; left out if `leafwise` is a decorator with arguments.
        init: a leaf's first state from its parameter: a tensor, or a dict of tensors. The parameter has the dtype of
            gradients if `zf.precision(grad_dtype=...)` makes that the wider one.
        optimizer: whether the function returns the new *parameter*, which is stored in its old dtype.
        needs: how much of a leaf an update must see to be right; `zerofn.testing.check_transform` finds a function that
            says too little. `"element"`: element i of the result depends only on element i of gradient, parameter and
            state. If leaves are sharded, the function gets flat shards of shape `(n,)`, some of them empty. `"row"`: a
            row of the result depends on the same row only. If leaves are sharded, the function gets this rank's rows,
            `(rows, ...)`, maybe none. `"leaf"`: the function computes a norm, a sort or a matrix product, or uses the
            place in the leaf. If leaves are sharded, one rank, the owner, gathers the leaf, updates it and keeps its
            state. `zf.save` saves this state for any number of ranks; `opt.state_dict()` has it on the owner only. With
            `"row"` the state of a sharded leaf has the shape of the rows or `(rows, k)`. With
            `"element"`, without `path` and `offset`, one kernel computes many leaves if the function consists of
            arithmetic of its tensors (docs/your-formula-is-a-kernel.md). It is called in the first step, and later ones
            repeat what it did, unless it reads something that may change and is no argument.

    Raises:
        TypeError: the function, or `init`, cannot be called, or takes other arguments: a `state` without `init`, too
            few or too many, or an argument of its own that is not keyword-only.
        ValueError: `needs` is no such word; or, at a step, the function returned no real tensor of the leaf's shape
            and device, or a state with other shapes or dtypes than `init` gave. The leaves are named.

    Examples:
        >>> import torch, zerofn as zf
        >>> @zf.leafwise(optimizer=True, needs="element")
        ... def biases_faster(grad, param, *, lr, step, path):
        ...     return param - (1 + 9 * (step > 0) * ("bias" in path)) * lr * grad
        >>> tx = biases_faster(lr=zf.schedules.constant(0.5))
        >>> state = zf.init(tx, {"bias": torch.zeros(1)})
        >>> for _ in range(2):
        ...     state, _ = zf.update(tx, {"bias": torch.ones(1)}, state)
        >>> state.params["bias"]
        tensor([-5.5000])
    """
    _check(function, init, optimizer, needs)
    if function is not None:
        _check_signature(function, init)
    if function is None:
        return functools.partial(leafwise, init=init, optimizer=optimizer, needs=needs)
    return _factory(function, init, optimizer, needs)


def _check(function: Any, init: Any, optimizer: Any, needs: Any) -> None:
    check_flag("leafwise", "optimizer", optimizer)
    for what, given in (("function", function), ("init", init)):
        if given is not None and not callable(given):
            why, right = f"{what} is a function of tensors", "@zf.leafwise(init=torch.zeros_like)"
            raise TypeError(explain(f"leafwise({what}={given!r})", why, f"{right}\ndef mine(grad, param, state): ..."))
    check_needs("leafwise", needs, ("element", "row", "leaf"), "a function on one tensor sees one leaf at a time")


def _name_of(function: Any) -> str:
    """The name of a function; of an object that is called its class's, and of a `functools.partial` its function's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _check_signature(function: Any, init: Any) -> None:
    """Raise a TypeError if the function or `init` cannot be called with the arguments that it will get."""
    name = _name_of(function)
    given = ("grad", "param", "state")[: 2 if init is None else 3]
    own = ""
    if isinstance(function, type):
        why = "calling a class makes an object and returns no gradient; pass an object with __call__"
        raise TypeError(explain(f"leafwise({name})", why, f"leafwise({name}(...))"))
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        why = "Python cannot list the arguments of a C function, so none of them could be set"
        right = f"@zf.leafwise\ndef mine({', '.join(given)}): return ..."
        raise TypeError(explain(f"leafwise({name})", why, right)) from None
    keywords = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    placed = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    wrong = f"leafwise(init={'...' if init is not None else None}) of {name}{_shown(parameters.values())}"
    stateful = any(p.name == "state" for p in (*placed[2:], *keywords))
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        why = "it returns before it has computed anything: a generator, or something to await"
    elif init is None and (stateful or (len(placed) == 3 and placed[2].default is inspect.Parameter.empty)):
        why = "it takes a state, and there is no init that makes the first state"
    elif init is not None and any(p.name == "state" for p in keywords):
        why = "the state is passed as its third argument, not by keyword"
    elif len(placed) > len(given):
        why = f"it is called with ({', '.join(given)}); arguments of its own are keyword-only, behind a *"
        own = ", ".join(str(p) for p in placed[len(given) :])
    elif len(placed) < len(given) and not rest:
        why = f"it is called with ({', '.join(given)})"
        why += ": init makes a state, which it does not take" if len(placed) == 2 else ""
    else:
        _check_init(init)
        return
    own = ", ".join(filter(None, [own, *(str(p) for p in keywords if p.name != "state")]))
    three = init is not None or stateful or "no init" in why
    if len(placed) == 2 and init is not None and not stateful:
        right = f"@zf.leafwise\ndef {name}(grad, param{own and ', *, ' + own}): ...; or, with a state,\n"
        right += f"@zf.leafwise(init=torch.zeros_like)\ndef {name}(grad, param, state{own and ', *, ' + own}): ..."
    else:
        right = f"@zf.leafwise{'(init=torch.zeros_like)' if three else ''}\n"
        right += f"def {name}(grad, param{', state' if three else ''}{own and ', *, ' + own}): ..."
    raise TypeError(explain(wrong, why, right))


def _shown(parameters: Iterable[inspect.Parameter]) -> str:
    """A signature without annotations."""
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def _check_init(init: Any) -> None:
    if init is None:
        return
    try:
        signature = inspect.signature(init)
    except (TypeError, ValueError):
        return  # a C function such as torch.zeros_like has no signature to check
    try:
        signature.bind(None)
    except TypeError as error:
        wrong = f"leafwise(init={_name_of(init)}) of {_shown(signature.parameters.values())}"
        why = f"init is called with one parameter, for the first state of that leaf: {error}"
        raise TypeError(explain(wrong, why, "init=torch.zeros_like, or a function of one tensor")) from None


def _factory(function: Callable, init: Callable[[Tensor], Tensor] | None, optimizer: bool, needs: str) -> Callable:
    """From keyword arguments of the function to the transform.

    >>> import zerofn as zf
    >>> @zf.leafwise(needs="element")
    ... def sign(grad, param, *, strength=1.0):
    ...     return strength * grad.sign()
    >>> tx = zf.chain(sign(strength=2.0), zf.sgd(lr=0.5))
    >>> tx
    chain(
        sign(strength=2.0),
        sgd(lr=0.5),
    )
    >>> state = zf.init(tx, {"w": torch.zeros(2)})
    >>> state, _ = zf.update(tx, {"w": torch.tensor([3.0, -0.1])}, state)
    >>> state.params["w"]
    tensor([-1.,  1.])
    """
    options = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    provided = frozenset(name for name in (STEP, PATH, OFFSET) if options.get(name) is inspect.Parameter.empty)
    options = {name: default for name, default in options.items() if name not in provided}

    @made_outside_of_graphs
    @functools.wraps(function)
    def build(**given: Any) -> Transform:
        for name in given:
            if name not in options:
                raise TypeError(unknown_keyword(_name_of(function), name, options))
        config = {**options, **given}
        for name, value in config.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{_name_of(function)}() needs {name}=; it has no default.")
        of_lists = needs == "element" and not provided & {PATH, OFFSET}
        made = _OnLeaves(function, init, optimizer, of_lists, config, provided)
        return Transform(
            made.name,
            needs=needs,
            facts=Facts(
                optimizes=optimizer,
                rate=config.get("lr") if optimizer else None,
                starts_wide=True,
                rounds=True,
                # A function that gets `step` may read it in Python, which a captured graph does not run again.
                capturable=not made.counts,
            ),
            init_fn=made.init,
            prepare_fn=made.prepare,
            update_fn=Joining(made.update) if of_lists else made.update,
            factory=build,
            config=config,
        )

    build.__name__ = _name_of(function)
    build.__rebuild__ = lambda config, parts: build(**config)  # type: ignore[attr-defined]
    return build


@dataclass(frozen=True)
class _OnLeaves:
    """A user's function on one tensor, run on each leaf; `provided` are the arguments that the library passes.

    With `of_lists` large leaves, and those of a GPU, are computed together.
    """

    function: Callable
    start: Callable[[Tensor], Tensor] | None
    optimizes: bool
    of_lists: bool
    config: dict[str, Any]
    provided: frozenset[str]
    plans: Plans = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", Plans(self.traced))

    @property
    def name(self) -> str:
        return _name_of(self.function)

    @property
    def scheduled(self) -> bool:
        return self.optimizes and callable(self.config.get("lr"))

    @property
    def counts(self) -> bool:
        """Whether it keeps the number of its updates."""
        return self.scheduled or STEP in self.provided

    def init(self, leaves: Leaves, layout: Layout) -> TransformState:
        counted: TransformState = {STEP: counter()} if self.counts else {}
        if self.start is None:
            return counted
        made = {path: self.start(p) for path, p in leaves.items()}
        wrong = [(path, kind) for path, x in made.items() for y in _values(x) if (kind := _kind(y))]
        if wrong:
            right = 'init=torch.zeros_like, or a dict of tensors: {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}'
            raise ValueError(bad_leaves(f"{self.name}: init, which gives the state of a leaf, returned", wrong, right))
        return {**counted, "value": made}

    def prepare(self, state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        now = number(state[STEP]) if self.counts else ctx.micro_step
        found = dict(self.config)
        if self.optimizes and "lr" in self.config:
            rate = plain(ctx.lr.get(ctx.prefix, self.config["lr"]))
            if self.scheduled or rate is not self.config["lr"]:
                rate = learning_rate(self.name, rate, now, ctx.unrecorded)
            found["lr"] = rate
        if ctx.recorded:
            # All ranks use the same arguments, each with its own shards. A derivative by one is a sum over ranks.
            found = tree_map(ctx.replicated, found)
        if self.optimizes and isinstance(rate := found.get("lr"), int | float | Tensor):
            ctx.report("lr", rate)
        if STEP in self.provided:
            found[STEP] = now
        return Prepared(carry=found, state={STEP: state[STEP] + 1} if self.counts else {})

    def update(self, grads: Leaves, state: TransformState, params: Leaves, options: Any, ctx: Context) -> Any:
        out: Leaves = {}
        stateful, kept, wrong = self.start is not None, dict(state.get("value", {})), []
        together: dict[str, Any] = {}
        owned: set[str] = set()
        if self.of_lists:
            if not ctx.recorded:
                together, owned = self.on_lists(grads, params, kept, options, ctx)
            if len(together) < len(grads):
                ctx.settle()
        for path, g in grads.items():
            p = params[path]
            if path in together:
                out[path], own = together[path]
                if stateful:
                    kept[path] = own
                continue
            given: Any = (g, p, kept[path]) if stateful else (g, p)
            given = given if ctx.rounding is None else tree_map(_wide, given)
            of_leaf = {PATH: path, OFFSET: ctx.offsets.get(path, 0)}
            options = {**options, **{name: x for name, x in of_leaf.items() if name in self.provided}}
            returned = self.function(*given, **options) if stateful else (self.function(*given, **options), None)
            if reason := _misreturned(returned, p) or (stateful and _other_state(given[2], returned[1])):
                wrong.append((path, reason))
                continue
            at = _step(ctx, path, of_leaf[OFFSET])
            out[path] = at.stored(returned[0], p.dtype, 0) if self.optimizes else _as_given(returned[0], g, ctx)
            if stateful:
                kept[path] = _stored(kept[path], returned[1], at)
        if wrong:
            raise ValueError(_misreturned_message(self.name, wrong, stateful, self.optimizes))
        if self.of_lists and len(owned) < len(out):
            # What a program returns shares no memory. What the function itself returns may, and is copied then. Nobody
            # else looks: results of a `Joining` half are not compared.
            rest = [path for path in out if path not in owned]
            before = state.get("value", {})
            olds, news = ({"value": {p: of[p] for p in rest}} if stateful else {} for of in (before, kept))
            made, own = own_update(self.optimizes, ({p: out[p] for p in rest}, news), olds, grads, params, options)
            out |= made or {}
            kept |= own.get("value", {})
        return out, {"value": kept} if stateful else {}

    def on_lists(
        self, grads: Leaves, params: Leaves, kept: Mapping[str, Any], options: Any, ctx: Context
    ) -> tuple[dict[str, Any], set[str]]:
        """Result and state, by path, of leaves that are computed together; not of those that run leaf by leaf.

        What the function has done in one step is repeated in later ones by a program, if it reads nothing that may
        change but its arguments.

        Returns:
            The results, and the paths of those that a program has computed.
        """
        paths, stateful, rounding = list(grads), self.start is not None, ctx.rounding
        columns = [[*grads.values()], [params[path] for path in paths]]
        if not on_lists(columns) or (rounding is not None and isinstance(rounding.step, Tensor)):
            return {}, set()
        trees = [flatten(kept[path] if stateful else {}) for path in paths]
        form = trees[0][1]
        columns += map(list, zip(*(values for values, _ in trees), strict=False))
        if any(own != form for _, own in trees) or any(
            len({x.shape for x in row}) > 1 for row in zip(*columns, strict=True)
        ):
            return {}, set()
        numbers = {name: x for name in ("lr", STEP) if type(x := options.get(name)) in (int, float)}
        known = constants(self.function, *[x for name, x in options.items() if name not in numbers])
        if known is None and TOLD:
            tell(*may_change(self.function, {name: x for name, x in options.items() if name not in numbers}))
        if rounding is not None:
            numbers[ROUNDED], rounding = rounding.step, rounding._replace(step=None)
        into = None
        if ctx.donate and not ctx.unread:
            into = [1 if self.optimizes else SHARED, *range(2, len(columns))]
        found: dict[str, Any] = {}
        owned: set[str] = set()
        for batch, lists in batches(*columns):
            own_paths = [paths[i] for i in batch]
            made: list[list[Tensor]] | None = None
            if known is not None:
                about = form, rounding, known
                place = functools.partial(places_of, own_paths, ctx)
                with contextlib.suppress(NotOnLists):
                    made, _ = self.plans.run(lists, numbers, into, about, place, passes=ctx.passes)
                    owned.update(own_paths)
                    if into is not None:
                        ctx.written.add(ctx.prefix)
            if made is None:
                ctx.settle()
                offsets = [ctx.offsets.get(path, 0) for path in own_paths]
                given = listed(lists), {**options, **numbers}, (form, rounding)
                try:
                    results, _ = self.traced(*given, own_paths, offsets)
                except Exception as error:
                    # A function that gets lists may raise any error. Its leaves then run one by one, and if that fails
                    # too, the error is about one leaf.
                    if TOLD and not isinstance(error, NotOnLists):
                        tell(f"{type(error).__name__}: {error}", line_of_error(error))
                    continue
                computed(*results)
                made = [x.tensors for x in results]
            of_leaves = zip(own_paths, zip(*made, strict=True), strict=True)
            found |= {path: (x, unflatten(form, values)) for path, (x, *values) in of_leaves}
        return found, owned

    def traced(
        self, lists: list[Any], numbers: Mapping[Any, Any], about: Any, paths: Sequence[str] = (), offsets: Any = ()
    ) -> tuple[list[Any], list[Any]]:
        """The function on lists of gradients, parameters and states: what it returns, as it is stored.

        Args:
            numbers: arguments of the function that are not those of `config`, and the number of the update.
            about: the structure of a leaf's state, and how results are rounded.
            paths, offsets: of the leaves, where numbers are those of a step.
        """
        (form, rounding), (g, p, *olds), stateful = about[:2], lists, self.start is not None
        options = {**self.config, **numbers}
        at = LeafStep(options.pop(ROUNDED, None), None, "", 0, paths=paths, offsets=offsets, rounding=rounding)
        wide = lists if rounding is None else list(map(_wide, lists))
        given = (*wide[:2], unflatten(form, wide[2:])) if stateful else wide
        returned = self.function(*given, **options)
        first, own = returned if stateful else (returned, {})
        news, now = flatten(own)
        if now != form or any(type(x) is not TensorList for x in (first, *news)):
            raise NotOnLists("a result that is made of no argument")
        if not all(_holds(old.dtype, new.dtype) for old, new in zip(wide[2:], news, strict=True)):
            raise NotOnLists("a state in another dtype")
        made = [at.stored(first, p.dtype, 0) if self.optimizes else first if rounding is None else first.to(g.dtype)]
        made += [at.stored(new, old.dtype, i) for i, (old, new) in enumerate(zip(olds, news, strict=True), 1)]
        # What replaces an old tensor, and is another argument unchanged, is a copy.
        places = [p if self.optimizes else made[0], *olds]
        return [
            x.clone() if x is not old and any([x is y for y in lists]) else x
            for old, x in zip(places, made, strict=True)
        ], []


def _wide(x: Any) -> Any:
    """A tensor of 16 bits, or a list of these, in fp32; anything else as it is."""
    return x.to(torch.float32) if isinstance(x, Tensor | TensorList) and x.dtype in SHORT else x


def _as_given(x: Any, g: Any, ctx: Context) -> Any:
    """A new gradient in the dtype of the old one, where the function was given that in fp32."""
    return x if ctx.rounding is None else x.to(g.dtype)


def _step(ctx: Context, path: str, offset: int, paths: Sequence[str] = (), offsets: Sequence[int] = ()) -> LeafStep:
    """What decides how results are stored."""
    step = ctx.rounding and ctx.rounding.step
    return LeafStep(step, None, path, offset, paths=paths, offsets=offsets, rounding=ctx.rounding)


def _misreturned(returned: Any, param: Tensor) -> str | None:
    """Why `returned` is no pair of a tensor that fits the parameter and a state; `None` if it is one."""
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        return f"{_kind(returned) or 'a Tensor'} instead of a pair"
    first = returned[0]
    if kind := _kind(first):
        return f"{kind} instead of a tensor"
    return misfit(first, param, param)


def _values(x: Any) -> list[Any]:
    """The tensors of a leaf's state, a tensor or a dict of them."""
    return [z for y in x.values() for z in _values(y)] if type(x) is dict else [x]


def _kind(x: Any) -> str | None:
    """The kind of `x` in words; `None` for a dense tensor."""
    if not isinstance(x, Tensor):
        return kind_of(x)
    return None if x.layout is torch.strided else f"a tensor of layout {x.layout}"


def _other_state(old: Any, new: Any) -> str | None:
    """How a leaf's new state differs in form from the old, so that no checkpoint would fit; `None` if it does not."""
    if type(old) is type(new) is Tensor and old.shape == new.shape and _holds(old.dtype, new.dtype):
        return None
    (olds, was), (news, now) = flatten(old), flatten(new)
    if was != now:
        return f"a state of another structure than init gave it: {now} instead of {was}"
    for a, b in zip(olds, news, strict=True):
        form, given = (_kind(x) or f"a tensor of shape {tuple(x.shape)}, {x.dtype}" for x in (b, a))
        alike = _kind(a) is _kind(b) is None and a.shape == b.shape
        if form != given and not (alike and _holds(a.dtype, b.dtype)):
            return f"{form} for its state, which init made {given}{WIDER if alike and b.is_floating_point() else ''}"
    return None


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the dtype `wide` can represent every number of `narrow`; both are real."""
    return wide == narrow or (
        wide.is_floating_point and narrow.is_floating_point and torch.promote_types(wide, narrow) == wide
    )


def _stored(old: Any, new: Any, at: LeafStep) -> Any:
    """A new state in the old dtypes, rounded at random if the step says so."""
    if type(new) is Tensor:
        return at.stored(new, old.dtype, 1)
    (olds, form), (news, _) = flatten(old), flatten(new)
    pairs = enumerate(zip(olds, news, strict=True), 1)
    return unflatten(form, [at.stored(b, a.dtype, i) if isinstance(b, Tensor) else b for i, (a, b) in pairs])


def _misreturned_message(name: str, wrong: list[tuple[str, str]], pair: bool, optimizer: bool) -> str:
    first = "new_param" if optimizer else "new_grad"
    right = f"return {first}, new_state" if pair else f"return {first}"
    right += f", with {first}.shape == param.shape"
    right += ", and a state of the shapes and dtypes that init gave it" if pair else ""
    if any(WIDER in reason for _, reason in wrong):
        right += "; of gradients that are wider than parameters\n"
        right += "zf.precision(grad_dtype=torch.float32) in the chain, by which init is given leaves as wide;\n"
        right += "init=lambda p: torch.zeros_like(p, dtype=torch.float32); or new_state.to(state.dtype), which rounds"
        right = right.replace("\n", "\n         ")
    return bad_leaves(f"{name}, a leafwise transform, returned", wrong, right)
