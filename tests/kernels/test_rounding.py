"""Stochastic rounding: unbiased, special values kept, and draws that depend on nothing but their names."""

import math
import os
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerofn as zf
from zerofn.core.state import counter  # inside: a count as states have it
from zerofn.kernels.rounding import (  # inside: rounding by itself, and its formats
    block_ranges,
    known_formats,
    leaf_key,
    random_bits,
    stochastic_round,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DROPPED = {BF16: 16, F16: 13}
# Chance of a correct implementation exceeding this once in a test of up to 100 z values: below 0.1 %.
Z = 4.5


def from_bits(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def every_draw(x: float, dtype: torch.dtype) -> torch.Tensor:
    """Results for all equally likely draws: their mean is the expectation, exactly."""
    bits = torch.arange(1 << DROPPED[dtype], dtype=torch.int32)
    return stochastic_round(torch.full(bits.shape, x), dtype, bits=bits)


def z_of_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel()))


@pytest.mark.parametrize("dtype", [BF16, F16])
@settings(max_examples=100, deadline=None)
@given(pattern=st.integers(0, 0x477FDFFF), sign=st.sampled_from([1, -1]))
@example(pattern=0x3F800001, sign=1)
@example(pattern=0x00000001, sign=-1)
@example(pattern=0x007FFFFF, sign=1)
@example(pattern=0x33801234, sign=-1)  # a float16 subnormal
@example(pattern=0x387FFFFF, sign=1)  # just below float16's normal range
@example(pattern=0x7F7EFFFF, sign=1)  # just below bfloat16's largest
def test_expectation_is_the_value_and_results_are_its_neighbours(dtype, pattern, sign):
    x = sign * from_bits(pattern)
    if abs(x) >= torch.finfo(dtype).max:
        return
    y = every_draw(x, dtype)
    values = sorted(set(y.double().tolist()))
    # Float16 subnormals use 13 of the bits that are dropped; everything else is exact.
    slack = 2.0**-38 if dtype == F16 and abs(x) < 2.0**-14 else 0.0
    assert values[0] - slack <= x <= values[-1] + slack
    if len(values) > 1:
        low, high = (torch.tensor(v, dtype=dtype).view(torch.int16).item() & 0x7FFF for v in values)
        assert len(values) == 2 and abs(low - high) == 1, "not neighbours"
    assert abs(y.double().mean().item() - x) <= slack


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_unbiased_with_the_real_draws(dtype):
    n = 1 << 18
    spacing = float(torch.finfo(dtype).eps)
    for i, fraction in enumerate((0.01, 0.1, 0.25, 0.5, 0.77, 0.99)):
        x = torch.full((n,), -3.0 * (1 + fraction * spacing / 3 * 2))
        y = stochastic_round(x, dtype, bits=random_bits(n, seed=1, step=i + 1, key=leaf_key("w")))
        error = (y.double() - x.double()) / (2 * spacing)
        f = abs(float(x[0]) + 3) / (2 * spacing)
        assert abs(error.mean().item()) / math.sqrt(f * (1 - f) / n) < Z


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_special_values(dtype):
    info = torch.finfo(dtype)
    # The last float32 that is rounded to a finite value, and the first that is not.
    limit = from_bits({BF16: 0x7F7F8000, F16: 0x477FF000}[dtype])
    below = from_bits(struct.unpack("<I", struct.pack("<f", limit))[0] - 1)
    for sign in (1.0, -1.0):
        for exact in (0.0, math.inf, info.max, info.tiny, info.smallest_normal / 8, 1.0):
            y = every_draw(sign * exact, dtype)
            assert (y.double() == sign * exact).all()
            assert (y.signbit() == (sign < 0)).all()
        assert (every_draw(sign * below, dtype).double() == sign * info.max).all()
        assert (every_draw(sign * limit, dtype).double() == sign * math.inf).all()
        assert (every_draw(sign * torch.finfo(F32).max, dtype).double() == sign * math.inf).all()
    for payload in (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001):
        x = torch.tensor([payload - (1 << 32) if payload >> 31 else payload], dtype=torch.int32).view(F32)
        for noise in (0, -1):
            assert stochastic_round(x, dtype, bits=torch.tensor([noise], dtype=torch.int32)).isnan().all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_placement_does_not_change_the_draws(data):
    offset = data.draw(st.sampled_from([0, 5, 2**31 - 40, 2**32 - 40, 2**40 - 40])) + data.draw(st.integers(0, 60))
    n = data.draw(st.integers(0, 100))
    cut = data.draw(st.integers(0, n))
    where = dict(seed=data.draw(st.integers(0, 2**64)), step=data.draw(st.integers(1, 2**40)), key=leaf_key("a.b"))
    whole = random_bits(n, offset=offset, **where)
    parts = [random_bits(cut, offset=offset, **where), random_bits(n - cut, offset=offset + cut, **where)]
    assert whole.equal(torch.cat(parts))
    assert whole.equal(random_bits(n, offset=offset, **where | {"step": torch.tensor(where["step"])}))


