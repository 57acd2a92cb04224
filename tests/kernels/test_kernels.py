"""`low_precision_adam`: equal bits in every implementation, and how far each rounding is from the truth."""

import math
import warnings
from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps_of_low_precision import update

import zerofn as zf
from zerofn.core.halves import joins  # inside: an optimizer's half
from zerofn.kernels import native as _native  # inside: how kernels are built, loaded and kept
from zerofn.kernels import native as _native_compiler  # inside: how kernels are built, loaded and kept
from zerofn.kernels import print_c as _print_c  # inside: as above
from zerofn.kernels.rounding import (  # inside: rounding by itself, and its formats
    known_formats,
    leaf_key,
    random_bits,
    stochastic_round,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDINGS = ("nearest", "stochastic", "kahan")


def has_compiler() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _native.compiler() is not None


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler")
# Small leaves are computed by the formula unless a program is asked for.
FAST = "native" if has_compiler() else "torch"


def state(n, dtypes=(BF16, BF16, BF16, BF16), seed=0, shift=0):
    """Lists of one entry each, of numbers over many binades; views ``shift`` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for dtype, signed in zip((*dtypes, dtypes[0]), (True, True, True, False, None), strict=True):
        x = torch.randn(n + shift, generator=generator) if signed else torch.rand(n + shift, generator=generator)
        x = x * torch.randint(-30, 8, (n + shift,), generator=generator).float().exp2()
        tensors.append((x * 0 if signed is None else x).to(dtype)[shift:])
    return [[t] for t in tensors]


def copies(lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def assert_same_bits(a, b):
    for name, (xs, ys) in zip(("p", "g", "m", "v", "c"), zip(a, b, strict=True), strict=False):
        for x, y in zip(xs, ys, strict=True):
            nan = x.isnan()
            assert nan.equal(y.isnan()), name
            word = torch.int32 if x.dtype == F32 else torch.int16
            different = (x.contiguous().view(word) != y.contiguous().view(word)) & ~nan
            assert not different.any(), (name, x.dtype, x[different][:3], y[different][:3])


@contextmanager
def on_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- equal bits ----


@needs_compiler
@pytest.mark.parametrize("moment", [BF16, F32])
@pytest.mark.parametrize("grad", [BF16, F16, F32])
@pytest.mark.parametrize("param", [BF16, F16, F32])
def test_native_has_the_bits_of_eager(param, grad, moment):
    for rounding, beta1 in ((r, b) for r in ROUNDINGS for b in ((0.9, 0.99) if param == BF16 == grad else (0.9,))):
        start = state(3000, (param, grad, moment, moment), shift=1)
        start[1][0][:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
        results = []
        for implementation in ("native", "torch", "eager"):
            lists = copies(start)
            for step in (1, 2, 1000):
                options = dict(rounding=rounding, beta1=beta1, seed=step, paths=["w"], offsets=[2**32 - 1000])
                update(lists, step=step, weight_decay=0.1, implementation=implementation, **options)
            results.append(lists)
        assert_same_bits(results[0], results[2])
        assert_same_bits(results[1], results[2])


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_native_has_the_bits_of_eager_for_any_sizes_and_placements(data):
    rounding = data.draw(st.sampled_from(ROUNDINGS))
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 100, 1000]), min_size=1, max_size=6))
    shifts = [data.draw(st.integers(0, 3)) for _ in sizes]
    offsets = [data.draw(st.sampled_from([0, 7, 2**31 - 3, 2**32 - 40, 2**35 - 1])) for _ in sizes]
    dtypes = [data.draw(st.sampled_from([(BF16, BF16, BF16, BF16), (F16, F32, F32, BF16)])) for _ in sizes]
    entries = [state(n, d, seed=i, shift=s) for i, (n, d, s) in enumerate(zip(sizes, dtypes, shifts, strict=True))]
    lists = [[entry[k][0] for entry in entries] for k in range(5)]
    options = dict(
        step=data.draw(st.integers(1, 2**40)),
        lr=data.draw(st.floats(1e-6, 1.0)),
        weight_decay=data.draw(st.floats(0.0, 0.5)),
        eps=data.draw(st.sampled_from([1e-8, 1e-3])),
        seed=data.draw(st.integers(0, 2**63 - 1)),
        rounding=rounding,
        form=data.draw(st.sampled_from(known_formats())),
        offsets=offsets,
    )
    native, chunks, eager = copies(lists), copies(lists), copies(lists)
    for tensors, implementation in ((native, "native"), (chunks, "torch"), (eager, "eager")):
        update(tensors, **options, implementation=implementation)
    assert_same_bits(native, eager)
    assert_same_bits(chunks, eager)


@pytest.mark.parametrize("implementation", ["auto", "torch", "eager"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_shards_have_the_bits_of_the_whole(rounding, implementation):
    whole = state(70_001)
    cuts = [0, 1, 1000, 65_536, 65_537, 70_000, 70_001]
    spans = list(pairwise(cuts))
    shards = [[tensors[0][a:b].clone() for a, b in spans] for tensors in whole]
    offset = 2**32 - 30_000
    for step in (1, 2):
        options = dict(step=step, rounding=rounding, implementation=implementation, paths=["w"])
        update(whole, **options, offsets=[offset])
        for i in (4, 0, 5, 2, 1, 3):
            update([[tensors[i]] for tensors in shards], **options, offsets=[offset + spans[i][0]])
    assert_same_bits(whole, [[torch.cat(tensors)] for tensors in shards])


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("openmp", [True, False])
def test_threads_do_not_change_bits(threads, openmp, monkeypatch):
    def run(count):
        lists = [a + b for a, b in zip(state(200_003), state(40_000, seed=1), strict=True)]
        with on_threads(count):
            update(lists, offsets=[0, 3], implementation="native")
        return lists

    if not openmp:
        monkeypatch.setattr(_native, "parallel", lambda: None)
    assert_same_bits(run(1), run(threads))


@pytest.mark.parametrize("implementation", [FAST, "eager"])
def test_layouts_and_bookkeeping(implementation):
    """Not contiguous, requiring grad, of size zero, step and lr as tensors: all as the plain case."""
    plain = state(60)
    odd = [[t.clone().view(6, 10).t().contiguous().t()] for (t,) in plain]
    odd[0][0].requires_grad_()
    assert not odd[0][0].is_contiguous()
    saved = (odd[0][0] * odd[0][0]).sum()
    with_empty = [[torch.empty(0, 3, dtype=BF16), *tensors] for tensors in odd]
    for step in (1, 2):
        options = dict(rounding="kahan", implementation=implementation)
        update(plain, step=step, lr=0.25, paths=["w"], **options)
        update(with_empty, step=step, lr=torch.tensor(0.25), paths=["none", "w"], **options)
    assert_same_bits(plain, [[t.detach().reshape(-1)] for (t,) in odd])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@needs_compiler
def test_native_tells_autograd_that_it_wrote():
    lists = state(10)
    lists[0][0].requires_grad_()
    saved = (lists[0][0] ** 2).sum()
    update(lists, lr=0.25, implementation="native")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@needs_compiler
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_the_operator_is_what_torch_is_told_that_it_is(rounding):
    p, g, m, v, c = ([x for (x,) in entry] for entry in zip(state(33), state(5, seed=1), strict=True))
    numbers = torch.tensor([0.1, 0.9, 0.999, 1e-8, 0.0], dtype=F64)
    tx = zf.low_precision_adam(rounding=rounding)
    key = joins(tx.update_fn).func.__self__.programs.key
    slots = [*m, *v, *(c if rounding == "kahan" else [])]
    how = (torch.tensor([3, 1]), numbers, [torch.tensor(2)], key, ["a", "b"], [0, 40])
    torch.library.opcheck(torch.ops.zerofn.update_.default, (p, g, slots, *how))


@needs_compiler
def test_new_step_and_lr_load_no_new_kernel():
    update(state(10), implementation="native")
    before = _print_c.formula_kernel.cache_info().misses
    for step in (2, 3):
        update(state(10), step=step, lr=0.1 / step, seed=step, offsets=[step], implementation="native")
    assert _print_c.formula_kernel.cache_info().misses == before


# ---- the random bits ----


@pytest.mark.parametrize("implementation", [FAST, "eager"])
@pytest.mark.parametrize("form", known_formats())
@pytest.mark.parametrize("beta1", [0.9, 0.99])
def test_random_bits_are_those_of_runs_of_before(implementation, form, beta1):
    """Stream 0 has the parameter's bits, and above them those of the second moment; stream 1 those of the first one."""
    lists = [[t] for (t,) in state(999, (BF16, F32, BF16, BF16))]
    p, g, m, v = (t.float() for (t,) in lists[:4])
    where = dict(seed=-7, step=3, key=leaf_key("layers.0.weight"), offset=2**32 - 500, form=form)
    words = [random_bits(999, **where, stream=k) for k in (0, 1)]
    # The numbers of the step, each rounded once.
    numbers = [beta1, 0.999, 1 - 0.999**3, 1 - beta1**3]
    down = torch.tensor(0.01 * numbers[2] ** 0.5 / numbers[3], dtype=F64).float()
    small = torch.tensor(1e-8 * numbers[2] ** 0.5, dtype=F64).float()
    m = (g - m) * (1 - beta1) + m
    v = v * 0.999 + (g * (1 - 0.999)) * g
    x = p * (1 - 0.01 * 0.1) - (m * down) / (v.double().sqrt().float() + small)
    want = [stochastic_round(x, BF16, bits=words[0]), m.bfloat16(), stochastic_round(v, BF16, bits=words[0] >> 16)]
    if beta1 > 0.98:
        want[1] = stochastic_round(m, BF16, bits=words[1])
    options = dict(step=3, beta1=beta1, weight_decay=0.1, seed=-7, form=form, paths=["layers.0.weight"])
    update(lists, implementation, offsets=[2**32 - 500], **options)
    assert_same_bits([lists[0], *lists[2:4]], [[t] for t in want])


# ---- against other implementations and exact arithmetic ----


def exact_adam(p, g, m, v, *, step, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
    """The textbook formula in float64."""
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - lr * weight_decay)
    p.sub_(lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps))


