"""What users get wrong when they build a pipeline and give it parameters, and what they are told."""

import dataclasses
import re

import pytest
import torch
import torchopt
from refusals import Refusals
from torch import nn

import zerofn as zf
from zerofn.extend import Transform

F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")
WRONG = Refusals()


def params():
    return {"w": torch.ones(2, 2), "b": torch.zeros(2), "deep": [{"x": torch.ones(3)}]}


# ---- arguments ----

WRONG.rows(
    TypeError,
    (lambda: zf.adamw(learning_rate=1), "adamw() has no keyword 'learning_rate'", "Did you mean lr=?"),
    (lambda: zf.adam(epsilon=1), "adam()", "'epsilon'", "eps="),
    (lambda: zf.sgd(0.1, momentun=0.9), "sgd()", "'momentun'", "momentum="),
    (lambda: zf.accumulate(steps=4), "accumulate()", "'steps'", "every="),
    (lambda: zf.accumulate(gradient_accumulation_steps=4), "every="),
    (lambda: zf.clip_by_global_norm(max_grad_norm=1), "max_norm="),
    (lambda: zf.scale_loss(loss_scale=1), "scale="),
    (lambda: zf.precision(dtype=BF16), "param_dtype="),
    (lambda: zf.ema(beta=0.1), "ema() has no keyword 'beta'", "It takes: decay"),
    (lambda: zf.low_precision_adam(0.1, mu_dtype=BF16), "state_dtype="),
    (lambda: zf.adamw(0.1, weight_decy=1), "weight_decay="),
)
WRONG.rows(
    ValueError,
    (lambda: zf.adamw(lr=-1.0), "adamw(lr=-1.0)", "must lie in [0, inf)", "write: adamw(lr="),
    (lambda: zf.adam(lr=NAN), "adam(lr=nan)", "must lie"),
    (lambda: zf.sgd(INF), "sgd(lr=inf)"),
    (lambda: zf.sgd("0.1"), "sgd(lr='0.1')", "is a str"),
    (lambda: zf.sgd(True), "is a bool"),
    (lambda: zf.sgd(None), "NoneType"),
    (lambda: zf.sgd(0.1, momentum=1.0), "momentum", "[0, 1)"),
    (lambda: zf.sgd(0.1, weight_decay=-1), "weight_decay"),
    (lambda: zf.sgd(0.1, nesterov=True), "nesterov", "momentum=0.9"),
    (lambda: zf.adam(betas=0.9), "betas=0.9", "pair"),
    (lambda: zf.adam(betas=(0.9, 1.0)), "betas", "[0, 1)"),
    (lambda: zf.adam(betas=(0.9, NAN)), "betas=(0.9, nan)", "[0, 1)"),
    (lambda: zf.adam(betas=(0.9, 0.9, 0.9)), "pair"),
    (lambda: zf.adam(eps=-1e-8), "eps=-1e-08"),
    (lambda: zf.low_precision_adam(lr=-1), "low_precision_adam(lr=-1)"),
    (lambda: zf.low_precision_adam(state_dtype=F16), "6e-8", "bfloat16"),
    (lambda: zf.low_precision_adam(state_dtype=F64), "state_dtype"),
    (lambda: zf.low_precision_adam(rounding="up"), "'up'", "'stochastic'", "'kahan'"),
    (lambda: zf.low_precision_adam(seed=1.5), "seed", "int"),
    (lambda: zf.clip_by_global_norm(0), "max_norm=0"),
    (lambda: zf.clip_by_global_norm(-1.0), "max_norm=-1.0"),
    (lambda: zf.clip_by_value(NAN), "max_value=nan"),
    (lambda: zf.accumulate(0), "accumulate(every=0)", "at least 1", "write: accumulate(every=4)"),
    (lambda: zf.accumulate(2.0), "accumulate(every=2.0)", "int", "write: accumulate(every=2)"),
    (lambda: zf.accumulate(True), "accumulate(every=True)", "write: accumulate(every=4)"),
    (lambda: zf.scale_loss("dynamik"), "'dynamik'", "'dynamic'"),
    (lambda: zf.scale_loss(0.0), "scale=0.0"),
    (lambda: zf.scale_loss(INF), "scale=inf"),
    (lambda: zf.scale_loss(growth_factor=0.5), "growth_factor"),
    (lambda: zf.scale_loss(backoff_factor=1.0), "backoff_factor"),
    (lambda: zf.scale_loss(min_scale=NAN), "scale_loss(min_scale=nan)"),
    (lambda: zf.scale_loss(min_scale="1"), "min_scale", "str"),
    (lambda: zf.scale_loss(init_scale=1.0, min_scale=2.0), "init_scale=1.0", "[2, inf)"),
    (lambda: zf.scale_loss(hysteresis=1.5), "hysteresis=1.5", "int"),
    (lambda: zf.scale_loss(growth_interval=0), "growth_interval=0"),
    (lambda: zf.scale_loss(8.0, growth_interval=5), "growth_interval", "no effect", "'dynamic'"),
    (lambda: zf.ema(1.0), "decay=1.0", "[0, 1)"),
    (lambda: zf.precision(torch.int32), "param_dtype=torch.int32", "torch.bfloat16"),
    (lambda: zf.precision(store_dtype="bf16"), "store_dtype='bf16'"),
    (lambda: zf.precision(grad_dtype=torch.complex64), "grad_dtype"),
    (lambda: zf.precision(buffer_dtype=torch.int64), "buffer_dtype=torch.int64", "torch.bfloat16"),
    (lambda: zf.offload(zf.sgd(0.1), device="moon"), "moon", "no such device"),
    (lambda: zf.offload(zf.scale_loss()), "offload(scale_loss(...))", "write: chain(scale_loss(...)"),
    (lambda: zf.sgd(0.1).named(""), "named('')", "non-empty"),
    (lambda: zf.sgd(0.1).named("a.b"), "without dots"),
    (lambda: zf.schedules.cosine(-1.0, 5), "peak=-1.0"),
    (lambda: zf.schedules.cosine(1.0, 0), "steps=0"),
    (lambda: zf.schedules.linear(1.0, 0.0, 2.5), "steps=2.5", "int"),
    (lambda: zf.schedules.warmup_cosine(1.0, 10, 5), "warmup_steps=10", "steps=5"),
)