# Of a million z values one lies above 5 by chance, and of fifty million one above 5.5. With ZEROFN_DRAWS=all the test
# takes 2**24 draws, for two minutes.
DRAWS = 1 << (24 if os.environ.get("ZEROFN_DRAWS") == "all" else 20)
LAGS, SERIAL_Z = 1 << 14, 5.5
SERIES = {
    "word": lambda x: x & 0xFFFFFFFF,
    "low half": lambda x: x & 0xFFFF,  # rounds parameters and first moments
    "high half": lambda x: (x >> 16) & 0xFFFF,  # rounds second moments
    "low 13": lambda x: x & 0x1FFF,  # rounds to float16
    **{f"bit {k}": (lambda x, k=k: (x >> k) & 1) for k in (0, 12, 15, 16, 31)},
}


def spectra(bits, names=tuple(SERIES)):
    """Fourier transforms of the draws as numbers of mean 0 and deviation 1, taken as a circle."""
    for name in names:
        x = SERIES[name](bits.long()).double()
        yield name, torch.fft.rfft((x - x.mean()) / x.std())


def z_at_lags(a, b):
    """z values of the correlation of one series with another that is moved by 0, 1, ..., LAGS elements."""
    return torch.fft.irfft(a.conj() * b, DRAWS)[: LAGS + 1] / math.sqrt(DRAWS)


def serial(seed, form):
    bits = random_bits(DRAWS, seed=seed, step=7, key=leaf_key("w"), form=form)
    for name, spectrum in spectra(bits):
        z = z_at_lags(spectrum, spectrum)[1:].abs()
        yield z.max().item(), name, int(z.argmax()) + 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2))])
def test_draws_have_no_serial_correlation(seed):
    worst = max(serial(seed, form=2))
    print(f"seed {seed}: the largest |z| of {DRAWS} draws at lags 1 to {LAGS} is {worst}")
    assert worst[0] < SERIAL_Z


def test_the_first_format_had_some():
    """So the test above can fail; and formats are not to be mixed up."""
    assert max(serial(2, form=1))[0] > 2 * SERIAL_Z


def test_draws_of_one_update_are_strangers_at_all_distances():
    """Of parameters, first and second moments, of this step, the next one and another leaf."""
    base = dict(seed=0, step=5, key=leaf_key("a"))
    parts = "low half", "high half"
    here = dict(spectra(random_bits(DRAWS, **base), parts))
    pairs = {"halves": (here["low half"], here["high half"])}
    others = {"first moments": {"stream": 1}, "next step": {"step": 6}, "other leaf": {"key": leaf_key("b")}}
    for name, change in others.items():
        there = dict(spectra(random_bits(DRAWS, **base | change), parts))
        pairs |= {(name, part): (here[part], there[part]) for part in parts}
    for name, (a, b) in pairs.items():
        for x, y in ((a, b), (b, a)):
            z = z_at_lags(x, y).abs()
            assert z.max() < SERIAL_Z, (name, int(z.argmax()))


def test_bits_are_uniform():
    bits = random_bits(1 << 20, seed=3, step=7, key=leaf_key("w"))
    for shift in range(0, 32, 8):
        counts = ((bits >> shift) & 0xFF).bincount(minlength=256).double()
        chi2 = ((counts - 4096) ** 2 / 4096).sum().item()
        assert abs(chi2 - 255) / math.sqrt(2 * 255) < Z
    ones = torch.stack([(bits >> i) & 1 for i in range(32)]).double().mean(1)
    assert ((ones - 0.5).abs().max() * 2 * 1024).item() < Z


def test_draws_are_independent_over_steps_leaves_seeds_streams_and_blocks():
    n = 1 << 18
    base = dict(seed=0, step=1, key=leaf_key("a"))
    a = random_bits(n, **base)
    others = {
        **{f"step {s}": random_bits(n, **base | {"step": s}) for s in (2, 3, 4, 5, 9, 17, 257, 65537)},
        **{f"leaf {k}": random_bits(n, **base | {"key": k}) for k in (leaf_key("b"), base["key"] ^ 1)},
        **{f"seed {s}": random_bits(n, **base | {"seed": s}) for s in (1, 2, 2**32, 2**63)},
        "stream": random_bits(n, **base, stream=1),
        "block": random_bits(n, **base, offset=2**32),
        "neighbour": random_bits(n, **base, offset=1),
        "line": random_bits(n, **base, offset=32),
        "high half": a >> 16,
    }
    for name, b in others.items():
        assert not a.equal(b), name
        for bit in (0, 8, 15):  # 15: the bit that decides for or against rounding up at one half
            z = z_of_correlation((a >> bit) & 1, (b >> bit) & 1)
            assert abs(z) < Z, (name, bit, z)
        assert abs(z_of_correlation(a & 0xFFFF, b & 0xFFFF)) < Z, name


