"""Codes of blocks: what a number is rounded to, what stays, and that pieces have the bits of the whole."""

import math
from functools import partial

import pytest
import torch
from compilers import needs_compiler
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerofn.extend import BlockDraws, Codes, Draws
from zerofn.kernels import codes as module  # inside: from which size on C is called
from zerofn.kernels.codes import Float8  # inside: a public name asks for it as `wire="fp8"`

SHAPES = [(1, 1), (1, 7), (3, 8), (5, 9), (2, 3, 5), (0, 4), (4, 0), (6, 1, 1)]
KINDS = st.builds(Codes, st.sampled_from([8, 4]), st.integers(1, 9), st.sampled_from(module.MAPS))
SIZES = st.sampled_from([1e-30, 1e-6, 1.0, 1e20])


def drawn(shape, seed, size=1.0, dtype=torch.float32):
    """Numbers over many magnitudes, some of them zero; of some rows none is negative."""
    of = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=of) * 10 ** torch.randn(shape, generator=of)
    x *= torch.rand(shape, generator=of) < 0.9
    x[::2] = x[::2].abs()
    return (x * size).to(dtype)


def draw(seed, low=0):
    return Draws(seed, torch.tensor(1), 2, low)


def table(codes, signed):
    """All numbers of a block with scale 1, as the papers define them, in float64."""
    if codes.code == "dynamic":
        return dynamic_table(codes.bits, signed)
    last = 2 ** (codes.bits - 1) - 1 if signed else 2**codes.bits - 1
    even = [n / last for n in range(-last if signed else 0, last + 1)]
    inverse = (lambda t: t / (2 - abs(t))) if signed else (lambda t: t * t)
    return torch.tensor([inverse(t) if codes.code == "companded" else t for t in even], dtype=torch.float64)


def dynamic_table(bits, signed):
    """What each pattern of bits means: zeros, of which each is a power of ten, a one, and a fraction of [0.1, 1]."""
    values, width = [0.0, 1.0], bits - 1
    for pattern in range(1, 2**width):
        zeros = width - pattern.bit_length()
        fractions = [pattern - 2 ** (width - 1 - zeros)]
        # Without a sign its bit is one more of the fraction.
        fractions = fractions if signed else [2 * fractions[0], 2 * fractions[0] + 1]
        count = 2 ** (width - 1 - zeros) * len(fractions)
        found = [10**-zeros * (0.1 + 0.9 * (2 * f + 1) / (2 * count)) for f in fractions]
        values += [*found, *(-x for x in found)] if signed else found
    assert len(values) == 2**bits
    return torch.tensor(sorted(values), dtype=torch.float64)


@settings(max_examples=60)
@given(KINDS, st.sampled_from(SHAPES), SIZES, st.integers(0, 99), st.none() | st.integers(0, 9))
@example(Codes(8, 4), (3, 8), 1.0, 0, 0)
def test_a_number_becomes_one_of_its_two_neighbours(codes, shape, size, seed, rounds):
    x = drawn(shape, seed, size)
    found = codes.decode(*codes.encode(x, None if rounds is None else draw(rounds)), shape)
    assert found.shape == x.shape and found.dtype == x.dtype
    for row, got in zip(x.flatten(1).double(), found.flatten(1).double(), strict=True):
        for mine, theirs in zip(row.split(codes.block), got.split(codes.block), strict=True):
            if not mine.any():
                assert not theirs.any()
                continue
            scale, values = mine.abs().max(), table(codes, bool((mine < 0).any()))
            gaps = (theirs / scale).unsqueeze(-1) - values
            assert gaps.abs().amin(-1).max() < 1e-6
            places = (mine / scale).contiguous()
            high = torch.searchsorted(values, places).clamp(max=len(values) - 1)
            low = (high - 1).clamp(min=0)
            # A number that is not negative in a block of such ones does not become zero unless it is.
            least = values[1] if values[0] == 0 else values[0]
            low = torch.where(mine == 0, values[high], values[low].clamp(min=least))
            assert (theirs / scale <= values[high].maximum(low) + 1e-6).all()
            assert (theirs / scale >= low.minimum(values[high]) - 1e-6).all()
            # The dynamic map has 1, but no -1.
            largest = (mine if codes.code == "dynamic" else mine.abs()) == scale
            assert (theirs[largest] == mine[largest]).all()
            if rounds is None and codes.code == "dynamic":
                nearest = (places.unsqueeze(-1) - values).abs()
                nearest = (
                    nearest if values[0] < 0 else nearest.where((values > 0) | (mine == 0).unsqueeze(-1), math.inf)
                )
                assert ((theirs / scale - places).abs() <= nearest.amin(-1) + 1e-6).all()
            if rounds is None and codes.code == "linear":
                assert (theirs - mine).abs().max() <= scale * max(0.5 * float(values[1] - values[0]), least) + 1e-38


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@settings(max_examples=60)
@given(KINDS, st.sampled_from(SHAPES), DTYPES, st.integers(0, 99), st.none() | st.integers(0, 9))
def test_what_has_a_code_keeps_it(codes, shape, dtype, seed, rounds):
    x = drawn(shape, seed, dtype=dtype)
    if codes.code == "dynamic":
        # Its largest negative number comes back smaller, and with it the scale: here another one is larger.
        x.flatten(1)[:, :: codes.block] = 1e4
    codes_and_scales = codes.encode(x, draw(1))
    x = codes.decode(*codes_and_scales, shape)
    again = codes.encode(x, None if rounds is None else draw(rounds))
    assert x.dtype == dtype and torch.equal(codes.decode(*again, shape), x)
    assert all(map(torch.equal, again, codes_and_scales))