def ulps(a, b):
    """Distance of float32 tensors in numbers between them."""
    a, b = (x.view(torch.int32).long() for x in (a, b))
    a, b = (torch.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a, b))
    return (a - b).abs().max().item()


@pytest.mark.parametrize("implementation", [FAST, "eager"])
def test_float32_is_torch_adamw(implementation):
    """Bound: 2 ulp of the parameter a step, and 4 of the moments, where the sum does not cancel."""
    torch.manual_seed(0)
    p = torch.randn(2000).abs() + 1
    reference = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.1, foreach=False)
    m, v = torch.zeros(2000), torch.zeros(2000)
    for step in range(1, 21):
        g = torch.rand(2000) + 0.1
        reference.grad = g
        optimizer.step()
        options = dict(lr=1e-3, weight_decay=0.1, rounding="nearest", implementation=implementation)
        update([[p], [g], [m], [v]], step=step, **options)
        assert ulps(p, reference.detach()) <= 2 * step
        assert ulps(m, optimizer.state[reference]["exp_avg"]) <= 4 * step
        assert ulps(v, optimizer.state[reference]["exp_avg_sq"]) <= 4 * step


@pytest.mark.parametrize("moment", [BF16, F32])
@pytest.mark.parametrize("param", [BF16, F16, F32])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_one_step_is_the_float64_formula_rounded(rounding, param, moment):
    torch.manual_seed(1)
    options = dict(step=7, lr=1e-2, weight_decay=0.1)
    # Magnitudes of at least 1/4: all of these numbers are normal, in float16 too.
    p = (torch.randn(5000) + torch.randn(5000).sign() / 4).to(param)
    g, m, v = torch.randn(5000), torch.randn(5000).to(moment), (torch.rand(5000) + 0.25).to(moment)
    exact = [x.double() for x in (p, m, v)]
    exact_adam(exact[0], g.double(), exact[1], exact[2], **options)
    c = torch.zeros_like(p)
    update([[p], [g], [m], [v], [c]], **options, rounding=rounding)
    for name, got, want in zip("pmv", (p, m, v), exact, strict=True):
        # To nearest: half a spacing; at random: one; the float32 arithmetic before: 4e-7 of the terms.
        random = rounding == "stochastic" or (rounding == "kahan" and name == "v")
        random = random and name != "m" and got.dtype != F32
        allowed = torch.finfo(got.dtype).eps * (1.0 if random else 0.5) * want.abs() + 4e-7
        assert ((got.double() - want).abs() <= allowed).all(), name
    if rounding == "kahan":
        precise = p.double() + c.double()
        assert ((precise - exact[0]).abs() <= torch.finfo(param).eps ** 2 * exact[0].abs() + 4e-7).all()