# ---- words of a transform of one's own ----

for word in ("elements", "", None, True, 3, ["element"], "ELEMENT"):
    told = f"(needs={word!r})", "one of 'element', 'number', 'row', 'leaf', 'tree'"
    WRONG.rows(
        ValueError,
        (lambda word=word: zf.leafwise(needs=word), *told),
        (lambda word=word: zf.guest(torchopt.sgd(0.1), needs=word), *told),
    )
WRONG.rows(
    ValueError,
    (lambda: Transform("a", needs="elements"), "Transform('a', needs='elements')", "needs='element'"),
    (lambda: Transform("a", needs=3), "Transform('a', needs=3)"),
    (
        lambda: Transform("a", scope="leaf"),
        "Transform('a', scope='leaf')",
        "a scope is a member of Scope: Scope.LEAF, ",
    ),
    (lambda: Transform(""), "Transform('', ...)", "a name is a non-empty str"),
    (lambda: Transform(3), "Transform(3, ...)"),
)

# ---- orders without a meaning ----

S, A, C, O = zf.scale_loss(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1)  # noqa: E741
P = zf.precision(param_dtype=BF16)


def always(path):
    return True


WRONG.rows(
    ValueError,
    (
        lambda: zf.chain(O, C),
        "chain(..., adamw, ..., clip_by_global_norm, ...)",
        "can follow it",
        "clip_by_global_norm, ..., adamw",
    ),
    (lambda: zf.chain(O, A), "adamw comes before accumulate"),
    (lambda: zf.chain(O, S), "adamw comes before scale_loss"),
    (lambda: zf.chain(O, P), "adamw comes before precision"),
    (lambda: zf.chain(O, zf.sgd(0.1)), "adamw", "sgd", "used the gradient up", "zf.partition"),
    (lambda: zf.chain(O, O), "adamw comes before adamw_2", "zf.partition"),
    (lambda: zf.chain(S, zf.scale_loss(8.0), O), "scaled twice"),
    (lambda: zf.chain(P, P, O), "dtypes would be set twice"),
    (
        lambda: zf.chain(C, S, O),
        "clip_by_global_norm comes before scale_loss",
        "overflow",
        "scale_loss, ..., clip_by_global_norm",
    ),
    (lambda: zf.chain(A, S, O), "accumulate comes before scale_loss", "spoil the whole window"),
    (lambda: zf.chain(S, P, O), "scale_loss comes before precision"),
    (lambda: zf.chain(A, P, O), "accumulate comes before precision"),
    (lambda: zf.chain(C, P, O), "compute dtype"),
    (lambda: zf.chain(zf.ema(0.9), O), "ema comes before adamw", "new parameters"),
    (lambda: zf.chain(zf.masked(zf.ema(0.9), always), O), "masked comes before adamw", "new parameters"),
    (lambda: zf.chain(zf.masked(O, always), O), "masked", "adamw"),
    (lambda: zf.chain(zf.chain(O), zf.chain(C)), "adamw", "clip_by_global_norm"),
    told=("why:", "write:"),
)

