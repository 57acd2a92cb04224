"""16-bit storage, compute and reduction on ranks: bitwise where the mean is exact, else within what 16 bits allow."""

import functools

import pytest
import rank_programs as P
import torch
from stages import STAGES, around
from time_limits import limit

import zerofn as zf

BF, HALF, F32 = torch.bfloat16, torch.float16, torch.float32
WIDE = {"grad_dtype": F32, "reduce_dtype": F32}


def tail(rounding):
    adam = zf.low_precision_adam(lr=0.02, weight_decay=0.1, rounding=rounding, seed=7)
    return zf.precision(store_dtype=BF, **WIDE), zf.scale_loss(1024.0), adam


def late(rounding):
    cast, scale, adam = tail(rounding)
    return cast, scale, zf.accumulate(2), zf.reduce_scatter(), adam


PIPES = {
    **{
        (n, r): (lambda n=n, r=r: (*around(n), *tail(r)))
        for n in ("data parallel", "ZeRO-2", "ZeRO-3")
        for r in ("stochastic", "nearest", "kahan")
    },
    ("ZeRO-1", "stochastic"): lambda: late("stochastic"),
}


class Once(P.AwkwardLeaves):
    """Every leaf is used once: cotangents of several uses are summed in bf16 or, gathered twice, in fp32."""

    def forward(self, x, which=None):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return torch.tanh((h + self.branch[which](h)) * self.scalar + self.one + self.frozen)[:, :5]


def same_on_all(model, rank, step, talk):
    """All ranks have equal data, so the mean of two or four equal gradients is exactly theirs."""
    x, y = P.batch(0, step, F32)
    ((model(x, "a").float() - y) ** 2).mean().backward()


def followed(*first):
    """Parameters after two updates that autograd follows: by the formula, and not by a kernel."""
    tx = zf.chain(*first, zf.precision(store_dtype=BF), zf.low_precision_adam(0.1))
    state = zf.init(tx, {"w": torch.linspace(-1, 1, 77).view(7, 11), "b": torch.linspace(0.1, 1, 5)})
    by = torch.ones((), requires_grad=True)
    step = zf.make_step(lambda p, by: by * sum(x.float().square().sum() for x in p.values()), tx, create_graph=True)
    for _ in range(2):
        state, _ = step(state, by)
    return {path: x.detach() for path, x in zf.full_params(tx, state).items()}


def bitwise():
    out = {}
    for name, pipe in PIPES.items():
        result = P.eager(zf.chain(*pipe()), same_on_all, 4, P.make(F32, cls=Once))
        out[name] = {n: x for n, x in result["after"].items()}
    return {**out, ("ZeRO-3", "followed"): followed(zf.shard())}


