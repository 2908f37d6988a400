"""The plain jnp statement of the numerics, under jit on the CPU, against the oracle: every byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantizer_cases import (
    Options,
    assert_same_bytes,
    bits,
    every_class,
    every_dtype,
    every_option,
    expected,
    make,
)

from jaxfp4 import reference


@functools.cache
def quantize(options: Options):
    return jax.jit(functools.partial(reference.quantize, **options.static))


@every_option
@every_dtype
@every_class
def test_quantize_equals_the_oracle(name, dtype, options):
    x = make(name, dtype)
    actual = quantize(options)(x, amax=options.amax(x))
    assert_same_bytes(actual, tuple(expected(name, dtype, options)))
    assert actual[1].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("shape", [(0, 32), (3, 5, 16)])
def test_small_shapes_equal_the_oracle(shape, scope):
    x = np.ones(shape, np.float32)
    assert_same_bytes(quantize(Options(scope))(x), tuple(oracle.quantize(x, scope)))


@every_dtype
@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_dequantize_equals_the_oracle(dtype, scope):
    x = make("heavy_tailed", dtype)[..., :48].copy()
    x[0, 0, 0] = np.nan
    q = oracle.quantize(x, scope)
    arrays = (q.codes, q.block_scales.view(jnp.float8_e4m3fn), q.scale)
    values = jax.jit(reference.dequantize)(*arrays)
    assert_same_bytes(values, oracle.dequantize_bfloat16(q))
    values = jax.jit(functools.partial(reference.dequantize, dtype=jnp.float32))(*arrays)
    np.testing.assert_array_equal(values, oracle.dequantize(q).astype(np.float32))


# --- Fronts ---


def test_exp_equals_the_oracle():
    every_bfloat16 = oracle.float32(np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16))
    x = np.concatenate([every_bfloat16, np.linspace(-90, 90, 1_000_001, dtype=np.float32)])
    assert_same_bytes(bits(jax.jit(reference.exp)(x)), bits(oracle.exp(x)))


def assert_same_values(actual: jax.Array, desired: np.ndarray) -> None:
    """Bit for bit, but for the sign and payload of a NaN."""
    assert actual.dtype == desired.dtype
    actual, desired = np.asarray(actual), desired
    nan = np.isnan(desired.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(actual)[~nan], bits(desired)[~nan])


@every_dtype
@every_class
def test_swiglu_equals_the_oracle(name, dtype):
    x = make(name, dtype, 250_000)
    assert_same_values(_swiglu(x), oracle.swiglu(x))


_swiglu = jax.jit(reference.swiglu)
_rmsnorm = jax.jit(functools.partial(reference.rmsnorm, eps=1e-6))


@every_dtype
@every_class
def test_rmsnorm_equals_the_oracle(name, dtype):
    x = make(name, dtype, 250_000)[..., :496]
    weight = np.random.default_rng(3).standard_normal(496, np.float32)
    assert_same_values(_rmsnorm(x, weight), oracle.rmsnorm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [16, 33, 80, 512])
def test_rmsnorm_of_odd_widths_equals_the_oracle(width):
    x = make("normal", "float32")[..., :width]
    weight = np.ones(width, np.float32)
    assert_same_values(_rmsnorm(x, weight), oracle.rmsnorm(x, weight, 1e-6))


# --- Products ---


_operand = jax.jit(reference.operand)
_product = jax.jit(reference.product, static_argnames="out_dtype")
_grouped_product = jax.jit(reference.grouped_product)
_grouped_outer_product = jax.jit(reference.grouped_outer_product)


def assert_close_sums(actual: jax.Array, desired: oracle.Product, depth: int) -> None:
    """Within the error of an fp32 sum of `depth` products, and of rounding to the result's type."""
    result_rounding = 2.0**-8 if actual.dtype == jnp.bfloat16 else 2.0**-22
    allowed = depth * 2.0**-24 * desired.magnitude + result_rounding * np.abs(desired.value)
    error = np.abs(np.asarray(actual, np.float64) - desired.value)
    assert (error <= allowed + 2.0**-126).all()