@settings(max_examples=40)
@given(KINDS, st.integers(1, 300), st.integers(0, 99), st.data())
def test_rows_have_the_codes_of_the_whole(codes, row, seed, data):
    rows = data.draw(st.integers(1, 9))
    low, high = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    x = drawn((rows, row), seed)
    whole = codes.encode(x, draw(3))
    part = codes.encode(x[low:high], draw(3, low * row))
    assert all(torch.equal(mine, both[low:high]) for mine, both in zip(part, whole, strict=True))
    assert torch.equal(codes.decode(*part, (high - low, row)), codes.decode(*whole, x.shape)[low:high])


def test_large_tensors_are_coded_in_pieces():
    codes, x = Codes(8, 32), drawn((3000, 200), 0)
    coded = codes.encode(x, draw(0))
    for at in (0, 1500, 2999):
        one = codes.encode(x[at : at + 1], draw(0, 200 * at))
        assert all(torch.equal(mine[0], all_of[at]) for mine, all_of in zip(one, coded, strict=True))
    numbers, scales = (x[1500:1501] for x in coded)
    assert torch.equal(codes.decode(*coded, x.shape)[1500:1501], codes.decode(numbers, scales, (1, 200)))


@pytest.mark.parametrize("code", ["companded", "dynamic"])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_right_on_average(bits, code):
    codes, n = Codes(bits, 256, code), 4096
    least = {"companded": -1.0, "dynamic": -0.98 if bits == 8 else -0.8}[code]
    for numbers in (torch.linspace(-1, 1, 256).clamp(min=least), torch.linspace(1e-3, 1, 256)):
        if bits == 4 and numbers[0] > 0:
            numbers = numbers.clamp(min=1 / 225)
        found = codes.decode(*codes.encode(numbers.repeat(n, 1), draw(5)), (n, 256)).double()
        error = (found.mean(0) - numbers.double()).abs() / (found.std(0) / math.sqrt(n) + 1e-9)
        # Of 256 means in units of their own spread the worst.
        assert error.max() < 4.5 and found.std(0).max() > 1e-3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounds", [None, 0])
def test_numbers_that_are_not_finite_show(bits, rounds):
    x = torch.ones(2, 12)
    x[0, 1], x[0, 5], x[1, 11] = torch.inf, -torch.inf, torch.nan
    codes = Codes(bits, 4)
    found = codes.decode(*codes.encode(x, None if rounds is None else draw(rounds)), x.shape)
    assert found.isnan().tolist() == [[True] * 8 + [False] * 4, [False] * 8 + [True] * 4]
    assert (found[~found.isnan()] == 1).all()


