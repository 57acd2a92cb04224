"""`quantize`: the same bits at every stage, on any number of ranks, after a save; and what it refuses."""

import itertools

import pytest
import torch
from covering import covering
from refusals import Refusals
from stages import around
from time_limits import limit
from torch.func import functional_call

import zerofn as zf
from zerofn.extend import Codes, entries
from zerofn.kernels import lists  # inside: from which size on programs run
from zerofn.testing import assert_trees_equal

LR, BLOCK = 0.03, 4
STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def narrow(t, **more):
    return zf.quantize(t, **{"block": BLOCK, **more})


def by_kind(path):
    return "matrix" if path.endswith("weight") else "rest"


# In fp32 torch's fused AdamW gives the last elements of a piece other last bits.
ADAM = zf.nadam(LR)
MASTERS = zf.precision(store_dtype="bf16+8")
GROUPS = {"matrix": zf.muon(LR), "rest": ADAM}
# What stands behind the reduction, by name.
TABLE = {
    "moments": [narrow(ADAM)],
    "4 bits": [narrow(ADAM, bits=4)],
    "dynamic": [narrow(ADAM, code="dynamic")],
    "dynamic, 4 bits to nearest": [narrow(zf.lion(LR), bits=4, code="dynamic", rounding="nearest")],
    "linear, to nearest": [narrow(ADAM, code="linear", rounding="nearest")],
    "bf16": [zf.precision(store_dtype=torch.bfloat16), narrow(zf.low_precision_adam(LR, state_dtype=torch.float32))],
    "fp32": [narrow(zf.low_precision_adam(LR, state_dtype=torch.float32, rounding="nearest"), bits=4)],
    "bf16 moments": [zf.precision(store_dtype=torch.bfloat16), narrow(zf.low_precision_adam(LR), bits=4)],
    "clip, ema": [zf.clip_by_global_norm(1000.0), narrow(zf.lion(LR)), zf.ema(0.9)],  # below it the factor is one
    "clipped": [zf.clip_by_global_norm(0.1), narrow(ADAM)],
    "sums": [narrow(zf.chain(zf.accumulate(2), ADAM))],
    "partition": [narrow(zf.partition(GROUPS, by_kind))],
    "a group in it": [zf.partition({"matrix": narrow(ADAM), "rest": zf.sgd(LR)}, by_kind)],
    "offload": [zf.offload(narrow(ADAM))],
    "norms": [narrow(zf.lamb(LR))],
    "an average": [narrow(zf.schedule_free_adamw(LR), slots=["exp_avg_sq"])],
    "wrapped": [zf.lookahead(narrow(ADAM), 2)],
    "masters": [MASTERS, narrow(ADAM), zf.ema(0.9)],
    "masters, wide moments": [MASTERS, zf.offload(zf.lookahead(ADAM, 2))],
    "masters at owners": [MASTERS, zf.partition(GROUPS, by_kind)],
}

# A norm is a sum over ranks in another order, so its last bit differs; each of three steps of LR is a function of it,
# and of codes, of which a few are rounded the other way.
SUMMED = ("norms", "clipped")


