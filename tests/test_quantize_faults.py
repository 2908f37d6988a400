"""Faults that users of other NVFP4 quantizers met, each tried here with a small input."""

import functools
import io

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantizer_cases import assert_same_bytes, every_dtype, make

import jaxfp4
from jaxfp4 import reference

statistics = jax.jit(jaxfp4.statistics)


def fields(q: jaxfp4.Fp4Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return q.codes, q.block_scales, q.scale


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("pow2_scale", [False, True])
def test_a_zero_block_in_a_weight_is_zero_and_not_nan(scope, pow2_scale, four_over_six):
    w = np.random.default_rng(0).normal(0, 1e-3, (128, 64)).astype(np.float32)
    w[5, 16:32] = 0
    quantizer = jaxfp4.Quantizer(scope, pow2_scale, four_over_six)
    recipe = jaxfp4.Recipe(weight=quantizer)
    q = jaxfp4.prepare(jnp.asarray(w), recipe)

    # Written to a file and read back.
    file = io.BytesIO()
    np.savez(
        file, codes=q.codes, block_scales=np.asarray(q.block_scales).view(np.uint8), scale=q.scale
    )
    file.seek(0)
    stored = np.load(file)
    assert not np.isin(stored["block_scales"], [0x7F, 0xFF]).any()
    again = jaxfp4.Fp4Array(
        jnp.asarray(stored["codes"]),
        jnp.asarray(stored["block_scales"].view(jnp.float8_e4m3fn)),
        jnp.asarray(stored["scale"]),
    )
    values = np.asarray(again.dequantize(jnp.float32))
    np.testing.assert_array_equal(values[5, 16:32], 0)
    assert np.abs(values - w).max() < 1e-3
    x = jnp.ones((3, 64), jnp.bfloat16)
    y = jaxfp4.linear(x, jnp.asarray(w), recipe, quantized=again)
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_small_blocks_beside_a_large_amax():
    # Block scales are bmax * 2688 / 1e4 / 6. At 0.3 and 0.03 that is a subnormal e4m3 number, at
    # 0.01 and 0.001 it is less than half of the smallest, and the block becomes zero.
    x = np.zeros((2, 64), np.float32)
    x[0, :16] = 1e4
    x[1] = np.repeat([0.3, 0.03, 0.01, 0.001], 16)
    q = jaxfp4.quantize(x, "tensor")
    assert_same_bytes(fields(q), tuple(oracle.quantize(x, "tensor")))
    np.testing.assert_array_equal(np.asarray(q.block_scales).view(np.uint8)[1], [7, 1, 0, 0])
    values = np.asarray(q.dequantize(jnp.float32))
    np.testing.assert_array_equal(
        values, oracle.dequantize(oracle.quantize(x, "tensor")).astype(np.float32)
    )
    assert (values[1, 32:] == 0).all()
    assert np.isfinite(values).all()
    counts = statistics(x, q)
    assert counts["flushed_blocks"] == 2
    assert counts["subnormal_blocks"] == 2


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_an_all_zero_batch_leaves_nothing_behind(scope):
    recipe = jaxfp4.Recipe(activation=jaxfp4.Quantizer(scope))
    x, w = make("normal", "bfloat16")[0, :32], make("normal", "bfloat16")[1, :48]
    fresh = jax.jit(functools.partial(jaxfp4.linear, recipe=recipe))
    used = jax.jit(functools.partial(jaxfp4.linear, recipe=recipe))
    want = fresh(x, w)
    assert not np.asarray(used(jnp.zeros_like(x), w)).any()
    assert_same_bytes(used(x, w), want)
    assert np.isfinite(np.asarray(want, np.float32)).all()


def test_padding_is_not_in_the_block_scales():
    x = np.random.default_rng(0).standard_normal((130, 48), np.float32)
    q = jaxfp4.quantize(x)
    scales = np.asarray(q.block_scales).astype(np.float32)
    assert scales.shape == (130, 3)
    want = oracle.E4M3_VALUES[oracle.quantize(x).block_scales]
    assert scales.min() == want.min() > 0
    assert statistics(x, q)["flushed_blocks"] == 0


def all_largest(dtype: str) -> np.ndarray:
    x = np.ones((4, 64), inputs.DTYPES[dtype])
    return x * inputs.DTYPES[dtype].type(3.0)


@pytest.mark.parametrize("name", ["normal", "e2m1_midpoints", "zero", "all_largest"])
@every_dtype
def test_every_quantizer_gives_the_same_bytes(name, dtype):
    x = all_largest(dtype) if name == "all_largest" else make(name, dtype)
    want = tuple(oracle.quantize(x))
    assert_same_bytes(fields(jaxfp4.quantize(x)), want)
    assert_same_bytes(fields(jax.jit(jaxfp4.quantize)(x)), want)
    assert_same_bytes(jax.jit(reference.quantize)(x), want)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_a_platform_without_a_kernel_raises_when_lowered(platform):
    traced = jax.jit(lambda x: jaxfp4.quantize(x).codes).trace(jnp.ones((2, 32)))
    with pytest.raises(NotImplementedError, match=platform):
        traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("option", ["stochastic_rounding", "rounding"])
def test_an_option_that_is_not_built_raises(option):
    with pytest.raises(TypeError, match=option):
        jaxfp4.quantize(jnp.ones((2, 32)), **{option: True})
