"""The oracle against numbers worked out by hand, and against ml_dtypes' casts as a second opinion.

Everything else is compared with the oracle, so it is what may be trusted only after this.
"""

import inputs
import ml_dtypes
import numpy as np
import oracle
import pytest

F = np.float32

E2M1_TIES = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]
E4M3_NORMALS = [(432, 0x7E), (431, 0x7D), (1, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (2**-6, 8)]
E4M3_SUBNORMALS = [
    (multiple * 2**-9, code)
    for multiple, code in [(0, 0), (0.5, 0), (1, 1), (1.5, 2), (2.5, 2), (7.5, 8)]
]
ZEROS = [0.0, -0.0, 1e-39, -1e-39]
BAD_AMAXES = [-1.0, np.inf, -np.inf, np.nan]


def all_bfloat16() -> np.ndarray:
    """Every bfloat16 that is not NaN, as float32."""
    bits = np.arange(2**16, dtype=np.uint16)
    return oracle.float32(bits[(bits & 0x7FFF) <= 0x7F80].view(ml_dtypes.bfloat16))


def around(points: np.ndarray) -> np.ndarray:
    """float32 values at, just below and just above each point."""
    points = points.astype(F)
    return np.concatenate([points, np.nextafter(points, F(0)), np.nextafter(points, F(np.inf))])


def row(*blocks: list[float]) -> np.ndarray:
    """A row of blocks, each filled up to 16 values with zeros."""
    return np.concatenate([np.pad(np.array(b, F), (0, 16 - len(b))) for b in blocks])[None]


def codes_of(q: oracle.Quantized, block: int, count: int) -> list[int]:
    return oracle.unpack(q.codes)[0, 16 * block :][:count].tolist()


# --- Number formats ---


def test_decoding_tables_are_those_of_ml_dtypes():
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F)
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F)
    np.testing.assert_array_equal(oracle.E2M1_VALUES.view(np.uint32), e2m1.view(np.uint32))
    np.testing.assert_array_equal(oracle.E4M3_VALUES, e4m3)


@pytest.mark.parametrize(
    ("value", "code"),
    [*E2M1_TIES, (0.0, 0), (0.26, 1), (0.74, 1), (1.26, 3), (5.01, 7), (1e30, 7), (np.inf, 7)],
)
def test_e2m1_by_hand(value, code):
    np.testing.assert_array_equal(oracle.encode_e2m1(np.array([value, -value])), [code, code + 8])


@pytest.mark.parametrize(
    ("value", "code"),
    [*E4M3_NORMALS, *E4M3_SUBNORMALS, (448, 0x7E), (464, 0x7E), (1e30, 0x7E), (np.inf, 0x7E)],
)
def test_e4m3_by_hand(value, code):
    np.testing.assert_array_equal(oracle.encode_e4m3(np.array([value], F)), [code])


def test_e2m1_is_the_cast_of_ml_dtypes():
    points = around(np.concatenate([inputs.E2M1_MIDPOINTS, inputs.E2M1_NUMBERS[1:]]))
    x = np.concatenate(
        [all_bfloat16(), points, -points, inputs.make("heavy_tailed", "float32")[0].ravel()]
    )
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(oracle.encode_e2m1(x), expected)