class Model(torch.nn.Module):
    """Rows that end inside a block, and leaves that ranks cannot halve."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)])
        self.gain = torch.nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x))) * self.gain


def data(step):
    torch.manual_seed(100 + step)
    return torch.randn(4, 7), torch.randn(4, 3)


def pipeline(name, stage):
    return zf.chain(*around(stage), *TABLE[name])


def trained(name, stage, route, steps=range(6), directory=None, state=None):
    """The state after these steps, on one process or on ranks with the same data: a mean of two equal gradients."""
    model, tx = Model(), pipeline(name, stage)

    def loss(params, step):
        x, y = data(int(step))
        x = x.to(params["gain"].dtype)
        return (functional_call(model, params, (x,)).float() - y).square().mean()

    if route == "pure":
        state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()}) if state is None else state
        step = zf.make_step(loss, tx)
        for i in steps:
            state, _ = step(state, torch.tensor(i))
    else:
        opt = zf.attach(model, tx, in_backward=route == "in backward")
        for i in steps:
            x, y = data(i)
            (model(x).float() - y).square().mean().backward()
            opt.step()
            opt.zero_grad()
        state = opt.state
    if directory is not None:
        zf.save(directory, state)
    return state


def on_a_rank(cells, directory):
    lists.LARGE = 0
    for i, (name, stage, route) in enumerate(cells):
        trained(name, stage, route, steps=range(3), directory=f"{directory}/{i}")
    for i, name in enumerate(CONVERTED):
        zf.save(f"{directory}/{name}", converted(name, STAGES[-1 - i % 3])[1])


EVERY = list(itertools.product(TABLE, STAGES, ("eager", "pure")))
SOME = [(name, STAGES[-1 - i % 3], ("eager", "pure")[i % 2]) for i, name in enumerate(TABLE)]
SOME += [("moments", "ZeRO-3", "in backward")]


@pytest.fixture(autouse=True)
def _leaves_of_every_size_by_the_kernel(monkeypatch):
    monkeypatch.setattr(lists, "LARGE", 0)


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """Where two ranks have saved states of these cells, and converted ones."""
    directory = str(tmp_path_factory.mktemp("two ranks"))
    zf.launch(on_a_rank, 2, SOME, directory, timeout=limit(60))
    return directory


def test_the_bits_of_one_process(some):
    """At a stage, by a route; and of a run that is saved on ranks, and goes on in one process."""
    check_bits(SOME, some)


# Each at every stage, by one of the routes; two ranks are those above.
@pytest.mark.slow
def test_the_bits_of_one_process_at_every_stage(tmp_path):
    cells = covering(EVERY, 2)
    zf.launch(on_a_rank, 4, cells, str(tmp_path), timeout=limit(300))
    check_bits(cells, tmp_path)


def check_bits(cells, directory):
    wrong = []
    for i, (name, stage, route) in enumerate(cells):
        half = trained(name, "one process", "pure", steps=range(3))
        like = zf.init(pipeline(name, "one process"), {k: p.detach() for k, p in Model().named_parameters()})
        try:
            loaded = zf.load(f"{directory}/{i}", like=like)
            if name in SUMMED:
                torch.testing.assert_close(dict(loaded.leaves), dict(half.leaves), rtol=0, atol=1e-5)
                continue
            assert_trees_equal(loaded, half, "half")
            want, got = (trained(name, "one process", "pure", steps=range(3, 6), state=x) for x in (half, loaded))
            assert_trees_equal(got, want, "all")
        except Exception as error:
            wrong.append(f"{name}, {stage}, {route}: {str(error)[:600]}")
    assert not wrong, "\n".join(wrong)


BY_ELEMENT = ["sgd", "lion", "rmsprop", "radam", "nadam", "adan", "adabelief"]
BY_ELEMENT += ["schedule_free_adamw", "low_precision_adam"]


@pytest.mark.parametrize("name", [*BY_ELEMENT, "adam", "adamw"])
def test_pieces_have_the_codes_of_the_whole(name):
    """Of `adam` and `adamw` all but the last elements of a piece, which torch's kernel rounds in another way."""
    rows, width, more = 22, 17, {"sgd": {"momentum": 0.9}, "low_precision_adam": {"rounding": "nearest"}}
    tx = zf.chain(zf.quantize(getattr(zf, name)(LR, **more.get(name, {})), block=8, rounding="nearest"))
    draw = torch.Generator().manual_seed(0)
    start, *grads = [torch.randint(-8, 9, (3 * rows, width), generator=draw) / 8 for _ in range(9)]

    def trained(where):
        state = zf.init(tx, {"w": start[where].clone()})
        for g in grads:
            state, _ = zf.update(tx, {"w": g[where].clone()}, state)
        coded = [e["w"] for s in state.transforms.values() for e in s.values() if isinstance(e, dict)]
        codes = [x for e in coded if isinstance(e, dict) for x in e.values()]
        assert codes
        return [state.params["w"], *codes]

    whole, pieces = trained(slice(None)), [trained(slice(i * rows, (i + 1) * rows)) for i in range(3)]
    # 374 and 1,122 elements: 6 and 2 of them are no full line of 16, and lie in the last row.
    same = rows - 1 if name in ("adam", "adamw") else rows
    for i, piece in enumerate(pieces):
        for got, want in zip(piece, whole, strict=True):
            want = want[i * rows : (i + 1) * rows]
            assert torch.equal(got[:same], want[:same]), i
            torch.testing.assert_close(got.float(), want.float(), rtol=1e-6, atol=1e-6)


