"""Products on a GPU: against an fp64 product of the exact operands, and rows that do not depend on
their batch.

What is not to be read (rows of no group) holds NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bits import needs_gpu, on_gpu

import jaxfp4
from jaxfp4 import products

pytestmark = needs_gpu

# fp32 sums of bf16 operands in another order than the oracle's: a few ulp of the sum of magnitudes.
SUM_TOLERANCE = 2.0**-20
BF16_ROUNDING = 2.0**-8

GROUPS = {
    "ragged": [5, 0, 64, 65, 128, 129, 1, 300],
    "empty first and last": [0, 40, 0, 700, 0],
    "one row each": [1] * 9,
    "all in one": [0, 0, 513, 0],
    "even": [64] * 6,
    "many": [3 * (i % 5) for i in range(257)],
}
SHAPES = [(16, 16), (256, 512), (192, 768), (328, 80), (1040, 2048)]


def bf16(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)


def assert_close(got: jax.Array, want: np.ndarray, magnitude: np.ndarray) -> None:
    error = np.abs(np.asarray(got, np.float64) - want)
    rounding = BF16_ROUNDING * np.abs(want) if got.dtype == jnp.bfloat16 else 0.0
    assert not np.isnan(np.asarray(got, np.float32)).any()
    assert (error <= SUM_TOLERANCE * magnitude + rounding + 1e-30).all()


def each_group(sizes: list[int]) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_products(groups, shape, dtype):
    sizes, (n, k) = GROUPS[groups], shape
    rng, unused = np.random.default_rng(0), 20
    used = sum(sizes)
    x, g = bf16(rng, used + unused, k), bf16(rng, used + unused, n)
    x, g = x.at[used:].set(jnp.nan), g.at[used:].set(jnp.nan)
    w, group_sizes = bf16(rng, len(sizes), n, k), jnp.asarray(sizes, jnp.int32)
    y = on_gpu(lambda *a: products.grouped_matmul(*a, dtype), x, w, group_sizes)
    dx = on_gpu(lambda *a: products.grouped_matmul_dx(*a, dtype), g, w, group_sizes)
    dw = on_gpu(lambda *a: products.grouped_matmul_dw(*a, dtype), g, x, group_sizes)
    x, g, w = (np.asarray(a, np.float64) for a in (x, g, w))
    for rows, weight, weight_gradient in zip(each_group(sizes), w, dw, strict=True):
        assert_close(y[rows], x[rows] @ weight.T, np.abs(x[rows]) @ np.abs(weight.T))
        assert_close(dx[rows], g[rows] @ weight, np.abs(g[rows]) @ np.abs(weight))
        magnitude = np.abs(g[rows].T) @ np.abs(x[rows])
        assert_close(weight_gradient, g[rows].T @ x[rows], magnitude)
    assert not np.asarray(y[used:], np.float32).any()
    assert not np.asarray(dx[used:], np.float32).any()


@pytest.mark.parametrize("rows", [1, 7, 64, 129, 4096])
@pytest.mark.parametrize("shape", [(256, 512), (2560, 2560), (328, 9728)], ids=str)
@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_a_row_of_linear_has_the_same_bits_in_any_batch(scope, shape, rows):
    n, k = shape
    rng = np.random.default_rng(1)
    x, w = bf16(rng, 4096, k), bf16(rng, n, k)
    recipe = jaxfp4.Recipe(jaxfp4.Quantizer("row"), jaxfp4.Quantizer(scope))
    whole = on_gpu(lambda x, w: jaxfp4.linear(x, w, recipe), x, w)
    part = on_gpu(lambda x, w: jaxfp4.linear(x, w, recipe), x[:rows], w)
    np.testing.assert_array_equal(np.asarray(part), np.asarray(whole[:rows]))
    sizes = jnp.asarray([0, rows, 0], jnp.int32)
    grouped = on_gpu(
        lambda x, w: jaxfp4.grouped_linear(x, w, sizes, recipe), x[:rows], jnp.stack([w, w, w])
    )
    np.testing.assert_array_equal(np.asarray(grouped), np.asarray(part))


def test_linear_multiplies_exact_operands():
    rng = np.random.default_rng(2)
    x, w = bf16(rng, 300, 512), bf16(rng, 384, 512)
    y = on_gpu(lambda x, w: jaxfp4.linear(x, w, out_dtype=jnp.float32), x, w)
    q_x, q_w = jaxfp4.quantize(x), jaxfp4.quantize(w, "tensor")
    a, b = (np.asarray(q.values(), np.float64) for q in (q_x, q_w))
    scale = np.asarray(q_x.scale, np.float64)[:, None] * float(q_w.scale)
    assert_close(y, a @ b.T * scale, np.abs(a) @ np.abs(b.T) * scale)


@pytest.mark.parametrize("sizes", [[-5, 10], [2**31 - 1, 2**31 - 1], [500, 500]], ids=str)
def test_group_sizes_that_are_not_legal_stay_inside_the_operands(sizes):
    rng = np.random.default_rng(3)
    x, w = bf16(rng, 100, 64), bf16(rng, 2, 32, 64)
    sizes = jnp.asarray(sizes, jnp.int32)
    y = on_gpu(lambda x, w, sizes: products.grouped_matmul(x, w, sizes, jnp.bfloat16), x, w, sizes)
    assert y.shape == (100, 32)


def test_operands_that_the_gpu_cannot_take_raise():
    x = jnp.ones((4, 64), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiples of 8, not 12 x 64"):
        on_gpu(
            lambda x, w: products.matmul(x, w, jnp.bfloat16), x, jnp.ones((12, 64), jnp.bfloat16)
        )
    with pytest.raises(jax.errors.JaxRuntimeError, match="bf16 operands"):
        on_gpu(
            lambda x, w: products.matmul(x, w, jnp.float32),
            jnp.ones((4, 64), jnp.float32),
            jnp.ones((16, 64), jnp.float32),
        )
