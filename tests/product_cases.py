"""What the tests of linear and grouped_linear share: inputs, exact products, error bounds."""

import jax.numpy as jnp
import numpy as np

import jaxfp4

RECIPES = {
    "nvfp4": jaxfp4.NVFP4,
    "nvfp4-dequantized": jaxfp4.Recipe(backward="dequantized"),
    "weight-by-row": jaxfp4.Recipe(weight=jaxfp4.Quantizer("row")),
    "weight-by-row-dequantized": jaxfp4.Recipe(
        weight=jaxfp4.Quantizer("row"), backward="dequantized"
    ),
    "activation-by-tensor": jaxfp4.Recipe(activation=jaxfp4.Quantizer("tensor")),
    "pow2-four-over-six": jaxfp4.Recipe(
        jaxfp4.Quantizer("row", pow2_scale=True, four_over_six=True),
        jaxfp4.Quantizer("tensor", pow2_scale=True, four_over_six=True),
    ),
    "unquantized": jaxfp4.UNQUANTIZED,
}


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32, scale: float = 1.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(values).astype(dtype)


def f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def bytes_of(x) -> np.ndarray:
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def assert_same_bits(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(bytes_of(actual), bytes_of(expected))


def assert_product(actual, a: np.ndarray, b: np.ndarray):
    """actual [M, N] is a [M, K] times b [N, K] transposed, up to fp32 sums and its own rounding.

    K additions in fp32 err by at most K * 2^-24 of the sum of magnitudes; two more roundings are
    those of the fp32 scales; the result is then rounded to its dtype.
    """
    exact = a @ b.T
    magnitude = np.abs(a) @ np.abs(b).T
    rounding = 2.0**-8 if actual.dtype == jnp.bfloat16 else 2.0**-24
    bound = (a.shape[1] + 4) * 2.0**-24 * magnitude * (1 + rounding) + rounding * np.abs(exact)
    error = np.abs(f64(actual) - exact)
    assert (error <= bound + 2.0**-126).all(), (error / (bound + 2.0**-126)).max()