# ---- what is no transform ----

for thing, *words in (
    (3, "int is no transform"),
    (None, "NoneType is no transform"),
    ("adamw", "'adamw'", "str is no transform"),
    (zf.adamw, "call it: adamw(...)"),
    (lambda g: g, "is no transform"),
    ([zf.sgd(0.1)], "list is no transform"),
    (torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "torch.optim", "zf.adamw", "zf.attach"),
):
    WRONG.rows(
        TypeError,
        (lambda thing=thing: zf.chain(thing), *words),
        (lambda thing=thing: zf.chain(zf.sgd(0.1), thing), *words),
        (lambda thing=thing: zf.masked(thing, always), *words),
        (lambda thing=thing: zf.offload(thing), *words),
        (lambda thing=thing: zf.init(thing, params()), *words),
    )
WRONG.rows(
    TypeError,
    (lambda: zf.guest(zf.sgd(0.1)), "guest(sgd(...))", "why:   it is a transform of this library already"),
    (lambda: zf.guest(3), "guest(3)", "why:   int is no transform", "write: an object with init"),
    (
        lambda: zf.guest(torch.optim.SGD([torch.zeros(1)], 0.1)),
        "guest(SGD(...))",
        "why:   a torch.optim optimizer owns",
    ),
    (lambda: zf.attach(nn.Linear(1, 1), zf.adamw), "is no transform", "call it: adamw"),
)

# ---- groups ----

W = torch.ones(2)
WRONG.rows(
    ValueError,
    (lambda: zf.masked(A, always), "accumulate concerns the whole tree", "chain(accumulate(...), masked(...))"),
    (lambda: zf.partition({"a": zf.chain(S, O)}, lambda p: "a"), "scale_loss", "partition"),
    (
        lambda: zf.partition({"a": O, "b": C}, lambda p: "a"),
        "has an optimizer, or none has",
        "'a'",
        "'b'",
        "an optimizer for every label, or for none",
    ),
    (
        lambda: zf.init(zf.partition({"a": O}, lambda p: "a" if p == "w" else "z"), params()),
        "unknown labels",
        "b: label 'z'",
        "deep.0.x: label 'z'",
        "one of 'a'",
    ),
    (
        lambda: zf.init(zf.partition({1: O}, lambda p: 1 if p == "w" else None), params()),
        "b: label None has no transform",
        "one of 1",
    ),
    (
        lambda: zf.init(zf.partition({"a": O}, lambda p: None), params()),
        "unknown labels",
        "w: label None has no transform",
    ),
    (
        lambda: zf.init(zf.masked(O, {"w": True, "c": True, "deep": True}), params()),
        "mask does not fit",
        "b: missing",
        "c: extra",
    ),
    (
        lambda: zf.init(zf.partition({"a": O, "b": O}, {"x": "a", "y": "b"}), {"x": W, "y": W}),
        "wrong labels",
        "y: 'b', and 'a' at x, which is the same tensor",
    ),
)
WRONG.rows(
    TypeError,
    (lambda: zf.partition([O], lambda p: "a"), "dict from label to transform"),
    (
        lambda: zf.init(zf.partition({1: O}, lambda p: [1]), params()),
        "w: [1] cannot be a key",
        "deep.0.x: [1] cannot be a key",
    ),
    (lambda: zf.partition({}, lambda p: "a"), "dict from label to transform"),
    (lambda: zf.init(zf.masked(O, lambda p: 1), params()), "wrong mask", "w: 1 is no bool", "b: 1 is no bool"),
    (
        lambda: zf.init(zf.partition({"a": O}, lambda p: ["a"]), params()),
        "wrong labels",
        "w: ['a'] cannot be a key of a dict",
    ),
)