def wide(t):
    """The same transforms without `quantize`."""
    if t.factory is zf.quantize:
        return t.config["transform"]
    if t.factory is zf.partition:
        return zf.partition({k: wide(x) for k, x in t.config["transforms"].items()}, t.config["labels"])
    inner = t.config.get("transform")
    return t if inner is None else t.factory(**{**t.config, "transform": wide(inner)})


# bf16 moments go on as codes of fp32 ones.
FROM = {"bf16": [zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(LR)]}
FROM["masters"] = [zf.precision(store_dtype=torch.float32), ADAM, zf.ema(0.9)]
CONVERTED = ("masters", "bf16", "4 bits", "sums", "partition", "wrapped")


def converted(name, stage):
    """A state of the chain without `quantize` after two updates, and what it becomes."""
    old, tx = zf.chain(*around(stage), *FROM.get(name, map(wide, TABLE[name]))), pipeline(name, stage)
    params = {k: p.detach() for k, p in Model().named_parameters()}
    state = zf.init(old, params)
    step = zf.make_step(lambda p: sum((x.float() * (x.float() + 1)).square().sum() for x in p.values()), old)
    for _ in range(2):
        state, _ = step(state)
    return state, zf.quantize_state(tx, state, like=zf.init(tx, params))


def test_a_state_goes_on_in_codes(some):
    for name in CONVERTED:
        old, new = converted(name, "one process")
        assert_trees_equal(zf.load(f"{some}/{name}", like=new), new, name)
        theirs = {(e.owner, e.slot, e.path): e.value for e in entries(old)}
        mine = {(e.owner, e.slot, e.path, e.below): e.value for e in entries(new)}
        coded = [(*place, x) for (*place, below), x in mine.items() if below == "codes"]
        assert coded, name
        how = Codes(4 if name == "4 bits" else 8, BLOCK)
        for owner, slot, path, codes in coded:
            x = theirs[owner, slot, path].float()
            found = how.decode(codes, mine[owner, slot, path, "scales"], x.shape)
            # Half of the widest gap between codes.
            worst = (found - x).abs().max() / x.abs().max()
            assert x.any() and worst < (0.13 if name == "4 bits" else 0.01), (name, slot, path, worst)
        assert int(new.step) == int(old.step)


def started(tx):
    return zf.init(tx, {"w": torch.zeros(4, 8)})


@zf.leafwise(init=lambda p: torch.zeros(p.shape, dtype=torch.int64), needs="element")
def _steps(grad, param, state):
    return grad, state + 1