def test_the_draws_of_one_element_vary_over_steps_as_much_as_they_should():
    steps, n = 64, 1 << 14
    draws = torch.stack([random_bits(n, seed=0, step=s, key=1) & 0xFFFF for s in range(1, steps + 1)]).double()
    expected = (2.0**32 - 1) / 12
    ratio = draws.var(0).mean().item() / expected
    # The variance of a variance of 64 uniform numbers is 0.0127 of its square.
    assert abs(ratio - 1) / math.sqrt(0.0127 / n) < Z


def test_blocks_of_2_to_the_32_do_not_repeat():
    ranges = list(block_ranges(2**32 - 2, 5))
    assert ranges == [(2**32 - 2, 2**32), (2**32, 2**32 + 3)]
    where = dict(seed=0, step=1, key=0)
    first = random_bits(64, **where)
    assert not (first == random_bits(64, offset=2**32, **where)).any()
    assert not (first == random_bits(64, offset=2**33, **where)).any()


# ---- formats: a run goes on as it began ----


BY_FORMAT = {
    1: ([-1856942906, 1940975090, -1353414460], 30357520237),
    2: ([312332584, 846616444, -680339302], -6277176446),
}


@pytest.mark.parametrize("form", known_formats())
def test_each_format_draws_what_it_always_did(form):
    bits = random_bits(1000, seed=5, step=3, key=leaf_key("w"), offset=2**32 - 500, form=form)
    assert (bits[:3].tolist(), int(bits.long().sum())) == BY_FORMAT[form]


def with_format(state, form):
    own = state.transforms["low_precision_adam"]
    own = {k: x for k, x in own.items() if k != "rounding_format"}
    if form is not None:
        own["rounding_format"] = counter(form)
    return replace(state, transforms={**state.transforms, "low_precision_adam": own})


def low(**options):
    return zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.01, **options))


def train(tx, state, steps):
    for i in steps:
        grads = (torch.arange(3000) % 17 - 8.0).mul(2.0**-i)
        state, _ = zf.update(tx, {"w": grads}, state)
    return state


def start(tx):
    return zf.init(tx, {"w": torch.linspace(-1, 1, 3000)})


def test_a_run_goes_on_by_the_format_it_began_with(tmp_path):
    """A checkpoint and a pickle of before there were two: the numbers are those of then."""
    tx = low(seed=3)
    old = train(tx, with_format(start(tx), None), (1, 2))
    zf.save(tmp_path / "old", old)
    loaded = zf.load(tmp_path / "old", like=start(tx))
    ways = {"pickle": old, "checkpoint": loaded}
    found = {name: train(tx, state, (3,)).leaves["w"] for name, state in ways.items()}
    # As the version before wrote it.
    assert {int(x.view(torch.int16).long().sum()) for x in found.values()} == {-926772}, found
    assert int(loaded.transforms["low_precision_adam"]["rounding_format"]) == 1
    assert not train(tx, start(tx), (1, 2, 3)).leaves["w"].equal(found["pickle"])
    zf.save(tmp_path / "again", loaded)
    assert int(zf.load(tmp_path / "again", like=start(tx)).transforms["low_precision_adam"]["rounding_format"]) == 1


def test_leaves_of_that_name_are_missed(tmp_path):
    tx = low()
    ones = {"rounding_format": torch.ones(2)}
    state = zf.init(tx, ones)
    own = state.transforms["low_precision_adam"]
    zf.save(tmp_path, with_format(replace(state, transforms={**state.transforms, "low_precision_adam": own}), None))
    assert zf.load(tmp_path, like=state).leaves["rounding_format"].tolist() == [1, 1]
    del own["exp_avg"]["rounding_format"]
    zf.save(tmp_path, state)
    with pytest.raises(ValueError, match="exp_avg/rounding_format: missing"):
        zf.load(tmp_path, like=zf.init(tx, ones))
    opt = zf.attach(torch.nn.ParameterDict(ones), tx)
    with pytest.raises(ValueError, match="exp_avg/rounding_format: missing"):
        opt.load_state(state)


def test_an_ensemble_may_mix_formats():
    tx = low()
    states = [with_format(start(tx), form) for form in known_formats()]
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *states)
    grads = {"w": torch.linspace(1, 2, 3000)}
    new, _ = torch.func.vmap(lambda s: zf.update(tx, grads, s))(stacked)
    for i, state in enumerate(states):
        assert new.leaves["w"][i].equal(zf.update(tx, grads, state)[0].leaves["w"])
    assert not new.leaves["w"][0].equal(new.leaves["w"][1])


def test_leaf_keys_are_stable_and_distinct():
    assert leaf_key("layers.0.weight") == 2236915355251466630
    keys = {leaf_key(f"layers.{i}.{name}") for i in range(5000) for name in ("weight", "bias")}
    assert len(keys) == 10000 and max(keys) < 2**63