# ---- parameters ----


@dataclasses.dataclass
class Layer:
    w: torch.Tensor


for bad, error, *words in (
    ({"i": torch.arange(3), "j": torch.ones(2).bool()}, TypeError, "i: torch.int64", "j: torch.bool", "outside"),
    ({"q": torch.ones(2).to(torch.float8_e4m3fn)}, TypeError, "q: torch.float8_e4m3fn", "16 bits"),
    ({"s": torch.ones(2, 2).to_sparse()}, TypeError, "s: layout torch.sparse_coo"),
    ({"n": 3.0, "t": "text"}, TypeError, "n: float is no tensor", "t: str is no tensor"),
    ({"m": nn.Linear(1, 1)}, TypeError, "m: Linear is no tensor"),
    (
        {"a": torch.tensor([1.0, NAN]), "b": torch.tensor([NAN, NAN]), "c": torch.ones(1)},
        ValueError,
        "a: 1 of 2",
        "b: 2 of 2",
    ),
    ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, "params['a.b']", "params['a']['b']", "dot"),
    ({1: torch.ones(1), "1": torch.ones(1)}, ValueError, "path '1': params[1], params['1']", "one text"),
    ({"layer": Layer(W)}, TypeError, "layer: dataclass Layer is not registered", "optree.dataclasses"),
):
    WRONG.rows(error, (lambda bad=bad: zf.init(O, bad), *words))
WRONG.rows(
    ValueError,
    (
        lambda: zf.init(zf.low_precision_adam(0.1, rounding="kahan"), params()),
        "nothing to round",
        "w: stored in torch.float32",
        "zf.precision(store_dtype=torch.bfloat16)",
    ),
    (
        lambda: zf.init(zf.low_precision_adam(0.1), {x: torch.ones(1, dtype=F64) for x in "wa"}),
        "w: stored in torch.float64",
        "a: stored in torch.float64",
    ),
    (
        lambda: zf.init(zf.chain(zf.scale_by_adam(), zf.scale_by_lr(0.1)), {"w": torch.ones(2, dtype=F16)}),
        "scale_by_adam: squared gradients fall below fp16's smallest number",
    ),
    (
        lambda: zf.init(zf.muon(), {"w": torch.zeros(2, 2), "b": torch.zeros(2)}),
        "muon is for matrices\n  b: of shape (2,)\n",
        "partition",
    ),
    (lambda: zf.full_params(O, zf.init(O, params()), of="ema"), "zf.full_params(tx, state, of='ema')", "zf.ema(0.999)"),
)
for parts in ((), (C,), (S, A, C), (zf.ema(0.9),), (P,), (zf.scale_by_adam(),)):
    WRONG.rows(
        ValueError,
        (lambda parts=parts: zf.init(zf.chain(*parts), params()),),
        (lambda parts=parts: zf.attach(nn.Linear(2, 2), zf.chain(*parts)),),
        told=("the chain has no optimizer", "zf.adamw(lr=1e-3)", "leafwise(optimizer=True)"),
    )


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def model_of_rows(layout):
    model = nn.Module()
    model.w, model.rows = nn.Parameter(torch.ones(2)), nn.Parameter(nested(layout))
    return model


