"""Law 2: `attach` and `make_step` give the same parameters and states, bit for bit."""

import optree
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_programs import BF16, F16, F32, kinds, module, pipelines, seeds

import zerofn as zf
from zerofn.testing import assert_trees_equal, random_like


def eager_batch(seed, i):
    return random_like(torch.zeros(5, 3), seed + i), random_like(torch.zeros(5, 2), seed + i + 1)


def objective(outputs, y):
    return (outputs[0].float() - y).square().mean() + outputs[1]["hidden"].float().mean()


@settings(max_examples=20)
@given(pipelines(), kinds, seeds)
@example([zf.precision(param_dtype=F16), zf.scale_loss(init_scale=2.0**30), zf.accumulate(2), zf.adamw(0.1)], 5, 0)
def test_routes_agree_bitwise(parts, kind, seed):
    tx = zf.chain(*parts)
    dtype = next((p.config["param_dtype"] for p in parts if p.name == "precision"), None) or F32
    model, plain = module(kind, seed), module(kind, seed)
    for m in (model, plain):
        # The pure route knows no frozen leaf but by its absence.
        m.frozen.requires_grad_(True)
    opt = zf.attach(model, tx)

    def pure(params, x, y):
        out = torch.func.functional_call(plain, params, (x.to(dtype),), tie_weights=False)
        cast = next((p.config["output_dtype"] for p in parts if p.name == "precision"), None)
        return objective(optree.tree_map(lambda t: t.to(cast) if cast and isinstance(t, torch.Tensor) else t, out), y)

    params = dict(plain.named_parameters(remove_duplicate=False))
    state, step = zf.init(tx, params), zf.make_step(pure, tx)
    for i in range(5):
        x, y = eager_batch(seed, i)
        state, metrics = step(state, x, y)
        objective(model(x), y).backward()
        if i == 0:
            assert all(p.grad is not None and p.grad.as_subclass(torch.Tensor).ne(0).any() for p in model.parameters())
        opt.step()
        opt.zero_grad()
        assert_trees_equal(dict(opt.state.leaves), dict(state.leaves), f"parameters after step {i}")
        assert_trees_equal(opt.state.transforms, state.transforms, f"state after step {i}")
        assert_trees_equal(opt.metrics, {k: v for k, v in metrics.items() if k != "loss"}, "metrics")
    assert all(p.data_ptr() == opt.state.leaves[n].data_ptr() for n, p in model.named_parameters())


@settings(max_examples=8)
@given(kinds, seeds, st.sampled_from([BF16, F16]), st.sampled_from(["stochastic", "kahan", "nearest"]))
def test_routes_agree_in_low_precision_storage(kind, seed, dtype, rounding):
    test = test_routes_agree_bitwise.hypothesis.inner_test
    cast = zf.precision(store_dtype=dtype, param_dtype=dtype, grad_dtype=F32)
    test([cast, zf.scale_loss(256.0), zf.accumulate(2), zf.low_precision_adam(0.05, rounding=rounding)], kind, seed)