def test_leaves_of_one_element_or_none_and_blocks_of_zeros():
    """As without codes: none of these leaves has a row that codes would shorten, and a block of zeros stays."""
    shapes = {"number": (), "one": (1,), "matrix": (1, 1), "empty": (0,), "no rows": (0, 64), "no columns": (3, 0)}
    params = {**{name: torch.ones(shape) for name, shape in shapes.items()}, "zeros": torch.ones(2, 130)}
    grads = {name: torch.ones_like(x) if name != "zeros" else torch.zeros_like(x) for name, x in params.items()}
    plain, coded = (zf.init(tx, params) for tx in (zf.adamw(LR), zf.quantize(zf.adamw(LR))))
    for _ in range(2):
        plain, _ = zf.update(zf.adamw(LR), grads, plain)
        coded, _ = zf.update(zf.quantize(zf.adamw(LR)), grads, coded)
    assert type(coded.transforms["adamw"]["exp_avg"]["zeros"]) is dict
    for name, x in plain.params.items():
        assert torch.equal(coded.params[name], x), name


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (lambda: zf.quantize(zf.adamw(LR), bits=3), "a code has 8 or 4 bits"),
    (lambda: zf.quantize(zf.adamw(LR), bits=8.0), "a code has 8 or 4 bits"),
    (lambda: zf.quantize(zf.adamw(LR), code="log"), "code is one of 'companded', 'linear', 'dynamic'"),
    (lambda: zf.quantize(zf.adamw(LR), rounding="kahan"), "rounding is one of 'stochastic', 'nearest'"),
    (lambda: zf.quantize(zf.adamw(LR), slots="exp_avg"), "slots=('exp_avg',)"),
    (lambda: zf.quantize(zf.precision(torch.bfloat16)), "precision changes what the model sees"),
    (lambda: zf.quantize(zf.clip_by_value(1.0)), "clip_by_value has no state"),
    (lambda: started(zf.chain(zf.sgd(LR), zf.quantize(zf.ema(0.9)))), "an average of parameters"),
    (lambda: zf.quantize(zf.quantize(zf.adamw(LR))), "its state would be coded twice"),
    (lambda: zf.quantize(zf.chain(zf.lookahead(zf.quantize(zf.adamw(LR), bits=4)))), "coded twice"),
    (lambda: started(zf.quantize(zf.adafactor(LR))), "none of its entries is a float tensor of its leaf's shape"),
    (lambda: started(zf.quantize(zf.sgd(LR))), "none of its entries is a float tensor of its leaf's shape"),
    (lambda: started(zf.chain(zf.quantize(_steps()), zf.sgd(LR))), "none of its entries is a float tensor"),
    (lambda: started(zf.chain(zf.quantize(zf.add_noise(0.1)), zf.sgd(LR))), "none of its entries is a float tensor"),
    (
        lambda: started(zf.quantize(zf.adamw(LR), slots=["exp"])),
        "no float tensor of its leaf's shape by this name: exp",
    ),
    (lambda: started(zf.quantize(zf.adamw(LR), slots=["exp_avg", "count"])), "by this name: count"),
    (
        lambda: zf.quantize_state(zf.quantize(zf.adamw(LR)), started(zf.lion(LR)), started(zf.quantize(zf.adamw(LR)))),
        "adamw/exp_avg_sq/w/codes: is not in the state",
    ),
    (
        lambda: zf.quantize_state(
            zf.quantize(zf.adamw(LR)),
            zf.init(zf.adamw(LR), {"w": torch.zeros(4, 9)}),
            started(zf.quantize(zf.adamw(LR))),
        ),
        "params/w: of shape (4, 9) instead of (4, 8)",
    ),
)


@ROWS(ValueError, "exp_avg/w/codes: missing", "state = zf.quantize_state(new_tx, state, like=zf.init(new_tx, params))")
def moments_in_16_bits_loaded_into_narrow_ones(tmp_path):
    low = zf.precision(store_dtype=torch.bfloat16)
    old, new = zf.low_precision_adam(LR), zf.quantize(zf.low_precision_adam(LR, state_dtype=torch.float32))
    state = started(zf.chain(low, old))
    zf.save(tmp_path / "run", state)
    yield state
    zf.load(tmp_path / "run", like=started(zf.chain(low, new)))


@ROWS(RuntimeError, "codes, which have no derivative")
def a_step_that_is_differentiated():
    tx = zf.quantize(zf.adamw(LR))
    state = started(tx)
    yield state
    torch.func.grad(lambda g: zf.update(tx, {"w": g}, state)[0].params["w"].sum())(torch.ones(4, 8))


@pytest.mark.parametrize("row", ROWS)
def test_refused(row, tmp_path):
    row.check(tmp_path=tmp_path)