def test_e4m3_is_the_cast_of_ml_dtypes():
    points = around(np.concatenate([inputs.E4M3_MIDPOINTS, inputs.E4M3_NUMBERS]))
    fuzz = 2.0 ** np.random.default_rng(0).uniform(-14, 10, 500_000)
    x = np.abs(np.concatenate([all_bfloat16(), points, fuzz.astype(F)]))
    expected = np.minimum(x, F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(oracle.encode_e4m3(x), expected)


def test_bfloat16_is_the_cast_of_ml_dtypes():
    x = inputs.make("any_finite_bits", "float32").ravel()
    x = np.concatenate([x, np.array([np.inf, -np.inf, 3.4e38], F)])
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(oracle.bfloat16(x).view(np.uint16), expected.view(np.uint16))
    assert np.isnan(oracle.bfloat16(np.array([0x7F800001], np.uint32).view(F)).astype(F))


def test_packing_puts_the_even_index_low():
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    np.testing.assert_array_equal(oracle.pack(codes), [[0x21, 0x0F]])
    np.testing.assert_array_equal(oracle.unpack(oracle.pack(codes)), codes)


# --- Quantise ---


def test_a_row_by_hand():
    # 2688 makes encode and scale 1, so the second block's scale is 3 / 6.
    x = row([2688, 448, -224], [3, 0.125, 0.375, 0.625, 0.875, -1.25, -1.75, -0.1, 2.5, -0.0])
    q = oracle.quantize(x)
    np.testing.assert_array_equal(q.scale, [1])
    np.testing.assert_array_equal(q.block_scales, [[0x7E, 0x30]])
    assert codes_of(q, 0, 4) == [7, 2, 9, 0]
    assert codes_of(q, 1, 11) == [7, 0, 2, 2, 4, 12, 14, 8, 6, 8, 0]
    expected = row([2688, 448, -224], [3, 0, 0.5, 0.5, 1, -1, -2, 0, 2])
    np.testing.assert_array_equal(oracle.dequantize(q), expected)
    np.testing.assert_array_equal(oracle.dequantize_bfloat16(q).astype(F), expected)


def test_pow2_scale_is_the_next_power_of_two():
    q = oracle.quantize(row([1.0]), pow2_scale=True)
    assert q.scale == 2.0**-11  # not below 1/2688
    assert q.block_scales[0, 0] == 0x7B  # 2048 / 6 = 341.3 is nearest to 352
    assert oracle.dequantize(q)[0, 0] == 6 * 352 * 2.0**-11
    assert oracle.quantize(row([2688.0 / 8]), pow2_scale=True).scale == 0.125  # already one


def test_pow2_scale_codes_do_not_move_with_amax():
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(F)
    codes = [oracle.quantize(x, pow2_scale=True, amax=np.full(8, a, F)).codes for a in (5, 9, 40)]
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(codes[0], codes[2])


def test_four_over_six_by_hand():
    # Second block: 4 / 6 rounds to 11/16, and 6 * 11/16 misses 4 by 1/8; 1.5 * 4/6 = 1 hits it.
    # Third: 6 is exact either way in its first value, but 1.5 only under a scale of 1.
    # Fourth is zero: both errors are 0 and the tie keeps the first candidate.
    q = oracle.quantize(row([2688], [4, 4], [6, 1.5], []), four_over_six=True)
    np.testing.assert_array_equal(q.block_scales, [[0x7E, 0x38, 0x38, 0]])
    assert codes_of(q, 1, 2) == [6, 6]
    assert codes_of(q, 2, 2) == [7, 3]
    plain = oracle.quantize(row([2688], [4, 4], [6, 1.5], []))
    np.testing.assert_array_equal(plain.block_scales, [[0x7E, 0x33, 0x38, 0]])


def test_four_over_six_saves_a_block_whose_scale_would_be_zero():
    # base is 0.8 * 2^-10, which rounds to 0; 1.5 times it rounds to 2^-9.
    x = row([2688], [6 * 0.8 * 2**-10])
    assert oracle.quantize(x).block_scales[0, 1] == 0
    q = oracle.quantize(x, four_over_six=True)
    assert q.block_scales[0, 1] == 1
    assert codes_of(q, 1, 1) == [4]  # 2.4 is nearest to 2


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_zero_and_subnormal_rows(pow2_scale, four_over_six):
    x = np.zeros((3, 32), F)
    x[1] = -0.0
    x[2] = 1e-39
    q = oracle.quantize(x, "row", pow2_scale, four_over_six)
    np.testing.assert_array_equal(q.scale, [1, 1, 1])
    assert not q.codes.any()
    assert not q.block_scales.any()


def test_a_negative_subnormal_is_minus_zero():
    assert codes_of(oracle.quantize(row([1, -1e-39, 1e-39, -0.0])), 0, 4)[1:] == [8, 0, 8]


def test_encode_is_capped():
    q = oracle.quantize(np.full((1, 16), 2.0**-120, F))
    assert q.scale == 2.0**-100
    assert q.block_scales[0, 0] == 0  # 2^-20 / 6 is below e4m3
    assert oracle.quantize(np.full((1, 16), 2.0**-100, F)).scale == 2.0**-100
    assert oracle.quantize(np.full((1, 16), 3.4e38, F)).scale == F(1) / (F(2688) / F(3.4e38))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_its_own_scale_only(bad):
    x = np.ones((2, 2, 32), F)
    x[1, 0, 3] = bad
    by_row = oracle.quantize(x)
    by_matrix = oracle.quantize(x, "tensor")
    np.testing.assert_array_equal(np.isnan(by_row.scale), [[False, False], [True, False]])
    np.testing.assert_array_equal(np.isnan(by_matrix.scale), [False, True])
    assert by_row.scale.view(np.uint32)[1, 0] == 0x7FC00000
    assert (by_row.block_scales[1, 0] == 0x7F).all()
    assert not by_row.codes[1, 0].any()
    assert (by_matrix.block_scales[1] == 0x7F).all()
    clean = oracle.quantize(np.ones((32,), F))
    np.testing.assert_array_equal(by_row.codes[1, 1], clean.codes)
    np.testing.assert_array_equal(by_matrix.codes[0, 1], clean.codes)


def test_with_a_given_amax_only_the_block_is_spoiled():
    x = np.ones((1, 48), F)
    x[0, 20] = np.inf
    q = oracle.quantize(x, amax=np.array([2688], F))
    np.testing.assert_array_equal(q.block_scales == 0x7F, [[False, True, False]])
    assert q.scale == 1
    assert not oracle.unpack(q.codes)[0, 16:32].any()
    assert oracle.unpack(q.codes)[0, 32:].all()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(2688, 1), *((zero, 1) for zero in ZEROS), *((bad, np.nan) for bad in BAD_AMAXES)],
)
def test_given_amax(amax, scale):
    q = oracle.quantize(row([6.0]), amax=np.array([amax], F))
    np.testing.assert_array_equal(q.scale, [F(scale)])
    assert q.block_scales[0, 0] == (0x38 if scale == 1 else 0x7F)