for layout in (torch.strided, torch.jagged):
    WRONG.rows(
        TypeError,
        (lambda layout=layout: zf.init(zf.sgd(0.1), {"w": torch.ones(2), "rows": nested(layout)}),),
        (lambda layout=layout: zf.attach(model_of_rows(layout), zf.sgd(0.1)),),
        told=(
            "not every leaf is a parameter\n  rows: a nested tensor, ",
            "of rows of several lengths",
            "x.to_padded_tensor(0.0), or its rows",
        ),
    )
WRONG.rows(
    TypeError,
    (lambda: zf.plan(zf.sgd(0.1), {"rows": nested(torch.jagged)}), "rows: a nested tensor, of rows of several lengths"),
)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_parameters_that_have_a_sense():
    """Non-contiguous, zero-size, 0-d, shared and infinite leaves are fine."""
    w = torch.ones(4, 3).T
    p = {
        "t": w,
        "same": w,
        "empty": torch.zeros(0, 3),
        "scalar": torch.ones(()),
        "inf": torch.tensor([INF, 1.0]),
        "e": torch.ones(1).expand(5),
    }
    state = zf.init(zf.sgd(0.5), p)
    assert state.leaves["same"].is_contiguous() and list(state.leaves) == ["e", "empty", "inf", "same", "scalar"]
    state, _ = zf.make_step(
        lambda p: p["t"].sum() + p["same"].sum() + p["scalar"] + p["inf"][1] + p["e"][0], zf.sgd(0.5)
    )(state)
    assert torch.equal(state.params["same"], torch.zeros(3, 4)) and state.params["scalar"] == 0.5
    assert state.params["e"].tolist() == [0.5, 1, 1, 1, 1]
    zf.init(zf.partition({"a": O, "b": O}, {"x": "a", "y": "a", "z": "b"}), {"x": W, "y": W, "z": torch.ones(1)})
    for layout in (torch.strided, torch.jagged):
        for x in (nested(layout).to_padded_tensor(0.0), *nested(layout).unbind()):
            assert zf.init(zf.sgd(0.1), {"w": x}).params["w"].equal(x)


# ---- transforms of one's own ----


def mine(grad, param, *, strength, other=1.0):
    return strength * grad


WRONG.rows(
    TypeError,
    (lambda: zf.leafwise(mine)(strenght=1.0), "mine() has no keyword 'strenght'", "Did you mean strength=?"),
    (lambda: zf.leafwise(mine)(), "mine() needs strength="),
)


RETURNED = {"a Tensor instead of a pair": torch.ones(2), "a float instead of a tensor": (1.0, torch.ones(2))}
for reason, given in RETURNED.items():

    @WRONG(ValueError, f"w: {reason}\n  write: return new_grad, new_state")
    def results_of_a_wrong_kind(given=given):
        tx = zf.chain(zf.leafwise(lambda grad, param, state: given, init=torch.zeros_like)(), zf.sgd(1.0))
        state = zf.init(tx, {"w": torch.ones(2)})
        yield state
        zf.update(tx, {"w": torch.ones(2)}, state)


def first_state(made):
    tx = zf.chain(zf.leafwise(lambda g, p, state: (g, state), init=lambda p: made)(), zf.sgd(1.0))
    return lambda: zf.init(tx, {"a": torch.ones(2), "b": torch.ones(2)})


