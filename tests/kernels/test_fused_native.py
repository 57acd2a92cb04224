"""torch's fused Adam in C: its bits, and the norms of gradients in the same pass."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.kernels import fused_adam as fused_native  # inside: a kernel by itself
from zerofn.kernels import native  # inside: how kernels are built, loaded and kept
from zerofn.kernels.fused_adam import fused_update  # inside: a kernel by itself

LARGE = fused_native.LARGE


def leaves(sizes: list[int], seed: int, wild: bool = False) -> list[list[torch.Tensor]]:
    """Parameters, gradients and both moments; `wild` ones from subnormal to infinite and not a number."""
    made = torch.Generator().manual_seed(seed)
    columns = [[torch.randn(n, generator=made) for n in sizes] for _ in range(4)]
    if wild:
        columns = [[x * 10.0 ** torch.randint(-44, 39, x.shape, generator=made) for x in column] for column in columns]
        for column in columns:
            column[0][:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    columns[3] = [x.abs() for x in columns[3]]
    return columns


def by_torch(columns, step: int, decoupled: bool, **numbers) -> None:
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    steps = [torch.tensor(float(step)) for _ in columns[0]]
    fused(*columns, [], steps, **numbers, amsgrad=False, maximize=False)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


in_c = pytest.mark.skipif(
    native.quiet_compiler() is None or not fused_native.gives_bits(True, True, torch.float32),
    reason="no compiler, or a processor for which torch rounds otherwise",
)


@in_c
@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=6),
    step=st.integers(1, 10_000),
    decoupled=st.booleans(),
    decay=st.sampled_from([0.0, 0.1]),
    beta1=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    count=st.integers(1, 3),
    wild=st.booleans(),
    narrow=st.booleans(),
)
def test_the_bits_of_torchs_kernel(sizes, step, decoupled, decay, beta1, count, wild, narrow):
    """On leaves of any length, where the last elements of each are torch's own; of gradients in fp32 or bf16."""
    sizes = [LARGE + 3, *sizes]
    columns, expected = leaves(sizes, step, wild), leaves(sizes, step, wild)
    if narrow:
        columns[1] = [g.bfloat16() for g in columns[1]]
        expected[1] = [g.float() for g in columns[1]]
    numbers = dict(lr=1e-3, beta1=beta1, beta2=0.99, eps=1e-8, weight_decay=decay)
    before, norms = torch.get_num_threads(), []
    torch.set_num_threads(count)
    try:
        assert fused_native.can(columns, decoupled, beta1)
        fused_update(*columns, step=step, decoupled=decoupled, norms=norms, **numbers)
    finally:
        torch.set_num_threads(before)
    by_torch(expected, step, decoupled, **numbers)
    for written in (0, 2, 3):
        assert all(map(same, columns[written], expected[written]))
    # Squares are added up in double.
    exact = torch.stack([g.double().norm() for g in columns[1]])
    torch.testing.assert_close(torch.tensor(norms, dtype=torch.float64), exact, rtol=1e-12, atol=0.0, equal_nan=True)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1201, 901), torch.nn.Tanh(), torch.nn.Linear(901, 3))


@pytest.mark.parametrize("switch", ["1", "0"])
def test_an_attached_model_has_the_bits_of_torch_optim(monkeypatch, switch):
    """With and without a compiler; and the metric is the norm of all gradients."""
    monkeypatch.setenv("ZEROFN_NATIVE", switch)
    mine, plain = model(), model()
    opt = zf.attach(mine, zf.adamw(1e-2, weight_decay=0.1))
    ref = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.1, fused=True)
    before = [p.detach().clone() for p in plain.parameters()]
    for step in range(4):
        x = torch.randn(5, 1201, generator=torch.Generator().manual_seed(step))
        for m, o in ((mine, opt), (plain, ref)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
        assert all(map(torch.equal, mine.parameters(), plain.parameters()))
        norm = torch.stack([p.grad.double().square().sum() for p in plain.parameters()]).sum().sqrt()
        # Of three leaves each norm, its square and their sum are rounded to fp32.
        torch.testing.assert_close(opt.metrics["grad_norm"].double(), norm, rtol=1e-6, atol=0.0)
    assert not any(map(torch.equal, before, plain.parameters()))


def test_the_norm_is_of_what_the_optimizer_is_given():
    """A gradient that a member of a group has clipped is another one, and its norm is not asked for."""
    params = {"w": torch.ones(LARGE), "v": torch.ones(5)}
    tx = zf.partition({"all": zf.chain(zf.clip_by_value(0.5), zf.adamw(0.1))}, lambda path: "all")
    _, metrics = zf.update(tx, {p: torch.full_like(x, 2.0) for p, x in params.items()}, zf.init(tx, params))
    assert float(metrics["grad_norm"]) == pytest.approx(2.0 * (LARGE + 5) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: [[x.double() for x in column] for column in c],
        lambda c: [[torch.stack([x, x], 1)[:, 0] for x in column] for column in c],
        lambda c: [*c[:2], [x.bfloat16() for x in c[2]], c[3]],
    ],
    ids=["fp64", "gaps", "bf16 moments"],
)
def test_other_leaves_are_torchs(change):
    assert not fused_native.can(change(leaves([LARGE], 0)), True, 0.9)


def test_another_kernel_than_this_processors_torch_is_not_called(monkeypatch):
    """One that rounds otherwise, and one that cannot be built: torch's own runs, without a word."""
    columns, expected = leaves([LARGE], 1), leaves([LARGE], 1)
    numbers = dict(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    by_torch(expected, 3, True, **numbers)

    for broken in ("fused_adamw_", "library"):
        fused_native.gives_bits.cache_clear()
        with monkeypatch.context() as here, warnings.catch_warnings():
            warnings.simplefilter("error")
            if broken == "library":
                here.setattr(native, "quiet_compiler", lambda: None)
            else:
                here.setattr(fused_native, "fused_adamw_", lambda p, *_, **__: p[0].add_(1.0))
            assert not fused_native.can(columns, True, 0.9)
        # What was found out is kept: the kernel is not called now either.
        again = [[x.clone() for x in column] for column in columns]
        fused_update(*again, step=3, decoupled=True, **numbers)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(again, expected, strict=True))
    fused_native.gives_bits.cache_clear()
