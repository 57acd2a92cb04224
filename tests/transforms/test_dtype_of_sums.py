"""In which dtype gradients are summed over ranks: the one that `precision` says, by both routes, wherever it stands."""

import itertools
import warnings

import pytest
import torch
from rank_programs import rank_and_size
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zerofn as zf

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LR = 0.5
CHAINS = {
    "ZeRO-2, precision after": lambda p: (zf.reduce_scatter(), p),
    "ZeRO-2, precision before": lambda p: (p, zf.reduce_scatter()),
    "ZeRO-0, precision after": lambda p: (zf.all_reduce(), p),
    "ZeRO-0, precision before": lambda p: (p, zf.all_reduce()),
    "ZeRO-3": lambda p: (zf.shard(), p),
}
DTYPES = {
    "bf16": {"param_dtype": BF16},
    "bf16 stored": {"store_dtype": BF16},
    "bf16 stored, fp32 gradients": {"store_dtype": BF16, "grad_dtype": FP32},
    "bf16 seen, fp32 sums": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16": {"param_dtype": FP16},
    "fp16 stored": {"store_dtype": FP16},
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(6, 5, generator=g), torch.randn(6, 3, generator=g)


def loss(out, y):
    return (out.float() - y).square().mean()


def by_both_routes(cells) -> dict:
    rank, _ = rank_and_size()
    found = {}
    for name, dtypes in cells:
        chain, given = CHAINS[name], DTYPES[dtypes]
        tx = zf.chain(*chain(zf.precision(**given)), zf.sgd(LR))
        x, y = data(rank)
        x = x.to(given.get("param_dtype", given.get("store_dtype")))
        model, plain = make(), make()
        state = zf.init(tx, dict(plain.named_parameters()))
        opt = zf.attach(model, tx)
        loss(model(x), y).backward()
        opt.step()
        state, _ = zf.make_step(lambda p, x, y, m=plain: loss(functional_call(m, p, (x,)), y), tx)(state, x, y)
        found[name, dtypes] = zf.full_params(tx, opt.state), zf.full_params(tx, state)
        opt.detach()
    return found


def expected(seen: torch.dtype, summed: torch.dtype) -> dict:
    """Of parameters stored in fp32: halves of two ranks' gradients, added in that dtype."""
    halves = []
    for rank in range(2):
        model = make().to(seen)
        x, y = data(rank)
        loss(model(x.to(seen)), y).backward()
        halves.append({n: p.grad.to(summed) / 2 for n, p in model.named_parameters()})
    return {n: p.detach() - LR * (halves[0][n] + halves[1][n]).float() for n, p in make().named_parameters()}


CELLS = list(itertools.product(CHAINS, DTYPES))


# Each chain with three dtypes, and each dtype in two or three chains.
SOME = [cell for i, cell in enumerate(CELLS) if (i // len(DTYPES) + i) % 2 == 0]


@pytest.mark.parametrize("cells", [SOME, pytest.param(CELLS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_sums_are_in_the_dtype_that_is_said(cells):
    ranks = zf.launch(by_both_routes, 2, cells, timeout=limit())
    wanted = {"bf16": (BF16, BF16), "bf16 seen, fp32 sums": (BF16, FP32), "fp16": (FP16, FP32)}
    wanted = {name: expected(*dtypes) for name, dtypes in wanted.items()}
    before = {n: p.detach() for n, p in make().named_parameters()}
    assert not torch.equal(wanted["bf16"]["2.weight"], wanted["bf16 seen, fp32 sums"]["2.weight"])
    for found in ranks:
        for (chain, dtypes), (eager, pure) in found.items():
            for n, p in before.items():
                assert torch.equal(eager[n], pure[n]), (chain, dtypes, n)
                assert not torch.equal(eager[n].float(), p), (chain, dtypes, n)
                if dtypes in wanted:
                    # The update of sgd rounds once, the reference twice.
                    torch.testing.assert_close(
                        eager[n], wanted[dtypes][n], rtol=0, atol=6e-8, msg=f"{chain} {dtypes} {n}"
                    )


def leaf_by_leaf():
    """Gradients that are equal on all ranks, so that the order of a sum decides nothing, by both ways of averaging."""
    tx = zf.chain(zf.all_reduce(), zf.precision(reduce_dtype=torch.bfloat16), zf.sgd(0.1))
    g = torch.randn(90, generator=torch.Generator().manual_seed(0))
    state = zf.init(tx, {"w": torch.zeros(90)})
    bucketed = zf.vjp(lambda p: p["w"] @ g, tx, state)[1](torch.tensor(1.0))[0]["w"]
    return torch.equal(bucketed, torch.func.grad(zf.bind(lambda p: p["w"] @ g, tx, state))(state.params)["w"])


def test_a_leaf_alone_is_divided_and_rounded_as_in_a_bucket():
    assert zf.launch(leaf_by_leaf, 3, timeout=limit()) == [True] * 3


IN_FP16 = zf.precision(reduce_dtype=FP16)
# By name: the chain, and whether ranks are warned of sums in fp16.
SUMS = {
    "data parallel": (lambda mesh: (zf.all_reduce(), IN_FP16, zf.sgd(0.1)), True),
    "ZeRO-1": (
        lambda mesh: (zf.precision(reduce_dtype=FP16), zf.accumulate(2), zf.reduce_scatter(), zf.sgd(0.1)),
        True,
    ),
    "ZeRO-2": (lambda mesh: (zf.reduce_scatter(), IN_FP16, zf.sgd(0.1)), True),
    "ZeRO-3": (lambda mesh: (zf.shard(), IN_FP16, zf.sgd(0.1)), True),
    "hybrid": (lambda mesh: (zf.shard(mesh["a"]), IN_FP16, zf.all_reduce(mesh["b"]), zf.sgd(0.1)), True),
    "in fp16 parameters": (lambda mesh: (zf.shard(), zf.precision(FP16, reduce_dtype=FP16), zf.sgd(0.1)), True),
    "with a scale": (lambda mesh: (zf.shard(), IN_FP16, zf.scale_loss(8.0), zf.sgd(0.1)), False),
    "with a dynamic scale": (lambda mesh: (zf.all_reduce(), IN_FP16, zf.scale_loss(), zf.sgd(0.1)), False),
    "in bf16": (lambda mesh: (zf.shard(), zf.precision(reduce_dtype=BF16), zf.sgd(0.1)), False),
    "fp16 parameters, sums in fp32": (lambda mesh: (zf.all_reduce(), zf.precision(FP16), zf.sgd(0.1)), False),
    "nothing is summed": (lambda mesh: (zf.local(), IN_FP16, zf.sgd(0.1)), False),
}


def sums_in_fp16() -> dict[tuple[str, str], list[str]]:
    """By chain and route, the warnings of two steps."""
    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("b", "a"))
    found = {}
    for name, (make, _) in SUMS.items():
        for route in ("attach", "pure"):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                if route == "pure":
                    state = zf.init(zf.chain(*make(mesh)), dict(model.named_parameters()))
                    del state
                else:
                    opt = zf.attach(model, zf.chain(*make(mesh)))
                    for _ in range(2):
                        model(torch.ones(1, 4)).sum().backward()
                        opt.step()
                        opt.zero_grad()
                    opt.detach()
            found[name, route] = [str(w.message) for w in heard]
    return found


def test_sums_in_fp16_without_a_scale_are_told_once():
    for of_rank in zf.launch(sums_in_fp16, 2):
        for (name, route), heard in of_rank.items():
            assert len(heard) == SUMS[name][1], (name, route, heard)
            assert all("reduce_dtype=torch.float16" in text and "scale_loss" in text for text in heard)


def test_on_one_process_nothing_is_summed():
    zf.attach(torch.nn.Linear(2, 1), zf.chain(zf.all_reduce(), IN_FP16, zf.sgd(0.1)))


@pytest.mark.parametrize("function", ["shard", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("keyword", ["dtype", "reduce_dtype", "communication_data_type", "param_dtype"])
def test_a_dtype_given_to_a_reduction_names_precision(function, keyword):
    right = "param_dtype" if keyword == "param_dtype" else "reduce_dtype"
    with pytest.raises(TypeError, match=rf"{function}\(\) has no keyword '{keyword}'.*precision\({right}=...\)"):
        getattr(zf, function)(**{keyword: torch.float32})