def test_a_given_amax_that_is_too_small_saturates():
    q = oracle.quantize(row([10000.0, -1344.0]), amax=np.array([2688], F))
    assert q.block_scales[0, 0] == 0x7E
    assert codes_of(q, 0, 2) == [7, 13]


def test_scopes_and_shapes():
    x = inputs.make("normal", "bfloat16", 4096)
    by_row, by_matrix = oracle.quantize(x), oracle.quantize(x, "tensor")
    assert by_row.scale.shape == x.shape[:-1]
    assert by_matrix.scale.shape == x.shape[:-2]
    assert by_row.codes.shape == (*x.shape[:-1], x.shape[-1] // 2)
    assert by_row.block_scales.shape == (*x.shape[:-1], x.shape[-1] // 16)
    given = oracle.quantize(x, "tensor", amax=np.abs(x.astype(F)).max((-2, -1)))
    for a, b in zip(by_matrix, given, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_the_error_is_that_of_a_four_bit_number(four_over_six):
    x = inputs.make("normal", "float32", 100_000)
    error = oracle.dequantize(oracle.quantize(x, four_over_six=four_over_six)) - x
    relative = np.sqrt(np.mean(error**2))
    assert 0.07 < relative < (0.093 if four_over_six else 0.1)


# --- Fronts ---


def test_exp_is_within_two_units_in_the_last_place():
    x = np.linspace(-87.33, 88.72, 1_000_001).astype(F)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(F)).astype(np.float64)
    assert (np.abs(oracle.exp(x) - exact) / ulp).max() <= 2
    ends = np.array([0.0, -0.0, -np.inf, -88, -1e30, np.inf, 89, 1e30, np.nan], F)
    np.testing.assert_array_equal(
        oracle.exp(ends), F([1, 1, 0, 0, 0, np.inf, np.inf, np.inf, np.nan])
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu_against_fp64(dtype):
    x = inputs.make("normal", dtype, 50_000)
    gate, up = np.split(x.astype(np.float64), 2, -1)
    y = oracle.swiglu(x)
    assert y.dtype == x.dtype
    rounding = {"float32": 2.0**-20, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(y.astype(np.float64), gate / (1 + np.exp(-gate)) * up, rounding)


@pytest.mark.parametrize("width", [16, 48, 512])
def test_rmsnorm_against_fp64(width):
    x = inputs.make("normal", "float32", 50_000)[..., :width]
    weight = np.linspace(-2, 2, width, dtype=F)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(oracle.rmsnorm(x, weight, 1e-6), exact, 2.0**-20)


def test_row_sum_takes_its_order_literally():
    x = inputs.make("heavy_tailed", "float32", 2048)[0, 0, :80]
    p = [F(0)] * 32
    for i, value in enumerate(x):
        p[i % 32] = p[i % 32] + value
    for stride in (16, 8, 4, 2, 1):
        for j in range(stride):
            p[j] = p[j] + p[j + stride]
    assert oracle.row_sum(x) == p[0]
    assert oracle.row_sum(x) != x.sum(dtype=F) or oracle.row_sum(x) != x[::-1].sum(dtype=F)


# --- Layout and products ---


def test_tiled_scales_by_hand():
    r, c = 130, 5
    scales = (np.arange(r * c) % 251).astype(np.uint8).reshape(r, c) + 1
    tiled = oracle.tile_scales(scales)
    assert tiled.shape == (2 * 2 * 512,)
    places = {(0, 0): 0, (1, 0): 16, (32, 0): 4, (0, 1): 1, (0, 4): 512, (128, 0): 1024}
    places |= {(127, 3): 511, (129, 4): 1024 + 512 + 16}
    for (i, j), offset in places.items():
        assert tiled[offset] == scales[i, j]
    np.testing.assert_array_equal(np.sort(tiled[tiled > 0]), np.sort(scales.ravel()))


def test_products_by_hand():
    a = oracle.quantize(row([2688, 448], [3, -1.5]))
    b = oracle.quantize(np.concatenate([row([1, 2], [0.5, 4]), row([], [])]), "tensor")
    b_values = oracle.dequantize(b)
    expected = (
        2688 * b_values[:, 0] + 448 * b_values[:, 1] + 3 * b_values[:, 16] - 1.5 * b_values[:, 17]
    )
    y = oracle.quantized_product(a, b)
    np.testing.assert_allclose(y.value, expected[None], 1e-14)
    assert y.magnitude[0, 0] > y.value[0, 0]
    tiny = oracle.unquantized_product(np.full((1, 2), 1e-39, F), np.full((1, 2), 1e30, F))
    assert tiny.value == 0
