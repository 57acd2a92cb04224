"""Mistakes get an error that says what to do, or the right result; never a silent wrong one."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import re

import models as zoo
import pytest
import torch
from refusals import Kept, Refusals
from torch import nn

import zerofn as zf

NAN = float("nan")
CASES = {
    "plain": lambda: zf.chain(zf.sgd(0.1)),
    "scaled": lambda: zf.chain(zf.scale_loss(1024.0), zf.sgd(0.1)),
    "bf16": lambda: zf.chain(zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32), zf.sgd(0.1)),
}
WRONG = Refusals()


@pytest.fixture(params=CASES)
def tx(request) -> zf.Transform:
    return CASES[request.param]()


def net() -> nn.Module:
    torch.manual_seed(0)
    return zoo.Net()


X = torch.linspace(-1, 1, 30).reshape(5, 6)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def close(a, b) -> None:
    """bf16 is compared to 5 %, since both sides of these tests round it alike but for one place."""
    assert torch.linalg.vector_norm(a - b) <= 5e-2 * torch.linalg.vector_norm(b)


def linear(*made, grads=True):
    """A small model that is attached, with gradients; by default by AdamW."""
    model = nn.Linear(2, 1)
    opt = zf.attach(model, zf.chain(*(made or (zf.adamw(1e-3),))))
    if grads:
        model(torch.ones(1, 2)).sum().backward()
    return opt


def attached(case, wrong):
    """`wrong` of an attached model with gradients, whose state is afterwards what it was."""

    def program():
        model = net()
        opt = zf.attach(model, case())
        loss_of(model).backward()
        yield lambda: opt.state
        wrong(model, opt)

    return program


# ---- what is attached ----

WRONG.rows(
    TypeError,
    (lambda: zf.attach({"w": torch.ones(1)}, zf.sgd(0.1)), "attach(dict, tx)", "zf.make_step"),
    (lambda: zf.attach({"w": torch.ones(1)}, zf.sgd(0.1)), "the eager route hooks a torch.nn.Module"),
)
WRONG.rows(
    ValueError,
    (lambda: zf.attach(net(), zf.clip_by_value(1.0)), "no optimizer"),
    (lambda: zf.attach(nn.Tanh(), zf.sgd(0.1)), "the model has no parameters"),
    (lambda: zf.attach(nn.Linear(2, 2, device="meta"), zf.sgd(0.1)), "meta device"),
)


def with_parameter(make):
    """A model with one parameter that `make` gives, of a model."""

    def program():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = nn.Parameter(make(model))
        yield dict(model.state_dict())
        zf.attach(model, zf.adamw(0.1))

    return program


ONE_MEMORY = [torch.ones(2, 1).expand(2, 2), torch.arange(3.0).as_strided((2, 2), (1, 1))]
WRONG.rows(
    ValueError,
    (with_parameter(lambda m: torch.tensor([[NAN, 0.0], [0.0, 0.0]])), "NaN in parameters", "1.weight: 1 of 4"),
    (with_parameter(lambda m: m[0].weight.data), "1.weight: shares memory with 0.weight", "a.weight = b.weight"),
    *[
        (with_parameter(lambda m, x=x: x), f"weight: of strides {x.stride()}: elements share memory", "x.contiguous()")
        for x in ONE_MEMORY
    ],
)


@WRONG(ValueError, "NaN in parameters", "gain: ", "first.bias: ")
def nan_in_several_parameters():
    model = net()
    with torch.no_grad():
        model.gain[3] = model.first.bias[0] = NAN
    yield
    zf.attach(model, zf.sgd(0.1))


def test_rows_between_each_other_share_no_memory():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.arange(8.0).as_strided((3, 2), (2, 3)))
    zf.attach(model, zf.adamw(0.1))


def again(of):
    """Another attach of the same parameters."""

    def program():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        opt = zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.adamw(0.1)))
        model(torch.ones(1, 2)).sum().backward()

        def then():
            """The first one goes on, and after detach there is a second one."""
            opt.step()
            opt.detach()
            zf.attach(model, zf.sgd(0.1))

        yield Kept(lambda: opt.state, then)
        zf.attach(of(model), zf.sgd(0.1))

    return program


WRONG.rows(
    ValueError,
    (again(lambda m: m), "0.weight"),
    (again(lambda m: m[0]), "weight"),
    (again(lambda m: nn.Sequential(m, nn.Linear(1, 1))), "weight"),
    (again(lambda m: nn.Sequential(nn.Linear(2, 2), m[1])), "weight"),
    told=("parameters belong to another optimizer; two would both update them", "attached already", "opt.detach()"),
)


@WRONG(ZeroDivisionError)
def a_schedule_that_fails_at_once_leaves_the_model_as_it_was():
    model = nn.Linear(2, 2)
    tx = zf.chain(zf.precision(store_dtype=torch.float64), zf.scale_loss(), zf.adamw(lambda step: 1 / step))
    yield lambda: (
        [(str(p.dtype), id(p), p.data_ptr()) for p in model.parameters()],
        [len(hooks) for name, hooks in vars(model).items() if "hook" in name and hooks],
    )
    zf.attach(model, tx)


# ---- what is changed afterwards ----


def weight_norm(model):
    nn.utils.parametrizations.weight_norm(model.first)


for change, words in (
    (lambda m: m.half(), "first.bias: moved to torch.float16 on cpu; attached as torch.float32 on cpu"),
    (lambda m: m.first.double(), "first.weight: moved to torch.float64"),
    (lambda m: setattr(m.gain, "data", torch.ones(1)), "gain: its data were replaced; write in place"),
    (lambda m: setattr(m, "gain", nn.Parameter(torch.ones(8))), "gain: added, removed or replaced"),
    (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "more: added, removed or replaced"),
    (lambda m: m.first.register_parameter("more", nn.Parameter(torch.ones(1))), "first.more: added, removed or rep"),
    (lambda m: delattr(m, "gain"), "gain: added, removed or replaced"),
    (lambda m: m.add_module("head", nn.Linear(2, 2)), "head: added, removed or replaced"),
    (lambda m: setattr(m, "first", nn.Linear(6, 8)), "first: added, removed or replaced"),
    (lambda m: delattr(m, "first"), "first: added, removed or replaced"),
    (weight_norm, "first.weight: added, removed or replaced"),
):
    for case in CASES.values():

        def changed(case=case, change=change):
            model = net()
            opt = zf.attach(model, case())
            loss_of(model).backward()
            kept = dict(opt.state.leaves)
            change(model)
            yield lambda: (kept, opt.state.step)
            opt.step()

        WRONG.rows(
            RuntimeError,
            (changed, words),
            told=(
                "changed after it was attached",
                "opt.detach() before the change and opt = zf.attach(model, tx) after it",
            ),
        )

# ---- when it is called ----


def detached(case, call):
    def program():
        model = net()
        opt = zf.attach(model, case())
        assert opt.detach() is model
        yield
        call(model, opt)

    return program


for case in CASES.values():
    WRONG.rows(
        RuntimeError,
        (detached(case, lambda model, opt: opt.step()), "opt.step() after opt.detach()"),
        (detached(case, lambda model, opt: opt.backward(loss_of(model))), "opt.backward() after"),
        (detached(case, lambda model, opt: opt.load_state_dict({})), "opt.load_state_dict() after"),
        told=("the model is plain", "write: opt = zf.attach(model, tx)"),
    )

    def in_backward(case=case):
        model = net()
        opt = zf.attach(model, case())
        model.gain.register_hook(lambda g: opt.step())
        loss = loss_of(model)
        yield lambda: dict(model.state_dict())
        loss.backward()

    WRONG.rows(RuntimeError, (in_backward, "opt.step() in the middle of a backward"))

    def in_step(what, case=case):
        def program():
            asked: list[zf.Optimizer] = []

            def falling(step):
                for opt in asked:
                    what(opt)
                return 0.1 / (1 + step)

            model, tx = net(), zf.chain(*case().parts[:-1], zf.sgd(falling))
            opt = zf.attach(model, tx)
            loss_of(model).backward()
            opt.step()
            asked.append(opt)
            yield lambda: (opt.state, dict(model.state_dict()), opt.global_steps)
            opt.step()

        return program

    WRONG.rows(
        RuntimeError,
        (in_step(lambda opt: opt.step()), "opt.step() inside of opt.step()"),
        (in_step(lambda opt: opt.load_state(opt.state)), "opt.load_state() inside of"),
        (in_step(lambda opt: opt.averaged().__enter__()), "opt.averaged() inside of"),
        told=("a step is under way", "a schedule that calls nothing of opt"),
    )
    WRONG.rows(
        TypeError,
        (attached(case, lambda model, opt: copy.copy(opt)),),
        (attached(case, lambda model, opt: copy.deepcopy(opt)),),
        (attached(case, lambda model, opt: pickle.dumps(opt)),),
        told=("belongs to one model by hooks", "opt.state_dict() to keep it"),
    )

    def before_backward(case=case):
        opt = zf.attach(net(), case())
        yield lambda: opt.state
        opt.step()

    def twice(case=case):
        model = net()
        opt = zf.attach(model, case())
        loss_of(model).backward()
        opt.step()
        opt.zero_grad()
        yield lambda: (opt.state, opt.global_steps)
        opt.step()

    WRONG.rows(
        ValueError,
        (before_backward,),
        (twice,),
        told=("a step in which no parameter has a gradient", "loss.backward() before opt.step()"),
    )


def kept_graph(before, last, store):
    """PyTorch's own error where the graph needs a parameter that has changed, whatever kernel changed it."""

    def program():
        model = net()
        opt = zf.attach(model, zf.chain(zf.precision(store_dtype=store, output_dtype=torch.float32), *before, last))
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        opt.step()
        yield
        loss.backward()

    return program