WRONG.rows(
    ValueError,
    *(
        (first_state(made), re.compile(r"init, which gives the state of a leaf, returned\n  a: an?.*\n  b: an?"))
        for made in (5, "zeros", [1.0], torch.ones(2).to_sparse(), (torch.ones(2),), {"n": 1}, {"n": [torch.ones(2)]})
    ),
    *(
        (
            lambda word=word: zf.leafwise(lambda g, p: g, needs=word),
            'sees one leaf at a time\n  write: leafwise(needs="element") or leafwise',
        )
        for word in ("number", "tree")
    ),
    (
        lambda: zf.guest(torchopt.adam(), needs="number"),
        re.compile(r'of this rank.s pieces\n  write: guest\(needs="element"\) or guest'),
    ),
)
WRONG.rows(
    TypeError,
    *((lambda it=it: zf.leafwise(it), "leafwise(function=", "a function of tensors") for it in (5, "sign", W)),
    *((lambda it=it: zf.leafwise(init=it), "leafwise(init=", "init=torch.zeros_like") for it in (5, "sign", W)),
)


class Mean:
    """An update of another library that gives another shape."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return {name: g.mean(0, keepdim=True) for name, g in updates.items()}, state


@WRONG(ValueError, re.compile(r"Mean: .* its leaves\n  a: a tensor of shape \(1, 2\) .*\(4, 2\)\n  write"))
def updates_of_another_library_of_a_wrong_shape():
    tx, leaves = zf.chain(Mean()), {"a": torch.ones(4, 2), "b": torch.ones(1, 2)}
    state = zf.init(tx, leaves)
    yield state
    zf.update(tx, leaves, state)


THROUGH = {
    "its `through` gives a NoneType and no Spec": (TypeError, lambda spec: None),
    "its `through` raised KeyError: 'x'": (ValueError, lambda spec: {}["x"]),
    "shraded_by": (ValueError, lambda spec: spec.after("shraded_by")),
}
for why, (kind, through) in THROUGH.items():
    WRONG.rows(
        kind,
        (lambda f=through: zf.chain(Transform("mine", through=f), zf.sgd(0.1)), why, "chain(..., mine, ...)\n"),
    )

# ---- masters of 24 bits, steps that are captured ----

MASTERS = zf.precision(store_dtype="bf16+8")
OFFLOADED = zf.offload(zf.sgd(0.1), compute="host", master_dtype=torch.float32)
WRONG.rows(
    ValueError,
    (
        lambda: zf.init(zf.chain(MASTERS, OFFLOADED), {"w": W}),
        "master_dtype=...)",
        "one of them would have no effect",
    ),
    (
        lambda: zf.chain(MASTERS, zf.sgd(0.1), zf.every(2, zf.sgd(0.7))),
        re.compile("precision comes before every: .*8 more bits of the old values"),
    ),
    (lambda: zf.precision(store_dtype="bf16+4"), re.compile(r"store_dtype='bf16\+4'\)\n  why: .*'bf16\+8'")),
    (lambda: zf.precision(param_dtype="bf16+8"), "param_dtype='bf16+8'"),
    (
        lambda: zf.init(zf.chain(MASTERS, zf.low_precision_adam(state_dtype=torch.float32)), {"w": W}),
        "nothing to round",
    ),
    (
        lambda: zf.attach(nn.Linear(1, 1), O, in_backward=True, capturable=True),
        "hooks of the host update leaves within backward",
    ),
    (lambda: zf.make_step(sum, O, capturable=True), "each replay would begin from the same state"),
    (
        lambda: zf.make_step(sum, O, donate=True, create_graph=True, capturable=True),
        "a derivative needs the old one",
    ),
)

# ---- flags and labels ----

for flag in ("no", 1, None, torch.ones(1)):
    WRONG.rows(
        ValueError,
        (lambda it=flag: zf.make_step(lambda p: p["w"].sum(), zf.sgd(0.1), donate=it), "make_step(donate="),
        (lambda it=flag: zf.attach(nn.Linear(1, 1), zf.sgd(0.1), in_backward=it), "attach(in_backward="),
        (lambda it=flag: zf.leafwise(optimizer=it), "leafwise(optimizer="),
        (
            lambda it=flag: zf.attach(nn.Linear(1, 1), zf.chain(zf.accumulate(2), zf.sgd(0.1))).backward(
                torch.ones((), requires_grad=True), scale_wrt_gas=it
            ),
            "opt.backward(scale_wrt_gas=",
        ),
    )


def labelled(transforms):
    return lambda: zf.partition(transforms, lambda path: 1)


WRONG.rows(ValueError, (labelled({1: zf.sgd(0.1), "1": zf.sgd(0.1)}), "both are '1'"))
WRONG.rows(
    TypeError,
    (labelled({object(): zf.sgd(0.1)}), "its text has its address"),
    (labelled({len: zf.sgd(0.1)}), "its text has its address"),
    (labelled({NAN: zf.sgd(0.1)}), "not equal to itself"),
    (labelled({torch.ones(()): zf.sgd(0.1)}), "found in a dict by its address"),
)


def precise(**options):
    leaves = {"a": torch.ones(2), "b": torch.ones(2)}
    return lambda: zf.init(zf.chain(zf.precision(**options), zf.sgd(0.1)), leaves)


def by_path(path):
    return path


WRONG.rows(
    ValueError,
    (precise(param_dtype={"x": BF16}), "a dict of dtypes needs labels="),
    (precise(param_dtype=BF16, labels=lambda path: "x"), "no dtype is given by label"),
    (precise(param_dtype={"x": torch.int8}, labels=lambda path: "x"), "precision(param_dtype=torch.int8)"),
    (precise(param_dtype={"a": BF16}, labels=by_path), "b: label 'b' is not in param_dtype"),
    (
        precise(param_dtype={"a": BF16, "b": None}, grad_dtype={"a": torch.float32}, labels=by_path),
        "b: label 'b' is not in grad_dtype",
    ),
    (precise(param_dtype={"a": BF16, "b": F64, "haed": F64}, labels=by_path), "'haed' among the labels"),
    (precise(buffer_dtype=BF16), "a tree of parameters has no buffers", "functional_call"),
    *(
        (
            lambda make=make: zf.init(zf.chain(zf.precision(store_dtype=F16), make(1e-3)), {"w": W}),
            re.compile(r"6e-8(.|\n)*w: stored in torch.float16(.|\n)*low_precision_adam"),
        )
        for make in (zf.adam, zf.adamw)
    ),
)
WRONG.rows(TypeError, (precise(param_dtype={"a": BF16}, labels=lambda path: [3]), "wrong labels"))

# ---- what a step finds ----


def clipped(over):
    def program():
        tx = zf.chain(zf.clip_by_global_norm(1.0, over=over), zf.sgd(1.0))
        state = zf.init(tx, {"w": torch.zeros(2)})
        yield state
        zf.update(tx, {"w": torch.tensor([3.0, 4.0])}, state)

    return program


WRONG.rows(
    ValueError,
    (clipped(lambda s: s / 2), re.compile("returned .*12.5.* for a sum of squares of 25")),
    (clipped(lambda s: torch.ones(2) * s), re.compile(r"returned .*\(2,\).* for a sum of squares of 25")),
    (clipped(lambda s: torch.tensor(30)), re.compile("returned .*int64.* for a sum of squares of 25")),
    *(
        (lambda parts=parts: zf.chain(*parts, zf.sgd(0.1)), "gradients are reduced over no ranks")
        for other in (zf.all_reduce, zf.reduce_scatter, zf.shard)
        for parts in ((zf.local(), other()), (other(), zf.local()))
    ),
    (
        lambda: zf.chain(zf.watch(lambda old, new: {"moved": (new - old).square().sum()}), zf.sgd(0.1)),
        "watches the new parameters",
    ),
)
WRONG.rows(TypeError, (lambda: zf.clip_by_global_norm(1.0, over=2.0), "over is a function of the sum of squares"))


@WRONG(FloatingPointError, "skipped 3 steps in a row")
def only_bad_batches_in_a_row_end_a_run():
    tx = zf.chain(zf.skip_nonfinite(patience=3), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(2)})
    for x in (NAN, NAN, 1.0, NAN, NAN):
        state, _ = zf.update(tx, {"w": torch.full((2,), x)}, state)
    yield
    zf.update(tx, {"w": torch.tensor([INF, 0.0])}, state)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("row", WRONG)
def test_refused(row):
    row.check()
