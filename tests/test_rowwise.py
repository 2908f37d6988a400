"""RMSNorm, SwiGLU, QK-norm with RoPE and residual additions against plain fp64 formulas."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fp64 import op_value_and_gradients, value_and_gradients
from tolerances import assert_close

import jaxfp4

EPS = 1e-6
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
both_dtypes = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def normal(seed, shape, dtype="fp32", scale=1.0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(x).astype(DTYPES[dtype])


def check(op, formula, operands, dtype, y_shape):
    """Value and gradients of op(*operands) against the formula's."""
    dy = normal(99, y_shape, dtype)
    y, gradients = op_value_and_gradients(op, operands, dy)
    expected_y, expected_gradients = value_and_gradients(formula, operands, dy)
    assert y.dtype == operands[0].dtype
    assert_close(y, expected_y, f"row_{dtype}")
    for operand, gradient, expected in zip(operands, gradients, expected_gradients, strict=True):
        assert gradient.dtype == operand.dtype
        suffix = "bf16" if gradient.dtype == jnp.bfloat16 else "fp32"
        assert_close(gradient, expected, f"row_grad_{suffix}")


def norm(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


@both_dtypes
@pytest.mark.parametrize("weight_dtype", ["fp32", "bf16"])
def test_rmsnorm(dtype, weight_dtype):
    x, weight = normal(0, (3, 5, 200), dtype, 4.0), normal(1, (200,), weight_dtype)
    check(lambda x, w: jaxfp4.rmsnorm(x, w, eps=EPS), norm, [x, weight], dtype, x.shape)


@both_dtypes
def test_rmsnorm_of_a_zero_row_is_zero(dtype):
    y = jaxfp4.rmsnorm(jnp.zeros((2, 64), DTYPES[dtype]), normal(1, (64,)), eps=EPS)
    assert not np.asarray(y, np.float32).any()


@both_dtypes
def test_swiglu(dtype):
    x = normal(0, (7, 2 * 75), dtype, 4.0)
    x = x.at[0, :4].set(jnp.asarray([-200, 200, 0, -80], x.dtype))  # gates where exp overflows

    def formula(x):
        gate, up = jnp.split(x, 2, axis=-1)
        return gate / (1 + jnp.exp(-gate)) * up

    check(jaxfp4.swiglu, formula, [x], dtype, (7, 75))


@both_dtypes
@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope(dtype, with_norm):
    x = normal(0, (2, 6, 3, 20), dtype, 4.0)
    positions = jnp.asarray(np.random.default_rng(1).integers(-5, 40000, (2, 6)), jnp.int32)
    inv_freq = jnp.asarray(1e6 ** (-np.arange(10) / 10), jnp.float32)
    # The angle itself is an fp32 product; everything after it is exact in the oracle.
    angle = np.asarray(positions, np.float32)[..., None, None] * np.asarray(inv_freq)
    angle = angle.astype(np.float64)
    cosine, sine = np.cos(angle), np.sin(angle)

    def formula(x, weight=None):
        first, second = jnp.split(x if weight is None else norm(x, weight), 2, axis=-1)
        return jnp.concatenate(
            [first * cosine - second * sine, second * cosine + first * sine], axis=-1
        )

    def op(x, weight=None):
        return jaxfp4.qk_norm_rope(x, weight, positions, inv_freq, eps=EPS)

    operands = [x, normal(2, (20,))] if with_norm else [x]
    check(op, formula, operands, dtype, x.shape)


def test_angles_of_far_positions():
    """cos and sin, read off the rotation of (1, 0), up to the largest positions models use."""
    positions = np.arange(0, 2**20, 37, dtype=np.int32)
    x = jnp.broadcast_to(jnp.asarray([1.0, 0.0], jnp.float32), (positions.size, 1, 2))
    y = jaxfp4.qk_norm_rope(x, None, jnp.asarray(positions), jnp.ones(1, jnp.float32), eps=EPS)
    angle = positions.astype(np.float64)
    assert_close(y[:, 0], np.stack([np.cos(angle), np.sin(angle)], axis=-1), "angle")


@both_dtypes
def test_residual_add_rounds_each_sum(dtype):
    """A chain of additions in one program, which XLA by itself would keep in fp32."""
    x = normal(0, (3, 400), dtype)
    rounded = np.float32 if dtype == "fp32" else ml_dtypes.bfloat16

    @jax.jit
    def chain(x):
        y = jaxfp4.residual_add(x[0], x[1])
        return jaxfp4.residual_add(y, x[2])

    wide = np.asarray(x, np.float32)
    expected = ((wide[0] + wide[1]).astype(rounded).astype(np.float32) + wide[2]).astype(rounded)
    np.testing.assert_array_equal(np.asarray(chain(x)), expected)


@both_dtypes
def test_residual_add_gradient(dtype):
    x, dy = normal(0, (2, 40), dtype), normal(1, (40,), dtype)
    _, gradients = op_value_and_gradients(jaxfp4.residual_add, [x[0], x[1]], dy)
    for gradient in gradients:
        np.testing.assert_array_equal(np.asarray(gradient), np.asarray(dy))


@both_dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(dtype, bad):
    x = normal(0, (4, 64), dtype)
    spoiled = x.at[2, 5].set(bad)
    positions, inv_freq = jnp.arange(4, dtype=jnp.int32), jnp.ones(32, jnp.float32)
    for op in (
        lambda x: jaxfp4.rmsnorm(x, normal(1, (64,)), eps=EPS),
        jaxfp4.swiglu,
        lambda x: jaxfp4.qk_norm_rope(x[:, None], None, positions, inv_freq, eps=EPS),
    ):
        before, after = np.asarray(op(x)), np.asarray(op(spoiled))
        others = [0, 1, 3]
        assert before[others].tobytes() == after[others].tobytes()
        assert not np.isfinite(after[2].astype(np.float32)).all()


BF16_4x6 = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
FP32_6 = jax.ShapeDtypeStruct((6,), jnp.float32)


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        (jaxfp4.rmsnorm, [BF16_4x6, jax.ShapeDtypeStruct((5,), jnp.float32)], r"weight.*\(6,\)"),
        (jaxfp4.rmsnorm, [jax.ShapeDtypeStruct((4, 6), jnp.int32), FP32_6], "x must be bfloat16"),
        (jaxfp4.rmsnorm, [jax.ShapeDtypeStruct((), jnp.float32), FP32_6], "x must have at least"),
    ],
)
def test_rmsnorm_says_what_is_wrong(op, operands, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jax.eval_shape(lambda x, w: op(x, w, eps=EPS), *operands)


def test_swiglu_and_residual_add_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"even last axis, got \(4, 5\)"):
        jaxfp4.swiglu(jnp.zeros((4, 5), jnp.float32))
    with pytest.raises(ValueError, match=r"y must be bfloat16 of shape \(4, 6\)"):
        jaxfp4.residual_add(jnp.zeros((4, 6), jnp.bfloat16), jnp.zeros((4, 6), jnp.float32))


@pytest.mark.parametrize(
    ("x", "weight", "positions", "inv_freq", "message"),
    [
        ((4, 2, 6), (6,), (3,), (3,), r"positions must be int32 of shape \(4,\)"),
        ((4, 2, 6), (6,), (4,), (4,), r"inv_freq must be float32 of shape \(3,\)"),
        ((4, 2, 6), (3,), (4,), (3,), r"weight must have shape \(6,\)"),
        ((4, 2, 5), (5,), (4,), (2,), r"even last axis.*\(4, 2, 5\)"),
        ((6,), (6,), (), (3,), "at least 2 axes"),
    ],
)
def test_qk_norm_rope_says_what_is_wrong(x, weight, positions, inv_freq, message):
    def float32(shape):
        return jnp.zeros(shape, jnp.float32)

    with pytest.raises(ValueError, match=message):
        jaxfp4.qk_norm_rope(
            float32(x), float32(weight), jnp.zeros(positions, jnp.int32), float32(inv_freq), eps=EPS
        )