INPLACE = re.compile(r"modified by an inplace operation|modified inplace")
for last in (zf.sgd(0.1), zf.adam(0.1), zf.adamw(0.1), zf.low_precision_adam(0.1)):
    for store in (torch.float32, torch.bfloat16):
        for before in ([], [zf.scale_loss(64.0)]):
            WRONG.rows(RuntimeError, (kept_graph(before, last, store), INPLACE))


class Leaking(nn.Module):
    """Puts an inner tensor where nobody looks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)
        self.seen = collections.deque(maxlen=1)

    def forward(self, x):
        self.seen.append(self.first(x))
        return self.last(self.seen[0])


def escaped(backward):
    """The first of another kind of loss, whichever backward that is."""

    def program():
        model = Leaking()
        zf.attach(model, CASES["scaled"]())
        for _ in range(backward - 1):
            model(X).square().mean().backward()
        loss = model(X).square().mean() + model.seen[0].square().mean()
        yield
        loss.backward()

    return program


WRONG.rows(RuntimeError, *[(escaped(backward), "did not come out of it") for backward in (1, 2, 3, 5, 7)])


@WRONG(ValueError, "weight", "sparse=False")
def sparse_gradients_of_a_model():
    model = nn.Embedding(5, 2)
    opt = zf.attach(model, zf.adamw(0.1))
    nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    yield lambda: opt.state
    opt.step()


@WRONG(RuntimeError, "a step that writes into its state", "of an attached model", "functional_call")
def a_derivative_of_a_step_of_an_attached_model():
    model = nn.Linear(2, 1)
    opt = zf.attach(model, zf.sgd(0.1))
    model(torch.ones(3, 2)).sum().backward()

    def after(rate):
        opt.step()
        return rate * model.weight.sum()

    yield lambda: dict(model.state_dict())
    torch.func.grad(after)(torch.tensor(0.1))


@WRONG(TypeError, "a schedule returns a number")
def a_schedule_that_fails_when_a_window_closes():
    """The sums of `accumulate` too: a gradient is not added by a step that raises."""
    model = net()
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.adamw(lambda step: 1e-3 if step < 1 else "no")))
    for _ in range(2):
        loss_of(model).backward()
        opt.step()
        opt.zero_grad()
    yield opt.state_dict
    for _ in range(2):
        loss_of(model).backward()
        with pytest.raises(TypeError, match="a schedule returns a number"):
            opt.step()
    opt.step()


def first_backward_behind_uncleared_steps():
    model = net()
    opt = zf.attach(model, CASES["plain"]())
    loss_of(model).backward()
    opt.step()
    yield lambda: [model.state_dict(), *(p.grad for p in model.parameters())]
    opt.backward(loss_of(model))


WRONG.rows(
    RuntimeError,
    (first_backward_behind_uncleared_steps, "the first opt.backward(loss), after steps", "write: opt.zero_grad()"),
)


# ---- what is given ----

for wrong in (lambda: net()(X), lambda: torch.tensor(1.0), lambda: 3.0):
    WRONG.rows(
        ValueError,
        (
            attached(CASES["plain"], lambda model, opt, wrong=wrong: opt.backward(wrong())),
            "it takes a loss of one element that requires a gradient",
        ),
    )
WRONG.rows(
    ValueError,
    (lambda: linear().set_boundary(True), "no effect without accumulate"),
    (lambda: linear(zf.accumulate(1), zf.adamw(1e-3)).set_boundary(False), "set_boundary"),
    (lambda: linear().step(lr_kwargs={"epoch": 1}), "step(lr_kwargs=...)", "opt.lr_scheduler, and there is none"),
    (
        lambda: linear().backward(torch.ones(2, requires_grad=True)),
        "opt.backward(a tensor of shape (2,))",
        "output.backward(gradient)",
    ),
    (
        lambda: linear(zf.accumulate(2, weighted=True), zf.sgd(0.1)).backward(
            torch.ones((), requires_grad=True), scale_wrt_gas=False
        ),
        "divided by the weights",
    ),
)
WRONG.rows(
    TypeError,
    (lambda: linear().set_boundary("yes"), "set_boundary('yes')", "give True, False, or None"),
    (lambda: linear().set_boundary(1), "set_boundary(1)", "give True, False, or None"),
)
WRONG.rows(
    NotImplementedError,
    (lambda: linear().add_param_group({"params": []}), "zf.partition"),
    (lambda: linear().add_param_group({"params": [torch.zeros(1)]}), "zf.partition"),
)


def grouped(change, *made, right=lambda opt: None):
    """A change of `param_groups` that the next step refuses; `right` undoes it."""

    def program():
        opt = linear(*made)
        change(opt)
        yield Kept(lambda: opt.state, lambda: right(opt) and opt.step())
        opt.step()

    return program


def set_to(**values):
    return lambda opt: opt.param_groups[0].update(values)


CLIPPED = (zf.accumulate(1), zf.clip_by_value(1.0), zf.sgd(0.1))
WRONG.rows(
    ValueError,
    (
        grouped(set_to(eps=0.1), right=lambda opt: opt.param_groups[0].pop("eps")),
        "only lr and betas and weight_decay can be set; eps is part of the pipe",
    ),
    (grouped(set_to(lr=NAN), *CLIPPED), "lr"),
    (grouped(set_to(lr=-1.0), *CLIPPED), "lr"),
    (grouped(set_to(lr=0.5), zf.sgd(lambda step: 0.1)), "owns its learning rate"),
    (grouped(lambda opt: opt.param_groups[0].pop("lr")), "without lr"),
    *[
        (grouped(change), "every parameter stays with its")
        for change in (
            lambda opt: setattr(opt, "param_groups", []),
            lambda opt: opt.param_groups.append({"params": [nn.Parameter(torch.ones(1))], "lr": 0.1}),
            lambda opt: opt.param_groups.pop(),
            lambda opt: opt.param_groups[0]["params"].pop(),
            lambda opt: opt.param_groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(1))),
        )
    ],
)
WRONG.rows(TypeError, (grouped(set_to(lr="x"), *CLIPPED), "lr"), (grouped(set_to(lr=None), *CLIPPED), "lr"))
WRONG.rows(
    AttributeError,
    *[
        (lambda name=name: setattr(linear(), name, {}), f"opt.{name} = ", "write: ", right)
        for name, right in (("state", "opt.load_state"), ("tx", "zf.attach"), ("is_boundary", "opt.set_boundary"))
    ],
)


def test_get_of_a_state_is_that_of_a_dict():
    opt = linear()
    p = opt.param_groups[0]["params"][0]
    assert opt.state.get(p).keys() == opt.state[p].keys() and opt.state.get(None, 3) == 3


# ---- state dicts of something else ----


def loads(change):
    def program():
        opt = linear(zf.accumulate(2), zf.adamw(0.1))
        opt.step()
        given = change(opt.state_dict())
        yield lambda: opt.state
        opt.load_state_dict(given)

    return program


OTHER = {"weight": torch.ones(3, 3), "other": torch.ones(1)}
WRONG.rows(
    ValueError,
    (loads(lambda good: {}), "param_groups"),
    (loads(lambda good: ("garbage",)), "param_groups"),
    (loads(lambda good: {**good, "zerofn": {**good["zerofn"], "params": OTHER}}), "weight", "bias", "other"),
    (loads(lambda good: {**good, "transforms": {}}), "transforms", "unexpected"),
    (loads(lambda good: {**good, "surprise": torch.ones(1)}), "surprise", "unexpected"),
    (
        loads(lambda good: zf.attach(nn.Linear(3, 1), zf.chain(zf.accumulate(2), zf.adamw(0.1))).state_dict()),
        "(1, 3)",
        "(1, 2)",
    ),
    (loads(lambda good: copy.deepcopy(linear(zf.sgd(0.1)).state_dict())), "exp_avg", "bias"),
    told=("load_state_dict",),
)


@WRONG(ValueError, "this is not the state of this pipeline", "exp_avg")
def the_state_of_another_pipeline():
    opt, other = zf.attach(net(), zf.sgd(0.1)), zf.attach(net(), zf.adamw(1e-3))
    yield opt.state_dict
    opt.load_state_dict(other.state_dict())


# ---- groups, flags, hooks ----

WRONG.rows(ValueError, (lambda: zf.attach(net(), zf.adamw(0.1), hold_frozen="all"), "hold_frozen"))


@WRONG(TypeError, "a copy or a pickle of what zf.attach returned")
def a_copy_of_an_optimizer_with_hooks():
    opt = linear()
    opt.register_step_pre_hook(lambda *args: None)
    yield
    copy.deepcopy(opt)


GROUPS = {"param_groups: 0 instead of 1": [], "param_groups/0/lr: missing": [{}]}


@WRONG(ValueError, "{}", over=GROUPS)
def groups_that_do_not_fit(told):
    opt = linear()
    yield lambda: opt.state
    opt.load_state(opt.state, GROUPS[told])


@WRONG(RuntimeError, re.compile(r"requires? grad(.|\n)*detach\(\)"), over=["lr", "betas"])
def a_number_of_a_group_that_requires_grad(key):
    opt, number = linear(), torch.tensor(0.5, requires_grad=True)
    before = opt.param_groups[0][key]
    opt.param_groups[0][key] = number if key == "lr" else (0.9, number)

    def put_back():
        opt.param_groups[0][key] = before
        opt.step()

    yield Kept(lambda: {}, put_back)
    opt.step()


@zf.leafwise(optimizer=True)
def rateless(grad, param, *, size=0.1):
    return param - size * grad


@WRONG(ValueError, "no learning rate")
def a_scheduler_of_what_has_no_rate():
    """A state dict of before rates were told has a zero in their place."""
    opt = linear(rateless())
    old = opt.state_dict()
    old["param_groups"][0]["lr"] = 0.0
    opt.load_state_dict(old)
    opt.step()
    torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 0.5)
    yield
    opt.step()


# ---- a model that has changed ----


@WRONG(RuntimeError, "the model changed after it was attached")
def a_submodule_that_gets_parameters_later():
    """One without parameters may come; that it has some is noticed in whichever step it happens."""
    model = nn.Sequential(nn.Linear(2, 2))
    opt = zf.attach(model, zf.sgd(0.1))

    def step():
        model[0](torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    model.add_module("later", nn.Identity())
    step()
    step()
    model.later.scale = nn.Parameter(torch.ones(1))
    yield
    step()


MOVED = {
    "to": (lambda m: m.float(), "float32", r".*\n  bias: moved to torch.float32"),
    "half": (lambda m: m.half(), "float16", r".*\n  bias: moved to torch.float16"),
    "data": (
        lambda m: setattr(m.weight, "data", m.weight.data.float()),
        "float32",
        "attached as torch.bfloat16 on cpu",
    ),
}
for _kind, (_change, _dtype, _more) in MOVED.items():

    @WRONG(
        RuntimeError,
        re.compile(
            rf"changed after it was attached\n  weight: moved to torch.{_dtype} on cpu; {_more}(.|\n)*opt.detach\(\)"
        ),
        over=[_change],
    )
    def a_dtype_that_changes_behind_our_back(change):
        model = nn.Linear(3, 2)
        opt = zf.attach(model, zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(0.1)))
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        for p in model.parameters():
            p.grad = None
        change(model)
        yield
        opt.step()


@WRONG(ValueError, "c: shares memory with b")
def parameters_over_one_memory():
    x, model = torch.arange(24.0).view(4, 6), nn.Module()
    model.a, model.b = nn.Parameter(x[:2].clone()), nn.Parameter(x[2:])
    model.c = nn.Parameter(x[:2])
    zf.attach(model, zf.sgd(0.1)).detach()
    model.c = nn.Parameter(x[1:3])
    yield
    zf.attach(model, zf.sgd(0.1))


@WRONG(ValueError, re.compile(r"(?s)have one name.*\n  weight: .*\n  module.weight: weight without"))
def two_leaves_of_one_name_without_wrappers():
    model = nn.DataParallel(nn.Linear(2, 2))
    model.register_parameter("weight", nn.Parameter(torch.ones(2)))
    yield
    zf.attach(model, zf.sgd(0.1))


# ---- updates within backward ----


@WRONG(ValueError, "no parameter has a gradient")
def a_step_without_backward():
    opt = zf.attach(net(), zf.adamw(1e-2), in_backward=True)
    yield
    opt.step()


CLIPS = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clip_grads_with_norm_": lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 0.01, torch.tensor(2.0)),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
}


@WRONG(RuntimeError, "gain, which has no numbers here\n  why:   with in_backward=True", over=CLIPS)
def a_clip_where_there_is_nothing_to_clip(clip):
    model = net()
    zf.attach(model, zf.sgd(1.0), in_backward=True)
    loss_of(model).backward()
    yield
    CLIPS[clip](model)


@pytest.mark.parametrize("row", WRONG)
def test_refused(row):
    row.check()


# ---- what is no mistake ----


def test_detach_gives_the_plain_module_back(tx):
    model, plain = net(), net()
    before = {k: v for k, v in vars(model).items()}
    opt = zf.attach(model, tx)
    loss_of(model).backward()
    opt.zero_grad()
    opt.detach()
    assert vars(model).keys() == before.keys()
    for module in model.modules():
        assert type(module._parameters) is dict and not module._forward_hooks and not module._forward_pre_hooks
    assert all(not hasattr(p, "_zerofn_owner") for p in model.parameters())
    for m in (model, plain):
        loss_of(m).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    opt.detach()  # once more does nothing
    zf.attach(model, tx).detach()


def test_backward_of_a_graph_from_before_detach(tx):
    """The graph is complete in itself: true gradients, though the model is plain by then."""
    model, plain = net(), net()
    opt = zf.attach(model, tx)
    loss = loss_of(model)
    opt.detach()
    loss.backward()
    loss_of(plain).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad)


def test_attach_while_a_graph_is_alive(tx):
    """A graph of the plain model gives its gradients; those of the attached one add up with them."""
    model, plain = net(), net()
    loss = loss_of(model)
    opt = zf.attach(model, tx)
    loss.backward()
    (loss_of(plain)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    loss_of(model).backward()
    loss_of(plain).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad)
    opt.step()


def test_attach_in_another_dtype_while_a_graph_is_alive():
    """The old graph gives the gradient at the parameters it was made with."""
    model, plain = net(), net()
    loss = loss_of(model)
    zf.attach(model, zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(1e-3)))
    loss.backward()
    loss_of(plain).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad.float(), b.grad)


def test_a_graph_kept_from_before_a_step_with_copies():
    """With a cast the graph has its own copies, and gives the gradient at the parameters it was made with."""
    model = net()
    opt = zf.attach(model, CASES["bf16"]())
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    opt.step()
    opt.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))


def test_modules_without_parameters_come_and_go(tx):
    model = net()
    opt = zf.attach(model, tx)
    model.monitor = nn.Identity()
    loss_of(model).backward()
    opt.step()
    del model.monitor
    opt.zero_grad()
    loss_of(model).backward()
    opt.step()
    assert opt.state.step == 2


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _saved(m)])
def test_a_copy_of_an_attached_model_is_plain(copier, tx):
    model = net()
    opt = zf.attach(model, tx)
    loss_of(model).backward()
    twin = copier(model)
    plain = net()
    for m in (twin, plain):
        m.zero_grad()
        loss_of(m).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(twin.parameters(), plain.parameters(), strict=True))
    assert type(twin._parameters) is dict
    # Nobody's, so it may be attached, and the first goes on.
    other = zf.attach(twin, CASES["scaled"]())
    loss_of(twin).backward()
    other.step()
    opt.step()


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_forgotten_optimizer_sets_the_model_free():
    """An optimizer that nobody holds must not keep a model from being attached again."""
    model = net()
    zf.attach(model, zf.sgd(0.1))
    opt = zf.attach(model, zf.sgd(0.1))
    loss_of(model).backward()
    opt.step()


def test_a_forgotten_scaled_optimizer_sets_the_model_free():
    model, plain = net(), net()
    for _ in range(2):
        opt = zf.attach(model, CASES["scaled"]())
        for m in (model, plain):
            m.zero_grad()
            loss_of(m).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-5)
        del opt


def test_forgetting_step_adds_up(tx):
    model, plain = net(), net()
    opt = zf.attach(model, tx)
    for m in (model, plain):
        for _ in range(3):
            loss_of(m).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad)
    opt.step()