def run_constant_gradient(rounding, steps, *, lr, n=4000):
    """From parameters in [1, 2), with gradient one: each step is lr, below half the spacing of 2**-7."""
    p = (1 + torch.arange(n) % 100 / 100).to(BF16)
    start = p.double()
    m, v, c = torch.zeros(n), torch.zeros(n), torch.zeros_like(p)
    g = torch.ones(n, dtype=BF16)
    for step in range(1, steps + 1):
        update([[p], [g], [m], [v], [c]], FAST, step=step, lr=lr, rounding=rounding)
    return p.double() - start, c.double()


def test_updates_below_the_spacing_are_lost_to_nearest_only():
    steps, lr = 200, 1e-3
    moved, _ = run_constant_gradient("nearest", steps, lr=lr)
    assert (moved == 0).all()
    moved, withheld = run_constant_gradient("kahan", steps, lr=lr)
    # Exactly -0.2. The compensation carries 8 bits more, so that a step errs by 2**-17 at most, 0.76 % of lr.
    assert ((moved + withheld) / -0.2 - 1).abs().max() < 0.0077
    moved, _ = run_constant_gradient("stochastic", steps, lr=lr)
    # A step is 2**-7 or 0 with expectation lr: standard deviation sqrt(200 * lr * (2**-7 - lr)) = 0.037.
    assert abs(moved.mean().item() + 0.2) < 4.5 * 0.037 / 4000**0.5
    assert abs(moved.std().item() - 0.037) < 0.003