def quantized(shape: tuple[int, ...], seed: int, scope: str) -> oracle.Quantized:
    x = np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)
    return oracle.quantize(x, scope)


def as_operand(q: oracle.Quantized) -> jax.Array:
    return _operand(q.codes, q.block_scales.view(jnp.float8_e4m3fn))


def test_operand_is_exact():
    q = quantized((7, 64), 0, "row")
    np.testing.assert_array_equal(as_operand(q).astype(jnp.float32), oracle.operand(*q[:2]))


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weight_scope", ["row", "tensor"])
def test_product_of_quantized_operands(weight_scope, out_dtype):
    a, b = quantized((33, 96), 1, "row"), quantized((20, 96), 2, weight_scope)
    y = _product(as_operand(a), as_operand(b), a.scale, jnp.asarray(b.scale), out_dtype)
    assert y.dtype == out_dtype
    assert_close_sums(y, oracle.quantized_product(a, b), 96)


def test_product_multiplies_the_weight_scale_first():
    one = jnp.ones((1, 16), jnp.bfloat16)
    y = _product(one, one, jnp.float32([2.0**-100]), jnp.float32(2.0**-100), jnp.float32)
    assert y == 0
    y = _product(one, one, jnp.float32([2.0**-100]), jnp.float32(2.0**126), jnp.float32)
    assert np.isinf(y)  # 16 * 2^126 is past fp32 before the row's scale comes


@every_dtype
def test_product_of_unquantized_operands(dtype):
    a, b = make("normal", dtype)[0, :30, :80], make("normal", dtype)[1, :17, :80]
    y = _product(a, b, out_dtype=jnp.float32)
    assert_close_sums(y, oracle.unquantized_product(a, b), 80)
    tiny = _product(np.float32([[1e-39]]), np.float32([[1e30]]), out_dtype=jnp.float32)
    assert tiny == 0


GROUP_SIZES = [[5, 5, 5], [0, 11, 4], [4, 0, 0], [0, 0, 0], [0, 0, 15], [1, 2, 3]]


@pytest.mark.parametrize("weight_scope", ["row", "tensor"])
@pytest.mark.parametrize("group_sizes", GROUP_SIZES)
def test_grouped_product_is_a_product_for_each_group(group_sizes, weight_scope):
    a, b = quantized((15, 48), 4, "row"), quantized((3, 8, 48), 5, weight_scope)
    x = as_operand(a).at[sum(group_sizes) :].set(jnp.nan)  # unused rows may hold anything
    y = _grouped_product(x, as_operand(b), jnp.int32(group_sizes), a.scale, jnp.asarray(b.scale))
    start = 0
    for group, size in enumerate(group_sizes):
        of_group = oracle.Quantized(*(array[start : start + size] for array in a))
        weight = oracle.Quantized(*(array[group] for array in b))
        assert_close_sums(y[start : start + size], oracle.quantized_product(of_group, weight), 48)
        start += size
    assert not np.asarray(y[start:]).any()


def test_grouped_product_keeps_a_nan_in_its_group():
    a = jnp.ones((6, 16), jnp.bfloat16)
    b = jnp.ones((3, 4, 16), jnp.bfloat16).at[1].set(jnp.nan)
    y = _grouped_product(a, b, jnp.int32([2, 2, 2]))
    np.testing.assert_array_equal(np.isnan(y.astype(jnp.float32)).all(-1), [0, 0, 1, 1, 0, 0])
    y = _grouped_product(a.at[0].set(jnp.inf), b, jnp.int32([2, 2, 2]))
    np.testing.assert_array_equal(y[4:].astype(jnp.float32), 16)


@pytest.mark.parametrize("group_sizes", GROUP_SIZES)
def test_grouped_outer_product_is_one_for_each_group(group_sizes):
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal((15, n), np.float32) for n in (8, 48))
    a[sum(group_sizes) :] = np.nan
    dw = _grouped_outer_product(a, b, jnp.int32(group_sizes))
    start = 0
    for group, size in enumerate(group_sizes):
        rows = slice(start, start + size)
        assert_close_sums(dw[group], oracle.product(a[rows].T, b[rows].T), 15)
        start += size