def test_codes_do_not_underflow_where_an_optimizer_divides():
    second_moments = torch.tensor([[1.0, 1e-12, 0.0, 1e-30]])
    for bits, rounds in ((8, None), (4, None), (8, 0), (4, 0)):
        codes = Codes(bits)
        found = codes.decode(*codes.encode(second_moments, None if rounds is None else draw(rounds)), (1, 4))
        assert (found > 0).tolist() == [[True, True, False, True]]


def test_bytes():
    numbers = {bits: sum(x.nbytes for x in Codes(bits).encode(torch.ones(256, 1024))) for bits in (8, 4)}
    assert numbers == {8: 256 * (1024 + 4 * 8), 4: 256 * (512 + 4 * 8)}


@pytest.mark.parametrize("code", ["companded", "dynamic"])
def test_along_a_batch(code):
    codes, x = Codes(4, 5, code), drawn((6, 3, 13), 4)
    want = [codes.encode(one, draw(7)) for one in x]
    found = torch.func.vmap(partial(codes.encode, draws=draw(7)))(x)
    assert all(
        torch.equal(mine, torch.stack(theirs)) for mine, theirs in zip(found, zip(*want, strict=True), strict=True)
    )
    back = torch.func.vmap(lambda a, b: codes.decode(a, b, (3, 13)))(*found)
    assert torch.equal(back, torch.stack([codes.decode(*one, (3, 13)) for one in want]))


@needs_compiler
@pytest.mark.parametrize("row", [2048, 129, 77, 1])
@pytest.mark.parametrize(("code", "signed"), [*((code, False) for code in module.MAPS), ("linear", True)])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_gives_the_bits_of_torch(bits, code, signed, row, monkeypatch):
    codes, x = Codes(bits, 33, code, signed), drawn((9000 // row, row), 1)
    x[1, 0], x[2, -1], x[3] = torch.nan, torch.inf, -0.0 * x[3]
    assert module._library(bits, code, signed) is not None
    for at in (None, draw(3), draw(3, 2**32 - 9100), draw(3, 2**32 - 5000), BlockDraws(3)):
        found = codes.encode(x, at)
        back = codes.decode(*found, x.shape)
        with monkeypatch.context() as patch:
            patch.setattr(module, "LARGE", 1 << 60)
            want = codes.encode(x, at)
            assert all(map(same, found, want))
            assert same(back, codes.decode(*want, x.shape))


def test_random_bits_of_a_block_follow_from_the_block_alone():
    torch.manual_seed(0)
    x, codes = torch.randn(3, 96), Codes(8, 32, "linear", True)
    found = codes.encode(x, BlockDraws(1))[0]
    # Elsewhere in a tensor, and beside others, a block has the same codes.
    for row in range(3):
        for i in range(0, 96, 32):
            assert torch.equal(codes.encode(x[row : row + 1, i : i + 32], BlockDraws(1))[0][0], found[row, i : i + 32])
    # One bit of one number, and a seed, change about as many codes as numbers lie between two codes.
    near = x.clone()
    near[0, 0] = torch.nextafter(x[0, 0], torch.tensor(9.0))
    for other in (codes.encode(near, BlockDraws(1))[0][0, 1:32], codes.encode(x, BlockDraws(2))[0][0, 1:32]):
        assert 3 < (other != found[0, 1:32]).sum() < 28


@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_floats_of_8_bits_are_within_their_bound(exponent):
    x = drawn((40, 300), 5) * 10.0**exponent
    x[3], x[4, :128] = 0.0, 0.0
    x[5, 0], x[6, 299] = torch.nan, torch.inf
    how = Float8(128)
    codes, scales = how.encode(x)
    found = how.decode(codes, scales, x.shape)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scales.shape == (40, 3)
    assert found[5, :128].isnan().all() and found[6, 256:].isnan().all()
    x[5, :128] = x[6, 256:] = found[5, :128] = found[6, 256:] = 0.0
    most = torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in x.split(128, 1)], 1).double()
    assert ((found.double() - x.double()).abs() <= (x.double().abs() / 16).maximum(most / 450_000) * (1 + 1e-5)).all()
    assert (found[3] == 0).all()


def same(a, b):
    return a.shape == b.shape and torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))