@functools.cache
def one_process():
    out = {}
    for name, pipe in PIPES.items():
        parts = [t for t in pipe() if t.name not in ("shard", "reduce_scatter", "all_reduce")]
        result = P.eager(zf.chain(*parts), same_on_all, 4, P.make(F32, cls=Once))
        moved = {
            n: (x.float() - result["before"][n].to(BF).float()).abs().max()
            for n, x in result["after"].items()
            if x.numel()
        }
        assert all(m > 0 for n, m in moved.items() if n.startswith(P.ALWAYS_USED)), moved
        out[name] = result["after"]
    return {**out, ("ZeRO-3", "followed"): followed()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rounding_is_bitwise_that_of_one_process(size):
    want = one_process()
    wrong = [
        (rank, *key, n)
        for rank, results in enumerate(zf.launch(bitwise, size, timeout=limit(), threads=torch.get_num_threads()))
        for key, after in results.items()
        for n, x in after.items()
        if not torch.equal(x, want[key][n]) or x.dtype != BF
    ]
    assert not wrong
    stochastic, nearest = want["ZeRO-3", "stochastic"], want["ZeRO-3", "nearest"]
    assert not all(torch.equal(stochastic[n], nearest[n]) for n in nearest)


SGD = {"lr": 0.3, "momentum": 0.8}
# Stored in fp32; computed, and where it says so reduced, in 16 bits. The bound is on the error of the change
# relative to the largest change of any element, after 3 steps of SGD: a few units of the last place of
# the compute dtype (bf16 2**-8, fp16 2**-11) in each gradient, which momentum adds up.
MIXED = {
    "bf16": ({"param_dtype": BF}, 0.05),
    "bf16, reduced in fp32": ({"param_dtype": BF, "reduce_dtype": F32}, 0.05),
    "fp16": ({"param_dtype": HALF}, 0.01),
    "fp16, reduced in fp32": ({"param_dtype": HALF, "reduce_dtype": F32}, 0.01),
}


def mixed():
    out = {}
    for stage in STAGES:
        for kind, (dtypes, _) in MIXED.items():
            scale = zf.scale_loss("dynamic", init_scale=2.0**10)
            parts = around(stage, zf.precision(**dtypes), scale, window=P.hold())
            tx = zf.chain(*parts, zf.clip_by_global_norm(0.5), zf.sgd(**SGD))
            out[stage, kind, "eager"] = P.eager(tx, P.simple("diff", F32), 3, P.make(F32))
            out[stage, kind, "pure"] = P.pure(tx, "diff", 3, P.make(F32), F32)
    return out


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_16_bit_compute_stays_close_to_float64(size):
    want = P.reference(size, lambda ps: torch.optim.SGD(ps, **SGD), P.simple("diff"), 3, P.make(), clip=0.5)
    ranks = zf.launch(mixed, size, timeout=limit())
    bad = []
    for rank, results in enumerate(ranks):
        for key, got in results.items():
            worst, where = P.differences(got, want)
            if not worst <= MIXED[key[1]][1]:
                bad.append((rank, *key, worst, where))
            same = all(torch.equal(x, ranks[0][key]["after"][n]) for n, x in got["after"].items())
            if not same or got["norms"] != ranks[0][key]["norms"]:
                bad.append((rank, *key, "ranks differ"))
    assert not bad, "\n".join(map(str, bad))


MASTERS = zf.precision(store_dtype=F32, param_dtype=BF)
PLAIN = {"adam": zf.adam(1e-3), "adamw": zf.adamw(1e-3, weight_decay=0.0), "scale_by_adam": zf.scale_by_adam()}


@pytest.mark.parametrize("name", PLAIN)
def test_what_bf16_loses_under_plain_adam_is_told(name):
    """And it is so: updates of a thousandth are lost, and a second moment stays where the first gradient put it."""
    tx = zf.chain(zf.precision(store_dtype=BF), PLAIN[name])
    tx = zf.chain(tx, zf.scale_by_lr(1e-3)) if name == "scale_by_adam" else tx
    params = {"w": torch.ones(2), "v": torch.ones(1)}
    with pytest.warns(UserWarning, match=rf"{name}: (w|v) and 1 more stored in bf16(?s:.*)low_precision_adam") as told:
        state = zf.init(tx, params)
    assert len(told) == 1
    for size in (1.0, *[1e-3] * 20):
        state, _ = zf.update(tx, {k: torch.full_like(x, size, dtype=BF) for k, x in params.items()}, state)
    assert torch.equal(state.params["w"], torch.ones(2, dtype=BF))
    second = state.transforms[name]["exp_avg_sq"]["w"]
    assert torch.equal(second, torch.full((2,), 1e-3, dtype=BF))


def test_what_bf16_loses_is_told_by_plan_and_attach_and_of_a_part_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).to(BF)
    with pytest.warns(UserWarning, match="adamw: 0.weight and 3 more stored in bf16"):
        zf.plan(zf.adamw(), model)
    two = {"low": zf.low_precision_adam(), "plain": zf.adamw()}
    with pytest.warns(UserWarning, match="adamw: 1.bias stored in bf16"):
        zf.plan(zf.partition(two, lambda path: "plain" if path == "1.bias" else "low"), model)
    with pytest.warns(UserWarning, match="adamw: 0.weight and 3 more stored in bf16"):
        zf.attach(model, zf.offload(zf.adamw())).detach()


@pytest.mark.parametrize(
    "tx",
    [
        *[zf.chain(zf.precision(store_dtype=BF), zf.low_precision_adam(rounding=r)) for r in ("stochastic", "kahan")],
        zf.chain(MASTERS, zf.adamw()),
        zf.adamw(),
    ],
    ids=["stochastic", "kahan", "masters", "fp32"],
)
@pytest.mark.filterwarnings("error")
def test_where_nothing_is_lost_nothing_is_told(tx):
    zf.init(tx, {"w": torch.ones(2)})
    zf.attach(torch.nn.Linear(2, 2), tx).detach()