def decay_of_second_moment(rounding, dtype=BF16):
    """Factor by which second moments shrink in 2000 steps without gradients: 0.999**2000 = 0.135."""
    n = 2000
    p, g, m = (torch.zeros(n, dtype=dtype) for _ in range(3))
    v = torch.rand(n).add_(0.5).to(dtype)
    c, start = torch.zeros_like(p), v.double().mean()
    for step in range(1, 2001):
        update([[p], [g], [m], [v], [c]], FAST, step=step, rounding=rounding)
    return (v.double().mean() / start).item()


def test_nearest_freezes_a_bfloat16_second_moment_and_the_other_roundings_do_not():
    assert decay_of_second_moment("nearest") == 1.0
    assert abs(decay_of_second_moment("nearest", F32) - 0.135) < 1e-3
    for rounding in ("stochastic", "kahan"):
        assert abs(decay_of_second_moment(rounding) - 0.135) < 0.003


def test_a_first_moment_with_large_beta1_decays_too():
    p, g, m, v = (torch.full((4000,), x, dtype=BF16) for x in (0.0, 0.0, 1.0, 1.0))
    for step in range(1, 1001):
        update([[p], [g], [m], [v]], FAST, step=step, beta1=0.999)
    assert abs(m.double().mean().item() - 0.999**1000) < 0.01


# ---- special values ----


@pytest.mark.parametrize("implementation", [FAST, "eager"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_special_values_keep_their_meaning(rounding, dtype, implementation):
    inf, largest = float("inf"), torch.finfo(dtype).max
    p = torch.tensor([0.0, -0.0, inf, -inf, float("nan"), largest, -largest, torch.finfo(dtype).tiny / 4], dtype=dtype)
    start = p.clone()
    g, c = torch.zeros_like(p), torch.zeros_like(p)
    m, v = torch.zeros(8, dtype=BF16), torch.zeros(8, dtype=BF16)
    lists = [[p], [g], [m], [v], [c]]
    for step in range(1, 4):  # no gradient: nothing moves
        update(lists, step=step, rounding=rounding, implementation=implementation)
    assert p[4].isnan() and torch.equal(p.nan_to_num(nan=0), start.nan_to_num(nan=0))
    assert p.signbit()[:2].tolist() == [False, True]
    assert (c == 0).logical_or(p.isnan()).all() and (m == 0).all() and (v == 0).all()
    g[:2] = torch.tensor([float("nan"), inf])
    update(lists, step=4, rounding=rounding, implementation=implementation)
    assert p[:2].isnan().all() and m[0].isnan() and m[1] == inf and v[1] == inf
    assert torch.equal(p[2:4], start[2:4])


@pytest.mark.parametrize("implementation", [FAST, "eager"])
@pytest.mark.parametrize("dtype, half", [(BF16, 2.0**119), (F16, 16.0)])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_noise_does_not_make_infinities(rounding, dtype, half, implementation):
    """With these betas the update is -lr exactly: half a spacing beyond the largest number, or just less."""
    largest = torch.finfo(dtype).max
    for lr, expected in ((half, float("inf")), (half * (1 - 2**-7), largest)):
        p, g, m, v, c = (torch.full((1000,), x, dtype=dtype) for x in (largest, -1.0, 0.0, 0.0, 0.0))
        m, v = m.to(BF16), v.to(BF16)
        options = dict(lr=lr, beta1=0.0, beta2=0.75, eps=0.0, rounding=rounding, implementation=implementation)
        update([[p], [g], [m], [v], [c]], **options)
        assert (p == expected).all()


def test_gradients_with_any_nan_payload_give_nan():
    g = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(F32)
    for rounding, implementation in product(ROUNDINGS, (FAST, "eager")):
        p, m, v, c = (torch.ones(4, dtype=BF16) for _ in range(4))
        update([[p], [g], [m], [v], [c]], rounding=rounding, implementation=implementation)
        assert p.isnan().all() and m.isnan().all() and v.isnan().all()


# ---- sums of squares ----


@needs_compiler
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_squares_are_those_of_float64(data):
    """At any length and place in memory; on 1, 2 and 3 threads the same bits."""
    dtype = data.draw(st.sampled_from([F32, BF16, F16]))
    count = data.draw(st.sampled_from([1, 2, 31, 32, 33, 100, 2**14 + 1, 3 * 2**14 - 5, 2**22 + 77]))
    begin = data.draw(st.integers(0, 3))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    x = (torch.randn(count + begin, generator=g) * 2.0 ** data.draw(st.integers(-20, 4))).to(dtype)[begin:]
    found = []
    for threads in (1, 2, 3):
        with on_threads(threads):
            found.append(_native.squares(x))
    assert found[0] == found[1] == found[2]
    # Each of at most 2**22 double additions may lose 2**-53 of the sum.
    assert found[0] == pytest.approx(float(x.double().square().sum()), rel=2.0**-30)
    place = data.draw(st.integers(0, count - 1))
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[place] = bad
        assert not math.isfinite(_native.squares(x))


@needs_compiler
@pytest.mark.parametrize(
    "flags", [[], *(pytest.param(x, marks=pytest.mark.slow) for x in (["-mf16c"], ["-mavx2", "-mf16c"]))]
)
@pytest.mark.parametrize("rounding", ["kahan", *(pytest.param(x, marks=pytest.mark.slow) for x in ROUNDINGS[:2])])
def test_every_float16_is_read_and_written_alike_on_all_processors(fresh_kernels, monkeypatch, flags, rounding):
    """Those without instructions for float16 too."""
    if "x86" not in _native_compiler.processor():
        pytest.skip("the flags are of x86")
    monkeypatch.setattr(_native_compiler, "TUNING", (flags,))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    m, v = (torch.rand(2**16, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    start = [[x] for x in (every, every.flip(0), m, v, torch.zeros_like(every))]
    results = []
    for implementation in ("native", "eager"):
        lists = copies(start)
        for step in (1, 2, 3):
            update(lists, step=step, lr=1e-4, rounding=rounding, weight_decay=0.1, implementation=implementation)
        results.append(lists)
    assert_same_bits(*results)
    small = every.isfinite() & (every.abs() < 2**-3)
    assert (results[0][0][0][small] != every[small]).double().mean() > 0.5
    assert _native.squares(every[small]) == float(every[small].double().square().sum())
